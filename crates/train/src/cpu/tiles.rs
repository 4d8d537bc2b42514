//! Attention among packed rows on the tile unit: `attention`, with operands of products rounded to
//! bf16. A block of queries at a time meets the keys and values of its head, which are packed once.

use super::attention::{Head, bounded, dot, softmax, through};
use super::executor::{Run, Scratch};
use cpu_kernels::matmul::{
    Output, PackedSide, Side, StridedRows, multiply_packed, pack, tiles_halves,
};
use device::Precision;
use ops::Attention;
use ops::gradient::seen;
use program::Node;
use std::ops::Range;

/// Queries of a block.
const QUERIES: usize = 64;
/// Bytes that tiles are aligned to.
const LINE: usize = 64;

/// Parts of a thread's memory, handed out one behind the other.
struct Room {
    next: *mut u8,
    end: *mut u8,
}

impl Room {
    fn new(floats: &mut [f32]) -> Room {
        let range = floats.as_mut_ptr_range();
        let next = range.start.cast::<u8>();
        Room { next: next.wrapping_add(next.align_offset(LINE)), end: range.end.cast() }
    }

    fn take(&mut self, bytes: usize) -> *mut u8 {
        let start = self.next;
        self.next = start.wrapping_add(bytes.next_multiple_of(LINE));
        assert!(self.next <= self.end, "room for the parts");
        start
    }
}

/// The work on one head of a sequence with these rows, in a thread's own memory.
type HeadWork<'a> = dyn Fn(Head, Range<usize>, Room, &mut Scratch) + Sync + 'a;

/// A block of queries, the keys that they see among those of whole tiles, and where in the sequence
/// these begin.
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
    first: usize,
}

impl Block {
    /// The keys of a query, among those of the block.
    fn own(&self, of: &Attention, first: usize, query: usize) -> Range<usize> {
        let seen = seen(of, first as u32, query);
        seen.start() - self.keys.start..seen.end() + 1 - self.keys.start
    }

    /// The keys in whole tiles.
    fn wide(&self) -> usize {
        self.keys.len().next_multiple_of(PackedSide::SIDE)
    }
}

fn blocks(of: &Attention, rows: Range<usize>) -> impl Iterator<Item = Block> {
    rows.clone().step_by(QUERIES).map(move |start| {
        let queries = start..rows.end.min(start + QUERIES);
        let oldest = *seen(of, rows.start as u32, start).start();
        let first = (oldest - rows.start) / PackedSide::SIDE * PackedSide::SIDE;
        Block { keys: rows.start + first..queries.end, queries, first }
    })
}

/// Bytes of rows of f32 that are as long as keys in whole tiles.
fn scores(rows: usize) -> usize {
    QUERIES * rows.next_multiple_of(PackedSide::SIDE) * size_of::<f32>()
}

