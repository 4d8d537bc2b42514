//! Quantised blocks against the `gguf` package (committed vectors) and ggml itself (vectors under
//! DELFT_TEST_DATA).

use std::path::{Path, PathBuf};

use delft_formats::quant::{BlockFormat, LARGEST_POWER, Parts, plain};
use delft_formats::{DType, with_block};

/// The fifteen block types.
fn blocks() -> impl Iterator<Item = DType> {
    let found: Vec<DType> = DType::ALL.into_iter().filter(|d| d.is_block()).collect();
    assert_eq!(found.len(), 15);
    found.into_iter()
}

fn vector(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quant").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / 4];
    plain::decode_f32(bytes, &mut values);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_elements()];
    dtype.decode(bytes, &mut values).unwrap();
    values
}

fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xA5; dtype.bytes_for(values.len() as u64).unwrap() as usize];
    dtype.encode(values, &mut bytes).unwrap();
    bytes
}

/// The ggml vectors, or none (said aloud) where the test data is not set up.
fn ggml_vectors() -> Option<PathBuf> {
    testing::data("suites/ggml-quant-vectors")
}

/// A deterministic stream of bytes (xorshift).
fn noise(seed: u64) -> impl FnMut() -> u8 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    }
}

#[test]
fn decode_equals_gguf_package() {
    for dtype in blocks() {
        let blocks = vector(&format!("{dtype}.blocks"));
        let expected = floats(&vector(&format!("{dtype}.decoded.f32")));
        assert_eq!(expected.len(), 1024);
        assert_eq!(bits(&decoded(dtype, &blocks)), bits(&expected), "{dtype}");
    }
}

#[test]
fn encode_equals_gguf_package() {
    let source = floats(&vector("source.f32"));
    for dtype in [
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Mxfp4,
        DType::Tq1_0,
        DType::Tq2_0,
    ] {
        assert_eq!(encoded(dtype, &source), vector(&format!("{dtype}.encoded")), "{dtype}");
    }
}

#[test]
fn ggml_vectors_decode_exactly_and_encode_as_well() {
    let Some(folder) = ggml_vectors() else { return };
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let source = floats(&read("src.f32"));
    let manifest = String::from_utf8(read("manifest.tsv")).unwrap();
    let mut seen = 0;
    for line in manifest.lines().skip(1) {
        let fields: Vec<&str> = line.split('\t').collect();
        let name = fields[0];
        let id: u32 = fields[1].parse().unwrap();
        let Ok(dtype) = DType::from_ggml_id(id, name) else { continue };
        seen += 1;
        assert_eq!(fields[2].parse(), Ok(dtype.block_elements()), "{name}");
        assert_eq!(fields[3].parse(), Ok(dtype.block_bytes()), "{name}");
        let bytes = read(&format!("{name}.bin"));
        let expected = floats(&read(&format!("{name}.deq.f32")));
        assert_eq!(bits(&decoded(dtype, &bytes)), bits(&expected), "{name}");
        if name.ends_with(".imat") {
            continue; // Made with an importance matrix, which Delft's encoders do not take.
        }
        let ours = encoded(dtype, &source);
        // ggml searches for IQ4_NL's scales by another rule.
        if dtype.block_elements() <= 32 && dtype != DType::Iq4Nl {
            assert_eq!(ours, bytes, "{name}: encode is bit-exact");
        }
        let ours = decoded(dtype, &ours);
        for row in 0..4 {
            let at = row * 1024..(row + 1) * 1024;
            let squares: f64 = ours[at.clone()]
                .iter()
                .zip(&source[at])
                .map(|(a, b)| f64::from(a - b).powi(2))
                .sum::<f64>();
            let rmse = (squares / 1024.0).sqrt();
            let theirs: f64 = fields[6 + row].parse().unwrap();
            println!(
                "{name} row {row}: rmse {rmse:.6}, ggml {theirs:.6}, ratio {:.4}",
                rmse / theirs
            );
            assert!(rmse <= theirs * 1.02, "{name} row {row}: rmse {rmse}, ggml {theirs}");
        }
    }
    assert_eq!(seen, 32, "f16, bf16 and fifteen blocks with and without an importance matrix");
}

#[test]
fn split_means_what_decode_gives() {
    fn check<B: BlockFormat>() {
        let mut byte = noise(B::BYTES as u64);
        for round in 0..500 {
            let block: Vec<u8> = (0..B::BYTES).map(|_| byte()).collect();
            // Stale parts must not shine through.
            let mut parts =
                Parts { codes: [0xEE; 256], d: 1, min: 1, scales: [3; 16], mins: [3; 16] };
            B::split(&block, &mut parts);
            let (mut weights, mut applied) = (vec![0.0; B::ELEMENTS], vec![0.0; B::ELEMENTS]);
            B::decode(&block, &mut weights);
            B::AFFINE.apply(&parts, &mut applied);
            assert!(
                parts.codes[..B::ELEMENTS].iter().all(|&c| u32::from(c) < 1 << B::AFFINE.bits),
                "{}",
                B::NAME
            );
            for (i, (&w, &a)) in weights.iter().zip(&applied).enumerate() {
                assert!(
                    w == a || w.is_nan() && a.is_nan(),
                    "{} round {round} element {i}: {w} {a}",
                    B::NAME
                );
            }
        }
    }
    for dtype in blocks() {
        with_block!(dtype, B => check::<B>(), else => unreachable!());
    }
}

