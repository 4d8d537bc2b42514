//! Mistakes seeded in the kernels of every family of `ops`: what orders threads, and what stores,
//! is left out, one line of the Rust source after the other, and each time a case of the family
//! must fail on the interpreter. So cases are shown to reach all of their kernels, and kernels to
//! have no barrier that nothing needs.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tile::case::{Case, Spec};
use tile::interp;
use tile::ir::{Block, Inst, Kernel, Place};

/// Instructions to leave out.
struct Mistake {
    why: &'static str,
    removes: fn(&Inst) -> bool,
}

#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    Mistake { why: "a barrier is missing", removes: |inst| matches!(inst, Inst::Barrier) },
    Mistake { why: "a simdgroup's barrier is missing", removes: |inst| matches!(inst, Inst::SimdBarrier) },
    Mistake { why: "a wait for copies is missing", removes: |inst| matches!(inst, Inst::CopyWait(_)) },
    Mistake { why: "a copy is missing", removes: |inst| matches!(inst, Inst::CopyAsync { .. }) },
    Mistake { why: "a store to shared memory is missing", removes: |inst| stores(inst, |place| matches!(place, Place::Shared(_))) },
    Mistake { why: "a result is not stored", removes: |inst| stores(inst, |place| matches!(place, Place::Buffer(_))) },
];

fn stores(inst: &Inst, to: fn(&Place) -> bool) -> bool {
    match inst {
        Inst::Store { place, .. } | Inst::TileStore { place, .. } => to(place),
        _ => false,
    }
}

/// Lines of a kind of instruction that a family's cases do not miss, how many, and why that is no
/// gap.
#[rustfmt::skip]
const SPARE: &[(&str, &str, usize, &str)] = &[
    ("add_splits_laid", "a result is not stored", 1, "single elements of a row, which is whole runs"),
    ("attend_tile_queries", "a simdgroup's barrier is missing", 1, "a helper's last: attend_tile_keys stores twice"),
    ("attention_prefill_codes", "a wait for copies is missing", 3, "codes are decoded on their way: nothing is copied"),
    ("index_choose", "a barrier is missing", 1, "between a sum of the group, which has its own, and what it orders"),
    ("lay_rows", "a result is not stored", 1, "as in add_splits_laid"),
    ("low_rank_sites", "a wait for copies is missing", 1, "as in stream, which it launches"),
    ("sample_adjust", "a barrier is missing", 1, "between atomics, which the interpreter takes in the order of the text"),
    ("stream", "a wait for copies is missing", 1, "after a sweep's last step, whose batches are empty"),
    ("stream_warpgroups", "a wait for copies is missing", 1, "as in stream"),
];

/// A kernel without the instructions that `removes` names and that were recorded at a line.
fn without(kernel: &Kernel, removes: fn(&Inst) -> bool, line: &str) -> Kernel {
    fn prune(block: &mut Block, gone: &impl Fn(&tile::ir::Statement) -> bool) {
        block.0.retain(|node| !gone(node));
        for node in &mut block.0 {
            node.inst.blocks_mut().into_iter().for_each(|inner| prune(inner, gone));
        }
    }
    let mut pruned = kernel.clone();
    prune(&mut pruned.body, &|node| removes(&node.inst) && kernel.source(node.source) == line);
    pruned
}

/// The lines at which a kernel's instructions of a kind were recorded.
fn lines(kernel: &Kernel, removes: fn(&Inst) -> bool) -> BTreeSet<&str> {
    let mut lines = BTreeSet::new();
    kernel.visit(&mut |node| {
        if removes(&node.inst) {
            lines.insert(kernel.source(node.source));
        }
    });
    lines
}

/// Whether a case fails with another kernel in the place of its own.
fn fails(case: &Case, kernel: &Kernel) -> bool {
    let mut buffers = case.buffers.clone();
    match interp::run(kernel, &case.numbers, &mut buffers) {
        Ok(_) => case.check(&buffers).is_err(),
        Err(_) => true,
    }
}

/// The kinds of mistakes of which a family's cases miss other than what is known, a line of text
/// each.
fn missed(spec: &Spec) -> Vec<String> {
    let mut cases = (spec.cases)();
    // What is small is quick, and mostly enough.
    cases.sort_by_cached_key(|case| {
        let mut size = 0;
        case.kernel.visit(&mut |_| size += 1);
        size
    });
    let mut found = Vec::new();
    for Mistake { why, removes } in MISTAKES {
        let all: BTreeSet<&str> =
            cases.iter().flat_map(|case| lines(&case.kernel, *removes)).collect();
        let caught = |line: &&str| {
            let has = |case: &&Case| lines(&case.kernel, *removes).contains(*line);
            let mut with = cases.iter().filter(has);
            with.any(|case| fails(case, &without(&case.kernel, *removes, line)))
        };
        let spare: Vec<&str> = all.into_iter().filter(|line| !caught(line)).collect();
        let known = SPARE.iter().find(|(family, what, ..)| family == &spec.name && what == why);
        if spare.len() != known.map_or(0, |(.., count, _)| *count) {
            found.push(format!("{}: {why}: {}", spec.name, spare.join(", ")));
        }
    }
    found
}

#[test]
fn mistakes_in_every_family_are_caught() {
    let specs = ops::kernels::all();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let lines = missed(spec);
            found.lock().expect("no thread panics with it").extend(lines);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let mut found = found.into_inner().expect("no thread panicked");
    found.sort();
    assert!(found.is_empty(), "mistakes that no case notices:\n{}", found.join("\n"));
}
