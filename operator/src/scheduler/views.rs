//! What is worked out of each node alone, kept from cycle to cycle: an unchanged node costs a comparison.
//!
//! A view is a function of the objects in [`From`], of the policies' specs and of the classes, and is made anew as soon
//! as one of them is another object than the one that it was made from; where it is the policies, only what comes of
//! them. Nothing is counted up or down.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::iter::Peekable;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kerf_crds::gpu_node::{self, Gpu, GpuNodeStatus, Owner, Partition, Sharing};
use kerf_crds::{GpuNode, PartitionPolicy};
use kerf_planner::protocol::{Step, Waiting, next};
use kerf_planner::snapshot::{Geometry, GeometryIndex, GpuIndex, Node};

use super::claims;
use super::memory::Memory;
use super::placements::{self, Here, Key};
use super::requests;
use super::snapshot;
use super::tell;
use crate::cache::{Group, NodeInfo, PodInfo, World};
use crate::controller::desired::Problems;
use crate::controller::matching::{Matcher, Matches, OfNode};

/// The objects that a view is made from.
#[derive(Clone, Debug, Default)]
struct From {
    gpu_node: Option<Arc<GpuNode>>,
    node: Option<Arc<NodeInfo>>,
    /// Pods bound there.
    pods: Option<Group<PodInfo>>,
    /// Claims allocated there.
    claims: Option<Group<ResourceClaim>>,
    /// Other claims of those pods, by key.
    others: Vec<(String, Option<Arc<ResourceClaim>>)>,
}

fn same<T>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (None, None) => true,
        _ => false,
    }
}

impl From {
    fn is(&self, world: &World, now: &Now<'_>) -> bool {
        same(self.gpu_node.as_ref(), now.here.node)
            && same(self.pods.as_ref(), now.here.pods)
            && same(self.claims.as_ref(), now.here.claims)
            && same(self.node.as_ref(), now.node)
            && self.others.iter().all(|(key, claim)| same(claim.as_ref(), world.claims.get(key)))
    }
}

/// The same as they are now.
struct Now<'w> {
    name: &'w str,
    here: Here<'w>,
    node: Option<&'w Arc<NodeInfo>>,
}

/// What is worked out of a node.
#[derive(Debug)]
pub struct View {
    name: String,
    from: From,
    pub matches: OfNode,
    /// Numbers of its geometries in [`Views::geometries`], by their place in the report.
    geometries: Vec<usize>,
    /// The planner's node with what is bound there, where no reservation is on record.
    contents: Option<Arc<Node>>,
    /// Some reservation is on record.
    pub reserved: bool,
    settled: bool,
    /// For these warm instances, and no placement that comes or goes, its spec is as it is to be; and what stands in the
    /// way of the policies.
    pub composed: RefCell<Option<(Vec<Partition>, Problems)>>,
    /// One GPU of each kind that is there, and the number of the kind.
    pub kinds: Vec<(usize, GpuIndex)>,
}

impl View {
    /// The node's object.
    pub fn gpu_node(&self) -> Option<&Arc<GpuNode>> {
        self.from.gpu_node.as_ref()
    }

    /// Every placement there runs, and every pod bound there has what it was bound for.
    pub fn settled(&self) -> bool {
        self.settled
    }

    /// The pods bound there.
    pub fn pods(&self) -> Option<&Group<PodInfo>> {
        self.from.pods.as_ref()
    }

    /// Its placements, on record or only allocated.
    fn keys(&self) -> Vec<Key> {
        placements::of_node(&self.name, self.gpu_node().map(|node| &**node), self.from.claims.as_ref())
    }
}

/// Views of all nodes that there is anything of.
#[derive(Debug, Default)]
pub struct Views {
    /// In the order of their names.
    all: Vec<View>,
    policies: Vec<Arc<PartitionPolicy>>,
    classes: Vec<Arc<DeviceClass>>,
    /// Every geometry that has been met.
    met: Vec<Geometry>,
    /// What nodes have reported of geometries, and the number in `met`: most report what another has.
    reports: Vec<(gpu_node::Geometry, usize)>,
    /// Those that are there, in the order in which nodes report them; numbers in `met`.
    order: Vec<usize>,
    matches: Arc<Matches>,
    /// Every kind of GPU that has been met.
    kinds: Vec<Kind>,
}

/// What selectors can tell GPUs apart by, the single GPU aside.
#[derive(Debug)]
struct Kind {
    product: String,
    geometry: Option<gpu_node::Geometry>,
    memory: u64,
    driver: String,
    cuda: String,
    sharing: Option<Sharing>,
}

