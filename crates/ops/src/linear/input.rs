//! The activations of a matrix-vector kernel: read once per group into shared memory, as they are
//! or as bytes.
//!
//! With a norm in front (Zhang & Sennrich 2019) its weight multiplies the activations as they are
//! read, every group sums their squares, and `1 / sqrt(mean + eps)`, which is the same for a whole
//! row, multiplies the finished sums.
//!
//! As bytes, 32 neighbours share a scale: `x ~ s q`, `s = max |x| / 127`, `q` the integer nearest
//! to `x / s`; [`bytes`] is the reference. Then `sum_i w_i x_i = s (a sum c_i q_i + m sum q_i)`
//! where `w = a c + m`: four products an instruction. Both sums are whole numbers, and so are `a`
//! and `m` up to a factor where a block's scales are bytes: floats are few.
//!
//! A run of activations is spread over planes 16 bytes wide, so that neighbouring lanes read
//! neighbouring 16 bytes: no two of them meet in a bank.

use super::gemv::pick;
use crate::packed::{Format, Scaled, Supers, WordRun};
use tile::dsl::*;
use tile::ir::LoadHint;

/// How a group keeps its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationStorage {
    /// Reads them from memory each time.
    Direct,
    /// Keeps a copy of up to this many columns.
    Staged(u32),
    /// Keeps them as bytes, up to this many columns. Quantised matrices only.
    Bytes(u32),
}

/// Bytes of shared memory that every target has.
pub(crate) const LIMIT: u64 = 32 * 1024;

impl ActivationStorage {
    /// Picks for rows of a type with `bytes` bytes: kept as bytes if `int8`, as copies if they fit.
    pub fn pick(cols: u32, rows: u32, bytes: u32, int8: bool) -> ActivationStorage {
        ActivationStorage::within(LIMIT, cols, rows, bytes, int8)
    }

    /// How the activations of up to `most` rows, a power of two, are kept in `shared` bytes of
    /// shared memory, and how many rows at a time: in the best way in which one row fits, and as
    /// many rows as fit that way.
    pub fn together(
        limit: u64,
        cols: u32,
        most: u32,
        bytes: u32,
        int8: bool,
    ) -> (u32, ActivationStorage) {
        let fewer = || std::iter::successors(Some(most.max(1)), |n| (*n > 1).then_some(*n / 2));
        let kept = |rows| (rows, ActivationStorage::within(limit, cols, rows, bytes, int8));
        let best = std::mem::discriminant(&kept(1).1);
        let same = |found: &(u32, ActivationStorage)| std::mem::discriminant(&found.1) == best;
        fewer().map(kept).find(same).unwrap_or((most, ActivationStorage::Direct))
    }

    fn within(limit: u64, cols: u32, rows: u32, bytes: u32, int8: bool) -> ActivationStorage {
        // Few capacities serve all widths: a capacity is a variant of the kernel.
        let capacity = u64::from(cols).next_multiple_of(if cols > 2048 { 2048 } else { 256 });
        // The sums of a norm take some too.
        let fits = |per_row: u64| u64::from(rows) * per_row + 512 <= limit;
        if int8 && fits(capacity + capacity / 32 * 4 + capacity / 16 * 4) {
            ActivationStorage::Bytes(capacity as u32)
        } else if fits(capacity * u64::from(bytes)) {
            ActivationStorage::Staged(capacity as u32)
        } else {
            ActivationStorage::Direct
        }
    }

    /// The columns that fit; none is any number.
    pub fn capacity(self) -> Option<u32> {
        match self {
            ActivationStorage::Direct => None,
            ActivationStorage::Staged(capacity) | ActivationStorage::Bytes(capacity) => {
                Some(capacity)
            }
        }
    }

    /// For a label.
    pub(crate) fn name(self) -> String {
        match self {
            ActivationStorage::Direct => "direct".to_owned(),
            ActivationStorage::Staged(capacity) => format!("staged{capacity}"),
            ActivationStorage::Bytes(capacity) => format!("bytes{capacity}"),
        }
    }
}

/// Adding it rounds a number of at most 2^22 to the nearest integer, ties to even.
const NEAREST: f32 = 12_582_912.0;
/// A byte's share of the largest activation.
const PER_STEP: f32 = 1.0 / 127.0;
/// Activations that are all smaller than this count as zeros: the inverse of their scale may not
/// exist.
const TINY: f32 = 1e-30;
/// Reads of 16 bytes of a thread that are under way together while activations are staged, of which
/// 512 threads have fewer, since two groups of them leave each 64 registers.
fn most_rounds() -> u32 {
    if threads() < 512 { 8 } else { 2 }
}

