//! The plugin as kubelet meets it: over its sockets. The API server is a function, the hardware an inventory, the
//! driver a directory.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};

use super::prepare::{ClaimLocks, Preparer};
use super::proto::dra::dra_plugin_client::DraPluginClient;
use super::proto::dra::{
    Claim, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use super::proto::health::dra_resource_health_client::DraResourceHealthClient;
use super::proto::health::{HealthStatus, NodeWatchResourcesRequest};
use super::proto::registration::InfoRequest;
use super::proto::registration::registration_client::RegistrationClient;
use super::testing::*;
use super::*;
use crate::cdi::{CdiStore, DriverFiles, Toolkit};
use crate::config::Config;
use crate::hardware::Driver;
use crate::inventory::Inventory;
use crate::node::{Kubelet, NodeState, SeenSpec};
use crate::prepared::{DeviceKey, PreparedClaims};

/// What the stand-in for the API server answers.
type Answer = Result<Option<ResourceClaim>, ReadError>;

struct Node {
    directory: tempfile::TempDir,
    config: Config,
    state: NodeState,
    answer: Arc<Mutex<Answer>>,
    reads: Arc<AtomicUsize>,
    daemon: Option<Daemon>,
}

struct Daemon {
    task: tokio::task::JoinHandle<std::io::Result<()>>,
    stop: watch::Sender<bool>,
}

impl Node {
    /// With the driver's files, no spec, no inventory, and an API server that knows no claim; daemon not started.
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        driver_files(root);
        let path = |name: &str| root.join(name).to_string_lossy().into_owned();
        let config = Config::parse_from([
            "daemon".to_owned(),
            "--node-name=n".to_owned(),
            format!("--driver-root={}", path("")),
            format!("--proc-root={}", path("")),
            format!("--host-root={}", path("host")),
            format!("--state-dir={}", path("state")),
            format!("--cdi-dir={}", path("cdi")),
            format!("--cgroup-root={}", path("cgroup")),
            format!("--kubelet-plugins-dir={}", path("plugins")),
            format!("--kubelet-registry-dir={}", path("registry")),
        ]);
        let state = NodeState::new(NODE, PreparedClaims::new());
        Self {
            directory,
            config,
            state,
            answer: Arc::new(Mutex::new(Ok(None))),
            reads: Arc::default(),
            daemon: None,
        }
    }

    fn limits(&self) -> PodLimits {
        PodLimits::new(Driver::new(&self.config.driver_root), &self.config.cgroup_root)
    }

    fn cdi(&self) -> CdiStore {
        CdiStore::new(&self.config.cdi_dir)
    }

    fn answer(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }

    fn see(&self, inventory: Inventory) {
        self.state.inventory.send_replace(Some(Arc::new(inventory)));
    }

    fn plan(&self, spec: kerf_crds::GpuNodeSpec) {
        self.state.spec.send_replace(Some(Arc::new(SeenSpec { spec, ..SeenSpec::default() })));
    }

    /// Everything is in order for claim `u` on the 1g instance.
    fn ready(&self) {
        self.see(inventory());
        self.plan(spec(vec![partition("u", "r", Some(("1g.10gb", 4, 1)))]));
        self.answer(Ok(Some(claim("u", &[("r", DEVICE_1G)]))));
    }

    /// Starts the daemon's plugin as a new process would, from what is on disk.
    async fn start(&mut self, boot_id: &str, patience: Duration) -> DraPluginClient<Channel> {
        let (checkpoint, recovered) = Checkpoint::open(&self.config.state_dir, boot_id, &self.cdi()).unwrap();
        let (spec, inventory) = (self.state.seen_spec(), self.state.latest());
        self.state = NodeState::new(NODE, recovered.claims);
        self.state.spec.send_replace(spec);
        self.state.inventory.send_replace(inventory);
        let (answer, reads) = (self.answer.clone(), self.reads.clone());
        let reader: ClaimReader = Arc::new(move |_, _| {
            reads.fetch_add(1, Ordering::SeqCst);
            let answer = answer.lock().unwrap().clone();
            Box::pin(async move { answer })
        });
        let plugin = Plugin::new(&self.config, self.state.clone(), checkpoint, reader, self.limits())
            .with_patience(patience);
        let (stop, stopped) = watch::channel(false);
        self.daemon = Some(Daemon { task: tokio::spawn(plugin.run(stopped)), stop });
        DraPluginClient::new(connect(&self.config.kubelet_plugins_dir.join("gpu.kerf.dev/dra.sock")).await)
    }

    /// What the plugin works with, for what it does beside answering kubelet.
    fn preparer(&self, boot_id: &str) -> Preparer {
        let (checkpoint, _) = Checkpoint::open(&self.config.state_dir, boot_id, &self.cdi()).unwrap();
        let answer = self.answer.clone();
        Preparer {
            state: self.state.clone(),
            checkpoint,
            cdi: self.cdi(),
            files: DriverFiles::from(&self.config),
            toolkit: Arc::new(Toolkit::new(&self.config)),
            reader: Arc::new(move |_, _| {
                let answer = answer.lock().unwrap().clone();
                Box::pin(async move { answer })
            }),
            locks: ClaimLocks::default(),
            limits: self.limits(),
        }
    }

    /// Ends it as a kill would: no more writes.
    async fn kill(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.task.abort();
            _ = daemon.task.await;
        }
    }
}

