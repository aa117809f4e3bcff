//! Failures that hardware told us of once: an XID is an event, not a state that could be read again. They are written
//! down, so that a restart of the daemon heals nothing.
//!
//! What ends a failure: a reboot; the driver found gone and back; a reset of the GPU, where the driver tells that it
//! needs one and then that it does not any more (since R555); for an instance also its end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_crds::gpu_node::Reason;
use serde::{Deserialize, Serialize};

use crate::hardware::{Xid, is_device_failure};
use crate::inventory::Gpu;
use crate::ours::replace;

/// Name of the file below `--state-dir`.
pub const FILE: &str = "health.json";

/// What has failed since the driver was loaded. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Health(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    record: Mutex<Record>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    boot_id: String,
    /// By UUID.
    gpus: BTreeMap<String, Failures>,
    /// How often the driver had gone away when the record was begun.
    #[serde(skip)]
    departures: u64,
}

/// Of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Failures {
    gpu: Option<Reason>,
    /// By id of the GPU instance.
    instances: BTreeMap<u32, Reason>,
    /// The driver has asked for a reset or a reboot since.
    recovery_asked: bool,
}

/// Fallen off the bus: whatever instance it is told of, the GPU is gone.
const OFF_THE_BUS: u64 = 79;

impl Health {
    /// Reads what was written down in this boot. A file that is lost or torn counts as empty.
    pub fn load(state_dir: &Path, boot_id: &str) -> Self {
        let path = state_dir.join(FILE);
        let read = || -> std::io::Result<Record> { Ok(serde_json::from_slice(&std::fs::read(&path)?)?) };
        let found = read().unwrap_or_else(|error| {
            if error.kind() != std::io::ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "earlier failures of GPUs are not known");
            }
            Record::default()
        });
        let record = match found.boot_id == boot_id {
            true => found,
            false => Record { boot_id: boot_id.to_owned(), ..Record::default() },
        };
        Self(Arc::new(Inner { path, record: Mutex::new(record) }))
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.0.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, record: &Record) {
        let written = serde_json::to_vec_pretty(record)
            .map_err(Into::into)
            .and_then(|text| replace(&self.0.path, &text));
        if let Err(error) = written {
            tracing::warn!(path = %self.0.path.display(), %error, "failures of GPUs cannot be written down; a restart forgets them");
        }
    }

    /// Notes an XID. `Some`: a device has failed, and that was not known; the text says which, and how.
    pub fn note(&self, xid: &Xid) -> Option<Reason> {
        let uuid = xid.gpu.as_ref()?;
        if !is_device_failure(xid.code) {
            return None;
        }
        let mut record = self.lock();
        let failures = record.gpus.entry(uuid.clone()).or_default();
        let reason = format!("Xid{}", xid.code);
        let see = "see https://docs.nvidia.com/deploy/xid-errors/";
        let (before, reason) = match xid.gpu_instance.filter(|_| xid.code != OFF_THE_BUS) {
            Some(instance) => {
                let message = format!("XID {} on GPU instance {instance} of {uuid}; {see}", xid.code);
                let reason = Reason { reason, message };
                (failures.instances.insert(instance, reason.clone()), reason)
            }
            None => {
                let reason = Reason { reason, message: format!("XID {} on {uuid}; {see}", xid.code) };
                (failures.gpu.replace(reason.clone()), reason)
            }
        };
        // A failing device may repeat itself many times a second.
        if before.as_ref() == Some(&reason) {
            return None;
        }
        self.write(&record);
        Some(reason)
    }

    /// Marks what has failed on a GPU that was just observed. An instance that is gone takes its failure with it.
    pub fn mark(&self, gpu: &mut Gpu) {
        let mut record = self.lock();
        let Some(failures) = record.gpus.get_mut(&gpu.uuid) else { return };
        let before = failures.clone();
        match gpu.recovery_needed {
            Some(true) => failures.recovery_asked = true,
            Some(false) if failures.recovery_asked => *failures = Failures::default(),
            _ => {}
        }
        failures
            .instances
            .retain(|id, _| gpu.instances.iter().any(|instance| instance.gpu_instance_id == *id));
        gpu.unhealthy.clone_from(&failures.gpu);
        for instance in &mut gpu.instances {
            instance.unhealthy = failures.instances.get(&instance.gpu_instance_id).cloned();
        }
        if *failures == before {
            return;
        }
        if failures.gpu.is_none() && failures.instances.is_empty() {
            record.gpus.remove(&gpu.uuid);
        }
        self.write(&record);
    }

    /// Notes that a GPU has fallen off the bus: if it ever can be reached again, it has been reset.
    pub fn note_loss(&self, uuid: &str) {
        let mut record = self.lock();
        let Some(failures) = record.gpus.get_mut(uuid) else { return };
        if !std::mem::replace(&mut failures.recovery_asked, true) {
            self.write(&record);
        }
    }

    /// `departures` counts how often the driver has gone away. When it is back the GPUs have been reset.
    pub fn follow(&self, departures: u64) {
        let mut record = self.lock();
        if record.departures != departures {
            record.departures = departures;
            record.gpus.clear();
            self.write(&record);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Instance;

    #[test]
    fn a_failure_stays_with_what_failed() {
        let dir = tempfile::tempdir().unwrap();
        let health = Health::load(dir.path(), "boot");
        let xid = |code, gpu_instance| Xid { gpu: Some("GPU-1".into()), code, gpu_instance };
        assert_eq!(health.note(&xid(31, Some(3))), None, "an application's fault");
        health.note(&xid(95, Some(3))).unwrap();
        assert_eq!(health.note(&xid(95, Some(3))), None, "no news");
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

    #[test]
    fn a_failure_outlives_the_daemon_until_the_gpu_is_reset_or_the_node_boots() {
        let dir = tempfile::tempdir().unwrap();
        let seen = |boot, recovery_needed| {
            let mut gpu = Gpu { uuid: "GPU-1".into(), recovery_needed, ..Gpu::default() };
            Health::load(dir.path(), boot).mark(&mut gpu);
            gpu.unhealthy.map(|why| why.reason)
        };
        let fail = || {
            let xid = Xid { gpu: Some("GPU-1".into()), code: 48, gpu_instance: None };
            Health::load(dir.path(), "boot-1").note(&xid).unwrap();
        };
        fail();
        assert_eq!(seen("boot-1", None).as_deref(), Some("Xid48"));
        // That the driver asks for nothing says nothing if it never asked.
        assert_eq!(seen("boot-1", Some(false)).as_deref(), Some("Xid48"));
        assert_eq!(seen("boot-1", Some(true)).as_deref(), Some("Xid48"));
        assert_eq!(seen("boot-1", Some(false)), None, "reset");
        assert_eq!(seen("boot-1", None), None, "and so it stays");
        fail();
        assert_eq!(seen("boot-2", None), None);
        std::fs::write(dir.path().join(FILE), "{\"bootId\":\"bo").unwrap();
        assert_eq!(seen("boot-1", None), None, "a torn file");
        fail();
        assert_eq!(seen("boot-1", None).as_deref(), Some("Xid48"));
    }
}
