//! Helpers of passes: rebuilding a body with values renamed, and questions about a kernel's values.
//!
//! A pass walks the old body in order and emits the new one. [`Rewrite`] holds what is emitted,
//! which old value each new one replaces, and the instruction behind every new value; [`Visitor`]
//! is the pass's decision about one instruction.

use std::collections::{BTreeSet, HashSet};

use super::ranges::Range;
use crate::ir::{Block, Builtin, Inst, Kernel, Literal, Place, SourceId, Statement, Value};
use crate::launch::{Extent, Requirement};
use crate::types::{Scalar, Type};

/// A kernel whose body is being replaced.
pub(crate) struct Rewrite {
    /// The kernel; its body is empty until [`Rewrite::finish`].
    pub(crate) kernel: Kernel,
    renamed: Vec<Value>,
    defs: Vec<Option<Inst>>,
    ranges: Vec<Range>,
    open: Vec<Block>,
    source: SourceId,
}

/// A pass's decision about each instruction, in order.
pub(crate) trait Visitor {
    /// Emits what replaces `node`, whose operands are renamed already; [`Rewrite::keep`] emits it
    /// as it is.
    fn node(&mut self, r: &mut Rewrite, node: Statement);
    /// An inner block begins.
    fn enter(&mut self) {}
    /// An inner block has ended.
    fn leave(&mut self) {}
}

/// Rebuilds a kernel with a visitor.
pub(crate) fn rewrite(kernel: &Kernel, visitor: &mut impl Visitor) -> Kernel {
    let (mut r, body) = Rewrite::new(kernel);
    r.walk(body, visitor);
    r.finish()
}

impl Rewrite {
    /// An empty body, and the old one to walk.
    pub(crate) fn new(kernel: &Kernel) -> (Self, Block) {
        let mut kernel = kernel.clone();
        let body = std::mem::take(&mut kernel.body);
        let count = kernel.values.len();
        let r = Rewrite {
            renamed: (0..count as u32).map(Value).collect(),
            defs: vec![None; count],
            ranges: vec![Range::ANY; count],
            open: vec![Block::default()],
            source: SourceId::default(),
            kernel,
        };
        (r, body)
    }

    /// The kernel with the emitted body.
    pub(crate) fn finish(mut self) -> Kernel {
        self.kernel.body = self.open.pop().unwrap_or_default();
        self.kernel
    }

    /// Hands every instruction of an old block to the visitor.
    pub(crate) fn walk(&mut self, block: Block, visitor: &mut impl Visitor) {
        if let Some(open) = self.open.last_mut() {
            open.0.reserve(block.0.len());
        }
        for mut node in block.0 {
            self.source = node.source;
            node.inst.map_operands(|v| self.renamed(v));
            visitor.node(self, node);
        }
    }

    /// Emits an instruction as it is, its inner blocks through the visitor.
    pub(crate) fn keep(&mut self, mut node: Statement, visitor: &mut impl Visitor) {
        if let Inst::For { index, start, end, .. } = &node.inst {
            let range = Range::index(self.range(*start), self.range(*end));
            self.know(*index, range);
        }
        for inner in node.inst.blocks_mut() {
            *inner = self.inner(std::mem::take(inner), visitor);
        }
        self.source = node.source;
        self.push(node.inst, node.result);
    }

    /// An old inner block through the visitor.
    pub(crate) fn inner(&mut self, block: Block, visitor: &mut impl Visitor) -> Block {
        visitor.enter();
        let inner = self.block(|r| r.walk(block, visitor));
        visitor.leave();
        inner
    }

    /// The block that `f` emits.
    pub(crate) fn block(&mut self, f: impl FnOnce(&mut Self)) -> Block {
        self.open.push(Block::default());
        f(self);
        self.open.pop().unwrap_or_default()
    }

    /// The value that stands for an old one.
    pub(crate) fn renamed(&self, old: Value) -> Value {
        self.renamed.get(old.0 as usize).copied().unwrap_or(old)
    }

    /// Lets `new` stand for `old` from here on.
    pub(crate) fn rename(&mut self, old: Value, new: Value) {
        let at = old.0 as usize;
        while self.renamed.len() <= at {
            self.renamed.push(Value(self.renamed.len() as u32));
        }
        self.renamed[at] = new;
    }