fn driver_files(root: &Path) {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    for node in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"] {
        write(&format!("dev/{node}"), "");
    }
    write("proc/devices", "Character devices:\n238 nvidia-caps\n");
    for (instance, minor) in [("gi9", 84), ("gi2", 21)] {
        let folder = format!("proc/driver/nvidia/capabilities/gpu0/mig/{instance}");
        write(&format!("{folder}/access"), &format!("DeviceFileMinor: {minor}\n"));
        write(&format!("{folder}/ci0/access"), &format!("DeviceFileMinor: {}\n", minor + 1));
    }
}

/// Waits until the socket takes connections.
async fn connect(path: &Path) -> Channel {
    let endpoint = Endpoint::from_shared(format!("unix://{}", path.display())).unwrap();
    loop {
        match endpoint.connect().await {
            Ok(channel) => return channel,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

fn asked(uids: &[&str]) -> Vec<Claim> {
    let claim = |uid: &&str| {
        let reference = reference(uid);
        Claim { namespace: reference.namespace, name: reference.name, uid: reference.uid }
    };
    uids.iter().map(claim).collect()
}

async fn prepare(client: &mut DraPluginClient<Channel>, uid: &str) -> NodePrepareResourceResponse {
    let request = NodePrepareResourcesRequest { claims: asked(&[uid]) };
    let mut answer = client.node_prepare_resources(request).await.unwrap().into_inner();
    answer.claims.remove(uid).expect("every claim is answered")
}

async fn unprepare(client: &mut DraPluginClient<Channel>, uid: &str) -> String {
    let request = NodeUnprepareResourcesRequest { claims: asked(&[uid]) };
    let mut answer = client.node_unprepare_resources(request).await.unwrap().into_inner();
    answer.claims.remove(uid).expect("every claim is answered").error
}

/// Long enough to be never reached.
const PATIENT: Duration = Duration::from_secs(40);

#[tokio::test]
async fn a_claim_lives_from_prepare_to_unprepare() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;

    let registry = connect(&node.config.kubelet_registry_dir.join(super::server::REGISTRATION_SOCKET)).await;
    let info = RegistrationClient::new(registry).get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", "gpu.kerf.dev"));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1.DRAResourceHealth"]);
    assert!(info.endpoint.ends_with("gpu.kerf.dev/dra.sock"));

    let answer = prepare(&mut kubelet, "u").await;
    assert_eq!(answer.error, "");
    let device = &answer.devices[0];
    assert_eq!((device.pool_name.as_str(), device.device_name.as_str()), (NODE, DEVICE_1G));
    assert_eq!(device.request_names, ["r"]);
    assert_eq!(device.cdi_device_ids, [crate::cdi::device_id("u", DEVICE_1G, None)]);
    assert!(node.cdi().path("u").exists());
    assert_eq!(node.state.prepared.snapshot().len(), 1);
    assert_eq!(prepare(&mut kubelet, "u").await, answer, "idempotent");

    node.answer(Ok(None));
    assert_eq!(unprepare(&mut kubelet, "u").await, "", "the claim is gone from the API server");
    assert_eq!(unprepare(&mut kubelet, "u").await, "", "idempotent");
    assert!(!node.cdi().path("u").exists());
    assert!(node.state.prepared.snapshot().is_empty());
    let (_, recovered) = Checkpoint::open(&node.config.state_dir, "boot-1", &node.cdi()).unwrap();
    assert!(recovered.claims.is_empty());
}

