//! Products of prompts by a BLAS: their sums, their bits, and which libraries and matrices they are
//! left to. Besides a plain loop in place of a library, the system's; elsewhere the one that
//! `DELFT_TEST_BLAS` names, else BLIS where there is one: it must not start threads of its own
//! (Debian: `libblis4-serial`).

use crate::matmul::{Noise, on_path, packed};
use delft_cpu_kernels::matmul::*;
use formats::{DType, Encoding};
use std::ffi::{CString, c_int};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The order in which a result's terms are added: by the shape (m, n) and the result's row and
/// column.
type Backwards = fn(m: usize, n: usize, row: usize, column: usize) -> bool;

/// `C = A B + beta C` by loops, with CBLAS's interface; some results are added up backwards.
///
/// # Safety
/// As CBLAS.
unsafe fn plain(
    backwards: Backwards,
    [m, n, k]: [c_int; 3],
    (a, lda): (*const f32, c_int),
    (b, ldb): (*const f32, c_int),
    beta: f32,
    (c, ldc): (*mut f32, c_int),
) {
    let [m, n, k, lda, ldb, ldc] = [m, n, k, lda, ldb, ldc].map(|n| n as usize);
    let mut sums = vec![0f32; n];
    for i in 0..m {
        sums.fill(0.0);
        for l in 0..k {
            // SAFETY: the matrices have these elements.
            let (x, line) = unsafe { (*a.add(i * lda + l), b.add(l * ldb)) };
            // SAFETY: as above.
            let line = unsafe { std::slice::from_raw_parts(line, n) };
            sums.iter_mut().zip(line).for_each(|(sum, w)| *sum += x * w);
        }
        for (j, &sum) in sums.iter().enumerate() {
            // SAFETY: as above.
            unsafe {
                let turned =
                    || (0..k).rev().map(|l| *a.add(i * lda + l) * *b.add(l * ldb + j)).sum();
                let sum: f32 = if backwards(m, n, i, j) { turned() } else { sum };
                let y = c.add(i * ldc + j);
                *y = sum + if beta == 0.0 { 0.0 } else { beta * *y };
            }
        }
    }
}

/// A function of CBLAS's signature, and what it adds up backwards.
macro_rules! sgemm {
    ($name:ident, $backwards:expr) => {
        unsafe extern "C" fn $name(
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
        ) {
            assert_eq!((order, transpose_a, transpose_b, alpha), (101, 111, 111, 1.0));
            // SAFETY: the caller's promise.
            unsafe { plain($backwards, [m, n, k], (a, lda), (b, ldb), beta, (c, ldc)) }
        }
    };
}
sgemm!(forwards, |_, _, _, _| false);
sgemm!(many_rows_backwards, |m, _, _, _| m == 256);
sgemm!(few_rows_backwards, |m, _, _, _| m == 32);
sgemm!(one_panel_backwards, |_, n, _, _| n == 16);
sgemm!(the_last_row_backwards, |m, _, row, _| row == m - 1);
sgemm!(the_first_columns_backwards, |_, n, _, column| n == 256 && column < 4);

/// A BLAS for the rest of the process.
fn blas(sgemm: Sgemm) -> &'static Blas {
    // SAFETY: the functions above compute what CBLAS says.
    Box::leak(Box::new(unsafe { Blas::new(sgemm) }))
}

/// A library of this system, if it has one.
fn library() -> Option<&'static Blas> {
    if let Some(system) = Blas::of_system() {
        return Some(system);
    }
    let named = std::env::var("DELFT_TEST_BLAS").ok();
    let path = CString::new(named.as_deref().unwrap_or("libblis.so.4")).unwrap();
    // SAFETY: the library is what its name says.
    match unsafe { Blas::open(&path, None) } {
        Ok(blas) => Some(Box::leak(Box::new(blas))),
        Err(why) => {
            assert!(named.is_none(), "{why}");
            testing::skipped(format!("products of a BLAS are a plain loop's alone: {why}"));
            None
        }
    }
}

/// The results of a product of some rows of `values`, by a team's parts.
fn results(
    w: &Matrix,
    path: Path,
    values: &[f32],
    tokens: Range<usize>,
    epilogue: Epilogue,
    parts: usize,
) -> Vec<f32> {
    let isa = Isa::available()[0];
    let (mut storage, mut scratch) = (Huge::zeroed(0).unwrap(), Scratch::new().unwrap());
    let x = &values[tokens.start * w.cols()..tokens.end * w.cols()];
    let x = on_path(path, isa, x, w.cols(), &mut storage);
    let stride = w.rows() + 3;
    let mut y = vec![0.3f32; tokens.len() * stride];
    let out = Output { start: y.as_mut_ptr(), stride };
    for part in 0..parts {
        let panels = share(w.panels(), part, parts);
        // SAFETY: `y` holds every token and row; one thread.
        unsafe { multiply(isa, w, &x, 0..tokens.len(), panels, out, epilogue, &mut scratch) }
    }
    assert!(y.chunks(stride).all(|line| line[w.rows()..] == [0.3; 3]), "written outside");
    y.chunks(stride).flat_map(|line| &line[..w.rows()]).copied().collect()
}

fn bits(results: &[f32]) -> Vec<u32> {
    results.iter().map(|y| y.to_bits()).collect()
}