impl Kind {
    fn of(status: &GpuNodeStatus, gpu: &Gpu) -> Self {
        Self {
            product: gpu.product.clone(),
            geometry: status.geometry_of(gpu).cloned(),
            memory: gpu.memory_bytes,
            sharing: gpu.sharing.clone(),
            driver: status.driver_version.clone(),
            cuda: status.cuda_version.clone(),
        }
    }

    /// Whether it is that of the GPU.
    fn is_of(&self, status: &GpuNodeStatus, gpu: &Gpu) -> bool {
        let Self { product, geometry, memory, driver, cuda, sharing } = self;
        (product, *memory, driver, cuda, sharing)
            == (&gpu.product, gpu.memory_bytes, &status.driver_version, &status.cuda_version, &gpu.sharing)
            && geometry.as_ref() == status.geometry_of(gpu)
    }
}

/// Walks along objects in the order of their names.
struct Beside<'w, T: 'w, I: Iterator<Item = (&'w str, &'w Arc<T>)>>(Peekable<I>);

impl<'w, T: 'w, I: Iterator<Item = (&'w str, &'w Arc<T>)>> Beside<'w, T, I> {
    fn at(&mut self, name: &str) -> Option<&'w Arc<T>> {
        while self.0.next_if(|(other, _)| *other < name).is_some() {}
        self.0.next_if(|(other, _)| *other == name).map(|(_, one)| one)
    }
}

impl Views {
    /// Made anew.
    pub fn of(world: &World) -> Self {
        let mut views = Self::default();
        views.refresh(world);
        views
    }

    /// Makes them those of this world.
    pub fn refresh(&mut self, world: &World) {
        let same_classes = world.classes.len() == self.classes.len()
            && self.classes.iter().zip(world.classes.iter()).all(|(a, b)| Arc::ptr_eq(a, b));
        // First: what is forgotten with them is not what policies are compared with.
        if !same_classes {
            *self = Self { classes: world.classes.iter().cloned().collect(), ..Self::default() };
        }
        let policies: Vec<&Arc<PartitionPolicy>> =
            world.policies.iter().filter(|policy| policy.metadata.deletion_timestamp.is_none()).collect();
        // Their status and their labels are nothing that a view is made from.
        let alike = |(a, b): (&Arc<PartitionPolicy>, &&Arc<PartitionPolicy>)| {
            Arc::ptr_eq(a, b) || (a.metadata.name == b.metadata.name && a.spec == b.spec)
        };
        let same_policies =
            policies.len() == self.policies.len() && self.policies.iter().zip(&policies).all(alike);
        if !same_policies {
            self.policies = policies.into_iter().cloned().collect();
        }
        self.remake(world, !same_policies);
        self.renumber();
    }

    fn remake(&mut self, world: &World, other_policies: bool) {
        let policies = std::mem::take(&mut self.policies);
        let matcher = Matcher::of(&policies);
        let mut known = std::mem::take(&mut self.all).into_iter().peekable();
        let mut gpu_nodes = world
            .gpu_nodes
            .iter()
            .map(|node| (node.metadata.name.as_deref().unwrap_or_default(), node))
            .peekable();
        let bound = |(name, _): &(&str, _)| *name != PodInfo::NOWHERE;
        let mut pods =
            world.pods.groups().map(|(name, group)| (name.as_str(), group)).filter(bound).peekable();
        let mut claims = world.claims.groups().map(|(name, group)| (name.as_str(), group)).peekable();
        let mut nodes = Beside(world.nodes.iter().map(|node| (node.name.as_str(), node)).peekable());
        loop {
            let names = [
                gpu_nodes.peek().map(|(name, _)| *name),
                pods.peek().map(|(name, _)| *name),
                claims.peek().map(|(name, _)| *name),
            ];
            let Some(name) = names.into_iter().flatten().min() else { break };
            let here = Here {
                node: gpu_nodes.next_if(|(other, _)| *other == name).map(|(_, node)| node),
                pods: pods.next_if(|(other, _)| *other == name).map(|(_, group)| group),
                claims: claims.next_if(|(other, _)| *other == name).map(|(_, group)| group),
            };
            let now = Now { name, here, node: nodes.at(name) };
            let mut view = None;
            while let Some(old) = known.next_if(|old| old.name.as_str() <= name) {
                match old.name.as_str().cmp(name) {
                    Ordering::Equal => view = Some(old),
                    _ => self.forget(&old),
                }
            }
            let view = match view {
                Some(mut view) if view.from.is(world, &now) => {
                    if other_policies {
                        self.set_policies(&mut view, &matcher);
                    }
                    view
                }
                _ => {
                    let mut view = self.make(world, &now);
                    self.set_policies(&mut view, &matcher);
                    view
                }
            };
            self.all.push(view);
        }
        for old in known {
            self.forget(&old);
        }
        drop(matcher);
        self.policies = policies;
    }

    fn forget(&mut self, old: &View) {
        Arc::make_mut(&mut self.matches).remove(&old.name);
    }

