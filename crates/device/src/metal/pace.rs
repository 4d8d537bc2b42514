//! How many launches one command buffer is given. The system ends command buffers that keep the
//! display waiting, and work behind one that is long cannot begin; many short ones cost time too.
//! So their length follows what launches were seen to take.

/// Seconds that a command buffer is to take at most: the display may then be drawn ten times a
/// second.
const LONGEST: f64 = 0.08;

/// What a launch is taken for before any was seen: a product of a large model's prompt on the
/// smallest chip takes as long.
const FIRST: f64 = 0.02;

/// What launches of one kind of work take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pace {
    /// Seconds for a launch of those that were slow.
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

    /// Notes that so many launches took so long. What is slower than thought counts at once, what
    /// is faster by half: a mistake to the one side ends a program, to the other it costs
    /// microseconds.
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
