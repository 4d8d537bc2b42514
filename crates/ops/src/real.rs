//! Elementwise functions on the device: [`Real`] for a value of the kernel language.

use formats::elementwise::{Binary, Real, Unary};
use tile::dsl::Val;

use crate::math;

/// `f(x)`, on the device.
#[track_caller]
pub(crate) fn unary(f: Unary, x: Val<f32>) -> Val<f32> {
    f.apply(Element(x)).0
}

/// `f(a, b)`, on the device.
#[track_caller]
pub(crate) fn binary(f: Binary, a: Val<f32>, b: Val<f32>) -> Val<f32> {
    f.apply(Element(a), Element(b)).0
}

/// A value of the kernel language.
#[derive(Clone, Copy)]
struct Element(Val<f32>);

impl Real for Element {
    #[track_caller]
    fn of(x: f32) -> Element {
        Element(tile::dsl::IntoVal::val(x))
    }

    #[track_caller]
    fn plus(self, other: Element) -> Element {
        Element(self.0 + other.0)
    }

    #[track_caller]
    fn minus(self, other: Element) -> Element {
        Element(self.0 - other.0)
    }

    #[track_caller]
    fn times(self, other: Element) -> Element {
        Element(self.0 * other.0)
    }

    #[track_caller]
    fn greater(self, other: Element) -> Element {
        Element(self.0.max(other.0))
    }

    #[track_caller]
    fn lesser(self, other: Element) -> Element {
        Element(self.0.min(other.0))
    }

    #[track_caller]
    fn exp(self) -> Element {
        Element(self.0.exp())
    }

    #[track_caller]
    fn tanh(self) -> Element {
        Element(self.0.tanh())
    }

    #[track_caller]
    fn sigmoid(self) -> Element {
        Element(math::sigmoid(self.0))
    }

    #[track_caller]
    fn silu(self) -> Element {
        Element(math::silu(self.0))
    }

    #[track_caller]
    fn softplus(self) -> Element {
        Element(math::softplus(self.0))
    }

    #[track_caller]
    fn gelu_tanh(self) -> Element {
        Element(math::gelu_tanh(self.0))
    }

    #[track_caller]
    fn gelu_erf(self) -> Element {
        Element(math::gelu_erf(self.0))
    }
}
