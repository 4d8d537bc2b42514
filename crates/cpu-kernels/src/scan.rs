//! One head of a selective state space (Mamba-2): a matrix `h` `[state, head_dim]` that each row
//! decays, adds to and reads.
//!
//! ```text
//! h = exp(decay step) h + B (step x),  y = C h + skip x
//! step = clamp(softplus(dt + bias), limit)
//! ```
//!
//! In the first Mamba (Gu & Dao 2023) each element of `h` decays at a rate of its own, and each column
//! has a `step` and a `skip`.
//!
//! The columns of `h` are independent, so workers split a head by columns, and all rows of a chunk
//! are processed while a few columns stay in the L1 cache. Two rows go over the columns together,
//! so that each element is read and written once for both; the sums of a row are the same whether
//! another goes with it. A column's bits depend on its rows alone.
//!
//! The form of Mamba-2's paper, in which the rows of a chunk are products of matrices, has hardly
//! fewer multiplications at these sizes (a state of 128 by 64, chunks of 64 rows), and its bits
//! follow from where a chunk begins.

use crate::delta::{Reversed, SOFTPLUS_LINEAR, get, put};
use crate::isa::Isa;
use crate::math::exp;
use crate::math::lanes::{Lanes, dispatch};
use std::ops::Range;

/// One input of a head: some elements from `start` on of each row of `[rows, stride]`.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The rows.
    pub rows: &'a [f32],
    /// Row stride in elements.
    pub stride: usize,
    /// The first element.
    pub start: usize,
}

impl<'a> Input<'a> {
    /// Whether `rows` rows have `len` such elements.
    fn has(&self, rows: usize, len: usize) -> bool {
        self.start + len <= self.stride && rows * self.stride <= self.rows.len()
    }

    fn row(&self, row: usize, len: usize) -> &'a [f32] {
        &self.rows[row * self.stride + self.start..][..len]
    }
}

/// The inputs of one head for a chunk of rows.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// `x`: `head_dim` elements of each row.
    pub x: Input<'a>,
    /// `B`: `state` elements of each row.
    pub b: Input<'a>,
    /// `C`: `state` elements of each row.
    pub c: Input<'a>,
    /// Elements of `B` and of `C`.
    pub state: usize,
    /// Elements of `x`.
    pub head_dim: usize,
    /// How it decays.
    pub rates: Rates<'a>,
}

/// How a head's matrix decays, and what of `x` passes by it.
#[derive(Debug, Clone, Copy)]
pub enum Rates<'a> {
    /// All elements alike.
    Together {
        /// The step input of each row: one element.
        dt: Input<'a>,
        /// The decay rate, negative.
        decay: f32,
        /// Added to `dt`.
        bias: f32,
        /// The factor on `x` in the output.
        skip: f32,
        /// The least and the greatest step.
        limit: [f32; 2],
    },
    /// Each at a rate of its own.
    ByElement {
        /// The step of each element of `x`.
        step: Input<'a>,
        /// `[state, head_dim]`: the decay rates, negative.
        decay: &'a [f32],
        /// `[head_dim]`: the factors on `x` in the output.
        skip: &'a [f32],
    },
}

impl Head<'_> {
    /// Whether `rows` rows are there.
    fn has(&self, rows: usize) -> bool {
        let &Head { x, b, c, state, head_dim, rates } = self;
        let own = match rates {
            Rates::Together { dt, .. } => dt.has(rows, 1),
            Rates::ByElement { step, decay, skip } => {
                step.has(rows, head_dim)
                    && decay.len() == state * head_dim
                    && skip.len() == head_dim
            }
        };
        own && x.has(rows, head_dim) && b.has(rows, state) && c.has(rows, state)
    }
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
    assert!(
        head.has(rows.end) && columns.end <= head.head_dim,
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
    let out = Rows { first: out, stride: out_stride };
    // SAFETY: the caller's promise.
    unsafe {
        match head.rates {
            Rates::Together { .. } => all_rows::<L, false>(head, rows, &columns, state, out),
            Rates::ByElement { .. } => all_rows::<L, true>(head, rows, &columns, state, out),
        }
    }
}

/// Rows of the output.
#[derive(Clone, Copy)]
struct Rows {
    first: *mut f32,
    stride: usize,
}

impl Rows {
    #[inline(always)]
    fn row(self, row: usize) -> *mut f32 {
        self.first.wrapping_add(row * self.stride)
    }
}

