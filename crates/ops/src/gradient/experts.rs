//! Gradients of a mixture of experts whose matrices are frozen: of its input and of its router's
//! scores.
//!
//! ```text
//! y = sum_j w_j down_j h_j,  h_j = gate(gate_j x, up_j x)        w_j: the share of expert j, by the scores
//! t_j = down_j' dy,  dw_j = <t_j, h_j>,  dh_j = w_j t_j,  dx = sum_j gate_j' dgate_j + up_j' dup_j
//! ```
//!
//! Which experts are chosen counts as constant.

pub mod kernels;

mod cases;

pub use cases::KERNELS;

use crate::experts::{Experts, Gate, Odds, Routing, Sizes};
use crate::gradient::elements::derivative;
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Shape, arity, expect, moe};
use formats::Result;

/// `x, scores, dy; gate, up, down, (their biases) -> dx, dscores`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsBackward(pub Experts);

/// `x, scores, dx, dscores; gate, up, down, (their biases) -> dy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsTangent(pub Experts);

/// How the shares of a token's experts follow from its scores.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    /// The odds of each chosen expert, before they are normalised and scaled.
    odds: Vec<f64>,
    /// `[used, experts]`: how they change with each score.
    slopes: Vec<f64>,
    /// The factor on odds, and whether they are divided by their sum.
    scale: f64,
    normalised: bool,
}

impl Shares {
    /// The shares of a row of scores, by which the experts `ids` were chosen in this order.
    pub fn new(scores: &[f32], ids: &[u32], routing: &Routing) -> Shares {
        let wide: Vec<f64> = scores.iter().map(|score| f64::from(*score)).collect();
        let top = wide.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut odds, mut slopes) = (Vec::new(), Vec::new());
        for (j, id) in ids.iter().enumerate() {
            let (own, chosen) = (wide[*id as usize], &ids[..j]);
            // Softmax over those that `counts`, whose slopes are `p_j (delta_ij - p_i)`.
            let counts = |i: usize| match routing.odds {
                Odds::Near { jitter } => {
                    let apart = (own - wide[i]) / wide[i].abs().max(own);
                    !chosen.contains(&(i as u32)) && apart <= 2.0 * f64::from(jitter)
                }
                Odds::Softmax | Odds::Sigmoid => true,
            };
            let powers: Vec<f64> = (0..wide.len())
                .map(|i| if counts(i) { (wide[i] - top).exp() } else { 0.0 })
                .collect();
            let sum: f64 = powers.iter().sum();
            let share = match routing.odds {
                Odds::Sigmoid => 1.0 / (1.0 + (-own).exp()),
                Odds::Softmax | Odds::Near { .. } => powers[*id as usize] / sum,
            };
            odds.push(share);
            slopes.extend((0..wide.len()).map(|i| {
                let same = if i == *id as usize { 1.0 } else { 0.0 };
                match routing.odds {
                    Odds::Sigmoid => same * share * (1.0 - share),
                    Odds::Softmax | Odds::Near { .. } => share * (same - powers[i] / sum),
                }
            }));
        }
        Shares { odds, slopes, scale: f64::from(routing.scale), normalised: routing.normalised }
    }

    /// The shares.
    pub fn weights(&self) -> impl Iterator<Item = f64> {
        let scale = self.scale / self.total();
        self.odds.iter().map(move |odds| odds * scale)
    }

    fn total(&self) -> f64 {
        if self.normalised { self.odds.iter().sum() } else { 1.0 }
    }

    /// Carries changes of odds over to shares, or back: normalised shares each lose a part of the
    /// sum that all gain.
    fn normalise(
        &self,
        changes: &[f64],
        against: impl Fn(usize) -> f64,
        by: impl Fn(usize) -> f64,
    ) -> Vec<f64> {
        let total = self.total();
        let along = match self.normalised {
            true => (0..changes.len()).map(|k| changes[k] * against(k)).sum::<f64>() / total,
            false => 0.0,
        };
        let each = changes.iter().enumerate();
        each.map(|(j, change)| self.scale / total * (change - along * by(j))).collect()
    }

    /// The cotangents of all scores, from the cotangents of the shares.
    pub fn backward(&self, cotangents: &[f64]) -> Vec<f64> {
        let of_odds = self.normalise(cotangents, |k| self.odds[k], |_| 1.0);
        let experts = self.slopes.len() / self.odds.len();
        let mut all = vec![0.0; experts];
        for (slopes, by) in self.slopes.chunks_exact(experts).zip(of_odds) {
            all.iter_mut().zip(slopes).for_each(|(to, slope)| *to += by * slope);
        }
        all
    }

    /// The tangents of the shares, from the tangents of all scores.
    pub fn tangent(&self, tangents: &[f32]) -> Vec<f64> {
        let rows = self.slopes.chunks_exact(tangents.len());
        let of_odds: Vec<f64> = rows
            .map(|row| row.iter().zip(tangents).map(|(s, t)| s * f64::from(*t)).sum())
            .collect();
        self.normalise(&of_odds, |_| 1.0, |j| self.odds[j])
    }
}

