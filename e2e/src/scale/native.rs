//! kube-scheduler on its own: whole GPUs as extended resources, and MIG instances as partitionable devices in the layout
//! of NVIDIA's DRA driver.

use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kerf_crds::gpu_node::{Geometry, GpuNode};
use kube::api::{Api, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::phase::{Measured, Phase};
use super::{MIX, each, fleet};
use crate::cluster::{Cluster, ClusterOptions, Component};
use crate::install::apply_yaml;
use crate::wait::{Seen, eventually};

const NAMESPACE: &str = "native";
const DRIVER: &str = "gpu.example.com";
/// Devices of a slice that draw on counters, at most.
const DEVICES: usize = 64;
const PATIENCE: Duration = Duration::from_secs(1800);
const QUIET: Duration = Duration::from_secs(5);

/// A control plane without nodes, as all measurements have it.
///
/// # Errors
/// It does not start.
pub async fn cluster() -> Result<Cluster> {
    let control_plane = fleet::control_plane();
    Cluster::start(ClusterOptions { nodes: Vec::new(), control_plane, ..ClusterOptions::default() }).await
}

/// One whole GPU for each pod, as an extended resource.
///
/// # Errors
/// They are not all bound.
pub async fn whole_gpus(nodes: usize, pods: usize) -> Result<Measured> {
    let cluster = cluster().await?;
    let kwok = fleet::start(&cluster, nodes, &json!({ "nvidia.com/gpu": "8" })).await?;
    let pods = (0..pods).map(|number| {
        fleet::pod(&format!("whole-{number}"), json!({}), json!({ "limits": { "nvidia.com/gpu": "1" } }))
    });
    scheduled(&cluster, kwok.pid(), pods.collect(), 0).await
}

/// MIG instances, which kube-scheduler allocates itself. `like`: the GPUs of a node of Kerf's.
///
/// # Errors
/// They are not all bound.
pub async fn partitionable(nodes: usize, pods: usize, like: &GpuNode) -> Result<Measured> {
    let cluster = cluster().await?;
    let client = cluster.client();
    let kwok = fleet::start(&cluster, nodes, &json!({})).await?;
    let status = like.status.as_ref().context("the node has not reported")?;
    let geometry = status.geometries.first().context("the node's GPUs cannot be cut")?;
    let slices: Vec<Value> = (0..nodes)
        .flat_map(|number| slices(&fleet::node_name(number), geometry, status.gpus.len()))
        .collect();
    let api: Api<ResourceSlice> = Api::all(client.clone());
    each(slices, |slice| {
        let api = api.clone();
        async move {
            let slice = serde_json::from_value(slice)?;
            api.create(&PostParams::default(), &slice).await.context("failed to create a slice")
        }
    })
    .await?;
    fleet::namespace(&client, NAMESPACE, false).await?;
    let class = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": "mig.example.com" },
        "spec": { "selectors": [{ "cel": {
            "expression": format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'mig'"),
        } }] },
    });
    let template = |profile: &str| {
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": { "name": template_name(profile), "namespace": NAMESPACE },
            "spec": { "spec": { "devices": { "requests": [{ "name": "mig", "exactly": {
                "deviceClassName": "mig.example.com",
                "selectors": [{ "cel": {
                    "expression": format!("device.attributes['{DRIVER}'].profile == '{profile}'"),
                } }],
            } }] } } },
        })
    };
    let objects: Vec<Value> = [class].into_iter().chain(MIX.map(template)).collect();
    apply_yaml(&client, &json!({ "kind": "List", "items": objects }).to_string()).await?;
    let claims = pods;
    let pods = (0..pods).map(|number| {
        let spec = json!({ "resourceClaims": [
            { "name": "mig", "resourceClaimTemplateName": template_name(MIX[number % MIX.len()]) },
        ] });
        fleet::pod(&format!("mig-{number}"), spec, json!({ "claims": [{ "name": "mig" }] }))
    });
    scheduled(&cluster, kwok.pid(), pods.collect(), claims).await
}

fn template_name(profile: &str) -> String {
    format!("mig-{profile}")
}

