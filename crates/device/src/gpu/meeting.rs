//! Where simulated ranks add up what each has: they wait for each other, and whoever comes last
//! adds, in the order of ranks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use formats::{Error, Result};

use crate::ranks::{Group, PLACE};

/// Of so many ranks, each a thread of its own.
pub(crate) struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What each rank has given to the sum that is being made.
    given: Vec<Option<Vec<f32>>>,
    sum: Vec<f32>,
    /// Sums made so far.
    round: u64,
    /// Ranks that have not yet taken the last one.
    leaving: usize,
    /// Whether a rank has failed, so that nobody is to wait for it.
    broken: bool,
}

impl Meeting {
    /// Of so many ranks.
    pub(crate) fn new(ranks: usize) -> Meeting {
        let state =
            State { given: vec![None; ranks], sum: vec![], round: 0, leaving: 0, broken: false };
        Meeting { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The sum of what all ranks give, once all have come.
    ///
    /// # Errors
    /// If a rank has failed, or another gives more or fewer values.
    pub(crate) fn sum(&self, rank: usize, values: Vec<f32>) -> Result<Vec<f32>> {
        let failed = || Error::new(PLACE, "all ranks", "one that failed");
        let mut state = self.wait(self.lock(), |state| state.leaving > 0);
        if state.broken {
            return Err(failed());
        }
        state.given[rank] = Some(values);
        let round = state.round;
        if state.given.iter().all(Option::is_some) {
            let parts: Vec<&[f32]> = state.given.iter().flatten().map(Vec::as_slice).collect();
            let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
            if lengths.iter().any(|length| *length != lengths[0]) {
                drop(state);
                self.break_up();
                return Err(Error::new("sim", "ranks that give alike", format!("{lengths:?}")));
            }
            let mut sum = vec![0.0; lengths[0]];
            ops::all_reduce::reference(&parts, &mut sum);
            state.leaving = state.given.len();
            state.given.iter_mut().for_each(|part| *part = None);
            state.sum = sum;
            state.round += 1;
            self.changed.notify_all();
        } else {
            state = self.wait(state, |state| state.round == round);
            if state.round == round {
                return Err(failed());
            }
        }
        state.leaving -= 1;
        self.changed.notify_all();
        Ok(state.sum.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for as long as that holds and no rank has failed.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        mut holds: impl FnMut(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let waiting = self.changed.wait_while(state, |state| !state.broken && holds(state));
        waiting.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group for Meeting {
    fn break_up(&self) {
        self.lock().broken = true;
        self.changed.notify_all();
    }

    fn mend(&self) -> Result<()> {
        let mut state = self.lock();
        state.given.iter_mut().for_each(|part| *part = None);
        (state.leaving, state.broken) = (0, false);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_get_every_sum() {
        let meeting = Meeting::new(3);
        let sums = |rank: usize| -> Vec<f32> {
            let given = |round: u16| vec![f32::from(round) + rank as f32];
            (0..100).map(|round| meeting.sum(rank, given(round)).unwrap()[0]).collect()
        };
        let all: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || sums(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let wanted: Vec<f32> = (0..100_u16).map(|round| 3.0 * f32::from(round) + 3.0).collect();
        assert!(all.iter().all(|found| *found == wanted));
    }

    #[test]
    fn nobody_waits_for_one_that_failed() {
        let meeting = Meeting::new(2);
        let why = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| meeting.sum(0, vec![1.0]).unwrap_err().to_string());
            meeting.break_up();
            waiting.join().unwrap()
        });
        assert!(why.contains("one that failed"), "{why}");
        meeting.mend().unwrap();
        let other = std::thread::scope(|scope| {
            let other = scope.spawn(|| meeting.sum(1, vec![2.0]));
            let mine = meeting.sum(0, vec![1.0, 1.0]);
            [mine, other.join().unwrap()]
        });
        assert!(other.iter().all(Result::is_err), "{other:?}");
    }
}
