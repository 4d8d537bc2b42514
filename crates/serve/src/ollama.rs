//! Ollama's interface: chat and generate; what is about models is in `manage.rs`. Streams are JSON
//! lines, and are the default.

pub(crate) mod manage;

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use delft::{Finish, Token};
use serde_json::{Map, Value, json};

use crate::catalogue::Held;
use crate::chat;
use crate::demand::Asked;
use crate::fields::{Field, Fields, Unknown, no_effect, refused, used, wrong};
use crate::generation::{Done, Event, Work};
use crate::infill;
use crate::keep::Keep;
use crate::log::timestamp;
use crate::models::{Conversation, Model};
use crate::problem::{Api, Problem};
use crate::reply::{Answer, Began, Called, Piece, Reply, nanoseconds, token_json};
use crate::router::{Answered, Call, keep_alive, noting, telling};
use crate::settings::{self, MOST_TOP_LOGPROBS};
use crate::stream::{Framing, Gone, Sender, Shape, response};
use crate::watch::Trail;

/// The documented fields of both kinds of requests.
pub(crate) const SHARED: &[Field] = &[
    used("model"),
    used("format"),
    used("logprobs"),
    used("options"),
    used("stream"),
    used("think"),
    used("top_logprobs"),
    used("keep_alive"),
    no_effect("shift"),
    used("truncate"),
];

/// The documented fields of `/api/chat`.
pub(crate) const CHAT: &[Field] = &[used("messages"), used("tools")];

/// The documented fields of `/api/generate`.
pub(crate) const GENERATE: &[Field] = &[
    used("prompt"),
    used("raw"),
    used("suffix"),
    used("system"),
    refused("context", "the older form of a conversation: use /api/chat", &[]),
    refused("height", "pictures are not made", &[]),
    refused("images", "models here read text", &[]),
    refused("steps", "pictures are not made", &[]),
    refused("template", "the server's own is used", &[]),
    refused("width", "pictures are not made", &[]),
];

/// The documented fields of `options`. Those of loading have no effect on a model that is loaded.
pub(crate) const OPTIONS: &[Field] = &[
    used("frequency_penalty"),
    used("min_p"),
    used("num_keep"),
    used("num_predict"),
    used("presence_penalty"),
    used("repeat_last_n"),
    used("repeat_penalty"),
    used("seed"),
    used("stop"),
    used("temperature"),
    used("top_k"),
    used("top_p"),
    no_effect("embedding_only"),
    no_effect("f16_kv"),
    no_effect("logits_all"),
    no_effect("low_vram"),
    no_effect("main_gpu"),
    no_effect("mirostat_eta"),
    no_effect("mirostat_tau"),
    no_effect("num_batch"),
    no_effect("num_ctx"),
    no_effect("num_gpu"),
    no_effect("num_thread"),
    no_effect("numa"),
    no_effect("use_mlock"),
    no_effect("use_mmap"),
    no_effect("vocab_only"),
    refused(
        "mirostat",
        "there is no such sampler: min_p keeps texts from going astray",
        &["0", "0.0"],
    ),
    refused("penalize_newline", "line breaks are tokens like others", &["true"]),
    refused("tfs_z", "there is no such sampler: min_p does much the same", &["1", "1.0"]),
    refused("typical_p", "there is no such sampler: min_p does much the same", &["1", "1.0"]),
];

/// Where an answer's text stands in an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `message.content`.
    Chat,
    /// `response`.
    Generate,
}

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    /// Unset where the model is only to be loaded, which it is.
    work: Option<Work>,
    reply: Reply,
    form: Form,
    streams: bool,
    began: Began,
    trail: Arc<Trail>,
}

