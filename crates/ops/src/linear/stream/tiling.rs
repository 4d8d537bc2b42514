//! [`StreamTiling`]: how the products of [`super::stream`] divide their work, and which is picked
//! for a launch.

use crate::packed::Format;
use crate::tuned::{Cost, ForStream};
use tile::ir::ROW;
use tile::types::Scalar;

/// Rows of matrices, and of activations, of an operand of the matrix unit.
pub(super) const EDGE: u32 = 16;
/// Activations that are copied together: 16 bytes, four words.
pub(super) const UNIT: u32 = 8;
/// Simdgroups of a threadgroup.
pub(super) const SIMDS: u32 = 8;
/// Parts of each sum.
pub(super) const PARTS: u32 = 8;
/// Floats between rows of the shared memory where simdgroups add up.
pub(super) const SPARE: u32 = EDGE + 4;

/// How such a product divides its work. Every field is free: the same sums are added in the same
/// order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamTiling {
    /// The part of the work that a simdgroup has for itself.
    pub share: Share,
    /// Groups that share a multiprocessor's memory: 1 or 2.
    pub resident: u32,
    /// Tiles of 16 matrix rows that a simdgroup sums together, with [`Share::Terms`] of each matrix
    /// of a pair.
    pub tiles: u32,
    /// Rows of activations that a threadgroup takes together: a multiple of 8, and with
    /// [`Share::Sums`] of 16.
    pub rows: u32,
    /// Runs that a lane copies per matrix row and step, at most: 1 or 2. Shorter steps leave room
    /// for more rows.
    pub loads: u32,
    /// Steps in shared memory, one of them in use: at least 2.
    pub stages: u32,
}

/// The part of the work that a simdgroup has for itself in its threadgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Share {
    /// One part of each sum.
    Terms,
    /// The sums of its own matrix rows, for one matrix of a pair.
    Sums,
    /// Likewise, of 16 rows, with operands that warpgroups read: see
    /// [`stream_warpgroups`](super::stream_warpgroups).
    Warpgroups {
        /// Threadgroups that each have a part of every sum, neighbouring terms. Pairs are not split.
        splits: u32,
    },
}

/// The product that a tiling is picked for.
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
    /// Measurements.
    pub tuned: &'static ForStream,
}

/// Threadgroups that share a sum, at most.
const MOST_SPLITS: u32 = 8;
/// Steps that take as long as a threadgroup's beginning and end.
const SPLIT: u32 = 4;

/// Bytes of shared memory that each group takes for the driver.
const OWN: u32 = 1 << 10;

impl Job<'_> {
    /// Matrices that are read side by side.
    fn matrices(&self) -> u32 {
        if self.pair { 2 } else { 1 }
    }

    /// Bytes of shared memory.
    fn bytes(&self, tiling: &StreamTiling) -> u32 {
        let stage = |format: &Format| tiling.stage(*format, self.matrices());
        let words = self.formats.iter().map(stage).max().unwrap_or(0);
        let laid = |format: &Format| tiling.laid(*format) / 2;
        let laid = self.formats.iter().map(laid).max().unwrap_or(0);
        4 * (tiling.stages * (words + laid) + tiling.spare(self.matrices()))
    }

    /// Matrix rows, of each matrix of a pair, in a block.
    fn block(&self, tiling: &StreamTiling) -> u32 {
        tiling.block(self.matrices())
    }

    /// About how long it takes: as many rounds as the busiest multiprocessor has blocks, each of so
    /// many tiles, with the activations to be read besides. Turns share the multiprocessors.
    fn cost(&self, tiling: &StreamTiling) -> u32 {
        let rounds = self.out.div_ceil(self.block(tiling)).div_ceil(tiling.apart(self));
        let Cost { tile, tile_row, row } = match tiling.share {
            Share::Sums | Share::Warpgroups { .. } => self.tuned.own,
            Share::Terms if self.converts() => self.tuned.converted,
            Share::Terms => self.tuned.stored,
        };
        let tiles = tiling.tall(self.matrices()) * self.matrices();
        rounds * ((tile + tile_row * tiling.rows) * tiles + row * tiling.rows)
    }

    /// Whether weights are converted.
    fn converts(&self) -> bool {
        self.formats.iter().any(|format| format.packing().is_some())
    }
}

