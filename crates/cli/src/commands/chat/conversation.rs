//! A conversation: as chat templates read it, as text to continue, and as a file.

use std::io::Write;
use std::path::Path;

use delft::Error;
use delft::formats::text;
use serde_json::{Value, json};

use super::super::run::message;
use crate::terminal::{Outcome, Stop, no_json};

/// Largest file that is read, and longest message: far more than any context holds, and little to
/// hold in memory.
pub(super) const LARGEST: usize = 16 << 20;

/// The turns of the user and the model. `turns` alternates between user and assistant, from a user
/// on.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Conversation {
    pub(super) system: Option<String>,
    pub(super) turns: Vec<Turn>,
}

/// One turn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Turn {
    pub(super) role: Role,
    pub(super) text: String,
    /// The model's reasoning before its answer; empty for most models, and for users.
    pub(super) reasoning: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    User,
    Assistant,
}

impl Turn {
    pub(super) fn new(role: Role, text: impl Into<String>) -> Turn {
        Turn { role, text: text.into(), reasoning: String::new() }
    }

    fn message(&self) -> Value {
        let role = match self.role {
            Role::User => "user",
            Role::Assistant => "assistant",
        };
        let mut message = message(role, &self.text);
        if !self.reasoning.is_empty() {
            // The name by which templates know it. Those that do not leave it out, as their makers
            // advise.
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        message
    }
}

impl Conversation {
    /// The conversation as chat templates read it; also what is saved.
    pub(super) fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.turns.iter().map(Turn::message)).collect()
    }

    /// The conversation as text to continue: its parts with a space between them where they bring
    /// none.
    pub(super) fn text(&self) -> String {
        let mut text = self.system.clone().unwrap_or_default();
        for Turn { text: part, .. } in &self.turns {
            let apart = text.is_empty()
                || text.ends_with(char::is_whitespace)
                || part.starts_with(char::is_whitespace);
            text += if apart { "" } else { " " };
            text += part;
        }
        text
    }

    /// The last answer, if it is the last turn.
    pub(super) fn answer(&mut self) -> Option<&mut Turn> {
        self.turns.last_mut().filter(|turn| turn.role == Role::Assistant)
    }

    /// Removes the last question and its answer, and gives both.
    pub(super) fn take_back(&mut self) -> Option<Vec<Turn>> {
        let at = self.turns.iter().rposition(|turn| turn.role == Role::User)?;
        Some(self.turns.split_off(at))
    }

    fn from_messages(place: &str, json: &Value) -> Result<Conversation, Error> {
        let wrong = |expected: &str, found: String| Error::new(place, expected, found);
        let messages = json["messages"].as_array();
        let messages = messages
            .ok_or_else(|| wrong("an object with a list \"messages\"", "none".to_string()))?;
        let mut conversation = Conversation::default();
        for entry in messages {
            let content = entry["content"].as_str();
            let content = content
                .ok_or_else(|| wrong("text in \"content\"", entry["content"].to_string()))?
                .to_string();
            let turns = conversation.turns.len();
            match entry["role"].as_str() {
                Some("system") if turns == 0 && conversation.system.is_none() => {
                    conversation.system = Some(content)
                }
                Some("user") if turns % 2 == 0 => {
                    conversation.turns.push(Turn::new(Role::User, content))
                }
                Some("assistant") if turns % 2 == 1 => {
                    let reasoning = entry["reasoning_content"].as_str().unwrap_or_default();
                    let turn = Turn::new(Role::Assistant, content);
                    conversation.turns.push(Turn { reasoning: reasoning.to_string(), ..turn });
                }
                _ => {
                    return Err(wrong(
                        "user and assistant in turn after at most one system message",
                        entry["role"].to_string(),
                    ));
                }
            }
        }
        // A question without its answer was interrupted; it can be asked again.
        conversation.turns.truncate(conversation.turns.len() / 2 * 2);
        Ok(conversation)
    }

    /// The conversation in a file.
    pub(super) fn load(path: &Path) -> Outcome<Conversation> {
        let place = path.display().to_string();
        let json = serde_json::from_str(&read(path)?)
            .map_err(|error| no_json(&place, "a saved conversation", &error))?;
        Ok(Conversation::from_messages(&place, &json)?)
    }

    /// Writes the conversation to a file: beside it first, so that a full disk leaves the old one
    /// whole. False, and nothing is written, if there is one that may not be replaced.
    pub(super) fn save(&self, path: &Path, replace: bool) -> Outcome<bool> {
        let failed = |error| Stop::Error(Error::io(path.display(), error));
        // A link stays one: its target is replaced.
        let target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let old = std::fs::metadata(&target).ok();
        match &old {
            Some(old) if !old.is_file() => {
                return Err(Error::new(path.display(), "a file", "something else").into());
            }
            Some(_) if !replace => return Ok(false),
            _ => {}
        }
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        // The temporary file's error would name that file in place of the folder.
        std::fs::metadata(folder).map_err(failed)?;
        let aside = tempfile::Builder::new().prefix(".delft-").tempfile_in(folder);
        let mut aside = aside.map_err(failed)?;
        let text = format!("{:#}\n", json!({ "messages": self.messages() }));
        aside.write_all(text.as_bytes()).map_err(failed)?;
        if let Some(old) = old {
            aside.as_file().set_permissions(old.permissions()).map_err(failed)?;
            aside.persist(&target).map_err(|error| failed(error.error))?;
        } else if let Err(error) = aside.persist_noclobber(&target) {
            return if error.error.kind() == std::io::ErrorKind::AlreadyExists {
                Ok(false)
            } else {
                Err(failed(error.error))
            };
        }
        Ok(true)
    }
}

