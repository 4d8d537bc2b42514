//! Choosing tokens from logits that the host has, and what a step chose.

use formats::Error;
use ops::sample::{Choice, Sampler, broken};
use ops::softmax::log_sum_exp;
use program::Choose;
use std::ops::Range;

use crate::{REMEMBERED, Ticket};

/// Why no token could be chosen from a row of logits. Other sequences of the step are unaffected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refusal {
    /// A logit is not finite; holds its value.
    Broken(f32),
    /// The mask and the biases exclude every token.
    Nothing,
}

/// The tokens that a step chose: one entry for each of its sequences that sample, in order.
#[derive(Debug, Clone, Copy)]
pub struct Outcome<'a> {
    chosen: &'a [Chosen],
    likeliest: &'a [Choice],
}

impl<'a> Outcome<'a> {
    /// Number of sequences that sampled.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Whether no sequence sampled.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }

    /// The token chosen by the `i`-th sequence that samples. Its log-probability may be NaN if none
    /// was requested.
    ///
    /// # Errors
    /// Why no token could be chosen.
    pub fn choice(&self, i: usize) -> Result<Choice, Refusal> {
        self.chosen[i].choice
    }

    /// The most likely tokens of the same row in descending order: as many as [`Choose::logprobs`]
    /// requested.
    pub fn likeliest(&self, i: usize) -> &'a [Choice] {
        &self.likeliest[self.chosen[i].likeliest.clone()]
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Chosen {
    pub(crate) choice: Result<Choice, Refusal>,
    likeliest: Range<usize>,
}

/// The tokens that one step chose. Its buffers are reused by later steps.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    pub(crate) chosen: Vec<Chosen>,
    pub(crate) likeliest: Vec<Choice>,
}

/// Placeholder until a token is chosen.
const NONE: Choice = Choice { token: 0, logprob: f32::NAN };

impl Choices {
    /// Reserves the entry of one more sequence.
    pub(crate) fn push(&mut self, choose: &Choose<'_>) {
        let start = self.likeliest.len();
        self.likeliest.resize(start + choose.logprobs.unwrap_or(0), NONE);
        let likeliest = start..self.likeliest.len();
        self.chosen.push(Chosen { choice: Err(Refusal::Nothing), likeliest });
    }
}

impl Chosen {
    /// The range of its most likely tokens in [`Choices::likeliest`].
    pub(crate) fn range(&self) -> Range<usize> {
        self.likeliest.clone()
    }
}

/// The choices of the latest steps, by ticket.
#[derive(Debug)]
pub(crate) struct Outcomes(Vec<(u64, Choices)>);

impl Outcomes {
    /// Reserves room for steps of up to `sequences` sequences.
    pub(crate) fn new(sequences: usize) -> Self {
        let choices = || Choices { chosen: Vec::with_capacity(sequences), likeliest: Vec::new() };
        Outcomes((0..REMEMBERED).map(|_| (0, choices())).collect())
    }

    /// Begins the entry of a step, with no choices yet.
    pub(crate) fn begin(&mut self, ticket: Ticket) -> &mut Choices {
        let (number, choices) = &mut self.0[ticket.number() as usize % REMEMBERED];
        *number = ticket.number();
        choices.chosen.clear();
        choices.likeliest.clear();
        choices
    }

    /// Forgets all steps.
    pub(crate) fn forget(&mut self) {
        self.0.iter_mut().for_each(|(number, _)| *number = 0);
    }

    /// Forgets a step, by the number of its ticket.
    pub(crate) fn forget_one(&mut self, number: u64) {
        let (of, _) = &mut self.0[number as usize % REMEMBERED];
        *of = if *of == number { 0 } else { *of };
    }

    /// The choices of a step, by the number of its ticket.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Choices> {
        let (of, choices) = &mut self.0[number as usize % REMEMBERED];
        (*of == number).then_some(choices)
    }

    /// The choices of a step, if they are still remembered.
    pub(crate) fn get(&self, ticket: Ticket) -> Option<Outcome<'_>> {
        let (number, choices) = &self.0[ticket.number() as usize % REMEMBERED];
        let Choices { chosen, likeliest } = choices;
        (*number == ticket.number()).then_some(Outcome { chosen, likeliest })
    }
}

/// The look-back of common sampling settings, in tokens.
const USUAL: usize = 4096;

/// State that a slot carries from step to step.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    /// The token chosen last, if any.
    pub(crate) token: Option<u32>,
    /// The sequence's latest tokens, up to and including `token`, as far as its sampling chain
    /// looks back.
    pub(crate) history: Vec<u32>,
}

/// The token that slot `slot` chose last; `carried` is the slot's state.
///
/// # Errors
/// The slot has not chosen a token.
pub(crate) fn chosen(carried: Option<&Carried>, slot: u32) -> formats::Result<u32> {
    let none = || Error::new("step", format!("a token that slot {slot} chose"), "none");
    carried.and_then(|carried| carried.token).ok_or_else(none)
}

impl Carried {
    /// Starts from the history of a step whose last token the host knows.
    pub(crate) fn begin(&mut self, choose: &Choose<'_>) {
        let most = choose.options.looks_back();
        let window = most.min(choose.history.len());
        self.history.clear();
        // Reserve room for the whole look-back and one more token, so that steps allocate nothing.
        // An unlimited history grows by doubling.
        let room = if most <= USUAL { most } else { window };
        self.history.reserve(room + 1);
        self.history.extend_from_slice(&choose.history[choose.history.len() - window..]);
    }

