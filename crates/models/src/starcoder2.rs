//! StarCoder2 (Lozhkov et al. 2024): layer norms, a feed-forward without a gate, biases everywhere,
//! a window on all layers in some models.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, llama, phimoe, windows};
use formats::Result;
use nn::{Bias, Unary};

const NAMES: &[Row] = &[
    ("blocks.{}.mlp.up", "model.layers.{}.mlp.c_fc", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.mlp.c_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "StarCoder2",
    name: "starcoder2",
    gguf: "starcoder2",
    class: "Starcoder2ForCausalLM",
    unsaid: Unsaid::sizes([3072, 12_288, 30, 24, 2, 0, 4096, 49_152]).eps(1e-5),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let eps = Key("norm_epsilon", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    raw.windows = windows::of_all(files, &raw.layers)?;
    let act = gpt2::activation(files, "hidden_act", &[Unary::GeluTanh])?;
    // What these models have, by keys of the first configurations.
    keys.only(Key("mlp_type", ""), &["default"])?;
    keys.only(Key("norm_type", ""), &["layer_norm"])?;
    for key in [
        "activation_function",
        "attention_softmax_in_fp32",
        "layer_norm_epsilon",
        "residual_dropout",
        "scale_attention_softmax_in_fp32",
    ] {
        keys.note(key);
    }
    if keys.flag(Key("scale_attn_weights", ""))? == Some(false) {
        return Err(keys.wrong("scale_attn_weights", "true, as of this architecture", false));
    }
    let bias = match keys.flag(Key("use_bias", ""))? {
        Some(false) => Bias::IfStored,
        _ => Bias::Always,
    };
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, bias)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(bias, decoder::biased(bias))
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}
