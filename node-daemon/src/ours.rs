//! Which GPU instances are Kerf's: the checkpoint.
//!
//! Before an instance is created, its place is written down and on disk. What stands at a place written down in this
//! boot is Kerf's, whether or not the daemon lived to see its creation succeed; everything else is foreign. If the
//! file is lost or torn, the API server answers instead: what stands where `GpuNode.spec` wants it, or was reported as
//! not foreign in this boot, is Kerf's.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_crds::GpuNode;
use kerf_crds::gpu_node::Placement;
use serde::{Deserialize, Serialize};

use crate::inventory::Gpu;
use crate::step::Step;

/// Name of the file below `--state-dir`.
pub const FILE: &str = "instances.json";

/// One instance of ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    /// UUID of the GPU.
    gpu: String,
    /// NVML's name of the profile.
    profile: String,
    placement: Placement,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Checkpoint {
    /// Instances do not survive a reboot, nor do entries.
    boot_id: String,
    instances: BTreeSet<Entry>,
}

/// The record of our instances. Cheap to clone; every change is on disk before it returns.
#[derive(Clone, Debug)]
pub struct Ours {
    path: Arc<Path>,
    boot_id: Arc<str>,
    record: Arc<Mutex<Record>>,
}

#[derive(Debug)]
enum Record {
    /// What is written down.
    Known(BTreeSet<Entry>),
    /// There was no readable file, and the API server has not been asked yet.
    Lost,
}

impl Ours {
    /// Reads the checkpoint of this boot.
    pub fn load(state_dir: &Path, boot_id: &str) -> Self {
        let path = state_dir.join(FILE);
        let record = match read(&path) {
            Ok(checkpoint) if checkpoint.boot_id == boot_id => Record::Known(checkpoint.instances),
            // Of an earlier boot: what stands now was made by somebody else since.
            Ok(_) => Record::Known(BTreeSet::new()),
            Err(error) => {
                tracing::info!(path = %path.display(), %error, "no checkpoint of instances, waiting for the API server's");
                Record::Lost
            }
        };
        Self { path: path.into(), boot_id: boot_id.into(), record: Arc::new(Mutex::new(record)) }
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether ownership can be told. If not, nothing may be changed.
    pub fn is_known(&self) -> bool {
        matches!(*self.lock(), Record::Known(_))
    }

    /// Fills a lost record from the API server. `node` is `None` if there is no GpuNode: then nothing is ours.
    pub fn recover(&self, node: Option<&GpuNode>) -> io::Result<()> {
        let mut record = self.lock();
        if matches!(*record, Record::Known(_)) {
            return Ok(());
        }
        let entries = node.map(|node| remembered(node, &self.boot_id)).unwrap_or_default();
        self.write(&entries)?;
        *record = Record::Known(entries);
        Ok(())
    }

    /// Writes an instance down before it is created.
    pub fn intend(&self, gpu: &str, step: &Step) -> io::Result<()> {
        let Step::CreateGpuInstance { profile, profile_id: _, placement } = step else { return Ok(()) };
        let mut record = self.lock();
        let Record::Known(entries) = &*record else {
            return Err(io::Error::other("it is not known which instances are Kerf's"));
        };
        let mut entries = entries.clone();
        entries.insert(Entry { gpu: gpu.to_owned(), profile: profile.clone(), placement: *placement });
        self.write(&entries)?;
        *record = Record::Known(entries);
        Ok(())
    }

    /// Marks what is foreign on a GPU that was just observed, and forgets what is no longer there.
    pub fn judge(&self, gpu: &mut Gpu) -> io::Result<()> {
        let mut record = self.lock();
        let Record::Known(entries) = &*record else { return Ok(()) };
        for instance in &mut gpu.instances {
            let made_by_us = entries.contains(&Entry {
                gpu: gpu.uuid.clone(),
                profile: instance.profile.clone(),
                placement: instance.placement,
            });
            // Kerf makes one compute instance, of full width: anything else in there is somebody else's work.
            let whole = match instance.compute_instances.as_slice() {
                [] => true,
                [one] => one.full_width,
                _ => false,
            };
            instance.foreign = !(made_by_us && whole);
        }
        let stands = |entry: &Entry| {
            let at = gpu.instance_at(entry.placement);
            entry.gpu != gpu.uuid || at.is_some_and(|instance| instance.profile == entry.profile)
        };
        // A GPU that does not say that it has MIG does not say that its instances are gone either.
        if !gpu.mig.capable || entries.iter().all(stands) {
            return Ok(());
        }
        let entries: BTreeSet<Entry> = entries.iter().filter(|entry| stands(entry)).cloned().collect();
        self.write(&entries)?;
        *record = Record::Known(entries);
        Ok(())
    }

    fn write(&self, entries: &BTreeSet<Entry>) -> io::Result<()> {
        let checkpoint = Checkpoint { boot_id: self.boot_id.to_string(), instances: entries.clone() };
        let text = serde_json::to_vec_pretty(&checkpoint)?;
        replace(&self.path, &text)
    }
}

fn read(path: &Path) -> io::Result<Checkpoint> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// Replaces a file so that after a crash at any moment it has the old content or the new, and after the return the new
/// also after a power failure.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let new: PathBuf = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(dir)?.sync_all()
}

