//! The algebra of const-fold: identities that hold bit for bit, and index arithmetic brought to one
//! form (the number on the right, sums of numbers together), so that equal indices look equal to
//! cse.

use super::const_fold::{Folded, scalar_of};
use super::ranges::{self, Range};
use super::rewrite::Rewrite;
use crate::instr::BinaryOp::{
    self, Add, And, Div, Max, Min, Mul, MulHi, Or, Rem, Shl, Shr, Sub, Xor,
};
use crate::instr::UnaryOp;
use crate::ir::{Inst, Literal, Value};
use crate::types::Scalar;

/// One identity that applies.
pub(super) fn simplify(r: &mut Rewrite, inst: &Inst) -> Option<Folded> {
    match inst {
        Inst::Unary(op, a) => unary(r, *op, *a),
        Inst::Binary(op, a, b) => match scalar_of(r, *a)? {
            Scalar::F32 => float(r, *op, *a, *b),
            Scalar::Bool => truth(r, *op, *a, *b),
            scalar => integer(r, scalar, *op, *a, *b),
        },
        Inst::Select { cond, yes, no } => select(r, *cond, *yes, *no),
        Inst::Cast(to, a) => {
            let from = scalar_of(r, *a)?;
            if from == *to {
                return Some(Folded::Same(*a));
            }
            // There and back through a type that holds every number of the first.
            match r.def(*a)? {
                Inst::Cast(_, first) => {
                    let first = *first;
                    let same = scalar_of(r, first)? == *to && holds(from, *to);
                    same.then_some(Folded::Same(first))
                }
                _ => None,
            }
        }
        Inst::Bitcast(to, a) => {
            if scalar_of(r, *a)? == *to {
                return Some(Folded::Same(*a));
            }
            match r.def(*a)? {
                Inst::Bitcast(_, first) if scalar_of(r, *first)? == *to => {
                    Some(Folded::Same(*first))
                }
                Inst::Bitcast(_, first) => Some(Folded::Inst(Inst::Bitcast(*to, *first))),
                _ => None,
            }
        }
        Inst::Extract(vector, lane) => match r.def(*vector)? {
            Inst::Pack(values) => values.get(usize::from(*lane)).map(|v| Folded::Same(*v)),
            _ => None,
        },
        _ => None,
    }
}

/// Whether every number of `small` is one of `wide`.
fn holds(wide: Scalar, small: Scalar) -> bool {
    use Scalar::{BF16, F16, F32, I8, I16, I32, U8, U16, U32};
    match small {
        F16 | BF16 => wide == F32,
        I8 => matches!(wide, I16 | I32 | F32),
        U8 => matches!(wide, I16 | U16 | I32 | U32 | F32),
        I16 => matches!(wide, I32 | F32),
        U16 => matches!(wide, I32 | U32 | F32),
        _ => false,
    }
}

fn unary(r: &mut Rewrite, op: UnaryOp, a: Value) -> Option<Folded> {
    let Some(Inst::Unary(inner, first)) = r.def(a) else {
        // Only integers: a NaN is neither below a number nor not below it.
        if let (UnaryOp::Not, Some(Inst::Binary(compare, x, y))) = (op, r.def(a)) {
            let (compare, x, y) = (*compare, *x, *y);
            let total = scalar_of(r, x).is_some_and(|s| s != Scalar::F32);
            return total
                .then(|| opposite(compare))
                .flatten()
                .map(|op| Folded::Inst(Inst::Binary(op, x, y)));
        }
        return None;
    };
    let undone = *inner == op && matches!(op, UnaryOp::Not | UnaryOp::Neg);
    undone.then_some(Folded::Same(*first))
}

fn opposite(compare: BinaryOp) -> Option<BinaryOp> {
    Some(match compare {
        BinaryOp::Eq => BinaryOp::Ne,
        BinaryOp::Ne => BinaryOp::Eq,
        BinaryOp::Lt => BinaryOp::Ge,
        BinaryOp::Ge => BinaryOp::Lt,
        BinaryOp::Gt => BinaryOp::Le,
        BinaryOp::Le => BinaryOp::Gt,
        _ => return None,
    })
}

/// `x * 1`, `x / 1`, `x - 0`, `x + -0`: the only identities that keep every f32, its zero's sign
/// too.
fn float(r: &Rewrite, op: BinaryOp, a: Value, b: Value) -> Option<Folded> {
    let is = |v: Value, x: f32| r.known(v) == Some(Literal::float(x));
    let same = match op {
        Mul if is(b, 1.0) => a,
        Mul if is(a, 1.0) => b,
        Div if is(b, 1.0) => a,
        Sub if is(b, 0.0) => a,
        Add if is(b, -0.0) => a,
        Add if is(a, -0.0) => b,
        _ => return None,
    };
    Some(Folded::Same(same))
}

fn truth(r: &mut Rewrite, op: BinaryOp, a: Value, b: Value) -> Option<Folded> {
    let (known, other) = match (r.known(a), r.known(b)) {
        (Some(Literal::Bool(known)), _) => (known, b),
        (_, Some(Literal::Bool(known))) => (known, a),
        _ if a == b && matches!(op, And | Or) => return Some(Folded::Same(a)),
        _ => return None,
    };
    Some(match (op, known) {
        (And, true) | (Or, false) | (Xor | BinaryOp::Ne, false) | (BinaryOp::Eq, true) => {
            Folded::Same(other)
        }
        (And, false) => Folded::Literal(Literal::Bool(false)),
        (Or, true) => Folded::Literal(Literal::Bool(true)),
        (Xor | BinaryOp::Ne, true) | (BinaryOp::Eq, false) => {
            Folded::Inst(Inst::Unary(UnaryOp::Not, other))
        }
        _ => return None,
    })
}

