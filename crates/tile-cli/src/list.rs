//! `tile list`: what there is, in lines that two versions can be compared by.

use sha2::{Digest, Sha256};
use tile::Kernel;
use tile::emit::{self, Dialect};
use tile::passes;

use crate::{Outcome, build, select};

pub(crate) fn run(filter: Option<&str>) -> Outcome {
    for (spec, cases) in select::cases(filter)? {
        for case in cases {
            println!("case {} [{}] # {}", spec.name, case.label, case.kernel.name);
        }
    }
    let dialects = [Dialect::Metal, Dialect::Cuda];
    for kernel in select::distinct(filter)? {
        let [metal, cuda] = dialects.map(|dialect| digest(&kernel, dialect));
        println!("kernel {} metal {metal} cuda {cuda}", kernel.name);
    }
    let prelude = |dialect| emit::text(&[], dialect).map_or_else(|_| "none".to_owned(), hex);
    let [metal, cuda] = dialects.map(prelude);
    println!("kernel prelude metal {metal} cuda {cuda}");
    Ok(true)
}

/// The digest of a kernel's text under a name that is everybody's, without the prelude; `none`
/// where the target does not take it.
fn digest(kernel: &Kernel, dialect: Dialect) -> String {
    let nameless = Kernel { name: "nameless".to_owned(), ..kernel.clone() };
    let lowered = passes::lower(&nameless, build::target(dialect));
    let text = lowered.and_then(|kernel| emit::kernel_text(&kernel, dialect, 0));
    text.map_or_else(|_| "none".to_owned(), hex)
}

/// The first 16 digits of the SHA-256 of a text without the comments that say where its lines were
/// recorded.
fn hex(text: String) -> String {
    let lines = text.lines().map(|line| line.rfind("  // ").map_or(line, |at| &line[..at]));
    let digest = Sha256::digest(lines.collect::<Vec<_>>().join("\n"));
    digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
