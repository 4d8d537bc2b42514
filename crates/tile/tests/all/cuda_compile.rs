//! CUDA text through NVIDIA's compiler, for each generation of GPUs that it can run on: every
//! kernel compiles, none runs out of registers, and for sm_80 and sm_90a they are those on record
//! in `cuda_compile.golden` (for one version of the compiler; `BLESS=1` writes it anew). Products
//! of warpgroups are for sm_90a alone.
//!
//! A family has dozens of kernels, so the test takes a few of each, from the smallest to the
//! largest. DELFT_ALL_KERNELS takes all, for the GPUs on record, which is minutes. The compiler is
//! the one that DELFT_NVCC names, else `nvcc` on `PATH`; `xtask/proof` installs one. Without either
//! the test is skipped.

use crate::inventory;
use std::collections::HashSet;
use std::fmt::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tile::emit::{self, Dialect};
use tile::ir::Kernel;
use tile::launch::Numbers;
use tile::passes::{self, Target};
use tile::proof::{Nvcc, Resources, Unproved};

/// The GPUs on record, with products of warpgroups and without: A100, H100 and H200.
const RECORDED: [&str; 2] = ["sm_80", "sm_90a"];
/// Those and the others: GeForce 3000 and 4000, B200, GeForce 5000.
const ALL: [&str; 6] = ["sm_80", "sm_90a", "sm_86", "sm_89", "sm_100a", "sm_120a"];

/// Bytes of registers that the compiler may put aside by its own choice, to fit one more
/// threadgroup on a multiprocessor: it does for a few kernels, at 48, 64 and 168 registers of 255.
const SPILLED: u32 = 32;

/// Instructions per file: starting the compiler costs as much as compiling about this many.
const FILE: usize = 4_000;

/// The compiler, or why there is none: the one that `DELFT_NVCC` names, else `nvcc` on `PATH`.
fn compiler() -> Result<Nvcc, Unproved> {
    match std::env::var_os("DELFT_NVCC") {
        Some(nvcc) => Nvcc::at(nvcc),
        None => Nvcc::at("nvcc"),
    }
}

/// The kernels taken of those that CUDA devices launch, lowered, with the constants of the first
/// case that launches them, or benchmark where no case does.
fn kernels() -> Vec<(Kernel, Numbers)> {
    let apple = ops::kernels::only_apple();
    let cases = inventory::cases_without(&apple, inventory::all());
    let cases = cases.into_iter().map(|case| (case.kernel, case.numbers));
    let benches = if inventory::all() { inventory::benches() } else { vec![] };
    let benches = benches.into_iter().map(|bench| (bench.kernel, bench.numbers));
    let mut names: HashSet<String> = apple.into_iter().map(|case| case.kernel.name).collect();
    let taken = cases.chain(benches).filter(|(kernel, _)| names.insert(kernel.name.clone()));
    let lower = |kernel: &Kernel| passes::lower(kernel, Target::Cuda).expect("it lowers");
    taken.map(|(kernel, numbers)| (lower(&kernel), numbers)).collect()
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

/// The architectures that a kernel is compiled for, of those that have its instructions.
fn architectures(kernel: &Kernel) -> &'static [&'static str] {
    match (kernel.has_wgmma(), inventory::all()) {
        (true, _) => &RECORDED[1..],
        (false, true) => &RECORDED,
        (false, false) => &ALL,
    }
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

type Rows = Vec<(&'static str, Resources)>;

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
        Err(why) => return testing::skipped(why),
    };
    let all = inventory::all();
    let kernels = kernels();
    let mut rows = match compile(&nvcc, &files(&kernels)) {
        Ok(rows) => rows,
        Err(Unproved::Skip(why)) => return testing::skipped(why),
        Err(Unproved::Wrong(what)) => panic!("{what}"),
    };
    let wanted: usize = kernels.iter().map(|(kernel, _)| architectures(kernel).len()).sum();
    assert_eq!(rows.len(), wanted, "every kernel is reported");
    rows.sort_by(|(a, x), (b, y)| (&x.kernel, a).cmp(&(&y.kernel, b)));

    let mut found = format!("nvcc {}\n", nvcc.version);
    for (architecture, usage) in rows.iter().filter(|(a, _)| RECORDED.contains(a)) {
        let Resources { kernel, registers, shared, stack, spills } = usage;
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
        .filter(|(_, u)| u.spills > SPILLED)
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
