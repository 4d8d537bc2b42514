//! `delft rm`: out of the cache.

use delft::Error;
use delft::hub::{Hub, Removal};

use crate::args::Rm;
use crate::fetch;
use crate::terminal::{Outcome, aside, bytes, harmless};

pub(crate) fn run(args: &Rm) -> Outcome {
    let hub = Hub::from_env()?;
    // All names first: one that is wrong leaves everything as it is.
    let removals: Vec<Removal> =
        args.models.iter().map(|name| hub.removal(name)).collect::<Result<_, _>>()?;
    for (name, removal) in args.models.iter().zip(removals) {
        remove(name, removal, args.yes)?;
    }
    Ok(())
}

fn remove(name: &str, removal: Removal, yes: bool) -> Outcome {
    if !yes {
        if !fetch::somebody_is_there() {
            let error = Error::new(name, "--yes, or a terminal to ask at", "neither");
            return Err(error.into());
        }
        if !fetch::confirm(&format!("Remove {}?", described(&removal)), false)? {
            aside(format_args!("{}: kept", harmless(name)));
            return Ok(());
        }
    }
    let done = format!("removed {}", described(&removal));
    removal.run()?;
    aside(done);
    Ok(())
}

/// `org/name (m-Q8_0.gguf, 610.0 MiB)`.
fn described(removal: &Removal) -> String {
    let files = match &removal.files[..] {
        [] => "unfinished downloads".to_string(),
        [file] => file.clone(),
        files => format!("{} files", files.len()),
    };
    let partial = match removal.partial_bytes {
        0 => String::new(),
        partial => format!(", {} of it unfinished", bytes(partial)),
    };
    harmless(&format!("{} ({files}, {}{partial})", removal.id, bytes(removal.bytes)))
}
