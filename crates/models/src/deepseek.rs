//! DeepSeek-V2 and V3 (DeepSeek-AI 2024), and what has their form: latent attention, and behind the
//! first dense blocks a mixture beside an expert that every token goes through.

use crate::config::{Config, LAYERS};
use crate::decoder::Mixer;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::{Numbers, Unsaid, said};
use crate::{
    Architecture, Opened, decoder, deepseek_moe, experts, glm4_moe, latent, llama, ministral3,
};
use formats::gguf::MetadataValue;
use formats::{Result, Source};
use nn::{
    Bias, ExpertsOptions, GroupLimit, LatentOptions, MixtureOfExperts, Mlp, Odds, Stored, Tensor,
    Weights,
};
use ops::group_limit::MOST_GROUPS;

pub(crate) const V2: Architecture = Architecture {
    title: "DeepSeek-V2",
    name: "deepseek_v2",
    gguf: latent::GGUF,
    class: "DeepseekV2ForCausalLM",
    unsaid: Unsaid::sizes([4096, 11_008, 32, 32, 0, 0, 2048, 102_400])
        .numbers(latent::NUMBERS)
        .numbers(&[
            ("moe_intermediate_size", 1407),
            ("n_routed_experts", 64),
            ("n_shared_experts", 2),
        ]),
    names: &[latent::NAMES, glm4_moe::NAMES, llama::NAMES, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

pub(crate) const V3: Architecture = Architecture {
    title: "DeepSeek-V3 and R1, Moonlight, Kimi K2",
    name: "deepseek_v3",
    class: "DeepseekV3ForCausalLM",
    unsaid: Unsaid::sizes([7168, 18_432, 61, 128, 128, 0, 4096, 129_280])
        .numbers(latent::NUMBERS)
        .numbers(&[
            ("first_k_dense_replace", 3),
            ("moe_intermediate_size", 2048),
            ("n_group", 8),
            ("n_routed_experts", 256),
            ("num_experts_per_tok", 8),
            ("topk_group", 4),
        ]),
    ..V2
};

pub(crate) const GLM: Architecture = Architecture {
    title: "GLM-4.7-Flash",
    name: "glm4_moe_lite",
    class: "Glm4MoeLiteForCausalLM",
    unsaid: Unsaid::sizes([2048, 10_240, 47, 20, 20, 0, 202_752, 154_880]).eps(1e-5).numbers(&[
        ("first_k_dense_replace", 1),
        ("kv_lora_rank", 512),
        ("moe_intermediate_size", 1536),
        ("n_routed_experts", 64),
        ("num_experts_per_tok", 4),
        ("qk_nope_head_dim", 192),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 256),
    ]),
    ..V2
};

pub(crate) const YOUTU: Architecture = Architecture {
    title: "Youtu-LLM",
    name: "youtu",
    class: "YoutuForCausalLM",
    unsaid: Unsaid::sizes([2048, 6144, 32, 16, 16, 0, 131_072, 128_256]).numbers(latent::NUMBERS),
    ..V2
};

pub(crate) const SARVAM: Architecture = Architecture {
    title: "Sarvam 105B",
    name: "sarvam_mla",
    class: "SarvamMLAForCausalLM",
    unsaid: Unsaid::sizes([4096, 16_384, 32, 64, 0, 0, 4096, 262_144])
        .numbers(latent::NUMBERS)
        .numbers(&[
            ("first_k_dense_replace", 1),
            ("moe_intermediate_size", 2048),
            ("n_routed_experts", 128),
            ("num_experts_per_tok", 8),
        ]),
    open: |files| {
        files.keys.note("q_head_dim");
        files.keys.note("num_mtp_layers");
        let files = &files.with_names(&[("n_shared_experts", "num_shared_experts")]);
        open(files)
    },
    ..V2
};

/// DeepSeek-V3's form with a norm behind experts.
pub(crate) const AXK1: Architecture = Architecture {
    title: "A.X K1",
    name: "axk1",
    gguf: "",
    class: "AXK1ForCausalLM",
    unsaid: Unsaid::sizes([7168, 18_432, 61, 64, 64, 0, 32_768, 163_840])
        .numbers(latent::NUMBERS)
        .numbers(AXK1_NUMBERS),
    names: &[
        AFTER,
        latent::NAMES,
        glm4_moe::NAMES,
        llama::NAMES,
        experts::NAMES,
        experts::SWITCHED,
    ],
    ..V2
};

/// Numbers that configurations of A.X K1 may leave out.
const AXK1_NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("moe_intermediate_size", 2048),
    ("n_group", 8),
    ("n_routed_experts", 192),
    ("num_attention_heads", 64),
    ("num_experts_per_tok", 8),
    ("q_lora_rank", 1536),
    ("topk_group", 4),
];

