//! One head of a selective state space (Mamba-2): a matrix `h` `[state, head_dim]` that each row
//! decays, adds to and reads.
//!
//! ```text
//! h = exp(decay step) h + B (step x),  y = C h + skip x
//! step = clamp(softplus(dt + bias), limit)
//! ```
//!
//! The columns of `h` are independent, so workers split a head by columns, and all rows of a chunk
//! are processed while a few columns stay in the L1 cache. Two rows go over the columns together,
//! so that each element is read and written once for both; the sums of a row are the same whether
//! another goes with it. A column's bits depend on its rows alone.
//!
//! The form of Mamba-2's paper, in which the rows of a chunk are products of matrices, has hardly
//! fewer multiplications at these sizes (a state of 128 by 64, chunks of 64 rows), and its bits
//! follow from where a chunk begins.

use crate::delta::{SOFTPLUS_LINEAR, get, put};
use crate::isa::Isa;
use crate::math::lanes::{Lanes, dispatch};
use std::ops::Range;

/// The inputs of one head for a chunk of rows.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `x` of all heads, `B` and `C` of all groups: `[rows, stride]`.
    pub xbc: &'a [f32],
    /// Row stride in elements.
    pub stride: usize,
    /// Offsets of the head's `x`, `B` and `C` in a row.
    pub starts: [usize; 3],
    /// Elements of `B` and of `C`.
    pub state: usize,
    /// Elements of `x`.
    pub head_dim: usize,
    /// The head's index.
    pub head: usize,
    /// Number of heads, which is the row stride of `dt`.
    pub heads: usize,
    /// `[rows, heads]`: the step input of each row.
    pub dt: &'a [f32],
    /// The decay rate, negative.
    pub decay: f32,
    /// Added to `dt`.
    pub bias: f32,
    /// The factor on `x` in the output.
    pub skip: f32,
    /// The least and the greatest step.
    pub limit: [f32; 2],
}

