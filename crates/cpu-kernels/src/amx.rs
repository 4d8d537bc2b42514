//! Intel's tile unit (AMX): registers of 16 rows of 64 bytes, and bf16 products with f32 sums.
//!
//! The unit consumes about what the L1 cache delivers, so products are of two by two tiles: four
//! products for every four tiles loaded. An f32 is the sum of two bf16 to 16 bits, and an f16
//! exactly: products of such sums are nearly as accurate as in f32.
//!
//! ```text
//! left   a tile of 16 rows:    [16 rows][32 of the depth] bf16
//! right  a tile of 16 columns: [16 pairs of the depth][16 columns][2] bf16
//! ```
//!
//! Stable Rust has no tile types, hence the inline assembly.

use std::arch::asm;
use std::arch::x86_64::*;

/// Bytes of a tile: 16 rows of 64.
pub(super) const TILE: usize = 1024;
/// Rows or columns of a tile.
pub(super) const SIDE: usize = 16;
/// Depth of a tile.
pub(super) const DEPTH: usize = 32;

/// The tile registers' shapes (palette 1; Intel SDM, `LDTILECFG`).
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    /// Bytes per row.
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures the tile registers: eight tiles of 16 rows of 64 bytes.
///
/// # Safety
/// The processor has the unit.
pub(super) unsafe fn configure() {
    let mut shapes =
        Shapes { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
    for tile in 0..8 {
        (shapes.bytes[tile], shapes.rows[tile]) = (64, 16);
    }
    // SAFETY: the shapes are within palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly)) }
}

/// Releases the tile registers, which then cost nothing at a context switch.
///
/// # Safety
/// The processor has the unit.
pub(super) unsafe fn release() {
    // SAFETY: no tile is in use.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// A sequence of left and right tiles along the depth.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Run {
    /// The first tile of both groups of rows.
    pub(super) left: [*const u8; 2],
    /// The first tile of both groups of columns.
    pub(super) right: [*const u8; 2],
    /// Number of consecutive tiles in each.
    pub(super) tiles: usize,
}

/// A `from` that means zero sums.
pub(super) const NOTHING: (*const u8, usize) = (std::ptr::null(), 0);

/// Prefetches half of the tile after the one at a pointer, which the next round reads.
///
/// This has two purposes, and for the second its position matters. It loads the next round from the
/// L2 cache while the current products run. And when another thread is busy on the same core,
/// adjacent tile instructions take twice the time of those with other instructions between them;
/// eight after each are enough.
macro_rules! fetch {
    ($from:literal, low) => {
        fetch!($from, "0, 64, 128, 192, 256, 320, 384, 448")
    };
    ($from:literal, high) => {
        fetch!($from, "512, 576, 640, 704, 768, 832, 896, 960")
    };
    ($from:literal, $lines:literal) => {
        concat!(".irp line, ", $lines, "\nprefetcht0 [{", $from, "} + 1024 + \\line]\n.endr")
    };
}

/// `to = from + the sum of all runs' left right` for `groups[0]` by `groups[1]` tiles, one or two
/// of each. Sums are f32: tiles are 64 bytes or 16 rows apart, and rows the given number of bytes.
/// With [`NOTHING`], `from` is zero.
///
/// # Safety
/// The tiles are configured, and all pointers valid; every run has at least one tile.
#[inline(always)]
pub(super) unsafe fn multiply(
    runs: &[Run],
    groups: [usize; 2],
    from: (*const u8, usize),
    to: (*mut u8, usize),
) {
    if groups == [2, 2] {
        // SAFETY: the caller's promises; nothing is written but the sums.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {x}, {x}",
                "jz 3f",
                "tileloadd tmm0, [{x} + {w}*1]",
                "tileloadd tmm1, [{x} + {w}*1 + 64]",
                "tileloadd tmm2, [{x2} + {w}*1]",
                "tileloadd tmm3, [{x2} + {w}*1 + 64]",
                "3:",
                "mov {x}, [{run}]",
                "mov {x2}, [{run} + 8]",
                "mov {w}, [{run} + 16]",
                "mov {w2}, [{run} + 24]",
                "mov {tiles}, [{run} + 32]",
                "2:",
                "tileloadd tmm6, [{w} + {row}*1]",
                fetch!("w", low),
                "tileloadd tmm4, [{x} + {row}*1]",
                fetch!("x", low),
                "tileloadd tmm7, [{w2} + {row}*1]",
                fetch!("w2", low),
                "tileloadd tmm5, [{x2} + {row}*1]",
                fetch!("x2", low),
                "tdpbf16ps tmm0, tmm4, tmm6",
                fetch!("w", high),
                "tdpbf16ps tmm1, tmm4, tmm7",
                fetch!("x", high),
                "tdpbf16ps tmm2, tmm5, tmm6",
                fetch!("w2", high),
                "tdpbf16ps tmm3, tmm5, tmm7",
                fetch!("x2", high),
                "add {x}, 1024",
                "add {x2}, 1024",
                "add {w}, 1024",
                "add {w2}, 1024",
                "dec {tiles}",
                "jnz 2b",
                "add {run}, 40",
                "dec {runs}",
                "jnz 3b",
                "tilestored [{to} + {to_row}*1], tmm0",
                "tilestored [{to} + {to_row}*1 + 64], tmm1",
                "tilestored [{to2} + {to_row}*1], tmm2",
                "tilestored [{to2} + {to_row}*1 + 64], tmm3",
                x = inout(reg) from.0 => _,
                x2 = inout(reg) from.0.wrapping_add(SIDE * from.1) => _,
                w = inout(reg) from.1 => _,
                w2 = out(reg) _,
                tiles = out(reg) _,
                run = inout(reg) runs.as_ptr() => _,
                runs = inout(reg) runs.len() => _,
                row = in(reg) 64usize,
                to = in(reg) to.0,
                to2 = in(reg) to.0.wrapping_add(SIDE * to.1),
                to_row = in(reg) to.1,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
        return;
    }
    for i in 0..groups[0] {
        for j in 0..groups[1] {
            let place = |row: usize| i * SIDE * row + 64 * j;
            let at = if from.0.is_null() { from.0 } else { from.0.wrapping_add(place(from.1)) };
            let (mut from, to) = ((at, from.1), (to.0.wrapping_add(place(to.1)), to.1));
            for run in runs {
                // SAFETY: as above.
                unsafe {
                    asm!(
                        "tilezero tmm0",
                        "test {from}, {from}",
                        "jz 2f",
                        "tileloadd tmm0, [{from} + {from_row}*1]",
                        "2:",
                        "tileloadd tmm4, [{x} + {row}*1]",
                        "tileloadd tmm6, [{w} + {row}*1]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "add {x}, 1024",
                        "add {w}, 1024",
                        "dec {tiles}",
                        "jnz 2b",
                        "tilestored [{to} + {to_row}*1], tmm0",
                        x = inout(reg) run.left[i] => _,
                        w = inout(reg) run.right[j] => _,
                        tiles = inout(reg) run.tiles => _,
                        row = in(reg) 64usize,
                        from = in(reg) from.0,
                        from_row = in(reg) from.1,
                        to = in(reg) to.0,
                        to_row = in(reg) to.1,
                        out("tmm0") _, out("tmm4") _, out("tmm6") _,
                        options(nostack)
                    );
                }
                from = (to.0.cast_const(), to.1);
            }
        }
    }
}

/// Multiplies tiles in registers with four independent sums; returns the operations done.
///
/// # Safety
/// The processor has the unit.
pub(super) unsafe fn products(rounds: usize) -> usize {
    // SAFETY: nothing is written but tile registers.
    unsafe {
        configure();
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) rounds.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, nomem)
        );
        release();
    }
    rounds.max(1) * 4 * 2 * SIDE * SIDE * DEPTH
}

