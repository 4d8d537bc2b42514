//! Kernels of the classes of steps that are to be expected, recorded, lowered and compiled before
//! the first such step: the usual ones while weights are read, those for other numbers of rows once
//! the model is loaded. So no request waits for either.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

use program::{BLOCK_TOKENS, Limits, StepKind};

use super::LEAST_LENGTH;
use crate::gpu::arena::{Layout, decode_bucket};
use crate::gpu::kernels::Kernels;
use crate::gpu::lower::{Adapted, Key, Lowering, Samples};
use crate::gpu::sizes::stride;
use crate::gpu::{Backend, LIBRARY_ROWS};

/// The classes of the usual steps: a full chunk of a prompt, a token, and a token whose successor
/// the device chooses; each with adapters, too, where there is room for them: the first may come
/// while other requests generate.
pub(super) fn usual(lowering: &Lowering, limits: &Limits) -> Vec<Key> {
    let mut usual = vec![(StepKind::Prompt, limits.tokens, None), (StepKind::Decode, 1, None)];
    if lowering.chooses() {
        let seat = (!lowering.batched).then_some(0);
        let samples = |filters| Some(Samples { filters, seat, alone: false });
        usual.extend([false, true].map(|filters| (StepKind::Decode, 1, samples(filters))));
    }
    let adapted = [Adapted::No, Adapted::Plain];
    let adapted = &adapted[..if lowering.adapters.count > 0 { 2 } else { 1 }];
    let key = |(kind, tokens, samples)| {
        let length = if lowering.batched { LEAST_LENGTH } else { BLOCK_TOKENS };
        adapted.iter().map(move |adapted| Key {
            samples,
            adapted: *adapted,
            ..of_one(lowering, kind, tokens, length)
        })
    };
    usual.into_iter().flat_map(key).collect()
}

/// A class of steps of one sequence, which chooses nothing.
pub(super) fn of_one(lowering: &Lowering, kind: StepKind, tokens: usize, length: usize) -> Key {
    Key {
        kind: lowering.kind(kind, tokens),
        tokens,
        outputs: usize::from(lowering.chooses()),
        sequences: 1,
        strides: vec![stride(1, false); lowering.program.groups().len()],
        length,
        samples: None,
        adapted: Adapted::No,
    }
}

/// A class of prompts that the vendor's library computes.
pub(super) fn prompts(lowering: &Lowering, limits: &Limits) -> Key {
    let tokens = if lowering.batched { LIBRARY_ROWS } else { limits.tokens };
    of_one(lowering, StepKind::Prompt, tokens, BLOCK_TOKENS)
}

/// The classes of steps in which as many sequences decode as there may be, and fewer.
fn together(lowering: &Lowering, limits: &Limits) -> Vec<Key> {
    if !lowering.batched || !lowering.chooses() {
        return vec![];
    }
    let mut rows: Vec<usize> = (2..=limits.sequences).map(decode_bucket).collect();
    rows.dedup();
    let key = |rows: usize| {
        let samples = |filters| Some(Samples { filters, seat: None, alone: false });
        [false, true].map(|filters| Key {
            outputs: rows.min(limits.outputs),
            sequences: rows,
            samples: samples(filters),
            ..of_one(lowering, StepKind::Decode, rows, LEAST_LENGTH)
        })
    };
    rows.into_iter().flat_map(key).collect()
}

/// Records and compiles the kernels of a class. What cannot be is reported when it is used.
pub(super) fn prepare<B: Backend>(
    backend: &B,
    lowering: &Lowering,
    key: &Key,
    kernels: &mut Kernels,
) {
    let first = kernels.all.len();
    let layout = Layout::new(lowering, key.kind, key.tokens, key.outputs);
    drop(lowering.launches(key, &layout, kernels));
    kernels.compile(backend, first);
}

