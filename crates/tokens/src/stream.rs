//! Tokens to text, one at a time, in linear time.
//!
//! Bytes are held back only while they are the beginning of a character. What is no UTF-8 becomes
//! U+FFFD, one for each maximal part as [`String::from_utf8_lossy`] does, so all outputs joined
//! equal the decoding of all tokens.

use std::sync::Arc;

use crate::pieces::{Leading, Pieces};

/// A detokeniser that is fed token by token; see [`crate::Tokenizer::stream`].
#[derive(Debug, Clone)]
pub struct Stream {
    pieces: Arc<Pieces>,
    skip_special: bool,
    /// Special tokens that are text all the same.
    shown: Vec<u32>,
    /// The first bytes of an unfinished character, at most three.
    pending: Vec<u8>,
    leading: Leading,
}

impl Stream {
    pub(crate) fn new(pieces: Arc<Pieces>, skip_special: bool) -> Self {
        let leading = pieces.leading;
        Stream { pieces, skip_special, shown: Vec::new(), pending: Vec::new(), leading }
    }

    /// The same, where these special tokens are text all the same.
    pub(crate) fn showing(self, shown: Vec<u32>) -> Self {
        Stream { shown, ..self }
    }

    /// Takes the next token; the text that is now certain, if there is any. Ids outside the
    /// vocabulary say nothing.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut text = String::new();
        self.push_to(id, &mut text);
        (!text.is_empty()).then_some(text)
    }

    /// As [`Stream::push`], appending to `text`.
    pub fn push_to(&mut self, id: u32, text: &mut String) {
        if self.skip_special && self.pieces.is_special(id) && !self.shown.contains(&id) {
            return;
        }
        let mut piece = self.pieces.get(id);
        match self.leading {
            Leading::Keep => {}
            Leading::Drop(most) => {
                let spaces = piece.iter().take_while(|b| **b == b' ').count().min(most);
                piece = &piece[spaces..];
                self.leading =
                    if piece.is_empty() { Leading::Drop(most - spaces) } else { Leading::Keep };
            }
            Leading::DropOfFirstToken => {
                let spaces = piece.iter().take_while(|b| **b == b' ').count();
                piece = &piece[spaces..];
                self.leading = Leading::Keep;
            }
        }
        if self.pending.is_empty() {
            // The common case copies nothing but the text itself.
            let rest = decode_prefix(piece, text);
            self.pending.extend_from_slice(rest);
        } else {
            self.pending.extend_from_slice(piece);
            let bytes = std::mem::take(&mut self.pending);
            let rest = decode_prefix(&bytes, text);
            self.pending.extend_from_slice(rest);
        }
    }

    /// Ends the text: an unfinished character becomes U+FFFD. The stream can then begin a new text.
    pub fn flush(&mut self) -> Option<String> {
        self.leading = self.pieces.leading;
        let pending = std::mem::take(&mut self.pending);
        (!pending.is_empty()).then(|| String::from_utf8_lossy(&pending).into_owned())
    }
}

/// Appends the text of `bytes` up to an unfinished character, which is returned.
fn decode_prefix<'a>(mut bytes: &'a [u8], text: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                match error.error_len() {
                    None => return rest,
                    Some(length) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        bytes = &rest[length..];
                    }
                }
            }
        }
    }
}
