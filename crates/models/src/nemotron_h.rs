//! Nemotron-H and Nemotron Nano (NVIDIA 2025): each layer is one of a state space (Mamba-2),
//! attention without positions, a feed-forward without a gate, and a mixture of such, behind a norm
//! of its own.

use crate::config::Raw;
use crate::decoder::{self, Layer, Order};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::nemotron::SQUARED;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, experts, glm4_moe, gpt2, mamba};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result};
use nn::{
    Bias, Builder, ExpertsOptions, Gate, Mamba, MixtureOfExperts, Projection, Tensor, Unary,
    Weights,
};

mod kinds;

use kinds::Kind;

const NAMES: &[Row] = &[
    ("embed", "backbone.embeddings", "token_embd"),
    ("norm", "backbone.norm_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "backbone.layers.{}.norm", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "backbone.layers.{}.mixer.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "backbone.layers.{}.mixer.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "backbone.layers.{}.mixer.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "backbone.layers.{}.mixer.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp.up", "backbone.layers.{}.mixer.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "backbone.layers.{}.mixer.down_proj", "blk.{}.ffn_down"),
];

/// Mixtures.
const EXPERTS: &[Row] = &[
    ("blocks.{}.mlp.router", "backbone.layers.{}.mixer.gate", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.router.correction",
        "backbone.layers.{}.mixer.gate.e_score_correction_bias!",
        "blk.{}.exp_probs_b.bias!",
    ),
    ("blocks.{}.mlp.experts.up", "backbone.layers.{}.mixer.experts.up_proj!", "blk.{}.ffn_up_exps"),
    // The gate of the one matrix.
    ("blocks.{}.mlp.experts.gate", "", "blk.{}.ffn_up_exps"),
    (
        "blocks.{}.mlp.experts.down",
        "backbone.layers.{}.mixer.experts.down_proj!",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.{}.up", "backbone.layers.{}.mixer.experts.{}.up_proj", ""),
    ("blocks.{}.mlp.experts.{}.down", "backbone.layers.{}.mixer.experts.{}.down_proj", ""),
    (
        "blocks.{}.mlp.shared.up",
        "backbone.layers.{}.mixer.shared_experts.up_proj",
        "blk.{}.ffn_up_shexp",
    ),
    (
        "blocks.{}.mlp.shared.down",
        "backbone.layers.{}.mixer.shared_experts.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Nemotron-H and Nemotron Nano",
    name: "nemotron_h",
    gguf: "nemotron_h",
    class: "NemotronHForCausalLM",
    unsaid: Unsaid::sizes([4096, 21_504, 0, 32, 8, 0, 4096, 131_072])
        .numbers(&[
            ("mamba_d_conv", 4),
            ("mamba_d_head", 64),
            ("mamba_d_state", 128),
            ("mamba_n_groups", 8),
            ("mamba_n_heads", 128),
            ("moe_intermediate_size", 7688),
            ("n_routed_experts", 8),
            ("num_experts_per_tok", 2),
        ])
        .eps(1e-5),
    names: &[NAMES, mamba::MIXERS, EXPERTS],
    signs: None,
    experts: true,
    open,
};

/// The same with mixtures, by its name in GGUF.
pub(crate) static MIXTURE: Architecture = Architecture {
    title: "Nemotron 3 Nano",
    name: "nemotron_h_moe",
    gguf: "nemotron_h_moe",
    class: "",
    unsaid: Unsaid::NOTHING,
    ..ARCHITECTURE
};

/// Keys about training, and about forms of computing that give the same.
const NOTED: &[&str] = &[
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rms_norm_eps",
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(&[
        ("mamba_n_heads", "mamba_num_heads"),
        ("mamba_d_head", "mamba_head_dim"),
        ("mamba_n_groups", "n_groups"),
        ("mamba_d_state", "ssm_state_size"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_expand", "expand"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_proj_bias", "use_bias"),
    ]);
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    for key in ["mamba_proj_bias", "attention.layer_norm_epsilon"] {
        keys.note(key);
    }
    // GGUF has it by either name.
    let stated = keys.number(Key("", "attention.layer_norm_rms_epsilon"))?.is_some();
    let eps = match keys.dialect() {
        Dialect::Gguf if !stated => Key("", "attention.layer_norm_epsilon"),
        _ => Key("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    };
    let mut raw = Raw::read_normed(files, eps)?;
    glm4_moe::guesses(files, &mut raw)?;
    raw.rotation = None;
    keys.only(Key("mamba_hidden_act", ""), &["silu"])?;
    let functions = gpt2::activation(files, "mlp_hidden_act", SQUARED)?;
    let kinds = kinds::read(files, &raw.layers)?;
    let some = |kind: Kind| kinds.contains(&kind);
    // llama.cpp asks for it by this name.
    let also = Key("", "attention.layer_norm_epsilon");
    keys.state(also, Some(MetadataValue::F32(raw.norm_eps.value as f32)));
    let options = mamba::read(files, &raw.hidden, raw.norm_eps.value as f32)?;
    let (bias, mlp_bias) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    if some(Kind::Experts) {
        raw.architecture = &MIXTURE;
    }
    let config = raw.check()?;
    let mixture = some(Kind::Experts).then(|| mixture(files, config.hidden)).transpose()?;
    if mixture.is_none() {
        unused(files);
    }
    let count = mixture.map_or(0, |(options, _)| options.experts);
    let mixer: decoder::Mixer = Box::new(move |builder, config, i| {
        let name = format!("blocks.{i}.mlp");
        Ok(match kinds[i] {
            Kind::Attention => None,
            Kind::Mamba => {
                let mamba = Mamba::new(builder, &format!("blocks.{i}.mamba"), &options)?;
                Some(Box::new(move |x: &Tensor| mamba.forward(x)))
            }
            Kind::FeedForward => Some(decoder::ungated(builder, config, i, functions, mlp_bias)?),
            Kind::Experts => mixture
                .map(|(options, shared)| {
                    experts_and_one(builder, &name, &options, shared, mlp_bias)
                })
                .transpose()?,
        })
    });
    let parts = decoder::Parts {
        mixer,
        order: Order::Alone,
        ..decoder::Parts::new(mlp_bias, decoder::biased(bias))
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        if let Some(made) = mamba::part(weights, name, &options)? {
            return Ok(Some(made));
        }
        // The square of what is positive is that times the same: a gate of the one matrix.
        experts::joined(weights, &name.replace(".experts.gate", ".experts.up"), count)
    }))
}

/// A mixture, and the feed-forward of the width `shared` beside it.
fn experts_and_one(
    builder: &Builder<'_>,
    name: &str,
    options: &ExpertsOptions,
    shared: usize,
    bias: Bias,
) -> Result<Layer> {
    let (experts, hidden) = (MixtureOfExperts::new(builder, name, options)?, options.hidden);
    let linear =
        |part: &str, shape| Projection::new(builder, &format!("{name}.shared.{part}"), shape, bias);
    let (up, down) = (linear("up", [shared, hidden])?, linear("down", [hidden, shared])?);
    Ok(Box::new(move |x| {
        let y = SQUARED.iter().fold(up.forward(x), |y, f| y.map(*f));
        experts.forward(x).add(&down.forward(&y))
    }))
}

/// The mixtures, and the width of the feed-forward beside each.
fn mixture(files: &Files<'_>, hidden: usize) -> Result<(ExpertsOptions, usize)> {
    let keys = &files.keys;
    let latent = keys.size(Key("moe_latent_size", "moe_latent_size"))?;
    if let Some(latent) = latent.filter(|latent| latent.value > 0) {
        let expected = "none: experts in a narrower space are not supported";
        return Err(latent.wrong(expected, latent.value).of(ErrorKind::Unsupported));
    }
    keys.only(Key("mlp_hidden_act", ""), &["relu2"])?;
    let mut options = experts::read(files, hidden, 0)?;
    options = glm4_moe::limited(files, options, true, 1.0)?;
    options.gate = Gate::Plain(Unary::Relu);
    let one = Key("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    let one = keys.needed(one)?.within(1..=1 << 20)?;
    let shared = keys.size(Key("n_shared_experts", "expert_shared_count"))?;
    if let Some(shared) = shared.filter(|shared| shared.value != 1) {
        return Err(shared.wrong("1, as of this architecture", shared.value));
    }
    Ok((options, one))
}

/// Notes the keys of mixtures, of which there are none.
fn unused(files: &Files<'_>) {
    for key in [
        "moe_intermediate_size",
        "moe_latent_size",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "topk_group",
    ] {
        files.keys.note(key);
    }
}
