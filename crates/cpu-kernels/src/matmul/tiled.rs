//! Products of two activations on the tile unit, which both are rounded to bf16: gradients of
//! weights, `dW = dy' x`, and attention's in training. Either side is packed in tiles first
//! ([`pack`]), whichever of its axes is the depth of the product. Sums are f32.

#[cfg(target_arch = "x86_64")]
use super::{
    super::amx::{self as unit, DEPTH, Run, SIDE, TILE},
    amx,
};
use super::{Isa, Output, Scratch};

/// Rows of f32: the first one's elements, and the distance from one row to the next.
#[derive(Debug, Clone, Copy)]
pub struct StridedRows {
    /// Row 0, column 0.
    pub start: *const f32,
    /// f32 from one row to the next.
    pub stride: usize,
}

/// The side of a product that is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first operand, whose rows are the result's rows.
    Left,
    /// The second operand, whose columns are the result's columns.
    Right,
}

/// A packed side: tiles along its depth, 16 elements of the result's axis after 16 others.
#[derive(Debug, Clone, Copy)]
pub struct PackedSide {
    /// The first tile.
    pub start: *const u8,
    /// Tiles along the whole depth.
    pub depth: usize,
}

impl PackedSide {
    /// Depth of a tile.
    pub const DEPTH: usize = 32;
    /// Elements of the result's axis that are packed together.
    pub const SIDE: usize = 32;

    /// Bytes of a packed side of `side` elements and `depth` terms.
    pub const fn bytes(side: usize, depth: usize) -> usize {
        side.next_multiple_of(PackedSide::SIDE) * depth.next_multiple_of(PackedSide::DEPTH) * 2
    }

    /// The side without its first elements along the depth, and along the other axis: multiples of
    /// [`PackedSide::DEPTH`] and [`PackedSide::SIDE`].
    pub fn from(self, side: usize, depth: usize) -> PackedSide {
        debug_assert!(
            side.is_multiple_of(PackedSide::SIDE) && depth.is_multiple_of(PackedSide::DEPTH)
        );
        let tiles = side / 16 * self.depth + depth / PackedSide::DEPTH;
        PackedSide { start: self.start.wrapping_add(1024 * tiles), ..self }
    }
}