    /// Emits an instruction.
    pub(crate) fn push(&mut self, inst: Inst, result: Option<Value>) {
        if let Some(value) = result {
            let at = value.0 as usize;
            if self.defs.len() <= at {
                self.defs.resize(at + 1, None);
            }
            self.defs[at] = Some(inst.clone());
            if self.kernel.ty(value) == Type::Scalar(Scalar::U32) {
                self.know(value, Range::of(&self.kernel, &inst, |v| self.range(v)));
            }
        }
        let node = Statement { inst, result, source: self.source };
        if let Some(block) = self.open.last_mut() {
            block.0.push(node);
        }
    }

    /// Emits an instruction with a new value.
    pub(crate) fn define(&mut self, inst: Inst, ty: impl Into<Type>) -> Value {
        let value = self.kernel.fresh(ty);
        self.push(inst, Some(value));
        value
    }

    /// A literal's value.
    pub(crate) fn literal(&mut self, literal: Literal) -> Value {
        self.define(Inst::Literal(literal), literal.scalar())
    }

    /// The instruction that defines an emitted value; nothing for a loop's index.
    pub(crate) fn def(&self, value: Value) -> Option<&Inst> {
        self.defs.get(value.0 as usize)?.as_ref()
    }

    /// How large an emitted `U32` value can be.
    pub(crate) fn range(&self, value: Value) -> Range {
        self.ranges.get(value.0 as usize).copied().unwrap_or(Range::ANY)
    }

    fn know(&mut self, value: Value, range: Range) {
        let at = value.0 as usize;
        if self.ranges.len() <= at {
            self.ranges.resize(at + 1, Range::ANY);
        }
        self.ranges[at] = range;
    }

    /// Where what is emitted next was written.
    pub(crate) fn from(&mut self, source: SourceId) {
        self.source = source;
    }

    /// The number an emitted value is known to be.
    pub(crate) fn known(&self, value: Value) -> Option<Literal> {
        match self.def(value) {
            Some(Inst::Literal(literal)) => Some(*literal),
            _ => None,
        }
    }

    /// The unsigned number an emitted value is known to be.
    pub(crate) fn known_u32(&self, value: Value) -> Option<u32> {
        match self.known(value) {
            Some(Literal::U32(n)) => Some(n),
            _ => None,
        }
    }

    /// Emits a copy of an old block with new values for all that it defines. Old values are renamed
    /// to the values of the latest copy, and renamed back by the next.
    pub(crate) fn copy(&mut self, block: &Block) {
        for node in &block.0 {
            self.copy_node(node);
        }
    }

    /// Emits a copy of one old instruction, its result a new value.
    pub(crate) fn copy_node(&mut self, node: &Statement) {
        self.source = node.source;
        let mut inst = match &node.inst {
            Inst::For { index, start, end, step, unroll, body } => {
                let fresh = self.kernel.fresh(self.kernel.ty(*index));
                self.rename(*index, fresh);
                let body = self.block(|r| r.copy(body));
                let (index, unroll) = (fresh, *unroll);
                Inst::For { index, start: *start, end: *end, step: *step, unroll, body }
            }
            Inst::If { cond, then, otherwise } => {
                let then = self.block(|r| r.copy(then));
                let otherwise = self.block(|r| r.copy(otherwise));
                Inst::If { cond: *cond, then, otherwise }
            }
            other => other.clone(),
        };
        inst.map_operands(|v| self.renamed(v));
        self.source = node.source;
        let result = node.result.map(|old| {
            let fresh = self.kernel.fresh(self.kernel.ty(old));
            self.rename(old, fresh);
            fresh
        });
        self.push(inst, result);
    }
}

/// The definition of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Def<'k> {
    /// An instruction.
    Inst(&'k Inst),
    /// A loop, whose index it is.
    Index {
        /// Its first value.
        start: Value,
        /// Added in each trip.
        step: Value,
    },
}

/// Questions about a kernel's values.
pub(crate) struct Facts<'k> {
    /// Which kernel.
    pub(crate) kernel: &'k Kernel,
    defs: Vec<Option<Def<'k>>>,
}

impl<'k> Facts<'k> {
    /// Reads the whole body once.
    pub(crate) fn new(kernel: &'k Kernel) -> Self {
        let mut defs = vec![None; kernel.values.len()];
        kernel.visit(&mut |node| {
            if let Some(value) = node.result {
                defs[value.0 as usize] = Some(Def::Inst(&node.inst));
            }
            if let Inst::For { index, start, step, .. } = &node.inst {
                defs[index.0 as usize] = Some(Def::Index { start: *start, step: *step });
            }
        });
        Facts { kernel, defs }
    }

