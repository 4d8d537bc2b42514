//! Heads put together from parts: some columns of each head of one value, then a head of another
//! value, then zeros. Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024) cuts its
//! projections so, and joins keys from a part of each head and a part that all heads share.
//!
//! ```text
//! y[t, h, i] = x[t, h, start + i]             i < count
//!              z[t, h or 0, i - count]        i < count + the width of z's heads
//!              0                              beyond
//! ```

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::gradient::{Filled, Forward, Reverse, RuleValue, Wrt, give, linear_in_x, one, zeros};
use crate::linear::holds;
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::begin;
use crate::trial::{every_float, exact, memory, random};
use crate::{Binary, Shape, Zip, expect};
use formats::{Error, Result};

/// `x[rows, heads * any], (z[rows, heads * any or any]) -> [rows, heads * width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Splice {
    /// Heads of `x` and of the output.
    pub heads: usize,
    /// The first column that is taken of each head of `x`.
    pub start: usize,
    /// Columns that are taken.
    pub count: usize,
    /// Whether `z` is one head, which stands in every head of the output, and not one of each.
    pub shared: bool,
    /// Elements of each head of the output.
    pub width: usize,
}

/// The second input.
const Z: Operand = Operand::Input(1);

impl Operation for Splice {
    fn name(&self) -> &'static str {
        "splice"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        if !(1..=2).contains(&inputs.len()) || !weights.is_empty() {
            let found = format!("{} and {} weights", inputs.len(), weights.len());
            return Err(Error::new("splice", "one or two inputs", found));
        }
        let heads = self.heads.max(1);
        expect("splice", "width modulo heads", &[inputs[0].width % heads], &[0])?;
        let each = inputs[0].width / heads;
        if self.count == 0 || self.start.saturating_add(self.count) > each {
            let found = format!("{} from {} on", self.count, self.start);
            return Err(Error::new("splice", format!("columns of heads of {each}"), found));
        }
        let second = match inputs.get(1) {
            None => 0,
            Some(z) => {
                let of = if self.shared { 1 } else { heads };
                expect("splice", "width of z modulo its heads", &[z.width % of], &[0])?;
                if z.rows != inputs[0].rows {
                    let expected = format!("{:?}", inputs[0].rows);
                    return Err(Error::new("splice: rows of z", expected, format!("{:?}", z.rows)));
                }
                z.width / of
            }
        };
        if self.count + second > self.width {
            let expected = format!("at least {}", self.count + second);
            return Err(Error::new("splice: width of a head", expected, self.width));
        }
        let width = heads.checked_mul(self.width).filter(|width| *width <= 1 << 30);
        let width = width.ok_or_else(|| Error::new("splice", "fewer columns", self.width))?;
        Ok(vec![Shape { width, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let (x, z) = (call.inputs[0], call.inputs.get(1).copied());
        let rows = x.chunks_exact(call.widths[0]).enumerate();
        let wide = self.heads * self.width;
        for ((t, x), y) in rows.zip(call.outputs[0].chunks_exact_mut(wide)) {
            let z = z.map(|z| &z[t * call.widths[1]..][..call.widths[1]]);
            self.row(x, z, y);
        }
    }

    fn sharding(&self) -> Sharding {
        if self.heads > 1 { Sharding::Heads { weights: false } } else { Sharding::Whole }
    }

    fn divide_heads(&mut self, ranks: usize) {
        self.heads /= ranks;
    }

    fn reads_whole(&self, input: usize) -> bool {
        self.shared && input == 1
    }

    fn shares_type(&self, _: Operand) -> bool {
        false
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let joins = to.inputs() > 1;
        let second = if joins { to.width(Z) } else { 0 };
        let numbers = self.numbers(to.rows(Y), to.width(X), second);
        match joins {
            true => {
                let kernel = splice(to.scalar(X), to.scalar(Z), to.scalar(Y));
                let bound =
                    [("x", Bound::Value(X)), ("z", Bound::Value(Z)), ("y", Bound::Value(Y))];
                to.push(kernel, numbers, &bound)?;
            }
            false => {
                let bound = [("x", Bound::Value(X)), ("y", Bound::Value(Y))];
                to.push(cut(to.scalar(X), to.scalar(Y)), numbers, &bound)?;
            }
        }
        Ok(true)
    }

    /// Each part goes back to where it was taken from; a head that all share is the sum of theirs.
    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| {
            let x = at.shape(at.input(0));
            let each = x.width / self.heads;
            if self.start == 0 {
                return one(at, Splice { width: each, shared: false, ..*self }, &[dy], &[]);
            }
            let own = Splice { start: 0, width: self.count, shared: false, ..*self };
            let own = one(at, own, &[dy], &[])?;
            let shape = Shape { width: self.heads * self.start, ..x };
            let front = one(at, Filled { shape, value: 0.0 }, &[], &[])?;
            let behind = Splice { start: 0, count: self.start, width: each, ..*self };
            one(at, Splice { shared: false, ..behind }, &[front, own], &[])
        })?;
        if !at.wants(Wrt::Input(1)) {
            return Ok(());
        }
        give(at, Wrt::Input(1), |at| {
            let z = at.shape(at.input(1)).width;
            let second = if self.shared { z } else { z / self.heads };
            let (start, count, width) = (self.count, second, second);
            let joined = Splice { start, count, width, shared: false, ..*self };
            let joined = one(at, joined, &[dy], &[])?;
            if self.shared { sum_heads(at, joined, self.heads, second) } else { Ok(joined) }
        })
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        if !at.has_input(1) {
            return linear_in_x(at, *self);
        }
        let tangents = [at.tangent(0), at.tangent(1)];
        if tangents.iter().all(Option::is_none) {
            return Ok(());
        }
        let mut of = Vec::new();
        for (i, tangent) in tangents.into_iter().enumerate() {
            let input = at.input(i);
            of.push(match tangent {
                Some(tangent) => tangent,
                None => zeros(at, input)?,
            });
        }
        let dy = one(at, *self, &of, &[])?;
        at.add(0, dy)
    }
}

