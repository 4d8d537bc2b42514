//! Appends keys and values to the cache: `cache[slot(t)] = k[t]`, rounded to the cache's element
//! type.
//!
//! The cache of a layer is a pool of blocks of slots; a slot holds one token,
//! `[kv_heads, head_dim]`. A sequence's table names its blocks in order, so a token's slot follows
//! from its sequence and position alone: [`Cache`]. A table shorter than the sequence is a ring,
//! which is how sliding windows are kept.
//!
//! Elements are f16, bf16 or f32; or q8_0, ggml's 8-bit blocks in two arrays: for 32 elements a
//! scale `d = max|x| / 127` in f16 and codes `round(x / d)` in i8; or turbo, ggml's q4_0 of heads
//! that a Hadamard matrix turned ([`CacheType::rotate`]), eight codes to a u32, the first in its
//! lowest bits.

use formats::quant::{BlockFormat, Q4_0, Q8_0};
use formats::{CacheType, Result};
use half::f16;
use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Extent, Mode, Numbers, Requirement};

use crate::math::round_away;
use crate::operation::{
    ActivationPrecision, CacheUse, Operation, ReferenceCall, Sharding, StateAccess,
};
use crate::sweep::{RowThreads, begin, lanes, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, exact, memory, random, scaled};
use crate::{Shape, alike, arity};

/// `k, v ->` nothing, or `k ->` nothing where keys are the values, too: `[tokens, kv_heads *
/// head_dim]` each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KvWrite {
    /// Index of the cache layer.
    pub layer: usize,
}

impl Operation for KvWrite {
    fn name(&self) -> &'static str {
        "kv_write"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        match inputs {
            [_] => arity("kv_write", inputs, 1, weights, &[0])?,
            _ => {
                arity("kv_write", inputs, 2, weights, &[0])?;
                alike("kv_write", inputs)?;
            }
        }
        Ok(vec![])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [keys, values] = KvWrite::keys_values(&call.inputs);
        call.cache[self.layer].write(call.positions, call.widths[0], keys, values);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Heads { weights: false }
    }

    fn cache(&self) -> Option<CacheUse> {
        Some(CacheUse { layer: self.layer, access: StateAccess::Append { keys: 0 } })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Queries
    }
}

impl KvWrite {
    /// The keys and the values among its inputs: keys that are alone are both.
    pub fn keys_values<T: Copy>(inputs: &[T]) -> [T; 2] {
        [inputs[0], inputs[inputs.len() - 1]]
    }
}

/// Where tokens lie in the block pool: what a kernel that writes or reads the cache binds, and the
/// addresses.
#[derive(Debug, Clone, Copy)]
pub struct Cache {
    /// `[sequences, stride]`: the pool's block that holds each block of positions.
    pub table: In<u32>,
    /// `[tokens]`: the position of each token of the step in its sequence.
    pub positions: In<u32>,
    /// `[tokens]`: the row of `table` of each token of the step.
    pub sequences: In<u32>,
    /// Slots per block.
    pub block: Val<u32>,
    /// Blocks per row of `table`.
    pub stride: Val<u32>,
    /// Heads per slot.
    pub kv_heads: Val<u32>,
    /// Elements per head.
    pub head_dim: Val<u32>,
}

impl Cache {
    /// The slot of token `token` of this step.
    #[track_caller]
    pub fn slot(&self, token: Val<u32>) -> Val<u32> {
        self.slot_at(self.sequences.get(token), self.positions.get(token))
    }

    /// The slot of a position of a sequence:
    /// `table[sequence, (position / block) % stride] * block + position % block`.
    #[track_caller]
    pub fn slot_at(&self, sequence: Val<u32>, position: Val<u32>) -> Val<u32> {
        let entry = sequence * self.stride + (position / self.block) % self.stride;
        self.table.get(entry) * self.block + position % self.block
    }

