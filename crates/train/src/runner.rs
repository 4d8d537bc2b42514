//! Where Programs in training are run: on the CPU, or on another device.

use crate::packing::Packing;
use crate::{Batch, cpu};
use device::{DeviceSpec, Divided, Kept, PackedRows, Precision, TrainOptions, Trainer};
use formats::{DType, Error, Result, Tensors};
use program::{Program, WeightId};
use std::collections::BTreeMap;

/// The hardware that a model is trained on. A number of threads means the CPU with that many;
/// `None` means one for each physical core.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Hardware {
    /// The device; `auto` is a GPU if there is one. Several share the sequences of each batch.
    pub place: DeviceSpec,
    /// Threads of the CPU.
    pub threads: Option<usize>,
    /// The precision of activations. With [`Precision::BF16`] the CPU's tile unit rounds them in
    /// products; what else a CPU computes is f32 in any case.
    pub precision: Precision,
}

/// The precision that suits a model: f32 where most of its matrices' bytes are f32, else bf16.
pub fn usual_precision(tensors: &Tensors) -> Precision {
    let [mut whole, mut all] = [0u64; 2];
    for tensor in tensors.iter().filter(|tensor| tensor.shape.len() > 1) {
        all += tensor.bytes.len() as u64;
        whole += if tensor.dtype == DType::F32 { tensor.bytes.len() as u64 } else { 0 };
    }
    if whole > all / 2 { Precision::F32 } else { Precision::BF16 }
}

impl From<Option<usize>> for Hardware {
    fn from(threads: Option<usize>) -> Hardware {
        Hardware { threads, ..Hardware::default() }
    }
}

/// Programs of the same weights on a device, by their numbers.
pub(crate) enum Runner {
    Cpu { executor: Box<cpu::CpuExecutor>, weights: cpu::FloatWeights, programs: Vec<Program> },
    Device { trainer: Box<dyn Trainer>, trained: Vec<WeightId>, programs: Vec<Program> },
}

/// The results of a run.
pub(crate) enum Results<'a> {
    Cpu(Box<cpu::Results<'a>>),
    Device { losses: &'a [f32], gradients: Vec<Vec<f32>> },
}

impl Results<'_> {
    /// A result, row-major.
    pub(crate) fn get(&self, index: usize) -> &[f32] {
        match self {
            Results::Cpu(results) => results.get(index),
            Results::Device { losses, .. } if index == 0 => losses,
            Results::Device { gradients, .. } => &gradients[index - 1],
        }
    }
}

impl Runner {
    /// Loads Programs, of which the last has all weights; those that are `trained` are
    /// [set](Runner::set), and other devices than the CPU divide some of them.
    ///
    /// # Errors
    /// A device that there is not, an operation that it has not in training, weights that cannot be
    /// read, too little memory.
    pub(crate) fn new(
        programs: Vec<Program>,
        tensors: &Tensors,
        (trained, divided): (Vec<WeightId>, Vec<Divided>),
        hardware: Hardware,
    ) -> Result<Runner> {
        let Hardware { place, threads, precision } = hardware;
        let gpu = || device::gpus().first().copied().unwrap_or(DeviceSpec::Cpu);
        let place = if place == DeviceSpec::Auto { gpu() } else { place };
        if place != DeviceSpec::Cpu {
            let options = TrainOptions {
                programs: programs.clone(),
                trained: trained.clone(),
                divided,
                precision,
            };
            let device = match place {
                DeviceSpec::Several(_) => place.open_ranks()?,
                _ => place.open(threads)?,
            };
            let trainer = device.train(tensors, options)?;
            return Ok(Runner::Device { trainer, trained, programs });
        }
        programs.iter().try_for_each(cpu::check)?;
        let executor = Box::new(cpu::CpuExecutor::new(threads, precision)?);
        let read: Vec<&Program> = programs.iter().collect();
        let weights = cpu::FloatWeights::read(&read, tensors, &trained, executor.team())?;
        Ok(Runner::Cpu { executor, weights, programs })
    }

    /// A Program.
    pub(crate) fn program(&self, number: usize) -> &Program {
        match self {
            Runner::Cpu { programs, .. } | Runner::Device { programs, .. } => &programs[number],
        }
    }

    /// Puts another Program of the same weights in the place of one.
    ///
    /// # Errors
    /// An operation that the device has not.
    pub(crate) fn replace(&mut self, number: usize, program: Program) -> Result<()> {
        let programs = match self {
            Runner::Cpu { programs, .. } => programs,
            Runner::Device { trainer, programs, .. } => {
                trainer.replace(number, program.clone())?;
                programs
            }
        };
        programs[number] = program;
        Ok(())
    }

