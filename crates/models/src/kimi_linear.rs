//! Kimi Linear (Kimi Team 2025) and Ling 3 (inclusionAI 2026): most blocks have a delta net whose
//! elements of keys each forget at a rate of their own; the others latent attention, which Kimi Linear
//! does not rotate and Ling gates head by head. Both have DeepSeek-V3's mixture.

use crate::config::{GATE, LAYERS};
use crate::decoder::{Layer, Mixer};
use crate::files::Files;
use crate::keys::{Dialect, Key, Keys};
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, deepseek, experts, glm4_moe, hybrid, latent, lfm3, llama, nets};
use formats::Result;
use nn::{DeltaNetOptions, Forgetting, GatedDeltaNet, LatentAttention, Unary};
use std::sync::Arc;

mod gguf;
mod names;

pub(crate) use gguf::metadata;

use names::{KIMI, LING, NETS};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Kimi Linear",
    name: "kimi_linear",
    gguf: latent::KIMI,
    class: "KimiLinearForCausalLM",
    unsaid: Unsaid::sizes([2304, 9216, 27, 32, 32, 0, 1 << 20, 163_840])
        .eps(1e-5)
        .numbers(latent::NUMBERS)
        .numbers(NUMBERS),
    names: &[
        NETS,
        KIMI,
        latent::NAMES,
        glm4_moe::NAMES,
        llama::NAMES,
        experts::SPARSE_BLOCK,
        experts::STACKS,
    ],
    signs: None,
    experts: true,
    open: open_kimi,
};

/// Ling 3.
pub(crate) const LING3: Architecture = Architecture {
    title: "Ling 3",
    name: "bailing_hybrid",
    gguf: "",
    class: "BailingHybridForCausalLM",
    unsaid: Unsaid::sizes([2560, 6144, 42, 32, 32, 0, 262_144, 157_184])
        .theta(6_000_000.0)
        .numbers(latent::NUMBERS)
        .numbers(LING_NUMBERS),
    names: &[
        LING,
        NETS,
        latent::NAMES,
        glm4_moe::NAMES,
        llama::NAMES,
        experts::NAMES,
        experts::STACKS,
    ],
    open: open_ling,
    ..ARCHITECTURE
};

const OWN: &[(&str, &str)] = &[
    ("max_position_embeddings", "model_max_length"),
    ("n_group", "num_expert_group"),
    ("n_shared_experts", "num_shared_experts"),
    ("norm_topk_prob", "moe_renormalize"),
    ("num_experts_per_tok", "num_experts_per_token"),
];

/// Numbers that configurations of Kimi Linear may leave out.
const NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("moe_intermediate_size", 1024),
    ("num_experts", 256),
    ("num_experts_per_tok", 8),
];

/// Numbers that configurations of Ling 3 may leave out.
const LING_NUMBERS: Numbers = &[
    ("first_k_dense_replace", 2),
    ("head_dim", 128),
    ("layer_group_size", 6),
    ("moe_intermediate_size", 768),
    ("n_group", 8),
    ("num_experts", 512),
    ("num_experts_per_tok", 8),
    ("topk_group", 4),
];

/// Keys of published configurations that say the same of all of these models.
const NOTED: &[&str] =
    &["mla_use_nope", "moe_layer_freq", "mtp_loss_scaling_factor", "use_grouped_topk"];

/// The differences between both families.
struct Family {
    /// Whether each layer is a net.
    nets: Arc<[bool]>,
    /// Heads, elements of each, and rows that convolutions mix.
    sizes: [usize; 3],
    forgetting: Forgetting,
    /// Whether latent attention turns, and has gates.
    turned: bool,
    gated: bool,
    /// The factor on experts' odds.
    scale: f64,
}

fn open_kimi(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    keys.only(Key("moe_router_activation_func", ""), &["sigmoid"])?;
    let layers = keys.needed(Key("num_hidden_layers", "block_count"))?;
    let count = layers.within(1..=LAYERS)?;
    if keys.dialect() == Dialect::Gguf {
        return opened(files, gguf::family(files, count)?);
    }
    let own = keys.object("linear_attn_config")?;
    let nets = match (hybrid::listed_nets(files, &layers)?, &own) {
        (Some(listed), own) => {
            own.iter().for_each(Keys::note_all);
            listed
        }
        (None, Some(own)) if own.get(Key("full_attn_layers", "")).is_some() => {
            own.note("kda_layers");
            full(own, count)?
        }
        _ => (0..count).map(|i| i == 0 || !i.is_multiple_of(4)).collect(),
    };
    let size = |inner: &'static str, outer: &'static str, usual: usize| -> Result<usize> {
        let inner = own.as_ref().map(|own| own.size(Key(inner, ""))).transpose()?.flatten();
        let outer = keys.size(Key(outer, ""))?;
        inner.or(outer).map_or(Ok(usual), |size| size.within(1..=1 << 12))
    };
    let sizes = [
        size("num_heads", "linear_num_heads", 32)?,
        size("head_dim", "linear_head_dim", 128)?,
        size("short_conv_kernel_size", "linear_conv_kernel_dim", 4)?,
    ];
    let forgetting = Forgetting::Elements { rank: Some(sizes[1]), bound: None };
    opened(files, Family { nets, sizes, forgetting, turned: false, gated: false, scale: 2.446 })
}

