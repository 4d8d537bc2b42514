//! Classification without training: how likely a model holds each of some labels to be what follows
//! a text.

use crate::adapters::Adapter;
use crate::events::Capability;
use crate::generate::check_logits;
use crate::load::{Engine, Shared};
use crate::session::Session;
use crate::together::{Text, Work, compute};
use formats::{Error, Result};
use ops::softmax::log_sum_exp;

impl Engine {
    /// The log-probability, in nats, of each label behind each prompt: the sum over its tokens.
    /// Prompts are computed together, each once, however many labels there are.
    ///
    /// # Errors
    /// An engine that was loaded for embeddings; no labels; a prompt or a label without tokens, or
    /// with tokens outside the vocabulary; a prompt that does not fit the context with the longest
    /// label; another engine's adapter; logits that are not finite.
    pub fn classify(
        &self,
        prompts: &[Vec<u32>],
        labels: &[Vec<u32>],
        adapter: Option<&Adapter>,
    ) -> Result<Vec<Vec<f64>>> {
        let shared: &Shared = &self.part(Capability::Generate);
        if labels.is_empty() || labels.iter().any(Vec::is_empty) {
            let found = if labels.is_empty() { "none" } else { "one without tokens" };
            return Err(Error::new("labels", "labels of at least one token each", found));
        }
        for (i, label) in labels.iter().enumerate() {
            let of_label = |e: Error| Error { place: format!("label {i}: {}", e.place), ..e };
            shared.check(label, 0).map_err(of_label)?;
        }
        let longest = labels.iter().map(|label| computed(label).len()).max().unwrap_or(0);
        shared.check_all("prompt", prompts, longest)?;
        let scores = vec![vec![0.0; labels.len()]; prompts.len()];
        let judged = vec![None; prompts.len()];
        let mut work = Judging { engine: self, prompts, labels, adapter, begun: 0, judged, scores };
        compute(shared, &mut work)?;
        for (i, score) in work.scores.iter().enumerate() {
            if !score.iter().all(|score| score.is_finite()) {
                let place = format!("prompt {i}: logits");
                return Err(Error::new(place, "finite numbers", "others"));
            }
        }
        Ok(work.scores)
    }
}

/// The tokens of a label that are computed: the last is only judged.
fn computed(label: &[u32]) -> &[u32] {
    &label[..label.len() - 1]
}

struct Judging<'a> {
    engine: &'a Engine,
    prompts: &'a [Vec<u32>],
    labels: &'a [Vec<u32>],
    adapter: Option<&'a Adapter>,
    /// Prompts that were begun.
    begun: usize,
    /// The label that is computed behind each prompt; none while the prompt itself is.
    judged: Vec<Option<usize>>,
    scores: Vec<Vec<f64>>,
}

impl Work for Judging<'_> {
    fn next(&mut self) -> Result<Option<Text>> {
        let (index, Some(prompt)) = (self.begun, self.prompts.get(self.begun)) else {
            return Ok(None);
        };
        self.begun += 1;
        let mut session: Session = self.engine.session();
        session.set_adapter(self.adapter.cloned())?;
        let wanted = prompt.len() - 1..prompt.len();
        Ok(Some(Text { index, tokens: prompt.clone(), wanted, session }))
    }

    fn row(&mut self, index: usize, token: usize, row: &[f32]) {
        let whole = match check_logits(row, token) {
            Ok(()) => log_sum_exp(row),
            // Told when all is done.
            Err(_) => f64::NAN,
        };
        let mut add = |label: usize, id: u32| {
            self.scores[index][label] += f64::from(row[id as usize]) - whole;
        };
        match self.judged[index] {
            // The prompt's last token foretells every label's first.
            None => self.labels.iter().enumerate().for_each(|(i, label)| add(i, label[0])),
            Some(label) => add(label, self.labels[label][token + 1 - self.prompts[index].len()]),
        }
    }

    fn done(&mut self, mut text: Text) -> Result<Option<Text>> {
        let prompt = &self.prompts[text.index];
        let from = self.judged[text.index].map_or(0, |label| label + 1);
        let further = |label: &usize| !computed(&self.labels[*label]).is_empty();
        let Some(label) = (from..self.labels.len()).find(further) else { return Ok(None) };
        self.judged[text.index] = Some(label);
        text.session.truncate(prompt.len());
        text.tokens.truncate(prompt.len());
        text.tokens.extend(computed(&self.labels[label]));
        text.wanted = prompt.len()..text.tokens.len();
        Ok(Some(text))
    }
}
