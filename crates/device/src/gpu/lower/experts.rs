//! Lowering of mixtures of experts. With few tokens, the pairs of a token and an expert are
//! computed one by one; with many, sorted by expert. In either form a pair's bits do not depend on
//! the other pairs. If the step's kind alone decides the form, as in a lowering for many sequences,
//! neither does a row's.
//!
//! Two lowerings implement [`Mixtures`]: the one of steps, here, and the one of training, which
//! sorts all pairs.

use std::ops::Range;

use formats::{Error, Result};
use ops::experts::{Gate, Odds, Routing, Sizes};
use ops::gated::gated;
use ops::gradient::ExpertFactors;
use ops::linear::gemm::{self, GemmTypes, Machine};
use ops::linear::{GemvSchedule, Task};
use ops::moe::{
    DownParts, bounded_gate, clamped_gate, moe_bias, moe_combine, moe_down, moe_factors,
    moe_gate_up, moe_gemm, moe_gemv, moe_group, moe_route, moe_router, pick_blocks, pick_down,
    pick_router,
};
use ops::packed::Format;
use ops::scale_rows::scale_rows;
use ops::{Experts, Op};
use program::{Node, Program, ValueId, WeightId};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::{Recorder, Slot, TypedSlot};
use crate::gpu::Facts;
use crate::gpu::arena::MIXTURE;

/// The scratch arrays of a mixture; their lengths are [`mixture`](crate::gpu::arena::mixture)'s.
#[derive(Debug, Clone, Copy)]
pub(in crate::gpu) enum Array {
    /// The expert of each pair, and its share.
    Ids,
    Shares,
    /// The first pair of each expert, the pairs' order, and blocks of pairs.
    Offsets,
    Order,
    Blocks,
    /// The two halves of each pair, and what the gate makes of them: `[pairs, ff]`.
    Gate,
    Up,
    Act,
    /// Results of the experts: `[pairs, width]`.
    Outer,
}

/// A mixture and its operands.
pub(in crate::gpu) struct Mixture<'a> {
    pub(in crate::gpu) op: &'a Experts,
    pub(in crate::gpu) sizes: Sizes,
    /// Tokens.
    pub(in crate::gpu) rows: usize,
    pub(in crate::gpu) x: TypedSlot,
    pub(in crate::gpu) scores: TypedSlot,
    /// Gate, up and down, then their biases if there are any, then factors likewise.
    pub(in crate::gpu) weights: &'a [WeightId],
    /// Where the rows that the second matrices read are kept, `[pairs, ff]` in f32, if something
    /// else reads them.
    pub(in crate::gpu) inner: Option<Slot>,
    /// Rows that are added to the experts' sums, of the results' type.
    pub(in crate::gpu) residual: Option<Slot>,
    /// In training, the low-rank factors beside the matrices.
    pub(in crate::gpu) factors: Option<(&'a ExpertFactors, &'a [WeightId])>,
}

/// A product of experts: from rows `x`, each read by `share` pairs, to f32 rows `y`, one for each
/// pair.
pub(in crate::gpu) struct Product {
    pub(in crate::gpu) x: TypedSlot,
    pub(in crate::gpu) y: Slot,
    pub(in crate::gpu) weight: WeightId,
    pub(in crate::gpu) bias: Option<WeightId>,
    /// Columns and rows of each expert's matrix.
    pub(in crate::gpu) width: usize,
    pub(in crate::gpu) out: usize,
    pub(in crate::gpu) share: usize,
}

impl Product {
    /// The numbers of a launch.
    pub(in crate::gpu) fn numbers(&self, sizes: Sizes, pairs: usize) -> Numbers {
        Numbers::new()
            .with("pairs", pairs as u32)
            .with("width", self.width as u32)
            .with("out", self.out as u32)
            .with("experts", sizes.experts as u32)
            .with("share", self.share as u32)
    }
}

/// The sizes of a node that is a mixture.
///
/// # Errors
/// Operands of another node.
pub(in crate::gpu) fn sizes(program: &Program, node: &Node) -> Result<Sizes> {
    program.mixture(node).ok_or_else(|| Error::new("experts", "a mixture", "other operands"))
}

