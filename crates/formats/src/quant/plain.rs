//! Plain number types: f16, bf16 and f32 as little-endian bytes, one value at a time or a row at a
//! time.
//!
//! Rounding is to nearest, ties to even; values past the largest f16 become infinite; a NaN stays a
//! NaN.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

/// f16 bits to f32, exactly.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// f32 to the nearest f16, as bits.
#[inline]
pub fn f32_to_f16(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

/// bf16 bits to f32, exactly.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// f32 to the nearest bf16, as bits.
#[inline]
pub fn f32_to_bf16(x: f32) -> u16 {
    bf16::from_f32(x).to_bits()
}

/// Little-endian f32 bytes (4 a value) to values. Both sides must hold the same number of values.
pub fn decode_f32(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), 4 * values.len());
    for (b, v) in bytes.chunks_exact(4).zip(values) {
        *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    }
}

/// Values to little-endian f32 bytes (4 a value).
pub fn encode_f32(values: &[f32], bytes: &mut [u8]) {
    assert_eq!(bytes.len(), 4 * values.len());
    for (v, b) in values.iter().zip(bytes.chunks_exact_mut(4)) {
        b.copy_from_slice(&v.to_le_bytes());
    }
}

/// Eight-bit floats with four bits of exponent to values: no infinities, and NaN where all bits but
/// the sign are set.
pub fn decode_f8_e4m3(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), values.len());
    for (&b, v) in bytes.iter().zip(values) {
        let (magnitude, sign) = (u32::from(b & 0x7f), u32::from(b >> 7) << 31);
        // The exponent's bias is 7, and that of the f32 with the same bits 127.
        let shifted = f32::from_bits(magnitude << 20) * (120f32).exp2();
        let magnitude = if magnitude == 0x7f { f32::NAN } else { shifted };
        *v = f32::from_bits(magnitude.to_bits() | sign);
    }
}

/// Little-endian f16 bytes (2 a value) to values.
pub fn decode_f16(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * values.len());
    // The bytes may lie at an odd address: an aligned buffer lets `half` convert several values per
    // instruction.
    let mut bits = [0u16; 64];
    for (b, v) in bytes.chunks(128).zip(values.chunks_mut(64)) {
        for (bits, b) in bits.iter_mut().zip(b.chunks_exact(2)) {
            *bits = u16::from_le_bytes([b[0], b[1]]);
        }
        bits[..v.len()].reinterpret_cast::<f16>().convert_to_f32_slice(v);
    }
}

/// Values to little-endian f16 bytes (2 a value).
pub fn encode_f16(values: &[f32], bytes: &mut [u8]) {
    assert_eq!(bytes.len(), 2 * values.len());
    let mut halves = [f16::ZERO; 64];
    for (v, b) in values.chunks(64).zip(bytes.chunks_mut(128)) {
        let halves = &mut halves[..v.len()];
        halves.convert_from_f32_slice(v);
        for (h, b) in halves.iter().zip(b.chunks_exact_mut(2)) {
            b.copy_from_slice(&h.to_le_bytes());
        }
    }
}

/// Little-endian bf16 bytes (2 a value) to values.
pub fn decode_bf16(bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * values.len());
    for (b, v) in bytes.chunks_exact(2).zip(values) {
        *v = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
    }
}

/// Values to little-endian bf16 bytes (2 a value).
pub fn encode_bf16(values: &[f32], bytes: &mut [u8]) {
    assert_eq!(bytes.len(), 2 * values.len());
    for (v, b) in values.iter().zip(bytes.chunks_exact_mut(2)) {
        b.copy_from_slice(&f32_to_bf16(*v).to_le_bytes());
    }
}

/// The f16 bits at byte `at` of a block.
#[inline]
pub(super) fn bits_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The f16 value at byte `at` of a block.
#[inline]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(bits_at(block, at))
}

/// Writes f16 bits at byte `at` of a block.
#[inline]
pub(super) fn put_bits(block: &mut [u8], at: usize, bits: u16) {
    block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
}
