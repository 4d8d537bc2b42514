//! Weights on the device: matrices in planes, vectors in f32.

use formats::{Encoded, Error, NotFinite, Result, Tensors};
use ops::packed::{self, Format, Planes};
use program::Program;

use super::Backend;
use crate::{LoadOptions, finite};

/// A weight on the device.
pub(super) struct Weight<B> {
    pub(super) buffer: B,
    pub(super) bytes: usize,
}

/// How each weight will be packed: as its recipe encodes it.
///
/// # Errors
/// If a weight is missing, or is a matrix of an encoding or shape that cannot be packed.
pub(super) fn formats(program: &Program, tensors: &Tensors) -> Result<Vec<Option<Format>>> {
    let one = |weight: &program::Weight| {
        let encoding = weight.describe(tensors)?.encoding;
        let &[rows, cols] = weight.shape.as_slice() else { return Ok(None) };
        let unknown = || Error::new(&weight.name, "a type of matrices", encoding);
        let format = Format::of(encoding).ok_or_else(unknown)?;
        packed::Layout::new(format, rows, cols).map_err(|e| weight.named(e))?;
        Ok(Some(format))
    };
    program.weights.iter().map(one).collect()
}

/// Bytes of all weights on the device.
pub(super) fn bytes(program: &Program, formats: &[Option<Format>]) -> usize {
    let one = |(weight, format): (&program::Weight, &Option<Format>)| {
        let layout = match (weight.shape.as_slice(), format) {
            (&[rows, cols], Some(format)) => packed::Layout::new(*format, rows, cols).ok(),
            _ => None,
        };
        layout.map_or(4 * weight.shape.iter().product::<usize>(), |layout| layout.bytes())
    };
    program.weights.iter().zip(formats).map(one).sum()
}

/// Rows that each core takes of so many, and none fewer than a thread is worth.
fn share(rows: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    rows.div_ceil(cores).max(64)
}

/// The first weight of a matrix that is not finite, looked for on all cores.
fn not_finite(matrix: &Encoded<'_>, rows: usize) -> Option<NotFinite> {
    let (share, per_row, encoding) =
        (share(rows), matrix.bytes.len() / rows.max(1), matrix.encoding);
    if share >= rows || per_row * rows != matrix.bytes.len() {
        return encoding.not_finite(&matrix.bytes);
    }
    let elements = share * (per_row / encoding.block_bytes() * encoding.block_elements());
    std::thread::scope(|scope| {
        let parts = matrix.bytes.chunks(share * per_row);
        let threads: Vec<_> =
            parts.map(|bytes| scope.spawn(move || encoding.not_finite(bytes))).collect();
        let found = threads.into_iter().map(|thread| thread.join().ok().flatten());
        let first = found.enumerate().find_map(|(i, found)| Some((i, found?)));
        first.map(|(i, found)| NotFinite { element: i * elements + found.element, ..found })
    })
}

/// Packs a matrix on all cores.
fn pack(matrix: &Encoded<'_>, rows: usize, cols: usize) -> Result<Planes> {
    let (share, per_row, encoding) =
        (share(rows), matrix.bytes.len() / rows.max(1), matrix.encoding);
    if share >= rows || per_row * rows != matrix.bytes.len() {
        return packed::pack(encoding, &matrix.bytes, rows, cols);
    }
    let parts: Vec<Result<Planes>> = std::thread::scope(|scope| {
        let pack = |bytes: &'_ [u8]| packed::pack(encoding, bytes, bytes.len() / per_row, cols);
        let parts = matrix.bytes.chunks(share * per_row);
        let threads: Vec<_> = parts.map(|bytes| scope.spawn(move || pack(bytes))).collect();
        let lost = || Error::new("pack", "a packed matrix", "a thread that ended early");
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(lost()))).collect()
    });
    let mut bytes = Vec::new();
    let mut format = None;
    for part in parts {
        let part = part?;
        format = Some(part.layout.format);
        bytes.extend_from_slice(&part.bytes);
    }
    let format = format.ok_or_else(|| Error::new("pack", "rows", "none"))?;
    Ok(Planes { layout: packed::Layout::new(format, rows, cols)?, bytes })
}

/// Reads, packs and uploads the weights of a Program, one at a time.
pub(super) fn load<B: Backend>(
    backend: &B,
    program: &Program,
    tensors: &Tensors,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Weight<B::Buffer>>> {
    let total = program.stored_bytes(tensors)?;
    let mut done = 0;
    let mut weights = Vec::with_capacity(program.weights.len());
    for weight in &program.weights {
        let read = weight.read(tensors)?;
        let named = |e| weight.named(e);
        let upload = |bytes: &[u8]| -> Result<_> {
            Ok(Weight { buffer: backend.upload(bytes)?, bytes: bytes.len() })
        };
        let refuse = |found: Option<NotFinite>| match found.filter(|_| !options.allow_nan) {
            Some(found) => Err(finite::refusal(weight, tensors, found)),
            None => Ok(()),
        };
        let uploaded = match *weight.shape.as_slice() {
            [rows, cols] => {
                refuse(not_finite(&read, rows))?;
                match Format::of(read.encoding) {
                    // Rows of numbers lie in the file as they do on the device.
                    Some(format @ Format::Dense(_)) => {
                        packed::Layout::new(format, rows, cols).map_err(named)?;
                        upload(&read.bytes).map_err(named)?
                    }
                    _ => {
                        let planes = pack(&read, rows, cols).map_err(named)?;
                        upload(&planes.bytes).map_err(named)?
                    }
                }
            }
            [_] => {
                let values = read.to_f32().map_err(named)?;
                refuse(NotFinite::among(&values))?;
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                upload(&bytes).map_err(named)?
            }
            _ => {
                return Err(Error::new(&weight.name, "rank 1 or 2", format!("{:?}", weight.shape)));
            }
        };
        weight.source.release(tensors);
        weights.push(uploaded);
        done += weight.stored_bytes(tensors)?;
        progress(done, total);
    }
    Ok(weights)
}
