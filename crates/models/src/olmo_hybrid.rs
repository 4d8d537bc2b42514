//! OLMo Hybrid (OLMo Team 2026): gated delta nets whose corrections reach beyond what they correct in
//! three blocks of four, normed in front; OLMo 3's attention in the others, normed behind. Published
//! models rotate nothing.

use crate::config::{Config, LIMIT, Raw};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, hybrid, llama, nets, olmo2};
use formats::Result;
use nn::{AttentionOptions, Bias, DeltaNetOptions, Forgetting, QkNorm, Unary, Weights};

const NAMES: &[Row] = &[
    ("blocks.{}.attention_norm", "model.layers.{}.attention_layer_norm", ""),
    ("blocks.{}.mlp_norm", "model.layers.{}.feedforward_layer_norm", ""),
    ("blocks.{}.after_attention_norm", "model.layers.{}.post_attention_layernorm", ""),
    // As Transformers writes it, which renames one for all layers.
    ("blocks.{}.after_attention_norm", "model.layers.{}.feedforward_layer_norm", ""),
    ("blocks.{}.delta.q", "model.layers.{}.linear_attn.q_proj", ""),
    ("blocks.{}.delta.k", "model.layers.{}.linear_attn.k_proj", ""),
    ("blocks.{}.delta.v", "model.layers.{}.linear_attn.v_proj", ""),
    ("blocks.{}.delta.q_conv", "model.layers.{}.linear_attn.q_conv1d", ""),
    ("blocks.{}.delta.k_conv", "model.layers.{}.linear_attn.k_conv1d", ""),
    ("blocks.{}.delta.v_conv", "model.layers.{}.linear_attn.v_conv1d", ""),
    ("blocks.{}.delta.z", "model.layers.{}.linear_attn.g_proj", ""),
    ("blocks.{}.delta.a", "model.layers.{}.linear_attn.a_proj", ""),
    ("blocks.{}.delta.b", "model.layers.{}.linear_attn.b_proj", ""),
    ("blocks.{}.delta.norm", "model.layers.{}.linear_attn.o_norm", ""),
    ("blocks.{}.delta.o", "model.layers.{}.linear_attn.o_proj", ""),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "OLMo Hybrid",
    name: "olmo_hybrid",
    gguf: "",
    class: "OlmoHybridForCausalLM",
    unsaid: Unsaid::sizes([3840, 11_008, 32, 30, 0, 0, 65_536, 100_352]),
    names: &[NAMES, hybrid::NAMES, olmo2::NORMS, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// How weights are drawn for training.
const NOTED: &[&str] = &[
    "linear_a_log_min",
    "linear_a_log_max",
    "linear_dt_min",
    "linear_dt_max",
    "linear_dt_init_floor",
];

/// Added in the norms of what nets give, whatever the other norms add.
const NET_EPS: f32 = 1e-5;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = Raw::read_silu(files)?;
    NOTED.iter().for_each(|key| keys.note(key));
    let mut kinds = hybrid::nets(files, &raw.layers)?.to_vec();
    if keys.get(Key("layer_types", "")).is_none() && kinds.iter().all(|net| *net) {
        *kinds.last_mut().ok_or_else(|| raw.layers.wrong("a layer", "none"))? = false;
    }
    // A base of null: no rotation.
    let mut turned = !keys.is_null("rope_theta");
    for key in ["rope_parameters", "rope_scaling"] {
        turned &= !keys.object(key)?.is_some_and(|rope| rope.is_null("rope_theta"));
    }
    raw.rotation = raw.rotation.filter(|_| turned);
    let net = net(files, &raw)?;
    let bias = files.bias("attention_bias")?;
    let config = raw.check()?;
    let attention = move |config: &Config, layer| AttentionOptions {
        qkv_bias: bias,
        output_bias: bias,
        qk_norm: QkNorm::Rows(config.norm_eps),
        ..config.attention(layer)
    };
    let parts = decoder::Parts {
        mixer: hybrid::mixer(net, kinds.clone().into()),
        normed: Box::new(move |i| (kinds[i], !kinds[i])),
        ..decoder::Parts::new(Bias::Never, attention)
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name| {
        nets::part(weights, name, &net)
    }))
}

/// The sizes of the nets.
fn net(files: &Files<'_>, raw: &Raw) -> Result<DeltaNetOptions> {
    let keys = &files.keys;
    let hidden = raw.hidden.within(1..=LIMIT)?;
    let size = |key: &'static str, usual: usize, most: usize| {
        keys.size(Key(key, ""))?.map_or(Ok(usual), |size| size.within(1..=most))
    };
    let heads = raw.heads.within(1..=1 << 12)?;
    let key_heads = size("linear_num_key_heads", heads, 1 << 12)?;
    let heads = size("linear_num_value_heads", heads, 1 << 12)?;
    if heads != key_heads {
        let expected = format!("{heads}, as many as of values");
        return Err(keys.wrong("linear_num_key_heads", expected, key_heads));
    }
    let key_dim = size("linear_key_head_dim", hidden * 3 / 4 / key_heads, 1 << 12)?;
    Ok(DeltaNetOptions {
        hidden,
        heads,
        key_heads,
        key_dim,
        value_dim: size("linear_value_head_dim", 2 * key_dim, 1 << 13)?,
        kernel: keys
            .size(Key("linear_conv_kernel_dim", ""))?
            .map_or(Ok(4), |kernel| kernel.within(2..=1 << 8))?,
        norm_eps: NET_EPS,
        tiled: false,
        doubled: keys.flag(Key("linear_allow_neg_eigval", ""))?.unwrap_or(true),
        forgetting: Forgetting::Heads,
        gate: Unary::Silu,
    })
}
