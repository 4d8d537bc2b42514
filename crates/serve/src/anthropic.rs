//! Anthropic's interface: messages, and counting their tokens.

use axum::response::{IntoResponse, Response};
use delft::{Finish, Metrics};
use serde_json::{Value, json};

use crate::catalogue::{Held, Known};
use crate::chat;
use crate::demand::Asked;
use crate::fields::{
    Field, Fields, Unknown, Variant, kind, no_effect, refused, refused_variant, shown, used,
    variant, wrong,
};
use crate::generation::{Event, Work};
use crate::log::timestamp_of;
use crate::models::{Conversation, Model};
use crate::problem::{Api, Problem};
use crate::reply::{Answer, Called, Piece, Reply};
use crate::router::{Answered, App, Call, noting, telling};
use crate::settings;
use crate::stream::{Framing, Gone, Sender, Shape, response};

/// The documented fields of messages.
pub(crate) const MESSAGES: &[Field] = &[
    used("max_tokens"),
    used("stop_sequences"),
    used("stream"),
    used("temperature"),
    used("top_k"),
    used("top_p"),
    no_effect("diagnostics"),
    no_effect("inference_geo"),
    no_effect("metadata"),
    no_effect("service_tier"),
    refused("container", "there are no containers", &[]),
];

/// Fields of beta versions: of messages and of counting their tokens.
pub(crate) const BETA: &[Field] = &[
    used("output_format"),
    // Names of the versions, which the clients send as a header.
    no_effect("betas"),
    no_effect("billing_policy"),
    no_effect("fallback_credit_token"),
    // It thins out long conversations: one that does not fit is refused here.
    no_effect("context_management"),
    refused("compaction", "the conversation is read as it comes", &[]),
    refused("thread", "nothing is stored: send the conversation whole", &[]),
    refused("fallbacks", "one model answers", &[]),
    refused("mcp_servers", "tools run where their client runs", &[]),
];

/// The documented fields of messages and of counting their tokens.
pub(crate) const PROMPT: &[Field] = &[
    used("messages"),
    used("model"),
    used("output_config"),
    used("system"),
    used("thinking"),
    no_effect("cache_control"),
    no_effect("speed"),
    no_effect("user_profile_id"),
    no_effect("workspace_id"),
    used("tool_choice"),
    used("tools"),
];

/// Fields of messages that count for nothing in a prompt: Open WebUI sends a whole request to have
/// its tokens counted.
const UNCOUNTED: &[Field] = &[
    no_effect("max_tokens"),
    no_effect("metadata"),
    no_effect("service_tier"),
    no_effect("stop_sequences"),
    no_effect("stream"),
    no_effect("temperature"),
    no_effect("top_k"),
    no_effect("top_p"),
];

pub(crate) const THINKING: &[Field] =
    &[used("type"), no_effect("budget_tokens"), no_effect("display")];

pub(crate) const OUTPUT: &[Field] = &[used("effort"), no_effect("task_budget"), used("format")];

/// The fields of a turn.
pub(crate) const MESSAGE: &[Field] = &[used("role"), used("content")];

const CACHED: Field = no_effect("cache_control");

/// Parts of a system prompt, of a tool's result, and of all turns.
pub(crate) const TEXTS: &[Variant] = &[
    variant("text", &[used("type"), used("text"), CACHED, no_effect("citations")]),
    refused_variant("image", chat::IMAGES),
    refused_variant("document", "documents are not supported by this model"),
    refused_variant("search_result", "search results are not supported: send their text"),
];

