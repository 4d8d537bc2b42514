//! Codes that index a table of sixteen numbers: the tables, and the search for scales by which they
//! lose least.

use super::plain::{bf16_to_f32, f16_to_f32, f32_to_f16};
use super::{Block, Offset, Parts, ScaleKind};

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
pub(super) fn decode<B: Block>(block: &[u8], weights: &mut [f32]) {
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
fn number(code: u8) -> f32 {
    f32::from(IQ4[usize::from(code & 15)]) - f32::from(IQ4_ZERO)
}

/// The code of [`IQ4`] whose number is nearest; a NaN gives 0.
fn nearest(x: f32) -> u8 {
    // Half way between neighbours: as many as are below `x` is its place in the sorted table.
    const MIDDLES: [f32; 15] = {
        let mut middles = [0.0; 15];
        let mut i = 0;
        while i < 15 {
            middles[i] = (IQ4[i] as f32 + IQ4[i + 1] as f32) / 2.0 - IQ4_ZERO as f32;
            i += 1;
        }
        middles
    };
    MIDDLES.iter().map(|middle| u8::from(x > *middle)).sum()
}

/// The weights of a block with NaN as zero and the absurd held, so that sums of squares stay
/// finite.
fn clean(weights: &[f32]) -> [f32; 256] {
    let mut clean = [0.0; 256];
    for (to, &w) in clean.iter_mut().zip(weights) {
        *to = if w.is_nan() { 0.0 } else { w.clamp(-1e9, 1e9) };
    }
    clean
}

/// f16 bits of a number, held inside the finite range.
fn finite_f16(x: f32) -> u16 {
    f32_to_f16(x.clamp(-65504.0, 65504.0))
}

/// Squared error of `x ~ s * number(code)` with the nearest codes, each weight's times its
/// importance.
fn error(x: &[f32], importance: &[f32], s: f32) -> f32 {
    let inverse = super::inverse(s);
    let of = |(&x, by): (&f32, &f32)| by * (s * number(nearest(x * inverse)) - x).powi(2);
    x.iter().zip(importance).map(of).sum()
}

/// The best real `s`, of either sign, for `x ~ s * number(code)`: the largest weight goes near
/// either end of the table.
fn fit(x: &[f32], importance: &[f32]) -> f32 {
    let peak = super::peak(x);
    let (mut best, mut most) = (0.0, 0.0);
    if peak == 0.0 {
        return best;
    }
    for end in [number(0), number(15)] {
        for step in -7..=7 {
            let inverse = (end + step as f32) / peak;
            // With codes held, s = sum xq / sum qq lowers the squared error from sum xx by (sum
            // xq)^2 / sum qq.
            let (mut sum_xq, mut sum_qq) = (0.0, 0.0);
            for (&x, by) in x.iter().zip(importance) {
                let q = number(nearest(x * inverse));
                sum_xq += by * (x * q);
                sum_qq += by * (q * q);
            }
            let gain = sum_xq * sum_xq * super::inverse(sum_qq);
            if gain > most {
                (best, most) = (sum_xq / sum_qq, gain);
            }
        }
    }
    best
}

/// `d` and codes for 32 weights `w = d * number(code)`.
pub(super) fn alone(weights: &[f32], importance: &[f32]) -> Parts {
    let x = &clean(weights)[..32];
    let mut parts = Parts { d: finite_f16(fit(x, importance)), ..Parts::default() };
    let inverse = super::inverse(f16_to_f32(parts.d));
    parts.codes.iter_mut().zip(x).for_each(|(code, x)| *code = nearest(x * inverse));
    parts
}

/// `d`, scales (-32 to 31) and codes for 256 weights in sub-blocks of 32: `w = d * scale *
/// number(code)`.
pub(super) fn together(weights: &[f32], importance: &[f32]) -> Parts {
    let x = clean(weights);
    let subs = || x.chunks_exact(32).zip(importance.chunks_exact(32));
    let mut fits = [0.0; 8];
    fits.iter_mut().zip(subs()).for_each(|(fit, (x, by))| *fit = self::fit(x, by));
    let largest = super::peak(&fits);
    // The largest scale becomes -32, the integer furthest from zero, or one beside it, since `d` is
    // rounded.
    let choices = (0..3).map(|below| {
        let d = finite_f16(largest / (below as f32 - 32.0));
        let (mut scales, mut sum) = ([0i8; 16], 0.0);
        let (step, inverse) = (f16_to_f32(d), super::inverse(f16_to_f32(d)));
        for (((x, by), &fit), scale) in subs().zip(&fits).zip(&mut scales) {
            let centre = (fit * inverse).round();
            let near = [0.0, -1.0, 1.0].map(|by| (centre + by).clamp(-32.0, 31.0));
            let errors = near.map(|scale| (error(x, by, step * scale), scale));
            let least = errors.into_iter().reduce(|a, b| if b.0 < a.0 { b } else { a });
            let (error, nearest) = least.unwrap_or_default();
            *scale = nearest as i8;
            sum += error;
        }
        (sum, d, scales)
    });
    let best = choices.reduce(|a, b| if b.0 < a.0 { b } else { a });
    let (_, d, scales) = best.unwrap_or_default();
    let mut parts = Parts { d, scales, ..Parts::default() };
    let step = f16_to_f32(d);
    for (i, (codes, x)) in parts.codes.chunks_exact_mut(32).zip(x.chunks_exact(32)).enumerate() {
        let inverse = super::inverse(step * f32::from(scales[i]));
        codes.iter_mut().zip(x).for_each(|(code, x)| *code = nearest(x * inverse));
    }
    parts
}
