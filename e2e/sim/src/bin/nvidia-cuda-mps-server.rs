//! The simulated `nvidia-cuda-mps-server`; see [`kerf_sim::mps::server`].

fn main() -> std::process::ExitCode {
    kerf_sim::mps::server::main()
}
