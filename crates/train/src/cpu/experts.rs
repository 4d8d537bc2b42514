//! Mixtures of experts, forward and backward: the rows of each expert are gathered, and go through
//! its matrices together, whose gradients are sums of outer products of both sides' rows.

use super::executor::Run;
use super::products::Operand;
use cpu_kernels::math;
use cpu_kernels::matmul::{Epilogue, Matrix};
use cpu_kernels::team::SharedSlice;
use formats::Result;
use ops::experts::{Experts, Gate};
use ops::gradient::{ExpertFactors, Shares};
use ops::{Binary, moe};
use program::{Node, Program, WeightId};

/// The rows that go through one expert, and which of a token's experts it is: their pairs, as
/// [`moe`] numbers them.
struct Visited {
    expert: usize,
    pairs: Vec<usize>,
}

/// Rows of an expert on their way: `[rows, ff]` each.
struct Inner {
    gate: Vec<f32>,
    up: Vec<f32>,
    /// The gate's output.
    value: Vec<f32>,
}

/// Bytes of the rows of the largest expert on their way back, if all of `tokens` tokens choose it:
/// what it reads and gives, both ways, and four rows between its matrices.
pub(super) fn gathered(program: &Program, tokens: usize) -> usize {
    let sizes = program.nodes.iter().filter_map(|node| program.mixture(node));
    let row = sizes.map(|sizes| 4 * (sizes.width + sizes.ff)).max();
    size_of::<f32>() * tokens * row.unwrap_or(0)
}

/// The weights of a mixture: its own, and the factors beside its matrices.
struct Weights<'a> {
    own: &'a [WeightId],
    factors: Option<(&'a [WeightId], &'a ExpertFactors)>,
}

impl<'a> Weights<'a> {
    fn new(node: &'a Node, factors: Option<&'a ExpertFactors>) -> Weights<'a> {
        match factors {
            None => Weights { own: &node.weights, factors: None },
            Some(how) => {
                let (own, factors) = how.split(&node.weights);
                Weights { own, factors: Some((factors, how)) }
            }
        }
    }

    /// `down` and `up` of a matrix, and their scale.
    fn places(&self, matrix: usize) -> Option<([WeightId; 2], f32)> {
        let (factors, how) = self.factors?;
        Some((how.places()[matrix]?.map(|at| factors[at]), how.scale))
    }

    /// Where the gradients of a matrix's factors lie among all factors'.
    fn gradients(&self, matrix: usize) -> Option<[usize; 2]> {
        self.factors.and_then(|(_, how)| how.places()[matrix])
    }
}

