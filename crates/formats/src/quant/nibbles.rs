//! Bit packing that blocks share: 4-bit codes, 4-bit codes with a plane of fifth bits before them,
//! and fields of bits taken from 32 bytes at a time, which compilers turn into vector code.

/// Writes 32 codes of 4 bits: byte j holds code j low and code 16 + j high.
pub(super) fn pack(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    for (j, b) in bytes[..16].iter_mut().enumerate() {
        *b = code(j) & 15 | code(16 + j) << 4;
    }
}

/// Reads what [`pack`] wrote.
pub(super) fn unpack(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(16);
    for ((&b, low), high) in bytes[..16].iter().zip(low).zip(high) {
        *low = b & 15;
        *high = b >> 4;
    }
}

/// Writes 32 codes of 5 bits: 4 bytes of high bits (bit i for code i), then the low bits as
/// [`pack`] does.
pub(super) fn pack_5(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    let high = (0..32).fold(0u32, |bits, i| bits | u32::from(code(i) >> 4 & 1) << i);
    bytes[..4].copy_from_slice(&high.to_le_bytes());
    pack(&mut bytes[4..20], code);
}

/// Reads what [`pack_5`] wrote.
pub(super) fn unpack_5(bytes: &[u8], codes: &mut [u8]) {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    unpack(&bytes[4..20], codes);
    for (i, code) in codes[..32].iter_mut().enumerate() {
        *code |= (high >> i & 1) as u8 * 16;
    }
}

/// 32 codes out of 32 bytes: the bits of `mask` from bit `shift` up.
pub(super) fn field(bytes: &[u8], shift: usize, mask: u8, codes: &mut [u8]) {
    for (&b, code) in bytes[..32].iter().zip(&mut codes[..32]) {
        *code = b >> shift & mask;
    }
}

/// 32 codes out of two planes of 32 bytes: the bits `low_mask` of one plane, below the bits
/// `high_mask` of the other, which move up by `up`.
pub(super) fn fields(
    (low, low_shift, low_mask): (&[u8], usize, u8),
    (high, high_shift, high_mask): (&[u8], usize, u8),
    up: usize,
    codes: &mut [u8],
) {
    for ((&low, &high), code) in low[..32].iter().zip(&high[..32]).zip(&mut codes[..32]) {
        *code = low >> low_shift & low_mask | (high >> high_shift & high_mask) << up;
    }
}
