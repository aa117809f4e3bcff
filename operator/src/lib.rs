//! Kerf's operator: the only writer of decisions.
//!
//! ```text
//!  API server ──watch──▶ cache ──World──▶ scheduler ─┬─ snapshot ─▶ kerf_planner::plan ─▶ apply ──▶ API server
//!                                                    ├─ placements: join of commit records, claims and pods
//!                                                    └─ controller: policies ─▶ GpuNode.spec, status, DeviceClasses
//!  API server ──admission──▶ webhook (every replica)           leader: who may write
//!  scheduler ──▶ recorder: the last plans                      whatif: the same on a dump, or on a record
//! ```
#![forbid(unsafe_code)]

pub mod cache;
pub mod config;
pub mod controller;
pub mod leader;
#[cfg(test)]
mod nonsense_tests;
pub mod recorder;
pub mod run;
pub mod scheduler;
#[cfg(test)]
mod testing;
pub mod webhook;
pub mod whatif;
