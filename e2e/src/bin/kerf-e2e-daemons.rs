//! See `kerf_e2e::scale::daemons`.

use clap::Parser as _;
use kerf_e2e::scale::daemons::{Args, run};

// One thread: it is to cost the machine no more than daemons would.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).init();
    run(Args::parse()).await
}