/// Advances columns by rows, two at a time.
///
/// # Safety
/// As [`advance`], whose checks hold; `BY_ELEMENT` says how the head decays.
#[inline(always)]
unsafe fn all_rows<L: Lanes, const BY_ELEMENT: bool>(
    head: &Head<'_>,
    rows: Range<usize>,
    columns: &Range<usize>,
    state: *mut f32,
    out: Rows,
) {
    let odd = rows.end - rows.len() % 2;
    // SAFETY: the caller's promise.
    unsafe {
        for row in (rows.start..odd).step_by(2) {
            let steps = [Step::of(head, row), Step::of(head, row + 1)];
            let out = [out.row(row), out.row(row + 1)];
            together::<L, 2, BY_ELEMENT>(head, &steps, columns, state, out);
        }
        if odd < rows.end {
            let steps = [Step::of(head, odd)];
            together::<L, 1, BY_ELEMENT>(head, &steps, columns, state, [out.row(odd)]);
        }
    }
}

/// One row's inputs.
#[derive(Clone, Copy)]
struct Step<'a> {
    x: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    /// The factor on the matrix, where it is one.
    gate: f32,
    /// The factor on `x`, where it is one.
    step: f32,
    /// The factor on each element of `x` else.
    steps: &'a [f32],
}

impl<'a> Step<'a> {
    fn of(head: &Head<'a>, row: usize) -> Step<'a> {
        let (gate, step, steps) = match head.rates {
            Rates::Together { dt, decay, bias, limit, .. } => {
                let shifted = dt.row(row, 1)[0] + bias;
                let step = if shifted > SOFTPLUS_LINEAR { shifted } else { shifted.exp().ln_1p() };
                let step = step.max(limit[0]).min(limit[1]);
                ((decay * step).exp(), step, &[][..])
            }
            Rates::ByElement { step, .. } => (1.0, 1.0, step.row(row, head.head_dim)),
        };
        let (x, b) = (head.x.row(row, head.head_dim), head.b.row(row, head.state));
        Step { x, b, c: head.c.row(row, head.state), gate, step, steps }
    }
}

/// Advances columns by `R` rows, whose outputs are at `out`.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn together<L: Lanes, const R: usize, const BY_ELEMENT: bool>(
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
            vectors::<L, R, 2, BY_ELEMENT>(head, steps, column, L::N, state, out);
            column += 2 * L::N;
        }
        while column + L::N <= columns.end {
            vectors::<L, R, 1, BY_ELEMENT>(head, steps, column, L::N, state, out);
            column += L::N;
        }
        if column < columns.end {
            vectors::<L, R, 1, BY_ELEMENT>(head, steps, column, columns.end - column, state, out);
        }
    }
}

