//! One head of a selective state space (Mamba-2): a matrix `h` `[state, head_dim]` that each row
//! decays, adds to and reads.
//!
//! ```text
//! h = exp(decay step) h + B (step x),  y = C h + skip x
//! step = clamp(softplus(dt + bias), limit)
//! ```
//!
//! The columns of `h` are independent, so workers split a head by columns, and all rows of a chunk
//! are processed while a few columns stay in the L1 cache. A column's bits depend on its rows
//! alone.

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
    let n = head.head_dim;
    for row in rows {
        let shifted = head.dt[row * head.heads + head.head] + head.bias;
        let step = if shifted > SOFTPLUS_LINEAR { shifted } else { shifted.exp().ln_1p() };
        let step = step.max(head.limit[0]).min(head.limit[1]);
        let gate = (head.decay * step).exp();
        let of = |start: usize, len: usize| &head.xbc[row * head.stride + start..][..len];
        let [b, c] = [1, 2].map(|i| of(head.starts[i], head.state));
        let x = of(head.starts[0], n).as_ptr();
        for column in columns.clone().step_by(L::N) {
            let width = L::N.min(columns.end - column);
            // SAFETY: rows and columns exist, by the caller's promise.
            unsafe {
                let x = get::<L>(x.add(column), width);
                let y = column_step::<L>(state.add(column), n, width, b, c, gate, x, step);
                let y = x.fma(L::splat(head.skip), y);
                put(y, out.add(row * out_stride + column), width);
            }
        }
    }
}

/// One row's step for the `width` columns at `h`, with row stride `n`; returns `C h`.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn column_step<L: Lanes>(
    h: *mut f32,
    n: usize,
    width: usize,
    b: &[f32],
    c: &[f32],
    gate: f32,
    x: L,
    step: f32,
) -> L {
    let (g, added) = (L::splat(gate), x.mul(L::splat(step)));
    // Four sums hide the latency of the additions.
    let mut y = [L::splat(0.0); 4];
    for (i, (&b, &c)) in b.iter().zip(c).enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let at = h.add(i * n);
            let new = added.fma(L::splat(b), get::<L>(at, width).mul(g));
            put(new, at, width);
            y[i % 4] = new.fma(L::splat(c), y[i % 4]);
        }
    }
    y[0].add(y[1]).add(y[2].add(y[3]))
}
