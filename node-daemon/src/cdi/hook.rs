//! The OCI hook of containers with shares: its program on the host, and where it finds the daemon.
//!
//! Containers name the program by its path and are started again without anybody's leave, so it stays when the daemon
//! goes, and a new version takes its place at once.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::file::write_program_atomically;
use super::spec::Hook;

/// Name of the program, here and beside the daemon's own.
const PROGRAM: &str = "kerf-cdi-hook";

/// Where program and socket are, in one directory, as one process sees it.
#[derive(Clone, Debug)]
pub struct HookPaths(PathBuf);

impl HookPaths {
    /// In `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    pub fn program(&self) -> PathBuf {
        self.0.join("bin").join(PROGRAM)
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("hook.sock")
    }

    /// Puts the program there that lies beside the daemon's own.
    pub fn install(&self) -> io::Result<()> {
        let own = std::env::current_exe()?.with_file_name(PROGRAM);
        self.install_from(&own)
    }

    fn install_from(&self, program: &Path) -> io::Result<()> {
        let content = std::fs::read(program).map_err(|error| {
            io::Error::new(error.kind(), format!("the hook of containers, {}: {error}", program.display()))
        })?;
        let place = self.program();
        let is_it = |file: std::fs::Metadata| file.permissions().mode() & 0o777 == 0o755;
        let there = std::fs::read(&place).is_ok_and(|there| there == content);
        if there && std::fs::metadata(&place).is_ok_and(is_it) {
            return Ok(());
        }
        write_program_atomically(&place, &content)
    }

    /// Has a container's own cgroup limited to its share before its first instruction.
    pub fn limit(&self, claim_uid: &str, device: &str) -> Hook {
        let text = |path: PathBuf| path.to_string_lossy().into_owned();
        let program = text(self.program());
        Hook {
            hook_name: "createRuntime".to_owned(),
            args: vec![program.clone(), text(self.socket()), claim_uid.to_owned(), device.to_owned()],
            path: program,
            env: Vec::new(),
            // Longer than the program takes at most.
            timeout: Some(15),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_put_where_containers_find_it_and_replaced_by_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let paths = HookPaths::new(dir.path().join("state"));
        let own = dir.path().join("own");
        let error = paths.install_from(&own).unwrap_err().to_string();
        assert!(error.contains("own"), "{error}");
        for content in ["one", "two", "two"] {
            std::fs::write(&own, content).unwrap();
            paths.install_from(&own).unwrap();
            assert_eq!(std::fs::read_to_string(paths.program()).unwrap(), content);
            assert_eq!(std::fs::metadata(paths.program()).unwrap().permissions().mode() & 0o777, 0o755);
        }
    }
}