#[test]
fn results_are_the_sums_and_a_row_has_its_bits_among_any_others() {
    // Ragged in every direction: columns of more than two slabs, rows of the matrix and of the
    // prompt that no shape divides.
    let (rows, cols, most) = (277, 1120, 300);
    let mut noise = Noise(23);
    let (values, bias) = (noise.row(most * cols), noise.row(rows));
    for blas in
        [Some(blas(forwards)), Some(blas(few_rows_backwards)), library()].into_iter().flatten()
    {
        if blas.takes(DType::F32.into(), rows, cols).is_none() {
            testing::skipped("this BLAS adds in orders that follow from the shape: it is not used");
            continue;
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (w, decoded) = packed(Encoding::from(dtype), rows, cols, &noise.row(rows * cols));
            let w = w.multiplied_by(Some(blas));
            assert!(w.has_blas());
            for (accumulate, bias) in [(false, None), (true, None), (true, Some(&bias[..]))] {
                let run = |tokens, parts| {
                    let epilogue = Epilogue { accumulate, bias };
                    results(&w, Path::Expanded, &values, tokens, epilogue, parts)
                };
                let all = run(0..most, 1);
                for (t, r) in [(0, 0), (33, 276), (255, 100), (256, 17), (299, 275)] {
                    let terms = || {
                        let w = decoded[r * cols..][..cols].iter();
                        w.zip(&values[t * cols..]).map(|(&w, &x)| f64::from(w) * f64::from(x))
                    };
                    let prior = if accumulate { f64::from(0.3f32) } else { 0.0 };
                    let expected = terms().sum::<f64>() + prior + bias.map_or(0.0, |b| b[r].into());
                    let found = f64::from(all[t * rows + r]);
                    let size: f64 = terms().map(f64::abs).sum();
                    assert!(
                        (found - expected).abs() <= 1e-6 * size + 1e-6,
                        "{dtype} token {t}, row {r}: {found} for {expected}"
                    );
                }
                let all = bits(&all);
                for (tokens, parts) in
                    [(0..1, 1), (3..5, 2), (30..63, 5), (99..300, 3), (299..300, 18)]
                {
                    let found = bits(&run(tokens.clone(), parts));
                    let expected = &all[tokens.start * rows..tokens.end * rows];
                    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
                    assert_eq!(differs, None, "{dtype} {tokens:?} in {parts} parts: result");
                }
            }
        }
    }
}

/// Results that `counted` has computed.
static COUNT: AtomicUsize = AtomicUsize::new(0);

sgemm!(counted, |_, _, _, _| {
    COUNT.fetch_add(1, Ordering::Relaxed);
    false
});

#[test]
fn rows_that_decode_do_not_go_to_a_blas() {
    let (rows, cols, tokens) = (160, 512, 4);
    let mut noise = Noise(29);
    let (values, weights) = (noise.row(tokens * cols), noise.row(rows * cols));
    let (w, _) = packed(Encoding::from(DType::F32), rows, cols, &weights);
    let w = w.multiplied_by(Some(blas(counted)));
    assert!(w.has_blas());
    let results_by = |path| {
        let before = COUNT.load(Ordering::Relaxed);
        results(&w, path, &values, 0..tokens, Epilogue::default(), 1);
        COUNT.load(Ordering::Relaxed) - before
    };
    assert_eq!(results_by(Path::InPlace), 0);
    // Filled up to 32 rows.
    assert_eq!(results_by(Path::Expanded), 32 * rows);
}

#[test]
fn a_blas_whose_bits_follow_from_shape_or_place_is_not_used() {
    let (sound, depth) = (blas(forwards), 96);
    assert_eq!(sound.fewest(depth), Some(32));
    for (sgemm, why) in [
        (many_rows_backwards as Sgemm, "many rows"),
        (one_panel_backwards, "one panel"),
        (the_last_row_backwards, "the last row"),
        (the_first_columns_backwards, "the first columns"),
    ] {
        let odd = blas(sgemm);
        assert_eq!(odd.fewest(depth), None, "{why}");
        assert_eq!(odd.takes(DType::F32.into(), 4096, depth), None, "{why}");
    }
    // Few rows are filled up.
    assert_eq!(blas(few_rows_backwards).fewest(depth), Some(64));
}

#[test]
fn large_float_matrices_are_a_blas_own() {
    let blas = blas(forwards);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(blas.takes(dtype.into(), 1024, 64), Some(32), "{dtype}");
        assert_eq!(blas.takes(dtype.into(), 1023, 64), None, "{dtype}: too small");
    }
    assert_eq!(blas.takes(DType::Q8_0.into(), 4096, 64), None, "codes are not expanded");
}

#[cfg(unix)]
#[test]
fn a_library_that_cannot_be_used_is_named() {
    // SAFETY: neither is called; the second is the C library's.
    let failures =
        unsafe { [Blas::open(c"/no/such/libblas.so", None), Blas::open(c"libc.so.6", None)] };
    let told = failures.map(|failure| failure.err().map(|e| e.to_string()).unwrap_or_default());
    assert!(told[0].contains("/no/such/libblas.so") && told[0].contains("none"), "{told:?}");
    if cfg!(target_os = "linux") {
        assert!(told[1].contains("the function cblas_sgemm"), "{told:?}");
    }
}
