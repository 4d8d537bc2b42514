//! StarCoder and SantaCoder (Li et al. 2023): GPT-2 whose query heads share one key and value, and
//! whose matrices are `[out, in]`.

use crate::config::{Config, Raw};
use crate::decoder;
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, gpt2, gptj, phi3};
use formats::{ErrorKind, Result};
use nn::{AttentionOptions, Bias, Unary};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "StarCoder and SantaCoder",
    name: "gpt_bigcode",
    gguf: "starcoder",
    class: "GPTBigCodeForCausalLM",
    unsaid: Unsaid::NOTHING.eps(1e-5),
    names: &[gpt2::NAMES],
    signs: None,
    experts: false,
    open,
};

fn open(files: &Files<'_>) -> Result<Opened> {
    let files = &files.with_names(gptj::OWN);
    let keys = &files.keys;
    let eps = Key("layer_norm_epsilon", "attention.layer_norm_epsilon");
    let mut raw = Raw::read_quadrupled(files, eps)?;
    raw.rotation = None;
    if keys.dialect() == Dialect::HuggingFace {
        raw.kv_heads = raw.heads.clone().map(|_| 1);
    }
    // How programs compute the same.
    for key in [
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "validate_runner_input",
        "pre_allocate_kv_cache",
        "max_batch_size",
    ] {
        keys.note(key);
    }
    if keys.flag(Key("multi_query", ""))? == Some(false) {
        let error = keys.wrong("multi_query", "true: others are not supported", false);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let scaled = keys.flag(Key("scale_attn_weights", ""))?.unwrap_or(true);
    let act = gpt2::activation(files, "activation_function", &[Unary::GeluTanh])?;
    let attention = move |config: &Config, layer: usize| AttentionOptions {
        qkv_bias: Bias::Always,
        output_bias: Bias::Always,
        scale: (!scaled).then_some(1.0),
        ..config.attention(layer)
    };
    let parts = gpt2::parts(act, attention);
    Ok(decoder::open_recipes(raw.check()?, parts, phi3::part))
}
