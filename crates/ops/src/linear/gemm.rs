//! `gemm`: `y[r, o] = sum_i x[r, i] weight[o, i] + bias[o]` for many rows: prefill, batches. For a
//! few rows: `gemv`.
//!
//! A threadgroup computes a block of `bm x bn` results and walks along `i` in steps of `bk`. Blocks
//! of `x` and `weight` wait in shared memory, `stages` steps deep (`stage`): asynchronous copies
//! where memory holds operands as they are, else values that are read a step early and converted
//! (f32 activations, quantised weights). Each simdgroup multiplies its part with the matrix unit
//! (`multiply`), or in f32 where the operand type `T` is f32; where the GPU can, four of them
//! multiply together straight from shared memory (`warpgroup`).
//!
//! Threadgroups that run together take blocks of neighbouring rows and columns, `GROUP` rows of
//! blocks at a time, so that the second-level cache serves both operands.

pub(crate) mod cases;
pub(crate) mod multiply;
pub(crate) mod stage;
mod warpgroup;

use super::holds;
use crate::packed::Format;
use crate::tuned::{self, CardNumbers, ForGemm, SmallGroups, k, s, w};
use multiply::{Results, product, store};
use stage::{Ring, Rows, Side};
use tile::case::Spec;
use tile::dsl::*;
use tile::launch::{Extent, Mode, Requirement};

/// How a matrix product divides its work. Sizes are multiples of 16; `bm` and `bn` of 16 times
/// their simdgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmSchedule {
    /// Rows of results that a threadgroup computes.
    pub bm: u32,
    /// Columns of results.
    pub bn: u32,
    /// Terms of each sum that a step adds.
    pub bk: u32,
    /// Simdgroups along the rows.
    pub simds_m: u32,
    /// Simdgroups along the columns.
    pub simds_n: u32,
    /// Simdgroups that share each sum: each adds its part of every step, and the parts are added in
    /// their order at the end. `bk` is a multiple of 16 times as many.
    pub simds_k: u32,
    /// Steps in shared memory: at least 2 for warpgroups. With 1, the next step waits in registers
    /// until all have read the present one.
    pub stages: u32,
    /// Whether four simdgroups multiply 64 rows by all columns together. Then `bm` is a multiple of
    /// 64 with a simdgroup for every 16 rows, `bn` at most 256, and `bk` 64.
    pub warpgroups: bool,
}

/// The hardware that a schedule of a matrix product is picked for.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Bytes of shared memory of a threadgroup.
    pub shared: u32,
    /// Threadgroups that run at a time.
    pub parallel: u32,
    /// Whether four simdgroups can multiply together: `wgmma`, compute capability 9.0.
    pub wgmma: bool,
    /// The candidates.
    pub tuned: &'static CardNumbers,
}

impl GemmSchedule {
    /// Few rows, within Metal's 32 KiB: 28 KiB.
    pub const NARROW: GemmSchedule = s(16, 64, 64, 1, 4, 2);
    /// Many rows, within Metal's 32 KiB: 25 KiB.
    pub const SMALL: GemmSchedule = s(64, 64, 32, 2, 2, 2);
    /// As many, for formats of which one 16-byte load holds 64 weights: 32 KiB.
    pub const DEEP: GemmSchedule = s(32, 64, 64, 1, 4, 2);
    /// Large products with weights that are converted: 118 KiB.
    pub const MEDIUM: GemmSchedule = s(128, 128, 64, 2, 4, 3);
    /// Large products: 172 KiB.
    pub const LARGE: GemmSchedule = s(128, 256, 64, 2, 4, 3);
    /// Large products by warpgroups: 202 KiB.
    pub const WIDE: GemmSchedule = w(128, 256, 4);
    /// Products with fewer blocks, by warpgroups: 202 KiB.
    pub const SQUARE: GemmSchedule = w(128, 128, 6);
    /// Few rows, each sum shared by eight simdgroups: 75 KiB.
    pub const SHARED: GemmSchedule = k(16, 16);
    /// Products of f32: 20 KiB.
    pub const EXACT: GemmSchedule = s(64, 64, 16, 2, 2, 2);
    /// Products of f32 with few columns, as a router's: 27 KiB.
    pub const EXACT_SMALL: GemmSchedule = s(32, 32, 32, 2, 1, 3);

