//! Which of a command's words name the model, and which are the prompt.
//!
//! Every command takes its model as the first word or with `-m`. Where a prompt may follow, or
//! stand alone, [`split`] decides: a first word is a model if one is known by it, or if its form
//! says so (`org/name`). A word that only looks like a model's name is refused with the names
//! nearest to it, since a model that was meant would otherwise become the prompt of another one
//! without a word.

use std::ffi::OsString;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use delft::Error;
use delft::hub::{self, Likeness};

use crate::args::{Cli, Command, ModelArg, elsewhere};
use crate::terminal::{Outcome, Stop, harmless};

/// The greatest rank of adapters that are added to a server, unless it is told another.
const ADAPTER_RANK: u64 = 16;

/// The model, and the prompt, as far as words name them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Named {
    model: Option<String>,
    prompt: Option<String>,
}

impl Command {
    /// Moves each command's words to where it looks for its model and its prompt.
    pub(crate) fn settle(&mut self) -> Outcome {
        self.quieten();
        let serves = matches!(self, Command::Serve(_));
        if let Some(load) = self.loading().filter(|load| !serves && load.adapter.len() > 1) {
            let found = format!("{} of them", load.adapter.len());
            return usage(Error::new("--adapter", "one adapter", found));
        }
        match self {
            Command::Run(args) => settle(&mut args.load.model, &mut args.words, &mut args.prompt),
            Command::Tokenize(args) => settle(&mut args.model, &mut args.words, &mut args.prompt),
            Command::Chat(args) => args.load.model.settle(),
            Command::Batch(args) => args.load.model.settle_with(&mut args.file),
            Command::Serve(args) => {
                let named = &mut args.load.model;
                let models = named.model.take().into_iter().chain(named.named.take());
                args.models = models.chain(args.models.drain(..)).collect();
                let rank = args.adapter_rank.unwrap_or(ADAPTER_RANK);
                args.load.room = (args.adapter_room.unwrap_or(0) as usize, rank as usize);
                Ok(())
            }
            Command::Inspect(args) => args.model.settle(),
            Command::Fuse(args) => args.model.settle(),
            Command::Tune(args) => args.model.settle(),
            Command::Eval(args) => args.load.model.settle(),
            Command::Show(args) => args.model.settle(),
            Command::Logits(args) => args.load.model.settle(),
            Command::Bench(args) => args.load.model.settle(),
            Command::WhySlow(args) => args.load.model.settle(),
            Command::Perplexity(args) => args.load.model.settle_with(&mut args.file),
            Command::Embed(args) => args.load.model.settle_before(&mut args.texts, &hub::recognise),
            Command::Classify(args) => {
                args.load.model.settle_before(&mut args.texts, &hub::recognise)
            }
            Command::Compare(args) => {
                // Behind -m the words are the reference and the text.
                if args.load.model.model.is_some() && args.file.is_none() {
                    args.file = args.reference.take().map(Into::into);
                    args.reference = args.load.model.named.take();
                }
                args.load.model.settle()
            }
            Command::Verify(args) => args.load.model.settle(),
            Command::Convert(args) => args.model.settle(),
            Command::Quantize(args) => args.model.settle_with(&mut args.kind),
            Command::Imatrix(args) => args.load.model.settle_with(&mut args.file),
            Command::Pull(_)
            | Command::List(_)
            | Command::Rm(_)
            | Command::Ps(_)
            | Command::Stop(_)
            | Command::Replay(_)
            | Command::Doctor(_)
            | Command::Completions { .. }
            | Command::Man { .. } => Ok(()),
        }
    }
}

impl ModelArg {
    /// The first word is the model if it names one, and others are texts; behind -m every word is a
    /// text, and so is a first one that stands alone or has blanks.
    fn settle_before(
        &mut self,
        texts: &mut Vec<String>,
        recognise: &dyn Fn(&str) -> Likeness,
    ) -> Outcome {
        let Some(word) = self.named.take() else { return Ok(()) };
        let behind = "texts of that look stand behind -m MODEL";
        let text = self.model.is_some() || matches!(word.as_str(), "" | "-");
        match if text { Likeness::Other } else { recognise(&word) } {
            Likeness::Model => self.model = Some(word),
            Likeness::Resembles(names) => return not_there(&word, &names, behind),
            Likeness::Other if text || texts.is_empty() || word.contains(char::is_whitespace) => {
                texts.insert(0, word);
            }
            Likeness::Other => {
                let expected = "a model in front of the texts";
                return usage(Error::new(&word, expected, "no model of that name").hint(behind));
            }
        }
        Ok(())
    }

