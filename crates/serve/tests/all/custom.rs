//! OpenAI's custom tools: calls whose input is a text.

use serde_json::{Value, json};

use crate::common::{Response, post, shared};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";

/// Plates of the form that the tests ask for.
const EXPRESSION: &str = r#"^(red|green) "[0-9]{2}"\\[a-c]$"#;

fn fits(input: &str) -> bool {
    let colours = ["red", "green"].into_iter();
    let rest = colours.filter_map(|colour| input.strip_prefix(colour)).next().unwrap_or_default();
    let rest: Vec<char> = rest.chars().collect();
    matches!(rest[..], [' ', '"', a, b, '"', '\\', 'a'..='c'] if [a, b].iter().all(char::is_ascii_digit))
}

fn ask(path: &str, extra: Value) -> Response {
    let mut body = match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "Paint me a dragon" }],
            "max_tokens": 120 }),
        _ => json!({ "input": "Paint me a dragon", "max_output_tokens": 120 }),
    };
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    post(shared(), path, &body)
}

fn good(path: &str, extra: Value) -> Response {
    let response = ask(path, extra);
    assert_eq!(response.status, 200, "{response:?}");
    response
}

fn refused(path: &str, extra: Value, message: &str) {
    let response = ask(path, extra);
    let error = response.json()["error"]["message"].as_str().unwrap_or_default().to_string();
    assert!(response.status == 400 && error.starts_with(message), "{error}");
}

fn function() -> Value {
    json!({ "name": "tear", "parameters": { "type": "object", "properties": {} } })
}

#[test]
fn chats_call_custom_tools_with_texts_of_their_grammar() {
    let grammar = json!({ "syntax": "regex", "definition": EXPRESSION });
    let format = json!({ "type": "grammar", "grammar": grammar });
    let custom = json!({ "name": "plate", "description": "A plate", "format": format });
    let tools = json!([
        { "type": "function", "function": function() },
        { "type": "custom", "custom": custom },
    ]);
    let named = json!({ "type": "custom", "custom": { "name": "plate" } });
    let allowed = json!({ "type": "allowed_tools", "allowed_tools": { "mode": "required",
        "tools": [named] } });
    for choice in [named, allowed] {
        let extra = json!({ "tools": tools, "tool_choice": choice, "parallel_tool_calls": false,
            "seed": 3 });
        let whole = good(CHAT, extra.clone()).json();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!((&call["type"], &call["custom"]["name"]), (&json!("custom"), &json!("plate")));
        assert!(fits(call["custom"]["input"].as_str().unwrap()), "{call}");
        assert!(call.get("function").is_none());

        let mut streamed = extra;
        streamed["stream"] = true.into();
        let events = good(CHAT, streamed).events();
        let deltas = events.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"][0]);
        let deltas: Vec<_> = deltas.filter(|delta| !delta.is_null()).collect();
        assert_eq!((&deltas[0]["type"], &deltas[0]["index"]), (&json!("custom"), &json!(0)));
        let input: String =
            deltas.iter().map(|delta| delta["custom"]["input"].as_str().unwrap()).collect();
        assert_eq!(call["custom"]["input"], input);

        let turn = json!([
            { "role": "user", "content": "Paint" },
            choice["message"],
            { "role": "tool", "tool_call_id": call["id"], "content": "done" },
        ]);
        good(CHAT, json!({ "messages": turn, "tools": tools, "max_tokens": 4 }));
    }
}

/// As OpenAI documents it, with what JSON escapes.
#[test]
fn inputs_follow_grammars_in_the_syntax_of_lark() {
    let definition = r#"
        start: "say" SP quoted (NL sum)~1..2
        quoted: "\"" WORD "\"" | "'\\" WORD "'"
        sum: INT (SP "+" SP INT)*
        WORD: /[a-z]{1,8}/
        SP: " "
        NL: /\n/
        INT: /[0-9]{1,3}/
    "#;
    let fits = |input: &str| {
        let mut lines = input.split('\n');
        let word = lines.next().unwrap().strip_prefix("say ").unwrap();
        let inner = match word.strip_prefix("'\\") {
            Some(inner) => inner.strip_suffix('\'').unwrap(),
            None => word.strip_prefix('"').unwrap().strip_suffix('"').unwrap(),
        };
        let sums: Vec<&str> = lines.collect();
        assert!((1..=8).contains(&inner.len()) && inner.chars().all(|c| c.is_ascii_lowercase()));
        assert!((1..=2).contains(&sums.len()), "{input}");
        for sum in sums {
            assert!(sum.split(" + ").all(|number| number.parse::<u16>().is_ok()), "{input}");
        }
    };
    let grammar = json!({ "syntax": "lark", "definition": definition });
    let format = json!({ "type": "grammar", "grammar": grammar });
    let tools = json!([{ "type": "custom", "custom": { "name": "plate", "format": format } }]);
    for seed in 0..4 {
        let extra = json!({ "tools": tools, "tool_choice": "required", "seed": seed,
            "parallel_tool_calls": false });
        let whole = good(CHAT, extra).json();
        let choice = &whole["choices"][0];
        let call = &choice["message"]["tool_calls"][0]["custom"];
        match choice["finish_reason"].as_str() {
            Some("tool_calls") => fits(call["input"].as_str().unwrap()),
            reason => assert_eq!(reason, Some("length"), "{whole}"),
        }
    }
    let format = json!({ "type": "grammar", "syntax": "lark", "definition": definition });
    let tools = json!([{ "type": "custom", "name": "plate", "format": format }]);
    let extra = json!({ "tools": tools, "tool_choice": "required", "seed": 3 });
    let answer = good(RESPONSES, extra).json();
    assert_eq!(answer["output"][0]["type"], "custom_tool_call", "{answer}");
}

