//! How well a model foresees examples, and which of given choices it holds to be right.

use crate::data::{Form, Question};
use crate::{Example, Loss};
use engine::{Adapter, Engine, Prompt, Session, check_logits};
use formats::{Error, Result};
use ops::softmax::log_sum_exp;
use serde_json::{Map, json};
use tokens::Special;

/// The scores over examples.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ExampleScores {
    /// The loss of tokens that count, in nats.
    pub loss: Loss,
    /// The sum of the squares of single tokens' losses.
    pub squares: f64,
    /// Tokens that count and that the model holds likeliest in their place.
    pub foreseen: usize,
    /// Answers of examples that have prompts.
    pub answers: usize,
    /// Number of examples that greedy decoding reproduces, up to the token that ends them.
    pub exact: usize,
}

impl ExampleScores {
    /// `exp` of the mean loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.mean().exp()
    }

    /// The standard error of [`ExampleScores::perplexity`].
    pub fn error(&self) -> f64 {
        let (n, mean) = (self.loss.weight, self.loss.mean());
        if n < 2.0 {
            return 0.0;
        }
        let variance = (self.squares / n - mean * mean).max(0.0);
        (variance / (n - 1.0)).sqrt() * self.perplexity()
    }

    /// Adds what the model makes of an example; `ends` are the tokens that end a generation.
    ///
    /// An answer is exact where each of its tokens is the likeliest behind those before it: that is
    /// what greedy decoding would write. What stands behind the token that ends it is not asked
    /// for.
    ///
    /// # Errors
    /// An example that does not fit the context; logits that are not finite.
    pub fn add(&mut self, session: &mut Session, ends: &[u32], example: &Example) -> Result<()> {
        let Some(first) = example.counted.first() else { return Ok(()) };
        let last = example.counted.last().map_or(first.end, |range| range.end);
        let mut own = ExampleScores::default();
        let (mut found, mut right) = (Ok(()), vec![false; last]);
        session.clear();
        // The last token has no successor to be scored by.
        session.evaluate(&example.tokens[..last - 1], first.start - 1, &mut |row, logits| {
            let next = row + 1;
            if !example.counted.iter().any(|range| range.contains(&next)) || found.is_err() {
                return;
            }
            found = check_logits(logits, row);
            let target = example.tokens[next] as usize;
            let (loss, likeliest) = judge(logits, target);
            own.loss += Loss { sum: loss, weight: 1.0 };
            own.squares += loss * loss;
            right[next] = likeliest;
            own.foreseen += usize::from(likeliest);
        })?;
        found?;
        if !own.loss.sum.is_finite() {
            let place = format!("line {}", example.line);
            return Err(Error::new(
                place,
                "tokens that the model holds possible",
                "one that it rules out",
            ));
        }
        if example.form == Form::Answers {
            for range in &example.counted {
                let tokens = &example.tokens[range.clone()];
                let end =
                    tokens.iter().position(|id| ends.contains(id)).map_or(range.len(), |i| i + 1);
                own.answers += 1;
                own.exact += usize::from(right[range.start..range.start + end].iter().all(|r| *r));
            }
        }
        self.loss += own.loss;
        self.squares += own.squares;
        self.foreseen += own.foreseen;
        self.answers += own.answers;
        self.exact += own.exact;
        Ok(())
    }
}

/// The scores over pairs of answers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Preferred {
    /// Pairs.
    pub pairs: usize,
    /// Number of pairs whose better answer is the likelier.
    pub likelier: usize,
    /// Number of pairs whose better answer gained more by the adapter.
    pub gained: usize,
    /// The sum of how much more it gained, in nats.
    pub margins: f64,
}

impl Preferred {
    /// Adds what the model makes of a pair, with the session's adapter and without.
    ///
    /// # Errors
    /// An example that is no pair or does not fit the context; logits that are not finite.
    pub fn add(&mut self, session: &mut Session, example: &Example) -> Result<()> {
        let Some(rejected) = &example.rejected else {
            let place = format!("line {}", example.line);
            return Err(Error::new(place, "a chosen and a rejected answer", "one answer"));
        };
        let lead = |session: &mut Session| -> Result<f64> {
            let [mut better, mut worse] = [ExampleScores::default(); 2];
            better.add(session, &[], example)?;
            worse.add(session, &[], rejected)?;
            Ok(worse.loss.sum - better.loss.sum)
        };
        let own = lead(session)?;
        self.pairs += 1;
        self.likelier += usize::from(own > 0.0);
        let Some(adapter) = session.adapter().cloned() else { return Ok(()) };
        session.set_adapter(None)?;
        let base = lead(session);
        session.set_adapter(Some(adapter))?;
        let margin = own - base?;
        self.gained += usize::from(margin > 0.0);
        self.margins += margin;
        Ok(())
    }
}

/// The loss of a token, and whether no other is as likely, but for later ones.
fn judge(logits: &[f32], target: usize) -> (f64, bool) {
    let Some(&own) = logits.get(target) else { return (f64::INFINITY, false) };
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let likeliest = logits.iter().position(|logit| *logit == largest) == Some(target);
    (log_sum_exp(logits) - f64::from(own), likeliest)
}

/// The scores over questions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Chosen {
    /// Questions.
    pub questions: usize,
    /// Number of questions whose right choice is the likeliest.
    pub right: usize,
    /// Number of questions whose right choice is the likeliest for its length: by the
    /// log-probability per byte.
    pub right_by_length: usize,
}

impl Chosen {
    /// Adds what the model makes of a question. With a chat template the question is a user's
    /// message and a choice the beginning of the answer; else the question stands between
    /// `Question: ` and `Answer:`, each choice behind a blank.
    ///
    /// # Errors
    /// A question that does not fit the context with its choices; an engine without a tokenizer.
    pub fn add(
        &mut self,
        engine: &Engine,
        question: &Question,
        raw: bool,
        adapter: Option<&Adapter>,
    ) -> Result<()> {
        let chats = engine.chat_template().is_some() && !raw;
        let prompt = match chats {
            true => {
                let message = json!({ "role": "user", "content": question.question });
                Prompt::Chat { messages: vec![message], extra: Map::new() }
            }
            false => Prompt::Text(format!("Question: {}\nAnswer:", question.question)),
        };
        let tokenizer =
            engine.tokenizer().ok_or_else(|| Error::new("model", "a tokenizer", "none"))?;
        let tokens = |choice: &String| {
            let text = if chats { choice.clone() } else { format!(" {choice}") };
            tokenizer.encode(&text, Special::default())
        };
        let labels = question.choices.iter().map(tokens).collect::<Result<Vec<_>>>()?;
        let of_line =
            |e: Error| Error { place: format!("line {}: {}", question.line, e.place), ..e };
        let found =
            engine.classify(&[engine.encode(&prompt)?], &labels, adapter).map_err(of_line)?;
        let scores = found.first().map(Vec::as_slice).unwrap_or_default();
        let by_length: Vec<f64> = scores
            .iter()
            .zip(&question.choices)
            .map(|(score, text)| score / text.len() as f64)
            .collect();
        self.questions += 1;
        self.right += usize::from(greatest(scores) == Some(question.right));
        self.right_by_length += usize::from(greatest(&by_length) == Some(question.right));
        Ok(())
    }
}

/// The first of the greatest numbers.
fn greatest(of: &[f64]) -> Option<usize> {
    let most = of.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    of.iter().position(|x| *x == most)
}
