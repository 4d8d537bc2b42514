//! Swift wrappers: a short typed function for each kernel that Metal takes, over a launch that is
//! driven by the manifest.

use std::fmt::Write;

use crate::emit;
use crate::ir::{Kernel, ParamKind};
use crate::types::Scalar;

/// `Launch.swift`: reads the manifest, checks launches and encodes them. It does not depend on the
/// kernels.
pub fn swift_runtime() -> &'static str {
    include_str!("Launch.swift")
}

/// `Kernels.swift`: a function for each kernel that Metal can run, which gathers a launch.
pub fn swift(kernels: &[Kernel]) -> String {
    let mut out = String::from(
        "// Launches of the built kernels, generated with them: do not edit.\n\nextension Launch {",
    );
    for kernel in kernels.iter().filter(|kernel| emit::metal_takes(kernel)) {
        // Writing to a string does not fail.
        let _ = function(kernel, &mut out);
    }
    out.push_str("}\n");
    out
}

/// The Swift type of a number, and its case of `Number`.
fn number(scalar: Scalar) -> (&'static str, &'static str) {
    match scalar {
        Scalar::F32 => ("Float", "float"),
        Scalar::I32 => ("Int32", "int"),
        Scalar::Bool => ("Bool", "bool"),
        _ => ("UInt32", "uint"),
    }
}

fn function(kernel: &Kernel, out: &mut String) -> std::fmt::Result {
    let (mut parameters, mut buffers, mut numbers) = (vec![], vec![], vec![]);
    let mut add = |name: &str, scalar: Scalar| {
        let (ty, case) = number(scalar);
        numbers.push(format!("\"{name}\": .{case}({name})"));
        format!("{name}: {ty}")
    };
    for param in &kernel.params {
        parameters.push(match param.kind {
            ParamKind::Buffer { .. } => {
                buffers.push(param.name.clone());
                format!("{}: Bound", param.name)
            }
            ParamKind::Argument(scalar) => add(&param.name, scalar),
        });
    }
    for constant in &kernel.constants {
        parameters.push(add(&constant.name, constant.scalar));
    }
    parameters.extend(kernel.dimensions().into_iter().map(|name| add(name, Scalar::U32)));
    let numbers = if numbers.is_empty() { ":".to_owned() } else { numbers.join(", ") };
    let (name, parameters) = (&kernel.name, parameters.join(", "));
    let buffers = buffers.join(", ");
    writeln!(out, "\n    public static func {name}({parameters}) -> Launch {{")?;
    writeln!(out, "        Launch(\"{name}\", [{buffers}], [{numbers}])\n    }}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsl::*;
    use crate::launch::Mode;

    #[test]
    fn a_kernel_has_a_typed_function_where_metal_takes_it() {
        let scaled = build("scaled", || {
            let x = In::<f32>::declare("x");
            let by = Arg::<f32>::declare("by");
            let y = Out::<f32>::declare("y");
            let n = Const::<u32>::declare("n");
            launch(Mode::Element, [dim("n").ceil_div(32u32), fixed(1), dim("batch")], 32);
            strided(n).each(|i| y.set(i, x.get(i) * by));
        });
        let large = build("large", || {
            let y = Out::<f32>::declare("y");
            launch(Mode::Row, [fixed(1), fixed(1), fixed(1)], 32);
            let scratch = Shared::<f32>::new(1 + emit::METAL_SHARED / 4);
            scratch.set(thread_id(), 1.0);
            y.set(thread_id(), scratch.get(thread_id()));
        });
        let text = swift(&[scaled, large]);
        let want = "
    public static func scaled(x: Bound, by: Float, y: Bound, n: UInt32, batch: UInt32) -> Launch {
        Launch(\"scaled\", [x, y], [\"by\": .float(by), \"n\": .uint(n), \"batch\": .uint(batch)])
    }
}
";
        assert!(text.ends_with(want) && !text.contains("large"), "{text}");
    }
}
