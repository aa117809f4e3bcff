//! Condition types and reasons, as constants: tests, documentation and the code that writes them share one spelling.

/// Types of conditions on a `PartitionPolicy`.
pub mod policy {
    /// True when every matched GPU is as the policy says.
    pub const READY: &str = "Ready";
    /// True when another policy claims one of the matched GPUs.
    pub const CONFLICT: &str = "Conflict";
}

/// Reasons on a `PartitionPolicy`'s conditions.
pub mod policy_reason {
    pub const APPLIED: &str = "Applied";
    pub const RESHAPING: &str = "Reshaping";
    pub const NO_GPU_MATCHED: &str = "NoGpuMatched";
    pub const PROFILE_NOT_FOUND: &str = "ProfileNotFound";
    pub const LAYOUT_IMPOSSIBLE: &str = "LayoutImpossible";
    pub const GPU_UNMANAGED: &str = "GpuUnmanaged";
    pub const BLOCKED: &str = "Blocked";
    pub const SHARED_GPU: &str = "SharedGpu";
    pub const NO_CONFLICT: &str = "NoConflict";
}

/// Types of conditions on a `GpuNode`.
pub mod node {
    /// True when the daemon reads the hardware and follows `spec`, and kubelet has registered its plugin: a pod that is
    /// bound before that waits for more than a minute.
    pub const READY: &str = "Ready";
    /// True while a step on the hardware fails; the message names call, GPU and error.
    pub const DEGRADED: &str = "Degraded";
    /// True when the NVIDIA Container Toolkit tells which of the driver's files belong into containers. Without it only
    /// images that bring the driver's libraries themselves work.
    pub const CONTAINER_TOOLKIT: &str = "ContainerToolkit";
    /// Of the job that verifies shares on the hardware, not the daemon's: True when every limit that it could try holds.
    pub const SHARES_VERIFIED: &str = "SharesVerified";
}

/// Reasons on a `GpuNode`'s conditions.
pub mod node_reason {
    pub const FOLLOWING: &str = "Following";
    pub const DRIVER_UNAVAILABLE: &str = "DriverUnavailable";
    pub const STEP_FAILED: &str = "StepFailed";
    pub const GPU_LOST: &str = "GpuLost";
    pub const HEALTHY: &str = "Healthy";
    pub const NOT_REGISTERED: &str = "PluginNotRegistered";
    pub const TOOLKIT_FOUND: &str = "Found";
    pub const TOOLKIT_NOT_FOUND: &str = "NotFound";
    pub const TOOLKIT_FAILED: &str = "Failed";
    pub const VERIFIED: &str = "Verified";
    pub const NOT_ENFORCED: &str = "NotEnforced";
    pub const NOT_TRIED: &str = "NotTried";
}

/// Why a GPU is not Kerf's to manage: `status.gpus[].unmanaged.reason`.
pub mod unmanaged_reason {
    pub const FOREIGN_DEVICE_PLUGIN: &str = "ForeignDevicePlugin";
    pub const FOREIGN_DRA_DRIVER: &str = "ForeignDraDriver";
    pub const MIG_MANAGER: &str = "MigManager";
    pub const UNSAFE_TOOLKIT: &str = "UnsafeToolkitSetting";
    pub const FOREIGN_INSTANCE: &str = "ForeignInstance";
    pub const MODE_SWITCH_NOT_ALLOWED: &str = "ModeSwitchNotAllowed";
}

