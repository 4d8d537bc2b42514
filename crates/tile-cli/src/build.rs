//! `tile build`.

use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use tile::Kernel;
use tile::emit::{self, Dialect};
use tile::passes::{self, Target};
use tile::wrappers;

use crate::metallib::{self, Platform, Source};
use crate::{Emit, Outcome, ptx, select};

/// Where `tile build` writes to, and for what.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The form to write.
    #[arg(long, value_enum, default_value = "all", value_delimiter = ',')]
    emit: Vec<Emit>,
    /// NVIDIA architectures that PTX is for, such as sm_89 [default: sm_80, and sm_90a].
    #[arg(long, value_parser = ptx::architecture, value_delimiter = ',')]
    arch: Vec<String>,
    /// Systems that Metal libraries are for.
    #[arg(long, value_enum, default_value = "macos", value_delimiter = ',')]
    platform: Vec<Platform>,
    /// The folder to write to; made if it is not there.
    #[arg(long)]
    out: PathBuf,
    /// Only kernels whose name contains this.
    filter: Option<String>,
}

impl Options {
    fn wants(&self, what: Emit) -> bool {
        self.emit.contains(&what) || self.emit.contains(&Emit::All)
    }
}

pub(crate) fn run(options: &Options) -> Outcome {
    let out = &*options.out;
    let instances = select::instances(options.filter.as_deref())?;
    let kernels: Vec<Kernel> = instances.iter().map(|i| i.kernel.clone()).collect();
    let wants = |what: Emit| options.wants(what);
    std::fs::create_dir_all(out).map_err(|e| format!("{}: {e}", out.display()))?;
    let mut files = 0;
    let mut put = |name: String, text: &str| {
        files += 1;
        write(&out.join(name), text)
    };
    let metal = if wants(Emit::Msl) || wants(Emit::Metallib) { metal(&kernels)? } else { vec![] };
    if wants(Emit::Msl) {
        metal.iter().try_for_each(|source| put(format!("{}.metal", source.name), &source.text))?;
    }
    if wants(Emit::Cuda) {
        for kernel in &kernels {
            put(format!("{}.cu", kernel.name), &text(kernel, Dialect::Cuda)?)?;
        }
    }
    if wants(Emit::Manifest) {
        put("manifest.json".to_owned(), &select::manifest(&instances).to_json())?;
    }
    if wants(Emit::Rust) {
        put("kernels.rs".to_owned(), &wrappers::rust(&kernels))?;
    }
    if wants(Emit::Swift) {
        put("Kernels.swift".to_owned(), &wrappers::swift(&kernels))?;
        put("Launch.swift".to_owned(), wrappers::swift_runtime())?;
    }
    if wants(Emit::Metallib) {
        match metallib::build("xcrun".as_ref(), &metal, &options.platform, out)? {
            Some(lists) => {
                let list = metallib::list(&metal);
                lists.into_iter().try_for_each(|name| put(name, &list))?;
                println!("metallib: {} kernels", metal.len());
            }
            None if options.emit.contains(&Emit::Metallib) => return Err(NO_TOOLS.to_owned()),
            None => println!("skipped: {NO_TOOLS}"),
        }
    }
    if wants(Emit::Ptx) {
        let asked = options.emit.contains(&Emit::Ptx);
        files += ptx::write(&instances, &options.arch, out, asked)?;
    }
    println!("{} kernels, {files} files in {}", kernels.len(), out.display());
    Ok(true)
}

/// The error where nothing compiles Metal text.
const NO_TOOLS: &str = "metallib: there are none of Apple's tools for every platform (xcrun metal)";

/// The Metal texts of the kernels that Metal takes: schedules with more threadgroup memory, or
/// other products, are for other targets.
fn metal(kernels: &[Kernel]) -> Result<Vec<Source>, String> {
    let source = |kernel: &Kernel| {
        let (name, version) = (kernel.name.clone(), emit::metal_version(kernel));
        Ok(Source { name, version, text: text(kernel, Dialect::Metal)? })
    };
    kernels.iter().filter(|kernel| emit::metal_takes(kernel)).map(source).collect()
}

/// A kernel lowered and printed.
pub(crate) fn text(kernel: &Kernel, dialect: Dialect) -> Result<String, String> {
    let lowered = passes::lower(kernel, target(dialect)).map_err(|fault| fault.to_string())?;
    emit::text(&[lowered], dialect).map_err(|fault| fault.to_string())
}

/// The target that kernels are lowered for before they are printed in a dialect.
pub(crate) fn target(dialect: Dialect) -> Target {
    match dialect {
        Dialect::Metal => Target::Metal,
        Dialect::Cuda => Target::Cuda,
    }
}

/// A file that is to be renamed, readable by whom the process's mask lets read.
pub(crate) fn aside(folder: &Path, suffix: &str) -> std::io::Result<NamedTempFile> {
    let mut file = tempfile::Builder::new();
    #[cfg(unix)]
    file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    file.suffix(suffix).tempfile_in(folder)
}

/// Writes a file aside, then renames it: a reader sees the old or the new, whole.
fn write(path: &Path, text: &str) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("{}: {e}", path.display());
    let mut aside = aside(path.parent().unwrap_or(Path::new(".")), "").map_err(fail)?;
    aside.write_all(text.as_bytes()).map_err(fail)?;
    aside.persist(path).map_err(|e| fail(e.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    /// Not for its writer alone, as temporary files are.
    #[cfg(unix)]
    #[test]
    fn what_is_written_has_the_mode_of_any_new_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mode =
            |name: &str| std::fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        std::fs::write(folder.path().join("any"), "text").unwrap();
        super::write(&folder.path().join("built"), "text").unwrap();
        assert_eq!(mode("built"), mode("any"));
    }
}
