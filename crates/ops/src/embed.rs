//! Embedding gather: `y[t] = table[token[t]]`. Token ids are step arguments, not an operand.

use formats::{DType, Result, quant::BlockFormat, with_block};
use tile::case::{Bench, Buffer, Case, Fill, Spec, noise};
use tile::dsl::*;
use tile::ir::LoadHint;
use tile::launch::{Mode, Numbers, Requirement};

use crate::gradient::{Forward, Gathered, Reverse, Wrt, give, one};
use crate::operation::{
    ActivationPrecision, Bound, Launches, Operand, Operation, ReferenceCall, Sharding, Y,
};
use crate::packed::{Format, Layout, Mlx, PackedWeights, Planes, pack_as, pack_mlx};
use crate::sweep::{RowThreads, begin, lanes, lanes_of_both, load, require_vectors};
use crate::trial::{every_float, exact, memory, near, random, rows_of};
use crate::{Shape, arity, expect};

/// The numbers that pick rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Index {
    /// Token ids.
    Token,
    /// Positions: a learned embedding of them (Radford et al. 2018). There are no more of them than
    /// rows.
    Position,
}

/// `; table[rows, width] -> [tokens, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Embed {
    /// The numbers that pick the table's rows.
    pub index: Index,
}

impl Operation for Embed {
    fn name(&self) -> &'static str {
        match self.index {
            Index::Token => "embed",
            Index::Position => "embed_position",
        }
    }

    fn infer(&self, inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
        arity("embed", inputs, 0, weights, &[1])?;
        expect("embed", "table rank", &[weights[0].len()], &[2])?;
        Ok(vec![Shape::tokens(weights[0][1])])
    }

    fn reference(&self, call: &mut ReferenceCall<'_>) {
        let width = call.outputs[0].len() / call.tokens.len();
        let rows = match self.index {
            Index::Token => call.tokens,
            Index::Position => call.positions,
        };
        reference(rows, &call.weights[0], width, &mut call.outputs[0]);
    }

    fn sharding(&self) -> Sharding {
        Sharding::Whole
    }

    fn gathers(&self) -> Option<Index> {
        Some(self.index)
    }

    fn shares_type(&self, _: Operand) -> bool {
        false
    }

    fn precision(&self) -> ActivationPrecision {
        ActivationPrecision::Full
    }

    fn launch(&self, to: &mut dyn Launches) -> Result<bool> {
        let picks = match self.index {
            Index::Token => Bound::Tokens,
            Index::Position => Bound::Positions,
        };
        let kernel = kernel(to.format(0)?, to.scalar(Y));
        let bound = [("tokens", picks), ("table", Bound::Weight(0)), ("y", Bound::Value(Y))];
        to.push(kernel, numbers(to.rows(Y), to.width(Y)), &bound)?;
        Ok(true)
    }

    fn vjp(&self, at: &mut dyn Reverse) -> Result<()> {
        let Some(dy) = at.cotangent(0) else { return Ok(()) };
        let table = at.weight(0).map_or(0, |table| table[0]);
        let op = Gathered { index: self.index, table };
        give(at, Wrt::Weight(0), |at| one(at, op, &[dy], &[]))
    }

    fn jvp(&self, at: &mut dyn Forward) -> Result<()> {
        let Some(table) = at.weight_tangent(0) else { return Ok(()) };
        let dy = one(at, *self, &[], &[table])?;
        at.add(0, dy)
    }
}

/// Gathers rows of `table` `[vocab, width]` into `y` `[tokens, width]`. Ids must be below `vocab`.
pub fn reference(tokens: &[u32], table: &[f32], width: usize, y: &mut [f32]) {
    for (&token, y) in tokens.iter().zip(y.chunks_exact_mut(width)) {
        y.copy_from_slice(&table[token as usize * width..][..width]);
    }
}

/// The kernel for a table that is packed so.
pub fn kernel(format: Format, to: Scalar) -> Recipe<'static> {
    match format {
        Format::Dense(from) => embed(from, to),
        packed => embed_packed(to, packed),
    }
}

/// `y[t] = table[tokens[t]]`, rounded to `Y`, on the device. Ids must be below the table's rows.
#[kernel]
pub fn embed(
    tokens: In<u32>,
    table: In<{ from }>,
    y: Out<{ to }>,
    width: Const<u32>,
    from: Scalar,
    to: Scalar,
) {
    gather("tokens", tokens, "table", table, y, width);
}

