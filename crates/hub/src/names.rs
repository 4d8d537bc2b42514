//! Short names such as `qwen3:0.6b`: the program's own table, and the user's, which adds to it and
//! overrides it.

use std::collections::BTreeMap;
use std::path::Path;

use formats::{Error, Result};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::spec::{self, HubName};

/// The program's own table.
const BUILT_IN: &str = include_str!("models.toml");
/// Where errors in it are said to be.
const BUILT_IN_PLACE: &str = "models.toml";
/// The key that names a family's default tag.
const DEFAULT: &str = "default";

/// All short names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Names {
    families: BTreeMap<String, Family>,
}

/// One family of models; a single name is a family whose default is the empty tag.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Family {
    default: Option<String>,
    /// A hub id or a path for each tag.
    tags: BTreeMap<String, String>,
}

impl Names {
    /// The program's own names.
    pub(crate) fn built_in() -> Result<Names> {
        let mut names = Names::default();
        names.add(BUILT_IN, BUILT_IN_PLACE)?;
        Ok(names)
    }

    /// The program's own names, overridden by the names in a file, if there is one.
    pub(crate) fn with(file: Option<&Path>) -> Result<Names> {
        let Some(file) = file else { return Names::built_in() };
        let text =
            std::fs::read_to_string(file).map_err(|error| Error::io(file.display(), error))?;
        Names::of_text(&text, &file.display().to_string())
    }

    /// The program's own names, overridden by the names in a file's text.
    pub(crate) fn of_text(text: &str, place: &str) -> Result<Names> {
        let mut names = Names::built_in()?;
        names.add(text, place)?;
        Ok(names)
    }

    /// Adds the names of a file's text, over those that are there. Errors name the line.
    fn add(&mut self, text: &str, place: &str) -> Result<()> {
        let ends: Vec<usize> = text.match_indices('\n').map(|(end, _)| end).collect();
        let at =
            |offset: usize| format!("{place}:{}", ends.partition_point(|&end| end < offset) + 1);
        let table = DeTable::parse(text).map_err(|error| {
            let offset = error.span().map_or(0, |span| span.start);
            let said = error.message().lines().next().unwrap_or("something else").to_string();
            Error::new(at(offset), "a table of models in TOML", said)
        })?;
        for (name, value) in table.get_ref() {
            let place = at(name.span().start);
            let key = check_name(name.get_ref(), &place)?;
            match value.get_ref() {
                DeValue::Table(tags) => self.add_family(&key, tags, &place, &at)?,
                _ => {
                    let target = target(value, &at)?;
                    let family = self.families.entry(key).or_default();
                    family.tags.insert(String::new(), target);
                    family.default = Some(String::new());
                }
            }
        }
        Ok(())
    }

    /// Adds one family's tags. Its default must be one of them.
    fn add_family(
        &mut self,
        name: &str,
        tags: &DeTable<'_>,
        place: &str,
        at: &dyn Fn(usize) -> String,
    ) -> Result<()> {
        let family = self.families.entry(name.to_string()).or_default();
        let mut default = None;
        for (tag, value) in tags {
            let place = at(tag.span().start);
            if tag.get_ref() == DEFAULT {
                let tag =
                    value.get_ref().as_str().map(str::to_ascii_lowercase).ok_or_else(|| {
                        Error::new(&place, "the name of a tag", value.get_ref().type_str())
                    })?;
                default = Some((tag, place));
                continue;
            }
            let tag = check_name(tag.get_ref(), &place)?;
            family.tags.insert(tag, target(value, at)?);
        }
        if let Some((tag, place)) = default {
            if !family.tags.contains_key(&tag) {
                let known: Vec<&str> = family.tags.keys().map(String::as_str).collect();
                return Err(Error::new(place, format!("one of {}", known.join(", ")), tag));
            }
            family.default = Some(tag);
        }
        if family.tags.is_empty() {
            return Err(Error::new(place, "at least one tag", "none"));
        }
        Ok(())
    }

