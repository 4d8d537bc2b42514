//! Sixteen lanes in one AVX-512 register, with VNNI.

use super::super::product::{self, Expanded, Form};
use super::{Call, Lanes};
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ, VL and VNNI.
pub(in super::super) struct Avx512;

/// Shifts 16-bit words by a small count, one instruction per count.
macro_rules! shift {
    ($by:ident, $v:expr, $n:expr) => {
        match $n {
            1 => $by::<1>($v),
            2 => $by::<2>($v),
            3 => $by::<3>($v),
            4 => $by::<4>($v),
            5 => $by::<5>($v),
            6 => $by::<6>($v),
            7 => $by::<7>($v),
            _ => $v,
        }
    };
}

impl Lanes for Avx512 {
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;
    const SIGNED: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn bytes(p: *const u8) -> __m512i {
        // SAFETY: 64 bytes are readable at `p`.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn store_bytes(p: *mut u8, v: __m512i) {
        // SAFETY: 64 bytes are writable at `p`.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn shr(v: __m512i, n: u32) -> __m512i {
        shift!(_mm512_srli_epi16, v, n)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn shl(v: __m512i, n: u32) -> __m512i {
        shift!(_mm512_slli_epi16, v, n)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn and(v: __m512i, mask: u8) -> __m512i {
        _mm512_and_si512(v, _mm512_set1_epi8(mask as i8))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn look_up(v: __m512i, table: &[u8; 16]) -> __m512i {
        // SAFETY: the table has 16 bytes.
        let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add_byte(v: __m512i, n: u8) -> __m512i {
        _mm512_add_epi8(v, _mm512_set1_epi8(n as i8))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn dot(_: usize, acc: __m512i, codes: __m512i, x: i32) -> __m512i {
        _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(x))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn ints(v: i32) -> __m512i {
        _mm512_set1_epi32(v)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn floats(v: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(v)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn splat(v: f32) -> __m512 {
        _mm512_set1_ps(v)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load_f32(p: *const f32) -> __m512 {
        // SAFETY: 16 f32 are readable at `p`.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        // SAFETY: 16 u16 are readable at `p`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        // SAFETY: 16 u16 are readable at `p`.
        let words = unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        // SAFETY: 16 bytes are readable at `p`.
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(p.cast()) }))
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn store_f32(p: *mut f32, v: __m512) {
        // SAFETY: 16 f32 are writable at `p`.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn write(call: &Call, panel: usize, token: usize, y: &[__m512], first: bool) {
        // SAFETY: passed on.
        unsafe { call.write::<Self>(panel, token, y, first) }
    }
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn tiles<const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool>(
        call: &Call,
        slab: &Expanded,
    ) {
        // SAFETY: passed on.
        unsafe { product::tiles::<Self, Form<SUB, MINS, BITS, LOWERED>, 2, 6>(call, slab) }
    }
}
