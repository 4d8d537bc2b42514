//! Loops over a whole vocabulary, written so that the compiler makes vectors of them.
//!
//! Everything is additions, multiplications and bits in a fixed order, without fused operations or library functions,
//! so that every machine gets the same bits; wider registers only make it faster.

/// Logits that are scanned as one.
pub(super) const BLOCK: usize = 64;

/// Sums kept side by side.
const LANES: usize = 16;

/// `e^x` for `x <= 0`, within 3 units in the last place; 0 below -87 and for NaN.
///
/// `x = n ln 2 + r`, the polynomial of Cephes' `expf` for `e^r`, and `n` added to the exponent's bits.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.000_000_1e-1;
    let e = p * (r * r) + r + 1.0;
    let scaled = f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= -87.0 { scaled } else { 0.0 }
}

/// The sum of `e^((x - top) * factor)`; what equals `top` counts as 1, even infinity.
pub(super) fn sum_exp(x: &[f32], top: f32, factor: f32) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide(x: &[f32], top: f32, factor: f32) -> f64 {
            sum_exp_plain(x, top, factor)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the instructions.
            return unsafe { wide(x, top, factor) };
        }
    }
    sum_exp_plain(x, top, factor)
}

#[inline(always)]
fn sum_exp_plain(x: &[f32], top: f32, factor: f32) -> f64 {
    let term = |x: f32| if x == top { 1.0 } else { exp((x - top) * factor) };
    let mut total = 0.0;
    // Short sums in f32, joined in f64: a vocabulary's worth of small terms would drown in one f32.
    for block in x.chunks(32 * LANES) {
        let mut sums = [0.0f32; LANES];
        let mut lines = block.chunks_exact(LANES);
        for line in &mut lines {
            for i in 0..LANES {
                sums[i] += term(line[i]);
            }
        }
        for (i, &x) in lines.remainder().iter().enumerate() {
            sums[i] += term(x);
        }
        total += sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
    }
    total
}

/// The greatest number of every [`BLOCK`] of `x`; NaN never wins, and of nothing but NaN it is -infinity.
pub(super) fn tops(x: &[f32], tops: &mut Vec<f32>) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide(x: &[f32], tops: &mut Vec<f32>) {
            tops_plain(x, tops);
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has the instructions.
            return unsafe { wide(x, tops) };
        }
    }
    tops_plain(x, tops);
}

#[inline(always)]
fn tops_plain(x: &[f32], tops: &mut Vec<f32>) {
    tops.clear();
    for block in x.chunks(BLOCK) {
        let mut greatest = [f32::NEG_INFINITY; LANES];
        let mut lines = block.chunks_exact(LANES);
        for line in &mut lines {
            for i in 0..LANES {
                greatest[i] = if line[i] > greatest[i] { line[i] } else { greatest[i] };
            }
        }
        for (i, &x) in lines.remainder().iter().enumerate() {
            greatest[i] = if x > greatest[i] { x } else { greatest[i] };
        }
        tops.push(greatest.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential() {
        for i in 0..87_000 {
            let x = -(i as f32) / 1000.0;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) - expected).abs() <= 3e-7 * expected, "exp({x}) = {}", exp(x));
        }
        assert_eq!([exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY), exp(f32::NAN)], [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn sums_and_tops() {
        for n in [1, 15, 16, 17, 63, 64, 65, 1000] {
            let mut x: Vec<f32> = (0..n).map(|i| ((i * 37) % 101) as f32 / 10.0 - 20.0).collect();
            x[n / 2] = 3.0;
            let expected: f64 = x.iter().map(|&x| ((f64::from(x) - 3.0) * 0.5).exp()).sum();
            assert!((sum_exp(&x, 3.0, 0.5) - expected).abs() < 1e-6 * expected);
            assert_eq!(sum_exp(&x, 3.0, 0.5).to_bits(), sum_exp_plain(&x, 3.0, 0.5).to_bits());
            let mut found = Vec::new();
            tops(&x, &mut found);
            let expected: Vec<f32> =
                x.chunks(BLOCK).map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
            assert_eq!(found, expected);
        }
    }
}