    /// The first element of a head in a slot, in arrays `[slots, kv_heads, head_dim]`: f16, bf16,
    /// f32, or codes of q8_0.
    #[track_caller]
    pub fn element(&self, slot: Val<u32>, head: impl IntoVal<u32>) -> Val<u32> {
        (slot * self.kv_heads + head.val()) * self.head_dim
    }

    /// The first scale of a head in a slot, in arrays `[slots, kv_heads, head_dim / 32]`: the f16
    /// scales of q8_0.
    #[track_caller]
    pub fn scale(&self, slot: Val<u32>, head: impl IntoVal<u32>) -> Val<u32> {
        (slot * self.kv_heads + head.val()) * (self.head_dim / 32u32)
    }
}

/// The slot of a position of a sequence.
pub fn slot(table: &[u32], stride: usize, block: usize, sequence: usize, position: usize) -> usize {
    table[sequence * stride + position / block % stride] as usize * block + position % block
}

/// Writes row `t` of `x` `[tokens, width]` to slot `slots[t]` of `cache` `[slots, width]`.
pub fn reference(x: &[f32], slots: &[usize], width: usize, cache: &mut [f32]) {
    for (row, &slot) in x.chunks_exact(width).zip(slots) {
        cache[slot * width..][..width].copy_from_slice(row);
    }
}

/// Codes and scales of rows of 32-element blocks, one after the other, as ggml's q8_0 has them.
pub fn reference_q8_0(x: &[f32]) -> (Vec<i8>, Vec<f16>) {
    let (mut codes, mut scales) = (vec![], vec![]);
    for x in x.chunks_exact(32) {
        let mut block = [0; 34];
        Q8_0::encode(x, &mut block);
        scales.push(f16::from_le_bytes([block[0], block[1]]));
        codes.extend(block[2..].iter().map(|&b| b as i8));
    }
    (codes, scales)
}

/// Words of eight codes, and scales, of rows of 32-element blocks, one after the other, as turbo
/// has them.
pub fn reference_turbo(x: &[f32]) -> (Vec<u32>, Vec<f16>) {
    let (mut words, mut scales) = (vec![], vec![]);
    for x in x.chunks_exact(32) {
        let (mut turned, mut block) = (x.to_vec(), [0; 18]);
        CacheType::rotate(&mut turned);
        Q4_0::encode(&turned, &mut block);
        scales.push(f16::from_le_bytes([block[0], block[1]]));
        let code = |i: usize| u32::from(block[2 + i % 16] >> (i / 16 * 4) & 15);
        words.extend((0..4).map(|w| (0..8).fold(0, |word, i| word | code(8 * w + i) << (4 * i))));
    }
    (words, scales)
}

/// One of a layer's two caches, as a kernel writes it.
pub(crate) trait Target: Copy {
    /// Where `keep` holds, writes elements `i` on of a token's row, which begins at `slot`. All
    /// lanes of the simdgroup take part and hand over as many elements, 1, 4 or 8, lane after lane.
    fn put(self, cache: &Cache, slot: Val<u32>, i: Val<u32>, values: &[Val<f32>], keep: Val<bool>);
}

/// `[slots, kv_heads, head_dim]` numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain(pub(crate) InOut);

impl Target for Plain {
    #[track_caller]
    fn put(self, cache: &Cache, slot: Val<u32>, i: Val<u32>, values: &[Val<f32>], keep: Val<bool>) {
        let at = cache.element(slot, 0u32) + i;
        test(keep).then(|| self.0.set_vec(at, values)).otherwise(|| {});
    }
}

/// `[slots, kv_heads, head_dim]` codes, of i8 or eight to a u32, and
/// `[slots, kv_heads, head_dim / 32]` scales.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks {
    pub(crate) codes: InOut,
    pub(crate) scales: InOut,
}

