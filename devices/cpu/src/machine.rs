//! Resources of the machine that this process may use: processors and memory.
//!
//! Everything is read from the system's text files by functions of these texts, so that they can be
//! tested.

use samite_core::MemoryInfo;
use samite_threads::CpuSet;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Returns the number of threads that can compute concurrently without competing: the processors
/// that this process may run on (only those in `among`, if given), counting each physical core
/// once, limited by the control group's quota.
pub(crate) fn processors(among: Option<&CpuSet>) -> usize {
    let allowed = CpuSet::allowed().unwrap_or_else(|| {
        (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
    });
    let allowed = among.map_or(allowed.clone(), |among| allowed.within(among));
    let cores: BTreeSet<String> = allowed
        .iter()
        .map(|cpu| {
            let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            std::fs::read_to_string(file).unwrap_or_else(|_| cpu.to_string())
        })
        .collect();
    let quota = control_groups()
        .iter()
        .filter_map(|group| group.quota())
        .fold(f64::INFINITY, f64::min);
    limit(cores.len(), quota)
}

/// Returns `cores`, or fewer if the quota is smaller. At least 1.
fn limit(cores: usize, quota: f64) -> usize {
    // With a quota of 1.5 processors, two threads would be stopped part of the time, and one would
    // wait for the other.
    cores.min(quota.floor() as usize).max(1)
}

/// Folder of a control group: of version 2, or of one controller of version 1.
enum ControlGroup {
    V1Cpu(PathBuf),
    V1Memory(PathBuf),
    V2(PathBuf),
}

impl ControlGroup {
    /// Returns the average number of processors that the group may use.
    fn quota(&self) -> Option<f64> {
        match self {
            ControlGroup::V2(folder) => parse_cpu_max(&read(folder, "cpu.max")?),
            ControlGroup::V1Cpu(folder) => parse_cfs(
                &read(folder, "cpu.cfs_quota_us")?,
                &read(folder, "cpu.cfs_period_us")?,
            ),
            ControlGroup::V1Memory(_) => None,
        }
    }

    /// Returns the memory limit in bytes, and the bytes in use that cannot be reclaimed.
    fn memory(&self) -> Option<(usize, usize)> {
        let (folder, limit, usage, prefix) = match self {
            ControlGroup::V2(folder) => (folder, "memory.max", "memory.current", ""),
            ControlGroup::V1Memory(folder) => (
                folder,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            ),
            ControlGroup::V1Cpu(_) => return None,
        };
        let limit = read(folder, limit)?.trim().parse().ok()?;
        let usage: usize = read(folder, usage)?.trim().parse().ok()?;
        let cached = read(folder, "memory.stat").map_or(0, |text| parse_file_pages(&text, prefix));
        Some((limit, usage.saturating_sub(cached)))
    }
}

fn read(folder: &Path, file: &str) -> Option<String> {
    std::fs::read_to_string(folder.join(file)).ok()
}

/// Parses `cpu.max`: quota and period in microseconds, or `max`.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota, period)
}

/// Parses the quota (-1 for none) and the period, in microseconds.
fn parse_cfs(quota: &str, period: &str) -> Option<f64> {
    ratio(quota.trim(), period.trim())
}

/// Returns the bytes of the page cache, from the text of `memory.stat`. They count as in use, for
/// example a model's file, but are reclaimed when memory is needed. Excludes memory shared between
/// processes.
fn parse_file_pages(text: &str, prefix: &str) -> usize {
    text.lines()
        .filter_map(|line| line.strip_prefix(prefix)?.split_once(' '))
        .filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"))
        .filter_map(|(_, bytes)| bytes.trim().parse::<usize>().ok())
        .fold(0, usize::saturating_add)
}

fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then(|| quota / period)
}

/// Returns the control groups that limit this process: its own and all ancestors.
fn control_groups() -> Vec<ControlGroup> {
    let Ok(text) = std::fs::read_to_string("/proc/self/cgroup") else {
        return Vec::new();
    };
    let root = Path::new("/sys/fs/cgroup");
    let paths = parse_memberships(&text);
    let mut groups = Vec::new();
    if let Some(path) = &paths.unified {
        let base = [root.join("unified"), root.to_owned()]
            .into_iter()
            .find(|base| base.join("cgroup.controllers").exists());
        if let Some(base) = base {
            groups.extend(ancestors(path).map(|path| ControlGroup::V2(base.join(path))));
        }
    }
    let cpu = ancestors(paths.cpu.as_deref().unwrap_or(""));
    groups.extend(cpu.map(|path| ControlGroup::V1Cpu(root.join("cpu").join(path))));
    let memory = ancestors(paths.memory.as_deref().unwrap_or(""));
    groups.extend(memory.map(|path| ControlGroup::V1Memory(root.join("memory").join(path))));
    groups
}

#[derive(Debug, Default, PartialEq)]
struct Memberships {
    unified: Option<String>,
    cpu: Option<String>,
    memory: Option<String>,
}