impl StreamTiling {
    /// Whether matrices of a format are taken, with activations of a type: 16 bits, and runs of
    /// whole units.
    pub fn takes(format: Format, x: Scalar) -> bool {
        format.run() >= UNIT && matches!(x, Scalar::F16 | Scalar::BF16)
    }

    /// The best by the device's numbers, of those that fit; none if none fits. Two groups are
    /// resident where pairs of matrices are converted for few rows: more simdgroups then hide what
    /// each waits for.
    pub fn pick(job: &Job) -> Option<StreamTiling> {
        let two = job.pair && job.rows <= job.tuned.two && job.converts();
        two.then(|| StreamTiling::pick_for(job, 2))
            .flatten()
            .or_else(|| StreamTiling::pick_for(job, 1))
    }

    /// Likewise, where this many groups are resident if they share terms.
    pub(super) fn pick_for(job: &Job, resident: u32) -> Option<StreamTiling> {
        let &ForStream { stages, enough, few, .. } = job.tuned;
        let terms = StreamTiling::of_terms(job, resident)?;
        let many = job.rows > few && job.converts();
        let sums = many.then(|| StreamTiling::of_sums(job)).flatten();
        let tiling = sums.into_iter().chain([terms]).min_by_key(|tiling| job.cost(tiling))?;
        let deepest = |loads: u32| {
            let of = |stages| StreamTiling { loads, stages, ..tiling };
            (2..=stages).rev().map(of).find(|tiling| tiling.fits(job))
        };
        // Long steps, of which there is room for enough to wait for.
        let enough = if tiling.loads == 2 { 2 } else { enough };
        deepest(2).filter(|tiling| tiling.stages >= enough).or_else(|| deepest(1))
    }

    /// For a launch by warpgroups, if its matrices are of one format and, if that is converted, have
    /// whole fours of runs in a row, which [`lay_rows`](super::lay_rows) turns about. Where they
    /// have too few rows for all multiprocessors, sums are split between threadgroups, which pays
    /// for `many` rows alone. Whether it is taken, and how, does not follow from the number of
    /// activation rows, since sums have other parts here.
    pub fn by_warpgroups(job: &Job, width: u32, many: bool) -> Option<StreamTiling> {
        let &[format, ..] = job.formats else { return None };
        let alike = job.formats.iter().all(|other| *other == format);
        let four = 4 * format.run();
        let turned = four >= ROW && width.is_multiple_of(four);
        if !alike || (job.converts() && !turned) {
            return None;
        }
        let of = |splits, rows, resident, stages| {
            let share = Share::Warpgroups { splits };
            StreamTiling { share, resident, tiles: 1, rows, loads: 2, stages }
        };
        let one = of(1, EDGE, 1, 2);
        let blocks = job.out.div_ceil(job.block(&one));
        let splits = match blocks >= job.processors {
            true => 1,
            false if many && !job.pair => {
                let steps = width.div_ceil(one.terms(format));
                let time = |splits: &u32| {
                    let rounds = (blocks * splits).div_ceil(2 * job.processors);
                    rounds * (steps.div_ceil(*splits) + SPLIT) + splits
                };
                (1..=MOST_SPLITS).min_by_key(time)?
            }
            false => return None,
        };
        let sizes = (1..=job.tuned.many / EDGE).rev().map(|tiles| tiles * EDGE);
        let most = sizes.into_iter().find(|rows| of(splits, *rows, 1, 2).fits(job))?;
        let turns = job.rows.div_ceil(most).max(1);
        let rows = job.rows.div_ceil(turns).next_multiple_of(EDGE).max(EDGE);
        let resident = |resident| {
            let deepest = (2..=job.tuned.stages).rev();
            deepest.map(move |stages| of(splits, rows, resident, stages))
        };
        resident(2).chain(resident(1)).find(|tiling| tiling.fits(job))
    }

    fn fits(&self, job: &Job) -> bool {
        job.bytes(self) <= (job.shared + OWN) / self.resident - OWN
    }

