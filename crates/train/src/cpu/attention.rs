//! Attention among packed rows. Each key/value head of a sequence belongs to one thread, which
//! computes a block of queries at a time: memory holds the scores of a block, never of a
//! whole sequence.

use super::executor::Run;
use super::gemm::{Of, To, gemm};
use super::vectorised::{total, vectorised};
use cpu_kernels::isa::Isa;
use cpu_kernels::math;
use ops::gradient::seen;
use ops::{Attention, Binary, Unary};
use program::Node;
use std::ops::Range;

/// Queries of a block.
const QUERIES: usize = 48;

/// One head of keys or values, and the query heads that share it.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The sequence, among the batch's.
    pub(super) sequence: usize,
    /// The key/value head.
    pub(super) index: usize,
}

/// The work on one head of a sequence with these rows, with a thread's own memory.
type HeadWork<'a> = dyn Fn(Head, Range<usize>, &mut [f32]) + Sync + 'a;

/// A block of queries, and what they see.
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
}

fn blocks(of: &Attention, rows: Range<usize>) -> impl Iterator<Item = Block> {
    rows.clone().step_by(QUERIES).map(move |start| {
        let queries = start..rows.end.min(start + QUERIES);
        let oldest = *seen(of, rows.start as u32, start).start();
        Block { keys: oldest..queries.end, queries }
    })
}

/// The transpose `[d, rows]` of a head of rows `stride` apart.
///
/// # Safety
/// The rows are readable.
unsafe fn turned(start: *const f32, stride: usize, rows: usize, d: usize, to: &mut [f32]) {
    for t in 0..rows {
        for i in 0..d {
            // SAFETY: the caller's promise.
            to[i * rows + t] = unsafe { *start.add(t * stride + i) };
        }
    }
}

