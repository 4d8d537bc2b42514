//! `delft replay`: asks again what a server recorded, and tells what is answered otherwise: from
//! which token on, and whether another build, model or setting answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufReader;

use delft::Error;
use delft::formats::text;
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

/// Longest line, in bytes: a request and its answer, which the server bounds far below.
const LONGEST: u64 = 256 << 20;

/// Longest part of a value that is shown.
const SHOWN: usize = 60;

/// Paths that change something, or whose answers are about what is no more.
const PASSED: [&str; 4] = ["/api/pull", "/api/copy", "/api/delete", "/sessions"];

pub(crate) fn run(args: &Replay) -> Outcome {
    let client = Client::new(&args.address)?;
    let place = args.file.display();
    let file = std::fs::File::open(&args.file).map_err(|error| Error::io(place, error))?;
    let (mut asked, mut differing, mut passed) = (0, 0, 0);
    let mut now = Now { client: &client, models: BTreeMap::new() };
    // Changes that were told.
    let mut told_of = BTreeSet::new();
    let (mut lines, mut number) = (BufReader::new(file), 0);
    loop {
        number += 1;
        let place = format!("{}:{number}", args.file.display());
        let Some(line) = text::line(&mut lines, &place, LONGEST)? else { break };
        let record: Value = serde_json::from_slice(&line)
            .map_err(|error| no_json(&place, "a JSON object", &error))?;
        let wrong = |field: &str| Error::new(&place, format!("a request with its {field}"), "none");
        let path = record["path"].as_str().ok_or_else(|| wrong("path"))?;
        let request = record.get("request").ok_or_else(|| wrong("request"))?;
        // A request that was cut off has no answer to compare with; one that changes the store is
        // not sent twice.
        let passes = PASSED.contains(&path) || path.starts_with("/sessions/");
        if record["whole"] != true || record["method"] != "POST" || passes {
            passed += 1;
            continue;
        }
        asked += 1;
        let body = request.as_str().map_or_else(|| request.to_string(), str::to_string);
        let mut headers = vec![("x-delft-tokens", "1")];
        headers.extend(record["seed"].as_str().map(|seed| ("x-delft-seed", seed)));
        let answer = client.post(path, &body, &headers)?;
        let told = objects(&answer.json());
        let was = objects(&record["response"]);
        let mut found = difference("", &settled(&was), &settled(&told));
        if record["status"] != answer.status {
            found = Some(format!("status: {}, now {}", record["status"], answer.status));
        }
        let parting = found.as_ref().and_then(|_| parting(&record["texts"], &texts(&told)));
        let changed = now.changed(&record)?;
        for change in changed.iter().filter(|_| !args.json) {
            let line = harmless(&format!("{}: {change}", text(&record, "model")));
            if told_of.insert(line.clone()) {
                aside(line);
            }
        }
        differing += usize::from(found.is_some());
        tell(args, &record, &Verdict { found, parting, changed })?;
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

/// The outcome of asking one request again.
struct Verdict {
    /// The first place in which the answers differ.
    found: Option<String>,
    /// Where the tokens of a text part.
    parting: Option<Parting>,
    /// Differences of the build, the model and its settings, a text each.
    changed: Vec<String>,
}

fn tell(args: &Replay, record: &Value, verdict: &Verdict) -> Outcome {
    let Verdict { found, parting, changed } = verdict;
    if args.json {
        return print_json_line(&json!({
            "id": record["id"],
            "path": record["path"],
            "model": record["model"],
            "same": found.is_none(),
            "difference": found,
            "parting": parting.as_ref().map(Parting::to_json),
            "changed": changed,
        }));
    }
    let told = match (found, parting) {
        (None, _) => "same".to_string(),
        (Some(found), None) => found.clone(),
        (Some(found), Some(parting)) => format!("{parting}; {found}"),
    };
    let [id, path, model] = ["id", "path", "model"].map(|key| text(record, key));
    print(&(harmless(&format!("{id} {path} {model}: {told}")) + "\n"))
}

/// A field of a record that is a text; empty if it is none.
fn text<'a>(record: &'a Value, key: &str) -> &'a str {
    record[key].as_str().unwrap_or_default()
}

/// The server that answers now, which is asked once about each model.
struct Now<'a> {
    client: &'a Client,
    /// The server's description of each model, by name.
    models: BTreeMap<String, Value>,
}

