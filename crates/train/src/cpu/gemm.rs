//! Products of two activations: `c (+)= a b`, in f32. `a` may be read along either axis, which is
//! what makes `dW = dy' x` and attention's products one loop. Every element of `c` adds its terms
//! in ascending order, in blocks of [`DEPTH`].

use cpu_kernels::isa::Isa;

/// Rows and columns of `c` in registers.
const TALL: usize = 6;
const WIDE: usize = 16;
/// Terms of a block, whose part of `b` is copied together.
const DEPTH: usize = 256;

/// An operand: its first element, and the distance from one row, and from one column, to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Of {
    pub(super) start: *const f32,
    pub(super) row: usize,
    pub(super) column: usize,
}

/// Where the product goes: its first element, and the distance from one row to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct To {
    pub(super) start: *mut f32,
    pub(super) row: usize,
    /// Whether the product is added to what is there.
    pub(super) adds: bool,
}

/// `c (+)= a b` of `[m, k]` and `[k, n]`; the columns of `b` stand side by side.
///
/// # Safety
/// All elements of `a` and `b` are readable and those of `c` writable, and used by nobody else
/// meanwhile.
pub(super) unsafe fn gemm(isa: Isa, [m, n, k]: [usize; 3], a: Of, b: Of, c: To) {
    debug_assert!(b.column == 1);
    // SAFETY: the caller's promise; the instruction set is there, since the value says so.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 { .. } | Isa::Amx { .. } => avx512([m, n, k], a, b, c),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 { .. } | Isa::AvxVnni { .. } => avx2([m, n, k], a, b, c),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon { .. } | Isa::NeonDotprod { .. } | Isa::NeonI8mm { .. } => {
                blocks::<true>([m, n, k], a, b, c)
            }
            _ => blocks::<false>([m, n, k], a, b, c),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512(sizes: [usize; 3], a: Of, b: Of, c: To) {
    // SAFETY: passed on.
    unsafe { blocks::<true>(sizes, a, b, c) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2(sizes: [usize; 3], a: Of, b: Of, c: To) {
    // SAFETY: passed on.
    unsafe { blocks::<true>(sizes, a, b, c) }
}

/// # Safety
/// As [`gemm`]; `FMA` says that the processor has the instruction.
#[inline(always)]
unsafe fn blocks<const FMA: bool>([m, n, k]: [usize; 3], a: Of, b: Of, c: To) {
    let mut panel = [[0f32; WIDE]; DEPTH];
    // SAFETY: every index is below the sizes, for which the caller promises.
    unsafe {
        if k == 0 && !c.adds {
            for i in 0..m {
                std::slice::from_raw_parts_mut(c.start.add(i * c.row), n).fill(0.0);
            }
        }
        for first in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - first);
            for column in (0..n).step_by(WIDE) {
                let wide = WIDE.min(n - column);
                for (t, row) in panel[..depth].iter_mut().enumerate() {
                    let from = b.start.add((first + t) * b.row + column);
                    // A copy of a length known here calls no function.
                    if wide == WIDE {
                        *row = *from.cast::<[f32; WIDE]>();
                        continue;
                    }
                    std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), wide);
                    row[wide..].fill(0.0);
                }
                let adds = c.adds || first > 0;
                let mut i = 0;
                while i < m {
                    let a = Of { start: a.start.add(i * a.row + first * a.column), ..a };
                    let c = To { start: c.start.add(i * c.row + column), adds, ..c };
                    if i + TALL <= m {
                        tile::<FMA, TALL>(a, &panel[..depth], c, wide);
                        i += TALL;
                    } else {
                        tile::<FMA, 1>(a, &panel[..depth], c, wide);
                        i += 1;
                    }
                }
            }
        }
    }
}

/// # Safety
/// As [`blocks`], for `M` rows.
#[inline(always)]
unsafe fn tile<const FMA: bool, const M: usize>(a: Of, b: &[[f32; WIDE]], c: To, wide: usize) {
    let mut sums = [[0f32; WIDE]; M];
    for (t, b) in b.iter().enumerate() {
        for i in 0..M {
            // SAFETY: the caller promises `M` rows and as many columns as `b` has rows.
            let a = unsafe { *a.start.add(i * a.row + t * a.column) };
            // By value, so that sums stay in registers.
            let mut row = sums[i];
            for j in 0..WIDE {
                row[j] = if FMA { a.mul_add(b[j], row[j]) } else { a * b[j] + row[j] };
            }
            sums[i] = row;
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        // SAFETY: row `i` has `wide` elements to write.
        let row = unsafe { std::slice::from_raw_parts_mut(c.start.add(i * c.row), wide) };
        match row.as_mut_array::<WIDE>() {
            Some(row) if c.adds => (0..WIDE).for_each(|j| row[j] += sums[j]),
            Some(row) => *row = *sums,
            None => row
                .iter_mut()
                .zip(sums)
                .for_each(|(to, sum)| *to = if c.adds { *to + sum } else { *sum }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products on every instruction set against sums in f64, with ragged edges and both readings
    /// of `a`.
    #[test]
    fn products_agree_with_sums_in_f64() {
        let number = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
        for [m, n, k] in [[1, 1, 1], [7, 17, 300], [12, 32, 256], [5, 3, 0]] {
            let a: Vec<f32> = (0..m * k).map(number).collect();
            let b: Vec<f32> = (0..k * n).map(|i| number(i + 5)).collect();
            for &isa in Isa::available() {
                for (row, column) in [(k, 1), (1, m)] {
                    for adds in [false, true] {
                        let mut c = vec![1f32; m * n];
                        let of =
                            |start: &[f32], row, column| Of { start: start.as_ptr(), row, column };
                        let to = To { start: c.as_mut_ptr(), row: n, adds };
                        // SAFETY: all three have that many elements.
                        unsafe { gemm(isa, [m, n, k], of(&a, row, column), of(&b, n, 1), to) };
                        for (at, found) in c.iter().enumerate() {
                            let (i, j) = (at / n, at % n);
                            let term = |t: usize| {
                                f64::from(a[i * row + t * column]) * f64::from(b[t * n + j])
                            };
                            let want = (0..k).map(term).sum::<f64>() + f64::from(u8::from(adds));
                            assert!((f64::from(*found) - want).abs() < 1e-4, "{isa} {m} {n} {k}");
                        }
                    }
                }
            }
        }
    }
}
