//! `tile test`.

use tile::case::Case;
use tile::emit::Dialect;
use tile::{interp, proof};

use crate::{Outcome, Runner, select};

pub(crate) fn run(filter: Option<&str>, on: Runner) -> Outcome {
    let mut gpu = match on {
        Runner::Cuda => Some(crate::bench::open()?),
        _ => None,
    };
    let (mut total, mut failed, mut skipped) = (0, 0, None);
    for (spec, cases) in select::cases(filter)? {
        let result = match on {
            Runner::Interp => each(&cases, interp::check),
            Runner::Msl => text(&cases, Dialect::Metal),
            Runner::CudaText => text(&cases, Dialect::Cuda),
            Runner::Cuda => match &mut gpu {
                Some(gpu) => {
                    gpu.ahead(&cases);
                    each(&cases, |case| gpu.check(case))
                }
                None => Report::default(),
            },
        };
        let width = 16;
        if let Some(why) = result.skipped {
            println!("{:width$} {:5} cases skipped: {why}", spec.name, cases.len());
            skipped = Some(why);
            continue;
        }
        for finding in &result.findings {
            println!("{:width$} FAILED {finding}", spec.name);
        }
        println!(
            "{:width$} {:5} cases, worst relative error {:.1e}{}",
            spec.name,
            result.passed,
            result.error,
            if result.findings.is_empty() { "" } else { " among those that passed" }
        );
        total += result.passed;
        failed += result.findings.len();
    }
    let name = match on {
        Runner::Interp => "interp",
        Runner::Msl => "msl",
        Runner::CudaText => "cuda-text",
        Runner::Cuda => "cuda",
    };
    println!("cases run: {total} on {name}, {failed} failed");
    if let Some(why) = skipped {
        println!("some were skipped: {why}");
    }
    Ok(failed == 0)
}

#[derive(Default)]
struct Report {
    passed: usize,
    error: f64,
    findings: Vec<String>,
    skipped: Option<String>,
}

fn each(cases: &[Case], mut check: impl FnMut(&Case) -> Result<f64, String>) -> Report {
    let mut report = Report::default();
    for case in cases {
        match check(case) {
            Ok(error) => {
                report.passed += 1;
                report.error = report.error.max(error);
            }
            Err(why) => {
                report.findings.push(format!("{} [{}]: {why}", case.kernel.name, case.label))
            }
        }
    }
    report
}

fn text(cases: &[Case], dialect: Dialect) -> Report {
    match proof::check_all(cases, dialect) {
        Ok(counts) => Report {
            passed: counts.cases,
            error: counts.error,
            findings: vec![],
            skipped: counts.skipped,
        },
        Err(lines) => {
            let findings: Vec<String> = lines.lines().map(str::to_owned).collect();
            Report {
                passed: cases.len().saturating_sub(findings.len()),
                findings,
                ..Report::default()
            }
        }
    }
}
