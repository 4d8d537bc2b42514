//! Sampling settings: the model's recommendations, overridden by flags or by `/set` in a chat.

use std::hash::{BuildHasher, Hasher};

use delft::{Engine, Error, GenerateOptions};
use serde_json::{Value, json};

use crate::args::{self, OrNone, SamplingArgs};
use crate::load;
use crate::terminal::Outcome;

/// Default sequence breakers of DRY, which are llama.cpp's: no repetition is followed over them.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// The options of a generation: the model's defaults, overridden by the flags.
pub(crate) fn options(engine: &Engine, args: &SamplingArgs) -> Outcome<GenerateOptions> {
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
    set(&mut sampling.dry.multiplier, args.dry_multiplier);
    set(&mut sampling.dry.base, args.dry_base);
    set(&mut sampling.xtc.probability, args.xtc_probability);
    set(&mut sampling.xtc.threshold, args.xtc_threshold);
    let allowed = args.dry_allowed_length.map(|length| length as usize);
    sampling.dry.allowed_length = allowed.unwrap_or(sampling.dry.allowed_length);
    if let Some(OrNone(last)) = args.dry_penalty_last_n {
        sampling.dry.last_n = last.map_or(usize::MAX, count);
    }
    sampling.dry.breakers = breakers(engine, &args.dry_sequence_breaker)?.into();
    sampling.logit_bias.extend(&args.logit_bias);
    sampling.validate(engine.info().vocab)?;
    sampling.seed = args.seed.and_then(|OrNone(seed)| seed).unwrap_or_else(random_seed);
    Ok(GenerateOptions {
        sampling,
        max_tokens: args.max_tokens.and_then(|OrNone(most)| most).map(count),
        stop: args.stop.clone(),
        ignore_end: args.ignore_eos,
        ..GenerateOptions::default()
    })
}

/// The tokens that have one of these texts in them, ascending.
fn breakers(engine: &Engine, texts: &[String]) -> Outcome<Vec<u32>> {
    if texts == ["none"] {
        return Ok(Vec::new());
    }
    let tokenizer = match engine.tokenizer() {
        Some(tokenizer) => tokenizer,
        None if texts.is_empty() => return Ok(Vec::new()),
        None => load::need_tokenizer(engine)?,
    };
    let has = |text: &str, id: u32| {
        let bytes = tokenizer.token_bytes(id);
        bytes.windows(text.len()).any(|part| part == text.as_bytes())
    };
    let ids = || 0..tokenizer.vocab_size() as u32;
    if let Some(none) = texts.iter().find(|text| !ids().any(|id| has(text, id))) {
        let expected = "text that is a token, or part of one";
        return Err(Error::new("--dry-sequence-breaker", expected, format!("{none:?}")).into());
    }
    let asked = texts.iter().map(String::as_str);
    let all: Vec<&str> = if texts.is_empty() { BREAKERS.to_vec() } else { asked.collect() };
    Ok(ids().filter(|&id| all.iter().any(|text| has(text, id))).collect())
}

/// A count as far as this machine counts.
fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// How far back penalties look; `None` to the beginning.
fn last_n(last_n: usize) -> Option<usize> {
    Some(last_n).filter(|n| *n < usize::MAX)
}

/// [`last_n`] as `/set` takes it.
fn latest(n: usize) -> String {
    last_n(n).map_or("all".to_string(), |n| n.to_string())
}

/// A random seed, short enough to be typed again.
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
        ("repeat-last-n", latest(sampling.last_n)),
        ("presence-penalty", sampling.presence_penalty.to_string()),
        ("frequency-penalty", sampling.frequency_penalty.to_string()),
        ("dry-multiplier", sampling.dry.multiplier.to_string()),
        ("dry-base", sampling.dry.base.to_string()),
        ("dry-allowed-length", sampling.dry.allowed_length.to_string()),
        ("dry-penalty-last-n", latest(sampling.dry.last_n)),
        ("xtc-probability", sampling.xtc.probability.to_string()),
        ("xtc-threshold", sampling.xtc.threshold.to_string()),
        ("seed", sampling.seed.to_string()),
        ("max-tokens", limit),
        ("stop", if stop.is_empty() { "none".to_string() } else { stop }),
    ]
}

/// Changes one setting by its flag's name; the error says what would have been right.
pub(crate) fn set(options: &mut GenerateOptions, key: &str, value: &str) -> Result<(), String> {
    let sampling = &mut options.sampling;
    let whole = || value.parse::<u64>().map_err(|_| "expected a whole number".to_string());
    // As the flags have it, -1 sets no bound, and no seed.
    let all = value == "all" || value == "-1";
    match key {
        "temp" => sampling.temperature = args::at_least_zero(value)?,
        "top-p" => sampling.top_p = args::probability(value)?,
        "min-p" => sampling.min_p = args::probability(value)?,
        "repeat-penalty" => sampling.repetition_penalty = args::above_zero(value)?,
        "presence-penalty" => sampling.presence_penalty = args::finite(value)?,
        "frequency-penalty" => sampling.frequency_penalty = args::finite(value)?,
        "repeat-last-n" if all => sampling.last_n = usize::MAX,
        "repeat-last-n" => sampling.last_n = whole()? as usize,
        "dry-multiplier" => sampling.dry.multiplier = args::at_least_zero(value)?,
        "dry-base" => sampling.dry.base = args::at_least_one(value)?,
        "dry-allowed-length" => sampling.dry.allowed_length = whole()? as usize,
        "dry-penalty-last-n" if all => sampling.dry.last_n = usize::MAX,
        "dry-penalty-last-n" => sampling.dry.last_n = whole()? as usize,
        "xtc-probability" => sampling.xtc.probability = args::probability(value)?,
        "xtc-threshold" => sampling.xtc.threshold = args::probability(value)?,
        "top-k" if value == "-1" => sampling.top_k = 0,
        "top-k" => sampling.top_k = whole()? as usize,
        "seed" if value == "-1" => sampling.seed = random_seed(),
        "seed" => sampling.seed = whole()?,
        "max-tokens" if value == "-1" => options.max_tokens = None,
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
        "repeat_last_n": last_n(sampling.last_n),
        "presence_penalty": short(sampling.presence_penalty),
        "frequency_penalty": short(sampling.frequency_penalty),
        "dry_multiplier": short(sampling.dry.multiplier),
        "dry_base": short(sampling.dry.base),
        "dry_allowed_length": sampling.dry.allowed_length,
        "dry_penalty_last_n": last_n(sampling.dry.last_n),
        "xtc_probability": short(sampling.xtc.probability),
        "xtc_threshold": short(sampling.xtc.threshold),
        "logit_bias": sampling.logit_bias.iter().map(|(t, b)| json!([t, b.to_string()])).collect::<Vec<_>>(),
        "seed": sampling.seed,
        "max_tokens": options.max_tokens,
        "stop": options.stop,
    })
}
