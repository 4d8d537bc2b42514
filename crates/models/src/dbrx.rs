//! DBRX (Mosaic Research 2024): layer norms without biases, bounds on q, k and v, and a mixture of
//! experts in every block, whose matrices lie below each other in three tensors, those behind the
//! gate turned.

use crate::config::{Config, Raw};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, experts, mixtral, phi3};
use formats::{Error, ErrorKind, Result, Source, shape};
use nn::{AttentionOptions, Bias, Builder, Stored, Weights};

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("norm", "transformer.norm_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "transformer.blocks.{}.norm_attn_norm.norm_1", "blk.{}.attn_norm"),
    (
        "blocks.{}.attention.qkv",
        "transformer.blocks.{}.norm_attn_norm.attn.Wqkv",
        "blk.{}.attn_qkv",
    ),
    (
        "blocks.{}.attention.o",
        "transformer.blocks.{}.norm_attn_norm.attn.out_proj",
        "blk.{}.attn_output",
    ),
    (
        "blocks.{}.mlp_norm",
        "transformer.blocks.{}.norm_attn_norm.norm_2",
        "blk.{}.attn_output_norm",
    ),
    ("blocks.{}.mlp.router", "transformer.blocks.{}.ffn.router.layer", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.experts.gate",
        "transformer.blocks.{}.ffn.experts.mlp.w1!",
        "blk.{}.ffn_gate_exps",
    ),
    ("blocks.{}.mlp.experts.up", "transformer.blocks.{}.ffn.experts.mlp.v1!", "blk.{}.ffn_up_exps"),
    ("blocks.{}.mlp.experts.turned", "transformer.blocks.{}.ffn.experts.mlp.w2!", ""),
    ("blocks.{}.mlp.experts.down", "", "blk.{}.ffn_down_exps"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "DBRX",
    name: "dbrx",
    gguf: "dbrx",
    class: "DbrxForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[NAMES],
    signs: None,
    experts: true,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("hidden_size", "d_model"),
    ("max_position_embeddings", "max_seq_len"),
    ("num_experts_per_tok", "moe_top_k"),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    keys.note("emb_pdrop");
    let mut raw = Raw::read_quadrupled(files, Key("", "attention.layer_norm_epsilon"))?;
    let own = keys.object("attn_config")?;
    let own = own.as_ref().unwrap_or(keys);
    if let Some(heads) = own.size(Key("kv_n_heads", "attention.head_count_kv"))? {
        raw.kv_heads = heads;
    }
    let base = own.number(Key("rope_theta", "rope.freq_base"))?;
    // Transformers 5 reads a base at its usual places, whatever is said here.
    let usual = keys.object("rope_parameters")?.map(|rope| rope.number("rope_theta"));
    let usual = usual.transpose()?.flatten().or(keys.number("rope_theta")?);
    if let (Some(rotation), Some(base), None) = (&mut raw.rotation, base, usual) {
        rotation.theta = base;
    }
    let clip = own.number(Key("clip_qkv", "attention.clamp_kqv"))?;
    let clip = clip.filter(|clip| clip.value != 0.0).map(|clip| clip.positive()).transpose()?;
    let clip = clip.map(|clip| clip as f32);
    let mixture = keys.object("ffn_config")?.unwrap_or_else(|| keys.clone());
    // For training, and as wide as the model.
    ["hidden_size", "moe_jitter_eps", "moe_loss_weight", "uniform_expert_assignment"]
        .into_iter()
        .for_each(|key| mixture.note(key));
    let function = mixture.object("ffn_act_fn")?.unwrap_or_else(|| mixture.clone());
    if let Some(width) = mixture.size(Key("ffn_hidden_size", "feed_forward_length"))? {
        raw.feed_forward = width;
    }
    const SHARES: Key = Key("moe_normalize_expert_weights", "");
    let normalised = match (mixture.number(SHARES)?, mixture.is_null(SHARES.0)) {
        (Some(power), _) if power.value != 1.0 => {
            let error = power.wrong("1: odds that sum to one", power.value);
            return Err(error.of(ErrorKind::Unsupported));
        }
        (_, null) => !null,
    };
    let config = raw.check()?;
    let of = Files { keys: mixture, outer: files.outer.clone(), ..*files };
    let mut options = experts::read(&of, config.hidden, config.feed_forward)?;
    options.routing.normalised = normalised;
    options.gate = experts::gate(&Files { keys: function, ..of }, "name")?;
    let count = options.experts;
    let attention =
        move |config: &Config, layer: usize| AttentionOptions { clip, ..config.attention(layer) };
    let parts = decoder::Parts {
        feed_forward: mixtral::mixture(options),
        norm,
        ..decoder::Parts::new(Bias::Never, attention)
    };
    let below = keys.dialect() == Dialect::HuggingFace;
    let stored = move |config: &Config, weights: &dyn Weights, name: &str| match (
        below,
        name.split_once(".experts."),
    ) {
        (true, Some((block, "down"))) => turned(config, weights, block, count),
        (true, Some(_)) => Ok(None),
        (false, Some(_)) => experts::joined(weights, name, count),
        (_, None) => phi3::part(config, weights, name),
    };
    Ok(decoder::open_recipes(config, parts, stored))
}

fn norm(builder: &Builder<'_>, name: &str, config: &Config) -> Result<decoder::Layer> {
    decoder::layer_norm(builder, name, config, Bias::Never)
}

/// The matrices behind the gate `[experts * hidden, width]`, which are stored turned.
fn turned(
    config: &Config,
    weights: &dyn Weights,
    block: &str,
    experts: usize,
) -> Result<Option<Stored>> {
    let name = format!("{block}.experts.turned");
    let Some(Stored { source, shape: dims }) = weights.find(&name)? else { return Ok(None) };
    let (hidden, width) = (config.hidden, config.feed_forward);
    let expected = [experts * width, hidden];
    if dims != expected {
        return Err(Error::new(weights.place(&name), shape(&expected), shape(&dims)));
    }
    let stack = Source::Reshape(Box::new(source), vec![experts, width, hidden]);
    let shape = vec![experts * hidden, width];
    let turned = Source::Transpose(Box::new(stack));
    Ok(Some(Stored { source: Source::Reshape(Box::new(turned), shape.clone()), shape }))
}
