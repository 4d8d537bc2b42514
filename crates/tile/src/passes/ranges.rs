//! The known range of each `U32` value: the least and the greatest it can be, from the launch
//! contract upward through arithmetic. Const-fold decides comparisons, remainders and loops with
//! it.

use crate::instr::BinaryOp::{self, Add, And, Div, Max, Min, Mul, Rem, Shl, Shr, Sub};
use crate::instr::UnaryOp;
use crate::ir::{Builtin, Inst, Kernel, Literal, SimdOp, Value};
use crate::launch::{Extent, Requirement};
use crate::types::Scalar;

/// From the least to the greatest, both possible as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    /// The least.
    pub(crate) least: u32,
    /// The greatest.
    pub(crate) most: u32,
}

impl Range {
    /// Nothing is known.
    pub(crate) const ANY: Range = Range { least: 0, most: u32::MAX };

    /// From zero.
    pub(crate) fn up_to(most: u32) -> Self {
        Range { least: 0, most }
    }

    /// The range of a loop's index.
    pub(crate) fn index(start: Range, end: Range) -> Self {
        let most = end.most.saturating_sub(1);
        Range { least: start.least.min(most), most }
    }

    /// The range of an instruction's result, given the ranges of its operands.
    pub(crate) fn of(kernel: &Kernel, inst: &Inst, of: impl Fn(Value) -> Range) -> Self {
        let launch = &kernel.launch;
        match inst {
            Inst::Literal(Literal::U32(n)) => Range { least: *n, most: *n },
            Inst::Constant(i) => promised(kernel, &kernel.constants[*i as usize].name),
            Inst::Argument(i) => promised(kernel, &kernel.params[*i as usize].name),
            Inst::Builtin(Builtin::Thread) => Range::up_to(launch.threads.saturating_sub(1)),
            Inst::Builtin(Builtin::Lane) => Range::up_to(31),
            Inst::Builtin(Builtin::Simd) => Range::up_to((launch.threads / 32).saturating_sub(1)),
            Inst::Builtin(Builtin::Group(axis)) => match launch.grid.get(usize::from(*axis)) {
                Some(Extent::Literal(n)) => Range::up_to(n.saturating_sub(1)),
                _ => Range::ANY,
            },
            Inst::Unary(UnaryOp::Popcount | UnaryOp::LeadingZeros, _) => Range::up_to(32),
            Inst::Binary(op, a, b) => binary(*op, of(*a), of(*b)).unwrap_or(Range::ANY),
            Inst::Select { yes, no, .. } => {
                let (yes, no) = (of(*yes), of(*no));
                Range { least: yes.least.min(no.least), most: yes.most.max(no.most) }
            }
            Inst::Cast(Scalar::U32, a) => match kernel.ty(*a).scalar() {
                Scalar::Bool => Range::up_to(1),
                Scalar::U8 => Range::up_to(255),
                Scalar::U16 => Range::up_to(65_535),
                _ => Range::ANY,
            },
            Inst::Simd(SimdOp::Shuffle | SimdOp::ShuffleXor(_), a, _) => of(*a),
            _ => Range::ANY,
        }
    }
}

/// The range that the contract gives a name.
fn promised(kernel: &Kernel, name: &str) -> Range {
    let rules = kernel.launch.requirements.iter();
    let limits = rules.filter_map(|rule| match rule {
        Requirement::AtMost(Extent::Name(n), limit) if n == name => Some(*limit),
        _ => None,
    });
    Range::up_to(limits.min().unwrap_or(u32::MAX))
}

/// Nothing where the result may wrap.
fn binary(op: BinaryOp, a: Range, b: Range) -> Option<Range> {
    let between = |least: u32, most: u32| Some(Range { least, most });
    match op {
        Add => between(a.least.checked_add(b.least)?, a.most.checked_add(b.most)?),
        Sub => between(a.least.checked_sub(b.most)?, a.most - b.least),
        Mul => between(a.least.checked_mul(b.least)?, a.most.checked_mul(b.most)?),
        Div => between(a.least.checked_div(b.most)?, a.most.checked_div(b.least)?),
        Rem if b.least > 0 => between(0, a.most.min(b.most - 1)),
        Min => between(a.least.min(b.least), a.most.min(b.most)),
        Max => between(a.least.max(b.least), a.most.max(b.most)),
        And => between(0, a.most.min(b.most)),
        Shl if b.most < 32 => {
            let most = u64::from(a.most) << b.most;
            between(a.least << b.least, u32::try_from(most).ok()?)
        }
        Shr if b.most < 32 => between(a.least >> b.most, a.most >> b.least),
        _ => None,
    }
}

/// The truth of a comparison, where the ranges decide it.
pub(crate) fn compare(op: BinaryOp, a: Range, b: Range) -> Option<bool> {
    match op {
        BinaryOp::Lt => decided(a.most < b.least, a.least >= b.most),
        BinaryOp::Ge => decided(a.least >= b.most, a.most < b.least),
        BinaryOp::Gt => decided(a.least > b.most, a.most <= b.least),
        BinaryOp::Le => decided(a.most <= b.least, a.least > b.most),
        BinaryOp::Eq => decided(false, a.most < b.least || b.most < a.least),
        BinaryOp::Ne => decided(a.most < b.least || b.most < a.least, false),
        _ => None,
    }
}

fn decided(yes: bool, no: bool) -> Option<bool> {
    (yes || no).then_some(yes)
}

/// Whether an operation leaves its left operand as it is, whatever that is within its range.
pub(crate) fn leaves(op: BinaryOp, a: Range, b: Range) -> bool {
    match op {
        Rem => a.most < b.least,
        // A mask of low bits.
        And => b.least == b.most && b.most.wrapping_add(1).is_power_of_two() && a.most <= b.most,
        Min => a.most <= b.least,
        Max => a.least >= b.most,
        _ => false,
    }
}
