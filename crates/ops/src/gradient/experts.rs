//! Gradients of a mixture of experts: of its input, of its router's scores and, if they are trained,
//! of its weights.
//!
//! ```text
//! y = sum_j b_j o_j,  o_j = down_j h_j + bias,  h_j = gate(gate_j x_j, up_j x_j),  x_j = a_j x
//! s_j = factor_j w_j                      w_j: the share of expert j, by the scores
//! a_j, b_j = 1, s_j                       or s_j, 1 where inputs are weighed
//!
//! t_j = down_j' dy,  dh_j = b_j t_j,  dx_j = gate_j' dgate + up_j' dup,  dx = sum_j a_j dx_j
//! ds_j = <t_j, h_j> + <dy, bias>          or <dx_j, x>
//! dW_gate = sum dgate x_j',  dW_up = sum dup x_j',  dW_down = sum b_j dy h_j'
//! ```
//!
//! The last sums are over the rows that chose the expert. Which experts are chosen counts as
//! constant.

pub mod kernels;

mod adapted;
pub(crate) mod cases;

pub use adapted::{AdaptedExperts, AdaptedExpertsBackward, ExpertFactors};

use crate::experts::{Experts, Gate, Odds, Routing, Sizes};
use crate::gradient::elements::derivative;
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::{Shape, Unary, arity, expect, moe};
use formats::Result;

/// `x, scores, dy; gate, up, down, (their biases), (factors) -> dx, dscores, (a gradient of each
/// weight)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsBackward {
    /// The mixture.
    pub of: Experts,
    /// Whether there are gradients of all weights, too.
    pub weights: bool,
}

/// `x, scores, dx, dscores; gate, up, down, (their biases), (factors), (tangents of weights) ->
/// dy`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsTangent {
    /// The mixture.
    pub of: Experts,
    /// Which weights have tangents, in their order.
    pub moved: [bool; 7],
}

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
            Gate::Bounded { limit } => {
                let limit = f64::from(limit);
                let value = Unary::Silu.apply(gate);
                let within = |inside: bool| f64::from(u8::from(inside));
                let of_gate = derivative(Unary::Silu, gate) * up.clamp(-limit, limit);
                [of_gate * within(value <= limit), value.min(limit) * within(up.abs() <= limit)]
            }
        }
    }
}

/// A mixture's weights by [role](Experts::role); none where there is no such.
type Roles<'a> = [Option<&'a [f32]>; 7];

fn roles(weights: &[Vec<f32>]) -> Roles<'_> {
    let mut all: Roles<'_> = [None; 7];
    for (i, weight) in weights.iter().enumerate() {
        all[Experts::role(weights.len(), i)] = Some(weight);
    }
    all
}

/// One expert in f64, for references. Weights that are not there are zeros.
struct Expert {
    sizes: Sizes,
    id: usize,
}

impl Expert {
    /// Rows and columns of one of its matrices.
    fn shape(&self, matrix: usize) -> [usize; 2] {
        let Sizes { width, ff, .. } = self.sizes;
        if matrix == 2 { [width, ff] } else { [ff, width] }
    }

