//! Mamba-2 (Dao & Gu 2024): every layer is a state space behind a norm, with neither attention nor a
//! feed-forward; Mamba Codestral is one. Folders are Transformers' or the authors' own, which name
//! no architecture. Mamba-1 is another recurrence.

use crate::config::{self, Config, Raw};
use crate::decoder::{self, Order};
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use crate::unsaid::{Numbers, Unsaid};
use crate::{Architecture, Opened, mamba};
use formats::{ErrorKind, Result};
use nn::{Bias, Weights};

/// The names around state spaces that are all of a model.
pub(crate) const NAMES: &[Row] = &[
    ("embed", "backbone.embeddings", "token_embd"),
    ("embed", "backbone.embedding", "token_embd"),
    ("norm", "backbone.norm_f", "output_norm"),
    ("head", "lm_head", "output"),
    ("blocks.{}.attention_norm", "backbone.layers.{}.norm", "blk.{}.attn_norm"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mamba-2",
    name: "mamba2",
    gguf: "mamba2",
    class: "Mamba2ForCausalLM",
    unsaid: Unsaid::NOTHING
        .numbers(&[
            ("mamba_d_conv", 4),
            ("mamba_d_head", 64),
            ("mamba_d_state", 128),
            ("mamba_n_groups", 8),
            ("mamba_n_heads", 128),
        ])
        .eps(1e-5),
    names: &[NAMES, mamba::MIXERS],
    signs: Some(&["embed", "blocks.0.mamba.in", "blocks.0.mamba.step", "blocks.0.mamba.norm"]),
    experts: false,
    open,
};

/// The number that norms add.
pub(crate) const EPS: Key = Key("layer_norm_epsilon", "attention.layer_norm_rms_epsilon");

/// Keys about training, about forms of computing that give the same, and of Mamba-1. The order of
/// gate and norm is Transformers' own whatever `norm_before_gate` says.
pub(crate) const NOTED: &[&str] = &[
    "intermediate_size",
    "norm_before_gate",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_init_scheme",
    "time_step_rank",
    "time_step_scale",
];

/// Numbers that the authors' own folders leave out.
const AUTHORS_NUMBERS: Numbers =
    &[("mamba_d_conv", 4), ("mamba_d_head", 64), ("mamba_d_state", 128), ("mamba_n_groups", 1)];

/// Names in the authors' own folders.
const AUTHORS_NAMES: &[(&str, &str)] = &[
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layer"),
    ("tie_word_embeddings", "tie_embeddings"),
];

/// Keys of the authors' own folders about kernels, and about attention that no layer has.
const AUTHORS_NOTED: &[&str] = &["attn_cfg", "fused_add_norm"];

/// In GGUF, and not used.
pub(crate) const ZEROS: &[&str] =
    &["attention.head_count", "attention.head_count_kv", "feed_forward_length"];

/// The files with the keys of a state space's sizes, which the authors' own folders have in an
/// object of their own.
///
/// # Errors
/// Another recurrence; layers of another kind.
fn sizes<'a>(files: &Files<'a>) -> Result<Files<'a>> {
    let keys = &files.keys;
    let Some(own) = keys.object(mamba::AUTHORS)? else {
        return Ok(files.with_names(&[
            ("mamba_n_heads", "num_heads"),
            ("mamba_d_head", "head_dim"),
            ("mamba_n_groups", "n_groups"),
            ("mamba_d_state", "state_size"),
            ("mamba_d_conv", "conv_kernel"),
            ("mamba_expand", "expand"),
            ("mamba_conv_bias", "use_conv_bias"),
            ("mamba_proj_bias", "use_bias"),
        ]));
    };
    AUTHORS_NOTED.iter().for_each(|key| keys.note(key));
    if own.text("layer")? != Some("Mamba2") {
        let found = own.text("layer")?.unwrap_or("Mamba1");
        return Err(own.wrong("layer", "Mamba2", found).of(ErrorKind::Unsupported));
    }
    if let Some(width) = keys.size("d_intermediate")?.filter(|width| width.value > 0) {
        let error = width.wrong("0: no feed-forward", width.value);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let attends = keys.numbers("attn_layer_idx")?.and_then(|layers| layers.first().copied());
    if let Some(layer) = attends {
        let error = keys.wrong("attn_layer_idx", "no layers of attention", layer);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let keys = own
        .with_names(&[
            ("mamba_d_head", "headdim"),
            ("mamba_n_groups", "ngroups"),
            ("mamba_d_state", "d_state"),
            ("mamba_d_conv", "d_conv"),
            ("mamba_expand", "expand"),
            ("mamba_conv_bias", "conv_bias"),
            ("mamba_proj_bias", "bias"),
            ("time_step_limit", "dt_limit"),
        ])
        .of_class(Unsaid::NOTHING.numbers(AUTHORS_NUMBERS));
    Ok(Files { keys, outer: files.outer.clone(), ..*files })
}

fn open(files: &Files<'_>) -> Result<Opened> {
    let authors = files.keys.get(mamba::AUTHORS).is_some();
    let files = &files.with_names(if authors { AUTHORS_NAMES } else { &[] });
    let keys = &files.keys;
    NOTED.iter().chain(ZEROS).for_each(|key| keys.note(key));
    keys.only(Key("hidden_act", ""), &["silu"])?;
    if keys.flag("rms_norm")? == Some(false) {
        let error = keys.wrong("rms_norm", "true: a norm behind each gate", false);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let mut raw = Raw::read_alone(files, EPS)?;
    if let Some(multiple) = keys.size(Key("pad_vocab_size_multiple", ""))? {
        let multiple = multiple.within(1..=1 << 16)?;
        raw.vocab = raw.vocab.map(|rows| rows.checked_next_multiple_of(multiple).unwrap_or(rows));
    }
    let layers = raw.layers.within(1..=config::LAYERS)?;
    let options = mamba::read(&sizes(files)?, &raw.hidden, raw.norm_eps.value as f32)?;
    let config = Config { heads: 0, kv_heads: 0, head_dim: 0, feed_forward: 0, ..raw.check()? };
    let parts = decoder::Parts {
        mixer: mamba::mixer(options, vec![true; layers].into()),
        order: Order::Alone,
        ..decoder::Parts::new(Bias::Never, decoder::biased(Bias::Never))
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        mamba::part(weights, name, &options)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files;
    use crate::keys::Asked;
    use nn::{Stored, UNLIMITED};
    use serde_json::{Value, json};

    struct Nothing;

    impl Weights for Nothing {
        fn find(&self, _: &str) -> Result<Option<Stored>> {
            Ok(None)
        }
    }

    /// What the authors' own `config.json` says, with some keys changed.
    fn authors(key: &str, value: Value) -> Result<nn::MambaOptions> {
        let mut json = json!({ "d_model": 768, "d_intermediate": 0, "n_layer": 24,
            "ssm_cfg": { "layer": "Mamba2" }, "attn_layer_idx": [], "attn_cfg": {} });
        json[key] = value;
        let asked = Asked::default();
        let (keys, outer) = files::of_json(&json, "config.json", &asked)?;
        let (names, tensors, context, apart) = (&Nothing, None, None, false);
        let architecture = &ARCHITECTURE;
        let files =
            Files { architecture, keys, outer, names, tensors, context, latents: None, apart };
        let hidden = files.keys.needed("d_model")?;
        mamba::read(&sizes(&files)?, &hidden, 1e-5)
    }

    #[test]
    fn the_authors_folders_leave_out_what_is_usual() {
        let usual = authors("fused_add_norm", true.into()).unwrap();
        let found = [usual.heads, usual.groups, usual.head_dim, usual.state, usual.kernel];
        assert_eq!((found, usual.limit), ([24, 1, 64, 128, 4], UNLIMITED));
        let stated = json!({ "layer": "Mamba2", "headdim": 32, "ngroups": 2, "d_state": 16,
            "d_conv": 3, "expand": 3, "dt_limit": [0.5, 2.0] });
        let stated = authors("ssm_cfg", stated).unwrap();
        let found = [stated.heads, stated.groups, stated.head_dim, stated.state, stated.kernel];
        assert_eq!((found, stated.limit), ([72, 2, 32, 16, 3], [0.5, 2.0]));
        for (key, value, says) in [
            ("ssm_cfg", json!({}), "ssm_cfg.layer: expected Mamba2, found Mamba1"),
            ("d_intermediate", json!(64), "d_intermediate: expected 0: no feed-forward, found 64"),
            ("attn_layer_idx", json!([3]), "attn_layer_idx: expected no layers of attention"),
            (
                "ssm_cfg",
                json!({ "layer": "Mamba2", "headdim": 100 }),
                "expected a multiple of ssm_cfg.headdim = 100, found 1536",
            ),
        ] {
            let why = authors(key, value).unwrap_err().to_string();
            assert!(why.starts_with("config.json: ") && why.contains(says), "{why}");
        }
    }
}
