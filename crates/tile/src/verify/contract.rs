//! The rules of what surrounds the body: names, parameters, constants, arrays, the launch contract.

use std::collections::HashMap;

use crate::ir::{Array, Constant, Kernel, ParamKind};
use crate::launch::{Extent, Launch, Requirement};
use crate::text::Part;
use crate::types::{Role, Scalar, Type};

/// The most threadgroup memory of any target: 227 KiB, what CUDA gives one group of an H100.
const SHARED_BYTES: u64 = 227 * 1024;

/// The most a thread's register arrays may hold: far above any register file, and little for an
/// interpreter.
const REGISTER_BYTES: u64 = 16 * 1024;

/// Words that C++, Metal or CUDA keep for themselves.
const RESERVED: &str = "\
    INFINITY NAN NULL alignas alignof and and_eq asm atomic auto bfloat bitand bitor blockDim blockIdx bool break \
    case catch char class co_await co_return co_yield compl concept const const_cast consteval constexpr constant \
    constinit continue decltype default delete device do double dynamic_cast else enum explicit export extern \
    false float for fragment friend goto gridDim half if inline int kernel long main metal mutable namespace new \
    noexcept not not_eq nullptr operator or or_eq private protected public ray_data register reinterpret_cast \
    requires restrict return sampler short signed sizeof static static_assert static_cast std struct switch \
    template texture this thread thread_local threadIdx threadgroup threadgroup_imageblock throw true try typedef \
    typeid typename uchar uint ulong union unsigned ushort using vertex virtual void volatile warpSize wchar_t \
    while xor xor_eq";

/// The part that breaks a rule, and how.
type Broken = (Part, String);

pub(super) fn check(kernel: &Kernel) -> Result<(), Broken> {
    names(kernel)?;
    declarations(kernel)?;
    memory(kernel)?;
    launch(kernel)
}

/// Every name is a C identifier that no target reserves, and stands for one thing.
fn names(kernel: &Kernel) -> Result<(), Broken> {
    identifier("kernel", &kernel.name).map_err(|why| (Part::Name, why))?;
    let mut seen = HashMap::new();
    for (part, what, name) in declared(kernel) {
        identifier(what, name).map_err(|why| (part, why))?;
        if let Some(other) = seen.insert(name, what) {
            let why = format!("`{name}` is declared twice: {other} and {what}");
            return Err((part, why));
        }
    }
    Ok(())
}

/// Everything that is declared, what it is, and its name.
fn declared(kernel: &Kernel) -> Vec<(Part, &'static str, &str)> {
    let mut found = Vec::new();
    for (i, param) in kernel.params.iter().enumerate() {
        let what = match param.kind {
            ParamKind::Buffer { .. } => "buffer",
            ParamKind::Argument(_) => "argument",
        };
        found.push((Part::Param(i), what, param.name.as_str()));
    }
    for (i, constant) in kernel.constants.iter().enumerate() {
        found.push((Part::Constant(i), "constant", constant.name.as_str()));
    }
    for (i, array) in kernel.shared.iter().enumerate() {
        found.push((Part::Shared(i), "shared array", array.name.as_str()));
    }
    for (i, array) in kernel.registers.iter().enumerate() {
        found.push((Part::Register(i), "register array", array.name.as_str()));
    }
    found
}

fn identifier(what: &str, name: &str) -> Result<(), String> {
    let first = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let inside = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if !first || !inside {
        return Err(format!("{what} `{}`: a C identifier expected", name.escape_debug()));
    }
    // C++ keeps two underscores for the implementation, which CUDA's headers make use of.
    if name.contains("__") || RESERVED.split(' ').any(|word| word == name) {
        return Err(format!("{what} `{name}`: C++, Metal or CUDA reserves this name"));
    }
    Ok(())
}

