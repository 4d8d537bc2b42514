//! Conversations as the interfaces state them, made into what chat templates read.

use serde_json::{Map, Value, json};

use crate::custom;
use crate::fields::{
    Field, Fields, Unknown, Variant, kind, no_effect, refused, refused_variant, shown, used,
    variant, wrong,
};
use crate::models::Model;
use crate::problem::Problem;

/// Most messages of a conversation.
pub(crate) const MOST_MESSAGES: usize = 10_000;

/// Why what is no text is refused.
pub(crate) const IMAGES: &str = "images are not supported by this model";
pub(crate) const AUDIO: &str = "audio is not supported by this model";
pub(crate) const VIDEO: &str = "videos are not supported by this model";
pub(crate) const FILES: &str = "files are not supported by this model";

/// The fields of all messages of OpenAI's and Ollama's kind.
pub(crate) const MESSAGE: &[Field] =
    &[used("role"), used("content"), used("name"), refused("images", IMAGES, &[])];

/// Those of an assistant's message besides.
pub(crate) const ASSISTANT: &[Field] = &[
    used("tool_calls"),
    used("refusal"),
    used("reasoning_content"),
    used("reasoning"),
    used("reasoning_details"),
    used("thinking"),
    no_effect("annotations"),
    // What the official clients read from the text of an answer that has a schema.
    no_effect("parsed"),
    no_effect("weight"),
    refused("audio", AUDIO, &[]),
    refused("function_call", "the older form of tool_calls", &[]),
];

/// Those of a tool's message besides.
pub(crate) const TOOL: &[Field] = &[used("tool_call_id"), used("tool_name")];

/// A part of text, as OpenAI and those who speak its language write it.
const TEXT: &[Field] =
    &[used("type"), used("text"), no_effect("cache_control"), no_effect("prompt_cache_breakpoint")];

/// Parts of a message's content.
pub(crate) const PARTS: &[Variant] = &[
    variant("text", TEXT),
    refused_variant("image_url", IMAGES),
    refused_variant("input_audio", AUDIO),
    refused_variant("video_url", VIDEO),
    refused_variant("file", FILES),
];

/// Parts of an assistant's message besides: the model said it instead of an answer.
pub(crate) const REFUSALS: &[Variant] = &[variant("refusal", &[used("type"), used("refusal")])];

/// What an assistant thought, as OpenRouter and its clients write it.
pub(crate) const DETAILS: &[Variant] = &[
    variant(
        "reasoning.text",
        &[
            used("type"),
            used("text"),
            no_effect("format"),
            no_effect("id"),
            no_effect("index"),
            no_effect("signature"),
        ],
    ),
    variant(
        "reasoning.summary",
        &[
            used("type"),
            no_effect("format"),
            no_effect("id"),
            no_effect("index"),
            no_effect("summary"),
        ],
    ),
    variant(
        "reasoning.encrypted",
        &[
            used("type"),
            no_effect("data"),
            no_effect("format"),
            no_effect("id"),
            no_effect("index"),
        ],
    ),
];

/// Calls of tools that an assistant's message may have.
pub(crate) const CALLS: &[Variant] = &[
    variant("function", &[used("type"), used("id"), used("function"), no_effect("index")]),
    variant("custom", &[used("type"), used("id"), used("custom"), no_effect("index")]),
];

/// The function of a call. Ollama counts them.
pub(crate) const CALLED: &[Field] =
    &[used("name"), used("arguments"), no_effect("index"), no_effect("parsed_arguments")];

/// Messages of OpenAI's kind, as chat templates read them: a list of objects with `role` and
/// `content`, whose parts of text become one.
///
/// # Errors
/// The place of a message of another form, or of a part that cannot be read.
pub fn messages_of(list: &Value) -> Result<Vec<Value>, String> {
    let body = Map::from_iter([("messages".to_string(), list.clone())]);
    let fields = Fields::check(body, &[&[used("messages")]], Unknown::Refused);
    fields.and_then(|fields| messages(&fields)).map_err(|problem| problem.message)
}

/// Messages of OpenAI's and Ollama's kind: objects with `role` and `content`, the latter a string
/// or a list of parts, of which only text is read.
pub(crate) fn messages(fields: &Fields) -> Result<Vec<Value>, Problem> {
    let list = fields.needed("messages", fields.list("messages")?)?;
    if list.is_empty() || list.len() > MOST_MESSAGES {
        let message = format!("expected 1 to {MOST_MESSAGES} messages, found {}", list.len());
        return Err(Problem::field("messages", message));
    }
    let read = |(i, value): (usize, &Value)| message(fields, &format!("messages[{i}]"), value);
    list.iter().enumerate().map(read).collect()
}

