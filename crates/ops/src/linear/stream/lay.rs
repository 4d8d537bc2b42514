//! Activations as warpgroups multiply them: in f16, each row times a power of two that its largest
//! element decides, in the order of the lanes' runs.

use crate::linear::{Norm, holds};
use crate::packed::RAISED;
use crate::sweep::{RowThreads, begin, lanes_of_both, load, require_vectors, when};
use tile::case::{Buffer, Case, Expected, Spec, noise};
use tile::dsl::*;
use tile::launch::{Numbers, Requirement};

/// Terms that a product of the matrix unit adds.
const TERMS: u32 = 16;
/// Neighbouring columns that lie as pairs in two places.
const FOUR: u32 = 4;
/// The power of two that a row's largest element comes to, at most: sums of the matrix unit have room
/// for more.
const MOST: u32 = 14;

/// Where column `at` of a row stands for matrices whose lanes have runs of `run` weights: among
/// those of four runs in a row, sixteen at a time are four of each run, of which lane `t` has the
/// first and the third at `2 t`, the second and the fourth at `2 t + 8`, as
/// [`WordRun::halves`](crate::packed::WordRun::halves) makes pairs of weights.
pub fn by_lanes(at: usize, run: usize) -> usize {
    let four = 4 * run;
    let (lane, within) = (at % four / run, at % run);
    at / four * four + within / 4 * 16 + within % 2 * 8 + 2 * lane + within % 4 / 2
}

/// `y[r, by_lanes(c, run)] = n[r, c] / 2^e[r]` in f16, `factors[r] = 2^(e[r] - RAISED)`: rows of
/// `width` columns, a multiple of four runs. `n` is `x`, or `rms_norm(x)` with the f32 weight `norm`
/// if there is one. `2^e` is such that the row's largest element comes to 2^14 or up to twice that.
#[kernel]
pub fn lay_rows(
    x: In<{ from }>,
    y: Out<{ Scalar::F16 }>,
    factors: Out<f32>,
    width: Const<u32>,
    run: u32,
    from: Scalar,
    norm: bool,
) {
    let team = RowThreads::Group;
    team.launch(256);
    let size = dim("rows") * dim("width");
    require_vectors(&[("x", size.clone()), ("y", size), ("factors", dim("rows"))]);
    require(Requirement::Divisible(dim("width"), 4 * run));
    let norm = norm.then(Norm::declare);
    if norm.is_some() {
        holds("norm", dim("width"));
    }
    begin();
    let (row, first) = (group_id(), group_id() * width);
    let (most, squares) = (Var::new(0f32.val()), Var::new(0f32.val()));
    team.sweep(width, lanes_of_both(from, Scalar::F32), |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(x, first + i, lanes)).collect();
        for (&i, loaded) in at.iter().zip(loaded) {
            see(norm, i, loaded, most, squares);
        }
    });
    let laying = Laying { row, width, run, norm, y, factors };
    laying.lay(most, squares, |i, lanes| load(x, first + i, lanes));
}

/// Takes elements of a row from column `i` on into its largest one, times the weight of its norm,
/// and into the sum of its squares, if there is a norm.
#[track_caller]
pub(super) fn see(
    norm: Option<Norm>,
    i: Val<u32>,
    elements: Vec<Val<f32>>,
    most: Var<f32>,
    squares: Var<f32>,
) {
    let lanes = elements.len() as u8;
    let weights = norm.map_or(vec![], |norm| load(norm.weight, i, lanes));
    for (k, v) in elements.into_iter().enumerate() {
        let v = weights.get(k).map_or(v, |weight| {
            squares.set(v.fma(v, squares.get()));
            v * *weight
        });
        most.set(most.get().max(v.abs()));
    }
}

/// Where a threadgroup lays a row.
pub(super) struct Laying {
    pub(super) row: Val<u32>,
    pub(super) width: Val<u32>,
    pub(super) run: u32,
    pub(super) norm: Option<Norm>,
    pub(super) y: Out,
    pub(super) factors: Out,
}