impl Mixture<'_> {
    /// The number of pairs of a token and an expert.
    pub(in crate::gpu) fn pairs(&self) -> usize {
        self.rows * self.sizes.used
    }
}

/// Records launches of mixtures of experts.
pub(in crate::gpu) trait Mixtures {
    /// Records a launch.
    fn push(&mut self, kernel: Recipe, numbers: Numbers, bound: &[(&str, Slot)]) -> Result<()>;

    /// The scratch arrays, in bytes of the arena.
    fn scratch(&self) -> &[Range<usize>; MIXTURE];

    /// The format of a matrix.
    fn format(&self, weight: WeightId) -> Result<Format>;

    /// The device.
    fn facts(&self) -> Facts;

    /// The type that operands of sorted pairs are rounded to.
    fn operand(&self) -> Scalar;

    /// Whether warpgroups, which sum in an order of their own, may multiply.
    fn warpgroups(&self) -> bool;

    /// Records a product pair by pair, with its bias, if that suits `pairs` pairs.
    fn pair_by_pair(&mut self, product: &Product, sizes: Sizes, pairs: usize) -> Result<bool>;

    /// The first `words` words of a scratch array.
    fn array(&self, array: Array, words: usize) -> Slot {
        let start = self.scratch()[array as usize].start;
        Slot::Arena(start..start + 4 * words)
    }

    /// The properties from which the schedule of a product is picked.
    fn machine(&self) -> Machine {
        let machine = self.facts().machine();
        Machine { wgmma: machine.wgmma && self.warpgroups(), ..machine }
    }

    /// Records both halves of each pair and their gate, from rows `x` to `act`, pair by pair, if
    /// that suits them.
    fn gated_pairs(&mut self, _: &Mixture<'_>, _x: &TypedSlot, _act: &Slot) -> Result<bool> {
        Ok(false)
    }

    /// Records the second products of a token's experts and their sum, from rows `x` of the pairs
    /// to `y`, if that suits as few tokens as there are. `early`: the halves of each pair are
    /// [`Mixtures::gated_pairs`].
    fn summed(&mut self, _: &Mixture<'_>, _x: &Slot, _y: &TypedSlot, _early: bool) -> Result<bool> {
        Ok(false)
    }

    /// Records what adapters change of products of experts, of gates and ups (`half` 0) or of downs
    /// (1): from rows `x` of the pairs, or of the tokens, to `ys`.
    fn changed(
        &mut self,
        _: &Mixture<'_>,
        _half: usize,
        _x: &TypedSlot,
        _ys: &[Slot],
    ) -> Result<()> {
        Ok(())
    }

    /// Records the choice of experts and their shares; see [`Array::Ids`].
    fn route(&mut self, of: &Mixture<'_>, routing: Routing) -> Result<()> {
        let (Sizes { experts, used, .. }, pairs) = (of.sizes, of.pairs());
        let numbers = Numbers::new()
            .with("tokens", of.rows as u32)
            .with("experts", experts as u32)
            .with("top_k", used as u32);
        let bound = [
            ("logits", of.scores.slot.clone()),
            ("ids", self.array(Array::Ids, pairs)),
            ("weights", self.array(Array::Shares, pairs)),
        ];
        let kernel = moe_route(of.scores.scalar, experts.div_ceil(32) as u32, routing);
        self.push(kernel, numbers, &bound)
    }

    /// Records the products of shares with their experts' factors, if experts have some.
    fn factored(&mut self, of: &Mixture<'_>) -> Result<()> {
        let Some(factors) = Experts::factors(of.weights) else { return Ok(()) };
        let pairs = of.pairs();
        let numbers =
            Numbers::new().with("pairs", pairs as u32).with("experts", of.sizes.experts as u32);
        let bound = [
            ("ids", self.array(Array::Ids, pairs)),
            ("factors", Slot::Weight(factors.0)),
            ("weights", self.array(Array::Shares, pairs)),
        ];
        self.push(moe_factors(), numbers, &bound)
    }

