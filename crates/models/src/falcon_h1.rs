//! Falcon-H1 (TII 2025): attention and a state space (Mamba-2) read each block's input side by side,
//! and numbers multiply what the parts of a block read and give. GGUF files have these numbers in
//! their weights, and so has a folder that is read to be written as one.

use crate::config::{Config, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, mamba};
use formats::{Result, Source};
use nn::{
    AttentionOptions, Bias, Mamba, MambaOptions, Projection, SelfAttention, Stored, Tensor, Unary,
    Weights,
};

pub(crate) const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.final_layernorm", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "model.layers.{}.pre_ff_layernorm", "blk.{}.ffn_norm!"),
    ("blocks.{}.mlp.gate", "model.layers.{}.feed_forward.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "model.layers.{}.feed_forward.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "model.layers.{}.feed_forward.down_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Falcon-H1",
    name: "falcon_h1",
    gguf: "falcon-h1",
    class: "FalconH1ForCausalLM",
    unsaid: Unsaid::sizes([4096, 14_336, 32, 32, 8, 0, 8192, 128_000])
        .eps(1e-5)
        .numbers(mamba::NUMBERS),
    names: &[NAMES, mamba::NAMES],
    signs: None,
    experts: false,
    open,
};

/// The numbers that parts of the model are multiplied with.
#[derive(Debug, Clone, Copy)]
struct Multipliers {
    /// On embeddings, and on logits.
    ends: [f32; 2],
    /// On what attention reads, on its keys, and on its result.
    attention: [f32; 3],
    /// On what the state space reads, and on its result.
    mamba: [f32; 2],
    /// On its gate, `x`, `B`, `C` and steps.
    parts: [f32; 5],
    /// On the gate of the feed-forward, and on its result.
    mlp: [f32; 2],
}

impl Multipliers {
    const NONE: Multipliers = Multipliers {
        ends: [1.0; 2],
        attention: [1.0; 3],
        mamba: [1.0; 2],
        parts: [1.0; 5],
        mlp: [1.0; 2],
    };

