//! Whether the vendor's library gives a row the same bits whatever the number of rows: tried at
//! load, on the products that a Program has. It promises nothing of the kind, but without sums in
//! parts it does so wherever that was looked at. Products of rows that decode are tuned besides,
//! among the ways that give these bits; and our own kernel is tried for few rows.

use formats::Result;
use half::{bf16, f16};
use tile::types::Scalar;

use super::{Backend, LIBRARY_ROWS, ProductShape};

/// Rows of the product that the others are compared with, unless its results would take too much
/// memory.
const MOST: usize = 512;
const MOST_BYTES: usize = 64 << 20;
/// Rows of the others.
const ROWS: [usize; 5] = [LIBRARY_ROWS, 48, 64, 128, 256];

/// Bytes at either end of results that ways to do a product are compared by.
const COMPARED: usize = 1 << 20;

/// Numbers from -1 to 1 of a type, as bytes.
pub(super) fn noise(scalar: Scalar, count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let mut bytes = Vec::with_capacity(count * scalar.bytes());
    for _ in 0..count {
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
    bytes
}

/// Whether products of a shape with a matrix, which may have any finite elements, are.
///
/// # Errors
/// If there is no memory for trying it, or the library refuses.
pub(super) fn rows_are_alike<B: Backend>(
    backend: &B,
    shape: &ProductShape,
    w: &B::Buffer,
) -> Result<bool> {
    let row = shape.out as usize * shape.result.bytes();
    let most = if MOST * row <= MOST_BYTES { MOST } else { 2 * LIBRARY_ROWS };
    let x = backend.upload(&noise(shape.operand, most * shape.width as usize))?;
    let y = backend.buffer(most * row)?;
    let add = if shape.adds { Some(backend.buffer(most * row)?) } else { None };
    let product = |rows: usize| {
        let shape = ProductShape { rows: rows as u32, ..*shape };
        backend.submit(&[backend.product(&shape, &x, w, add.as_ref(), &y)?])?;
        let mut bytes = vec![0; rows * row];
        backend.read(&y, &mut bytes)?;
        Ok(bytes)
    };
    let all = product(most)?;
    for rows in ROWS.into_iter().filter(|rows| *rows < most) {
        let some = product(rows)?;
        if some[..] != all[..some.len()] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a kernel, for `rows` rows, has the bits of a product of the vendor's library. It is given
/// what a product is given.
///
/// # Errors
/// If there is no memory for trying it, or one of the two refuses.
pub(super) fn has_bits_of<B: Backend>(
    backend: &B,
    shape: &ProductShape,
    w: &B::Buffer,
    rows: usize,
    kernel: impl Fn(&B::Buffer, Option<&B::Buffer>, &B::Buffer) -> Result<B::Launch>,
) -> Result<bool> {
    let (out, all) = (shape.out as usize, shape.rows as usize);
    let bytes = out * shape.result.bytes();
    let x = backend.upload(&noise(shape.operand, all * shape.width as usize))?;
    let add = shape.adds.then(|| backend.upload(&noise(shape.result, all * out))).transpose()?;
    let run = |launch: &dyn Fn(&B::Buffer) -> Result<B::Launch>| {
        let y = backend.buffer(all * bytes)?;
        backend.submit(&[launch(&y)?])?;
        let mut found = vec![0; rows.min(all) * bytes];
        backend.read(&y, &mut found)?;
        Ok(found)
    };
    let theirs = run(&|y| backend.product(shape, &x, w, add.as_ref(), y))?;
    Ok(run(&|y| kernel(&x, add.as_ref(), y))? == theirs)
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
    let mut all = vec![0; most * row];
    backend.read(&y, &mut all)?;
    for &rows in rows {
        let shape = ProductShape { rows: rows as u32, ..*shape };
        let own = &all[..rows * row];
        let compared = COMPARED.min(own.len());
        let ends = [&own[..compared], &own[own.len() - compared..]];
        if !backend.tune(&shape, &x, ws, add.as_ref(), &y, ends)? {
            return Ok(false);
        }
    }
    Ok(true)
}
