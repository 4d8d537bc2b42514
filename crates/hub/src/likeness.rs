//! Whether a text on the command line names a model, was meant to, or is a prompt.

use std::fs;
use std::path::Path;

use crate::names::{Names, is_quantisation};
use crate::spec::{self, HubName};
use crate::{BUNDLED, Hub, cache};

/// How much a text is like a model's name; see [`recognise`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Likeness {
    /// It names a model: a path that holds one, a short name, or an id as the hub has them. It need
    /// not be on this machine.
    Model,
    /// It is no model's name, but no sentence either: the nearest names, best first, perhaps none.
    Resembles(Vec<String>),
    /// Anything else, such as a prompt.
    Other,
}

/// How much a text is like a model's name, by the environment's cache and short names. Asks no
/// network.
pub fn recognise(text: &str) -> Likeness {
    match Hub::from_env() {
        Ok(hub) => hub.recognise(text),
        Err(_) => Known { names: Names::built_in().unwrap_or_default(), cached: Vec::new() }
            .recognise(text),
    }
}

impl Hub {
    /// [`recognise`] by this hub's cache and short names.
    pub fn recognise(&self, text: &str) -> Likeness {
        // A damaged file of names is an error where a model is opened. What it names must get
        // there.
        if self.names().is_err() && self.models_mention(text) {
            return Likeness::Model;
        }
        self.known().recognise(text)
    }

    /// The known names nearest to a text, best first.
    pub(crate) fn nearest(&self, text: &str) -> Vec<String> {
        if has_weights_name(text) || spec::is_surely_path(text) {
            return beside(Path::new(text));
        }
        self.known().nearest(text)
    }

    fn known(&self) -> Known {
        let names = self.names().or_else(|_| Names::built_in()).unwrap_or_default();
        Known { names, cached: cache::ids(self) }
    }

    /// Whether the user's file of names holds the text's first part, wherever.
    fn models_mention(&self, text: &str) -> bool {
        let name = text.split([':', '@']).next().unwrap_or_default();
        let file = self.models.as_ref().and_then(|path| fs::read_to_string(path).ok());
        !name.is_empty() && file.is_some_and(|file| file.contains(name))
    }
}

/// Names to compare with.
struct Known {
    names: Names,
    /// The ids in the cache.
    cached: Vec<String>,
}

impl Known {
    fn recognise(&self, text: &str) -> Likeness {
        let path = Path::new(text);
        if !text.is_empty() && holds_model(path) {
            return Likeness::Model;
        }
        if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            let missing = is_path_like(text) && has_weights_name(text);
            return if missing { Likeness::Resembles(beside(path)) } else { Likeness::Other };
        }
        if self.names.expand(text).is_some() || text == BUNDLED {
            return Likeness::Model;
        }
        let file = has_weights_name(text) && !text.contains(':');
        if file || spec::is_surely_path(text) {
            let missing = file || is_path_like(text);
            return if missing { Likeness::Resembles(beside(path)) } else { Likeness::Other };
        }
        match HubName::parse(text) {
            Ok(spec) if spec.id.contains('/') => {
                let said = spec.file.is_some() || spec.revision != "main";
                let model = said || self.cached.contains(&spec.id) || !is_everyday(&spec.id);
                if model { Likeness::Model } else { Likeness::Other }
            }
            Ok(_) if self.resembles(text) => Likeness::Resembles(self.nearest(text)),
            _ => Likeness::Other,
        }
    }

    /// Whether one word without a slash looks like the name of a model.
    fn resembles(&self, word: &str) -> bool {
        let word = word.to_ascii_lowercase();
        let named = |id: &String| id.to_ascii_lowercase().rsplit('/').next() == Some(&word);
        if self.cached.iter().any(named) {
            return true;
        }
        let (base, tag) = match word.split_once([':', '@']) {
            Some((base, tag)) => (base, Some(tag)),
            None => (word.as_str(), None),
        };
        let letters = base.chars().take_while(char::is_ascii_alphabetic).count();
        let (stem, rest) = base.split_at(letters);
        if stem.is_empty() {
            return false;
        }
        let family = |name: &str| name.trim_end_matches(|c: char| !c.is_ascii_alphabetic()) == stem;
        let known = STEMS.contains(&stem) || self.names.families().any(family);
        let has_digit = |text: &str| text.bytes().any(|byte| byte.is_ascii_digit());
        let close = |name: &str| {
            let allowed = if name.len() >= 8 { 2 } else { 1 };
            strsim::levenshtein(name, base) <= allowed && has_digit(name) == has_digit(base)
        };
        let sized = |text: &str| text.split(['-', '_', ':']).any(is_size);
        match tag {
            Some(tag) => {
                let told =
                    sized(tag) || is_quantisation(tag) || tag == "latest" || tag == "instruct";
                known || told || self.names.families().any(close)
            }
            None if rest.is_empty() => {
                let alone = (known && !EVERYDAY_STEMS.contains(&stem)) || COMPOUND.contains(&base);
                alone || self.names.families().any(|name| name.len() >= 6 && close(name))
            }
            None => {
                (known && has_digit(rest))
                    || COMPOUND.iter().any(|name| base.starts_with(name))
                    || sized(rest)
                    || (has_digit(base) && self.names.families().any(close))
            }
        }
    }

    /// Short names and cached ids near a text: those that begin alike first, then by edit distance.
    fn nearest(&self, text: &str) -> Vec<String> {
        const SHOWN: usize = 4;
        let wanted = text.to_ascii_lowercase();
        let base = wanted.split([':', '@']).next().unwrap_or_default();
        let score = |name: &str, cached: bool| -> Option<(usize, bool)> {
            let lower = name.to_ascii_lowercase();
            // A cached id is known by its second part; a family's bare name is compared with what
            // is before a colon.
            let own = if cached { lower.rsplit('/').next().unwrap_or(&lower) } else { &lower };
            let against = if own.contains(':') || cached { wanted.as_str() } else { base };
            let begins = base.len() >= 3 && (own.starts_with(base) || wanted.starts_with(own));
            let allowed = (own.len().min(against.len()) / 4).max(1);
            let near = begins || strsim::levenshtein(own, against) <= allowed;
            near.then(|| (strsim::levenshtein(own, &wanted), !cached))
        };
        let all = self.names.all();
        let short = all.iter().filter_map(|name| Some((score(name, false)?, name)));
        let cached = self.cached.iter().filter_map(|id| Some((score(id, true)?, id)));
        let mut found: Vec<_> = short.chain(cached).collect();
        found.sort();
        found.into_iter().take(SHOWN).map(|(_, name)| name.clone()).collect()
    }
}

