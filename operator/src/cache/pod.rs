//! What is kept of a Pod. Every pod of the cluster counts against its node's CPU and memory, so every pod is here, but
//! only those that Kerf may have to place keep more than a few numbers.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::jiff::Timestamp;
use kerf_crds::gang::{self, Gang};
use kerf_crds::names;
use kerf_crds::requests::{self, OriginalResources};
use kerf_planner::snapshot::{NodeRequirement, Operator, PodNeeds, Toleration};

use super::store::Stored;
use super::{quantity, version_of};

/// A pod.
#[derive(Clone, Debug, Default)]
pub struct PodInfo {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub version: u64,
    /// When it was created, in seconds since 1970.
    pub created: i64,
    /// Being deleted.
    pub deleting: bool,
    /// Succeeded or Failed.
    pub done: bool,
    /// Where it is bound.
    pub node: Option<String>,
    pub priority: i32,
    /// What it takes of its node, in thousandths, `pods` included.
    pub milli: BTreeMap<String, i128>,
    /// Present: it has Kerf's gate, or refers to claims.
    pub detail: Option<Box<PodDetail>>,
}

/// What is kept of a pod that Kerf may have to place.
#[derive(Clone, Debug, Default)]
pub struct PodDetail {
    /// `spec.schedulingGates`.
    pub gates: Vec<String>,
    /// See [`host_access`].
    pub host_access: Option<String>,
    /// What the webhook noted of the pod's extended resources; an error if that cannot be read.
    pub original: Option<Result<OriginalResources, String>>,
    /// The claims, by their names in the pod.
    pub claims: Vec<PodClaim>,
    /// Everything but `milli`, which [`PodInfo::milli`] has.
    pub needs: PodNeeds,
    /// UID of its controller, which makes another in its place.
    pub controller: Option<String>,
    /// The gang that it is of; an error if that cannot be read.
    pub gang: Option<Result<Gang, String>>,
    /// Its owner lets it be moved, it is of no gang, and nothing that Kerf does not look at ties it to its node.
    pub movable: bool,
    /// How much its owner would rather keep it: `controller.kubernetes.io/pod-deletion-cost`.
    pub deletion_cost: i32,
    /// For the selectors of disruption budgets, where it is movable.
    pub labels: BTreeMap<String, String>,
    /// How long it may take to end, in seconds.
    pub grace_seconds: i64,
    /// `spec.preemptionPolicy` is not `Never`.
    pub preempts: bool,
    /// Kerf's condition: status, reason, message.
    pub planned: Option<(String, String, String)>,
    /// The message of `PodScheduled` while it is False.
    pub unschedulable: Option<String>,
    /// `status.nominatedNodeName`.
    pub nominated: Option<String>,
}

/// A claim that a pod refers to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodClaim {
    /// `spec.resourceClaims[].name`.
    pub name: String,
    /// Name of the ResourceClaim; `None` while the one from a template is not made yet.
    pub claim: Option<String>,
    /// It is made from a template.
    pub template: bool,
}

impl PodInfo {
    /// Where [`super::Store::of`] has those that are bound nowhere.
    pub const NOWHERE: &'static str = "";

    /// `namespace/name`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether Kerf's gate is on it.
    pub fn gated(&self) -> bool {
        self.detail.as_ref().is_some_and(|detail| detail.gates.iter().any(|gate| gate == names::GATE))
    }

    /// Whether Kerf has let it go: it had Kerf's gate, and has it no more.
    pub fn let_go(&self) -> bool {
        self.own_claim().is_some() && !self.gated()
    }

    /// Whether gates of others are on it.
    pub fn other_gates(&self) -> Vec<&str> {
        self.detail
            .iter()
            .flat_map(|detail| &detail.gates)
            .filter(|gate| *gate != names::GATE)
            .map(String::as_str)
            .collect()
    }

    /// The gang that it is of.
    pub fn gang(&self) -> Option<&Gang> {
        self.detail.as_ref()?.gang.as_ref()?.as_ref().ok()
    }

    /// The claim that the webhook has named for it.
    pub fn own_claim(&self) -> Option<&str> {
        let detail = self.detail.as_ref()?;
        detail.original.as_ref()?;
        detail.claims.iter().find(|claim| claim.name == names::POD_CLAIM)?.claim.as_deref()
    }
}

impl Stored for PodInfo {
    fn key(&self) -> String {
        self.id()
    }
    fn uid(&self) -> &str {
        &self.uid
    }
    fn version(&self) -> u64 {
        self.version
    }
    fn group(&self) -> Option<&str> {
        Some(self.node.as_deref().unwrap_or(Self::NOWHERE))
    }
}

