//! TypeCheck: the verifier, so that every later pass may rely on the representation's rules.
//!
//! Limits: it proves form, not meaning; bounds, races and divergence that depend on data are the
//! interpreter's.

use crate::ir::Kernel;
use crate::verify::{self, Fault};

/// The kernel unchanged, if it keeps every rule.
pub(super) fn type_check(kernel: &Kernel) -> Result<Kernel, Fault> {
    verify::verify(kernel)?;
    Ok(kernel.clone())
}
