//! The file of the running program, by which builds of one version are told apart.

use std::io::{BufRead, BufReader, Result};

use sha2::{Digest, Sha256};

/// Bytes of the digest that are told.
const TOLD: usize = 6;

/// The beginning of the SHA-256 of the running program's file, in hexadecimal: `3f7a0c12e9d4`.
///
/// # Errors
/// A file that cannot be read.
pub fn program_digest() -> Result<String> {
    let file = std::fs::File::open(std::env::current_exe()?)?;
    let (mut file, mut digest) = (BufReader::with_capacity(1 << 20, file), Sha256::new());
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            break;
        }
        digest.update(bytes);
        let read = bytes.len();
        file.consume(read);
    }
    Ok(digest.finalize().iter().take(TOLD).map(|byte| format!("{byte:02x}")).collect())
}