/// Activations as the kernels that keep bytes see them: the reference of
/// [`ActivationStorage::Bytes`].
pub fn bytes(x: &[f32]) -> Vec<f32> {
    let mut seen = Vec::with_capacity(x.len());
    for x in x.chunks(32) {
        let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let inverse = if max > TINY { 127.0 / max } else { 0.0 };
        seen.extend(x.iter().map(|x| (x.mul_add(inverse, NEAREST) - NEAREST) * (max * PER_STEP)));
    }
    seen
}

/// The activation rows of a kernel.
pub(crate) struct Input {
    x: In,
    /// How many rows.
    pub(crate) rows: u32,
    /// Columns.
    pub(crate) width: Val<u32>,
    norm: Option<Norm>,
    activations: ActivationStorage,
    /// The formats of the matrices: the first decides the planes.
    formats: Vec<Format>,
    store: Store,
    /// The row of `x` that counts as the first.
    first: Option<Val<u32>>,
    /// The factor on the sums of each row.
    scales: Vec<Val<f32>>,
    /// The norm's weights of this thread, if few enough to be read ahead.
    weights: Vec<Vec<Val<f32>>>,
    /// Where normed rows are left.
    left: Option<Out>,
}

/// The norm in front.
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    /// `[width]`.
    pub(crate) weight: In,
    /// Added to the mean square.
    pub(crate) eps: Val<f32>,
}

impl Norm {
    /// Declares the buffer `norm` and the constant `eps`.
    #[track_caller]
    pub(crate) fn declare() -> Norm {
        Norm { weight: In::declare("norm"), eps: Const::declare("eps") }
    }
}

enum Store {
    None,
    Copy { cells: Shared, planes: Planes },
    Bytes { quads: Shared<u32>, planes: Planes, scales: Shared, sums: Shared<i32>, per_sum: u32 },
}

/// How units of 16 bytes (fewer where a run has fewer) are spread.
#[derive(Clone, Copy)]
struct Planes {
    /// Elements of a unit.
    unit: u32,
    /// How many planes: units of a run.
    count: u32,
    /// Units of a plane.
    slots: u32,
    /// Units of a row.
    row: u32,
}

impl Planes {
    fn new(unit: u32, run: u32, capacity: u32) -> Planes {
        let count = (run / unit).max(1);
        let slots = capacity.div_ceil(unit * count);
        Planes { unit, count, slots, row: slots * count }
    }

    /// Where a unit of a row is, in units.
    #[track_caller]
    fn place(self, row: u32, unit: Val<u32>) -> Val<u32> {
        let base = row * self.row;
        if self.count == 1 {
            return unit + base;
        }
        unit % self.count * self.slots + unit / self.count + base
    }

    /// Where units `0..count` of a run are.
    #[track_caller]
    fn places(self, row: u32, run: Val<u32>, count: u32) -> Vec<Val<u32>> {
        let unit = |k: u32| {
            if count == self.count {
                return run + (row * self.row + k * self.slots);
            }
            self.place(row, run * count + k)
        };
        (0..count).map(unit).collect()
    }
}

/// Neighbouring activations in one thread's registers.
struct Unit {
    /// Which unit of the row.
    at: Val<u32>,
    /// Whether there is such a unit; if not, this is the last.
    inside: Val<bool>,
    x: Vec<Val<Raw>>,
    /// The norm's weight.
    weight: Option<Vec<Val<f32>>>,
}

impl Unit {
    /// Times the norm's weight; `squares` grows by the squares without it.
    #[track_caller]
    fn values(&self, squares: Var<f32>) -> Vec<Val<f32>> {
        let x: Vec<Val<f32>> = self.x.iter().map(|x| x.f32()).collect();
        let Some(weight) = &self.weight else { return x };
        let sum = x[1..].iter().fold(x[0] * x[0], |sum, x| x.fma(*x, sum));
        squares.set(squares.get() + select(self.inside, sum, 0.0));
        x.into_iter().zip(weight).map(|(x, w)| x * *w).collect()
    }
}

