//! How quantised weights lie in memory: panels of 16 rows, one contiguous stream each, derived from
//! [`BlockFormat`].
//!
//! ```text
//! panel   groups of 256 columns (the last may be shorter)
//! group   head: scales (and mins) of its n blocks of 32 columns, padded to 64 bytes; then the codes of each block
//! head    ScaleKind::Half:   n x 16 f16 d, then n x 16 f16 min; of blocks of 64 columns half as many, and with ScaleKind::Brain bf16
//!         ScaleKind::Super:  16 f16 d, 16 f16 min, then per sub-block 16 i8 scales, then per sub-block 16 i8 mins
//! codes   64 bytes per bit: a plane of 8 or 4 or 2 bits, then the plane of the bits above
//! ```
//!
//! Without [`Offset::Min`] the mins are absent. The columns of a block form 8 quads; byte `4 r + e`
//! of a quad is row `r`, column `e`. The 8-bit plane is the quads. In the 4-bit plane, 64 bytes
//! hold quad `q` low and quad `q + 4` high; in the 2-bit plane quads `4 p ..= 4 p + 3` from the low
//! end; in the 1-bit plane all eight. So a load of 64 bytes, a shift and a mask give what a
//! four-way byte dot product wants, for 16 rows at once. Codes that index a table are looked up on
//! the way.

use super::lanes::Lanes;
use super::product::Source;
use super::{BLOCK, LINE, ROWS, prefetch};
use formats::quant::{BlockFormat, Offset, Parts, ScaleKind, plain};
use std::marker::PhantomData;
use std::ops::Range;

/// Blocks of 32 columns per group.
pub(super) const GROUP: usize = 8;

/// How far ahead of the reads weights are prefetched, in bytes: beyond the reach of the hardware
/// prefetcher.
pub(super) const AHEAD: usize = 4096;

/// The panel layout of a block format, and the [`Source`] that reads it in place.
pub(super) struct Packed<B>(PhantomData<B>);

impl<B: BlockFormat> Packed<B> {
    const BITS: usize = B::AFFINE.bits as usize;
    /// Bits of the values that codes represent.
    const VALUE_BITS: usize = B::AFFINE.value_bits() as usize;
    /// The values that codes represent, as unsigned and as signed bytes.
    const TABLES: Option<[[u8; 16]; 2]> = match B::AFFINE.table {
        Some(unsigned) => {
            let (mut signed, mut i) = (unsigned, 0);
            while i < signed.len() {
                signed[i] ^= 0x80;
                i += 1;
            }
            Some([unsigned, signed])
        }
        None => None,
    };
    /// Columns that share a scale within a block of 32.
    pub(super) const SUB: usize = if B::AFFINE.sub < BLOCK { B::AFFINE.sub } else { BLOCK };
    /// Blocks of 32 that share a scale.
    const SPAN: usize = B::AFFINE.sub / Self::SUB;
    const BRAIN: bool = matches!(B::AFFINE.scale, ScaleKind::Brain);
    const MINS: bool = matches!(B::AFFINE.offset, Offset::Min);
    const SUPER: bool = matches!(B::AFFINE.scale, ScaleKind::Super);
    /// Number of arrays of scales and mins.
    const KINDS: usize = 1 + Self::MINS as usize;
    /// Bytes of a block's codes.
    const CODES: usize = 64 * Self::BITS;
    /// The zero point; 0 for formats with mins.
    pub(super) const ZERO: u8 = match B::AFFINE.offset {
        Offset::Zero(zero) => zero,
        Offset::Min => 0,
    };
    /// Requirements of this layout; a violation fails the build of the kernels that name the
    /// format.
    pub(super) const VALID: () = {
        assert!(matches!(Self::BITS, 2..=6 | 8) && matches!(Self::SUB, 16 | 32));
        assert!(if Self::SUPER {
            B::ELEMENTS == BLOCK * GROUP
        } else {
            B::ELEMENTS == B::AFFINE.sub && Self::SUB == BLOCK && GROUP.is_multiple_of(Self::SPAN)
        });
        assert!(Self::MINS || Self::ZERO.is_power_of_two());
        assert!(Self::TABLES.is_none() || (Self::BITS == 4 && !Self::MINS));
    };

    /// Bytes before the codes of a group of `blocks`.
    const fn head(blocks: usize) -> usize {
        let bytes = match Self::SUPER {
            true => Self::KINDS * (2 * ROWS + GROUP * (BLOCK / Self::SUB) * ROWS),
            false => Self::KINDS * blocks.div_ceil(Self::SPAN) * 2 * ROWS,
        };
        bytes.next_multiple_of(64)
    }

    /// Bytes of a group of `blocks`.
    const fn group_bytes(blocks: usize) -> usize {
        Self::head(blocks) + blocks * Self::CODES
    }

