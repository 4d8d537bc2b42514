//! Mixtures of experts whose matrices are frozen. Forward as in steps of many rows
//! ([`Mixtures::experts`]); backward by the same table of pairs, sorted by expert:
//!
//! ```text
//! t = down' dy             moe_gemm_turned, each pair by its token's row
//! dshare = <t, h>          gate_backward, which leaves t dh/dgate and t dh/dup
//! dscores                  route_backward
//! dpair = gate' .. + up' .. moe_gemm_turned, twice
//! dx = sum_j share_j dpair moe_combine
//! ```
//!
//! A pair's share multiplies its gradient at the end, since all between is linear.

use std::ops::Range;

use formats::Result;
use ops::Experts;
use ops::gradient::experts::kernels::{gate_backward, route_backward};
use ops::linear::gemm::GemmTypes;
use ops::moe::{moe_gemm_turned, pick_turned};
use ops::packed::Format;
use program::{Node, WeightId};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::lower::Recorder;
use crate::gpu::Facts;
use crate::gpu::arena::MIXTURE;
use crate::gpu::lower::experts::{Array, Mixture, Mixtures, Product, sizes};
use crate::gpu::lower::{Slot, TypedSlot};

impl Mixtures for Recorder<'_> {
    fn push(&mut self, kernel: Recipe, numbers: Numbers, bound: &[(&str, Slot)]) -> Result<()> {
        Recorder::push(self, kernel, numbers, bound)
    }

    fn scratch(&self) -> &[Range<usize>; MIXTURE] {
        &self.layout.mixture
    }

    fn format(&self, weight: WeightId) -> Result<Format> {
        Recorder::format(self, weight)
    }

    fn facts(&self) -> Facts {
        self.of.facts
    }

    fn operand(&self) -> Scalar {
        self.of.scalar
    }

    fn warpgroups(&self) -> bool {
        true
    }

    /// All pairs are sorted, so that bits depend on no number of rows.
    fn pair_by_pair(&mut self, _: &Product, _: ops::experts::Sizes, _: usize) -> Result<bool> {
        Ok(false)
    }
}

impl Recorder<'_> {
    fn mixture<'a>(&self, op: &'a Experts, node: &'a Node) -> Result<Mixture<'a>> {
        let sizes = sizes(&self.of.program, node)?;
        let [x, scores] = [0, 1].map(|i| self.value(node.inputs[i]).into());
        let (rows, weights) = (self.count(node.inputs[0]), &node.weights[..]);
        Ok(Mixture { op, sizes, rows, x, scores, weights, inner: None, residual: None })
    }

    pub(super) fn experts_forward(&mut self, op: &Experts, node: &Node) -> Result<()> {
        let y = self.value(node.outputs[0]).into();
        let residual = node.inputs.get(2).map(|v| self.value(*v).slot());
        self.experts(&Mixture { residual, ..self.mixture(op, node)? }, y)
    }

    pub(super) fn experts_backward(&mut self, op: &Experts, node: &Node) -> Result<()> {
        let of = self.mixture(op, node)?;
        let (sizes, pairs) = (of.sizes, of.pairs());
        let ops::experts::Sizes { experts, used, width, ff } = sizes;
        self.route(&of, op.routing)?;
        self.halves(&of, &of.x)?;
        let [gate, up, back] =
            [Array::Gate, Array::Up, Array::Act].map(|array| self.array(array, pairs * ff));
        let dy: TypedSlot = self.value(node.inputs[2]).into();
        let (weight, bias) = (of.weights[2], of.weights.get(5).copied());
        let product = |x: &TypedSlot, y: &Slot, weight, width, out, share| {
            let (x, y) = (x.clone(), y.clone());
            Product { x, y, weight, bias: None, width, out, share }
        };
        let down = product(&dy, &back, weight, ff, width, used);
        self.turned(&down, (sizes, pairs), false)?;

        // Gradients of shares take the scratch of the pairs' gradients, which are written later.
        let shares = self.array(Array::Outer, pairs);
        let ids = self.array(Array::Ids, pairs);
        let mut numbers = Numbers::new().with("pairs", pairs as u32).with("ff", ff as u32);
        let mut bound = vec![
            ("gate", gate.clone()),
            ("up", up.clone()),
            ("back", back),
            ("shares", shares.clone()),
        ];
        if let Some(bias) = bias {
            for (name, n) in [("width", width), ("experts", experts), ("share", used)] {
                numbers.set(name, n as u32);
            }
            let bias = Slot::Weight(bias.0);
            bound.extend([("ids", ids.clone()), ("dy", dy.slot), ("bias", bias)]);
        }
        self.push(gate_backward(op.gate, bias.map(|_| dy.scalar)), numbers, &bound)?;

        let dscores: TypedSlot = self.value(node.outputs[1]).into();
        let numbers = Numbers::new()
            .with("tokens", of.rows as u32)
            .with("experts", experts as u32)
            .with("top_k", used as u32);
        let (logits, to) = (of.scores.clone(), dscores.scalar);
        let bound =
            [("logits", logits.slot), ("ids", ids), ("shares", shares), ("dlogits", dscores.slot)];
        let slots = experts.div_ceil(32) as u32;
        self.push(route_backward(logits.scalar, to, slots, op.routing), numbers, &bound)?;

        let outer = self.array(Array::Outer, pairs * width);
        for (i, half) in [gate, up].into_iter().enumerate() {
            let x = TypedSlot { slot: half, scalar: Scalar::F32 };
            let half = product(&x, &outer, of.weights[i], width, ff, 1);
            self.turned(&half, (sizes, pairs), i > 0)?;
        }
        let dx = self.value(node.outputs[0]).into();
        self.combine(&of, outer, dx)
    }

    /// Records a product with the other side of each expert's matrix, of `product.width` columns;
    /// where `adds`, to what `y` has.
    fn turned(
        &mut self,
        product: &Product,
        (sizes, pairs): (ops::experts::Sizes, usize),
        adds: bool,
    ) -> Result<()> {
        let (format, operand) = (Mixtures::format(self, product.weight)?, self.of.scalar);
        let shape = (pairs as u32, sizes.experts as u32, product.width as u32);
        let schedule = pick_turned(shape, operand, format, self.machine());
        let mut bound = vec![
            ("x", product.x.slot.clone()),
            ("y", product.y.clone()),
            ("weight", Slot::Weight(product.weight.0)),
        ];
        bound.extend(adds.then(|| ("add", product.y.clone())));
        bound.extend(self.group(sizes, pairs, schedule)?);
        let types = GemmTypes { x: product.x.scalar, operand, y: Scalar::F32 };
        let kernel = moe_gemm_turned(types, format, adds, schedule);
        self.push(kernel, product.numbers(sizes, pairs), &bound)
    }
}
