//! K-EXAONE (LG AI Research 2026): EXAONE 4.0's attention behind norms in front, and behind the first
//! dense blocks a mixture whose experts are chosen by corrected odds, beside some that every token
//! goes through.

use crate::config::{Config, RMS_EPS, Raw};
use crate::exaone4::PERIOD;
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, experts, llama, mixtral, qwen3, windows};
use formats::Result;
use nn::{AttentionOptions, QkNorm};

/// Where published folders have the correction.
const NAMES: &[Row] = &[(
    "blocks.{}.mlp.router.correction",
    "model.layers.{}.mlp.e_score_correction_bias!",
    "blk.{}.exp_probs_b.bias!",
)];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "K-EXAONE",
    name: "exaone_moe",
    gguf: "exaone-moe",
    class: "ExaoneMoeForCausalLM",
    unsaid: Unsaid::sizes([4096, 16_384, 32, 32, 32, 4096, 2048, 102_400])
        .numbers(NUMBERS)
        .eps(1e-5),
    names: &[NAMES, glm4_moe::NAMES, llama::NAMES, qwen3::NORMS, experts::NAMES, experts::SWITCHED],
    signs: None,
    experts: true,
    open,
};

const OWN: &[(&str, &str)] = &[("n_shared_experts", "num_shared_experts")];

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("first_k_dense_replace", 1),
    ("moe_intermediate_size", 1024),
    ("num_experts", 64),
    ("num_experts_per_tok", 8),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let mut raw = Raw::read_normed(files, RMS_EPS)?;
    raw.windows = windows::periodic(files, &raw.layers, PERIOD)?;
    glm4_moe::guesses(files, &mut raw)?;
    if keys.dialect() == Dialect::Gguf {
        // It lists no layers for blocks that guess tokens ahead.
        raw.windows.truncate(raw.layers.value);
    }
    // One repeats what other keys say, one is about blocks that guess tokens ahead.
    for key in ["is_moe_layer", "mtp_share_layers"] {
        keys.note(key);
    }
    // Names of the only rule by which its experts are chosen.
    keys.only(Key("scoring_func", ""), &["sigmoid"])?;
    keys.only(Key("topk_method", ""), &["noaux_tc"])?;
    let usual = Usual { scale: 2.5, ..Usual::default() };
    let (config, mut parts, count) = glm4_moe::parts(files, raw, usual)?;
    let attention = parts.attention;
    parts.attention = Box::new(move |config: &Config, layer| {
        let options = attention(config, layer);
        let turns = config.windows.is_empty() || options.window.is_some();
        AttentionOptions {
            qk_norm: QkNorm::Heads(config.norm_eps),
            rope: options.rope.filter(|_| turns),
            ..options
        }
    });
    Ok(mixtral::opened(config, parts, count))
}
