//! llama-server's own paths, as its clients ask them: `/completion` with the shape of its texts,
//! `/embedding` and `/slots`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use delft::tokens::Special;
use delft::{Finish, GenerateOptions, Token};
use hyper::StatusCode;
use serde_json::{Map, Value, json};

use crate::catalogue::Held;
use crate::demand::{Asked, GRAMMARS};
use crate::fields::{Field, Fields, Unknown, no_effect, refused, used, wrong};
use crate::generation::{Done, Event, Work};
use crate::logprobs::with_likeliest;
use crate::models::Model;
use crate::native::short;
use crate::problem::{Api, Problem};
use crate::router::{Answered, App, Call, noting, telling};
use crate::settings::{self, MOST_TOP_LOGPROBS};
use crate::stream::{Framing, Gone, Sender, Shape, response};

/// Settings that `/completion` and `/infill` share.
pub(crate) const SETTINGS: &[Field] = &[
    used("model"),
    used("prompt"),
    used("frequency_penalty"),
    used("ignore_eos"),
    used("min_p"),
    used("n_predict"),
    used("presence_penalty"),
    used("repeat_last_n"),
    used("repeat_penalty"),
    used("response_fields"),
    used("seed"),
    used("stop"),
    used("stream"),
    used("temperature"),
    used("top_k"),
    used("top_p"),
    no_effect("cache_prompt"),
    no_effect("id_slot"),
    no_effect("n_cache_reuse"),
    no_effect("n_indent"),
    no_effect("n_keep"),
    no_effect("samplers"),
    no_effect("t_max_predict_ms"),
    no_effect("t_max_prompt_ms"),
    no_effect("timings_per_token"),
];

/// Those of `/completion` besides.
const COMPLETION: &[Field] = &[
    used("json_schema"),
    used("logit_bias"),
    used("max_tokens"),
    used("n_probs"),
    used("return_tokens"),
    no_effect("adaptive_decay"),
    no_effect("backend_sampling"),
    no_effect("dry_allowed_length"),
    no_effect("dry_base"),
    no_effect("dry_penalty_last_n"),
    no_effect("dry_sequence_breakers"),
    no_effect("dynatemp_exponent"),
    no_effect("min_keep"),
    no_effect("mirostat_eta"),
    no_effect("mirostat_tau"),
    no_effect("n_discard"),
    no_effect("return_progress"),
    no_effect("sse_ping_interval"),
    no_effect("xtc_threshold"),
    refused("adaptive_target", SAMPLERS, &["-1", "-1.0"]),
    refused("dry_multiplier", SAMPLERS, OFF),
    refused("dynatemp_range", SAMPLERS, OFF),
    refused("lora", "an adapter is a model of its own name", &["[]"]),
    refused("mirostat", SAMPLERS, OFF),
    refused("multimodal_data", "prompts are text", &["[]"]),
    refused("n_cmpl", "ask /v1/completions for several texts", &["1"]),
    refused("post_sampling_probs", "probabilities are those before sampling", &["false"]),
    refused("tfs_z", SAMPLERS, &["1", "1.0"]),
    refused("top_n_sigma", SAMPLERS, &["-1", "-1.0", "0", "0.0"]),
    refused("typical_p", SAMPLERS, &["1", "1.0"]),
    refused("xtc_probability", SAMPLERS, OFF),
];

const SAMPLERS: &str = "texts are sampled by temperature, top_k, top_p, min_p and penalties";
/// Values that turn a sampler off.
const OFF: &[&str] = &["0", "0.0"];

/// Most texts of one request.
const MOST_TEXTS: usize = 128;

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    work: Vec<Work>,
    /// The contents of each answer.
    told: Vec<Told>,
    streams: bool,
}

/// The contents of an answer.
pub(crate) struct Told {
    pub(crate) model: Held,
    pub(crate) index: usize,
    /// The fields that are asked for; none: all.
    pub(crate) wanted: Option<Vec<String>>,
    /// Texts of tokens by which the model says that a gap is filled.
    pub(crate) ends: Vec<String>,
    /// Whether the prompt is only to be read, for requests to come: what is written is left out.
    pub(crate) silent: bool,
    /// The settings in effect, where they are told.
    settings: Value,
    /// Whether the ids of tokens are told, and the log-probabilities.
    ids: bool,
    probabilities: bool,
    /// The text so far where it is told whole, and its tokens.
    content: String,
    tokens: Vec<Token>,
    written: usize,
    streams: bool,
}