/// The norm behind experts, in published folders and as Transformers names it.
const AFTER: &[Row] = &[
    ("blocks.{}.after_moe_norm", "model.layers.{}.post_mlp_layernorm", ""),
    ("blocks.{}.after_moe_norm", "model.layers.{}.mlp.post_mlp_layernorm", ""),
];

/// DeepSeek-V2's odds, among all experts, and queries that grow with their positions.
pub(crate) const MISTRAL4: Architecture = Architecture {
    title: "Mistral Small 4",
    name: "mistral4",
    gguf: latent::MISTRAL4,
    class: "Mistral4ForCausalLM",
    unsaid: Unsaid::sizes([4096, 12_288, 36, 32, 32, 0, 1 << 20, 131_072])
        .rotated(said!({
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8192,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        }))
        .numbers(&[
            ("kv_lora_rank", 256),
            ("moe_intermediate_size", 2048),
            ("n_routed_experts", 128),
            ("num_experts_per_tok", 4),
            ("qk_nope_head_dim", 64),
            ("qk_rope_head_dim", 64),
            ("v_head_dim", 128),
        ]),
    names: &[latent::NAMES, glm4_moe::NAMES, llama::NAMES, experts::STACKS, experts::SWITCHED],
    ..V2
};

/// The factors on experts' odds that classes have where nothing is said.
const SCALES: &[(&str, f64)] = &[
    ("axk1", 2.5),
    ("deepseek_v3", 2.5),
    ("deepseek_v32", 2.5),
    ("glm4_moe_lite", 1.8),
    ("glm_moe_dsa", 2.5),
    ("sarvam_mla", 2.5),
];

/// GGUF's numbers of the softmax and of the logistic function, which give experts their odds.
const GATING: Key = Key("", "expert_gating_func");
const SOFTMAX: u32 = 1;

fn open(files: &Files<'_>) -> Result<Opened> {
    open_mixed(files, |_, options| Ok(latent::mixer(options)))
}

/// A model whose attention is the mixer that `mixer` makes of the options.
///
/// # Errors
/// As [`opened`], and what `mixer` refuses.
pub(crate) fn open_mixed(
    files: &Files<'_>,
    mixer: impl FnOnce(&Config, LatentOptions) -> Result<Mixer>,
) -> Result<Opened> {
    let keys = &files.keys;
    let mut raw = latent::raw(files)?;
    raw.pairing = latent::pairing(files)?;
    glm4_moe::guesses(files, &mut raw)?;
    // How weights are drawn for training.
    keys.note("embedding_initializer_range");
    let name = files.architecture.name;
    if name == MISTRAL4.name
        && let Some(rotation) = &mut raw.rotation
    {
        // It is said of the whole head.
        rotation.rotary = None;
    }
    let (config, mut options) = latent::read(files, raw)?;
    if name == MISTRAL4.name {
        options.stretch = ministral3::stretch(files)?;
        let step = options.stretch.map(|stretch| MetadataValue::U32(stretch.step));
        keys.state(Key("", "attention.temperature_length"), step);
    }
    let heads = latent::Heads::of(&options);
    let mixer = mixer(&config, options)?;
    let scale = SCALES.iter().find(|(of, _)| *of == name).map_or(1.0, |(_, scale)| *scale);
    opened(files, config, mixer, scale, move |weights, name| latent::part(weights, name, heads))
}

