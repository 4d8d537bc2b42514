//! Sixteen lanes in portable Rust: the reference for the others, and what unknown processors run.

use super::super::product::{self, Expanded, Form};
use super::{Call, Lanes};

/// Arrays for registers.
pub(in super::super) struct Scalar;

/// Applies a function to every pair of elements.
#[inline(always)]
fn zip<T: Copy, U: Copy, V: Copy + Default>(
    a: [T; 16],
    b: [U; 16],
    f: impl Fn(T, U) -> V,
) -> [V; 16] {
    let (mut out, mut r) = ([V::default(); 16], 0);
    // Tests run this where iterators, and `map` of arrays, are calls.
    while r < 16 {
        out[r] = f(a[r], b[r]);
        r += 1;
    }
    out
}

/// Applies a function to every element.
#[inline(always)]
fn map<T: Copy, V: Copy + Default>(a: [T; 16], f: impl Fn(T) -> V) -> [V; 16] {
    zip(a, [(); 16], |a, ()| f(a))
}

impl Lanes for Scalar {
    /// One little-endian word per row.
    type Bytes = [u32; 16];
    type Ints = [i32; 16];
    type Floats = [f32; 16];
    const SIGNED: bool = false;
    const UNROLLED: bool = false;

    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> [u32; 16] {
        // SAFETY: 64 bytes are readable at `p`.
        let words = unsafe { p.cast::<[u32; 16]>().read_unaligned() };
        map(words, u32::from_le)
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, v: [u32; 16]) {
        // SAFETY: 64 bytes are writable at `p`.
        unsafe { p.cast::<[u32; 16]>().write_unaligned(map(v, u32::to_le)) }
    }
    #[inline(always)]
    unsafe fn shr(v: [u32; 16], n: u32) -> [u32; 16] {
        map(v, |v| v >> n)
    }
    #[inline(always)]
    unsafe fn shl(v: [u32; 16], n: u32) -> [u32; 16] {
        map(v, |v| v << n)
    }
    #[inline(always)]
    unsafe fn and(v: [u32; 16], mask: u8) -> [u32; 16] {
        map(v, |v| v & (u32::from(mask) * 0x0101_0101))
    }
    #[inline(always)]
    unsafe fn or(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        zip(a, b, |a, b| a | b)
    }
    #[inline(always)]
    unsafe fn look_up(v: [u32; 16], table: &[u8; 16]) -> [u32; 16] {
        map(v, |v| u32::from_le_bytes(v.to_le_bytes().map(|b| table[usize::from(b & 15)])))
    }
    #[inline(always)]
    unsafe fn add_byte(v: [u32; 16], n: u8) -> [u32; 16] {
        map(v, |v| u32::from_le_bytes(v.to_le_bytes().map(|b| b.wrapping_add(n))))
    }
    #[inline(always)]
    unsafe fn dot(_: usize, acc: [i32; 16], codes: [u32; 16], x: i32) -> [i32; 16] {
        let x = x.to_le_bytes();
        let x = [x[0] as i8 as i32, x[1] as i8 as i32, x[2] as i8 as i32, x[3] as i8 as i32];
        zip(acc, codes, |acc, word| {
            let c = word.to_le_bytes();
            let c = [c[0] as i32, c[1] as i32, c[2] as i32, c[3] as i32];
            acc + c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3]
        })
    }
    #[inline(always)]
    unsafe fn ints(v: i32) -> [i32; 16] {
        [v; 16]
    }
    #[inline(always)]
    unsafe fn floats(v: [i32; 16]) -> [f32; 16] {
        map(v, |v| v as f32)
    }
    #[inline(always)]
    unsafe fn splat(v: f32) -> [f32; 16] {
        [v; 16]
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        zip(zip(a, b, |a, b| a * b), c, |ab, c| ab + c)
    }
    #[inline(always)]
    unsafe fn load_f32(p: *const f32) -> [f32; 16] {
        // SAFETY: 16 f32 are readable at `p`.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> [f32; 16] {
        // SAFETY: 16 u16 are readable at `p`.
        map(unsafe { p.cast::<[u16; 16]>().read_unaligned() }, formats::quant::plain::f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> [f32; 16] {
        // SAFETY: 16 u16 are readable at `p`.
        map(unsafe { p.cast::<[u16; 16]>().read_unaligned() }, formats::quant::plain::bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; 16] {
        // SAFETY: 16 bytes are readable at `p`.
        map(unsafe { p.cast::<[i8; 16]>().read_unaligned() }, f32::from)
    }
    #[inline(always)]
    unsafe fn store_f32(p: *mut f32, v: [f32; 16]) {
        // SAFETY: 16 f32 are writable at `p`.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[inline(never)]
    unsafe fn write(call: &Call, panel: usize, token: usize, y: &[[f32; 16]], first: bool) {
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
