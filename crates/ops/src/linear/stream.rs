//! The products of the rows of many sequences, each of which decodes, with the rows of packed
//! matrices: `y[r, o] = sum_i x[r, i] weight[o, i]`. For one row to eight: `gemv`; for prompts:
//! `gemm`.
//!
//! Weights are read once for up to [`Tiling::rows`] rows of activations, and are the left operand
//! of the matrix unit: they go from memory, as they are, to places that only one lane reads, which
//! turns the words of its own runs into operands ([`Frag::left_of`]), whatever their format. A lane
//! has whole runs of the matrix rows `g` and `g + 8` of a tile (`g = lane / 4`), so the four lanes
//! of a `g` have four runs in a row; which terms a product of 16 then adds is a matter of order,
//! and the activations follow it.
//!
//! The simdgroups of a threadgroup share the terms of each sum, step by step, and add up what they
//! have at the end of a block of matrix rows, in their order. Each copies the activations of its
//! own terms, so that they meet nowhere else. How terms are shared follows from the format and the
//! number of columns alone, so a row's bits do not depend on how many rows there are.
//! [`Tiling::stages`] steps are under way, across the ends of blocks too, and the first ask for
//! their weights before the kernel in front is done. Both operands are copied asynchronously: what
//! waits in registers is waited for by whoever waits for anything.

mod cases;

use super::gemv::{Cursor, Place, Span, Sweep, spans};
use super::holds;
use crate::low_rank::kernels::{Low, Sites};
use crate::packed::{Format, Run, Scaled, Weights};
use crate::project::Part;
use crate::{Unary, real};
use tile::case::Spec;
use tile::dsl::*;
use tile::ir::Hint;
use tile::launch::{Mode, Requirement};

/// Rows of matrices, and of activations, of an operand of the matrix unit.
const EDGE: u32 = 16;
/// Activations that are copied together: 16 bytes, four words.
const UNIT: u32 = 8;
/// Simdgroups that share a sum.
const SIMDS: u32 = 8;
/// Floats between rows of the shared memory where simdgroups add up.
const SPARE: u32 = EDGE + 4;

/// How such a product divides its work. Every field is free: the same sums are added in the same
/// order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Tiles of 16 matrix rows that a threadgroup sums together, of each matrix of a pair.
    pub tiles: u32,
    /// Rows of activations that a threadgroup takes together: a multiple of 8.
    pub rows: u32,
    /// Runs that a lane copies per matrix row and step, at most: 1 or 2. Shorter steps leave room
    /// for more rows.
    pub loads: u32,
    /// Steps in shared memory, one of them in use: at least 2.
    pub stages: u32,
}

/// What a tiling is picked for.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    /// The formats of the matrices, in the order of the launch.
    pub formats: &'a [Format],
    /// Rows of all matrices: outputs.
    pub out: u32,
    /// Activation rows.
    pub rows: u32,
    /// Whether two matrices are read side by side.
    pub pair: bool,
    /// Bytes of shared memory that a threadgroup may have.
    pub shared: u32,
    /// Multiprocessors.
    pub processors: u32,
}

/// Steps in shared memory at most.
const STAGES: u32 = 6;
/// Stages of long steps, if not of shorter ones.
const ENOUGH: u32 = 4;
/// Tiles of sums at most: of 16 x 16, eight registers each.
const SUMS: u32 = 16;

impl Job<'_> {
    /// Matrices that are read side by side.
    fn matrices(&self) -> u32 {
        if self.pair { 2 } else { 1 }
    }

    /// Bytes of shared memory.
    fn bytes(&self, tiling: &Tiling) -> u32 {
        let stage = |format: &Format| tiling.stage(*format, self.matrices());
        let words = self.formats.iter().map(stage).max().unwrap_or(0);
        4 * SIMDS * (tiling.stages * words + self.matrices() * EDGE * SPARE)
    }

    /// About how long it takes with so many tiles, in hundredths of a tile's weights: as many
    /// rounds as the busiest multiprocessor has blocks, each with the activations to be read
    /// besides. Turns share the multiprocessors.
    fn cost(&self, tiling: &Tiling) -> u32 {
        let bits = |f: &Format| 32 * f.words() / f.run();
        let bits = self.formats.iter().map(bits).min().unwrap_or(16).max(1);
        let rounds = self.out.div_ceil(EDGE * tiling.tiles).div_ceil(tiling.apart(self));
        rounds * (100 * tiling.tiles * self.matrices() + 60 * tiling.rows / bits)
    }
}

