//! Which of a repository's files make up a model.
//!
//! Safetensors come with their configuration and tokenizer; GGUF files are self-contained, and a
//! repository of them holds the same model at many sizes, of which one is chosen. Pickled weights
//! are never chosen: loading them can run code.

use formats::{Error, Result};

use crate::Container;
use crate::names::is_quantisation;

/// The files of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) kind: Container,
    /// Never empty; for GGUF the first is the one to open.
    pub(crate) files: Vec<String>,
    /// The GGUF files that were not chosen, where the user named none.
    pub(crate) others: Vec<String>,
}

/// The files to fetch for what was asked (`wanted`: a file's name or a tag).
pub(crate) fn choose(place: &str, wanted: Option<&str>, names: &[String]) -> Result<Choice> {
    if let Some(wanted) = wanted {
        return gguf(place, Some(wanted), names);
    }
    let top = |name: &&String| !name.contains('/');
    let weights: Vec<&String> =
        names.iter().filter(top).filter(|n| n.ends_with(".safetensors")).collect();
    if !weights.is_empty() {
        // Some repositories hold the weights twice, in another layout or dtype: the standard names
        // win.
        let standard: Vec<&String> =
            weights.iter().filter(|n| is_standard_weight(n)).copied().collect();
        let weights = if standard.is_empty() { weights } else { standard };
        let mut files: Vec<String> = names.iter().filter(|n| is_companion(n)).cloned().collect();
        files.extend(weights.into_iter().cloned());
        return Ok(Choice { kind: Container::Folder, files, others: Vec::new() });
    }
    gguf(place, None, names)
}

/// One GGUF model among `names`: the named file, the tagged one, the only one, or the customary
/// Q4_K_M or Q8_0.
pub(crate) fn gguf(place: &str, wanted: Option<&str>, names: &[String]) -> Result<Choice> {
    let sets = sets(names);
    let choice =
        |set: &Vec<String>, others| Choice { kind: Container::Gguf, files: set.clone(), others };
    if let Some(wanted) = wanted {
        if let Some(set) = sets.iter().find(|set| set.iter().any(|name| name == wanted)) {
            return Ok(choice(set, Vec::new()));
        }
        let tagged: Vec<&Vec<String>> =
            sets.iter().filter(|set| has_tag(&set[0], wanted)).collect();
        return match tagged[..] {
            [set] => Ok(choice(set, Vec::new())),
            [] if names.iter().any(|name| name == wanted) => {
                Err(Error::new(place, "a .gguf file after the colon", wanted)
                    .hint("a safetensors model is named without a file"))
            }
            [] => Err(Error::new(
                place,
                format!("a GGUF file that is or is tagged \"{wanted}\""),
                found(&sets),
            )),
            _ => Err(Error::new(
                place,
                format!("one file tagged \"{wanted}\""),
                listing(tagged.into_iter()),
            )
            .hint("name the whole file after the colon")),
        };
    }
    if let [set] = &sets[..] {
        return Ok(choice(set, Vec::new()));
    }
    for tag in ["Q4_K_M", "Q8_0"] {
        let tagged: Vec<usize> = (0..sets.len()).filter(|&i| has_tag(&sets[i][0], tag)).collect();
        if let [one] = tagged[..] {
            let others = sets
                .iter()
                .enumerate()
                .filter(|&(i, _)| i != one)
                .map(|(_, set)| set[0].clone())
                .collect();
            return Ok(choice(&sets[one], others));
        }
    }
    if sets.is_empty() {
        let error = Error::new(place, "safetensors or GGUF weights", found(&sets));
        return Err(match names.iter().find(|name| is_pickle(name)) {
            Some(name) => error.hint(format!(
                "{name} is a pickle, which can run code; look for a safetensors conversion"
            )),
            None => error,
        });
    }
    Err(Error::new(place, "one GGUF file", listing(sets.iter()))
        .hint("choose one with :FILE or :TAG after the name"))
}

fn found(sets: &[Vec<String>]) -> String {
    if sets.is_empty() { "none".to_string() } else { listing(sets.iter()) }
}

