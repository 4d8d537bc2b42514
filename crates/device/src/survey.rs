//! What this machine has that models could run on, for people who ask why a device is used or not.
//! Nothing is loaded that opening the devices would not load.

use std::path::PathBuf;

use formats::Result;

use crate::Place;
use cpu_kernels::isa::Isa;
use cpu_kernels::team;

use crate::cpu;

/// What [`survey`] found.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The processor.
    pub processor: Processor,
    /// Each kind of GPU that this build knows.
    pub gpus: Vec<Gpus>,
    /// Where a model goes by itself if it fits, in this order; behind them comes the CPU.
    pub preferred: Vec<Place>,
    /// Where compiled kernels are kept from one run to the next; `None` where there is no such
    /// place.
    pub kernels: Option<PathBuf>,
}

/// What was found of the processor.
#[derive(Debug, Clone)]
pub struct Processor {
    /// The instruction sets that it has and Delft uses, the least first.
    pub sets: Vec<&'static str>,
    /// The one in use: the last, or the one that `DELFT_ISA` names.
    pub used: Result<&'static str>,
    /// Hardware threads that this process may run on.
    pub hardware_threads: usize,
    /// Threads that compute unless told otherwise: one for each physical core, within the process's
    /// quota.
    pub threads: usize,
    /// Bytes of memory that this process may still take, its container's limits counted; `None`
    /// where the system does not tell.
    pub free: Option<usize>,
}

/// GPUs of one kind.
#[derive(Debug, Clone)]
pub struct Gpus {
    /// The kind as a device is named: `cuda`, `metal`.
    pub kind: &'static str,
    /// Each of them in a line, by its number; or why there is none that can be used.
    pub found: Result<Vec<String>>,
    /// Libraries of the vendor's and whether each was found, with what it is for.
    pub libraries: Vec<Library>,
}

/// A library that is looked for at run time.
#[derive(Debug, Clone)]
pub struct Library {
    /// Its name: `NVRTC`.
    pub name: &'static str,
    /// What it is needed for.
    pub purpose: &'static str,
    /// Whether it is there, or why it cannot be used.
    pub found: Result<()>,
}

/// Looks at the machine.
pub fn survey() -> Survey {
    let sets = Isa::available().iter().map(|set| set.name()).collect();
    let processor = Processor {
        sets,
        used: Isa::detect().map(Isa::name),
        hardware_threads: std::thread::available_parallelism().map_or(1, usize::from),
        threads: team::default_threads(),
        free: cpu::free_memory(),
    };
    let mut gpus = Vec::new();
    #[cfg(feature = "cuda")]
    gpus.push(crate::cuda::survey());
    if cfg!(feature = "metal") {
        let found = crate::metal::open().map(|device| vec![device.about().isa]);
        gpus.push(Gpus { kind: "metal", found, libraries: Vec::new() });
    }
    let preferred = crate::gpus();
    Survey { processor, gpus, preferred, kernels: crate::cache::kernels_of_user() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_has_a_processor_that_serves() {
        let survey = survey();
        let processor = survey.processor;
        assert_eq!(processor.sets.first(), Some(&"scalar"));
        if let Ok(used) = processor.used {
            assert!(processor.sets.contains(&used));
        }
        assert!((1..=processor.hardware_threads).contains(&processor.threads));
        for gpus in survey.gpus {
            assert!(gpus.found.is_err() || gpus.found.is_ok_and(|found| !found.is_empty()));
        }
    }
}