    /// The schedule for many small groups, each with one step of at least `run` terms in shared
    /// memory.
    fn small(small: &SmallGroups, rows: u32, run: u32) -> GemmSchedule {
        let (_, block) = up_to(small.blocks, rows, |(most, _)| *most);
        GemmSchedule { bk: run.max(block.bk), ..*block }
    }

    /// Every schedule that [`GemmSchedule::pick`] takes as it is, each once.
    pub fn all() -> Vec<GemmSchedule> {
        let mut all = vec![
            GemmSchedule::NARROW,
            GemmSchedule::SMALL,
            GemmSchedule::DEEP,
            GemmSchedule::EXACT,
            GemmSchedule::EXACT_SMALL,
        ];
        for CardNumbers { gemm, small_groups, .. } in
            [&tuned::APPLE, &tuned::NVIDIA, &tuned::HOPPER]
        {
            let small = small_groups.iter().flat_map(|small| small.blocks).map(|(_, block)| block);
            let simds =
                gemm.candidates.iter().flat_map(|(_, copied, converted)| [copied, converted]);
            let alike = gemm.alike.iter().flat_map(|(_, all)| *all);
            let (_, copied, converted) = gemm.warpgroups;
            let large = simds.copied().flatten().chain(copied).chain(converted).chain(alike);
            for schedule in small.chain(large) {
                if !all.contains(schedule) {
                    all.push(*schedule);
                }
            }
        }
        all
    }

    /// Threads of a group.
    pub fn threads(&self) -> u32 {
        32 * self.simds_m * self.simds_n * self.simds_k
    }

    /// Bytes of shared memory with operands of a type.
    pub fn shared_bytes(&self, operand: Scalar) -> u32 {
        let staged = self.stages * (self.bm + self.bn) * self.stride(operand);
        let spare =
            if operand == Scalar::F32 { 0 } else { self.threads() / 32 * 16 * multiply::SPARE };
        staged * operand.bytes() as u32 + 4 * spare
    }

    /// Elements between rows in shared memory: 16 bytes more than a row, so that eight rows lie in
    /// different banks. For warpgroups no more than a row, whose units change places instead.
    pub(crate) fn stride(&self, operand: Scalar) -> u32 {
        self.bk + if self.warpgroups { 0 } else { 16 / operand.bytes() as u32 }
    }

    /// Elements between terms in shared memory, of a matrix that lies turned: as many more than a
    /// block has columns as [`GemmSchedule::stride`] has more than a step has terms.
    pub(crate) fn turned_stride(&self, operand: Scalar) -> u32 {
        self.bn + 16 / operand.bytes() as u32
    }

    /// As [`GemmSchedule::shared_bytes`], with a right operand that lies turned.
    pub(crate) fn turned_bytes(&self, operand: Scalar) -> u32 {
        let along = self.stages * self.bn * self.stride(operand);
        let turned = self.stages * self.bk * self.turned_stride(operand);
        self.shared_bytes(operand) - along * operand.bytes() as u32
            + turned * operand.bytes() as u32
    }

    /// A schedule for `[rows, width] x [out, width]'` with operands of a type, among those that a
    /// device can run.
    pub fn pick(
        (rows, out): (u32, u32),
        operand: Scalar,
        format: Format,
        machine: Machine,
    ) -> GemmSchedule {
        let blocks = |s: &GemmSchedule| rows.div_ceil(s.bm).saturating_mul(out.div_ceil(s.bn));
        if operand == Scalar::F32 {
            if format.run() <= 16 && blocks(&GemmSchedule::EXACT) < 2 * machine.parallel {
                return GemmSchedule::EXACT_SMALL;
            }
            // Deeper steps, for formats with more weights to a load, leave less room for rows.
            let bk = format.run().max(16);
            let (bm, bn) = ((1024 / bk).min(64), (2048 / bk).min(64));
            return GemmSchedule { bm, bn, bk, ..GemmSchedule::EXACT };
        }
        if let Some(small) = &machine.tuned.small_groups {
            return GemmSchedule::small(small, rows, format.run());
        }
        let ForGemm { candidates, warpgroups, .. } = &machine.tuned.gemm;
        // Warpgroups read whole units of 16 bytes, which f32 weights, four at a time, do not fill.
        let whole = format.run() >= 8;
        let (_, copied, converted) = match machine.wgmma && whole && rows >= warpgroups.0 {
            true => warpgroups,
            false => up_to(candidates, rows, |(most, ..)| *most),
        };
        let candidates = if format == Format::Dense(operand) { copied } else { converted };
        let fitting: Vec<&GemmSchedule> =
            candidates.iter().filter(|s| s.shared_bytes(operand) <= machine.shared).collect();
        // A larger block reads less, if there are enough of them to keep the device busy.
        let busy = fitting.iter().find(|s| blocks(s) >= machine.parallel / 4 * 3);
        match busy.or(fitting.last()) {
            Some(schedule) => **schedule,
            None if rows <= 16 => GemmSchedule::NARROW,
            None if format.run() > 32 => GemmSchedule::DEEP,
            None => GemmSchedule::SMALL,
        }
    }

