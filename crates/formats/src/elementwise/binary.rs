//! Functions of two numbers.

use super::Real;

/// A function of two numbers, as a type: loops over it are compiled for it alone.
pub trait BinaryFunction {
    /// `f(a, b)`.
    fn apply<R: Real>(a: R, b: R) -> R;
}

/// Work that is compiled for each function by itself: see [`Binary::visit`].
pub trait BinaryVisitor {
    /// Its result.
    type Output;

    /// Does the work for one function.
    fn visit<F: BinaryFunction>(self) -> Self::Output;
}

/// Makes [`Binary`] of a table: variant, name in the text form, `f(a, b)`.
macro_rules! binary {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, |$a:ident, $b:ident| $body:expr;)*) => {
        /// A function of two numbers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        pub enum Binary {
            $($(#[$doc])* $variant,)*
        }

        /// The functions as types.
        mod functions {
            use super::{BinaryFunction, Real};

            $(pub(super) struct $variant;

            impl BinaryFunction for $variant {
                #[inline(always)]
                fn apply<R: Real>($a: R, $b: R) -> R {
                    $body
                }
            })*
        }

        impl Binary {
            /// All of them.
            pub const ALL: &[Binary] = &[$(Binary::$variant,)*];

            /// The name in the text form.
            pub fn name(self) -> &'static str {
                match self {
                    $(Binary::$variant => $name,)*
                }
            }

            /// Hands the function to `visitor` as a type.
            #[inline(always)]
            pub fn visit<V: BinaryVisitor>(self, visitor: V) -> V::Output {
                match self {
                    $(Binary::$variant => visitor.visit::<functions::$variant>(),)*
                }
            }
        }
    };
}

binary! {
    /// `a + b`.
    Add, "add", |a, b| a.plus(b);
    /// `a - b`.
    Sub, "sub", |a, b| a.minus(b);
    /// `a * b`.
    Mul, "mul", |a, b| a.times(b);
    /// The greater of both.
    Max, "max", |a, b| a.greater(b);
    /// The lesser of both.
    Min, "min", |a, b| a.lesser(b);
}

/// Applies a function to two numbers.
struct Apply<R>(R, R);

impl<R: Real> BinaryVisitor for Apply<R> {
    type Output = R;

    #[inline(always)]
    fn visit<F: BinaryFunction>(self) -> R {
        F::apply(self.0, self.1)
    }
}

impl Binary {
    /// `f(a, b)`.
    #[inline(always)]
    #[track_caller]
    pub fn apply<R: Real>(self, a: R, b: R) -> R {
        self.visit(Apply(a, b))
    }
}
