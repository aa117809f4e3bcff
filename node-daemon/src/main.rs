//! The node daemon's process; see the library for what it does.

use clap::Parser as _;
use kerf_node_daemon::config::{Command, Config};
use kerf_node_daemon::{daemon, probe};
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let config = Config::parse();
    if let Some(Command::Health) = config.command {
        return probe::ask(&config.state_dir);
    }
    let logs = tracing_subscriber::fmt().with_env_filter(EnvFilter::try_new(&config.log)?);
    if config.log_json {
        logs.json().init();
    } else {
        logs.init();
    }
    // One thread serves everything; calls into the driver have threads of their own while they last.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(daemon::run(config));
    // A call into a driver that hangs must not keep the process from ending.
    runtime.shutdown_background();
    result
}
