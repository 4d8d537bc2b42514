//! Operations on whole rows: norms, softmax, rotary embedding, maxima, conversions.

use super::functions::exp;
use super::lanes::{Lanes, WIDEST, dispatch};
use crate::isa::Isa;
use formats::Pairing;
use formats::elementwise::{Binary, Unary};
use half::{bf16, f16};

/// RMS norm of every row: `out = x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, 2019).
///
/// `x` and `out` hold rows of `weight.len()`. With `weight` of head_dim and `x` as
/// `[tokens * heads][head_dim]` it is the per-head norm of queries and keys.
///
/// # Panics
/// When the lengths do not fit.
pub fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(
        x.len() == out.len() && x.len().is_multiple_of(weight.len().max(1)),
        "rms_norm: rows of the weight's width"
    );
    // SAFETY: both slices hold that many whole rows.
    unsafe {
        rms_norm_raw(isa, x.as_ptr(), out.as_mut_ptr(), weight, x.len() / weight.len().max(1), eps)
    }
}

/// [`rms_norm`] of the rows of `x`, in place.
///
/// # Panics
/// When `x` does not hold whole rows.
pub fn rms_norm_in_place(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    assert!(x.len().is_multiple_of(weight.len().max(1)), "rms_norm: rows of the weight's width");
    // SAFETY: the slice holds that many whole rows; the kernel reads each vector before it writes
    // it.
    unsafe {
        rms_norm_raw(isa, x.as_ptr(), x.as_mut_ptr(), weight, x.len() / weight.len().max(1), eps)
    }
}

/// `gate[r] = silu(gate[r]) * x[r] * weight / rms(..)` for every row `r` of `weight.len()` elements,
/// where each of `groups` equal parts of a row has a root mean square of its own: that of `x` if
/// `norm_first`, else that of the product.
///
/// # Panics
/// If the slices are no whole rows of that many groups.
pub fn gated_norm_in_place(
    isa: Isa,
    gate: &mut [f32],
    x: &[f32],
    weight: &[f32],
    groups: usize,
    eps: f32,
    norm_first: bool,
) {
    let width = weight.len().max(1);
    assert!(
        groups > 0 && width.is_multiple_of(groups) && gate.len().is_multiple_of(width),
        "gated_norm: rows of groups"
    );
    super::gate_in_place(isa, Unary::Silu, gate, x);
    let each = width / groups;
    for (i, (gate, x)) in gate.chunks_exact_mut(each).zip(x.chunks_exact(each)).enumerate() {
        let weight = &weight[i % groups * each..][..each];
        if !norm_first {
            rms_norm_in_place(isa, gate, weight, eps);
            continue;
        }
        let mut squares = [0.0; WIDEST];
        for x in x.chunks(WIDEST) {
            squares.iter_mut().zip(x).for_each(|(sum, x)| *sum += x * x);
        }
        let mean = squares.iter().sum::<f32>() / each as f32;
        super::scale_in_place(isa, 1.0 / (mean + eps).sqrt(), gate);
        super::zip_in_place(isa, Binary::Mul, gate, weight);
    }
}

/// # Safety
/// `x` and `out` point to `rows * weight.len()` elements and are equal or do not overlap.
unsafe fn rms_norm_raw(
    isa: Isa,
    x: *const f32,
    out: *mut f32,
    weight: &[f32],
    rows: usize,
    eps: f32,
) {
    // SAFETY: the caller's promises are the kernel's.
    unsafe {
        dispatch!(isa, rms_norm_kernel(x: *const f32, out: *mut f32, weight: &[f32], rows: usize, eps: f32));
    }
}

#[inline(always)]
unsafe fn rms_norm_kernel<L: Lanes>(
    x: *const f32,
    out: *mut f32,
    weight: &[f32],
    rows: usize,
    eps: f32,
) {
    let width = weight.len();
    let (blocks, whole) = (width - width % (4 * L::N), width - width % L::N);
    // SAFETY: every index is below `rows * width` (below `width` for the weight), which the caller
    // promises.
    unsafe {
        for row in 0..rows {
            let (x, out) = (x.add(row * width), out.add(row * width));
            // Four sums hide the latency of the additions, and shorten each: error grows with a
            // sum's length.
            let mut sums = [L::splat(0.0); 4];
            for i in (0..blocks).step_by(4 * L::N) {
                for (k, sum) in sums.iter_mut().enumerate() {
                    let x = L::load(x.add(i + k * L::N));
                    *sum = x.fma(x, *sum);
                }
            }
            for i in (blocks..whole).step_by(L::N) {
                let x = L::load(x.add(i));
                sums[0] = x.fma(x, sums[0]);
            }
            if whole < width {
                let x = L::load_part(x.add(whole), width - whole);
                sums[1] = x.fma(x, sums[1]);
            }
            let sum = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
            let scale = L::splat(1.0 / (sum / width as f32 + eps).sqrt());
            for i in (0..whole).step_by(L::N) {
                L::load(x.add(i)).mul(scale).mul(L::load(weight.as_ptr().add(i))).store(out.add(i));
            }
            if whole < width {
                let rest = width - whole;
                let weight = L::load_part(weight.as_ptr().add(whole), rest);
                L::load_part(x.add(whole), rest)
                    .mul(scale)
                    .mul(weight)
                    .store_part(out.add(whole), rest);
            }
        }
    }
}

