//! Rules that no text breaks, since the parser cannot make such kernels. All others have their
//! files in `tests/filetests/verify`.

use super::*;
use crate::ir::{Literal, Place, SourceId};
use crate::types::Type;

/// A kernel with a buffer, an argument and one instruction after two literals: `%0` is u32, `%1`
/// f32.
fn with(inst: Inst, result: Option<Type>) -> Kernel {
    let text = "kernel k {\nbuffer x: f32 in\nargument n: u32\nconstant c: u32\nbody {\n%0: u32 = 0\n%1: f32 = 1.0\n}\n}\n";
    let mut kernel = text::parse(text).unwrap();
    let result = result.map(|ty| kernel.fresh(ty));
    kernel.body.0.push(Statement { inst, result, source: SourceId(7) });
    kernel
}

#[test]
fn what_the_kernel_does_not_have_is_refused() {
    let (zero, one) = (Value(0), Value(1));
    let (f32, u32) = (Some(Type::from(Scalar::F32)), Some(Type::from(Scalar::U32)));
    let load = |place| Inst::Load { place, index: zero, lanes: 1, hint: crate::ir::LoadHint::None };
    let shuffle = Inst::Simd(crate::ir::SimdOp::Any, one, Some(zero));
    let sum = Inst::Simd(crate::ir::SimdOp::Reduce(crate::ir::Reduce::Sum), one, Some(zero));
    for (inst, result, wanted) in [
        (load(Place::Buffer(2)), f32, "load: there is no parameter number 2"),
        (load(Place::Shared(0)), f32, "load: there is no shared array number 0"),
        (load(Place::Register(9)), f32, "load: there is no register array number 9"),
        (load(Place::Buffer(1)), f32, "load: `n` is an argument: an array expected"),
        (Inst::Constant(1), u32, "constant: there is no constant number 1"),
        (Inst::Argument(2), u32, "argument: there is no parameter number 2"),
        (Inst::Argument(0), f32, "argument: `x` is a buffer"),
        (Inst::Literal(Literal::I32(1)), u32, "literal: its result is i32, but %2 is u32"),
        (Inst::Cast(Scalar::I32, one), u32, "cast: its result is i32, but %2 is u32"),
        (Inst::Pack(vec![]), f32, "pack: scalars expected, found none"),
        (Inst::Pack(vec![one; 300]), f32, "pack: at most 16 expected, found 300"),
        (Inst::Fma(one, one, Value(40)), f32, "fma: there is no value %40"),
        (shuffle, Some(Scalar::Bool.into()), "simd_any: it does not take f32"),
        (sum, f32, "simd_sum: one operand expected, found a lane too"),
    ] {
        let kernel = with(inst, result);
        let fault = verify(&kernel).unwrap_err();
        assert_eq!(fault.message, wanted);
        assert_eq!(fault.line, 11, "{kernel}");
    }
}

#[test]
fn results_are_values_of_the_kernel() {
    let mut kernel = with(Inst::Barrier, None);
    assert_eq!(verify(&kernel), Ok(()));
    kernel.body.0[0].result = Some(Value(80));
    let fault = verify(&kernel).unwrap_err();
    assert_eq!(fault.to_string(), "k, line 9: literal: there is no value %80");
    kernel = with(Inst::Barrier, None);
    let (zero, body) = (Value(0), Block::default());
    let inst =
        Inst::For { index: Value(80), start: zero, end: zero, step: zero, unroll: false, body };
    kernel.body.0[2].inst = inst;
    kernel.body.0[0].inst = Inst::Literal(Literal::U32(1));
    assert!(verify(&kernel).unwrap_err().message.contains("no value %80"));
}

#[test]
fn names_from_rust_are_checked() {
    for name in ["", "a b", "a;", "\u{e9}", "1a", "a\n"] {
        let mut kernel = with(Inst::Barrier, None);
        kernel.name = name.to_owned();
        let fault = verify(&kernel).unwrap_err();
        assert!(fault.message.contains("a C identifier expected"), "{fault}");
        kernel = with(Inst::Barrier, None);
        kernel.launch.grid[1] = name.into();
        assert_eq!(verify(&kernel).unwrap_err().line, 3);
    }
}
