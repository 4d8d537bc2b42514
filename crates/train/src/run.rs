//! The loop of a run: updates, held-out losses, checkpoints, and what is written when.
//!
//! Everything that a run computes follows from the model, the examples and [`Settings`], so that
//! one that was stopped, by whatever, and resumed writes the same bytes as one that was not. A
//! folder holds the run: `checkpoint.delft`, `loss.jsonl`, `loss.svg`, what [`Trainable::export`]
//! gives, and `delft.json`, which says what that was made of.

mod running;

use crate::checkpoint::{self, State};
use crate::pack::Epoch;
use crate::{AdamW, Curve, Example, Moments, Parameter, RateSchedule, Trainable};
use formats::{Aside, Error, Result};
use running::Running;
use std::fs::File;
use std::path::{Path, PathBuf};

/// How long a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Passes over the examples.
    Epochs(u32),
    /// Updates, over as many passes as they take.
    Updates(u64),
}

/// The settings that determine a run, besides the model and the examples.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The order of the examples.
    pub seed: u64,
    /// Where it ends.
    pub length: Length,
    /// Tokens of a batch at most.
    pub batch_tokens: usize,
    /// Batches of an update.
    pub accumulate: usize,
    /// The greatest learning rate.
    pub rate: f64,
    /// How it goes on from there.
    pub schedule: RateSchedule,
    /// The learning rate that it falls to.
    pub least: f64,
    /// Updates in which it rises from zero.
    pub warmup: u64,
    /// The optimiser.
    pub optimiser: AdamW,
    /// Updates between two measurements of the held-out loss.
    pub evaluate_every: u64,
    /// Measurements without a new least loss after which the run ends.
    pub patience: Option<u64>,
}

/// When a run writes and shows something, which changes none of its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Updates between two checkpoints.
    pub checkpoint: u64,
    /// Updates between two samples; 0: none.
    pub sample: u64,
}

/// An event of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunEvent {
    /// The run continues after this update, of this many.
    Resumed(u64, u64),
    /// An update was made.
    Update {
        /// Its number, from 1.
        step: u64,
        /// Number of updates.
        of: u64,
        /// Which pass over the examples, from 1.
        epoch: u32,
        /// Mean loss of its batches, in nats per token that counts.
        loss: f64,
        /// Its learning rate.
        rate: f64,
        /// The norm of its gradients before clipping.
        norm: f64,
        /// Tokens that it read.
        tokens: u64,
    },
    /// The held-out loss was measured.
    HeldOut {
        /// Behind how many updates.
        step: u64,
        /// Mean loss, in nats per token that counts.
        loss: f64,
        /// Whether it is the least so far, and the parameters were written.
        best: bool,
    },
    /// A checkpoint was written behind this update.
    Written(u64),
}

/// Whoever started a run.
pub trait Watcher {
    /// Told what happens.
    fn event(&mut self, event: &RunEvent);

    /// Called when a run that is not resumed has its folder to itself, before it computes anything.
    ///
    /// # Errors
    /// They end the run.
    fn begun(&mut self, folder: &Path) -> Result<()> {
        let _ = folder;
        Ok(())
    }

    /// Whether the run shall stop, at its next batch.
    fn cancelled(&self) -> bool {
        false
    }

    /// Called at regular numbers of updates, with the files of the parameters.
    ///
    /// # Errors
    /// They end the run.
    fn sample(&mut self, step: u64, files: &[(String, Vec<u8>)]) -> Result<()> {
        let _ = (step, files);
        Ok(())
    }
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// All updates were made.
    Done,
    /// The held-out loss fell no more.
    Early,
    /// Somebody stopped it; it can be resumed.
    Cancelled,
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// Why it ended.
    pub end: RunEnd,
    /// Updates that were made, earlier runs included.
    pub step: u64,
    /// Tokens that they read.
    pub tokens: u64,
    /// The update whose parameters were written, and its held-out loss.
    pub best: Option<(u64, f64)>,
    /// Losses as they went.
    pub curve: Curve,
}

/// A run before it starts: what it is of, and where it lies.
#[derive(Debug)]
pub struct Run<'a> {
    /// The settings of the run.
    pub settings: &'a Settings,
    /// When it writes.
    pub intervals: Intervals,
    /// The examples to learn from.
    pub training: &'a [Example],
    /// The examples that are only measured; may be empty.
    pub held_out: &'a [Example],
    /// Further inputs that determine the result, by name: the model, the data. A resumed run must
    /// have the same.
    pub identity: &'a [(String, String)],
    /// The folder.
    pub folder: &'a Path,
    /// Whether it goes on from the checkpoint in the folder.
    pub resume: bool,
}