impl Input {
    /// Declares the shared memory. `x` is `[rows, width]`; `formats` are the matrices' formats.
    pub(crate) fn new(
        x: In,
        rows: u32,
        width: Val<u32>,
        norm: Option<Norm>,
        activations: ActivationStorage,
        formats: &[Format],
    ) -> Self {
        let run = formats.iter().map(|f| f.run()).min().unwrap_or(1);
        let first = formats.first().map_or(1, |f| f.run());
        let store = match activations {
            ActivationStorage::Direct => Store::None,
            ActivationStorage::Staged(capacity) => {
                let unit = run.min(16 / x.scalar().bytes() as u32);
                let planes = Planes::new(unit, first, capacity);
                let size = rows * planes.row * unit;
                let cells = Shared::stored(x.scalar(), "activations", size);
                Store::Copy { cells, planes }
            }
            ActivationStorage::Bytes(capacity) => {
                let planes = Planes::new(16, first, capacity);
                let parts = formats.iter().filter_map(|f| f.packing()).map(|p| p.sub);
                let per_sum = parts.min().unwrap_or(32).min(run).clamp(16, 32);
                Store::Bytes {
                    quads: Shared::named("quads", rows * planes.row * 4),
                    planes,
                    scales: Shared::named("scales", rows * capacity / 32),
                    sums: Shared::named("sums", rows * capacity / per_sum),
                    per_sum,
                }
            }
        };
        let formats = formats.to_vec();
        let (scales, weights, first, left) = (vec![], vec![], None, None);
        Input { x, rows, width, norm, activations, formats, store, first, scales, weights, left }
    }

    /// With the rows of `x` from one on.
    pub(crate) fn starting_at(self, first: Val<u32>) -> Self {
        Input { first: Some(first), ..self }
    }

    /// Writes the normed rows to `to`, in the layout of `x`; each group writes a share of them.
    pub(crate) fn leaving(self, to: Out) -> Self {
        Input { left: Some(to), ..self }
    }

    /// Elements that a thread stages together; 0 if nothing is staged.
    fn unit_staged(&self) -> u32 {
        match &self.store {
            Store::None => 0,
            Store::Copy { planes, .. } => planes.unit,
            // Neighbouring lanes read neighbouring 16 bytes.
            Store::Bytes { .. } => self.lanes(),
        }
    }

    /// How often a thread stages a unit, at most.
    fn rounds(&self, unit: u32) -> u32 {
        self.activations.capacity().unwrap_or(0).div_ceil(unit * threads())
    }

    /// Which unit of a row a thread stages in a round, and the column of the last unit at most.
    #[track_caller]
    fn unit_at(&self, unit: u32, round: Val<u32>) -> (Val<u32>, Val<u32>) {
        let at = round * threads() + thread_id();
        (at, at.min(self.width / unit - 1u32) * unit)
    }

    /// Reads what does not depend on the previous kernel: the norm's weights.
    #[track_caller]
    pub(crate) fn prefetch(&mut self) {
        let (Some(norm), unit @ 1..) = (self.norm, self.unit_staged()) else { return };
        let rounds = self.rounds(unit);
        if rounds * unit <= 32 {
            let read = |round: u32| {
                let (_, column) = self.unit_at(unit, round.val());
                wide(norm.weight, column, unit, LoadHint::None)
            };
            self.weights = (0..rounds).map(read).collect();
        }
    }

    /// Fills shared memory. All threads of the group take part; the previous kernel has been waited
    /// for.
    #[track_caller]
    pub(crate) fn stage(&mut self) {
        for row in 0..self.rows {
            let squares = Var::new(0.0);
            match self.store {
                Store::None => self.square(row, squares),
                Store::Copy { cells, planes } => self.copy(row, cells, planes, squares),
                Store::Bytes { quads, planes, scales, sums, per_sum } => {
                    self.quantise(row, quads, planes, (scales, sums, per_sum), squares);
                }
            }
            if let Some(norm) = self.norm {
                let mean = group_sum(squares.get()) / self.width.f32();
                self.scales.push((mean + norm.eps).rsqrt());
            }
        }
        if self.activations != ActivationStorage::Direct {
            barrier();
        }
        if let Some(to) = self.left {
            self.leave(to);
        }
    }

    /// Writes this group's share of the normed rows.
    #[track_caller]
    fn leave(&self, to: Out) {
        let (unit, own) = (self.unit(), group_id() * threads() + thread_id());
        for row in 0..self.rows {
            let start = self.first.map_or(row.val(), |first| first + row) * self.width;
            range(own, self.width / unit).step(groups(0) * threads()).each(|i| {
                let values = self.values(row, i * unit, unit).into_iter();
                let scaled: Vec<Val<f32>> = values.map(|v| self.scaled(row, v)).collect();
                to.set_vec(start + i * unit, &scaled);
            });
        }
    }

