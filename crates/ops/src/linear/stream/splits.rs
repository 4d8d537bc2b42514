//! Sums of which several threadgroups have computed parts.

use super::lay::{Laying, laid, see};
use super::results::{End, Results, Total};
use crate::linear::{Norm, holds};
use crate::low_rank::kernels::{Low, Sites};
use crate::rms_norm;
use crate::sweep::{Row, RowThreads, begin, lanes_of_both, load, require_vectors, when};
use tile::case::{Buffer, Case, Expected, Spec, noise, tolerance};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

/// Threads of a group, of a row's columns one each.
const THREADS: u32 = 256;

/// `yJ[r, o] = sum_s partJ[s, r, o] + biasJ[o]`, parts of [`stream_warpgroups`] in their order, for
/// each result, of which `biases` says whether it has a bias. [`End::Add`] adds
/// `residual[rows, out0]`; with `low`, what adapters add is added to each sum. `y` is the type of
/// results, `width` the columns of all.
///
/// [`stream_warpgroups`]: super::stream_warpgroups
#[kernel]
pub fn add_splits(
    rows: Arg<u32>,
    width: Const<u32>,
    y: Scalar,
    biases: &[bool],
    end: End,
    splits: u32,
    low: Option<Low>,
) {
    assert!(!matches!(end, End::Gate(_)), "sums of pairs are not split");
    launch(Mode::Row, [dim("width").ceil_div(THREADS), dim("rows"), fixed(1)], THREADS);
    let residual = matches!(end, End::Add).then(|| <In>::stored("residual", y));
    if residual.is_some() {
        holds("residual", dim("out0") * dim("rows"));
    }
    let (parts, results) = declare(y, biases, splits, low);
    begin();
    let (row, column) = (group_id_of(1), group_id() * THREADS + thread_id());
    let starts = results.outs.iter().scan(0u32.val(), |end, columns| {
        let next = *end + *columns;
        Some(std::mem::replace(end, next))
    });
    for (sweep, (part, start)) in parts.into_iter().zip(starts).enumerate() {
        // What lies before the first wraps around.
        let (output, columns) = (column - start, results.outs[sweep]);
        when(Order::lt(output, columns) & Order::lt(column, width), || {
            let read = |split| part.get((rows * split + row) * columns + output);
            let parts: Vec<Val<f32>> = (0..splits).map(read).collect();
            let sums = parts.into_iter().reduce(|sum, part| sum + part).into_iter().collect();
            results.finish(end, residual, None, Total { sweep, output, row, sums });
        });
    }
}

/// Declares parts, results and biases.
#[track_caller]
fn declare(y: Scalar, biases: &[bool], splits: u32, low: Option<Low>) -> (Vec<In>, Results) {
    let mut results = Results::default();
    let (mut parts, mut sites) = (Vec::new(), Vec::new());
    for (j, &bias) in biases.iter().enumerate() {
        let (out, part) = (format!("out{j}"), format!("part{j}"));
        sites.push((results.declare(j, y, 1), dim(&out)));
        holds(&part, dim(&out) * dim("rows") * splits);
        parts.push(<In>::declare(&part));
        results.declare_bias(j, bias, &out);
    }
    results.sites = low.map(|low| Sites::declare(low, &sites, dim("rows"), 0));
    (parts, results)
}

/// As [`add_splits`] of one result without a bias, `sum[r, o] = residual[r, o] + sum_s part[s, r, o]`,
/// and of `rms_norm(sum)`, with the f32 weight `norm`, what [`lay_rows`](super::lay_rows) makes.
#[kernel]
pub fn add_splits_laid(
    residual: In<{ scalar }>,
    part: In<f32>,
    sum: Out<{ scalar }>,
    y: Out<{ Scalar::F16 }>,
    factors: Out<f32>,
    rows: Arg<u32>,
    width: Const<u32>,
    splits: u32,
    scalar: Scalar,
    run: u32,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = || dim("rows") * dim("width");
    require_vectors(&[("residual", size()), ("sum", size()), ("y", size())]);
    require_vectors(&[("part", size() * splits), ("norm", dim("width")), ("factors", dim("rows"))]);
    require(Requirement::Divisible(dim("width"), 4 * run));
    let norm = Norm::declare();
    begin();
    let row = Row::of_group(width);
    let (most, squares) = (Var::new(0f32.val()), Var::new(0f32.val()));
    let lanes = lanes_of_both(scalar, Scalar::F32);
    team.sweep(width, lanes, |at, lanes| {
        let read = |&i: &Val<u32>| {
            let parts = (0..splits).map(|split| rows * split + group_id());
            let parts: Vec<_> = parts.map(|r| load(part, r * width + i, lanes)).collect();
            (load(residual, row.first + i, lanes), parts)
        };
        let loaded: Vec<_> = at.iter().map(read).collect();
        for (&i, (residual, parts)) in at.iter().zip(loaded) {
            let sums: Vec<Val<f32>> = added(&residual, &parts);
            let sums: Vec<Val<f32>> = sums.into_iter().map(|v| v.to(scalar).f32()).collect();
            sum.set_vec(row.first + i, &sums);
            see(Some(norm), i, sums, most, squares);
        }
    });
    // Each thread reads back what it wrote itself.
    let laying = Laying { row: group_id(), width, run, norm: Some(norm), y, factors };
    laying.lay(most, squares, |i, lanes| load(sum, row.first + i, lanes));
}

