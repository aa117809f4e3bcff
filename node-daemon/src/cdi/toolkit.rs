//! The driver's libraries, programs and container hooks, as the NVIDIA Container Toolkit lists them.
//!
//! Which files of a driver belong into a container, and which hooks link them, is the toolkit's knowledge and changes
//! with its versions. Kerf asks it: `nvidia-ctk cdi generate` without devices, once per driver version, kept in memory.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize as _;
use tokio::process::Command;
use tokio::sync::Mutex;

use super::spec::{ContainerEdits, Spec};
use crate::config::Config;

/// Where installers put `nvidia-ctk`, below the host's root: packages, and the GPU Operator's toolkit container.
const PLACES: [&str; 3] =
    ["usr/bin/nvidia-ctk", "usr/local/bin/nvidia-ctk", "usr/local/nvidia/toolkit/nvidia-ctk"];

/// A tenth of a second is usual; a driver that answers NVML slowly takes longer.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Why the toolkit gave no list. (That it is not installed is no error.)
#[derive(Debug, thiserror::Error)]
pub enum ToolkitError {
    #[error("cannot run {program}: {source}")]
    Run { program: PathBuf, source: std::io::Error },
    #[error("'{program} cdi generate' gave no answer within {} s", TIME_LIMIT.as_secs())]
    Timeout { program: PathBuf },
    #[error("'{program} cdi generate' failed: {message}")]
    Failed { program: PathBuf, message: String },
    #[error("'{program} cdi generate --format=json' printed no CDI spec: {source}")]
    Unreadable { program: PathBuf, source: serde_json::Error },
}

/// See the module's text.
#[derive(Debug)]
pub struct Toolkit {
    program: Option<PathBuf>,
    host_root: PathBuf,
    driver_root: PathBuf,
    host_driver_root: PathBuf,
    dev_root: PathBuf,
    /// Driver version and its edits. The lock is held while the toolkit runs: it runs once.
    known: Mutex<Option<(String, Arc<ContainerEdits>)>>,
}

impl Toolkit {
    /// Looks for nothing yet.
    pub fn new(config: &Config) -> Self {
        Self {
            program: config.nvidia_ctk.clone(),
            host_root: config.host_root.clone(),
            driver_root: config.driver_root.clone(),
            host_driver_root: config.host_driver_root.clone(),
            dev_root: config.dev_root().to_owned(),
            known: Mutex::new(None),
        }
    }

    /// What every container needs besides device nodes: mounts, hooks, environment. `None` without the toolkit: images
    /// then have to bring the driver's libraries themselves.
    pub async fn common_edits(
        &self,
        driver_version: &str,
    ) -> Result<Option<Arc<ContainerEdits>>, ToolkitError> {
        let mut known = self.known.lock().await;
        if let Some((version, edits)) = &*known
            && version == driver_version
        {
            return Ok(Some(edits.clone()));
        }
        let Some(program) = self.find() else { return Ok(None) };
        let edits = Arc::new(self.generate(&program).await?);
        tracing::info!(
            driver = driver_version,
            mounts = edits.mounts.len(),
            hooks = edits.hooks.len(),
            program = %program.display(),
            "the container toolkit listed the driver's files"
        );
        *known = Some((driver_version.to_owned(), edits.clone()));
        Ok(Some(edits))
    }

    fn candidates(&self) -> impl Iterator<Item = PathBuf> {
        self.program.clone().into_iter().chain(PLACES.iter().map(|place| self.host_root.join(place)))
    }

    fn find(&self) -> Option<PathBuf> {
        self.candidates().find(|path| path.is_file())
    }

    /// Where the program is looked for, in words.
    pub fn places(&self) -> String {
        let places: Vec<String> = self.candidates().map(|path| path.display().to_string()).collect();
        places.join(", ")
    }

    async fn generate(&self, program: &Path) -> Result<ContainerEdits, ToolkitError> {
        // Without devices: instances come and go while it runs. Toolkits before 1.18 lack that flag.
        match self.run(program, &["--device-id=none"]).await {
            Err(ToolkitError::Failed { message, .. }) if message.contains("device-id") => {
                self.run(program, &[]).await
            }
            result => result,
        }
    }

    async fn run(&self, program: &Path, more: &[&str]) -> Result<ContainerEdits, ToolkitError> {
        let mut command = Command::new(program);
        command
            .args(["cdi", "generate", "--format=json", "--mode=nvml"])
            .arg(flag("--driver-root", &self.driver_root))
            .arg(flag("--dev-root", &self.dev_root))
            .arg(flag("--nvidia-cdi-hook-path", &self.hook_program(program)))
            .arg(format!("--ldconfig-path={}", self.ldconfig()))
            .args(more)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = match tokio::time::timeout(TIME_LIMIT, command.output()).await {
            Err(_) => return Err(ToolkitError::Timeout { program: program.to_owned() }),
            Ok(Err(source)) => return Err(ToolkitError::Run { program: program.to_owned(), source }),
            Ok(Ok(output)) => output,
        };
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let last = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no message");
            let message = format!("{}: {last}", output.status);
            return Err(ToolkitError::Failed { program: program.to_owned(), message });
        }
        let edits = common_edits_of(&output.stdout)
            .map_err(|source| ToolkitError::Unreadable { program: program.to_owned(), source })?;
        Ok(self.as_the_host_sees_it(edits))
    }

    /// The program that hooks run, on the host: `nvidia-cdi-hook` beside `nvidia-ctk`, or itself where it still has the
    /// hooks.
    fn hook_program(&self, program: &Path) -> PathBuf {
        let hook = program.with_file_name("nvidia-cdi-hook");
        let program = if hook.is_file() { hook } else { program.to_owned() };
        on_host(&program, &self.host_root, Path::new("/"))
    }

    /// Debian and Ubuntu wrap ldconfig in a script; the real one is beside it.
    fn ldconfig(&self) -> &'static str {
        if self.host_root.join("sbin/ldconfig.real").is_file() {
            "/sbin/ldconfig.real"
        } else {
            "/sbin/ldconfig"
        }
    }

    fn as_the_host_sees_it(&self, mut edits: ContainerEdits) -> ContainerEdits {
        for mount in edits.mounts.iter_mut().filter(|mount| mount.host_path != "/dev/null") {
            mount.host_path = on_host(Path::new(&mount.host_path), &self.driver_root, &self.host_driver_root)
                .to_string_lossy()
                .into_owned();
        }
        edits
    }
}

