//! The products of a few activation rows with the rows of packed matrices: what the kernels of
//! decoding share.
//!
//! Threadgroups stay for the whole launch. Every simdgroup takes blocks of
//! [`GemvSchedule::outputs`] matrix rows, `groups * simdgroups` apart, and walks each in steps of
//! 32 lanes x [`GemvSchedule::loads`] 16-byte loads. Two steps are under way at a time, across the
//! ends of rows too: as soon as words are summed, their registers take the words of the step after
//! next. The first two steps are issued before the previous kernel is waited for, so that memory is
//! busy while the activations are read, once per group ([`super::input`]).

use super::input::{ActivationStorage, Input, LIMIT, Slice};
use crate::packed::{Format, PackedWeights, WordRun};
use crate::tuned::{self, CardNumbers, SmallGroups};
use std::cmp::Reverse;
use tile::dsl::*;
use tile::launch::{Extent, Mode, Requirement};

/// How a matrix-vector kernel divides its work. Every field is free: all give the same sums in some
/// order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemvSchedule {
    /// Matrix rows that a simdgroup sums together, of each matrix of a pair.
    pub outputs: u32,
    /// 16-byte loads that a lane has under way per matrix row.
    pub loads: u32,
    /// Threads of a group.
    pub threads: u32,
    /// Groups that share a multiprocessor, as their registers allow; [`u32::MAX`]: as many as have
    /// work.
    pub resident: u32,
    /// How the activations are kept.
    pub activations: ActivationStorage,
    /// Whether a row is a whole number of steps, so that no lane is ever without work; the launch
    /// contract then says so.
    pub whole: bool,
}

/// Columns from which on a matrix of few rows is worth a schedule of its own.
const SHORT_COLS: u32 = 1024;

/// The product that a schedule is picked for.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// The formats of the matrices, in the order of the launch.
    pub formats: &'a [Format],
    /// Columns: inputs.
    pub cols: u32,
    /// Rows of all matrices: outputs.
    pub out: u32,
    /// Activation rows.
    pub rows: u32,
    /// Their type.
    pub x: Scalar,
    /// Whether two matrices are read side by side.
    pub pair: bool,
    /// Whether the activations may be multiplied as bytes.
    pub int8: bool,
    /// Multiprocessors (or cores) that it has: fewer than there are, where several products are
    /// computed beside each other.
    pub processors: u32,
    /// The device's numbers.
    pub tuned: &'static CardNumbers,
}

/// The properties by which [`crate::tuned::ForGemv`] decides.
#[derive(Debug, Clone, Copy)]
pub struct Traits {
    /// Whether two matrices are read side by side.
    pub pair: bool,
    /// Whether there are several matrices.
    pub several: bool,
    /// Whether some matrix is packed and activations are multiplied as floats.
    pub exact: bool,
    /// Whether some format has runs of at least 64 weights, and not `exact`.
    pub long: bool,
    /// Whether some format's codes are looked up in a table.
    pub looked_up: bool,
    /// Words of a run of the format with the most.
    pub words: u32,
    /// Weights of a run of the first format.
    pub run: u32,
    /// Columns: inputs.
    pub cols: u32,
    /// Rows of all matrices: outputs.
    pub out: u32,
}

/// The loads that a simdgroup holds at once.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// 16-byte loads that a lane has under way, of all matrix rows.
    pub loads: u32,
    /// Threads of a group.
    pub threads: u32,
    /// Groups that share a multiprocessor, as their registers allow.
    pub resident: u32,
}

impl Held {
    /// The least.
    const LEAST: Held = Held { loads: 1, threads: 256, resident: 1 };
}

impl<'a> Task<'a> {
    /// The task of one row in bf16 on an H200, multiplied as bytes where formats allow it.
    pub fn decode(formats: &'a [Format], cols: u32, out: u32) -> Self {
        let (pair, int8, processors, tuned) = (false, true, 132, &tuned::HOPPER);
        Task { formats, cols, out, rows: 1, x: Scalar::BF16, pair, int8, processors, tuned }
    }

    /// The matrix rows of a simdgroup, loads of a step, threads and groups of a processor where a
    /// long product has one group on every processor, a simdgroup for each matrix row: for numbers
    /// of rows of which smaller groups would leave some processors one and others two.
    fn filled(&self) -> Option<(u32, u32, u32, u32)> {
        let (least, simds) = &self.tuned.gemv.filled;
        let run = self.formats.first()?.run();
        let wanted = self.out.div_ceil(self.processors).next_multiple_of(4);
        if self.cols < *least || !simds.contains(&wanted) {
            return None;
        }
        let tiles = self.cols.div_ceil(32 * run);
        let packed = self.formats.iter().all(|f| f.packing().is_some());
        let loads = match packed {
            // The largest groups' threads have fewer registers.
            true => 3 - u32::from(wanted > 24),
            // Only packed matrices can afford loads past the end of a row.
            false => [4, 3, 2, 1].into_iter().find(|loads| tiles.is_multiple_of(*loads))?,
        };
        Some((1, loads, 32 * wanted, 1))
    }
}

