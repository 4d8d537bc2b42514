//! Memory that this process may still take, as reported by Linux (proc(5), cgroups(7)).
//!
//! It is the least of: the machine's available memory, what is left in each control group that
//! contains the process, and what is left of its address-space and data limits. Page cache and swap
//! space count as available, whoever uses them. On other systems the result is unknown.

use std::path::{Path, PathBuf};

/// Reads a system file.
type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Bytes that can still be written to, and bytes of addresses that can still be reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Free {
    /// Memory; `None` if unknown.
    pub(super) memory: Option<usize>,
    /// Addresses; `None` if not limited.
    pub(super) addresses: Option<usize>,
}

/// The memory left now.
pub(super) fn free() -> Free {
    free_by(&|path| std::fs::read_to_string(path).ok())
}

fn free_by(read: Read<'_>) -> Free {
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| machine(&text));
    let memory = machine.map(|(available, swap)| {
        let groups = group_folders(read).into_iter();
        let left = groups.filter_map(|(folder, kind)| left_in(read, &folder, kind, swap));
        left.fold(available.saturating_add(swap), usize::min)
    });
    Free { memory, addresses: addresses(read) }
}

/// The number after a name, in lines such as `MemAvailable:  123 kB` or `inactive_file 4096`.
fn number(text: &str, name: &str) -> Option<usize> {
    let rest = text.lines().find_map(|line| {
        line.strip_prefix(name).filter(|rest| rest.starts_with([':', ' ', '\t']))
    })?;
    let mut words = rest.trim_start_matches(':').split_whitespace();
    let number: usize = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { number.saturating_mul(1024) } else { number })
}

/// Memory that is available without swapping, and swap space that is free.
fn machine(meminfo: &str) -> Option<(usize, usize)> {
    Some((number(meminfo, "MemAvailable")?, number(meminfo, "SwapFree").unwrap_or(0)))
}

/// The two versions of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Version 2: one hierarchy for all resources.
    Unified,
    /// Version 1: a hierarchy for memory alone.
    Legacy,
}

/// The folders of this process's control group and of all its ancestors.
fn group_folders(read: Read<'_>) -> Vec<(PathBuf, Kind)> {
    let text = |path: &str| read(Path::new(path)).unwrap_or_default();
    let (groups, mounts) = (text("/proc/self/cgroup"), text("/proc/self/mountinfo"));
    let mut folders = Vec::new();
    for line in groups.lines() {
        // `0::/path`, or `4:memory:/path`.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(resources), Some(path)) = (fields.next(), fields.next()) else { continue };
        let kind = match resources {
            "" => Kind::Unified,
            list if list.split(',').any(|name| name == "memory") => Kind::Legacy,
            _ => continue,
        };
        let Some((root, mount)) = mounts.lines().find_map(|line| mount_of(line, kind)) else {
            continue;
        };
        // A container may see the hierarchy from its own group on while its path is given from the
        // root; then the mount point is its own group.
        let inside = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        let plain = inside.components().all(|c| matches!(c, std::path::Component::Normal(_)));
        let own = if plain { Path::new(mount).join(inside) } else { PathBuf::from(mount) };
        let above = own.ancestors().take_while(|folder| folder.starts_with(mount));
        folders.extend(above.map(|folder| (folder.to_path_buf(), kind)));
    }
    folders
}

/// Root and mount point of a line of `mountinfo`, if it is a control group hierarchy of this kind
/// with a memory controller.
fn mount_of(line: &str, kind: Kind) -> Option<(&str, &str)> {
    let (mount, system) = line.split_once(" - ")?;
    let (mut mount, mut system) = (mount.split(' ').skip(3), system.split(' '));
    let (root, place, kind_of) = (mount.next()?, mount.next()?, system.next()?);
    let fits = match kind {
        Kind::Unified => kind_of == "cgroup2",
        Kind::Legacy => {
            kind_of == "cgroup" && system.nth(1)?.split(',').any(|option| option == "memory")
        }
    };
    fits.then_some((root, place))
}

/// Memory left in a control group, if it has a limit. Page cache that the system can drop does not
/// count as used; swap counts as far as the group may use it.
fn left_in(read: Read<'_>, folder: &Path, kind: Kind, swap: usize) -> Option<usize> {
    let text = |name: &str| read(&folder.join(name));
    let value = |name: &str| text(name)?.trim().parse::<usize>().ok();
    let (limit, used, dropped, swap) = match kind {
        Kind::Unified => {
            let limit = value("memory.max")?;
            let used = value("memory.current")?;
            // Without this file, or with `max` in it, swap is not limited.
            let most = value("memory.swap.max");
            let taken = value("memory.swap.current").unwrap_or(0);
            let swap = most.map_or(swap, |most| swap.min(most.saturating_sub(taken)));
            (limit, used, ["inactive_file", "active_file", "slab_reclaimable"], swap)
        }
        Kind::Legacy => {
            let limit = value("memory.limit_in_bytes")?;
            let used = value("memory.usage_in_bytes")?;
            let both = value("memory.memsw.limit_in_bytes");
            let swap = both.map_or(swap, |both| swap.min(both.saturating_sub(limit)));
            (limit, used, ["total_inactive_file", "total_active_file", ""], swap)
        }
    };
    let stat = text("memory.stat").unwrap_or_default();
    let dropped: usize = dropped.iter().filter_map(|name| number(&stat, name)).sum();
    Some(limit.saturating_sub(used.saturating_sub(dropped)).saturating_add(swap))
}

