//! The reference fixtures: tiny checkpoints and what Transformers computes with them.

#![allow(dead_code, reason = "each test binary uses a part")]

use delft_engine::{Constraint, Engine, LoadOptions, LogitRows, TokenSet};
use formats::safetensors::Safetensors;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> PathBuf {
    testing::models()
}

/// The bundled model.
pub(crate) fn stories() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/delft-stories.gguf")
}

/// Whether a device can be simulated on this machine. `sim-metal` and `sim-cuda` run the emitted
/// text, which takes a C++ compiler on a POSIX system; without, the test is noted as skipped.
pub(crate) fn simulates(device: &str) -> bool {
    if !["sim-metal", "sim-cuda"].iter().any(|text| device.contains(text)) {
        return true;
    }
    let options = LoadOptions::on(device.parse().unwrap());
    let step = |engine: Engine| engine.session().logits(&[1], LogitRows::Last(1)).map(drop);
    match Engine::load(root().join("llama3"), &options).and_then(step) {
        Err(why) if why.expected.contains("C++ compiler") => {
            testing::skipped(why);
            false
        }
        // Any other error is for the test to find.
        _ => true,
    }
}

/// Allows the tokens that are congruent to how many were accepted, modulo 3, and none once there
/// are `most`; panics where it is told to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counting {
    pub(crate) accepted: u32,
    pub(crate) most: u32,
    pub(crate) panics_at: u32,
}

impl Default for Counting {
    fn default() -> Self {
        Counting { accepted: 0, most: u32::MAX, panics_at: u32::MAX }
    }
}

impl Constraint for Counting {
    fn allow(&mut self, _: usize, allowed: &mut TokenSet) -> formats::Result<()> {
        assert_ne!(self.accepted, self.panics_at, "on purpose");
        if self.accepted < self.most {
            (0..1000).filter(|t| t % 3 == self.accepted % 3).for_each(|t| allowed.insert(t));
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> formats::Result<u32> {
        assert_eq!(token % 3, self.accepted % 3);
        self.accepted += 1;
        Ok(token)
    }
}

fn folders() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(root()).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.is_dir());
    all.sort();
    all
}

/// Whether a path is of one of the folders that `DELFT_TEST_FIXTURES` lists, with commas between;
/// all are where it is not set.
pub(crate) fn wanted(path: &Path) -> bool {
    let Ok(wanted) = std::env::var("DELFT_TEST_FIXTURES") else { return true };
    let below = path.strip_prefix(root()).ok().and_then(|below| below.iter().next());
    wanted.split(',').any(|name| below.is_some_and(|below| below == name))
}

/// Folders with a Hugging Face checkpoint.
pub(crate) fn cases() -> Vec<PathBuf> {
    let cases: Vec<PathBuf> =
        folders().into_iter().filter(|p| p.join("config.json").exists()).collect();
    assert!(cases.len() >= 12, "{cases:?}");
    cases
}

/// GGUF files and quantised folders beside the checkpoints.
pub(crate) fn twins() -> Vec<PathBuf> {
    let entries = |folder: PathBuf| std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let twins: Vec<PathBuf> =
        folders().into_iter().flat_map(entries).filter(|path| twin_truth(path).is_some()).collect();
    assert!(twins.len() >= 8, "{twins:?}");
    twins
}

/// Where the truth about a twin is, and whether its products are exact; none for other paths.
pub(crate) fn twin_truth(path: &Path) -> Option<(PathBuf, bool)> {
    let name = path.file_name()?.to_str()?;
    if name == "folder" {
        return Some((path.with_file_name("expected.safetensors"), false));
    }
    let stored = name.strip_prefix("model.")?.strip_suffix(".gguf")?;
    // Quantised files have a truth of their own: the same arithmetic over the weights that they
    // decode to.
    let own = path.with_file_name(format!("expected.{stored}.safetensors"));
    let truth = if own.exists() { own } else { path.with_file_name("expected.safetensors") };
    Some((truth, stored == "f32"))
}

pub(crate) fn load(path: &Path, options: &LoadOptions) -> Engine {
    let context = options.context.or_else(|| testing::context(path));
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
