//! Requests of other programs, as `tests/clients/others.py` recorded them: none is refused.

use crate::common::{get, post, shared};
use serde_json::{Value, json};

#[test]
fn what_other_programs_ask_is_answered() {
    let text = include_str!("../others.jsonl");
    let mut clients = std::collections::BTreeSet::new();
    for line in text.lines() {
        let request: Value = serde_json::from_str(line).unwrap();
        let (client, path) =
            (request["client"].as_str().unwrap(), request["path"].as_str().unwrap());
        let mut body = request["body"].clone();
        if path == "/v1/chat/completions" && body.get("max_completion_tokens").is_none() {
            let fields = body.as_object_mut().unwrap();
            fields.entry("max_tokens").or_insert(8.into());
        }
        if path == "/v1/responses" {
            let fields = body.as_object_mut().unwrap();
            fields.entry("max_output_tokens").or_insert(8.into());
        }
        if ["/api/chat", "/api/generate"].contains(&path) {
            let fields = body.as_object_mut().unwrap();
            let options = fields.entry("options").or_insert(json!({}));
            let most = options.as_object_mut().unwrap().entry("num_predict").or_insert(8.into());
            if most.is_null() {
                *most = 8.into();
            }
        }
        let response = post(shared(), path, &body);
        assert_eq!(response.status, 200, "{client}: {path}: {response:?}");
        clients.extend(client.split([':', ',']).next().map(str::to_string));
    }
    let clients: Vec<String> = clients.into_iter().collect();
    let known = [
        "@continuedev/cli",
        "ai (Vercel)",
        "aider",
        "cline",
        "codex",
        "continue",
        "instructor",
        "langchain-anthropic",
        "langchain-ollama",
        "langchain-openai",
        "llama-index",
        "open-webui",
        "openai-agents",
        "pydantic-ai",
        "smolagents",
        "zed",
    ];
    assert_eq!(clients, known);
}

/// Programs put paths behind base addresses that end in a slash.
#[test]
fn spare_slashes_of_a_path_are_passed_over() {
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 1 });
    for path in ["/v1/chat/completions/", "//v1/chat/completions"] {
        let response = post(shared(), path, &body);
        assert_eq!(response.status, 200, "{path}: {response:?}");
    }
    for path in ["/v1/models/", "/v1/models/?after=x", "//api/tags/", "/"] {
        let response = get(shared(), path);
        assert_eq!(response.status, 200, "{path}: {response:?}");
    }
    assert_eq!(get(shared(), "//nothing/here/").status, 404);
}
