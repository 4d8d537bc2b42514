//! Passes: functions from a kernel to a kernel that means the same, from what was written to what a
//! target has.
//!
//! [`lower`] is the whole pipeline; [`trace`] keeps the kernel after every step of it. The six
//! passes of a target are type-check, const-fold, tile-lowering, fusion, schedule and vectorize;
//! cse, licm, dce and unroll clean up between them. The verifier runs after each, so a pass that
//! breaks a rule is named by the error. [`specialise`] comes before, where the values of constants
//! are known.
//!
//! "Means the same" allows the following: sums of f32 may be ordered differently (vectorize) and a
//! product followed by a sum is rounded once (fusion). Every target gets both, so that targets
//! differ among themselves as little as possible.

mod const_fold;
mod cse;
mod dce;
mod forward;
mod fusion;
mod identities;
mod licm;
mod ranges;
mod rewrite;
mod schedule;
mod specialise;
mod tile_lowering;
mod type_check;
mod unroll;
mod vectorize;

use crate::ir::Kernel;
use crate::verify::{self, Fault};

pub use specialise::specialise;
pub use tile_lowering::fits;

/// The target that a kernel is lowered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// The interpreter: 16 x 16 tiles and asynchronous copies stay.
    Interpreter,
    /// Metal: 8 x 8 tiles, no asynchronous copies, no products of warpgroups.
    Metal,
    /// CUDA: 16 x 16 tiles (pairs of `mma.sync`), asynchronous copies and products of warpgroups
    /// stay.
    Cuda,
}

impl Target {
    /// All of them.
    pub const ALL: [Target; 3] = [Target::Interpreter, Target::Metal, Target::Cuda];

    /// Its name on the command line and in tests.
    pub fn name(self) -> &'static str {
        match self {
            Target::Interpreter => "interpreter",
            Target::Metal => "metal",
            Target::Cuda => "cuda",
        }
    }

    /// The target with a name.
    pub fn named(name: &str) -> Option<Self> {
        Target::ALL.into_iter().find(|target| target.name() == name)
    }
}

/// One step of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The verifier.
    TypeCheck,
    /// Arithmetic on what is known.
    ConstFold,
    /// The same value computed once.
    Cse,
    /// Moves computations that a loop does not change before it.
    Licm,
    /// Removes unused computations.
    Dce,
    /// Loops that ask for it, written out.
    Unroll,
    /// Tiles of the size that the target has.
    TileLowering,
    /// Loops merged, products and sums rounded once, registers forwarded.
    Fusion,
    /// Copies, barriers, and the order of loads.
    Schedule,
    /// Several elements per access.
    Vectorize,
}

impl Pass {
    /// All of them.
    pub const ALL: [Pass; 10] = [
        Pass::TypeCheck,
        Pass::ConstFold,
        Pass::Cse,
        Pass::Licm,
        Pass::Dce,
        Pass::Unroll,
        Pass::TileLowering,
        Pass::Fusion,
        Pass::Schedule,
        Pass::Vectorize,
    ];

    /// The steps of [`lower`], in order.
    pub const PIPELINE: [Pass; 24] = [
        Pass::TypeCheck,
        // Twice, as an inner loop's bounds may be known only when the outer one is written out.
        Pass::ConstFold,
        Pass::Unroll,
        Pass::ConstFold,
        Pass::Unroll,
        Pass::ConstFold,
        Pass::Cse,
        Pass::Dce,
        Pass::TileLowering,
        Pass::ConstFold,
        Pass::Cse,
        Pass::Licm,
        // Before loops are merged and after: the code between two loops must be free of what moves
        // away.
        Pass::Fusion,
        Pass::ConstFold,
        Pass::Cse,
        Pass::Dce,
        Pass::Schedule,
        Pass::Vectorize,
        Pass::ConstFold,
        Pass::Cse,
        Pass::Licm,
        Pass::Fusion,
        Pass::Schedule,
        Pass::Dce,
    ];

    /// Its name on the command line and in tests.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::TypeCheck => "type-check",
            Pass::ConstFold => "const-fold",
            Pass::Cse => "cse",
            Pass::Licm => "licm",
            Pass::Dce => "dce",
            Pass::Unroll => "unroll",
            Pass::TileLowering => "tile-lowering",
            Pass::Fusion => "fusion",
            Pass::Schedule => "schedule",
            Pass::Vectorize => "vectorize",
        }
    }

    /// The pass with a name.
    pub fn named(name: &str) -> Option<Self> {
        Pass::ALL.into_iter().find(|pass| pass.name() == name)
    }

    /// Applies it to a verified kernel and verifies the result, if it is another.
    ///
    /// # Errors
    /// The verifier's findings; after the first pass they are a fault of the pass, and the message
    /// names it.
    pub fn apply(self, kernel: &Kernel, target: Target) -> Result<Kernel, Fault> {
        let lowered = match self {
            Pass::TypeCheck => return type_check::type_check(kernel),
            Pass::ConstFold => const_fold::const_fold(kernel),
            Pass::Cse => cse::cse(kernel),
            Pass::Licm => licm::licm(kernel),
            Pass::Dce => dce::dce(kernel),
            Pass::Unroll => unroll::unroll(kernel),
            Pass::TileLowering => tile_lowering::tile_lowering(kernel, target)?,
            Pass::Fusion => fusion::fusion(kernel),
            Pass::Schedule => schedule::schedule(kernel, target),
            Pass::Vectorize => vectorize::vectorize(kernel),
        };
        // What a pass leaves as it was is verified.
        if lowered == *kernel {
            return Ok(lowered);
        }
        verify::verify(&lowered).map_err(|fault| Fault {
            message: format!("after {}: {}", self.name(), fault.message),
            ..fault
        })?;
        Ok(lowered)
    }
}

/// Lowers a kernel for a target through [`Pass::PIPELINE`].
///
/// # Errors
/// The verifier's findings in the kernel, or an instruction that the target lacks.
pub fn lower(kernel: &Kernel, target: Target) -> Result<Kernel, Fault> {
    Pass::PIPELINE.into_iter().try_fold(kernel.clone(), |kernel, pass| pass.apply(&kernel, target))
}

/// The kernel after every step of [`lower`], with the step's name.
///
/// # Errors
/// As [`lower`].
pub fn trace(kernel: &Kernel, target: Target) -> Result<Vec<(&'static str, Kernel)>, Fault> {
    let mut steps: Vec<(&'static str, Kernel)> = Vec::with_capacity(Pass::PIPELINE.len());
    for pass in Pass::PIPELINE {
        let before = steps.last().map_or(kernel, |(_, kernel)| kernel);
        let after = pass.apply(before, target)?;
        steps.push((pass.name(), after));
    }
    Ok(steps)
}
