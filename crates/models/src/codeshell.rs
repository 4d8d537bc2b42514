//! CodeShell (Xie et al. 2024): StarCoder2 without windows, under GPT-2's names, with q, k and v in one
//! matrix.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, phi3, phimoe};
use formats::{ErrorKind, Result};
use nn::{Bias, Unary};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "CodeShell",
    name: "codeshell",
    gguf: "codeshell",
    class: "CodeShellForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[gpt2::NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("num_key_value_heads", "num_query_groups"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner"),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let eps = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");
    let raw = Raw::read_quadrupled(files, eps)?;
    // Sums in f32, as all are here.
    for key in ["attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"] {
        keys.note(key);
    }
    keys.only(Key("position_embedding_type", ""), &["rope"])?;
    for key in ["group_query_attention", "scale_attn_weights"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            let error = keys.wrong(key, "true, as of published models", false);
            return Err(error.of(ErrorKind::Unsupported));
        }
    }
    let act = gpt2::activation(files, "activation_function", &[Unary::GeluTanh])?;
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, Bias::Always)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(Bias::Always, decoder::biased(Bias::Always))
    };
    Ok(decoder::open_recipes(raw.check()?, parts, phi3::part))
}
