//! Errors of the simulation itself; what NVML answers is [`crate::NvmlError`].

use std::path::{Path, PathBuf};

/// Why a simulated node could not be made, read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to {verb} {}: {source}", path.display())]
    Io { verb: &'static str, path: PathBuf, source: std::io::Error },
    #[error("failed to read {what}: {source}")]
    Json { what: String, source: serde_json::Error },
    #[error("there is no GPU model {name:?}; known are {known}, or give the path of a model file")]
    UnknownModel { name: String, known: String },
    #[error("GPU model {name} makes no sense: {reason}")]
    BadModel { name: String, reason: String },
    #[error("{} is no simulated node (no {}); make one with `kerf-sim create`", root.display(), crate::STATE_FILE)]
    NoNode { root: PathBuf },
    #[error("{} is a simulated node already; remove it first", root.display())]
    Exists { root: PathBuf },
    #[error("the node has no GPU {index}: it has {count}, counted from 0")]
    NoGpu { index: usize, count: usize },
    #[error("GPU {gpu} has no GPU instance {id}")]
    NoInstance { gpu: usize, id: u32 },
    #[error("board {index} is to have its halves swapped, but no board of model {model} is known to")]
    NotSwappable { index: usize, model: String },
    #[error("a node has 1 to {max} GPUs, not {count}")]
    GpuCount { count: usize, max: u32 },
    #[error("device nodes can be made by root only (mknod {}: {source})", path.display())]
    Mknod { path: PathBuf, source: std::io::Error },
    #[error(
        "the simulated libnvidia-ml.so.1 is not built: none of {tried} exists; build it with `cargo build -p kerf-sim-nvml`, or name it in KERF_SIM_NVML"
    )]
    NoLibrary { tried: String },
    #[error("the simulated driver refused: {0}")]
    Nvml(#[from] crate::NvmlError),
}

impl Error {
    pub(crate) fn io(verb: &'static str, path: &Path, source: std::io::Error) -> Error {
        Error::Io { verb, path: path.to_owned(), source }
    }
}

impl From<Error> for crate::NvmlError {
    /// What an NVML caller is told when the simulation itself fails.
    fn from(error: Error) -> crate::NvmlError {
        use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        match error {
            Error::Nvml(error) => error,
            Error::Io { source, .. } | Error::Mknod { source, .. }
                if matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem) =>
            {
                crate::NvmlError::NoPermission
            }
            _ => crate::NvmlError::Unknown,
        }
    }
}
