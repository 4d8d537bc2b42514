//! Gaps in texts: prompts of models whose vocabulary marks them, and refusals of others.

use std::path::Path;

use crate::common::{limits, post, receive, send, serve_all, shared};
use delft::formats::gguf::{MetadataArray, MetadataValue as Meta, TensorSpec, Writer};
use delft::formats::{Gguf, TensorView};
use delft::{Engine, LoadOptions};
use delft_serve::{AccessRules, Running, Served};
use serde_json::{Value, json};

/// The first of the last tokens of the bundled vocabulary, which get other texts.
const FIRST: usize = 6100;

/// A server of the bundled model with other texts for some of its tokens, and further metadata.
fn serving(folder: &Path, texts: &[&str], more: &[(&str, u32)]) -> Running {
    let source = Gguf::open(&crate::common::bundled()).unwrap();
    let mut metadata: Vec<(String, Meta)> =
        source.metadata().iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
    let mut gone = Vec::new();
    for (key, value) in &mut metadata {
        match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", Meta::Array(MetadataArray::String(tokens))) => {
                for (i, text) in texts.iter().enumerate() {
                    gone.push(std::mem::replace(&mut tokens[FIRST + i], text.to_string()));
                }
            }
            ("tokenizer.ggml.token_type", Meta::Array(MetadataArray::I32(types))) => {
                // Control tokens.
                (0..texts.len()).for_each(|i| types[FIRST + i] = 3);
            }
            ("tokenizer.ggml.merges", Meta::Array(MetadataArray::String(merges))) => {
                merges.retain(|merge| {
                    let (left, right) = merge.split_once(' ').unwrap();
                    let joined = format!("{left}{right}");
                    ![left, right, &joined].iter().any(|text| gone.iter().any(|own| own == text))
                });
            }
            _ => {}
        }
    }
    let more =
        more.iter().map(|(key, id)| (format!("tokenizer.ggml.{key}_token_id"), Meta::U32(*id)));
    metadata.extend(more);
    let spec = |tensor: TensorView<'_>| TensorSpec {
        name: tensor.name.to_string(),
        dtype: tensor.dtype,
        shape: tensor.shape.to_vec(),
    };
    let specs: Vec<TensorSpec> = source.iter().map(spec).collect();
    let path = folder.join("model.gguf");
    let mut file = Writer::create(&path, &metadata, &specs).unwrap();
    source.iter().for_each(|tensor| file.write(tensor.bytes).unwrap());
    file.finish().unwrap();
    let options = LoadOptions { threads: Some(2), sessions: 4, ..LoadOptions::default() };
    let engines = vec![Engine::load(&path, &options).unwrap()];
    let served =
        Served { name: "gaps".to_string(), engines, templates: None, adapters: Vec::new() };
    serve_all(limits(), AccessRules::default(), vec![served])
}

/// The tokens that a model reads for a request, and the answer.
fn read(running: &Running, path: &str, body: &Value) -> (Vec<u64>, Value) {
    let headers = [("x-delft-tokens", "1")];
    let stream = send(running.address(), "POST", path, &headers, &body.to_string());
    let response = receive(stream);
    assert_eq!(response.status, 200, "{response:?}");
    let object = response.json();
    let prompt = object["delft"]["text"]["prompt"].as_array().unwrap().iter();
    (prompt.map(|id| id.as_u64().unwrap()).collect(), object)
}