/// The bf16 nearest to each number (halves away from zero), in the upper half of its bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn nearest(x: __m512) -> __m512i {
    _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000))
}

/// Two numbers per lane rounded to bf16, the first low: two rows of a right tile's depth.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn pair(low: __m512, high: __m512) -> __m512i {
    join(nearest(low), nearest(high))
}

/// The upper half of `high` over the upper half of `low`.
#[inline]
#[target_feature(enable = "avx512f")]
fn join(low: __m512i, high: __m512i) -> __m512i {
    let low = _mm512_srli_epi32::<16>(low);
    _mm512_ternarylogic_epi32::<0xE4>(low, high, _mm512_set1_epi32(0xffff))
}

/// The first half of a transpose of words: in each 128-bit lane of every four vectors, their words
/// of one column, column after column.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn quads(rows: [__m512i; 8]) -> [__m512i; 8] {
    let mut pairs = rows;
    for i in 0..4 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    let mut quads = pairs;
    for i in 0..2 {
        for j in 0..2 {
            let (a, b) = (pairs[4 * i + j], pairs[4 * i + j + 2]);
            quads[4 * i + 2 * j] = _mm512_unpacklo_epi64(a, b);
            quads[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    quads
}

/// 32 consecutive numbers rounded to bf16: a row of a left tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn row(first: __m512, second: __m512) -> __m512i {
    upper_halves(nearest(first), nearest(second))
}

/// The upper halves of the words of two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn upper_halves(first: __m512i, second: __m512i) -> __m512i {
    _mm512_permutex2var_epi16(first, upper(), second)
}

/// The places of the upper halves of the words of two vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper() -> __m512i {
    _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
        17, 15, 13, 11, 9, 7, 5, 3, 1,
    )
}

/// Splits numbers into sums of two bf16, each in the upper half of its bits; a NaN stays NaN in the
/// sum.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(x: __m512) -> [__m512i; 2] {
    let first = _mm512_and_si512(nearest(x), _mm512_set1_epi32(0xffff_0000u32 as i32));
    [first, nearest(_mm512_sub_ps(x, _mm512_castsi512_ps(first)))]
}

/// [`pair`] for both parts of numbers split into two.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn split_pair(low: __m512, high: __m512) -> [__m512i; 2] {
    let ([a, b], [c, d]) = (split(low), split(high));
    [join(a, c), join(b, d)]
}

/// 32 consecutive numbers, split into two: a row of a left tile for each part.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn split_row(first: __m512, second: __m512) -> [__m512i; 2] {
    let ([a, b], [c, d]) = (split(first), split(second));
    [upper_halves(a, c), upper_halves(b, d)]
}
