//! Parts of a matrix, transposed: what `dx = dy W` multiplies with.
//!
//! A packed matrix `[out, in]` serves products along its columns. For those along its rows a part
//! of it at a time is decoded, transposed and packed again, in cache, so that a matrix in training
//! is in memory once and in its own type. Many rows of `dy` share the work. The tile unit's tiles
//! are made of 16-bit floats as they lie (`amx`).

use super::{
    Activations, BLOCK, Epilogue, Huge, Isa, Matrix, Output, ROWS, Scratch, float, multiply,
};
#[cfg(target_arch = "x86_64")]
use super::{Call, amx};
use formats::quant::plain;
use formats::{DType, Encoding, Result};
use std::ops::Range;

/// A thread's room for one part.
pub struct Turned {
    part: Matrix,
    /// Decoded elements of a row.
    values: [f32; Turned::COLUMNS],
}

impl Turned {
    /// Most rows of a part: with the activations of a tile they fit the first-level cache.
    pub const ROWS: usize = 256;
    /// Most columns of a part.
    pub const COLUMNS: usize = 64;

    /// Room for a part.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new() -> Result<Turned> {
        let data = Huge::zeroed(Turned::ROWS * Turned::COLUMNS * size_of::<f32>())?;
        let (encoding, not_finite) = (Encoding::Stored(DType::F32), None);
        let (rows, cols, panel_bytes, blas) = (0, 0, 0, None);
        let part = Matrix { encoding, rows, cols, panel_bytes, data, not_finite, blas };
        Ok(Turned { part, values: [0.0; Turned::COLUMNS] })
    }

    /// The type that parts of such a matrix have: f32, or on the tile unit the 16 bits that it
    /// multiplies, to which quantised weights are rounded.
    pub fn encoding(isa: Isa, of: Encoding) -> Encoding {
        Encoding::Stored(match of {
            _ if isa != Isa::Amx => DType::F32,
            Encoding::Stored(float @ (DType::F32 | DType::F16)) => float,
            _ => DType::BF16,
        })
    }

    /// The transpose of some columns of some rows of a matrix. Rows begin with a panel, columns
    /// with a block, and both end with one or with the matrix.
    fn take(
        &mut self,
        isa: Isa,
        of: &Matrix,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> &Matrix {
        let encoding = Turned::encoding(isa, of.encoding);
        let element = encoding.block_bytes();
        let part = &mut self.part;
        (part.encoding, part.rows, part.cols) = (encoding, columns.len(), rows.len());
        part.panel_bytes = float::panel_bytes(rows.len(), element);
        let values = &mut self.values[..columns.len().next_multiple_of(ROWS)];
        // Lanes without a column.
        values[columns.len()..].fill(0.0);
        for (k, row) in rows.enumerate() {
            of.part(row, columns.start, &mut values[..columns.len()]);
            for (panel, lanes) in values.as_chunks::<ROWS>().0.iter().enumerate() {
                let at = panel * part.panel_bytes + k * ROWS * element;
                let to = &mut part.data[at..at + ROWS * element];
                match encoding {
                    Encoding::Stored(DType::BF16) => halves(lanes, to, plain::f32_to_bf16),
                    Encoding::Stored(DType::F16) => halves(lanes, to, plain::f32_to_f16),
                    _ => {
                        let (to, _) = to.as_chunks_mut::<4>();
                        to.iter_mut().zip(lanes).for_each(|(to, x)| *to = x.to_ne_bytes());
                    }
                }
            }
        }
        part
    }
}

/// `out[t][c] (+)= sum over r of x[t][r] w[r][c]` for some tokens and some columns of the matrix:
/// the product with its transpose. The columns begin with a block, and end with one or with the matrix.
///
/// `x` has been quantised, for floats, unless parts are f32 ([`Turned::encoding`]). A token's
/// results depend neither on how columns are split among threads nor on the other tokens.
///
/// # Safety
/// - `out` is writable at these tokens for these columns, and no other thread uses them.
/// - The rows and lines of `x` are not written meanwhile.
///
/// # Panics
/// If shapes or ranges do not fit each other.
pub unsafe fn multiply_turned(
    isa: Isa,
    w: &Matrix,
    x: &Activations,
    tokens: Range<usize>,
    columns: Range<usize>,
    out: Output,
    accumulate: bool,
    (scratch, turned): (&mut Scratch, &mut Turned),
) {
    assert!(x.cols() == w.rows && columns.end <= w.cols && columns.start.is_multiple_of(BLOCK));
    assert!(tokens.end <= x.tokens());
    if tokens.is_empty() || columns.is_empty() {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if x.halves(isa)
        && let Some(kernel) = amx::turned(w.encoding)
    {
        assert!(columns.end.is_multiple_of(ROWS) || columns.end == w.cols);
        let call = Call {
            weights: w.data.as_ptr(),
            panel_bytes: w.panel_bytes,
            rows: w.cols,
            cols: w.rows,
            x,
            tokens,
            panels: columns.start / ROWS..columns.end.div_ceil(ROWS),
            out,
            epilogue: Epilogue { accumulate, bias: None },
            scratch: scratch.0.as_ptr(),
        };
        // SAFETY: halves prove the unit; ranges were checked, and whole blocks of `x` are whole
        // pairs of panels; the rest is the caller's promise.
        return unsafe { kernel(&call) };
    }
    for first in columns.clone().step_by(Turned::COLUMNS) {
        let columns = first..columns.end.min(first + Turned::COLUMNS);
        let out = Output { start: out.start.wrapping_add(first), ..out };
        for first in (0..w.rows).step_by(Turned::ROWS) {
            let rows = first..w.rows.min(first + Turned::ROWS);
            let (part, x) = (turned.take(isa, w, rows.clone(), columns.clone()), x.window(rows));
            let epilogue = Epilogue { accumulate: accumulate || first > 0, bias: None };
            let (tokens, panels) = (tokens.clone(), 0..part.panels());
            // SAFETY: the caller's promise, for these columns.
            unsafe { multiply(isa, part, &x, tokens, panels, out, epilogue, scratch) };
        }
    }
}

fn halves(lanes: &[f32; ROWS], to: &mut [u8], round: fn(f32) -> u16) {
    let (to, _) = to.as_chunks_mut::<2>();
    to.iter_mut().zip(lanes).for_each(|(to, x)| *to = round(*x).to_ne_bytes());
}