impl Run<'_> {
    /// Calls `f` with every head of every sequence, and with a thread's own memory: `floats` says
    /// how many f32 a number of rows takes.
    fn heads(&self, of: &Attention, floats: &(dyn Fn(usize) -> usize + Sync), f: &HeadWork<'_>) {
        let sequences = &self.batch.sequences;
        self.each(sequences.len() * of.kv_heads, 1, &|range, scratch| {
            for at in range {
                let head = Head { sequence: at / of.kv_heads, index: at % of.kv_heads };
                let rows = sequences[head.sequence].clone();
                let floats = floats(rows.len());
                if scratch.len() < floats {
                    scratch.resize(floats, 0.0);
                }
                f(head, rows, &mut scratch[..floats]);
            }
        });
    }

    /// Scores of a block's queries, `[queries, keys]`, scaled and bounded; what a query does not
    /// see is left as it is.
    ///
    /// # Safety
    /// `q` is the first query's, and `keys` `[d, rows]` are the sequence's.
    unsafe fn scores(
        &self,
        of: &Attention,
        block: &Block,
        q: *const f32,
        keys: (&[f32], &Range<usize>),
        to: &mut [f32],
    ) {
        let (d, stride, isa) = (of.head_dim, of.heads * of.head_dim, self.of.isa);
        let (m, n) = (block.queries.len(), block.keys.len());
        let (turned, rows) = keys;
        let from = &turned[block.keys.start - rows.start..];
        let a = Of { start: q, row: stride, column: 1 };
        let b = Of { start: from.as_ptr(), row: rows.len(), column: 1 };
        // SAFETY: the caller's promise; scores have `m` rows of `n`.
        unsafe { gemm(isa, [m, n, d], a, b, To { start: to.as_mut_ptr(), row: n, adds: false }) };
        bounded(of, isa, &mut to[..m * n]);
    }

    pub(super) fn attend(&self, of: &Attention, node: &Node) {
        if self.attends_in_tiles(of) {
            return self.attend_in_tiles(of, node);
        }
        let Attention { heads, kv_heads, head_dim: d, .. } = *of;
        let [q, k, v] = [0, 1, 2].map(|i| self.start(node.inputs[i]) as usize);
        let [y, lse] = [0, 1].map(|i| self.start(node.outputs[i]) as usize);
        let (wide, narrow, isa) = (heads * d, kv_heads * d, self.of.isa);
        let (sinks, slopes) = (self.sinks(of, node), self.slopes(of, node));
        self.heads(of, &|rows| rows * (d + QUERIES), &|head, rows, scratch| {
            let (keys, scores) = scratch.split_at_mut(rows.len() * d);
            let at = rows.start * narrow + head.index * d;
            // SAFETY: rows of a head are inside the values; each task writes its own heads of `y`
            // and `lse`.
            unsafe {
                turned((k as *const f32).add(at), narrow, rows.len(), d, keys);
                for h in head.index * (heads / kv_heads)..(head.index + 1) * (heads / kv_heads) {
                    for block in blocks(of, rows.clone()) {
                        let (m, n) = (block.queries.len(), block.keys.len());
                        let start = block.queries.start * wide + h * d;
                        let q = (q as *const f32).add(start);
                        self.scores(of, &block, q, (keys, &rows), scores);
                        for (i, t) in block.queries.clone().enumerate() {
                            let row = &mut scores[i * n..(i + 1) * n];
                            let seen = seen(of, rows.start as u32, t);
                            let own =
                                seen.start() - block.keys.start..seen.end() + 1 - block.keys.start;
                            row[..own.start].fill(0.0);
                            row[own.end..].fill(0.0);
                            let sink = sinks.map(|sinks| sinks[h]);
                            let found = softmax(isa, &mut row[own], sink, slopes[h]);
                            *(lse as *mut f32).add(t * heads + h) = found;
                        }
                        let v = (v as *const f32).add(block.keys.start * narrow + head.index * d);
                        let a = Of { start: scores.as_ptr(), row: n, column: 1 };
                        let b = Of { start: v, row: narrow, column: 1 };
                        let to = To { start: (y as *mut f32).add(start), row: wide, adds: false };
                        gemm(isa, [m, d, n], a, b, to);
                    }
                }
            }
        });
    }

    pub(super) fn attend_backward(&self, of: &Attention, node: &Node) {
        if self.attends_in_tiles(of) {
            return self.attend_backward_in_tiles(of, node);
        }
        let Attention { heads, kv_heads, head_dim: d, .. } = *of;
        let [q, k, v, y, lse, dy] = [0, 1, 2, 3, 4, 5].map(|i| self.start(node.inputs[i]) as usize);
        let [dq, dk, dv] = [0, 1, 2].map(|i| self.start(node.outputs[i]) as usize);
        let (wide, narrow, isa) = (heads * d, kv_heads * d, self.of.isa);
        let (sinks, slopes) = (self.sinks(of, node), self.slopes(of, node));
        let mut of_sinks = vec![0f64; self.batch.sequences.len() * heads];
        let shared = cpu_kernels::team::SharedSlice::new(&mut of_sinks);
        self.heads(of, &|rows| rows * 2 * (d + QUERIES), &|head, rows, scratch| {
            let (keys, rest) = scratch.split_at_mut(rows.len() * d);
            let (values, rest) = rest.split_at_mut(rows.len() * d);
            let (p, ds) = rest.split_at_mut(rows.len() * QUERIES);
            let at = rows.start * narrow + head.index * d;
            let head_of =
                |x: usize, t: usize, h: usize| (x as *mut f32).wrapping_add(t * wide + h * d);
            // SAFETY: rows of a head are inside the values; each task writes its own heads of `dq`,
            // `dk` and `dv`.
            unsafe {
                turned((k as *const f32).add(at), narrow, rows.len(), d, keys);
                turned((v as *const f32).add(at), narrow, rows.len(), d, values);
                for gradient in [dk, dv] {
                    for t in 0..rows.len() {
                        let row = (gradient as *mut f32).add(at + t * narrow);
                        std::slice::from_raw_parts_mut(row, d).fill(0.0);
                    }
                }
                for h in head.index * (heads / kv_heads)..(head.index + 1) * (heads / kv_heads) {
                    let mut of_sink = 0.0;
                    for block in blocks(of, rows.clone()) {
                        let (m, n) = (block.queries.len(), block.keys.len());
                        let first = block.queries.start;
                        self.scores(of, &block, head_of(q, first, h), (keys, &rows), p);
                        let a = Of { start: head_of(dy, first, h), row: wide, column: 1 };
                        let from = &values[block.keys.start - rows.start..];
                        let b = Of { start: from.as_ptr(), row: rows.len(), column: 1 };
                        gemm(
                            isa,
                            [m, n, d],
                            a,
                            b,
                            To { start: ds.as_mut_ptr(), row: n, adds: false },
                        );
                        for (i, t) in block.queries.clone().enumerate() {
                            let (p, ds) = (&mut p[i * n..(i + 1) * n], &mut ds[i * n..(i + 1) * n]);
                            let seen = seen(of, rows.start as u32, t);
                            let own =
                                seen.start() - block.keys.start..seen.end() + 1 - block.keys.start;
                            let lse = *(lse as *const f32).add(t * heads + h);
                            let along = dot(
                                isa,
                                std::slice::from_raw_parts(head_of(dy, t, h), d),
                                std::slice::from_raw_parts(head_of(y, t, h), d),
                            );
                            for outside in [0..own.start, own.end..n] {
                                p[outside.clone()].fill(0.0);
                                ds[outside].fill(0.0);
                            }
                            let row = (lse, along, slopes[h]);
                            through(of, isa, &mut p[own.clone()], &mut ds[own], row);
                            if let Some(sinks) = sinks {
                                let p = f64::from(sinks[h] - lse).exp();
                                of_sink -= p * f64::from(along);
                            }
                        }
                        let keys_at = block.keys.start * narrow + head.index * d;
                        let ds_of = Of { start: ds.as_ptr(), row: n, column: 1 };
                        let b =
                            Of { start: (k as *const f32).add(keys_at), row: narrow, column: 1 };
                        let to = To { start: head_of(dq, first, h), row: wide, adds: false };
                        gemm(isa, [m, d, n], ds_of, b, to);
                        let back = |to: usize, weights: &[f32], rows: usize| {
                            let a = Of { start: weights.as_ptr(), row: 1, column: n };
                            let b = Of { start: head_of(rows, first, h), row: wide, column: 1 };
                            let start = (to as *mut f32).add(keys_at);
                            gemm(isa, [n, d, m], a, b, To { start, row: narrow, adds: true });
                        };
                        back(dk, ds, q);
                        back(dv, p, dy);
                    }
                    let at = head.sequence * heads + h;
                    shared.slice_mut(at..at + 1)[0] = of_sink;
                }
            }
        });
        self.add_sinks(of, node, &of_sinks);
    }

    /// The gradients of the sinks, of those of each sequence.
    pub(super) fn add_sinks(&self, of: &Attention, node: &Node, each: &[f64]) {
        if of.sinks {
            // SAFETY: a node's operands.
            let to = unsafe { self.write(node.outputs[3]) };
            for (h, to) in to.iter_mut().enumerate() {
                *to = each.iter().skip(h).step_by(of.heads).sum::<f64>() as f32;
            }
        }
    }
}

