//! The forms that other programs give a line, as those that are read here: ShareGPT's
//! `conversations`, Alpaca's `instruction`, a question with its answer under several names, and pairs
//! of whole conversations.

use super::line::{kind, list, string};
use formats::{Error, Hint, Result, Setting};
use serde_json::{Map, Value, json};

/// Stanford Alpaca's prompts, which models without a chat template are taught by: with an input and
/// without.
const ALPACA: [&str; 2] = [
    "Below is an instruction that describes a task, paired with an input that provides further context. \
     Write a response that appropriately completes the request.\n\n\
     ### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "Below is an instruction that describes a task. \
     Write a response that appropriately completes the request.\n\n\
     ### Instruction:\n{instruction}\n\n### Response:\n",
];

/// Keys that hold two answers to one prompt.
pub(super) const PAIR: [&str; 2] = ["chosen", "rejected"];

/// Keys by which the form of a line is known.
const KEYS: [&str; 5] = ["messages", "conversations", "prompt", "instruction", "text"];

/// Names that data sets give a prompt by itself, and what follows it.
const ASKED: [&str; 4] = ["question", "query", "problem", "input"];
const ANSWERED: [&str; 4] = ["answer", "response", "solution", "output"];

/// Other names of keys that mean the same wherever they stand.
const ALIASES: [(&str, &str); 2] = [("conversation", "conversations"), ("system_prompt", "system")];

/// A line as `messages`, or `prompt` with what follows it; lines that are so already stay as they
/// are. `chat`: the model has a template for messages.
pub(super) fn settled(mut object: Map<String, Value>, chat: bool) -> Result<Map<String, Value>> {
    if object.get("functions").is_some_and(|value| !value.is_null()) {
        let error =
            Error::new("functions", "tools, a list of functions as OpenAI has it", "functions");
        return Err(error.hint("{\"tools\": [{\"type\": \"function\", \"function\": {..}}]}"));
    }
    // Lines of several forms that went through one table have nulls for each other's keys.
    let named = |key: &str| {
        KEYS.contains(&key) || PAIR.contains(&key) || ["completion", "output"].contains(&key)
    };
    if KEYS.iter().any(|key| object.get(*key).is_some_and(|value| !value.is_null())) {
        object.retain(|key, value| !(value.is_null() && named(key)));
    }
    if let (Some(Value::Bool(_)), true) = (object.get("label"), object.contains_key("completion")) {
        let error = Error::new("label", "none beside a completion, which is learned", "a boolean");
        let hint = Hint::setting(Setting::Kto)
            .and(" learns by labels; without it keep the lines whose label is true");
        return Err(error.hint(hint));
    }
    renamed(&mut object)?;
    repeated(&mut object);
    let found: Vec<&str> = KEYS.into_iter().filter(|key| object.contains_key(*key)).collect();
    let pair = PAIR.iter().any(|key| object.contains_key(*key));
    match found[..] {
        ["conversations"] => conversations(&mut object, pair)?,
        ["instruction"] => instruction(&mut object, pair, chat)?,
        ["prompt"] => {
            // Whole conversations have their own beginning.
            let whole = PAIR.iter().any(|key| object.get(*key).is_some_and(Value::is_array));
            if let (Some(Value::String(prompt)), false) = (object.get("prompt").cloned(), whole) {
                ask(&mut object, prompt, pair, chat)?;
            }
        }
        ["messages"] => behind_system(&mut object)?,
        ["text"] => {}
        [] if pair => {}
        _ => {
            let own = || object.keys().take(8).map(String::as_str).collect::<Vec<_>>().join(", ");
            let found = match found.len() {
                0 if object.is_empty() => "none".to_owned(),
                0 => own(),
                _ => found.join(" and "),
            };
            let expected = "one of messages, prompt with completion, text, conversations, or instruction with output";
            return Err(Error::new("", expected, found));
        }
    }
    if pair {
        shared_prompt(&mut object)?;
    }
    Ok(object)
}

