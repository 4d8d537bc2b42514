//! Lanes in portable Rust: an array, which the compiler may or may not turn into vectors.

use super::Lanes;
use half::f16;

/// Eight lanes of any processor.
#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; 8]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Scalar {
    const N: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Scalar([x; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Scalar(p.cast::<[f32; 8]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        Scalar(bits.map(|bits| {
            // The exponent moves by 112; infinity and NaN keep the highest one. No branches, so
            // that it vectorises.
            let magnitude = u32::from(bits & 0x7fff) << 13;
            let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
            let bits_out = if magnitude < 0x0f80_0000 { finite } else { magnitude | 0x7f80_0000 };
            f32::from_bits(bits_out | u32::from(bits & 0x8000) << 16)
        }))
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        Scalar([f16::from_bits(unsafe { p.read_unaligned() }).to_f32_const(); 8])
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller's promise.
        Scalar(
            unsafe { p.cast::<[u16; 8]>().read_unaligned() }
                .map(formats::quant::plain::bf16_to_f32),
        )
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller's promise.
        Scalar(unsafe { p.cast::<[i8; 8]>().read() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        // SAFETY: the caller's promise.
        let bytes = unsafe { p.cast::<[u8; 8]>().read() };
        let low = bytes.map(|byte| f32::from(byte & 15) - 8.0);
        (Scalar(low), Scalar(bytes.map(|byte| f32::from(byte >> 4) - 8.0)))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        let bits = self.0.map(|x| f16::from_f32_const(x).to_bits());
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn load_pairs(p: *const f32) -> (Self, Self) {
        // SAFETY: the caller's promise.
        let pairs = unsafe { p.cast::<[[f32; 2]; 8]>().read_unaligned() };
        (Scalar(pairs.map(|pair| pair[0])), Scalar(pairs.map(|pair| pair[1])))
    }
    #[inline(always)]
    unsafe fn store_pairs(first: Self, second: Self, p: *mut f32) {
        let pairs: [[f32; 2]; 8] = std::array::from_fn(|i| [first.0[i], second.0[i]]);
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[[f32; 2]; 8]>().write_unaligned(pairs) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // Rounded twice: without the instruction, `mul_add` would call a slow library function.
        self.mul(b).add(c)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding 1.5 * 2^23 leaves no bits for the fraction; right for |x| < 2^22.
        const MAGIC: f32 = 12_582_912.0;
        Scalar(self.0.map(|x| if x.abs() < 4_194_304.0 { (x + MAGIC) - MAGIC } else { x }))
    }
    #[inline(always)]
    fn times_power(self, n: Self) -> Self {
        self.zip(n, |x, n| {
            let n = n as i32;
            let half = n >> 1;
            let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
            x * power(half) * power(n - half)
        })
    }
    #[inline(always)]
    fn select_lt(a: Self, b: Self, yes: Self, no: Self) -> Self {
        Scalar(std::array::from_fn(|i| if a.0[i] < b.0[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + b) + (c + d)) + ((e + f) + (g + h))
    }
    #[inline(always)]
    fn greatest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
}
