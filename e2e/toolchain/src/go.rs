//! Programs built from Go modules. Each module of `e2e/toolchain/` pins one project and its dependencies, since the
//! projects' dependency versions clash.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use crate::cache::{entry, non_empty};
use crate::host::find_on_path;

/// How long a build may be silent.
const SIGN_OF_LIFE: Duration = Duration::from_secs(20);

struct Recipe {
    /// Folder of `go.mod` and `go.sum` below `e2e/toolchain/`.
    module: &'static str,
    /// The module in `go.mod` whose version names the result.
    versioned_by: &'static str,
    go_mod: &'static str,
    go_sum: &'static str,
    /// Main packages with the names of their programs.
    packages: &'static [(&'static str, &'static str)],
    tags: &'static str,
    cgo: bool,
    about: &'static str,
}

macro_rules! recipe {
    ($module:literal, $($field:ident: $value:expr),* $(,)?) => {
        Recipe {
            module: $module,
            go_mod: include_str!(concat!("../", $module, "/go.mod")),
            go_sum: include_str!(concat!("../", $module, "/go.sum")),
            $($field: $value),*
        }
    };
}

const RECIPES: &[Recipe] = &[
    recipe!("etcd",
        versioned_by: "go.etcd.io/etcd/server/v3",
        packages: &[("go.etcd.io/etcd/server/v3", "etcd")],
        tags: "",
        cgo: false,
        about: "about half a minute on 2 cores",
    ),
    recipe!("containerd",
        versioned_by: "github.com/containerd/containerd/v2",
        packages: &[
            ("github.com/containerd/containerd/v2/cmd/containerd", "containerd"),
            ("github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", "containerd-shim-runc-v2"),
            ("github.com/containerd/containerd/v2/cmd/ctr", "ctr"),
        ],
        tags: "no_btrfs",
        cgo: false,
        about: "about a minute on 2 cores",
    ),
    recipe!("nvidia-toolkit",
        versioned_by: "github.com/NVIDIA/nvidia-container-toolkit",
        packages: &[
            ("github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk", "nvidia-ctk"),
            ("github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook", "nvidia-cdi-hook"),
        ],
        tags: "",
        // It loads libnvidia-ml.so.1 with dlopen.
        cgo: true,
        about: "about half a minute on 2 cores",
    ),
    recipe!("kubernetes",
        versioned_by: "k8s.io/kubernetes",
        packages: &[
            ("k8s.io/kubernetes/cmd/kube-apiserver", "kube-apiserver"),
            ("k8s.io/kubernetes/cmd/kube-controller-manager", "kube-controller-manager"),
            ("k8s.io/kubernetes/cmd/kube-scheduler", "kube-scheduler"),
            ("k8s.io/kubernetes/cmd/kubelet", "kubelet"),
            ("k8s.io/kubernetes/cmd/kubectl", "kubectl"),
        ],
        tags: "",
        cgo: false,
        about: "6 minutes or more on 2 cores",
    ),
];

/// Plays the nodes of a large cluster: not built before somebody wants one.
const KWOK: Recipe = recipe!("kwok",
    versioned_by: "sigs.k8s.io/kwok",
    packages: &[("sigs.k8s.io/kwok/cmd/kwok", "kwok")],
    tags: "",
    cgo: false,
    about: "about a minute on 2 cores",
);

/// The program kwok.
pub(crate) fn kwok(cache: &Path, progress: &dyn Fn(&str)) -> Result<PathBuf> {
    Ok(build(cache, &KWOK, progress)?.join("kwok"))
}

