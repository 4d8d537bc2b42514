//! Short convolutions of packed sequences, and their gradients. As [`crate::short_conv`], without a
//! cache: in front of its first row a sequence has zeros.
//!
//! ```text
//! y[t, i] = sum_j taps[j, i] x[t - kernel + 1 + j, i]
//! dx[t, i] = sum_j taps[j, i] dy[t + kernel - 1 - j, i],  dtaps[j, i] = sum_t dy[t, i] x[t - kernel + 1 + j, i]
//! ```

use super::products::sums_of_rows;
use super::{Forward, Reverse, SumRows, Wrt, bilinear, give, one};
use crate::operation::{Bound, Launches, Operand, Operation, ReferenceCall, Sharding, X, Y};
use crate::sweep::{
    RowThreads, begin, lanes_of_both, load, require_lengths, require_vectors, when,
};
use crate::trial::{every_float, memory, near, random, rows_of};
use crate::{Op, Rows, Shape, ShortConv, arity, expect};
use formats::{Error, Result};
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// `x[tokens, width]; taps[kernel * width], (bias[width]) -> [tokens, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedConv(pub ShortConv);

/// `x, dy; taps -> dx, (dtaps)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvBackward {
    /// The convolution.
    pub of: ShortConv,
    /// Whether the gradient of the taps is an output.
    pub taps: bool,
}

/// Calls `f` with each row, each tap, and the row of the same sequence that it weighs.
fn terms(of: &ShortConv, first: &[u32], mut f: impl FnMut(usize, usize, usize)) {
    for (t, first) in first.iter().enumerate() {
        for j in 0..of.kernel {
            let Some(from) = (t + j + 1).checked_sub(of.kernel) else { continue };
            if from >= *first as usize {
                f(t, j, from);
            }
        }
    }
}

/// `y`.
fn forward(of: &ShortConv, first: &[u32], x: &[f32], taps: &[f32]) -> Vec<f32> {
    let mut sums = vec![0f64; x.len()];
    terms(of, first, |t, j, from| {
        for i in 0..of.width {
            let tap = f64::from(taps[j * of.width + i]);
            sums[t * of.width + i] += tap * f64::from(x[from * of.width + i]);
        }
    });
    sums.into_iter().map(|sum| sum as f32).collect()
}

/// Adds a bias to each row; none if it has no elements.
fn add_bias(y: &mut [f32], bias: &[f32]) {
    y.iter_mut().zip(bias.iter().cycle()).for_each(|(y, bias)| *y += bias);
}

/// `dx` and `dtaps`.
fn backward(of: &ShortConv, first: &[u32], [x, dy, taps]: [&[f32]; 3]) -> [Vec<f32>; 2] {
    let (mut dx, mut dtaps) = (vec![0f64; x.len()], vec![0f64; taps.len()]);
    terms(of, first, |t, j, from| {
        for i in 0..of.width {
            let (tap, from) = (j * of.width + i, from * of.width + i);
            let dy = f64::from(dy[t * of.width + i]);
            dx[from] += f64::from(taps[tap]) * dy;
            dtaps[tap] += f64::from(x[from]) * dy;
        }
    });
    [dx, dtaps].map(|sums| sums.into_iter().map(|sum| sum as f32).collect())
}

impl Operation for PackedConv {
    fn name(&self) -> &'static str {
        "packed_short_conv"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        if let Some(f) = self.0.activation {
            return Err(Error::new(
                self.name(),
                "no activation, which is a node of its own",
                f.name(),
            ));
        }
        self.0.infer(inputs, weights)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let mut y = forward(&self.0, call.packed.first, call.inputs[0], &call.weights[0]);
        if let Some(bias) = call.weights.get(1) {
            add_bias(&mut y, bias);
        }
        call.outputs[0] = y;
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        launch_conv(to, &self.0, false)
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let op = ConvBackward { of: self.0, taps: at.wants(Wrt::Weight(0)) };
        let operands = [at.input(0), dy];
        let found = at.record(Op::from(op), &operands, &[0])?;
        for (of, cotangent) in [Wrt::Input(0), Wrt::Weight(0)].into_iter().zip(found) {
            if at.wants(of) {
                at.give(of, cotangent)?;
            }
        }
        match at.weight(1) {
            Some(_) => give(at, Wrt::Weight(1), |at| one(at, SumRows, &[dy], &[])),
            None => Ok(()),
        }
    }

    /// It is linear in both of its operands.
    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        bilinear(at, *self)
    }
}