impl Tiling {
    /// Whether matrices of a format are taken, with activations of a type: 16 bits, and runs of
    /// whole units.
    pub fn takes(format: Format, x: Scalar) -> bool {
        format.run() >= UNIT && matches!(x, Scalar::F16 | Scalar::BF16)
    }

    /// The best of those measured on an H200, of those that fit; none if none fits.
    pub fn pick(job: &Job) -> Option<Tiling> {
        let fits = |tiling: &Tiling| job.bytes(tiling) <= job.shared;
        let smallest = |rows| Tiling { tiles: 1, rows, loads: 1, stages: 2 };
        let most = (1..=8).rev().map(|eights| 8 * eights).find(|rows| fits(&smallest(*rows)))?;
        // As few turns as that allows, each with as few rows.
        let turns = job.rows.div_ceil(most).max(1);
        let rows = job.rows.div_ceil(turns).next_multiple_of(8).max(8);
        // More sums do not fit registers.
        let few = |t: &Tiling| t.tiles * job.matrices() * t.wide() <= SUMS;
        let tiling = [1, 2, 4]
            .map(|tiles| Tiling { tiles, ..smallest(rows) })
            .into_iter()
            .filter(|tiling| fits(tiling) && few(tiling))
            .min_by_key(|tiling| job.cost(tiling))?;
        let deepest = |loads: u32| {
            let of = |stages| Tiling { loads, stages, ..tiling };
            (2..=STAGES).rev().map(of).find(fits)
        };
        // Long steps, of which there is room for enough to wait for.
        deepest(2).filter(|tiling| tiling.stages >= ENOUGH).or_else(|| deepest(1))
    }

    /// Threads of a group.
    pub fn threads() -> u32 {
        32 * SIMDS
    }

    /// How many groups to launch: as many as are resident, one on each multiprocessor, or as have
    /// work. Any number is right.
    pub fn groups(&self, job: &Job) -> u32 {
        job.out.div_ceil(EDGE * self.tiles).min(self.apart(job)).max(1)
    }

    /// Multiprocessors that a turn has.
    fn apart(&self, job: &Job) -> u32 {
        (job.processors / job.rows.div_ceil(self.rows).max(1)).max(1)
    }

    /// For a label.
    pub(crate) fn name(&self) -> String {
        format!("{}x{}_l{}_s{}", self.tiles, self.rows, self.loads, self.stages)
    }

    /// Words of a simdgroup's stage: activations, then the words of each half of a tile and matrix
    /// of a block.
    fn stage(&self, format: Format, matrices: u32) -> u32 {
        let halves = 2 * self.tiles * matrices * self.per_step(format);
        self.rows * self.stride(format) + halves * 32 * format.words()
    }

    /// Runs of a lane in a step.
    fn per_step(&self, format: Format) -> u32 {
        loads(format).min(self.loads)
    }

    /// Steps in which a simdgroup takes the neighbouring terms that are its own.
    fn parts(&self, format: Format) -> u32 {
        loads(format) / self.per_step(format)
    }

    /// Terms that a simdgroup adds in a step.
    fn terms(&self, format: Format) -> u32 {
        4 * format.run() * self.per_step(format)
    }

    /// Words between rows of activations in shared memory, of which two are one: so much more than
    /// a row that those of neighbours lie in other banks, as far as whole sectors of 32 bytes
    /// allow, which are copied at once.
    fn stride(&self, format: Format) -> u32 {
        let words = self.terms(format) / 2;
        let apart = match words {
            16 => 0,
            _ if format.run() == UNIT => 16,
            _ => 8,
        };
        words + apart
    }