impl GemvSchedule {
    /// Picks what the device's numbers say is fastest.
    pub fn pick(task: &Task) -> GemvSchedule {
        GemvSchedule::picked(task, task.rows == 1)
    }

    /// As [`GemvSchedule::pick`]; `alone` if one row at a time is computed this way: the sums of more
    /// would not fit the registers of the largest groups.
    fn picked(task: &Task, alone: bool) -> GemvSchedule {
        if let Some(small) = &task.tuned.small_groups {
            return GemvSchedule::small(task, small);
        }
        let Task { formats, cols, out, rows, x, pair, int8, tuned, .. } = *task;
        let int8 = int8 && formats.iter().all(|f| f.packing().is_some());
        let exact = !int8 && formats.iter().any(|f| f.packing().is_some());
        let words = formats.iter().map(|f| f.words()).max().unwrap_or(4);
        let (several, long) = (formats.len() > 1, !exact && formats.iter().any(|f| f.run() >= 64));
        let run = formats.first().map_or(1, |f| f.run());
        let looked_up = formats.iter().any(|f| f.packing().is_some_and(|p| p.table.is_some()));
        let traits = Traits { pair, several, exact, long, looked_up, words, run, cols, out };
        let rule = tuned.gemv.held.iter().find(|(meets, _)| meets(&traits));
        let mut held = rule.map_or(Held::LEAST, |(_, held)| *held);
        if rows > 2 {
            held.loads = (held.loads / 2).max(1);
        }
        let tall = out >= tuned.gemv.tall;
        let (outputs, loads) = if several || exact || (tall && !pair) {
            // Activations take as long to read as words: several matrix rows share them.
            let least = match tall && !several && !long {
                true => held.loads.min(4),
                false if pair => 2,
                false => 1,
            };
            GemvSchedule::block_by_steps(task, held.loads, least)
        } else {
            GemvSchedule::block_by_turns(task, held)
        };
        let Held { threads, resident, .. } = held;
        let filled = if several || exact || pair || !alone { None } else { task.filled() };
        let (outputs, loads, threads, resident) =
            filled.unwrap_or((outputs, loads, threads, resident));
        // So few matrix rows take no longer than one of them does: as many groups as possible,
        // each with as much under way as it can.
        let short = out <= tuned.gemv.short && cols >= SHORT_COLS && !several && !pair;
        let most = held.loads.min((cols.div_ceil(32 * run) / 2).max(2)).min(4);
        let (outputs, loads, threads, resident) = match short {
            true => (1, most, 64, u32::MAX),
            false => (outputs, loads, threads, resident),
        };
        let activations = ActivationStorage::pick(cols, rows, x.bytes() as u32, int8);
        let mut schedule =
            GemvSchedule { outputs, loads, threads, resident, activations, whole: true };
        schedule.whole = formats.iter().all(|f| cols.is_multiple_of(schedule.step(*f)));
        schedule
    }

    /// Matrix rows that a simdgroup sums together, at `least` so many, and loads of a step, which
    /// fill whole steps of a row, of which there are two or more.
    fn block_by_steps(task: &Task, held: u32, least: u32) -> (u32, u32) {
        let Task { formats, cols, rows, .. } = *task;
        let run = formats.first().map_or(1, |f| f.run());
        let tiles = cols.div_ceil(32 * run).max(1);
        let idle = |loads: &u32| tiles.next_multiple_of(*loads) - tiles;
        let wordy = formats.len() > 1 && formats.iter().any(|f| f.words() > 6);
        let most = (held / least).min((tiles / 2).max(2)).max(1);
        let most = if wordy { most.min(2) } else { most };
        let loads = (1..=most).rev().min_by_key(idle).unwrap_or(1);
        (if rows > 2 { 1 } else { (held / loads).clamp(1, 4) }, loads)
    }

