//! `tile build`.

use std::io::Write;
use std::path::Path;

use tile::Kernel;
use tile::emit::{self, Dialect};
use tile::manifest::Manifest;
use tile::passes::{self, Target};
use tile::wrappers;

use crate::metallib::{self, Source};
use crate::{Emit, Outcome, ptx, select};

pub(crate) fn run(
    emit: &[Emit],
    architectures: &[String],
    out: &Path,
    filter: Option<&str>,
) -> Outcome {
    let instances = select::instances(filter)?;
    let kernels: Vec<Kernel> = instances.iter().map(|(kernel, _)| kernel.clone()).collect();
    let wants = |what: Emit| emit.contains(&what) || emit.contains(&Emit::All);
    std::fs::create_dir_all(out).map_err(|e| format!("{}: {e}", out.display()))?;
    let mut files = 0;
    let mut put = |name: String, text: &str| {
        files += 1;
        write(&out.join(name), text)
    };
    let mut metal = Vec::new();
    for kernel in &kernels {
        if wants(Emit::Msl) || wants(Emit::Metallib) {
            // Schedules with more threadgroup memory than Metal has, or other products, are for other targets.
            match text(kernel, Dialect::Metal) {
                Ok(text) => {
                    let (name, version) = (kernel.name.clone(), emit::metal_version(kernel));
                    if wants(Emit::Msl) {
                        put(format!("{name}.metal"), &text)?;
                    }
                    metal.push(Source { name, version, text });
                }
                Err(_) if kernel.shared_bytes() > METAL_SHARED => {}
                Err(_) if passes::fits(kernel, Target::Metal).is_err() => {}
                Err(why) => return Err(why),
            }
        }
        if wants(Emit::Cuda) {
            put(format!("{}.cu", kernel.name), &text(kernel, Dialect::Cuda)?)?;
        }
    }
    if wants(Emit::Manifest) {
        put("manifest.json".to_owned(), &Manifest::of(&kernels).to_json())?;
    }
    if wants(Emit::Rust) {
        put("kernels.rs".to_owned(), &wrappers::rust(&kernels))?;
    }
    if wants(Emit::Swift) {
        put("Kernels.swift".to_owned(), &wrappers::swift(&kernels))?;
    }
    if wants(Emit::Metallib) {
        match metallib::build(&metal, out)? {
            Some([name, list]) => {
                put(name, &list)?;
                println!("metallib: {} kernels", metal.len());
            }
            None if emit.contains(&Emit::Metallib) => {
                return Err("metallib: there are none of Apple's tools (xcrun metal)".to_owned());
            }
            None => println!("metallib: skipped, there are none of Apple's tools (xcrun metal)"),
        }
    }
    if wants(Emit::Ptx) {
        files += ptx::write(&instances, architectures, out, emit.contains(&Emit::Ptx))?;
    }
    println!("{} kernels, {files} files in {}", kernels.len(), out.display());
    Ok(true)
}

/// Threadgroup memory of an Apple GPU, in bytes.
const METAL_SHARED: u32 = 32 << 10;

/// A kernel lowered and printed.
pub(crate) fn text(kernel: &Kernel, dialect: Dialect) -> Result<String, String> {
    let target = match dialect {
        Dialect::Metal => Target::Metal,
        Dialect::Cuda => Target::Cuda,
    };
    let lowered = passes::lower(kernel, target).map_err(|fault| fault.to_string())?;
    emit::text(&[lowered], dialect).map_err(|fault| fault.to_string())
}

/// Writes a file aside, then renames it: a reader sees the old or the new, whole.
fn write(path: &Path, text: &str) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", path.display());
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut aside = tempfile::NamedTempFile::new_in(folder).map_err(fail)?;
    aside.write_all(text.as_bytes()).map_err(fail)?;
    aside.persist(path).map_err(|e| fail(e.error))?;
    Ok(())
}
