//! What would happen; see the library's module `whatif`.
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use kerf_operator::whatif::Command;

fn main() -> ExitCode {
    let mut text = String::new();
    let outcome = Command::parse().run(&mut text);
    // Nobody reads any further: no reason to fail.
    let _ = std::io::stdout().write_all(text.as_bytes());
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("kerf-whatif: {error:#}");
            ExitCode::from(2)
        }
    }
}