impl Target for Blocks {
    #[track_caller]
    fn put(self, cache: &Cache, slot: Val<u32>, i: Val<u32>, values: &[Val<f32>], keep: Val<bool>) {
        if self.codes.scalar() == Scalar::U32 {
            return self.put_turbo(cache, slot, i, values, keep);
        }
        let lanes = 32 / values.len() as u8;
        let own = values.iter().fold(0.0f32.val(), |most, v| most.max(v.abs()));
        let masks = (0..8).map(|bit| 1 << bit).take_while(|mask| *mask < lanes);
        let most = masks.fold(own, |most, mask| most.max(shuffle_xor(most, mask)));
        let d = most / 127.0;
        // A block of zeros has no inverse; its codes are zero.
        let inverse = select(Order::gt(d, 0.0), 1.0f32 / d, 0.0);
        let codes: Vec<Val<Raw>> =
            values.iter().map(|&v| round_away(v * inverse).to(self.codes.scalar())).collect();
        let (code, scale) = (cache.element(slot, 0u32) + i, cache.scale(slot, 0u32) + i / 32u32);
        let write = || {
            self.codes.set_raw_vec(code, &codes);
            let first = || self.scales.set(scale, d);
            test(Order::eq(lane_id() % u32::from(lanes), 0u32)).then(first).otherwise(|| {});
        };
        test(keep).then(write).otherwise(|| {});
    }
}

impl Blocks {
    /// [`Target::put`] of turbo: lanes turn a block together, agree on its scale, and bring eight
    /// codes to a word.
    #[track_caller]
    fn put_turbo(
        self,
        cache: &Cache,
        slot: Val<u32>,
        i: Val<u32>,
        values: &[Val<f32>],
        keep: Val<bool>,
    ) {
        let len = values.len() as u32;
        let lanes = 32 / len;
        let turned = turn(values);
        let masks =
            |below: u32| (0..5).map(|bit| 1u8 << bit).take_while(move |m| u32::from(*m) < below);
        let own = turned.iter().fold(0.0f32.val(), |most, v| most.max(v.abs()));
        let most = masks(lanes).fold(own, |most, mask| most.max(shuffle_xor(most, mask)));
        // The first of the greatest magnitude becomes code 0: its place, and whether it is
        // negative.
        let place = lane_id() % lanes * len;
        let first = (0..len).zip(&turned).fold(u32::MAX.val(), |first, (j, v)| {
            let sign = select(Order::lt(*v, 0.0), 1u32, 0u32);
            first.min(select(v.abs().eq(most), (place + j) * 2u32 + sign, u32::MAX))
        });
        let first = masks(lanes).fold(first, |first, mask| first.min(shuffle_xor(first, mask)));
        let d = select(Order::ne(first & 1u32, 0u32), -most, most) / -8.0;
        let inverse = select(Order::gt(most, 0.0), 1.0f32 / d, 0.0);
        let word = (0..len).zip(&turned).fold(0u32.val(), |word, (j, v)| {
            let code = (*v * inverse + 8.5).cast::<u32>().min(15u32);
            word | code << ((place + j) % 8u32 * 4u32)
        });
        let shared = (8 / len).max(1);
        let word = masks(shared).fold(word, |word, mask| word | shuffle_xor(word, mask));
        let (code, scale) = (cache.element(slot, 0u32) + i, cache.scale(slot, 0u32) + i / 32u32);
        let write = || {
            let set = || self.codes.set_raw(code / 8u32, word.to(self.codes.scalar()));
            test(Order::eq(lane_id() % shared, 0u32)).then(set).otherwise(|| {});
            let first = || self.scales.set(scale, d);
            test(Order::eq(lane_id() % lanes, 0u32)).then(first).otherwise(|| {});
        };
        test(keep).then(write).otherwise(|| {});
    }
}

