//! A run as it goes: a bar at a terminal, lines elsewhere, and samples of what it has learned.

use std::path::Path;
use std::time::Instant;

use delft::hub::LocalModel;
use delft::train::run::{RunEvent, Watcher};
use delft::train::{Language, LoraOptions, sparks};
use delft::{
    AdapterFile, Adapters, DeviceSpec, Engine, Error, GenerateOptions, LoadOptions, Prompt, Result,
    SamplingOptions,
};
use indicatif::ProgressBar;
use serde_json::{Map, json};

use super::begun::Noted;
use crate::interrupt::Generating;
use crate::progress::style;
use crate::terminal::{Outcome, aside, harmless, note, printable, stderr_is_terminal};
use crate::tuning::Tune;

/// Lines about a run where standard error is no terminal.
const LINES: u64 = 20;
/// Columns of the curve beside the bar.
const SPARKS: usize = 16;
/// Tokens of a sample.
const SAMPLED: usize = 64;

/// How long a run took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Speed {
    /// Tokens of this process's updates.
    tokens: u64,
    pub(super) seconds: f64,
}

impl Speed {
    /// Tokens per second, everything else that a run does included.
    pub(super) fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }
}

/// Whoever looks at a run.
pub(super) struct Shown {
    /// Ctrl-C stops the run at its next batch.
    stops: Generating,
    began: Instant,
    tokens: u64,
    bar: Option<ProgressBar>,
    /// Losses of this process's updates, and how many of them lines have told of.
    losses: Vec<f64>,
    told: usize,
    samples: Option<Samples>,
    noted: Noted,
}

impl Shown {
    pub(super) fn new(
        args: &Tune,
        model: &LocalModel,
        language: &Language,
        lora: Option<&LoraOptions>,
    ) -> Outcome<Shown> {
        let samples = match &args.sample {
            Some(text) => Some(Samples::new(text, args, model, language, lora)?),
            None => None,
        };
        Ok(Shown {
            stops: Generating::begin(),
            began: Instant::now(),
            tokens: 0,
            bar: None,
            losses: Vec::new(),
            told: 0,
            samples,
            noted: Noted::new(std::env::args_os())?,
        })
    }

    /// Wipes the bar, and says how long it took.
    pub(super) fn end(mut self) -> Speed {
        self.bar.take().iter().for_each(ProgressBar::finish_and_clear);
        Speed { tokens: self.tokens, seconds: self.began.elapsed().as_secs_f64() }
    }

    /// A line that the bar makes room for.
    fn line(&self, write: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    fn update(&mut self, step: u64, of: u64, loss: f64, tokens: u64) {
        self.tokens += tokens;
        self.losses.push(loss);
        let seconds = self.began.elapsed().as_secs_f64();
        let rate = self.tokens as f64 / seconds.max(1e-9);
        let left = seconds / self.losses.len() as f64 * (of - step) as f64;
        if stderr_is_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let bar = ProgressBar::new(of);
                bar.set_style(style("[{bar:30}] {pos}/{len}  {msg}"));
                bar
            });
            bar.set_message(format!(
                "loss {loss:.4} {}  {rate:.0} tokens/s  {} left",
                sparks(&self.losses, SPARKS),
                duration(left)
            ));
            bar.set_position(step);
        } else if step.is_multiple_of((of / LINES).max(1)) || step == of {
            let since = &self.losses[self.told..];
            let mean = since.iter().sum::<f64>() / since.len() as f64;
            self.told = self.losses.len();
            note(format_args!(
                "update {step} of {of}: loss {mean:.4}, {rate:.0} tokens/s, {} left",
                duration(left)
            ));
        }
    }
}

/// Seconds for people.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

impl Watcher for Shown {
    fn begun(&mut self, folder: &Path) -> Result<()> {
        self.noted.write(folder)
    }

    fn event(&mut self, event: &RunEvent) {
        match *event {
            RunEvent::Resumed(step, of) => {
                aside(format_args!("goes on behind update {step} of {of}"))
            }
            RunEvent::Update { step, of, loss, tokens, .. } => self.update(step, of, loss, tokens),
            RunEvent::HeldOut { step: 0, loss, .. } => {
                self.line(|| note(format_args!("held-out loss {loss:.4} before the first update")));
            }
            RunEvent::HeldOut { step, loss, best } => {
                let mark = if best { ", the least so far" } else { "" };
                self.line(|| note(format_args!("update {step}: held-out loss {loss:.4}{mark}")));
            }
            RunEvent::Written(_) => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.stops.0.is_cancelled()
    }

    fn sample(&mut self, step: u64, files: &[(String, Vec<u8>)]) -> Result<()> {
        let Some(samples) = &self.samples else { return Ok(()) };
        let options = GenerateOptions {
            sampling: SamplingOptions::greedy(),
            max_tokens: Some(SAMPLED),
            cancel: self.stops.0.clone(),
            ..GenerateOptions::default()
        };
        let text = samples.text(files, &options)?;
        self.line(|| note(format_args!("update {step}: {}", printable(&text))));
        Ok(())
    }
}

/// The model as it stands.
struct Samples {
    /// The base, on which adapters are tried; none where all of the model is trained.
    base: Option<Engine>,
    options: LoadOptions,
    prompt: Prompt,
    /// The prompt that a sample is shown behind; empty for a question.
    shown: String,
}

impl Samples {
    fn new(
        text: &str,
        args: &Tune,
        model: &LocalModel,
        language: &Language,
        lora: Option<&LoraOptions>,
    ) -> Outcome<Samples> {
        let prompt = match language.template.is_some() && !args.raw {
            true => {
                let messages = vec![json!({ "role": "user", "content": text })];
                Prompt::Chat { messages, extra: Map::new() }
            }
            false => Prompt::Text(text.to_owned()),
        };
        let tokens = prompt.encode(Some(&language.tokenizer), language.template.as_ref())?;
        // Where it is trained; of several devices the first.
        let device = match args.device {
            DeviceSpec::Several(several) => several.places().next().unwrap_or_default(),
            place => place,
        };
        let options = LoadOptions {
            device,
            threads: args.threads.map(|n| n as usize),
            context: Some(tokens.len() + SAMPLED),
            sessions: 1,
            // Training takes what memory is left.
            copies: false,
            adapters: match lora {
                Some(lora) => Adapters {
                    more: 1,
                    rank: lora.rank,
                    experts: lora.changes_experts(),
                    tables: !lora.whole.is_empty(),
                    ..Adapters::default()
                },
                None => Adapters::default(),
            },
            ..LoadOptions::default()
        };
        let base = lora.map(|_| Engine::load(model.location.clone(), &options)).transpose()?;
        let shown = if matches!(prompt, Prompt::Text(_)) { harmless(text) } else { String::new() };
        Ok(Samples { base, options, prompt, shown })
    }

    /// The text that a model generates with these files: an adapter, or a model.
    fn text(&self, files: &[(String, Vec<u8>)], options: &GenerateOptions) -> Result<String> {
        let io = |e| Error::io("a sample's files", e);
        let folder = tempfile::tempdir().map_err(io)?;
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).map_err(io)?;
        }
        let mut session = match &self.base {
            Some(base) => {
                let path = folder.path().to_owned();
                let file = AdapterFile { path, scale: 1.0, any_base: false };
                let mut session = base.session();
                session.set_adapter(Some(base.adapt(&file)?))?;
                session
            }
            None => Engine::load(folder.path(), &self.options)?.session(),
        };
        let mut text = self.shown.clone();
        for token in session.generate(self.prompt.clone(), options)? {
            text += &token?.text;
        }
        Ok(text)
    }
}
