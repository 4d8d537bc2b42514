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
//! Eight sub-blocks are searched at a time, one in each lane. Where nothing is known of importance,
//! all weights count alike ([`EVEN`]). An importance is positive and finite. Weights that are not
//! finite are clamped, a NaN counts as zero.

use super::Parts;
use super::lanes::{Lanes, widest};
use super::plain::{f16_to_f32, f32_to_f16};

/// The integers a block can store.
pub(super) struct Grid {
    /// Elements per sub-block: 16 or 32.
    pub(super) sub: usize,
    /// Affine: codes are `0..=codes`. Symmetric: `-codes..codes`.
    pub(super) codes: f32,
    /// Affine: scales and mins are `0..=scales`. Symmetric: scales are `-scales..scales`.
    pub(super) scales: f32,
}

/// The importance of weights of which nothing is known: all count alike.
pub(super) const EVEN: [f32; 256] = [1.0; 256];

/// How often steps 2 and 3 repeat at most.
const ROUNDS: usize = 4;

/// f16 bits of `x`, held inside the finite range.
pub(super) fn finite_f16(x: f32) -> u16 {
    f32_to_f16(if x.is_nan() { 0.0 } else { x.clamp(-65504.0, 65504.0) })
}

/// `1 / x`, or 0 where that has no finite value.
#[inline(always)]
fn reciprocal(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Weights of eight sub-blocks, or of one that all lanes hold: a vector for each place within them,
/// and how much the error of each counts.
#[derive(Clone, Copy)]
pub(super) struct Subs<'a, V> {
    pub(super) x: &'a [V],
    pub(super) by: &'a [V],
}

/// A block's sub-blocks, eight and eight.
pub(super) struct Turned<V> {
    x: [V; 32],
    by: [V; 32],
    sub: usize,
}

impl<V: Lanes> Turned<V> {
    /// Of 256 weights in sub-blocks of `sub`, with NaN and the absurd removed, so that squares of
    /// sums stay finite.
    #[inline(always)]
    pub(super) fn new(weights: &[f32], importance: &[f32], sub: usize) -> Self {
        let zero = V::all(0.0);
        let mut turned = Turned { x: [zero; 32], by: [zero; 32], sub };
        for (to, from) in [(&mut turned.x, weights), (&mut turned.by, importance)] {
            for (i, to) in to.iter_mut().enumerate() {
                let (eight, place) = (i / sub, i % sub);
                *to = V::new(std::array::from_fn(|lane| from[(8 * eight + lane) * sub + place]));
            }
        }
        turned.x.iter_mut().for_each(|x| *x = clean(*x));
        turned
    }

    /// Eight sub-blocks at a time.
    #[inline(always)]
    pub(super) fn eights(&self) -> impl Iterator<Item = Subs<'_, V>> {
        let all = self.x.chunks_exact(self.sub).zip(self.by.chunks_exact(self.sub));
        all.map(|(x, by)| Subs { x, by })
    }

    /// Puts codes in their places: `code(eight, x)` for the weights `x` of the sub-blocks of one
    /// eight.
    #[inline(always)]
    pub(super) fn codes(&self, codes: &mut [u8; 256], code: impl Fn(usize, V) -> V) {
        for (i, &x) in self.x.iter().enumerate() {
            let (eight, place) = (i / self.sub, i % self.sub);
            for (lane, code) in code(eight, x).array().into_iter().enumerate() {
                codes[(8 * eight + lane) * self.sub + place] = code as u8;
            }
        }
    }
}

/// Weights without NaN, and the absurd held.
#[inline(always)]
pub(super) fn clean<V: Lanes>(x: V) -> V {
    // The least number takes the place of a NaN, and zero that number's.
    let least = V::all(f32::MIN);
    let x = x.at_least(least);
    let x = least.less(x, x, V::all(0.0));
    x.at_least(V::all(-1e9)).at_most(V::all(1e9))
}

/// One sub-block, in every lane.
#[inline(always)]
pub(super) fn alone<V: Lanes>(values: &[f32]) -> Vec<V> {
    values.iter().map(|x| V::all(*x)).collect()
}

