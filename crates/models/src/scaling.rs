//! The rotation of q and k as configurations state it: base, part of each head, and how both are
//! stretched.

use crate::config::LIMIT;
use crate::files::Files;
use crate::keys::{Dialect, Key, Keys};
use crate::rope::{Rotation, Scaling, Yarn};
use crate::stated::Stated;
use formats::{Error, Result, shape};

/// Reads the rotation of heads of `width` elements.
///
/// # Errors
/// A key that is missing, unknown or out of range.
pub(crate) fn read(files: &Files<'_>, width: usize) -> Result<Rotation> {
    let keys = &files.keys;
    if keys.dialect() == Dialect::Gguf {
        let theta = keys.number_or("rope.freq_base", 10_000.0)?;
        let (rotary, scaling) = (keys.size("rope.dimension_count")?, of_gguf(files)?);
        return Ok(Rotation { theta, rotary, scaling });
    }
    let (own, older) = (stated(keys, PARAMETERS)?, stated(keys, OLDER)?);
    let Some(older) = older else { return of_object(files, PARAMETERS, own.as_ref(), width) };
    // It takes the place of the newer object, base and all, as in Transformers.
    if let Some(own) = own {
        let base = older.number("rope_theta")?.or(keys.number("rope_theta")?);
        let whole = base.is_some() || own.number("rope_theta")?.is_none();
        if !whole || own.get("full_attention").is_some() {
            let expected = format!("nothing, or the base too, since {PARAMETERS} is there as well");
            return Err(keys.wrong(OLDER, expected, "a rotation without its base"));
        }
        own.note_all();
    }
    of_object(files, OLDER, Some(&older), width)
}

/// The object under `key`, if it says anything.
fn stated<'a>(keys: &Keys<'a>, key: &'static str) -> Result<Option<Keys<'a>>> {
    let empty = keys.get(key).is_some_and(|value| *value == serde_json::json!({}));
    Ok(keys.object(key)?.filter(|_| !empty))
}

/// The object that states the rotation, and the one in which older files do.
const PARAMETERS: &str = "rope_parameters";
const OLDER: &str = "rope_scaling";

/// Reads the rotation that `rope_parameters` states for one kind of layer, such as
/// `full_attention`; none where it does not tell kinds apart.
///
/// # Errors
/// As [`read`].
pub(crate) fn of_kind(
    files: &Files<'_>,
    kind: &'static str,
    width: usize,
) -> Result<Option<Rotation>> {
    let Some(all) = files.keys.object(PARAMETERS)? else { return Ok(None) };
    let Some(rope) = all.object(kind)? else { return Ok(None) };
    of_object(files, PARAMETERS, Some(&rope), width).map(Some)
}

/// As [`of_kind`], with the base and the stretching that a class has where nothing is stated.
///
/// # Errors
/// As [`read`].
pub(crate) fn of_kind_or(
    files: &Files<'_>,
    kind: &'static str,
    width: usize,
    (base, scaling): (f64, Scaling),
) -> Result<Rotation> {
    let usual = Rotation {
        theta: files.keys.stated(PARAMETERS, base),
        rotary: None,
        scaling: files.keys.stated(PARAMETERS, scaling),
    };
    Ok(of_kind(files, kind, width)?.unwrap_or(usual))
}

/// Reads a rotation from the object under `key`, or beside it.
fn of_object(
    files: &Files<'_>,
    key: &'static str,
    rope: Option<&Keys<'_>>,
    width: usize,
) -> Result<Rotation> {
    let (keys, unsaid) = (&files.keys, files.architecture.unsaid);
    let either = |key: &'static str| {
        let within = rope.map(|rope| rope.number(key)).transpose()?.flatten();
        let outside = keys.number(key)?;
        Ok(within.or(outside))
    };
    // Where nothing is stretched, it says no more than the context: Phi-3 Mini states it all the
    // same.
    keys.note("original_max_position_embeddings");
    let mut theta =
        either("rope_theta")?.unwrap_or_else(|| keys.stated("rope_theta", unsaid.theta));
    let alpha = rope.map(|rope| rope.number("alpha")).transpose()?.flatten();
    if let (Some(alpha), Some(rope)) = (alpha, rope) {
        // Hunyuan's: a base that is stretched for all contexts, called `dynamic` all the same.
        for kind in ["rope_type", "type"] {
            rope.only(kind, &["dynamic"])?;
        }
        for key in ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"] {
            rope.note(key);
        }
        let dims = width.max(3) as f64;
        theta.value *= alpha.positive()?.powf(dims / (dims - 2.0));
        return Ok(Rotation { theta, rotary: None, scaling: keys.stated(key, Scaling::None) });
    }
    let part = either("partial_rotary_factor")?;
    let mut scaling = rope.map_or(Ok(Scaling::None), |rope| of_json(rope, keys))?;
    if let Scaling::Proportional { part: turns, .. } = &mut scaling {
        // All of the head is rotated, some of it by nothing.
        if let Some(part) = part {
            if !(0.0..=1.0).contains(&part.value) {
                return Err(part.wrong("a part from 0 to 1", part.value));
            }
            *turns = part.value;
        }
        return Ok(Rotation { theta, rotary: None, scaling: keys.stated(key, scaling) });
    }
    let rotary = part.map(|part| part.map(|part| (part * width as f64) as usize));
    Ok(Rotation { theta, rotary, scaling: keys.stated(key, scaling) })
}

