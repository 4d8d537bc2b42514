//! Sixteen lanes: what the matrix products need of a vector unit, and nothing more.
//!
//! The kernels are written once over [`Lanes`]; one file per instruction set says how its registers
//! do it. A lane is one of the 16 rows of a panel.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
pub(super) mod scalar;

use super::Call;
use super::product::Expanded;

/// A vector unit, as 16 lanes of 32 bits.
///
/// # Safety
/// Every method asks that the processor has the instruction set and that pointers are valid for the
/// bytes named. Methods are inlined into functions that enable the instruction set; they are slow
/// anywhere else.
pub(super) trait Lanes: 'static {
    /// 64 code bytes: byte `4 r + e` is row `r`, column `e` of a quad of columns.
    type Bytes: Copy;
    /// 16 i32 accumulators.
    type Ints: Copy;
    /// 16 f32.
    type Floats: Copy;

    /// Whether [`Lanes::dot`] takes codes of eight bits as signed ones. Others take all codes as
    /// unsigned.
    const SIGNED: bool;

    /// Whether products are unrolled over the quads of a block: worth its size where lanes are
    /// registers.
    const UNROLLED: bool = true;

    /// 64 bytes; any alignment.
    unsafe fn bytes(p: *const u8) -> Self::Bytes;
    /// Stores 64 bytes; any alignment.
    unsafe fn store_bytes(p: *mut u8, v: Self::Bytes);
    /// Moves bits towards the low end by `n` in 0..=7; bits that cross a byte must be masked away
    /// by the caller.
    unsafe fn shr(v: Self::Bytes, n: u32) -> Self::Bytes;
    /// Moves bits towards the high end by `n` in 0..=7; as [`Lanes::shr`].
    unsafe fn shl(v: Self::Bytes, n: u32) -> Self::Bytes;
    /// Bitwise and with the same byte everywhere.
    unsafe fn and(v: Self::Bytes, mask: u8) -> Self::Bytes;
    /// Bitwise or.
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Byte `v` of the table in place of every byte `v` below 16.
    unsafe fn look_up(v: Self::Bytes, table: &[u8; 16]) -> Self::Bytes;
    /// Wrapping add of the same byte everywhere.
    unsafe fn add_byte(v: Self::Bytes, n: u8) -> Self::Bytes;

    /// `run[r] + sum over e of code[4 r + e] * x[e]`: codes of `bits` bits, `x` four signed bytes
    /// in `-127..=127`. For runs, see [`Lanes::open`].
    unsafe fn dot(bits: usize, run: Self::Ints, codes: Self::Bytes, x: i32) -> Self::Ints;
    /// How many dot products a run adds up, a power of two; 8, a whole block, where the run is
    /// simply the sum.
    #[inline(always)]
    fn depth(bits: usize) -> usize {
        let _ = bits;
        8
    }
    /// Begins a run of dot products with codes of `bits` bits, which will be added to `sum`.
    #[inline(always)]
    unsafe fn open(bits: usize, sum: Self::Ints) -> Self::Ints {
        let _ = bits;
        sum
    }
    /// `sum` with the run that was opened for it.
    #[inline(always)]
    unsafe fn close(bits: usize, sum: Self::Ints, run: Self::Ints) -> Self::Ints {
        let _ = (bits, sum);
        run
    }
    /// The same integer in every lane.
    unsafe fn ints(v: i32) -> Self::Ints;

    /// Exact for the sizes that occur: |v| < 2^24.
    unsafe fn floats(v: Self::Ints) -> Self::Floats;
    /// The same number in every lane.
    unsafe fn splat(v: f32) -> Self::Floats;
    /// `a * b`.
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a + b`.
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, fused where the unit can.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// 16 f32; any alignment.
    unsafe fn load_f32(p: *const f32) -> Self::Floats;
    /// 16 f16, widened.
    unsafe fn load_f16(p: *const u16) -> Self::Floats;
    /// 16 bf16, widened.
    unsafe fn load_bf16(p: *const u16) -> Self::Floats;
    /// 16 signed bytes, converted.
    unsafe fn load_i8(p: *const i8) -> Self::Floats;
    /// Stores 16 f32; any alignment.
    unsafe fn store_f32(p: *mut f32, v: Self::Floats);

    /// [`Call::write`], compiled for this unit once rather than into every kernel.
    unsafe fn write(call: &Call, panel: usize, token: usize, y: &[Self::Floats], first: bool);

    /// [`super::product::tiles`] of slabs of a [`super::product::Form`], compiled for this unit
    /// once rather than for every format.
    unsafe fn tiles<const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool>(
        call: &Call,
        slab: &Expanded,
    );
}