    /// The first of two words is the model; a lone one is the other.
    fn settle_with<T: From<String>>(&mut self, other: &mut Option<T>) -> Outcome {
        if other.is_none() {
            *other = self.named.take().map(Into::into);
        }
        self.settle()
    }

    /// The first word is the model.
    fn settle(&mut self) -> Outcome {
        let Some(word) = self.named.take() else { return Ok(()) };
        if let Some(model) = &self.model {
            let found = format!("{word:?} and -m {model:?}");
            return usage(Error::new("MODEL", "one model", found));
        }
        self.model = Some(word);
        Ok(())
    }
}

/// The word that a command needs beside the model.
pub(crate) fn needed<'a, T>(word: &'a Option<T>, command: &str, what: &str) -> Outcome<&'a T> {
    let hint = || format!("delft {command} --help has an example");
    word.as_ref().map_or_else(|| usage(Error::new(command, what, "none").hint(hint())), Ok)
}

/// [`split`] for a command that takes a model and a prompt.
fn settle(model: &mut ModelArg, words: &mut Vec<String>, prompt: &mut Option<String>) -> Outcome {
    let words: Vec<String> = model.named.take().into_iter().chain(words.drain(..)).collect();
    let named = split(model.model.take(), words, prompt.take(), &hub::recognise)?;
    (model.model, *prompt) = (named.model, named.prompt);
    Ok(())
}

/// The model and the prompt of a command line with `-m` and `-p`, as far as they are given, and
/// these words.
fn split(
    model: Option<String>,
    mut words: Vec<String>,
    prompt: Option<String>,
    recognise: &dyn Fn(&str) -> Likeness,
) -> Outcome<Named> {
    if prompt.is_some() {
        return match (model, words.len()) {
            (model, 0) => Ok(Named { model, prompt }),
            (None, 1) => Ok(Named { model: words.pop(), prompt }),
            (model, _) => {
                let expected = if model.is_some() { "no words" } else { "one word, the model," };
                usage(Error::new("-p", format!("{expected} beside it"), format!("{words:?}")))
            }
        };
    }
    let joined = |words: &[String]| (!words.is_empty()).then(|| words.join(" "));
    let Some((first, rest)) = words.split_first().filter(|_| model.is_none()) else {
        return Ok(Named { model, prompt: joined(&words) });
    };
    // `-` is standard input and the empty word an empty prompt: no model has such a name.
    let likeness =
        if matches!(first.as_str(), "" | "-") { Likeness::Other } else { recognise(first) };
    match likeness {
        Likeness::Model => Ok(Named { model: Some(first.clone()), prompt: joined(rest) }),
        Likeness::Resembles(names) => {
            not_there(first, &names, &format!("if it is the prompt: -p {}", quoted(first)))
        }
        Likeness::Other if rest.is_empty() => {
            Ok(Named { model: None, prompt: Some(first.clone()) })
        }
        Likeness::Other => {
            let error =
                Error::new(first, "a model in front of the prompt", "no model of that name");
            usage(
                error
                    .hint(format!("quote a prompt of several words: {}", quoted(&words.join(" ")))),
            )
        }
    }
}

/// Refuses a word that only looks like a model's name; `text` says how it would be a text.
fn not_there<T>(word: &str, names: &[String], text: &str) -> Outcome<T> {
    let names: Vec<&str> = names.iter().map(String::as_str).filter(|name| *name != word).collect();
    let meant = match &names[..] {
        [] => "delft list shows the models on this machine".to_string(),
        names => format!("did you mean {}", names.join(", ")),
    };
    let found = match word.contains(['/', '\\']) || word.contains(".gguf") {
        true => "nothing there",
        false => "none of that name",
    };
    let hint = format!("{meant}; {text}");
    usage(Error::new(word, "a model", found).hint(hint))
}

