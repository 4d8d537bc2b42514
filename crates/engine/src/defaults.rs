//! Generation settings that come with a model: `generation_config.json`, or GGUF's `general.sampling.*`.

use formats::{Result, Tensors};
use ops::sample::Options;
use serde_json::Value;

/// Sampling options and end-of-generation ids of the model behind `tensors`.
pub(crate) fn read(tensors: &Tensors, vocabulary: usize) -> Result<(Options, Vec<u32>)> {
    // What most programs sample with where a model's makers say nothing.
    let mut options =
        Options { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..Options::default() };
    let mut ends = Vec::new();
    if let Some(file) = tensors.gguf() {
        let metadata = file.metadata();
        let number = |part: &str| metadata.f64(&format!("general.sampling.{part}"));
        set(&mut options.temperature, number("temp")?);
        set(&mut options.top_p, number("top_p")?);
        set(&mut options.min_p, number("min_p")?);
        set(&mut options.repetition_penalty, number("penalty_repeat")?);
        if let Some(k) = metadata.u32("general.sampling.top_k")? {
            options.top_k = k as usize;
        }
    }
    if let Some(config) = tensors.folder().and_then(|f| f.generation_config()) {
        let number = |key: &str| config.get(key).and_then(Value::as_f64);
        let sampled = config.get("do_sample").and_then(Value::as_bool);
        if sampled == Some(true) {
            // What Transformers means by leaving a setting out.
            options = Options { top_k: 50, ..Options::default() };
        }
        set(&mut options.temperature, number("temperature"));
        set(&mut options.top_p, number("top_p"));
        set(&mut options.min_p, number("min_p"));
        set(&mut options.repetition_penalty, number("repetition_penalty"));
        if let Some(k) = config.get("top_k").and_then(Value::as_u64) {
            options.top_k = usize::try_from(k).unwrap_or(0);
        }
        if sampled == Some(false) {
            options.temperature = 0.0;
        }
        ends.extend(ids(config.get("eos_token_id")));
    }
    if let Some(folder) = tensors.folder() {
        ends.extend(ids(folder.config().get("eos_token_id")));
    }
    options.validate(vocabulary)?;
    Ok((options, ends))
}

fn set(option: &mut f32, value: Option<f64>) {
    if let Some(value) = value {
        *option = value as f32;
    }
}

/// One id or a list of them.
fn ids(value: Option<&Value>) -> Vec<u32> {
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}