/// The field by which a pod gets at the host's processes, where limits on it mean nothing.
pub fn host_access(spec: &PodSpec) -> Option<String> {
    if spec.host_pid.unwrap_or_default() {
        return Some("spec.hostPID".into());
    }
    if spec.host_ipc.unwrap_or_default() {
        return Some("spec.hostIPC".into());
    }
    let init = spec.init_containers.iter().flatten().enumerate().map(|one| ("initContainers", one));
    let apps = spec.containers.iter().enumerate().map(|one| ("containers", one));
    let privileged = |container: &Container| {
        container.security_context.as_ref().is_some_and(|context| context.privileged.unwrap_or_default())
    };
    init.chain(apps)
        .find(|(_, (_, container))| privileged(container))
        .map(|(list, (index, _))| format!("spec.{list}[{index}].securityContext.privileged"))
}

impl From<Pod> for PodInfo {
    fn from(pod: Pod) -> Self {
        let version = version_of(&pod.metadata);
        let metadata = pod.metadata;
        let spec = pod.spec.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let milli = pod_milli(&spec);
        let gates: Vec<String> =
            spec.scheduling_gates.iter().flatten().map(|gate| gate.name.clone()).collect();
        let annotation = |name: &str| metadata.annotations.as_ref().and_then(|all| all.get(name));
        let original = annotation(names::ORIGINAL_RESOURCES);
        let gang = gang::read(metadata.annotations.as_ref()).transpose();
        let movable = annotation(names::MOVABLE).is_some_and(|value| value == "true")
            && gang.is_none()
            && !is_tied(&spec);
        let detail = if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty())
            || gates.iter().any(|gate| gate == names::GATE)
        {
            let condition = |type_: &str| {
                status.conditions.iter().flatten().find(|condition| condition.type_ == type_).cloned()
            };
            let made: BTreeMap<&str, &Option<String>> = status
                .resource_claim_statuses
                .iter()
                .flatten()
                .map(|status| (status.name.as_str(), &status.resource_claim_name))
                .collect();
            Some(Box::new(PodDetail {
                host_access: host_access(&spec),
                original: original.map(|text| {
                    requests::parse(text)
                        .map_err(|error| format!("annotation {}: {error}", names::ORIGINAL_RESOURCES))
                }),
                claims: spec
                    .resource_claims
                    .iter()
                    .flatten()
                    .map(|claim| PodClaim {
                        name: claim.name.clone(),
                        claim: claim
                            .resource_claim_name
                            .clone()
                            .or_else(|| made.get(claim.name.as_str()).and_then(|name| (*name).clone())),
                        template: claim.resource_claim_name.is_none(),
                    })
                    .collect(),
                gates,
                controller: metadata
                    .owner_references
                    .iter()
                    .flatten()
                    .find(|owner| owner.controller.unwrap_or_default())
                    .map(|owner| owner.uid.clone()),
                gang,
                movable,
                deletion_cost: annotation(names::DELETION_COST)
                    .and_then(|cost| cost.parse().ok())
                    .unwrap_or_default(),
                labels: if movable { metadata.labels.clone().unwrap_or_default() } else { BTreeMap::new() },
                grace_seconds: spec.termination_grace_period_seconds.unwrap_or_default(),
                preempts: spec.preemption_policy.as_deref() != Some("Never"),
                planned: condition(kerf_crds::conditions::pod::PLANNED).map(|condition| {
                    (
                        condition.status,
                        condition.reason.unwrap_or_default(),
                        condition.message.unwrap_or_default(),
                    )
                }),
                unschedulable: condition("PodScheduled").and_then(|condition| {
                    (condition.status == "False" && condition.reason.as_deref() == Some("Unschedulable"))
                        .then(|| condition.message.unwrap_or_default())
                }),
                nominated: status.nominated_node_name.clone().filter(|name| !name.is_empty()),
                needs: needs(&spec),
            }))
        } else {
            None
        };
        Self {
            version,
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
            created: metadata.creation_timestamp.map_or(0, |time| time.0.as_second()),
            deleting: metadata.deletion_timestamp.is_some(),
            done: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            node: spec.node_name.filter(|name| !name.is_empty()),
            priority: spec.priority.unwrap_or_default(),
            milli,
            detail,
        }
    }
}