/// `/api/chat`.
pub(crate) async fn chat(call: Call) -> Answered {
    let fields = call.fields(&[SHARED, CHAT], Unknown::Noted).await?;
    let empty = fields.list("messages")?.is_none_or(Vec::is_empty);
    if empty && let Some(unloaded) = unloaded(&call, &fields, Form::Chat).await? {
        return Ok(unloaded);
    }
    let model = call.model_kept(&fields).await?;
    let read = || {
        let messages = if empty { None } else { Some(chat::messages(&fields)?) };
        let extra = variables(&model, &fields)?;
        let asked = Asked::ollama(&fields, true)?;
        let tools = asked.listed().to_vec();
        let cut = Cut::of(&fields, Form::Chat)?;
        let prompt = messages.map(|messages| {
            let prefill = String::new();
            let conversation = Conversation { messages, extra, tools, prefill };
            if !cut.wanted {
                return model.encode_chat(&conversation);
            }
            let (prompt, dropped) = model.encode_cut(&conversation, cut.answer)?;
            fields.note_cut(dropped, "messages");
            Ok(prompt)
        });
        let prompt = prompt.transpose()?;
        ask(&call, model.clone(), fields.clone(), asked, prompt, Form::Chat, true)
    };
    call.reading(read).await?.answer().await
}

/// `/api/generate`.
pub(crate) async fn generate(call: Call) -> Answered {
    let fields = call.fields(&[SHARED, GENERATE], Unknown::Noted).await?;
    let empty = fields.text("prompt")?.is_none_or(str::is_empty);
    if empty && let Some(unloaded) = unloaded(&call, &fields, Form::Generate).await? {
        return Ok(unloaded);
    }
    let model = call.model_kept(&fields).await?;
    let read = || {
        let extra = variables(&model, &fields)?;
        let system = fields.text("system")?.filter(|system| !system.is_empty());
        let raw = fields.flag("raw")?.unwrap_or(false);
        let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
        if raw && suffix.is_some() {
            // The prompt is all that the model reads.
            fields.note("suffix");
        }
        let suffix = suffix.filter(|_| !raw);
        let marks = suffix.map(|_| model.infill("suffix")).transpose()?;
        let asks = model.template().is_some() && !raw && suffix.is_none();
        if system.is_some() && suffix.is_some() {
            fields.note("system");
        } else if system.is_some() && !asks {
            let message = "expected beside a chat template, and without raw";
            return Err(Problem::field("system", message));
        }
        let prompt = match fields.text("prompt")?.filter(|prompt| !prompt.is_empty()) {
            None => None,
            Some(text) if asks => {
                let system = system.map(|text| json!({ "role": "system", "content": text }));
                let user = json!({ "role": "user", "content": text });
                let messages = system.into_iter().chain([user]).collect();
                let conversation = Conversation { messages, extra, ..Conversation::default() };
                Some(model.encode_chat(&conversation)?)
            }
            Some(text) if let (Some(marks), Some(suffix)) = (marks, suffix) => {
                let before = infill::encode(&model, text, true)?;
                let after = infill::encode(&model, suffix, false)?;
                Some(marks.prompt(model.tokenizer()?, &[], &before, &after))
            }
            // Who brings the whole prompt writes its special tokens too.
            Some(text) if raw => Some(model.encode_special(text)?),
            Some(text) => Some(model.encode_text(text)?),
        };
        let cut = Cut::of(&fields, Form::Generate)?;
        let prompt = match prompt {
            Some(prompt) if cut.wanted => {
                let (prompt, dropped) = model.cut(prompt, cut.keep, cut.answer);
                fields.note_cut(dropped, "tokens");
                Some(prompt)
            }
            prompt => prompt,
        };
        let asked = Asked::ollama(&fields, false)?;
        let mut ask =
            ask(&call, model.clone(), fields.clone(), asked, prompt, Form::Generate, asks)?;
        if let (Some(marks), Some(work)) = (marks, &mut ask.work) {
            marks.bound(&mut work.options);
        }
        Ok(ask)
    };
    call.reading(read).await?.answer().await
}

/// Whether and how a prompt is cut that does not fit.
struct Cut {
    wanted: bool,
    /// Tokens at its beginning that stay.
    keep: usize,
    /// Tokens that the answer may have.
    answer: Option<usize>,
}

impl Cut {
    /// As Ollama does it: a conversation loses its oldest messages, another prompt what stands
    /// behind its first tokens.
    fn of(fields: &Fields, form: Form) -> Result<Cut, Problem> {
        /// Tokens that Ollama keeps where a request does not say how many.
        const KEPT: i64 = 4;
        let wanted = fields.flag("truncate")?.unwrap_or(false);
        let options = settings_of(fields)?;
        let keep = options.whole("num_keep", -1..=i64::MAX).map_err(|e| e.within("options"))?;
        if keep.is_some() && (!wanted || form == Form::Chat) {
            fields.note("options.num_keep");
        }
        let keep = usize::try_from(keep.unwrap_or(KEPT)).unwrap_or(usize::MAX);
        Ok(Cut { wanted, keep, answer: most_tokens(&options)? })
    }
}