    /// A finished sum of a row.
    #[track_caller]
    pub(crate) fn scaled(&self, row: u32, sum: Val<f32>) -> Val<f32> {
        self.scales.get(row as usize).map_or(sum, |scale| sum * *scale)
    }

    /// As [`Input::scaled`], of a row that is known when the kernel runs.
    #[track_caller]
    pub(super) fn scaled_of(&self, row: Val<u32>, sum: Val<f32>) -> Val<f32> {
        match &self.scales[..] {
            [] => sum,
            scales => sum * pick(row, scales),
        }
    }

    /// Elements of 16 bytes.
    fn lanes(&self) -> u32 {
        16 / self.x.scalar().bytes() as u32
    }

    /// The elements from `column` on, as stored.
    #[track_caller]
    fn raw(&self, row: u32, column: Val<u32>, count: u32) -> Vec<Val<Raw>> {
        let start = self.width * row + column;
        let start = self.first.map_or(start, |first| first * self.width + start);
        wide_raw(self.x, start, count, LoadHint::Coherent)
    }

    /// The elements from `column` on, times the norm's weight.
    #[track_caller]
    fn values(&self, row: u32, column: Val<u32>, count: u32) -> Vec<Val<f32>> {
        let x = self.raw(row, column, count).into_iter().map(Val::f32);
        let Some(norm) = self.norm else { return x.collect() };
        x.zip(wide(norm.weight, column, count, LoadHint::None)).map(|(x, w)| x * w).collect()
    }

    /// Only the squares, where nothing is kept.
    #[track_caller]
    fn square(&self, row: u32, squares: Var<f32>) {
        if self.norm.is_none() {
            return;
        }
        let count = self.unit();
        strided(self.width / count).each(|i| {
            let x = self.raw(row, i * count, count).into_iter().map(Val::f32);
            squares.set(x.fold(squares.get(), |sum, x| x.fma(x, sum)));
        });
    }

    /// Elements of a 16-byte read, fewer where rows allow no more.
    fn unit(&self) -> u32 {
        let run = self.formats.iter().map(|f| f.run()).min().unwrap_or(1);
        run.min(self.lanes())
    }

    /// Units of `unit` elements of a row, each dealt with by one thread: read several at a time,
    /// since the latency of this read stands at the beginning of every launch, then handed to
    /// `keep`. All threads take part in each round.
    #[track_caller]
    fn units(&self, row: u32, unit: u32, mut keep: impl FnMut(Unit)) {
        let fetch = |round: Val<u32>, known: Option<&Vec<Val<f32>>>| {
            let (at, column) = self.unit_at(unit, round);
            let x = self.raw(row, column, unit);
            let read = |norm: Norm| wide(norm.weight, column, unit, LoadHint::None);
            let weight = known.cloned().or_else(|| self.norm.map(read));
            Unit { at, inside: at.lt(self.width / unit), x, weight }
        };
        let mut together = |first: Val<u32>, rounds: u32, known: &[Vec<Val<f32>>]| {
            let read = |round: u32| fetch(first + round, known.get(round as usize));
            let fetched: Vec<Unit> = (0..rounds).map(read).collect();
            fetched.into_iter().for_each(&mut keep);
        };
        let rounds = self.rounds(unit);
        let most = most_rounds();
        if rounds <= most {
            together(0u32.val(), rounds, &self.weights);
        } else {
            let batch = most * threads();
            range(0u32, (self.width / unit + (batch - 1)) / batch)
                .each(|i| together(i * most, most, &[]));
        }
    }

    #[track_caller]
    fn copy(&self, row: u32, cells: Shared, planes: Planes, squares: Var<f32>) {
        self.units(row, planes.unit, |unit| {
            let values = match unit.weight {
                None => unit.x.clone(),
                Some(_) => unit.values(squares).iter().map(|v| v.to(cells.scalar())).collect(),
            };
            test(unit.inside)
                .then(|| cells.set_raw_vec(planes.place(row, unit.at) * planes.unit, &values))
                .otherwise(|| {});
        });
    }

