//! Schemas, regular expressions and grammars.

use super::{gpt2, grammars, takes, write};
use delft_structured::Grammar;
use engine::reasoning::Opening;
use serde_json::{Value, json};

#[test]
fn what_is_written_to_its_end_is_json_of_its_schema() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let person = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 130 },
            "likes": { "type": "array", "items": { "enum": ["tea", "rain"] }, "maxItems": 3 },
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    /// Whether a value is what its schema says.
    type Holds = fn(&Value) -> bool;
    let cases: [(Grammar, Holds); 4] = [
        (Grammar::Schema(person), |value| {
            value["name"].as_str().is_some_and(|name| name.chars().count() <= 12)
                && value["age"].as_u64().is_some_and(|age| age <= 130)
                && value["likes"].as_array().is_none_or(|likes| {
                    likes.len() <= 3 && likes.iter().all(|like| like == "tea" || like == "rain")
                })
        }),
        (Grammar::Json, Value::is_object),
        (Grammar::Schema(json!({ "enum": ["a", 1, null] })), |value| {
            [json!("a"), json!(1), Value::Null].contains(value)
        }),
        (
            Grammar::Schema(
                json!({ "type": "array", "items": { "type": "boolean" }, "maxItems": 4 }),
            ),
            |value| value.as_array().is_some_and(|list| list.iter().all(Value::is_boolean)),
        ),
    ];
    for (grammar, holds) in cases {
        let source = grammars.compile(&grammar, Opening::Answer).unwrap();
        let mut ended = 0;
        for seed in 0..20 {
            let (text, whole) = write(&own, &source, seed);
            if whole {
                ended += 1;
                let value: Value =
                    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
                assert!(holds(&value), "{text}");
            }
        }
        assert!(ended >= 10, "{grammar:?}: {ended}");
    }
}

#[test]
fn expressions_and_grammars_take_what_they_describe() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let sum = "root ::= term (\" + \" term)*\nterm ::= [0-9]+ | \"(\" root \")\"\n";
    let list = "start: \"<\" item (\",\" item)* \">\"\nitem: /[a-z]+/ | start\n";
    let cases = [
        (Grammar::Regex("[a-c]{2,4}(-\\d+)?/".to_string()), "abc-12/", "abd-12/"),
        (Grammar::of_text(sum), "1 + (22 + 3)", "1 + (22 + 3"),
        (Grammar::of_text(list), "<a,<bc>,d>", "<a,,d>"),
        (Grammar::of_text("root ::= \"é\" [^a-y]? .\n"), "éz\n", "éa\n"),
    ];
    for (grammar, good, bad) in cases {
        let source = grammars.compile(&grammar, Opening::Answer).unwrap();
        assert!(takes(&own, &source, good), "{grammar:?} {good}");
        assert!(!takes(&own, &source, bad), "{grammar:?} {bad}");
    }
}

#[test]
fn reasoning_may_come_before() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let offered = Opening::Offered { open: "<think>", close: "</think>" };
    let opened = Opening::Opened { close: "</think>" };
    let object = "{\"a\": 1}";
    for grammar in [
        Grammar::Schema(
            json!({ "type": "object", "properties": { "a": { "const": 1 } }, "required": ["a"], "additionalProperties": false }),
        ),
        Grammar::Regex("\\{\"a\": 1\\}".to_string()),
        Grammar::of_text("root ::= \"{\" rest\nrest ::= \"\\\"a\\\": 1}\""),
    ] {
        let with = |opening| grammars.compile(&grammar, opening).unwrap();
        let thought = format!("<think>\nhm { }</think>\n\n{object}", "{} [");
        assert!(takes(&own, &with(offered), object), "{grammar:?}");
        assert!(takes(&own, &with(offered), &thought), "{grammar:?}");
        assert!(!takes(&own, &with(Opening::Answer), &thought), "{grammar:?}");
        assert!(takes(&own, &with(opened), &thought["<think>".len()..]), "{grammar:?}");
        assert!(!takes(&own, &with(opened), object), "{grammar:?}");
    }
}