/// The weight of largest magnitude, with its sign, of each sub-block.
#[inline(always)]
pub(super) fn peak<V: Lanes>(x: &[V]) -> V {
    x.iter().fold(V::all(0.0), |peak, x| peak.abs().less(x.abs(), *x, peak))
}

/// Squared errors of `x ~ s * q - m` with `q` the nearest code in `low..=high`, each weight's times
/// its importance.
#[inline(always)]
fn error<V: Lanes>(subs: Subs<'_, V>, s: V, m: V, low: f32, high: f32) -> V {
    let inverse = s.reciprocal();
    let mut sum = V::all(0.0);
    for (&x, &by) in subs.x.iter().zip(subs.by) {
        let q = x.add(m).mul(inverse).nearest(low, high);
        let e = s.mul(q).sub(m).sub(x);
        sum = sum.add(by.mul(e.mul(e)));
    }
    sum
}

/// `d` as f16 bits for weights `w = d * (code - codes)`, codes below `2 * codes`, of a block that
/// has one scale.
pub(super) fn alone_symmetric(weights: &[f32], importance: &[f32], codes: f32) -> u16 {
    #[inline(always)]
    fn of<V: Lanes>(weights: &[f32], importance: &[f32], codes: f32) -> f32 {
        let (mut x, by) = (alone::<V>(weights), alone::<V>(importance));
        x.iter_mut().for_each(|x| *x = clean(*x));
        fit_symmetric(Subs { x: &x, by: &by }, codes).array()[0]
    }
    finite_f16(widest!(of(weights: &[f32], importance: &[f32], codes: f32) -> f32))
}

/// `d` and `min` as f16 bits for weights `w = d * code + min`, codes up to `codes`, of a block that
/// has one of each.
pub(super) fn alone_affine(weights: &[f32], importance: &[f32], codes: f32) -> (u16, u16) {
    let bits = |number: f32| finite_f16(number);
    let stored = |number: f32| f16_to_f32(bits(number));
    // The fit keeps zero among what codes stand for; weights that are all far from it lose by that.
    let clean: Vec<f32> =
        (weights.iter()).map(|w| if w.is_nan() { 0.0 } else { w.clamp(-1e9, 1e9) }).collect();
    let (d, min) = offset(&clean, importance, codes, &[1.0], &stored);
    (bits(d), bits(min))
}

/// Scale and offset of a group for weights `w = scale * code + offset` with codes up to `codes`:
/// numbers that `stored` gives back, which rounds them to what is stored.
pub(crate) fn group(weights: &[f32], codes: f32, stored: impl Fn(f32) -> f32) -> (f32, f32) {
    let even = vec![1.0; weights.len()];
    // A scale that is rounded down cuts the ends off, which costs most where there are many codes.
    let stretched = [1.0, 1.0 + 1.0 / 256.0, 1.0 - 1.0 / 256.0];
    offset(weights, &even, codes, &stretched, &stored)
}