/// A model of this configuration whose blocks have `mixer` in the place of attention, dense or with a
/// mixture; odds are multiplied with `scale` where nothing is said, and `part` makes weights of those
/// that are stored.
///
/// # Errors
/// A key that is of another type or out of range.
pub(crate) fn opened(
    files: &Files<'_>,
    mut config: Config,
    mixer: Mixer,
    scale: f64,
    part: impl Fn(&dyn Weights, &str) -> Result<Option<Stored>> + 'static,
) -> Result<Opened> {
    let (name, layers) = (files.architecture.name, config.layers);
    let mlp_bias = files.bias("mlp_bias")?;
    let Some(mixture) = Mixture::read(files, &config, layers, scale)? else {
        let parts = decoder::Parts { mixer, ..decoder::Parts::new(mlp_bias, Config::attention) };
        return Ok(decoder::open_recipes(config, parts, move |_, weights, name| {
            part(weights, name)
        }));
    };
    let Mixture { options, dense, shared, uncorrected } = mixture;
    let normed = name == AXK1.name;
    if normed {
        // Checkpoints have it in dense blocks too, of no use.
        let dense = dense.iter().enumerate().filter(|(_, dense)| **dense);
        config.spare = dense.map(|(i, _)| format!("blocks.{i}.after_moe_norm")).collect();
    }
    let feed_forward: decoder::FeedForward = Box::new(move |builder, config, i| {
        if dense.get(i).copied().unwrap_or(false) {
            return decoder::gated(builder, config, i, mlp_bias);
        }
        let (name, hidden) = (format!("blocks.{i}.mlp"), options.hidden);
        let experts = MixtureOfExperts::new(builder, &name, &options)?;
        if shared == 0 {
            return Ok(Box::new(move |x| experts.forward(x)));
        }
        let (name, sizes) = (format!("{name}.shared"), [hidden, shared]);
        let one = Mlp::new(builder, &name, sizes, mlp_bias, config.gate)?;
        let both = move |x: &Tensor| experts.forward(x).add(&one.forward(x));
        if !normed {
            return Ok(Box::new(both));
        }
        let norm = decoder::rms_norm(builder, &format!("blocks.{i}.after_moe_norm"), config)?;
        Ok(Box::new(move |x| norm(&both(x))))
    });
    let parts = decoder::Parts {
        mixer,
        feed_forward,
        ..decoder::Parts::new(Bias::Never, Config::attention)
    };
    let count = options.experts;
    Ok(decoder::open_recipes(config, parts, move |_, weights, name| {
        if uncorrected && name.ends_with(".mlp.router.correction") {
            let (source, shape) = (Source::Zeros(vec![count]), vec![count]);
            return Ok(Some(Stored { source, shape }));
        }
        match part(weights, name)? {
            Some(part) => Ok(Some(part)),
            None => experts::stacked(weights, name, count),
        }
    }))
}

/// The mixtures of a model.
struct Mixture {
    options: ExpertsOptions,
    /// Which blocks have none.
    dense: Vec<bool>,
    /// Width of the expert that every token goes through; 0: there is none.
    shared: usize,
    /// Whether the limit of groups has no correction that is stored.
    uncorrected: bool,
}

impl Mixture {
    /// Reads what is said of experts; none if there are none.
    fn read(
        files: &Files<'_>,
        config: &Config,
        layers: usize,
        scale: f64,
    ) -> Result<Option<Mixture>> {
        let keys = &files.keys;
        let name = config.architecture.name;
        let hugging_face = keys.dialect() == Dialect::HuggingFace;
        let form = config.architecture.gguf;
        const DENSE: Key = Key("first_k_dense_replace", "leading_dense_block_count");
        const SHARED: Key = Key("n_shared_experts", "expert_shared_count");
        let none = match hugging_face {
            true => name == YOUTU.name,
            false => experts::count(keys)? == 0,
        };
        if none {
            // GGUF files of dense models state them all the same.
            for key in [DENSE, SHARED, Key("", "expert_feed_forward_length")] {
                if !hugging_face {
                    keys.size(key)?;
                }
            }
            keys.state(DENSE, Some(MetadataValue::U32(layers as u32)));
            keys.state(SHARED, Some(MetadataValue::U32(0)));
            let width = MetadataValue::U32(config.feed_forward as u32);
            keys.state(Key("", "expert_feed_forward_length"), Some(width));
            return Ok(None);
        }
        let listed = listed(files, layers)?;
        let first = counted(files, DENSE, listed.is_some())?;
        let first = first.map_or(Ok(0), |dense| dense.within(0..=LAYERS))?;
        let dense = match listed {
            Some(listed) => listed,
            None => (0..layers).map(|i| i < first).collect(),
        };
        let leading = dense.iter().take_while(|dense| **dense).count();
        keys.state(DENSE, Some(MetadataValue::U32(leading as u32)));
        let options = experts::read(files, config.hidden, config.feed_forward)?;
        let shared = keys.size(SHARED)?.map_or(Ok(1), |shared| shared.within(0..=64))?;
        keys.state(SHARED, Some(MetadataValue::U32(shared as u32)));
        let shared = options.feed_forward * shared;
        let gating = keys.size(GATING)?.map(|gating| gating.value as u32);
        let stored = (0..layers)
            .filter(|i| !dense[*i])
            .map(|i| files.names.find(&format!("blocks.{i}.mlp.router.correction")));
        let corrected = stored.take(1).collect::<Result<Vec<_>>>()?.iter().any(Option::is_some);
        let softmax = match hugging_face {
            true => [V2.name, MISTRAL4.name, deepseek_moe::NAME].contains(&name),
            false => gating.map_or(!corrected, |gating| gating == SOFTMAX),
        };
        let (options, uncorrected) = match softmax {
            true => (Self::by_softmax(files, options)?, true),
            false => {
                keys.only(Key("scoring_func", ""), &["sigmoid", "noaux_tc"])?;
                keys.only(Key("topk_method", ""), &["noaux_tc"])?;
                let mut options = glm4_moe::limited(files, options, true, scale)?;
                // GGUF does not say it of Kimi Linear.
                options.routing.normalised |= !hugging_face && form == latent::KIMI;
                let normalised = MetadataValue::Bool(options.routing.normalised);
                keys.state(Key("norm_topk_prob", "expert_weights_norm"), Some(normalised));
                (options, !corrected && (!hugging_face || name == AXK1.name))
            }
        };
        Ok(Some(Mixture { options, dense, shared, uncorrected }))
    }

