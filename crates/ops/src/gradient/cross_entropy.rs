//! The cross-entropy of a linear head: for each row, `count * (lse(logits) - logits[target])` in
//! nats, where `logits = scale (x W' + b)`, or `cap tanh(scale (x W' + b) / cap)`. Rows times
//! vocabulary are never there at once: devices work in chunks of rows.

use super::{Forward, Reverse, SumColumns, Wrt, give, mul, one};
use crate::operation::{Operation, ReferenceCall, Sharding};
use crate::sweep::{RowThreads, begin, lanes_of_both, load, require_lengths, require_vectors};
use crate::trial::{memory, near, scaled};
use crate::{Op, Rows, ScaleRows, Shape, arity, linear};
use formats::{Error, ErrorKind, Result};
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// `x[outputs, width]; head[vocab, width], (bias[vocab]) -> losses[outputs, 1], (dx), (dhead),
/// (dbias)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// Multiplies the product.
    pub scale: f32,
    /// Bounds the scaled product.
    pub cap: Option<f32>,
    /// Whether the gradient of the losses' sum with respect to `x` is an output.
    pub hidden: bool,
    /// Whether those with respect to the head, and to its bias if it has one, are; `hidden` is set
    /// then.
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

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let (width, head) = (call.widths[0], &call.weights[0]);
        let vocab = head.len() / width;
        let mut sums: Vec<Vec<f64>> =
            call.outputs.iter().map(|output| vec![0.0; output.len()]).collect();
        for (r, x) in call.inputs[0].chunks_exact(width).enumerate() {
            let row = call.picks[r] as usize;
            let (target, count) = (call.packed.targets[row], f64::from(call.packed.counts[row]));
            let product = |o: usize| {
                let sum = formats::dot(&head[o * width..][..width], x);
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

/// Threads of a row.
const THREADS: u32 = 512;

/// A chunk of rows of `products` `[rows, vocab]` of a head: their losses, from number `start` on,
/// and where `gradient` the losses' gradients with respect to the products, on the device. `picks`
/// has the token behind each row.
#[kernel]
pub fn cross_entropy(
    products: In<f32>,
    picks: In<u32>,
    targets: In<u32>,
    counts: In<f32>,
    losses: InOut<f32>,
    start: Arg<u32>,
    vocab: Const<u32>,
    scale: Const<f32>,
    gradient: Option<Scalar>,
    bounded: bool,
) {
    let team = RowThreads::Group;
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], THREADS);
    let size = dim("rows") * dim("vocab");
    require_vectors(&[("products", size.clone())]);
    require_lengths(&[
        ("picks", dim("outputs")),
        ("losses", dim("outputs")),
        ("targets", dim("tokens")),
        ("counts", dim("tokens")),
    ]);
    let slopes = gradient.map(|scalar| {
        require_vectors(&[("slopes", size)]);
        <Out>::stored("slopes", scalar)
    });
    let cap = bounded.then(|| Const::<f32>::declare("cap"));
    begin();
    let first = group_id() * vocab;
    let number = start + group_id();
    let token = picks.get(number);
    let (target, count) = (targets.get(token), counts.get(token));
    // A logit, and its derivative with respect to the product.
    let logit = |product: Val<f32>| match cap {
        Some(cap) => {
            let tanh = (product * scale / cap).tanh();
            (tanh * cap, scale * (1.0 - tanh * tanh))
        }
        None => (product * scale, scale),
    };
    let lanes = lanes_of_both(Scalar::F32, gradient.unwrap_or(Scalar::F32));
    // The lowest finite number: from minus infinity the first rescaling would be infinity minus
    // infinity.
    let (largest, sum) = (Var::new(f32::MIN), Var::new(0.0));
    team.sweep(vocab, lanes, |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(products, first + i, lanes)).collect();
        let logits: Vec<Val<f32>> = loaded.into_iter().flatten().map(|p| logit(p).0).collect();
        let before = largest.get();
        let now = logits.iter().fold(before, |largest, l| largest.max(*l));
        let kept = sum.get() * (before - now).exp();
        sum.set(logits.iter().fold(kept, |sum, l| sum + (*l - now).exp()));
        largest.set(now);
    });
    let peak = group_max(largest.get());
    let total = group_sum(sum.get() * (largest.get() - peak).exp());
    let lse = peak + total.ln();
    if thread_id().eq(0u32) {
        losses[number] = count * (lse - logit(products.get(first + target)).0);
    }
    if let Some(slopes) = slopes {
        team.sweep(vocab, lanes, |at, lanes| {
            for &i in at {
                let each = load(products, first + i, lanes).into_iter().zip(0u32..);
                let values: Vec<Val<f32>> = each
                    .map(|(product, k)| {
                        let (logit, slope) = logit(product);
                        let hit = select(Order::eq(i + k, target), 1.0, 0.0);
                        count * slope * ((logit - lse).exp() - hit)
                    })
                    .collect();
                slopes.set_vec(first + i, &values);
            }
        });
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "cross_entropy", cases, benches }];

