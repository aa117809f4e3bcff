//! Clusters to plan for.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use kerf_planner::snapshot::{
    Capability, DeviceNeed, Engines, Geometry, Gpu, Node, PodNeeds, Profile, Request, Snapshot, Taint, Want,
};

/// GPUs of a node in the online runs.
const GPUS: usize = 4;

/// A100 80 GB or H100 80 GB as the online workload has them: the six profiles that jobs ask for
/// (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html).
pub fn seven() -> Geometry {
    let shape = |name: &str, compute_slices, size, starts: &[u32], max_instances| Profile {
        name: name.into(),
        memory_bytes: u64::from(size) * (10 << 30),
        multiprocessors: 14 * compute_slices,
        compute_slices,
        size,
        starts: starts.to_vec(),
        max_instances,
        engines: Engines::default(),
    };
    Geometry {
        name: "7 compute, 8 memory slices".into(),
        memory_slices: 8,
        engines: Engines::default(),
        profiles: vec![
            shape("1g.10gb", 1, 1, &[0, 1, 2, 3, 4, 5, 6], 7),
            shape("1g.20gb", 1, 2, &[0, 2, 4, 6], 4),
            shape("2g.20gb", 2, 2, &[0, 2, 4], 3),
            shape("3g.40gb", 3, 4, &[0, 4], 2),
            shape("4g.40gb", 4, 4, &[0], 1),
            shape("7g.80gb", 7, 8, &[0], 1),
        ],
    }
}

/// So many empty GPUs of one model, and a request for each of its profiles.
pub fn online(gpus: usize) -> Snapshot {
    let geometry = seven();
    let node = |n: usize| Node {
        gpus: (0..GPUS.min(gpus - n * GPUS)).map(|g| gpu(n, g, 0, &geometry)).collect(),
        ..plain_node(n)
    };
    let request = |name: &str| Request {
        id: name.into(),
        devices: vec![need(std::slice::from_ref(&geometry), &|profile| profile.name == name)],
        pod: pod(1),
        ..Request::default()
    };
    Snapshot {
        nodes: (0..gpus.div_ceil(GPUS)).map(node).collect(),
        requests: geometry.profiles.iter().map(|profile| request(&profile.name)).collect(),
        geometries: vec![geometry],
        ..Snapshot::default()
    }
}

/// So many nodes of empty GPUs, a model each in turn, and a request for each need of memory in GiB and multiprocessors.
pub fn by_need(nodes: usize, geometries: &[Geometry], needs: &[(u64, u32)]) -> Snapshot {
    let node = |n: usize| {
        let index = n % geometries.len();
        Node { gpus: (0..GPUS).map(|g| gpu(n, g, index, &geometries[index])).collect(), ..plain_node(n) }
    };
    let request = |&(gib, multiprocessors): &(u64, u32)| Request {
        id: format!("{gib} GiB, {multiprocessors} SM"),
        devices: vec![need(geometries, &|profile| {
            profile.memory_bytes >= gib << 30 && profile.multiprocessors >= multiprocessors
        })],
        pod: pod(1),
        ..Request::default()
    };
    Snapshot {
        nodes: (0..nodes).map(node).collect(),
        requests: needs.iter().map(request).collect(),
        geometries: geometries.to_vec(),
        ..Snapshot::default()
    }
}

/// The geometries of an A100, an H100 and an RTX PRO 6000, from the simulator's models, which name their sources.
pub fn mixed() -> Result<Vec<Geometry>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/sim/models");
    let read = |id: &str| {
        let path = folder.join(format!("{id}.json"));
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let model: Model =
            serde_json::from_str(&text).with_context(|| format!("{} is no model", path.display()))?;
        Ok(model.geometry())
    };
    ["a100-80", "h100-80-sxm", "rtxpro6000-server"].into_iter().map(read).collect()
}

#[derive(serde::Deserialize)]
struct Model {
    id: String,
    mig: Mig,
}

#[derive(serde::Deserialize)]
struct Mig {
    memory_slices: u32,
    profiles: Vec<Row>,
}