/// Gives keys the names by which forms are known, if a line has one form under other names: an
/// instruction with a context and a response (Dolly's), a prompt with a response, a question with
/// its answer.
///
/// # Errors
/// A question with a context beside it, which would not be learned.
fn renamed(object: &mut Map<String, Value>) -> Result<()> {
    let has = |object: &Map<String, Value>, key: &str| {
        object.get(key).is_some_and(|value| !value.is_null())
    };
    let rename = |object: &mut Map<String, Value>, from: &str, to: &str| {
        if let Some(value) = object.shift_remove(from) {
            object.insert(to.to_owned(), value);
        }
    };
    for (from, to) in ALIASES {
        if has(object, from) && !has(object, to) {
            rename(object, from, to);
        }
    }
    let own = |object: &Map<String, Value>, names: [&'static str; 4]| -> Vec<&'static str> {
        names.into_iter().filter(|name| has(object, name)).collect()
    };
    let pair = PAIR.iter().any(|key| has(object, key));
    let answers = own(object, ANSWERED);
    match KEYS.into_iter().filter(|key| has(object, key)).collect::<Vec<_>>()[..] {
        ["instruction"] => {
            if let (["response"], false) = (&answers[..], pair) {
                rename(object, "response", "output");
            }
            if !has(object, "input") {
                rename(object, "context", "input");
            }
        }
        ["prompt"] if !pair && !has(object, "completion") => {
            if let ["response"] = answers[..] {
                rename(object, "response", "completion");
            }
        }
        [] => {
            let (asked, wanted) = (own(object, ASKED), usize::from(!pair));
            let ([asked], true) = (&asked[..], answers.len() == wanted) else { return Ok(()) };
            for key in [*asked].into_iter().chain(answers.iter().copied()) {
                string(object, key)?;
            }
            if let Some(context) = object.get("context").filter(|context| !is_empty(context)) {
                let expected = format!("none beside {asked}, since it would not be learned");
                let error = Error::new("context", expected, kind(context));
                return Err(error.hint("put it into the prompt"));
            }
            rename(object, asked, "prompt");
            if let [answer] = answers[..] {
                rename(object, answer, "completion");
            }
        }
        _ => {}
    }
    Ok(())
}

/// Drops what says again what stands beside it: a prompt that is the first question of messages, and
/// messages that are the chosen answer's conversation.
fn repeated(object: &mut Map<String, Value>) {
    let Some(Value::Array(messages)) = object.get("messages") else { return };
    if object.get("chosen").and_then(Value::as_array) == Some(messages) {
        object.shift_remove("messages");
        return;
    }
    let asks = |message: &&Value| message.get("role").is_some_and(|role| role == "user");
    let first = messages.iter().find(asks).and_then(|message| message.get("content"));
    let is_first = first.is_some() && first == object.get("prompt");
    if is_first && !PAIR.iter().chain(&["completion"]).any(|key| object.contains_key(*key)) {
        object.shift_remove("prompt");
    }
}

/// Puts the system's message that stands beside messages in front of them, unless it is there.
fn behind_system(object: &mut Map<String, Value>) -> Result<()> {
    let before = system(object)?;
    let (Some(Value::Array(messages)), [system]) = (object.get_mut("messages"), &before[..]) else {
        return Ok(());
    };
    match messages.first() {
        Some(first) if first.get("role") == system.get("role") => {
            if first.get("content") != system.get("content") {
                let expected = "none beside messages that begin with another";
                return Err(Error::new("system", expected, "one"));
            }
        }
        _ => messages.insert(0, system.clone()),
    }
    Ok(())
}

/// ShareGPT's turns become messages; in front of two answers they are the prompt.
fn conversations(object: &mut Map<String, Value>, pair: bool) -> Result<()> {
    let turns = object.shift_remove("conversations").unwrap_or_default();
    let mut messages = system(object)?;
    for (i, turn) in list(&turns, "conversations")?.iter().enumerate() {
        // A question and its answer as one turn.
        if let (Some(Value::String(asked)), Some(Value::String(answer))) =
            (turn.get("input"), turn.get("output"))
        {
            messages.push(json!({ "role": "user", "content": asked }));
            messages.push(json!({ "role": "assistant", "content": answer }));
            continue;
        }
        messages.push(message(turn, &format!("conversations[{i}]"))?);
    }
    for key in PAIR.into_iter().filter(|_| pair) {
        if let Some(answer @ Value::Object(_)) = object.get(key) {
            let answer = message(answer, key)?;
            object.insert(key.to_owned(), json!([answer]));
        }
    }
    object.insert(if pair { "prompt" } else { "messages" }.to_owned(), Value::Array(messages));
    Ok(())
}

/// The message of a system that stands beside a conversation, if it says something.
fn system(object: &mut Map<String, Value>) -> Result<Vec<Value>> {
    match object.shift_remove("system") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) if text.is_empty() => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![json!({ "role": "system", "content": text })]),
        Some(other) => Err(Error::new("system", "a text", kind(&other))),
    }
}

/// A turn of ShareGPT's as a message; one that has a role is a message already.
fn message(turn: &Value, place: &str) -> Result<Value> {
    let at = |key: &str| format!("{place}.{key}");
    let object = turn
        .as_object()
        .ok_or_else(|| Error::new(place, "an object with from and value", kind(turn)))?;
    if object.contains_key("role") {
        return Ok(turn.clone());
    }
    let text = |key: &str| string(object, key).map_err(|e| Error { place: at(key), ..e });
    let (from, value) = (text("from")?, text("value")?);
    let role = match from {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" => "assistant",
        "system" => "system",
        "tool" | "observation" => "tool",
        "function_call" => {
            let call: Value = serde_json::from_str(value)
                .map_err(|_| Error::new(at("value"), "a call as JSON", "something else"))?;
            let calls = match call {
                Value::Array(calls) => calls,
                call => vec![call],
            };
            let call = |call| json!({ "type": "function", "function": call });
            let calls: Vec<Value> = calls.into_iter().map(call).collect();
            return Ok(json!({ "role": "assistant", "content": "", "tool_calls": calls }));
        }
        other => {
            let expected = "human, gpt, system, tool, function_call or observation";
            let other: String = other.chars().take(40).collect();
            return Err(Error::new(at("from"), expected, other));
        }
    };
    let mut message = json!({ "role": role, "content": value });
    if let Some(weight) = object.get("weight") {
        message["weight"] = weight.clone();
    }
    Ok(message)
}

