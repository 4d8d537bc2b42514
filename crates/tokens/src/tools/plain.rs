//! Tools for templates that know none: told in words, in the form that most models have seen.

use serde_json::{Map, Value, json};

/// Messages in which tools, calls and results are text: the tools in the system message, calls in
/// the assistant's, results in the user's. The form is Hermes's.
pub fn describe(messages: &[Value], tools: &[Value]) -> Vec<Value> {
    let list: String = tools.iter().map(|tool| format!("\n{tool}")).collect();
    let words = format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query. The functions are given within \
         <tools></tools> tags, each as JSON:\n<tools>{list}\n</tools>\n\nTo call a function, write a JSON object with its \
         name and its arguments within <tool_call></tool_call> tags:\n<tool_call>\n{{\"name\": NAME, \"arguments\": \
         ARGUMENTS}}\n</tool_call>"
    );
    let mut told: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut rest = messages;
    let system = rest.first().filter(|first| first["role"] == "system");
    match system {
        Some(system) if !tools.is_empty() => {
            let text = system["content"].as_str().unwrap_or_default();
            told.push(json!({ "role": "system", "content": format!("{text}\n\n{words}") }));
            rest = &rest[1..];
        }
        None if !tools.is_empty() => told.push(json!({ "role": "system", "content": words })),
        _ => {}
    }
    for message in rest {
        let text = message["content"].as_str().unwrap_or_default();
        match (message["role"].as_str(), message["tool_calls"].as_array()) {
            (Some("assistant"), Some(calls)) => {
                let calls = calls.iter().map(|call| {
                    let function = &call["function"];
                    let call =
                        json!({ "name": function["name"], "arguments": function["arguments"] });
                    format!("\n<tool_call>\n{call}\n</tool_call>")
                });
                let written = text.to_string() + &calls.collect::<String>();
                let mut fields = message.as_object().cloned().unwrap_or_default();
                fields.remove("tool_calls");
                fields.insert("content".to_string(), written.trim_start().into());
                told.push(Value::Object(fields));
            }
            (Some("tool"), _) => {
                let result = format!("<tool_response>\n{text}\n</tool_response>");
                match told.last_mut() {
                    // Results of one turn are one message.
                    Some(last) if last["role"] == "user" && last["results"] == true => {
                        let before = last["content"].as_str().unwrap_or_default();
                        last["content"] = format!("{before}\n{result}").into();
                    }
                    _ => told.push(json!({ "role": "user", "content": result, "results": true })),
                }
            }
            _ => told.push(message.clone()),
        }
    }
    for message in &mut told {
        message.as_object_mut().and_then(|fields: &mut Map<_, _>| fields.remove("results"));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_results_become_text() {
        let tool = json!({ "type": "function", "function": { "name": "f" } });
        let call = json!({ "function": { "name": "f", "arguments": { "x": 1 } } });
        let messages = [
            json!({ "role": "system", "content": "Be brief." }),
            json!({ "role": "user", "content": "hi" }),
            json!({ "role": "assistant", "content": "", "tool_calls": [call, call] }),
            json!({ "role": "tool", "content": "1" }),
            json!({ "role": "tool", "content": "2" }),
            json!({ "role": "user", "content": "so?" }),
        ];
        let told = describe(&messages, &[tool]);
        let text = |i: usize| told[i]["content"].as_str().unwrap();
        assert_eq!(told.len(), 5);
        assert!(text(0).starts_with("Be brief.\n\n# Tools"), "{}", text(0));
        assert!(text(0).contains("\"name\":\"f\""), "{}", text(0));
        let one = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>";
        assert_eq!(text(2), format!("{one}\n{one}"));
        let results = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>";
        assert_eq!(told[3], json!({ "role": "user", "content": results }));
        assert_eq!(text(4), "so?");
        let untouched = describe(&messages[1..2], &[]);
        assert_eq!(untouched, messages[1..2]);
    }
}
