//! The experts' products: [`moe_gemv`] pair by pair, [`moe_gemm`] expert by expert. Both give the
//! same rows in the same order. [`moe_gate_up`] makes both halves of each pair and gates them. [`moe_gemm_turned`] is the product with the matrices' other side,
//! of which gradients are made.

use super::group::tiles;
use crate::linear::gemm::multiply::{Results, product, store};
use crate::linear::gemm::stage::{Ring, Rows, Side};
use crate::linear::gemm::{self, block, contract};
use crate::linear::{self, GemvSchedule, Input, Sums, Sweep, holds};
use crate::map::Unary;
use crate::packed::{Format, PackedWeights};
use crate::real;
use tile::dsl::*;
use tile::launch::{Mode, Requirement};

/// The schedule of [`moe_gemm`] for `pairs` spread over `experts`: see
/// [`gemm::GemmSchedule::pick`].
pub fn pick_blocks(
    (pairs, experts, out): (u32, u32, u32),
    operand: Scalar,
    format: Format,
    machine: gemm::Machine,
) -> gemm::GemmSchedule {
    let experts = experts.max(1);
    let machine = gemm::Machine { parallel: machine.parallel.div_ceil(experts), ..machine };
    gemm::GemmSchedule::pick((pairs.div_ceil(experts), out), operand, format, machine)
}

/// The schedule of [`moe_gemm_turned`] for `pairs` spread over `experts`, whose results have
/// `width` columns.
pub fn pick_turned(
    (pairs, experts, width): (u32, u32, u32),
    operand: Scalar,
    format: Format,
    machine: gemm::Machine,
) -> gemm::GemmSchedule {
    let machine = gemm::Machine { wgmma: false, ..machine };
    // Weights pass through registers, whatever their format.
    let converted = Format::Dense(Scalar::F32);
    let schedule = match operand {
        Scalar::F32 => gemm::GemmSchedule::EXACT,
        _ => pick_blocks((pairs, experts, width), operand, converted, machine),
    };
    // A block has whole units of the matrix's rows.
    let whole = |s: gemm::GemmSchedule| gemm::GemmSchedule { bn: s.bn.max(format.run()), ..s };
    match whole(schedule) {
        schedule if schedule.turned_bytes(operand) <= machine.shared => schedule,
        _ => whole(gemm::GemmSchedule::NARROW),
    }
}

/// `y[p, o] = sum_i weight[ids[p], o, i] x[p / share, i] + bias[ids[p], o]`: a threadgroup stays
/// with one pair. `share` is how many pairs read the same row of `x`: `top_k` where tokens enter, 1
/// after.
///
/// `x` `[pairs / share, width]`, `y` `[pairs, out]`, `weight` `[experts * out, width]`, `ids`
/// `[pairs]`, `bias` `[experts, out]` in f32.
#[kernel]
pub fn moe_gemv(
    x: In<{ from }>,
    y: Out<{ to }>,
    ids: In<u32>,
    width: Const<u32>,
    out: Const<u32>,
    experts: Const<u32>,
    share: Const<u32>,
    from: Scalar,
    to: Scalar,
    format: Format,
    bias: bool,
    schedule: GemvSchedule,
) {
    let weight = PackedWeights::declare("weight", format, width);
    let bias = bias.then(|| <In>::declare("bias"));
    begin(&schedule, format, &["weight"], if bias.is_some() { &["bias"] } else { &[] });
    let (pair, expert) = own_pair(ids, experts);
    let input = Input::new(x, 1, width, None, schedule.activations, &[format]);
    let input = input.starting_at(pair / share);
    let sweep = Sweep::new(vec![weight.starting_at(expert * out)], out);
    linear::product(&schedule, input, &[sweep], |Sums { output, sums, .. }| {
        let sum = bias.map_or(sums[0], |bias| sums[0] + bias.get(expert * out + output));
        y.set(pair * out + output, sum);
    });
}

/// The value that the two halves of a pair become.
type HalvesGate = dyn Fn(Val<f32>, Val<f32>) -> Val<f32>;