/// Alpaca's instruction, with its input on a line below it, becomes a prompt, and its output what
/// follows. Without a template for messages the prompt is Stanford's.
fn instruction(object: &mut Map<String, Value>, pair: bool, chat: bool) -> Result<()> {
    let instruction = string(object, "instruction")?.to_owned();
    let input = match object.get("input") {
        None | Some(Value::Null) => String::new(),
        Some(_) => string(object, "input")?.to_owned(),
    };
    if let Some(history) = object.get("history").filter(|history| !is_empty(history)) {
        let error = Error::new("history", "none beside an instruction", kind(history));
        return Err(error.hint("whole conversations are messages"));
    }
    if !pair {
        let output = object.shift_remove("output");
        let output = output.ok_or_else(|| Error::new("output", "beside instruction", "none"))?;
        object.insert("completion".to_owned(), output);
    }
    if !chat {
        let form = if input.is_empty() { ALPACA[1] } else { ALPACA[0] };
        // The input first, so that nothing that an instruction says is taken for its place.
        let (front, behind) = form.split_once("{instruction}").unwrap_or((form, ""));
        let prompt = format!("{front}{instruction}{}", behind.replace("{input}", &input));
        return ask(object, prompt, pair, chat);
    }
    let asked = if input.is_empty() { instruction } else { format!("{instruction}\n{input}") };
    ask(object, asked, pair, chat)
}

/// Makes a text the prompt of what follows it, behind the system's message that stands beside it.
fn ask(object: &mut Map<String, Value>, asked: String, pair: bool, chat: bool) -> Result<()> {
    let before = system(object)?;
    if !chat && !before.is_empty() {
        return Err(Error::new("system", "none, for a model without a chat template", "one"));
    }
    if before.is_empty() {
        object.insert("prompt".to_owned(), asked.into());
        return Ok(());
    }
    let asked = json!({ "role": "user", "content": asked });
    object.insert("prompt".to_owned(), before.into_iter().chain([asked]).collect());
    let keys: &[&str] = if pair { &PAIR } else { &["completion"] };
    for key in keys {
        if let Some(Value::String(text)) = object.get(*key) {
            let answer = json!([{ "role": "assistant", "content": text }]);
            object.insert((*key).to_owned(), answer);
        }
    }
    Ok(())
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(all) => all.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// How a text tells who says what follows, as Anthropic's HH-RLHF has it.
const SPEAKERS: [(&str, &str); 2] = [("\n\nHuman:", "user"), ("\n\nAssistant:", "assistant")];

/// The messages of a text that is a conversation from its first line on.
fn spoken(text: &str) -> Option<Vec<Value>> {
    let (mut rest, mut messages) = (text, Vec::new());
    while !rest.is_empty() {
        let begins = |(mark, role)| Some((rest.strip_prefix(mark)?, role));
        let (said, role): (&str, &str) = SPEAKERS.into_iter().find_map(begins)?;
        let end = SPEAKERS.iter().filter_map(|(mark, _)| said.find(mark)).min();
        let (content, behind) = said.split_at(end.unwrap_or(said.len()));
        messages.push(json!({ "role": role, "content": content.trim() }));
        rest = behind;
    }
    (!messages.is_empty()).then_some(messages)
}

/// The messages with which two conversations begin become the prompt, unless that is one by itself
/// (as TRL's `extract_prompt`). Two texts that are conversations become messages first.
fn shared_prompt(object: &mut Map<String, Value>) -> Result<()> {
    if !object.contains_key("prompt") {
        let spoken = PAIR.map(|key| object.get(key).and_then(Value::as_str).and_then(spoken));
        if let [Some(chosen), Some(rejected)] = spoken {
            object.insert("chosen".to_owned(), chosen.into());
            object.insert("rejected".to_owned(), rejected.into());
        }
    }
    let [chosen, rejected] = PAIR.map(|key| object.get(key).and_then(Value::as_array).cloned());
    let (Some(chosen), Some(rejected)) = (chosen, rejected) else {
        if !object.contains_key("prompt") {
            return Err(Error::new("prompt", "beside chosen and rejected answers", "none"));
        }
        return Ok(());
    };
    if object.get("prompt").is_some_and(Value::is_array) {
        return Ok(());
    }
    let shared = super::chat::common(&chosen, &rejected);
    if shared == 0 {
        let expected = "two conversations that begin alike, or a prompt that is a list of messages";
        return Err(Error::new("chosen", expected, "two that differ from the first message on"));
    }
    // What is the same to the end of either leaves no answer there, which is told by its own place.
    object.insert("prompt".to_owned(), chosen[..shared].into());
    object.insert("chosen".to_owned(), chosen[shared..].into());
    object.insert("rejected".to_owned(), rejected[shared..].into());
    Ok(())
}
