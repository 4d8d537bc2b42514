//! The reference fixtures: tiny checkpoints and what Transformers computes with them.

#![allow(dead_code, reason = "each test binary uses a part")]

use delft_engine::{Engine, LoadOptions};
use formats::safetensors::Safetensors;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models")
}

fn folders() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(root()).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.is_dir());
    all.sort();
    all
}

/// Folders with a Hugging Face checkpoint.
pub(crate) fn cases() -> Vec<PathBuf> {
    let cases: Vec<PathBuf> =
        folders().into_iter().filter(|p| p.join("config.json").exists()).collect();
    assert!(cases.len() >= 12, "{cases:?}");
    cases
}

/// GGUF files and quantised folders, their expectations, and whether their products are exact.
pub(crate) fn twins() -> Vec<(PathBuf, PathBuf, bool)> {
    let mut twins = Vec::new();
    for case in folders() {
        let quantised = case.join("folder");
        if quantised.is_dir() {
            twins.push((quantised, case.join("expected.safetensors"), false));
        }
        for path in std::fs::read_dir(&case).unwrap().map(|e| e.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let Some(stored) = name.strip_prefix("model.").and_then(|n| n.strip_suffix(".gguf"))
            else {
                continue;
            };
            let own = case.join(format!("expected.{stored}.safetensors"));
            let exact = stored == "f32";
            let truth = if own.exists() { own } else { case.join("expected.safetensors") };
            twins.push((path, truth, exact));
        }
    }
    twins
}

/// The context with which a fixture's rotation is the one that it expects, where that follows the context.
fn context(path: &Path) -> Option<usize> {
    path.components().any(|part| part.as_os_str() == "phi3-short").then_some(32)
}

pub(crate) fn load(path: &Path, options: &LoadOptions) -> Engine {
    let context = options.context.or_else(|| context(path));
    let threads = options.threads.or(Some(2));
    let options = LoadOptions { threads, context, ..options.clone() };
    Engine::load(path, &options).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(crate) struct Expected(Safetensors);

impl Expected {
    pub(crate) fn open(path: &Path) -> Self {
        Expected(Safetensors::open(path).unwrap())
    }

    pub(crate) fn floats(&self, name: &str) -> Option<Vec<f32>> {
        self.0.get(name).map(|t| t.to_f32().unwrap())
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = self.0.get(name).unwrap_or_else(|| panic!("{name}")).bytes;
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    }
}

/// Largest difference, relative to the range of `want`.
pub(crate) fn error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let (low, high) = want.iter().fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
    got.iter()
        .zip(want)
        .map(|(g, w)| (g - w).abs())
        .fold(0.0, |a: f32, b| if b.is_nan() { b } else { a.max(b) })
        / (high - low)
}
