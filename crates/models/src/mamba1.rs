//! Mamba (Gu & Dao 2023), in which every layer is a state space behind a norm, each element of which
//! decays at a rate of its own; and Falcon Mamba (TII 2024), which norms `B`, `C` and the row that
//! steps are made of. Mamba-2 is another recurrence.

use crate::config::{self, Config, Raw};
use crate::decoder::{self, Layer, Mixer, Order};
use crate::files::Files;
use crate::keys::{Dialect, Key};
use crate::names::Row;
use crate::stated::Stated;
use crate::unsaid::Unsaid;
use crate::{Architecture, Opened, mamba, mamba2, phi3};
use formats::gguf::MetadataValue;
use formats::{ErrorKind, Result, Source};
use nn::{Bias, Mamba1, Mamba1Options, Stored, Weights};
use program::Weight;
use std::sync::Arc;

const NAMES: &[Row] = &[
    ("blocks.{}.mamba.in", "backbone.layers.{}.mixer.in_proj", "blk.{}.ssm_in"),
    ("blocks.{}.mamba.conv", "backbone.layers.{}.mixer.conv1d", "blk.{}.ssm_conv1d"),
    ("blocks.{}.mamba.dbc", "backbone.layers.{}.mixer.x_proj", "blk.{}.ssm_x"),
    ("blocks.{}.mamba.dt", "backbone.layers.{}.mixer.dt_proj", "blk.{}.ssm_dt"),
    ("blocks.{}.mamba.log_decay", "backbone.layers.{}.mixer.A_log!", ""),
    ("blocks.{}.mamba.decay", "", "blk.{}.ssm_a!"),
    ("blocks.{}.mamba.skip", "backbone.layers.{}.mixer.D!", "blk.{}.ssm_d!"),
    ("blocks.{}.mamba.o", "backbone.layers.{}.mixer.out_proj", "blk.{}.ssm_out"),
];

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Mamba",
    name: "mamba",
    gguf: "mamba",
    class: "MambaForCausalLM",
    unsaid: Unsaid::NOTHING.numbers(&[("mamba_d_conv", 4), ("mamba_d_state", 16)]).eps(1e-5),
    names: &[mamba2::NAMES, NAMES],
    signs: None,
    experts: false,
    open: |files| open(files, false),
};

pub(crate) const FALCON: Architecture = Architecture {
    title: "Falcon Mamba",
    name: "falcon_mamba",
    class: "FalconMambaForCausalLM",
    open: |files| open(files, true),
    ..ARCHITECTURE
};

/// Keys about training, and about forms of computing that give the same.
const NOTED: &[&str] = &[
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "use_associative_scan",
    "use_falcon_mambapy",
    "use_mamba_kernels",
    "use_mambapy",
];

/// What Transformers' folders of Mamba repeat in the words of its authors, and reads no more.
const REPEATED: &[&str] =
    &["d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "ssm_cfg"];

/// The number that Falcon Mamba's inner norms add, which GGUF does not say.
const INNER_EPS: f64 = 1e-6;

/// Reads the sizes of the state spaces of a model; `norm_eps`: [`Mamba1Options::norm_eps`].
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn read(
    files: &Files<'_>,
    hidden: &Stated<usize>,
    norm_eps: Option<f32>,
) -> Result<Mamba1Options> {
    const RANK: Key = Key("mamba_dt_rank", "ssm.time_step_rank");
    let keys = &files.keys;
    NOTED.iter().for_each(|key| keys.note(key));
    let automatic = keys.get(RANK).and_then(|rank| rank.as_str()) == Some("auto");
    let rank = if automatic { None } else { keys.size(RANK)? };
    let rank = match keys.dialect() {
        Dialect::Gguf => keys.needed(RANK)?,
        Dialect::HuggingFace => {
            rank.unwrap_or_else(|| hidden.clone().map(|hidden| hidden.div_ceil(16)))
        }
    };
    let state = keys.needed(Key("mamba_d_state", "ssm.state_size"))?.within(1..=1 << 14)?;
    let kernel = keys.needed(Key("mamba_d_conv", "ssm.conv_kernel"))?.within(2..=1 << 8)?;
    Ok(Mamba1Options {
        hidden: hidden.value,
        inner: mamba::inner(files, hidden)?.within(1..=1 << 20)?,
        state,
        rank: rank.within(1..=1 << 20)?,
        kernel,
        bias: files.bias("mamba_proj_bias")?,
        conv_bias: match keys.flag(Key("mamba_conv_bias", ""))? {
            Some(false) => Bias::Never,
            _ => Bias::IfStored,
        },
        norm_eps,
    })
}

/// The mixer of a model some of whose `layers` are such state spaces.
pub(crate) fn mixer(options: Mamba1Options, layers: Arc<[bool]>) -> Mixer {
    Box::new(move |builder, _, i| {
        let mamba = || Mamba1::new(builder, &format!("blocks.{i}.mamba"), &options);
        let layer = |mamba: Mamba1| Box::new(move |x: &nn::Tensor| mamba.forward(x)) as Layer;
        Ok(layers[i].then(mamba).transpose()?.map(layer))
    })
}

/// A weight of a state space that is stored in another form: rows of one matrix, taps and decay rates
/// by channel, logarithms.
///
/// # Errors
/// A weight that is stored in another shape.
pub(crate) fn part(
    weights: &dyn Weights,
    name: &str,
    options: &Mamba1Options,
) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".mamba.") else { return Ok(None) };
    let &Mamba1Options { hidden, inner, state, rank, kernel, .. } = options;
    let stored = |part: &str| format!("{block}.mamba.{part}");
    let (stem, suffix) = match part.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (part, ""),
    };
    let rows = |of: &str, shape: [usize; 2], start: usize, count: usize| {
        let expected = if suffix.is_empty() { &shape[..] } else { &shape[..1] };
        phi3::rows(weights, &stored(&format!("{of}{suffix}")), expected, start, count)
    };
    let (both, all) = ([2 * inner, hidden], [rank + 2 * state, inner]);
    match stem {
        "x" => rows("in", both, 0, inner),
        "z" => rows("in", both, inner, inner),
        "dt_in" => rows("dbc", all, 0, rank),
        "b" => rows("dbc", all, rank, state),
        "c" => rows("dbc", all, rank + state, state),
        "taps" if suffix.is_empty() => mamba::turned(weights, &stored("conv"), [inner, kernel]),
        "taps" => weights.find(&stored("conv.bias")),
        "decay" => {
            let turned = |part: &str| mamba::turned(weights, &stored(part), [inner, state]);
            match turned("log_decay")? {
                Some(Stored { source, shape }) => {
                    Ok(Some(Stored { source: decays(source), shape }))
                }
                None => turned("decay"),
            }
        }
        _ => Ok(None),
    }
}

