//! Cases and benchmarks of the prefill kernels: chunks of consecutive positions in the scenes of
//! [`super::cases`].

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, tolerance};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::cases::{Scene, Stores};
use super::prefill::{
    PrefillSchedule, PrefillTiling, ValueLayout, attention_dense, attention_prefill,
    attention_prefill_codes,
};
use super::wide::WideTiling;
use super::{AttentionForm, Scores};
use crate::trial::random;
use crate::tuned::{HOPPER, NVIDIA};

/// The tolerance of kernels that round softmax weights to a type before multiplying them with
/// values: the tolerance of a result in that type, and at least 1e-3.
fn flash(scalar: Scalar) -> f64 {
    tolerance(scalar).max(1e-3)
}

/// Chunks of consecutive positions: sequence, first position, count.
fn chunks(of: &[(u32, u32, u32)]) -> Vec<(u32, u32)> {
    let chunk = |&(sequence, first, count): &(u32, u32, u32)| {
        (first..first + count).map(move |p| (sequence, p))
    };
    of.iter().flat_map(chunk).collect()
}

impl Scene {
    /// Where each run of one sequence begins, and the end.
    fn starts(&self) -> Vec<u32> {
        let new = |i: &usize| *i == 0 || self.rows[*i].0 != self.rows[*i - 1].0;
        let mut starts: Vec<u32> = (0..self.rows.len()).filter(new).map(|i| i as u32).collect();
        starts.push(self.rows.len() as u32);
        starts
    }

    fn chunked(&self) -> Numbers {
        let starts = self.starts();
        let longest = starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(1);
        self.numbers()
            .with("batch", starts.len() as u32 - 1)
            .with("longest", longest)
            .with("tokens", self.rows.len() as u32)
    }

    fn prefill(&self, scalar: Scalar, kernel: Recipe, stores: Stores) -> Case {
        let q = self.queries(scalar);
        let expected = self.expected(&q, &stores);
        let len = q.len();
        let mut buffers = vec![q];
        buffers.extend(stores.buffers);
        buffers.extend(self.words());
        buffers.push(Buffer::words(&self.starts()));
        let y = buffers.len();
        buffers.push(Buffer::zeros(scalar, len));
        buffers.extend(self.vectors());
        Case {
            label: self.label("in chunks"),
            kernel: kernel.record(),
            numbers: self.chunked(),
            buffers,
            expected: vec![(y, Expected::Near(expected, flash(scalar)))],
        }
    }

    /// Over arrays of `length` keys per sequence.
    fn dense(
        &self,
        scalar: Scalar,
        layout: ValueLayout,
        length: usize,
        tiling: PrefillTiling,
    ) -> Case {
        let (q, d, sequences) = (self.queries(scalar), self.head_dim, self.lengths().len());
        let at = |sequence: usize, head: usize, p: usize| match layout {
            ValueLayout::HeadMajor => ((sequence * self.kv_heads + head) * length + p) * d,
            ValueLayout::KeyMajor => ((sequence * length + p) * self.kv_heads + head) * d,
        };
        let stores =
            [2, 3].map(|seed| random(scalar, seed, sequences * length * self.kv_heads * d));
        let [all_keys, all_values] = [stores[0].to_f32(), stores[1].to_f32()];
        let (queries, mut y) = (q.to_f32(), Vec::new());
        for (row, &(sequence, position)) in self.rows.iter().enumerate() {
            let end = position as usize + 1;
            let first = self.first(end);
            for h in 0..self.heads() {
                let start = |p| at(sequence as usize, h / self.group, p);
                let seen = first..end.min(length);
                let keys: Vec<&[f32]> = seen.clone().map(|p| &all_keys[start(p)..][..d]).collect();
                let values: Vec<&[f32]> = seen.map(|p| &all_values[start(p)..][..d]).collect();
                let scores = Scores { scale: self.scale(), cap: self.cap, sink: None, slope: 0.0 };
                let q = &queries[(row * self.heads() + h) * d..][..d];
                y.extend(scores.reference(q, &keys, &values));
            }
        }
        let [positions, ..] = self.words();
        let len = q.len();
        let [keys, values] = stores;
        let zeros = Buffer::zeros(scalar, len);
        Case {
            label: self.label(&format!("{length} keys, {layout:?}")),
            kernel: attention_dense(scalar, self.form(), tiling, layout).record(),
            numbers: self.chunked().with("length", length as u32),
            buffers: vec![q, keys, values, positions, Buffer::words(&self.starts()), zeros],
            expected: vec![(5, Expected::Near(y, flash(scalar)))],
        }
    }
}

