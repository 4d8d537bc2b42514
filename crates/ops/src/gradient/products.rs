//! Kernels for gradients of products: `dx = dy W`, `dW = dy' x`, and sums over rows and columns.

use super::{Reverse, RuleValue as Value, Wrt, give, one};
use crate::operation::{Bound, Launches, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{
    Row, RowThreads, begin, lanes_of_both, load, require_lengths, require_vectors, when,
};
use crate::trial::{every_float, memory, near, random, rows_of};
use crate::{Rows, Shape, alike, arity, expect};
use formats::{Error, Result};
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// `dy[rows, out]; weight[out, in] -> [rows, in]`: `dx[t, i] = sum_o dy[t, o] weight[o, i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearBackward;

/// `dy[rows, out], added[rows, in]; weight[out, in] -> [rows, in]`: [`LinearBackward`], added to
/// what other readers of the same value have given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearBackwardAdd;

/// `dy[rows, out], x[rows, in] -> [out, in]`: `dw[o, i] = sum_t dy[t, o] x[t, i]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outer;

/// `x[rows, width] -> [1, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumRows;

/// `x[rows, width] -> [rows, 1]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumColumns;

/// The rule of `y = x W' + b`, whose cotangent is `dy`: the weight is the node's first, the bias
/// its second.
pub(crate) fn linear_vjp(at: &mut dyn Reverse, dy: Value) -> Result<()> {
    let x = at.input(0);
    give(at, Wrt::Input(0), |at| one(at, LinearBackward, &[dy], &[0]))?;
    give(at, Wrt::Weight(0), |at| one(at, Outer, &[dy, x], &[]))?;
    match at.weight(1) {
        Some(_) => give(at, Wrt::Weight(1), |at| one(at, SumRows, &[dy], &[])),
        None => Ok(()),
    }
}

impl Operation for LinearBackward {
    fn name(&self) -> &'static str {
        "linear_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[1])?;
        let width = weights[0].last().copied().unwrap_or(0);
        expect(self.name(), "weight", weights[0], &[inputs[0].width, width])?;
        Ok(vec![Shape { width, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        linear_backward(call, |_| 0.0);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let (Some(ddx), dy) = (at.cotangent(0), at.input(0)) else { return Ok(()) };
        give(at, Wrt::Input(0), |at| one(at, crate::Linear, &[ddx], &[0]))?;
        give(at, Wrt::Weight(0), |at| one(at, Outer, &[dy, ddx], &[]))
    }
}

impl Operation for LinearBackwardAdd {
    fn name(&self) -> &'static str {
        "linear_backward_add"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        let dx = LinearBackward.infer(&inputs[..1], weights)?;
        alike(self.name(), &[dx[0], inputs[1]])?;
        Ok(dx)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let added = call.inputs[1];
        linear_backward(call, |at| f64::from(added[at]));
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn overwrites(&self) -> Option<usize> {
        Some(1)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        LinearBackward.vjp(at)?;
        let Some(ddx) = at.cotangent(0) else { return Ok(()) };
        give(at, Wrt::Input(1), |_| Ok(ddx))
    }
}

/// `dx[t, i] = before(t, i) + sum_o dy[t, o] weight[o, i]`, in f64.
fn linear_backward(call: &mut ReferenceCall<'_>, before: impl Fn(usize) -> f64) {
    let (out, weight) = (call.widths[0], &call.weights[0]);
    let width = weight.len() / out;
    for (at, dx) in call.outputs[0].iter_mut().enumerate() {
        let (row, i) = (at / width, at % width);
        let terms = call.inputs[0][row * out..][..out].iter().enumerate();
        let terms = terms.map(|(o, dy)| f64::from(*dy) * f64::from(weight[o * width + i]));
        *dx = (before(at) + terms.sum::<f64>()) as f32;
    }
}

impl Operation for Outer {
    fn name(&self) -> &'static str {
        "outer"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[0])?;
        if inputs[0].rows != inputs[1].rows {
            let [a, b] = [inputs[0], inputs[1]].map(|shape| format!("{shape:?}"));
            return Err(Error::new(self.name(), a, b));
        }
        Ok(vec![Shape { rows: Rows::Fixed(inputs[0].width), width: inputs[1].width }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let [out, width] = [call.widths[0], call.widths[1]];
        let (dy, x) = (call.inputs[0], call.inputs[1]);
        for (at, dw) in call.outputs[0].iter_mut().enumerate() {
            let (o, i) = (at / width, at % width);
            let rows = 0..dy.len() / out;
            let term = |t: usize| f64::from(dy[t * out + o]) * f64::from(x[t * width + i]);
            *dw = rows.map(term).sum::<f64>() as f32;
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

impl Operation for SumRows {
    fn name(&self) -> &'static str {
        "sum_rows"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![Shape { rows: Rows::Fixed(1), width: inputs[0].width }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        sum_of_rows(call.inputs[0], &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = sum_rows(to.scalar(X), to.scalar(Y), false);
        let bound = [("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        to.push(kernel, numbers(to.rows(X), to.width(X)), &bound)?;
        Ok(true)
    }
}

impl Operation for SumColumns {
    fn name(&self) -> &'static str {
        "sum_columns"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 1, weights, &[0])?;
        Ok(vec![Shape { width: 1, ..inputs[0] }])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let rows = call.inputs[0].chunks_exact(call.widths[0]);
        for (x, y) in rows.zip(&mut call.outputs[0]) {
            *y = x.iter().map(|x| f64::from(*x)).sum::<f64>() as f32;
        }
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let kernel = sum_columns(to.scalar(X), to.scalar(Y));
        let bound = [("x", Bound::Value(X)), ("y", Bound::Value(Y))];
        to.push(kernel, numbers(to.rows(X), to.width(X)), &bound)?;
        Ok(true)
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

/// `y[i] = sum_t x[t, i]`, in f64.
fn sum_of_rows(x: &[f32], y: &mut [f32]) {
    let width = y.len();
    for (i, y) in y.iter_mut().enumerate() {
        *y = x.iter().skip(i).step_by(width).map(|x| f64::from(*x)).sum::<f64>() as f32;
    }
}

/// Columns of a threadgroup, and threads that share each: one has every eighth row.
const COLUMNS: u32 = 32;
const SHARES: u32 = 8;

/// `y[i] = sum_t x[t, i] (+ add[i])`, summed in f32 in an order that follows from the number of
/// rows alone, on the device. `adds` says whether there is `add`, a last buffer, which may be `y`
/// itself.
#[kernel]
pub fn sum_rows(
    x: In<{ from }>,
    y: Out<{ to }>,
    rows: Arg<u32>,
    width: Arg<u32>,
    from: Scalar,
    to: Scalar,
    adds: bool,
) {
    let add = adds.then(|| {
        require_lengths(&[("add", dim("width"))]);
        <In>::stored("add", to)
    });
    sums_of_rows(&["x"], (y, add), [rows, width], |_, at| x.get(at));
}

/// `y[i] = sum_t term(t, t width + i) (+ add[i])` of the arguments `rows` and `width`, the whole
/// body of a kernel. `names` are the buffers of `rows * width` elements, for the contract.
#[track_caller]
pub(super) fn sums_of_rows(
    names: &[&str],
    (y, add): (Out, Option<In>),
    [rows, width]: [Val<u32>; 2],
    term: impl Fn(Val<u32>, Val<u32>) -> Val<f32>,
) {
    let groups = dim("width").ceil_div(COLUMNS);
    launch(Mode::Tile, [groups, fixed(1), fixed(1)], COLUMNS * SHARES);
    for name in names {
        require_lengths(&[(name, dim("rows") * dim("width"))]);
    }
    require_lengths(&[("y", dim("width"))]);
    begin();
    let (share, own) = (thread_id() / COLUMNS, thread_id() % COLUMNS);
    let column = group_id() * COLUMNS + own;
    let read = column.min(width - 1u32);
    let sum = Var::new(0.0);
    range(share, rows).step(SHARES).each(|row| sum.set(sum.get() + term(row, row * width + read)));
    let shares = Shared::<f32>::new(COLUMNS * SHARES);
    shares.set(thread_id(), sum.get());
    barrier();
    when(Order::lt(thread_id(), COLUMNS) & Order::lt(column, width), || {
        let each = (0..SHARES).map(|i| shares.get(own + i * COLUMNS));
        if let Some(sum) = each.reduce(|sum, share| sum + share) {
            y.set(column, add.map_or(sum, |add| sum + add.get(column)));
        }
    });
}

/// `y[t] = sum_i x[t, i]`, summed in f32, on the device.
#[kernel]
pub fn sum_columns(
    x: In<{ from }>,
    y: Out<{ to }>,
    rows: Arg<u32>,
    width: Const<u32>,
    from: Scalar,
    to: Scalar,
) {
    let team = RowThreads::Simd;
    team.launch(256);
    require_vectors(&[("x", dim("rows") * dim("width"))]);
    require_lengths(&[("y", dim("rows"))]);
    begin();
    let own: Vec<Row> = team.rows(rows, width);
    let sums: Vec<Var<f32>> = own.iter().map(|_| Var::new(0.0)).collect();
    team.sweep(width, team.lanes(lanes_of_both(from, Scalar::F32)), |at, lanes| {
        for (row, sum) in own.iter().zip(&sums) {
            for x in at.iter().flat_map(|&i| load(x, row.first + i, lanes)) {
                sum.set(sum.get() + x);
            }
        }
    });
    for (row, sum) in own.iter().zip(&sums) {
        let sum = team.sum(sum.get());
        row.keep(|| when(Order::eq(lane_id(), 0u32), || y.set(row.first / width, sum)));
    }
}

/// The numbers of a launch for `rows` rows of `width` elements.
pub fn numbers(rows: usize, width: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32)
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "sum_rows", cases, benches },
    Spec { name: "sum_columns", cases: column_cases, benches: column_benches },
];

fn cases() -> Vec<Case> {
    let case = |scalar: Scalar, (rows, width, why): (usize, usize, &str)| {
        let x = random(scalar, rows as u64 + 3, rows * width);
        let mut y = vec![0.0; width];
        sum_of_rows(&x.to_f32(), &mut y);
        let mut buffers = vec![x, Buffer::zeros(Scalar::F32, width)];
        // Ragged ones are added to others.
        let adds = width == 33;
        if adds {
            let add = random(Scalar::F32, 4, width);
            y.iter_mut().zip(add.to_f32()).for_each(|(y, add)| *y += add);
            buffers.push(add);
        }
        Case {
            kernel: sum_rows(scalar, Scalar::F32, adds).record(),
            label: format!("{rows} x {width} {scalar}, {why}"),
            numbers: numbers(rows, width),
            buffers,
            expected: vec![(1, near(Scalar::F32, &y))],
        }
    };
    let shapes =
        [(1, 1, "one element"), (5, 33, "fewer rows than shares"), (129, 64, "a ragged share")];
    every_float(|scalar| shapes.into_iter().map(|shape| case(scalar, shape)).collect())
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let buffers = vec![Fill::Noise(scalar, rows * width), Fill::Zeros(Scalar::F32, width)];
        let (kernel, flops) = (sum_rows(scalar, Scalar::F32, false), (rows * width) as u64);
        vec![memory(kernel, &format!("{rows} x {width}"), numbers(rows, width), buffers, flops)]
    })
}

fn column_cases() -> Vec<Case> {
    let case = |scalar: Scalar, (rows, width, why): (usize, usize, &str)| {
        let x = random(scalar, rows as u64 + 5, rows * width);
        let sum = |row: &[f32]| row.iter().map(|x| f64::from(*x)).sum::<f64>() as f32;
        let y: Vec<f32> = x.to_f32().chunks_exact(width).map(sum).collect();
        Case {
            kernel: sum_columns(scalar, scalar).record(),
            label: format!("{rows} x {width} {scalar}, {why}"),
            numbers: numbers(rows, width),
            buffers: vec![x, Buffer::zeros(scalar, rows)],
            expected: vec![(1, near(scalar, &y))],
        }
    };
    let shapes =
        [(1, 1, "one element"), (5, 33, "a width no vector divides"), (129, 264, "a ragged group")];
    every_float(|scalar| shapes.into_iter().map(|shape| case(scalar, shape)).collect())
}

fn column_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let (rows, width) = (rows_of(scalar, 4096), 4096);
        let buffers = vec![Fill::Noise(scalar, rows * width), Fill::Zeros(scalar, rows)];
        let (kernel, flops) = (sum_columns(scalar, scalar), (rows * width) as u64);
        vec![memory(kernel, &format!("{rows} x {width}"), numbers(rows, width), buffers, flops)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
