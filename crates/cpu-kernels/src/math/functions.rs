//! Exponential, hyperbolic tangent and the activations made of them, on vectors.

use super::lanes::Lanes;

/// `e^x`, within 2 units in the last place; 0 below -87.33, infinite above 88.72, NaN for NaN.
///
/// Results that would be subnormal are 0: x86 processors take over a hundred cycles for one, and a
/// softmax has many.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2` (Cody and Waite's two-part reduction), then the
/// polynomial of Cephes' `expf` for `e^r`, times `2^n`.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    let least = L::splat(-87.33);
    // The constant comes first: a NaN in `x` is the second operand, which min and max return.
    let limited = least.max(L::splat(89.0).min(x));
    let n = limited.mul(L::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(L::splat(-0.693_359_4), limited);
    let r = n.fma(L::splat(2.121_944_4e-4), r);
    let mut p = L::splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.fma(r, L::splat(c));
    }
    let y = p.fma(r.mul(r), r).add(L::splat(1.0)).times_power(n);
    L::select_lt(x, least, L::splat(0.0), y)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid<L: Lanes>(x: L) -> L {
    L::splat(1.0).div(L::splat(1.0).add(exp(L::splat(0.0).sub(x))))
}

/// `x sigmoid(x)`.
#[inline(always)]
pub(super) fn silu<L: Lanes>(x: L) -> L {
    x.div(L::splat(1.0).add(exp(L::splat(0.0).sub(x))))
}

/// `ln(1 + e^x)`, as `max(x, 0) + ln(1 + e)` with `e = e^-|x|`, so that nothing overflows or cancels.
///
/// `ln(1 + e) = 2 artanh(z)` with `z = e / (2 + e)`, at most a third: the series of artanh (DLMF
/// 4.37.3) to `z^15`, whose next term is below 4e-9 of the first.
#[inline(always)]
pub(super) fn softplus<L: Lanes>(x: L) -> L {
    let e = exp(x.min(L::splat(0.0).sub(x)));
    let z = e.div(e.add(L::splat(2.0)));
    let square = z.mul(z);
    let mut p = L::splat(1.0 / 15.0);
    for c in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        p = p.fma(square, L::splat(c));
    }
    // A NaN is the second operand, which comes back.
    p.fma(z.add(z), L::splat(0.0).max(x))
}

/// The hyperbolic tangent: `(e^2x - 1) / (e^2x + 1)`, and the Taylor polynomial near 0, where that
/// cancels.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(x: L) -> L {
    let square = x.mul(x);
    let mut p = L::splat(62.0 / 2835.0);
    for c in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0] {
        p = p.fma(square, L::splat(c));
    }
    let near = p.fma(square.mul(x), x);
    // Beyond 10 the result rounds to 1; without the limit infinity over infinity would be NaN.
    let limited = L::splat(-10.0).max(L::splat(10.0).min(x));
    let e = exp(limited.add(limited));
    let far = e.sub(L::splat(1.0)).div(e.add(L::splat(1.0)));
    L::select_lt(square, L::splat(0.0625), near, far)
}

/// `x / 2 (1 + tanh(u)) = x sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`: no
/// cancellation for `x < 0`.
#[inline(always)]
pub(super) fn gelu_tanh<L: Lanes>(x: L) -> L {
    let slope = -2.0 * 0.797_884_6;
    let u = x.mul(x).fma(L::splat(slope * 0.044_715), L::splat(slope)).mul(x);
    x.div(L::splat(1.0).add(exp(u)))
}

/// `x / 2 (1 + erf(x / sqrt 2)) = x / 2 erfc(-x / sqrt 2)`.
///
/// `erfc` by the Chebyshev fit of Press et al., Numerical Recipes (6.2, `erfcc`): its relative
/// error is below 1.2e-7 everywhere, so that the tail of negative `x` keeps its digits.
#[inline(always)]
pub(super) fn gelu_erf<L: Lanes>(x: L) -> L {
    let z = x.mul(L::splat(std::f32::consts::FRAC_1_SQRT_2));
    let size = z.max(L::splat(0.0).sub(z));
    let t = L::splat(1.0).div(size.fma(L::splat(0.5), L::splat(1.0)));
    let mut p = L::splat(0.170_872_76);
    for c in [
        -0.822_152_26,
        1.488_515_9,
        -1.135_204,
        0.278_868_08,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_95,
        1.000_023_7,
        -1.265_512_2,
    ] {
        p = p.fma(t, L::splat(c));
    }
    // erfc of |z|; below 0 the fit is mirrored: erfc(-z) = 2 - erfc(z), and here the argument is
    // -z.
    let tail = t.mul(exp(p.sub(size.mul(size))));
    let erfc = L::select_lt(z, L::splat(0.0), tail, L::splat(2.0).sub(tail));
    x.mul(L::splat(0.5)).mul(erfc)
}
