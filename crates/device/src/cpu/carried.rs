//! Operations with a recurrent state: short convolutions, gated delta nets and selective state
//! spaces. The rows of a sequence are processed in order in every kind of step, so that the state
//! does not depend on where a prompt is cut into steps. Workers split columns and heads.

use super::replay::Replay;
use super::state::{Cache, States};
use cpu_kernels::delta::{self, COLUMNS, Head};
use cpu_kernels::math;
use cpu_kernels::matmul::ROWS;
use cpu_kernels::scan;
use cpu_kernels::team::Worker;
use ops::{DeltaNet, SelectiveScan, ShortConv};
use program::{BLOCK_TOKENS, Node};
use std::ops::Range;

/// Consecutive rows of a step whose state is stored in one block.
struct Segment {
    /// Indices of the rows in the step.
    rows: Range<usize>,
    /// The state before them; `None` at the start of a sequence, where it is zero.
    from: Option<*mut f32>,
    /// Where the state after them goes; may equal `from`.
    to: *mut f32,
}

impl Replay<'_> {
    fn states(&self, layer: usize) -> &States {
        match &self.caches[layer] {
            Cache::State(states) => states,
            Cache::KeysValues(_) => unreachable!("the verifier gives states to what carries them"),
        }
    }

    /// The segments of a sequence's rows, one for each block. State pointers are offset by `part`
    /// elements.
    fn segments(
        &self,
        layer: usize,
        part: usize,
        sequence: usize,
    ) -> impl Iterator<Item = Segment> {
        let (states, table) = (self.states(layer), self.table(layer, sequence));
        let of = self.step.placed().nth(sequence);
        let (first, start, end) =
            of.map_or((0, 0, 0), |(first, s)| (first, s.start as usize, s.end() as usize));
        let state = move |position: usize| {
            let block = table[position / BLOCK_TOKENS % table.len()];
            states.start(block).wrapping_add(part)
        };
        let blocks = start / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS);
        blocks.map(move |block| {
            let from = start.max(block * BLOCK_TOKENS);
            let to = end.min((block + 1) * BLOCK_TOKENS);
            Segment {
                rows: first + from - start..first + to - start,
                from: from.checked_sub(1).map(state),
                to: state(from),
            }
        })
    }

    /// Each worker computes some columns of all rows.
    pub(super) fn short_conv(&self, op: &ShortConv, node: &Node, worker: &Worker<'_>) {
        let (width, carried) = (op.width, op.kernel - 1);
        let columns = worker.split_units(width, ROWS);
        let taps = self.vector(node.weights[0]);
        let bias = node.weights.get(1).map(|&bias| &self.vector(bias)[columns.clone()]);
        let (x, y) = (self.offset(node.inputs[0]), self.offset(node.outputs[0]));
        for segment in (0..self.step.sequences.len())
            .flat_map(|sequence| self.segments(op.layer, op.start, sequence))
        {
            // SAFETY: each worker has its own columns of rows and states; inputs are only read.
            unsafe {
                // Row `i` counts the carried rows first, then the segment's own. `None` before the
                // start of the sequence.
                let row = |i: usize| -> Option<&[f32]> {
                    if let Some(own) = i.checked_sub(carried) {
                        let at = (segment.rows.start + own) * width;
                        return Some(self.floats(x, at + columns.start..at + columns.end));
                    }
                    let start = segment.from?.add(i * width + columns.start);
                    Some(std::slice::from_raw_parts(start, columns.len()))
                };
                for (i, t) in segment.rows.clone().enumerate() {
                    let at = t * width;
                    let y = self.floats(y, at + columns.start..at + columns.end);
                    match bias {
                        Some(bias) => y.copy_from_slice(bias),
                        None => y.fill(0.0),
                    }
                    for j in 0..op.kernel {
                        let Some(x) = row(i + j) else { continue };
                        let taps = &taps[j * width + columns.start..j * width + columns.end];
                        for ((y, x), tap) in y.iter_mut().zip(x).zip(taps) {
                            *y += tap * x;
                        }
                    }
                    if let Some(f) = op.activation {
                        math::map_in_place(self.loaded.isa, f, y);
                    }
                }
                // Copying in ascending order never overwrites a row that is still to be read.
                for j in 0..carried {
                    let to = segment.to.add(j * width + columns.start);
                    match row(segment.rows.len() + j) {
                        Some(x) => std::ptr::copy(x.as_ptr(), to, columns.len()),
                        None => to.write_bytes(0, columns.len()),
                    }
                }
            }
        }
    }

    /// Each worker computes some columns of some heads.
    pub(super) fn delta_net(&self, op: &DeltaNet, node: &Node, worker: &Worker<'_>) {
        let &DeltaNet { heads, key_dim, value_dim, layer, start, .. } = op;
        let (rows, width) = (self.step.tokens.len(), op.width());
        let [decay, dt] = [0, 1].map(|i| node.weights.get(i).map(|weight| self.vector(*weight)));
        let out = self.arena.wrapping_add(self.offset(node.outputs[0])).cast::<f32>();
        // SAFETY: inputs are only read.
        let [qkv, a, b] = [(0, width), (1, op.gates()), (2, heads)].map(|(i, width)| unsafe {
            &*self.floats(self.offset(node.inputs[i]), 0..rows * width)
        });
        let parts = value_dim.div_ceil(COLUMNS);
        for item in worker.split(self.step.sequences.len() * heads * parts) {
            let (sequence, h, part) = (item / parts / heads, item / parts % heads, item % parts);
            let columns = part * COLUMNS..value_dim.min((part + 1) * COLUMNS);
            let head = Head {
                qkv,
                stride: width,
                starts: op.starts(h),
                key_dim,
                value_dim,
                head: h,
                heads,
                a,
                b,
                decay: decay.map_or(0.0, |decay| decay[h]),
                dt: dt.map_or(0.0, |dt| dt[h]),
                strongest: op.strongest(),
                by_element: op.by_element,
            };
            for Segment { rows, from, to } in self.segments(layer, start, sequence) {
                let at = h * key_dim * value_dim;
                let to = to.wrapping_add(at);
                let from = from.map(|from| from.wrapping_add(at));
                // SAFETY: each worker has its own columns of states and rows.
                unsafe {
                    take_up(from, to, key_dim, value_dim, &columns);
                    let out = out.wrapping_add(h * value_dim);
                    let (isa, columns) = (self.loaded.isa, columns.clone());
                    delta::advance(isa, &head, rows, columns, to, out, heads * value_dim);
                }
            }
        }
    }

    /// Each worker computes some columns of some heads.
    pub(super) fn selective_scan(&self, op: &SelectiveScan, node: &Node, worker: &Worker<'_>) {
        let &SelectiveScan { heads, head_dim, state, layer, start, .. } = op;
        let out = self.arena.wrapping_add(self.offset(node.outputs[0])).cast::<f32>();
        let parts = head_dim.div_ceil(COLUMNS);
        for item in worker.split(self.step.sequences.len() * heads * parts) {
            let (sequence, h, part) = (item / parts / heads, item / parts % heads, item % parts);
            let columns = part * COLUMNS..head_dim.min((part + 1) * COLUMNS);
            let head = self.scan_head(op, node, h);
            for Segment { rows, from, to } in self.segments(layer, start, sequence) {
                let at = h * state * head_dim;
                let to = to.wrapping_add(at);
                let from = from.map(|from| from.wrapping_add(at));
                // SAFETY: each worker has its own columns of states and rows.
                unsafe {
                    take_up(from, to, state, head_dim, &columns);
                    let out = out.wrapping_add(h * head_dim);
                    let (isa, columns) = (self.loaded.isa, columns.clone());
                    scan::advance(isa, &head, rows, columns, to, out, heads * head_dim);
                }
            }
        }
    }

    /// The inputs of head `h` of a state space.
    fn scan_head(&self, op: &SelectiveScan, node: &Node, h: usize) -> scan::Head<'_> {
        let &SelectiveScan { heads, head_dim, state, limit, .. } = op;
        let tokens = self.step.tokens.len();
        let input = |i: usize, stride: usize, start: usize| {
            let offset = self.offset(node.inputs[i]);
            // SAFETY: inputs are only read.
            let rows = unsafe { &*self.floats(offset, 0..tokens * stride) };
            scan::Input { rows, stride, start }
        };
        let weight = |i: usize| self.vector(node.weights[i]);
        let [x, b, c] = op.starts(h);
        if op.by_element {
            let (inner, each) = (heads * head_dim, op.groups * state);
            let own = h * head_dim..(h + 1) * head_dim;
            let rates = scan::Rates::ByElement {
                step: input(1, inner, x),
                decay: &weight(0)[own.start * state..own.end * state],
                skip: &weight(1)[own],
            };
            let (b, c) = (input(2, each, b - inner), input(3, each, b - inner));
            return scan::Head { x: input(0, inner, x), b, c, state, head_dim, rates };
        }
        let rates = scan::Rates::Together {
            dt: input(1, heads, h),
            decay: weight(0)[h],
            bias: weight(1)[h],
            skip: weight(2)[h],
            limit,
        };
        let [x, b, c] = [x, b, c].map(|start| input(0, op.width(), start));
        scan::Head { x, b, c, state, head_dim, rates }
    }
}

/// Copies columns of a `[rows, width]` matrix to another, or zeros them if `from` is `None`.
///
/// # Safety
/// Both are valid `[rows, width]` matrices, and no other worker accesses these columns.
unsafe fn take_up(
    from: Option<*mut f32>,
    to: *mut f32,
    rows: usize,
    width: usize,
    columns: &Range<usize>,
) {
    if from == Some(to) {
        return;
    }
    for at in (0..rows).map(|row| row * width + columns.start) {
        // SAFETY: the columns exist, by the caller's promise.
        unsafe {
            match from {
                Some(from) => std::ptr::copy(from.add(at), to.add(at), columns.len()),
                None => to.add(at).write_bytes(0, columns.len()),
            }
        }
    }
}