/// Layer norm of every row, in place: `x = (x - mean) / sqrt(variance + eps) * weight + bias` (Ba
/// et al., 2016).
///
/// `x` holds rows of `weight.len()`. The variance is the mean of squared deviations, in a second
/// pass: the difference of mean square and squared mean would lose it where the mean is large.
///
/// # Panics
/// When the lengths do not fit.
pub fn layer_norm_in_place(
    isa: Isa,
    x: &mut [f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    eps: f32,
) {
    let width = weight.len();
    assert!(
        x.len().is_multiple_of(width.max(1)) && bias.is_none_or(|bias| bias.len() == width),
        "layer_norm: rows of the weight's width"
    );
    let (rows, x) = (x.len() / width.max(1), x.as_mut_ptr());
    // SAFETY: the slice holds that many whole rows.
    unsafe {
        dispatch!(isa, layer_norm_kernel(x: *mut f32, weight: &[f32], bias: Option<&[f32]>, rows: usize, eps: f32));
    }
}

/// The sum over a row of its deviations from `mean`, or of their squares.
///
/// # Safety
/// `x` points to `width` elements.
#[inline(always)]
unsafe fn moment<L: Lanes>(x: *const f32, width: usize, mean: f32, square: bool) -> f32 {
    let (blocks, whole) = (width - width % (4 * L::N), width - width % L::N);
    let minus = L::splat(mean);
    let mut sums = [L::splat(0.0); 4];
    macro_rules! add {
        ($sum:expr, $x:expr) => {{
            let x = $x.sub(minus);
            $sum = if square { x.fma(x, $sum) } else { $sum.add(x) };
        }};
    }
    // SAFETY: every index is below `width`.
    unsafe {
        for i in (0..blocks).step_by(4 * L::N) {
            for (k, sum) in sums.iter_mut().enumerate() {
                add!(*sum, L::load(x.add(i + k * L::N)));
            }
        }
        for i in (blocks..whole).step_by(L::N) {
            add!(sums[0], L::load(x.add(i)));
        }
        let mut sum = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
        // The remainder is handled separately: zeros in its place would deviate from the mean, too.
        for i in whole..width {
            let x = *x.add(i) - mean;
            sum += if square { x * x } else { x };
        }
        sum
    }
}

/// # Safety
/// `x` points to `rows * weight.len()` elements; the bias is as long as the weight.
#[inline(always)]
unsafe fn layer_norm_kernel<L: Lanes>(
    x: *mut f32,
    weight: &[f32],
    bias: Option<&[f32]>,
    rows: usize,
    eps: f32,
) {
    let width = weight.len();
    let whole = width - width % L::N;
    // SAFETY: every index is below `rows * width` (below `width` for weight and bias), which the
    // caller promises.
    unsafe {
        for row in 0..rows {
            let x = x.add(row * width);
            let mean = moment::<L>(x, width, 0.0, false) / width as f32;
            let variance = moment::<L>(x, width, mean, true) / width as f32;
            let (mean, scale) = (L::splat(mean), L::splat(1.0 / (variance + eps).sqrt()));
            for i in (0..whole).step_by(L::N) {
                let weight = L::load(weight.as_ptr().add(i));
                let bias = match bias {
                    Some(bias) => L::load(bias.as_ptr().add(i)),
                    None => L::splat(0.0),
                };
                L::load(x.add(i)).sub(mean).mul(scale).fma(weight, bias).store(x.add(i));
            }
            if whole < width {
                let rest = width - whole;
                let weight = L::load_part(weight.as_ptr().add(whole), rest);
                let bias = match bias {
                    Some(bias) => L::load_part(bias.as_ptr().add(whole), rest),
                    None => L::splat(0.0),
                };
                let part = L::load_part(x.add(whole), rest).sub(mean).mul(scale);
                part.fma(weight, bias).store_part(x.add(whole), rest);
            }
        }
    }
}

/// Softmax of every row of `width`, in place: `e^(x - max) / sum`. A row of only -infinity becomes
/// NaN.
///
/// # Panics
/// If `x` does not hold whole rows.
pub fn softmax(isa: Isa, x: &mut [f32], width: usize) {
    assert!(x.len().is_multiple_of(width.max(1)), "softmax: rows of {width}");
    // SAFETY: the rows cover the slice.
    unsafe {
        dispatch!(isa, softmax_kernel(x: &mut [f32], width: usize));
    }
}

#[inline(always)]
unsafe fn softmax_kernel<L: Lanes>(x: &mut [f32], width: usize) {
    for row in x.chunks_exact_mut(width.max(1)) {
        let (n, row) = (row.len(), row.as_mut_ptr());
        let whole = n - n % L::N;
        // SAFETY: every index is below `n`, the row's length.
        unsafe {
            let greatest = max_kernel::<L>(row, n);
            let top = L::splat(greatest);
            let (mut total, mut rest) = (L::splat(0.0), 0.0);
            for i in (0..whole).step_by(L::N) {
                let e = exp(L::load(row.add(i)).sub(top));
                e.store(row.add(i));
                total = total.add(e);
            }
            if whole < n {
                let e = exp(L::load_part(row.add(whole), n - whole).sub(top));
                e.store_part(row.add(whole), n - whole);
                for i in whole..n {
                    rest += *row.add(i);
                }
            }
            let scale = 1.0 / (total.sum() + rest);
            for i in (0..whole).step_by(L::N) {
                L::load(row.add(i)).mul(L::splat(scale)).store(row.add(i));
            }
            for i in whole..n {
                *row.add(i) *= scale;
            }
        }
    }
}

/// The greatest element, ignoring NaN; -infinity for an empty slice.
pub fn max(isa: Isa, x: &[f32]) -> f32 {
    let (x, n) = (x.as_ptr(), x.len());
    // SAFETY: the slice has `n` elements.
    unsafe { dispatch!(isa, max_kernel(x: *const f32, n: usize) -> f32) }
}

#[inline(always)]
unsafe fn max_kernel<L: Lanes>(x: *const f32, n: usize) -> f32 {
    let (blocks, whole) = (n - n % (4 * L::N), n - n % L::N);
    let mut tops = [L::splat(f32::NEG_INFINITY); 4];
    // SAFETY: every index is below `n`.
    unsafe {
        for i in (0..blocks).step_by(4 * L::N) {
            for (k, top) in tops.iter_mut().enumerate() {
                *top = L::load(x.add(i + k * L::N)).max(*top);
            }
        }
        for i in (blocks..whole).step_by(L::N) {
            tops[0] = L::load(x.add(i)).max(tops[0]);
        }
        let mut top = tops[0].max(tops[1]).max(tops[2].max(tops[3])).greatest();
        for i in whole..n {
            if *x.add(i) > top {
                top = *x.add(i);
            }
        }
        top
    }
}

/// The index of the greatest element, the lowest among equals, ignoring NaN; 0 if there is none.
pub fn argmax(isa: Isa, x: &[f32]) -> usize {
    let top = max(isa, x);
    // A second scan that stops at the first hit beats carrying indices through the first.
    const BLOCK: usize = 64;
    let mut start = 0;
    for block in x.chunks(BLOCK) {
        if block.iter().fold(false, |hit, &x| hit | (x == top)) {
            return start + block.iter().position(|&x| x == top).unwrap_or(0);
        }
        start += BLOCK;
    }
    0
}

/// Rotary embedding (Su et al., 2021) of one token, in place: the first `2 * cos.len()` elements of
/// every head of `x` (`[heads][head_dim]`) are rotated by the angles with these cosines and sines;
/// the rest of a head is unchanged.
///
/// # Panics
/// If `cos` and `sin` differ in length, a head is shorter than `2 * cos.len()`, or `x` does not
/// hold whole heads.
pub fn rope(isa: Isa, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], pairing: Pairing) {
    assert!(
        cos.len() == sin.len() && 2 * cos.len() <= head_dim,
        "rope: {} angles of heads of {head_dim}",
        cos.len()
    );
    assert!(x.len().is_multiple_of(head_dim.max(1)), "rope: whole heads");
    // SAFETY: the kernel touches the first `2 * cos.len() <= head_dim` elements of every head.
    unsafe {
        dispatch!(isa, rope_kernel(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], pairing: Pairing));
    }
}

