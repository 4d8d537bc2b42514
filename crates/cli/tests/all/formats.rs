//! Models written as GGUF files, and how far models are from each other.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::common::{delft, fixture, status};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    assert_eq!(status(output), 0, "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_folder_becomes_a_file_that_computes_the_same() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("qwen3.gguf").to_str().unwrap().to_owned();
    let folder = fixture("qwen3");
    let written =
        json(&delft().args(["convert", &folder, "-o", &file, "--json"]).output().unwrap());
    assert_eq!(written["types"][0]["type"], "bf16");
    let logits = |model: &str| {
        let tokens = ["--tokens", "1,2,3,4,5", "--cache-type", "f32", "--json"];
        let found = json(&delft().args(["logits", model]).args(tokens).output().unwrap());
        let row: Vec<f64> = serde_json::from_value(found["logits"][0].clone()).unwrap();
        row
    };
    let apart = logits(&folder).into_iter().zip(logits(&file)).map(|(a, b)| (a - b).abs());
    assert!(apart.fold(0.0, f64::max) < 1e-3);
    // What is there is not replaced unasked.
    let again = delft().args(["convert", &folder, "-o", &file]).output().unwrap();
    assert_eq!(status(&again), 1);
    assert!(text(&again.stderr).contains("--force replaces it"), "{}", text(&again.stderr));
    let small = scratch.path().join("small.gguf").to_str().unwrap().to_owned();
    let roles = ["--role", "ffn_down=q8_0", "--threads", "2", "--force"];
    let made =
        delft().args(["quantize", &file, "q4_0", "-o", &small]).args(roles).output().unwrap();
    assert_eq!(status(&made), 0, "{}", text(&made.stderr));
    let shown = text(&made.stdout);
    assert!(shown.contains("q4_0") && shown.contains("small.gguf: "), "{shown}");
    let unknown = delft().args(["quantize", &file, "q9", "-o", &small]).output().unwrap();
    assert!(text(&unknown.stderr).contains("TYPE: expected one of f32 f16"));
    // The type may stand behind options, and is needed.
    let behind = delft().args(["quantize", &file, "-o", &small, "--force", "q8_0"]).output();
    let behind = behind.unwrap();
    assert_eq!(status(&behind), 0, "{}", text(&behind.stderr));
    let without = delft().args(["quantize", "-m", &file, "-o", &small]).output().unwrap();
    assert_eq!(status(&without), 2);
    assert!(text(&without.stderr).starts_with("delft: quantize: expected a type, found none"));
    let kept = scratch.path().read_dir().unwrap().count();
    assert_eq!(kept, 2, "nothing is left beside the files");
}

#[test]
fn importance_is_measured_over_a_text_and_folders_are_made_for_mlx() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let (file, matrix, small) = (path("text.txt"), path("matrix.gguf"), path("small.gguf"));
    std::fs::write(&file, "the quick brown fox jumps over the lazy dog\n".repeat(8)).unwrap();
    let model = fixture("qwen3/model.bf16.gguf");
    let rest = ["-o", &matrix, "--ctx", "32", "--chunks", "2"];
    let run = |more: &str| delft().args(["imatrix", &model, &file]).args(rest).arg(more).output();
    let made = json(&run("--json").unwrap());
    assert_eq!((&made["tensors"], &made["tokens"]), (&Value::from(14), &Value::from(64)));
    assert!(text(&run("--json").unwrap().stderr).contains("--force replaces it"));
    // The text may stand behind options.
    let behind =
        |words: &[&str]| delft().args(words).args(["--ctx", "32", &file]).output().unwrap();
    let measured = behind(&["perplexity", &model, "--json"]);
    assert_eq!(status(&measured), 0, "{}", text(&measured.stderr));
    let again = behind(&["imatrix", &model, "-o", &matrix, "--force", "--chunks", "2"]);
    assert_eq!(status(&again), 0, "{}", text(&again.stderr));
    assert_eq!(status(&delft().args(["compare", &model]).output().unwrap()), 2);
    let quantize = ["quantize", &model, "q4_0", "-o", &small, "--imatrix"];
    assert_eq!(status(&delft().args(quantize).arg(&matrix).output().unwrap()), 0);
    let wrong = delft().args(quantize).args([&small, "--force"]).output().unwrap();
    assert!(text(&wrong.stderr).contains("no sums of squares"), "{}", text(&wrong.stderr));
    let folder = path("mlx");
    let quantize = ["quantize", &fixture("qwen3"), "mlx4", "-o", &folder, "--json"];
    let made = json(&delft().args(quantize).args(["--group-size", "32"]).output().unwrap());
    assert_eq!(made["types"][0]["type"], "affine4_32_bf16");
    let again = delft().args(quantize).output().unwrap();
    assert!(text(&again.stderr).contains("a folder that is not there yet"));
    let group = ["quantize", &model, "q8_0", "-o", &small, "--group-size", "32"];
    assert!(text(&delft().args(group).output().unwrap().stderr).contains("a type of MLX"));
}

