//! `delft serve --tune`: an adapter in training beside its model, served as it stands.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use clap::Parser;
use delft::train::run::{self, RunEnd, RunEvent, Watcher};
use delft::{AdapterFile, Adapters, Engine, Error, ErrorKind, Result};
use serve::Adapted;

use crate::args::{Cli, Command, Serve};
use crate::commands::tune::begun::Noted;
use crate::commands::tune::{self, AdapterRoom, Prepared};
use crate::terminal::{Outcome, Stop, aside, harmless, line, note};
use crate::tuning::Tune;

/// Seats for the adapter as it stands, and for those that requests began with before.
const SEATS: usize = 4;
/// Lines about the run.
const LINES: u64 = 10;

/// A run that waits for the server, on a thread of its own.
pub(super) struct Tuning {
    room: AdapterRoom,
    folder: PathBuf,
    go: Sender<Offer>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Where the adapter is served.
struct Offer {
    engines: Vec<Engine>,
    adapted: Adapted,
    of: String,
}

impl Tuning {
    /// Prepares the run that the flags ask for, if they do.
    pub(super) fn of(args: &Serve) -> Outcome<Option<Tuning>> {
        let Some(data) = &args.tune else { return Ok(None) };
        if args.models.len() > 1 {
            let found = format!("{} models", args.models.len());
            return Err(Error::new("--tune", "one model, which is tuned", found).into());
        }
        let mut words = ["delft", "tune", "--data"].map(OsString::from).to_vec();
        words.push(OsString::from(data));
        if let Some(super::Word { model, .. }) =
            args.models.first().map(|word| super::Word::of(word))
        {
            words.extend(["--model", &model].map(OsString::from));
        }
        if let Some(folder) = &args.tune_out {
            words.extend([OsString::from("--out"), OsString::from(folder)]);
        }
        let more = args.tune_flags.as_deref().unwrap_or_default();
        words.extend(more.split_whitespace().map(OsString::from));
        let mut cli = Cli::try_parse_from(&words).map_err(|e| Stop::Usage(e.to_string()))?;
        cli.command.settle()?;
        let Command::Tune(mut tune) = cli.command else { return Ok(None) };
        let folder = tune::folder(&tune)?;
        let refused = [
            ("--full", tune.lora.full),
            ("--resume", tune.resume),
            ("--sample", tune.sample.is_some()),
        ];
        if let Some((flag, _)) = refused.iter().find(|(_, given)| *given) {
            let error = Error::new("--tune-flags", "flags of an adapter in training", *flag);
            let why = "a run that is there is gone on with by itself, and requests are the samples";
            return Err(error.hint(why).into());
        }
        // A server that is started again goes on.
        tune.resume = run::checkpointed(&folder);
        let (told, heard) = channel();
        let (go, offer) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, at) = (stop.clone(), folder.clone());
        let thread =
            std::thread::spawn(move || train((&tune, words), &at, &told, &offer, &stopped));
        match heard.recv() {
            Ok(Ok(room)) => Ok(Some(Tuning { room, folder, go, stop, thread })),
            Ok(Err(stop)) => Err(stop),
            Err(_) => Err(Error::new("--tune", "a run", "a panic that ended it").into()),
        }
    }

    /// Room for it in the model that is served.
    pub(super) fn room(&self, adapters: &mut Adapters) {
        adapters.more += SEATS;
        adapters.rank = adapters.rank.max(self.room.rank);
        adapters.experts |= self.room.experts;
        adapters.tables |= self.room.tables;
    }

    /// The adapter's name in requests.
    pub(super) fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Begins, and serves the adapter as it stands beside the model `of`.
    pub(super) fn begin(self, engines: Vec<Engine>, adapted: Adapted, of: String) -> Begun {
        // If it has ended already, it has said why.
        let _ = self.go.send(Offer { engines, adapted, of });
        Begun { stop: self.stop, thread: self.thread }
    }
}