/// The sum of the `heads` of each row, which have `width` elements: halves are added until one is
/// left.
fn sum_heads(at: &mut dyn Reverse, of: RuleValue, heads: usize, width: usize) -> Result<RuleValue> {
    let (mut sum, mut left, mut odd) = (of, heads, None);
    let add = |at: &mut dyn Reverse, a, b| one(at, Zip(Binary::Add), &[a, b], &[]);
    let part = |at: &mut dyn Reverse, of, first: usize, count: usize| {
        let (start, count) = (first * width, count * width);
        let cut = Splice { heads: 1, start, count, shared: false, width: count };
        one(at, cut, &[of], &[])
    };
    while left > 1 {
        let half = left / 2;
        if left % 2 == 1 {
            let last = part(at, sum, left - 1, 1)?;
            odd = Some(match odd {
                Some(odd) => add(at, odd, last)?,
                None => last,
            });
        }
        let (front, behind) = (part(at, sum, 0, half)?, part(at, sum, half, half)?);
        (sum, left) = (add(at, front, behind)?, half);
    }
    match odd {
        Some(odd) => add(at, sum, odd),
        None => Ok(sum),
    }
}

impl Splice {
    /// One row, without an allocation.
    ///
    /// # Panics
    /// When lengths differ from those that [`Operation::infer`] allows.
    pub fn row(&self, x: &[f32], z: Option<&[f32]>, y: &mut [f32]) {
        let each = x.len() / self.heads;
        let second = z.map_or(0, |z| if self.shared { z.len() } else { z.len() / self.heads });
        for (h, y) in y.chunks_exact_mut(self.width).enumerate() {
            let (front, behind) = y.split_at_mut(self.count);
            front.copy_from_slice(&x[h * each + self.start..][..self.count]);
            let (joined, zeros) = behind.split_at_mut(second);
            if let Some(z) = z {
                let first = if self.shared { 0 } else { h * second };
                joined.copy_from_slice(&z[first..][..second]);
            }
            zeros.fill(0.0);
        }
    }

    /// The numbers of a launch for `x` of `width` columns and `z` of `second`.
    fn numbers(&self, rows: usize, width: usize, second: usize) -> Numbers {
        let numbers = Numbers::new()
            .with("rows", rows as u32)
            .with("heads", self.heads as u32)
            .with("each", (width / self.heads) as u32)
            .with("start", self.start as u32)
            .with("count", self.count as u32)
            .with("wide", self.width as u32);
        if second == 0 {
            return numbers;
        }
        // Shared, each head begins at the first column of `z`.
        let (of, step) = if self.shared { (1, 0) } else { (self.heads, second / self.heads) };
        numbers
            .with("second", (second / of) as u32)
            .with("step", step as u32)
            .with("row", second as u32)
    }
}

