//! Calls that are enforced are the calls that are read, in every form.

use super::{gpt2, grammars, takes, write};
use delft_structured::Demand;
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

fn calls(format: &'static tokens::tools::Format, text: &str) -> (Vec<(String, Value)>, String) {
    let mut reader = Calls::new(format, tools());
    let mut parts = reader.push(text);
    parts.extend(reader.finish());
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
            let demand = Demand { required: true, parallel };
            let source = grammars.tools(format, &tools(), demand, Opening::Answer).unwrap();
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
    let demand = Demand { required: false, parallel: true };
    let find = |name: &str| FORMATS.iter().find(|format| format.name == name).unwrap();
    let call = "{\"name\": \"now\", \"arguments\": {}}";
    let wrong = "{\"name\": \"now\", \"arguments\": {\"x\": 1}}";
    let hermes = |call: &str| format!("Well {{\"a\"}}.\n<tool_call>\n{call}\n</tool_call>");
    let source = grammars.tools(find("hermes"), &tools(), demand, Opening::Answer).unwrap();
    for (text, expected) in [
        ("No call at all.".to_string(), true),
        (hermes(call), true),
        (hermes(wrong), false),
        (format!("{}\n<tool_call>\n{call}\n</tool_call>", hermes(call)), true),
    ] {
        assert_eq!(takes(&own, &source, &text), expected, "{text}");
    }
    let source = grammars.tools(find("llama"), &tools(), demand, Opening::Answer).unwrap();
    for (text, expected) in [
        ("Just text, {with braces}.", true),
        ("{\"name\": \"now\", \"parameters\": {}}", true),
        ("{\"name\": \"never\", \"parameters\": {}}", false),
    ] {
        assert_eq!(takes(&own, &source, text), expected, "{text}");
    }
    assert!(grammars.tools(find("hermes"), &[], demand, Opening::Answer).is_err());
}