/// Updates of each epoch, as the number of those before its end.
struct Timeline {
    ends: Vec<u64>,
    all: u64,
}

impl Settings {
    fn epoch(&self, examples: &[Example], number: u32) -> Result<Epoch> {
        Epoch::new(examples, self.seed, number, self.batch_tokens, self.accumulate)
    }

    /// Updates of a run over these examples.
    ///
    /// # Errors
    /// No examples; one longer than a batch.
    pub fn updates(&self, examples: &[Example]) -> Result<u64> {
        Ok(self.timeline(examples)?.all)
    }

    fn timeline(&self, examples: &[Example]) -> Result<Timeline> {
        if examples.is_empty() {
            return Err(Error::new("the data", "examples to learn from", "none"));
        }
        let (mut ends, mut all) = (Vec::new(), 0);
        let more = |epochs: usize, updates: u64| match self.length {
            Length::Epochs(count) => epochs < count as usize,
            Length::Updates(count) => updates < count,
        };
        while more(ends.len(), all) {
            let number = u32::try_from(ends.len()).unwrap_or(u32::MAX);
            all += self.epoch(examples, number)?.updates() as u64;
            ends.push(all);
        }
        if let Length::Updates(count) = self.length {
            all = count;
        }
        Ok(Timeline { ends, all })
    }

    /// By name, as a run that is resumed must have them.
    fn identity(&self) -> Vec<(String, String)> {
        let o = &self.optimiser;
        let named = |name: &str, value: String| (name.to_owned(), value);
        let least = match self.least {
            0.0 => String::new(),
            least => format!(" to {least}"),
        };
        vec![
            named("seed", self.seed.to_string()),
            named("length", format!("{:?}", self.length)),
            named("batch tokens", self.batch_tokens.to_string()),
            named("accumulation", self.accumulate.to_string()),
            named("learning rate", self.rate.to_string()),
            named("schedule", format!("{:?}{least}, {} to warm up", self.schedule, self.warmup)),
            named(
                "optimiser",
                format!(
                    "AdamW, betas {:?}, epsilon {}, decay {}, clip {}",
                    o.betas,
                    o.epsilon,
                    o.decay,
                    o.clip.map_or("none".to_owned(), |clip| clip.to_string())
                ),
            ),
            named(
                "evaluation",
                format!(
                    "every {}, patience {}",
                    self.evaluate_every,
                    self.patience.map_or("none".to_owned(), |times| times.to_string())
                ),
            ),
        ]
    }
}

/// Bytes that a run needs beside the model: for parameters, gradients and moments.
pub fn memory(parameters: &[Parameter]) -> u64 {
    parameters.iter().map(|p| 16 * p.values.len() as u64).sum()
}

/// Bytes of its folder's disk that a run needs at once: for a checkpoint that is written beside the
/// former one, and for what the parameters make, in as many bytes for each, beside the former too.
/// A run that is resumed has the former ones already.
pub fn disk(parameters: &[Parameter], bytes_each: u64, resumed: bool) -> u64 {
    let count: u64 = parameters.iter().map(|p| p.values.len() as u64).sum();
    // A parameter and its two moments in f32.
    let whole = count * (12 + bytes_each);
    if resumed { whole } else { 2 * whole }
}

/// Whether a folder has the checkpoint of a run.
pub fn checkpointed(folder: &Path) -> bool {
    folder.join(CHECKPOINT).exists()
}

const CHECKPOINT: &str = "checkpoint.delft";
const LOG: &str = "loss.jsonl";

