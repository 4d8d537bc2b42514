//! CUDA text through NVIDIA's compiler, for sm_80 (but for products of warpgroups) and sm_90a: every kernel compiles, none
//! runs out of registers, and
//! they are those on record in `cuda_compile.golden` (for one version of the compiler; `BLESS=1` writes it anew).
//!
//! A family has dozens of kernels, so the test takes a few of each, from the smallest to the largest; DELFT_ALL_KERNELS takes all,
//! which is minutes. The compiler is `nvcc` on `PATH`, else the one of the Python packages, installed once beside the build (129 MB); DELFT_NO_NVCC
//! forbids that. Without either the test says why it skips.

use crate::inventory;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tile::case::Case;
use tile::emit::{self, Dialect};
use tile::ir::Kernel;
use tile::launch::Numbers;
use tile::passes::{self, Target};
use tile::proof::{Nvcc, Unproved, Usage};

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];
const PACKAGES: [&str; 5] = [
    "nvidia-cuda-nvcc==13.*",
    "nvidia-cuda-crt==13.*",
    "nvidia-cuda-runtime==13.*",
    "nvidia-cuda-cccl==13.*",
    "nvidia-nvvm==13.*",
];

/// Bytes of registers that the compiler may put aside by its own choice, to fit one more threadgroup on a multiprocessor: it does
/// for a few of all kernels, at 64 and 168 registers of 255, and for none of those on record.
const TRADED: u32 = 32;

/// Instructions per file: starting the compiler costs as much as compiling about this many.
const FILE: usize = 4_000;

/// The compiler, or why there is none.
fn compiler() -> Result<Nvcc, Unproved> {
    if let Ok(nvcc) = Nvcc::at("nvcc") {
        return Ok(nvcc);
    }
    let skip = |why: String| Unproved::Skip(format!("no nvcc: {why}"));
    if std::env::var_os("DELFT_NO_NVCC").is_some() {
        return Err(skip("DELFT_NO_NVCC is set".to_owned()));
    }
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nvcc");
    if let Some(found) = installed(&home) {
        return Nvcc::at(found);
    }
    let run = |command: &mut Command| {
        let done = command.output().map_err(|e| skip(e.to_string()))?;
        let log = String::from_utf8_lossy(&done.stderr);
        let last = log.lines().last().unwrap_or("no reason given").to_owned();
        if done.status.success() { Ok(()) } else { Err(skip(last)) }
    };
    run(Command::new("python3").args(["-m", "venv"]).arg(&home))?;
    let pip = home.join("bin").join("pip");
    run(Command::new(pip).args(["install", "--quiet", "--only-binary=:all:"]).args(PACKAGES))?;
    match installed(&home) {
        Some(found) => Nvcc::at(found),
        None => Err(skip(format!("the packages under {} hold none", home.display()))),
    }
}

/// `lib/python3.x/site-packages/nvidia/cu13/bin/nvcc`
fn installed(home: &Path) -> Option<PathBuf> {
    let children = |path: PathBuf| {
        let entries = std::fs::read_dir(path).into_iter().flatten();
        entries.filter_map(Result::ok).map(|e| e.path())
    };
    children(home.join("lib"))
        .flat_map(|python| children(python.join("site-packages").join("nvidia")))
        .map(|release| release.join("bin").join("nvcc"))
        .find(|nvcc| nvcc.is_file())
}

/// The kernels taken, lowered, with the constants of the first case that launches them.
fn kernels() -> Vec<(Kernel, Numbers)> {
    let mut cases = inventory::cases(inventory::all());
    cases.dedup_by(|next, case| next.kernel == case.kernel);
    let lower = |case: &Case| passes::lower(&case.kernel, Target::Cuda).expect("it lowers");
    cases.into_iter().map(|case| (lower(&case), case.numbers)).collect()
}

/// One file for some kernels.
fn text(kernels: &[(Kernel, Numbers)]) -> String {
    let only: Vec<Kernel> = kernels.iter().map(|(kernel, _)| kernel.clone()).collect();
    let mut text = emit::text(&only, Dialect::Cuda).expect("it can be written");
    for (kernel, numbers) in kernels {
        text.push_str(&emit::cuda_instance(kernel, numbers).expect("constants are given").1);
    }
    text
}

