//! Bodies of requests, read by a table that says of every documented field what becomes of it.
//!
//! No setting is ignored in silence: a field is used; or accepted without effect on the answer, and
//! then named in a header of the response; or refused by name. A table holds all of an interface's
//! documented fields, and tests hold the tables against the fields that the official clients know.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde_json::{Map, Value};

use crate::problem::Problem;

/// Most fields without effect that are named.
const MOST_NOTED: usize = 64;

/// The fate of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has the effect that its documentation says.
    Used,
    /// It is accepted, and the answer is the same without it: accounting, caching and the like.
    NoEffect,
    /// It is refused with this reason, unless its value is one of these, written as JSON, which ask
    /// for nothing.
    Refused { why: &'static str, unless: &'static [&'static str] },
}

/// A documented field.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) fate: Fate,
}

/// A field that is used.
pub(crate) const fn used(name: &'static str) -> Field {
    Field { name, fate: Fate::Used }
}

/// A field without effect on the answer.
pub(crate) const fn no_effect(name: &'static str) -> Field {
    Field { name, fate: Fate::NoEffect }
}

/// A field that is refused, unless its value asks for nothing.
pub(crate) const fn refused(
    name: &'static str,
    why: &'static str,
    unless: &'static [&'static str],
) -> Field {
    Field { name, fate: Fate::Refused { why, unless } }
}

/// Objects of one `type` where several may stand, as among the parts of a message's content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    /// The fields that it may have, or why it is refused.
    pub(crate) read: Result<&'static [Field], &'static str>,
}

/// A variant that is read.
pub(crate) const fn variant(name: &'static str, fields: &'static [Field]) -> Variant {
    Variant { name, read: Ok(fields) }
}

/// A variant that is refused, for a reason of its own; one that no table has is refused as unknown.
pub(crate) const fn refused_variant(name: &'static str, why: &'static str) -> Variant {
    Variant { name, read: Err(why) }
}

/// The fate of fields that no table has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unknown {
    Refused,
    /// Accepted, and named in the header.
    Noted,
}

/// A JSON object whose fields are all known. Null is the same as a field that is left out.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    object: Map<String, Value>,
    unknown: Unknown,
    /// Fields that have no effect on the answer.
    without_effect: Arc<Mutex<Vec<String>>>,
    /// The messages left out of the prompt, where the request asks for them.
    cut: Arc<OnceLock<String>>,
}

impl Fields {
    /// Reads a body.
    ///
    /// # Errors
    /// No JSON object; a field that is refused or unknown.
    pub(crate) fn read(
        body: &[u8],
        table: &[&[Field]],
        unknown: Unknown,
    ) -> Result<Fields, Problem> {
        // Some shells put a mark of the order of bytes in front of what they pipe.
        let body = body.strip_prefix("\u{feff}".as_bytes()).unwrap_or(body);
        let whole = serde_json::from_slice(body);
        let value: Value = whole
            .or_else(|e| serde_json::from_slice(&without_halves(body).ok_or(e)?))
            .map_err(|e| Problem::bad(format!("the body: expected JSON, found {e}")))?;
        let Value::Object(object) = value else {
            return Err(Problem::bad(format!(
                "the body: expected a JSON object, found {}",
                kind(&value)
            )));
        };
        Fields::check(object, table, unknown)
    }

    /// The fields of an object that a table allows.
    pub(crate) fn check(
        mut object: Map<String, Value>,
        table: &[&[Field]],
        unknown: Unknown,
    ) -> Result<Fields, Problem> {
        object.retain(|_, value| !value.is_null());
        let mut without_effect = fates(&object, table, unknown)?;
        without_effect.truncate(MOST_NOTED);
        let without_effect = Arc::new(Mutex::new(without_effect));
        Ok(Fields { object, unknown, without_effect, cut: Arc::default() })
    }

    /// Checks an object within this one by its own table.
    ///
    /// # Errors
    /// No object; a field that is refused or unknown.
    pub(crate) fn allow(
        &self,
        place: &str,
        value: &Value,
        table: &[&[Field]],
    ) -> Result<(), Problem> {
        let Value::Object(object) = value else {
            let message = format!("expected an object, found {}", kind(value));
            return Err(Problem::field(place, message));
        };
        for field in fates(object, table, self.unknown).map_err(|e| e.within(place))? {
            self.note(&format!("{}.{field}", unnumbered(place)));
        }
        Ok(())
    }

