//! The commands of a chat.

use delft::{Error, GenerateOptions};

use super::commands::{AFTERWORD, COMMANDS, Command, Given};
use super::conversation::{Conversation, Turn, path, read};
use super::render::View;
use super::{Next, Talk, first_switch};
use crate::args::LoadArgs;
use crate::terminal::{Outcome, Stop, bytes, count, harmless, note, stdout_is_terminal};
use crate::wrap::laid_out;
use crate::{load, sampling};

/// Answers of commands go to stderr: stdout is the model's.
fn say(text: impl AsRef<str>) -> Outcome<Next> {
    note(laid_out("", text.as_ref()));
    Ok(Next::Go)
}

/// A command that makes no sense: told at a terminal, an error in a pipe.
fn wrong(place: impl std::fmt::Display, expected: &str, found: &str) -> Outcome<Next> {
    let found = if found.is_empty() { "nothing" } else { found };
    Err(Error::new(place, expected, found).into())
}

pub(super) fn help(_: &mut Talk, _: Given) -> Outcome<Next> {
    for Command { name, usage, help, .. } in COMMANDS {
        note(laid_out(&format!("{:<20}", format!("/{name} {usage}")), help));
    }
    say(laid_out("", AFTERWORD))
}

pub(super) fn system(talk: &mut Talk, given: Given) -> Outcome<Next> {
    if given.text.is_empty() {
        return say(talk.conversation.system.as_deref().unwrap_or("no system message"));
    }
    talk.conversation.system = Some(given.text.to_string()).filter(|text| text != "none");
    say("the system message holds from the next answer on")
}

pub(super) fn file(talk: &mut Talk, given: Given) -> Outcome<Next> {
    if given.text.is_empty() {
        return wrong("/file", "a file name", "none");
    }
    let text = read(&path(given.text))?;
    let size = text.chars().count();
    talk.files.push(text);
    say(format!("the next message begins with {} ({size} characters)", harmless(given.text)))
}

pub(super) fn clear(talk: &mut Talk, _: Given) -> Outcome<Next> {
    talk.conversation.turns.clear();
    talk.forget();
    say("the conversation is forgotten")
}

pub(super) fn reset(talk: &mut Talk, _: Given) -> Outcome<Next> {
    let system = talk.args.system.clone();
    talk.conversation = Conversation { system, turns: Vec::new() };
    talk.options = sampling::options(&talk.engine, &talk.args.sampling)?;
    talk.thinking = first_switch(talk.args);
    talk.screen.view = View::first(talk.args.think);
    talk.forget();
    say("everything is as it was at the start")
}

pub(super) fn undo(talk: &mut Talk, _: Given) -> Outcome<Next> {
    talk.cut = None;
    match talk.conversation.take_back().as_deref() {
        Some([question, ..]) => {
            say(format!("taken back: {}", question.text.lines().next().unwrap_or_default()))
        }
        _ => wrong("/undo", "a question to take back", "none"),
    }
}

pub(super) fn regen(talk: &mut Talk, _: Given) -> Outcome<Next> {
    let Some(turns) = talk.conversation.take_back() else {
        return wrong("/regen", "a question to answer", "none");
    };
    // The same seed at the same place would give the same answer.
    talk.options.sampling.seed = talk.options.sampling.seed.wrapping_add(1);
    let question = turns.first().map(|turn| turn.text.clone()).unwrap_or_default();
    let cut = talk.cut.take();
    let answered = talk.ask(question);
    if !matches!(answered, Ok(true)) {
        // The old answer is better than none.
        talk.conversation.turns.extend(turns);
        talk.cut = cut;
    }
    answered.map(|_| Next::Go)
}

pub(super) fn go_on(talk: &mut Talk, _: Given) -> Outcome<Next> {
    if talk.cut.is_none() {
        return wrong("/continue", "an answer that was cut", "none");
    }
    talk.go_on().map(|()| Next::Go)
}