    #[track_caller]
    fn quantise(
        &self,
        row: u32,
        quads: Shared<u32>,
        planes: Planes,
        (scales, sums, per_sum): (Shared, Shared<i32>, u32),
        squares: Var<f32>,
    ) {
        let capacity = self.activations.capacity().unwrap_or(0);
        let count = self.unit_staged();
        self.units(row, count, |unit| {
            let values = unit.values(squares);
            let max = values[1..].iter().fold(values[0].abs(), |max, v| max.max(v.abs()));
            // So many neighbouring lanes share a scale.
            let sharing = 32 / count;
            let max = lanes(sharing).fold(max, |max, step| max.max(shuffle_xor(max, step)));
            let inverse = select(max.gt(TINY), 127.0f32.val() / max, 0.0);
            // The low bits of a float near 1.5 * 2^23 are those of its integer part.
            let code = |v: &Val<f32>| v.fma(inverse, NEAREST).bits::<u32>();
            let words: Vec<Val<u32>> =
                values.chunks(4).map(|v| join(&v.iter().map(code).collect::<Vec<_>>())).collect();
            let ones = 0x0101_0101u32.val();
            let sum = words.iter().fold(0i32.val(), |sum, word| word.dot4(ones, sum));
            let sum = lanes(per_sum / count).fold(sum, |sum, step| sum + shuffle_xor(sum, step));
            let scale = max * PER_STEP;
            // The 16 of which these are some.
            let (whole, part) = (unit.at / (16 / count), unit.at % (16 / count));
            test(unit.inside)
                .then(|| {
                    let at = planes.place(row, whole) * 4u32 + part * (count / 4);
                    quads.set_vec(at, &words);
                    test((unit.at % (per_sum / count)).eq(0u32))
                        .then(|| {
                            let at = unit.at / (per_sum / count);
                            sums.set(at + row * capacity / per_sum, sum);
                        })
                        .otherwise(|| {});
                    test((unit.at % sharing).eq(0u32))
                        .then(|| scales.set(unit.at / sharing + row * capacity / 32, scale))
                        .otherwise(|| {});
                })
                .otherwise(|| {});
        });
    }

    /// The activations that meet run `run` of a matrix row.
    #[track_caller]
    pub(crate) fn slice(&self, row: u32, run: Val<u32>, format: Format) -> Slice {
        let count = format.run();
        let numbers = |values: Vec<Val<f32>>| Slice::Numbers(values);
        match self.store {
            Store::None => numbers(self.values(row, run * count, count)),
            Store::Copy { cells, planes } => {
                let unit = planes.unit;
                let places = planes.places(row, run, count / unit);
                let read =
                    |place: Val<u32>| cells.get_raw_vec(place * unit, unit as u8, LoadHint::None);
                numbers(places.into_iter().flat_map(read).map(Val::f32).collect())
            }
            Store::Bytes { quads, planes, scales, sums, per_sum } => {
                let capacity = self.activations.capacity().unwrap_or(0);
                let read = |place: Val<u32>| quads.get_vec(place * 4u32, 4, LoadHint::None);
                let places = planes.places(row, run, count / 16);
                // Of `count` elements from the run's first on, `per` share one of an array: where
                // the first is, and how many.
                let shared = |per: u32| {
                    let first = if count < per { run / (per / count) } else { run * (count / per) };
                    (first + row * capacity / per, (count / per).max(1))
                };
                let ((scale, scale_count), (sum, sum_count)) = (shared(32), shared(per_sum));
                Slice::Bytes {
                    quads: places.into_iter().flat_map(read).collect(),
                    scales: wide(scales, scale, scale_count, LoadHint::None),
                    sums: wide(sums, sum, sum_count, LoadHint::None),
                }
            }
        }
    }
}

/// Activations in registers.
pub(crate) enum Slice {
    /// As they are.
    Numbers(Vec<Val<f32>>),
    /// As bytes, four a word; a scale for each 32, and the sums of bytes.
    Bytes { quads: Vec<Val<u32>>, scales: Vec<Val<f32>>, sums: Vec<Val<i32>> },
}

impl Slice {
    /// `sum` plus the products with a run of a matrix row.
    #[track_caller]
    pub(crate) fn dot(&self, run: &WordRun, sum: Val<f32>) -> Val<f32> {
        match self {
            Slice::Numbers(x) => float_dot(x, run, sum),
            Slice::Bytes { quads, scales, sums } => byte_dot(quads, scales, sums, run, sum),
        }
    }
}

