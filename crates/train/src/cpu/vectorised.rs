//! Loops that the compiler vectorises, compiled for the instruction set that there is.

use cpu_kernels::isa::Isa;

/// Numbers that are added up side by side.
const LANES: usize = 16;

/// Calls `f`, compiled for an instruction set. `f` should be small: what is not compiled into its
/// caller is compiled for any processor.
#[inline(always)]
pub(super) fn vectorised<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the value proves the instruction set.
    unsafe {
        match isa {
            Isa::Avx512 { .. } | Isa::Amx { .. } => return avx512(f),
            Isa::Avx2 { .. } | Isa::AvxVnni { .. } => return avx2(f),
            _ => {}
        }
    }
    let _ = isa;
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

/// The sum of `f` of pairs in f64, in [`LANES`] parts, which are then added up.
#[inline(always)]
pub(crate) fn total<N: Into<f64>>(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> N) -> f64 {
    let mut sums = [0f64; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            sums[i] += f(a[i], b[i]).into();
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += f(*a, *b).into();
    }
    sums.iter().sum()
}
