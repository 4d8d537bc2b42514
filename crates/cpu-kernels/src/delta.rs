//! One head of a gated delta net: a matrix `S` `[key_dim, value_dim]` that each row decays,
//! corrects and reads.
//!
//! ```text
//! S' = g S,  S = S' + k (beta (v - k S')),  y = q S
//! g = exp(decay softplus(a + dt)),  beta = sigmoid(b)
//! ```
//!
//! Where each element of a key decays at a rate of its own, `g` is a diagonal matrix, `exp(a)`.
//!
//! Queries and keys are normalised to unit length, and queries divided by the root of their width
//! as well. The columns of `S` are independent, so workers split a head by columns, and all rows of
//! a chunk are processed while a few columns stay in the L1 cache. A column's bits depend on its
//! rows alone.

use crate::isa::Isa;
use crate::math::exp;
use crate::math::lanes::{Lanes, WIDEST, dispatch};
use std::ops::Range;

/// The most elements of a query or key.
pub const MAX_KEY_DIM: usize = 256;

/// Fewest columns for which a pass over a chunk's rows pays off.
pub const COLUMNS: usize = 2 * WIDEST;

/// Added to the squared length of a query or key.
const LENGTH_EPS: f32 = 1e-6;

/// From here on `softplus(x)` rounds to `x`.
pub(crate) const SOFTPLUS_LINEAR: f32 = 20.0;

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
    /// Number of heads, which is the row stride of `b`.
    pub heads: usize,
    /// `[rows, heads]`: the decay input of each row; or `[rows, heads * key_dim]`, the logarithms of
    /// factors, where each element of a key decays at a rate of its own.
    pub a: &'a [f32],
    /// `[rows, heads]`: the write strength input of each row.
    pub b: &'a [f32],
    /// The decay rate, negative.
    pub decay: f32,
    /// Added to `a`.
    pub dt: f32,
    /// The strength of a correction where the logistic function of `b` is 1.
    pub strongest: f32,
    /// Whether each element of a key decays at a rate of its own.
    pub by_element: bool,
}

impl Head<'_> {
    /// # Panics
    /// If the head has fewer rows.
    fn check(&self, rows: usize) {
        let &Head { qkv, stride, starts, key_dim, value_dim, heads, a, b, by_element, .. } = self;
        let gates = heads * if by_element { key_dim } else { 1 };
        let ends = [(key_dim, starts[0]), (key_dim, starts[1]), (value_dim, starts[2])];
        assert!(
            ends.into_iter().all(|(len, start)| start + len <= stride)
                && rows * stride <= qkv.len()
                && rows * gates <= a.len()
                && rows * heads <= b.len()
                && self.head < heads
                && key_dim <= MAX_KEY_DIM,
            "delta net: rows of a head"
        );
    }
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
    head.check(rows.end);
    assert!(columns.end <= head.value_dim, "delta net: columns of a head");
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
    let (mut factor, mut decayed) = ([0.0; MAX_KEY_DIM], [0.0; MAX_KEY_DIM]);
    let root = 1.0 / (key_dim as f32).sqrt();
    for row in rows {
        // SAFETY: rows and columns exist, by the caller's promise; a key fits its array.
        unsafe {
            let x = head.qkv.as_ptr().add(row * head.stride);
            unit::<L>(x.add(head.starts[0]), key_dim, root, &mut q);
            unit::<L>(x.add(head.starts[1]), key_dim, 1.0, &mut k);
            let (gate, beta) = match head.by_element {
                true => {
                    let a = head.a.as_ptr().add((row * head.heads + head.head) * key_dim);
                    factors::<L>(a, &k[..key_dim], &mut factor, &mut decayed);
                    (1.0, strength(head, row))
                }
                false => {
                    let Gates { gate, beta, .. } = gates(head, row);
                    (gate, beta)
                }
            };
            let key = Key { k: &k[..key_dim], gate, factor: &factor, decayed: &decayed };
            for column in columns.clone().step_by(L::N) {
                let width = L::N.min(columns.end - column);
                let v = get::<L>(x.add(head.starts[2] + column), width);
                let s = state.add(column);
                let q = &q[..key_dim];
                let y = match head.by_element {
                    true => column_step::<L, true>(s, n, width, q, &key, v, beta),
                    false => column_step::<L, false>(s, n, width, q, &key, v, beta),
                };
                put(y, out.add(row * out_stride + column), width);
            }
        }
    }
}

