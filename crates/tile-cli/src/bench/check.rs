//! Test cases on a real GPU: as written, with constants as template values, and specialised, as the
//! engine runs them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use device::cuda;
use tile::Kernel;
use tile::case::{Buffer, Case};
use tile::ir::{Access, ParamKind};
use tile::passes::{self, Target};

/// Bytes on both sides of each buffer that no kernel may touch.
const MARGIN: usize = 256;
/// The byte they are filled with: no sensible number in any type.
const MARK: u8 = 0xA5;

/// A GPU that runs test cases.
pub(crate) struct Gpu {
    /// None between losing one and opening the next.
    gpu: Option<cuda::Gpu>,
    /// Forms that were lowered ahead, by [`key`].
    ready: HashMap<String, Vec<Result<Form, String>>>,
}

impl Gpu {
    pub(crate) fn on(gpu: cuda::Gpu) -> Gpu {
        Gpu { gpu: Some(gpu), ready: HashMap::new() }
    }

    /// Lowers and compiles what these cases need on all cores.
    pub(crate) fn ahead(&mut self, cases: &[Case]) {
        let Some(gpu) = &self.gpu else { return };
        let ready = Mutex::new(HashMap::new());
        gpu.compiler().ahead(cases, |case| {
            let forms = forms(case);
            // What cannot be lowered or printed is reported when its case runs.
            let lowered = forms.iter().flatten();
            let texts = lowered.filter_map(|(_, k)| cuda::Gpu::source(k, &case.numbers).ok());
            let texts = texts.collect();
            ready.lock().unwrap_or_else(PoisonError::into_inner).insert(key(case), forms);
            texts
        });
        self.ready = ready.into_inner().unwrap_or_else(PoisonError::into_inner);
    }

    /// Runs a case in both forms; the largest relative error. A kernel that breaks the context
    /// costs its own case only, if another context can be had.
    pub(crate) fn check(&mut self, case: &Case) -> Result<f64, String> {
        let gpu = match self.gpu.take() {
            Some(gpu) => gpu,
            None => reopen(),
        };
        let mut worst: f64 = 0.0;
        let mut outcome = Ok(());
        for form in self.ready.remove(&key(case)).unwrap_or_else(|| forms(case)) {
            let checked = form.and_then(|(name, kernel)| {
                run(&gpu, case, &kernel).map_err(|e| format!("{name}: {e}"))
            });
            match checked {
                Ok(error) => worst = worst.max(error),
                Err(why) => {
                    outcome = Err(why);
                    break;
                }
            }
        }
        if !gpu.lost() {
            self.gpu = Some(gpu);
        }
        outcome.map(|()| worst)
    }
}

/// A GPU after the one before was lost. The driver may not allow that: then nothing more can be
/// run.
fn reopen() -> cuda::Gpu {
    let works = |gpu: &cuda::Gpu| gpu.upload(&[1; 64]).and_then(|b| b.to_vec()).is_ok();
    match cuda::Gpu::open(0) {
        Ok(gpu) if works(&gpu) => gpu,
        _ => {
            println!("the GPU's context is lost, and the driver gives no other: stopping here");
            std::process::exit(1)
        }
    }
}

/// A kernel and what was done to its constants.
type Form = (&'static str, Kernel);

/// The properties of a case that its forms depend on.
fn key(case: &Case) -> String {
    format!("{} {} {:?}", case.kernel.name, case.label, case.numbers)
}

/// The kernel of a case as it can be launched: with its constants, and, if it has any, without.
fn forms(case: &Case) -> Vec<Result<Form, String>> {
    let lowered = |name, kernel: &Kernel| {
        let lowered = passes::lower(kernel, Target::Cuda);
        lowered.map(|kernel| (name, kernel)).map_err(|e| format!("{name}: {e}"))
    };
    let mut forms = vec![lowered("as written", &case.kernel)];
    if !case.kernel.constants.is_empty() {
        let special = passes::specialise(&case.kernel, &case.numbers);
        forms.push(lowered("specialised", &special));
    }
    forms
}

fn run(gpu: &cuda::Gpu, case: &Case, kernel: &Kernel) -> Result<f64, String> {
    let line = |e: formats::Error| e.to_string();
    let pipeline = gpu.load(kernel, &case.numbers).map_err(line)?;
    let mut whole = Vec::new();
    let mut inner = Vec::new();
    for buffer in &case.buffers {
        let mut bytes = vec![MARK; buffer.bytes.len() + 2 * MARGIN];
        bytes[MARGIN..MARGIN + buffer.bytes.len()].copy_from_slice(&buffer.bytes);
        let on_device = gpu.upload(&bytes).map_err(line)?;
        inner.push(on_device.part(MARGIN..MARGIN + buffer.bytes.len()).map_err(line)?);
        whole.push(on_device);
    }
    pipeline.launch(&case.numbers, &inner).map_err(line)?;
    gpu.synchronize().map_err(line)?;
    let mut after = Vec::new();
    for (buffer, on_device) in case.buffers.iter().zip(&whole) {
        let bytes = on_device.to_vec().map_err(line)?;
        let end = MARGIN + buffer.bytes.len();
        let outside = bytes[..MARGIN].iter().chain(&bytes[end..]);
        if outside.clone().any(|b| *b != MARK) {
            return Err(format!("buffer {}: written outside its bounds", after.len()));
        }
        after.push(Buffer { scalar: buffer.scalar, bytes: bytes[MARGIN..end].to_vec() });
    }
    unchanged(kernel, case, &after)?;
    case.check(&after)
}

/// Inputs are what they were.
fn unchanged(kernel: &Kernel, case: &Case, after: &[Buffer]) -> Result<(), String> {
    let buffers = kernel.params.iter().filter_map(|p| match p.kind {
        ParamKind::Buffer { access, .. } => Some((&p.name, access)),
        ParamKind::Argument(_) => None,
    });
    for ((name, access), (before, after)) in buffers.zip(case.buffers.iter().zip(after)) {
        if access == Access::In && before.bytes != after.bytes {
            return Err(format!("the input `{name}` was changed"));
        }
    }
    Ok(())
}
