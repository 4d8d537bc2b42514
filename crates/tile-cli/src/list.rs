//! `tile list`: what there is, in lines that two versions can be compared by.

use sha2::{Digest, Sha256};
use tile::Kernel;
use tile::emit::Dialect;

use crate::{Outcome, build, select};

pub(crate) fn run(filter: Option<&str>) -> Outcome {
    for (spec, cases) in select::cases(filter)? {
        for case in cases {
            println!("case {} [{}] # {}", spec.name, case.label, case.kernel.name);
        }
    }
    for kernel in select::distinct(filter)? {
        let [metal, cuda] = [Dialect::Metal, Dialect::Cuda].map(|dialect| digest(&kernel, dialect));
        println!("kernel {} metal {metal} cuda {cuda}", kernel.name);
    }
    Ok(true)
}

/// The first 16 digits of the SHA-256 of a kernel's text under a name that is everybody's, without the comments that say where its
/// lines were recorded; `none` where the target does not take it.
fn digest(kernel: &Kernel, dialect: Dialect) -> String {
    let nameless = Kernel { name: "nameless".to_owned(), ..kernel.clone() };
    let hex = |text: String| -> String {
        let lines = text.lines().map(|line| line.rfind("  // ").map_or(line, |at| &line[..at]));
        Sha256::digest(lines.collect::<Vec<_>>().join("\n"))
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    };
    build::text(&nameless, dialect).map_or_else(|_| "none".to_owned(), hex)
}