    /// Likewise, of one matrix or of a pair, without regard to who shares activations: what leaves
    /// the busiest simdgroup the fewest matrix rows; then what has most under way, if two matrices
    /// are summed together, or is not a single load; then, where a quarter of the simdgroups would
    /// have nothing to do in their last turn, what takes the fewest turns.
    fn block_by_turns(task: &Task, Held { loads: held, threads, resident }: Held) -> (u32, u32) {
        let Task { formats, cols, out, rows, pair, processors, .. } = *task;
        let run = formats.first().map_or(1, |f| f.run());
        let packed = formats.iter().all(|f| f.packing().is_some());
        let simds = (processors.saturating_mul(resident).saturating_mul(threads / 32)).max(1);
        let tiles = cols.div_ceil(32 * run).max(1);
        let most = if rows > 2 { 1 } else { 4 };
        let of = |outputs: u32| {
            let turns = out.div_ceil(outputs).div_ceil(simds);
            // A simdgroup with one block has all of it under way at once.
            let steps = if turns == 1 || tiles <= 3 { tiles } else { (tiles / 2).max(2) };
            // Loads past the end of a row, which only packed matrices can afford, do nothing and
            // keep the others waiting: in thousandths.
            let full = |loads: u32| {
                let share = 1000 * u64::from(tiles) / u64::from(tiles.next_multiple_of(loads));
                u64::from(loads) * share * share / 1000
            };
            let loads = (1..=(held / outputs).min(steps).max(1))
                .filter(|loads| packed || tiles.is_multiple_of(*loads))
                .max_by_key(|loads| full(*loads))
                .unwrap_or(1);
            let under_way = u64::from(outputs) * full(loads);
            let uneven = 4 * u64::from(out) < 3 * u64::from(turns * outputs) * u64::from(simds);
            let key = (
                turns * outputs,
                Reverse(if pair { under_way } else { under_way.min(2000) }),
                if uneven { turns } else { 0 },
                pair && loads == tiles,
                outputs,
            );
            (key, (outputs, loads))
        };
        let blocks = [1, 2, 4].into_iter().filter(|o| *o <= held.min(most)).map(of);
        blocks.min_by_key(|(key, _)| *key).map_or((1, 1), |(_, block)| block)
    }

    /// The schedule for many small groups, each simdgroup with a few matrix rows. Activations are
    /// read in place, since a group would have to read all of them to share them among so few rows.
    fn small(task: &Task, small: &SmallGroups) -> GemvSchedule {
        let Task { formats, cols, rows, pair, .. } = *task;
        let long = formats.iter().any(|f| f.run() >= 64);
        // What a thread holds: words of all of them, and of the next step, and a run of
        // activations.
        let halves = [rows > 2, pair, long].into_iter().filter(|more| *more).count();
        let (outputs, threads) = ((small.outputs >> halves).max(1), small.threads);
        let (loads, resident, activations) = (1, u32::MAX, ActivationStorage::Direct);
        let mut schedule =
            GemvSchedule { outputs, loads, threads, resident, activations, whole: true };
        schedule.whole = formats.iter().all(|f| cols.is_multiple_of(schedule.step(*f)));
        schedule
    }

    /// Schedules for any number of rows up to `most`, a power of two, whose sums have the same
    /// bits: whatever the number, a row's activations are kept in one way, and its terms are added
    /// in one order, lane by lane. Returns how many rows may go together on a device with `shared`
    /// bytes of shared memory, with the schedule of `task.rows` of them.
    pub fn alike(task: &Task, most: u32, shared: u32) -> (u32, GemvSchedule) {
        let Task { formats, cols, x, int8, .. } = *task;
        if let Some(small) = &task.tuned.small_groups {
            // Whatever the rows, a lane adds the same terms in one order.
            return (most, GemvSchedule::small(task, small));
        }
        let int8 = int8 && formats.iter().all(|f| f.packing().is_some());
        // Two groups share a multiprocessor, each with some that the system takes.
        let limit = u64::from(shared / 2).saturating_sub(1024).max(LIMIT);
        let (rows, activations) =
            ActivationStorage::together(limit, cols, most, x.bytes() as u32, int8);
        (rows, GemvSchedule { activations, ..GemvSchedule::picked(task, rows == 1) })
    }

    /// How many groups to launch for `out` outputs on a GPU with this many multiprocessors (or
    /// cores): as many as are resident, or as have work. Any number gives a correct result.
    pub fn groups(&self, out: u32, processors: u32) -> u32 {
        let work = out.div_ceil(self.outputs * (self.threads / 32).max(1));
        work.min(self.resident.saturating_mul(processors)).max(1)
    }

    /// The number that columns must be a multiple of.
    pub(crate) fn step(&self, format: Format) -> u32 {
        let whole = if self.whole { 32 * format.run() * self.loads } else { 1 };
        format.step().max(whole)
    }

    /// For a label: what tells two schedules apart.
    pub(crate) fn name(&self) -> String {
        let GemvSchedule { outputs, loads, threads, activations, whole, .. } = self;
        let rest = if *whole { "" } else { "_ragged" };
        format!("{outputs}x{loads}x{threads}_{}{rest}", activations.name())
    }
}

/// Matrix rows that are taken one after another: of one matrix, or of two that are read together.
pub(crate) struct Sweep {
    /// One, or two of one format.
    pub(crate) weights: Vec<PackedWeights>,
    /// Their rows.
    pub(crate) out: Val<u32>,
    /// If rows are weighted sums of several matrices' rows: which.
    pub(crate) mixed: Option<Mixed>,
}