/// Parses `/proc/self/cgroup`: lines of `number:controllers:path`.
fn parse_memberships(text: &str) -> Memberships {
    let mut found = Memberships::default();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let path = Some(path.trim_start_matches('/').to_owned());
        if controllers.is_empty() {
            found.unified = path;
            continue;
        }
        for controller in controllers.split(',') {
            match controller {
                "cpu" => found.cpu.clone_from(&path),
                "memory" => found.memory.clone_from(&path),
                _ => {}
            }
        }
    }
    found
}

fn ancestors(path: &str) -> impl Iterator<Item = PathBuf> + use<'_> {
    Path::new(path).ancestors().map(Path::to_owned)
}

/// Returns the memory of the machine, or of the control group or the address space if that is less.
pub(crate) fn memory() -> MemoryInfo {
    let mut info = std::fs::read_to_string("/proc/meminfo")
        .map_or_else(|_| MemoryInfo::default(), |text| parse_meminfo(&text));
    for (limit, used) in control_groups().iter().filter_map(ControlGroup::memory) {
        // "No limit" is a huge number in version 1.
        if info.total.is_some_and(|total| limit < total) {
            info.total = Some(limit);
            let left = limit.saturating_sub(used);
            info.free = Some(info.free.map_or(left, |free| free.min(left)));
        }
    }
    if let Some(left) = samite_core::free_address_space() {
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        info.free = Some(info.free.map_or(left, |free| free.min(left)));
    }
    info
}

/// Parses `/proc/meminfo`.
fn parse_meminfo(text: &str) -> MemoryInfo {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: usize = line
            .trim_start_matches(':')
            .trim()
            .trim_end_matches("kB")
            .trim()
            .parse()
            .ok()?;
        kib.checked_mul(1024)
    };
    MemoryInfo {
        free: field("MemAvailable").or_else(|| field("MemFree")),
        total: field("MemTotal"),
    }
}

/// Returns the processor's name.
pub(crate) fn description() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| parse_model_name(&text))
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn parse_model_name(text: &str) -> Option<String> {
    let (_, name) = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == "model name")?;
    Some(name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_cpu_quotas_are_parsed() {
        assert_eq!(parse_cpu_max("150000 100000\n"), Some(1.5));
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max(""), None);
        assert_eq!(parse_cfs("-1\n", "100000\n"), None);
        assert_eq!(parse_cfs("400000\n", "100000\n"), Some(4.0));
        assert_eq!(parse_cfs("400000\n", "0\n"), None);
        assert_eq!(limit(8, 1.5), 1);
        assert_eq!(limit(8, 0.2), 1);
        assert_eq!(limit(8, f64::INFINITY), 8);
        assert_eq!(limit(2, 4.0), 2);
    }

    #[test]
    fn cgroup_memberships_of_both_versions_are_parsed() {
        assert_eq!(
            parse_memberships("0::/user.slice/session.scope\n"),
            Memberships {
                unified: Some("user.slice/session.scope".into()),
                ..Memberships::default()
            }
        );
        let found = parse_memberships("4:memory:/m:odd\n2:cpu,cpuacct:/\nnonsense\n");
        assert_eq!(found.cpu.as_deref(), Some(""));
        assert_eq!(found.memory.as_deref(), Some("m:odd"));
        let paths: Vec<_> = ancestors("a/b").collect();
        assert_eq!(paths, [Path::new("a/b"), Path::new("a"), Path::new("")]);
    }

    #[test]
    fn cached_files_are_not_in_use() {
        let stat = "anon 7\nfile 900\nshmem 5\ninactive_file 300\nactive_file 400\nslab 2\n";
        assert_eq!(parse_file_pages(stat, ""), 700);
        let stat = "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 40\n";
        assert_eq!(parse_file_pages(stat, "total_"), 70);
        assert_eq!(parse_file_pages("", ""), 0);
        assert_eq!(parse_file_pages("active_file much\n", ""), 0);
    }

    #[test]
    fn memory_sizes_and_processor_name_are_parsed() {
        let info = parse_meminfo(
            "MemTotal:       24684084 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n",
        );
        assert_eq!(info.total, Some(24_684_084 * 1024));
        assert_eq!(info.free, Some(20_000_000 * 1024));
        assert_eq!(parse_meminfo("").free, None);
        let name = parse_model_name("processor\t: 0\nmodel name\t: A CPU: fast\n");
        assert_eq!(name.as_deref(), Some("A CPU: fast"));
    }

    #[test]
    fn this_machine_has_a_processor() {
        let all = processors(None);
        assert!(all >= 1);
        let first: CpuSet = CpuSet::allowed()
            .iter()
            .flat_map(CpuSet::iter)
            .take(1)
            .collect();
        assert_eq!(processors(Some(&first)), 1);
        assert_eq!(processors(Some(&(0..1024).collect())), all);
        assert!(!description().is_empty());
    }
}
