//! Mixtures of experts: a token's scores select experts, each expert multiplies the tokens that
//! selected it, and the results are summed per token.
//!
//! A *pair* is a token and one of its experts. Pairs are sorted by expert, then by token, so that
//! each expert's pairs are consecutive rows of one product. As in every product, a row's bits
//! depend neither on the other rows nor on their number.

mod low;
mod one;

use super::blocks;
use super::class::EVEN;
use super::replay::Replay;
use cpu_kernels::math;
use cpu_kernels::matmul::{Activations, BLOCK, Matrix, Path, ROWS, share};
use cpu_kernels::team::Worker;
use ops::experts::{Gate, MOST_EXPERTS, Odds, Routing, Sizes};
use ops::{Binary, Experts, Unary};
use program::{Node, Program};
use std::ops::Range;

/// Layout of the scratch of mixtures, in bytes from its start, sized for the largest mixture of a
/// Program.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Layout {
    /// The expert of each pair, in token order; u32.
    ids: usize,
    /// The routing weight of each pair; f32.
    weights: usize,
    /// The index of each pair in the order sorted by expert (its place); u32.
    places: usize,
    /// The token at each place; u32.
    tokens: usize,
    /// The first place of each expert, and the end; u32.
    offsets: usize,
    /// Rows at each place: the experts' input `x`, the products `gate` and `up`, and the output
    /// `y`.
    x: usize,
    gate: usize,
    up: usize,
    y: usize,
    /// Input rows, quantised.
    quantised: usize,
    /// Numbers between the low-rank factors of adapters, `[pairs, rank]` for each of the matrices.
    low: usize,
    /// Per-worker scratch: one quantised row.
    own: usize,
    own_bytes: usize,
    /// Total size.
    pub(super) bytes: usize,
}

/// Most bytes that the rows of all pairs take, quantised expert by expert.
fn quantised_bytes(path: Path, pairs: usize, experts: usize, width: usize) -> usize {
    // An expert's rows are rounded up to a group of 16, or to a power of two if fewer.
    let rounded = match path {
        Path::InPlace => 2 * pairs,
        Path::Expanded | Path::Exact | Path::Rounded => pairs + 15 * experts.min(pairs),
    };
    Activations::bytes(path, rounded.next_multiple_of(16), width)
}

impl Layout {
    /// Lays out the scratch for steps of up to `tokens` tokens, and for adapters of up to `rank`.
    pub(super) fn new(program: &Program, tokens: usize, workers: usize, rank: usize) -> Layout {
        let (mut most, mut own_bytes) = ([0; 11], 0);
        let changed = program.sites.iter().any(|site| site.experts.is_some());
        let rank = if changed { rank } else { 0 };
        for node in &program.nodes {
            let Some(Sizes { experts, used, width, ff }) = program.mixture(node) else { continue };
            let (pairs, word) = (tokens * used, size_of::<f32>());
            let paths = [Path::InPlace, Path::Expanded];
            let wider = width.max(ff);
            let quantised =
                paths.map(|path| quantised_bytes(path, pairs, experts, wider.next_multiple_of(32)));
            let inner = pairs * ff.next_multiple_of(ROWS) * word;
            let needs = [
                pairs * word,
                pairs * word,
                pairs * word,
                pairs * word,
                (experts + 1) * word,
                pairs * width * word,
                inner,
                inner,
                pairs * width.next_multiple_of(ROWS) * word,
                quantised[0].max(quantised[1]),
                3 * pairs * rank * word,
            ];
            (0..11).for_each(|i| most[i] = most[i].max(needs[i]));
            let own = Activations::bytes(Path::InPlace, 1, wider.next_multiple_of(32));
            // A page apart, as in `Class`.
            own_bytes = own_bytes.max(own.next_multiple_of(4096));
        }
        let mut end = 0;
        let mut take = |i: usize| {
            let at = end;
            end += most[i].next_multiple_of(64);
            at
        };
        let [ids, weights, places, of, offsets, x, gate, up, y, quantised, low] =
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(&mut take);
        let (own, bytes) = (end, end + workers * own_bytes);
        Layout {
            ids,
            weights,
            places,
            tokens: of,
            offsets,
            x,
            gate,
            up,
            y,
            quantised,
            low,
            own,
            own_bytes,
            bytes,
        }
    }
}

