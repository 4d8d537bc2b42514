//! `--schema` and `--grammar` with the bundled model.

use crate::common::delft;
use serde_json::{Value, json};

fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = delft().args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn answers_follow_a_schema_or_a_grammar() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let schema = json!({
        "type": "object",
        "properties": { "n": { "type": "integer", "minimum": 1, "maximum": 99 } },
        "required": ["n"],
        "additionalProperties": false,
    });
    let schema = file("schema.json", &schema.to_string());
    let (done, text, said) = run(&["run", "Tell me a number", "--schema", &schema, "-q"]);
    assert!(done, "{said}");
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!((1..=99).contains(&value["n"].as_u64().unwrap()), "{text}");

    let gbnf = file("grammar.gbnf", "root ::= \"<\" [a-c]{3} \">\"");
    let lark = file("grammar.lark", "start: \"<\" /[a-c]{3}/ \">\"");
    for grammar in [&gbnf, &lark] {
        let (done, text, said) =
            run(&["run", "--raw", "-p", "Once", "--grammar", grammar, "-q", "--no-echo"]);
        assert!(done, "{said}");
        let inner = text.trim().strip_prefix('<').and_then(|text| text.strip_suffix('>'));
        assert!(inner.is_some_and(|text| text.len() == 3), "{text}");
    }

    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": { "enum": ["a", "b"] } } });
    let lines = [
        json!({ "messages": [{ "role": "user", "content": "hi" }] }),
        json!({ "prompt": "Once", "response_format": format }),
        json!({ "prompt": "Once", "response_format": { "type": "json_schema" } }),
    ];
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    let requests = file("requests.jsonl", &lines.join("\n"));
    let (done, text, said) = run(&["batch", &requests, "--schema", &schema]);
    assert!(done, "{said}");
    let answers: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let value: Value = serde_json::from_str(answers[0]["text"].as_str().unwrap()).unwrap();
    assert!(value["n"].is_u64(), "{text}");
    assert!(["\"a\"", "\"b\""].contains(&answers[1]["text"].as_str().unwrap()), "{text}");
    assert!(answers[2]["error"].as_str().unwrap().contains("json_schema"), "{text}");

    let broken = file("broken.json", "{");
    let wrong = file("wrong.json", "{\"type\": \"nothing\"}");
    for (path, words) in [(&broken, "expected a JSON schema"), (&wrong, "schema: ")] {
        let (done, _, said) = run(&["run", "hi", "--schema", path]);
        assert!(!done && said.contains(words), "{said}");
    }
}
