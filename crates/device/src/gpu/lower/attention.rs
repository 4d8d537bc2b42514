//! Lowering of attention, rotary embedding and cache writes.

use formats::{Error, Result};
use ops::attention::AttentionForm;
use ops::attention::decode::{
    DecodeLoad, DecodeSchedule, KeyShares, attention_decode, attention_decode_codes,
};
use ops::attention::prefill::{PrefillSchedule, attention_prefill, attention_prefill_codes};
use ops::indexer::kernels::{IndexForm, index_choose, index_scores, index_scores_codes};
use ops::kv_write::{kv_write, kv_write_codes, rotate_blocks};
use ops::rope_write::{self, Variant, rope_write, rope_write_codes};
use ops::{Attention, Indexer, KvWrite, Op, Rope, RopeWrite, indexer};
use program::{BLOCK_TOKENS, StepKind, ValueId, WeightId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::super::sizes::stride;
use super::{FEW, Facts, Lowering, Recorder, Slot, bucket, kv};
use crate::CacheType;

/// Bytes of the arrays of split attention: partial results, their softmax statistics, and counters,
/// which are zero between steps; and of the scores of indexers.
pub(in crate::gpu) type Scratch = [usize; 4];

/// The number of the scores among them.
const SCORES: usize = 3;

/// Scores of an indexer that are there at once, unless one row has more.
const SCORED: usize = 1 << 22;

impl Lowering {
    /// The form of an attention's kernels.
    fn form(&self, op: &Attention) -> AttentionForm {
        AttentionForm::of(op, self.program.layers[op.layer].keys_only)
    }

    /// How prompt rows are attended to in tiles, if they are. The matrix units take 16-bit elements,
    /// 16 at a time.
    fn tiled(&self, op: &Attention) -> Option<PrefillSchedule> {
        let Facts { shared, tuned, .. } = self.facts;
        let pick = || PrefillSchedule::pick(self.form(op), shared, &tuned.attention);
        (!self.exact()).then(pick).flatten()
    }

    /// The load that attention of decode rows is scheduled for.
    fn decode_load(&self) -> DecodeLoad {
        match self.batched {
            false => DecodeLoad::Few,
            true if self.sequences < self.facts.tuned.attention.many => DecodeLoad::Several,
            true => DecodeLoad::Many,
        }
    }

    /// How rows are attended to by themselves, over up to `length` keys.
    fn schedule(&self, op: &Attention, query: Scalar, length: u32) -> DecodeSchedule {
        let Facts { shared, tuned, .. } = self.facts;
        let (form, load, tuned) = (self.form(op), self.decode_load(), &tuned.attention);
        DecodeSchedule::pick(form, query, self.stored(), length, load, shared, tuned)
    }

    /// The element type of the cache's arrays: of codes, where it holds codes.
    fn stored(&self) -> Scalar {
        codes(self.cache).unwrap_or(self.half)
    }

    /// How threadgroups split the keys of a row that is attended to by itself.
    fn shares(&self, op: &Attention, schedule: DecodeSchedule) -> KeyShares {
        let tuned = &self.facts.tuned.attention;
        match schedule.shares(self.decode_load(), tuned) {
            KeyShares::Own { most, .. } if self.tiled(op).is_none() => {
                KeyShares::Own { most, parts: tuned.prompt_parts }
            }
            shares => shares,
        }
    }

    /// Bytes of attention scratch for every class of up to `tokens` rows, or up to `decode` rows if
    /// steps of many sequences attend to prompts in tiles.
    ///
    /// `blocks`: the blocks of a context of each group.
    pub(in crate::gpu) fn scratch(
        &self,
        tokens: usize,
        decode: usize,
        blocks: &[usize],
    ) -> Scratch {
        let mut most = [4; 4];
        for node in &self.program.nodes {
            if let Op::Indexer(op) = &node.op {
                let blocks = blocks.get(self.groups[op.layer]).copied().unwrap_or(1);
                let width = stride(blocks, false) * BLOCK_TOKENS;
                let all = tokens.max(decode).saturating_mul(width);
                most[SCORES] = most[SCORES].max(4 * all.min(SCORED).max(width));
            }
            let Op::Attention(op) = &node.op else { continue };
            let alone = if self.batched && self.tiled(op).is_some() { decode } else { tokens };
            let together = Some(self.schedule(op, self.half, u32::MAX))
                .filter(|schedule| matches!(schedule, DecodeSchedule::Together(_)));
            for rows in 1..=alone {
                let heads = bucket(rows) * op.heads;
                // No other schedule splits more, but where values are the keys.
                let lanes = DecodeSchedule::Lanes { stages: 0 };
                let splits = |schedule| self.splits(schedule, op, rows, usize::MAX);
                let parts = heads * together.map_or(0, splits).max(splits(lanes));
                let needs = [4 * parts * op.head_dim, 8 * parts, 4 * heads];
                (0..3).for_each(|i| most[i] = most[i].max(needs[i]));
            }
        }
        most
    }

    /// Number of threadgroups that split the keys of a head, for a context of `length` positions.
    fn splits(
        &self,
        schedule: DecodeSchedule,
        op: &Attention,
        rows: usize,
        length: usize,
    ) -> usize {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let heads = (op.kv_heads * rows) as u32;
        let launched = || schedule.splits(self.facts.processors, heads, length);
        self.shares(op, schedule).splits(length).unwrap_or_else(launched) as usize
    }
}

/// Rows that an indexer scores at once, for tables of `width` positions.
fn scored(width: usize) -> usize {
    (SCORED / width.max(1)).max(1)
}

/// The rest of a slot of the arena or of words, from a byte on.
fn from(slot: Slot, bytes: usize) -> Slot {
    match slot {
        Slot::Arena(range) => Slot::Arena(range.start + bytes..range.end),
        Slot::Words(range) => Slot::Words(range.start + bytes..range.end),
        other => other,
    }
}

/// The element type of the codes of a quantised cache; `None` for caches of floats.
fn codes(kind: CacheType) -> Option<Scalar> {
    match kind {
        CacheType::Q8_0 => Some(Scalar::I8),
        CacheType::Turbo => Some(Scalar::U32),
        CacheType::F16 | CacheType::BF16 | CacheType::F32 => None,
    }
}

impl Recorder<'_> {
    fn frequencies(&self, rope: &Rope) -> Slot {
        Slot::Frequencies(self.of.ropes.iter().position(|r| r == rope).unwrap_or(0))
    }

    /// The constants and buffers of every kernel that reads or writes a layer's cache.
    fn cache(&self, layer: usize) -> (Numbers, Vec<(&'static str, Slot)>) {
        let group = self.of.groups[layer];
        let numbers = Numbers::new()
            .with("stride", self.key.strides[group] as u32)
            .with("block", BLOCK_TOKENS as u32)
            .with("kv_heads", self.of.program.layers[layer].kv_heads as u32);
        let mut bound = vec![
            ("positions", Slot::Words(self.words.positions.clone())),
            ("sequences", Slot::Words(self.words.sequences.clone())),
            ("table", Slot::Words(self.words.tables[group].clone())),
        ];
        let names = kv::names(self.of.cache, &self.of.program.layers[layer]);
        bound.extend(names.into_iter().map(|(name, i)| (name, Slot::Cache(layer, i))));
        (numbers, bound)
    }

    pub(super) fn kv_write(&mut self, layer: usize, inputs: &[ValueId]) -> Result<()> {
        // Keys that are alone are written to one array, once as keys and once as values.
        let [k, v] = KvWrite::keys_values(inputs);
        let kernel = match self.of.cache {
            kind if codes(kind).is_some() => kv_write_codes(self.scalar(k), self.stored()),
            _ => kv_write(self.scalar(k), self.of.half),
        };
        let (numbers, mut bound) = self.cache(layer);
        let numbers = numbers
            .with("tokens", self.rows(k) as u32)
            .with("head_dim", self.of.program.layers[layer].head_dim as u32);
        bound.extend([("k", self.value(k)), ("v", self.value(v))]);
        self.push(kernel, numbers, &bound)
    }

    pub(super) fn rope_write(
        &mut self,
        write: &RopeWrite,
        inputs: &[ValueId],
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let rows = self.rows(y);
        let prompt = match self.of.batched {
            true => self.key.kind == StepKind::Prompt,
            false => rows > FEW,
        };
        let variant = Variant {
            pairing: write.rope.pairing,
            q_norm: write.q_norm.is_some(),
            k_norm: write.k_norm.is_some(),
            schedule: if prompt { rope_write::PROMPT } else { rope_write::DECODE },
        };
        let types = rope_write::RopeTypes {
            x: self.scalar(inputs[0]),
            y: self.scalar(y),
            norm: Scalar::F32,
        };
        let kernel = match self.of.cache {
            kind if codes(kind).is_some() => rope_write_codes(types, self.stored(), variant),
            _ => rope_write(types, self.of.half, variant),
        };
        let (numbers, mut bound) = self.cache(write.layer);
        let head_dim = write.rope.head_dim;
        let mut numbers = numbers
            .with("tokens", rows as u32)
            .with("heads", (self.width(inputs[0]) / head_dim) as u32)
            .with("head_dim", head_dim as u32)
            .with("pairs", write.rope.frequencies.len() as u32)
            .with_f32("magnitude", write.rope.magnitude);
        bound.extend([
            ("q", self.value(inputs[0])),
            ("k", self.value(inputs[1])),
            ("v", self.value(inputs[2])),
            ("y", self.value(y)),
            ("frequencies", self.frequencies(&write.rope)),
        ]);
        let mut weights = weights.iter();
        for (buffer, constant, eps) in
            [("q_norm", "q_eps", write.q_norm), ("k_norm", "k_eps", write.k_norm)]
        {
            if let (Some(eps), Some(weight)) = (eps, eps.and_then(|_| weights.next())) {
                numbers = numbers.with_f32(constant, eps);
                bound.push((buffer, self.weight(*weight)));
            }
        }
        self.push(kernel, numbers, &bound)
    }

    pub(super) fn attention(
        &mut self,
        op: &Attention,
        (q, chosen): (ValueId, Option<ValueId>),
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let [sinks, slopes] = op.sinks_and_slopes(weights);
        let form = self.of.form(op);
        self.rotate(q)?;
        let rows = self.rows(q);
        let (numbers, mut bound) = self.cache(op.layer);
        let mut numbers = numbers.with_f32("scale", op.scale);
        if let Some(window) = op.window {
            numbers = numbers.with("window", u32::try_from(window).unwrap_or(u32::MAX));
        }
        if let Some(cap) = op.cap {
            numbers = numbers.with_f32("cap", cap);
        }
        bound.extend([("q", self.value(q)), ("y", self.value(y))]);
        for (name, weight) in [("sinks", sinks), ("slopes", slopes)] {
            bound.extend(weight.map(|weight| (name, self.weight(*weight))));
        }
        if let (Some(count), Some(chosen)) = (op.chosen, chosen) {
            numbers = numbers.with("count", u32::try_from(count).unwrap_or(u32::MAX));
            bound.push(("chosen", self.value(chosen)));
        }
        let prompt = !self.narrow(rows) && self.key.kind == StepKind::Prompt;
        if let Some(schedule) = self.of.tiled(op).filter(|_| prompt) {
            let found = [q, y].map(|v| self.scalar(v));
            if found != [self.of.half; 2] {
                let expected = format!("queries and results of {}", self.of.half);
                let found = format!("{} and {}", found[0], found[1]);
                return Err(Error::new("attention", expected, found));
            }
            let kernel = match self.of.cache {
                kind if codes(kind).is_some() => {
                    attention_prefill_codes(self.of.half, self.stored(), form, schedule)
                }
                _ => attention_prefill(self.of.half, form, schedule),
            };
            let numbers = numbers
                .with("tokens", rows as u32)
                .with("longest", rows as u32)
                .with("batch", self.key.sequences as u32);
            bound.push(("starts", Slot::Words(self.words.starts.clone())));
            self.push(kernel, numbers, &bound)?;
            return self.rotate(y);
        }
        // With many sequences the schedule must not depend on their lengths.
        let most = op.chosen.unwrap_or(usize::MAX);
        let length = if self.of.batched { usize::MAX } else { self.key.length.min(most) };
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        let schedule = self.of.schedule(op, self.scalar(q), length);
        let shares = self.of.shares(op, schedule);
        let kernel = match self.of.cache {
            kind if codes(kind).is_some() => {
                attention_decode_codes(self.scalar(q), self.stored(), form, schedule, shares)
            }
            _ => attention_decode(self.scalar(q), self.of.half, form, schedule, shares),
        };
        let splits = self.of.splits(schedule, op, rows, self.key.length.min(most));
        let numbers = numbers.with("rows", rows as u32).with("splits", splits as u32);
        let scratch = ["partial", "stats", "counters"].into_iter().enumerate();
        bound.extend(scratch.map(|(i, name)| (name, Slot::Scratch(i))));
        self.push(kernel, numbers, &bound)?;
        self.rotate(y)
    }

    /// Scores rows, as many at a time as there is room for, and chooses for each. A row's choice
    /// depends on no other row.
    pub(super) fn index(&mut self, op: &Indexer, [q, w]: [ValueId; 2], y: ValueId) -> Result<()> {
        self.rotate(q)?;
        let form = IndexForm { head_dim: op.head_dim as u32, window: op.window.is_some() };
        let width = self.key.strides[self.of.groups[op.layer]] * BLOCK_TOKENS;
        let all = self.rows(q);
        let (cached, bound) = self.cache(op.layer);
        let keys: Vec<(&str, Slot)> =
            bound.iter().filter(|(name, _)| !name.starts_with("value")).cloned().collect();
        let each = scored(width);
        for first in (0..all).step_by(each) {
            let rows = each.min(all - first);
            let part = |(name, slot): &(&'static str, Slot)| match *name {
                "positions" | "sequences" => (*name, from(slot.clone(), 4 * first)),
                _ => (*name, slot.clone()),
            };
            let mut bound: Vec<(&str, Slot)> = keys.iter().map(part).collect();
            let of = |v: ValueId, width: usize, this: &Self| from(this.value(v), 4 * first * width);
            bound.extend([
                ("q", of(q, op.heads * op.head_dim, self)),
                ("w", of(w, op.heads, self)),
                ("scores", Slot::Scratch(SCORES)),
            ]);
            let shared = indexer::kernels::numbers(rows, width, op.window);
            let mut numbers = shared.clone().with("heads", op.heads as u32);
            cached.iter().for_each(|(name, bits)| numbers.set(name, bits));
            let kernel = match self.of.cache {
                kind if codes(kind).is_some() => index_scores_codes(self.stored(), form),
                _ => index_scores(self.of.half, form),
            };
            self.push(kernel, numbers, &bound)?;
            let positions = Slot::Words(self.words.positions.clone());
            let bound = [
                ("scores", Slot::Scratch(SCORES)),
                ("positions", from(positions, 4 * first)),
                ("chosen", of(y, op.count, self)),
            ];
            let numbers = shared.with("count", op.count as u32);
            self.push(index_choose(form), numbers, &bound)?;
        }
        Ok(())
    }

    /// The type of a cache's elements, or of its codes.
    fn stored(&self) -> Scalar {
        self.of.stored()
    }

    /// Rotates queries or attention outputs in place, if keys and values are stored rotated.
    fn rotate(&mut self, x: ValueId) -> Result<()> {
        if !self.of.cache.rotates() {
            return Ok(());
        }
        let numbers = Numbers::new().with("n", (self.rows(x) * self.width(x)) as u32);
        self.push(rotate_blocks(self.scalar(x)), numbers, &[("x", self.value(x))])
    }
}
