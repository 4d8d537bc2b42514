//! Products of float weights with the rows of prompts by a BLAS: on Apple's systems Accelerate,
//! which alone reaches the matrix unit of their processors.
//!
//! Panels are expanded to f32 in cache, a block of columns at a time, and multiplied by `sgemm`.
//! Which matrices go there is decided by their size when they are packed ([`Blas::takes`]), never
//! by the number of rows: a row's bits must not follow from what else is in its step.
//!
//! A BLAS may add in another order for another shape, so it is called with few shapes, of [`ROWS`]
//! by [`COLUMNS`] by [`DEPTH`], and [`Blas::fewest`] compares them before the first matrix is given
//! to it: equal rows times equal columns must be equal bits, in every shape and in every place. The
//! remaining rows are filled up with zeros to the fewest rows that pass. One that fails with many
//! rows is not used: OpenBLAS, for one, whose kernels treat the last rows of a call in another way;
//! BLIS passes with 128.
//!
//! Quantised weights stay with the vector unit, whose products of bytes (`sdot`, `smmla`) are as
//! fast on all cores together, and whose codes need not be expanded to four bytes each.

use super::float;
use super::{Call, Matrix, ROWS as PANEL};
use formats::{DType, Encoding, Error, Result};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

#[cfg(target_arch = "aarch64")]
type Lanes = super::lanes::neon::Neon<false>;
#[cfg(not(target_arch = "aarch64"))]
type Lanes = super::lanes::scalar::Scalar;

/// Numbers of rows that are multiplied together.
const ROWS: [usize; 4] = [256, 128, 64, 32];
/// The most of them that fewer rows are filled up to.
const MOST_FILLED: usize = ROWS[1];
/// Numbers of columns of the result that are multiplied together: whole panels.
const COLUMNS: [usize; 5] = [256, 128, 64, 32, PANEL];
/// Columns of the weights that are expanded together.
const DEPTH: usize = 512;

/// Weights of the least matrix that goes to a BLAS: below, expanding them and calling the library
/// costs what its products gain (`benches/matmul.rs`, `blas`).
const LEAST: usize = 1 << 16;

/// Bytes of scratch: the expanded weights, a block of rows filled up, and results that have no
/// place of their own.
pub(super) const SCRATCH: usize = size_of::<f32>() * (RESULTS + RESULTS_SIZE);
/// Where the rows that are filled up lie in it, in f32.
const FILLED: usize = DEPTH * COLUMNS[0];
/// Where the results lie in it.
const RESULTS: usize = FILLED + MOST_FILLED * DEPTH;
/// As many as a few rows have in all columns, or all rows in a single panel.
const RESULTS_SIZE: usize = MOST_FILLED * COLUMNS[0];
const _: () = assert!(ROWS[0] * PANEL <= RESULTS_SIZE);

/// `cblas_sgemm`: `C = alpha A B + beta C`. Orders and transpositions are CBLAS's numbers.
pub type Sgemm = unsafe extern "C" fn(
    order: c_int,
    transpose_a: c_int,
    transpose_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    a: *const f32,
    lda: c_int,
    b: *const f32,
    ldb: c_int,
    beta: f32,
    c: *mut f32,
    ldc: c_int,
);

/// Accelerate's `BLASSetThreading`, whose setting is the calling thread's own.
type SetThreading = unsafe extern "C" fn(c_int) -> c_int;

/// A library with CBLAS's interface, which computes on the calling thread.
pub struct Blas {
    sgemm: Sgemm,
    /// The call that keeps it on the calling thread, where it has one.
    set_threading: Option<SetThreading>,
    /// Weights of the least matrix that it takes.
    least: usize,
    /// Results of [`Blas::fewest`] for each depth.
    trials: Mutex<BTreeMap<usize, Option<usize>>>,
}

