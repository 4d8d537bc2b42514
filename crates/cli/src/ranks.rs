//! Several processes, each with a GPU, that share a model: a launcher (torchrun, mpirun, srun, a
//! shell loop) starts the same command for every rank. Rank 0 runs it; the others do what rank 0
//! asks, and write nothing but why they failed.

use std::time::Duration;

use delft::{Absence, DeviceSpec, Processes, RankLaunch};

use crate::args::{Command, LoadArgs, SplitArg};
use crate::terminal::{Outcome, aside, line, report, stderr_is_terminal};

/// How long the leader goes on without a process that is gone: requests under way end with what
/// they were told.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Runs a command; with the other processes of its job if it shares its model with them.
pub(crate) fn run(mut command: Command, run: fn(Command) -> Outcome) -> Outcome {
    match join(&mut command)? {
        Role::Alone => run(command),
        Role::Leads(processes) => {
            let done = run(command);
            processes.end();
            done
        }
        Role::Followed => Ok(()),
    }
}

/// The part of this process in its job.
enum Role {
    Alone,
    Leads(Processes),
    /// It did what another asked, and that has ended.
    Followed,
}

/// Joins the other processes of a job. As one that follows it returns at the job's end.
fn join(command: &mut Command) -> Outcome<Role> {
    let tensor = |load: &&mut LoadArgs| load.split_mode == Some(SplitArg::Tensor);
    let Some(load) = command.loading().filter(tensor) else { return Ok(Role::Alone) };
    let Some(launch) = RankLaunch::from_env()? else { return Ok(Role::Alone) };
    let named = delft::named_place()?.filter(|_| load.device == DeviceSpec::Auto);
    let place = named.unwrap_or(load.device).of_rank(&launch)?;
    let Some(place) = place else { return Ok(Role::Alone) };
    if !launch.leads() {
        // Ctrl-C at a terminal reaches every process, and the leader decides what it means.
        let _ = ctrlc::set_handler(|| {});
        delft::follow(&launch, place)?;
        return Ok(Role::Followed);
    }
    if stderr_is_terminal() && !load.quiet {
        aside(format_args!("{launch}: waits for the others"));
    }
    let processes = Processes::lead(&launch, place)?;
    load.device = place;
    load.processes = Some(processes.clone());
    let absence = processes.absence();
    // Without the thread, requests fail all the same.
    let _ = std::thread::Builder::new().spawn(move || end_without(&absence));
    Ok(Role::Leads(processes))
}

/// Ends the program some time after one of its processes has.
fn end_without(absence: &Absence) {
    let Some(why) = absence.wait() else { return };
    std::thread::sleep(LAST_WORDS);
    report(&line(&why));
    crate::quiet::end();
    std::process::exit(1);
}