#[test]
fn models_are_compared_over_a_text() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("text");
    std::fs::write(&file, "the quick brown fox jumps over the lazy dog\n".repeat(8)).unwrap();
    let file = file.to_str().unwrap();
    let (full, small) = (fixture("qwen3/model.bf16.gguf"), fixture("qwen3/model.q8_0.gguf"));
    let compare = |words: &[&str]| {
        let rest = ["--ctx", "32", "--chunks", "2", "--json"];
        json(&delft().arg("compare").args(words).args(rest).output().unwrap())
    };
    let same = compare(&[&full, &full, file]);
    assert_eq!((&same["kl"]["max"], &same["top1_agreement"]), (&0.0.into(), &1.0.into()));
    let apart = compare(&["-m", &small, &full, file]);
    let mean = apart["kl"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < 0.1, "{apart}");
    // The second half of each window but its last token, which has no successor.
    assert_eq!(apart["scored"], 30);
    assert_eq!(apart["worst"].as_array().unwrap().len(), 5);
    let drawn = scratch.path().join("apart.svg");
    let page = ["compare", &small, &full, file, "--ctx", "32", "--svg", drawn.to_str().unwrap()];
    let page = delft().args(page).output().unwrap();
    assert!(text(&page.stdout).contains("same likeliest token"));
    let svg = std::fs::read_to_string(&drawn).unwrap();
    let scored = text(&page.stdout).split(" tokens scored").next().unwrap().to_owned();
    let scored: usize = scored.lines().last().unwrap().parse().unwrap();
    assert_eq!(svg.matches("<circle").count(), scored, "{svg}");
    let short = delft().args(["compare", &small, &full]).output().unwrap();
    assert!(text(&short.stderr).contains("FILE: expected two models and a text"));
}

#[test]
fn a_model_is_verified_layer_by_layer() {
    let scratch = tempfile::tempdir().unwrap();
    let made = scratch.path().join("made.safetensors").to_str().unwrap().to_owned();
    let folder = fixture("llama3");
    let transformers = fixture("llama3/expected.safetensors");
    let verify = |model: &str, rest: &[&str]| {
        delft().args(["verify", model, "--cache-type", "f32"]).args(rest).output().unwrap()
    };
    // What Transformers computed, and what Delft did.
    let found = verify(&folder, &["--against", &transformers, "--tolerance", "1e-4", "--json"]);
    assert_eq!(status(&found), 0, "{}", text(&found.stderr));
    let found = json(&found);
    assert_eq!(found["stages"][0]["name"], "embeddings");
    assert_eq!(found["stages"].as_array().unwrap().last().unwrap()["name"], "logits");
    assert!(found["parts_at"].is_null());
    assert_eq!(status(&verify(&folder, &["--make", &made])), 0);
    assert_eq!(status(&verify(&folder, &["--against", &made, "--tolerance", "0"])), 0);
    // Another model parts at once, and is told by the first value.
    let other = verify(&fixture("llama-linear"), &["--against", &made]);
    assert_eq!(status(&other), 1);
    assert!(text(&other.stderr).contains("embeddings"), "{}", text(&other.stderr));
    // A reference's file is named where a value in it is of no use.
    let ids: Vec<u8> = [5i64, 6].iter().flat_map(|id| id.to_le_bytes()).collect();
    let odd = [("input_ids", formats::DType::I64, 2), ("logits", formats::DType::I32, 2)];
    let odd = odd.map(|(name, dtype, rows)| formats::TensorView {
        name,
        dtype,
        shape: if name == "logits" { &[2, 2] } else { &[2] },
        bytes: if name == "logits" { &ids } else { &ids[..8 * rows] },
    });
    formats::safetensors::write(Path::new(&made), &[], odd).unwrap();
    let other = text(&verify(&folder, &["--against", &made]).stderr);
    assert!(other.contains(&format!("{made}: logits: expected a float")), "{other}");
    let neither = verify(&folder, &[]);
    assert_eq!(status(&neither), 2);
}
