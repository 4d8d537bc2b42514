//! Schemas and grammars made to hurt: each is refused, or costs little, and the next one works.

use super::{gpt2, grammars, takes, write};
use delft_structured::Grammar;
use engine::TokenSet;
use engine::reasoning::Opening;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The longest that a schema may take to be compiled or refused, and a step. Unoptimised builds
/// take several times as long.
const LONGEST: Duration = Duration::from_secs(10);

#[test]
fn hostile_ones_are_bounded() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let deep = (0..100).fold(json!({}), |inner, _| json!({ "type": "array", "items": inner }));
    let wide: serde_json::Map<String, Value> =
        (0..5000).map(|i| (format!("k{i}"), json!({ "type": "string" }))).collect();
    let half: serde_json::Map<String, Value> = wide.clone().into_iter().take(2000).collect();
    let twice =
        (0..40).fold(json!({ "type": "null" }), |inner, _| json!({ "anyOf": [inner, true] }));
    let doubling: serde_json::Map<String, Value> = (0..60)
        .map(|i| {
            let next = json!({ "$ref": format!("#/$defs/d{}", (i + 1) % 60) });
            (format!("d{i}"), json!({ "type": "array", "prefixItems": [next, next] }))
        })
        .collect();
    let apart = |i: usize| json!({ "type": "string", "pattern": format!("a.{{{i}}}b") });
    let all = |of: &dyn Fn(usize) -> Value| (0..30).map(of).collect::<Value>();
    let within = |i| json!({ "properties": { "a": { "items": apart(i) } } });
    let named = |i| json!({ "$ref": format!("#/$defs/d{i}") });
    let named_ones: serde_json::Map<String, Value> =
        (0..30).map(|i| (format!("d{i}"), apart(i))).collect();
    let truths: serde_json::Map<String, Value> =
        (0..8000).map(|i| (format!("k{i}"), json!(true))).collect();
    let halves: Value = (0..6)
        .map(|part| {
            let named = (0..600).map(|i| (format!("k{part}_{i}"), json!(true)));
            json!({ "properties": named.collect::<serde_json::Map<_, _>>() })
        })
        .collect();
    let chained = |of: &dyn Fn(Value) -> Value, many: usize| {
        let mut defined: serde_json::Map<String, Value> = (0..many)
            .map(|i| (format!("d{i}"), of(json!({ "$ref": format!("#/$defs/d{}", i + 1) }))))
            .collect();
        defined.insert(format!("d{many}"), json!({ "type": "null" }));
        Grammar::Schema(json!({ "$ref": "#/$defs/d0", "$defs": defined }))
    };
    let rules = |line: &dyn Fn(usize) -> String, many: usize| {
        (0..many).map(line).collect::<Vec<_>>().join("\n")
    };
    let listed = |from: usize| json!({ "enum": (from..from + 25_000).collect::<Vec<_>>() });
    let different = json!({ "type": "array", "uniqueItems": true, "items": false,
        "prefixItems": [{ "enum": (0..300).collect::<Vec<_>>() }, listed(0)] });
    let terminals: Vec<String> = (0..30).map(|i| format!("/.*a.{{{i}}}b.*/")).collect();
    let cases: Vec<(&str, Grammar)> = vec![
        ("together", Grammar::Schema(json!({ "allOf": all(&apart) }))),
        ("together within", Grammar::Schema(json!({ "allOf": all(&within) }))),
        ("together by name", Grammar::Schema(json!({ "allOf": all(&named), "$defs": named_ones }))),
        ("together in lark", Grammar::of_text(&format!("start: X\nX: {}", terminals.join(" & ")))),
        (
            "together in json",
            Grammar::of_text(&format!("start: %json {}", json!({ "allOf": all(&apart) }))),
        ),
        ("deep", Grammar::Schema(deep)),
        ("wide", Grammar::Schema(json!({ "type": "object", "properties": wide }))),
        ("half as wide", Grammar::Schema(json!({ "type": "object", "properties": half }))),
        // Chains, each of whose links leads to the next.
        ("any properties", Grammar::Schema(json!({ "type": "object", "properties": truths }))),
        ("properties of all", Grammar::Schema(json!({ "allOf": halves }))),
        ("names", chained(&|next| next, 4000)),
        ("lists", chained(&|next| json!({ "type": "array", "items": next }), 2000)),
        ("all of", chained(&|next| json!({ "allOf": [next] }), 2000)),
        ("not", chained(&|next| json!({ "not": next }), 2600)),
        (
            "rules",
            Grammar::of_text(&format!(
                "start: r0\n{}\nr4a38: \"a\"",
                rules(&|i| format!("r{i:x}: r{:x}", i + 1), 19_000)
            )),
        ),
        (
            "terminals",
            Grammar::of_text(&format!(
                "start: R0\n{}\nR38A4: \"a\"",
                rules(&|i| format!("R{i:X}: \"a\" R{:X}", i + 1), 14_500)
            )),
        ),
        (
            "rules of llama.cpp",
            Grammar::of_text(&format!(
                "root ::= r0\n{}\nr3e80 ::= \"a\"",
                rules(&|i| format!("r{i:x} ::= r{:x}", i + 1), 16_000)
            )),
        ),
        ("stars", Grammar::of_text(&format!("root ::= \"a\"{}", "*".repeat(100_000)))),
        // Many values.
        (
            "listed",
            Grammar::Schema(
                json!({ "enum": (0..60_000).map(|i| format!("value {i}")).collect::<Vec<_>>() }),
            ),
        ),
        ("listed twice", Grammar::Schema(json!({ "oneOf": [listed(0), listed(24_990)] }))),
        ("different", Grammar::Schema(different)),
        ("choices", Grammar::Schema(twice)),
        ("itself", Grammar::Schema(json!({ "$ref": "#" }))),
        ("doubling", Grammar::Schema(json!({ "$ref": "#/$defs/d0", "$defs": doubling }))),
        ("elsewhere", Grammar::Schema(json!({ "$ref": "http://example.com/schema" }))),
        ("large", Grammar::Schema(json!({ "const": "x".repeat(1 << 20) }))),
        ("many", Grammar::Schema(json!({ "type": "array", "minItems": 1_000_000_000 }))),
        ("long", Grammar::Schema(json!({ "type": "string", "minLength": 1_000_000_000 }))),
        (
            "pattern",
            Grammar::Schema(json!({ "type": "string", "pattern": "^(a|b|ab)*c{1,5000}$" })),
        ),
        ("furthest", Grammar::Schema(json!({ "type": "integer", "minimum": -1e300 }))),
        ("far", Grammar::Schema(json!({ "const": { "a": [i64::MIN] } }))),
        ("beyond", Grammar::Schema(json!({ "type": "number", "exclusiveMaximum": -1e19 }))),
        ("none", Grammar::Schema(json!(false))),
        ("wrong", Grammar::Schema(json!({ "type": "wrong" }))),
        ("repeated", Grammar::Regex("((a{1000}){1000}){1000}".to_string())),
        ("one letter", Grammar::of_text("start: \"a\"{1000000}")),
        ("one word", Grammar::of_text("start: X\nX: (\"ab\"{30000}){30000}")),
        ("one rule", Grammar::of_text("root ::= a{60000}\na ::= \"ab\" \"c\"")),
        ("states", Grammar::Regex("(.*a.{12}){12}b".to_string())),
        ("unclosed", Grammar::Regex("(((".to_string())),
        ("left", Grammar::of_text("root ::= root root | root | \"a\"")),
        ("endless", Grammar::of_text("root ::= a a a a\na ::= b b b b\nb ::= \"x\"? \"y\"? root?")),
        ("times", Grammar::of_text("root ::= (([a-z]{60000}){60000}){60000}")),
        ("lark", Grammar::of_text("start: /(/")),
        ("no", Grammar::of_text("")),
    ];
    for (name, grammar) in cases {
        let begun = Instant::now();
        let compiled = grammars.compile(&grammar, Opening::Answer);
        let took = begun.elapsed();
        assert!(took < LONGEST, "{name}: {took:?}");
        let outcome = match compiled {
            Err(error) => error.to_string(),
            Ok(source) => {
                let mut constraint = source.start().unwrap();
                let mut allowed = TokenSet::new(own.0.vocab_size());
                let begun = Instant::now();
                let mut steps = 0;
                let ended = loop {
                    allowed.clear();
                    if let Err(error) = constraint.forced(usize::MAX) {
                        break error.to_string();
                    }
                    if let Err(error) = constraint.allow(usize::MAX, &mut allowed) {
                        break error.to_string();
                    }
                    let next = (0..own.1).rev().find(|id| allowed.contains(*id));
                    let Some(next) = next.filter(|_| steps < 30) else {
                        break "goes on".to_string();
                    };
                    if let Err(error) = constraint.accept(next) {
                        break error.to_string();
                    }
                    steps += 1;
                };
                assert!(begun.elapsed() < 3 * LONGEST, "{name}: {:?}", begun.elapsed());
                format!("{steps} steps in {:?}, {ended}", begun.elapsed())
            }
        };
        println!("{name}: {took:?}: {outcome}");
        if name.starts_with("together") {
            assert!(outcome.contains("expected at most 12"), "{name}: {outcome}");
        }
        if name.contains("properties") {
            assert!(outcome.contains("at most 3000 properties"), "{name}: {outcome}");
        }
        if ["far", "beyond"].contains(&name) {
            let said = outcome.contains("expected a number from -9007199254740991");
            assert!(said, "{name}: {outcome}");
        }
        assert!(outcome.len() < 600 && !outcome.contains('\n'), "{name}: {outcome}");
    }
    // Nobody else has felt any of it.
    let source = grammars.compile(&Grammar::Json, Opening::Answer).unwrap();
    assert!(takes(&own, &source, "{\"a\": [1, {}]}"));
    assert!(write(&own, &source, 3).0.starts_with('{'));
}

