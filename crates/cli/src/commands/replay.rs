//! `delft replay`: asks again what a server recorded, and tells what is answered otherwise.

use std::io::{BufRead, BufReader};

use delft::Error;
use serde_json::{Map, Value, json};

use crate::args::Replay;
use crate::client::Client;
use crate::terminal::{Outcome, aside, harmless, no_json, print, print_json_line};

/// Fields of answers that differ from one time to the next: names, times, and what was found in the
/// cache.
const PASSING: [&str; 19] = [
    "id",
    "item_id",
    "call_id",
    "created",
    "created_at",
    "completed_at",
    "previous_response_id",
    "total_duration",
    "load_duration",
    "prompt_eval_duration",
    "eval_duration",
    "prompt_tokens_details",
    "input_tokens_details",
    "input_tokens",
    "cache_read_input_tokens",
    "expires_at",
    "modified_at",
    "time",
    "delft",
];

/// Longest part of a value that is shown.
const SHOWN: usize = 60;

pub(crate) fn run(args: &Replay) -> Outcome {
    let client = Client::new(&args.address)?;
    let place = args.file.display();
    let file = std::fs::File::open(&args.file).map_err(|error| Error::io(place, error))?;
    let (mut asked, mut differing, mut passed) = (0, 0, 0);
    for (i, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|error| Error::io(args.file.display(), error))?;
        let place = format!("{}:{}", args.file.display(), i + 1);
        let record: Value = serde_json::from_str(&line)
            .map_err(|error| no_json(&place, "a JSON object", &error))?;
        let wrong = |field: &str| Error::new(&place, format!("a request with its {field}"), "none");
        let path = record["path"].as_str().ok_or_else(|| wrong("path"))?;
        let request = record.get("request").ok_or_else(|| wrong("request"))?;
        // A request that was cut off has no answer to compare with; one that changes the store is
        // not sent twice.
        let changes = ["/api/pull", "/api/copy", "/api/delete"].contains(&path);
        if record["whole"] != true || record["method"] != "POST" || changes {
            passed += 1;
            continue;
        }
        asked += 1;
        let body = request.as_str().map_or_else(|| request.to_string(), str::to_string);
        let seed = record["seed"].as_str().map(|seed| ("x-delft-seed", seed));
        let answer = client.post(path, &body, seed.as_slice())?;
        let was = settled(&record["response"]);
        let mut found = difference("", &was, &settled(&answer.json()));
        if record["status"] != answer.status {
            found = Some(format!("status: {}, now {}", record["status"], answer.status));
        }
        differing += usize::from(found.is_some());
        tell(args, &record, found)?;
    }
    if !args.json {
        aside(format_args!(
            "{asked} asked again, {differing} answered otherwise, {passed} passed over"
        ));
    }
    if differing > 0 {
        let found = format!("{differing} of {asked} that differ");
        return Err(Error::new(args.file.display(), "the same answers", found).into());
    }
    Ok(())
}

fn tell(args: &Replay, record: &Value, found: Option<String>) -> Outcome {
    if args.json {
        return print_json_line(&json!({
            "id": record["id"],
            "path": record["path"],
            "model": record["model"],
            "same": found.is_none(),
            "difference": found,
        }));
    }
    let text = |key: &str| harmless(record[key].as_str().unwrap_or_default());
    let verdict = found.map_or_else(|| "same".to_string(), |found| harmless(&found));
    print(&format!("{} {} {}: {verdict}\n", text("id"), text("path"), text("model")))
}

/// An answer without what differs each time. Streams become lists of their objects.
fn settled(answer: &Value) -> Value {
    match answer {
        Value::String(text) => {
            let object = |line: &str| {
                let line = line.strip_prefix("data: ").unwrap_or(line);
                serde_json::from_str::<Value>(line).ok().filter(Value::is_object)
            };
            let mut objects: Vec<Value> =
                text.lines().filter_map(object).map(|object| settled(&object)).collect();
            // Several texts of one stream take turns as they come.
            objects.sort_by_key(|object| object["choices"][0]["index"].as_u64());
            if objects.is_empty() { answer.clone() } else { objects.into() }
        }
        Value::Array(list) => list.iter().map(settled).collect(),
        Value::Object(object) => {
            let kept = object.iter().filter(|(name, _)| !PASSING.contains(&name.as_str()));
            let kept: Map<String, Value> =
                kept.map(|(name, value)| (name.clone(), settled_field(value))).collect();
            kept.into()
        }
        other => other.clone(),
    }
}

/// A field of an answer: its text is no stream.
fn settled_field(value: &Value) -> Value {
    if value.is_string() { value.clone() } else { settled(value) }
}

/// The first place in which two answers differ.
fn difference(place: &str, was: &Value, now: &Value) -> Option<String> {
    let at = |name: &str| {
        if place.is_empty() { name.to_string() } else { format!("{place}.{name}") }
    };
    match (was, now) {
        (Value::Object(was), Value::Object(now)) => {
            let changed = was.iter().find_map(|(name, value)| {
                difference(&at(name), value, now.get(name).unwrap_or(&Value::Null))
            });
            let added = || now.iter().find(|(name, _)| !was.contains_key(*name));
            changed.or_else(|| added().map(|(name, value)| told(&at(name), &Value::Null, value)))
        }
        (Value::Array(was), Value::Array(now)) => {
            let pairs = was.iter().zip(now).enumerate();
            let changed = pairs
                .into_iter()
                .find_map(|(i, (was, now))| difference(&format!("{place}[{i}]"), was, now));
            let lengths = || format!("{place}: {} of them, now {}", was.len(), now.len());
            changed.or_else(|| (was.len() != now.len()).then(lengths))
        }
        (was, now) => (was != now).then(|| told(place, was, now)),
    }
}

/// Two values, each from where they begin to differ.
fn told(place: &str, was: &Value, now: &Value) -> String {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let (was, now) = (text(was), text(now));
    let same = was.chars().zip(now.chars()).take_while(|(a, b)| a == b).count();
    let from = same.saturating_sub(SHOWN / 2);
    let part = |text: &str| text.chars().skip(from).take(SHOWN).collect::<String>();
    format!("{place}: from character {same}: {:?}, now {:?}", part(&was), part(&now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_told_by_its_place() {
        let whole = |text: &str, id: &str| {
            settled(&json!({ "id": id, "choices": [{ "message": { "content": text } }], "usage": {
                "completion_tokens": 3, "prompt_tokens_details": { "cached_tokens": id.len() } } }))
        };
        assert_eq!(difference("", &whole("a kite", "1"), &whole("a kite", "22")), None);
        assert_eq!(
            difference("", &whole("a kite", "1"), &whole("a kit", "1")).unwrap(),
            "choices[0].message.content: from character 5: \"a kite\", now \"a kit\""
        );
        let stream = |last: &str| {
            settled(&Value::from(format!(
                ": waiting\n\ndata: {{\"id\":\"{last}\",\"a\":1}}\n\ndata: {{\"a\":\"{last}\"}}\n\ndata: [DONE]\n"
            )))
        };
        assert_eq!(stream("x"), json!([{ "a": 1 }, { "a": "x" }]));
        assert_eq!(difference("", &stream("x"), &stream("x")), None);
        assert!(difference("", &stream("x"), &stream("y")).unwrap().starts_with("[1].a: "));
        let shorter = json!([{ "a": 1 }]);
        assert_eq!(difference("", &stream("x"), &shorter).unwrap(), ": 2 of them, now 1");
        assert!(difference("", &json!({}), &json!({ "b": 1 })).unwrap().starts_with("b: "));
    }
}
