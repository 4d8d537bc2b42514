//! Mixture of experts as one operation: each token goes through the gated feed-forwards that its
//! router scores highest, and their results are added up. See [`crate::moe`] for the mathematics
//! and the kernels.

use formats::{Error, Result};

use crate::gradient::{ExpertsBackward, ExpertsTangent, Forward, Reverse, Wrt, give, zeros};
use crate::operation::{ActivationPrecision, Operand, Operation, ReferenceCall, Sharding};
use crate::{Shape, Unary, arity, expect, gated, moe};

/// How router scores become experts and their weights.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Routing {
    /// Experts that each token goes through, at most 32.
    pub used: usize,
    /// How a score becomes the weight of an expert.
    pub odds: Odds,
    /// Whether the weights of a token's experts are made to sum to one.
    pub normalised: bool,
    /// Multiplies the weights.
    pub scale: f32,
}

/// The weight of a chosen expert, before it is normalised and scaled.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Odds {
    /// The softmax over all experts' scores. Normalised, it is the softmax over the chosen ones'
    /// alone.
    Softmax,
    /// The logistic function of the score.
    Sigmoid,
    /// SparseMixer (Liu et al. 2024): the softmax over the experts not yet chosen whose scores lie
    /// near the best of them, where `s` is near the best `b` if
    /// `(b - s) / max(|s|, b) <= 2 jitter`.
    Near {
        /// Half of the relative distance.
        jitter: f32,
    },
}

/// How the two halves of an expert become what its second matrix reads.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Gate {
    /// `f(gate) * up`.
    Plain(Unary),
    /// gpt-oss: `(u + 1) g sigmoid(alpha g)`, `g = min(gate, limit)`, `u` is `up` within `limit` of
    /// zero.
    Clamped {
        /// Bounds both halves.
        limit: f32,
        /// Steepness of the gate.
        alpha: f32,
    },
    /// Step 3.5: `min(silu(gate), limit) u`, where `u` is `up` within `limit` of zero.
    Bounded {
        /// Bounds both factors.
        limit: f32,
    },
}

impl Gate {
    /// The value that `gate` and `up` become, in f64.
    pub fn apply(self, gate: &[f32], up: &[f32], y: &mut [f32]) {
        match self {
            Gate::Plain(f) => gated::reference(f, gate, up, y),
            Gate::Clamped { limit, alpha } => {
                let (limit, alpha) = (f64::from(limit), f64::from(alpha));
                for ((gate, up), y) in gate.iter().zip(up).zip(y) {
                    let g = f64::from(*gate).min(limit);
                    let u = f64::from(*up).clamp(-limit, limit);
                    *y = ((u + 1.0) * g / (1.0 + (-alpha * g).exp())) as f32;
                }
            }
            Gate::Bounded { limit } => {
                let limit = f64::from(limit);
                for ((gate, up), y) in gate.iter().zip(up).zip(y) {
                    let u = f64::from(*up).clamp(-limit, limit);
                    *y = (Unary::Silu.apply(f64::from(*gate)).min(limit) * u) as f32;
                }
            }
        }
    }
}

/// `x[rows, width], scores[rows, experts], (residual[rows, width]); gate[experts * ff, width],
/// up[experts * ff, width], down[experts * width, ff], (gate bias[experts * ff], up bias[experts *
/// ff], down bias[experts * width]), (factors[experts]) -> [rows, width], (inner[rows, used *
/// ff])`. Factors multiply the weights of chosen experts, after these are normalised; the residual
/// is added to the sum of experts.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Experts {
    /// How scores are read.
    pub routing: Routing,
    /// How experts gate.
    pub gate: Gate,
    /// Whether a row's weights multiply what its experts read, and not what they give.
    pub weighs_inputs: bool,
    /// Whether there is a second output: what each row's experts multiply with their second
    /// matrices, best expert first.
    pub inner: bool,
}

/// Sizes of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Experts that there are.
    pub experts: usize,
    /// Experts that each token goes through.
    pub used: usize,
    /// Elements of a token.
    pub width: usize,
    /// Elements between an expert's matrices.
    pub ff: usize,
}

/// Most experts that a mixture may have, and most that a token may go through: what the router's
/// kernel holds.
pub const MOST_EXPERTS: usize = 1024;
/// See [`MOST_EXPERTS`].
pub const MOST_USED: usize = 32;