impl Laying {
    /// Lays the row of which all threads have seen what [`see`] has found; `x(column, lanes)` reads
    /// it again, each thread what it has seen itself.
    #[track_caller]
    pub(super) fn lay(
        &self,
        most: Var<f32>,
        squares: Var<f32>,
        x: impl Fn(Val<u32>, u8) -> Vec<Val<f32>>,
    ) {
        let &Laying { row, width, run, norm, y, factors } = self;
        let root = |norm: Norm| (group_sum(squares.get()) / width.f32() + norm.eps).rsqrt();
        let scale = norm.map(root);
        let most = group_max(most.get());
        let most = scale.map_or(most, |scale| most * scale);
        // Its power of two, and one over that, by their exponents; of zeros and of rows that are
        // next to nothing the least.
        let exponent = (most.bits::<u32>() >> 23u32).max(32u32);
        let power = |exponent: Val<u32>| (exponent << 23u32).bits::<f32>();
        let by = power(254u32 + MOST - exponent);
        when(Order::eq(thread_id(), 0u32), || {
            factors.set(row, power(exponent - (MOST + RAISED)));
        });
        RowThreads::Group.sweep(width, FOUR as u8, |at, lanes| {
            let read = |&at: &Val<u32>| {
                let weights = norm.map_or(vec![], |norm| load(norm.weight, at, lanes));
                (x(at, lanes), weights)
            };
            let loaded: Vec<_> = at.iter().map(read).collect();
            for (&at, (elements, weights)) in at.iter().zip(loaded) {
                let scaled = |(k, v): (usize, Val<f32>)| {
                    let normed = scale.zip(weights.get(k));
                    normed.map_or(v, |(scale, weight)| v * scale * *weight) * by
                };
                let values: Vec<Val<f32>> = elements.into_iter().enumerate().map(scaled).collect();
                let (fours, place) = (at / (4 * run), at % (4 * run));
                let (lane, chunk) = (place / run, place % run / FOUR);
                let to = row * width + (fours * (4 * run) + chunk * TERMS + lane * 2u32);
                match values[..] {
                    // Two pairs.
                    [a, b, c, d] => {
                        y.set_vec(to, &[a, c]);
                        y.set_vec(to + TERMS / 2, &[b, d]);
                    }
                    // Never so, since rows are whole runs.
                    _ => {
                        let own = place % FOUR;
                        y.set(to + own % 2u32 * (TERMS / 2) + own / 2u32, values[0]);
                    }
                }
            }
        });
    }
}

/// As [`lay_rows`], on the host: rows in their order and type, and factors.
pub(super) fn laid(x: &[f32], width: usize, run: usize) -> [Buffer; 2] {
    let (mut laid, mut factors) = (vec![0.0; x.len()], vec![]);
    for (r, row) in x.chunks(width).enumerate() {
        let most = row.iter().fold(0f32, |most, x| most.max(x.abs()));
        let exponent = (most.to_bits() >> 23).max(32) as i32 - 127;
        let power = |exponent: i32| 2f32.powi(exponent);
        factors.push(power(exponent - (MOST + RAISED) as i32));
        for (c, x) in row.iter().enumerate() {
            laid[r * width + by_lanes(c, run)] = x * power(MOST as i32 - exponent);
        }
    }
    [Buffer::floats(Scalar::F16, &laid), Buffer::floats(Scalar::F32, &factors)]
}

/// Launches to test.
pub(super) const KERNEL: Spec = Spec { name: "lay_rows", cases, benches: Vec::new };

fn cases() -> Vec<Case> {
    use Scalar::{BF16, F16, F32};
    let all = [
        (32, F32, 3, 384, 1.0),
        (16, BF16, 5, 128, 1e-9),
        (64, F16, 1, 256, 0.0),
        (32, BF16, 2, 256, 3e6),
    ];
    all.into_iter()
        .map(|(run, from, rows, width, size)| {
            let numbers: Vec<f32> = noise(7, rows * width).iter().map(|x| x * size).collect();
            let x = Buffer::floats(from, &numbers);
            let [want, factors] = laid(&x.to_f32(), width, run);
            let (rows, columns) = (rows as u32, width as u32);
            Case {
                kernel: lay_rows(run as u32, from, false).record(),
                label: format!("{rows} x {width}, runs of {run}, {from}, times {size}"),
                numbers: Numbers::new().with("rows", rows).with("width", columns),
                expected: vec![
                    (1, Expected::Near(want.to_f64(), 0.0)),
                    (2, Expected::Near(factors.to_f64(), 0.0)),
                ],
                buffers: vec![
                    x,
                    Buffer::zeros(Scalar::F16, want.len()),
                    Buffer::zeros(Scalar::F32, factors.len()),
                ],
            }
        })
        .chain([normed(32, BF16), normed(16, F32)])
        .collect()
}

/// With a norm in front.
fn normed(run: usize, from: Scalar) -> Case {
    let (rows, width, eps) = (3, 8 * run, 1e-5f32);
    let x = Buffer::floats(from, &noise(7, rows * width));
    let weight = noise(8, width);
    let mut values = x.to_f32();
    for row in values.chunks_mut(width) {
        let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let scale = 1.0 / (squares / width as f64 + f64::from(eps)).sqrt();
        row.iter_mut().zip(&weight).for_each(|(x, w)| *x *= scale as f32 * w);
    }
    let [want, factors] = laid(&values, width, run);
    let numbers = Numbers::new().with("rows", rows as u32).with("width", width as u32);
    Case {
        kernel: lay_rows(run as u32, from, true).record(),
        label: format!("{rows} x {width}, runs of {run}, {from}, normed"),
        numbers: numbers.with_f32("eps", eps),
        expected: vec![
            (1, Expected::Near(want.to_f64(), 1e-3)),
            (2, Expected::Near(factors.to_f64(), 0.0)),
        ],
        buffers: vec![
            x,
            Buffer::zeros(Scalar::F16, want.len()),
            Buffer::zeros(Scalar::F32, factors.len()),
            Buffer::floats(Scalar::F32, &weight),
        ],
    }
}
