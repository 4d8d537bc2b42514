//! Loops over a whole vocabulary, written so that the compiler makes vectors of them.
//!
//! Everything is additions, multiplications, fused ones where written so, and bits, without library
//! functions, so that every machine gets the same bits; wider registers only make it faster.
//! Weights are whole numbers, whose sums do not depend on the order of their terms: a GPU, which
//! sums in another order, draws the same token.

use super::Candidate;

/// Logits that are scanned as one.
pub(super) const BLOCK: usize = 64;

/// Sums kept side by side.
const LANES: usize = 16;

/// Cephes' `expf`: what `x = n ln 2 + r` takes from `x` per `n`, in two steps, and its polynomial
/// for `e^r`, highest first.
pub(super) const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// See [`LN_2`].
pub(super) const POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// Exponents below this weigh nothing: `e^-21` is a little more than the unit of a weight.
pub(super) const FAINTEST: f32 = -21.0;

/// The weight of the greatest logit.
pub(super) const ONE: u32 = 1 << 31;

/// `e^x` for `x <= 0`, within 3 units in the last place; 0 below -87 and for NaN.
///
/// `x = n ln 2 + r`, the polynomial of Cephes' `expf` for `e^r`, and `n` added to the exponent's
/// bits.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    // Fused where a GPU's compiler might fuse, so that it has no choice.
    let r = n.mul_add(-LN_2[1], n.mul_add(-LN_2[0], x));
    let mut p = POLYNOMIAL[0];
    for c in &POLYNOMIAL[1..] {
        p = p.mul_add(r, *c);
    }
    let e = p.mul_add(r * r, r) + 1.0;
    let scaled = f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= -87.0 { scaled } else { 0.0 }
}

/// `e^((logit - top) * factor)` in units of `2^-31`, rounded down; [`ONE`] for the top even if it
/// is infinite, 0 for NaN.
#[inline(always)]
pub(super) fn weight(logit: f32, top: f32, factor: f32) -> u32 {
    let x = (logit - top) * factor;
    let bits = exp(x).to_bits();
    let mantissa = (bits & 0x7f_ffff | 0x80_0000) << 8;
    let scaled = mantissa >> 127u32.wrapping_sub(bits >> 23).min(31);
    let scaled = if x >= FAINTEST { scaled } else { 0 };
    if logit == top { ONE } else { scaled }
}