    /// The hub id or path that a short name stands for: `family`, `family:tag`, `family:tag-q8_0`
    /// or `family:q8_0` (another quantisation of the same repository), each with an optional
    /// `@revision`.
    pub(crate) fn expand(&self, text: &str) -> Option<String> {
        let (name, revision) = match text.split_once('@') {
            Some((name, revision)) => (name, Some(revision)),
            None => (text, None),
        };
        let name = name.to_ascii_lowercase();
        let (family, tag) = match name.split_once(':') {
            Some((family, tag)) => (family, Some(tag)),
            None => (name.as_str(), None),
        };
        let target = self.families.get(family)?.target(tag)?;
        match revision {
            None => Some(target),
            Some(_) if spec::is_surely_path(&target) => None,
            Some(revision) => {
                let own = target.split_once('@').map_or(target.as_str(), |(id, _)| id);
                Some(format!("{own}@{revision}"))
            }
        }
    }

    /// Every short name in full, and families that have a default by their bare name.
    pub(crate) fn all(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (name, family) in &self.families {
            if family.default.is_some() {
                all.push(name.clone());
            }
            let tags = family.tags.keys().filter(|tag| !tag.is_empty());
            all.extend(tags.map(|tag| format!("{name}:{tag}")));
        }
        all
    }

    /// The families' names.
    pub(crate) fn families(&self) -> impl Iterator<Item = &str> {
        self.families.keys().map(String::as_str)
    }
}

impl Family {
    fn target(&self, tag: Option<&str>) -> Option<String> {
        let default = || self.tags.get(self.default.as_ref()?);
        let Some(tag) = tag.filter(|&tag| tag != "latest") else { return default().cloned() };
        if let Some(target) = self.tags.get(tag) {
            return Some(target.clone());
        }
        if is_quantisation(tag) {
            return requantised(default()?, tag);
        }
        let (target, quantisation) = self.tags.iter().find_map(|(known, target)| {
            let rest = tag.strip_prefix(known.as_str())?.strip_prefix('-')?;
            is_quantisation(rest).then_some((target, rest))
        })?;
        requantised(target, quantisation)
    }
}

/// The same repository with another file of it named. Safetensors and paths come in one form only.
fn requantised(target: &str, quantisation: &str) -> Option<String> {
    let spec = HubName::parse(target).ok()?;
    spec.file.as_ref()?;
    let revision =
        if spec.revision == "main" { String::new() } else { format!("@{}", spec.revision) };
    Some(format!("{}:{quantisation}{revision}", spec.id))
}

