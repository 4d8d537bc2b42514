//! How well a model foresees given texts: the log-probability of each token behind those before it.

use crate::adapters::Adapter;
use crate::events::Capability;
use crate::generate::{Token, check_logits};
use crate::load::{Engine, Shared};
use crate::together::{Text, Work, compute};
use device::find_likeliest;
use formats::{Error, Result};
use ops::sample::Choice;
use ops::softmax::log_sum_exp;

impl Engine {
    /// The tokens of each text with their log-probabilities, in nats, behind those before them, and
    /// with the `top` likeliest ones in their places. The first token of a text stands behind
    /// nothing and has neither. Special tokens have texts. Texts are computed together.
    ///
    /// # Errors
    /// An engine that was loaded for embeddings; a text without tokens, with tokens outside the
    /// vocabulary, or that does not fit the context; another engine's adapter; logits that are not
    /// finite.
    pub fn score(
        &self,
        texts: &[Vec<u32>],
        top: usize,
        adapter: Option<&Adapter>,
    ) -> Result<Vec<Vec<Token>>> {
        let shared: &Shared = &self.part(Capability::Generate);
        shared.check_all("text", texts, 0)?;
        let scored = texts.iter().map(|text| shared.unscored(text)).collect();
        let found = vec![Choice { token: 0, logprob: 0.0 }; top.min(shared.width())];
        let mut work =
            Scoring { engine: self, texts, adapter, begun: 0, found, scored, failed: None };
        compute(shared, &mut work)?;
        match work.failed {
            Some(error) => Err(error),
            None => Ok(work.scored),
        }
    }
}

impl Shared {
    /// A text's tokens before anything is known of them.
    fn unscored(&self, text: &[u32]) -> Vec<Token> {
        let mut stream = self.tokenizer.as_ref().map(|tokenizer| tokenizer.stream_with(false));
        let token = |id: &u32| {
            let text = stream.as_mut().and_then(|stream| stream.push(*id)).unwrap_or_default();
            Token { id: *id, text, logprob: None, top_logprobs: Vec::new() }
        };
        let mut tokens: Vec<Token> = text.iter().map(token).collect();
        let rest = stream.and_then(|mut stream| stream.flush());
        if let (Some(rest), Some(last)) = (rest, tokens.last_mut()) {
            last.text += &rest;
        }
        tokens
    }
}

struct Scoring<'a> {
    engine: &'a Engine,
    texts: &'a [Vec<u32>],
    adapter: Option<&'a Adapter>,
    /// Texts that were begun.
    begun: usize,
    /// Room for the likeliest tokens of one row.
    found: Vec<Choice>,
    scored: Vec<Vec<Token>>,
    /// The first row that has no probabilities.
    failed: Option<Error>,
}

impl Work for Scoring<'_> {
    fn next(&mut self) -> Result<Option<Text>> {
        while let Some(text) = self.texts.get(self.begun) {
            let index = self.begun;
            self.begun += 1;
            // The last token has no successor to foretell.
            let computed = text.len() - 1;
            if computed > 0 {
                let mut session = self.engine.session();
                session.set_adapter(self.adapter.cloned())?;
                let tokens = text[..computed].to_vec();
                return Ok(Some(Text { index, tokens, wanted: 0..computed, session }));
            }
        }
        Ok(None)
    }

    fn row(&mut self, index: usize, token: usize, row: &[f32]) {
        if let Err(error) = check_logits(row, token) {
            self.failed.get_or_insert(error);
            return;
        }
        let all = log_sum_exp(row);
        find_likeliest(row, all, &mut self.found);
        let next = &mut self.scored[index][token + 1];
        next.logprob = Some((f64::from(row[next.id as usize]) - all) as f32);
        next.top_logprobs = self.found.iter().map(|one| (one.token, one.logprob)).collect();
    }

    fn done(&mut self, _: Text) -> Result<Option<Text>> {
        Ok(None)
    }
}