/// A guess at the meaning of a command line that makes no sense. Takes away what clap advises
/// where that misleads: a flag that is not known would become a prompt.
pub(crate) fn advice(error: &mut clap::Error, arguments: &[OsString]) -> Option<String> {
    error.remove(ContextKind::Suggested);
    if error.kind() == ErrorKind::InvalidUtf8 {
        let odd = arguments.iter().find(|argument| argument.to_str().is_none())?;
        let shown = harmless(&odd.to_string_lossy());
        return Some(format!("{shown}: expected UTF-8 (hint: name a link to such a file)"));
    }
    if let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg)
        && let Some(instead) = elsewhere(flag)
    {
        let line = format!("{}: {instead}", harmless(flag));
        error.remove(ContextKind::SuggestedArg);
        return Some(line);
    }
    if let Some(ContextValue::String(command)) = error.get(ContextKind::InvalidSubcommand) {
        let instead = match command.as_str() {
            "version" => "delft --version tells the version",
            "login" => {
                "private and gated models come with the token in HF_TOKEN, or of `hf auth login`"
            }
            "create" => {
                "delft quantize writes a model of smaller types; its prompt and settings are flags of delft run"
            }
            "cp" => {
                "names of your own stand in models.toml: delft --help says where (DELFT_MODELS)"
            }
            "push" => "delft fetches from the hub and sends nothing there",
            _ => return without_command(arguments),
        };
        error.remove(ContextKind::SuggestedSubcommand);
        return Some(instead.to_string());
    }
    without_command(arguments)
}

/// The meaning of a command line that names no command: a prompt, a model, or the flags of a
/// program that has none.
fn without_command(arguments: &[OsString]) -> Option<String> {
    let first = arguments.get(1)?.to_str()?;
    let known = Cli::command();
    if known.find_subcommand(first).is_some() {
        return None;
    }
    let flag = first.starts_with('-');
    let prompt = first.contains(char::is_whitespace);
    if !(flag || prompt || hub::recognise(first) == Likeness::Model) {
        return None;
    }
    Some(format!(
        "to write text, name the command: delft run {}",
        if prompt { quoted(first) } else { harmless(first) }
    ))
}

/// A text as one word of a shell, shortened where it is long.
fn quoted(text: &str) -> String {
    const LONGEST: usize = 60;
    let shown: String = text.chars().take(LONGEST).collect();
    let more = if text.chars().nth(LONGEST).is_some() { ".." } else { "" };
    format!("\"{}{more}\"", harmless(&shown))
}

