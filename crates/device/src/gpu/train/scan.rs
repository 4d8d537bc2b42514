//! State spaces in training: the arrays between their kernels, and the launches.

mod by_element;

use formats::{Hint, Result, Setting};
use ops::gradient::scan::kernels::{
    form, numbers, packed_scan, scan_decays, scan_inputs, scan_rates, scan_shared, scan_slopes,
    scan_states, scan_steps, together,
};
use ops::gradient::{Gradient, products};
use ops::{Op, SelectiveScan};
use program::{Node, ValueId};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::layout::Counts;
use super::lower::Recorder;
use super::states::{block, place};
use crate::gpu::lower::Slot;

/// An array between the kernels, of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Array {
    Rates,
    Answers,
    Before,
    OfWritten,
    Behind,
    Slopes,
    Along,
    Terms,
    OfSteps,
    OfSkips,
}

/// All of them, with the names that kernels have for them.
const ARRAYS: [(Array, &str); 10] = [
    (Array::Rates, "rates"),
    (Array::Answers, "answers"),
    (Array::Before, "before"),
    (Array::OfWritten, "du"),
    (Array::Behind, "behind"),
    (Array::Slopes, "slopes"),
    (Array::Along, "along"),
    (Array::Terms, "terms"),
    (Array::OfSteps, "of_steps"),
    (Array::OfSkips, "of_skips"),
];

/// Elements of an array.
fn elements(array: Array, of: &SelectiveScan, tokens: usize) -> usize {
    let (heads, blocks) = (tokens * of.heads, tokens.div_ceil(block(tokens)) * of.heads);
    match array {
        Array::Rates => heads * 2,
        Array::Answers | Array::OfWritten => heads * of.head_dim,
        Array::Before | Array::Behind => blocks * of.state * of.head_dim,
        Array::Slopes => heads / together(of) * 2 * of.state,
        Array::Along => blocks * of.state,
        Array::Terms | Array::OfSteps | Array::OfSkips => heads,
    }
}

/// The elements of an array and of those in front of it.
fn up_to(array: Array, of: &SelectiveScan, tokens: usize) -> impl Iterator<Item = usize> {
    ARRAYS[..=array as usize].iter().map(move |(own, _)| elements(*own, of, tokens))
}

/// Bytes of the arrays of a node.
pub(super) fn bytes(node: &Node, counts: Counts) -> usize {
    let (of, last) = match &node.op {
        Op::Gradient(Gradient::PackedScan(of)) if of.0.by_element => return 0,
        Op::Gradient(Gradient::ScanBackward(of)) if of.0.by_element => {
            return by_element::bytes(&of.0, counts);
        }
        Op::Gradient(Gradient::PackedScan(of)) => (of.0, Array::Rates),
        Op::Gradient(Gradient::ScanBackward(of)) => (of.0, Array::OfSkips),
        _ => return 0,
    };
    place(up_to(last, &of, counts.tokens)).end
}

/// Refuses states and heads that do not fit a simdgroup's registers.
pub(super) fn check(of: &SelectiveScan) -> Result<()> {
    let refused = |error: formats::Error| error.hint(Hint::set(Setting::Place, "cpu"));
    if of.by_element {
        return by_element::check(of).map_err(refused);
    }
    form(of, false).map(|_| ()).map_err(refused)
}

impl Recorder<'_> {
    fn scan_array(&self, array: Array, of: &SelectiveScan) -> Slot {
        let own = place(up_to(array, of, self.counts.tokens));
        let start = self.layout.states.start;
        Slot::Arena(start + own.start..start + own.end)
    }

    fn scan_numbers(&self, of: &SelectiveScan) -> Numbers {
        let Counts { tokens, sequences, .. } = self.counts;
        numbers(of, tokens, sequences, block(tokens))
    }

    /// Operands that all kernels of a node read, and the arrays up to `last`.
    fn scan_operands(
        &self,
        of: &SelectiveScan,
        node: &Node,
        last: Array,
    ) -> Vec<(&'static str, Slot)> {
        let words = self.words.clone();
        let mut all = vec![
            ("xbc", self.value(node.inputs[0]).slot()),
            ("dt", self.value(node.inputs[1]).slot()),
            ("starts", Slot::Words(words.starts)),
            ("positions", Slot::Words(words.positions)),
        ];
        let weights = ["decay", "bias", "skip"].into_iter().zip(&node.weights);
        all.extend(weights.map(|(name, weight)| (name, Slot::Weight(weight.0))));
        let arrays = &ARRAYS[..=last as usize];
        all.extend(arrays.iter().map(|(array, name)| (*name, self.scan_array(*array, of))));
        all
    }

    pub(super) fn scan(&mut self, of: &SelectiveScan, node: &Node) -> Result<()> {
        if of.by_element {
            return self.scan_by_element(of, node);
        }
        let (numbers, scalar) = (self.scan_numbers(of), self.of.scalar);
        let mut all = self.scan_operands(of, node, Array::Rates);
        all.push(("y", self.value(node.outputs[0]).slot()));
        self.push(scan_rates(scalar), numbers.clone(), &all)?;
        self.push(packed_scan(scalar, form(of, false)?), numbers, &all)
    }

    pub(super) fn scan_backward(&mut self, of: &SelectiveScan, node: &Node) -> Result<()> {
        if of.by_element {
            return self.scan_backward_by_element(of, node);
        }
        let (numbers, scalar) = (self.scan_numbers(of), self.of.scalar);
        let (columns, rows) = (form(of, false)?, form(of, true)?);
        let mut all = self.scan_operands(of, node, Array::OfSkips);
        let value = |v: ValueId| self.value(v).slot();
        all.push(("dy", value(node.inputs[2])));
        all.extend([("dxbc", value(node.outputs[0])), ("ddt", value(node.outputs[1]))]);
        self.push(scan_rates(scalar), numbers.clone(), &all)?;
        self.push(scan_states(scalar, columns), numbers.clone(), &all)?;
        self.push(scan_slopes(scalar, rows), numbers.clone(), &all)?;
        self.push(scan_shared(scalar, columns), numbers.clone(), &all)?;
        self.push(scan_inputs(scalar, columns), numbers.clone(), &all)?;
        self.push(scan_steps(scalar, columns.key_dim), numbers, &all)?;
        self.scan_weights(of, node)
    }

    /// Records the gradients of a state space's weights, those that are read.
    fn scan_weights(&mut self, of: &SelectiveScan, node: &Node) -> Result<()> {
        let sizes = products::numbers(self.counts.tokens, of.heads);
        let sums = [Array::Terms, Array::OfSteps, Array::OfSkips];
        for (array, &output) in sums.into_iter().zip(&node.outputs[2..]) {
            if !self.of.reads(output) {
                continue;
            }
            let (terms, y) = (self.scan_array(array, of), self.value(output).slot());
            if array == Array::Terms {
                let rates = self.scan_array(Array::Rates, of);
                let bound = [("terms", terms), ("rates", rates), ("y", y)];
                self.push(scan_decays(), sizes.clone(), &bound)?;
            } else {
                let kernel = products::sum_rows(Scalar::F32, Scalar::F32, false);
                self.push(kernel, sizes.clone(), &[("x", terms), ("y", y)])?;
            }
        }
        Ok(())
    }
}
