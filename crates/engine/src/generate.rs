//! Generation: an iterator of tokens with text, cancellation, a finish reason and metrics.

use crate::constraint::{self, Constrained, ConstraintSource};
use crate::load::Shared;
use crate::parts::Inside;
use crate::peak_rss_bytes;
use crate::session::Session;
use crate::text::Text;
use device::{Executor, Refusal, Watch};
use formats::{Error, ErrorKind, Result};
use ops::sample::{Choice, Options, broken};
use program::{Choose, Step, StepKind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Stops a generation from elsewhere: another thread, or a signal handler.
#[derive(Debug, Clone, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks every generation that holds this token to stop: between two operations of a step on the
    /// CPU, between steps elsewhere.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Told how much of a prompt is read: tokens done, and all that have to be computed. Cheap to
/// clone.
///
/// It is called on the thread that asks for tokens: on the CPU after every operation, elsewhere
/// after every step, and once at the end of the prompt. The computation waits for it, so whoever
/// shows something looks at the time first; sessions of the same engine are not its to use.
#[derive(Clone)]
pub struct Progress(Arc<dyn Fn(usize, usize) + Send + Sync>);

impl Progress {
    /// Tells `f`.
    pub fn new(f: impl Fn(usize, usize) + Send + Sync + 'static) -> Self {
        Progress(Arc::new(f))
    }

    /// Tells the tokens that are done, and all.
    pub(crate) fn tell(&self, done: usize, all: usize) {
        (self.0)(done, all);
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

/// How to continue a prompt.
#[derive(Debug, Clone, Default)]
pub struct GenerateOptions {
    /// From logits to a token.
    pub sampling: Options,
    /// Tokens to generate at most; `None`: until the model ends or the context is full.
    pub max_tokens: Option<usize>,
    /// Strings that end generation; they are not part of the text.
    pub stop: Vec<String>,
    /// Texts of special tokens that belong to the text, besides the marks of reasoning: those that
    /// open a call of a tool, for instance. Texts of no special token are passed over.
    pub show_special: Vec<String>,
    /// Goes on past the model's end-of-generation tokens.
    pub ignore_end: bool,
    /// Tells the log-probability of each token, which takes another pass over the vocabulary.
    pub logprobs: bool,
    /// Tells the likeliest tokens of each position under the model itself, this many; 0: none.
    pub top_logprobs: usize,
    /// Restricts every token to those that a grammar allows.
    pub constraint: Option<ConstraintSource>,
    /// Cancels from elsewhere.
    pub cancel: CancelToken,
    /// Told how far the prompt is read.
    pub progress: Option<Progress>,
}

/// Why a generation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The model wrote one of its end tokens.
    End(u32),
    /// This stop string was met.
    StopString(String),
    /// `max_tokens` were generated.
    Length,
    /// The context has no room for another token.
    ContextFull,
    /// The cancel token was used.
    Cancelled,
    /// A step failed; the iterator returned the error.
    Failed,
}

impl Finish {
    /// A word for machines: `stop`, `length`, `context_full`, `cancelled` or `error`.
    pub fn name(&self) -> &'static str {
        match self {
            Finish::End(_) | Finish::StopString(_) => "stop",
            Finish::Length => "length",
            Finish::ContextFull => "context_full",
            Finish::Cancelled => "cancelled",
            Finish::Failed => "error",
        }
    }

    /// Whether the text is whole because its constraint brought it to its end before a limit.
    pub fn closed_early(&self, metrics: &Metrics) -> bool {
        matches!(self, Finish::End(_)) && metrics.closing_tokens > 0
    }
}

/// One token of a text: generated, or [scored](crate::Engine::score).
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Text that became complete with it; may be empty, or more than its own (held-back bytes of
    /// earlier tokens).
    pub text: String,
    /// Natural logarithm of its probability under the model itself, at temperature 1, if
    /// [`GenerateOptions::logprobs`] asks for it. None as well for a token that a constraint put in
    /// the place of another one, unless it is among `top_logprobs`.
    pub logprob: Option<f32>,
    /// The likeliest tokens in its place with their log-probabilities, in descending order: as many
    /// as [`GenerateOptions::top_logprobs`] asks for.
    pub top_logprobs: Vec<(u32, f32)>,
}

/// A token that was chosen, and what was asked about it.
struct Chosen {
    choice: Choice,
    top_logprobs: Vec<(u32, f32)>,
}

/// A token on its way to the caller.
struct Ready {
    id: u32,
    logprob: Option<f32>,
    top_logprobs: Vec<(u32, f32)>,
    /// Whether it is there to bring the text to its end.
    closing: bool,
}

impl Ready {
    /// One that the constraint put there.
    fn forced(id: u32) -> Ready {
        Ready { id, logprob: None, top_logprobs: Vec::new(), closing: false }
    }
}

/// Token counts and times of a generation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Metrics {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the cache.
    pub reused_tokens: usize,
    /// Prompt tokens computed: all others, unless the generation was cancelled or failed before.
    pub computed_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Generated tokens with which the constraint closed the text because the limit was near; 0 if
    /// the text ended by itself.
    pub closing_tokens: usize,
    /// Times that it made room for requests that had come before it, and waited again.
    pub preemptions: usize,
    /// Tokens that were computed again since the cache had lost them meanwhile.
    pub recomputed_tokens: usize,
    /// From the start until the first token was chosen, or until it was clear that there would be
    /// none.
    pub prefill: Duration,
    /// From the start until the last of the computed tokens: without the time of a step that was
    /// given up.
    pub computing: Duration,
    /// From then until the last.
    pub decode: Duration,
    /// Peak resident memory of the process in bytes.
    pub peak_rss_bytes: u64,
}