fn select(r: &mut Rewrite, cond: Value, yes: Value, no: Value) -> Option<Folded> {
    if yes == no {
        return Some(Folded::Same(yes));
    }
    if let Some(Literal::Bool(known)) = r.known(cond) {
        return Some(Folded::Same(if known { yes } else { no }));
    }
    match (r.known(yes), r.known(no)) {
        (Some(Literal::Bool(true)), Some(Literal::Bool(false))) => return Some(Folded::Same(cond)),
        (Some(Literal::Bool(false)), Some(Literal::Bool(true))) => {
            return Some(Folded::Inst(Inst::Unary(UnaryOp::Not, cond)));
        }
        _ => {}
    }
    match r.def(cond)? {
        Inst::Unary(UnaryOp::Not, cond) => {
            Some(Folded::Inst(Inst::Select { cond: *cond, yes: no, no: yes }))
        }
        _ => None,
    }
}

/// Identities of `I32` and `U32`, which wrap.
fn integer(r: &mut Rewrite, scalar: Scalar, op: BinaryOp, a: Value, b: Value) -> Option<Folded> {
    let number = |bits: u32| Literal::from_bits(scalar, bits).map(Folded::Literal);
    let unsigned = scalar == Scalar::U32;
    let commutes =
        matches!(op, Add | Mul | And | Or | Xor | Min | Max | MulHi | BinaryOp::Eq | BinaryOp::Ne);
    if a == b {
        match op {
            Sub | Xor => return number(0),
            And | Or | Min | Max => return Some(Folded::Same(a)),
            BinaryOp::Eq | BinaryOp::Le | BinaryOp::Ge => {
                return Some(Folded::Literal(Literal::Bool(true)));
            }
            BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Gt => {
                return Some(Folded::Literal(Literal::Bool(false)));
            }
            _ => {}
        }
    }
    if unsigned {
        let (x, y) = (r.range(a), r.range(b));
        if let Some(truth) = ranges::compare(op, x, y) {
            return Some(Folded::Literal(Literal::Bool(truth)));
        }
        if ranges::leaves(op, x, y) {
            return Some(Folded::Same(a));
        }
        if (commutes && ranges::leaves(op, y, x)) && matches!(op, Min | Max) {
            return Some(Folded::Same(b));
        }
        let result = Range::of(&r.kernel, &Inst::Binary(op, a, b), |v| r.range(v));
        if matches!(op, Div | Rem | Shr) && result.most == 0 {
            return number(0);
        }
    }
    let Some(n) = r.known(b).map(Literal::bits) else {
        return match r.known(a).map(Literal::bits) {
            Some(_) if commutes => Some(Folded::Inst(Inst::Binary(op, b, a))),
            _ => None,
        };
    };
    match (op, n) {
        (Add | Sub | Or | Xor | Shl | Shr, 0) | (Mul | Div, 1) => return Some(Folded::Same(a)),
        (Mul | And, 0) | (MulHi, 0 | 1) | (Rem, 1) => return number(0),
        (And, u32::MAX) => return Some(Folded::Same(a)),
        (Or, u32::MAX) => return number(u32::MAX),
        (Min, 0) if unsigned => return number(0),
        (Max, 0) if unsigned => return Some(Folded::Same(a)),
        _ => {}
    }
    if unsigned && n.is_power_of_two() && matches!(op, Div | Rem) {
        let (op, n) = if op == Div { (Shr, n.trailing_zeros()) } else { (And, n - 1) };
        let n = r.literal(Literal::U32(n));
        return Some(Folded::Inst(Inst::Binary(op, a, n)));
    }
    reassociate(r, scalar, op, a, n)
}

/// `(x op m) op n` with two numbers becomes `x op (m op n)`.
fn reassociate(r: &mut Rewrite, scalar: Scalar, op: BinaryOp, a: Value, n: u32) -> Option<Folded> {
    let Some(Inst::Binary(inner, x, m)) = r.def(a) else { return None };
    let (inner, x, m) = (*inner, *x, r.known(*m).map(Literal::bits)?);
    let (op, number) = match (inner, op) {
        (Add, Add) => (Add, m.wrapping_add(n)),
        (Sub, Sub) => (Sub, m.wrapping_add(n)),
        // The sign that keeps the number small, for those who read the text.
        (Add, Sub) if m >= n => (Add, m - n),
        (Add, Sub) => (Sub, n - m),
        (Sub, Add) if n >= m => (Add, n - m),
        (Sub, Add) => (Sub, m - n),
        (Mul, Mul) => (Mul, m.wrapping_mul(n)),
        (And, And) => (And, m & n),
        (Or, Or) => (Or, m | n),
        (Xor, Xor) => (Xor, m ^ n),
        (Min, Min) => (Min, Min.eval(scalar, m, n)?),
        (Max, Max) => (Max, Max.eval(scalar, m, n)?),
        (Shl, Shl) | (Shr, Shr) if m < 32 && n < 32 && m + n < 32 => (op, m + n),
        _ => return None,
    };
    let number = Literal::from_bits(scalar, number)?;
    let number = r.literal(number);
    Some(Folded::Inst(Inst::Binary(op, x, number)))
}