#[inline(always)]
unsafe fn rope_kernel<L: Lanes>(
    x: &mut [f32],
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
    pairing: Pairing,
) {
    let n = cos.len();
    let whole = n - n % L::N;
    for head in x.chunks_exact_mut(head_dim.max(1)) {
        let head = head.as_mut_ptr();
        // SAFETY: every index is below `2 n <= head_dim`, the head's length, or below `n` for the
        // angles.
        unsafe {
            for i in (0..whole).step_by(L::N) {
                let (c, s) = (L::load(cos.as_ptr().add(i)), L::load(sin.as_ptr().add(i)));
                let (a, b) = match pairing {
                    Pairing::Half => (L::load(head.add(i)), L::load(head.add(n + i))),
                    Pairing::Adjacent => L::load_pairs(head.add(2 * i)),
                };
                let (turned_a, turned_b) = (a.mul(c).sub(b.mul(s)), b.mul(c).add(a.mul(s)));
                match pairing {
                    Pairing::Half => {
                        turned_a.store(head.add(i));
                        turned_b.store(head.add(n + i));
                    }
                    Pairing::Adjacent => L::store_pairs(turned_a, turned_b, head.add(2 * i)),
                }
            }
            for i in whole..n {
                let (first, second) = match pairing {
                    Pairing::Half => (i, n + i),
                    Pairing::Adjacent => (2 * i, 2 * i + 1),
                };
                let (a, b) = (*head.add(first), *head.add(second));
                *head.add(first) = a * cos[i] - b * sin[i];
                *head.add(second) = b * cos[i] + a * sin[i];
            }
        }
    }
}

