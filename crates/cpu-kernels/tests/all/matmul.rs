//! Every format on every instruction set of this machine, against f64 sums over decoded weights.

use delft_cpu_kernels::matmul::*;
use formats::{DType, Encoding, Groups};
use std::ops::Range;

/// Reproducible numbers in -1..1.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    pub(crate) fn row(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// Every encoding that a matrix can have: three floats, fifteen blocks, and affine groups of each
/// kind of panel.
fn types() -> impl Iterator<Item = Encoding> {
    let floats = [DType::F32, DType::F16, DType::BF16];
    let mut found: Vec<Encoding> = DType::ALL
        .into_iter()
        .filter(|d| d.is_block() || floats.contains(d))
        .map(Encoding::from)
        .collect();
    assert_eq!(found.len(), 18);
    for (bits, group, scale) in [
        (4, 64, DType::BF16),
        (4, 32, DType::F16),
        (3, 64, DType::F16),
        (2, 32, DType::BF16),
        (8, 64, DType::F16),
        (8, 32, DType::BF16),
        (6, 128, DType::BF16),
        (5, 32, DType::F16),
    ] {
        found.extend(Groups::new(bits, group, scale).map(Encoding::Groups));
    }
    assert_eq!(found.len(), 26);
    found.into_iter()
}

/// Affine groups of some weights: each from the least to the greatest of its group.
fn affine(groups: Groups, weights: &[f32], bytes: &mut [u8]) {
    let half = |x: f32| match groups.scale {
        DType::BF16 => formats::quant::plain::f32_to_bf16(x),
        _ => formats::quant::plain::f32_to_f16(x),
    };
    for (w, b) in weights.chunks(groups.group).zip(bytes.chunks_mut(groups.bytes())) {
        let (least, most) = w.iter().fold((f32::MAX, f32::MIN), |(l, m), &x| (l.min(x), m.max(x)));
        let steps = ((1 << groups.bits) - 1) as f32;
        let (scale, offset) = (half((most - least) / steps), half(least));
        let code = |x: f32| (x - groups.number(offset)) / groups.number(scale);
        for (i, &x) in w.iter().enumerate() {
            let code = code(x).round().clamp(0.0, steps) as u32;
            for bit in 0..groups.bits {
                let at = i * groups.bits + bit;
                b[at / 8] |= ((code >> bit & 1) as u8) << (at % 8);
            }
        }
        b[groups.code_bytes()..][..2].copy_from_slice(&scale.to_le_bytes());
        b[groups.code_bytes() + 2..].copy_from_slice(&offset.to_le_bytes());
    }
}

/// A matrix of noise, and its decoded weights.
fn matrix(encoding: Encoding, rows: usize, cols: usize, noise: &mut Noise) -> (Matrix, Vec<f32>) {
    packed(encoding, rows, cols, &noise.row(rows * cols))
}

/// A matrix of these weights, and what they decode to.
pub(crate) fn packed(
    encoding: Encoding,
    rows: usize,
    cols: usize,
    weights: &[f32],
) -> (Matrix, Vec<f32>) {
    let mut bytes = vec![0; encoding.bytes_for(rows * cols).unwrap()];
    match encoding {
        Encoding::Stored(dtype) => dtype.encode(weights, &mut bytes).unwrap(),
        Encoding::Groups(groups) => affine(groups, weights, &mut bytes),
    }
    let mut decoded = vec![0.0; rows * cols];
    encoding.decode(&bytes, &mut decoded).unwrap();
    (Matrix::pack(encoding, rows, cols, &bytes, &Alone).unwrap(), decoded)
}

/// Activations over `x` with storage that lives as long; the weights are read in place for up to
/// eight tokens.
fn activations<'a>(isa: Isa, x: &'a [f32], cols: usize, storage: &'a mut Huge) -> Activations<'a> {
    let path = if x.len() / cols <= 8 { Path::InPlace } else { Path::Expanded };
    on_path(path, isa, x, cols, storage)
}

pub(crate) fn on_path<'a>(
    path: Path,
    isa: Isa,
    x: &'a [f32],
    cols: usize,
    storage: &'a mut Huge,
) -> Activations<'a> {
    let tokens = x.len() / cols;
    *storage = Huge::zeroed(Activations::bytes(path, tokens, cols)).unwrap();
    // SAFETY: the slice holds the rows, the storage has the bytes and nobody else uses it.
    unsafe {
        let x = Activations::new(path, x.as_ptr(), cols, tokens, cols, storage.as_ptr());
        x.quantise(isa, 0..x.blocks(), true);
        x
    }
}

