//! The processors that this process may use: affinity, cores and their hyperthreads, and cgroup
//! quotas.

/// The default size of a team: one thread per physical core that this process may run on, at most
/// its cgroup's processor quota (rounded up), at least one. Hyperthreads do not help, since the
/// kernels fill a core. On macOS: the performance cores.
pub fn default_threads() -> usize {
    let cores = cores();
    quota().map_or(cores, |quota| cores.min(quota.ceil().max(1.0) as usize)).max(1)
}

/// The processors that this process may use: one of every core first, then the other hyperthreads.
#[cfg(target_os = "linux")]
pub(super) fn allowed_cpus() -> Vec<usize> {
    let mut seen = Vec::new();
    let mut ranked: Vec<(usize, usize)> = Vec::new();
    for cpu in affinity() {
        // A core's name: the list of its hyperthreads, the same for each of them.
        let siblings =
            read(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"));
        let core = siblings.unwrap_or_else(|| cpu.to_string());
        let rank = seen.iter().filter(|&other| *other == core).count();
        seen.push(core);
        ranked.push((rank, cpu));
    }
    ranked.sort_unstable();
    ranked.into_iter().map(|(_, cpu)| cpu).collect()
}

/// Placeholders for the number of usable processors; this system does not name them.
#[cfg(not(target_os = "linux"))]
pub(super) fn allowed_cpus() -> Vec<usize> {
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// Physical cores among the processors this process may use.
#[cfg(target_os = "linux")]
fn cores() -> usize {
    let mut cores: Vec<String> = affinity()
        .into_iter()
        .map(|cpu| {
            read(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
                .unwrap_or_else(|| cpu.to_string())
        })
        .collect();
    cores.sort_unstable();
    cores.dedup();
    cores.len()
}

/// The performance cores: efficiency cores would delay every barrier.
#[cfg(target_os = "macos")]
fn cores() -> usize {
    let (mut cores, mut size) = (0i32, size_of::<i32>());
    // SAFETY: the name is a C string, and `cores` is `size` bytes that may be written.
    let status = unsafe {
        libc::sysctlbyname(
            c"hw.perflevel0.physicalcpu".as_ptr(),
            (&raw mut cores).cast(),
            &raw mut size,
            std::ptr::null_mut(),
            0,
        )
    };
    if status == 0 && cores > 0 { cores as usize } else { allowed_cpus().len() }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn cores() -> usize {
    allowed_cpus().len()
}

/// The processors in this process's affinity mask, which cpusets narrow too.
#[cfg(target_os = "linux")]
fn affinity() -> Vec<usize> {
    // The kernel wants a mask at least as long as its own: 64 Ki processors is beyond any
    // configuration.
    let mut mask = [0u64; 1024];
    // SAFETY: the mask is that many bytes that may be written.
    let bytes = unsafe {
        libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr())
    };
    let allowed: Vec<usize> = if bytes > 0 {
        (0..bytes as usize * 8).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1).collect()
    } else {
        Vec::new()
    };
    if allowed.is_empty() {
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    }
    allowed
}

/// Pins the calling thread to one processor; ignored if the operating system refuses.
#[cfg(target_os = "linux")]
pub(super) fn pin(cpu: usize) {
    let mut mask = [0u64; 1024];
    if let Some(word) = mask.get_mut(cpu / 64) {
        *word |= 1 << (cpu % 64);
        // SAFETY: the mask is that many bytes, only read.
        unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size_of_val(&mask), mask.as_ptr()) };
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_: usize) {}

/// The tightest processor quota of this process's cgroup and those around it, in processors.
#[cfg(target_os = "linux")]
fn quota() -> Option<f64> {
    let groups = read("/proc/self/cgroup")?;
    let mut tightest: Option<f64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|name| name == "cpu") {
            continue;
        }
        let mounts: &[&str] = if unified {
            &["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        } else {
            &["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"]
        };
        // Inside a container the path may not exist under the mount: its ancestors, the mount
        // itself among them, do.
        let mut path = path.trim_end_matches('/');
        loop {
            for mount in mounts {
                let quota = if unified {
                    read(&format!("{mount}{path}/cpu.max")).and_then(|text| quota_v2(&text))
                } else {
                    read(&format!("{mount}{path}/cpu.cfs_quota_us"))
                        .zip(read(&format!("{mount}{path}/cpu.cfs_period_us")))
                        .and_then(|(quota, period)| ratio(&quota, &period))
                };
                if let Some(quota) = quota {
                    tightest = Some(tightest.map_or(quota, |tightest: f64| tightest.min(quota)));
                }
            }
            match path.rfind('/') {
                Some(slash) => path = &path[..slash],
                None => break,
            }
        }
    }
    tightest
}

#[cfg(not(target_os = "linux"))]
fn quota() -> Option<f64> {
    None
}

/// `cpu.max`: "quota period" in microseconds, or "max period".
#[cfg(target_os = "linux")]
pub(super) fn quota_v2(text: &str) -> Option<f64> {
    let mut fields = text.split_whitespace();
    ratio(fields.next()?, fields.next()?)
}

/// Quota over period; `None` for "max", -1 and malformed values.
#[cfg(target_os = "linux")]
pub(super) fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

#[cfg(target_os = "linux")]
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
