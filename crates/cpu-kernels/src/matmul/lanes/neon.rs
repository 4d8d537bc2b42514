//! Sixteen lanes in four aarch64 registers; byte dot products take `sdot` where the processor has
//! it.

use super::super::product::{self, Expanded, Form};
use super::{Call, Lanes};
use std::arch::aarch64::*;
use std::arch::asm;

/// Advanced SIMD, with `sdot` if `DOT`.
pub(in super::super) struct Neon<const DOT: bool>;

/// Calls `$f` for each of four registers.
macro_rules! four {
    ($i:ident => $f:expr) => {
        [
            {
                const $i: usize = 0;
                $f
            },
            {
                const $i: usize = 1;
                $f
            },
            {
                const $i: usize = 2;
                $f
            },
            {
                const $i: usize = 3;
                $f
            },
        ]
    };
}

impl<const DOT: bool> Neon<DOT> {
    /// `acc + dot of signed bytes`, four by four.
    #[inline(always)]
    unsafe fn signed(acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: `DOT` is only chosen where the processor has it; registers only. Rust has not
        // made its intrinsic stable, hence the instruction.
        unsafe {
            if DOT {
                let mut acc = acc;
                asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
                    inout(vreg) acc, in(vreg) w, in(vreg) x, options(pure, nomem, nostack, preserves_flags));
                return acc;
            }
            let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
            let high = vmull_high_s8(w, x);
            vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
        }
    }
}

impl<const DOT: bool> Lanes for Neon<DOT> {
    type Bytes = [uint8x16_t; 4];
    type Ints = [int32x4_t; 4];
    type Floats = [float32x4_t; 4];
    const SIGNED: bool = true;

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self::Bytes {
        // SAFETY: 64 bytes are readable at `p`.
        unsafe { four!(I => vld1q_u8(p.add(16 * I))) }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, v: Self::Bytes) {
        for i in 0..4 {
            // SAFETY: 64 bytes are writable at `p`.
            unsafe { vst1q_u8(p.add(16 * i), v[i]) }
        }
    }
    #[inline(always)]
    unsafe fn shr(v: Self::Bytes, n: u32) -> Self::Bytes {
        // SAFETY: registers only.
        unsafe { four!(I => vshlq_u8(v[I], vdupq_n_s8(-(n as i8)))) }
    }
    #[inline(always)]
    unsafe fn shl(v: Self::Bytes, n: u32) -> Self::Bytes {
        // SAFETY: registers only.
        unsafe { four!(I => vshlq_u8(v[I], vdupq_n_s8(n as i8))) }
    }
    #[inline(always)]
    unsafe fn and(v: Self::Bytes, mask: u8) -> Self::Bytes {
        // SAFETY: registers only.
        unsafe { four!(I => vandq_u8(v[I], vdupq_n_u8(mask))) }
    }
    #[inline(always)]
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        // SAFETY: registers only.
        unsafe { four!(I => vorrq_u8(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn look_up(v: Self::Bytes, table: &[u8; 16]) -> Self::Bytes {
        // SAFETY: the table has 16 bytes; else registers only.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            four!(I => vqtbl1q_u8(table, v[I]))
        }
    }
    #[inline(always)]
    unsafe fn add_byte(v: Self::Bytes, n: u8) -> Self::Bytes {
        // SAFETY: registers only.
        unsafe { four!(I => vaddq_u8(v[I], vdupq_n_u8(n))) }
    }
    #[inline(always)]
    unsafe fn dot(_: usize, acc: Self::Ints, codes: Self::Bytes, x: i32) -> Self::Ints {
        // SAFETY: registers only. Codes of fewer than eight bits are the same signed.
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
            four!(I => Self::signed(acc[I], vreinterpretq_s8_u8(codes[I]), x))
        }
    }
    #[inline(always)]
    unsafe fn ints(v: i32) -> Self::Ints {
        // SAFETY: registers only.
        unsafe { [vdupq_n_s32(v); 4] }
    }
    #[inline(always)]
    unsafe fn floats(v: Self::Ints) -> Self::Floats {
        // SAFETY: registers only.
        unsafe { four!(I => vcvtq_f32_s32(v[I])) }
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::Floats {
        // SAFETY: registers only.
        unsafe { [vdupq_n_f32(v); 4] }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: registers only.
        unsafe { four!(I => vmulq_f32(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: registers only.
        unsafe { four!(I => vaddq_f32(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        // SAFETY: registers only.
        unsafe { four!(I => vfmaq_f32(c[I], a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> Self::Floats {
        // SAFETY: 16 f32 are readable at `p`.
        unsafe { four!(I => vld1q_f32(p.add(4 * I))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::Floats {
        // SAFETY: 16 u16 are readable at `p`. The conversion is part of every aarch64 target; its
        // intrinsic needs a type that Rust has not made stable, hence the instruction.
        unsafe {
            four!(I => {
                let wide: float32x4_t;
                asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) wide, in(vreg) vld1_u16(p.add(4 * I)),
                    options(pure, nomem, nostack, preserves_flags));
                wide
            })
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::Floats {
        // SAFETY: 16 u16 are readable at `p`.
        unsafe { four!(I => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * I))))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::Floats {
        // SAFETY: 16 bytes are readable at `p`.
        unsafe {
            let bytes = vld1q_s8(p);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: Self::Floats) {
        for i in 0..4 {
            // SAFETY: 16 f32 are writable at `p`.
            unsafe { vst1q_f32(p.add(4 * i), v[i]) }
        }
    }
    #[inline(never)]
    unsafe fn write(call: &Call, panel: usize, token: usize, y: &[Self::Floats], first: bool) {
        // SAFETY: passed on.
        unsafe { call.write::<Self>(panel, token, y, first) }
    }
    #[inline(never)]
    unsafe fn tiles<const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool>(
        call: &Call,
        slab: &Expanded,
    ) {
        // SAFETY: passed on.
        unsafe { product::tiles::<Self, Form<SUB, MINS, BITS, LOWERED>, 1, 4>(call, slab) }
    }
}