impl Run<'_> {
    /// Trains the model.
    ///
    /// # Errors
    /// A folder that has a run already where none is resumed, none where one is, or one of
    /// something else; losses or gradients that are not finite; files that cannot be written.
    pub fn train(
        &self,
        model: &mut dyn Trainable,
        watcher: &mut dyn Watcher,
    ) -> Result<RunSummary> {
        let timeline = self.settings.timeline(self.training)?;
        std::fs::create_dir_all(self.folder).map_err(|e| Error::io(self.folder.display(), e))?;
        let mut moments = Moments::zeros(model.parameters());
        let log = self.open_log()?;
        let state = self.begin(model, &mut moments)?;
        model.go_on_from(&moments)?;
        self.cut_log(&log.0, state.log)?;
        remove_unfinished(self.folder)?;
        if !self.resume {
            watcher.begun(self.folder)?;
        }
        let gradients = moments.first.iter().map(|row| vec![0.0; row.len()]).collect();
        let written = self.resume.then_some((state.step, state.evaluated));
        if self.resume {
            watcher.event(&RunEvent::Resumed(state.step, timeline.all));
        }
        let mut running = Running {
            run: self,
            model,
            watcher,
            timeline,
            state,
            moments,
            gradients,
            log,
            epoch: None,
            written,
        };
        let end = running.go()?;
        running.checkpoint()?;
        let curve = self.draw()?;
        let State { step, tokens, best, .. } = running.state;
        let best = best.map(|(step, bits)| (step, f64::from_bits(bits)));
        Ok(RunSummary { end, step, tokens, best, curve })
    }

    /// The state that a run goes on from.
    fn begin(&self, model: &mut dyn Trainable, moments: &mut Moments) -> Result<State> {
        let path = self.folder.join(CHECKPOINT);
        let mut identity = self.identity.to_vec();
        identity.extend(self.settings.identity());
        if !self.resume {
            if path.exists() {
                let error = Error::new(
                    self.folder.display(),
                    "a folder without a run",
                    "one with a checkpoint",
                );
                return Err(error.hint("resume that run, or name another folder"));
            }
            let parameters = checkpoint::shapes(model.parameters());
            return Ok(State { identity, parameters, ..State::default() });
        }
        let same = |state: &State| {
            let differs = |(a, b): &(&(String, String), &(String, String))| a != b;
            match state.identity.iter().zip(&identity).find(differs) {
                Some((there, here)) => {
                    let place = format!("{}: {}", path.display(), here.0);
                    let error = Error::new(place, &there.1, &here.1);
                    Err(error.hint("a run is resumed with what it was begun with"))
                }
                None if state.identity.len() != identity.len() => {
                    Err(Error::new(path.display(), "a checkpoint of this version", "another"))
                }
                None => Ok(()),
            }
        };
        checkpoint::read(&path, model.parameters_mut(), moments, &same)
    }

    /// Writes the curve of the losses so far as a picture.
    fn draw(&self) -> Result<Curve> {
        let path = self.folder.join(LOG);
        let log = std::fs::read_to_string(&path).map_err(|e| Error::io(path.display(), e))?;
        let curve = Curve::of_log(&log);
        Aside::whole(&self.folder.join("loss.svg"), curve.svg().as_bytes())?;
        Ok(curve)
    }

    /// The log, which is this run's alone as long as it is open.
    fn open_log(&self) -> Result<Log> {
        // Nothing is made where there is nothing to go on with.
        if self.resume {
            let path = self.folder.join(CHECKPOINT);
            std::fs::metadata(&path).map_err(|e| Error::io(path.display(), e))?;
        }
        let path = self.folder.join(LOG);
        let io = |e| Error::io(path.display(), e);
        let file = File::options().create(true).append(true).open(&path).map_err(io)?;
        file.try_lock().map_err(|_| {
            let error =
                Error::new(self.folder.display(), "a folder of one run", "one that is under way");
            error.of(formats::ErrorKind::Busy)
        })?;
        Ok(Log(file))
    }

    /// Leaves the log the lines that the checkpoint knows of.
    fn cut_log(&self, file: &File, bytes: u64) -> Result<()> {
        let path = self.folder.join(LOG);
        let io = |e| Error::io(path.display(), e);
        let found = file.metadata().map_err(io)?.len();
        if found < bytes {
            let expected = format!("{bytes} bytes at least, as the checkpoint says");
            return Err(Error::new(path.display(), expected, found));
        }
        file.set_len(bytes).map_err(io)
    }
}

/// A run's log, locked. A program that another thread starts has its file for a moment, too, so
/// that closing it would not unlock it.
struct Log(File);

impl Drop for Log {
    fn drop(&mut self) {
        // The run has ended; a lock that stays is the next one's to tell of.
        drop(self.0.unlock());
    }
}

/// Removes what a run that was killed had not finished writing.
fn remove_unfinished(folder: &Path) -> Result<()> {
    let io = |e| Error::io(folder.display(), e);
    let ours = |name: &str| {
        name == CHECKPOINT
            || [".svg", ".json", ".safetensors"].iter().any(|end| name.ends_with(end))
    };
    let unfinished = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parts: Vec<&str> = name.rsplitn(3, '.').collect();
        matches!(parts[..], ["tmp", id, of] if id.parse::<u32>().is_ok() && ours(of))
    };
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if unfinished(&path) {
            std::fs::remove_file(&path).map_err(|e| Error::io(path.display(), e))?;
        }
    }
    Ok(())
}
