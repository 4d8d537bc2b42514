//! Compiles texts with the C++ compiler of this machine, against the shim in `tests/shim`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::Unproved;

const HEADERS: [(&str, &str); 4] = [
    ("runtime.hpp", include_str!("../../tests/shim/runtime.hpp")),
    ("metal_stdlib", include_str!("../../tests/shim/metal_stdlib")),
    ("metal_simdgroup_matrix", include_str!("../../tests/shim/metal_simdgroup_matrix")),
    ("cuda_shim.hpp", include_str!("../../tests/shim/cuda_shim.hpp")),
];
const RUNTIME: &str = include_str!("../../tests/shim/runtime.cpp");

/// Arithmetic as the devices do it, and undefined arithmetic found: locals that were never set hold
/// a pattern, and signed overflow, shifts too far and misaligned accesses trap. Most texts run a few
/// times, so that they are not optimised: that takes four times as long as the rest of compiling.
const FLAGS: [&str; 11] = [
    "-std=c++17",
    "-O0",
    "-g0",
    "-fsigned-char",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-Wno-attributes",
    "-Wno-unknown-attributes",
    "-Werror=vla",
    "-Werror=return-type",
];

/// A directory that is removed when dropped.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// A new one in the system's directory for temporary files.
    pub(super) fn new() -> Result<Self, Unproved> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("delft-proof-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            // Creating it anew is the point: a directory that exists may be someone else's.
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Scratch(path)),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && number < 10_000 => {}
                Err(e) => return Err(Unproved::Wrong(format!("{}: {e}", path.display()))),
            }
        }
    }

    /// Writes a file in it.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf, Unproved> {
        let path = self.0.join(name);
        let written = std::fs::write(&path, text);
        written.map_err(|e| Unproved::Wrong(format!("{}: {e}", path.display())))?;
        Ok(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The shim's headers and its compiled runtime: made once, shared by the programs that are alive.
#[derive(Debug)]
pub(super) struct Shim {
    scratch: Scratch,
    object: PathBuf,
}

/// A program and the directory it lies in.
#[derive(Debug)]
pub(super) struct Executable {
    pub(super) path: PathBuf,
    _scratch: Scratch,
    _shim: Arc<Shim>,
}

/// Whether a program answers to `--version`.
pub(super) fn answers(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success())
}

/// The C++ compiler: `$CXX` or the first of the usual names.
fn compiler() -> Result<&'static str, Unproved> {
    if !cfg!(unix) {
        let why = "a system without POSIX's memory protection, which running emitted text needs";
        return Err(Unproved::Skip(why.to_owned()));
    }
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let named = std::env::var("CXX").ok();
        let usual =
            ["c++", "g++", "clang++", "clang++-19", "clang++-18", "clang++-17", "clang++-16"];
        named.into_iter().chain(usual.map(str::to_owned)).find(|name| answers(name))
    });
    found.as_deref().ok_or_else(|| {
        Unproved::Skip("no C++ compiler: none of $CXX, c++, g++, clang++".to_owned())
    })
}

fn shim() -> Result<Arc<Shim>, Unproved> {
    static ALIVE: Mutex<Weak<Shim>> = Mutex::new(Weak::new());
    let mut alive = ALIVE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(shim) = alive.upgrade() {
        return Ok(shim);
    }
    let scratch = Scratch::new()?;
    for (name, text) in HEADERS {
        scratch.write(name, text)?;
    }
    let source = scratch.write("runtime.cpp", RUNTIME)?;
    let object = scratch.path().join("runtime.o");
    run(Command::new(compiler()?).args(FLAGS).arg("-c").arg(&source).arg("-o").arg(&object))?;
    let shim = Arc::new(Shim { scratch, object });
    *alive = Arc::downgrade(&shim);
    Ok(shim)
}

/// Compiles one file with the shim and links it.
pub(super) fn compile(text: &str) -> Result<Executable, Unproved> {
    let shim = shim()?;
    let scratch = Scratch::new()?;
    let source = scratch.write("kernels.cpp", text)?;
    let path = scratch.path().join("kernels");
    let mut command = Command::new(compiler()?);
    command.args(FLAGS);
    command.args(["-fsanitize=alignment,shift,signed-integer-overflow,integer-divide-by-zero"]);
    command.args(["-fsanitize-undefined-trap-on-error"]);
    command.arg("-I").arg(shim.scratch.path()).arg(&source).arg(&shim.object);
    run(command.arg("-o").arg(&path))?;
    Ok(Executable { path, _scratch: scratch, _shim: shim })
}

/// Runs a compiler. If it complains, the text is wrong: the error has the first few lines of its
/// output.
pub(super) fn run(command: &mut Command) -> Result<(), Unproved> {
    run_for_log(command).map(|_| ())
}

/// The same; what it printed, if it succeeded.
pub(super) fn run_for_log(command: &mut Command) -> Result<String, Unproved> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| Unproved::Skip(format!("{program}: {e}")))?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors: Vec<&str> = text.lines().filter(|l| l.contains("error")).take(6).collect();
    let shown = if errors.is_empty() { text.lines().take(6).collect() } else { errors };
    Err(Unproved::Wrong(format!("{program}: {}: {}", output.status, shown.join("; "))))
}