/// All layers but the listed ones, which count from 1.
fn full(own: &Keys<'_>, count: usize) -> Result<Arc<[bool]>> {
    const FULL: Key = Key("full_attn_layers", "");
    let mut nets = vec![true; count];
    let list = own.get(FULL).and_then(serde_json::Value::as_array);
    for layer in list.into_iter().flatten() {
        let at = layer.as_u64().and_then(|at| usize::try_from(at).ok()?.checked_sub(1));
        match at.filter(|at| *at < count) {
            Some(at) => nets[at] = false,
            None => return Err(own.odd(FULL, &format!("layers from 1 to {count}"), layer)),
        }
    }
    Ok(nets.into())
}

fn open_ling(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let layers = keys.needed(Key("num_hidden_layers", ""))?;
    let count = layers.within(1..=LAYERS)?;
    let period = keys.needed(Key("layer_group_size", ""))?.within(1..=LAYERS)?;
    let nets = hybrid::listed_nets(files, &layers)?;
    let nets =
        nets.unwrap_or_else(|| (1..=count).map(|layer| !layer.is_multiple_of(period)).collect());
    // Transformers writes them beside the head's size, which stands for another there.
    let head_dim = keys.size(Key("linear_head_dim", ""))?;
    let head_dim = head_dim.map_or_else(|| keys.needed(Key("head_dim", "")), Ok)?;
    ["linear_num_heads", "linear_conv_kernel_dim"].into_iter().for_each(|key| keys.note(key));
    let heads = keys.needed(Key("num_attention_heads", ""))?.within(1..=1 << 12)?;
    let kernel = keys.size(Key("short_conv_kernel_size", ""))?;
    let kernel = kernel.map_or(Ok(4), |kernel| kernel.within(2..=1 << 8))?;
    let sizes = [heads, head_dim.within(1..=1 << 12)?, kernel];
    let bound = keys.number_or(Key("kda_lower_bound", ""), -5.0)?;
    if bound.value >= 0.0 || bound.value < -1e3 {
        return Err(bound.wrong("a logarithm below 0", bound.value));
    }
    let bounded = keys.flag(Key("kda_safe_gate", ""))?.unwrap_or(true);
    let bound = bounded.then_some(bound.value as f32);
    let forgetting = Forgetting::Elements { rank: None, bound };
    opened(files, Family { nets, sizes, forgetting, turned: true, gated: true, scale: 2.5 })
}

fn opened(files: &Files<'_>, family: Family) -> Result<Opened> {
    let Family { nets, sizes: [heads, head_dim, kernel], forgetting, .. } = family;
    NOTED.iter().for_each(|key| files.keys.note(key));
    // The convolutions' too.
    files.keys.only(GATE, &["silu"])?;
    let mut raw = latent::raw(files)?;
    raw.pairing = latent::pairing(files)?;
    glm4_moe::guesses(files, &mut raw)?;
    raw.rotation = raw.rotation.filter(|_| family.turned);
    let (config, mut options) = latent::read(files, raw)?;
    options.gated = family.gated;
    let net = DeltaNetOptions {
        hidden: config.hidden,
        heads,
        key_heads: heads,
        key_dim: head_dim,
        value_dim: head_dim,
        kernel,
        norm_eps: config.norm_eps,
        tiled: false,
        doubled: false,
        forgetting,
        gate: Unary::Sigmoid,
    };
    let (of, gate) = (latent::Heads::of(&options), [options.heads, options.value]);
    let mixer: Mixer = Box::new(move |builder, _, i| {
        let layer: Layer = if nets[i] {
            let net = GatedDeltaNet::new(builder, &format!("blocks.{i}.delta"), &net)?;
            Box::new(move |x| net.forward(x))
        } else {
            let name = format!("blocks.{i}.attention");
            let attention = LatentAttention::new(builder, &name, &options)?;
            Box::new(move |x| attention.forward(x))
        };
        Ok(Some(layer))
    });
    deepseek::opened(files, config, mixer, family.scale, move |weights, name| {
        if name.contains(".delta.") {
            return nets::part(weights, name, &net);
        }
        if name.ends_with(".attention.gate") {
            let [heads, each] = gate;
            let found = weights.find(name)?;
            return Ok(found.map(|stored| lfm3::per_head(stored, heads, each)));
        }
        latent::part(weights, name, of)
    })
}
