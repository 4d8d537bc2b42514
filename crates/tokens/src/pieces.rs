//! The text of each token: the bytes of every id in one buffer, and which ids are special.

/// Bytes and kind of every token, by id.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// End of each piece in `bytes`.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// The treatment of the leading space of a whole text.
    pub(crate) leading: Leading,
}

/// How decoding treats spaces at the very start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Leading {
    /// Keeps them.
    #[default]
    Keep,
    /// Drops at most this many.
    Drop(usize),
    /// Drops all spaces that the first token begins with.
    DropOfFirstToken,
}

impl Pieces {
    pub(crate) fn new(leading: Leading) -> Self {
        Pieces { leading, ..Pieces::default() }
    }

    /// Appends the next id's piece. Pieces of more than 4 GiB in all are refused.
    pub(crate) fn push(&mut self, piece: &[u8], special: bool) -> bool {
        self.bytes.extend_from_slice(piece);
        let Ok(end) = u32::try_from(self.bytes.len()) else { return false };
        self.ends.push(end);
        self.special.push(special);
        true
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of an id; empty for an id outside the vocabulary.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..end as usize]
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// The byte that a character of GPT-2's printable alphabet stands for.
///
/// Printable Latin-1 stands for itself; the other 68 bytes, in order, are U+0100 onwards.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The character of GPT-2's printable alphabet that stands for a byte: the inverse of `byte_of`.
pub fn char_of(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7f..=0xa0 => 0x121 + u32::from(byte) - 0x7f,
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The bytes of a token spelled in GPT-2's alphabet; a token with any other character is plain
/// text.
pub(crate) fn byte_level(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(byte_of)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte of a token such as `<0x0A>`.
pub(crate) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_a_bijection() {
        let alphabet: std::collections::BTreeSet<char> = (0..=255).map(char_of).collect();
        assert_eq!(alphabet.len(), 256);
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        let published = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        assert!(alphabet.iter().all(|c| published.contains(c)));
        assert_eq!(
            (char_of(b' '), char_of(b'\n'), byte_of('\u{144}')),
            ('\u{120}', '\u{10a}', None)
        );
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xfF>"), Some(255));
        for text in ["<0x+A>", "<0x0>", "<0x00A>", "0x0A", "<0x\u{e9}>"] {
            assert_eq!(byte_token(text), None, "{text}");
        }
    }
}
