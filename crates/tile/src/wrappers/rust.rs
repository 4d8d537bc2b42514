//! Rust wrappers.

use std::fmt::Write;

use crate::ir::{Kernel, ParamKind};
use crate::types::Scalar;

/// A module with a function per kernel. It needs the crate under the name `tile` and nothing else.
pub fn rust(kernels: &[Kernel]) -> String {
    let mut out = String::from(
        "//! Launches of the built kernels, generated with them: do not edit.\n\nuse tile::launch::Numbers;\nuse tile::wrappers::Call;\n",
    );
    for kernel in kernels {
        // Writing to a string does not fail.
        let _ = function(kernel, &mut out);
    }
    out
}

fn number(name: &str, scalar: Scalar) -> (&'static str, String) {
    match scalar {
        Scalar::F32 => ("f32", format!(".with_f32(\"{name}\", {name})")),
        Scalar::I32 => ("i32", format!(".with(\"{name}\", {name} as u32)")),
        Scalar::Bool => ("bool", format!(".with(\"{name}\", u32::from({name}))")),
        _ => ("u32", format!(".with(\"{name}\", {name})")),
    }
}

fn function(kernel: &Kernel, out: &mut String) -> std::fmt::Result {
    let launch = &kernel.launch;
    let grid: Vec<String> = launch.grid.iter().map(ToString::to_string).collect();
    writeln!(out, "\n/// Grid `[{}]`, {} threads.", grid.join(", "), launch.threads)?;
    for rule in &launch.requirements {
        writeln!(out, "/// Requires {rule}.")?;
    }
    let (mut parameters, mut buffers, mut numbers) = (vec![], vec![], String::new());
    for param in &kernel.params {
        match param.kind {
            ParamKind::Buffer { .. } => {
                parameters.push(format!("{}: B", param.name));
                buffers.push(param.name.clone());
            }
            ParamKind::Argument(scalar) => {
                let (ty, with) = number(&param.name, scalar);
                parameters.push(format!("{}: {ty}", param.name));
                numbers += &with;
            }
        }
    }
    for constant in &kernel.constants {
        let (ty, with) = number(&constant.name, constant.scalar);
        parameters.push(format!("{}: {ty}", constant.name));
        numbers += &with;
    }
    for name in kernel.dimensions() {
        parameters.push(format!("{name}: u32"));
        numbers += &number(name, Scalar::U32).1;
    }
    let (name, parameters, buffers) = (&kernel.name, parameters.join(", "), buffers.join(", "));
    writeln!(out, "#[allow(clippy::too_many_arguments)]")?;
    writeln!(out, "pub fn {name}<B>({parameters}) -> Call<B> {{")?;
    writeln!(out, "    let numbers = Numbers::new(){numbers};")?;
    writeln!(out, "    Call {{ kernel: \"{name}\", buffers: vec![{buffers}], numbers }}")?;
    writeln!(out, "}}")
}
