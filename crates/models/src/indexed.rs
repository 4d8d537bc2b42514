//! DeepSeek-V3.2 (DeepSeek-AI 2025) and GLM-5 (Z.ai 2026): DeepSeek-V3's form, whose attention sees
//! the positions that an indexer scores best, so many for each query. As long as there are no more
//! than these, a query sees all: a model that is loaded for such a context has no indexer.

use crate::decoder::Mixer;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, deepseek, experts, glm4_moe, latent, llama};
use formats::Result;
use formats::gguf::{MetadataArray, MetadataValue};
use nn::{IndexerOptions, LatentAttention, LatentOptions, LightningIndexer, Pairing, Rope, Tensor};
use ops::indexer::MOST_POSITIONS;
use std::cell::RefCell;
use std::rc::Rc;

/// Weights of indexers.
const NAMES: &[Row] = &[
    (
        "blocks.{}.attention.indexer.q",
        "model.layers.{}.self_attn.indexer.wq_b",
        "blk.{}.indexer.attn_q_b",
    ),
    (
        "blocks.{}.attention.indexer.k",
        "model.layers.{}.self_attn.indexer.wk",
        "blk.{}.indexer.attn_k",
    ),
    (
        "blocks.{}.attention.indexer.k_norm",
        "model.layers.{}.self_attn.indexer.k_norm",
        "blk.{}.indexer.k_norm",
    ),
    (
        "blocks.{}.attention.indexer.heads",
        "model.layers.{}.self_attn.indexer.weights_proj",
        "blk.{}.indexer.proj",
    ),
];

pub(crate) const DEEPSEEK: Architecture = Architecture {
    title: "DeepSeek-V3.2",
    name: "deepseek_v32",
    gguf: latent::DEEPSEEK32,
    class: "DeepseekV32ForCausalLM",
    unsaid: Unsaid::sizes([7168, 18_432, 61, 128, 128, 0, 163_840, 129_280])
        .numbers(latent::NUMBERS)
        .numbers(&[
            ("first_k_dense_replace", 3),
            ("index_head_dim", 128),
            ("index_n_heads", 64),
            ("index_topk", 2048),
            ("moe_intermediate_size", 2048),
            ("n_group", 8),
            ("n_routed_experts", 256),
            ("num_experts_per_tok", 8),
            ("q_lora_rank", 1536),
            ("topk_group", 4),
        ]),
    names: &[
        NAMES,
        latent::NAMES,
        glm4_moe::NAMES,
        llama::NAMES,
        experts::NAMES,
        experts::SWITCHED,
    ],
    open,
    ..deepseek::V3
};

pub(crate) const GLM: Architecture = Architecture {
    title: "GLM-5",
    name: "glm_moe_dsa",
    gguf: latent::GLM_DSA,
    class: "GlmMoeDsaForCausalLM",
    unsaid: Unsaid::sizes([6144, 12_288, 78, 64, 64, 0, 202_752, 154_880]).eps(1e-5).numbers(&[
        ("first_k_dense_replace", 3),
        ("index_head_dim", 128),
        ("index_n_heads", 32),
        ("index_topk", 2048),
        ("kv_lora_rank", 512),
        ("moe_intermediate_size", 2048),
        ("n_routed_experts", 256),
        ("num_experts_per_tok", 8),
        ("q_lora_rank", 2048),
        ("qk_nope_head_dim", 192),
        ("qk_rope_head_dim", 64),
        ("v_head_dim", 256),
    ]),
    ..DEEPSEEK
};

/// Which layers have an indexer, and which take the choice of the layer before them.
const TYPES: Key = Key("indexer_types", "attention.indexer.types");
/// The same as a text or list of kinds, and as a period and where it begins.
const PATTERN: Key = Key("index_topk_pattern", "");
const PERIOD: Key = Key("index_topk_freq", "");
const OFFSET: Key = Key("index_skip_topk_offset", "");
/// The kinds of layers, which follow.
const NOTED: &[&str] = &["layer_types"];

/// Added in the norm of an indexer's keys, whatever the other norms add.
const NORM_EPS: f32 = 1e-6;
/// Most heads of an indexer, and elements of a head.
const LIMIT: usize = 1 << 12;

/// The positions that a layer's queries see, which later layers may share.
type Choice = Rc<RefCell<Option<Tensor>>>;