/// What the API server knows of our instances.
fn remembered(node: &GpuNode, boot_id: &str) -> BTreeSet<Entry> {
    let wanted = node.spec.partitions.iter().filter_map(|partition| {
        let instance = partition.instance.as_ref()?;
        Some(Entry {
            gpu: partition.gpu.clone(),
            profile: instance.profile.clone(),
            placement: instance.placement,
        })
    });
    let reported = node
        .status
        .iter()
        .filter(|status| status.boot_id == boot_id)
        .flat_map(|status| &status.gpus)
        .flat_map(|gpu| {
            gpu.instances.iter().filter(|instance| !instance.foreign).map(|instance| Entry {
                gpu: gpu.uuid.clone(),
                profile: instance.profile.clone(),
                placement: instance.placement,
            })
        });
    wanted.chain(reported).collect()
}

/// The kernel's boot id.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use kerf_crds::gpu_node::{GpuNodeStatus, Instance as Reported, ObservedMig};

    use super::*;
    use crate::inventory::{ComputeInstance, Instance};

    const PLACE: Placement = Placement { start: 0, size: 4 };

    fn create(profile: &str, placement: Placement) -> Step {
        Step::CreateGpuInstance { profile: profile.into(), profile_id: 9, placement }
    }

    fn gpu(instances: &[(&str, Placement)]) -> Gpu {
        let instance = |(profile, placement): &(&str, Placement)| Instance {
            profile: (*profile).into(),
            placement: *placement,
            compute_instances: vec![ComputeInstance { id: 0, full_width: true, uuid: "MIG-1".into() }],
            ..Instance::default()
        };
        Gpu {
            uuid: "GPU-1".into(),
            mig: ObservedMig { capable: true, enabled: true, ..ObservedMig::default() },
            instances: instances.iter().map(instance).collect(),
            ..Gpu::default()
        }
    }

    fn foreign(ours: &Ours, instances: &[(&str, Placement)]) -> Vec<bool> {
        let mut gpu = gpu(instances);
        ours.judge(&mut gpu).unwrap();
        gpu.instances.iter().map(|instance| instance.foreign).collect()
    }

    fn fresh(dir: &Path, boot_id: &str) -> Ours {
        let ours = Ours::load(dir, boot_id);
        ours.recover(None).unwrap();
        ours
    }

    #[test]
    fn what_was_intended_is_ours_after_a_crash_in_the_same_boot_only() {
        let dir = tempfile::tempdir().unwrap();
        fresh(dir.path(), "boot-1").intend("GPU-1", &create("3g.40gb", PLACE)).unwrap();
        assert_eq!(foreign(&Ours::load(dir.path(), "boot-2"), &[("3g.40gb", PLACE)]), [true]);
        let restarted = Ours::load(dir.path(), "boot-1");
        assert_eq!(foreign(&restarted, &[("3g.40gb", PLACE)]), [false]);
        assert_eq!(foreign(&restarted, &[("4g.40gb", PLACE)]), [true], "another profile at the same place");
    }

    #[test]
    fn an_intention_that_came_to_nothing_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let ours = fresh(dir.path(), "boot-1");
        ours.intend("GPU-1", &create("3g.40gb", PLACE)).unwrap();
        assert!(foreign(&ours, &[]).is_empty());
        assert_eq!(foreign(&Ours::load(dir.path(), "boot-1"), &[("3g.40gb", PLACE)]), [true]);
    }

    #[test]
    fn a_lost_or_torn_checkpoint_is_replaced_by_what_the_api_server_knows() {
        for torn in [None, Some(""), Some("{\"bootId\":\"boot-1\",\"inst")] {
            let dir = tempfile::tempdir().unwrap();
            if let Some(content) = torn {
                fs::write(dir.path().join(FILE), content).unwrap();
            }
            let ours = Ours::load(dir.path(), "boot-1");
            assert!(!ours.is_known());
            assert!(ours.intend("GPU-1", &create("3g.40gb", PLACE)).is_err(), "nothing is made before that");
            let mut node = GpuNode::default();
            let reported = |foreign, start| Reported {
                profile: "1g.10gb".into(),
                placement: Placement { start, size: 1 },
                foreign,
                ..Reported::default()
            };
            node.status = Some(GpuNodeStatus {
                boot_id: "boot-1".into(),
                gpus: vec![kerf_crds::gpu_node::Gpu {
                    uuid: "GPU-1".into(),
                    instances: vec![reported(false, 4), reported(true, 5)],
                    ..Default::default()
                }],
                ..GpuNodeStatus::default()
            });
            ours.recover(Some(&node)).unwrap();
            let at = |start| Placement { start, size: 1 };
            let there = [("1g.10gb", at(4)), ("1g.10gb", at(5)), ("1g.10gb", at(6))];
            assert_eq!(foreign(&ours, &there), [false, true, true]);
            assert_eq!(foreign(&Ours::load(dir.path(), "boot-1"), &there), [false, true, true]);
        }
    }

    #[test]
    fn an_instance_that_somebody_cut_up_is_foreign() {
        let dir = tempfile::tempdir().unwrap();
        let ours = fresh(dir.path(), "boot-1");
        ours.intend("GPU-1", &create("3g.40gb", PLACE)).unwrap();
        let mut gpu = gpu(&[("3g.40gb", PLACE)]);
        gpu.instances[0].compute_instances[0].full_width = false;
        ours.judge(&mut gpu).unwrap();
        assert!(gpu.instances[0].foreign);
    }
}
