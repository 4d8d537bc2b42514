//! Mixtures of experts, forward and backward: the rows of each expert are gathered, and go through
//! its matrices together.

use super::executor::Run;
use cpu_kernels::math;
use cpu_kernels::matmul::{Epilogue, Matrix};
use cpu_kernels::team::SharedSlice;
use formats::Result;
use ops::experts::{Experts, Gate};
use ops::gradient::Shares;
use ops::{Binary, moe};
use program::Node;

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

impl Run<'_> {
    fn experts_visited(&self, op: &Experts, node: &Node) -> (moe::Routes, Vec<Visited>) {
        // SAFETY: the input is only read.
        let scores = unsafe { self.read(node.inputs[1]) };
        let experts = self.width(node.inputs[1]);
        let factors = Experts::factors(&node.weights).map(|id| self.weights.vector(*id));
        let routes = moe::route(scores, experts, &op.routing).factored(factors);
        let mut visited: Vec<Visited> =
            (0..experts).map(|expert| Visited { expert, pairs: Vec::new() }).collect();
        for (pair, id) in routes.ids.iter().enumerate() {
            visited[*id as usize].pairs.push(pair);
        }
        visited.retain(|visited| !visited.pairs.is_empty());
        (routes, visited)
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
        unsafe { self.multiply(matrix, x.as_ptr(), rows, y.as_mut_ptr(), epilogue) };
        y
    }

    /// `dy W` of rows of one expert.
    fn back_through(&self, matrix: &Matrix, dy: &[f32]) -> Vec<f32> {
        let rows = dy.len() / matrix.rows();
        let mut dx = vec![0.0; rows * matrix.cols()];
        // SAFETY: both are as long as the matrix asks for, and this call's own.
        unsafe { self.multiply_back(matrix, dy.as_ptr(), rows, dx.as_mut_ptr(), false) };
        dx
    }

    /// The bias of an expert.
    fn bias_of(&self, node: &Node, matrix: usize, expert: usize, rows: usize) -> Option<&[f32]> {
        let id = Experts::bias(&node.weights, matrix)?;
        Some(&self.weights.vector(*id)[expert * rows..][..rows])
    }

    fn inner(&self, node: &Node, gate: Gate, expert: usize, x: &[f32]) -> Result<Inner> {
        let half = |i: usize| -> Result<Vec<f32>> {
            let matrix = self.weights.expert(node.weights[i], expert)?;
            Ok(self.through(matrix, x, self.bias_of(node, i, expert, matrix.rows())))
        };
        let (gates, up) = (half(0)?, half(1)?);
        let mut value = vec![0.0; up.len()];
        match gate {
            Gate::Plain(f) => {
                value.copy_from_slice(&gates);
                math::map_in_place(self.of.isa, f, &mut value);
                math::zip_in_place(self.of.isa, Binary::Mul, &mut value, &up);
            }
            Gate::Clamped { .. } => gate.apply(&gates, &up, &mut value),
        }
        Ok(Inner { gate: gates, up, value })
    }

    pub(super) fn experts(&self, op: &Experts, node: &Node) -> Result<()> {
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
            let inner =
                self.inner(node, op.gate, expert, &self.gathered(x, width, &pairs, used))?;
            let down = self.weights.expert(node.weights[2], expert)?;
            let own = self.through(down, &inner.value, self.bias_of(node, 2, expert, width));
            for (pair, own) in pairs.iter().zip(own.chunks_exact(width)) {
                let share = routes.weights[*pair] as f32;
                let y = &mut y[pair / used * width..][..width];
                y.iter_mut().zip(own).for_each(|(y, own)| *y += share * own);
            }
        }
        Ok(())
    }

    pub(super) fn experts_backward(&self, op: &Experts, node: &Node) -> Result<()> {
        let used = op.routing.used;
        let [width, experts] = [0, 1].map(|i| self.width(node.inputs[i]));
        let (routes, all) = self.experts_visited(op, node);
        // SAFETY: a node's operands.
        let [x, scores, dy] = [0, 1, 2].map(|i| unsafe { self.read(node.inputs[i]) });
        // SAFETY: a node's operands, each once.
        let (dx, dscores) = unsafe { (self.write(node.outputs[0]), self.write(node.outputs[1])) };
        dx.fill(0.0);
        let mut of_shares = vec![0f64; routes.ids.len()];
        for Visited { expert, pairs } in all {
            let [own, back] = [x, dy].map(|rows| self.gathered(rows, width, &pairs, used));
            let Inner { mut gate, mut up, value } = self.inner(node, op.gate, expert, &own)?;
            let matrix = |i: usize| self.weights.expert(node.weights[i], expert);
            let below = self.back_through(matrix(2)?, &back);
            let (ff, bias) = (value.len() / pairs.len(), self.bias_of(node, 2, expert, width));
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
                    let share = routes.weights[pairs[row]];
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
            let [of_gate, of_up] =
                [self.back_through(matrix(0)?, &gate), self.back_through(matrix(1)?, &up)];
            for (row, pair) in pairs.iter().enumerate() {
                let dx = &mut dx[pair / used * width..][..width];
                let halves = of_gate[row * width..][..width].iter().zip(&of_up[row * width..]);
                dx.iter_mut().zip(halves).for_each(|(dx, (gate, up))| *dx += gate + up);
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
}
