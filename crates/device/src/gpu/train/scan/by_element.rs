//! State spaces whose elements decay at rates of their own, in training: the arrays between their
//! kernels, and the launches.

use formats::Result;
use ops::SelectiveScan;
use ops::gradient::scan::by_element::kernels::{
    form, numbers, packed_scan_by_element, parts, scan_gradients_by_element, scan_shared_by_element,
};
use program::Node;
use tile::launch::Numbers;

use super::super::layout::Counts;
use super::super::lower::Recorder;
use super::super::states::{block, place};
use crate::gpu::lower::Slot;

/// The arrays between the kernels, of f32, with the names that kernels have for them.
const ARRAYS: [&str; 3] = ["before", "kept", "slopes"];

/// Elements of each array.
fn elements(of: &SelectiveScan, tokens: usize) -> Result<[usize; 3]> {
    let (size, block) = (of.elements(), block(tokens));
    let slopes = tokens * of.heads * parts(form(of)?) * 2 * of.state;
    Ok([tokens.div_ceil(block) * size, (block + 1) * size, slopes])
}

/// Bytes of the arrays of a gradient.
pub(super) fn bytes(of: &SelectiveScan, counts: Counts) -> usize {
    // One that has no form was refused.
    elements(of, counts.tokens).map_or(0, |all| place(all).end)
}

/// Refuses states that do not fit a simdgroup's registers.
pub(super) fn check(of: &SelectiveScan) -> Result<()> {
    form(of).map(|_| ())
}

impl Recorder<'_> {
    fn element_scan_numbers(&self, of: &SelectiveScan) -> Numbers {
        let Counts { tokens, sequences, .. } = self.counts;
        numbers(of, tokens, sequences, block(tokens))
    }

    /// Operands that the kernels of both directions read.
    fn element_scan_operands(&self, node: &Node) -> Vec<(&'static str, Slot)> {
        let words = self.words.clone();
        let inputs = ["x", "step", "b", "c"].into_iter().zip(&node.inputs);
        let weights = ["decay", "skip"].into_iter().zip(&node.weights);
        inputs
            .map(|(name, input)| (name, self.value(*input).slot()))
            .chain(weights.map(|(name, weight)| (name, Slot::Weight(weight.0))))
            .chain([
                ("starts", Slot::Words(words.starts)),
                ("positions", Slot::Words(words.positions)),
            ])
            .collect()
    }

    pub(super) fn scan_by_element(&mut self, of: &SelectiveScan, node: &Node) -> Result<()> {
        let mut all = self.element_scan_operands(node);
        all.push(("y", self.value(node.outputs[0]).slot()));
        let kernel = packed_scan_by_element(self.of.scalar, form(of)?);
        self.push(kernel, self.element_scan_numbers(of), &all)
    }

    pub(super) fn scan_backward_by_element(
        &mut self,
        of: &SelectiveScan,
        node: &Node,
    ) -> Result<()> {
        let (form, scalar, sizes) = (form(of)?, self.of.scalar, elements(of, self.counts.tokens)?);
        let mut all = self.element_scan_operands(node);
        all.push(("dy", self.value(node.inputs[4]).slot()));
        let outputs = ["dx", "dstep", "db", "dc", "ddecay", "dskip"].into_iter().zip(&node.outputs);
        all.extend(outputs.map(|(name, output)| (name, self.value(*output).slot())));
        let start = self.layout.states.start;
        for (i, name) in ARRAYS.into_iter().enumerate() {
            let own = place(sizes[..=i].iter().copied());
            all.push((name, Slot::Arena(start + own.start..start + own.end)));
        }
        let numbers = self.element_scan_numbers(of);
        self.push(scan_gradients_by_element(scalar, form), numbers.clone(), &all)?;
        self.push(scan_shared_by_element(scalar, form), numbers, &all)
    }
}
