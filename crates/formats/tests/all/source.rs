//! Recipes: what each gives, element by element, what it costs to read, and what is refused.

use delft_formats::gguf::{TensorSpec, Writer};
use delft_formats::{DType, Encoding, Groups, Source, TensorView, Tensors, safetensors};
use std::path::Path;

/// `a` `[6, 4]` f32 with element `i` being `i`, `half` `[2, 4]` f16, `norm` `[4]` bf16, and affine
/// groups of 3 bits.
fn folder(at: &Path) -> Tensors {
    let a: Vec<u8> = (0..24).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let encoded = |dtype: DType, values: &[f32]| {
        let mut bytes = vec![0; dtype.bytes_for(values.len() as u64).unwrap() as usize];
        dtype.encode(values, &mut bytes).unwrap();
        bytes
    };
    let half = encoded(DType::F16, &[0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]);
    let norm = encoded(DType::BF16, &[0.25, -0.25, 0.5, 1.0]);
    // Two rows of 64 codes `(row + column) % 8`, as a stream of bits.
    let codes: Vec<u8> = (0..2)
        .flat_map(|r| {
            let bits = (0..64u32).flat_map(move |c| (0..3).map(move |b| ((r + c) % 8) >> b & 1));
            let bits: Vec<u32> = bits.collect();
            bits.chunks(8)
                .map(|byte| byte.iter().enumerate().fold(0, |n, (i, bit)| n | (*bit as u8) << i))
                .collect::<Vec<u8>>()
        })
        .collect();
    let scales = encoded(DType::BF16, &[1.0, 2.0, 4.0, 0.5]);
    let offsets = encoded(DType::BF16, &[-1.0, 0.0, 8.0, 16.0]);
    let short = scales[..4].to_vec();
    let tensors = [
        ("a", DType::F32, &[6, 4][..], &a),
        ("half", DType::F16, &[2, 4], &half),
        ("norm", DType::BF16, &[4], &norm),
        ("w", DType::U32, &[2, 6], &codes),
        ("w.scales", DType::BF16, &[2, 2], &scales),
        ("w.offsets", DType::BF16, &[2, 2], &offsets),
        ("short", DType::BF16, &[1, 2], &short),
    ]
    .map(|(name, dtype, shape, bytes)| TensorView { name, dtype, shape, bytes });
    safetensors::write(&at.join("model.safetensors"), &[], tensors).unwrap();
    std::fs::write(at.join("config.json"), "{}").unwrap();
    Tensors::open(at).unwrap()
}

fn named(name: &str) -> Source {
    Source::Tensor(name.to_owned())
}

fn affine(bits: usize, group: usize, scales: &str) -> Source {
    let name = |part: &str| format!("w.{part}");
    let (codes, scales) = ("w".to_owned(), scales.to_owned());
    Source::Affine { codes, scales, offsets: name("offsets"), bits, group }
}

