//! `config.json`, in the dialect of Transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).

use crate::config::{Config, Raw};
use crate::names::Dialect;
use crate::rope::{Scaling, Yarn};
use crate::{Architecture, by_class, by_name};
use formats::{Error, Result};
use nn::{Pairing, Weights};
use serde_json::Value;

/// A JSON object with the place it came from.
struct Object<'a> {
    place: &'a str,
    value: &'a Value,
}

impl Object<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        let mut found = found.to_string();
        if let Some((end, _)) = found.char_indices().nth(60) {
            found.truncate(end);
        }
        Error::new(format!("{}: {key}", self.place), expected, found)
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.map(Some).ok_or_else(|| self.wrong(key, "a whole number", value))
    }

    fn needed(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| {
            Error::new(format!("{}: {key}", self.place), "a whole number", "nothing")
        })
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong(key, "a number", value))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false", value))
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "text", value))
    }
}

/// Reads `config.json`, filling from the weights what it may leave out.
pub(crate) fn config(json: &Value, place: &str, names: &dyn Weights) -> Result<Config> {
    if !json.is_object() {
        return Err(Error::new(place, "a JSON object", "something else"));
    }
    // Multimodal configurations keep the decoder's part in an object of its own.
    let value = json.get("text_config").filter(|v| v.is_object()).unwrap_or(json);
    let object = Object { place, value };
    let architecture = architecture(&Object { place, value: json }, &object, names)?;
    let layers = object.needed("num_hidden_layers")?;
    let heads = object.needed("num_attention_heads")?;
    if let Some(activation) = object.text("hidden_act")?
        && activation != "silu"
    {
        return Err(Error::new(format!("{place}: hidden_act"), "silu", activation));
    }
    let head_dim = match object.size("head_dim")? {
        Some(head_dim) => Some(head_dim),
        None => head_dim_of_weights(names, heads),
    };
    let parameters = object.get("rope_parameters").or_else(|| object.get("rope_scaling"));
    let rope = Object { place, value: parameters.unwrap_or(&Value::Null) };
    let theta = match rope.number("rope_theta")? {
        Some(theta) => theta,
        None => object.number("rope_theta")?.unwrap_or(10_000.0),
    };
    let partial = match rope.number("partial_rotary_factor")? {
        Some(factor) => Some(factor),
        None => object.number("partial_rotary_factor")?,
    };
    let head = names.find("head").is_some();
    let tied = match value.get("tie_word_embeddings").and_then(Value::as_bool) {
        Some(tied) => tied,
        None => json.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(!head),
    };
    Raw {
        architecture,
        place: place.to_owned(),
        hidden: object.needed("hidden_size")?,
        layers,
        heads,
        kv_heads: object.size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        feed_forward: object.needed("intermediate_size")?,
        vocab: object.needed("vocab_size")?,
        norm_eps: object.number("rms_norm_eps")?.unwrap_or(1e-6),
        windows: windows(&object, architecture, layers)?,
        context: object.size("max_position_embeddings")?.unwrap_or(2048),
        tied,
        theta,
        rotary: partial.zip(head_dim).map(|(factor, dim)| (factor * dim as f64) as usize),
        scaling: scaling(&rope, &object)?,
        pairing: Pairing::Half,
    }
    .check()
}

fn architecture(
    outer: &Object<'_>,
    object: &Object<'_>,
    names: &dyn Weights,
) -> Result<&'static Architecture> {
    for object in [object, outer] {
        let known = object
            .text("model_type")?
            .and_then(|t| by_name(t).or_else(|| by_name(t.trim_end_matches("_text"))));
        if let Some(known) = known {
            return Ok(known);
        }
        let class = object.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
        if let Some(known) = class.and_then(by_class) {
            return Ok(known);
        }
    }
    if let Some(name) = outer.text("model_type")? {
        return Err(crate::unknown(outer.place, name));
    }
    // Old exports name no architecture: the weights tell Qwen3 from Qwen2 from Llama.
    let has = |canonical| names.find(canonical).is_some();
    let name = match (has("blocks.0.attention.q_norm"), has("blocks.0.attention.q.bias")) {
        (true, _) => "qwen3",
        (_, true) => "qwen2",
        _ => "llama",
    };
    by_name(name).ok_or_else(|| crate::unknown(outer.place, name))
}

