//! One head of a gated delta net: a matrix `S` `[key_dim, value_dim]` that each row decays,
//! corrects and reads.
//!
//! ```text
//! S' = g S,  S = S' + k (beta (v - k S')),  y = q S
//! g = exp(decay softplus(a + dt)),  beta = sigmoid(b)
//! ```
//!
//! Queries and keys are normalised to unit length, and queries divided by the root of their width
//! as well. The columns of `S` are independent, so workers split a head by columns, and all rows of
//! a chunk are processed while a few columns stay in the L1 cache. A column's bits depend on its
//! rows alone.

use crate::isa::Isa;
use crate::math::lanes::{Lanes, WIDEST, dispatch};
use std::ops::Range;

/// The most elements of a query or key.
pub const MAX_KEY_DIM: usize = 256;

/// Fewest columns for which a pass over a chunk's rows pays off.
pub const COLUMNS: usize = 2 * WIDEST;

/// Added to the squared length of a query or key.
const LENGTH_EPS: f32 = 1e-6;

/// From here on `softplus(x)` rounds to `x`.
const SOFTPLUS_LINEAR: f32 = 20.0;

/// The inputs of one head for a chunk of rows.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Queries, keys and values: `[rows, stride]`.
    pub qkv: &'a [f32],
    /// Row stride in elements.
    pub stride: usize,
    /// Offsets of the head's query, key and value in a row.
    pub starts: [usize; 3],
    /// Elements of a query or key: at most [`MAX_KEY_DIM`].
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// The head's index.
    pub head: usize,
    /// Number of heads, which is the row stride of `a` and `b`.
    pub heads: usize,
    /// `[rows, heads]`: the decay input of each row.
    pub a: &'a [f32],
    /// `[rows, heads]`: the write strength input of each row.
    pub b: &'a [f32],
    /// The decay rate, negative.
    pub decay: f32,
    /// Added to `a`.
    pub dt: f32,
}

/// Advances columns of a head's matrix by some rows, and writes those columns of the output `y`:
/// row `r` at `out + r * out_stride`.
///
/// # Safety
/// `state` points to `[key_dim, value_dim]`, and `out` to as many rows as the head has, of
/// `value_dim` elements each; no other thread accesses these columns of either.
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
    let &Head { qkv, stride, starts, key_dim, value_dim, heads, a, b, .. } = head;
    let ends = [(key_dim, starts[0]), (key_dim, starts[1]), (value_dim, starts[2])];
    assert!(
        ends.into_iter().all(|(len, start)| start + len <= stride)
            && rows.end * stride <= qkv.len()
            && rows.end * heads <= a.len().min(b.len())
            && head.head < heads
            && key_dim <= MAX_KEY_DIM
            && columns.end <= value_dim,
        "delta net: rows of a head"
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
    let (key_dim, n) = (head.key_dim, head.value_dim);
    let (mut q, mut k) = ([0.0; MAX_KEY_DIM], [0.0; MAX_KEY_DIM]);
    let root = 1.0 / (key_dim as f32).sqrt();
    for row in rows {
        // SAFETY: rows and columns exist, by the caller's promise; a key fits its array.
        unsafe {
            let x = head.qkv.as_ptr().add(row * head.stride);
            unit::<L>(x.add(head.starts[0]), key_dim, root, &mut q);
            unit::<L>(x.add(head.starts[1]), key_dim, 1.0, &mut k);
            let (gate, beta) = gates(head, row);
            for column in columns.clone().step_by(L::N) {
                let width = L::N.min(columns.end - column);
                let v = get::<L>(x.add(head.starts[2] + column), width);
                let s = state.add(column);
                let y = column_step::<L>(s, n, width, &q[..key_dim], &k[..key_dim], v, gate, beta);
                put(y, out.add(row * out_stride + column), width);
            }
        }
    }
}

/// One row's step for the `width` columns at `s`, with row stride `n`; returns their outputs.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn column_step<L: Lanes>(
    s: *mut f32,
    n: usize,
    width: usize,
    q: &[f32],
    k: &[f32],
    v: L,
    gate: f32,
    beta: f32,
) -> L {
    let (len, whole) = (k.len(), k.len() - k.len() % 4);
    let (g, zero) = (L::splat(gate), L::splat(0.0));
    // Four sums hide the latency of the additions.
    let (mut said, mut y) = ([zero; 4], [zero; 4]);
    // SAFETY: the caller's promise.
    unsafe {
        for i in (0..whole).step_by(4) {
            for (u, said) in said.iter_mut().enumerate() {
                *said = get::<L>(s.add((i + u) * n), width).fma(L::splat(k[i + u]), *said);
            }
        }
        for i in whole..len {
            said[0] = get::<L>(s.add(i * n), width).fma(L::splat(k[i]), said[0]);
        }
        let said = said[0].add(said[1]).add(said[2].add(said[3])).mul(g);
        let change = v.sub(said).mul(L::splat(beta));
        for i in (0..whole).step_by(4) {
            for (u, y) in y.iter_mut().enumerate() {
                let at = s.add((i + u) * n);
                let new = change.fma(L::splat(k[i + u]), get::<L>(at, width).mul(g));
                put(new, at, width);
                *y = new.fma(L::splat(q[i + u]), *y);
            }
        }
        for i in whole..len {
            let at = s.add(i * n);
            let new = change.fma(L::splat(k[i]), get::<L>(at, width).mul(g));
            put(new, at, width);
            y[0] = new.fma(L::splat(q[i]), y[0]);
        }
    }
    y[0].add(y[1]).add(y[2].add(y[3]))
}

/// `x` divided by its length, times `by`.
///
/// # Safety
/// `x` points to `len` elements, no more than `to` has.
#[inline(always)]
unsafe fn unit<L: Lanes>(x: *const f32, len: usize, by: f32, to: &mut [f32; MAX_KEY_DIM]) {
    let mut sum = L::splat(0.0);
    // SAFETY: every index is below `len`.
    unsafe {
        for i in (0..len).step_by(L::N) {
            let x = get::<L>(x.add(i), L::N.min(len - i));
            sum = x.fma(x, sum);
        }
        let scale = L::splat(by / (sum.sum() + LENGTH_EPS).sqrt());
        for i in (0..len).step_by(L::N) {
            let width = L::N.min(len - i);
            put(get::<L>(x.add(i), width).mul(scale), to.as_mut_ptr().add(i), width);
        }
    }
}

/// The factor by which a row decays the matrix, and the strength with which it writes its
/// correction.
#[inline(always)]
fn gates(head: &Head<'_>, row: usize) -> (f32, f32) {
    let at = row * head.heads + head.head;
    let step = head.a[at] + head.dt;
    let step = if step > SOFTPLUS_LINEAR { step } else { step.exp().ln_1p() };
    ((head.decay * step).exp(), 1.0 / (1.0 + (-head.b[at]).exp()))
}

/// # Safety
/// `p` points to `width <= N` elements.
#[inline(always)]
unsafe fn get<L: Lanes>(p: *const f32, width: usize) -> L {
    // SAFETY: the caller's promise.
    unsafe { if width == L::N { L::load(p) } else { L::load_part(p, width) } }
}

/// # Safety
/// `p` points to `width <= N` elements, which no other thread accesses.
#[inline(always)]
unsafe fn put<L: Lanes>(x: L, p: *mut f32, width: usize) {
    // SAFETY: the caller's promise.
    unsafe { if width == L::N { x.store(p) } else { x.store_part(p, width) } }
}