/// The scenes that chunks are tested on, with the schedule of each.
fn scenes() -> Vec<(Scene, PrefillSchedule)> {
    let apart = apart_scenes().into_iter().map(|(s, tiling)| (s, PrefillSchedule::Apart(tiling)));
    let together = wide_scenes().into_iter();
    apart.chain(together.map(|(s, tiling)| (s, PrefillSchedule::Together(tiling)))).collect()
}

/// Rows that all simdgroups share.
fn wide_scenes() -> Vec<(Scene, WideTiling)> {
    let wide = |tiles, columns, stages| WideTiling { tiles, columns, stages };
    let ragged = || chunks(&[(0, 16, 17)]);
    let of = |why| Scene { why, rows: ragged(), kv_heads: 1, group: 1, ..Scene::default() };
    let only = |why| Scene { keys_only: true, group: 2, ..of(why) };
    let several = || chunks(&[(1, 0, 5), (0, 20, 40), (2, 63, 3)]);
    vec![
        (Scene { kv_heads: 2, group: 2, ..of("together, a tile of keys") }, wide(1, 1, 2)),
        (Scene { rows: several(), ..of("together, several sequences") }, wide(2, 2, 2)),
        (Scene { head_dim: 80, ..of("together, heads of 80 for two simdgroups") }, wide(1, 2, 2)),
        (Scene { head_dim: 272, ..of("together, heads of 272") }, wide(1, 1, 2)),
        (only("together, values that are keys"), wide(1, 2, 2)),
        (Scene { rows: several(), ..only("together, one stage of keys") }, wide(2, 1, 1)),
        (Scene { window: Some(20), rows: several(), ..of("together, a window") }, wide(1, 2, 2)),
        (Scene { window: Some(7), chunked: true, ..of("together, in chunks") }, wide(2, 1, 2)),
        (Scene { cap: Some(3.0), sinks: true, ..of("together, a bound and sinks") }, wide(1, 2, 2)),
        (Scene { slopes: true, group: 2, ..of("together, slopes") }, wide(1, 1, 2)),
    ]
}

/// Rows that each simdgroup has for itself.
fn apart_scenes() -> Vec<(Scene, PrefillTiling)> {
    let of = Scene::default;
    let small = |head_dim| PrefillTiling::pick(head_dim, 32 << 10, &NVIDIA.attention);
    // Two tiles per simdgroup, in the shared memory that every device has.
    let two = PrefillTiling { simds: 1, tiles: 2, keys: 32 };
    let ragged = || chunks(&[(0, 16, 17)]);
    let several = || chunks(&[(1, 0, 5), (0, 20, 40), (2, 63, 3)]);
    let one = |group| Scene { rows: ragged(), kv_heads: 1, group, ..of() };
    let wide =
        |head_dim, group, why| (Scene { why, head_dim, ..one(group) }, small(head_dim as u32));
    let three = |why| Scene { why, rows: several(), group: 1, ..of() };
    let beyond = Some(u32::MAX as usize);
    vec![
        (Scene { why: "one query, one key", rows: chunks(&[(0, 0, 1)]), ..one(1) }, small(64)),
        (Scene { why: "17 queries over 33 keys", rows: ragged(), ..of() }, small(64)),
        (Scene { why: "two tiles each", ..one(3) }, two),
        (three("several sequences"), small(64)),
        (Scene { why: "three row blocks", rows: chunks(&[(0, 3, 130)]), ..one(1) }, small(64)),
        wide(80, 2, "heads of 80"),
        wide(96, 2, "heads of 96"),
        wide(128, 4, "heads of 128"),
        wide(256, 1, "heads of 256"),
        (Scene { window: Some(1), ..three("a window of one") }, small(64)),
        (Scene { window: Some(20), ..three("a window over a block's edge") }, two),
        (Scene { why: "a window of more than there is", window: beyond, ..one(2) }, small(64)),
        (Scene { window: Some(7), chunked: true, ..three("chunks within tiles") }, small(64)),
        (Scene { window: Some(48), chunked: true, ..three("chunks of three tiles") }, two),
        (Scene { why: "bounded scores", cap: Some(2.0), ..one(7) }, two),
        (Scene { slopes: true, ..three("slopes") }, small(64)),
        (Scene { slopes: true, sinks: true, ..three("slopes and sinks, two tiles") }, two),
        (
            Scene {
                sinks: true,
                window: Some(9),
                cap: Some(4.0),
                group: 2,
                ..three("sinks, a window and a bound")
            },
            small(64),
        ),
        (
            Scene { why: "blocks of 256", block: 256, rows: chunks(&[(0, 250, 20)]), ..one(2) },
            small(64),
        ),
    ]
}

