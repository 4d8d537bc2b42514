//! The loop of a run, with a model small enough to follow.

use crate::toy::{Bigram, examples};
use delft_train::run::{Intervals, Length, RunEnd, RunEvent, RunSummary, Watcher};
use delft_train::{AdamW, Example, RateSchedule, Run, Settings};
use formats::Result;
use std::cell::Cell;
use std::path::Path;

/// Notes what happens, and stops a run at some batch.
#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) events: Vec<RunEvent>,
    pub(crate) samples: Vec<u64>,
    pub(crate) batches: Cell<usize>,
    pub(crate) stop_at: Option<usize>,
}

impl Watcher for Notes {
    fn event(&mut self, event: &RunEvent) {
        self.events.push(*event);
    }

    fn cancelled(&self) -> bool {
        self.batches.set(self.batches.get() + 1);
        self.stop_at.is_some_and(|at| self.batches.get() > at)
    }

    fn sample(&mut self, step: u64, files: &[(String, Vec<u8>)]) -> Result<()> {
        assert_eq!(files.len(), 1);
        self.samples.push(step);
        Ok(())
    }
}

pub(crate) fn settings() -> Settings {
    Settings {
        seed: 5,
        length: Length::Epochs(4),
        batch_tokens: 24,
        accumulate: 2,
        rate: 0.05,
        schedule: RateSchedule::Cosine,
        least: 0.0,
        warmup: 3,
        optimiser: AdamW { decay: 0.01, ..AdamW::default() },
        evaluate_every: 4,
        patience: None,
    }
}

/// A run over the first examples with some held out.
pub(crate) fn train(
    settings: &Settings,
    folder: &Path,
    resume: bool,
    notes: &mut dyn Watcher,
) -> Result<RunSummary> {
    train_on(settings, &examples(30), folder, resume, notes)
}

fn train_on(
    settings: &Settings,
    all: &[Example],
    folder: &Path,
    resume: bool,
    notes: &mut dyn Watcher,
) -> Result<RunSummary> {
    let (held_out, training) = all.split_at(all.len() / 6);
    let identity = [("model".to_owned(), "a bigram".to_owned())];
    let intervals = Intervals { checkpoint: 5, sample: 10 };
    let run = Run { settings, intervals, training, held_out, identity: &identity, folder, resume };
    run.train(&mut Bigram::new(), notes)
}

