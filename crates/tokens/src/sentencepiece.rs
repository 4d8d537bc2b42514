//! SentencePiece's own file, `tokenizer.model`, as the GGUF vocabulary that says the same.
//!
//! The file is a protocol buffer: pieces with their scores and kinds, then what the trainer and the
//! normaliser were told. Fields that say nothing about how a text is cut are passed over.

use std::path::Path;

use formats::{Error, Result};

use crate::folder::is_there;
use crate::gguf::{GgufVocabulary, VocabularyOrigin, kind};

/// The file's name.
const NAME: &str = "tokenizer.model";
/// Larger files are no vocabularies.
const LARGEST: u64 = 256 << 20;

/// The vocabulary of a folder's `tokenizer.model`; `None` where there is none.
///
/// # Errors
/// A file that is no such model, or one of whole words or characters, or one that brings texts to a
/// form by a table.
pub(crate) fn read(folder: &Path) -> Result<Option<GgufVocabulary>> {
    let path = folder.join(NAME);
    let place = path.display().to_string();
    if !is_there(&path, LARGEST)? {
        return Ok(None);
    }
    let bytes = formats::text::bytes(&path, LARGEST)?;
    vocabulary(place, &bytes).map(Some)
}

/// A field's value.
enum Value<'a> {
    Varint(u64),
    Fixed(u32),
    Bytes(&'a [u8]),
}

/// The fields of a message, one after the other; `None` in place of what is no field.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(front)
    }

    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take(8).map(Value::Bytes)?,
            2 => {
                let count = self.varint()?;
                Value::Bytes(self.take(count)?)
            }
            5 => Value::Fixed(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

fn vocabulary(place: String, bytes: &[u8]) -> Result<GgufVocabulary> {
    let odd = || {
        let error =
            Error::new(&place, "a model of SentencePiece", "another file, or a damaged one");
        match formats::pointer_hint(bytes) {
            Some(hint) => error.hint(hint),
            None => error.hint("a tokenizer.json beside it would be read in its place"),
        }
    };
    let mut v = GgufVocabulary {
        origin: VocabularyOrigin::File(place.clone()),
        add_space_prefix: Some(true),
        remove_extra_whitespaces: Some(true),
        ..GgufVocabulary::default()
    };
    // Where the trainer was told nothing: what SentencePiece takes for granted.
    let mut model = 1;
    let mut ids = [0i64, 1, 2, -1];
    for field in Fields(bytes) {
        match field.ok_or_else(odd)? {
            (1, Value::Bytes(piece)) => {
                let (mut text, mut score, mut own) = (String::new(), 0.0, kind::NORMAL);
                for field in Fields(piece) {
                    match field.ok_or_else(odd)? {
                        (1, Value::Bytes(bytes)) => {
                            text = std::str::from_utf8(bytes).map_err(|_| odd())?.to_owned();
                        }
                        (2, Value::Fixed(bits)) => score = f32::from_bits(bits),
                        (3, Value::Varint(kind)) => own = kind as i32,
                        _ => {}
                    }
                }
                v.tokens.push(text);
                v.scores.push(score);
                v.token_types.push(own);
            }
            (2, Value::Bytes(trainer)) => {
                for field in Fields(trainer) {
                    match field.ok_or_else(odd)? {
                        (3, Value::Varint(kind)) => model = kind,
                        (at @ 40..=43, Value::Varint(id)) => ids[at as usize - 40] = id as i64,
                        _ => {}
                    }
                }
            }
            (3, Value::Bytes(normaliser)) => {
                for field in Fields(normaliser) {
                    match field.ok_or_else(odd)? {
                        (2, Value::Bytes(table)) => v.charsmap = !table.is_empty(),
                        (3, Value::Varint(on)) => v.add_space_prefix = Some(on != 0),
                        (4, Value::Varint(on)) => v.remove_extra_whitespaces = Some(on != 0),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if v.tokens.is_empty() {
        return Err(odd());
    }
    v.model = match model {
        1 => "t5",
        2 => "llama",
        _ => {
            let found = if model == 3 { "whole words" } else { "characters" };
            return Err(Error::new(place, "pieces by merging or by odds (unigram)", found));
        }
    }
    .to_owned();
    if v.charsmap {
        let expected = "texts that are cut as they are";
        return Err(Error::new(place, expected, "a table by which they are brought to a form")
            .hint("save the tokenizer with Transformers: its tokenizer.json states the same"));
    }
    let count = v.tokens.len();
    let id = |at: usize| u32::try_from(ids[at]).ok().filter(|id| (*id as usize) < count);
    (v.unk, v.bos, v.eos, v.pad) = (id(0), id(1), id(2), id(3));
    // As Transformers does with the families that have such files.
    v.add_bos = Some(v.bos.is_some());
    v.add_eos = Some(false);
    Ok(v)
}