/// The columns of each head of `x`, and zeros behind them: `y[t, h, i] = x[t, h, start + i]`, on
/// the device. `x` `[rows, heads * each]`, `y` `[rows, heads * wide]`.
#[kernel]
pub fn cut(
    x: In<{ from }>,
    y: Out<{ to }>,
    heads: Const<u32>,
    each: Const<u32>,
    start: Const<u32>,
    count: Const<u32>,
    wide: Const<u32>,
    from: Scalar,
    to: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("heads") * dim("each"));
    holds("y", dim("rows") * dim("heads") * dim("wide"));
    begin();
    let row = group_id();
    for i in strided(heads * wide) {
        let (head, at) = (i / wide, i % wide);
        let taken = x.get((row * heads + head) * each + start + at.min(count - 1)).f32();
        y[row * heads * wide + i] = select(at.lt(count), taken, 0.0).cast();
    }
}

/// The same with a head of `z` behind those columns. `z` `[rows, row]`, of which head `h` begins at
/// `h * step` and has `second` elements.
#[kernel]
pub fn splice(
    x: In<{ from }>,
    z: In<{ behind }>,
    y: Out<{ to }>,
    heads: Const<u32>,
    each: Const<u32>,
    start: Const<u32>,
    count: Const<u32>,
    wide: Const<u32>,
    second: Const<u32>,
    step: Const<u32>,
    row: Const<u32>,
    from: Scalar,
    behind: Scalar,
    to: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    holds("x", dim("rows") * dim("heads") * dim("each"));
    holds("z", dim("rows") * dim("row"));
    holds("y", dim("rows") * dim("heads") * dim("wide"));
    begin();
    let t = group_id();
    for i in strided(heads * wide) {
        let (head, at) = (i / wide, i % wide);
        let taken = x.get((t * heads + head) * each + start + at.min(count - 1)).f32();
        let later = at.max(count) - count;
        let joined = z.get(t * row + head * step + later.min(second - 1)).f32();
        let joined = select(later.lt(second), joined, 0.0);
        y[t * heads * wide + i] = select(at.lt(count), taken, joined).cast();
    }
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "cut", cases: cut_cases, benches: cut_benches },
    Spec { name: "splice", cases: splice_cases, benches: splice_benches },
];

/// DeepSeek-V2's queries and keys: 128 elements that do not turn and 64 that do.
const QUERY: Splice = Splice { heads: 16, start: 128, count: 64, shared: false, width: 64 };
const KEY: Splice = Splice { heads: 16, start: 0, count: 128, shared: true, width: 192 };

fn result(op: Splice, rows: usize, x: &Buffer, z: Option<&Buffer>) -> Vec<f32> {
    let (x, z) = (x.to_f32(), z.map(Buffer::to_f32));
    let (each, second) = (x.len() / rows, z.as_ref().map_or(0, |z| z.len() / rows));
    let mut y = vec![0.0; rows * op.heads * op.width];
    for (t, y) in y.chunks_exact_mut(op.heads * op.width).enumerate() {
        op.row(&x[t * each..][..each], z.as_ref().map(|z| &z[t * second..][..second]), y);
    }
    y
}

fn cut_cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(op, each, to, why): (Splice, usize, Scalar, &str)| {
            let (rows, width) = (3, op.heads * each);
            let x = random(scalar, each as u64, rows * width);
            let y = result(op, rows, &x, None);
            Case {
                kernel: cut(scalar, to).record(),
                label: format!("{} heads of {each} {scalar}, {why}", op.heads),
                numbers: op.numbers(rows, width, 0),
                buffers: vec![x, Buffer::zeros(to, y.len())],
                expected: vec![(1, exact(to, &y))],
            }
        };
        let padded = Splice { heads: 5, start: 24, count: 7, shared: false, width: 11 };
        [
            (QUERY, 192, Scalar::F32, "the part that turns"),
            (padded, 31, scalar, "the last columns, and zeros behind them"),
            (
                Splice { heads: 1, start: 0, count: 40, shared: false, width: 40 },
                48,
                scalar,
                "one head",
            ),
        ]
        .map(case)
        .to_vec()
    }
    every_float(of)
}