#[test]
fn inputs_without_a_form_are_texts_that_may_be_cut() {
    let tools = json!([{ "type": "custom", "custom": { "name": "say" } }]);
    let extra = json!({ "tools": tools, "tool_choice": "required", "max_tokens": 30 });
    let whole = good(CHAT, extra).json();
    let call = &whole["choices"][0]["message"]["tool_calls"][0]["custom"];
    assert!(call["name"] == "say" && call["input"].is_string(), "{whole}");
    let tools = json!([{ "type": "custom", "name": "say", "format": { "type": "text" } }]);
    let extra = json!({ "tools": tools, "tool_choice": "required", "max_output_tokens": 30 });
    let answer = good(RESPONSES, extra).json();
    let item = &answer["output"][0];
    assert_eq!((&item["type"], &item["name"]), (&json!("custom_tool_call"), &json!("say")));
    assert_eq!(item["status"], answer["status"], "{answer}");
}

#[test]
fn responses_have_items_and_events_of_custom_tools() {
    let format = json!({ "type": "grammar", "syntax": "regex", "definition": EXPRESSION });
    let custom = json!({ "type": "custom", "name": "plate", "format": format });
    let choice = json!({ "type": "custom", "name": "plate" });
    let extra = json!({ "tools": [custom], "tool_choice": choice, "seed": 3 });
    let answer = good(RESPONSES, extra.clone()).json();
    let item = &answer["output"][0];
    assert_eq!((&item["type"], &item["status"]), (&json!("custom_tool_call"), &json!("completed")));
    assert!(fits(item["input"].as_str().unwrap()), "{item}");

    let mut streamed = extra;
    streamed["stream"] = true.into();
    let events = good(RESPONSES, streamed).events();
    let of = |kind: &str| -> Vec<Value> {
        events.iter().filter(|event| event["type"] == kind).cloned().collect()
    };
    let deltas = of("response.custom_tool_call_input.delta");
    let input: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(item["input"], input);
    let done = of("response.custom_tool_call_input.done");
    assert_eq!((done.len(), &done[0]["input"]), (1, &item["input"]));
    assert_eq!(of("response.output_item.added")[0]["item"]["input"], "");
    assert_eq!(of("response.output_item.done")[0]["item"]["input"], item["input"]);
    assert!(of("response.function_call_arguments.delta").is_empty());

    let output = json!({ "type": "custom_tool_call_output", "call_id": item["call_id"],
        "output": [{ "type": "input_text", "text": "done" }] });
    let turn = json!([{ "role": "user", "content": "Paint" }, item, output]);
    good(RESPONSES, json!({ "input": turn, "max_output_tokens": 4 }));
    let extra = json!({ "previous_response_id": answer["id"], "input": [output],
        "max_output_tokens": 4 });
    good(RESPONSES, extra);

    let space = json!({ "type": "namespace", "name": "art", "tools": [custom] });
    let extra =
        json!({ "tools": [space], "tool_choice": "required", "parallel_tool_calls": false });
    let item = good(RESPONSES, extra).json()["output"][0].clone();
    assert_eq!((&item["namespace"], &item["name"]), (&json!("art"), &json!("plate")));
    assert!(fits(item["input"].as_str().unwrap()), "{item}");
}

#[test]
fn what_is_no_custom_tool_is_refused_by_its_place() {
    let chat = |format: Value| json!({ "tools": [{ "type": "custom", "custom": { "name": "x", "format": format } }] });
    let grammar = |grammar: Value| chat(json!({ "type": "grammar", "grammar": grammar }));
    let place = "tools[0].custom.format";
    let lark = |definition: &str| json!({ "syntax": "lark", "definition": definition });
    let cases = [
        (grammar(lark("start: NONE")), ": grammar: expected one that can be followed, found"),
        (grammar(lark("start: /a(?=b)/")), ": grammar: expected one that can be followed, found"),
        (grammar(lark("start: %json {}")), ": grammar: expected rules and terminals of strings"),
        (grammar(json!({ "syntax": "x", "definition": "a" })), ".grammar.syntax: expected regex"),
        (grammar(json!({ "syntax": "regex" })), ".grammar.definition: expected a string"),
        (grammar(json!({ "syntax": "regex", "size": 1 })), ".grammar.size: there is no such"),
        (chat(json!({ "type": "grammar", "syntax": "regex" })), ".syntax: there is no such"),
        (chat(json!({ "type": "json" })), ": expected a format of type text or grammar"),
        (chat(json!("text")), ": expected an object"),
    ];
    for (extra, message) in cases {
        refused(CHAT, extra, &format!("{place}{message}"));
    }
    let flat =
        |format: Value| json!({ "tools": [{ "type": "custom", "name": "x", "format": format }] });
    let mut format = lark("start: (");
    format["type"] = "grammar".into();
    refused(RESPONSES, flat(format), "tools[0].format: grammar: expected one that can be followed");
    let twice = json!({ "type": "custom", "custom": { "name": "tear" } });
    let tools = json!([{ "type": "function", "function": function() }, twice]);
    refused(CHAT, json!({ "tools": tools }), "tools[1]: a second tool named tear");
    let open = json!({ "type": "grammar", "grammar": { "syntax": "regex", "definition": "(a" } });
    let mut extra = chat(open);
    extra["tool_choice"] = "required".into();
    assert_eq!(ask(CHAT, extra).status, 400);
}
