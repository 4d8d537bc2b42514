//! A run as it stands, in one file: what it is of, how far it is, parameters and moments.
//!
//! ```text
//! "delft checkpoint 1\n"  length of the state: u64  state: JSON
//! f32 of each parameter, then of each first moment, then of each second one  SHA-256 of all before it
//! ```
//!
//! Numbers are little-endian. The file is written aside and renamed, so that there is always a
//! whole one, and both ways pass through a buffer of a fixed size.

use crate::{Moments, Parameter};
use formats::{Aside, Error, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{BufReader, Read};
use std::path::Path;

const MAGIC: &[u8] = b"delft checkpoint 1\n";
/// Bytes of the longest state that is read.
const LONGEST_STATE: u64 = 256 << 20;
/// Numbers that are turned into bytes at a time.
const AT_A_TIME: usize = 1 << 16;

/// The identity and progress of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The inputs that determine the result, each by name.
    pub(crate) identity: Vec<(String, String)>,
    /// Names and shapes of the parameters.
    pub(crate) parameters: Vec<(String, Vec<usize>)>,
    /// Updates that were made.
    pub(crate) step: u64,
    /// Tokens that they read.
    pub(crate) tokens: u64,
    /// The update behind which the held-out loss was last measured.
    pub(crate) evaluated: Option<u64>,
    /// The update with the least held-out loss, and that loss as its bits, which JSON keeps.
    pub(crate) best: Option<(u64, u64)>,
    /// Measurements since then.
    pub(crate) waited: u64,
    /// Bytes of the log.
    pub(crate) log: u64,
}

/// Names and shapes.
pub(crate) fn shapes(parameters: &[Parameter]) -> Vec<(String, Vec<usize>)> {
    parameters.iter().map(|p| (p.name.clone(), p.shape.clone())).collect()
}

/// Writes a checkpoint.
///
/// # Errors
/// If it cannot be written: the former one stays.
pub(crate) fn write(
    path: &Path,
    state: &State,
    parameters: &[Parameter],
    moments: &Moments,
) -> Result<()> {
    let state = serde_json::to_vec(state).map_err(|e| Error::new(path.display(), "", e))?;
    let (mut out, mut digest) = (Aside::create(path)?, Sha256::new());
    let mut put = |bytes: &[u8]| {
        digest.update(bytes);
        out.write(bytes)
    };
    put(MAGIC)?;
    put(&(state.len() as u64).to_le_bytes())?;
    put(&state)?;
    let mut bytes = Vec::with_capacity(4 * AT_A_TIME);
    let values = parameters.iter().map(|p| &p.values);
    for row in values.chain(&moments.first).chain(&moments.second) {
        for part in row.chunks(AT_A_TIME) {
            bytes.clear();
            part.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
            put(&bytes)?;
        }
    }
    let digest = digest.finalize();
    out.write(&digest)?;
    out.finish()
}

/// Reads a checkpoint into parameters and moments of the same names and shapes, once `check` has
/// agreed to its state.
///
/// # Errors
/// A file that is damaged, is of another model, or that `check` refuses. Parameters may hold
/// anything then.
pub(crate) fn read(
    path: &Path,
    parameters: &mut [Parameter],
    moments: &mut Moments,
    check: &dyn Fn(&State) -> Result<()>,
) -> Result<State> {
    let file = std::fs::File::open(path).map_err(|e| Error::io(path.display(), e))?;
    let mut from = Reading { path, from: BufReader::new(file), digest: Sha256::new() };
    if from.bytes(MAGIC.len())? != MAGIC {
        return Err(Error::new(path.display(), "a checkpoint of a run", "another file"));
    }
    let length = from.bytes(8)?.try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX);
    if length > LONGEST_STATE {
        return Err(Error::new(
            path.display(),
            format!("a state of at most {LONGEST_STATE} bytes"),
            length,
        ));
    }
    let state: State = serde_json::from_slice(&from.bytes(length as usize)?)
        .map_err(|e| Error::new(path.display(), "a state", e))?;
    check(&state)?;
    let own = shapes(parameters);
    if let Some((found, own)) = state.parameters.iter().zip(&own).find(|(a, b)| a != b) {
        let shown = |of: &(String, Vec<usize>)| format!("{} {}", of.0, formats::shape(&of.1));
        return Err(Error::new(path.display(), shown(own), shown(found)));
    }
    if state.parameters.len() != own.len() {
        let expected = format!("{} parameters", own.len());
        return Err(Error::new(path.display(), expected, state.parameters.len()));
    }
    let values = parameters.iter_mut().map(|p| &mut p.values);
    for row in values.chain(&mut moments.first).chain(&mut moments.second) {
        for part in row.chunks_mut(AT_A_TIME) {
            let bytes = from.bytes(4 * part.len())?;
            for (x, bytes) in part.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_le_bytes(*bytes);
            }
        }
    }
    moments.updates = state.step;
    from.end()?;
    Ok(state)
}

struct Reading<'a> {
    path: &'a Path,
    from: BufReader<std::fs::File>,
    digest: Sha256,
}

impl Reading<'_> {
    /// The next `count` bytes. They are read before memory for more than the file has is allocated.
    fn bytes(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.from.by_ref().take(count as u64).read_to_end(&mut bytes);
        read.map_err(|e| Error::io(self.path.display(), e))?;
        if bytes.len() < count {
            return Err(self.damaged("one that breaks off"));
        }
        self.digest.update(&bytes);
        Ok(bytes)
    }

    fn end(mut self) -> Result<()> {
        let digest = self.digest.clone().finalize();
        let stored = self.bytes(digest.len())?;
        if stored[..] != digest[..] {
            return Err(self.damaged("one with another checksum"));
        }
        let mut more = [0];
        match self.from.read(&mut more).map_err(|e| Error::io(self.path.display(), e))? {
            0 => Ok(()),
            _ => Err(self.damaged("one with something behind its end")),
        }
    }

    fn damaged(&self, found: &str) -> Error {
        Error::new(self.path.display(), "a whole checkpoint", found)
    }
}
