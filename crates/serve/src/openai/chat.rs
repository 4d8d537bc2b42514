//! `/v1/chat/completions`.

use axum::response::IntoResponse;
use delft::{Finish, Token};
use serde_json::{Map, Value, json};

use super::{
    EXTENSIONS, Head, collect, finish_reason, stream, streams, tell_cache, usage, variants,
};
use crate::catalogue::Held;
use crate::chat;
use crate::demand::{Asked, GRAMMARS};
use crate::fields::{Field, Fields, Unknown, no_effect, refused, used, wrong};
use crate::generation::{Done, Event, Work};
use crate::models::{Conversation, Model};
use crate::problem::Problem;
use crate::reply::{Answer, Called, Piece, Reply, Usage, token_json};
use crate::router::{Answered, Call, noting, telling};
use crate::settings::{self, MOST_TOP_LOGPROBS};
use crate::stream::{Framing, Gone, Sender, Shape, response};

/// The documented fields.
pub(crate) const FIELDS: &[Field] = &[
    used("messages"),
    used("model"),
    used("frequency_penalty"),
    used("logit_bias"),
    used("logprobs"),
    used("max_completion_tokens"),
    used("max_tokens"),
    used("n"),
    used("parallel_tool_calls"),
    used("presence_penalty"),
    used("reasoning_effort"),
    used("response_format"),
    used("seed"),
    used("stop"),
    used("stream"),
    used("stream_options"),
    used("temperature"),
    used("tool_choice"),
    used("tools"),
    used("top_logprobs"),
    used("top_p"),
    no_effect("metadata"),
    no_effect("prediction"),
    no_effect("prompt_cache_key"),
    no_effect("prompt_cache_options"),
    no_effect("prompt_cache_retention"),
    no_effect("safety_identifier"),
    no_effect("service_tier"),
    // Of chats, which nobody here lists.
    no_effect("store"),
    // OpenRouter's, which asks for what is told anyway.
    no_effect("usage"),
    no_effect("user"),
    no_effect("verbosity"),
    refused("audio", "answers are text", &[]),
    refused("function_call", "the older form of tool_choice", &["\"none\"", "\"auto\""]),
    refused("functions", "the older form of tools", &[]),
    refused("modalities", "answers are text", &["[\"text\"]"]),
    refused("moderation", "answers are not moderated", &[]),
    refused("web_search_options", "nothing is searched", &[]),
];

/// A variable of templates, by the name that vLLM and llama.cpp gave it.
pub(super) const TEMPLATE: &[Field] = &[used("chat_template_kwargs")];

/// What other servers of open models know besides: the switch for thinking in the two forms that
/// its models' own services have, whether the last message, an assistant's, is gone on with, and
/// Mistral's seed.
const ELSEWHERE: &[Field] = &[
    used("enable_thinking"),
    used("random_seed"),
    refused("safe_prompt", "no prompt is put in front: send a system message", &["false"]),
    used("thinking"),
    used("add_generation_prompt"),
    used("continue_final_message"),
];

/// The switch for thinking as an object.
const THINKING: &[Field] = &[used("type"), no_effect("budget_tokens"), no_effect("clear_thinking")];

/// Most answers to one request.
const MOST_ANSWERS: i64 = 16;

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    asked: Asked,
    work: Vec<Work>,
    streams: bool,
    with_usage: bool,
    logprobs: bool,
}

