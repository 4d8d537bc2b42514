//! `/v1/responses`: OpenAI's newer interface, whose answers are lists of items. A conversation
//! comes whole with each request, or goes on from a response that is kept (`stored.rs`).

use std::sync::Arc;

use axum::response::IntoResponse;
use delft::Finish;
use serde_json::{Map, Value, json};

use super::chat::{TEMPLATE, effort};
use super::stored::{Stored, normal};
use super::{EXTENSIONS, usage_of_responses};
use crate::catalogue::Held;
use crate::chat;
use crate::custom;
use crate::demand::{Asked, GRAMMARS, joined};
use crate::fields::{
    Field, Fields, Unknown, Variant, kind, no_effect, refused, refused_variant, shown, used,
    variant, wrong,
};
use crate::generation::{Done, Event, Work};
use crate::models::{Conversation, Model};
use crate::problem::{Api, Problem};
use crate::reply::{Answer, Called, Pending, Piece, Reply, token_json};
use crate::router::{Answered, App, Call, noting, telling};
use crate::settings::{self, MOST_TOP_LOGPROBS};
use crate::stream::{Framing, Gone, Sender, Shape, response};

/// The documented fields.
pub(crate) const FIELDS: &[Field] = &[
    used("include"),
    used("input"),
    used("instructions"),
    used("max_output_tokens"),
    used("model"),
    used("parallel_tool_calls"),
    used("previous_response_id"),
    used("reasoning"),
    used("store"),
    used("stream"),
    used("temperature"),
    used("text"),
    used("tool_choice"),
    used("tools"),
    used("top_logprobs"),
    used("top_p"),
    used("truncation"),
    no_effect("access_programs"),
    no_effect("client_metadata"),
    no_effect("max_tool_calls"),
    no_effect("metadata"),
    no_effect("prompt_cache_key"),
    no_effect("prompt_cache_options"),
    no_effect("prompt_cache_retention"),
    no_effect("safety_identifier"),
    no_effect("service_tier"),
    no_effect("stream_options"),
    no_effect("user"),
    refused("background", "requests are answered while their clients wait", &["false"]),
    refused("background_options", "requests are answered while their clients wait", &[]),
    refused("context_management", "the conversation is read as it comes", &[]),
    refused("conversation", CONVERSATIONS, &[]),
    refused("image", "answers are text", &[]),
    refused("moderation", "answers are not moderated", &[]),
    refused("prompt", "there are no stored prompts", &[]),
];

/// Why conversations are refused that have an id of their own.
const CONVERSATIONS: &str = "go on with previous_response_id, or send the conversation whole";

/// The documented fields of `/v1/responses/input_tokens`.
pub(crate) const COUNTED: &[Field] = &[
    used("input"),
    used("instructions"),
    used("model"),
    used("parallel_tool_calls"),
    used("previous_response_id"),
    used("reasoning"),
    used("text"),
    used("tool_choice"),
    used("tools"),
    used("truncation"),
    refused("conversation", CONVERSATIONS, &[]),
    refused("personality", "models here have no such setting", &[]),
];

/// Settings of chats that this interface has no name for.
const SAMPLING: &[Field] = &[
    used("frequency_penalty"),
    used("logit_bias"),
    used("presence_penalty"),
    used("seed"),
    used("stop"),
];

/// The type of items that are named by their ids.
pub(crate) const REFERENCE: &str = "item_reference";

/// The part of an answer that is included where it is asked for.
const LOGPROBS: &str = "message.output_text.logprobs";

/// How to reason.
pub(crate) const REASONING: &[Field] = &[
    used("effort"),
    no_effect("context"),
    no_effect("generate_summary"),
    no_effect("mode"),
    no_effect("summary"),
];

