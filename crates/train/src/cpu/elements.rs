//! Operations that work element by element or row by row, forward and backward.

use super::executor::Run;
use super::vectorised::{total, vectorised};
use cpu_kernels::isa::Isa;
use cpu_kernels::math;
use formats::{Error, Result};
use ops::gradient::{Gradient, XieluSums};
use ops::{Binary, Map, Op, Scale, Unary, Xielu, Zip};
use program::{Node, ValueId, WeightId};
use std::ops::Range;

/// Elements that a thread takes at a time.
const PIECE: usize = 1 << 14;
/// Rows whose gradients of a norm's weight are added up in one go.
const ROWS: usize = 32;

/// Calls `f` with each element and `e^min(x, BOUND)` of it, as [`ops::xielu`] has them.
fn powers(isa: Isa, x: &mut [f32], f: impl Fn(&mut f32, f32)) {
    let mut powers = [0.0; 1024];
    for x in x.chunks_mut(powers.len()) {
        let powers = &mut powers[..x.len()];
        powers.iter_mut().zip(&*x).for_each(|(to, x)| *to = x.min(ops::xielu::BOUND));
        math::map_in_place(isa, Unary::Exp, powers);
        x.iter_mut().zip(powers).for_each(|(x, power)| f(x, *power));
    }
}

