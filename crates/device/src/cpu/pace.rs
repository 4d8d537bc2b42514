//! Bounds the number of workers of a decode step by the processors that other programs leave free.
//!
//! Workers meet after every operation, so that one whose processor another program uses holds up
//! all others: on a busy machine, two threads can take ten times as long as one. The system tells
//! how busy each processor was (`/proc/stat`) and how much of that was this process itself
//! (`/proc/self/stat`); the rest is what others took. Prompts keep all workers: their operations
//! are dealt out in small parts, so that a late worker has little left. Where the system does not
//! tell, nothing changes.

use std::io::Read;
use std::time::{Duration, Instant};

/// How often the system is asked, which takes it some tens of microseconds.
const LOOK: Duration = Duration::from_millis(200);
/// How soon it is asked first, so that loading tells about the first tokens.
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// Processors that others may take without a worker giving way: less than the half that a program
/// gets which shares one with a worker, and more than a quiet machine's housekeeping.
const TOLERATED: f64 = 0.35;

/// Bounds the number of workers from step to step. Allocates nothing after [`Pace::new`].
#[derive(Debug)]
pub(super) struct Pace {
    /// The processors that this process may use; none if all workers are to work always.
    cpus: Vec<usize>,
    all: usize,
    workers: usize,
    looked: Instant,
    patience: Duration,
    last: Option<Ticks>,
    buffer: Vec<u8>,
}

/// Time spent since the system started, in its ticks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ticks {
    /// The time of all processors together.
    all: u64,
    /// Ticks in which they were not idle.
    busy: u64,
    /// Ticks that this process had.
    own: u64,
}

impl Pace {
    /// A bound for `all` workers; unless it is to `adapt`, all of them always work.
    pub(super) fn new(all: usize, adapt: bool) -> Pace {
        let status = || std::fs::read_to_string("/proc/self/status").ok();
        let cpus = if adapt && all > 1 { status().and_then(|text| allowed(&text)) } else { None };
        let cpus = cpus.unwrap_or_default();
        // A line of /proc/stat is ten numbers.
        let lines = cpus.iter().max().map_or(0, |last| last + 2);
        let mut pace = Pace {
            cpus,
            all,
            workers: all,
            looked: Instant::now(),
            patience: FIRST_LOOK,
            last: None,
            buffer: vec![0; lines * 200],
        };
        pace.last = pace.read();
        pace
    }

    /// The most workers for a step that decodes now.
    pub(super) fn workers(&mut self) -> usize {
        if self.cpus.is_empty() || self.looked.elapsed() < self.patience {
            return self.workers;
        }
        (self.looked, self.patience) = (Instant::now(), LOOK);
        let now = self.read();
        let taken = self.last.zip(now).and_then(|(last, now)| taken(last, now, self.cpus.len()));
        self.last = now;
        let spare = self.cpus.len().saturating_sub(self.all);
        self.workers = taken.map_or(self.all, |taken| left(self.all, spare, taken));
        self.workers
    }

    fn read(&mut self) -> Option<Ticks> {
        if self.cpus.is_empty() {
            return None;
        }
        let (own, nice) = own(read("/proc/self/stat", &mut self.buffer)?)?;
        let (all, busy) = spent(read("/proc/stat", &mut self.buffer)?, &self.cpus, nice)?;
        Some(Ticks { all, busy, own })
    }

    /// No bound: this number of workers, always.
    #[cfg(test)]
    pub(super) fn always(workers: usize) -> Pace {
        Pace::new(workers, false)
    }
}

/// The beginning of a file, as far as the buffer takes it.
fn read<'a>(path: &str, buffer: &'a mut [u8]) -> Option<&'a str> {
    let mut file = std::fs::File::open(path).ok()?;
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..]).ok()? {
            0 => break,
            more => length += more,
        }
    }
    Some(buffer[..length].utf8_chunks().next()?.valid())
}

/// The processor time that other programs took, in processors; `None` if no time has passed.
fn taken(last: Ticks, now: Ticks, processors: usize) -> Option<f64> {
    let since = |of: fn(Ticks) -> u64| of(now).saturating_sub(of(last)) as f64;
    let (all, busy, own) = (since(|t| t.all), since(|t| t.busy), since(|t| t.own));
    (all > 0.0).then(|| (busy - own).max(0.0) / all * processors as f64)
}

/// The number of workers that have a processor to themselves, if other programs take `taken`
/// processors and the machine has `spare` processors more than there are workers.
fn left(workers: usize, spare: usize, taken: f64) -> usize {
    let giving_way = (taken - TOLERATED - spare as f64).ceil().max(0.0) as usize;
    workers.saturating_sub(giving_way).max(1)
}

/// The processors in `/proc/self/status`: `Cpus_allowed_list: 0-3,8`.
fn allowed(status: &str) -> Option<Vec<usize>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// This process's time, of `/proc/self/stat` (proc(5)), and whether it is nice.
fn own(stat: &str) -> Option<(u64, bool)> {
    // The name before it may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let nice: i64 = fields.nth(3)?.parse().ok()?;
    Some((user + system, nice > 0))
}

