//! A short causal convolution, each element by itself:
//! `y[p, i] = f(bias[i] + sum_j taps[j, i] x[p - kernel + 1 + j, i])`, where `x` is 0 in front of
//! the sequence, and the bias and `f` are optional. The state that it carries are the last
//! `kernel - 1` rows of `x`.

use formats::{Error, Result};
use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

use crate::operation::{
    ActivationPrecision, CacheUse, Operation, ReferenceCall, Sharding, StateAccess,
};
use crate::states::{Chunk, States, Trial, chunk};
use crate::sweep::{begin, load, require_vectors, when};
use crate::trial::{memory, random};
use crate::{Shape, Unary, arity, expect, real};

/// `x[tokens, width]; taps[kernel * width], (bias[width]) -> [tokens, width]`; the last `width` taps
/// weigh the row itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShortConv {
    /// Index of the cache layer.
    pub layer: usize,
    /// Where its part of the layer's state begins, `[kernel - 1, width]`: the rows before the next
    /// one, the oldest first.
    pub start: usize,
    /// Elements in a row.
    pub width: usize,
    /// Rows that are mixed, the row itself among them: at least 2.
    pub kernel: usize,
    /// What is made of each sum. Gradients have none: it is an operation of its own there.
    pub activation: Option<Unary>,
}

impl ShortConv {
    /// Of rows of `width` elements, `kernel` of which are mixed, whose layer is set later.
    pub fn new(width: usize, kernel: usize) -> ShortConv {
        ShortConv { layer: 0, start: 0, width, kernel, activation: None }
    }

    fn activate(&self, sum: f64) -> f64 {
        self.activation.map_or(sum, |f| f.apply(sum))
    }

    /// Elements of its part of the state.
    pub fn elements(&self) -> usize {
        self.kernel.saturating_sub(1) * self.width
    }
}

impl Operation for ShortConv {
    fn name(&self) -> &'static str {
        "short_conv"
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("short_conv", inputs, 1, weights, &[1, 2])?;
        if self.kernel < 2 {
            return Err(Error::new("short_conv", "a kernel of 2 rows or more", self.kernel));
        }
        expect("short_conv", "width", &[inputs[0].width], &[self.width])?;
        expect("short_conv", "taps", weights[0], &[self.kernel * self.width])?;
        if let Some(bias) = weights.get(1) {
            expect("short_conv", "bias", bias, &[self.width])?;
        }
        Ok(vec![inputs[0]])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = self.width;
        let x = call.cache[self.layer].note(self.start, call.positions, width, call.inputs[0]);
        let taps = &call.weights[0];
        for (t, &position) in call.positions.iter().enumerate() {
            for i in 0..width {
                let tap = |j: usize| {
                    let at = (position as usize + j).checked_sub(self.kernel - 1)?;
                    Some(f64::from(taps[j * width + i]) * f64::from(x[at * width + i]))
                };
                let sum: f64 = (0..self.kernel).filter_map(tap).sum();
                let bias = call.weights.get(1).map_or(0.0, |bias| f64::from(bias[i]));
                call.outputs[0][t * width + i] = self.activate(sum + bias) as f32;
            }
        }
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn cache(&self) -> Option<CacheUse> {
        let access = StateAccess::Carry { start: self.start, elements: self.elements() };
        Some(CacheUse { layer: self.layer, access })
    }

    fn set_layer(&mut self, layer: usize) {
        self.layer = layer;
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }
}

/// The parameters that distinguish the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvForm {
    /// Elements that a thread has: 4, or 1 where a row or a state is no whole number of vectors.
    pub lanes: u8,
    /// Whether there is a bias.
    pub biased: bool,
    /// See [`ShortConv::activation`].
    pub activation: Option<Unary>,
}

impl ConvForm {
    /// For rows of `op`, whose layer has states of `size` elements.
    pub fn of(op: &ShortConv, biased: bool, size: usize) -> ConvForm {
        let whole = [op.width, op.start, size].iter().all(|n| n.is_multiple_of(4));
        ConvForm { lanes: if whole { 4 } else { 1 }, biased, activation: op.activation }
    }
}

/// Threads of a group.
const THREADS: u32 = 128;

