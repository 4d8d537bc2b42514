//! What the `tokenizers` crate takes for granted, checked before it is given a file's parts: where it does not hold, the crate
//! panics. [`caught`] is the last net below these checks.

use std::collections::HashSet;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use formats::{Error, Result};
use serde_json::Value;
use tokenizers::AddedToken;

/// Checks the members `normalizer`, `pre_tokenizer` and `post_processor` of a tokenizer.json.
pub(crate) fn check(place: &str, json: &Value) -> Result<()> {
    let at = |member: &str| format!("{place}: {member}");
    each_object(&json["normalizer"], &mut |part| check_charsmap(&at("normalizer"), part))?;
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

/// Added tokens that swallow the spaces behind them beside tokens that are spaces: the second kind could end before it begins.
pub(crate) fn check_added<'a>(
    place: &str,
    tokens: impl Iterator<Item = &'a AddedToken> + Clone,
) -> Result<()> {
    let blank = |t: &&AddedToken| t.lstrip && t.content.chars().all(char::is_whitespace);
    if tokens.clone().any(|t| t.rstrip)
        && let Some(token) = tokens.clone().find(blank)
    {
        let expected = "no token of spaces with lstrip beside one with rstrip";
        return Err(Error::new(
            format!("{place}: added_tokens"),
            expected,
            format!("{:?}", token.content),
        ));
    }
    Ok(())
}

/// A SentencePiece table of normalisations: a trie as a double array of 32-bit units, and texts between zero bytes.
///
/// ```text
/// bytes of the trie: u32, units: u32 each, texts
/// unit: 31 set: a value (0..31); else 10..32 offset, 9 offset in 256s, 8 has a value, 0..8 label
/// ```
/// Every walk that some text could take must stay inside the array, and every value must be a place in the texts.
fn check_charsmap(place: &str, part: &Value) -> Result<()> {
    let stated = &part["precompiled_charsmap"];
    if part["type"] != "Precompiled" && stated.is_null() {
        return Ok(());
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
                if !texts.is_char_boundary(value as usize) {
                    return Err(wrong("values inside the texts", "one outside"));
                }
            }
            if seen.insert(child) {
                nodes.push(child);
            }
        }
    }
    Ok(())
}

/// Runs `work`, and turns a panic in it into an error at `place` without a word on standard error.
pub(crate) fn caught<T>(place: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    // What a panic leaves half-done is dropped with the tokenizer, or is a cache that is only cleared.
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

    /// A table that writes "A" for "a": the root's node is 256, the unit of `a` there leads to node 512.
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
        use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};
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
