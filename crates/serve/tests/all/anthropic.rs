//! Anthropic's interface on the wire, with the bundled model.

use crate::common::{post, shared};
use serde_json::{Value, json};

fn ask(path: &str, extra: Value) -> crate::common::Response {
    let mut body = json!({
        "model": "stories",
        "messages": [{ "role": "user", "content": "Tell me a story about a kite" }],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    post(shared(), path, &body)
}

#[test]
fn messages_come_whole_and_as_events() {
    let greedy = json!({ "max_tokens": 20, "temperature": 0 });
    let whole = ask("/v1/messages", greedy.clone());
    assert_eq!(whole.status, 200, "{whole:?}");
    let whole = whole.json();
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(whole["stop_reason"], "max_tokens");
    let text = whole["content"][0]["text"].as_str().unwrap();
    assert!(!text.is_empty());
    assert_eq!(whole["usage"]["output_tokens"], 20);

    // The same question by OpenAI's name of it.
    let chat = json!({ "messages": [{ "role": "user", "content": "Tell me a story about a kite" }],
        "max_tokens": 20, "temperature": 0 });
    let chat = post(shared(), "/v1/chat/completions", &chat).json();
    assert_eq!(chat["choices"][0]["message"]["content"], text);

    let counted = ask("/v1/messages/count_tokens", json!({})).json();
    assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);
    // Settings of an answer count for nothing, and are named.
    let settings = json!({ "max_tokens": 9, "temperature": 0.5, "top_p": 1, "stream": true });
    let whole = ask("/v1/messages/count_tokens", settings);
    assert_eq!(whole.json(), counted);
    assert_eq!(
        whole.header("x-delft-no-effect"),
        Some("max_tokens, temperature, top_p, stream"),
        "{whole:?}"
    );

    let mut streamed = greedy;
    streamed["stream"] = true.into();
    let response = ask("/v1/messages", streamed);
    let events = response.events();
    let names: Vec<&str> =
        response.body.lines().filter_map(|l| l.strip_prefix("event: ")).collect();
    let types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names, types);
    assert_eq!(types[..2], ["message_start", "content_block_start"]);
    assert_eq!(types[types.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], counted["input_tokens"]);
    let piece = |event: &Value| event["delta"]["text"].as_str().map(str::to_string);
    assert_eq!(events.iter().filter_map(piece).collect::<String>(), text);
    assert_eq!(events[events.len() - 2]["usage"]["output_tokens"], 20);
}

#[test]
fn stop_sequences_are_named_and_a_last_turn_is_continued() {
    let whole = ask("/v1/messages", json!({ "max_tokens": 20, "temperature": 0 })).json();
    let text = whole["content"][0]["text"].as_str().unwrap().to_string();
    let word = text.split(' ').nth(3).unwrap();
    let stops = json!({ "max_tokens": 20, "temperature": 0, "stop_sequences": ["@@", word] });
    let stopped = ask("/v1/messages", stops).json();
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], word);

    let begun = &text[..text.find(word).unwrap()];
    let messages = json!([
        { "role": "user", "content": [{ "type": "text", "text": "Tell me a story about a kite" }] },
        { "role": "assistant", "content": begun.trim_end() },
    ]);
    let more = json!({ "max_tokens": 3, "temperature": 0, "messages": messages });
    let more = ask("/v1/messages", more).json();
    let rest = more["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with(&format!("{}{rest}", begun.trim_end())), "{rest:?} in {text:?}");
}

#[test]
fn what_cannot_be_done_is_refused_in_its_own_shape() {
    let cases = [
        (json!({}), 400, "max_tokens: expected a value, found none"),
        (json!({ "max_tokens": 5, "model": "x" }), 404, "model: expected stories"),
        (
            json!({ "max_tokens": 5, "tools": [{ "name": "f" }] }),
            400,
            "tools[0].input_schema: expected",
        ),
        (json!({ "max_tokens": 5, "n": 2 }), 400, "n: there is no such field"),
        (
            json!({ "max_tokens": 5, "mcp_servers": [{ "type": "url" }] }),
            400,
            "mcp_servers: not supported",
        ),
        (
            json!({ "max_tokens": 5, "tools": [{ "type": "bash_20250124", "name": "bash" }] }),
            400,
            "tools[0]: expected a tool of type custom, found bash_20250124",
        ),
        (json!({ "max_tokens": 5, "thinking": { "type": "x" } }), 400, "thinking.type: expected"),
        (
            json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": [{ "type": "image" }] }] }),
            400,
            "messages[0].content[0]: images are not supported by this model (type image)",
        ),
    ];
    for (extra, status, message) in cases {
        let response = ask("/v1/messages", extra.clone());
        let object = response.json();
        assert_eq!((response.status, &object["type"]), (status, &json!("error")), "{extra}");
        assert!(object["error"]["message"].as_str().unwrap().starts_with(message), "{object}");
    }
    let thinking =
        json!({ "max_tokens": 1, "thinking": { "type": "enabled", "budget_tokens": 1024 } });
    let noted = ask("/v1/messages", thinking);
    assert_eq!(noted.header("x-delft-no-effect"), Some("thinking.budget_tokens, thinking"));
}
