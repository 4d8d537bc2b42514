//! Calls that are enforced are the calls that are read, in every form.

use super::{gpt2, grammars, takes, write};
use delft_structured::{Demand, Given, Grammar};
use engine::TokenSet;
use engine::reasoning::Opening;
use serde_json::{Value, json};
use tokens::tools::{Body, Calls, FORMATS, Part, Tool};

fn tools() -> Vec<Tool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string", "maxLength": 20 },
            "days": { "type": "integer", "minimum": 1, "maximum": 14 },
            "unit": { "enum": ["c", "f"] },
        },
        "required": ["city", "unit"],
    });
    let tool = |name: &str, parameters| Tool::new(name, parameters, true).unwrap();
    vec![tool("get_weather", weather), tool("now", json!({}))]
}

fn calls(format: &'static tokens::tools::CallFormat, text: &str) -> (Vec<(String, Value)>, String) {
    let mut reader = Calls::new(format, tools());
    let mut parts = reader.push(text);
    parts.extend(reader.finish(false));
    let (mut calls, mut rest) = (Vec::new(), String::new());
    for part in parts {
        match part {
            Part::Call(call) => calls.push((call.name, call.arguments)),
            Part::Text(text) => rest += &text,
            piece => panic!("{piece:?} of a reader of whole calls"),
        }
    }
    (calls, rest)
}

#[test]
fn a_required_call_is_one_of_its_schema_in_every_form() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    for format in FORMATS.iter().filter(|format| format.body != Body::Harmony) {
        for parallel in [false, true] {
            let demand = Demand { required: true, parallel, lazy: false };
            let source =
                grammars.tools(format, &tools(), &[], demand, Opening::Answer, None).unwrap();
            let mut ended = 0;
            for seed in 0..8 {
                let (text, whole) = write(&own, &source, seed);
                if !whole {
                    continue;
                }
                ended += 1;
                let (calls, rest) = calls(format, &text);
                assert!(!calls.is_empty() && rest.trim().is_empty(), "{}: {text}", format.name);
                assert!(parallel || calls.len() == 1, "{}: {text}", format.name);
                for (name, arguments) in calls {
                    let fields = arguments.as_object().unwrap();
                    if name == "now" {
                        assert!(fields.is_empty(), "{}: {text}", format.name);
                        continue;
                    }
                    assert_eq!(name, "get_weather", "{}: {text}", format.name);
                    assert!(arguments["city"].is_string(), "{}: {text}", format.name);
                    assert!(["c", "f"].contains(&arguments["unit"].as_str().unwrap()), "{text}");
                    let days = arguments.get("days").map(|days| days.as_u64().unwrap());
                    assert!(days.is_none_or(|days| (1..=14).contains(&days)), "{text}");
                }
            }
            assert!(ended >= 3, "{}: {ended}", format.name);
        }
    }
}

#[test]
fn text_stays_free_where_calls_are_not_required() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let demand = Demand { required: false, parallel: true, lazy: false };
    let find = |name: &str| FORMATS.iter().find(|format| format.name == name).unwrap();
    let call = "{\"name\": \"now\", \"arguments\": {}}";
    let wrong = "{\"name\": \"now\", \"arguments\": {\"x\": 1}}";
    let hermes = |call: &str| format!("Well {{\"a\"}}.\n<tool_call>\n{call}\n</tool_call>");
    let source =
        grammars.tools(find("hermes"), &tools(), &[], demand, Opening::Answer, None).unwrap();
    for (text, expected) in [
        ("No call at all.".to_string(), true),
        (hermes(call), true),
        (hermes(wrong), false),
        (format!("{}\n<tool_call>\n{call}\n</tool_call>", hermes(call)), true),
    ] {
        assert_eq!(takes(&own, &source, &text), expected, "{text}");
    }
    let source =
        grammars.tools(find("llama"), &tools(), &[], demand, Opening::Answer, None).unwrap();
    for (text, expected) in [
        ("Just text, {with braces}.", true),
        ("{\"name\": \"now\", \"parameters\": {}}", true),
        ("{\"name\": \"never\", \"parameters\": {}}", false),
    ] {
        assert_eq!(takes(&own, &source, text), expected, "{text}");
    }
    assert!(grammars.tools(find("hermes"), &[], &[], demand, Opening::Answer, None).is_err());
}

/// An answer is calls of their schemas or a text of its own, and nothing else.
#[test]
fn a_text_beside_tools_follows_its_schema() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let schema = Grammar::Schema(json!({
        "type": "object",
        "properties": { "warm": { "type": "boolean" } },
        "required": ["warm"],
        "additionalProperties": false,
    }));
    let demand = |required| Demand { required, parallel: true, lazy: true };
    let text = "{\"warm\": true}";
    for (format, call) in [
        ("hermes", "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>"),
        ("llama", "{\"name\": \"now\", \"parameters\": {}}"),
        ("mistral", "[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}]"),
    ] {
        let format = FORMATS.iter().find(|own| own.name == format).unwrap();
        let source = |required| {
            let demand = demand(required);
            grammars.tools(format, &tools(), &[], demand, Opening::Answer, Some(&schema)).unwrap()
        };
        for (answer, either, required) in [
            (text, true, false),
            (call, true, true),
            ("{\"warm\": 1}", false, false),
            ("It is warm.", false, false),
            (&format!("{text} {call}"), false, false),
            (&call.replace("{}", "{\"x\": 1}"), false, false),
        ] {
            assert_eq!(takes(&own, &source(false), answer), either, "{}: {answer}", format.name);
            assert_eq!(takes(&own, &source(true), answer), required, "{}: {answer}", format.name);
        }
    }
}

