//! The cross-entropy of a linear head: for each row, `count * (lse(logits) - logits[target])` in nats, where `logits = scale (x W' +
//! b)`, or `cap tanh(scale (x W' + b) / cap)`. Rows times vocabulary are never there at once: devices work in chunks of rows.

use super::{Forward, Reverse, SumColumns, Wrt, give, mul, one};
use crate::operation::{Call, Operation, Sharding};
use crate::{Op, Rows, ScaleRows, Shape, arity, linear};
use formats::{Error, ErrorKind, Result};

/// `x[outputs, width]; head[vocab, width], (bias[vocab]) -> losses[outputs, 1], (dx), (dhead), (dbias)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// Multiplies the product.
    pub scale: f32,
    /// Bounds the scaled product.
    pub cap: Option<f32>,
    /// Whether the gradient of the losses' sum with respect to `x` is an output.
    pub hidden: bool,
    /// Whether those with respect to the head, and to its bias if it has one, are; `hidden` is set then.
    pub head: bool,
}

impl CrossEntropy {
    /// Its losses alone.
    pub fn new(scale: f32, cap: Option<f32>) -> CrossEntropy {
        CrossEntropy { scale, cap, hidden: false, head: false }
    }

    /// A logit of a product with the head, and its derivative.
    fn logit(&self, product: f64) -> (f64, f64) {
        let scale = f64::from(self.scale);
        match self.cap.map(f64::from) {
            Some(cap) => {
                let tanh = (scale * product / cap).tanh();
                (cap * tanh, scale * (1.0 - tanh * tanh))
            }
            None => (scale * product, scale),
        }
    }
}

impl Operation for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[1, 2])?;
        linear::check(self.name(), inputs[0].width, weights[0], weights.get(1).copied())?;
        if inputs[0].rows != Rows::Outputs {
            return Err(Error::new(self.name(), "selected rows", format!("{:?}", inputs[0].rows)));
        }
        let mut shapes = vec![Shape { width: 1, ..inputs[0] }];
        shapes.extend(self.hidden.then_some(inputs[0]));
        shapes.extend(weights.iter().filter(|_| self.head).map(|w| Shape::of_weight(w)));
        Ok(shapes)
    }

    fn reference(&self, call: &mut Call<'_>) {
        let (width, head) = (call.widths[0], &call.weights[0]);
        let vocab = head.len() / width;
        let mut sums: Vec<Vec<f64>> =
            call.outputs.iter().map(|output| vec![0.0; output.len()]).collect();
        for (r, x) in call.inputs[0].chunks_exact(width).enumerate() {
            let row = call.picks[r] as usize;
            let (target, count) = (call.packed.targets[row], f64::from(call.packed.counts[row]));
            let product = |o: usize| {
                let terms = head[o * width..][..width].iter().zip(x);
                let sum: f64 = terms.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                sum + call.weights.get(1).map_or(0.0, |bias| f64::from(bias[o]))
            };
            let logits: Vec<(f64, f64)> = (0..vocab).map(|o| self.logit(product(o))).collect();
            let top = logits.iter().map(|l| l.0).fold(f64::NEG_INFINITY, f64::max);
            let lse = top + logits.iter().map(|l| (l.0 - top).exp()).sum::<f64>().ln();
            sums[0][r] = count * (lse - logits[target as usize].0);
            for (o, (logit, slope)) in logits.into_iter().enumerate() {
                let hit = f64::from(u8::from(o == target as usize));
                let d = count * slope * ((logit - lse).exp() - hit);
                for i in 0..width {
                    if self.hidden {
                        sums[1][r * width + i] += d * f64::from(head[o * width + i]);
                    }
                    if self.head {
                        sums[2][o * width + i] += d * f64::from(x[i]);
                    }
                }
                if let Some(dbias) = sums.get_mut(3) {
                    dbias[o] += d;
                }
            }
        }
        for (output, sums) in call.outputs.iter_mut().zip(sums) {
            output.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(losses) = at.cotangent(0) else { return Ok(()) };
        let (x, ones) = (at.input(0), at.is_ones(losses));
        let head = [Wrt::Weight(0), Wrt::Weight(1)].iter().any(|of| at.wants(*of));
        if head && !ones {
            let expected = "a loss that is the sum of cross-entropies";
            return Err(Error::new(self.name(), expected, "one that weighs them again")
                .of(ErrorKind::Unsupported));
        }
        let weights: &[usize] = if at.weight(1).is_some() { &[0, 1] } else { &[0] };
        let op = CrossEntropy { hidden: true, head, ..*self };
        let found = at.record(Op::from(op), &[x], weights)?;
        at.replace(0, found[0]);
        give(at, Wrt::Input(0), |at| match ones {
            true => Ok(found[1]),
            false => one(at, ScaleRows, &[found[1], losses], &[]),
        })?;
        for (i, cotangent) in found.iter().skip(2).enumerate() {
            if at.wants(Wrt::Weight(i)) {
                at.give(Wrt::Weight(i), *cotangent)?;
            }
        }
        Ok(())
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        if at.weight_tangent(0).or(at.weight_tangent(1)).is_some() {
            let error = Error::new(self.name(), "a head that does not change", "its tangent");
            return Err(error.of(ErrorKind::Unsupported));
        }
        let Some(dx) = at.tangent(0) else { return Ok(()) };
        let weights: &[usize] = if at.has_weight(1) { &[0, 1] } else { &[0] };
        let op = CrossEntropy { hidden: true, head: false, ..*self };
        let x = at.input(0);
        let slope = at.record(Op::from(op), &[x], weights)?[1];
        let product = mul(at, slope, dx)?;
        let dy = one(at, SumColumns, &[product], &[])?;
        at.add(0, dy)
    }
}
