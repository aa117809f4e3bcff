//! Shared by the tests of this folder: a node in a folder of its own, and the programs of others.

#![allow(dead_code, reason = "each test uses a part")]

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use kerf_sim::{GpuSpec, NodeSpec, SimNode};
use tempfile::TempDir;

/// A node that ends with the test.
pub struct TestNode {
    pub node: SimNode,
    _folder: TempDir,
}

impl TestNode {
    pub fn new(gpus: Vec<GpuSpec>) -> TestNode {
        TestNode::of(NodeSpec::new("test", gpus))
    }

    pub fn of(spec: NodeSpec) -> TestNode {
        let folder = tempfile::Builder::new().prefix("kerf-sim").tempdir().unwrap();
        // Other users must be able to come in, to be refused by the driver and not by the folder.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let node = SimNode::create(&folder.path().join("root"), &spec)
            .unwrap_or_else(|error| panic!("failed to make a simulated node (as root?): {error}"));
        // No namespace has this number: containers that happen to run on this machine are not ours.
        node.set_pid_namespace(Some(0)).unwrap();
        TestNode { node, _folder: folder }
    }

    pub fn root(&self) -> &Path {
        self.node.root()
    }
}

/// A program that the test cluster's toolchain has built or installed: `<cache>/toolchain/<entry>-…/<program>`.
/// Its absence is a failure, not a reason to skip.
pub fn toolchain(entry: &str, program: &str) -> PathBuf {
    let folder = kerf_toolchain::cache_dir().unwrap().join("toolchain");
    let mut found: Vec<PathBuf> = std::fs::read_dir(&folder)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter(|item| item.file_name().to_string_lossy().starts_with(&format!("{entry}-")))
        .map(|item| item.path().join(program))
        .filter(|path| path.is_file())
        .collect();
    found.sort();
    found.pop().unwrap_or_else(|| {
        panic!(
            "no {entry}-*/{program} in {}; `cargo xtask test` builds and installs what tests need",
            folder.display()
        )
    })
}
