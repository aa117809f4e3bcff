//! Every name that Kerf puts into other people's objects, in one place.

/// API group of Kerf's own resources.
pub const GROUP: &str = "kerf.dev";

/// DRA driver name: the `driver` of ResourceSlices and allocation results.
pub const DRIVER: &str = "gpu.kerf.dev";

/// Taint on every Kerf device (`NoSchedule`): kube-scheduler's first-fit allocator must never pick one by itself.
pub const PLANNED_TAINT: &str = "kerf.dev/planned";

/// Taint on a device whose hardware failed. The effect comes from the policy.
pub const UNHEALTHY_TAINT: &str = "kerf.dev/unhealthy";

/// Scheduling gate that the webhook adds and the operator removes once the pod's allocation is written.
pub const GATE: &str = "kerf.dev/plan";

/// Pod annotation with the extended resources that the pod asked for before the webhook replaced them:
/// JSON, see [`crate::requests::OriginalResources`].
pub const ORIGINAL_RESOURCES: &str = "kerf.dev/original-resources";

/// `spec.resourceClaims[].name` of the claim that the webhook adds to a pod.
pub const POD_CLAIM: &str = "kerf";

/// Label on namespaces whose pods Kerf handles: `kerf.dev/managed: "true"`.
pub const NAMESPACE_OPT_IN: &str = "kerf.dev/managed";

/// Label on a pod that wants none of it: `kerf.dev/ignore: "true"`.
pub const POD_OPT_OUT: &str = "kerf.dev/ignore";

/// Annotation on a pod that may be moved to make room for others: `kerf.dev/movable: "true"`. It is evicted, and what its
/// controller makes in its place is given another partition.
pub const MOVABLE: &str = "kerf.dev/movable";

/// Annotation with the name of the gang that a pod is of, unique in its namespace: see [`crate::gang`].
pub const GANG: &str = "kerf.dev/gang";

/// Annotation that says how many of the gang's pods must run together.
pub const GANG_SIZE: &str = "kerf.dev/gang-size";

/// Annotation by which Kubernetes' controllers tell which of their pods to spare; also the price of a move.
pub const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Finalizer that Kubernetes expects on an allocated claim.
pub const CLAIM_FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Prefix of the extended resources that stand for MIG profiles (`nvidia.com/mig-1g.10gb`).
pub const MIG_RESOURCE_PREFIX: &str = "nvidia.com/mig-";

/// Extended resource that stands for a whole GPU.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// DeviceClass of whole GPUs.
pub const GPU_CLASS: &str = "gpu.kerf.dev";

/// DeviceClass of every MIG instance, whatever its profile.
pub const MIG_CLASS: &str = "mig.kerf.dev";

/// DeviceClass of shares.
pub const SHARE_CLASS: &str = "share.kerf.dev";

/// In a container's limits: memory of a share, as a quantity of bytes (`12Gi`).
pub const SHARE_MEMORY: &str = "kerf.dev/gpu-memory";

/// In a container's limits: compute of a share, in percent of a GPU's multiprocessors.
pub const SHARE_COMPUTE: &str = "kerf.dev/gpu-compute";

/// In a container's limits: on how many GPUs it is to have such a share. More than one is refused: a process finds one MPS
/// server only, and each GPU has its own.
pub const SHARE_GPUS: &str = "kerf.dev/gpus";

/// Annotation with the weakest isolation that a pod accepts for its shares: `driver` or `process`. Left out: what the
/// policy of the GPU accepts.
pub const ISOLATION: &str = "kerf.dev/isolation";

/// Server-side apply owner and event reporter names.
pub const OPERATOR: &str = "kerf-operator";
/// See [`OPERATOR`].
pub const NODE_DAEMON: &str = "kerf-node-daemon";
/// See [`OPERATOR`]: the job that verifies shares.
pub const HARDWARE: &str = "kerf-hardware";

/// PodTemplate in Kerf's namespace that the pods of MPS servers are made from.
pub const MPS_SERVER: &str = "mps-server";

/// Annotation on the pod of an MPS server: UUID of its GPU.
pub const MPS_GPU: &str = "kerf.dev/gpu";

/// Annotation on the pod of an MPS server: place of its MIG instance, as `start:size` in memory slices; left out where it
/// serves a GPU that is not cut.
pub const MPS_PLACEMENT: &str = "kerf.dev/mps-placement";

/// Annotation on the pod of an MPS server: UUID of what it serves, `GPU-…` or `MIG-…`.
pub const MPS_DEVICE: &str = "kerf.dev/mps-device";

/// Annotation on the pod of an MPS server: what it was made for and cannot be changed in.
pub const MPS_FORM: &str = "kerf.dev/mps-form";

/// DeviceClass of one profile, e.g. `mig-1g.10gb.me.kerf.dev` for `1g.10gb+me`.
pub fn profile_class(profile: &str) -> String {
    format!("mig-{}.kerf.dev", crate::profile::resource_suffix(profile))
}

/// Name of a MIG instance as a DRA device: `<GPU name>-mig-<profile id>-<start>`. The profile's NVML id stands in
/// for its name, since `+me` and `-me` would both become `-me` in a DNS label.
pub fn instance_device(gpu_name: &str, profile_id: u32, start: u32) -> String {
    format!("{gpu_name}-mig-{profile_id}-{start}")
}

/// Name of the DRA device that the shares of a GPU, or of a MIG instance on it, are parts of.
pub fn share_device(carrier: &str) -> String {
    format!("{carrier}-share")
}

/// Name of a whole GPU as a DRA device is the GPU's name in `GpuNode.status`, itself made from the UUID: the first
/// eight hex digits, or all of it where two GPUs of a node share them.
pub fn gpu_name(uuid: &str, digits: usize) -> String {
    let hex: String =
        uuid.trim_start_matches("GPU-").chars().filter(char::is_ascii_alphanumeric).take(digits).collect();
    format!("gpu-{}", hex.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_dns_labels_and_tell_plus_from_minus() {
        let gpu = gpu_name("GPU-3F2A9C1D-0000-4000-8000-000000000001", 8);
        assert_eq!(gpu, "gpu-3f2a9c1d");
        assert_eq!(instance_device(&gpu, 19, 4), "gpu-3f2a9c1d-mig-19-4");
        assert_ne!(instance_device(&gpu, 21, 0), instance_device(&gpu, 67, 0));
    }

    #[test]
    fn profile_classes_keep_the_spelling_of_the_extended_resource() {
        assert_eq!(profile_class("1g.24gb+me.all"), "mig-1g.24gb.me.all.kerf.dev");
        assert_eq!(profile_class("1g.24gb-me"), "mig-1g.24gb-me.kerf.dev");
    }
}