#[test]
fn encode_of_a_decoded_block_stays_close() {
    // A block's own weights are on its grid, so a second encoding loses almost nothing.
    let source = floats(&vector("source.f32"));
    for dtype in blocks() {
        let once = decoded(dtype, &encoded(dtype, &source));
        let twice = decoded(dtype, &encoded(dtype, &once));
        let error = |a: &[f32], b: &[f32]| {
            a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
        };
        let (first, second) = (error(&source, &once), error(&once, &twice));
        assert!(second <= 0.5 * first, "{dtype}: {first:e} then {second:e}");
    }
}

#[test]
fn any_weights_encode_and_any_bytes_decode() {
    let extremes = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        1e-45,
        -1e-45,
        0.0,
        -0.0,
        65504.0,
        65536.0,
        -1e9,
        1.0,
    ];
    for dtype in blocks() {
        let mut byte = noise(7);
        for round in 0..300 {
            let weights: Vec<f32> = (0..256)
                .map(|i| match round % 3 {
                    0 => extremes[usize::from(byte()) % extremes.len()],
                    1 => extremes[(round / 3 + i / 250) % extremes.len()],
                    _ => f32::from_bits(u32::from_le_bytes([byte(), byte(), byte(), byte()])),
                })
                .collect();
            decoded(dtype, &encoded(dtype, &weights));
        }
    }
    // One finite outlier of any size must not poison its block with NaN in the searched formats.
    for dtype in
        [DType::Q2K, DType::Q3K, DType::Q4K, DType::Q5K, DType::Q6K, DType::Iq4Nl, DType::Iq4Xs]
    {
        for outlier in extremes {
            let mut weights = vec![0.5; 256];
            weights[17] = outlier;
            let back = decoded(dtype, &encoded(dtype, &weights));
            assert!(back.iter().all(|w| w.is_finite()), "{dtype} with {outlier}");
        }
    }
}

/// Errors that count more are smaller, and no kind of importance gives bytes that mean nothing.
#[test]
fn errors_count_by_importance() {
    let mut byte = noise(11);
    let mut number = move || (0..4).map(|_| f32::from(byte()) - 127.5).sum::<f32>() / 100.0;
    let weights: Vec<f32> = (0..16 * 256).map(|_| number()).collect();
    // One column in eight matters.
    let importance: Vec<f32> =
        (0..weights.len()).map(|i| if i % 8 == 3 { 6.0 } else { 0.3 }).collect();
    for dtype in blocks() {
        let lost = |bytes: &[u8]| -> f64 {
            let errors = decoded(dtype, bytes).into_iter().zip(&weights);
            let errors = errors.zip(&importance);
            errors.map(|((a, b), by)| f64::from(by * (a - b).powi(2))).sum()
        };
        let mut bytes = vec![0xA5; dtype.bytes_for(weights.len() as u64).unwrap() as usize];
        dtype.encode_by(&weights, &importance, &mut bytes).unwrap();
        let (by, plain) = (lost(&bytes), lost(&encoded(dtype, &weights)));
        // Of eight bits nothing is to be gained.
        assert!(
            if dtype == DType::Q8_0 { by == plain } else { by < plain },
            "{dtype}: {by} {plain}"
        );
        for odd in [[f32::NAN; 256], [0.0; 256], [f32::MAX; 256]] {
            let bytes = &mut bytes[..256 / dtype.block_elements() * dtype.block_bytes()];
            dtype.encode_by(&odd, &importance[..256], bytes).unwrap();
            dtype.encode_by(&weights[..256], &[1e-4; 256], bytes).unwrap();
        }
        assert!(dtype.encode_by(&weights, &importance[1..], &mut bytes).is_err(), "{dtype}");
    }
}

#[test]
fn plain_types_round_trip() {
    let values = [0.0, -1.5, 3.25, 1e-3, 65504.0, -2.0];
    for (dtype, tolerance) in
        [(DType::F32, 0.0), (DType::F64, 0.0), (DType::F16, 5e-4), (DType::BF16, 4e-3)]
    {
        for (a, b) in values.iter().zip(decoded(dtype, &encoded(dtype, &values))) {
            assert!((a - b).abs() <= tolerance * a.abs(), "{dtype}: {a} {b}");
        }
    }
    // Every f16 there is, at an odd address, and its way back.
    let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let shifted: Vec<u8> = std::iter::once(0).chain(bytes.iter().copied()).collect();
    let values = decoded(DType::F16, &shifted[1..]);
    for (i, (&v, back)) in values.iter().zip(encoded(DType::F16, &values).chunks(2)).enumerate() {
        assert!(v.is_nan() || back == &bytes[2 * i..2 * i + 2], "f16 {i:#x}: {v}");
        assert_eq!(v.to_bits(), plain::f16_to_f32(i as u16).to_bits(), "f16 {i:#x}");
    }
}

