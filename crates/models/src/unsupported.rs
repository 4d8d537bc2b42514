//! Settings under which weights mean something else than a dense model of plain numbers: such files are refused, since they would
//! run as another model.

use crate::json::Object;
use crate::stated::Keys;
use formats::Result;
use serde_json::Value;

/// Refuses what a `config.json` may say and no architecture here can do.
pub(crate) fn check_json(object: &Object<'_>) -> Result<()> {
    check_plain(object)?;
    let spellings = ["num_experts", "num_local_experts", "n_routed_experts"];
    let all = spellings.into_iter().find(|key| object.get(key).is_some());
    check_experts(object, all.unwrap_or(spellings[0]), "num_experts_per_tok")
}

/// No architecture here mixes experts: such a file under a dense model's name would lose most of its weights. `all` and `used` are
/// the keys of how many there are and how many a token uses.
pub(crate) fn check_experts(keys: &impl Keys, all: &str, used: &str) -> Result<()> {
    let (count, chosen) = (keys.size(all)?, keys.size(used)?);
    let most = count.as_ref().map_or(0, |count| count.value);
    if let Some(chosen) = chosen.filter(|chosen| chosen.value > most) {
        let expected = format!("at most {} = {most}", keys.spelled(all));
        return Err(chosen.wrong(expected, chosen.value));
    }
    match count.filter(|count| count.value > 0) {
        Some(count) => Err(count
            .wrong("0: a model without experts", count.value)
            .hint("mixtures of experts are not supported yet")),
        None => Ok(()),
    }
}

/// Weights that were quantised otherwise than by their element type would be read as numbers that they are not.
fn check_plain(object: &Object<'_>) -> Result<()> {
    for key in ["quantization_config", "quantization"] {
        let Some(settings) = object.get(key) else { continue };
        let expected = "weights of the type F32, F16 or BF16";
        let error = match settings.get("quant_method").and_then(Value::as_str) {
            Some(method) => {
                let method: String = method.chars().take(60).collect();
                object.wrong(&format!("{key}.quant_method"), expected, method)
            }
            None => object.odd(key, expected, settings),
        };
        return Err(error.hint("a GGUF file of this model has quantised weights that run here"));
    }
    Ok(())
}
