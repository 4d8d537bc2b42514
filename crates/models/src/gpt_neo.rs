//! GPT-Neo (Black et al. 2021): GPT-2 with a window in some layers, scores that are not scaled, and
//! no biases on q, k and v.

use crate::config::{Config, LIMIT, Raw};
use crate::decoder;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2};
use formats::Result;
use nn::{AttentionOptions, Bias, Unary};
use serde_json::Value;

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", ""),
    ("positions", "transformer.wpe", ""),
    ("norm", "transformer.ln_f", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", ""),
    ("blocks.{}.attention.q", "transformer.h.{}.attn.attention.q_proj", ""),
    ("blocks.{}.attention.k", "transformer.h.{}.attn.attention.k_proj", ""),
    ("blocks.{}.attention.v", "transformer.h.{}.attn.attention.v_proj", ""),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.attention.out_proj", ""),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", ""),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc", ""),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GPT-Neo",
    name: "gpt_neo",
    gguf: "",
    class: "GPTNeoForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] =
    &[("num_hidden_layers", "num_layers"), ("num_attention_heads", "num_heads")];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_quadrupled(files, Key("layer_norm_epsilon", ""))?;
    raw.rotation = None;
    // For training.
    for key in ["resid_dropout", "embed_dropout", "classifier_dropout", "gradient_checkpointing"] {
        keys.note(key);
    }
    let window = keys.size("window_size")?.map_or(Ok(256), |window| window.within(1..=LIMIT))?;
    let local = local(files, &raw.layers)?;
    raw.windows = local.into_iter().map(|local| local.then_some(window)).collect();
    let act = gpt2::activation(files, "activation_function", &[Unary::GeluTanh])?;
    let attention = |config: &Config, layer: usize| AttentionOptions {
        output_bias: Bias::Always,
        scale: Some(1.0),
        ..config.attention(layer)
    };
    let parts = gpt2::parts(act, attention);
    Ok(decoder::open_parts(raw.check()?, parts))
}

/// Whether each layer has a window: by a list, or by lists of kinds, each with how often it comes.
fn local(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<bool>> {
    let keys = &files.keys;
    let (listed, counted) = (keys.get("attention_layers"), keys.get("attention_types"));
    let kind = |kind: &Value| match kind.as_str() {
        Some("local") => Some(true),
        Some("global") => Some(false),
        _ => None,
    };
    let flat = |list: &Value| -> Option<Vec<bool>> { list.as_array()?.iter().map(kind).collect() };
    let turns = |lists: &Value| -> Option<Vec<bool>> {
        let mut all = Vec::new();
        for list in lists.as_array()? {
            let times = usize::try_from(list.get(1)?.as_u64()?).ok()?;
            let kinds = flat(list.get(0)?)?;
            if times.checked_mul(kinds.len())? > layers.value {
                return None;
            }
            (0..times).for_each(|_| all.extend(&kinds));
        }
        Some(all)
    };
    let found = match (listed, counted) {
        (Some(list), _) => flat(list),
        (None, Some(lists)) => turns(lists),
        (None, None) => Some((0..layers.value).map(|i| i % 2 == 1).collect()),
    };
    let expected = || format!("global or local for each of {} layers", layers.value);
    let (key, value) = match listed {
        Some(list) => ("attention_layers", list),
        None => ("attention_types", counted.unwrap_or(&Value::Null)),
    };
    found
        .filter(|found| found.len() == layers.value)
        .ok_or_else(|| keys.odd(key, &expected(), value))
}