fn encode(running: &Running, text: &str) -> Vec<u64> {
    let tokens = post(running.address(), "/tokenize", &json!({ "content": text })).json();
    tokens["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

const BEFORE: &str = "Once upon a time there was a";
const AFTER: &str = " who lived by the river.";

/// Each family's order of marks, which its texts or the file's keys tell.
#[test]
fn a_gap_is_marked_as_the_vocabulary_has_it() {
    let first = FIRST as u64;
    let keys = [
        ("fim_pre", first as u32 + 4),
        ("fim_suf", first as u32 + 1),
        ("fim_mid", 9 + first as u32),
    ];
    let old =
        [("prefix", first as u32 + 4), ("suffix", first as u32 + 1), ("middle", 9 + first as u32)];
    type Case = (&'static [&'static str], Vec<(&'static str, u32)>, [Option<u64>; 3], bool);
    let cases: Vec<Case> = vec![
        (
            &["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
            vec![],
            [Some(first), Some(first + 2), Some(first + 1)],
            false,
        ),
        (
            &["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
            vec![],
            [Some(first + 1), Some(first), Some(first + 2)],
            false,
        ),
        (&["[SUFFIX]", "[PREFIX]"], vec![], [Some(first + 1), Some(first), None], true),
        (&[], keys.to_vec(), [Some(first + 4), Some(first + 1), Some(first + 9)], false),
        (&[], old.to_vec(), [Some(first + 4), Some(first + 1), Some(first + 9)], false),
    ];
    for (texts, keys, [before, after, middle], after_first) in cases {
        let folder = tempfile::tempdir().unwrap();
        let running = serving(folder.path(), texts, &keys);
        // The vocabulary puts a token in front of every text.
        let mut expected = vec![0];
        let mut parts = [(before, BEFORE), (after, AFTER)];
        if after_first {
            parts.reverse();
        }
        for (mark, text) in parts {
            expected.extend(mark);
            expected.extend(encode(&running, text));
        }
        expected.extend(middle);
        let completion =
            json!({ "prompt": BEFORE, "suffix": AFTER, "max_tokens": 4, "temperature": 0 });
        let (tokens, answer) = read(&running, "/v1/completions", &completion);
        assert_eq!(tokens, expected, "{texts:?}");
        let text = answer["choices"][0]["text"].as_str().unwrap();
        let options = json!({ "num_predict": 4, "temperature": 0 });
        let generate =
            json!({ "prompt": BEFORE, "suffix": AFTER, "options": options, "stream": false });
        let (tokens, answer) = read(&running, "/api/generate", &generate);
        assert_eq!((tokens, &answer["response"]), (expected.clone(), &text.into()));
        // Mistral's path, whole and as a stream.
        let mut fim = json!({ "model": "gaps", "prompt": BEFORE, "suffix": AFTER, "max_tokens": 4,
            "temperature": 0, "top_p": 1.0, "random_seed": 5, "stop": [] });
        let (tokens, answer) = read(&running, "/v1/fim/completions", &fim);
        assert_eq!(
            (tokens, &answer["choices"][0]["message"]["content"]),
            (expected.clone(), &text.into())
        );
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(
            (&answer["object"], &answer["usage"]["completion_tokens"]),
            (&json!("chat.completion"), &json!(4))
        );
        fim["stream"] = json!(true);
        let events = post(running.address(), "/v1/fim/completions", &fim).events();
        let streamed =
            events.iter().map(|event| event["choices"][0]["delta"]["content"].as_str().unwrap());
        assert_eq!(streamed.collect::<String>(), text);
        let last = events.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "length");
        assert_eq!(last["usage"], answer["usage"]);
        let infill = json!({ "input_prefix": "Once upon a time", "prompt": " there was a",
            "input_suffix": AFTER, "n_predict": 4, "temperature": 0 });
        let (tokens, answer) = read(&running, "/infill", &infill);
        assert_eq!((tokens, &answer["content"]), (expected, &text.into()));
        let shown = post(running.address(), "/api/show", &json!({ "model": "gaps" })).json();
        let capabilities = shown["capabilities"].as_array().unwrap();
        assert!(capabilities.contains(&"insert".into()), "{capabilities:?}");
        assert!(shown["template"].as_str().unwrap().contains("{{ .Suffix }}"));
        running.stop().unwrap();
    }
}

/// What editors send: files beside the text, a prompt that is only read, and answers of some
/// fields.
#[test]
fn editors_are_answered_as_llama_server_answers_them() {
    let folder = tempfile::tempdir().unwrap();
    let texts = [
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|repo_name|>",
        "<|file_sep|>",
        "<|fim_pad|>",
    ];
    let running = serving(folder.path(), &texts, &[]);
    let first = FIRST as u64;
    let extra = json!([
        { "text": "The fox.\n", "filename": "a.txt", "time": [1, 2] },
        { "text": "The crow.\n", "filename": "b.txt" },
    ]);
    let ask = |more: Value| {
        let mut body = json!({
            "id_slot": 0, "input_prefix": format!("{BEFORE}\n"), "input_suffix": AFTER, "input_extra": extra,
            "prompt": "fox", "n_predict": 6, "stop": [], "n_indent": 0, "top_k": 1, "top_p": 0.99,
            "stream": false, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true,
            "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (tokens, whole) = read(&running, "/infill", &ask(json!({})));
    let text = |text: &str| encode(&running, text);
    let expected = [
        vec![0, first + 3],
        text("myproject\n"),
        vec![first + 4],
        text("a.txt\n"),
        text("The fox.\n"),
        vec![first + 4],
        text("b.txt\n"),
        text("The crow.\n"),
        vec![first + 4],
        text("filename\n"),
        vec![first],
        text(&format!("{BEFORE}\n")),
        text("fox"),
        vec![first + 1],
        text(AFTER),
        vec![first + 2],
    ];
    assert_eq!(tokens, expected.concat());
    assert_eq!((&whole["stop"], &whole["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!(whole["tokens_predicted"], 6);
    assert_eq!(whole["timings"]["predicted_n"], 6);
    assert_eq!(whole["tokens_evaluated"], tokens.len());
    // Some fields alone, by their paths.
    let fields =
        json!({ "response_fields": ["content", "timings/prompt_n", "truncated", "nothing"] });
    let some = post(running.address(), "/infill", &ask(fields));
    let noted = some.header("x-delft-no-effect").unwrap();
    assert!(noted.contains("samplers") && noted.contains("input_extra[].time"), "{noted}");
    let some = some.json();
    assert_eq!(some["content"], whole["content"]);
    assert!(some["timings/prompt_n"].is_u64() && some["truncated"] == false, "{some}");
    assert_eq!(some.as_object().unwrap().len(), 3);
    // A stream says the same.
    let streamed = post(running.address(), "/infill", &ask(json!({ "stream": true }))).events();
    let text: String = streamed.iter().map(|part| part["content"].as_str().unwrap()).collect();
    assert_eq!(text, whole["content"].as_str().unwrap());
    assert_eq!(streamed.last().unwrap()["stop"], true);
    assert!(streamed.iter().rev().skip(1).all(|part| part["stop"] == false));
    // A prompt that is to be read for later is, and nothing is written.
    let other = json!({ "input_prefix": "Far away there was a green", "n_predict": 0 });
    let warmed = post(running.address(), "/infill", &ask(other.clone())).json();
    assert_eq!((&warmed["content"], &warmed["tokens_predicted"]), (&json!(""), &json!(0)));
    let (_, again) =
        read(&running, "/infill", &ask(json!({ "input_prefix": other["input_prefix"] })));
    assert!(
        again["timings"]["cache_n"].as_u64().unwrap() + 2
            > warmed["tokens_evaluated"].as_u64().unwrap()
    );
    // Files that do not fit are left out, the first of them first, which is told.
    let long = "The fox and the crow walked on and on. ".repeat(60);
    let many: Vec<Value> = (0..4).map(|_| json!({ "text": long, "filename": "c.txt" })).collect();
    let cut = post(running.address(), "/infill", &ask(json!({ "input_extra": many })));
    assert_eq!(cut.status, 200, "{cut:?}");
    assert!(cut.header("x-delft-cut").unwrap().ends_with(" files"), "{cut:?}");
    running.stop().unwrap();
}

/// A model that has filled the gap says so by one of its marks, which is no text.
#[test]
fn a_mark_ends_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let texts = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"];
    let running = serving(folder.path(), &texts, &[]);
    // The fourth mark comes first.
    let body = json!({ "prompt": BEFORE, "suffix": AFTER, "max_tokens": 9,
        "logit_bias": { (FIRST + 3).to_string(): 100 }, "temperature": 0 });
    let answer = post(running.address(), "/v1/completions", &body).json();
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    running.stop().unwrap();
}

#[test]
fn a_model_without_marks_is_named() {
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": BEFORE, "suffix": AFTER })),
        ("/v1/fim/completions", json!({ "prompt": BEFORE, "suffix": AFTER })),
        ("/api/generate", json!({ "prompt": BEFORE, "suffix": AFTER })),
        ("/infill", json!({ "input_prefix": BEFORE, "input_suffix": AFTER })),
    ] {
        let refused = post(shared(), path, &body);
        assert_eq!(refused.status, 400, "{refused:?}");
        assert!(
            refused.body.contains("suffix: not supported: stories has no tokens"),
            "{refused:?}"
        );
    }
    // An empty one asks for nothing.
    let body = json!({ "prompt": BEFORE, "suffix": "", "max_tokens": 1 });
    for path in ["/v1/completions", "/v1/fim/completions"] {
        assert_eq!(post(shared(), path, &body).status, 200);
    }
}
