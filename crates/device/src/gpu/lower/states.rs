//! Lowering of operations with a recurrent state: short convolutions and gated delta nets.

use formats::Result;
use ops::{DeltaNet, ShortConv, delta_net, short_conv};
use program::{BLOCK_TOKENS, ValueId, WeightId};
use tile::launch::Numbers;

use super::{Recorder, Slot};

impl Recorder<'_> {
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
        taps: WeightId,
        y: ValueId,
    ) -> Result<()> {
        let (step, mut bound) = self.states(op.layer);
        bound.extend([("x", self.value(x)), ("taps", self.weight(taps)), ("y", self.value(y))]);
        let form = short_conv::ConvForm::of(op, self.of.program.layers[op.layer].state);
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
        let form = delta_net::DeltaForm::of(op, self.of.program.layers[op.layer].state)?;
        self.push(delta_net::delta_net(form), delta_net::numbers(op, step), &bound)
    }
}
