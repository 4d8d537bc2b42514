//! Vectorize: a strided loop, in which each thread takes every `threads`-th element, becomes one in
//! which it takes runs of up to 8 neighbours: `for i in thread.. step threads` turns into
//! `for i in thread * v.. step threads * v`, its body written out for each of the `v` elements in
//! order, loads at `i` or `base + i` becoming vector loads before them, and stores there vector
//! stores after them. An access moves at most 16 bytes; the narrowest element decides `v`.
//!
//! Conditions: the loop's end and every `base` are divisible by the vector (literals, or
//! the contract's `Divisible` on a constant or argument), and the buffer is aligned to it (the
//! contract's `Aligned`). Where the end is a number, every thread gets at least one run, so that
//! none is idle.
//!
//! Elements change threads, so sums are ordered differently, and nothing may depend on which thread
//! has which element:
//! - an array that the loop writes is accessed by it only at the trip's own element, and what
//!   touches that array before the next barrier is a loop over the same bounds that is vectorized
//!   with it, at the same element;
//! - a register that the loop changes is either carried from trip to trip (read before it is
//!   written) or used by the loop alone.
//!
//! Limits: loops that wait, exchange values between lanes or use atomics are left alone, and so are
//! neighbouring accesses outside loops.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::rewrite::{Effects, Facts, Rewrite, Visitor, defined, each, rewrite, size};
use crate::instr::BinaryOp;
use crate::ir::{Block, Builtin, Inst, Kernel, Literal, LoadHint, Place, Statement, Value};
use crate::types::{Scalar, Type};

/// The most bytes of an access.
const BYTES: usize = 16;
/// The most instructions that a loop's body may become.
const BUDGET: usize = 2048;

/// The kernel with wide accesses.
pub(super) fn vectorize(kernel: &Kernel) -> Kernel {
    let facts = Facts::new(kernel);
    let mut plans = HashMap::new();
    plan_block(&facts, &kernel.body, true, &mut plans);
    if plans.is_empty() {
        return kernel.clone();
    }
    rewrite(kernel, &mut Widen { plans })
}

/// How a loop is widened.
struct Plan {
    /// Elements of a run.
    lanes: u8,
    /// The accesses that become vectors, by their position in the body.
    wide: HashMap<usize, Access>,
}

/// Loads or a store of a run.
struct Access {
    place: Place,
    /// The terms added to the loop's index.
    terms: Vec<Value>,
    /// Elements that one access moves.
    chunk: u8,
}

/// A loop that may be widened, before its neighbours are looked at.
struct Candidate<'k> {
    node: &'k Statement,
    shape: Loop<'k>,
    /// The widest run.
    lanes: u8,
}

/// The parts of a strided loop.
#[derive(Clone, Copy)]
struct Loop<'k> {
    index: Value,
    start: Value,
    end: Value,
    /// Threads that share it.
    team: u32,
    body: &'k Block,
}

impl<'k> Loop<'k> {
    /// A loop over this thread's share of `0..end`, among the threads of a threadgroup or of a
    /// simdgroup.
    fn of(facts: &Facts<'_>, node: &'k Statement) -> Option<Self> {
        let Inst::For { index, start, end, step, body, .. } = &node.inst else { return None };
        let team = match facts.inst(*start)? {
            Inst::Builtin(Builtin::Thread) => facts.threads(),
            Inst::Builtin(Builtin::Lane) => 32,
            _ => return None,
        };
        let (index, start, end) = (*index, *start, *end);
        (facts.u32(*step) == Some(team)).then_some(Loop { index, start, end, team, body })
    }
}

/// Decides about the loops of a block and of those inside it; the plans are by loop index.
fn plan_block(facts: &Facts<'_>, block: &Block, outermost: bool, plans: &mut HashMap<Value, Plan>) {
    for node in &block.0 {
        for inner in node.inst.blocks() {
            plan_block(facts, inner, false, plans);
        }
    }
    let segments: Vec<&[Statement]> =
        block.0.split(|node| matches!(node.inst, Inst::Barrier)).collect();
    let last = segments.len().saturating_sub(1);
    for (at, segment) in segments.into_iter().enumerate() {
        let mut found: Vec<Candidate<'_>> =
            segment.iter().filter_map(|node| candidate(facts, node)).collect();
        // What surrounds an inner block is beyond its first and last barrier.
        if !outermost && (at == 0 || at == last) {
            found.retain(|c| alone(facts.kernel, c.node));
        }
        agree(facts, segment, &mut found);
        for c in found {
            plans.insert(c.shape.index, plan(facts, c.shape, c.lanes));
        }
    }
}