fn flag(name: &str, path: &Path) -> std::ffi::OsString {
    let mut flag = std::ffi::OsString::from(name);
    flag.push("=");
    flag.push(path);
    flag
}

/// `path` with the leading `seen` replaced by `host`; as it is, if it does not begin so.
fn on_host(path: &Path, seen: &Path, host: &Path) -> PathBuf {
    path.strip_prefix(seen).map_or_else(|_| path.to_owned(), |rest| host.join(rest))
}

/// The edits that are common to all devices, less the device nodes, of what nvidia-ctk printed: one spec, or several in
/// a row, of which the first is the one for all devices.
fn common_edits_of(output: &[u8]) -> Result<ContainerEdits, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(output);
    let spec = Spec::deserialize(&mut deserializer)?;
    Ok(ContainerEdits { device_nodes: Vec::new(), ..spec.container_edits })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use clap::Parser as _;

    use super::*;

    /// Output of nvidia-ctk 1.20.2, shortened.
    const OUTPUT: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu",
        "devices":[{"name":"none","containerEdits":{"env":["NVCT_EMPTY_DEVICE="]}}],
        "containerEdits":{"env":["NVIDIA_CTK_LIBCUDA_DIR=/usr/lib","NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes":[{"path":"/dev/nvidia-modeset","hostPath":"/dev/nvidia-modeset","major":195,"minor":254}],
        "hooks":[{"hookName":"createContainer","path":"/usr/bin/nvidia-cdi-hook","args":["nvidia-cdi-hook","update-ldcache"]}],
        "mounts":[{"hostPath":"/driver/usr/lib/libcuda.so.1","containerPath":"/usr/lib/libcuda.so.1","options":["ro"]},
                  {"hostPath":"/dev/null","containerPath":"/var/run/nvidia-container-devices/void"}]}}"#;

    fn toolkit(host: &Path) -> Toolkit {
        let host_root = format!("--host-root={}", host.display());
        let arguments =
            ["daemon", "--node-name=n", "--driver-root=/driver", "--host-driver-root=/run/nvidia/driver"];
        Toolkit::new(&Config::parse_from(arguments.into_iter().map(str::to_owned).chain([host_root])))
    }

    fn install(host: &Path, script: &str) {
        let program = host.join("usr/bin/nvidia-ctk");
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    }

    #[tokio::test]
    async fn libraries_and_hooks_are_taken_and_named_as_on_the_host() {
        let host = tempfile::tempdir().unwrap();
        let count = host.path().join("count");
        install(host.path(), &format!("echo \"$@\" >> {}\ncat <<'E'\n{OUTPUT}\nE", count.display()));
        let toolkit = toolkit(host.path());
        let edits = toolkit.common_edits("580.1").await.unwrap().unwrap();
        assert!(edits.device_nodes.is_empty(), "device nodes are Kerf's own choice");
        assert_eq!(edits.mounts[0].host_path, "/run/nvidia/driver/usr/lib/libcuda.so.1");
        assert_eq!(edits.mounts[1].host_path, "/dev/null");
        assert_eq!(edits.hooks[0].args, ["nvidia-cdi-hook", "update-ldcache"]);
        toolkit.common_edits("580.1").await.unwrap().unwrap();
        let calls = std::fs::read_to_string(&count).unwrap();
        assert_eq!(calls.lines().count(), 1, "once per driver version");
        assert!(calls.contains("--nvidia-cdi-hook-path=/usr/bin/nvidia-ctk"), "a path of the host: {calls}");
        toolkit.common_edits("590.1").await.unwrap().unwrap();
        assert_eq!(std::fs::read_to_string(&count).unwrap().lines().count(), 2);
    }

    #[tokio::test]
    async fn without_the_toolkit_there_are_no_libraries_but_a_failing_one_is_an_error() {
        let host = tempfile::tempdir().unwrap();
        let toolkit = toolkit(host.path());
        assert_eq!(toolkit.common_edits("580.1").await.unwrap(), None);
        install(host.path(), "echo 'no NVML here' >&2; exit 3");
        let error = toolkit.common_edits("580.1").await.unwrap_err().to_string();
        assert!(error.contains("no NVML here") && error.contains("nvidia-ctk"), "{error}");
        install(host.path(), "echo '{'");
        assert!(matches!(toolkit.common_edits("580.1").await, Err(ToolkitError::Unreadable { .. })));
        // An old toolkit is asked again in its own words.
        install(
            host.path(),
            &format!(
                "case \"$*\" in *--device-id*) echo 'flag provided but not defined: -device-id' >&2; exit 1;; esac\ncat <<'E'\n{OUTPUT}\nE"
            ),
        );
        assert_eq!(toolkit.common_edits("580.1").await.unwrap().unwrap().mounts.len(), 2);
    }
}
