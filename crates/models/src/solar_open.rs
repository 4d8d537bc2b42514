//! Solar Open (Upstage 2026): GLM-4.5's mixture in every block, behind Llama's attention.

use crate::config::{RMS_EPS, Raw};
use crate::files::Files;
use crate::glm4_moe::{self, Usual};
use crate::keys::Key;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened};
use formats::Result;

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Solar Open",
    name: "solar_open",
    class: "SolarOpenForCausalLM",
    unsaid: Unsaid::sizes([4096, 0, 48, 64, 8, 0, 131_072, 196_608])
        .theta(1_000_000.0)
        .numbers(NUMBERS)
        .eps(1e-5),
    open,
    ..glm4_moe::ARCHITECTURE
};

/// There is no feed-forward but the experts', and their width is what there is.
const OWN: &[(&str, &str)] = &[("intermediate_size", "moe_intermediate_size")];

/// Numbers that configurations may leave out.
const NUMBERS: Numbers = &[
    ("head_dim", 128),
    ("intermediate_size", 1280),
    ("moe_intermediate_size", 1280),
    ("n_routed_experts", 128),
    ("num_experts_per_tok", 8),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    let keys = &files.keys;
    let raw = Raw::read_normed(files, RMS_EPS)?;
    // What the first configurations state, too.
    keys.note("intermediate_size");
    if keys.flag(Key("use_qk_norm", ""))? == Some(true) {
        return Err(keys.wrong("use_qk_norm", "false, as of this architecture", true));
    }
    if let Some(dense) = keys.size(Key("first_k_dense_replace", ""))?.filter(|n| n.value > 0) {
        return Err(dense.wrong("0: all blocks have experts", dense.value));
    }
    glm4_moe::opened(files, raw, false, Usual::default())
}
