//! From policies to what each node is told, and back to what policies say of themselves.
//!
//! What a node is told ([`desired`]) goes into the one write per node and cycle that the scheduler makes
//! (`GpuNode.spec` has one writer). Status and DeviceClasses are written by [`write`] when they differ. Pods that stand
//! in the way on the hardware, and may be restarted, are evicted by [`clients`].

pub mod classes;
pub mod clients;
pub mod desired;
pub mod matching;
pub mod status;
pub mod write;