/// `/completion`, and `/completions` without `/v1` in front.
pub(crate) async fn completion(call: Call) -> Answered {
    let table = &[SETTINGS, COMPLETION, GRAMMARS];
    let fields = call.fields(table, Unknown::Noted).await?;
    let model = call.model(&fields).await?;
    let Ask { model, fields, work, told, streams } =
        call.reading(|| read(&call, fields, model)).await?;
    let generating = model.generator.start(work, &call.trail).await?;
    let mut all = All { left: told.len(), told };
    if streams {
        let streamed = response(Framing::Events, |sender| async move {
            sender.relay(generating, &mut all, Api::OpenAi).await.map(drop)
        });
        return Ok(noting(&fields, streamed));
    }
    let mut generating = generating;
    let mut ends: Vec<Option<Done>> = all.told.iter().map(|_| None).collect();
    while let Some((index, event)) = generating.next().await? {
        match event {
            Event::Token(token) => all.told[index].add(token),
            Event::Done(done) => ends[index] = Some(done),
        }
    }
    let objects: Vec<Value> =
        all.told.iter_mut().zip(&ends).map(|(told, end)| told.whole(end.as_ref())).collect();
    // As many as there are prompts, where there is a list of them.
    let object = if fields.value("prompt").is_some_and(is_list) {
        Value::Array(objects)
    } else {
        objects.into_iter().next().unwrap_or_default()
    };
    let first = ends.into_iter().next().flatten();
    Ok(telling(first.as_ref(), noting(&fields, axum::Json(object))))
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let mut options = settings::options(&model, &fields, call.seed())?;
    let name = if fields.value("n_predict").is_some() { "n_predict" } else { "max_tokens" };
    let most = fields.whole(name, -2..=i64::MAX)?.unwrap_or(-1);
    let silent = set_length(&mut options, most);
    let asked = fields.whole("n_probs", 0..=MOST_TOP_LOGPROBS)?.unwrap_or(0);
    (options.logprobs, options.top_logprobs) = (asked > 0, asked as usize);
    Asked::completions(&fields)?.constrain(&model, &[], false, &mut options)?;
    let prompts = prompts(&model, &fields)?;
    let ids = fields.flag("return_tokens")?.unwrap_or(false);
    let streams = fields.flag("stream")?.unwrap_or(false);
    let wanted = wanted(&fields)?;
    let (mut work, mut told) = (Vec::new(), Vec::new());
    for (index, prompt) in prompts.into_iter().enumerate() {
        model.check(&prompt)?;
        let (wanted, settings) = (wanted.clone(), in_effect(&options, most));
        let (ids, probabilities) = (ids || streams, asked > 0);
        let own = Told::new(model.clone(), wanted, Vec::new(), silent);
        told.push(Told { index, settings, ids, probabilities, streams, ..own });
        work.push(Work { prompt, options: options.clone() });
    }
    Ok(Ask { model, fields, work, told, streams })
}

/// Sets the length of a text by `n_predict`, of which numbers below zero are no limit; whether the
/// prompt is only to be read, which is done together with the first token.
pub(crate) fn set_length(options: &mut GenerateOptions, most: i64) -> bool {
    options.max_tokens = usize::try_from(most).ok().map(|most| most.max(1));
    most == 0
}

/// The fields of an answer that are asked for.
pub(crate) fn wanted(fields: &Fields) -> Result<Option<Vec<String>>, Problem> {
    let expected = "a list of names of fields";
    let wanted = fields.list("response_fields")?.map(|list| {
        let name = |value: &Value| value.as_str().map(str::to_string);
        let names: Option<Vec<String>> = list.iter().map(name).collect();
        names.ok_or_else(|| wrong("response_fields", expected, &Value::from(list.to_vec())))
    });
    Ok(wanted.transpose()?.filter(|names| !names.is_empty()))
}

/// Whether a prompt is a list of prompts, and not one of tokens and texts.
fn is_list(prompt: &Value) -> bool {
    prompt.as_array().is_some_and(|list| !list.iter().any(Value::is_number))
}