/// Where each program of the recipes is.
pub(crate) struct Programs(HashMap<&'static str, PathBuf>);

impl Programs {
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf> {
        self.0.get(name).cloned().with_context(|| format!("no recipe builds {name}"))
    }
}

pub(crate) fn ensure(cache: &Path, progress: &dyn Fn(&str)) -> Result<Programs> {
    let assets: Vec<PathBuf> =
        ["KERF_ASSETS", "KUBEBUILDER_ASSETS"].into_iter().filter_map(non_empty).collect();
    let mut programs = HashMap::new();
    for recipe in RECIPES {
        let mut missing = Vec::new();
        for &(package, name) in recipe.packages {
            match ready_made(recipe, name, &assets) {
                Some(path) => drop(programs.insert(name, path)),
                None => missing.push((package, name)),
            }
        }
        if missing.is_empty() {
            continue;
        }
        let dir = build(cache, recipe, progress)?;
        for (_, name) in missing {
            programs.insert(name, dir.join(name));
        }
    }
    Ok(Programs(programs))
}

/// A program in one of the folders of ready-made ones. The folder of the other recipes' programs is mounted or searched
/// as a whole, so those are always built.
fn ready_made(recipe: &Recipe, name: &str, assets: &[PathBuf]) -> Option<PathBuf> {
    let alone = matches!(recipe.module, "etcd" | "kubernetes");
    alone.then(|| assets.iter().map(|dir| dir.join(name)).find(|path| path.is_file())).flatten()
}

/// The recipe's programs in the cache, built if they are not there.
fn build(cache: &Path, recipe: &Recipe, progress: &dyn Fn(&str)) -> Result<PathBuf> {
    let version = recipe.version()?;
    let ldflags = recipe.ldflags(version);
    let digest = Sha256::digest(
        [recipe.go_mod, recipe.go_sum, recipe.tags, &ldflags, &format!("{:?}", recipe.packages)].concat(),
    );
    let name = format!("{}-{version}-{:.8}", recipe.module, format!("{digest:x}"));
    entry(cache, &name, |dir| {
        let go = find_on_path("go").context(
            "the Go tool is not on PATH; install Go 1.26 or newer (https://go.dev/dl), \
             or point KERF_ASSETS at a folder with the programs",
        )?;
        let sources = dir.join("module");
        fs::create_dir(&sources)?;
        fs::write(sources.join("go.mod"), recipe.go_mod)?;
        fs::write(sources.join("go.sum"), recipe.go_sum)?;
        for (done, (package, program)) in recipe.packages.iter().enumerate() {
            let begun = Instant::now();
            let of_all = format!("{program} {version} ({} of {})", done + 1, recipe.packages.len());
            progress(&match done {
                0 => format!("building {of_all}; {} takes {} the first time", recipe.module, recipe.about),
                _ => format!("building {of_all}"),
            });
            let mut command = Command::new(&go);
            command
                .current_dir(&sources)
                .args(["build", "-mod=readonly", "-buildvcs=false", "-trimpath", "-tags", recipe.tags])
                .args(["-ldflags", &ldflags, "-o"])
                .arg(dir.join(program))
                .arg(package)
                .env("CGO_ENABLED", if recipe.cgo { "1" } else { "0" })
                .env("GOFLAGS", "")
                .env("GOWORK", "off");
            let output = run_telling(command, program, progress)?;
            if !output.status.success() {
                bail!("go build {package} failed ({}):\n{}", output.status, tail(&output.stderr));
            }
            progress(&format!("built {program} in {} s", begun.elapsed().as_secs()));
        }
        fs::remove_dir_all(&sources)?;
        Ok(())
    })
}

/// Runs a command that may take minutes, with a sign of life now and then.
fn run_telling(mut command: Command, what: &str, progress: &dyn Fn(&str)) -> Result<Output> {
    let begun = Instant::now();
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || done.send(command.output()));
    loop {
        match outcome.recv_timeout(SIGN_OF_LIFE) {
            Ok(output) => return output.with_context(|| format!("failed to run the build of {what}")),
            Err(RecvTimeoutError::Timeout) => {
                progress(&format!("still building {what}, {} s so far", begun.elapsed().as_secs()));
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the build of {what} was lost"),
        }
    }
}

impl Recipe {
    /// Such as `v1.37.2`, as `go.mod` requires it.
    fn version(&self) -> Result<&'static str> {
        let mut words = self.go_mod.split_whitespace();
        words
            .find(|word| *word == self.versioned_by)
            .and_then(|_| words.next())
            .with_context(|| format!("{}/go.mod does not require {}", self.module, self.versioned_by))
    }

    fn ldflags(&self, version: &str) -> String {
        let mut flags = "-s -w".to_owned();
        if self.module == "kubernetes" {
            // The programs report, and compare, the version that their own build scripts would have set.
            let mut numbers = version.trim_start_matches('v').split('.');
            let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
            for variable in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
                flags += &format!(" -X {variable}.gitVersion={version}");
                flags += &format!(" -X {variable}.gitMajor={major} -X {variable}.gitMinor={minor}");
            }
        }
        flags
    }
}

/// The last lines of a command's output, where the error is.
pub(crate) fn tail(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_made_programs_are_used_one_by_one() {
        let assets = tempfile::tempdir().unwrap();
        fs::write(assets.path().join("kubelet"), "").unwrap();
        fs::write(assets.path().join("ctr"), "").unwrap();
        let of = |module: &str, name: &str| {
            let recipe = RECIPES.iter().find(|recipe| recipe.module == module).unwrap();
            ready_made(recipe, name, &["/nonexistent".into(), assets.path().into()])
        };
        assert_eq!(of("kubernetes", "kubelet"), Some(assets.path().join("kubelet")));
        assert_eq!(of("kubernetes", "kube-apiserver"), None);
        assert_eq!(of("containerd", "ctr"), None);
    }

    #[test]
    fn every_recipe_names_a_version_and_unique_programs() {
        let mut names = Vec::new();
        for recipe in RECIPES.iter().chain([&KWOK]) {
            assert!(recipe.version().unwrap().starts_with('v'), "{}", recipe.module);
            names.extend(recipe.packages.iter().map(|(_, name)| *name));
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
