//! Kerf with its parts killed, away and in error. Each test has a cluster of its own.

mod away;
mod clients;
mod crash;
mod deployment;
mod errors;
mod moves;
mod scheduling;
