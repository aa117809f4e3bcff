//! The test cluster itself, on which all other tests stand.

mod guard;
mod harness;
