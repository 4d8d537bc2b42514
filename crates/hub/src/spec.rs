//! The name of a model on the hub, `org/name[:file][@revision]`, and the rules that keep names
//! inside the cache.

use formats::{Error, Result};

/// A parsed hub name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// `org/name`, or the bare name of an old repository.
    pub id: String,
    /// A file's name, or the tag of a quantisation such as `Q4_K_M`.
    pub file: Option<String>,
    /// A branch, tag or commit; `main` unless given.
    pub revision: String,
}

impl HubName {
    /// Parses `org/name`, `org/name:file`, `org/name@revision`, or both suffixes in either order.
    /// The hub's own web address may precede the id.
    ///
    /// # Errors
    /// An id that the hub cannot have, or a file or revision that leads out of its folder.
    pub fn parse(text: &str) -> Result<HubName> {
        let name = without_address(text).unwrap_or(text);
        let (id, rest) = name.split_at(name.find([':', '@']).unwrap_or(name.len()));
        let (file, revision) = if let Some(file) = rest.strip_prefix(':') {
            match file.rsplit_once('@') {
                Some((file, revision)) => (Some(file), Some(revision)),
                None => (Some(file), None),
            }
        } else if let Some(revision) = rest.strip_prefix('@') {
            match revision.split_once(':') {
                Some((revision, file)) => (Some(file), Some(revision)),
                None => (None, Some(revision)),
            }
        } else {
            (None, None)
        };
        check_id(text, id)?;
        if let Some(file) = file {
            check_relative(text, "a file name", file)?;
        }
        if let Some(revision) = revision {
            check_relative(text, "a revision", revision)?;
        }
        let revision = revision.unwrap_or("main").to_string();
        Ok(HubName { id: id.to_string(), file: file.map(str::to_string), revision })
    }
}

/// The rest of a name behind the hub's web address, or a short form of it.
fn without_address(text: &str) -> Option<&str> {
    let forms =
        ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/", "hf://", "hf:"];
    forms.iter().find_map(|form| text.strip_prefix(form))
}

/// Whether a name can only be a path: no hub id begins like it or has as many parts.
pub(crate) fn is_surely_path(text: &str) -> bool {
    if text.starts_with("https://") || without_address(text).is_some() {
        return false;
    }
    let id = text.split([':', '@']).next().unwrap_or_default();
    text.starts_with(['.', '/', '~', '\\']) || text.contains('\\') || id.split('/').count() > 2
}

/// The hub's rule for ids: one or two parts of letters, digits, `-`, `_` and `.`, none of which
/// begin or end with `-` or `.`, without `--` (the cache's separator) or `..`.
pub(crate) fn check_id(place: &str, id: &str) -> Result<()> {
    let part = |part: &str| {
        let plain = part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        let edges = part.starts_with(['-', '.']) || part.ends_with(['-', '.']);
        !part.is_empty()
            && part.len() <= 96
            && plain
            && !edges
            && !part.contains("--")
            && !part.contains("..")
    };
    if id.split('/').count() <= 2 && id.split('/').all(part) {
        return Ok(());
    }
    Err(Error::new(
        place,
        "a path that exists, or a hub id org/name[:file][@revision]",
        format!("\"{id}\""),
    ))
}

/// A name that stays inside the folder it is joined to, on every system.
pub(crate) fn check_relative(place: &str, what: &str, name: &str) -> Result<()> {
    let inside = |part: &str| !part.is_empty() && part != "." && part != "..";
    let plain = !name.contains(['\\', ':']) && !name.chars().any(char::is_control);
    if plain && name.len() <= 1024 && name.split('/').all(inside) {
        return Ok(());
    }
    Err(Error::new(place, format!("{what} inside the repository"), format!("\"{name}\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed() {
        let cases = [
            ("org/name", ("org/name", None, "main")),
            ("org/name:Q4_K_M", ("org/name", Some("Q4_K_M"), "main")),
            (
                "org/name:sub/m-00001-of-00002.gguf@v1",
                ("org/name", Some("sub/m-00001-of-00002.gguf"), "v1"),
            ),
            ("org/name@refs/pr/3:m.gguf", ("org/name", Some("m.gguf"), "refs/pr/3")),
            ("https://huggingface.co/org/na.me_1-B@main", ("org/na.me_1-B", None, "main")),
            ("hf.co/org/name:Q8_0", ("org/name", Some("Q8_0"), "main")),
            ("huggingface.co/org/name", ("org/name", None, "main")),
            ("hf:org/name", ("org/name", None, "main")),
            ("gpt2", ("gpt2", None, "main")),
        ];
        for (text, (id, file, revision)) in cases {
            let expected =
                HubName { id: id.into(), file: file.map(Into::into), revision: revision.into() };
            assert_eq!(HubName::parse(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn names_that_leave_the_cache_are_refused() {
        let cases = [
            "",
            "/",
            "org/",
            "/name",
            "../name",
            "org/..",
            "a/b/c",
            "org/na me",
            "org--x/name",
            "org/name:",
            "org/name@",
            "org/name:../x",
            "org/name:/etc/x",
            "org/name:a//b",
            "org/name:a\\b",
            "org/name@../../x",
            "org/name:a\nb",
            "org/name:c:x",
            "-org/name",
            "org/.name",
            "org/n\u{e9}",
        ];
        for text in cases {
            assert!(HubName::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn paths_are_told_from_ids() {
        for text in ["./x", "/x/y", "~/x", "a/b/c.gguf", "..", "a\\b"] {
            assert!(is_surely_path(text), "{text}");
        }
        for text in [
            "org/name",
            "org/name:sub/file.gguf",
            "org/name@refs/pr/1",
            "https://huggingface.co/org/name",
            "huggingface.co/org/name",
            "hf.co/org/name",
            "hf:org/name",
        ] {
            assert!(!is_surely_path(text), "{text}");
        }
    }
}
