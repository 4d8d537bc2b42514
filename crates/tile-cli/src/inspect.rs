//! `tile inspect`.

use tile::Kernel;
use tile::emit::Dialect;
use tile::passes::{self, Target};

use crate::{Outcome, TargetArg, build, select};

pub(crate) fn run(name: &str, target: Option<TargetArg>, text_only: bool) -> Outcome {
    let found = select::distinct(Some(name))?;
    let exact: Vec<&Kernel> = found.iter().filter(|k| k.name == name).collect();
    let [kernel] = (if exact.is_empty() { found.iter().collect() } else { exact })[..] else {
        let names: Vec<&str> = found.iter().map(|k| k.name.as_str()).collect();
        return Err(format!("`{name}` names {} kernels: {}", names.len(), names.join(", ")));
    };
    let wants = |which| target.is_none() || target == Some(which);
    let targets = [
        (TargetArg::Interp, Target::Interpreter, None),
        (TargetArg::Metal, Target::Metal, Some(Dialect::Metal)),
        (TargetArg::Cuda, Target::Cuda, Some(Dialect::Cuda)),
    ];
    println!("{} bytes of threadgroup memory as written", kernel.shared_bytes());
    for (which, of, dialect) in targets {
        if !wants(which) {
            continue;
        }
        if let Err(fault) = passes::fits(kernel, of) {
            println!("\n==== {}: {fault}", of.name());
            continue;
        }
        if !text_only {
            println!("\n==== {} as written\n{}", of.name(), kernel.to_text(true));
            for (pass, after) in passes::trace(kernel, of).map_err(|f| f.to_string())? {
                println!("==== {} after {pass}\n{}", of.name(), after.to_text(true));
            }
        }
        if let Some(dialect) = dialect {
            println!("==== {} text\n{}", of.name(), build::text(kernel, dialect)?);
        }
    }
    if wants(TargetArg::Cuda) {
        println!("{}", registers(kernel)?);
    }
    Ok(true)
}

/// The registers, spills and shared memory that ptxas reports for a kernel, or why it was not
/// asked.
fn registers(kernel: &Kernel) -> Result<String, String> {
    if !kernel.constants.is_empty() {
        return Ok("registers: not known before its constants are".to_owned());
    }
    let source = tempfile::Builder::new().suffix(".cu").tempfile().map_err(|e| e.to_string())?;
    std::fs::write(source.path(), build::text(kernel, Dialect::Cuda)?)
        .map_err(|e| e.to_string())?;
    let object = tempfile::Builder::new().suffix(".cubin").tempfile().map_err(|e| e.to_string())?;
    let result = std::process::Command::new("nvcc")
        .args(["-cubin", "-arch=sm_90a", "-std=c++17", "-Xptxas", "-v", "-o"])
        .args([object.path(), source.path()])
        .output();
    match result {
        Err(_) => Ok("registers: skipped, there is no nvcc on the PATH".to_owned()),
        Ok(output) => Ok(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}
