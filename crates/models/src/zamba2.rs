//! Zamba2 (Zyphra 2024): state spaces (Mamba-2), and in front of some of them a block of attention
//! and a feed-forward, of which there are one or two that take turns ([`shared`]):
//!
//! ```text
//! t = linear(shared(x, embedding)),  x = x + mamba(norm(x + t))
//! ```

mod shared;

use crate::config::{Config, GATE, LAYERS, LIMIT, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::{Recipes, Row};
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Ending, Layers, Opened, decoder, gpt2, mamba};
use formats::{ErrorKind, Result};
use nn::{
    Bias, Builder, Embedding, ForwardPass, GatedNorm, Mamba, MambaOptions, Projection, Tensor,
    Unary, Weights,
};
use shared::Shared;

const NAMES: &[Row] = &[
    ("embed", "model.embed_tokens", ""),
    ("norm", "model.final_layernorm", ""),
    ("head", "lm_head", ""),
    ("blocks.{}.linear", "model.layers.{}.linear", ""),
    ("blocks.{}.norm", "model.layers.{}.input_layernorm", ""),
    ("blocks.{}.norm", "model.layers.{}.mamba_decoder.input_layernorm", ""),
    ("blocks.{}.mamba.in", "model.layers.{}.mamba_decoder.mamba.in_proj", ""),
    ("blocks.{}.mamba.conv", "model.layers.{}.mamba_decoder.mamba.conv1d", ""),
    ("blocks.{}.mamba.log_decay", "model.layers.{}.mamba_decoder.mamba.A_log!", ""),
    ("blocks.{}.mamba.step", "model.layers.{}.mamba_decoder.mamba.dt_bias!", ""),
    ("blocks.{}.mamba.skip", "model.layers.{}.mamba_decoder.mamba.D!", ""),
    ("blocks.{}.mamba.norm", "model.layers.{}.mamba_decoder.mamba.norm", ""),
    ("blocks.{}.mamba.o", "model.layers.{}.mamba_decoder.mamba.out_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Zamba2",
    name: "zamba2",
    gguf: "",
    class: "Zamba2ForCausalLM",
    unsaid: Unsaid::sizes([2560, 0, 54, 32, 0, 0, 4096, 32_000])
        .eps(1e-5)
        .numbers(&[("mamba_d_conv", 4), ("mamba_d_state", 64)]),
    names: &[NAMES, shared::NAMES, mamba::NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own.
const OWN: &[(&str, &str)] = &[
    ("adapter_rank", "lora_rank"),
    ("mamba_conv_bias", "use_conv_bias"),
    ("mamba_d_head", "mamba_headdim"),
    ("mamba_n_groups", "mamba_ngroups"),
    ("mamba_n_heads", "n_mamba_heads"),
    ("mamba_proj_bias", "add_bias_linear"),
    ("use_shared_attention_adapter", "use_shared_attention_lora"),
];

/// Keys without effect: they follow from others, or are for other programs or for training.
const NOTED: &[&str] = &[
    "attention_head_dim",
    "attention_hidden_size",
    "ffn_hidden_size",
    "ft_lora",
    "kv_channels",
    "num_logits_to_keep",
    "num_query_groups",
    "use_mem_eff_path",
    "use_shared_block_lora",
    "use_shared_mlp_lora",
];

/// The number that norms behind gates add, whatever others do.
const GATED_EPS: f32 = 1e-5;
/// The context of models that were trained for a longer one, and do not say so otherwise.
const LONG: usize = 16_384;

/// The parts of a model.
struct Plan {
    mamba: MambaOptions,
    shared: shared::Options,
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    // Blocks take turns in the order of their layers.
    let order = keys.numbers("hybrid_layer_ids")?.unwrap_or_default();
    if !order.is_sorted() {
        let error = keys.wrong("hybrid_layer_ids", "numbers in ascending order", "others");
        return Err(error.of(ErrorKind::Unsupported));
    }
    let mut raw = Raw::read_quadrupled(files, Key("rms_norm_eps", ""))?;
    raw.gate = gpt2::activation(files, GATE.0, &[Unary::GeluErf])?;
    if keys.flag(Key("use_long_context", ""))? == Some(true) {
        raw.context.value = raw.context.value.max(LONG);
    }
    // Attention reads rows of twice the width.
    let heads = raw.heads.within(1..=1 << 16)?;
    raw.head_dim = Some(raw.hidden.clone().map(|hidden| hidden.saturating_mul(2) / heads));
    if !keys.flag(Key("use_mem_rope", ""))?.unwrap_or(false) {
        raw.rotation = None;
    }
    let least = keys.number_or(Key("time_step_min", ""), 0.001)?.value as f32;
    let mut mamba = mamba::read(files, &raw.hidden, GATED_EPS)?;
    mamba.norm = mamba.norm.map(|norm| GatedNorm { eps: GATED_EPS, ..norm });
    // Its convolutions have biases, whatever is stated.
    mamba.conv_bias = Bias::IfStored;
    mamba.limit[0] = mamba.limit[0].max(least.max(0.0));
    let uses = uses(files, &raw.layers)?;
    let count = keys.size("num_mem_blocks")?.map_or(Ok(1), |count| count.within(1..=LAYERS))?;
    let rank = keys.size("adapter_rank")?.map_or(Ok(128), |rank| rank.within(1..=LIMIT))?;
    let attends = keys.flag(Key("use_shared_attention_adapter", ""))?.unwrap_or(false);
    let bias = files.bias("add_bias_linear")?;
    let shared = shared::Options { uses, count, rank, attends, bias };
    let (config, plan) = (raw.check()?, Plan { mamba, shared });
    let of = config.clone();
    let build = move |weights: &dyn Weights, ending| {
        let change = |weights: &dyn Weights, name: &str| match name.contains(".mamba.") {
            true => mamba::part(weights, name, &plan.mamba),
            false => shared::part(&of, &plan.shared, weights, name),
        };
        layers(&Recipes { weights, change }, &of, &plan, ending)
    };
    Ok(Opened { config, build: Box::new(build) })
}

/// The layers in front of which a shared block is, in order.
fn uses(files: &Files<'_>, layers: &Stated<usize>) -> Result<Vec<usize>> {
    let (keys, count) = (&files.keys, layers.within(1..=LAYERS)?);
    let named =
        ["layers_block_type", "layer_types"].into_iter().find(|key| keys.mentions(Key(key, "")));
    let Some(key) = named else {
        let expected = "the kind of each layer";
        return Err(keys.wrong("layers_block_type", expected, "nothing"));
    };
    let key = Key(key, "");
    let list = keys.get(key).and_then(|list| list.as_array());
    let list = list.filter(|list| list.len() == count);
    let list = list.ok_or_else(|| {
        keys.wrong(key, format!("a list of {count} entries, one for each layer"), "another")
    })?;
    let shares = |kind: &serde_json::Value| match kind.as_str() {
        Some("hybrid") => Ok(true),
        Some("mamba" | "linear_attention") => Ok(false),
        _ => Err(keys.odd(key, "mamba or hybrid", kind)),
    };
    let shares = list.iter().map(shares).collect::<Result<Vec<bool>>>()?;
    Ok((0..count).filter(|i| shares[*i]).collect())
}

/// A layer: a state space, and what is in front of it in some.
struct Block {
    front: Option<(Shared, Projection)>,
    norm: decoder::Layer,
    mamba: Mamba,
}

impl Block {
    fn forward(&self, x: &Tensor, embedding: &Tensor) -> Tensor {
        let read = match &self.front {
            Some((shared, linear)) => x.add(&linear.forward(&shared.forward(x, embedding))),
            None => x.clone(),
        };
        x.add(&self.mamba.forward(&(self.norm)(&read)))
    }
}

fn layers(weights: &dyn Weights, config: &Config, plan: &Plan, ending: Ending) -> Result<Layers> {
    let builder = &Builder::new(weights);
    let hidden = config.hidden;
    let embed = Embedding::new(builder, "embed", config.vocab, hidden)?;
    let block = |i: usize| -> Result<Block> {
        let front = || -> Result<(Shared, Projection)> {
            let linear = format!("blocks.{i}.linear");
            let linear = Projection::new(builder, &linear, [hidden, hidden], Bias::Never)?;
            Ok((Shared::new(builder, config, &plan.shared, i)?, linear))
        };
        Ok(Block {
            front: plan.shared.uses.contains(&i).then(front).transpose()?,
            norm: decoder::rms_norm(builder, &format!("blocks.{i}.norm"), config)?,
            mamba: Mamba::new(builder, &format!("blocks.{i}.mamba"), &plan.mamba)?,
        })
    };
    let blocks = (0..config.layers).map(block).collect::<Result<Vec<Block>>>()?;
    let norm = decoder::rms_norm(builder, "norm", config)?;
    let head = || -> Result<decoder::Layer> {
        let head = decoder::head(builder, config, &embed, Bias::Never)?;
        Ok(Box::new(move |hidden| head.forward(hidden)))
    };
    let head = (ending == Ending::Logits).then(head).transpose()?;
    let hidden = Box::new(move |step: &ForwardPass| {
        let embedding = embed.forward(step).trace("embed");
        let mut x = embedding.clone();
        for (i, block) in blocks.iter().enumerate() {
            x = block.forward(&x, &embedding).trace(format!("blocks.{i}"));
        }
        norm(&x.select()).trace("norm")
    });
    Ok(Layers { blank: builder.program(), hidden, head })
}