#[derive(serde::Deserialize)]
struct Row {
    name: String,
    memory_mib: u64,
    sm: u32,
    slices: u32,
    size: u32,
    starts: Vec<u32>,
    max: u32,
    #[serde(default)]
    dec: u32,
    #[serde(default)]
    enc: u32,
    #[serde(default)]
    jpg: u32,
    #[serde(default)]
    ofa: u32,
}

impl Model {
    fn geometry(self) -> Geometry {
        let profile = |row: Row| Profile {
            memory_bytes: row.memory_mib << 20,
            multiprocessors: row.sm,
            compute_slices: row.slices,
            size: row.size,
            starts: row.starts,
            max_instances: row.max,
            engines: Engines { decoder: row.dec, encoder: row.enc, jpeg: row.jpg, ofa: row.ofa },
            name: row.name,
        };
        let profiles: Vec<Profile> = self.mig.profiles.into_iter().map(profile).collect();
        let most = |of: fn(&Engines) -> u32| profiles.iter().map(|p| of(&p.engines)).max().unwrap_or(0);
        let engines = Engines {
            decoder: most(|e| e.decoder),
            encoder: most(|e| e.encoder),
            jpeg: most(|e| e.jpeg),
            ofa: most(|e| e.ofa),
        };
        Geometry { name: self.id, memory_slices: self.mig.memory_slices, engines, profiles }
    }
}

/// So many nodes of eight GPUs, a model each in turn; one in ten nodes has a taint, and there are three zones.
pub fn large(nodes: usize, geometries: &[Geometry]) -> Snapshot {
    let node = |n: usize| {
        let index = n % geometries.len();
        let taint = Taint { key: "team".into(), value: "x".into(), effect: "NoSchedule".into() };
        Node {
            gpus: (0..8).map(|g| gpu(n, g, index, &geometries[index])).collect(),
            taints: n.is_multiple_of(10).then_some(taint).into_iter().collect(),
            labels: BTreeMap::from([("zone".to_owned(), ["a", "b", "c"][n / 3 % 3].to_owned())]).into(),
            ..plain_node(n)
        }
    };
    Snapshot {
        geometries: geometries.to_vec(),
        nodes: (0..nodes).map(node).collect(),
        requests: Vec::new(),
        ..Snapshot::default()
    }
}

/// A need of one device for which all these profiles would do.
pub fn need(geometries: &[Geometry], fitting: &dyn Fn(&Profile) -> bool) -> DeviceNeed {
    let of = |geometry: &Geometry| {
        (0..geometry.profiles.len()).filter(|&p| fitting(&geometry.profiles[p])).collect()
    };
    let want = Want {
        count: 1,
        label: "an instance".into(),
        profiles: geometries.iter().map(of).enumerate().collect(),
        ..Want::default()
    };
    DeviceNeed { name: "gpu".into(), alternatives: vec![want] }
}

/// A pod that needs so many processors.
pub fn pod(cpus: i128) -> PodNeeds {
    let milli = [("cpu", 1000 * cpus), ("memory", (8 << 30) * 1000), ("pods", 1000)];
    PodNeeds { milli: milli.map(|(name, needs)| (name.to_owned(), needs)).into(), ..PodNeeds::default() }
}

fn plain_node(n: usize) -> Node {
    let free = [("cpu", 128_000), ("memory", (1024 << 30) * 1000), ("pods", 110_000)];
    Node {
        name: format!("node-{n:06}"),
        ready: true,
        free_milli: free.map(|(name, milli)| (name.to_owned(), milli)).into(),
        ..Node::default()
    }
}

fn gpu(node: usize, gpu: usize, geometry: usize, of: &Geometry) -> Gpu {
    Gpu {
        uuid: format!("GPU-{node:08}-{gpu}"),
        geometry: Some(geometry),
        mig: Capability::Now,
        allowed: (0..of.profiles.len()).collect(),
        ..Gpu::default()
    }
}
