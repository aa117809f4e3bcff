//! Shares on the openb trace (Alibaba, cluster-trace-gpu-v2023), or on files with the same columns: pods come in random
//! order and stay, until as many GPUs are asked for as there are. What counts is the share of the GPUs that is allocated.
//!
//! The trace states no licence, so it is read from where the user has it; `samples/openb` is made up.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use kerf_planner::fleet::Fleet;
use kerf_planner::snapshot::{
    Capability, Demand, DeviceNeed, Geometry, Gpu, Node, PodNeeds, Portion, Request, Snapshot, Want,
};
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use crate::numbers;
use crate::published;

/// A GPU, in thousandths.
const GPU: u64 = 1000;

#[derive(Deserialize)]
struct NodeRow {
    sn: String,
    cpu_milli: i128,
    memory_mib: i128,
    gpu: usize,
    model: String,
}

#[derive(Deserialize)]
struct PodRow {
    cpu_milli: i128,
    memory_mib: i128,
    num_gpu: u32,
    gpu_milli: u64,
    /// Models that will do, with `|` between; not in all lists.
    #[serde(default)]
    gpu_spec: String,
}

/// A list of pods and the cluster for them.
#[derive(Debug)]
pub struct Trace {
    /// The nodes; its requests are the kinds of pods, and its demand says how often they come.
    pub snapshot: Snapshot,
    /// By kind: thousandths of GPUs.
    pub asks: Vec<u64>,
    /// The pods, by kind.
    pub pods: Vec<usize>,
    /// Thousandths of GPUs that there are.
    pub capacity: u64,
}

fn rows<T: for<'de> Deserialize<'de>>(file: &Path) -> Result<Vec<T>> {
    let mut reader =
        csv::Reader::from_path(file).with_context(|| format!("cannot read {}", file.display()))?;
    let rows: std::result::Result<Vec<T>, csv::Error> = reader.deserialize().collect();
    rows.with_context(|| format!("{} has not the columns of the openb trace", file.display()))
}

impl Trace {
    /// Reads nodes and pods.
    pub fn read(nodes: &Path, pods: &Path) -> Result<Self> {
        let nodes: Vec<NodeRow> = rows(nodes)?;
        let pods: Vec<PodRow> = rows(pods)?;
        let mut models: Vec<&str> =
            nodes.iter().map(|node| node.model.as_str()).filter(|m| !m.is_empty()).collect();
        models.sort_unstable();
        models.dedup();
        let model = |name: &str| models.binary_search(&name).ok();
        let mut snapshot = Snapshot {
            geometries: models
                .iter()
                .map(|&name| Geometry { name: name.into(), ..Geometry::default() })
                .collect(),
            nodes: nodes.iter().map(|row| node(row, model(&row.model))).collect(),
            ..Snapshot::default()
        };
        let capacity = nodes.iter().map(|node| GPU * node.gpu as u64).sum();
        let mut kinds: HashMap<Request, usize> = HashMap::new();
        let (mut asks, mut weights, mut of_pods) = (Vec::new(), Vec::new(), Vec::new());
        for row in &pods {
            let request = request(row, models.len(), model);
            let kind = *kinds.entry(request.clone()).or_insert_with(|| {
                snapshot.requests.push(request);
                asks.push(if row.num_gpu == 0 { 0 } else { u64::from(row.num_gpu) * row.gpu_milli });
                weights.push(0);
                asks.len() - 1
            });
            weights[kind] += 1;
            of_pods.push(kind);
        }
        if capacity == 0 || asks.iter().all(|&milli| milli == 0) {
            bail!("there are no GPUs, or no pod asks for one");
        }
        let demand = snapshot.requests.iter().zip(weights);
        snapshot.demand =
            demand.map(|(request, weight)| Demand { request: request.clone(), weight }).collect();
        Ok(Self { snapshot, asks, pods: of_pods, capacity })
    }

