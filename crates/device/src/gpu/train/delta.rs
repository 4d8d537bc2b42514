//! Gated delta nets in training: the arrays between their kernels, and the launches.

use formats::{Hint, Result, Setting};
use ops::gradient::delta::kernels::{
    delta_gates, delta_operands, delta_rates, delta_slopes, delta_states, delta_weights, form,
    numbers, packed_delta,
};
use ops::gradient::matrices::PackedForm;
use ops::gradient::{Gradient, products};
use ops::{DeltaNet, Op};
use program::{Node, ValueId};
use tile::launch::Numbers;

use super::layout::Counts;
use super::lower::Recorder;
use super::states::{block, place};
use crate::gpu::lower::Slot;

/// An array between the kernels, of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Array {
    Rates,
    Misses,
    Before,
    Behind,
    OfValues,
    Slopes,
    Along,
    Terms,
}

const ARRAYS: [Array; 8] = [
    Array::Rates,
    Array::Misses,
    Array::Before,
    Array::Behind,
    Array::OfValues,
    Array::Slopes,
    Array::Along,
    Array::Terms,
];

/// Elements of an array.
fn elements(array: Array, of: &DeltaNet, tokens: usize) -> usize {
    let (heads, blocks) = (tokens * of.heads, tokens.div_ceil(block(tokens)) * of.heads);
    match array {
        Array::Rates => heads * 4,
        Array::Misses | Array::OfValues => heads * of.value_dim,
        Array::Before | Array::Behind => blocks * of.key_dim * of.value_dim,
        Array::Slopes => heads * 2 * of.key_dim,
        Array::Along => blocks * of.key_dim,
        Array::Terms => heads,
    }
}

/// The elements of an array and of those in front of it.
fn up_to(array: Array, of: &DeltaNet, tokens: usize) -> impl Iterator<Item = usize> {
    ARRAYS[..=array as usize].iter().map(move |own| elements(*own, of, tokens))
}

/// Bytes of the arrays of a node.
pub(super) fn bytes(node: &Node, counts: Counts) -> usize {
    let (of, last) = match &node.op {
        Op::Gradient(Gradient::PackedDelta(of)) => (of.0, Array::Rates),
        Op::Gradient(Gradient::DeltaBackward(of)) => (of.0, Array::Terms),
        _ => return 0,
    };
    place(up_to(last, &of, counts.tokens)).end
}

/// Refuses heads that do not fit a simdgroup's registers.
pub(super) fn check(of: &DeltaNet) -> Result<()> {
    let refused = |error: formats::Error| error.hint(Hint::set(Setting::Place, "cpu"));
    form(of, false).map(|_| ()).map_err(refused)
}

/// The slots of a net's weights, if it has any.
fn weights(node: &Node) -> impl Iterator<Item = (&'static str, Slot)> {
    ["decay", "dt"].into_iter().zip(&node.weights).map(|(name, id)| (name, Slot::Weight(id.0)))
}

impl Recorder<'_> {
    fn delta_array(&self, array: Array, of: &DeltaNet) -> Slot {
        let own = place(up_to(array, of, self.counts.tokens));
        let start = self.layout.states.start;
        Slot::Arena(start + own.start..start + own.end)
    }

    fn delta_numbers(&self, of: &DeltaNet) -> Numbers {
        let Counts { tokens, sequences, .. } = self.counts;
        numbers(of, tokens, sequences, block(tokens))
    }

    /// Records what the other kernels need of each row, and returns their form.
    fn delta_rates(&mut self, of: &DeltaNet, node: &Node) -> Result<PackedForm> {
        let form = form(of, false)?;
        let [qkv, a, b] = [0, 1, 2].map(|i| self.value(node.inputs[i]).slot());
        let rates = self.delta_array(Array::Rates, of);
        let mut bound = vec![("qkv", qkv), ("a", a), ("b", b), ("rates", rates)];
        bound.extend(weights(node));
        self.push(delta_rates(self.of.scalar, form), self.delta_numbers(of), &bound)?;
        Ok(form)
    }

    pub(super) fn delta(&mut self, of: &DeltaNet, node: &Node) -> Result<()> {
        let (form, scalar) = (self.delta_rates(of, node)?, self.of.scalar);
        let bound = [
            ("qkv", self.value(node.inputs[0]).slot()),
            ("a", self.value(node.inputs[1]).slot()),
            ("rates", self.delta_array(Array::Rates, of)),
            ("starts", Slot::Words(self.words.starts.clone())),
            ("y", self.value(node.outputs[0]).slot()),
        ];
        self.push(packed_delta(scalar, form), self.delta_numbers(of), &bound)
    }

    pub(super) fn delta_backward(&mut self, of: &DeltaNet, node: &Node) -> Result<()> {
        let (turned, scalar) = (form(of, true)?, self.of.scalar);
        let form = self.delta_rates(of, node)?;
        let numbers = self.delta_numbers(of);
        let words = self.words.clone();
        let (starts, positions) = (Slot::Words(words.starts), Slot::Words(words.positions));
        let value = |v: ValueId| self.value(v).slot();
        let mut all = vec![
            ("qkv", value(node.inputs[0])),
            ("a", value(node.inputs[1])),
            ("dy", value(node.inputs[3])),
            ("dqkv", value(node.outputs[0])),
            ("da", value(node.outputs[1])),
            ("db", value(node.outputs[2])),
            ("starts", starts),
            ("positions", positions),
        ];
        all.extend(weights(node));
        let arrays = ["rates", "misses", "before", "behind", "dv", "slopes", "along", "terms"];
        let own =
            arrays.into_iter().zip(ARRAYS).map(|(name, array)| (name, self.delta_array(array, of)));
        all.extend(own);
        self.push(delta_states(scalar, form), numbers.clone(), &all)?;
        self.push(delta_slopes(scalar, turned), numbers.clone(), &all)?;
        self.push(delta_operands(scalar, form), numbers.clone(), &all)?;
        if of.by_element {
            return Ok(());
        }
        self.push(delta_gates(scalar, form.key_dim), numbers, &all)?;
        let sums: Vec<(bool, Slot)> = [(true, node.outputs[3]), (false, node.outputs[4])]
            .into_iter()
            .filter(|(_, v)| self.of.reads(*v))
            .map(|(of_decay, v)| (of_decay, self.value(v).slot()))
            .collect();
        for (of_decay, y) in sums {
            let slopes = self.delta_array(Array::Terms, of);
            let mut bound: Vec<(&str, Slot)> = all
                .iter()
                .filter(|(name, _)| ["a", "decay", "dt"].contains(name))
                .cloned()
                .collect();
            bound.extend([("slopes", slopes), ("y", y)]);
            let sizes = products::numbers(self.counts.tokens, of.heads);
            self.push(delta_weights(scalar, of_decay), sizes, &bound)?;
        }
        Ok(())
    }
}
