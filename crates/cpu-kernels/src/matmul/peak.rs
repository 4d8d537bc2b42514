//! Peak throughput of an instruction set: its byte dot products, its tiles and its fused
//! multiply-adds, each alone in a loop. `roof` measures memory bandwidth.

use super::lanes::Lanes;
use super::{BLOCK, Blas, Isa, Matrix, Parallel, Path, with_panel};
use formats::{DType, quant::BlockFormat, with_block};
use std::hint::black_box;
use std::time::Instant;

/// Execution units with peaks of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Dot products of bytes.
    Bytes,
    /// Dot products of bytes, where codes of fewer than eight bits take fewer instructions.
    Narrow,
    /// A unit for matrices: AMX's tiles, in bf16, or what the system's BLAS has, in f32.
    Tiles,
    /// Multiply-adds in f32.
    Floats,
}

impl Matrix {
    /// The unit that multiplies this matrix on a path.
    pub fn unit(&self, isa: Isa, path: Path) -> Unit {
        let halves = super::activations::halves(isa, path, self.cols);
        let blas = self.has_blas() && path != Path::InPlace;
        if blas || super::tiled(isa, self.encoding, halves) {
            return Unit::Tiles;
        }
        let bits =
            with_panel!(self.encoding, B => B::AFFINE.value_bits(), else => return Unit::Floats);
        if narrow(isa).is_some() && bits < 8 { Unit::Narrow } else { Unit::Bytes }
    }
}

/// Operations per second (a multiply-add counts as two) of a unit on all workers together, the best
/// of `repeats`; 0 if the instruction set has no such unit.
pub fn peak(workers: &impl Parallel, isa: Isa, unit: Unit, repeats: usize) -> f64 {
    let kernel = match unit {
        Unit::Bytes => bytes(isa),
        Unit::Narrow => narrow(isa),
        Unit::Floats => floats(isa),
        Unit::Tiles => tiles(isa),
    };
    let Some(kernel) = kernel else { return 0.0 };
    let pass = |rounds: usize| {
        let (total, start) = (std::sync::atomic::AtomicUsize::new(0), Instant::now());
        workers.run(&|_, _| {
            // SAFETY: the ISA value proves the instruction set.
            let done = unsafe { kernel(rounds) };
            total.fetch_add(done, std::sync::atomic::Ordering::Relaxed);
        });
        total.into_inner() as f64 / start.elapsed().as_secs_f64().max(1e-9)
    };
    // A portable loop is a hundred times slower than tiles: run as many rounds as take about two
    // milliseconds.
    let mut rounds = 1000;
    loop {
        let start = Instant::now();
        pass(rounds);
        if start.elapsed().as_millis() >= 2 || rounds >= 1 << 30 {
            break;
        }
        rounds *= 2;
    }
    (0..repeats.max(1)).map(|_| pass(rounds)).fold(0.0, f64::max)
}

/// Runs `rounds` rounds of a loop and returns the number of operations.
type Loop = unsafe fn(rounds: usize) -> usize;

fn bytes(isa: Isa) -> Option<Loop> {
    Some(match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => x86::avx512_bytes,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => x86::avx_vnni_bytes,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => x86::avx2_bytes,
        #[cfg(target_arch = "aarch64")]
        Isa::NeonI8mm => super::i8mm::products,
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDotprod => dots::<super::lanes::neon::Neon<true>, 4, 8>,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => dots::<super::lanes::neon::Neon<false>, 4, 8>,
        _ => dots::<super::lanes::scalar::Scalar, 2, 8>,
    })
}

fn narrow(isa: Isa) -> Option<Loop> {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx2 {
        return Some(x86::avx2_narrow);
    }
    let _ = isa;
    None
}

fn floats(isa: Isa) -> Option<Loop> {
    Some(match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => x86::avx512_floats,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => x86::avx2_floats,
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => fmas::<super::lanes::neon::Neon<false>, 4>,
        _ => fmas::<super::lanes::scalar::Scalar, 3>,
    })
}

