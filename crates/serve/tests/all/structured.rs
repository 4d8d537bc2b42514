//! Answers of a schema and calls of tools, in the shape of every interface.

use crate::common::{Response, post, shared};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// A schema whose answers are short whatever a model would write.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "colour": { "enum": ["red", "green"] },
            "count": { "type": "integer", "minimum": 1, "maximum": 9 },
            "tame": { "type": "boolean" },
        },
        "required": ["colour", "count"],
        "additionalProperties": false,
    })
}

/// Whether a text is JSON of that schema.
fn fits(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    let fields = value.as_object().unwrap();
    ["red", "green"].contains(&value["colour"].as_str().unwrap())
        && (1..=9).contains(&value["count"].as_u64().unwrap())
        && fields.get("tame").is_none_or(Value::is_boolean)
        && fields.keys().all(|key| ["colour", "count", "tame"].contains(&key.as_str()))
}

fn tool() -> Value {
    json!({ "type": "function", "function": {
        "name": "paint", "description": "Paints.", "parameters": schema(),
    } })
}

fn messages() -> Value {
    json!([{ "role": "user", "content": "Paint me a dragon" }])
}

/// A request with further fields.
fn ask(path: &str, extra: Value) -> Response {
    let mut body = json!({ "model": "stories", "messages": messages() });
    if path.starts_with("/v1") {
        body["max_tokens"] = 200.into();
    }
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    post(shared(), path, &body)
}

fn good(path: &str, extra: Value) -> Response {
    let response = ask(path, extra);
    assert_eq!(response.status, 200, "{response:?}");
    response
}

/// Agents ask for both: calls of their schemas, or an answer of its own.
#[test]
fn tools_and_a_schema_for_the_answer_go_together() {
    let answer = json!({
        "type": "object",
        "properties": { "done": { "type": "boolean" } },
        "required": ["done"],
        "additionalProperties": false,
    });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": answer } });
    let told = |text: &str| serde_json::from_str::<Value>(text).unwrap()["done"].is_boolean();
    for seed in 0..4 {
        let extra = json!({ "tools": [tool()], "response_format": format, "seed": seed });
        let choice = &good(CHAT, extra.clone()).json()["choices"][0];
        match choice["message"]["tool_calls"].as_array() {
            Some(calls) => {
                let arguments = calls[0]["function"]["arguments"].as_str().unwrap();
                assert!(fits(arguments), "{choice}");
            }
            None => assert!(told(choice["message"]["content"].as_str().unwrap()), "{choice}"),
        }
        let mut none = extra.clone();
        none["tool_choice"] = "none".into();
        let choice = &good(CHAT, none).json()["choices"][0];
        assert!(told(choice["message"]["content"].as_str().unwrap()), "{choice}");
        let mut required = extra;
        required["tool_choice"] = "required".into();
        let choice = &good(CHAT, required).json()["choices"][0];
        let call = &choice["message"]["tool_calls"][0]["function"];
        assert!(fits(call["arguments"].as_str().unwrap()), "{choice}");
    }
}

/// The text of a stream of chunks.
fn streamed(response: &Response) -> String {
    let delta = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(String::from);
    response.events().iter().filter_map(delta).collect()
}

#[test]
fn answers_follow_their_schema_in_every_interface() {
    for seed in 0..3 {
        for temperature in [0.0, 1.5] {
            let format = json!({ "type": "json_schema", "json_schema": {
                "name": "painting", "schema": schema(), "strict": true,
            } });
            let extra =
                json!({ "seed": seed, "temperature": temperature, "response_format": format });
            let whole = good(CHAT, extra.clone()).json();
            let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
            assert!(fits(text), "{text}");
            assert_eq!(whole["choices"][0]["finish_reason"], "stop");
            let mut again = extra;
            again["stream"] = true.into();
            assert_eq!(streamed(&good(CHAT, again)), text, "the same seed");
        }
        let output = json!({ "format": { "type": "json_schema", "schema": schema() } });
        let message = good("/v1/messages", json!({ "output_config": output })).json();
        assert!(fits(message["content"][0]["text"].as_str().unwrap()), "{message}");
        let options = json!({ "seed": seed });
        let extra = json!({ "format": schema(), "stream": false, "options": options });
        let answer = good("/api/chat", extra).json();
        assert!(fits(answer["message"]["content"].as_str().unwrap()), "{answer}");
    }
    // Texts that are continued, and the fields of vLLM and llama.cpp.
    let grammars = [
        json!({ "grammar": "root ::= \"[\" [0-9]{3} \"]\"" }),
        json!({ "structured_outputs": { "regex": "\\[[0-9]{3}\\]" } }),
    ];
    for grammar in grammars {
        let mut body = json!({ "prompt": "Once", "max_tokens": 30 });
        body.as_object_mut().unwrap().extend(grammar.as_object().unwrap().clone());
        let answer = post(shared(), "/v1/completions", &body).json();
        let text = answer["choices"][0]["text"].as_str().unwrap();
        assert!(text.len() == 5 && text[1..4].bytes().all(|c| c.is_ascii_digit()), "{text}");
    }
    let choice = json!({ "structured_outputs": { "choice": ["yes", "no \"way\""] } });
    let answer = good(CHAT, choice).json();
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(["yes", "no \"way\""].contains(&text), "{text}");
}

