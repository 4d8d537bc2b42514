//! A run that was stopped and resumed writes the same bytes as one that was not.

use crate::run::{Notes, files, settings, train};
use delft_train::Settings;
use delft_train::run::{RunEnd, RunEvent};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn whole(settings: &Settings) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let summary = train(settings, folder.path(), false, &mut Notes::default()).unwrap();
    assert_eq!(summary.end, RunEnd::Done);
    files(folder.path())
}

fn assert_same(found: &Path, whole: &[(String, Vec<u8>)], why: &str) {
    for ((name, a), (other, b)) in files(found).iter().zip(whole) {
        assert_eq!(name, other, "{why}");
        assert!(a == b, "{why}: {name}");
    }
    assert_eq!(files(found).len(), whole.len(), "{why}");
}

#[test]
fn stopped_at_any_batch_and_resumed() {
    let whole = whole(&settings());
    let mut stops = 0;
    for stop in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let mut notes = Notes { stop_at: Some(stop), ..Notes::default() };
        let first = train(&settings(), folder.path(), false, &mut notes).unwrap();
        if first.end == RunEnd::Done {
            break;
        }
        stops += 1;
        let mut notes = Notes::default();
        let rest = train(&settings(), folder.path(), true, &mut notes).unwrap();
        assert_eq!(rest.end, RunEnd::Done);
        assert!(matches!(notes.events[0], RunEvent::Resumed(step, _) if step == first.step));
        assert_same(folder.path(), &whole, &format!("stopped at batch {stop}"));
    }
    assert!(stops > 30, "{stops}");
    assert_same_seed(&whole);
}

/// The same settings give the same bytes, another seed gives others.
fn assert_same_seed(of: &[(String, Vec<u8>)]) {
    assert!(whole(&settings()) == of);
    let other = whole(&Settings { seed: 6, ..settings() });
    let of_name = |files: &[(String, Vec<u8>)], name: &str| {
        files.iter().find(|file| file.0 == name).unwrap().1.clone()
    };
    assert!(
        of_name(&other, "adapter_model.safetensors") != of_name(of, "adapter_model.safetensors")
    );
}

/// Names the folder in which a copy of this program trains.
const CHILD: &str = "DELFT_TEST_TRAINS_IN";

fn long() -> Settings {
    Settings { length: delft_train::run::Length::Epochs(400), ..settings() }
}

#[test]
#[ignore = "started by the test below, in a process to be killed"]
fn trains_in_a_process_of_its_own() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let folder = Path::new(&folder);
    let resume = delft_train::run::checkpointed(folder);
    train(&long(), folder, resume, &mut Notes::default()).unwrap();
}

#[test]
fn killed_at_any_moment_and_resumed() {
    let whole = whole(&long());
    let folder = tempfile::tempdir().unwrap();
    let child = || {
        let name = "resume::trains_in_a_process_of_its_own";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--ignored", "--nocapture"]).env(CHILD, folder.path());
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let mut killed = 0;
    let began = Instant::now();
    loop {
        let mut child = child();
        // Longer each time, so that the run ends however slow the machine is.
        let patience = Duration::from_millis(20 + 13 * killed);
        let until = Instant::now() + patience;
        while Instant::now() < until && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        killed += 1;
        assert!(began.elapsed() < Duration::from_secs(300));
    }
    assert!(killed > 1, "it ended before it could be killed");
    assert_same(folder.path(), &whole, &format!("killed {killed} times"));
}
