//! BitNet b1.58 (Ma et al. 2024; 2B4T, Wang et al. 2025): Llama with a norm behind attention and one
//! behind the gate, whose function is the square of what is positive. Matrices are -1, 0 and 1 times
//! a number, and the rows that they multiply are rounded to 8 bits, where the configuration says so.
//! GGUF's `bitnet` is the first of these, whose gate has SiLU; nothing is rounded there but by
//! products of quantised blocks.

use crate::config::{Config, RMS_EPS, Raw};
use crate::decoder::{self, Layer};
use crate::files::Files;
use crate::keys::Dialect;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2, llama, quantisation};
use formats::Result;
use nn::{AttentionOptions, Bias, Builder, Norm, Projection, Unary};
use ops::{Op, RoundRows};

const NAMES: &[Row] = &[
    (
        "blocks.{}.attention.o_norm",
        "model.layers.{}.self_attn.attn_sub_norm",
        "blk.{}.attn_sub_norm",
    ),
    ("blocks.{}.mlp.norm", "model.layers.{}.mlp.ffn_sub_norm", "blk.{}.ffn_sub_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "BitNet b1.58",
    name: "bitnet",
    gguf: "bitnet",
    class: "BitNetForCausalLM",
    unsaid: Unsaid::sizes([2560, 6912, 30, 20, 5, 0, 2048, 128_256]).theta(500_000.0).eps(1e-5),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// How its layers round rows.
const ROUNDING: RoundRows = RoundRows { floor: 1e-5 };

fn open(files: &Files<'_>) -> Result<Opened> {
    let raw = Raw::read_normed(files, RMS_EPS)?;
    let act = match files.keys.dialect() {
        Dialect::HuggingFace => {
            gpt2::activation(files, "hidden_act", &[Unary::Relu, Unary::Square])?
        }
        Dialect::Gguf => &[Unary::Silu],
    };
    let rounding = quantisation::rounds_rows(files)?.then_some(ROUNDING);
    let bias = files.bias("attention_bias")?;
    let attention = move |config: &Config, layer: usize| AttentionOptions {
        output_norm: Some(config.norm_eps),
        output_rounding: rounding,
        ..decoder::biased(bias)(config, layer)
    };
    let parts = decoder::Parts {
        norm: if rounding.is_some() { rounded } else { decoder::rms_norm },
        feed_forward: Box::new(move |builder, config, i| {
            feed_forward(builder, config, i, act, rounding)
        }),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_parts(raw.check()?, parts))
}

/// A norm, whose rows a block's layers round. The head rounds none.
fn rounded(builder: &Builder<'_>, name: &str, config: &Config) -> Result<Layer> {
    let norm = decoder::rms_norm(builder, name, config)?;
    match name.starts_with("blocks.") {
        true => Ok(Box::new(move |x| norm(x).apply(Op::from(ROUNDING), &[], Vec::new()))),
        false => Ok(norm),
    }
}

/// `down(norm(f(gate(x)) * up(x)))`, whose rows are rounded in front of `down`, if they are.
fn feed_forward(
    builder: &Builder<'_>,
    config: &Config,
    i: usize,
    functions: &'static [Unary],
    rounding: Option<RoundRows>,
) -> Result<Layer> {
    let (hidden, ff) = (config.hidden, config.feed_forward);
    let linear = |part: &str, shape| {
        Projection::new(builder, &format!("blocks.{i}.mlp.{part}"), shape, Bias::Never)
    };
    let (gate, up) = (linear("gate", [ff, hidden])?, linear("up", [ff, hidden])?);
    let down = linear("down", [hidden, ff])?;
    let norm = Norm::rms(builder, &format!("blocks.{i}.mlp.norm"), ff, config.norm_eps)?;
    Ok(Box::new(move |x| {
        let gate = functions.iter().fold(gate.forward(x), |y, f| y.map(*f));
        let y = norm.forward(&gate.mul(&up.forward(x)));
        match rounding {
            Some(rounding) => down.forward(&y.apply(Op::from(rounding), &[], Vec::new())),
            None => down.forward(&y),
        }
    }))
}
