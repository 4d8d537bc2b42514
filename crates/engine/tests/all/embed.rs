//! Embeddings against Transformers and the modules of sentence-transformers; see
//! `tests/reference/embeddings.py`.

use crate::common::{Expected, error, load, root};
use delft_engine::models::Ending;
use delft_engine::{
    CacheType, EmbedOptions, EmbeddingForm, Engine, GenerateOptions, LoadOptions, Pooling,
};
use std::path::{Path, PathBuf};

fn folder(case: &str) -> PathBuf {
    root().join("../embeddings").join(case)
}

fn options() -> LoadOptions {
    LoadOptions { ending: Ending::Hidden, cache_type: CacheType::F32, ..LoadOptions::default() }
}

fn cut(dimensions: usize) -> EmbedOptions {
    EmbedOptions { dimensions: Some(dimensions), ..EmbedOptions::default() }
}

/// The case's texts, and their embeddings.
fn truth(case: &str) -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let expected = Expected::open(&folder(case).join("expected.safetensors"));
    let text = |i: usize| {
        let embedding = expected.floats(&format!("embedding.{i}"))?;
        Some((expected.ids(&format!("tokens.{i}")), embedding))
    };
    (0..).map_while(text).unzip()
}

#[test]
fn embeddings_are_those_of_sentence_transformers() {
    let form = |pooling, normalised| EmbeddingForm { pooling, normalised };
    for (case, file, form) in [
        ("last", "", form(Pooling::Last, true)),
        ("last", "model.f32.gguf", form(Pooling::Last, true)),
        ("mean", "", form(Pooling::Mean, false)),
        ("first", "", form(Pooling::First, true)),
    ] {
        let (texts, expected) = truth(case);
        assert_eq!(texts.len(), 5);
        for (device, chunk, sessions) in
            [("cpu", 512, 16), ("cpu", 7, 2), ("cpu", 64, 1), ("sim", 512, 16)]
        {
            let options = LoadOptions {
                device: device.parse().unwrap(),
                chunk: Some(chunk),
                sessions,
                ..options()
            };
            let engine = load(&folder(case).join(file), &options);
            assert_eq!(engine.embedding_form(), Some(form));
            let found = engine.embed(&texts, &EmbedOptions::default()).unwrap();
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let error = error(found, expected);
                let of = format!("{case}/{file} {device} {chunk} {sessions}: text {i}");
                assert!(error <= 1e-4, "{of}: {error:e}");
            }
        }
    }
}

#[test]
fn a_text_has_the_same_embedding_in_any_company() {
    let (texts, _) = truth("mean");
    let engine = load(&folder("mean"), &options());
    let together = engine.embed(&texts, &EmbedOptions::default()).unwrap();
    for (text, expected) in texts.into_iter().zip(together) {
        assert_eq!(engine.embed(&[text], &EmbedOptions::default()).unwrap(), [expected]);
    }
}

#[test]
fn embeddings_are_cut_to_dimensions_and_normalised_again() {
    let (texts, expected) = truth("last");
    let engine = load(&folder("last"), &options());
    for (found, whole) in engine.embed(&texts, &cut(8)).unwrap().iter().zip(expected) {
        let length = whole[..8].iter().map(|x| x * x).sum::<f32>().sqrt();
        let cut: Vec<f32> = whole[..8].iter().map(|x| x / length).collect();
        assert!(error(found, &cut) <= 1e-4);
    }
    for wrong in [0, 49] {
        let error = engine.embed(&texts, &cut(wrong)).unwrap_err().to_string();
        assert_eq!(error, format!("dimensions: expected 1 to 48, found {wrong}"));
    }
}

