//! `delft list`: what is on this machine.

use std::time::SystemTime;

use delft::hub::{self, Cached, Container};
use serde_json::json;
use time::UtcDateTime;

use crate::args::List;
use crate::terminal::{Outcome, aside, bytes, harmless, print, print_json, table};

pub(crate) fn run(args: &List) -> Outcome {
    let models = hub::list()?;
    if args.json {
        return print_json(&models.iter().map(entry).collect());
    }
    if models.is_empty() {
        aside("no models yet (delft pull qwen3:0.6b fetches one)");
        return Ok(());
    }
    let rows: Vec<_> = models.iter().map(row).collect();
    print(&table(
        &["MODEL", "REVISION", "KIND", "FILES", "SIZE", "FETCHED"],
        &[false, false, false, true, true, false],
        &rows,
    ))?;
    // What is in the program takes no room of its own.
    let cached = || models.iter().filter(|model| model.modified.is_some());
    let all = cached().map(|model| model.own_bytes + model.partial_bytes).sum();
    if cached().count() > 0 {
        let partial: u64 = cached().map(|model| model.partial_bytes).sum();
        aside(format_args!("{} in the cache{}", bytes(all), unfinished(partial, " of it")));
    }
    Ok(())
}

fn entry(m: &Cached) -> serde_json::Value {
    let files: Vec<_> =
        m.files.iter().map(|f| json!({ "name": f.name, "bytes": f.size })).collect();
    json!({
        "id": m.id,
        "revision": m.commit,
        "refs": m.refs,
        "kind": m.kind.map(kind),
        "bytes": m.bytes,
        "own_bytes": m.own_bytes,
        "partial_bytes": m.partial_bytes,
        "fetched": m.modified.map(moment),
        "path": m.path.as_ref().map(|path| path.display().to_string()),
        "files": files,
    })
}

fn row(m: &Cached) -> Vec<String> {
    let short: String = m.commit.chars().take(8).collect();
    let refs = if m.refs.is_empty() { String::new() } else { format!(" {}", m.refs.join(",")) };
    let kind = match m.kind {
        Some(known) => kind(known),
        None if m.files.is_empty() => "unfinished",
        None => "-",
    };
    let size = if m.files.is_empty() {
        bytes(m.partial_bytes)
    } else {
        format!("{}{}", bytes(m.bytes), unfinished(m.partial_bytes, " more"))
    };
    vec![
        harmless(&m.id),
        harmless(format!("{short}{refs}").trim()),
        kind.to_string(),
        m.files.len().to_string(),
        size,
        m.modified.map_or(String::new(), |at| UtcDateTime::from(at).date().to_string()),
    ]
}

/// ` (12.0 MiB more unfinished)`, unless there is nothing.
fn unfinished(partial: u64, of: &str) -> String {
    if partial == 0 { String::new() } else { format!(" ({}{of} unfinished)", bytes(partial)) }
}

/// A time in UTC, to the second, as RFC 3339 writes it.
fn moment(at: SystemTime) -> String {
    let at = UtcDateTime::from(at);
    format!("{}T{:02}:{:02}:{:02}Z", at.date(), at.hour(), at.minute(), at.second())
}

fn kind(kind: Container) -> &'static str {
    match kind {
        Container::Gguf => "gguf",
        Container::Folder => "safetensors",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_other_programs_read_them() {
        let at = SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1_764_561_735_900);
        assert_eq!(moment(at), "2025-12-01T04:02:15Z");
    }
}