    /// The distance, in bytes and wrapping, from a group of `groups`, which are read in order, to
    /// the one read about [`AHEAD`] bytes later: in the same panel or, after the last group, in the
    /// panel `next` bytes further.
    fn ahead(g: usize, groups: &Range<usize>, next: usize) -> usize {
        let bytes = Self::group_bytes(GROUP);
        let distance = ((AHEAD + bytes / 2) / bytes).max(1);
        if g + distance < groups.end {
            return distance * bytes;
        }
        next.wrapping_add(distance * bytes).wrapping_sub(groups.len() * bytes)
    }

    /// Bytes of a panel whose rows have `blocks` blocks of 32; a multiple of 64.
    pub(super) fn panel_bytes(blocks: usize) -> usize {
        let rest = match blocks % GROUP {
            0 => 0,
            rest => Self::group_bytes(rest),
        };
        blocks / GROUP * Self::group_bytes(GROUP) + rest
    }

    /// Opens group `g` of a panel of `total` blocks; returns it with its number of blocks. `groups`
    /// is the range of this panel's groups that is read before the next panel's.
    ///
    /// # Safety
    /// The panel holds the group, and the processor has `L`.
    #[inline(always)]
    pub(super) unsafe fn open<L: Lanes>(
        panel: *const u8,
        total: usize,
        g: usize,
        groups: &Range<usize>,
    ) -> (Group<L::Floats>, usize) {
        let blocks = GROUP.min(total - g * GROUP);
        let ahead = Self::ahead(g, groups, Self::panel_bytes(total));
        // SAFETY: the caller's promise.
        unsafe { (<Self as Source<L>>::group(panel, g, blocks, ahead), blocks) }
    }

    /// 16 scales or offsets.
    ///
    /// # Safety
    /// 32 bytes are readable and the processor has `L`.
    #[inline(always)]
    unsafe fn half<L: Lanes>(at: *const u8) -> L::Floats {
        // SAFETY: passed on.
        unsafe { if Self::BRAIN { L::load_bf16(at.cast()) } else { L::load_f16(at.cast()) } }
    }

    /// Packs up to 16 rows of whole blocks (`B::BYTES` each); rows that are absent become zeros.
    pub(super) fn pack(rows: &[&[u8]], panel: &mut [u8]) {
        let () = Self::VALID;
        let mut parts: [Parts; ROWS] = std::array::from_fn(|_| Parts::default());
        let blocks = rows[0].len() / B::BYTES * (B::ELEMENTS / BLOCK);
        for first in (0..blocks).step_by(GROUP) {
            let n = GROUP.min(blocks - first);
            let at = first / GROUP * Self::group_bytes(GROUP);
            let (head, codes) = panel[at..at + Self::group_bytes(n)].split_at_mut(Self::head(n));
            for (b, codes) in codes.chunks_exact_mut(Self::CODES).enumerate() {
                let within = b % (B::ELEMENTS / BLOCK);
                if within == 0 {
                    let source = (first + b) / (B::ELEMENTS / BLOCK) * B::BYTES;
                    for (row, parts) in rows.iter().zip(&mut parts) {
                        B::split(&row[source..source + B::BYTES], parts);
                    }
                    Self::pack_head(&parts, b, n, head);
                }
                Self::pack_codes(&parts, within * BLOCK, codes);
            }
        }
    }

    /// Scales and mins of the source block that starts at block `b` of a group of `n`.
    fn pack_head(parts: &[Parts; ROWS], b: usize, n: usize, head: &mut [u8]) {
        for (r, parts) in parts.iter().enumerate() {
            let mut half = |at: usize, bits: u16| {
                head[at + 2 * r..at + 2 * r + 2].copy_from_slice(&bits.to_le_bytes());
            };
            if !Self::SUPER {
                let (b, n) = (b / Self::SPAN, n.div_ceil(Self::SPAN));
                half(b * 32, parts.d);
                if Self::MINS {
                    half((n + b) * 32, parts.min);
                }
                continue;
            }
            half(0, parts.d);
            if Self::MINS {
                half(32, parts.min);
            }
            let (subs, first) = (GROUP * BLOCK / Self::SUB, 32 * Self::KINDS);
            for i in 0..subs {
                head[first + i * ROWS + r] = parts.scales[i] as u8;
                if Self::MINS {
                    head[first + (subs + i) * ROWS + r] = parts.mins[i] as u8;
                }
            }
        }
    }

