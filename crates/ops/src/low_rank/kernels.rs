//! Adapters on GPUs: `t = down x` before a product, `y += scale up t` behind it, row by row with
//! the factors of the row's seat. Kernels of rows that decode add that to their own sums ([`Low`]);
//! behind other products it is a launch, [`low_rank_up`].
//!
//! The sites that read one input are computed together. All seats' factors lie one after another:
//! of a seat, `down` has the ranks of its sites one site after another, so that it is one matrix;
//! `up` has the outputs of its sites likewise. Every site has room for
//! as many ranks, those that a seat does not use being zeros. A seat is a row's `seats` less one; a
//! row whose `seats` is 0 keeps what the product gave it, to the bit.
//!
//! [`low_rank_down`] computes few rows, each by itself. Where there are many, the rows of a seat
//! are multiplied together: that is [`moe_gemm`](crate::moe::moe_gemm), whose experts are the
//! seats.

use std::ops::Range;

use tile::dsl::*;
use tile::ir::LoadHint;
use tile::launch::{Extent, Mode, Requirement};

use super::cases;
use crate::linear;
use crate::linear::{
    Ahead, Finisher, GemvSchedule, Input, Norm, Overlap, Sums, Sweep, contract, holds,
    product_overlapping,
};
use crate::packed::{Format, PackedWeights};
use crate::sweep::{self, when};
use tile::case::Spec;

/// Launches to test and to time.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "low_rank_down", cases: cases::downs, benches: cases::down_benches },
    Spec { name: "low_rank_pick", cases: cases::picks, benches: cases::pick_benches },
    Spec { name: "low_rank_up", cases: cases::ups, benches: cases::up_benches },
    Spec { name: "low_rank_sites", cases: cases::sites, benches: cases::site_benches },
];

/// Ranks are padded to a multiple of this: their elements are read in vectors.
pub const RANKS: usize = 8;

/// Most ranks whose `up` a thread of many rows keeps in registers.
const HELD: u32 = 64;

/// Threads of a group that adds to outputs: one for each.
const THREADS: u32 = 128;

/// How few rows of `down` are multiplied: as products of floats are, in small groups, since there
/// are few sums.
pub fn schedule(width: u32, ranks: u32, from: Scalar, element: Scalar) -> GemvSchedule {
    let formats = [Format::Dense(element)];
    let decode = linear::Task::decode(&formats, width, ranks);
    let task = linear::Task { x: from, int8: false, ..decode };
    GemvSchedule { threads: 128, outputs: 1, ..GemvSchedule::pick(&task) }
}

/// `t[r, j] = sum_i down[seat of r, j, i] n[r, i]`; `n = rms_norm(x)` with the f32 weight `norm`,
/// or `x[rows, width]`. A row without an adapter has the sums of some seat, which are not read.
/// With `keeps`, `kept[rows, outer]` becomes `residual`, which the product may overwrite.
///
/// `t` `[rows, ranks]`, `seats` `[rows]`, `down` `[count, ranks, width]`.
#[kernel]
pub fn low_rank_down(
    x: In<{ from }>,
    t: Out<f32>,
    seats: In<u32>,
    width: Const<u32>,
    ranks: Const<u32>,
    count: Const<u32>,
    from: Scalar,
    element: Scalar,
    norm: bool,
    keeps: bool,
    schedule: GemvSchedule,
) {
    let format = Format::Dense(element);
    let norm = norm.then(Norm::declare);
    let down = PackedWeights::declare("down", format, width);
    let kept = keeps.then(|| {
        let outer = Const::<u32>::declare("outer");
        (<In>::declare("residual"), <Out>::declare("kept"), outer)
    });
    contract(&schedule, 1, &[("down", format, "ranks")]);
    launch(Mode::Vector, [dim("groups"), dim("rows"), fixed(1)], schedule.threads);
    holds("down", format.extent(dim("width")) * dim("ranks") * dim("count"));
    holds("x", dim("rows") * dim("width"));
    holds("t", dim("rows") * dim("ranks"));
    holds("seats", dim("rows"));
    if norm.is_some() {
        holds("norm", dim("width"));
    }
    for name in kept.iter().flat_map(|_| ["residual", "kept"]) {
        holds(name, dim("rows") * dim("outer"));
    }
    // Seats are the host's words, not the previous kernel's.
    let row = group_id_of(1);
    let seat = seats.get(row).max(1u32).min(count) - 1u32;
    let input = Input::new(x, 1, width, norm, schedule.activations, &[format]).starting_at(row);
    let sweep = Sweep::new(vec![down.starting_at(seat * ranks)], ranks);
    let (overlap, finisher) = (Overlap::Leads, Finisher::First);
    product_overlapping(
        &schedule,
        input,
        &[sweep],
        overlap,
        finisher,
        |Sums { output, sums, .. }| {
            t.set(row * ranks + output, sums[0]);
        },
    );
    if let Some((residual, kept, outer)) = kept {
        let own = group_id() * schedule.threads + thread_id();
        range(own, outer).step(groups(0) * schedule.threads).each(|i| {
            kept.set(row * outer + i, residual.get(row * outer + i));
        });
    }
}