/// Creates the pods without a scheduler, and starts it when everything else has been done.
async fn scheduled(
    cluster: &Cluster,
    kwok: Option<u32>,
    pods: Vec<Value>,
    claims: usize,
) -> Result<Measured> {
    let client = cluster.client();
    cluster.stop(Component::Scheduler).await?;
    if !exists(&client).await? {
        fleet::namespace(&client, NAMESPACE, false).await?;
    }
    let count = pods.len();
    fleet::create_pods(&client, NAMESPACE, pods).await?;
    let api: Api<ResourceClaim> = Api::namespaced(client.clone(), NAMESPACE);
    eventually(PATIENCE, format!("{claims} claims"), || async {
        let made = api.list_metadata(&Default::default()).await?.items.len();
        sleep(Duration::from_millis(500)).await;
        Ok(Seen::when(made, |made| *made >= claims))
    })
    .await?;
    sleep(QUIET).await;
    let mut phase = Phase::begin(cluster, &[("kwok", kwok)]).await?;
    cluster.start_component(Component::Scheduler).await?;
    let scheduler = eventually(PATIENCE, "kube-scheduler's process", || async {
        Ok(cluster.pid(Component::Scheduler).await.map_or_else(|| Seen::not_yet("none"), Seen::Yes))
    })
    .await?;
    phase.add("kube-scheduler", scheduler);
    phase.bound(cluster, count, PATIENCE).await
}

async fn exists(client: &Client) -> Result<bool> {
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(client.clone());
    Ok(namespaces.list(&Default::default()).await?.iter().any(|one| one.name_any() == NAMESPACE))
}

/// The slices of a node: counters of each GPU in one, then all GPUs and all places of all profiles as devices that draw
/// on them.
fn slices(node: &str, geometry: &Geometry, gpus: usize) -> Vec<Value> {
    let counter = |value: u64| json!({ "value": value.to_string() });
    let engines = |engines: kerf_crds::gpu_node::Engines| {
        json!({
            "copy-engines": counter(engines.copy.into()), "decoders": counter(engines.decoder.into()),
            "encoders": counter(engines.encoder.into()), "jpeg-engines": counter(engines.jpeg.into()),
            "ofa-engines": counter(engines.ofa.into()),
        })
    };
    let memory_slice = |index: u32| format!("memory-slice-{index}");
    let mut whole = engines(geometry.engines);
    whole["multiprocessors"] = counter(geometry.multiprocessors.into());
    for index in 0..geometry.memory_slices {
        whole[memory_slice(index)] = counter(1);
    }
    let counter_set = |gpu: usize| format!("gpu-{gpu}-counters");
    let sets: Vec<Value> =
        (0..gpus).map(|gpu| json!({ "name": counter_set(gpu), "counters": whole })).collect();
    let mut devices = Vec::new();
    for gpu in 0..gpus {
        let device = |name: String, kind: &str, profile: &str, memory: u64, counters: &Value| {
            json!({
                "name": name,
                "attributes": {
                    "type": { "string": kind }, "profile": { "string": profile }, "index": { "int": gpu },
                    "parentUUID": { "string": format!("GPU-{gpu:08}-0000-4000-8000-000000000000") },
                    "productName": { "string": geometry.name }, "brand": { "string": "Nvidia" },
                    "architecture": { "string": "Hopper" }, "cudaComputeCapability": { "version": "9.0.0" },
                    "driverVersion": { "version": "580.95.5" }, "cudaDriverVersion": { "version": "13.0.0" },
                },
                "capacity": {
                    "memory": { "value": memory.to_string() },
                    "multiprocessors": { "value": counters["multiprocessors"]["value"] },
                },
                "consumesCounters": [{ "counterSet": counter_set(gpu), "counters": counters }],
            })
        };
        let all = geometry.profiles.iter().map(|profile| profile.memory_bytes).max().unwrap_or_default();
        devices.push(device(format!("gpu-{gpu}"), "gpu", "", all, &whole));
        for profile in &geometry.profiles {
            for start in &profile.starts {
                let mut counters = engines(profile.engines);
                counters["multiprocessors"] = counter(profile.multiprocessors.into());
                for index in *start..start + profile.size {
                    counters[memory_slice(index)] = counter(1);
                }
                let name = format!("gpu-{gpu}-mig-{}-{start}", profile.id);
                devices.push(device(name, "mig", &profile.name, profile.memory_bytes, &counters));
            }
        }
    }
    let parts: Vec<&[Value]> = devices.chunks(DEVICES).collect();
    let count = parts.len() + 1;
    let slice = |index: usize, field: &str, content: Value| {
        let mut spec = json!({
            "driver": DRIVER, "nodeName": node,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": count },
        });
        spec[field] = content;
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
            "metadata": { "name": format!("{node}-{index}") }, "spec": spec,
        })
    };
    let of_devices =
        parts.into_iter().enumerate().map(|(index, part)| slice(index + 1, "devices", json!(part)));
    [slice(0, "sharedCounters", json!(sets))].into_iter().chain(of_devices).collect()
}