impl Metrics {
    /// Tokens of the prompt that were not found in the cache.
    fn uncached(&self) -> usize {
        self.prompt_tokens - self.reused_tokens
    }

    /// Prompt tokens computed per second.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.computed_tokens, self.computing)
    }

    /// Tokens generated per second after the first.
    pub fn decode_rate(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// A running generation, an iterator over its tokens; see [`Session::generate`]. The model's end
/// token, if it wrote one, is the last of them.
pub struct Generation<'a> {
    session: &'a mut Session,
    shared: Arc<Shared>,
    _inside: Inside,
    options: GenerateOptions,
    constraint: Option<Constrained>,
    /// Prompt and generated tokens: what penalties look back on.
    sequence: Vec<u32>,
    /// The last of them, which the caller has not been given yet.
    ready: VecDeque<Ready>,
    text: Text,
    finish: Option<Finish>,
    metrics: Metrics,
    /// Told of the prompt, until it is read.
    progress: Option<Progress>,
}

impl<'a> Generation<'a> {
    pub(crate) fn new(
        session: &'a mut Session,
        shared: Arc<Shared>,
        prompt: Vec<u32>,
        options: &GenerateOptions,
    ) -> Result<Self> {
        shared.check_start(&prompt, &options.sampling)?;
        shared.ready()?;
        let inside = shared.enter()?;
        let room = shared.room(prompt.len()) + 1;
        let mut constraint = Constrained::start(options, shared.config.vocab, room)?;
        let forced = constraint.as_mut().into_iter().flat_map(Constrained::take_forced);
        let forced: VecDeque<Ready> = forced.map(Ready::forced).collect();
        let reused = session.reuse(&prompt);
        session.check(&prompt[reused..])?;
        Ok(Generation {
            metrics: Metrics {
                prompt_tokens: prompt.len(),
                reused_tokens: reused,
                ..Metrics::default()
            },
            text: Text::new(&shared, options),
            progress: options.progress.clone(),
            options: options.clone(),
            sequence: prompt.into_iter().chain(forced.iter().map(|token| token.id)).collect(),
            ready: forced,
            constraint,
            finish: None,
            session,
            shared,
            _inside: inside,
        })
    }

    /// Why it ended; `None` while it runs.
    pub fn finish(&self) -> Option<&Finish> {
        self.finish.as_ref()
    }

    /// Counts and times so far.
    pub fn metrics(&self) -> Metrics {
        Metrics { peak_rss_bytes: peak_rss_bytes(), ..self.metrics }
    }