    /// Tiles along the rows of activations.
    fn wide(&self) -> u32 {
        self.rows.div_ceil(EDGE)
    }
}

/// Neighbouring runs of 16 bytes that a lane has of a matrix row: few where runs are long.
fn loads(format: Format) -> u32 {
    if format.run() < 32 { 2 } else { 1 }
}

/// Types of activations, operands and results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Types {
    /// Of activations: f16 or bf16.
    pub x: Scalar,
    /// What both operands are rounded to: f16 or bf16.
    pub operand: Scalar,
    /// Of results.
    pub y: Scalar,
}

/// What becomes of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Each matrix has results of its own.
    Store,
    /// The residual is added.
    Add,
    /// Two matrices of one format and size: `act(first) * second`.
    Gate(Unary),
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
    types: Types,
    matrices: &[Part],
    end: End,
    tiling: Tiling,
    low: Option<Low>,
) {
    let turns = dim("rows").ceil_div(tiling.rows);
    launch(Mode::Tile, [dim("groups"), turns, fixed(1)], Tiling::threads());
    holds("x", (dim("rows") * dim("width")).ceil_div(2));
    require(Requirement::Aligned("x".into(), 16));
    // Every product of sizes is computed in 32 bits.
    require(Requirement::AtMost(dim("rows"), 1 << 24));
    let residual = matches!(end, End::Add).then(|| <In>::stored("residual", types.y));
    if residual.is_some() {
        holds("residual", dim("out0") * dim("rows"));
    }
    let gate = matches!(end, End::Gate(_));
    let declared = declare(matrices, gate, types.y, width, low);
    let walk = Walk::new(tiling, types, x, rows, width, &declared.sweeps);
    walk.product(&declared.sweeps, |total| declared.finish(end, residual, total));
}

/// What a launch has beside its activations.
struct Declared {
    sweeps: Vec<Sweep>,
    /// For each matrix.
    biases: Vec<Option<In>>,
    /// For each sweep.
    results: Vec<Out>,
    sites: Option<Sites>,
}

/// Declares matrices, biases and results, and states what they require; `gate`: two matrices have
/// one result.
#[track_caller]
fn declare(
    matrices: &[Part],
    gate: bool,
    y: Scalar,
    width: Val<u32>,
    low: Option<Low>,
) -> Declared {
    let (sweeps, biases, results) = Default::default();
    let mut declared = Declared { sweeps, biases, results, sites: None };
    let mut outs = Vec::new();
    let mut step = UNIT;
    for (j, &Part { format, bias }) in matrices.iter().enumerate() {
        let name = |part: &str| format!("{part}{j}");
        let own = !gate || j == 0;
        let out = if own { name("out") } else { "out0".to_owned() };
        if own {
            let sweep = Sweep { weights: vec![], out: Const::<u32>::declare(&out) };
            declared.sweeps.push(sweep);
            declared.results.push(<Out>::stored(&name("y"), y));
            holds(&name("y"), dim(&out) * dim("rows"));
        }
        if let Some(sweep) = declared.sweeps.last_mut() {
            outs.push((sweep.out, dim(&out)));
            sweep.weights.push(Weights::declare(&name("weight"), format, width));
        }
        holds(&name("weight"), format.extent(dim("width")) * dim(&out));
        require(Requirement::Aligned(name("weight"), 16));
        step = step.max(format.step());
        declared.biases.push(bias.then(|| {
            holds(&name("bias"), dim(&out));
            <In>::declare(&name("bias"))
        }));
    }
    require(Requirement::Divisible(dim("width"), step));
    declared.sites = low.map(|low| Sites::declare(low, &outs, dim("rows")));
    declared
}

