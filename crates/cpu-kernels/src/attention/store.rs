//! How keys and values are stored: as floats, or as codes in blocks of 32 elements that share a
//! scale.
//!
//! Sixteen positions of a head form a group. Its keys are `[head_dim][16]`, its values
//! `[16][width]`; codes are followed by the f16 scales of the group, `[head_dim / 32][16]`.

use super::cache::{GROUP, Tile};
use super::{MAX_HEAD_DIM, Work, decode};
use crate::math::lanes::{Lanes, WIDEST};
use crate::math::to_f16_kernel;
use formats::CacheType;
use half::f16;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements that share a scale.
pub(super) const BLOCK: usize = CacheType::BLOCK;

/// How a group of keys and a group of values are stored.
pub(super) trait Store: 'static {
    /// Loads element `i` of `L::N` of a group's keys, from key `key` on.
    ///
    /// # Safety
    /// `group` points to keys of `dim` elements, more than `i`; the keys are below [`GROUP`].
    unsafe fn key<L: Lanes>(group: *const u8, dim: usize, i: usize, key: usize) -> L;

    /// Loads elements of a group's value `key`, from `column` on.
    ///
    /// # Safety
    /// `group` points to values of `width` elements, which include the columns; `key` is below
    /// [`GROUP`].
    unsafe fn value<L: Lanes>(group: *const u8, width: usize, key: usize, column: usize) -> L;

    /// Stores a key and a value of `dim` elements as number `key` of the group.
    ///
    /// # Safety
    /// `k` and `v` have `dim` elements, at most [`MAX_HEAD_DIM`]; no other thread accesses the
    /// groups.
    unsafe fn put<L: Lanes>(
        k: *const f32,
        v: *const f32,
        groups: (*mut u8, *mut u8),
        dim: usize,
        width: usize,
        key: usize,
    );

    /// Computes scores of `ROWS` queries with `GROUPS` groups of a tile's keys from `first` on,
    /// each `VECTORS` vectors wide, while prefetching the tile's values.
    ///
    /// # Safety
    /// The queries and keys have `dim` elements; `p` has the room.
    unsafe fn score<L: Lanes, const ROWS: usize, const GROUPS: usize, const VECTORS: usize>(
        q: *const f32,
        dim: usize,
        tile: &Tile,
        first: usize,
        p: *mut f32,
    );

    /// Adds the tile's values `seen`, weighted by their probabilities, to the sums of `rows` rows,
    /// while prefetching the keys of tile `then`, which is read next.
    ///
    /// # Safety
    /// `work` has the rows; the tile has values of `width` elements.
    unsafe fn sums<L: Lanes>(
        rows: usize,
        seen: Range<usize>,
        width: usize,
        work: &Work,
        tile: &Tile,
        then: &Tile,
    );
}

/// [`CacheType::F16`].
pub(super) type Half = Numbers<Bits16>;
/// [`CacheType::BF16`].
pub(super) type Brain = Numbers<Upper16>;
/// [`CacheType::F32`].
pub(super) type Single = Numbers<f32>;
/// [`CacheType::Q8_0`].
pub(super) type Eighth = Blocks<Bytes>;
/// [`CacheType::Turbo`].
pub(super) type Turbo = Blocks<Nibbles>;

/// Calls a generic kernel like [`dispatch`](crate::math::lanes::dispatch), for the element type of
/// a cache as well.
macro_rules! dispatch_stored {
    ($element:expr, $isa:expr, $kernel:ident $arguments:tt) => {
        match $element {
            CacheType::F16 => dispatch!($isa, $kernel[Half] $arguments),
            CacheType::BF16 => dispatch!($isa, $kernel[Brain] $arguments),
            CacheType::F32 => dispatch!($isa, $kernel[Single] $arguments),
            CacheType::Q8_0 => dispatch!($isa, $kernel[Eighth] $arguments),
            CacheType::Turbo => dispatch!($isa, $kernel[Turbo] $arguments),
        }
    };
}
pub(super) use dispatch_stored;

