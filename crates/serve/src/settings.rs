//! From fields to generation options: the model's own settings with the request's over them.

use std::hash::{BuildHasher, Hasher};

use delft::GenerateOptions;
use delft::tokens::Special;
use serde_json::Value;

use crate::fields::{Fields, wrong};
use crate::models::Model;
use crate::problem::Problem;

/// Most stop strings of a request.
const MOST_STOPS: usize = 16;
/// Longest stop string, in bytes.
const LONGEST_STOP: usize = 1024;
/// Most likeliest tokens that are told, as OpenAI documents it.
pub(crate) const MOST_TOP_LOGPROBS: i64 = 20;

/// The settings that the interfaces share, by the names that they share. A table decides which of
/// them a request may have. `seed` is for a request that gives none.
pub(crate) fn options(
    model: &Model,
    fields: &Fields,
    seed: u64,
) -> Result<GenerateOptions, Problem> {
    let mut sampling = model.engine.sampling_defaults().clone();
    let set = |setting: &mut f32, value: Option<f32>| *setting = value.unwrap_or(*setting);
    set(&mut sampling.temperature, fields.number("temperature", 0.0..=100.0)?);
    set(&mut sampling.top_p, fields.number("top_p", 0.0..=1.0)?);
    set(&mut sampling.min_p, fields.number("min_p", 0.0..=1.0)?);
    set(&mut sampling.presence_penalty, fields.number("presence_penalty", -2.0..=2.0)?);
    set(&mut sampling.frequency_penalty, fields.number("frequency_penalty", -2.0..=2.0)?);
    for name in ["repetition_penalty", "repeat_penalty"] {
        set(&mut sampling.repetition_penalty, fields.number(name, 0.01..=100.0)?);
    }
    if let Some(last) = fields.whole("repeat_last_n", -1..=i64::MAX)? {
        sampling.last_n = usize::try_from(last).unwrap_or(usize::MAX);
    }
    if let Some(k) = fields.whole("top_k", -1..=i64::MAX)? {
        sampling.top_k = usize::try_from(k).unwrap_or(0);
    }
    sampling.seed = seed;
    // The second is Mistral's name.
    for name in ["seed", "random_seed"] {
        let own = fields.whole(name, i64::MIN..=i64::MAX)?.filter(|seed| *seed != -1);
        sampling.seed = own.map_or(sampling.seed, |seed| seed as u64);
    }
    if let Some(biases) = fields.value("logit_bias") {
        sampling.logit_bias = logit_bias(model, biases)?;
    }
    let ignore_end = fields.flag("ignore_eos")?.unwrap_or(false);
    ends(model, fields)?;
    let stop = stops(fields, "stop")?;
    Ok(GenerateOptions { sampling, stop, ignore_end, ..GenerateOptions::default() })
}

/// Looks at the tokens that are to end a text: those that end the model's texts anyway, as clients
/// send them that know its template.
fn ends(model: &Model, fields: &Fields) -> Result<(), Problem> {
    const NAME: &str = "stop_token_ids";
    let own = model.engine.end_tokens();
    for value in fields.list(NAME)?.into_iter().flatten() {
        if !value.as_u64().is_some_and(|id| own.iter().any(|end| u64::from(*end) == id)) {
            let expected =
                format!("tokens that end this model's texts ({own:?}); stop takes texts");
            return Err(wrong(NAME, expected, value));
        }
    }
    Ok(())
}

/// What is added to the logits of tokens: an object of ids and numbers; or a list of pairs, as
/// llama.cpp writes it, of an id or the text of tokens, and a number or false.
fn logit_bias(model: &Model, biases: &Value) -> Result<Vec<(u32, f32)>, Problem> {
    const NAME: &str = "logit_bias";
    let vocabulary = model.engine.info().vocab;
    let id = |id: Option<u64>, found: &Value| {
        let id = id.and_then(|id| u32::try_from(id).ok());
        let id = id.filter(|id| (*id as usize) < vocabulary);
        id.ok_or_else(|| wrong(NAME, format!("token ids below {vocabulary}"), found))
    };
    let bias = |bias: &Value| {
        // -100 is documented as a ban.
        let banned = bias == &Value::Bool(false) || bias.as_f64() == Some(-100.0);
        let bias_of = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let number = if banned { Some(f32::NEG_INFINITY) } else { bias_of.map(|bias| bias as f32) };
        number.ok_or_else(|| wrong(NAME, "numbers from -100 to 100", bias))
    };
    let mut all = Vec::new();
    match biases {
        Value::Object(object) => {
            for (token, value) in object {
                all.push((id(token.parse().ok(), &token.as_str().into())?, bias(value)?));
            }
        }
        Value::Array(list) if list.len() <= vocabulary => {
            for pair in list {
                let parts = pair.as_array().filter(|parts| parts.len() == 2);
                let parts =
                    parts.ok_or_else(|| wrong(NAME, "pairs of a token and a bias", pair))?;
                let value = bias(&parts[1])?;
                match &parts[0] {
                    Value::String(text) => {
                        model.check_length(text)?;
                        let tokens = model.tokenizer()?.encode(text, Special::default())?;
                        all.extend(tokens.into_iter().map(|token| (token, value)));
                    }
                    token => all.push((id(token.as_u64(), token)?, value)),
                }
            }
        }
        other => return Err(wrong(NAME, "an object of token ids and numbers", other)),
    }
    Ok(all)
}

/// The tokens that a text may have by a field, `least` at least; none where it is left out, or -1
/// as llama.cpp and LM Studio write it: as many as there is room for.
pub(crate) fn most_tokens(
    fields: &Fields,
    name: &str,
    least: i64,
) -> Result<Option<usize>, Problem> {
    if fields.value(name).and_then(Value::as_i64) == Some(-1) {
        return Ok(None);
    }
    let most = fields.whole(name, least..=i64::MAX)?;
    Ok(most.and_then(|most| usize::try_from(most).ok()))
}

/// A string or a list of strings that end the text.
pub(crate) fn stops(fields: &Fields, name: &str) -> Result<Vec<String>, Problem> {
    let expected = format!("up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} bytes");
    let list = match fields.value(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.as_slice(),
        Some(value) => std::slice::from_ref(value),
    };
    let stop = |value: &Value| {
        let text = value.as_str().filter(|text| (1..=LONGEST_STOP).contains(&text.len()));
        text.map(str::to_string).ok_or_else(|| wrong(name, &expected, value))
    };
    if list.len() > MOST_STOPS {
        return Err(wrong(name, &expected, &Value::from(format!("{} of them", list.len()))));
    }
    list.iter().map(stop).collect()
}

/// An unpredictable number, for seeds and names.
pub(crate) fn random() -> u64 {
    // The standard library seeds its hash maps from the operating system.
    std::hash::RandomState::new().build_hasher().finish()
}