/// Further parts of turns of the assistant.
pub(crate) const SAID: &[Variant] = &[
    variant("thinking", &[used("type"), used("thinking"), no_effect("signature")]),
    // Encrypted for another server: no model here could read it.
    variant("redacted_thinking", &[used("type"), no_effect("data")]),
    variant(
        "tool_use",
        &[
            used("type"),
            used("id"),
            used("name"),
            used("input"),
            CACHED,
            refused("caller", "tools are called directly", &[r#"{"type": "direct"}"#]),
            refused("toolset_name", "there are no toolsets", &[]),
        ],
    ),
];

/// Further parts of turns of the user.
pub(crate) const BROUGHT: &[Variant] = &[
    variant(
        "tool_result",
        &[
            used("type"),
            used("tool_use_id"),
            used("content"),
            used("is_error"),
            CACHED,
            refused("toolset_name", "there are no toolsets", &[]),
        ],
    ),
    refused_variant("container_upload", chat::FILES),
];

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    asked: Asked,
    work: Work,
    streams: bool,
}

/// `/v1/messages/count_tokens`.
pub(crate) async fn count_tokens(call: Call) -> Answered {
    let fields = call.fields(&[PROMPT, BETA, UNCOUNTED], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let count = || {
        let asked = asked(&fields)?;
        let prompt = model.encode_chat(&conversation(&model, &fields, &asked)?)?;
        let counted = axum::Json(json!({ "input_tokens": prompt.len() }));
        Ok(noting(&fields, counted.into_response()))
    };
    call.reading(count).await
}

/// `/v1/messages`.
pub(crate) async fn messages(call: Call) -> Answered {
    let fields = call.fields(&[MESSAGES, PROMPT, BETA], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let ask = call.reading(|| read(&call, fields, model)).await?;
    let Ask { model, fields, asked, work, streams } = ask;
    let id = format!("msg_{}", call.id);
    // A call that is cut is told with its name, in a stream and in a whole answer.
    let mut reply = asked.reply(&model, &work.prompt).piecewise();
    let prompt_tokens = work.prompt.len();
    let generating = model.generator.start(vec![work], &call.trail).await?;
    if streams {
        let mut message = message(&id, &model);
        message["usage"] = json!({ "input_tokens": prompt_tokens, "output_tokens": 0 });
        let mut writer = Writer { reply, block: None, blocks: 0, called: false };
        let streamed = response(Framing::NamedEvents, |sender| async move {
            let _held = model;
            sender.send(&json!({ "type": "message_start", "message": message })).await?;
            sender.relay(generating, &mut writer, Api::Anthropic).await.map(drop)
        });
        return Ok(noting(&fields, streamed));
    }
    let answer = Answer::of(generating, &mut reply).await?;
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": answer.reasoning, "signature": "" }));
    }
    if !answer.content.is_empty() || content.is_empty() && answer.calls.is_empty() {
        content.push(json!({ "type": "text", "text": answer.content }));
    }
    // A block's input is an object: what came of one that was cut is left out.
    let input =
        |call: &Called| if call.arguments.is_object() { call.arguments.clone() } else { json!({}) };
    content.extend(answer.calls.iter().map(|call| block_of(call, input(call))));
    let mut object = message(&id, &model);
    object["content"] = content.into();
    if let Some(done) = &answer.end {
        let (reason, sequence) = stop_reason(&done.finish, !answer.calls.is_empty());
        object["stop_reason"] = reason.into();
        object["stop_sequence"] = sequence.into();
        object["usage"] = usage(&done.metrics, answer.reasoning_tokens);
        done.tell_cache(&mut object);
        done.note_closing(&mut object);
    }
    let told = noting(&fields, axum::Json(object).into_response());
    Ok(telling(answer.end.as_ref(), told))
}

/// The block of a tool's call.
fn block_of(call: &Called, input: Value) -> Value {
    json!({ "type": "tool_use", "id": format!("toolu_{}", call.id), "name": call.name, "input": input })
}

/// The header that all of Anthropic's clients send: lists of models are in their shape then.
pub(crate) const VERSION: &str = "anthropic-version";

/// A model of the list.
pub(crate) fn model_json(app: &App, known: &Known) -> Value {
    let created = timestamp_of(known.changed(app.created));
    json!({ "id": known.name, "type": "model", "display_name": known.name, "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": known.loaded.as_ref().map(|model| model.context()) })
}

/// The list of models, whole.
pub(crate) fn models(app: &App, known: &[Known]) -> Response {
    let name = |known: Option<&Known>| known.map(|known| known.name.clone());
    let (first, last) = (name(known.first()), name(known.last()));
    let data: Vec<Value> = known.iter().map(|known| model_json(app, known)).collect();
    let list = json!({ "data": data, "has_more": false, "first_id": first, "last_id": last });
    axum::Json(list).into_response()
}

/// The form asked of the answer.
fn asked(fields: &Fields) -> Result<Asked, Problem> {
    let output = fields.within("output_config", &[OUTPUT])?;
    Asked::anthropic(fields, output.as_ref())
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let mut options = settings::options(&model, &fields, call.seed())?;
    let most = fields.needed("max_tokens", fields.whole("max_tokens", 1..=i64::MAX)?)?;
    options.max_tokens = usize::try_from(most).ok();
    options.stop = settings::stops(&fields, "stop_sequences")?;
    let asked = asked(&fields)?;
    let prompt = model.encode_chat(&conversation(&model, &fields, &asked)?)?;
    model.check(&prompt)?;
    asked.constrain(&model, &prompt, true, &mut options)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    Ok(Ask { model, fields, asked, work: Work { prompt, options }, streams })
}

fn conversation(model: &Model, fields: &Fields, asked: &Asked) -> Result<Conversation, Problem> {
    let thinking = fields.within("thinking", &[THINKING])?;
    let on = match thinking.as_ref().map(|thinking| thinking.text("type")).transpose()?.flatten() {
        // Clients that leave this field out expect no reasoning.
        None | Some("disabled") => false,
        Some("enabled" | "adaptive") => true,
        Some(other) => {
            let expected = "enabled, adaptive or disabled";
            return Err(wrong("type", expected, &other.into()).within("thinking"));
        }
    };
    let mut extra = delft::reasoning::switches(on, model.template());
    if on && extra.is_empty() {
        fields.note("thinking");
    }
    if let Some(output) = fields.within("output_config", &[OUTPUT])?
        && let Some(effort) = output.text("effort").map_err(|e| e.within("output_config"))?
    {
        let place = "output_config.effort";
        match chat::effort(model, place, effort)? {
            Some((name, value)) => drop(extra.insert(name, value)),
            None => fields.note(place),
        }
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.value("system") {
        let system = chat::text(fields, "system", system, &[TEXTS])?;
        messages.push(json!({ "role": "system", "content": system }));
    }
    let list = fields.needed("messages", fields.list("messages")?)?;
    if list.is_empty() {
        return Err(Problem::field("messages", "expected at least one message, found none"));
    }
    for (i, value) in list.iter().enumerate() {
        turn(fields, &format!("messages[{i}]"), value, &mut messages)?;
    }
    // A last turn of the assistant is how its answer begins.
    let last = messages.pop_if(|last| last["role"] == "assistant" && last["tool_calls"].is_null());
    let prefill = last.and_then(|last| last["content"].as_str().map(str::to_string));
    let tools = asked.listed().to_vec();
    Ok(Conversation { messages, extra, tools, prefill: prefill.unwrap_or_default() })
}

/// Reads a message of content blocks as the messages that templates read: results of tools are
/// messages of their own.
fn turn(
    fields: &Fields,
    place: &str,
    value: &Value,
    messages: &mut Vec<Value>,
) -> Result<(), Problem> {
    fields.allow(place, value, &[MESSAGE])?;
    let role = match value["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        found => {
            let found = found.map_or("none".to_string(), |role| format!("\"{}\"", shown(role)));
            return Err(Problem::field(
                &format!("{place}.role"),
                format_args!("expected user, assistant or system, found {found}"),
            ));
        }
    };
    let more = match role {
        "assistant" => SAID,
        "user" => BROUGHT,
        _ => &[],
    };
    let blocks = match &value["content"] {
        Value::String(text) => {
            messages.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => {
            let place = format!("{place}.content");
            let message = format!("expected a string or a list of blocks, found {}", kind(other));
            return Err(Problem::field(&place, message));
        }
    };
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let place = format!("{place}.content[{i}]");
        let needed = |name: &str| {
            let found = block[name].as_str();
            found.ok_or_else(|| Problem::field(&format!("{place}.{name}"), "expected a string"))
        };
        match fields.variant(&place, block, "a block", &[TEXTS, more], None)? {
            "text" => text += needed("text")?,
            "thinking" => reasoning += needed("thinking")?,
            "tool_use" => calls.push(json!({
                "id": needed("id")?,
                "type": "function",
                "function": { "name": needed("name")?, "arguments": block["input"] },
            })),
            "tool_result" => {
                let mut content = match &block["content"] {
                    Value::Null => String::new(),
                    content => chat::text(fields, &format!("{place}.content"), content, &[TEXTS])?,
                };
                // Templates have no word for it: the model reads it in front of the result.
                if failed(&place, block)? {
                    content = format!("Error: {content}");
                }
                let id = needed("tool_use_id")?;
                messages.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
            }
            _ => {}
        }
    }
    let only_results = role == "user" && text.is_empty() && !blocks.is_empty();
    if only_results && blocks.iter().all(|block| block["type"] == "tool_result") {
        return Ok(());
    }
    let mut message = json!({ "role": role, "content": text });
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

/// Whether a tool's result says that the call failed.
fn failed(place: &str, block: &Value) -> Result<bool, Problem> {
    match &block["is_error"] {
        Value::Null => Ok(false),
        Value::Bool(failed) => Ok(*failed),
        other => Err(wrong(&format!("{place}.is_error"), "true or false", other)),
    }
}

fn message(id: &str, model: &Model) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": null,
    })
}

