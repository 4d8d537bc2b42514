//! Emitters: lowered, verified kernels as one self-contained Metal or CUDA source text.
//!
//! The text is meant to be read: parameters, constants and arrays keep their names, a value `%12`
//! of the text form is `v12`, pure values with one use stand inside the expression that uses them,
//! and a trailing comment names the Rust line whenever it changes. `base` prints what C, Metal and
//! CUDA share; `metal` and `cuda` hold what differs, and a prelude each (`prelude.metal`,
//! `prelude.cuh`) holds small functions named `tk_*`. Under `TILE_SHIM` the preludes leave out what
//! only a GPU's compiler knows, for whoever runs the text on a CPU to supply.

mod base;
mod cuda;
mod expr;
mod inline;
mod metal;
mod multiples;
mod names;

use std::fmt::Write;

use crate::ir::{Kernel, Literal, ParamKind};
use crate::launch::Numbers;
use crate::passes::{self, Target};
use crate::types::Scalar;
use crate::verify::Fault;

/// A language that kernels are printed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Metal Shading Language 3.1; 3.2 for kernels that hand work from one threadgroup to another.
    Metal,
    /// CUDA C++ for NVRTC or nvcc, without any include: compute capability 8.0 and up, or 9.0 alone
    /// (`sm_90a`) for kernels with products of warpgroups ([`Kernel::has_wgmma`]).
    Cuda,
}

/// The largest amount of shared memory that CUDA lets a kernel declare statically, in bytes.
const CUDA_STATIC: u32 = 48 << 10;

/// One source file: the prelude and these kernels, in order.
///
/// In CUDA, a kernel with specialisation constants is a template to be instantiated by
/// [`cuda_instance`]; any other is `extern "C"` under its own name. In Metal, constants are
/// function constants named by [`metal_constant`].
///
/// # Errors
/// A [`Fault`] naming the kernel and the Rust line of what the dialect cannot express, such as a
/// tile that was not lowered.
pub fn text(kernels: &[Kernel], dialect: Dialect) -> Result<String, Fault> {
    let mut out = String::from(match dialect {
        Dialect::Metal => include_str!("prelude.metal"),
        Dialect::Cuda => include_str!("prelude.cuh"),
    });
    let mut constants = 0;
    for (i, kernel) in kernels.iter().enumerate() {
        if let Some(twin) = kernels[..i].iter().find(|k| k.name == kernel.name) {
            let message = "expected distinct names, found two kernels of this one".to_owned();
            return Err(fault(twin, "", message));
        }
        out.push('\n');
        out.push_str(&kernel_text(kernel, dialect, constants)?);
        constants += kernel.constants.len();
    }
    Ok(out)
}

/// One kernel without the prelude. `first_constant` is the Metal index of its first function
/// constant: indices are unique in a file.
///
/// # Errors
/// As for [`text`].
pub fn kernel_text(
    kernel: &Kernel,
    dialect: Dialect,
    first_constant: usize,
) -> Result<String, Fault> {
    let mut out = String::new();
    match dialect {
        Dialect::Metal => {
            metal::check(kernel).map_err(|message| fault(kernel, "", message))?;
            out.push_str(&contract(kernel));
            let device_barriers = metal::through_memory(kernel);
            base::print(kernel, &metal::Metal { first_constant, device_barriers }, &mut out)?;
        }
        Dialect::Cuda => {
            out.push_str(&cuda::products(kernel));
            out.push_str(&contract(kernel));
            base::print(kernel, &cuda::Cuda::default(), &mut out)?;
        }
    }
    Ok(out)
}

/// The whole CUDA text of a kernel that gives the elements of a buffer away one by one as they are
/// computed: parameter number `param` is a `tk_post`, which `define` defines. `y[i] = value` posts an
/// element, and `y.begin()` follows each wait for the kernel before.
///
/// # Errors
/// A [`Fault`] if the kernel does more with that buffer than to write single floats, or has
/// constants without values; and as for [`text`].
pub fn cuda_posting(kernel: &Kernel, param: usize, define: &str) -> Result<String, Fault> {
    if !cuda::postable(kernel, param) {
        let message = format!("expected floats that are written one by one, parameter {param}");
        return Err(fault(kernel, "", message));
    }
    let names = names::Names::new(kernel, cuda::RESERVED);
    let posted = Some((param, names.params[param].clone()));
    let mut out = format!("{}\n{define}\n", include_str!("prelude.cuh"));
    out.push_str(&cuda::products(kernel));
    out.push_str(&contract(kernel));
    base::print(kernel, &cuda::Cuda { posted }, &mut out)?;
    Ok(out)
}

/// The name of a Metal function constant, to set its value by.
pub fn metal_constant(kernel: &Kernel, constant: &str) -> String {
    format!("{}_{constant}", kernel.name)
}

/// The version of Metal Shading Language that a kernel's text needs: `(3, 1)`, or `(3, 2)` if its
/// threadgroups hand work to each other.
pub fn metal_version(kernel: &Kernel) -> (u32, u32) {
    if metal::hands_over(kernel) { (3, 2) } else { (3, 1) }
}

