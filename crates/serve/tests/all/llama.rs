//! llama-server's own paths, asked as its clients ask them.

use crate::common::{get, post, shared};
use serde_json::{Value, json};

fn completion(body: &Value) -> Value {
    let response = post(shared(), "/completion", body);
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

#[test]
fn a_text_is_told_in_llama_servers_shape() {
    let body = json!({ "prompt": "Once upon a time", "n_predict": 8, "temperature": 0 });
    let whole = completion(&body);
    let text = whole["content"].as_str().unwrap();
    let chat = json!({ "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0 });
    let other = post(shared(), "/v1/completions", &chat).json();
    assert_eq!(other["choices"][0]["text"], text);
    assert_eq!((&whole["stop"], &whole["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!((&whole["tokens_predicted"], &whole["tokens"]), (&json!(8), &json!([])));
    assert_eq!(whole["generation_settings"]["n_predict"], 8);
    assert_eq!(whole["timings"]["predicted_n"], 8);
    // The older name of the length, and the other path.
    let other = json!({ "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0 });
    let other = post(shared(), "/completions", &other).json();
    assert_eq!(other["content"], text);
    let mut streamed = body;
    streamed["stream"] = true.into();
    let response = post(shared(), "/completion", &streamed);
    let (events, last) = (response.events(), "data: [DONE]");
    assert!(!response.body.contains(last), "{}", response.body);
    let pieces: String = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!(pieces, text);
    let stops: Vec<bool> = events.iter().map(|event| event["stop"].as_bool().unwrap()).collect();
    assert!(stops.last() == Some(&true) && stops.iter().filter(|stop| **stop).count() == 1);
    assert!(events[0]["tokens"].as_array().is_some_and(|ids| ids.len() == 1), "{events:?}");
}

#[test]
fn prompts_are_texts_tokens_both_or_several() {
    let ask = |prompt: Value| json!({ "prompt": prompt, "n_predict": 6, "temperature": 0 });
    let text = completion(&ask(json!("The little dog")))["content"].clone();
    let special = json!({ "content": "The little dog", "add_special": true });
    let tokens = post(shared(), "/tokenize", &special).json()["tokens"].clone();
    assert_eq!(completion(&ask(tokens.clone()))["content"], text);
    let mut mixed = tokens.as_array().unwrap().clone();
    let last = mixed.pop().unwrap();
    let piece = post(shared(), "/detokenize", &json!({ "tokens": [last] })).json();
    mixed.push(piece["content"].clone());
    assert_eq!(completion(&ask(mixed.into()))["content"], text);
    assert_eq!(completion(&ask(json!({ "prompt_string": "The little dog" })))["content"], text);
    let several = completion(&ask(json!(["The little dog", tokens])));
    let texts = [
        (&several[0]["index"], &several[0]["content"]),
        (&several[1]["index"], &several[1]["content"]),
    ];
    assert_eq!(texts, [(&json!(0), &text), (&json!(1), &text)]);
    let mut body = ask(json!(["The little dog", "A cat"]));
    body["stream"] = true.into();
    let events = post(shared(), "/completion", &body).events();
    let of = |index: u64| -> String {
        let own = events.iter().filter(|event| event["index"] == index);
        own.map(|event| event["content"].as_str().unwrap()).collect()
    };
    assert_eq!(json!(of(0)), text);
    assert_eq!(events.iter().filter(|event| event["stop"] == true).count(), 2);
    for (prompt, expected) in [(json!([]), "expected 1 to 128 prompts"), (json!(5), "a string")] {
        let response = post(shared(), "/completion", &ask(prompt));
        let message = response.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(response.status == 400 && message.contains(expected), "{message}");
    }
}

#[test]
fn settings_are_used_or_refused_by_name() {
    let ask = |more: Value| {
        let mut body = json!({ "prompt": "Once", "n_predict": 5, "temperature": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(shared(), "/completion", &body)
    };
    let first = ask(json!({ "n_probs": 3, "return_tokens": true })).json();
    let told = first["completion_probabilities"].as_array().unwrap();
    assert_eq!((told.len(), told[0]["top_logprobs"].as_array().unwrap().len()), (5, 3));
    assert_eq!(told[0]["id"], first["tokens"][0]);
    let id = told[0]["id"].clone();
    // A ban, by the id, as a list and as an object.
    for bias in [json!([[id, false]]), json!({ (id.to_string()): -100 })] {
        let other = ask(json!({ "logit_bias": bias, "return_tokens": true })).json();
        assert_ne!(other["tokens"][0], id);
    }
    let cut = ask(json!({ "response_fields": ["content", "timings/predicted_n"] })).json();
    assert_eq!(cut.as_object().unwrap().len(), 2);
    let schema = json!({ "type": "object", "properties": { "a": { "enum": [1] } },
        "required": ["a"], "additionalProperties": false });
    let text = ask(json!({ "json_schema": schema, "n_predict": 40 })).json();
    let object: Value = serde_json::from_str(text["content"].as_str().unwrap()).unwrap();
    assert_eq!(object, json!({ "a": 1 }));
    // What clients send without wanting anything of it.
    let quiet = ask(json!({ "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "tfs_z": 1,
        "dynatemp_range": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "n_keep": 0,
        "cache_prompt": true, "id_slot": -1, "top_n_sigma": -1.0, "grammar": "", "t_mystery": 1 }));
    assert_eq!(quiet.status, 200, "{quiet:?}");
    assert!(quiet.header("x-delft-no-effect").unwrap().contains("t_mystery"));
    for more in [json!({ "mirostat": 2 }), json!({ "logit_bias": "x" }), json!({ "n_probs": -1 })] {
        let response = ask(more.clone());
        let name = more.as_object().unwrap().keys().next().unwrap().clone();
        let found = response.json()["error"]["param"].clone();
        assert_eq!((response.status, found), (400, json!(name)));
    }
}

#[test]
fn other_paths_are_there_or_refused_by_name() {
    let body = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 3 });
    for path in ["/chat/completions", "/v1/chat/completions"] {
        assert_eq!(post(shared(), path, &body).json()["object"], "chat.completion");
    }
    let answer = post(shared(), "/responses", &json!({ "input": "a", "max_output_tokens": 3 }));
    assert_eq!(answer.json()["object"], "response");
    assert_eq!(get(shared(), "/models").json(), get(shared(), "/v1/models").json());
    assert_eq!(get(shared(), "/v1/health").json()["status"], "ok");
    let slots = get(shared(), "/slots").json();
    assert!(slots[0]["n_ctx"].is_number() && slots[0]["is_processing"].is_boolean(), "{slots}");
    let props = get(shared(), "/props").json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], slots[0]["n_ctx"]);
    assert_eq!(props["total_slots"], slots.as_array().unwrap().len());
    for path in ["/rerank", "/v1/rerank", "/slots/0"] {
        let response = post(shared(), path, &json!({ "query": "a", "documents": ["b"] }));
        assert_eq!(
            (response.status, &response.json()["error"]["code"]),
            (501, &json!("not_supported"))
        );
    }
}
