//! The packed layout against the formats' own decoders.

mod reference;

use super::*;
use crate::linear::cases::Matrix;
use formats::quant::plain;
use tile::case::{Buffer, Case, Expected};
use tile::dsl::*;
use tile::launch::{Mode, Numbers};

/// Seeded bytes.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Equal bits, or both not a number.
fn same(got: &[f32], want: &[f32]) -> bool {
    let same = |(g, w): (&f32, &f32)| g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan();
    got.len() == want.len() && got.iter().zip(want).all(same)
}

#[test]
fn every_type_unpacks_to_what_its_decoder_gives() {
    let mut checked = 0;
    for dtype in DType::ALL {
        let Some(format) = Format::of(dtype) else { continue };
        let step = format.step() as usize;
        for (rows, cols) in [(1, step), (3, 3 * step), (2, 9 * step)] {
            let source =
                bytes(cols as u64, dtype.bytes_for((rows * cols) as u64).unwrap() as usize);
            let packed = pack(dtype, &source, rows, cols).unwrap();
            assert_eq!(packed.bytes.len(), packed.layout.bytes());
            assert_eq!(packed.layout.row_words() % 4, 0);
            let mut want = vec![0.0; rows * cols];
            dtype.decode(&source, &mut want).unwrap();
            let mut got = vec![0.0; cols];
            for (r, want) in want.chunks(cols).enumerate() {
                packed.row(r, &mut got);
                assert!(same(&got, want), "{dtype}: row {r} of [{rows}, {cols}]");
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 3 * 18);
}

/// Every encoding of blocks and affine groups that there is a format for.
fn quantised() -> Vec<Encoding> {
    let blocks = DType::ALL.into_iter().filter(|dtype| dtype.is_block()).map(Encoding::Stored);
    let groups = (2..=8).flat_map(|bits| [32, 64, 96, 128, 256].map(|group| (bits, group)));
    let groups = groups.flat_map(|(bits, group)| {
        [DType::F16, DType::BF16].map(|scale| Groups::new(bits, group, scale).unwrap())
    });
    let all = blocks.chain(groups.map(Encoding::Groups));
    all.filter(|encoding| Format::of(*encoding).is_some()).collect()
}

#[test]
fn whole_blocks_pack_as_their_elements_do() {
    let all = quantised();
    assert_eq!(all.len(), 15 + 7 * 5 * 2);
    for encoding in all {
        let format = Format::of(encoding).unwrap();
        let step = format.step().max(encoding.block_elements() as u32) as usize;
        for (rows, steps) in [(1, 1), (2, 3), (3, 9), (1, 16)] {
            let cols = (steps * step).next_multiple_of(encoding.block_elements());
            if Layout::new(format, rows, cols).is_err() {
                continue;
            }
            let source = bytes(cols as u64 + 1, encoding.bytes_for(rows * cols).unwrap());
            let want = reference::pack(encoding, &source, rows, cols);
            let why = format!("{encoding} [{rows}, {cols}]");
            assert!(pack(encoding, &source, rows, cols).unwrap().bytes == want, "{why}");
            // Row by row, to memory that holds something else.
            let layout = Layout::new(format, rows, cols).unwrap();
            let mut packed = bytes(3, want.len());
            let parts = packed.chunks_mut(want.len() / rows);
            for (source, part) in source.chunks(source.len() / rows).zip(parts) {
                pack_into(encoding, source, &layout, part).unwrap();
            }
            assert!(packed == want, "{why}, a row at a time");
        }
    }
}

#[test]
fn tiles_hold_the_words_of_rows() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_block()) {
        let Some(format) = Format::of(dtype).and_then(Format::tiled) else { continue };
        let step = format.step() as usize;
        for (rows, cols) in [(8, step), (24, 3 * step), (16, 9 * step)] {
            let size = dtype.bytes_for((rows * cols) as u64).unwrap() as usize;
            let source = bytes(cols as u64, size);
            let in_rows = pack(dtype, &source, rows, cols).unwrap();
            let tiles = pack_as(format, dtype.into(), &source, rows, cols).unwrap();
            assert_eq!(tiles.bytes.len(), tiles.layout.bytes());
            let (mut got, mut want) = (vec![0.0; cols], vec![0.0; cols]);
            for r in 0..rows {
                tiles.row(r, &mut got);
                in_rows.row(r, &mut want);
                assert!(same(&got, &want), "{}: row {r} of [{rows}, {cols}]", format.name());
            }
            // Eight rows at a time, to memory that holds something else.
            let mut packed = bytes(3, tiles.bytes.len());
            let parts = packed.chunks_mut(tiles.bytes.len() / rows * 8);
            for (source, part) in source.chunks(size / rows * 8).zip(parts) {
                pack_into(dtype.into(), source, &tiles.layout, part).unwrap();
            }
            assert!(packed == tiles.bytes, "{}: [{rows}, {cols}]", format.name());
        }
    }
    let format = Format::Tiles(DType::Q4K);
    let refused = |rows, cols| Layout::new(format, rows, cols).unwrap_err().to_string();
    assert!(refused(12, 256).contains("rows in multiples of 8, found 12"));
    assert!(refused(8, 128).contains("columns in multiples of 256, found 128"));
    let layout = Layout::new(format, 16, 256).unwrap();
    let source = vec![0; 144 * 16];
    let short = &mut vec![0; layout.bytes() / 4];
    let why = pack_into(DType::Q4K.into(), &source, &layout, short).unwrap_err().to_string();
    assert!(why.contains("room for 8 rows of 152 bytes at a time"), "{why}");
}

