//! A Python with NVIDIA's own NVML bindings: a client of the simulated library that this project did not write.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cache::entry;
use crate::go::tail;
use crate::host::{find_on_path, install};

/// PyPI `nvidia-ml-py`.
const NVIDIA_ML_PY: &str = "13.615.71";

pub(crate) fn ensure(cache: &Path, progress: &dyn Fn(&str)) -> Result<PathBuf> {
    let entry = entry(cache, &format!("python-nvidia-ml-py-{NVIDIA_ML_PY}"), |dir| {
        if !has_pip() {
            install(&["python3-pip"], progress)?;
        }
        let python = find_on_path("python3").context("the package python3-pip brought no python3")?;
        progress(&format!("installing nvidia-ml-py {NVIDIA_ML_PY} from PyPI"));
        let site = dir.join("site");
        // Not a venv, which would hold its own path and break when the finished entry is renamed.
        run(Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"])
            .arg(&site)
            .arg(format!("nvidia-ml-py=={NVIDIA_ML_PY}")))?;
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