/// What a tool answered, of either kind.
const OUTPUT: &[Field] = &[
    used("type"),
    used("call_id"),
    used("name"),
    used("output"),
    no_effect("id"),
    no_effect("status"),
    used("namespace"),
    refused("caller", "tools are called directly", &[r#"{"type": "direct"}"#]),
];

/// Items of the input.
pub(crate) const ITEMS: &[Variant] = &[
    variant(
        "message",
        &[
            used("type"),
            used("role"),
            used("content"),
            no_effect("id"),
            no_effect("phase"),
            no_effect("status"),
        ],
    ),
    variant(
        "function_call",
        &[
            used("type"),
            used("call_id"),
            used("name"),
            used("arguments"),
            no_effect("id"),
            no_effect("parsed_arguments"),
            no_effect("status"),
            refused("async", "calls are answered in the next request", &["false"]),
            used("namespace"),
            refused("caller", "tools are called directly", &[r#"{"type": "direct"}"#]),
        ],
    ),
    variant("function_call_output", OUTPUT),
    variant(
        "custom_tool_call",
        &[
            used("type"),
            used("call_id"),
            used("name"),
            used("input"),
            no_effect("id"),
            no_effect("status"),
            refused("async", "calls are answered in the next request", &["false"]),
            used("namespace"),
            refused("caller", "tools are called directly", &[r#"{"type": "direct"}"#]),
        ],
    ),
    variant("custom_tool_call_output", OUTPUT),
    variant(
        "reasoning",
        &[
            used("type"),
            used("content"),
            no_effect("encrypted_content"),
            no_effect("id"),
            no_effect("status"),
            no_effect("summary"),
        ],
    ),
    variant("item_reference", &[used("type"), used("id")]),
];

const TEXT: &[Field] = &[used("type"), used("text"), no_effect("prompt_cache_breakpoint")];

/// Parts of a message's content, and of a call's output.
pub(crate) const PARTS: &[Variant] = &[
    variant("input_text", TEXT),
    variant("text", TEXT),
    refused_variant("input_image", chat::IMAGES),
    refused_variant("computer_screenshot", chat::IMAGES),
    refused_variant("input_audio", chat::AUDIO),
    refused_variant("input_file", chat::FILES),
];

/// Parts of an assistant's message besides.
pub(crate) const SAID: &[Variant] = &[variant(
    "output_text",
    &[
        used("type"),
        used("text"),
        no_effect("annotations"),
        no_effect("logprobs"),
        no_effect("parsed"),
    ],
)];

/// Parts of what an earlier answer thought.
pub(crate) const THOUGHT: &[Variant] = &[variant("reasoning_text", &[used("type"), used("text")])];

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    asked: Asked,
    work: Work,
    streams: bool,
    keeping: Option<Keeping>,
}

/// The data kept beside a response.
struct Keeping {
    app: Arc<App>,
    /// The response that it goes on from.
    before: Option<String>,
    input: Vec<Value>,
}

impl Keeping {
    fn keep(self, response: &Value) {
        self.app.responses.keep(self.before, &self.input, response);
    }
}

/// A conversation as it was sent.
struct Sent {
    /// As templates read it.
    messages: Vec<Value>,
    /// The items of this request alone.
    input: Vec<Value>,
}

pub(crate) async fn answer(call: Call) -> Answered {
    let table = &[FIELDS, SAMPLING, EXTENSIONS, GRAMMARS, TEMPLATE];
    let fields = call.fields(table, Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let before = before(&call, &fields)?;
    let ask = call.reading_beside(before, || read(&call, fields, model)).await?;
    let Ask { model, fields, asked, work, streams, keeping } = ask;
    let mut reply = asked.reply(&model, &work.prompt).piecewise();
    let head = head(&call, &model, &fields);
    let logprobs = work.options.logprobs;
    let generating = model.generator.start(vec![work], &call.trail).await?;
    if streams {
        let (items, told) = (Vec::new(), Vec::new());
        let mut writer = Writer {
            id: call.id,
            asked,
            head,
            reply,
            items,
            open: None,
            sent: 0,
            model,
            logprobs,
            pending: Pending::default(),
            told,
            keeping,
        };
        let streamed = response(Framing::NamedEvents, |sender| async move {
            writer.state(&sender, "response.created").await?;
            writer.state(&sender, "response.in_progress").await?;
            sender.relay(generating, &mut writer, Api::OpenAi).await.map(drop)
        });
        return Ok(noting(&fields, streamed));
    }
    let answer = Answer::of(generating, &mut reply).await?;
    let mut items = Vec::new();
    if !answer.reasoning.is_empty() {
        items.push(Item::Reasoning(answer.reasoning));
    }
    if !answer.content.is_empty() || items.is_empty() && answer.calls.is_empty() {
        let of = |&at: &usize| Some(token_json(&model, answer.tokens.get(at)?));
        let told = answer.said.iter().filter(|_| logprobs).filter_map(of).collect();
        items.push(Item::Message(answer.content, told));
    }
    items.extend(answer.calls.into_iter().map(Item::Call));
    let items = items.iter().enumerate();
    let items = items.map(|(i, item)| item.to_json(&asked, &call.id, i, "completed"));
    let object = ended(head, items.collect(), answer.end.as_ref(), answer.reasoning_tokens);
    keeping.into_iter().for_each(|keeping| keeping.keep(&object));
    let told = noting(&fields, axum::Json(object).into_response());
    Ok(telling(answer.end.as_ref(), told))
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let mut options = settings::options(&model, &fields, call.seed())?;
    let most = fields.whole("max_output_tokens", 1..=i64::MAX)?;
    options.max_tokens = most.and_then(|n| usize::try_from(n).ok());
    for (i, name) in fields.list("include")?.into_iter().flatten().enumerate() {
        match name.as_str() {
            Some(LOGPROBS) => options.logprobs = true,
            // There is nothing of that kind in an answer.
            Some(name) => fields.note(&format!("include: {}", shown(name))),
            None => return Err(wrong(&format!("include[{i}]"), "a string", name)),
        }
    }
    if let Some(top) = fields.whole("top_logprobs", 0..=MOST_TOP_LOGPROBS)? {
        if !options.logprobs && top > 0 {
            let message = format!("expected beside \"include\": [\"{LOGPROBS}\"]");
            return Err(Problem::field("top_logprobs", message));
        }
        options.top_logprobs = top as usize;
    }
    let asked = Asked::responses(&fields)?;
    let (prompt, input) = prompt(call, &fields, &model, &asked, options.max_tokens)?;
    model.check(&prompt)?;
    asked.constrain(&model, &prompt, true, &mut options)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let before = fields.text("previous_response_id")?.map(str::to_string);
    let app = call.app.clone();
    let keeping = fields.flag("store")?.unwrap_or(true).then_some(Keeping { app, before, input });
    Ok(Ask { model, fields, asked, work: Work { prompt, options }, streams, keeping })
}

/// `/v1/responses/input_tokens`: the tokens that the model would read.
pub(crate) async fn count(call: Call) -> Answered {
    let table = &[COUNTED, TEMPLATE];
    let fields = call.fields(table, Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let count = || {
        let asked = Asked::responses(&fields)?;
        let (prompt, _) = prompt(&call, &fields, &model, &asked, None)?;
        let count = json!({ "object": "response.input_tokens", "input_tokens": prompt.len() });
        Ok(noting(&fields, axum::Json(count)))
    };
    call.reading_beside(before(&call, &fields)?, count).await
}

/// The bytes of the conversation that a request goes on from.
fn before(call: &Call, fields: &Fields) -> Result<usize, Problem> {
    let id = fields.text("previous_response_id")?;
    Ok(id.map_or(0, |id| call.app.responses.size(id)))
}

/// The tokens that the model reads, and the items of this request as they are kept. The answer may
/// have so many tokens.
fn prompt(
    call: &Call,
    fields: &Fields,
    model: &Model,
    asked: &Asked,
    answer: Option<usize>,
) -> Result<(Vec<u32>, Vec<Value>), Problem> {
    let reasoning = fields.within("reasoning", &[REASONING])?;
    let mut extra = match &reasoning {
        Some(reasoning) => effort(model, reasoning, "effort").map_err(|e| e.within("reasoning"))?,
        None => Map::new(),
    };
    extra.extend(chat::template_variables(fields)?);
    let tools = asked.listed().to_vec();
    let Sent { messages, input } = sent(fields, &call.app.responses, &call.id)?;
    let conversation = Conversation { messages, extra, tools, ..Conversation::default() };
    let prompt = match fields.text("truncation")? {
        None | Some("disabled") => model.encode_chat(&conversation)?,
        Some("auto") => {
            let (prompt, dropped) = model.encode_cut(&conversation, answer)?;
            fields.note_cut(dropped, "messages");
            prompt
        }
        Some(other) => return Err(wrong("truncation", "auto or disabled", &other.into())),
    };
    Ok((prompt, input))
}

/// The conversation of a request: its instructions, what came before, and its input. The ids of
/// items contain the request's id.
fn sent(fields: &Fields, stored: &Stored, id: &str) -> Result<Sent, Problem> {
    let mut messages = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        messages.push(json!({ "role": "system", "content": text }));
    }
    let before = fields.text("previous_response_id")?.map(|before| stored.conversation(before));
    let before = before.transpose()?.unwrap_or_default();
    // Who goes on may have nothing to add.
    let input = fields.value("input").filter(|input| **input != json!([]) || before.is_empty());
    let mut items = match input {
        Some(Value::String(text)) => vec![json!({ "role": "user", "content": text })],
        Some(Value::Array(items)) if !items.is_empty() => items.clone(),
        None if !before.is_empty() => Vec::new(),
        None => return fields.needed("input", None),
        Some(other) => {
            let message = format!("expected a string or a list of items, found {}", kind(other));
            return Err(Problem::field("input", message));
        }
    };
    if before.len() + items.len() > chat::MOST_MESSAGES {
        let found = before.len() + items.len();
        let message = format!("expected at most {} items, found {found}", chat::MOST_MESSAGES);
        return Err(Problem::field("input", message));
    }
    let referring = |(_, item): &(usize, &Value)| item["type"] == REFERENCE;
    for (i, item) in items.iter().enumerate().filter(referring) {
        fields.variant(&format!("input[{i}]"), item, "an item", &[ITEMS], None)?;
    }
    stored.refer(&mut items, "input")?;
    // What is kept was read before: nothing is to be said of it again.
    let known = Fields::check(Map::new(), &[], Unknown::Noted)?;
    let mut thought = String::new();
    read_items(&known, "previous_response_id", &before, &mut messages, &mut thought)?;
    read_items(fields, "input", &items, &mut messages, &mut thought)?;
    Ok(Sent { messages, input: normal(id, &items) })
}

/// Adds items to the messages that templates read. A thought belongs to the assistant's message
/// behind it.
fn read_items(
    fields: &Fields,
    list: &str,
    items: &[Value],
    messages: &mut Vec<Value>,
    thought: &mut String,
) -> Result<(), Problem> {
    for (i, item) in items.iter().enumerate() {
        let place = format!("{list}[{i}]");
        let text = |name: &str| {
            let found = item[name].as_str();
            found.ok_or_else(|| Problem::field(&format!("{place}.{name}"), "expected a string"))
        };
        match fields.variant(&place, item, "an item", &[ITEMS], Some("message"))? {
            "message" => {
                let role = match item["role"].as_str() {
                    Some("developer") => "system",
                    Some(role @ ("system" | "user" | "assistant")) => role,
                    _ => {
                        let message = "expected system, developer, user or assistant";
                        return Err(Problem::field(&format!("{place}.role"), message));
                    }
                };
                let assistant: &[&[Variant]] = &[PARTS, SAID, chat::REFUSALS];
                let parts = if role == "assistant" { assistant } else { &[PARTS] };
                let place = format!("{place}.content");
                let content = chat::text(fields, &place, &item["content"], parts)?;
                let mut message = json!({ "role": role, "content": content });
                let thought = std::mem::take(thought);
                if role == "assistant" && !thought.is_empty() {
                    message["reasoning_content"] = thought.into();
                }
                messages.push(message);
            }
            kind @ ("function_call" | "custom_tool_call") => {
                let custom = kind == "custom_tool_call";
                let arguments = match text(if custom { "input" } else { "arguments" })? {
                    input if custom => custom::arguments(input),
                    arguments if arguments.trim().is_empty() => json!({}),
                    // A call that a model did not write to its end is sent back as it is.
                    arguments => {
                        serde_json::from_str(arguments).unwrap_or_else(|_| arguments.into())
                    }
                };
                let function =
                    json!({ "name": known(text("name")?, item), "arguments": arguments });
                let call =
                    json!({ "id": text("call_id")?, "type": "function", "function": function });
                // Calls belong to the assistant's message before them.
                let own = |last: &&mut Value| last["role"] == "assistant" && thought.is_empty();
                match messages.last_mut().filter(own) {
                    Some(last) => match last["tool_calls"].as_array_mut() {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => {
                        let mut message =
                            json!({ "role": "assistant", "content": "", "tool_calls": [call] });
                        if !thought.is_empty() {
                            message["reasoning_content"] = std::mem::take(thought).into();
                        }
                        messages.push(message);
                    }
                }
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = text("call_id")?;
                let place = format!("{place}.output");
                let content = chat::text(fields, &place, &item["output"], &[PARTS])?;
                let mut message = json!({ "role": "tool", "tool_call_id": id, "content": content });
                if let Some(name) = item["name"].as_str() {
                    message["name"] = known(name, item).into();
                }
                messages.push(message);
            }
            _ => {
                let place = format!("{place}.content");
                let content = Some(&item["content"]).filter(|content| !content.is_null());
                let text = content.map(|content| chat::text(fields, &place, content, &[THOUGHT]));
                *thought = text.transpose()?.unwrap_or_default();
            }
        }
    }
    Ok(())
}

/// The part of the response that is known before its text.
fn head(call: &Call, model: &Model, fields: &Fields) -> Value {
    let given = |name: &str, usual: Value| fields.value(name).cloned().unwrap_or(usual);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    json!({
        "id": format!("resp_{}", call.id),
        "object": "response",
        "created_at": now.unwrap_or_default().as_secs(),
        "status": "in_progress",
        "error": null,
        "incomplete_details": null,
        "instructions": given("instructions", Value::Null),
        "max_output_tokens": given("max_output_tokens", Value::Null),
        "metadata": given("metadata", json!({})),
        "model": model.name,
        "output": [],
        "parallel_tool_calls": given("parallel_tool_calls", true.into()),
        "previous_response_id": given("previous_response_id", Value::Null),
        "reasoning": given("reasoning", json!({ "effort": null, "summary": null })),
        "store": given("store", true.into()),
        "temperature": given("temperature", Value::Null),
        "text": given("text", json!({ "format": { "type": "text" } })),
        "tool_choice": given("tool_choice", "auto".into()),
        "tools": given("tools", json!([])),
        "top_logprobs": given("top_logprobs", 0.into()),
        "top_p": given("top_p", Value::Null),
        "truncation": given("truncation", "disabled".into()),
        "usage": null,
    })
}

/// The name by which the model knows the function of an item.
fn known(name: &str, item: &Value) -> String {
    let namespace = item["namespace"].as_str();
    namespace.map_or_else(|| name.to_string(), |namespace| joined(namespace, name))
}

/// The whole response.
fn ended(mut head: Value, items: Vec<Value>, done: Option<&Done>, reasoning: usize) -> Value {
    head["output"] = items.into();
    let cut = done.filter(|done| matches!(done.finish, Finish::Length | Finish::ContextFull));
    head["status"] = if cut.is_some() { "incomplete" } else { "completed" }.into();
    if cut.is_some() {
        head["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    if let Some(done) = done {
        head["usage"] = usage_of_responses(&done.metrics, reasoning);
        done.tell_cache(&mut head);
        done.note_closing(&mut head);
    }
    head
}

/// An item of the output.
#[derive(Debug, Clone)]
enum Item {
    Reasoning(String),
    /// With what is told of its tokens.
    Message(String, Vec<Value>),
    Call(Called),
}

impl Item {
    /// Its id, by its place in the output.
    fn id(&self, response: &str, index: usize) -> String {
        let kind = match self {
            Item::Reasoning(_) => "rs",
            Item::Message(..) => "msg",
            Item::Call(call) if call.custom => "ctc",
            Item::Call(_) => "fc",
        };
        format!("{kind}_{response}_{index}")
    }

    fn to_json(&self, asked: &Asked, response: &str, index: usize, status: &str) -> Value {
        let id = self.id(response, index);
        match self {
            Item::Reasoning(text) => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [],
                "content": [{ "type": "reasoning_text", "text": text }],
            }),
            Item::Message(text, told) => json!({
                "id": id, "type": "message", "status": status, "role": "assistant",
                "content": [text_part(text, told)],
            }),
            Item::Call(call) => {
                let arguments = call.arguments_text();
                let whole = match call.custom {
                    true => call.ended,
                    false => serde_json::from_str::<Value>(&arguments).is_ok(),
                };
                let mut item = json!({
                    "id": id, "type": call_type(call),
                    "status": if status == "completed" && !whole { "incomplete" } else { status },
                    "call_id": format!("call_{}", call.id), "name": call.name,
                });
                item[argument(call)] = arguments.into();
                if let Some((namespace, name)) = asked.spaced(&call.name) {
                    (item["namespace"], item["name"]) = (namespace.into(), name.into());
                }
                item
            }
        }
    }
}

/// The type of an item that is a call.
fn call_type(call: &Called) -> &'static str {
    if call.custom { "custom_tool_call" } else { "function_call" }
}

/// The field of it that holds what the tool is called with.
fn argument(call: &Called) -> &'static str {
    if call.custom { "input" } else { "arguments" }
}

/// The type of events about that field.
fn argument_event(call: &Called, what: &str) -> String {
    let name = if call.custom { "custom_tool_call_input" } else { "function_call_arguments" };
    format!("response.{name}.{what}")
}

fn text_part(text: &str, told: &[Value]) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": told })
}

/// Writes a stream of events.
struct Writer {
    /// The request's.
    id: String,
    asked: Asked,
    head: Value,
    reply: Reply,
    /// Items that are whole, as the response shows them.
    items: Vec<Value>,
    /// The item that is open.
    open: Option<Item>,
    /// Events so far.
    sent: u64,
    model: Held,
    logprobs: bool,
    /// Log-probabilities of tokens whose text is still held back.
    pending: Pending<Value>,
    /// Log-probabilities of the next piece's tokens.
    told: Vec<Value>,
    keeping: Option<Keeping>,
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, _: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) => {
                let pieces = self.reply.push(&token.text);
                let ends = self.model.engine.end_tokens().contains(&token.id);
                let told = (self.logprobs && !ends).then(|| token_json(&self.model, &token));
                self.told = self.pending.take(told, &pieces);
                for piece in pieces {
                    self.piece(sender, piece).await?;
                }
                Ok(())
            }
            Event::Done(done) => {
                let pieces = self.reply.finish(&done.finish);
                self.told = self.pending.take(None, &pieces);
                for piece in pieces {
                    self.piece(sender, piece).await?;
                }
                if self.items.is_empty() && self.open.is_none() {
                    self.open(sender, Item::Message(String::new(), Vec::new())).await?;
                }
                self.close(sender).await?;
                let (items, reasoning) =
                    (std::mem::take(&mut self.items), self.reply.reasoning_tokens());
                self.head = ended(self.head.take(), items, Some(&done), reasoning);
                self.keeping.take().into_iter().for_each(|keeping| keeping.keep(&self.head));
                let cut = self.head["status"] == "incomplete";
                let kind = if cut { "response.incomplete" } else { "response.completed" };
                let event = json!({ "response": self.head });
                sender.end(&self.numbered(kind, event));
                Ok(())
            }
        }
    }
}

