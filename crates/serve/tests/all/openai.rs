//! OpenAI's interface on the wire, with the bundled model.

use crate::common::{bundled, engine, get, limits, post, receive, send, serve, serve_all, shared};
use delft::{Engine, GenerateOptions, LoadOptions, Prompt};
use delft_serve::{AccessRules, Served};
use serde_json::{Value, json};

const QUESTION: &str = "Tell me a story about a lamp that cannot sleep";

fn chat(extra: Value) -> Value {
    let mut body = json!({
        "model": "stories",
        "messages": [{ "role": "user", "content": QUESTION }],
        "max_tokens": 24,
        "temperature": 0,
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The text that the engine itself writes, its first token, and the number of tokens of the prompt.
fn expected(max_tokens: usize) -> (String, u32, usize) {
    let engine = engine();
    let messages = vec![json!({ "role": "user", "content": QUESTION })];
    let prompt = Prompt::Chat { messages, extra: serde_json::Map::new() };
    let tokens = engine.encode(&prompt).unwrap();
    let mut sampling = engine.sampling_defaults().clone();
    sampling.temperature = 0.0;
    let options =
        GenerateOptions { sampling, max_tokens: Some(max_tokens), ..GenerateOptions::default() };
    let mut session = engine.session();
    let written = session.generate(tokens.clone(), &options).unwrap().map(Result::unwrap);
    let written: Vec<_> = written.collect();
    let text = written.iter().map(|token| token.text.as_str()).collect();
    (text, written[0].id, tokens.len())
}

#[test]
fn a_chat_is_what_the_engine_writes() {
    let (text, _, prompt_tokens) = expected(24);
    let response = post(shared(), "/v1/chat/completions", &chat(json!({})));
    assert_eq!(response.status, 200, "{response:?}");
    assert!(response.header("x-request-id").is_some());
    let object = response.json();
    assert_eq!(object["object"], "chat.completion");
    assert_eq!(object["model"], "stories");
    assert_eq!(object["choices"][0]["message"]["content"], text);
    assert_eq!(object["choices"][0]["message"]["role"], "assistant");
    assert_eq!(object["choices"][0]["finish_reason"], "length");
    assert_eq!(object["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(object["usage"]["completion_tokens"], 24);
    assert_eq!(object["usage"]["total_tokens"], prompt_tokens + 24);

    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let response = post(shared(), "/v1/chat/completions", &chat(options));
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(response.body.ends_with("data: [DONE]\n\n"));
    let events = response.events();
    let content =
        |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_string);
    assert_eq!(events.iter().filter_map(content).collect::<String>(), text);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let [others @ .., last, usage] = &events[..] else { panic!("{events:?}") };
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    // Chunks before the last say that they have no usage.
    for chunk in others.iter().chain([last]) {
        assert_eq!(chunk.get("usage"), Some(&Value::Null), "{chunk}");
    }
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 24);
    assert!(events.iter().all(|event| event["id"] == events[0]["id"]));
}

#[test]
fn settings_change_the_answer() {
    let ask = |extra: Value| {
        let response = post(shared(), "/v1/chat/completions", &chat(extra));
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    };
    let content =
        |object: &Value| object["choices"][0]["message"]["content"].as_str().unwrap().to_string();
    let plain = content(&ask(json!({})));

    // A stop string ends the text in front of it.
    let word = plain.split(' ').nth(4).unwrap();
    let stopped = ask(json!({ "stop": [word] }));
    assert_eq!(content(&stopped), plain[..plain.find(word).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    // The same seed gives the same text, and several answers differ.
    let warm = |seed: u64| content(&ask(json!({ "temperature": 1.5, "seed": seed })));
    assert_eq!(warm(7), warm(7));
    assert_ne!(warm(7), warm(8));
    let several = ask(json!({ "temperature": 1.5, "seed": 7, "n": 3 }));
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert_eq!(choices[0]["message"]["content"], warm(7).as_str());
    assert_eq!(choices[1]["message"]["content"], warm(8).as_str());
    assert_eq!(several["usage"]["completion_tokens"], 72);

    // Each token's log-probabilities: it is the likeliest at temperature 0, and its log-probability
    // is the first of the list.
    let told = ask(json!({ "logprobs": true, "top_logprobs": 3 }));
    let tokens = told["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 24);
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text.trim_start(), plain.trim_start());
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        assert!(top[0]["logprob"].as_f64().unwrap() >= token["logprob"].as_f64().unwrap());
        assert!(top.is_sorted_by(|a, b| a["logprob"].as_f64() >= b["logprob"].as_f64()));
    }

    // A token that is ruled out is not chosen.
    let (_, first, _) = expected(1);
    let other = content(&ask(json!({ "logit_bias": { first.to_string(): -100 } })));
    assert_ne!(other, plain);
}

#[test]
fn the_next_turn_finds_the_earlier_ones_computed() {
    let own = serve(limits(), AccessRules::default());
    let first =
        post(own.address(), "/v1/chat/completions", &chat(json!({ "max_tokens": 12 }))).json();
    let messages = json!([
        { "role": "user", "content": QUESTION },
        first["choices"][0]["message"],
        { "role": "user", "content": "another one" },
    ]);
    let next = post(own.address(), "/v1/chat/completions", &chat(json!({ "messages": messages })));
    let usage = &next.json()["usage"];
    let before = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= before, "{usage}");
    own.stop().unwrap();
}

#[test]
fn every_answer_tells_why_no_more_of_its_prompt_was_cached() {
    let own = serve(limits(), AccessRules::default());
    let message = |text: &str| json!([{ "role": "user", "content": text }]);
    let asked = [
        ("/v1/chat/completions", "messages", json!({ "max_tokens": 2 })),
        ("/v1/completions", "prompt", json!({ "max_tokens": 2 })),
        ("/v1/responses", "input", json!({ "max_output_tokens": 2 })),
        ("/v1/messages", "messages", json!({ "max_tokens": 2 })),
        ("/api/chat", "messages", json!({ "options": { "num_predict": 2 } })),
        ("/api/generate", "prompt", json!({ "options": { "num_predict": 2 } })),
    ];
    // The object of the last piece that has one, or of the whole answer.
    let told = |path: &str, field: &str, extra: &Value, stream: bool, text: &str| -> Value {
        let mut body = extra.clone();
        body["stream"] = stream.into();
        body[field] = if field == "messages" { message(text) } else { text.into() };
        let response = post(own.address(), path, &body);
        assert_eq!(response.status, 200, "{path}: {response:?}");
        let pieces = match (stream, path.starts_with("/api/")) {
            (false, _) => vec![response.json()],
            (true, false) => response.events(),
            (true, true) => {
                let line = |line| serde_json::from_str::<Value>(line).unwrap();
                response.body.lines().map(line).collect()
            }
        };
        let of = |piece: &Value| {
            let inner = &piece["response"]["delft"];
            let told = if inner.is_null() { &piece["delft"] } else { inner };
            (!told.is_null()).then(|| told.clone())
        };
        pieces.iter().rev().find_map(of).unwrap_or_else(|| panic!("{path}: {pieces:?}"))
    };
    for (path, field, extra) in &asked {
        for stream in [false, true] {
            let text = format!("A lamp of {path} {stream} told a story about the sea");
            told(path, field, extra, stream, &text);
            // The same again: all but the last token, which is computed in any case.
            let again = told(path, field, extra, stream, &text);
            assert!(again["cached_tokens"].as_u64().unwrap() > 8, "{path}: {again}");
            assert_eq!(again["cache"], Value::Null, "{path}: {again}");
            let other = told(path, field, extra, stream, &text.replace("story", "moon"));
            let why = other["cache"].as_str().unwrap();
            assert!(why.starts_with("token "), "{path}: {why}");
        }
    }
    // Of several texts each tells its own; a stream tells it with each text's end, and once more
    // beside the usage.
    let body = json!({ "prompt": ["A cat", "Two dogs"], "max_tokens": 2 });
    let whole = post(own.address(), "/v1/completions", &body).json();
    assert_eq!(whole["delft"], whole["choices"][0]["delft"]);
    assert!(whole["choices"][1]["delft"]["cached_tokens"].is_u64(), "{whole}");
    let body = json!({ "messages": message("A cat"), "max_tokens": 2, "stream": true,
        "stream_options": { "include_usage": true } });
    let events = post(own.address(), "/v1/chat/completions", &body).events();
    let [.., end, usage] = &events[..] else { panic!("{events:?}") };
    assert_eq!(usage["choices"], json!([]));
    assert!(usage["delft"].is_object() && usage["delft"] == end["delft"], "{end} {usage}");
    own.stop().unwrap();
}

/// Names that Mistral's clients have for what OpenAI's have, too.
#[test]
fn mistrals_names_are_read() {
    let ask = |extra: Value| {
        let answer = post(shared(), "/v1/chat/completions", &chat(extra));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["choices"][0].clone()
    };
    let seeded = ask(json!({ "temperature": 1, "seed": 7 }));
    let named = ask(json!({ "temperature": 1, "random_seed": 7, "safe_prompt": false }));
    assert_eq!(named["message"]["content"], seeded["message"]["content"]);
    let parameters = json!({ "type": "object", "properties": { "a": { "type": "boolean" } },
        "required": ["a"], "additionalProperties": false });
    let tool = json!({ "type": "function",
        "function": { "name": "light", "parameters": parameters } });
    let called = ask(json!({ "tools": [tool], "tool_choice": "any", "max_tokens": 60,
        "parallel_tool_calls": false }));
    assert_eq!(called["finish_reason"], "tool_calls", "{called}");
    let safe = post(shared(), "/v1/chat/completions", &chat(json!({ "safe_prompt": true })));
    assert_eq!(safe.status, 400, "{safe:?}");
}

#[test]
fn completions_continue_texts_as_they_stand() {
    let ask = |extra: Value| {
        let mut body =
            json!({ "model": "stories", "prompt": "Once upon a time", "temperature": 0 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let response = post(shared(), "/v1/completions", &body);
        assert_eq!(response.status, 200, "{response:?}");
        response
    };
    let text =
        |object: &Value, i: usize| object["choices"][i]["text"].as_str().unwrap().to_string();
    let plain = ask(json!({})).json();
    assert_eq!(plain["object"], "text_completion");
    assert_eq!(plain["usage"]["completion_tokens"], 16, "the documented default");
    let story = text(&plain, 0);
    let echoed = ask(json!({ "echo": true })).json();
    assert_eq!(text(&echoed, 0), format!("Once upon a time{story}"));

    let ids = engine().encode(&"Once upon a time".into()).unwrap();
    let several = ask(json!({ "prompt": [ids, ids], "n": 2 })).json();
    assert_eq!(several["choices"].as_array().unwrap().len(), 4);
    assert!((0..4).all(|i| text(&several, i) == story), "{several}");
    assert_eq!(several["usage"]["prompt_tokens"], 2 * ids.len());

    let told = ask(json!({ "logprobs": 2 })).json();
    let logprobs = &told["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[list].as_array().unwrap().len(), 16, "{list}");
    }
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);

    let streamed = ask(json!({ "stream": true }));
    assert!(streamed.body.ends_with("data: [DONE]\n\n"));
    let piece = |event: &Value| event["choices"][0]["text"].as_str().map(str::to_string);
    assert_eq!(streamed.events().iter().filter_map(piece).collect::<String>(), story);
}

/// What programs that evaluate models ask for: the prompt's own log-probabilities, and none or one
/// token behind it.
#[test]
fn a_prompt_that_is_repeated_has_log_probabilities() {
    let ask = |extra: Value| {
        let mut body = json!({ "model": "stories", "temperature": 0, "echo": true, "logprobs": 2 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        post(shared(), "/v1/completions", &body)
    };
    let text = |object: &Value| object["choices"][0]["text"].as_str().unwrap().to_string();
    let ids = engine().encode(&"Once upon a time".into()).unwrap();
    let rows = engine().session().logits(&ids, delft::LogitRows::All).unwrap();
    let told = ask(json!({ "prompt": [ids, ids[..1]], "max_tokens": 1 })).json();
    let lists = &told["choices"][0]["logprobs"];
    assert_eq!(lists["tokens"].as_array().unwrap().len(), ids.len() + 1);
    assert!(lists["token_logprobs"][0].is_null() && lists["top_logprobs"][0].is_null(), "{lists}");
    for (i, (row, &id)) in rows.rows().zip(&ids[1..]).enumerate() {
        let expected = f64::from(row[id as usize]) - delft::log_sum_exp(row);
        let found = lists["token_logprobs"][i + 1].as_f64().unwrap();
        assert!((found - expected).abs() < 1e-3, "{i}: {found} {expected}");
        let top = lists["top_logprobs"][i + 1].as_object().unwrap();
        let best = top.values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
        assert!(!top.is_empty() && best >= found, "{i}: {top:?}");
    }
    let offsets = lists["text_offset"].as_array().unwrap();
    let (whole, last) = (text(&told), lists["tokens"][ids.len()].as_str().unwrap());
    assert_eq!(offsets.last().unwrap(), whole.len() - last.len(), "{whole} {lists}");
    assert_eq!(told["choices"][1]["logprobs"]["tokens"].as_array().unwrap().len(), 2);

    let prompt = json!({ "prompt": "Once upon a time", "max_tokens": 0 });
    let alone = ask(prompt).json();
    assert_eq!(text(&alone), "Once upon a time");
    // The token that begins every text is no part of it.
    assert_eq!(alone["choices"][0]["logprobs"]["text_offset"][1], 0);
    let own = &alone["choices"][0]["logprobs"]["token_logprobs"];
    assert_eq!(
        own.as_array().unwrap()[..],
        lists["token_logprobs"].as_array().unwrap()[..ids.len()]
    );

    let streamed = ask(json!({ "prompt": "Once upon a time", "max_tokens": 2, "stream": true }));
    let first = &streamed.events()[0]["choices"][0];
    assert_eq!(first["text"], "Once upon a time");
    assert_eq!(first["logprobs"]["token_logprobs"], *own);

    let refused = ask(json!({ "prompt": [[]], "max_tokens": 1 }));
    assert_eq!(refused.status, 400, "{refused:?}");
}

#[test]
fn models_are_listed() {
    let list = get(shared(), "/v1/models").json();
    assert_eq!(list["data"][0]["id"], "stories");
    assert_eq!(get(shared(), "/v1/models/stories").json()["id"], "stories");
    let versioned = |path: &str| {
        receive(send(shared(), "GET", path, &[("anthropic-version", "2023-06-01")], "")).json()
    };
    let list = versioned("/v1/models");
    assert_eq!((&list["data"][0]["type"], &list["has_more"]), (&json!("model"), &json!(false)));
    assert_eq!((&list["first_id"], &list["data"][0]["id"]), (&json!("stories"), &json!("stories")));
    assert_eq!(versioned("/v1/models/stories")["display_name"], "stories");
    assert_eq!(versioned("/v1/models/other")["error"]["type"], "not_found_error");
    let absent = get(shared(), "/v1/models/other");
    assert_eq!(absent.status, 404);
    assert_eq!(absent.json()["error"]["message"], "model: expected stories, found \"other\"");
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    struct Case {
        extra: Value,
        status: u16,
        code: &'static str,
        message: &'static str,
    }
    let long = "word ".repeat(3000);
    let image = json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }]);
    let cases = [
        Case {
            extra: json!({ "model": "x" }),
            status: 404,
            code: "model_not_found",
            message: "model: expected stories",
        },
        Case {
            extra: json!({ "messages": long }),
            status: 400,
            code: "invalid_request",
            message: "messages: expected a list",
        },
        Case {
            extra: json!({ "messages": [{ "role": "user", "content": long }] }),
            status: 400,
            code: "context_length_exceeded",
            message: "prompt is too long: ",
        },
        Case {
            extra: json!({ "messages": image }),
            status: 400,
            code: "unsupported_content",
            message: "messages[0].content[0]: ",
        },
        Case {
            extra: json!({ "temperature": -1 }),
            status: 400,
            code: "invalid_request",
            message: "temperature: expected",
        },
        Case {
            extra: json!({ "chat_template_kwargs": { "messages": [] } }),
            status: 400,
            code: "invalid_request",
            message: "chat_template_kwargs.messages: a field",
        },
        Case {
            extra: json!({ "n": 1000 }),
            status: 400,
            code: "invalid_request",
            message: "n: expected",
        },
        Case {
            extra: json!({ "temprature": 1 }),
            status: 400,
            code: "unknown_field",
            message: "temprature: there",
        },
        Case {
            extra: json!({ "functions": [{ "name": "f" }] }),
            status: 400,
            code: "unsupported_field",
            message: "functions: not",
        },
        Case {
            extra: json!({ "min_tokens": 3 }),
            status: 400,
            code: "unsupported_field",
            message: "min_tokens: not",
        },
        Case {
            extra: json!({ "stop_token_ids": [999999] }),
            status: 400,
            code: "invalid_request",
            message: "stop_token_ids: expected tokens that end",
        },
        Case {
            extra: json!({ "thinking": { "type": "x" } }),
            status: 400,
            code: "invalid_request",
            message: "thinking.type: expected",
        },
        Case {
            extra: json!({ "add_generation_prompt": false }),
            status: 400,
            code: "invalid_request",
            message: "add_generation_prompt: expected",
        },
        Case {
            extra: json!({ "continue_final_message": true, "add_generation_prompt": false }),
            status: 400,
            code: "invalid_request",
            message: "continue_final_message: expected a last",
        },
        Case {
            extra: json!({ "top_logprobs": 2 }),
            status: 400,
            code: "invalid_request",
            message: "top_logprobs: expected",
        },
        Case {
            extra: json!({ "stop": "" }),
            status: 400,
            code: "invalid_request",
            message: "stop: expected",
        },
        Case {
            extra: json!({ "logit_bias": { "999999": 1 } }),
            status: 400,
            code: "invalid_request",
            message: "logit_bias: expected token ids below",
        },
    ];
    for Case { extra, status, code, message } in cases {
        let shown = extra.to_string().chars().take(80).collect::<String>();
        let response = post(shared(), "/v1/chat/completions", &chat(extra));
        let error = &response.json()["error"];
        assert_eq!(response.status, status, "{shown}");
        assert_eq!(error["code"], code, "{shown}");
        assert!(error["message"].as_str().unwrap().starts_with(message), "{shown}: {error}");
    }
    let noted =
        post(shared(), "/v1/chat/completions", &chat(json!({ "user": "u", "max_tokens": 1 })));
    assert_eq!(noted.header("x-delft-no-effect"), Some("user"));
}

/// What clients of vLLM, SGLang and llama-server send beside OpenAI's fields.
#[test]
fn chats_take_what_other_servers_of_open_models_document() {
    let ask = |extra: Value| {
        let response = post(shared(), "/v1/chat/completions", &chat(extra));
        assert_eq!(response.status, 200, "{response:?}");
        response
    };
    let text = |extra: Value| {
        ask(extra).json()["choices"][0]["message"]["content"].as_str().unwrap().to_string()
    };
    let schema = json!({ "type": "object", "properties": { "n": { "enum": [7] } },
        "required": ["n"], "additionalProperties": false });
    for (extra, expected) in [
        (json!({ "guided_choice": ["yes"] }), "yes"),
        (json!({ "guided_regex": "x{3}", "guided_decoding_backend": "auto" }), "xxx"),
        (json!({ "guided_json": schema }), "{\"n\": 7}"),
        (json!({ "guided_json": schema.to_string() }), "{\"n\": 7}"),
        (json!({ "guided_grammar": "root ::= \"a\" \"b\"" }), "ab"),
        (json!({ "response_format": { "type": "json_object", "schema": schema } }), "{\"n\": 7}"),
        (json!({ "response_format": { "type": "json_schema", "schema": schema } }), "{\"n\": 7}"),
    ] {
        assert_eq!(text(extra.clone()), expected, "{extra}");
    }
    let extra = json!({ "guided_choice": ["a"], "structured_outputs": { "choice": ["b"] } });
    assert_eq!(post(shared(), "/v1/chat/completions", &chat(extra)).status, 400);

    let plain = json!({ "skip_special_tokens": true, "min_tokens": 0, "store": true, "ttl": 60,
        "cache_prompt": true, "enable_thinking": false, "thinking": { "type": "disabled" },
        "max_tokens": 1 });
    let noted = ask(plain).header("x-delft-no-effect").unwrap().to_string();
    for name in ["store", "ttl", "cache_prompt", "enable_thinking", "thinking"] {
        assert!(noted.split(", ").any(|one| one == name), "{name}: {noted}");
    }

    // A message of the assistant that is gone on with is no turn of its own.
    let begun = "Once upon a time there was a fox";
    let messages = json!([{ "role": "user", "content": "Tell me a story" },
        { "role": "assistant", "content": begun }]);
    let asked = json!({ "messages": messages, "max_tokens": 8, "temperature": 0 });
    let mut continues = asked.clone();
    continues["continue_final_message"] = true.into();
    continues["add_generation_prompt"] = false.into();
    let count = |extra: Value| ask(extra).json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(count(continues) < count(asked));
}

/// lm-evaluation-harness asks vLLM's paths for tokens.
#[test]
fn tokens_are_told_as_vllm_tells_them() {
    let info = get(shared(), "/tokenizer_info").json();
    let end = info["eos_token"].as_str().unwrap();
    let ask = |body: Value| post(shared(), "/tokenize", &body).json();
    let special = ask(json!({ "prompt": end, "add_special_tokens": false }));
    assert_eq!((&special["count"], special["tokens"].as_array().unwrap().len()), (&json!(1), 1));
    let text = "Once upon a time";
    let told =
        ask(json!({ "prompt": text, "add_special_tokens": false, "return_token_strs": true }));
    assert_eq!(told["tokens"], ask(json!({ "content": text }))["tokens"]);
    assert_eq!(told["token_strs"].as_array().unwrap().len() as u64, told["count"]);
    let back = post(shared(), "/detokenize", &json!({ "tokens": told["tokens"] })).json();
    assert_eq!((&back["prompt"], &back["content"]), (&json!(text), &json!(text)));
    let chat = ask(json!({ "messages": [{ "role": "user", "content": text }] }));
    assert!(chat["count"].as_u64() > told["count"].as_u64());
}

#[test]
fn paths_of_what_is_not_done_say_so() {
    for (path, why) in [
        ("/v1/audio/speech", "/v1/audio is not supported: models here read and write text"),
        ("/v1/responses/compact", "/v1/responses/compact is not supported: send what"),
        ("/api/create", "/api/create is not supported: models are not made here"),
        ("/v1/messages/batches", "/v1/messages/batches is not supported: `delft batch`"),
        ("/v1/nothing", "there is no such path"),
    ] {
        let response = post(shared(), path, &json!({}));
        let error = response.json()["error"].clone();
        let message = error["message"].as_str().or(error.as_str()).unwrap().to_string();
        let status = if path == "/v1/nothing" { 404 } else { 501 };
        assert!(response.status == status && message.starts_with(why), "{path}: {message}");
    }
}

/// Responses have the settings of chats, and tell log-probabilities as chats do.
#[test]
fn responses_take_the_settings_of_chats_and_tell_log_probabilities() {
    let settings = json!({ "temperature": 1.2, "seed": 5, "top_k": 30, "min_p": 0.02,
        "repetition_penalty": 1.1, "chat_template_kwargs": { "x": 1 } });
    let mut asked = chat(settings.clone());
    asked["logprobs"] = true.into();
    asked["top_logprobs"] = 2.into();
    let choice = &post(shared(), "/v1/chat/completions", &asked).json()["choices"][0];
    let mut asked = settings;
    asked["input"] = QUESTION.into();
    asked["max_output_tokens"] = 24.into();
    asked["include"] = json!(["message.output_text.logprobs"]);
    asked["top_logprobs"] = 2.into();
    let whole = post(shared(), "/v1/responses", &asked).json();
    let part = &whole["output"][0]["content"][0];
    assert_eq!(part["text"], choice["message"]["content"], "{whole}");
    let told = part["logprobs"].as_array().unwrap();
    assert_eq!(part["logprobs"], choice["logprobs"]["content"]);
    assert!(told.len() == 24 && told.iter().all(|one| one["top_logprobs"][1].is_object()));

    asked["stream"] = true.into();
    let events = post(shared(), "/v1/responses", &asked).events();
    let of = |kind: &str| {
        let of = events.iter().filter(|event| event["type"] == kind);
        of.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect::<Vec<_>>()
    };
    assert_eq!(&of("response.output_text.delta"), told);
    assert_eq!(&of("response.output_text.done"), told);
    let last = &events.last().unwrap()["response"];
    assert_eq!(&last["output"][0]["content"][0]["logprobs"], &part["logprobs"]);

    let regex = json!({ "input": "x", "structured_outputs": { "regex": "[0-9]{3}" } });
    let text = &post(shared(), "/v1/responses", &regex).json()["output"][0]["content"][0]["text"];
    assert!(text.as_str().unwrap().parse::<u32>().is_ok(), "{text}");
    let alone = post(shared(), "/v1/responses", &json!({ "input": "x", "top_logprobs": 2 }));
    assert_eq!(alone.status, 400);
    let more = json!({ "input": "x", "max_output_tokens": 1,
        "include": ["reasoning.encrypted_content"] });
    let more = post(shared(), "/v1/responses", &more);
    assert_eq!(more.header("x-delft-no-effect"), Some("include: reasoning.encrypted_content"));
}

/// A template that opens the reasoning, in which a model stays that has not learned to.
#[test]
fn tokens_of_reasoning_are_told_as_such() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n";
    let templates = Some([("default".to_string(), template.to_string())].into());
    let (name, adapters) = ("thinks".to_string(), Vec::new());
    let served = Served { name, engines: vec![engine()], templates, adapters };
    let own = serve_all(limits(), AccessRules::default(), vec![served]);
    let messages = json!([{ "role": "user", "content": "Why?" }]);
    let ask = |path: &str, body: Value| post(own.address(), path, &body).json()["usage"].clone();
    let body = json!({ "messages": messages, "max_tokens": 5, "n": 2 });
    let usage = ask("/v1/chat/completions", body);
    assert_eq!(usage["completion_tokens"], 10, "{usage}");
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 10);
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());
    let usage = ask("/v1/responses", json!({ "input": "Why?", "max_output_tokens": 5 }));
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 5, "{usage}");
    let usage = ask("/v1/messages", json!({ "messages": messages, "max_tokens": 5 }));
    assert_eq!(usage["output_tokens_details"]["thinking_tokens"], 5, "{usage}");
    own.stop().unwrap();
    let usage = post(shared(), "/v1/chat/completions", &chat(json!({}))).json()["usage"].clone();
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 0);
}

