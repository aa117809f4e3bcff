//! Container images made here: docker-archives of busybox and, where asked, programs of this machine with the shared
//! libraries that they need. Nothing is pulled; pods use `imagePullPolicy: Never`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::json;
use sha2::{Digest as _, Sha256};

/// The sandbox image of every pod.
pub const PAUSE: &str = "e2e.kerf.dev/pause:1";
/// An image with a shell and busybox's usual commands.
pub const BOX: &str = "e2e.kerf.dev/box:1";

/// An image, not yet written.
#[derive(Clone, Debug)]
pub struct Archive {
    reference: String,
    layers: Vec<Vec<u8>>,
    entrypoint: Vec<String>,
    command: Vec<String>,
}

impl Archive {
    pub fn reference(&self) -> &str {
        &self.reference
    }

    /// Writes the docker-archive into a folder, and returns its path. The same image by the same name is the same file.
    pub(crate) fn write(&self, dir: &Path) -> Result<PathBuf> {
        let diff_ids: Vec<String> =
            self.layers.iter().map(|layer| format!("{:x}", Sha256::digest(layer))).collect();
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
                "Env": ["PATH=/usr/local/bin:/bin"],
                "WorkingDir": "/",
            },
            "rootfs": {
                "type": "layers",
                "diff_ids": diff_ids.iter().map(|id| format!("sha256:{id}")).collect::<Vec<_>>(),
            },
        })
        .to_string();
        let config_id = format!("{:x}", Sha256::digest(&config));
        let name = self.reference.replace(['/', ':'], "-");
        let path = dir.join(format!("{name}-{config_id:.16}.tar"));
        if path.is_file() {
            return Ok(path);
        }
        let manifest = json!([{
            "Config": format!("{config_id}.json"),
            "RepoTags": [self.reference],
            "Layers": diff_ids.iter().map(|id| format!("{id}/layer.tar")).collect::<Vec<_>>(),
        }])
        .to_string();
        let partial = path.with_extension("partial");
        let mut archive = tar::Builder::new(File::create(&partial)?);
        append(&mut archive, "manifest.json", manifest.as_bytes(), 0o644)?;
        append(&mut archive, &format!("{config_id}.json"), config.as_bytes(), 0o644)?;
        for (id, layer) in diff_ids.iter().zip(&self.layers) {
            append(&mut archive, &format!("{id}/layer.tar"), layer, 0o644)?;
        }
        archive.into_inner()?.flush()?;
        fs::rename(&partial, &path).with_context(|| format!("failed to rename {}", partial.display()))?;
        Ok(path)
    }
}

/// The images that every node has.
pub(crate) fn base(busybox: &Path, dir: &Path) -> Result<Vec<PathBuf>> {
    let layer = busybox_layer(busybox)?;
    let sleep = vec!["/bin/sleep".to_owned(), "infinity".to_owned()];
    let pause = Archive {
        reference: PAUSE.to_owned(),
        layers: vec![layer.clone()],
        entrypoint: sleep,
        command: Vec::new(),
    };
    let shell = Archive {
        reference: BOX.to_owned(),
        layers: vec![layer],
        entrypoint: Vec::new(),
        command: vec!["/bin/sh".to_owned()],
    };
    Ok(vec![pause.write(dir)?, shell.write(dir)?])
}

/// An image with busybox's commands, and each of `programs` in `/usr/local/bin` with the shared libraries that the
/// loader of this machine finds for it, at their paths here. The first program is the entry point.
///
/// # Errors
/// A program is missing, or one of its libraries is.
pub fn image_from_binaries(busybox: &Path, reference: &str, programs: &[&Path]) -> Result<Archive> {
    let first = programs.first().context("an image of no programs")?;
    let mut files: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for program in programs {
        files.insert(in_image(program)?, program.to_path_buf());
        for library in libraries(program)? {
            files.insert(library.clone(), library);
        }
    }
    let mut layer = tar::Builder::new(Vec::new());
    for (target, source) in &files {
        // The content, not the link: the loader finds libraries by these paths.
        let content = fs::read(source).with_context(|| format!("failed to read {}", source.display()))?;
        let target = target.strip_prefix("/").unwrap_or(target);
        append(&mut layer, &target.display().to_string(), &content, 0o755)?;
    }
    Ok(Archive {
        reference: reference.to_owned(),
        layers: vec![busybox_layer(busybox)?, layer.into_inner()?],
        entrypoint: vec![in_image(first)?.display().to_string()],
        command: Vec::new(),
    })
}

fn in_image(program: &Path) -> Result<PathBuf> {
    let name = program.file_name().with_context(|| format!("{} names no file", program.display()))?;
    Ok(Path::new("/usr/local/bin").join(name))
}

/// The shared libraries of a program and its loader, as `ldd` prints them.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("failed to run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        if format!("{text}{error}").contains("not a dynamic executable") {
            return Ok(Vec::new());
        }
        bail!("ldd {} failed ({}): {text}{error}", program.display(), output.status);
    }
    parse_ldd(&text).with_context(|| format!("the libraries of {}", program.display()))
}

fn parse_ldd(text: &str) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for line in text.lines() {
        if line.contains("not found") {
            bail!("{}", line.trim());
        }
        // `libc.so.6 => /lib/… (0x…)`, or `/lib64/ld-linux-x86-64.so.2 (0x…)`; the kernel's own has no path.
        let path = line.rsplit_once("=>").map_or(line, |(_, path)| path);
        if let Some(path) = path.split_whitespace().next().filter(|path| path.starts_with('/')) {
            paths.push(PathBuf::from(path));
        }
    }
    Ok(paths)
}

fn busybox_layer(busybox: &Path) -> Result<Vec<u8>> {
    let program = fs::read(busybox).with_context(|| format!("failed to read {}", busybox.display()))?;
    let output =
        Command::new(busybox).arg("--list").output().context("failed to ask busybox for its commands")?;
    let mut layer = tar::Builder::new(Vec::new());
    for (dir, mode) in
        [("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("usr/local/bin", 0o755)]
    {
        let mut header = header(0, mode);
        header.set_entry_type(tar::EntryType::Directory);
        layer.append_data(&mut header, dir, std::io::empty())?;
    }
    append(&mut layer, "bin/busybox", &program, 0o755)?;
    append(&mut layer, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n", 0o644)?;
    append(&mut layer, "etc/group", b"root:x:0:\n", 0o644)?;
    for name in String::from_utf8_lossy(&output.stdout).lines().filter(|name| *name != "busybox") {
        let mut header = header(0, 0o777);
        header.set_entry_type(tar::EntryType::Symlink);
        layer.append_link(&mut header, format!("bin/{name}"), "busybox")?;
    }
    Ok(layer.into_inner()?)
}

fn append<W: std::io::Write>(
    archive: &mut tar::Builder<W>,
    path: &str,
    content: &[u8],
    mode: u32,
) -> Result<()> {
    archive
        .append_data(&mut header(content.len() as u64, mode), path, content)
        .with_context(|| format!("failed to add {path} to an image"))
}

/// With no time in it: the same content is the same layer.
fn header(size: u64, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(mode);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_output_is_understood() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            parse_ldd(text).unwrap(),
            [Path::new("/lib/x86_64-linux-gnu/libgcc_s.so.1"), Path::new("/lib64/ld-linux-x86-64.so.2"),]
        );
        assert!(
            parse_ldd("\tlibmissing.so.1 => not found\n").unwrap_err().to_string().contains("libmissing")
        );
    }
}
