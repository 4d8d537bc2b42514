//! How threads share arrays: vectors of up to 16 bytes, several loads in flight, single elements
//! where vectors do not fit.
//!
//! A flat array is cut into chunks, one per threadgroup (`map`); a row is shared by a
//! [`RowThreads`], strided so that neighbours touch neighbouring vectors (`RowThreads::sweep`).

use std::cell::RefCell;

use tile::dsl::*;
use tile::ir::LoadHint;
use tile::launch::{Extent, Mode, Requirement};

/// Vectors that each thread of a flat kernel loads before it uses the first.
const AHEAD: u32 = 2;
/// Rows of a simdgroup.
const ROWS: u32 = 4;
/// Threads of a group of a flat kernel.
const THREADS: u32 = 256;

/// Starts a kernel: what the one before wrote is there, and the next one may be launched already.
/// In this order, so that what the next does before its own wait finds all that was written before
/// this one.
#[track_caller]
pub(crate) fn begin() {
    grid_wait();
    grid_trigger();
}

/// Runs or records `f` where `cond` holds.
#[track_caller]
pub(crate) fn when(cond: Val<bool>, f: impl FnOnce()) {
    test(cond).then(f).otherwise(|| {});
}

/// Elements of a type in 16 bytes.
pub(crate) fn lanes(scalar: Scalar) -> u8 {
    (16 / scalar.bytes()) as u8
}

/// Elements that are at most 16 bytes in either type.
pub(crate) fn lanes_of_both(a: Scalar, b: Scalar) -> u8 {
    lanes(a).min(lanes(b))
}

/// Elements from `index` on.
#[track_caller]
pub(crate) fn load(x: impl Elements<f32>, index: Val<u32>, lanes: u8) -> Vec<Val<f32>> {
    x.get_vec(index, lanes, LoadHint::None)
}

/// Requires that buffers hold these numbers of elements.
pub(crate) fn require_lengths(lengths: &[(&str, Extent)]) {
    for (name, len) in lengths {
        require(Requirement::Length((*name).to_owned(), len.clone()));
    }
}

/// Requires that each buffer holds this number of elements and is aligned for 16-byte vectors.
pub(crate) fn require_vectors(buffers: &[(&str, Extent)]) {
    for (name, len) in buffers {
        require(Requirement::Length((*name).to_owned(), len.clone()));
        require(Requirement::Aligned((*name).to_owned(), 16));
    }
}

/// Elements that one threadgroup of [`map`] works on.
pub(crate) fn chunk(scalar: Scalar) -> u32 {
    THREADS * u32::from(lanes(scalar)) * AHEAD
}

/// `y[i] = f(x0[i], x1[i], ..)` for all `i` below the argument `n`, the whole body of an
/// element-wise kernel. The buffers' `names` are for the contract.
#[track_caller]
pub(crate) fn map<const N: usize>(
    names: [&str; N],
    inputs: [In; N],
    y: Out,
    n: Val<u32>,
    f: impl Fn([Val<f32>; N]) -> Val<f32>,
) {
    map_with(names, inputs, y, n, || (), |(), x| f(x));
}

/// [`map`] with a function of what each thread `prepare`s once.
#[track_caller]
pub(crate) fn map_with<const N: usize, P: Copy>(
    names: [&str; N],
    inputs: [In; N],
    y: Out,
    n: Val<u32>,
    prepare: impl FnOnce() -> P,
    f: impl Fn(P, [Val<f32>; N]) -> Val<f32>,
) {
    let widest = inputs.iter().map(|x| x.scalar()).chain([y.scalar()]).max_by_key(|s| s.bytes());
    let widest = widest.unwrap_or(y.scalar());
    let chunk = chunk(widest);
    launch(Mode::Element, [dim("n").ceil_div(chunk), fixed(1), fixed(1)], THREADS);
    let mut buffers = names.map(|name| (name, dim("n"))).to_vec();
    buffers.push(("y", dim("n")));
    require_vectors(&buffers);
    begin();
    let prepared = prepare();
    let lanes = lanes(widest);
    let start = group_id() * chunk;
    let whole = || {
        let at: Vec<Val<u32>> = (0..AHEAD)
            .map(|u| start + u * THREADS * u32::from(lanes) + thread_id() * u32::from(lanes))
            .collect();
        let loaded: Vec<[Vec<Val<f32>>; N]> =
            at.iter().map(|&at| inputs.map(|x| load(x, at, lanes))).collect();
        for (&at, x) in at.iter().zip(&loaded) {
            let each = |i: usize| f(prepared, std::array::from_fn(|input| x[input][i]));
            let values: Vec<Val<f32>> = (0..usize::from(lanes)).map(each).collect();
            y.set_vec(at, &values);
        }
    };
    // The last chunk may be ragged: one element at a time.
    let rest = || {
        range(start + thread_id(), n).step(THREADS).each(|i| {
            y.set(i, f(prepared, inputs.map(|x| x.get(i))));
        });
    };
    test(Order::ge(n - start, chunk)).then(whole).otherwise(rest);
}

