//! ConstFold: arithmetic on numbers that are known, through the meaning each instruction has in
//! [`crate::instr`]; the identities of `identities`; comparisons that the ranges of their operands
//! decide (`ranges`); branches whose condition is known; loops of no trip or one.
//!
//! Limits: what is undefined (a division by zero, a shift by 32) is never folded, so that the
//! interpreter still reports it; floats only where the result has the same bits, so `x * 1.0` but
//! not `x + 0.0`.

use super::identities;
use super::rewrite::{Rewrite, Visitor, rewrite};
use crate::instr::{cast, dot4, fma_halves, lookup};
use crate::ir::{Block, Builtin, Inst, Kernel, Literal, Statement, Value};
use crate::launch::Extent;
use crate::types::{Scalar, Type};

/// The kernel with what is known computed.
pub(super) fn const_fold(kernel: &Kernel) -> Kernel {
    rewrite(kernel, &mut Fold)
}

/// The result of folding an instruction.
pub(super) enum Folded {
    /// A number.
    Literal(Literal),
    /// A value that exists.
    Same(Value),
    /// A simpler instruction.
    Inst(Inst),
}

struct Fold;

impl Visitor for Fold {
    fn node(&mut self, r: &mut Rewrite, mut node: Statement) {
        match node.inst {
            Inst::If { cond, then, otherwise } => {
                let taken = match r.known(cond) {
                    Some(Literal::Bool(true)) => Some(then),
                    Some(Literal::Bool(false)) => Some(otherwise),
                    _ => {
                        node.inst = Inst::If { cond, then, otherwise };
                        return self.branch(r, node);
                    }
                };
                taken.into_iter().for_each(|block| r.walk(block, self));
            }
            Inst::For { index, start, end, step, unroll, body } => {
                let [first, past, stride] = [start, end, step].map(|v| r.range(v));
                if first.least >= past.most {
                    // No trip.
                } else if first.most < past.least
                    && first.least.saturating_add(stride.least) >= past.most
                {
                    // One.
                    r.rename(index, start);
                    r.walk(body, self);
                } else {
                    let inst = Inst::For { index, start, end, step, unroll, body };
                    r.keep(Statement { inst, ..node }, self);
                }
            }
            _ => {
                let Some(result) = node.result else { return r.keep(node, self) };
                // Each rule leaves something simpler, so this ends; the bound only says so.
                for _ in 0..16 {
                    match fold(r, &node.inst) {
                        Some(Folded::Literal(literal)) => {
                            node.inst = Inst::Literal(literal);
                            break;
                        }
                        Some(Folded::Same(value)) => return r.rename(result, value),
                        Some(Folded::Inst(inst)) => node.inst = inst,
                        None => break,
                    }
                }
                r.keep(node, self);
            }
        }
    }
}

impl Fold {
    /// An `if` whose condition is not known: without content it goes.
    fn branch(&mut self, r: &mut Rewrite, node: Statement) {
        let Inst::If { cond, then, otherwise } = node.inst else { return };
        let then: Block = r.inner(then, self);
        let otherwise = r.inner(otherwise, self);
        if !(then.0.is_empty() && otherwise.0.is_empty()) {
            r.push(Inst::If { cond, then, otherwise }, None);
        }
    }
}

/// One step towards something simpler.
fn fold(r: &mut Rewrite, inst: &Inst) -> Option<Folded> {
    evaluate(r, inst).map(Folded::Literal).or_else(|| identities::simplify(r, inst))
}

/// The result, if every operand is a number and the result is defined.
fn evaluate(r: &Rewrite, inst: &Inst) -> Option<Literal> {
    let known = |v: Value| r.known(v);
    match inst {
        Inst::Builtin(builtin) => place(&r.kernel, *builtin),
        Inst::Unary(op, a) => {
            let a = known(*a)?;
            Literal::from_bits(a.scalar(), op.eval(a.scalar(), a.bits())?)
        }
        Inst::Binary(op, a, b) => {
            let (a, b) = (known(*a)?, known(*b)?);
            let bits = op.eval(a.scalar(), a.bits(), b.bits())?;
            Literal::from_bits(op.result(a.scalar()), bits)
        }
        Inst::Fma(a, b, c) => match (known(*a)?, known(*b)?, known(*c)?) {
            (Literal::F32(a), Literal::F32(b), Literal::F32(c)) => {
                let [a, b, c] = [a, b, c].map(f32::from_bits);
                Some(Literal::float(a.mul_add(b, c)))
            }
            _ => None,
        },
        Inst::Cast(to, a) => {
            let a = known(*a)?;
            Literal::from_bits(*to, cast(a.scalar(), *to, a.bits())).filter(|_| to.computes())
        }
        Inst::Bitcast(to, a) => {
            let a = known(*a).filter(|a| a.scalar().bytes() == to.bytes())?;
            Literal::from_bits(*to, a.bits()).filter(|_| *to != Scalar::Bool)
        }
        Inst::Dot4 { a, b, acc } => {
            let [a, b, acc] = [known(*a)?, known(*b)?, known(*acc)?].map(Literal::bits);
            Literal::from_bits(Scalar::I32, dot4(a, b, acc))
        }
        Inst::FmaHalves { a, b, c } => {
            let [a, b, c] = [known(*a)?, known(*b)?, known(*c)?].map(Literal::bits);
            Literal::from_bits(Scalar::U32, fma_halves(a, b, c))
        }
        Inst::Lookup { codes, table } => {
            let words = table.iter().map(|v| known(*v).map(Literal::bits));
            let words: Vec<u32> = words.collect::<Option<_>>()?;
            let found = lookup(known(*codes)?.bits(), words.try_into().ok()?);
            Literal::from_bits(Scalar::U32, found)
        }
        _ => None,
    }
}

/// A thread's place, where the launch contract leaves one possibility.
fn place(kernel: &Kernel, builtin: Builtin) -> Option<Literal> {
    let launch = &kernel.launch;
    match builtin {
        Builtin::Group(axis) => {
            let extent = launch.grid.get(usize::from(axis))?;
            (*extent == Extent::Literal(1)).then_some(Literal::U32(0))
        }
        Builtin::Groups(axis) => match launch.grid.get(usize::from(axis))? {
            Extent::Literal(n) => Some(Literal::U32(*n)),
            _ => None,
        },
        Builtin::Simd => (launch.threads == 32).then_some(Literal::U32(0)),
        Builtin::Thread | Builtin::Lane => None,
    }
}

/// The element type, of a scalar only.
pub(super) fn scalar_of(r: &Rewrite, value: Value) -> Option<Scalar> {
    match r.kernel.ty(value) {
        Type::Scalar(scalar) => Some(scalar),
        _ => None,
    }
}