impl Writer {
    /// An event with the next number.
    fn numbered(&mut self, kind: &str, mut event: Value) -> Value {
        event["type"] = kind.into();
        event["sequence_number"] = self.sent.into();
        self.sent += 1;
        event
    }

    async fn send(&mut self, sender: &Sender, kind: &str, event: Value) -> Result<(), Gone> {
        let event = self.numbered(kind, event);
        sender.send(&event).await
    }

    /// Sends the response as it is.
    async fn state(&mut self, sender: &Sender, kind: &str) -> Result<(), Gone> {
        let event = json!({ "response": self.head });
        self.send(sender, kind, event).await
    }

    /// The fields that say which item an event is about.
    fn place(&self, item: &Item) -> Value {
        json!({ "item_id": item.id(&self.id, self.items.len()), "output_index": self.items.len() })
    }

    async fn piece(&mut self, sender: &Sender, piece: Piece) -> Result<(), Gone> {
        match piece {
            Piece::Reasoning(text) => {
                if !matches!(self.open, Some(Item::Reasoning(_))) {
                    self.open(sender, Item::Reasoning(String::new())).await?;
                }
                self.text(sender, "response.reasoning_text.delta", text).await
            }
            Piece::Content(text) => {
                if !matches!(self.open, Some(Item::Message(..))) {
                    self.open(sender, Item::Message(String::new(), Vec::new())).await?;
                }
                self.text(sender, "response.output_text.delta", text).await
            }
            Piece::Call(call) => {
                let arguments = call.arguments_text();
                self.open(sender, Item::Call(Called { arguments: "".into(), ..call })).await?;
                self.arguments(sender, arguments).await?;
                self.close(sender).await
            }
            Piece::Begin(call) => self.open(sender, Item::Call(call)).await,
            Piece::Arguments(text) => self.arguments(sender, text).await,
            Piece::End => {
                if let Some(Item::Call(call)) = &mut self.open {
                    call.ended = true;
                }
                self.close(sender).await
            }
        }
    }

