//! `tile build --emit metallib`: the Metal texts compiled by Apple's tools, a library for each
//! platform, and the list of what was compiled.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::ValueEnum;
use sha2::{Digest, Sha256};
use tile::emit;

/// A text to compile.
pub(crate) struct Source {
    /// The kernel's name.
    pub(crate) name: String,
    /// The language version that it needs.
    pub(crate) version: (u32, u32),
    pub(crate) text: String,
}

/// The platform of a library. One platform refuses another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Platform {
    /// Macs.
    Macos,
    /// iPhones and iPads.
    Ios,
    /// Their simulator on a Mac.
    IosSimulator,
}

impl Platform {
    /// Its name as clap has it, in which files of platforms other than macOS end.
    fn name(self) -> &'static str {
        match self {
            Platform::Macos => "macos",
            Platform::Ios => "ios",
            Platform::IosSimulator => "ios-simulator",
        }
    }

    /// The library's file. The driver looks for macOS's beside the program, and for the list beside
    /// it.
    fn library(self) -> String {
        match self {
            Platform::Macos => "kernels.metallib".to_owned(),
            _ => format!("kernels-{}.metallib", self.name()),
        }
    }

    /// The platform's name for `xcrun -sdk`.
    fn sdk(self) -> &'static str {
        match self {
            Platform::Macos => "macosx",
            Platform::Ios => "iphoneos",
            Platform::IosSimulator => "iphonesimulator",
        }
    }

    /// The compiler's flag for the oldest system that a library runs on: the first whose language
    /// all of its texts are written in, whatever the tools' own default is.
    fn oldest(self, sources: &[Source]) -> String {
        let version = sources.iter().map(|source| source.version).max().unwrap_or((3, 1));
        let [macos, ios] = emit::metal_systems(version);
        match self {
            Platform::Macos => format!("-mmacosx-version-min={macos}.0"),
            Platform::Ios => format!("-mios-version-min={ios}.0"),
            Platform::IosSimulator => format!("-mios-simulator-version-min={ios}.0"),
        }
    }
}

/// Compiles texts into a library for each platform in `out`, beside the hashes of the texts as
/// `sha256sum` writes them; returns the names of the lists. None if `xcrun` has no tools for a
/// platform.
///
/// # Errors
/// The compiler's message for each text that it refuses, on every platform, a line each.
pub(crate) fn build(
    xcrun: &OsStr,
    sources: &[Source],
    platforms: &[Platform],
    out: &Path,
) -> Result<Option<Vec<String>>, String> {
    let has = |platform: &Platform| {
        let asked = Command::new(xcrun).args(["-sdk", platform.sdk(), "-find", "metal"]).output();
        asked.is_ok_and(|found| found.status.success())
    };
    if !platforms.iter().all(has) {
        return Ok(None);
    }
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let builds: Vec<Build> = platforms
        .iter()
        .map(|&platform| Build { xcrun, sources, platform, folder: folder.path() })
        .collect();
    compile(&builds)?;
    builds.iter().map(|build| build.link(out)).collect::<Result<_, _>>().map(Some)
}

/// The compilation of all texts for a platform.
struct Build<'a> {
    xcrun: &'a OsStr,
    sources: &'a [Source],
    platform: Platform,
    /// Where what is compiled lies until it is linked.
    folder: &'a Path,
}

/// Compiles all texts of all builds, on all cores.
fn compile(builds: &[Build]) -> Result<(), String> {
    let jobs: Vec<(&Build, &Source)> = builds
        .iter()
        .flat_map(|build| build.sources.iter().map(move |source| (build, source)))
        .collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((build, source)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(why) = build.compile(source)
                && let Ok(mut failed) = failed.lock()
            {
                failed.push(why);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let mut failed = failed.into_inner().unwrap_or_default();
    if failed.is_empty() {
        return Ok(());
    }
    failed.sort();
    Err(format!("{} of {} texts:\n{}", failed.len(), jobs.len(), failed.join("\n")))
}

impl Build<'_> {
    fn file(&self, name: &str, kind: &str) -> std::path::PathBuf {
        self.folder.join(format!("{name}.{}.{kind}", self.platform.name()))
    }

    fn compile(&self, source: &Source) -> Result<(), String> {
        let Source { name, version: (major, minor), text } = source;
        let (from, to) = (self.file(name, "metal"), self.file(name, "air"));
        std::fs::write(&from, text).map_err(|e| format!("{}: {e}", from.display()))?;
        let mut command = Command::new(self.xcrun);
        // Masks are infinite, so infinities must mean what they say.
        command.args(["-sdk", self.platform.sdk(), "metal", "-c", "-fno-fast-math"]);
        command.arg(self.platform.oldest(self.sources)).arg(format!("-std=metal{major}.{minor}"));
        run(command.arg("-o").arg(to).arg(from), &format!("{name} for {}", self.platform.name()))
    }

    /// Links what was compiled; returns the name of the list. Both are made aside and renamed, the
    /// list last: a library without its list is not used.
    fn link(&self, out: &Path) -> Result<String, String> {
        let library = self.platform.library();
        let aside = tempfile::tempdir_in(out).map_err(|e| format!("{}: {e}", out.display()))?;
        let made = aside.path().join(&library);
        let mut command = Command::new(self.xcrun);
        command.args(["-sdk", self.platform.sdk(), "metallib", "-o"]).arg(&made);
        command.args(self.sources.iter().map(|source| self.file(&source.name, "air")));
        run(&mut command, &library)?;
        std::fs::rename(&made, out.join(&library)).map_err(|e| format!("{library}: {e}"))?;
        Ok(format!("{library}.sha256"))
    }
}

/// The list of texts.
pub(crate) fn list(sources: &[Source]) -> String {
    let line = |source: &Source| {
        let hash = Sha256::digest(&source.text);
        let hex: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}  {}.metal\n", source.name)
    };
    sources.iter().map(line).collect()
}

