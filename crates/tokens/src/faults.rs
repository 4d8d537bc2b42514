//! Checks of the assumptions of the `tokenizers` crate, made before it gets a file's parts: where
//! one does not hold, the crate panics. [`caught`] is the last net below these checks.

use std::collections::HashSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use formats::{Error, Result};
use serde_json::Value;
use tokenizers::{AddedToken, NormalizedString, Normalizer, NormalizerWrapper};

/// Checks the members `normalizer`, `pre_tokenizer` and `post_processor` of a tokenizer.json.
pub(crate) fn check(place: &str, json: &Value) -> Result<()> {
    let at = |member: &str| format!("{place}: {member}");
    let mut growth = 1_usize;
    each_object(&json["normalizer"], &mut |part| {
        if part["prepend"] == "" {
            return Err(Error::new(at("normalizer: prepend"), "at least one character", "none"));
        }
        let longest = check_charsmap(&at("normalizer"), part)?;
        growth = growth.saturating_mul(longest.max(written(part)));
        if growth > GROWTH {
            let expected = format!("steps that make a text at most {GROWTH} times as long");
            return Err(Error::new(at("normalizer"), expected, format!("{growth} times")));
        }
        Ok(())
    })?;
    each_object(&json["pre_tokenizer"], &mut |part| match part["length"].as_u64() {
        Some(0) => Err(Error::new(at("pre_tokenizer: length"), "at least 1", 0)),
        _ => Ok(()),
    })?;
    let mut templates = 0;
    each_object(&json["post_processor"], &mut |part| {
        templates += usize::from(part["single"].is_array());
        check_template(&at("post_processor: single"), part)
    })?;
    if templates > 1 {
        // The second would be given the pieces of the first.
        return Err(Error::new(at("post_processor"), "at most one template", templates));
    }
    Ok(())
}

/// How many times as long a normaliser may make a text. Normalisers of real models write a
/// character for a character, and tables of normalisations up to 18.
const GROWTH: usize = 128;

/// Characters that a normaliser writes for each that it reads, at most; 1 where it is no
/// replacement.
fn written(part: &Value) -> usize {
    let texts = [&part["content"], &part["prepend"]].into_iter().filter_map(Value::as_str);
    texts.map(|text| text.chars().count()).max().unwrap_or(1).max(1)
}

/// Calls `check` with every object in a tree, outermost first.
fn each_object(value: &Value, check: &mut dyn FnMut(&Value) -> Result<()>) -> Result<()> {
    match value {
        Value::Object(fields) => {
            check(value)?;
            fields.values().try_for_each(|inner| each_object(inner, check))
        }
        Value::Array(items) => items.iter().try_for_each(|inner| each_object(inner, check)),
        _ => Ok(()),
    }
}

/// The template of one text must hold that text only, and special tokens that are listed.
fn check_template(place: &str, part: &Value) -> Result<()> {
    for piece in part["single"].as_array().into_iter().flatten() {
        let special = &piece["SpecialToken"]["id"];
        let known = special.as_str().is_none_or(|id| part["special_tokens"].get(id).is_some());
        let second = piece["Sequence"]["id"].as_str().is_some_and(|id| id != "A");
        if !known || second {
            return Err(Error::new(place, "sequence A and listed special tokens", piece));
        }
    }
    Ok(())
}

/// Added tokens are looked for in text as the normaliser leaves them, so something of them must be
/// left. And beside tokens that swallow the spaces behind them, there must be none of spaces that
/// swallow those in front: such a one could end before it begins.
pub(crate) fn check_added<'a>(
    place: &str,
    tokens: impl Iterator<Item = &'a AddedToken>,
    normalizer: Option<&NormalizerWrapper>,
) -> Result<()> {
    let wrong = |expected: &str, token: &AddedToken| {
        let found: String = token.content.chars().take(40).collect();
        Error::new(format!("{place}: added_tokens"), expected, format!("{found:?}"))
    };
    let (mut swallows, mut blank) = (false, None);
    for token in tokens.filter(|token| !token.content.is_empty()) {
        let mut text = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = normalizer.filter(|_| token.normalized) {
            normalizer.normalize(&mut text).map_err(|e| Error::new(place, "a normaliser", e))?;
        }
        if text.get().is_empty() {
            return Err(wrong("tokens that the normaliser leaves something of", token));
        }
        swallows |= token.rstrip;
        if token.lstrip && text.get().chars().all(char::is_whitespace) {
            blank = Some(token);
        }
    }
    match blank.filter(|_| swallows) {
        Some(token) => Err(wrong("no token of spaces with lstrip beside one with rstrip", token)),
        None => Ok(()),
    }
}

