//! Mistral's own form of a model folder: `params.json` in the terms of `config.json`.
//!
//! ```text
//! { "dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8, "norm_eps": 1e-5,
//!   "rope_theta": 1e9, "vocab_size": 131072, "max_position_embeddings": 131072,
//!   "yarn": { "factor": 16, "original_max_position_embeddings": 16384, "beta": 32, "alpha": 1, "apply_scale": false },
//!   "llama_4_scaling": { "beta": 0.1, "original_max_position_embeddings": 16384 },
//!   "quantization": { "qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR" }, "vision_encoder": { .. } }
//! ```
//! A key that is not known goes over as it is, so that it is refused by its name.

use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// The file.
pub(crate) const PARAMS: &str = "params.json";

/// A weight by whose name files are Mistral's own.
pub(crate) const SIGN: &str = "layers.0.attention.wq.weight";

/// Keys that have another name in `config.json`.
const RENAMED: &[(&str, &str)] = &[
    ("dim", "hidden_size"),
    ("n_layers", "num_hidden_layers"),
    ("n_heads", "num_attention_heads"),
    ("n_kv_heads", "num_key_value_heads"),
    ("hidden_dim", "intermediate_size"),
    ("norm_eps", "rms_norm_eps"),
    ("activation", "hidden_act"),
    ("tied_embeddings", "tie_word_embeddings"),
    ("max_seq_len", "max_position_embeddings"),
    ("causal", "is_causal"),
    // Biases are there, or not.
    ("use_biases", "attention_bias"),
];

/// Keys that describe what a decoder of text does not have.
const TOWERS: &[&str] = &["vision_encoder", "multimodal"];

/// The settings of `params.json` in the terms of `config.json`; `place` is the file.
///
/// # Errors
/// Numbers that are missing, or of another type, by key.
pub(crate) fn config(place: &str, params: &Value) -> Result<Value> {
    let mut config = Map::new();
    for (key, value) in params.as_object().into_iter().flatten() {
        let known = RENAMED.iter().find(|(own, _)| own == key);
        config.insert(known.map_or(key.as_str(), |(_, name)| name).to_owned(), value.clone());
    }
    for key in ["dim", "n_layers", "n_heads", "hidden_dim", "vocab_size"] {
        if !params[key].is_u64() {
            let found = if params[key].is_null() { "nothing" } else { "something else" };
            return Err(Error::new(format!("{place}: {key}"), "a whole number", found));
        }
    }
    // The kind of network, which has no other; that tokens see those in front alone, as always; and
    // a second name of the context.
    config.remove("model_type");
    config.retain(|key, value| key != "is_causal" || *value != Value::Bool(true));
    if let Some(context) = params.get("max_position_embeddings") {
        config.insert("max_position_embeddings".to_owned(), context.clone());
    }
    let towers: Vec<(String, Value)> =
        TOWERS.iter().filter_map(|key| config.remove_entry(*key)).collect();
    let (yarn, growth) = (config.remove("yarn"), config.remove("llama_4_scaling"));
    if let Some(yarn) = yarn.filter(|yarn| !yarn.is_null()) {
        config
            .insert("rope_parameters".to_owned(), rotation(place, &yarn, growth.as_ref(), params)?);
    }
    if let Some(quantization) = config.remove("quantization").filter(|settings| !settings.is_null())
    {
        let format = &quantization["qformat_weight"];
        if format != "fp8_e4m3" {
            let place = format!("{place}: quantization.qformat_weight");
            return Err(Error::new(place, "fp8_e4m3", format));
        }
        config.insert("quantization_config".to_owned(), json!({ "quant_method": "fp8" }));
    }
    let grows = growth.is_some_and(|growth| !growth.is_null());
    let name = if grows { "ministral3" } else { "mistral" };
    config.insert("model_type".to_owned(), name.into());
    if towers.is_empty() {
        return Ok(Value::Object(config));
    }
    // Beside the decoder's part, nothing is asked.
    let mut outer: Map<String, Value> = towers.into_iter().collect();
    outer.extend(
        config
            .get("quantization_config")
            .cloned()
            .map(|all| ("quantization_config".to_owned(), all)),
    );
    outer.insert("text_config".to_owned(), Value::Object(config));
    Ok(Value::Object(outer))
}

