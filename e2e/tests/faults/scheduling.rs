//! What Kerf chose and what kube-scheduler then finds are two moments: between them CPU goes, nodes are cordoned, pods are
//! preempted and kubelet restarts. The pod runs in the end, every wait has its reason, and nothing is written in circles.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_crds::gpu_node::Owner;
use kerf_e2e::audit::count;
use kerf_e2e::images::BOX;
use kerf_e2e::install::apply_yaml;
use kerf_e2e::kerf::{
    Kerf, KerfOptions, PATIENCE, Running, alone, for_node, gpu_pod, mig, no_overlap, on, pod_of,
};
use kerf_e2e::{Component, Seen, eventually, wait_pod_phase};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

/// Long enough for a loop of writes to show.
const WATCHED: Duration = Duration::from_secs(8);
/// Most writes about one waiting pod in that time: conditions, an event or two.
const FEW: usize = 6;

/// Two nodes with one GPU each.
struct Pair {
    kerf: Arc<Kerf>,
    nodes: [&'static str; 2],
    /// CPU of which a node has room for one pod, in thousandths.
    most: u64,
}

impl Pair {
    async fn new(kerf: Arc<Kerf>, nodes: [&'static str; 2]) -> Result<Self> {
        for node in nodes {
            kerf.policy(node, for_node(node, json!({ "mode": "Dynamic" }))).await?;
        }
        let node = Api::<Node>::all(kerf.client()).get(nodes[0]).await?;
        let cpu = node.status.and_then(|status| status.allocatable).unwrap_or_default();
        let cores: u64 = cpu.get("cpu").context("the node has no CPU")?.0.parse()?;
        let yaml = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": { "name": "urgent" },
            "value": 1000,
        });
        apply_yaml(&kerf.client(), &yaml.to_string()).await?;
        Ok(Self { kerf, nodes, most: cores * 600 })
    }

    fn client(&self) -> Client {
        self.kerf.client()
    }

