//! Mixtures of experts. Forward as in steps of many rows ([`Mixtures::experts`]); backward by the
//! same table of pairs, sorted by expert:
//!
//! ```text
//! ddown = sum share dy h'  moe_outer, if weights are trained
//! t = down' dy             moe_gemm_turned, each pair by its token's row
//! dshare = <t, h>          gate_backward, which leaves t dh/dgate and t dh/dup
//! dscores                  route_backward
//! dgate, dup               moe_outer
//! dpair = gate' .. + up' .. moe_gemm_turned, twice
//! dx = sum_j share_j dpair moe_combine
//! ```
//!
//! Low-rank factors beside the matrices ([`ExpertFactors`]) are two more products, either way, of
//! which `moe_gemm_turned` adds the second to what is there; gradients of factors are `moe_outer`s.
//!
//! A pair's share multiplies its gradient at the end, since all between is linear. Where shares
//! multiply what experts read instead, rows are weighed before the halves, and `dshare` is `<dpair,
//! x>` (`pair_dots`).

use std::ops::Range;

use formats::{Error, ErrorKind, Hint, Result, Setting};
use ops::Experts;
use ops::gradient::experts::kernels::{
    OuterTypes, gate_backward, moe_outer, pair_dots, route_backward,
};
use ops::gradient::matmul::MatmulTiling;
use ops::gradient::{ExpertFactors, Gradient};
use ops::linear::gemm::GemmTypes;
use ops::moe::{moe_factors, moe_gemm_turned, pick_turned};
use ops::packed::Format;
use ops::scale::scale;
use ops::zip::zip;
use ops::{Binary, Op};
use program::{Node, Program, WeightId};
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

    fn changed(&mut self, of: &Mixture<'_>, half: usize, x: &TypedSlot, ys: &[Slot]) -> Result<()> {
        // Rows between the factors lie where the gate's results will be, or where its operands were.
        let (matrix, scratch, share) = match half {
            0 => (0, Array::Act, of.sizes.used),
            _ => (2, Array::Gate, 1),
        };
        let Some(low) = self.low(of, matrix, (x, share), (scratch, 0))? else { return Ok(()) };
        for (i, y) in ys.iter().enumerate() {
            self.raise(of, matrix + i, &low, y)?;
        }
        Ok(())
    }
}

/// Ranks of experts' factors are a multiple of this: products read rows of so many.
const RANKS: usize = 8;

/// Refuses factors whose rows do not fit into a mixture's scratch, or of which products do not read
/// whole vectors.
pub(super) fn check(program: &Program, node: &Node) -> Result<()> {
    let how = match &node.op {
        Op::Gradient(Gradient::AdaptedExperts(of)) => &of.factors,
        Op::Gradient(Gradient::AdaptedExpertsBackward(of)) => &of.factors,
        _ => return Ok(()),
    };
    let Some(sizes) = program.mixture(node) else { return Ok(()) };
    let (_, factors) = how.split(&node.weights);
    let ranks = factors.iter().map(|factor| program.weights[factor.0].shape[0] / sizes.experts);
    let (rank, most) = (ranks.max().unwrap_or(0), (sizes.ff / 3).min(sizes.width / 2));
    if rank > most || !rank.is_multiple_of(RANKS) {
        let expected = format!("factors of a rank that {RANKS} divides, up to {most}");
        let error = Error::new("experts", expected, rank).of(ErrorKind::Unsupported);
        return Err(error.hint(Hint::set(Setting::Place, "cpu")));
    }
    Ok(())
}

/// The down and the up of a matrix's factors, and their rank.
struct Factors {
    down: WeightId,
    up: WeightId,
    scale: f32,
    rank: usize,
}