/// Advances `V` vectors of columns from `column` on, of `width` elements each, by `R` rows.
///
/// # Safety
/// The columns exist, and no other thread accesses them.
#[inline(always)]
unsafe fn vectors<L: Lanes, const R: usize, const V: usize, const BY_ELEMENT: bool>(
    head: &Head<'_>,
    steps: &[Step<'_>; R],
    column: usize,
    width: usize,
    state: *mut f32,
    out: [*mut f32; R],
) {
    let (n, len, zero) = (head.head_dim, head.state, L::splat(0.0));
    let (mut x, mut added, mut rates) = ([[zero; V]; R], [[zero; V]; R], [[zero; V]; R]);
    let (decay, skip) = match head.rates {
        Rates::Together { skip, .. } => (&[][..], [L::splat(skip); V]),
        Rates::ByElement { decay, skip, .. } => {
            let mut all = [zero; V];
            for (v, all) in all.iter_mut().enumerate() {
                // SAFETY: there is one for each column.
                *all = unsafe { get::<L>(skip.as_ptr().add(column + v * L::N), width) };
            }
            (decay, all)
        }
    };
    // Four sums hide the latency of the additions.
    let mut y = [[[zero; 4]; V]; R];
    let whole = len - len % 4;
    // SAFETY: element `i < state` of columns that exist, by the caller's promise.
    unsafe {
        for r in 0..R {
            for v in 0..V {
                let at = column + v * L::N;
                x[r][v] = get::<L>(steps[r].x.as_ptr().add(at), width);
                let step = match BY_ELEMENT {
                    true => get::<L>(steps[r].steps.as_ptr().add(at), width),
                    false => L::splat(steps[r].step),
                };
                rates[r][v] = if BY_ELEMENT { step } else { L::splat(steps[r].gate) };
                added[r][v] = x[r][v].mul(step);
            }
        }
        let rows = Operands { steps, added, rates };
        let decay = decay.as_ptr().wrapping_add(column);
        for i in (0..whole).step_by(4) {
            for sum in 0..4 {
                let (i, at) = (i + sum, (i + sum) * n);
                let (h, decay) = (state.add(at + column), decay.wrapping_add(at));
                element::<L, R, V, BY_ELEMENT>(&rows, i, sum, width, h, decay, &mut y);
            }
        }
        for sum in 0..3 {
            if whole + sum < len {
                let (i, at) = (whole + sum, (whole + sum) * n);
                let (h, decay) = (state.add(at + column), decay.wrapping_add(at));
                element::<L, R, V, BY_ELEMENT>(&rows, i, sum, width, h, decay, &mut y);
            }
        }
        for r in 0..R {
            for v in 0..V {
                let sums = y[r][v];
                let sum = sums[0].add(sums[1]).add(sums[2].add(sums[3]));
                put(x[r][v].fma(skip[v], sum), out[r].add(column + v * L::N), width);
            }
        }
    }
}

/// Some columns' inputs of `R` rows.
struct Operands<'a, L, const R: usize, const V: usize> {
    steps: &'a [Step<'a>; R],
    /// What `B` multiplies.
    added: [[L; V]; R],
    /// The factors on the matrix; or the steps that its decay rates are multiplied by.
    rates: [[L; V]; R],
}

/// Element `i` of the columns at `h`, advanced by `R` rows and added to one of their sums; `decay` has
/// its rates, where these are its own.
///
/// # Safety
/// The columns exist, no other thread accesses them, and `i` is below the rows' elements.
#[inline(always)]
unsafe fn element<L: Lanes, const R: usize, const V: usize, const BY_ELEMENT: bool>(
    rows: &Operands<'_, L, R, V>,
    i: usize,
    sum: usize,
    width: usize,
    h: *mut f32,
    decay: *const f32,
    y: &mut [[[L; 4]; V]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        for v in 0..V {
            let at = h.add(v * L::N);
            let mut new = get::<L>(at, width);
            for r in 0..R {
                let step = &rows.steps[r];
                let (b, c) = (*step.b.get_unchecked(i), *step.c.get_unchecked(i));
                let gate = match BY_ELEMENT {
                    true => exp(get::<L>(decay.add(v * L::N), width).mul(rows.rates[r][v])),
                    false => rows.rates[r][v],
                };
                new = rows.added[r][v].fma(L::splat(b), new.mul(gate));
                y[r][v][sum] = new.fma(L::splat(c), y[r][v][sum]);
            }
            put(new, at, width);
        }
    }
}

/// Where the gradients of a row go, of a head whose elements decay at rates of their own.
pub struct RowSlopes<'a> {
    /// The gradient of `x`, `[head_dim]`.
    pub x: &'a mut [f32],
    /// The gradient of the steps, `[head_dim]`.
    pub step: &'a mut [f32],
    /// The gradient of `B`, `[state]`.
    pub b: &'a mut [f32],
    /// The gradient of `C`, `[state]`.
    pub c: &'a mut [f32],
    /// Sums of gradients of the decay rates, `[state, head_dim]`, to which the row's are added.
    pub decay: &'a mut [f32],
    /// Sums of gradients of `skip`, `[head_dim]`, likewise.
    pub skip: &'a mut [f32],
}

