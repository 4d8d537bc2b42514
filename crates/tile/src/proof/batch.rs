//! Whole sets of cases: lowered, emitted, compiled a few translation units at a time, run under
//! every schedule.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::case::Case;
use crate::emit::{self, Dialect};
use crate::ir::Kernel;
use crate::passes::{self, Target};

use super::{CompiledText, ThreadOrder, Unproved};

/// Counts of proved cases.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    /// Cases that hold, under every schedule.
    pub cases: usize,
    /// Launches.
    pub launches: usize,
    /// Distinct kernels.
    pub kernels: usize,
    /// The largest relative error.
    pub error: f64,
    /// Cases of kernels that need more threadgroup memory, or other products, than the dialect's
    /// machines have: they are made for others.
    pub left_out: usize,
    /// Why nothing ran, if a tool is missing: print it.
    pub skipped: Option<String>,
}

/// Bytes of threadgroup memory on every Apple GPU, and on compute capability 9.0.
fn shared_limit(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Metal => emit::METAL_SHARED,
        Dialect::Cuda => 227 << 10,
    }
}

/// Instructions per translation unit: enough to pay for starting a compiler, few enough to share
/// among cores.
const UNIT: usize = 4_000;

/// A kernel as it is emitted, and the cases (by index) that launch it.
struct Job {
    lowered: Kernel,
    original: Kernel,
    cases: Vec<usize>,
    nodes: usize,
}

/// Runs a case's kernel in a dialect under all schedules; the largest relative error.
///
/// # Errors
/// [`Unproved::Skip`] without a compiler, else one line saying what is wrong.
pub fn check(case: &Case, dialect: Dialect) -> Result<f64, Unproved> {
    let cases = std::slice::from_ref(case);
    let jobs = jobs(cases, dialect).map_err(Unproved::Wrong)?;
    if jobs.is_empty() {
        let limit = shared_limit(dialect);
        let name = &case.kernel.name;
        let what = format!("{name}: more than {limit} bytes of threadgroup memory, or a wgmma");
        return Err(Unproved::Skip(what));
    }
    let mut counts = Counts::default();
    let mut findings = vec![];
    unit(&jobs, cases, dialect, &mut counts, &mut findings)?;
    match findings.pop() {
        Some(finding) => Err(Unproved::Wrong(finding)),
        None => Ok(counts.error),
    }
}

/// Runs all cases, on all cores. [`Counts::skipped`] says so if there is no compiler.
///
/// # Errors
/// A line per finding, at most one for each case.
pub fn check_all(cases: &[Case], dialect: Dialect) -> Result<Counts, String> {
    let jobs = jobs(cases, dialect)?;
    let left_out = cases.len() - jobs.iter().map(|j| j.cases.len()).sum::<usize>();
    let units = units(jobs);
    let next = AtomicUsize::new(0);
    let total = Mutex::new((Counts { left_out, ..Counts::default() }, Vec::new()));
    let work = || {
        while let Some(jobs) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (mut counts, mut findings) = (Counts::default(), vec![]);
            match unit(jobs, cases, dialect, &mut counts, &mut findings) {
                Ok(()) => {}
                Err(Unproved::Skip(why)) => counts.skipped = Some(why),
                Err(Unproved::Wrong(what)) => findings.push(what),
            }
            let mut total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            total.0.add(counts);
            total.1.append(&mut findings);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(units.len()) {
            scope.spawn(work);
        }
    });
    let (counts, findings) = total.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if findings.is_empty() { Ok(counts) } else { Err(findings.join("\n")) }
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.cases += other.cases;
        self.launches += other.launches;
        self.kernels += other.kernels;
        self.left_out += other.left_out;
        self.error = self.error.max(other.error);
        self.skipped = self.skipped.take().or(other.skipped);
    }
}

/// The distinct kernels of some cases, lowered, if they fit. Two kernels of one name get distinct
/// ones: a text holds each name once.
fn jobs(cases: &[Case], dialect: Dialect) -> Result<Vec<Job>, String> {
    let target = match dialect {
        Dialect::Metal => Target::Metal,
        Dialect::Cuda => Target::Cuda,
    };
    let mut jobs: Vec<Job> = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let fits = passes::fits(&case.kernel, target).is_ok();
        if !fits || case.kernel.shared_bytes() > shared_limit(dialect) {
            continue;
        }
        if let Some(job) = jobs.iter_mut().find(|j| j.original == case.kernel) {
            job.cases.push(i);
            continue;
        }
        let mut lowered = passes::lower(&case.kernel, target)
            .map_err(|e| format!("{} [{}]: {e}", case.kernel.name, case.label))?;
        if jobs.iter().any(|j| j.lowered.name == lowered.name) {
            lowered.name = format!("{}_{i}", lowered.name);
        }
        let mut nodes = 0;
        lowered.visit(&mut |_| nodes += 1);
        jobs.push(Job { lowered, original: case.kernel.clone(), cases: vec![i], nodes });
    }
    Ok(jobs)
}

/// Translation units, the largest first so that no core is left with one at the end.
fn units(mut jobs: Vec<Job>) -> Vec<Vec<Job>> {
    jobs.sort_by_key(|j| std::cmp::Reverse(j.nodes));
    let mut units: Vec<Vec<Job>> = Vec::new();
    let mut room = 0;
    for job in jobs {
        let nodes = job.nodes;
        match units.last_mut() {
            Some(unit) if nodes <= room => unit.push(job),
            _ => {
                units.push(vec![job]);
                room = UNIT;
            }
        }
        room = room.saturating_sub(nodes);
    }
    units
}

/// Emits, compiles and runs some kernels' cases.
fn unit(
    jobs: &[Job],
    cases: &[Case],
    dialect: Dialect,
    counts: &mut Counts,
    findings: &mut Vec<String>,
) -> Result<(), Unproved> {
    let wrong = |e: crate::verify::Fault| Unproved::Wrong(e.to_string());
    let kernels: Vec<Kernel> = jobs.iter().map(|j| j.lowered.clone()).collect();
    let mut text = emit::text(&kernels, dialect).map_err(wrong)?;
    if dialect == Dialect::Cuda {
        let mut symbols = vec![];
        for job in jobs {
            for case in &job.cases {
                let (symbol, instance) =
                    emit::cuda_instance(&job.lowered, &cases[*case].numbers).map_err(wrong)?;
                if !symbols.contains(&symbol) {
                    text.push_str(&instance);
                    symbols.push(symbol);
                }
            }
        }
    }
    let program = CompiledText::compile(&text, &kernels, dialect)?;
    for job in jobs {
        counts.kernels += 1;
        for index in &job.cases {
            let case = &cases[*index];
            match run(&program, &job.lowered, case) {
                Ok(error) => {
                    counts.cases += 1;
                    counts.launches += ThreadOrder::ALL.len();
                    counts.error = counts.error.max(error);
                }
                Err(what) => findings.push(format!("{dialect:?} [{}]: {what}", case.label)),
            }
        }
    }
    Ok(())
}

/// A case under every schedule.
fn run(program: &CompiledText, kernel: &Kernel, case: &Case) -> Result<f64, String> {
    let mut worst: f64 = 0.0;
    for schedule in ThreadOrder::ALL {
        let mut buffers = case.buffers.clone();
        program.run(kernel, &case.numbers, &mut buffers, schedule)?;
        let error = case.check(&buffers);
        worst = worst.max(error.map_err(|e| format!("{}: {schedule:?}: {e}", kernel.name))?);
    }
    Ok(worst)
}
