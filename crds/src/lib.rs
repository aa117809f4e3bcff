//! Kerf's Kubernetes API: the types that people and Kerf's own parts exchange through the API server.
//!
//! ```text
//!  administrator ──▶ PartitionPolicy.spec ──▶ operator ──▶ GpuNode.spec ──▶ node daemon ──▶ hardware
//!  people        ◀── PartitionPolicy.status ◀─ operator ◀── GpuNode.status ◀─ node daemon ◀─┘
//! ```
//!
//! Nothing here decides anything: only shapes, names, validation and conversion. The YAML of the
//! CustomResourceDefinitions in `deploy/crds/` is generated from these types (`cargo xtask generate`).
#![forbid(unsafe_code)]

pub mod conditions;
pub mod definitions;
pub mod device;
pub mod gang;
pub mod gpu_node;
pub mod names;
pub mod partition_policy;
pub mod pattern;
pub mod profile;
pub mod quantity;
pub mod requests;

pub use gpu_node::{GpuNode, GpuNodeSpec, GpuNodeStatus};
pub use partition_policy::{PartitionPolicy, PartitionPolicySpec, PartitionPolicyStatus};
