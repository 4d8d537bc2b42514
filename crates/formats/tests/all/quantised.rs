//! Matrices as quantising programs store them, against the numbers that those programs read in them
//! (tests/reference/quantised.py).

use delft_formats::safetensors;
use delft_formats::{
    DType, Encoding, Groups, Integers, Quantised, Scheme, Source, TensorView, Tensors,
};
use std::path::{Path, PathBuf};

/// A folder with the fixture's tensors, some of them changed.
fn folder(
    change: impl Fn(&mut Vec<(String, DType, Vec<usize>, Vec<u8>)>),
) -> (tempfile::TempDir, Tensors) {
    let fixture: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantised.safetensors");
    let file = safetensors::Safetensors::open(&fixture).unwrap();
    let mut all: Vec<_> = file
        .iter()
        .map(|t| (t.name.to_owned(), t.dtype, t.shape.to_vec(), t.bytes.to_vec()))
        .collect();
    change(&mut all);
    let folder = tempfile::tempdir().unwrap();
    let tensors = all.iter().map(|(name, dtype, shape, bytes)| TensorView {
        name,
        dtype: *dtype,
        shape,
        bytes,
    });
    safetensors::write(&folder.path().join("model.safetensors"), &[], tensors).unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let tensors = Tensors::open(folder.path()).unwrap();
    (folder, tensors)
}

fn integers(bits: usize, group: Option<usize>, symmetric: bool, ordered: bool) -> Integers {
    Integers { bits, group, symmetric, ordered }
}

fn groups(bits: usize, group: usize, scale: DType) -> Encoding {
    Encoding::Groups(Groups::new(bits, group, scale).unwrap())
}

