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

/// Server-side apply owner and event reporter names.
pub const OPERATOR: &str = "kerf-operator";
/// See [`OPERATOR`].
pub const NODE_DAEMON: &str = "kerf-node-daemon";

/// DeviceClass of one profile, e.g. `mig-1g.10gb.me.kerf.dev` for `1g.10gb+me`.
pub fn profile_class(profile: &str) -> String {
    format!("mig-{}.kerf.dev", crate::profile::resource_suffix(profile))
}

/// Name of a MIG instance as a DRA device: `<GPU name>-mig-<profile id>-<start>`. The profile's NVML id stands in
/// for its name, since `+me` and `-me` would both become `-me` in a DNS label.
pub fn instance_device(gpu_name: &str, profile_id: u32, start: u32) -> String {
    format!("{gpu_name}-mig-{profile_id}-{start}")
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