/// Why a text ended in which tools may have been called, in Anthropic's words, and the stop string
/// that ended it.
fn stop_reason(finish: &Finish, called: bool) -> (&'static str, Option<&str>) {
    match finish {
        Finish::Length => ("max_tokens", None),
        Finish::ContextFull => ("model_context_window_exceeded", None),
        Finish::StopString(stop) => ("stop_sequence", Some(stop)),
        _ if called => ("tool_use", None),
        _ => ("end_turn", None),
    }
}

fn usage(metrics: &Metrics, thinking: usize) -> Value {
    json!({
        "input_tokens": metrics.prompt_tokens - metrics.reused_tokens,
        "cache_read_input_tokens": metrics.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": metrics.generated_tokens,
        "output_tokens_details": { "thinking_tokens": thinking.min(metrics.generated_tokens) },
    })
}

/// Writes a stream of events.
struct Writer {
    reply: Reply,
    /// The type of the content block that is open.
    block: Option<&'static str>,
    /// Content blocks that were closed.
    blocks: usize,
    /// Whether a tool was called.
    called: bool,
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, _: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) => {
                for piece in self.reply.push(&token.text) {
                    self.piece(sender, piece).await?;
                }
                Ok(())
            }
            Event::Done(done) => {
                for piece in self.reply.finish(&done.finish) {
                    self.piece(sender, piece).await?;
                }
                if self.blocks == 0 && self.block.is_none() {
                    self.open(sender, "text").await?;
                }
                self.close(sender).await?;
                let (reason, sequence) = stop_reason(&done.finish, self.called);
                let mut delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                done.note_closing(&mut delta);
                let usage = usage(&done.metrics, self.reply.reasoning_tokens());
                let mut end = json!({ "type": "message_delta", "delta": delta, "usage": usage });
                done.tell_cache(&mut end);
                sender.send(&end).await?;
                sender.end(&json!({ "type": "message_stop" }));
                Ok(())
            }
        }
    }
}

