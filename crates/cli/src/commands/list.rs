//! `delft list`: what is on this machine.

use delft::hub::{self, Cached, Kind};
use serde_json::json;

use crate::args::List;
use crate::terminal::{Outcome, aside, bytes, harmless, print, print_json, table};

pub(crate) fn run(args: &List) -> Outcome {
    let models = hub::list()?;
    if args.json {
        let entry = |m: &Cached| {
            let files: Vec<_> =
                m.files.iter().map(|f| json!({ "name": f.name, "bytes": f.size })).collect();
            json!({
                "id": m.id,
                "revision": m.commit,
                "refs": m.refs,
                "kind": m.kind.map(kind),
                "bytes": m.bytes,
                "partial_bytes": m.partial_bytes,
                "path": m.path.as_ref().map(|path| path.display().to_string()),
                "files": files,
            })
        };
        return print_json(&models.iter().map(entry).collect());
    }
    if models.is_empty() {
        aside("no models yet (delft pull org/name)");
        return Ok(());
    }
    let row = |m: &Cached| {
        let short: String = m.commit.chars().take(8).collect();
        let refs = if m.refs.is_empty() { String::new() } else { format!(" {}", m.refs.join(",")) };
        let partial = if m.partial_bytes > 0 {
            format!(" (+{} unfinished)", bytes(m.partial_bytes))
        } else {
            String::new()
        };
        vec![
            harmless(&m.id),
            harmless(format!("{short}{refs}").trim()),
            m.kind.map_or("-", kind).to_string(),
            m.files.len().to_string(),
            format!("{}{partial}", bytes(m.bytes)),
        ]
    };
    let rows: Vec<_> = models.iter().map(row).collect();
    print(&table(
        &["MODEL", "REVISION", "KIND", "FILES", "SIZE"],
        &[false, false, false, true, true],
        &rows,
    ))
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::GgufFile => "gguf",
        Kind::Folder => "safetensors",
    }
}