/// The parts of sums, in their order, and the residuals.
#[track_caller]
fn added(residuals: &[Val<f32>], parts: &[Vec<Val<f32>>]) -> Vec<Val<f32>> {
    let all = |(k, residual): (usize, &Val<f32>)| {
        let sum = parts.iter().map(|part| part[k]).reduce(|sum, part| sum + part);
        sum.map_or(*residual, |sum| *residual + sum)
    };
    residuals.iter().enumerate().map(all).collect()
}

/// Launches to test.
pub(super) const KERNELS: [Spec; 2] = [
    Spec { name: "add_splits", cases, benches: Vec::new },
    Spec { name: "add_splits_laid", cases: laid_cases, benches: Vec::new },
];

fn laid_cases() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let all = [(F32, 8, 384, 32), (BF16, 2, 1088, 16), (F16, 3, 256, 64)];
    all.into_iter()
        .map(|(scalar, splits, width, run)| laid_case(scalar, splits, width, run))
        .collect()
}

fn laid_case(scalar: Scalar, splits: u32, width: usize, run: u32) -> Case {
    let (rows, eps) = (3, 1e-5f32);
    let (parts, weight) = (noise(5, splits as usize * rows * width), noise(8, width));
    let residual = Buffer::floats(scalar, &noise(21, rows * width));
    let mut sums = residual.to_f32();
    for (i, sum) in sums.iter_mut().enumerate() {
        let all = parts[i..].iter().step_by(rows * width).copied().reduce(|sum, part| sum + part);
        *sum += all.unwrap_or(0.0);
    }
    let sum = Buffer::floats(scalar, &sums);
    let mut values = vec![0.0; rows * width];
    rms_norm::reference(&sum.to_f32(), &weight, eps, &mut values);
    let [want, factors] = laid(&values, width, run as usize);
    let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
    Case {
        kernel: add_splits_laid(splits, scalar, run).record(),
        label: format!("{splits} parts of {rows} x {width}, {scalar}, runs of {run}"),
        numbers: numbers.with_f32("eps", eps),
        expected: vec![
            (2, Expected::Near(sum.to_f64(), tolerance(scalar))),
            (3, Expected::Near(want.to_f64(), 1e-3)),
            (4, Expected::Near(factors.to_f64(), 0.0)),
        ],
        buffers: vec![
            residual,
            Buffer::floats(Scalar::F32, &parts),
            Buffer::zeros(scalar, rows * width),
            Buffer::zeros(Scalar::F16, want.len()),
            Buffer::zeros(Scalar::F32, factors.len()),
            Buffer::floats(Scalar::F32, &weight),
        ],
    }
}

fn cases() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let all: [(Scalar, End, u32, &[usize]); 4] = [
        (F32, End::Add, 4, &[300]),
        (BF16, End::Add, 3, &[256]),
        (F16, End::Store, 2, &[130, 40, 7]),
        (F32, End::Store, 8, &[5]),
    ];
    all.into_iter().map(|(y, end, splits, outs)| case(y, end, splits, outs)).collect()
}

/// Biases stand beside every other result.
fn case(y: Scalar, end: End, splits: u32, outs: &[usize]) -> Case {
    let rows = 3;
    let (mut buffers, mut expected, mut biases) = (vec![], vec![], vec![]);
    let mut numbers = Numbers::new().with("rows", rows as u32);
    let residual = Buffer::floats(y, &noise(21, rows * outs[0]));
    if end == End::Add {
        buffers.push(residual.clone());
    }
    for (j, &out) in outs.iter().enumerate() {
        numbers.set(&format!("out{j}"), out as u32);
        let size = rows * out;
        let parts = noise(5 + j as u64, splits as usize * size);
        let bias = (j % 2 == 0).then(|| noise(11 + j as u64, out));
        let mut sums = vec![0f64; size];
        for part in parts.chunks(size) {
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += f64::from(*part));
        }
        for row in sums.chunks_mut(out) {
            let biases = bias.iter().flatten();
            row.iter_mut().zip(biases).for_each(|(sum, bias)| *sum += f64::from(*bias));
        }
        if end == End::Add {
            sums.iter_mut().zip(residual.to_f64()).for_each(|(sum, old)| *sum += old);
        }
        expected.push((buffers.len(), Expected::Near(sums, tolerance(y))));
        buffers.push(Buffer::zeros(y, size));
        buffers.push(Buffer::floats(Scalar::F32, &parts));
        biases.push(bias.is_some());
        buffers.extend(bias.map(|bias| Buffer::floats(Scalar::F32, &bias)));
    }
    numbers.set("width", outs.iter().sum::<usize>() as u32);
    Case {
        kernel: add_splits(y, &biases, end, splits, None).record(),
        label: format!("{splits} parts of {rows} x {outs:?}, {y}, {end:?}"),
        numbers,
        buffers,
        expected,
    }
}