/// A row's key, and the factors by which it decays the matrix.
struct Key<'a> {
    k: &'a [f32],
    /// The factor of all elements, where it is one.
    gate: f32,
    /// The factor of each element else.
    factor: &'a [f32; MAX_KEY_DIM],
    /// The key times these.
    decayed: &'a [f32; MAX_KEY_DIM],
}

/// One row's step for the `width` columns at `s`, with row stride `n`; returns their outputs.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn column_step<L: Lanes, const BY_ELEMENT: bool>(
    s: *mut f32,
    n: usize,
    width: usize,
    q: &[f32],
    key: &Key<'_>,
    v: L,
    beta: f32,
) -> L {
    let k = key.k;
    let (len, whole) = (k.len(), k.len() - k.len() % 4);
    let (g, zero) = (L::splat(key.gate), L::splat(0.0));
    let decayed = if BY_ELEMENT { &key.decayed[..len] } else { k };
    let factor = |i: usize| if BY_ELEMENT { L::splat(key.factor[i]) } else { g };
    // Four sums hide the latency of the additions.
    let (mut said, mut y) = ([zero; 4], [zero; 4]);
    // SAFETY: the caller's promise.
    unsafe {
        for i in (0..whole).step_by(4) {
            for (u, said) in said.iter_mut().enumerate() {
                *said = get::<L>(s.add((i + u) * n), width).fma(L::splat(decayed[i + u]), *said);
            }
        }
        for i in whole..len {
            said[0] = get::<L>(s.add(i * n), width).fma(L::splat(decayed[i]), said[0]);
        }
        let said = said[0].add(said[1]).add(said[2].add(said[3]));
        let said = if BY_ELEMENT { said } else { said.mul(g) };
        let change = v.sub(said).mul(L::splat(beta));
        for i in (0..whole).step_by(4) {
            for (u, y) in y.iter_mut().enumerate() {
                let at = s.add((i + u) * n);
                let new = change.fma(L::splat(k[i + u]), get::<L>(at, width).mul(factor(i + u)));
                put(new, at, width);
                *y = new.fma(L::splat(q[i + u]), *y);
            }
        }
        for i in whole..len {
            let at = s.add(i * n);
            let new = change.fma(L::splat(k[i]), get::<L>(at, width).mul(factor(i)));
            put(new, at, width);
            y[0] = new.fma(L::splat(q[i]), y[0]);
        }
    }
    y[0].add(y[1]).add(y[2].add(y[3]))
}

/// The factors `e^a` of a key's elements, and the key `k` times these.
///
/// # Safety
/// `a` points to as many elements as `k` has, which are no more than [`MAX_KEY_DIM`].
#[inline(always)]
unsafe fn factors<L: Lanes>(
    a: *const f32,
    k: &[f32],
    factor: &mut [f32; MAX_KEY_DIM],
    decayed: &mut [f32; MAX_KEY_DIM],
) {
    let len = k.len();
    for i in (0..len).step_by(L::N) {
        let width = L::N.min(len - i);
        // SAFETY: every index is below `len`.
        unsafe {
            let own = exp(get::<L>(a.add(i), width));
            put(own, factor.as_mut_ptr().add(i), width);
            put(own.mul(get::<L>(k.as_ptr().add(i), width)), decayed.as_mut_ptr().add(i), width);
        }
    }
}