pub(super) fn think(talk: &mut Talk, given: Given) -> Outcome<Next> {
    let switch = |on| if on { "on" } else { "off" };
    match given.text.to_lowercase().as_str() {
        "" => {
            let now = talk.thinking.map_or("as the model's template has it", switch);
            return say(format!("reasoning: {now}; view: {}", talk.screen.view.name()));
        }
        word @ ("on" | "off") => {
            talk.thinking = Some(word == "on");
            if talk.switches().is_empty() {
                talk.thinking = None;
                let place = format!("/think {word}");
                return wrong(place, "a chat template with a switch for reasoning", "none");
            }
            return say(format!("reasoning is {word} from the next answer on"));
        }
        "show" => talk.screen.view = View::Show,
        "fold" => talk.screen.view = View::Fold,
        "hide" => talk.screen.view = View::Hide,
        _ => return wrong("/think", "on, off, show, fold or hide", given.text),
    }
    let last = talk.conversation.answer().map(|turn| turn.reasoning.clone()).unwrap_or_default();
    if talk.screen.view == View::Show && !last.is_empty() {
        talk.screen.show_reasoning(&last)?;
    }
    say(format!("reasoning: {}", talk.screen.view.name()))
}

pub(super) fn set(talk: &mut Talk, given: Given) -> Outcome<Next> {
    let (key, value) = given.text.split_once(char::is_whitespace).unwrap_or((given.text, ""));
    let (key, value) = (key.to_lowercase(), value.trim());
    if value.is_empty() {
        return show_settings(&talk.options, &key);
    }
    let first = sampling::options(&talk.engine, &talk.args.sampling)?;
    if let Err(problem) = change(&mut talk.options, &first, &key, value) {
        return wrong(format_args!("/set {key}"), problem.trim_start_matches("expected "), value);
    }
    if matches!(key.as_str(), "max-tokens" | "stop") {
        return show_settings(&talk.options, &key);
    }
    say(format!("sampling: {}", talk.options.sampling.describe()))
}

/// Changes a setting; `default` is what it was `first`, and `none` no limit.
fn change(
    options: &mut GenerateOptions,
    first: &GenerateOptions,
    key: &str,
    value: &str,
) -> Result<(), String> {
    match (key, value) {
        ("max-tokens", "none") => options.max_tokens = None,
        ("max-tokens", "default") => options.max_tokens = first.max_tokens,
        ("stop", "default") => options.stop = first.stop.clone(),
        (_, "default") => {
            let value = sampling::settings(first).into_iter().find(|(name, _)| *name == key);
            let value = value.map_or(String::new(), |(_, value)| value);
            sampling::set(options, key, &value)?;
        }
        _ => sampling::set(options, key, value)?,
    }
    Ok(())
}

/// The names of all settings.
pub(super) fn settings() -> Vec<&'static str> {
    sampling::settings(&GenerateOptions::default()).into_iter().map(|(name, _)| name).collect()
}

/// Tells all settings, or one.
fn show_settings(options: &GenerateOptions, key: &str) -> Outcome<Next> {
    let all = sampling::settings(options);
    if !key.is_empty() && !settings().contains(&key) {
        return wrong("/set", &format!("one of {}", settings().join(", ")), key);
    }
    for (name, value) in all.iter().filter(|(name, _)| key.is_empty() || *name == key) {
        note(format_args!("{name:<20}{value}"));
    }
    Ok(Next::Go)
}

pub(super) fn stats(talk: &mut Talk, _: Given) -> Outcome<Next> {
    let (used, context) = (talk.used()?, talk.engine.info().context);
    let turns = talk.conversation.turns.len();
    // The template's end of an answer need not fit, and a context that rotates has forgotten the
    // tokens beyond it.
    let held = used.min(context);
    say(format!("context: {held} of {context} tokens in {turns} turns"))?;
    match &talk.last {
        Some(answer) => say(format!("last answer: {}", answer.summary(&talk.engine))),
        None => Ok(Next::Go),
    }
}