/// Each prompt's tokens: a text, whose special tokens are read as such; a list of token ids and
/// texts, which is one prompt if there is an id in it, and as many as it has parts otherwise.
fn prompts(model: &Model, fields: &Fields) -> Result<Vec<Vec<u32>>, Problem> {
    let expected = "a string, a list of token ids and strings, or a list of such";
    let value = fields.needed("prompt", fields.value("prompt"))?;
    let one = |value: &Value| -> Result<Vec<u32>, Problem> {
        let wrong = || wrong("prompt", expected, value);
        match value {
            Value::String(text) => model.encode_special(text),
            Value::Array(list) => {
                let mut all = Vec::new();
                for part in list {
                    match part {
                        Value::String(text) => {
                            model.check_length(text)?;
                            let special = Special { add: all.is_empty(), parse: true };
                            all.extend(model.tokenizer()?.encode(text, special)?);
                        }
                        id => {
                            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                            all.push(id.ok_or_else(wrong)?);
                        }
                    }
                }
                Ok(all)
            }
            Value::Object(object) if object.contains_key("prompt_string") => {
                fields.allow("prompt", value, &[PROMPT])?;
                let text = object["prompt_string"].as_str().ok_or_else(wrong)?;
                model.encode_special(text)
            }
            _ => Err(wrong()),
        }
    };
    match value {
        Value::Array(list) if is_list(value) => {
            if list.is_empty() || list.len() > MOST_TEXTS {
                let message = format!("expected 1 to {MOST_TEXTS} prompts, found {}", list.len());
                return Err(Problem::field("prompt", message));
            }
            list.iter().map(one).collect()
        }
        other => Ok(vec![one(other)?]),
    }
}

/// A prompt as an object.
const PROMPT: &[Field] =
    &[used("prompt_string"), refused("multimodal_data", "prompts are text", &["[]"])];

/// The settings of a text, by llama-server's names.
fn in_effect(options: &GenerateOptions, most: i64) -> Value {
    let sampling = &options.sampling;
    json!({
        "n_predict": most,
        "seed": sampling.seed,
        "temperature": short(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": short(sampling.top_p),
        "min_p": short(sampling.min_p),
        "repeat_penalty": short(sampling.repetition_penalty),
        "repeat_last_n": sampling.last_n,
        "presence_penalty": short(sampling.presence_penalty),
        "frequency_penalty": short(sampling.frequency_penalty),
        "n_probs": options.top_logprobs,
        "ignore_eos": options.ignore_end,
        "stop": options.stop,
    })
}

impl Told {
    /// The contents of one answer, whose settings, ids and probabilities are not told.
    pub(crate) fn new(
        model: Held,
        wanted: Option<Vec<String>>,
        ends: Vec<String>,
        silent: bool,
    ) -> Told {
        Told {
            model,
            index: 0,
            wanted,
            ends,
            silent,
            settings: Value::Null,
            ids: false,
            probabilities: false,
            content: String::new(),
            tokens: Vec::new(),
            written: 0,
            streams: false,
        }
    }

    /// Takes the next token of an answer that is told whole.
    pub(crate) fn add(&mut self, token: Token) {
        self.content += &token.text;
        self.written += 1;
        if self.ids || self.probabilities {
            self.tokens.push(token);
        }
    }

    /// The answer as a whole.
    pub(crate) fn whole(&mut self, end: Option<&Done>) -> Value {
        let content = std::mem::take(&mut self.content);
        let tokens = std::mem::take(&mut self.tokens);
        self.object(&content, &tokens, end)
    }

    /// A piece of an answer, or its end with why it ended and what it took; in llama-server's
    /// shape.
    fn object(&self, content: &str, tokens: &[Token], end: Option<&Done>) -> Value {
        let written = if self.silent { 0 } else { self.written };
        let (content, tokens) = if self.silent { ("", &[][..]) } else { (content, tokens) };
        let ids = tokens.iter().filter(|_| self.ids).map(|token| token.id);
        let mut object = json!({
            "index": self.index,
            "content": content,
            "tokens": ids.collect::<Vec<u32>>(),
            "id_slot": 0,
            "stop": end.is_some(),
            "model": self.model.name,
            "tokens_predicted": written,
        });
        if self.probabilities && !tokens.is_empty() {
            let all = tokens.iter().map(|token| self.probability(token));
            object["completion_probabilities"] = all.collect();
        }
        let Some(done) = end else { return picked(object, self.wanted.as_deref()) };
        let metrics = &done.metrics;
        let (kind, word) = match &done.finish {
            Finish::StopString(word) if !self.ends.contains(word) => ("word", word.as_str()),
            Finish::Length | Finish::ContextFull => ("limit", ""),
            _ => ("eos", ""),
        };
        object["stop_type"] = kind.into();
        object["stopping_word"] = word.into();
        object["truncated"] = false.into();
        if !self.streams {
            object["has_new_line"] = content.contains('\n').into();
        }
        if !self.settings.is_null() {
            object["generation_settings"] = self.settings.clone();
        }
        object["tokens_evaluated"] = metrics.prompt_tokens.into();
        object["tokens_cached"] = (metrics.prompt_tokens + written).into();
        object["timings"] = json!({ "cache_n": metrics.reused_tokens });
        let read = metrics.prompt_tokens - metrics.reused_tokens;
        let parts = [("prompt", read, metrics.prefill), ("predicted", written, metrics.decode)];
        for (name, count, time) in parts {
            let (count, ms) = (count as f64, time.as_secs_f64() * 1e3);
            let over = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
            let timings = &mut object["timings"];
            timings[format!("{name}_n")] = (count as usize).into();
            timings[format!("{name}_ms")] = ms.into();
            timings[format!("{name}_per_token_ms")] = over(ms, count).into();
            timings[format!("{name}_per_second")] = over(1e3 * count, ms).into();
        }
        done.note_closing(&mut object);
        done.tell_cache(&mut object);
        picked(object, self.wanted.as_deref())
    }

    /// A token with its log-probability, and the likeliest at its place.
    fn probability(&self, token: &Token) -> Value {
        let tokenizer = self.model.engine.tokenizer();
        with_likeliest(token, |id, logprob| {
            json!({
                "id": id,
                "token": tokenizer.map(|t| t.token_text(id)),
                "bytes": tokenizer.map(|t| t.token_bytes(id)),
                "logprob": logprob.unwrap_or(-9999.0),
            })
        })
    }

    async fn piece(&mut self, sender: &Sender, token: &Token) -> Result<(), Gone> {
        self.written += 1;
        if token.text.is_empty() && !self.probabilities || self.silent {
            return Ok(());
        }
        sender.send(&self.object(&token.text, std::slice::from_ref(token), None)).await
    }
}

/// The fields of an answer that are asked for, each under the path by which it is asked for, as in
/// `timings/prompt_n`; all where none is named.
fn picked(object: Value, wanted: Option<&[String]>) -> Value {
    let Some(wanted) = wanted else { return object };
    let mut picked = Map::new();
    for path in wanted {
        let found = path.split('/').try_fold(&object, |inner, name| inner.get(name));
        found.into_iter().for_each(|value| drop(picked.insert(path.clone(), value.clone())));
    }
    picked.into()
}

impl Shape for Told {
    async fn event(&mut self, sender: &Sender, _: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) => self.piece(sender, &token).await,
            Event::Done(done) => {
                sender.end(&self.object("", &[], Some(&done)));
                Ok(())
            }
        }
    }
}