fn open(files: &Files<'_>) -> Result<Opened> {
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    let count = keys.needed(Key("index_topk", "attention.indexer.top_k"))?;
    let count = count.within(1..=MOST_POSITIONS)?;
    let heads = keys.needed(Key("index_n_heads", "attention.indexer.head_count"))?;
    let heads = heads.within(1..=LIMIT)?;
    let stated = keys.needed(Key("index_head_dim", "attention.indexer.key_length"))?;
    let head_dim = stated.within(1..=LIMIT)?;
    let usual = match files.architecture.name == GLM.name {
        true => Pairing::Adjacent,
        false => Pairing::Half,
    };
    let beside = keys.flag(Key("indexer_rope_interleave", ""))?;
    let pairing = match beside {
        Some(true) => Pairing::Adjacent,
        Some(false) => Pairing::Half,
        None => usual,
    };
    let own = own(files)?;
    let whole = files.context.is_some_and(|context| context <= count);
    let mut opened = deepseek::open_mixed(files, |config, options| {
        // Where all positions are chosen, an indexer changes nothing.
        if whole {
            return Ok(latent::mixer(options));
        }
        let missing = |expected: &str| stated.wrong(expected, "none");
        let row = options.query_rank;
        let query_rank = row.ok_or_else(|| missing("queries of a low rank (q_lora_rank)"))?;
        let rope = options.rope.clone();
        let rope = rope.ok_or_else(|| missing("a rotation for an indexer's heads"))?;
        if 2 * rope.frequencies.len() > head_dim {
            let expected =
                format!("at least the {} elements that turn", 2 * rope.frequencies.len());
            return Err(stated.wrong(expected, head_dim));
        }
        let rope = Rope { head_dim, pairing, ..rope };
        let (hidden, norm_eps) = (config.hidden, NORM_EPS);
        let indexer = IndexerOptions { hidden, query_rank, heads, head_dim, count, norm_eps, rope };
        Ok(mixer(LatentOptions { chosen: Some(count), ..options }, indexer, own))
    })?;
    let config = &mut opened.config;
    // Positions are chosen by numbers that are exact up to here.
    config.context = config.context.min(MOST_POSITIONS);
    if whole {
        let parts = ["q", "k", "k_norm", "k_norm.bias", "heads"];
        let of = |i: usize| parts.map(|part| format!("blocks.{i}.attention.indexer.{part}"));
        config.spare.extend((0..config.layers).flat_map(of));
    }
    Ok(opened)
}

/// Latent attention in every block, to the positions that the block's own indexer chooses, or the
/// last one before it.
fn mixer(options: LatentOptions, indexer: IndexerOptions, own: Option<Vec<bool>>) -> Mixer {
    let last = Choice::default();
    Box::new(move |builder, _, i| {
        let name = format!("blocks.{i}.attention");
        let own = own.as_ref().is_none_or(|own| own[i]);
        let attention = LatentAttention::new(builder, &name, &options)?;
        let indexer = || LightningIndexer::new(builder, &format!("{name}.indexer"), &indexer);
        let (indexer, last) = (own.then(indexer).transpose()?, last.clone());
        Ok(Some(Box::new(move |x| {
            attention.forward_chosen(x, |row| {
                let mut last = last.borrow_mut();
                if let Some(indexer) = &indexer {
                    *last = Some(indexer.forward(x, row));
                }
                last.clone()
            })
        })))
    })
}

/// Whether each layer has an indexer of its own; none where all have.
///
/// # Errors
/// Kinds that are unknown, or not one for each layer; a first layer without an indexer.
fn own(files: &Files<'_>) -> Result<Option<Vec<bool>>> {
    let keys = &files.keys;
    if files.architecture.name != GLM.name {
        return Ok(None);
    }
    let layers = keys.needed(Key("num_hidden_layers", "block_count"))?.value;
    let kind = |kind: &str| match kind {
        "full" | "F" => Some(true),
        "shared" | "S" => Some(false),
        _ => None,
    };
    let listed = |key: Key| -> Result<Option<Vec<bool>>> {
        let Some(value) = keys.get(key) else { return Ok(None) };
        let all = match value.as_array() {
            Some(list) => list.iter().map(|one| kind(one.as_str()?)).collect(),
            None => value.as_str().and_then(|text| {
                text.char_indices().map(|(i, c)| kind(&text[i..i + c.len_utf8()])).collect()
            }),
        };
        let all: Option<Vec<bool>> = all;
        let expected = format!("full or shared for {layers} layers");
        let all = all.filter(|all| all.len() == layers);
        all.map(Some).ok_or_else(|| keys.odd(key, &expected, value))
    };
    let own = match (listed(TYPES)?, listed(PATTERN)?) {
        (None, None) => {
            let period = keys.size(PERIOD)?.map_or(1, |period| period.value.max(1));
            let offset = keys.size(OFFSET)?.map_or(2, |offset| offset.value);
            let stated = keys.gguf_flags(TYPES)?;
            let periodic = |i: usize| (i + 1).saturating_sub(offset).is_multiple_of(period);
            stated.unwrap_or_else(|| (0..layers).map(periodic).collect())
        }
        (types, pattern) => {
            keys.note(PERIOD.0);
            keys.note(OFFSET.0);
            types.or(pattern).unwrap_or_default()
        }
    };
    // Blocks that guess tokens ahead may be listed behind the others.
    if own.len() < layers || own.first() != Some(&true) {
        let expected = "a kind for each layer, the first with an indexer";
        return Err(keys.wrong(TYPES, expected, format!("{own:?}")));
    }
    let kinds = MetadataValue::Array(MetadataArray::Bool(own.clone()));
    keys.state(Key("", TYPES.1), Some(kinds));
    Ok(Some(own))
}