/// The planner's promise beside what is held, wherever a model is told of.
#[test]
fn planned_memory_is_told_beside_what_is_held() {
    let options = LoadOptions { threads: Some(2), sessions: 4, ..LoadOptions::default() };
    let engine = Engine::load(bundled(), &options).unwrap();
    let (name, adapters) = ("stories".to_string(), Vec::new());
    let served = Served { name, engines: vec![engine.clone()], templates: None, adapters };
    let running = serve_all(limits(), AccessRules::default(), vec![served]);
    let address = running.address();
    // So that the cache holds something.
    assert_eq!(post(address, "/v1/chat/completions", &chat(json!({}))).status, 200);
    let plan = &engine.plan()[0];
    let model = &get(address, "/props").json()["models"][0];
    assert_eq!(model["planned_bytes"], plan.most());
    let planned = &model["memory"]["planned"];
    assert_eq!(
        (&planned["weights"], &planned["cache"]),
        (&plan.weights.into(), &(plan.cache + plan.pool).into())
    );
    let held = &model["memory"]["held"];
    let sum: u64 = held.as_object().unwrap().values().filter_map(Value::as_u64).sum();
    assert_eq!(model["held_bytes"], sum);
    assert_eq!(held["weights"], engine.memory().weights);
    assert!(held["cache"].as_u64().unwrap() > 0);
    assert!(model["running"].is_u64() && model["waiting"].is_u64());
    let resident = &get(address, "/api/ps").json()["models"][0];
    assert_eq!(resident["planned_bytes"], model["planned_bytes"]);
    assert!(resident["held_bytes"].as_u64().unwrap() >= engine.memory().weights as u64);
    let metrics = get(address, "/metrics").body;
    let line = format!(
        "delft_memory_planned_bytes{{model=\"stories\",part=\"weights\"}} {}\n",
        plan.weights
    );
    assert!(metrics.contains(&line), "{metrics}");
    assert!(metrics.contains("delft_memory_held_bytes{model=\"stories\",part=\"cache\"} "));
    running.stop().unwrap();
}

