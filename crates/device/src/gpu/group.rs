//! All-reduce and all-gather for simulated ranks: the ranks wait for each other, and the last to
//! arrive combines the contributions in rank order. Ranks in other processes take part by way of
//! [`Processes`](crate::Processes).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use formats::{Error, Result};

use crate::ranks::{Group, PLACE};

/// An in-process all-reduce group of simulated ranks, one thread each.
pub(crate) struct AllReduceGroup {
    state: Mutex<State>,
    changed: Condvar,
}

/// A group whose ranks combine values on the host.
pub(crate) trait HostGroup: Group {
    /// Contributes `values`, waits for all ranks, and returns the combined result.
    ///
    /// # Errors
    /// A rank that failed, ranks that ask for different operations, or summands of different
    /// lengths.
    fn join(&self, rank: usize, combine: Combine, values: Vec<f32>) -> Result<Vec<f32>>;
}

/// How the contributions of all ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Combine {
    /// Elementwise sum.
    Sum,
    /// Concatenation in rank order.
    Gather,
}

struct State {
    /// Each rank's operation and contribution, once it has arrived.
    given: Vec<Option<(Combine, Vec<f32>)>>,
    joined: Vec<f32>,
    /// Number of completed operations.
    round: u64,
    /// Ranks that have not yet taken the last result.
    leaving: usize,
    /// Whether a rank has failed, so that waiting is pointless.
    broken: bool,
}

impl AllReduceGroup {
    /// A group of `ranks` ranks.
    pub(crate) fn new(ranks: usize) -> AllReduceGroup {
        let state =
            State { given: vec![None; ranks], joined: vec![], round: 0, leaving: 0, broken: false };
        AllReduceGroup { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `holds` is true and no rank has failed.
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        mut holds: impl FnMut(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let waiting = self.changed.wait_while(state, |state| !state.broken && holds(state));
        waiting.unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostGroup for AllReduceGroup {
    fn join(&self, rank: usize, combine: Combine, values: Vec<f32>) -> Result<Vec<f32>> {
        let failed = || Error::new(PLACE, "all ranks", "one that failed");
        let mut state = self.wait(self.lock(), |state| state.leaving > 0);
        if state.broken {
            return Err(failed());
        }
        state.given[rank] = Some((combine, values));
        let round = state.round;
        if state.given.iter().all(Option::is_some) {
            let given = || state.given.iter().flatten();
            let parts: Vec<&[f32]> = given().map(|(_, part)| part.as_slice()).collect();
            let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
            let uneven = lengths.iter().any(|length| *length != lengths[0]);
            if given().any(|(other, _)| *other != combine) || (combine == Combine::Sum && uneven) {
                drop(state);
                self.break_up();
                return Err(Error::new("sim", "ranks that give alike", format!("{lengths:?}")));
            }
            let joined = match combine {
                Combine::Sum => {
                    let mut sum = vec![0.0; lengths[0]];
                    ops::all_reduce::reference(&parts, &mut sum);
                    sum
                }
                Combine::Gather => parts.concat(),
            };
            state.leaving = state.given.len();
            state.given.iter_mut().for_each(|part| *part = None);
            state.joined = joined;
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
        Ok(state.joined.clone())
    }
}

impl Group for AllReduceGroup {
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
        let group = AllReduceGroup::new(3);
        let sums = |rank: usize| -> Vec<f32> {
            let given = |round: u16| vec![f32::from(round) + rank as f32];
            let sum = |round| group.join(rank, Combine::Sum, given(round)).unwrap()[0];
            (0..100).map(sum).collect()
        };
        let all: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || sums(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let wanted: Vec<f32> = (0..100_u16).map(|round| 3.0 * f32::from(round) + 3.0).collect();
        assert!(all.iter().all(|found| *found == wanted));
    }

    #[test]
    fn ranks_gather_in_their_order_and_come_for_the_same() {
        let group = AllReduceGroup::new(2);
        let meet = |combine: [Combine; 2]| {
            group.mend().unwrap();
            std::thread::scope(|scope| {
                let other = scope.spawn(|| group.join(1, combine[1], vec![3.0]));
                [group.join(0, combine[0], vec![1.0, 2.0]), other.join().unwrap()]
            })
        };
        for found in meet([Combine::Gather; 2]) {
            assert_eq!(found.unwrap(), [1.0, 2.0, 3.0]);
        }
        assert!(meet([Combine::Sum; 2]).iter().all(Result::is_err), "a sum of unlike lengths");
        assert!(meet([Combine::Sum, Combine::Gather]).iter().all(Result::is_err));
    }

    #[test]
    fn nobody_waits_for_one_that_failed() {
        let group = AllReduceGroup::new(2);
        let why = std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| group.join(0, Combine::Sum, vec![1.0]).unwrap_err().to_string());
            group.break_up();
            waiting.join().unwrap()
        });
        assert!(why.contains("one that failed"), "{why}");
        group.mend().unwrap();
        let other = std::thread::scope(|scope| {
            let other = scope.spawn(|| group.join(1, Combine::Sum, vec![2.0]));
            let mine = group.join(0, Combine::Sum, vec![1.0, 1.0]);
            [mine, other.join().unwrap()]
        });
        assert!(other.iter().all(Result::is_err), "{other:?}");
    }
}
