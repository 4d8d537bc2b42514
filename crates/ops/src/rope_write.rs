//! The fused work on q, k and v between projection and attention: per-head RMS norms of q and k
//! (where the model has them), rotation of both, and the cache write of k and v. Returns the
//! rotated q.

mod fused;

use formats::{Pairing, Result};
use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::launch::Numbers;

use self::fused::Fused;
use crate::kv_write::{Blocks, Cache, KvWrite, Plain, Step, require_blocks};
use crate::operation::{
    ActivationPrecision, CacheUse, Operand, Operation, ReferenceCall, Sharding, StateAccess,
};
use crate::rope::{Rope, frequencies};
use crate::sweep::require_vectors;
use crate::trial::{every_float, exact, memory, near, random};
use crate::{Shape, arity, expect};

/// The constants of the fused step: `q, k, v; (q_norm), (k_norm) -> q`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RopeWrite {
    /// Index of the cache layer.
    pub layer: usize,
    /// The rotation of q and k.
    pub rope: Rope,
    /// eps of the q norm, if there is one.
    pub q_norm: Option<f32>,
    /// eps of the k norm, if there is one.
    pub k_norm: Option<f32>,
}

impl Operation for RopeWrite {
    fn name(&self) -> &'static str {
        "rope_write"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        let norms = usize::from(self.q_norm.is_some()) + usize::from(self.k_norm.is_some());
        arity("rope_write", inputs, 3, weights, &[norms])?;
        for weight in weights {
            expect("rope_write", "norm weight", weight, &[self.rope.head_dim])?;
        }
        self.rope.check(inputs[0].width)?;
        self.rope.check(inputs[1].width)?;
        KvWrite { layer: self.layer }.infer(&inputs[1..], &[])?;
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let mut norms = call.weights.iter().map(Vec::as_slice);
        let q_norm = self.q_norm.and_then(|_| norms.next());
        let k_norm = self.k_norm.and_then(|_| norms.next());
        let (q, mut k) = (&mut call.outputs[0], call.inputs[1].to_vec());
        q.copy_from_slice(call.inputs[0]);
        reference(self, call.positions, q, q_norm, &mut k, k_norm);
        let values = call.inputs[2];
        call.cache[self.layer].write(call.positions, call.widths[1], &k, values);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Heads { weights: false }
    }

    fn overwrites(&self) -> Option<usize> {
        Some(0)
    }

    fn cache(&self) -> Option<CacheUse> {
        Some(CacheUse { layer: self.layer, access: StateAccess::Append { keys: 1 } })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn rope(&self) -> Option<&Rope> {
        Some(&self.rope)
    }

    /// `q`, `k` and `v` have one type; the turned `q` has attention's, since what else their
    /// product gives may have to stay f32.
    fn shares_type(&self, operand: Operand) -> bool {
        matches!(operand, Operand::Input(_))
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Rounds
    }
}

/// Norms (where there is a weight) and turns `q` and `k`, rows of heads, in place. What is left of
/// the step is [`crate::kv_write::reference`].
pub fn reference(
    write: &RopeWrite,
    positions: &[u32],
    q: &mut [f32],
    q_norm: Option<&[f32]>,
    k: &mut [f32],
    k_norm: Option<&[f32]>,
) {
    let each = |x: &mut [f32], weight: Option<&[f32]>, eps: Option<f32>| {
        if let Some(weight) = weight {
            let before = x.to_vec();
            crate::rms_norm::reference(&before, weight, eps.unwrap_or_default(), x);
        }
        write.rope.turn(positions, x.len() / positions.len(), x);
    };
    each(q, q_norm, write.q_norm);
    each(k, k_norm, write.k_norm);
}

/// Tokens that a simdgroup works on at once. For one token more are wasted; for prompts their loads
/// overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeSchedule {
    /// How many.
    pub tokens: u32,
}

/// For steps of a few tokens.
pub const DECODE: RopeSchedule = RopeSchedule { tokens: 1 };
/// For prompts.
pub const PROMPT: RopeSchedule = RopeSchedule { tokens: 4 };

/// The parameters of a kernel of this operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Which elements turn together.
    pub pairing: Pairing,
    /// Whether q has norms: a buffer `q_norm` `[head_dim]` and a constant `q_eps`, both last.
    pub q_norm: bool,
    /// Whether k has: `k_norm` and `k_eps`.
    pub k_norm: bool,
    /// How the work is shared.
    pub schedule: RopeSchedule,
}