#[test]
fn dtype_tables_agree() {
    for dtype in DType::ALL {
        assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        if let Some(id) = dtype.ggml_id() {
            assert_eq!(DType::from_ggml_id(id, "t").unwrap(), dtype);
        }
        assert_eq!(
            dtype.bytes_for(u64::from(u32::MAX) * 256 - 255).is_none(),
            dtype.is_block(),
            "{dtype}"
        );
    }
    assert_eq!(DType::Q4K.bytes_for(512), Some(288));
    assert_eq!(DType::F64.bytes_for(u64::MAX), None);
    let error = DType::from_ggml_id(17, "w").unwrap_err().to_string();
    assert!(error.contains("IQ2_XS (17)") && error.contains("q4_k"), "{error}");
    let error = DType::from_ggml_id(4, "w").unwrap_err().to_string();
    assert!(error.contains("unknown tensor type 4"), "{error}");
    assert!(DType::I32.decode(&[0; 4], &mut [0.0]).is_err());
    assert!(DType::Q4_0.decode(&[0; 17], &mut [0.0; 32]).is_err());
    assert!(DType::Q4_0.decode(&[0; 18], &mut [0.0; 31]).is_err());
}

#[test]
fn a_block_is_finite_if_its_halves_are() {
    fn check<B: BlockFormat>(dtype: DType) {
        let mut noise = noise(29);
        let mut weights = vec![0.0; B::ELEMENTS];
        for round in 0..2000 {
            let mut block: Vec<u8> = (0..B::BYTES).map(|_| noise()).collect();
            for &at in B::HALVES {
                // An exponent with a zero in it: any finite f16.
                block[at + 1] &= !0x40;
            }
            B::POWER.into_iter().for_each(|at| block[at] = block[at].min(LARGEST_POWER));
            B::decode(&block, &mut weights);
            assert!(weights.iter().all(|w| w.is_finite()), "{dtype}: {block:?}");
            assert_eq!(dtype.not_finite(&block), None);
            if let Some(at) = B::POWER {
                block[at] = LARGEST_POWER + 1;
                block[1] = 0x77;
                let found = dtype.not_finite(&block).unwrap();
                assert_eq!((found.element, found.shared), (0, B::ELEMENTS));
                B::decode(&block, &mut weights);
                assert!(found.value == f32::INFINITY && weights[0] == f32::INFINITY);
                continue;
            }
            let at = B::HALVES[round % B::HALVES.len()];
            let bits = [0x7c00u16, 0xfc00, 0x7e00, 0x7c01, 0xffff][round % 5];
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            let found = dtype.not_finite(&block).unwrap();
            assert_eq!((found.element, found.shared), (0, B::ELEMENTS));
            assert_eq!(found.value.is_nan(), bits & 0x3ff != 0);
            if bits & 0x3ff != 0 {
                B::decode(&block, &mut weights);
                assert!(weights.iter().any(|w| w.is_nan()), "{dtype}: byte {at} is no number");
            }
        }
    }
    for dtype in blocks() {
        with_block!(dtype, B => check::<B>(dtype), else => unreachable!());
    }
}

#[test]
fn the_first_weight_that_is_not_finite_is_found_wherever_it_lies() {
    // MXFP4 has no f16 numbers.
    let types = DType::ALL.into_iter().filter(|d| d.is_block() || *d == DType::F64);
    let types = types.filter(|d| *d != DType::Mxfp4);
    for dtype in types.chain([DType::F32, DType::F16, DType::BF16]) {
        let (elements, size) = (dtype.block_elements(), dtype.block_bytes());
        for blocks in [1, 2, 3, 127, 128, 129, 4097] {
            let clean = vec![0; blocks * size];
            assert_eq!(dtype.not_finite(&clean), None, "{dtype}");
            for (at, value) in
                [(0, f32::NAN), (blocks / 2, f32::INFINITY), (blocks - 1, -f32::INFINITY)]
            {
                let mut bytes = clean.clone();
                let mut later = |at: usize, value: f32| {
                    let to = &mut bytes[at * size..][..size];
                    let half = plain::f32_to_f16(value).to_le_bytes();
                    with_block!(dtype, B => {
                        let last = B::HALVES[B::HALVES.len() - 1];
                        to[last..last + 2].copy_from_slice(&half);
                    }, else => dtype.encode(&[value], to).unwrap());
                };
                later(at, value);
                later(blocks - 1, if at == blocks - 1 { value } else { f32::NAN });
                let found = dtype.not_finite(&bytes).unwrap();
                assert_eq!(
                    (found.element, found.shared),
                    (at * elements, elements),
                    "{dtype} {blocks}"
                );
                assert_eq!(found.value.to_string(), value.to_string(), "{dtype}");
            }
        }
    }
    assert_eq!(DType::I32.not_finite(&[0xff; 64]), None);
    assert_eq!(DType::F32.not_finite(&[0, 0, 0, 0, 0xff, 0xff, 0xff]), None, "no whole number");
}