    /// Prompt and generated tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.sequence
    }

    /// Ends the generation; returns the text that was held back.
    fn end(&mut self, finish: Finish) -> String {
        self.finish = Some(finish);
        self.text.end()
    }

    /// Computes what is not cached yet, chunk by chunk, and samples; `None` when cancelled.
    fn sample(&mut self) -> Result<Option<Chosen>> {
        let start = Instant::now();
        loop {
            if self.options.cancel.is_cancelled() {
                return Ok(None);
            }
            let before = self.session.tokens().len();
            let chosen = self.step()?;
            self.read(self.session.tokens().len() - before, start.elapsed());
            if chosen.is_some() {
                return Ok(chosen);
            }
        }
    }

    /// Computes one chunk of what is not cached yet; the token that follows, if that was the last.
    fn step(&mut self) -> Result<Option<Chosen>> {
        let (sequence, options) = (&self.sequence, &self.options);
        let likeliest = options.top_logprobs;
        let logprobs = (options.logprobs || likeliest > 0).then_some(likeliest);
        let mask = self.constraint.as_ref().and_then(Constrained::mask);
        let choose = Choose { options: &options.sampling, history: sequence, mask, logprobs };
        let here = self.session.tokens().len();
        let prompt_tokens = self.metrics.prompt_tokens;
        let chosen = if let (true, &[token]) = (here >= prompt_tokens, &sequence[here..]) {
            let limit = options.max_tokens.unwrap_or(usize::MAX);
            // A constraint that allows all tokens now may not behind the next one.
            let more = self.constraint.is_none() && self.metrics.generated_tokens + 1 < limit;
            let watch = Watch { stop: &options.cancel.0, progress: &|_| {} };
            self.session.next(token, &choose, more, &watch)?
        } else if here < prompt_tokens {
            let (done, all) = (self.metrics.computed_tokens, self.metrics.uncached());
            let tell = |part: f64, rows: usize| {
                if let Some(progress) = &self.progress {
                    progress.tell((done + (rows as f64 * part) as usize).min(all), all);
                }
            };
            let rest = &sequence[here..prompt_tokens];
            chunk(self.session, StepKind::Prompt, rest, &choose, &options.cancel, &tell)?
        } else {
            // Rows of one sequence: each has the bits that it would have in a step of its own.
            let rest = &sequence[here..];
            let rest = &rest[..rest.len().min(RUN)];
            chunk(self.session, StepKind::Decode, rest, &choose, &options.cancel, &|_, _| {})?
        };
        let choice = match chosen {
            None => return Ok(None),
            Some(Ok(choice)) => choice,
            Some(Err(refusal)) => {
                if let Refusal::Broken(_) = refusal {
                    // Broken logits may come from a broken cache: the session forgets it.
                    self.session.clear();
                }
                return Err(refused(refusal, self.sequence.len() - 1));
            }
        };
        let likeliest = self.session.likeliest().iter();
        let top_logprobs = likeliest.map(|choice| (choice.token, choice.logprob)).collect();
        Ok(Some(Chosen { choice, top_logprobs }))
    }

    /// Counts tokens of the prompt that were computed, and says so after the last.
    fn read(&mut self, tokens: usize, since: Duration) {
        let metrics = &mut self.metrics;
        let all = metrics.uncached();
        if tokens == 0 || metrics.computed_tokens == all {
            return;
        }
        metrics.computed_tokens += tokens;
        metrics.computing = since;
        if let Some(progress) = &self.progress {
            progress.tell(metrics.computed_tokens, all);
        }
        if metrics.computed_tokens == all {
            self.progress = None;
        }
    }

    fn advance(&mut self) -> Result<Option<Token>> {
        let limit = self.options.max_tokens.unwrap_or(usize::MAX);
        if limit == 0 {
            self.finish = Some(Finish::Length);
            return Ok(None);
        }
        // What stands in front of the first choice is given with it.
        if self.metrics.generated_tokens > 0
            && let Some(ready) = self.ready.pop_front()
        {
            return Ok(Some(self.give(ready)));
        }
        if let Some(error) = self.constraint.as_ref().and_then(Constrained::failed) {
            return Err(error.clone());
        }
        let start = Instant::now();
        let sampled = self.sample()?;
        let first = self.metrics.generated_tokens == 0;
        *(if first { &mut self.metrics.prefill } else { &mut self.metrics.decode }) +=
            start.elapsed();
        let Some(Chosen { choice, top_logprobs }) = sampled else {
            self.finish = Some(Finish::Cancelled);
            return Ok(None);
        };
        let is_end = |id| !self.options.ignore_end && self.shared.ends.contains(&id);
        let (id, closing) = match &mut self.constraint {
            Some(constraint) => constraint.accept(choice.token, is_end(choice.token))?,
            None => (choice.token, false),
        };
        let logprob = constraint::logprob(id, &choice, &top_logprobs);
        let logprob = logprob.filter(|_| self.options.logprobs);
        self.sequence.push(id);
        self.ready.push_back(Ready { id, logprob, top_logprobs, closing });
        if !is_end(id)
            && let Some(constraint) = &mut self.constraint
        {
            let left = limit - (self.metrics.generated_tokens + self.ready.len());
            if left > 0 {
                constraint.prepare(left.min(self.shared.room(self.sequence.len()) + 1));
                let forced: Vec<u32> = constraint.take_forced().collect();
                self.sequence.extend(&forced);
                self.ready.extend(forced.into_iter().map(Ready::forced));
            }
        }
        let first = self.ready.pop_front();
        Ok(first.map(|ready| self.give(ready)))
    }

    /// A token as the caller is given it; whether it is the last is decided here.
    fn give(&mut self, ready: Ready) -> Token {
        let Ready { id, logprob, top_logprobs, closing } = ready;
        let limit = self.options.max_tokens.unwrap_or(usize::MAX);
        self.metrics.generated_tokens += 1;
        self.metrics.closing_tokens += usize::from(closing);
        if !self.options.ignore_end && self.shared.ends.contains(&id) {
            let text = self.end(Finish::End(id));
            return Token { id, text, logprob, top_logprobs };
        }
        let (mut text, met) = self.text.push(id);
        if let Some(stop) = met {
            self.finish = Some(Finish::StopString(stop));
        } else if self.metrics.generated_tokens >= limit {
            text += &self.end(Finish::Length);
        } else if self.ready.is_empty() && self.session.room() == 0 {
            text += &self.end(Finish::ContextFull);
        }
        Token { id, text, logprob, top_logprobs }
    }
}