/// The first macOS and iOS whose compiler has a version of Metal Shading Language.
pub fn metal_systems(version: (u32, u32)) -> [u32; 2] {
    if version <= (3, 1) { [14, 17] } else { [15, 18] }
}

/// Bytes of threadgroup memory on every Apple GPU (Metal Feature Set Tables).
pub const METAL_SHARED: u32 = 32 << 10;

/// Whether Metal can run a kernel: its threadgroup memory is there, and it has no products of four
/// simdgroups. Schedules that ask for more are for other targets.
pub fn metal_takes(kernel: &Kernel) -> bool {
    kernel.shared_bytes() <= METAL_SHARED && passes::fits(kernel, Target::Metal).is_ok()
}

/// Bytes of dynamic shared memory to launch a kernel with on CUDA: 0 if its arrays fit the static
/// limit of 48 KiB.
pub fn cuda_dynamic_shared(kernel: &Kernel) -> u32 {
    let bytes = kernel.shared_bytes();
    if bytes > CUDA_STATIC { bytes } else { 0 }
}

/// The `extern "C"` entry of a kernel for given constants, as `(symbol, text)`: append the text to
/// the kernel's own [`text`]. A kernel without constants needs none, so the text is empty then.
///
/// # Errors
/// A [`Fault`] if a constant has no value.
pub fn cuda_instance(kernel: &Kernel, numbers: &Numbers) -> Result<(String, String), Fault> {
    if kernel.constants.is_empty() {
        return Ok((kernel.name.clone(), String::new()));
    }
    let mut symbol = format!("{}_", kernel.name);
    let mut values = Vec::new();
    for constant in &kernel.constants {
        let Some(bits) = numbers.get(&constant.name) else {
            return Err(fault(kernel, "", format!("no value for constant `{}`", constant.name)));
        };
        let value = match constant.scalar {
            Scalar::Bool => (bits != 0).to_string(),
            Scalar::I32 => format!("int({bits}u)"),
            _ => format!("{bits}u"),
        };
        values.push(value);
        // Decimal for sizes, hexadecimal for the bits of a float: either way one symbol per set of
        // values.
        let _ = match constant.scalar {
            Scalar::F32 => write!(symbol, "_{bits:x}"),
            _ => write!(symbol, "_{bits}"),
        };
    }
    let names = names::Names::new(kernel, cuda::RESERVED);
    let arguments: Vec<&str> = names.params.iter().map(String::as_str).collect();
    let text = format!(
        "\nextern \"C\" __global__ void __launch_bounds__({}) {symbol}({}) {{\n  {}<{}>({});\n}}\n",
        kernel.launch.threads,
        cuda::signature(kernel, &names, None),
        kernel.name,
        values.join(", "),
        arguments.join(", "),
    );
    Ok((symbol, text))
}

/// A fault of emission.
fn fault(kernel: &Kernel, source: &str, message: String) -> Fault {
    Fault { kernel: kernel.name.clone(), line: 0, source: source.to_owned(), message }
}

/// The comment before a kernel: what it computes with, and its launch contract.
fn contract(kernel: &Kernel) -> String {
    let [x, y, z] = &kernel.launch.grid;
    let mut out = format!(
        "// {}: mode {}, grid [{x}, {y}, {z}], {} threads",
        kernel.name,
        kernel.launch.mode.name(),
        kernel.launch.threads
    );
    if !kernel.shared.is_empty() {
        let _ = write!(out, ", {} bytes shared", kernel.shared_bytes());
    }
    out.push('\n');
    for param in &kernel.params {
        let _ = match param.kind {
            ParamKind::Buffer { scalar, access } => {
                let access = format!("{access:?}").to_lowercase();
                writeln!(out, "//   {}: {scalar} buffer, {access}", param.name)
            }
            ParamKind::Argument(scalar) => writeln!(out, "//   {}: {scalar} argument", param.name),
        };
    }
    for constant in &kernel.constants {
        let _ = writeln!(out, "//   {}: {} constant", constant.name, constant.scalar);
    }
    for rule in &kernel.launch.requirements {
        let _ = writeln!(out, "//   requires {rule}");
    }
    if kernel.has_wgmma() {
        let _ = writeln!(out, "//   requires compute capability 9.0: sm_90a");
    }
    out
}

/// A finite float as C writes it, and nothing for the others: each language names those its own
/// way.
fn finite(bits: u32) -> Option<String> {
    let x = f32::from_bits(bits);
    x.is_finite().then(|| format!("{x:?}f"))
}

/// An integer or truth value as C writes it.
fn whole(literal: Literal) -> Option<String> {
    match literal {
        Literal::Bool(b) => Some(b.to_string()),
        // The smallest i32 is not a literal of C: the minus sign is an operator on a number that
        // does not fit.
        Literal::I32(i32::MIN) => Some("(-2147483647 - 1)".to_owned()),
        Literal::I32(i) => Some(i.to_string()),
        Literal::U32(u) => Some(format!("{u}u")),
        Literal::F32(_) => None,
    }
}
