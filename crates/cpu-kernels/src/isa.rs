//! The instruction set that the kernels use, detected once at start.

use formats::{Error, Result};
use std::fmt;
use std::sync::OnceLock;

/// The environment variable that selects a lesser instruction set, for tests: `scalar`; `avx2`,
/// `avxvnni`, `avx512`, `amx`; `neon`, `neon-dotprod`, `neon-i8mm`.
pub const VARIABLE: &str = "DELFT_ISA";

/// A set of vector instructions that this processor has.
///
/// A value is the proof: only [`Isa::detect`], [`Isa::parse`] and [`Isa::available`] make the
/// vector variants (`#[non_exhaustive]` keeps other crates from naming them in an expression), and
/// each asks the processor first. So a kernel compiled for a set may be called wherever the
/// matching value is at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// aarch64 Advanced SIMD.
    #[non_exhaustive]
    Neon,
    /// [`Isa::Neon`] and `dotprod`: `sdot`, four products of bytes a lane.
    #[non_exhaustive]
    NeonDotprod,
    /// [`Isa::NeonDotprod`] and `i8mm`: `smmla`, products of 2 x 8 by 8 x 2 bytes.
    #[non_exhaustive]
    NeonI8mm,
    /// x86-64 with `avx2`, `fma` and `f16c`.
    #[non_exhaustive]
    Avx2,
    /// [`Isa::Avx2`] and `avxvnni`: `vpdpbusd` on 256 bits, four products of bytes a lane.
    #[non_exhaustive]
    AvxVnni,
    /// [`Isa::Avx2`] and `avx512f`, `bw`, `dq`, `vl`, `vnni`.
    #[non_exhaustive]
    Avx512,
    /// [`Isa::Avx512`] and `amx-tile`, `amx-int8`, `amx-bf16`, with the system's permission to use
    /// the tiles.
    #[non_exhaustive]
    Amx,
}

impl Isa {
    /// The best set of this processor, or the one named by [`VARIABLE`]; determined once per
    /// process.
    ///
    /// # Errors
    /// The variable names no set, or one that the processor lacks.
    pub fn detect() -> Result<Isa> {
        static BEST: OnceLock<Result<Isa>> = OnceLock::new();
        BEST.get_or_init(|| match std::env::var(VARIABLE) {
            Ok(name) => Isa::parse(&name),
            Err(_) => Ok(Isa::available().last().copied().unwrap_or(Isa::Scalar)),
        })
        .clone()
    }

    /// Every set this processor has, least first; never empty. Tests run each kernel on all of
    /// them.
    pub fn available() -> &'static [Isa] {
        static ALL: OnceLock<Vec<Isa>> = OnceLock::new();
        ALL.get_or_init(|| {
            let mut all = vec![Isa::Scalar];
            probe(&mut all);
            all
        })
    }

    /// The set with this name.
    ///
    /// # Errors
    /// There is no such set, or the processor lacks it.
    pub fn parse(name: &str) -> Result<Isa> {
        Isa::available().iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
            Error::new(VARIABLE, format!("one of {}", names.join(", ")), format!("`{name}`"))
                .hint("a set that this processor lacks cannot be chosen; leave the variable unset for the best one")
        })
    }

    /// Its name, as [`Isa::parse`] reads it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Whether the AVX-512 instructions may be used (also true of [`Isa::Amx`]).
    pub fn has_avx512(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Amx)
    }

    /// Whether `avx512_bf16` (`vdpbf16ps`) may be used.
    pub fn has_avx512_bf16(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.has_avx512() && is_x86_feature_detected!("avx512bf16");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(target_arch = "x86_64")]
fn probe(all: &mut Vec<Isa>) {
    if !(is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c"))
    {
        return;
    }
    all.push(Isa::Avx2);
    // Checked separately: some processors with AVX-512 VNNI lack it.
    if is_x86_feature_detected!("avxvnni") {
        all.push(Isa::AvxVnni);
    }
    if !(is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni"))
    {
        return;
    }
    all.push(Isa::Avx512);
    if amx() {
        all.push(Isa::Amx);
    }
}

#[cfg(target_arch = "aarch64")]
fn probe(all: &mut Vec<Isa>) {
    // Advanced SIMD is part of every aarch64 target that Rust's standard library supports.
    all.push(Isa::Neon);
    if !std::arch::is_aarch64_feature_detected!("dotprod") {
        return;
    }
    all.push(Isa::NeonDotprod);
    if std::arch::is_aarch64_feature_detected!("i8mm") {
        all.push(Isa::NeonI8mm);
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn probe(_: &mut Vec<Isa>) {}

/// Whether the processor has the tiles (CPUID leaf 7, EDX bits 22, 24, 25) and Linux lets this
/// process use them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    if std::arch::x86_64::__cpuid(0).eax < 7 {
        return false;
    }
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    let wanted = 1 << 22 | 1 << 24 | 1 << 25;
    // Linux enables the tiles' 8 KiB of state on request (Documentation/arch/x86/xstate.rst). The
    // permission holds for the whole process, including threads started before and after.
    features & wanted == wanted
        // SAFETY: arch_prctl with these arguments reads and writes no memory of this process.
        && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx() -> bool {
    false
}