    /// The instruction that defines a value; nothing for a loop's index.
    pub(crate) fn inst(&self, value: Value) -> Option<&'k Inst> {
        match self.defs.get(value.0 as usize)? {
            Some(Def::Inst(inst)) => Some(inst),
            _ => None,
        }
    }

    /// The definition of a value.
    pub(crate) fn def(&self, value: Value) -> Option<Def<'k>> {
        self.defs.get(value.0 as usize).copied().flatten()
    }

    /// Threads of a threadgroup.
    pub(crate) fn threads(&self) -> u32 {
        self.kernel.launch.threads
    }

    /// The unsigned number a value is known to be.
    pub(crate) fn u32(&self, value: Value) -> Option<u32> {
        match self.inst(value) {
            Some(Inst::Literal(Literal::U32(n))) => Some(*n),
            _ => None,
        }
    }

    /// The largest a `U32` value can be, if anything is known.
    pub(crate) fn largest(&self, value: Value) -> Option<u32> {
        let threads = self.kernel.launch.threads;
        match self.inst(value)? {
            Inst::Literal(Literal::U32(n)) => Some(*n),
            Inst::Builtin(Builtin::Thread) => threads.checked_sub(1),
            Inst::Builtin(Builtin::Lane) => Some(31),
            Inst::Builtin(Builtin::Simd) => (threads / 32).checked_sub(1),
            _ => None,
        }
    }

    /// Whether a loop runs at least once on every thread that reaches it.
    pub(crate) fn runs(&self, start: Value, end: Value) -> bool {
        matches!((self.largest(start), self.u32(end)), (Some(start), Some(end)) if start < end)
    }

    /// The exponent of a power of two known to divide a `U32` value, at most 16: from literals, the
    /// contract's divisibility of constants and arguments, and arithmetic. Wrapping keeps powers of
    /// two.
    pub(crate) fn twos(&self, value: Value) -> u32 {
        self.twos_within(value, 16)
    }

    fn twos_within(&self, value: Value, depth: u32) -> u32 {
        use crate::instr::BinaryOp::{Add, And, Max, Min, Mul, Or, Shl, Sub};
        if depth == 0 {
            return 0;
        }
        let of = |v: Value| self.twos_within(v, depth - 1);
        let found = match self.def(value) {
            Some(Def::Index { start, step }) => of(start).min(of(step)),
            Some(Def::Inst(inst)) => match inst {
                Inst::Literal(Literal::U32(n)) => n.trailing_zeros(),
                Inst::Constant(i) => self.promised(&self.kernel.constants[*i as usize].name),
                Inst::Argument(i) => self.promised(&self.kernel.params[*i as usize].name),
                Inst::Binary(Mul, a, b) => of(*a) + of(*b),
                Inst::Binary(Add | Sub | Min | Max | Or, a, b) => of(*a).min(of(*b)),
                Inst::Binary(And, a, b) => of(*a).max(of(*b)),
                Inst::Binary(Shl, a, b) => of(*a) + self.u32(*b).unwrap_or(0).min(31),
                Inst::Select { yes, no, .. } => of(*yes).min(of(*no)),
                _ => 0,
            },
            None => 0,
        };
        found.min(16)
    }

    /// The power of two that the contract promises to divide a name.
    fn promised(&self, name: &str) -> u32 {
        let rules = self.kernel.launch.requirements.iter();
        rules
            .filter_map(|rule| match rule {
                Requirement::Divisible(Extent::Name(n), by) if n == name => {
                    Some(by.trailing_zeros())
                }
                _ => None,
            })
            .max()
            .unwrap_or(0)
    }

    /// Bytes that the contract promises to divide an array's address.
    pub(crate) fn aligned(&self, place: Place) -> u32 {
        let Place::Buffer(i) = place else { return 16 };
        let name = &self.kernel.params[i as usize].name;
        let rules = self.kernel.launch.requirements.iter();
        let promised = rules.filter_map(|rule| match rule {
            Requirement::Aligned(n, bytes) if n == name => {
                Some(1 << bytes.trailing_zeros().min(16))
            }
            _ => None,
        });
        let own = self.kernel.element(place).scalar().bytes() as u32;
        promised.max().unwrap_or(own).max(own)
    }
}

/// Whether an instruction's result depends on its operands alone: it may be repeated, moved and
/// removed.
pub(crate) fn is_pure(inst: &Inst) -> bool {
    !inst.has_effect() && inst.reads().next().is_none()
}