    /// What of a view comes of the policies.
    fn set_policies(&mut self, view: &mut View, matcher: &Matcher<'_>) {
        let From { gpu_node, node, .. } = &view.from;
        let matches = gpu_node.as_ref().map(|gpu_node| matcher.node(gpu_node, node.as_deref()));
        match &matches {
            Some(matches) => {
                Arc::make_mut(&mut self.matches).insert(view.name.clone(), Arc::clone(matches));
            }
            None if self.matches.contains_key(&view.name) => {
                Arc::make_mut(&mut self.matches).remove(&view.name);
            }
            None => {}
        }
        view.matches = matches.unwrap_or_default();
        view.contents = None;
        view.composed.take();
    }

    /// What of a view comes of the objects alone.
    fn make(&mut self, world: &World, now: &Now<'_>) -> View {
        let here = now.here;
        let mut from = From {
            gpu_node: here.node.cloned(),
            node: now.node.cloned(),
            pods: here.pods.cloned(),
            claims: here.claims.cloned(),
            others: Vec::new(),
        };
        let settled = is_settled(world, now, &mut from.others);
        let status = here.node.and_then(|node| node.status.as_ref());
        let geometries = status.map(|status| self.geometries_of(status)).unwrap_or_default();
        let kinds = status.map(|status| self.kinds_of(status)).unwrap_or_default();
        let mut entries = here.node.into_iter().flat_map(|node| &node.spec.partitions);
        View {
            name: now.name.to_owned(),
            matches: OfNode::default(),
            geometries,
            contents: None,
            reserved: entries.any(|entry| matches!(entry.owner, Owner::Reservation(_))),
            settled,
            composed: RefCell::default(),
            kinds,
            from,
        }
    }

