//! `tile build --emit ptx`: each kernel's PTX for chosen NVIDIA architectures, by NVIDIA's
//! compiler.
//!
//! A kernel with constants is a template, so its PTX is of one instance: with the numbers of its
//! first case, which the symbol ends in.

use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tile::Kernel;
use tile::emit::{self, Dialect};

use crate::build;
use crate::select::Instance;

/// The architecture whose instructions multiply by warpgroups.
const WARPGROUPS: &str = "90a";

/// The architectures that are compiled for without `--arch`: the oldest that all other kernels run
/// on, and the one that products of warpgroups need.
const USUAL: [&str; 2] = ["80", WARPGROUPS];

/// An architecture as `--arch` takes it: `sm_89`, `compute_89` or `89`, to `89`.
///
/// # Errors
/// The line that says what was expected.
pub(crate) fn architecture(word: &str) -> Result<String, String> {
    let number = word.trim_start_matches("sm_").trim_start_matches("compute_");
    let digits = number.trim_end_matches(['a', 'f']);
    let known = digits.parse::<u32>().is_ok_and(|n| (80..1000).contains(&n));
    if known && number.len() <= digits.len() + 1 {
        Ok(number.to_owned())
    } else {
        Err("expected an architecture from sm_80 on, such as sm_89 or sm_90a".to_owned())
    }
}

/// Writes `NAME.sm_ARCHITECTURE.ptx` for each kernel and architecture that has its instructions;
/// returns how many.
///
/// # Errors
/// If it was asked for by name and there is no compiler; every kernel that does not compile, a line
/// each.
pub(crate) fn write(
    kernels: &[Instance],
    chosen: &[String],
    out: &Path,
    asked: bool,
) -> Result<usize, String> {
    let nvcc = std::env::var_os("DELFT_NVCC").unwrap_or_else(|| "nvcc".into());
    if Command::new(&nvcc).arg("--version").output().is_err() {
        let line = "ptx: there is no nvcc on PATH, and DELFT_NVCC names none";
        if asked {
            return Err(line.to_owned());
        }
        println!("{line}: skipped");
        return Ok(0);
    }
    let usual = USUAL.map(str::to_owned);
    let chosen: &[String] = if chosen.is_empty() { &usual } else { chosen };
    let has =
        |kernel: &Kernel, architecture: &str| !kernel.has_wgmma() || architecture == WARPGROUPS;
    let jobs: Vec<(&Instance, &str)> = chosen
        .iter()
        .flat_map(|architecture| kernels.iter().map(move |kernel| (kernel, architecture.as_str())))
        .filter(|(instance, architecture)| has(&instance.kernel, architecture))
        .collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((kernel, architecture)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(why) = one(&nvcc, kernel, architecture, out)
                && let Ok(mut failed) = failed.lock()
            {
                failed.push(why);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().unwrap_or_default();
    if !failed.is_empty() {
        return Err(failed.join("\n"));
    }
    for architecture in chosen {
        let without = kernels.iter().filter(|i| !has(&i.kernel, architecture)).count();
        let lacks = match without {
            0 => String::new(),
            n => format!("; {n} multiply by warpgroups, which only sm_{WARPGROUPS} does"),
        };
        println!("ptx: {} kernels for sm_{architecture}{lacks}", kernels.len() - without);
    }
    Ok(jobs.len())
}

/// Compiles one kernel, aside, and renames it.
fn one(
    nvcc: &std::ffi::OsStr,
    Instance { kernel, numbers, .. }: &Instance,
    architecture: &str,
    out: &Path,
) -> Result<(), String> {
    let fail = |why: String| format!("{} for sm_{architecture}: {why}", kernel.name);
    let mut text = build::text(kernel, Dialect::Cuda).map_err(fail)?;
    text.push_str(&emit::cuda_instance(kernel, numbers).map_err(|e| fail(e.to_string()))?.1);
    let temporary =
        |suffix: &str, folder: &Path| build::aside(folder, suffix).map_err(|e| fail(e.to_string()));
    let source = temporary(".cu", &std::env::temp_dir())?;
    std::fs::write(source.path(), text).map_err(|e| fail(e.to_string()))?;
    let built = temporary(".ptx", out)?;
    let mut command = Command::new(nvcc);
    command.args(["-ptx", "-std=c++17", &format!("-arch=compute_{architecture}"), "-o"]);
    let done = command.arg(built.path()).arg(source.path()).output();
    let done = done.map_err(|e| fail(format!("nvcc: {e}")))?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(fail(format!("nvcc: {}", said.lines().next().unwrap_or("failed"))));
    }
    let target = out.join(format!("{}.sm_{architecture}.ptx", kernel.name));
    built.persist(&target).map_err(|e| fail(e.to_string()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_taken_as_nvcc_spells_them() {
        for (word, number) in
            [("sm_89", "89"), ("compute_90a", "90a"), ("120", "120"), ("sm_100f", "100f")]
        {
            assert_eq!(architecture(word).as_deref(), Ok(number));
        }
        for word in ["sm_75", "ampere", "", "sm_90aa", "sm_-89"] {
            assert!(architecture(word).is_err(), "{word}");
        }
    }
}