impl Run<'_> {
    fn experts_visited(&self, op: &Experts, node: &Node) -> (moe::Routes, Vec<Visited>) {
        // SAFETY: the input is only read.
        let scores = unsafe { self.read(node.inputs[1]) };
        let experts = self.width(node.inputs[1]);
        let routes = moe::route(scores, experts, &op.routing);
        let mut visited: Vec<Visited> =
            (0..experts).map(|expert| Visited { expert, pairs: Vec::new() }).collect();
        for (pair, id) in routes.ids.iter().enumerate() {
            visited[*id as usize].pairs.push(pair);
        }
        visited.retain(|visited| !visited.pairs.is_empty());
        (routes, visited)
    }

    /// An expert's factor.
    fn factor(&self, own: &[WeightId], expert: usize) -> f64 {
        let factors = Experts::factors(own).map(|id| self.weights.vector(*id));
        factors.map_or(1.0, |factors| f64::from(factors[expert]))
    }

    /// Rows of `x` that the pairs belong to.
    fn gathered(&self, x: &[f32], width: usize, pairs: &[usize], used: usize) -> Vec<f32> {
        let row = |pair: &usize| &x[pair / used * width..][..width];
        pairs.iter().flat_map(row).copied().collect()
    }

    /// `x W' (+ bias)` of rows of one expert.
    fn through(&self, matrix: &Matrix, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let rows = x.len() / matrix.cols();
        let mut y = vec![0.0; rows * matrix.rows()];
        let epilogue = Epilogue { bias, ..Epilogue::default() };
        // SAFETY: both are as long as the matrix asks for, and this call's own.
        unsafe {
            let x = Operand { start: x.as_ptr(), rows, value: None };
            self.multiply(matrix, x, y.as_mut_ptr(), epilogue);
        }
        y
    }

    /// `dy W` of rows of one expert.
    fn back_through(&self, matrix: &Matrix, dy: &[f32]) -> Vec<f32> {
        let rows = dy.len() / matrix.rows();
        let mut dx = vec![0.0; rows * matrix.cols()];
        // SAFETY: both are as long as the matrix asks for, and this call's own.
        unsafe {
            let dy = Operand { start: dy.as_ptr(), rows, value: None };
            self.multiply_back(matrix, dy, dx.as_mut_ptr(), false);
        }
        dx
    }

    /// The bias of an expert.
    fn bias_of(
        &self,
        own: &[WeightId],
        matrix: usize,
        expert: usize,
        rows: usize,
    ) -> Option<&[f32]> {
        let id = Experts::bias(own, matrix)?;
        Some(&self.weights.vector(*id)[expert * rows..][..rows])
    }

    /// The rows of `x` as an expert reads them for its pairs, and their shares.
    fn rows_read(
        &self,
        op: &Experts,
        x: &[f32],
        routes: &moe::Routes,
        pairs: &[usize],
        factor: f64,
    ) -> (Vec<f32>, Vec<f64>) {
        let used = op.routing.used;
        let width = x.len() / (routes.ids.len() / used);
        let shares: Vec<f64> = pairs.iter().map(|pair| routes.weights[*pair] * factor).collect();
        let mut rows = self.gathered(x, width, pairs, used);
        if op.weighs_inputs {
            weigh(&mut rows, &shares);
        }
        (rows, shares)
    }

    fn inner(&self, of: &Weights<'_>, gate: Gate, expert: usize, x: &[f32]) -> Result<Inner> {
        let half = |i: usize| -> Result<Vec<f32>> {
            let matrix = self.weights.expert(of.own[i], expert)?;
            Ok(self.through(matrix, x, self.bias_of(of.own, i, expert, matrix.rows())))
        };
        let (mut gates, mut up) = (half(0)?, half(1)?);
        if let Some(low) = self.low(of, 0, expert, x)? {
            self.raise(of, 0, expert, &low, &mut gates)?;
            self.raise(of, 1, expert, &low, &mut up)?;
        }
        let mut value = vec![0.0; up.len()];
        match gate {
            Gate::Plain(f) => {
                value.copy_from_slice(&gates);
                math::map_in_place(self.of.isa, f, &mut value);
                math::zip_in_place(self.of.isa, Binary::Mul, &mut value, &up);
            }
            Gate::Clamped { .. } | Gate::Bounded { .. } => gate.apply(&gates, &up, &mut value),
        }
        Ok(Inner { gate: gates, up, value })
    }

    /// `scale down x` of rows of one expert, if the matrix has factors.
    fn low(
        &self,
        of: &Weights<'_>,
        matrix: usize,
        expert: usize,
        x: &[f32],
    ) -> Result<Option<Vec<f32>>> {
        let Some(([down, _], scale)) = of.places(matrix) else { return Ok(None) };
        let mut low = self.through(self.weights.expert(down, expert)?, x, None);
        low.iter_mut().for_each(|low| *low *= scale);
        Ok(Some(low))
    }

    /// Adds `up` times rows of [`low`](Self::low).
    fn raise(
        &self,
        of: &Weights<'_>,
        matrix: usize,
        expert: usize,
        low: &[f32],
        y: &mut [f32],
    ) -> Result<()> {
        let Some(([_, up], _)) = of.places(matrix) else { return Ok(()) };
        let own = self.back_through(self.weights.expert(up, expert)?, low);
        y.iter_mut().zip(own).for_each(|(y, own)| *y += own);
        Ok(())
    }

    /// `scale up' dy` of rows of one expert, of the matrix's `up`.
    fn lowered(
        &self,
        of: &Weights<'_>,
        matrix: usize,
        expert: usize,
        dy: &[f32],
    ) -> Result<Option<Vec<f32>>> {
        let Some(([_, up], scale)) = of.places(matrix) else { return Ok(None) };
        let mut low = self.through(self.weights.expert(up, expert)?, dy, None);
        low.iter_mut().for_each(|low| *low *= scale);
        Ok(Some(low))
    }

    /// Adds `down' low` to rows, of the matrix's `down`.
    fn spread_low(
        &self,
        of: &Weights<'_>,
        matrix: usize,
        expert: usize,
        low: &[f32],
        dx: &mut [f32],
    ) -> Result<()> {
        let Some(([down, _], _)) = of.places(matrix) else { return Ok(()) };
        let own = self.back_through(self.weights.expert(down, expert)?, low);
        dx.iter_mut().zip(own).for_each(|(dx, own)| *dx += own);
        Ok(())
    }

    /// Writes a sum of outer products of `rows` rows of one expert, `[left, right]`, which is the
    /// expert's part of a gradient.
    fn outer_of(&self, expert: usize, rows: usize, sides: [&[f32]; 2], to: &mut [f32]) {
        let [left, right] = sides.map(|side| side.len() / rows);
        let to = &mut to[expert * left * right..][..left * right];
        let [first, second] = [(sides[0].as_ptr(), left), (sides[1].as_ptr(), right)];
        // SAFETY: the sides have that many rows, and the slice is this call's own.
        unsafe { self.outer(first, second, rows, to.as_mut_ptr(), false) };
    }

    pub(super) fn experts_forward(
        &self,
        (op, factors): (&Experts, Option<&ExpertFactors>),
        node: &Node,
    ) -> Result<()> {
        let of = Weights::new(node, factors);
        let (to, used) = (node.outputs[0], op.routing.used);
        let width = self.width(to);
        let (routes, all) = self.experts_visited(op, node);
        // SAFETY: a node's operands.
        let (x, y) = unsafe { (self.read(node.inputs[0]), self.write(to)) };
        match node.inputs.get(2) {
            // SAFETY: a node's operand.
            Some(residual) => y.copy_from_slice(unsafe { self.read(*residual) }),
            None => y.fill(0.0),
        }
        for Visited { expert, pairs } in all {
            let factor = self.factor(of.own, expert);
            let (own, shares) = self.rows_read(op, x, &routes, &pairs, factor);
            let inner = self.inner(&of, op.gate, expert, &own)?;
            let down = self.weights.expert(of.own[2], expert)?;
            let mut own = self.through(down, &inner.value, self.bias_of(of.own, 2, expert, width));
            if let Some(low) = self.low(&of, 2, expert, &inner.value)? {
                self.raise(&of, 2, expert, &low, &mut own)?;
            }
            if !op.weighs_inputs {
                weigh(&mut own, &shares);
            }
            for (pair, own) in pairs.iter().zip(own.chunks_exact(width)) {
                let y = &mut y[pair / used * width..][..width];
                y.iter_mut().zip(own).for_each(|(y, own)| *y += own);
            }
        }
        Ok(())
    }

    /// Gradients, of the mixture's weights if `weights`, or of its factors if there are some.
    pub(super) fn experts_backward(
        &self,
        (op, weights, factors): (&Experts, bool, Option<&ExpertFactors>),
        node: &Node,
    ) -> Result<()> {
        let (of, used) = (Weights::new(node, factors), op.routing.used);
        let [width, experts] = [0, 1].map(|i| self.width(node.inputs[i]));
        let (routes, all) = self.experts_visited(op, node);
        // SAFETY: a node's operands.
        let [x, scores, dy] = [0, 1, 2].map(|i| unsafe { self.read(node.inputs[i]) });
        // SAFETY: a node's operands, each once.
        let mut outputs = node.outputs.iter().map(|output| unsafe { self.write(*output) });
        let (Some(dx), Some(dscores)) = (outputs.next(), outputs.next()) else { return Ok(()) };
        // By role; experts that no row chose have zeros.
        let mut of_weights: [&mut [f32]; 7] = Default::default();
        let mut of_factors: Vec<&mut [f32]> = Vec::new();
        for (place, output) in outputs.enumerate() {
            output.fill(0.0);
            match weights {
                true => of_weights[Experts::role(of.own.len(), place)] = output,
                false => of_factors.push(output),
            }
        }
        dx.fill(0.0);
        let mut of_shares = vec![0f64; routes.ids.len()];
        for Visited { expert, pairs } in all {
            let factor = self.factor(of.own, expert);
            let (own, shares) = self.rows_read(op, x, &routes, &pairs, factor);
            let mut back = self.gathered(dy, width, &pairs, used);
            let Inner { mut gate, mut up, value } = self.inner(&of, op.gate, expert, &own)?;
            let matrix = |i: usize| self.weights.expert(of.own[i], expert);
            let mut below = self.back_through(matrix(2)?, &back);
            let lowered = self.lowered(&of, 2, expert, &back)?;
            if let Some(low) = &lowered {
                self.spread_low(&of, 2, expert, low, &mut below)?;
            }
            let (ff, bias) = (value.len() / pairs.len(), self.bias_of(of.own, 2, expert, width));
            for (row, pair) in pairs.iter().enumerate() {
                let own = formats::dot(&below[row * ff..][..ff], &value[row * ff..][..ff]);
                let bias =
                    bias.map_or(0.0, |bias| formats::dot(&back[row * width..][..width], bias));
                of_shares[*pair] = own + bias;
            }
            // The halves become their cotangents.
            let halves = [&mut gate, &mut up].map(|half| SharedSlice::new(half));
            self.each(pairs.len(), 4, &|rows, _| {
                for row in rows {
                    let share = if op.weighs_inputs { 1.0 } else { shares[row] };
                    // SAFETY: each row is one worker's.
                    let [gate, up] = halves
                        .each_ref()
                        .map(|half| unsafe { half.slice_mut(row * ff..(row + 1) * ff) });
                    for (i, below) in below[row * ff..][..ff].iter().enumerate() {
                        let slopes = op.gate.slopes(f64::from(gate[i]), f64::from(up[i]));
                        let [of_gate, of_up] = slopes.map(|s| share * f64::from(*below) * s);
                        (gate[i], up[i]) = (of_gate as f32, of_up as f32);
                    }
                }
            });
            let [mut of_rows, of_up] =
                [self.back_through(matrix(0)?, &gate), self.back_through(matrix(1)?, &up)];
            of_rows.iter_mut().zip(of_up).for_each(|(gate, up)| *gate += up);
            let halves = self.lowered(&of, 0, expert, &gate)?;
            let halves = halves.zip(self.lowered(&of, 1, expert, &up)?).map(|(mut gate, up)| {
                gate.iter_mut().zip(up).for_each(|(gate, up)| *gate += up);
                gate
            });
            if let Some(low) = &halves {
                self.spread_low(&of, 0, expert, low, &mut of_rows)?;
            }
            for (row, pair) in pairs.iter().enumerate() {
                let (token, own) = (pair / used * width, &mut of_rows[row * width..][..width]);
                if op.weighs_inputs {
                    of_shares[*pair] = formats::dot(own, &x[token..][..width]);
                    weigh(own, &shares[row..=row]);
                }
                dx[token..][..width].iter_mut().zip(own).for_each(|(dx, own)| *dx += *own);
            }
            if let (Some(mut lowered), Some([down, to])) = (lowered, of.gradients(2)) {
                if !op.weighs_inputs {
                    weigh(&mut back, &shares);
                    weigh(&mut lowered, &shares);
                }
                let low = self.low(&of, 2, expert, &value)?.unwrap_or_default();
                self.outer_of(expert, pairs.len(), [&lowered, &value], of_factors[down]);
                self.outer_of(expert, pairs.len(), [&low, &back], of_factors[to]);
            }
            if let Some(lowered) = halves {
                let low = self.low(&of, 0, expert, &own)?.unwrap_or_default();
                for (half, (rows, down)) in [(&gate, true), (&up, false)].into_iter().enumerate() {
                    let Some([first, to]) = of.gradients(half) else { continue };
                    if down {
                        self.outer_of(expert, pairs.len(), [&lowered, &own], of_factors[first]);
                    }
                    self.outer_of(expert, pairs.len(), [&low, rows], of_factors[to]);
                }
            }
            if weights {
                if !op.weighs_inputs {
                    weigh(&mut back, &shares);
                }
                let sides = [(&gate, &own), (&up, &own), (&back, &value)];
                self.sum_expert(expert, pairs.len(), sides, &mut of_weights);
            }
            for pair in &pairs {
                if let Some(of_factor) = of_weights[6].get_mut(expert) {
                    *of_factor += (of_shares[*pair] * routes.weights[*pair]) as f32;
                }
                of_shares[*pair] *= factor;
            }
        }
        let rows = scores.chunks_exact(experts).zip(dscores.chunks_exact_mut(experts));
        for (t, (scores, dscores)) in rows.enumerate() {
            let ids = &routes.ids[t * used..][..used];
            let shares = Shares::new(scores, ids, &op.routing);
            let found = shares.backward(&of_shares[t * used..][..used]);
            dscores.iter_mut().zip(found).for_each(|(to, found)| *to = found as f32);
        }
        Ok(())
    }

    /// Sums of outer products over the `rows` of one expert, of both sides of each of its matrices,
    /// and sums of the first sides, which are its biases'.
    fn sum_expert(
        &self,
        expert: usize,
        rows: usize,
        sides: [(&Vec<f32>, &Vec<f32>); 3],
        of_weights: &mut [&mut [f32]; 7],
    ) {
        for (i, (dy, x)) in sides.into_iter().enumerate() {
            let [out, width] = [dy, x].map(|side| side.len() / rows);
            let to = &mut of_weights[i][expert * out * width..][..out * width];
            let (first, second) = ((dy.as_ptr(), out), (x.as_ptr(), width));
            // SAFETY: the sides have that many rows, and the slice is this call's own.
            unsafe { self.outer(first, second, rows, to.as_mut_ptr(), false) };
            if let Some(to) = of_weights[3 + i].chunks_exact_mut(out).nth(expert) {
                self.sum_rows(dy, to, false);
            }
        }
    }
}

/// Multiplies each row with a number of its own.
fn weigh(rows: &mut [f32], by: &[f64]) {
    let width = rows.len() / by.len().max(1);
    for (row, by) in rows.chunks_exact_mut(width.max(1)).zip(by) {
        row.iter_mut().for_each(|x| *x = (f64::from(*x) * by) as f32);
    }
}