/// Convolves the rows `x` `[tokens, width]` of a step, on the device. A group has some columns of a
/// row. The first row's group computes the rows of its sequence that see the state, and then
/// replaces the state, so no other group reads or writes it. Idle rows become zeros. Where
/// `form.biased`, a last buffer `bias` is `[width]`.
#[kernel]
pub fn short_conv(
    x: In<f32>,
    taps: In<f32>,
    positions: In<u32>,
    sequences: In<u32>,
    starts: In<u32>,
    table: In<u32>,
    states: InOut<f32>,
    y: Out<f32>,
    stride: Arg<u32>,
    block: Const<u32>,
    size: Const<u32>,
    start: Const<u32>,
    width: Const<u32>,
    mixed: Const<u32>,
    form: ConvForm,
) {
    let ConvForm { lanes, activation, .. } = form;
    let columns = THREADS * u32::from(lanes);
    launch(Mode::Row, [dim("tokens"), dim("width").ceil_div(columns), fixed(1)], THREADS);
    let rows = dim("tokens") * dim("width");
    let taken = [("x", rows.clone()), ("taps", dim("mixed") * dim("width")), ("y", rows)];
    require_vectors(&taken);
    require_vectors(&[("states", dim("size"))]);
    let bias = form.biased.then(|| {
        require_vectors(&[("bias", dim("width"))]);
        <In>::stored("bias", Scalar::F32)
    });
    States::require();
    begin();
    let states = States { states, positions, sequences, starts, table, stride, block, size, start };
    let (row, column) = (group_id(), group_id_of(1) * columns + thread_id() * u32::from(lanes));
    let chunk = states.chunk(sequences.get(row));
    let columns = Columns { x, taps, bias, y, states, width, mixed, column, lanes, activation };
    when(Order::lt(column, width), || {
        let zeros = || columns.put(row, &vec![0.0f32.val(); usize::from(lanes)]);
        let rows = || {
            let own = row - chunk.first;
            when(Order::eq(own, 0u32), || columns.first_rows(&chunk));
            when(Order::ge(own, mixed - 1u32), || {
                let sum = columns.sum(|j| columns.row(row + j + 1u32 - mixed));
                columns.put(row, &sum);
            });
        };
        test(chunk.is_empty()).then(zeros).otherwise(rows);
    });
}

/// A thread's columns.
#[derive(Clone, Copy)]
struct Columns {
    x: In,
    taps: In,
    bias: Option<In>,
    y: Out,
    states: States,
    width: Val<u32>,
    /// Rows that are mixed.
    mixed: Val<u32>,
    column: Val<u32>,
    lanes: u8,
    activation: Option<Unary>,
}

impl Columns {
    /// The lane's columns of a row of `x`.
    #[track_caller]
    fn row(&self, row: Val<u32>) -> Vec<Val<f32>> {
        load(self.x, row * self.width + self.column, self.lanes)
    }

    #[track_caller]
    fn put(&self, row: Val<u32>, values: &[Val<f32>]) {
        self.y.set_vec(row * self.width + self.column, values);
    }

    /// What is made of the bias and the taps times the rows that `of` finds, in the order of
    /// positions.
    #[track_caller]
    fn sum(&self, of: impl Fn(Val<u32>) -> Vec<Val<f32>>) -> Vec<Val<f32>> {
        let sums = Regs::new(u32::from(self.lanes), 0.0);
        if let Some(bias) = self.bias {
            let bias = load(bias, self.column, self.lanes);
            (0u32..).zip(bias).for_each(|(i, bias)| sums.set(i, bias));
        }
        range(0u32, self.mixed).unroll().each(|j| {
            let taps = load(self.taps, j * self.width + self.column, self.lanes);
            for (i, (x, tap)) in (0u32..).zip(of(j).into_iter().zip(taps)) {
                sums.set(i, x.fma(tap, sums.get(i)));
            }
        });
        let activate = |sum| self.activation.map_or(sum, |f| real::unary(f, sum));
        (0..u32::from(self.lanes)).map(|i| activate(sums.get(i))).collect()
    }

    /// The rows of a chunk that see what was carried, and the states behind the chunk.
    #[track_caller]
    fn first_rows(&self, chunk: &Chunk) {
        let carried = self.mixed - 1u32;
        let begins = self.states.positions.get(chunk.first);
        let last = begins + (chunk.end - chunk.first - 1u32);
        // In front of the sequence all is zero; whatever is read there instead is dropped.
        let fresh = Order::eq(begins, 0u32);
        let before = self.states.behind(chunk, begins.max(1u32) - 1u32);
        // Row `i` of what was carried and the chunk's own behind it.
        let either = |i: Val<u32>| -> Vec<Val<f32>> {
            let found = Regs::<f32>::uninit(u32::from(self.lanes));
            let keep = |values: Vec<Val<f32>>| {
                (0u32..).zip(values).for_each(|(at, value)| found.set(at, value));
            };
            let old = || {
                let at = before + i * self.width + self.column;
                let values = load(self.states.states, at, self.lanes);
                keep(values.into_iter().map(|value| select(fresh, 0.0, value)).collect());
            };
            let own = || keep(self.row(chunk.first + i - carried));
            test(Order::lt(i, carried)).then(old).otherwise(own);
            (0..u32::from(self.lanes)).map(|at| found.get(at)).collect()
        };
        range(0u32, carried.min(chunk.end - chunk.first)).each(|own| {
            let sum = self.sum(|j| either(own + j));
            self.put(chunk.first + own, &sum);
        });
        // The first block may be the one that was read: it comes last, and its rows in ascending
        // order, so that what is still to be read is not yet written over.
        let (from, to) = (begins / self.states.block, last / self.states.block);
        range(0u32, to + 1u32 - from).each(|turn| {
            let at = to - turn;
            let end = last.min((at + 1u32) * self.states.block - 1u32);
            let place = self.states.behind(chunk, end);
            range(0u32, carried).each(|j| {
                let values = either(end - begins + 1u32 + j);
                self.states.states.set_vec(place + j * self.width + self.column, &values);
            });
        });
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "short_conv", cases, benches }];