/// First words of models' names; a digit or a tag behind them makes a name.
const STEMS: &[&str] = &[
    "alpaca",
    "aya",
    "baichuan",
    "bloom",
    "codellama",
    "codestral",
    "cogito",
    "deepseek",
    "devstral",
    "dolphin",
    "exaone",
    "falcon",
    "gemma",
    "glm",
    "gpt",
    "granite",
    "hermes",
    "internlm",
    "llama",
    "llava",
    "mathstral",
    "mistral",
    "mixtral",
    "olmo",
    "openchat",
    "phi",
    "qwen",
    "qwq",
    "smollm",
    "starcoder",
    "tinyllama",
    "vicuna",
    "yi",
    "zephyr",
];
/// Stems that are everyday words or names, too: a name of one such word is taken for a prompt.
const EVERYDAY_STEMS: &[&str] = &[
    "alpaca", "aya", "bloom", "dolphin", "falcon", "gpt", "granite", "hermes", "phi", "vicuna",
    "yi", "zephyr", "cogito", "glm",
];
/// Names with a hyphen and no digit.
const COMPOUND: &[&str] = &["gpt-oss", "command-r", "deepseek-r", "deepseek-v"];

/// A count of parameters: `7b`, `0.6b`, `135m`, `8x7b`.
fn is_size(part: &str) -> bool {
    let Some(number) = part.strip_suffix(['b', 'm']) else { return false };
    let digits = number.chars().all(|c| c.is_ascii_digit() || c == '.' || c == 'x');
    digits && number.starts_with(|c: char| c.is_ascii_digit())
}

/// Whether a path leads to something that can be opened as a model, by a look at names and the
/// first four bytes.
pub(crate) fn holds_model(path: &Path) -> bool {
    let Ok(metadata) = fs::metadata(path) else { return false };
    if metadata.is_dir() {
        let config = path.join("config.json").is_file() || cache::snapshot_in(path).is_some();
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        return config
            || entries
                .take(10_000)
                .any(|entry| has_weights_name(&entry.file_name().to_string_lossy()));
    }
    // A pipe by the name of a model is one that cannot be read, which opening it says.
    if has_weights_name(&path.to_string_lossy()) || names_a_folder(path) {
        return true;
    }
    let mut magic = [0; 4];
    let read = |mut file: fs::File| std::io::Read::read_exact(&mut file, &mut magic).is_ok();
    metadata.is_file() && fs::File::open(path).is_ok_and(read) && &magic == b"GGUF"
}

/// Whether a file of this name stands for the folder that it is in.
pub(crate) fn names_a_folder(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name == "config.json" || name.ends_with(".safetensors.index.json")
}

