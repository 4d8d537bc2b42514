//! Models that are not on this machine yet: whether Delft can run them, whether they are wanted,
//! and their arrival.

use std::io::{BufRead, Write};

use delft::Error;
use delft::hub::{Hub, LocalModel, Offer, PullProgress};

use crate::progress::Downloads;
use crate::terminal::{Outcome, bytes, harmless, stderr_is_terminal, stdin_is_terminal};

/// Fetches a model that a command needs and that is not here: after a question at a terminal,
/// without one only with `--yes`. `absent` is the error where it is not fetched.
pub(crate) fn absent(hub: &Hub, name: &str, yes: bool, absent: Error) -> Outcome<LocalModel> {
    if hub.offline {
        return Err(absent.hint("HF_HUB_OFFLINE is set: unset it to fetch the model").into());
    }
    if !yes && !somebody_is_there() {
        return Err(absent.hint(format!("delft pull {name}, or --yes")).into());
    }
    let downloads = Downloads::new();
    let offer = hub.offer(name, &downloads)?;
    check(&offer, &downloads, "delft pull --force")?;
    if !yes && !confirm(&question(name, &offer), true)? {
        return Err(absent.into());
    }
    Ok(offer.fetch(&downloads)?)
}

/// Refuses a model that Delft cannot run, by its configuration or its first keys, before its
/// weights come. `force` is the command that fetches it all the same.
pub(crate) fn check(offer: &Offer<'_>, progress: &dyn PullProgress, force: &str) -> Outcome {
    let Some(error) = delft::objection(offer, progress)? else { return Ok(()) };
    let why = error.hint.clone().unwrap_or_else(|| "Delft cannot run it".into());
    Err(error.hint(why.and(format_args!("; {force} fetches it all the same"))).into())
}

/// The model, its size, and where it goes.
fn question(name: &str, offer: &Offer<'_>) -> String {
    let file = offer.file().map_or(String::new(), |file| format!("{file}, "));
    let size = offer.missing_bytes().map_or("of unknown size".to_string(), bytes);
    let what =
        if name == offer.id() { name.to_string() } else { format!("{name} ({})", offer.id()) };
    format!(
        "{} is not on this machine ({file}{size}). Fetch it into {}?",
        harmless(&what),
        offer.cache().display()
    )
}

/// Whether a question can be asked.
pub(crate) fn somebody_is_there() -> bool {
    stdin_is_terminal() && stderr_is_terminal()
}

/// Asks at the terminal; return alone means what is `usual`.
pub(crate) fn confirm(question: &str, usual: bool) -> Outcome<bool> {
    let choice = if usual { "[Y/n]" } else { "[y/N]" };
    let mut terminal = anstream::stderr().lock();
    // Where the question cannot be written nobody answers it.
    let _ = write!(terminal, "{question} {choice} ").and_then(|()| terminal.flush());
    drop(terminal);
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    let read = read.map_err(|error| Error::io("standard input", error))?;
    Ok(match &*answer.trim().to_lowercase() {
        "" => usual && read > 0,
        answer => matches!(answer, "y" | "yes"),
    })
}