    fn other(&self, node: &str) -> &'static str {
        if self.nodes[0] == node { self.nodes[1] } else { self.nodes[0] }
    }

    /// A GPU pod that needs most of a node's CPU.
    fn gpu_pod(&self, name: &str) -> Pod {
        let mut pod = gpu_pod(name, &[(&mig("2g.20gb"), 1)]);
        if let Some(spec) = &mut pod.spec {
            let resources = spec.containers[0].resources.get_or_insert_default();
            resources.requests = Some(BTreeMap::from([("cpu".to_owned(), self.cpu())]));
        }
        pod
    }

    fn cpu(&self) -> k8s_openapi::apimachinery::pkg::api::resource::Quantity {
        k8s_openapi::apimachinery::pkg::api::resource::Quantity(format!("{}m", self.most))
    }

    /// Takes most of a node's CPU, past kube-scheduler.
    async fn fill(&self, namespace: &str, name: &str, node: &str) -> Result<()> {
        let container = json!({
            "name": "main", "image": BOX, "imagePullPolicy": "Never", "command": ["sleep", "3600"],
            "resources": { "requests": { "cpu": self.cpu() } },
        });
        let mut pod = pod_of(name, vec![container]);
        pod.spec.get_or_insert_default().node_name = Some(node.to_owned());
        self.kerf.create_pod(namespace, &pod).await?;
        Ok(())
    }

    /// Waits until the pod has its place and no gate, and says on which node.
    async fn wait_placed(&self, namespace: &str, name: &str) -> Result<String> {
        eventually(PATIENCE, format!("pod {namespace}/{name} placed"), || async {
            let pod = self.kerf.pods(namespace).get(name).await?;
            let gated =
                pod.spec.iter().flat_map(|spec| &spec.scheduling_gates).any(|gates| !gates.is_empty());
            let place = self.place(&pod).await?;
            Ok(match place {
                Some(node) if !gated => Seen::Yes(node),
                place => Seen::NotYet(format!("gated: {gated}, placed on {place:?}")),
            })
        })
        .await
    }

    /// The node whose spec has an entry for the pod.
    async fn place(&self, pod: &Pod) -> Result<Option<String>> {
        let uid = pod.uid().unwrap_or_default();
        let nodes = self.kerf.gpu_nodes().list(&ListParams::default()).await?;
        let mut places = nodes.items.into_iter().filter(|node| {
            let owners = node.spec.partitions.iter().map(|partition| &partition.owner);
            owners.into_iter().any(|owner| matches!(owner, Owner::Claim(owner) if owner.pod_uid == uid))
        });
        let place = places.next().map(|node| node.name_any());
        ensure!(places.next().is_none(), "pod {} has places on two nodes", pod.name_any());
        Ok(place)
    }

    /// Waits until Kerf says of the pod, with this reason, a sentence with this in it.
    async fn wait_told(&self, namespace: &str, pod: &str, reason: &str, part: &str) -> Result<String> {
        eventually(PATIENCE, format!("pod {namespace}/{pod} told {reason}: …{part}…"), || async {
            Ok(match self.kerf.planned(namespace, pod).await? {
                Some((_, found, message)) if found == reason && message.contains(part) => Seen::Yes(message),
                other => Seen::NotYet(format!("{other:?}")),
            })
        })
        .await
    }

    /// Fails if writes about the namespace's objects, or by Kerf, go on and on. What kubelets write is about other pods.
    async fn ensure_quiet(&self, namespace: &str) -> Result<()> {
        let seen = self.kerf.cluster.audit()?.len();
        tokio::time::sleep(WATCHED).await;
        let all = self.kerf.cluster.audit()?;
        let about = |write: &&kerf_e2e::audit::Write| {
            write.resource != "leases"
                && !write.user.starts_with("system:node:")
                && (write.namespace == namespace || write.user.contains("kerf-system:operator"))
        };
        let writes: Vec<_> = all.iter().skip(seen).filter(about).cloned().collect();
        ensure!(writes.len() <= FEW, "{} writes in {WATCHED:?}: {:?}", writes.len(), count(&writes));
        Ok(())
    }

    async fn cordon(&self, node: &str) -> Result<()> {
        self.kerf.cluster.kubectl(&["cordon", node]).await?;
        Ok(())
    }

    async fn uncordon(&self, node: &str) -> Result<()> {
        self.kerf.cluster.kubectl(&["uncordon", node]).await?;
        Ok(())
    }

    /// Keeps one GPU pod alive, made of `template`.
    async fn replica_set(&self, namespace: &str, name: &str, template: Pod) -> Result<()> {
        let mut spec = serde_json::to_value(template.spec)?;
        spec["restartPolicy"] = json!("Always");
        let set: ReplicaSet = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": {
                "replicas": 1, "selector": { "matchLabels": { "set": name } },
                "template": { "metadata": { "labels": { "set": name } }, "spec": spec },
            },
        }))?;
        let sets: Api<ReplicaSet> = Api::namespaced(self.client(), namespace);
        sets.create(&PostParams::default(), &set).await?;
        Ok(())
    }

    /// Pods of a set, without those that are over.
    async fn members(&self, namespace: &str, set: &str) -> Result<Vec<Pod>> {
        let list =
            self.kerf.pods(namespace).list(&ListParams::default().labels(&format!("set={set}"))).await?;
        let over = |pod: &Pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Failed" | "Succeeded"))
        };
        Ok(list.items.into_iter().filter(|pod| !over(pod)).collect())
    }

    /// Waits until the set has a pod that is not over, other than `not`, and names it.
    async fn wait_member(&self, namespace: &str, set: &str, not: &str) -> Result<String> {
        eventually(PATIENCE, format!("a pod of {set} other than {not:?}"), || async {
            let members = self.members(namespace, set).await?;
            let other = members.iter().map(|pod| pod.name_any()).find(|name| name != not);
            Ok(other.map_or_else(|| Seen::not_yet(members.len()), Seen::Yes))
        })
        .await
    }

    /// Waits until a pod of the set runs.
    async fn wait_member_running(&self, namespace: &str, set: &str) -> Result<Running> {
        let pod = eventually(PATIENCE, format!("a running pod of {set}"), || async {
            let members = self.members(namespace, set).await?;
            let running = |pod: &&Pod| {
                pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
            };
            Ok(members.iter().find(running).cloned().map_or_else(
                || Seen::NotYet(members.iter().map(describe).collect::<Vec<_>>().join("; ")),
                Seen::Yes,
            ))
        })
        .await?;
        self.kerf.inspect(&pod).await
    }

    async fn delete_set(&self, namespace: &str, set: &str) -> Result<()> {
        let sets: Api<ReplicaSet> = Api::namespaced(self.client(), namespace);
        sets.delete(set, &DeleteParams::foreground()).await?;
        eventually(PATIENCE, format!("set {set} gone"), || async {
            Ok(sets.get_opt(set).await?.map_or(Seen::Yes(()), |_| Seen::not_yet("still there")))
        })
        .await
    }

    /// Binds a pod as a kube-scheduler does that decided a moment ago.
    async fn bind_late(&self, namespace: &str, pod: &str, node: &str) -> Result<()> {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": pod },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        });
        let request = http_post(&format!("/api/v1/namespaces/{namespace}/pods/{pod}/binding"), &binding)?;
        self.client().request::<Value>(request).await.context("failed to bind the pod")?;
        Ok(())
    }

    /// Every pod that is bound has its place on that node, and no slice is in two of them.
    async fn ensure_sound(&self, namespace: &str) -> Result<()> {
        let mut running = Vec::new();
        for pod in self.kerf.pods(namespace).list(&ListParams::default()).await? {
            let uses_gpu = pod.spec.as_ref().is_some_and(|spec| spec.resource_claims.is_some());
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
            if !uses_gpu || phase == "Failed" || phase == "Succeeded" {
                continue;
            }
            let place = self.place(&pod).await?;
            ensure!(
                place.as_ref() == Some(&node),
                "{} is bound to {node}, placed on {place:?}",
                pod.name_any()
            );
            if phase == "Running" {
                running.push(self.kerf.inspect(&pod).await?);
            }
        }
        no_overlap(&running)
    }

    /// Deletes what a scenario made and waits until nothing of it is left.
    async fn clear(&self, namespace: &str, pods: &[&str]) -> Result<()> {
        self.ensure_sound(namespace).await?;
        for pod in pods {
            self.kerf.delete_pod(namespace, pod).await?;
        }
        self.kerf.wait_no_leak(namespace).await
    }
}

