//! Texts whose tokens run out.

use super::{gpt2, grammars};
use delft_structured::Grammar;
use engine::reasoning::Opening;
use engine::{ConstraintSource, TokenSet};
use serde_json::{Value, json};
use std::sync::Arc;
use tokens::Tokenizer;

/// Writes a text of at most `most` tokens by chance alone; what it says, whether it came to its
/// end, and whether some of its tokens were there to bring it to it.
fn write(
    (tokenizer, end): &(Arc<Tokenizer>, u32),
    source: &ConstraintSource,
    seed: u64,
    most: usize,
) -> (String, bool, bool) {
    let mut constraint = source.start().unwrap();
    let mut allowed = TokenSet::new(tokenizer.vocab_size());
    let (mut ids, mut state) = (Vec::new(), seed.wrapping_mul(2).wrapping_add(1));
    let mut closing = false;
    for left in (1..=most).rev() {
        allowed.clear();
        constraint.allow(left, &mut allowed).unwrap();
        let all: Vec<u32> =
            (0..tokenizer.vocab_size() as u32).filter(|t| allowed.contains(*t)).collect();
        assert!(!constraint.is_closing() || all.len() == 1);
        closing |= constraint.is_closing();
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mut id = all[(state >> 33) as usize % all.len()];
        if id != *end {
            id = constraint.accept(id).unwrap();
            closing |= constraint.is_closing();
        }
        if id == *end {
            return (tokenizer.decode(&ids, false), true, closing);
        }
        ids.push(id);
    }
    (tokenizer.decode(&ids, false), false, closing)
}

#[test]
fn a_text_whose_tokens_run_out_is_brought_to_its_end() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let text = json!({ "type": "string", "minLength": 3 });
    let person = json!({
        "type": "object",
        "properties": { "name": text, "note": text, "age": { "type": "integer", "minimum": 100 } },
        "required": ["name", "note", "age"],
        "additionalProperties": false,
    });
    let tree = json!({
        "$ref": "#/$defs/tree",
        "$defs": { "tree": {
            "type": "object",
            "properties": {
                "left": { "anyOf": [{ "$ref": "#/$defs/tree" }, { "type": "null" }] },
                "leaf": { "enum": ["a long word that is written whole", "another"] },
            },
            "required": ["left", "leaf"],
            "additionalProperties": false,
        } },
    });
    let part = json!({ "type": "number", "minimum": 0.25, "maximum": 0.5 });
    let cases = [
        Grammar::Json,
        Grammar::Schema(json!(true)),
        Grammar::Schema(json!({ "type": "array", "items": person, "minItems": 2 })),
        Grammar::Schema(json!({ "type": "array", "items": person })),
        Grammar::Schema(person),
        Grammar::Schema(tree),
        Grammar::Schema(json!({ "type": "array", "items": part, "minItems": 3 })),
        Grammar::Schema(json!({ "type": "string", "pattern": "^[a-c]+-[0-9]{4}$" })),
        Grammar::Schema(json!({ "type": "string", "format": "date-time" })),
        Grammar::Schema(json!({ "type": "string", "format": "email" })),
        Grammar::Schema(
            json!({ "type": "string", "pattern": "^[a-z]+:[a-z/]+@([a-z]+\\.)+[a-z]{2,}$" }),
        ),
        Grammar::Regex("(yes|no)( [a-z]+)*[.!]".to_string()),
        Grammar::Gbnf("root ::= \"(\" root \")\" | [a-z]+".to_string()),
    ];
    for grammar in cases {
        let source = grammars.compile(&grammar, Opening::Answer).unwrap();
        let mut brought = 0;
        for (seed, most) in (0..4).flat_map(|seed| [(seed, 64), (seed, 200)]) {
            let (text, whole, closing) = write(&own, &source, seed, most);
            if whole && !matches!(grammar, Grammar::Regex(_) | Grammar::Gbnf(_)) {
                let read = serde_json::from_str::<Value>(&text).err();
                // A number by chance may be longer than what an f64 holds.
                let wrong = read.filter(|error| !error.to_string().contains("out of range"));
                assert!(wrong.is_none(), "{text}: {wrong:?}");
            }
            assert!(whole, "{most} tokens were too few: {text}");
            brought += usize::from(closing);
        }
        // The others' texts are short whatever is written.
        let open = [Grammar::Json, Grammar::Schema(json!(true))].contains(&grammar);
        assert!(!open || brought > 4, "{grammar:?}: {brought} of 8");
    }
}

