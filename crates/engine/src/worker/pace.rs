//! Whether steps are submitted before constraints know the tokens of the step in front.
//!
//! If they are, the device does not wait while the host follows constraints and plans: it wins the
//! host's part of each step. But a request whose constraint puts tokens behind the one that was
//! chosen, or another one in its place, has then a row in a step that chooses nothing for it: it
//! loses a step. Both are measured as the work goes, and the greater one decides. Tokens do not
//! depend on it.

use std::time::{Duration, Instant};

/// The weight of the latest step in what is measured.
const WEIGHT: f64 = 0.1;

/// The gain and the loss of submitting steps ahead, measured on steps with constraints.
#[derive(Default)]
pub(super) struct Pace {
    /// When the last such step was submitted.
    last: Option<Instant>,
    /// Time since then that the host spent on waiting for the device, or on what it does while the
    /// device computes.
    beside: Duration,
    /// Requests since then whose constraints went on by more or other tokens than were chosen.
    missed: usize,
    /// The share of a step's time in which the device waits for the host, or would if steps were not
    /// submitted ahead.
    host: f64,
    /// The share of rows that choose nothing, or would if steps were submitted ahead.
    lost: f64,
    measured: bool,
}

impl Pace {
    /// Whether the next step is to be submitted before the tokens of the last one are known.
    pub(super) fn leads(&self) -> bool {
        self.lost <= self.host || !self.measured
    }

    /// Notes time during which the device had something to do in any case.
    pub(super) fn beside(&mut self, time: Duration) {
        self.beside += time;
    }

    /// Notes that a constraint went on by more or other tokens than the one that was chosen.
    pub(super) fn missed(&mut self) {
        self.missed += 1;
    }

    /// Notes that a step of `rows` rows, with constraints among them, was submitted.
    pub(super) fn submitted(&mut self, rows: usize, now: Instant) {
        let leading = self.leads();
        let beside = std::mem::take(&mut self.beside);
        let missed = std::mem::take(&mut self.missed);
        let Some(last) = self.last.replace(now) else { return };
        let step = now - last;
        let host = step.saturating_sub(beside).as_secs_f64();
        let whole = step.as_secs_f64() + if leading { host } else { 0.0 };
        let weight = if self.measured { WEIGHT } else { 1.0 };
        let host = if whole > 0.0 { host / whole } else { 0.0 };
        self.host += weight * (host - self.host);
        // Ahead, each that missed has had a row more.
        let all = if leading { rows } else { rows + missed };
        self.lost += weight * (missed as f64 / all.max(1) as f64 - self.lost);
        self.measured = true;
    }

    /// Notes that the last step had no constraint, or that there was none: what comes next is no
    /// measure.
    pub(super) fn pause(&mut self) {
        self.last = None;
        (self.beside, self.missed) = (Duration::ZERO, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_lead_while_that_wins_more_than_it_loses() {
        let mut pace = Pace::default();
        assert!(pace.leads(), "until it is known to lose");
        let mut now = Instant::now();
        // The host has 1 ms of each 10, in whichever way.
        let mut steps = |pace: &mut Pace, missed: usize| {
            for _ in 0..60 {
                let leading = pace.leads();
                let (step, beside) = if leading { (9, 8) } else { (10, 9) };
                now += Duration::from_millis(step);
                pace.beside(Duration::from_millis(beside));
                (0..missed).for_each(|_| pace.missed());
                pace.submitted(32, now);
            }
            pace.leads()
        };
        assert!(steps(&mut pace, 0));
        assert!(steps(&mut pace, 3), "3 of 32 rows are less than a tenth");
        assert!(!steps(&mut pace, 4), "4 are more");
        assert!(steps(&mut pace, 1), "and it goes back");
    }

    #[test]
    fn what_lies_between_two_streams_of_steps_is_no_measure() {
        let mut pace = Pace::default();
        let now = Instant::now();
        pace.submitted(8, now);
        pace.missed();
        pace.pause();
        pace.submitted(8, now + Duration::from_secs(60));
        assert!(pace.leads() && !pace.measured);
        pace.beside(Duration::from_millis(9));
        pace.submitted(8, now + Duration::from_millis(60_010));
        assert!((pace.host - 1.0 / 11.0).abs() < 1e-9 && pace.lost == 0.0);
    }
}
