//! Calls of tools: rendered by published templates and read back, whole and letter by letter.

use delft_tokens::tools::{CallFormat, Calls, FORMATS, Part, Tool, ToolCall, describe};
use delft_tokens::{ChatTemplate, TemplateInput};
use serde_json::{Value, json};

/// Templates by the form that they must be recognised as.
const TEMPLATES: &[(&str, &str)] = &[
    ("Qwen-Qwen2.5-7B-Instruct", "hermes"),
    ("Qwen-Qwen3-0.6B", "hermes"),
    ("Qwen-QwQ-32B", "hermes"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes"),
    ("ibm-granite-granite-4.0", "hermes"),
    ("Reka-Edge", "hermes"),
    ("MiMo-VL", "hermes"),
    ("StepFun3.5-Flash", "qwen3-coder"),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3-coder"),
    ("Qwen3-Coder", "qwen3-coder"),
    ("Qwen3.5-4B", "qwen3-coder"),
    ("GLM-4.6", "glm"),
    ("GLM-4.7-Flash", "glm"),
    ("MiniMax-M2", "minimax"),
    ("meta-llama-Llama-3.1-8B-Instruct", "llama"),
    ("meta-llama-Llama-3.2-3B-Instruct", "llama"),
    ("meta-llama-Llama-3.3-70B-Instruct", "llama"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "mistral-v11"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral-v13"),
    ("llama-cpp-deepseek-r1", "deepseek-r1"),
    ("moonshotai-Kimi-K2", "kimi"),
    ("unsloth-Apriel-1.5", "apriel"),
    ("NVIDIA-Nemotron-Nano-v2", "nemotron"),
    ("Apertus-8B-Instruct", "apertus"),
    ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "command-r"),
    ("openai-gpt-oss-120b", "harmony"),
    ("meetkai-functionary-medium-v3.1", "functionary"),
];

/// Templates that show tools but leave calls out of an assistant's turn: there is nothing to read
/// back.
const SILENT: &[(&str, &str)] = &[("ibm-granite-granite-3.3-2B-Instruct", "granite")];

fn tools() -> (Vec<Tool>, Value) {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string" },
            "days": { "type": "integer" },
            "units": { "type": "array", "items": { "type": "string" } },
        },
        "required": ["city"],
    });
    let add = json!({ "type": "object", "properties": { "a": { "type": "number" } } });
    let function = |name: &str, parameters: &Value| {
        json!({ "type": "function", "function": {
            "name": name, "description": "Does it.", "parameters": parameters,
        } })
    };
    let listed = json!([function("get_weather", &weather), function("add", &add)]);
    let tool = |name: &str, parameters| Tool::new(name, parameters, false).unwrap();
    (vec![tool("get_weather", weather), tool("add", add)], listed)
}

fn call(name: &str, arguments: Value) -> ToolCall {
    ToolCall { name: name.to_string(), arguments }
}

/// The calls, and the text beside them.
fn read(
    format: &'static CallFormat,
    pieces: impl Iterator<Item = String>,
) -> (Vec<ToolCall>, String) {
    let (calls, text, _) = gathered(Calls::new(format, tools().0), pieces);
    (calls, text)
}

/// The calls, whole or put together of their pieces, the text beside them, and the pieces of
/// arguments.
fn gathered(
    mut reader: Calls,
    pieces: impl Iterator<Item = String>,
) -> (Vec<ToolCall>, String, usize) {
    let (mut open, mut count) = (None::<(String, String)>, 0);
    let mut parts: Vec<Part> = pieces.flat_map(|piece| reader.push(&piece)).collect();
    parts.extend(reader.finish(false));
    let (mut calls, mut text) = (Vec::new(), String::new());
    for part in parts {
        match part {
            Part::Call(call) => calls.push(call),
            Part::Text(more) => text += &more,
            Part::Begin(name) => assert_eq!(open.replace((name, String::new())), None),
            Part::Arguments(more) => {
                open.as_mut().unwrap().1 += &more;
                count += 1;
            }
            Part::End => {
                let (name, text) = open.take().unwrap();
                calls.push(call(&name, serde_json::from_str(&text).unwrap_or(text.into())));
            }
        }
    }
    assert_eq!(open, None);
    (calls, text, count)
}

