//! Stress tests of the team: many barriers, too many threads, panics, callers in a queue.

use delft_cpu_kernels::team::*;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[test]
fn barriers_keep_every_worker_in_step() {
    for (threads, rounds) in [(1, 1000), (2, 200_000), (3, 10_000), (8, 2_000)] {
        let team = Team::new(threads).unwrap();
        let counters: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        team.run(&|worker| {
            for round in 1..=rounds {
                counters[worker.index].store(round, Ordering::Relaxed);
                worker.barrier();
                let neighbour = &counters[(worker.index + 1) % threads];
                assert_eq!(neighbour.load(Ordering::Relaxed), round);
                worker.barrier();
            }
        });
        assert!(counters.iter().all(|counter| counter.load(Ordering::Relaxed) == rounds));
    }
}

/// A split barrier between two barriers, with other numbers of reads by each worker.
#[test]
fn a_split_barrier_waits_for_what_was_done_before_it() {
    for (threads, rounds) in [(1, 1000), (2, 100_000), (3, 10_000), (8, 2_000)] {
        let team = Team::new(threads).unwrap();
        let counters: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..2 {
            team.run(&|worker| {
                for round in 1..=rounds {
                    counters[worker.index].store(round, Ordering::Relaxed);
                    worker.arrive();
                    for _ in 0..(worker.index + round) % 3 {
                        worker.wait();
                        let neighbour = &counters[(worker.index + 1) % threads];
                        assert_eq!(neighbour.load(Ordering::Relaxed), round);
                    }
                    worker.barrier();
                }
            });
        }
    }
}

#[test]
fn many_short_jobs_each_run_once_on_every_worker() {
    for threads in [1, 2, 4] {
        let team = Team::new(threads).unwrap();
        let mut counts = vec![0usize; threads];
        for job in 1..=20_000 {
            let shared = SharedSlice::new(&mut counts);
            // SAFETY: each worker uses its own element.
            team.run(&|worker| unsafe { shared.slice_mut(worker.index..worker.index + 1)[0] += 1 });
            if job % 5_000 == 0 {
                // Long enough that the workers fall asleep.
                std::thread::sleep(PATIENCE * 20);
            }
        }
        assert_eq!(counts, vec![20_000; threads]);
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_lives_on() {
    let team = Team::new(4).unwrap();
    for culprit in 0..4 {
        let message = catch_unwind(AssertUnwindSafe(|| {
            team.run(&|worker| {
                worker.barrier();
                if worker.index == culprit {
                    resume_unwind(Box::new(culprit));
                }
                worker.arrive();
                worker.wait();
                worker.barrier();
            });
        }))
        .unwrap_err();
        assert_eq!(message.downcast_ref::<usize>(), Some(&culprit));
        let sum = AtomicUsize::new(0);
        team.run(&|worker| {
            sum.fetch_add(worker.index, Ordering::Relaxed);
            worker.barrier();
        });
        assert_eq!(sum.into_inner(), 6);
    }
}

#[test]
fn callers_queue() {
    let team = Team::new(3).unwrap();
    let (inside, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    team.run(&|worker| {
                        if worker.index == 0 {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        }
                        worker.barrier();
                        if worker.index == 0 {
                            inside.fetch_sub(1, Ordering::SeqCst);
                            done.fetch_add(1, Ordering::SeqCst);
                        }
                    });
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 800);
}

#[test]
#[should_panic(expected = "inside one of its own jobs")]
fn a_job_cannot_run_a_job() {
    let team = Team::new(1).unwrap();
    team.run(&|_| team.run(&|_| {}));
}

#[test]
fn shares_cover_everything_once() {
    for count in [1, 2, 3, 7] {
        let team = Team::new(count).unwrap();
        for n in [0, 1, 5, 64, 100] {
            let (mut plain, mut units, mut weighted) = (Vec::new(), Vec::new(), Vec::new());
            let mut costs = Vec::new();
            let shares = Mutex::new(vec![Default::default(); count]);
            team.run(&|worker| {
                shares.lock().unwrap()[worker.index] = (
                    worker.split(n),
                    worker.split_units(n, 16),
                    worker.split_weighted(n, |i| i as u64),
                );
            });
            for (split, in_units, by_weight) in shares.into_inner().unwrap() {
                plain.extend(split);
                units.extend(in_units);
                costs.push(by_weight.clone().sum::<usize>());
                weighted.extend(by_weight);
            }
            let all: Vec<usize> = (0..n).collect();
            assert_eq!(plain, all);
            assert_eq!(units, all);
            assert_eq!(weighted, all, "{n} items, {count} workers");
            if n == 100 {
                let spread = costs.iter().max().unwrap() - costs.iter().min().unwrap();
                assert!(spread <= 2 * n, "{costs:?}");
            }
        }
    }
}

#[test]
fn claims_hand_out_every_item_once_between_barriers() {
    let team = Team::new(4).unwrap();
    let taken: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
    team.run(&|worker| {
        for _ in 0..50 {
            while let Some(range) = worker.claim(1000, 7) {
                for i in range {
                    taken[i].fetch_add(1, Ordering::Relaxed);
                }
            }
            worker.barrier();
        }
    });
    assert!(taken.iter().all(|count| count.load(Ordering::Relaxed) == 50));
}

#[test]
fn a_job_that_is_to_stop_ends_at_the_same_gathering_for_all() {
    for threads in [1, 2, 4] {
        let team = Team::new(threads).unwrap();
        for after in [0, 1, 7, 40] {
            let stop = AtomicBool::new(false);
            let (claimed, passed) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let whole = team.run_until(&stop, &|worker| {
                for _ in 0..10 {
                    while worker.claim(5, 1).is_some() {
                        let before = claimed.fetch_add(1, Ordering::Relaxed);
                        if before + 1 == after {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    if !worker.gather() {
                        return;
                    }
                    passed.fetch_add(1, Ordering::Relaxed);
                }
            });
            let (claimed, passed) = (claimed.into_inner(), passed.into_inner());
            assert_eq!(whole, after == 0);
            // One worker stops at once. Others may claim the rest of the round before the one that
            // sets the flag is given a processor to do so; never more, since it has not gathered.
            let rounds = if after == 0 { 10 } else { (after - 1) / 5 };
            let (least, most) = match after {
                0 => (50, 50),
                _ if threads == 1 => (after, after),
                _ => (after, 5 * (rounds + 1)),
            };
            assert!((least..=most).contains(&claimed), "{claimed} items, {after} wanted");
            assert_eq!(passed, rounds * threads, "{after}: all alike");
            // The next job knows nothing of it.
            assert!(team.run_until(&AtomicBool::new(false), &|worker| assert!(worker.gather())));
        }
    }
}
