//! Products with packed matrices, and sums of outer products.

use super::executor::{Run, Scratch};
use super::gemm::{Of, To, gemm};
use cpu_kernels::matmul::{
    self, Activations, Epilogue, Matrix, Output, Path, Turned, multiply, multiply_turned,
};
use device::Precision;
use formats::{DType, Encoding};
use program::ValueId;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Panels of a product, or parts of a transposed one, that a thread takes at a time, at most.
const PANELS: usize = 4;
/// The same on the tile unit, which reads all rows once for each: as much as its cache holds.
const TILED: [usize; 2] = [16, 4];
/// Rows that a thread takes at a time, in multiples, where there are too few panels.
const ROWS: usize = 32;
/// Rows and columns of a sum of outer products that a thread takes at a time.
const BLOCK: [usize; 2] = [96, 256];

/// Rows of a product, which lie behind each other.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) start: *const f32,
    pub(super) rows: usize,
    /// The value that they are all rows of, whose quantised form is kept for the next product.
    pub(super) value: Option<ValueId>,
}

/// The values whose quantised rows are in either storage.
#[derive(Default)]
pub(super) struct Quantised(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// With or without all planes.
    values: [Option<(ValueId, bool)>; 2],
    /// The storage that was used last.
    last: usize,
}

impl Quantised {
    /// The storage for a value, and whether its rows are there already.
    fn place(&self, value: Option<ValueId>, float: bool) -> (usize, bool) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = value.map(|value| (value, float));
        let found = kept.values.iter().position(|kept| key.is_some() && *kept == key);
        kept.last = found.unwrap_or(1 - kept.last);
        let last = kept.last;
        kept.values[last] = key;
        (last, found.is_some())
    }
}

/// Calls with some rows and some panels of a product.
type Share<'a> = dyn Fn(&Activations<'_>, [Range<usize>; 2], &mut Scratch) + Sync + 'a;

