//! A model's configuration, from `config.json` (both dialects) or GGUF metadata, checked once.

use crate::files::Files;
use crate::keys::{Dialect, Key, Keys};
use crate::rope::{Rotation, Scaling};
use crate::stated::Stated;
use crate::{Architecture, gpt2, scaling};
use formats::gguf::Metadata;
use formats::{Error, Result};
use nn::{AttentionOptions, Bias, Pairing, QkNorm, Rope, Unary};

/// Hyperparameters of a decoder.
#[derive(Debug, Clone)]
pub struct Config {
    /// The architecture's row in the registry.
    pub architecture: &'static Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Width of the feed-forward.
    pub feed_forward: usize,
    /// Rows of the embedding table.
    pub vocab: usize,
    /// Added to the mean square of every norm.
    pub norm_eps: f32,
    /// Window of each layer; empty: none has one.
    pub windows: Vec<Option<usize>>,
    /// The functions that the gate of a gated feed-forward goes through, one after the other.
    pub gate: &'static [Unary],
    /// Positions the model was trained for.
    pub context: usize,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// The rotation of q and k; none where positions are learned.
    pub rope: Option<Rope>,
    /// Whether the rotation is another one for another context; see
    /// [`ReadOptions::context`](crate::ReadOptions::context).
    pub rope_by_context: bool,
    /// Whether its attention is by latents, which devices may cache in place of each head's keys and
    /// values ([`ReadOptions::latents`](crate::ReadOptions::latents)).
    pub latents: bool,
    /// Parts of canonical names: matrices that GGUF files have in another order than Hugging Face's
    /// form, and not for rotations.
    pub gguf_orders: &'static [&'static str],
    /// Canonical names of weights that files may hold though no layer reads them.
    pub spare: Vec<String>,
    /// Assumptions made where the file omits something or is unusual, one line each.
    pub warnings: Vec<String>,
}

/// The unchecked numbers of a decoder.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) architecture: &'static Architecture,
    pub(crate) hidden: Stated<usize>,
    pub(crate) layers: Stated<usize>,
    pub(crate) heads: Stated<usize>,
    pub(crate) kv_heads: Stated<usize>,
    pub(crate) head_dim: Option<Stated<usize>>,
    pub(crate) feed_forward: Stated<usize>,
    pub(crate) vocab: Stated<usize>,
    pub(crate) norm_eps: Stated<f64>,
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) gate: &'static [Unary],
    pub(crate) context: Stated<usize>,
    pub(crate) tied: bool,
    pub(crate) rotation: Option<Rotation>,
    pub(crate) pairing: Pairing,
    pub(crate) warnings: Vec<String>,
    /// The context that is going to be used, where that is known.
    pub(crate) loaded: Option<usize>,
}

/// Larger than any model's, small enough that products of two cannot overflow.
pub(crate) const LIMIT: usize = 1 << 28;
/// The number that is added in RMS norms.
pub(crate) const RMS_EPS: Key = Key("rms_norm_eps", "attention.layer_norm_rms_epsilon");
/// The function in feed-forwards.
pub(crate) const GATE: Key = Key("hidden_act", "");
/// The functions of a gate where nothing is said.
pub(crate) const SILU: &[Unary] = &[Unary::Silu];
const CONTEXT: Key = Key("max_position_embeddings", "context_length");
/// More layers than any model has.
pub(crate) const LAYERS: usize = 4096;

impl Raw {
    /// The numbers under the names that most decoders share; no layer has a window.
    ///
    /// # Errors
    /// A key that is missing or of another type.
    pub(crate) fn read(files: &Files<'_>) -> Result<Raw> {
        Raw::read_normed(files, RMS_EPS)
    }

    /// The same for architectures whose mixers have the function of feed-forwards as well, or where
    /// none but SiLU is known.
    ///
    /// # Errors
    /// As [`Raw::read`], or another function.
    pub(crate) fn read_silu(files: &Files<'_>) -> Result<Raw> {
        files.keys.only(GATE, &["silu"])?;
        Raw::read(files)
    }

    /// The same for heads of which a part of `turned` elements is rotated, which counts as the
    /// head.
    ///
    /// # Errors
    /// As [`Raw::read`].
    pub(crate) fn read_turned(files: &Files<'_>, turned: Stated<usize>) -> Result<Raw> {
        Raw::read_sized(files, RMS_EPS, |_| Ok(Some(turned)), 0)?.gated(files)
    }

