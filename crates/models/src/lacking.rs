//! Architectures that people have on disk and Delft does not run, and what it lacks for them.

/// A missing feature, and the architectures that need it, in `config.json` and in GGUF.
const LACKING: &[(&str, &[&str])] = &[
    (
        "attention to the positions that an indexer chooses",
        &[
            "axk2",
            "deepseek_v4",
            "deepseek4",
            "dots3_note",
            "dots3_note_text",
            "glm5_next",
            "glm5_next_text",
            "glm5-next",
            "hy_v4",
            "hy-v4",
            "minimax_m3_vl",
            "minimax_m3_vl_text",
            "minimax-m3",
            "qwen4_exp",
            "qwen4_exp_text",
            "qwen4exp",
        ],
    ),
    ("experts that compute nothing", &["longcat_flash"]),
    ("GGUF's form of BitNet, whose folders are run", &["bitnet-b1.58"]),
    ("heads of Mamba-1's state spaces (Zamba, PLaMo 2)", &["plamo2", "zamba"]),
    ("the recurrence of RWKV", &["rwkv", "rwkv6", "rwkv6qwen2", "rwkv7", "rwkv_hybrid", "arwkv7"]),
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
    ("GGUF's form of MiniMax-01, whose folders are run", &["minimax-01"]),
    ("GGUF's form of Ling 3, whose folders are run", &["bailingmoe3"]),
    ("attention across layers and experts of latents (Kimi K3)", &["kimi-k3"]),
    ("the recurrences of Griffin and of xLSTM", &["recurrent_gemma", "xlstm"]),
    ("corrections of an expert's score, not of its odds", &["kolibri1"]),
    ("a mixture of attention's heads", &["jetmoe"]),
    ("attention by the difference of two", &["diffllama"]),
    ("a mask of attention that values make", &["doge"]),
    ("compressed convolutional attention", &["zaya"]),
    ("layers that are computed several times", &["hrm_text", "hrm-text"]),
    ("patches of bytes in place of tokens", &["blt"]),
    ("images in the place of tokens (Fuyu)", &["fuyu"]),
    ("a head of fewer rows than the embedding", &["apertus1p5", "apertus1p5_text"]),
    ("the keys and values of another model, which it assists", &["gemma4_assistant"]),
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
        assert!(what("rwkv").is_some() && what("llama").is_none());
    }
}
