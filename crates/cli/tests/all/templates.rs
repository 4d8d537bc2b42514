//! The binary on a model with a chat template: a reference checkpoint of 128 tokens given a
//! vocabulary of single characters, so that its (meaningless) answers can be followed token by
//! token.

use crate::common::{delft, lettered, status};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Output, Stdio};

fn json_of(output: &Output) -> Value {
    assert_eq!(status(output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_prompt_becomes_a_message_unless_it_is_raw() {
    let folder = tempfile::tempdir().unwrap();
    lettered(folder.path());
    let run = |extra: &[&str]| {
        let output = delft()
            .args(["run", "hello", "-n", "4", "--temp", "0", "--json", "-m"])
            .arg(folder.path())
            .args(extra)
            .output();
        json_of(&output.unwrap())
    };
    let prompted = |value: &Value| value["metrics"]["prompt_tokens"].as_u64().unwrap();
    let (raw, message, system) = (run(&["--raw"]), run(&[]), run(&["--system", "Be."]));
    assert_eq!(prompted(&raw), 5);
    assert_eq!(prompted(&message), 1 + 5 + 1);
    assert_eq!(prompted(&system), 1 + 3 + 1 + 5 + 1);
    assert_eq!(run(&["--chat"])["tokens"], message["tokens"]);

    // The same prompt, token by token: <|user|> hello <|assistant|>.
    let ids: Vec<String> = std::iter::once(4)
        .chain("hello".bytes().map(|byte| u32::from(byte - b' ') + 6))
        .chain([5])
        .map(|id| id.to_string())
        .collect();
    let output = delft()
        .args(["logits", "--json", "--generate", "4", "--tokens", &ids.join(","), "-m"])
        .arg(folder.path())
        .output();
    assert_eq!(json_of(&output.unwrap())["generated"], message["tokens"]);
    let shown = delft()
        .args(["tokenize", "--json", "--parse-special", "<|user|>hello<|assistant|>", "-m"])
        .arg(folder.path())
        .output();
    let shown = json_of(&shown.unwrap())["tokens"].to_string();
    assert_eq!(shown, format!("[{}]", ids.join(",")));
}

#[test]
fn a_conversation_is_continued_and_its_prefix_reused() {
    let folder = tempfile::tempdir().unwrap();
    lettered(folder.path());
    let saved = folder.path().join("talk.json");
    let mut child = delft()
        .args(["chat", "--system", "Be.", "-n", "3", "--temp", "0", "--verbose", "-m"])
        .arg(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let input = format!(
        "ab\n/undo\nab\n/system\n/system Or not.\n/save {}\n/clear\n/reset\n/stats\n",
        saved.display()
    );
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(status(&output), 0, "{stderr}");
    // The second time the same question is asked, all but its last token is in the cache:
    // <|system|>Be.<|user|>ab.
    assert!(
        stderr.contains("prefill 8 tokens,") && stderr.contains("prefill 8 tokens (7 reused)"),
        "{stderr}"
    );
    assert!(stderr.contains("\nBe.\n") && stderr.contains("context: 0 of 256"), "{stderr}");
    let answers: Vec<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0], answers[1]);
    let messages: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let expected = json!({ "messages": [
        { "role": "system", "content": "Or not." },
        { "role": "user", "content": "ab" },
        { "role": "assistant", "content": answers[0] },
    ] });
    assert_eq!(messages, expected);
}

#[test]
fn a_prompt_that_does_not_fit_is_one_line_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    lettered(folder.path());
    let output = delft()
        .args(["run", "--ctx", "16", "-m"])
        .arg(folder.path())
        .arg("x".repeat(40))
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(status(&output), 1);
    assert!(
        stderr.contains("context") && stderr.contains("--ctx") && stderr.lines().count() == 1,
        "{stderr}"
    );
    let output = delft()
        .args(["run", "--ctx", "16", "--json", "--temp", "0", "-m"])
        .arg(folder.path())
        .arg("x")
        .output();
    let found = json_of(&output.unwrap());
    assert!(["stop", "context_full"].contains(&found["finish"].as_str().unwrap()), "{found}");
}
