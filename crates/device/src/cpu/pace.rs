//! How many workers take part in a step: all of them, unless fewer were measured to be faster.
//!
//! Workers meet after every operation. One whose core another program uses comes late by a slice of the scheduler, which is as
//! long as several steps of a small model, and all others wait for it. So on a busy machine fewer workers may be faster, and one
//! alone is never held up. Results do not depend on the number of workers.
//!
//! Steps are watched in windows of some milliseconds, each with a cost: seconds per byte that had to be read. Where workers
//! slept at barriers for a good part of a window, the next is tried with fewer of them; where fewer are in use, more are tried
//! from time to time. The cheaper number stays. What a trial took beyond the time that the number before it would have taken is
//! paid back: [`PAYBACK`] times as long goes by before the next, so that trials cost 2% at most, and nothing on a quiet machine.
//!
//! It knows no clock: everything follows from the samples.

/// Seconds that are judged together: several slices of a scheduler.
const WINDOW: f64 = 0.012;

/// Share of a window that workers slept at barriers, from which on fewer are tried. They spin through the ordinary waits.
const HELD_UP: f64 = 0.1;

/// Another number of workers is better if it costs less than this part: what is as good is not worth the change.
const BETTER: f64 = 0.95;

/// Weight of a new window in the cost of the number in use: one bad window alone makes no other number look better.
const FRESH: f64 = 0.4;

/// Seconds without a trial for each second that trials have cost; and the bounds of such a rest.
const PAYBACK: f64 = 50.0;
const REST: (f64, f64) = (0.1, 10.0);

/// Seconds for which a number stays before it counts as proven: what it cost until then was part of its trial.
const PROVEN: f64 = 1.0;

/// What a step took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sample {
    pub(super) seconds: f64,
    /// Bytes that it had to read: what makes steps at different depths comparable.
    pub(super) work: f64,
    /// Seconds that a worker slept at barriers, on average over all but the one that they waited for.
    pub(super) slept: f64,
}

impl Sample {
    fn add(&mut self, other: Sample) {
        self.seconds += other.seconds;
        self.work += other.work;
        self.slept += other.slept;
    }

    fn cost(&self) -> f64 {
        self.seconds / self.work.max(1.0)
    }

    /// Seconds beyond those that the same work takes at another cost.
    fn excess(&self, cost: f64) -> f64 {
        (self.seconds - self.work * cost).max(0.0)
    }
}

/// A number of workers and what it cost.
#[derive(Debug, Clone, Copy)]
struct Known {
    workers: usize,
    cost: f64,
}

/// See the top of this file.
#[derive(Debug)]
pub(super) struct Pace {
    most: usize,
    workers: usize,
    /// The number before, while another is tried.
    trial: Option<Known>,
    /// The number before, while the one that replaced it is not proven.
    left: Option<Known>,
    window: Sample,
    /// What the number in use costs, and all that it took since it is in use, until it is proven.
    cost: Option<f64>,
    stay: Sample,
    /// Seconds until the next trial may begin.
    rest: f64,
    /// Whether the first step, which brings in pages and clocks, is over.
    warm: bool,
}

impl Pace {
    /// For a team of so many.
    pub(super) fn new(most: usize) -> Pace {
        Pace {
            most,
            workers: most,
            trial: None,
            left: None,
            window: Sample::default(),
            cost: None,
            stay: Sample::default(),
            rest: 0.0,
            warm: false,
        }
    }

    /// That number, whatever comes.
    #[cfg(test)]
    pub(super) fn always(workers: usize) -> Pace {
        Pace { workers, ..Pace::new(1) }
    }

    /// Workers of the next step.
    pub(super) fn workers(&self) -> usize {
        self.workers
    }

    /// Takes note of a step with that many.
    pub(super) fn note(&mut self, step: Sample) {
        if self.most == 1 || !std::mem::replace(&mut self.warm, true) {
            return;
        }
        self.rest -= step.seconds;
        self.window.add(step);
        if self.window.seconds < WINDOW {
            return;
        }
        let window = std::mem::take(&mut self.window);
        match self.trial.take() {
            Some(before) => self.judge(before, window),
            None => self.look(window),
        }
    }