fn usage<T>(error: Error) -> Outcome<T> {
    Err(Stop::Usage(crate::terminal::line(&error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that knows `tiny` and everything of the form `org/name`.
    fn recognise(word: &str) -> Likeness {
        match word {
            "tiny" | "org/name" | "model.gguf" => Likeness::Model,
            "tinny" => Likeness::Resembles(vec!["tiny".to_string()]),
            "gone.gguf" => Likeness::Resembles(Vec::new()),
            _ => Likeness::Other,
        }
    }

    #[test]
    fn texts_need_no_model_in_front() {
        let settled = |model: Option<&str>, words: &[&str]| {
            let mut words = words.iter().map(|word| word.to_string());
            let named = words.next();
            let model = model.map(str::to_owned);
            let mut arg = ModelArg { model, named, yes: false };
            let mut texts: Vec<String> = words.collect();
            arg.settle_before(&mut texts, &recognise).map(|()| (arg.model, texts))
        };
        for (model, words, found) in [
            (None, &["tiny", "a", "b"][..], (Some("tiny"), &["a", "b"][..])),
            (None, &["hello there"], (None, &["hello there"])),
            (None, &["a b", "tiny"], (None, &["a b", "tiny"])),
            (None, &["-", "tiny"], (None, &["-", "tiny"])),
            (None, &["-"], (None, &["-"])),
            (Some("x"), &["tiny", "b"], (Some("x"), &["tiny", "b"])),
            (None, &[], (None, &[])),
        ] {
            let (named, texts) = settled(model, words).unwrap();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            assert_eq!((named.as_deref(), &texts[..]), found);
        }
        let Err(Stop::Usage(said)) = settled(None, &["tinny", "a"]) else { panic!("tinny") };
        assert!(said.contains("did you mean tiny"), "{said}");
        let Err(Stop::Usage(said)) = settled(None, &["a", "b"]) else { panic!("a") };
        assert!(said.contains("no model of that name") && said.contains("-m MODEL"), "{said}");
        // A link to nothing is near its own name.
        let Err(Stop::Usage(said)) = not_there::<()>("a.gguf", &["a.gguf".into()], "") else {
            panic!("a.gguf")
        };
        assert!(said.contains("delft list"), "{said}");
    }

    #[test]
    fn the_first_word_is_the_model_if_it_names_one() {
        struct Case {
            model: Option<&'static str>,
            words: &'static [&'static str],
            prompt: Option<&'static str>,
            /// Model and prompt, or a part of the refusal.
            found: Result<(Option<&'static str>, Option<&'static str>), &'static str>,
            why: &'static str,
        }
        let case = |model, words, prompt, found, why| Case { model, words, prompt, found, why };
        let cases = [
            case(None, &[], None, Ok((None, None)), "nothing: the bundled model tells a story"),
            case(None, &["tiny"], None, Ok((Some("tiny"), None)), "a model alone"),
            case(None, &["org/name"], None, Ok((Some("org/name"), None)), "a hub id alone"),
            case(None, &["model.gguf"], None, Ok((Some("model.gguf"), None)), "a file alone"),
            case(None, &["hello"], None, Ok((None, Some("hello"))), "a prompt of one word"),
            case(
                None,
                &["Once upon a time"],
                None,
                Ok((None, Some("Once upon a time"))),
                "a quoted prompt",
            ),
            case(None, &["-"], None, Ok((None, Some("-"))), "standard input"),
            case(None, &[""], None, Ok((None, Some(""))), "the empty prompt"),
            case(
                None,
                &["tiny", "hello"],
                None,
                Ok((Some("tiny"), Some("hello"))),
                "model and prompt",
            ),
            case(
                None,
                &["tiny", "-"],
                None,
                Ok((Some("tiny"), Some("-"))),
                "model and standard input",
            ),
            case(
                None,
                &["tiny", "why", "is", "it?"],
                None,
                Ok((Some("tiny"), Some("why is it?"))),
                "a prompt that nobody quoted",
            ),
            case(
                None,
                &["tiny", "tiny"],
                None,
                Ok((Some("tiny"), Some("tiny"))),
                "the second word is the prompt",
            ),
            case(
                Some("x"),
                &["tiny"],
                None,
                Ok((Some("x"), Some("tiny"))),
                "with -m all words are the prompt",
            ),
            case(
                Some("x"),
                &["tinny", "a"],
                None,
                Ok((Some("x"), Some("tinny a"))),
                "whatever they look like",
            ),
            case(Some("x"), &[], None, Ok((Some("x"), None)), "-m alone"),
            case(
                None,
                &[],
                Some("tinny"),
                Ok((None, Some("tinny"))),
                "with -p it is always the prompt",
            ),
            case(
                None,
                &["any"],
                Some("a"),
                Ok((Some("any"), Some("a"))),
                "so the word beside it is the model",
            ),
            case(Some("x"), &[], Some("a"), Ok((Some("x"), Some("a"))), "both by option"),
            case(Some("x"), &["y"], Some("a"), Err("no words beside it"), "nothing left to be"),
            case(
                None,
                &["x", "y"],
                Some("a"),
                Err("one word, the model, beside it"),
                "one too many",
            ),
            case(
                None,
                &["tinny"],
                None,
                Err("did you mean tiny"),
                "a model that was meant is no prompt",
            ),
            case(
                None,
                &["tinny", "hello"],
                None,
                Err("did you mean tiny"),
                "nor with a prompt behind it",
            ),
            case(None, &["gone.gguf"], None, Err("-p \"gone.gguf\""), "a file that is not there"),
            case(
                None,
                &["Once", "upon"],
                None,
                Err("several words: \"Once upon\""),
                "or a model is missing",
            ),
        ];
        for Case { model, words, prompt, found, why } in cases {
            let owned = |text: Option<&str>| text.map(str::to_string);
            let list = words.iter().map(|word| word.to_string()).collect();
            match (split(owned(model), list, owned(prompt), &recognise), found) {
                (Ok(named), Ok((model, prompt))) => {
                    let wanted = Named { model: owned(model), prompt: owned(prompt) };
                    assert_eq!(named, wanted, "{why}");
                }
                (Err(Stop::Usage(said)), Err(part)) => {
                    assert!(said.contains(part), "{why}: {said}")
                }
                (found, _) => panic!("{why}: {found:?}"),
            }
        }
    }
}