#[tokio::test]
async fn each_claim_of_a_batch_is_answered_by_itself() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", Duration::ZERO).await;
    let request = NodePrepareResourcesRequest { claims: asked(&["u", "stranger", "../../evil"]) };
    let answer = kubelet.node_prepare_resources(request).await.unwrap().into_inner();
    assert_eq!(answer.claims["u"].error, "");
    assert!(answer.claims["stranger"].error.contains("has UID u, not stranger"), "{:?}", answer.claims);
    assert!(answer.claims["../../evil"].error.contains("is not a UID"));
    let metrics = crate::metrics::scrape(&node.state).unwrap();
    for count in ["{result=\"prepared\"} 1\n", "{result=\"failed\"} 2\n"] {
        assert!(metrics.contains(&format!("kerf_claim_prepare_seconds_count{count}")), "{metrics}");
    }
    assert_eq!(node.state.prepared.snapshot().keys().collect::<Vec<_>>(), ["u"]);
}

#[tokio::test]
async fn prepare_waits_for_what_is_on_its_way() {
    let mut node = Node::new();
    node.answer(Ok(Some(claim("u", &[("r", DEVICE_1G)]))));
    let mut kubelet = node.start("boot-1", PATIENT).await;
    let state = node.state.clone();
    let mut waiting = kubelet.clone();
    let waiting = tokio::spawn(async move { prepare(&mut waiting, "u").await });
    // The first scan finds no instance; the spec comes after it; then the instance is made; its former holder goes last.
    let mut empty = inventory();
    empty.gpus[0].instances.clear();
    state.scan_requested().await;
    node.see(empty);
    tokio::task::yield_now().await;
    node.plan(spec(vec![partition("u", "r", Some(("1g.10gb", 4, 1)))]));
    tokio::task::yield_now().await;
    state.prepared.record(prepared_claim("former", &inventory())).unwrap();
    node.see(inventory());
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished(), "another claim holds the instance");
    state.prepared.remove("former");
    assert_eq!(waiting.await.unwrap().error, "");
    assert_eq!(unprepare(&mut kubelet, "u").await, "");
}

#[tokio::test]
async fn what_does_not_come_is_refused_with_the_last_reason() {
    let mut node = Node::new();
    node.ready();
    let mut empty = inventory();
    empty.gpus[0].instances.clear();
    node.see(empty);
    let mut kubelet = node.start("boot-1", Duration::from_millis(50)).await;
    let error = prepare(&mut kubelet, "u").await.error;
    assert!(error.contains("does not exist yet"), "{error}");
    node.see(inventory());
    node.answer(Err(ReadError("connection refused".into())));
    let error = prepare(&mut kubelet, "u").await.error;
    assert!(error.contains("ns/claim-u") && error.contains("connection refused"), "{error}");
    assert!(node.state.prepared.snapshot().is_empty());
    assert!(!node.cdi().path("u").exists());
}

#[tokio::test]
async fn the_api_server_may_come_back_late() {
    let mut node = Node::new();
    node.ready();
    let claim = std::mem::replace(&mut *node.answer.lock().unwrap(), Err(ReadError("away".into())));
    let mut kubelet = node.start("boot-1", PATIENT).await;
    let waiting = tokio::spawn(async move { prepare(&mut kubelet, "u").await });
    while node.reads.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    node.answer(claim);
    assert_eq!(waiting.await.unwrap().error, "");
}

