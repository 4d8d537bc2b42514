//! OpenAI's interface: chat completions, responses, completions and the list of models.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod fim;
pub(crate) mod responses;
pub(crate) mod stored;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use delft::{Finish, GenerateOptions, Metrics};
use hyper::HeaderMap;
use serde_json::{Value, json};

use crate::anthropic;
use crate::catalogue::Known;
use crate::fields::{Field, Fields, no_effect, refused, used};
use crate::generation::Generating;
use crate::models::Model;
use crate::problem::{Api, Problem};
use crate::reply::{Answer, Reply, Usage};
use crate::router::{App, Call};
use crate::stream::{Gone, Sender, Shape};

/// Settings that OpenAI has no name for, by the names that vLLM and llama.cpp gave them.
pub(crate) const EXTENSIONS: &[Field] = &[
    used("top_k"),
    used("min_p"),
    used("repetition_penalty"),
    used("repeat_penalty"),
    used("repeat_last_n"),
    used("ignore_eos"),
    used("stop_token_ids"),
    no_effect("cache_prompt"),
    no_effect("cache_salt"),
    no_effect("id_slot"),
    no_effect("length_penalty"),
    no_effect("priority"),
    no_effect("request_id"),
    no_effect("return_progress"),
    no_effect("spaces_between_special_tokens"),
    no_effect("timings_per_token"),
    no_effect("ttl"),
    refused("include_stop_str_in_output", "texts end before it", &["false"]),
    refused("min_tokens", "a text ends where the model ends it: see ignore_eos", &["0"]),
    refused("skip_special_tokens", "special tokens are no part of a text", &["true"]),
    refused("use_beam_search", "texts are sampled", &["false"]),
];

/// The options of a stream.
pub(crate) const STREAM_OPTIONS: &[Field] =
    &[used("include_usage"), no_effect("include_obfuscation"), no_effect("continuous_usage_stats")];

/// The part that all chunks of an answer share.
#[derive(Debug, Clone)]
struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    /// Whether a chunk with the usage ends the stream: those before it then say that they have
    /// none.
    usage_follows: bool,
}

impl Head {
    fn new(call: &Call, kind: &str, object: &'static str, model: &Model) -> Head {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Head {
            id: format!("{kind}-{}", call.id),
            object,
            created: now.unwrap_or_default().as_secs(),
            model: model.name.clone(),
            usage_follows: false,
        }
    }

    fn with(&self, choices: Value) -> Value {
        let mut object = json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.usage_follows {
            object["usage"] = Value::Null;
        }
        object
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
        "completion_tokens_details": { "reasoning_tokens": usage.reasoning },
    })
}

/// The counts of tokens as the interface of responses names them.
fn usage_of_responses(metrics: &Metrics, reasoning: usize) -> Value {
    json!({
        "input_tokens": metrics.prompt_tokens,
        "input_tokens_details": { "cached_tokens": metrics.reused_tokens, "cache_write_tokens": 0 },
        "output_tokens": metrics.generated_tokens,
        "output_tokens_details": { "reasoning_tokens": reasoning.min(metrics.generated_tokens) },
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
    })
}

/// Tells in a whole answer what of the prompts was found computed: the first text's at the top, and
/// where there are several texts each one's in its choice.
fn tell_cache(object: &mut Value, answers: &[Answer]) {
    let told = |answer: &Answer, object: &mut Value| {
        answer.end.iter().for_each(|done| done.tell_cache(object));
    };
    answers.first().into_iter().for_each(|first| told(first, object));
    if answers.len() > 1 {
        answers.iter().enumerate().for_each(|(i, one)| told(one, &mut object["choices"][i]));
    }
}

/// Whether the answer is a stream, and whether that ends with the usage.
fn streams(fields: &Fields) -> Result<(bool, bool), Problem> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let options = fields.within("stream_options", &[STREAM_OPTIONS])?;
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

/// Streams texts, then the usage if it is asked for.
async fn stream<S: Shape>(
    sender: &Sender,
    generating: Generating,
    mut shape: S,
    usage: impl FnOnce(S) -> Option<Value>,
) -> Result<(), Gone> {
    if sender.relay(generating, &mut shape, Api::OpenAi).await?
        && let Some(object) = usage(shape)
    {
        sender.send(&object).await?;
    }
    sender.done();
    Ok(())
}

/// A model of the list; how long its context is follows from the memory that there is when it is
/// loaded.
fn model_json(app: &App, known: &Known) -> Value {
    json!({
        "id": known.name,
        "object": "model",
        "created": known.changed(app.created),
        "owned_by": "delft",
        "max_model_len": known.loaded.as_ref().map(|model| model.context()),
        "parent": known.parent,
    })
}

pub(crate) async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let known = tokio::task::block_in_place(|| app.models.known());
    if headers.contains_key(anthropic::VERSION) {
        return anthropic::models(&app, &known);
    }
    let list: Vec<Value> = known.iter().map(|known| model_json(&app, known)).collect();
    axum::Json(json!({ "object": "list", "data": list })).into_response()
}

pub(crate) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let of_anthropic = headers.contains_key(anthropic::VERSION);
    match tokio::task::block_in_place(|| app.models.look_up(&name)) {
        Ok((known, _)) if of_anthropic => {
            axum::Json(anthropic::model_json(&app, &known)).into_response()
        }
        Err(problem) if of_anthropic => problem.response(Api::Anthropic),
        Ok((known, _)) => axum::Json(model_json(&app, &known)).into_response(),
        Err(problem) => problem.response(Api::OpenAi),
    }
}
