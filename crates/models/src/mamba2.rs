//! Mamba-2 (Dao & Gu 2024): every layer is a state space behind a norm, with neither attention nor a
//! feed-forward; Mamba Codestral is one. Mamba-1 is another recurrence.

use crate::config::{self, Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::{Architecture, Opened, mamba};
use formats::{ErrorKind, Result};
use nn::{Bias, Weights};

const NAMES: &[Row] = &[
    ("embed", "backbone.embeddings", "token_embd"),
    ("norm", "backbone.norm_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "backbone.layers.{}.norm", "blk.{}.attn_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mamba-2",
    name: "mamba2",
    gguf: "mamba2",
    class: "Mamba2ForCausalLM",
    names: &[NAMES, mamba::MIXERS],
    signs: None,
    experts: false,
    open,
};

/// Keys about training, about forms of computing that give the same, and of Mamba-1. The order of
/// gate and norm is Transformers' own whatever `norm_before_gate` says.
const NOTED: &[&str] = &[
    "intermediate_size",
    "norm_before_gate",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_init_scheme",
    "time_step_rank",
    "time_step_scale",
];

/// In GGUF, and not used.
const ZEROS: &[&str] = &["attention.head_count", "attention.head_count_kv", "feed_forward_length"];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files
        .with_names(&[
            ("mamba_n_heads", "num_heads"),
            ("mamba_d_head", "head_dim"),
            ("mamba_n_groups", "n_groups"),
            ("mamba_d_state", "state_size"),
            ("mamba_d_conv", "conv_kernel"),
            ("mamba_expand", "expand"),
            ("mamba_conv_bias", "use_conv_bias"),
            ("mamba_proj_bias", "use_bias"),
        ])
        .with_usual(&[("mamba_n_groups", 8)]);
    let keys = &files.keys;
    NOTED.iter().chain(ZEROS).for_each(|key| keys.note(key));
    keys.only(Key("hidden_act", ""), &["silu"])?;
    if keys.flag("rms_norm")? == Some(false) {
        let error = keys.wrong("rms_norm", "true: a norm behind each gate", false);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let eps = Key("layer_norm_epsilon", "attention.layer_norm_rms_epsilon");
    let raw = Raw::read_alone(files, eps, 1e-5)?;
    let layers = raw.layers.within(1..=config::LAYERS)?;
    let options = mamba::read(files, &raw.hidden, raw.norm_eps.value as f32)?;
    let config = Config { heads: 0, kv_heads: 0, head_dim: 0, feed_forward: 0, ..raw.check()? };
    let parts = decoder::Parts {
        mixer: mamba::mixer(options, vec![true; layers].into()),
        order: Order::Alone,
        ..decoder::Parts::new(Bias::Never, decoder::biased(Bias::Never))
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        mamba::part(weights, name, &options)
    }))
}