    /// Columns `column..column + 32` of 16 rows into bit planes.
    fn pack_codes(parts: &[Parts; ROWS], column: usize, planes: &mut [u8]) {
        let mut quads = [[0u32; ROWS]; BLOCK / 4];
        for (r, parts) in parts.iter().enumerate() {
            for (quad, codes) in
                quads.iter_mut().zip(parts.codes[column..column + BLOCK].chunks_exact(4))
            {
                quad[r] = u32::from_le_bytes([codes[0], codes[1], codes[2], codes[3]]);
            }
        }
        // Writes bits `from..from + bits` of quads `first, first + step, ...`, the first lowest, to
        // 64 bytes of the planes.
        let mut planes = planes.chunks_exact_mut(64);
        let mut put = |first: usize, step: usize, from: usize, bits: usize| {
            let mask = 0x0101_0101 * (0xff >> (8 - bits));
            let mut plane = [0u32; ROWS];
            for k in 0..8 / bits {
                for (word, quad) in plane.iter_mut().zip(quads[first + k * step]) {
                    *word |= (quad >> from & mask) << (k * bits);
                }
            }
            if let Some(bytes) = planes.next() {
                bytes.copy_from_slice(plane.map(u32::to_le_bytes).as_flattened());
            }
        };
        let low = match Self::BITS {
            8 => 8,
            4..=6 => 4,
            _ => 2,
        };
        match low {
            8 => (0..8).for_each(|q| put(q, 1, 0, 8)),
            4 => (0..4).for_each(|q| put(q, 4, 0, 4)),
            _ => (0..2).for_each(|p| put(4 * p, 1, 0, 2)),
        }
        match Self::BITS - low {
            2 => (0..2).for_each(|p| put(4 * p, 1, low, 2)),
            1 => put(0, 1, low, 1),
            _ => {}
        }
    }

    /// Decodes blocks of row `r` of a panel of `blocks`, from the `start`-th on, exactly as the
    /// source block does.
    pub(super) fn row(panel: &[u8], r: usize, start: usize, blocks: usize, out: &mut [f32]) {
        for (i, out) in (start..blocks).zip(out.chunks_exact_mut(BLOCK)) {
            let (first, b) = (i / GROUP * GROUP, i % GROUP);
            let n = GROUP.min(blocks - first);
            let group = &panel[i / GROUP * Self::group_bytes(GROUP)..];
            let codes = &group[Self::head(n) + b * Self::CODES..][..Self::CODES];
            let half = |at: usize| {
                let bits = u16::from_le_bytes([group[at + 2 * r], group[at + 2 * r + 1]]);
                if Self::BRAIN { plain::bf16_to_f32(bits) } else { plain::f16_to_f32(bits) }
            };
            for (h, out) in out.chunks_exact_mut(Self::SUB).enumerate() {
                let (scale, offset) = if Self::SUPER {
                    let (subs, sub) = (GROUP * BLOCK / Self::SUB, b * (BLOCK / Self::SUB) + h);
                    let byte = |i: usize| f32::from(group[32 * Self::KINDS + i * ROWS + r] as i8);
                    let offset = if Self::MINS { -(half(32) * byte(subs + sub)) } else { 0.0 };
                    (half(0) * byte(sub), offset)
                } else {
                    let (b, n) = (b / Self::SPAN, n.div_ceil(Self::SPAN));
                    (half(b * 32), if Self::MINS { half((n + b) * 32) } else { 0.0 })
                };
                for (c, w) in out.iter_mut().enumerate() {
                    let code = Self::code(codes, r, h * Self::SUB + c);
                    let value = i32::from(B::AFFINE.value(code)) - i32::from(Self::ZERO);
                    *w = scale * value as f32 + offset;
                }
            }
        }
    }

    /// The code of row `r`, column `c` of a block.
    #[inline(always)]
    fn code(planes: &[u8], r: usize, c: usize) -> u8 {
        let (q, byte) = (c / 4, 4 * r + c % 4);
        let four = || planes[64 * (q % 4) + byte] >> (4 * (q / 4)) & 15;
        let two = |at: usize| planes[at + 64 * (q / 4) + byte] >> (2 * (q % 4)) & 3;
        let one = |at: usize| planes[at + byte] >> q & 1;
        match Self::BITS {
            8 => planes[64 * q + byte],
            6 => four() | two(256) << 4,
            5 => four() | one(256) << 4,
            4 => four(),
            3 => two(0) | one(128) << 2,
            _ => two(0),
        }
    }
}

/// An opened group of a panel: the addresses of its parts, and the values shared by its blocks.
#[derive(Clone, Copy)]
pub(super) struct Group<F> {
    head: *const u8,
    codes: *const u8,
    blocks: usize,
    ahead: usize,
    d: F,
    min: F,
}

impl<L: Lanes, B: BlockFormat> Source<L> for Packed<B> {
    type Group = Group<L::Floats>;
    const SUB: usize = Self::SUB;
    const OFFSETS: bool = Self::MINS;
    const LOWERED: bool = L::SIGNED && Self::BITS == 8 && Self::MINS;
    const ZERO: u8 = if L::SIGNED && Self::VALUE_BITS == 8 { 0 } else { Self::ZERO };
    const BITS: usize = Self::VALUE_BITS;