    /// Appends a chosen token, keeping the last `window` tokens.
    pub(crate) fn push(&mut self, token: u32, window: usize) {
        self.token = Some(token);
        if window > 0 {
            let excess = (self.history.len() + 1).saturating_sub(window);
            self.history.drain(..excess.min(self.history.len()));
            self.history.push(token);
        }
    }
}

/// The sampling chain with its mask. Allocates only in the first call for a vocabulary size.
#[derive(Debug, Default)]
pub(crate) struct HostSampler(Sampler);

impl HostSampler {
    /// Chooses the token at `position` from a row of logits, and fills `likeliest` with the most
    /// likely tokens.
    pub(crate) fn choose(
        &mut self,
        logits: &[f32],
        history: &[u32],
        position: u64,
        choose: &Choose<'_>,
        likeliest: &mut [Choice],
    ) -> Result<Choice, Refusal> {
        if let Some((_, value)) = broken(logits) {
            return Err(Refusal::Broken(value));
        }
        let Choose { options, mask, .. } = *choose;
        let likely = !likeliest.is_empty();
        let choice = match choose.logprobs {
            Some(_) if !likely => self.0.sample(logits, history, position, options, mask),
            _ => {
                let token = self.0.token(logits, history, position, options, mask);
                token.map(|token| Choice { token, logprob: f32::NAN })
            }
        };
        let choice = choice.ok_or(Refusal::Nothing)?;
        if !likely {
            return Ok(choice);
        }
        let all = log_sum_exp(logits);
        find_likeliest(logits, all, likeliest);
        let logprob = (f64::from(logits[choice.token as usize]) - all) as f32;
        Ok(Choice { logprob, ..choice })
    }
}

/// Fills `found` with the most likely tokens and their log-probabilities, in descending order; of
/// equal logits, the lower token comes first. `all` is the `log_sum_exp` of the logits, of which
/// there are as many as `found` at least.
pub fn find_likeliest(logits: &[f32], all: f64, found: &mut [Choice]) {
    greatest(logits, found);
    for found in found {
        found.logprob = (f64::from(found.logprob) - all) as f32;
    }
}

/// Finds the tokens of the greatest logits in descending order, each with its logit.
fn greatest(logits: &[f32], found: &mut [Choice]) {
    let mut count = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if count == found.len() && found.last().is_none_or(|last| logit <= last.logprob) {
            continue;
        }
        let at = found[..count].partition_point(|other| other.logprob >= logit);
        count = (count + 1).min(found.len());
        found[at..count].rotate_right(1);
        found[at] = Choice { token: token as u32, logprob: logit };
    }
}

#[cfg(test)]
mod tests {
    use ops::sample::Options;

    use super::*;

    fn choose<'a>(options: &'a Options, mask: Option<&'a [u32]>) -> Choose<'a> {
        Choose { options, history: &[], mask, logprobs: Some(2) }
    }

    #[test]
    fn a_mask_leaves_its_tokens_and_the_models_own_probabilities() {
        let (greedy, mut sampler) = (Options::greedy(), HostSampler::default());
        let logits = [1.0, 3.0, 2.0, 3.0];
        let mut likeliest = [NONE; 2];
        let mut chosen = |mask: Option<&[u32]>, options: &Options| {
            let choose = choose(options, mask);
            sampler.choose(&logits, &[], 0, &choose, &mut likeliest).map(|c| (c, likeliest))
        };
        let (choice, likeliest) = chosen(Some(&[0b0101]), &greedy).unwrap();
        assert_eq!(choice.token, 2);
        let all: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        assert!((f64::from(choice.logprob) - (2.0 - all.ln())).abs() < 1e-6);
        assert_eq!(likeliest.map(|found| found.token), [1, 3]);
        assert!((f64::from(likeliest[1].logprob) - (3.0 - all.ln())).abs() < 1e-6);
        assert_eq!(chosen(None, &greedy).unwrap().0.token, 1);
        assert_eq!(chosen(Some(&[0]), &greedy), Err(Refusal::Nothing));
        let out = |tokens: &[u32]| Options {
            logit_bias: tokens.iter().map(|token| (*token, f32::NEG_INFINITY)).collect(),
            ..Options::default()
        };
        assert_eq!(chosen(Some(&[0b0101]), &out(&[0, 2])), Err(Refusal::Nothing));
        assert_eq!(chosen(None, &out(&[0, 1, 2, 3])), Err(Refusal::Nothing));
        assert_eq!(chosen(Some(&[0b0101]), &out(&[2])).unwrap().0.token, 0);
    }

    #[test]
    fn what_is_carried_is_the_window() {
        let options = Options { last_n: 3, repetition_penalty: 1.1, ..Options::default() };
        let mut carried = Carried::default();
        carried.begin(&Choose { history: &[1, 2, 3, 4], ..choose(&options, None) });
        assert_eq!(carried.history, [2, 3, 4]);
        carried.push(5, options.looks_back());
        assert_eq!((carried.token, &carried.history[..]), (Some(5), &[3, 4, 5][..]));
        let plain = Options::default();
        carried.begin(&Choose { history: &[1, 2], ..choose(&plain, None) });
        carried.push(7, plain.looks_back());
        assert_eq!((carried.token, carried.history.len()), (Some(7), 0));
    }
}