#[track_caller]
fn float_dot(x: &[Val<f32>], run: &WordRun, mut sum: Val<f32>) -> Val<f32> {
    let (codes, part) = (run.codes(), run.part());
    let scaled = run.scaled();
    for (i, (codes, x)) in codes.chunks(part).zip(x.chunks(part)).enumerate() {
        let first = codes[0] * x[0];
        let dot = codes[1..].iter().zip(&x[1..]).fold(first, |sum, (c, x)| c.fma(*x, sum));
        let Some(Scaled { scale, offset, .. }) = scaled.get(i) else {
            sum = sum + dot;
            continue;
        };
        sum = scale.fma(dot, sum);
        if let Some(offset) = offset {
            let total = x[1..].iter().fold(x[0], |sum, x| sum + *x);
            sum = offset.fma(total, sum);
        }
    }
    sum
}

#[track_caller]
fn byte_dot(
    x: &[Val<u32>],
    scales: &[Val<f32>],
    sums: &[Val<i32>],
    run: &WordRun,
    mut sum: Val<f32>,
) -> Val<f32> {
    let (quads, quads_per_part) = (run.quads(), run.part() / 4);
    let parts = quads.len() / quads_per_part;
    let total = |part: usize| {
        let per = sums.len() / parts;
        let own = &sums[part * per..(part + 1) * per];
        own[1..].iter().fold(own[0], |sum, x| sum + *x)
    };
    // The bytes are codes less the format's bias, not less its zero.
    let shift = run.bias() - run.zero();
    let dot = |part: usize| {
        let own = part * quads_per_part..(part + 1) * quads_per_part;
        let pairs = quads[own.clone()].iter().zip(&x[own]);
        let dot = pairs.fold(0i32.val(), |sum, (w, x)| w.dot4(*x, sum));
        if shift == 0 { dot } else { dot + total(part) * shift }
    };
    // Parts that share a scale of activations: one, or two of sixteen elements.
    let (supers, scaled) = (run.supers(), run.scaled());
    let shared = parts / scales.len();
    for (i, scale) in scales.iter().enumerate() {
        let own = i * shared..(i + 1) * shared;
        match &supers {
            Some(Supers { d, min, bytes }) => {
                let whole = own.clone().fold(0i32.val(), |sum, p| sum + bytes[p].0 * dot(p));
                let mut product = *d * whole.f32();
                if let Some(min) = min {
                    let add = |sum, p: usize| match bytes[p].1 {
                        Some(byte) => sum + byte * total(p),
                        None => sum,
                    };
                    let whole = own.fold(0i32.val(), add);
                    product = (-*min).fma(whole.f32(), product);
                }
                sum = scale.fma(product, sum);
            }
            None => {
                for part in own {
                    let Scaled { scale: a, offset, .. } = scaled[part];
                    let product = a * dot(part).f32();
                    let product = match offset {
                        Some(offset) => offset.fma(total(part).f32(), product),
                        None => product,
                    };
                    sum = scale.fma(product, sum);
                }
            }
        }
    }
    sum
}

/// The steps by which `count` neighbouring lanes, a power of two, are summed up.
fn lanes(count: u32) -> impl Iterator<Item = u8> {
    (0..count.ilog2()).map(|i| 1 << i)
}

/// The low bytes of four words as one, the first lowest.
#[track_caller]
fn join(words: &[Val<u32>]) -> Val<u32> {
    let low = (words[0] & 255u32) | ((words[1] & 255u32) << 8u32);
    low | ((words[2] & 255u32) << 16u32) | (words[3] << 24u32)
}

/// Consecutive elements in 16-byte reads.
#[track_caller]
fn wide<T: Number>(
    from: impl Elements<T>,
    start: Val<u32>,
    count: u32,
    hint: LoadHint,
) -> Vec<Val<T>> {
    wide_raw(from, start, count, hint).into_iter().map(Val::cast).collect()
}

/// As [`wide`], elements as they are stored.
#[track_caller]
fn wide_raw<T: Number>(
    from: impl Elements<T>,
    start: Val<u32>,
    count: u32,
    hint: LoadHint,
) -> Vec<Val<Raw>> {
    let lanes = (16 / from.scalar().bytes() as u32).min(count);
    let read = |i: u32| from.get_raw_vec(start + i * lanes, lanes as u8, hint);
    (0..count / lanes).flat_map(read).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_are_within_half_a_step() {
        let x = tile::case::noise(3, 320);
        for (x, seen) in x.chunks(32).zip(super::bytes(&x).chunks(32)) {
            let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            for (x, seen) in x.iter().zip(seen) {
                assert!((x - seen).abs() <= max / 254.0 * 1.0001, "{x} became {seen}");
            }
        }
        assert_eq!(super::bytes(&[0.0; 32]), [0.0; 32]);
        assert_eq!(super::bytes(&[1e-35; 32]), [0.0; 32]);
    }
}
