//! Kerf with its parts killed, away and in error, and what needs a cluster that nobody else changes. Each test has one of its own.

mod away;
mod clients;
mod crash;
mod deployment;
mod errors;
mod gangs;
mod hardware;
mod moves;
mod scheduling;
mod servers;
mod shares;
mod whatif;
