//! Trials, at load, of whether the vendor's library gives a row the same bits whatever the number
//! of rows, in each product that the Program has. The library promises nothing of the kind; without
//! split sums it has done so on every GPU where it was tried. For rows that decode and for short
//! prompts the fastest of the library's ways that give these bits is looked for.

use formats::Result;
use half::{bf16, f16};
use tile::types::Scalar;

use super::{Backend, LIBRARY_ROWS, ProductShape};

/// Rows of the product that smaller ones are compared with, and the bytes that its results may
/// take; beyond those it has fewer rows.
const MOST: usize = 512;
const MOST_BYTES: usize = 64 << 20;
/// Rows of the smaller products.
const ROWS: [usize; 5] = [LIBRARY_ROWS, 48, 64, 128, 256];

/// Bytes at the beginning and at the end of the results by which two products are compared.
const COMPARED: usize = 256 << 10;

/// Numbers after which [`noise`] repeats itself: a prime, so that no two rows of a matrix begin
/// alike.
const PERIOD: usize = 65_521;

/// The bytes of `count` pseudorandom numbers from -1 to 1.
pub(super) fn noise(scalar: Scalar, count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let all = count * scalar.bytes();
    let mut bytes = Vec::with_capacity(all);
    for _ in 0..count.min(PERIOD) {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        let x = state as i32 as f32 / i32::MAX as f32;
        match scalar {
            Scalar::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
            Scalar::BF16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
            _ => bytes.extend(x.to_le_bytes()),
        }
    }
    while bytes.len() < all {
        bytes.extend_from_within(..bytes.len().min(all - bytes.len()));
    }
    bytes
}

/// Whether products of a shape give a row the same bits whatever the number of rows: as was found
/// before for this library on such a device, or by trying it. The matrix `w` may have any finite
/// elements.
///
/// # Errors
/// If there is no memory for trying it, or the library refuses.
pub(super) fn rows_are_alike<B: Backend>(
    backend: &B,
    shape: &ProductShape,
    w: &B::Buffer,
) -> Result<bool> {
    let name = format!("rows alike in {shape:?}");
    if backend.recall(&name).is_some() {
        return Ok(true);
    }
    let row = shape.out as usize * shape.result.bytes();
    let most = if MOST * row <= MOST_BYTES { MOST } else { 2 * LIBRARY_ROWS };
    let x = backend.upload(&noise(shape.operand, most * shape.width as usize))?;
    let y = backend.buffer(most * row)?;
    let add = if shape.adds { Some(backend.buffer(most * row)?) } else { None };
    let smaller = || ROWS.into_iter().filter(|rows| *rows < most);
    let read = |rows: usize| read_ends(backend, &y, rows * row);
    let product = |rows: usize| {
        let shape = ProductShape { rows: rows as u32, tuned: false, ..*shape };
        backend.submit(&[backend.product(&shape, &x, w, add.as_ref(), &y)?])
    };
    product(most)?;
    let expected = smaller().map(read).collect::<Result<Vec<_>>>()?;
    for (rows, expected) in smaller().zip(expected) {
        product(rows)?;
        if read(rows)? != expected {
            return Ok(false);
        }
    }
    backend.remember(&name, &[]);
    Ok(true)
}

/// The bytes by which the first `bytes` of a result are compared.
fn read_ends<B: Backend>(backend: &B, y: &B::Buffer, bytes: usize) -> Result<[Vec<u8>; 2]> {
    let compared = COMPARED.min(bytes);
    let mut ends = [vec![0; compared], vec![0; compared]];
    for (start, end) in [0, bytes - compared].into_iter().zip(&mut ends) {
        backend.read(&backend.part(y, start..start + compared)?, end)?;
    }
    Ok(ends)
}

/// Finds the fastest way to do products of a shape for each of these numbers of rows, at least
/// [`LIBRARY_ROWS`], among those that give every row the same bits. `ws` are matrices of the shape.
/// False if there is none for some number of rows.
///
/// # Errors
/// If there is no memory for trying it, or the library refuses.
pub(super) fn tune<B: Backend>(
    backend: &B,
    shape: &ProductShape,
    ws: &[B::Buffer],
    rows: &[usize],
) -> Result<bool> {
    let Some(w) = ws.first() else { return Ok(false) };
    let row = shape.out as usize * shape.result.bytes();
    let most = rows.iter().copied().max().unwrap_or(0).max(LIBRARY_ROWS);
    let x = backend.upload(&noise(shape.operand, most * shape.width as usize))?;
    let y = backend.buffer(most * row)?;
    let add = if shape.adds { Some(backend.buffer(most * row)?) } else { None };
    let whole = ProductShape { rows: most as u32, tuned: false, ..*shape };
    backend.submit(&[backend.product(&whole, &x, w, add.as_ref(), &y)?])?;
    let expected = rows.iter().map(|rows| read_ends(backend, &y, rows * row));
    let expected = expected.collect::<Result<Vec<_>>>()?;
    for (rows, [start, end]) in rows.iter().zip(&expected) {
        let shape = ProductShape { rows: *rows as u32, ..*shape };
        if !backend.tune(&shape, &x, ws, add.as_ref(), &y, [start, end])? {
            return Ok(false);
        }
    }
    Ok(true)
}
