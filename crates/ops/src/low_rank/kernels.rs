//! Adapters on GPUs: `t = down x` before a product, `y += scale up t` behind it, row by row with the factors of the row's seat.
//!
//! The sites that read one input are computed together. All seats' factors lie one after another: of a seat, `down` has the
//! ranks of its first site, then those of its next, so that it is one matrix; `up` has the outputs of its first site, then those
//! of its next. Every site has room for as many ranks, those that a seat does not use being zeros. A seat is a row's `seats`
//! less one; a row whose `seats` is 0 keeps what the product gave it, to the bit.
//!
//! [`low_rank_down`] computes few rows, each by itself. Of many, those of a seat are multiplied together: that is
//! [`moe_gemm`](crate::moe::moe_gemm), whose experts are the seats.

use tile::dsl::*;
use tile::ir::Hint;
use tile::launch::{Extent, Mode, Requirement};

use super::cases;
use crate::gate_up::gate;
use crate::linear::{Input, Norm, Schedule, Sums, Sweep, contract, holds, product};
use crate::packed::{Format, Weights};
use crate::sweep::{self, when};
use crate::{Unary, linear};
use tile::case::Spec;

/// Launches to test and to time.
pub const KERNELS: &[Spec] = &[
    Spec { name: "low_rank_down", cases: cases::downs, benches: cases::down_benches },
    Spec { name: "low_rank_pick", cases: cases::picks, benches: cases::pick_benches },
    Spec { name: "low_rank_up", cases: cases::ups, benches: cases::up_benches },
];

/// What ranks are a multiple of: their elements are read in vectors.
pub const RANKS: usize = 8;

/// Most ranks whose `up` a thread of many rows keeps in registers.
const HELD: u32 = 64;

/// Threads of a group that adds to outputs: one for each.
const THREADS: u32 = 128;

/// How few rows of `down` are multiplied: as products of floats are, in small groups, since there are few sums.
pub fn schedule(width: u32, ranks: u32, from: Scalar, element: Scalar) -> Schedule {
    let formats = [Format::Dense(element)];
    let decode = linear::Task::decode(&formats, width, ranks);
    let task = linear::Task { x: from, int8: false, ..decode };
    Schedule { threads: 128, outputs: 1, ..Schedule::pick(&task) }
}

/// `t[r, j] = sum_i down[seat of r, j, i] n[r, i]`; `n = rms_norm(x)` with the f32 weight `norm`, or `x[rows, width]`. A row
/// without an adapter has the sums of some seat, which nobody reads. With `keeps`, `kept[rows, outer]` becomes `residual`, which
/// the product may overwrite.
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
    schedule: Schedule,
) {
    let format = Format::Dense(element);
    let norm = norm.then(Norm::declare);
    let down = Weights::declare("down", format, width);
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
    let sweep = Sweep { weights: vec![down.starting_at(seat * ranks)], out: ranks };
    product(&schedule, input, &[sweep], |Sums { output, sums, .. }| {
        t.set(row * ranks + output, sums[0]);
    });
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

/// What [`low_rank_up`] does besides `y += scale up t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ending {
    /// Nothing.
    Plain,
    /// DoRA, for seats that have it: `y = kept + gain (y - kept) + offset`, where `kept` is there only if `residual`.
    Gains {
        /// Whether the product added a residual.
        residual: bool,
    },
    /// Of two sites, `z = act(y0) y1`, for every row.
    Gate(Unary, Scalar),
    /// DoRA, then the gate.
    GainsThenGate(Unary, Scalar),
}

impl Ending {
    fn gains(self) -> bool {
        matches!(self, Ending::Gains { .. } | Ending::GainsThenGate(..))
    }

    fn residual(self) -> bool {
        matches!(self, Ending::Gains { residual: true })
    }

    fn gate(self) -> Option<(Unary, Scalar)> {
        match self {
            Ending::Gate(act, to) | Ending::GainsThenGate(act, to) => Some((act, to)),
            Ending::Plain | Ending::Gains { .. } => None,
        }
    }
}