/// `y[i] = from[rows[i]]`, the whole body of a kernel: a threadgroup per row of `y`. The buffers'
/// names are for the contract.
#[track_caller]
pub(crate) fn gather(
    rows_name: &str,
    rows: In<u32>,
    from_name: &str,
    from: In,
    y: Out,
    width: Val<u32>,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    require(Requirement::Length(rows_name.to_owned(), dim("rows")));
    require_vectors(&[(from_name, dim("width")), ("y", dim("rows") * dim("width"))]);
    begin();
    let source = rows.get(group_id()) * width;
    let first = group_id() * width;
    RowThreads::Group.sweep(width, lanes_of_both(from.scalar(), y.scalar()), |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(from, source + i, lanes)).collect();
        for (&i, values) in at.iter().zip(loaded) {
            y.set_vec(first + i, &values);
        }
    });
}

/// `y[t] = table[tokens[t]]` from a table in a packed format, on the device; `width` is a multiple
/// of [`Format::step`].
#[kernel]
pub fn embed_packed(tokens: In<u32>, width: Const<u32>, to: Scalar, format: Format) {
    let table = PackedWeights::declare("table", format, width);
    let y = <Out>::stored("y", to);
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 128);
    require(Requirement::Length("tokens".to_owned(), dim("rows")));
    require(Requirement::Divisible(dim("width"), format.step()));
    require(Requirement::Aligned("table".to_owned(), 16));
    require_vectors(&[("y", dim("rows") * dim("width"))]);
    begin();
    let source = table.row(tokens[group_id()]);
    let first = group_id() * width;
    let (wide, run) = (u32::from(lanes(to)), format.run());
    let runs = width / run;
    // A thread's run is too long a piece to write at once: neighbours would write far apart. So
    // rows are staged.
    let staged = Shared::<f32>::stored(to, "staged", threads() * run);
    for begin in range(0u32, runs).step(threads()) {
        let r = begin + thread_id();
        if r < runs {
            let weights = table.read(source, r).floats();
            for (i, values) in weights.chunks(wide as usize).enumerate() {
                staged.set_vec(thread_id() * run + i as u32 * wide, values);
            }
        }
        barrier();
        let filled = (runs - begin).min(threads()) * run;
        for i in range(thread_id() * wide, filled).step(threads() * wide) {
            let values = staged.get_raw_vec(i, wide as u8, LoadHint::None);
            y.set_raw_vec(first + begin * run + i, &values);
        }
        barrier();
    }
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "embed", cases, benches },
    Spec { name: "embed_packed", cases: cases_packed, benches: benches_packed },
];

/// Width, and why: what a gather is tried with.
pub(crate) const WIDTHS: [(usize, &str); 5] = [
    (1, "one element"),
    (12, "a vector and a half of 16-bit elements"),
    (129, "a width no vector divides"),
    (2048, "a vector per thread"),
    (4104, "several vectors per thread and a remainder"),
];

/// Row numbers with a repeat, the first and the last of five.
pub(crate) const PICKS: [u32; 4] = [4, 0, 2, 2];

fn cases() -> Vec<Case> {
    fn of(from: Scalar, to: Scalar) -> Vec<Case> {
        let case = |(width, why): (usize, &str)| {
            let table = random(from, width as u64, 5 * width);
            let n = PICKS.len() * width;
            let mut y = vec![0.0; n];
            reference(&PICKS, &table.to_f32(), width, &mut y);
            Case {
                kernel: embed(from, to).record(),
                label: format!("4 of 5 x {width} {from} to {to}, {why}"),
                numbers: numbers(PICKS.len(), width),
                buffers: vec![Buffer::words(&PICKS), table, Buffer::zeros(to, n)],
                expected: vec![(2, exact(to, &y))],
            }
        };
        WIDTHS.into_iter().map(case).collect()
    }
    fn all(from: Scalar) -> Vec<Case> {
        let mut all = of(from, Scalar::F32);
        all.extend(of(from, Scalar::F16));
        all.extend(of(from, Scalar::BF16));
        all
    }
    every_float(all)
}

/// The numbers of a gather's launch.
pub fn numbers(rows: usize, width: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32)
}

/// A prompt's ids: no two neighbours near each other, each row once.
fn scattered(rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|t| t * 1237 % rows as u32).collect()
}

