//! Rotations, writes to the cache, and attention. Workers split heads, or tokens where there are
//! many.

use super::class::FEW;
use super::plan::shape;
use super::replay::Replay;
use super::rows::Row;
use super::state::Cache;
use cpu_kernels::attention::{self, AttentionCall, ChosenPositions, LayerCache, indexer};
use cpu_kernels::math;
use cpu_kernels::matmul::ROWS;
use cpu_kernels::team::{SharedSlice, Worker};
use ops::{Indexer, Rope, RopeWrite};
use program::{Node, StepKind, ValueId};
use std::ops::Range;

impl Replay<'_> {
    /// Computes cosines and sines of every token, for every distinct rotation.
    pub(super) fn angles(&self, worker: &Worker<'_>) {
        for (rope, &(cos, sin)) in self.loaded.ropes.iter().zip(&self.class.angles) {
            let pairs = rope.frequencies.len();
            for t in worker.split(self.step.tokens.len()) {
                let range = t * pairs..(t + 1) * pairs;
                // SAFETY: each worker has its own tokens.
                let (cos, sin) =
                    unsafe { (self.floats(cos, range.clone()), self.floats(sin, range)) };
                rope.angles(self.rows[t].position, cos, sin);
            }
        }
    }

    /// Offsets of a rotation's cosines and sines in the arena.
    pub(super) fn angles_of(&self, rope: &Rope) -> (usize, usize) {
        let known = self.loaded.ropes.iter().position(|r| r == rope);
        self.class.angles[known.unwrap_or_else(|| unreachable!("collected at load"))]
    }

    /// Rotates every head of token `t`'s row by the angles at these offsets.
    pub(super) fn turn(&self, rope: &Rope, (cos, sin): (usize, usize), t: usize, row: &mut [f32]) {
        let pairs = rope.frequencies.len();
        let range = t * pairs..(t + 1) * pairs;
        // SAFETY: angles were complete before the first node and are only read.
        let (cos, sin) = unsafe { (self.floats(cos, range.clone()), self.floats(sin, range)) };
        math::rope(self.loaded.isa, row, rope.head_dim, cos, sin, rope.pairing);
    }

    /// Normalises and rotates this worker's share of the heads of q and k, and writes k and v to
    /// the cache.
    pub(super) fn rope_write(
        &self,
        index: usize,
        op: &RopeWrite,
        node: &Node,
        worker: &Worker<'_>,
    ) {
        let [q, k, v] = [0, 1, 2].map(|i| node.inputs[i]);
        let d = op.rope.head_dim;
        let (heads, kv_heads) = (self.width(q) / d, self.width(k) / d);
        // The norms that exist are in order: q's, then k's.
        let q_norm = op.q_norm.map(|eps| (eps, self.vector(node.weights[0])));
        let k_norm =
            op.k_norm.map(|eps| (eps, self.vector(node.weights[usize::from(op.q_norm.is_some())])));
        let angles = self.angles_of(&op.rope);
        let turn = |t: usize, h: usize| {
            let (start, norm) = if h < heads {
                let at = (t * heads + h) * d;
                self.copy_unless_in_place(index, node, 0, at..at + d);
                // SAFETY: each worker has its own heads.
                (unsafe { self.floats(self.offset(node.outputs[0]), at..at + d) }, q_norm)
            } else {
                let at = (t * kv_heads + h - heads) * d;
                // SAFETY: as above; nothing reads k after this node but the cache.
                (unsafe { self.floats(self.offset(k), at..at + d) }, k_norm)
            };
            if let Some((eps, weight)) = norm {
                math::rms_norm_in_place(self.loaded.isa, start, weight, eps);
            }
            self.turn(&op.rope, angles, t, start);
        };
        let (tokens, each) = (self.tokens.len(), heads + kv_heads);
        if tokens <= FEW || self.step.kind == StepKind::Decode {
            let (queries, keys) = (worker.split(tokens * heads), worker.split(tokens * kv_heads));
            // Prefetch the cache lines to be written while the queries are rotated.
            for item in keys.clone() {
                let (t, h) = (item / kv_heads, item % kv_heads);
                let table = self.table(op.layer, self.rows[t].sequence);
                self.cache(op.layer).fetch(table, self.rows[t].index, h);
            }
            for item in queries {
                turn(item / heads, item % heads);
            }
            for item in keys {
                let (t, h) = (item / kv_heads, item % kv_heads);
                turn(t, heads + h);
                self.write(op.layer, k, v, t..t + 1, h..h + 1);
            }
            return;
        }
        // Keys of neighbouring tokens share cache lines: write [`ROWS`] tokens at a time, head by
        // head.
        let mine = worker.split_units(tokens, ROWS);
        for first in mine.clone().step_by(ROWS) {
            let near = first..mine.end.min(first + ROWS);
            for item in near.start * each..near.end * each {
                turn(item / each, item % each);
            }
            self.write(op.layer, k, v, near, 0..kv_heads);
        }
    }

    pub(super) fn kv_write(&self, layer: usize, inputs: &[ValueId], worker: &Worker<'_>) {
        let [k, v] = ops::KvWrite::keys_values(inputs);
        let kv_heads = self.loaded.program.layers[layer].kv_heads;
        for item in worker.split(self.step.tokens.len() * kv_heads) {
            let (t, head) = (item / kv_heads, item % kv_heads);
            self.write(layer, k, v, t..t + 1, head..head + 1);
        }
    }

    /// Writes keys and values of some tokens and heads to the cache.
    fn write(
        &self,
        layer: usize,
        k: ValueId,
        v: ValueId,
        tokens: Range<usize>,
        heads: Range<usize>,
    ) {
        let width = self.width(k);
        let all = 0..self.tokens.len() * width;
        // SAFETY: this worker wrote these heads of k, or no worker writes them.
        let (k, v) =
            unsafe { (self.floats(self.offset(k), all.clone()), self.floats(self.offset(v), all)) };
        let mut next = tokens.start;
        while next < tokens.end {
            let Row { sequence, first, .. } = self.rows[next];
            let of = &self.step.sequences[sequence];
            let end = tokens.end.min(first + of.rows as usize);
            let (table, start) = (self.table(layer, sequence), of.start as usize);
            let (k, v) = (&k[first * width..], &v[first * width..]);
            let (rows, heads) = (next - first..end - first, heads.clone());
            // SAFETY: these positions and heads are this worker's.
            unsafe {
                self.cache(layer).write(self.loaded.isa, table, start, k, v, width, rows, heads);
            }
            next = end;
        }
    }

    /// The KV cache of a layer.
    fn cache(&self, layer: usize) -> &LayerCache {
        match &self.caches[layer] {
            Cache::KeysValues(cache) => cache,
            Cache::State(_) => unreachable!("the verifier gives attention keys and values"),
        }
    }

    /// The block table of a sequence in a layer's cache.
    pub(super) fn table(&self, layer: usize, sequence: usize) -> &[u32] {
        self.step.sequences[sequence].tables[self.loaded.groups[layer]].blocks
    }

    pub(super) fn attend(&self, op: &ops::Attention, node: &Node, worker: &Worker<'_>) {
        let (tokens, width) = (self.tokens.len(), op.heads * op.head_dim);
        // SAFETY: q is only read; `attention::run` keeps the workers' rows and heads of the output
        // apart.
        let (q, out) = unsafe {
            let q = self.floats(self.offset(node.inputs[0]), 0..tokens * width);
            (q, SharedSlice::from_raw(self.start(node.outputs[0]), tokens * width))
        };
        let [sinks, slopes] = op.sinks_and_slopes(&node.weights);
        let chosen = op.chosen.map(|count| {
            // SAFETY: it is only read.
            let positions =
                unsafe { &*self.floats(self.offset(node.inputs[1]), 0..tokens * count) };
            ChosenPositions { positions, count }
        });
        let mut rest = &self.queries[self.loaded.groups[op.layer]][..];
        let shape = shape(op).split(worker.count, rest);
        // Attend to as many sequences at a time as the scratch holds: all of them, unless many
        // decode at long contexts.
        while !rest.is_empty() {
            let (sequences, behind) =
                rest.split_at(shape.fitting(worker.count, self.partials.len(), rest));
            let call = AttentionCall {
                shape,
                cache: self.cache(op.layer),
                sequences,
                q,
                q_stride: width,
                sinks: sinks.map(|&sinks| self.vector(sinks)),
                slopes: slopes.map(|&slopes| self.vector(slopes)),
                chosen,
                rounded: self.loaded.quantised,
            };
            // SAFETY: a barrier lies before and after every node, and between two parts of one;
            // nothing else uses the scratch, and no claim is open.
            unsafe { attention::run(worker, self.loaded.isa, &call, out, self.partials) };
            rest = behind;
            if !rest.is_empty() {
                worker.barrier();
            }
        }
    }

    /// Chooses positions for as many rows at a time as there are workers: all of them score keys,
    /// then each chooses for one row.
    pub(super) fn index(&self, op: &Indexer, node: &Node, worker: &Worker<'_>) {
        let &Indexer { layer, heads, head_dim, count, .. } = op;
        let group = self.loaded.groups[layer];
        let [q, w, y] = [node.inputs[0], node.inputs[1], node.outputs[0]];
        let tokens = self.tokens.len();
        // SAFETY: inputs are only read.
        let [q, w] = [(q, heads * head_dim), (w, heads)]
            .map(|(x, width)| unsafe { &*self.floats(self.offset(x), 0..tokens * width) });
        // Half of a worker's scratch holds a row's scores, the other half its chosen positions.
        let room = self.partials.len() / (2 * worker.count);
        // The positions of a row, and where its scores begin.
        let sees = |t: usize| {
            let Row { sequence, index, .. } = self.rows[t];
            let (end, oldest) = (index + 1, self.oldest(group, sequence));
            let first = op.first(index).max(oldest).min(index);
            (first..end, first / indexer::POSITIONS * indexer::POSITIONS)
        };
        let chunks = |t: usize| {
            let (seen, start) = sees(t);
            (seen.end - start).div_ceil(indexer::POSITIONS)
        };
        for first in (0..tokens).step_by(worker.count) {
            let rows = worker.count.min(tokens - first);
            let most = (first..first + rows).map(chunks).max().unwrap_or(0);
            for item in worker.split(rows * most) {
                let (t, chunk) = (first + item / most, item % most);
                let (seen, start) = sees(t);
                let at = chunk * indexer::POSITIONS;
                let positions = start + at..seen.end.min(start + at + indexer::POSITIONS);
                if positions.is_empty() {
                    continue;
                }
                let row = indexer::Row {
                    q: &q[t * heads * head_dim..][..heads * head_dim],
                    weights: &w[t * heads..][..heads],
                    table: self.table(layer, self.rows[t].sequence),
                };
                let at = (t - first) * 2 * room + at;
                // SAFETY: each worker has its own chunks, for which the plan has room; keys were
                // written before the last barrier.
                unsafe {
                    let scores = self.partials.slice_mut(at..at + indexer::POSITIONS);
                    indexer::scores(self.loaded.isa, self.cache(layer), row, positions, scores);
                }
            }
            worker.barrier();
            for t in worker.split(rows).map(|i| first + i) {
                let (seen, start) = sees(t);
                let at = (t - first) * 2 * room;
                // SAFETY: all scores are there, on the other side of the barrier; each worker has
                // its own rows.
                let (scores, aside, y) = unsafe {
                    let scores =
                        self.partials.slice(at + seen.start - start..at + seen.end - start);
                    let aside = self.partials.slice_mut(at + room..at + room + scores.len());
                    let y = self.floats(self.offset(y), t * count..(t + 1) * count);
                    (scores, aside, y)
                };
                ops::indexer::choose(scores, seen.start, aside, y);
            }
            if first + rows < tokens {
                worker.barrier();
            }
        }
    }

    /// The lowest position of a sequence that a group of layers keeps.
    fn oldest(&self, group: usize, sequence: usize) -> usize {
        self.step.sequences[sequence].tables[group].oldest as usize
    }
}