fn of_json(rope: &Keys<'_>, keys: &Keys<'_>) -> Result<Scaling> {
    let older = rope.text("type")?;
    let (key, kind) = match rope.text("rope_type")? {
        Some(kind) => ("rope_type", Some(kind)),
        None => ("type", older),
    };
    let need = |key: &'static str| rope.needed_number(key)?.positive();
    let trained = || keys.needed_number("max_position_embeddings");
    const ORIGINAL: &str = "original_max_position_embeddings";
    // One beside the object counts, or that of the class, as in Transformers.
    let outside = match keys.number(ORIGINAL)? {
        Some(number) => Some(number),
        None => keys.size(ORIGINAL)?.map(|size| size.map(|size| size as f64)),
    };
    let original = || match outside.clone().or(rope.number(ORIGINAL)?) {
        Some(original) => original.positive(),
        None => trained()?.positive(),
    };
    match kind {
        // Positions in three axes, which a text has alike.
        None | Some("default" | "mrope") => Ok(Scaling::None),
        Some("linear") => Ok(Scaling::Linear { factor: need("factor")? }),
        Some("proportional") => Ok(Scaling::Proportional {
            part: 1.0,
            factor: rope.number_or("factor", 1.0)?.positive()?,
        }),
        Some("dynamic") => {
            // Transformers goes by the whole context, whatever else is said.
            rope.note(ORIGINAL);
            Ok(Scaling::Dynamic { factor: need("factor")?, original: trained()?.positive()? })
        }
        Some("llama3") => {
            let (low, high) = (need("low_freq_factor")?, rope.needed_number("high_freq_factor")?);
            // The same: no pairs lie between, as in Llama 4 Scout.
            if high.positive()? < low {
                let expected = format!("at least low_freq_factor = {low}");
                return Err(high.wrong(expected, high.value));
            }
            Ok(Scaling::Llama3 {
                factor: need("factor")?,
                low,
                high: high.value,
                original: original()?,
            })
        }
        Some("longrope" | "su") => {
            let original = original()?;
            let factor = match rope.number("factor")? {
                Some(factor) => factor.positive()?,
                None => trained()?.positive()? / original,
            };
            let factors = |key: &'static str| {
                let missing = || rope.wrong(key, "a list of numbers", "nothing");
                rope.numbers(key)?.ok_or_else(missing)
            };
            let usual = match rope.number("attention_factor")? {
                Some(magnitude) => magnitude.positive()?,
                None if factor <= 1.0 => 1.0,
                None => (1.0 + factor.ln() / original.ln()).sqrt(),
            };
            let own = |key: &'static str| {
                rope.number(key)?.map_or(Ok(usual), |magnitude| magnitude.positive())
            };
            let magnitudes = [own("short_mscale")?, own("long_mscale")?];
            Ok(Scaling::Long {
                short: factors("short_factor")?,
                long: factors("long_factor")?,
                original,
                magnitudes,
            })
        }
        Some("yarn" | "deepseek_yarn") => {
            let original = original()?;
            let stretched = match rope.number("factor")? {
                Some(factor) => factor,
                None => trained()?.map(|context| context / original),
            };
            let factor = stretched.positive()?;
            // Zero says nothing.
            let or = |key: &'static str, usual: f64| match rope.number(key)? {
                Some(number) if number.value != 0.0 => number.positive(),
                _ => Ok(usual),
            };
            let scale = |key: &'static str| {
                Ok(rope.number(key)?.map(|scale| scale.value).filter(|scale| *scale != 0.0))
            };
            let (scales, stated) =
                ((scale("mscale")?, scale("mscale_all_dim")?), rope.number(ATTENTION_FACTOR)?);
            let magnitude = match (stated, scales) {
                (Some(magnitude), _) => magnitude.positive()?,
                (None, (Some(a), Some(b))) => {
                    Yarn::magnitude(factor, a) / Yarn::magnitude(factor, b)
                }
                _ => Yarn::magnitude(factor, 1.0),
            };
            let yarn = Yarn {
                factor,
                original,
                fast: or("beta_fast", 32.0)?,
                slow: or("beta_slow", 1.0)?,
                truncate: rope.flag("truncate")?.unwrap_or(true),
                magnitude,
            };
            yarn.check(&stretched, LIMIT)?;
            Ok(Scaling::Yarn(yarn))
        }
        Some(other) => Err(rope.wrong(
            key,
            "default, linear, dynamic, llama3, yarn, longrope or proportional",
            brief(other),
        )),
    }
}