/// The rest of the process's address space and data, if either is limited.
fn addresses(read: Read<'_>) -> Option<usize> {
    let limits = read(Path::new("/proc/self/limits"))?;
    let status = read(Path::new("/proc/self/status"))?;
    let left = |(limit, used): (&str, &str)| {
        let rest = limits.lines().find_map(|line| line.strip_prefix(limit))?;
        // `unlimited` does not parse as a number.
        let limit: usize = rest.split_whitespace().next()?.parse().ok()?;
        Some(limit.saturating_sub(number(&status, used)?))
    };
    let limits = [("Max address space", "VmSize"), ("Max data size", "VmData")];
    limits.into_iter().filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const MEMINFO: &str = "MemTotal: 16384 kB\nMemFree: 1024 kB\nMemAvailable:    8192 kB\n\
                           SwapTotal: 4096 kB\nSwapFree:        2048 kB\n";
    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const LEGACY: &str = "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                          31 23 0:27 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";

    fn told(files: &[(&str, &str)]) -> Free {
        free_by(&|path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| text.to_string())
        })
    }

    #[test]
    fn the_least_of_all_limits_counts() {
        let meminfo = ("/proc/meminfo", MEMINFO);
        let in_group = ("/proc/self/cgroup", "0::/a/b\n");
        let mounts = ("/proc/self/mountinfo", UNIFIED);
        let stat = "anon 5\nfile 99999999\ninactive_file 1048576\nactive_file 2097152\n\
                    inactive_anon 7\nslab_reclaimable 0\n";
        let limits = "Limit Soft Hard Units\nMax data size   unlimited unlimited bytes\n\
                      Max address space   3145728  unlimited bytes\n";
        /// The system's files, memory, addresses, and why.
        type Case<'a> = (&'a [(&'a str, &'a str)], Option<usize>, Option<usize>, &'a str);
        let cases: &[Case<'_>] = &[
            (&[], None, None, "another system"),
            (&[("/proc/meminfo", "MemFree: 4 kB\n")], None, None, "an old kernel"),
            (&[meminfo], Some(10 * MIB), None, "available, and swap"),
            (&[meminfo, in_group, mounts], Some(10 * MIB), None, "groups without files"),
            (
                &[
                    meminfo,
                    in_group,
                    mounts,
                    ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
                    ("/sys/fs/cgroup/a/b/memory.current", "12345\n"),
                ],
                Some(10 * MIB),
                None,
                "a group without a limit",
            ),
            (
                &[
                    meminfo,
                    in_group,
                    mounts,
                    ("/sys/fs/cgroup/a/memory.max", "6291456\n"),
                    ("/sys/fs/cgroup/a/memory.current", "5242880\n"),
                    ("/sys/fs/cgroup/a/memory.stat", stat),
                    ("/sys/fs/cgroup/a/memory.swap.max", "0\n"),
                ],
                Some(4 * MIB),
                None,
                "the group above: 6 less 5, of which 3 are files'",
            ),
            (
                &[
                    meminfo,
                    in_group,
                    mounts,
                    ("/sys/fs/cgroup/a/b/memory.max", "1048576\n"),
                    ("/sys/fs/cgroup/a/b/memory.current", "2097152\n"),
                    ("/sys/fs/cgroup/a/b/memory.swap.max", "3145728\n"),
                    ("/sys/fs/cgroup/a/b/memory.swap.current", "2097152\n"),
                ],
                Some(MIB),
                None,
                "a full group that may swap a little more",
            ),
            (
                &[
                    meminfo,
                    ("/proc/self/cgroup", "12:cpu,cpuacct:/x\n5:memory:/docker/ab\n0::/\n"),
                    ("/proc/self/mountinfo", LEGACY),
                    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4194304\n"),
                    ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "3145728\n"),
                    ("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1048576\n"),
                    ("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "4194304\n"),
                ],
                Some(2 * MIB),
                None,
                "a container's legacy group, seen from inside",
            ),
            (
                &[meminfo, ("/proc/self/limits", limits), ("/proc/self/status", "VmSize: 1024 kB")],
                Some(10 * MIB),
                Some(2 * MIB),
                "ulimit -v",
            ),
        ];
        for (files, memory, addresses, why) in cases {
            assert_eq!(told(files), Free { memory: *memory, addresses: *addresses }, "{why}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_some() {
        assert!(free().memory.is_some_and(|bytes| bytes > MIB), "{:?}", free());
    }
}
