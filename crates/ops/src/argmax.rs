//! The index of the greatest element of every row, the lowest among equals: greedy decoding.
//!
//! NaN is never the greatest; of a row without anything above minus infinity the answer is 0. Many
//! groups share a row: each finds its part's greatest, and the last to finish finds the greatest of
//! those.

use tile::case::{Bench, Buffer, Case, Expected, Fill, Spec};
use tile::dsl::*;
use tile::ir::AtomicOp;
use tile::launch::{Mode, Numbers};

use crate::sample::kernels::arith::{IMPOSSIBLE, group_peak, key_of, peak};
use crate::sweep::{begin, require_lengths};
use crate::trial::{every_float, scaled};

/// The index of the greatest of every row of `width`.
pub fn reference(x: &[f32], width: usize) -> Vec<u32> {
    let row = |x: &[f32]| {
        let mut best = (f32::NEG_INFINITY, 0);
        for (i, &x) in x.iter().enumerate() {
            if x > best.0 {
                best = (x, i as u32);
            }
        }
        best.1
    };
    x.chunks_exact(width).map(row).collect()
}

/// Threads of a group.
const THREADS: u32 = 256;
/// Elements that each thread loads before it looks at the first.
const EACH: u32 = 16;
/// Elements of a row per group.
pub const PART: u32 = THREADS * EACH;

/// The greatest of every row of `x`, `[rows, width]`. `peaks` (`[rows, ceil(width / PART), 2]`) is
/// scratch; `arrived` (`[rows]`) is zero before and after.
#[kernel]
pub fn argmax(
    x: In<{ scalar }>,
    index: Out<u32>,
    peaks: InOut<u32>,
    arrived: InOut<u32>,
    width: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Row, [dim("width").ceil_div(PART), dim("rows"), fixed(1)], THREADS);
    let parts = dim("width").ceil_div(PART) * dim("rows");
    require_lengths(&[
        ("x", dim("rows") * dim("width")),
        ("index", dim("rows")),
        ("peaks", parts * 2u32),
        ("arrived", dim("rows")),
    ]);
    begin();
    let last = Shared::<u32>::named("last", 1);
    let row = group_id_of(1);
    let start = group_id() * PART + thread_id();
    let at: Vec<Val<u32>> = (0..EACH).map(|i| start + i * THREADS).collect();
    // Beyond the end the last element is looked at again: it is nobody's rival.
    let at: Vec<Val<u32>> = at.into_iter().map(|i| i.min(width - 1)).collect();
    let loaded: Vec<Val<f32>> = at.iter().map(|&i| x[row * width + i].f32()).collect();
    let keys = loaded.into_iter().map(key_of).zip(at);
    let (key, token) = keys.reduce(peak).expect("a thread has elements");
    let (key, token) = group_peak(key, token);
    let part = (row * groups(0) + group_id()) * 2;
    if thread_id() == 0 {
        peaks[part] = key;
        peaks[part + 1] = token;
        fence();
        last[0u32] = arrived.atomic(AtomicOp::Add, row, 1u32);
        fence();
    }
    barrier();
    if last[0u32] == groups(0) - 1 {
        let (best, whose) = (Var::new(0u32), Var::new(u32::MAX));
        for i in strided(groups(0)) {
            let part = (row * groups(0) + i) * 2;
            let (key, token) = peak((best.get(), whose.get()), (peaks[part], peaks[part + 1]));
            best.set(key);
            whose.set(token);
        }
        let (key, token) = group_peak(best.get(), whose.get());
        if thread_id() == 0 {
            index[row] = select(Order::gt(key, IMPOSSIBLE), token, 0u32);
            arrived[row] = 0;
        }
    }
}

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "argmax", cases, benches }];

fn cases() -> Vec<Case> {
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |width: usize, change: fn(&mut [f32], usize), why: &str| {
            let rows = 3;
            let mut x = scaled(scalar, width as u64, rows * width, 20.0).to_f32();
            change(&mut x, width);
            let want = reference(&x, width).into_iter().map(f64::from).collect();
            let zeros = |len| Buffer::zeros(Scalar::U32, len);
            Case {
                kernel: argmax(scalar).record(),
                label: format!("{rows} x {width} {scalar}, {why}"),
                numbers: Numbers::new().with("rows", rows as u32).with("width", width as u32),
                buffers: vec![
                    Buffer::floats(scalar, &x),
                    zeros(rows),
                    zeros(rows * 2 * width.div_ceil(PART as usize)),
                    zeros(rows),
                ],
                expected: vec![(1, Expected::Exact(want)), (3, Expected::Exact(vec![0.0; rows]))],
            }
        };
        vec![
            case(1, |_, _| (), "one element"),
            case(2, |x, _| x[0] = f32::NEG_INFINITY, "two elements"),
            case(31, |x, _| x[3..9].fill(25.0), "equals"),
            case(1000, |x, width| x[..width].fill(f32::NAN), "a row of NaN"),
            case(1000, |x, width| x[..2 * width].fill(f32::NEG_INFINITY), "nothing possible"),
            case(4097, |x, width| x[width - 1] = f32::INFINITY, "a second part of one element"),
            case(9000, |x, _| (x[5], x[8999], x[77]) = (f32::NAN, 30.0, 30.0), "parts that tie"),
            case(9000, |x, _| x.fill(-0.0), "all equal"),
            case(5000, |x, _| x.iter_mut().for_each(|x| *x *= 0.0), "zeros of both signs"),
        ]
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let bench = |rows: usize| {
            let width: usize = 151_936;
            let parts = rows * width.div_ceil(PART as usize);
            let zeros = |len| Fill::Zeros(Scalar::U32, len);
            let x = Fill::Noise(scalar, rows * width);
            let buffers = vec![x, zeros(rows), zeros(2 * parts), zeros(rows)];
            let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
            let label = format!("{rows} x {width}");
            crate::trial::memory(argmax(scalar), &label, numbers, buffers, 0)
        };
        vec![bench(1), bench(64)]
    }
    every_float(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
