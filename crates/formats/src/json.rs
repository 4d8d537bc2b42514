//! JSON files that other programs wrote: of a length that a caller allows, and as Python writes them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::clipped;
use crate::front::{pointer_hint, unmarked};
use crate::{Error, ErrorKind, Result};

/// The content of a JSON file of at most `most` bytes.
///
/// # Errors
/// A file that cannot be read, is longer, or is no JSON as [`json_of_python`] takes it.
pub fn read(path: &Path, most: u64) -> Result<Value> {
    let place = path.display();
    let io = |e| Error::io(&place, e);
    let file = File::open(path).map_err(io)?;
    let long = |found: u64| Error::new(&place, format!("at most {most} bytes of JSON"), found);
    let size = file.metadata().map_err(io)?.len();
    if size > most {
        return Err(long(size));
    }
    let mut bytes = Vec::new();
    // A file may grow, and a device has no length.
    file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > most {
        return Err(long(bytes.len() as u64));
    }
    json_of_python(&bytes).map_err(|e| {
        let error = Error::new(&place, "", format!("no valid JSON: {}", clipped(&e.to_string())));
        match pointer_hint(&bytes) {
            Some(hint) => error.hint(hint),
            None => error,
        }
    })
}

/// The same; `None` where there is no such file.
///
/// # Errors
/// Those of [`read`].
pub fn find(path: &Path, most: u64) -> Result<Option<Value>> {
    match read(path, most) {
        Err(e) if e.kind == ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

/// The numbers that Python writes and JSON does not have.
const NOT_JSON: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// JSON in which numbers may be `Infinity`, `-Infinity` or `NaN`, as Python writes it: they become
/// objects `{"__float__": "Infinity"}`, as Transformers writes them.
///
/// # Errors
/// Text that is no JSON but for these.
pub fn json_of_python(bytes: &[u8]) -> serde_json::Result<Value> {
    let bytes = unmarked(bytes);
    let found = serde_json::from_slice(bytes);
    let (mut text, mut at, mut quoted) = (Vec::new(), 0, false);
    if found.is_ok() {
        return found;
    }
    while let Some(&byte) = bytes.get(at) {
        let number = |word: &&&str| !quoted && bytes[at..].starts_with(word.as_bytes());
        let more = match NOT_JSON.iter().find(number) {
            Some(word) => {
                text.extend_from_slice(format!("{{\"__float__\":\"{word}\"}}").as_bytes());
                word.len()
            }
            None => {
                quoted ^= byte == b'"';
                let escaped = quoted && byte == b'\\' && at + 1 < bytes.len();
                let count = if escaped { 2 } else { 1 };
                text.extend_from_slice(&bytes[at..at + count]);
                count
            }
        };
        at += more;
    }
    serde_json::from_slice(&text).or(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_or_refused_in_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("a.json");
        assert_eq!(find(&at, 8).unwrap(), None);
        assert_eq!(read(&at, 8).unwrap_err().kind, ErrorKind::NotFound);
        let cases: [(&[u8], std::result::Result<Value, &str>); 6] = [
            (b"[1, 2]", Ok(serde_json::json!([1, 2]))),
            (b"\xef\xbb\xbf{}", Ok(serde_json::json!({}))),
            (b"NaN", Ok(serde_json::json!({"__float__": "NaN"}))),
            (b"[1, 2, 3, 4]", Err("a.json: expected at most 8 bytes of JSON, found 12")),
            (b"{\"a\":", Err("a.json: no valid JSON: EOF while parsing")),
            (b"\"\xff\"", Err("a.json: no valid JSON: invalid unicode")),
        ];
        for (bytes, wanted) in cases {
            std::fs::write(&at, bytes).unwrap();
            match (find(&at, 8), wanted) {
                (Ok(found), Ok(wanted)) => assert_eq!(found, Some(wanted)),
                (Err(found), Err(wanted)) => {
                    assert!(found.to_string().contains(wanted), "{found}");
                }
                (found, wanted) => panic!("{wanted:?}, found {found:?}"),
            }
        }
        // A folder in a file's place is neither absent nor read.
        assert_eq!(find(folder.path(), 8).unwrap_err().kind, ErrorKind::BadInput);
        #[cfg(unix)]
        assert!(read(Path::new("/dev/zero"), 8).unwrap_err().to_string().contains("at most 8"));
    }
}
