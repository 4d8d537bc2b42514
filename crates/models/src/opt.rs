//! OPT (Zhang et al. 2022): learned positions, of which the table has two more in front, layer
//! norms, a feed-forward without a gate, biases everywhere. One of the sizes norms sums in the place
//! of what sublayers read, and has narrower embeddings.

use crate::config::{Config, LIMIT, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2, phi3};
use formats::{ErrorKind, Result};
use nn::{Bias, Stored, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "model.decoder.embed_tokens", ""),
    ("table", "model.decoder.embed_positions", ""),
    ("norm", "model.decoder.final_layer_norm", ""),
    ("head", "lm_head", ""),
    ("embed_in", "model.decoder.project_in", ""),
    ("embed_out", "model.decoder.project_out", ""),
    ("blocks.{}.attention_norm", "model.decoder.layers.{}.self_attn_layer_norm", ""),
    ("blocks.{}.attention.q", "model.decoder.layers.{}.self_attn.q_proj", ""),
    ("blocks.{}.attention.k", "model.decoder.layers.{}.self_attn.k_proj", ""),
    ("blocks.{}.attention.v", "model.decoder.layers.{}.self_attn.v_proj", ""),
    ("blocks.{}.attention.o", "model.decoder.layers.{}.self_attn.out_proj", ""),
    ("blocks.{}.mlp_norm", "model.decoder.layers.{}.final_layer_norm", ""),
    ("blocks.{}.mlp.up", "model.decoder.layers.{}.fc1", ""),
    ("blocks.{}.mlp.down", "model.decoder.layers.{}.fc2", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OPT",
    name: "opt",
    gguf: "",
    class: "OPTForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// Positions of the table that no token has.
const FRONT: usize = 2;

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(&[("intermediate_size", "ffn_dim")]);
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, Key("layer_norm_eps", ""))?;
    raw.rotation = None;
    // For training, and what it was trained for.
    for key in ["dropout", "layerdrop", "init_std", "output_projection", "prefix"] {
        keys.note(key);
    }
    for key in ["enable_bias", "layer_norm_elementwise_affine"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            let error = keys.wrong(key, "true: others are not supported", false);
            return Err(error.of(ErrorKind::Unsupported));
        }
    }
    let in_front = keys.flag(Key("do_layer_norm_before", ""))?.unwrap_or(true);
    const REMOVED: &str = "_remove_final_layer_norm";
    if keys.flag(Key(REMOVED, ""))? == Some(true) && in_front {
        let error = keys.wrong(REMOVED, "false: others are not supported", true);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let width = keys.size("word_embed_proj_dim")?.map(|width| width.within(1..=LIMIT));
    let embed_width = width.transpose()?.filter(|width| *width != raw.hidden.value);
    let act = gpt2::activation(files, "activation_function", &[Unary::Relu])?;
    let parts = decoder::Parts {
        order: if in_front { Order::InTurn } else { Order::NormedSums },
        embed_width,
        ..gpt2::parts(act, decoder::biased(Bias::Always))
    };
    Ok(decoder::open_recipes(raw.check()?, parts, positions))
}

/// The rows of the table of positions that tokens have, if `name` is they.
///
/// # Errors
/// A table of another shape.
pub(crate) fn positions(
    config: &Config,
    weights: &dyn Weights,
    name: &str,
) -> Result<Option<Stored>> {
    if name != "positions" {
        return Ok(None);
    }
    let all = [FRONT + config.context, config.hidden];
    phi3::rows(weights, "table", &all, FRONT, config.context)
}
