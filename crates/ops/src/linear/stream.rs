//! The products of the rows of many sequences, each of which decodes, with the rows of packed
//! matrices: `y[r, o] = sum_i x[r, i] weight[o, i]`. For one row to eight: `gemv`; for prompts:
//! `gemm`.
//!
//! Weights are read once for up to [`StreamTiling::rows`] rows of activations, and are the left
//! operand of the matrix unit: they go from memory, as they are, to places that only one lane
//! reads, which turns the words of its own runs into operands ([`Frag::left_of`]), whatever their
//! format. A lane has whole runs of the matrix rows `g` and `g + 8` of a tile (`g = lane / 4`), so
//! the four lanes of a `g` have four runs in a row; which terms a product of 16 then adds is a
//! matter of order, and the activations follow it.
//!
//! 16-bit weights, of which a lane's run is no more than 16 bytes, are copied by other lanes than
//! read them: memory is asked for 128 bytes of a row at once, since the way between the halves of
//! the second-level cache takes requests, not bytes.
//!
//! The terms of a sum are `PARTS` parts, which take turns step by step. Each part is added up by
//! itself, and the parts are added in their order. Which part a term is in follows from the format
//! and the number of columns alone, so a row's bits do not depend on how many rows there are, nor
//! on which of the first two ways a threadgroup works ([`Share`]):
//!
//! - For few rows each simdgroup has one part of every sum, and copies the activations of its own
//!   terms, so that simdgroups meet only at the end of a block of matrix rows. Many weights are
//!   then on their way for few sums.
//! - For many rows of packed matrices each simdgroup has sums of its own, and computes the parts
//!   one after another. A block has eight times as many matrix rows, all of which read the same
//!   activations, so a weight is converted once for up to 128 rows.
//!
//! - On GPUs whose warpgroups multiply, each simdgroup has sums of its own, which are one part.
//!   Activations are read by the matrix unit itself, from shared memory, as are 16-bit weights; in
//!   front of packed weights, they are in the order of the lanes' runs ([`by_lanes`]), so that all
//!   that is left to a simdgroup is to convert weights. Where matrices have too few rows for all
//!   multiprocessors, several threadgroups have parts of each sum (split-K), which [`add_splits`]
//!   adds in their order. Which matrices these are, and how many parts, does not follow from the
//!   number of activation rows.
//!
//! [`StreamTiling::stages`] steps are under way, across the ends of blocks too, and the first ask
//! for their weights before the kernel in front is done. Both operands are copied asynchronously:
//! what waits in registers is waited for by whoever waits for anything.

mod cases;
mod lay;
mod results;
mod splits;
mod tiling;

pub use lay::{by_lanes, lay_rows};
pub use results::End;
pub use splits::{add_splits, add_splits_laid};
pub use tiling::{Job, Share, StreamTiling};

use super::gemv::{Cursor, Place, Span, spans};
use super::holds;
use crate::low_rank::kernels::{Low, Sites};
use crate::packed::{Format, PackedWeights, Scaled, WordRun};
use crate::project::ProjectedMatrix;
use results::{Results, Total};
use tile::case::Spec;
use tile::dsl::*;
use tile::ir::{LoadHint, ROW};
use tile::launch::{Extent, Mode, Requirement};
use tiling::{EDGE, SIMDS, SPARE, UNIT};

/// Runs of a row in a stage that has weights row by row.
const ROW_RUNS: u32 = 8;

/// StreamTypes of activations, operands and results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamTypes {
    /// Type of activations: f16 or bf16.
    pub x: Scalar,
    /// Type that both operands are rounded to: f16 or bf16.
    pub operand: Scalar,
    /// Type of results.
    pub y: Scalar,
}

/// `yJ[rows, outJ] = x[rows, width] weightJ[outJ, width]' + biasJ[outJ]` for each of `matrices`,
/// operands rounded to their type, summed in f32. [`End::Add`] adds `residual[rows, out0]`;
/// [`End::Gate`] makes one result `y0` of two matrices.
///
/// Buffers: `x`, two elements a word; (`residual`); for each result `yJ`; for each matrix
/// `weightJ`, (`biasJ`). With `low`, what adapters add is added to each sum.
#[kernel]
pub fn stream(
    x: In<u32>,
    rows: Arg<u32>,
    width: Const<u32>,
    types: StreamTypes,
    matrices: &[ProjectedMatrix],
    end: End,
    tiling: StreamTiling,
    low: Option<Low>,
) {
    let held = (dim("rows") * dim("width")).ceil_div(2);
    record((Activations::Words(x), held), (rows, width), types, matrices, end, tiling, low);
}