impl Writer {
    async fn piece(&mut self, sender: &Sender, piece: Piece) -> Result<(), Gone> {
        let delta = match piece {
            Piece::Reasoning(text) => {
                self.open(sender, "thinking").await?;
                json!({ "type": "thinking_delta", "thinking": text })
            }
            Piece::Content(text) => {
                self.open(sender, "text").await?;
                json!({ "type": "text_delta", "text": text })
            }
            Piece::Call(call) | Piece::Begin(call) => {
                self.called = true;
                self.close(sender).await?;
                self.block = Some("tool_use");
                self.start(sender, block_of(&call, json!({}))).await?;
                json!({ "type": "input_json_delta", "partial_json": call.arguments_text() })
            }
            Piece::Arguments(text) => json!({ "type": "input_json_delta", "partial_json": text }),
            Piece::End => return self.close(sender).await,
        };
        let index = self.blocks;
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        sender.send(&event).await
    }

    /// Opens a content block of a type, unless it is open.
    async fn open(&mut self, sender: &Sender, block: &'static str) -> Result<(), Gone> {
        if self.block == Some(block) {
            return Ok(());
        }
        self.close(sender).await?;
        self.block = Some(block);
        let empty = match block {
            "thinking" => json!({ "type": "thinking", "thinking": "", "signature": "" }),
            _ => json!({ "type": "text", "text": "" }),
        };
        self.start(sender, empty).await
    }

