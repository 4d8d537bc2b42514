//! The operating system's counters of this process: pages fetched, turns lost to others, time
//! stolen by a host.
//!
//! Linux tells (proc(5)); elsewhere nothing is known.

use std::fs::read_to_string;

/// Totals so far; subtract two of them for what happened between.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Counters {
    /// Pages that had to be fetched from a disk.
    pub(crate) major_faults: u64,
    /// Times that a thread lost its core to another program.
    pub(crate) involuntary_switches: u64,
    /// Seconds that threads were ready to run and had no core, over all threads.
    pub(crate) waiting: f64,
    /// Seconds that a host gave this machine's cores to others, over all cores.
    pub(crate) stolen: f64,
}

impl Counters {
    /// The totals now; `None` where the system does not say.
    pub(crate) fn now() -> Option<Counters> {
        let stat = read_to_string("/proc/self/stat").ok()?;
        // The command's name, in parentheses, may hold spaces; the state behind it is field 3.
        let major_faults = stat.rsplit(')').next()?.split_whitespace().nth(12 - 3)?.parse().ok()?;
        let mut counters = Counters { major_faults, ..Counters::default() };
        for thread in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
            let file = |name: &str| read_to_string(thread.path().join(name)).unwrap_or_default();
            let (status, schedule) = (file("status"), file("schedstat"));
            let switches =
                status.lines().find_map(|l| l.strip_prefix("nonvoluntary_ctxt_switches:"));
            counters.involuntary_switches += number(switches);
            // Nanoseconds on a core, nanoseconds waiting for one, turns.
            counters.waiting += number(schedule.split_whitespace().nth(1)) as f64 / 1e9;
        }
        // user, nice, system, idle, iowait, irq, softirq, steal: in hundredths of a second.
        let cores = read_to_string("/proc/stat").unwrap_or_default();
        let all = cores.lines().next().and_then(|line| line.split_whitespace().nth(8));
        counters.stolen = number(all) as f64 / 100.0;
        Some(counters)
    }

    /// The counts since `earlier`.
    pub(crate) fn since(self, earlier: Counters) -> Counters {
        Counters {
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            involuntary_switches: self
                .involuntary_switches
                .saturating_sub(earlier.involuntary_switches),
            waiting: (self.waiting - earlier.waiting).max(0.0),
            stolen: (self.stolen - earlier.stolen).max(0.0),
        }
    }
}

/// Bytes of the last caches of all processors that are running, each counted once however many
/// share it; `None` where the system does not say.
pub(crate) fn cache_bytes() -> Option<u64> {
    let mut seen: Vec<(u64, String, u64)> = Vec::new();
    for cpu in std::fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        let Ok(caches) = std::fs::read_dir(cpu.path().join("cache")) else { continue };
        for cache in caches.flatten() {
            let file = |name: &str| read_to_string(cache.path().join(name)).unwrap_or_default();
            let found = (
                number(Some(&file("level"))),
                file("shared_cpu_list"),
                kibibytes(file("size").trim()).unwrap_or(0),
            );
            if !seen.contains(&found) {
                seen.push(found);
            }
        }
    }
    let last = seen.iter().map(|cache| cache.0).max()?;
    Some(seen.iter().filter(|cache| cache.0 == last).map(|cache| cache.2).sum())
}

/// `32768K` in bytes.
fn kibibytes(text: &str) -> Option<u64> {
    text.strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
}

fn number(text: Option<&str>) -> u64 {
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Programs that wanted a core on average over the last minute; `None` where the system does not
/// say.
pub(crate) fn load_average() -> Option<f64> {
    read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn counters_grow() {
        let before = Counters::now().unwrap();
        let after = Counters::now().unwrap();
        let between = after.since(before);
        assert!(between.waiting >= 0.0 && between.stolen >= 0.0);
        assert_eq!(before.since(after).major_faults, 0);
        assert!(load_average().unwrap() >= 0.0);
    }

    #[test]
    fn caches_are_counted_where_the_system_tells() {
        assert_eq!(kibibytes("32768K"), Some(32 << 20));
        assert_eq!(kibibytes("32M"), None);
        assert!(cache_bytes().is_none_or(|bytes| bytes >= 1 << 16 || bytes == 0));
    }
}
