//! From policies to what each node is told, and back to what policies say of themselves.
//!
//! What a node is told ([`desired`]) goes into the one write per node and cycle that the scheduler makes
//! (`GpuNode.spec` has one writer). Status and DeviceClasses are written by [`write`] when they differ.

pub mod classes;
pub mod desired;
pub mod matching;
pub mod status;
pub mod write;