    /// DeepSeek-V2's: odds are the softmax over all scores, and experts may be limited to the
    /// groups with the greatest.
    fn by_softmax(files: &Files<'_>, mut options: ExpertsOptions) -> Result<ExpertsOptions> {
        let keys = &files.keys;
        keys.only(Key("scoring_func", ""), &["softmax"])?;
        keys.state(GATING, Some(MetadataValue::U32(SOFTMAX)));
        let scale = keys.number_or(Key("routed_scaling_factor", "expert_weights_scale"), 1.0)?;
        options.routing.scale = scale.positive()? as f32;
        let hugging_face = keys.dialect() == Dialect::HuggingFace;
        let name = files.architecture.name;
        if [MISTRAL4.name, deepseek_moe::NAME].contains(&name) {
            let normalised = keys.flag(Key("norm_topk_prob", "expert_weights_norm"))?;
            let unsaid = name == MISTRAL4.name && !keys.is_null("norm_topk_prob"); // A null is no.
            options.routing.normalised = normalised.unwrap_or(unsaid);
            if let Some(stay) = keys.size(Key("topk_group", ""))? {
                stay.within(1..=MOST_GROUPS)?;
            }
            if let Some(groups) = keys.size(Key("n_group", ""))?.filter(|n| n.value > 1) {
                return Err(groups.wrong("1: this architecture has no groups", groups.value));
            }
        } else if hugging_face {
            // Its own code never normalises where a factor is stated; Transformers never does.
            options.routing.normalised = false;
        }
        keys.only(Key("topk_method", ""), &["greedy", "group_limited_greedy"])?;
        let limited = match hugging_face {
            true => keys.text(Key("topk_method", ""))? == Some("group_limited_greedy"),
            false => true,
        };
        let (groups, used) = (
            keys.size(Key(if limited { "n_group" } else { "" }, "expert_group_count"))?,
            keys.size(Key(if limited { "topk_group" } else { "" }, "expert_group_used_count"))?,
        );
        if !limited {
            for (key, gguf) in
                [("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")]
            {
                // One group is none.
                keys.note(key);
                keys.state(Key("", gguf), hugging_face.then_some(MetadataValue::U32(1)));
            }
        }
        let Some(groups) = groups.filter(|groups| groups.value > 1) else { return Ok(options) };
        let count = groups.within(2..=MOST_GROUPS)?;
        if !options.experts.is_multiple_of(count) {
            let expected = format!("groups that divide {} experts", options.experts);
            return Err(groups.wrong(expected, count));
        }
        let least = options.routing.used.div_ceil(options.experts / count);
        let stay = used.map_or(Ok(count), |used| used.within(least..=count))?;
        options.routing.odds = Odds::Sigmoid;
        let used = options.routing.used;
        options.limit = Some(GroupLimit { used, groups: count, groups_used: stay, softmax: true });
        Ok(options)
    }
}

/// How many blocks at the beginning have no experts, unless they are `listed`.
///
/// # Errors
/// Something else than a whole number.
pub(crate) fn counted(files: &Files<'_>, key: Key, listed: bool) -> Result<Option<Stated<usize>>> {
    if listed {
        files.keys.get(key);
        return Ok(None);
    }
    files.keys.size(key)
}

/// Which blocks have no experts, where `config.json` lists them.
///
/// # Errors
/// A list of another length, or of other kinds.
pub(crate) fn listed(files: &Files<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    const KEY: Key = Key("mlp_layer_types", "");
    let Some(list) = files.keys.get(KEY) else { return Ok(None) };
    let kind = |kind: &serde_json::Value| match kind.as_str() {
        Some("dense") => Some(true),
        Some("sparse") => Some(false),
        _ => None,
    };
    let dense = list.as_array().and_then(|list| list.iter().map(kind).collect::<Option<Vec<_>>>());
    match dense.filter(|dense| dense.len() == layers) {
        Some(dense) => Ok(Some(dense)),
        None => Err(files.keys.odd(KEY, &format!("dense or sparse for {layers} layers"), list)),
    }
}
