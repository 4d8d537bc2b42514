//! Where the time of a step goes: every operation of its replays, and the choice of the next token.

use crate::session::Session;
use device::{Executor, Profile};
use formats::{Error, Result};
use ops::sample::{Options, Sampler};
use program::StepKind;
use std::time::Instant;

/// Timed steps of one session or several; see [`Session::profiler`].
pub struct Profiler<'a> {
    sessions: &'a mut [Session],
    sampler: Sampler,
    sampling: Options,
}

/// The time of one step: computing its tokens, and choosing the next.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedStep {
    /// The token that was chosen for each session.
    pub tokens: Vec<u32>,
    /// The replays, one for each chunk of tokens.
    pub replays: Vec<Profile>,
    /// Seconds of the choices.
    pub sampling: f64,
    /// Seconds of the whole step; what is left over is block tables and arguments, and the timing
    /// itself.
    pub seconds: f64,
}

impl<'a> Profiler<'a> {
    /// At least one session.
    pub(crate) fn new(sessions: &'a mut [Session], sampling: Options) -> Self {
        Profiler { sessions, sampler: Sampler::new(), sampling }
    }

    /// Computes `tokens` after those of the first session and chooses the token that follows them;
    /// `None` on a device that cannot tell times.
    ///
    /// # Errors
    /// No tokens, one outside the vocabulary, or more than the context has room for.
    pub fn step(&mut self, tokens: &[u32]) -> Result<Option<TimedStep>> {
        if tokens.is_empty() {
            return Err(Error::new("a timed step", "at least one token", "none"));
        }
        let session = &mut self.sessions[0];
        session.check(tokens)?;
        let start = Instant::now();
        let (mut replays, mut silent) = (Vec::new(), false);
        let (mut token, mut sampling, mut done) = (0, 0.0, 0);
        let sequence = [session.tokens(), tokens].concat();
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
            done += session.step(kind, rest, from, None, &mut submit, &mut then)?;
        }
        let (tokens, seconds) = (vec![token], start.elapsed().as_secs_f64());
        Ok((!silent).then_some(TimedStep { tokens, replays, sampling, seconds }))
    }

    /// Computes a token of each session in one step and chooses the one that follows it; `None` on
    /// a device that cannot tell times.
    ///
    /// # Errors
    /// Other than one token for each session, and as [`Profiler::step`].
    pub fn together(&mut self, tokens: &[u32]) -> Result<Option<TimedStep>> {
        if tokens.len() != self.sessions.len() {
            let expected = format!("a token for each of {} sessions", self.sessions.len());
            return Err(Error::new("a timed step", expected, tokens.len()));
        }
        let start = Instant::now();
        for (session, token) in self.sessions.iter_mut().zip(tokens) {
            session.begin_together(*token)?;
        }
        let token = |(session, token): (&Session, &u32)| [session.tokens(), &[*token]].concat();
        let sequences: Vec<Vec<u32>> = self.sessions.iter().zip(tokens).map(token).collect();
        let (sampler, options) = (&mut self.sampler, &self.sampling);
        let timed = |executor: &mut dyn Executor, step: &program::Step<'_>| {
            let Some((ticket, profile)) = executor.submit_timed(step)? else { return Ok(None) };
            let (logits, start) = (executor.read(ticket, 0)?, Instant::now());
            let rows = logits.chunks_exact((logits.len() / sequences.len()).max(1));
            let choose = |(sequence, row): (&Vec<u32>, &[f32])| {
                sampler.token(row, sequence, sequence.len() as u64, options, None).unwrap_or(0)
            };
            let tokens = sequences.iter().zip(rows).map(choose).collect();
            Ok(Some((profile, tokens, start.elapsed().as_secs_f64())))
        };
        let none = vec![None; tokens.len()];
        let done = Session::submit_together(self.sessions, tokens, 0, &none, timed);
        let computed = matches!(done, Ok(Some(_)));
        for (session, token) in self.sessions.iter_mut().zip(tokens) {
            session.end_together(computed.then_some(*token));
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(done?.map(|(profile, tokens, sampling)| TimedStep {
            tokens,
            replays: vec![profile],
            sampling,
            seconds,
        }))
    }
}