fn message(fields: &Fields, place: &str, value: &Value) -> Result<Value, Problem> {
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
    let of_role = match role {
        "assistant" => ASSISTANT,
        "tool" => TOOL,
        _ => &[],
    };
    fields.allow(place, value, &[MESSAGE, of_role])?;
    let parts: &[&[Variant]] = if role == "assistant" { &[PARTS, REFUSALS] } else { &[PARTS] };
    let text = |place: &str, value: &Value| text(fields, place, value, parts);
    let mut read = Map::new();
    read.insert("role".to_string(), role.into());
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let place = format!("{place}.{name}");
        match name.as_str() {
            "content" => drop(read.insert("content".to_string(), text(&place, value)?.into())),
            "name" | "tool_call_id" | "tool_name" => match value {
                Value::String(_) => drop(read.insert(name.clone(), value.clone())),
                other => return Err(wrong(&place, "a string", other)),
            },
            "reasoning_content" | "reasoning" | "thinking" => {
                read.insert("reasoning_content".to_string(), text(&place, value)?.into());
            }
            // The same as `reasoning`, where that is there, too.
            "reasoning_details" => {
                let thought = details(fields, &place, value)?;
                if !thought.is_empty() {
                    read.entry("reasoning_content".to_string()).or_insert(thought.into());
                }
            }
            "tool_calls" => {
                read.insert("tool_calls".to_string(), tool_calls(fields, &place, value)?);
            }
            "refusal" => {
                // The model said it instead of an answer.
                let said = text(&place, value)?;
                read.entry("content".to_string()).or_insert(said.into());
            }
            _ => {}
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

/// The text of what an assistant thought; what is summed up or encrypted has none.
fn details(fields: &Fields, place: &str, value: &Value) -> Result<String, Problem> {
    let parts = value.as_array().ok_or_else(|| wrong(place, "a list", value))?;
    let mut all = String::new();
    for (i, part) in parts.iter().enumerate() {
        let place = format!("{place}[{i}]");
        fields.variant(&place, part, "a part", &[DETAILS], None)?;
        all += part["text"].as_str().unwrap_or_default();
    }
    Ok(all)
}

/// A string, or the text of a list of parts, each of which has it in the field of its type's name
/// or in `text`.
pub(crate) fn text(
    fields: &Fields,
    place: &str,
    value: &Value,
    variants: &[&[Variant]],
) -> Result<String, Problem> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let mut all = String::new();
            for (i, part) in parts.iter().enumerate() {
                let place = format!("{place}[{i}]");
                let name = match fields.variant(&place, part, "a part", variants, None)? {
                    "refusal" => "refusal",
                    _ => "text",
                };
                let place = format!("{place}.{name}");
                all += match &part[name] {
                    Value::String(text) => text,
                    Value::Null => {
                        return Err(Problem::field(&place, "expected a string, found none"));
                    }
                    other => return Err(wrong(&place, "a string", other)),
                };
            }
            Ok(all)
        }
        other => {
            let message = format!("expected a string or a list of parts, found {}", kind(other));
            Err(Problem::field(place, message))
        }
    }
}

