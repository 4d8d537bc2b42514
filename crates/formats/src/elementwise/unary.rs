//! Functions of one number.

use super::Real;

/// A function of one number, as a type: loops over it are compiled for it alone.
pub trait UnaryFunction {
    /// `f(x)`.
    fn apply<R: Real>(x: R) -> R;
}

/// Work that is compiled for each function by itself: see [`Unary::visit`].
pub trait UnaryVisitor {
    /// Its result.
    type Output;

    /// Does the work for one function.
    fn visit<F: UnaryFunction>(self) -> Self::Output;
}

/// Makes [`Unary`] of a table: variant, name in the text form, range of the tests' values, `f(x)`.
macro_rules! unary {
    ($(
        $(#[$doc:meta])*
        $variant:ident, $name:literal, $range:literal, |$x:ident| $body:expr;
    )*) => {
        /// A function of one number.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum Unary {
            $($(#[$doc])* $variant,)*
        }

        /// The functions as types.
        mod functions {
            use super::{UnaryFunction, Real};

            $(pub(super) struct $variant;

            impl UnaryFunction for $variant {
                #[inline(always)]
                fn apply<R: Real>($x: R) -> R {
                    $body
                }
            })*
        }

        impl Unary {
            /// All of them.
            pub const ALL: &[Unary] = &[$(Unary::$variant,)*];

            /// The name in the text form.
            pub fn name(self) -> &'static str {
                match self {
                    $(Unary::$variant => $name,)*
                }
            }

            /// Hands the function to `visitor` as a type.
            #[inline(always)]
            pub fn visit<V: UnaryVisitor>(self, visitor: V) -> V::Output {
                match self {
                    $(Unary::$variant => visitor.visit::<functions::$variant>(),)*
                }
            }

            /// Tests take values from `-range..range`.
            pub fn range(self) -> f32 {
                match self {
                    $(Unary::$variant => $range,)*
                }
            }
        }
    };
}

unary! {
    /// `x / (1 + e^-x)` (Elfwing et al. 2017).
    Silu, "silu", 20.0, |x| x.silu();
    /// GELU (Hendrycks & Gimpel 2016) by their approximation,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, which differs from the definition by up
    /// to 5e-4 and is what Gemma and GPT-2 were trained with.
    GeluTanh, "gelu_tanh", 8.0, |x| x.gelu_tanh();
    /// GELU by its definition, `x / 2 (1 + erf(x / sqrt(2)))`.
    GeluErf, "gelu_erf", 8.0, |x| x.gelu_erf();
    /// `x sigmoid(1.702 x)`: the approximation of GELU that CLIP was trained with (Hendrycks &
    /// Gimpel 2016).
    QuickGelu, "quick_gelu", 8.0, |x| x.times(x.times(R::of(1.702)).sigmoid());
    /// The hyperbolic tangent.
    Tanh, "tanh", 8.0, |x| x.tanh();
    /// `1 / (1 + e^-x)`.
    Sigmoid, "sigmoid", 20.0, |x| x.sigmoid();
    /// `e^x`.
    Exp, "exp", 8.0, |x| x.exp();
    /// `max(x, 0)`.
    Relu, "relu", 2.0, |x| x.greater(R::of(0.0));
    /// `ln(1 + e^x)`.
    Softplus, "softplus", 20.0, |x| x.softplus();
    /// `x^2`.
    Square, "square", 2.0, |x| x.times(x);
    /// `max(-1, min(x, 1))`.
    HardTanh, "hard_tanh", 2.0, |x| x.lesser(R::of(1.0)).greater(R::of(-1.0));
}

/// Applies a function to one number.
struct Apply<R>(R);

impl<R: Real> UnaryVisitor for Apply<R> {
    type Output = R;

    #[inline(always)]
    fn visit<F: UnaryFunction>(self) -> R {
        F::apply(self.0)
    }
}

impl Unary {
    /// `f(x)`.
    #[inline(always)]
    #[track_caller]
    pub fn apply<R: Real>(self, x: R) -> R {
        self.visit(Apply(x))
    }
}