/// The rotation that `yarn` states, and by how much queries grow.
fn rotation(place: &str, yarn: &Value, growth: Option<&Value>, params: &Value) -> Result<Value> {
    let number = |all: &Value, within: &str, key: &str| match all[key].as_f64() {
        Some(_) => Ok(all[key].clone()),
        None => Err(Error::new(format!("{place}: {within}.{key}"), "a number", &all[key])),
    };
    let original = number(yarn, "yarn", "original_max_position_embeddings")?;
    let mut rope = json!({
        "rope_type": "yarn",
        "rope_theta": params["rope_theta"],
        "factor": number(yarn, "yarn", "factor")?,
        "original_max_position_embeddings": original,
        "beta_fast": number(yarn, "yarn", "beta")?,
        "beta_slow": number(yarn, "yarn", "alpha")?,
    });
    if yarn["apply_scale"] == Value::Bool(false) {
        rope["attention_factor"] = json!(1.0);
    }
    if let Some(growth) = growth.filter(|growth| !growth.is_null()) {
        let from = number(growth, "llama_4_scaling", "original_max_position_embeddings")?;
        if from.as_f64() != original.as_f64() {
            let key = "llama_4_scaling.original_max_position_embeddings";
            let expected = format!("{original}, as yarn says");
            return Err(Error::new(format!("{place}: {key}"), expected, from));
        }
        rope["llama_4_scaling_beta"] = number(growth, "llama_4_scaling", "beta")?;
    }
    Ok(rope)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> Value {
        json!({
            "dim": 4096, "n_layers": 34, "head_dim": 128, "hidden_dim": 14_336, "n_heads": 32,
            "n_kv_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 131_072,
            "tied_embeddings": false, "causal": true, "max_seq_len": 9, "max_position_embeddings": 262_144,
        })
    }

    #[test]
    fn keys_go_over_by_the_names_of_the_other_form() {
        let found = config("params.json", &params()).unwrap();
        let expected = json!({
            "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 34, "head_dim": 128,
            "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 131_072,
            "tie_word_embeddings": false, "max_position_embeddings": 262_144,
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn queries_that_grow_and_a_tower_make_ministral_3_below_text_config() {
        let mut own = params();
        own["yarn"] = json!({ "factor": 16, "original_max_position_embeddings": 16_384, "beta": 32,
            "alpha": 1, "apply_scale": false });
        own["llama_4_scaling"] = json!({ "beta": 0.1, "original_max_position_embeddings": 16_384 });
        own["quantization"] = json!({ "qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR" });
        own["vision_encoder"] = json!({ "hidden_size": 1024 });
        let found = config("params.json", &own).unwrap();
        let (text, quantised) = (&found["text_config"], json!({ "quant_method": "fp8" }));
        assert_eq!(text["model_type"], "ministral3");
        assert_eq!(
            (&found["quantization_config"], &text["quantization_config"]),
            (&quantised, &quantised)
        );
        let rope = json!({ "rope_type": "yarn", "rope_theta": 1e6, "factor": 16,
            "original_max_position_embeddings": 16_384, "beta_fast": 32, "beta_slow": 1,
            "attention_factor": 1.0, "llama_4_scaling_beta": 0.1 });
        assert_eq!(text["rope_parameters"], rope);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_key() {
        let yarn =
            json!({ "factor": 16, "original_max_position_embeddings": 8, "beta": 32, "alpha": 1 });
        let growth = json!({ "beta": 0.1, "original_max_position_embeddings": 9 });
        for (key, value, expected) in [
            ("dim", Value::Null, "params.json: dim: expected a whole number, found nothing"),
            (
                "n_heads",
                json!("many"),
                "params.json: n_heads: expected a whole number, found something else",
            ),
            (
                "yarn",
                json!({ "factor": 2 }),
                "params.json: yarn.original_max_position_embeddings: expected a number",
            ),
            (
                "quantization",
                json!({ "qformat_weight": "int4" }),
                "params.json: quantization.qformat_weight: expected fp8_e4m3",
            ),
            (
                "llama_4_scaling",
                growth,
                "llama_4_scaling.original_max_position_embeddings: expected 8, as yarn says",
            ),
        ] {
            let mut own = params();
            if key == "llama_4_scaling" {
                own["yarn"] = yarn.clone();
            }
            own[key] = value;
            let why = config("params.json", &own).unwrap_err().to_string();
            assert!(why.contains(expected), "{why}");
        }
    }
}