/// As [`stream`], by warpgroups ([`Share::Warpgroups`]); `y` is the type of results. Beside packed
/// matrices `x` is what [`lay_rows`] has made of the activations, beside 16-bit ones the
/// activations themselves, in the type of the weights.
///
/// Where sums are split, `end` is [`End::Store`], `y` f32, and the results `yJ[splits, rows, outJ]`
/// are what [`add_splits`] takes.
#[kernel]
pub fn stream_warpgroups(
    x: In<{ operand(matrices) }>,
    rows: Arg<u32>,
    width: Const<u32>,
    y: Scalar,
    matrices: &[ProjectedMatrix],
    end: End,
    tiling: StreamTiling,
    low: Option<Low>,
) {
    let (format, operand) = (matrices[0].format, operand(matrices));
    let factors = format.packing().map(|_| {
        holds("factors", dim("rows"));
        <In>::declare("factors")
    });
    // What warpgroups read is declared in front, where it lies by the kilobyte.
    let laid = tiling.stages * tiling.laid(format);
    let shared = Shared::stored(operand, "laid", laid);
    let x = (Activations::Laid { x, factors, shared }, dim("rows") * dim("width"));
    let types = StreamTypes { x: operand, operand, y };
    record(x, (rows, width), types, matrices, end, tiling, low);
}

/// What warpgroups multiply these matrices in: their own type, or f16 where they are packed.
fn operand(matrices: &[ProjectedMatrix]) -> Scalar {
    match matrices[0].format {
        Format::Dense(scalar) => scalar,
        _ => Scalar::F16,
    }
}

/// Records either, of activations that are declared and their number of elements.
#[track_caller]
fn record(
    (x, held): (Activations, Extent),
    (rows, width): (Val<u32>, Val<u32>),
    types: StreamTypes,
    matrices: &[ProjectedMatrix],
    end: End,
    tiling: StreamTiling,
    low: Option<Low>,
) {
    let (turns, splits) = (dim("rows").ceil_div(tiling.rows), tiling.splits());
    assert!(splits == 1 || (end == End::Store && low.is_none()), "whole sums alone are finished");
    launch(Mode::Tile, [dim("groups"), turns, fixed(splits)], tiling.threads());
    holds("x", held);
    require(Requirement::Aligned("x".into(), 16));
    // Every product of sizes is computed in 32 bits.
    require(Requirement::AtMost(dim("rows"), 1 << 24));
    let residual = matches!(end, End::Add).then(|| <In>::stored("residual", types.y));
    if residual.is_some() {
        holds("residual", dim("out0") * dim("rows"));
    }
    let gate = matches!(end, End::Gate(_));
    // The sign of a number of rows: no bit is set, and none is known not to be.
    let zero = (rows.bits::<i32>() >> 31i32).bits::<u32>();
    let (sweeps, mut results) = declare(matrices, gate, types.y, (width, zero), &tiling, low);
    if let Activations::Laid { factors, .. } = x {
        results.factors = factors;
    }
    let walk = Walk::new(tiling, types, x, rows, width, &sweeps);
    let split = (splits > 1).then(|| group_id_of(2) * rows);
    walk.product(&sweeps, |total| results.finish(end, residual, split, total));
}

/// Where activations come from.
#[derive(Clone, Copy)]
enum Activations {
    /// Two a word, to the ring.
    Words(In<u32>),
    /// Operands, to shared memory that warpgroups read: of each stage blocks of [`ROW`] terms, of
    /// all rows, swizzled, and behind them those of 16-bit weights likewise. Sums of a row are
    /// multiplied by its factor, if it was divided.
    Laid { x: In, factors: Option<In>, shared: Shared },
}

/// Matrix rows that are taken one after another: of one matrix, or of two of one format that are
/// read together.
struct Sweep {
    format: Format,
    /// Their rows.
    out: Val<u32>,
    /// For each matrix, unless warpgroups read it as it is.
    packed: Vec<PackedWeights>,
    /// Else the matrix.
    operands: Vec<In>,
}

impl Sweep {
    /// Matrices.
    fn count(&self) -> u32 {
        (self.packed.len() + self.operands.len()) as u32
    }
}

/// Declares matrices, biases and results, and states what they require; `gate`: two matrices have
/// one result; `zero`: see [`PackedWeights::with_zero`].
#[track_caller]
fn declare(
    matrices: &[ProjectedMatrix],
    gate: bool,
    y: Scalar,
    (width, zero): (Val<u32>, Val<u32>),
    tiling: &StreamTiling,
    low: Option<Low>,
) -> (Vec<Sweep>, Results) {
    let warpgroups = matches!(tiling.share, Share::Warpgroups { .. });
    let mut sweeps: Vec<Sweep> = Vec::new();
    let mut results = Results::default();
    let (mut sites, mut step) = (Vec::new(), UNIT);
    for (j, &ProjectedMatrix { format, bias }) in matrices.iter().enumerate() {
        let own = !gate || j == 0;
        if own {
            let out = results.declare(j, y, tiling.splits());
            sweeps.push(Sweep { format, out, packed: vec![], operands: vec![] });
        }
        let out = if own { format!("out{j}") } else { "out0".to_owned() };
        let name = format!("weight{j}");
        if let Some(sweep) = sweeps.last_mut() {
            sites.push((sweep.out, dim(&out)));
            match format {
                Format::Dense(scalar) if warpgroups => {
                    sweep.operands.push(<In>::stored(&name, scalar));
                }
                _ => {
                    let packed = PackedWeights::declare(&name, format, width);
                    sweep.packed.push(packed.with_zero(zero));
                }
            }
        }
        holds(&name, format.extent(dim("width")) * dim(&out));
        require(Requirement::Aligned(name, 16));
        step = step.max(format.step());
        results.declare_bias(j, bias, &out);
    }
    require(Requirement::Divisible(dim("width"), step));
    results.sites = low.map(|low| Sites::declare(low, &sites, dim("rows"), 0));
    (sweeps, results)
}