impl Gate {
    /// How its value changes with `gate` and with `up`.
    pub fn slopes(self, gate: f64, up: f64) -> [f64; 2] {
        match self {
            Gate::Plain(f) => [derivative(f, gate) * up, f.apply(gate)],
            Gate::Clamped { limit, alpha } => {
                let (limit, alpha) = (f64::from(limit), f64::from(alpha));
                let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
                let s = 1.0 / (1.0 + (-alpha * g).exp());
                let within = |inside: bool| f64::from(u8::from(inside));
                let of_gate = (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s));
                [of_gate * within(gate <= limit), g * s * within(up.abs() <= limit)]
            }
        }
    }
}

/// One expert in f64, for references.
struct Expert<'a> {
    sizes: Sizes,
    id: usize,
    weights: &'a [Vec<f32>],
}

impl Expert<'_> {
    /// Row `row` of one of its matrices, all of `width`.
    fn row(&self, matrix: usize, row: usize) -> &[f32] {
        let (rows, width) = match matrix {
            2 => (self.sizes.width, self.sizes.ff),
            _ => (self.sizes.ff, self.sizes.width),
        };
        &self.weights[matrix][(self.id * rows + row) * width..][..width]
    }

    fn bias(&self, matrix: usize, row: usize) -> f64 {
        let rows = if matrix == 2 { self.sizes.width } else { self.sizes.ff };
        self.weights.get(3 + matrix).map_or(0.0, |bias| f64::from(bias[self.id * rows + row]))
    }

    /// `matrix x`, without the bias.
    fn times(&self, matrix: usize, x: &[f64]) -> Vec<f64> {
        let rows = if matrix == 2 { self.sizes.width } else { self.sizes.ff };
        let dot = |row: usize| {
            let terms = self.row(matrix, row).iter().zip(x);
            terms.map(|(w, x)| f64::from(*w) * x).sum()
        };
        (0..rows).map(dot).collect()
    }

    /// `matrix' y`.
    fn turned(&self, matrix: usize, y: &[f64]) -> Vec<f64> {
        let mut x = vec![0.0; self.row(matrix, 0).len()];
        for (row, y) in y.iter().enumerate() {
            let terms = x.iter_mut().zip(self.row(matrix, row));
            terms.for_each(|(x, w)| *x += f64::from(*w) * y);
        }
        x
    }

    /// `gate x` and `up x` with their biases, and what the gate makes of them.
    fn inner(&self, gate: Gate, x: &[f64]) -> [Vec<f64>; 3] {
        let half = |matrix: usize| -> Vec<f64> {
            let products = self.times(matrix, x).into_iter().enumerate();
            products.map(|(row, y)| y + self.bias(matrix, row)).collect()
        };
        let (gates, ups) = (half(0), half(1));
        let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
        let mut value = vec![0.0; gates.len()];
        gate.apply(&narrow(&gates), &narrow(&ups), &mut value);
        let value = value.into_iter().map(f64::from).collect();
        [gates, ups, value]
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Calls `f` with each token: its number, its experts and how their shares follow from its scores.
fn tokens(op: Experts, call: &ReferenceCall<'_>, mut f: impl FnMut(usize, &[Expert<'_>], &Shares)) {
    let [width, experts] = [call.widths[0], call.widths[1]];
    let sizes = Sizes {
        experts,
        used: op.routing.used,
        width,
        ff: call.weights[2].len() / (experts * width),
    };
    let routes = moe::route(call.inputs[1], experts, &op.routing);
    let rows = call.inputs[1].chunks_exact(experts).zip(routes.ids.chunks_exact(sizes.used));
    for (t, (scores, ids)) in rows.enumerate() {
        let shares = Shares::new(scores, ids, &op.routing);
        let expert = |id: &u32| Expert { sizes, id: *id as usize, weights: call.weights };
        f(t, &ids.iter().map(expert).collect::<Vec<_>>(), &shares);
    }
}