impl Run<'_> {
    /// A row of an input, which no thread writes.
    fn row(&self, input: ValueId, t: usize) -> &[f32] {
        let width = self.width(input);
        // SAFETY: inputs are only read.
        unsafe { &self.read(input)[t * width..][..width] }
    }

    /// Calls `f` with a row's inputs, all of the same rows, and its two outputs.
    fn in_pairs(&self, node: &Node, f: impl Fn([&[f32]; 3], [&mut [f32]; 2]) + Sync) {
        self.each(self.rows(node.outputs[0]), 16, &|rows, _| {
            for t in rows {
                let to = [0, 1].map(|i| {
                    let (output, width) = (node.outputs[i], self.width(node.outputs[i]));
                    // SAFETY: rows are disjoint.
                    unsafe { self.part(output, t * width..(t + 1) * width) }
                });
                f([0, 1, 2].map(|i| self.row(node.inputs[i], t)), to);
            }
        });
    }

    /// Copies an input to the first output, unless it is there.
    pub(super) fn copy(&self, index: usize, node: &Node, input: usize) {
        if self.plan.in_place[index] == Some(input) {
            return;
        }
        let (from, to) = (node.inputs[input], node.outputs[0]);
        self.each(self.rows(to) * self.width(to), PIECE, &|range, _| {
            // SAFETY: ranges are disjoint; the input is only read.
            unsafe { self.part(to, range.clone()).copy_from_slice(&self.read(from)[range]) };
        });
    }

    /// Calls `f` with pieces of the first output, to which the input was copied, and where they
    /// begin.
    fn pieces(
        &self,
        index: usize,
        node: &Node,
        input: usize,
        f: &(dyn Fn(&mut [f32], Range<usize>) + Sync),
    ) {
        let (from, to) = (self.source(index, node, input), node.outputs[0]);
        self.each(self.rows(to) * self.width(to), PIECE, &|range, _| {
            // SAFETY: ranges are disjoint; the input is only read.
            let y = unsafe { self.part(to, range.clone()) };
            self.begin(from, y, range.clone());
            f(y, range);
        });
    }

    /// The input that the first output begins as, unless it is there.
    fn source(&self, index: usize, node: &Node, input: usize) -> Option<ValueId> {
        let is_there = self.plan.in_place[index] == Some(input);
        (!is_there).then(|| node.inputs[input])
    }

    /// Copies a range of [`Run::source`]'s to a part of the output, unless it is there.
    fn begin(&self, from: Option<ValueId>, y: &mut [f32], range: Range<usize>) {
        if let Some(from) = from {
            // SAFETY: the input is only read.
            y.copy_from_slice(unsafe { &self.read(from)[range] });
        }
    }

    /// Calls `f` with whole rows of the first output, to which the input's were copied, and which.
    fn rows_of(
        &self,
        index: usize,
        node: &Node,
        input: usize,
        f: &(dyn Fn(&mut [f32], Range<usize>) + Sync),
    ) {
        let (from, to) = (self.source(index, node, input), node.outputs[0]);
        let width = self.width(to);
        self.by_rows(to, &|y, rows| {
            self.begin(from, y, rows.start * width..rows.end * width);
            f(y, rows);
        });
    }

    /// Calls `f` with whole rows of the first output, and which.
    fn by_rows(&self, to: ValueId, f: &(dyn Fn(&mut [f32], Range<usize>) + Sync)) {
        let width = self.width(to);
        self.each(self.rows(to), (PIECE / width).max(1), &|rows, _| {
            // SAFETY: rows are disjoint.
            f(unsafe { self.part(to, rows.start * width..rows.end * width) }, rows);
        });
    }

    pub(super) fn element(&self, index: usize, node: &Node) -> Result<()> {
        let (isa, to) = (self.of.isa, node.outputs[0]);
        let width = self.width(to);
        match &node.op {
            Op::Embed(op) => {
                let (rows, table) = (self.picked(op.index), self.weights.matrix(node.weights[0])?);
                self.by_rows(to, &|y, range| {
                    for (row, y) in rows[range].iter().zip(y.chunks_exact_mut(width)) {
                        table.row(*row as usize, y);
                    }
                });
            }
            Op::RmsNorm(op) => {
                let weight = self.weights.vector(node.weights[0]);
                self.rows_of(index, node, 0, &|y, _| {
                    math::rms_norm_in_place(isa, y, weight, op.eps)
                });
            }
            Op::LayerNorm(op) => {
                let weight = self.weights.vector(node.weights[0]);
                let bias = node.weights.get(1).map(|id| self.weights.vector(*id));
                self.rows_of(index, node, 0, &|y, _| {
                    math::layer_norm_in_place(isa, y, weight, bias, op.eps)
                });
            }
            Op::Map(Map(f)) => self.pieces(index, node, 0, &|y, _| math::map_in_place(isa, *f, y)),
            Op::Xielu(op) => {
                let [a, b] = [0, 1].map(|i| self.weights.vector(node.weights[i]));
                let factors = op.coefficients(a, b);
                self.pieces(index, node, 0, &|y, _| {
                    powers(isa, y, |y, power| *y = factors.of(*y, power));
                });
            }
            Op::Scale(Scale { by }) => {
                self.pieces(index, node, 0, &|y, _| math::scale_in_place(isa, *by, y));
            }
            Op::Zip(Zip(f)) => self.pieces(index, node, 0, &|y, range| {
                // SAFETY: the second operand is only read.
                math::zip_in_place(isa, *f, y, unsafe { &self.read(node.inputs[1])[range] });
            }),
            Op::ScaleColumns(_) => {
                let by = self.weights.vector(node.weights[0]);
                let bias = node.weights.get(1).map(|id| self.weights.vector(*id));
                self.rows_of(index, node, 0, &|y, _| {
                    for y in y.chunks_exact_mut(width) {
                        y.iter_mut().zip(by).for_each(|(y, by)| *y *= by);
                        let bias = bias.unwrap_or_default();
                        y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                    }
                });
            }
            Op::ScaleRows(_) => {
                self.rows_of(index, node, 0, &|y, rows| {
                    // SAFETY: the factors are only read.
                    let by = unsafe { &self.read(node.inputs[1])[rows] };
                    for (y, by) in y.chunks_exact_mut(width).zip(by) {
                        math::scale_in_place(isa, *by, y);
                    }
                });
            }
            Op::Rope(rope) => {
                let ((cos, sin), pairs) = (self.angles(rope)?, rope.frequencies.len());
                self.rows_of(index, node, 0, &|y, rows| {
                    for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                        let (cos, sin) = (&cos[t * pairs..][..pairs], &sin[t * pairs..][..pairs]);
                        math::rope(isa, y, rope.head_dim, cos, sin, rope.pairing);
                    }
                });
            }
            Op::Select(_) => self.by_rows(to, &|y, rows| {
                // SAFETY: the input is only read.
                let x = unsafe { self.read(node.inputs[0]) };
                for (row, y) in self.packing.picks[rows].iter().zip(y.chunks_exact_mut(width)) {
                    y.copy_from_slice(&x[*row as usize * width..][..width]);
                }
            }),
            Op::Stretch(op) => {
                self.rows_of(index, node, 0, &|y, rows| {
                    let positions = &self.packing.positions[rows];
                    for (y, position) in y.chunks_exact_mut(width).zip(positions) {
                        math::scale_in_place(isa, op.factor(*position), y);
                    }
                });
            }
            Op::Splice(op) => self.by_rows(to, &|y, rows| {
                let z = node.inputs.get(1);
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    op.row(self.row(node.inputs[0], t), z.map(|z| self.row(*z, t)), y);
                }
            }),
            Op::Gated(op) => self.pieces(index, node, 0, &|y, range| {
                math::map_in_place(isa, op.0, y);
                // SAFETY: the second operand is only read.
                self.times(y, unsafe { &self.read(node.inputs[1])[range] });
            }),
            Op::GatedNorm(op) => {
                let weight = self.weights.vector(node.weights[0]);
                self.rows_of(index, node, 0, &|y, rows| {
                    let own = rows.start * width..rows.end * width;
                    // SAFETY: the second operand is only read.
                    let x = unsafe { &self.read(node.inputs[1])[own] };
                    math::gated_norm_in_place(isa, y, x, weight, op.groups, op.eps, op.norm_first);
                });
            }
            Op::Mix(op) => self.by_rows(to, &|y, rows| {
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    op.row(self.row(node.inputs[0], t), self.row(node.inputs[1], t), y);
                }
            }),
            Op::MatchRms(op) => self.rows_of(index, node, 0, &|y, rows| {
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    op.row(y, self.row(node.inputs[1], t));
                }
            }),
            Op::GaussianTopK(op) => self.rows_of(index, node, 0, &|y, _| {
                y.chunks_exact_mut(width).for_each(|y| op.row(y));
            }),
            Op::RoundRows(op) => self.rows_of(index, node, 0, &|y, _| {
                y.chunks_exact_mut(width).for_each(|y| op.row(y));
            }),
            Op::GroupLimit(op) => self.by_rows(to, &|y, rows| {
                // SAFETY: the input is only read.
                let x = unsafe { self.read(node.inputs[0]) };
                let correction = self.weights.vector(node.weights[0]);
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    op.row(&x[t * width..][..width], correction, y);
                }
            }),
            op => return Err(Error::new("train", "operations that can be trained", op.name())),
        }
        Ok(())
    }

    pub(super) fn element_backward(&self, index: usize, op: &Gradient, node: &Node) {
        let (to, inputs) = (node.outputs[0], &node.inputs);
        let width = self.width(to);
        match op {
            Gradient::Filled(op) => self.by_rows(to, &|y, _| y.fill(op.value)),
            Gradient::LimitSlopes(op) => self.by_rows(to, &|y, rows| {
                // SAFETY: the inputs are only read.
                let [scores, left, d] = [0, 1, 2].map(|i| unsafe { self.read(inputs[i]) });
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    let row = t * width..(t + 1) * width;
                    op.row(&scores[row.clone()], &left[row.clone()], &d[row], y);
                }
            }),
            Gradient::MapBackward(op) => self.pieces(index, node, 1, &|dy, range| {
                // SAFETY: the input is only read.
                self.map_backward(op.0, unsafe { &self.read(inputs[0])[range] }, dy);
            }),
            Gradient::XieluBackward(op) => {
                let [a, b] = [0, 1].map(|i| self.weights.vector(node.weights[i]));
                let factors = Xielu { linear: op.linear }.coefficients(a, b);
                self.pieces(index, node, 1, &|dy, range| {
                    // SAFETY: the input is only read.
                    let mut x = unsafe { self.read(inputs[0])[range].to_vec() };
                    powers(self.of.isa, &mut x, |x, power| *x = factors.slope(*x, power));
                    self.times(dy, &x);
                });
            }
            Gradient::XieluSums(op) => {
                let wide = self.width(inputs[0]);
                let by = XieluSums::slope(self.weights.vector(node.weights[0])[0]);
                self.by_rows(to, &|y, rows| {
                    for (y, t) in y.iter_mut().zip(rows) {
                        let row = t * wide..(t + 1) * wide;
                        // SAFETY: the inputs are only read.
                        let [x, dy] = [0, 1].map(|i| unsafe { &self.read(inputs[i])[row.clone()] });
                        let mut x = x.to_vec();
                        powers(self.of.isa, &mut x, |x, power| *x = op.of(*x, power));
                        *y = (by * total(&x, dy, |x, dy| x * dy)) as f32;
                    }
                });
            }
            Gradient::GatedBackward(op) => self.pieces(index, node, 2, &|dy, range| {
                // SAFETY: the other operands are only read.
                let [gate, up] = [0, 1].map(|i| unsafe { &self.read(inputs[i])[range.clone()] });
                self.times(dy, up);
                self.map_backward(op.0, gate, dy);
            }),
            Gradient::RmsNormBackward(op) => {
                self.norm_backward(index, node, (op.eps, false), node.weights[0]);
            }
            Gradient::LayerNormBackward(op) => {
                self.norm_backward(index, node, (op.eps, true), node.weights[0]);
            }
            Gradient::MixBackward(op) => self.in_pairs(node, |of, to| op.row(of, to)),
            Gradient::MatchRmsBackward(op) => self.in_pairs(node, |of, to| op.row(of, to)),
            Gradient::GaussianTopKBackward(op) => self.rows_of(index, node, 1, &|dy, rows| {
                for (t, dy) in rows.zip(dy.chunks_exact_mut(width)) {
                    op.row(self.row(inputs[0], t), dy);
                }
            }),
            Gradient::Dropout(op) => self.rows_of(index, node, 0, &|y, rows| {
                vectorised(self.of.isa, || {
                    let numbers = &self.packing.draws[rows];
                    let each = y.chunks_exact_mut(width).zip(numbers);
                    each.for_each(|(y, number)| op.row(*number, y));
                });
            }),
            Gradient::EmbeddingNoise(op) => self.rows_of(index, node, 0, &|y, rows| {
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    op.row(self.packing.draws[t], self.packing.lengths[t] as usize, y);
                }
            }),
            Gradient::SumColumns(_) => {
                let wide = self.width(inputs[0]);
                self.by_rows(to, &|y, rows| {
                    // SAFETY: the input is only read.
                    let x = unsafe { &self.read(inputs[0])[rows.start * wide..rows.end * wide] };
                    for (y, x) in y.iter_mut().zip(x.chunks_exact(wide)) {
                        *y = x.iter().map(|x| f64::from(*x)).sum::<f64>() as f32;
                    }
                });
            }
            Gradient::Gathered(op) => {
                let picked = self.picked(op.index);
                self.by_rows(to, &|y, _| y.fill(0.0));
                self.each(width, 64, &|columns, _| {
                    // SAFETY: the input is only read.
                    let dy = unsafe { self.read(inputs[0]) };
                    for (t, row) in picked.iter().enumerate() {
                        let at =
                            |row: usize| row * width + columns.start..row * width + columns.end;
                        // SAFETY: each worker has its own columns.
                        let y = unsafe { self.part(to, at(*row as usize)) };
                        y.iter_mut().zip(&dy[at(t)]).for_each(|(y, dy)| *y += dy);
                    }
                });
            }
            Gradient::Spread(_) => self.by_rows(to, &|y, rows| {
                // SAFETY: the input is only read.
                let dy = unsafe { self.read(inputs[0]) };
                for (t, y) in rows.zip(y.chunks_exact_mut(width)) {
                    match self.packing.picks.binary_search(&(t as u32)) {
                        Ok(at) => y.copy_from_slice(&dy[at * width..][..width]),
                        Err(_) => y.fill(0.0),
                    }
                }
            }),
            // Those that are products, which the executor runs itself.
            _ => {}
        }
    }

    /// `y *= by`.
    fn times(&self, y: &mut [f32], by: &[f32]) {
        math::zip_in_place(self.of.isa, Binary::Mul, y, by);
    }

    /// `dy *= f'(x)`.
    fn map_backward(&self, f: Unary, x: &[f32], dy: &mut [f32]) {
        const N: usize = 256;
        let isa = self.of.isa;
        let root = (2.0 / std::f32::consts::PI).sqrt();
        for (x, dy) in x.chunks(N).zip(dy.chunks_mut(N)) {
            let mut whole = [0f32; N];
            let s = &mut whole[..x.len()];
            let argument: fn(f32) -> f32 = match f {
                Unary::QuickGelu => |x| 1.702 * x,
                Unary::GeluTanh => {
                    |x| (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
                }
                Unary::GeluErf => |x| -0.5 * x * x,
                _ => |x| x,
            };
            s.iter_mut().zip(x).for_each(|(s, x)| *s = argument(*x));
            let inner = match f {
                Unary::Silu | Unary::Sigmoid | Unary::QuickGelu | Unary::Softplus => {
                    Some(Unary::Sigmoid)
                }
                Unary::Tanh | Unary::GeluTanh => Some(Unary::Tanh),
                Unary::Exp | Unary::GeluErf => Some(Unary::Exp),
                Unary::Relu | Unary::Square | Unary::HardTanh => None,
            };
            inner.into_iter().for_each(|inner| math::map_in_place(isa, inner, s));
            let mut erf = [0f32; N];
            if f == Unary::GeluErf {
                erf[..x.len()].copy_from_slice(x);
                math::map_in_place(isa, Unary::GeluErf, &mut erf[..x.len()]);
            }
            let (s, e) = (&*s, &erf[..x.len()]);
            match f {
                Unary::Silu => slopes(isa, dy, [x, s, e], |x, s, _| s * (1.0 + x * (1.0 - s))),
                Unary::GeluTanh => slopes(isa, dy, [x, s, e], |x, s, _| {
                    let inner = root * (1.0 + 3.0 * 0.044715 * x * x);
                    0.5 * (1.0 + s) + 0.5 * x * (1.0 - s * s) * inner
                }),
                Unary::GeluErf => slopes(isa, dy, [x, s, e], |x, s, e| {
                    let below = if x.abs() < 1e-3 {
                        0.5 + x * std::f32::consts::FRAC_2_SQRT_PI * 0.353_553_4
                    } else {
                        e / x
                    };
                    below + x * s * 0.398_942_3
                }),
                Unary::QuickGelu => {
                    slopes(isa, dy, [x, s, e], |x, s, _| s + 1.702 * x * s * (1.0 - s));
                }
                Unary::Tanh => slopes(isa, dy, [x, s, e], |_, s, _| 1.0 - s * s),
                Unary::Sigmoid => slopes(isa, dy, [x, s, e], |_, s, _| s * (1.0 - s)),
                Unary::Exp | Unary::Softplus => slopes(isa, dy, [x, s, e], |_, s, _| s),
                Unary::Relu => {
                    slopes(isa, dy, [x, s, e], |x, _, _| if x > 0.0 { 1.0 } else { 0.0 });
                }
                Unary::Square => slopes(isa, dy, [x, s, e], |x, _, _| 2.0 * x),
                Unary::HardTanh => {
                    slopes(isa, dy, [x, s, e], |x, _, _| if x.abs() <= 1.0 { 1.0 } else { 0.0 });
                }
            }
        }
    }

    /// The gradients of a norm. The gradients of its weight are summed over [`ROWS`] rows at a
    /// time, then over these sums.
    fn norm_backward(&self, index: usize, node: &Node, how: (f32, bool), weight: WeightId) {
        let (to, weight) = (node.outputs[0], self.weights.vector(weight));
        let from = self.source(index, node, 1);
        let width = weight.len();
        let rows = self.rows(to) * self.width(to) / width;
        let wanted = node.outputs.len() - 1;
        let mut sums = vec![0f32; rows.div_ceil(ROWS) * wanted * width];
        let shared = cpu_kernels::team::SharedSlice::new(&mut sums);
        self.each(rows.div_ceil(ROWS), 1, &|blocks, _| {
            for block in blocks {
                let range = block * ROWS..rows.min((block + 1) * ROWS);
                // SAFETY: each block is one worker's; the input is only read.
                let (x, dy, sums) = unsafe {
                    let own = range.start * width..range.end * width;
                    let each = wanted * width;
                    let sums = shared.slice_mut(block * each..(block + 1) * each);
                    (&self.read(node.inputs[0])[own.clone()], self.part(to, own), sums)
                };
                self.begin(from, dy, range.start * width..range.end * width);
                for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
                    vectorised(self.of.isa, || norm_row(x, dy, weight, how, sums));
                }
            }
        });
        for (i, output) in node.outputs[1..].iter().enumerate() {
            // SAFETY: a node's operands.
            let y = unsafe { self.write(*output) };
            y.fill(0.0);
            for block in sums.chunks_exact(wanted * width) {
                let from = &block[i * width..][..width];
                y.iter_mut().zip(from).for_each(|(y, from)| *y += from);
            }
        }
    }
}

