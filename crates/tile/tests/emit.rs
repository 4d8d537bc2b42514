//! The emitted text: golden files that show it, and what it must refuse.

extern crate delft_tile as tile;

use std::path::Path;

use tile::emit::{self, Dialect};
use tile::ir::Kernel;

#[path = "emit/kernels.rs"]
mod kernels;

/// Compares with a golden file, or writes it when `BLESS` is set.
fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emit").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).expect("the golden file is written");
        return;
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = want.lines().zip(text.lines()).position(|(a, b)| a != b);
    let line = differs.unwrap_or(want.lines().count().min(text.lines().count()));
    assert!(
        want == text,
        "{name}, line {}: expected {:?}, found {:?}; hint: BLESS=1 writes the golden files anew",
        line + 1,
        want.lines().nth(line).unwrap_or("the end"),
        text.lines().nth(line).unwrap_or("the end"),
    );
}

fn without_prelude(kernels: &[Kernel], dialect: Dialect) -> String {
    let texts = kernels.iter().map(|k| emit::kernel_text(k, dialect, 0));
    texts.collect::<Result<Vec<_>, _>>().expect("every kernel has a text").join("\n")
}

#[test]
fn metal_text_is_as_agreed() {
    golden("kernels.metal", &without_prelude(&kernels::for_metal(), Dialect::Metal));
}

#[test]
fn cuda_text_is_as_agreed() {
    golden("kernels.cu", &without_prelude(&kernels::all(), Dialect::Cuda));
}

#[test]
fn kernels_are_verified() {
    for kernel in kernels::all().iter().chain(&kernels::for_metal()) {
        if let Err(fault) = tile::verify::verify(kernel) {
            panic!("{fault}");
        }
    }
}