/// Storage as plain floats.
pub(super) struct Numbers<N>(PhantomData<N>);

impl<N: Number> Store for Numbers<N> {
    #[inline(always)]
    unsafe fn key<L: Lanes>(group: *const u8, _: usize, i: usize, key: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { N::load(group.cast::<N::Bits>().add(i * GROUP + key)) }
    }

    #[inline(always)]
    unsafe fn value<L: Lanes>(group: *const u8, width: usize, key: usize, column: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { N::load(group.cast::<N::Bits>().add(key * width + column)) }
    }

    #[inline(always)]
    unsafe fn put<L: Lanes>(
        k: *const f32,
        v: *const f32,
        (keys, values): (*mut u8, *mut u8),
        dim: usize,
        width: usize,
        key: usize,
    ) {
        let mut stored = [N::ZERO; MAX_HEAD_DIM];
        // SAFETY: the caller's promises.
        unsafe {
            N::convert::<L>(v, values.cast::<N::Bits>().add(key * width), dim);
            N::convert::<L>(k, stored.as_mut_ptr(), dim);
            let keys = keys.cast::<N::Bits>().add(key);
            for i in 0..dim {
                *keys.add(i * GROUP) = stored[i];
            }
        }
    }

    #[inline(always)]
    unsafe fn score<L: Lanes, const ROWS: usize, const GROUPS: usize, const VECTORS: usize>(
        q: *const f32,
        dim: usize,
        tile: &Tile,
        first: usize,
        p: *mut f32,
    ) {
        // SAFETY: the caller's promises.
        unsafe { decode::score::<L, N, ROWS, GROUPS, VECTORS>(q, dim, tile, first, p) }
    }

    #[inline(always)]
    unsafe fn sums<L: Lanes>(
        rows: usize,
        seen: Range<usize>,
        width: usize,
        work: &Work,
        tile: &Tile,
        then: &Tile,
    ) {
        // SAFETY: the caller's promises.
        unsafe { decode::sums::<L, N>(rows, seen, width, work, tile, then) }
    }
}

/// A float type of the cache.
pub(super) trait Number: 'static {
    /// The stored type.
    type Bits: Copy;
    /// Zero.
    const ZERO: Self::Bits;

    /// Reads a vector.
    ///
    /// # Safety
    /// `p` points to `L::N` elements.
    unsafe fn load<L: Lanes>(p: *const Self::Bits) -> L;

    /// Converts `n` numbers.
    ///
    /// # Safety
    /// `x` and `out` point to `n` elements.
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut Self::Bits, n: usize);
}

/// An f16.
pub(super) struct Bits16;

/// A bf16: the upper half of an f32.
pub(super) struct Upper16;

impl Number for Bits16 {
    type Bits = u16;
    const ZERO: u16 = 0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u16) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut u16, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { to_f16_kernel::<L>(x, out, n) }
    }
}

impl Number for Upper16 {
    type Bits = u16;
    const ZERO: u16 = 0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u16) -> L {
        let mut whole = [0.0; WIDEST];
        // SAFETY: `L::N <= WIDEST` elements are readable, by the caller's promise, and fit.
        unsafe {
            for (i, x) in whole[..L::N].iter_mut().enumerate() {
                *x = f32::from_bits(u32::from(*p.add(i)) << 16);
            }
            L::load(whole.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut u16, n: usize) {
        for i in 0..n {
            // SAFETY: the caller's promise.
            unsafe { *out.add(i) = half::bf16::from_f32(*x.add(i)).to_bits() };
        }
    }
}

impl Number for f32 {
    type Bits = f32;
    const ZERO: f32 = 0.0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }
    #[inline(always)]
    unsafe fn convert<L: Lanes>(x: *const f32, out: *mut f32, n: usize) {
        // SAFETY: the caller's promise; a cache and its input are different memory.
        unsafe { std::ptr::copy_nonoverlapping(x, out, n) }
    }
}

/// Storage as codes in blocks of 32 elements with one scale. The first 16 elements of a block and
/// the last 16 are read in pairs.
pub(super) struct Blocks<C>(PhantomData<C>);