impl Run<'_> {
    /// The way that rows are multiplied.
    pub(super) fn path(precision: Precision) -> Path {
        match precision {
            Precision::F32 => Path::Exact,
            Precision::BF16 => Path::Rounded,
        }
    }

    /// `y (+)= x W' (+ bias)`.
    ///
    /// # Safety
    /// `x` has rows as wide as the matrix has columns, `y` as many as it has rows; nobody else
    /// writes the one, or uses the other.
    pub(super) unsafe fn multiply(
        &self,
        matrix: &Matrix,
        x: Operand,
        y: *mut f32,
        epilogue: Epilogue<'_>,
    ) {
        let isa = self.of.isa;
        let out = Output { start: y, stride: matrix.rows() };
        let shape = (matrix.cols(), matrix.encoding());
        // SAFETY: the caller's promise.
        unsafe {
            self.quantised(x, shape, (matrix.panels(), TILED[0]), &|x, [rows, panels], scratch| {
                let scratch = &mut scratch.product;
                // SAFETY: each worker has its own panels; nobody writes the lines any more.
                multiply(isa, matrix, x, rows, panels, out, epilogue, scratch);
            });
        }
    }

    /// `dx (+)= dy W`.
    ///
    /// # Safety
    /// As [`Run::multiply`], the other way round.
    pub(super) unsafe fn multiply_back(
        &self,
        matrix: &Matrix,
        dy: Operand,
        dx: *mut f32,
        accumulate: bool,
    ) {
        let (isa, columns) = (self.of.isa, matrix.cols());
        let out = Output { start: dx, stride: columns };
        let shape = (matrix.rows(), Turned::encoding(isa, matrix.encoding()));
        let parts = columns.div_ceil(Turned::COLUMNS);
        // SAFETY: the caller's promise.
        unsafe {
            self.quantised(dy, shape, (parts, TILED[1]), &|dy, [rows, parts], scratch| {
                let end = columns.min(parts.end * Turned::COLUMNS);
                let columns = parts.start * Turned::COLUMNS..end;
                let scratch = (&mut scratch.product, &mut scratch.turned);
                // SAFETY: each worker has its own columns; nobody writes the lines any more.
                multiply_turned(isa, matrix, dy, rows, columns, out, accumulate, scratch);
            });
        }
    }

    /// Quantises rows as far as weights of a type read them so, unless they were, and calls `f`
    /// with ranges of the rows and of `0..n`, on all threads. `tiled` are as many of `n` as the
    /// tile unit takes together.
    ///
    /// # Safety
    /// The rows are readable and as wide as it is said, and only one product is in hand.
    unsafe fn quantised(
        &self,
        x: Operand,
        (width, encoding): (usize, Encoding),
        (n, tiled): (usize, usize),
        f: &Share<'_>,
    ) {
        let isa = self.of.isa;
        let form = |storage: usize| {
            let storage = self.of.storage[storage].as_ptr();
            let path = Self::path(self.of.precision);
            // SAFETY: the caller's promise; the storage has room for the greatest product of the
            // Program.
            unsafe { Activations::new(path, x.start, width, x.rows, width, storage) }
        };
        let halves = form(0).halves(isa);
        let (float, reads) = match encoding {
            Encoding::Stored(DType::F32) => (true, false),
            Encoding::Stored(DType::F16 | DType::BF16) => (true, halves),
            _ => (false, true),
        };
        let (place, ready) = if reads { self.quantised.place(x.value, float) } else { (0, true) };
        let (rows, x) = (x.rows, form(place));
        let threads = self.of.team.count();
        // Fewer where every thread is to have some.
        let most = if reads && halves { tiled } else { PANELS };
        let each = most.min(n / threads).max(1);
        let shares = if n < 2 * threads { rows.div_ceil(ROWS).min(threads) } else { 1 };
        let tall = rows.div_ceil(shares.max(1)).next_multiple_of(ROWS);
        let shares = rows.div_ceil(tall.max(1));
        self.of.team.run(&|worker| {
            if !ready {
                // SAFETY: each worker has its own blocks; the barrier is before the first product.
                unsafe { x.quantise(isa, worker.split(x.blocks()), float) };
                worker.barrier();
            }
            let scratch = &self.of.scratch[worker.index];
            let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
            while let Some(range) = worker.claim(n.div_ceil(each) * shares, 1) {
                for share in range {
                    let (first, row) = (share / shares * each, share % shares * tall);
                    let own = [row..rows.min(row + tall), first..n.min(first + each)];
                    f(&x, own, &mut scratch);
                }
            }
        });
    }

    /// `dw (+)= dy' x`: `[out, width]` of `rows` rows.
    ///
    /// # Safety
    /// As [`Run::multiply`] of these shapes.
    pub(super) unsafe fn outer(
        &self,
        (dy, out): (*const f32, usize),
        (x, width): (*const f32, usize),
        rows: usize,
        dw: *mut f32,
        adds: bool,
    ) {
        let [tall, wide] = BLOCK;
        let across = width.div_ceil(wide);
        let (dy, x, dw) = (dy as usize, x as usize, dw as usize);
        let isa = self.of.isa;
        let tiled = self.of.precision == Precision::BF16 && matmul::tiles_halves(isa);
        self.of.team.run(&|worker| {
            let scratch = &self.of.scratch[worker.index];
            let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
            while let Some(blocks) = worker.claim(out.div_ceil(tall) * across, 1) {
                for block in blocks {
                    let (o, i) = (block / across * tall, block % across * wide);
                    let sizes = [tall.min(out - o), wide.min(width - i), rows];
                    // SAFETY: each block is one worker's, inside the caller's shapes.
                    unsafe {
                        let (dy, x) = ((dy as *const f32).add(o), (x as *const f32).add(i));
                        let start = (dw as *mut f32).add(o * width + i);
                        if tiled {
                            let sides = [(dy, out), (x, width)]
                                .map(|(start, stride)| matmul::StridedRows { start, stride });
                            let to = Output { start, stride: width };
                            let scratch = &mut scratch.product;
                            matmul::outer(isa, sides, sizes, to, adds, scratch);
                            continue;
                        }
                        let a = Of { start: dy, row: 1, column: out };
                        let b = Of { start: x, row: width, column: 1 };
                        gemm(isa, sizes, a, b, To { start, row: width, adds });
                    }
                }
            }
        });
    }

    /// `y[i] (+)= sum_t x[t, i]`, in f64.
    pub(super) fn sum_rows(&self, x: &[f32], y: &mut [f32], adds: bool) {
        let width = y.len();
        let mut sums = vec![0f64; width];
        for row in x.chunks_exact(width) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = if adds { *y + sum as f32 } else { sum as f32 };
        }
    }

    /// The product of a value with a matrix, into another.
    ///
    /// # Safety
    /// The values are `x` and `y` of a node in hand.
    pub(super) unsafe fn product(
        &self,
        matrix: &Matrix,
        x: ValueId,
        y: ValueId,
        epilogue: Epilogue<'_>,
    ) {
        // SAFETY: values have the shapes that the verifier checked, and one node is run at a time.
        unsafe { self.multiply(matrix, self.operand(x), self.start(y), epilogue) };
    }

    /// A value as an operand of a product.
    pub(super) fn operand(&self, value: ValueId) -> Operand {
        Operand { start: self.start(value), rows: self.rows(value), value: Some(value) }
    }
}