    /// Kinds of pods in the order in which they come: the list in random order, again and again, until so many GPUs are
    /// asked for as there are.
    pub fn arrivals(&self, seed: u64) -> Vec<usize> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (mut arrivals, mut asked_for) = (Vec::new(), 0);
        loop {
            let mut pods = self.pods.clone();
            pods.shuffle(&mut random);
            for kind in pods {
                asked_for += self.asks[kind];
                if asked_for > self.capacity {
                    return arrivals;
                }
                arrivals.push(kind);
            }
        }
    }
}

fn node(row: &NodeRow, model: Option<usize>) -> Node {
    let room = Portion { memory_bytes: 0, compute_milli: GPU, clients: 1000 };
    let gpu = |index: usize| Gpu {
        uuid: format!("{}-{index}", row.sn),
        geometry: model,
        shared: Capability::Now,
        share_room: [(None, room)].into(),
        ..Gpu::default()
    };
    let free = [("cpu", row.cpu_milli), ("memory", (row.memory_mib << 20) * 1000), ("pods", 1_000_000)];
    Node {
        name: row.sn.clone(),
        ready: true,
        free_milli: free.map(|(name, milli)| (name.to_owned(), milli)).into(),
        gpus: (0..row.gpu).map(gpu).collect(),
        ..Node::default()
    }
}

fn request(row: &PodRow, models: usize, model: impl Fn(&str) -> Option<usize>) -> Request {
    let portion = Portion { memory_bytes: 0, compute_milli: row.gpu_milli, clients: 1 };
    let named: Vec<&str> = row.gpu_spec.split('|').filter(|name| !name.is_empty()).collect();
    // Of a model that no node has nobody can have one.
    let will_do: Vec<usize> =
        if named.is_empty() { (0..models).collect() } else { named.into_iter().filter_map(model).collect() };
    let want = Want {
        count: row.num_gpu,
        label: format!("{} thousandths of a GPU", row.gpu_milli),
        shares: will_do.into_iter().map(|model| ((model, None), portion)).collect(),
        ..Want::default()
    };
    let need = DeviceNeed { name: "gpu".into(), alternatives: vec![want] };
    let milli = [("cpu", row.cpu_milli), ("memory", (row.memory_mib << 20) * 1000), ("pods", 1000)];
    Request {
        devices: if row.num_gpu == 0 { Vec::new() } else { vec![need] },
        pod: PodNeeds {
            milli: milli.map(|(name, needs)| (name.to_owned(), needs)).into(),
            ..PodNeeds::default()
        },
        ..Request::default()
    }
}

/// Allocated GPUs in percent, by Kerf.
pub fn kerf(trace: &Trace, arrivals: &[usize]) -> f64 {
    let mut fleet = Fleet::of(&trace.snapshot);
    let asked: Vec<_> = trace.snapshot.requests.iter().map(|request| fleet.numbered(request)).collect();
    let mut allocated = 0;
    for &kind in arrivals {
        if let Some((node, place)) = fleet.best(asked[kind]) {
            fleet.take(asked[kind], node, &place);
            allocated += trace.asks[kind];
        }
    }
    100.0 * allocated as f64 / trace.capacity as f64
}

/// Policies made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Any node, any GPU.
    Random,
    /// The first node, the first GPU.
    FirstFit,
    /// The node, and of it the GPU, with the least left.
    BestFit,
}

impl Rule {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Random, Self::FirstFit, Self::BestFit];

    /// For tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::FirstFit => "first-fit",
            Self::BestFit => "best-fit",
        }
    }
}