/// `t[r, j] = down[seat of r, tokens[r], j]`: a site at a table of embeddings.
///
/// `t` `[rows, ranks]`, `tokens` and `seats` `[rows]`, `down` `[count, vocab, ranks]`.
#[kernel]
pub fn low_rank_pick(
    tokens: In<u32>,
    seats: In<u32>,
    down: In<{ element }>,
    t: Out<f32>,
    vocab: Const<u32>,
    ranks: Const<u32>,
    count: Const<u32>,
    element: Scalar,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 32);
    holds("tokens", dim("rows"));
    holds("seats", dim("rows"));
    holds("down", dim("count") * dim("vocab") * dim("ranks"));
    holds("t", dim("rows") * dim("ranks"));
    sweep::begin();
    let row = group_id();
    let seat = seats.get(row).max(1u32).min(count) - 1u32;
    let from = (seat * vocab + tokens.get(row).min(vocab - 1u32)) * ranks;
    strided(ranks).each(|j| t.set(row * ranks + j, down.get(from + j)));
}

/// The further work of [`low_rank_up`], besides `y += scale up t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpEnding {
    /// Nothing.
    Plain,
    /// DoRA, for seats that have it: `y = kept + gain (y - kept) + offset`, where `kept` is there
    /// only if `residual`.
    Gains {
        /// Whether the product added a residual.
        residual: bool,
    },
}

impl UpEnding {
    fn gains(self) -> bool {
        matches!(self, UpEnding::Gains { .. })
    }

    fn residual(self) -> bool {
        matches!(self, UpEnding::Gains { residual: true })
    }
}

/// `yJ[r, o] += scales[s, J, 0] sum_k up[s, o of J, k] t[r, k of J]`, `s` the seat of row `r`, for
/// each output `yJ` `[rows, outJ]` of a type of `to`, and what `ending` says. A site that a seat's
/// adapter does not change has the scale 0. A threadgroup takes `block` rows, one after another.
///
/// `t` `[rows, sites * rank]`, `up` `[count, all, rank]`, `scales` `[count, sites, 2]`: scales, and
/// whether there are gains; `seats` `[rows]`, `all` being the sum of all `outJ`. With gains:
/// `gains` `[count, 2, all]`, the gains and the offsets.
#[kernel]
pub fn low_rank_up(
    t: In<f32>,
    up: In<{ element }>,
    scales: In<f32>,
    seats: In<u32>,
    rows: Arg<u32>,
    count: Const<u32>,
    to: &[Scalar],
    element: Scalar,
    rank: u32,
    block: u32,
    ending: UpEnding,
) {
    let sites = to.len() as u32;
    let (outputs, end, all) = outputs(to);
    let gains = ending.gains().then(|| <In>::declare("gains"));
    let kept = ending.residual().then(|| <In>::declare("kept"));
    let blocks = dim("rows").ceil_div(block);
    launch(Mode::Row, [all.clone().ceil_div(THREADS), blocks, fixed(1)], THREADS);
    if kept.is_some() {
        holds("kept", dim("rows") * dim("out0"));
    }
    contract_sites(["up", "scales"], rank, sites, dim("rows"), all, gains.is_some());
    sweep::begin();
    let factors = Factors { t, up, rank, sites, all: end };
    let changes = Changes { factors, scales, seats, count, gains };
    let column = group_id() * THREADS + thread_id();
    let held = match block > 1 && rank <= HELD {
        true => Held::Seat { values: Regs::new(rank, 0.0f32), seat: Var::new(u32::MAX) },
        false => Held::Nothing,
    };
    let first = group_id_of(1) * block;
    let each = |row: Val<u32>| {
        for (j, site) in outputs.iter().enumerate() {
            let inside = Order::ge(column, site.first) & Order::lt(column, site.first + site.width);
            // What is not changed is not written either.
            when(inside & Order::gt(seats.get(row), 0u32), || {
                let at = row * site.width + (column - site.first);
                let base = || kept.map_or(0.0f32.val(), |kept| kept.get(row * end + column));
                let y = changes.of((row, j as u32, column), &held, site.y.get(at), base);
                site.y.set(at, y);
            });
        }
    };
    match block {
        1 => each(first),
        _ => range(first, rows.min(first + block)).each(each),
    }
}

