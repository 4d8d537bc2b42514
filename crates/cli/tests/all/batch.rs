//! `delft batch`: answers in order, errors in their places, and a batch that goes on where it
//! stopped.

use crate::common::{delft, fed, status};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

fn batch(arguments: &[&str], lines: &str) -> Output {
    fed(
        delft().args(["batch", "--threads", "2", "--ctx", "256", "-n", "12"]).args(arguments),
        lines,
    )
}

fn answers(output: &Output) -> Vec<Value> {
    assert_eq!(status(output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    parsed(&String::from_utf8_lossy(&output.stdout))
}

fn parsed(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The text that `delft run` writes for the same prompt.
fn run(prompt: &str, arguments: &[&str]) -> String {
    let all = ["run", "--threads", "2", "--ctx", "256", "--json", "--raw", "-p", prompt];
    let length: &[&str] = if arguments.contains(&"-n") { &[] } else { &["-n", "12"] };
    let output = delft().args(all).args(length).args(arguments).output().unwrap();
    assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    object["text"].as_str().unwrap().to_string()
}

const REQUESTS: &str = r#"{"prompt": "Once upon a time", "temperature": 0}

{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "x", "prompt": "The dog", "temperature": 0.8, "top_k": 20, "seed": 5, "max_tokens": 6}}
nonsense
{"prompt": "The cat", "frobnicate": 1}
{"custom_id": "b", "body": {"prompt": "One day", "temperature": -1}}
{"prompt": [1, 2, 3], "max_tokens": 0}
{"prompt": "Lily", "temperature": 0, "stop": ["."], "max_tokens": 60}
{"custom_id": "c", "body": {"messages": "no"}}
[1]
{"custom_id": "d", "prompt": "The end", "seed": 1, "logit_bias": {"3": -100}, "presence_penalty": 0.5}
"#;

#[test]
fn each_line_has_its_answer_in_its_place() {
    let found = answers(&batch(&["-"], REQUESTS));
    let numbers: Vec<u64> = found.iter().map(|answer| answer["line"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    assert_eq!(found[0]["text"], run("Once upon a time", &["--temp", "0"]));
    assert_eq!(found[0]["finish"], "length");
    assert_eq!(found[0]["usage"]["completion_tokens"], 12);

    // A line of OpenAI's batch files is answered in the shape of their results.
    let one = &found[1];
    let text = run("The dog", &["--temp", "0.8", "--top-k", "20", "--seed", "5", "-n", "6"]);
    assert_eq!((&one["custom_id"], &one["text"]), (&json!("a"), &json!(text)));
    assert_eq!((&one["response"]["status_code"], &one["error"]), (&json!(200), &Value::Null));
    let body = &one["response"]["body"];
    assert_eq!(
        (&body["object"], &body["choices"][0]["text"]),
        (&json!("text_completion"), &json!(text))
    );
    assert_eq!(body["choices"][0]["finish_reason"], "length");

    let error = |i: usize| found[i]["error"].as_str().unwrap();
    assert!(error(2).starts_with("line 4: expected a JSON object"), "{}", error(2));
    assert!(error(3).contains("line 5") && error(3).contains("frobnicate"), "{}", error(3));
    let body = &found[4]["response"];
    assert_eq!((&body["status_code"], &found[4]["custom_id"]), (&json!(400), &json!("b")));
    assert!(body["body"]["error"]["message"].as_str().unwrap().contains("temperature"));
    assert_eq!((&found[5]["text"], &found[5]["finish"]), (&json!(""), &json!("length")));
    let text = found[6]["text"].as_str().unwrap();
    assert!(found[6]["finish"] != "stop" || !text.contains('.'), "{}", found[6]);
    let message = found[7]["response"]["body"]["error"]["message"].as_str().unwrap();
    assert!(message.contains("line 9: messages: expected a list"), "{message}");
    assert!(error(8).contains("line 10: expected a JSON object, found an array"), "{}", error(8));
    assert_eq!(
        (&found[9]["custom_id"], &found[9]["usage"]["completion_tokens"]),
        (&json!("d"), &json!(12))
    );
}

/// Messages are read as the server reads them: parts of text become one, and what is no text or has
/// no role is refused by its place.
#[test]
fn messages_are_what_the_server_reads() {
    let of = |messages: Value| json!({ "messages": messages, "temperature": 0, "max_tokens": 6 });
    let parts =
        json!([{ "type": "text", "text": "Tell of " }, { "type": "text", "text": "a fox" }]);
    let image = json!([{ "type": "image_url", "image_url": { "url": "x" } }]);
    let lines: Vec<String> = [
        of(json!([{ "role": "user", "content": "Tell of a fox" }])),
        of(json!([{ "role": "user", "content": parts }])),
        of(json!([{ "role": "user", "content": image }])),
        of(json!([])),
        of(json!([{ "role": "user" }])),
        of(json!([{ "role": "stranger", "content": "a" }])),
    ]
    .map(|line| line.to_string())
    .into();
    let text = format!("\u{feff}{}\n", lines.join("\n"));
    let found = answers(&batch(&["-"], &text));
    assert_eq!(found[0]["text"], found[1]["text"]);
    assert_eq!(found[0]["usage"]["prompt_tokens"], found[1]["usage"]["prompt_tokens"]);
    for (answer, why) in found[2..].iter().zip([
        "line 3: messages[0].content[0]: images are not supported",
        "line 4: messages: expected 1 to",
        "line 5: messages[0].content: expected a string, found none",
        "line 6: messages[0].role: expected system",
    ]) {
        let error = answer["error"].as_str().unwrap();
        assert!(error.starts_with(why), "{error}");
    }
}

/// -1 is no limit, and a fraction of nothing none.
#[test]
fn numbers_of_tokens_are_those_of_other_programs() {
    let line = |most: &str| {
        format!(
            "{{\"prompt\": \"Lily\", \"temperature\": 0, \"stop\": [\".\"], \"max_tokens\": {most}}}\n"
        )
    };
    let found = answers(&batch(&["-"], &["-1", "6.0", "-2", "2.5"].map(line).concat()));
    assert_eq!(found[0]["finish"], "stop");
    assert_eq!(found[1]["usage"]["completion_tokens"], 6);
    for answer in &found[2..] {
        assert!(answer["error"].as_str().unwrap().contains("a whole number"), "{answer}");
    }
}

/// Log-probabilities in the shapes of OpenAI's two APIs are those that `delft run` tells of the
/// same text.
#[test]
fn log_probabilities_have_openais_shapes() {
    let lines = r#"{"prompt": "The dog", "temperature": 0, "logprobs": 2, "max_tokens": 5}
{"body": {"prompt": "The dog", "temperature": 0, "logprobs": 0, "max_tokens": 5}}
{"prompt": "The dog", "logprobs": 6}
{"prompt": "The dog", "logprobs": true}
{"prompt": "The dog", "top_logprobs": 1}
{"messages": [{"role": "user", "content": "a"}], "logprobs": 2}
{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}
{"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 21}
{"prompt": "The dog", "temperature": 0, "logprobs": false, "max_tokens": 1}
"#;
    let found = answers(&batch(&["-"], lines));
    let all = ["run", "--threads", "2", "--ctx", "256", "--raw", "-p", "The dog", "--temp", "0"];
    let more = ["-n", "5", "--top-logprobs", "2"];
    let run = |flag: &str| delft().args(all).args(more).arg(flag).output().unwrap();
    let whole: Value = serde_json::from_slice(&run("--json").stdout).unwrap();
    let told = whole["logprobs"].as_array().unwrap();
    assert_eq!(told.len(), 5);
    for (i, token) in told.iter().enumerate() {
        assert_eq!(token["token"], whole["tokens"][i]);
        // The model's penalty of repetitions may have another token taken than the likeliest.
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        let listed = top.iter().find(|other| other["token"] == token["token"]);
        assert!(listed.is_none_or(|own| own["logprob"] == token["logprob"]), "{token}");
        assert!(top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
        let own = &found[0]["logprobs"];
        assert_eq!(
            (&own["tokens"][i], &own["token_logprobs"][i]),
            (&token["text"], &token["logprob"])
        );
        let second = top[1]["text"].as_str().unwrap();
        assert_eq!(own["top_logprobs"][i][second], top[1]["logprob"]);
        let body = &found[1]["response"]["body"]["choices"][0]["logprobs"];
        // Found with the token alone, by a sum in another order.
        let alone = body["token_logprobs"][i].as_f64().unwrap();
        assert!((alone - token["logprob"].as_f64().unwrap()).abs() < 1e-6, "{body} {token}");
        assert_eq!(body["top_logprobs"][i], json!({}));
    }
    let lines = run("--json-lines");
    let lines = parsed(&String::from_utf8_lossy(&lines.stdout));
    for (line, token) in lines.iter().zip(told) {
        assert_eq!(
            (&line["token"], &line["top_logprobs"]),
            (&token["token"], &token["top_logprobs"])
        );
    }
    // People are told on standard error, a line for each token.
    let said = String::from_utf8_lossy(&run("--no-echo").stderr).into_owned();
    let first = format!(
        "{:?} {:.3}: ",
        told[0]["text"].as_str().unwrap(),
        told[0]["logprob"].as_f64().unwrap()
    );
    assert!(said.contains(&first), "{first} in {said}");
    for (i, expected) in [
        (2, "logprobs: expected a whole number from 0 to 5"),
        (3, "logprobs: expected a whole number from 0 to 5"),
        (4, "top_logprobs: expected logprobs alone"),
        (5, "logprobs: expected true or false beside messages"),
        (6, "top_logprobs: expected logprobs: true beside it"),
        (7, "top_logprobs: expected a whole number from 0 to 20"),
    ] {
        let error = found[i]["error"].as_str().unwrap();
        assert!(error.contains(expected), "{error}");
    }
    assert!(found[8].get("logprobs").is_none() && found[8]["text"].is_string());
}

/// The lines without the time at which they were made and what was cached then.
fn lasting(path: &Path) -> Vec<Value> {
    let mut all = parsed(&std::fs::read_to_string(path).unwrap());
    for line in &mut all {
        let object = line.as_object_mut().unwrap();
        object.remove("usage");
        if let Some(body) = line.pointer_mut("/response/body").and_then(Value::as_object_mut) {
            body.remove("created");
            body.remove("usage");
        }
    }
    all
}

#[test]
fn a_batch_goes_on_behind_the_last_whole_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (requests, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    std::fs::write(&requests, REQUESTS).unwrap();
    let (requests, written) = (requests.to_str().unwrap(), output.to_str().unwrap());
    let arguments = [requests, "--output", written, "--seed", "3"];
    assert!(answers(&batch(&arguments, "")).is_empty());
    let whole = lasting(&output);
    let text = std::fs::read_to_string(&output).unwrap();
    // Within the fourth answer, and behind the third.
    let third = text.match_indices('\n').nth(2).unwrap().0 + 1;
    for (end, said_so) in [(third, true), (third + 9, true), (0, false), (text.len(), false)] {
        std::fs::write(&output, &text[..end]).unwrap();
        let resumed = batch(&arguments, "");
        assert!(answers(&resumed).is_empty());
        assert_eq!(lasting(&output), whole, "from byte {end}");
        let said = String::from_utf8_lossy(&resumed.stderr).into_owned();
        assert_eq!(said.contains("3 lines are answered already"), said_so, "{said}");
    }
    // Answers to something else are not continued.
    std::fs::write(&output, "{\"line\": 7}\n").unwrap();
    let refused = batch(&arguments, "");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(status(&refused) == 1 && said.contains("expected an answer of this batch"), "{said}");
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "{\"line\": 7}\n", "it stays as it was");
}

#[test]
fn a_text_that_cannot_fit_is_refused_before_it_is_made_into_tokens() {
    // Half a minute for such a word, were it tokenised.
    let word = "x".repeat(8 << 20);
    let line = json!({ "prompt": word }).to_string();
    let chat = json!({ "messages": [{ "role": "user", "content": word }] }).to_string();
    let began = std::time::Instant::now();
    let found = answers(&batch(&["-"], &format!("{line}\n{chat}\n{{\"prompt\": \"a\"}}\n")));
    let why = found[0]["error"].as_str().unwrap();
    assert!(why.contains("a text of 8388608 bytes, which cannot fit"), "{why}");
    assert!(found[1]["error"].is_string() && found[2]["text"].is_string(), "{found:?}");
    let run = |more: &[&str]| {
        let all = ["run", "--threads", "2", "--ctx", "256", "-n", "1", "--raw", "--file", "-"];
        let output = fed(delft().args(all).args(more), &word);
        (status(&output), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = run(&[]);
    assert!(status == 1 && said.contains("a text of 8388608 bytes, which cannot fit"), "{said}");
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
}

#[test]
fn what_is_no_batch_is_refused() {
    let none = delft().args(["batch"]).output().unwrap();
    assert_eq!(status(&none), 2);
    let missing = delft().args(["batch", "/nowhere/requests.jsonl"]).output().unwrap();
    assert_eq!(status(&missing), 1);
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(said.contains("/nowhere/requests.jsonl"), "{said}");
}

#[test]
fn samplers_are_flags_and_checked() {
    let with = |arguments: &[&str]| {
        let all =
            ["run", "--threads", "2", "--ctx", "256", "-n", "30", "-q", "--no-echo", "--seed", "3"];
        delft().args(all).args(["-p", "Once upon a time"]).args(arguments).output().unwrap()
    };
    let text = |arguments: &[&str]| {
        let output = with(arguments);
        assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let plain = text(&["--temp", "0.8"]);
    assert_eq!(text(&["--temp", "0.8", "--dry-multiplier", "0", "--xtc-probability", "0"]), plain);
    assert_ne!(
        text(&["--temp", "0.8", "--xtc-probability", "1", "--xtc-threshold", "0.05"]),
        plain
    );
    // A token that is wanted above all others is all there is, and one that may not come does not.
    let forced = text(&["--temp", "0", "--logit-bias", "50+100", "--ignore-eos"]);
    let repeated = text(&[
        "--temp",
        "0",
        "--logit-bias",
        "50+100",
        "--ignore-eos",
        "--dry-multiplier",
        "100",
        "--dry-sequence-breaker",
        "none",
    ]);
    assert_ne!(forced, repeated);
    for (arguments, problem) in [
        (&["--logit-bias", "5"][..], "a token's id and a number with its sign"),
        (&["--logit-bias", "5+nan"], "a token's id and a number with its sign"),
        (&["--dry-base", "0.5"], "a number of at least 1"),
        (&["--xtc-probability", "2"], "a number from 0 to 1"),
        (&["--logit-bias", "99999999+1"], "a token below"),
        (&["--dry-sequence-breaker", "no such text in any token"], "part of one"),
    ] {
        let output = with(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(status(&output) != 0 && said.contains(problem), "{arguments:?}: {said}");
    }
}