/// Every file of a run, by name.
pub(crate) fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .map(|path| {
            (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

/// A run that begins in the folder of one under way is refused before it has written anything.
#[test]
fn a_folder_has_one_run_at_a_time() {
    #[derive(Default)]
    struct Second(Vec<String>);
    impl Watcher for Second {
        fn event(&mut self, _: &RunEvent) {}

        fn begun(&mut self, folder: &Path) -> Result<()> {
            std::fs::write(folder.join("1.tmp"), "").unwrap();
            let before = files(folder);
            let error = train(&settings(), folder, false, &mut Second::default()).unwrap_err();
            assert!(files(folder) == before);
            self.0.push(error.to_string());
            Ok(())
        }
    }
    let (folder, mut second) = (tempfile::tempdir().unwrap(), Second::default());
    train(&settings(), folder.path(), false, &mut second).unwrap();
    train(&settings(), folder.path(), true, &mut second).unwrap();
    assert_eq!(second.0.len(), 1, "{:?}", second.0);
    assert!(second.0[0].contains("a folder of one run"), "{:?}", second.0);
}

#[test]
fn a_run_learns_and_leaves_the_best_it_found() {
    let folder = tempfile::tempdir().unwrap();
    let mut notes = Notes::default();
    let summary = train(&settings(), folder.path(), false, &mut notes).unwrap();
    assert_eq!(summary.end, RunEnd::Done);
    let steps = notes.events.iter().filter(|e| matches!(e, RunEvent::Update { .. })).count() as u64;
    assert_eq!(steps, summary.step);
    assert_eq!(steps, settings().updates(&examples(30)[5..]).unwrap());
    assert_eq!(notes.samples, (1..=steps).filter(|s| s % 10 == 0).collect::<Vec<u64>>());
    let held_out = &summary.curve.held_out;
    let (first, least) = (held_out[0], held_out.iter().map(|p| p.1).fold(f64::INFINITY, f64::min));
    assert!(first.0 == 0.0 && least < first.1 - 0.2, "{held_out:?}");
    let best = summary.best.unwrap();
    assert_eq!(best.1, least);
    assert_eq!(held_out.last().unwrap().0 as u64, steps);
    let tokens: usize = examples(30)[5..].iter().map(|e| e.tokens.len()).sum();
    assert_eq!(summary.tokens, 4 * tokens as u64);
    let names: Vec<String> = files(folder.path()).into_iter().map(|(name, _)| name).collect();
    let all =
        ["adapter_model.safetensors", "checkpoint.delft", "delft.json", "loss.jsonl", "loss.svg"];
    assert_eq!(names, all);
    let provenance = std::fs::read(folder.path().join("delft.json")).unwrap();
    let provenance: serde_json::Value = serde_json::from_slice(&provenance).unwrap();
    assert_eq!((&provenance["step"], &provenance["held_out"]), (&best.0.into(), &best.1.into()));
    assert_eq!(provenance["made_of"]["model"], "a bigram");
    assert_eq!(provenance["made_of"]["seed"], "5");
}

#[test]
fn a_run_ends_early_where_the_held_out_loss_falls_no_more() {
    let folder = tempfile::tempdir().unwrap();
    // Rates at which nothing can be learned.
    let settings =
        Settings { rate: 3.0, warmup: 0, evaluate_every: 1, patience: Some(2), ..settings() };
    let summary = train(&settings, folder.path(), false, &mut Notes::default()).unwrap();
    assert_eq!(summary.end, RunEnd::Early);
    assert_eq!(summary.step, summary.best.unwrap().0 + 2);
    let steps = Settings { length: Length::Updates(7), ..settings };
    let folder = tempfile::tempdir().unwrap();
    let short = Settings { rate: 0.01, patience: None, ..steps };
    assert_eq!(train(&short, folder.path(), false, &mut Notes::default()).unwrap().step, 7);
}

#[test]
fn folders_and_checkpoints_of_other_runs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let fails = |settings: &Settings, resume| {
        let found = train(settings, folder.path(), resume, &mut Notes::default());
        found.unwrap_err().to_string()
    };
    let none = fails(&settings(), true);
    assert!(none.contains("checkpoint.delft") && none.contains("No such file"), "{none}");
    let mut stopped = Notes { stop_at: Some(30), ..Notes::default() };
    assert_eq!(
        train(&settings(), folder.path(), false, &mut stopped).unwrap().end,
        RunEnd::Cancelled
    );
    assert!(fails(&settings(), false).contains("a folder without a run"));
    let other = fails(&Settings { rate: 0.06, ..settings() }, true);
    assert!(other.contains("learning rate: expected 0.05, found 0.06"), "{other}");
    // Every byte of a checkpoint is held by its checksum, and no more of it is read than is there.
    let path = folder.path().join("checkpoint.delft");
    let whole = std::fs::read(&path).unwrap();
    for at in (0..whole.len()).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x41;
        std::fs::write(&path, &damaged).unwrap();
        let error = fails(&settings(), true);
        assert!(error.contains("checkpoint.delft"), "byte {at}: {error}");
    }
    for length in (0..whole.len()).step_by(11) {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(fails(&settings(), true).contains("checkpoint.delft"), "{length} bytes");
    }
    std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    assert!(fails(&settings(), true).contains("something behind its end"));
    std::fs::write(&path, &whole).unwrap();
    std::fs::write(folder.path().join("loss.jsonl"), "").unwrap();
    assert!(fails(&settings(), true).contains("loss.jsonl: expected"));
}