    /// The best of those whose simdgroups share terms, with the shortest and fewest steps.
    fn of_terms(job: &Job, resident: u32) -> Option<StreamTiling> {
        let share = Share::Terms;
        let of = |tiles, rows| StreamTiling { share, resident, tiles, rows, loads: 1, stages: 2 };
        let most = (1..=8).rev().map(|eights| 8 * eights).find(|rows| of(1, *rows).fits(job))?;
        // As few turns as that allows, each with as few rows.
        let turns = job.rows.div_ceil(most).max(1);
        let rows = job.rows.div_ceil(turns).next_multiple_of(8).max(8);
        // More sums do not fit registers.
        let most = job.tuned.sums / resident.pow(2);
        let few = |t: &StreamTiling| t.tiles * job.matrices() * t.wide() <= most;
        let best = |loads| {
            [1, 2, 4]
                .map(|tiles| StreamTiling { loads, ..of(tiles, rows) })
                .into_iter()
                .filter(|tiling| tiling.fits(job) && few(tiling))
                .min_by_key(|tiling| job.cost(tiling))
        };
        // 16-bit weights wait for memory, and so come in long pieces where all rows are together.
        let long = turns == 1 && !job.converts();
        long.then(|| best(2)).flatten().or_else(|| best(1))
    }

    /// Likewise, of those whose simdgroups have sums of their own.
    fn of_sums(job: &Job) -> Option<StreamTiling> {
        let turns = job.rows.div_ceil(job.tuned.many);
        let rows = job.rows.div_ceil(turns).next_multiple_of(EDGE);
        let (share, resident) = (Share::Sums, 1);
        let of = |tiles| StreamTiling { share, resident, tiles, rows, loads: 1, stages: 3 };
        // Each sum has two registers: a part, and the parts before.
        let few = |t: &StreamTiling| 2 * t.tiles * t.wide() <= job.tuned.sums;
        [1, 2, 4]
            .map(of)
            .into_iter()
            .filter(|tiling| tiling.fits(job) && few(tiling))
            .min_by_key(|tiling| job.cost(tiling))
    }

    /// Threads of a group.
    pub fn threads(&self) -> u32 {
        32 * SIMDS
    }

    /// How many groups to launch: as many as are resident, or as have work. Any number is right.
    pub fn groups(&self, job: &Job) -> u32 {
        job.out.div_ceil(job.block(self)).min(self.resident * self.apart(job)).max(1)
    }

    /// Multiprocessors that a turn has.
    fn apart(&self, job: &Job) -> u32 {
        (job.processors / job.rows.div_ceil(self.rows).max(1)).max(1)
    }

    /// For a label.
    pub(crate) fn name(&self) -> String {
        let share = match self.share {
            Share::Terms => "",
            Share::Sums => "_sums",
            Share::Warpgroups { .. } => "_warpgroups",
        };
        let splits = match self.splits() {
            1 => String::new(),
            splits => format!("_k{splits}"),
        };
        let resident =
            if self.resident > 1 { format!("_r{}", self.resident) } else { String::new() };
        format!(
            "{}x{}_l{}_s{}{resident}{share}{splits}",
            self.tiles, self.rows, self.loads, self.stages
        )
    }

    /// Matrix rows of a block, of each of so many matrices.
    pub fn block(&self, matrices: u32) -> u32 {
        EDGE * self.tall(matrices)
    }

    /// Tiles of 16 matrix rows of a block, of each matrix.
    pub(super) fn tall(&self, matrices: u32) -> u32 {
        match self.share {
            Share::Terms => self.tiles,
            Share::Sums | Share::Warpgroups { .. } => self.tiles * (SIMDS / matrices),
        }
    }

    /// Parts of a sum that a simdgroup computes, one after another.
    pub(super) fn turns(&self) -> u32 {
        match self.share {
            Share::Terms | Share::Warpgroups { .. } => 1,
            Share::Sums => PARTS,
        }
    }

    /// Parts of a sum that a threadgroup computes.
    pub(super) fn parts(&self) -> u32 {
        match self.share {
            Share::Terms | Share::Sums => PARTS,
            Share::Warpgroups { .. } => 1,
        }
    }

    /// Threadgroups that have a part of each sum.
    pub fn splits(&self) -> u32 {
        match self.share {
            Share::Terms | Share::Sums => 1,
            Share::Warpgroups { splits } => splits,
        }
    }