impl Operation for ExpertsBackward {
    fn name(&self) -> &'static str {
        "experts_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[3, 6])?;
        expect(self.name(), "width of dy", &[inputs[2].width], &[inputs[0].width])?;
        self.0.infer(&inputs[..2], weights)?;
        Ok(vec![inputs[0], inputs[1]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [width, experts] = [call.widths[0], call.widths[1]];
        let [mut dx, mut dscores] = [0, 1].map(|i| vec![0f32; call.outputs[i].len()]);
        tokens(self.0, call, |t, chosen, shares| {
            let [x, dy] = [0, 2].map(|i| wide(&call.inputs[i][t * width..][..width]));
            let (mut own, mut of_shares) = (vec![0.0; width], Vec::new());
            for (expert, share) in chosen.iter().zip(shares.weights()) {
                let [gates, ups, value] = expert.inner(self.0.gate, &x);
                let back = expert.turned(2, &dy);
                let bias: f64 = (0..width).map(|o| dy[o] * expert.bias(2, o)).sum();
                of_shares.push(dot(&back, &value) + bias);
                let slopes: Vec<[f64; 2]> =
                    gates.iter().zip(&ups).map(|(g, u)| self.0.gate.slopes(*g, *u)).collect();
                for matrix in [0, 1] {
                    let of = back.iter().zip(&slopes).map(|(b, s)| share * b * s[matrix]);
                    let of = expert.turned(matrix, &of.collect::<Vec<f64>>());
                    own.iter_mut().zip(of).for_each(|(to, more)| *to += more);
                }
            }
            let to = dx[t * width..][..width].iter_mut().zip(own);
            to.for_each(|(to, own)| *to = own as f32);
            let to = dscores[t * experts..][..experts].iter_mut().zip(shares.backward(&of_shares));
            to.for_each(|(to, own)| *to = own as f32);
        });
        call.outputs = vec![dx, dscores];
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for ExpertsTangent {
    fn name(&self) -> &'static str {
        "experts_tangent"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 4, weights, &[3, 6])?;
        let widths = [inputs[0].width, inputs[1].width];
        expect(self.name(), "widths of tangents", &[inputs[2].width, inputs[3].width], &widths)?;
        self.0.infer(&inputs[..2], weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [width, experts] = [call.widths[0], call.widths[1]];
        let mut dy = vec![0f32; call.outputs[0].len()];
        tokens(self.0, call, |t, chosen, shares| {
            let [x, dx] = [0, 2].map(|i| wide(&call.inputs[i][t * width..][..width]));
            let of_shares = shares.tangent(&call.inputs[3][t * experts..][..experts]);
            let mut sum = vec![0.0; width];
            for ((expert, share), of_share) in chosen.iter().zip(shares.weights()).zip(of_shares) {
                let [gates, ups, value] = expert.inner(self.0.gate, &x);
                let [dgate, dup] = [0, 1].map(|matrix| expert.times(matrix, &dx));
                let moved = (0..value.len()).map(|i| {
                    let [of_gate, of_up] = self.0.gate.slopes(gates[i], ups[i]);
                    share * (of_gate * dgate[i] + of_up * dup[i]) + of_share * value[i]
                });
                let moved = expert.times(2, &moved.collect::<Vec<f64>>());
                for (o, (sum, moved)) in sum.iter_mut().zip(moved).enumerate() {
                    *sum += moved + of_share * expert.bias(2, o);
                }
            }
            let to = dy[t * width..][..width].iter_mut().zip(sum);
            to.for_each(|(to, sum)| *to = sum as f32);
        });
        call.outputs = vec![dy];
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}
