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
    p = p * r + 0.5;
    let e = p * (r * r) + r + 1.0;
    let scaled = f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= -87.0 { scaled } else { 0.0 }
}

/// Makes `name` a function that runs `plain` compiled for AVX2 where the processor has it, and for the lowest common
/// set elsewhere.
macro_rules! widened {
    ($(#[$doc:meta])* $name:ident = $plain:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn wide($($arg: $type),*) $(-> $result)? {
                    $plain($($arg),*)
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has the instructions.
                    return unsafe { wide($($arg),*) };
                }
            }
            $plain($($arg),*)
        }
    };
}

widened! {
    /// The sum of `e^((x - top) * factor)`; what equals `top` counts as 1, even infinity.
    sum_exp = sum_exp_plain(x: &[f32], top: f32, factor: f32) -> f64
}

widened! {
    /// The terms of [`sum_exp`], summed for every [`BLOCK`].
    block_sums = block_sums_plain(x: &[f32], top: f32, factor: f32, sums: &mut Vec<f32>)
}

widened! {
    /// The greatest number of every [`BLOCK`] of `x`; NaN never wins, and of nothing but NaN it is -infinity.
    tops = tops_plain(x: &[f32], tops: &mut Vec<f32>)
}

widened! {
    /// A number such that those of `x` above it hold a share of at least `share` of [`sum_exp`], and hardly more; and
    /// that sum. By a histogram: `top` is finite.
    prefix_floor = prefix_floor_plain(x: &[f32], top: f32, factor: f32, share: f32) -> (f32, f64)
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

#[inline(always)]
fn block_sums_plain(x: &[f32], top: f32, factor: f32, sums: &mut Vec<f32>) {
    sums.clear();
    for block in x.chunks(BLOCK) {
        let mut lanes = [0.0f32; LANES];
        let mut lines = block.chunks_exact(LANES);
        for line in &mut lines {
            for i in 0..LANES {
                lanes[i] += if line[i] == top { 1.0 } else { exp((line[i] - top) * factor) };
            }
        }
        for (i, &x) in lines.remainder().iter().enumerate() {
            lanes[i] += if x == top { 1.0 } else { exp((x - top) * factor) };
        }
        sums.push(lanes.iter().sum());
    }
}

#[inline(always)]
fn prefix_floor_plain(x: &[f32], top: f32, factor: f32, share: f32) -> (f32, f64) {
    // Bins of an eighth of a nat below the top; what lies deeper than all of them shares the last one.
    const BINS: usize = 256;
    const PER_NAT: f32 = 8.0;
    // Four histograms in turn, since additions to one bin wait for each other.
    let mut bins = [[0.0f64; BINS]; 4];
    let (mut at, mut weights) = ([0u32; BLOCK], [0.0f32; BLOCK]);
    for block in x.chunks(BLOCK) {
        for (i, &x) in block.iter().enumerate() {
            let depth = (top - x) * factor;
            weights[i] = if x == top { 1.0 } else { exp(-depth) };
            let bin = depth * PER_NAT;
            // NaN and infinity have no weight, whichever bin they count in.
            let bin = if bin < (BINS - 1) as f32 { bin } else { (BINS - 1) as f32 };
            // Adding 2^23 leaves the integer in the lowest bits: it rounds, which moves the bins by half.
            at[i] = (bin + 8_388_608.0).to_bits() & 0xff;
        }
        for i in 0..block.len() {
            bins[i % 4][at[i] as usize] += f64::from(weights[i]);
        }
    }
    let sum = |bin: usize| bins.iter().map(|bins| bins[bin]).sum::<f64>();
    let total: f64 = (0..BINS).map(sum).sum();
    let mut left = total * f64::from(share);
    for bin in 0..BINS - 1 {
        left -= sum(bin);
        // A little beyond, against the rounding of these sums.
        if left < -1e-6 * total {
            return (top - (bin as f32 + 0.51) / PER_NAT / factor, total);
        }
    }
    (f32::MIN, total)
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
            assert!(
                (f64::from(exp(x)) - expected).abs() <= 3e-7 * expected,
                "exp({x}) = {}",
                exp(x)
            );
        }
        assert_eq!(
            [exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY), exp(f32::NAN)],
            [1.0, 0.0, 0.0, 0.0]
        );
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
            block_sums(&x, 3.0, 0.5, &mut found);
            for (block, &found) in x.chunks(BLOCK).zip(&found) {
                let expected: f64 = block.iter().map(|&x| ((f64::from(x) - 3.0) * 0.5).exp()).sum();
                assert!((f64::from(found) - expected).abs() <= 1e-6 * expected);
            }
            for share in [0.0, 0.3, 0.9, 0.999] {
                let (floor, total) = prefix_floor(&x, 3.0, 0.5, share);
                assert!((total - sum_exp(&x, 3.0, 0.5)).abs() <= 1e-6 * total);
                let above: Vec<f32> = x.iter().copied().filter(|&x| x >= floor).collect();
                assert!(sum_exp(&above, 3.0, 0.5) >= f64::from(share) * total);
            }
            tops(&x, &mut found);
            let expected: Vec<f32> = x
                .chunks(BLOCK)
                .map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                .collect();
            assert_eq!(found, expected);
        }
    }
}
