//! The small operations of a model, vectorised: normalisation, activations, softmax, rotary
//! embedding, conversions.
//!
//! Each is a plain function over f32 rows that runs on the calling thread; the caller splits rows
//! over a team. One source serves every instruction set: see `lanes`. [`Unary`] and
//! [`Binary`] list the elementwise functions, and define each.

mod functions;
pub(crate) mod lanes;
mod rows;

pub use rows::{
    argmax, from_bf16, from_f16, gated_norm_in_place, layer_norm_in_place, max, rms_norm,
    rms_norm_in_place, rope, softmax, to_bf16, to_f16,
};

pub(crate) use functions::{exp, tanh};
use functions::{gelu_erf, gelu_tanh, sigmoid, silu, softplus};
use lanes::{Lanes, dispatch};
pub(crate) use rows::to_f16_kernel;

use std::marker::PhantomData;

use formats::elementwise::{
    Binary, BinaryFunction, BinaryVisitor, Real, Unary, UnaryFunction, UnaryVisitor,
};

use super::isa::Isa;

/// A vector as the number type of elementwise functions.
#[derive(Clone, Copy)]
struct Vector<L>(L);

impl<L: Lanes> Real for Vector<L> {
    #[inline(always)]
    fn of(x: f32) -> Self {
        Vector(L::splat(x))
    }

    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Vector(self.0.add(other.0))
    }

    #[inline(always)]
    fn minus(self, other: Self) -> Self {
        Vector(self.0.sub(other.0))
    }

    #[inline(always)]
    fn times(self, other: Self) -> Self {
        Vector(self.0.mul(other.0))
    }

    #[inline(always)]
    fn greater(self, other: Self) -> Self {
        // A NaN in `self` is the second operand, which comes back.
        Vector(other.0.max(self.0))
    }

    #[inline(always)]
    fn lesser(self, other: Self) -> Self {
        Vector(other.0.min(self.0))
    }

    #[inline(always)]
    fn exp(self) -> Self {
        Vector(exp(self.0))
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        Vector(tanh(self.0))
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        Vector(sigmoid(self.0))
    }

    #[inline(always)]
    fn silu(self) -> Self {
        Vector(silu(self.0))
    }

    #[inline(always)]
    fn softplus(self) -> Self {
        Vector(softplus(self.0))
    }

    #[inline(always)]
    fn gelu_tanh(self) -> Self {
        Vector(gelu_tanh(self.0))
    }

    #[inline(always)]
    fn gelu_erf(self) -> Self {
        Vector(gelu_erf(self.0))
    }
}

/// `x[i] = f(x[i])`.
pub fn map_in_place(isa: Isa, f: Unary, x: &mut [f32]) {
    let (x, n) = (x.as_mut_ptr(), x.len());
    // SAFETY: the slice has that many elements.
    unsafe { dispatch!(isa, map_kernel(f: Unary, x: *mut f32, n: usize)) }
}

/// `x[i] = by * x[i]`.
pub fn scale_in_place(isa: Isa, by: f32, x: &mut [f32]) {
    let (x, n) = (x.as_mut_ptr(), x.len());
    // SAFETY: the slice has that many elements.
    unsafe { dispatch!(isa, scale_kernel(by: f32, x: *mut f32, n: usize)) }
}

/// `x[i] = f(x[i], y[i])`.
///
/// # Panics
/// When the lengths differ.
pub fn zip_in_place(isa: Isa, f: Binary, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "zip: inputs");
    let (x, y, n) = (x.as_mut_ptr(), y.as_ptr(), x.len());
    // SAFETY: both slices have that many elements.
    unsafe { dispatch!(isa, zip_kernel(f: Binary, x: *mut f32, y: *const f32, n: usize)) }
}