/// f32 to f16, rounded to nearest even; beyond 65504 infinite.
///
/// # Panics
/// When the lengths differ.
pub fn to_f16(isa: Isa, x: &[f32], out: &mut [f16]) {
    assert_eq!(x.len(), out.len(), "to_f16: lengths");
    // SAFETY: both slices have as many elements; f16 is its bits.
    unsafe {
        let (x, out, n) = (x.as_ptr(), out.as_mut_ptr().cast::<u16>(), x.len());
        dispatch!(isa, to_f16_kernel(x: *const f32, out: *mut u16, n: usize));
    }
}

/// f16 to f32, exactly.
///
/// # Panics
/// When the lengths differ.
pub fn from_f16(isa: Isa, x: &[f16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "from_f16: lengths");
    // SAFETY: both slices have as many elements; f16 is its bits.
    unsafe {
        let (x, out, n) = (x.as_ptr().cast::<u16>(), out.as_mut_ptr(), x.len());
        dispatch!(isa, from_f16_kernel(x: *const u16, out: *mut f32, n: usize));
    }
}

/// Converts `n` f32 to the bits of f16.
///
/// # Safety
/// `x` and `out` point to `n` elements.
#[inline(always)]
pub(crate) unsafe fn to_f16_kernel<L: Lanes>(x: *const f32, out: *mut u16, n: usize) {
    let whole = n - n % L::N;
    // SAFETY: every index is below `n`.
    unsafe {
        for i in (0..whole).step_by(L::N) {
            L::load(x.add(i)).store_f16(out.add(i));
        }
        for i in whole..n {
            *out.add(i) = f16::from_f32_const(*x.add(i)).to_bits();
        }
    }
}

#[inline(always)]
unsafe fn from_f16_kernel<L: Lanes>(x: *const u16, out: *mut f32, n: usize) {
    let whole = n - n % L::N;
    // SAFETY: every index is below `n`.
    unsafe {
        for i in (0..whole).step_by(L::N) {
            L::load_f16(x.add(i)).store(out.add(i));
        }
        for i in whole..n {
            *out.add(i) = f16::from_bits(*x.add(i)).to_f32_const();
        }
    }
}

/// f32 to bf16, rounded to nearest even; NaN stays NaN.
///
/// # Panics
/// When the lengths differ.
pub fn to_bf16(isa: Isa, x: &[f32], out: &mut [bf16]) {
    assert_eq!(x.len(), out.len(), "to_bf16: lengths");
    // SAFETY: the kernel is safe code.
    unsafe { dispatch!(isa, to_bf16_kernel(x: &[f32], out: &mut [bf16])) }
}

/// bf16 to f32, exactly.
///
/// # Panics
/// When the lengths differ.
pub fn from_bf16(isa: Isa, x: &[bf16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "from_bf16: lengths");
    // SAFETY: the kernel is safe code.
    unsafe { dispatch!(isa, from_bf16_kernel(x: &[bf16], out: &mut [f32])) }
}

// These two are integer arithmetic without branches: the compiler turns the plain loops into
// vectors of the set that they are instantiated for.

#[inline(always)]
unsafe fn to_bf16_kernel<L: Lanes>(x: &[f32], out: &mut [bf16]) {
    for (x, out) in x.iter().zip(out) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits >> 16 | 0x40;
        *out = bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16);
    }
}

#[inline(always)]
unsafe fn from_bf16_kernel<L: Lanes>(x: &[bf16], out: &mut [f32]) {
    for (x, out) in x.iter().zip(out) {
        *out = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}