/// The adapters of a product whose matrices have sites, so that it adds `scale up t` to its own
/// sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Low {
    /// Element type of the factors.
    pub element: Scalar,
    /// Ranks that each site has room for.
    pub rank: u32,
    /// Whether seats may have DoRA's gains.
    pub gains: bool,
    /// The matrices that have sites: bit `j` is the `j`-th of the launch.
    pub sites: u32,
    /// Whether the launch in front is [`low_rank_down`] of the same activations, which then
    /// computes `t` beside the product's sums.
    pub beside: bool,
}

impl Low {
    /// The overlap of a product with the launch in front, and the lanes that finish its sums,
    /// which read `ahead`.
    pub(crate) fn ends(low: Option<Low>, ahead: Ahead<'_>) -> (Overlap, Finisher<'_>) {
        match low {
            Some(Low { beside: true, .. }) => (Overlap::Follows, Finisher::Each(ahead)),
            Some(_) => (Overlap::Any, Finisher::Each(ahead)),
            None => (Overlap::Any, Finisher::First),
        }
    }
}

/// The sites of a product that adds `scale up t` to its own sums: as [`low_rank_up`] has its
/// buffers, but for `site_up` and `site_scales`.
pub(crate) struct Sites {
    changes: Changes,
    /// For each matrix its site, and the site's first column among the columns of all sites.
    places: Vec<Option<(u32, Val<u32>)>>,
    /// Rows of `up` that are read ahead, of the matrices that are summed together.
    ahead: Vec<Regs<f32>>,
}

/// Most words of `up` that a lane reads ahead.
const AHEAD: u32 = 16;

impl Sites {
    /// Declares the buffers; `outs` has the number of rows of each matrix, as a value and for the
    /// contract; `rows` is the number of rows of activations. Of matrices whose sums a lane
    /// finishes `together`, [`Sites::ahead`] can read, if they fit few registers.
    #[track_caller]
    pub(crate) fn declare(
        low: Low,
        outs: &[(Val<u32>, Extent)],
        rows: Extent,
        together: u32,
    ) -> Sites {
        let (mut places, mut sites, mut end, mut all) = (Vec::new(), 0, None, None);
        for (j, (out, extent)) in outs.iter().enumerate() {
            if low.sites >> j & 1 == 0 {
                places.push(None);
                continue;
            }
            places.push(Some((sites, end.unwrap_or(0u32.val()))));
            sites += 1;
            end = Some(end.map_or(*out, |end| end + *out));
            all = Some(all.map_or(extent.clone(), |all: Extent| all + extent.clone()));
        }
        let t = In::declare("t");
        let up = <In>::stored("site_up", low.element);
        let scales = In::declare("site_scales");
        let seats = In::declare("seats");
        let count = Const::<u32>::declare("count");
        let gains = low.gains.then(|| <In>::declare("gains"));
        let all_rows = all.unwrap_or(fixed(0));
        contract_sites(["site_up", "site_scales"], low.rank, sites, rows, all_rows, low.gains);
        let all = end.unwrap_or(0u32.val());
        let factors = Factors { t, up, rank: low.rank, sites, all };
        let changes = Changes { factors, scales, seats, count, gains };
        let words = low.rank * low.element.bytes() as u32 / 4;
        let held = if words * together <= AHEAD { together } else { 0 };
        let ahead = (0..held).map(|_| Regs::stored(low.element, low.rank)).collect();
        Sites { changes, places, ahead }
    }