    /// The fields of an object within this one that was checked; what has no effect is noted there.
    pub(crate) fn inner(&self, value: &Value) -> Fields {
        let mut object = value.as_object().cloned().unwrap_or_default();
        object.retain(|_, value| !value.is_null());
        let (without_effect, cut) = Default::default();
        Fields { object, unknown: self.unknown, without_effect, cut }
    }

    /// Checks an object that may be of several types by the table of its own; `usual` is meant
    /// where it names none. Returns the type.
    ///
    /// # Errors
    /// As [`Fields::allow`], and a type that is refused or unknown.
    pub(crate) fn variant(
        &self,
        place: &str,
        value: &Value,
        what: &str,
        variants: &[&[Variant]],
        usual: Option<&str>,
    ) -> Result<&'static str, Problem> {
        let refused = |message: String| {
            let problem = Problem::field(place, message);
            Problem { code: "unsupported_content", ..problem }
        };
        let name = match value.get("type") {
            Some(Value::String(name)) => Some(name.as_str()),
            None | Some(Value::Null) => usual,
            Some(_) => None,
        };
        let all = || variants.iter().flat_map(|part| part.iter());
        match all().find(|variant| Some(variant.name) == name) {
            Some(Variant { name, read: Ok(fields) }) => {
                self.allow(place, value, &[fields]).map(|()| *name)
            }
            Some(Variant { name, read: Err(why) }) => Err(refused(format!("{why} (type {name})"))),
            None => {
                if !value.is_object() {
                    self.allow(place, value, &[])?;
                }
                let read = all().filter(|variant| variant.read.is_ok()).map(|own| own.name);
                let expected = read.collect::<Vec<_>>().join(" or ");
                let found = name.map_or("no type".to_string(), shown);
                Err(refused(format!("expected {what} of type {expected}, found {found}")))
            }
        }
    }

    /// The fields of an object within this one, by its own table; `None` where it is left out.
    pub(crate) fn within(&self, name: &str, table: &[&[Field]]) -> Result<Option<Fields>, Problem> {
        let Some(object) = self.object(name)? else { return Ok(None) };
        let inner =
            Fields::check(object.clone(), table, self.unknown).map_err(|e| e.within(name))?;
        for field in inner.noted_so_far().iter() {
            self.note(&format!("{name}.{field}"));
        }
        Ok(Some(inner))
    }

    /// Notes a field that turns out to have no effect on this answer.
    pub(crate) fn note(&self, name: &str) {
        let mut noted = self.noted_so_far();
        if noted.len() < MOST_NOTED && !noted.iter().any(|own| own == name) {
            noted.push(name.to_string());
        }
    }

    fn noted_so_far(&self) -> MutexGuard<'_, Vec<String>> {
        self.without_effect.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how much was left out of the prompt.
    pub(crate) fn note_cut(&self, count: usize, what: &str) {
        if count > 0 {
            self.cut.get_or_init(|| format!("{count} {what}"));
        }
    }

    /// The messages left out of the prompt.
    pub(crate) fn cut(&self) -> Option<&str> {
        self.cut.get().map(String::as_str)
    }

    /// Names of fields without effect, joined as a header's value.
    pub(crate) fn noted(&self) -> Option<String> {
        let noted = self.noted_so_far();
        (!noted.is_empty()).then(|| noted.join(", "))
    }

    pub(crate) fn value(&self, name: &str) -> Option<&Value> {
        self.object.get(name)
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>, Problem> {
        self.typed(name, "a string", Value::as_str)
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, Problem> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn list(&self, name: &str) -> Result<Option<&Vec<Value>>, Problem> {
        self.typed(name, "a list", Value::as_array)
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&Map<String, Value>>, Problem> {
        self.typed(name, "an object", Value::as_object)
    }

    pub(crate) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f32>, Problem> {
        let expected = || match (*range.start(), *range.end()) {
            (low, f64::MAX) => format!("a number from {low} on"),
            (low, high) => format!("a number from {low} to {high}"),
        };
        let Some(value) = self.object.get(name) else { return Ok(None) };
        let number = value.as_f64().filter(|number| range.contains(number));
        number.map(|number| Some(number as f32)).ok_or_else(|| wrong(name, expected(), value))
    }

    /// A whole number of a range.
    pub(crate) fn whole(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, Problem> {
        let Some(value) = self.object.get(name) else { return Ok(None) };
        // Some clients write every number with a fraction.
        let fraction = || value.as_f64().filter(|n| n.fract() == 0.0 && n.abs() < 9e15);
        let whole = value.as_i64().or_else(|| fraction().map(|n| n as i64));
        let expected = match (*range.start(), *range.end()) {
            (low, i64::MAX) => format!("a whole number from {low} on"),
            (low, high) => format!("a whole number from {low} to {high}"),
        };
        let whole = whole.filter(|n| range.contains(n));
        whole.map(Some).ok_or_else(|| wrong(name, expected, value))
    }

    fn typed<'a, T>(
        &'a self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Problem> {
        let Some(value) = self.object.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(name, expected, value))
    }

    /// A value that must be there.
    pub(crate) fn needed<T>(&self, name: &str, value: Option<T>) -> Result<T, Problem> {
        value.ok_or_else(|| Problem::field(name, "expected a value, found none"))
    }
}

/// The fields of an object that have no effect, by a table; null is the same as left out.
///
/// # Errors
/// A field that is refused or unknown.
fn fates(
    object: &Map<String, Value>,
    table: &[&[Field]],
    unknown: Unknown,
) -> Result<Vec<String>, Problem> {
    let mut without_effect = Vec::new();
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let field = table.iter().flat_map(|part| part.iter()).find(|f| f.name == name);
        match field.map(|field| field.fate) {
            Some(Fate::Used) => {}
            Some(Fate::NoEffect) => without_effect.push(name.clone()),
            Some(Fate::Refused { unless, .. }) if asks_for_nothing(value, unless) => {}
            Some(Fate::Refused { why, .. }) => {
                let problem = Problem::field(name, format_args!("not supported: {why}"));
                return Err(Problem { code: "unsupported_field", ..problem });
            }
            None if unknown == Unknown::Noted => without_effect.push(shown(name)),
            None => {
                let problem = Problem::field(&shown(name), "there is no such field");
                return Err(Problem { code: "unknown_field", ..problem });
            }
        }
    }
    Ok(without_effect)
}

