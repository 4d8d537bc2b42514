//! Importance matrices: those of Transformers' own inputs, and what quantising by them gives.

use crate::common::{Expected, load};
use delft_engine::convert::{QuantMix, Types, convert};
use delft_engine::importance::Collector;
use delft_engine::{CacheType, CancelToken, DeviceSpec, LoadOptions, Trace};
use formats::{Gguf, Importance, Inputs, Tensors};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    testing::models().with_file_name("importance").join(name)
}

fn collected(case: &str, device: DeviceSpec) -> Importance {
    let folder = testing::models().join(case);
    let options =
        LoadOptions { cache_type: CacheType::F32, trace: Trace::Inputs, ..LoadOptions::on(device) };
    let engine = load(&folder, &options);
    let tokens = Expected::open(&folder.join("expected.safetensors")).ids("input_ids");
    let mut collector = Collector::new(&engine).unwrap();
    collector.add(&mut engine.session(), &tokens).unwrap();
    collector.finish()
}

fn compare(found: &Importance, expected: &Importance, case: &str, tolerance: f64) {
    let names = |of: &Importance| of.tensors.keys().cloned().collect::<Vec<String>>();
    assert_eq!(names(found), names(expected), "{case}");
    for (name, want) in &expected.tensors {
        let own = &found.tensors[name];
        assert_eq!(own.rows, want.rows, "{case}: {name}");
        let largest = want.squares.iter().copied().fold(0.0, f64::max);
        for (own, want) in own.squares.iter().zip(&want.squares) {
            assert!((own - want).abs() <= tolerance * largest, "{case}: {name}: {own} {want}");
        }
    }
}

#[test]
fn importance_is_what_transformers_multiplies_with() {
    for case in ["qwen3", "phi3", "mixtral", "qwen2-moe"] {
        let expected = Importance::open(&fixture(&format!("{case}.gguf"))).unwrap();
        compare(&collected(case, DeviceSpec::Cpu), &expected, case, 1e-4);
    }
}

#[test]
fn a_gpu_measures_what_the_cpu_does() {
    let sim: DeviceSpec = "sim".parse().unwrap();
    compare(&collected("qwen3", sim), &collected("qwen3", DeviceSpec::Cpu), "qwen3", 1e-2);
    // Each expert of a row has a part of what lies between their matrices.
    for case in ["mixtral", "qwen2-moe", "glm4-moe"] {
        compare(&collected(case, sim), &collected(case, DeviceSpec::Cpu), case, 1e-2);
    }
}

#[test]
fn both_forms_of_files_are_read_and_what_is_written_is_read_back() {
    let new = Importance::open(&fixture("qwen3.gguf")).unwrap();
    let old = Importance::open(&fixture("qwen3.dat")).unwrap();
    assert_eq!((&new.texts, new.chunks, new.chunk), (&vec!["prompt.txt".to_owned()], 1, 21));
    assert_eq!((&old.texts, old.chunks), (&new.texts, 1));
    for (name, inputs) in &new.tensors {
        let columns = inputs.squares.len();
        let (a, b) = (inputs.columns(1, columns), old.tensors[name].columns(1, columns));
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs();
        assert!(a.unwrap().iter().zip(&b.unwrap()).all(near), "{name}");
        assert_eq!(inputs.columns(2, columns), None);
    }
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("again.gguf");
    new.write(&path).unwrap();
    assert_eq!(Importance::open(&path).unwrap(), new);
    // Damage is told in a line.
    let bytes = std::fs::read(fixture("qwen3.dat")).unwrap();
    for damaged in [&bytes[..bytes.len() / 2], b"", &[0xff; 64], b"GGUF"] {
        std::fs::write(&path, damaged).unwrap();
        assert!(Importance::open(&path).is_err());
    }
    let why = Importance::open(&testing::models().join("llama-k-quants/model.q4_k_m.gguf"));
    assert!(why.unwrap_err().to_string().contains("no sums of squares"));
}

fn quantised(from: &Path, to: &Path, mix: &str, by: Option<&Importance>) -> formats::Result<()> {
    let importance = by.map(|importance| ("text.gguf".to_owned(), importance.clone()));
    let types = Types { whole: QuantMix::named(mix), importance, ..Types::default() };
    let tensors = Tensors::open(from).unwrap();
    convert(&tensors, to, &types, &CancelToken::default(), &mut |_| {}).map(|_| ())
}

/// Sums of squared errors of a tensor's columns, each times its importance.
fn lost(file: &Gguf, original: &Gguf, name: &str, importance: &[f32]) -> f64 {
    let values = |file: &Gguf| {
        let tensor = file.get(name).unwrap();
        let mut values = vec![0.0; tensor.shape.iter().product()];
        tensor.dtype.decode(tensor.bytes, &mut values).unwrap();
        values
    };
    let (found, want) = (values(file), values(original));
    let errors = found.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2));
    errors.zip(importance.iter().cycle()).map(|(e, by)| e * f64::from(*by)).sum()
}

#[test]
fn quantising_by_importance_loses_less_of_what_matters() {
    let scratch = tempfile::tempdir().unwrap();
    let (plain, weighed) = (scratch.path().join("plain.gguf"), scratch.path().join("by.gguf"));
    let original = scratch.path().join("original.gguf");
    let name = "blk.0.ffn_down.weight";
    quantised(&testing::models().join("llama-k-quants/model.q4_k_m.gguf"), &original, "f32", None)
        .unwrap();
    // A few columns matter most.
    let row: Vec<f32> = (0..256).map(|i| if i % 7 == 0 { 9.0 } else { 0.2 }).collect();
    let mut inputs = Inputs::default();
    inputs.add(0, 1, &row);
    let importance = inputs.columns(1, 256).unwrap();
    let mut by = Importance::default();
    by.tensors.insert(name.to_owned(), inputs);
    let mixes = ["q2_k", "q3_k_s", "q4_k_s", "q5_k_s", "iq4_nl", "iq4_xs", "mxfp4", "q4_0", "q4_1"];
    for mix in mixes.into_iter().chain(["tq1_0", "tq2_0"]) {
        quantised(&original, &plain, mix, None).unwrap();
        quantised(&original, &weighed, mix, Some(&by)).unwrap();
        let [original, plain, weighed] =
            [&original, &plain, &weighed].map(|path| Gguf::open(path).unwrap());
        let [a, b] = [&plain, &weighed].map(|file| lost(file, &original, name, &importance));
        assert!(b < 0.98 * a, "{mix}: {b} of {a}");
        let text = |key: &str| weighed.metadata().str(key).unwrap().map(str::to_owned);
        assert_eq!(text("quantize.imatrix.file").unwrap(), "text.gguf");
        // What the matrix says nothing of is as without it.
        let other = "blk.0.ffn_gate.weight";
        assert!(plain.get(other).unwrap().bytes == weighed.get(other).unwrap().bytes);
    }
    // Another model's is refused.
    for (columns, name, expected) in [
        (128, name, "importance for [256, 256]"),
        (256, "blk.7.ffn_down.weight", "importance of blk.0"),
    ] {
        let mut inputs = Inputs::default();
        inputs.add(0, 1, &row[..columns]);
        let mut other = Importance::default();
        other.tensors.insert(name.to_owned(), inputs);
        let why = quantised(&original, &weighed, "q4_k_s", Some(&other)).unwrap_err().to_string();
        assert!(why.contains(expected), "{why}");
    }
}