fn has_weights_name(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.ends_with(".gguf") || lower.ends_with(".safetensors")
}

/// Whether a text begins as a path does, and goes on.
fn is_path_like(text: &str) -> bool {
    let relative = ["./", "../", "~/", ".\\", "..\\"]
        .iter()
        .any(|start| text.strip_prefix(start).is_some_and(|rest| !rest.is_empty()));
    relative || (text.starts_with('/') && text[1..].contains('/')) || has_weights_name(text)
}

/// The models in the folder that a path names whose names are near its own.
fn beside(path: &Path) -> Vec<String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let wanted = path
        .file_name()
        .map(|name| name.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default();
    let entries = fs::read_dir(folder.unwrap_or(Path::new("."))).into_iter().flatten().flatten();
    let mut near: Vec<(usize, String)> = entries
        .take(10_000)
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| has_weights_name(name))
        .map(|name| (strsim::levenshtein(&name.to_ascii_lowercase(), &wanted), name))
        .filter(|(distance, name)| *distance <= name.len() / 2)
        .collect();
    near.sort();
    let whole = |name: String| {
        folder.map_or(name.clone(), |folder| folder.join(&name).display().to_string())
    };
    near.into_iter().take(3).map(|(_, name)| whole(name)).collect()
}

/// Whether two words around a slash are everyday language and no hub id: `and/or`, `24/7`, `km/h`.
fn is_everyday(id: &str) -> bool {
    const PAIRS: &[&str] = &[
        "and/or",
        "yes/no",
        "no/yes",
        "he/she",
        "she/he",
        "his/her",
        "her/his",
        "him/her",
        "he/him",
        "she/her",
        "they/them",
        "either/or",
        "true/false",
        "false/true",
        "on/off",
        "in/out",
        "up/down",
        "left/right",
        "win/win",
        "win/lose",
        "pass/fail",
        "start/stop",
        "black/white",
        "hot/cold",
        "day/night",
        "pros/cons",
        "input/output",
        "read/write",
        "client/server",
        "tcp/ip",
        "ac/dc",
        "mac/pc",
        "hit/miss",
        "and/not",
        "if/else",
        "if/then",
        "buy/sell",
        "male/female",
        "mother/father",
        "before/after",
    ];
    let lower = id.to_ascii_lowercase();
    let short = |part: &str| part.len() == 1;
    let number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    lower.split('/').any(short) || lower.split('/').all(number) || PAIRS.contains(&lower.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        let cached = ["Qwen/Qwen3-0.6B", "acme/House-7B-GGUF", "and/or2", "his/her"];
        Known { names: Names::built_in().unwrap(), cached: cached.map(str::to_string).to_vec() }
    }

    #[test]
    fn names_of_models_are_told_from_prompts() {
        let cases: &[(&str, bool, &str)] = &[
            ("qwen3:0.6b", true, "a short name"),
            ("qwen3", true, "a family with a default"),
            ("Llama3.2:1B", true, "short names in any case"),
            ("mistral", true, "a family of letters alone"),
            ("llama3.2:1b-q8_0", true, "a short name with a quantisation"),
            ("Qwen/Qwen3-0.6B", true, "a hub id"),
            ("org/name", true, "a hub id that nobody knows"),
            ("org/name:Q4_K_M", true, "with a tag"),
            ("org/name:sub/m.gguf", true, "with a file"),
            ("org/name@v1", true, "with a revision"),
            ("his/her", true, "words, but an id that is in the cache"),
            ("and/or@main2", true, "words with a revision"),
            ("https://huggingface.co/org/name", true, "the hub's web address"),
            ("hf.co/org/name:Q8_0", true, "a short web address"),
            ("huggingface.co/org/name", true, "the web address without its scheme"),
            ("hf:org/name", true, "the hub, and an id of it"),
            ("hello", false, "one word"),
            ("why?", false, "one word with a question mark"),
            ("fox", false, "one word"),
            ("Hi!", false, "one word"),
            ("", false, "nothing"),
            (" ", false, "a blank"),
            ("...", false, "dots"),
            ("/", false, "a slash"),
            ("Once upon a time", false, "a sentence"),
            ("tell me about Qwen/Qwen3-0.6B", false, "a sentence with an id in it"),
            ("what does model.gguf hold", false, "a sentence with a file in it"),
            ("and/or", false, "everyday words around a slash"),
            ("delft-stories", true, "the bundled model"),
            ("yes/no", false, "everyday words around a slash"),
            ("TCP/IP", false, "a common pair"),
            ("24/7", false, "numbers"),
            ("11/22/2026", false, "a date"),
            ("km/h", false, "a unit"),
            ("w/o", false, "an abbreviation"),
            ("10:30", false, "a time"),
            ("note:this", false, "a word and a colon"),
            ("7b", false, "a size alone"),
            ("mp3", false, "a word with a digit"),
            ("covid19", false, "a word with a digit"),
            ("C-3PO", false, "a name with a digit"),
            ("granite", false, "a model's stem, but a word"),
            ("dolphin", false, "a model's stem, but a word"),
            ("well-known", false, "a hyphen"),
            ("state-of-the-art", false, "hyphens"),
            ("e.g.", false, "an abbreviation"),
            ("user@example.org", false, "an address"),
            ("llama's", false, "a genitive"),
            ("/help", false, "a command, perhaps"),
            ("na\u{ef}ve", false, "a letter that ids do not have"),
            ("\u{4f60}\u{597d}", false, "another script"),
        ];
        for (text, model, why) in cases {
            let expected = if *model { Likeness::Model } else { Likeness::Other };
            assert_eq!(known().recognise(text), expected, "{text:?}: {why}");
        }
    }

    #[test]
    fn mistyped_names_are_told_with_the_nearest_ones() {
        let cases: &[(&str, &[&str], &str)] = &[
            ("qwen3:0.7b", &["qwen3:0.6b"], "a tag that does not exist"),
            ("llama3.1:80b", &["llama3.1:8b"], "a tag that does not exist"),
            ("qwen3-0.6b", &["Qwen/Qwen3-0.6B"], "a cached model by its second part"),
            ("Qwen3-0.6B", &["Qwen/Qwen3-0.6B"], "the same as it is written"),
            ("house-7b", &["acme/House-7B-GGUF"], "the beginning of a cached name"),
            ("lama3.2", &["llama3.2"], "a letter left out"),
            ("qwenn3:4b", &["qwen3:4b"], "a letter too many"),
            ("mistrall", &["mistral"], "a letter too many"),
            ("llama", &["llama2"], "a stem"),
            ("llama4", &["llama2", "llama3"], "a version that is not there"),
            ("qwen", &["qwen3"], "a stem"),
            ("deepseek-r1-7b", &["deepseek-r1"], "a hyphen for the colon"),
            ("gemma2:9b", &[], "a family without short names"),
            ("gemma", &["gemma3"], "a stem"),
            ("phi4", &[], "a family without short names"),
            ("glm4:9b", &[], "a family without short names"),
            ("mixtral:8x7b", &[], "a family without short names"),
            ("foo-7b", &[], "a size"),
            ("./missing.gguf", &[], "a path that is not there"),
            ("model.gguf", &[], "a file that is not there"),
            ("some/folder/model.safetensors", &[], "a file that is not there"),
            ("org/model.gguf", &[], "a file rather than an id"),
            ("/no/such/folder", &[], "a path that is not there"),
            ("~/models/x", &[], "a path that is not there"),
            ("./my model.gguf", &[], "a path with a blank"),
        ];
        for (text, nearest, why) in cases {
            match known().recognise(text) {
                Likeness::Resembles(names) => {
                    for name in *nearest {
                        assert!(names.contains(&name.to_string()), "{text:?} ({why}): {names:?}");
                    }
                    assert!(names.len() <= 4, "{text}: {names:?}");
                }
                other => panic!("{text:?} ({why}): {other:?}"),
            }
        }
    }

    #[test]
    fn paths_are_models_if_they_can_hold_one() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
        for name in ["empty", "hf", "ggufs", "deep/inner"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        for (name, bytes) in [
            ("hf/config.json", "{}"),
            ("ggufs/a.gguf", ""),
            ("deep/inner/b.gguf", ""),
            ("story.txt", "Once"),
            ("blob", "GGUF\u{3}"),
            ("my model.GGUF", ""),
        ] {
            fs::write(at(name), bytes).unwrap();
        }
        for (name, expected) in [
            ("hf", Likeness::Model),
            ("ggufs", Likeness::Model),
            ("ggufs/a.gguf", Likeness::Model),
            ("blob", Likeness::Model),
            ("my model.GGUF", Likeness::Model),
            ("ggufs/b.gguf", Likeness::Resembles(vec![at("ggufs/a.gguf")])),
            ("deep", Likeness::Resembles(vec![])),
            ("empty", Likeness::Resembles(vec![])),
        ] {
            assert_eq!(known().recognise(&at(name)), expected, "{name}");
        }
        assert!(!holds_model(Path::new(&at("story.txt"))) && !holds_model(Path::new(&at("deep"))));
    }
}
