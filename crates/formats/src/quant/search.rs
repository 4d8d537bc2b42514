//! The search for scales: minimise the squared error of the decoded weights, each counted by its
//! importance.
//!
//! Four steps, each only ever kept when it lowers the error:
//! 1. every sub-block alone: try about twenty grids around the obvious one, and fit scale (and min)
//!    to the codes that each gives by least squares;
//! 2. round the scales (and mins) to small integers times the block's f16 `d` (and `min`), trying
//!    the neighbours of each integer with the codes chosen anew;
//! 3. with integers and codes held, fit `d` (and `min`) by least squares, and return to 2;
//! 4. where there is a `min`: with integers held, try the f16 neighbours of `d` and `min` together.
//!
//! Where nothing is known of importance, all weights count alike ([`EVEN`]). An importance is
//! positive and finite. Weights that are not finite are clamped, a NaN counts as zero.

use super::Parts;
use super::plain::{f16_to_f32, f32_to_f16};

/// The integers a block can store.
pub(super) struct Grid {
    /// Elements per sub-block.
    pub(super) sub: usize,
    /// Affine: codes are `0..=codes`. Symmetric: `-codes..codes`.
    pub(super) codes: f32,
    /// Affine: scales and mins are `0..=scales`. Symmetric: scales are `-scales..scales`.
    pub(super) scales: f32,
}

/// One assignment of every integer scale and min, the f16 bits of `d` and `min`, and the squared
/// error.
#[derive(Clone)]
struct Choice {
    d: u16,
    min: u16,
    scales: [f32; 16],
    mins: [f32; 16],
    error: f32,
}

/// The importance of weights of which nothing is known: all count alike.
pub(super) const EVEN: [f32; 256] = [1.0; 256];

/// How often steps 2 and 3 repeat at most.
const ROUNDS: usize = 4;

/// Nearest integer inside `low..=high`; NaN gives `low`.
#[inline]
fn nearest(x: f32, low: f32, high: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves no fraction bits: two additions round to even, and vectorise on
    // every machine.
    const ROUND: f32 = 12_582_912.0;
    (x.max(low).min(high) + ROUND) - ROUND
}

/// f16 bits of `x`, held inside the finite range.
fn finite_f16(x: f32) -> u16 {
    f32_to_f16(if x.is_nan() { 0.0 } else { x.clamp(-65504.0, 65504.0) })
}

/// The weights with NaN and the absurd removed, so that squares of sums stay finite.
fn clean(weights: &[f32]) -> [f32; 256] {
    let mut x = [0.0; 256];
    for (x, &w) in x.iter_mut().zip(weights) {
        *x = if w.is_nan() { 0.0 } else { w.clamp(-1e9, 1e9) };
    }
    x
}

/// `1 / x`, or 0 where that has no finite value.
fn reciprocal(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Squared error of `x ~ s * q - m` with `q` the nearest code in `low..=high`, each weight's times
/// its importance.
#[inline]
fn error((x, importance): Counted<'_>, s: f32, m: f32, low: f32, high: f32) -> f32 {
    let inverse = reciprocal(s);
    // Eight running sums let the loop run eight elements at a time.
    let mut sums = [0.0f32; 8];
    for (x, by) in x.chunks_exact(8).zip(importance.chunks_exact(8)) {
        for ((sum, &x), &by) in sums.iter_mut().zip(x).zip(by) {
            let q = nearest((x + m) * inverse, low, high);
            let e = s * q - m - x;
            *sum += by * (e * e);
        }
    }
    sums.iter().sum()
}

/// Weights, and how much the error of each counts.
type Counted<'a> = (&'a [f32], &'a [f32]);
/// The same of a whole block.
type Block<'a> = (&'a [f32; 256], &'a [f32]);

/// The sub-blocks of a block.
fn subs<'a>((x, importance): Block<'a>, grid: &Grid) -> impl Iterator<Item = Counted<'a>> {
    x.chunks_exact(grid.sub).zip(importance.chunks_exact(grid.sub))
}

/// `d` as f16 bits for weights `w = d * (code - codes)`, codes below `2 * codes`, of a block that
/// has one scale.
pub(super) fn alone_symmetric(weights: &[f32], importance: &[f32], codes: f32) -> u16 {
    finite_f16(fit_symmetric((&clean(weights)[..weights.len()], importance), codes))
}

/// `d` and `min` as f16 bits for weights `w = d * code + min`, codes up to `codes`, of a block that
/// has one of each.
pub(super) fn alone_affine(weights: &[f32], importance: &[f32], codes: f32) -> (u16, u16) {
    let x = (&clean(weights)[..weights.len()], importance);
    let (least, most) = super::range(x.0);
    let (s, m) = fit_affine(x, codes);
    let both = [((most - least) / codes, least), (s, -m)];
    let both = both.map(|(d, min)| (finite_f16(d), finite_f16(min)));
    let [plain, fitted] =
        both.map(|(d, min)| error(x, f16_to_f32(d), -f16_to_f32(min), 0.0, codes));
    // The fit keeps zero among what codes stand for; weights that are all far from it lose by that.
    if fitted < plain { both[1] } else { both[0] }
}