    /// Adds to the arguments of the call that is open.
    async fn arguments(&mut self, sender: &Sender, more: String) -> Result<(), Gone> {
        let Some(Item::Call(call)) = &mut self.open else { return Ok(()) };
        call.add(&more);
        let kind = argument_event(call, "delta");
        let Some(item) = &self.open else { return Ok(()) };
        let mut event = self.place(item);
        event["delta"] = more.into();
        self.send(sender, &kind, event).await
    }

    /// Adds text to the item that is open.
    async fn text(&mut self, sender: &Sender, kind: &str, more: String) -> Result<(), Gone> {
        let Some(item) = &mut self.open else { return Ok(()) };
        let mut told = Vec::new();
        match item {
            Item::Reasoning(text) => *text += &more,
            Item::Message(text, all) => {
                *text += &more;
                told = std::mem::take(&mut self.told);
                all.extend_from_slice(&told);
            }
            Item::Call(_) => {}
        }
        let Some(item) = &self.open else { return Ok(()) };
        let mut event = self.place(item);
        event["content_index"] = 0.into();
        event["delta"] = more.into();
        event["logprobs"] = told.into();
        self.send(sender, kind, event).await
    }

    /// Opens an item, behind the one that was open.
    async fn open(&mut self, sender: &Sender, item: Item) -> Result<(), Gone> {
        self.close(sender).await?;
        let mut shown = item.to_json(&self.asked, &self.id, self.items.len(), "in_progress");
        if let Item::Call(call) = &item {
            shown[argument(call)] = "".into();
        } else {
            shown["content"] = json!([]);
        }
        let event = json!({ "output_index": self.items.len(), "item": shown });
        self.send(sender, "response.output_item.added", event).await?;
        if let Item::Message(..) = item {
            let mut part = self.place(&item);
            part["content_index"] = 0.into();
            part["part"] = text_part("", &[]);
            self.send(sender, "response.content_part.added", part).await?;
        }
        self.open = Some(item);
        Ok(())
    }

