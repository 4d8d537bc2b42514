//! PLM (Deng et al. 2025): latent attention without a row for queries, and a feed-forward without a
//! gate, of the square of what is positive; the head is the embedding.

use crate::config::Config;
use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, gpt2, latent, llama, nemotron};
use formats::Result;
use nn::Bias;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "PLM",
    name: "plm",
    gguf: latent::PLM,
    class: "PLMForCausalLM",
    unsaid: Unsaid::NOTHING.theta(100_000.0),
    names: &[latent::NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let mut raw = latent::raw(files)?;
    raw.pairing = latent::pairing(files)?;
    let (config, options) = latent::read(files, raw)?;
    let heads = latent::Heads::of(&options);
    let functions = gpt2::activation(files, "hidden_act", nemotron::SQUARED)?;
    let parts = decoder::Parts {
        mixer: latent::mixer(options),
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, functions, Bias::Never)
        }),
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights, name| {
        latent::part(weights, name, heads)
    }))
}
