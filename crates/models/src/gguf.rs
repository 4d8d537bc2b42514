//! The model's configuration in GGUF metadata.

use crate::config::{Config, LAYERS, LIMIT, Raw};
use crate::rope::{Scaling, Yarn};
use crate::stated::{Keys, Stated};
use crate::unsupported;
use crate::{Architecture, Names, by_name, unknown};
use formats::gguf::Metadata;
use formats::{Error, Result, Tensors, shape};
use nn::{Pairing, Weights};

/// The keys under `general.architecture`'s prefix.
struct Prefixed<'a> {
    metadata: &'a Metadata,
    file: &'a str,
    prefix: &'a str,
}

impl Keys for Prefixed<'_> {
    fn file(&self) -> &str {
        self.file
    }

    fn spelled(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn whole(&self, key: &str) -> Result<Option<usize>> {
        Ok(self.metadata.u32(&self.spelled(key))?.map(|n| n as usize))
    }

    fn real(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.f64(&self.spelled(key))
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        self.metadata.str(&self.spelled(key))
    }
}

/// Reads the hyperparameters under `general.architecture`'s prefix.
pub(crate) fn config(
    metadata: &Metadata,
    file: &str,
    names: &Names<'_>,
    tensors: &Tensors,
) -> Result<Config> {
    metadata.check_model()?;
    let architecture = architecture(metadata)?;
    let keys = Prefixed { metadata, file, prefix: architecture.name };
    unsupported::check_experts(&keys, "expert_count", "expert_used_count")?;
    let embed = names.find("embed")?.ok_or_else(|| no_weights(names, tensors))?;
    let rows = embed.shape.first().copied().unwrap_or(0);
    check_vocabulary(metadata, names, rows)?;
    let (heads, layers) = (keys.needed("attention.head_count")?, keys.needed("block_count")?);
    let head_dim = keys.size("attention.key_length")?;
    if let (Some(key), Some(value)) = (&head_dim, keys.size("attention.value_length")?)
        && key.value != value.value
    {
        let expected = format!("{}, as {} says", key.value, key.key());
        return Err(value.wrong(expected, value.value));
    }
    let mut warnings = Vec::new();
    let context = keys.size("context_length")?.unwrap_or_else(|| {
        let usual = keys.stated("context_length", 2048);
        warnings.push(format!("{} is missing: a context of 2048 is assumed", usual.key()));
        usual
    });
    let window = keys.size("attention.sliding_window")?.filter(|w| w.value > 0);
    Raw {
        architecture,
        hidden: keys.needed("embedding_length")?,
        windows: window.map_or_else(Vec::new, |w| vec![Some(w.value); layers.value.min(LAYERS)]),
        layers,
        kv_heads: match keys.size("attention.head_count_kv")? {
            Some(heads) => heads,
            None => heads.clone(),
        },
        heads,
        head_dim,
        feed_forward: keys.needed("feed_forward_length")?,
        vocab: keys.stated("vocab_size", rows),
        norm_eps: keys.needed_number("attention.layer_norm_rms_epsilon")?,
        context,
        tied: names.find("head")?.is_none(),
        theta: keys.number_or("rope.freq_base", 10_000.0)?,
        rotary: keys.size("rope.dimension_count")?,
        scaling: scaling(&keys, names, tensors)?,
        pairing: if architecture.adjacent_rope_in_gguf { Pairing::Adjacent } else { Pairing::Half },
        warnings,
    }
    .check()
}

fn architecture(metadata: &Metadata) -> Result<&'static Architecture> {
    const KEY: &str = "general.architecture";
    let name = metadata.str(KEY)?.ok_or_else(|| metadata.missing(KEY))?;
    by_name(name).ok_or_else(|| unknown(metadata.at(KEY), name))
}

/// Why there is no embedding: an empty file, or one of another kind of model.
fn no_weights(names: &Names<'_>, tensors: &Tensors) -> Error {
    if tensors.is_empty() {
        return Error::new(names.file, "a model's weights", "metadata alone")
            .hint("this may be a vocabulary file, or one part of a split model");
    }
    Error::new(names.place("embed"), "a tensor", "none in the file")
}

/// GGUF has a text for every row of the embedding: where counts differ, tokens or rows are missing.
fn check_vocabulary(metadata: &Metadata, names: &Names<'_>, rows: usize) -> Result<()> {
    const KEY: &str = "tokenizer.ggml.tokens";
    let found = metadata.strings(KEY)?.map(<[String]>::len);
    match found.filter(|found| *found != rows) {
        Some(found) => {
            let embed = names.find("embed")?;
            let embed = embed.iter().flat_map(|embed| embed.source.tensors()).next();
            let embed = embed.unwrap_or("the embedding");
            let expected = format!("{rows} tokens, one for each row of {embed}");
            Err(Error::new(metadata.at(KEY), expected, found))
        }
        None => Ok(()),
    }
}

fn scaling(keys: &Prefixed<'_>, names: &Names<'_>, tensors: &Tensors) -> Result<Stated<Scaling>> {
    const KEY: &str = "rope.scaling.type";
    if let Some(stored) = names.find("rope_factors")? {
        // One factor per pair: a larger tensor is a lie, and is not decoded.
        let count: usize = stored.shape.iter().product();
        if stored.shape.len() != 1 || count > 1 << 13 {
            let place = names.place("rope_factors");
            return Err(Error::new(place, "one factor per pair", shape(&stored.shape)));
        }
        let factors = stored.source.read(tensors).and_then(|factors| factors.to_f32());
        let factors = factors.map_err(|e| names.within("rope_factors", e))?;
        // The tensor itself states them.
        return Ok(
            Prefixed { prefix: "rope_freqs", ..*keys }.stated("weight", Scaling::Factors(factors))
        );
    }
    let factor = match keys.number("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.number("rope.scale_linear")?,
    };
    let scaling = match (keys.text(KEY)?, factor) {
        (Some("none"), _) | (_, None) => Scaling::None,
        (None | Some("linear"), Some(factor)) => Scaling::Linear { factor: factor.positive()? },
        (Some("yarn"), Some(factor)) => {
            let part = |part: &str| keys.number(&format!("rope.scaling.{part}"));
            let or = |name: &str, usual: f64| {
                part(name)?.map_or(Ok(usual), |number: Stated<f64>| number.positive())
            };
            let original = match part("original_context_length")? {
                Some(original) => original,
                None => keys.needed_number("context_length")?,
            };
            let stretched = factor.positive()?;
            let yarn = Yarn {
                factor: stretched,
                original: original.positive()?,
                fast: or("yarn_beta_fast", 32.0)?,
                slow: or("yarn_beta_slow", 1.0)?,
                truncate: true,
                magnitude: or("attn_factor", 1.0)? * Yarn::magnitude(stretched, 1.0),
            };
            yarn.check(&factor, LIMIT)?;
            Scaling::Yarn(yarn)
        }
        (Some(other), _) => return Err(keys.wrong(KEY, "none, linear or yarn", other)),
    };
    Ok(keys.stated(KEY, scaling))
}
