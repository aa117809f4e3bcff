//! A cluster's cgroups: one tree of its own in every hierarchy, below it one per node, below that kubelet's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// How long the kernel may take to let go of cgroups whose processes are dead.
const LIMIT: Duration = Duration::from_secs(20);

/// A mounted cgroup hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CgroupMount {
    pub(crate) at: PathBuf,
    pub(crate) version: u8,
}

/// The hierarchies of this machine.
pub(crate) fn mounts() -> Result<Vec<CgroupMount>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("failed to read the mounts")?;
    Ok(parse(&text))
}

fn parse(mountinfo: &str) -> Vec<CgroupMount> {
    let mut mounts = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let version = match right.split(' ').next() {
            Some("cgroup") => 1,
            Some("cgroup2") => 2,
            _ => continue,
        };
        if let Some(at) = left.split(' ').nth(4).map(PathBuf::from)
            && !mounts.iter().any(|mount: &CgroupMount| mount.at == at)
        {
            mounts.push(CgroupMount { at, version });
        }
    }
    mounts
}

/// Makes the cgroup `path` (relative, such as `kerf-abc/node-a`) with its parents where kubelet needs it: in every
/// version 1 hierarchy, or in the unified one of a machine that has no other.
pub(crate) fn create(path: &Path) -> Result<()> {
    let mounts = mounts()?;
    let version = if mounts.iter().any(|mount| mount.version == 1) { 1 } else { 2 };
    for mount in mounts.iter().filter(|mount| mount.version == version) {
        let mut dir = mount.at.clone();
        for part in path.components() {
            let parent = dir.clone();
            if version == 2 {
                delegate(&parent)?;
            }
            dir.push(part);
            if let Err(error) = fs::create_dir(&dir)
                && error.kind() != io::ErrorKind::AlreadyExists
            {
                return Err(error).with_context(|| format!("failed to create the cgroup {}", dir.display()));
            }
            // A new cpuset is empty, and takes no process before it is filled.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if version == 1 && dir.join(file).exists() {
                    let value = fs::read_to_string(parent.join(file))?;
                    fs::write(dir.join(file), value.trim())
                        .with_context(|| format!("failed to fill {}", dir.join(file).display()))?;
                }
            }
        }
    }
    Ok(())
}

/// Lets the children of a version 2 cgroup use all its controllers.
fn delegate(dir: &Path) -> Result<()> {
    let controllers = fs::read_to_string(dir.join("cgroup.controllers"))
        .with_context(|| format!("failed to read the controllers of {}", dir.display()))?;
    for controller in controllers.split_whitespace() {
        fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"))
            .with_context(|| format!("failed to enable {controller} below {}", dir.display()))?;
    }
    Ok(())
}

/// Lets every process below `path` run, so that one that a dying runtime left frozen can be killed.
pub(crate) fn thaw(path: &Path) {
    for mount in mounts().unwrap_or_default() {
        visit(&mount.at.join(path), &mut |dir| {
            // Only one of the two exists, where either does; a cgroup that has just gone needs nothing.
            for (file, value) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
                let file = dir.join(file);
                if file.exists() {
                    let _ = fs::write(file, value);
                }
            }
        });
    }
}

/// Removes the cgroup `path` and all below it from every hierarchy. Their processes must be dead or dying.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let begun = Instant::now();
    loop {
        let mut left = None;
        for mount in mounts()? {
            let dir = mount.at.join(path);
            visit(&dir, &mut |dir| drop(fs::remove_dir(dir)));
            if dir.exists() {
                left = Some(dir);
            }
        }
        let Some(dir) = left else { return Ok(()) };
        if begun.elapsed() > LIMIT {
            bail!("the cgroup {} is still in use after {} s", dir.display(), LIMIT.as_secs());
        }
        sleep(Duration::from_millis(20));
    }
}

/// Calls `act` for every folder at and below `dir`, the deepest first.
fn visit(dir: &Path, act: &mut impl FnMut(&Path)) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            visit(&entry.path(), act);
        }
    }
    act(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_in_mountinfo() {
        let text = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            30 28 0:27 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu\n\
            39 28 0:36 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(
            parse(text),
            [
                CgroupMount { at: "/sys/fs/cgroup/cpu".into(), version: 1 },
                CgroupMount { at: "/sys/fs/cgroup/unified".into(), version: 2 },
            ]
        );
    }
}
