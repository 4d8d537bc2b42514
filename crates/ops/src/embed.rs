//! Embedding gather: `y[t] = table[token[t]]`. Token ids are step arguments, not an operand.

use formats::{DType, Result, quant::Block, with_block};
use tile::case::{Bench, Buffer, Case, Fill, Spec, noise};
use tile::dsl::*;
use tile::ir::Hint;
use tile::launch::{Mode, Numbers, Requirement};

use crate::packed::{Format, Layout, Mlx, Planes, Weights, pack, pack_mlx};
use crate::sweep::{Team, begin, lanes, lanes_of_both, load, require_vectors, store};
use crate::trial::{every_float, exact, memory, near, random, rows_of};
use crate::{Shape, arity, expect};

/// `; table[vocab, width] -> [tokens, width]`.
pub fn shape(inputs: &[Shape], weights: &[&[usize]]) -> Result<Vec<Shape>> {
    arity("embed", inputs, 0, weights, &[1])?;
    expect("embed", "table rank", &[weights[0].len()], &[2])?;
    Ok(vec![Shape::tokens(weights[0][1])])
}

/// Gathers rows of `table` `[vocab, width]` into `y` `[tokens, width]`. Ids must be below `vocab`.
pub fn reference(tokens: &[u32], table: &[f32], width: usize, y: &mut [f32]) {
    for (&token, y) in tokens.iter().zip(y.chunks_exact_mut(width)) {
        y.copy_from_slice(&table[token as usize * width..][..width]);
    }
}

/// `y[t] = table[tokens[t]]`, rounded to `Y`, on the device. Ids must be below the table's rows.
#[kernel]
pub fn embed<T: Float, Y: Float>(tokens: In<u32>, table: In<T>, y: Out<Y>, width: Const<u32>) {
    gather("tokens", tokens, "table", table, y, width);
}

/// `y[i] = from[rows[i]]`, the whole body of a kernel: a threadgroup per row of `y`. The buffers' names are for the contract.
#[track_caller]
pub(crate) fn gather<T: Float, Y: Float>(
    rows_name: &str,
    rows: In<u32>,
    from_name: &str,
    from: In<T>,
    y: Out<Y>,
    width: Val<u32>,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 256);
    require(Requirement::Length(rows_name.to_owned(), dim("rows")));
    require_vectors(&[(from_name, dim("width")), ("y", dim("rows") * dim("width"))]);
    begin();
    let source = rows.get(group_id()) * width;
    let first = group_id() * width;
    Team::Group.sweep(width, lanes_of_both::<T, Y>(), |at, lanes| {
        let loaded: Vec<_> = at.iter().map(|&i| load(from, source + i, lanes)).collect();
        for (&i, values) in at.iter().zip(loaded) {
            store(y, first + i, &values);
        }
    });
}

/// `y[t] = table[tokens[t]]` from a table in a packed format, on the device; `width` is a multiple of [`Format::step`].
#[kernel]
pub fn embed_packed<Y: Float>(tokens: In<u32>, width: Const<u32>, format: Format) {
    rename(format!("embed_{}_{}", format.name(), Y::NAME));
    let table = Weights::declare("table", format, width);
    let y = Out::<Y>::declare("y");
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 128);
    require(Requirement::Length("tokens".to_owned(), dim("rows")));
    require(Requirement::Divisible(dim("width"), format.step()));
    require(Requirement::Aligned("table".to_owned(), 16));
    require_vectors(&[("y", dim("rows") * dim("width"))]);
    begin();
    let source = table.row(tokens[group_id()]);
    let first = group_id() * width;
    let (wide, run) = (u32::from(lanes::<Y>()), format.run());
    let runs = width / run;
    // A thread's run is too long a piece to write at once: neighbours would write far apart. So rows are staged.
    let staged = Shared::<Y>::named("staged", threads() * run);
    for begin in range(0u32, runs).step(threads()) {
        let r = begin + thread_id();
        if r < runs {
            let weights = table.read(source, r).floats();
            for (i, values) in weights.chunks(wide as usize).enumerate() {
                store(staged, thread_id() * run + i as u32 * wide, values);
            }
        }
        barrier();
        let filled = (runs - begin).min(threads()) * run;
        for i in range(thread_id() * wide, filled).step(threads() * wide) {
            let values = staged.get_vec(i, wide as u8, Hint::None);
            y.set_vec(first + begin * run + i, &values);
        }
        barrier();
    }
}

