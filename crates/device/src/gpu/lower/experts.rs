//! Lowering of mixtures of experts. With few tokens, the pairs of a token and an expert are
//! computed one by one; with many, sorted by expert. In either form a pair's bits do not depend on
//! the other pairs. If the step's kind alone decides the form, as in a lowering for many sequences,
//! neither does a row's.

use formats::{Error, Result};
use ops::Experts;
use ops::experts::{Gate, Odds, Routing, Sizes};
use ops::gated::gated;
use ops::linear::gemm::{Machine, Types};
use ops::linear::{Schedule, Task};
use ops::moe::{
    clamped_gate, moe_bias, moe_combine, moe_gemm, moe_gemv, moe_group, moe_route, pick_blocks,
};
use ops::scale_rows::scale_rows;
use program::{Node, WeightId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::{Recorder, Slot, TypedSlot};

/// A product of experts: from rows `x`, each read by `share` pairs, to f32 rows `y`, one for each
/// pair.
struct Product {
    x: TypedSlot,
    y: Slot,
    weight: WeightId,
    bias: Option<WeightId>,
    width: usize,
    out: usize,
    share: usize,
}

impl Recorder<'_> {
    /// The first `words` words of one of the mixture's scratch arrays.
    fn array(&self, i: usize, words: usize) -> Slot {
        let start = self.layout.mixture[i].start;
        Slot::Arena(start..start + 4 * words)
    }

    pub(super) fn experts(&mut self, op: &Experts, node: &Node) -> Result<()> {
        let sizes = self.of.program.mixture(node);
        let sizes = sizes.ok_or_else(|| Error::new("experts", "a mixture", "other operands"))?;
        let Sizes { experts, used, width, ff } = sizes;
        let (rows, scores, y) = (self.rows(node.inputs[0]), node.inputs[1], node.outputs[0]);
        let pairs = rows * used;
        let (ids, weights) = (self.array(0, pairs), self.array(1, pairs));
        let numbers = Numbers::new()
            .with("tokens", rows as u32)
            .with("experts", experts as u32)
            .with("top_k", used as u32);
        let kernel = |routing| moe_route(self.scalar(scores), experts.div_ceil(32) as u32, routing);
        let (kernel, added) = (
            kernel(op.routing),
            kernel(Routing { odds: Odds::Softmax, normalised: true, scale: 1.0, ..op.routing }),
        );
        let bound =
            [("logits", self.value(scores)), ("ids", ids.clone()), ("weights", weights.clone())];
        self.push(kernel, numbers.clone(), &bound)?;
        let mut x = self.operand(node.inputs[0]);
        if op.weighs_inputs {
            // Each row has one expert, and its own weight. Weighted rows are kept in the buffer of
            // the outputs until they are read. The softmax over a single expert is 1, so its output
            // is added unscaled.
            let weighed = self.array(8, pairs * width);
            let sizes = Numbers::new().with("rows", rows as u32).with("width", width as u32);
            let of = [("x", x.slot), ("s", weights.clone()), ("y", weighed.clone())];
            self.push(scale_rows(x.scalar, Scalar::F32), sizes, &of)?;
            x = TypedSlot { slot: weighed, scalar: x.scalar };
            self.push(added, numbers, &bound)?;
        }

        let inner = |i: usize| self.array(5 + i, pairs * ff);
        let (gate, up, act, outer) = (inner(0), inner(1), inner(2), self.array(8, pairs * width));
        for (i, to) in [(0, &gate), (1, &up)] {
            let (x, y, bias) = (x.clone(), to.clone(), node.weights.get(i + 3).copied());
            let weight = node.weights[i];
            let product = Product { x, y, weight, bias, width, out: ff, share: used };
            self.of_experts(&product, sizes, pairs)?;
        }
        let numbers = Numbers::new().with("n", (pairs * ff) as u32);
        let bound = [("gate", gate), ("up", up), ("y", act.clone())];
        match op.gate {
            Gate::Plain(f) => self.push(gated(Scalar::F32, f), numbers, &bound)?,
            Gate::Clamped { limit, alpha } => {
                let numbers = numbers.with_f32("limit", limit).with_f32("alpha", alpha);
                self.push(clamped_gate(), numbers, &bound)?;
            }
        }
        let x = TypedSlot { slot: act, scalar: Scalar::F32 };
        let (weight, bias) = (node.weights[2], node.weights.get(5).copied());
        let product =
            Product { x, y: outer.clone(), weight, bias, width: ff, out: width, share: 1 };
        self.of_experts(&product, sizes, pairs)?;
        let kernel = moe_combine(Scalar::F32, self.scalar(y), used as u32);
        let numbers = Numbers::new().with("tokens", rows as u32).with("width", width as u32);
        self.push(kernel, numbers, &[("y", outer), ("weights", weights), ("out", self.value(y))])
    }

    fn of_experts(&mut self, product: &Product, sizes: Sizes, pairs: usize) -> Result<()> {
        let &Product { weight, bias, width, out, share, .. } = product;
        let (experts, columns) = (sizes.experts as u32, out as u32);
        let format = self.matrix(weight)?.0;
        let numbers = Numbers::new()
            .with("pairs", pairs as u32)
            .with("width", width as u32)
            .with("out", columns)
            .with("experts", experts)
            .with("share", share as u32);
        let ids = self.array(0, pairs);
        let mut bound = vec![
            ("x", product.x.slot.clone()),
            ("y", product.y.clone()),
            ("weight", self.weight(weight)),
        ];
        let from = product.x.scalar;
        if self.narrow(pairs / sizes.used) {
            let facts = self.of.facts;
            let (int8, cols) = (!self.of.exact() && facts.dot4(), width as u32);
            let task = Task {
                formats: &[format],
                cols,
                out: columns,
                rows: 1,
                x: from,
                pair: false,
                int8,
                tuned: facts.tuned,
            };
            let schedule = Schedule::pick(&task);
            let groups = schedule.groups(columns, self.of.facts.processors);
            bound.push(("ids", ids.clone()));
            let kernel = moe_gemv(from, Scalar::F32, format, schedule);
            self.push(kernel, numbers.with("groups", groups), &bound)?;
        } else {
            let operand = if self.of.exact() { Scalar::F32 } else { self.of.wide };
            // Warpgroups sum in an order of their own, which would make the rows of many sequences
            // depend on whether there are enough of them.
            let machine = self.of.facts.machine();
            let wgmma = machine.wgmma && !self.of.batched;
            let machine = Machine { wgmma, ..machine };
            let schedule = pick_blocks((pairs as u32, experts, columns), operand, format, machine);
            let rows = schedule.bm;
            let tiles = pairs.div_ceil(rows as usize) + sizes.experts;
            let (offsets, order) = (self.array(2, sizes.experts + 1), self.array(3, pairs));
            let blocks = self.array(4, 2 * tiles);
            let grouped = Numbers::new()
                .with("pairs", pairs as u32)
                .with("experts", experts)
                .with("block_rows", rows);
            let arrays = [
                ("ids", ids.clone()),
                ("offsets", offsets.clone()),
                ("order", order.clone()),
                ("blocks", blocks.clone()),
            ];
            self.push(moe_group(experts.next_multiple_of(64)), grouped, &arrays)?;
            bound.extend([("order", order), ("offsets", offsets), ("blocks", blocks)]);
            let types = Types { x: from, operand, y: Scalar::F32 };
            self.push(moe_gemm(types, format, schedule), numbers, &bound)?;
        }
        let Some(bias) = bias else { return Ok(()) };
        let numbers = Numbers::new()
            .with("pairs", pairs as u32)
            .with("out", columns)
            .with("experts", experts);
        let bound = [("ids", ids), ("bias", self.weight(bias)), ("y", product.y.clone())];
        self.push(moe_bias(), numbers, &bound)
    }
}