impl Sweep {
    /// The rows of these matrices, as they are.
    pub(crate) fn new(weights: Vec<PackedWeights>, out: Val<u32>) -> Sweep {
        Sweep { weights, out, mixed: None }
    }
}

/// Several matrices of one buffer whose products, each with columns of its own, are weighted and
/// added up: the columns of the first, then those of the next. Lane `j` knows of matrix `j`.
pub(crate) struct Mixed {
    /// How many, at most 32.
    pub(crate) count: u32,
    /// Columns of each.
    pub(crate) width: Val<u32>,
    /// The first row of the lane's matrix.
    pub(crate) first: Val<u32>,
    /// The factor on its products.
    pub(crate) factor: Val<f32>,
    /// A number for each row of the buffer, added to its products before the factor.
    pub(crate) bias: Option<In>,
}

impl Mixed {
    /// The matrix of a run of all columns, and the number of this run there.
    #[track_caller]
    fn place(&self, run: Val<u32>, format: Format) -> (Val<u32>, Val<u32>) {
        let runs = self.width / format.run();
        (run / runs, run % runs)
    }
}

/// Sums that are complete: in lane 0, or each in a lane of its own.
pub(crate) struct Sums {
    /// Which sweep.
    pub(crate) sweep: usize,
    /// The matrix row.
    pub(crate) output: Val<u32>,
    /// The activation row.
    pub(crate) row: Val<u32>,
    /// One for each matrix of the sweep, the norm's scale included.
    pub(crate) sums: Vec<Val<f32>>,
}

/// States the contract that all these kernels share: `weights` are names, formats and names of the
/// numbers of rows.
pub(crate) fn contract(schedule: &GemvSchedule, rows: u32, weights: &[(&str, Format, &str)]) {
    launch(Mode::Vector, [dim("groups"), fixed(1), fixed(1)], schedule.threads);
    holds("x", dim("width") * rows);
    require(Requirement::Aligned("x".into(), 16));
    let mut step = 1;
    for &(name, format, out) in weights {
        holds(name, format.extent(dim("width")) * dim(out));
        require(Requirement::Aligned(name.into(), 16));
        step = step.max(schedule.step(format));
    }
    require(Requirement::Divisible(dim("width"), step));
    if let Some(capacity) = schedule.activations.capacity() {
        require(Requirement::AtMost(dim("width"), capacity));
    }
}

/// Requires a buffer's length.
pub(crate) fn holds(name: &str, length: Extent) {
    require(Requirement::Length(name.into(), length));
}

/// Records the whole kernel: `finish` writes one output.
#[track_caller]
pub(crate) fn product(
    schedule: &GemvSchedule,
    input: Input,
    sweeps: &[Sweep],
    finish: impl FnMut(Sums),
) {
    product_overlapping(schedule, input, sweeps, Overlap::Any, Finisher::First, finish);
}

/// When a product waits for the kernel in front, and lets the one behind start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// It waits before it reads activations, and lets the one behind start at once.
    Any,
    /// It waits before it reads activations, and then lets the one behind start, which finds all
    /// that this one reads.
    Leads,
    /// The one in front [`Leads`](Overlap::Leads) and reads the same activations: it is waited for
    /// where sums are finished, which is the first that reads its results, or writes.
    Follows,
}

/// Begins the reads of an end whose sums are still to be added up: of a sweep, an output, and a row
/// of activations.
pub(crate) type Ahead<'a> = &'a dyn Fn(usize, Val<u32>, Val<u32>);

/// Which lanes finish the sums of a block.
#[derive(Clone, Copy)]
pub(crate) enum Finisher<'a> {
    /// The first, one after another.
    First,
    /// Each lane finishes one output of one row, for ends whose reads wait for memory: it begins
    /// them a step before.
    Each(Ahead<'a>),
}