    /// Gives a trained weight its values, row-major.
    ///
    /// # Errors
    /// Too little memory.
    pub(crate) fn set(&mut self, id: WeightId, shape: &[usize], values: &[f32]) -> Result<()> {
        match self {
            Runner::Cpu { executor, weights, .. } => weights.set(id, shape, values, executor),
            Runner::Device { trainer, .. } => trainer.write(id, Kept::Values, values),
        }
    }

    /// Runs a Program.
    ///
    /// # Errors
    /// Too little memory; tokens outside the tables; a batch whose parts do not agree.
    pub(crate) fn run<'a>(&'a mut self, number: usize, batch: &'a Batch) -> Result<Results<'a>> {
        match self {
            Runner::Cpu { executor, weights, programs } => {
                Ok(Results::Cpu(Box::new(executor.run(&programs[number], weights, batch)?)))
            }
            Runner::Device { trainer, trained, programs } => {
                run(&mut **trainer, number, &programs[number], batch)?;
                let has = programs[number].results.len() > 1;
                let weights = &programs[number].weights;
                let gradient = |id: &WeightId| {
                    let mut row = vec![0.0; weights[id.0].shape.iter().product()];
                    trainer.read(*id, Kept::Gradient, &mut row)?;
                    Ok(row)
                };
                let own = trained.iter().filter(|_| has);
                let gradients = own.map(gradient).collect::<Result<_>>()?;
                Ok(Results::Device { losses: trainer.losses()?, gradients })
            }
        }
    }

    /// Runs a Program on a device that keeps its gradients, and gives the losses.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub(crate) fn run_there(&mut self, number: usize, batch: &Batch) -> Result<&[f32]> {
        let (trainer, programs) = self.device()?;
        run(trainer, number, &programs[number], batch)?;
        trainer.losses()
    }

    /// The trainer of the device.
    ///
    /// # Errors
    /// If it is the CPU.
    pub(crate) fn trainer(&mut self) -> Result<&mut dyn Trainer> {
        Ok(self.device()?.0)
    }

    fn device(&mut self) -> Result<(&mut dyn Trainer, &[Program])> {
        match self {
            Runner::Cpu { .. } => {
                Err(Error::new("train", "a device that makes updates", "the CPU"))
            }
            Runner::Device { trainer, programs, .. } => Ok((&mut **trainer, programs)),
        }
    }

    /// Whether Programs are run by another device than the CPU.
    pub(crate) fn is_device(&self) -> bool {
        matches!(self, Runner::Device { .. })
    }

    /// Bytes that a run of a Program takes beside the weights, for `tokens` tokens of which
    /// `outputs` are to predict something.
    pub(crate) fn bytes(&self, number: usize, tokens: usize, outputs: usize) -> usize {
        match self {
            Runner::Cpu { programs, .. } => {
                cpu::CpuExecutor::bytes(&programs[number], tokens, outputs)
            }
            Runner::Device { trainer, .. } => trainer.bytes(number, tokens, outputs),
        }
    }

    /// Bytes of the device's own memory that updates take there beside the weights.
    pub(crate) fn update_bytes(&self) -> usize {
        match self {
            Runner::Cpu { .. } => 0,
            Runner::Device { trainer, .. } => trainer.update_bytes(),
        }
    }

    /// Bytes of the device's own memory that are left for runs; none where that is the machine's,
    /// or cannot be told.
    ///
    /// # Errors
    /// If the device does not answer.
    pub(crate) fn free(&self) -> Result<Option<usize>> {
        match self {
            Runner::Cpu { .. } => Ok(None),
            Runner::Device { trainer, .. } => trainer.free(),
        }
    }

    /// The seconds that each operation of the last run took; none where that cannot be told.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>> {
        match self {
            Runner::Cpu { executor, .. } => Ok(Some(executor.time())),
            Runner::Device { trainer, .. } => trainer.time(),
        }
    }

    /// Usage of the device's own memory, now and at its peak.
    pub(crate) fn usage(&self) -> Option<device::Usage> {
        match self {
            Runner::Cpu { .. } => None,
            Runner::Device { trainer, .. } => trainer.memory().device,
        }
    }
}

/// Runs a Program on a device.
fn run(trainer: &mut dyn Trainer, number: usize, program: &Program, batch: &Batch) -> Result<()> {
    let packing = Packing::new(batch)?;
    packing.fits(program, batch)?;
    let rows = PackedRows {
        tokens: &batch.tokens,
        positions: &packing.positions,
        first: &packing.first,
        targets: &batch.targets,
        counts: &batch.weights,
        draws: &packing.draws,
        picks: &packing.picks,
    };
    trainer.run(number, &rows)
}