    /// The type of the rows that the second matrices read: that of operands where sorted pairs are
    /// rounded to it anyway, so that products copy them as they are.
    fn inner_type(&self, _: &Mixture<'_>) -> Scalar {
        Scalar::F32
    }

    /// Records the rounding of rows `x` of the tokens to the type of operands, likewise.
    fn rounded_rows(&mut self, _: &Mixture<'_>, x: &TypedSlot) -> Result<TypedSlot> {
        Ok(x.clone())
    }

    /// Records the two halves of each pair, from rows `x`; see [`Array::Gate`]. Gives the rows of a
    /// block that pairs are sorted for.
    fn halves(&mut self, of: &Mixture<'_>, x: &TypedSlot) -> Result<Option<u32>> {
        let (Sizes { used, width, ff, .. }, pairs) = (of.sizes, of.pairs());
        let mut sorted = None;
        for (i, to) in [(0, Array::Gate), (1, Array::Up)] {
            let (x, y, bias) =
                (x.clone(), self.array(to, pairs * ff), Experts::bias(of.weights, i).copied());
            let weight = of.weights[i];
            let product = Product { x, y, weight, bias, width, out: ff, share: used };
            self.of_experts(&product, of.sizes, pairs, &mut sorted)?;
        }
        Ok(sorted)
    }

    /// Records the rows that experts read where weights multiply these: each row has one expert,
    /// and its own weight. They are kept in the buffer of the outputs until they are read.
    fn weighed(&mut self, of: &Mixture<'_>) -> Result<TypedSlot> {
        let (width, pairs, x) = (of.sizes.width, of.pairs(), of.x.clone());
        let weighed = self.array(Array::Outer, pairs * width);
        let sizes = Numbers::new().with("rows", of.rows as u32).with("width", width as u32);
        let shares = self.array(Array::Shares, pairs);
        let bound = [("x", x.slot), ("s", shares), ("y", weighed.clone())];
        self.push(scale_rows(x.scalar, Scalar::F32), sizes, &bound)?;
        Ok(TypedSlot { slot: weighed, scalar: x.scalar })
    }

    /// Records the gate of `n` elements of both halves, to a third array.
    fn gated(&mut self, of: Gate, [gate, up]: [&Slot; 2], y: &TypedSlot, n: usize) -> Result<()> {
        let numbers = Numbers::new().with("n", n as u32);
        let bound = [("gate", gate.clone()), ("up", up.clone()), ("y", y.slot.clone())];
        match of {
            Gate::Plain(f) => self.push(gated([Scalar::F32, y.scalar], f), numbers, &bound),
            Gate::Clamped { limit, alpha } => {
                let numbers = numbers.with_f32("limit", limit).with_f32("alpha", alpha);
                self.push(clamped_gate(y.scalar), numbers, &bound)
            }
            Gate::Bounded { limit } => {
                self.push(bounded_gate(y.scalar), numbers.with_f32("limit", limit), &bound)
            }
        }
    }

    /// Records a mixture, to `y`.
    fn experts(&mut self, of: &Mixture<'_>, y: TypedSlot) -> Result<()> {
        let (op, sizes, pairs) = (of.op, of.sizes, of.pairs());
        let Sizes { width, ff, .. } = sizes;
        self.route(of, op.routing)?;
        self.factored(of)?;
        let mut x = of.x.clone();
        if op.weighs_inputs {
            x = self.weighed(of)?;
            // The softmax over a single expert is 1, so its output is added unscaled.
            let added = Routing { odds: Odds::Softmax, normalised: true, scale: 1.0, ..op.routing };
            self.route(of, added)?;
        }
        let inner = [Array::Gate, Array::Up, Array::Act].map(|a| self.array(a, pairs * ff));
        let [gate, up, act] = inner;
        let act = of.inner.clone().unwrap_or(act);
        let early = self.gated_pairs(of, &x, &act)?;
        let (mut sorted, mut inner) = (None, Scalar::F32);
        if !early {
            let rounded = self.rounded_rows(of, &x)?;
            sorted = self.halves(of, &rounded)?;
            self.changed(of, 0, &x, &[gate.clone(), up.clone()])?;
            inner = self.inner_type(of);
            let y = TypedSlot { slot: act.clone(), scalar: inner };
            self.gated(op.gate, [&gate, &up], &y, pairs * ff)?;
        }
        if self.summed(of, &act, &y, early)? {
            return Ok(());
        }
        let x = TypedSlot { slot: act, scalar: inner };
        let (weight, bias) = (of.weights[2], Experts::bias(of.weights, 2).copied());
        let outer = self.array(Array::Outer, pairs * width);
        let rows = x.clone();
        let product =
            Product { x, y: outer.clone(), weight, bias, width: ff, out: width, share: 1 };
        self.of_experts(&product, sizes, pairs, &mut sorted)?;
        self.changed(of, 1, &rows, std::slice::from_ref(&outer))?;
        self.combine(of, outer, y)
    }

