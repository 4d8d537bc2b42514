//! Functions of single elements, which Programs, kernels and the CPU's loops share: each is one row
//! of a table ([`Unary`], [`Binary`]), written over [`Real`].

mod binary;
mod unary;

pub use binary::{Binary, BinaryFunction, BinaryVisitor};
pub use unary::{Unary, UnaryFunction, UnaryVisitor};

/// A real number, or several side by side.
///
/// Beside arithmetic it has the functions that a target computes better than by their definition:
/// accurately where terms cancel, and without a quotient where that is slow.
pub trait Real: Copy {
    /// A constant.
    fn of(x: f32) -> Self;
    /// `self + other`.
    fn plus(self, other: Self) -> Self;
    /// `self - other`.
    fn minus(self, other: Self) -> Self;
    /// `self * other`.
    fn times(self, other: Self) -> Self;
    /// The greater of both.
    fn greater(self, other: Self) -> Self;
    /// The lesser of both.
    fn lesser(self, other: Self) -> Self;
    /// `e^self`.
    fn exp(self) -> Self;
    /// The hyperbolic tangent.
    fn tanh(self) -> Self;
    /// `1 / (1 + e^-self)`.
    fn sigmoid(self) -> Self;
    /// `self * sigmoid(self)`.
    fn silu(self) -> Self;
    /// `ln(1 + e^self)`.
    fn softplus(self) -> Self;
    /// `self / 2 (1 + tanh(sqrt(2 / pi) (self + 0.044715 self^3)))`.
    fn gelu_tanh(self) -> Self;
    /// `self / 2 (1 + erf(self / sqrt(2)))`.
    fn gelu_erf(self) -> Self;
}

impl Real for f64 {
    fn of(x: f32) -> f64 {
        x.into()
    }

    fn plus(self, other: f64) -> f64 {
        self + other
    }

    fn minus(self, other: f64) -> f64 {
        self - other
    }

    fn times(self, other: f64) -> f64 {
        self * other
    }

    fn greater(self, other: f64) -> f64 {
        self.max(other)
    }

    fn lesser(self, other: f64) -> f64 {
        self.min(other)
    }

    fn exp(self) -> f64 {
        f64::exp(self)
    }

    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    fn sigmoid(self) -> f64 {
        1.0 / (1.0 + f64::exp(-self))
    }

    fn silu(self) -> f64 {
        self / (1.0 + f64::exp(-self))
    }

    fn softplus(self) -> f64 {
        self.max(0.0) + f64::exp(-self.abs()).ln_1p()
    }

    fn gelu_tanh(self) -> f64 {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (self + 0.044715 * self.powi(3));
        0.5 * self * (1.0 + f64::tanh(inner))
    }

    fn gelu_erf(self) -> f64 {
        0.5 * self * (1.0 + erf(self / 2f64.sqrt()))
    }
}

/// The error function: the series of positive terms of DLMF 7.6.2.
pub fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, 0.0, 1.0);
    while term.abs() > 1e-18 * f64::abs(sum) && n < 400.0 {
        sum += term;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        n += 1.0;
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from the error function and hyperbolic tangent of the C library, through Python.
    #[test]
    fn references_agree_with_published_values() {
        for (x, erf, tanh) in [
            (-1.0, -0.158_655_253_9, -0.158_808_009_4),
            (1.0, 0.841_344_746_1, 0.841_191_990_6),
            (2.0, 1.954_499_736_1, 1.954_597_694_1),
        ] {
            assert!((Unary::GeluErf.apply(x) - erf).abs() < 1e-9, "{x}");
            assert!((Unary::GeluTanh.apply(x) - tanh).abs() < 1e-9, "{x}");
        }
        assert_eq!(Binary::Sub.apply(3.0, 1.0), 2.0);
    }
}
