use clap::Parser as _;

fn main() {
    let _config = kerf_node_daemon::config::Config::parse();
}
