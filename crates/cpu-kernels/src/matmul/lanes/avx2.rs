//! Sixteen lanes in two AVX2 registers, without a dot product of bytes and with AVX-VNNI's.

use super::super::product::{self, Expanded, Form};
use super::{Call, Lanes};
use std::arch::asm;
use std::arch::x86_64::*;

/// AVX2, FMA and F16C; `VNNI`: and AVX-VNNI.
pub(in super::super) struct Avx2<const VNNI: bool>;

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

/// `run + vpmaddubsw(codes, x)`, in 16 bits. As instructions, since a compiler that may regroup
/// these sums makes all products of a block first, for which there are not registers enough.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply_add(mut run: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: registers only, and AVX2 is enabled.
    unsafe {
        asm!("vpmaddubsw {2}, {1}, {3}", "vpaddw {0}, {0}, {2}",
            inout(ymm_reg) run, in(ymm_reg) codes, out(ymm_reg) _, in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    run
}

/// `run + codes . x`, in 32 bits, of signed codes. One side has to be unsigned, so the sign moves
/// from the codes to `x`: the sums of two products stay below saturation, `2 * 128 * 127 < 2^15`.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply_add_signed(mut run: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    let (magnitudes, ones) = (_mm256_abs_epi8(codes), _mm256_set1_epi16(1));
    // SAFETY: as above.
    unsafe {
        asm!("vpsignb {2}, {4}, {1}", "vpmaddubsw {2}, {3}, {2}", "vpmaddwd {2}, {2}, {5}", "vpaddd {0}, {0}, {2}",
            inout(ymm_reg) run, in(ymm_reg) codes, out(ymm_reg) _, in(ymm_reg) magnitudes, in(ymm_reg) x, in(ymm_reg) ones,
            options(pure, nomem, nostack, preserves_flags));
    }
    run
}

/// `sum + codes . x`, in 32 bits. As an instruction, since functions that enable AVX-VNNI for the
/// intrinsic would not be inlined into those that cannot.
#[inline]
#[target_feature(enable = "avx2")]
fn dot_product(mut sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: registers only; `Lanes` asks for a processor with AVX-VNNI.
    unsafe {
        asm!("{{vex}} vpdpbusd {0}, {1}, {2}",
            inout(ymm_reg) sum, in(ymm_reg) codes, in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Bytes = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];
    const SIGNED: bool = !VNNI;

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
    unsafe fn look_up(v: [__m256i; 2], table: &[u8; 16]) -> [__m256i; 2] {
        // SAFETY: the table has 16 bytes.
        let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        let table = _mm256_broadcastsi128_si256(table);
        [_mm256_shuffle_epi8(table, v[0]), _mm256_shuffle_epi8(table, v[1])]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add_byte(v: [__m256i; 2], n: u8) -> [__m256i; 2] {
        let n = _mm256_set1_epi8(n as i8);
        [_mm256_add_epi8(v[0], n), _mm256_add_epi8(v[1], n)]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot(bits: usize, run: [__m256i; 2], codes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        let x = _mm256_set1_epi32(x);
        match bits {
            _ if VNNI => [dot_product(run[0], codes[0], x), dot_product(run[1], codes[1], x)],
            8 => {
                [multiply_add_signed(run[0], codes[0], x), multiply_add_signed(run[1], codes[1], x)]
            }
            // The sums of two products saturate at 16 bits, which codes below 128 stay clear of: 2 *
            // 127 * 127 < 2^15.
            _ => [multiply_add(run[0], codes[0], x), multiply_add(run[1], codes[1], x)],
        }
    }
    /// Without AVX-VNNI, runs of narrow codes are sums of 16 bits, which take half of the
    /// instructions: `8 * 2 * 15 * 127 < 2^15`, half as many with every bit more. Runs of whole
    /// bytes are sums of 32.
    #[inline(always)]
    fn depth(bits: usize) -> usize {
        if VNNI || bits == 8 { 8 } else { (128 >> bits).min(8) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn open(bits: usize, sum: [__m256i; 2]) -> [__m256i; 2] {
        if VNNI || bits == 8 { sum } else { [_mm256_setzero_si256(); 2] }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn close(bits: usize, sum: [__m256i; 2], run: [__m256i; 2]) -> [__m256i; 2] {
        if VNNI || bits == 8 {
            return run;
        }
        let ones = _mm256_set1_epi16(1);
        [
            _mm256_add_epi32(sum[0], _mm256_madd_epi16(run[0], ones)),
            _mm256_add_epi32(sum[1], _mm256_madd_epi16(run[1], ones)),
        ]
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
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn tiles<const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool>(
        call: &Call,
        slab: &Expanded,
    ) {
        // SAFETY: passed on.
        unsafe { product::tiles::<Self, Form<SUB, MINS, BITS, LOWERED>, 1, 4>(call, slab) }
    }
}