/// What has no room for all that a model would write is whole all the same, and says so; a call
/// that is cut does not pass for one. The greatest token each time: drawn ones may end in time by
/// chance.
#[test]
fn answers_are_brought_to_their_end_within_their_tokens() {
    let schema = json!({
        "type": "object",
        "properties": { "tale": { "type": "string" }, "words": { "type": "array", "items": schema() } },
        "required": ["tale", "words"],
        "additionalProperties": false,
    });
    let told = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
        value["tale"].is_string() && value["words"].is_array()
    };
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "tale", "schema": schema } });
    let extra = json!({ "max_tokens": 40, "temperature": 0, "response_format": format });
    let choice = &good(CHAT, extra.clone()).json()["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["closed_early"]), (&json!("stop"), &json!(true)));
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(told(text), "{text}");
    let mut again = extra;
    again["stream"] = true.into();
    let response = good(CHAT, again);
    assert_eq!(streamed(&response), text);
    let events = response.events();
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!((&last["finish_reason"], &last["closed_early"]), (&json!("stop"), &json!(true)));

    let text = json!({ "format": { "type": "json_schema", "name": "tale", "schema": schema } });
    let body = json!({
        "model": "stories", "input": "Hi", "text": text, "max_output_tokens": 40, "temperature": 0,
    });
    let whole = post(shared(), "/v1/responses", &body).json();
    assert_eq!((&whole["status"], &whole["closed_early"]), (&json!("completed"), &json!(true)));
    assert!(told(whole["output"][0]["content"][0]["text"].as_str().unwrap()), "{whole}");

    let output = json!({ "format": { "type": "json_schema", "schema": schema } });
    let extra = json!({ "max_tokens": 40, "temperature": 0, "output_config": output });
    let message = good("/v1/messages", extra.clone()).json();
    assert_eq!(
        (&message["stop_reason"], &message["closed_early"]),
        (&json!("end_turn"), &json!(true))
    );
    assert!(told(message["content"][0]["text"].as_str().unwrap()), "{message}");
    let mut again = extra;
    again["stream"] = true.into();
    let events = good("/v1/messages", again).events();
    let end = events.iter().find(|event| event["type"] == "message_delta").unwrap();
    assert_eq!(end["delta"]["closed_early"], true, "{end}");

    let options = json!({ "num_predict": 40, "temperature": 0 });
    let extra = json!({ "format": schema, "stream": false, "options": options });
    let answer = good("/api/chat", extra).json();
    assert_eq!((&answer["done_reason"], &answer["closed_early"]), (&json!("stop"), &json!(true)));
    assert!(told(answer["message"]["content"].as_str().unwrap()), "{answer}");

    // What ends by itself says nothing.
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": self::schema() } });
    let extra = json!({ "temperature": 0, "response_format": format });
    let choice = &good(CHAT, extra).json()["choices"][0];
    assert!(choice["finish_reason"] == "stop" && choice.get("closed_early").is_none(), "{choice}");

    let tool = json!({ "type": "function", "function": { "name": "tell", "parameters": schema } });
    let extra = json!({
        "tools": [tool], "tool_choice": "required", "max_tokens": 40, "temperature": 0,
    });
    let choice = &good(CHAT, extra).json()["choices"][0];
    assert!(
        choice["finish_reason"] == "length" && choice.get("closed_early").is_none(),
        "{choice}"
    );
    // It is told as far as it came, as in a stream.
    let call = &choice["message"]["tool_calls"][0]["function"];
    let is_cut = |arguments: &Value| {
        let text = arguments.as_str().unwrap();
        text.starts_with("{\"tale\"") && serde_json::from_str::<Value>(text).is_err()
    };
    assert!(call["name"] == "tell" && is_cut(&call["arguments"]), "{choice}");
    assert_eq!(choice["message"]["content"], Value::Null, "{choice}");
    let tool = json!({ "type": "function", "name": "tell", "parameters": schema });
    let body = json!({
        "input": "Hi", "tools": [tool], "tool_choice": "required", "max_output_tokens": 40,
        "temperature": 0,
    });
    let whole = post(shared(), "/v1/responses", &body).json();
    let item = &whole["output"][0];
    assert_eq!((&whole["status"], &item["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert!(item["name"] == "tell" && is_cut(&item["arguments"]), "{whole}");
    // It may be sent back as it is.
    let answer =
        json!({ "type": "function_call_output", "call_id": item["call_id"], "output": "" });
    let body = json!({ "input": [item, answer], "max_output_tokens": 2 });
    let after = post(shared(), "/v1/responses", &body);
    assert_eq!(after.status, 200, "{after:?}");

    // Where arguments are an object there are none, and no text stands in their place.
    let tool = json!({ "name": "tell", "input_schema": schema });
    let extra = json!({ "tools": [tool], "tool_choice": { "type": "any" }, "temperature": 0 });
    for (most, blocks) in [(40, 1), (6, 1)] {
        let mut extra = extra.clone();
        extra["max_tokens"] = most.into();
        let message = good("/v1/messages", extra).json();
        assert_eq!(message["stop_reason"], "max_tokens", "{message}");
        let content = message["content"].as_array().unwrap();
        assert_eq!(content.len(), blocks, "{message}");
        match content[0]["type"].as_str() {
            Some("tool_use") => assert_eq!((most, &content[0]["input"]), (40, &json!({}))),
            _ => assert_eq!((most, &content[0]["text"]), (6, &json!(""))),
        }
    }
}

/// A call that is cut before its arguments is told as text on no interface.
#[test]
fn the_beginning_of_a_call_is_no_text() {
    let tool =
        json!({ "type": "function", "function": { "name": "paint", "parameters": schema() } });
    let extra = json!({ "tools": [tool], "tool_choice": "required", "temperature": 0 });
    for most in 5..20 {
        let mut extra = extra.clone();
        extra["max_tokens"] = most.into();
        let choice = good(CHAT, extra.clone()).json()["choices"][0].clone();
        let text = choice["message"]["content"].as_str().unwrap_or_default();
        assert_eq!((text, &choice["finish_reason"]), ("", &json!("length")), "{most}");
        extra["stream"] = true.into();
        assert_eq!(streamed(&good(CHAT, extra)), "", "{most}");
    }
}

/// Of several tools only those may be called that the choice allows.
#[test]
fn allowed_tools_are_the_only_ones_that_are_called() {
    let other = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": schema() } });
    let tools = json!([other("erase"), tool(), other("tear")]);
    let allowed = |mode: &str, name: &str| {
        json!({ "type": "allowed_tools", "allowed_tools": { "mode": mode,
            "tools": [{ "type": "function", "function": { "name": name } }] } })
    };
    let extra = |choice: Value| json!({ "tools": tools, "tool_choice": choice, "parallel_tool_calls": false });
    for name in ["paint", "tear"] {
        let answer = good(CHAT, extra(allowed("required", name))).json();
        assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], name);
    }
    let answer = good(CHAT, extra(allowed("auto", "tear"))).json();
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array();
    assert!(calls.is_none_or(|calls| calls.iter().all(|call| call["function"]["name"] == "tear")));
    let flat = |name: &str| json!({ "type": "function", "name": name, "parameters": schema() });
    let responses = json!({ "input": "Paint", "max_output_tokens": 200,
        "tools": [flat("erase"), flat("tear")], "parallel_tool_calls": false,
        "tool_choice": { "type": "allowed_tools", "mode": "required",
            "tools": [{ "type": "function", "name": "tear" }] } });
    let answer = post(shared(), "/v1/responses", &responses).json();
    assert_eq!(answer["output"][0]["name"], "tear", "{answer}");
    let refused = [
        (allowed("required", "sing"), "tool_choice: expected a tool of this request, found sing"),
        (allowed("none", "tear"), "tool_choice.allowed_tools.mode: expected auto or required"),
        (
            json!({ "type": "custom", "custom": { "name": "x" } }),
            "tool_choice: expected a tool of this request, found x",
        ),
        (
            json!({ "type": "function", "function": { "name": "tear", "strict": true } }),
            "tool_choice.function.strict: there is no such field",
        ),
    ];
    for (choice, message) in refused {
        let response = ask(CHAT, extra(choice));
        let error = response.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(response.status == 400 && error.starts_with(message), "{error}");
    }
    let odd = json!([{ "type": "function", "function": { "name": "x", "colour": 1 } }]);
    let error = ask(CHAT, json!({ "tools": odd })).json()["error"]["message"].to_string();
    assert!(error.contains("tools[0].function.colour: there is no such field"), "{error}");
}

/// Anthropic's format by its name in beta versions.
#[test]
fn an_output_format_is_followed_by_its_older_name_too() {
    let format = json!({ "type": "json_schema", "schema": schema() });
    let answer = good("/v1/messages", json!({ "output_format": format })).json();
    assert!(fits(answer["content"][0]["text"].as_str().unwrap()), "{answer}");
    let both = json!({ "output_format": format, "output_config": { "format": format } });
    let error = ask("/v1/messages", both).json()["error"]["message"].to_string();
    assert!(error.contains("output_format: not supported beside"), "{error}");
}

#[test]
fn a_call_that_is_required_comes_in_every_interfaces_shape() {
    let named = json!({ "type": "function", "function": { "name": "paint" } });
    for choice in [json!("required"), named] {
        let extra =
            json!({ "tools": [tool()], "tool_choice": choice, "parallel_tool_calls": false });
        let whole = good(CHAT, extra.clone()).json();
        let first = &whole["choices"][0];
        assert_eq!(first["finish_reason"], "tool_calls", "{whole}");
        assert_eq!(first["message"]["content"], Value::Null);
        let [call] = &first["message"]["tool_calls"].as_array().unwrap()[..] else {
            panic!("{whole}");
        };
        assert_eq!(call["function"]["name"], "paint");
        assert!(fits(call["function"]["arguments"].as_str().unwrap()), "{call}");
        assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()));

        let mut again = extra;
        again["stream"] = true.into();
        let events = good(CHAT, again).events();
        let deltas: Vec<&Value> = events
            .iter()
            .map(|event| &event["choices"][0]["delta"]["tool_calls"][0])
            .filter(|call| !call.is_null())
            .collect();
        // The name comes first, and then the arguments as they are written.
        let [first, rest @ ..] = &deltas[..] else { panic!("{events:?}") };
        assert_eq!((&first["index"], &first["function"]["name"]), (&json!(0), &json!("paint")));
        assert!(rest.len() > 5 && rest.iter().all(|more| more["index"] == 0), "{events:?}");
        let arguments = deltas.iter().map(|more| more["function"]["arguments"].as_str().unwrap());
        assert!(fits(&arguments.collect::<String>()));
        let last = events.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    }

    let tool = json!({ "name": "paint", "input_schema": schema() });
    for choice in [
        json!({ "type": "any", "disable_parallel_tool_use": true }),
        json!({ "type": "tool", "name": "paint" }),
    ] {
        let extra = json!({ "tools": [tool], "tool_choice": choice });
        let whole = good("/v1/messages", extra.clone()).json();
        assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
        let block = &whole["content"][0];
        assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("paint")));
        assert!(fits(&block["input"].to_string()));
        let mut again = extra;
        again["stream"] = true.into();
        let events = good("/v1/messages", again).events();
        let start = events.iter().find(|event| event["type"] == "content_block_start").unwrap();
        assert_eq!(start["content_block"]["type"], "tool_use");
        assert_eq!(start["content_block"]["input"], json!({}));
        let deltas = events.iter().filter(|event| event["type"] == "content_block_delta");
        let pieces = deltas.map(|delta| delta["delta"]["partial_json"].as_str().unwrap());
        let pieces: Vec<&str> = pieces.collect();
        assert!(pieces.len() > 5 && fits(&pieces.concat()), "{pieces:?}");
        let end = events.iter().find(|event| event["type"] == "message_delta").unwrap();
        assert_eq!(end["delta"]["stop_reason"], "tool_use");
    }
}