    /// Ends the item that is open.
    async fn close(&mut self, sender: &Sender) -> Result<(), Gone> {
        let Some(item) = self.open.take() else { return Ok(()) };
        let place = self.place(&item);
        let with = |name: &str, value: Value| {
            let mut event = place.clone();
            event["content_index"] = 0.into();
            event[name] = value;
            event
        };
        match &item {
            Item::Reasoning(text) => {
                let event = with("text", text.as_str().into());
                self.send(sender, "response.reasoning_text.done", event).await?;
            }
            Item::Message(text, told) => {
                let mut event = with("text", text.as_str().into());
                event["logprobs"] = told.as_slice().into();
                self.send(sender, "response.output_text.done", event).await?;
                let event = with("part", text_part(text, told));
                self.send(sender, "response.content_part.done", event).await?;
            }
            Item::Call(call) => {
                let mut event = place.clone();
                event[argument(call)] = call.arguments_text().into();
                if !call.custom {
                    let name = self.asked.spaced(&call.name).map_or(&*call.name, |(_, name)| name);
                    event["name"] = name.into();
                }
                self.send(sender, &argument_event(call, "done"), event).await?;
            }
        }
        let whole = item.to_json(&self.asked, &self.id, self.items.len(), "completed");
        let event = json!({ "output_index": self.items.len(), "item": whole });
        self.send(sender, "response.output_item.done", event).await?;
        self.items.push(whole);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_what_templates_read() {
        let read = |input: Value| {
            let body = json!({ "input": input }).to_string();
            let fields = Fields::read(body.as_bytes(), &[FIELDS], Unknown::Refused).unwrap();
            let read = sent(&fields, &Stored::default(), "1");
            read.map(|read| (read.messages, fields.noted())).map_err(|problem| problem.message)
        };
        let thought = json!({ "type": "reasoning", "id": "rs_1", "summary": [],
            "content": [{ "type": "reasoning_text", "text": "Hm." }] });
        let said = json!({ "type": "message", "role": "assistant", "id": "msg_1", "content": [
            { "type": "output_text", "text": "Yes", "annotations": [] },
            { "type": "refusal", "refusal": ", no." },
        ] });
        let call =
            json!({ "type": "function_call", "call_id": "1", "name": "f", "arguments": "{}" });
        let result = json!({ "type": "function_call_output", "call_id": "1", "output": "2" });
        let (found, noted) = read(
            json!([{ "role": "user", "content": "?" }, thought, said, call, thought, call, result]),
        )
        .unwrap();
        let called = json!([{ "id": "1", "type": "function",
            "function": { "name": "f", "arguments": {} } }]);
        assert_eq!(
            found,
            [
                json!({ "role": "user", "content": "?" }),
                json!({ "role": "assistant", "content": "Yes, no.", "reasoning_content": "Hm.",
                    "tool_calls": called }),
                json!({ "role": "assistant", "content": "", "reasoning_content": "Hm.",
                    "tool_calls": called }),
                json!({ "role": "tool", "tool_call_id": "1", "content": "2" }),
            ]
        );
        let noted = noted.unwrap();
        assert_eq!(noted, "input[].id, input[].summary, input[].content[].annotations");
        let cases = [
            (json!([{ "type": "item_reference", "id": "1" }]), "input[0].id: there is no item"),
            (json!([]), "input: expected a string or"),
            (json!([{ "type": "computer_call" }]), "input[0]: expected an item of type message or"),
            (
                json!([{ "role": "user", "content": [{ "type": "input_file" }] }]),
                "input[0].content[0]: files are not supported by this model (type input_file)",
            ),
            (json!([{ "role": "user", "content": "", "name": "x" }]), "input[0].name: there is no"),
        ];
        for (input, problem) in cases {
            let found = read(input.clone()).unwrap_err();
            assert!(found.starts_with(problem), "{input}: {found}");
        }
    }
}
