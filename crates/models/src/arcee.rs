//! AFM (Arcee AI 2025): Llama with a feed-forward without a gate, whose function is the square of
//! what is positive.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, llama, nemotron};
use formats::Result;
use nn::Pairing;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "AFM",
    name: "arcee",
    gguf: "arcee",
    class: "ArceeForCausalLM",
    unsaid: Unsaid::sizes([2560, 18_432, 32, 32, 0, 0, 4096, 32_000]).eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let eps = Key("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    let mut raw = Raw::read_normed(files, eps)?;
    if files.keys.dialect() == Dialect::Gguf {
        raw.pairing = Pairing::Adjacent;
    }
    let act = gpt2::activation(files, "hidden_act", nemotron::SQUARED)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let parts = decoder::Parts {
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, mlp_bias)
        }),
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}
