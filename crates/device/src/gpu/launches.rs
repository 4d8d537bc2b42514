//! A record of the launches bound on simulated GPUs: one line each, appended to the file named by
//! `DELFT_SIM_LAUNCHES`. Two versions with equal records launch the same work.

use std::fs::File;
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

use formats::{Error, Result};
use sha2::{Digest, Sha256};
use tile::launch::Numbers;
use tile::{Kernel, ir::ParamKind};

use super::ProductShape;

const VARIABLE: &str = "DELFT_SIM_LAUNCHES";

/// The record's file, if one was requested.
static RECORD: LazyLock<Option<Mutex<std::io::Result<File>>>> = LazyLock::new(|| {
    let path = std::env::var_os(VARIABLE)?;
    Some(Mutex::new(File::options().create(true).append(true).open(path)))
});

/// Records a kernel: its grid, threads, bytes of shared memory, constants, and a digest of its text
/// form without its name. The name is at the end of the line.
///
/// # Errors
/// A launch contract that gives no grid for these numbers, or a file that cannot be written.
pub(super) fn note(kernel: &Kernel, numbers: &Numbers) -> Result<()> {
    line(|| {
        let wrong = |why| Error::new("sim", "a launch", why);
        let value = |name: &str| numbers.get(name);
        let grid = kernel.launch.grid.iter().map(|extent| extent.eval(&value));
        let grid: Vec<u32> = grid.collect::<std::result::Result<_, _>>().map_err(wrong)?;
        let arguments = kernel.params.iter().filter(|p| matches!(p.kind, ParamKind::Argument(_)));
        let arguments = arguments.map(|p| format!("{}={:?}", p.name, value(&p.name)));
        let arguments: Vec<String> = arguments.collect();
        let (threads, shared) = (kernel.launch.threads, kernel.shared_bytes());
        let (text, name) = (digest(kernel), &kernel.name);
        let arguments = arguments.join(" ");
        Ok(format!("{text} grid {grid:?} threads {threads} shared {shared} {arguments} # {name}"))
    })
}

/// Records a product of the vendor's library.
///
/// # Errors
/// A file that cannot be written.
pub(super) fn note_product(shape: &ProductShape) -> Result<()> {
    // Rare options are recorded only where they are used.
    line(|| {
        let rare = [", alike: false", ", tuned: false", ", x_turned: false", ", w_turned: false"];
        Ok(rare.iter().fold(format!("product {shape:?}"), |line, rare| line.replace(rare, "")))
    })
}

fn line(make: impl FnOnce() -> Result<String>) -> Result<()> {
    let Some(record) = RECORD.as_ref() else { return Ok(()) };
    let line = make()?;
    match record.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        Ok(file) => writeln!(file, "{line}").map_err(|why| Error::io(VARIABLE, why)),
        Err(why) => Err(Error::new(VARIABLE, "a file that can be written", why)),
    }
}

/// The first 16 hexadecimal digits of the SHA-256 of a kernel's text form.
fn digest(kernel: &Kernel) -> String {
    let nameless = Kernel { name: "kernel".to_owned(), ..kernel.clone() };
    let digest = Sha256::digest(nameless.to_string());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