/// Scales, mins and codes for `w = d * scale * code - min * m` with codes, scales and mins from
/// zero up.
pub(super) fn affine(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts {
    let x = &(&clean(weights), importance);
    let mut fits = [(0.0f32, 0.0f32); 16];
    let (mut largest_scale, mut largest_min) = (0.0f32, 0.0f32);
    for (fit, x) in fits.iter_mut().zip(subs(*x, grid)) {
        *fit = fit_affine(x, grid.codes);
        largest_scale = largest_scale.max(fit.0);
        largest_min = largest_min.max(fit.1);
    }
    let mut best = assign_affine(
        x,
        grid,
        finite_f16(largest_scale / grid.scales),
        finite_f16(largest_min / grid.scales),
        &fits,
    );
    for _ in 0..ROUNDS {
        let (d, min) = refit_affine(x, grid, &best);
        if (d, min) == (best.d, best.min) {
            break;
        }
        let (step, min_step) = (f16_to_f32(best.d), f16_to_f32(best.min));
        for (i, fit) in fits.iter_mut().enumerate() {
            *fit = (best.scales[i] * step, best.mins[i] * min_step);
        }
        let next = assign_affine(x, grid, d, min, &fits);
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    polish_affine(x, grid, &mut best);
    let mut parts = Parts { d: best.d, min: best.min, ..Parts::default() };
    let (d, min) = (f16_to_f32(best.d), f16_to_f32(best.min));
    for (i, (x, codes)) in
        x.0.chunks_exact(grid.sub).zip(parts.codes.chunks_exact_mut(grid.sub)).enumerate()
    {
        let (s, m) = (d * best.scales[i], min * best.mins[i]);
        let inverse = reciprocal(s);
        for (&x, code) in x.iter().zip(codes) {
            *code = nearest((x + m) * inverse, 0.0, grid.codes) as u8;
        }
        (parts.scales[i], parts.mins[i]) = (best.scales[i] as i8, best.mins[i] as i8);
    }
    parts
}

/// Scale and offset of a group, whose length is a multiple of 8, for weights
/// `w = scale * code + offset` with codes up to `codes`: numbers that `stored` gives back, which
/// rounds them to what is stored.
pub(crate) fn group(weights: &[f32], codes: f32, stored: impl Fn(f32) -> f32) -> (f32, f32) {
    let even = vec![1.0; weights.len()];
    let x = (weights, &even[..]);
    let (least, most) = super::range(weights);
    let (s, m) = fit_affine(x, codes);
    let mut best = (0.0, stored(least));
    let mut smallest = f32::INFINITY;
    for (scale, offset) in [((most - least) / codes, least), (s, -m)] {
        // A scale that is rounded down cuts the ends off, which costs most where there are many
        // codes.
        for by in [1.0, 1.0 + 1.0 / 256.0, 1.0 - 1.0 / 256.0] {
            let (scale, offset) = (stored(scale * by), stored(offset));
            let e = error(x, scale, -offset, 0.0, codes);
            if e < smallest && scale.is_finite() && offset.is_finite() {
                (best, smallest) = ((scale, offset), e);
            }
        }
    }
    best
}

/// Step 1: the best real `(s, m)` with `m >= 0` for `x ~ s * q - m`.
fn fit_affine((x, importance): Counted<'_>, codes: f32) -> (f32, f32) {
    let low = x.iter().copied().fold(0.0, f32::min);
    let high = x.iter().copied().fold(f32::MIN, f32::max);
    if high <= low {
        return (0.0, -low);
    }
    let n: f32 = importance.iter().sum();
    let sum_x: f32 = x.iter().zip(importance).map(|(x, by)| by * x).sum();
    let mut best = ((high - low) / codes, -low);
    // Grids that differ only by rounding noise are no better: keep the one that uses every code.
    let noise = 1e-12 * n * (high - low) * (high - low);
    let mut best_error = error((x, importance), best.0, best.1, 0.0, codes) - noise;
    for step in -10..=10 {
        let inverse = (codes + 0.1 * step as f32) / (high - low);
        let (mut sum_q, mut sum_qq, mut sum_xq) = ([0.0f32; 8], [0.0f32; 8], [0.0f32; 8]);
        for (x, by) in x.chunks_exact(8).zip(importance.chunks_exact(8)) {
            for (i, (&x, &by)) in x.iter().zip(by).enumerate() {
                let q = nearest((x - low) * inverse, 0.0, codes);
                sum_q[i] += by * q;
                sum_qq[i] += by * (q * q);
                sum_xq[i] += by * (x * q);
            }
        }
        let (sum_q, sum_qq) = (sum_q.iter().sum::<f32>(), sum_qq.iter().sum::<f32>());
        let sum_xq: f32 = sum_xq.iter().sum();
        let mut s = (n * sum_xq - sum_x * sum_q) * reciprocal(n * sum_qq - sum_q * sum_q);
        let mut m = (s * sum_q - sum_x) / n;
        if m < 0.0 {
            m = 0.0;
            s = sum_xq * reciprocal(sum_qq);
        }
        if s > 0.0 {
            let e = error((x, importance), s, m, 0.0, codes);
            if e < best_error {
                (best, best_error) = ((s, m), e - noise);
            }
        }
    }
    best
}

/// Step 2: the integers near each wanted `(s, m)` that lose least.
fn assign_affine(
    x: &Block<'_>,
    grid: &Grid,
    d_bits: u16,
    min_bits: u16,
    wanted: &[(f32, f32); 16],
) -> Choice {
    let (d, min) = (f16_to_f32(d_bits), f16_to_f32(min_bits));
    let mut choice =
        Choice { d: d_bits, min: min_bits, scales: [0.0; 16], mins: [0.0; 16], error: 0.0 };
    for (i, x) in subs(*x, grid).enumerate() {
        let centre = nearest(wanted[i].0 * reciprocal(d), 0.0, grid.scales);
        let centre_min = nearest(wanted[i].1 * reciprocal(min), 0.0, grid.scales);
        let mut least = f32::INFINITY;
        for step in [0.0, -1.0, 1.0] {
            for step_min in [0.0, -1.0, 1.0] {
                let (scale, m) = (centre + step, centre_min + step_min);
                if scale < 0.0 || scale > grid.scales || m < 0.0 || m > grid.scales {
                    continue;
                }
                let e = error(x, d * scale, min * m, 0.0, grid.codes);
                if e < least {
                    (least, choice.scales[i], choice.mins[i]) = (e, scale, m);
                }
            }
        }
        choice.error += least;
    }
    choice
}

/// Step 3: `d` and `min` by least squares over the block, as f16 bits.
fn refit_affine(x: &Block<'_>, grid: &Grid, choice: &Choice) -> (u16, u16) {
    let (d, min) = (f16_to_f32(choice.d), f16_to_f32(choice.min));
    // Normal equations of sum (x - d a + min b)^2 with a = scale * code and b = m.
    let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (i, x) in subs(*x, grid).enumerate() {
        let (scale, b) = (choice.scales[i], choice.mins[i]);
        let (inverse, m) = (reciprocal(d * scale), min * b);
        for (&x, &by) in x.0.iter().zip(x.1) {
            let a = scale * nearest((x + m) * inverse, 0.0, grid.codes);
            aa += by * (a * a);
            ab += by * (a * b);
            bb += by * (b * b);
            xa += by * (x * a);
            xb += by * (x * b);
        }
    }
    let determinant = aa * bb - ab * ab;
    if determinant > 1e-6 * aa * bb {
        let (d, min) = ((bb * xa - ab * xb) / determinant, (ab * xa - aa * xb) / determinant);
        (finite_f16(d.max(0.0)), finite_f16(min.max(0.0)))
    } else {
        (finite_f16(((xa + min * ab) * reciprocal(aa)).max(0.0)), choice.min)
    }
}

/// Step 4: the f16 neighbours of `d` and `min`, with the integers held. Least squares rounds each
/// alone, but where a sub-block has few distinct weights the two roundings must cancel.
fn polish_affine(x: &Block<'_>, grid: &Grid, best: &mut Choice) {
    for _ in 0..ROUNDS {
        let (d_bits, min_bits, before) = (best.d, best.min, best.error);
        for d in d_bits.saturating_sub(1)..=d_bits.saturating_add(1) {
            for min in min_bits.saturating_sub(1)..=min_bits.saturating_add(1) {
                let (step, min_step) = (f16_to_f32(d), f16_to_f32(min));
                let mut sum = 0.0;
                for (i, x) in subs(*x, grid).enumerate() {
                    sum +=
                        error(x, step * best.scales[i], min_step * best.mins[i], 0.0, grid.codes);
                }
                if sum < best.error {
                    (best.d, best.min, best.error) = (d, min, sum);
                }
            }
        }
        if best.error >= before {
            break;
        }
    }
}

/// Scales and codes for `w = d * scale * (code - codes)` with signed scales; `grid.codes` is the
/// zero point.
pub(super) fn symmetric(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts {
    let x = &(&clean(weights), importance);
    let mut fits = [0.0f32; 16];
    for (fit, x) in fits.iter_mut().zip(subs(*x, grid)) {
        *fit = fit_symmetric(x, grid.codes);
    }
    // The largest scale becomes -scales, the integer furthest from zero, or one of those beside it:
    // a few starts, for d is rounded to f16 and the outliers of a block feel that most.
    let largest = super::peak(&fits);
    let mut best = assign_symmetric(x, grid, finite_f16(largest / -grid.scales), &fits);
    for below in 1..4 {
        let d = finite_f16(largest / (below as f32 - grid.scales));
        let next = assign_symmetric(x, grid, d, &fits);
        if next.error < best.error {
            best = next;
        }
    }
    for _ in 0..ROUNDS {
        let d = refit_symmetric(x, grid, &best);
        if d == best.d {
            break;
        }
        let step = f16_to_f32(best.d);
        for (fit, scale) in fits.iter_mut().zip(best.scales) {
            *fit = scale * step;
        }
        let next = assign_symmetric(x, grid, d, &fits);
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    let mut parts = Parts { d: best.d, ..Parts::default() };
    let d = f16_to_f32(best.d);
    for (i, (x, codes)) in
        x.0.chunks_exact(grid.sub).zip(parts.codes.chunks_exact_mut(grid.sub)).enumerate()
    {
        let inverse = reciprocal(d * best.scales[i]);
        for (&x, code) in x.iter().zip(codes) {
            *code = (nearest(x * inverse, -grid.codes, grid.codes - 1.0) + grid.codes) as u8;
        }
        parts.scales[i] = best.scales[i] as i8;
    }
    parts
}

/// Step 1: the best real `s`, of either sign, for `x ~ s * q`.
fn fit_symmetric((x, importance): Counted<'_>, codes: f32) -> f32 {
    let peak = super::peak(x);
    if peak == 0.0 {
        return 0.0;
    }
    let (low, high) = (-codes, codes - 1.0);
    let (mut best, mut best_gain) = (peak / low, 0.0);
    // The largest weight goes near the lowest code, which has one more step, or near the highest.
    for end in [low, high] {
        for step in (0..=9).chain(-9..=-1) {
            let inverse = (end + 0.1 * step as f32) / peak;
            // With codes held, s = sum xq / sum qq lowers the squared error from sum xx by (sum
            // xq)^2 / sum qq.
            let (mut sum_qq, mut sum_xq) = ([0.0f32; 8], [0.0f32; 8]);
            for (x, by) in x.chunks_exact(8).zip(importance.chunks_exact(8)) {
                for (i, (&x, &by)) in x.iter().zip(by).enumerate() {
                    let q = nearest(x * inverse, low, high);
                    sum_qq[i] += by * (q * q);
                    sum_xq[i] += by * (x * q);
                }
            }
            let sum_xq: f32 = sum_xq.iter().sum();
            let s = sum_xq * reciprocal(sum_qq.iter().sum());
            let gain = s * sum_xq;
            // Grids that differ only by rounding noise are no better: keep the one that uses every
            // code.
            if gain > best_gain * (1.0 + 1e-6) {
                (best, best_gain) = (s, gain);
            }
        }
    }
    best
}

/// Step 2: the integers near each wanted `s` that lose least.
fn assign_symmetric(x: &Block<'_>, grid: &Grid, d_bits: u16, wanted: &[f32; 16]) -> Choice {
    let d = f16_to_f32(d_bits);
    let mut choice = Choice { d: d_bits, min: 0, scales: [0.0; 16], mins: [0.0; 16], error: 0.0 };
    for (i, x) in subs(*x, grid).enumerate() {
        let centre = nearest(wanted[i] * reciprocal(d), -grid.scales, grid.scales - 1.0);
        let mut least = f32::INFINITY;
        for step in [0.0, -1.0, 1.0] {
            let scale = centre + step;
            if scale < -grid.scales || scale > grid.scales - 1.0 {
                continue;
            }
            let e = error(x, d * scale, 0.0, -grid.codes, grid.codes - 1.0);
            if e < least {
                (least, choice.scales[i]) = (e, scale);
            }
        }
        choice.error += least;
    }
    choice
}

/// Step 3: `d` by least squares over the block, as f16 bits.
fn refit_symmetric(x: &Block<'_>, grid: &Grid, choice: &Choice) -> u16 {
    let d = f16_to_f32(choice.d);
    let (mut aa, mut xa) = (0.0, 0.0);
    for (i, x) in subs(*x, grid).enumerate() {
        let inverse = reciprocal(d * choice.scales[i]);
        for (&x, &by) in x.0.iter().zip(x.1) {
            let a = choice.scales[i] * nearest(x * inverse, -grid.codes, grid.codes - 1.0);
            aa += by * (a * a);
            xa += by * (x * a);
        }
    }
    finite_f16(xa * reciprocal(aa))
}