/// Why a GPU is not as `spec` wants it, where no call failed: `status.gpus[].problem.reason`. Where one failed, the
/// reason is NVML's error name (`IN_USE`, `INSUFFICIENT_RESOURCES`, …).
pub mod problem_reason {
    /// A claim or a process still uses what stands in the way.
    pub const IN_USE: &str = "InUse";
    /// Wanted partitions cannot exist together.
    pub const OVERLAP: &str = "Overlap";
    /// The GPU has no such profile.
    pub const PROFILE_NOT_FOUND: &str = "ProfileNotFound";
    /// The profile cannot be placed there.
    pub const PLACEMENT_IMPOSSIBLE: &str = "PlacementImpossible";
    /// The GPU's engines are with instances that must stay.
    pub const ENGINES_TAKEN: &str = "EnginesTaken";
    /// MIG instances are wanted, and MIG mode is off and not to be switched on.
    pub const MIG_OFF: &str = "MigOff";
    /// Partitions are wanted on a GPU that no policy manages.
    pub const GPU_NOT_LISTED: &str = "GpuNotListed";
    /// The daemon's checkpoint cannot be written.
    pub const CHECKPOINT_FAILED: &str = "CheckpointFailed";
    /// A call into the driver has not come back.
    pub const CALL_HANGS: &str = "CallHangs";
    /// Shares are wanted of a GPU in MIG mode.
    pub const MIG_ON: &str = "MigOn";
    /// The GPU, or its instance, cannot carry shares here.
    pub const SHARING_UNAVAILABLE: &str = "SharingUnavailable";
    /// The share's id or one of its sizes can be none.
    pub const BAD_SHARE: &str = "BadShare";
    /// Nobody here enforces the share's limit on memory as it wants it enforced.
    pub const ISOLATION_UNAVAILABLE: &str = "IsolationUnavailable";
    /// The server that carries shares of another size cannot carry this one.
    pub const SIZES_DIFFER: &str = "SizesDiffer";
    /// The MPS server is not there yet, or not well.
    pub const MPS_NOT_READY: &str = "MpsNotReady";
    /// The MPS server or its control daemon gives no answer; its pod is replaced.
    pub const MPS_HANGS: &str = "MpsHangs";
    /// MPS does not say that the share's limits are in force.
    pub const LIMITS_NOT_IN_FORCE: &str = "LimitsNotInForce";
    /// The pod of an MPS server cannot be made or deleted.
    pub const POD_FAILED: &str = "PodFailed";
}

/// Kerf's condition on the pods that it handles.
pub mod pod {
    /// Type of the condition: True once the pod's partitions exist and its claim is allocated, unless the node cannot
    /// take the pod any more before it is bound.
    pub const PLANNED: &str = "kerf.dev/Planned";
}

/// Reasons of [`pod::PLANNED`]; events on the pod carry the same.
pub mod pod_reason {
    /// The allocation is written; kube-scheduler binds.
    pub const ALLOCATED: &str = "Allocated";
    /// A place is chosen and committed; the node is making the instances.
    pub const RESHAPING: &str = "Reshaping";
    /// No GPU of the cluster has the profile.
    pub const NO_SUCH_PROFILE: &str = "NoSuchProfile";
    /// Nothing fits now.
    pub const NO_ROOM: &str = "NoRoom";
    /// Other pods are being moved to make room.
    pub const MAKING_ROOM: &str = "MakingRoom";
    /// GPUs would fit, or are the pod's already, but their nodes do not (CPU, memory, taints, affinity).
    pub const NODES_DO_NOT_FIT: &str = "NodesDoNotFit";
    /// A ResourceQuota refused the claim; the message is the API server's.
    pub const QUOTA: &str = "QuotaExceeded";
    /// The claim cannot be served as written; the message says what would be right.
    pub const BAD_CLAIM: &str = "BadClaim";
    /// A claim that it shares is allocated for another pod first.
    pub const WAITS_FOR_CLAIM: &str = "WaitsForClaim";
    /// Too few pods of its gang are there, have a place or are ready.
    pub const WAITS_FOR_GANG: &str = "WaitsForGang";
    /// Its gang cannot be read, or the gang's pods disagree; the message says what would be right.
    pub const BAD_GANG: &str = "BadGang";
    /// Other scheduling gates are still on the pod.
    pub const OTHER_GATES: &str = "OtherGates";
    /// A step on the hardware or the API failed and is being retried.
    pub const RETRYING: &str = "Retrying";
}