fn run(command: &mut Command, what: &str) -> Result<(), String> {
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

    fn source(name: &str, version: (u32, u32), text: &str) -> Source {
        Source { name: name.to_owned(), version, text: text.to_owned() }
    }

    #[test]
    fn the_list_is_what_sha256sum_writes() {
        // `printf abc | sha256sum`
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let list = list(&[source("a", (3, 1), "abc"), source("b", (3, 1), "abc")]);
        assert_eq!(list, format!("{abc}  a.metal\n{abc}  b.metal\n"));
    }

    #[test]
    fn a_library_runs_on_the_first_system_with_its_language() {
        let old = [source("a", (3, 1), "")];
        let mixed = [source("a", (3, 1), ""), source("b", (3, 2), "")];
        for (platform, sources, flag) in [
            (Platform::Macos, &old[..], "-mmacosx-version-min=14.0"),
            (Platform::Macos, &mixed[..], "-mmacosx-version-min=15.0"),
            (Platform::Ios, &mixed[..], "-mios-version-min=18.0"),
            (Platform::IosSimulator, &old[..], "-mios-simulator-version-min=17.0"),
        ] {
            assert_eq!(platform.oldest(sources), flag);
        }
    }

    /// A stand-in for `xcrun`: finds tools for Macs and iPhones, refuses texts with `wrong` in
    /// them, and links by joining files, after a line with its arguments.
    #[cfg(unix)]
    const XCRUN: &str = r#"#!/bin/sh
case "$*" in
  "-sdk macosx -find metal" | "-sdk iphoneos -find metal") exit 0 ;;
  *" -find "*) exit 1 ;;
  *" metallib "*) shift 4; to=$1; shift; cat "$@" > "$to" ;;
  *)
    for last in "$@"; do :; done
    if grep -q wrong "$last"; then echo "$last:1:1: error: it is wrong" >&2; exit 1; fi
    while [ "$1" != -o ]; do line="$line $1"; shift; done
    { echo "$line"; cat "$last"; } > "$2" ;;
esac
"#;

    #[cfg(unix)]
    #[test]
    fn every_platform_has_its_library_and_every_failing_text_a_line() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let xcrun = folder.path().join("xcrun");
        std::fs::write(&xcrun, XCRUN).unwrap();
        std::fs::set_permissions(&xcrun, std::fs::Permissions::from_mode(0o755)).unwrap();
        let all = [Platform::Macos, Platform::Ios];
        let make = |sources: &[Source], platforms: &[Platform]| {
            super::build(xcrun.as_os_str(), sources, platforms, folder.path())
        };
        let right = [source("a", (3, 1), "one\n"), source("b", (3, 2), "two\n")];
        let lists = make(&right, &all).unwrap().unwrap();
        assert_eq!(lists, ["kernels.metallib.sha256", "kernels-ios.metallib.sha256"]);
        let text = std::fs::read_to_string(folder.path().join("kernels-ios.metallib")).unwrap();
        let flags = " -sdk iphoneos metal -c -fno-fast-math -mios-version-min=18.0 -std=metal3";
        assert_eq!(text, format!("{flags}.1\none\n{flags}.2\ntwo\n"));

        let wrong = [
            source("a", (3, 1), "wrong"),
            source("b", (3, 1), "two"),
            source("c", (3, 1), "wrong"),
        ];
        let why = make(&wrong, &all).unwrap_err();
        let places: Vec<&str> = why.lines().map(|l| l.split(": ").next().unwrap()).collect();
        assert_eq!(places[1..], ["a for ios", "a for macos", "c for ios", "c for macos"], "{why}");
        assert!(why.starts_with("4 of 6 texts:\n"));

        assert_eq!(make(&right, &[Platform::IosSimulator]), Ok(None), "no tools for it");
    }
}
