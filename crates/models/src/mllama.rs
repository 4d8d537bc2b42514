//! Llama 3.2 Vision (Meta 2024), its text: Llama, some of whose layers attend to images alone and leave
//! a text without any as it is. The embedding has rows for images behind those of the vocabulary.

use crate::config::{Config, LAYERS, Raw};
use crate::files::Files;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama, phi3};
use formats::Result;
use nn::{Bias, Stored, Weights};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Llama 3.2 Vision, its text",
    name: "mllama",
    gguf: "",
    class: "MllamaForConditionalGeneration",
    unsaid: Unsaid::sizes([4096, 14_336, 40, 32, 8, 0, 131_072, 128_256])
        .theta(500_000.0)
        .eps(1e-5),
    names: &[llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// The layers for images where nothing is said.
const USUAL: &[f32] = &[3.0, 8.0, 13.0, 18.0, 23.0, 28.0, 33.0, 38.0];
/// Rows of the embedding that stand for images.
const IMAGES: usize = 8;

fn open(files: &Files<'_>) -> Result<Opened> {
    const LAYERS_OF_IMAGES: &str = "cross_attention_layers";
    let keys = &files.keys;
    keys.note("dropout"); // For training.
    let config = Raw::read(files)?.check()?;
    let listed = keys.numbers(LAYERS_OF_IMAGES)?.unwrap_or_else(|| USUAL.to_vec());
    let is_layer = |n: &f32| n.fract() == 0.0 && (0.0..LAYERS as f32).contains(n);
    if let Some(other) = listed.iter().find(|n| !is_layer(n)) {
        return Err(keys.wrong(LAYERS_OF_IMAGES, "numbers of layers", other));
    }
    let of_images: Vec<usize> = listed.into_iter().map(|n| n as usize).collect();
    let parts = decoder::Parts {
        holds: Box::new(move |i| [!of_images.contains(&i); 2]),
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

/// The rows of the embedding that stand for tokens.
fn stored(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let all = config.vocab + IMAGES;
    match weights.find(name)?.filter(|found| name == "embed" && found.shape.first() == Some(&all)) {
        Some(_) => phi3::rows(weights, name, &[all, config.hidden], 0, config.vocab),
        None => Ok(None),
    }
}
