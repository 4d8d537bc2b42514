//! The 12 bytes that hold eight 6-bit scales and eight 6-bit mins in Q4_K and Q5_K.
//!
//! ```text
//! 0..4   bits 0-5: scale i           bits 6-7: bits 4-5 of scale 4 + i
//! 4..8   bits 0-5: min i             bits 6-7: bits 4-5 of min 4 + i
//! 8..12  bits 0-3: bits 0-3 of scale 4 + i,  bits 4-7: bits 0-3 of min 4 + i
//! ```

use super::Parts;
use super::plain::bits_at;

/// The scale and min of sub-block `i` (0..8), each in 0..64.
#[inline]
pub(super) fn get(bytes: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        (bytes[i] & 63, bytes[4 + i] & 63)
    } else {
        let low = bytes[4 + i];
        (low & 15 | bytes[i - 4] >> 6 << 4, low >> 4 | bytes[i] >> 6 << 4)
    }
}

/// The head that Q4_K and Q5_K share: `d`, `min`, then the twelve bytes.
pub(super) fn split(block: &[u8], parts: &mut Parts) {
    parts.d = bits_at(block, 0);
    parts.min = bits_at(block, 2);
    for i in 0..8 {
        let (scale, min) = get(&block[4..16], i);
        (parts.scales[i], parts.mins[i]) = (scale as i8, min as i8);
    }
}

/// Writes eight scales and mins, each in 0..64.
pub(super) fn put(scales: &[i8], mins: &[i8], bytes: &mut [u8]) {
    for i in 0..4 {
        let (s, m, s4, m4) =
            (scales[i] as u8, mins[i] as u8, scales[4 + i] as u8, mins[4 + i] as u8);
        bytes[i] = s & 63 | s4 >> 4 << 6;
        bytes[4 + i] = m & 63 | m4 >> 4 << 6;
        bytes[8 + i] = s4 & 15 | m4 << 4;
    }
}