fn benches() -> Vec<Bench> {
    fn of(from: Scalar) -> Vec<Bench> {
        let (rows, width) = (rows_of(from, 4096), 4096);
        let n = rows * width;
        let buffers = vec![
            Fill::These(Buffer::words(&scattered(rows))),
            Fill::Noise(from, n),
            Fill::Zeros(from, n),
        ];
        vec![memory(
            embed(from, from),
            &format!("{rows} x {width}"),
            numbers(rows, width),
            buffers,
            0,
        )]
    }
    every_float(of)
}

/// A table of `rows` in a format, from seeded numbers; none for dense ones, which [`embed`] reads.
fn table(format: Format, rows: usize, cols: usize) -> Option<Planes> {
    let source = noise(cols as u64, rows * cols);
    match format {
        Format::Dense(_) => None,
        Format::Block(dtype) | Format::Tiles(dtype) => {
            let bytes: Vec<u8> = with_block!(dtype, B => {
                source
                    .chunks_exact(B::ELEMENTS)
                    .flat_map(|weights| {
                        let mut block = vec![0; B::BYTES];
                        B::encode(weights, &mut block);
                        block
                    })
                    .collect()
            }, else => return None);
            pack_as(format, dtype.into(), &bytes, rows, cols).ok()
        }
        Format::Mlx { bits, group, scale } => {
            let groups = rows * cols / group as usize;
            let codes: Vec<u8> = source
                .iter()
                .take(rows * cols * bits as usize / 8)
                .map(|v| v.to_bits() as u8)
                .collect();
            let scales = Buffer::floats(scale, &noise(7, groups)).bytes;
            let biases = Buffer::floats(scale, &noise(8, groups)).bytes;
            let from = Mlx { codes: &codes, scales: &scales, biases: &biases };
            pack_mlx(format, &from, rows, cols).ok()
        }
    }
}

fn cases_packed() -> Vec<Case> {
    fn of(to: Scalar, format: Format, blocks: usize, why: &str) -> Option<Case> {
        let width = blocks * format.step() as usize;
        let rows = 5usize.next_multiple_of(format.together());
        let table = table(format, rows, width)?;
        let mut weights = vec![0.0; rows * width];
        weights.chunks_exact_mut(width).enumerate().for_each(|(r, row)| table.row(r, row));
        let n = PICKS.len() * width;
        let mut y = vec![0.0; n];
        reference(&PICKS, &weights, width, &mut y);
        Some(Case {
            kernel: embed_packed(to, format).record(),
            label: format!("4 of {rows} x {width} {} to {}, {why}", format.name(), to),
            numbers: numbers(PICKS.len(), width),
            buffers: vec![
                Buffer::words(&PICKS),
                Buffer::raw(Scalar::U32, table.bytes),
                Buffer::zeros(to, n),
            ],
            expected: vec![(2, near(to, &y))],
        })
    }
    let each = |format| {
        [
            of(Scalar::F32, format, 1, "one block"),
            of(Scalar::F16, format, 3, "some blocks"),
            of(Scalar::BF16, format, 2, "two blocks"),
        ]
    };
    let long = of(Scalar::F16, Format::Block(DType::Q8_0), 80, "more than a group stages at once");
    let tiles = [DType::Q4K, DType::Q3K].map(Format::Tiles).into_iter();
    let tiles = tiles.filter_map(|format| of(Scalar::BF16, format, 2, "in tiles"));
    let all = Format::all().into_iter().flat_map(each).chain([long]).flatten();
    all.chain(tiles).collect()
}

fn benches_packed() -> Vec<Bench> {
    let (rows, width) = (rows_of(Scalar::BF16, 4096), 4096);
    let of = |dtype| {
        let format = Format::Block(dtype);
        let layout = Layout::new(format, rows, width).ok()?;
        let buffers = vec![
            Fill::These(Buffer::words(&scattered(rows))),
            Fill::Zeros(Scalar::U32, layout.words()),
            Fill::Zeros(Scalar::BF16, rows * width),
        ];
        let kernel = embed_packed(Scalar::BF16, format);
        let label = format!("{rows} x {width} {}", format.name());
        Some(memory(kernel, &label, numbers(rows, width), buffers, 0))
    };
    [DType::Q8_0, DType::Q4K, DType::Q6K].into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(KERNELS);
    }
}
