//! `delft eval` from outside.

use crate::common::{delft, status};
use serde_json::Value;
use std::path::Path;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/delft-stories.gguf");

fn run(args: &[&str]) -> (i32, String, String) {
    let output = delft().args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (status(&output), text(&output.stdout), text(&output.stderr))
}

fn object(args: &[&str]) -> Value {
    let (code, stdout, stderr) = run(args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {stdout}"))
}

/// Writes a file of a folder, and gives its path.
fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A text is foreseen as `delft perplexity` says, which llama.cpp's and Transformers' own figures hold.
#[test]
fn losses_are_those_of_perplexity() {
    let folder = tempfile::tempdir().unwrap();
    let text = "Once upon a time there was a fox who lived in a hollow tree.".repeat(4);
    let text_file = file(folder.path(), "text.txt", &text);
    let eval = |data: &str| {
        object(&["eval", "-m", MODEL, "--data", data, "--cache-type", "f32", "--raw", "--json"])
    };
    let whole = eval(&text_file);
    let tokens = whole["tokens"].as_u64().unwrap();
    // One window that holds all of the text, in which every token but the first is scored.
    let window = tokens.to_string();
    let perplexity = ["perplexity", "-m", MODEL, &text_file, "--cache-type", "f32", "--json"];
    let scored = object(&[&perplexity[..], &["--ctx", &window, "--stride", &window]].concat());
    assert_eq!((&scored["chunks"], &scored["scored"]), (&1.into(), &(tokens - 1).into()));
    // It knows no end of the text, which an empty completion consists of.
    let end = serde_json::json!({ "prompt": text, "completion": "" }).to_string();
    let end = eval(&file(folder.path(), "end.jsonl", &end));
    assert_eq!(end["tokens"], 1);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    let apart = number(&scored, "nll") * (tokens - 1) as f64 + number(&end, "loss");
    assert!(
        (number(&whole, "loss") * tokens as f64 - apart).abs() < 1e-3,
        "{whole} {scored} {end}"
    );
}

#[test]
fn examples_and_questions_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let talks = "{\"prompt\": \"Tell me a story.\", \"completion\": \"Once upon a time\"}\n{\"text\": \"A fox.\"}\n";
    let talks = file(folder.path(), "talks.jsonl", talks);
    let found = object(&["eval", "-m", MODEL, "--data", &talks, "--json"]);
    assert_eq!((&found["examples"], &found["answers"]), (&2.into(), &1.into()));
    let loss = found["loss"].as_f64().unwrap();
    assert!((found["perplexity"].as_f64().unwrap() / loss.exp() - 1.0).abs() < 1e-9);
    let first = object(&["eval", "-m", MODEL, "--data", &talks, "--limit", "1", "--json"]);
    assert_eq!(first["examples"], 1);
    let (code, stdout, _) = run(&["eval", MODEL, "--data", &talks]);
    assert_eq!(code, 0);
    for row in ["examples", "loss", "perplexity", "likeliest tokens", "exact answers"] {
        assert!(stdout.lines().any(|line| line.starts_with(row)), "{stdout}");
    }
    let question = "{\"question\": \"Who?\", \"choices\": [\"Once upon a time\", \"Zq zq 77 #\"], \"answer\": \"A\"}\n";
    let questions = file(folder.path(), "questions.jsonl", &question.repeat(2));
    let found = object(&["eval", "-m", MODEL, "--data", &questions, "--json"]);
    assert_eq!((&found["questions"], &found["right"]), (&2.into(), &2.into()));
    let wrong = file(folder.path(), "wrong.jsonl", "{\"text\": 7}\n");
    let (code, stdout, stderr) = run(&["eval", "-m", MODEL, "--data", &wrong]);
    assert!(code == 1 && stdout.is_empty(), "{stderr}");
    assert!(
        stderr.contains("wrong.jsonl: line 1: text: expected a text, found a number"),
        "{stderr}"
    );
}
