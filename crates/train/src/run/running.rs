//! A run under way: one update after the other, and what is due between them.

use super::{CHECKPOINT, LOG, Log, Run, RunEnd, RunEvent, Timeline, Watcher};
use crate::checkpoint::{self, State};
use crate::pack::{self, Epoch};
use crate::{Batch, Loss, Moments, Trainable};
use formats::{Aside, Error, Result};
use serde_json::{Value, json};
use std::io::Write;

/// A run under way.
pub(super) struct Running<'a> {
    pub(super) run: &'a Run<'a>,
    pub(super) model: &'a mut dyn Trainable,
    pub(super) watcher: &'a mut dyn Watcher,
    pub(super) timeline: Timeline,
    pub(super) state: State,
    pub(super) moments: Moments,
    pub(super) gradients: Vec<Vec<f32>>,
    pub(super) log: Log,
    /// The epoch that is under way, by number.
    pub(super) epoch: Option<(u32, Epoch)>,
    /// The update behind which there is a checkpoint, and the measurement that it knows of.
    pub(super) written: Option<(u64, Option<u64>)>,
}

impl Running<'_> {
    /// Goes on until the run ends, and says why.
    pub(super) fn go(&mut self) -> Result<RunEnd> {
        let settings = self.run.settings;
        loop {
            let step = self.state.step;
            let last = step >= self.timeline.all;
            let due = last || step.is_multiple_of(settings.evaluate_every.max(1));
            if due && self.state.evaluated != Some(step) && !self.run.held_out.is_empty() {
                let Some(loss) = self.held_out()? else { return Ok(RunEnd::Cancelled) };
                self.measured(loss)?;
            }
            let early = settings.patience.is_some_and(|most| self.state.waited >= most);
            if last || early {
                if self.state.best.is_none() {
                    self.export(None)?;
                }
                return Ok(if last { RunEnd::Done } else { RunEnd::Early });
            }
            if step > 0 && step.is_multiple_of(self.run.intervals.checkpoint.max(1)) {
                self.checkpoint()?;
            }
            if !self.update()? {
                return Ok(RunEnd::Cancelled);
            }
            let sample = self.run.intervals.sample;
            if sample > 0 && self.state.step.is_multiple_of(sample) {
                self.watcher.sample(self.state.step, &self.model.export()?)?;
            }
        }
    }

    /// Makes an update; `false` where it was stopped before it was made.
    fn update(&mut self) -> Result<bool> {
        let (settings, step) = (self.run.settings, self.state.step);
        let number = self.timeline.ends.partition_point(|end| *end <= step);
        let before = if number == 0 { 0 } else { self.timeline.ends[number - 1] };
        let number = number as u32;
        if self.epoch.as_ref().is_none_or(|(of, _)| *of != number) {
            self.epoch = Some((number, settings.epoch(self.run.training, number)?));
        }
        let Some((_, epoch)) = &self.epoch else { return Ok(false) };
        let (mut loss, mut tokens) = (Loss::default(), 0);
        for numbers in epoch.update((step - before) as usize) {
            if self.watcher.cancelled() {
                return Ok(false);
            }
            let read = self.state.tokens + tokens;
            let batch = Batch { read, ..pack::batch(self.run.training, numbers) };
            let first = tokens == 0;
            tokens += batch.tokens.len() as u64;
            loss += self.model.accumulate(&batch, first, &mut self.gradients)?;
        }
        let mean = self.finite(loss)?;
        let rates = [settings.rate, settings.least];
        let rate = settings.schedule.rate(rates, step, self.timeline.all, settings.warmup);
        let (gradients, moments) = (&self.gradients, &mut self.moments);
        let by = [rate, loss.weight];
        let norm = self.model.update(&settings.optimiser, by, gradients, moments)?;
        self.state.step += 1;
        self.state.tokens += tokens;
        let (step, of, epoch) = (self.state.step, self.timeline.all, number + 1);
        self.note(&json!({
            "step": step, "epoch": epoch, "loss": mean, "rate": rate, "norm": norm, "tokens": tokens,
        }))?;
        self.watcher.event(&RunEvent::Update { step, of, epoch, loss: mean, rate, norm, tokens });
        Ok(true)
    }

    /// The mean of a loss that counts something.
    fn finite(&self, loss: Loss) -> Result<f64> {
        if loss.weight > 0.0 && loss.sum.is_finite() {
            return Ok(loss.mean());
        }
        let place = format!("the loss behind update {}", self.state.step);
        let error = Error::new(place, "a finite number", loss.mean());
        Err(error.hint("take a lower learning rate"))
    }

    /// The held-out loss; `None` where it was stopped.
    fn held_out(&mut self) -> Result<Option<f64>> {
        let examples = self.run.held_out;
        let order: Vec<usize> = (0..examples.len()).collect();
        let mut loss = Loss::default();
        for run in pack::runs(examples, &order, self.run.settings.batch_tokens)? {
            if self.watcher.cancelled() {
                return Ok(None);
            }
            loss += self.model.loss(&pack::batch(examples, &order[run]))?;
        }
        self.finite(loss).map(Some)
    }

    /// Notes a held-out loss, and writes the parameters if it is the least so far; the loss of the
    /// untrained model is only noted.
    fn measured(&mut self, loss: f64) -> Result<()> {
        let step = self.state.step;
        let best = step > 0 && self.state.best.is_none_or(|(_, bits)| loss < f64::from_bits(bits));
        if best {
            self.export(Some(loss))?;
            (self.state.best, self.state.waited) = (Some((step, loss.to_bits())), 0);
        } else if step > 0 {
            self.state.waited += 1;
        }
        self.state.evaluated = Some(step);
        self.note(&json!({ "step": step, "held_out": loss }))?;
        self.watcher.event(&RunEvent::HeldOut { step, loss, best });
        Ok(())
    }

    /// A line of the log.
    fn note(&mut self, line: &Value) -> Result<()> {
        let line = format!("{line}\n");
        let place = self.run.folder.join(LOG);
        self.log.0.write_all(line.as_bytes()).map_err(|e| Error::io(place.display(), e))?;
        self.state.log += line.len() as u64;
        Ok(())
    }

    /// Writes what the parameters make, and what it was made of.
    fn export(&mut self, held_out: Option<f64>) -> Result<()> {
        let folder = self.run.folder;
        for (name, bytes) in self.model.export()? {
            Aside::whole(&folder.join(name), &bytes)?;
        }
        let identity = self.state.identity.iter();
        let made: serde_json::Map<String, Value> =
            identity.map(|(name, value)| (name.replace(' ', "_"), value.as_str().into())).collect();
        let provenance = json!({
            "made_by": concat!("delft ", env!("CARGO_PKG_VERSION")),
            "step": self.state.step,
            "tokens": self.state.tokens,
            "held_out": held_out,
            "made_of": made,
        });
        Aside::whole(&folder.join("delft.json"), format!("{provenance:#}\n").as_bytes())
    }

    /// Writes a checkpoint, if there is none of this update.
    pub(super) fn checkpoint(&mut self) -> Result<()> {
        let step = self.state.step;
        let now = Some((step, self.state.evaluated));
        if self.written == now {
            return Ok(());
        }
        // The checkpoint counts on the lines that the log has.
        let log = self.run.folder.join(LOG);
        self.log.0.sync_data().map_err(|e| Error::io(log.display(), e))?;
        let path = self.run.folder.join(CHECKPOINT);
        self.run.draw()?;
        self.model.fetch(Some(&mut self.moments))?;
        checkpoint::write(&path, &self.state, self.model.parameters(), &self.moments)?;
        self.written = now;
        self.watcher.event(&RunEvent::Written(step));
        Ok(())
    }
}