#[tokio::test]
async fn a_prepared_claim_outlives_the_daemon_and_needs_no_api_server() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;
    let before = prepare(&mut kubelet, "u").await;
    node.kill().await;

    node.answer(Err(ReadError("away".into())));
    node.reads.store(0, Ordering::SeqCst);
    let mut kubelet = node.start("boot-1", PATIENT).await;
    assert_eq!(prepare(&mut kubelet, "u").await, before);
    assert_eq!(node.reads.load(Ordering::SeqCst), 0);
    assert_eq!(unprepare(&mut kubelet, "u").await, "");
}

#[tokio::test]
async fn after_a_reboot_prepare_waits_for_the_instance_and_notices_its_new_uuid() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;
    prepare(&mut kubelet, "u").await;
    node.kill().await;
    // /run is empty, and so are the GPUs.
    std::fs::remove_dir_all(&node.config.cdi_dir).unwrap();
    let mut empty = inventory();
    empty.gpus[0].instances.clear();
    node.see(empty);

    let mut kubelet = node.start("boot-2", PATIENT).await;
    let waiting = tokio::spawn(async move { prepare(&mut kubelet, "u").await });
    node.state.scan_requested().await;
    assert!(!waiting.is_finished());
    let mut rebuilt = inventory();
    rebuilt.gpus[0].instances[1].compute_instances[0].uuid = "MIG-new".into();
    node.see(rebuilt);
    assert_eq!(waiting.await.unwrap().error, "");
    let spec = std::fs::read_to_string(node.cdi().path("u")).unwrap();
    assert!(spec.contains("KERF_DEVICE_R=MIG-new"), "{spec}");
    assert_eq!(node.state.prepared.snapshot()["u"].devices[0].uuid, "MIG-new");
}

#[tokio::test]
async fn a_crash_between_any_two_writes_is_recovered() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;
    let answer = prepare(&mut kubelet, "u").await;
    let record = node.config.state_dir.join("prepared/u.json");
    assert!(record.exists(), "written before the answer, whatever the CDI spec carries");
    let spec = node.cdi().path("u");
    let whole = std::fs::read(&spec).unwrap();
    for (record_left, spec_left) in [(true, true), (true, false), (false, true)] {
        node.kill().await;
        if !record_left {
            std::fs::remove_file(&record).unwrap();
        }
        if !spec_left {
            std::fs::remove_file(&spec).unwrap();
        }
        let mut kubelet = node.start("boot-1", PATIENT).await;
        assert_eq!(prepare(&mut kubelet, "u").await, answer, "record {record_left}, spec {spec_left}");
        assert!(record.exists());
        assert_eq!(std::fs::read(&spec).unwrap(), whole);
    }
    // A spec that belongs to no claim is removed, once it is known that no claim was forgotten.
    node.kill().await;
    std::fs::write(node.cdi().path("orphan"), "{}").unwrap();
    node.start("boot-1", PATIENT).await;
    while node.cdi().path("orphan").exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(spec.exists());
}