/// The types of the fused step's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeTypes {
    /// Element type of q, k and v.
    pub x: Scalar,
    /// Element type of the rotated q.
    pub y: Scalar,
    /// Element type of the norms' weights.
    pub norm: Scalar,
}

/// The fused step with caches of a type, on the device. `y` may be the same buffer as `q` if they
/// are of one type. A simdgroup per head.
#[kernel]
pub fn rope_write(
    q: In<{ types.x }>,
    k: In<{ types.x }>,
    v: In<{ types.x }>,
    frequencies: In<f32>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    y: Out<{ types.y }>,
    keys: InOut<{ stored }>,
    values: InOut<{ stored }>,
    tokens: Arg<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    heads: Const<u32>,
    kv_heads: Const<u32>,
    head_dim: Const<u32>,
    pairs: Const<u32>,
    magnitude: Const<f32>,
    types: RopeTypes,
    stored: Scalar,
    variant: Variant,
) {
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    let step = Fused { q, k, v, y, tokens, cache, frequencies, heads, pairs, magnitude, variant };
    for name in ["keys", "values"] {
        require_vectors(&[(name, dim("kv_heads") * dim("head_dim"))]);
    }
    step.record(types.norm, Plain(keys), Plain(values));
}

/// The fused step with caches of codes, on the device: i8 is q8_0, u32 turbo. 32 must divide
/// `head_dim`.
#[kernel]
pub fn rope_write_codes(
    q: In<{ types.x }>,
    k: In<{ types.x }>,
    v: In<{ types.x }>,
    frequencies: In<f32>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    y: Out<{ types.y }>,
    key_codes: InOut<{ codes }>,
    key_scales: InOut<{ Scalar::F16 }>,
    value_codes: InOut<{ codes }>,
    value_scales: InOut<{ Scalar::F16 }>,
    tokens: Arg<u32>,
    stride: Arg<u32>,
    block: Const<u32>,
    heads: Const<u32>,
    kv_heads: Const<u32>,
    head_dim: Const<u32>,
    pairs: Const<u32>,
    magnitude: Const<f32>,
    types: RopeTypes,
    codes: Scalar,
    variant: Variant,
) {
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    let step = Fused { q, k, v, y, tokens, cache, frequencies, heads, pairs, magnitude, variant };
    require_blocks();
    step.record(
        types.norm,
        Blocks { codes: key_codes, scales: key_scales },
        Blocks { codes: value_codes, scales: value_scales },
    );
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "rope_write", cases, benches },
    Spec { name: "rope_write_codes", cases: cases_codes, benches: benches_codes },
];