/// How a simdgroup walks through blocks of matrix rows.
struct Walk {
    tiling: StreamTiling,
    types: StreamTypes,
    x: Activations,
    /// Activation rows of the launch, and the first of this group.
    rows: Val<u32>,
    first_row: Val<u32>,
    width: Val<u32>,
    /// Blocks between two of a group.
    stride: Val<u32>,
    /// Stages: see [`StreamTiling::stage`]. None where warpgroups read all that is copied.
    ring: Option<Shared<u32>>,
    /// The first word there of what the simdgroup reads and writes, and the words between stages.
    own: Val<u32>,
    stage: u32,
    /// Shared memory that sums pass through: see [`StreamTiling::spare`].
    spare: Shared<f32>,
}

impl Walk {
    #[track_caller]
    fn new(
        tiling: StreamTiling,
        types: StreamTypes,
        x: Activations,
        rows: Val<u32>,
        width: Val<u32>,
        sweeps: &[Sweep],
    ) -> Walk {
        let matrices = sweeps.iter().map(Sweep::count).max().unwrap_or(1);
        let words = |s: &Sweep| tiling.stage(s.format, s.count());
        let stage = sweeps.iter().map(words).max().unwrap_or(0);
        let ring = (stage > 0).then(|| Shared::<u32>::named("ring", tiling.stages * stage));
        let spare = Shared::<f32>::named("spare", tiling.spare(matrices));
        let (own, stage) = match tiling.share {
            Share::Terms => (simd_id() * (tiling.stages * stage / SIMDS), stage / SIMDS),
            Share::Sums | Share::Warpgroups { .. } => (0u32.val(), stage),
        };
        let first_row = group_id_of(1) * tiling.rows;
        let stride = groups(0);
        Walk { tiling, types, x, rows, first_row, width, stride, ring, own, stage, spare }
    }

    /// Records the whole kernel: `finish` writes one output.
    #[track_caller]
    fn product(&self, sweeps: &[Sweep], mut finish: impl FnMut(Total)) {
        grid_trigger();
        let matrices = sweeps.first().map_or(1, |sweep| sweep.count());
        let block = EDGE * self.tiling.tall(matrices);
        let outs = sweeps.iter().map(|sweep| sweep.out);
        let spans = spans(outs, block, group_id(), self.stride);
        for (sweep, span) in sweeps.iter().zip(&spans) {
            test(span.first).then(|| self.begin(sweep, span)).otherwise(|| {});
        }
        grid_wait();
        let ahead_by = self.tiling.stages - 1;
        for (index, (sweep, span)) in sweeps.iter().zip(&spans).enumerate() {
            if index > 0 {
                let late = span.trips.gt(0u32) & !span.first;
                test(late).then(|| self.begin(sweep, span)).otherwise(|| {});
            }
            let total = span.trips * self.all_steps(sweep);
            let first = self.first(span);
            let (here, ahead) = (Cursor::new(first), Cursor::new(first));
            for t in 0..ahead_by {
                let to = ahead.get();
                let some = Order::lt(t.val(), total);
                test(some).then(|| self.copy(sweep, to.step, t.val())).otherwise(|| {});
                copy_commit();
                ahead.set(self.after(sweep, to));
            }
            let sums = Frags::accumulators(self.sums(sweep), 0.0);
            let totals =
                (self.tiling.turns() > 1).then(|| Frags::accumulators(self.sums(sweep), 0.0));
            range(0u32, total).each(|t| {
                let (at, to) = (here.get(), ahead.get());
                copy_wait(ahead_by as u8 - 1);
                if matches!(self.tiling.share, Share::Warpgroups { .. }) {
                    async_fence();
                }
                // What came is seen, and nobody still reads the stage that is filled next.
                self.meet();
                let more = (t + ahead_by).lt(total);
                let next = (t + ahead_by) % self.tiling.stages;
                test(more)
                    .then(|| {
                        self.load(sweep, to, next);
                        self.copy(sweep, to.step, next);
                    })
                    .otherwise(|| {});
                copy_commit();
                let stage = t % self.tiling.stages;
                let loads = 0..self.tiling.per_step(sweep.format);
                match self.x {
                    Activations::Words(_) => {
                        loads.for_each(|load| self.sum(sweep, at.step, load, stage, sums));
                    }
                    Activations::Laid { shared, .. } if sweep.packed.is_empty() => {
                        self.sum_operands(sweep, (shared, stage), sums);
                    }
                    Activations::Laid { shared, .. } => {
                        let laid = (shared, stage);
                        loads.for_each(|load| self.sum_laid(sweep, (at.step, load), laid, sums));
                    }
                }
                if matches!(self.tiling.share, Share::Warpgroups { .. }) {
                    wgmma_wait(0);
                }
                if let Some(totals) = totals {
                    test(((at.step + 1u32) % self.steps(sweep)).eq(0u32))
                        .then(|| self.add_up(sweep, sums, totals))
                        .otherwise(|| {});
                }
                test((at.step + 1u32).eq(self.all_steps(sweep)))
                    .then(|| {
                        let sums = totals.unwrap_or(sums);
                        self.finish(sweep, index, at.block, sums, &mut finish);
                    })
                    .otherwise(|| {});
                here.set(self.after(sweep, at));
                ahead.set(self.after(sweep, to));
            });
            copy_wait(0);
        }
    }

