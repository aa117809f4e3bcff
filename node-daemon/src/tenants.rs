//! Watches what the programs in shares do, every second while any is given out, and more often while a server is not well. Each
//! GPU and each MIG instance with shares is looked at by itself.
//!
//! - Where MPS alone limits memory, it does so for each process by itself: of a pod whose processes together have more than
//!   its shares (and what contexts take), the largest are ended until the rest fits. (Where the driver limits memory, it limits the pod.)
//! - A process of such a pod that is there past MPS is ended. To a GPU in EXCLUSIVE_PROCESS it can get only while no server
//!   runs, and it would keep the server from coming back; a MIG instance lets it in at any time.
//! - Where the driver limits memory, the limits of prepared pods are read again, and set again if they are not there: a
//!   driver that was loaded anew has forgotten them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kerf_crds::gpu_node::Isolation;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::carrier::Carrier;
use crate::events::Note;
use crate::hardware::{self, Failure, ProcessMemory};
use crate::holders;
use crate::inventory::{Gpu, Inventory};
use crate::mps::Protocol;
use crate::mps::control::{Control, Seen, Server};
use crate::plugin::{PodLimits, shares_of};
use crate::prepared::{DeviceKey, PreparedClaims};
use crate::worker::{Context, blocking, no_session};

/// What NVML may count of a process beside what it allocates: a context of CUDA's has a few hundred MiB.
const CONTEXT: u64 = 512 << 20;

const LOOK: Duration = Duration::from_secs(1);

/// While a server is not well: a container that starts now has the GPU to itself.
const UNWELL: Duration = Duration::from_millis(250);

/// So far apart are the looks at limits that the driver keeps.
const LIMITS: Duration = Duration::from_secs(10);

/// From so many looks in a row on at which a pod had processes past MPS, whoever it is has no second look.
const IN_A_ROW: u32 = 3;

/// What a pod may have of a carrier.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    bytes: u64,
    /// The driver sees to it.
    by_driver: bool,
}

/// A process of a pod on a carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Use {
    pid: u32,
    bytes: u64,
    /// MPS let it in.
    mps: bool,
}

/// Why a process is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// Its pod has more memory than its shares: so much.
    Memory(u64),
    PastMps,
}

/// What has to end of a pod's processes on a carrier.
fn excess(uses: &[Use], allowed: Allowed) -> Vec<(u32, Why)> {
    let mut ended: Vec<(u32, Why)> =
        uses.iter().filter(|user| !user.mps).map(|user| (user.pid, Why::PastMps)).collect();
    if allowed.by_driver {
        return ended;
    }
    let mut within: Vec<&Use> = uses.iter().filter(|user| user.mps).collect();
    within.sort_by_key(|user| user.bytes);
    let all: u64 = within.iter().map(|user| user.bytes).sum();
    let mut left = all;
    while left > allowed.bytes + CONTEXT * within.len() as u64
        && let Some(largest) = within.pop()
    {
        left -= largest.bytes;
        ended.push((largest.pid, Why::Memory(all)));
    }
    ended
}

/// Runs until dropped.
pub async fn run(context: Context, limits: PodLimits) -> anyhow::Result<()> {
    let mut prepared = context.state.prepared.subscribe();
    let mut watch = Watch { context, told: BTreeMap::new(), past: BTreeMap::new() };
    let mut limits_at: Option<Instant> = None;
    loop {
        let claims = prepared.borrow_and_update().clone();
        let inventory = watch.context.state.latest();
        let carriers: BTreeSet<DeviceKey> = claims
            .values()
            .flat_map(|record| &record.devices)
            .filter(|device| device.share.is_some())
            .map(|device| device.key.carrier())
            .collect();
        if carriers.is_empty() {
            watch.told.clear();
            if prepared.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            continue;
        }
        if let Some(inventory) = inventory.as_ref().filter(|inventory| inventory.unavailable.is_none()) {
            for gpu in &inventory.gpus {
                let own = carriers.iter().filter(|key| key.gpu == gpu.uuid);
                let own: Vec<Carrier<'_>> =
                    own.map(|key| Carrier { gpu, placement: key.placement }).collect();
                if !own.is_empty() {
                    watch.look(gpu, &own, inventory, &claims).await;
                }
            }
            if limits_at.is_none_or(|at| at.elapsed() >= LIMITS) {
                keep_limits(&watch.context, &limits, inventory, &claims).await;
                limits_at = Some(Instant::now());
            }
        }
        let unwell = |key: &DeviceKey| {
            let gpu = inventory.as_ref().and_then(|inventory| inventory.gpu(&key.gpu));
            gpu.is_some_and(|gpu| !Carrier { gpu, placement: key.placement }.is_served())
        };
        tokio::time::sleep(if carriers.iter().any(unwell) { UNWELL } else { LOOK }).await;
    }
}