/// The beginning of a text that an error names.
fn brief(text: &str) -> String {
    text.chars().take(40).collect()
}

/// A stored list of one factor per pair.
fn factors(files: &Files<'_>, canonical: &str) -> Result<Option<Vec<f32>>> {
    let (Some(stored), Some(tensors)) = (files.names.find(canonical)?, files.tensors) else {
        return Ok(None);
    };
    // A larger tensor is a lie, and is not decoded.
    let count: usize = stored.shape.iter().product();
    let place = || files.names.place(canonical);
    if stored.shape.len() != 1 || count > 1 << 13 {
        return Err(Error::new(place(), "one factor per pair", shape(&stored.shape)));
    }
    let factors = stored.source.read(tensors).and_then(|factors| factors.to_f32());
    factors.map(Some).map_err(|e| Error { place: place(), ..e })
}

/// YaRN's magnitude, where a configuration states it.
const ATTENTION_FACTOR: Key = Key("attention_factor", "rope.scaling.yarn_attn_factor");

/// GGUF's key for the weight of the logarithm in the magnitude that YaRN's is divided by.
pub(crate) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// The magnitude of a context `factor` times as long, as GGUF's readers take it.
pub(crate) fn yarn_magnitude(factor: f64, log_multiplier: f64) -> f64 {
    Yarn::magnitude(factor, 1.0) / Yarn::magnitude(factor, log_multiplier)
}

fn of_gguf(files: &Files<'_>) -> Result<Stated<Scaling>> {
    const KIND: &str = "rope.scaling.type";
    const ORIGINAL: &str = "rope.scaling.original_context_length";
    let keys = &files.keys;
    let kind = keys.text(KIND)?;
    let factor = keys.number("rope.scaling.factor")?;
    let older = keys.number("rope.scale_linear")?;
    let factor = factor.or(older);
    let (original, magnitude) = (keys.number(ORIGINAL)?, keys.number("rope.scaling.attn_factor")?);
    let [fast, slow] = ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"]
        .map(|key| keys.number(Key("", key)));
    let (fast, slow) = (fast?, slow?);
    let log = keys.number(Key("", LOG_MULTIPLIER))?.map_or(0.0, |log| log.value);
    // What OLMo 3's files say of the magnitude that the factor gives, too; ggml does not read it.
    keys.number(ATTENTION_FACTOR)?;
    let or = |number: Option<Stated<f64>>, usual: f64| {
        number.map_or(Ok(usual), |number| number.positive())
    };
    let original = || match &original {
        Some(original) => original.positive(),
        None => keys.needed_number("context_length")?.positive(),
    };

    if let Some(factors) = factors(files, "rope_factors")? {
        // The tensor itself states them.
        return Ok(keys.at("rope_freqs.weight", Scaling::Factors(factors)));
    }
    if let (Some(long), Some(short)) =
        (factors(files, "rope_factors_long")?, factors(files, "rope_factors_short")?)
    {
        let magnitudes = [or(magnitude, 1.0)?; 2];
        let scaling = Scaling::Long { short, long, original: original()?, magnitudes };
        return Ok(keys.at("rope_factors_short.weight", scaling));
    }
    let scaling = match (kind, factor) {
        (Some("none"), _) | (_, None) => Scaling::None,
        (None | Some("linear"), Some(factor)) => Scaling::Linear { factor: factor.positive()? },
        (Some("yarn"), Some(factor)) => {
            let stretched = factor.positive()?;
            let yarn = Yarn {
                factor: stretched,
                original: original()?,
                fast: or(fast, 32.0)?,
                slow: or(slow, 1.0)?,
                truncate: true,
                magnitude: or(magnitude, 1.0)? * yarn_magnitude(stretched, log),
            };
            yarn.check(&factor, LIMIT)?;
            Scaling::Yarn(yarn)
        }
        (Some(other), _) => return Err(keys.wrong(KIND, "none, linear or yarn", brief(other))),
    };
    Ok(keys.stated(KIND, scaling))
}
