//! Ollama's interface on the wire, with the bundled model.

use crate::common::{get, post, shared};
use serde_json::{Value, json};

fn lines(body: &str) -> Vec<Value> {
    body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn chats_are_streams_unless_they_are_not() {
    let body = json!({
        "model": "stories:latest",
        "messages": [{ "role": "user", "content": "Tell me a story about a kite" }],
        "options": { "num_predict": 20, "temperature": 0, "num_ctx": 4096 },
        "colour": "blue",
    });
    let streamed = post(shared(), "/api/chat", &body);
    assert_eq!(streamed.status, 200, "{streamed:?}");
    assert_eq!(streamed.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(streamed.header("x-delft-no-effect"), Some("colour, options.num_ctx"));
    let lines = lines(&streamed.body);
    let (last, parts) = lines.split_last().unwrap();
    assert!(parts.iter().all(|part| part["done"] == false));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("length")));
    assert_eq!(last["eval_count"], 20);
    assert!(last["total_duration"].as_u64().unwrap() > 0);
    let text: String =
        parts.iter().map(|part| part["message"]["content"].as_str().unwrap()).collect();

    let mut whole = body.clone();
    whole["stream"] = false.into();
    whole["logprobs"] = true.into();
    whole["top_logprobs"] = 2.into();
    let whole = post(shared(), "/api/chat", &whole).json();
    assert_eq!(whole["message"]["content"], text.as_str());
    assert_eq!(whole["logprobs"].as_array().unwrap().len(), 20);
    assert_eq!(whole["logprobs"][0]["top_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn a_prompt_is_a_message_unless_it_is_raw() {
    let ask = |extra: Value| {
        let mut body = json!({ "model": "stories", "prompt": "Once upon a time", "stream": false,
            "options": { "num_predict": 8, "temperature": 0 } });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        post(shared(), "/api/generate", &body)
    };
    let (message, raw) = (ask(json!({})).json(), ask(json!({ "raw": true })).json());
    let counted = |object: &Value| object["prompt_eval_count"].as_u64().unwrap();
    assert!(counted(&message) > counted(&raw), "{message} {raw}");
    let completion = json!({ "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0 });
    let completion = post(shared(), "/v1/completions", &completion).json();
    assert_eq!(raw["response"], completion["choices"][0]["text"]);
    assert_eq!(ask(json!({ "prompt": "" })).json()["done_reason"], "load");
    for (extra, message) in [
        (json!({ "suffix": "x" }), "suffix: not supported"),
        (json!({ "options": { "temperature": -1 } }), "options.temperature: expected"),
        (json!({ "options": { "mirostat": 2 } }), "options.mirostat: not supported"),
        (json!({ "format": "yaml" }), "format: expected"),
        (json!({ "model": "x" }), "model: expected stories"),
    ] {
        let response = ask(extra);
        assert!(response.json()["error"].as_str().unwrap().starts_with(message), "{response:?}");
    }
}

#[test]
fn what_is_served_is_listed() {
    let tags = get(shared(), "/api/tags").json();
    assert_eq!(tags["models"][0]["name"], "stories:latest");
    assert_eq!(get(shared(), "/api/ps").json()["models"][0]["context_length"], 1024);
    let shown = post(shared(), "/api/show", &json!({ "model": "stories" })).json();
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert_eq!(shown["model_info"]["llama.context_length"], 1024);
    assert_eq!(tags["models"][0]["details"], shown["details"]);
    assert_eq!(shown["details"]["parameter_size"], "25.7M");
    assert!(!shown["details"]["quantization_level"].as_str().unwrap().is_empty());
    // A name, blanks and a value, as Continue and others read each line.
    let parameters = shown["parameters"].as_str().unwrap();
    let expected = "num_ctx                        1024\n\
                    temperature                    1\n\
                    top_k                          0\n\
                    top_p                          0.95\n\
                    min_p                          0.05\n\
                    repeat_penalty                 1.05\n\
                    stop                           \"<|endoftext|>\"";
    assert_eq!(parameters, expected);
    let modelfile = shown["modelfile"].as_str().unwrap();
    assert!(modelfile.contains("FROM stories\nTEMPLATE \"\"\""), "{modelfile}");
    assert!(modelfile.contains("PARAMETER stop \"<|endoftext|>\"\n"), "{modelfile}");
    assert!(get(shared(), "/api/version").json()["version"].is_string());
    assert_eq!(post(shared(), "/api/show", &json!({ "model": "x" })).status, 404);
}

/// A conversation and a text that do not fit are refused, and cut where the request asks for it.
#[test]
fn what_does_not_fit_is_cut_only_where_that_is_asked() {
    let turn = |i: usize| {
        let story = format!("story {i}: {}", "the cat sat by the river. ".repeat(20));
        [
            json!({ "role": "user", "content": story }),
            json!({ "role": "assistant", "content": "Yes." }),
        ]
    };
    let mut messages = vec![json!({ "role": "system", "content": "Be kind." })];
    messages.extend((0..20).flat_map(turn));
    messages.push(json!({ "role": "user", "content": "And now?" }));
    let ask = |truncate: Value| {
        let body = json!({ "messages": messages, "stream": false, "truncate": truncate,
            "options": { "num_predict": 8, "temperature": 0 } });
        post(shared(), "/api/chat", &body)
    };
    for truncate in [json!(false), Value::Null] {
        let refused = ask(truncate);
        assert_eq!(refused.status, 400);
        assert!(refused.json()["error"].as_str().unwrap().contains("maximum context length"));
    }
    let cut = ask(true.into());
    assert_eq!(cut.status, 200, "{cut:?}");
    let left_out = cut.header("x-delft-cut").unwrap().strip_suffix(" messages").unwrap();
    let left_out: usize = left_out.parse().unwrap();
    assert!(left_out > 2 && left_out < 40 && left_out.is_multiple_of(2), "{left_out}");
    // The same as the rest alone, and one turn more does not fit.
    let alone = |left_out: usize| {
        let kept = [&messages[..1], &messages[1 + left_out..]].concat();
        let body = json!({ "messages": kept, "stream": false, "truncate": true,
            "options": { "num_predict": 8, "temperature": 0 } });
        post(shared(), "/api/chat", &body)
    };
    let rest = alone(left_out);
    assert_eq!(rest.header("x-delft-cut"), None);
    assert_eq!(rest.json()["message"], cut.json()["message"]);
    assert_eq!(rest.json()["prompt_eval_count"], cut.json()["prompt_eval_count"]);
    assert_eq!(alone(left_out - 2).header("x-delft-cut"), Some("2 messages"));
    // The same by OpenAI's name of it.
    let input = |truncation: &str| {
        let body = json!({ "input": messages, "truncation": truncation, "max_output_tokens": 8 });
        post(shared(), "/v1/responses", &body)
    };
    assert_eq!(input("disabled").json()["error"]["code"], "context_length_exceeded");
    let whole = input("auto");
    assert_eq!(whole.header("x-delft-cut"), cut.header("x-delft-cut"));
    assert_eq!(whole.json()["truncation"], "auto");
    assert_eq!(whole.json()["usage"]["input_tokens"], cut.json()["prompt_eval_count"]);

    let text = format!("Once upon a time. {}", "the cat sat by the river. ".repeat(300));
    let ask = |truncate: bool| {
        let options = json!({ "num_predict": 8, "num_keep": 6 });
        let body = json!({ "prompt": text, "raw": true, "stream": false, "truncate": truncate,
            "options": options });
        post(shared(), "/api/generate", &body)
    };
    assert_eq!(ask(false).status, 400);
    let cut = ask(true);
    assert_eq!(cut.json()["prompt_eval_count"], 1024 - 8);
    assert!(cut.header("x-delft-cut").unwrap().ends_with(" tokens"), "{cut:?}");
    assert_eq!(cut.header("x-delft-no-effect"), None);
}