    /// A window with the number in use: begins a trial if there is reason to, and no rest to keep.
    fn look(&mut self, window: Sample) {
        self.stay.add(window);
        let (now, proven) = (window.cost(), self.stay.seconds > PROVEN);
        if let Some(before) = self.left.filter(|_| !proven)
            && before.cost < BETTER * now
        {
            // It seemed better than it is.
            self.rest = (PAYBACK * self.stay.excess(before.cost)).clamp(REST.0, REST.1);
            self.take(before);
            return;
        }
        let cost = self.cost.map_or(now, |cost| cost + FRESH * (now - cost));
        self.cost = Some(cost);
        if self.rest > 0.0 {
            return;
        }
        let workers = self.workers;
        let step = (workers / 4).max(1);
        let next = match workers > 1 && window.slept > HELD_UP * window.seconds {
            true => workers - step,
            false => self.most.min(workers + step),
        };
        if next != workers {
            self.trial = Some(Known { workers, cost });
            self.workers = next;
        }
    }

    /// A window with a number on trial.
    fn judge(&mut self, before: Known, window: Sample) {
        let cost = window.cost();
        if cost < BETTER * before.cost {
            // One that goes as soon as it came has cost something too.
            let proven = self.stay.seconds > PROVEN;
            let spent = if proven { 0.0 } else { self.stay.excess(cost) };
            self.rest = (PAYBACK * spent).min(REST.1);
            self.take(Known { workers: self.workers, cost });
            self.left = Some(before);
            self.stay = window;
        } else {
            self.workers = before.workers;
            self.rest = (PAYBACK * window.excess(before.cost)).clamp(REST.0, REST.1);
        }
    }

