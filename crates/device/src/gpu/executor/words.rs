//! The host's input of a step: the words of its class, its input, and the inputs of sampling.

use formats::Result;
use program::Step;

use super::{Class, GpuExecutor};
use crate::gpu::Backend;
use crate::gpu::lower::Sampling;
use crate::gpu::run::Staged;

impl<B: Backend> GpuExecutor<B> {
    /// Writes the step's words, its input, and the inputs of sampling to the buffers of its class.
    pub(in crate::gpu) fn stage(
        &mut self,
        class: &Class<B>,
        step: &Step<'_>,
        choosing: Staged<'_>,
    ) -> Result<()> {
        let at = &class.words;
        self.staged.clear();
        self.staged.resize(at.bytes, 0);
        let mut put = |range: &std::ops::Range<usize>, values: &[u32]| {
            let to = self.staged[range.clone()].chunks_exact_mut(4);
            to.zip(values).for_each(|(to, value)| to.copy_from_slice(&value.to_le_bytes()));
        };
        put(&at.tokens, step.tokens);
        put(&at.outputs, step.outputs);
        let (idle, rows) = (self.lowering.idle_blocks() as u32, class.rows);
        let stride = |range: &std::ops::Range<usize>| range.len() / 4 / class.sequences;
        let word = |range: &std::ops::Range<usize>, i: usize| range.start + 4 * i..range.end;
        for (number, (first, sequence)) in step.placed().enumerate() {
            for row in 0..sequence.rows {
                put(&word(&at.positions, first + row as usize), &[sequence.start + row]);
                put(&word(&at.sequences, first + row as usize), &[number as u32]);
                if self.lowering.batched {
                    put(&word(&at.slots, first + row as usize), &[sequence.slot]);
                }
            }
            if sequence.adapter > 0 {
                let [rows, outputs, order] = &at.adapters;
                for row in first..first + sequence.rows as usize {
                    put(&word(rows, row), &[sequence.adapter]);
                    put(&word(order, row), &[sequence.adapter - 1]);
                }
                let own = first as u32..first as u32 + sequence.rows;
                for (i, _) in step.outputs.iter().enumerate().filter(|(_, row)| own.contains(*row))
                {
                    put(&word(outputs, i), &[sequence.adapter]);
                }
            }
            put(&word(&at.starts, number), &[first as u32, first as u32 + sequence.rows]);
            for (range, table) in at.tables.iter().zip(sequence.tables) {
                let entries = number * stride(range)..;
                for (entry, block) in entries.zip(table.blocks) {
                    put(&word(range, entry), &[block + idle]);
                }
            }
        }
        // Idle rows are the first rows of a sequence whose only block, 0, is reserved for them:
        // they write to places of their own and read few keys.
        for (position, row) in (step.tokens.len()..rows).enumerate() {
            put(&word(&at.positions, row), &[position as u32]);
            put(&word(&at.sequences, row), &[step.sequences.len() as u32]);
        }
        match choosing {
            Staged::Nothing => {}
            Staged::Run(run) => {
                put(&at.settings, run.settings);
                put(&at.span, &[run.span]);
            }
            Staged::Rows { settings, targets, .. } => {
                put(&at.settings, settings);
                put(&at.targets, targets);
            }
        }
        let GpuExecutor { backend, ring, words, staged, sizes, chooser, .. } = self;
        let words = (&words[class.region], &staged[..]);
        match choosing {
            Staged::Run(run) => {
                let history = chooser.buffer(Sampling::History, run.seat)?;
                let biases = chooser.buffer(Sampling::Biases, run.seat)?;
                let masks = chooser.buffer(Sampling::Masks, run.seat)?;
                let beside = run.beside;
                let (history, biases) =
                    ((&history, &beside.window[..]), (&biases, &beside.biases[..]));
                let pieces = [words, history, biases, (&masks, &beside.mask)];
                ring.send(&**backend, sizes.slot, &pieces)?;
            }
            Staged::Rows { masks, .. } if !masks.is_empty() => {
                let to = chooser.buffer(Sampling::Masks, 0)?;
                ring.send(&**backend, sizes.slot, &[words, (&to, masks)])?;
            }
            Staged::Nothing | Staged::Rows { .. } => {
                ring.send(&**backend, sizes.slot, &[words])?;
            }
        }
        let Some(input) = &class.input else { return Ok(()) };
        if let Some(source) = &self.source {
            return source.take(&self.backend, input);
        }
        self.staged.clear();
        self.staged.extend(step.input.iter().flat_map(|x| x.to_le_bytes()));
        self.backend.write(input, &self.staged)
    }
}
