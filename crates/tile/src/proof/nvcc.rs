//! Compiles CUDA text with NVIDIA's compiler: whether it compiles, and what each kernel costs in
//! registers, shared memory and spills. No GPU is needed for that.

use std::path::PathBuf;
use std::process::Command;

use super::Unproved;
use super::compile::{Scratch, run_for_log};

/// A CUDA compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvcc {
    program: PathBuf,
    /// As it gives it: `13.0.88`.
    pub version: String,
}

/// The resources that a kernel needs on an architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// The kernel's symbol.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of statically declared shared memory.
    pub shared: u32,
    /// Bytes of registers written to memory for want of room, or read back, whichever are more.
    pub spills: u32,
    /// Bytes of arrays that could not be registers.
    pub stack: u32,
}

impl Nvcc {
    /// A compiler at a path, or by a name on `PATH`.
    ///
    /// # Errors
    /// [`Unproved::Skip`] if it is not there or does not say its version.
    pub fn at(program: impl Into<PathBuf>) -> Result<Nvcc, Unproved> {
        let program = program.into();
        let asked = Command::new(&program).arg("--version").output();
        let skip = |why: String| Unproved::Skip(format!("{}: {why}", program.display()));
        let output = asked.map_err(|e| skip(e.to_string()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // Cuda compilation tools, release 13.0, V13.0.88
        let version = text.split(", V").nth(1).and_then(|v| v.split_whitespace().next());
        match version {
            Some(version) => Ok(Nvcc { version: version.to_owned(), program: program.clone() }),
            None => Err(skip("no version in the answer to --version".to_owned())),
        }
    }

    /// Compiles a text for an architecture such as `sm_90a`: what each of its kernels needs.
    ///
    /// # Errors
    /// [`Unproved::Wrong`] with the compiler's first complaints.
    pub fn compile(&self, text: &str, architecture: &str) -> Result<Vec<Resources>, Unproved> {
        let scratch = Scratch::new()?;
        let source = scratch.write("kernels.cu", text)?;
        let mut command = Command::new(&self.program);
        command.args(["-cubin", "-std=c++17", "-Xptxas", "-v", "-arch", architecture, "-o"]);
        let log = run_for_log(command.arg(scratch.path().join("kernels.cubin")).arg(source))?;
        Ok(usages(&log))
    }
}

/// Reads the report of `ptxas -v`.
fn usages(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some(name) = line.split("Compiling entry function '").nth(1) {
            let kernel = name.split('\'').next().unwrap_or_default().to_owned();
            found.push(Resources { kernel, registers: 0, shared: 0, spills: 0, stack: 0 });
        }
        let Some(last) = found.last_mut() else { continue };
        // `0 bytes stack frame, 8 bytes spill stores`, `Used 40 registers, used 1 barriers, 16
        // bytes smem`
        let mut before = ["", ""];
        for word in line.split([' ', ',', '\t']).filter(|w| !w.is_empty()) {
            let number = |text: &str| text.parse::<u32>().unwrap_or(0);
            match (before, word) {
                ([_, n], "registers") => last.registers = number(n),
                ([n, "bytes"], "smem") => last.shared = number(n),
                ([n, "bytes"], "spill") => last.spills = last.spills.max(number(n)),
                ([n, "bytes"], "stack") => last.stack = number(n),
                _ => {}
            }
            before = [before[1], word];
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read_entry_by_entry() {
        let log = "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'norm' for 'sm_80'\nptxas info    : Function properties for norm\n    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 40 registers, used 1 barriers, 96 bytes smem, 376 bytes cmem[0]\nptxas info    : Compiling entry function 'add' for 'sm_80'\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 10 registers, 360 bytes cmem[0]\n";
        let norm = Resources {
            kernel: "norm".to_owned(),
            registers: 40,
            shared: 96,
            spills: 8,
            stack: 16,
        };
        let add =
            Resources { kernel: "add".to_owned(), registers: 10, shared: 0, spills: 0, stack: 0 };
        assert_eq!(usages(log), [norm, add]);
        assert_eq!(usages("Used registers, bytes spill"), []);
    }
}