/// `yJ[r, o] += scales[s, J, 0] sum_k up[s, o of J, k] t[r, k of J]`, `s` the seat of row `r`, for each output `yJ`
/// `[rows, outJ]` of a type of `to`, and what `ending` says. A site that a seat's adapter does not change has the scale 0. A
/// threadgroup takes `block` rows, one after another.
///
/// `t` `[rows, sites * rank]`, `up` `[count, all, rank]`, `scales` `[count, sites, 2]`: scales, and whether there are gains; `seats` `[rows]`,
/// `all` being the sum of all `outJ`. With gains: `gains` `[count, 2, all]`, the gains and the offsets. With a gate the results are `z` `[rows, out0]`.
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
    ending: Ending,
) {
    let sites = to.len() as u32;
    let (outputs, end, all) = outputs(to);
    let gains = ending.gains().then(|| <In>::declare("gains"));
    let kept = ending.residual().then(|| <In>::declare("kept"));
    let gated = ending.gate().map(|(act, scalar)| (act, <Out>::stored("z", scalar)));
    let columns = if gated.is_some() { dim("out0") } else { all.clone() };
    let blocks = dim("rows").ceil_div(block);
    launch(Mode::Row, [columns.ceil_div(THREADS), blocks, fixed(1)], THREADS);
    for name in ["t", "up"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    holds("t", dim("rows") * (sites * rank));
    holds("up", dim("count") * all.clone() * rank);
    holds("scales", dim("count") * (2 * sites));
    holds("seats", dim("rows"));
    if gains.is_some() {
        holds("gains", dim("count") * all * 2);
    }
    if kept.is_some() {
        holds("kept", dim("rows") * dim("out0"));
    }
    if gated.is_some() {
        holds("z", dim("rows") * dim("out0"));
    }
    sweep::begin();
    let factors = Factors { t, up, rank, sites, all: end };
    // With a gate a thread has a column of both sites, else a column of one of them.
    let column = group_id() * THREADS + thread_id();
    let holding = block > 1 && rank <= HELD;
    let held: Vec<Held> = match gated {
        Some(_) => (0..2).map(|_| Held::new(rank, holding)).collect(),
        None => vec![Held::new(rank, holding)],
    };
    let first = group_id_of(1) * block;
    let change = |row: Val<u32>, site: u32, column: Val<u32>, held: &Held, y: Val<f32>| {
        let changed = Var::new(y);
        let at = seats.get(row);
        when(Order::gt(at, 0u32), || {
            let seat = at.min(count) - 1u32;
            let own = (seat * sites + site) * 2u32;
            let (scale, gained) = (scales.get(own), Order::ne(scales.get(own + 1u32), 0.0f32));
            when(Order::ne(scale, 0.0f32) | gained, || {
                let low = factors.sum(row, seat, site, column, held);
                changed.set(scale * low + y);
            });
            if let Some(gains) = gains {
                when(gained, || {
                    let at = seat * (factors.all * 2u32) + column;
                    let base = kept.map_or(0.0f32.val(), |kept| kept.get(row * end + column));
                    let (gain, offset) = (gains.get(at), gains.get(at + factors.all));
                    changed.set(base + (gain * (changed.get() - base) + offset));
                });
            }
        });
        changed.get()
    };
    let each = |row: Val<u32>| match gated {
        Some((act, z)) => {
            when(Order::lt(column, outputs[0].width), || {
                let both: Vec<Val<f32>> = (0..2usize)
                    .map(|j| {
                        let site = &outputs[j];
                        let y = site.y.get(row * site.width + column);
                        change(row, j as u32, site.first + column, &held[j], y)
                    })
                    .collect();
                z.set(row * outputs[0].width + column, gate(act, both[0]) * both[1]);
            });
        }
        None => {
            for (j, site) in outputs.iter().enumerate() {
                let inside =
                    Order::ge(column, site.first) & Order::lt(column, site.first + site.width);
                // What is not changed is not written either.
                when(inside & Order::gt(seats.get(row), 0u32), || {
                    let at = row * site.width + (column - site.first);
                    site.y.set(at, change(row, j as u32, column, &held[0], site.y.get(at)));
                });
            }
        }
    };
    match block {
        1 => each(first),
        _ => range(first, rows.min(first + block)).each(each),
    }
}

/// An output of the sites that are computed together.
#[derive(Clone, Copy)]
struct Site {
    y: InOut,
    /// Its columns, and the first of them among those of all.
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

/// What `up t` is made of.
#[derive(Clone, Copy)]
struct Factors {
    t: In<f32>,
    up: In,
    rank: u32,
    sites: u32,
    /// Columns of all sites.
    all: Val<u32>,
}

/// The row of `up` that a thread has in registers, from one row of `t` to the next.
#[derive(Clone, Copy)]
struct Held {
    values: Option<Regs<f32>>,
    /// Whose it is; the greatest number: nobody's.
    seat: Var<u32>,
}

impl Held {
    #[track_caller]
    fn new(rank: u32, holding: bool) -> Held {
        let values = holding.then(|| Regs::new(rank, 0.0f32));
        Held { values, seat: Var::new(u32::MAX) }
    }
}

impl Factors {
    /// `sum_k up[seat, column, k] t[row, k of the site]`, from the first rank to the last.
    #[track_caller]
    fn sum(
        &self,
        row: Val<u32>,
        seat: Val<u32>,
        site: u32,
        column: Val<u32>,
        held: &Held,
    ) -> Val<f32> {
        let from = (seat * self.all + column) * self.rank;
        let t = row * (self.sites * self.rank) + site * self.rank;
        let lanes = sweep::lanes(self.up.scalar()).min(8);
        let low = |k: Val<u32>| -> Vec<Val<f32>> {
            let part = |i: u32| self.t.get_vec(t + k + 4 * i, 4, Hint::None);
            (0..u32::from(lanes) / 4).flat_map(part).collect()
        };
        let sum = Var::new(0.0f32);
        let add = |up: &[Val<f32>], low: &[Val<f32>]| {
            sum.set(up.iter().zip(low).fold(sum.get(), |sum, (u, t)| u.fma(*t, sum)));
        };
        let wide = u32::from(lanes);
        match held.values {
            Some(values) => {
                when(Order::ne(held.seat.get(), seat), || {
                    for k in (0..self.rank).step_by(lanes as usize) {
                        let read = sweep::load(self.up, from + k, lanes);
                        (k..).zip(read).for_each(|(k, value)| values.set(k, value));
                    }
                    held.seat.set(seat);
                });
                for k in (0..self.rank).step_by(lanes as usize) {
                    let up: Vec<Val<f32>> = (k..k + wide).map(|k| values.get(k)).collect();
                    add(&up, &low(k.val()));
                }
            }
            None if self.rank <= HELD => {
                // All reads first, so that they are under way together.
                let read = |k: u32| (sweep::load(self.up, from + k, lanes), low(k.val()));
                let all: Vec<_> = (0..self.rank).step_by(lanes as usize).map(read).collect();
                all.iter().for_each(|(up, low)| add(up, low));
            }
            None => range(0u32, self.rank).step(wide).each(|k| {
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