    /// Records the sums of each token's pairs, `outer`, by their shares.
    fn combine(&mut self, of: &Mixture<'_>, outer: Slot, y: TypedSlot) -> Result<()> {
        let Sizes { used, width, .. } = of.sizes;
        let kernel = moe_combine(Scalar::F32, y.scalar, used as u32, of.residual.is_some());
        let numbers = Numbers::new().with("tokens", of.rows as u32).with("width", width as u32);
        let shares = self.array(Array::Shares, of.pairs());
        let mut bound = vec![("y", outer), ("weights", shares), ("out", y.slot)];
        bound.extend(of.residual.clone().map(|residual| ("residual", residual)));
        self.push(kernel, numbers, &bound)
    }

    /// Records the order of pairs by expert, and the table of their blocks for a schedule, unless
    /// they are `sorted` for blocks of as many rows.
    fn group(
        &mut self,
        sizes: Sizes,
        pairs: usize,
        schedule: gemm::GemmSchedule,
        sorted: &mut Option<u32>,
    ) -> Result<[(&'static str, Slot); 3]> {
        let (experts, rows) = (sizes.experts as u32, schedule.bm);
        let tiles = pairs.div_ceil(rows as usize) + sizes.experts;
        let arrays = [
            ("order", self.array(Array::Order, pairs)),
            ("offsets", self.array(Array::Offsets, sizes.experts + 1)),
            ("blocks", self.array(Array::Blocks, 2 * tiles)),
        ];
        if sorted.replace(rows) == Some(rows) {
            return Ok(arrays);
        }
        let numbers = Numbers::new()
            .with("pairs", pairs as u32)
            .with("experts", experts)
            .with("block_rows", rows);
        let [order, offsets, blocks] = arrays.clone();
        let bound = [("ids", self.array(Array::Ids, pairs)), offsets, order, blocks];
        self.push(moe_group(experts.next_multiple_of(64)), numbers, &bound)?;
        Ok(arrays)
    }

    /// Records a product; see [`Mixtures::group`] for `sorted`.
    fn of_experts(
        &mut self,
        product: &Product,
        sizes: Sizes,
        pairs: usize,
        sorted: &mut Option<u32>,
    ) -> Result<()> {
        if self.pair_by_pair(product, sizes, pairs)? {
            return Ok(());
        }
        let (experts, columns) = (sizes.experts as u32, product.out as u32);
        let (format, operand) = (self.format(product.weight)?, self.operand());
        let schedule =
            pick_blocks((pairs as u32, experts, columns), operand, format, self.machine());
        let mut bound = vec![
            ("x", product.x.slot.clone()),
            ("y", product.y.clone()),
            ("weight", Slot::Weight(product.weight.0)),
        ];
        bound.extend(self.group(sizes, pairs, schedule, sorted)?);
        let types = GemmTypes { x: product.x.scalar, operand, y: Scalar::F32 };
        let kernel = moe_gemm(types, format, schedule);
        self.push(kernel, product.numbers(sizes, pairs), &bound)?;
        let Some(bias) = product.bias else { return Ok(()) };
        let numbers = Numbers::new()
            .with("pairs", pairs as u32)
            .with("out", columns)
            .with("experts", experts);
        let ids = self.array(Array::Ids, pairs);
        let bound = [("ids", ids), ("bias", Slot::Weight(bias.0)), ("y", product.y.clone())];
        self.push(moe_bias(), numbers, &bound)
    }
}

impl Mixtures for Recorder<'_> {
    fn push(&mut self, kernel: Recipe, numbers: Numbers, bound: &[(&str, Slot)]) -> Result<()> {
        Recorder::push(self, kernel, numbers, bound)
    }