impl Experts {
    /// The bias of one of the three matrices, of the operation's weights.
    pub fn bias<T>(weights: &[T], matrix: usize) -> Option<&T> {
        weights.get(3 + matrix).filter(|_| weights.len() >= 6)
    }

    /// The role of the weight at a place among `count`: 0 to 2 are the matrices, 3 to 5 their
    /// biases, 6 the factors.
    pub fn role(count: usize, place: usize) -> usize {
        if matches!(count, 4 | 7) && place + 1 == count { 6 } else { place }
    }

    /// The factors of experts, of the operation's weights.
    pub fn factors<T>(weights: &[T]) -> Option<&T> {
        weights.last().filter(|_| matches!(weights.len(), 4 | 7))
    }

    /// The sizes that operands of these shapes have.
    ///
    /// # Errors
    /// Operands that do not belong to one mixture.
    pub fn sizes(&self, widths: [usize; 2], weights: &[&[usize]]) -> Result<Sizes> {
        let ([width, experts], used) = (widths, self.routing.used);
        if experts == 0 || experts > MOST_EXPERTS {
            let expected = format!("1 to {MOST_EXPERTS} experts");
            return Err(Error::new("experts", expected, experts));
        }
        if used == 0 || used > experts.min(MOST_USED) {
            let expected = format!("1 to {} experts for each token", experts.min(MOST_USED));
            return Err(Error::new("experts", expected, used));
        }
        let rows = weights[0].first().copied().unwrap_or(0);
        expect("experts", "rows of gate modulo experts", &[rows % experts], &[0])?;
        Ok(Sizes { experts, used, width, ff: rows / experts })
    }
}

