//! JSON files that other programs wrote: of a length that a caller allows, and as Python writes them.

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
    // Asked before it is opened: a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(|e| Error::io(&place, e))?.is_file() {
        return Err(Error::new(&place, "a file", "a folder, a pipe or a device"));
    }
    let bytes = crate::text::bytes(path, most)?;
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
            (b"[1, 2, 3, 4]", Err("a.json: expected at most 8 bytes, found more")),
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
        assert!(read(Path::new("/dev/zero"), 8).unwrap_err().to_string().contains("a device"));
    }
}
