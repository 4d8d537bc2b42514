//! Which kernels and cases a filter names.

use ops::kernels;
use tile::Kernel;
use tile::case::{Bench, Case, Spec};
use tile::launch::Numbers;

/// The families with cases or benchmarks that a filter names: by the family's name, or by a kernel's.
pub(crate) fn cases(filter: Option<&str>) -> Result<Vec<(Spec, Vec<Case>)>, String> {
    let chosen = kernels::all().into_iter().filter_map(|spec| {
        let cases = kept((spec.cases)(), |case| &case.kernel, spec, filter);
        (!cases.is_empty()).then_some((spec, cases))
    });
    some(chosen.collect(), filter)
}

/// As [`cases`], for benchmarks.
pub(crate) fn benches(filter: Option<&str>) -> Result<Vec<(Spec, Vec<Bench>)>, String> {
    let chosen = kernels::all().into_iter().filter_map(|spec| {
        let benches = kept((spec.benches)(), |bench| &bench.kernel, spec, filter);
        (!benches.is_empty()).then_some((spec, benches))
    });
    some(chosen.collect(), filter)
}

/// Every distinct kernel of the cases and benchmarks that a filter names, by name.
pub(crate) fn distinct(filter: Option<&str>) -> Result<Vec<Kernel>, String> {
    Ok(instances(filter)?.into_iter().map(|(kernel, _)| kernel).collect())
}

/// As [`distinct`], with the numbers of the first case that launches each.
pub(crate) fn instances(filter: Option<&str>) -> Result<Vec<(Kernel, Numbers)>, String> {
    let mut found: Vec<(Kernel, Numbers)> = Vec::new();
    for spec in kernels::all() {
        let cases = kept((spec.cases)(), |case| &case.kernel, spec, filter);
        let benches = kept((spec.benches)(), |bench| &bench.kernel, spec, filter);
        let cases = cases.into_iter().map(|case| (case.kernel, case.numbers));
        let benches = benches.into_iter().map(|bench| (bench.kernel, bench.numbers));
        for (kernel, numbers) in cases.chain(benches) {
            match found.iter().find(|(known, _)| known.name == kernel.name) {
                None => found.push((kernel, numbers)),
                Some((twin, _)) if *twin == kernel => {}
                Some(_) => return Err(format!("{}: two kernels of one name", kernel.name)),
            }
        }
    }
    found.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    some(found, filter)
}

fn kept<T>(
    mut all: Vec<T>,
    kernel: impl Fn(&T) -> &Kernel,
    spec: Spec,
    filter: Option<&str>,
) -> Vec<T> {
    if let Some(filter) = filter
        && !spec.name.contains(filter)
    {
        all.retain(|one| kernel(one).name.contains(filter));
    }
    all
}

fn some<T>(found: Vec<T>, filter: Option<&str>) -> Result<Vec<T>, String> {
    if found.is_empty() {
        let names: Vec<&str> = kernels::all().iter().map(|spec| spec.name).collect();
        let filter = filter.unwrap_or_default();
        return Err(format!("no kernel's name contains `{filter}` (hint: {})", names.join(", ")));
    }
    Ok(found)
}
