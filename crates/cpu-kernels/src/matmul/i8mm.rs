//! Prefill with aarch64's products of byte matrices (FEAT_I8MM): `smmla`, of 2 rows by 2 tokens
//! over 8 columns.
//!
//! ```text
//! sums += w x^T      w: 2 rows x 8 columns, x: 2 tokens x 8 columns, sums: 2 x 2 i32
//! ```
//!
//! It does twice the products of an `sdot`, and takes rows and tokens in pairs. Panels are expanded
//! in cache as for the other sets (`product::many`), into the order of these pairs, with zero
//! points taken off; tokens are brought into the same order, a group at a time, for all panels of
//! the slab. Integers are exact, and f32 are scaled, fused and added in the order of
//! `product::tile` over slabs as deep, so that results equal `sdot`'s to the bit. A few
//! tokens are bound by memory and stay with `sdot`; float weights multiply in f32 (`float`).

use super::activations::{Line, TOKENS};
use super::lanes::{Lanes, neon::Neon};
use super::layout::{GROUP, Packed};
use super::product::{self, SLAB_BLOCKS, SLAB_PANELS, Slab, Source};
use super::{BLOCK, Call, Path, ROWS};
use formats::quant::BlockFormat;
use std::arch::aarch64::*;
use std::arch::asm;
use std::hint::black_box;

/// Bytes of the codes of a block: 16 rows of a panel, or 16 tokens, by 32 columns.
///
/// Lanes (rows or tokens) stand in pairs: the 16 bytes at `128 s + 16 i` are columns `8 s..8 s + 8`
/// of lane `2 i`, then of lane `2 i + 1`. Behind the codes lie f32 of 16 lanes each: a panel's
/// scales of each sub-block, then its offsets; the tokens' scales, then the sums of each sub-block
/// that offsets are multiplied with.
const CODES: usize = 16 * BLOCK;

/// Bytes of a block of tokens.
const TOKENS_STEP: usize = CODES + 64 * (1 + 2);

/// Bytes of scratch that [`product`] wants: the slab of panels, and one group of tokens.
pub(super) const SCRATCH: usize = product::SCRATCH + SLAB_BLOCKS * TOKENS_STEP;

/// Tokens of a tile, by the 16 rows of a panel.
const WIDTH: usize = 4;

/// The product for any number of tokens.
///
/// # Safety
/// As [`super::multiply`], on a processor with `dotprod` and `i8mm`.
pub(super) unsafe fn product<B: BlockFormat>(call: &Call) {
    // SAFETY: passed on.
    unsafe {
        match call.x.path() {
            Path::InPlace => product::in_place::<Neon<true>, B>(call),
            Path::Expanded | Path::Exact | Path::Rounded => many::<B>(call),
        }
    }
}

/// Many tokens.
unsafe fn many<B: BlockFormat>(call: &Call) {
    let total = call.cols / BLOCK;
    // SAFETY: panels, tokens and scratch are the call's; lines are allocated to whole groups.
    unsafe {
        let right = call.scratch.add(product::SCRATCH);
        for panel in call.panels.clone().step_by(SLAB_PANELS) {
            let panels = SLAB_PANELS.min(call.panels.end - panel);
            for block in (0..total).step_by(SLAB_BLOCKS) {
                let blocks = SLAB_BLOCKS.min(total - block);
                let step = blocks * Slab::<B>::STEP;
                for p in 0..panels {
                    let to = call.scratch.add(p * step);
                    expand::<B>(call.panel(panel + p), total, block, blocks, to);
                }
                let first = call.tokens.start / TOKENS * TOKENS;
                for group in (first..call.tokens.end).step_by(TOKENS) {
                    pair::<B>(call.x.line(group).add(block * TOKENS), blocks, right);
                    for p in 0..panels {
                        let left = call.scratch.add(p * step);
                        for lane in (0..TOKENS).step_by(WIDTH) {
                            let token = group + lane;
                            if token + WIDTH <= call.tokens.start || token >= call.tokens.end {
                                continue;
                            }
                            let y = tile::<B>(left, right, lane, blocks);
                            Neon::<true>::write(call, panel + p, token, &y, block == 0);
                        }
                    }
                }
            }
        }
    }
}