/// Whether a text names how weights are stored, as file names do: `q8_0`, `Q4_K_M`, `iq4_xs`,
/// `f16`.
pub(crate) fn is_quantisation(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    if ["f16", "fp16", "bf16", "f32", "fp32", "mxfp4"].contains(&text.as_str()) {
        return true;
    }
    let digits = text.strip_prefix("iq").or_else(|| text.strip_prefix('q'));
    digits.is_some_and(|rest| {
        let mut chars = rest.chars();
        chars.next().is_some_and(|c| c.is_ascii_digit())
            && chars.next().is_none_or(|c| c == '_')
            && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

/// A family's or tag's name: what can be typed as a model without being taken for a path or an id.
fn check_name(name: &str, place: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !name.is_empty() && name.len() <= 96 && name.chars().all(plain) {
        return Ok(name.to_ascii_lowercase());
    }
    Err(Error::new(place, "a name of letters, digits, -, _ and .", format!("\"{name}\"")))
}

/// The model that a name stands for.
fn target(value: &Spanned<DeValue<'_>>, at: &dyn Fn(usize) -> String) -> Result<String> {
    let place = at(value.span().start);
    match value.get_ref() {
        DeValue::String(text) if spec::is_surely_path(text) => Ok(text.to_string()),
        DeValue::String(text) => {
            HubName::parse(text).map(|_| text.to_string()).map_err(|error| Error { place, ..error })
        }
        DeValue::Table(_) => Err(Error::new(place, "a hub id or a path in quotes", "a table")
            .hint("a name with a dot in it is written in quotes: [\"family2.5\"]")),
        other => Err(Error::new(place, "a hub id or a path in quotes", other.type_str())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_name_is_a_model_of_the_hub() {
        let names = Names::built_in().unwrap();
        assert!(names.all().len() > 40);
        for name in names.all() {
            let target = names.expand(&name).unwrap_or_else(|| panic!("{name}"));
            let spec = HubName::parse(&target).unwrap();
            assert!(spec.id.contains('/'), "{name}: {target}");
            // A repository of GGUF files holds many: the table says which.
            assert_eq!(spec.id.ends_with("-GGUF"), spec.file.is_some(), "{name}: {target}");
            assert!(spec.file.is_none_or(|tag| is_quantisation(&tag)), "{name}: {target}");
        }
        for family in names.families() {
            assert!(names.expand(family).is_some(), "{family} has no default");
        }
    }

    #[test]
    fn short_names_stand_for_models() {
        let mut names = Names::built_in().unwrap();
        let own = "work = \"/data/work.gguf\"\nHouse = \"acme/house@v2\"\nqwq = \"acme/qwq\"\n\
                   [qwen3]\n\"0.6b\" = \"acme/qwen-GGUF:Q6_K\"\ndefault = \"0.6b\"\n\
                   [\"acme1.5\"]\nbig = \"acme/big-GGUF:q4_k_m@v1\"\n";
        names.add(own, "own.toml").unwrap();
        let cases: &[(&str, Option<&str>)] = &[
            ("llama3.2:1b", Some("bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0")),
            ("Llama3.2", Some("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M")),
            ("llama3.2:latest", Some("bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M")),
            ("llama3.2:1b-q4_k_m", Some("bartowski/Llama-3.2-1B-Instruct-GGUF:q4_k_m")),
            ("llama3.2:q8_0", Some("bartowski/Llama-3.2-3B-Instruct-GGUF:q8_0")),
            ("llama3.2:1b@main", Some("bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0@main")),
            ("smollm2:135m-q8_0", None),
            ("gpt-oss", Some("ggml-org/gpt-oss-20b-GGUF:MXFP4")),
            ("llama3.2:80b", None),
            ("llama", None),
            ("hello", None),
            ("qwen3", Some("acme/qwen-GGUF:Q6_K")),
            ("qwen3:4b", Some("Qwen/Qwen3-4B-GGUF:Q4_K_M")),
            ("qwq", Some("acme/qwq")),
            ("qwq:32b", Some("Qwen/QwQ-32B-GGUF:Q4_K_M")),
            ("work", Some("/data/work.gguf")),
            ("work:q8_0", None),
            ("work@v1", None),
            ("house", Some("acme/house@v2")),
            ("house@v3", Some("acme/house@v3")),
            ("acme1.5", None),
            ("acme1.5:big-q8_0", Some("acme/big-GGUF:q8_0@v1")),
        ];
        for (name, expected) in cases {
            assert_eq!(names.expand(name).as_deref(), *expected, "{name}");
        }
        assert!(!names.all().contains(&"acme1.5".to_string()));
        assert!(names.all().contains(&"work".to_string()));
    }

    #[test]
    fn a_damaged_file_is_an_error_with_its_line() {
        let cases = [
            ("a = \"x/y\"\nb = ", "own.toml:2: expected a table of models in TOML, found"),
            (
                "\n\n[a]\nb = 3\n",
                "own.toml:4: expected a hub id or a path in quotes, found integer",
            ),
            ("[a]\nb = \"no id\"\n", "own.toml:2: expected a path that exists, or a hub id"),
            ("[a]\ndefault = \"c\"\nb = \"x/y\"\n", "own.toml:2: expected one of b, found c"),
            ("[a]\nb = \"x/y\"\ndefault = 1\n", "own.toml:3: expected the name of a tag, found"),
            ("[a]\n", "own.toml:1: expected at least one tag, found none"),
            (
                "[qwen2.5]\nb = \"x/y\"\n",
                "own.toml:1: expected a hub id or a path in quotes, found a table",
            ),
            ("\"a b\" = \"x/y\"\n", "own.toml:1: expected a name of letters"),
        ];
        for (text, expected) in cases {
            let error = Names::default().add(text, "own.toml").unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text:?}: {error}");
        }
        let absent = Names::with(Some(Path::new("/no/such/models.toml"))).unwrap_err();
        assert!(absent.to_string().starts_with("/no/such/models.toml: "), "{absent}");
    }
}
