//! Softmax of scaled rows: `y = exp(scale x - m) / sum(exp(scale x - m))`, `m` the row's largest.
//!
//! The maximum and the sum come from one pass (Milakov & Gimelshein 2018): a thread that finds a
//! larger element rescales the sum it has. The second pass reads the row again and writes it; of a
//! long row, the first elements stay in shared memory meanwhile, and the second pass begins with
//! the last ones, which the cache may still have.

use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::ir::LoadHint;
use tile::launch::Numbers;

use crate::sweep::{RowThreads, begin, lanes, require_vectors};
use crate::trial::{every_float, memory, near, rows_of, scaled};

/// `ln(sum(exp(logits)))`, in f64 and shifted by the greatest so that nothing overflows: by it
/// logits become log-probabilities.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let greatest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - greatest).exp()).sum();
    greatest + sum.ln()
}

/// The softmax of every row of `width` elements of `x`, in f64.
pub fn reference(x: &[f32], width: usize, scale: f32, y: &mut [f32]) {
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x) * f64::from(scale)).collect();
        let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = x.iter().map(|x| (x - largest).exp()).sum();
        for i in 0..width {
            y[i] = ((x[i] - largest).exp() / sum) as f32;
        }
    }
}

/// The softmax of rows of `width` elements times `scale`, on the device. Elements may be minus
/// infinity, but not a whole row.
#[kernel]
pub fn softmax(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    scale: Arg<f32>,
    scalar: Scalar,
    schedule: SoftmaxSchedule,
) {
    let team = RowThreads::Group;
    team.launch(schedule.threads);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("y", size)]);
    begin();
    // exp(x) = 2^(x log2 e): the targets' exponentials are powers of two, and the scale takes the
    // factor in.
    let scale = scale * std::f32::consts::LOG2_E;
    let first = group_id() * width;
    let lanes = lanes(scalar);
    let kept = (schedule.kept > 0).then(|| Shared::<f32>::stored(scalar, "kept", schedule.kept));
    // Rows that no vector divides are not kept: what is kept are whole vectors.
    let whole = Order::eq(width % u32::from(lanes), 0u32);
    let count = select(whole, width.min(schedule.kept), 0u32);
    let scaled = |values: Vec<Val<Raw>>| -> Vec<Val<f32>> {
        values.into_iter().map(|v| v.f32() * scale).collect()
    };
    let read = |at: &[Val<u32>], lanes: u8| -> Vec<Vec<Val<Raw>>> {
        at.iter().map(|&i| x.get_raw_vec(first + i, lanes, LoadHint::None)).collect()
    };
    // The lowest finite number: from minus infinity the first rescaling would be infinity minus
    // infinity.
    let (largest, sum) = (Var::new(f32::MIN), Var::new(0.0));
    let see = |loaded: Vec<Vec<Val<Raw>>>| {
        let values: Vec<Val<f32>> = loaded.into_iter().flat_map(scaled).collect();
        let before = largest.get();
        let now = values.iter().fold(before, |largest, v| largest.max(*v));
        let kept = sum.get() * (before - now).exp2();
        sum.set(values.iter().fold(kept, |sum, v| sum + (*v - now).exp2()));
        largest.set(now);
    };
    if let Some(kept) = kept {
        team.sweep(count, lanes, |at, lanes| {
            let loaded = read(at, lanes);
            at.iter().zip(&loaded).for_each(|(&i, values)| kept.set_raw_vec(i, values));
            see(loaded);
        });
    }
    team.sweep(width - count, lanes, |at, lanes| {
        let at: Vec<Val<u32>> = at.iter().map(|&i| count + i).collect();
        see(read(&at, lanes));
    });
    let peak = group_max(largest.get());
    let total = group_sum(sum.get() * (largest.get() - peak).exp2());
    let share = 1.0f32 / total;
    let write = |i: Val<u32>, values: Vec<Val<Raw>>| {
        let values: Vec<Val<f32>> = scaled(values);
        let values: Vec<Val<f32>> = values.into_iter().map(|v| (v - peak).exp2() * share).collect();
        y.set_vec(first + i, &values);
    };
    team.sweep(width - count, lanes, |at, lanes| {
        let at: Vec<Val<u32>> = at.iter().map(|&i| count + i).collect();
        let loaded = read(&at, lanes);
        at.into_iter().zip(loaded).for_each(|(i, values)| write(i, values));
    });
    if let Some(kept) = kept {
        team.sweep(count, lanes, |at, lanes| {
            let loaded: Vec<_> =
                at.iter().map(|&i| kept.get_raw_vec(i, lanes, LoadHint::None)).collect();
            at.iter().zip(loaded).for_each(|(&i, values)| write(i, values));
        });
    }
}