    /// Reads what [`Sites::change`] multiplies for one output of some matrices that are summed
    /// together, so that it is there when their sums are.
    #[track_caller]
    pub(crate) fn ahead(&self, matrices: Range<usize>, output: Val<u32>, row: Val<u32>) {
        for (matrix, to) in matrices.zip(&self.ahead) {
            let Some((site, first)) = self.places[matrix] else { continue };
            let Seated { seat, .. } = self.changes.seated(row, site);
            let factors = &self.changes.factors;
            let (from, lanes) = (factors.row(seat, first + output), factors.lanes());
            for k in (0..factors.rank).step_by(usize::from(lanes)) {
                let read = factors.up.get_raw_vec(from + k, lanes, LoadHint::None);
                (k..).zip(read).for_each(|(k, value)| to.set_raw(k, value));
            }
        }
    }

    /// Applies the seat of a row to the sum `y` of a matrix row, before a residual is added.
    #[track_caller]
    pub(crate) fn change(
        &self,
        matrix: usize,
        output: Val<u32>,
        row: Val<u32>,
        y: Val<f32>,
    ) -> Val<f32> {
        let Some((site, first)) = self.places[matrix] else { return y };
        let held = match &self.ahead[..] {
            [] => Held::Nothing,
            ahead => Held::Row(ahead[matrix % ahead.len()]),
        };
        self.changes.of((row, site, first + output), &held, y, || 0.0f32.val())
    }
}

/// States the contract of the buffers that [`Changes`] reads.
#[track_caller]
fn contract_sites(
    [up, scales]: [&str; 2],
    rank: u32,
    sites: u32,
    rows: Extent,
    all: Extent,
    gains: bool,
) {
    for name in ["t", up] {
        require(Requirement::Aligned(name.into(), 16));
    }
    holds("t", rows.clone() * (sites * rank));
    holds(up, dim("count") * all.clone() * rank);
    holds(scales, dim("count") * (2 * sites));
    holds("seats", rows);
    if gains {
        holds("gains", dim("count") * all * 2);
    }
}

/// The changes that seats make to the sums of sites.
struct Changes {
    factors: Factors,
    scales: In<f32>,
    seats: In<u32>,
    count: Val<u32>,
    gains: Option<In>,
}

/// The seat of a row at a site.
struct Seated {
    /// The seat whose factors are read: some seat's, where the row has none.
    seat: Val<u32>,
    /// Whether the row has one.
    some: Val<bool>,
    /// Where the site's scale lies.
    scale: Val<u32>,
}

impl Changes {
    /// The seat of a row.
    #[track_caller]
    fn seated(&self, row: Val<u32>, site: u32) -> Seated {
        let at = self.seats.get(row);
        let seat = at.max(1u32).min(self.count) - 1u32;
        let scale = (seat * self.factors.sites + site) * 2u32;
        Seated { seat, some: Order::gt(at, 0u32), scale }
    }

    /// Applies the seat of a row to `y`, in a column counted over all sites; `base` is the part
    /// of `y` that gains leave unchanged.
    #[track_caller]
    fn of(
        &self,
        (row, site, column): (Val<u32>, u32, Val<u32>),
        held: &Held,
        y: Val<f32>,
        base: impl FnOnce() -> Val<f32>,
    ) -> Val<f32> {
        // No branch in front of a read, so that all of them are under way together.
        let factors = &self.factors;
        let Seated { seat, some, scale: at } = self.seated(row, site);
        let (scale, gained) = (self.scales.get(at), self.scales.get(at + 1u32));
        let low = factors.sum(row, seat, site, column, held);
        // Fused where a compiler might fuse, so that all kernels have the same bits.
        let y = select(some & Order::ne(scale, 0.0f32), scale.fma(low, y), y);
        let Some(gains) = self.gains else { return y };
        let changed = Var::new(y);
        when(some & Order::ne(gained, 0.0f32), || {
            let at = seat * (factors.all * 2u32) + column;
            let base = base();
            let (gain, offset) = (gains.get(at), gains.get(at + factors.all));
            changed.set(base + (gain * (y - base) + offset));
        });
        changed.get()
    }
}

/// An output of the sites that are computed together.
#[derive(Clone, Copy)]
struct Site {
    y: InOut,
    /// Number of its columns, and the first of them among the columns of all sites.
    width: Val<u32>,
    first: Val<u32>,
}