/// The decay rates of logarithms that [`mamba::turned`] gave, turned last as those are.
fn decays(source: Source) -> Source {
    match source {
        Source::Reshape(inner, shape) => Source::Reshape(Box::new(decays(*inner)), shape),
        Source::Transpose(inner) => Source::Transpose(Box::new(decays(*inner))),
        stored => Source::NegExp(Box::new(stored)),
    }
}

/// A weight of a state space as GGUF has it, and its shape; `find` gives those of the block.
pub(crate) fn exported<'a>(
    find: impl Fn(&str) -> Option<&'a Weight>,
    part: &str,
) -> Option<(Source, Vec<usize>)> {
    let (stem, suffix) = match part.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (part, ""),
    };
    let joined = |parts: &[&str]| {
        let parts = parts.iter().map(|part| find(&format!("{part}{suffix}")));
        let parts = parts.collect::<Option<Vec<_>>>()?;
        let mut shape = parts[0].shape.clone();
        shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        Some((Source::Concat(parts.iter().map(|part| part.source.clone()).collect()), shape))
    };
    let own = |name: &str| find(name).map(|weight| (weight.source.clone(), weight.shape.clone()));
    match stem {
        "in" => joined(&["x", "z"]),
        "dbc" => joined(&["dt_in", "b", "c"]),
        "conv" if suffix.is_empty() => find("taps").and_then(mamba::unturned),
        "conv" => own("taps.bias"),
        "decay" if suffix.is_empty() => find("decay").and_then(mamba::unturned),
        _ => own(part),
    }
}

fn open(files: &Files<'_>, falcon: bool) -> Result<Opened> {
    let files = &files.with_names(&[
        ("mamba_d_ssm", "intermediate_size"),
        ("mamba_dt_rank", "time_step_rank"),
        ("mamba_d_state", "state_size"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_expand", "expand"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_proj_bias", "use_bias"),
    ]);
    let keys = &files.keys;
    let unused = [mamba2::NOTED, mamba2::ZEROS, REPEATED].concat();
    unused.iter().for_each(|key| keys.note(key));
    keys.only(Key("hidden_act", ""), &["silu"])?;
    if keys.flag("rms_norm")? == Some(false) {
        let error = keys.wrong("rms_norm", "true: norms without a mean", false);
        return Err(error.of(ErrorKind::Unsupported));
    }
    const NORMED: Key = Key("", "ssm.dt_b_c_rms");
    let normed = keys.flag(NORMED)?.unwrap_or(falcon);
    keys.state(NORMED, Some(MetadataValue::Bool(normed)));
    let norm_eps = || -> Result<f32> {
        let eps = keys.number_or(Key("mixer_rms_eps", ""), INNER_EPS)?;
        Ok(eps.positive()? as f32)
    };
    let norm_eps = normed.then(norm_eps).transpose()?;
    let raw = Raw::read_alone(files, mamba2::EPS)?;
    let layers = raw.layers.within(1..=config::LAYERS)?;
    let options = read(files, &raw.hidden, norm_eps)?;
    let config = Config { heads: 0, kv_heads: 0, head_dim: 0, feed_forward: 0, ..raw.check()? };
    let parts = decoder::Parts {
        mixer: mixer(options, vec![true; layers].into()),
        order: Order::Alone,
        ..decoder::Parts::new(Bias::Never, decoder::biased(Bias::Never))
    };
    Ok(decoder::open_recipes(config, parts, move |_, weights: &dyn Weights, name: &str| {
        Ok(ones(&options, name).or(part(weights, name, &options)?))
    }))
}

/// The weights of inner norms, which are not stored.
fn ones(options: &Mamba1Options, name: &str) -> Option<Stored> {
    let width = match name.rsplit_once(".mamba.")?.1 {
        "dt_norm" => options.rank,
        "b_norm" | "c_norm" => options.state,
        _ => return None,
    };
    let source = Source::Plus(Box::new(Source::Zeros(vec![width])), 1.0);
    Some(Stored { source, shape: vec![width] })
}
