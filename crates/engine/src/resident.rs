//! The process's own memory, as the operating system accounts it.

/// Peak resident set size in bytes; 0 where the system does not say.
pub fn peak_rss_bytes() -> u64 {
    // VmHWM is in KiB (proc(5)).
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}