pub(crate) async fn answer(call: Call) -> Answered {
    let table = &[FIELDS, EXTENSIONS, GRAMMARS, TEMPLATE, ELSEWHERE];
    let fields = call.fields(table, Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let ask = call.reading(|| read(&call, fields, model)).await?;
    let model = ask.model.clone();
    // A call that is cut is told as far as it came, in a stream and in a whole answer.
    let reply = |work: &Work| ask.asked.reply(&model, &work.prompt).piecewise();
    let replies: Vec<Reply> = ask.work.iter().map(reply).collect();
    let generating = model.generator.start(ask.work, &call.trail).await?;
    if ask.streams {
        let mut head = Head::new(&call, "chatcmpl", "chat.completion.chunk", &model);
        head.usage_follows = ask.with_usage;
        let (called, custom) = (vec![0; replies.len()], vec![false; replies.len()]);
        let (logprobs, total) = (ask.logprobs, Usage::default());
        let first = None;
        let mut writer = Writer { head, model, replies, called, custom, logprobs, total, first };
        let with_usage = ask.with_usage;
        let streamed = response(Framing::Events, |sender| async move {
            writer.begin(&sender).await?;
            let usage = |writer: Writer| with_usage.then(|| writer.usage());
            stream(&sender, generating, writer, usage).await
        });
        return Ok(noting(&ask.fields, streamed));
    }
    let answers = collect(generating, replies).await?;
    let head = Head::new(&call, "chatcmpl", "chat.completion", &model);
    let mut total = Usage::default();
    let mut choices = Vec::new();
    for (index, answer) in answers.iter().enumerate() {
        total.add(&answer.metrics(), answer.reasoning_tokens, index == 0);
        choices.push(choice(&model, index, answer, ask.logprobs));
    }
    let mut object = head.with(choices.into());
    object["usage"] = usage(total);
    tell_cache(&mut object, &answers);
    let told = noting(&ask.fields, axum::Json(object).into_response());
    Ok(telling(answers.first().and_then(|answer| answer.end.as_ref()), told))
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let mut options = settings::options(&model, &fields, call.seed())?;
    let most = settings::most_tokens(&fields, "max_completion_tokens", 1)?;
    options.max_tokens = most.or(settings::most_tokens(&fields, "max_tokens", 1)?);
    options.logprobs = fields.flag("logprobs")?.unwrap_or(false);
    if let Some(top) = fields.whole("top_logprobs", 0..=MOST_TOP_LOGPROBS)? {
        if !options.logprobs && top > 0 {
            return Err(Problem::field("top_logprobs", "expected beside \"logprobs\": true"));
        }
        options.top_logprobs = top as usize;
    }
    let n = fields.whole("n", 1..=MOST_ANSWERS)?.unwrap_or(1) as usize;
    let (streams, with_usage) = streams(&fields)?;
    let mut extra = effort(&model, &fields, "reasoning_effort")?;
    extra.extend(thinking(&model, &fields)?);
    extra.extend(chat::template_variables(&fields)?);
    let mut messages = chat::messages(&fields)?;
    let prefill = begun(&fields, &mut messages)?;
    let asked = Asked::openai(&fields)?;
    let tools = asked.listed().to_vec();
    let conversation = Conversation { messages, extra, tools, prefill };
    let prompt = model.encode_chat(&conversation)?;
    model.check(&prompt)?;
    asked.constrain(&model, &prompt, true, &mut options)?;
    let logprobs = options.logprobs;
    let work = variants(&options, n).map(|options| Work { prompt: prompt.clone(), options });
    Ok(Ask { work: work.collect(), model, fields, asked, streams, with_usage, logprobs })
}

/// The template's variables for the switch for thinking.
fn thinking(model: &Model, fields: &Fields) -> Result<Map<String, Value>, Problem> {
    let mut extra =
        chat::thinking(model, fields, "enable_thinking", fields.flag("enable_thinking")?);
    if let Some(switch) = fields.within("thinking", &[THINKING])? {
        let within = |e: Problem| e.within("thinking");
        let on = match switch.text("type").map_err(within)? {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            Some("auto") | None => None,
            Some(other) => {
                return Err(within(wrong("type", "enabled, disabled or auto", &other.into())));
            }
        };
        extra.extend(chat::thinking(model, fields, "thinking", on));
    }
    Ok(extra)
}

/// The beginning of the answer: the text of the last message, which is taken away, where the
/// request has that gone on with.
fn begun(fields: &Fields, messages: &mut Vec<Value>) -> Result<String, Problem> {
    const NAME: &str = "continue_final_message";
    let continues = fields.flag(NAME)?.unwrap_or(false);
    if fields.flag("add_generation_prompt")?.unwrap_or(!continues) == continues {
        let message = "expected true, or false beside \"continue_final_message\": true";
        return Err(Problem::field("add_generation_prompt", message));
    }
    if !continues {
        return Ok(String::new());
    }
    let text = messages.last().filter(|last| last["role"] == "assistant");
    let text = text.and_then(|last| last["content"].as_str().map(str::to_string));
    let text = text.ok_or_else(|| Problem::field(NAME, "expected a last message of the assistant"));
    messages.pop();
    text
}

/// The template's variables for an effort of reasoning: its own variable `reasoning_effort`, or its
/// switch for thinking.
pub(super) fn effort(
    model: &Model,
    fields: &Fields,
    name: &str,
) -> Result<Map<String, Value>, Problem> {
    let Some(effort) = fields.text(name)? else { return Ok(Map::new()) };
    let variable = chat::effort(model, name, effort)?;
    let reads = variable.is_some();
    let mut extra: Map<_, _> = variable.into_iter().collect();
    if effort == "none" || !reads {
        extra.extend(delft::reasoning::switches(effort != "none", model.template()));
    }
    if extra.is_empty() {
        fields.note(name);
    }
    Ok(extra)
}

/// Whether a token belongs to the text: the model's end token does not.
fn is_text(model: &Model, token: &Token, last: bool) -> bool {
    !(last && model.engine.end_tokens().contains(&token.id))
}

fn choice(model: &Model, index: usize, answer: &Answer, logprobs: bool) -> Value {
    let mut message = json!({ "role": "assistant", "content": answer.content, "refusal": null });
    if !answer.reasoning.is_empty() {
        message["reasoning_content"] = answer.reasoning.as_str().into();
    }
    let calls = answer.calls.iter().map(call_json);
    let calls: Vec<Value> = calls.collect();
    if !calls.is_empty() {
        if answer.content.is_empty() {
            message["content"] = Value::Null;
        }
        message["tool_calls"] = calls.as_slice().into();
    }
    let last = answer.tokens.len();
    let told = answer.tokens.iter().enumerate();
    let told = told.filter(|(i, token)| is_text(model, token, i + 1 == last));
    let told: Vec<Value> = told.map(|(_, token)| token_json(model, token)).collect();
    let mut choice = json!({
        "index": index,
        "message": message,
        "logprobs": if logprobs { json!({ "content": told, "refusal": null }) } else { Value::Null },
        "finish_reason": answer.finish().map(|finish| reason(finish, !calls.is_empty())),
    });
    answer.end.iter().for_each(|done| done.note_closing(&mut choice));
    choice
}

/// Why a text ended in which tools may have been called.
fn reason(finish: &Finish, called: bool) -> &'static str {
    match finish_reason(finish) {
        "stop" if called => "tool_calls",
        reason => reason,
    }
}