/// `x` divided by its length, times `by`; gives the factor that this is.
///
/// # Safety
/// `x` points to `len` elements, no more than `to` has.
#[inline(always)]
unsafe fn unit<L: Lanes>(x: *const f32, len: usize, by: f32, to: &mut [f32; MAX_KEY_DIM]) -> f32 {
    let mut sum = L::splat(0.0);
    // SAFETY: every index is below `len`.
    unsafe {
        for i in (0..len).step_by(L::N) {
            let x = get::<L>(x.add(i), L::N.min(len - i));
            sum = x.fma(x, sum);
        }
        let factor = by / (sum.sum() + LENGTH_EPS).sqrt();
        let scale = L::splat(factor);
        for i in (0..len).step_by(L::N) {
            let width = L::N.min(len - i);
            put(get::<L>(x.add(i), width).mul(scale), to.as_mut_ptr().add(i), width);
        }
        factor
    }
}

/// A row's numbers.
struct Gates {
    /// `a + dt`, and its softplus.
    shifted: f32,
    step: f32,
    /// The factor by which the row decays the matrix.
    gate: f32,
    /// The strength with which it writes its correction.
    beta: f32,
}

#[inline(always)]
fn gates(head: &Head<'_>, row: usize) -> Gates {
    let at = row * head.heads + head.head;
    let shifted = head.a[at] + head.dt;
    let step = if shifted > SOFTPLUS_LINEAR { shifted } else { shifted.exp().ln_1p() };
    Gates { shifted, step, gate: (head.decay * step).exp(), beta: strength(head, row) }
}

/// The strength with which a row writes its correction.
#[inline(always)]
fn strength(head: &Head<'_>, row: usize) -> f32 {
    head.strongest * logistic(head.b[row * head.heads + head.head])
}

fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The gradients of a row's `b` and of what all rows of the head share.
#[derive(Debug, Clone, Copy)]
pub struct GateSlopes {
    /// The gradient of `b`.
    pub b: f32,
    /// The gradient of the decay rate; 0 where each element has a logarithm of its own.
    pub decay: f32,
    /// The gradient of `dt`, likewise.
    pub dt: f32,
}

/// The matrices of a row in reverse.
#[derive(Debug, Clone, Copy)]
pub struct Reversed {
    /// The matrix in front of the row.
    pub before: *const f32,
    /// The matrix behind it.
    pub after: *const f32,
    /// On entry the gradient of the matrix after the row, on return the gradient of the matrix
    /// before it.
    pub slopes: *mut f32,
}

/// Where the gradients of a row's inputs go.
#[derive(Debug, Clone, Copy)]
pub struct RowSlopes {
    /// The gradient of a row of [`Head::qkv`].
    pub qkv: *mut f32,
    /// The head's elements of `a`: one, or as many as a key has.
    pub a: *mut f32,
}

