//! The job that verifies shares on hardware, as it ships, on simulated hardware: where limits are enforced it says so, and
//! where they are not.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kerf_crds::GpuNode;
use kerf_crds::conditions::{node as condition, node_reason};
use kerf_e2e::images::image_from_binaries;
use kerf_e2e::install::{Overlay, apply_yaml_with};
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, built, for_node, repository};
use kerf_e2e::wait::{Seen, eventually};
use kerf_sim::fault::{Action, Fault, Occurrence, When};
use kerf_sim::{Driver, NvmlError};
use kube::api::{Api, DeleteParams, ListParams, LogParams, Patch, PatchParams};
use kube::{Error, ResourceExt as _};
use serde_json::{Value, json};

use super::shares::{AGAIN, GIB, LIMITS, filled, greedy, undisturbed};

const NODE: &str = "verified";
const NAMESPACE: &str = "kerf-hardware";
const JOB: &str = "verify-shares";

fn options(driver_branch: u32) -> KerfOptions {
    let options = KerfOptions::nodes(&[(NODE, "h100-80-sxm", 1)]).quick_kubelets();
    KerfOptions { driver_branch: Some(driver_branch), ..options }
}

async fn prepare(kerf: &Kerf, isolation: &str) -> Result<()> {
    let busybox = &kerf.cluster.toolchain().busybox;
    let image = image_from_binaries(busybox, "kerf/hardware:e2e", &[&built("kerf-hardware")?])?;
    kerf.cluster.load_image(&image).await?;
    let mut policy = for_node(NODE, json!({ "mode": "Off" }));
    policy["shares"] = json!({ "gpus": "Allow", "isolation": isolation });
    kerf.policy("shared", policy).await?;
    Ok(())
}

/// Applies the job anew and waits until it has ended. Returns whether it succeeded, and the table that it printed.
async fn run(kerf: &Kerf) -> Result<(bool, String)> {
    let jobs: Api<Job> = Api::namespaced(kerf.client(), NAMESPACE);
    if jobs.get_opt(JOB).await?.is_some() {
        jobs.delete(JOB, &DeleteParams::background()).await?;
        let pods = kerf.pods(NAMESPACE);
        eventually(PATIENCE, "the last job's pod gone", || async {
            let left = pods.list(&ListParams::default()).await?.items.len();
            let gone = left == 0 && jobs.get_opt(JOB).await?.is_none();
            Ok(if gone { Seen::Yes(()) } else { Seen::not_yet(left) })
        })
        .await?;
    }
    let file = repository("e2e/hardware/job.yaml");
    // kubectl reads it as an administrator gives it.
    let as_given = file.display().to_string();
    kerf.cluster.kubectl(&["apply", "--dry-run=client", "--validate=strict", "-f", &as_given]).await?;
    let manifest = std::fs::read_to_string(file)?;
    let overlay = Overlay::default().image("kerf/hardware", "kerf/hardware:e2e");
    apply_yaml_with(&kerf.client(), &manifest, &overlay).await?;
    let done = eventually(2 * PATIENCE, "the job at its end", || async {
        let conditions = jobs.get(JOB).await?.status.and_then(|status| status.conditions).unwrap_or_default();
        let ended = conditions
            .iter()
            .find(|one| ["Complete", "Failed"].contains(&one.type_.as_str()) && one.status == "True");
        let pods = kerf.pods(NAMESPACE).list(&ListParams::default()).await?.items;
        Ok(ended.map_or_else(
            || Seen::NotYet(pods.iter().map(kerf_e2e::wait::describe).collect::<Vec<_>>().join("; ")),
            |one| Seen::Yes(one.type_ == "Complete"),
        ))
    })
    .await?;
    let pod = kerf.pods(NAMESPACE).list(&ListParams::default()).await?.items.pop().context("no pod")?;
    let of = LogParams { container: Some("verify".to_owned()), ..LogParams::default() };
    let text = kerf.pods(NAMESPACE).logs(&pod.name_any(), &of).await?;
    println!("{text}");
    Ok((done, text))
}

async fn conditions(kerf: &Kerf) -> Result<Vec<Condition>> {
    Ok(kerf.gpu_nodes().get(NODE).await?.status.context("no status")?.conditions)
}