impl Recorder<'_> {
    fn mixture<'a>(
        &self,
        (op, factors): (&'a Experts, Option<&'a ExpertFactors>),
        node: &'a Node,
    ) -> Result<Mixture<'a>> {
        let sizes = sizes(&self.of.program, node)?;
        let [x, scores] = [0, 1].map(|i| self.value(node.inputs[i]).into());
        let (rows, all) = (self.count(node.inputs[0]), &node.weights[..]);
        let (weights, low) = factors.map_or((all, &[][..]), |factors| factors.split(all));
        let factors = factors.map(|factors| (factors, low));
        let (inner, residual) = (None, None);
        Ok(Mixture { op, sizes, rows, x, scores, weights, inner, residual, factors })
    }

    pub(super) fn experts_forward(
        &mut self,
        op: (&Experts, Option<&ExpertFactors>),
        node: &Node,
    ) -> Result<()> {
        let y = self.value(node.outputs[0]).into();
        let residual = node.inputs.get(2).map(|v| self.value(*v).slot());
        self.experts(&Mixture { residual, ..self.mixture(op, node)? }, y)
    }

    /// The factors of one of a mixture's matrices.
    fn factors(&self, of: &Mixture<'_>, matrix: usize) -> Option<Factors> {
        let (how, all) = of.factors?;
        let [down, up] = how.places()[matrix]?.map(|at| all[at]);
        let rank = self.of.program.weights[down.0].shape[0] / of.sizes.experts;
        Some(Factors { down, up, scale: how.scale, rank })
    }

    /// The `part`-th rows of ranks of pairs in a scratch array.
    fn ranks(&self, (array, part): (Array, usize), pairs: usize, rank: usize) -> Slot {
        let start = self.scratch()[array as usize].start + 4 * part * pairs * rank;
        Slot::Arena(start..start + 4 * pairs * rank)
    }

    /// Records `scale factor x` of pairs, for a factor that is `[rank, width]` for each expert.
    fn times_factor(
        &mut self,
        of: &Mixture<'_>,
        (weight, width): (WeightId, usize),
        (x, share): (&TypedSlot, usize),
        (scale_by, y): (f32, &Slot),
        rank: usize,
    ) -> Result<()> {
        let (pairs, x, to) = (of.pairs(), x.clone(), y.clone());
        let product = Product { x, y: to, weight, bias: None, width, out: rank, share };
        self.of_experts(&product, of.sizes, pairs, &mut None)?;
        let numbers = Numbers::new().with("n", (pairs * rank) as u32).with_f32("by", scale_by);
        self.push(scale(Scalar::F32), numbers, &[("x", y.clone()), ("y", y.clone())])
    }

    /// Records `scale down x` of pairs, if the matrix has factors.
    fn low(
        &mut self,
        of: &Mixture<'_>,
        matrix: usize,
        x: (&TypedSlot, usize),
        place: (Array, usize),
    ) -> Result<Option<Slot>> {
        let Some(Factors { down, scale, rank, .. }) = self.factors(of, matrix) else {
            return Ok(None);
        };
        let width = if matrix == 2 { of.sizes.ff } else { of.sizes.width };
        let y = self.ranks(place, of.pairs(), rank);
        self.times_factor(of, (down, width), x, (scale, &y), rank)?;
        Ok(Some(y))
    }

    /// Records `scale up' dy` of pairs, if the matrix has factors.
    fn lowered(
        &mut self,
        of: &Mixture<'_>,
        matrix: usize,
        dy: (&TypedSlot, usize),
        place: (Array, usize),
    ) -> Result<Option<Slot>> {
        let Some(Factors { up, scale, rank, .. }) = self.factors(of, matrix) else {
            return Ok(None);
        };
        let width = if matrix == 2 { of.sizes.width } else { of.sizes.ff };
        let y = self.ranks(place, of.pairs(), rank);
        self.times_factor(of, (up, width), dy, (scale, &y), rank)?;
        Ok(Some(y))
    }

    /// Records the addition of a factor's other side times rows of ranks: of `up` to a product of
    /// the matrix, or of `down` to what its input gets.
    fn add_turned(
        &mut self,
        of: &Mixture<'_>,
        (weight, width): (WeightId, usize),
        (low, rank): (&Slot, usize),
        y: &Slot,
    ) -> Result<()> {
        let x = TypedSlot { slot: low.clone(), scalar: Scalar::F32 };
        let (y, bias) = (y.clone(), None);
        let product = Product { x, y, weight, bias, width, out: rank, share: 1 };
        self.turned(&product, (of.sizes, of.pairs()), true)
    }

    fn raise(&mut self, of: &Mixture<'_>, matrix: usize, low: &Slot, y: &Slot) -> Result<()> {
        let Some(Factors { up, rank, .. }) = self.factors(of, matrix) else { return Ok(()) };
        let width = if matrix == 2 { of.sizes.width } else { of.sizes.ff };
        self.add_turned(of, (up, width), (low, rank), y)
    }

    fn spread_ranks(
        &mut self,
        of: &Mixture<'_>,
        matrix: usize,
        low: &Slot,
        y: &Slot,
    ) -> Result<()> {
        let Some(Factors { down, rank, .. }) = self.factors(of, matrix) else { return Ok(()) };
        let width = if matrix == 2 { of.sizes.ff } else { of.sizes.width };
        self.add_turned(of, (down, width), (low, rank), y)
    }

    /// Records the gradient of a matrix's `down` (0) or `up` (1): the sum of outer products of rows
    /// of ranks and of what the factor's other side has.
    fn factor_sums(
        &mut self,
        of: &Mixture<'_>,
        (matrix, factor): (usize, usize),
        low: &Slot,
        other: (&TypedSlot, usize),
        node: &Node,
    ) -> Result<()> {
        let (Some((how, _)), Some(own)) = (of.factors, self.factors(of, matrix)) else {
            return Ok(());
        };
        let Some(places) = how.places()[matrix] else { return Ok(()) };
        let to = self.value(node.outputs[2 + places[factor]]).into();
        let ops::experts::Sizes { width, ff, .. } = of.sizes;
        let columns = if (matrix == 2) == (factor == 0) { ff } else { width };
        let rows = TypedSlot { slot: low.clone(), scalar: Scalar::F32 };
        let weighed = !of.op.weighs_inputs;
        self.outer(of, ((&rows, 1), Some(other)), weighed, [own.rank, columns], &to)
    }

    /// Gradients, of the mixture's weights if `weights`, or of its factors if there are some.
    pub(super) fn experts_backward(
        &mut self,
        (op, weights, factors): (&Experts, bool, Option<&ExpertFactors>),
        node: &Node,
    ) -> Result<()> {
        let (gate, weighs_inputs) = (op.gate, op.weighs_inputs);
        let of = self.mixture((op, factors), node)?;
        let (sizes, pairs) = (of.sizes, of.pairs());
        let ops::experts::Sizes { experts, used, width, ff } = sizes;
        let gradients = if weights { self.of_weights(node) } else { Default::default() };
        self.route(&of, of.op.routing)?;
        self.factored(&of)?;
        let read = if weighs_inputs { self.weighed(&of)? } else { of.x.clone() };
        self.halves(&of, &read)?;
        let [gates, ups, back] =
            [Array::Gate, Array::Up, Array::Act].map(|array| self.array(array, pairs * ff));
        self.changed(&of, 0, &read, &[gates.clone(), ups.clone()])?;
        let float = |slot: &Slot| TypedSlot { slot: slot.clone(), scalar: Scalar::F32 };
        let dy: TypedSlot = self.value(node.inputs[2]).into();
        let outer_factors = self.factors(&of, 2).is_some();
        let mut lowered = None;
        if weights || outer_factors {
            // The rows that `down` reads take the array of `back`, which is written later.
            let value = float(&back);
            self.gated(gate, [&gates, &ups], &value, pairs * ff)?;
            if weights {
                self.outer_sums(&of, [(&dy, used), (&value, 1)], 2, &gradients)?;
            }
            // Rows that were weighed are made again when they are needed.
            if let Some(low) = self.low(&of, 2, (&value, 1), (Array::Outer, 0))? {
                self.factor_sums(&of, (2, 1), &low, (&dy, used), node)?;
            }
            lowered = self.lowered(&of, 2, (&dy, used), (Array::Outer, 1))?;
            if let Some(low) = &lowered {
                self.factor_sums(&of, (2, 0), low, (&value, 1), node)?;
            }
        }
        let product = |x: &TypedSlot, y: &Slot, weight, width, out, share| {
            let (x, y) = (x.clone(), y.clone());
            Product { x, y, weight, bias: None, width, out, share }
        };
        let down = product(&dy, &back, of.weights[2], ff, width, used);
        self.turned(&down, (sizes, pairs), false)?;
        if let Some(low) = &lowered {
            self.spread_ranks(&of, 2, low, &back)?;
        }

        // Gradients of shares take the scratch of the pairs' gradients, which are written later.
        let shares = self.array(Array::Outer, pairs);
        let mut numbers = Numbers::new().with("pairs", pairs as u32).with("ff", ff as u32);
        let mut bound = vec![
            ("gate", gates.clone()),
            ("up", ups.clone()),
            ("back", back),
            ("shares", shares.clone()),
        ];
        let bias = Experts::bias(of.weights, 2);
        if let Some(bias) = bias {
            for (name, n) in [("width", width), ("experts", experts), ("share", used)] {
                numbers.set(name, n as u32);
            }
            let (ids, bias) = (self.array(Array::Ids, pairs), Slot::Weight(bias.0));
            bound.extend([("ids", ids), ("dy", dy.slot.clone()), ("bias", bias)]);
        }
        self.push(gate_backward(gate, bias.map(|_| dy.scalar)), numbers, &bound)?;
        let dscores: TypedSlot = self.value(node.outputs[1]).into();
        let mut read = of.x.clone();
        if weighs_inputs {
            read = self.weighed(&of)?;
        } else {
            self.scores_backward(&of, &shares, &dscores, &gradients)?;
        }
        let mut lowered = None;
        if let Some(low) = self.low(&of, 0, (&read, used), (Array::Act, 0))? {
            let mut each = Vec::new();
            for (matrix, half) in [&gates, &ups].into_iter().enumerate() {
                let half = float(half);
                self.factor_sums(&of, (matrix, 1), &low, (&half, 1), node)?;
                each.extend(self.lowered(&of, matrix, (&half, 1), (Array::Act, 1 + matrix))?);
            }
            if let ([a, b], Some(own)) = (&each[..], self.factors(&of, 0)) {
                let numbers = Numbers::new().with("n", (pairs * own.rank) as u32);
                let bound = [("a", a.clone()), ("b", b.clone()), ("y", a.clone())];
                self.push(zip(Scalar::F32, Binary::Add), numbers, &bound)?;
                self.factor_sums(&of, (0, 0), a, (&read, used), node)?;
                lowered = Some(a.clone());
            }
        }
        if weights {
            for (matrix, half) in [&gates, &ups].into_iter().enumerate() {
                let half = float(half);
                self.outer_sums(&of, [(&half, 1), (&read, used)], matrix, &gradients)?;
            }
        }
        let outer = self.array(Array::Outer, pairs * width);
        for (i, half) in [gates, ups].into_iter().enumerate() {
            let half = product(&float(&half), &outer, of.weights[i], width, ff, 1);
            self.turned(&half, (sizes, pairs), i > 0)?;
        }
        if let Some(low) = &lowered {
            self.spread_ranks(&of, 0, low, &outer)?;
        }
        if weighs_inputs {
            let shares = self.array(Array::Act, pairs);
            let numbers = Numbers::new().with("pairs", pairs as u32).with("width", width as u32);
            let (x, numbers) = (of.x.clone(), numbers.with("share", used as u32));
            let bound = [("a", outer.clone()), ("b", x.slot), ("y", shares.clone())];
            self.push(pair_dots(x.scalar), numbers, &bound)?;
            self.scores_backward(&of, &shares, &dscores, &gradients)?;
        }
        let dx = self.value(node.outputs[0]).into();
        self.combine(&of, outer, dx)
    }

    /// The gradients of weights, by role.
    fn of_weights(&self, node: &Node) -> [Option<TypedSlot>; 7] {
        let mut all: [Option<TypedSlot>; 7] = Default::default();
        for (place, gradient) in node.outputs.iter().skip(2).enumerate() {
            all[Experts::role(node.weights.len(), place)] = Some(self.value(*gradient).into());
        }
        all
    }

    /// Records the gradients of scores and of factors from those of shares, which are multiplied
    /// by factors in place.
    fn scores_backward(
        &mut self,
        of: &Mixture<'_>,
        shares: &Slot,
        dscores: &TypedSlot,
        gradients: &[Option<TypedSlot>; 7],
    ) -> Result<()> {
        let ops::experts::Sizes { experts, used, .. } = of.sizes;
        let (pairs, factors) = (of.pairs(), Experts::factors(of.weights));
        let ids = self.array(Array::Ids, pairs);
        if let Some(factors) = factors {
            self.route(of, of.op.routing)?;
            if let Some(to) = &gradients[6] {
                let side = |slot| TypedSlot { slot, scalar: Scalar::F32 };
                let (slopes, bare) = (side(shares.clone()), side(self.array(Array::Shares, pairs)));
                self.outer(of, ((&slopes, 1), Some((&bare, 1))), false, [1, 1], to)?;
            }
            let numbers = Numbers::new().with("pairs", pairs as u32);
            let numbers = numbers.with("experts", experts as u32);
            let factors = Slot::Weight(factors.0);
            let bound = [("ids", ids.clone()), ("factors", factors), ("weights", shares.clone())];
            self.push(moe_factors(), numbers, &bound)?;
            self.factored(of)?;
        }
        let numbers = Numbers::new()
            .with("tokens", of.rows as u32)
            .with("experts", experts as u32)
            .with("top_k", used as u32);
        let (logits, to) = (of.scores.clone(), dscores.scalar);
        let bound = [
            ("logits", logits.slot),
            ("ids", ids),
            ("shares", shares.clone()),
            ("dlogits", dscores.slot.clone()),
        ];
        let slots = experts.div_ceil(32) as u32;
        self.push(route_backward(logits.scalar, to, slots, of.op.routing), numbers, &bound)
    }

    /// Records the gradients of a matrix of the experts and of its bias, from the rows of what it
    /// gives and of what it reads, each with the pairs that share one. Gradients of what it gives
    /// still lack the shares, unless these multiply what experts read.
    fn outer_sums(
        &mut self,
        of: &Mixture<'_>,
        [dy, x]: [(&TypedSlot, usize); 2],
        matrix: usize,
        gradients: &[Option<TypedSlot>; 7],
    ) -> Result<()> {
        let ops::experts::Sizes { width, ff, .. } = of.sizes;
        let [out, columns] = if matrix == 2 { [width, ff] } else { [ff, width] };
        let weighed = !of.op.weighs_inputs;
        for (to, x, columns) in
            [(&gradients[matrix], Some(x), columns), (&gradients[3 + matrix], None, 1)]
        {
            if let Some(to) = to {
                self.outer(of, (dy, x), weighed, [out, columns], to)?;
            }
        }
        Ok(())
    }

    /// Records sums of outer products of rows of pairs, for each expert; where there is no second
    /// side, sums of the first.
    fn outer(
        &mut self,
        of: &Mixture<'_>,
        (a, b): ((&TypedSlot, usize), Option<(&TypedSlot, usize)>),
        weighed: bool,
        [out, width]: [usize; 2],
        y: &TypedSlot,
    ) -> Result<()> {
        let (pairs, experts) = (of.pairs(), of.sizes.experts);
        let shares = [a.1, b.map_or(1, |b| b.1)];
        let [a_share, b_share] = shares;
        let all = [("pairs", pairs), ("experts", experts), ("out", out), ("width", width)];
        let all = all.into_iter().chain([("a_share", a_share), ("b_share", b_share)]);
        let numbers = all.fold(Numbers::new(), |numbers, (name, n)| numbers.with(name, n as u32));
        let mut bound = vec![
            ("a", a.0.slot.clone()),
            ("y", y.slot.clone()),
            ("order", self.array(Array::Order, pairs)),
            ("offsets", self.array(Array::Offsets, experts + 1)),
        ];
        bound.extend(b.map(|(b, _)| ("b", b.slot.clone())));
        bound.extend(weighed.then(|| ("weights", self.array(Array::Shares, pairs))));
        let types = OuterTypes { a: a.0.scalar, b: b.map(|(b, _)| b.scalar) };
        let kernel = moe_outer(types, weighed, MatmulTiling::pick(out, width));
        self.push(kernel, numbers, &bound)
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
        bound.extend(self.group(sizes, pairs, schedule, &mut None)?);
        let types = GemmTypes { x: product.x.scalar, operand, y: Scalar::F32 };
        let kernel = moe_gemm_turned(types, format, adds, schedule);
        self.push(kernel, product.numbers(sizes, pairs), &bound)
    }
}
