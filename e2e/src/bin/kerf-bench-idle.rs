//! What `kerf-bench-path` compares the node daemon's memory with: a process of the same runtime that initialises NVML, and
//! nothing else.

use anyhow::{Context as _, Result};
use nvml_wrapper::Nvml;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let library = std::env::args_os().nth(1).context("the path of libnvidia-ml.so.1 is missing")?;
    let _nvml = Nvml::builder().lib_path(&library).init().context("failed to initialise NVML")?;
    std::future::pending().await
}
