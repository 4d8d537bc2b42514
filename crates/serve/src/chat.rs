//! Conversations as the interfaces state them, made into what chat templates read.

use serde_json::{Map, Value, json};

use crate::fields::{Fields, kind, shown};
use crate::models::Model;
use crate::problem::Problem;

/// Most messages of a conversation.
pub(crate) const MOST_MESSAGES: usize = 10_000;

/// Messages of OpenAI's and Ollama's kind: objects with `role` and `content`, the latter a string
/// or a list of parts, of which only text is read.
pub(crate) fn messages(fields: &Fields) -> Result<Vec<Value>, Problem> {
    let list = fields.needed("messages", fields.list("messages")?)?;
    if list.is_empty() || list.len() > MOST_MESSAGES {
        let message = format!("expected 1 to {MOST_MESSAGES} messages, found {}", list.len());
        return Err(Problem::field("messages", message));
    }
    let read = |(i, value): (usize, &Value)| message(&format!("messages[{i}]"), value);
    list.iter().enumerate().map(read).collect()
}

fn message(place: &str, value: &Value) -> Result<Value, Problem> {
    let Some(object) = value.as_object() else {
        let message = format!("expected an object, found {}", kind(value));
        return Err(Problem::field(place, message));
    };
    let role = match object.get("role").and_then(Value::as_str) {
        // The newer name of the same role.
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        Some("function") => {
            return Err(Problem::field(place, "the role function is not supported: use tool"));
        }
        found => {
            let expected = "system, developer, user, assistant or tool";
            let found = found.map_or("none".to_string(), |role| format!("\"{}\"", shown(role)));
            return Err(Problem::field(
                &format!("{place}.role"),
                format_args!("expected {expected}, found {found}"),
            ));
        }
    };
    let mut read = Map::new();
    read.insert("role".to_string(), role.into());
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let place = format!("{place}.{name}");
        match name.as_str() {
            "role" => {}
            "content" => drop(read.insert("content".to_string(), text(&place, value)?.into())),
            "name" | "tool_call_id" | "tool_name" => drop(read.insert(name.clone(), value.clone())),
            "reasoning_content" | "reasoning" | "thinking" if role == "assistant" => {
                read.insert("reasoning_content".to_string(), text(&place, value)?.into());
            }
            "tool_calls" if role == "assistant" => {
                read.insert("tool_calls".to_string(), tool_calls(&place, value)?);
            }
            "refusal" if role == "assistant" => {
                // The model said it instead of an answer.
                let said = text(&place, value)?;
                read.entry("content".to_string()).or_insert(said.into());
            }
            "images" | "audio" | "function_call" if !is_empty(value) => {
                return Err(Problem::field(&place, "not supported: models here read text"));
            }
            "images" | "audio" | "function_call" | "annotations" | "weight" => {}
            _ => return Err(Problem::field(&place, "there is no such field")),
        }
    }
    let calls = read.contains_key("tool_calls");
    if !read.contains_key("content") {
        if !calls && !read.contains_key("reasoning_content") {
            let place = format!("{place}.content");
            return Err(Problem::field(&place, "expected a string, found none"));
        }
        read.insert("content".to_string(), "".into());
    }
    Ok(Value::Object(read))
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

/// A string, or the text of a list of parts.
pub(crate) fn text(place: &str, value: &Value) -> Result<String, Problem> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut all = String::new();
            for (i, part) in parts.iter().enumerate() {
                let place = format!("{place}[{i}]");
                match part["type"].as_str() {
                    Some("text" | "input_text" | "output_text") => match part["text"].as_str() {
                        Some(text) => all += text,
                        None => {
                            let message = "expected a string, found none";
                            return Err(Problem::field(&format!("{place}.text"), message));
                        }
                    },
                    found => {
                        let found = shown(found.unwrap_or("no type"));
                        let message = format!("expected a part of type text, found {found}");
                        let problem = Problem::field(&place, message);
                        return Err(Problem { code: "unsupported_content", ..problem });
                    }
                }
            }
            Ok(all)
        }
        other => {
            let message = format!("expected a string or a list of parts, found {}", kind(other));
            Err(Problem::field(place, message))
        }
    }
}

