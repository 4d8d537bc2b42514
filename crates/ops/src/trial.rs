//! Helpers that the operations' test cases and benchmarks share.

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use crate::operation::{Operation, Packed, ReferenceCall};

/// A function's results for every floating-point type, one after another.
pub(crate) fn every_float<X>(of: impl Fn(Scalar) -> Vec<X>) -> Vec<X> {
    [Scalar::F32, Scalar::F16, Scalar::BF16].into_iter().flat_map(of).collect()
}

/// Seeded numbers in `-by..by` rounded to a type.
pub(crate) fn scaled(scalar: Scalar, seed: u64, len: usize, by: f32) -> Buffer {
    let values: Vec<f32> = noise(seed, len).into_iter().map(|v| v * by).collect();
    Buffer::floats(scalar, &values)
}

/// Seeded numbers in -1..1 rounded to a type.
pub(crate) fn random(scalar: Scalar, seed: u64, len: usize) -> Buffer {
    scaled(scalar, seed, len, 1.0)
}

/// The rows of packed sequences.
pub(crate) struct PackedRows {
    /// For each row the first of its sequence.
    pub(crate) first: Vec<u32>,
}

impl PackedRows {
    /// Sequences of these lengths.
    pub(crate) fn new(lengths: &[usize]) -> PackedRows {
        let starts = lengths.iter().scan(0, |next, &length| {
            let start = *next as u32;
            *next += length;
            Some(std::iter::repeat_n(start, length))
        });
        PackedRows { first: starts.flatten().collect() }
    }

    pub(crate) fn len(&self) -> usize {
        self.first.len()
    }

    /// Whether a row is the first of its sequence.
    pub(crate) fn is_first(&self, t: usize) -> bool {
        self.first[t] as usize == t
    }

    /// Whether a row is the last of its sequence.
    pub(crate) fn is_last(&self, t: usize) -> bool {
        self.first.get(t + 1) != Some(&self.first[t])
    }

    /// The first row of each sequence, and the row behind the last.
    pub(crate) fn starts(&self) -> Vec<u32> {
        let mut starts = self.first.clone();
        starts.dedup();
        starts.push(self.len() as u32);
        starts
    }

    /// The position of each row in its sequence.
    pub(crate) fn positions(&self) -> Vec<u32> {
        (0u32..).zip(&self.first).map(|(t, first)| t - first).collect()
    }

    /// What an operation's definition makes of inputs and weights: outputs of these lengths.
    pub(crate) fn reference(
        &self,
        op: &dyn Operation,
        inputs: &[&Buffer],
        weights: &[Vec<f32>],
        lengths: &[usize],
    ) -> Vec<Vec<f32>> {
        let inputs: Vec<Vec<f32>> = inputs.iter().map(|input| input.to_f32()).collect();
        let mut call = ReferenceCall {
            widths: inputs.iter().map(|input| input.len() / self.len()).collect(),
            inputs: inputs.iter().map(Vec::as_slice).collect(),
            weights,
            outputs: lengths.iter().map(|&len| vec![0.0; len]).collect(),
            tokens: &[],
            positions: &[],
            picks: &[],
            deltas: Vec::new(),
            cache: &mut [],
            packed: Packed { first: &self.first, ..Packed::default() },
        };
        op.reference(&mut call);
        call.outputs
    }
}

/// Numbers as a kernel's f32.
pub(crate) fn rounded(values: &[f64]) -> Buffer {
    let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    Buffer::floats(Scalar::F32, &values)
}

/// Zeros, as many f32 as there are values.
pub(crate) fn zeros_like(values: &[f64]) -> Buffer {
    Buffer::zeros(Scalar::F32, values.len())
}

/// Results within what sums of f32 allow.
pub(crate) fn close(values: &[f64]) -> Expected {
    Expected::Near(values.to_vec(), tolerance(Scalar::F32))
}

/// Results within what the rounding to a type allows.
pub(crate) fn near(scalar: Scalar, values: &[f32]) -> Expected {
    Expected::Near(values.iter().copied().map(f64::from).collect(), tolerance(scalar))
}

/// The result of a kernel that must be the reference rounded to a type, bit for bit.
pub(crate) fn exact(scalar: Scalar, values: &[f32]) -> Expected {
    Expected::Exact(Buffer::floats(scalar, values).to_f64())
}

/// Cases of an element-wise kernel of `inputs` operands and the argument `n`, with values in
/// `-by..by`.
pub(crate) fn flat(
    scalar: Scalar,
    kernel: Recipe,
    numbers: &Numbers,
    inputs: usize,
    by: f32,
    reference: impl Fn(&[Vec<f32>], &mut [f32]),
) -> Vec<Case> {
    flat_to([scalar; 2], kernel, numbers, inputs, by, reference)
}

