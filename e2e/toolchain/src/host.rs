//! Programs that come from the host's own packages: used where they are, installed from Debian where they are not.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::go::tail;

pub(crate) struct HostTools {
    pub(crate) runc: PathBuf,
    pub(crate) cni_dir: PathBuf,
    pub(crate) busybox: PathBuf,
}

const CNI_PLUGINS: [&str; 3] = ["ptp", "host-local", "loopback"];

pub(crate) fn ensure(progress: &dyn Fn(&str)) -> Result<HostTools> {
    let missing: Vec<&str> = [
        ("runc", find_runc().is_none()),
        ("containernetworking-plugins", find_cni().is_none()),
        ("busybox-static", find_busybox().is_none()),
    ]
    .into_iter()
    .filter_map(|(package, missing)| missing.then_some(package))
    .collect();
    if !missing.is_empty() {
        install(&missing, progress)?;
    }
    Ok(HostTools {
        runc: find_runc().context("the package runc brought no runc")?,
        cni_dir: find_cni()
            .context("the package containernetworking-plugins brought no ptp, host-local, loopback")?,
        busybox: find_busybox().context("the package busybox-static brought no statically linked busybox")?,
    })
}

/// Installs Debian packages.
pub(crate) fn install(packages: &[&str], progress: &dyn Fn(&str)) -> Result<()> {
    let names = packages.join(" ");
    let apt = find_on_path("apt-get").with_context(|| {
        format!("not found on this machine: {names} (Debian's names); install them with its package manager")
    })?;
    progress(&format!("installing {names} with apt-get"));
    let installed = || {
        Command::new(&apt)
            .args(["install", "-y", "--no-install-recommends"])
            .args(packages)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .output()
            .context("failed to run apt-get install")
    };
    if installed()?.status.success() {
        return Ok(());
    }
    // A machine that was just made has no package lists.
    let update = Command::new(&apt).arg("update").output().context("failed to run apt-get update")?;
    if !update.status.success() {
        bail!("apt-get update failed ({}):\n{}", update.status, tail(&update.stderr));
    }
    let output = installed()?;
    if !output.status.success() {
        bail!("apt-get install {names} failed ({}; it needs root):\n{}", output.status, tail(&output.stderr));
    }
    Ok(())
}

/// The first file of that name in `PATH`, or in the system's usual folders where a user's `PATH` leaves them out.
pub(crate) fn find_on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/go/bin"].map(PathBuf::from))
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

fn find_runc() -> Option<PathBuf> {
    find_on_path("runc")
}

fn find_cni() -> Option<PathBuf> {
    ["/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"]
        .into_iter()
        .map(Path::new)
        .find(|dir| CNI_PLUGINS.iter().all(|plugin| dir.join(plugin).is_file()))
        .map(Path::to_owned)
}

/// A busybox that needs no library, since it is the base of images.
fn find_busybox() -> Option<PathBuf> {
    let busybox = find_on_path("busybox")?;
    let program = std::fs::read(&busybox).ok()?;
    // A dynamically linked program names its loader.
    let dynamic = program.windows(9).any(|window| window == b"/ld-linux" || window == b"/ld-musl-");
    (!dynamic).then_some(busybox)
}