#[tokio::test]
async fn what_only_the_report_knows_is_restored() {
    use kerf_crds::GpuNodeStatus;
    use kerf_crds::gpu_node::{Gpu, Instance, Placement};

    let node = Node::new();
    let (checkpoint, recovered) = Checkpoint::open(&node.config.state_dir, "boot-1", &node.cdi()).unwrap();
    assert!(recovered.lost);
    let geometry = inventory().gpus[0].geometry.as_deref().cloned().unwrap();
    let status = GpuNodeStatus {
        gpus: vec![Gpu {
            name: "gpu-00000000".into(),
            uuid: GPU0.into(),
            geometry: Some(geometry.name.clone()),
            instances: vec![Instance {
                profile: "1g.10gb".into(),
                placement: Placement { start: 4, size: 1 },
                uuid: Some("MIG-9".into()),
                claims: vec![reference("u")],
                ..Instance::default()
            }],
            ..Gpu::default()
        }],
        geometries: vec![geometry],
        ..GpuNodeStatus::default()
    };
    let spec = spec(vec![partition("u", "r", Some(("1g.10gb", 4, 1)))]);
    let claims = claims_in_status(&spec, &status);
    assert_eq!(claims["u"], prepared_claim("u", &inventory()));
    assert_eq!(restore(&node.state, &checkpoint, claims.clone()).unwrap(), 1);
    assert_eq!(restore(&node.state, &checkpoint, claims).unwrap(), 0, "idempotent");
    let (_, again) = Checkpoint::open(&node.config.state_dir, "boot-1", &node.cdi()).unwrap();
    assert!(again.claims.contains_key("u"));
    assert_eq!(claims_in_status(&Default::default(), &status)["u"].devices[0].request, "");

    // A share of the instance; its compute is reported in percent of the instance's.
    let mut status = status;
    let gpu = &mut status.gpus[0];
    let placement = gpu.instances[0].placement;
    gpu.shares = vec![kerf_crds::gpu_node::Share {
        id: "s".into(),
        placement: Some(placement),
        memory_bytes: 5,
        compute_percent: 70,
        claims: std::mem::take(&mut gpu.instances[0].claims),
        ..Default::default()
    }];
    let device = claims_in_status(&spec, &status)["u"].devices[0].clone();
    assert_eq!(device.key, DeviceKey::instance(GPU0, placement).with_share("s"));
    assert_eq!((device.device, device.uuid.as_str()), (format!("{DEVICE_1G}-share"), "MIG-9"));
    assert_eq!(device.share.unwrap().compute_milli, 10_000, "70 % of 14 of 98");
    drop(node.directory);
}

#[tokio::test]
async fn a_claim_that_kubelet_forgot_is_taken_back_when_it_is_gone_and_unused_at_two_looks() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;
    prepare(&mut kubelet, "u").await;
    let allocated = node.answer.lock().unwrap().clone();
    node.kill().await;
    let preparer = node.preparer("boot-1");
    let (none, suspected) = (BTreeSet::new(), BTreeSet::from(["u".to_owned()]));
    let is_kept = |after: BTreeSet<String>, why: &str| {
        assert_eq!(after, none, "{why}");
        assert!(node.state.prepared.snapshot().contains_key("u") && node.cdi().path("u").exists(), "{why}");
    };
    node.state.kubelet.send_replace(Kubelet::Registered);

    is_kept(preparer.look_for_stale(&suspected).await, "the claim is there");
    node.answer(Err(ReadError("away".into())));
    is_kept(preparer.look_for_stale(&suspected).await, "nobody knows");
    node.answer(Ok(None));
    let mut used = inventory();
    used.gpus[0].instances[1].processes = vec![crate::inventory::Process::default()];
    node.see(used);
    is_kept(preparer.look_for_stale(&suspected).await, "a process is there");
    node.see(Inventory { unavailable: Some(Default::default()), ..inventory() });
    is_kept(preparer.look_for_stale(&suspected).await, "nobody sees whether one is there");
    node.see(inventory());
    node.state.kubelet.send_replace(Kubelet::Unheard);
    is_kept(preparer.look_for_stale(&suspected).await, "kubelet may still come and ask");
    node.state.kubelet.send_replace(Kubelet::Registered);

    let another = claim("another", &[("r", DEVICE_1G)]);
    let mut free = allocated.unwrap().unwrap();
    free.status.as_mut().unwrap().allocation = None;
    for gone in [None, Some(another), Some(free)] {
        node.answer(Ok(gone));
        assert_eq!(preparer.look_for_stale(&none).await, suspected);
        assert!(node.state.prepared.snapshot().contains_key("u"), "once is not enough");
    }
    assert_eq!(preparer.look_for_stale(&suspected).await, none);
    assert!(node.state.prepared.snapshot().is_empty());
    assert!(!node.cdi().path("u").exists() && !node.config.state_dir.join("prepared/u.json").exists());
    preparer.unprepare("u").await.expect("kubelet may still ask");
}

#[tokio::test]
async fn a_claim_of_an_earlier_boot_that_is_gone_is_taken_back_at_once() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;
    prepare(&mut kubelet, "u").await;
    node.kill().await;
    let preparer = node.preparer("boot-2");
    assert!(preparer.look_for_stale(&BTreeSet::new()).await.is_empty());
    assert!(node.state.prepared.snapshot().contains_key("u"), "the claim is there");
    node.answer(Ok(None));
    preparer.look_for_stale(&BTreeSet::new()).await;
    assert!(node.state.prepared.snapshot().is_empty());
}