fn tiles(isa: Isa) -> Option<Loop> {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx && super::tiled(isa, DType::BF16.into(), true) {
        return Some(crate::amx::products);
    }
    let _ = (isa, DType::BF16);
    unsafe fn products(rounds: usize) -> usize {
        // A round of other units is a thousandth of one of these.
        Blas::of_system().map_or(0, |blas| blas.products(rounds.div_ceil(1000)))
    }
    Blas::of_system().map(|_| products as Loop)
}

/// The loops with their instruction sets enabled; as many independent sums as fill the registers
/// and hide the latency of the additions.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::lanes::{avx2::Avx2, avx512::Avx512};

    macro_rules! bytes {
        ($name:ident, $lanes:ty, $features:literal, $sums:literal, $bits:literal) => {
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(rounds: usize) -> usize {
                // SAFETY: passed on.
                unsafe { super::dots::<$lanes, $sums, $bits>(rounds) }
            }
        };
    }
    macro_rules! floats {
        ($name:ident, $lanes:ty, $features:literal, $sums:literal) => {
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(rounds: usize) -> usize {
                // SAFETY: passed on.
                unsafe { super::fmas::<$lanes, $sums>(rounds) }
            }
        };
    }
    bytes!(avx512_bytes, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", 12, 8);
    floats!(avx512_floats, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", 12);
    bytes!(avx_vnni_bytes, Avx2<true>, "avx2,fma,f16c", 6, 8);
    bytes!(avx2_bytes, Avx2<false>, "avx2,fma,f16c", 4, 8);
    bytes!(avx2_narrow, Avx2<false>, "avx2,fma,f16c", 4, 4);
    floats!(avx2_floats, Avx2<false>, "avx2,fma,f16c", 5);
}

/// `N` sums of products of bytes side by side, a block at a time, with codes of `BITS` bits.
///
/// # Safety
/// The processor has `L`.
#[inline(always)]
unsafe fn dots<L: Lanes, const N: usize, const BITS: usize>(rounds: usize) -> usize {
    // Codes in memory and activations that change: otherwise the compiler would move the products
    // out of the loop.
    let codes = black_box([[1u8; 64]; 2]);
    let (mut x, step) = (black_box(0x0101_0101), black_box(0x0000_0001));
    const QUADS: usize = BLOCK / 4;
    // SAFETY: the caller's promise; each code block has 64 bytes.
    unsafe {
        let mut sums: [L::Ints; N] = std::array::from_fn(|i| L::ints(black_box(i as i32)));
        for _ in 0..rounds {
            let mut runs = sums;
            for q in 0..QUADS {
                let codes = L::bytes(codes[q % 2].as_ptr());
                for (sum, run) in sums.iter_mut().zip(&mut runs) {
                    if q % L::depth(BITS) == 0 {
                        *run = L::open(BITS, *sum);
                    }
                    *run = L::dot(BITS, *run, codes, x);
                    if (q + 1) % L::depth(BITS) == 0 {
                        *sum = L::close(BITS, *sum, *run);
                    }
                }
                x ^= step;
            }
        }
        let mut out = [0f32; 16];
        for sum in sums {
            L::store_f32(out.as_mut_ptr(), L::floats(sum));
            black_box(&out);
        }
    }
    rounds * N * QUADS * 2 * 64
}

/// `N` sums of f32 products side by side.
///
/// # Safety
/// The processor has `L`.
#[inline(always)]
unsafe fn fmas<L: Lanes, const N: usize>(rounds: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (L::splat(black_box(0.5)), L::splat(black_box(0.25)));
        let mut sums: [L::Floats; N] = std::array::from_fn(|i| L::splat(black_box(i as f32)));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = L::fma(a, *sum, b);
            }
        }
        let mut out = [0f32; 16];
        for sum in sums {
            L::store_f32(out.as_mut_ptr(), sum);
            black_box(&out);
        }
    }
    rounds * N * 2 * 16
}