/// The settings of a request.
fn settings_of(fields: &Fields) -> Result<Fields, Problem> {
    let settings = fields.within("options", &[OPTIONS])?;
    settings.map_or_else(|| Fields::check(Map::new(), &[], Unknown::Noted), Ok)
}

/// The tokens that an answer may have; none: as many as there is room for.
fn most_tokens(settings: &Fields) -> Result<Option<usize>, Problem> {
    let most = settings.whole("num_predict", -2..=i64::MAX).map_err(|e| e.within("options"))?;
    Ok(most.and_then(|most| usize::try_from(most).ok()))
}

/// The answer to a request without a prompt that keeps its model for no time: it unloads it.
async fn unloaded(call: &Call, fields: &Fields, form: Form) -> Result<Option<Response>, Problem> {
    let (name, keep) = (fields.text("model")?, keep_alive(fields)?);
    let (Some(name), Some(Keep::For(Duration::ZERO))) = (name, keep) else { return Ok(None) };
    call.app.models.stop(name, "stop").await?;
    let mut object = part(name, form, "", "", true);
    object["done_reason"] = "unload".into();
    Ok(Some(noting(fields, axum::Json(object).into_response())))
}

/// The variables of a model's template.
fn variables(model: &Model, fields: &Fields) -> Result<Map<String, Value>, Problem> {
    let think = match fields.value("think") {
        None => None,
        Some(Value::Bool(on)) => Some(*on),
        Some(Value::String(level)) if ["low", "medium", "high"].contains(&level.as_str()) => {
            Some(true)
        }
        Some(other) => {
            return Err(wrong("think", "true, false, \"low\", \"medium\" or \"high\"", other));
        }
    };
    let mut extra = chat::thinking(model, fields, "think", think);
    if let Some(effort) = fields.value("think").and_then(Value::as_str) {
        extra.extend(chat::effort(model, "think", effort)?);
    }
    Ok(extra)
}

fn ask(
    call: &Call,
    model: Held,
    fields: Fields,
    asked: Asked,
    prompt: Option<Vec<u32>>,
    form: Form,
    splits: bool,
) -> Result<Ask, Problem> {
    let settings = settings_of(&fields)?;
    let mut options = settings::options(&model, &settings, call.seed())
        .map_err(|problem| problem.within("options"))?;
    options.max_tokens = most_tokens(&settings)?;
    options.logprobs = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs", 0..=MOST_TOP_LOGPROBS)?.unwrap_or(0);
    if top > 0 && !options.logprobs {
        return Err(Problem::field("top_logprobs", "expected beside \"logprobs\": true"));
    }
    options.top_logprobs = top as usize;
    if let Some(prompt) = &prompt {
        model.check(prompt)?;
        asked.constrain(&model, prompt, splits, &mut options)?;
    }
    let reply = match &prompt {
        Some(prompt) if splits => asked.reply(&model, prompt),
        _ => Reply::plain(),
    };
    let streams = fields.flag("stream")?.unwrap_or(true);
    let work = prompt.map(|prompt| Work { prompt, options });
    let (began, trail) = (call.began, call.trail.clone());
    Ok(Ask { model, fields, work, reply, form, streams, began, trail })
}

impl Ask {
    async fn answer(mut self) -> Answered {
        let Some(work) = self.work.take() else {
            let mut loaded = self.part("", "", true);
            loaded["done_reason"] = "load".into();
            return Ok(noting(&self.fields, axum::Json(loaded).into_response()));
        };
        let logprobs = work.options.logprobs;
        let generating = self.model.generator.start(vec![work], &self.trail).await?;
        if self.streams {
            let fields = self.fields.clone();
            let mut writer = Writer { ask: self, logprobs };
            let streamed = response(Framing::Lines, |sender| async move {
                sender.relay(generating, &mut writer, Api::Ollama).await.map(drop)
            });
            return Ok(noting(&fields, streamed));
        }
        let answer = Answer::of(generating, &mut self.reply).await?;
        let mut object = self.part(&answer.content, &answer.reasoning, true);
        if !answer.calls.is_empty() {
            object["message"]["tool_calls"] = answer.calls.iter().map(call_json).collect();
        }
        if let Some(done) = &answer.end {
            self.end(&mut object, done);
        }
        if logprobs {
            let told = answer.tokens.iter().filter(|token| !self.ends(token));
            object["logprobs"] = told.map(|token| token_json(&self.model, token)).collect();
        }
        let told = noting(&self.fields, axum::Json(object).into_response());
        Ok(telling(answer.end.as_ref(), told))
    }