/// Calls that an assistant made, with their arguments as objects, as templates read them.
fn tool_calls(place: &str, value: &Value) -> Result<Value, Problem> {
    let Some(calls) = value.as_array() else {
        return Err(Problem::field(place, format_args!("expected a list, found {}", kind(value))));
    };
    let read = |(i, call): (usize, &Value)| {
        let function = &call["function"];
        let name = function["name"].as_str().ok_or_else(|| {
            let place = format!("{place}[{i}].function.name");
            Problem::field(&place, "expected a string, found none")
        })?;
        let arguments = match &function["arguments"] {
            Value::String(text) if text.trim().is_empty() => json!({}),
            Value::String(text) => serde_json::from_str(text).map_err(|e| {
                let place = format!("{place}[{i}].function.arguments");
                Problem::field(&place, format_args!("expected JSON, found {e}"))
            })?,
            Value::Null => json!({}),
            other => other.clone(),
        };
        let mut read = json!({
            "type": "function",
            "function": { "name": name, "arguments": arguments },
        });
        if let Some(id) = call["id"].as_str() {
            read["id"] = id.into();
        }
        Ok(read)
    };
    calls.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

/// Variables of the template that turn reasoning on or off; a field that asks for it has no effect
/// where it reads none.
pub(crate) fn thinking(
    model: &Model,
    fields: &Fields,
    name: &str,
    on: Option<bool>,
) -> Map<String, Value> {
    let Some(on) = on else { return Map::new() };
    let switches = delft::reasoning::switches(on, model.template());
    if switches.is_empty() {
        fields.note(name);
    }
    switches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fields::{Unknown, used};

    fn read(messages_: &Value) -> Result<Vec<Value>, String> {
        let body = json!({ "messages": messages_ }).to_string();
        let fields =
            Fields::read(body.as_bytes(), &[&[used("messages")]], Unknown::Refused).unwrap();
        messages(&fields).map_err(|problem| problem.message)
    }

    #[test]
    fn messages_become_what_templates_read() {
        let found = read(&json!([
            { "role": "developer", "content": "Be." },
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"x\": 1}" } },
            ] },
            { "role": "tool", "tool_call_id": "1", "content": "2" },
        ]));
        assert_eq!(
            found.unwrap(),
            [
                json!({ "role": "system", "content": "Be." }),
                json!({ "role": "user", "content": "ab" }),
                json!({ "role": "assistant", "content": "", "tool_calls": [
                    { "type": "function", "function": { "name": "f", "arguments": { "x": 1 } }, "id": "1" },
                ] }),
                json!({ "role": "tool", "tool_call_id": "1", "content": "2" }),
            ]
        );
    }

    #[test]
    fn what_is_no_message_is_refused_by_place() {
        let image = json!({ "type": "image_url", "image_url": { "url": "data:" } });
        let cases = [
            (json!([]), "messages: expected 1 to"),
            (json!("hi"), "messages: expected a list"),
            (json!(["hi"]), "messages[0]: expected an object, found a string"),
            (json!([{ "role": "user" }]), "messages[0].content: expected a string, found none"),
            (json!([{ "content": "hi" }]), "messages[0].role: expected system"),
            (json!([{ "role": "king", "content": "" }]), "messages[0].role: expected system"),
            (
                json!([{ "role": "user", "content": 5 }]),
                "messages[0].content: expected a string or",
            ),
            (
                json!([{ "role": "user", "content": [image] }]),
                "messages[0].content[0]: expected a part of type text, found image_url",
            ),
            (
                json!([{ "role": "user", "content": "", "images": ["x"] }]),
                "messages[0].images: not",
            ),
            (json!([{ "role": "user", "content": "", "colour": 1 }]), "messages[0].colour: there"),
        ];
        for (messages, problem) in cases {
            let found = read(&messages).unwrap_err();
            assert!(found.starts_with(problem), "{messages}: {found}");
        }
    }
}