impl Declared {
    /// Writes one output.
    #[track_caller]
    fn finish(&self, end: End, residual: Option<In>, total: Total) {
        let Total { sweep, output, row, sums } = total;
        let shifted = |m: usize| {
            let bias = self.biases[sweep + m];
            let sum = bias.map_or(sums[m], |bias| sums[m] + bias.get(output));
            let changed = |sites: &Sites| sites.change(sweep + m, output, row, sum);
            self.sites.as_ref().map_or(sum, changed)
        };
        let at = output + self.sweeps[sweep].out * row;
        let value = match (end, residual) {
            (End::Gate(act), _) => {
                let gate = shifted(0);
                let gate = match act {
                    // A quotient costs nothing beside a row of weights, and is exact.
                    Unary::Silu => gate / ((-gate).exp() + 1.0),
                    _ => real::unary(act, gate),
                };
                gate * shifted(1)
            }
            (_, Some(residual)) => residual.get_with(at, Hint::Coherent) + shifted(0),
            _ => shifted(0),
        };
        self.results[sweep].set(at, value);
    }
}

/// A sum that is complete.
struct Total {
    /// Which sweep.
    sweep: usize,
    /// The matrix row.
    output: Val<u32>,
    /// The activation row.
    row: Val<u32>,
    /// One for each matrix of the sweep.
    sums: Vec<Val<f32>>,
}

/// How a simdgroup walks through blocks of matrix rows.
struct Walk {
    tiling: Tiling,
    types: Types,
    x: In<u32>,
    /// Activation rows of the launch, and the first of this group.
    rows: Val<u32>,
    first_row: Val<u32>,
    width: Val<u32>,
    /// Blocks between two of a group.
    stride: Val<u32>,
    /// Stages of each simdgroup: see [`Tiling::stage`].
    ring: Shared<u32>,
    /// The simdgroup's first word there, and the words of a stage.
    own: Val<u32>,
    stage: u32,
    /// Where simdgroups add up: `[matrices, simdgroups, 16, 16 + 4]`.
    spare: Shared<f32>,
}

impl Walk {
    #[track_caller]
    fn new(
        tiling: Tiling,
        types: Types,
        x: In<u32>,
        rows: Val<u32>,
        width: Val<u32>,
        sweeps: &[Sweep],
    ) -> Walk {
        let matrices = sweeps.iter().map(|s| s.weights.len()).max().unwrap_or(1) as u32;
        let words = |s: &Sweep| tiling.stage(s.weights[0].format(), s.weights.len() as u32);
        let stage = sweeps.iter().map(words).max().unwrap_or(0);
        let ring = Shared::<u32>::named("ring", SIMDS * tiling.stages * stage);
        let spare = Shared::<f32>::named("spare", matrices * SIMDS * EDGE * SPARE);
        let own = simd_id() * (tiling.stages * stage);
        let first_row = group_id_of(1) * tiling.rows;
        let stride = groups(0);
        Walk { tiling, types, x, rows, first_row, width, stride, ring, own, stage, spare }
    }

    /// Records the whole kernel: `finish` writes one output.
    #[track_caller]
    fn product(&self, sweeps: &[Sweep], mut finish: impl FnMut(Total)) {
        grid_trigger();
        let spans = spans(sweeps, EDGE * self.tiling.tiles, group_id(), self.stride);
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
            let total = span.trips * self.steps(sweep);
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
            range(0u32, total).each(|t| {
                let (at, to) = (here.get(), ahead.get());
                copy_wait(ahead_by as u8 - 1);
                // What came is seen, and nobody still reads the stage that is filled next.
                simd_barrier();
                let more = (t + ahead_by).lt(total);
                let next = (t + ahead_by) % self.tiling.stages;
                test(more)
                    .then(|| {
                        self.load(sweep, to, next);
                        self.copy(sweep, to.step, next);
                    })
                    .otherwise(|| {});
                copy_commit();
                for load in 0..self.tiling.per_step(sweep.weights[0].format()) {
                    self.sum(sweep, at.step, load, t % self.tiling.stages, sums);
                }
                test((at.step + 1u32).eq(self.steps(sweep)))
                    .then(|| self.finish(sweep, index, at.block, sums, &mut finish))
                    .otherwise(|| {});
                here.set(self.after(sweep, at));
                ahead.set(self.after(sweep, to));
            });
            copy_wait(0);
            if index + 1 < sweeps.len() {
                simd_barrier();
            }
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
        let last = step.eq(self.steps(sweep));
        let block = select(last, at.block + self.stride, at.block);
        Place { block, step: select(last, 0u32, step) }
    }

