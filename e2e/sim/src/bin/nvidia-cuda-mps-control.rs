//! The simulated `nvidia-cuda-mps-control`; see [`kerf_sim::mps::control`].

fn main() -> std::process::ExitCode {
    kerf_sim::mps::control::main()
}