/// Arguments are u32, i32 or f32; constants also bool; no buffer or shared array holds bool; shared
/// arrays hold scalars; every array has elements.
fn declarations(kernel: &Kernel) -> Result<(), Broken> {
    for (i, param) in kernel.params.iter().enumerate() {
        let why = match param.kind {
            ParamKind::Buffer { scalar: Scalar::Bool, .. } => NO_BOOL.to_owned(),
            ParamKind::Argument(scalar) if !scalar.computes() || scalar == Scalar::Bool => {
                format!("u32, i32 or f32 expected, found {scalar}")
            }
            _ => continue,
        };
        return Err((Part::Param(i), format!("`{}`: {why}", param.name)));
    }
    for (i, Constant { name, scalar }) in kernel.constants.iter().enumerate() {
        if !scalar.computes() {
            let why = format!("`{name}`: u32, i32, f32 or bool expected, found {scalar}");
            return Err((Part::Constant(i), why));
        }
    }
    for (i, Array { name, ty, len, over }) in kernel.shared.iter().enumerate() {
        let taken = over.map(|other| kernel.shared[..i].get(other as usize));
        let why = match ty {
            _ if taken.is_some_and(|other| other.is_none_or(|other| other.over.is_some())) => {
                "an array with memory of its own expected before it, to take over".to_owned()
            }
            Type::Scalar(Scalar::Bool) => NO_BOOL.to_owned(),
            Type::Scalar(_) if *len > 0 => continue,
            Type::Scalar(_) => NO_ELEMENTS.to_owned(),
            _ => format!("scalars expected, found {ty}"),
        };
        return Err((Part::Shared(i), format!("`{name}`: {why}")));
    }
    for (i, Array { name, ty, len, over }) in kernel.registers.iter().enumerate() {
        let why = match well_formed(*ty) {
            _ if over.is_some() => "registers take over no memory".to_owned(),
            Err(why) => why,
            Ok(()) if *len > 0 => continue,
            Ok(()) => NO_ELEMENTS.to_owned(),
        };
        return Err((Part::Register(i), format!("`{name}`: {why}")));
    }
    Ok(())
}

const NO_BOOL: &str = "bool is never stored; hint: u8";
const NO_ELEMENTS: &str = "at least one element expected, found none";

/// Vectors have 2, 4, 8 or 16 lanes, at most 16 bytes, and no truth values. Tiles are 16 or 8 rows
/// by as many columns, rows by one for `row`; operands are f16, bf16 or f32; accumulators and rows
/// anything but 8- and 16-bit integers.
pub(super) fn well_formed(ty: Type) -> Result<(), String> {
    match ty {
        Type::Scalar(_) => Ok(()),
        Type::Vector(Scalar::Bool, _) => {
            Err(format!("{ty}: vectors move memory, which has no bool"))
        }
        Type::Vector(scalar, lanes) => {
            let bytes = scalar.bytes() * usize::from(lanes);
            if matches!(lanes, 2 | 4 | 8 | 16) && bytes <= 16 {
                return Ok(());
            }
            Err(format!(
                "{ty}: 2, 4, 8 or 16 lanes of at most 16 bytes expected, found {bytes} bytes"
            ))
        }
        Type::Tile(tile) => {
            let cols = if tile.role == Role::Row { 1 } else { tile.rows };
            if !matches!(tile.rows, 8 | 16) || tile.cols != cols {
                return Err(format!("{ty}: 16x16 or 8x8 expected, 16x1 or 8x1 for a row"));
            }
            let allowed = match tile.role {
                Role::A | Role::B => tile.scalar.is_float(),
                Role::C | Role::Row => tile.scalar.is_float() || tile.scalar.computes(),
            };
            if allowed { Ok(()) } else { Err(format!("{ty}: such a tile has no {}", tile.scalar)) }
        }
    }
}

