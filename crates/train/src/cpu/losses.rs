//! The cross-entropy of a linear head, some rows at a time: logits are made, become their own
//! gradients, and are multiplied back.

use super::executor::Run;
use super::products::Operand;
use super::vectorised::{total, vectorised};
use cpu_kernels::math;
use cpu_kernels::matmul::Epilogue;
use cpu_kernels::team::SharedSlice;
use formats::Result;
use ops::Unary;
use ops::gradient::CrossEntropy;
use program::Node;
use std::sync::PoisonError;

/// Logits that are in memory at once.
const LOGITS: usize = 5 << 23;
/// Rows of them, in whole tiles.
const ROWS: [usize; 3] = [16, 256, 32];
/// Logits whose exponentials are added up in one go.
const PIECE: usize = 4096;

impl Run<'_> {
    pub(super) fn losses(&self, of: &CrossEntropy, node: &Node) -> Result<()> {
        let (x, width) = (node.inputs[0], self.width(node.inputs[0]));
        let head = self.weights.matrix(node.weights[0])?;
        let bias = node.weights.get(1).map(|id| self.weights.vector(*id));
        let (rows, vocab) = (self.rows(x), head.rows());
        let most = (LOGITS / vocab).clamp(ROWS[0], ROWS[1]);
        let each = rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(ROWS[2]).max(1);
        let mut logits = self.of.logits.lock().unwrap_or_else(PoisonError::into_inner);
        logits.resize(each.min(rows) * vocab, 0.0);
        let start = logits.as_mut_ptr();
        for (chunk, first) in (0..rows).step_by(each).enumerate() {
            let count = each.min(rows - first);
            // SAFETY: rows of the node's operands, and logits that only this call has.
            unsafe {
                let x = self.start(x).cast_const().add(first * width);
                let part = |start| Operand { start, rows: count, value: None };
                let epilogue = Epilogue { bias, ..Epilogue::default() };
                self.multiply(head, part(x), start, epilogue);
                self.rows_of_logits(of, node, (&mut logits[..count * vocab], vocab), first);
                if of.hidden {
                    let dx = self.start(node.outputs[1]).add(first * width);
                    self.multiply_back(head, part(start), dx, false);
                }
                if of.head {
                    let dhead = self.start(node.outputs[2]);
                    self.outer((start, vocab), (x, width), count, dhead, chunk > 0);
                }
                if let Some(dbias) = node.outputs.get(3) {
                    self.sum_rows(&logits[..count * vocab], self.write(*dbias), chunk > 0);
                }
            }
        }
        Ok(())
    }

    /// Losses of rows from `first` on; products with the head become the losses' gradients with
    /// respect to them.
    fn rows_of_logits(
        &self,
        of: &CrossEntropy,
        node: &Node,
        (logits, vocab): (&mut [f32], usize),
        first: usize,
    ) {
        let (isa, rows) = (self.of.isa, logits.len() / vocab);
        let logits = SharedSlice::new(logits);
        self.each(rows, 1, &|range, scratch| {
            for r in range {
                let row = self.packing.picks[first + r] as usize;
                let (target, weight) = (self.batch.targets[row] as usize, self.batch.weights[row]);
                // SAFETY: each row is one worker's.
                let (logits, loss) = unsafe {
                    let logits = logits.slice_mut(r * vocab..(r + 1) * vocab);
                    (logits, self.part(node.outputs[0], first + r..first + r + 1))
                };
                match of.cap {
                    Some(cap) => {
                        math::scale_in_place(isa, of.scale / cap, logits);
                        math::map_in_place(isa, Unary::Tanh, logits);
                        scratch.clear();
                        scratch.extend_from_slice(logits);
                        math::scale_in_place(isa, cap, logits);
                    }
                    None if of.scale != 1.0 => math::scale_in_place(isa, of.scale, logits),
                    None => {}
                }
                let (top, own) = (math::max(isa, logits), logits[target]);
                let mut sum = 0.0;
                for logits in logits.chunks_mut(PIECE) {
                    vectorised(isa, || logits.iter_mut().for_each(|logit| *logit -= top));
                    math::map_in_place(isa, Unary::Exp, logits);
                    sum += vectorised(isa, || total(logits, logits, |p, _| p));
                }
                loss[0] = (f64::from(weight) * (f64::from(top) - f64::from(own) + sum.ln())) as f32;
                if !of.hidden {
                    continue;
                }
                math::scale_in_place(isa, (f64::from(weight * of.scale) / sum) as f32, logits);
                logits[target] -= weight * of.scale;
                if of.cap.is_some() {
                    let slopes = logits.iter_mut().zip(&*scratch);
                    slopes.for_each(|(logit, tanh)| *logit *= 1.0 - tanh * tanh);
                }
            }
        });
    }
}
