//! Lanes of AVX2 (with FMA and F16C) and of AVX-512.

use super::Lanes;
use std::arch::x86_64::*;

/// Eight lanes of AVX2.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256);

/// Sixteen lanes of AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// Methods whose operands and result are vectors, and whose body is one expression of intrinsics.
macro_rules! methods {
    ($($name:ident($first:ident $(, $rest:ident)*) => $body:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($rest: Self),*) -> Self {
                let $first = self;
                // SAFETY: the vector types are only used where their instructions exist: see
                // `dispatch`.
                unsafe { Self($body) }
            }
        )*
    };
}

impl Avx512 {
    /// The register.
    #[inline(always)]
    pub(crate) fn register(self) -> __m512 {
        self.0
    }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Lanes for Avx2 {
    const N: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe { Avx2(_mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx2(_mm256_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx2(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx2(_mm256_cvtph_ps(_mm_set1_epi16(p.cast::<i16>().read_unaligned()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx2(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
            let middle = _mm256_set1_ps(8.0);
            let low = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
            let high = _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes));
            (Avx2(_mm256_sub_ps(low, middle)), Avx2(_mm256_sub_ps(high, middle)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const f32) -> (Self, Self) {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, high) = (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
            // The shuffles work within halves of 128 bits: bring together the halves that belong
            // together first.
            let (a, b) = (
                _mm256_permute2f128_ps::<0x20>(low, high),
                _mm256_permute2f128_ps::<0x31>(low, high),
            );
            (
                Avx2(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
                Avx2(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) =
                (_mm256_unpacklo_ps(first.0, second.0), _mm256_unpackhi_ps(first.0, second.0));
            _mm256_storeu_ps(p, _mm256_permute2f128_ps::<0x20>(a, b));
            _mm256_storeu_ps(p.add(8), _mm256_permute2f128_ps::<0x31>(a, b));
        }
    }
    methods! {
        add(a, b) => _mm256_add_ps(a.0, b.0);
        sub(a, b) => _mm256_sub_ps(a.0, b.0);
        mul(a, b) => _mm256_mul_ps(a.0, b.0);
        div(a, b) => _mm256_div_ps(a.0, b.0);
        fma(a, b, c) => _mm256_fmadd_ps(a.0, b.0, c.0);
        max(a, b) => _mm256_max_ps(a.0, b.0);
        min(a, b) => _mm256_min_ps(a.0, b.0);
        round(a) => _mm256_round_ps::<NEAREST>(a.0);
        times_power(a, n) => {
            let n = _mm256_cvtps_epi32(n.0);
            let half = _mm256_srai_epi32::<1>(n);
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
            _mm256_mul_ps(_mm256_mul_ps(a.0, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high))
        };
    }
    #[inline(always)]
    fn select_lt(a: Self, b: Self, yes: Self, no: Self) -> Self {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe { Avx2(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0))) }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe {
            let four =
                _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe {
            let four =
                _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

impl Lanes for Avx512 {
    const N: usize = 16;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe { Avx512(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx512(_mm512_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_set1_epi16(p.cast::<i16>().read_unaligned()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            // A permutation looks at the lowest four bits of each place alone.
            let codes = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0,
                7.0,
            );
            let high = _mm512_srli_epi32::<4>(bytes);
            (
                Avx512(_mm512_permutexvar_ps(bytes, codes)),
                Avx512(_mm512_permutexvar_ps(high, codes)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const f32) -> (Self, Self) {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            (
                Avx512(_mm512_permutex2var_ps(low, even, high)),
                Avx512(_mm512_permutex2var_ps(low, odd, high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            _mm512_storeu_ps(p, _mm512_permutex2var_ps(first.0, low, second.0));
            _mm512_storeu_ps(p.add(16), _mm512_permutex2var_ps(first.0, high, second.0));
        }
    }
    methods! {
        add(a, b) => _mm512_add_ps(a.0, b.0);
        sub(a, b) => _mm512_sub_ps(a.0, b.0);
        mul(a, b) => _mm512_mul_ps(a.0, b.0);
        div(a, b) => _mm512_div_ps(a.0, b.0);
        fma(a, b, c) => _mm512_fmadd_ps(a.0, b.0, c.0);
        max(a, b) => _mm512_max_ps(a.0, b.0);
        min(a, b) => _mm512_min_ps(a.0, b.0);
        round(a) => _mm512_roundscale_ps::<NEAREST>(a.0);
        times_power(a, n) => _mm512_scalef_ps(a.0, n.0);
    }
    #[inline(always)]
    fn select_lt(a: Self, b: Self, yes: Self, no: Self) -> Self {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe {
            Avx512(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0), no.0, yes.0))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        // SAFETY: as for the other methods: see `dispatch`.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        // SAFETY: only the lanes of the mask are read, which the caller promises.
        unsafe { Avx512(_mm512_maskz_loadu_ps(((1u32 << n) - 1) as __mmask16, p)) }
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        // SAFETY: only the lanes of the mask are written, which the caller promises.
        unsafe { _mm512_mask_storeu_ps(p, ((1u32 << n) - 1) as __mmask16, self.0) }
    }
}