    /// From now on that number.
    fn take(&mut self, known: Known) {
        self.workers = known.workers;
        self.cost = Some(known.cost);
        self.left = None;
        self.stay = Sample::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine: seconds of a step with so many workers, and how much of it they sleep, as time goes on.
    type Machine = fn(workers: usize, now: f64) -> (f64, f64);

    /// Runs steps for so long; returns the steps done and the seconds spent with each number of workers.
    fn run(pace: &mut Pace, machine: Machine, from: f64, to: f64) -> (usize, Vec<f64>) {
        let (mut now, mut steps, mut spent) = (from, 0, vec![0.0; pace.most + 1]);
        while now < to {
            let workers = pace.workers();
            let (seconds, asleep) = machine(workers, now);
            pace.note(Sample { seconds, work: 1e6, slept: seconds * asleep });
            spent[workers] += seconds;
            (now, steps) = (now + seconds, steps + 1);
        }
        (steps, spent)
    }

    /// Two workers at twice the speed of one.
    fn quiet(workers: usize, _: f64) -> (f64, f64) {
        (0.001 / workers as f64, 0.0)
    }

    /// Another program on each core: two workers lose a slice of 8 ms in most steps, and one gets two thirds of a core.
    fn busy(workers: usize, now: f64) -> (f64, f64) {
        match workers {
            1 => (0.0015, 0.0),
            _ if ((now * 1e4) as u64).is_multiple_of(4) => (0.0005, 0.0),
            _ => (0.0085, 0.9),
        }
    }

    #[test]
    fn each_machine_gets_the_workers_that_are_fastest_there() {
        struct Case {
            machine: Machine,
            most: usize,
            best: usize,
            seconds: f64,
            why: &'static str,
        }
        let cases = [
            Case { machine: quiet, most: 2, best: 2, seconds: 0.3, why: "a quiet machine" },
            Case { machine: quiet, most: 16, best: 16, seconds: 0.3, why: "a large quiet machine" },
            Case { machine: busy, most: 2, best: 1, seconds: 0.5, why: "busy, a short story" },
            Case { machine: busy, most: 2, best: 1, seconds: 60.0, why: "busy for long" },
            Case {
                machine: |workers, _| (0.1 / workers.min(4) as f64, 0.0),
                most: 6,
                best: 6,
                seconds: 20.0,
                why: "more workers than memory can feed, none held up: as it was asked for",
            },
            Case {
                machine: |workers, _| if workers == 1 { (0.100, 0.0) } else { (0.110, 0.3) },
                most: 2,
                best: 1,
                seconds: 60.0,
                why: "steps of a large model, one worker somewhat faster",
            },
            Case {
                machine: |workers, _| if workers == 1 { (0.100, 0.0) } else { (0.080, 0.3) },
                most: 2,
                best: 2,
                seconds: 60.0,
                why: "held up, and still faster",
            },
            Case {
                machine: |workers, _| match workers {
                    16 => (2e-3 / 16.0, 0.5),
                    few => (1e-3 / few as f64, 0.0),
                },
                most: 16,
                best: 15,
                seconds: 5.0,
                why: "one core of sixteen is taken",
            },
        ];
        for Case { machine, most, best, seconds, why } in cases {
            let mut pace = Pace::new(most);
            let (steps, spent) = run(&mut pace, machine, 0.0, seconds);
            let (mut alone, mut now) = (0, 0.0);
            while now < seconds {
                now += machine(best, now).0;
                alone += 1;
            }
            // What finding out takes, at most two slices and windows each, and 2% for trials.
            let least = 0.97 * alone as f64 * (seconds - 0.05) / seconds;
            assert!(steps as f64 > least, "{why}: {steps} steps of {alone}; {spent:?}");
            assert!(spent[best] > 0.75 * seconds, "{why}: {spent:?}");
        }
    }

    #[test]
    fn all_work_again_once_the_machine_is_quiet() {
        let mut pace = Pace::new(2);
        run(&mut pace, busy, 0.0, 30.0);
        let (_, spent) = run(&mut pace, quiet, 30.0, 50.0);
        assert!(spent[1] < 2.0, "{spent:?}");
        let (_, spent) = run(&mut pace, quiet, 50.0, 60.0);
        assert_eq!(spent[1], 0.0);
        // And fewer, soon after it is not.
        let (_, spent) = run(&mut pace, busy, 60.0, 61.0);
        assert!(spent[2] < 0.4, "{spent:?}");
    }

    #[test]
    fn a_hiccup_now_and_then_costs_no_more_than_itself() {
        // A slice lost every fifth of a second.
        let hiccups: Machine = |workers, now| match (now * 1e3) as u64 % 200 {
            0 if workers == 2 => (0.0085, 0.9),
            _ => quiet(workers, now),
        };
        let mut pace = Pace::new(2);
        let (steps, spent) = run(&mut pace, hiccups, 0.0, 20.0);
        let (mut alone, mut now) = (0, 0.0);
        while now < 20.0 {
            now += hiccups(2, now).0;
            alone += 1;
        }
        assert!(steps as f64 > 0.97 * alone as f64, "{steps} of {alone}; {spent:?}");
    }

    #[test]
    fn an_uneven_machine_that_is_quiet_loses_next_to_nothing() {
        // Steps of all lengths, workers that wait for each other a good part of them, one alone half as slow again.
        let uneven: Machine = |workers, now| {
            let noise = 0.75 + 0.5 * ((now * 7919.0).fract());
            if workers == 1 { (0.0145 * noise, 0.0) } else { (0.0095 * noise, 0.15) }
        };
        let mut pace = Pace::new(2);
        let (steps, spent) = run(&mut pace, uneven, 0.0, 60.0);
        let least = 0.97 * 60.0 / 0.0095;
        assert!(steps as f64 > least, "{steps} steps, at least {least}; {spent:?}");
    }

    #[test]
    fn one_worker_is_never_another_number() {
        let mut pace = Pace::new(1);
        let (_, spent) = run(&mut pace, |_, _| (0.01, 1.0), 0.0, 5.0);
        assert!(spent[1] >= 5.0 && pace.workers() == 1);
    }
}