    /// Begins to copy the weights of the first steps.
    #[track_caller]
    fn begin(&self, sweep: &Sweep, span: &Span) {
        let total = span.trips * self.steps(sweep);
        let mut at = self.first(span);
        for t in 0..self.tiling.stages - 1 {
            let some = Order::lt(t.val(), total);
            test(some).then(|| self.load(sweep, at, t.val())).otherwise(|| {});
            at = self.after(sweep, at);
        }
    }

    /// Sums in registers for a block: `[tiles, matrices, wide]`.
    fn sums(&self, sweep: &Sweep) -> u32 {
        self.tiling.tiles * sweep.weights.len() as u32 * self.tiling.wide()
    }

    /// Runs of a row.
    #[track_caller]
    fn runs(&self, sweep: &Sweep) -> Val<u32> {
        self.width / sweep.weights[0].format().run()
    }

    /// Steps of a row.
    #[track_caller]
    fn steps(&self, sweep: &Sweep) -> Val<u32> {
        let format = sweep.weights[0].format();
        let (parts, terms) = (self.tiling.parts(format), SIMDS * self.tiling.terms(format));
        match parts {
            1 => (self.width + (terms - 1)) / terms,
            _ => (self.width + (parts * terms - 1)) / (parts * terms) * parts,
        }
    }

    /// The place of a step's terms among those of all simdgroups, in steps.
    #[track_caller]
    fn place_of(&self, format: Format, step: Val<u32>) -> Val<u32> {
        match self.tiling.parts(format) {
            1 => step * SIMDS + simd_id(),
            parts => (step / parts * SIMDS + simd_id()) * parts + step % parts,
        }
    }

    /// This lane's run for a load of a step.
    #[track_caller]
    fn run(&self, sweep: &Sweep, step: Val<u32>, load: u32) -> Val<u32> {
        let format = sweep.weights[0].format();
        let runs = 4 * self.tiling.per_step(format);
        self.place_of(format, step) * runs + (lane_id() % 4u32 + 4 * load)
    }

    /// Begins to copy the weights of a step to a stage, for all rows of a block. Rows and runs past
    /// the end are replaced by the last: the sums of those are not used, and the activations of
    /// these are zeros.
    #[track_caller]
    fn load(&self, sweep: &Sweep, at: Place, stage: Val<u32>) {
        let format = sweep.weights[0].format();
        let first = at.block * (EDGE * self.tiling.tiles) + lane_id() / 4u32;
        for load in 0..self.tiling.per_step(format) {
            let run = self.run(sweep, at.step, load).min(self.runs(sweep) - 1u32);
            for half in 0..2 * self.tiling.tiles {
                let row = (first + EDGE / 2 * half).min(sweep.out - 1u32);
                for (m, weights) in sweep.weights.iter().enumerate() {
                    let to = self.place(sweep, stage, load, half, m as u32);
                    weights.copy(weights.row(row), run, (self.ring, to));
                }
            }
        }
    }

    /// Where the words of a load lie in a stage: of the upper or the lower half of a tile's rows,
    /// and of a matrix.
    #[track_caller]
    fn place(&self, sweep: &Sweep, stage: Val<u32>, load: u32, half: u32, m: u32) -> Val<u32> {
        let format = sweep.weights[0].format();
        let matrices = sweep.weights.len() as u32;
        let before = (load * 2 * self.tiling.tiles + half) * matrices + m;
        let activations = self.tiling.rows * self.tiling.stride(format);
        self.own + stage * self.stage + (activations + before * 32 * format.words())
    }

    /// Begins to copy the activations of a step to a stage; zeros past the ends.
    #[track_caller]
    fn copy(&self, sweep: &Sweep, step: Val<u32>, stage: Val<u32>) {
        let format = sweep.weights[0].format();
        let (terms, stride) = (self.tiling.terms(format), self.tiling.stride(format));
        let per_row = terms / UNIT;
        let (unit, row) = (lane_id() % per_row, lane_id() / per_row);
        let column = self.place_of(format, step) * terms + unit * UNIT;
        let inside = column.lt(self.width);
        let apart = 32 / per_row;
        for pass in 0..self.tiling.rows.div_ceil(apart) {
            let row = row + pass * apart;
            let from = self.first_row + row;
            let to = self.own + stage * self.stage + row * stride + unit * (UNIT / 2);
            let keep = Some(inside & from.lt(self.rows));
            copy_async(self.ring, to, self.x, (from * self.width + column) / 2u32, 4, keep);
        }
    }