fn listing<'a>(sets: impl ExactSizeIterator<Item = &'a Vec<String>>) -> String {
    const SHOWN: usize = 24;
    let count = sets.len();
    let names: Vec<&str> = sets.take(SHOWN).map(|set| set[0].as_str()).collect();
    let more = if count > SHOWN { format!(" and {} more", count - SHOWN) } else { String::new() };
    format!("{}{more}", names.join(", "))
}

/// The GGUF files, each complete split set as one entry in order; projectors of vision models left
/// out.
pub(crate) fn sets(names: &[String]) -> Vec<Vec<String>> {
    let mut sorted: Vec<&String> = names.iter().filter(|name| name.ends_with(".gguf")).collect();
    sorted.sort();
    let mut sets = Vec::new();
    for name in sorted {
        let base = name.rsplit('/').next().unwrap_or(name);
        if base.starts_with("mmproj") || base.contains("-mmproj") {
            continue;
        }
        match split_siblings(name) {
            None => sets.push(vec![name.clone()]),
            Some(siblings) if siblings[0] == *name => {
                if siblings.iter().all(|sibling| names.contains(sibling)) {
                    sets.push(siblings);
                }
            }
            Some(_) => {}
        }
    }
    sets
}

/// The name that distinguishes a set in its repository: its quantisation, if no other set has it,
/// else its first file's name.
pub(crate) fn told_by(set: &[String], names: &[String]) -> String {
    let mut words = set[0].split(|c: char| !c.is_alphanumeric() && c != '_');
    let tag = words.rfind(|word| is_quantisation(word));
    let own = |tag: &&str| gguf("", Some(*tag), names).is_ok_and(|choice| choice.files == *set);
    tag.filter(own).unwrap_or(&set[0]).to_string()
}

/// All names of the split set that `name` belongs to (`stem-00001-of-00003.gguf` and so on), or
/// None.
pub(crate) fn split_siblings(name: &str) -> Option<Vec<String>> {
    let (stem, of) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(number) || !digits(of) {
        return None;
    }
    let count: usize = of.parse().ok().filter(|count| (1..=9999).contains(count))?;
    Some((1..=count).map(|i| format!("{stem}-{i:05}-of-{of}.gguf")).collect())
}

/// Whether a file's name or folder holds the tag as a word of its own: `Q4_K` is not in
/// `x-Q4_K_M.gguf`.
fn has_tag(name: &str, tag: &str) -> bool {
    let (name, tag) = (name.to_ascii_lowercase(), tag.to_ascii_lowercase());
    name.match_indices(&tag).any(|(at, _)| {
        let before = name[..at].chars().next_back();
        let after = name[at + tag.len()..].chars().next();
        let inside = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !inside(before) && !inside(after)
    })
}

/// Whether a file is named as pickled weights are. Other files that end in `.bin` may be anything.
fn is_pickle(name: &str) -> bool {
    let base = name.rsplit('/').next().unwrap_or(name);
    let stems = ["pytorch_model", "adapter_model", "model", "consolidated"];
    let bin = base.strip_suffix(".bin").is_some_and(|stem| {
        stems.iter().any(|name| {
            stem.strip_prefix(name).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
        })
    });
    bin || [".pt", ".pth", ".ckpt"].iter().any(|end| base.ends_with(end))
}

/// Whether a file holds weights of a kind that is ever chosen.
pub(crate) fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf")
}

fn is_standard_weight(name: &str) -> bool {
    name == "model.safetensors" || (name.starts_with("model-") && name.contains("-of-"))
}