struct Watch {
    context: Context,
    /// Processes that are to end, by carrier and pid.
    told: BTreeMap<(DeviceKey, u32), Found>,
    /// At how many looks in a row a pod, by its UID, had some process past MPS on a carrier.
    past: BTreeMap<(DeviceKey, String), u32>,
}

/// A process of a pod that has too much of a carrier.
#[derive(Clone, Copy, Debug)]
struct Excess<'a> {
    carrier: Carrier<'a>,
    /// UID of the pod.
    uid: &'a str,
    pod: &'a str,
    pid: u32,
    why: Why,
    limit: u64,
    /// At how many looks in a row, this one among them, the pod had some process past MPS there.
    looks: u32,
}

/// A process that is to end.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    /// How often it was found so.
    looks: u32,
    /// It was told that it is ended.
    told: bool,
}

impl Watch {
    async fn look(
        &mut self,
        gpu: &Gpu,
        carriers: &[Carrier<'_>],
        inventory: &Inventory,
        claims: &PreparedClaims,
    ) {
        let (driver, uuid) = (self.context.driver.clone(), gpu.uuid.clone());
        let found: Result<Vec<ProcessMemory>, Failure> = blocking(move || {
            let library = driver.session().map_err(|_| no_session())?;
            hardware::memory_by_process(&library, &uuid)
                .inspect_err(|failure| driver.note_failure(&library, failure))
        })
        .await;
        let Ok(found) = found else { return };
        let pods: BTreeMap<&str, String> = claims
            .values()
            .filter_map(|record| record.pod.as_ref())
            .map(|pod| (pod.uid.as_str(), pod.id()))
            .collect();
        let mut uses: BTreeMap<(Option<u32>, &str), Vec<Use>> = BTreeMap::new();
        for ProcessMemory { pid, gpu_instance, bytes, mps } in found {
            let Some(uid) = holders::process(pid).pod_uid else { continue };
            if let Some((uid, _)) = pods.get_key_value(uid.as_str()) {
                uses.entry((gpu_instance, uid)).or_default().push(Use { pid, bytes, mps });
            }
        }
        let protocol = Protocol::of_driver(&inventory.driver_version);
        let (mut now, mut past) = (BTreeSet::new(), BTreeMap::new());
        for carrier in carriers {
            // The instance, where it is one; it may have gone since the inventory.
            let instance = carrier.instance().map(|instance| instance.gpu_instance_id);
            if !carrier.is_gpu() && instance.is_none() {
                continue;
            }
            let key = carrier.key();
            let here = uses.iter().filter(|((place, _), _)| *place == instance);
            let here: BTreeMap<&str, &Vec<Use>> = here.map(|((_, uid), uses)| (*uid, uses)).collect();
            let sum = |uses: &Vec<Use>| uses.iter().map(|one| one.bytes).sum();
            let sums = here.iter().map(|(uid, uses)| ((*uid).to_owned(), sum(uses))).collect();
            self.context.state.metrics.uses(&key, sums);
            let by_driver = carrier.isolation() >= Isolation::Driver;
            let control = self.context.mps.control(&carrier.name(), protocol);
            // Asked once for all of them; one that hangs must not keep the watch from others.
            let mut seen = None;
            for (uid, uses) in here {
                let Some(bytes) = shares_of(claims, uid).get(&key).copied() else { continue };
                let excess = excess(uses, Allowed { bytes, by_driver });
                if !excess.is_empty() && seen.is_none() {
                    seen = Some(tokio::time::timeout(LOOK, control.look()).await.unwrap_or(Seen {
                        server: Server::Hangs("no answer".to_owned()),
                        ..Seen::default()
                    }));
                }
                let Some(seen) = &seen else { continue };
                let is_client = |pid| seen.clients.values().flatten().any(|client| *client == pid);
                let excess = excess.into_iter().filter(|(pid, why)| *why != Why::PastMps || !is_client(*pid));
                let excess: Vec<(u32, Why)> = excess.collect();
                let row = (key.clone(), uid.to_owned());
                let looks = match excess.iter().any(|(_, why)| *why == Why::PastMps) {
                    true => self.past.remove(&row).unwrap_or(0) + 1,
                    false => 0,
                };
                if looks > 0 {
                    past.insert(row, looks);
                }
                for (pid, why) in excess {
                    now.insert((key.clone(), pid));
                    let one =
                        Excess { carrier: *carrier, uid, pod: &pods[uid], pid, why, limit: bytes, looks };
                    self.end(&control, seen, one).await;
                }
            }
        }
        self.past.retain(|(key, _), _| key.gpu != gpu.uuid);
        self.past.append(&mut past);
        self.told.retain(|key, _| key.0.gpu != gpu.uuid || now.contains(key));
    }

    /// By MPS first, then by force. One that seems to be past MPS is looked at twice where there is a server, since it may be
    /// on its way in; but not for ever where others of the pod come in its place.
    async fn end(&mut self, control: &Control, seen: &Seen, one: Excess<'_>) {
        let Excess { carrier, uid, pod, pid, why, limit, looks } = one;
        let found = self.told.entry((carrier.key(), pid)).or_default();
        found.looks += 1;
        let first = found.looks == 1;
        let reason = match why {
            Why::PastMps if first && looks < IN_A_ROW && lets_in(&seen.server) => return,
            Why::PastMps => "it is there past MPS".to_owned(),
            Why::Memory(all) => {
                format!("the pod's processes have {all} bytes together where its shares are {limit}")
            }
        };
        let name = holders::comm(pid);
        let message = format!("{name} (pid {pid}) of pod {pod} is ended on {carrier}: {reason}");
        if !std::mem::replace(&mut found.told, true) {
            tracing::warn!("{message}");
            self.context.state.metrics.ended(&carrier.gpu.uuid, matches!(why, Why::PastMps));
            self.context.notes.send(Note {
                warning: true,
                reason: "ShareExceeded".into(),
                action: "Share",
                message,
            });
        }
        if first && !matches!(why, Why::PastMps) && seen.server == Server::Ready {
            let server = seen.server_pids.first().copied();
            match tokio::time::timeout(LOOK, control.terminate(server, pid)).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => tracing::warn!(pid, "MPS does not end a client: {error}"),
                Err(_) => tracing::warn!(pid, "MPS does not end a client: it gives no answer"),
            }
        }
        if let Err(error) = kill(pid, uid) {
            tracing::warn!(pid, "a process that has more than its share cannot be killed: {error}");
        }
    }
}