/// Pieces of a call are those of the whole call, and come before its end; what ends in the middle
/// is told as far as it came.
#[test]
fn arguments_come_as_they_are_written() {
    let arguments = r#"{"city": "a \"{ b\\", "days": 3, "units": ["x", "}"]}"#;
    let json: Value = serde_json::from_str(arguments).unwrap();
    let object = format!(r#"{{"name": "get_weather", "arguments": {arguments}}}"#);
    let parameters = format!(r#"{{"name": "get_weather", "parameters": {arguments}}}"#);
    let other_order = format!(r#"{{"arguments": {arguments}, "name": "get_weather"}}"#);
    // Texts, numbers and lists, each argument between marks of its own.
    let tagged = |open: &str, name: [&str; 2], marks: [&str; 3], close: &str| {
        let values = [("city", "a \"{ b\\"), ("days", "3"), ("units", "[\"x\", \"}\"]")];
        let [before, between, behind] = marks;
        let argument = |(key, value)| format!("{before}{key}{between}{value}{behind}");
        let arguments: String = values.into_iter().map(argument).collect();
        format!("Well.\n{open}{}get_weather{}{arguments}{close}", name[0], name[1])
    };
    let all = arguments.len() / 2;
    let cases = [
        ("hermes", format!("Well.\n<tool_call>\n{object}\n</tool_call>"), all),
        ("hermes", format!("Well.\n<tool_call>\n{other_order}\n</tool_call>"), 0),
        ("llama", parameters.clone(), all),
        ("mistral", format!("[TOOL_CALLS][{object}, {object}]"), all),
        ("mistral-v13", format!("[TOOL_CALLS]get_weather[ARGS]{arguments}"), all),
        (
            "kimi",
            format!(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>"
            ),
            all,
        ),
        (
            "apertus",
            format!("<|tools_prefix|>[{{\"get_weather\": {arguments}}}]<|tools_suffix|>"),
            all,
        ),
        (
            "qwen3-coder",
            tagged(
                "<tool_call>\n",
                ["<function=", ">\n"],
                ["<parameter=", ">\n", "\n</parameter>\n"],
                "</function>\n</tool_call>",
            ),
            8,
        ),
        (
            "glm",
            tagged(
                "<tool_call>",
                ["", "\n"],
                ["<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"],
                "</tool_call>",
            ),
            8,
        ),
        (
            "minimax",
            tagged(
                "<minimax:tool_call>\n",
                ["<invoke name=\"", "\">\n"],
                ["<parameter name=\"", "\">", "</parameter>\n"],
                "</invoke>\n</minimax:tool_call>",
            ),
            8,
        ),
        (
            "seed",
            tagged(
                "<seed:tool_call>\n",
                ["<function=", ">\n"],
                ["<parameter=", ">", "</parameter>\n"],
                "</function>\n</seed:tool_call>",
            ),
            8,
        ),
        (
            "hermes",
            "<tool_call>\n{\"name\": \"unknown\", \"arguments\": {\"a\": 1}}\n</tool_call>"
                .to_string(),
            0,
        ),
        ("llama", "{\"city\": \"Rome\", \"days\": 3}".to_string(), 0),
    ];
    for (name, text, least) in &cases {
        let format = FORMATS.iter().find(|format| format.name == *name).unwrap();
        let letters = || text.chars().map(String::from);
        let whole = read(format, letters());
        let (calls, rest, count) = gathered(Calls::new(format, tools().0).piecewise(), letters());
        assert_eq!((&calls, &rest), (&whole.0, &whole.1), "{name}: {text}");
        assert!(count >= *least && (count > 0) == (*least > 0), "{name}: {count} pieces of {text}");
        let once = std::iter::once(text.clone());
        let at_once = gathered(Calls::new(format, tools().0).piecewise(), once);
        assert_eq!((&at_once.0, &at_once.1), (&whole.0, &whole.1), "{name}: {text}");
        assert!(*least == 0 || whole.0[0].arguments == json, "{name}: {whole:?}");
    }
    let format = FORMATS.iter().find(|format| format.name == "hermes").unwrap();
    let reader = || Calls::new(format, tools().0).piecewise();
    let cut = &cases[0].1[..cases[0].1.find("days").unwrap()];
    let (calls, text, _) = gathered(reader(), std::iter::once(cut.to_string()));
    assert_eq!((calls.len(), text.as_str()), (1, "Well."));
    assert_eq!(calls[0].arguments, r#"{"city": "a \"{ b\\", ""#);
    let format = FORMATS.iter().find(|format| format.name == "qwen3-coder").unwrap();
    let text = "<tool_call>\n<function=add>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\n\nSaint\n\n</par\n</parameter>\n</function>\n</tool_call>";
    let letters = || text.chars().map(String::from);
    let (calls, _, _) = gathered(Calls::new(format, tools().0).piecewise(), letters());
    assert_eq!(calls, read(format, letters()).0);
    let lines = json!({ "city": "\nSaint\n\n</par" });
    assert_eq!(calls, [call("add", json!({})), call("get_weather", lines)]);
    // What is broken ends where it broke, and the rest is text.
    let broken = cases[0].1.replace("3,", "3 3,") + " So.";
    let (calls, text, _) = gathered(reader(), broken.chars().map(String::from));
    assert_eq!((calls.len(), calls[0].name.as_str()), (1, "get_weather"));
    assert!(text.starts_with("Well.") && text.ends_with("So."), "{text}");
}

/// What an assistant's turn with these calls adds to a conversation.
fn rendered(
    template: &ChatTemplate,
    listed: &Value,
    calls: &[ToolCall],
) -> formats::Result<String> {
    let calls: Vec<Value> = calls
        .iter()
        .enumerate()
        .map(|(i, call)| {
            json!({ "id": format!("call0000{i}"), "type": "function", "function": {
                "name": call.name, "arguments": call.arguments,
            } })
        })
        .collect();
    let user = json!({ "role": "user", "content": "How warm is it?" });
    let assistant = json!({
        "role": "assistant", "content": "", "reasoning_content": "", "tool_calls": calls,
    });
    let render = |messages: &[Value], add_generation_prompt: bool| {
        let request = TemplateInput {
            messages,
            tools: Some(listed),
            add_generation_prompt,
            bos_token: Some(""),
            eos_token: Some("<eos>"),
            ..TemplateInput::default()
        };
        template.render(&request)
    };
    let before = render(std::slice::from_ref(&user), false)?;
    let after = render(&[user, assistant], false)?;
    let shared = before.bytes().zip(after.bytes()).take_while(|(a, b)| a == b).count();
    let shared = (0..=shared).rev().find(|at| after.is_char_boundary(*at)).unwrap_or(0);
    Ok(after[shared..].to_string())
}

#[test]
fn what_templates_write_is_read_back() {
    let Some(folder) = testing::data("suites/llama.cpp-templates") else { return };
    let (_, listed) = tools();
    let hard = json!({ "city": "Saint-\"Denis\" } </x> \\ é", "days": 3, "units": ["a", "b"] });
    let one = vec![call("get_weather", hard)];
    let two =
        vec![call("get_weather", json!({ "city": "Rome" })), call("add", json!({ "a": 1.5 }))];
    let mut problems = Vec::new();
    for (name, expected) in SILENT.iter().chain(TEMPLATES) {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::from_source(&source).unwrap();
        let Some(format) = CallFormat::of(&template).filter(|format| format.name == *expected)
        else {
            problems.push(format!("{name}: not {expected}: {:?}", CallFormat::of(&template)));
            continue;
        };
        if SILENT.contains(&(name, expected)) {
            let turn = rendered(&template, &listed, &one).unwrap();
            assert!(!turn.contains("get_weather"), "{name} is silent no more: {turn}");
            continue;
        }
        for calls in [&one, &two] {
            if calls.len() > 1 && format.between.is_none() {
                continue;
            }
            let turn = match rendered(&template, &listed, calls) {
                Ok(turn) => turn,
                Err(error) => {
                    problems.push(format!("{name}: {error}"));
                    break;
                }
            };
            if format.name == "harmony" {
                // Its messages are told apart by who splits reasoning from answers.
                assert_eq!(CallFormat::recipient(&turn), Some("get_weather"), "{turn}");
                continue;
            }
            let begin = match format.opening() {
                "" => turn.find('{'),
                opening => turn.find(opening),
            };
            let Some(begin) = begin else {
                problems.push(format!("{name}: no opening: {turn}"));
                continue;
            };
            let turn = &turn[begin..];
            let (found, text) = read(format, [turn.to_string()].into_iter());
            // What follows is the template's end of the turn.
            if &found != calls || text.contains("get_weather") || text.contains("Rome") {
                problems.push(format!("{name}: {turn}\n    {found:?} {text}"));
            }
            let (letters, same) = read(format, turn.chars().map(String::from));
            if (&letters, &same) != (&found, &text) {
                problems.push(format!("{name}: letters: {letters:?} {same}"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn text_around_calls_stays_and_what_is_no_call_is_text() {
    let format = |name: &str| {
        delft_tokens::tools::FORMATS.iter().find(|format| format.name == name).unwrap()
    };
    struct Case {
        format: &'static str,
        written: &'static str,
        calls: usize,
        text: &'static str,
        why: &'static str,
    }
    let cases = [
        Case {
            // Its template writes lists as Python does, which is why it is not among those above.
            format: "seed",
            written: "\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
            calls: 1,
            text: "",
            why: "another mark than others of its kind have",
        },
        Case {
            format: "hermes",
            written: "I look.\n\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            calls: 1,
            text: "I look.",
            why: "text before a call",
        },
        Case {
            format: "hermes",
            written: "<tool_call>{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}",
            calls: 1,
            text: "",
            why: "no closing mark, arguments in a string",
        },
        Case {
            format: "hermes",
            written: "Write <tool_call> and then text. ",
            calls: 0,
            text: "Write <tool_call> and then text. ",
            why: "a mark that is talked about",
        },
        Case {
            format: "hermes",
            written: "<tool_call>{\"name\": \"add\", \"argum",
            calls: 0,
            text: "<tool_call>{\"name\": \"add\", \"argum",
            why: "an end in the middle",
        },
        Case {
            format: "hermes",
            written: "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>\n<tool",
            calls: 1,
            text: "",
            why: "cut where another call begins",
        },
        Case {
            format: "hermes",
            written: "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"a",
            calls: 1,
            text: "",
            why: "cut in another call",
        },
        Case {
            format: "mistral",
            written: "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}, {\"name\": \"a",
            calls: 1,
            text: "",
            why: "cut in another call of a list",
        },
        Case {
            format: "hermes",
            written: "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</to",
            calls: 1,
            text: "",
            why: "cut in the closing mark",
        },
        Case {
            format: "llama",
            written: "{\"name\": \"add\", \"parameters\": {}}",
            calls: 1,
            text: "",
            why: "a bare call",
        },
        Case {
            format: "llama",
            written: "{\"name\": \"Bob\", \"parameters\": {}} is JSON",
            calls: 0,
            text: "{\"name\": \"Bob\", \"parameters\": {}} is JSON",
            why: "an object that names no tool",
        },
        Case { format: "llama", written: " {x}", calls: 0, text: " {x}", why: "no JSON" },
        Case {
            format: "mistral",
            written: "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}, {\"name\": \"add\"}]",
            calls: 2,
            text: "",
            why: "two in a list",
        },
        Case {
            format: "mistral",
            written: "[TOOL_CALLS] nonsense",
            calls: 0,
            text: "[TOOL_CALLS] nonsense",
            why: "a section without calls",
        },
        Case {
            format: "glm",
            written: "<tool_call>add\n</tool_call> done",
            calls: 1,
            text: "done",
            why: "no arguments, text behind",
        },
    ];
    for Case { format: name, written, calls, text, why } in cases {
        let whole = read(format(name), [written.to_string()].into_iter());
        assert_eq!((whole.0.len(), whole.1.as_str()), (calls, text), "{name}: {why}");
        let letters = read(format(name), written.chars().map(String::from));
        assert_eq!(letters, whole, "{name}: {why}");
    }
}

#[test]
fn every_form_survives_any_text() {
    // All prefixes and pieces of what templates write, doubled: no panic, and no text is lost but
    // white space and marks.
    let texts = [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "[TOOL_CALLS]add[CALL_ID]123[ARGS]{\"a\": 1}",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>é</arg_value>\n</tool_call>",
        "{\"name\": \"add\", \"parameters\": {\"a\": [1, {}]}}",
        "<|tools_prefix|>[{\"add\": {}}]<|tools_suffix|>",
    ];
    for format in &delft_tokens::tools::FORMATS {
        for text in texts {
            for (end, _) in text.char_indices() {
                let (calls, _) = read(format, [text[..end].repeat(2)].into_iter());
                assert!(calls.len() <= 2, "{}", format.name);
            }
        }
    }
}

#[test]
fn tools_have_names_and_schemas() {
    let refused = |name: &str, parameters: Value| Tool::new(name, parameters, false).is_err();
    for name in ["", "a b", "é", "a\"b", &"x".repeat(200)] {
        assert!(refused(name, json!({})), "{name}");
    }
    assert!(refused("f", json!([])));
    // A call without an object of arguments is none.
    assert!(refused("f", json!({ "type": "array" })));
    assert!(!refused("f", json!({ "type": ["object", "null"] })));
    assert!(!refused("a.b-c_9", json!({ "type": "object" })));
    let (_, listed) = tools();
    let told = describe(&[json!({ "role": "user", "content": "hi" })], listed.as_array().unwrap());
    assert_eq!((told.len(), &told[1]["content"]), (2, &json!("hi")));
}
