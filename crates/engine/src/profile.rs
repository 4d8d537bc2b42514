//! Where the time of a step goes: every operation of its replays, and the choice of the next token.

use crate::session::Session;
use device::{Executor, Profile};
use formats::{Error, Result};
use ops::sample::{Options, Sampler};
use program::StepKind;
use std::time::Instant;

/// Timed steps on a session; see [`Session::profiler`].
pub struct Profiler<'a> {
    session: &'a mut Session,
    sampler: Sampler,
    sampling: Options,
}

/// The time of one step: computing its tokens, and choosing the next.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedStep {
    /// The token that was chosen.
    pub token: u32,
    /// The replays, one for each chunk of tokens.
    pub replays: Vec<Profile>,
    /// Seconds of the choice.
    pub sampling: f64,
    /// Seconds of the whole step; what is left over is block tables and arguments, and the timing
    /// itself.
    pub seconds: f64,
}

impl<'a> Profiler<'a> {
    pub(crate) fn new(session: &'a mut Session, sampling: Options) -> Self {
        Profiler { session, sampler: Sampler::new(), sampling }
    }

    /// Computes `tokens` after those already here and chooses the token that follows them; `None`
    /// on a device that cannot tell times.
    ///
    /// # Errors
    /// No tokens, one outside the vocabulary, or more than the context has room for.
    pub fn step(&mut self, tokens: &[u32]) -> Result<Option<TimedStep>> {
        if tokens.is_empty() {
            return Err(Error::new("a timed step", "at least one token", "none"));
        }
        self.session.check(tokens)?;
        let start = Instant::now();
        let (mut replays, mut silent) = (Vec::new(), false);
        let (mut token, mut sampling, mut done) = (0, 0.0, 0);
        let sequence = [self.session.tokens(), tokens].concat();
        let kind = if tokens.len() == 1 { StepKind::Decode } else { StepKind::Prompt };
        while done < tokens.len() && !silent {
            let mut submit = |executor: &mut dyn Executor, step: &program::Step<'_>| {
                let timed = executor.submit_timed(step)?;
                silent = timed.is_none();
                Ok(timed.map(|(ticket, profile)| {
                    replays.push(profile);
                    ticket
                }))
            };
            let rest = &tokens[done..];
            let mut then = |executor: &mut dyn Executor, ticket, outputs: &[u32]| {
                if !outputs.is_empty() {
                    let start = Instant::now();
                    let (logits, position) = (executor.read(ticket, 0)?, sequence.len() as u64);
                    let chosen =
                        self.sampler.token(logits, &sequence, position, &self.sampling, None);
                    token = chosen.unwrap_or(token);
                    sampling = start.elapsed().as_secs_f64();
                }
                Ok(())
            };
            let from = rest.len() - 1;
            done += self.session.step(kind, rest, from, None, &mut submit, &mut then)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok((!silent).then_some(TimedStep { token, replays, sampling, seconds }))
    }
}
