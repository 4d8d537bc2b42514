//! Vectors of f32: the abstraction that the kernels are written over, with one implementation per
//! instruction set.
//!
//! A kernel is a generic function `fn kernel<L: Lanes>(..)`, `#[inline(always)]` all the way down;
//! [`dispatch`] instantiates it inside a function that is compiled for the set that an
//! [`Isa`](super::super::isa::Isa) represents. The vector types are named only there, which is what
//! makes their methods sound.

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// The most lanes of any implementation, a multiple of all of them.
pub(crate) const WIDEST: usize = 16;

/// A vector of `N` f32.
pub(crate) trait Lanes: Copy {
    /// Lanes: divides [`WIDEST`].
    const N: usize;

    /// `x` in every lane.
    fn splat(x: f32) -> Self;

    /// Reads `N` f32.
    ///
    /// # Safety
    /// `p` points to `N` readable f32, of any alignment.
    unsafe fn load(p: *const f32) -> Self;

    /// Writes `N` f32.
    ///
    /// # Safety
    /// `p` points to `N` writable f32, of any alignment.
    unsafe fn store(self, p: *mut f32);

    /// Reads the bits of `N` f16.
    ///
    /// # Safety
    /// `p` points to `N` readable u16, of any alignment.
    unsafe fn load_f16(p: *const u16) -> Self;

    /// Reads the bits of `N` bf16.
    ///
    /// # Safety
    /// `p` points to `N` readable u16, of any alignment.
    unsafe fn load_bf16(p: *const u16) -> Self;

    /// The f16 whose bits `p` points to, in every lane.
    ///
    /// # Safety
    /// `p` points to a readable u16, of any alignment.
    unsafe fn splat_f16(p: *const u16) -> Self;

    /// Reads `N` signed bytes.
    ///
    /// # Safety
    /// `p` points to `N` readable bytes.
    unsafe fn load_i8(p: *const i8) -> Self;

    /// Reads `N` bytes: the lower four bits of each less 8, and the upper four less 8.
    ///
    /// # Safety
    /// `p` points to `N` readable bytes.
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self);

    /// Writes the bits of `N` f16, rounded to nearest even.
    ///
    /// # Safety
    /// `p` points to `N` writable u16, of any alignment.
    unsafe fn store_f16(self, p: *mut u16);

    /// Reads `N` pairs: the first of each, and the second of each.
    ///
    /// # Safety
    /// `p` points to `2 N` readable f32.
    unsafe fn load_pairs(p: *const f32) -> (Self, Self);

    /// Writes `N` pairs; the inverse of [`Lanes::load_pairs`].
    ///
    /// # Safety
    /// `p` points to `2 N` writable f32.
    unsafe fn store_pairs(first: Self, second: Self, p: *mut f32);

    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// `self * b + c`; rounded once where the processor can.
    fn fma(self, b: Self, c: Self) -> Self;
    /// `if self > other { self } else { other }`: `other` when either is NaN.
    fn max(self, other: Self) -> Self;
    /// `if self < other { self } else { other }`: `other` when either is NaN.
    fn min(self, other: Self) -> Self;
    /// The nearest integer, ties to even.
    fn round(self) -> Self;
    /// `self * 2^n` for whole `n` in `-252..=254`.
    fn times_power(self, n: Self) -> Self;
    /// Per lane, `if a < b { yes } else { no }`.
    fn select_lt(a: Self, b: Self, yes: Self, no: Self) -> Self;
    /// The sum of the lanes.
    fn sum(self) -> f32;
    /// The greatest lane; NaN is undefined behaviour of the value only (some lane's value comes
    /// back).
    fn greatest(self) -> f32;

    /// Reads `n <= N` f32; the other lanes are 0.
    ///
    /// # Safety
    /// `p` points to `n` readable f32.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        let mut whole = [0.0; WIDEST];
        // SAFETY: `n <= N <= WIDEST` f32 are readable, by the caller's promise, and fit.
        unsafe {
            std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), n);
            Self::load(whole.as_ptr())
        }
    }

    /// Writes the first `n <= N` lanes.
    ///
    /// # Safety
    /// `p` points to `n` writable f32.
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        let mut whole = [0.0; WIDEST];
        // SAFETY: `n <= N <= WIDEST` f32 are writable, by the caller's promise.
        unsafe {
            self.store(whole.as_mut_ptr());
            std::ptr::copy_nonoverlapping(whole.as_ptr(), p, n);
        }
    }
}

/// Calls a generic kernel compiled for an instruction set: `dispatch!(isa, kernel(x: *const f32, n:
/// usize) -> f32)` calls `kernel::<L>(x, n)` with the vectors `L` of `isa`. The kernel must be
/// `unsafe` and `#[inline(always)]`; the expression is unsafe for the kernel's own reasons only.
macro_rules! dispatch {
    ($isa:expr, $kernel:ident $([$($fixed:ty),+])? ( $($arg:ident : $type:ty),* $(,)? ) $(-> $result:ty)?) => {{
        use $crate::math::lanes;
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn avx512($($arg: $type),*) $(-> $result)? {
            // SAFETY: the caller keeps the kernel's promises.
            unsafe { $kernel::<lanes::Avx512 $($(, $fixed)+)?>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2($($arg: $type),*) $(-> $result)? {
            // SAFETY: the caller keeps the kernel's promises.
            unsafe { $kernel::<lanes::Avx2 $($(, $fixed)+)?>($($arg),*) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::isa::Isa::Amx | $crate::isa::Isa::Avx512 => avx512($($arg),*),
            #[cfg(target_arch = "x86_64")]
            $crate::isa::Isa::Avx2 | $crate::isa::Isa::AvxVnni => avx2($($arg),*),
            // Advanced SIMD is part of every aarch64 target: no function of its own is needed.
            #[cfg(target_arch = "aarch64")]
            $crate::isa::Isa::Neon
            | $crate::isa::Isa::NeonDotprod
            | $crate::isa::Isa::NeonI8mm => $kernel::<lanes::Neon $($(, $fixed)+)?>($($arg),*),
            _ => $kernel::<lanes::Scalar $($(, $fixed)+)?>($($arg),*),
        }
    }};
}
pub(crate) use dispatch;