/// For each weight, the rows of one of its matrices, if it stacks several: those of experts, and of
/// the blocks of a diagonal.
pub(super) fn rows_of_one(program: &Program) -> Vec<Option<usize>> {
    let mut rows = vec![None; program.weights.len()];
    for (node, op) in blocks::each(program) {
        rows[node.weights[0].0] = Some(program.shape(node.outputs[0]).width / op.blocks);
    }
    for node in &program.nodes {
        let Some(Sizes { width, ff, .. }) = program.mixture(node) else { continue };
        for (i, out) in [ff, ff, width].into_iter().enumerate() {
            rows[node.weights[i].0] = Some(out);
            if let Some(bias) = Experts::bias(&node.weights, i) {
                rows[bias.0] = Some(out);
            }
        }
    }
    rows
}

/// Selects the experts of one token and computes their weights.
fn route(scores: &[f32], routing: &Routing, ids: &mut [u32], weights: &mut [f32]) {
    // NaN is less than every number, and the lower expert wins ties.
    let number = |e: usize| if scores[e].is_nan() { f32::NEG_INFINITY } else { scores[e] };
    let top = (0..scores.len()).map(number).fold(f32::NEG_INFINITY, f32::max);
    // Experts not yet selected.
    let mut open = [true; MOST_EXPERTS];
    for (id, weight) in ids.iter_mut().zip(&mut *weights) {
        let left = || (0..scores.len()).filter(|e| open[*e]);
        let better = |best: usize, e: usize| if number(e) > number(best) { e } else { best };
        let best = left().reduce(better).unwrap_or(0);
        let peak = number(best);
        *id = best as u32;
        *weight = match routing.odds {
            Odds::Softmax => (peak - top).exp(),
            Odds::Sigmoid => 1.0 / (1.0 + (-peak).exp()),
            Odds::Near { jitter } => {
                let near = |s: &f32| (peak - s) / s.abs().max(peak) <= 2.0 * jitter;
                1.0 / left().map(number).filter(near).map(|s| (s - peak).exp()).sum::<f32>()
            }
        };
        open[best] = false;
    }
    let total = match (routing.normalised, routing.odds) {
        (true, _) => weights.iter().sum(),
        (false, Odds::Softmax) => (0..scores.len()).map(|e| (number(e) - top).exp()).sum(),
        (false, _) => 1.0,
    };
    weights.iter_mut().for_each(|weight| *weight *= routing.scale / total);
}

/// Sums the outputs of a token's experts times their weights, in the order of selection, and adds
/// the residual.
fn combine<'a>(
    to: &mut [f32],
    results: impl Iterator<Item = (f32, &'a [f32])>,
    residual: Option<&[f32]>,
) {
    to.fill(0.0);
    for (weight, from) in results {
        to.iter_mut().zip(from).for_each(|(to, y)| *to += weight * *y);
    }
    if let Some(residual) = residual {
        to.iter_mut().zip(residual).for_each(|(to, more)| *to += more);
    }
}

/// The pairs of a step, sorted by expert.
struct Pairs<'a> {
    weights: &'a [f32],
    places: &'a [u32],
    tokens: &'a [u32],
    offsets: &'a [u32],
}

impl Pairs<'_> {
    /// The experts that have pairs, with their ranges of places.
    fn each(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let bounds = self.offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize);
        bounds.enumerate().filter(|(_, places)| !places.is_empty())
    }
}

/// Sorts pairs by expert, and within an expert by token. Computes the place of each pair, the token
/// at each place, and the first place of each expert.
fn group(ids: &[u32], used: usize, places: &mut [u32], tokens: &mut [u32], offsets: &mut [u32]) {
    offsets.fill(0);
    for id in ids {
        offsets[*id as usize + 1] += 1;
    }
    for e in 1..offsets.len() {
        offsets[e] += offsets[e - 1];
    }
    for (pair, id) in ids.iter().enumerate() {
        // The offset advances to the next expert's, and is restored below.
        let next = &mut offsets[*id as usize];
        places[pair] = *next;
        tokens[*next as usize] = (pair / used) as u32;
        *next += 1;
    }
    offsets.copy_within(0..offsets.len() - 1, 1);
    offsets[0] = 0;
}