/// The numbers of a launch for `rows` rows from `start` on, in a step of `tokens` tokens, `outputs`
/// of which have losses.
pub fn numbers(
    of: &CrossEntropy,
    vocab: usize,
    (start, rows): (usize, usize),
    (outputs, tokens): (usize, usize),
) -> Numbers {
    let numbers = Numbers::new()
        .with("rows", rows as u32)
        .with("start", start as u32)
        .with("outputs", outputs as u32)
        .with("tokens", tokens as u32)
        .with("vocab", vocab as u32)
        .with_f32("scale", of.scale);
    match of.cap {
        Some(cap) => numbers.with_f32("cap", cap),
        None => numbers,
    }
}

fn cases() -> Vec<Case> {
    let case = |vocab: usize, cap: Option<f32>, gradient: Option<Scalar>, why: &str| {
        let of = CrossEntropy::new(0.75, cap);
        let (picks, start, rows) = ([0u32, 2, 3, 5], 1, 3);
        let counts = [1.0, 0.0, 0.5, 1.0, 0.0, 2.0f32];
        let targets = [0, 1, 2, 3, 4, 5].map(|i| (i * 7919 % vocab) as u32);
        let products = scaled(Scalar::F32, vocab as u64, rows * vocab, 8.0);
        let (mut losses, mut slopes) = (vec![0f32; 4], Vec::new());
        for (r, products) in products.to_f32().chunks_exact(vocab).enumerate() {
            let token = picks[start + r] as usize;
            let (target, count) = (targets[token] as usize, f64::from(counts[token]));
            let each: Vec<_> = products.iter().map(|p| of.logit(f64::from(*p))).collect();
            let lse = each.iter().map(|(logit, _)| logit.exp()).sum::<f64>().ln();
            losses[start + r] = (count * (lse - each[target].0)) as f32;
            slopes.extend(each.iter().enumerate().map(|(o, (logit, slope))| {
                let hit = f64::from(u8::from(o == target));
                (count * slope * ((logit - lse).exp() - hit)) as f32
            }));
        }
        let counts = Buffer::floats(Scalar::F32, &counts);
        let mut buffers = vec![products, Buffer::words(&picks), Buffer::words(&targets), counts];
        buffers.push(Buffer::zeros(Scalar::F32, 4));
        let mut expected = vec![(4, near(Scalar::F32, &losses))];
        if let Some(scalar) = gradient {
            buffers.push(Buffer::zeros(scalar, rows * vocab));
            expected.push((5, near(scalar, &slopes)));
        }
        let to = gradient.map_or("losses alone".to_owned(), |scalar| format!("to {scalar}"));
        Case {
            kernel: cross_entropy(gradient, cap.is_some()).record(),
            label: format!("3 of 4 x {vocab} {to}, {why}"),
            numbers: numbers(&of, vocab, (start, rows), (4, 6)),
            buffers,
            expected,
        }
    };
    let (f32, bf16) = (Some(Scalar::F32), Some(Scalar::BF16));
    vec![
        case(7, None, f32, "less than a vector"),
        case(129, None, f32, "a width no vector divides"),
        case(128, None, None, "no gradient"),
        case(512, Some(5.0), f32, "bounded"),
        case(4104, None, bf16, "several vectors per thread and a remainder"),
        case(4096, Some(30.0), bf16, "bounded, rounded"),
    ]
}

fn benches() -> Vec<Bench> {
    let (rows, vocab) = (1024, 128_256);
    let words = |of: &dyn Fn(u32) -> u32| {
        Fill::These(Buffer::words(&(0..rows as u32).map(of).collect::<Vec<u32>>()))
    };
    let n = rows * vocab;
    let buffers = vec![
        Fill::Noise(Scalar::F32, n),
        words(&|i| i),
        words(&|_| 1),
        Fill::Noise(Scalar::F32, rows),
        Fill::Zeros(Scalar::F32, rows),
        Fill::Zeros(Scalar::BF16, n),
    ];
    let numbers = numbers(&CrossEntropy::new(1.0, None), vocab, (0, rows), (rows, rows));
    let kernel = cross_entropy(Some(Scalar::BF16), false);
    vec![memory(kernel, &format!("{rows} x {vocab}"), numbers, buffers, 12 * n as u64)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