impl Operation for Experts {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("experts", inputs, 2 + usize::from(inputs.len() > 2), weights, &[3, 4, 6, 7])?;
        let Sizes { experts, width, ff, .. } =
            self.sizes([inputs[0].width, inputs[1].width], weights)?;
        for (operand, weight, shape) in [
            ("gate", weights.first(), vec![experts * ff, width]),
            ("up", weights.get(1), vec![experts * ff, width]),
            ("down", weights.get(2), vec![experts * width, ff]),
            ("bias of gate", Experts::bias(weights, 0), vec![experts * ff]),
            ("bias of up", Experts::bias(weights, 1), vec![experts * ff]),
            ("bias of down", Experts::bias(weights, 2), vec![experts * width]),
            ("factors", Experts::factors(weights), vec![experts]),
        ] {
            weight.map_or(Ok(()), |found| expect("experts", operand, found, &shape))?;
        }
        if let Some(residual) = inputs.get(2).filter(|residual| **residual != inputs[0]) {
            let [expected, found] = [&inputs[0], residual].map(|shape| format!("{shape:?}"));
            return Err(Error::new("experts: residual", expected, found));
        }
        let inner = Shape { width: self.routing.used * ff, ..inputs[0] };
        Ok(if self.inner { vec![inputs[0], inner] } else { vec![inputs[0]] })
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let weights: Vec<&[f32]> = call.weights.iter().map(Vec::as_slice).collect();
        let [width, experts] = [call.widths[0], call.widths[1]];
        let ff = weights[0].len() / (experts * width);
        let factors = Experts::factors(&weights).copied();
        let mut routes = moe::route(call.inputs[1], experts, &self.routing).factored(factors);
        let (mut x, mut share) = (call.inputs[0].to_vec(), self.routing.used);
        if self.weighs_inputs {
            // Each expert has a row of its own, and what it gives is added as it is.
            let weighed = |(pair, weight): (usize, &f64)| {
                let row = &x[pair / share * width..][..width];
                row.iter().map(|x| (f64::from(*x) * weight) as f32).collect::<Vec<f32>>()
            };
            x = routes.weights.iter().enumerate().flat_map(weighed).collect();
            (share, routes.weights) = (1, vec![1.0; routes.weights.len()]);
        }
        let product = |x: &[f32], weight: usize, (width, out, share): (usize, usize, usize)| {
            let y = moe::product(x, weights[weight], &routes.ids, (width, out, share));
            let bias = Experts::bias(&weights, weight);
            let add = |(i, y): (usize, f64)| {
                let expert = routes.ids[i / out] as usize;
                (y + bias.map_or(0.0, |bias| f64::from(bias[expert * out + i % out]))) as f32
            };
            y.into_iter().enumerate().map(add).collect::<Vec<f32>>()
        };
        let [gate, up] = [0, 1].map(|i| product(&x, i, (width, ff, share)));
        let mut inner = vec![0.0; gate.len()];
        self.gate.apply(&gate, &up, &mut inner);
        if self.inner {
            call.outputs[1].copy_from_slice(&inner);
        }
        let outer = product(&inner, 2, (ff, width, 1));
        let shares: Vec<f32> = routes.weights.iter().map(|w| *w as f32).collect();
        let y = moe::combine(&outer, &shares, self.routing.used, width);
        call.outputs[0].iter_mut().zip(y).for_each(|(to, y)| *to = y as f32);
        if let Some(residual) = call.inputs.get(2) {
            call.outputs[0].iter_mut().zip(*residual).for_each(|(to, more)| *to += more);
        }
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let weights: Vec<usize> = (0..7).filter(|i| at.weight(*i).is_some()).collect();
        let trained = weights.iter().any(|i| at.wants(Wrt::Weight(*i)));
        give(at, Wrt::Input(2), |_| Ok(dy))?;
        let inputs = [at.input(0), at.input(1), dy];
        let op = ExpertsBackward { of: *self, weights: trained };
        let cotangents = at.record(op.into(), &inputs, &weights)?;
        let operands = [0, 1].map(Wrt::Input).into_iter();
        let operands = operands.chain(weights.into_iter().map(Wrt::Weight));
        for (operand, cotangent) in operands.zip(cotangents) {
            if at.wants(operand) {
                at.give(operand, cotangent)?;
            }
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let mut weights: Vec<usize> = (0..7).filter(|i| at.has_weight(*i)).collect();
        let mut moved = [false; 7];
        for i in weights.clone() {
            let tangent = at.weight_tangent(i);
            moved[i] = tangent.is_some();
            weights.extend(tangent);
        }
        let inputs = [at.input(0), at.input(1)];
        let mut operands = inputs.to_vec();
        for (i, input) in inputs.into_iter().enumerate() {
            operands.push(match at.tangent(i) {
                Some(tangent) => tangent,
                None => zeros(at, input)?,
            });
        }
        let dy = at.record(ExpertsTangent { of: *self, moved }.into(), &operands, &weights)?[0];
        at.add(0, dy)?;
        match at.has_input(2).then(|| at.tangent(2)).flatten() {
            Some(residual) => at.add(0, residual),
            None => Ok(()),
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::Experts
    }

    fn shares_type(&self, operand: Operand) -> bool {
        matches!(operand, Operand::Input(2) | Operand::Output(0))
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }

    fn experts(&self, inputs: &[Shape]) -> Option<(usize, usize)> {
        Some((self.routing.used, inputs.get(1)?.width))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_that_are_not_of_one_mixture_are_refused() {
        let routing = Routing { used: 2, odds: Odds::Softmax, normalised: true, scale: 1.0 };
        let op =
            Experts { routing, gate: Gate::Plain(Unary::Silu), weighs_inputs: false, inner: false };
        let inputs = |experts| [Shape::tokens(8), Shape::tokens(experts)];
        let fine: [&[usize]; 3] = [&[12, 8], &[12, 8], &[32, 3]];
        assert_eq!(op.infer(&inputs(4), &fine).unwrap(), [Shape::tokens(8)]);
        let seen = Experts { inner: true, ..op };
        assert_eq!(seen.infer(&inputs(4), &fine).unwrap()[1], Shape::tokens(2 * 3));
        for (experts, weights, expected) in [
            (5, fine, "rows of gate modulo experts"),
            (1, fine, "1 to 1 experts for each token"),
            (2000, fine, "1 to 1024 experts"),
            (4, [&[12, 8][..], &[12, 8], &[32, 4]], "experts: down"),
            (4, [&[12, 8][..], &[8, 8], &[32, 3]], "experts: up"),
        ] {
            let error = op.infer(&inputs(experts), &weights).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(op.infer(&inputs(4), &fine[..2]).is_err());
        let factored = |count: &'static [usize]| [fine[0], fine[1], fine[2], count];
        assert!(op.infer(&inputs(4), &factored(&[4])).is_ok());
        let error = op.infer(&inputs(4), &factored(&[3])).unwrap_err().to_string();
        assert!(error.contains("experts: factors"), "{error}");
    }
}
