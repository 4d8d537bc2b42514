//! Which examples are learned from together, and in which order.

use crate::{Batch, Example};
use formats::{Error, Result};
use ops::sample::philox;
use std::ops::Range;

/// The numbers below `count` in an order that follows from a seed and the number of a stream alone
/// (Fisher and Yates's, with Philox's numbers).
pub fn shuffled(count: usize, seed: u64, stream: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        // The high half of a product with 64 random bits: of a bias below 2^-32 for any count that
        // fits memory.
        let bits = philox::stream(seed, i as u64, stream);
        let j = ((u128::from(bits) * (i as u128 + 1)) >> 64) as usize;
        order.swap(i, j);
    }
    order
}

/// Runs of `order` that have at most `budget` tokens together, as ranges of it.
///
/// # Errors
/// An example that is longer than the budget.
pub fn runs(examples: &[Example], order: &[usize], budget: usize) -> Result<Vec<Range<usize>>> {
    let (mut runs, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (at, &i) in order.iter().enumerate() {
        let length = examples[i].length();
        if length > budget {
            let expected = format!("examples of at most {budget} tokens");
            return Err(Error::new("a batch", expected, format!("one of {length}")));
        }
        if tokens + length > budget {
            runs.push(start..at);
            (start, tokens) = (at, 0);
        }
        tokens += length;
    }
    if start < order.len() {
        runs.push(start..order.len());
    }
    Ok(runs)
}

/// The examples of these numbers behind each other; of pairs the chosen one, then the rejected one;
/// behind each judged one its prompt with the answer of another one, as `mismatched` gives it.
pub fn batch(examples: &[Example], numbers: &[usize]) -> Batch {
    let mut batch = Batch::default();
    let each: Vec<&Example> = numbers.iter().map(|i| &examples[*i]).collect();
    batch.desired = each.iter().filter_map(|one| one.desired()).collect();
    let others = if batch.desired.is_empty() { Vec::new() } else { mismatched(&each) };
    let all = each.iter().enumerate();
    let all = all.flat_map(|(i, one)| [Some(*one), one.rejected.as_deref(), others.get(i)]);
    for example in all.flatten() {
        let start = batch.tokens.len();
        batch.tokens.extend(&example.tokens);
        batch.targets.extend(example.tokens.iter().skip(1));
        // A sequence's last token has no target; the number in its place is not read.
        batch.targets.push(0);
        batch.weights.resize(batch.tokens.len(), 0.0);
        for range in &example.counted {
            batch.weights[start + range.start - 1..start + range.end - 1].fill(1.0);
        }
        batch.sequences.push(start..batch.tokens.len());
    }
    batch
}

/// The prompt of each example with the answer of the one before it, of the first with that of the
/// last, as KTO has them; no longer than the longest of the examples. An example alone has its own
/// answer, of which nothing counts.
fn mismatched(examples: &[&Example]) -> Vec<Example> {
    let answer = |example: &Example| example.counted.first().cloned().unwrap_or(0..0);
    let most = examples.iter().map(|example| example.tokens.len()).max().unwrap_or(0);
    let other = |i: usize| {
        let (own, from) = (examples[i], examples[(i + examples.len() - 1) % examples.len()]);
        let start = answer(own).start;
        let mut tokens = own.tokens[..start].to_vec();
        tokens.extend(&from.tokens[answer(from)]);
        tokens.truncate(most);
        let counted = std::iter::once(start..tokens.len()).filter(|_| examples.len() > 1).collect();
        Example { tokens, counted, ..own.clone() }
    };
    (0..examples.len()).map(other).collect()
}

/// One pass over examples: its order, cut into batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Epoch {
    order: Vec<usize>,
    runs: Vec<Range<usize>>,
    accumulate: usize,
}

impl Epoch {
    /// Epoch `number` under a seed, in batches of at most `budget` tokens, of which `accumulate`
    /// make an update.
    ///
    /// # Errors
    /// As [`runs`].
    pub fn new(
        examples: &[Example],
        seed: u64,
        number: u32,
        budget: usize,
        accumulate: usize,
    ) -> Result<Epoch> {
        let order = shuffled(examples.len(), seed, number);
        let runs = runs(examples, &order, budget)?;
        Ok(Epoch { order, runs, accumulate: accumulate.max(1) })
    }

    /// How many updates it has.
    pub fn updates(&self) -> usize {
        self.runs.len().div_ceil(self.accumulate)
    }

    /// The examples of an update's batches, by number.
    pub fn update(&self, number: usize) -> impl Iterator<Item = &[usize]> {
        let of = self.runs.chunks(self.accumulate).nth(number).unwrap_or_default();
        of.iter().map(|run| &self.order[run.clone()])
    }
}