/// `y[p, o] = act(g) u`: `g` and `u` are the products of [`moe_gemv`] by the matrices `gate` and
/// `up`, with their biases, summed side by side. Without `act` they are clamped and gated as
/// [`Gate::Clamped`](crate::experts::Gate) says, with its `limit` and `alpha`.
///
/// `x` `[pairs / share, width]`, `y` `[pairs, out]`, `gate` and `up` `[experts * out, width]`,
/// `ids` `[pairs]`, `gate_bias` and `up_bias` `[experts, out]` in f32.
#[kernel]
pub fn moe_gate_up(
    x: In<{ from }>,
    y: Out<f32>,
    ids: In<u32>,
    width: Const<u32>,
    out: Const<u32>,
    experts: Const<u32>,
    share: Const<u32>,
    from: Scalar,
    format: Format,
    act: Option<Unary>,
    bias: bool,
    schedule: GemvSchedule,
) {
    let halves = ["gate", "up"];
    let weights = halves.map(|name| PackedWeights::declare(name, format, width));
    let biases = bias.then(|| ["gate_bias", "up_bias"].map(<In>::declare));
    let gated: Box<HalvesGate> = match act {
        Some(act) => Box::new(move |gate, up| real::unary(act, gate) * up),
        None => {
            let [limit, alpha] = ["limit", "alpha"].map(Const::<f32>::declare);
            Box::new(move |gate, up| super::clamped(gate, up, limit, alpha))
        }
    };
    begin(&schedule, format, &halves, if bias { &["gate_bias", "up_bias"] } else { &[] });
    let (pair, expert) = own_pair(ids, experts);
    let input = Input::new(x, 1, width, None, schedule.activations, &[format]);
    let input = input.starting_at(pair / share);
    let weights = weights.map(|weights| weights.starting_at(expert * out)).to_vec();
    let sweep = Sweep::new(weights, out);
    linear::product(&schedule, input, &[sweep], |Sums { output, sums, .. }| {
        let half = |i: usize| {
            biases.map_or(sums[i], |biases| sums[i] + biases[i].get(expert * out + output))
        };
        let gated = gated(half(0), half(1));
        y.set(pair * out + output, gated);
    });
}

/// States the launch of a product pair by pair and the lengths of its buffers, of which `matrices`
/// and `biases` are the experts', and waits: which weights are read is the previous kernels' result,
/// so that nothing can be read early.
#[track_caller]
fn begin(schedule: &GemvSchedule, format: Format, matrices: &[&str], biases: &[&str]) {
    let named: Vec<_> = matrices.iter().map(|name| (*name, format, "out")).collect();
    linear::contract(schedule, 1, &named);
    launch(Mode::Vector, [dim("groups"), dim("pairs"), fixed(1)], schedule.threads);
    for name in matrices {
        holds(name, format.extent(dim("width")) * dim("out") * dim("experts"));
    }
    holds("x", dim("pairs").ceil_div(dim("share")) * dim("width"));
    holds("y", dim("pairs") * dim("out"));
    holds("ids", dim("pairs"));
    for name in biases {
        holds(name, dim("experts") * dim("out"));
    }
    grid_wait();
}

/// A threadgroup's pair, and its expert.
#[track_caller]
fn own_pair(ids: In<u32>, experts: Val<u32>) -> (Val<u32>, Val<u32>) {
    let pair = group_id_of(1);
    (pair, ids.get(pair).min(experts - 1u32))
}