/// Whether an instruction set has the unit.
pub fn tiles_halves(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa == Isa::Amx;
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// Packs one side of a product, `[side, depth]`, into [`PackedSide::bytes`] bytes; zeros fill whole
/// tiles. `along`: the depth goes along the rows, which then are as many as `side`; else across
/// them.
///
/// # Safety
/// The rows are readable and the bytes writable; nothing else uses the bytes.
///
/// # Panics
/// Unless [`tiles_halves`].
pub unsafe fn pack(
    isa: Isa,
    of: StridedRows,
    [side, depth]: [usize; 2],
    (along, place): (bool, Side),
    to: *mut u8,
) -> PackedSide {
    assert!(tiles_halves(isa));
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the unit's processors have the instructions; the rest is the caller's promise.
    unsafe {
        x86::pack(of, [side, depth], (along, place), to);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (of, side, along, place);
    PackedSide { start: to, depth: depth.div_ceil(PackedSide::DEPTH) }
}

/// `out[i][j] (+)= sum over k of left[i][k] right[k][j]` of `[m, n, k]`, the first `k` of both
/// depths. An element's bits follow from `k` and what it sums alone.
///
/// # Safety
/// The sides were packed with as many elements and as deep; `out` has `m` rows of `n`, which no
/// other thread uses.
///
/// # Panics
/// Unless [`tiles_halves`].
pub unsafe fn multiply_packed(
    isa: Isa,
    [left, right]: [PackedSide; 2],
    [m, n, k]: [usize; 3],
    out: Output,
    adds: bool,
    scratch: &mut Scratch,
) {
    assert!(tiles_halves(isa));
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the unit is there; the scratch has room for 4 tiles behind the slab; the rest is the
    // caller's promise.
    unsafe {
        unit::configure();
        x86::multiply([left, right], [m, n, k], out, adds, scratch.0.as_ptr().add(amx::SLAB));
        unit::release();
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (left, right, m, n, k, out, adds, scratch);
}

/// Most columns of either side of [`outer`], and most rows, that are packed together: less than a
/// scratch has room for.
const OUTER: [usize; 3] = [128, 256, 512];

/// `out[i][j] (+)= sum over t of a[t][i] b[t][j]` of `[m, n, rows]`.
///
/// # Safety
/// `a` has `rows` rows of `m` elements and `b` of `n`, all readable; `out` has `m` rows of `n`,
/// which no other thread uses.
///
/// # Panics
/// Unless [`tiles_halves`].
pub unsafe fn outer(
    isa: Isa,
    [a, b]: [StridedRows; 2],
    [m, n, rows]: [usize; 3],
    out: Output,
    adds: bool,
    scratch: &mut Scratch,
) {
    let [tall, wide, deep] = OUTER;
    let room = scratch.0.as_ptr();
    if rows == 0 && !adds {
        for i in 0..m {
            // SAFETY: the caller's promise.
            unsafe { out.start.add(i * out.stride).write_bytes(0, n) };
        }
    }
    for i in (0..m).step_by(tall) {
        for j in (0..n).step_by(wide) {
            for first in (0..rows).step_by(deep) {
                let [m, n, k] = [tall.min(m - i), wide.min(n - j), deep.min(rows - first)];
                let side = |of: StridedRows, column: usize| StridedRows {
                    start: of.start.wrapping_add(first * of.stride + column),
                    ..of
                };
                let start = out.start.wrapping_add(i * out.stride + j);
                let (to, adds) = (Output { start, ..out }, adds || first > 0);
                // SAFETY: both sides fit the scratch's slab, one behind the other; the rest is the
                // caller's promise.
                unsafe {
                    let right = room.add(PackedSide::bytes(tall, deep));
                    let left = pack(isa, side(a, i), [m, k], (false, Side::Left), room);
                    let right = pack(isa, side(b, j), [n, k], (false, Side::Right), right);
                    multiply_packed(isa, [left, right], [m, n, k], to, adds, scratch);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// See [`super::pack`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn pack(
        of: StridedRows,
        [side, depth]: [usize; 2],
        (along, place): (bool, Side),
        to: *mut u8,
    ) {
        let tiles = depth.div_ceil(DEPTH);
        for i in 0..side.next_multiple_of(PackedSide::SIDE) / SIDE {
            for t in 0..tiles {
                let (first, deep) = (i * SIDE, t * DEPTH);
                // SAFETY: what is loaded is inside the rows; the caller promises the tile.
                unsafe {
                    let to = to.add((i * tiles + t) * TILE);
                    // As rows of a left tile, or of a right one.
                    let rows = match along {
                        true => long_rows(of, [first, deep], [side, depth]),
                        false => pairs_of_rows(of, [first, deep], [side, depth]),
                    };
                    if along == (place == Side::Left) {
                        for (row, words) in rows.into_iter().enumerate() {
                            _mm512_storeu_si512(to.add(64 * row).cast(), words);
                        }
                    } else {
                        for (i, half) in rows.as_chunks().0.iter().enumerate() {
                            turn(*half, to.add(32 * i));
                        }
                    }
                }
            }
        }
    }

    /// Up to 16 lanes of 16.
    fn mask(lanes: usize) -> u16 {
        if lanes >= 16 { u16::MAX } else { (1 << lanes) - 1 }
    }

    /// 16 rows, 32 elements of each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn long_rows(of: StridedRows, at: [usize; 2], size: [usize; 2]) -> [__m512i; 16] {
        let [rows, columns] = [0, 1].map(|i| size[i].saturating_sub(at[i]));
        let masks = [mask(columns), mask(columns.saturating_sub(16))];
        let mut words = [_mm512_setzero_si512(); 16];
        for (r, words) in words[..rows.min(16)].iter_mut().enumerate() {
            let start = of.start.wrapping_add((at[0] + r) * of.stride + at[1]);
            // SAFETY: lanes outside of the masks are not read.
            unsafe {
                let first = _mm512_maskz_loadu_ps(masks[0], start);
                let second = _mm512_maskz_loadu_ps(masks[1], start.wrapping_add(16));
                *words = unit::row(first, second);
            }
        }
        words
    }

    /// 16 pairs of rows, 16 elements of each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn pairs_of_rows(of: StridedRows, at: [usize; 2], size: [usize; 2]) -> [__m512i; 16] {
        let [columns, rows] = [0, 1].map(|i| size[i].saturating_sub(at[i]));
        let mut words = [_mm512_setzero_si512(); 16];
        for (pair, words) in words.iter_mut().enumerate() {
            let load = |r: usize| {
                let mask = if r < rows { mask(columns) } else { 0 };
                let start = of.start.wrapping_add((at[1] + r) * of.stride + at[0]);
                // SAFETY: lanes outside of the mask are not read.
                unsafe { _mm512_maskz_loadu_ps(mask, start) }
            };
            *words = unit::pair(load(2 * pair), load(2 * pair + 1));
        }
        words
    }

    /// The transpose of 8 rows of 16 words: 16 rows of 8, 64 bytes apart.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn turn(rows: [__m512i; 8], to: *mut u8) {
        let quads = unit::quads(rows);
        // Lane `l` of `quads[c]` and of `quads[4 + c]` are the halves of row `4 l + c`.
        for c in 0..4 {
            let (a, b) = (quads[c], quads[4 + c]);
            let low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
            let high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
            let parts = [low, high].map(|order| _mm512_permutex2var_epi64(a, order, b));
            for (i, two) in parts.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let place = |row: usize| to.add(64 * (8 * i + row + c)).cast();
                    _mm256_storeu_si256(place(0), _mm512_castsi512_si256(two));
                    _mm256_storeu_si256(place(4), _mm512_extracti64x4_epi64::<1>(two));
                }
            }
        }
    }

    /// See [`super::multiply_packed`]; `results` has room for 4 tiles.
    ///
    /// # Safety
    /// As there; the unit is configured.
    pub(super) unsafe fn multiply(
        [left, right]: [PackedSide; 2],
        [m, n, k]: [usize; 3],
        out: Output,
        adds: bool,
        results: *mut u8,
    ) {
        const BOTH: usize = 2 * SIDE;
        let tiles = k.div_ceil(DEPTH);
        debug_assert!(tiles <= left.depth && tiles <= right.depth);
        if tiles == 0 {
            return;
        }
        let pair = |of: PackedSide, first: usize| {
            [0, 1].map(|i| of.start.wrapping_add((first / SIDE + i) * of.depth * TILE))
        };
        let floats = results.cast::<f32>();
        for i in (0..m).step_by(BOTH) {
            for j in (0..n).step_by(BOTH) {
                let start = out.start.wrapping_add(i * out.stride + j);
                let (high, long) = (BOTH.min(m - i), BOTH.min(n - j));
                let run = Run { left: pair(left, i), right: pair(right, j), tiles };
                let whole = high == BOTH && long == BOTH;
                let (to, row) = match whole {
                    true => (start, out.stride),
                    false => (floats, BOTH),
                };
                let place = |t: usize| start.wrapping_add(t * out.stride);
                // SAFETY: whole results are the caller's; others go to `results`, of which what
                // belongs to the output is copied.
                unsafe {
                    if adds && !whole {
                        for t in 0..high {
                            place(t).copy_to_nonoverlapping(floats.add(BOTH * t), long);
                        }
                    }
                    let to = (to.cast::<u8>(), 4 * row);
                    let from = if adds { (to.0.cast_const(), to.1) } else { unit::NOTHING };
                    unit::multiply(&[run], [2, 2], from, to);
                    if !whole {
                        for t in 0..high {
                            floats.add(BOTH * t).copy_to_nonoverlapping(place(t), long);
                        }
                    }
                }
            }
        }
    }
}