/// `dy *= f(x, s, e)`.
fn slopes(isa: Isa, dy: &mut [f32], [x, s, e]: [&[f32]; 3], f: impl Fn(f32, f32, f32) -> f32) {
    vectorised(isa, || {
        let each = dy.iter_mut().zip(x).zip(s).zip(e);
        each.for_each(|(((dy, x), s), e)| *dy *= f(*x, *s, *e));
    });
}

/// The gradients of one row: `dy` becomes `dx`; the gradients of the weight and then of the bias
/// are added to `sums`, as far as it has room.
#[inline(always)]
fn norm_row(
    x: &[f32],
    dy: &mut [f32],
    weight: &[f32],
    (eps, centred): (f32, bool),
    sums: &mut [f32],
) {
    let width = x.len();
    let n = width as f64;
    let mean = if centred { (total(x, x, |x, _| x) / n) as f32 } else { 0.0 };
    let square = total(x, x, |x, _| (x - mean) * (x - mean)) / n;
    let scale = (1.0 / (square + f64::from(eps)).sqrt()) as f32;
    for (part, sums) in sums.chunks_exact_mut(width).enumerate() {
        let each = sums.iter_mut().zip(&*dy).zip(x);
        match part {
            0 => each.for_each(|((sum, dy), x)| *sum += dy * (x - mean) * scale),
            _ => each.for_each(|((sum, dy), _)| *sum += dy),
        }
    }
    dy.iter_mut().zip(weight).for_each(|(dy, weight)| *dy *= weight);
    let along = (total(dy, x, |dy, x| dy * (x - mean)) / n) as f32 * scale * scale;
    let level = if centred { (total(dy, dy, |dy, _| dy) / n) as f32 } else { 0.0 };
    dy.iter_mut().zip(x).for_each(|(dy, x)| *dy = (*dy - level - (x - mean) * along) * scale);
}