/// [`CacheType::rotate`] of a block whose elements lanes hold in turn, as many each.
#[track_caller]
pub(crate) fn turn(values: &[Val<f32>]) -> Vec<Val<f32>> {
    let mut x = values.to_vec();
    let len = x.len();
    for step in [1, 2, 4, 8, 16] {
        if step < len {
            for i in (0..len).filter(|i| i & step == 0) {
                (x[i], x[i + step]) = (x[i] + x[i + step], x[i] - x[i + step]);
            }
        } else {
            let mask = (step / len) as u8;
            let upper = Order::ne(lane_id() & u32::from(mask), 0u32);
            for v in &mut x {
                let other = shuffle_xor(*v, mask);
                *v = select(upper, other - *v, *v + other);
            }
        }
    }
    x.into_iter().map(|v| v * CacheType::ROTATION).collect()
}

/// Turns each 32 of `n` elements in place ([`CacheType::rotate`]): queries, and what is attended,
/// beside a cache of turbo.
#[kernel]
pub fn rotate_blocks(x: InOut<{ scalar }>, n: Arg<u32>, scalar: Scalar) {
    launch(Mode::Row, [dim("n").ceil_div(THREADS), fixed(1), fixed(1)], THREADS);
    require(Requirement::Length("x".to_owned(), dim("n")));
    require(Requirement::Divisible(dim("n"), 32));
    begin();
    // A simdgroup turns a block.
    let first = (group_id() * (THREADS / 32) + simd_id()) * 32u32;
    if first < n {
        let i = first + lane_id();
        let turned = turn(&[x.get(i).f32()])[0];
        x.set(i, turned);
    }
}

/// Threads of a group that turns queries.
const THREADS: u32 = 256;

/// Elements of a token's row.
fn row() -> Extent {
    dim("kv_heads") * dim("head_dim")
}

/// The contract of what a kernel that writes the cache reads besides.
pub(crate) fn require_step() {
    require(Requirement::Length("positions".to_owned(), dim("tokens")));
    require(Requirement::Length("sequences".to_owned(), dim("tokens")));
}

/// The contract of caches of codes.
pub(crate) fn require_blocks() {
    require(Requirement::Divisible(dim("head_dim"), 32));
    for name in ["key_codes", "key_scales", "value_codes", "value_scales"] {
        require(Requirement::Aligned(name.to_owned(), 16));
    }
}

/// Appends rows `[tokens, kv_heads * head_dim]` of `k` and `v` to caches of `C`, on the device.
#[kernel]
pub fn kv_write(
    k: In<{ from }>,
    v: In<{ from }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    keys: InOut<{ to }>,
    values: InOut<{ to }>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    head_dim: Const<u32>,
    from: Scalar,
    to: Scalar,
) {
    launch(Mode::Row, [dim("tokens"), fixed(1), fixed(1)], 128);
    let size = dim("tokens") * row();
    require_vectors(&[("k", size.clone()), ("v", size), ("keys", row()), ("values", row())]);
    require_step();
    begin();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    let width = kv_heads * head_dim;
    let (from, to) = (group_id() * width, cache.element(cache.slot(group_id()), 0u32));
    RowThreads::Group.sweep(width, lanes_of_both(k.scalar(), keys.scalar()), |at, lanes| {
        let read = |&i: &Val<u32>| (load(k, from + i, lanes), load(v, from + i, lanes));
        let loaded: Vec<_> = at.iter().map(read).collect();
        for (&i, (k, v)) in at.iter().zip(loaded) {
            keys.set_vec(to + i, &k);
            values.set_vec(to + i, &v);
        }
    });
}

