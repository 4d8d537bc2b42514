//! Swift wrappers: functions that encode a launch on Metal.

use std::fmt::Write;

use crate::emit;
use crate::ir::{Kernel, ParamKind};
use crate::launch::{Extent, Requirement};
use crate::types::Scalar;

/// The part of the file that does not depend on the kernels.
const HEAD: &str = r#"// Launches of the built kernels, generated with them: do not edit.
import Metal

/// A buffer and where in it a kernel's array begins.
public struct Bound {
    public let buffer: MTLBuffer
    public let offset: Int
    public init(_ buffer: MTLBuffer, offset: Int = 0) {
        self.buffer = buffer
        self.offset = offset
    }
    func holds(_ elements: Int, of size: Int) -> Bool {
        buffer.length >= offset && (buffer.length - offset) / size >= elements
    }
}

/// The kernels of one library, their pipelines made once for each set of constants.
public final class Kernels {
    public let library: MTLLibrary
    private var pipelines: [String: MTLComputePipelineState] = [:]

    public init(library: MTLLibrary) {
        self.library = library
    }

    private func pipeline(
        _ name: String, key: String, constants: (MTLFunctionConstantValues) -> Void
    ) throws -> MTLComputePipelineState {
        if let known = pipelines[key] { return known }
        let values = MTLFunctionConstantValues()
        constants(values)
        let function = try library.makeFunction(name: name, constantValues: values)
        let made = try library.device.makeComputePipelineState(function: function)
        pipelines[key] = made
        return made
    }

    private static func ceilDiv(_ a: Int, _ b: Int) -> Int { (a + b - 1) / b }
"#;

/// A file with a method per kernel.
pub fn swift(kernels: &[Kernel]) -> String {
    let mut out = String::from(HEAD);
    for kernel in kernels {
        // Writing to a string does not fail.
        let _ = method(kernel, &mut out);
    }
    out.push_str("}\n");
    out
}

/// The Swift type and Metal data type of a number.
fn number(scalar: Scalar) -> (&'static str, &'static str) {
    match scalar {
        Scalar::F32 => ("Float", "float"),
        Scalar::I32 => ("Int32", "int"),
        Scalar::Bool => ("Bool", "bool"),
        _ => ("UInt32", "uint"),
    }
}

/// An extent as an `Int` expression.
fn extent(e: &Extent) -> String {
    match e {
        Extent::Literal(n) => n.to_string(),
        Extent::Name(name) => format!("Int({name})"),
        Extent::Add(a, b) => format!("({} + {})", extent(a), extent(b)),
        Extent::Mul(a, b) => format!("{} * {}", extent(a), extent(b)),
        Extent::CeilDiv(a, b) => format!("Kernels.ceilDiv({}, {})", extent(a), extent(b)),
    }
}

fn method(kernel: &Kernel, out: &mut String) -> std::fmt::Result {
    let name = &kernel.name;
    let mut parameters = vec!["_ encoder: MTLComputeCommandEncoder".to_owned()];
    for param in &kernel.params {
        parameters.push(match param.kind {
            ParamKind::Buffer { .. } => format!("{}: Bound", param.name),
            ParamKind::Argument(scalar) => format!("{}: {}", param.name, number(scalar).0),
        });
    }
    for c in &kernel.constants {
        parameters.push(format!("{}: {}", c.name, number(c.scalar).0));
    }
    parameters.extend(kernel.dimensions().into_iter().map(|d| format!("{d}: UInt32")));
    writeln!(
        out,
        "\n    public func {name}(\n        {}\n    ) throws {{",
        parameters.join(",\n        ")
    )?;
    for rule in &kernel.launch.requirements {
        let test = match rule {
            Requirement::Divisible(e, by) => format!("{} % {by} == 0", extent(e)),
            Requirement::AtMost(e, limit) => format!("{} <= {limit}", extent(e)),
            Requirement::Length(buffer, e) => {
                format!("{buffer}.holds({}, of: {})", extent(e), element_bytes(kernel, buffer))
            }
            Requirement::Aligned(buffer, bytes) => format!("{buffer}.offset % {bytes} == 0"),
        };
        writeln!(out, "        precondition({test}, \"{name}: {rule}\")")?;
    }
    let key: Vec<String> = kernel.constants.iter().map(|c| format!("\\({})", c.name)).collect();
    let values = if kernel.constants.is_empty() { "_ in" } else { "values in" };
    writeln!(
        out,
        "        let pipeline = try pipeline(\"{name}\", key: \"{}\") {{ {values}",
        [vec![name.clone()], key].concat().join(" ")
    )?;
    for c in &kernel.constants {
        let (ty, data) = number(c.scalar);
        writeln!(out, "            var {0}: {ty} = {0}", c.name)?;
        let metal = emit::metal_constant(kernel, &c.name);
        writeln!(
            out,
            "            values.setConstantValue(&{}, type: .{data}, withName: \"{metal}\")",
            c.name
        )?;
    }
    writeln!(out, "        }}\n        encoder.setComputePipelineState(pipeline)")?;
    for (i, param) in kernel.params.iter().enumerate() {
        let p = &param.name;
        match param.kind {
            ParamKind::Buffer { .. } => {
                writeln!(
                    out,
                    "        encoder.setBuffer({p}.buffer, offset: {p}.offset, index: {i})"
                )?;
            }
            ParamKind::Argument(scalar) => {
                writeln!(out, "        var {p}: {} = {p}", number(scalar).0)?;
                writeln!(out, "        encoder.setBytes(&{p}, length: 4, index: {i})")?;
            }
        }
    }
    let [x, y, z] = &kernel.launch.grid;
    writeln!(
        out,
        "        encoder.dispatchThreadgroups(\n            MTLSize(width: {}, height: {}, depth: {}),\n            threadsPerThreadgroup: MTLSize(width: {}, height: 1, depth: 1))\n    }}",
        extent(x),
        extent(y),
        extent(z),
        kernel.launch.threads
    )
}

/// Bytes of an element of a buffer; 1 for a name that is none, which the verifier refuses.
fn element_bytes(kernel: &Kernel, buffer: &str) -> usize {
    kernel
        .params
        .iter()
        .find(|p| p.name == buffer)
        .and_then(|p| match p.kind {
            ParamKind::Buffer { scalar, .. } => Some(scalar.bytes()),
            ParamKind::Argument(_) => None,
        })
        .unwrap_or(1)
}
