//! State spaces whose elements decay at rates of their own, over packed sequences. Each thread has
//! some columns, of which the sequences go one after the other; for gradients as
//! [`states`](super::states) tells.

use super::executor::Run;
use super::states::rows_reversed;
use cpu_kernels::scan::{self, Head, Input, Rates, RowSlopes};
use cpu_kernels::team::SharedSlice;
use ops::SelectiveScan;
use program::Node;
use std::ops::Range;

/// Most columns that a thread takes at a time.
const WIDE: usize = 128;

/// The columns of all heads in parts of at most [`WIDE`], none of which is of two heads.
#[derive(Clone, Copy)]
struct Parts {
    heads: usize,
    head_dim: usize,
}

impl Parts {
    fn of(scan: &SelectiveScan) -> Parts {
        Parts { heads: scan.heads, head_dim: scan.head_dim }
    }

    fn of_head(self) -> usize {
        self.head_dim.div_ceil(WIDE)
    }

    fn count(self) -> usize {
        self.heads * self.of_head()
    }

    /// The head of a part, and its columns of that.
    fn at(self, part: usize) -> (usize, Range<usize>) {
        let (head, part) = (part / self.of_head(), part % self.of_head());
        (head, part * WIDE..self.head_dim.min((part + 1) * WIDE))
    }
}

/// Copies columns of a `[rows, width]` matrix to one that has these alone.
fn copy_columns(from: &[f32], to: &mut [f32], width: usize, columns: &Range<usize>) {
    let each = to.chunks_exact_mut(columns.len()).zip(from.chunks_exact(width));
    each.for_each(|(to, from)| to.copy_from_slice(&from[columns.clone()]));
}