/// `head_dim` from the rows of q, for configurations that leave it out.
fn head_dim_of_weights(names: &dyn Weights, heads: usize) -> Option<usize> {
    let rows = *names.find("blocks.0.attention.q")?.shape.first()?;
    (heads > 0 && rows.is_multiple_of(heads)).then(|| rows / heads)
}

fn windows(
    object: &Object<'_>,
    architecture: &Architecture,
    layers: usize,
) -> Result<Vec<Option<usize>>> {
    let window = object.size("sliding_window")?;
    let used = match architecture.name {
        "llama" => false,
        "mistral" => true,
        // Qwen configurations carry a window that a switch, off by default, turns on.
        _ => object.flag("use_sliding_window")?.unwrap_or(false),
    };
    let Some(window) = window.filter(|_| used) else { return Ok(Vec::new()) };
    if let Some(types) = object.get("layer_types") {
        let types = types.as_array().ok_or_else(|| object.wrong("layer_types", "a list", types))?;
        let one = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Ok(Some(window)),
            Some("full_attention") => Ok(None),
            _ => Err(object.wrong("layer_types", "full_attention or sliding_attention", kind)),
        };
        return types.iter().map(one).collect();
    }
    // Without a list, Qwen windows the layers from max_window_layers up; Mistral all of them.
    let full = if architecture.name == "mistral" {
        0
    } else {
        object.size("max_window_layers")?.unwrap_or(layers)
    };
    Ok((0..layers.min(4096)).map(|i| (i >= full).then_some(window)).collect())
}

fn scaling(rope: &Object<'_>, object: &Object<'_>) -> Result<Scaling> {
    let kind = match rope.text("rope_type")? {
        Some(kind) => Some(kind),
        None => rope.text("type")?,
    };
    let need = |key: &str| {
        rope.number(key)?
            .ok_or_else(|| Error::new(format!("{}: rope {key}", rope.place), "a number", "nothing"))
    };
    let original = || match rope.number("original_max_position_embeddings")? {
        Some(original) => Ok(original),
        None => Ok(object.needed("max_position_embeddings")? as f64),
    };
    match kind {
        None | Some("default") => Ok(Scaling::None),
        Some("linear") => Ok(Scaling::Linear { factor: need("factor")? }),
        Some("llama3") => Ok(Scaling::Llama3 {
            factor: need("factor")?,
            low: need("low_freq_factor")?,
            high: need("high_freq_factor")?,
            original: original()?,
        }),
        Some("yarn") => {
            let original = original()?;
            let factor = match rope.number("factor")? {
                Some(factor) => factor,
                None => object.needed("max_position_embeddings")? as f64 / original,
            };
            let or = |key: &str, usual: f64| Ok(rope.number(key)?.unwrap_or(usual));
            let scale = |key: &str| Ok(rope.number(key)?.filter(|scale| *scale != 0.0));
            let magnitude = match rope.number("attention_factor")? {
                Some(magnitude) => magnitude,
                None => match (scale("mscale")?, scale("mscale_all_dim")?) {
                    (Some(a), Some(b)) => Yarn::magnitude(factor, a) / Yarn::magnitude(factor, b),
                    _ => Yarn::magnitude(factor, 1.0),
                },
            };
            Ok(Scaling::Yarn(Yarn {
                factor,
                original,
                fast: or("beta_fast", 32.0)?,
                slow: or("beta_slow", 1.0)?,
                truncate: rope.flag("truncate")?.unwrap_or(true),
                magnitude,
            }))
        }
        Some(other) => Err(Error::new(
            format!("{}: rope type", rope.place),
            "default, linear, llama3 or yarn",
            other,
        )),
    }
}

/// Hugging Face names of weights.
pub(crate) const DIALECT: Dialect = Dialect::HuggingFace;