pub(super) fn model(talk: &mut Talk, _: Given) -> Outcome<Next> {
    let info = talk.engine.info();
    let form = match talk.engine.chat_template() {
        Some(_) => "has a chat template",
        None => "has no chat template: it continues what you type",
    };
    say(format!(
        "{} ({}): {} parameters, {} on {}",
        harmless(&info.name),
        info.architecture,
        count(info.parameters),
        bytes(info.file_bytes),
        info.device
    ))?;
    say(format!(
        "context {} of {} trained; vocabulary {}; {form}",
        info.context, info.trained_context, info.vocab
    ))?;
    say(format!("from {}", harmless(&talk.model.location.to_string())))
}

pub(super) fn rotate(talk: &mut Talk, given: Given) -> Outcome<Next> {
    let context = talk.engine.info().context;
    match given.text {
        "" if !talk.rotates => {
            return say(format!(
                "the context holds {context} tokens, then answers end; /rotate on has it forget the oldest instead"
            ));
        }
        "on" if !talk.rotates => {
            // A window of all layers is part of what was recorded, so the model is loaded anew; the
            // one that is here stays until then, should it fail.
            let anew =
                LoadArgs { rotate: true, ctx: Some(context as u64), ..talk.args.load.clone() };
            let (engine, _) = load::engine(&anew, talk.args.verbose)?;
            talk.session = load::session(&engine)?;
            talk.engine = engine;
            talk.rotates = true;
        }
        "" | "on" => {}
        other => return wrong("/rotate", "on, or nothing to tell how it is", other),
    }
    say(format!("the context holds {context} tokens, then forgets the oldest"))
}

pub(super) fn save(talk: &mut Talk, given: Given) -> Outcome<Next> {
    if given.text.is_empty() {
        return wrong("/save", "a file name", "none");
    }
    let file = path(given.text);
    let turns = talk.conversation.turns.len();
    let saved = || say(format!("saved {turns} turns to {}", harmless(given.text)));
    if talk.conversation.save(&file, given.insists)? {
        return saved();
    }
    let question = format!("{} is there already. Replace it?", harmless(given.text));
    match talk.lines.confirm(&question)? {
        None => Err(Error::new(given.text, "a new file", "one that is there already")
            .hint("/save! replaces it")
            .into()),
        Some(false) => say("not saved"),
        Some(true) => {
            talk.conversation.save(&file, true)?;
            saved()
        }
    }
}

pub(super) fn load(talk: &mut Talk, given: Given) -> Outcome<Next> {
    if given.text.is_empty() {
        return wrong("/load", "a file name", "none");
    }
    talk.conversation = Conversation::load(&path(given.text))?;
    talk.forget();
    say(format!("{} turns loaded", talk.conversation.turns.len()))
}

/// The clipboard is the terminal's: an escape sequence (OSC 52) asks for it, also through SSH.
pub(super) fn copy(talk: &mut Talk, _: Given) -> Outcome<Next> {
    let Some(Turn { text, .. }) = talk.conversation.answer() else {
        return wrong("/copy", "an answer", "none");
    };
    if !stdout_is_terminal() {
        return wrong("/copy", "a terminal on standard output", "a pipe or a file");
    }
    let mut out = std::io::stdout().lock();
    let written = std::io::Write::write_all(
        &mut out,
        format!("\x1b]52;c;{}\x07", base64(text.as_bytes())).as_bytes(),
    );
    written.and_then(|()| std::io::Write::flush(&mut out)).map_err(Stop::from)?;
    say(format!("{} characters, if the terminal allows it", text.chars().count()))
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |group: &[u8]| {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let digit = |at: usize| match at <= group.len() {
            true => DIGITS[(bits >> (18 - 6 * at)) as usize & 63] as char,
            false => '=',
        };
        (0..4).map(digit).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_as_rfc_4648_has_it() {
        for (bytes, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[255, 254, 253]), "//79");
    }
}
