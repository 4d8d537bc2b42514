//! EXAONE 3.0 and 3.5 (LG AI Research 2024): Llama, whose first files have names of their own for
//! weights and sizes.

use crate::config::Raw;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, decoder, llama};
use formats::Result;

const NAMES: &[Row] = &[
    ("embed", "transformer.wte", "token_embd"),
    ("norm", "transformer.ln_f", "output_norm"),
    ("blocks.{}.attention_norm", "transformer.h.{}.ln_1", "blk.{}.attn_norm"),
    ("blocks.{}.attention.q", "transformer.h.{}.attn.attention.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k", "transformer.h.{}.attn.attention.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v", "transformer.h.{}.attn.attention.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o", "transformer.h.{}.attn.attention.out_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp_norm", "transformer.h.{}.ln_2", "blk.{}.ffn_norm"),
    ("blocks.{}.mlp.gate", "transformer.h.{}.mlp.c_fc_0", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc_1", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", "blk.{}.ffn_down"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "EXAONE 3.0 and 3.5",
    name: "exaone",
    gguf: "exaone",
    class: "ExaoneForCausalLM",
    unsaid: Unsaid::NOTHING.theta(500_000.0).eps(1e-5),
    names: &[NAMES, llama::NAMES],
    signs: None,
    experts: false,
    open,
};

/// Names of its own for sizes.
const OWN: &[(&str, &str)] = &[
    ("num_hidden_layers", "num_layers"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("hidden_act", "activation_function"),
];

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(OWN);
    // A dropout, for training.
    files.keys.note("embed_dropout");
    let raw = Raw::read(files)?;
    // GGUF files have it under both names.
    const SAME: Key = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");
    let eps = raw.norm_eps.value;
    if let Some(same) = files.keys.number(SAME)?.filter(|same| same.value != eps) {
        return Err(same.wrong(format!("{eps}, as the other one"), same.value));
    }
    let (attention, mlp) = (files.bias("attention_bias")?, files.bias("mlp_bias")?);
    Ok(decoder::open(raw.check()?, mlp, decoder::biased(attention)))
}