impl Operation for ConvBackward {
    fn name(&self) -> &'static str {
        "short_conv_backward"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity(self.name(), inputs, 2, weights, &[1])?;
        expect(self.name(), "width of dy", &[inputs[1].width], &[inputs[0].width])?;
        let mut shapes = self.of.infer(&inputs[..1], weights)?;
        let taps = Shape { rows: Rows::Fixed(1), width: weights[0][0] };
        shapes.extend(self.taps.then_some(taps));
        Ok(shapes)
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let operands = [call.inputs[0], call.inputs[1], &call.weights[0]];
        let found = backward(&self.of, call.packed.first, operands);
        call.outputs.iter_mut().zip(found).for_each(|(to, found)| *to = found);
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        if self.taps {
            let bound = [
                ("positions", Bound::Positions),
                ("x", Bound::Value(X)),
                ("dy", Bound::Value(Operand::Input(1))),
                ("y", Bound::Value(Operand::Output(1))),
            ];
            to.push(conv_taps(to.scalar(X)), tap_numbers(to.rows(X), &self.of), &bound)?;
        }
        launch_conv(to, &self.of, true)
    }

    fn sharding(&self) -> Sharding {
        Sharding::OfRank
    }
}

fn launch_conv(to: &mut dyn Launches, of: &ShortConv, turned: bool) -> Result<bool> {
    let bias = to.weight(1).is_some();
    let mut bound = vec![
        ("positions", Bound::Positions),
        ("x", Bound::Value(if turned { Operand::Input(1) } else { X })),
        ("taps", Bound::Weight(0)),
        ("y", Bound::Value(Y)),
    ];
    bound.extend(bias.then_some(("bias", Bound::Weight(1))));
    let kernel = packed_conv(to.scalar(X), turned, bias);
    to.push(kernel, numbers(to.rows(X), of), &bound)?;
    Ok(true)
}

/// The convolution of the rows of each sequence, on the device; if `turned`, the gradient of its
/// input from its output's gradient: the rows behind, weighed by the taps in reverse order. A row
/// is in the sequence of the row so far in front of it if it stands so far from its sequence's
/// first. With a `bias`, a last buffer, sums begin with that.
#[kernel]
pub fn packed_conv(
    positions: In<u32>,
    x: In<{ scalar }>,
    taps: In<f32>,
    y: Out<{ scalar }>,
    rows: Arg<u32>,
    width: Const<u32>,
    mixed: Const<u32>,
    scalar: Scalar,
    turned: bool,
    bias: bool,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    let size = dim("rows") * dim("width");
    require_lengths(&[("positions", dim("rows"))]);
    require_vectors(&[("x", size.clone()), ("taps", dim("mixed") * dim("width")), ("y", size)]);
    let bias = bias.then(|| {
        require_vectors(&[("bias", dim("width"))]);
        <In>::declare("bias")
    });
    begin();
    let row = group_id();
    RowThreads::Group.sweep(width, lanes_of_both(scalar, Scalar::F32), |at, lanes| {
        for &i in at {
            let sums = Regs::new(u32::from(lanes), 0.0);
            if let Some(bias) = bias {
                (0u32..).zip(load(bias, i, lanes)).for_each(|(at, bias)| sums.set(at, bias));
            }
            range(0u32, mixed).unroll().each(|far| {
                let (there, exists) = match turned {
                    true => {
                        let there = (row + far).min(rows - 1u32);
                        let same = Order::ge(positions.get(there), far);
                        (there, Order::lt(row + far, rows) & same)
                    }
                    false => (row - far, Order::ge(positions.get(row), far)),
                };
                when(exists, || {
                    let taps = load(taps, (mixed - 1u32 - far) * width + i, lanes);
                    let each = load(x, there * width + i, lanes).into_iter().zip(taps);
                    for (at, (x, tap)) in (0u32..).zip(each) {
                        sums.set(at, x.fma(tap, sums.get(at)));
                    }
                });
            });
            let values: Vec<Val<f32>> = (0..u32::from(lanes)).map(|at| sums.get(at)).collect();
            y.set_vec(row * width + i, &values);
        }
    });
}

/// The gradient of the taps, `y[j, i] = sum_t dy[t, i] x[t - taps + 1 + j, i]` over the rows that
/// have such a row in front of them in their sequence, on the device, in an order that follows from
/// the number of rows alone. `width` are all taps of all `channels`.
#[kernel]
pub fn conv_taps(
    positions: In<u32>,
    x: In<{ scalar }>,
    dy: In<{ scalar }>,
    y: Out<f32>,
    rows: Arg<u32>,
    width: Const<u32>,
    channels: Const<u32>,
    scalar: Scalar,
) {
    let size = dim("rows") * dim("channels");
    require_lengths(&[("positions", dim("rows")), ("x", size.clone()), ("dy", size)]);
    let term = |row: Val<u32>, at: Val<u32>| {
        let column = at - row * width;
        let (tap, i) = (column / channels, column % channels);
        let far = width / channels - 1u32 - tap;
        let exists = Order::ge(positions.get(row), far);
        let from = row - select(exists, far, 0u32);
        let product = dy.get(row * channels + i) * x.get(from * channels + i);
        select(exists, product, 0.0)
    };
    sums_of_rows(&[], (y, None), [rows, width], term);
}

fn tap_numbers(rows: usize, of: &ShortConv) -> Numbers {
    Numbers::new()
        .with("rows", rows as u32)
        .with("width", (of.kernel * of.width) as u32)
        .with("channels", of.width as u32)
}