/// As [`flat`], from operands of one type to results of another that is not wider.
pub(crate) fn flat_to(
    [scalar, to]: [Scalar; 2],
    kernel: Recipe,
    numbers: &Numbers,
    inputs: usize,
    by: f32,
    reference: impl Fn(&[Vec<f32>], &mut [f32]),
) -> Vec<Case> {
    let kernel = kernel.record();
    let types = if scalar == to { format!("{scalar}") } else { format!("{scalar} to {to}") };
    let chunk = crate::sweep::chunk(scalar) as usize;
    let lengths = [
        (1, "one element"),
        (7, "less than a vector"),
        (3 * 129, "rows that no vector divides"),
        (chunk, "one chunk exactly"),
        (chunk + 13, "a chunk, then a ragged tail"),
        (2 * chunk - 1, "one short of two chunks"),
    ];
    let case = |(n, why): (usize, &str)| {
        let operand = |i: usize| match n {
            // Noise might be so near zero that its result has no bits in f16.
            1 => Buffer::floats(scalar, &[0.75 * by]),
            _ => scaled(scalar, n as u64 * 8 + i as u64 + 1, n, by),
        };
        let mut buffers: Vec<Buffer> = (0..inputs).map(operand).collect();
        let x: Vec<Vec<f32>> = buffers.iter().map(Buffer::to_f32).collect();
        let mut y = vec![0.0; n];
        reference(&x, &mut y);
        buffers.push(Buffer::zeros(to, n));
        Case {
            kernel: kernel.clone(),
            label: format!("{n} {types}, {why}"),
            numbers: numbers.clone().with("n", n as u32),
            buffers,
            expected: vec![(inputs, near(to, &y))],
        }
    };
    lengths.into_iter().map(case).collect()
}

/// A case of a kernel that reads `inputs` and writes what was `wanted` in these types, in the order
/// of its buffers.
pub(crate) fn framed(
    kernel: Recipe,
    label: String,
    numbers: Numbers,
    inputs: Vec<Buffer>,
    wanted: &[(Scalar, &[f32])],
) -> Case {
    let first = inputs.len();
    let zeros = wanted.iter().map(|(scalar, values)| Buffer::zeros(*scalar, values.len()));
    Case {
        kernel: kernel.record(),
        label,
        numbers,
        buffers: inputs.into_iter().chain(zeros).collect(),
        expected: (first..).zip(wanted.iter().map(|(scalar, y)| near(*scalar, y))).collect(),
    }
}

/// Rows of a benchmark whose buffers are 64 MiB whatever the type: more than caches hold, and long
/// against a launch.
pub(crate) fn rows_of(scalar: Scalar, width: usize) -> usize {
    (64 << 20) / (width * scalar.bytes())
}

/// A benchmark of an element-wise kernel on buffers of 64 MiB.
pub(crate) fn flat_bench(
    scalar: Scalar,
    kernel: Recipe,
    numbers: Numbers,
    inputs: usize,
    flops: u64,
) -> Bench {
    let rows = rows_of(scalar, 4096);
    let n = rows * 4096;
    let mut buffers = vec![Fill::Noise(scalar, n); inputs];
    buffers.push(Fill::Zeros(scalar, n));
    memory(
        kernel,
        &format!("{rows} x 4096"),
        numbers.with("n", n as u32),
        buffers,
        flops * n as u64,
    )
}

/// A benchmark bounded by memory, in which every buffer crosses the bus once.
pub(crate) fn memory(
    kernel: Recipe,
    label: &str,
    numbers: Numbers,
    buffers: Vec<Fill>,
    flops: u64,
) -> Bench {
    let size = |fill: &Fill| match fill {
        Fill::Noise(scalar, len) | Fill::Zeros(scalar, len) => (scalar.bytes() * len) as u64,
        Fill::These(buffer) => buffer.bytes.len() as u64,
    };
    let bytes = buffers.iter().map(size).sum();
    Bench {
        kernel: kernel.record(),
        label: label.to_owned(),
        numbers,
        buffers,
        bytes,
        flops,
        roof: Bottleneck::Memory,
    }
}

/// Runs every case through the interpreter.
#[cfg(test)]
pub(crate) fn check(specs: &[tile::case::Spec]) {
    for spec in specs {
        let cases = (spec.cases)();
        let mut worst: f64 = 0.0;
        for case in &cases {
            match tile::interp::check(case) {
                Ok(error) => worst = worst.max(error),
                Err(why) => panic!("{}, {}: {why}", case.kernel.name, case.label),
            }
        }
        println!("{}: {} cases, relative error {worst:.1e}", spec.name, cases.len());
        assert!(!cases.is_empty());
    }
}