    /// The ring, of all that warpgroups do not read.
    fn ring(&self) -> Shared<u32> {
        self.ring.expect("stages have words that simdgroups read")
    }

    /// Waits for those that the ring's words are exchanged with.
    #[track_caller]
    fn meet(&self) {
        match self.tiling.share {
            Share::Terms => simd_barrier(),
            Share::Sums | Share::Warpgroups { .. } => barrier(),
        }
    }

    /// Adds a part to those before, and begins the next.
    #[track_caller]
    fn add_up(&self, sweep: &Sweep, sums: Frags, totals: Frags) {
        for sum in 0..self.sums(sweep) {
            totals.set(sum, totals.get(sum) + sums.get(sum));
            sums.set(sum, Frag::filled(0.0));
        }
    }

    #[track_caller]
    fn first(&self, span: &Span) -> Place {
        Place { block: span.start, step: 0u32.val() }
    }

    /// The next step, of this block or of the group's next.
    #[track_caller]
    fn after(&self, sweep: &Sweep, at: Place) -> Place {
        let step = at.step + 1u32;
        let last = step.eq(self.all_steps(sweep));
        let block = select(last, at.block + self.stride, at.block);
        Place { block, step: select(last, 0u32, step) }
    }

    /// Begins to copy the weights of the first steps.
    #[track_caller]
    fn begin(&self, sweep: &Sweep, span: &Span) {
        let total = span.trips * self.all_steps(sweep);
        let mut at = self.first(span);
        for t in 0..self.tiling.stages - 1 {
            let some = Order::lt(t.val(), total);
            test(some).then(|| self.load(sweep, at, t.val())).otherwise(|| {});
            at = self.after(sweep, at);
        }
    }

    /// Matrices that a simdgroup multiplies with.
    fn matrices(&self, sweep: &Sweep) -> u32 {
        match self.tiling.share {
            Share::Terms => sweep.count(),
            Share::Sums | Share::Warpgroups { .. } => 1,
        }
    }

    /// Sums in registers for a block: `[tiles, matrices, wide]`.
    fn sums(&self, sweep: &Sweep) -> u32 {
        self.tiling.tiles * self.matrices(sweep) * self.tiling.wide()
    }

    /// Runs of a row.
    #[track_caller]
    fn runs(&self, sweep: &Sweep) -> Val<u32> {
        self.width / sweep.format.run()
    }

    /// Steps of a part.
    #[track_caller]
    fn steps(&self, sweep: &Sweep) -> Val<u32> {
        let format = sweep.format;
        let tiling = &self.tiling;
        let parts = tiling.parts() * tiling.splits();
        let (pieces, terms) = (tiling.pieces(format), parts * tiling.terms(format));
        match pieces {
            1 => (self.width + (terms - 1)) / terms,
            _ => (self.width + (pieces * terms - 1)) / (pieces * terms) * pieces,
        }
    }

    /// A simdgroup's steps of a block.
    #[track_caller]
    fn all_steps(&self, sweep: &Sweep) -> Val<u32> {
        match self.tiling.turns() {
            1 => self.steps(sweep),
            turns => self.steps(sweep) * turns,
        }
    }

    /// The place of a step's terms among all of a row, in steps.
    #[track_caller]
    fn place_of(&self, sweep: &Sweep, step: Val<u32>) -> Val<u32> {
        let (part, step) = match self.tiling.share {
            Share::Terms => (simd_id(), step),
            Share::Sums => (step / self.steps(sweep), step % self.steps(sweep)),
            Share::Warpgroups { splits: 1 } => return step,
            // Of each group neighbouring terms.
            Share::Warpgroups { .. } => return group_id_of(2) * self.steps(sweep) + step,
        };
        let parts = self.tiling.parts();
        match self.tiling.pieces(sweep.format) {
            1 => step * parts + part,
            pieces => (step / pieces * parts + part) * pieces + step % pieces,
        }
    }