/// A run beside a server.
pub(super) struct Begun {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Begun {
    /// Stops the run at its next batch, behind which it can be resumed, and waits for it.
    pub(super) fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        // A panic has been told.
        let _ = self.thread.join();
    }
}

/// The thread of the run.
fn train(
    (args, words): (&Tune, Vec<OsString>),
    folder: &Path,
    told: &Sender<Outcome<AdapterRoom>>,
    offer: &Receiver<Offer>,
    stop: &AtomicBool,
) {
    let prepared = Prepared::new(args, folder).and_then(|mut prepared| {
        prepared.offer()?;
        Ok(prepared)
    });
    let mut prepared = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            // The server, if it still waits, tells why.
            let _ = told.send(Err(error));
            return;
        }
    };
    let _ = told.send(Ok(prepared.room()));
    // None comes where the server could not begin.
    let Ok(offer) = offer.recv() else { return };
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let trained = Noted::new(words.into_iter()).and_then(|noted| {
        let mut shown = Shown { offer: &offer, name: &name, stop, noted };
        // Its name is there from the beginning, when it changes nothing yet, or what it did when
        // its run was stopped.
        match args.resume && folder.join("adapter_config.json").exists() {
            true => shown.seat(folder)?,
            false => shown.sample(0, &prepared.made()?)?,
        }
        let (summary, _) = prepared.train(folder, args.resume, &mut shown)?;
        Ok((summary, shown))
    });
    match trained {
        Ok((summary, ..)) if summary.end == RunEnd::Cancelled => {
            let place = harmless(&folder.display().to_string());
            aside(format_args!(
                "tuning stopped behind update {}: the same command goes on from there, and so does \
                 delft tune --resume --out {place}",
                summary.step
            ));
        }
        Ok((_, shown)) => match shown.seat(folder) {
            Ok(()) => aside(format_args!("tuned: {} is the finished adapter", harmless(&name))),
            Err(error) => note(format_args!("tuning: {}", line(&error))),
        },
        Err(Stop::Error(error)) => note(format_args!("tuning: {}", line(&error))),
        Err(_) => note(format_args!("tuning ended")),
    }
}

/// Tells what happens, and has the adapter served as it stands.
struct Shown<'a> {
    offer: &'a Offer,
    name: &'a str,
    stop: &'a AtomicBool,
    noted: Noted,
}

impl Shown<'_> {
    fn seat(&self, folder: &Path) -> Result<()> {
        let Offer { engines, adapted, of } = self.offer;
        let file = AdapterFile { path: folder.to_owned(), scale: 1.0, any_base: false };
        let adapters = engines.iter().map(|engine| engine.adapt(&file)).collect::<Result<_>>()?;
        adapted.put(of, self.name, adapters)
    }
}

impl Watcher for Shown<'_> {
    fn begun(&mut self, folder: &Path) -> Result<()> {
        self.noted.write(folder)
    }

    fn event(&mut self, event: &RunEvent) {
        match *event {
            RunEvent::Resumed(step, of) => {
                note(format_args!("tuning goes on behind update {step} of {of}"));
            }
            RunEvent::HeldOut { step, loss, .. } => {
                note(format_args!("tuning: update {step}: held-out loss {loss:.4}"));
            }
            RunEvent::Update { step, of, loss, .. } if step.is_multiple_of((of / LINES).max(1)) => {
                note(format_args!("tuning: update {step} of {of}: loss {loss:.4}"));
            }
            _ => {}
        }
    }

    fn cancelled(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn sample(&mut self, _: u64, files: &[(String, Vec<u8>)]) -> Result<()> {
        let io = |e| Error::io("the adapter as it stands", e);
        let folder = tempfile::tempdir().map_err(io)?;
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).map_err(io)?;
        }
        match self.seat(folder.path()) {
            // Requests use all seats: the one before stays.
            Err(error) if error.kind == ErrorKind::Busy => Ok(()),
            other => other,
        }
    }
}
