//! What the operations' test cases and benchmarks have in common.

use tile::Kernel;
use tile::case::{Bench, Buffer, Case, Expected, Fill, Roof, noise, tolerance};
use tile::dsl::Float;
use tile::launch::Numbers;

/// Concatenates a generic function's results for every floating-point type.
macro_rules! every_float {
    ($($f:tt)*) => {{
        let mut all = $($f)*::<f32>();
        all.extend($($f)*::<half::f16>());
        all.extend($($f)*::<half::bf16>());
        all
    }};
}
pub(crate) use every_float;

/// Seeded numbers in `-by..by` rounded to `T`.
pub(crate) fn scaled<T: Float>(seed: u64, len: usize, by: f32) -> Buffer {
    let values: Vec<f32> = noise(seed, len).into_iter().map(|v| v * by).collect();
    Buffer::floats(T::SCALAR, &values)
}

/// Seeded numbers in -1..1 rounded to `T`.
pub(crate) fn random<T: Float>(seed: u64, len: usize) -> Buffer {
    scaled::<T>(seed, len, 1.0)
}

/// Results within what the rounding to `T` allows.
pub(crate) fn near<T: Float>(values: &[f32]) -> Expected {
    Expected::Near(values.iter().copied().map(f64::from).collect(), tolerance(T::SCALAR))
}

/// The result of a kernel that must be the reference rounded to `T`, bit for bit.
pub(crate) fn exact<T: Float>(values: &[f32]) -> Expected {
    Expected::Exact(Buffer::floats(T::SCALAR, values).to_f64())
}

/// Cases of an element-wise kernel of `inputs` operands and the argument `n`, with values in `-by..by`.
pub(crate) fn flat<T: Float>(
    kernel: &Kernel,
    numbers: &Numbers,
    inputs: usize,
    by: f32,
    reference: impl Fn(&[Vec<f32>], &mut [f32]),
) -> Vec<Case> {
    let chunk = crate::sweep::chunk::<T>() as usize;
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
            1 => Buffer::floats(T::SCALAR, &[0.75 * by]),
            _ => scaled::<T>(n as u64 * 8 + i as u64 + 1, n, by),
        };
        let mut buffers: Vec<Buffer> = (0..inputs).map(operand).collect();
        let x: Vec<Vec<f32>> = buffers.iter().map(Buffer::to_f32).collect();
        let mut y = vec![0.0; n];
        reference(&x, &mut y);
        buffers.push(Buffer::zeros(T::SCALAR, n));
        Case {
            kernel: kernel.clone(),
            label: format!("{n} {}, {why}", T::NAME),
            numbers: numbers.clone().with("n", n as u32),
            buffers,
            expected: vec![(inputs, near::<T>(&y))],
        }
    };
    lengths.into_iter().map(case).collect()
}

/// Rows of a benchmark whose buffers are 64 MiB whatever the type: more than caches hold, and long against a launch.
pub(crate) fn rows_of<T: Float>(width: usize) -> usize {
    (64 << 20) / (width * T::SCALAR.bytes())
}

/// A benchmark of an element-wise kernel on buffers of 64 MiB.
pub(crate) fn flat_bench<T: Float>(
    kernel: Kernel,
    numbers: Numbers,
    inputs: usize,
    flops: u64,
) -> Bench {
    let rows = rows_of::<T>(4096);
    let n = rows * 4096;
    let mut buffers = vec![Fill::Noise(T::SCALAR, n); inputs];
    buffers.push(Fill::Zeros(T::SCALAR, n));
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
    kernel: Kernel,
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
    Bench { kernel, label: label.to_owned(), numbers, buffers, bytes, flops, roof: Roof::Memory }
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