    /// Elements of a stage that warpgroups read: activations, and behind them 16-bit weights.
    pub(super) fn laid(&self, format: Format) -> u32 {
        let weights = if format.packing().is_none() { EDGE * SIMDS } else { 0 };
        match self.share {
            Share::Terms | Share::Sums => 0,
            Share::Warpgroups { .. } => (self.rows + weights) * self.terms(format),
        }
    }

    /// Words of the ring that a stage's activations take.
    pub(super) fn activations(&self, format: Format) -> u32 {
        match self.share {
            Share::Terms | Share::Sums => self.rows * self.stride(format),
            Share::Warpgroups { .. } => 0,
        }
    }

    /// Words of a stage: with shared terms for each simdgroup, else for all, activations, then the
    /// words of each half of a tile and matrix of a block.
    pub(super) fn stage(&self, format: Format, matrices: u32) -> u32 {
        let tall = match self.share {
            Share::Terms => self.tiles * matrices,
            Share::Sums | Share::Warpgroups { .. } => self.tiles * SIMDS,
        };
        let halves = 2 * tall * self.per_step(format);
        let all = self.activations(format) + halves * format.copied();
        match self.share {
            Share::Terms => SIMDS * all,
            Share::Warpgroups { .. } if format.packing().is_none() => 0,
            Share::Sums | Share::Warpgroups { .. } => all,
        }
    }

    /// Floats of the shared memory that sums pass through at the end of a block: a tile for each
    /// simdgroup, and where they share terms for each matrix.
    pub(super) fn spare(&self, matrices: u32) -> u32 {
        let tiles = match self.share {
            Share::Terms => SIMDS * matrices,
            Share::Sums | Share::Warpgroups { .. } => SIMDS,
        };
        tiles * EDGE * SPARE
    }

    /// Runs of a lane in a step.
    pub(super) fn per_step(&self, format: Format) -> u32 {
        loads(format).min(self.loads)
    }

    /// Steps that take the neighbouring terms of a part.
    pub(super) fn pieces(&self, format: Format) -> u32 {
        loads(format) / self.per_step(format)
    }

    /// Terms of a step, all of one part.
    pub(super) fn terms(&self, format: Format) -> u32 {
        4 * format.run() * self.per_step(format)
    }

    /// Words between rows of activations in shared memory, of which two are one.
    pub(super) fn stride(&self, format: Format) -> u32 {
        self.terms(format) / 2
    }

    /// A simdgroup's tiles along the rows of activations.
    pub(super) fn wide(&self) -> u32 {
        self.rows.div_ceil(EDGE)
    }
}

/// Neighbouring runs of 16 bytes that a lane has of a matrix row: few where runs are long.
fn loads(format: Format) -> u32 {
    if format.run() < 32 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuned::HOPPER;

    #[test]
    fn tilings_fit_where_they_are_picked() {
        let (mut all, tuned) = (Format::all(), &HOPPER.stream);
        all.retain(|format| StreamTiling::takes(*format, Scalar::BF16));
        all.extend(all.clone().into_iter().filter_map(Format::tiled));
        for formats in all.chunks(1).chain(all.chunks(3)) {
            for (rows, pair) in [(1, false), (8, true), (24, false), (33, true), (200, false)] {
                for shared in [163 << 10, 227 << 10] {
                    let (out, processors) = (4096, 132);
                    let job = Job { formats, out, rows, pair, shared, processors, tuned };
                    let tiling = StreamTiling::pick(&job).expect("eight rows fit");
                    assert!(job.bytes(&tiling) <= shared, "{job:?}: {tiling:?}");
                    assert!(
                        tiling.rows.is_multiple_of(8) && tiling.rows <= tuned.many,
                        "{tiling:?}"
                    );
                    let dense = formats.iter().all(|format| format.run() == UNIT);
                    assert!(!dense || rows != 200 || tiling.rows > 40, "few turns: {tiling:?}");
                }
                let (shared, processors) = (32 << 10, 8);
                let job = Job { formats, out: 64, rows, pair, shared, processors, tuned };
                assert_eq!(StreamTiling::pick(&job), None, "little shared memory");
            }
        }
    }
}