impl Blas {
    /// Accelerate, on Apple's systems from macOS 15 and iOS 18 on, which let a thread keep it from
    /// starting threads of its own. `None` elsewhere, and where `DELFT_ISA` names an instruction
    /// set, which is then all that is used.
    pub fn of_system() -> Option<&'static Blas> {
        static SYSTEM: OnceLock<Option<Blas>> = OnceLock::new();
        SYSTEM
            .get_or_init(|| {
                let own = std::env::var_os(crate::isa::VARIABLE).is_some();
                if own || !cfg!(target_vendor = "apple") {
                    return None;
                }
                let library = c"/System/Library/Frameworks/Accelerate.framework/Accelerate";
                // SAFETY: it is the system's own; `cblas_sgemm` and `BLASSetThreading` have been in
                // it with these signatures since macOS 10.2 and 15.
                unsafe { Blas::open(library, Some(c"BLASSetThreading")) }.ok()
            })
            .as_ref()
    }

    /// A shared library with `cblas_sgemm`, which is never closed. `set_threading` names the
    /// function that a library with threads of its own has to have to be kept from using them.
    ///
    /// # Errors
    /// There is no such library, or it lacks one of the functions.
    ///
    /// # Safety
    /// The library may be loaded, and its functions have the signatures of [`Sgemm`] and of
    /// Accelerate's `BLASSetThreading`.
    pub unsafe fn open(library: &CStr, set_threading: Option<&CStr>) -> Result<Blas> {
        // SAFETY: the caller's promise.
        let find = |name| unsafe { symbol(library, name) };
        let sgemm = find(c"cblas_sgemm")?;
        let set_threading = set_threading.map(find).transpose()?;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Blas {
                set_threading: set_threading
                    .map(|found| std::mem::transmute::<*mut (), SetThreading>(found)),
                ..Blas::new(std::mem::transmute::<*mut (), Sgemm>(sgemm))
            })
        }
    }

    /// This function.
    ///
    /// # Safety
    /// It computes what CBLAS says, on the calling thread.
    pub unsafe fn new(sgemm: Sgemm) -> Blas {
        Blas { sgemm, set_threading: None, least: LEAST, trials: Mutex::default() }
    }

    /// With another least number of weights for the matrices that it takes.
    pub fn from_weights(self, least: usize) -> Blas {
        Blas { least, ..self }
    }

    /// The fewest rows that such a matrix is multiplied with, fewer being filled up; `None` if the
    /// vector unit multiplies it: unless it is a float matrix of enough weights, in blocks of
    /// columns for which the library keeps a row's bits.
    pub fn takes(&self, encoding: Encoding, rows: usize, cols: usize) -> Option<usize> {
        expand(encoding)?;
        if rows.saturating_mul(cols) < self.least {
            return None;
        }
        let [whole, rest] = [DEPTH.min(cols), cols % DEPTH].map(|depth| self.fewest(depth));
        Some(whole?.max(rest?))
    }

    /// The fewest rows of `ROWS` with which, and with any more, a result's bits follow from its
    /// row and its column alone, whatever the number of columns, `depth` deep; `None` if that holds
    /// of many rows only, or of none. Tried once.
    ///
    /// One row in every place times different columns gives equal rows; different rows times one
    /// column in every place give equal columns. So the order of a result's terms is the same
    /// wherever it is, as far as 256 sums can tell.
    pub fn fewest(&self, depth: usize) -> Option<usize> {
        if depth == 0 {
            return Some(ROWS[ROWS.len() - 1]);
        }
        let mut trials = self.trials.lock().unwrap_or_else(PoisonError::into_inner);
        *trials.entry(depth).or_insert_with(|| self.try_bits(depth))
    }

    fn try_bits(&self, depth: usize) -> Option<usize> {
        let (most_rows, most) = (ROWS[0], COLUMNS[0]);
        // Numbers of many sizes, whose sums round at nearly every step.
        let mut state = 1u32;
        let mut noise = || {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let row: Vec<f32> = (0..depth).map(|_| noise()).collect();
        let columns: Vec<f32> = (0..depth * most).map(|_| noise()).collect();
        let alike_rows = row.repeat(most_rows);
        let mut out = vec![0f32; most_rows * most];
        // Twice, of which the second product is added to the first.
        let mut multiply = |x: &[f32], w: &[f32], rows: usize, width: usize| -> Vec<u32> {
            for add in [false, true] {
                let w = Right { start: w.as_ptr(), depth, width };
                // SAFETY: the slices hold the matrices.
                unsafe { self.multiply(x.as_ptr(), depth, rows, w, out.as_mut_ptr(), width, add) };
            }
            out[..rows * width].iter().map(|y| y.to_bits()).collect()
        };
        let expected = multiply(&alike_rows, &columns, most_rows, most)[..most].to_vec();
        let rows: Vec<f32> = (0..depth * most_rows).map(|_| noise()).collect();
        let alike_columns: Vec<f32> = row.iter().flat_map(|&w| [w; COLUMNS[0]]).collect();
        let found = multiply(&rows, &alike_columns, most_rows, most);
        if found.chunks(most).any(|line| line.iter().any(|bits| *bits != line[0])) {
            return None;
        }
        let narrow = COLUMNS.map(|width| {
            columns.chunks(most).flat_map(|line| &line[..width]).copied().collect::<Vec<f32>>()
        });
        let mut keeps = |rows: usize| {
            COLUMNS.into_iter().zip(&narrow).all(|(width, narrow)| {
                let found = multiply(&alike_rows, narrow, rows, width);
                found.chunks(width).all(|line| line == &expected[..width])
            })
        };
        let fewest = ROWS.into_iter().take_while(|&rows| keeps(rows)).last();
        fewest.filter(|&rows| rows <= MOST_FILLED)
    }

    /// `out (+)= x w` for rows of `x` and of `out` that are `stride` f32 apart.
    ///
    /// # Safety
    /// The matrices are readable, and `out` is writable, and nobody else's.
    unsafe fn multiply(
        &self,
        x: *const f32,
        stride: usize,
        rows: usize,
        w: Right,
        out: *mut f32,
        out_stride: usize,
        add: bool,
    ) {
        const ROW_MAJOR: c_int = 101;
        const AS_IT_IS: c_int = 111;
        const ONE_THREAD: c_int = 1;
        // No matrix of a model has a side of 2^31.
        let int = |n: usize| n as c_int;
        // SAFETY: the library is what `Blas::new` was promised; the rest is the caller's promise.
        unsafe {
            if let Some(set_threading) = self.set_threading {
                set_threading(ONE_THREAD);
            }
            (self.sgemm)(
                ROW_MAJOR,
                AS_IT_IS,
                AS_IT_IS,
                int(rows),
                int(w.width),
                int(w.depth),
                1.0,
                x,
                int(stride),
                w.start,
                int(w.width),
                f32::from(u8::from(add)),
                out,
                int(out_stride),
            );
        }
    }

    /// The product of the call with this matrix, which it [`Blas::takes`], with so many rows at
    /// least.
    ///
    /// # Safety
    /// As [`super::multiply`].
    pub(super) unsafe fn product(&self, call: &Call, w: &Matrix, fewest: usize) {
        let Some(expand) = expand(w.encoding) else { return };
        let accumulate = call.epilogue.accumulate;
        if let Some(bias) = call.epilogue.bias {
            let columns = call.panels.start * PANEL..call.rows.min(call.panels.end * PANEL);
            for token in call.tokens.clone() {
                for column in columns.clone() {
                    // SAFETY: the result is the call's.
                    unsafe {
                        let y = call.out.start.wrapping_add(token * call.out.stride + column);
                        *y = bias[column] + if accumulate { *y } else { 0.0 };
                    }
                }
            }
        }
        let slab = call.scratch.cast::<f32>();
        let mut panel = call.panels.start;
        while panel < call.panels.end {
            // A panel that is partly empty comes alone, as the last.
            let whole = call.panels.end.min(call.rows / PANEL).saturating_sub(panel) * PANEL;
            let width = most(&COLUMNS, whole);
            for first in (0..call.cols).step_by(DEPTH) {
                let depth = DEPTH.min(call.cols - first);
                for p in 0..width / PANEL {
                    // SAFETY: the panels are the matrix's, and the slab has room for them.
                    unsafe {
                        let from = call.panel(panel + p);
                        expand(from, first..first + depth, slab.add(p * PANEL), width);
                    }
                }
                let w = Right { start: slab, depth, width };
                let add = accumulate || call.epilogue.bias.is_some() || first > 0;
                let mut token = call.tokens.start;
                while token < call.tokens.end {
                    let rows = most(&ROWS, call.tokens.end - token).max(fewest);
                    // SAFETY: rows, weights and results are the call's.
                    unsafe { self.block(call, token, rows, first, w, panel, add) };
                    token += rows;
                }
            }
            panel += width / PANEL;
        }
    }

    /// Multiplies `rows` rows from `token` on, or what the call has of them, by a slab of weights,
    /// whose columns begin at `first`, and adds the results to the panels from `panel` on.
    ///
    /// # Safety
    /// As [`super::multiply`]; `w` is the call's slab of these panels.
    unsafe fn block(
        &self,
        call: &Call,
        token: usize,
        rows: usize,
        first: usize,
        w: Right,
        panel: usize,
        add: bool,
    ) {
        let (column, scratch) = (panel * PANEL, call.scratch.cast::<f32>());
        let there = rows.min(call.tokens.end - token);
        let width = w.width.min(call.rows - column);
        // SAFETY: rows, weights and results are the call's; the scratch has room for rows that are
        // filled up, which are few, and for results that are aside: few rows, or one panel.
        unsafe {
            let mut x = (call.x.row(token).wrapping_add(first), call.x.stride());
            if there < rows {
                let filled = scratch.add(FILLED);
                for row in 0..there {
                    let from = call.x.row(token + row).wrapping_add(first);
                    from.copy_to_nonoverlapping(filled.add(row * w.depth), w.depth);
                }
                filled.add(there * w.depth).write_bytes(0, (rows - there) * w.depth);
                x = (filled, w.depth);
            }
            let stride = call.out.stride;
            let place = |row| call.out.start.wrapping_add((token + row) * stride + column);
            if there == rows && width == w.width {
                return self.multiply(x.0, x.1, rows, w, place(0), stride, add);
            }
            let results = scratch.add(RESULTS);
            if add {
                results.write_bytes(0, rows * w.width);
                for row in 0..there {
                    place(row).copy_to_nonoverlapping(results.add(row * w.width), width);
                }
            }
            self.multiply(x.0, x.1, rows, w, results, w.width, add);
            for row in 0..there {
                results.add(row * w.width).copy_to_nonoverlapping(place(row), width);
            }
        }
    }

    /// Multiplies matrices of the largest shape; returns the operations done.
    pub(super) fn products(&self, rounds: usize) -> usize {
        let (x, w) = (vec![0.5f32; ROWS[0] * DEPTH], vec![0.25f32; DEPTH * COLUMNS[0]]);
        let mut out = vec![0f32; ROWS[0] * COLUMNS[0]];
        for _ in 0..rounds {
            let w = Right { start: w.as_ptr(), depth: DEPTH, width: COLUMNS[0] };
            // SAFETY: the vectors hold the matrices.
            unsafe {
                self.multiply(x.as_ptr(), DEPTH, ROWS[0], w, out.as_mut_ptr(), COLUMNS[0], true)
            };
        }
        std::hint::black_box(&out);
        rounds * 2 * ROWS[0] * COLUMNS[0] * DEPTH
    }
}