    fn scratch(&self) -> &[Range<usize>; MIXTURE] {
        &self.layout.mixture
    }

    fn format(&self, weight: WeightId) -> Result<Format> {
        Ok(self.matrix(weight)?.0)
    }

    fn facts(&self) -> Facts {
        self.of.facts
    }

    fn operand(&self) -> Scalar {
        if self.of.exact() { Scalar::F32 } else { self.of.wide }
    }

    fn inner_type(&self, of: &Mixture<'_>) -> Scalar {
        let others = of.inner.is_some() || self.changes_experts();
        if others || self.narrow(of.rows) { Scalar::F32 } else { Mixtures::operand(self) }
    }

    /// In the array of the experts' results, which are not there yet.
    fn rounded_rows(&mut self, of: &Mixture<'_>, x: &TypedSlot) -> Result<TypedSlot> {
        let (operand, width) = (Mixtures::operand(self), of.sizes.width);
        let weighed = of.op.weighs_inputs || x.scalar == operand;
        if weighed || operand == Scalar::F32 || self.narrow(of.rows) {
            return Ok(x.clone());
        }
        let start = Mixtures::scratch(self)[Array::Outer as usize].start;
        let slot = Slot::Arena(start..start + of.rows * width * operand.bytes());
        self.unpack(Format::Dense(x.scalar), x.slot.clone(), of.rows, width, slot.clone())?;
        Ok(TypedSlot { slot, scalar: operand })
    }

    /// The rows of many sequences would depend on whether there are enough of them.
    fn warpgroups(&self) -> bool {
        !self.of.batched
    }

    fn pair_by_pair(&mut self, product: &Product, sizes: Sizes, pairs: usize) -> Result<bool> {
        if !self.narrow(pairs / sizes.used) {
            return Ok(false);
        }
        let (from, format) = (product.x.scalar, self.matrix(product.weight)?.0);
        let (schedule, groups) = self.of_pairs(product, format, pairs, false);
        let mut bound = vec![
            ("x", product.x.slot.clone()),
            ("y", product.y.clone()),
            ("weight", self.weight(product.weight)),
            ("ids", self.array(Array::Ids, pairs)),
        ];
        bound.extend(product.bias.map(|bias| ("bias", self.weight(bias))));
        let numbers = product.numbers(sizes, pairs).with("groups", groups);
        let kernel = moe_gemv(from, Scalar::F32, format, product.bias.is_some(), schedule);
        self.push(kernel, numbers, &bound)?;
        Ok(true)
    }

    fn changed(&mut self, of: &Mixture<'_>, half: usize, x: &TypedSlot, ys: &[Slot]) -> Result<()> {
        let share = if half == 0 { of.sizes.used } else { 1 };
        let ids = self.array(Array::Ids, of.pairs());
        self.change_pairs(half, (x, share), ids, ys)
    }

