//! Which cgroups a process is in. Any hierarchy counts, of either version: limits are kept by directory.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::protocol::CgroupId;

/// The cgroup of a directory.
pub fn id(folder: &Path) -> std::io::Result<CgroupId> {
    let meta = std::fs::metadata(folder)?;
    if !meta.is_dir() {
        return Err(std::io::ErrorKind::NotADirectory.into());
    }
    Ok(CgroupId { device: meta.dev(), inode: meta.ino() })
}

/// Whether the directory is a cgroup at all.
pub fn is_cgroup(folder: &Path) -> bool {
    folder.join("cgroup.procs").exists()
}

/// The cgroups above a directory, nearest first, without the hierarchy's root, which has no limits.
pub fn above(folder: &Path) -> Vec<PathBuf> {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let inner = folder.ancestors().skip(1);
    inner
        .take_while(|path| is_cgroup(path) && path.parent().is_some_and(is_cgroup))
        .map(Path::to_owned)
        .collect()
}

/// The cgroups of a process, a list for each hierarchy, from its own cgroup up.
pub fn of_process(pid: u32) -> Vec<Vec<CgroupId>> {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/cgroup")) else { return Vec::new() };
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let mount = mount_of(&mounts, controllers)?;
            let own = mount.join(path.trim_start_matches('/'));
            let up = own.ancestors().take_while(|folder| *folder != mount && folder.starts_with(&mount));
            Some(up.filter_map(|folder| id(folder).ok()).collect())
        })
        .collect()
}

/// Where a hierarchy is mounted whole; it has no controllers if it is version 2.
fn mount_of(mountinfo: &str, controllers: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let (root, point) = {
            let mut fields = left.split(' ').skip(3);
            (fields.next()?, fields.next()?)
        };
        let mut fields = right.split(' ');
        let (kind, options) = (fields.next()?, fields.nth(1)?);
        let fits = match controllers {
            "" => kind == "cgroup2",
            names => {
                kind == "cgroup"
                    && names.split(',').all(|name| options.split(',').any(|option| option == name))
            }
        };
        (fits && root == "/").then(|| PathBuf::from(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_by_controller() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
                      31 23 0:27 /a /else/memory rw - cgroup cgroup rw,memory\n\
                      32 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      33 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_of(mounts, "memory"), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(mount_of(mounts, "cpu,cpuacct"), Some("/sys/fs/cgroup/cpu,cpuacct".into()));
        assert_eq!(mount_of(mounts, ""), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(mount_of(mounts, "pids"), None);
    }
}