impl Now<'_> {
    /// Differences of the build, the model and its settings since the record was made.
    fn changed(&mut self, record: &Value) -> Outcome<Vec<String>> {
        let Some(name) = record["model"].as_str() else { return Ok(Vec::new()) };
        if !self.models.contains_key(name) {
            let props = self.client.get("/props")?.json();
            let listed = props["models"].as_array().into_iter().flatten();
            let mut own = listed.filter(|own| own["model"] == name).cloned();
            let mut own = own.next().unwrap_or(Value::Null);
            own["build"] = props["build"].clone();
            self.models.insert(name.to_string(), own);
        }
        let own = &self.models[name];
        // A model that the server does not have has no description to compare with.
        let now = |key: &str| own.get(key).filter(|now| !now.is_null());
        let brief = |value: &Value| value.to_string().chars().take(SHOWN).collect::<String>();
        let change = |(key, was): (&str, &Value)| {
            let now = now(key).filter(|now| !was.is_null() && *now != was)?;
            Some(format!("{key}: {}, now {}", brief(was), brief(now)))
        };
        let of_record = ["build", "fingerprint"].map(|key| (key, &record[key]));
        let settings = record["settings"].as_object().into_iter().flatten();
        let settings = settings.flat_map(|(key, value)| match value {
            // Each setting by itself.
            Value::Object(_) => difference(key, value, now(key)?),
            _ => change((key.as_str(), value)),
        });
        Ok(of_record.into_iter().filter_map(change).chain(settings).collect())
    }
}

/// Where the tokens of a text begin to differ.
#[derive(Debug, PartialEq)]
struct Parting {
    /// The index of the text among the texts of its request.
    text: u64,
    what: Part,
    /// The first that differs, counted from zero.
    at: usize,
    was: Option<u64>,
    now: Option<u64>,
    /// Tokens of the prompt that were found computed, then and now.
    cached: [u64; 2],
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Part {
    Seed,
    Prompt,
    Answer,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Seed => "seed",
            Part::Prompt => "prompt",
            Part::Answer => "answer",
        }
    }
}

impl Parting {
    fn to_json(&self) -> Value {
        let Parting { text, what, at, was, now, cached } = self;
        json!({ "text": text, "of": what.name(), "token": at, "was": was, "now": now,
            "cached": { "was": cached[0], "now": cached[1] } })
    }
}

impl std::fmt::Display for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Parting { text, what, at, was, now, cached: [before, after] } = self;
        let id = |id: &Option<u64>| id.map_or("none".to_string(), |id| id.to_string());
        if *what == Part::Seed {
            return write!(f, "text {text}: seed {}, now {}", id(was), id(now));
        }
        let (what, was, now) = (what.name(), id(was), id(now));
        write!(f, "text {text}: token {at} of its {what} is {was}, now {now}")?;
        // Cached tokens of an earlier answer were decoded, and may differ in their last bits.
        if before != after {
            write!(f, " ({before} of its prompt's tokens were found computed, now {after})")?;
        }
        Ok(())
    }
}

/// Where the tokens of two answers part: in the first text in which they do.
fn parting(was: &Value, now: &[Value]) -> Option<Parting> {
    was.as_array()?.iter().find_map(|was| {
        let now = now.iter().find(|now| now["index"] == was["index"])?;
        let found = |what, at, pair: [Option<u64>; 2]| Parting {
            text: was["index"].as_u64().unwrap_or_default(),
            what,
            at,
            was: pair[0],
            now: pair[1],
            cached: [was, now].map(|text| text["cached"].as_u64().unwrap_or_default()),
        };
        let prompt = apart(&was["prompt"], &now["prompt"]);
        let seed = || {
            let pair = [was, now].map(|text| text["seed"].as_str()?.parse().ok());
            (pair[0] != pair[1]).then(|| found(Part::Seed, 0, pair))
        };
        let answer = || apart(&was["tokens"], &now["tokens"]);
        prompt
            .map(|(at, pair)| found(Part::Prompt, at, pair))
            .or_else(seed)
            .or_else(|| answer().map(|(at, pair)| found(Part::Answer, at, pair)))
    })
}

/// The first place in which two lists of tokens differ, and what stands there.
fn apart(was: &Value, now: &Value) -> Option<(usize, [Option<u64>; 2])> {
    let (was, now) = (was.as_array()?, now.as_array()?);
    let at = was.iter().zip(now).take_while(|(was, now)| was == now).count();
    let there = [was, now].map(|list| list.get(at).and_then(Value::as_u64));
    (there != [None; 2]).then_some((at, there))
}

