//! Sampling settings: the model's recommendations, overridden by flags or by `/set` in a chat.

use std::hash::{BuildHasher, Hasher};

use delft::{Engine, GenerateOptions, SamplingOptions};
use serde_json::{Value, json};

use crate::args::{self, OrNone, SamplingArgs};

/// What a generation shall do: the model's defaults with the flags over them.
pub(crate) fn options(engine: &Engine, args: &SamplingArgs) -> GenerateOptions {
    let mut sampling = engine.sampling_defaults().clone();
    let set = |option: &mut f32, value: Option<f32>| *option = value.unwrap_or(*option);
    set(&mut sampling.temperature, args.temp);
    set(&mut sampling.top_p, args.top_p);
    set(&mut sampling.min_p, args.min_p);
    set(&mut sampling.repetition_penalty, args.repeat_penalty);
    set(&mut sampling.presence_penalty, args.presence_penalty);
    set(&mut sampling.frequency_penalty, args.frequency_penalty);
    sampling.top_k = args.top_k.map_or(sampling.top_k, |k| k as usize);
    if let Some(OrNone(last)) = args.repeat_last_n {
        sampling.last_n = last.map_or(usize::MAX, count);
    }
    sampling.seed = args.seed.and_then(|OrNone(seed)| seed).unwrap_or_else(random_seed);
    GenerateOptions {
        sampling,
        max_tokens: args.max_tokens.and_then(|OrNone(most)| most).map(count),
        stop: args.stop.clone(),
        ignore_end: args.ignore_eos,
        ..GenerateOptions::default()
    }
}

/// A count as far as this machine counts.
fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// How far back the penalties look; `None` to the beginning.
fn last_n(options: &SamplingOptions) -> Option<usize> {
    Some(options.last_n).filter(|n| *n < usize::MAX)
}

/// A seed that nobody chose, short enough to be typed again.
pub(crate) fn random_seed() -> u64 {
    // The standard library seeds its hash maps from the operating system.
    std::hash::RandomState::new().build_hasher().finish() >> 40
}

/// The settings in effect, by flag name.
pub(crate) fn settings(options: &GenerateOptions) -> Vec<(&'static str, String)> {
    let sampling = &options.sampling;
    let limit = options.max_tokens.map_or("until the model stops".to_string(), |n| n.to_string());
    let stop = options.stop.iter().map(|stop| format!("{stop:?}")).collect::<Vec<_>>().join(" ");
    vec![
        ("temp", sampling.temperature.to_string()),
        ("top-k", sampling.top_k.to_string()),
        ("top-p", sampling.top_p.to_string()),
        ("min-p", sampling.min_p.to_string()),
        ("repeat-penalty", sampling.repetition_penalty.to_string()),
        ("repeat-last-n", last_n(sampling).map_or("all".to_string(), |n| n.to_string())),
        ("presence-penalty", sampling.presence_penalty.to_string()),
        ("frequency-penalty", sampling.frequency_penalty.to_string()),
        ("seed", sampling.seed.to_string()),
        ("max-tokens", limit),
        ("stop", if stop.is_empty() { "none".to_string() } else { stop }),
    ]
}

/// Changes one setting by its flag's name; the error says what would have been right.
pub(crate) fn set(options: &mut GenerateOptions, key: &str, value: &str) -> Result<(), String> {
    let sampling = &mut options.sampling;
    let whole = || value.parse::<u64>().map_err(|_| "expected a whole number".to_string());
    match key {
        "temp" => sampling.temperature = args::at_least_zero(value)?,
        "top-p" => sampling.top_p = args::probability(value)?,
        "min-p" => sampling.min_p = args::probability(value)?,
        "repeat-penalty" => sampling.repetition_penalty = args::above_zero(value)?,
        "presence-penalty" => sampling.presence_penalty = args::finite(value)?,
        "frequency-penalty" => sampling.frequency_penalty = args::finite(value)?,
        "repeat-last-n" if value == "all" => sampling.last_n = usize::MAX,
        "repeat-last-n" => sampling.last_n = whole()? as usize,
        "top-k" => sampling.top_k = whole()? as usize,
        "seed" => sampling.seed = whole()?,
        "max-tokens" => options.max_tokens = Some(whole()? as usize).filter(|n| *n > 0),
        "stop" => options.stop = if value == "none" { Vec::new() } else { vec![value.to_string()] },
        _ => {
            let known: Vec<&str> = settings(options).into_iter().map(|(name, _)| name).collect();
            return Err(format!("expected one of {}", known.join(", ")));
        }
    }
    Ok(())
}

/// The settings for machines.
pub(crate) fn to_json(options: &GenerateOptions) -> Value {
    let sampling = &options.sampling;
    // Through their decimal text, so that 0.7f32 reads 0.7 and not 0.699999988.
    let short = |value: f32| value.to_string().parse::<f64>().unwrap_or(f64::from(value));
    json!({
        "temp": short(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": short(sampling.top_p),
        "min_p": short(sampling.min_p),
        "repeat_penalty": short(sampling.repetition_penalty),
        "repeat_last_n": last_n(sampling),
        "presence_penalty": short(sampling.presence_penalty),
        "frequency_penalty": short(sampling.frequency_penalty),
        "seed": sampling.seed,
        "max_tokens": options.max_tokens,
        "stop": options.stop,
    })
}
