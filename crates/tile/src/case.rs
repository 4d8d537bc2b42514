//! Tests and measurements of kernels: buffers, cases with expected results, benchmarks with their
//! work.

use half::{bf16, f16};

use crate::instr::cast;
use crate::ir::Kernel;
use crate::launch::{BoundBuffer, Numbers};
use crate::types::Scalar;

/// An array to bind: little-endian elements as they lie in device memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// Element type.
    pub scalar: Scalar,
    /// `len * scalar.bytes()` bytes.
    pub bytes: Vec<u8>,
}

impl Buffer {
    /// `len` elements of zero bits.
    pub fn zeros(scalar: Scalar, len: usize) -> Self {
        Buffer { scalar, bytes: vec![0; len * scalar.bytes()] }
    }

    /// Numbers rounded to a type.
    pub fn floats(scalar: Scalar, values: &[f32]) -> Self {
        let bits = values.iter().map(|v| cast(Scalar::F32, scalar, v.to_bits()));
        Buffer::from_bits(scalar, bits)
    }

    /// Unsigned words.
    pub fn words(values: &[u32]) -> Self {
        Buffer::from_bits(Scalar::U32, values.iter().copied())
    }

    /// Raw bytes of any type.
    ///
    /// # Panics
    /// If they are not a whole number of elements.
    pub fn raw(scalar: Scalar, bytes: Vec<u8>) -> Self {
        assert_eq!(bytes.len() % scalar.bytes(), 0, "a whole number of {scalar}");
        Buffer { scalar, bytes }
    }

    fn from_bits(scalar: Scalar, bits: impl Iterator<Item = u32>) -> Self {
        let size = scalar.bytes();
        let bytes = bits.flat_map(|b| b.to_le_bytes().into_iter().take(size)).collect();
        Buffer { scalar, bytes }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.scalar.bytes()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Every element as f64.
    pub fn to_f64(&self) -> Vec<f64> {
        let read = |b: &[u8]| match self.scalar {
            Scalar::Bool | Scalar::U8 => f64::from(b[0]),
            Scalar::I8 => f64::from(b[0] as i8),
            Scalar::I16 => f64::from(i16::from_le_bytes([b[0], b[1]])),
            Scalar::U16 => f64::from(u16::from_le_bytes([b[0], b[1]])),
            Scalar::F16 => f64::from(f16::from_le_bytes([b[0], b[1]])),
            Scalar::BF16 => f64::from(bf16::from_le_bytes([b[0], b[1]])),
            Scalar::I32 => f64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Scalar::U32 => f64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Scalar::F32 => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        };
        self.bytes.chunks_exact(self.scalar.bytes()).map(read).collect()
    }

    /// Every element as f32: what a kernel that reads this buffer sees, so what its reference must
    /// be given.
    pub fn to_f32(&self) -> Vec<f32> {
        self.to_f64().into_iter().map(|x| x as f32).collect()
    }

    /// For [`Kernel::bind`]: allocations are aligned to 256.
    pub fn bound(&self) -> BoundBuffer {
        BoundBuffer { len: self.len(), align: 256 }
    }
}

/// One launch whose result is known.
#[derive(Debug, Clone)]
pub struct Case {
    /// The kernel, unspecialised.
    pub kernel: Kernel,
    /// The shape and why it is worth testing, e.g. `3 x 129, ragged tail`.
    pub label: String,
    /// Constants, arguments and free dimensions.
    pub numbers: Numbers,
    /// The buffers in binding order, as they are before the launch.
    pub buffers: Vec<Buffer>,
    /// The expected contents of buffers, by index into `buffers`; all others must be unchanged if
    /// they are inputs.
    pub expected: Vec<(usize, Expected)>,
}

/// The expected content of a buffer after a launch.
#[derive(Debug, Clone)]
pub enum Expected {
    /// These numbers, from an f64 reference, within a relative error: see [`error`].
    Near(Vec<f64>, f64),
    /// Exactly these elements.
    Exact(Vec<f64>),
}

/// The tolerance for results stored as a type: 1e-5 for f32, 2e-3 for f16, 1e-2 for bf16, none for
/// integers.
pub fn tolerance(scalar: Scalar) -> f64 {
    match scalar {
        Scalar::F32 => 1e-5,
        Scalar::F16 => 2e-3,
        Scalar::BF16 => 1e-2,
        _ => 0.0,
    }
}

/// The relative error of a result: the largest `|got - want| / (|want| + rms(want))`. Equal
/// infinities differ by nothing; any other value that is not finite is infinitely wrong.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    let finite: Vec<f64> = want.iter().copied().filter(|w| w.is_finite()).collect();
    let rms = (finite.iter().map(|w| w * w).sum::<f64>() / finite.len().max(1) as f64).sqrt();
    got.iter().zip(want).fold(0.0, |worst: f64, (&got, &want)| {
        let off = if got == want {
            0.0
        } else if got.is_finite() && want.is_finite() {
            (got - want).abs() / (want.abs() + rms)
        } else {
            f64::INFINITY
        };
        worst.max(off)
    })
}