impl<C: Codes> Blocks<C> {
    /// Bytes of a group's keys or values.
    pub(super) const fn bytes(dim: usize) -> usize {
        GROUP * dim / BLOCK * (C::BYTES + 2)
    }

    /// The scales of block `block` of a group's keys or values, one per position.
    #[inline(always)]
    pub(super) fn scales(group: *const u8, dim: usize, block: usize) -> *const u16 {
        group.wrapping_add(GROUP * dim / BLOCK * C::BYTES).cast::<u16>().wrapping_add(block * GROUP)
    }

    /// Codes `i` and `16 + i` of a block of `L::N` of a group's keys, from key `key` on.
    ///
    /// # Safety
    /// The keys and the block exist; `i` is below 16.
    #[inline(always)]
    pub(super) unsafe fn keys<L: Lanes>(
        group: *const u8,
        block: usize,
        i: usize,
        key: usize,
    ) -> [L; 2] {
        // SAFETY: the caller's promise.
        unsafe { C::pair(group.add((block * C::BYTES + i) * GROUP + key), BLOCK / 2 * GROUP) }
    }

    /// Codes of a block of a group's value `key`: `L::N` from `i` on, and those 16 elements later.
    ///
    /// # Safety
    /// The value and the block exist; the first codes are among the first 16.
    #[inline(always)]
    pub(super) unsafe fn values<L: Lanes>(
        group: *const u8,
        width: usize,
        key: usize,
        block: usize,
        i: usize,
    ) -> [L; 2] {
        let at = (key * (width / BLOCK) + block) * C::BYTES + i;
        // SAFETY: the caller's promise.
        unsafe { C::pair(group.add(at), BLOCK / 2) }
    }
}

/// The code type of [`Blocks`].
pub(super) trait Codes: 'static {
    /// Bytes of a block's codes.
    const BYTES: usize;

    /// Whether heads are rotated by [`CacheType::rotate`] before they are stored.
    const ROTATES: bool;

    /// `L::N` codes, and those 16 elements later in their blocks. Neighbouring halves of a block
    /// lie `apart` bytes apart, unless they share bytes.
    ///
    /// # Safety
    /// The codes exist.
    unsafe fn pair<L: Lanes>(p: *const u8, apart: usize) -> [L; 2];

    /// Encodes a block: its codes and its scale.
    fn encode(x: &[f32; BLOCK]) -> ([u8; BLOCK], f16);
}

/// ggml's q8_0.
pub(super) struct Bytes;

/// ggml's q4_0 on rotated heads: byte `j` holds elements `j` and `16 + j`.
pub(super) struct Nibbles;

/// The first element of the largest magnitude.
#[inline(always)]
fn peak(x: &[f32; BLOCK]) -> f32 {
    let mut most = 0.0f32;
    for x in x {
        most = if x.abs() > most { x.abs() } else { most };
    }
    let mut peak = 0.0;
    for i in (0..BLOCK).rev() {
        peak = if x[i].abs() == most { x[i] } else { peak };
    }
    peak
}

/// `1 / d`, or 0 if `d` is 0.
#[inline(always)]
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

impl Codes for Bytes {
    const BYTES: usize = 32;
    const ROTATES: bool = false;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(p: *const u8, apart: usize) -> [L; 2] {
        // SAFETY: the caller's promise.
        unsafe { [L::load_i8(p.cast()), L::load_i8(p.add(apart).cast())] }
    }

    #[inline(always)]
    fn encode(x: &[f32; BLOCK]) -> ([u8; BLOCK], f16) {
        let d = peak(x).abs() / 127.0;
        let inverse = inverse(d);
        let mut codes = [0; BLOCK];
        for i in 0..BLOCK {
            let x = x[i] * inverse;
            let whole = x as i32;
            // Round halves away from zero.
            let rest = x - whole as f32;
            codes[i] = (whole + i32::from(rest >= 0.5) - i32::from(rest <= -0.5)) as i8 as u8;
        }
        (codes, f16::from_f32(d))
    }
}