/// A case of the fixture, its scheme, the names of its tensors, and what devices get.
type Case = (&'static str, Scheme, &'static [&'static str], Encoding);

fn cases() -> Vec<Case> {
    const GPTQ: &[&str] = &["qweight", "qzeros", "scales"];
    const ORDERED: &[&str] = &["qweight", "qzeros", "scales", "g_idx"];
    const PACKED: &[&str] = &["weight_packed", "weight_scale"];
    const ZEROS: &[&str] = &["weight_packed", "weight_scale", "weight_zero_point"];
    const FP8: &[&str] = &["weight", "weight_scale"];
    const BYTES: &[&str] = &["weight", "weight_scale", "weight_zero_point"];
    let gptq = |integers, plus| Scheme::Gptq { integers, plus };
    let packed = |bits, group, symmetric| Scheme::Packed(integers(bits, group, symmetric, false));
    let bytes = |bits, group, symmetric| Scheme::Bytes(integers(bits, group, symmetric, false));
    let exponents = Scheme::Fp8 { block: Some([1, 32]) };
    vec![
        ("gptq4", gptq(integers(4, Some(64), false, false), 1), GPTQ, DType::Q5_0.into()),
        ("gptq4-second", gptq(integers(4, Some(64), false, false), 0), GPTQ, DType::Q5_0.into()),
        (
            "gptq4-symmetric",
            gptq(integers(4, Some(32), true, false), 1),
            GPTQ,
            groups(4, 32, DType::F16),
        ),
        ("gptq4-ordered", gptq(integers(4, Some(32), false, true), 1), ORDERED, DType::F16.into()),
        ("gptq3", gptq(integers(3, None, false, false), 1), GPTQ, groups(4, 128, DType::F16)),
        ("gptq2", gptq(integers(2, Some(32), false, false), 1), GPTQ, groups(3, 32, DType::F16)),
        (
            "gptq8-symmetric",
            gptq(integers(8, Some(64), true, false), 1),
            GPTQ,
            groups(8, 64, DType::F16),
        ),
        ("awq", Scheme::Awq { group: Some(64) }, GPTQ, DType::Q5_0.into()),
        (
            "packed4",
            Scheme::Packed(integers(4, Some(64), true, false)),
            PACKED,
            groups(4, 64, DType::BF16),
        ),
        (
            "packed4-asymmetric",
            Scheme::Packed(integers(4, Some(32), false, false)),
            ZEROS,
            groups(5, 32, DType::BF16),
        ),
        (
            "packed8-rows",
            Scheme::Packed(integers(8, None, true, false)),
            PACKED,
            groups(8, 128, DType::F16),
        ),
        ("fp8-blocks", Scheme::Fp8 { block: Some([11, 64]) }, FP8, DType::BF16.into()),
        ("fp8-rows", Scheme::Fp8 { block: None }, FP8, DType::BF16.into()),
        ("fp8-whole", Scheme::Fp8 { block: None }, FP8, DType::BF16.into()),
        ("mxfp4", Scheme::Mxfp4, &["blocks", "scales"], DType::Mxfp4.into()),
        ("mlx-mxfp4", Scheme::Mxfp4, &["codes", "scales"], DType::Mxfp4.into()),
        ("packed-mxfp4", Scheme::Mxfp4, PACKED, DType::Mxfp4.into()),
        ("mlx-mxfp8", exponents, &["codes", "scales"], DType::BF16.into()),
        ("mlx-mxfp8-stack", exponents, &["codes", "scales"], DType::BF16.into()),
        ("packed-mxfp8", exponents, FP8, DType::BF16.into()),
        ("gptq4-wrapped", gptq(integers(4, Some(64), false, false), 1), GPTQ, DType::Q5_0.into()),
        ("packed3", packed(3, Some(64), true), PACKED, groups(3, 64, DType::BF16)),
        ("packed4-zero-bytes", packed(4, Some(32), false), ZEROS, groups(5, 32, DType::BF16)),
        ("packed8-asymmetric", packed(8, Some(32), false), ZEROS, DType::BF16.into()),
        ("packed4-channel", packed(4, None, false), ZEROS, DType::Q5_0.into()),
        ("bytes-asymmetric", bytes(8, None, false), BYTES, DType::BF16.into()),
        ("bytes-groups", bytes(4, Some(32), true), FP8, groups(8, 32, DType::BF16)),
        ("bytes-whole", bytes(8, None, true), FP8, groups(8, 128, DType::BF16)),
        ("floats-groups", Scheme::Fp8 { block: Some([1, 64]) }, FP8, DType::BF16.into()),
        ("floats-blocks", Scheme::Fp8 { block: Some([24, 48]) }, FP8, DType::BF16.into()),
    ]
}

fn source(case: &str, scheme: Scheme, names: &[&str]) -> Source {
    let tensors = names.iter().map(|name| format!("{case}.{name}")).collect();
    Source::Quantised(Quantised { scheme, tensors })
}

#[test]
fn every_scheme_gives_the_numbers_of_the_program_that_made_it() {
    let (_folder, tensors) = folder(|_| {});
    for (case, scheme, names, encoding) in cases() {
        let source = source(case, scheme, names);
        let expected = tensors.get(&format!("{case}.expected")).unwrap();
        let described = source.describe(&tensors).unwrap();
        assert_eq!(
            (described.encoding, &described.shape[..]),
            (encoding, expected.shape),
            "{case}"
        );
        let read = source.read(&tensors).unwrap();
        assert_eq!(read.encoding, encoding, "{case}");
        let (found, expected) = (read.to_f32().unwrap(), expected.to_f32().unwrap());
        let odd = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        let odd = odd.map(|i| (i, found[i], expected[i]));
        assert_eq!(odd, None, "{case}: element, found, expected");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_tensor() {
    let (_folder, tensors) = folder(|all| {
        for (name, _, shape, bytes) in all {
            match name.as_str() {
                "gptq4.scales" => *shape = vec![shape[1], shape[0]],
                "gptq4-ordered.g_idx" => bytes[..4].copy_from_slice(&(-1i32).to_le_bytes()),
                "packed4-zero-bytes.weight_zero_point" => bytes[1] = 200,
                "bytes-asymmetric.weight_zero_point" => {
                    *shape = vec![16];
                    bytes.truncate(16);
                }
                "mxfp4.scales" => {
                    shape[2] = 1;
                    bytes.truncate(2 * 32);
                }
                _ => {}
            }
        }
    });
    let error = |case: &str| {
        let (case, scheme, names, _) = cases().into_iter().find(|c| c.0 == case).unwrap();
        source(case, scheme, names).read(&tensors).unwrap_err().to_string()
    };
    assert!(
        error("gptq4").starts_with("gptq4.scales: expected scales [2, 32]"),
        "{}",
        error("gptq4")
    );
    let ordered = error("gptq4-ordered");
    assert!(
        ordered.contains("gptq4-ordered.g_idx: expected groups of inputs below 4"),
        "{ordered}"
    );
    assert!(
        error("mxfp4").contains("mxfp4.blocks: expected codes [2, 32, 1, 16]"),
        "{}",
        error("mxfp4")
    );
    let zero = error("packed4-zero-bytes");
    let expected =
        "packed4-zero-bytes.weight_zero_point: expected zeros of 4 bits, found -56 for output 0";
    assert!(zero.contains(expected), "{zero}");
    let zeros = error("bytes-asymmetric");
    assert!(
        zeros.contains("weight_zero_point: expected zeros [32, 1] in i8, found [16]"),
        "{zeros}"
    );
    // Settings that say more than the tensors.
    let refused = |case: &str, scheme, names: &[&str]| {
        source(case, scheme, names).read(&tensors).unwrap_err().to_string()
    };
    let symmetric = Scheme::Gptq { integers: integers(4, Some(64), true, false), plus: 0 };
    let found = refused("gptq4-second", symmetric, &["qweight", "qzeros", "scales"]);
    assert!(found.contains("gptq4-second.qzeros: expected 8 for every zero"), "{found}");
    let found = refused("awq", Scheme::Awq { group: Some(32) }, &["qweight", "qzeros", "scales"]);
    assert!(found.contains("awq.scales: expected scales [4, 32]"), "{found}");
    let found = refused(
        "packed4",
        Scheme::Packed(integers(4, Some(64), false, false)),
        &["weight_packed", "weight_scale"],
    );
    assert!(found.contains("expected a tensor"), "{found}");
    let found =
        refused("fp8-blocks", Scheme::Fp8 { block: Some([128, 128]) }, &["weight", "weight_scale"]);
    assert!(
        found.starts_with("fp8-blocks.weight_scale: expected a scale for the matrix"),
        "{found}"
    );
}

/// Groups of 16 inputs, and asymmetric codes of 8 bits, become numbers.
#[test]
fn integers_that_no_block_has_become_numbers() {
    let (_folder, tensors) = folder(|all| {
        let (_, dtype, shape, bytes) =
            all.iter().find(|t| t.0 == "packed4.weight_scale").cloned().unwrap();
        let bytes = bytes.as_chunks::<2>().0.iter().flat_map(|scale| scale.repeat(4)).collect();
        all.push(("packed4.scales".to_owned(), dtype, vec![shape[0], 4 * shape[1]], bytes));
    });
    let sixteen = Scheme::Packed(integers(4, Some(16), true, false));
    let eight = Scheme::Gptq { integers: integers(8, Some(64), false, false), plus: 1 };
    let cases: [(&str, Scheme, &[&str], DType); 2] = [
        ("packed4", sixteen, &["weight_packed", "scales"], DType::BF16),
        ("gptq8-symmetric", eight, &["qweight", "qzeros", "scales"], DType::F16),
    ];
    for (case, scheme, names, dtype) in cases {
        let read = source(case, scheme, names).read(&tensors).unwrap();
        assert_eq!(read.encoding, dtype.into(), "{case}");
        let expected = tensors.get(&format!("{case}.expected")).unwrap().to_f32().unwrap();
        let mut bytes = vec![0; 2 * expected.len()];
        dtype.encode(&expected, &mut bytes).unwrap();
        assert!(read.bytes == bytes, "{case}");
    }
}

/// BitNet's codes of four rows a byte, with a scale that groups have and one that none has; and
/// numbers that are rounded to three.
#[test]
fn three_numbers_are_codes_or_rounded() {
    // Rows 0 to 3 of [8, 32] are the lowest bits of two rows of bytes, and so on: of column 0 codes
    // 0, 1, 2, 1 and 2, 0, 0, 1.
    let first = |row: usize| if row == 0 { 0b01_10_01_00u8 } else { 0b01_00_00_10 };
    let codes: Vec<u8> =
        (0..64).map(|i| if i % 32 == 0 { first(i / 32) } else { 0b01_01_01_01 }).collect();
    let broken: Vec<u8> = codes.iter().map(|code| code | 0b11).collect();
    let floats = |all: &[f32]| -> Vec<u8> { all.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let scale = half::bf16::from_f32(0.37);
    // Rows of whole blocks, a whole block of zeros among them.
    let long: Vec<u8> = (0..1024u32)
        .map(|i| (0..4).fold(0, |byte, j| byte | ((i * 7 + j * 5) % 11 % 3) << (2 * j)) as u8)
        .enumerate()
        .map(|(i, byte)| if i < 256 { 0b01_01_01_01 } else { byte })
        .collect();
    let own = [
        ("long.weight", DType::U8, vec![2, 512], long),
        (
            "far.weight_scale",
            DType::BF16,
            vec![1],
            half::bf16::from_f32(1e9).to_le_bytes().to_vec(),
        ),
        ("long.weight_scale", DType::F32, vec![1], floats(&[scale.to_f32()])),
        ("a.weight", DType::U8, vec![2, 32], codes),
        ("a.weight_scale", DType::BF16, vec![1], scale.to_le_bytes().to_vec()),
        ("wide.weight_scale", DType::F32, vec![1], floats(&[0.3])),
        ("broken.weight", DType::U8, vec![2, 32], broken),
        ("numbers.weight", DType::F32, vec![2, 2], floats(&[0.1, -0.9, 0.3, -0.7])),
    ];
    let (_folder, tensors) = folder(|all| {
        all.extend(own.iter().map(|(name, dtype, shape, bytes)| {
            ((*name).to_owned(), *dtype, shape.clone(), bytes.clone())
        }));
    });
    let read = |scheme, names: [&str; 2]| {
        let count = if scheme == Scheme::Rounded { 1 } else { 2 };
        let tensors_of = names[..count].iter().map(|name| (*name).to_owned()).collect();
        Source::Quantised(Quantised { scheme, tensors: tensors_of }).read(&tensors)
    };
    for (scale_name, scale) in [("a.weight_scale", scale.to_f32()), ("wide.weight_scale", 0.3)] {
        let found = read(Scheme::Ternary, ["a.weight", scale_name]).unwrap();
        assert_eq!(found.shape, [8, 32]);
        let found = found.to_f32().unwrap();
        let column: Vec<f32> = found.iter().copied().step_by(32).collect();
        let signs = [-1.0, 1.0, 0.0, -1.0, 1.0, -1.0, 0.0, 0.0];
        assert_eq!(column, signs.map(|sign| sign * scale));
        assert!(found.iter().enumerate().all(|(i, x)| i % 32 == 0 || *x == 0.0));
    }
    let [blocks, numbers] = ["a.weight_scale", "long.weight_scale"]
        .map(|scale| read(Scheme::Ternary, ["long.weight", scale]).unwrap());
    assert_eq!([blocks.encoding, numbers.encoding], [DType::Tq2_0, DType::F32].map(Into::into));
    assert_eq!(blocks.to_f32().unwrap(), numbers.to_f32().unwrap());
    let error = read(Scheme::Ternary, ["long.weight", "far.weight_scale"]).unwrap_err();
    assert!(error.to_string().contains("a positive scale that f16 can hold"), "{error}");
    let error = read(Scheme::Ternary, ["broken.weight", "a.weight_scale"]).unwrap_err();
    assert!(error.to_string().starts_with("broken.weight: expected codes 0, 1 and 2"), "{error}");
    // The mean of the magnitudes is 0.5.
    let found = read(Scheme::Rounded, ["numbers.weight", ""]).unwrap().to_f32().unwrap();
    assert_eq!(found, [0.0, -0.5, 0.5, -0.5]);
}
