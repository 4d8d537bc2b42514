//! Embeddings, as OpenAI's `/v1/embeddings` and Ollama's `/api/embed` and `/api/embeddings` ask for
//! them.

use axum::response::IntoResponse;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use delft::{Capability, EmbedOptions};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::catalogue::Held;
use crate::fields::{Field, Fields, Unknown, no_effect, shown, used, wrong};
use crate::generation::computed;
use crate::models::Model;
use crate::native::short;
use crate::problem::Problem;
use crate::reply::nanoseconds;
use crate::router::{Answered, Call, noting};

/// The documented fields of `/v1/embeddings`.
pub(crate) const OPENAI: &[Field] =
    &[used("model"), used("input"), used("dimensions"), used("encoding_format"), no_effect("user")];

/// The fields of llama-server's `/embedding`.
const LLAMA: &[Field] =
    &[used("model"), used("content"), used("input"), used("embd_normalize"), used("dimensions")];

/// The documented fields of `/api/embed`.
pub(crate) const OLLAMA: &[Field] = &[
    used("model"),
    used("input"),
    used("dimensions"),
    used("truncate"),
    used("options"),
    used("keep_alive"),
];

/// The documented fields of `/api/embeddings`, the older form.
pub(crate) const OLLAMA_ONE: &[Field] =
    &[used("model"), used("prompt"), used("options"), used("keep_alive")];

/// Most texts of one request.
const MOST_TEXTS: usize = 2048;
/// Most tokens of them all.
const MOST_TOKENS: usize = 300_000;
/// Texts between which a request is looked at: whether anybody still waits, and how long it took.
const TOGETHER: usize = 64;

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    texts: Vec<Vec<u32>>,
    dimensions: Option<usize>,
    /// Whether OpenAI's answer has the numbers as Base64 of little-endian f32.
    packed: bool,
}

/// `/v1/embeddings`.
pub(crate) async fn openai(call: Call) -> Answered {
    let fields = call.fields(&[OPENAI], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    enable(&call, &model).await?;
    let read = || {
        let packed = match fields.text("encoding_format")? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                return Err(wrong("encoding_format", "\"float\" or \"base64\"", &other.into()));
            }
        };
        read(model, fields, "input", packed)
    };
    let ask = call.reading(read).await?;
    let (tokens, found) = (ask.tokens(), ask.compute().await?);
    let numbers = |embedding: &[f32]| match ask.packed {
        false => embedding.iter().copied().map(short).collect(),
        true => {
            let bytes: Vec<u8> = embedding.iter().flat_map(|x| x.to_le_bytes()).collect();
            Value::from(STANDARD.encode(bytes))
        }
    };
    let data = found.iter().enumerate().map(|(index, embedding)| {
        json!({ "object": "embedding", "index": index, "embedding": numbers(embedding) })
    });
    let object = json!({
        "object": "list",
        "data": data.collect::<Value>(),
        "model": ask.model.name,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    });
    Ok(noting(&ask.fields, axum::Json(object).into_response()))
}

/// llama-server's `/embedding` and `/embeddings`: each text's vector in a list of one.
pub(crate) async fn llama(call: Call) -> Answered {
    let fields = call.fields(&[LLAMA], Unknown::Noted).await?;
    let model = call.model(&fields).await?;
    enable(&call, &model).await?;
    let input = if fields.value("content").is_some() { "content" } else { "input" };
    // Vectors are those of the model's own form, which are of length 1 for most.
    if fields.whole("embd_normalize", -1..=i64::MAX)?.is_some_and(|kind| kind != 2) {
        let message = "expected 2, the Euclidean length, or nothing";
        return Err(Problem::field("embd_normalize", message));
    }
    let ask = call.reading(|| read(model, fields, input, false)).await?;
    let found = ask.compute().await?;
    let numbers =
        |embedding: &Vec<f32>| -> Value { embedding.iter().copied().map(short).collect() };
    let object = found.iter().enumerate();
    let object = object.map(|(index, own)| json!({ "index": index, "embedding": [numbers(own)] }));
    Ok(noting(&ask.fields, axum::Json(object.collect::<Value>()).into_response()))
}

/// `/api/embed`.
pub(crate) async fn ollama(call: Call) -> Answered {
    let fields = call.fields(&[OLLAMA], Unknown::Noted).await?;
    let model = call.model_kept(&fields).await?;
    enable(&call, &model).await?;
    // Clients that only want a model loaded send no text.
    let empty = match fields.value("input") {
        Some(Value::String(text)) => text.is_empty(),
        Some(Value::Array(list)) => list.is_empty(),
        _ => false,
    };
    let ask = if empty {
        Ask { model, fields, texts: Vec::new(), dimensions: None, packed: false }
    } else {
        call.reading(|| read(model, fields, "input", false)).await?
    };
    let (tokens, found) = (ask.tokens(), ask.compute().await?);
    let numbers =
        |embedding: &Vec<f32>| -> Value { embedding.iter().copied().map(short).collect() };
    let object = json!({
        "model": ask.model.name,
        "embeddings": found.iter().map(numbers).collect::<Value>(),
        "total_duration": call.began.nanoseconds(),
        "load_duration": nanoseconds(ask.model.loading()),
        "prompt_eval_count": tokens,
    });
    Ok(noting(&ask.fields, axum::Json(object).into_response()))
}

