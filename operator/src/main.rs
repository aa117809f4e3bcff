//! The operator's process; see the library for what it does.
#![forbid(unsafe_code)]

use clap::Parser;
use kerf_operator::config::Config;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    kerf_operator::run::run(Config::parse()).await
}
