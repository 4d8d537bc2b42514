//! Device specs: parsing the name of one device or of several that share a model, and opening them.

use std::fmt;
use std::str::FromStr;

use formats::{Error, Hint, Result, Setting};

use crate::ranks::Candidate;
use crate::{Device, RankLaunch, Split, cpu, metal};

/// A device spec: `auto`, `cpu`, `cuda`, `cuda:1`, `metal`, `sim`, `sim-metal`, `sim-cuda`, or
/// several GPUs of one kind: `cuda:0,1`, `sim,sim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceSpec {
    /// A GPU if one is present and the model fits it, else the CPU.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by number.
    Cuda(u32),
    /// The GPU of an Apple machine.
    Metal,
    /// A GPU simulated on the CPU: slow, for tests. Needs the feature `sim`.
    Sim(Simulator),
    /// Several GPUs that share a model.
    Several(DeviceList),
}

/// How GPU kernels are run on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simulator {
    /// The interpreter, on kernels lowered for a target.
    Interpreter,
    /// The emitted CUDA source, compiled for this processor.
    Cuda,
    /// The emitted Metal source, through the whole Metal driver except for Apple's API.
    Metal,
}

/// GPUs of one kind that share a model, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceList {
    kind: Kind,
    /// Device numbers, if the kind has them; only the first `count` are used.
    numbers: [u32; DeviceList::MOST],
    count: usize,
}

/// Kinds of GPU of which a machine can have several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Cuda,
    Sim(Simulator),
}

/// How several GPUs share a model. The names are llama.cpp's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SplitMode {
    /// Pipeline parallel: each GPU holds some of the layers, and they work one after the other.
    /// Fits models that are too large for one GPU.
    #[default]
    Layer,
    /// Tensor parallel: each GPU holds a share of every matrix, and they work at the same time. A
    /// token takes less time.
    Tensor,
}

const PLACES: [(&str, DeviceSpec); 7] = [
    ("auto", DeviceSpec::Auto),
    ("cpu", DeviceSpec::Cpu),
    ("cuda", DeviceSpec::Cuda(0)),
    ("metal", DeviceSpec::Metal),
    ("sim", DeviceSpec::Sim(Simulator::Interpreter)),
    ("sim-metal", DeviceSpec::Sim(Simulator::Metal)),
    ("sim-cuda", DeviceSpec::Sim(Simulator::Cuda)),
];

impl FromStr for DeviceSpec {
    type Err = Error;

    fn from_str(name: &str) -> Result<DeviceSpec> {
        if name.contains(',') {
            return several(name).map(DeviceSpec::Several);
        }
        if let Some((_, place)) = PLACES.iter().find(|(known, _)| *known == name) {
            return Ok(*place);
        }
        let number = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
        number.map(DeviceSpec::Cuda).ok_or_else(|| {
            Error::new("device", "auto, cpu, cuda, cuda:N, cuda:N,N.. or metal", name)
        })
    }
}

/// Parses a list whose items are device names or numbers of further NVIDIA GPUs.
fn several(names: &str) -> Result<DeviceList> {
    let wrong = |expected: &str| {
        let hint = Hint::text("the CPU takes layers by ").with(Setting::GpuLayers);
        Error::new("device", expected, names).hint(hint)
    };
    let mut found: Option<DeviceList> = None;
    for name in names.split(',') {
        let further = found.is_some_and(|of| of.kind == Kind::Cuda);
        let place = match name.parse() {
            Ok(number) if further => DeviceSpec::Cuda(number),
            _ => name.parse()?,
        };
        let (kind, number) = match place {
            DeviceSpec::Cuda(number) => (Kind::Cuda, number),
            DeviceSpec::Sim(simulator) => (Kind::Sim(simulator), 0),
            DeviceSpec::Auto | DeviceSpec::Cpu | DeviceSpec::Metal | DeviceSpec::Several(_) => {
                return Err(wrong("several NVIDIA GPUs: cuda:0,1"));
            }
        };
        let list =
            found.get_or_insert(DeviceList { kind, numbers: [0; DeviceList::MOST], count: 0 });
        if list.kind != kind || list.count == DeviceList::MOST {
            return Err(wrong(&format!("at most {} GPUs of one kind", DeviceList::MOST)));
        }
        list.numbers[list.count] = number;
        list.count += 1;
    }
    found.ok_or_else(|| wrong("several GPUs"))
}

/// The GPUs of this machine that [`DeviceSpec::Auto`] tries, in order. Without a driver this takes
/// well under a millisecond. Metal is not among them: the Metal driver has not run on an Apple GPU
/// yet, so it is used only by name.
pub fn gpus() -> Vec<DeviceSpec> {
    #[cfg(feature = "cuda")]
    if crate::cuda::present() {
        return vec![DeviceSpec::Cuda(0)];
    }
    Vec::new()
}

impl DeviceList {
    /// Most GPUs that can share a model.
    pub const MOST: usize = 16;