/// Appends rows `[tokens, kv_heads * head_dim]` of `k` and `v` to caches of codes, on the device:
/// i8 is q8_0, u32 turbo. 32 must divide `head_dim`.
#[kernel]
pub fn kv_write_codes(
    k: In<{ from }>,
    v: In<{ from }>,
    positions: In<u32>,
    sequences: In<u32>,
    table: In<u32>,
    key_codes: InOut<{ codes }>,
    key_scales: InOut<{ Scalar::F16 }>,
    value_codes: InOut<{ codes }>,
    value_scales: InOut<{ Scalar::F16 }>,
    stride: Arg<u32>,
    block: Const<u32>,
    kv_heads: Const<u32>,
    head_dim: Const<u32>,
    from: Scalar,
    codes: Scalar,
) {
    launch(Mode::Row, [dim("tokens"), fixed(1), fixed(1)], 128);
    let size = dim("tokens") * row();
    require_vectors(&[("k", size.clone()), ("v", size)]);
    require_step();
    require_blocks();
    begin();
    let cache = Cache { table, positions, sequences, block, stride, kv_heads, head_dim };
    let keys = Blocks { codes: key_codes, scales: key_scales };
    let values = Blocks { codes: value_codes, scales: value_scales };
    let width = kv_heads * head_dim;
    let (from, slot) = (group_id() * width, cache.slot(group_id()));
    let lanes = lanes(k.scalar());
    let wide = u32::from(lanes);
    // Lanes exchange maxima, so all of them go on until the last has nothing left.
    for start in range(0u32, width).step(threads() * wide) {
        let i = start + thread_id() * wide;
        let keep = i < width;
        let i = select(keep, i, 0u32);
        let (k, v) = (load(k, from + i, lanes), load(v, from + i, lanes));
        keys.put(&cache, slot, i, &k, keep);
        values.put(&cache, slot, i, &v, keep);
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "kv_write", cases, benches },
    Spec { name: "kv_write_codes", cases: cases_codes, benches: benches_codes },
    Spec { name: "rotate_blocks", cases: rotations, benches: rotation_benches },
];

/// A step and a block pool to try it on: three sequences, rings of four blocks of eight slots,
/// scattered over the pool.
pub(crate) struct Step {
    pub(crate) positions: Vec<u32>,
    pub(crate) sequences: Vec<u32>,
    pub(crate) table: Vec<u32>,
}

impl Step {
    pub(crate) const BLOCK: usize = 8;
    pub(crate) const STRIDE: usize = 4;
    /// Slots of the pool: one block more than the sequences have.
    pub(crate) const SLOTS: usize = 13 * Step::BLOCK;

    /// A step of `tokens` tokens: prompts across a block's end, past a ring's end, and single
    /// tokens.
    pub(crate) fn of(tokens: usize) -> Step {
        let all = [(0, 6), (0, 7), (0, 8), (2, 31), (2, 32), (1, 1_000_000), (0, 9), (1, 3)];
        Step {
            positions: all.iter().take(tokens).map(|a| a.1).collect(),
            sequences: all.iter().take(tokens).map(|a| a.0).collect(),
            table: (0..12).map(|i| (i * 5 + 3) % 13).collect(),
        }
    }

    /// The slot of each token.
    pub(crate) fn slots(&self) -> Vec<usize> {
        let pairs = self.sequences.iter().zip(&self.positions);
        pairs
            .map(|(&s, &p)| slot(&self.table, Step::STRIDE, Step::BLOCK, s as usize, p as usize))
            .collect()
    }

    /// Positions, sequences and table, in binding order.
    pub(crate) fn buffers(&self) -> [Buffer; 3] {
        [&self.positions, &self.sequences, &self.table].map(|words| Buffer::words(words))
    }

    /// The numbers of a launch.
    pub(crate) fn numbers(&self, kv_heads: usize, head_dim: usize) -> Numbers {
        numbers(self.positions.len(), Step::BLOCK, Step::STRIDE, kv_heads, head_dim)
    }

    /// A plain cache's content after it held `before` and rows `x` were written.
    pub(crate) fn after(&self, before: &Buffer, x: &[f32], width: usize) -> Vec<f32> {
        let mut cache = before.to_f32();
        reference(x, &self.slots(), width, &mut cache);
        cache
    }