impl Run<'_> {
    /// Some columns of a head, as a head of these alone; `decay` are their decay rates.
    fn columns_of_head<'a>(
        &'a self,
        (of, node): (&SelectiveScan, &Node),
        head: usize,
        columns: &Range<usize>,
        decay: &'a [f32],
    ) -> Head<'a> {
        let &SelectiveScan { heads, groups, head_dim, state, .. } = of;
        let input = |i: usize, stride: usize, start: usize| {
            // SAFETY: inputs are only read.
            Input { rows: unsafe { self.read(node.inputs[i]) }, stride, start }
        };
        let first = head * head_dim + columns.start;
        let shared = head / (heads / groups) * state;
        let skip = &self.weights.vector(node.weights[1])[first..first + columns.len()];
        Head {
            x: input(0, heads * head_dim, first),
            b: input(2, groups * state, shared),
            c: input(3, groups * state, shared),
            state,
            head_dim: columns.len(),
            rates: Rates::ByElement { step: input(1, heads * head_dim, first), decay, skip },
        }
    }

    /// The decay rates of a head, `[state, head_dim]`.
    fn decays(&self, of: &SelectiveScan, node: &Node, head: usize) -> &[f32] {
        let size = of.state * of.head_dim;
        &self.weights.vector(node.weights[0])[head * size..(head + 1) * size]
    }

    pub(super) fn scan_by_element(&self, of: &SelectiveScan, node: &Node) {
        let (parts, stride) = (Parts::of(of), of.heads * of.head_dim);
        let (sequences, isa) = (&self.batch.sequences, self.of.isa);
        let y = self.start(node.outputs[0]) as usize;
        self.each(sequences.len() * parts.count(), 1, &|range, scratch| {
            for at in range {
                let (head, columns) = parts.at(at % parts.count());
                let rows = sequences[at / parts.count()].clone();
                let size = of.state * columns.len();
                scratch.clear();
                scratch.resize(2 * size, 0.0);
                let (matrix, decay) = scratch.split_at_mut(size);
                copy_columns(self.decays(of, node, head), decay, of.head_dim, &columns);
                let own = self.columns_of_head((of, node), head, &columns, decay);
                let y = (y as *mut f32).wrapping_add(head * of.head_dim + columns.start);
                let all = 0..columns.len();
                // SAFETY: the matrix is the thread's own, as are its columns of the rows.
                unsafe { scan::advance(isa, &own, rows, all, matrix.as_mut_ptr(), y, stride) };
            }
        });
    }

    pub(super) fn scan_backward_by_element(&self, of: &SelectiveScan, node: &Node) {
        let &SelectiveScan { groups, state, .. } = of;
        let (parts, rows) = (Parts::of(of), self.rows(node.inputs[0]));
        // What each part has of the gradients of `B` and of `C`.
        let mut shares = vec![0f32; rows * parts.count() * 2 * state];
        let shared = SharedSlice::new(&mut shares);
        self.each(parts.count(), 1, &|range, scratch| {
            for part in range {
                self.columns_backward((of, node), part, scratch, &shared);
            }
        });
        let (of_group, each) = (parts.count() / groups, groups * state);
        self.each(rows, 16, &|range, _| {
            for t in range {
                for (i, output) in node.outputs[2..4].iter().enumerate() {
                    // SAFETY: each row is one thread's.
                    let to = unsafe { self.part(*output, t * each..(t + 1) * each) };
                    to.fill(0.0);
                    for (group, to) in to.chunks_exact_mut(state).enumerate() {
                        for part in group * of_group..(group + 1) * of_group {
                            let at = ((t * parts.count() + part) * 2 + i) * state;
                            // SAFETY: all parts have been written, and are only read.
                            let own = unsafe { shared.slice(at..at + state) };
                            to.iter_mut().zip(own).for_each(|(to, own)| *to += own);
                        }
                    }
                }
            }
        });
    }

    /// The gradients of some columns of all sequences.
    fn columns_backward(
        &self,
        (of, node): (&SelectiveScan, &Node),
        part: usize,
        scratch: &mut Vec<f32>,
        shares: &SharedSlice<'_, f32>,
    ) {
        let (parts, isa, state) = (Parts::of(of), self.of.isa, of.state);
        let (head, columns) = parts.at(part);
        let (width, inner) = (columns.len(), of.heads * of.head_dim);
        let (size, first) = (state * width, head * of.head_dim + columns.start);
        let chunk_of = |rows: &Range<usize>| rows.len().isqrt().max(1);
        let most = |of: &dyn Fn(&Range<usize>) -> usize| {
            self.batch.sequences.iter().map(of).max().unwrap_or(0)
        };
        let chunks = most(&|rows| rows.len().div_ceil(chunk_of(rows)));
        scratch.clear();
        // Decay rates; the matrices in front of each chunk, in front of each of its rows and behind
        // them; their gradient; an output that nothing reads; sums over a chunk's rows.
        scratch.resize((chunks + most(&chunk_of) + 4) * size + 2 * width, 0.0);
        let (decay, rest) = scratch.split_at_mut(size);
        let (starts, rest) = rest.split_at_mut(chunks * size);
        let (slopes, rest) = rest.split_at_mut(size);
        let (sums, rest) = rest.split_at_mut(size + width);
        let (unread, states) = rest.split_at_mut(width);
        copy_columns(self.decays(of, node, head), decay, of.head_dim, &columns);
        let own = self.columns_of_head((of, node), head, &columns, decay);
        let mut advance = |rows: Range<usize>, state: &mut [f32]| {
            // SAFETY: the matrix and the row of outputs, which all rows write, are the thread's.
            unsafe {
                let (state, out) = (state.as_mut_ptr(), unread.as_mut_ptr());
                scan::advance(isa, &own, rows, 0..width, state, out, 0);
            }
        };
        let mut totals = vec![0f64; size + width];
        for rows in &self.batch.sequences {
            let each = chunk_of(rows);
            let memory = [&mut *starts, &mut *states, &mut *slopes];
            rows_reversed(rows.clone(), each, memory, &mut advance, &mut |t, matrices| {
                let at = t * inner + first..t * inner + first + width;
                let share = (t * parts.count() + part) * 2 * state;
                // SAFETY: inputs are only read; the columns, and the part's share of what is added
                // up, are the thread's own.
                unsafe {
                    let share = shares.slice_mut(share..share + 2 * state);
                    let (b, c) = share.split_at_mut(state);
                    let [x, step] = [0, 1].map(|i| self.part(node.outputs[i], at.clone()));
                    let (decay, skip) = sums.split_at_mut(size);
                    let to = RowSlopes { x, step, b, c, decay, skip };
                    let dy = &self.read(node.inputs[4])[at];
                    scan::backward(isa, &own, t, matrices, dy, to);
                }
                // A chunk's first row is its last here.
                if (t - rows.start).is_multiple_of(each) {
                    let all = totals.iter_mut().zip(&*sums);
                    all.for_each(|(total, sum)| *total += f64::from(*sum));
                    sums.fill(0.0);
                }
            });
        }
        let (decay, skip) = totals.split_at(size);
        let round = |to: &mut [f32], from: &[f64]| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
        };
        for (i, from) in decay.chunks_exact(width).enumerate() {
            let at = (head * state + i) * of.head_dim + columns.start;
            // SAFETY: these columns are the thread's own.
            round(unsafe { self.part(node.outputs[4], at..at + width) }, from);
        }
        // SAFETY: likewise.
        round(unsafe { self.part(node.outputs[5], first..first + width) }, skip);
    }
}