/// Text is nobody's affair until a call begins; from there on its schema counts.
#[test]
fn a_lazy_grammar_leaves_text_alone_and_holds_calls() {
    let Some(own) = gpt2() else { return };
    let (grammars, tokenizer) = (grammars(&own), &own.0);
    let demand = Demand { required: false, parallel: true, lazy: true };
    let find = |name: &str| FORMATS.iter().find(|format| format.name == name).unwrap();
    let source =
        |name| grammars.tools(find(name), &tools(), &[], demand, Opening::Answer, None).unwrap();
    // The text as it goes on, and how many tokens were masked.
    let write = |source: &engine::ConstraintSource, text: &str| {
        let mut constraint = source.start().unwrap();
        let (mut written, mut masked) = (Vec::new(), 0);
        let all = {
            let mut all = TokenSet::new(tokenizer.vocab_size());
            all.insert_all();
            all
        };
        for id in tokenizer.encode(text, tokens::Special::default()).unwrap() {
            let mut allowed = TokenSet::new(tokenizer.vocab_size());
            constraint.allow(usize::MAX, &mut allowed).unwrap();
            masked += usize::from(allowed != all);
            if !allowed.contains(id) {
                break;
            }
            written.push(constraint.accept(id).unwrap());
        }
        (tokenizer.decode(&written, false), masked)
    };
    let hermes = source("hermes");
    for text in ["", "No call {\"a\": [1]} at all.", "a <tool_ call> </tool_call> \u{1}\u{7f} b"] {
        assert_eq!(write(&hermes, text), (text.to_string(), 0));
    }
    let call = "Well.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let (text, masked) = write(&hermes, call);
    assert!(text == call && masked > 5, "{text} {masked}");
    let wrong = call.replace("{}", "{\"x\": 1}");
    let (text, _) = write(&hermes, &wrong);
    assert!(wrong.starts_with(&text) && text.contains("\"arguments\":"), "{text}");
    assert!(!text.contains('x'), "{text}");
    // The last token of a mark that holds more than the mark is cut.
    let (text, _) = write(&hermes, "So <tool_call>>> no");
    assert!(text.starts_with("So <tool_call>") && !text.contains(">>"), "{text}");
    let llama = source("llama");
    for text in ["{\"city\": \"Rome\"}", "{\"name\": \"never\", \"parameters\": 7}", "{}", "Hm."] {
        assert_eq!(write(&llama, text), (text.to_string(), 0));
    }
    let (text, masked) = write(&llama, "{\"name\": \"now\", \"parameters\": {\"a\": 1}}");
    assert!(text.contains("\"parameters\":") && !text.contains("\"a\"") && masked > 0, "{text}");
    // A schema that cannot be followed is no hindrance.
    let odd = Tool::new("odd", json!({ "properties": { "a": { "$ref": "file:x" } } }), false);
    let odd = [odd.unwrap()];
    let find = find("hermes");
    assert!(
        grammars
            .tools(find, &odd, &[], Demand { lazy: false, ..demand }, Opening::Answer, None)
            .is_err()
    );
    let source = grammars.tools(find, &odd, &[], demand, Opening::Answer, None).unwrap();
    let call = call.replace("now", "odd").replace("{}", "{\"a\": 1}");
    assert_eq!(write(&source, &call).0, call);
}

/// An argument of a grammar has a text of it in every form, whatever must be escaped there.
#[test]
fn an_argument_of_a_grammar_is_a_text_of_it_in_every_form() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let schema = json!({ "type": "object", "properties": { "input": { "type": "string" } },
        "required": ["input"] });
    let tools = vec![Tool::new("write", schema, true).unwrap()];
    let lark = "start: \"\\\"\" WORD (NL WORD)~1..2\nWORD: /[a-z\\\\]{1,6}/\nNL: /\\n/";
    let grammar = Grammar::Lark(lark.to_string());
    for format in FORMATS.iter().filter(|format| format.body != Body::Harmony) {
        let grammar = match format.body {
            Body::Tagged { .. } => grammar.clone(),
            _ => grammar.in_json().unwrap(),
        };
        let given = Given { tool: "write".to_string(), argument: "input".to_string(), grammar };
        let demand = Demand { required: true, parallel: false, lazy: false };
        let source = grammars.tools(format, &tools, &[given], demand, Opening::Answer, None);
        let source = source.unwrap();
        for seed in 0..6 {
            let (text, whole) = write(&own, &source, seed);
            assert!(whole, "{}: {text}", format.name);
            let mut reader = Calls::new(format, tools.clone());
            let mut parts = reader.push(&text);
            parts.extend(reader.finish(false));
            let [Part::Call(call), ..] = &parts[..] else { panic!("{}: {text}", format.name) };
            let input = call.arguments["input"].as_str().unwrap();
            let lines: Vec<&str> = input.strip_prefix('"').unwrap().split('\n').collect();
            assert!((2..=3).contains(&lines.len()), "{}: {text}", format.name);
            let fits = |c: char| c.is_ascii_lowercase() || c == '\\';
            assert!(
                lines.iter().all(|line| (1..=6).contains(&line.len()) && line.chars().all(fits))
            );
        }
    }
}