#[test]
fn what_cannot_be_embedded_is_refused() {
    let engine = load(&folder("last"), &options());
    let refused =
        |texts: &[Vec<u32>]| engine.embed(texts, &EmbedOptions::default()).unwrap_err().to_string();
    assert!(refused(&[vec![3], vec![]]).starts_with("text 1: expected at least one token"));
    assert!(refused(&[vec![3, 128]]).starts_with("text 0: tokens: expected ids below 128"));
    assert!(refused(&[vec![3; 257]]).starts_with("text 0: context: expected at most 256"));
    assert_eq!(engine.embed(&[], &EmbedOptions::default()).unwrap(), Vec::<Vec<f32>>::new());
    let mut session = engine.session();
    let generated = session.generate(vec![3, 4], &GenerateOptions::default());
    let found = generated.err().unwrap().to_string();
    assert!(found.starts_with("generation: expected a model that ends in logits"), "{found}");
    let generates = load(&folder("first"), &LoadOptions::default());
    assert_eq!(generates.embedding_form(), None);
    let found = generates.embed(&[vec![3]], &EmbedOptions::default()).unwrap_err().to_string();
    assert!(found.starts_with("embeddings: expected a model that was loaded for them"), "{found}");
}

#[test]
fn a_model_that_says_nothing_is_warned_of() {
    let engine = load(&root().join("llama3"), &options());
    let assumed = EmbeddingForm { pooling: Pooling::Last, normalised: true };
    assert_eq!(engine.embedding_form(), Some(assumed));
    let told = |warning: &String| warning.starts_with("no pooling is stated");
    assert_eq!(engine.warnings().iter().filter(|w| told(w)).count(), 1);
    let form = EmbeddingForm { pooling: Pooling::Mean, normalised: false };
    let engine = load(&root().join("llama3"), &LoadOptions { embeddings: Some(form), ..options() });
    assert!(!engine.warnings().iter().any(told));
}

/// The files of a case beside changed modules.
fn changed(modules: &str, pooling: &str) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(folder("last").join(name), to.path().join(name)).unwrap();
    }
    std::fs::write(to.path().join("modules.json"), modules).unwrap();
    std::fs::create_dir(to.path().join("1_Pooling")).unwrap();
    std::fs::write(to.path().join("1_Pooling/config.json"), pooling).unwrap();
    to
}

fn open(path: &Path) -> formats::Result<Option<EmbeddingForm>> {
    Ok(Engine::load(path, &options())?.embedding_form())
}

#[test]
fn modules_are_read_in_every_dialect_and_refused_by_name() {
    let listed = r#"[{"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#;
    for (pooling, expected) in [
        (r#"{"pooling_mode_cls_token": false, "pooling_mode_lasttoken": true}"#, Pooling::Last),
        (r#"{"pooling_mode_mean_tokens": true, "include_prompt": true}"#, Pooling::Mean),
        (r#"{"pooling_mode_cls_token": true}"#, Pooling::First),
        (r#"{"pooling_mode": "mean"}"#, Pooling::Mean),
    ] {
        let form = open(changed(listed, pooling).path()).unwrap().unwrap();
        assert_eq!((form.pooling, form.normalised), (expected, false), "{pooling}");
    }
    let dense = r#"[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]"#;
    let outside = r#"[{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#;
    for (modules, pooling, expected) in [
        (listed, r#"{"pooling_mode_max_tokens": true}"#, "config.json: pooling_mode_max_tokens"),
        (listed, r#"{"pooling_mode": "weightedmean"}"#, "config.json: pooling_mode: expected"),
        (listed, "{}", "config.json: pooling_mode_*: expected"),
        (
            listed,
            r#"{"pooling_mode_cls_token": true, "pooling_mode_lasttoken": true}"#,
            "found several at once",
        ),
        (listed, "[", "config.json: no valid JSON"),
        (dense, "{}", "modules.json: [0].type: expected Transformer, Pooling or Normalize"),
        (outside, "{}", "modules.json: [0].path: expected a folder of the model"),
        ("{}", "{}", "modules.json: expected a list of modules"),
    ] {
        let found = open(changed(modules, pooling).path()).unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
    }
}
