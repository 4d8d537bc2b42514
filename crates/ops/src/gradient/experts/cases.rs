//! Cases and benchmarks of the kernels of a mixture's gradients.

use tile::case::{Bench, Bottleneck, Buffer, Case, Fill, Spec, noise};
use tile::dsl::Scalar;
use tile::launch::Numbers;

use super::Shares;
use super::kernels::{OuterTypes, gate_backward, moe_outer, pair_dots, route_backward};
use crate::Unary;
use crate::experts::{Gate, Odds, Routing};
use crate::gradient::matmul::MatmulTiling;
use crate::moe;
use crate::trial::{memory, near, random, scaled};

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "gate_backward", cases: gates, benches: gate_benches },
    Spec { name: "route_backward", cases: routes, benches: route_benches },
    Spec { name: "moe_outer", cases: outers, benches: outer_benches },
    Spec { name: "pair_dots", cases: dots, benches: dot_benches },
];

/// gpt-oss's.
const CLAMPED: Gate = Gate::Clamped { limit: 7.0, alpha: 1.702 };

fn gate_numbers(pairs: usize, ff: usize) -> Numbers {
    Numbers::new().with("pairs", pairs as u32).with("ff", ff as u32)
}

fn gate_case(
    (pairs, ff): (usize, usize),
    gate: Gate,
    biased: Option<(Scalar, [usize; 3])>,
    why: &str,
) -> Case {
    // So far apart that some lie beyond the limit.
    let operand = |seed| scaled(Scalar::F32, seed, pairs * ff, 9.0);
    let (gates, ups, back) = (operand(1), operand(2), random(Scalar::F32, 3, pairs * ff));
    let (mut of_gate, mut of_up, mut shares) = (Vec::new(), Vec::new(), vec![0f64; pairs]);
    let each = gates.to_f32().into_iter().zip(ups.to_f32()).zip(back.to_f64());
    for (i, ((g, u), back)) in each.enumerate() {
        let mut value = [0.0];
        gate.apply(&[g], &[u], &mut value);
        shares[i / ff] += back * f64::from(value[0]);
        let slopes = gate.slopes(f64::from(g), f64::from(u));
        of_gate.push((back * slopes[0]) as f32);
        of_up.push((back * slopes[1]) as f32);
    }
    let mut numbers = gate_numbers(pairs, ff);
    let mut buffers = vec![gates, ups, back, Buffer::zeros(Scalar::F32, pairs)];
    if let Some((scalar, [width, experts, share])) = biased {
        let ids: Vec<u32> = (0..pairs).map(|pair| (pair * 7 % experts) as u32).collect();
        let dy = random(scalar, 4, pairs.div_ceil(share) * width);
        let bias = random(Scalar::F32, 5, experts * width);
        let (slopes, shifts) = (dy.to_f64(), bias.to_f64());
        for (pair, sum) in shares.iter_mut().enumerate() {
            let slopes = &slopes[pair / share * width..][..width];
            let shifts = &shifts[ids[pair] as usize * width..][..width];
            *sum += slopes.iter().zip(shifts).map(|(a, b)| a * b).sum::<f64>();
        }
        for (name, n) in [("width", width), ("experts", experts), ("share", share)] {
            numbers.set(name, n as u32);
        }
        buffers.extend([Buffer::words(&ids), dy, bias]);
    }
    let shares: Vec<f32> = shares.into_iter().map(|share| share as f32).collect();
    let expected = [(0, of_gate), (1, of_up), (3, shares)];
    Case {
        kernel: gate_backward(gate, biased.map(|(scalar, _)| scalar)).record(),
        label: format!("{pairs} pairs, {ff}, {gate:?}: {why}"),
        numbers,
        buffers,
        expected: expected.map(|(i, want)| (i, near(Scalar::F32, &want))).to_vec(),
    }
}