/// The job's condition, beside those of the daemon.
async fn verified(kerf: &Kerf) -> Result<Condition> {
    let all = conditions(kerf).await?;
    for own in [condition::READY, condition::DEGRADED, condition::CONTAINER_TOOLKIT] {
        ensure!(all.iter().any(|one| one.type_ == own), "{own} is not in {all:?}");
    }
    let found = all.iter().find(|one| one.type_ == condition::SHARES_VERIFIED);
    found.cloned().with_context(|| format!("{all:?}"))
}

fn ensure_lines(table: &str, lines: &[&str]) -> Result<()> {
    for line in lines {
        ensure!(table.lines().any(|other| other.starts_with(line)), "'{line}' is not in\n{table}");
    }
    Ok(())
}

#[test]
fn the_job_verifies_limits_and_finds_those_that_do_not_hold() {
    alone(options(LIMITS), |kerf| async move {
        let namespace = kerf.namespace("beside").await?;
        prepare(&kerf, "Driver").await?;
        kerf.create_pod(&namespace, &greedy("quiet", 20, 20, &AGAIN)).await?;
        let quiet = filled(&kerf, &namespace, "quiet", 1).await?;

        let (succeeded, table) = run(&kerf).await?;
        ensure_lines(
            &table,
            &[
                "| to allocate more, by one process | refused | verified: got 8.00 GiB of 8.00 GiB",
                "| to allocate more, by several processes | refused: the sum counts | verified: got ",
                "| `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` set higher | refused | verified: got 8.00 GiB",
                "| the same with an entry for a GPU that it cannot see, which drops every limit of MPS | refused | verified: got 8",
                "| no `CUDA_MPS_PIPE_DIRECTORY` | no GPU | verified: no GPU: cuCtxCreate_v2: CUDA_ERROR_DEVICE_UNAVAILABLE |",
                "| `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100` | no more than its ceiling | verified: a kernel ran on 32 multiprocessors of 132",
                "| a second container, an init container | each has a share of its own or the same one; the pod's sum counts | \
                 verified: the other has 4.00 GiB, this one got 4.00 GiB of 4.00 GiB",
                "| managed memory (`cudaMallocManaged`) | **not counted** by the driver | could not be tried: ",
                "SharesVerified True: GPU-",
            ],
        )?;
        ensure!(succeeded, "the job failed");
        let first = verified(&kerf).await?;
        ensure!(first.status == "True" && first.reason == node_reason::VERIFIED, "{first:?}");
        let driver = Driver::of_branch(LIMITS).version;
        ensure!(
            first.message.contains(&format!("driver {driver}, a share of 8.00 GiB and 25 %")),
            "{first:?}"
        );
        undisturbed(&kerf, &namespace, "quiet", quiet).await?;

        // The daemon's next report leaves it there.
        kerf.create_pod(&namespace, &greedy("next", 10, 10, &[])).await?;
        filled(&kerf, &namespace, "next", 1).await?;
        eventually(PATIENCE, "a report of the next share", || async {
            let status = kerf.gpu_nodes().get(NODE).await?.status.context("no status")?;
            let shares = &status.gpus[0].shares;
            let next = shares.iter().any(|share| share.memory_bytes == 10 * GIB && !share.claims.is_empty());
            Ok(if next { Seen::Yes(()) } else { Seen::NotYet(format!("{shares:?}")) })
        })
        .await?;
        ensure!(verified(&kerf).await? == first);

        writes_nothing_else(&kerf).await?;

        // A driver that takes limits, gives them back when it is asked, and does not hold to them.
        let fault = Fault::new(
            "memory-limits",
            Action::Fail(NvmlError::Unknown),
            When::Before,
            Occurrence::Persistent,
        );
        kerf.sim(NODE)?.add_fault(fault)?;
        let (succeeded, table) = run(&kerf).await?;
        ensure_lines(
            &table,
            &[
                // MPS still has its own limit for each process.
                "| to allocate more, by one process | refused | verified: got 8.00 GiB of 8.00 GiB",
                "| to allocate more, by several processes | refused: the sum counts | **not enforced**: got 16.00 GiB of 8.00 GiB |",
                "| the same with an entry for a GPU that it cannot see, which drops every limit of MPS | refused | \
                 **not enforced**: got 8.25 GiB of 8.00 GiB |",
                "SharesVerified False: GPU-",
            ],
        )?;
        ensure!(!succeeded, "the job succeeded");
        let now = verified(&kerf).await?;
        ensure!(now.status == "False" && now.reason == node_reason::NOT_ENFORCED, "{now:?}");
        let begins = "Not enforced: to allocate more, by several processes (got 16.00 GiB of 8.00 GiB)";
        ensure!(now.message.contains(begins), "{now:?}");
        Ok(())
    });
}