    fn gated_pairs(&mut self, of: &Mixture<'_>, x: &TypedSlot, act: &Slot) -> Result<bool> {
        let (Sizes { used, width, ff, .. }, pairs) = (of.sizes, of.pairs());
        let [gate, up] = [of.weights[0], of.weights[1]];
        let (format, other) = (self.matrix(gate)?.0, self.matrix(up)?.0);
        if !self.narrow(of.rows) || format != other || self.changes_experts() {
            return Ok(false);
        }
        let (x, y, bias) = (x.clone(), act.clone(), Experts::bias(of.weights, 0).copied());
        let product = Product { x, y, weight: gate, bias, width, out: ff, share: used };
        let (schedule, groups) = self.of_pairs(&product, format, pairs, true);
        let mut bound = vec![
            ("x", product.x.slot.clone()),
            ("y", product.y.clone()),
            ("gate", self.weight(gate)),
            ("up", self.weight(up)),
            ("ids", self.array(Array::Ids, pairs)),
        ];
        for (name, matrix) in [("gate_bias", 0), ("up_bias", 1)] {
            let bias = Experts::bias(of.weights, matrix);
            bound.extend(bias.map(|bias| (name, self.weight(*bias))));
        }
        let numbers = product.numbers(of.sizes, pairs).with("groups", groups);
        let (act, numbers) = match of.op.gate {
            Gate::Plain(act) => (Some(act), numbers),
            Gate::Clamped { limit, alpha } => {
                (None, numbers.with_f32("limit", limit).with_f32("alpha", alpha))
            }
            // The products by themselves, and a kernel for the gate.
            Gate::Bounded { .. } => return Ok(false),
        };
        let kernel = moe_gate_up(product.x.scalar, format, act, bias.is_some(), schedule);
        self.push(kernel, numbers, &bound)?;
        Ok(true)
    }

    fn summed(&mut self, of: &Mixture<'_>, x: &Slot, y: &TypedSlot, early: bool) -> Result<bool> {
        if !self.narrow(of.rows) || self.changes_experts() {
            return Ok(false);
        }
        let Sizes { experts, used, width, ff } = of.sizes;
        let (weight, pairs, facts) = (of.weights[2], of.pairs(), self.of.facts);
        let format = self.matrix(weight)?.0;
        let (int8, tuned) = (!self.of.exact() && facts.dot4(), facts.tuned);
        let (cols, out, formats) = (ff as u32, width as u32, &[format]);
        let (from, processors) = (Scalar::F32, share(facts.processors, of.rows));
        let (rows, pair) = (1, false);
        let task = Task { formats, cols, out, rows, x: from, pair, int8, processors, tuned };
        let schedule = pick_down(&task, used as u32, facts.shared);
        let mut bound = vec![
            ("x", x.clone()),
            ("y", y.slot.clone()),
            ("ids", self.array(Array::Ids, pairs)),
            ("shares", self.array(Array::Shares, pairs)),
            ("weight", self.weight(weight)),
        ];
        let bias = Experts::bias(of.weights, 2);
        bound.extend(bias.map(|bias| ("bias", self.weight(*bias))));
        bound.extend(of.residual.clone().map(|residual| ("residual", residual)));
        let numbers = Numbers::new()
            .with("tokens", of.rows as u32)
            .with("experts", experts as u32)
            .with("width", cols)
            .with("out", out)
            .with("groups", schedule.groups(out, processors));
        let (bias, adds) = (bias.is_some(), of.residual.is_some());
        let parts = DownParts { used: used as u32, bias, adds, early };
        let kernel = moe_down(from, y.scalar, format, parts, schedule);
        self.push(kernel, numbers, &bound)?;
        Ok(true)
    }
}

/// The multiprocessors that each of some products has that are computed beside each other.
pub(super) fn share(processors: u32, products: usize) -> u32 {
    (processors / products.max(1) as u32).max(1)
}

/// A router whose launch has the norm in front of it.
pub(super) struct Router {
    /// The row that is normed, its eps and its weight.
    norm: (ValueId, f32, WeightId),
    format: Format,
    experts: u32,
    schedule: GemvSchedule,
}