/// Makes `name` a function that runs `plain` compiled for AVX2 with fused products where the
/// processor has them, and for the lowest common set elsewhere.
macro_rules! widened {
    ($(#[$doc:meta])* $name:ident = $plain:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $type),*) $(-> $result)? {
                    $plain($($arg),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
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
    /// The [`weight`]s, summed for every [`BLOCK`].
    block_sums = block_sums_plain(x: &[f32], top: f32, factor: f32, sums: &mut Vec<u64>)
}

widened! {
    /// The greatest number of every [`BLOCK`] of `x`; NaN never wins, and of nothing but NaN it is
    /// -infinity.
    tops = tops_plain(x: &[f32], tops: &mut Vec<f32>)
}

widened! {
    /// Gives candidates their [`weight`]s.
    weigh = weigh_plain(candidates: &mut [Candidate], top: f32, factor: f32)
}

widened! {
    /// Makes tokens impossible whose bit is not set.
    forbid = forbid_plain(logits: &mut [f32], mask: &[u32])
}

widened! {
    /// Whether a number is NaN or infinity.
    any_broken = any_broken_plain(x: &[f32]) -> bool
}

widened! {
    /// A number such that the elements of `x` above it have at least `wanted(total)` of all
    /// [`weight`]s, and hardly more; and that total. By a histogram: `top` is finite.
    prefix_floor = prefix_floor_plain(
        x: &[f32],
        top: f32,
        factor: f32,
        wanted: fn(u64, u32) -> u64,
        share: u32
    ) -> (f32, u64)
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
fn block_sums_plain(x: &[f32], top: f32, factor: f32, sums: &mut Vec<u64>) {
    sums.clear();
    sums.extend(x.chunks(BLOCK).map(|block| {
        let mut weights = [0; BLOCK];
        for (w, &x) in weights.iter_mut().zip(block) {
            *w = weight(x, top, factor);
        }
        weights.iter().copied().map(u64::from).sum::<u64>()
    }));
}

#[inline(always)]
fn prefix_floor_plain(
    x: &[f32],
    top: f32,
    factor: f32,
    wanted: fn(u64, u32) -> u64,
    share: u32,
) -> (f32, u64) {
    // Bins of an eighth of a nat below the top; what lies deeper than all of them shares the last
    // one.
    const BINS: usize = 256;
    const PER_NAT: f32 = 8.0;
    // Four histograms in turn, since additions to one bin wait for each other.
    let mut bins = [[0u64; BINS]; 4];
    let (mut at, mut weights) = ([0u32; BLOCK], [0u32; BLOCK]);
    for block in x.chunks(BLOCK) {
        for (i, &x) in block.iter().enumerate() {
            weights[i] = weight(x, top, factor);
            let bin = (top - x) * factor * PER_NAT;
            // NaN and infinity have no weight, whichever bin they count in.
            let bin = if bin < (BINS - 1) as f32 { bin } else { (BINS - 1) as f32 };
            // Adding 2^23 leaves the integer in the lowest bits: it rounds, which moves the bins by
            // half.
            at[i] = (bin + 8_388_608.0).to_bits() & 0xff;
        }
        for i in 0..block.len() {
            bins[i % 4][at[i] as usize] += u64::from(weights[i]);
        }
    }
    let sum = |bin: usize| bins.iter().map(|bins| bins[bin]).sum::<u64>();
    let total = (0..BINS).map(sum).sum();
    let (wanted, mut found) = (wanted(total, share), 0);
    for bin in 0..BINS - 1 {
        found += sum(bin);
        if found >= wanted {
            let floor = top - (bin as f32 + 0.51) / PER_NAT / factor;
            // A little below, against the rounding of the floor itself.
            return (floor - (top.abs() + floor.abs()) * f32::EPSILON, total);
        }
    }
    (f32::MIN, total)
}

#[inline(always)]
fn weigh_plain(candidates: &mut [Candidate], top: f32, factor: f32) {
    for candidate in candidates {
        candidate.weight = weight(candidate.logit, top, factor);
    }
}

#[inline(always)]
fn forbid_plain(logits: &mut [f32], mask: &[u32]) {
    for (i, logits) in logits.chunks_mut(32).enumerate() {
        let word = mask.get(i).copied().unwrap_or(0);
        if word == u32::MAX {
            continue;
        }
        // All are written, so that no branch is taken for each.
        for (bit, logit) in logits.iter_mut().enumerate() {
            *logit = if word >> bit & 1 == 0 { f32::NEG_INFINITY } else { *logit };
        }
    }
}

#[inline(always)]
fn any_broken_plain(x: &[f32]) -> bool {
    // All bits of a NaN's exponent are set, and one of the others.
    let broken = |x: &f32| {
        let bits = x.to_bits();
        u32::from(bits & 0x7fff_ffff > 0x7f80_0000) | u32::from(bits == 0x7f80_0000)
    };
    x.chunks(BLOCK).any(|block| block.iter().fold(0, |any, x| any | broken(x)) != 0)
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
            let fixed = f64::from(weight(x, 0.0, 1.0)) / f64::from(ONE);
            assert!(
                (fixed - expected).abs() <= 3e-7 * expected + 1.0 / f64::from(ONE) || x < -21.0
            );
            assert!(
                (f64::from(exp(x)) - expected).abs() <= 3e-7 * expected,
                "exp({x}) = {}",
                exp(x)
            );
        }
        assert_eq!(weight(f32::INFINITY, f32::INFINITY, 1.0), ONE);
        let faint = [(-21.0f32).next_down(), -50.0, -90.0, f32::NEG_INFINITY, f32::NAN];
        assert_eq!(faint.map(|x| weight(x, 0.0, 1.0)), [0; 5]);
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
            let mut sums = Vec::new();
            block_sums(&x, 3.0, 0.5, &mut sums);
            for (block, &found) in x.chunks(BLOCK).zip(&sums) {
                let expected: f64 = block.iter().map(|&x| ((f64::from(x) - 3.0) * 0.5).exp()).sum();
                let found = found as f64 / f64::from(ONE);
                assert!((found - expected).abs() <= 1e-6 * expected + 64.0 / f64::from(ONE));
            }
            for share in [0, 300, 900, 999] {
                let wanted: fn(u64, u32) -> u64 = |total, share| total / 1000 * u64::from(share);
                let (floor, total) = prefix_floor(&x, 3.0, 0.5, wanted, share);
                assert_eq!(total, sums.iter().sum::<u64>());
                let above = x.iter().filter(|x| **x >= floor);
                let above: u64 = above.map(|&x| u64::from(weight(x, 3.0, 0.5))).sum();
                assert!(above >= wanted(total, share));
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