    /// Numbers in `met` of what a node reports, in the order of [`snapshot::reported`].
    fn geometries_of(&mut self, status: &GpuNodeStatus) -> Vec<usize> {
        let mut numbers = Vec::with_capacity(status.geometries.len());
        for reported in &status.geometries {
            let known = self.reports.iter().find(|(known, _)| known == reported).map(|(_, number)| *number);
            numbers.push(known.unwrap_or_else(|| {
                let number = self.number(snapshot::convert(reported));
                self.reports.push((reported.clone(), number));
                number
            }));
        }
        for uncut in snapshot::all_uncut(status) {
            let number = self.number(uncut);
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
        numbers
    }

    fn number(&mut self, geometry: Geometry) -> usize {
        self.met.iter().position(|known| *known == geometry).unwrap_or_else(|| {
            self.met.push(geometry);
            self.met.len() - 1
        })
    }

    /// One GPU of each kind on a node, and the number of the kind.
    fn kinds_of(&mut self, status: &GpuNodeStatus) -> Vec<(usize, GpuIndex)> {
        let mut kinds: Vec<(usize, GpuIndex)> = Vec::new();
        let alike = |a: &Gpu, b: &Gpu| {
            (&a.product, &a.geometry, a.memory_bytes, &a.sharing)
                == (&b.product, &b.geometry, b.memory_bytes, &b.sharing)
        };
        for (index, gpu) in status.gpus.iter().enumerate() {
            if kinds.iter().any(|&(_, other)| alike(&status.gpus[other], gpu)) {
                continue;
            }
            let number = self.kinds.iter().position(|kind| kind.is_of(status, gpu)).unwrap_or_else(|| {
                self.kinds.push(Kind::of(status, gpu));
                self.kinds.len() - 1
            });
            if !kinds.iter().any(|(known, _)| *known == number) {
                kinds.push((number, index));
            }
        }
        kinds
    }

    /// Numbers geometries in the order in which nodes report them, as a look at all of them would, and makes the nodes
    /// that are missing.
    fn renumber(&mut self) {
        let mut order: Vec<usize> = Vec::new();
        for &geometry in self.all.iter().flat_map(|view| &view.geometries) {
            if !order.contains(&geometry) {
                order.push(geometry);
            }
        }
        if order != self.order {
            self.order = order;
            self.all.iter_mut().for_each(|view| view.contents = None);
        }
        let geometries = self.geometries();
        let number =
            |geometry: &usize| self.order.iter().position(|known| known == geometry).unwrap_or_default();
        for view in self.all.iter_mut().filter(|view| view.contents.is_none() && !view.reserved) {
            let here: Vec<GeometryIndex> = view.geometries.iter().map(number).collect();
            view.contents = view.make_contents(&geometries, &here, |_| false).map(Arc::new);
        }
    }

    /// All views.
    pub fn all(&self) -> &[View] {
        &self.all
    }

    /// Those of nodes with GPUs, in the order of the snapshot's nodes.
    pub fn nodes(&self) -> impl Iterator<Item = (&View, &Arc<GpuNode>)> {
        self.all.iter().filter_map(|view| Some((view, view.gpu_node()?)))
    }

    /// Which policies match which GPU.
    pub fn matches(&self) -> &Arc<Matches> {
        &self.matches
    }

    /// The geometries that there are, as a snapshot numbers them.
    pub fn geometries(&self) -> Vec<Geometry> {
        self.order.iter().map(|&geometry| self.met[geometry].clone()).collect()
    }

    /// The planner's node of a view; `binds`: which reservations keep their slices from everybody.
    pub fn contents(
        &self,
        view: &View,
        geometries: &[Geometry],
        binds: impl Fn(&kerf_crds::gpu_node::Reservation) -> bool,
    ) -> Arc<Node> {
        if let Some(contents) = &view.contents {
            return Arc::clone(contents);
        }
        let number =
            |geometry: &usize| self.order.iter().position(|known| known == geometry).unwrap_or_default();
        let here: Vec<GeometryIndex> = view.geometries.iter().map(number).collect();
        view.make_contents(geometries, &here, binds).map(Arc::new).unwrap_or_default()
    }

    /// Placements that have a step before them, or may have: those of nodes on which not all run.
    pub fn to_look_at(&self, world: &World) -> (BTreeSet<Key>, Vec<&View>) {
        let (mut keys, mut looked_at) = (BTreeSet::new(), Vec::new());
        // Where the pod is bound that also has a record elsewhere: only both together show which counts.
        let mut elsewhere: BTreeSet<String> = BTreeSet::new();
        for view in self.all.iter().filter(|view| !view.settled) {
            for key in view.keys() {
                let pod = world.pod(&key.namespace, &key.pod, &key.pod_uid);
                elsewhere.extend(pod.and_then(|pod| pod.node.clone()).filter(|node| *node != key.node));
                keys.insert(key);
            }
            looked_at.push(view);
        }
        for name in elsewhere {
            let found = self.all.binary_search_by(|view| view.name.as_str().cmp(&name));
            keys.extend(found.ok().map(|index| self.all[index].keys()).into_iter().flatten());
        }
        (keys, looked_at)
    }
}

impl View {
    fn make_contents(
        &self,
        geometries: &[Geometry],
        here: &[GeometryIndex],
        binds: impl Fn(&kerf_crds::gpu_node::Reservation) -> bool,
    ) -> Option<Node> {
        let gpu_node = self.gpu_node()?;
        let reported = gpu_node.status.iter().flat_map(|status| &status.geometries);
        let here = reported.map(|geometry| geometry.name.as_str()).zip(here.iter().copied()).collect();
        let mut node = snapshot::node(
            self.from.node.as_deref(),
            gpu_node,
            &self.name,
            &self.matches,
            &binds,
            geometries,
            &here,
        );
        for pod in self.pods().into_iter().flat_map(|pods| pods.values()).filter(|pod| !pod.done) {
            snapshot::take_away(&mut node.free_milli, &pod.milli);
        }
        Some(node)
    }
}

/// Whether no placement on the node has a step before it, and every pod bound there has what it was bound for, as long as
/// the objects that a view is made from stay as they are. `others`: claims of those pods that are not allocated there.
fn is_settled(world: &World, now: &Now<'_>, others: &mut Vec<(String, Option<Arc<ResourceClaim>>)>) -> bool {
    let pods = now.here.pods.into_iter().flat_map(|pods| pods.values());
    for pod in pods.filter(|pod| pod.detail.is_some() && !pod.done && !pod.deleting) {
        for name in
            pod.detail.iter().flat_map(|detail| &detail.claims).filter_map(|claim| claim.claim.as_ref())
        {
            let key = [&pod.namespace, "/", name].concat();
            if now.here.claims.is_some_and(|claims| claims.contains_key(&key)) {
                continue;
            }
            let claim = world.claims.get(&key).cloned();
            let other_drivers = claim.as_ref().is_some_and(|claim| {
                claims::allocation(claim).is_some_and(|allocation| claims::pool(allocation).is_none())
                    && !requests::claim_is_for_kerf(world, claim)
            });
            if !other_drivers {
                return false;
            }
            others.push((key, claim));
        }
    }
    let nothing = Memory::default();
    let runs = |key: &Key| {
        let seen = placements::look_at(world, now.here, &nothing, key);
        let its_own = seen.pod.as_ref().is_some_and(|pod| pod.uid == key.pod_uid);
        its_own && next(&seen.observed) == Step::Wait(Waiting::Running) && !tell::still_waits(&seen)
    };
    placements::all_on_node(now.name, now.here.node.map(|node| &**node), now.here.claims, runs)
}

#[cfg(test)]
#[path = "views_tests.rs"]
mod tests;
