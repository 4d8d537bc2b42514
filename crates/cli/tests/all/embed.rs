//! `delft embed` and `delft classify`: a line for each text.

use crate::common::{delft, fed, status};
use serde_json::Value;

fn embed(args: &[&str], stdin: &str) -> (i32, String, String) {
    run("embed", args, stdin)
}

fn run(command: &str, args: &[&str], stdin: &str) -> (i32, String, String) {
    let output = fed(delft().arg(command).args(args), stdin);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (status(&output), text(&output.stdout), text(&output.stderr))
}

fn lines(args: &[&str], stdin: &str) -> Vec<Value> {
    let (status, stdout, stderr) = embed(args, stdin);
    assert_eq!(status, 0, "{stderr}");
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/delft-stories.gguf");

#[test]
fn texts_are_words_or_lines() {
    let words = lines(&["-m", MODEL, "--pooling", "mean", "a lamp", "an owl"], "");
    assert_eq!(words.len(), 2);
    for (i, line) in words.iter().enumerate() {
        assert_eq!(line["index"], i);
        let numbers = line["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap());
        let length: f64 = numbers.map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
    assert_ne!(words[0]["embedding"], words[1]["embedding"]);
    assert_eq!(lines(&[MODEL, "--pooling", "mean"], "a lamp\n\nan owl\n"), words);
    let cut = lines(&[MODEL, "a lamp", "--pooling", "mean", "--raw", "--dimensions", "3"], "");
    assert_eq!(cut[0]["embedding"].as_array().unwrap().len(), 3);
}

#[test]
fn what_is_assumed_is_told_and_what_makes_no_sense_refused() {
    let (code, stdout, stderr) = embed(&[MODEL, "a lamp"], "");
    assert_eq!((code, stdout.lines().count()), (0, 1));
    assert!(stderr.contains("warning: no pooling is stated"), "{stderr}");
    for (args, code, expected) in [
        (&[MODEL][..], 1, "expected a text, or lines of them, found none"),
        (&[MODEL, "x", "--dimensions", "100000"], 1, "dimensions: expected 1 to"),
        (&[MODEL, "x", "--raw"], 2, "--pooling"),
    ] {
        let (found, stdout, stderr) = embed(args, "");
        assert!(found == code && stdout.is_empty() && stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn labels_are_told_by_their_probabilities() {
    let ask = ["-m", MODEL, "--raw", "--labels", " time, banana", "--prompt", "{}", "Once upon a"];
    let (code, stdout, stderr) = run("classify", &ask, "");
    assert_eq!(code, 0, "{stderr}");
    let line: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(line["label"], " time");
    let number = |of: &str, label: &str| line[of][label].as_f64().unwrap();
    let (time, banana) = (number("probabilities", " time"), number("probabilities", " banana"));
    assert!((time + banana - 1.0).abs() < 1e-9 && time > 0.5, "{stdout}");
    let ratio = (number("logprobs", " time") - number("logprobs", " banana")).exp();
    assert!((time / banana / ratio - 1.0).abs() < 1e-6, "{stdout}");
    for (args, code, expected) in [
        (&[MODEL, "x"][..], 2, "--labels"),
        (&[MODEL, "x", "--labels", "a,a"], 1, "labels that differ"),
        (&[MODEL, "x", "--labels", "a,b", "--prompt", "what"], 1, "{} in the place of the text"),
    ] {
        let (found, stdout, stderr) = run("classify", args, "");
        assert!(found == code && stdout.is_empty() && stderr.contains(expected), "{stderr}");
    }
}
