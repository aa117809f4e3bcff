//! The cgroups of pods, found by kubelet's names for them.

use std::fs;
use std::path::{Path, PathBuf};

/// How deep below the root kubelet's own cgroup may be: a controller's hierarchy with version 1, and `--cgroup-root` of
/// kubelet.
const DEEP: usize = 4;

/// Whether this is kubelet's cgroup of all pods: with the cgroupfs driver, with systemd's, and with systemd's below a
/// `--cgroup-root`, whose name systemd's rules put first.
fn is_of_pods(name: &str) -> bool {
    matches!(name, "kubepods" | "kubepods.slice") || name.ends_with("-kubepods.slice")
}

/// The cgroup below which kubelet puts those of pods.
pub fn pods_parent(root: &Path) -> Option<PathBuf> {
    parents(root).into_iter().next()
}

/// The cgroup of a pod: kubelet makes it before it has the pod's claims prepared.
pub fn of_pod(root: &Path, uid: &str) -> Option<PathBuf> {
    let names = [format!("pod{uid}"), format!("-pod{}.slice", uid.replace('-', "_"))];
    let is_pods = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        *name == *names[0] || name.ends_with(&names[1])
    };
    // Guaranteed pods are there themselves, the others one cgroup deeper.
    parents(root).into_iter().find_map(|parent| {
        let children = folders(&parent);
        let deeper = children.iter().flat_map(|child| folders(child));
        children.iter().cloned().chain(deeper).find(|path| is_pods(path))
    })
}

/// The cgroup of a process at or below another one.
pub fn of_process(top: &Path, pid: u32) -> Option<PathBuf> {
    let has_it = |folder: &PathBuf| {
        let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        processes.lines().any(|line| line.parse() == Ok(pid))
    };
    let mut level = vec![top.to_owned()];
    while !level.is_empty() {
        if let Some(found) = level.iter().find(|folder| has_it(folder)) {
            return Some(found.clone());
        }
        level = level.iter().flat_map(|folder| folders(folder)).collect();
    }
    None
}

/// Nearest first.
fn parents(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut level = vec![root.to_owned()];
    for _ in 0..DEEP {
        let children: Vec<PathBuf> = level.iter().flat_map(|folder| folders(folder)).collect();
        let (pods, others) = children.into_iter().partition(|path: &PathBuf| {
            path.file_name().is_some_and(|name| is_of_pods(&name.to_string_lossy()))
        });
        found.extend::<Vec<_>>(pods);
        level = others;
    }
    found
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_found_by_each_of_kubelets_names() {
        const UID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";
        const SYSTEMD: &str = "kubepods.slice/kubepods-burstable.slice/\
            kubepods-burstable-pod0f8fad5b_d9cb_469f_a165_70867728950e.slice";
        for place in [
            format!("kubepods/burstable/pod{UID}"),
            format!("kubepods/pod{UID}"),
            format!("memory/node-1/kubepods/besteffort/pod{UID}"),
            SYSTEMD.to_owned(),
            "kubepods.slice/kubepods-pod0f8fad5b_d9cb_469f_a165_70867728950e.slice".to_owned(),
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                kubelet-kubepods-burstable-pod0f8fad5b_d9cb_469f_a165_70867728950e.slice"
                .to_owned(),
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod0f8fad5b_d9cb_469f_a165_70867728950e.slice"
                .to_owned(),
        ] {
            let root = tempfile::tempdir().unwrap();
            assert_eq!((of_pod(root.path(), UID), pods_parent(root.path())), (None, None));
            fs::create_dir_all(root.path().join("system.slice/a.service")).unwrap();
            fs::create_dir_all(root.path().join(&place).join("container")).unwrap();
            assert_eq!(of_pod(root.path(), UID), Some(root.path().join(&place)));
            assert_eq!(of_pod(root.path(), "0f8fad5b-d9cb-469f-a165-708677289511"), None);
            let parent = pods_parent(root.path()).unwrap();
            assert!(root.path().join(&place).starts_with(parent), "{place}");
        }
    }
}
