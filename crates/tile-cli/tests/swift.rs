//! The Swift package of `packaging/swift`: its plugin runs the `tile` of this build, and what that
//! writes becomes part of the package. Skipped without `swift` on `PATH`. Where there are neither
//! Metal nor Apple's tools, the module of `delft-tile`'s tests stands for the one, and a script
//! that joins files for the others.
//!
//! Kernels of one family are built; DELFT_ALL_KERNELS takes all, which is minutes.

#![cfg(unix)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const TILE: &str = env!("CARGO_BIN_EXE_tile");

/// What stands for `xcrun`: has tools for every platform; a compiled text is the text, a library
/// all of them.
const XCRUN: &str = r#"#!/bin/sh
case "$*" in
  *" -find "*) exit 0 ;;
  *" metallib "*) shift 4; to=$1; shift; cat "$@" > "$to" ;;
  *) for last in "$@"; do :; done; while [ "$1" != -o ]; do shift; done; cp "$last" "$2" ;;
esac
"#;

/// A copy of the package, and where `swift build` puts everything.
struct Package {
    folder: tempfile::TempDir,
    /// Where `Metal` and the tools are taken from, if not from the system.
    stand_ins: Vec<OsString>,
    path: OsString,
}

impl Package {
    fn copied() -> Package {
        let folder = tempfile::tempdir().unwrap();
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        copy(&here.join("../../packaging/swift"), &folder.path().join("package"));
        let mut package =
            Package { folder, stand_ins: vec![], path: std::env::var_os("PATH").unwrap() };
        if !cfg!(target_vendor = "apple") {
            package.stand_in(&here.join("../tile/tests/swift/Metal.swift"));
        }
        package
    }

    fn stand_in(&mut self, metal: &Path) {
        use std::os::unix::fs::PermissionsExt;
        let (module, bin) = (self.folder.path().join("module"), self.folder.path().join("bin"));
        [&module, &bin].into_iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        let mut swiftc = Command::new("swiftc");
        swiftc.args(["-emit-library", "-emit-module", "-module-name", "Metal"]);
        swiftc.arg("-parse-as-library").arg(metal).current_dir(&module);
        let made = swiftc.output().unwrap();
        assert!(made.status.success(), "{}", text(&made));
        let xcrun = bin.join("xcrun");
        std::fs::write(&xcrun, XCRUN).unwrap();
        std::fs::set_permissions(&xcrun, std::fs::Permissions::from_mode(0o755)).unwrap();
        let places = std::iter::once(bin).chain(std::env::split_paths(&self.path));
        self.path = std::env::join_paths(places).unwrap();
        for (option, to) in [("-Xswiftc", "-I"), ("-Xlinker", "-L")] {
            let mut folder = OsString::from(to);
            folder.push(&module);
            self.stand_ins.extend([option.into(), folder]);
        }
    }

    /// `swift build`, whose plugin is to run this program.
    fn build(&self, tile: &str) -> Output {
        let at = |name: &str| self.folder.path().join(name);
        let mut swift = Command::new("swift");
        swift.args(["build", "--package-path"]).arg(at("package"));
        swift.arg("--scratch-path").arg(at("built")).arg("--cache-path").arg(at("cache"));
        swift.args(["-Xswiftc", "-warnings-as-errors"]).args(&self.stand_ins);
        swift.env("PATH", &self.path).env("DELFT_TILE", tile);
        if std::env::var_os("DELFT_ALL_KERNELS").is_none() {
            swift.env("DELFT_TILE_FILTER", "rms_norm");
        }
        swift.output().unwrap()
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (from, to) = entry.map(|entry| (entry.path(), to.join(entry.file_name()))).unwrap();
        if from.is_dir() {
            copy(&from, &to);
        } else {
            std::fs::copy(&from, &to).unwrap();
        }
    }
}

/// The file of this name below a folder.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    entries.find_map(|entry| match entry.file_type().ok()? {
        kind if kind.is_dir() => find(&entry.path(), name),
        _ => (entry.file_name() == name).then(|| entry.path()),
    })
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said)).concat()
}

#[test]
fn the_package_is_built_of_what_its_plugin_wrote() {
    if !Command::new("swift").arg("--version").output().is_ok_and(|o| o.status.success()) {
        return testing::skipped("the Swift package is not built: there is no swift on PATH");
    }
    let package = Package::copied();

    let without = text(&package.build("/no/such/tile"));
    let line = "TileBuild: expected the program `tile` on PATH, found none; hint: cargo install";
    assert!(without.contains(line), "{without}");

    let built = package.build(TILE);
    assert!(built.status.success(), "{}", text(&built));
    let folder = package.folder.path().join("built");
    let manifest = find(&folder, "manifest.json").expect("a manifest");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    assert!(manifest.contains("\"family\": \"rms_norm\""), "{manifest}");
    for platform in ["", "-ios", "-ios-simulator"] {
        let library = find(&folder, &format!("kernels{platform}.metallib")).expect("a library");
        assert!(std::fs::metadata(library).unwrap().len() > 1000);
    }
}
