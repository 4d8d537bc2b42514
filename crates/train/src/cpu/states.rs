//! Operations with a recurrent state, over packed sequences. Each thread has some columns, or the
//! heads that share keys; a sequence's rows go one after the other.
//!
//! For its gradient, a gated delta net goes forward once more and keeps the matrix in front of
//! every chunk of rows; then, from the last chunk to the first, the matrices of one chunk's rows,
//! which it goes back through. With chunks of `sqrt(rows)` rows, memory holds twice as many
//! matrices as a chunk has rows.

use super::executor::Run;
use cpu_kernels::delta::{self, COLUMNS, Head, Reversed, RowSlopes};
use cpu_kernels::team::SharedSlice;
use ops::gradient::scan::{self, ScanHead, ScanRow};
use ops::gradient::{ConvBackward, GatedNormBackward};
use ops::{DeltaNet, SelectiveScan, ShortConv};
use program::Node;
use std::ops::Range;

/// Columns of a convolution that a thread takes at a time.
const WIDE: usize = 64;

impl Run<'_> {
    /// Calls `f` with some columns of every sequence's rows.
    fn columns(&self, width: usize, f: &(dyn Fn(Range<usize>, Range<usize>) + Sync)) {
        let parts = width.div_ceil(WIDE);
        self.each(self.batch.sequences.len() * parts, 1, &|range, _| {
            for at in range {
                let (sequence, part) = (at / parts, at % parts);
                let columns = part * WIDE..width.min((part + 1) * WIDE);
                f(self.batch.sequences[sequence].clone(), columns);
            }
        });
    }

    pub(super) fn convolve(&self, of: &ShortConv, node: &Node) {
        let ShortConv { width, kernel, .. } = *of;
        let (x, y, taps) = (node.inputs[0], node.outputs[0], self.weights.vector(node.weights[0]));
        self.columns(width, &|rows, columns| {
            for t in rows.clone() {
                let at = |t: usize| t * width + columns.start..t * width + columns.end;
                // SAFETY: each thread has its own columns of a sequence; the input is only read.
                let (x, y) = unsafe { (self.read(x), self.part(y, at(t))) };
                match node.weights.get(1) {
                    Some(bias) => y.copy_from_slice(&self.weights.vector(*bias)[columns.clone()]),
                    None => y.fill(0.0),
                }
                for j in kernel.saturating_sub(t - rows.start + 1)..kernel {
                    let (x, taps) = (&x[at(t + j + 1 - kernel)], &taps[at(j)]);
                    y.iter_mut().zip(x).zip(taps).for_each(|((y, x), tap)| *y += tap * x);
                }
            }
        });
    }

    pub(super) fn convolve_backward(&self, of: &ConvBackward, node: &Node) {
        let ShortConv { width, kernel, .. } = of.of;
        let [x, dy] = [0, 1].map(|i| node.inputs[i]);
        let (dx, taps) = (node.outputs[0], self.weights.vector(node.weights[0]));
        self.columns(width, &|rows, columns| {
            for t in rows.clone() {
                let at = |t: usize| t * width + columns.start..t * width + columns.end;
                // SAFETY: each thread has its own columns of a sequence; the input is only read.
                let (dy, dx) = unsafe { (self.read(dy), self.part(dx, at(t))) };
                dx.fill(0.0);
                for ahead in 0..kernel.min(rows.end - t) {
                    let (dy, taps) = (&dy[at(t + ahead)], &taps[at(kernel - 1 - ahead)]);
                    dx.iter_mut().zip(dy).zip(taps).for_each(|((dx, dy), tap)| *dx += tap * dy);
                }
            }
        });
        if !of.taps {
            return;
        }
        self.each(width, WIDE, &|columns, _| {
            // SAFETY: the inputs are only read.
            let (x, dy) = unsafe { (self.read(x), self.read(dy)) };
            let at = |t: usize| t * width + columns.start..t * width + columns.end;
            for j in 0..kernel {
                let mut sums = [0f64; WIDE];
                for rows in &self.batch.sequences {
                    for t in rows.start + (kernel - 1 - j)..rows.end {
                        let terms = x[at(t + j + 1 - kernel)].iter().zip(&dy[at(t)]);
                        let each = sums.iter_mut().zip(terms);
                        each.for_each(|(sum, (x, dy))| *sum += f64::from(*x) * f64::from(*dy));
                    }
                }
                // SAFETY: each thread has its own columns.
                let to = unsafe { self.part(node.outputs[1], at(j)) };
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum as f32);
            }
        });
    }

    /// A row of a state space's inputs.
    fn scan_row<'a>(&'a self, of: &SelectiveScan, node: &Node, t: usize) -> (&'a [f32], &'a [f32]) {
        // SAFETY: inputs are only read.
        let [xbc, dt] = [0, 1].map(|i| unsafe { self.read(node.inputs[i]) });
        (&xbc[t * of.width()..][..of.width()], &dt[t * of.heads..][..of.heads])
    }

    fn scan_head(&self, of: &SelectiveScan, node: &Node, head: usize) -> ScanHead {
        ScanHead::new(of, [0, 1, 2].map(|i| self.weights.vector(node.weights[i])), head)
    }

    pub(super) fn scan(&self, of: &SelectiveScan, node: &Node) {
        let (heads, n) = (of.heads, of.head_dim);
        let sequences = &self.batch.sequences;
        self.each(sequences.len() * heads, 1, &|range, matrix| {
            for at in range {
                let (sequence, h) = (at / heads, at % heads);
                let (head, [x, b, c]) = (self.scan_head(of, node, h), scan::parts(of, h));
                matrix.clear();
                matrix.resize(of.state * n, 0.0);
                for t in sequences[sequence].clone() {
                    let (row, dt) = self.scan_row(of, node, t);
                    head.advance(matrix, [&row[x.clone()], &row[b.clone()]], dt[h]);
                    let first = (t * heads + h) * n;
                    // SAFETY: each head of a sequence is one thread's.
                    let y = unsafe { self.part(node.outputs[0], first..first + n) };
                    head.answer(matrix, [&row[x.clone()], &row[c.clone()]], y);
                }
            }
        });
    }

    /// As gated delta nets do: forward once more for the matrix in front of each chunk, then from
    /// the last chunk to the first. A thread has the heads that share `B` and `C`.
    pub(super) fn scan_backward(&self, of: &SelectiveScan, node: &Node) {
        let &SelectiveScan { heads, groups, head_dim: n, state, .. } = of;
        let (size, sequences) = (state * n, &self.batch.sequences);
        let mut sums = vec![[0f64; 3]; sequences.len() * heads];
        let shared = SharedSlice::new(&mut sums);
        self.each(sequences.len() * groups, 1, &|range, scratch| {
            for at in range {
                let (sequence, group) = (at / groups, at % groups);
                let rows = sequences[sequence].clone();
                let each = rows.len().isqrt().max(1);
                let chunks = rows.len().div_ceil(each);
                let chunk =
                    |c: usize| rows.start + c * each..rows.end.min(rows.start + (c + 1) * each);
                for h in group * (heads / groups)..(group + 1) * (heads / groups) {
                    let (head, [x, b, c]) = (self.scan_head(of, node, h), scan::parts(of, h));
                    let advance = |rows: Range<usize>, matrix: &mut [f32]| {
                        for t in rows {
                            let (row, dt) = self.scan_row(of, node, t);
                            head.advance(matrix, [&row[x.clone()], &row[b.clone()]], dt[h]);
                        }
                    };
                    scratch.clear();
                    scratch.resize((chunks + each + 2) * size + n + 2 * state, 0.0);
                    let (starts, rest) = scratch.split_at_mut(chunks * size);
                    let (states, rest) = rest.split_at_mut((each + 1) * size);
                    let (slopes, rest) = rest.split_at_mut(size);
                    let (work, shares) = rest.split_at_mut(n);
                    for c in 1..chunks {
                        let (before, own) = starts[(c - 1) * size..].split_at_mut(size);
                        own[..size].copy_from_slice(before);
                        advance(chunk(c - 1), &mut own[..size]);
                    }
                    let mut own = [0f64; 3];
                    for part in (0..chunks).rev() {
                        states[..size].copy_from_slice(&starts[part * size..][..size]);
                        for (i, t) in chunk(part).enumerate() {
                            let (before, after) = states[i * size..].split_at_mut(size);
                            after[..size].copy_from_slice(before);
                            advance(t..t + 1, &mut after[..size]);
                        }
                        for (i, t) in chunk(part).enumerate().rev() {
                            let (before, after) = states[i * size..(i + 2) * size].split_at(size);
                            let (row, dt) = self.scan_row(of, node, t);
                            let first = (t * heads + h) * n;
                            // SAFETY: inputs are only read; a head's `x` and `dt`, and what its
                            // group shares, are one thread's.
                            let (dy, dx, [db, dc], ddt) = unsafe {
                                let at = |part: &Range<usize>| {
                                    let start = t * of.width();
                                    start + part.start..start + part.end
                                };
                                let [db, dc] =
                                    [&b, &c].map(|part| self.part(node.outputs[0], at(part)));
                                (
                                    &self.read(node.inputs[2])[first..first + n],
                                    self.part(node.outputs[0], at(&x)),
                                    [db, dc],
                                    self.part(node.outputs[1], t * heads + h..t * heads + h + 1),
                                )
                            };
                            shares.fill(0.0);
                            let (of_b, of_c) = shares.split_at_mut(state);
                            let operands = [&row[x.clone()], &row[b.clone()], &row[c.clone()], dy];
                            let to = ScanRow { x: dx, b: of_b, c: of_c };
                            let found =
                                head.backward([before, after], slopes, operands, dt[h], to, work);
                            let is_first = h.is_multiple_of(heads / groups);
                            for (to, share) in [(db, of_b), (dc, of_c)] {
                                match is_first {
                                    true => to.copy_from_slice(share),
                                    false => {
                                        to.iter_mut().zip(share).for_each(|(to, of)| *to += *of)
                                    }
                                }
                            }
                            ddt[0] = found.dt as f32;
                            own[0] += found.decay;
                            own[1] += found.dt;
                            own[2] += found.skip;
                        }
                    }
                    let at = sequence * heads + h;
                    // SAFETY: each head of a sequence is one thread's.
                    unsafe { shared.slice_mut(at..at + 1)[0] = own };
                }
            }
        });
        for (i, output) in node.outputs[2..].iter().enumerate() {
            // SAFETY: a node's operands.
            let to = unsafe { self.write(*output) };
            for (h, to) in to.iter_mut().enumerate() {
                *to = sums.iter().skip(h).step_by(heads).map(|sums| sums[i]).sum::<f64>() as f32;
            }
        }
    }

    /// The gradients of a gated norm, row by row in f64; the weight's are summed over some rows at
    /// a time, then over these sums.
    pub(super) fn gated_norm_backward(&self, of: &GatedNormBackward, node: &Node) {
        const ROWS: usize = 32;
        let (width, weight) = (self.width(node.inputs[0]), self.weights.vector(node.weights[0]));
        let blocks = self.rows(node.inputs[0]).div_ceil(ROWS);
        let mut sums = vec![0f64; if of.weight { blocks * width } else { 0 }];
        let shared = SharedSlice::new(&mut sums);
        self.each(blocks, 1, &|range, _| {
            for block in range {
                let rows = block * ROWS..self.rows(node.inputs[0]).min((block + 1) * ROWS);
                for t in rows {
                    let row = t * width..(t + 1) * width;
                    // SAFETY: each block of rows is one thread's; the inputs are only read.
                    unsafe {
                        let [gate, x, dy] =
                            [0, 1, 2].map(|i| &self.read(node.inputs[i])[row.clone()]);
                        let to = [0, 1].map(|i| self.part(node.outputs[i], row.clone()));
                        let own = block * width..(block + 1) * width;
                        let sums = of.weight.then(|| shared.slice_mut(own));
                        of.row([gate, x, dy, weight], to, sums);
                    }
                }
            }
        });
        if let Some(output) = node.outputs.get(2) {
            // SAFETY: a node's operands.
            let to = unsafe { self.write(*output) };
            for (i, to) in to.iter_mut().enumerate() {
                *to = sums.iter().skip(i).step_by(width).sum::<f64>() as f32;
            }
        }
    }

    /// A head's operands.
    fn delta_head(&self, of: &DeltaNet, node: &Node, head: usize) -> Head<'_> {
        // SAFETY: inputs are only read.
        let [qkv, a, b] = [0, 1, 2].map(|i| unsafe { self.read(node.inputs[i]) });
        let weight = |i: usize| node.weights.get(i).map(|id| self.weights.vector(*id)[head]);
        let [decay, dt] = [0, 1].map(|i| weight(i).unwrap_or(0.0));
        Head {
            qkv,
            stride: of.width(),
            starts: of.starts(head),
            key_dim: of.key_dim,
            value_dim: of.value_dim,
            head,
            heads: of.heads,
            a,
            b,
            decay,
            dt,
            strongest: of.strongest(),
            by_element: of.by_element,
        }
    }

    pub(super) fn delta(&self, of: &DeltaNet, node: &Node) {
        let (size, isa) = (of.key_dim * of.value_dim, self.of.isa);
        let (parts, stride) = (of.value_dim.div_ceil(COLUMNS), of.heads * of.value_dim);
        let y = self.start(node.outputs[0]) as usize;
        let sequences = &self.batch.sequences;
        self.each(sequences.len() * of.heads * parts, 1, &|range, scratch| {
            for at in range {
                let (sequence, h, part) =
                    (at / parts / of.heads, at / parts % of.heads, at % parts);
                let columns = part * COLUMNS..of.value_dim.min((part + 1) * COLUMNS);
                scratch.clear();
                scratch.resize(size, 0.0);
                let head = self.delta_head(of, node, h);
                let y = (y as *mut f32).wrapping_add(h * of.value_dim);
                let rows = sequences[sequence].clone();
                // SAFETY: the matrix is the thread's own, as are its columns of the rows.
                unsafe {
                    delta::advance(isa, &head, rows, columns, scratch.as_mut_ptr(), y, stride);
                }
            }
        });
    }

    pub(super) fn delta_backward(&self, of: &DeltaNet, node: &Node) {
        let &DeltaNet { heads, key_heads, key_dim, value_dim, .. } = of;
        let (sequences, gates) = (&self.batch.sequences, of.gates() / heads);
        let [dqkv, da, db] = [0, 1, 2].map(|i| self.start(node.outputs[i]) as usize);
        let mut sums = vec![[0f64; 2]; sequences.len() * heads];
        let shared = SharedSlice::new(&mut sums);
        self.each(sequences.len() * key_heads, 1, &|range, scratch| {
            for at in range {
                let (sequence, key_head) = (at / key_heads, at % key_heads);
                let rows = sequences[sequence].clone();
                let row = |t: usize| (dqkv as *mut f32).wrapping_add(t * of.width());
                for h in (0..heads).filter(|h| of.key_head(*h) == key_head) {
                    let head = self.delta_head(of, node, h);
                    let is_first = (0..h).all(|before| of.key_head(before) != key_head);
                    for t in rows.clone().filter(|_| is_first) {
                        for start in &head.starts[..2] {
                            // SAFETY: the keys and queries that a thread's heads share are its own.
                            unsafe { row(t).add(*start).write_bytes(0, key_dim) };
                        }
                    }
                    // SAFETY: inputs are only read.
                    let dy = unsafe { self.read(node.inputs[3]) };
                    let mut own = [0f64; 2];
                    self.reverse(&head, rows.clone(), scratch, &mut |t, matrices, work| {
                        let at = t * heads + h;
                        let dy = &dy[at * value_dim..][..value_dim];
                        // SAFETY: the matrices and the head's parts of rows are the thread's own.
                        unsafe {
                            let to = RowSlopes { qkv: row(t), a: (da as *mut f32).add(at * gates) };
                            let found =
                                delta::backward(self.of.isa, &head, t, matrices, dy, to, work);
                            *(db as *mut f32).add(at) = found.b;
                            own[0] += f64::from(found.decay);
                            own[1] += f64::from(found.dt);
                        }
                    });
                    let at = sequence * heads + h;
                    // SAFETY: each head of a sequence is one thread's.
                    unsafe { shared.slice_mut(at..at + 1)[0] = own };
                }
            }
        });
        for (i, output) in node.outputs[3..].iter().enumerate() {
            // SAFETY: a node's operands.
            let to = unsafe { self.write(*output) };
            for (h, to) in to.iter_mut().enumerate() {
                *to = sums.iter().skip(h).step_by(heads).map(|sums| sums[i]).sum::<f64>() as f32;
            }
        }
    }

    /// Calls `f` with each row of a sequence, the last first, with its matrices and memory for two
    /// rows of values.
    fn reverse(
        &self,
        head: &Head<'_>,
        rows: Range<usize>,
        scratch: &mut Vec<f32>,
        f: &mut dyn FnMut(usize, Reversed, &mut [f32]),
    ) {
        let (values, isa) = (head.value_dim, self.of.isa);
        let size = head.key_dim * values;
        let each = rows.len().isqrt().max(1);
        let chunks = rows.len().div_ceil(each);
        scratch.clear();
        // In front of each chunk; in front of each of its rows, and behind them; the gradient; an
        // output that nothing reads, and two rows of values.
        scratch.resize((chunks + each + 2) * size + 3 * values, 0.0);
        let (starts, rest) = scratch.split_at_mut(chunks * size);
        let (states, rest) = rest.split_at_mut((each + 1) * size);
        let (slopes, rest) = rest.split_at_mut(size);
        let (unread, work) = rest.split_at_mut(values);
        let mut advance = |rows: Range<usize>, state: &mut [f32]| {
            // SAFETY: the matrix and the row of outputs, which all rows write, are the thread's.
            unsafe {
                delta::advance(
                    isa,
                    head,
                    rows,
                    0..values,
                    state.as_mut_ptr(),
                    unread.as_mut_ptr(),
                    0,
                );
            }
        };
        let memory = [starts, states, slopes];
        let f = &mut |t, matrices| f(t, matrices, work);
        rows_reversed(rows, each, memory, &mut advance, f);
    }
}

