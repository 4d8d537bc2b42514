#[allow(dead_code, unreachable_pub, reason = "the crate keeps what quotas are read with to itself")]
#[path = "../../src/team/topology.rs"]
mod source;

use source::*;

#[test]
#[cfg(target_os = "linux")]
fn quotas_parse() {
    assert_eq!(quota_v2("max 100000"), None);
    assert_eq!(quota_v2("150000 100000"), Some(1.5));
    assert_eq!(quota_v2("150000"), None);
    assert_eq!(ratio("-1", "100000"), None);
    assert_eq!(ratio("200000", "100000"), Some(2.0));
    assert_eq!(ratio("200000", "0"), None);
}

#[test]
fn there_is_a_processor_and_no_more_cores_than_processors() {
    let cpus = allowed_cpus();
    assert!(!cpus.is_empty());
    assert!((1..=cpus.len()).contains(&default_threads()));
    let mut distinct = cpus.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), cpus.len());
}