#[test]
fn tools_that_may_be_called_leave_the_text_alone() {
    // The bundled model calls nothing of its own accord, and a strict tool constrains it to text or
    // a call.
    for strict in [false, true] {
        let mut tool = tool();
        tool["function"]["strict"] = strict.into();
        let answer = good(CHAT, json!({ "tools": [tool], "max_tokens": 20, "temperature": 0 }));
        let choice = &answer.json()["choices"][0];
        assert!(choice["message"]["content"].as_str().is_some_and(|text| text.len() > 5));
    }
    let answer = good(
        "/api/chat",
        json!({ "tools": [tool()], "stream": false, "options": { "num_predict": 9 } }),
    );
    assert!(answer.json()["message"]["content"].is_string());
    // A conversation with a call and its result is read by a model whose template knows neither.
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "paint", "arguments": "{}" } });
    let spoken = json!([
        { "role": "user", "content": "Paint" },
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c1", "content": "done" },
    ]);
    let extra = json!({ "messages": spoken, "tools": [tool()], "max_tokens": 4 });
    assert_eq!(good(CHAT, extra).json()["usage"]["completion_tokens"], 4);
}

#[test]
fn what_cannot_be_followed_is_refused_and_harms_no_other() {
    let schema_of = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } } });
    let doubling: serde_json::Map<String, Value> = (0..40)
        .map(|i| (format!("p{i}"), json!({ "pattern": "^(.*a.{30}){9}$", "type": "string" })))
        .collect();
    let place = "response_format.json_schema.schema";
    let wrong = json!({ "type": "function", "function": { "name": "tear", "parameters": {
        "type": "object", "properties": { "x": { "type": "nothing" } },
    } } });
    let cases = [
        (schema_of(json!({ "$ref": "http://example.com/x" })), place),
        (schema_of(json!({ "type": "nothing" })), place),
        (schema_of(json!({ "const": "x".repeat(1 << 20) })), place),
        (json!({ "response_format": { "type": "yaml" } }), "response_format.type"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
        (json!({ "grammar": "root ::= (" }), "grammar"),
        (json!({ "structured_outputs": { "regex": "(" } }), "structured_outputs"),
        (json!({ "guided_regex": "(" }), "guided_regex"),
        (json!({ "tools": [tool(), wrong], "tool_choice": "required" }), "tools[1]"),
        (json!({ "tools": [{ "type": "function" }] }), "tools[0].function"),
        (json!({ "tools": [tool(), tool()] }), "tools[1]"),
        (json!({ "tools": [tool()], "tool_choice": "paint" }), "tool_choice"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
    ];
    for (extra, place) in cases {
        let shown = extra.to_string().chars().take(90).collect::<String>();
        let response = ask(CHAT, extra);
        assert_eq!(response.status, 400, "{shown}: {response:?}");
        let message = response.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(message.starts_with(place) && message.len() < 600, "{shown}: {message}");
        let param = response.json()["error"]["param"].as_str().unwrap().to_string();
        assert!(param.starts_with(place), "{shown}: {param}");
    }
    for (path, extra, place) in [
        (
            "/v1/messages",
            json!({ "output_config": { "format": { "type": "json_schema", "schema": { "type": "nothing" } } } }),
            "output_config.format: ",
        ),
        (
            "/v1/responses",
            json!({ "input": "Hi", "text": { "format": { "type": "json_schema", "name": "x", "schema": { "type": "nothing" } } } }),
            "text.format.schema: ",
        ),
        ("/api/chat", json!({ "format": { "type": "nothing" } }), "format: "),
    ] {
        let mut body =
            json!({ "max_tokens": 8, "messages": [{ "role": "user", "content": "Hi" }] });
        if path == "/v1/responses" {
            body = json!({});
        }
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let response = post(shared(), path, &body);
        let error = &response.json()["error"];
        let message = error["message"].as_str().or(error.as_str()).unwrap_or_default();
        assert!(response.status == 400 && message.starts_with(place), "{response:?}");
    }
    // What turns out later is the request's own as well.
    let all: Vec<String> = (0..20_000).map(|i| format!("\"a{i:x}\"")).collect();
    let none: serde_json::Map<String, Value> =
        (0..6144).map(|id| (id.to_string(), json!(-100))).collect();
    for extra in [
        json!({ "grammar": format!("start: \"x\" ({})", all.join("|")) }),
        json!({ "logit_bias": none }),
    ] {
        let response = ask(CHAT, extra);
        let error = response.json()["error"].clone();
        assert_eq!((response.status, &error["type"]), (400, &json!("invalid_request_error")));
        assert!(error["message"].as_str().unwrap().contains("expected"), "{error}");
    }
    // One that costs much is refused or answered; either way others go on.
    let costly = ask(CHAT, schema_of(json!({ "type": "object", "properties": doubling })));
    assert!([200, 400, 500].contains(&costly.status), "{costly:?}");
    let after = good(CHAT, json!({ "max_tokens": 3 })).json();
    assert_eq!(after["usage"]["completion_tokens"], 3);
}

#[test]
fn responses_are_lists_of_items() {
    let path = "/v1/responses";
    let ask = |extra: Value| {
        let mut body =
            json!({ "input": "Tell me a story", "max_output_tokens": 12, "temperature": 0 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        post(shared(), path, &body)
    };
    let whole = ask(json!({ "instructions": "Be kind." })).json();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("incomplete")));
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    assert_eq!(whole["usage"]["output_tokens"], 12);

    let events = ask(json!({ "instructions": "Be kind.", "stream": true })).events();
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let streamed: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(streamed, text);
    let numbers: Vec<u64> =
        events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], text);

    let format = json!({ "format": { "type": "json_schema", "name": "x", "schema": schema() } });
    let answer = ask(json!({ "text": format, "max_output_tokens": 200 })).json();
    assert_eq!(answer["status"], "completed");
    assert!(fits(answer["output"][0]["content"][0]["text"].as_str().unwrap()), "{answer}");

    let tool = json!({ "type": "function", "name": "paint", "parameters": schema() });
    let extra = json!({ "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false,
        "max_output_tokens": 200 });
    let called = ask(extra).json();
    let call = &called["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("paint")));
    assert!(fits(call["arguments"].as_str().unwrap()), "{call}");
    let turn = json!([
        { "role": "user", "content": "Paint" },
        call,
        { "type": "function_call_output", "call_id": call["call_id"], "output": "done" },
    ]);
    assert_eq!(ask(json!({ "input": turn })).json()["usage"]["output_tokens"], 12);

    // A namespace of functions, beside a hosted tool: agents send both.
    let space =
        json!({ "type": "namespace", "name": "art", "description": "Art", "tools": [tool] });
    let spaced = |stream: bool| {
        ask(json!({ "tools": [space, { "type": "web_search" }], "tool_choice": "required",
            "parallel_tool_calls": false, "max_output_tokens": 200, "stream": stream }))
    };
    let answer = spaced(false);
    assert_eq!(answer.header("x-delft-no-effect"), Some("tools[].description, tools[].web_search"));
    let called = answer.json();
    let call = &called["output"][0];
    assert_eq!((&call["namespace"], &call["name"]), (&json!("art"), &json!("paint")));
    let events = spaced(true).events();
    let named: Vec<_> = events.iter().filter(|event| event["name"] == "paint").collect();
    assert!(named.iter().all(|event| event["type"] == "response.function_call_arguments.done"));
    assert_eq!(named.len(), 1);
    let items: Vec<_> = events.iter().filter(|e| e["item"]["namespace"] == "art").collect();
    assert_eq!(items.len(), 2, "{events:?}");
    let turn = json!([
        { "role": "user", "content": "Paint" },
        call,
        { "type": "function_call_output", "call_id": call["call_id"], "output": "done" },
    ]);
    let again = json!({ "input": turn, "tools": [space], "tool_choice": "none" });
    assert_eq!(ask(again).json()["usage"]["output_tokens"], 12);
    let nested = json!({ "type": "namespace", "name": "more", "tools": [space] });
    let twice = json!({ "type": "function", "name": "art__paint", "parameters": schema() });

    for (extra, place) in [
        (json!({ "tools": [nested] }), "tools[0].tools[0]"),
        (json!({ "tools": [space, twice] }), "tools[1]"),
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "input[0]"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0]"),
        (json!({ "text": { "format": { "type": "json_schema" } } }), "text.format.type"),
    ] {
        let response = ask(extra);
        let message = response.json()["error"]["message"].as_str().unwrap().to_string();
        assert!(response.status == 400 && message.starts_with(place), "{message}");
    }
}
