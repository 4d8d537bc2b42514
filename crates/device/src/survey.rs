//! A survey of the devices of this machine, to explain why a device is used or not. Loads only what
//! opening the devices would load.

use std::path::PathBuf;

use formats::Result;

use crate::DeviceSpec;
use cpu_kernels::isa::Isa;
use cpu_kernels::team;

use crate::cpu;

/// The result of [`survey`].
#[derive(Debug, Clone)]
pub struct Survey {
    /// The processor.
    pub processor: Processor,
    /// The kinds of GPU that this build supports.
    pub gpus: Vec<Gpus>,
    /// Where a model is placed automatically if it fits, in order of preference; the CPU comes
    /// last.
    pub preferred: Vec<DeviceSpec>,
    /// The folder of compiled kernels that are kept between runs, if there is one.
    pub kernels: Option<PathBuf>,
}

/// The CPU.
#[derive(Debug, Clone)]
pub struct Processor {
    /// The instruction sets that it has and Delft uses, in ascending order.
    pub sets: Vec<&'static str>,
    /// The one in use: the last, or the one named by `DELFT_ISA`.
    pub used: Result<&'static str>,
    /// Hardware threads available to this process.
    pub hardware_threads: usize,
    /// The default number of compute threads: one for each physical core, within the process's
    /// quota.
    pub threads: usize,
    /// Bytes of memory that this process may still take, within the limits of its container; `None`
    /// if the system does not report it.
    pub free: Option<usize>,
}

/// GPUs of one kind.
#[derive(Debug, Clone)]
pub struct Gpus {
    /// The kind's name in a device spec: `cuda`, `metal`.
    pub kind: &'static str,
    /// One line for each GPU, by number; or why none can be used.
    pub found: Result<Vec<String>>,
    /// The vendor libraries, whether each was found, and its purpose.
    pub libraries: Vec<RuntimeLibrary>,
}

/// A library that is loaded at run time.
#[derive(Debug, Clone)]
pub struct RuntimeLibrary {
    /// Its name: `NVRTC`.
    pub name: &'static str,
    /// Its user.
    pub purpose: &'static str,
    /// Whether it was found, or why it cannot be used.
    pub found: Result<()>,
}

/// Surveys the machine.
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