/// The most of some numbers, in falling order, that are not above `n`, or the last of them.
fn most(numbers: &[usize], n: usize) -> usize {
    let last = numbers[numbers.len() - 1];
    numbers.iter().copied().find(|&number| number <= n).unwrap_or(last)
}

/// A function of a shared library.
///
/// # Safety
/// The library may be loaded.
#[cfg(unix)]
unsafe fn symbol(library: &CStr, name: &CStr) -> Result<*mut ()> {
    let place = || library.to_string_lossy();
    // SAFETY: the strings end in zeros; loading is the caller's promise.
    let found = unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() {
            return Err(Error::new(place(), "a shared library", "none that can be loaded"));
        }
        libc::dlsym(handle, name.as_ptr())
    };
    if found.is_null() {
        return Err(Error::new(
            place(),
            format!("the function {}", name.to_string_lossy()),
            "none",
        ));
    }
    Ok(found.cast())
}

/// As above; no BLAS is looked for on this system.
#[cfg(not(unix))]
unsafe fn symbol(library: &CStr, _: &CStr) -> Result<*mut ()> {
    Err(Error::new(library.to_string_lossy(), "a system with `dlopen`", std::env::consts::OS))
}

/// Expanded weights, `[depth][width]`.
#[derive(Clone, Copy)]
struct Right {
    start: *const f32,
    depth: usize,
    width: usize,
}

/// Expands columns of a panel to f32, which are `width` apart.
type Expand = unsafe fn(panel: *const u8, columns: Range<usize>, to: *mut f32, width: usize);

/// The function that expands panels of an encoding; `None` for blocks.
fn expand(encoding: Encoding) -> Option<Expand> {
    match encoding {
        Encoding::Stored(DType::F32) => Some(float::expand::<Lanes, float::F32>),
        Encoding::Stored(DType::F16) => Some(float::expand::<Lanes, float::F16>),
        Encoding::Stored(DType::BF16) => Some(float::expand::<Lanes, float::BF16>),
        _ => None,
    }
}