    /// The same, for another key of the number that is added in norms.
    ///
    /// # Errors
    /// As [`Raw::read`].
    pub(crate) fn read_normed(files: &Files<'_>, eps: Key) -> Result<Raw> {
        Raw::read_ungated(files, eps)?.gated(files)
    }

    /// The same for architectures with a function of their own in feed-forwards.
    ///
    /// # Errors
    /// As [`Raw::read`].
    pub(crate) fn read_ungated(files: &Files<'_>, eps: Key) -> Result<Raw> {
        Raw::read_sized(files, eps, |heads| head_dim(files, heads), 0)
    }

    /// The same with the function of a gate that the configuration names.
    fn gated(self, files: &Files<'_>) -> Result<Raw> {
        Ok(Raw { gate: gpt2::activation(files, GATE.0, SILU)?, ..self })
    }

    /// The same where a feed-forward is four times as wide as the residual stream if nothing is
    /// said.
    ///
    /// # Errors
    /// As [`Raw::read`].
    pub(crate) fn read_quadrupled(files: &Files<'_>, eps: Key) -> Result<Raw> {
        Raw::read_sized(files, eps, |heads| head_dim(files, heads), 4)?.gated(files)
    }

    /// The same, where `head_dim` gives the size of this many heads, if it is stated, and a
    /// feed-forward is `times` as wide as the residual stream if nothing is said; 0: it must be.
    fn read_sized(
        files: &Files<'_>,
        eps: Key,
        head_dim: impl FnOnce(&Stated<usize>) -> Result<Option<Stated<usize>>>,
        times: usize,
    ) -> Result<Raw> {
        let keys = &files.keys;
        if let Some(metadata) = files.metadata() {
            metadata.check_model()?;
        }
        let rows = rows_of_embedding(files)?;
        let layers = layers(files)?;
        let heads = keys.needed(Key("num_attention_heads", "attention.head_count"))?;
        let head_dim = head_dim(&heads)?;
        let mut warnings = Vec::new();
        let context = keys.size(CONTEXT)?.unwrap_or_else(|| {
            let usual = keys.stated(CONTEXT, 2048);
            warnings.push(format!("{} is missing: a context of 2048 is assumed", usual.key()));
            usual
        });
        let kv_heads = keys.size(Key("num_key_value_heads", "attention.head_count_kv"))?;
        let hidden = keys.needed(Key("hidden_size", "embedding_length"))?;
        let usual = || hidden.value.checked_div(heads.value).unwrap_or(0);
        let width = head_dim.as_ref().map_or_else(usual, |head_dim| head_dim.value);
        let rotation = scaling::read(files, width)?;
        const FEED_FORWARD: Key = Key("intermediate_size", "feed_forward_length");
        let feed_forward = match keys.size(FEED_FORWARD)? {
            Some(width) => width,
            // Models of experts alone state their width.
            None => keys
                .size(Key("moe_intermediate_size", "expert_feed_forward_length"))?
                .or_else(|| (times > 0).then(|| hidden.clone().map(|n| n.saturating_mul(times))))
                .ok_or_else(|| keys.wrong(FEED_FORWARD, "a whole number", "nothing"))?,
        };
        Ok(Raw {
            architecture: files.architecture,
            hidden,
            layers,
            kv_heads: kv_heads.unwrap_or_else(|| heads.clone()),
            heads,
            head_dim,
            feed_forward,
            vocab: vocabulary(files, rows)?,
            norm_eps: norm_eps(files, eps)?,
            windows: Vec::new(),
            gate: SILU,
            context,
            tied: tied(files)?,
            rotation: Some(rotation),
            pairing: Pairing::Half,
            warnings,
            loaded: files.context,
        })
    }

    /// The numbers of a model without attention and feed-forwards, whose context nothing bounds. Heads
    /// and widths, which it has not, are ones.
    ///
    /// # Errors
    /// As [`Raw::read`].
    pub(crate) fn read_alone(files: &Files<'_>, eps: Key) -> Result<Raw> {
        let keys = &files.keys;
        if let Some(metadata) = files.metadata() {
            metadata.check_model()?;
        }
        let rows = rows_of_embedding(files)?;
        let one = || keys.at("", 1);
        Ok(Raw {
            architecture: files.architecture,
            hidden: keys.needed(Key("hidden_size", "embedding_length"))?,
            layers: layers(files)?,
            heads: one(),
            kv_heads: one(),
            head_dim: Some(one()),
            feed_forward: one(),
            vocab: vocabulary(files, rows)?,
            norm_eps: norm_eps(files, eps)?,
            windows: Vec::new(),
            gate: SILU,
            context: keys.size(CONTEXT)?.unwrap_or_else(|| keys.stated(CONTEXT, 1 << 20)),
            tied: tied(files)?,
            rotation: None,
            pairing: Pairing::Half,
            warnings: Vec::new(),
            loaded: files.context,
        })
    }