/// Whether no instruction outside a loop touches what it writes, or writes what it touches.
fn alone(kernel: &Kernel, node: &Statement) -> bool {
    let own = memory(Effects::of(node));
    let mut others = Effects::default();
    fn collect(block: &Block, skip: &Statement, others: &mut Effects) {
        for node in &block.0 {
            if std::ptr::eq(node, skip) {
                continue;
            }
            if node.inst.blocks().is_empty() {
                others.add(node);
            }
            node.inst.blocks().into_iter().for_each(|inner| collect(inner, skip, others));
        }
    }
    collect(&kernel.body, node, &mut others);
    conflicts(&own, &others).next().is_none()
}

/// Without what is a thread's own.
fn memory(mut effects: Effects) -> Effects {
    effects.reads.retain(|place| !matches!(place, Place::Register(_)));
    effects.writes.retain(|place| !matches!(place, Place::Register(_)));
    effects
}

/// The arrays that one writes and the other touches.
fn conflicts<'a>(one: &'a Effects, other: &'a Effects) -> impl Iterator<Item = Place> + 'a {
    let touched = one.writes.union(&other.writes).copied();
    touched.filter(|place| one.touches(place) && other.touches(place))
}

/// Drops candidates that conflict with what is not widened alike, until all that are left agree.
fn agree(facts: &Facts<'_>, segment: &[Statement], found: &mut Vec<Candidate<'_>>) {
    loop {
        let mut lanes: Vec<u8> = found.iter().map(|c| c.lanes).collect();
        for (at, c) in found.iter().enumerate() {
            let own = memory(Effects::of(c.node));
            for node in segment.iter().filter(|node| !std::ptr::eq(*node, c.node)) {
                let other = memory(Effects::of(node));
                for place in conflicts(&own, &other) {
                    let partner = found.iter().find(|p| std::ptr::eq(p.node, node));
                    lanes[at] = match partner {
                        Some(p) if alike(facts, c, p, place) => lanes[at].min(p.lanes),
                        _ => 0,
                    };
                }
            }
        }
        let settled = found.iter().zip(&lanes).all(|(c, lanes)| c.lanes == *lanes);
        found.iter_mut().zip(lanes).for_each(|(c, lanes)| c.lanes = lanes);
        found.retain(|c| c.lanes > 1);
        if settled {
            return;
        }
    }
}

/// Whether two loops over the same bounds access an array at the same element only.
fn alike(facts: &Facts<'_>, one: &Candidate<'_>, other: &Candidate<'_>, place: Place) -> bool {
    let bounds = |c: &Candidate<'_>| (c.shape.start, c.shape.end, c.shape.team);
    let (a, b) = (own_access(facts, one, place), own_access(facts, other, place));
    bounds(one) == bounds(other) && a.is_some() && a == b
}

/// The terms added to the index in all of a loop's accesses to an array, if they are the same in
/// all.
fn own_access(facts: &Facts<'_>, c: &Candidate<'_>, place: Place) -> Option<Vec<Value>> {
    let inside = defined(c.node);
    let mut found: Option<Vec<Value>> = None;
    for index in indices(c.node, place) {
        let own = facts.own(index, c.shape.index, &inside)?;
        if found.get_or_insert_with(|| own.clone()) != &own {
            return None;
        }
    }
    found
}

/// The indices of all accesses to an array inside a loop.
fn indices(node: &Statement, place: Place) -> Vec<Value> {
    let mut found = Vec::new();
    each(node, &mut |node| match &node.inst {
        Inst::Load { place: p, index, .. } | Inst::Store { place: p, index, .. } if *p == place => {
            found.push(*index);
        }
        _ => {}
    });
    found
}

