//! Which kernels and cases a filter names.

use std::collections::HashSet;

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

/// The manifest of kernels, in their order.
pub(crate) fn manifest(instances: &[Instance]) -> Manifest {
    let mut manifest = Manifest::of(instances.iter().map(|i| (i.family, &i.kernel)));
    let apple: HashSet<String> =
        kernels::only_apple().into_iter().map(|case| case.kernel.name).collect();
    for entry in &mut manifest.kernels {
        if let Some(metal) = &mut entry.metal {
            metal.preferred = apple.contains(&entry.name);
        }
    }
    manifest
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Kernels that agree in everything that the rule for choosing asks for compute the same, so
    /// that their contracts bind the same buffers.
    #[test]
    fn settings_tell_what_a_kernel_computes() {
        let manifest = manifest(&instances(None).unwrap());
        let mut alike: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (at, entry) in manifest.kernels.iter().enumerate() {
            assert_eq!(
                entry.settings.get("function").map(|f| entry.name.starts_with(f)),
                Some(true)
            );
            let params: Vec<_> = entry.params.iter().map(|p| (&p.name, &p.dtype)).collect();
            let key = format!("{} {:?} {params:?}", entry.family, entry.settings);
            alike.entry(key).or_default().push(at);
        }
        for group in alike.values() {
            let mut schedules: Vec<_> =
                group.iter().map(|at| &manifest.kernels[*at].schedule).collect();
            schedules.sort();
            schedules.dedup();
            let names: Vec<_> = group.iter().map(|at| &manifest.kernels[*at].name).collect();
            assert_eq!(schedules.len(), group.len(), "{names:?}");
        }
        let formats = |family: &str| {
            let of = manifest.kernels.iter().filter(|entry| entry.family == family);
            of.filter_map(|entry| entry.settings.get("format").map(String::as_str)).collect()
        };
        let packed: std::collections::BTreeSet<&str> = formats("embed_packed");
        assert!(packed.contains("block_q4_k") && packed.contains("block_iq4_xs"), "{packed:?}");
        let preferred =
            |e: &tile::manifest::KernelEntry| e.metal.as_ref().is_some_and(|m| m.preferred);
        assert!(manifest.kernels.iter().any(|e| e.family == "gemv" && preferred(e)));
    }
}