/// Many patterns are no harm where they do not meet in one text.
#[test]
fn patterns_that_do_not_meet_are_followed() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let text = |i: usize| json!({ "type": "string", "pattern": format!("^x{i}&?$") });
    let object = |from: usize| {
        let properties: serde_json::Map<String, Value> =
            (from..from + 20).map(|i| (format!("p{i}"), text(i))).collect();
        json!({ "type": "object", "properties": properties })
    };
    let choice: Value = (0..30).map(text).collect();
    let both = json!({ "allOf": [object(0), object(20)], "additionalProperties": false });
    let either = json!({ "anyOf": choice });
    let schema = json!({ "type": "array", "prefixItems": [both, either] });
    let source = grammars.compile(&Grammar::Schema(schema), Opening::Answer).unwrap();
    assert!(takes(&own, &source, "[{}, \"x7\"]"));
    let lark = format!("start: {} // & & &\nA: /a/ & /[a-z]/", "\"&\" /[&]/ ".repeat(20) + "A");
    let source = grammars.compile(&Grammar::of_text(&lark), Opening::Answer).unwrap();
    assert!(takes(&own, &source, &("&&".repeat(20) + "a")));
}

/// Text without a choice and without an end is found in parts, each of which takes little, and all
/// of them are right.
#[test]
fn forced_text_that_does_not_end_is_found_in_parts() {
    let Some(own) = gpt2() else { return };
    let grammars = grammars(&own);
    let cases = [
        ("a", Grammar::Regex("((a{1000}){1000}){1000}".to_string())),
        ("no", Grammar::of_text("root ::= (\"no\"){60000} \".\"")),
        ("\u{1f980} ", Grammar::Regex("(\u{1f980} ){500000}".to_string())),
    ];
    for (word, grammar) in cases {
        let source = match grammars.compile(&grammar, Opening::Answer) {
            Ok(source) => source,
            Err(error) => panic!("{word}: {error}"),
        };
        let mut constraint = source.start().unwrap();
        let mut allowed = TokenSet::new(own.0.vocab_size());
        let (mut text, mut found) = (Vec::new(), 0);
        for _ in 0..10 {
            let begun = Instant::now();
            let mut tokens = constraint.forced(usize::MAX).unwrap();
            assert!(begun.elapsed() < LONGEST, "{word}: {:?}", begun.elapsed());
            found += tokens.len();
            allowed.clear();
            constraint.allow(usize::MAX, &mut allowed).unwrap();
            let next = (0..own.1).rev().find(|id| allowed.contains(*id)).unwrap();
            tokens.push(constraint.accept(next).unwrap());
            text.extend(tokens.iter().flat_map(|token| own.0.token_bytes(*token)));
        }
        assert!(found > 20, "{word}: {found}");
        assert!(word.repeat(text.len()).as_bytes().starts_with(&text), "{word}");
    }
}
