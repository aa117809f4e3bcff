//! GPUs drawn as text: a line per GPU, its memory slices as cells, its instances as boxes over them.

use kerf_crds::GpuNode;
use kerf_crds::gpu_node::{Gpu, Instance, Owner};
use kube::ResourceExt as _;

/// Width of a memory slice.
const CELL: usize = 9;

/// The node's GPUs, for a terminal.
pub fn node(node: &GpuNode) -> String {
    let mut out = format!("{}\n", node.name_any());
    let status = node.status.clone().unwrap_or_default();
    for gpu in &status.gpus {
        let slices = status.geometry_of(gpu).map_or(0, |geometry| geometry.memory_slices);
        let bar = if gpu.mig.enabled { cut(node, gpu, slices) } else { whole(node, gpu, slices) };
        out.push_str(&format!("  {} {:<28} |{bar}|{}\n", gpu.index, gpu.product, remark(gpu)));
    }
    out
}

fn remark(gpu: &Gpu) -> String {
    let reasons = [&gpu.unhealthy, &gpu.unmanaged, &gpu.problem];
    reasons.into_iter().flatten().map(|reason| format!("  {}", reason.reason)).collect()
}

/// A GPU that is not cut.
fn whole(node: &GpuNode, gpu: &Gpu, slices: u32) -> String {
    let owner = owner_of(node, gpu, None);
    let text = owner.map_or_else(|| "whole, free".to_owned(), |pod| format!("whole: {pod}"));
    fit(&text, slices.max(2) as usize * CELL, if gpu.processes > 0 { '=' } else { ' ' })
}

fn cut(node: &GpuNode, gpu: &Gpu, slices: u32) -> String {
    let mut instances: Vec<&Instance> = gpu.instances.iter().collect();
    instances.sort_by_key(|instance| instance.placement.start);
    let mut bar = String::new();
    let mut at = 0;
    for instance in instances {
        let start = instance.placement.start.max(at);
        bar.push_str(&" ".repeat((start - at) as usize * CELL));
        let width = instance.placement.size as usize * CELL;
        let owner = owner_of(node, gpu, Some(instance));
        let text = match (&owner, instance.foreign) {
            (_, true) => format!("{} foreign", instance.profile),
            (Some(owner), _) => format!("{} {owner}", instance.profile),
            (None, _) => format!("{} idle", instance.profile),
        };
        let fill = if instance.processes > 0 { '=' } else { '-' };
        bar.push_str(&format!("[{}]", fit(&text, width - 2, fill)));
        at = start + instance.placement.size;
    }
    bar.push_str(&" ".repeat(slices.saturating_sub(at) as usize * CELL));
    bar
}

/// Whose a partition is, in a word.
fn owner_of(node: &GpuNode, gpu: &Gpu, instance: Option<&Instance>) -> Option<String> {
    let here = node.spec.partitions.iter().filter(|partition| {
        partition.gpu == gpu.uuid
            && match (&partition.instance, instance) {
                (None, None) => true,
                (Some(wanted), Some(instance)) => {
                    wanted.placement == instance.placement && wanted.profile == instance.profile
                }
                _ => false,
            }
    });
    // While room is made, it may still be somebody's.
    let partition = here.min_by_key(|partition| matches!(partition.owner, Owner::Reservation(_)))?;
    Some(match &partition.owner {
        Owner::Claim(claim) => claim.pod.clone(),
        Owner::Policy(policy) => format!("({:?})", policy.kind).to_lowercase(),
        Owner::Reservation(reservation) => format!("kept for {}", reservation.pod.name),
    })
}

/// Text centred in a width, cut off where it is longer.
fn fit(text: &str, width: usize, fill: char) -> String {
    let text: String = text.chars().take(width).collect();
    let length = text.chars().count();
    let left = (width - length) / 2;
    let pad = |count: usize| fill.to_string().repeat(count);
    format!("{}{text}{}", pad(left), pad(width - length - left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kerf_crds::gpu_node::{
        ClaimOwner, Geometry, GpuNodeSpec, GpuNodeStatus, ObservedMig, Partition, Placement, WantedInstance,
    };

    #[test]
    fn instances_stand_over_their_slices() {
        let placement = Placement { start: 4, size: 4 };
        let spec = GpuNodeSpec {
            partitions: vec![Partition {
                gpu: "GPU-1".into(),
                instance: Some(WantedInstance { profile: "3g.40gb".into(), placement }),
                share: None,
                owner: Owner::Claim(ClaimOwner {
                    namespace: "n".into(),
                    name: "c".into(),
                    pod: "train".into(),
                    pod_uid: "u".into(),
                    request: "r".into(),
                }),
            }],
            ..GpuNodeSpec::default()
        };
        let mut object = GpuNode::new("node-a", spec);
        object.status = Some(GpuNodeStatus {
            gpus: vec![Gpu {
                uuid: "GPU-1".into(),
                product: "H100".into(),
                geometry: Some("H100".into()),
                mig: ObservedMig { enabled: true, ..ObservedMig::default() },
                instances: vec![Instance {
                    profile: "3g.40gb".into(),
                    placement,
                    processes: 1,
                    ..Instance::default()
                }],
                ..Gpu::default()
            }],
            geometries: vec![Geometry { name: "H100".into(), memory_slices: 8, ..Geometry::default() }],
            ..GpuNodeStatus::default()
        });
        let drawn = node(&object);
        let line = drawn.lines().nth(1).unwrap_or_default();
        let bar = line.split('|').nth(1).unwrap_or_default();
        assert_eq!(bar.chars().count(), 8 * CELL);
        assert_eq!(bar.find('['), Some(4 * CELL));
        assert!(bar.contains("=3g.40gb train="), "{bar}");
    }
}