/// A SentencePiece table of normalisations: a trie as a double array of 32-bit units, and texts
/// between zero bytes.
///
/// ```text
/// bytes of the trie: u32, units: u32 each, texts
/// unit: 31 set: a value (0..31); else 10..32 offset, 9 offset in 256s, 8 has a value, 0..8 label
/// ```
/// Every walk that some text could take must stay inside the array, and every value must be a place
/// in the texts. Gives the length of the longest text, 1 where there is no table.
fn check_charsmap(place: &str, part: &Value) -> Result<usize> {
    let mut longest = 1;
    let stated = &part["precompiled_charsmap"];
    if part["type"] != "Precompiled" && stated.is_null() {
        return Ok(longest);
    }
    let place = format!("{place}: precompiled_charsmap");
    let wrong = |expected: &str, found: &str| Error::new(&place, expected, found);
    let text = stated.as_str().ok_or_else(|| wrong("base64", "no text"))?;
    let bytes = STANDARD.decode(text).map_err(|e| wrong("base64", &e.to_string()))?;
    let cut = || wrong("a trie and the texts behind it", "fewer bytes than it announces");
    let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(cut)?;
    let size = u32::from_le_bytes(*size) as usize;
    let (units, texts) = rest.split_at_checked(size).ok_or_else(cut)?;
    let texts = std::str::from_utf8(texts).map_err(|_| wrong("texts in UTF-8", "other bytes"))?;
    let units: Vec<u32> =
        units.as_chunks::<4>().0.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
    let outside = || wrong("a trie whose links stay inside it", "one that leads outside");
    let offset = |unit: u32| ((unit >> 10) as usize) << ((unit & 0x200) >> 6);
    let mut nodes = vec![offset(*units.first().ok_or_else(outside)?)];
    let mut seen: HashSet<usize> = nodes.iter().copied().collect();
    while let Some(node) = nodes.pop() {
        for label in 1..=255_u8 {
            let at = node ^ usize::from(label);
            let unit = *units.get(at).ok_or_else(outside)?;
            if unit & 0x8000_00FF != u32::from(label) {
                continue;
            }
            let child = at ^ offset(unit);
            if unit & 0x100 != 0 {
                let value = units.get(child).ok_or_else(outside)? & 0x7FFF_FFFF;
                let Some(text) = texts.get(value as usize..) else {
                    return Err(wrong("values inside the texts", "one outside"));
                };
                let length = text.chars().take(GROWTH + 1).take_while(|c| *c != '\0').count();
                longest = longest.max(length);
            }
            if seen.insert(child) {
                nodes.push(child);
            }
        }
    }
    Ok(longest)
}

/// Runs `work`, and turns a panic in it into an error at `place` without a word on standard error.
pub(crate) fn caught<T>(place: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    // What a panic leaves half-done is dropped with the tokenizer, or is a cache that is only
    // cleared.
    formats::caught(work).unwrap_or_else(|_| {
        Err(Error::new(place, "a tokenizer whose parts fit together", "one that breaks in use"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_panic_becomes_an_error_of_one_line_that_names_the_file() {
        let error = caught::<()>("some/tokenizer.json", || panic!("at /a/path/of/the/builder"));
        assert_eq!(
            error.unwrap_err().to_string(),
            "some/tokenizer.json: expected a tokenizer whose parts fit together, found one that breaks in use"
        );
        assert_eq!(caught("m", || Ok(1)), Ok(1));
    }

    #[test]
    fn texts_cannot_be_made_much_longer() {
        let replace = |content: &str| json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
        let long = replace(&"a".repeat(12));
        let cases = [
            (json!([long]), Ok(()), "once"),
            (
                json!([long, replace(""), {"type": "NFC"}, replace("b")]),
                Ok(()),
                "once among others",
            ),
            (json!([long, [long]]), Err("144 times"), "twice"),
            (
                json!([{"type": "Prepend", "prepend": "a".repeat(200)}]),
                Err("200 times"),
                "in front",
            ),
            (
                json!([charsmap(|_, texts| texts.splice(0..0, [b'b'; 999]).for_each(drop))]),
                Err("129 times"),
                "by a table",
            ),
        ];
        for (normalizers, expected, why) in cases {
            let found = check("m", &json!({"normalizer": {"normalizers": normalizers}}));
            match (found, expected) {
                (Ok(()), Ok(())) => {}
                (Err(error), Err(part)) => {
                    assert!(error.to_string().contains(part), "{why}: {error}")
                }
                (found, _) => panic!("{why}: {found:?}"),
            }
        }
    }

    /// A table that writes "A" for "a": the root's node is 256, the unit of `a` there leads to node
    /// 512.
    fn charsmap(change: impl Fn(&mut Vec<u32>, &mut Vec<u8>)) -> Value {
        let mut units = vec![0_u32; 768];
        units[0] = 256 << 10;
        let (at, child) = (256 ^ usize::from(b'a'), 512);
        units[at] = (((at ^ child) as u32) << 10) | 0x100 | u32::from(b'a');
        units[child] = 1 << 31;
        let mut texts = b"A\0".to_vec();
        change(&mut units, &mut texts);
        let size = 4 * units.len() as u32;
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        let bytes: Vec<u8> = size.to_le_bytes().into_iter().chain(units).chain(texts).collect();
        json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(bytes)})
    }

    #[test]
    fn tables_of_normalisations_are_followed_to_their_ends() {
        let whole = charsmap(|_, _| {});
        assert_eq!(check("m", &json!({"normalizer": {"normalizers": [whole.clone()]}})), Ok(()));
        let made: NormalizerWrapper = serde_json::from_value(whole).unwrap();
        let mut text = NormalizedString::from("banana");
        made.normalize(&mut text).unwrap();
        assert_eq!(text.get(), "bAnAnA");

        let (a, outside) = (256 ^ usize::from(b'a'), 1 << 20);
        let cases: [(Value, &str); 9] = [
            (json!({"type": "Precompiled"}), "no text"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "AA"}), "base64"),
            (json!({"type": "Precompiled", "precompiled_charsmap": ""}), "announces"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="}), "announces"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}), "outside"),
            (charsmap(|units, _| units[0] = outside << 10), "outside"),
            (charsmap(|units, _| units[a] = (outside << 10) | 0x100 | u32::from(b'a')), "outside"),
            (charsmap(|units, _| units[512] = (1 << 31) | 9), "values inside the texts"),
            (charsmap(|_, texts| texts[0] = 0xFF), "UTF-8"),
        ];
        for (part, expected) in cases {
            let error = check("m", &json!({"normalizer": part})).unwrap_err().to_string();
            assert!(error.starts_with("m: normalizer: precompiled_charsmap: "), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}