/// Products of queries and keys become scores, scaled and bounded.
pub(super) fn bounded(of: &Attention, isa: Isa, scores: &mut [f32]) {
    match of.cap {
        Some(cap) => {
            math::scale_in_place(isa, of.scale / cap, scores);
            math::map_in_place(isa, Unary::Tanh, scores);
            math::scale_in_place(isa, cap, scores);
        }
        None => math::scale_in_place(isa, of.scale, scores),
    }
}

/// Scores fall by `slope` with each position from the last, the query's own, back, and become
/// weights; gives the logarithm of their denominator.
pub(super) fn softmax(isa: Isa, scores: &mut [f32], sink: Option<f32>, slope: f32) -> f32 {
    fall(isa, scores, slope);
    let top = math::max(isa, scores).max(sink.unwrap_or(f32::NEG_INFINITY));
    vectorised(isa, || scores.iter_mut().for_each(|score| *score -= top));
    math::map_in_place(isa, Unary::Exp, scores);
    let sum = vectorised(isa, || total(scores, scores, |p, _| p));
    let sum = sum + sink.map_or(0.0, |sink| f64::from(sink - top).exp());
    math::scale_in_place(isa, (1.0 / sum) as f32, scores);
    (f64::from(top) + sum.ln()) as f32
}

fn fall(isa: Isa, scores: &mut [f32], slope: f32) {
    if slope != 0.0 {
        let last = scores.len() as f32 - 1.0;
        vectorised(isa, || {
            scores.iter_mut().enumerate().for_each(|(i, s)| *s -= slope * (last - i as f32));
        });
    }
}

/// Turns scores `p` into weights, and the weights' gradients `ds` into gradients of `q . k`; the last
/// is the query's own.
pub(super) fn through(
    of: &Attention,
    isa: Isa,
    p: &mut [f32],
    ds: &mut [f32],
    (lse, along, slope): (f32, f32, f32),
) {
    match of.cap {
        Some(cap) => {
            for (ds, score) in ds.iter_mut().zip(&*p) {
                let tanh = score / cap;
                *ds = (*ds - along) * of.scale * (1.0 - tanh * tanh);
            }
        }
        None => vectorised(isa, || ds.iter_mut().for_each(|ds| *ds = (*ds - along) * of.scale)),
    }
    fall(isa, p, slope);
    vectorised(isa, || p.iter_mut().for_each(|score| *score -= lse));
    math::map_in_place(isa, Unary::Exp, p);
    math::zip_in_place(isa, Binary::Mul, ds, p);
}

/// The product of two rows, summed in f64.
pub(super) fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    vectorised(isa, || total(a, b, |a, b| a * b)) as f32
}