    /// Adds the products of a load of a step to the sums.
    #[track_caller]
    fn sum(&self, sweep: &Sweep, step: Val<u32>, load: u32, stage: Val<u32>, sums: Frags) {
        let format = sweep.weights[0].format();
        let run = self.run(sweep, step, load);
        // Of each tile and matrix, the runs of the two matrix rows that this lane has.
        let mut tiles = Vec::new();
        for tile in 0..self.tiling.tiles {
            for (m, weights) in sweep.weights.iter().enumerate() {
                tiles.push([0, 1].map(|half| {
                    let from = self.place(sweep, stage, load, 2 * tile + half, m as u32);
                    let words = weights.copied(self.ring, from);
                    let run = weights.run(&words, run);
                    (run.scaled(), run)
                }));
            }
        }
        let wide = self.tiling.wide();
        let (stride, units) = (self.tiling.stride(format), format.run() / UNIT);
        let base = self.own + stage * self.stage + lane_id() / 4u32 * stride;
        for unit in 0..units {
            let at = base + (lane_id() % 4u32 * units + (load * 4 * units + unit)) * (UNIT / 2);
            let read = |eight: u32| -> Vec<Val<u32>> {
                if 8 * eight >= self.tiling.rows {
                    return vec![0u32.val(); 4];
                }
                let words = self.ring.get_vec(at + 8 * eight * stride, 4, Hint::None);
                words.into_iter().map(|word| self.rounded(word)).collect()
            };
            let right: Vec<Vec<Val<u32>>> = (0..2 * wide).map(read).collect();
            // Four terms of each of four lanes are two words: half of a unit.
            let rights = [0, 2].map(|first| -> Vec<Frag> {
                let of = |two: &[Vec<Val<u32>>]| {
                    let [a, b] = [&two[0], &two[1]];
                    let words = [a[first], a[first + 1], b[first], b[first + 1]];
                    Frag::right_of(self.types.operand, words)
                };
                right.chunks(2).map(of).collect()
            });
            for (i, runs) in tiles.iter().enumerate() {
                let octet = |(scaled, run): &(Vec<Scaled>, Run)| {
                    run.octet(scaled, unit, self.types.operand)
                };
                let [upper, lower] = runs.each_ref().map(octet);
                for (first, rights) in [0, 2].into_iter().zip(&rights) {
                    let words = [upper[first], lower[first], upper[first + 1], lower[first + 1]];
                    let left = Frag::left_of(self.types.operand, words);
                    for (j, right) in rights.iter().enumerate() {
                        let sum = i as u32 * wide + j as u32;
                        sums.set(sum, sums.get(sum).mma(left, *right));
                    }
                }
            }
        }
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

    /// Adds up the simdgroups' sums, hands them over and clears them.
    #[track_caller]
    fn finish(
        &self,
        sweep: &Sweep,
        index: usize,
        block: Val<u32>,
        sums: Frags,
        finish: &mut impl FnMut(Total),
    ) {
        let (wide, matrices) = (self.tiling.wide(), sweep.weights.len() as u32);
        let (row, col) = (thread_id() % EDGE, thread_id() / EDGE);
        let place = |m: u32, simd: Val<u32>| (simd + m * SIMDS) * (EDGE * SPARE);
        for i in 0..self.tiling.tiles {
            for j in 0..wide {
                for m in 0..matrices {
                    let sum = (i * matrices + m) * wide + j;
                    sums.get(sum).store(self.spare, place(m, simd_id()), SPARE);
                    sums.set(sum, Frag::filled(0.0));
                }
                barrier();
                let output = block * (EDGE * self.tiling.tiles) + (row + i * EDGE);
                let own = col + j * EDGE;
                let to = self.first_row + own;
                let exists = output.lt(sweep.out) & own.lt(self.tiling.rows) & to.lt(self.rows);
                test(exists)
                    .then(|| {
                        let at = row * SPARE + col;
                        let part = |m, simd: u32| self.spare.get(at + place(m, simd.val()));
                        let total = |m| (1..SIMDS).fold(part(m, 0), |sum, s| sum + part(m, s));
                        let sums = (0..matrices).map(total).collect();
                        finish(Total { sweep: index, output, row: to, sums });
                    })
                    .otherwise(|| {});
                barrier();
            }
        }
    }
}

/// Launches to test and to time.
pub const KERNELS: &[Spec] =
    &[Spec { name: "stream", cases: cases::cases, benches: cases::benches }];

#[cfg(test)]
mod tests {
    use formats::DType;
    use tile::case::{Buffer, noise};
    use tile::launch::Numbers;

