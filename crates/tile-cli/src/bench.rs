//! `tile bench`, and the GPU that `tile test --on cuda` runs on.

mod check;
mod measure;

use device::cuda::{self, roof};
use tile::case::Bottleneck;

pub(crate) use check::Gpu;

use crate::{Outcome, select};
use measure::Measured;

/// The first GPU of this machine.
pub(crate) fn open() -> Result<Gpu, String> {
    let gpu = cuda::Gpu::open(0).map_err(|e| e.to_string())?;
    eprintln!("{}", gpu.facts());
    Ok(Gpu::on(gpu))
}

/// `tile bench`: the roofs, then every benchmark that the filter names.
pub(crate) fn run(filter: Option<&str>, json: bool) -> Outcome {
    let families = select::benches(filter)?;
    let gpu = cuda::Gpu::open(0).map_err(|e| e.to_string())?;
    let roofs = roof::measure(&gpu).map_err(|e| e.to_string())?;
    print_roofs(&gpu, &roofs, json);
    let mut failed = 0;
    let mut wide = 0;
    for (spec, benches) in &families {
        wide = benches.iter().map(|b| b.label.len()).fold(wide, usize::max).min(60);
        measure::ahead(&gpu, benches);
        if !json {
            print_header(spec.name, wide);
        }
        for bench in benches {
            match measure::measure(&gpu, bench) {
                Ok(measured) if json => println!("{}", to_json(spec.name, &measured, &roofs)),
                Ok(measured) => print_row(&measured, &roofs, wide),
                Err(why) => {
                    failed += 1;
                    println!("{}", failure(spec.name, bench, &why, json));
                    if gpu.lost() {
                        return Err("the GPU's context is lost: stopping here".to_owned());
                    }
                }
            }
        }
    }
    if failed > 0 {
        eprintln!("{failed} benchmarks failed");
    }
    Ok(failed == 0)
}

fn failure(family: &str, bench: &tile::case::Bench, why: &str, json: bool) -> String {
    if !json {
        return format!("FAILED {} [{}]: {why}", bench.kernel.name, bench.label);
    }
    let (kernel, label) = (&bench.kernel.name, &bench.label);
    serde_json::json!({ "kind": "failure", "family": family, "kernel": kernel, "label": label, "why": why })
        .to_string()
}

fn print_roofs(gpu: &cuda::Gpu, roofs: &roof::Roofs, json: bool) {
    if json {
        let matmul: Vec<_> = roofs
            .matmul
            .iter()
            .map(|(edge, flops)| serde_json::json!({ "edge": edge, "tflops": flops / 1e12 }))
            .collect();
        let line = serde_json::json!({
            "kind": "roof",
            "gpu": gpu.facts().to_string(),
            "read_gbps": roofs.read / 1e9,
            "copy_gbps": roofs.copy / 1e9,
            "bf16": matmul,
        });
        println!("{line}");
        return;
    }
    println!("{}", gpu.facts());
    println!(
        "roof: reads memory at {:.0} GB/s, copies at {:.0}",
        roofs.read / 1e9,
        roofs.copy / 1e9
    );
    if roofs.matmul.is_empty() {
        println!("roof: no matrix products: there is no cuBLASLt");
    }
    for (edge, flops) in &roofs.matmul {
        println!("roof: bf16 product of {edge} x {edge} matrices at {:.0} TFLOP/s", flops / 1e12);
    }
}

/// Percent of what bounds a kernel; none if that was not measured.
fn percent(measured: &Measured, roofs: &roof::Roofs) -> Option<f64> {
    let share = match measured.bench.roof {
        Bottleneck::Memory => measured.bytes_per_second() / roofs.read,
        Bottleneck::Matrix => measured.flops_per_second() / roofs.matrix()?,
    };
    Some(100.0 * share)
}

fn print_header(family: &str, wide: usize) {
    println!(
        "\n{family}\n  {:wide$} {:>9} {:>8} {:>8} {:>6} {:>9} {:>4} {:>5}  kernel",
        "shape", "us", "GB/s", "TFLOP/s", "roof", "vendor", "regs", "spill"
    );
}

fn print_row(m: &Measured, roofs: &roof::Roofs, wide: usize) {
    let share = percent(m, roofs).map_or("-".to_owned(), |p| format!("{p:.0}%"));
    let vendor = m.vendor.map_or("-".to_owned(), |s| format!("{:.2}x", s / m.seconds));
    // What stays in the cache is faster than memory: say so where the data could not be made cold.
    let warm = if m.cold { "" } else { ", in cache" };
    println!(
        "  {:wide$} {:9.2} {:8.0} {:8.2} {share:>6} {vendor:>9} {:4} {:5}  {}{warm}",
        m.bench.label,
        m.seconds * 1e6,
        m.bytes_per_second() / 1e9,
        m.flops_per_second() / 1e12,
        m.registers,
        m.local,
        m.bench.kernel.name
    );
}

fn to_json(family: &str, m: &Measured, roofs: &roof::Roofs) -> String {
    let bound = match m.bench.roof {
        Bottleneck::Memory => "memory",
        Bottleneck::Matrix => "matrix",
    };
    serde_json::json!({
        "kind": "bench",
        "family": family,
        "kernel": m.bench.kernel.name,
        "label": m.bench.label,
        "us": m.seconds * 1e6,
        "least_us": m.least * 1e6,
        "gbps": m.bytes_per_second() / 1e9,
        "tflops": m.flops_per_second() / 1e12,
        "bound": bound,
        "percent": percent(m, roofs),
        "vendor_us": m.vendor.map(|s| s * 1e6),
        "cold": m.cold,
        "registers": m.registers,
        "local_bytes": m.local,
    })
    .to_string()
}