/// The kernels, their cases and benchmarks.
pub const KERNELS: &[Spec] = &[
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
    fn of<T: Float, Y: Float>() -> Vec<Case> {
        let case = |(width, why): (usize, &str)| {
            let table = random::<T>(width as u64, 5 * width);
            let n = PICKS.len() * width;
            let mut y = vec![0.0; n];
            reference(&PICKS, &table.to_f32(), width, &mut y);
            Case {
                kernel: embed::<T, Y>(),
                label: format!("4 of 5 x {width} {} to {}, {why}", T::NAME, Y::NAME),
                numbers: numbers(PICKS.len(), width),
                buffers: vec![Buffer::words(&PICKS), table, Buffer::zeros(Y::SCALAR, n)],
                expected: vec![(2, exact::<Y>(&y))],
            }
        };
        WIDTHS.into_iter().map(case).collect()
    }
    fn all<T: Float>() -> Vec<Case> {
        let mut all = of::<T, f32>();
        all.extend(of::<T, half::f16>());
        all.extend(of::<T, half::bf16>());
        all
    }
    every_float!(all)
}

/// The numbers of a gather's launch.
pub(crate) fn numbers(rows: usize, width: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", width as u32)
}

/// A prompt's ids: no two neighbours near each other, each row once.
fn scattered(rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|t| t * 1237 % rows as u32).collect()
}

fn benches() -> Vec<Bench> {
    fn of<T: Float>() -> Vec<Bench> {
        let (rows, width) = (rows_of::<T>(4096), 4096);
        let n = rows * width;
        let buffers = vec![
            Fill::These(Buffer::words(&scattered(rows))),
            Fill::Noise(T::SCALAR, n),
            Fill::Zeros(T::SCALAR, n),
        ];
        vec![memory(
            embed::<T, T>(),
            &format!("{rows} x {width}"),
            numbers(rows, width),
            buffers,
            0,
        )]
    }
    every_float!(of)
}

/// A table of `rows` in a format, from seeded numbers; none for dense ones, which [`embed`] reads.
fn table(format: Format, rows: usize, cols: usize) -> Option<Planes> {
    let source = noise(cols as u64, rows * cols);
    match format {
        Format::Dense(_) => None,
        Format::Block(dtype) => {
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
            pack(dtype, &bytes, rows, cols).ok()
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
    fn of<Y: Float>(format: Format, blocks: usize, why: &str) -> Option<Case> {
        let width = blocks * format.step() as usize;
        let table = table(format, 5, width)?;
        let mut weights = vec![0.0; 5 * width];
        weights.chunks_exact_mut(width).enumerate().for_each(|(r, row)| table.row(r, row));
        let n = PICKS.len() * width;
        let mut y = vec![0.0; n];
        reference(&PICKS, &weights, width, &mut y);
        Some(Case {
            kernel: embed_packed::<Y>(format),
            label: format!("4 of 5 x {width} {} to {}, {why}", format.name(), Y::NAME),
            numbers: numbers(PICKS.len(), width),
            buffers: vec![
                Buffer::words(&PICKS),
                Buffer::raw(u32::SCALAR, table.bytes),
                Buffer::zeros(Y::SCALAR, n),
            ],
            expected: vec![(2, near::<Y>(&y))],
        })
    }
    let each = |format| {
        [
            of::<f32>(format, 1, "one block"),
            of::<half::f16>(format, 3, "some blocks"),
            of::<half::bf16>(format, 2, "two blocks"),
        ]
    };
    Format::all().into_iter().flat_map(each).flatten().collect()
}

fn benches_packed() -> Vec<Bench> {
    let (rows, width) = (rows_of::<half::bf16>(4096), 4096);
    let of = |dtype| {
        let format = Format::Block(dtype);
        let layout = Layout::new(format, rows, width).ok()?;
        let buffers = vec![
            Fill::These(Buffer::words(&scattered(rows))),
            Fill::Zeros(u32::SCALAR, layout.words()),
            Fill::Zeros(half::bf16::SCALAR, rows * width),
        ];
        let kernel = embed_packed::<half::bf16>(format);
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