/// The job's account can change one condition of its own node, and nothing else.
async fn writes_nothing_else(kerf: &Kerf) -> Result<()> {
    let api = async |node: Option<&str>| -> Result<Api<GpuNode>> {
        let config = kerf.cluster.kubeconfig_for_service_account(NAMESPACE, "verifier", node).await?;
        Ok(Api::all(kerf.cluster.client_from(&config).await?))
    };
    let (own, unbound) = (api(Some(NODE)).await?, api(None).await?);
    let params = PatchParams { dry_run: true, ..PatchParams::default() };
    let now = conditions(kerf).await?;
    let with = |type_: &str, status: &str| -> Value {
        let change = |one: &Condition| {
            let mut one = json!(one);
            if one["type"] == type_ {
                one["status"] = json!(status);
            }
            one
        };
        json!({ "status": { "conditions": now.iter().map(change).collect::<Vec<_>>() } })
    };
    let allowed = with(condition::SHARES_VERIFIED, "False");
    own.patch_status(NODE, &params, &Patch::Merge(&allowed)).await.context("its own condition")?;
    let only = "may write only the condition SharesVerified";
    for (what, api, patch, words) in [
        ("a token of no node", &unbound, allowed.clone(), "of its own node"),
        ("a condition of the daemon's", &own, with(condition::READY, "False"), only),
        ("all conditions", &own, json!({ "status": { "conditions": null } }), only),
        ("what the node has", &own, json!({ "status": { "gpus": null } }), only),
        ("a field of the report", &own, json!({ "status": { "driverVersion": "1" } }), only),
    ] {
        match api.patch_status(NODE, &params, &Patch::Merge(&patch)).await {
            Err(Error::Api(status)) if status.code == 403 && status.message.contains(words) => {}
            other => anyhow::bail!("{what} was not refused by '{words}': {other:?}"),
        }
    }
    match own.patch(NODE, &params, &Patch::Merge(json!({ "spec": { "partitions": [] } }))).await {
        Err(Error::Api(status)) if status.code == 403 => Ok(()),
        other => anyhow::bail!("the spec was not refused: {other:?}"),
    }
}

/// Where only MPS limits memory, what the page says that a process can get around is got around, and that is no failure.
#[test]
fn the_job_knows_what_is_not_promised() {
    alone(options(580), |kerf| async move {
        prepare(&kerf, "Process").await?;
        let (succeeded, table) = run(&kerf).await?;
        ensure_lines(
            &table,
            &[
                "| to allocate more, by one process | refused | verified: got 8.00 GiB of 8.00 GiB",
                "| `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` set higher | refused: MPS takes the lower one | verified: got 8.00 GiB",
                "| the same with an entry for a GPU that it cannot see, which drops every limit of MPS | \
                 **gets it**, until the daemon sees it | not enforced, as said: got 8.25 GiB of 8.00 GiB |",
                "| no `CUDA_MPS_PIPE_DIRECTORY` | no GPU; in a MIG instance **all of the instance**, until the daemon ends it | \
                 verified: no GPU: ",
                "| `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100` | no more than its ceiling | verified: a kernel ran on 32 ",
                "| a second container, an init container | each has a share of its own or the same one | \
                 not enforced, as said: the other has 4.00 GiB, this one got 8.00 GiB of 4.00 GiB |",
                "SharesVerified True: GPU-",
            ],
        )?;
        ensure!(table.contains("| not enforced, as said: got 16.00 GiB of 8.00 GiB |"), "{table}");
        ensure!(succeeded, "the job failed");
        ensure!(verified(&kerf).await?.status == "True");
        Ok(())
    });
}