    /// Codes, of a type, and scales of a cache of zeros after rows `x` were written.
    pub(crate) fn after_codes(&self, codes: Scalar, x: &[f32], width: usize) -> [Vec<f64>; 2] {
        let (codes, scales): (Vec<f64>, _) = match codes {
            Scalar::U32 => {
                let (words, scales) = reference_turbo(x);
                (words.into_iter().map(f64::from).collect(), scales)
            }
            _ => {
                let (codes, scales) = reference_q8_0(x);
                (codes.into_iter().map(f64::from).collect(), scales)
            }
        };
        let scales: Vec<f64> = scales.into_iter().map(f16::to_f64).collect();
        [codes, scales].map(|rows| {
            let each = rows.len() * width / x.len();
            let mut cache = vec![0.0; Step::SLOTS * each];
            for (t, slot) in self.slots().into_iter().enumerate() {
                cache[slot * each..][..each].copy_from_slice(&rows[t * each..][..each]);
            }
            cache
        })
    }

    /// The buffers of a cache of codes, which holds zeros.
    pub(crate) fn coded(codes: Scalar, width: usize) -> Vec<Buffer> {
        let count = Step::SLOTS * width / if codes == Scalar::U32 { 8 } else { 1 };
        let scales = || Buffer::zeros(Scalar::F16, Step::SLOTS * width / 32);
        let codes = || Buffer::zeros(codes, count);
        vec![codes(), scales(), codes(), scales()]
    }
}

fn numbers(tokens: usize, block: usize, stride: usize, heads: usize, head_dim: usize) -> Numbers {
    Numbers::new()
        .with("tokens", tokens as u32)
        .with("block", block as u32)
        .with("stride", stride as u32)
        .with("kv_heads", heads as u32)
        .with("head_dim", head_dim as u32)
}

fn cases() -> Vec<Case> {
    fn of(from: Scalar, to: Scalar) -> Vec<Case> {
        let case = |(tokens, kv_heads, head_dim, why): (usize, usize, usize, &str)| {
            let (step, width) = (Step::of(tokens), kv_heads * head_dim);
            let (k, v) = (random(from, 1, tokens * width), random(from, 2, tokens * width));
            let (keys, values) =
                (random(to, 3, Step::SLOTS * width), random(to, 4, Step::SLOTS * width));
            let expected = vec![
                (5, exact(to, &step.after(&keys, &k.to_f32(), width))),
                (6, exact(to, &step.after(&values, &v.to_f32(), width))),
            ];
            let mut buffers = vec![k, v];
            buffers.extend(step.buffers());
            buffers.extend([keys, values]);
            Case {
                kernel: kv_write(from, to).record(),
                label: format!("{tokens} x {kv_heads} x {head_dim} {from} to {to}, {why}"),
                numbers: step.numbers(kv_heads, head_dim),
                buffers,
                expected,
            }
        };
        [
            (1, 8, 128, "one token"),
            (8, 2, 64, "sequences, blocks and a ring's turn"),
            (3, 3, 43, "a row no vector divides"),
            (2, 1, 1, "one element"),
        ]
        .into_iter()
        .map(case)
        .collect()
    }
    fn all(from: Scalar) -> Vec<Case> {
        let mut all = of(from, Scalar::F16);
        all.extend(of(from, Scalar::BF16));
        all.extend(of(from, Scalar::F32));
        all
    }
    every_float(all)
}

/// Blocks turned, of every type.
fn rotations() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |n: usize| {
            let x = random(scalar, 7, n);
            let mut turned = x.to_f32();
            CacheType::rotate(&mut turned);
            Case {
                kernel: rotate_blocks(scalar).record(),
                label: format!("{n} {scalar}"),
                numbers: Numbers::new().with("n", n as u32),
                buffers: vec![x],
                expected: vec![(0, exact(scalar, &turned))],
            }
        };
        [32, 352].map(case).to_vec()
    }
    every_float(of)
}