    /// The devices, in order.
    pub fn places(&self) -> impl Iterator<Item = DeviceSpec> {
        let kind = self.kind;
        self.numbers.into_iter().take(self.count).map(move |number| match kind {
            Kind::Cuda => DeviceSpec::Cuda(number),
            Kind::Sim(simulator) => DeviceSpec::Sim(simulator),
        })
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (PLACES.iter().find(|(_, place)| place == self), self) {
            (Some((name, _)), _) => f.write_str(name),
            (None, DeviceSpec::Cuda(number)) => write!(f, "cuda:{number}"),
            (None, DeviceSpec::Several(several)) => {
                let names = several.places().enumerate().map(|(i, place)| match place {
                    DeviceSpec::Cuda(number) if i > 0 => number.to_string(),
                    DeviceSpec::Cuda(number) => format!("cuda:{number}"),
                    other => other.to_string(),
                });
                f.write_str(&names.collect::<Vec<_>>().join(","))
            }
            (None, other) => write!(f, "{other:?}"),
        }
    }
}

impl DeviceSpec {
    /// The default number of prompt tokens that this device computes together.
    pub fn chunk(self) -> usize {
        match self {
            DeviceSpec::Cuda(_) => 2048,
            DeviceSpec::Auto | DeviceSpec::Cpu | DeviceSpec::Metal | DeviceSpec::Sim(_) => 512,
            DeviceSpec::Several(several) => several.places().next().map_or(512, DeviceSpec::chunk),
        }
    }

    /// The devices of a list, or the one device.
    pub fn each(self) -> Vec<DeviceSpec> {
        match self {
            DeviceSpec::Several(several) => several.places().collect(),
            one => vec![one],
        }
    }

    /// Opens the device; a list is opened with the model's layers split between its devices.
    /// `threads` applies to the CPU; `None` means one for each physical core.
    ///
    /// # Errors
    /// This machine has no such device.
    pub fn open(self, threads: Option<usize>) -> Result<Box<dyn Device>> {
        match self {
            DeviceSpec::Auto => {
                let gpu = gpus().into_iter().find_map(|gpu| gpu.open(threads).ok());
                gpu.map_or_else(|| DeviceSpec::Cpu.open(threads), Ok)
            }
            DeviceSpec::Cpu => Ok(Box::new(cpu::Cpu::new(threads)?)),
            #[cfg(feature = "cuda")]
            DeviceSpec::Cuda(number) => {
                let cuda = crate::cuda::Cuda::new(crate::cuda::Gpu::open(number)?);
                Ok(Box::new(crate::gpu::GpuDevice::new(cuda)))
            }
            #[cfg(not(feature = "cuda"))]
            DeviceSpec::Cuda(_) => {
                Err(Error::new("cuda", "a build with the feature `cuda`", "one without"))
            }
            DeviceSpec::Metal => metal::open(),
            DeviceSpec::Sim(simulator) => simulated(simulator),
            DeviceSpec::Several(several) => {
                let devices = several.places().map(|place| place.open(threads));
                Ok(Box::new(Split::new(devices.collect::<Result<_>>()?, None)))
            }
        }
    }

    /// The GPU of this process where a launcher has started one for each rank, all with the name of
    /// this place: `cuda`, the first GPU, stands for the one that has the process's number on its
    /// machine, if the process may use several. `None` if it names several devices, which are then
    /// ranks of one process.
    ///
    /// # Errors
    /// A place that cannot be a rank, or no driver.
    pub fn of_rank(self, launch: &RankLaunch) -> Result<Option<DeviceSpec>> {
        match self {
            DeviceSpec::Several(_) => Ok(None),
            DeviceSpec::Auto | DeviceSpec::Cuda(0) => {
                let own = u32::try_from(launch.local_rank).unwrap_or(u32::MAX);
                Ok(Some(DeviceSpec::Cuda(if nvidia_gpus()? > 1 { own } else { 0 })))
            }
            DeviceSpec::Cuda(_) | DeviceSpec::Sim(Simulator::Interpreter | Simulator::Cuda) => {
                Ok(Some(self))
            }
            DeviceSpec::Cpu | DeviceSpec::Metal | DeviceSpec::Sim(Simulator::Metal) => {
                Err(no_rank(self))
            }
        }
    }

    /// Opens the device for the rank that this process is to be.
    ///
    /// # Errors
    /// A place that cannot be a rank, or that this machine does not have.
    pub(crate) fn candidate(self) -> Result<Box<dyn Candidate>> {
        match self {
            #[cfg(feature = "sim")]
            DeviceSpec::Sim(simulator) if simulator != Simulator::Metal => {
                Ok(Box::new(unranked(simulator)?))
            }
            #[cfg(feature = "cuda")]
            DeviceSpec::Cuda(number) => Ok(Box::new(crate::cuda::Gpu::open_primary(number)?)),
            other => Err(no_rank(other)),
        }
    }

