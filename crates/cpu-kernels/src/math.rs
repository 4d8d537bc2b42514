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

/// Stores an expression of vectors, each from its array, at every place of `out`; what is left over as part of a vector.
///
/// The expression is pasted: of a closure the compiler would make a function of its own, without the instructions.
macro_rules! each {
    ($lanes:ident, $out:ident, $n:ident, [$($v:ident in $x:ident),+] => $body:expr) => {{
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

#[inline(always)]
unsafe fn map_kernel<L: Lanes>(f: Unary, x: *const f32, out: *mut f32, n: usize) {
    // SAFETY: every index is below `n`; a vector is read before it is written.
    unsafe {
        match f {
            Unary::Exp => each!(L, out, n, [v in x] => exp(v)),
            Unary::Scale(a) => each!(L, out, n, [v in x] => v.mul(L::splat(a))),
            Unary::Sigmoid => each!(L, out, n, [v in x] => sigmoid(v)),
            Unary::Silu => each!(L, out, n, [v in x] => silu(v)),
            Unary::GeluTanh => each!(L, out, n, [v in x] => gelu_tanh(v)),
            Unary::GeluErf => each!(L, out, n, [v in x] => gelu_erf(v)),
            Unary::Tanh => each!(L, out, n, [v in x] => tanh(v)),
            Unary::Relu => each!(L, out, n, [v in x] => L::splat(0.0).max(v)),
            Unary::Softcap(cap) => {
                each!(L, out, n, [v in x] => tanh(v.mul(L::splat(1.0 / cap))).mul(L::splat(cap)));
            }
        }
    }
}

#[inline(always)]
unsafe fn zip_kernel<L: Lanes>(f: Binary, x: *const f32, y: *const f32, out: *mut f32, n: usize) {
    // SAFETY: every index is below `n`; vectors are read before one is written.
    unsafe {
        match f {
            Binary::Add => each!(L, out, n, [a in x, b in y] => a.add(b)),
            Binary::Sub => each!(L, out, n, [a in x, b in y] => a.sub(b)),
            Binary::Mul => each!(L, out, n, [a in x, b in y] => a.mul(b)),
            Binary::AddScaled(s) => each!(L, out, n, [a in x, b in y] => b.fma(L::splat(s), a)),
            Binary::SiluMul => each!(L, out, n, [a in x, b in y] => silu(a).mul(b)),
            Binary::GeluTanhMul => each!(L, out, n, [a in x, b in y] => gelu_tanh(a).mul(b)),
            Binary::GeluErfMul => each!(L, out, n, [a in x, b in y] => gelu_erf(a).mul(b)),
        }
    }
}

#[cfg(test)]
mod tests;
