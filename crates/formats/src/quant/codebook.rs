//! Codes that index a table of sixteen numbers: the tables, and the search for scales by which they
//! lose least.

use super::lanes::{Lanes, widest};
use super::plain::{bf16_to_f32, f16_to_f32};
use super::search::{self, Subs, Turned};
use super::{BlockFormat, Offset, Parts, ScaleKind};

/// The zero point of [`IQ4`].
pub(super) const IQ4_ZERO: u8 = 128;
/// The values of the codes of IQ4_NL and IQ4_XS, plus 128: closer together around zero, where most
/// weights are.
pub(super) const IQ4: [u8; 16] =
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The zero point of [`E2M1`].
pub(super) const E2M1_ZERO: u8 = 16;
/// The four-bit floats of the Open Compute Project (a sign, two bits of exponent, one of mantissa),
/// twice each, plus 16.
pub(super) const E2M1: [u8; 16] = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4];

/// The weights of a block whose codes index a table: `w = scale * (table[code] - zero)`.
pub(super) fn decode<B: BlockFormat>(block: &[u8], weights: &mut [f32]) {
    let mut parts = Parts::default();
    B::split(block, &mut parts);
    let zero = match B::AFFINE.offset {
        Offset::Zero(zero) => f32::from(zero),
        Offset::Min => 0.0,
    };
    let codes = parts.codes.chunks_exact(32).zip(&parts.scales);
    for (w, (codes, &scale)) in weights.chunks_exact_mut(32).zip(codes) {
        let scale = match B::AFFINE.scale {
            ScaleKind::Half => f16_to_f32(parts.d),
            ScaleKind::Brain => bf16_to_f32(parts.d),
            ScaleKind::Super => f16_to_f32(parts.d) * f32::from(scale),
        };
        let codes = codes.iter().map(|code| f32::from(B::AFFINE.value(*code)));
        w.iter_mut().zip(codes).for_each(|(w, code)| *w = scale * (code - zero));
    }
}

/// Number `code` of [`IQ4`].
const fn number(code: usize) -> f32 {
    IQ4[code] as f32 - IQ4_ZERO as f32
}

/// Half way from each number of [`IQ4`] to the next: as many as are below a weight is the place of
/// the nearest number.
const MIDDLES: [f32; 15] = {
    let mut middles = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        middles[i] = (number(i) + number(i + 1)) / 2.0;
        i += 1;
    }
    middles
};

/// The numbers of [`IQ4`] that are nearest; a NaN gives the first.
#[inline(always)]
fn nearest<V: Lanes>(x: V) -> V {
    steps(x, V::all(number(0)), |i| number(i + 1) - number(i))
}

/// The codes of those.
#[inline(always)]
fn code<V: Lanes>(x: V) -> V {
    steps(x, V::all(0.0), |_| 1.0)
}

/// `from`, and a step for each of [`MIDDLES`] that is below.
#[inline(always)]
fn steps<V: Lanes>(x: V, from: V, step: impl Fn(usize) -> f32) -> V {
    let mut sum = from;
    for (i, middle) in MIDDLES.iter().enumerate() {
        sum = sum.add(V::all(*middle).less(x, V::all(step(i)), V::all(0.0)));
    }
    sum
}

/// Squared errors of `x ~ s * number` with the nearest numbers, each weight's times its importance.
#[inline(always)]
fn error<V: Lanes>(subs: Subs<'_, V>, s: V) -> V {
    let (inverse, mut sum) = (s.reciprocal(), V::all(0.0));
    for (&x, &by) in subs.x.iter().zip(subs.by) {
        let e = s.mul(nearest(x.mul(inverse))).sub(x);
        sum = sum.add(by.mul(e.mul(e)));
    }
    sum
}

/// How far beyond the ends of the table the largest weight is tried, and how near.
const REACH: i32 = 7;

/// The best real `s`, of either sign, for `x ~ s * number`, and by how much each lowers the squared
/// error, with the codes that `inverse` gives. With codes held, `s = sum xq / sum qq` lowers it from
/// `sum xx` by `(sum xq)^2 / sum qq`.
#[inline(always)]
fn fit_by<V: Lanes>(subs: Subs<'_, V>, inverse: V) -> (V, V) {
    let (mut sum_xq, mut sum_qq) = (V::all(0.0), V::all(0.0));
    for (&x, &by) in subs.x.iter().zip(subs.by) {
        let q = nearest(x.mul(inverse));
        let counted = by.mul(q);
        sum_xq = sum_xq.add(counted.mul(x));
        sum_qq = sum_qq.add(counted.mul(q));
    }
    let s = sum_xq.mul(sum_qq.reciprocal());
    (s, s.mul(sum_xq))
}

