//! `config.json`, in the dialect of Transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::json::Object;
use crate::names::Dialect;
use crate::rope::{Scaling, Yarn};
use crate::stated::{Keys, Stated};
use crate::unsupported;
use crate::{Architecture, by_class, by_name};
use formats::{Error, Result};
use nn::{Pairing, Weights};
use serde_json::Value;

/// Reads `config.json`, filling from the weights what it may leave out.
pub(crate) fn config(json: &Value, file: &str, names: &dyn Weights) -> Result<Config> {
    if !json.is_object() {
        return Err(Error::new(file, "a JSON object", "something else"));
    }
    let whole = Object { file, prefix: "", value: json };
    // Multimodal configurations keep the decoder's part in an object of its own.
    let inner = json.get("text_config").filter(|v| v.is_object());
    let object = inner.map_or(whole, |value| Object { prefix: "text_config.", value, ..whole });
    for object in [&whole, &object] {
        unsupported::check_json(object)?;
    }
    let mut warnings = Vec::new();
    let architecture = architecture(&whole, &object, names, &mut warnings)?;
    let layers = object.needed("num_hidden_layers")?;
    let heads = object.needed("num_attention_heads")?;
    if let Some(activation) = object.text("hidden_act")?
        && activation != "silu"
    {
        return Err(object.wrong("hidden_act", "silu", activation));
    }
    let head_dim = match object.size("head_dim")? {
        Some(head_dim) => Some(head_dim),
        None => head_dim_of_weights(names, heads.value)?.map(|dim| object.stated("head_dim", dim)),
    };
    let (key, parameters) = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .find_map(|key| Some((key, object.get(key)?)))
        .unwrap_or(("rope_parameters", &Value::Null));
    let prefix = format!("{}{key}.", object.prefix);
    let rope = Object { prefix: &prefix, value: parameters, ..object };
    let theta = match rope.number("rope_theta")? {
        Some(theta) => theta,
        None => object.number_or("rope_theta", 10_000.0)?,
    };
    let partial = match rope.number("partial_rotary_factor")? {
        Some(factor) => Some(factor),
        None => object.number("partial_rotary_factor")?,
    };
    let head = names.find("head")?.is_some();
    let tied = match object.flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => whole.flag("tie_word_embeddings")?.unwrap_or(!head),
    };
    let context = object.size("max_position_embeddings")?.unwrap_or_else(|| {
        let usual = object.stated("max_position_embeddings", 2048);
        warnings.push(format!("{} is missing: a context of 2048 is assumed", usual.key()));
        usual
    });
    Raw {
        architecture,
        hidden: object.needed("hidden_size")?,
        windows: windows(&object, architecture, &layers)?,
        layers,
        kv_heads: match object.size("num_key_value_heads")? {
            Some(heads) => heads,
            None => heads.clone(),
        },
        heads,
        rotary: partial
            .zip(head_dim.as_ref())
            .map(|(factor, dim)| factor.map(|factor| (factor * dim.value as f64) as usize)),
        head_dim,
        feed_forward: object.needed("intermediate_size")?,
        vocab: object.needed("vocab_size")?,
        norm_eps: object.number_or("rms_norm_eps", 1e-6)?,
        context,
        tied,
        theta,
        scaling: object.stated(key, scaling(&rope, &object)?),
        pairing: Pairing::Half,
        warnings,
    }
    .check()
}

fn architecture(
    outer: &Object<'_>,
    object: &Object<'_>,
    names: &dyn Weights,
    warnings: &mut Vec<String>,
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
    let place = |key: &str| format!("{}: {key}", outer.file);
    if let Some(name) = outer.text("model_type")? {
        return Err(crate::unknown(place("model_type"), name));
    }
    // Old exports name no architecture: the weights tell Qwen3 from Qwen2 from Llama.
    let has = |canonical| Ok(names.find(canonical)?.is_some());
    let name = match (has("blocks.0.attention.q_norm")?, has("blocks.0.attention.q.bias")?) {
        (true, _) => "qwen3",
        (_, true) => "qwen2",
        _ => "llama",
    };
    warnings.push(format!("model_type is missing: taken for {name} by the names of its weights"));
    by_name(name).ok_or_else(|| crate::unknown(place("model_type"), name))
}