    /// A schedule whose sums are the same for any number of rows of a product, on a device that
    /// gives the same answers here: every row has its terms added in one order.
    pub fn alike(
        (rows, out): (u32, u32),
        operand: Scalar,
        format: Format,
        machine: Machine,
    ) -> GemmSchedule {
        let machine = Machine { wgmma: false, ..machine };
        let fits = |s: &&GemmSchedule| s.shared_bytes(operand) <= machine.shared;
        // What is picked adds 16 terms after 16, in every schedule but warpgroups'.
        if operand == Scalar::F32 || !fits(&&GemmSchedule::SHARED) {
            return GemmSchedule::pick((rows, out), operand, format, machine);
        }
        let blocks = |s: &GemmSchedule| rows.div_ceil(s.bm).saturating_mul(out.div_ceil(s.bn));
        let (_, candidates) = up_to(machine.tuned.gemm.alike, rows, |(most, _)| *most);
        let mut fitting = candidates.iter().filter(fits);
        let busy = fitting.find(|s| blocks(s) >= machine.parallel / 4 * 3);
        // Fewer rows a block read the weights more often, so that the last with as many as there
        // are is better.
        let most = candidates.iter().filter(fits).map(|s| s.bm).max();
        let last = || candidates.iter().filter(fits).rfind(|s| Some(s.bm) == most);
        *busy.or_else(last).unwrap_or(&GemmSchedule::SHARED)
    }

    /// For a label.
    pub(crate) fn name(&self) -> String {
        let GemmSchedule { bm, bn, bk, simds_m, simds_n, simds_k, stages, warpgroups } = self;
        match (warpgroups, simds_k) {
            (true, _) => format!("{bm}x{bn}x{bk}_wg{}_s{stages}", simds_m / 4),
            (false, 1) => format!("{bm}x{bn}x{bk}_{simds_m}x{simds_n}_s{stages}"),
            (false, _) => format!("{bm}x{bn}x{bk}_k{simds_k}_s{stages}"),
        }
    }
}

/// The first entry for at least `rows` rows, or the last.
fn up_to<T>(table: &'static [T], rows: u32, most: impl Fn(&T) -> u32) -> &'static T {
    let fits = table.iter().position(|entry| rows <= most(entry));
    &table[fits.unwrap_or(table.len() - 1)]
}

/// GemmTypes of activations, operands and results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmTypes {
    /// Element type of activations.
    pub x: Scalar,
    /// Element type that both operands are rounded to.
    pub operand: Scalar,
    /// Element type of results.
    pub y: Scalar,
}

/// Rows of blocks that are taken together.
const GROUP: u32 = 8;