/// Whether an instruction without a used result may go: it changes nothing that another instruction
/// sees. Exchanges between lanes and tile instructions are among them, as they go for all lanes at
/// once.
pub(crate) fn is_removable(inst: &Inst) -> bool {
    !inst.has_effect()
        || matches!(
            inst,
            Inst::Simd(..)
                | Inst::TileLoad { .. }
                | Inst::TileOf(..)
                | Inst::Mma { .. }
                | Inst::RowReduce(..)
        )
}

/// Whether a pure instruction may run where the original would not have: it is defined for all
/// operands that it can meet. Divisions and shifts of integers need a number on the right.
pub(crate) fn is_safe(inst: &Inst, facts: &Facts<'_>) -> bool {
    use crate::instr::BinaryOp::{Div, Rem, Shl, Shr};
    let known = |v: Value| match facts.inst(v) {
        Some(Inst::Literal(literal)) => Some(*literal),
        _ => None,
    };
    match inst {
        Inst::Binary(Div, a, _) if facts.kernel.ty(*a).scalar() == Scalar::F32 => true,
        Inst::Binary(Div | Rem, _, b) => match known(*b) {
            Some(Literal::U32(n)) => n != 0,
            Some(Literal::I32(n)) => n != 0 && n != -1,
            _ => false,
        },
        Inst::Binary(Shl | Shr, _, b) => known(*b).is_some_and(|n| n.bits() < 32),
        _ => true,
    }
}

/// Instructions in a block and the blocks inside it.
pub(crate) fn size(block: &Block) -> usize {
    let inner = |node: &Statement| node.inst.blocks().into_iter().map(size).sum::<usize>();
    block.0.iter().map(|node| 1 + inner(node)).sum()
}

/// Calls `f` on an instruction and all inside it.
pub(crate) fn each<'k>(node: &'k Statement, f: &mut impl FnMut(&'k Statement)) {
    f(node);
    for block in node.inst.blocks() {
        block.0.iter().for_each(|inner| each(inner, f));
    }
}

/// All values that an instruction and those inside it define, the indices of loops too.
pub(crate) fn defined(node: &Statement) -> HashSet<Value> {
    let mut found = HashSet::new();
    each(node, &mut |node| {
        found.extend(node.result);
        if let Inst::For { index, .. } = &node.inst {
            found.insert(*index);
        }
    });
    found
}

/// Everything that a set of instructions does to memory, inner blocks included.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Arrays read; an atomic reads what it changes.
    pub(crate) reads: BTreeSet<Place>,
    /// Arrays written.
    pub(crate) writes: BTreeSet<Place>,
    /// Whether anything waits for others, or orders memory.
    pub(crate) waits: bool,
    /// Whether anything is done by a simdgroup or threadgroup together, or is atomic, or concerns
    /// asynchronous copies.
    pub(crate) together: bool,
}

impl Effects {
    /// The effects of one instruction.
    pub(crate) fn of(node: &Statement) -> Self {
        let mut found = Effects::default();
        found.add(node);
        found
    }

    /// The effects of a block.
    pub(crate) fn of_block(block: &Block) -> Self {
        let mut found = Effects::default();
        block.0.iter().for_each(|node| found.add(node));
        found
    }

    /// Adds the effects of one instruction.
    pub(crate) fn add(&mut self, node: &Statement) {
        each(node, &mut |node| {
            self.reads.extend(node.inst.reads());
            self.writes.extend(node.inst.writes());
            match &node.inst {
                Inst::Barrier
                | Inst::SimdBarrier
                | Inst::Fence
                | Inst::CopyWait(_)
                | Inst::WgmmaFence
                | Inst::WgmmaWait(_)
                | Inst::AsyncFence
                | Inst::GridTrigger
                | Inst::GridWait => {
                    self.waits = true;
                    self.together = true;
                }
                Inst::Atomic { place, .. } => {
                    self.reads.insert(*place);
                    self.together = true;
                }
                Inst::CopyAsync { .. } | Inst::CopyCommit => self.together = true,
                Inst::For { .. } | Inst::If { .. } | Inst::Store { .. } => {}
                other if other.has_effect() => self.together = true,
                _ => {}
            }
        });
    }

    /// Whether an array is read or written.
    pub(crate) fn touches(&self, place: &Place) -> bool {
        self.reads.contains(place) || self.writes.contains(place)
    }

    /// Whether an array is written.
    pub(crate) fn writes(&self, place: Place) -> bool {
        self.writes.contains(&place)
    }
}