    /// This lane's run for a load of a step.
    #[track_caller]
    fn run(&self, sweep: &Sweep, step: Val<u32>, load: u32) -> Val<u32> {
        let runs = 4 * self.tiling.per_step(sweep.format);
        self.place_of(sweep, step) * runs + (lane_id() % 4u32 + 4 * load)
    }

    /// Begins to copy the weights of a step to a stage, for all rows of a block. Rows and runs past
    /// the end are replaced by the last: the sums of those are not used, and the activations of
    /// these are zeros.
    #[track_caller]
    fn load(&self, sweep: &Sweep, at: Place, stage: Val<u32>) {
        if self.in_rows(sweep) {
            return self.load_rows(sweep, at, stage);
        }
        if let Activations::Laid { shared, .. } = self.x
            && sweep.packed.is_empty()
        {
            return self.load_operands(sweep, at, (shared, stage));
        }
        let matrices = sweep.count();
        let (tiles, tall) = (self.tiling.tiles, self.tiling.tall(matrices));
        let first = at.block * (EDGE * tall) + lane_id() / 4u32;
        for load in 0..self.tiling.per_step(sweep.format) {
            let run = self.run(sweep, at.step, load).min(self.runs(sweep) - 1u32);
            let copy = |m: usize, row: Val<u32>, half: Val<u32>| {
                let (row, weights) = (row.min(sweep.out - 1u32), &sweep.packed[m]);
                let to = self.place(sweep, stage, load, half, m as u32);
                weights.copy(weights.row(row), run, (self.ring(), to));
            };
            if self.tiling.share == Share::Terms {
                for half in 0..2 * tiles {
                    let row = first + EDGE / 2 * half;
                    (0..sweep.packed.len()).for_each(|m| copy(m, row, half.val()));
                }
                continue;
            }
            // Each simdgroup copies the rows of its own sums.
            let slots = tall / tiles;
            let first = first + simd_id() % slots * (EDGE * tiles);
            for m in 0..sweep.packed.len() {
                let halves = 0..2 * tiles;
                let all = || {
                    halves.for_each(|half| copy(m, first + half * (EDGE / 2), half.val()));
                };
                match matrices {
                    1 => all(),
                    _ => test((simd_id() / slots).eq(m as u32)).then(all).otherwise(|| {}),
                }
            }
        }
    }

    /// Whether a stage has the weights of a step row by row, 128 bytes each: where two 16-byte runs
    /// of four lanes are neighbours.
    fn in_rows(&self, sweep: &Sweep) -> bool {
        let format = sweep.format;
        format.packing().is_none()
            && self.tiling.share == Share::Terms
            && self.tiling.per_step(format) == 2
    }

    /// As [`Walk::load`], row by row: eight lanes copy neighbouring runs of one.
    #[track_caller]
    fn load_rows(&self, sweep: &Sweep, at: Place, stage: Val<u32>) {
        let (run, rows) = (lane_id() % ROW_RUNS, 32 / ROW_RUNS);
        let first = self.place_of(sweep, at.step) * ROW_RUNS;
        let from = (first + run).min(self.runs(sweep) - 1u32);
        let block = at.block * (EDGE * self.tiling.tiles);
        for turn in 0..EDGE * self.tiling.tiles / rows {
            let row = lane_id() / ROW_RUNS + turn * rows;
            let matrix_row = (block + row).min(sweep.out - 1u32);
            for (m, weights) in (0..).zip(&sweep.packed) {
                let to = self.place_in_rows(sweep, stage, (row, run), m);
                weights.copy_run(weights.row(matrix_row), from, (self.ring(), to));
            }
        }
    }

    /// As [`Walk::load`], as warpgroups read them: eight lanes copy 128 bytes of one row.
    #[track_caller]
    fn load_operands(&self, sweep: &Sweep, at: Place, (laid, stage): (Shared, Val<u32>)) {
        let units = ROW / UNIT;
        let (unit, own) = (thread_id() % units, thread_id() / units);
        let (matrices, apart) = (sweep.count(), self.tiling.threads() / units);
        let each = EDGE * self.tiling.tall(matrices);
        let first = self.place_of(sweep, at.step) * self.tiling.terms(sweep.format);
        for block in 0..self.tiling.terms(sweep.format) / ROW {
            let begin = self.weights(sweep.format, stage, block);
            let column = (first + (unit * UNIT + block * ROW)).min(self.width - UNIT);
            for pass in 0..matrices * each / apart {
                let row = own + pass * apart;
                let (m, begun) = (pass * apart / each, pass * apart % each);
                let matrix_row = (at.block * each + own + begun).min(sweep.out - 1u32);
                let to = begin + row * ROW + (unit ^ (row % 8u32)) * UNIT;
                let from = matrix_row * self.width + column;
                copy_async(laid, to, sweep.operands[m as usize], from, UNIT as u8, None);
            }
        }
    }

