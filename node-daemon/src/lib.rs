//! Kerf's node daemon: turns `GpuNode.spec` into MIG instances, reports the hardware in `GpuNode.status`, and hands the
//! instances to kubelet. See [`node`] for how its parts hang together.
#![deny(unsafe_code)]

pub mod cdi;
pub mod config;
pub mod inventory;
pub mod node;
pub mod plugin;
pub mod prepared;
pub mod slices;