fn gates() -> Vec<Case> {
    let plain = Gate::Plain;
    vec![
        gate_case((1, 1), plain(Unary::Silu), None, "one element"),
        gate_case((3, 40), plain(Unary::Silu), None, "short rows"),
        gate_case((2, 600), plain(Unary::GeluTanh), None, "rows longer than a group"),
        gate_case((5, 48), CLAMPED, None, "bounds"),
        gate_case((5, 48), Gate::Bounded { limit: 4.0 }, None, "bounds of both factors"),
        gate_case((6, 40), CLAMPED, Some((Scalar::BF16, [24, 4, 2])), "biases, two pairs a row"),
        gate_case(
            (4, 16),
            plain(Unary::GeluErf),
            Some((Scalar::F32, [300, 3, 4])),
            "biases longer than a group",
        ),
    ]
}

fn gate_benches() -> Vec<Bench> {
    let (pairs, ff) = (4096 * 4, 2880);
    let noise = || Fill::Noise(Scalar::F32, pairs * ff);
    let buffers = vec![noise(), noise(), noise(), Fill::Zeros(Scalar::F32, pairs)];
    let flops = 20 * (pairs * ff) as u64;
    let kernel = gate_backward(CLAMPED, None);
    vec![memory(kernel, "4096 tokens, 4 x 2880", gate_numbers(pairs, ff), buffers, flops)]
}

fn route_numbers([tokens, experts, used]: [usize; 3]) -> Numbers {
    let numbers = Numbers::new().with("tokens", tokens as u32).with("experts", experts as u32);
    numbers.with("top_k", used as u32)
}

fn route_case(
    (scalar, to): (Scalar, Scalar),
    sizes: [usize; 3],
    (odds, normalised): (Odds, bool),
    why: &str,
) -> Case {
    let [tokens, experts, used] = sizes;
    let scale = if odds == Odds::Sigmoid { 2.5 } else { 1.0 };
    let routing = Routing { used, odds, normalised, scale };
    let logits = scaled(scalar, tokens as u64 + 3, tokens * experts, 3.0);
    let shares = noise(tokens as u64 + 4, tokens * used);
    let ids = moe::route(&logits.to_f32(), experts, &routing).ids;
    let mut found = Vec::new();
    let rows = logits.to_f32();
    let rows = rows.chunks_exact(experts).zip(ids.chunks_exact(used));
    for ((scores, ids), shares) in rows.zip(shares.chunks_exact(used)) {
        let shares: Vec<f64> = shares.iter().copied().map(f64::from).collect();
        let of_scores = Shares::new(scores, ids, &routing).backward(&shares);
        found.extend(of_scores.into_iter().map(|slope| slope as f32));
    }
    let slots = experts.div_ceil(32) as u32;
    Case {
        kernel: route_backward(scalar, to, slots, routing).record(),
        label: format!("{tokens} tokens, {used} of {experts}, {scalar} to {to}: {why}"),
        numbers: route_numbers(sizes),
        buffers: vec![
            logits,
            Buffer::words(&ids),
            Buffer::floats(Scalar::F32, &shares),
            Buffer::zeros(to, tokens * experts),
        ],
        expected: vec![(3, near(to, &found))],
    }
}

fn routes() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let (one, all) = ((Odds::Softmax, true), (Odds::Softmax, false));
    let logistic = |normalised| (Odds::Sigmoid, normalised);
    let near = |normalised| (Odds::Near { jitter: 0.1 }, normalised);
    vec![
        route_case((F32, F32), [1, 128, 8], one, "lanes with four scores"),
        route_case((F32, BF16), [5, 64, 6], all, "a group and one token more"),
        route_case((F32, F32), [3, 8, 2], one, "fewer experts than lanes"),
        route_case((BF16, F32), [9, 60, 4], all, "experts that no simdgroup divides"),
        route_case((F16, F16), [2, 5, 5], all, "every expert chosen"),
        route_case((F32, F32), [5, 48, 4], logistic(true), "logistic, scaled"),
        route_case((F32, F32), [5, 48, 4], logistic(false), "logistic, as they are"),
        route_case((F32, F32), [7, 16, 2], near(false), "only scores near the best"),
        route_case((F32, F32), [4, 40, 3], near(true), "near scores, normalised"),
    ]
}