    /// Opens several GPUs as tensor-parallel ranks; see [`SplitMode::Tensor`].
    ///
    /// # Errors
    /// A spec of one device, devices that this machine does not have, or GPUs without a way to
    /// communicate.
    pub fn open_ranks(self) -> Result<Box<dyn Device>> {
        let wrong = |found: String| {
            Err(Error::new("split mode tensor", "several NVIDIA GPUs: cuda:0,1", found))
        };
        let DeviceSpec::Several(several) = self else { return wrong(self.to_string()) };
        match several.kind {
            Kind::Sim(Simulator::Metal) => wrong(self.to_string()),
            Kind::Sim(simulator) => simulated_ranks(simulator, several.count),
            #[cfg(feature = "cuda")]
            Kind::Cuda => {
                let numbers = &several.numbers[..several.count];
                let (gpus, sums) = crate::cuda::Cuda::ranks(numbers)?;
                let device = |gpu| Box::new(crate::gpu::GpuDevice::new(gpu)) as Box<dyn Device>;
                let devices = gpus.into_iter().map(device).collect();
                Ok(Box::new(crate::ranks::Ranks::new(devices, std::sync::Arc::new(sums))))
            }
            #[cfg(not(feature = "cuda"))]
            Kind::Cuda => DeviceSpec::Cuda(0).open(None),
        }
    }
}

fn no_rank(place: DeviceSpec) -> Error {
    Error::new("split mode tensor", "an NVIDIA GPU for each rank", place)
}

/// Number of NVIDIA GPUs that this process may use.
///
/// # Errors
/// No driver, or a build without them.
fn nvidia_gpus() -> Result<u32> {
    #[cfg(feature = "cuda")]
    return crate::cuda::count();
    #[cfg(not(feature = "cuda"))]
    Err(Error::new("cuda", "a build with the feature `cuda`", "one without"))
}

/// Opens a simulated GPU, before it may become a rank. Ranks of Metal are interpreted.
///
/// # Errors
/// As [`simulated`].
#[cfg(feature = "sim")]
fn unranked(simulator: Simulator) -> Result<crate::gpu::sim::Sim> {
    use crate::gpu::sim::{KernelRunner, Sim};

    Sim::from_env(match simulator {
        Simulator::Cuda => KernelRunner::Cuda,
        Simulator::Interpreter | Simulator::Metal => KernelRunner::Interpreter,
    })
}

/// Opens a simulated GPU.
///
/// # Errors
/// A `DELFT_SIM_MEMORY` that cannot be parsed.
#[cfg(feature = "sim")]
fn simulated(simulator: Simulator) -> Result<Box<dyn Device>> {
    match simulator {
        Simulator::Metal => metal::simulated(),
        Simulator::Interpreter | Simulator::Cuda => {
            Ok(Box::new(crate::gpu::GpuDevice::new(unranked(simulator)?)))
        }
    }
}

/// Opens simulated GPUs as tensor-parallel ranks.
///
/// # Errors
/// As [`simulated`].
#[cfg(feature = "sim")]
fn simulated_ranks(simulator: Simulator, count: usize) -> Result<Box<dyn Device>> {
    let group = std::sync::Arc::new(crate::gpu::group::AllReduceGroup::new(count));
    let device = |rank: usize| -> Result<Box<dyn Device>> {
        let sim = unranked(simulator)?.in_group(group.clone(), rank);
        Ok(Box::new(crate::gpu::GpuDevice::new(sim)))
    };
    let devices = (0..count).map(device).collect::<Result<_>>()?;
    Ok(Box::new(crate::ranks::Ranks::new(devices, group)))
}

/// Opens a simulated GPU; this build has none.
///
/// # Errors
/// Always.
#[cfg(not(feature = "sim"))]
fn simulated(simulator: Simulator) -> Result<Box<dyn Device>> {
    let wanted = DeviceSpec::Sim(simulator).to_string();
    let error = Error::new(wanted, "a build with the feature `sim`", "one without");
    Err(error.of(formats::ErrorKind::Unsupported))
}

#[cfg(not(feature = "sim"))]
fn simulated_ranks(simulator: Simulator, _count: usize) -> Result<Box<dyn Device>> {
    simulated(simulator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_shown_alike() {
        for (name, shown) in [
            ("cuda:0,1", "cuda:0,1"),
            ("cuda:2,cuda:0,1", "cuda:2,0,1"),
            ("cuda,1", "cuda:0,1"),
            ("sim,sim,sim", "sim,sim,sim"),
            ("sim-metal,sim-metal", "sim-metal,sim-metal"),
        ] {
            let place: DeviceSpec = name.parse().unwrap();
            assert_eq!(place.to_string(), shown);
            assert_eq!(shown.parse::<DeviceSpec>().unwrap(), place);
            assert_eq!(place.each().len(), name.split(',').count());
        }
        let many = vec!["sim"; DeviceList::MOST + 1].join(",");
        for name in
            ["cuda:0,sim", "cpu,cuda", "auto,cuda", "metal,metal", "sim,1", "cuda:0,", ",", &many]
        {
            let why = name.parse::<DeviceSpec>().unwrap_err().to_string();
            assert!(why.starts_with("device: expected"), "{name}: {why}");
        }
    }
}
