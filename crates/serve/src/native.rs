//! Delft's own paths: tokens, templates, and what is served.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use delft::Capability;
use delft::tokens::Special;
use serde_json::{Value, json};

use crate::build::build;
use crate::catalogue::Known;
use crate::chat;
use crate::fields::{Field, Fields, Unknown, refused, used, wrong};
use crate::library::tell_memory;
use crate::models::{Conversation, Model};
use crate::router::{Answered, App, Call};

/// llama-server's fields, then vLLM's.
const TOKENIZE: &[Field] = &[
    used("model"),
    used("content"),
    used("add_special"),
    used("parse_special"),
    used("with_pieces"),
    used("prompt"),
    used("messages"),
    used("add_special_tokens"),
    used("chat_template_kwargs"),
    used("return_token_strs"),
    refused("add_generation_prompt", "a conversation ends where its answer begins", &["true"]),
];

const DETOKENIZE: &[Field] = &[used("model"), used("tokens")];

const APPLY_TEMPLATE: &[Field] = &[used("model"), used("messages"), used("chat_template_kwargs")];

/// `/tokenize`: `{"content": TEXT}` to `{"tokens": [..]}`; `{"prompt": TEXT}` and
/// `{"messages": [..]}` as vLLM has them.
pub(crate) async fn tokenize(call: Call) -> Answered {
    let fields = call.fields(&[TOKENIZE], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let read = || {
        if fields.value("prompt").is_some() || fields.value("messages").is_some() {
            return counted(&model, &fields);
        }
        let text = fields.needed("content", fields.text("content")?)?;
        let special = Special {
            add: fields.flag("add_special")?.unwrap_or(false),
            parse: fields.flag("parse_special")?.unwrap_or(false),
        };
        let tokenizer = model.tokenizer()?;
        let tokens = tokenizer.encode(text, special)?;
        let tokens: Value = if fields.flag("with_pieces")?.unwrap_or(false) {
            let piece = |id: &u32| json!({ "id": id, "piece": tokenizer.token_text(*id) });
            tokens.iter().map(piece).collect()
        } else {
            tokens.into()
        };
        Ok(axum::Json(json!({ "tokens": tokens })).into_response())
    };
    call.reading(read).await
}

/// The tokens of a text in which special tokens are read as such, or of a conversation, as vLLM
/// tells them.
fn counted(model: &Model, fields: &Fields) -> Answered {
    let tokenizer = model.tokenizer()?;
    let tokens = match fields.text("prompt")? {
        Some(text) => {
            let add = fields.flag("add_special_tokens")?.unwrap_or(true);
            tokenizer.encode(text, Special { add, parse: true })?
        }
        None => {
            let extra = chat::template_variables(fields)?;
            let messages = chat::messages(fields)?;
            model.encode_chat(&Conversation { messages, extra, ..Conversation::default() })?
        }
    };
    let strings = || tokens.iter().map(|id| tokenizer.token_text(*id)).collect::<Vec<_>>();
    let strings = fields.flag("return_token_strs")?.unwrap_or(false).then(strings);
    Ok(axum::Json(json!({
        "count": tokens.len(),
        "max_model_len": model.context(),
        "tokens": tokens,
        "token_strs": strings,
    }))
    .into_response())
}

/// `/tokenizer_info`: what programs that evaluate models ask of vLLM before they send it tokens.
pub(crate) async fn tokenizer_info(call: Call) -> Answered {
    let model = call.app.models.hold(None, None).await?;
    call.trail.answers(&model);
    let tokenizer = model.tokenizer()?;
    let text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
    Ok(axum::Json(json!({
        "tokenizer_class": "delft",
        "model": model.name,
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos_token()),
        "chat_template": model.template().and_then(|template| template.source(None)),
    }))
    .into_response())
}