/// A text file as a whole, unless it is too large to be one that somebody wants read.
pub(super) fn read(path: &Path) -> Outcome<String> {
    let failed = |error| Stop::Error(Error::io(path.display(), error));
    let expected = format!("a file of at most {} MiB", LARGEST >> 20);
    // Asked before it is opened: a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::new(path.display(), expected, "something else").into());
    }
    Ok(text::read(path, LARGEST as u64)?)
}

/// A path as it was typed: `~/` is the home folder, since no shell has read it.
pub(super) fn path(typed: &str) -> std::path::PathBuf {
    match (typed.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => typed.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation() -> Conversation {
        let answer = Turn::new(Role::Assistant, "c");
        let turns = vec![
            Turn::new(Role::User, "a\nb"),
            Turn { reasoning: "why".to_string(), ..answer },
            Turn::new(Role::User, "d"),
            Turn::new(Role::Assistant, ""),
        ];
        Conversation { system: Some("s".to_string()), turns }
    }

    #[test]
    fn conversations_survive_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("talk.json");
        let whole = conversation();
        assert!(whole.save(&file, false).unwrap());
        assert_eq!(Conversation::load(&file).unwrap(), whole);
        for bad in [
            json!({}),
            json!({ "messages": [{ "role": "assistant", "content": "x" }] }),
            json!({ "messages": [{ "role": "user" }] }),
        ] {
            assert!(Conversation::from_messages("f", &bad).is_err());
        }
    }

    #[test]
    fn a_file_is_replaced_only_when_that_is_meant() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("talk.json");
        std::fs::write(&file, "precious").unwrap();
        assert!(!conversation().save(&file, false).unwrap());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
        assert!(conversation().save(&file, true).unwrap());
        assert_eq!(Conversation::load(&file).unwrap(), conversation());
        let left = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 1, "nothing lies beside it");
        assert!(conversation().save(folder.path(), true).is_err(), "a folder is no file");
        let nowhere = folder.path().join("none/talk.json");
        let Err(Stop::Error(error)) = conversation().save(&nowhere, false) else {
            panic!("{nowhere:?}")
        };
        assert!(!error.to_string().contains(".delft-"), "{error}");
    }

    #[test]
    fn a_file_that_is_too_large_or_no_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("large");
        std::fs::write(&file, vec![b'x'; LARGEST]).unwrap();
        assert_eq!(read(&file).unwrap().len(), LARGEST);
        std::fs::write(&file, vec![b'x'; LARGEST + 1]).unwrap();
        assert!(read(&file).is_err());
        std::fs::write(&file, b"\xff").unwrap();
        assert!(read(&file).is_err());
        assert!(read(folder.path()).is_err());
    }

    #[test]
    fn an_answer_is_taken_back_with_its_question() {
        let mut talk = conversation();
        assert_eq!(talk.take_back().unwrap()[0].text, "d");
        assert_eq!(talk.take_back().unwrap().len(), 2);
        assert_eq!(talk.take_back(), None);
    }
}