/// One test: tokens, heads, kv heads, head dim, pairs, norms of q and k, and why.
type Shapes = (usize, usize, usize, usize, usize, bool, bool, &'static str);

const SHAPES: [Shapes; 7] = [
    (1, 4, 2, 128, 64, true, true, "one token, norms"),
    (8, 9, 3, 64, 32, false, false, "heads that do not fill a group"),
    (2, 3, 1, 128, 64, true, false, "a norm of q only"),
    (2, 3, 1, 128, 64, false, true, "a norm of k only"),
    (3, 2, 1, 160, 32, true, true, "a partial rotation, a head wider than a simdgroup's vectors"),
    (2, 2, 2, 96, 45, false, false, "pairs that no vector divides"),
    (2, 2, 2, 22, 7, true, true, "a head that no vector divides"),
];

/// Every shape with both pairings, and the schedule that fits the tokens; one token with both.
fn variants() -> impl Iterator<Item = (Shapes, Pairing, RopeSchedule)> {
    let schedules = |tokens: usize| match tokens {
        1 => vec![DECODE, PROMPT],
        2 => vec![DECODE],
        _ => vec![PROMPT],
    };
    SHAPES.into_iter().flat_map(move |shapes| {
        let pairings = [Pairing::Half, Pairing::Adjacent];
        pairings.into_iter().flat_map(move |pairing| {
            schedules(shapes.0).into_iter().map(move |schedule| (shapes, pairing, schedule))
        })
    })
}

/// The parts that both kinds of cases share: the kernel's inputs, and the expected q, k and v.
struct Trial {
    variant: Variant,
    label: String,
    numbers: Numbers,
    step: Step,
    /// q, k, v, frequencies, positions, sequences, table, y.
    inputs: Vec<Buffer>,
    /// Norm weights, bound last.
    norms: Vec<Buffer>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn trial(types: RopeTypes, shapes: Shapes, pairing: Pairing, schedule: RopeSchedule) -> Trial {
    let (tokens, heads, kv_heads, head_dim, pairs, q_norm, k_norm, why) = shapes;
    let step = Step::of(tokens);
    let rope = Rope { head_dim, pairing, frequencies: frequencies(pairs), magnitude: 1.25 };
    let eps = |norm: bool, eps: f32| norm.then_some(eps);
    let write = RopeWrite { layer: 0, rope, q_norm: eps(q_norm, 1e-6), k_norm: eps(k_norm, 1e-2) };
    let q = random(types.x, 1, tokens * heads * head_dim);
    let [k, v] = [2, 3].map(|seed| random(types.x, seed, tokens * kv_heads * head_dim));
    let [q_weight, k_weight] = [4, 5].map(|seed| random(types.norm, seed, head_dim));
    let (mut turned_q, mut turned_k) = (q.to_f32(), k.to_f32());
    let [qw, kw] = [&q_weight, &k_weight].map(Buffer::to_f32);
    let (qw, kw) = (q_norm.then_some(&qw[..]), k_norm.then_some(&kw[..]));
    reference(&write, &step.positions, &mut turned_q, qw, &mut turned_k, kw);
    let mut numbers = step
        .numbers(kv_heads, head_dim)
        .with("heads", heads as u32)
        .with("pairs", pairs as u32)
        .with_f32("magnitude", 1.25);
    for (name, eps) in [("q_eps", write.q_norm), ("k_eps", write.k_norm)] {
        if let Some(eps) = eps {
            numbers = numbers.with_f32(name, eps);
        }
    }
    let y = Buffer::zeros(types.y, q.len());
    let values = v.to_f32();
    let mut inputs = vec![q, k, v, Buffer::floats(Scalar::F32, &write.rope.frequencies)];
    inputs.extend(step.buffers());
    inputs.push(y);
    Trial {
        variant: Variant { pairing, q_norm, k_norm, schedule },
        label: format!("{tokens} x {heads} + {kv_heads} x {head_dim} {}, {why}", types.x),
        numbers,
        step,
        inputs,
        norms: [q_norm.then_some(q_weight), k_norm.then_some(k_weight)]
            .into_iter()
            .flatten()
            .collect(),
        q: turned_q,
        k: turned_k,
        v: values,
    }
}

fn cases() -> Vec<Case> {
    fn of(types: RopeTypes, stored: Scalar) -> Vec<Case> {
        let case = |(shapes, pairing, schedule): (Shapes, _, _)| {
            let trial = trial(types, shapes, pairing, schedule);
            let width = shapes.2 * shapes.3;
            let [keys, values] = [6, 7].map(|seed| random(stored, seed, Step::SLOTS * width));
            let expected = vec![
                (7, near(types.y, &trial.q)),
                (8, near(stored, &trial.step.after(&keys, &trial.k, width))),
                (9, exact(stored, &trial.step.after(&values, &trial.v, width))),
            ];
            let mut inputs = trial.inputs;
            inputs[7] = Buffer::zeros(types.y, inputs[7].len());
            let buffers = [inputs, vec![keys, values], trial.norms].concat();
            Case {
                kernel: rope_write(types, stored, trial.variant).record(),
                label: trial.label,
                numbers: trial.numbers,
                buffers,
                expected,
            }
        };
        variants().map(case).collect()
    }
    use Scalar::{BF16, F16, F32};
    let of = |[x, y, norm, stored]: [Scalar; 4]| of(RopeTypes { x, y, norm }, stored);
    let mut all = of([F32, F32, F32, F16]);
    all.extend(of([F32, F32, F32, F32]));
    all.extend(of([F16, F16, F32, F16]));
    all.extend(of([BF16, BF16, BF16, BF16]));
    all.extend(of([BF16, BF16, F32, F16]));
    all.extend(of([F32, F16, F32, F16]).into_iter().step_by(2));
    all
}

fn cases_codes() -> Vec<Case> {
    fn of(types: RopeTypes) -> Vec<Case> {
        [Scalar::I8, Scalar::U32].into_iter().flat_map(|codes| coded(types, codes)).collect()
    }
    fn coded(types: RopeTypes, codes: Scalar) -> Vec<Case> {
        let case = |(shapes, pairing, schedule): (Shapes, _, _)| {
            let trial = trial(types, shapes, pairing, schedule);
            let width = shapes.2 * shapes.3;
            let mut expected = vec![(7, near(types.y, &trial.q))];
            // A rotated key may differ in its last bit and round to the next code or scale; values
            // must not.
            let [stored, scales] = trial.step.after_codes(codes, &trial.k, width);
            if codes == Scalar::I8 {
                expected.push((8, Expected::Near(stored, 0.03)));
            }
            expected.push((9, Expected::Near(scales, 2e-3)));
            let [stored, scales] = trial.step.after_codes(codes, &trial.v, width);
            expected.push((10, Expected::Exact(stored)));
            expected.push((11, Expected::Exact(scales)));
            let mut buffers = trial.inputs;
            buffers[7] = Buffer::zeros(types.y, buffers[7].len());
            buffers.extend(Step::coded(codes, width));
            buffers.extend(trial.norms);
            Case {
                kernel: rope_write_codes(types, codes, trial.variant).record(),
                label: format!("{}, {codes}", trial.label),
                numbers: trial.numbers,
                buffers,
                expected,
            }
        };
        variants().filter(|(shapes, ..)| shapes.3 % 32 == 0).map(case).collect()
    }
    use Scalar::{BF16, F16, F32};
    let of = |[x, y]: [Scalar; 2]| of(RopeTypes { x, y, norm: F32 });
    let mut all = of([F32, F32]);
    all.extend(of([F16, F16]));
    all.extend(of([BF16, BF16]));
    all.extend(of([F32, F16]).into_iter().step_by(2));
    all
}

/// The buffers that both kinds of caches share, for a prompt of 4096 tokens, and its numbers.
fn prompt(scalar: Scalar) -> (Vec<Fill>, Numbers) {
    let (tokens, heads, kv_heads, head_dim) = SIZES;
    let words = |words: Vec<u32>| Fill::These(Buffer::words(&words));
    let buffers = vec![
        Fill::Noise(scalar, tokens * heads * head_dim),
        Fill::Noise(scalar, tokens * kv_heads * head_dim),
        Fill::Noise(scalar, tokens * kv_heads * head_dim),
        Fill::These(Buffer::floats(Scalar::F32, &frequencies(head_dim / 2))),
        words((0..tokens as u32).collect()),
        words(vec![0; tokens]),
        words((0..tokens as u32 / 256).rev().collect()),
        Fill::Zeros(scalar, tokens * heads * head_dim),
    ];
    let numbers = Numbers::new()
        .with("tokens", tokens as u32)
        .with("block", 256)
        .with("stride", tokens as u32 / 256)
        .with("heads", heads as u32)
        .with("kv_heads", kv_heads as u32)
        .with("head_dim", head_dim as u32)
        .with("pairs", head_dim as u32 / 2)
        .with_f32("magnitude", 1.0)
        .with_f32("q_eps", 1e-6)
        .with_f32("k_eps", 1e-6);
    (buffers, numbers)
}

/// Tokens, heads, kv heads, head dim of the benchmarks.
const SIZES: (usize, usize, usize, usize) = (4096, 32, 8, 128);

const VARIANTS: [Variant; 2] = [
    Variant { pairing: Pairing::Half, q_norm: false, k_norm: false, schedule: PROMPT },
    Variant { pairing: Pairing::Half, q_norm: true, k_norm: true, schedule: PROMPT },
];

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let bench = |variant: Variant| {
            let (mut buffers, numbers) = prompt(scalar);
            let n = SIZES.0 * SIZES.2 * SIZES.3;
            buffers.extend([Fill::Zeros(scalar, n), Fill::Zeros(scalar, n)]);
            if variant.q_norm {
                buffers.extend([Fill::Noise(scalar, 128), Fill::Noise(scalar, 128)]);
            }
            let kernel =
                rope_write(RopeTypes { x: scalar, y: scalar, norm: scalar }, scalar, variant);
            memory(kernel, "4096 x 32 + 8 x 128", numbers, buffers, 8 * n as u64)
        };
        VARIANTS.map(bench).to_vec()
    }
    every_float(of)
}

fn benches_codes() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let (mut buffers, numbers) = prompt(scalar);
        let n = SIZES.0 * SIZES.2 * SIZES.3;
        for _ in 0..2 {
            buffers.push(Fill::Zeros(Scalar::I8, n));
            buffers.push(Fill::Zeros(Scalar::F16, n / 32));
        }
        let kernel = rope_write_codes(
            RopeTypes { x: scalar, y: scalar, norm: scalar },
            Scalar::I8,
            VARIANTS[0],
        );
        vec![memory(kernel, "4096 x 32 + 8 x 128", numbers, buffers, 8 * n as u64)]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
