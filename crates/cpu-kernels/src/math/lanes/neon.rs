//! Lanes of aarch64 Advanced SIMD.

use super::Lanes;
use std::arch::aarch64::*;

/// Four lanes of Advanced SIMD.
#[derive(Clone, Copy)]
pub(crate) struct Neon(float32x4_t);

/// Methods whose operands and result are vectors, and whose body is one expression of intrinsics.
macro_rules! methods {
    ($($name:ident($first:ident $(, $rest:ident)*) => $body:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($rest: Self),*) -> Self {
                let $first = self;
                // SAFETY: Advanced SIMD is part of every aarch64 target.
                unsafe { Self($body) }
            }
        )*
    };
}

impl Lanes for Neon {
    const N: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: Advanced SIMD is part of every aarch64 target.
        unsafe { Neon(vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Neon(vld1q_f32(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vst1q_f32(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise. The conversion is part of every aarch64 target; its
        // intrinsic needs a type that Rust has not made stable, hence the instruction.
        unsafe {
            let bits = vld1_u16(p);
            let result: float32x4_t;
            std::arch::asm!("fcvtl {r:v}.4s, {x:v}.4h", r = lateout(vreg) result, x = in(vreg) bits,
                options(pure, nomem, nostack, preserves_flags));
            Neon(result)
        }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise; as for `load_f16`.
        unsafe { Self::load_f16([p.read_unaligned(); 4].as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Neon(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let four = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            Neon(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four)))))
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        // SAFETY: the caller's promise.
        unsafe {
            let four = vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()));
            let bytes = vmovl_u16(vget_low_u16(vmovl_u8(four)));
            let middle = vdupq_n_f32(8.0);
            let low = vcvtq_f32_u32(vandq_u32(bytes, vdupq_n_u32(15)));
            let high = vcvtq_f32_u32(vshrq_n_u32::<4>(bytes));
            (Neon(vsubq_f32(low, middle)), Neon(vsubq_f32(high, middle)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        // SAFETY: the caller's promise; as for `load_f16`. It rounds to nearest even, the default
        // mode.
        unsafe {
            let bits: uint16x4_t;
            std::arch::asm!("fcvtn {r:v}.4h, {x:v}.4s", r = lateout(vreg) bits, x = in(vreg) self.0,
                options(pure, nomem, nostack, preserves_flags));
            vst1_u16(p, bits);
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const f32) -> (Self, Self) {
        // SAFETY: the caller's promise.
        let pairs = unsafe { vld2q_f32(p) };
        (Neon(pairs.0), Neon(pairs.1))
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { vst2q_f32(p, float32x4x2_t(first.0, second.0)) }
    }
    methods! {
        add(a, b) => vaddq_f32(a.0, b.0);
        sub(a, b) => vsubq_f32(a.0, b.0);
        mul(a, b) => vmulq_f32(a.0, b.0);
        div(a, b) => vdivq_f32(a.0, b.0);
        fma(a, b, c) => vfmaq_f32(c.0, a.0, b.0);
        max(a, b) => vbslq_f32(vcgtq_f32(a.0, b.0), a.0, b.0);
        min(a, b) => vbslq_f32(vcltq_f32(a.0, b.0), a.0, b.0);
        round(a) => vrndnq_f32(a.0);
        times_power(a, n) => {
            let n = vcvtnq_s32_f32(n.0);
            let half = vshrq_n_s32::<1>(n);
            let bias = vdupq_n_s32(127);
            let low = vshlq_n_s32::<23>(vaddq_s32(half, bias));
            let high = vshlq_n_s32::<23>(vaddq_s32(vsubq_s32(n, half), bias));
            vmulq_f32(vmulq_f32(a.0, vreinterpretq_f32_s32(low)), vreinterpretq_f32_s32(high))
        };
    }
    #[inline(always)]
    fn select_lt(a: Self, b: Self, yes: Self, no: Self) -> Self {
        // SAFETY: Advanced SIMD is part of every aarch64 target.
        unsafe { Neon(vbslq_f32(vcltq_f32(a.0, b.0), yes.0, no.0)) }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: Advanced SIMD is part of every aarch64 target.
        unsafe { vaddvq_f32(self.0) }
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: Advanced SIMD is part of every aarch64 target.
        unsafe { vmaxvq_f32(self.0) }
    }
}
