//! System messages for templates that take none: their text goes in front of the next message of
//! the user's, as in llama.cpp.

use serde_json::{Map, Value, json};

/// The conversation without system messages. One behind the last message of the user's becomes a
/// message of the user's.
pub fn fold_system(messages: &[Value]) -> Vec<Value> {
    let mut folded = Vec::with_capacity(messages.len());
    let mut waiting: Vec<Value> = Vec::new();
    for message in messages {
        match message["role"].as_str() {
            Some("system" | "developer") => waiting.push(message["content"].clone()),
            Some("user") if !waiting.is_empty() => {
                let mut fields = message.as_object().cloned().unwrap_or_default();
                let content = fields.remove("content").unwrap_or_default();
                let joined = waiting.drain(..).rev().fold(content, |rest, text| join(text, rest));
                fields.insert("content".to_string(), joined);
                folded.push(Value::Object(fields));
            }
            _ => {
                folded.extend(user(&mut waiting));
                folded.push(message.clone());
            }
        }
    }
    folded.extend(user(&mut waiting));
    folded
}

/// The waiting messages, folded into one of the user's.
fn user(waiting: &mut Vec<Value>) -> Option<Value> {
    let content = waiting.drain(..).reduce(join)?;
    let fields = [("role", Value::from("user")), ("content", content)];
    Some(Value::Object(Map::from_iter(fields.map(|(key, value)| (key.to_string(), value)))))
}

/// Two contents, a blank line between texts. A content is a text or a list of parts.
fn join(first: Value, second: Value) -> Value {
    match (first, second) {
        (Value::String(first), Value::String(second)) => {
            Value::String(format!("{first}\n\n{second}"))
        }
        (first, Value::Null) => first,
        (first, second) => Value::Array([parts(first), parts(second)].concat()),
    }
}

fn parts(content: Value) -> Vec<Value> {
    match content {
        Value::Array(parts) => parts,
        Value::String(text) => vec![json!({ "type": "text", "text": text })],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_texts_go_in_front_of_the_next_user_text() {
        let message = |role: &str, content: Value| json!({ "role": role, "content": content });
        let (system, user) = (
            |text: &str| message("system", text.into()),
            |text: &str| message("user", text.into()),
        );
        let answer = message("assistant", "ok".into());
        let cases = [
            (vec![user("hi")], vec![user("hi")], "none to fold"),
            (vec![system("be"), user("hi")], vec![user("be\n\nhi")], "the usual case"),
            (
                vec![system("be"), system("brief"), user("hi"), answer.clone()],
                vec![user("be\n\nbrief\n\nhi"), answer.clone()],
                "two at once",
            ),
            (
                vec![user("hi"), answer.clone(), system("be"), user("on")],
                vec![user("hi"), answer.clone(), user("be\n\non")],
                "later",
            ),
            (
                vec![system("be"), answer.clone()],
                vec![user("be"), answer.clone()],
                "no user behind it",
            ),
            (vec![system("be")], vec![user("be")], "alone"),
            (
                vec![system("be"), message("user", json!([{ "type": "image" }]))],
                vec![message(
                    "user",
                    json!([{ "type": "text", "text": "be" }, { "type": "image" }]),
                )],
                "parts",
            ),
        ];
        for (given, expected, why) in cases {
            assert_eq!(fold_system(&given), expected, "{why}");
        }
    }
}