/// `head_dim` from the rows of q, for configurations that leave it out.
fn head_dim_of_weights(names: &dyn Weights, heads: usize) -> Result<Option<usize>> {
    let q = names.find("blocks.0.attention.q")?;
    let rows = q.and_then(|q| q.shape.first().copied()).unwrap_or(0);
    Ok((heads > 0 && rows > 0 && rows.is_multiple_of(heads)).then(|| rows / heads))
}

fn windows(
    object: &Object<'_>,
    architecture: &Architecture,
    layers: &Stated<usize>,
) -> Result<Vec<Option<usize>>> {
    let window = object.size("sliding_window")?;
    let used = match architecture.name {
        "llama" => false,
        "mistral" => true,
        // Qwen configurations carry a window that a switch, off by default, turns on.
        _ => object.flag("use_sliding_window")?.unwrap_or(false),
    };
    let Some(window) = window.filter(|_| used) else { return Ok(Vec::new()) };
    let window = window.within(1..=LIMIT)?;
    if let Some(types) = object.get("layer_types") {
        let list = types.as_array().ok_or_else(|| object.odd("layer_types", "a list", types))?;
        if list.len() != layers.value {
            let expected = format!("{} entries, as {} says", layers.value, layers.key());
            return Err(object.wrong("layer_types", expected, list.len()));
        }
        let one = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Ok(Some(window)),
            Some("full_attention") => Ok(None),
            _ => Err(object.odd("layer_types", "full_attention or sliding_attention", kind)),
        };
        return list.iter().map(one).collect();
    }
    // Without a list, Qwen windows the layers from max_window_layers up; Mistral all of them.
    let full = if architecture.name == "mistral" {
        0
    } else {
        object.size("max_window_layers")?.map_or(layers.value, |first| first.value)
    };
    Ok((0..layers.value.min(LAYERS)).map(|i| (i >= full).then_some(window)).collect())
}

fn scaling(rope: &Object<'_>, object: &Object<'_>) -> Result<Scaling> {
    let (key, kind) = match rope.text("rope_type")? {
        Some(kind) => ("rope_type", Some(kind)),
        None => ("type", rope.text("type")?),
    };
    let need = |key: &str| rope.needed_number(key)?.positive();
    let trained = || object.needed_number("max_position_embeddings");
    let original = || match rope.number("original_max_position_embeddings")? {
        Some(original) => original.positive(),
        None => trained()?.positive(),
    };
    match kind {
        None | Some("default") => Ok(Scaling::None),
        Some("linear") => Ok(Scaling::Linear { factor: need("factor")? }),
        Some("llama3") => {
            let (low, high) = (need("low_freq_factor")?, rope.needed_number("high_freq_factor")?);
            if high.positive()? <= low {
                let expected = format!("more than low_freq_factor = {low}");
                return Err(high.wrong(expected, high.value));
            }
            Ok(Scaling::Llama3 {
                factor: need("factor")?,
                low,
                high: high.value,
                original: original()?,
            })
        }
        Some("yarn") => {
            let original = original()?;
            let stretched = match rope.number("factor")? {
                Some(factor) => factor,
                None => trained()?.map(|context| context / original),
            };
            let factor = stretched.positive()?;
            let or = |key: &str, usual: f64| rope.number_or(key, usual)?.positive();
            let scale = |key: &str| Ok(rope.real(key)?.filter(|scale| *scale != 0.0));
            let magnitude = match rope.number("attention_factor")? {
                Some(magnitude) => magnitude.positive()?,
                None => match (scale("mscale")?, scale("mscale_all_dim")?) {
                    (Some(a), Some(b)) => Yarn::magnitude(factor, a) / Yarn::magnitude(factor, b),
                    _ => Yarn::magnitude(factor, 1.0),
                },
            };
            let yarn = Yarn {
                factor,
                original,
                fast: or("beta_fast", 32.0)?,
                slow: or("beta_slow", 1.0)?,
                truncate: rope.flag("truncate")?.unwrap_or(true),
                magnitude,
            };
            yarn.check(&stretched, LIMIT)?;
            Ok(Scaling::Yarn(yarn))
        }
        Some(other) => Err(rope.wrong(key, "default, linear, llama3 or yarn", other)),
    }
}

/// Hugging Face names of weights.
pub(crate) const DIALECT: Dialect = Dialect::HuggingFace;