/// Whether a process may be on its way into the server.
fn lets_in(server: &Server) -> bool {
    match server {
        // Who is silent may only have been asked at a bad moment.
        Server::Starting | Server::Ready | Server::Fault | Server::Hangs(_) | Server::Silent(_) => true,
        Server::Absent | Server::Exited => false,
    }
}

/// Kills a process if it still is the pod's: pids are given out again.
fn kill(pid: u32, pod_uid: &str) -> std::io::Result<()> {
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(std::io::ErrorKind::InvalidInput)?;
    let held = pidfd_open(process, PidfdFlags::empty())?;
    if holders::process(pid).pod_uid.as_deref() == Some(pod_uid) {
        pidfd_send_signal(held, Signal::KILL)?;
    }
    Ok(())
}

/// Sets limits again that the driver has forgotten.
async fn keep_limits(context: &Context, limits: &PodLimits, inventory: &Inventory, claims: &PreparedClaims) {
    let shares = claims.values().filter(|record| record.devices.iter().any(|device| device.share.is_some()));
    for record in shares {
        let current = || context.state.prepared.snapshot();
        if limits.holds(record, inventory, claims).await || !current().contains_key(&record.claim.uid) {
            continue;
        }
        let what = match limits.enforce(record, inventory, current).await {
            Ok(()) => "was gone and is set again".to_owned(),
            Err(error) => format!("is not there and cannot be set: {error}"),
        };
        let pod = record.pod.as_ref().map(|pod| pod.id()).unwrap_or_default();
        let message = format!("the limit on the memory of pod {pod} {what}");
        tracing::warn!("{message}");
        let (reason, action) = ("LimitLost".to_owned(), "Share");
        context.notes.send(Note { warning: true, reason, action, message });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn client(pid: u32, gib: u64) -> Use {
        Use { pid, bytes: gib * GIB, mps: true }
    }

    fn ended(uses: &[Use], gib: u64, by_driver: bool) -> Vec<u32> {
        excess(uses, Allowed { bytes: gib * GIB, by_driver }).into_iter().map(|(pid, _)| pid).collect()
    }

    #[test]
    fn the_largest_are_ended_until_the_rest_fits() {
        let uses = [client(1, 2), client(2, 5), client(3, 4)];
        assert!(ended(&uses, 10, false).is_empty(), "three contexts may have 1.5 GiB");
        assert_eq!(ended(&uses, 9, false), [2]);
        assert_eq!(ended(&uses, 4, false), [2, 3]);
        assert_eq!(ended(&uses, 1, false), [2, 3, 1]);
        assert!(ended(&uses, 1, true).is_empty(), "the driver sees to it");
    }

    #[test]
    fn nobody_stays_past_mps() {
        let past = Use { mps: false, ..client(4, 1) };
        for by_driver in [true, false] {
            assert_eq!(ended(&[client(1, 2), past], 80, by_driver), [4]);
        }
        let away = [Server::Absent, Server::Exited];
        assert!(!away.iter().any(lets_in) && lets_in(&Server::Ready), "ended at the first look");
    }
}