/// How a row is worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SoftmaxSchedule {
    /// Threads per row.
    pub threads: u32,
    /// Elements of a row that stay in shared memory between the passes, a multiple of 16.
    pub kept: u32,
}

impl SoftmaxSchedule {
    /// Picks the schedule for rows of `width` elements of `bytes` bytes, on a device with `shared`
    /// bytes of shared memory per group.
    pub fn pick(width: u32, bytes: u32, shared: u32) -> SoftmaxSchedule {
        // Rows of a few thousand elements are in the caches still; rows of tens of thousands, such
        // as logits, are not.
        match width {
            0..=32_768 => SoftmaxSchedule { threads: 256, kept: 0 },
            _ => SoftmaxSchedule {
                threads: 1024,
                kept: shared.saturating_sub(1024) / (16 * bytes) * 16,
            },
        }
    }
}

/// For rows of a few thousand elements.
const NARROW: SoftmaxSchedule = SoftmaxSchedule { threads: 256, kept: 0 };

/// The kernel, its cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[Spec { name: "softmax", cases, benches }];

fn cases() -> Vec<Case> {
    const WIDE: SoftmaxSchedule = SoftmaxSchedule { threads: 1024, kept: 0 };
    const KEPT: SoftmaxSchedule = SoftmaxSchedule { threads: 64, kept: 768 };
    fn of(scalar: Scalar) -> Vec<Case> {
        let case = |rows: usize, width: usize, schedule, mask: bool, why: &str| {
            let mut x = scaled(scalar, width as u64 + 3, rows * width, 40.0).to_f32();
            if mask {
                x.iter_mut().enumerate().for_each(|(i, x)| {
                    // The first row keeps one element, in the last thread's share.
                    if i % width > 0 && (i < width - 1 || i % 3 == 0) {
                        *x = f32::NEG_INFINITY;
                    }
                });
                x[0] = f32::NEG_INFINITY;
            }
            let scale = 0.125;
            let mut y = vec![0.0; rows * width];
            reference(&x, width, scale, &mut y);
            Case {
                kernel: softmax(scalar, schedule).record(),
                label: format!("{rows} x {width} {scalar}, {why}"),
                numbers: Numbers::new()
                    .with("rows", rows as u32)
                    .with("width", width as u32)
                    .with_f32("scale", scale),
                buffers: vec![Buffer::floats(scalar, &x), Buffer::zeros(scalar, rows * width)],
                expected: vec![(1, near(scalar, &y))],
            }
        };
        let mut all = vec![
            case(2, 1, NARROW, false, "one element"),
            case(3, 7, NARROW, false, "less than a vector"),
            case(3, 129, NARROW, false, "a width no vector divides"),
            case(2, 2048, NARROW, true, "masked: minus infinities"),
            case(1, 7176, NARROW, false, "several vectors per thread and a remainder"),
            case(1, 8192, WIDE, false, "a vector per thread of the widest group"),
            case(2, 2048, KEPT, true, "kept in part, masked: minus infinities"),
            case(1, 520, KEPT, false, "kept whole"),
            case(1, 1031, KEPT, false, "a width no vector divides is not kept"),
        ];
        // In f16 such small probabilities are subnormal, with fewer bits than the tolerance asks
        // for.
        if scalar == Scalar::F32 {
            all.push(case(1, 131_072, WIDE, false, "the widest vocabulary"));
        }
        all
    }
    every_float(of)
}

fn benches() -> Vec<Bench> {
    fn of(scalar: Scalar) -> Vec<Bench> {
        let bench = |rows: usize, width: usize| {
            let n = rows * width;
            let buffers = vec![Fill::Noise(scalar, n), Fill::Zeros(scalar, n)];
            let numbers = Numbers::new()
                .with("rows", rows as u32)
                .with("width", width as u32)
                .with_f32("scale", 1.0);
            // An H200's shared memory.
            let schedule = SoftmaxSchedule::pick(width as u32, scalar.bytes() as u32, 227 << 10);
            let kernel = softmax(scalar, schedule);
            memory(kernel, &format!("{rows} x {width}"), numbers, buffers, 10 * n as u64)
        };
        vec![bench(rows_of(scalar, 4096), 4096), bench(256, 131_072)]
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