impl Codes for Nibbles {
    const BYTES: usize = 16;
    const ROTATES: bool = true;

    #[inline(always)]
    unsafe fn pair<L: Lanes>(p: *const u8, _: usize) -> [L; 2] {
        // SAFETY: the caller's promise.
        unsafe { L::load_nibbles(p).into() }
    }

    #[inline(always)]
    fn encode(x: &[f32; BLOCK]) -> ([u8; BLOCK], f16) {
        let d = peak(x) / -8.0;
        let inverse = inverse(d);
        let (mut codes, mut packed) = ([0; BLOCK], [0; BLOCK]);
        for i in 0..BLOCK {
            codes[i] = ((x[i] * inverse + 8.5) as i32).clamp(0, 15) as u8;
        }
        for j in 0..BLOCK / 2 {
            packed[j] = codes[j] | codes[BLOCK / 2 + j] << 4;
        }
        (packed, f16::from_f32(d))
    }
}

impl<C: Codes> Store for Blocks<C> {
    #[inline(always)]
    unsafe fn key<L: Lanes>(group: *const u8, dim: usize, i: usize, key: usize) -> L {
        let half = BLOCK / 2;
        // SAFETY: the caller's promise.
        unsafe {
            let pair = Self::keys::<L>(group, i / BLOCK, i % half, key);
            let scales = L::load_f16(Self::scales(group, dim, i / BLOCK).add(key));
            pair[i % BLOCK / half].mul(scales)
        }
    }

    #[inline(always)]
    unsafe fn value<L: Lanes>(group: *const u8, width: usize, key: usize, column: usize) -> L {
        let (half, block) = (BLOCK / 2, column / BLOCK);
        // SAFETY: the caller's promise.
        unsafe {
            let pair = Self::values::<L>(group, width, key, block, column % half);
            let scale = L::splat_f16(Self::scales(group, width, block).add(key));
            pair[column % BLOCK / half].mul(scale)
        }
    }

    #[inline(always)]
    unsafe fn put<L: Lanes>(
        k: *const f32,
        v: *const f32,
        (keys, values): (*mut u8, *mut u8),
        dim: usize,
        width: usize,
        key: usize,
    ) {
        let mut turned = [0.0; MAX_HEAD_DIM];
        for (x, group, is_key) in [(k, keys, true), (v, values, false)] {
            // SAFETY: the caller's promises: a head fits, and its codes and scales lie inside the
            // group.
            unsafe {
                std::ptr::copy_nonoverlapping(x, turned.as_mut_ptr(), dim);
                if C::ROTATES {
                    CacheType::rotate(&mut turned[..dim]);
                }
                let (blocks, _) = turned[..dim].as_chunks::<BLOCK>();
                for (b, block) in blocks.iter().enumerate() {
                    let (codes, scale) = C::encode(block);
                    let scales = Self::scales(group, dim, b).cast_mut();
                    *scales.add(key) = scale.to_bits();
                    if is_key {
                        for i in 0..C::BYTES {
                            *group.add((b * C::BYTES + i) * GROUP + key) = codes[i];
                        }
                    } else {
                        let to = group.add((key * (width / BLOCK) + b) * C::BYTES);
                        std::ptr::copy_nonoverlapping(codes.as_ptr(), to, C::BYTES);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn score<L: Lanes, const ROWS: usize, const GROUPS: usize, const VECTORS: usize>(
        q: *const f32,
        dim: usize,
        tile: &Tile,
        first: usize,
        p: *mut f32,
    ) {
        // SAFETY: the caller's promises.
        unsafe { decode::blocks::score::<L, C, ROWS, GROUPS, VECTORS>(q, dim, tile, first, p) }
    }

    #[inline(always)]
    unsafe fn sums<L: Lanes>(
        rows: usize,
        seen: Range<usize>,
        width: usize,
        work: &Work,
        tile: &Tile,
        then: &Tile,
    ) {
        // SAFETY: the caller's promises.
        unsafe { decode::blocks::sums::<L, C>(rows, seen, width, work, tile, then) }
    }
}