    async fn piece(
        &self,
        sender: &Sender,
        piece: Piece,
        logprobs: Option<Value>,
    ) -> Result<(), Gone> {
        let mut object = match &piece {
            Piece::Content(text) => self.part(text, "", false),
            Piece::Reasoning(text) => self.part("", text, false),
            Piece::Call(call) => {
                let mut object = self.part("", "", false);
                object["message"]["tool_calls"] = json!([call_json(call)]);
                object
            }
            // Its arguments are objects, so that calls come whole.
            Piece::Begin(_) | Piece::Arguments(_) | Piece::End => return Ok(()),
        };
        if let Some(logprobs) = logprobs {
            object["logprobs"] = logprobs;
        }
        sender.send(&object).await
    }

    /// Whether a token is no text but the end of it.
    fn ends(&self, token: &Token) -> bool {
        self.model.engine.end_tokens().contains(&token.id)
    }

    fn part(&self, content: &str, thinking: &str, done: bool) -> Value {
        part(&self.model.name, self.form, content, thinking, done)
    }

    /// Adds why a text ended and what it took, in nanoseconds.
    fn end(&self, object: &mut Value, done: &Done) {
        let metrics = &done.metrics;
        let reason = match done.finish {
            Finish::Length | Finish::ContextFull => "length",
            _ => "stop",
        };
        object["done_reason"] = reason.into();
        done.note_closing(object);
        done.tell_cache(object);
        object["total_duration"] = self.began.nanoseconds().into();
        object["load_duration"] = nanoseconds(self.model.loading()).into();
        object["prompt_eval_count"] = metrics.prompt_tokens.into();
        object["prompt_eval_duration"] = nanoseconds(metrics.prefill).into();
        object["eval_count"] = metrics.generated_tokens.into();
        object["eval_duration"] = nanoseconds(metrics.decode).into();
    }
}

/// A piece of an answer, or all of it.
fn part(model: &str, form: Form, content: &str, thinking: &str, done: bool) -> Value {
    let mut object = json!({ "model": model, "created_at": timestamp() });
    match form {
        Form::Chat => {
            object["message"] = json!({ "role": "assistant", "content": content });
            if !thinking.is_empty() {
                object["message"]["thinking"] = thinking.into();
            }
        }
        Form::Generate => {
            object["response"] = content.into();
            if !thinking.is_empty() {
                object["thinking"] = thinking.into();
            }
        }
    }
    object["done"] = done.into();
    object
}

/// Writes a stream of lines.
struct Writer {
    ask: Ask,
    logprobs: bool,
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, _: usize, event: Event) -> Result<(), Gone> {
        let ask = &mut self.ask;
        match event {
            Event::Token(token) => {
                let pieces = ask.reply.push(&token.text);
                let mut told = (self.logprobs && !ask.ends(&token))
                    .then(|| json!([token_json(&ask.model, &token)]));
                for piece in pieces {
                    ask.piece(sender, piece, told.take()).await?;
                }
                if told.is_some() {
                    ask.piece(sender, Piece::Content(String::new()), told).await?;
                }
                Ok(())
            }
            Event::Done(done) => {
                for piece in ask.reply.finish(&done.finish) {
                    ask.piece(sender, piece, None).await?;
                }
                let mut object = ask.part("", "", true);
                ask.end(&mut object, &done);
                sender.end(&object);
                Ok(())
            }
        }
    }
}

fn call_json(call: &Called) -> Value {
    json!({ "id": call.id, "function": { "name": call.name, "arguments": call.arguments } })
}

/// `/api/version`.
pub(crate) async fn version() -> Response {
    axum::Json(json!({ "version": env!("CARGO_PKG_VERSION") })).into_response()
}
