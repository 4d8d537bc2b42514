//! Text files that people and other programs wrote: UTF-8, of a length that a caller allows.

use std::fs::File;
use std::io::{BufRead, Read};
use std::path::Path;

use crate::{Error, Result};

/// The bytes of a file, of which there are at most `most`.
///
/// # Errors
/// A file that cannot be read, or is longer.
pub fn bytes(path: &Path, most: u64) -> Result<Vec<u8>> {
    let io = |e| Error::io(path.display(), e);
    let file = File::open(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() > most {
        return Err(longer(&path.display().to_string(), most));
    }
    bytes_of(file, &path.display().to_string(), most)
}

/// The text of a file of at most `most` bytes.
///
/// # Errors
/// Those of [`bytes`] and [`utf8`].
pub fn read(path: &Path, most: u64) -> Result<String> {
    utf8(&path.display().to_string(), bytes(path, most)?)
}

/// The text that a reader gives, of at most `most` bytes; `place` is its name in errors.
///
/// # Errors
/// A reader that fails, or gives more; those of [`utf8`].
pub fn of_reader(reader: impl Read, place: &str, most: u64) -> Result<String> {
    utf8(place, bytes_of(reader, place, most)?)
}

/// The next line of a reader, with its end where it has one, of at most `most` bytes; `None` at the
/// end of all. `place` is its name in errors.
///
/// # Errors
/// A reader that fails, or a line that is longer.
pub fn line(reader: &mut impl BufRead, place: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let mut limited = reader.take(most.saturating_add(1));
    limited.read_until(b'\n', &mut bytes).map_err(|e| Error::io(place, e))?;
    match bytes.len() as u64 > most {
        true => Err(longer(place, most)),
        false => Ok(Some(bytes).filter(|bytes| !bytes.is_empty())),
    }
}

/// Bytes as the text that they are in UTF-8; `place` is their name in errors.
///
/// # Errors
/// Bytes that are no UTF-8, by their line, or by what they are where their beginning tells.
pub fn utf8(place: &str, bytes: Vec<u8>) -> Result<String> {
    if let Some((found, hint)) = no_text(&bytes) {
        return Err(Error::new(place, "a text", found).hint(hint));
    }
    String::from_utf8(bytes).map_err(|e| {
        let (valid, bytes) = (e.utf8_error().valid_up_to(), e.as_bytes());
        let line = 1 + bytes[..valid].iter().filter(|byte| **byte == b'\n').count();
        Error::new(format!("{place}: line {line}"), "UTF-8", "other bytes")
    })
}

/// A file may grow while it is read, and a device has no length: the limit is held here.
fn bytes_of(reader: impl Read, place: &str, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| Error::io(place, e))?;
    if bytes.len() as u64 > most {
        return Err(longer(place, most));
    }
    Ok(bytes)
}

fn longer(place: &str, most: u64) -> Error {
    let most = match most >> 20 {
        0 => format!("{most} bytes"),
        mebibytes => format!("{mebibytes} MiB"),
    };
    Error::new(place, format!("at most {most}"), "more")
}

/// The kind of a file that holds no text, by its first bytes, and how it becomes one.
fn no_text(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    const UNPACK: &str = "unpack it first";
    const TABLE: &str =
        "save it as JSON lines, as pandas' to_json(PATH, orient=\"records\", lines=True) does";
    let known: &[(&[u8], &str, &str)] = &[
        (b"\x1f\x8b", "a gzip archive", UNPACK),
        (b"\x28\xb5\x2f\xfd", "a Zstandard archive", UNPACK),
        (b"\xfd7zXZ\0", "an xz archive", UNPACK),
        (b"PK\x03\x04", "a zip archive", UNPACK),
        (b"PAR1", "a Parquet file", TABLE),
        (b"ARROW1", "an Arrow file", TABLE),
        (b"\xff\xff\xff\xff", "an Arrow file", TABLE),
        (b"\xff\xfe", "UTF-16", "save it as UTF-8"),
        (b"\xfe\xff", "UTF-16", "save it as UTF-8"),
        (b"%PDF-", "a PDF", "save its text by itself"),
    ];
    let own = known.iter().find(|(start, ..)| bytes.starts_with(start));
    own.map(|(_, found, hint)| (*found, *hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_or_refused_in_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("a.txt");
        assert_eq!(read(&at, 8).unwrap_err().kind, crate::ErrorKind::NotFound);
        let cases: [(&[u8], std::result::Result<&str, &str>); 6] = [
            (b"", Ok("")),
            (b"a\nb\n", Ok("a\nb\n")),
            (b"12345678", Ok("12345678")),
            (b"123456789", Err("a.txt: expected at most 8 bytes, found more")),
            (b"a\nb\xff", Err("a.txt: line 2: expected UTF-8, found other bytes")),
            (b"%PDF-1", Err("a.txt: expected a text, found a PDF (hint: ")),
        ];
        for (bytes, wanted) in cases {
            std::fs::write(&at, bytes).unwrap();
            match (read(&at, 8), wanted) {
                (Ok(found), Ok(wanted)) => assert_eq!(found, wanted),
                (Err(found), Err(wanted)) => {
                    assert!(found.to_string().contains(wanted), "{found}");
                }
                (found, wanted) => panic!("{wanted:?}, found {found:?}"),
            }
        }
        let mut lines: &[u8] = b"ab\n\nabcd";
        assert_eq!(line(&mut lines, "f", 3).unwrap().as_deref(), Some(b"ab\n".as_slice()));
        assert_eq!(line(&mut lines, "f", 3).unwrap().as_deref(), Some(b"\n".as_slice()));
        let long = line(&mut lines, "f: line 3", 3).unwrap_err();
        assert_eq!(long.to_string(), "f: line 3: expected at most 3 bytes, found more");
        assert_eq!(line(&mut &b""[..], "f", 3).unwrap(), None);
        let endless = of_reader(std::io::repeat(b'a'), "input", 3 << 20).unwrap_err();
        assert_eq!(endless.to_string(), "input: expected at most 3 MiB, found more");
        #[cfg(unix)]
        {
            let error = read(Path::new("/dev/zero"), 8).unwrap_err();
            assert_eq!(error.to_string(), "/dev/zero: expected at most 8 bytes, found more");
            assert_eq!(read(Path::new("/dev/null"), 0).unwrap(), "");
        }
    }
}