/// Carries the gradient of a head's matrix from behind a row to the front of it. Adds the gradients
/// of the row's query and key to `to`, and writes those of its value and of its `a` there. `dy` is
/// the gradient of its output; `work` are two rows of values.
///
/// ```text
/// T = g S + k c,  c = beta u,  u = v - g k S,  y = q T
/// D += q dy,  dq = T dy,  dc = k D,  dbeta = <dc, u>,  dv = beta dc,  dk = D c - g S dv
/// D -= k dv,  dg = <D, S>,  D = g D
/// ```
///
/// Where each element of a key decays at a rate of its own, `dg` are the products of each row of
/// `D` with the one of `S`.
///
/// # Safety
/// The matrices are `[key_dim, value_dim]`, and `to` points to a row of [`Head::stride`] elements
/// and to the head's elements of `a`; no other thread accesses the gradient or the parts of `to`
/// that are the head's.
///
/// # Panics
/// If the row does not exist, or operands are of other lengths.
pub unsafe fn backward(
    isa: Isa,
    head: &Head<'_>,
    row: usize,
    matrices: Reversed,
    dy: &[f32],
    to: RowSlopes,
    work: &mut [f32],
) -> GateSlopes {
    head.check(row + 1);
    assert!(
        dy.len() == head.value_dim && work.len() == 2 * head.value_dim,
        "delta net: rows of values"
    );
    // SAFETY: the row exists; the rest is the caller's promise.
    unsafe {
        dispatch!(isa, backward_kernel(head: &Head<'_>, row: usize, matrices: Reversed, dy: &[f32], to: RowSlopes, work: &mut [f32]) -> GateSlopes)
    }
}

/// # Safety
/// As [`backward`], whose checks hold.
#[inline(always)]
unsafe fn backward_kernel<L: Lanes>(
    head: &Head<'_>,
    row: usize,
    matrices: Reversed,
    dy: &[f32],
    to: RowSlopes,
    work: &mut [f32],
) -> GateSlopes {
    // SAFETY: the caller's promise.
    unsafe {
        match head.by_element {
            true => backward_row::<L, true>(head, row, matrices, dy, to, work),
            false => backward_row::<L, false>(head, row, matrices, dy, to, work),
        }
    }
}

/// # Safety
/// As [`backward`], whose checks hold.
#[inline(always)]
unsafe fn backward_row<L: Lanes, const BY_ELEMENT: bool>(
    head: &Head<'_>,
    row: usize,
    matrices: Reversed,
    dy: &[f32],
    to: RowSlopes,
    work: &mut [f32],
) -> GateSlopes {
    let (keys, n) = (head.key_dim, head.value_dim);
    let Reversed { before, after, slopes } = matrices;
    let (mut q, mut k) = ([0.0; MAX_KEY_DIM], [0.0; MAX_KEY_DIM]);
    let (mut dq, mut dk) = ([0.0; MAX_KEY_DIM], [0.0; MAX_KEY_DIM]);
    let (mut factor, mut decayed) = ([0.0; MAX_KEY_DIM], [0.0; MAX_KEY_DIM]);
    let Gates { shifted, step, gate, beta } = match BY_ELEMENT {
        true => Gates { shifted: 0.0, step: 0.0, gate: 1.0, beta: strength(head, row) },
        false => gates(head, row),
    };
    let root = 1.0 / (keys as f32).sqrt();
    let (g, zero) = (L::splat(gate), L::splat(0.0));
    let columns = || (0..n).step_by(L::N).map(|j| (j, L::N.min(n - j)));
    work.fill(0.0);
    let (said, of_change) = work.split_at_mut(n);
    let (said, of_change) = (said.as_mut_ptr(), of_change.as_mut_ptr());
    let (mut of_beta, mut of_gate) = (zero, zero);
    // SAFETY: columns are below `n`, keys below `keys`, which matrices, arrays and rows have.
    unsafe {
        let x = head.qkv.as_ptr().add(row * head.stride);
        let q_scale = unit::<L>(x.add(head.starts[0]), keys, root, &mut q);
        let k_scale = unit::<L>(x.add(head.starts[1]), keys, 1.0, &mut k);
        if BY_ELEMENT {
            let a = head.a.as_ptr().add((row * head.heads + head.head) * keys);
            factors::<L>(a, &k[..keys], &mut factor, &mut decayed);
        }
        for i in 0..keys {
            let (own_q, own_k) = (L::splat(q[i]), L::splat(k[i]));
            let asked = if BY_ELEMENT { L::splat(decayed[i]) } else { own_k };
            let mut sum = zero;
            for (j, width) in columns() {
                let (at, dy) = (i * n + j, get::<L>(dy.as_ptr().add(j), width));
                let spoken = get::<L>(said.add(j), width);
                put(get::<L>(before.add(at), width).fma(asked, spoken), said.add(j), width);
                let slope = dy.fma(own_q, get::<L>(slopes.add(at), width));
                put(slope, slopes.add(at), width);
                let change = of_change.add(j);
                put(slope.fma(own_k, get::<L>(change, width)), change, width);
                sum = get::<L>(after.add(at), width).fma(dy, sum);
            }
            dq[i] = sum.sum();
        }
        // What the row writes takes the place of what was said, the gradient of its value that of
        // the gradient of what it writes.
        for (j, width) in columns() {
            let v = get::<L>(x.add(head.starts[2] + j), width);
            let spoken = get::<L>(said.add(j), width);
            let miss = v.sub(if BY_ELEMENT { spoken } else { spoken.mul(g) });
            let change = get::<L>(of_change.add(j), width);
            of_beta = change.fma(miss, of_beta);
            put(miss.mul(L::splat(beta)), said.add(j), width);
            let dv = change.mul(L::splat(beta));
            put(dv, of_change.add(j), width);
            put(dv, to.qkv.add(head.starts[2] + j), width);
        }
        for i in 0..keys {
            let (own_k, mut along, mut kept) = (L::splat(k[i]), zero, zero);
            let own = if BY_ELEMENT { factor[i] } else { gate };
            if BY_ELEMENT {
                of_gate = zero;
            }
            for (j, width) in columns() {
                let at = i * n + j;
                let (dv, s) = (get::<L>(of_change.add(j), width), get::<L>(before.add(at), width));
                let slope = get::<L>(slopes.add(at), width);
                along = slope.fma(get::<L>(said.add(j), width), along);
                kept = s.fma(dv, kept);
                let slope = slope.sub(own_k.mul(dv));
                of_gate = slope.fma(s, of_gate);
                put(slope.mul(L::splat(own)), slopes.add(at), width);
            }
            dk[i] = along.sum() - own * kept.sum();
            if BY_ELEMENT {
                *to.a.add(i) = of_gate.sum() * own;
            }
        }
        through(&q[..keys], &dq[..keys], q_scale, root, to.qkv.add(head.starts[0]));
        through(&k[..keys], &dk[..keys], k_scale, 1.0, to.qkv.add(head.starts[1]));
    }
    let b = of_beta.sum() * beta * (1.0 - beta / head.strongest);
    if BY_ELEMENT {
        return GateSlopes { b, decay: 0.0, dt: 0.0 };
    }
    let of_step = of_gate.sum() * gate;
    let of_shift = of_step * head.decay * logistic(shifted);
    // SAFETY: the caller's promise.
    unsafe { *to.a = of_shift };
    GateSlopes { b, decay: of_step * step, dt: of_shift }
}

/// Adds the gradient of a vector to `to`: of one that times `scale` is `unit`, whose length is `by`
/// and whose gradient is `slope`.
///
/// # Safety
/// `to` points to as many elements, which no other thread accesses.
#[inline(always)]
unsafe fn through(unit: &[f32], slope: &[f32], scale: f32, by: f32, to: *mut f32) {
    let along: f32 = unit.iter().zip(slope).map(|(unit, slope)| unit * slope).sum();
    let along = along / (by * by);
    for (i, (unit, slope)) in unit.iter().zip(slope).enumerate() {
        // SAFETY: the caller's promise.
        unsafe { *to.add(i) += scale * (slope - unit * along) };
    }
}

/// # Safety
/// `p` points to `width <= N` elements.
#[inline(always)]
pub(crate) unsafe fn get<L: Lanes>(p: *const f32, width: usize) -> L {
    // SAFETY: the caller's promise.
    unsafe { if width == L::N { L::load(p) } else { L::load_part(p, width) } }
}

/// # Safety
/// `p` points to `width <= N` elements, which no other thread accesses.
#[inline(always)]
pub(crate) unsafe fn put<L: Lanes>(x: L, p: *mut f32, width: usize) {
    // SAFETY: the caller's promise.
    unsafe { if width == L::N { x.store(p) } else { x.store_part(p, width) } }
}
