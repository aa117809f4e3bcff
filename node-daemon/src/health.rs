//! Failures that hardware told us of once: an XID is an event, not a state that could be read again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kerf_crds::gpu_node::Reason;

use crate::hardware::{Xid, is_device_failure};
use crate::inventory::Gpu;

/// What has failed since the driver was loaded. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<BTreeMap<String, Failures>>>);

/// Of one GPU.
#[derive(Clone, Debug, Default)]
struct Failures {
    gpu: Option<Reason>,
    /// By id of the GPU instance.
    instances: BTreeMap<u32, Reason>,
}

/// Fallen off the bus: whatever instance it is told of, the GPU is gone.
const OFF_THE_BUS: u64 = 79;

impl Health {
    /// Notes an XID. `Some`: a device has failed; the text says which, and how.
    pub fn note(&self, xid: &Xid) -> Option<Reason> {
        let uuid = xid.gpu.as_ref()?;
        if !is_device_failure(xid.code) {
            return None;
        }
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let failures = all.entry(uuid.clone()).or_default();
        let reason = format!("Xid{}", xid.code);
        let see = "see https://docs.nvidia.com/deploy/xid-errors/";
        Some(match xid.gpu_instance.filter(|_| xid.code != OFF_THE_BUS) {
            Some(instance) => {
                let message = format!("XID {} on GPU instance {instance} of {uuid}; {see}", xid.code);
                let reason = Reason { reason, message };
                failures.instances.insert(instance, reason.clone());
                reason
            }
            None => {
                let reason = Reason { reason, message: format!("XID {} on {uuid}; {see}", xid.code) };
                failures.gpu = Some(reason.clone());
                reason
            }
        })
    }

    /// Marks what has failed on a GPU that was just observed. An instance that is gone takes its failure with it.
    pub fn mark(&self, gpu: &mut Gpu) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(failures) = all.get_mut(&gpu.uuid) else { return };
        failures
            .instances
            .retain(|id, _| gpu.instances.iter().any(|instance| instance.gpu_instance_id == *id));
        gpu.unhealthy.clone_from(&failures.gpu);
        for instance in &mut gpu.instances {
            instance.unhealthy = failures.instances.get(&instance.gpu_instance_id).cloned();
        }
    }

    /// The driver was loaded anew, which resets the GPUs.
    pub fn forget_all(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Instance;

    #[test]
    fn a_failure_stays_with_what_failed() {
        let health = Health::default();
        let xid = |code, gpu_instance| Xid { gpu: Some("GPU-1".into()), code, gpu_instance };
        assert_eq!(health.note(&xid(31, Some(3))), None, "an application's fault");
        health.note(&xid(95, Some(3))).unwrap();
        let instance = |id| Instance { gpu_instance_id: id, ..Instance::default() };
        let mut gpu =
            Gpu { uuid: "GPU-1".into(), instances: vec![instance(3), instance(4)], ..Gpu::default() };
        health.mark(&mut gpu);
        assert_eq!(gpu.unhealthy, None);
        assert_eq!(gpu.instances[0].unhealthy.as_ref().unwrap().reason, "Xid95");
        assert_eq!(gpu.instances[1].unhealthy, None);
        // The instance is destroyed; another one gets its id.
        gpu.instances.remove(0);
        health.mark(&mut gpu);
        gpu.instances.push(instance(3));
        health.mark(&mut gpu);
        assert_eq!(gpu.instances[1].unhealthy, None);
        health.note(&xid(79, Some(4))).unwrap();
        health.mark(&mut gpu);
        assert_eq!(gpu.unhealthy.unwrap().reason, "Xid79", "off the bus is the whole GPU");
    }
}