/// As [`moe_gemv`], with pairs grouped by [`super::moe_group`] in blocks of
/// [`gemm::GemmSchedule::bm`]: a threadgroup computes a block of one expert's rows. Operands are
/// rounded to their type.
///
/// `order` `[pairs]`, `offsets` `[experts + 1]` and `blocks` `[tiles, 2]` are that kernel's.
#[kernel]
pub fn moe_gemm(
    x: In<{ types.x }>,
    y: Out<{ types.y }>,
    order: In<u32>,
    offsets: In<u32>,
    blocks: In<u32>,
    pairs: Arg<u32>,
    width: Const<u32>,
    out: Const<u32>,
    experts: Const<u32>,
    share: Const<u32>,
    types: gemm::GemmTypes,
    format: Format,
    schedule: gemm::GemmSchedule,
) {
    let gemm::GemmSchedule { bm, bn, .. } = schedule;
    let tiles = tiles(dim("pairs"), dim("experts"), bm);
    let grid = tiles.clone() * dim("out").ceil_div(bn);
    launch(Mode::Tile, [grid, fixed(1), fixed(1)], schedule.threads());
    contract("pairs", types.operand, format, dim("out") * dim("experts"));
    holds("x", dim("pairs").ceil_div(dim("share")) * dim("width"));
    holds("y", dim("pairs") * dim("out"));
    holds("order", dim("pairs"));
    holds("offsets", dim("experts") + 1);
    holds("blocks", tiles * 2);
    require(Requirement::AtMost(dim("experts"), 1 << 16));
    grid_trigger();
    grid_wait();
    let tiles = (pairs + (bm - 1)) / bm + experts;
    let (tile, block_n) = block(group_id(), tiles, (out + (bn - 1)) / bn);
    let expert = blocks.get(tile * 2u32);
    if expert < experts {
        let first = blocks.get(tile * 2u32 + 1u32);
        let end = offsets.get(expert + 1u32);
        let (base, first_out) = (expert * out, block_n * bn);
        let a = Side::activations(
            types.operand,
            x,
            Rows::Table(order, first, end, share),
            width,
            &schedule,
        );
        let rows = Rows::Span(base + first_out, base + out);
        let b = Side::weights(types.operand, "weight", format, rows, width, &schedule);
        let ring = Ring { schedule, a, b, width };
        product(&ring, |Results { row, col, values }| {
            let (place, col) = (first + row, first_out + col);
            if place < end && col < out {
                store(y, order.get(place), col, out, &values);
            }
        });
    }
}