/// Expands blocks `first..first + blocks` of a panel of `total` (`first` starts a group).
unsafe fn expand<B: BlockFormat>(
    panel: *const u8,
    total: usize,
    first: usize,
    blocks: usize,
    mut to: *mut u8,
) {
    // SAFETY: the panel holds the blocks, `to` is writable for `blocks * Slab::STEP` bytes.
    unsafe {
        // As signed bytes all codes fit.
        let zero = vdupq_n_u8(<Packed<B> as Source<Neon<true>>>::ZERO);
        let groups = first / GROUP..(first + blocks).div_ceil(GROUP);
        for g in groups.clone() {
            let (group, n) = Packed::<B>::open::<Neon<true>>(panel, total, g, &groups);
            for b in 0..n {
                <Packed<B> as Source<Neon<true>>>::fetch(group, b);
                for q in (0..BLOCK / 4).step_by(2) {
                    // Registers of 4 rows by 4 columns: two of them side by side are two pairs of
                    // rows by 8.
                    let near = <Packed<B> as Source<Neon<true>>>::quad(group, b, q);
                    let far = <Packed<B> as Source<Neon<true>>>::quad(group, b, q + 1);
                    for i in 0..4 {
                        let near = vreinterpretq_u32_u8(vsubq_u8(near[i], zero));
                        let far = vreinterpretq_u32_u8(vsubq_u8(far[i], zero));
                        let at = to.add(64 * q + 32 * i).cast::<u32>();
                        vst1q_u32(at, vzip1q_u32(near, far));
                        vst1q_u32(at.add(4), vzip2q_u32(near, far));
                    }
                }
                Slab::<B>::scales::<Neon<true>>(group, b, to.add(CODES).cast());
                to = to.add(Slab::<B>::STEP);
            }
        }
    }
}

/// Brings `blocks` blocks of a group of tokens into the order of pairs.
unsafe fn pair<B: BlockFormat>(mut lines: *const Line, blocks: usize, mut to: *mut u8) {
    // SAFETY: the group has its lines, `to` is writable for `blocks * TOKENS_STEP` bytes.
    unsafe {
        for _ in 0..blocks {
            for i in 0..TOKENS / 2 {
                let (even, odd) = (lines.add(2 * i), lines.add(2 * i + 1));
                for half in 0..2 {
                    // A line begins with its codes.
                    let even = vld1q_u64(even.cast::<u64>().add(2 * half));
                    let odd = vld1q_u64(odd.cast::<u64>().add(2 * half));
                    let at = to.add(256 * half + 16 * i);
                    vst1q_u64(at.cast(), vzip1q_u64(even, odd));
                    vst1q_u64(at.add(128).cast(), vzip2q_u64(even, odd));
                }
            }
            let floats = to.add(CODES).cast::<f32>();
            for t in 0..TOKENS {
                let line = lines.add(t);
                *floats.add(t) = (*line).scale;
                if !Slab::<B>::MINS {
                    continue;
                }
                if Slab::<B>::SUBS == 1 {
                    *floats.add(TOKENS + t) = (*line).sum;
                } else {
                    for h in 0..2 {
                        *floats.add(TOKENS * (1 + h) + t) = (*line).half_sum[h];
                    }
                }
            }
            (lines, to) = (lines.add(TOKENS), to.add(TOKENS_STEP));
        }
    }
}

/// An expanded panel times the [`WIDTH`] tokens from `lane` of a group, over `blocks` blocks.
#[inline(always)]
unsafe fn tile<B: BlockFormat>(
    mut left: *const u8,
    right: *const u8,
    lane: usize,
    blocks: usize,
) -> [<Neon<true> as Lanes>::Floats; WIDTH] {
    // SAFETY: `left` has the blocks as `expand` writes them, `right` as `pair` does.
    unsafe {
        let (mut codes, mut floats) =
            (right.add(8 * lane), right.add(CODES).cast::<f32>().add(lane));
        // Eight rows at a time: the integers of 16, beside the results, would not stay in
        // registers.
        let (mut upper, mut lower) =
            ([[vdupq_n_f32(0.0); 2]; WIDTH], [[vdupq_n_f32(0.0); 2]; WIDTH]);
        for _ in 0..blocks {
            let scales = spread(vld1q_f32(floats));
            for h in 0..Slab::<B>::SUBS {
                eight_rows::<B>(left, 0, h, codes, scales, &mut upper);
                eight_rows::<B>(left, 1, h, codes, scales, &mut lower);
                if Slab::<B>::MINS {
                    let sums = spread(vld1q_f32(floats.add(TOKENS * (1 + h))));
                    let at = left.add(CODES).cast::<f32>().add(ROWS * (Slab::<B>::SUBS + h));
                    for r in 0..2 {
                        let offsets = [vld1q_f32(at.add(4 * r)), vld1q_f32(at.add(8 + 4 * r))];
                        for t in 0..WIDTH {
                            upper[t][r] = vfmaq_f32(upper[t][r], offsets[0], sums[t]);
                            lower[t][r] = vfmaq_f32(lower[t][r], offsets[1], sums[t]);
                        }
                    }
                }
            }
            left = left.add(Slab::<B>::STEP);
            (codes, floats) = (codes.add(TOKENS_STEP), floats.add(TOKENS_STEP / 4));
        }
        let mut acc = [Neon::<true>::splat(0.0); WIDTH];
        for t in 0..WIDTH {
            acc[t] = [upper[t][0], upper[t][1], lower[t][0], lower[t][1]];
        }
        acc
    }
}