    /// One of its matrices, row-major.
    fn matrix<'a>(&self, of: &Roles<'a>, matrix: usize) -> Option<&'a [f32]> {
        let elements: usize = self.shape(matrix).iter().product();
        of[matrix].map(|all| &all[self.id * elements..][..elements])
    }

    fn bias(&self, of: &Roles<'_>, matrix: usize) -> Vec<f64> {
        let rows = self.shape(matrix)[0];
        match of[3 + matrix] {
            Some(bias) => wide(&bias[self.id * rows..][..rows]),
            None => vec![0.0; rows],
        }
    }

    /// `matrix x`, without the bias.
    fn times(&self, of: &Roles<'_>, matrix: usize, x: &[f64]) -> Vec<f64> {
        let [rows, columns] = self.shape(matrix);
        let Some(matrix) = self.matrix(of, matrix) else { return vec![0.0; rows] };
        let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        matrix.chunks_exact(columns).map(row).collect()
    }

    /// `matrix' y`.
    fn turned(&self, of: &Roles<'_>, matrix: usize, y: &[f64]) -> Vec<f64> {
        let columns = self.shape(matrix)[1];
        let mut x = vec![0.0; columns];
        let Some(matrix) = self.matrix(of, matrix) else { return x };
        for (row, y) in matrix.chunks_exact(columns).zip(y) {
            x.iter_mut().zip(row).for_each(|(x, w)| *x += f64::from(*w) * y);
        }
        x
    }

    /// `gate x` and `up x` with their biases, and what the gate makes of them.
    fn inner(&self, of: &Roles<'_>, gate: Gate, x: &[f64]) -> [Vec<f64>; 3] {
        let [gates, ups] = [0, 1].map(|i| add(self.times(of, i, x), &self.bias(of, i)));
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

fn add(mut a: Vec<f64>, b: &[f64]) -> Vec<f64> {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
    a
}

fn times(x: &[f64], by: f64) -> Vec<f64> {
    x.iter().map(|x| x * by).collect()
}

/// Calls `f` with each token: its number, its experts, how their shares follow from its scores, and
/// these.
fn tokens(
    op: Experts,
    call: &ReferenceCall<'_>,
    mut f: impl FnMut(usize, &[Expert], &Shares, &[f64]),
) {
    let [width, experts] = [call.widths[0], call.widths[1]];
    let ff = call.weights[2].len() / (experts * width);
    let sizes = Sizes { experts, used: op.routing.used, width, ff };
    let routes = moe::route(call.inputs[1], experts, &op.routing);
    let rows = call.inputs[1].chunks_exact(experts).zip(routes.ids.chunks_exact(sizes.used));
    for (t, (scores, ids)) in rows.enumerate() {
        let shares = Shares::new(scores, ids, &op.routing);
        let weights: Vec<f64> = shares.weights().collect();
        let chosen = ids.iter().map(|id| Expert { sizes, id: *id as usize });
        f(t, &chosen.collect::<Vec<_>>(), &shares, &weights);
    }
}

/// An expert's factor.
fn factor(of: &Roles<'_>, expert: &Expert) -> f64 {
    of[6].map_or(1.0, |factors| f64::from(factors[expert.id]))
}

impl Operation for ExpertsBackward {
    fn name(&self) -> &'static str {
        "experts_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 3, weights, &[3, 4, 6, 7])?;
        expect(self.name(), "width of dy", &[inputs[2].width], &[inputs[0].width])?;
        self.of.infer(&inputs[..2], weights)?;
        let own = weights.iter().filter(|_| self.weights).map(|weight| Shape::of_weight(weight));
        Ok(inputs[..2].iter().copied().chain(own).collect())
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [width, experts] = [call.widths[0], call.widths[1]];
        let [mut dx, mut dscores] = [0, 1].map(|i| vec![0f32; call.outputs[i].len()]);
        let own = roles(call.weights);
        let mut of_weights = own.map(|weight| vec![0f64; weight.map_or(0, <[f32]>::len)]);
        tokens(self.of, call, |t, chosen, shares, weights| {
            let [x, dy] = [0, 2].map(|i| wide(&call.inputs[i][t * width..][..width]));
            let (mut of_x, mut of_shares) = (vec![0.0; width], Vec::new());
            for (expert, weight) in chosen.iter().zip(weights) {
                let factor = factor(&own, expert);
                let share = weight * factor;
                let [a, b] = if self.of.weighs_inputs { [share, 1.0] } else { [1.0, share] };
                let read = times(&x, a);
                let [gates, ups, value] = expert.inner(&own, self.of.gate, &read);
                let back = expert.turned(&own, 2, &dy);
                let slopes = gates.iter().zip(&ups).map(|(g, u)| self.of.gate.slopes(*g, *u));
                let slopes: Vec<[f64; 2]> = slopes.collect();
                let halves = [0, 1].map(|half| {
                    let of = back.iter().zip(&slopes).map(|(back, s)| b * back * s[half]);
                    of.collect::<Vec<f64>>()
                });
                let [gate, up] = [0, 1].map(|half| expert.turned(&own, half, &halves[half]));
                let of_row = add(gate, &up);
                let of_share = match self.of.weighs_inputs {
                    true => dot(&of_row, &x),
                    false => dot(&back, &value) + dot(&dy, &expert.bias(&own, 2)),
                };
                of_shares.push(of_share * factor);
                of_x = add(of_x, &times(&of_row, a));
                let out = times(&dy, b);
                let sides = [(&halves[0], &read), (&halves[1], &read), (&out, &value)];
                for (matrix, (rows, columns)) in sides.into_iter().enumerate() {
                    let start = expert.id * rows.len() * columns.len();
                    let to = &mut of_weights[matrix][start..][..rows.len() * columns.len()];
                    for (to, row) in to.chunks_exact_mut(columns.len()).zip(rows) {
                        to.iter_mut().zip(columns).for_each(|(to, x)| *to += row * x);
                    }
                    let mut biases = of_weights[3 + matrix].chunks_exact_mut(rows.len());
                    if let Some(to) = biases.nth(expert.id) {
                        to.iter_mut().zip(rows).for_each(|(to, row)| *to += row);
                    }
                }
                if let Some(to) = of_weights[6].get_mut(expert.id) {
                    *to += of_share * weight;
                }
            }
            let to = dx[t * width..][..width].iter_mut().zip(of_x);
            to.for_each(|(to, own)| *to = own as f32);
            let to = dscores[t * experts..][..experts].iter_mut().zip(shares.backward(&of_shares));
            to.for_each(|(to, own)| *to = own as f32);
        });
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
        let of_weights = of_weights.into_iter().filter(|x| self.weights && !x.is_empty());
        call.outputs = [dx, dscores].into_iter().chain(of_weights.map(narrow)).collect();
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
        let (own, moved) = weights.split_at(weights.len().saturating_sub(self.moves()));
        arity(self.name(), inputs, 4, own, &[3, 4, 6, 7])?;
        for (of, tangent) in own.iter().zip(self.moved).filter(|(_, m)| *m).zip(moved) {
            expect(self.name(), "tangent of a weight", tangent, of.0)?;
        }
        let widths = [inputs[0].width, inputs[1].width];
        expect(self.name(), "widths of tangents", &[inputs[2].width, inputs[3].width], &widths)?;
        self.of.infer(&inputs[..2], own)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [width, experts] = [call.widths[0], call.widths[1]];
        let mut dy = vec![0f32; call.outputs[0].len()];
        let (own, tangents) = call.weights.split_at(call.weights.len() - self.moves());
        let mut moved: Roles<'_> = [None; 7];
        let places = (0..own.len()).filter(|i| self.moved[*i]);
        for (place, tangent) in places.zip(tangents) {
            moved[Experts::role(own.len(), place)] = Some(tangent);
        }
        let own = roles(own);
        tokens(self.of, call, |t, chosen, shares, weights| {
            let [x, dx] = [0, 2].map(|i| wide(&call.inputs[i][t * width..][..width]));
            let of_shares = shares.tangent(&call.inputs[3][t * experts..][..experts]);
            let mut sum = vec![0.0; width];
            for ((expert, weight), of_weight) in chosen.iter().zip(weights).zip(of_shares) {
                let factor = factor(&own, expert);
                let of_factor = moved[6].map_or(0.0, |of| f64::from(of[expert.id]));
                let (share, of_share) = (weight * factor, of_weight * factor + weight * of_factor);
                let (ones, shares) = ([1.0, 0.0], [share, of_share]);
                let [[a, da], [b, db]] =
                    if self.of.weighs_inputs { [shares, ones] } else { [ones, shares] };
                let (read, of_read) = (times(&x, a), add(times(&dx, a), &times(&x, da)));
                let [gates, ups, value] = expert.inner(&own, self.of.gate, &read);
                // The tangent of a product and its bias.
                let product = |matrix: usize, x: &[f64], dx: &[f64]| {
                    let moving = add(expert.times(&own, matrix, dx), &expert.bias(&moved, matrix));
                    add(moving, &expert.times(&moved, matrix, x))
                };
                let [dgate, dup] = [0, 1].map(|half| product(half, &read, &of_read));
                let of_value = (0..value.len()).map(|i| {
                    let [of_gate, of_up] = self.of.gate.slopes(gates[i], ups[i]);
                    of_gate * dgate[i] + of_up * dup[i]
                });
                let of_value = of_value.collect::<Vec<f64>>();
                let out = add(expert.times(&own, 2, &value), &expert.bias(&own, 2));
                sum = add(sum, &times(&product(2, &value, &of_value), b));
                sum = add(sum, &times(&out, db));
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

impl ExpertsTangent {
    /// How many weights have tangents.
    fn moves(&self) -> usize {
        self.moved.iter().filter(|moved| **moved).count()
    }
}