#[test]
fn mlx_groups_unpack_to_scale_times_code_plus_bias() {
    for format in Format::all() {
        let Format::Mlx { bits, group, scale } = format else { continue };
        let (rows, cols, b) = (3, 384, bits as usize);
        let codes = bytes(1, rows * cols * b / 8);
        let number = |i: usize| (i as f32 * 0.37).sin();
        let half = |i: usize| match scale {
            Scalar::BF16 => plain::f32_to_bf16(number(i)),
            _ => plain::f32_to_f16(number(i)),
        };
        let value = |bits: u16| match scale {
            Scalar::BF16 => plain::bf16_to_f32(bits),
            _ => plain::f16_to_f32(bits),
        };
        let groups = rows * cols / group as usize;
        let scales: Vec<u8> = (0..groups).flat_map(|i| half(i).to_le_bytes()).collect();
        let biases: Vec<u8> = (0..groups).flat_map(|i| half(i + 999).to_le_bytes()).collect();
        let from = Mlx { codes: &codes, scales: &scales, biases: &biases };
        let packed = pack_mlx(format, &from, rows, cols).unwrap();
        let mut got = vec![0.0; cols];
        for r in 0..rows {
            packed.row(r, &mut got);
            for (c, got) in got.iter().enumerate() {
                let at = r * cols + c;
                let code = codes[at * b / 8] >> (at * b % 8) & (255u16 >> (8 - b)) as u8;
                let (s, m) =
                    (value(half(at / group as usize)), value(half(at / group as usize + 999)));
                assert_eq!(*got, s * f32::from(code) + m, "{}: {r}, {c}", format.name());
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_with_one_line() {
    let refused = |result: Result<Planes>| result.unwrap_err().to_string();
    let tests = [
        (refused(pack(DType::Q4K, &[], 1, 128)), "multiples of 256, found 128"),
        (refused(pack(DType::Q4_0, &[0; 17], 1, 32)), "expected 18 bytes, found 17"),
        (refused(pack(DType::F16, &[0; 6], 1, 3)), "multiples of 8, found 3"),
        (refused(pack(DType::I32, &[], 1, 4)), "a float or block type"),
        (refused(pack(DType::Q8_0, &[], usize::MAX, 32)), "less than 2^32 words"),
        (refused(pack(DType::Q8_0, &[], 1, usize::MAX - 31)), "less than 2^32 words"),
    ];
    let layout = Layout::new(Format::Block(DType::Q4_0), 4, 64).unwrap();
    let into = |dtype, bytes: &[u8], room| {
        pack_into(Encoding::Stored(dtype), bytes, &layout, &mut vec![0; room]).unwrap_err()
    };
    let room = layout.bytes();
    let tests = tests.into_iter().chain([
        (into(DType::Q4_0, &[0; 71], room / 2).to_string(), "expected 72 bytes, found 71"),
        (into(DType::Q4_0, &[0; 36], room - 1).to_string(), "room for rows of 48 bytes"),
        (into(DType::Q5_0, &[0; 44], room / 4).to_string(), "expected q4_0, found q5_0"),
    ]);
    for (found, expected) in tests {
        assert!(found.contains(expected), "{found}");
        assert!(!found.contains('\n'));
    }
    let format = Format::Mlx { bits: 4, group: 64, scale: Scalar::F16 };
    let from = Mlx { codes: &[0; 64], scales: &[0; 4], biases: &[0; 2] };
    let found = refused(pack_mlx(format, &from, 1, 128));
    assert!(found.contains("biases: expected 1 x 4 bytes, found 2"), "{found}");
    assert!(
        pack_mlx(Format::Mlx { bits: 3, group: 64, scale: Scalar::F16 }, &from, 1, 64).is_err()
    );
}

#[test]
fn packing_costs_little() {
    // Bits per weight at 4096 columns: codes, scales and no more than a few words.
    for (dtype, bits) in [
        (DType::Q4_0, 4.5),
        (DType::Q8_0, 8.5),
        (DType::Q4K, 4.625),
        (DType::Q6K, 6.625),
        (DType::Mxfp4, 4.25),
        (DType::Iq4Nl, 4.5),
        (DType::Iq4Xs, 4.375),
    ] {
        let layout = Layout::new(Format::Block(dtype), 1, 4096).unwrap();
        let found = 8.0 * layout.bytes() as f64 / 4096.0;
        assert!(found < bits + 0.1, "{dtype}: {found} bits per weight");
    }
}

/// A matrix as f32: each lane unpacks runs of its own.
#[kernel]
fn unpack(y: Out<f32>, width: Const<u32>, format: Format) {
    let weight = PackedWeights::declare("weight", format, width);
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 32);
    let row = weight.row(group_id());
    for i in strided(width / format.run()) {
        let values = weight.read(row, i).floats();
        for (k, value) in values.into_iter().enumerate() {
            y[group_id() * width + (i * format.run() + k as u32)] = value;
        }
    }
}

/// Every format, each at the fewest columns and at some that fill no simdgroup.
fn unpackings() -> Vec<Case> {
    let mut cases = Vec::new();
    let all = Format::all();
    let tiled: Vec<Format> = all.iter().copied().filter_map(Format::tiled).collect();
    for format in all.into_iter().chain(tiled) {
        let shapes = if format.together() > 1 { [(8, 1), (16, 11)] } else { [(2, 1), (1, 11)] };
        for (rows, steps) in shapes {
            let width = steps * format.step() as usize;
            let matrix = Matrix::new(format, 5, rows, width);
            let want = matrix.weights.iter().map(|w| f64::from(*w)).collect();
            cases.push(Case {
                kernel: unpack(format).record(),
                label: format!("{rows} x {width}"),
                numbers: Numbers::new().with("width", width as u32).with("rows", rows as u32),
                buffers: vec![Buffer::zeros(Scalar::F32, rows * width), matrix.buffer()],
                expected: vec![(0, Expected::Exact(want))],
            });
        }
    }
    cases
}

#[test]
fn kernels_read_exactly_the_weights() {
    let cases = unpackings();
    for case in &cases {
        tile::interp::check(case)
            .unwrap_or_else(|e| panic!("{} {}: {e}", case.kernel.name, case.label));
    }
    println!("unpack: {} cases", cases.len());
}