impl Replay<'_> {
    /// Words of the scratch.
    ///
    /// # Safety
    /// As [`Replay::floats`].
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller's promise stands in for the borrow checker"
    )]
    unsafe fn words(&self, offset: usize, range: Range<usize>) -> &mut [u32] {
        // SAFETY: any bits are valid of both types, which are of one size; the rest is the caller's
        // promise.
        unsafe {
            let floats = self.floats(self.class.mixture + offset, range);
            std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), floats.len())
        }
    }

    /// Selects the experts of one token and computes their weights.
    fn route(
        &self,
        op: &Experts,
        node: &Node,
        scores: &[f32],
        (ids, weights): (&mut [u32], &mut [f32]),
    ) {
        route(scores, &op.routing, ids, weights);
        if let Some(&factors) = Experts::factors(&node.weights) {
            let factors = self.vector(factors);
            let each = weights.iter_mut().zip(ids);
            each.for_each(|(weight, id)| *weight *= factors[*id as usize]);
        }
    }

    /// Routes the tokens and computes their experts.
    pub(super) fn experts(&self, op: &Experts, node: &Node, worker: &Worker<'_>) {
        let program = &self.loaded.program;
        let Some(sizes) = program.mixture(node) else { return };
        let Sizes { experts, used, width, ff } = sizes;
        let (rows, place) = (self.count(program.shape(node.inputs[0]).rows), &self.class.experts);
        let (pairs, path) = (rows * used, self.path(node.inputs[0]));
        let (at, sites) = (self.class.mixture, self.sites_of(node));
        let alone = rows == 1 && path == Path::InPlace;
        if alone && !op.weighs_inputs && !op.inner {
            return self.experts_of_one((op, node, sizes), &sites, worker);
        }
        let few = rows <= EVEN;
        let mine = match few {
            true if worker.index == 0 => 0..rows,
            true => 0..0,
            false => worker.split(rows),
        };
        for t in mine {
            let of = t * used..(t + 1) * used;
            // SAFETY: each worker has its own tokens; scores are only read.
            let (scores, ids, weights) = unsafe {
                let scores = t * experts..(t + 1) * experts;
                (
                    self.floats(self.offset(node.inputs[1]), scores),
                    self.words(place.ids, of.clone()),
                    self.floats(at + place.weights, of),
                )
            };
            self.route(op, node, scores, (ids, weights));
        }
        if !few {
            worker.barrier();
        }
        if worker.index == 0 {
            // SAFETY: experts were written before the barrier, or by this worker; until the next
            // barrier only this worker accesses them.
            unsafe {
                group(
                    self.words(place.ids, 0..pairs),
                    used,
                    self.words(place.places, 0..pairs),
                    self.words(place.tokens, 0..pairs),
                    self.words(place.offsets, 0..experts + 1),
                );
            }
        }
        worker.barrier();
        // SAFETY: all this is only read from here on.
        let all = unsafe {
            Pairs {
                weights: self.floats(at + place.weights, 0..pairs),
                places: self.words(place.places, 0..pairs),
                tokens: self.words(place.tokens, 0..pairs),
                offsets: self.words(place.offsets, 0..experts + 1),
            }
        };

        let x = PairRows { start: at + place.x, stride: width };
        let [gate, _, y] = self.pair_rows(sizes);
        let (wide, inner) = (y.stride, gate.stride);
        if op.weighs_inputs {
            for pair in worker.split(pairs) {
                let (from, at) = (pair / used * width, all.places[pair] as usize);
                // SAFETY: each worker has its own pairs, and so its own places; the input is only
                // read.
                let (from, to) = unsafe {
                    let from = self.floats(self.offset(node.inputs[0]), from..from + width);
                    (from, self.floats(x.start, at * width..(at + 1) * width))
                };
                let weight = all.weights[pair];
                to.iter_mut().zip(from).for_each(|(to, x)| *to = weight * *x);
            }
            worker.barrier();
        }
        for at in worker.split(if op.weighs_inputs { 0 } else { pairs }) {
            let from = all.tokens[at] as usize * width;
            // SAFETY: each worker has its own places; the input is only read.
            let (from, to) = unsafe {
                let from = self.floats(self.offset(node.inputs[0]), from..from + width);
                (from, self.floats(x.start, at * width..(at + 1) * width))
            };
            to.copy_from_slice(from);
        }
        let quantise = |rows: PairRows, cols: usize, weight: usize| {
            let float = self.loaded.weights[node.weights[weight].0].is_float_matrix();
            self.quantise(&all, (rows, cols, path), float, worker);
        };
        quantise(x, width, 0);
        self.low_down(&sites, 0..2, &all, (x, width), worker);
        worker.barrier();

        self.deal(&all, self.matrix(node.weights[0]), experts, worker, |expert, places, panels| {
            let input = self.activations(&all, (x, width, path), expert);
            let change = |matrix, to: PairRows| {
                for at in places.clone() {
                    let place = (at, pairs);
                    let own = self.pair_factors(&sites, matrix, all.tokens[at] as usize, expert);
                    self.low_up(own, matrix, place, (&panels, ff), to);
                }
            };
            let of = (op, node, sizes);
            self.gate_and_up(of, &input, (expert, &places), &panels, worker, change);
        });
        worker.barrier();
        if let Some(&seen) = node.outputs.get(1) {
            for pair in worker.split(pairs) {
                let at = all.places[pair] as usize * inner;
                // SAFETY: each worker has its own pairs of the output; rows between matrices are
                // only read.
                let (from, to) = unsafe {
                    let to = self.floats(self.offset(seen), pair * ff..(pair + 1) * ff);
                    (self.floats(gate.start, at..at + ff), to)
                };
                to.copy_from_slice(from);
            }
        }
        quantise(gate, ff, 2);
        self.low_down(&sites, 2..3, &all, (gate, ff), worker);
        worker.barrier();
        self.deal(&all, self.matrix(node.weights[2]), experts, worker, |expert, places, panels| {
            let input = self.activations(&all, (gate, ff, path), expert);
            self.times(node, 2, &input, (&places, y), expert, &panels, worker);
            for at in places {
                let own = self.pair_factors(&sites, 2, all.tokens[at] as usize, expert);
                self.low_up(own, 2, (at, pairs), (&panels, width), y);
            }
        });
        worker.barrier();
        for t in worker.split(rows) {
            // SAFETY: each worker has its own tokens; results are only read.
            let to =
                unsafe { self.floats(self.offset(node.outputs[0]), t * width..(t + 1) * width) };
            let results = (t * used..(t + 1) * used).map(|pair| {
                let at = all.places[pair] as usize * wide;
                let weight = if op.weighs_inputs { 1.0 } else { all.weights[pair] };
                // SAFETY: as above.
                (weight, unsafe { &*self.floats(y.start, at..at + width) })
            });
            // SAFETY: the residual is only read.
            let residual = node.inputs.get(2).map(|residual| unsafe {
                &*self.floats(self.offset(*residual), t * width..(t + 1) * width)
            });
            combine(to, results, residual);
        }
    }

    /// Places of the rows of `gate`, `up` and `y` in the scratch.
    fn pair_rows(&self, sizes: Sizes) -> [PairRows; 3] {
        let (place, at) = (&self.class.experts, self.class.mixture);
        let of = |offset: usize, width: usize| PairRows {
            start: at + offset,
            stride: width.next_multiple_of(ROWS),
        };
        [of(place.gate, sizes.ff), of(place.up, sizes.ff), of(place.y, sizes.width)]
    }

    /// Computes some panels of an expert's `gate` and `up` for its rows, which `change` changes, and
    /// replaces `gate` by the activated product, the input of the down projection.
    fn gate_and_up(
        &self,
        (op, node, sizes): (&Experts, &Node, Sizes),
        x: &Activations<'_>,
        (expert, places): (usize, &Range<usize>),
        panels: &Range<usize>,
        worker: &Worker<'_>,
        change: impl Fn(usize, PairRows),
    ) {
        let [gate, up, _] = self.pair_rows(sizes);
        for (i, to) in [(0, gate), (1, up)] {
            self.times(node, i, x, (places, to), expert, panels, worker);
            change(i, to);
        }
        let columns = panels.start * ROWS..(panels.end * ROWS).min(sizes.ff);
        for at in places.clone() {
            let row = at * gate.stride + columns.start..at * gate.stride + columns.end;
            // SAFETY: each worker has its own columns of an expert's rows.
            let (gate, up) =
                unsafe { (self.floats(gate.start, row.clone()), self.floats(up.start, row)) };
            self.gated(op.gate, gate, up);
        }
    }

    /// Replaces `gate` by the activated product, the input of the down projection.
    fn gated(&self, f: Gate, gate: &mut [f32], up: &mut [f32]) {
        let f = match f {
            Gate::Plain(f) => f,
            Gate::Clamped { limit, alpha } => {
                // `g sigmoid(alpha g)` is `silu(alpha g) / alpha`.
                gate.iter_mut().for_each(|g| *g = g.min(limit) * alpha);
                up.iter_mut().for_each(|u| *u = (u.clamp(-limit, limit) + 1.0) / alpha);
                Unary::Silu
            }
            Gate::Bounded { limit } => {
                math::map_in_place(self.loaded.isa, Unary::Silu, gate);
                gate.iter_mut().for_each(|g| *g = g.min(limit));
                up.iter_mut().for_each(|u| *u = u.clamp(-limit, limit));
                return math::zip_in_place(self.loaded.isa, Binary::Mul, gate, up);
            }
        };
        math::gate_in_place(self.loaded.isa, f, gate, up);
    }

    /// The input rows of an expert. The address of their quantised form depends on its places
    /// alone.
    fn activations(
        &self,
        all: &Pairs<'_>,
        (rows, cols, path): (PairRows, usize, Path),
        expert: usize,
    ) -> Activations<'_> {
        let bounds = [expert, expert + 1].map(|e| all.offsets[e] as usize);
        let count = bounds[1] - bounds[0];
        // The experts before it take at most what `quantised_bytes` reserves for each, and each
        // begins with a whole group.
        let before = match path {
            Path::InPlace => 2 * bounds[0],
            Path::Expanded | Path::Exact | Path::Rounded => all
                .each()
                .take_while(|(e, _)| *e < expert)
                .fold(0, |sum, (_, p)| sum + p.len().next_multiple_of(16)),
        };
        let each = Activations::bytes(path, 16, cols) / 16;
        let start = self.arena.wrapping_add(rows.start).cast::<f32>();
        let start = start.wrapping_add(bounds[0] * rows.stride);
        let quantised = self.arena.wrapping_add(self.class.mixture + self.class.experts.quantised);
        let quantised = quantised.wrapping_add(before * each);
        // SAFETY: rows and quantised rows lie in the scratch as it is laid out for this many pairs,
        // and those of different experts do not overlap.
        unsafe { Activations::new(path, start.cast_const(), rows.stride, count, cols, quantised) }
    }

    /// Quantises this worker's share of the rows.
    fn quantise(
        &self,
        all: &Pairs<'_>,
        (rows, cols, path): (PairRows, usize, Path),
        float: bool,
        worker: &Worker<'_>,
    ) {
        if !cols.is_multiple_of(BLOCK) {
            return;
        }
        let mine = worker.split(all.places.len());
        for (expert, places) in all.each() {
            let (start, end) = (places.start.max(mine.start), places.end.min(mine.end));
            if start < end {
                let each = cols / BLOCK;
                let x = self.activations(all, (rows, cols, path), expert);
                let blocks = (start - places.start) * each..(end - places.start) * each;
                // SAFETY: each worker has its own places, whose rows were complete before the last
                // barrier, or are its own.
                unsafe { x.quantise(self.loaded.isa, blocks, float) };
            }
        }
    }

    /// Multiplies an expert's rows with some panels of matrix `i`, adding its bias. Panel 0 is the
    /// expert's first.
    fn times(
        &self,
        node: &Node,
        i: usize,
        x: &Activations<'_>,
        (places, to): (&Range<usize>, PairRows),
        expert: usize,
        panels: &Range<usize>,
        worker: &Worker<'_>,
    ) {
        let matrix = self.matrix(node.weights[i]);
        let bias = Experts::bias(&node.weights, i).map(|&bias| self.vector(bias));
        let first = expert * to.stride / ROWS;
        // `multiply` counts columns from the whole matrix's first.
        let out = self.arena.wrapping_add(to.start).cast::<f32>();
        let out = out.wrapping_add(places.start * to.stride).wrapping_sub(first * ROWS);
        let product =
            super::products::Product { matrix, bias, out, stride: to.stride, accumulate: false };
        self.multiply(&product, x, first + panels.start..first + panels.end, worker);
    }

    /// Deals out the panels of the experts that have pairs: calls `f(expert, places, panels)` for
    /// each part of this worker's, with panels counted from the expert's first. With few rows each
    /// worker gets an equal share; with many, workers claim parts as they become free.
    fn deal(
        &self,
        all: &Pairs<'_>,
        matrix: &Matrix,
        experts: usize,
        worker: &Worker<'_>,
        mut f: impl FnMut(usize, Range<usize>, Range<usize>),
    ) {
        let panels = matrix.panels() / experts;
        let busy = all.each().count();
        if all.places.len() <= EVEN * busy {
            for ((expert, places), part) in parts(all.each(), busy, panels, worker) {
                f(expert, places, part);
            }
            return;
        }
        let part = (panels.div_ceil(2 * worker.count)).clamp(2, super::class::PART) & !1;
        let parts = panels.div_ceil(part);
        while let Some(claimed) = worker.claim(busy * parts, 1) {
            let (nth, at) = (claimed.start / parts, claimed.start % parts * part);
            if let Some((expert, places)) = all.each().nth(nth) {
                f(expert, places, at..panels.min(at + part));
            }
        }
    }
}

