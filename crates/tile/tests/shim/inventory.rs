//! The kernels that a decoder needs, as the proofs take them: a few of each family, or all.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use tile::case::{Bench, Case, Spec};
use tile::ir::Kernel;

/// How many kernels of a family are taken, from its smallest to its largest.
const OF_A_FAMILY: usize = 3;

/// Whether DELFT_ALL_KERNELS asks for every kernel: minutes on a machine with few cores.
pub(crate) fn all() -> bool {
    std::env::var_os("DELFT_ALL_KERNELS").is_some()
}

fn size(kernel: &Kernel) -> usize {
    let mut size = 0;
    kernel.visit(&mut |_| size += 1);
    size
}

/// What is kept of a family, or of all. All cases together are gigabytes, and their references take
/// longer to compute than their kernels to record.
#[derive(Default)]
struct Inventory {
    /// The kernels that cases launch, each once.
    kernels: Vec<Kernel>,
    /// The kernels of benchmarks.
    benched: Vec<Kernel>,
    /// The cases of the kernels taken.
    cases: Vec<Case>,
}

/// Of all families, in the order of `ops`: made once, on all cores.
static INVENTORY: LazyLock<Inventory> = LazyLock::new(|| {
    let specs = ops::kernels::all();
    let (next, families) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let Some(spec) = specs.get(i) else { return };
        let mut family = family(spec, &[], all());
        family.benched.extend((spec.benches)().into_iter().map(|bench| bench.kernel));
        families.lock().expect("no thread panics with it").insert(i, family);
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let mut inventory = Inventory::default();
    for family in families.into_inner().expect("no thread panicked").into_values() {
        inventory.kernels.extend(family.kernels);
        inventory.benched.extend(family.benched);
        inventory.cases.extend(family.cases);
    }
    inventory
});

/// Of a family, but for the kernels of some cases: all kernels, the smallest first, and the cases of
/// a few of them, or of all.
fn family(spec: &Spec, others: &[Case], all: bool) -> Inventory {
    let mut family: Vec<(usize, Vec<Case>)> = Vec::new();
    for case in (spec.cases)() {
        if others.iter().any(|other| other.kernel == case.kernel) {
            continue;
        }
        match family.iter_mut().find(|(_, cases)| cases[0].kernel == case.kernel) {
            Some((_, cases)) => cases.push(case),
            None => family.push((size(&case.kernel), vec![case])),
        }
    }
    family.sort_by(|(a, x), (b, y)| (a, &x[0].kernel.name).cmp(&(b, &y[0].kernel.name)));
    let last = family.len().saturating_sub(1);
    let mut places: Vec<usize> = (0..OF_A_FAMILY).map(|i| i * last / (OF_A_FAMILY - 1)).collect();
    // And the largest product of warpgroups, of which there are few.
    places.extend(family.iter().rposition(|(_, cases)| cases[0].kernel.has_wgmma()));
    let mut found = Inventory::default();
    for (i, (_, cases)) in family.into_iter().enumerate() {
        found.kernels.push(cases[0].kernel.clone());
        if all || places.contains(&i) {
            found.cases.extend(cases);
        }
    }
    found
}

/// The cases of the kernels taken, family by family; those of one kernel are neighbours.
pub(crate) fn cases() -> &'static [Case] {
    &INVENTORY.cases
}

/// All kernels: those of cases, then those of benchmarks.
pub(crate) fn kernels() -> impl Iterator<Item = &'static Kernel> {
    INVENTORY.kernels.iter().chain(&INVENTORY.benched)
}

/// The benchmarks of all families.
pub(crate) fn benches() -> Vec<Bench> {
    ops::kernels::all().into_iter().flat_map(|spec| (spec.benches)()).collect()
}

/// As [`cases`], of all kernels but those of some cases.
pub(crate) fn cases_without(others: &[Case], all: bool) -> Vec<Case> {
    let families = ops::kernels::all();
    families.iter().flat_map(|spec| family(spec, others, all).cases).collect()
}

/// A parameter that `Recipe`'s name leaves out shows here, as two kernels with one name.
#[test]
fn no_two_kernels_have_one_name() {
    let mut known: BTreeMap<&str, &Kernel> = BTreeMap::new();
    for kernel in kernels() {
        let same = *known.entry(&kernel.name).or_insert(kernel);
        assert!(same == kernel, "{}: two kernels", kernel.name);
    }
    for name in known.keys() {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        assert!(name.chars().all(legal) && !name.contains("__"), "{name}");
    }
    println!("{} kernels", known.len());
}
