//! OpenAI's interface: chat completions, completions and the list of models.

pub(crate) mod chat;
pub(crate) mod completions;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use delft::{Finish, GenerateOptions};
use serde_json::{Value, json};

use crate::fields::{Field, Fields, Unknown, used};
use crate::generation::{Event, Generating};
use crate::models::Model;
use crate::problem::{Api, Problem};
use crate::reply::{Answer, Reply, Usage};
use crate::router::{App, Call};

/// Settings that OpenAI has no name for, by the names that vLLM and llama.cpp gave them.
pub(crate) const EXTENSIONS: &[Field] = &[
    used("top_k"),
    used("min_p"),
    used("repetition_penalty"),
    used("repeat_last_n"),
    used("ignore_eos"),
];

/// The part that all chunks of an answer share.
#[derive(Debug, Clone)]
struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Head {
    fn new(call: &Call, kind: &str, object: &'static str, model: &Model) -> Head {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Head {
            id: format!("{kind}-{}", call.id),
            object,
            created: now.unwrap_or_default().as_secs(),
            model: model.name.clone(),
        }
    }

    fn with(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

/// Why a text ended, in OpenAI's words.
fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Length | Finish::ContextFull => "length",
        _ => "stop",
    }
}

fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
    })
}

/// Whether the answer is a stream, and whether that ends with the usage.
fn streams(fields: &Fields) -> Result<(bool, bool), Problem> {
    const OPTIONS: &[Field] =
        &[used("include_usage"), crate::fields::no_effect("include_obfuscation")];
    let stream = fields.flag("stream")?.unwrap_or(false);
    let options = fields.within("stream_options", &[OPTIONS], Unknown::Refused)?;
    if options.is_some() && !stream {
        return Err(Problem::field("stream_options", "expected beside \"stream\": true"));
    }
    let usage = options.map_or(Ok(None), |options| options.flag("include_usage"))?;
    Ok((stream, usage.unwrap_or(false)))
}

/// Options for `n` texts of the same prompt, which differ by their seeds.
fn variants(options: &GenerateOptions, n: usize) -> impl Iterator<Item = GenerateOptions> {
    (0..n as u64).map(move |i| {
        let mut options = options.clone();
        options.sampling.seed = options.sampling.seed.wrapping_add(i);
        options
    })
}

/// Waits for all texts.
async fn collect(mut generating: Generating, replies: Vec<Reply>) -> Result<Vec<Answer>, Problem> {
    let mut replies: Vec<(Reply, Answer)> =
        replies.into_iter().map(|reply| (reply, Answer::default())).collect();
    while let Some((index, event)) = generating.next().await? {
        let (reply, answer) = &mut replies[index];
        answer.take(reply, event);
    }
    Ok(replies.into_iter().map(|(_, answer)| answer).collect())
}

impl Answer {
    /// Adds what happened.
    pub(crate) fn take(&mut self, reply: &mut Reply, event: Event) {
        match event {
            Event::Token(token) => {
                reply.push(&token.text).into_iter().for_each(|piece| self.add(piece));
                self.tokens.push(token);
            }
            Event::Done(finish, metrics) => {
                reply.finish().into_iter().for_each(|piece| self.add(piece));
                self.end = Some((finish, metrics));
            }
        }
    }
}

fn model_json(app: &App, model: &Model) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": app.created,
        "owned_by": "delft",
        "max_model_len": model.context(),
    })
}

pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    let list: Vec<Value> = app.models.0.iter().map(|model| model_json(&app, model)).collect();
    axum::Json(json!({ "object": "list", "data": list })).into_response()
}

pub(crate) async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    match app.models.find(Some(&name)) {
        Ok(model) => axum::Json(model_json(&app, model)).into_response(),
        Err(problem) => problem.response(Api::OpenAi),
    }
}