/// Whether something that Kerf does not look at decides where the pod can run: what comes in its place might find no node.
fn is_tied(spec: &PodSpec) -> bool {
    let volumes = spec.volumes.iter().flatten();
    let has_volume =
        volumes.into_iter().any(|v| v.persistent_volume_claim.is_some() || v.ephemeral.is_some());
    let affinity = spec.affinity.as_ref();
    let with = affinity.and_then(|all| all.pod_affinity.as_ref());
    let without = affinity.and_then(|all| all.pod_anti_affinity.as_ref());
    let near = with.and_then(|all| all.required_during_scheduling_ignored_during_execution.as_ref());
    let far = without.and_then(|all| all.required_during_scheduling_ignored_during_execution.as_ref());
    let spread = spec.topology_spread_constraints.iter().flatten();
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    has_volume
        || near.is_some_and(|terms| !terms.is_empty())
        || far.is_some_and(|terms| !terms.is_empty())
        || spread.into_iter().any(|constraint| constraint.when_unsatisfiable == "DoNotSchedule")
        || ports.into_iter().any(|port| port.host_port.is_some())
}

/// What the pod needs of a node besides room.
fn needs(spec: &PodSpec) -> PodNeeds {
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    let requirement = |key: &str, operator: &str, values: &Option<Vec<String>>| NodeRequirement {
        key: key.to_owned(),
        operator: match operator {
            "In" => Operator::In,
            "NotIn" => Operator::NotIn,
            "Exists" => Operator::Exists,
            "DoesNotExist" => Operator::DoesNotExist,
            "Gt" => Operator::Gt,
            _ => Operator::Lt,
        },
        values: values.clone().unwrap_or_default(),
    };
    PodNeeds {
        milli: BTreeMap::new(),
        node_selector: spec.node_selector.clone().unwrap_or_default(),
        affinity: required
            .map(|required| {
                required
                    .node_selector_terms
                    .iter()
                    .map(|term| {
                        let labels = term.match_expressions.iter().flatten();
                        // The one field that the API server allows here is `metadata.name`.
                        let fields = term.match_fields.iter().flatten();
                        labels
                            .map(|r| requirement(&r.key, &r.operator, &r.values))
                            .chain(fields.map(|r| requirement(NodeRequirement::NAME, &r.operator, &r.values)))
                            .collect()
                    })
                    // A term without requirements matches nothing.
                    .map(|term: Vec<NodeRequirement>| if term.is_empty() { vec![nowhere()] } else { term })
                    .collect()
            })
            .unwrap_or_default(),
        tolerations: spec
            .tolerations
            .iter()
            .flatten()
            .map(|toleration| Toleration {
                key: toleration.key.clone().unwrap_or_default(),
                exists: toleration.operator.as_deref() == Some("Exists"),
                value: toleration.value.clone().unwrap_or_default(),
                effect: toleration.effect.clone().unwrap_or_default(),
            })
            .collect(),
    }
}

/// A requirement that no node meets.
fn nowhere() -> NodeRequirement {
    NodeRequirement { key: NodeRequirement::NAME.into(), operator: Operator::In, values: Vec::new() }
}

/// What a pod takes of its node, as kube-scheduler counts it (`k8s.io/component-helpers/resource.PodRequests`): app
/// containers and sidecars together, or the greediest moment of the initialisation if that is more; requests of the
/// pod as a whole instead, where given; and the overhead of its runtime.
fn pod_milli(spec: &PodSpec) -> BTreeMap<String, i128> {
    let mut total: BTreeMap<String, i128> = BTreeMap::new();
    for container in &spec.containers {
        add(&mut total, &container_milli(container));
    }
    let mut sidecars: BTreeMap<String, i128> = BTreeMap::new();
    let mut initialising: BTreeMap<String, i128> = BTreeMap::new();
    for container in spec.init_containers.iter().flatten() {
        let own = container_milli(container);
        if container.restart_policy.as_deref() == Some("Always") {
            add(&mut total, &own);
            add(&mut sidecars, &own);
            raise(&mut initialising, &sidecars);
        } else {
            let mut moment = sidecars.clone();
            add(&mut moment, &own);
            raise(&mut initialising, &moment);
        }
    }
    raise(&mut total, &initialising);
    if let Some(resources) = &spec.resources {
        total.extend(requirements_milli(resources));
    }
    for (name, amount) in spec.overhead.iter().flatten() {
        *total.entry(name.clone()).or_default() += quantity::milli(amount).unwrap_or_default();
    }
    total.retain(|_, amount| *amount != 0);
    total.insert("pods".into(), 1000);
    total
}

fn container_milli(container: &Container) -> BTreeMap<String, i128> {
    container.resources.as_ref().map(requirements_milli).unwrap_or_default()
}