/// The best of all: the largest weight goes near either end of the table.
#[inline(always)]
fn fit<V: Lanes>(subs: Subs<'_, V>) -> V {
    let (peak, zero) = (search::peak(subs.x), V::all(0.0));
    let (mut best, mut most) = (zero, zero);
    for end in [number(0), number(15)] {
        for step in -REACH..=REACH {
            let (s, gain) = fit_by(subs, V::all(end + step as f32).div(peak));
            best = most.less(gain, s, best);
            most = most.less(gain, gain, most);
        }
    }
    zero.less(peak.abs(), best, zero)
}

/// The same for one sub-block, which all lanes hold: each tries another place for the largest weight.
#[inline(always)]
fn fit_one<V: Lanes>(subs: Subs<'_, V>) -> f32 {
    let peak = search::peak(subs.x);
    let (mut best, mut most) = (0.0, 0.0);
    if peak.array()[0] == 0.0 {
        return best;
    }
    for end in [number(0), number(15)] {
        for first in [-REACH, 1] {
            let places = std::array::from_fn(|lane| end + (first + lane as i32) as f32);
            let (s, gain) = fit_by(subs, V::new(places).div(peak));
            for (s, gain) in s.array().into_iter().zip(gain.array()) {
                if gain > most {
                    (best, most) = (s, gain);
                }
            }
        }
    }
    best
}

/// `d` and codes for 32 weights `w = d * number(code)`.
pub(super) fn alone(weights: &[f32], importance: &[f32]) -> Parts {
    widest!(alone_of(weights: &[f32], importance: &[f32]) -> Parts)
}

#[inline(always)]
fn alone_of<V: Lanes>(weights: &[f32], importance: &[f32]) -> Parts {
    let (mut x, by) = (search::alone::<V>(&weights[..32]), search::alone(&importance[..32]));
    x.iter_mut().for_each(|x| *x = search::clean(*x));
    let d = fit_one(Subs { x: &x, by: &by });
    let mut parts = Parts { d: search::finite_f16(d), ..Parts::default() };
    let inverse = V::all(f16_to_f32(parts.d)).reciprocal();
    for (to, x) in parts.codes.iter_mut().zip(&x) {
        *to = code(x.mul(inverse)).array()[0] as u8;
    }
    parts
}

/// `d`, scales (-32 to 31) and codes for 256 weights in sub-blocks of 32: `w = d * scale *
/// number(code)`.
pub(super) fn together(weights: &[f32], importance: &[f32]) -> Parts {
    widest!(together_of(weights: &[f32], importance: &[f32]) -> Parts)
}

#[inline(always)]
fn together_of<V: Lanes>(weights: &[f32], importance: &[f32]) -> Parts {
    let x = Turned::<V>::new(weights, importance, 32);
    let Some(subs) = x.eights().next() else { return Parts::default() };
    let fits = fit(subs);
    let largest = super::peak(&fits.array());
    // The largest scale becomes -32, the integer furthest from zero, or one beside it, since `d` is
    // rounded.
    let mut best = (f32::INFINITY, 0, V::all(0.0));
    for below in 0..3 {
        let bits = search::finite_f16(largest / (below as f32 - 32.0));
        let d = V::all(f16_to_f32(bits));
        let centre = fits.mul(d.reciprocal()).nearest(-32.0, 31.0);
        let (mut least, mut scales) = (V::all(f32::INFINITY), V::all(0.0));
        for step in [0.0, -1.0, 1.0] {
            let scale = centre.add(V::all(step)).nearest(-32.0, 31.0);
            let e = error(subs, d.mul(scale));
            scales = e.less(least, scale, scales);
            least = e.at_most(least);
        }
        let sum = least.total();
        if sum < best.0 {
            best = (sum, bits, scales);
        }
    }
    let (_, d, scales) = best;
    let mut parts = Parts { d, ..Parts::default() };
    for (to, scale) in parts.scales.iter_mut().zip(scales.array()) {
        *to = scale as i8;
    }
    let inverse = V::all(f16_to_f32(d)).mul(scales).reciprocal();
    x.codes(&mut parts.codes, |_, x| code(x.mul(inverse)));
    parts
}