/// This worker's share of the panels of `count` items that have `panels` each: every item of which
/// it has some, with their range.
pub(super) fn parts<T>(
    items: impl Iterator<Item = T>,
    count: usize,
    panels: usize,
    worker: &Worker<'_>,
) -> impl Iterator<Item = (T, Range<usize>)> {
    let mine = share(count * panels, worker.index, worker.count);
    let own = move |at: usize, i: usize| at.clamp(i * panels, (i + 1) * panels) - i * panels;
    let all = items.enumerate().map(move |(i, item)| (item, own(mine.start, i)..own(mine.end, i)));
    all.filter(|(_, part)| !part.is_empty())
}

/// Location of the rows of pairs in the scratch.
#[derive(Clone, Copy)]
struct PairRows {
    /// Byte offset in the arena.
    start: usize,
    /// Stride in floats.
    stride: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_those_of_the_reference() {
        let scores: Vec<f32> = (0..120).map(|i| ((i * 37 % 41) as f32 - 20.0) / 4.0).collect();
        let near = Odds::Near { jitter: 0.1 };
        for (odds, normalised) in
            [(Odds::Softmax, true), (Odds::Softmax, false), (Odds::Sigmoid, true), (near, false)]
        {
            let routing = Routing { used: 3, odds, normalised, scale: 1.5 };
            let expected = ops::moe::route(&scores, 12, &routing);
            for (t, scores) in scores.chunks_exact(12).enumerate() {
                let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
                route(scores, &routing, &mut ids, &mut weights);
                assert_eq!(ids, expected.ids[3 * t..][..3], "{routing:?}");
                for (found, want) in weights.iter().zip(&expected.weights[3 * t..]) {
                    assert!((f64::from(*found) - want).abs() < 1e-6, "{routing:?}");
                }
            }
        }
    }

    #[test]
    fn pairs_lie_by_expert() {
        let (mut places, mut tokens, mut offsets) = ([0; 6], [0; 6], [0; 5]);
        group(&[2, 0, 2, 3, 0, 2], 2, &mut places, &mut tokens, &mut offsets);
        assert_eq!(offsets, [0, 2, 2, 5, 6]);
        assert_eq!(places, [2, 0, 3, 5, 1, 4]);
        assert_eq!(tokens, [0, 2, 0, 1, 2, 1]);
        let all = Pairs { weights: &[], places: &places, tokens: &tokens, offsets: &offsets };
        let each: Vec<_> = all.each().collect();
        assert_eq!(each, [(0, 0..2), (2, 2..5), (3, 5..6)]);
    }
}