fn requirements_milli(resources: &ResourceRequirements) -> BTreeMap<String, i128> {
    let requests = resources.requests.iter().flatten();
    requests.filter_map(|(name, amount)| Some((name.clone(), quantity::milli(amount)?))).collect()
}

fn add(to: &mut BTreeMap<String, i128>, what: &BTreeMap<String, i128>) {
    for (name, amount) in what {
        *to.entry(name.clone()).or_default() += amount;
    }
}

fn raise(to: &mut BTreeMap<String, i128>, at_least: &BTreeMap<String, i128>) {
    for (name, amount) in at_least {
        let entry = to.entry(name.clone()).or_default();
        *entry = (*entry).max(*amount);
    }
}

/// Seconds since 1970 of an RFC 3339 time.
pub fn seconds(time: &str) -> Option<i64> {
    time.parse::<Timestamp>().ok().map(|time| time.as_second())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(value: serde_json::Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn requests_of_a_pod_follow_kube_scheduler() {
        let cpu = |amount: &str| json!({"requests": {"cpu": amount}});
        let app_wins = spec(json!({
            "containers": [{"name": "a", "resources": cpu("1")}, {"name": "b", "resources": cpu("500m")}],
            "initContainers": [{"name": "i", "resources": cpu("1")}],
            "overhead": {"cpu": "100m"},
        }));
        assert_eq!(pod_milli(&app_wins)["cpu"], 1600);
        let init_wins_beside_the_sidecar = spec(json!({
            "containers": [{"name": "a", "resources": cpu("1")}],
            "initContainers": [
                {"name": "s", "restartPolicy": "Always", "resources": cpu("1")},
                {"name": "i", "resources": cpu("3")},
            ],
        }));
        assert_eq!(pod_milli(&init_wins_beside_the_sidecar)["cpu"], 4000);
        let pod_level = spec(json!({
            "containers": [{"name": "a", "resources": cpu("1")}],
            "resources": cpu("2"),
        }));
        assert_eq!(pod_milli(&pod_level)["cpu"], 2000);
        assert_eq!(pod_milli(&spec(json!({"containers": []})))["pods"], 1000);
    }

    #[test]
    fn an_affinity_on_the_nodes_name_is_kept() {
        let daemon_set = spec(json!({
            "containers": [],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
            ]}}},
        }));
        let needs = needs(&daemon_set);
        assert_eq!(needs.affinity[0][0].key, NodeRequirement::NAME);
        assert_eq!(needs.affinity[0][0].values, ["n1"]);
    }

    #[test]
    fn a_pod_of_a_gang_is_not_movable() {
        let read = |annotations: serde_json::Value| {
            let pod = serde_json::from_value::<Pod>(json!({
                "metadata": {"name": "p", "namespace": "n", "annotations": annotations},
                "spec": {"containers": [], "schedulingGates": [{"name": names::GATE}]},
            }));
            PodInfo::from(pod.unwrap())
        };
        let alone = read(json!({names::MOVABLE: "true"}));
        assert!(alone.gang().is_none() && alone.detail.unwrap().movable);
        let of_gang = read(json!({names::MOVABLE: "true", names::GANG: "g", names::GANG_SIZE: "2"}));
        assert_eq!(of_gang.gang(), Some(&Gang { name: "g".into(), size: 2 }));
        assert!(!of_gang.detail.unwrap().movable);
        let odd = read(json!({names::GANG: "g"}));
        assert!(odd.gang().is_none() && odd.detail.unwrap().gang.unwrap().is_err());
    }

    #[test]
    fn an_unreadable_annotation_is_an_error_and_not_nothing() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "annotations": {names::ORIGINAL_RESOURCES: "{"}},
            "spec": {"containers": [], "schedulingGates": [{"name": names::GATE}]},
        }))
        .unwrap();
        let info = PodInfo::from(pod);
        assert!(info.gated());
        assert!(info.detail.unwrap().original.unwrap().is_err());
    }

    #[test]
    fn an_annotation_for_more_devices_than_a_claim_holds_is_an_error() {
        let original = |count: u32| {
            let original =
                json!({"containers": [{"name": "c", "resources": {"nvidia.com/mig-1g.10gb": count}}]});
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "p", "annotations": {names::ORIGINAL_RESOURCES: original.to_string()}},
                "spec": {"containers": [], "resourceClaims": [{"name": "c"}]},
            }))
            .unwrap();
            PodInfo::from(pod).detail.unwrap().original.unwrap()
        };
        assert!(original(32).is_ok());
        let refused = original(33).unwrap_err();
        assert!(refused.contains("asks for 33 devices"), "{refused}");
    }
}