    /// The weight `name` with the numbers that GGUF has in it.
    fn folded(&self, name: &str, stored: Stored, options: &MambaOptions) -> Stored {
        let (stem, bias) = match name.strip_suffix(".bias") {
            Some(stem) => (stem, true),
            None => (name, false),
        };
        // What multiplies a part's input reaches its matrix alone.
        let [attends, scans] =
            [self.attention[0], self.mamba[0]].map(|by| if bias { 1.0 } else { by });
        let [z, x, b, c, dt] = self.parts.map(|by| by * scans);
        let by = match stem.splitn(3, '.').nth(2).unwrap_or(stem) {
            "embed" => self.ends[0],
            "head" => self.ends[1],
            "attention.q" | "attention.v" => attends,
            "attention.k" => self.attention[1] * attends,
            "attention.o" => self.attention[2],
            "mamba.z" => z,
            "mamba.dt" => dt,
            "mamba.o" => self.mamba[1],
            "mlp.gate" => self.mlp[0],
            "mlp.down" => self.mlp[1],
            "mamba.xbc" if [x, b, c] != [1.0; 3] => {
                let (inner, each) =
                    (options.heads * options.head_dim, options.groups * options.state);
                let part = |start, count, by| {
                    Source::Times(Box::new(stored.source.clone().rows(start, count)), by)
                };
                let all =
                    vec![part(0, inner, x), part(inner, each, b), part(inner + each, each, c)];
                return Stored { source: Source::Concat(all), ..stored };
            }
            _ => 1.0,
        };
        match by {
            1.0 => stored,
            by => Stored { source: Source::Times(Box::new(stored.source), by), ..stored },
        }
    }
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    keys.note("mamba_use_mlp");
    keys.note("mlp_expansion_factor");
    keys.note("num_logits_to_keep");
    keys.note("attn_layer_indices");
    let one = |key: &'static str| -> Result<f32> {
        Ok(keys.number_or(Key(key, ""), 1.0)?.positive()? as f32)
    };
    let several = |key: &'static str, found: &mut [f32]| -> Result<()> {
        let Some(list) = keys.numbers(key)? else { return Ok(()) };
        if list.len() != found.len() {
            return Err(keys.wrong(key, format!("{} numbers", found.len()), list.len()));
        }
        found.copy_from_slice(&list);
        Ok(())
    };
    let (mut parts, mut mlp) = ([1.0; 5], [1.0; 2]);
    several("ssm_multipliers", &mut parts)?;
    several("mlp_multipliers", &mut mlp)?;
    let stated = Multipliers {
        ends: [one("embedding_multiplier")?, one("lm_head_multiplier")?],
        attention: [
            one("attention_in_multiplier")?,
            one("key_multiplier")?,
            one("attention_out_multiplier")?,
        ],
        mamba: [one("ssm_in_multiplier")?, one("ssm_out_multiplier")?],
        parts,
        mlp,
    };
    let folds = files.apart;
    let by = if folds { Multipliers::NONE } else { stated };
    let raw = Raw::read_silu(files)?;
    let mut options = mamba::read(files, &raw.hidden, raw.norm_eps.value as f32)?;
    let normed = match keys.dialect() {
        Dialect::HuggingFace => keys.flag("mamba_rms_norm")?.unwrap_or(false),
        Dialect::Gguf => files.names.find("blocks.0.mamba.norm")?.is_some(),
    };
    let norm_first = match keys.dialect() {
        Dialect::HuggingFace => keys.flag("mamba_norm_before_gate")?.unwrap_or(true),
        Dialect::Gguf => false,
    };
    options.norm = options.norm.filter(|_| normed).map(|norm| nn::GatedNorm { norm_first, ..norm });
    options.output_bias = files.bias("projectors_bias")?;
    options.multipliers =
        nn::MambaMultipliers { z: by.parts[0], dt: by.parts[4], out: by.mamba[1] };
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let mut config = raw.check()?;
    let tied = config.tied;
    // One matrix has no room for two numbers.
    config.tied &= !folds || stated.ends[0] == stated.ends[1];
    let attention = move |config: &Config, layer| {
        let scale = by.attention[1] / (config.head_dim as f32).sqrt();
        let scale = (by.attention[1] != 1.0).then_some(scale);
        AttentionOptions { qkv_bias: bias, output_bias: bias, scale, ..config.attention(layer) }
    };
    let mixer: decoder::Mixer = Box::new(move |builder, config, i| {
        let block = format!("blocks.{i}");
        let attention =
            SelfAttention::new(builder, &format!("{block}.attention"), attention(config, i))?;
        let mamba = Mamba::new(builder, &format!("{block}.mamba"), &options)?;
        let layer: Layer = Box::new(move |x| {
            let ([x_in, _, out], [mamba_in, _]) = (by.attention, by.mamba);
            let attended =
                decoder::scaled(attention.forward(&decoder::scaled(x.clone(), x_in)), out);
            mamba.forward(&decoder::scaled(x.clone(), mamba_in)).add(&attended)
        });
        Ok(Some(layer))
    });
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        if by.mlp == [1.0; 2] {
            return decoder::gated(builder, config, i, mlp_bias);
        }
        let (hidden, ff) = (config.hidden, config.feed_forward);
        let linear = |part: &str, shape| {
            Projection::new(builder, &format!("blocks.{i}.mlp.{part}"), shape, mlp_bias)
        };
        let [gate, up] = [linear("gate", [ff, hidden])?, linear("up", [ff, hidden])?];
        let down = linear("down", [hidden, ff])?;
        Ok(Box::new(move |x: &Tensor| {
            let gate = decoder::scaled(gate.forward(x), by.mlp[0]).map(Unary::Silu);
            decoder::scaled(down.forward(&gate.mul(&up.forward(x))), by.mlp[1])
        }))
    });
    let parts = decoder::Parts {
        mixer,
        feed_forward,
        multipliers: [by.ends[0], 1.0, by.ends[1]],
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        let made = mamba::part(weights, name, &options)?;
        if folds {
            let stored = if tied && name == "head" { "embed" } else { name };
            let made = made.map_or_else(|| weights.find(stored), |made| Ok(Some(made)))?;
            return Ok(made.map(|made| stated.folded(name, made, &options)));
        }
        // The convolution's taps carry the numbers on `x`, `B` and `C`.
        let taps = name.ends_with(".mamba.taps").then_some([by.parts[1], by.parts[2], by.parts[3]]);
        Ok(match (made, taps) {
            (Some(made), Some(factors)) => Some(mamba::multiplied(made, &options, factors)),
            (made, _) => made,
        })
    }))
}