/// What the product sees of token `t`: for blocks the quantised values, or bf16, and for floats the
/// f32.
fn seen(isa: Isa, x: &Activations, quantised: bool, t: usize) -> Vec<f64> {
    let mut row = vec![0.0; x.cols()];
    // SAFETY: the rows and lines were written by `activations`.
    unsafe { x.seen(isa, quantised, t, &mut row) };
    row.into_iter().map(f64::from).collect()
}

struct Case {
    rows: usize,
    cols: usize,
    tokens: usize,
    range: Range<usize>,
    why: &'static str,
}

#[test]
fn products_match_f64_sums_on_every_instruction_set() {
    let cases = [
        Case { rows: 48, cols: 512, tokens: 1, range: 0..1, why: "decode" },
        Case { rows: 37, cols: 256, tokens: 3, range: 0..3, why: "ragged rows, three tokens" },
        Case { rows: 32, cols: 768, tokens: 8, range: 0..8, why: "eight tokens" },
        Case {
            rows: 32,
            cols: 256,
            tokens: 21,
            range: 13..21,
            why: "a few tokens across groups of many",
        },
        Case { rows: 32, cols: 256, tokens: 40, range: 39..40, why: "the last token of many" },
        Case {
            rows: 61,
            cols: 1536,
            tokens: 39,
            range: 0..39,
            why: "tiles, ragged in every direction, two slabs deep",
        },
        Case { rows: 16, cols: 512, tokens: 64, range: 5..30, why: "tiles of a range" },
        Case { rows: 336, cols: 256, tokens: 33, range: 0..33, why: "more panels than a slab" },
        Case {
            rows: 40,
            cols: 1120,
            tokens: 20,
            range: 0..20,
            why: "columns that fill no group of 256",
        },
        Case { rows: 40, cols: 96, tokens: 1, range: 0..1, why: "less than a group" },
        Case {
            rows: 21,
            cols: 77,
            tokens: 15,
            range: 0..15,
            why: "float weights take any columns",
        },
    ];
    let mut noise = Noise(7);
    let mut scratch = Scratch::new().unwrap();
    for case in &cases {
        for encoding in
            types().filter(|encoding| case.cols.is_multiple_of(encoding.block_elements()))
        {
            let (w, decoded) = matrix(encoding, case.rows, case.cols, &mut noise);
            let x = noise.row(case.tokens * case.cols);
            let bias = noise.row(case.rows);
            for &isa in Isa::available() {
                for accumulate in [false, true] {
                    let mut storage = Huge::zeroed(0).unwrap();
                    let x = activations(isa, &x, case.cols, &mut storage);
                    let stride = case.rows + 3;
                    let mut y = vec![0.5f32; case.tokens * stride];
                    let out = Output { start: y.as_mut_ptr(), stride };
                    let epilogue = Epilogue { accumulate, bias: accumulate.then_some(&bias) };
                    // Panels in three parts, as a team would.
                    for index in 0..3 {
                        let panels = share(w.panels(), index, 3);
                        // SAFETY: `y` holds every token and row; one thread.
                        unsafe {
                            multiply(
                                isa,
                                &w,
                                &x,
                                case.range.clone(),
                                panels,
                                out,
                                epilogue,
                                &mut scratch,
                            )
                        }
                    }
                    for t in 0..case.tokens {
                        let seen = seen(isa, &x, encoding.is_quantised(), t);
                        for r in 0..stride {
                            let found = f64::from(y[t * stride + r]);
                            let here =
                                format!("{} {isa} {}: token {t}, row {r}", encoding, case.why);
                            if r >= case.rows || !case.range.contains(&t) {
                                assert_eq!(found, 0.5, "{here}: written outside");
                                continue;
                            }
                            // The tile unit reads weights as bf16, too.
                            let half = encoding.is_quantised() && x.halves(isa);
                            let weight = |w: f32| {
                                if half {
                                    f32::from_bits((w.to_bits() + 0x8000) >> 16 << 16)
                                } else {
                                    w
                                }
                            };
                            let terms = || {
                                decoded[r * case.cols..]
                                    .iter()
                                    .zip(&seen)
                                    .map(|(&w, x)| f64::from(weight(w)) * x)
                            };
                            let added = if accumulate { 0.5 + f64::from(bias[r]) } else { 0.0 };
                            let (expected, size) =
                                (terms().sum::<f64>() + added, terms().map(f64::abs).sum::<f64>());
                            // Float weights on the tile unit: activations to 16 bits.
                            let close =
                                if !encoding.is_quantised() && x.halves(isa) { 8e-6 } else { 1e-6 };
                            assert!(
                                (found - expected).abs() <= close * size + 1e-6,
                                "{here}: {found} for {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Codes and activations as great as they come, of the same signs everywhere: narrow sums that
/// overflow would be far off.
#[test]
fn the_greatest_sums_fit() {
    let (rows, cols) = (32, 512);
    let mut scratch = Scratch::new().unwrap();
    for encoding in types().filter(|encoding| encoding.is_quantised()) {
        for sign in [1.0, -1.0] {
            // The greatest of a block of the other sign, so that formats without a zero of their
            // own reach the end of their codes.
            let weights: Vec<f32> =
                (0..rows * cols).map(|i| if i % 16 == 0 { -sign } else { 0.96 * sign }).collect();
            let (w, decoded) = packed(encoding, rows, cols, &weights);
            for (isa, tokens) in
                Isa::available().iter().flat_map(|&isa| [1, 8, 16].map(|n| (isa, n)))
            {
                let rows_of_x = vec![1.0; tokens * cols];
                let mut storage = Huge::zeroed(0).unwrap();
                let x = activations(isa, &rows_of_x, cols, &mut storage);
                let mut y = vec![0f32; tokens * rows];
                let out = Output { start: y.as_mut_ptr(), stride: rows };
                let (all, panels, epilogue) = (0..tokens, 0..w.panels(), Epilogue::default());
                // SAFETY: `y` holds all tokens of all rows.
                unsafe { multiply(isa, &w, &x, all, panels, out, epilogue, &mut scratch) };
                for (i, y) in y.iter().enumerate() {
                    let row = &decoded[i % rows * cols..][..cols];
                    let expected = row.iter().map(|&w| f64::from(w)).sum::<f64>();
                    // The tile unit reads weights as bf16.
                    let close = if x.halves(isa) { 1.0 / 256.0 } else { 1e-6 };
                    let (found, size) = (f64::from(*y), cols as f64);
                    assert!(
                        (found - expected).abs() <= close * size,
                        "{} {isa}, {tokens} tokens: {found} for {expected}",
                        encoding
                    );
                }
            }
        }
    }
}

/// Dot products of four bytes and products of matrices are the same sums, scaled and added in the
/// same order.
#[cfg(target_arch = "aarch64")]
#[test]
fn every_neon_set_gives_the_same_bits() {
    let (rows, mut noise) = (29, Noise(13));
    let mut scratch = Scratch::new().unwrap();
    let sets = &Isa::available()[1..];
    for encoding in types() {
        // A slab and a part of another, which for small blocks is no whole group.
        let cols = 512 + if encoding.block_elements() == 32 { 96 } else { 256 };
        let (w, _) = matrix(encoding, rows, cols, &mut noise);
        let bias = noise.row(rows);
        // In place, in ragged groups, and in a range of many.
        for (tokens, range) in [(1, 0..1), (7, 0..7), (9, 0..9), (39, 0..39), (64, 5..30)] {
            let x = noise.row(tokens * cols);
            let mut bits = |isa: Isa| {
                let mut storage = Huge::zeroed(0).unwrap();
                let x = activations(isa, &x, cols, &mut storage);
                let mut y = vec![0.5f32; tokens * rows];
                let out = Output { start: y.as_mut_ptr(), stride: rows };
                let epilogue = Epilogue { accumulate: true, bias: Some(&bias) };
                let panels = 0..w.panels();
                // SAFETY: `y` holds all tokens of all rows.
                unsafe { multiply(isa, &w, &x, range.clone(), panels, out, epilogue, &mut scratch) }
                y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let expected = bits(sets[0]);
            for &isa in &sets[1..] {
                let found = bits(isa);
                let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{} {isa}, {tokens} tokens: element", encoding);
            }
        }
    }
}

/// On every path a token's results have the same bits alone and among any others, and however the
/// panels are shared out.
#[test]
fn results_depend_on_the_path_alone() {
    let (rows, cols, most) = (7 * ROWS - 3, 1120usize, 37);
    let mut noise = Noise(17);
    let mut scratch = Scratch::new().unwrap();
    for encoding in types().filter(|encoding| cols.is_multiple_of(encoding.block_elements())) {
        let (w, _) = matrix(encoding, rows, cols, &mut noise);
        let (values, bias) = (noise.row(most * cols), noise.row(rows));
        for (isa, path) in Isa::available().iter().flat_map(|&isa| {
            [Path::InPlace, Path::Expanded, Path::Exact, Path::Rounded].map(|path| (isa, path))
        }) {
            for (accumulate, bias) in [(false, None), (true, None), (true, Some(&bias[..]))] {
                let mut run = |tokens: Range<usize>, parts: usize| {
                    let mut storage = Huge::zeroed(0).unwrap();
                    let x = &values[tokens.start * cols..tokens.end * cols];
                    let x = on_path(path, isa, x, cols, &mut storage);
                    let mut y = vec![0.3f32; tokens.len() * rows];
                    let out = Output { start: y.as_mut_ptr(), stride: rows };
                    let epilogue = Epilogue { accumulate, bias };
                    for part in 0..parts {
                        let panels = share(w.panels(), part, parts);
                        let all = 0..tokens.len();
                        // SAFETY: `y` holds every token and row; one thread.
                        unsafe { multiply(isa, &w, &x, all, panels, out, epilogue, &mut scratch) }
                    }
                    y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let alone: Vec<Vec<u32>> = (0..most).map(|t| run(t..t + 1, 1)).collect();
                for (tokens, parts) in
                    [(0..most, 1), (0..most, 3), (3..5, 2), (1..8, 5), (9..17, 1), (20..32, 7)]
                {
                    let found = run(tokens.clone(), parts);
                    for (t, found) in tokens.clone().zip(found.chunks(rows)) {
                        let differs = found.iter().zip(&alone[t]).position(|(a, b)| a != b);
                        let here = format!("{encoding} {isa} {path:?} {tokens:?}");
                        assert_eq!(differs, None, "{here} in {parts} parts: token {t}, row");
                    }
                }
            }
        }
    }
}

#[test]
fn quantised_activations_stay_close_to_exact_ones_and_are_alike_everywhere() {
    let mut noise = Noise(3);
    let (tokens, cols) = (5, 512);
    let values = noise.row(tokens * cols);
    let mut storage = Huge::zeroed(0).unwrap();
    let x = activations(Isa::Scalar, &values, cols, &mut storage);
    for t in 0..tokens {
        for (c, seen) in seen(Isa::Scalar, &x, true, t).iter().enumerate() {
            let block = &values[t * cols + c / BLOCK * BLOCK..][..BLOCK];
            let peak = block.iter().fold(0f32, |peak, x| peak.max(x.abs()));
            let error = (seen - f64::from(values[t * cols + c])).abs();
            assert!(error <= f64::from(peak) * 0.501 / 127.0, "{error} of {peak}");
        }
    }
    for &isa in Isa::available() {
        let mut other = Huge::zeroed(0).unwrap();
        let y = activations(isa, &values, cols, &mut other);
        for t in 0..tokens {
            assert_eq!(seen(Isa::Scalar, &x, true, t), seen(isa, &y, true, t), "{isa}");
        }
    }
}

#[test]
fn the_product_is_close_to_that_of_exact_activations() {
    let mut noise = Noise(11);
    let (rows, cols) = (32, 2048);
    let ways = [(1, Path::InPlace), (16, Path::Expanded), (16, Path::Exact), (16, Path::Rounded)];
    for (encoding, (tokens, path)) in types().flat_map(|encoding| ways.map(|way| (encoding, way))) {
        let (w, decoded) = matrix(encoding, rows, cols, &mut noise);
        let values = noise.row(tokens * cols);
        for &isa in Isa::available() {
            let mut storage = Huge::zeroed(0).unwrap();
            let x = on_path(path, isa, &values, cols, &mut storage);
            let mut y = vec![0f32; tokens * rows];
            let out = Output { start: y.as_mut_ptr(), stride: rows };
            let mut scratch = Scratch::new().unwrap();
            // SAFETY: `y` holds all tokens of all rows.
            unsafe {
                multiply(
                    isa,
                    &w,
                    &x,
                    0..tokens,
                    0..w.panels(),
                    out,
                    Epilogue::default(),
                    &mut scratch,
                )
            }
            let (mut error, mut size) = (0f64, 0f64);
            for (i, y) in y.iter().enumerate() {
                let (w, x) = (&decoded[i % rows * cols..][..cols], &values[i / rows * cols..]);
                let exact: f64 = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                error += (exact - f64::from(*y)).powi(2);
                size += exact * exact;
            }
            let error = (error / size).sqrt();
            let most = match encoding.is_quantised() {
                true if x.halves(isa) => 3e-3,
                true => 8e-3,
                false if x.halves(isa) && path == Path::Expanded => 1e-5,
                false if x.halves(isa) && path == Path::Rounded => 3e-3,
                false => 2e-6,
            };
            assert!(error < most, "{encoding} {isa}, {path:?}: {error:.1e}");
        }
    }
}

#[test]
fn rows_come_back_exactly() {
    let mut noise = Noise(5);
    for (rows, cols) in [(37, 512), (3, 1120), (17, 33usize)] {
        for encoding in types().filter(|encoding| cols.is_multiple_of(encoding.block_elements())) {
            let (w, decoded) = matrix(encoding, rows, cols, &mut noise);
            let mut row = vec![0.0; cols];
            for r in 0..rows {
                w.row(r, &mut row);
                let differs = row.iter().zip(&decoded[r * cols..]).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{} row {r} of {rows}: column", encoding);
            }
        }
    }
}

/// Every type on every instruction set, with ragged panels, parts and tiles, against sums in f64.
#[test]
fn products_with_a_transpose_agree_with_sums_in_f64() {
    let mut noise = Noise(11);
    // Rows and columns of whole parts, of several and of less than one.
    let shapes = [(256, 64, 16), (290, 96, 21), (64, 256, 3), (37, 33usize, 13), (2112, 40, 37)];
    for (rows, cols, tokens) in shapes {
        for encoding in types().filter(|encoding| cols.is_multiple_of(encoding.block_elements())) {
            let (w, decoded) = matrix(encoding, rows, cols, &mut noise);
            let values = noise.row(tokens * rows);
            let ways = Isa::available().iter();
            let ways = ways.flat_map(|&isa| [(isa, Path::Exact), (isa, Path::Rounded)]);
            for (isa, path) in ways {
                let mut storage = Huge::zeroed(0).unwrap();
                let x = on_path(path, isa, &values, rows, &mut storage);
                // From this column on, products are added to ones.
                let added = 32;
                let before = |c: usize| if c < added { f32::NAN } else { 1.0 };
                let mut y: Vec<f32> = (0..tokens * cols).map(|at| before(at % cols)).collect();
                let out = Output { start: y.as_mut_ptr(), stride: cols };
                let (mut scratch, mut turned) = (Scratch::new().unwrap(), Turned::new().unwrap());
                // Shares of two threads, each in two calls.
                let shares = [(0..added, false), (added..cols, true)].into_iter();
                let calls = shares.flat_map(|share| {
                    [(share.clone(), 0..tokens / 2), (share, tokens / 2..tokens)]
                });
                for ((columns, adds), rows) in calls {
                    // SAFETY: `y` holds all tokens of all columns.
                    unsafe {
                        let room = (&mut scratch, &mut turned);
                        multiply_turned(isa, &w, &x, rows, columns, out, adds, room);
                    }
                }
                // Weights in blocks are rounded to bf16 for the tile unit.
                let most = match Turned::encoding(isa, encoding) {
                    part if part == encoding || part == DType::F32.into() => 2e-6,
                    _ => 3e-3,
                };
                let rounds =
                    path == Path::Rounded && x.halves(isa) && encoding != DType::F32.into();
                let most = if rounds { most + 2e-3 } else { most };
                for (at, y) in y.iter().enumerate() {
                    let (t, c) = (at / cols, at % cols);
                    let term = |r: usize| {
                        f64::from(values[t * rows + r]) * f64::from(decoded[r * cols + c])
                    };
                    let first = if c < added { 0.0 } else { 1.0 };
                    let (want, scale) =
                        (0..rows).map(term).fold((first, first), |(a, b), x| (a + x, b + x.abs()));
                    let error = (f64::from(*y) - want).abs() / scale.max(1e-9);
                    assert!(
                        error < most,
                        "{encoding} {isa} {path:?} {rows} {cols}, {t} {c}: {error:.1e}"
                    );
                }
            }
        }
    }
}

#[test]
fn infinities_and_nans_are_not_lost() {
    let mut noise = Noise(9);
    let (w, _) = matrix(DType::Q8_0.into(), 16, 64, &mut noise);
    for (bad, tokens) in
        [(f32::NAN, 1), (f32::INFINITY, 1), (f32::NAN, 12), (f32::NEG_INFINITY, 12)]
    {
        let mut values = noise.row(64 * tokens);
        let last = tokens - 1;
        values[last * 64 + 40] = bad;
        for &isa in Isa::available() {
            let mut storage = Huge::zeroed(0).unwrap();
            let x = activations(isa, &values, 64, &mut storage);
            let mut y = vec![0f32; 16 * tokens];
            let out = Output { start: y.as_mut_ptr(), stride: 16 };
            let mut scratch = Scratch::new().unwrap();
            // SAFETY: `y` holds all tokens of all rows.
            unsafe {
                multiply(isa, &w, &x, 0..tokens, 0..1, out, Epilogue::default(), &mut scratch)
            }
            let (fine, lost) = y.split_at(last * 16);
            assert!(lost.iter().all(|y| !y.is_finite()), "{isa} {bad}, {tokens} tokens: {lost:?}");
            assert!(
                fine.iter().all(|y| y.is_finite()),
                "{isa} {bad}, {tokens} tokens: spread to others"
            );
        }
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let cases = [
        (DType::I32, 2, 32, 256, "integers"),
        (DType::Q4_0, 2, 33, 36, "columns that are no blocks"),
        (DType::Q8_0, 2, 32, 67, "a byte short"),
        (DType::F32, usize::MAX, usize::MAX, 0, "a size that overflows"),
        (DType::F16, 4, 0, 0, "no columns"),
    ];
    for (encoding, rows, cols, bytes, why) in cases {
        assert!(Matrix::pack(encoding, rows, cols, &vec![0; bytes], &Alone).is_err(), "{why}");
    }
    assert_eq!(Matrix::pack(DType::F16, 0, 8, &[], &Alone).unwrap().panels(), 0);
}

#[test]
fn packing_costs_little_space() {
    let mut noise = Noise(2);
    // Groups of few bits take four or eight.
    for encoding in types().filter(|encoding| matches!(encoding, Encoding::Stored(_))) {
        let (w, _) = matrix(encoding, 32, 2048, &mut noise);
        let file = encoding.bytes_for(32 * 2048).unwrap() as f64;
        let more = w.resident_bytes() as f64 / file - 1.0;
        // Q2_K and Q3_K keep 4- and 6-bit scales, which become bytes here, and MXFP4's bytes become
        // bf16. Ternary blocks get a factor for each 32 weights, and TQ1_0 has five to a byte, where
        // there are four here.
        let most = if encoding == DType::Tq1_0.into() {
            0.41
        } else if encoding == DType::Tq2_0.into() {
            0.16
        } else if encoding == DType::Q2K.into() {
            0.20
        } else if encoding == DType::Q3K.into() || encoding == DType::Mxfp4.into() {
            0.07
        } else {
            0.04
        };
        assert!((0.0..=most).contains(&more), "{}: {more:+.3}", encoding);
    }
}

/// Ragged sizes and several parts of each side, against sums in f64 of rounded numbers.
#[test]
fn sums_of_outer_products_agree_with_sums_in_f64() {
    let mut noise = Noise(17);
    let round = |x: f32| f64::from(f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000));
    for [m, n, rows] in [[16, 40, 512], [129, 16, 70], [33, 300, 1100], [5, 3, 1], [2, 2, 0]] {
        let (a, b) = (noise.row(rows * m), noise.row(rows * n));
        for &isa in Isa::available().iter().filter(|isa| tiles_halves(**isa)) {
            for adds in [false, true] {
                let mut y = vec![if adds { 1.0 } else { f32::NAN }; m * n];
                let sides = [(&a, m), (&b, n)]
                    .map(|(side, stride)| StridedRows { start: side.as_ptr(), stride });
                let out = Output { start: y.as_mut_ptr(), stride: n };
                let mut scratch = Scratch::new().unwrap();
                // SAFETY: all three have that many elements.
                unsafe { outer(isa, sides, [m, n, rows], out, adds, &mut scratch) };
                for (at, y) in y.iter().enumerate() {
                    let term = |t: usize| round(a[t * m + at / n]) * round(b[t * n + at % n]);
                    let first = f64::from(u8::from(adds));
                    let (want, scale) =
                        (0..rows).map(term).fold((first, first), |(a, b), x| (a + x, b + x.abs()));
                    let error = (f64::from(*y) - want).abs() / scale.max(1e-9);
                    assert!(error < 1e-6, "{isa} {m} {n} {rows} {adds}, {at}: {error:.1e}");
                }
            }
        }
    }
}