/// Ends that a walk finds only if it knows which letters lead there, or turns back where it goes
/// round for ever.
#[test]
fn far_ends_are_reached() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let pattern = |pattern: &str| json!({ "type": "string", "pattern": pattern });
    let object = |fields: Value| {
        let required: Vec<&String> = fields.as_object().unwrap().keys().collect();
        json!({
            "type": "object", "properties": fields, "required": required,
            "additionalProperties": false,
        })
    };
    let expression = json!({ "$ref": "#/$defs/expression" });
    let operation = object(json!({
        "kind": { "const": "operation" }, "left": expression, "right": expression,
    }));
    let number = object(json!({ "kind": { "const": "number" }, "value": { "type": "integer" } }));
    let either = [&operation, &number];
    let calculation =
        json!({ "$ref": "#/$defs/expression", "$defs": { "expression": { "anyOf": either } } });
    let text = json!({ "type": "object", "properties": { "is": { "const": "text" } }, "required": ["is"], "additionalProperties": false });
    let part = json!({ "$ref": "#/$defs/part" });
    let page = json!({
        "$ref": "#/$defs/part",
        "$defs": { "part": { "anyOf": [
            object(json!({ "all": { "type": "array", "items": part, "minItems": 2 } })),
            object(json!({ "some": { "anyOf": [part, text] } })),
            object(json!({ "one": { "anyOf": [{ "type": "null" }, part] } })),
        ] } },
    });
    let unlike = |items: Value, least: usize| json!({ "type": "array", "items": items, "uniqueItems": true, "minItems": least, "maxItems": 6 });
    let cases = [
        pattern("including"),
        pattern("^(?=.*[A-Z])(?=.*[0-9])(?=.*[!?]).{8,}$"),
        pattern("^.{40}x"),
        pattern("[\u{e9}\u{20ac}]"),
        pattern("\"$"),
        json!({ "type": "string", "minLength": 100 }),
        pattern("^[\\p{Emoji_Presentation}]+$"),
        pattern("\\S-\\d{4}-[^a-z]+\\.end$"),
        json!({ "type": "object", "properties": { "note": pattern("(?:yes|no), sir") }, "required": ["note"] }),
        calculation,
        page,
        unlike(json!({ "enum": ["first", "second", "third"] }), 3),
        unlike(json!({ "type": "string" }), 4),
        unlike(json!({ "type": "integer" }), 4),
        unlike(
            object(json!({ "a": { "type": "integer", "minimum": 1 }, "b": { "type": "boolean" } })),
            4,
        ),
    ];
    let schemas = cases.into_iter().map(Grammar::Schema);
    let others = [
        Grammar::Regex("(?s:.*)the end".to_string()),
        Grammar::Lark(
            "start: sum \";\"\nsum: NUMBER (SIGN NUMBER)+\nNUMBER: /[0-9]+/\nSIGN: /[-+*]/"
                .to_string(),
        ),
        Grammar::Lark("start: (WORD \"\\n\")+ \"\\n\"\nWORD: /[a-z]+[0-9]?/".to_string()),
        Grammar::Gbnf("root ::= item+ \"done\"\nitem ::= [a-z]+ \"(\" root? \")\"".to_string()),
    ];
    for grammar in schemas.chain(others) {
        let source = grammars.compile(&grammar, Opening::Answer).unwrap();
        for (seed, most) in (0..4).flat_map(|seed| [(seed, 80), (seed, 200)]) {
            let (text, whole, _) = write(&own, &source, seed, most);
            assert!(whole, "{most} tokens were too few for {grammar:?}: {text}");
        }
    }
}

/// Reasoning that is marked by text, and not by tokens of its own, ends where the answer has room.
#[test]
fn reasoning_gives_way_to_the_answer() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let schema = Grammar::Schema(json!({
        "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"],
        "additionalProperties": false,
    }));
    let source = grammars.compile(&schema, Opening::Opened { close: "</think>" }).unwrap();
    for seed in 0..4 {
        let (text, whole, closing) = write(&own, &source, seed, 120);
        assert!(whole && closing, "{text}");
        let (_, answer) = text.split_once("</think>").unwrap();
        assert!(serde_json::from_str::<Value>(answer).unwrap()["n"].is_i64(), "{answer}");
    }
}
