//! Tests of the products of many sequences.

use formats::DType;
use tile::case::{Buffer, noise};
use tile::launch::Numbers;

use super::*;
use crate::linear::cases::Matrix;

#[test]
fn cases_hold() {
    crate::linear::cases::prove(KERNELS);
}

#[test]
fn cases_by_warpgroups_hold() {
    crate::linear::cases::prove(LAID);
}

/// A row's bits are those that it has alone, whatever a group takes together, however many
/// groups there are, and whether the matrix lies in rows or in tiles.
#[test]
fn rows_have_the_same_bits_among_any_others() {
    let (out, width, most) = (40, 1280, 21);
    let values = noise(9, most * width);
    let [q4_k, q5_k] = [DType::Q4K, DType::Q5K].map(Format::Block);
    for format in [Format::Dense(Scalar::BF16), q4_k, q5_k] {
        let types = StreamTypes { x: Scalar::BF16, operand: Scalar::BF16, y: Scalar::F32 };
        let run_in = |format, rows: usize, tiling: StreamTiling, groups: u32| {
            let matrix = Matrix::new(format, 5, out, width);
            let x = Buffer::floats(types.x, &values[..rows * width]);
            let numbers = Numbers::new().with("rows", rows as u32).with("groups", groups);
            let numbers = numbers.with("width", width as u32).with("out0", out as u32);
            let y = Buffer::zeros(types.y, rows * out);
            let mut buffers = [Buffer::raw(Scalar::U32, x.bytes), y, matrix.buffer()];
            let part = ProjectedMatrix { format, bias: false };
            let kernel = stream(types, &[part], End::Store, tiling, None).record();
            tile::interp::run(&kernel, &numbers, &mut buffers).unwrap();
            let [_, y, _] = buffers;
            y.bytes
        };
        let run = |rows, tiling, groups| run_in(format, rows, tiling, groups);
        let (terms, sums) = (Share::Terms, Share::Sums);
        let resident = 1;
        let few = StreamTiling { share: terms, resident, tiles: 1, rows: 8, loads: 2, stages: 2 };
        let alone = run(1, few, 3);
        // Tilings of few rows and of many, and launches in several turns.
        for (rows, share, tiles, together, loads, stages, groups) in [
            (1, terms, 2, 16, 2, 3, 1),
            (3, terms, 1, 8, 2, 4, 2),
            (9, terms, 4, 24, 2, 2, 1),
            (21, terms, 2, 32, 1, 2, 2),
            (21, terms, 1, 8, 1, 5, 1),
            (21, terms, 4, 24, 1, 2, 1),
            (21, sums, 1, 32, 2, 3, 1),
            (21, sums, 2, 16, 1, 2, 1),
            (2, sums, 2, 32, 2, 2, 2),
        ] {
            let tiling = StreamTiling { share, resident, tiles, rows: together, loads, stages };
            let all = run(rows, tiling, groups);
            assert_eq!(all[..alone.len()], alone, "{}: {rows} rows", format.name());
            if let Some(tiles) = format.tiled() {
                assert_eq!(run_in(tiles, rows, tiling, groups), all, "{}", tiles.name());
            }
        }
    }
}

/// Likewise by warpgroups, in any number of turns, and whole sums or parts.
#[test]
fn rows_have_the_same_bits_among_any_others_by_warpgroups() {
    let (out, width, most) = (136, 512, 37);
    let values = noise(9, most * width);
    let stored = Format::Dense(Scalar::BF16);
    for format in [Format::Block(DType::Q4K), Format::Block(DType::Q8_0), stored] {
        // The first row's results, of each part of the sums, and all.
        let run = |format: Format, rows: usize, tiling: StreamTiling, groups: u32| {
            let matrix = Matrix::new(format, 5, out, width);
            let x = &values[..rows * width];
            let mut buffers: Vec<Buffer> = match format.packing() {
                Some(_) => lay::laid(x, width, format.run() as usize).into(),
                None => vec![Buffer::floats(Scalar::BF16, x)],
            };
            let numbers = Numbers::new().with("rows", rows as u32).with("groups", groups);
            let numbers = numbers.with("width", width as u32).with("out0", out as u32);
            let y = Buffer::zeros(Scalar::F32, tiling.splits() as usize * rows * out);
            let at = buffers.len();
            buffers.extend([y, cases::held(tiling.share, format, matrix.buffer())]);
            let part = [ProjectedMatrix { format, bias: false }];
            let kernel = stream_warpgroups(Scalar::F32, &part, End::Store, tiling, None);
            tile::interp::run(&kernel.record(), &numbers, &mut buffers).unwrap();
            let all = buffers.swap_remove(at).bytes;
            let parts = all.chunks(4 * rows * out);
            let first: Vec<u8> = parts.flat_map(|part| part[..4 * out].to_vec()).collect();
            (first, all)
        };
        for splits in [1, 3] {
            let tiling = |rows, stages| {
                let (share, resident, tiles) = (Share::Warpgroups { splits }, 1, 1);
                StreamTiling { share, resident, tiles, rows, loads: 2, stages }
            };
            let (alone, _) = run(format, 1, tiling(16, 2), 3);
            for (rows, together, stages, groups) in [(5, 16, 3, 1), (37, 48, 2, 2), (37, 16, 4, 1)]
            {
                let (first, all) = run(format, rows, tiling(together, stages), groups);
                assert_eq!(first, alone, "{}: {rows} rows", format.name());
                if let Some(tiles) = format.tiled() {
                    assert_eq!(run(tiles, rows, tiling(together, stages), groups).1, all);
                }
            }
        }
    }
}
