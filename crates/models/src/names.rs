//! One table of weight names: canonical, Hugging Face, GGUF.

/// Names of a block's parts: canonical, Hugging Face (below `model.layers.N.`), GGUF (below `blk.N.`).
const BLOCK: &[(&str, &str, &str)] = &[
    ("attention_norm", "input_layernorm", "attn_norm"),
    ("attention.q", "self_attn.q_proj", "attn_q"),
    ("attention.k", "self_attn.k_proj", "attn_k"),
    ("attention.v", "self_attn.v_proj", "attn_v"),
    ("attention.o", "self_attn.o_proj", "attn_output"),
    ("attention.q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("attention.k_norm", "self_attn.k_norm", "attn_k_norm"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    ("mlp.gate", "mlp.gate_proj", "ffn_gate"),
    ("mlp.up", "mlp.up_proj", "ffn_up"),
    ("mlp.down", "mlp.down_proj", "ffn_down"),
];

/// Names of the parts outside the blocks.
const OUTER: &[(&str, &str, &str)] = &[
    ("embed", "model.embed_tokens", "token_embd"),
    ("norm", "model.norm", "output_norm"),
    ("head", "lm_head", "output"),
    ("rope_factors", "rope_factors", "rope_freqs"),
];

/// Which family of names a file uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    HuggingFace,
    Gguf,
}

/// The names under which `canonical` may be stored, in order of preference.
pub(crate) fn candidates(canonical: &str, dialect: Dialect) -> Vec<String> {
    let (part, suffix) = match canonical.strip_suffix(".bias") {
        Some(part) => (part, "bias"),
        None => (canonical, "weight"),
    };
    let pick = |row: &(&str, &'static str, &'static str)| match dialect {
        Dialect::HuggingFace => row.1,
        Dialect::Gguf => row.2,
    };
    let find = |table: &[(&'static str, &'static str, &'static str)], part: &str| {
        table.iter().find(|row| row.0 == part).map(pick)
    };
    let block = part.strip_prefix("blocks.").and_then(|rest| rest.split_once('.'));
    let stem = match block {
        Some((index, part)) => find(BLOCK, part).map(|name| match dialect {
            Dialect::HuggingFace => format!("model.layers.{index}.{name}"),
            Dialect::Gguf => format!("blk.{index}.{name}"),
        }),
        None => find(OUTER, part).map(str::to_owned),
    };
    let Some(stem) = stem else { return Vec::new() };
    let name = format!("{stem}.{suffix}");
    if dialect == Dialect::Gguf {
        return vec![name];
    }
    // Multimodal checkpoints keep the decoder under a prefix; base-model exports drop the leading `model.`.
    let bare = name.strip_prefix("model.").unwrap_or(&name).to_owned();
    vec![
        format!("language_model.{name}"),
        format!("model.language_model.{bare}"),
        format!("language_model.{bare}"),
        bare,
    ]
    .into_iter()
    .fold(vec![name], |mut all, next| {
        if !all.contains(&next) {
            all.push(next);
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_dialects_meet_in_one_name() {
        let hf = candidates("blocks.12.attention.q.bias", Dialect::HuggingFace);
        assert_eq!(hf[0], "model.layers.12.self_attn.q_proj.bias");
        assert_eq!(hf[1], "language_model.model.layers.12.self_attn.q_proj.bias");
        assert_eq!(candidates("blocks.12.attention.q.bias", Dialect::Gguf), ["blk.12.attn_q.bias"]);
        assert_eq!(
            candidates("head", Dialect::HuggingFace),
            [
                "lm_head.weight",
                "language_model.lm_head.weight",
                "model.language_model.lm_head.weight"
            ]
        );
        assert!(candidates("blocks.1.nonsense", Dialect::Gguf).is_empty());
    }
}