fn http_post(path: &str, body: &Value) -> Result<axum::http::Request<Vec<u8>>> {
    Ok(axum::http::Request::post(path)
        .header("Content-Type", "application/json")
        .body(serde_json::to_vec(body)?)?)
}

fn describe(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let conditions = status.conditions.unwrap_or_default();
    let open = conditions.iter().filter(|condition| condition.status != "True");
    let open: Vec<String> =
        open.map(|c| format!("{}: {}", c.type_, c.message.as_deref().unwrap_or_default())).collect();
    format!("{} {} {open:?}", pod.name_any(), status.phase.unwrap_or_default())
}

fn pair<F, Fut>(nodes: [&'static str; 2], test: F)
where
    F: FnOnce(Pair) -> Fut + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    let options = KerfOptions::nodes(&nodes.map(|node| (node, "h100-80-sxm", 1)));
    alone(options, move |kerf| async move { test(Pair::new(kerf, nodes).await?).await });
}

#[test]
fn cpu_that_is_gone_when_kube_scheduler_looks() {
    pair(["cpu-a", "cpu-b"], |pair| async move {
        let namespace = pair.kerf.namespace("cpu").await?;
        gone_on_the_chosen_node(&pair, &namespace).await.context("gone on the chosen node")?;
        gone_while_nobody_decides(&pair, &namespace).await.context("gone while the operator is away")?;
        gone_everywhere_before(&pair, &namespace).await.context("gone everywhere before the choice")?;
        gone_everywhere_after(&pair, &namespace).await.context("gone everywhere after the choice")?;
        gone_while_binding(&pair, &namespace).await.context("gone while kube-scheduler binds")
    });
}

async fn gone_on_the_chosen_node(pair: &Pair, namespace: &str) -> Result<()> {
    pair.kerf.cluster.stop(Component::Scheduler).await?;
    pair.kerf.create_pod(namespace, &pair.gpu_pod("moved")).await?;
    let home = pair.wait_placed(namespace, "moved").await?;
    pair.fill(namespace, "filler", &home).await?;
    pair.kerf.cluster.start_component(Component::Scheduler).await?;
    let running = pair.kerf.wait_running(namespace, "moved").await?;
    ensure!(running.node == pair.other(&home), "{running:?}, placed on {home} first");
    pair.clear(namespace, &["moved", "filler"]).await
}

/// kube-scheduler throws the allocation away, and the next operator knows nothing of what was before.
async fn gone_while_nobody_decides(pair: &Pair, namespace: &str) -> Result<()> {
    pair.kerf.cluster.stop(Component::Scheduler).await?;
    pair.kerf.create_pod(namespace, &pair.gpu_pod("left")).await?;
    let home = pair.wait_placed(namespace, "left").await?;
    pair.kerf.stop_operator("operator", Duration::ZERO).await?;
    pair.fill(namespace, "filler", &home).await?;
    pair.kerf.cluster.start_component(Component::Scheduler).await?;
    let claims: Api<ResourceClaim> = Api::namespaced(pair.client(), namespace);
    eventually(PATIENCE, "the allocation thrown away", || async {
        let claims = claims.list(&ListParams::default()).await?.items;
        let allocated =
            claims.iter().filter(|claim| claim.status.as_ref().is_some_and(|s| s.allocation.is_some()));
        Ok(Seen::when((claims.len(), allocated.count()), |counts| *counts == (1, 0)))
    })
    .await?;
    pair.kerf.start_operator("operator").await?;
    let running = pair.kerf.wait_running(namespace, "left").await?;
    ensure!(running.node == pair.other(&home), "{running:?}, placed on {home} first");
    pair.kerf.wait_admission().await?;
    pair.clear(namespace, &["left", "filler"]).await
}

async fn gone_everywhere_before(pair: &Pair, namespace: &str) -> Result<()> {
    for node in pair.nodes {
        pair.fill(namespace, &format!("filler-{node}"), node).await?;
    }
    pair.kerf.create_pod(namespace, &pair.gpu_pod("thirsty")).await?;
    pair.wait_told(namespace, "thirsty", "NodesDoNotFit", "cpu").await?;
    pair.ensure_quiet(namespace).await?;
    let freed = pair.nodes[1];
    pair.kerf.delete_pod(namespace, &format!("filler-{freed}")).await?;
    let running = pair.kerf.wait_running(namespace, "thirsty").await?;
    ensure!(running.node == freed, "{running:?}");
    pair.clear(namespace, &["thirsty", &format!("filler-{}", pair.nodes[0])]).await
}

/// Freed on the chosen node it goes on there, freed on the other it moves.
async fn gone_everywhere_after(pair: &Pair, namespace: &str) -> Result<()> {
    for at_home in [true, false] {
        let name = if at_home { "stays" } else { "goes" };
        pair.kerf.cluster.stop(Component::Scheduler).await?;
        pair.kerf.create_pod(namespace, &pair.gpu_pod(name)).await?;
        let home = pair.wait_placed(namespace, name).await?;
        let other = pair.other(&home);
        // The other first, so that there is never a better place.
        pair.fill(namespace, "filler-there", other).await?;
        pair.fill(namespace, "filler-home", &home).await?;
        pair.wait_told(namespace, name, "NodesDoNotFit", "cpu").await?;
        pair.kerf.cluster.start_component(Component::Scheduler).await?;
        eventually(PATIENCE, "kube-scheduler has looked", || async {
            let pod = pair.kerf.pods(namespace).get(name).await?;
            let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
            let looked = conditions.into_iter().find(|c| c.type_ == "PodScheduled" && c.status == "False");
            let reason = looked.and_then(|condition| condition.reason).unwrap_or_default();
            Ok(Seen::when(reason, |reason| reason == "Unschedulable"))
        })
        .await?;
        pair.ensure_quiet(namespace).await?;
        pair.wait_told(namespace, name, "NodesDoNotFit", "cpu").await?;
        let (freed, left) =
            if at_home { ("filler-home", "filler-there") } else { ("filler-there", "filler-home") };
        pair.kerf.delete_pod(namespace, freed).await?;
        let running = pair.kerf.wait_running(namespace, name).await?;
        ensure!((running.node == home) == at_home, "{running:?}, placed on {home} first");
        pair.wait_told(namespace, name, "Allocated", &running.node).await?;
        pair.clear(namespace, &[name, left]).await?;
    }
    Ok(())
}

async fn gone_while_binding(pair: &Pair, namespace: &str) -> Result<()> {
    // Bound where there is no CPU any more: kubelet refuses the pod, and its slice must come back.
    pair.kerf.cluster.stop(Component::Scheduler).await?;
    pair.replica_set(namespace, "late", pair.gpu_pod("late")).await?;
    let first = pair.wait_member(namespace, "late", "").await?;
    let home = pair.wait_placed(namespace, &first).await?;
    pair.kerf.stop_operator("operator", Duration::ZERO).await?;
    pair.fill(namespace, "filler", &home).await?;
    wait_pod_phase(&pair.client(), namespace, "filler", "Running", PATIENCE).await?;
    pair.bind_late(namespace, &first, &home).await?;
    wait_pod_phase(&pair.client(), namespace, &first, "Failed", PATIENCE).await?;
    pair.kerf.start_operator("operator").await?;
    pair.kerf.cluster.start_component(Component::Scheduler).await?;
    let running = pair.wait_member_running(namespace, "late").await?;
    ensure!(running.node == pair.other(&home), "{running:?}, placed on {home} first");
    pair.kerf.wait_admission().await?;
    pair.delete_set(namespace, "late").await?;
    pair.clear(namespace, &["filler"]).await?;

    // However the race of the two ends, one pod of the set runs.
    for round in 0..4 {
        let set = format!("race-{round}");
        pair.replica_set(namespace, &set, pair.gpu_pod("race")).await?;
        let first = pair.wait_member(namespace, &set, "").await?;
        let home = pair.wait_placed(namespace, &first).await?;
        pair.fill(namespace, "filler", &home).await?;
        pair.wait_member_running(namespace, &set).await?;
        pair.ensure_sound(namespace).await?;
        pair.delete_set(namespace, &set).await?;
        pair.clear(namespace, &["filler"]).await?;
    }
    Ok(())
}

#[test]
fn nodes_cordoned_before_and_after_the_choice() {
    pair(["cordon-a", "cordon-b"], |pair| async move {
        let namespace = pair.kerf.namespace("cordon").await?;
        let namespace = namespace.as_str();
        // Before.
        for node in pair.nodes {
            pair.cordon(node).await?;
        }
        pair.kerf.create_pod(namespace, &pair.gpu_pod("early")).await?;
        pair.wait_told(namespace, "early", "NodesDoNotFit", "cordoned").await?;
        pair.ensure_quiet(namespace).await?;
        pair.uncordon(pair.nodes[1]).await?;
        let running = pair.kerf.wait_running(namespace, "early").await?;
        ensure!(running.node == pair.nodes[1], "{running:?}");
        pair.uncordon(pair.nodes[0]).await?;
        pair.clear(namespace, &["early"]).await?;

        // After, with another node to go to.
        pair.kerf.cluster.stop(Component::Scheduler).await?;
        pair.kerf.create_pod(namespace, &pair.gpu_pod("moved")).await?;
        let home = pair.wait_placed(namespace, "moved").await?;
        pair.cordon(&home).await?;
        pair.kerf.cluster.start_component(Component::Scheduler).await?;
        let running = pair.kerf.wait_running(namespace, "moved").await?;
        ensure!(running.node == pair.other(&home), "{running:?}, placed on {home} first");
        pair.uncordon(&home).await?;
        pair.clear(namespace, &["moved"]).await?;

        // After, with none.
        pair.kerf.cluster.stop(Component::Scheduler).await?;
        pair.kerf.create_pod(namespace, &pair.gpu_pod("patient")).await?;
        let home = pair.wait_placed(namespace, "patient").await?;
        pair.cordon(pair.other(&home)).await?;
        pair.cordon(&home).await?;
        pair.wait_told(namespace, "patient", "NodesDoNotFit", "cordoned").await?;
        pair.kerf.cluster.start_component(Component::Scheduler).await?;
        pair.ensure_quiet(namespace).await?;
        pair.wait_told(namespace, "patient", "NodesDoNotFit", "cordoned").await?;
        pair.uncordon(&home).await?;
        let running = pair.kerf.wait_running(namespace, "patient").await?;
        ensure!(running.node == home, "{running:?}, placed on {home} first");
        pair.wait_told(namespace, "patient", "Allocated", &home).await?;
        pair.uncordon(pair.other(&home)).await?;
        pair.clear(namespace, &["patient"]).await?;

        // A bind that was on its way when the place was moved: the pod can never run there, and another comes.
        pair.kerf.cluster.stop(Component::Scheduler).await?;
        pair.replica_set(namespace, "late", pair.gpu_pod("late")).await?;
        let first = pair.wait_member(namespace, "late", "").await?;
        let home = pair.wait_placed(namespace, &first).await?;
        pair.cordon(&home).await?;
        eventually(PATIENCE, "the place moved", || async {
            let pod = pair.kerf.pods(namespace).get(&first).await?;
            Ok(Seen::when(pair.place(&pod).await?, |place| place.as_deref() == Some(pair.other(&home))))
        })
        .await?;
        pair.bind_late(namespace, &first, &home).await?;
        pair.uncordon(&home).await?;
        pair.kerf.cluster.start_component(Component::Scheduler).await?;
        let second = pair.wait_member(namespace, "late", &first).await?;
        let running = pair.wait_member_running(namespace, "late").await?;
        ensure!(running.pod == second, "{running:?}, not {second}");
        pair.ensure_sound(namespace).await?;
        pair.delete_set(namespace, "late").await?;
        pair.clear(namespace, &[]).await
    });
}

fn urgent(mut pod: Pod) -> Pod {
    pod.spec.get_or_insert_default().priority_class_name = Some("urgent".to_owned());
    pod
}

#[test]
fn kube_scheduler_preempts_for_gpu_pods_and_from_gpu_pods() {
    pair(["preempt-a", "preempt-b"], |pair| async move {
        let namespace = pair.kerf.namespace("preempt").await?;
        let namespace = namespace.as_str();
        // CPU of both nodes with pods that matter less: one of them goes.
        for node in pair.nodes {
            pair.fill(namespace, &format!("filler-{node}"), node).await?;
            wait_pod_phase(&pair.client(), namespace, &format!("filler-{node}"), "Running", PATIENCE).await?;
        }
        pair.kerf.create_pod(namespace, &urgent(pair.gpu_pod("first"))).await?;
        let running = pair.kerf.wait_running(namespace, "first").await?;
        // One of them: its place is free a moment before it is gone.
        let left = format!("filler-{}", pair.other(&running.node));
        eventually(PATIENCE, "one of the fillers gone", || async {
            let pods = pair.kerf.pods(namespace).list(&ListParams::default()).await?;
            let names: Vec<String> = pods.iter().map(|pod| pod.name_any()).collect();
            Ok(Seen::when(names, |names| *names == [left.clone(), "first".to_owned()]))
        })
        .await?;
        wait_without_hold(&pair, namespace).await?;
        pair.clear(namespace, &["first", &left]).await?;

        // The victim has a GPU itself: its slice comes back.
        pair.kerf.create_pod(namespace, &pair.gpu_pod("victim")).await?;
        let victim = pair.kerf.wait_running(namespace, "victim").await?;
        let other = pair.other(&victim.node);
        pair.cordon(other).await?;
        pair.kerf.create_pod(namespace, &urgent(pair.gpu_pod("second"))).await?;
        let running = pair.kerf.wait_running(namespace, "second").await?;
        ensure!(running.node == victim.node, "{running:?}, {victim:?}");
        eventually(PATIENCE, "the victim gone", || async {
            let victim = pair.kerf.pods(namespace).get_opt("victim").await?;
            Ok(victim.map_or(Seen::Yes(()), |pod| Seen::NotYet(describe(&pod))))
        })
        .await?;
        pair.wait_entries(&victim.node, 1).await?;
        wait_without_hold(&pair, namespace).await?;

        // And for a pod that has nothing to do with GPUs.
        pair.kerf.delete_pod(namespace, "second").await?;
        pair.kerf.create_pod(namespace, &pair.gpu_pod("victim")).await?;
        pair.kerf.wait_running(namespace, "victim").await?;
        let container = json!({
            "name": "main", "image": BOX, "imagePullPolicy": "Never", "command": ["sleep", "3600"],
            "resources": { "requests": { "cpu": pair.cpu() } },
        });
        pair.kerf.create_pod(namespace, &urgent(pod_of("plain", vec![container]))).await?;
        wait_pod_phase(&pair.client(), namespace, "plain", "Running", PATIENCE).await?;
        pair.wait_entries(&victim.node, 0).await?;
        pair.uncordon(other).await?;
        pair.clear(namespace, &["plain"]).await
    });
}

impl Pair {
    /// Waits until so many entries of claims are in the node's spec.
    async fn wait_entries(&self, node: &str, number: usize) -> Result<()> {
        eventually(PATIENCE, format!("{number} entries in GpuNode {node}"), || async {
            let spec = self.kerf.gpu_nodes().get(node).await?.spec;
            let entries = spec.partitions.iter().filter(|p| matches!(p.owner, Owner::Claim(_))).count();
            Ok(Seen::when(entries, |entries| *entries == number))
        })
        .await?;
        Ok(())
    }
}

/// The hold is for the time before the bind.
async fn wait_without_hold(pair: &Pair, namespace: &str) -> Result<()> {
    let claims: Api<ResourceClaim> = Api::namespaced(pair.client(), namespace);
    eventually(PATIENCE, "no claim held", || async {
        let all = claims.list(&ListParams::default()).await?.items;
        let consumers = all.iter().filter_map(|claim| claim.status.as_ref()?.reserved_for.clone()).flatten();
        let kinds: Vec<String> = consumers.map(|consumer| consumer.resource).collect();
        Ok(Seen::when(kinds, |kinds| kinds.iter().all(|kind| kind == "pods")))
    })
    .await?;
    Ok(())
}

#[test]
fn kubelet_restarted_while_pods_are_prepared_and_run() {
    pair(["kubelet-a", "kubelet-b"], |pair| async move {
        let namespace = pair.kerf.namespace("kubelet").await?;
        let namespace = namespace.as_str();
        let node = pair.nodes[0];
        let small = |name: &str| on(node, gpu_pod(name, &[(&mig("1g.10gb"), 1)]));
        pair.kerf.create_pod(namespace, &small("steady")).await?;
        let steady = pair.kerf.wait_running(namespace, "steady").await?;
        let before = container(&pair, namespace, "steady").await?;

        // While pods run.
        pair.kerf.cluster.node(node).stop_kubelet().await?;
        pair.kerf.cluster.node(node).start_kubelet().await?;
        pair.kerf.create_pod(namespace, &small("new")).await?;
        pair.kerf.wait_running(namespace, "new").await?;

        // Between kube-scheduler's bind and the container's start, at another moment each time.
        for round in 0..4 {
            let name = format!("caught-{round}");
            pair.kerf.create_pod(namespace, &small(&name)).await?;
            eventually(PATIENCE, format!("{name} bound, or prepared"), || async {
                if round % 2 == 0 {
                    let pod = pair.kerf.pods(namespace).get(&name).await?;
                    return Ok(Seen::when(pod.spec.and_then(|spec| spec.node_name), Option::is_some));
                }
                let status = pair.kerf.gpu_nodes().get(node).await?.status.unwrap_or_default();
                let prepared = status.gpus.iter().flat_map(|gpu| &gpu.instances).flat_map(|i| &i.claims);
                Ok(Seen::when(Some(prepared.count().to_string()), |n| {
                    n.as_deref() == Some(&(round + 3).to_string())
                }))
            })
            .await?;
            pair.kerf.cluster.node(node).stop_kubelet().await?;
            pair.kerf.cluster.node(node).start_kubelet().await?;
            pair.kerf.wait_running(namespace, &name).await.with_context(|| name.clone())?;
        }
        let after = container(&pair, namespace, "steady").await?;
        ensure!(before == after, "the running container was {before:?} and is {after:?}");
        let still = pair.kerf.wait_running(namespace, "steady").await?;
        ensure!(still.devices == steady.devices, "{still:?}, {steady:?} before");
        pair.ensure_sound(namespace).await?;

        // Pods that end while kubelet is away.
        pair.kerf.cluster.node(node).stop_kubelet().await?;
        pair.kerf.pods(namespace).delete("new", &DeleteParams::default()).await?;
        pair.kerf.cluster.node(node).start_kubelet().await?;
        eventually(PATIENCE, "the deleted pod gone", || async {
            let pod = pair.kerf.pods(namespace).get_opt("new").await?;
            Ok(pod.map_or(Seen::Yes(()), |pod| Seen::NotYet(describe(&pod))))
        })
        .await?;
        let names: Vec<String> = (0..4).map(|round| format!("caught-{round}")).collect();
        let mut all: Vec<&str> = names.iter().map(String::as_str).collect();
        all.push("steady");
        pair.clear(namespace, &all).await
    });
}

/// Id and number of restarts of a pod's container.
async fn container(pair: &Pair, namespace: &str, pod: &str) -> Result<(String, i32)> {
    let pod = pair.kerf.pods(namespace).get(pod).await?;
    let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
    let first = statuses.first().context("no container status")?;
    Ok((first.container_id.clone().unwrap_or_default(), first.restart_count))
}