/// `/api/embeddings`.
pub(crate) async fn ollama_one(call: Call) -> Answered {
    let fields = call.fields(&[OLLAMA_ONE], Unknown::Noted).await?;
    let model = call.model_kept(&fields).await?;
    enable(&call, &model).await?;
    let read = || {
        fields.text("prompt")?;
        read(model, fields, "prompt", false)
    };
    let ask = call.reading(read).await?;
    let found = ask.compute().await?;
    let numbers = found.into_iter().flatten().map(short);
    let object = json!({ "embedding": numbers.collect::<Value>() });
    Ok(noting(&ask.fields, axum::Json(object).into_response()))
}

/// Has a model make embeddings beside what it was loaded for.
async fn enable(call: &Call, model: &Held) -> Result<(), Problem> {
    call.app.models.enable(model, Capability::Embed).await
}

fn read(model: Held, fields: Fields, input: &str, packed: bool) -> Result<Ask, Problem> {
    // They are about generating, or about loading.
    for name in fields.object("options")?.into_iter().flatten().map(|(name, _)| name) {
        fields.note(&format!("options.{}", shown(name)));
    }
    let cuts = fields.flag("truncate")?.unwrap_or(false);
    let most = model.engine.info().hidden as i64;
    let dimensions = fields.whole("dimensions", 1..=most)?.map(|n| n as usize);
    let texts = texts(&model, &fields, input, cuts)?;
    Ok(Ask { model, fields, texts, dimensions, packed })
}

/// Each text's tokens: a string, a list of strings, tokens, or a list of lists of tokens.
fn texts(
    model: &Model,
    fields: &Fields,
    input: &str,
    cuts: bool,
) -> Result<Vec<Vec<u32>>, Problem> {
    let expected = "a string, a list of strings, token ids, or a list of lists of token ids";
    let value = fields.needed(input, fields.value(input))?;
    let numbers = |list: &[Value]| -> Option<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        list.iter().map(id).collect()
    };
    let one = |value: &Value| match value {
        Value::String(text) => fitted(model, text, cuts).map(Some),
        Value::Array(list) => Ok(numbers(list)),
        _ => Ok(None),
    };
    let texts = match value {
        Value::Array(list) if !list.is_empty() && numbers(list).is_none() => {
            if list.len() > MOST_TEXTS {
                return Err(wrong_count(input, "texts", MOST_TEXTS, list.len()));
            }
            list.iter().map(one).collect::<Result<Option<Vec<_>>, _>>()?
        }
        other => one(other)?.map(|text| vec![text]),
    };
    let texts = texts.ok_or_else(|| wrong(input, expected, value))?;
    let tokens = texts.iter().map(Vec::len).sum();
    if tokens > MOST_TOKENS {
        return Err(wrong_count(input, "tokens", MOST_TOKENS, tokens));
    }
    for tokens in &texts {
        model.check_text(tokens)?;
    }
    Ok(texts)
}

fn wrong_count(input: &str, of: &str, most: usize, found: usize) -> Problem {
    Problem::field(input, format_args!("expected at most {most} {of}, found {found}"))
}

/// A text's tokens. One that does not fit the context is cut if that is wanted; what the tokenizer
/// puts at its end stays.
fn fitted(model: &Model, text: &str, cuts: bool) -> Result<Vec<u32>, Problem> {
    if !cuts {
        return model.encode_text(text);
    }
    let mut tokens = delft::Prompt::from(text).encode(model.engine.tokenizer(), None)?;
    let end = tokens.last().copied().filter(|end| model.engine.end_tokens().contains(end));
    if tokens.len() > model.context() {
        tokens.truncate(model.context());
        if let (Some(last), Some(end)) = (tokens.last_mut(), end) {
            *last = end;
        }
    }
    Ok(tokens)
}

impl Ask {
    fn tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// The embedding of each text, when it is this request's turn.
    async fn compute(&self) -> Result<Vec<Vec<f32>>, Problem> {
        let deadline = Instant::now() + self.model.generator.limits().time;
        let _turn = self.model.generator.turn(deadline).await?;
        let mut all = Vec::with_capacity(self.texts.len());
        for texts in self.texts.chunks(TOGETHER) {
            let (first, texts) = (texts.first().map_or(&[][..], Vec::as_slice), texts.to_vec());
            let place = self.model.generator.place(first);
            let dimensions = self.dimensions;
            let embed = move || {
                let options = EmbedOptions { dimensions, adapter: place.adapter().cloned() };
                place.engine().embed(&texts, &options)
            };
            all.extend(computed(embed).await?);
            if Instant::now() > deadline {
                return Err(Problem::late());
            }
        }
        Ok(all)
    }
}
