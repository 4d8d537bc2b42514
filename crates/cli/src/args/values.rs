//! The values of flags, read from text: numbers of a range, sizes, tokens.

use std::ops::RangeInclusive;

/// More positions than any model has.
pub(crate) const MOST: u64 = 1 << 24;

pub(crate) fn positive() -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync {
    whole(1..=MOST)
}

/// A number of bytes: alone, or with K, M, G or T for powers of 1024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let upper = text.to_ascii_uppercase();
    let (number, shift) = match upper.trim_end_matches('B').trim_end_matches('I') {
        rest if rest.ends_with('K') => (&rest[..rest.len() - 1], 10),
        rest if rest.ends_with('M') => (&rest[..rest.len() - 1], 20),
        rest if rest.ends_with('G') => (&rest[..rest.len() - 1], 30),
        rest if rest.ends_with('T') => (&rest[..rest.len() - 1], 40),
        rest => (rest, 0),
    };
    let number: Option<f64> = number.parse().ok().filter(|n: &f64| (0.0..1e15).contains(n));
    let bytes = number.map(|number| number * (1u64 << shift) as f64).filter(|n| *n < 1e18);
    bytes.map(|bytes| bytes as u64).ok_or_else(|| "expected bytes, such as 20G or 800M".to_string())
}

/// A whole number of a range.
pub(crate) fn whole(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync {
    move |text| {
        let found = text.parse().ok().filter(|value| range.contains(value));
        found.ok_or_else(|| {
            format!("expected a whole number from {} to {}", range.start(), range.end())
        })
    }
}

/// A number, or none: what -1 means to a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrNone(pub(crate) Option<u64>);

pub(super) fn or_none(text: &str) -> Result<OrNone, String> {
    if text == "-1" {
        return Ok(OrNone(None));
    }
    let found = text.parse().map(|value| OrNone(Some(value)));
    found.map_err(|_| "expected a whole number, or -1".to_string())
}

pub(super) fn origin(text: &str) -> Result<String, String> {
    if serve::is_origin(text) {
        return Ok(text.to_string());
    }
    let expected = "expected an origin as browsers send it, in small letters and without a path, such as https://example.com";
    let each = "; name each site: with * any page of the web could use this server";
    Err(format!("{expected}{}", if text == "*" { each } else { "" }))
}

pub(super) fn top_k(text: &str) -> Result<u32, String> {
    if text == "-1" {
        return Ok(0);
    }
    text.parse().map_err(|_| "expected a whole number, or -1".to_string())
}

pub(super) fn token(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "expected the ids of tokens, as in 1,15043".to_string())
}

pub(super) fn some_text(text: &str) -> Result<String, String> {
    let some = (!text.is_empty()).then(|| text.to_string());
    some.ok_or_else(|| "expected some text: nothing would be met at once".to_string())
}

/// How many come each second.
pub(super) fn rate(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite());
    found.ok_or_else(|| "expected a number above 0".to_owned())
}

fn number(text: &str, holds: impl Fn(f32) -> bool, expected: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|value: &f32| value.is_finite() && holds(*value))
        .ok_or_else(|| format!("expected {expected}"))
}

/// A token and what is added to its logit, with llama.cpp's spelling.
pub(super) fn bias(text: &str) -> Result<(u32, f32), String> {
    let sign = text.find(['+', '-']).unwrap_or(text.len());
    let (token, bias) = text.split_at(sign);
    let bias = bias.parse().ok().filter(|bias: &f32| !bias.is_nan() && *bias < f32::INFINITY);
    let pair = token.parse().ok().zip(bias);
    pair.ok_or_else(|| {
        "expected a token's id and a number with its sign, as in 15043-1".to_string()
    })
}

pub(crate) fn at_least_one(text: &str) -> Result<f32, String> {
    number(text, |value| value >= 1.0, "a number of at least 1")
}

pub(crate) fn finite(text: &str) -> Result<f32, String> {
    number(text, |_| true, "a number")
}

pub(crate) fn at_least_zero(text: &str) -> Result<f32, String> {
    number(text, |value| value >= 0.0, "a number of at least 0")
}

pub(crate) fn above_zero(text: &str) -> Result<f32, String> {
    number(text, |value| value > 0.0, "a number above 0")
}

pub(crate) fn below_one(text: &str) -> Result<f32, String> {
    number(text, |value| (0.0..1.0).contains(&value), "a number from 0 to below 1")
}

pub(crate) fn probability(text: &str) -> Result<f32, String> {
    number(text, |value| (0.0..=1.0).contains(&value), "a number from 0 to 1")
}