/// Advances columns of a head's matrix by some rows, and writes those columns of the output `y`:
/// row `r` at `out + r * out_stride`.
///
/// # Safety
/// `state` points to `[state, head_dim]`, and `out` to as many rows as the head has, of `head_dim`
/// elements each; no other thread accesses these columns of either.
///
/// # Panics
/// If a row or a column does not exist.
pub unsafe fn advance(
    isa: Isa,
    head: &Head<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
    state: *mut f32,
    out: *mut f32,
    out_stride: usize,
) {
    let &Head { xbc, stride, starts: [x, b, c], heads, dt, .. } = head;
    let ends = [x + head.head_dim, b + head.state, c + head.state];
    assert!(
        ends.into_iter().all(|end| end <= stride)
            && rows.end * stride <= xbc.len()
            && rows.end * heads <= dt.len()
            && head.head < heads
            && columns.end <= head.head_dim,
        "selective scan: rows and columns of a head"
    );
    // SAFETY: the rows and columns exist; the columns are this caller's.
    unsafe {
        dispatch!(isa, advance_kernel(head: &Head<'_>, rows: Range<usize>, columns: Range<usize>, state: *mut f32, out: *mut f32, out_stride: usize));
    }
}

/// # Safety
/// As [`advance`], whose checks hold.
#[inline(always)]
unsafe fn advance_kernel<L: Lanes>(
    head: &Head<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
    state: *mut f32,
    out: *mut f32,
    out_stride: usize,
) {
    let odd = rows.end - rows.len() % 2;
    let out = |row: usize| out.wrapping_add(row * out_stride);
    // SAFETY: the caller's promise.
    unsafe {
        for row in (rows.start..odd).step_by(2) {
            let steps = [Step::of(head, row), Step::of(head, row + 1)];
            together::<L, 2>(head, &steps, &columns, state, [out(row), out(row + 1)]);
        }
        if odd < rows.end {
            let steps = [Step::of(head, odd)];
            together::<L, 1>(head, &steps, &columns, state, [out(odd)]);
        }
    }
}

/// One row's inputs.
#[derive(Clone, Copy)]
struct Step<'a> {
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    /// The factor on the matrix.
    gate: f32,
    /// The factor on `x`.
    step: f32,
}

impl<'a> Step<'a> {
    fn of(head: &Head<'a>, row: usize) -> Step<'a> {
        let shifted = head.dt[row * head.heads + head.head] + head.bias;
        let step = if shifted > SOFTPLUS_LINEAR { shifted } else { shifted.exp().ln_1p() };
        let step = step.max(head.limit[0]).min(head.limit[1]);
        let part = |i: usize, len: usize| &head.xbc[row * head.stride + head.starts[i]..][..len];
        Step {
            x: part(0, head.head_dim),
            b: part(1, head.state),
            c: part(2, head.state),
            gate: (head.decay * step).exp(),
            step,
        }
    }
}

/// Advances columns by `R` rows, whose outputs are at `out`.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn together<L: Lanes, const R: usize>(
    head: &Head<'_>,
    steps: &[Step<'_>; R],
    columns: &Range<usize>,
    state: *mut f32,
    out: [*mut f32; R],
) {
    let mut column = columns.start;
    // SAFETY: the caller's promise.
    unsafe {
        // Sets with vectors of 8 have registers for the sums of one vector.
        while L::N != 8 && column + 2 * L::N <= columns.end {
            vectors::<L, R, 2>(head, steps, column, L::N, state, out);
            column += 2 * L::N;
        }
        while column + L::N <= columns.end {
            vectors::<L, R, 1>(head, steps, column, L::N, state, out);
            column += L::N;
        }
        if column < columns.end {
            vectors::<L, R, 1>(head, steps, column, columns.end - column, state, out);
        }
    }
}

/// Advances `V` vectors of columns from `column` on, of `width` elements each, by `R` rows.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn vectors<L: Lanes, const R: usize, const V: usize>(
    head: &Head<'_>,
    steps: &[Step<'_>; R],
    column: usize,
    width: usize,
    state: *mut f32,
    out: [*mut f32; R],
) {
    let (n, len, zero) = (head.head_dim, head.state, L::splat(0.0));
    let (mut x, mut added, mut gates) = ([[zero; V]; R], [[zero; V]; R], [zero; R]);
    // Four sums hide the latency of the additions.
    let mut y = [[[zero; 4]; V]; R];
    let whole = len - len % 4;
    // SAFETY: element `i < state` of columns that exist, by the caller's promise.
    unsafe {
        for r in 0..R {
            gates[r] = L::splat(steps[r].gate);
            for v in 0..V {
                x[r][v] = get::<L>(steps[r].x.as_ptr().add(column + v * L::N), width);
                added[r][v] = x[r][v].mul(L::splat(steps[r].step));
            }
        }
        for i in (0..whole).step_by(4) {
            for sum in 0..4 {
                let h = state.add((i + sum) * n + column);
                element(steps, i + sum, sum, width, h, &added, &gates, &mut y);
            }
        }
        for sum in 0..3 {
            if whole + sum < len {
                let h = state.add((whole + sum) * n + column);
                element(steps, whole + sum, sum, width, h, &added, &gates, &mut y);
            }
        }
        for r in 0..R {
            for v in 0..V {
                let sums = y[r][v];
                let sum = sums[0].add(sums[1]).add(sums[2].add(sums[3]));
                let y = x[r][v].fma(L::splat(head.skip), sum);
                put(y, out[r].add(column + v * L::N), width);
            }
        }
    }
}

/// Element `i` of the columns at `h`, advanced by `R` rows and added to one of their sums.
///
/// # Safety
/// The columns exist, no other thread accesses them, and `i` is below the rows' elements.
#[inline(always)]
unsafe fn element<L: Lanes, const R: usize, const V: usize>(
    steps: &[Step<'_>; R],
    i: usize,
    sum: usize,
    width: usize,
    h: *mut f32,
    added: &[[L; V]; R],
    gates: &[L; R],
    y: &mut [[[L; 4]; V]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        for v in 0..V {
            let at = h.add(v * L::N);
            let mut new = get::<L>(at, width);
            for r in 0..R {
                let (b, c) = (*steps[r].b.get_unchecked(i), *steps[r].c.get_unchecked(i));
                new = added[r][v].fma(L::splat(b), new.mul(gates[r]));
                y[r][v][sum] = new.fma(L::splat(c), y[r][v][sum]);
            }
            put(new, at, width);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the width, and wherever a chunk is cut, rows are those of the recurrence, with the
    /// same bits.
    #[test]
    fn rows_are_those_of_the_recurrence_wherever_they_are_cut() {
        const ROWS: usize = 9;
        for &isa in Isa::available() {
            for (state, head_dim) in [(128, 64), (16, 40), (13, 7), (3, 33), (1, 1)] {
                let (heads, stride) = (2, head_dim + 2 * state + 3);
                let noise = |i: usize| ((i * 7919 + 13) % 1000) as f32 / 500.0 - 1.0;
                let xbc: Vec<f32> = (0..ROWS * stride).map(noise).collect();
                let dt: Vec<f32> = (0..ROWS * heads).map(|i| 3.0 * noise(i + 5)).collect();
                let (head, starts) = (1, [1, 1 + head_dim, 2 + head_dim + state]);
                let (decay, bias, skip, limit) = (-0.7, 0.3, 1.5, [0.05, 2.5]);
                let of = Head {
                    xbc: &xbc,
                    stride,
                    starts,
                    state,
                    head_dim,
                    head,
                    heads,
                    dt: &dt,
                    decay,
                    bias,
                    skip,
                    limit,
                };
                let run = |cuts: &[usize]| {
                    let mut h: Vec<f32> = (0..state * head_dim).map(noise).collect();
                    let mut y = vec![f32::NAN; ROWS * head_dim];
                    for rows in cuts.windows(2) {
                        for columns in [0..head_dim.min(32), head_dim.min(32)..head_dim] {
                            let (h, y) = (h.as_mut_ptr(), y.as_mut_ptr());
                            // SAFETY: one thread, and arrays of these sizes.
                            unsafe { advance(isa, &of, rows[0]..rows[1], columns, h, y, head_dim) };
                        }
                    }
                    (h, y)
                };
                let whole = run(&[0, ROWS]);
                for cuts in [&[0, 1, 2, 9][..], &[0, 3, 8, 9], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]] {
                    assert!(run(cuts) == whole, "{isa:?}: {state} x {head_dim}, cut at {cuts:?}");
                }
                let mut h: Vec<f64> = (0..state * head_dim).map(|i| f64::from(noise(i))).collect();
                for row in 0..ROWS {
                    let shifted = f64::from(dt[row * heads + head]) + f64::from(bias);
                    let step = shifted.exp().ln_1p().clamp(limit[0].into(), limit[1].into());
                    let gate = (f64::from(decay) * step).exp();
                    let at = |i: usize| f64::from(xbc[row * stride + i]);
                    for j in 0..head_dim {
                        let x = at(starts[0] + j);
                        let mut y = f64::from(skip) * x;
                        for i in 0..state {
                            let h = &mut h[i * head_dim + j];
                            *h = *h * gate + at(starts[1] + i) * step * x;
                            y += at(starts[2] + i) * *h;
                        }
                        let found = f64::from(whole.1[row * head_dim + j]);
                        let apart = (found - y).abs();
                        let bound = 1e-5 * (1.0 + y.abs());
                        assert!(apart <= bound, "{isa:?}: {state} x {head_dim}: {found} for {y}");
                    }
                }
            }
        }
    }
}