/// As [`product`], with its overlap and the lanes named that finish.
#[track_caller]
pub(crate) fn product_overlapping(
    schedule: &GemvSchedule,
    mut input: Input,
    sweeps: &[Sweep],
    overlap: Overlap,
    finisher: Finisher<'_>,
    mut finish: impl FnMut(Sums),
) {
    if overlap != Overlap::Leads {
        grid_trigger();
    }
    // Neighbouring groups take neighbouring blocks: the last, partial round is spread over all
    // multiprocessors.
    let own = simd_id() * groups(0) + group_id();
    let stride = groups(0) * (schedule.threads / 32);
    let outs = sweeps.iter().map(|sweep| sweep.out);
    let spans = spans(outs, schedule.outputs, own, stride);
    let (cols, lane) = (input.width, lane_id());
    let walk = Walk { schedule: *schedule, cols, lane, stride, overlap, finisher };
    let words = sweeps.iter().map(|sweep| walk.words(sweep)).max().unwrap_or(0);
    let held = [Regs::<u32>::uninit(words), Regs::<u32>::uninit(words)];
    input.prefetch();
    for (sweep, span) in sweeps.iter().zip(&spans) {
        test(span.first).then(|| walk.begin(sweep, span, held)).otherwise(|| {});
    }
    if overlap != Overlap::Follows {
        grid_wait();
    }
    if overlap == Overlap::Leads {
        grid_trigger();
    }
    input.stage();
    for (index, (sweep, span)) in sweeps.iter().zip(&spans).enumerate() {
        if index > 0 {
            let late = span.trips.gt(0u32) & !span.first;
            test(late).then(|| walk.begin(sweep, span, held)).otherwise(|| {});
        }
        let sums = Regs::<f32>::new(walk.sums(sweep, input.rows), 0.0);
        let total = span.trips * walk.steps(sweep);
        let here = Cursor::new(walk.first(span));
        let ahead = Cursor::new(walk.after(sweep, walk.after(sweep, walk.first(span))));
        let mut turn = |t: Val<u32>, held: Regs<u32>| {
            let (at, to) = (here.get(), ahead.get());
            let more = (t + 2u32).lt(total);
            walk.ahead(sweep, index, &input, at);
            for load in 0..schedule.loads {
                walk.sum(sweep, &input, at.step, load, held, sums);
                test(more).then(|| walk.load(sweep, to, load, held)).otherwise(|| {});
            }
            test((at.step + 1u32).eq(walk.steps(sweep)))
                .then(|| walk.finish(sweep, index, &input, at.block, sums, &mut finish))
                .otherwise(|| {});
            here.set(walk.after(sweep, at));
            ahead.set(walk.after(sweep, to));
        };
        range(0u32, total).step(2u32).each(|t| {
            turn(t, held[0]);
            let second = (t + 1u32).lt(total);
            test(second).then(|| turn(t + 1u32, held[1])).otherwise(|| {});
        });
    }
}

/// A step of a block of rows.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) block: Val<u32>,
    pub(super) step: Val<u32>,
}

/// A place that changes.
pub(super) struct Cursor {
    block: Var<u32>,
    step: Var<u32>,
}

impl Cursor {
    #[track_caller]
    pub(super) fn new(at: Place) -> Self {
        Cursor { block: Var::new(at.block), step: Var::new(at.step) }
    }

    #[track_caller]
    pub(super) fn get(&self) -> Place {
        Place { block: self.block.get(), step: self.step.get() }
    }

    #[track_caller]
    pub(super) fn set(&self, to: Place) {
        self.block.set(to.block);
        self.step.set(to.step);
    }
}

/// The share of a sweep of a simdgroup, or of a threadgroup.
pub(super) struct Span {
    /// Its first block.
    pub(super) start: Val<u32>,
    /// How many blocks it takes.
    pub(super) trips: Val<u32>,
    /// Whether it is the first of all that it takes.
    pub(super) first: Val<bool>,
}

/// The blocks of sweeps with so many rows are numbered through and dealt out in turn, so that shares
/// differ by at most one block.
#[track_caller]
pub(super) fn spans(
    outs: impl IntoIterator<Item = Val<u32>>,
    outputs: u32,
    own: Val<u32>,
    stride: Val<u32>,
) -> Vec<Span> {
    let mut begin: Option<Val<u32>> = None;
    let mut spans = Vec::new();
    for out in outs {
        let blocks = (out + (outputs - 1)) / outputs;
        let (start, reached) = match begin {
            None => (own, None),
            Some(begin) => {
                let early = (begin - own + (stride - 1u32)) / stride * stride;
                let reached = own.ge(begin);
                (own + select(reached, 0u32, early) - begin, Some(reached))
            }
        };
        let some = start.lt(blocks);
        let trips = select(some, (blocks - start + (stride - 1u32)) / stride, 0u32);
        let first = reached.map_or(some, |reached| reached & some);
        spans.push(Span { start, trips, first });
        begin = Some(begin.map_or(blocks, |begin| begin + blocks));
    }
    spans
}

/// How a simdgroup walks through blocks of rows.
struct Walk<'a> {
    schedule: GemvSchedule,
    cols: Val<u32>,
    lane: Val<u32>,
    /// Blocks between two of a simdgroup.
    stride: Val<u32>,
    overlap: Overlap,
    finisher: Finisher<'a>,
}