impl Case {
    /// Compares the buffers after a launch with what is expected; the largest relative error, or
    /// what is wrong.
    ///
    /// # Errors
    /// One line naming the buffer and the first element out of bounds.
    pub fn check(&self, after: &[Buffer]) -> Result<f64, String> {
        let mut worst: f64 = 0.0;
        for (index, expected) in &self.expected {
            let got = after[*index].to_f64();
            let (want, bound) = match expected {
                Expected::Near(want, bound) => (want, *bound),
                Expected::Exact(want) => (want, 0.0),
            };
            if got.len() != want.len() {
                return Err(format!(
                    "buffer {index}: {} elements expected, {} found",
                    want.len(),
                    got.len()
                ));
            }
            let found = error(&got, want);
            worst = worst.max(found);
            if found > bound || found.is_nan() {
                let rms =
                    (want.iter().map(|w| w * w).sum::<f64>() / want.len().max(1) as f64).sqrt();
                let off =
                    |(g, w): (&f64, &f64)| !(g == w || (g - w).abs() / (w.abs() + rms) <= bound);
                let at = got.iter().zip(want).position(off).unwrap_or(0);
                return Err(format!(
                    "buffer {index}, element {at}: {} expected, {} found; relative error {found:.2e}, allowed {bound:.0e}",
                    want[at], got[at]
                ));
            }
        }
        Ok(worst)
    }
}

/// Which of a machine's limits bounds a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    /// Reading and writing device memory.
    Memory,
    /// The matrix units, in f16 or bf16.
    Matrix,
}

/// The initial content of a benchmark's buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum Fill {
    /// `len` seeded numbers in -1..1 (floats) or any bits (integers).
    Noise(Scalar, usize),
    /// `len` zeros: outputs, counters.
    Zeros(Scalar, usize),
    /// This content.
    These(Buffer),
}

/// One launch to time.
#[derive(Debug, Clone)]
pub struct Bench {
    /// The kernel, unspecialised.
    pub kernel: Kernel,
    /// The shape.
    pub label: String,
    /// Constants, arguments and free dimensions.
    pub numbers: Numbers,
    /// The buffers in binding order.
    pub buffers: Vec<Fill>,
    /// Bytes that must cross the memory bus.
    pub bytes: u64,
    /// Floating-point operations, a multiply-add counted as two.
    pub flops: u64,
    /// The resource that bounds it.
    pub roof: Bottleneck,
}

/// A kernel family as `ops` lists it for the `tile` command.
#[derive(Clone, Copy)]
pub struct Spec {
    /// Its name, without element type.
    pub name: &'static str,
    /// Every variant at every shape worth testing.
    pub cases: fn() -> Vec<Case>,
    /// Shapes worth timing.
    pub benches: fn() -> Vec<Bench>,
}

/// Seeded numbers in -1..1.
pub fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_never_forgive_what_is_not_finite() {
        assert_eq!(error(&[1.0, f64::INFINITY], &[1.0, f64::INFINITY]), 0.0);
        assert!(error(&[1.1], &[1.0]) > 0.04);
        assert_eq!(error(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(error(&[1.0], &[f64::NEG_INFINITY]), f64::INFINITY);
    }

    #[test]
    fn buffers_round_as_the_device_does() {
        let b = Buffer::floats(Scalar::BF16, &[1.0, 1.003_906_3, -3.0]);
        assert_eq!(b.len(), 3);
        assert_eq!(b.to_f64(), [1.0, 1.0, -3.0]);
        assert_eq!(Buffer::words(&[7, 1 << 31]).to_f64(), [7.0, 2_147_483_648.0]);
    }
}
