//! The front of files that are not what their names say, or have more in front than they should.

/// A text's bytes behind the byte order mark that some editors put in front.
pub fn unmarked(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// The hint for a file in whose place Git LFS left a pointer to it.
pub fn pointer_hint(bytes: &[u8]) -> Option<&'static str> {
    let is_pointer = unmarked(bytes).starts_with(b"version https://git-lfs");
    is_pointer
        .then_some("this is Git LFS's pointer to the file: git lfs pull fetches the file itself")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_pointers_are_known() {
        assert_eq!(unmarked("\u{feff}{}".as_bytes()), b"{}");
        assert_eq!(unmarked(b"{}"), b"{}");
        assert!(
            pointer_hint(b"version https://git-lfs.github.com/spec/v1\noid sha256:0").is_some()
        );
        assert!(pointer_hint(b"version").is_none());
    }
}
