//! The small operations of a model, vectorised: normalisation, activations, softmax, rotary embedding, conversions.
//!
//! Each is a plain function over f32 rows that runs on the calling thread; who splits the rows over a team is the
//! caller. One source serves every instruction set: see `lanes`. Elementwise operations are data ([`Unary`],
//! [`Binary`]) so that an in-place and an out-of-place form are one kernel.

mod functions;
pub(crate) mod lanes;
mod rows;

pub use rows::{
    argmax, from_bf16, from_f16, max, rms_norm, rms_norm_in_place, rope, softmax, to_bf16, to_f16,
};

pub(crate) use functions::{exp, tanh};
use functions::{gelu_erf, gelu_tanh, sigmoid, silu};
use lanes::{Lanes, dispatch};
pub(crate) use rows::to_f16_kernel;

use super::isa::Isa;

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unary {
    /// `e^x`.
    Exp,
    /// `a x`.
    Scale(f32),
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x sigmoid(x)`.
    Silu,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `x / 2 (1 + erf(x / sqrt(2)))`.
    GeluErf,
    /// The hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`.
    Relu,
    /// `cap tanh(x / cap)`: Gemma 2's limit on logits.
    Softcap(f32),
}

/// A function of two numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Binary {
    /// `x + y`.
    Add,
    /// `x - y`.
    Sub,
    /// `x y`.
    Mul,
    /// `x + a y`.
    AddScaled(f32),
    /// `silu(x) y`: SwiGLU with gate `x` and up `y`.
    SiluMul,
    /// `gelu_tanh(x) y`.
    GeluTanhMul,
    /// `gelu_erf(x) y`.
    GeluErfMul,
}

/// `out[i] = f(x[i])`.
///
/// # Panics
/// When the lengths differ.
pub fn map(isa: Isa, f: Unary, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "map: input and output");
    // SAFETY: both slices have that many elements.
    unsafe { map_raw(isa, f, x.as_ptr(), out.as_mut_ptr(), out.len()) }
}

/// `x[i] = f(x[i])`.
pub fn map_in_place(isa: Isa, f: Unary, x: &mut [f32]) {
    // SAFETY: the slice has that many elements; the kernel reads each before it writes it.
    unsafe { map_raw(isa, f, x.as_ptr(), x.as_mut_ptr(), x.len()) }
}

/// `out[i] = f(x[i], y[i])`.
///
/// # Panics
/// When the lengths differ.
pub fn zip(isa: Isa, f: Binary, x: &[f32], y: &[f32], out: &mut [f32]) {
    assert!(x.len() == out.len() && y.len() == out.len(), "zip: inputs and output");
    // SAFETY: the slices have that many elements.
    unsafe { zip_raw(isa, f, x.as_ptr(), y.as_ptr(), out.as_mut_ptr(), out.len()) }
}

/// `x[i] = f(x[i], y[i])`.
///
/// # Panics
/// When the lengths differ.
pub fn zip_in_place(isa: Isa, f: Binary, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "zip: inputs");
    // SAFETY: the slices have that many elements; the kernel reads each of `x` before it writes it.
    unsafe { zip_raw(isa, f, x.as_ptr(), y.as_ptr(), x.as_mut_ptr(), x.len()) }
}

/// # Safety
/// `x` and `out` point to `n` elements and are equal or do not overlap.
unsafe fn map_raw(isa: Isa, f: Unary, x: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's promises are the kernel's.
    unsafe { dispatch!(isa, map_kernel(f: Unary, x: *const f32, out: *mut f32, n: usize)) }
}

/// # Safety
/// `x`, `y` and `out` point to `n` elements; `out` equals an input or overlaps neither.
unsafe fn zip_raw(isa: Isa, f: Binary, x: *const f32, y: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's promises are the kernel's.
    unsafe {
        dispatch!(isa, zip_kernel(f: Binary, x: *const f32, y: *const f32, out: *mut f32, n: usize))
    }
}

#[inline(always)]
unsafe fn map_kernel<L: Lanes>(f: Unary, x: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's promises are `each`'s.
    unsafe {
        match f {
            Unary::Exp => each::<L>(x, out, n, exp),
            Unary::Scale(a) => each::<L>(x, out, n, |x| x.mul(L::splat(a))),
            Unary::Sigmoid => each::<L>(x, out, n, sigmoid),
            Unary::Silu => each::<L>(x, out, n, silu),
            Unary::GeluTanh => each::<L>(x, out, n, gelu_tanh),
            Unary::GeluErf => each::<L>(x, out, n, gelu_erf),
            Unary::Tanh => each::<L>(x, out, n, tanh),
            Unary::Relu => each::<L>(x, out, n, |x| L::splat(0.0).max(x)),
            Unary::Softcap(cap) => {
                each::<L>(x, out, n, |x| tanh(x.mul(L::splat(1.0 / cap))).mul(L::splat(cap)));
            }
        }
    }
}

#[inline(always)]
unsafe fn zip_kernel<L: Lanes>(f: Binary, x: *const f32, y: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's promises are `each_pair`'s.
    unsafe {
        match f {
            Binary::Add => each_pair::<L>(x, y, out, n, L::add),
            Binary::Sub => each_pair::<L>(x, y, out, n, L::sub),
            Binary::Mul => each_pair::<L>(x, y, out, n, L::mul),
            Binary::AddScaled(a) => each_pair::<L>(x, y, out, n, |x, y| y.fma(L::splat(a), x)),
            Binary::SiluMul => each_pair::<L>(x, y, out, n, |x, y| silu(x).mul(y)),
            Binary::GeluTanhMul => each_pair::<L>(x, y, out, n, |x, y| gelu_tanh(x).mul(y)),
            Binary::GeluErfMul => each_pair::<L>(x, y, out, n, |x, y| gelu_erf(x).mul(y)),
        }
    }
}

/// `out[i] = f(x[i])`.
///
/// # Safety
/// `x` and `out` point to `n` elements and are equal or do not overlap.
#[inline(always)]
unsafe fn each<L: Lanes>(x: *const f32, out: *mut f32, n: usize, f: impl Fn(L) -> L) {
    let whole = n - n % L::N;
    // SAFETY: every index is below `n`; a vector is read before it is written.
    unsafe {
        for i in (0..whole).step_by(L::N) {
            f(L::load(x.add(i))).store(out.add(i));
        }
        if whole < n {
            f(L::load_part(x.add(whole), n - whole)).store_part(out.add(whole), n - whole);
        }
    }
}

/// `out[i] = f(x[i], y[i])`.
///
/// # Safety
/// `x`, `y` and `out` point to `n` elements; `out` equals an input or overlaps neither.
#[inline(always)]
unsafe fn each_pair<L: Lanes>(
    x: *const f32,
    y: *const f32,
    out: *mut f32,
    n: usize,
    f: impl Fn(L, L) -> L,
) {
    let whole = n - n % L::N;
    // SAFETY: every index is below `n`; vectors are read before one is written.
    unsafe {
        for i in (0..whole).step_by(L::N) {
            f(L::load(x.add(i)), L::load(y.add(i))).store(out.add(i));
        }
        if whole < n {
            let rest = n - whole;
            f(L::load_part(x.add(whole), rest), L::load_part(y.add(whole), rest))
                .store_part(out.add(whole), rest);
        }
    }
}

#[cfg(test)]
mod tests;
