//! GPT-J (Wang and Komatsuzaki 2021): attention and feed-forward side by side behind one layer
//! norm, part of each head rotated in adjacent pairs, biases in the feed-forward and on the head.
//! CodeGen (Nijkamp et al. 2022) is the same with q, v and k of a quarter of the heads below each
//! other, four times.

use crate::config::Raw;
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Config, Opened, gpt2, phimoe};
use formats::{Error, Result, Source, shape};
use nn::{Bias, Pairing, Stored, Unary, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", ""),
    ("norm", "transformer.ln_f", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", ""),
    ("blocks.{}.attention.qvk", "transformer.h.{}.attn.qkv_proj", ""),
    ("blocks.{}.attention.q", "transformer.h.{}.attn.q_proj", ""),
    ("blocks.{}.attention.k", "transformer.h.{}.attn.k_proj", ""),
    ("blocks.{}.attention.v", "transformer.h.{}.attn.v_proj", ""),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.out_proj", ""),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.fc_in", ""),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.fc_out", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "GPT-J",
    name: "gptj",
    gguf: "",
    class: "GPTJForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: false,
    open,
};

/// CodeGen.
pub(crate) const CODEGEN: Architecture =
    Architecture { title: "CodeGen", name: "codegen", class: "CodeGenForCausalLM", ..ARCHITECTURE };

/// The parts in which CodeGen's matrix of q, v and k is.
const PARTS: usize = 4;

/// Names of GPT-2's for sizes.
pub(crate) const OWN: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
    ("intermediate_size", "n_inner"),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_quadrupled(files, Key("layer_norm_epsilon", ""))?;
    // As many as n_positions, by an older name.
    keys.size(Key("n_ctx", ""))?;
    for key in ["rotary", "scale_attn_weights"] {
        if keys.flag(Key(key, ""))? == Some(false) {
            return Err(keys.wrong(key, "true, as of this architecture", false));
        }
    }
    raw.pairing = Pairing::Adjacent;
    let rotary = keys.size("rotary_dim")?;
    if let Some(rotation) = &mut raw.rotation {
        rotation.rotary = rotary.or_else(|| Some(keys.stated("rotary_dim", 64)));
    }
    let act = gpt2::activation(files, "activation_function", &[Unary::GeluTanh])?;
    let parts = decoder::Parts {
        order: Order::BesideOneNorm,
        feed_forward: Box::new(move |builder, config, i| {
            decoder::ungated(builder, config, i, act, Bias::Always)
        }),
        norm: phimoe::norm,
        head_bias: Bias::IfStored,
        ..decoder::Parts::new(Bias::Always, decoder::biased(Bias::Never))
    };
    Ok(decoder::open_recipes(raw.check()?, parts, part))
}

/// The weight `name`, if it is q, k or v and these are stored in one.
fn part(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let Some((stem, part)) = name.rsplit_once('.') else { return Ok(None) };
    let Some(at) = ["q", "v", "k"].iter().position(|one| *one == part) else {
        return Ok(None);
    };
    let all = format!("{stem}.qvk");
    let Some(Stored { source, shape: dims }) = weights.find(&all)? else { return Ok(None) };
    let (wide, expected) = (config.hidden, vec![3 * config.hidden, config.hidden]);
    if dims != expected || !config.heads.is_multiple_of(PARTS) {
        let expected = format!("{} of heads in {PARTS} parts", shape(&expected));
        return Err(Error::new(weights.place(&all), expected, shape(&dims)));
    }
    let apart = Source::Permute(Box::new(source), [1, PARTS, 3, wide / PARTS]);
    Ok(Some(Stored { source: apart.rows(at * wide, wide), shape: vec![wide, wide] }))
}
