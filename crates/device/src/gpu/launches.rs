//! A record of what simulated GPUs are given: a line for each launch that is bound, appended to the
//! file that `DELFT_SIM_LAUNCHES` names. Two versions whose records are equal launch the same work.

use std::fs::File;
use std::io::Write;
use std::sync::{LazyLock, Mutex, PoisonError};

use formats::{Error, Result};
use sha2::{Digest, Sha256};
use tile::launch::Numbers;
use tile::{Kernel, ir::ParamKind};

use super::ProductShape;

const VARIABLE: &str = "DELFT_SIM_LAUNCHES";

/// The open file, if one was asked for.
static RECORD: LazyLock<Option<Mutex<std::io::Result<File>>>> = LazyLock::new(|| {
    let path = std::env::var_os(VARIABLE)?;
    Some(Mutex::new(File::options().create(true).append(true).open(path)))
});

/// Notes a kernel with its grid, threads, bytes of shared memory, numbers, and a digest of its text
/// form, in which its own name does not count; the name stands at the end of the line.
///
/// # Errors
/// If the launch contract has no grid for these numbers, or the file cannot be written.
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

/// Notes a product of the vendor's library.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn note_product(shape: &ProductShape) -> Result<()> {
    // What is only sometimes asked for is noted where it is.
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

/// The first 16 digits of the SHA-256 of a kernel's text form.
fn digest(kernel: &Kernel) -> String {
    let nameless = Kernel { name: "kernel".to_owned(), ..kernel.clone() };
    let digest = Sha256::digest(nameless.to_string());
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