/// `y[rows, out] = x[rows, width] weight[out, width]' + bias[out]`, operands rounded to their type,
/// summed in f32; the bias is f32.
#[kernel]
pub fn gemm(
    x: In<{ types.x }>,
    y: Out<{ types.y }>,
    rows: Arg<u32>,
    width: Const<u32>,
    out: Const<u32>,
    types: GemmTypes,
    format: Format,
    bias: bool,
    schedule: GemmSchedule,
) {
    let GemmSchedule { bm, bn, .. } = schedule;
    let blocks = dim("rows").ceil_div(bm) * dim("out").ceil_div(bn);
    launch(Mode::Tile, [blocks, fixed(1), fixed(1)], schedule.threads());
    contract("rows", types.operand, format, dim("out"));
    holds("x", dim("rows") * dim("width"));
    holds("y", dim("rows") * dim("out"));
    grid_trigger();
    // Where sums are shared, weights are asked for before the kernel in front is done.
    if schedule.simds_k == 1 {
        grid_wait();
    }
    let (block_m, block_n) = block(group_id(), (rows + (bm - 1)) / bm, (out + (bn - 1)) / bn);
    let (first_row, first_out) = (block_m * bm, block_n * bn);
    let operand = types.operand;
    let a = Side::activations(operand, x, Rows::Span(first_row, rows), width, &schedule);
    let columns = Rows::Span(first_out, out);
    let b = Side::weights(operand, "weight", format, columns, width, &schedule);
    let bias = bias.then(|| {
        holds("bias", dim("out"));
        <In>::declare("bias")
    });
    let ring = Ring { schedule, a, b, width };
    product(&ring, |Results { row, col, values }| {
        let (row, col) = (first_row + row, first_out + col);
        if row < rows && col < out {
            // Columns past the end are not written: they may have any bias.
            let shift = |i: usize| bias.map(|b| b.get((col + i as u32).min(out - 1u32)));
            let shifted = |(i, value): (usize, Val<f32>)| shift(i).map_or(value, |b| value + b);
            let values: Vec<_> = values.into_iter().enumerate().map(shifted).collect();
            store(y, row, col, out, &values);
        }
    });
}

/// The contract of all matrix products: alignment, and columns in whole copies.
pub(crate) fn contract(rows: &str, operand: Scalar, format: Format, weight_rows: Extent) {
    for name in ["x", "y", "weight"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    require(Requirement::Divisible(dim("width"), format.step().max(8)));
    let copied = format == Format::Dense(operand);
    let words = if copied { dim("width") } else { format.extent(dim("width")) };
    holds("weight", words * weight_rows);
    // Every product of sizes is computed in 32 bits.
    require(Requirement::AtMost(dim(rows), 1 << 24));
}

/// The block of results of a threadgroup: along columns within [`GROUP`] rows of blocks, rows
/// first.
#[track_caller]
pub(crate) fn block(group: Val<u32>, rows: Val<u32>, cols: Val<u32>) -> (Val<u32>, Val<u32>) {
    let per_band = cols * GROUP;
    let first = group / per_band * GROUP;
    let height = (rows - first).min(GROUP);
    let inside = group % per_band;
    (first + inside % height, inside / height)
}

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] =
    &[Spec { name: "gemm", cases: cases::cases, benches: cases::benches }];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(KERNELS);
    }

    #[test]
    fn schedules_fit_where_they_are_picked() {
        for format in Format::all() {
            for rows in [1, 16, 17, 128, 4096] {
                for operand in [Scalar::F16, Scalar::BF16, Scalar::F32] {
                    let (wgmma, tuned) = (false, &tuned::NVIDIA);
                    let least = Machine { shared: 32 << 10, parallel: 40, wgmma, tuned };
                    let apple = Machine { tuned: &tuned::APPLE, ..least };
                    let geforce = Machine { shared: 99 << 10, parallel: 128, ..least };
                    let ampere = Machine { shared: 163 << 10, parallel: 108, ..least };
                    let (wgmma, tuned) = (true, &tuned::HOPPER);
                    let hopper = Machine { shared: 227 << 10, parallel: 132, wgmma, tuned };
                    for machine in [least, apple, geforce, ampere, hopper] {
                        let schedule = GemmSchedule::pick((rows, 4096), operand, format, machine);
                        assert!(schedule.shared_bytes(operand) <= machine.shared, "{schedule:?}");
                        let warpgroups = machine.wgmma && format.run() >= 8;
                        assert!(warpgroups || !schedule.warpgroups, "{format:?}: {schedule:?}");
                        assert_eq!(schedule.bk % format.run().min(schedule.bk), 0);
                        assert!(format.run() <= schedule.bk, "{format:?}: {schedule:?}");
                        let tiles = (schedule.bm + schedule.bn) * schedule.stride(operand) * 2;
                        let small =
                            schedule.stages == 1 && (format.run() > 32 || tiles <= 10 << 10);
                        let exact = operand == Scalar::F32;
                        let small_groups = machine.tuned.small_groups.is_some();
                        assert!(exact || small == small_groups, "{format:?}: {schedule:?}");
                    }
                }
            }
        }
    }
}