    async fn start(&self, sender: &Sender, block: Value) -> Result<(), Gone> {
        let index = self.blocks;
        let event =
            json!({ "type": "content_block_start", "index": index, "content_block": block });
        sender.send(&event).await
    }

    async fn close(&mut self, sender: &Sender) -> Result<(), Gone> {
        if self.block.take().is_none() {
            return Ok(());
        }
        let event = json!({ "type": "content_block_stop", "index": self.blocks });
        self.blocks += 1;
        sender.send(&event).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_become_what_templates_read() {
        let result = |failed: Value| {
            let content = json!([{ "type": "text", "text": "no such file",
                "cache_control": { "type": "ephemeral" } }]);
            json!({ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "1",
                "is_error": failed, "content": content }] })
        };
        let read = |value: &Value| {
            let body = json!({ "messages": [value] }).to_string();
            let fields = Fields::read(body.as_bytes(), &[PROMPT], Unknown::Refused).unwrap();
            let mut messages = Vec::new();
            let read = turn(&fields, "messages[0]", value, &mut messages);
            read.map(|()| (messages, fields.noted())).map_err(|problem| problem.message)
        };
        let noted = Some("messages[].content[].content[].cache_control".to_string());
        let told =
            |text: &str| vec![json!({ "role": "tool", "tool_call_id": "1", "content": text })];
        assert_eq!(read(&result(true.into())), Ok((told("Error: no such file"), noted.clone())));
        assert_eq!(read(&result(false.into())), Ok((told("no such file"), noted)));
        let of = |block: Value| json!({ "role": "user", "content": [block] });
        let cases = [
            (result(1.into()), "messages[0].content[0].is_error: expected true or false, found 1"),
            (of(json!({ "type": "image" })), "messages[0].content[0]: images are not supported"),
            (of(json!({ "type": "document" })), "messages[0].content[0]: documents are not"),
            (
                of(json!({ "type": "server_tool_use" })),
                "messages[0].content[0]: expected a block of type text or tool_result, found server_tool_use",
            ),
            (
                of(json!({ "type": "text", "text": "", "colour": 1 })),
                "messages[0].content[0].colour: there is no such field",
            ),
            (
                json!({ "role": "user", "content": "", "name": "me" }),
                "messages[0].name: there is no such field",
            ),
        ];
        for (value, problem) in cases {
            let found = read(&value).unwrap_err();
            assert!(found.starts_with(problem), "{value}: {found}");
        }
    }
}
