//! `tile bench`, and the GPU that `tile test --on cuda` runs on.

use tile::case::Case;

use crate::{Outcome, select};

/// A GPU.
pub(crate) struct Gpu;

impl Gpu {
    pub(crate) fn check(&mut self, case: &Case) -> Result<f64, String> {
        Err(format!("{}: no CUDA driver", case.kernel.name))
    }
}

pub(crate) fn open() -> Result<Gpu, String> {
    Err("cuda: no driver on this machine".to_owned())
}

pub(crate) fn run(filter: Option<&str>, _json: bool) -> Outcome {
    select::benches(filter)?;
    open().map(|_| true)
}