#[test]
fn text_and_tokens_go_there_and_back() {
    let text = "Once upon a time";
    let tokens = post(shared(), "/tokenize", &json!({ "content": text })).json();
    let back = post(shared(), "/detokenize", &json!({ "tokens": tokens["tokens"] })).json();
    assert_eq!(back["content"], text);
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let prompt = post(shared(), "/apply-template", &json!({ "messages": messages })).json();
    assert!(prompt["prompt"].as_str().unwrap().contains("<|user|>"), "{prompt}");
    let props = get(shared(), "/props").json();
    assert_eq!(props["models"][0]["context"], 1024);
    let metrics = get(shared(), "/metrics").body;
    for family in [
        "delft_generated_tokens_total counter",
        "delft_prompt_tokens_total counter",
        "delft_cached_prompt_tokens_total counter",
        "delft_preemptions_total counter",
        "delft_recomputed_tokens_total counter",
        "delft_request_finished_total counter",
        "delft_request_queue_seconds histogram",
        "delft_request_seconds histogram",
        "delft_request_prompt_tokens histogram",
        "delft_request_generated_tokens histogram",
        "delft_time_to_first_token_seconds histogram",
        "delft_model_load_seconds gauge",
        "delft_build_info gauge",
    ] {
        assert!(metrics.contains(&format!("# TYPE {family}\n")), "{family}: {metrics}");
    }
}