/// Looks at a loop by itself.
fn candidate<'k>(facts: &Facts<'_>, node: &'k Statement) -> Option<Candidate<'k>> {
    let shape = Loop::of(facts, node)?;
    let effects = Effects::of(node);
    if effects.together || effects.waits || !registers_may(facts, node, &effects) {
        return None;
    }
    for lanes in [8, 4, 2] {
        let run = shape.team.checked_mul(lanes.into())?;
        let idle = facts.u32(shape.end).is_some_and(|end| end < run);
        let whole = facts.twos(shape.end) >= u32::from(lanes).trailing_zeros();
        if idle || !whole || size(shape.body) * usize::from(lanes) > BUDGET {
            continue;
        }
        let c = Candidate { node, shape, lanes };
        let own = effects.writes.iter().filter(|p| !matches!(p, Place::Register(_)));
        if own.into_iter().any(|place| own_access(facts, &c, *place).is_none()) {
            return None;
        }
        let plan = plan(facts, shape, lanes);
        let buffers = plan.wide.values().map(|a| a.place).filter(|p| matches!(p, Place::Buffer(_)));
        let narrowest = buffers.map(|place| facts.kernel.element(place).scalar().bytes()).min();
        if narrowest.is_some_and(|bytes| bytes * usize::from(lanes) <= BYTES) {
            return Some(c);
        }
    }
    None
}

/// Whether the registers that a loop changes leave it free to share out its elements otherwise.
fn registers_may(facts: &Facts<'_>, node: &Statement, effects: &Effects) -> bool {
    let registers = effects.writes.iter().filter(|p| matches!(p, Place::Register(_)));
    for place in registers {
        // The first access to each register inside the loop: whether it writes.
        let mut first: HashMap<u32, bool> = HashMap::new();
        let mut numbers = true;
        let mut inside = 0;
        each(node, &mut |node| {
            let (index, writes) = match &node.inst {
                Inst::Load { place: p, index, .. } if p == place => (*index, false),
                Inst::Store { place: p, index, .. } if p == place => (*index, true),
                _ => return,
            };
            inside += 1;
            match facts.u32(index) {
                Some(index) => {
                    first.entry(index).or_insert(writes);
                }
                None => numbers = false,
            }
        });
        let mut all = 0;
        facts.kernel.visit(&mut |node| {
            let named = node.inst.reads().chain(node.inst.writes()).any(|named| named == *place);
            all += u32::from(named);
        });
        let carried = first.values().all(|writes| !writes);
        if !numbers || (!carried && all > inside) {
            return false;
        }
    }
    true
}

/// The accesses of a loop's body that become vectors when a run has `lanes` elements.
fn plan(facts: &Facts<'_>, shape: Loop<'_>, lanes: u8) -> Plan {
    let inside: HashSet<Value> =
        shape.body.0.iter().flat_map(defined).chain([shape.index]).collect();
    // A vector load comes before the run and a vector store after it: so an array is stored to
    // once, not inside a branch or an inner loop, and not read after that.
    let mut narrow: BTreeSet<Place> = BTreeSet::new();
    let mut stored: BTreeSet<Place> = BTreeSet::new();
    for node in &shape.body.0 {
        let effects = Effects::of(node);
        narrow.extend(effects.reads.intersection(&stored));
        let inner = !node.inst.blocks().is_empty();
        for place in effects.writes {
            if !stored.insert(place) || inner {
                narrow.insert(place);
            }
        }
    }
    let mut wide = HashMap::new();
    for (at, node) in shape.body.0.iter().enumerate() {
        let (place, index) = match &node.inst {
            Inst::Load { place, index, lanes: 1, .. } => (*place, *index),
            Inst::Store { place, index, value }
                if matches!(facts.kernel.ty(*value), Type::Scalar(_)) =>
            {
                (*place, *index)
            }
            _ => continue,
        };
        if matches!(place, Place::Register(_)) || narrow.contains(&place) {
            continue;
        }
        let bytes = facts.kernel.element(place).scalar().bytes();
        let chunk = usize::from(lanes).min(BYTES / bytes) as u8;
        let aligned = facts.aligned(place) as usize >= usize::from(chunk) * bytes;
        let Some(terms) = facts.own(index, shape.index, &inside).filter(|_| aligned) else {
            continue;
        };
        if terms.iter().all(|v| facts.twos(*v) >= u32::from(chunk).trailing_zeros()) {
            wide.insert(at, Access { place, terms, chunk });
        }
    }
    Plan { lanes, wide }
}

struct Widen {
    /// By the loop's index.
    plans: HashMap<Value, Plan>,
}

