//! Falcon-H1 (TII 2025): attention and a state space (Mamba-2) read each block's input side by side,
//! and numbers multiply what the parts of a block read and give. GGUF files have these numbers in
//! their weights.

use crate::config::{Config, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::{Architecture, Opened, mamba};
use formats::Result;
use nn::{AttentionOptions, Bias, Mamba, Projection, SelfAttention, Tensor, Unary, Weights};

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
    names: &[NAMES, mamba::NAMES],
    signs: None,
    experts: false,
    open,
};

/// The numbers that parts of a block are multiplied with.
#[derive(Debug, Clone, Copy)]
struct Multipliers {
    /// On what attention reads, on its keys, and on its result.
    attention: [f32; 3],
    /// On what the state space reads, and on its result.
    mamba: [f32; 2],
    /// On its gate, `x`, `B`, `C` and steps.
    parts: [f32; 5],
    /// On the gate of the feed-forward, and on its result.
    mlp: [f32; 2],
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
    let by = Multipliers {
        attention: [
            one("attention_in_multiplier")?,
            one("key_multiplier")?,
            one("attention_out_multiplier")?,
        ],
        mamba: [one("ssm_in_multiplier")?, one("ssm_out_multiplier")?],
        parts,
        mlp,
    };
    let raw = Raw::read(files, &["silu"])?;
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
    options.multipliers = nn::MambaMultipliers { z: parts[0], dt: parts[4], out: by.mamba[1] };
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    let multipliers = [one("embedding_multiplier")?, 1.0, one("lm_head_multiplier")?];
    let config = raw.check()?;
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
        multipliers,
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        let made = mamba::part(weights, name, &options)?;
        // The convolution's taps carry the numbers on `x`, `B` and `C`.
        let taps = name.ends_with(".mamba.taps").then_some([by.parts[1], by.parts[2], by.parts[3]]);
        Ok(match (made, taps) {
            (Some(made), Some(factors)) => Some(mamba::multiplied(made, &options, factors)),
            (made, _) => made,
        })
    }))
}
