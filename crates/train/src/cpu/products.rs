//! Products with packed matrices, and sums of outer products.

use super::executor::{Run, Scratch};
use super::gemm::{Of, To, gemm};
use cpu_kernels::matmul::{
    Activations, Epilogue, Matrix, Output, Path, Turned, multiply, multiply_turned,
};
use formats::{DType, Encoding};
use program::ValueId;
use std::ops::Range;
use std::sync::PoisonError;

/// Panels of a product, or parts of a transposed one, that a thread takes at a time, at most.
const PANELS: usize = 4;
/// Rows and columns of a sum of outer products that a thread takes at a time.
const BLOCK: [usize; 2] = [96, 256];

impl Run<'_> {
    /// `y (+)= x W' (+ bias)` of `rows` rows.
    ///
    /// # Safety
    /// `x` has `rows` rows as wide as the matrix has columns, `y` as many as it has rows; nobody
    /// else writes the one, or uses the other.
    pub(super) unsafe fn multiply(
        &self,
        matrix: &Matrix,
        x: *const f32,
        rows: usize,
        y: *mut f32,
        epilogue: Epilogue<'_>,
    ) {
        let isa = self.of.isa;
        // SAFETY: the caller's promise.
        let x = unsafe { self.activations(x, rows, matrix.cols()) };
        let out = Output { start: y, stride: matrix.rows() };
        self.quantised(&x, matrix.encoding(), matrix.panels(), &|x, panels, scratch| {
            let scratch = &mut scratch.product;
            // SAFETY: each worker has its own panels; nobody writes the lines any more.
            unsafe { multiply(isa, matrix, x, 0..rows, panels, out, epilogue, scratch) };
        });
    }

    /// `dx (+)= dy W` of `rows` rows.
    ///
    /// # Safety
    /// As [`Run::multiply`], the other way round.
    pub(super) unsafe fn multiply_back(
        &self,
        matrix: &Matrix,
        dy: *const f32,
        rows: usize,
        dx: *mut f32,
        accumulate: bool,
    ) {
        let (isa, columns) = (self.of.isa, matrix.cols());
        // SAFETY: the caller's promise.
        let dy = unsafe { self.activations(dy, rows, matrix.rows()) };
        let out = Output { start: dx, stride: columns };
        let encoding = Turned::encoding(isa, matrix.encoding());
        let parts = columns.div_ceil(Turned::COLUMNS);
        self.quantised(&dy, encoding, parts, &|dy, parts, scratch| {
            let end = columns.min(parts.end * Turned::COLUMNS);
            let columns = parts.start * Turned::COLUMNS..end;
            let scratch = (&mut scratch.product, &mut scratch.turned);
            // SAFETY: each worker has its own columns; nobody writes the lines any more.
            unsafe { multiply_turned(isa, matrix, dy, columns, out, accumulate, scratch) };
        });
    }

    /// Rows of a product, which lie behind each other.
    ///
    /// # Safety
    /// They are readable, and only one product is in hand.
    unsafe fn activations(&self, x: *const f32, rows: usize, width: usize) -> Activations<'_> {
        let storage = self.of.storage.as_ptr();
        // SAFETY: the caller's promise; the storage has room for the greatest product of the
        // Program.
        unsafe { Activations::new(Path::Exact, x, width, rows, width, storage) }
    }

    /// Quantises rows as far as weights of a type read them so, and calls `f` with ranges of
    /// `0..n`, on all threads.
    fn quantised(
        &self,
        x: &Activations<'_>,
        encoding: Encoding,
        n: usize,
        f: &(dyn Fn(&Activations<'_>, Range<usize>, &mut Scratch) + Sync),
    ) {
        let isa = self.of.isa;
        let (float, reads) = match encoding {
            Encoding::Stored(DType::F32) => (true, false),
            Encoding::Stored(DType::F16 | DType::BF16) => (true, x.halves(isa)),
            _ => (false, true),
        };
        // Fewer where every thread is to have some.
        let each = PANELS.min(n / self.of.team.count()).max(1);
        self.of.team.run(&|worker| {
            if reads {
                // SAFETY: each worker has its own blocks; the barrier is before the first product.
                unsafe { x.quantise(isa, worker.split(x.blocks()), float) };
                worker.barrier();
            }
            let scratch = &self.of.scratch[worker.index];
            let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
            while let Some(range) = worker.claim(n, each) {
                f(x, range, &mut scratch);
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
        self.of.team.run(&|worker| {
            while let Some(blocks) = worker.claim(out.div_ceil(tall) * across, 1) {
                for block in blocks {
                    let (o, i) = (block / across * tall, block % across * wide);
                    let sizes = [tall.min(out - o), wide.min(width - i), rows];
                    // SAFETY: each block is one worker's, inside the caller's shapes.
                    unsafe {
                        let (dy, x) = ((dy as *const f32).add(o), (x as *const f32).add(i));
                        let start = (dw as *mut f32).add(o * width + i);
                        let a = Of { start: dy, row: 1, column: out };
                        let b = Of { start: x, row: width, column: 1 };
                        gemm(self.of.isa, sizes, a, b, To { start, row: width, adds });
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
        unsafe { self.multiply(matrix, self.start(x), self.rows(x), self.start(y), epilogue) };
    }
}
