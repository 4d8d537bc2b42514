//! The known divisors of every index: matrix loads may move several elements at once only from
//! aligned addresses, and the contract, the literals and the arithmetic say which those are.

use crate::instr::BinaryOp;
use crate::ir::{Inst, Kernel, Literal, ParamKind, Place};
use crate::launch::{Extent, Requirement};

/// No one asks for more than this.
const LIMIT: u32 = 1 << 8;

/// For each value, a power of two that divides it (1 for what is not an integer).
pub(super) fn multiples(kernel: &Kernel) -> Vec<u32> {
    let mut known = vec![1; kernel.values.len()];
    let mut literals = vec![None; kernel.values.len()];
    kernel.visit(&mut |node| {
        let of = |v: &crate::ir::Value| known[v.0 as usize];
        if let Inst::For { index, start, step, .. } = &node.inst {
            known[index.0 as usize] = of(start).min(of(step));
            return;
        }
        let Some(result) = node.result else { return };
        if let Inst::Literal(Literal::U32(n)) = node.inst {
            literals[result.0 as usize] = Some(n);
        }
        known[result.0 as usize] = match &node.inst {
            Inst::Literal(Literal::U32(n)) => power(*n),
            Inst::Constant(i) => by_contract(kernel, &kernel.constants[*i as usize].name),
            Inst::Argument(i) => match &kernel.params[*i as usize] {
                p if matches!(p.kind, ParamKind::Argument(_)) => by_contract(kernel, &p.name),
                _ => 1,
            },
            Inst::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Rem, a, b) => of(a).min(of(b)),
            Inst::Binary(BinaryOp::Mul, a, b) => (of(a) * of(b)).min(LIMIT),
            Inst::Binary(BinaryOp::And, a, b) => of(a).max(of(b)),
            Inst::Binary(BinaryOp::Or | BinaryOp::Xor | BinaryOp::Min | BinaryOp::Max, a, b) => {
                of(a).min(of(b))
            }
            Inst::Binary(BinaryOp::Shl, a, b) => match literals[b.0 as usize] {
                Some(n) if n < 8 => (of(a) << n).min(LIMIT),
                Some(_) => LIMIT,
                None => of(a),
            },
            Inst::Select { yes, no, .. } => of(yes).min(of(no)),
            _ => 1,
        };
    });
    known
}

/// The largest power of two that divides a number.
fn power(n: u32) -> u32 {
    1u32.checked_shl(n.trailing_zeros()).unwrap_or(LIMIT).min(LIMIT)
}

fn by_contract(kernel: &Kernel, name: &str) -> u32 {
    let stated = kernel.launch.requirements.iter().map(|rule| match rule {
        Requirement::Divisible(Extent::Name(n), by) if n == name => power(*by),
        _ => 1,
    });
    stated.max().unwrap_or(1)
}

/// The known alignment of an array's address, in bytes.
pub(super) fn alignment(kernel: &Kernel, place: Place) -> u32 {
    let Place::Buffer(i) = place else { return 16 };
    let element = kernel.element(place).scalar().bytes() as u32;
    let name = &kernel.params[i as usize].name;
    let stated = kernel.launch.requirements.iter().map(|rule| match rule {
        Requirement::Aligned(n, bytes) if n == name => power(*bytes),
        _ => 1,
    });
    stated.max().unwrap_or(1).max(element)
}