/// Texts of several prompts, in one stream.
struct All {
    told: Vec<Told>,
    /// Those that have not ended.
    left: usize,
}

impl Shape for All {
    async fn event(&mut self, sender: &Sender, index: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) => self.told[index].piece(sender, &token).await,
            Event::Done(done) => {
                self.left -= 1;
                let object = self.told[index].object("", &[], Some(&done));
                if self.left == 0 {
                    sender.end(&object);
                    return Ok(());
                }
                sender.send(&object).await
            }
        }
    }
}

/// `/slots`: for each loaded model as many as it has places for texts, the first of which are in
/// use.
pub(crate) async fn slots(State(app): State<Arc<App>>) -> Response {
    let known = tokio::task::block_in_place(|| app.models.known());
    let mut slots = Vec::new();
    for model in known.into_iter().filter_map(|known| known.loaded) {
        let (running, _) = model.generator.load();
        slots.extend((0..model.places()).map(|id| {
            json!({
                "id": id,
                "model": model.name,
                "n_ctx": model.context(),
                "speculative": false,
                "is_processing": id < running,
            })
        }));
    }
    axum::Json(slots).into_response()
}

/// `/slots/{id}`: what llama-server saves and restores there are sessions here.
pub(crate) async fn slot(Path(_): Path<String>) -> Response {
    let message = "slots are not saved or restored by themselves: sessions are (POST /sessions, \
                   /sessions/{id}/save, /sessions/{id}/restore)";
    Problem::new(StatusCode::NOT_IMPLEMENTED, "not_supported", message).response(Api::OpenAi)
}

/// `/rerank` and its other names.
pub(crate) async fn rerank() -> Response {
    let message = "reranking is not supported: models here generate text or make embeddings \
                   (/v1/embeddings)";
    Problem::new(StatusCode::NOT_IMPLEMENTED, "not_supported", message).response(Api::OpenAi)
}
