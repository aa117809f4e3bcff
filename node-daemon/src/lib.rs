//! Kerf's node daemon: turns `GpuNode.spec` into MIG instances, reports the hardware in `GpuNode.status`, and hands the
//! instances to kubelet. See [`node`] for how its parts hang together.
#![deny(unsafe_code)]

pub mod alone;
pub mod answer;
pub mod api;
pub mod backoff;
pub mod carrier;
pub mod carrying;
pub mod cdi;
pub mod cgroups;
pub mod config;
pub mod daemon;
pub mod events;
pub mod failed;
pub mod foreign;
pub mod hardware;
pub mod health;
pub mod holders;
pub mod inventory;
pub mod keeper;
pub mod metrics;
pub mod modes;
pub mod mps;
pub mod node;
pub mod ours;
pub mod pace;
pub mod plugin;
pub mod prepared;
pub mod probe;
pub mod reconcile;
pub mod shares;
pub mod slices;
pub mod status;
pub mod step;
pub mod supervise;
pub mod tenants;
pub mod worker;
