//! Device health for pod status: kubelet shows it in `status.containerStatuses[].allocatedResourcesStatus`.
//!
//! kubelet watches it for as long as it knows the plugin, so the end of the last watch tells that kubelet has gone.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kerf_crds::gpu_node::Reason;
use kerf_crds::names::{instance_device, share_device};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::proto::health::dra_resource_health_server::DraResourceHealth;
use super::proto::health::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use crate::inventory::Inventory;
use crate::node::{Kubelet, NodeState};
use crate::prepared::PreparedClaims;

/// kubelet takes the health of a device for unknown after 30 s of silence.
const REPEAT: Duration = Duration::from_secs(20);

/// kubelet cuts longer messages.
const MAX_MESSAGE: usize = 1024;

/// Answers kubelet on the service socket.
#[derive(Clone, Debug)]
pub struct HealthService {
    state: NodeState,
    /// How many calls watch just now.
    watches: Arc<AtomicUsize>,
}

impl HealthService {
    /// Nobody watches yet.
    pub fn new(state: NodeState) -> Self {
        Self { state, watches: Arc::default() }
    }
}

#[tonic::async_trait]
impl DraResourceHealth for HealthService {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let (sender, receiver) = mpsc::channel(1);
        let (state, watches) = (self.state.clone(), self.watches.clone());
        watches.fetch_add(1, Ordering::Relaxed);
        state.kubelet.send_replace(Kubelet::Registered);
        tokio::spawn(async move {
            report(state.clone(), sender).await;
            if watches.fetch_sub(1, Ordering::Relaxed) == 1 {
                state.kubelet.send_replace(Kubelet::Unheard);
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Sends all devices at once, at every change of their health, and in time before kubelet forgets; until kubelet hangs
/// up.
async fn report(state: NodeState, sender: mpsc::Sender<Result<NodeWatchResourcesResponse, Status>>) {
    let mut inventory = state.inventory.subscribe();
    let mut prepared = state.prepared.subscribe();
    let mut sent: Option<BTreeMap<String, Health>> = None;
    let mut due = tokio::time::Instant::now();
    loop {
        let health = health_of(inventory.borrow_and_update().as_deref(), &prepared.borrow_and_update());
        if sent.as_ref() != Some(&health) || tokio::time::Instant::now() >= due {
            if sender.send(Ok(response(&state.node_name, &health))).await.is_err() {
                return;
            }
            sent = Some(health);
            due = tokio::time::Instant::now() + REPEAT;
        }
        tokio::select! {
            Ok(()) = inventory.changed() => {}
            Ok(()) = prepared.changed() => {}
            () = tokio::time::sleep_until(due) => {}
            () = sender.closed() => return,
        }
    }
}

/// A device's health: `Ok`, or what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Health {
    Healthy,
    Unhealthy(String),
    Unknown(String),
}

/// Health of every device that exists, and of those that a claim holds although they do not.
fn health_of(inventory: Option<&Inventory>, prepared: &PreparedClaims) -> BTreeMap<String, Health> {
    let held = || prepared.values().flat_map(|prepared| &prepared.devices);
    let Some(inventory) = inventory else {
        return held().map(|d| (d.device.clone(), Health::Unknown("not read yet".into()))).collect();
    };
    if let Some(why) = &inventory.unavailable {
        return held().map(|d| (d.device.clone(), Health::Unknown(text(why)))).collect();
    }
    let mut health: BTreeMap<_, _> = held()
        .map(|device| {
            let what = Health::Unhealthy(format!("{} does not exist any more", device.uuid));
            (device.device.clone(), what)
        })
        .collect();
    for gpu in &inventory.gpus {
        health.insert(gpu.name.clone(), Health::of(gpu.unhealthy.as_ref()));
        let shared =
            |placement| gpu.sharing.is_some() || gpu.shares.iter().any(|share| share.placement == placement);
        if shared(None) {
            health.insert(share_device(&gpu.name), Health::of(gpu.unhealthy.as_ref()));
        }
        for instance in gpu.instances.iter().filter(|instance| instance.device().is_some()) {
            let name = instance_device(&gpu.name, instance.profile_id, instance.placement.start);
            let unhealthy = gpu.unhealthy.as_ref().or(instance.unhealthy.as_ref());
            if shared(Some(instance.placement)) {
                health.insert(share_device(&name), Health::of(unhealthy));
            }
            health.insert(name, Health::of(unhealthy));
        }
    }
    health
}

impl Health {
    fn of(unhealthy: Option<&Reason>) -> Self {
        unhealthy.map_or(Self::Healthy, |why| Self::Unhealthy(text(why)))
    }
}

fn text(why: &Reason) -> String {
    format!("{}: {}", why.reason, why.message)
}

fn response(pool: &str, health: &BTreeMap<String, Health>) -> NodeWatchResourcesResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    let devices = health
        .iter()
        .map(|(device, health)| {
            let (status, message) = match health {
                Health::Healthy => (HealthStatus::Healthy, ""),
                Health::Unhealthy(why) => (HealthStatus::Unhealthy, why.as_str()),
                Health::Unknown(why) => (HealthStatus::Unknown, why.as_str()),
            };
            DeviceHealth {
                device: Some(DeviceIdentifier { pool_name: pool.to_owned(), device_name: device.clone() }),
                health: status.into(),
                last_updated_time: now,
                health_check_timeout_seconds: 0,
                message: message.chars().take(MAX_MESSAGE).collect(),
            }
        })
        .collect();
    NodeWatchResourcesResponse { devices }
}

#[cfg(test)]
mod tests {
    use kerf_crds::gpu_node::Placement;

    use super::*;
    use crate::plugin::testing::{inventory, prepared_claim};

    #[test]
    fn health_names_the_cause_and_covers_what_is_gone() {
        let mut inventory = inventory();
        let held = PreparedClaims::from([("u".into(), prepared_claim("u", &inventory))]);
        let device = held["u"].devices[0].device.clone();
        assert_eq!(health_of(Some(&inventory), &held)[&device], Health::Healthy);

        inventory.gpus[0].unhealthy = Some(Reason { reason: "Xid79".into(), message: "off the bus".into() });
        let Health::Unhealthy(why) = &health_of(Some(&inventory), &held)[&device] else { panic!("healthy") };
        assert!(why.contains("off the bus"), "an instance fails with its GPU: {why}");

        inventory.gpus[0].unhealthy = None;
        inventory.gpus[0].instances[1].unhealthy =
            Some(Reason { reason: "Xid95".into(), message: "contained".into() });
        inventory.gpus[0].shares = vec![kerf_crds::gpu_node::Share {
            placement: Some(Placement { start: 4, size: 1 }),
            ..Default::default()
        }];
        let health = health_of(Some(&inventory), &held);
        assert!(
            matches!(&health[&share_device(&device)], Health::Unhealthy(_)),
            "shares fail with their instance"
        );
        assert!(
            !health.contains_key(&share_device(crate::plugin::testing::DEVICE_3G)),
            "the neighbour carries none"
        );

        inventory.gpus[0].instances.clear();
        assert!(matches!(&health_of(Some(&inventory), &held)[&device], Health::Unhealthy(_)), "gone");
        assert!(matches!(&health_of(None, &held)[&device], Health::Unknown(_)), "before the first scan");
    }
}
