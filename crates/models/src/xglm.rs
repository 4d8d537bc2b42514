//! XGLM (Lin et al. 2021): positions as sines, of which the table has two more in front, an embedding
//! times the root of its width, layer norms, a feed-forward without a gate, biases everywhere.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2};
use formats::{Result, Source};
use nn::{Bias, Stored, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", ""),
    ("norm", "model.layer_norm", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "model.layers.{}.self_attn_layer_norm", ""),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", ""),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", ""),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", ""),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.out_proj", ""),
    ("blocks.{}.mlp_norm", "model.layers.{}.final_layer_norm", ""),
    ("blocks.{}.mlp.up", "model.layers.{}.fc1", ""),
    ("blocks.{}.mlp.down", "model.layers.{}.fc2", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "XGLM",
    name: "xglm",
    gguf: "",
    class: "XGLMForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("hidden_size", "d_model"),
    ("intermediate_size", "ffn_dim"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "attention_heads"),
];

/// Positions of the table that no token has.
const FRONT: usize = 2;

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, Key("layer_norm_eps", ""))?;
    raw.rotation = None;
    // For training.
    for key in ["decoder_start_token_id", "dropout", "init_std", "layerdrop"] {
        keys.note(key);
    }
    let scaled = keys.flag(Key("scale_embedding", ""))?.unwrap_or(true);
    let act = gpt2::activation(files, "activation_function", &[Unary::GeluErf])?;
    let config = raw.check()?;
    let root = (config.hidden as f32).sqrt();
    let parts = decoder::Parts {
        multipliers: [if scaled { root } else { 1.0 }, 1.0, 1.0],
        ..gpt2::parts(act, decoder::biased(Bias::Always))
    };
    let stored = |config: &Config, _: &dyn Weights, name: &str| {
        let (count, pairs) = (config.context, config.hidden / 2);
        let table = || Stored {
            source: Source::Sines { start: FRONT, count, pairs },
            shape: vec![count, 2 * pairs],
        };
        Ok((name == "positions").then(table))
    };
    Ok(decoder::open_recipes(config, parts, stored))
}
