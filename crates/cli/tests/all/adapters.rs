//! Adapters from the command line: in use, and merged.

use crate::common::{delft, fixture, status};
use serde_json::Value;
use std::path::Path;

fn adapter(name: &str) -> String {
    fixture(&format!("../adapters/{name}"))
}

/// The logits of a fixture's tokens, as the command prints them, and as PEFT computed them.
fn logits(case: &str, arguments: &[&str]) -> (Vec<f64>, Vec<f32>) {
    let file = adapter(&format!("{case}/expected.safetensors"));
    let file = formats::Safetensors::open(Path::new(&file)).unwrap();
    let ids = file.get("input_ids").unwrap().bytes.chunks_exact(8);
    let ids: Vec<String> =
        ids.map(|b| i64::from_le_bytes(b.try_into().unwrap()).to_string()).collect();
    let output = delft()
        .args(["logits", "--cache-type", "f32", "--json", "--all", "--tokens", &ids.join(",")])
        .args(arguments)
        .output()
        .unwrap();
    assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = found["logits"].as_array().unwrap().iter();
    let found = rows.flat_map(|row| row.as_array().unwrap()).map(|v| v.as_f64().unwrap());
    (found.collect(), file.get("logits").unwrap().to_f32().unwrap())
}

fn assert_close(case: &str, (found, wanted): (Vec<f64>, Vec<f32>), bound: f64) {
    assert_eq!(found.len(), wanted.len(), "{case}");
    let difference = |(a, b): (&f64, &f32)| (a - f64::from(*b)).abs();
    let worst = found.iter().zip(&wanted).map(difference).fold(0.0, f64::max);
    assert!(worst < bound, "{case}: {worst:e}");
}

#[test]
fn an_adapter_is_used_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    // The merged weights of a base in bf16 are rounded to bf16.
    // GPT-2 keeps its matrices the other way round.
    for (case, base, bound) in [
        ("lora", "llama3", 1e-3),
        ("dora", "llama-bias", 1e-3),
        ("untied", "qwen3-untied", 0.3),
        ("transposed", "gpt2", 1e-3),
        // A table and a head that were one matrix, rows of one, and biases.
        ("anew", "llama3", 1e-3),
        ("tables", "llama3", 1e-3),
        ("tokens", "llama3", 1e-3),
        ("biased", "llama-bias", 1e-3),
        // Experts in one tensor each, in one for all, and turned with gates and ups by turns.
        ("experts", "mixtral", 0.3),
        ("experts-ranks", "gemma4-moe", 0.3),
        ("experts-turned", "gpt-oss", 0.3),
        ("experts-weighed", "llama4", 0.3),
    ] {
        let (base, from) = (fixture(base), adapter(case));
        let used = logits(case, &["-m", &base, "--adapter", &from]);
        assert_close(case, used, 1e-3);
        let merged = folder.path().join(case);
        let merged = merged.to_str().unwrap();
        let fuse = ["fuse", "-m", &base, "--adapter", &from, "--output", merged];
        let output = delft().args(fuse).output().unwrap();
        assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
        assert_close(case, logits(case, &["-m", merged]), bound);
        let again = delft().args(fuse).output().unwrap();
        assert_eq!(status(&again), 1);
        assert!(String::from_utf8_lossy(&again.stderr).contains("is not there yet"));
    }
    // Nothing is left of what failed.
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 12);
}

#[test]
fn an_adapter_becomes_one_of_mlx_lm() {
    let folder = tempfile::tempdir().unwrap();
    let (base, from) = (fixture("llama3"), adapter("lora"));
    let out = folder.path().join("mlx");
    let out = out.to_str().unwrap();
    let output = delft().args(["convert", &base, "--adapter", &from, "-o", out]).output().unwrap();
    assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let used = logits("lora", &["-m", &base, "--adapter", out]);
    assert_close("lora", used, 1e-3);
    let half = ["convert", &base, "--adapter", &from, "-o", out, "--type", "q8_0"];
    let output = delft().args(half).output().unwrap();
    assert_eq!(status(&output), 2);
}

#[test]
fn what_cannot_be_merged_or_used_is_refused_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let lora = adapter("lora");
    let (llama, gguf) = (fixture("llama3"), fixture("llama3/model.f32.gguf"));
    let scaled = format!("{lora}=strong");
    let cases: &[(&[&str], &[&str])] = &[
        (&["fuse", "-m", &gguf, "--adapter", &lora, "-o", out], &["a folder of safetensors"]),
        (&["run", "-m", &llama, "--adapter", "/nowhere", "x"], &["/nowhere", "no such file"]),
        (&["run", "-m", &llama, "--adapter", &scaled, "x"], &["a number behind", "strong"]),
        (&["serve", &llama, &gguf, "--adapter", &lora], &["--adapter", "one model"]),
        (&["run", "-m", &llama, "--adapter", &lora, "--adapter", &lora], &["found 2 of them"]),
    ];
    for (arguments, parts) in cases {
        let output = delft().args(*arguments).output().unwrap();
        assert!(status(&output) != 0, "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        for part in *parts {
            assert!(said.contains(part), "{arguments:?}: {said}");
        }
    }
    assert!(!Path::new(out).exists());
}
