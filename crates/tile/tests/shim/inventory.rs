//! The kernels that a decoder needs, as the proofs take them: a few of each family, or all.

use tile::case::{Bench, Case};
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

/// The cases of the kernels taken, family by family; those of one kernel are neighbours.
pub(crate) fn cases(all: bool) -> Vec<Case> {
    cases_without(&[], all)
}

/// The benchmarks of all families.
pub(crate) fn benches() -> Vec<Bench> {
    ops::kernels::all().into_iter().flat_map(|spec| (spec.benches)()).collect()
}

/// As [`cases`], of all kernels but those of some cases.
pub(crate) fn cases_without(others: &[Case], all: bool) -> Vec<Case> {
    let mut taken = Vec::new();
    for spec in ops::kernels::all() {
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
        let mut places: Vec<usize> =
            (0..OF_A_FAMILY).map(|i| i * last / (OF_A_FAMILY - 1)).collect();
        // And the largest product of warpgroups, of which there are few.
        places.extend(family.iter().rposition(|(_, cases)| cases[0].kernel.has_wgmma()));
        for (i, (_, cases)) in family.into_iter().enumerate() {
            if all || places.contains(&i) {
                taken.extend(cases);
            }
        }
    }
    taken
}
