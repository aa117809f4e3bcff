//! A real Kubernetes cluster with simulated GPUs on one machine, for Kerf's end-to-end tests and its demo.
//!
//! ```text
//! kerf-toolchain ──programs──▶ cluster ──guard──▶ tests, demo
//!                    images ──▶ (every node's containerd)
//!                   install ──▶ (API server)            wait, audit ◀── what happened
//! ```

pub mod audit;
pub mod cluster;
pub mod draw;
pub mod helper;
pub mod images;
pub mod install;
pub mod kerf;
pub mod proxy;
pub mod scale;
pub mod shared;
pub mod wait;

pub use cluster::{
    Boot, Cluster, ClusterOptions, Component, ControlPlaneOptions, Node, NodeOptions, OnBoot, Program,
};
pub use wait::{Seen, eventually, wait_pod_phase};