    /// The part `usual` of each head is rotated where `config.json` says no other.
    ///
    /// # Errors
    /// A part that is none.
    pub(crate) fn turns_part(&mut self, files: &Files<'_>, usual: f64) -> Result<()> {
        let width = self.head_dim.clone().unwrap_or_else(|| {
            let heads = self.heads.value.max(1);
            self.hidden.clone().map(|hidden| hidden / heads)
        });
        let rotation = self.rotation.as_mut().filter(|rotation| rotation.is_open());
        if let (Dialect::HuggingFace, Some(rotation)) = (files.keys.dialect(), rotation) {
            if !(0.0..=1.0).contains(&usual) {
                return Err(width.wrong("a part from 0 to 1 of each head to be rotated", usual));
            }
            rotation.rotary = Some(width.map(|width| (width as f64 * usual) as usize));
        }
        Ok(())
    }

    /// The configuration, if all numbers are of models and fit each other.
    ///
    /// # Errors
    /// One that does not, by key.
    pub(crate) fn check(self) -> Result<Config> {
        let (hidden, layers) = (self.hidden.within(1..=LIMIT)?, self.layers.within(1..=LAYERS)?);
        let heads = self.heads.within(1..=1 << 16)?;
        let kv_heads = self.kv_heads.within(1..=1 << 16)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of {} = {kv_heads}", self.kv_heads.key());
            return Err(self.heads.wrong(expected, heads));
        }
        let head_dim = match &self.head_dim {
            Some(head_dim) => head_dim.within(1..=1 << 14)?,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a multiple of {} = {heads}", self.heads.key());
                return Err(self.hidden.wrong(expected, hidden));
            }
        };
        let norm_eps = self.norm_eps.positive()?;
        if norm_eps >= 1.0 {
            return Err(self.norm_eps.wrong("a number below 1", norm_eps));
        }
        let context = self.context.within(1..=LIMIT)?;
        // A stretched context may be meant by its factor alone.
        let scaling = self.rotation.as_ref().map(|rotation| &rotation.scaling.value);
        let context = context.max(scaling.and_then(Scaling::context).unwrap_or(0));
        let mut warnings = self.warnings;
        let loaded = self.loaded.unwrap_or(context);
        warnings.extend(scaling.and_then(|scaling| scaling.remark(loaded)));
        let width = self.head_dim.as_ref().unwrap_or(&self.hidden);
        let rope = |rotation: &Rotation| rotation.rope(head_dim, width, self.pairing, loaded);
        let rope = self.rotation.as_ref().map(rope).transpose()?;
        Ok(Config {
            architecture: self.architecture,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            feed_forward: self.feed_forward.within(1..=LIMIT)?,
            vocab: self.vocab.within(1..=LIMIT)?,
            norm_eps: norm_eps as f32,
            windows: self.windows,
            gate: self.gate,
            context,
            tied: self.tied,
            rope,
            rope_by_context: scaling.is_some_and(Scaling::by_context),
            latents: false,
            gguf_orders: &[],
            spare: Vec::new(),
            warnings,
        })
    }
}

/// The number that is added in norms, which is the class's where `config.json` does not say it.
fn norm_eps(files: &Files<'_>, eps: Key) -> Result<Stated<f64>> {
    match files.keys.dialect() {
        Dialect::Gguf => files.keys.needed_number(eps),
        Dialect::HuggingFace => files.keys.number_or(eps, files.architecture.unsaid.eps),
    }
}

/// The number of tokens: the rows of a GGUF file's embedding, or as stated.
fn vocabulary(files: &Files<'_>, rows: Option<usize>) -> Result<Stated<usize>> {
    match rows {
        Some(rows) => Ok(files.keys.stated("vocab_size", rows)),
        None => files.keys.needed("vocab_size"),
    }
}