impl Walk<'_> {
    #[track_caller]
    fn first(&self, span: &Span) -> Place {
        Place { block: span.start, step: 0u32.val() }
    }

    /// The next step, of this block or of the simdgroup's next.
    #[track_caller]
    fn after(&self, sweep: &Sweep, at: Place) -> Place {
        let step = at.step + 1u32;
        let last = step.eq(self.steps(sweep));
        let block = select(last, at.block + self.stride, at.block);
        Place { block, step: select(last, 0u32, step) }
    }

    /// Issues the loads of the first two steps.
    #[track_caller]
    fn begin(&self, sweep: &Sweep, span: &Span, held: [Regs<u32>; 2]) {
        let first = self.first(span);
        let all = |at: Place, to: Regs<u32>| {
            (0..self.schedule.loads).for_each(|load| self.load(sweep, at, load, to));
        };
        all(first, held[0]);
        let more = (span.trips * self.steps(sweep)).gt(1u32);
        test(more).then(|| all(self.after(sweep, first), held[1])).otherwise(|| {});
    }

    /// Words in registers for a load of all rows of a block.
    fn words_per_load(&self, sweep: &Sweep) -> u32 {
        let per_run = sweep.weights.iter().map(|w| w.format().words()).sum::<u32>();
        self.schedule.outputs * per_run
    }

    /// Words in registers for a step.
    fn words(&self, sweep: &Sweep) -> u32 {
        self.schedule.loads * self.words_per_load(sweep)
    }

    /// Sums in registers for a block.
    fn sums(&self, sweep: &Sweep, rows: u32) -> u32 {
        self.schedule.outputs * sweep.weights.len() as u32 * rows
    }

    /// Runs of a row.
    #[track_caller]
    fn runs(&self, sweep: &Sweep) -> Val<u32> {
        self.cols / sweep.weights[0].format().run()
    }

    /// Steps of a row.
    #[track_caller]
    fn steps(&self, sweep: &Sweep) -> Val<u32> {
        let per_step = 32 * self.schedule.loads;
        (self.runs(sweep) + (per_step - 1)) / per_step
    }

    /// This lane's run for a load of a step.
    #[track_caller]
    fn run(&self, step: Val<u32>, load: u32) -> Val<u32> {
        step * (32 * self.schedule.loads) + (self.lane + 32 * load)
    }

    /// Issues a load of a step for all rows of a block. Rows and runs past the end are replaced by
    /// the last: their sums are not used.
    #[track_caller]
    fn load(&self, sweep: &Sweep, at: Place, load: u32, to: Regs<u32>) {
        let GemvSchedule { outputs, whole, .. } = self.schedule;
        let run = self.run(at.step, load);
        let run = if whole { run } else { run.min(self.runs(sweep) - 1u32) };
        let mut slot = load * self.words_per_load(sweep);
        let (first, run) = match &sweep.mixed {
            Some(mixed) => {
                let (matrix, run) = mixed.place(run, sweep.weights[0].format());
                (Some(shuffle(mixed.first, matrix)), run)
            }
            None => (None, run),
        };
        for output in 0..outputs {
            let row = (at.block * outputs + output).min(sweep.out - 1u32);
            let row = first.map_or(row, |first| first + row);
            for weights in &sweep.weights {
                for word in weights.load(weights.row(row), run) {
                    to.set(slot, word);
                    slot += 1;
                }
            }
        }
    }

    /// Adds the products of a load of a step to the sums.
    #[track_caller]
    fn sum(
        &self,
        sweep: &Sweep,
        input: &Input,
        step: Val<u32>,
        load: u32,
        from: Regs<u32>,
        sums: Regs<f32>,
    ) {
        let run = self.run(step, load);
        let format = sweep.weights[0].format();
        // The run's number in its matrix. All lanes take part, those without a run, too.
        let (factor, own) = match &sweep.mixed {
            Some(mixed) => {
                let run = if self.schedule.whole { run } else { run.min(self.runs(sweep) - 1u32) };
                let (matrix, own) = mixed.place(run, format);
                (Some(shuffle(mixed.factor, matrix)), own)
            }
            None => (None, run),
        };
        let body = || {
            let slice = |row| input.slice(row, run, format);
            let mut slot = load * self.words_per_load(sweep);
            let mut take = |sum: u32| {
                let next = slot + format.words();
                let words: Vec<Val<u32>> = (slot..next).map(|i| from.get(i)).collect();
                slot = next;
                sweep.weights[sum as usize % sweep.weights.len()].run(&words, own)
            };
            let add = |sum: u32, row: u32, slice: &Slice, taken: &WordRun| {
                let (i, before) = (sum * input.rows + row, sums.get(sum * input.rows + row));
                sums.set(
                    i,
                    match factor {
                        Some(factor) => slice.dot(taken, 0f32.val()).fma(factor, before),
                        None => slice.dot(taken, before),
                    },
                );
            };
            let all = 0..self.schedule.outputs * sweep.weights.len() as u32;
            // Registers hold either the activations of all rows or the weights of all matrix rows,
            // whichever fit.
            if input.rows * format.run() <= 64 {
                let kept: Vec<Slice> = (0..input.rows).map(slice).collect();
                for sum in all {
                    let taken = take(sum);
                    (0..).zip(&kept).for_each(|(row, slice)| add(sum, row, slice, &taken));
                }
            } else {
                let taken: Vec<WordRun> = all.map(take).collect();
                for row in 0..input.rows {
                    let slice = slice(row);
                    (0..).zip(&taken).for_each(|(sum, taken)| add(sum, row, &slice, taken));
                }
            }
        };
        if self.schedule.whole {
            body();
        } else {
            test(run.lt(self.runs(sweep))).then(body).otherwise(|| {});
        }
    }

    /// The output and the row of activations that the lane finishes in a block.
    #[track_caller]
    fn own(&self, input: &Input, block: Val<u32>) -> [Val<u32>; 2] {
        let (o, row) = (self.lane / input.rows, self.lane % input.rows);
        [block * self.schedule.outputs + o, row]
    }

    /// In the last step of a block, begins the reads of its end.
    #[track_caller]
    fn ahead(&self, sweep: &Sweep, index: usize, input: &Input, at: Place) {
        let Finisher::Each(ahead) = self.finisher else { return };
        let [output, row] = self.own(input, at.block);
        let last = (at.step + 1u32).eq(self.steps(sweep));
        test(last & self.writes(sweep, input, output))
            .then(|| ahead(index, output, row))
            .otherwise(|| {});
    }

    /// Whether the lane finishes an output.
    #[track_caller]
    fn writes(&self, sweep: &Sweep, input: &Input, output: Val<u32>) -> Val<bool> {
        self.lane.lt(self.schedule.outputs * input.rows) & output.lt(sweep.out)
    }

    /// Adds up the lanes' sums, hands them over and clears them.
    #[track_caller]
    fn finish(
        &self,
        sweep: &Sweep,
        index: usize,
        input: &Input,
        block: Val<u32>,
        sums: Regs<f32>,
        finish: &mut impl FnMut(Sums),
    ) {
        let own = |i: u32| {
            let Some(Mixed { count, first, factor, bias: Some(bias), .. }) = sweep.mixed else {
                return sums.get(i);
            };
            let row = (block * self.schedule.outputs + i / input.rows).min(sweep.out - 1u32);
            let own = bias.get(first + row) * factor;
            sums.get(i) + select(self.lane.lt(count), own, 0.0)
        };
        let totals: Vec<Val<f32>> = (0..sums.len()).map(|i| simd_sum(own(i))).collect();
        (0..sums.len()).for_each(|i| sums.set(i, 0.0));
        if self.overlap == Overlap::Follows {
            grid_wait();
        }
        let matrices = sweep.weights.len();
        let at = |o: u32, m: usize, row: u32| {
            (o as usize * matrices + m) * input.rows as usize + row as usize
        };
        if let Finisher::Each(_) = self.finisher {
            let [output, row] = self.own(input, block);
            let all =
                || (0..self.schedule.outputs).flat_map(|o| (0..input.rows).map(move |r| (o, r)));
            test(self.writes(sweep, input, output))
                .then(|| {
                    let own = |m: usize| {
                        let mine = all().map(|(o, row)| totals[at(o, m, row)]).collect::<Vec<_>>();
                        input.scaled_of(row, pick(self.lane, &mine))
                    };
                    let sums = (0..matrices).map(own).collect();
                    finish(Sums { sweep: index, output, row, sums });
                })
                .otherwise(|| {});
            return;
        }
        for o in 0..self.schedule.outputs {
            let output = block * self.schedule.outputs + o;
            let writes = self.lane.eq(0u32) & output.lt(sweep.out);
            test(writes)
                .then(|| {
                    for row in 0..input.rows {
                        let total = |m: usize| input.scaled(row, totals[at(o, m, row)]);
                        let sums = (0..matrices).map(total).collect();
                        finish(Sums { sweep: index, output, row: row.val(), sums });
                    }
                })
                .otherwise(|| {});
        }
    }
}