fn numbers(rows: usize, of: &ShortConv) -> Numbers {
    Numbers::new()
        .with("rows", rows as u32)
        .with("width", of.width as u32)
        .with("mixed", of.kernel as u32)
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "packed_conv", cases, benches },
    Spec { name: "conv_taps", cases: tap_cases, benches: tap_benches },
];

fn tap_cases() -> Vec<Case> {
    let case = |scalar: Scalar, (width, kernel): (usize, usize), why: &str| {
        let of = ShortConv::new(width, kernel);
        let first: Vec<u32> = [vec![0; 40], vec![40; 2], vec![42; 5]].concat();
        let positions: Vec<u32> = (0u32..).zip(&first).map(|(t, first)| t - first).collect();
        let n = first.len() * width;
        let (x, dy) = (random(scalar, 1, n), random(scalar, 2, n));
        let taps = vec![0.0; kernel * width];
        let [_, want] = backward(&of, &first, [&x.to_f32(), &dy.to_f32(), &taps]);
        Case {
            kernel: conv_taps(scalar).record(),
            label: format!("{} x {width} {scalar}, {kernel} taps, {why}", first.len()),
            numbers: tap_numbers(first.len(), &of),
            buffers: vec![Buffer::words(&positions), x, dy, Buffer::zeros(Scalar::F32, taps.len())],
            expected: vec![(3, near(Scalar::F32, &want))],
        }
    };
    every_float(|scalar| {
        vec![
            case(scalar, (1, 1), "one tap"),
            case(scalar, (13, 3), "a width that no vector divides"),
            case(scalar, (70, 6), "more taps than a sequence has rows"),
        ]
    })
}

fn tap_benches() -> Vec<Bench> {
    every_float(|scalar| {
        let of = ShortConv::new(4096, 4);
        let rows = rows_of(scalar, of.width);
        let n = rows * of.width;
        let positions = Buffer::words(&(0..rows as u32).collect::<Vec<u32>>());
        let buffers = vec![
            Fill::These(positions),
            Fill::Noise(scalar, n),
            Fill::Noise(scalar, n),
            Fill::Zeros(Scalar::F32, of.kernel * of.width),
        ];
        let (label, numbers) = (format!("{rows} x {}", of.width), tap_numbers(rows, &of));
        vec![memory(conv_taps(scalar), &label, numbers, buffers, 8 * n as u64)]
    })
}

fn cases() -> Vec<Case> {
    let case = |scalar: Scalar, form: [bool; 2], (width, kernel): (usize, usize), why: &str| {
        let ([turned, biased], of) = (form, ShortConv::new(width, kernel));
        // The second sequence is shorter than the kernel.
        let first: Vec<u32> = [vec![0; 7], vec![7; 2], vec![9; 5]].concat();
        let positions: Vec<u32> = (0u32..).zip(&first).map(|(t, first)| t - first).collect();
        let n = first.len() * width;
        let (x, taps) = (random(scalar, 1, n), random(Scalar::F32, 2, kernel * width));
        let (values, weights) = (x.to_f32(), taps.to_f32());
        let bias = random(Scalar::F32, 4, if biased { width } else { 0 });
        let want = match turned {
            true => {
                let [dx, _] = backward(&of, &first, [&values, &values, &weights]);
                dx
            }
            false => {
                let mut y = forward(&of, &first, &values, &weights);
                add_bias(&mut y, &bias.to_f32());
                y
            }
        };
        let what = match form {
            [true, _] => "of dx",
            [false, false] => "of y",
            [false, true] => "of y with a bias",
        };
        let mut buffers = vec![Buffer::words(&positions), x, taps, random(scalar, 3, n)];
        buffers.extend(biased.then_some(bias));
        Case {
            kernel: packed_conv(scalar, turned, biased).record(),
            label: format!("{} x {width} {scalar}, {kernel} taps, {what}, {why}", first.len()),
            numbers: numbers(first.len(), &of),
            buffers,
            expected: vec![(3, near(scalar, &want))],
        }
    };
    every_float(|scalar| {
        let all = [[false, false], [true, false], [false, true]].map(|form| {
            [
                case(scalar, form, (13, 3), "a width that no vector divides"),
                case(scalar, form, (2048, 4), "a vector or two per thread"),
                case(scalar, form, (8, 6), "more taps than most sequences have rows"),
            ]
        });
        all.into_iter().flatten().collect()
    })
}

fn benches() -> Vec<Bench> {
    every_float(|scalar| {
        let of = ShortConv::new(4096, 4);
        let rows = rows_of(scalar, of.width);
        let n = rows * of.width;
        let positions = Buffer::words(&(0..rows as u32).collect::<Vec<u32>>());
        let taps = Fill::Noise(Scalar::F32, of.kernel * of.width);
        let buffers =
            vec![Fill::These(positions), Fill::Noise(scalar, n), taps, Fill::Zeros(scalar, n)];
        let label = format!("{rows} x {}", of.width);
        let kernel = packed_conv(scalar, true, false);
        vec![memory(kernel, &label, numbers(rows, &of), buffers, 8 * n as u64)]
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