/// Scale and offset by which one sub-block loses least: what its range gives, or the fit, either
/// scale times each of `stretched`, which are four at most.
fn offset(
    weights: &[f32],
    importance: &[f32],
    codes: f32,
    stretched: &[f32],
    stored: &dyn Fn(f32) -> f32,
) -> (f32, f32) {
    type Stored<'a> = &'a dyn Fn(f32) -> f32;
    #[inline(always)]
    fn of<V: Lanes>(
        weights: &[f32],
        importance: &[f32],
        codes: f32,
        stretched: &[f32],
        stored: Stored<'_>,
    ) -> (f32, f32) {
        let (x, by) = (alone::<V>(weights), alone::<V>(importance));
        let subs = Subs { x: &x, by: &by };
        let (least, most) = super::range(weights);
        let (s, m) = fit_affine_one(subs, codes);
        let all = [((most - least) / codes, least), (s, -m)].into_iter();
        let all =
            all.flat_map(|(scale, offset)| stretched.iter().map(move |by| (scale * by, offset)));
        // At most eight, one in each lane.
        let [mut scales, mut offsets] = [[f32::NAN; 8]; 2];
        for ((scale, offset), to) in all.zip(scales.iter_mut().zip(&mut offsets)) {
            (*to.0, *to.1) = (stored(scale), stored(offset));
        }
        let offset = V::all(0.0).sub(V::new(offsets));
        let errors = error(subs, V::new(scales), offset, 0.0, codes).array();
        let (mut best, mut smallest) = ((0.0, stored(least)), f32::INFINITY);
        for (both, e) in scales.into_iter().zip(offsets).zip(errors) {
            if e < smallest && both.0.is_finite() && both.1.is_finite() {
                (best, smallest) = (both, e);
            }
        }
        best
    }
    widest!(of(weights: &[f32], importance: &[f32], codes: f32, stretched: &[f32], stored: Stored<'_>) -> (f32, f32))
}

/// One assignment of every integer scale and min, the f16 bits of `d` and `min`, and the squared
/// error.
#[derive(Clone, Copy)]
struct Choice<V> {
    d: u16,
    min: u16,
    scales: [V; 2],
    mins: [V; 2],
    error: f32,
}

impl<V: Lanes> Choice<V> {
    /// What it stands for: the scale and the offset of each sub-block.
    #[inline(always)]
    fn numbers(&self) -> [(V, V); 2] {
        let (d, min) = (V::all(f16_to_f32(self.d)), V::all(f16_to_f32(self.min)));
        [0, 1].map(|i| (d.mul(self.scales[i]), min.mul(self.mins[i])))
    }

    /// The integers and `d` and `min`, without codes.
    #[inline(always)]
    fn parts(&self) -> Parts {
        let mut parts = Parts { d: self.d, min: self.min, ..Parts::default() };
        for eight in 0..2 {
            let (scales, mins) = (self.scales[eight].array(), self.mins[eight].array());
            for lane in 0..8 {
                parts.scales[8 * eight + lane] = scales[lane] as i8;
                parts.mins[8 * eight + lane] = mins[lane] as i8;
            }
        }
        parts
    }
}

/// Scales, mins and codes for `w = d * scale * code - min * m` with codes, scales and mins from
/// zero up.
pub(super) fn affine(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts {
    widest!(affine_of(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts)
}

#[inline(always)]
fn affine_of<V: Lanes>(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts {
    let x = &Turned::<V>::new(weights, importance, grid.sub);
    let mut fits = [(V::all(0.0), V::all(0.0)); 2];
    let (mut largest_scale, mut largest_min) = (0.0f32, 0.0f32);
    for (fit, subs) in fits.iter_mut().zip(x.eights()) {
        *fit = fit_affine(subs, grid.codes);
        largest_scale = fit.0.array().into_iter().fold(largest_scale, f32::max);
        largest_min = fit.1.array().into_iter().fold(largest_min, f32::max);
    }
    let start = (finite_f16(largest_scale / grid.scales), finite_f16(largest_min / grid.scales));
    let mut best = assign_affine(x, grid, start, &fits);
    for _ in 0..ROUNDS {
        let next = refit_affine(x, grid, &best);
        if next == (best.d, best.min) {
            break;
        }
        let next = assign_affine(x, grid, next, &best.numbers());
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    polish_affine(x, grid, &mut best);
    let (mut parts, numbers) = (best.parts(), best.numbers());
    let inverses = numbers.map(|(s, _)| s.reciprocal());
    x.codes(&mut parts.codes, |eight, x| {
        x.add(numbers[eight].1).mul(inverses[eight]).nearest(0.0, grid.codes)
    });
    parts
}

/// What the fits of one sub-block's grids have in common.
#[derive(Clone, Copy)]
struct Spread<V> {
    /// The least weight, or zero if all are above it, and how far the largest is from there.
    low: V,
    range: V,
    /// The sum of importances, and of weights by their importance.
    n: V,
    sum_x: V,
}

impl<V: Lanes> Spread<V> {
    #[inline(always)]
    fn new(subs: Subs<'_, V>) -> Self {
        let zero = V::all(0.0);
        let (mut low, mut high) = (zero, V::all(f32::MIN));
        let (mut n, mut sum_x) = (zero, zero);
        for (&x, &by) in subs.x.iter().zip(subs.by) {
            (low, high) = (x.at_most(low), x.at_least(high));
            (n, sum_x) = (n.add(by), sum_x.add(by.mul(x)));
        }
        Spread { low, range: high.sub(low), n, sum_x }
    }

    /// The grid from the least weight to the largest, and its error.
    #[inline(always)]
    fn plain(&self, subs: Subs<'_, V>, codes: f32) -> (V, V, V) {
        let (s, m) = (self.range.div(V::all(codes)), V::all(0.0).sub(self.low));
        (s, m, error(subs, s, m, 0.0, codes))
    }

    /// Grids that differ only by rounding noise are no better: the first of them is kept, which uses
    /// every code.
    #[inline(always)]
    fn noise(&self) -> V {
        V::all(1e-12).mul(self.n).mul(self.range).mul(self.range)
    }

    /// `(s, m)` with `m >= 0` for `x ~ s * q - m` by least squares, with the codes that a grid of
    /// `codes` and `step` tenths over the range gives, and its error, which is endless if there is no
    /// such grid.
    #[inline(always)]
    fn fit(&self, subs: Subs<'_, V>, codes: f32, step: V) -> (V, V, V) {
        let Spread { low, range, n, sum_x } = *self;
        let zero = V::all(0.0);
        let inverse = V::all(codes).add(V::all(0.1).mul(step)).div(range);
        let (mut sum_q, mut sum_qq, mut sum_xq) = (zero, zero, zero);
        for (&x, &by) in subs.x.iter().zip(subs.by) {
            let q = x.sub(low).mul(inverse).nearest(0.0, codes);
            let counted = by.mul(q);
            sum_q = sum_q.add(counted);
            sum_qq = sum_qq.add(counted.mul(q));
            sum_xq = sum_xq.add(counted.mul(x));
        }
        let determinant = n.mul(sum_qq).sub(sum_q.mul(sum_q));
        let s = n.mul(sum_xq).sub(sum_x.mul(sum_q)).mul(determinant.reciprocal());
        let m = s.mul(sum_q).sub(sum_x).div(n);
        // Without an offset where it would be negative.
        let s = m.less(zero, sum_xq.mul(sum_qq.reciprocal()), s);
        let m = m.at_least(zero);
        (s, m, zero.less(s, error(subs, s, m, 0.0, codes), V::all(f32::INFINITY)))
    }
}

/// Tenths of a code by which grids are longer than the range, or shorter.
const TENTHS: i32 = 10;

/// Step 1: the best real `(s, m)` with `m >= 0` for `x ~ s * q - m`.
#[inline(always)]
fn fit_affine<V: Lanes>(subs: Subs<'_, V>, codes: f32) -> (V, V) {
    let (spread, zero) = (Spread::new(subs), V::all(0.0));
    let (mut s, mut m, e) = spread.plain(subs, codes);
    let mut least = e.sub(spread.noise());
    for step in -TENTHS..=TENTHS {
        let next = spread.fit(subs, codes, V::all(step as f32));
        (s, m) = (next.2.less(least, next.0, s), next.2.less(least, next.1, m));
        least = next.2.less(least, next.2.sub(spread.noise()), least);
    }
    // Weights that are all the same, and not above zero.
    (zero.less(spread.range, s, zero), zero.less(spread.range, m, zero.sub(spread.low)))
}

/// The same for one sub-block, which all lanes hold: each tries another grid.
#[inline(always)]
fn fit_affine_one<V: Lanes>(subs: Subs<'_, V>, codes: f32) -> (f32, f32) {
    let spread = Spread::new(subs);
    let first = |lanes: V| lanes.array()[0];
    if first(spread.range) <= 0.0 {
        return (0.0, -first(spread.low));
    }
    let (s, m, e) = spread.plain(subs, codes);
    let (noise, mut best) = (first(spread.noise()), (first(s), first(m)));
    let mut least = first(e) - noise;
    for from in (-TENTHS..=TENTHS).step_by(8) {
        let steps = std::array::from_fn(|lane| (from + lane as i32).min(TENTHS) as f32);
        let (s, m, e) = spread.fit(subs, codes, V::new(steps));
        for ((s, m), e) in s.array().into_iter().zip(m.array()).zip(e.array()) {
            if e < least {
                (best, least) = ((s, m), e - noise);
            }
        }
    }
    best
}

/// Step 2: the integers near each wanted `(s, m)` that lose least, for the f16 bits of `d` and
/// `min`.
#[inline(always)]
fn assign_affine<V: Lanes>(
    x: &Turned<V>,
    grid: &Grid,
    (d_bits, min_bits): (u16, u16),
    wanted: &[(V, V); 2],
) -> Choice<V> {
    let (d, min) = (f16_to_f32(d_bits), f16_to_f32(min_bits));
    let [no_d, no_min] = [d, min].map(|step| V::all(reciprocal(step)));
    let (zero, endless) = (V::all(0.0), V::all(f32::INFINITY));
    let mut choice =
        Choice { d: d_bits, min: min_bits, scales: [zero; 2], mins: [zero; 2], error: 0.0 };
    for (i, subs) in x.eights().enumerate() {
        let centre = wanted[i].0.mul(no_d).nearest(0.0, grid.scales);
        let centre_min = wanted[i].1.mul(no_min).nearest(0.0, grid.scales);
        let mut least = endless;
        for step in [0.0, -1.0, 1.0] {
            for step_min in [0.0, -1.0, 1.0] {
                let scale = centre.add(V::all(step)).nearest(0.0, grid.scales);
                let m = centre_min.add(V::all(step_min)).nearest(0.0, grid.scales);
                let e = error(subs, V::all(d).mul(scale), V::all(min).mul(m), 0.0, grid.codes);
                choice.scales[i] = e.less(least, scale, choice.scales[i]);
                choice.mins[i] = e.less(least, m, choice.mins[i]);
                least = e.at_most(least);
            }
        }
        choice.error += least.total();
    }
    choice
}

/// Step 3: `d` and `min` by least squares over the block, as f16 bits.
#[inline(always)]
fn refit_affine<V: Lanes>(x: &Turned<V>, grid: &Grid, choice: &Choice<V>) -> (u16, u16) {
    // Normal equations of sum (x - d a + min b)^2 with a = scale * code and b = m.
    let mut sums = [V::all(0.0); 5];
    for ((subs, (s, m)), i) in x.eights().zip(choice.numbers()).zip(0..) {
        let (inverse, scale, b) = (s.reciprocal(), choice.scales[i], choice.mins[i]);
        for (&x, &by) in subs.x.iter().zip(subs.by) {
            let a = scale.mul(x.add(m).mul(inverse).nearest(0.0, grid.codes));
            let (by_a, by_b) = (by.mul(a), by.mul(b));
            let terms = [by_a.mul(a), by_a.mul(b), by_b.mul(b), by_a.mul(x), by_b.mul(x)];
            for (sum, term) in sums.iter_mut().zip(terms) {
                *sum = sum.add(term);
            }
        }
    }
    let [aa, ab, bb, xa, xb] = sums.map(|sum| sum.total());
    let min = f16_to_f32(choice.min);
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
#[inline(always)]
fn polish_affine<V: Lanes>(x: &Turned<V>, grid: &Grid, best: &mut Choice<V>) {
    for _ in 0..ROUNDS {
        let (d_bits, min_bits, before) = (best.d, best.min, best.error);
        for d in d_bits.saturating_sub(1)..=d_bits.saturating_add(1) {
            for min in min_bits.saturating_sub(1)..=min_bits.saturating_add(1) {
                let mut next = Choice { d, min, ..*best };
                next.error = (x.eights().zip(next.numbers()))
                    .map(|(subs, (s, m))| error(subs, s, m, 0.0, grid.codes).total())
                    .sum();
                if next.error < best.error {
                    *best = next;
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
    widest!(symmetric_of(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts)
}

#[inline(always)]
fn symmetric_of<V: Lanes>(weights: &[f32], importance: &[f32], grid: &Grid) -> Parts {
    let x = &Turned::<V>::new(weights, importance, grid.sub);
    let (mut fits, mut largest) = ([V::all(0.0); 2], 0.0f32);
    for (fit, subs) in fits.iter_mut().zip(x.eights()) {
        *fit = fit_symmetric(subs, grid.codes);
        let beside = |most: f32, fit: f32| if fit.abs() > most.abs() { fit } else { most };
        largest = fit.array().into_iter().fold(largest, beside);
    }
    // The largest scale becomes -scales, the integer furthest from zero, or one of those beside it:
    // a few starts, for d is rounded to f16 and the outliers of a block feel that most.
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
        let next = assign_symmetric(x, grid, d, &best.numbers().map(|(s, _)| s));
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    let mut parts = best.parts();
    let inverses = best.numbers().map(|(s, _)| s.reciprocal());
    x.codes(&mut parts.codes, |eight, x| {
        let code = x.mul(inverses[eight]).nearest(-grid.codes, grid.codes - 1.0);
        code.add(V::all(grid.codes))
    });
    parts
}

/// Step 1: the best real `s`, of either sign, for `x ~ s * q`.
#[inline(always)]
fn fit_symmetric<V: Lanes>(subs: Subs<'_, V>, codes: f32) -> V {
    let (peak, zero) = (peak(subs.x), V::all(0.0));
    let (low, high) = (-codes, codes - 1.0);
    let (mut best, mut best_gain) = (peak.div(V::all(low)), zero);
    // The largest weight goes near the lowest code, which has one more step, or near the highest.
    for end in [low, high] {
        for step in (0..=9).chain(-9..=-1) {
            let inverse = V::all(end + 0.1 * step as f32).div(peak);
            // With codes held, s = sum xq / sum qq lowers the squared error from sum xx by (sum
            // xq)^2 / sum qq.
            let (mut sum_qq, mut sum_xq) = (zero, zero);
            for (&x, &by) in subs.x.iter().zip(subs.by) {
                let q = x.mul(inverse).nearest(low, high);
                let counted = by.mul(q);
                sum_qq = sum_qq.add(counted.mul(q));
                sum_xq = sum_xq.add(counted.mul(x));
            }
            let s = sum_xq.mul(sum_qq.reciprocal());
            let gain = s.mul(sum_xq);
            // Grids that differ only by rounding noise are no better: keep the one that uses every
            // code.
            let enough = best_gain.mul(V::all(1.0 + 1e-6));
            best = enough.less(gain, s, best);
            best_gain = enough.less(gain, gain, best_gain);
        }
    }
    zero.less(peak.abs(), best, zero)
}

/// Step 2: the integers near each wanted `s` that lose least, for the f16 bits of `d`.
#[inline(always)]
fn assign_symmetric<V: Lanes>(
    x: &Turned<V>,
    grid: &Grid,
    d_bits: u16,
    wanted: &[V; 2],
) -> Choice<V> {
    let (d, zero) = (f16_to_f32(d_bits), V::all(0.0));
    let (low, high) = (-grid.scales, grid.scales - 1.0);
    let mut choice = Choice { d: d_bits, min: 0, scales: [zero; 2], mins: [zero; 2], error: 0.0 };
    for (i, subs) in x.eights().enumerate() {
        let centre = wanted[i].mul(V::all(reciprocal(d))).nearest(low, high);
        let mut least = V::all(f32::INFINITY);
        for step in [0.0, -1.0, 1.0] {
            let scale = centre.add(V::all(step)).nearest(low, high);
            let e = error(subs, V::all(d).mul(scale), zero, -grid.codes, grid.codes - 1.0);
            choice.scales[i] = e.less(least, scale, choice.scales[i]);
            least = e.at_most(least);
        }
        choice.error += least.total();
    }
    choice
}

/// Step 3: `d` by least squares over the block, as f16 bits.
#[inline(always)]
fn refit_symmetric<V: Lanes>(x: &Turned<V>, grid: &Grid, choice: &Choice<V>) -> u16 {
    let (mut aa, mut xa) = (V::all(0.0), V::all(0.0));
    for ((subs, (s, _)), scale) in x.eights().zip(choice.numbers()).zip(choice.scales) {
        let inverse = s.reciprocal();
        for (&x, &by) in subs.x.iter().zip(subs.by) {
            let a = scale.mul(x.mul(inverse).nearest(-grid.codes, grid.codes - 1.0));
            let counted = by.mul(a);
            aa = aa.add(counted.mul(a));
            xa = xa.add(counted.mul(x));
        }
    }
    finite_f16(xa.total() * reciprocal(aa.total()))
}