    use super::*;
    use crate::linear::cases::Matrix;

    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(KERNELS);
    }

    /// A row's bits are those that it has alone, whatever a group takes together, and however many
    /// groups there are.
    #[test]
    fn rows_have_the_same_bits_among_any_others() {
        let (out, width, most) = (40, 1280, 21);
        let values = noise(9, most * width);
        for format in [Format::Dense(Scalar::BF16), Format::Block(DType::Q4K)] {
            let matrix = Matrix::new(format, 5, out, width);
            let types = Types { x: Scalar::BF16, operand: Scalar::BF16, y: Scalar::F32 };
            let run = |rows: usize, tiling: Tiling, groups: u32| {
                let x = Buffer::floats(types.x, &values[..rows * width]);
                let numbers = Numbers::new().with("rows", rows as u32).with("groups", groups);
                let numbers = numbers.with("width", width as u32).with("out0", out as u32);
                let y = Buffer::zeros(types.y, rows * out);
                let mut buffers = [Buffer::raw(Scalar::U32, x.bytes), y, matrix.buffer()];
                let part = Part { format, bias: false };
                let kernel = stream(types, &[part], End::Store, tiling, None).record();
                tile::interp::run(&kernel, &numbers, &mut buffers).unwrap();
                let [_, y, _] = buffers;
                y.bytes
            };
            let alone = run(1, Tiling { tiles: 1, rows: 8, loads: 2, stages: 2 }, 3);
            // Tilings of few rows and of many, and launches in several turns.
            for (rows, tiles, together, loads, stages, groups) in [
                (1, 2, 16, 2, 3, 1),
                (3, 1, 8, 2, 4, 2),
                (9, 4, 24, 2, 2, 1),
                (21, 2, 32, 1, 2, 2),
                (21, 1, 8, 1, 5, 1),
                (21, 4, 24, 1, 2, 1),
            ] {
                let all = run(rows, Tiling { tiles, rows: together, loads, stages }, groups);
                assert_eq!(all[..alone.len()], alone, "{}: {rows} rows", format.name());
            }
        }
    }

    #[test]
    fn tilings_fit_where_they_are_picked() {
        let all = Format::all();
        for formats in all.chunks(1).chain(all.chunks(3)) {
            for (rows, pair) in [(1, false), (8, true), (24, false), (33, true), (200, false)] {
                for shared in [163 << 10, 227 << 10] {
                    let job = Job { formats, out: 4096, rows, pair, shared, processors: 132 };
                    let tiling = Tiling::pick(&job).expect("eight rows fit");
                    assert!(job.bytes(&tiling) <= shared, "{job:?}: {tiling:?}");
                    assert!(tiling.rows.is_multiple_of(8) && tiling.rows <= 64, "{tiling:?}");
                    let dense = formats.iter().all(|format| format.run() == UNIT);
                    assert!(!dense || rows != 200 || tiling.rows > 40, "few turns: {tiling:?}");
                }
                let job = Job { formats, out: 64, rows, pair, shared: 32 << 10, processors: 8 };
                assert_eq!(Tiling::pick(&job), None, "little shared memory");
            }
        }
    }
}