impl Visitor for Widen {
    fn node(&mut self, r: &mut Rewrite, node: Statement) {
        if let Inst::For { index, start, end, step, unroll, body } = &node.inst
            && let Some(team) = r.known_u32(*step)
            && let Some(plan) = self.plans.remove(index)
        {
            let lanes = r.literal(Literal::U32(plan.lanes.into()));
            let start = r.define(Inst::Binary(BinaryOp::Mul, *start, lanes), Scalar::U32);
            let step = r.literal(Literal::U32(team * u32::from(plan.lanes)));
            let body = r.block(|r| run(r, &plan, *index, body));
            let (index, end, unroll) = (*index, *end, *unroll);
            return r.push(Inst::For { index, start, end, step, unroll, body }, None);
        }
        r.keep(node, self);
    }
}

/// The body for one run: vector loads, the elements in order, vector stores.
fn run(r: &mut Rewrite, plan: &Plan, index: Value, body: &Block) {
    let mut loaded: HashMap<usize, Vec<Value>> = HashMap::new();
    for (at, node) in body.0.iter().enumerate() {
        if let (Inst::Load { hint, .. }, Some(access)) = (&node.inst, plan.wide.get(&at)) {
            r.from(node.source);
            loaded.insert(at, load(r, plan, index, access, *hint));
        }
    }
    let mut stored: HashMap<usize, Vec<Value>> = HashMap::new();
    for lane in 0..plan.lanes {
        let element = plus(r, index, lane);
        r.rename(index, element);
        for (at, node) in body.0.iter().enumerate() {
            if let (Some(values), Some(result)) = (loaded.get(&at), node.result) {
                r.rename(result, values[usize::from(lane)]);
            } else if let (Inst::Store { value, .. }, true) =
                (&node.inst, plan.wide.contains_key(&at))
            {
                stored.entry(at).or_default().push(r.renamed(*value));
            } else {
                r.copy_node(node);
            }
        }
        r.rename(index, index);
    }
    for at in 0..body.0.len() {
        if let (Some(values), Some(access)) = (stored.get(&at), plan.wide.get(&at)) {
            r.from(body.0[at].source);
            store(r, index, access, values);
        }
    }
}

/// The elements of a run, from vector loads.
fn load(r: &mut Rewrite, plan: &Plan, index: Value, access: &Access, hint: LoadHint) -> Vec<Value> {
    let (place, lanes) = (access.place, access.chunk);
    let scalar = r.kernel.element(place).scalar();
    let mut values = Vec::with_capacity(plan.lanes.into());
    for first in (0..plan.lanes).step_by(lanes.into()) {
        let index = at(r, index, access, first);
        let ty = Type::Vector(scalar, lanes);
        let vector = r.define(Inst::Load { place, index, lanes, hint }, ty);
        values.extend((0..lanes).map(|i| r.define(Inst::Extract(vector, i), scalar)));
    }
    values
}

/// Vector stores of a run's elements.
fn store(r: &mut Rewrite, index: Value, access: &Access, values: &[Value]) {
    let place = access.place;
    let scalar = r.kernel.element(place).scalar();
    for (k, chunk) in values.chunks(access.chunk.into()).enumerate() {
        let index = at(r, index, access, k as u8 * access.chunk);
        let value = r.define(Inst::Pack(chunk.to_vec()), Type::Vector(scalar, access.chunk));
        r.push(Inst::Store { place, index, value }, None);
    }
}

/// The index of element `first` of a run. What is fixed is summed first, so that it leaves the
/// loop.
fn at(r: &mut Rewrite, index: Value, access: &Access, first: u8) -> Value {
    let terms: Vec<Value> = access.terms.iter().map(|term| r.renamed(*term)).collect();
    let sum = |r: &mut Rewrite, a, b| r.define(Inst::Binary(BinaryOp::Add, a, b), Scalar::U32);
    let fixed = terms.into_iter().reduce(|a, b| sum(r, a, b));
    let start = fixed.map_or(index, |fixed| sum(r, fixed, index));
    plus(r, start, first)
}

fn plus(r: &mut Rewrite, value: Value, n: u8) -> Value {
    if n == 0 {
        return value;
    }
    let n = r.literal(Literal::U32(n.into()));
    r.define(Inst::Binary(BinaryOp::Add, value, n), Scalar::U32)
}