/// The small files that a safetensors model needs beside its weights.
fn is_companion(name: &str) -> bool {
    const NAMES: [&str; 14] = [
        "added_tokens.json",
        "adapter_config.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "modules.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    ];
    let template = name.ends_with(".jinja")
        && (!name.contains('/') || name.starts_with("additional_chat_templates/"));
    // How an embedding is made of hidden states; the folder is the one that `modules.json` names,
    // by custom of this kind.
    let pooling = name
        .split_once('/')
        .is_some_and(|(folder, file)| folder.ends_with("_Pooling") && file == "config.json");
    NAMES.contains(&name)
        || template
        || pooling
        || (name.ends_with(".tiktoken") && !name.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_string).collect()
    }

    #[test]
    fn safetensors_come_with_their_companions_and_never_twice() {
        let repo = names(
            "README.md config.json consolidated.safetensors model-00001-of-00002.safetensors original/x.safetensors \
             model-00002-of-00002.safetensors model.safetensors.index.json pytorch_model.bin tokenizer.json \
             chat_template.jinja generation_config.json onnx/model.onnx q4_k_m.gguf modules.json 1_Pooling/config.json \
             2_Dense/model.safetensors",
        );
        let choice = choose("a/b", None, &repo).unwrap();
        assert_eq!(choice.kind, Container::Folder);
        let expected = names(
            "config.json model.safetensors.index.json tokenizer.json chat_template.jinja generation_config.json \
             modules.json 1_Pooling/config.json model-00001-of-00002.safetensors model-00002-of-00002.safetensors",
        );
        let sorted = |mut v: Vec<String>| {
            v.sort();
            v
        };
        assert_eq!(sorted(choice.files), sorted(expected));
        assert_eq!(choose("a/b", Some("Q4_K_M"), &repo).unwrap().files, names("q4_k_m.gguf"));
    }

    #[test]
    fn one_gguf_is_chosen_or_the_choices_are_listed() {
        let repo = names("m-Q2_K.gguf m-Q4_K_M.gguf m-Q4_K_S.gguf m-Q8_0.gguf mmproj-f16.gguf");
        let choice = choose("a/b", None, &repo).unwrap();
        assert_eq!((choice.files, choice.others.len()), (names("m-Q4_K_M.gguf"), 3));
        assert_eq!(choose("a/b", Some("q8_0"), &repo).unwrap().files, names("m-Q8_0.gguf"));
        let error = choose("a/b", Some("Q4_K"), &repo).unwrap_err();
        assert!(error.to_string().contains("m-Q4_K_S.gguf"), "{error}");
        let error = choose("a/b", None, &names("m-IQ3.gguf m-Q5_K_S.gguf")).unwrap_err();
        assert!(error.to_string().contains("m-IQ3.gguf, m-Q5_K_S.gguf (hint: "), "{error}");
        let error = choose("a/b", Some("Q8_0"), &names("a-Q8_0.gguf b-Q8_0.gguf")).unwrap_err();
        assert!(error.to_string().contains("a-Q8_0.gguf, b-Q8_0.gguf"), "{error}");
    }

    #[test]
    fn split_sets_stay_whole() {
        let repo = names(
            "Q8_0/m-00002-of-00002.gguf Q8_0/m-00001-of-00002.gguf m-Q4_K_M-00001-of-00003.gguf",
        );
        let expected = names("Q8_0/m-00001-of-00002.gguf Q8_0/m-00002-of-00002.gguf");
        assert_eq!(choose("a/b", None, &repo).unwrap().files, expected);
        assert_eq!(choose("a/b", Some("Q8_0"), &repo).unwrap().files, expected);
        assert_eq!(
            choose("a/b", Some("Q8_0/m-00002-of-00002.gguf"), &repo).unwrap().files,
            expected
        );
        assert_eq!(split_siblings("m-1-of-2.gguf"), None);
    }

    #[test]
    fn pickles_are_refused() {
        let error = choose("a/b", None, &names("config.json pytorch_model.bin")).unwrap_err();
        assert!(error.to_string().contains("pytorch_model.bin is a pickle"), "{error}");
        assert!(choose("a/b", Some("pytorch_model.bin"), &names("pytorch_model.bin")).is_err());
        let cases = [
            ("pytorch_model-00001-of-00002.bin", true),
            ("sub/model.bin", true),
            ("adapter_model.bin", true),
            ("consolidated.00.pth", true),
            ("epoch.ckpt", true),
            ("valgrind.bin", false),
            ("models.bin", false),
            ("modeling.bin", false),
            ("vocab.bin", false),
        ];
        for (name, pickle) in cases {
            let error = choose("a/b", None, &names(name)).unwrap_err();
            assert_eq!(error.to_string().contains("is a pickle"), pickle, "{name}: {error}");
        }
    }
}