/// Allocated GPUs in percent, by one of the others.
pub fn rival(trace: &Trace, rule: Rule, arrivals: &[usize], seed: u64) -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let nodes = &trace.snapshot.nodes;
    let mut gpus: Vec<Vec<u64>> = nodes.iter().map(|node| vec![GPU; node.gpus.len()]).collect();
    let mut free: Vec<[i128; 2]> =
        nodes.iter().map(|node| ["cpu", "memory"].map(|name| node.free_milli[name])).collect();
    let most =
        ["cpu", "memory"].map(|name| nodes.iter().map(|node| node.free_milli[name]).max().unwrap_or(1));
    let mut allocated = 0;
    for &kind in arrivals {
        let request = &trace.snapshot.requests[kind];
        let needs = ["cpu", "memory"].map(|name| request.pod.milli[name]);
        let want = request.devices.first().map(|need| &need.alternatives[0]);
        let count = want.map_or(0, |want| want.count as usize);
        let milli = trace.asks[kind] / (count as u64).max(1);
        let mut best: Option<(f64, usize, Vec<usize>)> = None;
        for (index, node) in nodes.iter().enumerate() {
            let model = node.gpus.first().and_then(|gpu| gpu.geometry);
            let will_do =
                want.is_none_or(|want| model.is_some_and(|model| want.shares.contains_key(&(model, None))));
            if !will_do || needs.iter().zip(&free[index]).any(|(needs, free)| needs > free) {
                continue;
            }
            let mut fitting: Vec<usize> =
                (0..gpus[index].len()).filter(|&gpu| gpus[index][gpu] >= milli).collect();
            if fitting.len() < count {
                continue;
            }
            match rule {
                Rule::Random => fitting.shuffle(&mut random),
                Rule::FirstFit => {}
                Rule::BestFit => fitting.sort_by_key(|&gpu| gpus[index][gpu]),
            }
            fitting.truncate(count);
            let score = match rule {
                Rule::Random => random.random::<f64>(),
                Rule::FirstFit => 0.0,
                Rule::BestFit => {
                    let left = gpus[index].iter().sum::<u64>() as f64 / (8 * GPU) as f64;
                    (0..2).map(|i| (free[index][i] - needs[i]) as f64 / most[i] as f64).sum::<f64>() + left
                }
            };
            if best.as_ref().is_none_or(|(lowest, ..)| score < *lowest) {
                best = Some((score, index, fitting));
            }
        }
        if let Some((_, index, fitting)) = best {
            free[index].iter_mut().zip(needs).for_each(|(free, needs)| *free -= needs);
            fitting.into_iter().for_each(|gpu| gpus[index][gpu] -= milli);
            allocated += trace.asks[kind];
        }
    }
    100.0 * allocated as f64 / trace.capacity as f64
}

/// All lists in the folder, by list and policy: a table.
pub fn table(folder: &Path, seeds: &[u64]) -> Result<String> {
    let mut lists = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let list = name.strip_prefix("openb_pod_list_").and_then(|name| name.strip_suffix(".csv"));
        lists.extend(list.map(str::to_owned));
    }
    lists.sort();
    if lists.is_empty() {
        bail!("{} has no openb_pod_list_….csv", folder.display());
    }
    let mut table = "| list |".to_owned();
    for name in published::POLICIES {
        _ = write!(table, " {name} |");
    }
    for rule in Rule::ALL {
        _ = write!(table, " {} |", rule.name());
    }
    table += " **Kerf** | Kerf − FGD |\n|---|";
    table += &"---|".repeat(published::POLICIES.len() + Rule::ALL.len() + 2);
    for list in lists {
        let pods = folder.join(format!("openb_pod_list_{list}.csv"));
        let trace = Trace::read(&folder.join("openb_node_list_gpu_node.csv"), &pods)?;
        let said = published::LISTS.iter().find(|(name, _)| *name == list).map(|(_, values)| values);
        let arrivals: Vec<Vec<usize>> = seeds.iter().map(|&seed| trace.arrivals(seed)).collect();
        _ = write!(table, "\n| {list} |");
        for index in 0..published::POLICIES.len() {
            let value = said.map_or("–".to_owned(), |values| format!("{:.2}", values[index]));
            _ = write!(table, " {value} |");
        }
        for rule in Rule::ALL {
            let of = |(arrivals, &seed): (&Vec<usize>, &u64)| rival(&trace, rule, arrivals, seed);
            let values: Vec<f64> = arrivals.iter().zip(seeds).map(of).collect();
            _ = write!(table, " {:.2} |", numbers::mean(&values).0);
        }
        let values: Vec<f64> = arrivals.iter().map(|arrivals| kerf(&trace, arrivals)).collect();
        let mean = numbers::mean(&values).0;
        let ahead = said
            .map_or("–".to_owned(), |said| format!("{:+.2}", mean - said[published::POLICIES.len() - 1]));
        _ = write!(table, " **{}** | {ahead} |", numbers::text(&values));
    }
    Ok(table)
}