/// Rows of a decode step in which tokens that a constraint put next are computed together.
const RUN: usize = 8;

/// Computes one chunk of the tokens at the end of what is looked back on, and returns the token
/// that follows if it was the last chunk. `tell` is called with the fraction of the chunk that is
/// done and the number of its rows.
fn chunk(
    session: &mut Session,
    kind: StepKind,
    rest: &[u32],
    choose: &Choose<'_>,
    cancel: &CancelToken,
    tell: &(dyn Fn(f64, usize) + Sync),
) -> Result<Option<std::result::Result<Choice, Refusal>>> {
    let ends = session.tokens().len() + rest.len() == choose.history.len();
    let (choose, from) = if ends { (Some(choose), rest.len() - 1) } else { (None, rest.len()) };
    let mut submit = |executor: &mut dyn Executor, step: &Step<'_>| {
        let watch = Watch { stop: &cancel.0, progress: &|part| tell(part, step.tokens.len()) };
        executor.submit_watched(step, &watch)
    };
    let (mut chosen, mut likeliest) = (None, Vec::new());
    let mut then = |executor: &mut dyn Executor, ticket, outputs: &[u32]| {
        if !outputs.is_empty() {
            let outcome = executor.wait(ticket)?;
            chosen = Some(outcome.choice(0));
            likeliest.extend_from_slice(outcome.likeliest(0));
        }
        Ok(())
    };
    session.step(kind, rest, from, choose, &mut submit, &mut then)?;
    session.tell_likeliest(&likeliest);
    Ok(chosen)
}

/// Checks that the logits behind the token at a position are some that may be used: finite, but for
/// tokens that are ruled out by minus infinity.
///
/// # Errors
/// The position, and the first number that is none.
pub fn check_logits(logits: &[f32], position: usize) -> Result<()> {
    broken(logits).map_or(Ok(()), |(_, value)| Err(no_number(position, value)))
}

/// The error of logits behind the token at a position from which nothing could be chosen.
pub(crate) fn refused(refusal: Refusal, position: usize) -> Error {
    match refusal {
        Refusal::Broken(value) => no_number(position, value),
        Refusal::Nothing => Error::new("sampling", "a token that may be chosen", "none")
            .of(ErrorKind::Unsupported)
            .hint("a logit bias or a grammar forbids all of them"),
    }
}

/// The error of logits that are no numbers, or infinite.
fn no_number(position: usize, value: f32) -> Error {
    let place = format!("logits at position {position}");
    let error = Error::new(place, "finite numbers", value);
    error.hint("the weights are damaged, or their products exceed what f32 and f16 hold")
}

impl Iterator for Generation<'_> {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        self.advance().inspect_err(|_| self.finish = Some(Finish::Failed)).transpose()
    }
}