    /// Where a run of a row of a block and of a matrix lies in a stage that has rows: halves of
    /// every other row change places, so that the eight lanes that read at once, four of each of
    /// two rows, use all banks.
    #[track_caller]
    fn place_in_rows(
        &self,
        sweep: &Sweep,
        stage: Val<u32>,
        (row, run): (Val<u32>, Val<u32>),
        m: u32,
    ) -> Val<u32> {
        let activations = self.tiling.rows * self.tiling.stride(sweep.format);
        let tile = row / EDGE * sweep.count() + m;
        let run = run ^ (row % 2u32 * (ROW_RUNS / 2));
        let inside = (tile * EDGE + row % EDGE) * (4 * ROW_RUNS) + run * 4u32;
        self.own + stage * self.stage + (inside + activations)
    }

    /// Where the words of a load lie in a stage: of the upper or the lower half of a tile's rows,
    /// and of a matrix.
    #[track_caller]
    fn place(&self, sweep: &Sweep, stage: Val<u32>, load: u32, half: Val<u32>, m: u32) -> Val<u32> {
        let format = sweep.format;
        let before = half + load * 2 * self.tiling.tiles;
        let before = match self.tiling.share {
            Share::Sums | Share::Warpgroups { .. } => before * SIMDS + simd_id(),
            Share::Terms => before * sweep.count() + m,
        };
        let activations = self.tiling.activations(format);
        self.own + stage * self.stage + (before * format.copied() + activations)
    }

    /// Begins to copy the activations of a step to a stage; zeros past the ends.
    #[track_caller]
    fn copy(&self, sweep: &Sweep, step: Val<u32>, stage: Val<u32>) {
        let format = sweep.format;
        let (terms, stride) = (self.tiling.terms(format), self.tiling.stride(format));
        let first = self.place_of(sweep, step) * terms;
        let per_row = terms / UNIT;
        // Of a simdgroup's terms its lanes copy all, of those of all simdgroups all threads.
        let (index, copying) = match self.tiling.share {
            Share::Terms => (lane_id(), 32),
            Share::Sums | Share::Warpgroups { .. } => (thread_id(), self.tiling.threads()),
        };
        let (unit, row) = (index % per_row, index / per_row);
        let column = first + unit * UNIT;
        let inside = column.lt(self.width);
        let apart = copying / per_row;
        let rows = self.tiling.rows;
        for pass in 0..rows.div_ceil(apart) {
            let row = row + pass * apart;
            let from = self.first_row + row;
            let to = match self.x {
                Activations::Words(_) => {
                    let place = unit ^ self.swapped(format, unit, row);
                    self.own + stage * self.stage + row * stride + place * (UNIT / 2)
                }
                Activations::Laid { .. } => {
                    let to = self.laid(format, stage, unit / (ROW / UNIT)) + row * ROW;
                    to + ((unit % (ROW / UNIT)) ^ (row % 8u32)) * UNIT
                }
            };
            let keep = Some(inside & from.lt(self.rows));
            let from = from * self.width + column;
            let from = match self.x {
                Activations::Words(_) => from / 2u32,
                Activations::Laid { .. } => from,
            };
            let copy = || match self.x {
                Activations::Words(x) => copy_async(self.ring(), to, x, from, 4, keep),
                Activations::Laid { x, shared, .. } => {
                    copy_async(shared, to, x, from, UNIT as u8, keep);
                }
            };
            if (pass + 1) * apart <= rows {
                copy();
            } else {
                test(row.lt(rows)).then(copy).otherwise(|| {});
            }
        }
    }

    /// The bits in which the place of a unit in a row of activations differs from its number: the
    /// eight lanes that read 16 bytes at once, four of each of two rows, then use all banks.
    #[track_caller]
    fn swapped(&self, format: Format, unit: Val<u32>, row: Val<u32>) -> Val<u32> {
        // A run has 1, 2, 4 or 8 units, and a lane's first is a multiple of that: the bits that make
        // it 8 or more go to the low ones, which are free, and the row's to another.
        let (apart, by_row) = match format.run() / UNIT {
            1 if self.tiling.terms(format) < 8 * UNIT => return 0u32.val(),
            1 => (0, 4),
            2 => (0, 1),
            4 => (1, 2),
            _ => (3, 4),
        };
        let by_row = row % 2u32 * by_row;
        if apart == 0 { by_row } else { by_row ^ ((unit / 8u32) & apart) }
    }

    /// Where a block of a stage's terms begins.
    #[track_caller]
    fn laid(&self, format: Format, stage: Val<u32>, block: impl IntoVal<u32>) -> Val<u32> {
        stage * self.tiling.laid(format) + block.val() * (self.tiling.rows * ROW)
    }