/// Adds sub-block `h` of rows `8 half..8 half + 8` of a block, times [`WIDTH`] tokens, to
/// `acc[token][row / 4]`.
#[inline(always)]
unsafe fn eight_rows<B: BlockFormat>(
    left: *const u8,
    half: usize,
    h: usize,
    codes: *const u8,
    scales: [float32x4_t; WIDTH],
    acc: &mut [[float32x4_t; 2]; WIDTH],
) {
    // SAFETY: as `tile`.
    unsafe {
        let steps = Packed::<B>::SUB / 8;
        let mut sums = [[vdupq_n_s32(0); WIDTH / 2]; 4];
        for s in h * steps..(h + 1) * steps {
            let x = [load(codes.add(128 * s)), load(codes.add(128 * s + 16))];
            for i in 0..4 {
                let w = load(left.add(128 * s + 64 * half + 16 * i));
                for j in 0..WIDTH / 2 {
                    sums[i][j] = multiply(sums[i][j], w, x[j]);
                }
            }
        }
        for r in 0..2 {
            let at = left.add(CODES).cast::<f32>().add(ROWS * h + 8 * half + 4 * r);
            let scale = vld1q_f32(at);
            for j in 0..WIDTH / 2 {
                // Two by two, and the two by two below it: four rows of the one token, and of the
                // other.
                let (above, below) = (sums[2 * r][j], sums[2 * r + 1][j]);
                let even = vcvtq_f32_s32(vuzp1q_s32(above, below));
                let odd = vcvtq_f32_s32(vuzp2q_s32(above, below));
                let t = 2 * j;
                acc[t][r] = vfmaq_f32(acc[t][r], even, vmulq_f32(scale, scales[t]));
                acc[t + 1][r] = vfmaq_f32(acc[t + 1][r], odd, vmulq_f32(scale, scales[t + 1]));
            }
        }
    }
}

/// Each lane of `v` in a register of its own.
#[inline(always)]
fn spread(v: float32x4_t) -> [float32x4_t; WIDTH] {
    // SAFETY: registers only; Advanced SIMD is part of every aarch64 target.
    unsafe {
        [
            vdupq_laneq_f32::<0>(v),
            vdupq_laneq_f32::<1>(v),
            vdupq_laneq_f32::<2>(v),
            vdupq_laneq_f32::<3>(v),
        ]
    }
}

/// 16 code bytes.
#[inline(always)]
unsafe fn load(p: *const u8) -> int8x16_t {
    // SAFETY: the caller has 16 bytes at `p`.
    unsafe { vld1q_s8(p.cast()) }
}

/// `sums + w x^T`: 2 rows of 8 signed bytes by 2 tokens of 8.
///
/// # Safety
/// The processor has `i8mm`.
#[inline(always)]
unsafe fn multiply(mut sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: registers only. Rust has not made the intrinsic (`vmmlaq_s32`) stable, hence the
    // instruction.
    unsafe {
        asm!(".arch_extension i8mm", "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums, in(vreg) w, in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// For `peak`: products alone, in as many sums as hide the latency of adding. Returns the
/// operations done.
///
/// # Safety
/// The processor has `i8mm`.
pub(super) unsafe fn products(rounds: usize) -> usize {
    const SUMS: usize = 12;
    let codes = black_box([[1u8; 16]; 4]);
    let (mut x, step) = (black_box(0x0101_0101), black_box(0x0000_0001));
    // SAFETY: the caller's promise; each code block has 16 bytes.
    unsafe {
        let codes: [int8x16_t; 4] = std::array::from_fn(|i| load(codes[i].as_ptr()));
        let mut sums: [int32x4_t; SUMS] = std::array::from_fn(|i| vdupq_n_s32(black_box(i as i32)));
        for _ in 0..rounds {
            // Activations that change: a compiler that knew them would lift the products out.
            let x8 = vreinterpretq_s8_s32(vdupq_n_s32(x));
            for i in 0..SUMS {
                sums[i] = multiply(sums[i], codes[i % 4], x8);
            }
            x ^= step;
        }
        for sum in sums {
            black_box(vaddvq_s32(sum));
        }
    }
    // 2 x 2 x 8 products, each multiplied and added.
    rounds * SUMS * 2 * 32
}