/// The value of a number, which is less than there are values.
#[track_caller]
pub(super) fn pick(which: Val<u32>, values: &[Val<f32>]) -> Val<f32> {
    let rest = values.iter().enumerate().skip(1);
    rest.fold(values[0], |found, (i, value)| select(which.eq(i as u32), *value, found))
}

#[cfg(test)]
mod tests {
    use formats::DType;

    use super::*;

    /// The order in which terms are added, and the way activations are kept, are the same for any
    /// number of rows.
    #[test]
    fn rows_are_added_alike_however_many_there_are() {
        let mut together = Vec::new();
        for format in Format::all() {
            for (cols, shared, int8) in [
                (2048, 227 << 10, true),
                (4096, 227 << 10, true),
                (4096, 32 << 10, true),
                (14336, 227 << 10, false),
                (14336, 32 << 10, true),
                (28672, 99 << 10, true),
            ] {
                for (x, pair) in [(Scalar::F32, false), (Scalar::F32, true), (Scalar::BF16, false)]
                {
                    let formats = &[format];
                    let decode = Task::decode(formats, cols, 4096);
                    let task = |rows| Task { rows, x, pair, int8, ..decode };
                    let (most, one) = GemvSchedule::alike(&task(1), 8, shared);
                    assert!(most.is_power_of_two() && most <= 8);
                    for rows in [1, 2, 4, 8].into_iter().filter(|rows| *rows <= most) {
                        let (again, some) = GemvSchedule::alike(&task(rows), 8, shared);
                        let here = format!("{} of {cols}, {rows} rows", format.name());
                        assert_eq!(again, most, "{here}");
                        assert_eq!(some.activations, one.activations, "{here}");
                        assert_eq!(some.threads, one.threads, "{here}");
                        assert!(some.activations.capacity().is_none_or(|most| cols <= most));
                    }
                    together.push(most);
                }
            }
        }
        // Some have no room for eight, and some for no more than one.
        assert!([1, 2, 4, 8].iter().all(|rows| together.contains(rows)), "{together:?}");
    }