    /// Likewise of 16-bit weights, behind all activations of the stage.
    #[track_caller]
    fn weights(&self, format: Format, stage: Val<u32>, block: u32) -> Val<u32> {
        let rows = self.tiling.terms(format) / ROW * self.tiling.rows + block * (EDGE * SIMDS);
        stage * self.tiling.laid(format) + rows * ROW
    }

    /// Adds the products of a step to the sums, by warpgroups, each of which has 64 rows of weights.
    #[track_caller]
    fn sum_operands(&self, sweep: &Sweep, (laid, stage): (Shared, Val<u32>), sums: Frags) {
        let own = simd_id() / 4u32 * (4 * EDGE * ROW);
        wgmma_fence();
        for block in 0..self.tiling.terms(sweep.format) / ROW {
            let weights = self.weights(sweep.format, stage, block) + own;
            sums.wgmma((laid, weights), (laid, self.laid(sweep.format, stage, block)));
        }
        wgmma_commit();
    }

    /// Adds the products of a load of a step to the sums, by warpgroups: while the matrix unit
    /// multiplies the terms of one block, those of the next are converted.
    #[track_caller]
    fn sum_laid(
        &self,
        sweep: &Sweep,
        (step, load): (Val<u32>, u32),
        (laid, stage): (Shared, Val<u32>),
        sums: Frags,
    ) {
        let format = sweep.format;
        let run = self.run(sweep, step, load);
        let runs = [0, 1].map(|half| {
            let words = self.words(sweep, stage, load, half, 0);
            let run = sweep.packed[0].run(&words, run);
            (run.scaled(), run)
        });
        let blocks = 4 * format.run() / ROW;
        let first = self.laid(format, stage, load * blocks);
        for block in 0..blocks {
            let units = ROW / EDGE / 2;
            let left = |unit| {
                let [a, b] = runs.each_ref().map(|(scaled, run)| run.halves(scaled, unit));
                [0, 2].map(|i| Frag::left_of(Scalar::F16, [a[i], b[i], a[i + 1], b[i + 1]]))
            };
            let left: Vec<Frag> = (block * units..(block + 1) * units).flat_map(left).collect();
            wgmma_fence();
            sums.wgmma_of(&left, (laid, first + block * (self.tiling.rows * ROW)));
            wgmma_commit();
            wgmma_wait(1);
        }
    }

