//! The processes of a test cluster that this project writes itself; see `kerf_e2e::helper`.

use std::process::ExitCode;

fn main() -> ExitCode {
    kerf_e2e::helper::main()
}