fn rotation_benches() -> Vec<Bench> {
    let n = 4096 * 4096;
    let numbers = Numbers::new().with("n", n as u32);
    let buffers = vec![Fill::Noise(Scalar::F16, n)];
    vec![memory(rotate_blocks(Scalar::F16), "4096 x 4096", numbers, buffers, 6 * n as u64)]
}

fn cases_codes() -> Vec<Case> {
    fn of(from: Scalar) -> Vec<Case> {
        [Scalar::I8, Scalar::U32].into_iter().flat_map(|codes| coded(from, codes)).collect()
    }
    fn coded(from: Scalar, codes: Scalar) -> Vec<Case> {
        let case = |(tokens, kv_heads, head_dim, why): (usize, usize, usize, &str)| {
            let (step, width) = (Step::of(tokens), kv_heads * head_dim);
            let mut k = scaled(from, 1, tokens * width, 3.0);
            // A block of zeros, whose scale has no inverse.
            k.bytes[..32 * from.bytes()].fill(0);
            let v = scaled(from, 2, tokens * width, 0.01);
            let mut expected = Vec::new();
            for (at, x) in [(5, &k), (7, &v)] {
                let [stored, scales] = step.after_codes(codes, &x.to_f32(), width);
                expected.push((at, Expected::Exact(stored)));
                expected.push((at + 1, Expected::Exact(scales)));
            }
            let mut buffers = vec![k, v];
            buffers.extend(step.buffers());
            buffers.extend(Step::coded(codes, width));
            Case {
                kernel: kv_write_codes(from, codes).record(),
                label: format!("{tokens} x {kv_heads} x {head_dim} {from} to {codes}, {why}"),
                numbers: step.numbers(kv_heads, head_dim),
                buffers,
                expected,
            }
        };
        [
            (1, 8, 128, "one token"),
            (8, 2, 64, "sequences, blocks and a ring's turn"),
            (3, 3, 32, "rows that end inside a simdgroup"),
        ]
        .into_iter()
        .map(case)
        .collect()
    }
    every_float(of)
}

/// A prompt for one sequence in blocks of 256: tokens, heads, and what is read and written per
/// token.
const BENCH: (usize, usize, usize) = (16_384, 8, 128);

fn prompt(from: Scalar) -> (Vec<Fill>, Numbers) {
    let (tokens, heads, head_dim) = BENCH;
    let (n, stride) = (tokens * heads * head_dim, tokens / 256);
    let words = |words: Vec<u32>| Fill::These(Buffer::words(&words));
    let buffers = vec![
        Fill::Noise(from, n),
        Fill::Noise(from, n),
        words((0..tokens as u32).collect()),
        words(vec![0; tokens]),
        words((0..stride as u32).rev().collect()),
    ];
    (buffers, numbers(tokens, 256, stride, heads, head_dim))
}

fn benches() -> Vec<Bench> {
    fn of(from: Scalar) -> Vec<Bench> {
        let (mut buffers, numbers) = prompt(from);
        let n = BENCH.0 * BENCH.1 * BENCH.2;
        buffers.extend([Fill::Zeros(from, n), Fill::Zeros(from, n)]);
        vec![memory(kv_write(from, from), "16384 x 8 x 128", numbers, buffers, 0)]
    }
    every_float(of)
}

fn benches_codes() -> Vec<Bench> {
    fn of(from: Scalar) -> Vec<Bench> {
        let (mut buffers, numbers) = prompt(from);
        let n = BENCH.0 * BENCH.1 * BENCH.2;
        for _ in 0..2 {
            buffers.push(Fill::Zeros(Scalar::I8, n));
            buffers.push(Fill::Zeros(Scalar::F16, n / 32));
        }
        vec![memory(
            kv_write_codes(from, Scalar::I8),
            "16384 x 8 x 128",
            numbers,
            buffers,
            4 * n as u64,
        )]
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

    #[test]
    fn slots_are_distinct() {
        let mut slots = Step::of(8).slots();
        assert!(slots.iter().all(|s| *s < Step::SLOTS));
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), 8);
    }
}
