//! Gemma (Gemma Team 2024): Llama with norms of `1 + w`, a GELU gate, and an embedding times the
//! root of its width.

use crate::config::{Config, GATE, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gemma2, llama};
use formats::Result;
use nn::{Bias, Mlp, Weights};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Gemma",
    name: "gemma",
    gguf: "gemma",
    class: "GemmaForCausalLM",
    unsaid: Unsaid::sizes([3072, 24_576, 28, 16, 16, 0, 8192, 256_000]),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read(files)?;
    // The first configurations call the approximation by the name of what it approximates.
    const GELU: &[&str] = &["gelu_pytorch_tanh", "gelu"];
    if keys.text(GATE)?.is_none_or(|name| GELU.contains(&name)) {
        raw.gate = gemma2::GELU;
    }
    keys.only(Key("hidden_activation", ""), GELU)?;
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let parts = decoder::Parts {
        feed_forward: Box::new(|builder, config, i| {
            let (name, shape) = (format!("blocks.{i}.mlp"), [config.hidden, config.feed_forward]);
            let mlp = Mlp::new(builder, &name, shape, Bias::Never, config.gate)?;
            Ok(Box::new(move |x| mlp.forward(x)))
        }),
        multipliers: [(config.hidden as f32).sqrt(), 1.0, 1.0],
        ..decoder::Parts::new(Bias::Never, decoder::biased(bias))
    };
    let less_one = keys.dialect() == Dialect::HuggingFace;
    let norm =
        move |_: &Config, weights: &dyn Weights, name: &str| gemma2::norm(weights, name, less_one);
    Ok(decoder::open_recipes(config, parts, norm))
}
