//! Which kernels and cases a filter names.

use ops::kernels;
use tile::Kernel;
use tile::case::{Bench, Case, Spec};
use tile::launch::Numbers;
use tile::manifest::Manifest;

/// The families with cases or benchmarks that a filter names: by the family's name, or by a
/// kernel's.
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

/// A kernel to build.
pub(crate) struct Instance {
    /// The family that lists it.
    pub(crate) family: &'static str,
    pub(crate) kernel: Kernel,
    /// The numbers of the first case that launches it.
    pub(crate) numbers: Numbers,
}

/// The manifest of kernels.
pub(crate) fn manifest(instances: &[Instance]) -> Manifest {
    Manifest::of(instances.iter().map(|i| (i.family, &i.kernel)))
}

/// Every distinct kernel of the cases and benchmarks that a filter names, by name.
pub(crate) fn distinct(filter: Option<&str>) -> Result<Vec<Kernel>, String> {
    Ok(instances(filter)?.into_iter().map(|instance| instance.kernel).collect())
}

/// As [`distinct`], with the family and the numbers of each.
pub(crate) fn instances(filter: Option<&str>) -> Result<Vec<Instance>, String> {
    let mut found: Vec<Instance> = Vec::new();
    for spec in kernels::all() {
        let family = spec.name;
        let cases = kept((spec.cases)(), |case| &case.kernel, spec, filter);
        let benches = kept((spec.benches)(), |bench| &bench.kernel, spec, filter);
        let cases = cases.into_iter().map(|case| (case.kernel, case.numbers));
        let benches = benches.into_iter().map(|bench| (bench.kernel, bench.numbers));
        for (kernel, numbers) in cases.chain(benches) {
            match found.iter().find(|known| known.kernel.name == kernel.name) {
                None => found.push(Instance { family, kernel, numbers }),
                Some(twin) if twin.kernel == kernel => {}
                Some(_) => return Err(format!("{}: two kernels of one name", kernel.name)),
            }
        }
    }
    found.sort_by(|a, b| a.kernel.name.cmp(&b.kernel.name));
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
