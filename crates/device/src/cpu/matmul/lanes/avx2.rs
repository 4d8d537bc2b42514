//! Sixteen lanes in two AVX2 registers.

use super::{Call, Lanes};
use std::arch::x86_64::*;

/// AVX2, FMA and F16C.
pub(in super::super) struct Avx2;

macro_rules! shift {
    ($by:ident, $v:expr, $n:expr) => {
        match $n {
            1 => [$by::<1>($v[0]), $by::<1>($v[1])],
            2 => [$by::<2>($v[0]), $by::<2>($v[1])],
            3 => [$by::<3>($v[0]), $by::<3>($v[1])],
            4 => [$by::<4>($v[0]), $by::<4>($v[1])],
            5 => [$by::<5>($v[0]), $by::<5>($v[1])],
            6 => [$by::<6>($v[0]), $by::<6>($v[1])],
            7 => [$by::<7>($v[0]), $by::<7>($v[1])],
            _ => $v,
        }
    };
}

impl Lanes for Avx2 {
    type Bytes = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(p: *const u8) -> [__m256i; 2] {
        // SAFETY: 64 bytes are readable at `p`.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store_bytes(p: *mut u8, v: [__m256i; 2]) {
        // SAFETY: 64 bytes are writable at `p`.
        unsafe {
            _mm256_storeu_si256(p.cast(), v[0]);
            _mm256_storeu_si256(p.add(32).cast(), v[1]);
        }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn shr(v: [__m256i; 2], n: u32) -> [__m256i; 2] {
        shift!(_mm256_srli_epi16, v, n)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn shl(v: [__m256i; 2], n: u32) -> [__m256i; 2] {
        shift!(_mm256_slli_epi16, v, n)
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn and(v: [__m256i; 2], mask: u8) -> [__m256i; 2] {
        let mask = _mm256_set1_epi8(mask as i8);
        [_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add_byte(v: [__m256i; 2], n: u8) -> [__m256i; 2] {
        let n = _mm256_set1_epi8(n as i8);
        [_mm256_add_epi8(v[0], n), _mm256_add_epi8(v[1], n)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot7(acc: [__m256i; 2], codes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        // Codes below 128 cannot saturate the 16-bit pair sums: 2 * 127 * 127 < 2^15.
        let (x, ones) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
        let low = _mm256_madd_epi16(_mm256_maddubs_epi16(codes[0], x), ones);
        let high = _mm256_madd_epi16(_mm256_maddubs_epi16(codes[1], x), ones);
        [_mm256_add_epi32(acc[0], low), _mm256_add_epi32(acc[1], high)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot8(acc: [__m256i; 2], codes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        // A pair sum of unsigned bytes would saturate, so the sign moves from the code to x: 2 * 128 * 127 < 2^15.
        let (x, flip, ones) = (_mm256_set1_epi32(x), _mm256_set1_epi8(-128), _mm256_set1_epi16(1));
        let (low, high) = (_mm256_xor_si256(codes[0], flip), _mm256_xor_si256(codes[1], flip));
        let low = _mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(x, low));
        let high = _mm256_maddubs_epi16(_mm256_abs_epi8(high), _mm256_sign_epi8(x, high));
        let (low, high) = (_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
        [_mm256_add_epi32(acc[0], low), _mm256_add_epi32(acc[1], high)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn ints(v: i32) -> [__m256i; 2] {
        [_mm256_set1_epi32(v); 2]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn floats(v: [__m256i; 2]) -> [__m256; 2] {
        [_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn splat(v: f32) -> [__m256; 2] {
        [_mm256_set1_ps(v); 2]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_f32(p: *const f32) -> [__m256; 2] {
        // SAFETY: 16 f32 are readable at `p`.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_f16(p: *const u16) -> [__m256; 2] {
        // SAFETY: 16 u16 are readable at `p`.
        let (low, high) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
        [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_bf16(p: *const u16) -> [__m256; 2] {
        // SAFETY: 16 u16 are readable at `p`.
        let (low, high) = unsafe { (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(8).cast())) };
        let (low, high) = (_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high));
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
        ]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_i8(p: *const i8) -> [__m256; 2] {
        // SAFETY: 16 bytes are readable at `p`.
        let bytes = unsafe { _mm_loadu_si128(p.cast()) };
        let (low, high) =
            (_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)));
        [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store_f32(p: *mut f32, v: [__m256; 2]) {
        // SAFETY: 16 f32 are writable at `p`.
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn write(call: &Call, panel: usize, token: usize, y: &[[__m256; 2]], first: bool) {
        // SAFETY: passed on.
        unsafe { call.write::<Self>(panel, token, y, first) }
    }
}