fn route_benches() -> Vec<Bench> {
    let sizes = [4096, 128, 8];
    let [tokens, experts, used] = sizes;
    let ids: Vec<u32> = (0..tokens * used).map(|i| (i * 15 % experts) as u32).collect();
    let buffers = vec![
        Fill::Noise(Scalar::F32, tokens * experts),
        Fill::These(Buffer::words(&ids)),
        Fill::Noise(Scalar::F32, tokens * used),
        Fill::Zeros(Scalar::BF16, tokens * experts),
    ];
    let routing = Routing { used, odds: Odds::Softmax, normalised: true, scale: 1.0 };
    let kernel = route_backward(Scalar::F32, Scalar::BF16, 4, routing);
    vec![memory(kernel, "4096 tokens, 8 of 128", route_numbers(sizes), buffers, 0)]
}

/// Sizes of an outer product of experts.
#[derive(Clone, Copy)]
struct OuterShape {
    pairs: usize,
    experts: usize,
    /// Pairs that read one row of either side.
    shares: [usize; 2],
    out: usize,
    width: usize,
}

impl OuterShape {
    fn numbers(&self) -> Numbers {
        let &OuterShape { pairs, experts, shares: [a, b], out, width } = self;
        let all = [("pairs", pairs), ("experts", experts), ("a_share", a), ("b_share", b)];
        let all = all.into_iter().chain([("out", out), ("width", width)]);
        all.fold(Numbers::new(), |numbers, (name, n)| numbers.with(name, n as u32))
    }

    /// Elements of either side.
    fn elements(&self) -> [usize; 2] {
        let [a, b] = self.shares.map(|share| self.pairs.div_ceil(share));
        [a * self.out, b * self.width]
    }
}

fn outer_case(shape: OuterShape, types: OuterTypes, weighed: bool, why: &str) -> Case {
    let OuterShape { pairs, experts, shares, out, width } = shape;
    let [a, b] = shape.elements();
    let (a, b) = (random(types.a, 3, a), types.b.map(|scalar| random(scalar, 4, b)));
    // One has none, and one most.
    let chosen = |pair: usize| if pair.is_multiple_of(3) { 1 } else { pair * 7 % experts };
    let ids: Vec<u32> = (0..pairs).map(|pair| chosen(pair).min(experts - 1) as u32).collect();
    let groups = moe::group(&ids, experts, 16);
    let weights = random(Scalar::F32, 5, pairs);
    let mut want = vec![0f64; experts * out * width];
    let (left, by) = (a.to_f64(), weights.to_f64());
    let right = b.as_ref().map_or(vec![1.0; pairs * width], Buffer::to_f64);
    for pair in 0..pairs {
        let [left_row, right_row] = shares.map(|share| pair / share);
        let by = if weighed { by[pair] } else { 1.0 };
        for o in 0..out {
            let slope = by * left[left_row * out + o];
            let to = (ids[pair] as usize * out + o) * width;
            for i in 0..width {
                want[to + i] += slope * right[right_row * width + i];
            }
        }
    }
    let want: Vec<f32> = want.into_iter().map(|y| y as f32).collect();
    let y = Buffer::zeros(Scalar::F32, want.len());
    let mut buffers = vec![a, y, Buffer::words(&groups.order), Buffer::words(&groups.offsets)];
    buffers.extend(b);
    buffers.extend(weighed.then_some(weights));
    Case {
        kernel: moe_outer(types, weighed, MatmulTiling::pick(out, width)).record(),
        label: format!("{pairs} pairs, {experts} experts, {out} x {width}: {why}"),
        numbers: shape.numbers(),
        buffers,
        expected: vec![(1, near(Scalar::F32, &want))],
    }
}