/// Calls `f` with each row of a sequence, the last first, with the matrices in front of it and behind
/// it and their gradient, the last of `memory`. Matrices are computed by `advance` from what is in
/// front of each chunk of `each` rows, the first of `memory`, a chunk's own at a time, the second.
pub(super) fn rows_reversed(
    rows: Range<usize>,
    each: usize,
    [starts, states, slopes]: [&mut [f32]; 3],
    advance: &mut dyn FnMut(Range<usize>, &mut [f32]),
    f: &mut dyn FnMut(usize, Reversed),
) {
    let (size, chunks) = (slopes.len(), rows.len().div_ceil(each));
    let chunk = |c: usize| rows.start + c * each..rows.end.min(rows.start + (c + 1) * each);
    starts.iter_mut().take(size).for_each(|x| *x = 0.0);
    slopes.fill(0.0);
    for c in 1..chunks {
        let (before, own) = starts[(c - 1) * size..].split_at_mut(size);
        own[..size].copy_from_slice(before);
        advance(chunk(c - 1), &mut own[..size]);
    }
    for c in (0..chunks).rev() {
        states[..size].copy_from_slice(&starts[c * size..][..size]);
        for (i, t) in chunk(c).enumerate() {
            let (before, own) = states[i * size..].split_at_mut(size);
            own[..size].copy_from_slice(before);
            advance(t..t + 1, &mut own[..size]);
        }
        for (i, t) in chunk(c).enumerate().rev() {
            let matrices = Reversed {
                before: states[i * size..].as_ptr(),
                after: states[(i + 1) * size..].as_ptr(),
                slopes: slopes.as_mut_ptr(),
            };
            f(t, matrices);
        }
    }
}
