//! Lowering of operations with a recurrent state: short convolutions, gated delta nets and selective
//! state spaces.

use formats::Result;
use ops::{DeltaNet, SelectiveScan, ShortConv, delta_net, selective_scan, short_conv};
use program::{BLOCK_TOKENS, StepKind, ValueId, WeightId};
use tile::launch::Numbers;

use super::{Recorder, Slot};

/// Rows of a prompt from which on shared memory brings them to walks over matrices.
const STAGED_ROWS: usize = 16;

impl Recorder<'_> {
    /// Whether walks over matrices take their rows from shared memory; bits do not depend on it.
    fn stages(&self) -> bool {
        self.key.kind == StepKind::Prompt && self.key.tokens >= STAGED_ROWS
    }

    /// The constants and buffers of every kernel that updates a part of a layer's state.
    fn states(&self, layer: usize) -> (Numbers, Vec<(&'static str, Slot)>) {
        let group = self.of.groups[layer];
        let numbers = Numbers::new()
            .with("tokens", self.key.tokens as u32)
            .with("batch", self.key.sequences as u32)
            .with("stride", self.key.strides[group] as u32)
            .with("block", BLOCK_TOKENS as u32)
            .with("size", self.of.program.layers[layer].state as u32);
        let bound = vec![
            ("positions", Slot::Words(self.words.positions.clone())),
            ("sequences", Slot::Words(self.words.sequences.clone())),
            ("starts", Slot::Words(self.words.starts.clone())),
            ("table", Slot::Words(self.words.tables[group].clone())),
            ("states", Slot::Cache(layer, 0)),
        ];
        (numbers, bound)
    }

    pub(super) fn short_conv(
        &mut self,
        op: &ShortConv,
        x: ValueId,
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let (step, mut bound) = self.states(op.layer);
        bound.extend([("x", self.value(x)), ("y", self.value(y))]);
        let vectors = ["taps", "bias"].into_iter().zip(weights);
        bound.extend(vectors.map(|(name, &weight)| (name, self.weight(weight))));
        let size = self.of.program.layers[op.layer].state;
        let form = short_conv::ConvForm::of(op, weights.len() > 1, size);
        self.push(short_conv::short_conv(form), short_conv::numbers(op, step), &bound)
    }

    pub(super) fn delta_net(
        &mut self,
        op: &DeltaNet,
        inputs: &[ValueId],
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let (step, mut bound) = self.states(op.layer);
        let values = ["qkv", "a", "b"].into_iter().zip(inputs);
        bound.extend(values.map(|(name, &value)| (name, self.value(value))));
        let vectors = ["decay", "dt"].into_iter().zip(weights);
        bound.extend(vectors.map(|(name, &weight)| (name, self.weight(weight))));
        bound.push(("y", self.value(y)));
        let size = self.of.program.layers[op.layer].state;
        let form = delta_net::DeltaForm::of(op, size)?;
        let form = if self.stages() { form.for_many(op, size) } else { form };
        self.push(delta_net::delta_net(form), delta_net::numbers(op, step), &bound)
    }

    pub(super) fn selective_scan(
        &mut self,
        op: &SelectiveScan,
        inputs: &[ValueId],
        weights: &[WeightId],
        y: ValueId,
    ) -> Result<()> {
        let (step, mut bound) = self.states(op.layer);
        let (read, held): (&[_], &[_]) = match op.by_element {
            true => (&["x", "step", "b", "c"], &["decay", "skip"]),
            false => (&["xbc", "dt"], &["decay", "bias", "skip"]),
        };
        bound.extend(read.iter().zip(inputs).map(|(name, &value)| (*name, self.value(value))));
        bound.extend(held.iter().zip(weights).map(|(name, &weight)| (*name, self.weight(weight))));
        bound.push(("y", self.value(y)));
        let size = self.of.program.layers[op.layer].state;
        let form = selective_scan::ScanForm::of(op, size)?;
        let form = if self.stages() { form.for_many(op, size) } else { form };
        self.push(selective_scan::kernel(form), selective_scan::numbers(op, step), &bound)
    }
}