/// A place without the numbers of its lists, so that a thousand messages note a field once.
fn unnumbered(place: &str) -> String {
    let mut parts = place.split('[');
    let mut bare = parts.next().unwrap_or_default().to_string();
    for part in parts {
        bare.push('[');
        bare += part.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    bare
}

/// A value of the wrong type or range.
pub(crate) fn wrong(name: &str, expected: impl Display, value: &Value) -> Problem {
    let found = match value {
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::String(text) => format!("{:?}", shown(text)),
        other => kind(other).to_string(),
    };
    Problem::field(name, format_args!("expected {expected}, found {found}"))
}

fn asks_for_nothing(value: &Value, unless: &[&str]) -> bool {
    let empty = match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    };
    empty || unless.iter().any(|neutral| serde_json::from_str(neutral).ok().as_ref() == Some(value))
}

/// The type of a value, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The beginning of a stranger's text, fit for a line and a header.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let plain = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
    text.chars().take(LONGEST).map(plain).collect()
}

/// JSON with the sign for what cannot be read in place of halves of characters (`\ud83d` without
/// its other half), if it has any: programs that count text in units of 16 bits cut emoji in two.
fn without_halves(body: &[u8]) -> Option<Vec<u8>> {
    let unit = |at: usize| {
        let digits = body.get(at..)?.strip_prefix(b"\\u")?.get(..4)?;
        u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let (mut out, mut at, mut found) = (Vec::with_capacity(body.len()), 0, false);
    while let Some(&byte) = body.get(at) {
        let (first, second) = (unit(at), unit(at + 6));
        let is_half = first.is_some_and(|unit| (0xD800..0xE000).contains(&unit));
        let is_pair = first.is_some_and(|unit| unit < 0xDC00)
            && second.is_some_and(|unit| (0xDC00..0xE000).contains(&unit));
        let (written, length): (&[u8], usize) = match byte {
            b'\\' if is_half && is_pair => (&body[at..at + 12], 12),
            b'\\' if is_half => (b"\\ufffd", 6),
            // The sign behind may be another backslash.
            b'\\' => (&body[at..body.len().min(at + 2)], 2),
            _ => (&body[at..at + 1], 1),
        };
        found |= is_half && !is_pair;
        out.extend_from_slice(written);
        at += length;
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[Field] = &[
        used("temperature"),
        used("n"),
        used("inner"),
        no_effect("user"),
        refused("audio", "text only", &[r#"["text"]"#, "false"]),
    ];

    fn read(body: &str) -> Result<Fields, Problem> {
        Fields::read(body.as_bytes(), &[TABLE], Unknown::Refused)
    }

    #[test]
    fn halves_of_characters_are_no_reason_to_refuse() {
        for (sent, expected) in [
            (r#"{"user": "a\ud83d"}"#, "a\u{fffd}"),
            (r#"{"user": "\ude00\ud83d\ud83d\ude00"}"#, "\u{fffd}\u{fffd}\u{1f600}"),
            (r#"{"user": "\\ud83d \ud83d\n"}"#, "\\ud83d \u{fffd}\n"),
        ] {
            let fields = Fields::read(sent.as_bytes(), &[&[used("user")]], Unknown::Refused);
            assert_eq!(fields.unwrap().text("user").unwrap(), Some(expected), "{sent}");
        }
        assert!(read(r#"{"user": "\ud83d}"#).is_err());
    }

    #[test]
    fn fields_are_used_or_noted_or_refused() {
        let cases = [
            ("[]", "the body: expected a JSON object, found a list"),
            ("{", "the body: expected JSON, found EOF"),
            (r#"{"audio": {"voice": 1}}"#, "audio: not supported: text only"),
            (r#"{"temprature": 1}"#, "temprature: there is no such field"),
        ];
        for (body, message) in cases {
            assert!(read(body).unwrap_err().message.starts_with(message), "{body}");
        }
        for body in [r#"{"audio": ["text"]}"#, r#"{"audio": null}"#, r#"{"audio": {}}"#] {
            assert_eq!(read(body).unwrap().noted(), None);
        }
        assert_eq!(read("\u{feff}{\"user\": \"x\"}").unwrap().noted().unwrap(), "user");
        let noted = Fields::read(b"{\"x\\n\": 1}", &[TABLE], Unknown::Noted).unwrap();
        assert_eq!(noted.noted().unwrap(), "x?");
        let deep = "[".repeat(100_000);
        assert!(read(&deep).is_err());
    }

    /// The tables hold every field that the official clients know; see tests/clients/fields.py.
    #[test]
    fn every_documented_field_is_in_its_table() {
        use crate::{anthropic, embeddings, ollama, openai};
        let known: Value = serde_json::from_str(include_str!("../tests/fields.json")).unwrap();
        let beta: &[&[Field]] = &[anthropic::MESSAGES, anthropic::PROMPT, anthropic::BETA];
        let tables: [(&str, &[&[Field]]); 13] = [
            ("anthropic_beta_messages", beta),
            ("openai_chat", &[openai::chat::FIELDS]),
            ("openai_responses", &[openai::responses::FIELDS]),
            ("openai_responses_input_tokens", &[openai::responses::COUNTED]),
            ("openai_completions", &[openai::completions::FIELDS]),
            ("anthropic_messages", &[anthropic::MESSAGES, anthropic::PROMPT]),
            ("anthropic_count_tokens", &[anthropic::PROMPT]),
            ("ollama_chat", &[ollama::SHARED, ollama::CHAT]),
            ("ollama_generate", &[ollama::SHARED, ollama::GENERATE]),
            ("ollama_options", &[ollama::OPTIONS]),
            ("openai_embeddings", &[embeddings::OPENAI]),
            ("ollama_embed", &[embeddings::OLLAMA]),
            ("ollama_embeddings", &[embeddings::OLLAMA_ONE]),
        ];
        for (name, table) in tables {
            let fields = known[name].as_array().unwrap();
            assert!(fields.len() > 3, "{name}");
            for field in fields {
                let rows = table.iter().flat_map(|part| part.iter());
                let rows = rows.filter(|row| row.name == field).count();
                assert_eq!(rows, 1, "{name}: {field}");
            }
        }
    }

    /// The objects within requests, too: each documented type is read, with a row for each of its
    /// fields, or refused by its name.
    #[test]
    fn every_documented_field_of_nested_objects_has_its_fate() {
        use crate::openai::responses;
        use crate::{anthropic, chat, demand};
        let known: Value = serde_json::from_str(include_str!("../tests/fields.json")).unwrap();
        let known = known["nested"].as_object().unwrap();
        let texts = anthropic::TEXTS;
        let variants: [(&str, &[&[Variant]]); 15] = [
            ("openai_chat parts", &[chat::PARTS, chat::REFUSALS]),
            ("openai_chat calls", &[chat::CALLS]),
            ("openai_chat tools", &[demand::FUNCTIONS, demand::CUSTOM_TOOLS]),
            ("openai_chat choices", &[demand::CHAT_CHOICES]),
            ("openai_chat custom formats", &[crate::custom::CHAT_FORMATS]),
            ("openai_responses custom formats", &[crate::custom::FORMATS]),
            ("openai_responses items", &[responses::ITEMS]),
            (
                "openai_responses parts",
                &[responses::PARTS, responses::SAID, chat::REFUSALS, responses::THOUGHT],
            ),
            ("openai_responses tools", &[demand::RESPONSES_TOOLS]),
            ("openai_responses choices", &[demand::RESPONSES_CHOICES]),
            ("anthropic blocks", &[texts, anthropic::SAID, anthropic::BROUGHT]),
            ("anthropic system", &[texts]),
            ("anthropic results", &[texts]),
            ("anthropic tools", &[demand::ANTHROPIC_TOOLS]),
            ("ollama tools", &[demand::FUNCTIONS]),
        ];
        let tables: [(&str, &[&[Field]]); 24] = [
            ("openai_chat system", &[chat::MESSAGE]),
            ("openai_chat developer", &[chat::MESSAGE]),
            ("openai_chat user", &[chat::MESSAGE]),
            ("openai_chat assistant", &[chat::MESSAGE, chat::ASSISTANT]),
            ("openai_chat tool", &[chat::MESSAGE, chat::TOOL]),
            ("openai_chat called", &[chat::CALLED]),
            ("openai_chat function", &[demand::FUNCTION]),
            ("openai_chat custom", &[crate::custom::TOOL]),
            ("openai_chat custom called", &[crate::custom::CALLED]),
            ("openai_chat custom grammar", &[crate::custom::GRAMMAR]),
            ("openai_chat allowed", &[demand::ALLOWED]),
            ("openai_chat response_format", &[demand::RESPONSE_FORMAT]),
            ("openai_chat json_schema", &[demand::JSON_SCHEMA]),
            ("openai_chat stream_options", &[crate::openai::STREAM_OPTIONS]),
            ("openai_responses reasoning", &[responses::REASONING]),
            ("openai_responses text", &[demand::TEXT]),
            ("openai_responses format", &[demand::TEXT_FORMAT]),
            ("anthropic message", &[anthropic::MESSAGE]),
            ("anthropic thinking", &[anthropic::THINKING]),
            ("anthropic output_config", &[anthropic::OUTPUT]),
            ("anthropic tool_choice", &[demand::ANTHROPIC_CHOICE]),
            ("ollama message", &[chat::MESSAGE, chat::ASSISTANT, chat::TOOL]),
            ("ollama called", &[chat::CALLED]),
            ("ollama function", &[demand::FUNCTION]),
        ];
        let fields = |place: &str, documented: &Value, table: &[&[Field]]| {
            for field in documented.as_array().unwrap() {
                let rows = table.iter().flat_map(|part| part.iter());
                assert_eq!(rows.filter(|row| row.name == field).count(), 1, "{place}: {field}");
            }
        };
        for (place, table) in tables {
            fields(place, &known[place], table);
        }
        let outer = read("{}").unwrap();
        for (place, variants) in variants {
            let all = || variants.iter().flat_map(|part| part.iter());
            for (name, documented) in known[place].as_object().unwrap() {
                if let Some(Ok(table)) = all().find(|own| own.name == name).map(|own| own.read) {
                    fields(&format!("{place}: {name}"), documented, &[table]);
                    continue;
                }
                let object = serde_json::json!({ "type": name });
                let problem = outer.variant(place, &object, "one", variants, None).unwrap_err();
                assert!(problem.message.contains(&shown(name)), "{place}: {}", problem.message);
            }
        }
        assert_eq!(known.len(), variants.len() + tables.len());
    }

    #[test]
    fn values_have_types_and_ranges() {
        let fields = read(r#"{"temperature": 3, "n": 2.0, "inner": {"user": 1}}"#).unwrap();
        assert_eq!(fields.whole("n", 1..=8).unwrap(), Some(2));
        let message = |e: Problem| e.message;
        let e = fields.number("temperature", 0.0..=2.0).map_err(message).unwrap_err();
        assert_eq!(e, "temperature: expected a number from 0 to 2, found 3");
        let e = fields.whole("inner", 0..=i64::MAX).map_err(message).unwrap_err();
        assert_eq!(e, "inner: expected a whole number from 0 on, found an object");
        assert!(fields.within("inner", &[TABLE]).unwrap().is_some());
        assert_eq!(fields.noted().unwrap(), "inner.user");
        assert!(fields.within("none", &[TABLE]).unwrap().is_none());
    }
}