    /// Adds the products of a load of a step to the sums.
    #[track_caller]
    fn sum(&self, sweep: &Sweep, step: Val<u32>, load: u32, stage: Val<u32>, sums: Frags) {
        let format = sweep.format;
        let run = self.run(sweep, step, load);
        // Of each tile and matrix, the runs of the two matrix rows that this lane has.
        let mut tiles = Vec::new();
        for tile in 0..self.tiling.tiles {
            for (m, weights) in sweep.packed[..self.matrices(sweep) as usize].iter().enumerate() {
                tiles.push([0, 1].map(|half| {
                    let words = self.words(sweep, stage, load, 2 * tile + half, m);
                    let run = weights.run(&words, run);
                    (run.scaled(), run)
                }));
            }
        }
        let wide = self.tiling.wide();
        let (stride, units) = (self.tiling.stride(format), format.run() / UNIT);
        let (row, first) = (lane_id() / 4u32, lane_id() % 4u32 * units);
        let base = self.own + stage * self.stage + row * stride;
        let first = first ^ self.swapped(format, first, row);
        for unit in 0..units {
            let at = base + (first ^ (load * 4 * units + unit)) * (UNIT / 2);
            let read = |eight: u32| -> Vec<Val<u32>> {
                if 8 * eight >= self.tiling.rows {
                    return vec![0u32.val(); 4];
                }
                let words = self.ring().get_vec(at + 8 * eight * stride, 4, LoadHint::None);
                words.into_iter().map(|word| self.rounded(word)).collect()
            };
            // Four terms of each of four lanes are two words: half of a unit.
            let right = |a: &[Val<u32>], b: &[Val<u32>]| {
                let of = |first: usize| [a[first], a[first + 1], b[first], b[first + 1]];
                [0, 2].map(|first| Frag::right_of(self.types.operand, of(first)))
            };
            let left = |runs: &[(Vec<Scaled>, WordRun); 2]| {
                let [upper, lower] = runs
                    .each_ref()
                    .map(|(scaled, run)| run.octet(scaled, unit, self.types.operand));
                [0, 2].map(|first| {
                    let words = [upper[first], lower[first], upper[first + 1], lower[first + 1]];
                    Frag::left_of(self.types.operand, words)
                })
            };
            let multiply = |i: usize, j: u32, left: Frag, right: Frag| {
                let sum = i as u32 * wide + j;
                sums.set(sum, sums.get(sum).mma(left, right));
            };
            match self.tiling.share {
                // Few activations: all wait for one tile after another.
                Share::Terms => {
                    let words: Vec<Vec<Val<u32>>> = (0..2 * wide).map(read).collect();
                    let rights: Vec<[Frag; 2]> =
                        words.chunks(2).map(|two| right(&two[0], &two[1])).collect();
                    for (i, runs) in tiles.iter().enumerate() {
                        let left = left(runs);
                        for half in 0..2 {
                            for (j, right) in rights.iter().enumerate() {
                                multiply(i, j as u32, left[half], right[half]);
                            }
                        }
                    }
                }
                // Few tiles: all wait for one row of activations after another.
                Share::Sums | Share::Warpgroups { .. } => {
                    let lefts: Vec<[Frag; 2]> = tiles.iter().map(left).collect();
                    for j in 0..wide {
                        let right = right(&read(2 * j), &read(2 * j + 1));
                        for half in 0..2 {
                            for (i, left) in lefts.iter().enumerate() {
                                multiply(i, j, left[half], right[half]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// The words of this lane's run of the matrix row that it has of each half of a tile.
    #[track_caller]
    fn words(
        &self,
        sweep: &Sweep,
        stage: Val<u32>,
        load: u32,
        half: u32,
        m: usize,
    ) -> Vec<Val<u32>> {
        if self.in_rows(sweep) {
            let row = lane_id() / 4u32 + half * (EDGE / 2);
            let run = lane_id() % 4u32 + 4 * load;
            let from = self.place_in_rows(sweep, stage, (row, run), m as u32);
            return self.ring().get_vec(from, 4, LoadHint::None);
        }
        let from = self.place(sweep, stage, load, half.val(), m as u32);
        sweep.packed[m].copied(self.ring(), from)
    }

    /// Two activations as operands.
    #[track_caller]
    fn rounded(&self, word: Val<u32>) -> Val<u32> {
        if self.types.x == self.types.operand {
            return word;
        }
        let [a, b] = crate::packed::halves(self.types.x, word);
        a.pack(b, self.types.operand)
    }

    /// Hands over the sums of a block, and clears them.
    #[track_caller]
    fn finish(
        &self,
        sweep: &Sweep,
        index: usize,
        block: Val<u32>,
        sums: Frags,
        finish: &mut impl FnMut(Total),
    ) {
        let (wide, matrices) = (self.tiling.wide(), sweep.count());
        let (tiles, tall) = (self.tiling.tiles, EDGE * self.tiling.tall(matrices));
        let (row, col) = (thread_id() % EDGE, thread_id() / EDGE);
        let place = |tile: Val<u32>| tile * (EDGE * SPARE);
        let in_registers = self.matrices(sweep);
        for i in 0..tiles {
            for j in 0..wide {
                for m in 0..in_registers {
                    let sum = (i * in_registers + m) * wide + j;
                    sums.get(sum).store(self.spare, place(simd_id() + m * SIMDS), SPARE);
                    sums.set(sum, Frag::filled(0.0));
                }
                barrier();
                let mut hand_over =
                    |output: Val<u32>, own: Val<u32>, sums: &dyn Fn(u32) -> Val<f32>| {
                        let to = self.first_row + own;
                        let exists =
                            output.lt(sweep.out) & own.lt(self.tiling.rows) & to.lt(self.rows);
                        test(exists)
                            .then(|| {
                                let sums = (0..matrices).map(sums).collect();
                                finish(Total { sweep: index, output, row: to, sums });
                            })
                            .otherwise(|| {});
                    };
                match self.tiling.share {
                    Share::Terms => {
                        let total = |m: u32| {
                            let at = row * SPARE + col;
                            let part =
                                |simd: u32| self.spare.get(at + place((simd + m * SIMDS).val()));
                            (1..SIMDS).fold(part(0), |sum, simd| sum + part(simd))
                        };
                        let output = block * tall + (row + i * EDGE);
                        hand_over(output, col + j * EDGE, &total);
                    }
                    // All threads have a tile of each matrix in hand, one after another.
                    Share::Sums | Share::Warpgroups { .. } => {
                        let columns = self.tiling.threads() / EDGE;
                        let apart = self.tiling.tall(matrices) / tiles;
                        let passes = EDGE / columns;
                        range(0u32, apart * passes).each(|turn| {
                            let (tile, pass) = (turn / passes, turn % passes);
                            let col = col + pass * columns;
                            let at = row * SPARE + col;
                            let total = |m: u32| self.spare.get(at + place(tile + m * apart));
                            let output = block * tall + tile * (EDGE * tiles) + (row + i * EDGE);
                            hand_over(output, col + j * EDGE, &total);
                        });
                    }
                }
                barrier();
            }
        }
    }
}

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] =
    &[Spec { name: "stream", cases: cases::cases, benches: cases::benches }];

/// Likewise, by warpgroups.
pub(crate) const LAID: &[Spec] = &[
    Spec { name: "stream_warpgroups", cases: cases::warpgroups, benches: cases::warpgroup_benches },
    lay::KERNEL,
    splits::KERNELS[0],
    splits::KERNELS[1],
];

#[cfg(test)]
mod tests;