fn call_json(call: &Called) -> Value {
    if call.custom {
        let custom = json!({ "name": call.name, "input": call.arguments_text() });
        return json!({ "id": call.id, "type": "custom", "custom": custom });
    }
    json!({
        "id": call.id,
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments_text() },
    })
}

/// Writes a stream of chunks.
struct Writer {
    head: Head,
    model: Held,
    replies: Vec<Reply>,
    /// Calls of tools in each text so far.
    called: Vec<usize>,
    /// Whether the latest of them is of a custom tool.
    custom: Vec<bool>,
    logprobs: bool,
    total: Usage,
    /// How the first text ended.
    first: Option<Done>,
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, index: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) => {
                let pieces = self.replies[index].push(&token.text);
                self.pieces(sender, index, pieces, Some(&token)).await
            }
            Event::Done(done) => {
                let pieces = self.replies[index].finish(&done.finish);
                self.pieces(sender, index, pieces, None).await?;
                let reasoning = self.replies[index].reasoning_tokens();
                self.total.add(&done.metrics, reasoning, index == 0);
                let reason = reason(&done.finish, self.called[index] > 0);
                let mut chunk = self.chunk(index, json!({}), None, Some(reason));
                done.note_closing(&mut chunk["choices"][0]);
                done.tell_cache(&mut chunk);
                if index == 0 {
                    self.first = Some(done);
                }
                sender.send(&chunk).await
            }
        }
    }
}

impl Writer {
    /// Opens every text.
    async fn begin(&mut self, sender: &Sender) -> Result<(), Gone> {
        for index in 0..self.replies.len() {
            let delta = json!({ "role": "assistant", "content": "" });
            sender.send(&self.chunk(index, delta, None, None)).await?;
        }
        Ok(())
    }

    fn usage(&self) -> Value {
        let mut object = self.head.with(json!([]));
        object["usage"] = usage(self.total);
        self.first.iter().for_each(|done| done.tell_cache(&mut object));
        object
    }

    /// Sends pieces of a text, the first with what is to be told of the token.
    async fn pieces(
        &mut self,
        sender: &Sender,
        index: usize,
        pieces: Vec<Piece>,
        token: Option<&Token>,
    ) -> Result<(), Gone> {
        let told = token.filter(|token| self.logprobs && is_text(&self.model, token, true));
        let mut told = told
            .map(|token| json!({ "content": [token_json(&self.model, token)], "refusal": null }));
        for piece in pieces {
            let delta = match piece {
                Piece::Reasoning(text) => json!({ "reasoning_content": text }),
                Piece::Content(text) => json!({ "content": text }),
                Piece::Call(call) | Piece::Begin(call) => {
                    self.custom[index] = call.custom;
                    let mut call = call_json(&call);
                    call["index"] = self.called[index].into();
                    self.called[index] += 1;
                    json!({ "tool_calls": [call] })
                }
                Piece::Arguments(text) => {
                    let call = self.called[index].saturating_sub(1);
                    let more = match self.custom[index] {
                        true => json!({ "index": call, "custom": { "input": text } }),
                        false => json!({ "index": call, "function": { "arguments": text } }),
                    };
                    json!({ "tool_calls": [more] })
                }
                Piece::End => continue,
            };
            sender.send(&self.chunk(index, delta, told.take(), None)).await?;
        }
        if told.is_some() {
            sender.send(&self.chunk(index, json!({ "content": "" }), told, None)).await?;
        }
        Ok(())
    }

    fn chunk(
        &self,
        index: usize,
        delta: Value,
        logprobs: Option<Value>,
        finish: Option<&str>,
    ) -> Value {
        self.head.with(json!([{
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }]))
    }
}