/// `/detokenize`: `{"tokens": [..]}` to `{"content": TEXT}`, which is vLLM's `prompt`.
pub(crate) async fn detokenize(call: Call) -> Answered {
    let fields = call.fields(&[DETOKENIZE], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let read = || {
        let vocabulary = model.engine.info().vocab;
        let list = fields.needed("tokens", fields.list("tokens")?)?;
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.filter(|id| (*id as usize) < vocabulary);
            id.ok_or_else(|| wrong("tokens", format!("token ids below {vocabulary}"), value))
        };
        let tokens = list.iter().map(id).collect::<Result<Vec<u32>, _>>()?;
        let text = model.tokenizer()?.decode(&tokens, false);
        Ok(axum::Json(json!({ "content": text, "prompt": text })).into_response())
    };
    call.reading(read).await
}

/// `/apply-template`: the text that the model would read for these messages.
pub(crate) async fn apply_template(call: Call) -> Answered {
    let fields = call.fields(&[APPLY_TEMPLATE], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let read = || {
        let extra = chat::template_variables(&fields)?;
        let messages = chat::messages(&fields)?;
        let conversation = Conversation { messages, extra, ..Conversation::default() };
        let prompt = model.render(&conversation)?;
        Ok(axum::Json(json!({ "prompt": prompt })).into_response())
    };
    call.reading(read).await
}

/// A number through its decimal text, so that 0.7f32 reads 0.7 and not 0.699999988.
pub(crate) fn short(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// A model's device and settings, and the defaults of its requests.
pub(crate) fn settings(model: &Model) -> Value {
    let (options, sampling) = (model.engine.options(), model.engine.sampling_defaults());
    json!({
        "device": model.devices(),
        "context": model.context(),
        "cache_type": format!("{:?}", options.cache_type).to_lowercase(),
        "sampling": {
            "temperature": short(sampling.temperature),
            "top_k": sampling.top_k,
            "top_p": short(sampling.top_p),
            "min_p": short(sampling.min_p),
            "repetition_penalty": short(sampling.repetition_penalty),
        },
    })
}

/// `/props`: what is served, and the settings that apply where a request says nothing. Of models
/// that are not loaded, the name alone.
pub(crate) async fn props(State(app): State<Arc<App>>) -> Response {
    let told = |known: Known| {
        let Some(model) = known.loaded else {
            return json!({ "model": known.name, "loaded": false });
        };
        let info = model.engine.info();
        let template = model.template();
        let thinks = !delft::reasoning::switches(true, template).is_empty();
        let (running, waiting) = model.generator.load();
        let mut told = json!({
            "model": known.name,
            "loaded": true,
            "architecture": info.architecture,
            "parameters": info.parameters,
            "fingerprint": model.engine.fingerprint(),
            "trained_context": info.trained_context,
            "chat_template": template.and_then(|template| template.source(None)),
            "thinking_switch": thinks,
            "embeds": model.has(Capability::Embed),
            "generates": model.has(Capability::Generate),
            "running": running,
            "waiting": waiting,
        });
        if let (Value::Object(told), Value::Object(settings)) = (&mut told, settings(&model)) {
            told.extend(settings);
        }
        tell_memory(&mut told, &model.engines);
        told
    };
    let known = tokio::task::block_in_place(|| app.models.known());
    let first = known.iter().find_map(|known| known.loaded.clone());
    let models: Vec<Value> = tokio::task::block_in_place(|| known.into_iter().map(told).collect());
    let version = env!("CARGO_PKG_VERSION");
    let mut object = json!({ "version": version, "build": build(), "models": models });
    // llama-server's clients look for those of its one model.
    if let Some(model) = first {
        let text = |id: Option<u32>| Some(model.engine.tokenizer()?.token_text(id?));
        let tokenizer = model.engine.tokenizer();
        object["default_generation_settings"] = json!({ "n_ctx": model.context() });
        object["total_slots"] = model.places().into();
        object["model_alias"] = model.name.as_str().into();
        object["chat_template"] = json!(model.template().and_then(|own| own.source(None)));
        object["bos_token"] = json!(text(tokenizer.and_then(|own| own.bos())));
        object["eos_token"] = json!(text(tokenizer.and_then(|own| own.eos_token())));
        object["modalities"] = json!({ "vision": false, "audio": false });
    }
    axum::Json(object).into_response()
}
