//! Schemas, regular expressions and grammars.

use super::{gpt2, grammars, llama2, qwen2, takes, write};
use delft_structured::Grammar;
use engine::TokenSet;
use engine::reasoning::Opening;
use serde_json::{Value, json};
use tokens::Special;

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
        (Grammar::Regex(r"(?=.*[A-Z])(?=.*\d)(?!.*/).{4,}".to_string()), "a-B3", "a/B3"),
        (Grammar::Regex(r"^((?!--)[a-zé-])+(?<!-)$".to_string()), "a-é", "a--b"),
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

#[test]
fn keywords_are_put_into_others() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let kind = json!({ "enum": ["a", "b"] });
    let cases = [
        (
            json!({ "type": "object", "properties": { "k": kind, "n": { "type": "integer" } }, "required": ["k"],
                "if": { "properties": { "k": { "const": "a" } } }, "then": { "required": ["n"] } }),
            vec![r#"{"k": "a", "n": 1}"#, r#"{"k": "b"}"#],
            vec![r#"{"k": "a"}"#],
        ),
        (
            json!({ "type": "object", "properties": { "a": { "type": "null" }, "b": { "type": "null" } },
                "additionalProperties": false, "dependentRequired": { "a": ["b"] } }),
            vec![r#"{"b": null}"#, "{}", r#"{"a": null, "b": null}"#],
            vec![r#"{"a": null}"#],
        ),
        (
            json!({ "type": "object", "propertyNames": { "$ref": "#/$defs/names" },
                "additionalProperties": { "type": "integer" }, "$defs": { "names": { "enum": ["x.y", "z"] } } }),
            vec![r#"{"x.y": 1, "z": 2}"#],
            vec![r#"{"xqy": 1}"#, r#"{"z": "1"}"#],
        ),
        (
            // ISO 8601's durations, likewise.
            json!({ "type": "string", "format": "duration", "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$" }),
            vec![r#""P1Y2M""#, r#""PT5M""#, r#""P3W""#, r#""P1DT2H""#],
            // RFC 3339's format has no fractions.
            vec![r#""P""#, r#""PT""#, r#""P1YT""#, r#""P1W2D""#, r#""1D""#, r#""PT1.5S""#],
        ),
        (
            // A record of all keys, as Zod writes it.
            json!({ "type": "object", "propertyNames": { "type": "string", "enum": ["x", "y"] },
                "additionalProperties": { "type": "integer" }, "required": ["x", "y"] }),
            vec![r#"{"x": 1, "y": 2}"#],
            vec![r#"{"x": 1}"#, r#"{"x": 1, "y": "2"}"#, r#"{"x": 1, "y": 2, "z": 3}"#],
        ),
        (
            json!({ "type": "object", "propertyNames": { "anyOf": [{ "const": "x" }, { "enum": ["y"] }] },
                "properties": { "y": { "type": "null" } }, "additionalProperties": { "type": "integer" },
                "required": ["x"] }),
            vec![r#"{"y": null, "x": 1}"#, r#"{"x": 1}"#],
            vec![r#"{"y": 1, "x": 1}"#, r#"{"y": null}"#, r#"{"x": 1, "z": 1}"#],
        ),
        (
            json!({ "allOf": [{ "type": "object", "properties": { "a": { "type": "null" } } }],
                "properties": { "b": { "type": "null" } }, "unevaluatedProperties": false }),
            vec![r#"{"a": null}"#, r#"{"b": null}"#],
            vec![r#"{"c": null}"#],
        ),
        (
            json!({ "type": "array", "prefixItems": [{ "type": "null" }], "unevaluatedItems": false }),
            vec!["[null]", "[]"],
            vec!["[null, 1]"],
        ),
        (
            json!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX }),
            vec!["-1", "0", "123456789", "9007199254740991", "-9007199254740991"],
            vec!["1.5", "9007199254740992", "-9007199254740992"],
        ),
        (
            json!({ "type": "array", "items": { "type": "integer" }, "contains": { "minimum": 9 } }),
            vec!["[9]", "[1, 2, 9, 3]"],
            vec!["[]", "[\"9\"]"],
        ),
        (
            json!({ "type": "array", "contains": { "const": 1 }, "minContains": 1, "maxContains": 2 }),
            vec!["[1]", "[1, 0, 2.5]", "[1, 1, \"a\"]"],
            vec!["[]", "[0]", "[1, 1, 1]"],
        ),
        (
            json!({ "type": "array", "items": { "enum": ["a", "b", 1] }, "uniqueItems": true, "minItems": 2 }),
            vec![r#"["a", "b"]"#, r#"[1, "b", "a"]"#],
            vec![r#"["a"]"#, r#"["a", "a"]"#],
        ),
        (
            json!({ "type": "object", "properties": { "kind": { "enum": ["a", "b"] } }, "required": ["kind"],
                "if": { "properties": { "kind": { "const": "a" } } }, "then": { "properties": { "x": { "type": "null" } } },
                "else": { "properties": { "y": { "type": "null" } } }, "unevaluatedProperties": false }),
            vec![r#"{"kind": "a", "x": null}"#, r#"{"kind": "b", "y": null}"#],
            vec![r#"{"kind": "a", "y": null}"#, r#"{"kind": "b", "z": null}"#],
        ),
        (
            json!({ "type": "object", "unevaluatedProperties": false, "oneOf": [
                { "properties": { "a": { "const": 1 } }, "required": ["a"] },
                { "properties": { "b": { "const": 2 } }, "required": ["b"] } ] }),
            vec![r#"{"a": 1}"#, r#"{"b": 2}"#],
            vec![r#"{"a": 1, "b": 2}"#, "{}"],
        ),
        (
            json!({ "type": "object", "properties": { "a": { "type": "null" } }, "unevaluatedProperties": false,
                "dependentSchemas": { "a": { "properties": { "b": { "type": "null" } } } } }),
            vec![r#"{"a": null, "b": null}"#, "{}"],
            vec![r#"{"b": null}"#],
        ),
        (
            json!({ "type": "array", "prefixItems": [{ "type": "null" }], "contains": { "type": "integer" },
                "unevaluatedItems": false }),
            vec!["[null, 1]", "[null, 1, 2]"],
            vec!["[null]", "[null, \"\"]"],
        ),
        (
            json!({ "$id": "http://a.b/tree", "$dynamicAnchor": "node", "type": "object", "additionalProperties": false,
                "properties": { "left": { "$ref": "inner" }, "n": { "type": "null" } },
                "$defs": { "inner": { "$id": "inner", "$dynamicAnchor": "node", "type": "array",
                    "items": { "$dynamicRef": "#node" } } } }),
            vec![r#"{"left": [{"n": null}]}"#],
            vec![r#"{"left": [[]]}"#],
        ),
        (
            json!({ "not": { "type": ["object", "array", "string"] } }),
            vec!["1.5", "null"],
            vec!["{}", "\"\""],
        ),
        (json!({ "type": "boolean", "not": { "const": true } }), vec!["false"], vec!["true"]),
        (
            json!({ "oneOf": [{ "type": "integer", "minimum": 0, "maximum": 9 },
                { "type": "integer", "minimum": 5, "maximum": 20 }] }),
            vec!["3", "15"],
            vec!["7", "30"],
        ),
        (
            // The example of JSON Schema's own guide.
            json!({ "oneOf": [{ "type": "number", "multipleOf": 5 }, { "type": "number", "multipleOf": 3 }] }),
            vec!["10", "9", "-3", "-20"],
            vec!["15", "0", "2", "-30"],
        ),
        (
            json!({ "type": "integer", "minimum": 0, "oneOf": [{ "multipleOf": 4 }, { "multipleOf": 6 }] }),
            vec!["4", "6", "8", "18", "100"],
            vec!["12", "24", "5", "-4"],
        ),
        (
            json!({ "type": "object", "required": ["a"], "properties": { "a": {
                "oneOf": [{ "type": "integer", "multipleOf": 2 }, { "type": "integer", "multipleOf": 4 }] } } }),
            vec![r#"{"a": 6}"#],
            vec![r#"{"a": 8}"#, r#"{"a": 3}"#],
        ),
        (
            json!({ "type": "number", "not": { "multipleOf": 0.1 } }),
            vec!["0.25", "-1.01"],
            vec!["0.3", "0", "-1.0"],
        ),
        (
            json!({ "type": "number", "exclusiveMinimum": 1, "maximum": 1.5 }),
            vec!["1.25", "1.5"],
            vec!["1", "1.0", "1.6"],
        ),
        (
            json!({ "type": "number", "minimum": -2.5, "exclusiveMaximum": -2 }),
            vec!["-2.25", "-2.5"],
            vec!["-2", "-2.0", "-1"],
        ),
        (
            json!({ "$id": "http://a.b/c", "$defs": { "n": { "$anchor": "number", "type": "integer" },
                "m": { "$id": "d", "$defs": { "o~p": { "type": "null" } }, "$ref": "#/$defs/o~0p" } },
                "type": "array", "prefixItems": [{ "$ref": "#number" }, { "$ref": "d" }], "items": false }),
            vec!["[1, null]"],
            vec!["[null]", "[1, 1]"],
        ),
        (
            json!({ "type": "object", "additionalProperties": false, "properties": {
                "tags": { "type": "array", "uniqueItems": true, "items": { "type": "string" } },
                "points": { "type": "array", "uniqueItems": true, "items": { "$ref": "#/$defs/point" } },
                "plain": { "type": "array", "items": { "type": "integer" } } },
                "$defs": { "point": { "type": "array", "items": { "type": "number" } } } }),
            vec![
                r#"{"tags": ["a", "b", "ab"], "points": [[1, 1], [1], [1, 12]], "plain": [1, 1]}"#,
                r#"{"tags": ["a, \"a", "a"]}"#,
            ],
            vec![
                r#"{"tags": ["a", "b", "a"]}"#,
                r#"{"points": [[1, 2], [1, 2]]}"#,
                r#"{"points": [[1], [1.0]]}"#,
            ],
        ),
        (
            json!({ "type": "array", "uniqueItems": true, "items": { "type": "array", "uniqueItems": true,
                "items": { "type": "integer" } } }),
            vec!["[[1, 2], [2, 1], []]"],
            vec!["[[1, 1]]", "[[], []]", "[[1], [2], [1]]"],
        ),
        (
            // Behind a digit nothing can come but the item's end.
            json!({ "type": "array", "uniqueItems": true, "items": { "type": "integer", "minimum": 0, "maximum": 9 } }),
            vec!["[1, 2, 3]", "[]"],
            vec!["[1, 1]", "[1, 2, 1]"],
        ),
        (
            // There are fewer items than there must be: no array is one.
            json!({ "type": "object", "additionalProperties": false, "properties": {
                "few": { "type": "array", "uniqueItems": true, "minItems": 4, "items": {
                    "type": "integer", "minimum": 1, "exclusiveMaximum": 4 } },
                "all": { "type": "array", "uniqueItems": true, "minItems": 3, "items": {
                    "type": "integer", "minimum": 1, "exclusiveMaximum": 4 } },
                "flags": { "type": ["array", "null"], "uniqueItems": true, "minItems": 9, "items": {
                    "type": "object", "additionalProperties": false, "required": ["a"],
                    "properties": { "a": { "type": "boolean" }, "b": { "type": ["boolean", "null"] } } } } } }),
            vec![r#"{"all": [3, 1, 2], "flags": null}"#, "{}"],
            vec![r#"{"few": [1, 2]}"#, r#"{"all": [1, 2]}"#, r#"{"flags": []}"#],
        ),
        (
            json!({ "type": "array", "uniqueItems": true, "items": { "enum": ["a", "b", "c", "d", "e", "f", "g", "h", "i"] } }),
            vec![r#"["b", "a"]"#, r#"["a", "c", "d"]"#, "[]"],
            vec![r#"["a", "a"]"#, r#"["c", "d", "c"]"#],
        ),
        (
            json!({ "$id": "http://a.b/c.json", "type": "object", "additionalProperties": false, "properties": {
                "x": { "$id": "#/properties/x", "$ref": "#/definitions/x" } }, "definitions": { "x": { "type": "null" } } }),
            vec![r#"{"x": null}"#],
            vec![r#"{"x": 1}"#],
        ),
        (json!({ "type": "string", "format": "AWS::EC2::VPC.Id" }), vec!["\"any\""], vec!["1"]),
        (
            json!({ "type": "object", "properties": { "a": { "type": "null" }, "b": { "type": "null" }, "c": { "type": "null" } },
                "additionalProperties": false, "minProperties": 1, "maxProperties": 2 }),
            vec![r#"{"a": null}"#, r#"{"a": null, "c": null}"#],
            vec!["{}", r#"{"a": null, "b": null, "c": null}"#],
        ),
        (
            // A name that is there twice counts once.
            json!({ "type": "object", "minProperties": 2, "additionalProperties": { "type": "null" } }),
            vec![r#"{"a": null, "ab": null}"#, r#"{"a": null, "b": null, "c": null}"#],
            vec![r#"{"a": null, "a": null}"#, r#"{"a": null, "b": null, "a": null}"#],
        ),
        (
            json!({ "type": "object", "minProperties": 2, "additionalProperties": false,
                "patternProperties": { "^[a-c]{2}$": { "type": "string" } } }),
            vec![r#"{"ab": "x", "bb": "x"}"#, r#"{"ab": "ab", "ac": ", "}"#],
            vec![r#"{"ab": "x", "ab": "x"}"#],
        ),
        (
            json!({ "type": "object", "properties": { "a": { "type": "null" } }, "minProperties": 1 }),
            vec![r#"{"a": null}"#, r#"{"a": null, "b": 1}"#],
            vec!["{}"],
        ),
        (
            json!({ "oneOf": [{ "$ref": "#/$defs/cat" }, { "$ref": "#/$defs/dog" }, { "type": "string" }, { "type": "integer", "maximum": 3 },
                    { "type": "integer", "minimum": 5 }],
                "$defs": {
                    "cat": { "type": "object", "properties": { "kind": { "const": "cat" } }, "required": ["kind"] },
                    "dog": { "type": "object", "properties": { "kind": { "const": "dog" }, "age": { "type": "integer" } },
                        "required": ["kind", "age"], "additionalProperties": false } } }),
            vec![r#"{"kind": "cat", "age": 1}"#, r#"{"kind": "dog", "age": 2}"#, "\"s\"", "3", "7"],
            vec![r#"{"kind": "dog"}"#, "4", "null"],
        ),
        (
            // The first cannot be told from the second, whose own branch is left.
            json!({ "oneOf": [{ "type": "object", "properties": { "a": { "type": "array", "items": { "pattern": "x" } } } },
                { "type": "object", "required": ["b"], "properties": { "b": { "type": "null" } } }, { "type": "null" }] }),
            vec!["null", "{}"],
            vec![r#"{"b": null}"#],
        ),
        (
            json!({ "type": "object", "properties": { "a": { "type": "string" }, "n": { "type": "integer" } }, "additionalProperties": false,
                "if": { "properties": { "a": { "pattern": "^x" } }, "required": ["a"] }, "then": { "required": ["n"] } }),
            vec![r#"{"a": "x", "n": 1}"#, r#"{"n": 1}"#, "{}"],
            vec![r#"{"a": "x"}"#],
        ),
        (
            json!({ "type": "string", "pattern": "^(?!aws:)[a-z:\\<[]+$" }),
            vec!["\"aw:\"", "\"x[<\""],
            vec!["\"aws:\"", "\"A\""],
        ),
        (
            json!({ "type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?=.*[@$!%*?&])[A-Za-z\d@$!%*?&]{8,}$" }),
            vec!["\"Passw0rd!\"", "\"!!!!!!A1\""],
            vec!["\"Passw0\"", "\"Password!\"", "\"passw0rd!\""],
        ),
        (
            json!({ "type": "string", "pattern": r"^(?!.*\b(foo|bar)\b)[a-z ]+$" }),
            vec!["\"a foobar\"", "\"food\""],
            vec!["\"a foo\"", "\"bar\"", "\"foo bar\""],
        ),
        (
            json!({ "type": "object", "additionalProperties": false, "properties": { "a": { "type": "string", "pattern": "^[^\"]*$" } },
                "patternProperties": { "^[^\\\\a]+$": { "type": "string", "pattern": "^[^\\\\]*$" } } }),
            vec![r#"{"a": "x\\y", "c\"": "\"\t"}"#],
            vec![r#"{"a": "x\"y"}"#, r#"{"c": "\\"}"#, r#"{"d\\": "x"}"#],
        ),
        (
            // In the midst of a pattern, and behind what was matched.
            json!({ "type": "string", "pattern": r"^((?!--)[a-z-])+(?<!-)$" }),
            vec!["\"a-b\"", "\"-a\""],
            vec!["\"a--b\"", "\"a-\""],
        ),
        (
            json!({ "type": "string", "not": { "anyOf": [{ "pattern": "^_" }, { "const": "x" }, { "minLength": 5 }] } }),
            vec!["\"a_\"", "\"xx\"", "\"\""],
            vec!["\"_a\"", "\"x\"", "\"abcde\""],
        ),
        (
            json!({ "allOf": [{ "pattern": "a" }, { "pattern": "b$" }, { "not": { "pattern": "^c" } }], "type": "string" }),
            vec!["\"ab\"", "\"bab\""],
            vec!["\"ba\"", "\"cab\"", "\"b\""],
        ),
        (
            json!({ "type": "object", "patternProperties": { "^(?!x_)[a-z_]+$": { "type": "null" } }, "additionalProperties": false }),
            vec![r#"{"a": null}"#, r#"{"xx_": null}"#],
            vec![r#"{"x_": null}"#, r#"{"A": null}"#],
        ),
        (
            json!({ "type": "object", "additionalProperties": false, "patternProperties": {
                "a": { "type": "integer" }, "b": { "minimum": 5 }, "^x": { "type": "null" } } }),
            vec![r#"{"a": 1, "ab": 5, "x": null}"#, r#"{"b": "c"}"#],
            vec![r#"{"ab": 4}"#, r#"{"a": "c"}"#, r#"{"xa": 1}"#, r#"{"c": 1}"#],
        ),
        (
            json!({ "type": "object", "propertyNames": { "pattern": "^[a-z]", "maxLength": 3, "not": { "enum": ["id"] } },
                "properties": { "abc": { "type": "null" }, "id": { "type": "null" } }, "additionalProperties": { "type": "integer" } }),
            vec![r#"{"abc": null, "x": 1}"#, r#"{"i": 1, "idx": 2}"#],
            vec![r#"{"id": null}"#, r#"{"id": 1}"#, r#"{"abcd": 1}"#, r#"{"9": 1}"#],
        ),
        (
            json!({ "type": "array", "contains": { "pattern": "^a" }, "items": { "type": "string" }, "maxContains": 1 }),
            vec![r#"["a", "b", "c"]"#],
            vec![r#"["a", "ab"]"#, r#"["b"]"#],
        ),
        (
            json!({ "oneOf": [{ "type": "string", "pattern": "a" }, { "type": "string", "pattern": "b" }] }),
            vec!["\"a\"", "\"cb\""],
            vec!["\"ab\"", "\"c\""],
        ),
        (
            // There are two, or three, and no more.
            json!({ "type": "array", "uniqueItems": true, "items": { "type": "string", "pattern": "^(ab|cd)$" } }),
            vec![r#"["ab", "cd"]"#, r#"["cd"]"#, "[]"],
            vec![r#"["ab", "ab"]"#, r#"["ab", "cd", "ab"]"#],
        ),
        (
            json!({ "type": "array", "uniqueItems": true, "minItems": 3, "items": {
                "anyOf": [{ "enum": ["a", "b"] }, { "pattern": "^[bc]$", "type": "string" }] } }),
            vec![r#"["a", "b", "c"]"#, r#"["c", "a", "b"]"#],
            vec![r#"["a", "b"]"#, r#"["a", "b", "b"]"#],
        ),
        (
            json!({ "type": "array", "uniqueItems": true, "minItems": 2,
                "prefixItems": [{ "enum": ["a", "b"] }, { "type": "string", "pattern": "^a$" }] }),
            vec![r#"["b", "a"]"#],
            vec![r#"["a", "a"]"#, r#"["b"]"#],
        ),
        (
            // The third may be there already.
            json!({ "type": "array", "uniqueItems": true,
                "prefixItems": [{ "type": "string" }, { "type": "string" }, { "pattern": "^[ab]$", "type": "string" }] }),
            vec![r#"["b", "a"]"#],
            vec![r#"["a", "a"]"#, r#"["a", "b", "a"]"#],
        ),
        (
            json!({ "type": ["array", "null"], "uniqueItems": true, "minItems": 5, "items": {
                "type": "string", "pattern": "^[01]{2}$" } }),
            vec!["null"],
            vec!["[]", r#"["00", "01", "10", "11", "00"]"#],
        ),
        (json!({ "type": "string", "format": "json-pointer" }), vec!["\"/a/~0\""], vec!["\"a\""]),
        (
            // Formats of pydantic and OpenAPI.
            json!({ "type": "string", "format": "uuid4" }),
            vec!["\"01234567-89ab-4def-8123-456789abcdef\""],
            vec!["\"01234567-89ab-1def-8123-456789abcdef\"", "\"x\""],
        ),
        (
            json!({ "type": "string", "format": "byte" }),
            vec!["\"\"", "\"aGk=\""],
            vec!["\"a\"", "\"==\""],
        ),
        (
            // Up to draft 7 nothing counts beside a reference, and names may be anchors.
            json!({ "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": false,
                "definitions": { "a": { "$id": "http://x.org/a", "type": "integer" }, "b": { "$id": "#b", "type": "null" } },
                "properties": { "p": { "$id": "http://other.org/", "$ref": "#/definitions/a" }, "q": { "$ref": "#b" } } }),
            vec![r#"{"p": 1}"#, r#"{"q": null}"#],
            vec![r#"{"p": "x"}"#, r#"{"q": 1}"#],
        ),
        (
            // As 2019-09 refers to the whole from its parts.
            json!({ "$recursiveAnchor": true, "type": "object", "additionalProperties": false,
                "properties": { "n": { "type": "null" }, "more": { "$recursiveRef": "#" } } }),
            vec![r#"{"more": {"n": null}}"#, r#"{"more": {"more": {}}}"#],
            vec![r#"{"more": null}"#, r#"{"more": {"n": 1}}"#],
        ),
        (json!({ "type": "string", "maxLength": 2.0 }), vec!["\"ab\""], vec!["\"abc\""]),
    ];
    for (schema, good, bad) in cases {
        let source = grammars.compile(&Grammar::Schema(schema.clone()), Opening::Answer).unwrap();
        for text in good {
            assert!(takes(&own, &source, text), "{schema}: {text}");
        }
        for text in bad {
            // One that is not whole would be refused in any case.
            assert!(serde_json::from_str::<Value>(text).is_ok(), "{schema}: {text}");
            assert!(!takes(&own, &source, text), "{schema}: {text}");
        }
    }
    // What cannot be said otherwise is refused by its name, and what is not there by its own.
    for (schema, name) in [
        (json!({ "not": { "format": "uri" } }), "not"),
        (
            json!({ "type": "array", "contains": { "format": "uri" }, "maxContains": 1 }),
            "maxContains",
        ),
        (json!({ "type": "string", "pattern": "^(a)\\1$" }), "backreferences are not supported"),
        (
            json!({ "type": "array", "uniqueItems": true, "minItems": 2,
                "prefixItems": [{ "type": "string" }, { "const": "a" }] }),
            "uniqueItems",
        ),
        (
            json!({ "type": "array", "uniqueItems": true, "minItems": 2,
                "items": { "enum": [1, 2, 3], "if": { "minimum": 2 }, "then": false, "format": "x" } }),
            "uniqueItems",
        ),
        (json!({ "$ref": "other.json" }), "other.json"),
        (json!({ "$ref": "#nowhere" }), "#nowhere"),
    ] {
        let refused = grammars.compile(&Grammar::Schema(schema), Opening::Answer).unwrap_err();
        assert!(refused.to_string().contains(name), "{refused}");
    }
}

/// What must come next is known at once, in the tokens that the tokenizer makes of it, as far as it
/// is asked for.
#[test]
fn text_that_must_come_is_known_ahead_in_the_tokenizers_own_tokens() {
    let schema = json!({
        "type": "object",
        "properties": {
            "kind": { "const": "measurement of a temperature" },
            "value": { "type": "integer" },
        },
        "required": ["kind", "value"],
        "additionalProperties": false,
    });
    let whole = "{\"kind\": \"measurement of a temperature\", \"value\":";
    for own in [gpt2(), llama2(), qwen2()].into_iter().flatten() {
        let (tokenizer, end) = &own;
        let schema = Grammar::Schema(schema.clone());
        let source = grammars(&own).compile(&schema, Opening::Answer).unwrap();
        let at_once = source.start().unwrap().forced(usize::MAX).unwrap();
        let text = tokenizer.decode(&at_once, false);
        // A blank and a digit may be one token: that is the model's choice.
        assert!(text.starts_with(whole) && text.len() <= whole.len() + 1, "{text:?}");
        // Behind a line's end, where no tokenizer puts a blank in front.
        let line = format!("\n{text}");
        assert!(tokenizer.encode(&line, Special::default()).unwrap().ends_with(&at_once));
        // Few at a time it is the same text, and single tokens are allowed alone.
        let mut constraint = source.start().unwrap();
        let mut ids = constraint.forced(2).unwrap();
        assert_eq!(ids.len(), 2);
        let mut allowed = TokenSet::new(tokenizer.vocab_size());
        while ids.len() < at_once.len() {
            allowed.clear();
            constraint.allow(usize::MAX, &mut allowed).unwrap();
            assert!(allowed.contains(at_once[ids.len()]) && !allowed.contains(*end));
            ids.push(constraint.accept(at_once[ids.len()]).unwrap());
            ids.extend(constraint.forced(1).unwrap());
        }
        assert_eq!(ids, at_once);
        let rest = if text.len() > whole.len() { "42}" } else { " 42}" };
        let rest = tokenizer.encode(&format!("\n{text}{rest}"), Special::default()).unwrap();
        let first = rest.windows(at_once.len()).position(|part| part == at_once).unwrap();
        for id in &rest[first + at_once.len()..] {
            assert!(constraint.forced(usize::MAX).unwrap().is_empty());
            allowed.clear();
            constraint.allow(usize::MAX, &mut allowed).unwrap();
            assert!(allowed.contains(*id), "{}", tokenizer.token_text(*id));
            constraint.accept(*id).unwrap();
        }
        // Whether it ends is not put there.
        assert!(constraint.forced(usize::MAX).unwrap().is_empty());
    }
}

/// Where what follows may join what is forced, the model chooses the token; where the whole answer
/// is forced, all of it is put there; and special tokens are put between texts.
#[test]
fn what_may_join_what_follows_is_left_to_the_model() {
    let Some(own) = qwen2() else { return };
    let grammars = grammars(&own);
    let forced = |grammar: &str| {
        let source = grammars.compile(&Grammar::of_text(grammar), Opening::Answer).unwrap();
        let tokens = source.start().unwrap().forced(usize::MAX).unwrap();
        tokens.into_iter().map(|token| own.0.token_text(token)).collect::<Vec<_>>()
    };
    let cases = [
        // " measure" and " measured" are tokens.
        (r#"start: "to measure" /d|s/ "!""#, vec!["to"]),
        (r#"start: "to measure" /[0-9]/ "!""#, vec!["to", " measure"]),
        (r#"start: "to measure it""#, vec!["to", " measure", " it"]),
        (r#"start: "to" <|im_start|> "measure" /d|s/"#, vec!["to", "<|im_start|>"]),
        (r#"start: /a|b/ "to measure it""#, vec![]),
    ];
    for (grammar, expected) in cases {
        assert_eq!(forced(grammar), expected, "{grammar}");
    }
}

/// A thousand optional properties, and an enumeration of many thousand values, as published schemas
/// have them.
#[test]
fn much_is_followed() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let many: serde_json::Map<String, Value> =
        (0..1000).map(|i| (format!("k{i}"), json!({ "type": "null" }))).collect();
    let listed: Vec<String> = (0..20_000).map(|i| format!("value {i}")).collect();
    let cases = [
        (
            json!({ "type": "object", "properties": many, "additionalProperties": false }),
            vec!["{}", r#"{"k7": null, "k123": null, "k999": null}"#],
            r#"{"k1000": null}"#,
        ),
        (json!({ "enum": listed }), vec!["\"value 7\"", "\"value 19999\""], "\"value 20000\""),
    ];
    for (schema, good, bad) in cases {
        let source = grammars.compile(&Grammar::Schema(schema), Opening::Answer).unwrap();
        assert!(good.iter().all(|text| takes(&own, &source, text)));
        assert!(serde_json::from_str::<Value>(bad).is_ok(), "{bad}");
        assert!(!takes(&own, &source, bad));
    }
}

/// What llguidance says in words of its own.
#[test]
fn reasons_are_told_in_plain_words() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let many: serde_json::Map<String, Value> =
        (0..3100).map(|i| (format!("k{i}"), json!(true))).collect();
    let many = json!({ "type": "object", "properties": many, "additionalProperties": false });
    let alike = json!({ "oneOf": [{ "type": "string", "format": "uri" }, { "type": "string", "format": "email" }] });
    for (schema, expected) in [
        (json!({ "$ref": "#" }), "nothing but itself"),
        (many, "at most 3000 properties of one object"),
        (alike, "oneOf, whose branches cannot be told apart"),
    ] {
        let source = grammars.compile(&Grammar::Schema(schema), Opening::Answer);
        let tried = source.and_then(|source| {
            let (mut text, size) = (source.start()?, own.0.vocab_size());
            let mut allowed = TokenSet::new(size);
            for _ in 0..24 {
                allowed.clear();
                text.allow(usize::MAX, &mut allowed)?;
                let token = (0..size as u32).find(|token| allowed.contains(*token));
                text.accept(token.unwrap())?;
            }
            Ok(())
        });
        let refused = tried.expect_err(expected).to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

/// Few different items may be had: each is the last token of its own, and no text comes to a place
/// behind which there is none.
#[test]
fn different_items_lead_nowhere_too_late() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    for items in [
        json!({ "type": "integer", "minimum": 0, "maximum": 9 }),
        json!({ "type": "string", "pattern": "^[a-e]$" }),
        json!({ "type": "string", "pattern": "^(yes|yeah|yep|no|nope)$" }),
        json!({ "type": "integer", "minimum": 7, "maximum": 14 }),
        json!({ "type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25 }),
        json!({ "type": "object", "properties": { "one": { "type": "boolean" }, "two": { "const": "longer" } },
            "required": ["one"], "additionalProperties": false }),
        json!({ "type": "array", "items": { "type": "boolean" }, "maxItems": 2 }),
    ] {
        let schema = json!({ "type": "array", "uniqueItems": true, "items": items, "minItems": 4 });
        let source = grammars.compile(&Grammar::Schema(schema), Opening::Answer).unwrap();
        for seed in 0..12 {
            let (text, whole) = write(&own, &source, seed);
            let read: Vec<Value> = serde_json::from_str(&text).unwrap();
            let again = |i: usize| read[..i].contains(&read[i]);
            assert!(whole && !(0..read.len()).any(again), "{text}");
        }
    }
}