/// A recipe, what it gives, and element `i` of that.
type Case = (Source, &'static [usize], Encoding, Box<dyn Fn(usize) -> f32>);

fn cases() -> Vec<Case> {
    let float = |dtype: DType| Encoding::from(dtype);
    let groups = Encoding::Groups(Groups::new(3, 32, DType::BF16).unwrap());
    let code = |r: usize, c: usize| ((r + c) % 8) as f32;
    let group = move |r: usize, c: usize| match (r, c / 32) {
        (0, 0) => code(r, c) - 1.0,
        (0, _) => 2.0 * code(r, c),
        (_, 0) => 4.0 * code(r, c) + 8.0,
        _ => 0.5 * code(r, c) + 16.0,
    };
    let boxed = |of: Source| Box::new(of);
    vec![
        (named("a"), &[6, 4], float(DType::F32), Box::new(|i| i as f32)),
        (named("a").rows(2, 3), &[3, 4], float(DType::F32), Box::new(|i| (i + 8) as f32)),
        (named("norm").rows(1, 2), &[2], float(DType::BF16), Box::new(|i| [-0.25, 0.5][i])),
        (
            named("a").every(2, 1, 3),
            &[3, 4],
            float(DType::F32),
            Box::new(|i| ((1 + i / 4 * 2) * 4 + i % 4) as f32),
        ),
        (
            // Rows 1 and 2 of each of two matrices of three rows.
            named("a").rows_of_each(2, 3, 1..3),
            &[4, 4],
            float(DType::F32),
            Box::new(|i| ([1, 2, 4, 5][i / 4] * 4 + i % 4) as f32),
        ),
        (
            // Likewise, of matrices that are joined: a run ends where the next of them begins, or
            // goes on there.
            Source::Concat(vec![named("a"), named("half"), named("a").rows(0, 1)]).rows_of_each(
                3,
                3,
                0..2,
            ),
            &[6, 4],
            float(DType::F32),
            Box::new(|i| match i / 4 {
                row @ 0..4 => ([0, 1, 3, 4][row] * 4 + i % 4) as f32,
                row => (4 * (row - 4) + i % 4) as f32 + 0.5,
            }),
        ),
        (
            Source::Concat(vec![named("a"), named("half")]).rows(5, 2),
            &[2, 4],
            float(DType::F32),
            Box::new(|i| if i < 4 { (20 + i) as f32 } else { i as f32 - 3.5 }),
        ),
        (
            Source::Stack(vec![named("half"), named("half").every(1, 0, 2)]).columns(1, 2),
            &[2, 2, 2],
            float(DType::F16),
            Box::new(|i| (i % 4 / 2 * 4 + 1 + i % 2) as f32 + 0.5),
        ),
        (
            named("a").columns(1, 2).rows(4, 2),
            &[2, 2],
            float(DType::F32),
            Box::new(|i| ((4 + i / 2) * 4 + 1 + i % 2) as f32),
        ),
        (
            Source::Concat(vec![named("a").rows(5, 1), named("half")]),
            &[3, 4],
            float(DType::F32),
            Box::new(|i| if i < 4 { (20 + i) as f32 } else { (i - 4) as f32 + 0.5 }),
        ),
        (
            Source::Stack(vec![named("half"), named("half")]).rows(1, 1),
            &[1, 2, 4],
            float(DType::F16),
            Box::new(|i| i as f32 + 0.5),
        ),
        (
            Source::Plus(boxed(named("norm")), 1.0),
            &[4],
            float(DType::F32),
            Box::new(|i| [1.25, 0.75, 1.5, 2.0][i]),
        ),
        (
            Source::Times(boxed(named("norm")), -4.0),
            &[4],
            float(DType::F32),
            Box::new(|i| [-1.0, 1.0, -2.0, -4.0][i]),
        ),
        (
            Source::NegExp(boxed(named("norm"))),
            &[4],
            float(DType::F32),
            Box::new(|i| -[0.25_f64, -0.25, 0.5, 1.0][i].exp() as f32),
        ),
        (
            // [0.5, 1.5, 2.5, 3.5] and [4.5, 5.5, 6.5, 7.5], whose squares sum to 21 and 149.
            Source::UnitRows(boxed(Source::Decoded(boxed(named("half"))))),
            &[2, 4],
            float(DType::F32),
            Box::new(|i| ((i as f64 + 0.5) / [21f64, 149.0][i / 4].sqrt()) as f32),
        ),
        (
            Source::Sines { start: 2, count: 2, pairs: 2 },
            &[2, 4],
            float(DType::F32),
            Box::new(|i| {
                let angle = (2 + i / 4) as f64 * [1.0, 1e-4][i % 2];
                if i % 4 < 2 { angle.sin() as f32 } else { angle.cos() as f32 }
            }),
        ),
        (
            // Four bits, decoded to be turned.
            Source::Transpose(boxed(Source::Decoded(boxed(affine(3, 32, "w.scales"))))),
            &[64, 2],
            float(DType::F32),
            Box::new(move |i| group(i % 2, i / 2)),
        ),
        (
            Source::Transpose(boxed(named("half"))),
            &[4, 2],
            float(DType::F16),
            Box::new(|i| (i % 2 * 4 + i / 2) as f32 + 0.5),
        ),
        (
            // A stack of two matrices, each turned.
            Source::Transpose(boxed(Source::Reshape(boxed(named("a")), vec![2, 3, 4]))),
            &[2, 4, 3],
            float(DType::F32),
            Box::new(|i| (i / 12 * 12 + i % 3 * 4 + i % 12 / 3) as f32),
        ),
        (
            // Two pairs that rotate together, of one head: rows 0, 2, 4, 1, 3, 5 of the tensor.
            Source::Permute(boxed(named("a")), [1, 3, 2, 1]),
            &[6, 4],
            float(DType::F32),
            Box::new(|i| ([0, 2, 4, 1, 3, 5][i / 4] * 4 + i % 4) as f32),
        ),
        (affine(3, 32, "w.scales"), &[2, 64], groups, Box::new(move |i| group(i / 64, i % 64))),
        (
            affine(3, 32, "w.scales").columns(32, 32),
            &[2, 32],
            groups,
            Box::new(move |i| group(i / 32, 32 + i % 32)),
        ),
        (Source::Zeros(vec![2, 3]), &[2, 3], float(DType::F32), Box::new(|_| 0.0)),
    ]
}

#[test]
fn recipes_give_what_they_say() {
    let at = tempfile::tempdir().unwrap();
    let tensors = folder(at.path());
    for (source, shape, encoding, element) in cases() {
        let described = source.describe(&tensors).unwrap();
        assert_eq!((described.shape.as_slice(), described.encoding), (shape, encoding));
        let read = source.read(&tensors).unwrap();
        assert_eq!((&read.shape, read.encoding), (&described.shape, encoding), "{source:?}");
        let bytes = encoding.bytes_for(shape.iter().product());
        assert_eq!(bytes, Some(read.bytes.len()), "{source:?}");
        let values = read.to_f32().unwrap();
        let wanted: Vec<f32> = (0..values.len()).map(element).collect();
        assert_eq!(values, wanted, "{source:?}");
        // Every element is found again where it comes from, if a tensor holds it.
        for (i, value) in values.iter().enumerate() {
            let Some(origin) = source.origin(&tensors, i).unwrap() else {
                assert!(source.tensors().is_empty(), "{source:?}: element {i}");
                continue;
            };
            let all = match source.tensors().contains(&"w.scales") {
                true => affine(3, 32, "w.scales"),
                false => named(&origin.tensor),
            };
            let found = all.read(&tensors).unwrap().to_f32().unwrap()[origin.element];
            let made = match source {
                Source::Plus(_, added) => found + added,
                Source::Times(_, by) => found * by,
                Source::NegExp(_) => -f64::from(found).exp() as f32,
                Source::UnitRows(_) => (f64::from(found) / [21f64, 149.0][i / 4].sqrt()) as f32,
                _ => found,
            };
            assert_eq!(made, *value, "{source:?}: element {i}");
        }
        match source.runs(&tensors).unwrap() {
            Some(runs) => {
                let elements = runs.iter().flat_map(|run| {
                    let tensor = run.tensor.map(str::to_owned);
                    (0..run.count).map(move |i| Some((tensor.clone()?, run.start + i * run.step)))
                });
                let elements: Vec<Option<(String, usize)>> = elements.collect();
                assert_eq!(elements.len(), values.len(), "{source:?}");
                for (i, own) in elements.into_iter().enumerate() {
                    let origin = source.origin(&tensors, i).unwrap();
                    assert_eq!(origin.map(|of| (of.tensor, of.element)), own, "{source:?}");
                }
            }
            None => {
                let others = [
                    "Plus",
                    "Times",
                    "NegExp",
                    "UnitRows",
                    "Decoded",
                    "Affine",
                    "Quantised",
                    "Sines",
                    "Normal",
                ];
                let form = format!("{source:?}");
                assert!(others.iter().any(|other| form.contains(other)), "{form}");
            }
        }
        source.release(&tensors);
    }
}

#[test]
fn only_the_rows_that_are_used_are_counted() {
    let at = tempfile::tempdir().unwrap();
    let tensors = folder(at.path());
    let stored = |source: Source| source.describe(&tensors).unwrap().stored;
    assert_eq!(stored(named("a")), 96);
    assert_eq!(stored(named("a").rows(1, 2)), 32);
    assert_eq!(stored(named("a").columns(0, 1)), 24);
    assert_eq!(stored(Source::Concat(vec![named("a"), named("half")])), 96 + 16);
    assert_eq!(stored(affine(3, 32, "w.scales")), 48 + 8 + 8);
    assert!(matches!(
        named("a").rows(1, 2).read(&tensors).unwrap().bytes,
        std::borrow::Cow::Borrowed(_)
    ));
}

#[test]
fn quantised_blocks_stay_whole() {
    let at = tempfile::tempdir().unwrap();
    let path = at.path().join("m.gguf");
    let spec = TensorSpec { name: "q".into(), dtype: DType::Q8_0, shape: vec![4, 64] };
    let mut writer = Writer::create(&path, &[], &[spec]).unwrap();
    let values: Vec<f32> = (0..256).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut blocks = vec![0; 8 * 34];
    DType::Q8_0.encode(&values, &mut blocks).unwrap();
    writer.write(&blocks).unwrap();
    writer.finish().unwrap();
    let tensors = Tensors::open(path.as_path()).unwrap();
    let q = || named("q");
    let read = |source: Source| source.read(&tensors).unwrap();
    assert_eq!(read(q().rows(1, 2)).bytes[..], blocks[68..204]);
    assert_eq!(read(q().columns(32, 32)).bytes[34..68], blocks[68 + 34..136]);
    assert_eq!(read(Source::Concat(vec![q().rows(3, 1), q()])).bytes[..68], blocks[204..]);
    assert_eq!(read(q()).encoding, Encoding::Stored(DType::Q8_0));
    let refused = |source: Source| source.describe(&tensors).unwrap_err().to_string();
    for (source, expected) in [
        (q().columns(0, 16), "q: expected columns in parts of whole blocks of 32"),
        (Source::Transpose(Box::new(q())), "q: expected a matrix of numbers, to be transposed"),
        (Source::Reshape(Box::new(q()), vec![2, 128]), "q: expected elements of [2, 128]"),
        (Source::Reshape(Box::new(q()), vec![8, 64]), "q: expected elements of [8, 64]"),
        (Source::Plus(Box::new(q()), 1.0), "q: expected floats, to be computed with"),
        (Source::UnitRows(Box::new(q())), "q: expected rows of floats, to be divided"),
        (Source::Times(Box::new(q()), 2.0), "q: expected floats, to be computed with"),
        (
            Source::Concat(vec![q(), Source::Zeros(vec![1, 64])]),
            "q: expected parts of one encoding",
        ),
        (q().rows(3, 2), "q: expected 2 rows from row 3 on, found [4, 64] of q8_0"),
    ] {
        let found = refused(source);
        assert!(found.starts_with(expected), "{found}");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let at = tempfile::tempdir().unwrap();
    let tensors = folder(at.path());
    let refused = |source: Source| source.read(&tensors).unwrap_err().to_string();
    for (source, expected) in [
        (named("none"), "none: expected a tensor, found none in the file"),
        (named("a").rows(usize::MAX, 2), "a: expected 2 rows from row"),
        (named("a").rows(0, 0), "a: expected 0 rows from row 0 on"),
        (named("a").every(3, 1, 3), "a: expected 3 rows from row 1 on, 1 of 3"),
        (named("a").every(0, 0, 3), "a: expected 3 rows from row 0 on, 1 of 0"),
        (named("a").every(usize::MAX, 1, 3), "a: expected 3 rows"),
        (named("a").rows_of_each(3, 2, 1..3), "a: expected 6 rows from row 1 on, 2 of 2"),
        (named("norm").columns(0, 2), "norm: expected columns"),
        (named("a").columns(3, usize::MAX), "a: expected columns"),
        (Source::Concat(vec![named("a"), named("norm")]), "a: expected rows as of [6, 4] of f32"),
        (Source::Stack(vec![named("a"), named("half")]), "a: expected a stack of [6, 4] of f32"),
        (Source::Concat(Vec::new()), "a weight: expected parts"),
        (Source::Permute(Box::new(named("a")), [2, 2, 2, usize::MAX]), "a: expected rows as"),
        (affine(4, 32, "w.scales"), "w: expected rows of codes of 4 bits in groups of 32"),
        (affine(3, 32, "short"), "w: expected scales and offsets [2, 2], of one type"),
        (affine(3, 32, "a"), "w: expected 2 to 8 bits"),
        (affine(9, 32, "w.scales"), "w: expected 2 to 8 bits"),
        (affine(3, 20, "w.scales"), "w: expected 2 to 8 bits"),
        (Source::Zeros(vec![usize::MAX, 2]), "a weight without a tensor: expected at most 2^40"),
    ] {
        let found = refused(source);
        assert!(found.starts_with(expected), "{found}");
        assert!(!found.contains('\n'), "{found}");
    }
}

#[test]
fn random_weights_are_those_of_their_seed() {
    let at = tempfile::tempdir().unwrap();
    let tensors = folder(at.path());
    let normal = |seed| {
        let source = Source::Normal { shape: vec![100, 100], deviation: 0.5, seed };
        source.read(&tensors).unwrap().to_f32().unwrap()
    };
    let (a, b) = (normal(1), normal(2));
    assert_eq!(a, normal(1));
    assert_ne!(a, b);
    let mean = a.iter().sum::<f32>() / 1e4;
    let variance = a.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / 1e4;
    assert!(mean.abs() < 0.02 && (variance.sqrt() - 0.5).abs() < 0.02, "{mean} {variance}");
}