    #[inline(always)]
    fn ahead(g: usize, blocks: usize, panels: usize) -> usize {
        Self::ahead(g, &(0..blocks.div_ceil(GROUP)), panels * Self::panel_bytes(blocks))
    }
    #[inline(always)]
    unsafe fn group(panel: *const u8, g: usize, blocks: usize, ahead: usize) -> Self::Group {
        // SAFETY: the caller has a panel with a group `g` of `blocks` blocks.
        unsafe {
            let head = panel.add(g * Self::group_bytes(GROUP));
            let bytes = Self::head(blocks);
            for line in 0..Self::head(GROUP) / LINE {
                prefetch(head.wrapping_add(ahead).wrapping_add(LINE * line));
            }
            let mut group = Group {
                head,
                codes: head.add(bytes),
                blocks,
                ahead,
                d: L::splat(0.0),
                min: L::splat(0.0),
            };
            if Self::SUPER {
                group.d = L::load_f16(head.cast());
                if Self::MINS {
                    group.min = L::mul(L::load_f16(head.add(32).cast()), L::splat(-1.0));
                }
            }
            group
        }
    }

    #[inline(always)]
    unsafe fn fetch(group: Self::Group, b: usize) {
        for line in 0..Self::CODES / LINE {
            let codes = group.codes.wrapping_add(group.ahead);
            prefetch(codes.wrapping_add(b * Self::CODES + LINE * line));
        }
    }

    #[inline(always)]
    unsafe fn quad(group: Self::Group, b: usize, q: usize) -> L::Bytes {
        // SAFETY: the planes of block `b` hold quads 0..8, see the layout.
        unsafe {
            let planes = group.codes.add(b * Self::CODES);
            // Bits of a plane at `at`, whose 64 bytes hold `per` quads, moved to bit `to`.
            macro_rules! bits {
                ($at:expr, $line:expr, $from:expr, $mask:expr, $to:expr) => {{
                    let (v, from, to) =
                        (L::bytes(planes.add($at + 64 * $line)), $from as u32, $to as u32);
                    let moved = if from > to { L::shr(v, from - to) } else { L::shl(v, to - from) };
                    L::and(moved, $mask << to)
                }};
            }
            match Self::BITS {
                // Stored codes have zero point 128, or get it: flipping the top bit, by addition,
                // removes it.
                8 if L::SIGNED => L::add_byte(L::bytes(planes.add(64 * q)), 128),
                8 => L::bytes(planes.add(64 * q)),
                6 => {
                    L::or(bits!(0, q % 4, 4 * (q / 4), 15, 0), bits!(256, q / 4, 2 * (q % 4), 3, 4))
                }
                5 => L::or(bits!(0, q % 4, 4 * (q / 4), 15, 0), bits!(256, 0, q, 1, 4)),
                4 => {
                    let codes = bits!(0, q % 4, 4 * (q / 4), 15, 0);
                    match const { &Self::TABLES } {
                        Some([_, signed]) if L::SIGNED && Self::VALUE_BITS == 8 => {
                            L::look_up(codes, signed)
                        }
                        Some([unsigned, _]) => L::look_up(codes, unsigned),
                        None => codes,
                    }
                }
                3 => L::or(bits!(0, q / 4, 2 * (q % 4), 3, 0), bits!(128, 0, q, 1, 2)),
                _ => bits!(0, q / 4, 2 * (q % 4), 3, 0),
            }
        }
    }

    #[inline(always)]
    unsafe fn scale(group: Self::Group, b: usize, h: usize) -> L::Floats {
        // SAFETY: the head holds the scales of sub-block `h` of block `b`, see the layout.
        unsafe {
            if Self::SUPER {
                let sub = b * (BLOCK / Self::SUB) + h;
                L::mul(group.d, L::load_i8(group.head.add(32 * Self::KINDS + sub * ROWS).cast()))
            } else {
                Self::half::<L>(group.head.add(b / Self::SPAN * 32))
            }
        }
    }

    #[inline(always)]
    unsafe fn offset(group: Self::Group, b: usize, h: usize) -> L::Floats {
        // SAFETY: formats with offsets have mins after the scales, see the layout.
        unsafe {
            if Self::SUPER {
                let subs = GROUP * BLOCK / Self::SUB;
                let sub = subs + b * (BLOCK / Self::SUB) + h;
                L::mul(group.min, L::load_i8(group.head.add(32 * Self::KINDS + sub * ROWS).cast()))
            } else {
                let scales = group.blocks.div_ceil(Self::SPAN);
                Self::half::<L>(group.head.add((scales + b / Self::SPAN) * 32))
            }
        }
    }
}