fn outers() -> Vec<Case> {
    use Scalar::{BF16, F32};
    let types = |a, b| OuterTypes { a, b: Some(b) };
    let bias = OuterTypes { a: BF16, b: None };
    let of = |pairs, experts, shares, out, width| OuterShape { pairs, experts, shares, out, width };
    vec![
        outer_case(of(1, 1, [1, 1], 1, 1), types(F32, F32), false, "one element"),
        outer_case(of(12, 5, [1, 2], 6, 40), types(F32, BF16), true, "fewer rows than a block"),
        outer_case(of(90, 4, [2, 1], 67, 20), types(BF16, F32), true, "several steps, ragged"),
        outer_case(of(50, 3, [1, 5], 33, 70), types(F32, F32), true, "blocks of both sides"),
        outer_case(of(40, 6, [4, 1], 48, 1), bias, true, "a bias"),
    ]
}

fn outer_benches() -> Vec<Bench> {
    let (pairs, experts, out, width) = (4096 * 8, 128, 768, 2048);
    let shape = OuterShape { pairs, experts, shares: [1, 8], out, width };
    let ids: Vec<u32> = (0..pairs).map(|i| (i * 15 % experts) as u32).collect();
    let groups = moe::group(&ids, experts, 16);
    let [a, b] = shape.elements();
    let types = OuterTypes { a: Scalar::F32, b: Some(Scalar::BF16) };
    let results = experts * out * width;
    vec![Bench {
        kernel: moe_outer(types, true, MatmulTiling::pick(out, width)).record(),
        label: "4096 tokens, 8 of 128, 768 x 2048".to_owned(),
        numbers: shape.numbers(),
        buffers: vec![
            Fill::Noise(Scalar::F32, a),
            Fill::Zeros(Scalar::F32, results),
            Fill::These(Buffer::words(&groups.order)),
            Fill::These(Buffer::words(&groups.offsets)),
            Fill::Noise(Scalar::BF16, b),
            Fill::Noise(Scalar::F32, pairs),
        ],
        bytes: (4 * a + 2 * b + 4 * results) as u64,
        flops: 2 * (pairs * out * width) as u64,
        roof: Bottleneck::Matrix,
    }]
}

fn dot_numbers([pairs, width, share]: [usize; 3]) -> Numbers {
    let numbers = Numbers::new().with("pairs", pairs as u32).with("width", width as u32);
    numbers.with("share", share as u32)
}

fn dot_case(scalar: Scalar, sizes: [usize; 3], why: &str) -> Case {
    let [pairs, width, share] = sizes;
    let a = random(Scalar::F32, 6, pairs * width);
    let b = random(scalar, 7, pairs.div_ceil(share) * width);
    let (left, right) = (a.to_f64(), b.to_f64());
    let row = |pair: usize| {
        let right = &right[pair / share * width..][..width];
        left[pair * width..][..width].iter().zip(right).map(|(a, b)| a * b).sum::<f64>() as f32
    };
    let want: Vec<f32> = (0..pairs).map(row).collect();
    Case {
        kernel: pair_dots(scalar).record(),
        label: format!("{pairs} x {width}, {share} a row: {why}"),
        numbers: dot_numbers(sizes),
        buffers: vec![a, b, Buffer::zeros(Scalar::F32, pairs)],
        expected: vec![(2, near(Scalar::F32, &want))],
    }
}

fn dots() -> Vec<Case> {
    vec![
        dot_case(Scalar::F32, [1, 1, 1], "one element"),
        dot_case(Scalar::BF16, [7, 40, 2], "two pairs a row"),
        dot_case(Scalar::F16, [3, 700, 1], "rows longer than a group"),
    ]
}

fn dot_benches() -> Vec<Bench> {
    let sizes = [4096, 5120, 1];
    let [pairs, width, _] = sizes;
    let buffers = vec![
        Fill::Noise(Scalar::F32, pairs * width),
        Fill::Noise(Scalar::BF16, pairs * width),
        Fill::Zeros(Scalar::F32, pairs),
    ];
    let flops = 2 * (pairs * width) as u64;
    vec![memory(pair_dots(Scalar::BF16), "4096 x 5120", dot_numbers(sizes), buffers, flops)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