/// Of `best_of` texts the likeliest are told, with their own log-probabilities; all are paid for.
#[test]
fn the_best_of_several_texts_are_the_likeliest() {
    let ask = |extra: Value| {
        let mut body = json!({ "prompt": "Once", "max_tokens": 6, "temperature": 1.3, "seed": 11 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        post(shared(), "/v1/completions", &body)
    };
    let average = |choice: &Value| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        logprobs.iter().map(|one| one.as_f64().unwrap()).sum::<f64>() / logprobs.len() as f64
    };
    let all = ask(json!({ "n": 6, "logprobs": 0 })).json();
    let mut all: Vec<Value> = all["choices"].as_array().unwrap().clone();
    all.sort_by(|a, b| average(b).total_cmp(&average(a)));
    let best = ask(json!({ "n": 2, "best_of": 6 })).json();
    assert_eq!(best["usage"]["completion_tokens"], 36);
    let told = best["choices"].as_array().unwrap();
    assert_eq!(told.len(), 2);
    for (i, choice) in told.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["text"]), (&json!(i), &all[i]["text"]), "{best}");
        assert_eq!(choice["logprobs"], Value::Null);
    }
    for (extra, message) in [
        (json!({ "n": 3, "best_of": 2 }), "best_of: expected at least as many as n, 3, found 2"),
        (json!({ "best_of": 2, "stream": true }), "best_of: not supported beside"),
    ] {
        let refused = ask(extra).json();
        assert!(refused["error"]["message"].as_str().unwrap().starts_with(message), "{refused}");
    }
}

/// As llama.cpp and LM Studio write it, -1 tokens are as many as there is room for.
#[test]
fn minus_one_token_is_no_limit() {
    for (path, prompt) in [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")] {
        let mut body = chat(json!({ "max_tokens": -1, "stop": ["."] }));
        if prompt == "prompt" {
            body.as_object_mut().unwrap().remove("messages");
            body["prompt"] = "Once upon a time".into();
        }
        let answer = post(shared(), path, &body).json();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() > 3, "{answer}");
    }
}
