//! Jais 2 (Inception, MBZUAI 2025): Llama with layer norms, biases everywhere, and a feed-forward
//! without a gate, of the square of what is positive.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, llama, nemotron, phimoe, windows};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Jais 2",
    name: "jais2",
    gguf: "jais2",
    class: "Jais2ForCausalLM",
    unsaid: Unsaid::sizes([3328, 26_624, 32, 26, 0, 0, 8192, 150_272]).eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let eps = Key("layer_norm_eps", "attention.layer_norm_epsilon");
    let raw = Raw::read_normed(files, eps)?;
    windows::of_types(files, &raw.layers, None)?;
    let act = gpt2::activation(files, "hidden_act", nemotron::SQUARED)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, mlp_bias)
        }),
        norm: phimoe::norm,
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}