#[tokio::test]
async fn kubelet_hears_of_health_at_once() {
    let mut node = Node::new();
    node.ready();
    node.start("boot-1", PATIENT).await;
    let channel = connect(&node.config.kubelet_plugins_dir.join("gpu.kerf.dev/dra.sock")).await;
    let mut stream = DraResourceHealthClient::new(channel)
        .node_watch_resources(NodeWatchResourcesRequest {})
        .await
        .unwrap()
        .into_inner();
    let health = |devices: &[super::proto::health::DeviceHealth]| {
        let device = devices.iter().find(|d| d.device.as_ref().unwrap().device_name == DEVICE_1G).unwrap();
        (device.health(), device.message.clone())
    };
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!(health(&first.devices), (HealthStatus::Healthy, String::new()));
    let mut broken = inventory();
    let why = kerf_crds::gpu_node::Reason { reason: "Xid94".into(), message: "contained".into() };
    broken.gpus[0].instances[1].unhealthy = Some(why);
    node.see(broken);
    let second = stream.message().await.unwrap().unwrap();
    assert_eq!(health(&second.devices), (HealthStatus::Unhealthy, "Xid94: contained".into()));
    let daemon = node.daemon.take().unwrap();
    daemon.stop.send_replace(true);
    drop(stream);
    daemon.task.await.unwrap().unwrap();
}

#[tokio::test]
async fn it_is_known_whether_kubelet_knows_the_plugin() {
    use super::proto::registration::RegistrationStatus;
    use crate::node::Kubelet;

    let mut node = Node::new();
    node.ready();
    node.start("boot-1", PATIENT).await;
    let mut kubelet = node.state.kubelet.subscribe();
    assert_eq!(*kubelet.borrow(), Kubelet::Unheard);
    let registry = connect(&node.config.kubelet_registry_dir.join(super::server::REGISTRATION_SOCKET)).await;
    let mut registry = RegistrationClient::new(registry);
    let mut notify = async |plugin_registered: bool| {
        let error = if plugin_registered { String::new() } else { "why".to_owned() };
        let status = RegistrationStatus { plugin_registered, error };
        registry.notify_registration_status(status).await.unwrap();
    };
    notify(false).await;
    assert_eq!(*kubelet.borrow(), Kubelet::Refused("why".into()));
    notify(true).await;
    assert_eq!(*kubelet.borrow(), Kubelet::Registered);

    // kubelet goes; another comes, and watches before the daemon hears that one of the old watches has ended.
    let service = node.config.kubelet_plugins_dir.join("gpu.kerf.dev/dra.sock");
    let watch = async || {
        let mut client = DraResourceHealthClient::new(connect(&service).await);
        let mut stream =
            client.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
        stream.message().await.unwrap().unwrap();
        stream
    };
    drop(watch().await);
    kubelet.wait_for(|kubelet| *kubelet == Kubelet::Unheard).await.unwrap();
    let old = watch().await;
    let new = watch().await;
    assert_eq!(*kubelet.borrow(), Kubelet::Registered);
    drop(old);
    drop(new);
    kubelet.wait_for(|kubelet| *kubelet == Kubelet::Unheard).await.unwrap();
    notify(true).await;
    assert_eq!(*kubelet.borrow(), Kubelet::Registered);
}

#[tokio::test]
async fn a_missing_toolkit_is_told_with_the_remedy() {
    let mut node = Node::new();
    node.ready();
    let mut kubelet = node.start("boot-1", PATIENT).await;
    prepare(&mut kubelet, "u").await;
    let Some(Some(trouble)) = node.state.toolkit.borrow().clone() else { panic!("no trouble") };
    assert_eq!(trouble.reason, "NotFound");
    for part in ["Install the NVIDIA Container Toolkit", "--nvidia-ctk", "host/usr/bin/nvidia-ctk"] {
        assert!(trouble.message.contains(part), "{}", trouble.message);
    }
}