/// The time of these processors, all and busy, of `/proc/stat`. Time of nice programs is idle to a
/// process that is not `nice` itself, since they make room for it.
fn spent(stat: &str, cpus: &[usize], counts_nice: bool) -> Option<(u64, u64)> {
    let (mut all, mut busy, mut found) = (0, 0, 0);
    for line in stat.lines() {
        let Some(line) = line.strip_prefix("cpu") else { break };
        let (cpu, numbers) = line.split_once(' ')?;
        if !cpu.parse().is_ok_and(|cpu: usize| cpus.contains(&cpu)) {
            continue;
        }
        // Time of guests, which is behind these, is among the user's.
        let mut fields = [0u64; 8];
        for (field, number) in fields.iter_mut().zip(numbers.split_ascii_whitespace()) {
            *field = number.parse().ok()?;
        }
        let [user, nice, system, _idle, _wait, interrupts, soft_interrupts, _stolen] = fields;
        all += fields.iter().sum::<u64>();
        busy += user + system + interrupts + soft_interrupts + if counts_nice { nice } else { 0 };
        found += 1;
    }
    (found == cpus.len()).then_some((all, busy))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  300 60 30 600 0 0 0 0 0 0\n\
                        cpu0 100 20 10 200 5 1 2 3 50 0\n\
                        cpu1 100 20 10 200 0 0 0 0 0 0\n\
                        cpu12 7 7 7 7 7 7 7 7 0 0\n\
                        intr 1 2 3\n";

    #[test]
    fn a_processor_s_time_is_read_from_the_system_s_lines() {
        assert_eq!(spent(STAT, &[0], false), Some((341, 113)));
        assert_eq!(spent(STAT, &[0], true), Some((341, 133)));
        assert_eq!(spent(STAT, &[1, 12], false), Some((330 + 56, 110 + 28)));
        assert_eq!(spent(STAT, &[2], false), None, "there is no such processor");
        assert_eq!(spent("", &[0], false), None);
        assert_eq!(spent("cpu0 x", &[0], false), None);
        let stat = "7 (a) b) R 1 2 3 4 5 6 7 8 9 10 111 22 0 0 20 0 3 0 5";
        assert_eq!(own(stat), Some((133, false)));
        assert_eq!(own(&stat.replace(" 20 0 3", " 20 5 3")), Some((133, true)));
        assert_eq!(own("7 (a) R 1"), None);
        assert_eq!(allowed("A:\t1\nCpus_allowed_list:\t0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(allowed("Cpus_allowed_list:\tx\n"), None);
        assert_eq!(allowed(""), None);
    }

    #[test]
    fn workers_give_way_to_what_others_take() {
        let last = Ticks { all: 1000, busy: 500, own: 400 };
        let now = |all: u64, busy: u64, own: u64| Ticks {
            all: 1000 + all,
            busy: 500 + busy,
            own: 400 + own,
        };
        struct Case {
            processors: usize,
            now: Ticks,
            workers: usize,
            why: &'static str,
        }
        let cases = [
            Case { processors: 2, now: now(40, 40, 40), workers: 2, why: "nobody else" },
            Case { processors: 2, now: now(40, 40, 34), workers: 2, why: "housekeeping" },
            Case { processors: 2, now: now(40, 3, 9), workers: 2, why: "ticks are coarse" },
            Case {
                processors: 2,
                now: now(40, 40, 30),
                workers: 1,
                why: "one shares with a worker",
            },
            Case { processors: 2, now: now(40, 40, 20), workers: 1, why: "one has its own" },
            Case { processors: 2, now: now(40, 40, 2), workers: 1, why: "never none" },
            Case { processors: 16, now: now(320, 320, 220), workers: 11, why: "five of sixteen" },
        ];
        for Case { processors, now, workers, why } in cases {
            let taken = taken(last, now, processors).unwrap();
            assert_eq!(left(processors, 0, taken), workers, "{why}: {taken}");
        }
        assert_eq!(taken(last, last, 2), None, "no time has passed");
        // Others have the processors that no worker has.
        assert_eq!([2.0, 2.3, 2.5, 5.0].map(|taken| left(4, 2, taken)), [4, 4, 3, 1]);
    }

    #[test]
    fn workers_that_were_asked_for_all_work() {
        let mut pace = Pace::new(2, false);
        pace.patience = Duration::ZERO;
        assert_eq!(pace.workers(), 2);
    }

    /// Whatever else runs on this machine.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_is_asked() {
        let mut pace = Pace::new(2, true);
        assert!(pace.last.is_some(), "the system tells");
        pace.patience = Duration::MAX;
        assert_eq!(pace.workers(), 2, "not yet");
        pace.patience = Duration::ZERO;
        std::thread::sleep(FIRST_LOOK);
        assert!((1..=2).contains(&pace.workers()));
        assert_eq!(pace.patience, LOOK);
    }
}