/// Calls that an assistant made, with their arguments as objects, as templates read them; those
/// that are no JSON stay texts.
fn tool_calls(fields: &Fields, place: &str, value: &Value) -> Result<Value, Problem> {
    let Some(calls) = value.as_array() else {
        return Err(Problem::field(place, format_args!("expected a list, found {}", kind(value))));
    };
    let read = |(i, call): (usize, &Value)| {
        let own = format!("{place}[{i}]");
        let kind = fields.variant(&own, call, "a call", &[CALLS], Some("function"))?;
        let table = if kind == "custom" { custom::CALLED } else { CALLED };
        let function = &call[kind];
        fields.allow(&format!("{own}.{kind}"), function, &[table])?;
        let name = function["name"].as_str().ok_or_else(|| {
            let place = format!("{own}.{kind}.name");
            Problem::field(&place, "expected a string, found none")
        })?;
        let arguments = match &function["arguments"] {
            _ if kind == "custom" => {
                let place = format!("{own}.custom.input");
                let input = function["input"].as_str();
                custom::arguments(
                    input.ok_or_else(|| wrong(&place, "a string", &function["input"]))?,
                )
            }
            Value::String(text) if text.trim().is_empty() => json!({}),
            // A call that a model did not write to its end is sent back as it is.
            Value::String(text) => {
                serde_json::from_str(text).unwrap_or_else(|_| text.as_str().into())
            }
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

/// The variable by which a template reads an effort of reasoning; none if it reads no such.
///
/// # Errors
/// A word that is no effort.
pub(crate) fn effort(
    model: &Model,
    name: &str,
    effort: &str,
) -> Result<Option<(String, Value)>, Problem> {
    const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
    const VARIABLE: &str = "reasoning_effort";
    if !EFFORTS.contains(&effort) {
        return Err(wrong(name, EFFORTS.join(", "), &effort.into()));
    }
    let reads = model.template().is_some_and(|template| template.variables().contains(VARIABLE));
    Ok(reads.then(|| (VARIABLE.to_string(), effort.into())))
}

/// Variables of a request for its template, but for those that say what the conversation is.
///
/// # Errors
/// No object; a variable that other fields of the request make.
pub(crate) fn template_variables(fields: &Fields) -> Result<Map<String, Value>, Problem> {
    const NAME: &str = "chat_template_kwargs";
    let given = fields.object(NAME)?.cloned().unwrap_or_default();
    match ["messages", "tools"].iter().find(|name| given.contains_key(**name)) {
        None => Ok(given),
        Some(name) => {
            let problem =
                Problem::field(name, "a field of the request itself, and no variable here");
            Err(problem.within(NAME))
        }
    }
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
            { "role": "assistant", "content": [{ "type": "refusal", "refusal": "No." }] },
            { "role": "assistant", "content": "4", "reasoning": "2 + 2", "reasoning_details": [
                { "type": "reasoning.text", "text": "other", "format": "unknown", "index": 0 },
            ] },
            { "role": "assistant", "content": null, "reasoning_details": [
                { "type": "reasoning.encrypted", "data": "x", "id": "1" },
                { "type": "reasoning.text", "text": "So", "signature": null },
            ] },
            { "role": "assistant", "tool_calls": [
                { "type": "function", "function": { "name": "f", "arguments": "{\"x\": " } },
                { "id": "2", "type": "custom", "custom": { "name": "shell", "input": "ls \"a\"" } },
            ] },
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
                json!({ "role": "assistant", "content": "No." }),
                json!({ "role": "assistant", "content": "4", "reasoning_content": "2 + 2" }),
                json!({ "role": "assistant", "content": "", "reasoning_content": "So" }),
                json!({ "role": "assistant", "content": "", "tool_calls": [
                    { "type": "function", "function": { "name": "f", "arguments": "{\"x\": " } },
                    { "type": "function", "function": { "name": "shell",
                        "arguments": { "input": "ls \"a\"" } }, "id": "2" },
                ] }),
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
                "messages[0].content[0]: images are not supported by this model (type image_url)",
            ),
            (
                json!([{ "role": "user", "content": "", "images": ["x"] }]),
                "messages[0].images: not",
            ),
            (json!([{ "role": "user", "content": "", "colour": 1 }]), "messages[0].colour: there"),
            (
                json!([{ "role": "user", "content": "", "name": 5 }]),
                "messages[0].name: expected a string, found 5",
            ),
            (
                json!([{ "role": "user", "content": [{ "type": "text", "text": 5 }] }]),
                "messages[0].content[0].text: expected a string, found 5",
            ),
            (
                json!([{ "role": "user", "content": [{ "type": "text", "text": "", "size": 1 }] }]),
                "messages[0].content[0].size: there is no such field",
            ),
            (
                json!([{ "role": "assistant", "tool_calls": [
                    { "type": "function", "function": { "name": "f", "strict": true } },
                ] }]),
                "messages[0].tool_calls[0].function.strict: there is no such field",
            ),
            (
                json!([{ "role": "assistant", "tool_calls": [{ "type": "custom", "custom": {} }] }]),
                "messages[0].tool_calls[0].custom.name: expected a string, found none",
            ),
        ];
        for (messages, problem) in cases {
            let found = read(&messages).unwrap_err();
            assert!(found.starts_with(problem), "{messages}: {found}");
        }
    }
}
