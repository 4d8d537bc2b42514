//! The device with every instruction set of this machine.

use super::*;
use crate::CacheType;
use crate::tests::together::{Case, SEQUENCES, compare};

/// A CPU on which only so many workers decode, as where other programs use processors.
struct Part {
    cpu: Cpu,
    workers: usize,
}

impl Device for Part {
    fn about(&self) -> About {
        self.cpu.about()
    }

    fn check(&self, program: &Program) -> Result<()> {
        self.cpu.check(program)
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>> {
        self.cpu.plan(program, tensors, options)
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        self.cpu.load_at(Pace::always(self.workers), program, tensors, options, progress)
    }

    fn shared(&self) -> usize {
        self.cpu.shared()
    }
}

/// A row that decodes alone is computed without sorting pairs of rows and experts, with adapters as
/// without.
#[test]
fn adapters_of_experts_give_a_row_the_same_bits_whatever_is_beside_it() {
    for &isa in Isa::available() {
        let cpu = |threads| {
            let team = Arc::new(Team::new(threads).unwrap());
            Cpu { team, smaller: halves(threads / 2), isa, store: weights::Store::default() }
        };
        let cpus = [1, 2, 3].map(cpu);
        for model in ["mixtral/model.q8_0-split.gguf", "qwen3-moe", "gpt-oss", "gemma4-moe"] {
            let (cache_type, batched, adapted) = (CacheType::F32, false, true);
            let (count, longest, sequences, close) = (12, 40, 5, 0.0);
            let case =
                Case { model, cache_type, count, longest, batched, sequences, close, adapted };
            compare(case, &cpus[0], &[&cpus[1], &cpus[2]]);
        }
    }
}

/// Also whatever the number of threads is, and of those that decode: floats are added in an order
/// that follows from a row's kind.
#[test]
fn sequences_compute_together_what_each_computes_alone() {
    for &isa in Isa::available() {
        let cpu = |threads| {
            let team = Arc::new(Team::new(threads).unwrap());
            let store = weights::Store::default();
            Cpu { team, smaller: halves(threads / 2), isa, store }
        };
        let part = Part { cpu: cpu(4), workers: 3 };
        let (one, others) = (cpu(1), [cpu(2), cpu(3)]);
        // Portable code is slow, and has no paths that the others have not.
        let count = if isa == Isa::Scalar { 20 } else { 64 };
        for (model, cache_type) in [
            ("llama3", CacheType::F32),
            ("qwen3/model.q8_0.gguf", CacheType::F16),
            ("llama-k-quants/model.q4_k_m.gguf", CacheType::F16),
            ("mistral-full/model.f16.gguf", CacheType::F16),
            ("mistral-long", CacheType::BF16),
            ("deepseek_v32-chosen", CacheType::F16),
            ("qwen3.5", CacheType::F32),
            ("qwen3.5-long", CacheType::F16),
            ("qwen3-next", CacheType::F16),
            ("granite4-hybrid", CacheType::F16),
            ("qwen3-moe", CacheType::F32),
            ("gpt-oss", CacheType::F16),
            ("mixtral/model.q8_0-split.gguf", CacheType::F16),
        ] {
            let (batched, sequences) = (false, SEQUENCES);
            let (longest, close, adapted) = (290, 0.0, false);
            let case =
                Case { model, cache_type, count, longest, batched, sequences, close, adapted };
            compare(case, &one, &[&others[0], &others[1], &part]);
        }
    }
}