    /// Small groups are as many as have work, on any device, read activations where they are, and
    /// give any number of rows the same sums.
    #[test]
    fn small_groups_are_as_many_as_have_work() {
        for format in Format::all() {
            let formats = &[format];
            for (rows, pair) in [(1, false), (1, true), (2, false), (4, false), (8, true)] {
                let decode = Task::decode(formats, 4096, 4096);
                let tuned = &tuned::APPLE;
                let task = Task { rows, pair, tuned, int8: false, ..decode };
                let schedule = GemvSchedule::pick(&task);
                assert_eq!(GemvSchedule::alike(&task, 8, 32 << 10), (8, schedule));
                assert_eq!(schedule.activations, ActivationStorage::Direct);
                let rows_of_a_group = 2 * schedule.outputs;
                assert_eq!(schedule.groups(4096, 8), 4096 / rows_of_a_group);
                // What a thread holds: words of two steps, and the activations of a run.
                let matrices = if pair { 2 } else { 1 };
                let words = 2 * schedule.outputs * matrices * format.words();
                assert!(words + format.run() <= 104, "{}: {schedule:?}", format.name());
            }
        }
    }

    /// Products of one row are computed in one turn of resident groups, and the busiest simdgroup
    /// has at most a row more than an even share.
    #[test]
    fn rows_are_shared_out_evenly() {
        for (dtype, cols, out, pair, processors) in [
            (DType::Mxfp4, 2880, 2880, true, 33),
            (DType::Q4K, 2048, 768, true, 16),
            (DType::Q4K, 4096, 14336, true, 132),
            (DType::Q8_0, 2560, 9216, true, 132),
            (DType::Mxfp4, 4096, 4096, false, 132),
            // One group on every processor, of 20, 24 and 28 simdgroups.
            (DType::Q4K, 9216, 2560, false, 132),
            (DType::Mxfp4, 11520, 2880, false, 132),
            (DType::BF16, 18944, 3584, false, 132),
            (DType::Q6K, 2048, 2048, false, 132),
        ] {
            let formats = &[Format::of(dtype).unwrap()];
            let task = Task { pair, processors, ..Task::decode(formats, cols, out) };
            let schedule = GemvSchedule::pick(&task);
            let groups = schedule.groups(out, processors);
            assert!(groups <= schedule.resident * processors, "{task:?}: {schedule:?}");
            let simds = |groups: u32| groups * schedule.threads / 32;
            let turns = out.div_ceil(schedule.outputs).div_ceil(simds(groups));
            let even = out.div_ceil(simds(schedule.resident * processors));
            assert!(turns * schedule.outputs <= even + 1, "{task:?}: {schedule:?}");
        }
    }

    /// One row's activations are kept as a kernel for it alone keeps them, so that it costs no
    /// more.
    #[test]
    fn one_row_is_computed_as_alone() {
        for (format, cols) in [(DType::BF16, 4096), (DType::Q4K, 4096), (DType::Q6K, 14336)] {
            let formats = &[Format::of(format).unwrap()];
            let task = Task { x: Scalar::F32, ..Task::decode(formats, cols, 4096) };
            assert_eq!(
                GemvSchedule::alike(&task, 8, 227 << 10).1,
                GemvSchedule::pick(&task),
                "{format}"
            );
        }
    }
}