/// The tokens of an answer's texts, as the server tells of them where it is asked to.
fn texts(answer: &Value) -> Vec<Value> {
    match answer {
        Value::Array(list) => list.iter().flat_map(texts).collect(),
        Value::Object(object) => {
            let own = object.get("delft").and_then(|own| own.get("text")).cloned();
            own.into_iter().chain(object.values().flat_map(texts)).collect()
        }
        _ => Vec::new(),
    }
}

/// An answer whose stream, if it is one, is a list of its objects.
fn objects(answer: &Value) -> Value {
    let Value::String(text) = answer else { return answer.clone() };
    let object = |line: &str| {
        let line = line.strip_prefix("data: ").unwrap_or(line);
        serde_json::from_str::<Value>(line).ok().filter(Value::is_object)
    };
    let mut objects: Vec<Value> = text.lines().filter_map(object).collect();
    // Several texts of one stream take turns as they come.
    objects.sort_by_key(|object| object["choices"][0]["index"].as_u64());
    if objects.is_empty() { answer.clone() } else { objects.into() }
}

/// An answer without what differs each time.
fn settled(answer: &Value) -> Value {
    match answer {
        Value::Array(list) => list.iter().map(settled).collect(),
        Value::Object(object) => {
            let kept = object.iter().filter(|(name, _)| !PASSING.contains(&name.as_str()));
            let kept: Map<String, Value> =
                kept.map(|(name, value)| (name.clone(), settled(value))).collect();
            kept.into()
        }
        other => other.clone(),
    }
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
            settled(&objects(&Value::from(format!(
                ": waiting\n\ndata: {{\"id\":\"{last}\",\"a\":1}}\n\ndata: {{\"a\":\"{last}\"}}\n\ndata: [DONE]\n"
            ))))
        };
        assert_eq!(stream("x"), json!([{ "a": 1 }, { "a": "x" }]));
        assert_eq!(difference("", &stream("x"), &stream("x")), None);
        assert!(difference("", &stream("x"), &stream("y")).unwrap().starts_with("[1].a: "));
        let shorter = json!([{ "a": 1 }]);
        assert_eq!(difference("", &stream("x"), &shorter).unwrap(), ": 2 of them, now 1");
        assert!(difference("", &json!({}), &json!({ "b": 1 })).unwrap().starts_with("b: "));
    }

    #[test]
    fn texts_part_at_their_prompt_then_their_seed_then_a_token() {
        let text = |index: u64, seed: &str, prompt: &[u32], tokens: &[u32], cached: u64| json!({ "index": index, "seed": seed, "prompt": prompt, "tokens": tokens, "cached": cached });
        let whole = text(0, "7", &[1, 2], &[5, 6, 7], 0);
        let told = |was: &[&Value], now: &Value| {
            let now = texts(&json!([{ "a": [] }, { "delft": { "text": now } }]));
            parting(&was.iter().copied().cloned().collect(), &now)
                .map(|parting| parting.to_string())
        };
        assert_eq!(told(&[&whole], &whole), None);
        let cases = [
            (text(0, "7", &[1, 2], &[5, 9, 7], 0), "token 1 of its answer is 6, now 9"),
            (text(0, "7", &[1, 2], &[5, 6], 0), "token 2 of its answer is 7, now none"),
            (
                text(0, "7", &[1, 2], &[8], 1),
                "token 0 of its answer is 5, now 8 (0 of its prompt's tokens were found computed, now 1)",
            ),
            (text(0, "8", &[1, 2], &[9], 0), "seed 7, now 8"),
            (text(0, "8", &[1, 2, 3], &[9], 0), "token 2 of its prompt is none, now 3"),
        ];
        for (now, expected) in cases {
            assert_eq!(told(&[&whole], &now).unwrap(), format!("text 0: {expected}"));
        }
        let other = text(3, "7", &[1], &[5], 0);
        let now = text(3, "7", &[1], &[6], 0);
        let expected = "text 3: token 0 of its answer is 5, now 6";
        assert_eq!(told(&[&whole, &other], &now).unwrap(), expected);
        // A server that tells no tokens.
        assert_eq!(parting(&json!([whole]), &texts(&json!({ "delft": {} }))), None);
    }
}