/// A row of a team.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    /// Its first element.
    pub(crate) first: Val<u32>,
    /// Whether it is not another's; none if that is certain.
    live: Option<Val<bool>>,
}

impl Row {
    /// The row of a threadgroup that has one.
    #[track_caller]
    pub(crate) fn of_group(width: Val<u32>) -> Row {
        Row { first: group_id() * width, live: None }
    }

    /// Records what only the row's owner does.
    #[track_caller]
    pub(crate) fn keep(&self, store: impl FnOnce()) {
        match self.live {
            None => store(),
            Some(live) => test(live).then(store).otherwise(|| {}),
        }
    }
}

/// The threads that work on one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowThreads {
    /// A threadgroup, for rows of thousands of elements.
    Group,
    /// A simdgroup, for rows of a few hundred, such as heads.
    Simd,
}

impl RowThreads {
    /// States the launch for as many rows as the argument `rows` says.
    pub(crate) fn launch(self, threads: u32) {
        let groups = match self {
            RowThreads::Group => dim("rows"),
            RowThreads::Simd => dim("rows").ceil_div(threads / 32 * ROWS),
        };
        launch(Mode::Row, [groups, fixed(1), fixed(1)], threads);
    }

    /// At most `lanes`, and no more than keep every lane of a simdgroup busy on a head of 128.
    pub(crate) fn lanes(self, lanes: u8) -> u8 {
        if self == RowThreads::Simd { lanes.min(4) } else { lanes }
    }

    /// The rows this thread works on. A simdgroup has several, whose loads overlap. Past the last
    /// row they repeat it, so that no thread leaves its group early, and keep nothing.
    #[track_caller]
    pub(crate) fn rows(self, rows: Val<u32>, width: Val<u32>) -> Vec<Row> {
        if self == RowThreads::Group {
            return vec![Row::of_group(width)];
        }
        let simds = threads() / 32;
        let turn = group_id() * (simds * ROWS) + simd_id();
        let of = |k: u32| {
            let row = turn + k * simds;
            Row { first: row.min(rows - 1u32) * width, live: Some(Order::lt(row, rows)) }
        };
        (0..ROWS).map(of).collect()
    }

    /// The sum over the team.
    #[track_caller]
    pub(crate) fn sum(self, value: Val<f32>) -> Val<f32> {
        match self {
            RowThreads::Group => group_sum(value),
            RowThreads::Simd => simd_sum(value),
        }
    }

    /// Calls `body(elements, lanes)` until the team has seen all of `0..width`: vectors of `lanes`
    /// that start at each of `elements`, or single elements for a width that is no multiple of
    /// `lanes`. See [`RowThreads::sweep_if`].
    #[track_caller]
    pub(crate) fn sweep(self, width: Val<u32>, lanes: u8, body: impl FnMut(&[Val<u32>], u8)) {
        self.sweep_if(Order::eq(width % u32::from(lanes), 0u32), width, lanes, body);
    }

    /// As [`RowThreads::sweep`], in vectors where `whole` holds, which includes that `lanes`
    /// divides `width`. The body is recorded several times: with 4, 2 and 1 vectors at once, so
    /// that their loads overlap, and with single elements. Where `width` is constant, only those it
    /// needs remain.
    #[track_caller]
    pub(crate) fn sweep_if(
        self,
        whole: Val<bool>,
        width: Val<u32>,
        lanes: u8,
        body: impl FnMut(&[Val<u32>], u8),
    ) {
        let (member, size) = match self {
            RowThreads::Group => (thread_id(), threads()),
            RowThreads::Simd => (lane_id(), 32),
        };
        let wide = u32::from(lanes);
        let step = size * wide;
        let body = RefCell::new(body);
        let several = |first: Val<u32>, count: u32| {
            let start = first * step + member * wide;
            let at: Vec<Val<u32>> = (0..count).map(|k| start + k * step).collect();
            (body.borrow_mut())(&at, lanes);
        };
        let vectors = || {
            let full = width / step;
            let fours = full / 4u32;
            range(0u32, fours).each(|round| several(round * 4u32, 4));
            let twos = full / 2u32 % 2u32;
            test(Order::gt(twos, 0u32)).then(|| several(fours * 4u32, 2)).otherwise(|| {});
            let done = (fours * 4u32 + twos * 2u32) * step;
            let rest = || {
                range(done + member * wide, width)
                    .step(step)
                    .each(|i| (body.borrow_mut())(&[i], lanes));
            };
            // Said apart from the loop, so that a width without a rest has no loop.
            test(Order::lt(done, width)).then(rest).otherwise(|| {});
        };
        let single = || range(member, width).step(size).each(|i| (body.borrow_mut())(&[i], 1));
        if lanes == 1 {
            single();
        } else {
            test(whole).then(vectors).otherwise(single);
        }
    }
}