/// Shared arrays fit 227 KiB, each aligned to 16 bytes, but for the memory that they take over; a
/// thread's register arrays fit 16 KiB.
fn memory(kernel: &Kernel) -> Result<(), Broken> {
    // Numbers of 32 bits times sixteen bytes, at most: u64 cannot overflow.
    let bytes = |a: &Array| u64::from(a.len) * a.ty.scalar().bytes() as u64;
    let over = |a: &Array| a.over.and_then(|i| kernel.shared.get(i as usize)).map_or(0, bytes);
    let shared = |a: &Array| bytes(a).saturating_sub(over(a)).next_multiple_of(16);
    fits(&kernel.shared, shared, SHARED_BYTES, Part::Shared)?;
    let registers = |a: &Array| match a.ty {
        Type::Scalar(_) => bytes(a),
        Type::Vector(_, lanes) => bytes(a) * u64::from(lanes),
        Type::Tile(tile) => bytes(a) * (tile.elements() as u64).div_ceil(32),
    };
    fits(&kernel.registers, registers, REGISTER_BYTES, Part::Register)
}

fn fits(
    arrays: &[Array],
    bytes: impl Fn(&Array) -> u64,
    limit: u64,
    part: fn(usize) -> Part,
) -> Result<(), Broken> {
    let mut total = 0u64;
    for (i, array) in arrays.iter().enumerate() {
        total = total.saturating_add(bytes(array));
        if total > limit {
            let name = &array.name;
            let why = format!("`{name}`: at most {limit} bytes expected, found {total} up to here");
            return Err((part(i), why));
        }
    }
    Ok(())
}

/// A group has 32 to 1024 threads in whole simdgroups. Divisors are positive, alignments powers of
/// two. Lengths and alignments are of buffers. A name in an extent is a u32 constant, a u32
/// argument or a free dimension.
fn launch(kernel: &Kernel) -> Result<(), Broken> {
    let Launch { grid, threads, requirements, .. } = &kernel.launch;
    if !(32..=1024).contains(threads) || threads % 32 != 0 {
        let why = format!("a multiple of 32 from 32 to 1024 expected, found {threads}");
        return Err((Part::Threads, why));
    }
    for extent in grid {
        sizes(kernel, extent).map_err(|why| (Part::Grid, why))?;
    }
    for (i, rule) in requirements.iter().enumerate() {
        requirement(kernel, rule).map_err(|why| (Part::Requirement(i), why))?;
    }
    Ok(())
}

fn requirement(kernel: &Kernel, rule: &Requirement) -> Result<(), String> {
    let buffer = |name: &str| {
        let param = kernel.params.iter().find(|p| p.name == name);
        match param.map(|p| p.kind) {
            Some(ParamKind::Buffer { .. }) => Ok(()),
            Some(ParamKind::Argument(_)) => {
                Err(format!("`{name}` is an argument: a buffer expected"))
            }
            None => Err(format!("no buffer is called `{}`", name.escape_debug())),
        }
    };
    match rule {
        Requirement::Divisible(_, 0) => Err("a positive divisor expected, found 0".to_owned()),
        Requirement::Divisible(extent, _) | Requirement::AtMost(extent, _) => sizes(kernel, extent),
        Requirement::Length(name, extent) => buffer(name).and_then(|()| sizes(kernel, extent)),
        Requirement::Aligned(_, bytes) if !bytes.is_power_of_two() => {
            Err(format!("a power of two expected, found {bytes}"))
        }
        Requirement::Aligned(name, _) => buffer(name),
    }
}

fn sizes(kernel: &Kernel, extent: &Extent) -> Result<(), String> {
    let mut names = Vec::new();
    extent.names(&mut names);
    for name in names {
        identifier("dimension", name)?;
        let constant = kernel.constants.iter().find(|c| c.name == name).map(|c| c.scalar);
        let param = kernel.params.iter().find(|p| p.name == name).map(|p| p.kind);
        let number = match (constant, param) {
            (Some(scalar), _) => scalar == Scalar::U32,
            (None, Some(kind)) => kind == ParamKind::Argument(Scalar::U32),
            (None, None) => true,
        };
        if !number {
            return Err(format!(
                "`{name}`: a u32 constant, a u32 argument or a dimension expected"
            ));
        }
    }
    Ok(())
}