fn splice_cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |(op, each, second, from, why): (Splice, usize, usize, Scalar, &str)| {
            let (rows, width) = (3, op.heads * each);
            let x = random(from, each as u64, rows * width);
            let z = random(Scalar::F32, second as u64 + 9, rows * second);
            let y = result(op, rows, &x, Some(&z));
            Case {
                kernel: splice(from, Scalar::F32, scalar).record(),
                label: format!("{} heads of {each} and {second}, {scalar}: {why}", op.heads),
                numbers: op.numbers(rows, width, second),
                buffers: vec![x, z, Buffer::zeros(scalar, y.len())],
                expected: vec![(2, exact(scalar, &y))],
            }
        };
        let own = Splice { heads: 3, start: 0, count: 5, shared: false, width: 9 };
        [
            (KEY, 256, 64, Scalar::F32, "keys with a part that all heads share"),
            (own, 8, 9, scalar, "a part of each head, and one zero"),
        ]
        .map(case)
        .to_vec()
    }
    every_float(of)
}

fn cut_benches() -> Vec<Bench> {
    let (rows, each) = (4096, 192);
    let buffers = vec![
        Fill::Noise(Scalar::F32, rows * QUERY.heads * each),
        Fill::Zeros(Scalar::F32, rows * QUERY.heads * QUERY.width),
    ];
    let numbers = QUERY.numbers(rows, QUERY.heads * each, 0);
    vec![memory(cut(Scalar::F32, Scalar::F32), "4096 x 16 x 64 of 192", numbers, buffers, 0)]
}

fn splice_benches() -> Vec<Bench> {
    let (rows, each, second) = (4096, 256, 64);
    let buffers = vec![
        Fill::Noise(Scalar::F32, rows * KEY.heads * each),
        Fill::Noise(Scalar::F32, rows * second),
        Fill::Zeros(Scalar::BF16, rows * KEY.heads * KEY.width),
    ];
    let kernel = splice(Scalar::F32, Scalar::F32, Scalar::BF16);
    let numbers = KEY.numbers(rows, KEY.heads * each, second);
    vec![memory(kernel, "4096 x 16 x 128 and 64", numbers, buffers, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }

    #[test]
    fn heads_are_cut_and_joined() {
        let x: Vec<f32> = (0..8u8).map(f32::from).collect();
        let of = |op: Splice, z: Option<&[f32]>| {
            let mut y = vec![9.0; op.heads * op.width];
            op.row(&x, z, &mut y);
            y
        };
        let op = Splice { heads: 2, start: 1, count: 2, shared: true, width: 4 };
        assert_eq!(of(op, Some(&[-1.0])), [1.0, 2.0, -1.0, 0.0, 5.0, 6.0, -1.0, 0.0]);
        let own = Splice { shared: false, width: 3, ..op };
        assert_eq!(of(own, Some(&[-1.0, -2.0])), [1.0, 2.0, -1.0, 5.0, 6.0, -2.0]);
        assert_eq!(of(Splice { width: 2, ..op }, None), [1.0, 2.0, 5.0, 6.0]);
    }

    #[test]
    fn parts_that_are_not_there_are_an_error() {
        let (x, z) = (Shape::tokens(8), Shape::tokens(3));
        let op = Splice { heads: 2, start: 1, count: 2, shared: true, width: 5 };
        assert_eq!(op.infer(&[x, z], &[]).unwrap(), [Shape::tokens(10)]);
        for wrong in [
            Splice { heads: 3, ..op },
            Splice { start: 3, ..op },
            Splice { count: 0, ..op },
            Splice { width: 4, ..op },
            Splice { shared: false, ..op },
            Splice { start: usize::MAX, ..op },
            Splice { width: usize::MAX, ..op },
        ] {
            assert!(wrong.infer(&[x, z], &[]).is_err(), "{wrong:?}");
        }
        assert!(op.infer(&[], &[]).is_err() && op.infer(&[x, z, z], &[]).is_err());
        assert!(op.infer(&[x, z], &[&[1]]).is_err());
    }
}
