//! Damaged model files, all the way: each is refused with one line or runs, and never panics or
//! hangs.

use crate::common::root;
use delft_engine::{Engine, LoadOptions, LogitRows};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A small deterministic generator (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % n
    }
}

/// One of several kinds of damage, mostly to the first `head` bytes, where the structure is.
fn damage(bytes: &mut Vec<u8>, head: usize, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(head.min(bytes.len()).max(1));
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = [0, 0xFF, 0x7F, 0x80][random.below(4)],
            2 => bytes.truncate(at.max(1)),
            3 => {
                let extreme =
                    [0u64, 1, u64::MAX, 1 << 31, 1 << 62, 1 << 40][random.below(6)].to_le_bytes();
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&extreme[..end - at]);
            }
            4 => {
                let len = random.below(64).min(bytes.len() - at);
                let from = random.below(bytes.len() - len + 1);
                bytes.copy_within(from..from + len, at);
            }
            _ => bytes[at] = b"0123456789-+eE[]{}\",:ntf"[random.below(24)],
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
}

/// Loads and runs what is at `path`; returns the error's text.
fn run(path: &Path) -> Option<String> {
    let options = LoadOptions {
        threads: Some(1),
        context: Some(64),
        chunk: Some(16),
        sessions: 1,
        ..Default::default()
    };
    let attempt = || -> formats::Result<()> {
        let engine = Engine::load(path, &options)?;
        engine.session().logits(&[0, 1, 2], LogitRows::Last(1))?;
        Ok(())
    };
    let outcome = catch_unwind(AssertUnwindSafe(attempt));
    outcome.unwrap_or_else(|_| panic!("{}: a panic", path.display())).err().map(|e| e.to_string())
}

fn check(file: &str, case: &str, head: usize, count: u64) {
    let folder = root().join(case);
    let aside = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()) {
        std::fs::copy(&entry, aside.path().join(entry.file_name().unwrap())).unwrap();
    }
    let target = aside.path().join(file);
    let model = if file.ends_with(".gguf") { target.clone() } else { aside.path().to_path_buf() };
    let intact = std::fs::read(&target).unwrap();
    assert_eq!(run(&model), None, "{case}/{file}");
    let mut refused = 0;
    for seed in 1..=count {
        let mut bytes = intact.clone();
        damage(&mut bytes, head, &mut Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        std::fs::write(&target, &bytes).unwrap();
        if let Some(error) = run(&model) {
            assert!(!error.contains('\n') && error.len() < 1000, "seed {seed}: {error}");
            refused += 1;
        }
    }
    assert!(refused > count / 4, "{case}/{file}: {refused} of {count} refused");
}

#[test]
fn damaged_gguf_files() {
    check("model.f32.gguf", "llama3", 8192, 4000);
    check("model.q8_0.gguf", "qwen3", 8192, 2000);
}

#[test]
fn damaged_safetensors_headers() {
    check("model.safetensors", "qwen3", 2048, 2000);
}

#[test]
fn damaged_configurations() {
    check("config.json", "llama3", 2048, 1000);
    check("config.json", "qwen2-window", 2048, 1000);
}

/// A download or a copy over a file in use: what is gone reads as zeros, and loading says so at its
/// end.
#[test]
fn a_file_that_shrinks_while_it_is_loaded_is_refused() {
    for device in ["cpu", "sim"] {
        for (kept, why) in [(0, "all of it"), (4096, "all but the header"), (200_000, "its end")] {
            let aside = tempfile::tempdir().unwrap();
            let model = aside.path().join("model.gguf");
            std::fs::copy(root().join("llama-k-quants/model.q4_k_m.gguf"), &model).unwrap();
            let options = LoadOptions {
                threads: Some(1),
                context: Some(64),
                ..LoadOptions::on(device.parse().unwrap())
            };
            let prepared = Engine::prepare(&model, &options).unwrap();
            let size = std::fs::metadata(&model).unwrap().len();
            let file = std::fs::OpenOptions::new().write(true).open(&model).unwrap();
            let loaded = prepared.load(&mut |_, _| file.set_len(kept).unwrap());
            let error = loaded.err().unwrap_or_else(|| panic!("{device}, {why}: loaded"));
            let said = format!("expected {size} bytes, found {kept}: the file became shorter");
            let (error, path) = (error.to_string(), model.display().to_string());
            assert!(error.starts_with(&path) && error.contains(&said), "{device}, {why}: {error}");
        }
    }
}