impl Run<'_> {
    /// Whether attention goes to the tile unit: whole tiles of a head.
    pub(super) fn attends_in_tiles(&self, of: &Attention) -> bool {
        let rounds = self.of.precision == Precision::BF16 && tiles_halves(self.of.isa);
        rounds && of.head_dim.is_multiple_of(PackedSide::SIDE)
    }

    /// Calls `f` with every head of every sequence, and with a thread's memory, in which there is
    /// room for the sides `[side, depth]` and the rows of scores that `sizes` gives.
    fn heads_in_tiles(
        &self,
        of: &Attention,
        sizes: &(dyn Fn(usize) -> (Vec<[usize; 2]>, usize) + Sync),
        f: &HeadWork<'_>,
    ) {
        let sequences = &self.batch.sequences;
        self.each_with(sequences.len() * of.kv_heads, 1, &|range, scratch| {
            for at in range {
                let head = Head { sequence: at / of.kv_heads, index: at % of.kv_heads };
                let rows = sequences[head.sequence].clone();
                let (sides, several) = sizes(rows.len());
                let sides = sides.iter().map(|[side, depth]| PackedSide::bytes(*side, *depth));
                let bytes = sides.sum::<usize>() + several * scores(rows.len()) + LINE;
                let floats = bytes.div_ceil(size_of::<f32>());
                let mut own = std::mem::take(&mut scratch.floats);
                if own.len() < floats {
                    own.resize(floats, 0.0);
                }
                f(head, rows, Room::new(&mut own), scratch);
                scratch.floats = own;
            }
        });
    }

    pub(super) fn attend_in_tiles(&self, of: &Attention, node: &Node) {
        let Attention { heads, kv_heads, head_dim: d, .. } = *of;
        let [q, k, v] = [0, 1, 2].map(|i| self.start(node.inputs[i]) as usize);
        let [y, lse] = [0, 1].map(|i| self.start(node.outputs[i]) as usize);
        let (wide, narrow, isa) = (heads * d, kv_heads * d, self.of.isa);
        let (sinks, slopes) = (self.sinks(of, node), self.slopes(of, node));
        let sides = |rows| vec![[rows, d], [d, rows], [QUERIES, d], [QUERIES, rows]];
        self.heads_in_tiles(of, &|rows| (sides(rows), 1), &|head, rows, mut room, scratch| {
            let [keys, values, queries, weights] =
                [[rows.len(), d], [d, rows.len()], [QUERIES, d], [QUERIES, rows.len()]]
                    .map(|[side, depth]| room.take(PackedSide::bytes(side, depth)));
            let p = room.take(scores(rows.len())).cast::<f32>();
            let at = rows.start * narrow + head.index * d;
            let of_keys = |start: usize| StridedRows {
                start: (start as *const f32).wrapping_add(at),
                stride: narrow,
            };
            let scratch = &mut scratch.product;
            // SAFETY: rows of a head are inside the values, and tiles inside the room; each task
            // writes its own heads of `y` and `lse`.
            unsafe {
                let keys = pack(isa, of_keys(k), [rows.len(), d], (true, Side::Right), keys);
                let values = pack(isa, of_keys(v), [d, rows.len()], (false, Side::Right), values);
                for h in head.index * (heads / kv_heads)..(head.index + 1) * (heads / kv_heads) {
                    for block in blocks(of, rows.clone()) {
                        let (m, n) = (block.queries.len(), block.wide());
                        let start = block.queries.start * wide + h * d;
                        let q = StridedRows { start: (q as *const f32).add(start), stride: wide };
                        let queries = pack(isa, q, [m, d], (true, Side::Left), queries);
                        let out = Output { start: p, stride: n };
                        let sizes = [m.next_multiple_of(PackedSide::SIDE), n, d];
                        let sides = [queries, keys.from(block.first, 0)];
                        multiply_packed(isa, sides, sizes, out, false, scratch);
                        for (i, t) in block.queries.clone().enumerate() {
                            let row = std::slice::from_raw_parts_mut(p.add(i * n), n);
                            let own = block.own(of, rows.start, t);
                            row[..own.start].fill(0.0);
                            row[own.end..].fill(0.0);
                            bounded(of, isa, &mut row[own.clone()]);
                            let sink = sinks.map(|sinks| sinks[h]);
                            let found = softmax(isa, &mut row[own], sink, slopes[h]);
                            *(lse as *mut f32).add(t * heads + h) = found;
                        }
                        let p = StridedRows { start: p, stride: n };
                        let weights = pack(isa, p, [m, n], (true, Side::Left), weights);
                        let out = Output { start: (y as *mut f32).add(start), stride: wide };
                        let sides = [weights, values.from(0, block.first)];
                        multiply_packed(isa, sides, [m, d, n], out, false, scratch);
                    }
                }
            }
        });
    }

    pub(super) fn attend_backward_in_tiles(&self, of: &Attention, node: &Node) {
        let Attention { heads, kv_heads, head_dim: d, .. } = *of;
        let [q, k, v, y, lse, dy] = [0, 1, 2, 3, 4, 5].map(|i| self.start(node.inputs[i]) as usize);
        let [dq, dk, dv] = [0, 1, 2].map(|i| self.start(node.outputs[i]) as usize);
        let (wide, narrow, isa) = (heads * d, kv_heads * d, self.of.isa);
        let (sinks, slopes) = (self.sinks(of, node), self.slopes(of, node));
        let mut of_sinks = vec![0f64; self.batch.sequences.len() * heads];
        let shared = cpu_kernels::team::SharedSlice::new(&mut of_sinks);
        // Keys and values, queries and `dy`, and keys, queries and `dy` the other way round; then
        // `ds` for `dq`, and `ds` or `p` for `dk` and `dv`.
        let sides = |rows| {
            let (key, query, turned) = ([rows, d], [QUERIES, d], [d, QUERIES]);
            let weights = [[QUERIES, rows], [rows, QUERIES]];
            [&[key, key, query, query, [d, rows], turned, turned][..], &weights].concat()
        };
        self.heads_in_tiles(of, &|rows| (sides(rows), 2), &|head, rows, mut room, scratch| {
            let [key, query, turned_key, turned_query, of_scores, turned_scores] = [
                [rows.len(), d],
                [QUERIES, d],
                [d, rows.len()],
                [d, QUERIES],
                [QUERIES, rows.len()],
                [rows.len(), QUERIES],
            ]
            .map(|[side, depth]| PackedSide::bytes(side, depth));
            let [keys, values, queries, dys] =
                [key, key, query, query].map(|bytes| room.take(bytes));
            let [turned_keys, turned_queries, turned_dys] =
                [turned_key, turned_query, turned_query].map(|bytes| room.take(bytes));
            let [of_dq, of_keys_gradients] =
                [of_scores, turned_scores].map(|bytes| room.take(bytes));
            let [p, ds] = [0, 1].map(|_| room.take(scores(rows.len())).cast::<f32>());
            let at = rows.start * narrow + head.index * d;
            let of_keys = |start: usize| StridedRows {
                start: (start as *const f32).wrapping_add(at),
                stride: narrow,
            };
            let head_of =
                |x: usize, t: usize, h: usize| (x as *mut f32).wrapping_add(t * wide + h * d);
            let scratch = &mut scratch.product;
            let all = [rows.len(), d];
            // SAFETY: rows of a head are inside the values, and tiles inside the room; each task
            // writes its own heads of `dq`, `dk` and `dv`.
            unsafe {
                let keys = pack(isa, of_keys(k), all, (true, Side::Right), keys);
                let values = pack(isa, of_keys(v), all, (true, Side::Right), values);
                let across = [d, rows.len()];
                let turned_keys = pack(isa, of_keys(k), across, (false, Side::Right), turned_keys);
                for gradient in [dk, dv] {
                    for t in 0..rows.len() {
                        let row = (gradient as *mut f32).add(at + t * narrow);
                        std::slice::from_raw_parts_mut(row, d).fill(0.0);
                    }
                }
                for h in head.index * (heads / kv_heads)..(head.index + 1) * (heads / kv_heads) {
                    let mut of_sink = 0.0;
                    for block in blocks(of, rows.clone()) {
                        let (m, n, first) =
                            (block.queries.len(), block.wide(), block.queries.start);
                        let of_queries =
                            |x: usize| StridedRows { start: head_of(x, first, h), stride: wide };
                        let sizes = [m.next_multiple_of(PackedSide::SIDE), n, d];
                        for (x, packed, keys, to) in [(q, queries, keys, p), (dy, dys, values, ds)]
                        {
                            let left = pack(isa, of_queries(x), [m, d], (true, Side::Left), packed);
                            let out = Output { start: to, stride: n };
                            let sides = [left, keys.from(block.first, 0)];
                            multiply_packed(isa, sides, sizes, out, false, scratch);
                        }
                        for (i, t) in block.queries.clone().enumerate() {
                            let [p, ds] =
                                [p, ds].map(|x| std::slice::from_raw_parts_mut(x.add(i * n), n));
                            let own = block.own(of, rows.start, t);
                            let lse = *(lse as *const f32).add(t * heads + h);
                            let [dy, y] =
                                [dy, y].map(|x| std::slice::from_raw_parts(head_of(x, t, h), d));
                            let along = dot(isa, dy, y);
                            for outside in [0..own.start, own.end..n] {
                                p[outside.clone()].fill(0.0);
                                ds[outside].fill(0.0);
                            }
                            bounded(of, isa, &mut p[own.clone()]);
                            let row = (lse, along, slopes[h]);
                            through(of, isa, &mut p[own.clone()], &mut ds[own], row);
                            if let Some(sinks) = sinks {
                                let p = f64::from(sinks[h] - lse).exp();
                                of_sink -= p * f64::from(along);
                            }
                        }
                        let weights = |start: *mut f32| StridedRows { start, stride: n };
                        let left = pack(isa, weights(ds), [m, n], (true, Side::Left), of_dq);
                        let out = Output { start: head_of(dq, first, h), stride: wide };
                        let sides = [left, turned_keys.from(0, block.first)];
                        multiply_packed(isa, sides, [m, d, n], out, false, scratch);
                        for (x, packed, weights, to) in
                            [(q, turned_queries, weights(ds), dk), (dy, turned_dys, weights(p), dv)]
                        {
                            let right =
                                pack(isa, of_queries(x), [d, m], (false, Side::Right), packed);
                            let n = block.keys.len();
                            let left =
                                pack(isa, weights, [n, m], (false, Side::Left), of_keys_gradients);
                            let start =
                                (to as *mut f32).add(block.keys.start * narrow + head.index * d);
                            let out = Output { start, stride: narrow };
                            multiply_packed(isa, [left, right], [n, d, m], out, true, scratch);
                        }
                    }
                    let at = head.sequence * heads + h;
                    shared.slice_mut(at..at + 1)[0] = of_sink;
                }
            }
        });
        self.add_sinks(of, node, &of_sinks);
    }
}
