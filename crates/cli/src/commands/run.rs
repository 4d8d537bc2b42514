//! `delft run`: one prompt, one text.

use std::io::Write;

use delft::hub::{Model, Source};
use delft::{Engine, Error, Prompt};
use serde_json::{Value, json};

use crate::args::Run;
use crate::generate::generate;
use crate::terminal::{Outcome, Stop, aside, print_json, read_stdin, stdin_is_terminal};
use crate::{load, sampling};

/// How the bundled model's stories begin when nobody says otherwise.
const OPENING: &str = "Once upon a time";

/// What the text continues.
struct Opening {
    text: String,
    /// The program chose it, so it belongs to the text shown.
    shown: bool,
}

pub(crate) fn run(args: &Run) -> Outcome {
    // Standard input is read before the model is loaded: a prompt that is missing shall not cost that time.
    let opening = opening(args)?;
    let (engine, model) = load::engine(&args.load, args.verbose)?;
    let (prompt, templated) = prompt(args, &engine, &model, &opening.text)?;
    let options = sampling::options(&engine, &args.sampling);
    if args.verbose {
        describe(&engine, &prompt, templated, &options)?;
    }
    let mut session = engine.session();
    let mut out = std::io::stdout().lock();
    if opening.shown && !args.json {
        write!(out, "{}", opening.text)?;
        out.flush()?;
    }
    let answer = generate(&mut session, prompt, &options, &mut |piece| {
        if !args.json {
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    })?;
    if args.json {
        drop(out);
        return print_json(&json!({
            "model": engine.info().name,
            "prompt": opening.text,
            "text": answer.text,
            "tokens": answer.tokens,
            "finish": answer.finish.name(),
            "sampling": sampling::to_json(&options),
            "metrics": answer.metrics_json(),
        }));
    }
    if !answer.text.ends_with('\n') {
        writeln!(out)?;
        out.flush()?;
    }
    if !args.quiet {
        aside(answer.summary(&engine));
    }
    Ok(())
}

/// The prompt from the command line or standard input, or the bundled model's own opening.
fn opening(args: &Run) -> Outcome<Opening> {
    let bundled = args.load.model.model.is_none();
    let given = |text: String| Ok(Opening { text, shown: false });
    let text = match args.prompt.as_deref() {
        Some("-") => read_stdin()?,
        Some(text) => return given(text.to_string()),
        None if stdin_is_terminal() => String::new(),
        None => read_stdin()?,
    };
    match (text.is_empty(), bundled) {
        (false, _) => given(text),
        (true, true) => Ok(Opening { text: OPENING.to_string(), shown: true }),
        (true, false) => Err(Stop::Usage(
            "prompt: expected PROMPT or text on standard input, found none".to_string(),
        )),
    }
}

/// The prompt as the engine takes it, and whether the chat template is applied.
fn prompt(args: &Run, engine: &Engine, model: &Model, text: &str) -> Outcome<(Prompt, bool)> {
    let instructed = engine.chat_template().is_some() && model.source != Source::Bundled;
    if !(args.chat || (instructed && !args.raw)) {
        if args.system.is_some() {
            let error = Error::new("--system", "a model with a chat template", "none");
            return Err(error.hint("write what you want to say into the prompt").into());
        }
        return Ok((Prompt::Text(text.to_string()), false));
    }
    let system = args.system.iter().map(|content| message("system", content));
    let messages = system.chain([message("user", text)]).collect();
    Ok((Prompt::Chat { messages, extra: serde_json::Map::new() }, true))
}

/// A message as chat templates read it.
pub(crate) fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

fn describe(
    engine: &Engine,
    prompt: &Prompt,
    templated: bool,
    options: &delft::GenerateOptions,
) -> Outcome {
    let form = if templated { "chat template applied" } else { "as it stands" };
    aside(format_args!("prompt: {form}"));
    if let (Prompt::Text(text), Some(tokenizer)) = (prompt, engine.tokenizer()) {
        let tokens = tokenizer.encode(text, delft::tokens::Special { add: true, parse: false })?;
        aside(format_args!("prompt tokens: {tokens:?}"));
    }
    let settings: Vec<String> =
        sampling::settings(options).iter().map(|(name, value)| format!("{name} {value}")).collect();
    aside(format_args!("settings: {}", settings.join(", ")));
    aside(format_args!("sampling: {}", options.sampling.describe()));
    Ok(())
}