/// A function's results for the types that matrix units take.
fn every_half<X>(of: impl Fn(Scalar) -> Vec<X>) -> Vec<X> {
    [Scalar::F16, Scalar::BF16].into_iter().flat_map(of).collect()
}

pub(super) fn prefill() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(s, schedule): (Scene, PrefillSchedule)| {
            s.prefill(scalar, attention_prefill(scalar, s.form(), schedule), s.plain(scalar))
        };
        scenes().into_iter().map(case).collect()
    }
    every_half(of)
}

pub(super) fn prefill_codes() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        [Scalar::I8, Scalar::U32].into_iter().flat_map(|codes| coded(scalar, codes)).collect()
    }
    fn coded(scalar: Scalar, codes: Scalar) -> Vec<Case> {
        let case = |(s, schedule): (Scene, PrefillSchedule)| {
            let mut stores = if codes == Scalar::U32 { s.turbo() } else { s.q8_0() };
            // The matrix units take what was decoded in their own type.
            for values in [&mut stores.keys, &mut stores.values] {
                *values = Buffer::floats(scalar, values).to_f32();
            }
            s.prefill(scalar, attention_prefill_codes(scalar, codes, s.form(), schedule), stores)
        };
        let whole = |(s, _): &(Scene, PrefillSchedule)| s.head_dim.is_multiple_of(32);
        // Queries do not lie where keys come to, so that nothing else has been there.
        let why = "two tiles each, fewer keys than a block has";
        let rows = chunks(&[(0, 0, 5)]);
        let few = Scene { why, rows, kv_heads: 1, group: 1, ..Scene::default() };
        let few = (few, PrefillSchedule::Apart(PrefillTiling { simds: 1, tiles: 2, keys: 32 }));
        scenes().into_iter().filter(whole).step_by(2).chain([few]).map(case).collect()
    }
    every_half(of)
}

pub(super) fn dense() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let of = Scene::default;
        let two = chunks(&[(0, 0, 19), (1, 5, 20)]);
        let beyond = chunks(&[(0, 28, 12)]);
        let scenes = [
            (Scene { why: "two chunks", rows: two, ..of() }, 25),
            (Scene { why: "rows that see nothing", rows: beyond, window: Some(4), ..of() }, 30),
        ];
        let layouts = [ValueLayout::HeadMajor, ValueLayout::KeyMajor];
        let both = |(scene, length): &(Scene, usize)| {
            let tiling = PrefillTiling::pick(64, 32 << 10, &NVIDIA.attention);
            layouts.map(|layout| scene.dense(scalar, layout, *length, tiling))
        };
        scenes.iter().flat_map(both).collect()
    }
    every_half(of)
}

/// Key/value heads, query heads each, elements, tokens.
type Shape = (usize, usize, usize, usize);

/// Prompts from their start.
const PROMPTS: [Shape; 2] = [(8, 4, 128, 8192), (8, 4, 64, 8192)];