/// The rows of a GGUF file's embedding, which is all that says how large the vocabulary is; none
/// for `config.json`.
///
/// # Errors
/// No embedding, or another number of tokens.
pub(crate) fn rows_of_embedding(files: &Files<'_>) -> Result<Option<usize>> {
    let Some(metadata) = files.metadata() else { return Ok(None) };
    let embed = files.names.find("embed")?.ok_or_else(|| no_weights(files))?;
    let rows = embed.shape.first().copied().unwrap_or(0);
    files.keys.size("vocab_size")?;
    check_vocabulary(metadata, embed.source.tensors().first().copied(), rows)?;
    Ok(Some(rows))
}

/// Why there is no embedding: an empty file, or one of another kind of model.
fn no_weights(files: &Files<'_>) -> Error {
    if files.tensors.is_some_and(|tensors| tensors.is_empty()) {
        return Error::new(files.keys.file, "a model's weights", "metadata alone")
            .hint("this may be a vocabulary file, or one part of a split model");
    }
    Error::new(files.names.place("embed"), "a tensor", "none in the file")
}

/// GGUF has a text for every row of the embedding: where counts differ, tokens or rows are missing.
fn check_vocabulary(metadata: &Metadata, embed: Option<&str>, rows: usize) -> Result<()> {
    const KEY: &str = "tokenizer.ggml.tokens";
    let found = metadata.strings(KEY)?.map(<[String]>::len);
    match found.filter(|found| *found != rows) {
        Some(found) => {
            let embed = embed.unwrap_or("the embedding");
            let expected = format!("{rows} tokens, one for each row of {embed}");
            Err(Error::new(metadata.at(KEY), expected, found))
        }
        None => Ok(()),
    }
}

/// The number of layers: stated, or as many as a list of their kinds has.
fn layers(files: &Files<'_>) -> Result<Stated<usize>> {
    const LAYERS: Key = Key("num_hidden_layers", "block_count");
    let keys = &files.keys;
    if let Some(layers) = keys.size(LAYERS)? {
        return Ok(layers);
    }
    let listed = |key: &'static str| Some((key, keys.get(Key(key, ""))?.as_array()?.len()));
    match ["layer_types", "layers_block_type"].into_iter().find_map(listed) {
        Some((key, count)) => Ok(keys.at(key, count)),
        None => keys.needed(LAYERS),
    }
}

/// Elements per head: stated; or, where `config.json` leaves them out, from the rows of q.
fn head_dim(files: &Files<'_>, heads: &Stated<usize>) -> Result<Option<Stated<usize>>> {
    let keys: &Keys<'_> = &files.keys;
    let stated = keys.size(Key("head_dim", "attention.key_length"))?;
    if let (Some(key), Some(value)) = (&stated, keys.size(Key("", "attention.value_length"))?)
        && key.value != value.value
    {
        let expected = format!("{}, as {} says", key.value, key.key());
        return Err(value.wrong(expected, value.value));
    }
    if stated.is_some() || keys.dialect() == Dialect::Gguf {
        return Ok(stated);
    }
    let q = files.names.find("blocks.0.attention.q")?;
    let rows = q.and_then(|q| q.shape.first().copied()).unwrap_or(0);
    let fits = heads.value > 0 && rows > 0 && rows.is_multiple_of(heads.value);
    Ok(fits.then(|| keys.stated("head_dim", rows / heads.value)))
}

/// Whether the head is the embedding: as stated, or where nothing is said. A head that is stored is
/// one of its own whatever is said, as in Transformers.
///
/// # Errors
/// Something else than true or false.
pub(crate) fn tied(files: &Files<'_>) -> Result<bool> {
    const TIED: Key = Key("tie_word_embeddings", "");
    let head = files.names.find("head")?.is_some();
    let stated = match files.keys.flag(TIED)? {
        Some(tied) => Some(tied),
        None => files.outer.flag(TIED)?,
    };
    Ok(stated.unwrap_or(true) && !head)
}

impl Config {
    /// The attention of layer `layer` without biases or q/k norms, which architectures add.
    pub(crate) fn attention(&self, layer: usize) -> AttentionOptions {
        AttentionOptions {
            hidden: self.hidden,
            output: None,
            factors: None,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: None,
            qkv_bias: Bias::Never,
            output_bias: Bias::Never,
            qk_norm: QkNorm::None,
            rotates_first: false,
            window: self.windows.get(layer).copied().flatten(),
            chunked: false,
            rope: self.rope.clone(),
            stretch: None,
            sinks: false,
            slopes: false,
            clip: None,
            output_norm: None,
            output_rounding: None,
            scale: None,
            cap: None,
            output_gate: None,
            value_norm: None,
            shared: None,
        }
    }
}
