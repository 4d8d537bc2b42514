//! The process's own memory, as the operating system accounts it.

/// Peak resident set size in bytes; 0 where the system does not say.
pub fn peak_rss_bytes() -> u64 {
    peak().unwrap_or(0)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn peak() -> Option<u64> {
    // VmHWM is in KiB (proc(5)).
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
fn peak() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: writes one structure, whose bytes are numbers.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0 {
            return None;
        }
        usage.assume_init()
    };
    // Apple counts bytes, others KiB (getrusage(2)).
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    u64::try_from(usage.ru_maxrss).ok().map(|most| most * unit)
}

#[cfg(windows)]
fn peak() -> Option<u64> {
    /// `PROCESS_MEMORY_COUNTERS`.
    #[repr(C)]
    struct Counters {
        size: u32,
        faults: u32,
        peak: usize,
        others: [usize; 7],
    }
    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn GetCurrentProcess() -> *mut std::ffi::c_void;
        fn K32GetProcessMemoryInfo(
            process: *mut std::ffi::c_void,
            counters: *mut Counters,
            size: u32,
        ) -> i32;
    }
    let size = size_of::<Counters>() as u32;
    let mut counters = Counters { size, faults: 0, peak: 0, others: [0; 7] };
    // SAFETY: the process is this one, and the structure is as large as is said.
    let told = unsafe { K32GetProcessMemoryInfo(GetCurrentProcess(), &mut counters, size) };
    (told != 0).then_some(counters.peak as u64)
}

#[cfg(not(any(unix, windows)))]
fn peak() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_was_touched_counts() {
        let many = vec![1u8; 64 << 20];
        assert!(super::peak_rss_bytes() > std::hint::black_box(&many).len() as u64);
    }
}
