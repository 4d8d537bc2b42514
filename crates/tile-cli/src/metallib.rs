//! `tile build --emit metallib`: the Metal texts compiled by Apple's tools, and the list of what was compiled.

use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

/// A text to compile.
pub(crate) struct Source {
    /// The kernel's name.
    pub(crate) name: String,
    /// The language version that it needs.
    pub(crate) version: (u32, u32),
    pub(crate) text: String,
}

/// The library's file. The driver looks for it beside the program, and for the list beside it.
const LIBRARY: &str = "kernels.metallib";

/// Compiles texts into one library in `out`, with the hashes of the texts as `sha256sum` writes them. None if there are no
/// tools for it here.
///
/// # Errors
/// What the compiler says of each text that it does not take, a line each.
pub(crate) fn build(sources: &[Source], out: &Path) -> Result<Option<[String; 2]>, String> {
    let there = Command::new("xcrun").args(["-sdk", "macosx", "-find", "metal"]).output();
    if !there.is_ok_and(|found| found.status.success()) {
        return Ok(None);
    }
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let file = |name: &str, kind: &str| folder.path().join(format!("{name}.{kind}"));
    let compile = |source: &Source| {
        let Source { name, version: (major, minor), text } = source;
        let (from, to) = (file(name, "metal"), file(name, "air"));
        std::fs::write(&from, text).map_err(|e| format!("{}: {e}", from.display()))?;
        let mut command = Command::new("xcrun");
        // Masks are infinite, so infinities must mean what they say.
        command.args(["-sdk", "macosx", "metal", "-c", "-fno-fast-math"]);
        // The oldest system that Delft runs on, whatever the tools' own default is.
        command.arg("-mmacosx-version-min=15.0").arg(format!("-std=metal{major}.{minor}"));
        command.arg("-o").arg(to).arg(from);
        run(command, name)
    };
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = compile(source)
                        && let Ok(mut failed) = failed.lock()
                    {
                        failed.push(why);
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        failed.sort();
        return Err(format!("{} of {} texts:\n{}", failed.len(), sources.len(), failed.join("\n")));
    }
    // Made aside and renamed, with the list last: a library without its list is not used.
    let aside = tempfile::tempdir_in(out).map_err(|e| format!("{}: {e}", out.display()))?;
    let made = aside.path().join(LIBRARY);
    let mut command = Command::new("xcrun");
    command.args(["-sdk", "macosx", "metallib", "-o"]).arg(&made);
    command.args(sources.iter().map(|source| file(&source.name, "air")));
    run(command, LIBRARY)?;
    std::fs::rename(&made, out.join(LIBRARY)).map_err(|e| format!("{LIBRARY}: {e}"))?;
    Ok(Some([format!("{LIBRARY}.sha256"), list(sources)]))
}

/// The list of texts.
fn list(sources: &[Source]) -> String {
    let line = |source: &Source| {
        let hash = Sha256::digest(&source.text);
        let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}  {}.metal\n", source.name)
    };
    sources.iter().map(line).collect()
}

fn run(mut command: Command, what: &str) -> Result<(), String> {
    let done = command.output().map_err(|e| format!("{what}: xcrun: {e}"))?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let mut lines = said.lines().filter(|line| !line.trim().is_empty());
    let error = lines.clone().find(|line| line.contains("error:")).or_else(|| lines.next());
    Err(format!("{what}: xcrun: {}", error.unwrap_or("failed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_what_sha256sum_writes() {
        let source = |name: &str, text: &str| Source {
            name: name.to_owned(),
            version: (3, 1),
            text: text.to_owned(),
        };
        // `printf abc | sha256sum`
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let list = list(&[source("a", "abc"), source("b", "abc")]);
        assert_eq!(list, format!("{abc}  a.metal\n{abc}  b.metal\n"));
    }
}
