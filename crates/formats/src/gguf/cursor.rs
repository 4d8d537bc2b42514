//! A bounds-checked reader of little-endian numbers and length-prefixed strings.

use crate::{Error, Result};

/// Reads forward through untrusted bytes; every failure names the place.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    place: &'a str,
    /// Lengths and counts are 64 bits wide from version 2 on, 32 bits in version 1.
    pub(super) wide: bool,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], place: &'a str) -> Self {
        Cursor { bytes, at: 0, place, wide: true }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes left.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8]> {
        let left = self.left();
        match usize::try_from(count).ok().filter(|&count| count <= left) {
            Some(count) => {
                let taken = &self.bytes[self.at..self.at + count];
                self.at += count;
                Ok(taken)
            }
            None => Err(self.short(format!("{what} of {count} bytes"))),
        }
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        match self.bytes[self.at..].first_chunk::<N>() {
            Some(chunk) => {
                self.at += N;
                Ok(*chunk)
            }
            None => Err(self.short(format!("{what} of {N} bytes"))),
        }
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length, count or dimension: as wide as the version says.
    pub(super) fn length(&mut self, what: &str) -> Result<u64> {
        if self.wide { self.u64(what) } else { Ok(u64::from(self.u32(what)?)) }
    }

    /// A count of things that take at least `least` bytes each, checked against the bytes that are
    /// left.
    pub(super) fn count(&mut self, what: &str, least: usize) -> Result<usize> {
        let count = self.length(what)?;
        let most = self.left() / least;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(self.short(format!("{what} of {count}, at least {least} bytes each"))),
        }
    }

    /// The bytes of a length-prefixed string.
    pub(super) fn string_bytes(&mut self, what: &str) -> Result<&'a [u8]> {
        let length = self.length(what)?;
        self.take(length, what)
    }

    /// A length-prefixed string that must be UTF-8.
    pub(super) fn name(&mut self, what: &str) -> Result<String> {
        let at = self.at;
        match std::str::from_utf8(self.string_bytes(what)?) {
            Ok(name) => Ok(name.to_string()),
            Err(_) => Err(Error::new(
                self.place,
                format!("{what} in UTF-8"),
                format!("other bytes at offset {at}"),
            )),
        }
    }

    fn short(&self, expected: String) -> Error {
        let found = format!("{} bytes left at offset {}", self.left(), self.at);
        Error::new(self.place, expected, found)
            .hint("the file is damaged or cut short; download it again")
    }
}