impl Recorder<'_> {
    /// The router that a node is, of few tokens, if its launch has the norm in front of it. Where
    /// adapters may change it, the norm is computed by itself for all rows, so that those without
    /// one keep their bits.
    pub(super) fn router(&self, number: usize) -> Option<Router> {
        let (program, facts) = (&self.of.program, self.of.facts);
        let [norm, node] = program.nodes.get(number.checked_sub(1)?..=number)? else { return None };
        let (Op::RmsNorm(op), Op::Linear(_)) = (&norm.op, &node.op) else { return None };
        let (x, normed, scores) = (norm.inputs[0], norm.outputs[0], node.outputs[0]);
        let routes = node.inputs[0] == normed && self.of.scores[scores.0];
        if !routes || !self.narrow(self.rows(x)) || facts.small_groups() {
            return None;
        }
        // In place of what they read, groups would overwrite each other's rows.
        let apart = self.value(x) != self.value(normed);
        let (format, experts) = self.matrix(node.weights[0]).ok()?;
        let small = experts <= facts.tuned.gemv.short && matches!(format, Format::Dense(_));
        let whole = self.scalar(scores) == Scalar::F32;
        let adapted = [number - 1, number].iter().any(|node| self.of.adapters.has_sites(*node));
        if !apart || !small || !whole || adapted {
            return None;
        }
        let Facts { processors, tuned, shared, .. } = facts;
        let (formats, cols, from) = (&[format], self.width(x) as u32, self.scalar(x));
        let (rows, pair, int8, out) = (1, false, false, experts);
        let task = Task { formats, cols, out, rows, x: from, pair, int8, processors, tuned };
        let (schedule, norm) = (pick_router(&task, shared), (x, op.eps, norm.weights[0]));
        Some(Router { norm, format, experts, schedule })
    }

    /// Records a router's node with its norm.
    pub(super) fn normed_router(&mut self, node: &Node, router: Router) -> Result<()> {
        let Router { norm: (x, eps, weight), format, experts, schedule } = router;
        let (normed, bias) = (node.inputs[0], node.weights.get(1).copied());
        let mut bound = vec![
            ("x", self.value(x)),
            ("normed", self.value(normed)),
            ("scores", self.value(node.outputs[0])),
            ("norm", self.weight(weight)),
            ("weight", self.weight(node.weights[0])),
        ];
        bound.extend(bias.map(|bias| ("bias", self.weight(bias))));
        let numbers = Numbers::new()
            .with("tokens", self.rows(x) as u32)
            .with("width", self.width(x) as u32)
            .with("experts", experts)
            .with("groups", schedule.groups(experts, self.of.facts.processors))
            .with_f32("eps", eps);
        let (from, to) = (self.scalar(x), self.scalar(normed));
        self.push(moe_router(from, to, format, bias.is_some(), schedule), numbers, &bound)
    }

    /// The schedule of a product of `pairs` of experts pair by pair, or of two of them side by side
    /// (`pair`), and its threadgroups for each pair: all pairs' fit the device together.
    fn of_pairs(
        &self,
        product: &Product,
        format: Format,
        pairs: usize,
        pair: bool,
    ) -> (GemvSchedule, u32) {
        let (facts, out) = (self.of.facts, product.out as u32);
        let (int8, cols) = (!self.of.exact() && facts.dot4(), product.width as u32);
        let formats = &[format];
        let (x, tuned) = (product.x.scalar, facts.tuned);
        let processors = share(facts.processors, pairs);
        let task = Task { formats, cols, out, rows: 1, x, pair, int8, processors, tuned };
        let schedule = GemvSchedule::pick(&task);
        (schedule, schedule.groups(out, processors))
    }

    /// Records a node that is a mixture.
    pub(super) fn mixture(&mut self, op: &Experts, node: &Node) -> Result<()> {
        let sizes = sizes(&self.of.program, node)?;
        let (x, scores) = (self.operand(node.inputs[0]), self.operand(node.inputs[1]));
        let (rows, weights) = (self.rows(node.inputs[0]), &node.weights[..]);
        let y = self.operand(node.outputs[0]);
        let inner = match node.outputs.get(1).map(|inner| self.operand(*inner)) {
            Some(inner) if inner.scalar != Scalar::F32 => {
                let found = format!("{:?}", inner.scalar);
                return Err(Error::new("experts", "inner rows of f32", found));
            }
            inner => inner.map(|inner| inner.slot),
        };
        let residual = node.inputs.get(2).map(|v| self.value(*v));
        let factors = None;
        self.experts(&Mixture { op, sizes, rows, x, scores, weights, inner, residual, factors }, y)
    }
}
