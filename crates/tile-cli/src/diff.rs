//! `tile diff`.

use std::collections::BTreeMap;
use std::path::Path;

use tile::emit::Dialect;
use tile::manifest::Manifest;

use crate::{Outcome, build, select};

/// The parts of a kernel that are compared: its contract, and its texts by file ending where the
/// build has them.
struct Built {
    contract: String,
    texts: BTreeMap<&'static str, String>,
}

pub(crate) fn run(before: &Path, after: Option<&Path>) -> Outcome {
    let (old, new) = (read(before)?, after.map_or_else(now, read)?);
    let mut changes = 0;
    let names: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    for name in names {
        let lines = match (old.get(name), new.get(name)) {
            (Some(_), None) => vec!["removed".to_owned()],
            (None, Some(_)) => vec!["added".to_owned()],
            (Some(a), Some(b)) => changed(a, b),
            (None, None) => vec![],
        };
        changes += usize::from(!lines.is_empty());
        lines.iter().for_each(|line| println!("{name}: {line}"));
    }
    println!("{changes} of {} kernels differ", old.len().max(new.len()));
    Ok(changes == 0)
}

fn changed(a: &Built, b: &Built) -> Vec<String> {
    let mut lines = Vec::new();
    if a.contract != b.contract {
        let differ = a.contract.lines().zip(b.contract.lines()).find(|(a, b)| a != b);
        let (was, is) = differ.unwrap_or(("shorter", "longer"));
        lines.push(format!("contract: {} -> {}", was.trim(), is.trim()));
    }
    for (ending, text) in &a.texts {
        let Some(other) = b.texts.get(ending).filter(|other| *other != text) else { continue };
        let same = text.lines().zip(other.lines()).take_while(|(a, b)| a == b).count();
        let (was, is) = (text.lines().nth(same), other.lines().nth(same));
        let line = |l: Option<&str>| l.unwrap_or("the end").trim().to_owned();
        lines.push(format!("{ending}, line {}: {} -> {}", same + 1, line(was), line(is)));
    }
    lines
}

/// A build in a folder.
fn read(folder: &Path) -> Result<BTreeMap<String, Built>, String> {
    let path = folder.join("manifest.json");
    let json = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let manifest = Manifest::parse(&json).map_err(|e| format!("{}: {e}", path.display()))?;
    let built = manifest.kernels.into_iter().map(|entry| {
        let texts = ["metal", "cu"].into_iter().filter_map(|ending| {
            // A name from a file must not lead out of the folder.
            let plain = entry.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let path = folder.join(format!("{}.{ending}", entry.name));
            Some((ending, std::fs::read_to_string(path).ok().filter(|_| plain)?))
        });
        let texts = texts.collect();
        let contract = serde_json::to_string_pretty(&entry).unwrap_or_default();
        (entry.name, Built { contract, texts })
    });
    Ok(built.collect())
}

/// The kernels as they are in this program.
fn now() -> Result<BTreeMap<String, Built>, String> {
    let instances = select::instances(None)?;
    let manifest = select::manifest(&instances);
    let mut built = BTreeMap::new();
    for (kernel, entry) in instances.iter().map(|i| &i.kernel).zip(manifest.kernels) {
        let mut texts = BTreeMap::new();
        for (ending, dialect) in [("metal", Dialect::Metal), ("cu", Dialect::Cuda)] {
            if let Ok(text) = build::text(kernel, dialect) {
                texts.insert(ending, text);
            }
        }
        let contract = serde_json::to_string_pretty(&entry).unwrap_or_default();
        built.insert(kernel.name.clone(), Built { contract, texts });
    }
    Ok(built)
}
