//! Compiles the kubelet's gRPC interfaces in `proto/`. protox stands in for `protoc`, so a build needs no tool
//! besides Rust's.

const PROTOS: [&str; 3] = ["pluginregistration.proto", "dra.proto", "dra_health.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    // Servers for the daemon, clients for its tests.
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