/// The architectures that have a kernel's instructions.
fn architectures(kernel: &Kernel) -> &'static [&'static str] {
    if kernel.has_wgmma() { &ARCHITECTURES[1..] } else { &ARCHITECTURES }
}

/// Files of some size, and what they are compiled for.
fn files(kernels: &[(Kernel, Numbers)]) -> Vec<(String, &'static [&'static str])> {
    let (mut files, mut from, mut size) = (vec![], 0, 0);
    for (i, (kernel, _)) in kernels.iter().enumerate() {
        kernel.visit(&mut |_| size += 1);
        let alike =
            kernels.get(i + 1).is_some_and(|(next, _)| next.has_wgmma() == kernel.has_wgmma());
        if size >= FILE || !alike {
            files.push((text(&kernels[from..=i]), architectures(kernel)));
            (from, size) = (i + 1, 0);
        }
    }
    files
}

type Rows = Vec<(&'static str, Usage)>;

/// Compiles all files for all architectures, on all cores.
fn compile(nvcc: &Nvcc, files: &[(String, &'static [&'static str])]) -> Result<Rows, Unproved> {
    let jobs: Vec<(&str, &'static str)> = files
        .iter()
        .flat_map(|(text, all)| all.iter().map(move |architecture| (text.as_str(), *architecture)))
        .collect();
    let (next, rows) = (AtomicUsize::new(0), Mutex::new(Ok(vec![])));
    let work = || {
        while let Some((text, architecture)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let done = nvcc.compile(text, architecture);
            let mut rows = rows.lock().expect("no thread panics with it");
            match (done, rows.as_mut()) {
                (Ok(found), Ok(rows)) => rows.extend(found.into_iter().map(|u| (*architecture, u))),
                (Err(error), Ok(_)) => *rows = Err(error),
                (_, Err(_)) => return,
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    rows.into_inner().expect("no thread panicked")
}

#[test]
fn every_kernel_compiles_for_cuda_and_none_runs_out_of_registers() {
    let nvcc = match compiler() {
        Ok(nvcc) => nvcc,
        Err(why) => return println!("{why}"),
    };
    let all = inventory::all();
    let kernels = kernels();
    let mut rows = match compile(&nvcc, &files(&kernels)) {
        Ok(rows) => rows,
        Err(Unproved::Skip(why)) => return println!("skipped: {why}"),
        Err(Unproved::Wrong(what)) => panic!("{what}"),
    };
    let wanted: usize = kernels.iter().map(|(kernel, _)| architectures(kernel).len()).sum();
    assert_eq!(rows.len(), wanted, "every kernel is reported");
    rows.sort_by(|(a, x), (b, y)| (&x.kernel, a).cmp(&(&y.kernel, b)));

    let mut found = format!("nvcc {}\n", nvcc.version);
    for (architecture, usage) in &rows {
        let Usage { kernel, registers, shared, stack, spills } = usage;
        let _ = writeln!(
            found,
            "{kernel} {architecture} registers {registers} shared {shared} stack {stack} spills {spills}"
        );
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join("cuda_compile.golden");
    if std::env::var_os("BLESS").is_some() && !all {
        std::fs::write(&path, &found).expect("the golden file can be written");
    }
    let spilled: Vec<String> = rows
        .iter()
        .filter(|(_, u)| u.spills > if all { TRADED } else { 0 })
        .map(|(architecture, u)| format!("{} ({architecture}): {} bytes", u.kernel, u.spills))
        .collect();
    assert!(spilled.is_empty(), "registers are spilled:\n{}", spilled.join("\n"));

    let golden = std::fs::read_to_string(&path).expect("the golden file is in the repository");
    if golden.lines().next() != found.lines().next() {
        let version = &nvcc.version;
        return println!(
            "registers not compared: nvcc is {version}, the golden file has {:?}",
            golden.lines().next()
        );
    }
    let missing = |a: &str, b: &str| -> Vec<String> {
        a.lines().filter(|line| !b.lines().any(|l| l == *line)).map(str::to_owned).collect()
    };
    let gone = missing(&golden, &found);
    let new = if all { vec![] } else { missing(&found, &golden) };
    assert!(
        gone.is_empty() && new.is_empty(),
        "cuda_compile.golden differs (BLESS=1 writes it anew):\n- {}\n+ {}",
        gone.join("\n- "),
        new.join("\n+ ")
    );
}