fn bench(
    scalar: Scalar,
    kernel: Recipe,
    stores: Vec<Fill>,
    (kv_heads, group, d, tokens): Shape,
    paged: bool,
) -> Bench {
    let (stride, heads) = (tokens.div_ceil(256), kv_heads * group);
    let words = |words: Vec<u32>| Fill::These(Buffer::words(&words));
    let n = tokens * heads * d;
    let size = |fill: &Fill| match fill {
        Fill::Noise(scalar, len) | Fill::Zeros(scalar, len) => (scalar.bytes() * len) as u64,
        Fill::These(buffer) => buffer.bytes.len() as u64,
    };
    let bytes = stores.iter().map(size).sum::<u64>() + 2 * (n * scalar.bytes()) as u64;
    let mut buffers = vec![Fill::Noise(scalar, n)];
    buffers.extend(stores);
    buffers.push(words((0..tokens as u32).collect()));
    if paged {
        buffers.push(words(vec![0; tokens]));
        buffers.push(words((0..stride as u32).rev().collect()));
    }
    buffers.push(words(vec![0, tokens as u32]));
    buffers.push(Fill::Zeros(scalar, n));
    let mut numbers = Numbers::new()
        .with("kv_heads", kv_heads as u32)
        .with_f32("scale", 1.0 / (d as f32).sqrt())
        .with("batch", 1)
        .with("longest", tokens as u32)
        .with("tokens", tokens as u32);
    match paged {
        true => numbers = numbers.with("stride", stride as u32).with("block", 256),
        false => numbers.set("length", tokens as u32),
    }
    Bench {
        kernel: kernel.record(),
        label: format!("{tokens} tokens, {heads} heads of {kv_heads} x {d}"),
        numbers,
        buffers,
        bytes,
        // What a causal mask leaves of both products.
        flops: 4 * (heads * d) as u64 * (tokens * (tokens + 1) / 2) as u64,
        roof: Bottleneck::Matrix,
    }
}

/// The form and tiling of a shape, and how many elements its keys have.
fn of_shape((kv_heads, group, d, tokens): Shape) -> (AttentionForm, PrefillTiling, usize) {
    let tiling = PrefillTiling::pick(d as u32, 227 << 10, &HOPPER.attention);
    (AttentionForm::plain(d as u32, group as u32), tiling, kv_heads * d * tokens)
}

pub(super) fn prefill_benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let one = |shape: Shape| {
            let (form, tiling, n) = of_shape(shape);
            let (stores, schedule) =
                (vec![Fill::Noise(scalar, n); 2], PrefillSchedule::Apart(tiling));
            bench(scalar, attention_prefill(scalar, form, schedule), stores, shape, true)
        };
        let wide = |(shape, keys_only): (Shape, bool)| {
            let (form, _, n) = of_shape(shape);
            let form = AttentionForm { keys_only, ..form };
            let stores = vec![Fill::Noise(scalar, n); 2];
            let schedule = PrefillSchedule::pick(form, 227 << 10, &HOPPER.attention);
            let kernel = attention_prefill(scalar, form, schedule.expect("room"));
            bench(scalar, kernel, stores, shape, true)
        };
        // Gemma 4's longest heads, and GLM-4.7-Flash's latents.
        let long = [((2, 4, 512, 8192), false), ((1, 20, 576, 8192), true)];
        PROMPTS.into_iter().map(one).chain(long.into_iter().map(wide)).collect()
    }
    every_half(of)
}

pub(super) fn prefill_q8_0_benches() -> Vec<Bench> {
    let one = |shape: Shape| {
        let (form, tiling, n) = of_shape(shape);
        let store = [Fill::Noise(Scalar::I8, n), Fill::Noise(Scalar::F16, n / 32)];
        let stores = [store.clone(), store].concat();
        let schedule = PrefillSchedule::Apart(tiling);
        let kernel = attention_prefill_codes(Scalar::BF16, Scalar::I8, form, schedule);
        bench(Scalar::BF16, kernel, stores, shape, true)
    };
    PROMPTS.into_iter().map(one).collect()
}

pub(super) fn dense_benches() -> Vec<Bench> {
    let one = |shape: Shape| {
        let (form, tiling, n) = of_shape(shape);
        let kernel = attention_dense(Scalar::BF16, form, tiling, ValueLayout::HeadMajor);
        let stores = vec![Fill::Noise(Scalar::BF16, n); 2];
        bench(Scalar::BF16, kernel, stores, shape, false)
    };
    PROMPTS.into_iter().map(one).collect()
}
