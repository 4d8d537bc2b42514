//! Architectures that people have on disk and Delft does not run, and what it lacks for them.

/// A missing feature, and the architectures that need it, in `config.json` and in GGUF.
const LACKING: &[(&str, &[&str])] = &[
    (
        "attention to the positions that an indexer chooses",
        &["deepseek_v32", "deepseek32", "glm_moe_dsa", "glm-dsa"],
    ),
    ("experts that compute nothing", &["longcat_flash"]),
    ("blocks of different shapes", &["deci", "nemotron-nas", "openelm"]),
    ("norms within sublayers, and ternary weights (BitNet)", &["bitnet", "bitnet-b1.58"]),
    (
        "selective state spaces of another form (Mamba-1, Jamba, Zamba)",
        &["falcon_mamba", "jamba", "mamba", "plamo2", "zamba", "zamba2"],
    ),
    ("the recurrence of RWKV", &["rwkv", "rwkv6", "rwkv6qwen2", "rwkv7", "rwkv_hybrid", "arwkv7"]),
    ("positions as a slope on scores (ALiBi)", &["bloom", "mpt", "jais", "refact", "falcon_rw"]),
    (
        "an encoder beside the decoder",
        &["bart", "mbart", "marian", "pegasus", "t5", "mt5", "umt5", "t5gemma", "whisper"],
    ),
    (
        "an encoder, in which tokens see those behind them",
        &[
            "bert",
            "roberta",
            "xlm-roberta",
            "distilbert",
            "mpnet",
            "nomic_bert",
            "nomic-bert",
            "nomic-bert-moe",
            "jina-bert-v2",
            "jina-bert-v3",
            "modernbert",
            "modern-bert",
            "eurobert",
            "deberta-v2",
            "neo-bert",
        ],
    ),
    ("several residual streams that predict each other (AltUp)", &["gemma3n", "gemma3n_text"]),
    ("the lightning attention of MiniMax", &["minimax", "minimax-01"]),
    ("the delta attention of Kimi Linear", &["kimi_linear", "kimi-linear"]),
    ("denoising in place of one token after the other", &["dream", "llada", "llada-moe"]),
];

/// The feature that Delft lacks for the architecture `name`, if known.
pub(crate) fn what(name: &str) -> Option<&'static str> {
    let lacking = LACKING.iter().find(|(_, names)| names.contains(&name));
    lacking.map(|(what, _)| *what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ARCHITECTURES;

    #[test]
    fn no_architecture_is_lacking_and_in_the_registry() {
        for (_, names) in LACKING {
            for name in *names {
                let held = ARCHITECTURES.iter().any(|a| a.name == *name || a.gguf == *name);
                assert!(!held, "{name}");
            }
        }
        assert!(what("mamba").is_some() && what("llama").is_none());
    }
}