/// Carries the gradient of the matrix of a head whose elements decay at rates of their own from
/// behind a row to the front of it, and gives those of the row's inputs; `dy` is the gradient of its
/// output.
///
/// ```text
/// D += C dy,  dC = h' dy,  dB = D (step x),  du = B D,  dg = D h,  D = g D
/// dx = step du + skip dy,  dstep = x du + sum of dg g decay
/// ddecay += dg g step,  dskip += x dy
/// ```
///
/// # Safety
/// The matrices are `[state, head_dim]`; no other thread accesses the gradient.
///
/// # Panics
/// If the head decays otherwise, the row does not exist, or operands are of other lengths.
pub unsafe fn backward(
    isa: Isa,
    head: &Head<'_>,
    row: usize,
    matrices: Reversed,
    dy: &[f32],
    to: RowSlopes<'_>,
) {
    let (state, head_dim) = (head.state, head.head_dim);
    let RowSlopes { x, step, b, c, decay, skip } = &to;
    assert!(
        head.has(row + 1)
            && matches!(head.rates, Rates::ByElement { .. })
            && [dy, &**x, &**step, &**skip].iter().all(|x| x.len() == head_dim)
            && b.len() == state
            && c.len() == state
            && decay.len() == state * head_dim,
        "selective scan: gradients of a head's row"
    );
    // SAFETY: the row exists; the rest is the caller's promise.
    unsafe {
        dispatch!(isa, backward_kernel(head: &Head<'_>, row: usize, matrices: Reversed, dy: &[f32], to: RowSlopes<'_>));
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
    to: RowSlopes<'_>,
) {
    let Rates::ByElement { decay, skip, .. } = head.rates else { return };
    let Step { x, b, c, steps, .. } = Step::of(head, row);
    let (n, zero) = (head.head_dim, L::splat(0.0));
    let Reversed { before, after, slopes } = matrices;
    let columns = || (0..n).step_by(L::N).map(|j| (j, L::N.min(n - j)));
    // The sums over the state come first to where the gradients of `x` and of the steps will be.
    to.x.fill(0.0);
    to.step.fill(0.0);
    let (of_written, of_step) = (to.x.as_mut_ptr(), to.step.as_mut_ptr());
    // SAFETY: columns are below `n`, rows of matrices below `state`, by the checks of `backward`.
    unsafe {
        for i in 0..head.state {
            let (own_b, own_c) = (L::splat(b[i]), L::splat(c[i]));
            let (mut of_b, mut of_c) = (zero, zero);
            for (j, width) in columns() {
                let at = i * n + j;
                let read = |p: *const f32| get::<L>(p, width);
                let (step, dy) = (read(steps.as_ptr().add(j)), read(dy.as_ptr().add(j)));
                let slope = dy.fma(own_c, read(slopes.add(at)));
                of_c = read(after.add(at)).fma(dy, of_c);
                of_b = slope.fma(step.mul(read(x.as_ptr().add(j))), of_b);
                put(slope.fma(own_b, read(of_written.add(j))), of_written.add(j), width);
                let rate = read(decay.as_ptr().add(at));
                let kept = slope.mul(exp(rate.mul(step)));
                let of_power = kept.mul(read(before.add(at)));
                put(of_power.fma(rate, read(of_step.add(j))), of_step.add(j), width);
                let sum = to.decay.as_mut_ptr().add(at);
                put(of_power.fma(step, read(sum)), sum, width);
                put(kept, slopes.add(at), width);
            }
            (to.b[i], to.c[i]) = (of_b.sum(), of_c.sum());
        }
        for (j, width) in columns() {
            let read = |p: *const f32| get::<L>(p.add(j), width);
            let (x, step, dy) = (read(x.as_ptr()), read(steps.as_ptr()), read(dy.as_ptr()));
            let (written, by_decay) = (read(of_written), read(of_step));
            put(step.fma(written, read(skip.as_ptr()).mul(dy)), of_written.add(j), width);
            put(x.fma(written, by_decay), of_step.add(j), width);
            let sum = to.skip.as_mut_ptr();
            put(x.fma(dy, read(sum)), sum.add(j), width);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(i: usize) -> f32 {
        ((i * 7919 + 13) % 1000) as f32 / 500.0 - 1.0
    }

    /// One head's `y` by the recurrence, in f64.
    fn recurrence(head: &Head<'_>, rows: usize) -> Vec<f64> {
        let &Head { state, head_dim, .. } = head;
        let mut h: Vec<f64> = (0..state * head_dim).map(|i| f64::from(noise(i))).collect();
        let mut all = Vec::new();
        for row in 0..rows {
            let of = |input: &Input<'_>, i: usize| {
                f64::from(input.rows[row * input.stride + input.start + i])
            };
            for j in 0..head_dim {
                let x = of(&head.x, j);
                let (step, skip) = match &head.rates {
                    Rates::Together { dt, bias, skip, limit, .. } => {
                        let step = (of(dt, 0) + f64::from(*bias)).exp().ln_1p();
                        (step.clamp(limit[0].into(), limit[1].into()), *skip)
                    }
                    Rates::ByElement { step, skip, .. } => (of(step, j), skip[j]),
                };
                let mut y = f64::from(skip) * x;
                for i in 0..state {
                    let decay = match head.rates {
                        Rates::Together { decay, .. } => decay,
                        Rates::ByElement { decay, .. } => decay[i * head_dim + j],
                    };
                    let h = &mut h[i * head_dim + j];
                    *h = *h * (f64::from(decay) * step).exp() + of(&head.b, i) * step * x;
                    y += of(&head.c, i) * *h;
                }
                all.push(y);
            }
        }
        all
    }

    /// Whatever the width, and wherever a chunk is cut, rows are those of the recurrence, with the
    /// same bits.
    fn check(isa: Isa, of: &Head<'_>, rows: usize) {
        let &Head { state, head_dim, .. } = of;
        let run = |cuts: &[usize]| {
            let mut h: Vec<f32> = (0..state * head_dim).map(noise).collect();
            let mut y = vec![f32::NAN; rows * head_dim];
            for rows in cuts.windows(2) {
                for columns in [0..head_dim.min(32), head_dim.min(32)..head_dim] {
                    let (h, y) = (h.as_mut_ptr(), y.as_mut_ptr());
                    // SAFETY: one thread, and arrays of these sizes.
                    unsafe { advance(isa, of, rows[0]..rows[1], columns, h, y, head_dim) };
                }
            }
            (h, y)
        };
        let whole = run(&[0, rows]);
        for cuts in [&[0, 1, 2, 9][..], &[0, 3, 8, 9], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]] {
            assert!(run(cuts) == whole, "{isa:?}: {state} x {head_dim}, cut at {cuts:?}");
        }
        for (found, y) in whole.1.iter().zip(recurrence(of, rows)) {
            let apart = (f64::from(*found) - y).abs();
            let bound = 1e-5 * (1.0 + y.abs());
            assert!(apart <= bound, "{isa:?}: {state} x {head_dim}: {found} for {y}");
        }
    }

    const ROWS: usize = 9;

    #[test]
    fn rows_are_those_of_the_recurrence_wherever_they_are_cut() {
        for &isa in Isa::available() {
            for (state, head_dim) in [(128, 64), (16, 40), (13, 7), (3, 33), (1, 1)] {
                let (heads, stride) = (2, head_dim + 2 * state + 3);
                let xbc: Vec<f32> = (0..ROWS * stride).map(noise).collect();
                let dt: Vec<f32> = (0..ROWS * heads).map(|i| 3.0 * noise(i + 5)).collect();
                let [x, b, c] = [1, 1 + head_dim, 2 + head_dim + state].map(|start| Input {
                    rows: &xbc,
                    stride,
                    start,
                });
                let dt = Input { rows: &dt, stride: heads, start: 1 };
                let (decay, bias, skip, limit) = (-0.7, 0.3, 1.5, [0.05, 2.5]);
                let rates = Rates::Together { dt, decay, bias, skip, limit };
                check(isa, &Head { x, b, c, state, head_dim, rates }, ROWS);
            }
        }
    }

    #[test]
    fn rows_are_those_of_the_recurrence_where_elements_decay_by_themselves() {
        for &isa in Isa::available() {
            for (state, head_dim) in [(16, 64), (8, 40), (13, 7), (3, 33), (1, 1)] {
                let of = |seed: usize, len: usize| -> Vec<f32> {
                    (0..ROWS * len).map(|i| noise(i + seed)).collect()
                };
                let (x, b, c) = (of(1, head_dim), of(2, state), of(3, state));
                let steps: Vec<f32> = of(4, head_dim).iter().map(|x| x.abs()).collect();
                let decay: Vec<f32> =
                    (0..state * head_dim).map(|i| -0.01 - (i % 17) as f32).collect();
                let skip: Vec<f32> = (0..head_dim).map(noise).collect();
                let [x, step] = [&x, &steps].map(|rows| Input { rows, stride: head_dim, start: 0 });
                let [b, c] = [&b, &c].map(|rows| Input { rows, stride: state, start: 0 });
                let rates = Rates::ByElement { step, decay: &decay, skip: &skip };
                check(isa, &Head { x, b, c, state, head_dim, rates }, ROWS);
            }
        }
    }
}