fn cases() -> Vec<Case> {
    let case = |(rows, width, kernel, why): (&[(u32, u32)], usize, usize, &str)| {
        let activation = why.contains("activation").then_some(Unary::Silu);
        let op = ShortConv { start: 4, activation, ..ShortConv::new(width, kernel) };
        let biased = why.contains("bias");
        let trial = Trial::of(rows, op.start + op.elements() + 4);
        let x = random(Scalar::F32, 1, rows.len() * width);
        let taps = random(Scalar::F32, 2, kernel * width);
        let states = random(Scalar::F32, 3, trial.elements());
        let bias = biased.then(|| random(Scalar::F32, 5, width));
        let (values, weights) = (x.to_f64(), taps.to_f64());
        let first = bias.as_ref().map_or(vec![0.0; width], Buffer::to_f64);
        let (after, y) =
            trial.walk(&states, op.start..op.start + op.elements(), width, |row, state| {
                state.extend_from_slice(&values[row * width..][..width]);
                let mut y = first.clone();
                let terms = weights.iter().zip(state.iter()).map(|(tap, x)| tap * x).enumerate();
                terms.for_each(|(at, term)| y[at % width] += term);
                state.drain(..width);
                y.into_iter().map(|sum| op.activate(sum)).collect()
            });
        let mut buffers = vec![x, taps];
        buffers.extend(trial.buffers());
        // Not zeros, which idle rows must become.
        buffers.extend([states, random(Scalar::F32, 4, rows.len() * width)]);
        buffers.extend(bias);
        let near = |values| Expected::Near(values, tolerance(Scalar::F32));
        Case {
            kernel: short_conv(ConvForm::of(&op, biased, trial.size)).record(),
            label: format!("{} x {width}, {kernel} taps, {why}", rows.len()),
            numbers: numbers(&op, trial.numbers()),
            buffers,
            expected: vec![(6, near(after)), (7, near(y))],
        }
    };
    let all = [chunk(0, 0..2), chunk(1, 30..47), chunk(2, 15..17), chunk(4, 0..2)].concat();
    [
        (&chunk(0, 7..8)[..], 8, 4, "one token"),
        (&chunk(0, 0..1), 520, 4, "the first token, more columns than a group has"),
        (&all, 12, 4, "chunks of several sequences, over blocks' ends, and idle rows"),
        (&all, 7, 3, "a width that no vector divides"),
        (&chunk(1, 16..19), 4, 2, "one row carried, from a block's end on"),
        (&all, 12, 4, "chunks and idle rows, with a bias"),
        (&chunk(0, 7..9), 7, 4, "a bias that no vector divides"),
        (&all, 12, 4, "chunks and idle rows, with an activation"),
        (&all, 7, 3, "a bias and an activation"),
    ]
    .into_iter()
    .map(case)
    .collect()
}

/// The numbers of a launch; `step` has the numbers of its step.
pub fn numbers(op: &ShortConv, step: Numbers) -> Numbers {
    step.with("start", op.start as u32)
        .with("width", op.width as u32)
        .with("mixed", op.kernel as u32)
}

fn benches() -> Vec<Bench> {
    let op = ShortConv::new(8192, 4);
    let bench = |tokens: usize| {
        let trial = Trial::one(tokens, op.elements());
        let n = tokens * op.width;
        let mut buffers = vec![Fill::Noise(Scalar::F32, n), Fill::Noise(Scalar::F32, 4 * op.width)];
        buffers.extend(trial.buffers().map(Fill::These));
        buffers.push(Fill::Zeros(Scalar::F32, trial.elements()));
        buffers.push(Fill::Zeros(Scalar::F32, n));
        let kernel = short_conv(ConvForm::of(&op, false, op.elements()));
        let numbers = numbers(&op, trial.numbers());
        memory(kernel, &format!("{tokens} x 8192"), numbers, buffers, 8 * n as u64)
    };
    [1, 2048].map(bench).to_vec()
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}