/// Kernels that are prepared on a thread of their own; no more of them once this is dropped.
pub(super) struct Ahead {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ahead {
    /// Prepares the kernels for any number of sequences that decode together.
    pub(super) fn start<B: Backend>(
        backend: &Arc<B>,
        lowering: &Lowering,
        limits: &Limits,
    ) -> Option<Ahead> {
        let keys = together(lowering, limits);
        if keys.is_empty() {
            return None;
        }
        let (backend, lowering) = (Arc::clone(backend), lowering.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            let mut kernels = Kernels::default();
            for key in keys {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                prepare(&*backend, &lowering, &key, &mut kernels);
            }
        };
        // Without a thread, kernels are prepared when they are used.
        let thread = Builder::new().name("kernels".into()).stack_size(8 << 20).spawn(work).ok()?;
        Some(Ahead { stop, thread: Some(thread) })
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It ends with the class that it is at; nothing depends on how.
            drop(thread.join());
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use ops::sample::Options;
    use program::{Choose, Sequence, Step, Table};

    use super::*;
    use crate::gpu::executor::GpuExecutor;
    use crate::gpu::sim::{KernelRunner, Sim};
    use crate::gpu::weights::Store;
    use crate::tests::recorded;
    use crate::{Executor, ExecutorOptions};

    /// Replays a step of several sequences, which all choose if they decode.
    fn replay(executor: &mut GpuExecutor<Sim>, kind: StepKind, each: usize, sequences: usize) {
        let options = Options { top_k: 5, ..Options::default() };
        let choose = Choose { options: &options, history: &[], mask: None, logprobs: None };
        let blocks: Vec<[u32; 1]> = (0..sequences as u32).map(|block| [block]).collect();
        let tables: Vec<[Table<'_>; 1]> =
            blocks.iter().map(|blocks| [Table { blocks, oldest: 0 }]).collect();
        let choose = (kind == StepKind::Decode).then_some(&choose);
        let sequences: Vec<Sequence<'_>> = (0..)
            .zip(&tables)
            .map(|(slot, tables)| Sequence { slot, choose, ..Sequence::new(each, 0, tables) })
            .collect();
        let tokens = vec![7; each * sequences.len()];
        let outputs: Vec<u32> = (1..=sequences.len() * each)
            .filter(|row| row.is_multiple_of(each))
            .map(|row| row as u32 - 1)
            .collect();
        let step =
            Step { kind, tokens: &tokens, sequences: &sequences, outputs: &outputs, input: &[] };
        let ticket = executor.submit(&step).unwrap();
        executor.wait(ticket).unwrap();
    }

    #[test]
    fn the_kernels_of_usual_steps_and_of_any_number_of_sequences_are_prepared() {
        let most = 12;
        for batched in [false, true] {
            let (program, tensors) = recorded("llama-k-quants/model.q4_k_m.gguf");
            let options = ExecutorOptions {
                rows: (32, most),
                sequences: if batched { most } else { 1 },
                blocks: vec![most; program.groups().len()],
                context: vec![1; program.groups().len()],
                batched,
                ..ExecutorOptions::default()
            };
            let (backend, store) =
                (Arc::new(Sim::new(KernelRunner::Interpreter)), Store::<Sim>::default());
            let mut executor =
                GpuExecutor::load(backend, program, &tensors, options, &store, &mut |_, _| {})
                    .unwrap();
            let mut prepared = Kernels::default();
            let GpuExecutor { backend, lowering, limits, .. } = &executor;
            for key in usual(lowering, limits).iter().chain(&together(lowering, limits)) {
                prepare(&**backend, lowering, key, &mut prepared);
            }
            replay(&mut executor, StepKind::Prompt, 32, 1);
            for sequences in 1..=if batched { most } else { 1 } {
                replay(&mut executor, StepKind::Decode, 1, sequences);
            }
            assert!(executor.kernels.all.len() > 10);
            for kernel in &executor.kernels.all {
                let name = &kernel.name;
                assert!(prepared.all.contains(kernel), "{name} comes as a surprise: {batched}");
            }
        }
    }
}