/// Declares the outputs of sites: with them all their columns, as a value and for the contract.
#[track_caller]
fn outputs(to: &[Scalar]) -> (Vec<Site>, Val<u32>, Extent) {
    let (mut sites, mut end, mut all) = (Vec::new(), 0u32.val(), None);
    for (j, &scalar) in to.iter().enumerate() {
        let (y, out) = (format!("y{j}"), format!("out{j}"));
        let width = Const::<u32>::declare(&out);
        sites.push(Site { y: InOut::stored(&y, scalar), width, first: end });
        holds(&y, dim("rows") * dim(&out));
        end = if j == 0 { width } else { end + width };
        all = Some(all.map_or(dim(&out), |all: Extent| all + dim(&out)));
    }
    (sites, end, all.unwrap_or(fixed(0)))
}

/// The operands of `up t`.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub(super) t: In<f32>,
    pub(super) up: In,
    pub(super) rank: u32,
    pub(super) sites: u32,
    /// Columns of all sites.
    pub(super) all: Val<u32>,
}

/// The row of `up` that a thread has in registers.
pub(super) enum Held {
    /// None: it is read where it is multiplied.
    Nothing,
    /// That of a seat, from one row of `t` to the next.
    Seat {
        values: Regs<f32>,
        /// The seat that it belongs to; the greatest number if it belongs to none.
        seat: Var<u32>,
    },
    /// The one that is multiplied.
    Row(Regs<f32>),
}

impl Factors {
    /// Elements of `up` that are read together.
    fn lanes(&self) -> u8 {
        sweep::lanes(self.up.scalar()).min(8)
    }

    /// The first element of a row of `up`.
    #[track_caller]
    fn row(&self, seat: Val<u32>, column: Val<u32>) -> Val<u32> {
        (seat * self.all + column) * self.rank
    }

    /// `sum_k up[seat, column, k] t[row, k of the site]`, from the first rank to the last.
    #[track_caller]
    pub(super) fn sum(
        &self,
        row: Val<u32>,
        seat: Val<u32>,
        site: u32,
        column: Val<u32>,
        held: &Held,
    ) -> Val<f32> {
        let from = self.row(seat, column);
        let t = row * (self.sites * self.rank) + site * self.rank;
        let lanes = self.lanes();
        let low = |k: Val<u32>| -> Vec<Val<f32>> {
            let part = |i: u32| self.t.get_vec(t + k + 4 * i, 4, LoadHint::None);
            (0..u32::from(lanes) / 4).flat_map(part).collect()
        };
        let sum = Var::new(0.0f32);
        let add = |up: &[Val<f32>], low: &[Val<f32>]| {
            sum.set(up.iter().zip(low).fold(sum.get(), |sum, (u, t)| u.fma(*t, sum)));
        };
        let wide = u32::from(lanes);
        let parts = || (0..self.rank).step_by(usize::from(lanes));
        let of = |values: Regs<f32>, k: u32| -> Vec<Val<f32>> {
            (k..k + wide).map(|k| values.get(k)).collect()
        };
        match *held {
            Held::Seat { values, seat: known } => {
                when(Order::ne(known.get(), seat), || {
                    for k in parts() {
                        let read = sweep::load(self.up, from + k, lanes);
                        (k..).zip(read).for_each(|(k, value)| values.set(k, value));
                    }
                    known.set(seat);
                });
                parts().for_each(|k| add(&of(values, k), &low(k.val())));
            }
            Held::Row(values) => {
                let all: Vec<_> = parts().map(|k| low(k.val())).collect();
                parts().zip(&all).for_each(|(k, low)| add(&of(values, k), low));
            }
            Held::Nothing if self.rank <= HELD => {
                // All reads first, so that they are under way together.
                let read = |k: u32| (sweep::load(self.up, from + k, lanes), low(k.val()));
                let all: Vec<_> = parts().map(read).collect();
                all.iter().for_each(|(up, low)| add(up, low));
            }
            Held::Nothing => range(0u32, self.rank).step(wide).each(|k| {
                add(&sweep::load(self.up, from + k, lanes), &low(k));
            }),
        }
        sum.get()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_hold() {
        crate::linear::cases::prove(super::KERNELS);
    }
}
