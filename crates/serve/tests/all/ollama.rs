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
    assert_eq!(tags["models"][0]["name"], "stories");
    assert_eq!(get(shared(), "/api/ps").json()["models"][0]["context_length"], 1024);
    let shown = post(shared(), "/api/show", &json!({ "model": "stories" })).json();
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert!(get(shared(), "/api/version").json()["version"].is_string());
    assert_eq!(post(shared(), "/api/show", &json!({ "model": "x" })).status, 404);
}
