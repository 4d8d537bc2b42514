//! Folders as MLX has them: Delft reads what it writes, and what MLX computes of them is in
//! `tests/reference/mlx_folders.py`.

use crate::common::{Expected, error, load};
use delft_engine::convert::mlx::{MlxForm, write};
use delft_engine::{CacheType, CancelToken, LoadOptions, LogitRows};
use formats::{Source, Tensors};
use std::path::{Path, PathBuf};

fn form(name: &str, group: usize) -> MlxForm {
    MlxForm::named(name, Some(group)).unwrap().unwrap()
}

fn written(from: &Path, to: &Path, form: MlxForm, threads: usize) -> formats::Result<()> {
    let tensors = Tensors::open(from).unwrap();
    write(&tensors, to, form, threads, &CancelToken::default(), &mut |_| {}).map(|_| ())
}

fn case(name: &str) -> PathBuf {
    testing::models().join(name)
}

/// How far a folder's matrices are from the original's: root mean square, by that of the numbers.
fn apart(folder: &Path, original: &Path) -> f64 {
    let [a, b] = [folder, original].map(|path| Tensors::open(path).unwrap());
    let name = "model.layers.0.mlp.down_proj";
    let stored = a.get(&format!("{name}.weight")).unwrap();
    let [codes, scales, offsets] = ["weight", "scales", "biases"].map(|p| format!("{name}.{p}"));
    let scale = a.get(&scales).unwrap();
    let original = b.get(&codes).unwrap();
    let group = original.shape[1] / scale.shape[1];
    let bits = stored.shape[1] * 32 / original.shape[1];
    let own = match a.get(&offsets) {
        Some(_) => Source::Affine { codes, scales, offsets, bits, group },
        None => return 0.0,
    };
    let (own, want) = (own.read(&a).unwrap().to_f32().unwrap(), original.to_f32().unwrap());
    let sum = |values: &mut dyn Iterator<Item = f32>| -> f64 {
        values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
    };
    sum(&mut own.iter().zip(&want).map(|(a, b)| a - b)) / sum(&mut want.iter().copied())
}

#[test]
fn what_is_written_is_read_and_close_to_the_original() {
    let scratch = tempfile::tempdir().unwrap();
    let options = LoadOptions { cache_type: CacheType::F32, ..LoadOptions::default() };
    // Experts one by one, q, k and v in one matrix, a tied head, f16; each but the last with rows
    // of whole groups.
    for (name, kind, group, bound) in [
        ("qwen3", "mlx8", 32, 0.02),
        ("qwen3", "mlx6", 64, 0.05),
        ("mixtral", "mlx5", 32, 0.0),
        ("phi3", "mlx8", 32, 0.02),
        ("qwen3", "mlx4", 32, 0.12),
        ("qwen3", "mlx3", 32, 0.25),
        ("qwen3", "mlx2", 32, 0.6),
        ("qwen3", "mlx-mxfp4", 32, 0.0),
        ("mistral-full", "mlx8", 64, 0.0),
    ] {
        let out = scratch.path().join(format!("{name}-{kind}"));
        written(&case(name), &out, form(kind, group), 2).unwrap();
        let expected = Expected::open(&case(name).join("expected.safetensors"));
        let (tokens, want) = (expected.ids("input_ids"), expected.floats("logits").unwrap());
        let engine = load(&out, &options);
        let rows = want.len() / engine.info().vocab;
        let got = engine.session().logits(&tokens, LogitRows::Last(rows)).unwrap();
        let found = error(&got.data, &want);
        let most = if kind.contains('8') { 0.03 } else { 1.0 };
        assert!(found < most, "{name} {kind}: {found}");
        if bound > 0.0 {
            let found = apart(&out, &case(name));
            assert!(found < bound && found > bound / 8.0, "{name} {kind}: {found}");
        }
        let why = written(&out, &scratch.path().join("again"), form(kind, group), 1).unwrap_err();
        assert!(why.to_string().contains("weights that are quantised"), "{why}");
    }
}

#[test]
fn the_same_folder_gives_the_same_bytes_and_nothing_is_left_of_one_that_failed() {
    let scratch = tempfile::tempdir().unwrap();
    let bytes = |threads| {
        let out = scratch.path().join(format!("{threads}"));
        written(&case("qwen3"), &out, form("mlx4", 32), threads).unwrap();
        let read = |name: &str| std::fs::read(out.join(name)).unwrap();
        [read("model.safetensors"), read("config.json"), read("model.safetensors.index.json")]
    };
    assert!(bytes(1) == bytes(3));
    let cancel = CancelToken::default();
    cancel.cancel();
    let (to, before) = (scratch.path().join("out"), 2);
    let tensors = Tensors::open(case("qwen3").as_path()).unwrap();
    let why = write(&tensors, &to, form("mlx4", 32), 1, &cancel, &mut |_| {}).unwrap_err();
    assert!(why.to_string().contains("an interruption"), "{why}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), before);
    let why = written(&case("qwen3"), &scratch.path().join("1"), form("mlx4", 32), 1).unwrap_err();
    assert!(why.to_string().contains("a folder that is not there yet"), "{why}");
    for (name, group) in [("mlx7", None), ("mlx4", Some(48)), ("mlx-mxfp4", Some(64))] {
        assert!(MlxForm::named(name, group).is_err(), "{name}");
    }
    assert_eq!(MlxForm::named("q4_k_m", None), Ok(None));
}