/// `gate[i] = f(gate[i]) * up[i]`.
///
/// # Panics
/// When the lengths differ.
pub fn gate_in_place(isa: Isa, f: Unary, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate: inputs");
    let (gate, up, n) = (gate.as_mut_ptr(), up.as_ptr(), gate.len());
    // SAFETY: both slices have that many elements.
    unsafe { dispatch!(isa, gate_kernel(f: Unary, gate: *mut f32, up: *const f32, n: usize)) }
}

/// Stores an expression of vectors, each loaded from its array, to every element of `out`; the
/// remainder as a partial vector.
///
/// The expression is pasted: a closure would become a function of its own, compiled without the
/// instruction set.
macro_rules! each {
    ($lanes:ident, $out:expr, $n:expr, [$($v:ident in $x:expr),+] => $body:expr) => {{
        let whole = $n - $n % $lanes::N;
        for i in (0..whole).step_by($lanes::N) {
            $(let $v = $lanes::load($x.add(i));)+
            $lanes::store($body, $out.add(i));
        }
        if whole < $n {
            let rest = $n - whole;
            $(let $v = $lanes::load_part($x.add(whole), rest);)+
            $lanes::store_part($body, $out.add(whole), rest);
        }
    }};
}

/// A loop over `n` elements of `x`, and of `y` for binary functions, whose results go to `x`.
///
/// Only kernels construct one; their callers ensure that the arrays have that many elements.
struct Loop<L> {
    x: *mut f32,
    y: *const f32,
    n: usize,
    lanes: PhantomData<L>,
}

impl<L: Lanes> UnaryVisitor for Loop<L> {
    type Output = ();

    #[inline(always)]
    fn visit<F: UnaryFunction>(self) {
        // SAFETY: every index is below `n`; a vector is read before it is written.
        unsafe { each!(L, self.x, self.n, [v in self.x] => F::apply(Vector(v)).0) }
    }
}

impl<L: Lanes> BinaryVisitor for Loop<L> {
    type Output = ();

    #[inline(always)]
    fn visit<F: BinaryFunction>(self) {
        // SAFETY: every index is below `n`; vectors are read before one is written.
        unsafe {
            let Loop { x, y, n, .. } = self;
            each!(L, x, n, [a in x, b in y] => F::apply(Vector(a), Vector(b)).0);
        }
    }
}

/// The same for gates: the function of `x`, times `y`.
struct Gate<L>(Loop<L>);

impl<L: Lanes> UnaryVisitor for Gate<L> {
    type Output = ();

    #[inline(always)]
    fn visit<F: UnaryFunction>(self) {
        let Loop { x, y, n, .. } = self.0;
        // SAFETY: every index is below `n`; vectors are read before one is written.
        unsafe { each!(L, x, n, [gate in x, up in y] => F::apply(Vector(gate)).0.mul(up)) }
    }
}

/// # Safety
/// `x` points to `n` elements.
#[inline(always)]
unsafe fn map_kernel<L: Lanes>(f: Unary, x: *mut f32, n: usize) {
    f.visit(Loop::<L> { x, y: x, n, lanes: PhantomData });
}

/// # Safety
/// `x` points to `n` elements.
#[inline(always)]
unsafe fn scale_kernel<L: Lanes>(by: f32, x: *mut f32, n: usize) {
    // SAFETY: every index is below `n`; a vector is read before it is written.
    unsafe { each!(L, x, n, [v in x] => v.mul(L::splat(by))) }
}

/// # Safety
/// `x` and `y` point to `n` elements and do not overlap.
#[inline(always)]
unsafe fn zip_kernel<L: Lanes>(f: Binary, x: *mut f32, y: *const f32, n: usize) {
    f.visit(Loop::<L> { x, y, n, lanes: PhantomData });
}

/// # Safety
/// `gate` and `up` point to `n` elements and do not overlap.
#[inline(always)]
unsafe fn gate_kernel<L: Lanes>(f: Unary, gate: *mut f32, up: *const f32, n: usize) {
    f.visit(Gate(Loop::<L> { x: gate, y: up, n, lanes: PhantomData }));
}