/// `y[p, i] = sum_o weight[ids[p], o, i] x[p / share, o] (+ add[p, i])`: as [`moe_gemm`], with each
/// expert's matrix turned. `adds` says whether there is `add`, which may be `y` itself.
///
/// `x` `[pairs / share, out]`, `y` and `add` `[pairs, width]`.
#[kernel]
pub fn moe_gemm_turned(
    x: In<{ types.x }>,
    y: Out<{ types.y }>,
    order: In<u32>,
    offsets: In<u32>,
    blocks: In<u32>,
    pairs: Arg<u32>,
    width: Const<u32>,
    out: Const<u32>,
    experts: Const<u32>,
    share: Const<u32>,
    types: gemm::GemmTypes,
    format: Format,
    adds: bool,
    schedule: gemm::GemmSchedule,
) {
    let gemm::GemmSchedule { bm, bn, .. } = schedule;
    let tiles = tiles(dim("pairs"), dim("experts"), bm);
    let grid = tiles.clone() * dim("width").ceil_div(bn);
    launch(Mode::Tile, [grid, fixed(1), fixed(1)], schedule.threads());
    for name in ["x", "y", "weight"] {
        require(Requirement::Aligned(name.into(), 16));
    }
    require(Requirement::Divisible(dim("width"), format.step().max(8)));
    require(Requirement::Divisible(dim("out"), 8));
    holds("weight", format.extent(dim("width")) * dim("out") * dim("experts"));
    holds("x", dim("pairs").ceil_div(dim("share")) * dim("out"));
    holds("y", dim("pairs") * dim("width"));
    holds("order", dim("pairs"));
    holds("offsets", dim("experts") + 1);
    holds("blocks", tiles * 2);
    // Every product of sizes is computed in 32 bits.
    require(Requirement::AtMost(dim("pairs"), 1 << 24));
    require(Requirement::AtMost(dim("experts"), 1 << 16));
    let add = adds.then(|| {
        holds("add", dim("pairs") * dim("width"));
        <In>::stored("add", types.y)
    });
    grid_trigger();
    grid_wait();
    let tiles = (pairs + (bm - 1)) / bm + experts;
    let (tile, block_n) = block(group_id(), tiles, (width + (bn - 1)) / bn);
    let expert = blocks.get(tile * 2u32);
    if expert < experts {
        let first = blocks.get(tile * 2u32 + 1u32);
        let end = offsets.get(expert + 1u32);
        let column = block_n * bn;
        let operand = types.operand;
        let rows = Rows::Table(order, first, end, share);
        let a = Side::activations(operand, x, rows, out, &schedule);
        let terms = (expert * out, out);
        let b = Side::turned(operand, ("weight", format), terms, (column, width), &schedule);
        let ring = Ring { schedule, a, b, width: out };
        product(&ring, |Results { row, col, values }| {
            let (place, col) = (first + row, column + col);
            if place < end && col < width {
                let pair = order.get(place);
                // Columns past the end are not written: anything may be added to them.
                let more = |i: usize| {
                    let at = pair * width + (col + i as u32).min(width - 1u32);
                    add.map(|add| add.get(at))
                };
                let sum = |(i, value): (usize, Val<f32>)| more(i).map_or(value, |m| value + m);
                let values: Vec<Val<f32>> = values.into_iter().enumerate().map(sum).collect();
                store(y, pair, col, width, &values);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use formats::DType;
    use tile::case::{Buffer, noise};
    use tile::launch::Numbers;

    use super::super::group;
    use super::*;
    use crate::linear::cases::Matrix;
    use crate::linear::gemm::GemmTypes;
    use crate::linear::gemm::cases::bound;

    /// Except for warpgroups, a pair has the same bits alone, among any other pairs of its expert,
    /// and under any schedule that their number picks.
    #[test]
    fn pairs_have_the_same_bits_among_any_others() {
        let (experts, out, width, most) = (3, 40, 512, 70);
        let values = noise(9, most * width);
        let ids: Vec<u32> = (0..most as u32).map(|pair| pair * pair % 7 % 3).collect();
        let types = GemmTypes { x: Scalar::F32, operand: Scalar::BF16, y: Scalar::F32 };
        for format in [Format::Dense(Scalar::BF16), Format::Block(DType::Q4K)] {
            let matrix = Matrix::new(format, 5, experts * out, width);
            let run = |pairs: usize, schedule: gemm::GemmSchedule| {
                let groups = group(&ids[..pairs], experts, schedule.bm as usize);
                let sizes = [("pairs", pairs), ("experts", experts), ("share", 1)];
                let sizes = sizes.into_iter().chain([("width", width), ("out", out)]);
                let with =
                    |numbers: Numbers, (name, n): (&str, usize)| numbers.with(name, n as u32);
                let numbers = sizes.fold(Numbers::new(), with);
                let mut buffers = [
                    Buffer::floats(types.x, &values[..pairs * width]),
                    Buffer::zeros(types.y, pairs * out),
                    Buffer::words(&groups.order),
                    Buffer::words(&groups.offsets),
                    Buffer::words(&groups.blocks),
                    bound(format, types.operand, &matrix),
                ];
                let kernel = moe_gemm(types, format, schedule).record();
                tile::interp::run(&kernel, &numbers, &mut buffers).unwrap();
                let [_, y, ..] = buffers;
                y.bytes
            };
            let machine = |shared| {
                let (parallel, wgmma, tuned) = (4, false, &crate::tuned::NVIDIA);
                gemm::Machine { shared, parallel, wgmma, tuned }
            };
            let mut schedules = Vec::new();
            for (pairs, shared) in [(1, 227), (60, 227), (150, 227), (300, 227), (1, 32), (60, 32)]
            {
                let sizes = (pairs, experts as u32, out as u32);
                let schedule = pick_blocks(sizes, types.operand, format, machine(shared << 10));
                if !schedules.contains(&schedule) {
                    schedules.push(schedule);
                }
            }
            assert!(schedules.len() >= 4, "{schedules:?}");
            let alone = run(1, schedules[0]);
            for schedule in schedules {
                for pairs in [2, most] {
                    let all = run(pairs, schedule);
                    assert_eq!(all[..alone.len()], alone, "{pairs} pairs, {}", schedule.name());
                }
            }
        }
    }

    #[test]
    fn schedules_of_turned_matrices_fit_where_they_are_picked() {
        use crate::tuned::{APPLE, HOPPER, NVIDIA};
        for format in Format::all() {
            for (pairs, experts) in [(16, 128), (512, 8), (32768, 32)] {
                for operand in [Scalar::F32, Scalar::BF16] {
                    for (shared, tuned) in [(32, &APPLE), (99, &NVIDIA), (227, &HOPPER)] {
                        let (shared, parallel, wgmma) = (shared << 10, 132, shared > 99);
                        let machine = gemm::Machine { shared, parallel, wgmma, tuned };
                        let sizes = (pairs, experts, 2048);
                        let schedule = pick_turned(sizes, operand, format, machine);
                        assert!(schedule.turned_bytes(operand) <= shared, "{schedule:?}");
                        assert_eq!(schedule.bn % format.run(), 0, "{format:?} {schedule:?}");
                        let across = schedule.bn / format.run();
                        assert_eq!(schedule.threads() % across, 0, "{format:?} {schedule:?}");
                        assert!(!schedule.warpgroups);
                    }
                }
            }
        }
    }
}
