//! Limits the launches of one command buffer. The system ends command buffers that keep the display
//! waiting, and work behind a long one cannot begin; many short ones cost time, too. So their
//! length follows the measured time of launches.

/// Most seconds of a command buffer: the display can then be drawn ten times a second.
const LONGEST: f64 = 0.08;

/// The assumed seconds of a launch before any was measured: a product of a large model's prompt on
/// the smallest chip.
const FIRST: f64 = 0.02;

/// The measured time of launches of one kind of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pace {
    /// Seconds of a slow launch.
    launch: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { launch: FIRST }
    }
}

impl Pace {
    /// Launches for one command buffer, at least one.
    pub(super) fn launches(&self) -> usize {
        (LONGEST / self.launch).max(1.0) as usize
    }

    /// Records the time of some launches. A slower time counts at once, a faster one by half:
    /// command buffers that are too long end the program, while short ones cost microseconds.
    pub(super) fn took(&mut self, launches: usize, seconds: f64) {
        if launches == 0 || !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        let seen = (seconds / launches as f64).max(1e-7);
        self.launch = if seen > self.launch { seen } else { (self.launch + seen) / 2.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_buffers_grow_while_launches_are_fast_and_shrink_at_once() {
        let mut pace = Pace::default();
        assert_eq!(pace.launches(), 4);
        for _ in 0..30 {
            let given = pace.launches();
            pace.took(given, given as f64 * 1e-5);
        }
        let fast = pace.launches();
        assert!((6000..=8000).contains(&fast), "{fast}");
        // A prompt of a large model on a small chip.
        pace.took(fast, fast as f64 * 0.03);
        assert_eq!(pace.launches(), 2);
        pace.took(2, 1.0);
        assert_eq!(pace.launches(), 1, "one launch is the least");
    }

    #[test]
    fn clocks_that_make_no_sense_change_nothing() {
        let mut pace = Pace::default();
        for (launches, seconds) in [(0, 1.0), (4, f64::NAN), (4, f64::INFINITY), (4, -1.0)] {
            pace.took(launches, seconds);
            assert_eq!(pace, Pace::default());
        }
        pace.took(4, 0.0);
        assert!(pace.launches() > 4);
    }
}
