//! A policy is tried before it is applied, and what was said comes true; what was planned can be planned again.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kerf_e2e::kerf::{Kerf, KerfOptions, PATIENCE, alone, built, for_node, gpu_pod, mig};
use kerf_e2e::wait::{Seen, eventually};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// As `kerf-whatif try --help` says.
const DUMP: &str =
    "nodes,gpunodes,partitionpolicies,deviceclasses,resourceclaims,pods,priorityclasses,poddisruptionbudgets";

#[test]
fn what_is_said_of_a_policy_comes_true_when_it_is_applied() {
    let nodes = [("whatif-a", "h100-80-sxm", 1), ("whatif-b", "h100-80-sxm", 1)];
    alone(KerfOptions::nodes(&nodes), |kerf| async move {
        let files = tempfile::tempdir()?;
        let namespace = kerf.namespace("whatif").await?;
        kerf.policy("first", for_node("whatif-a", json!({ "mode": "Dynamic" }))).await?;
        kerf.create_pod(&namespace, &gpu_pod("small", &[(&mig("3g.40gb"), 1)])).await?;
        kerf.wait_running(&namespace, "small").await?;
        for pod in ["large", "late"] {
            kerf.create_pod(&namespace, &gpu_pod(pod, &[(&mig("7g.80gb"), 1)])).await?;
            kerf.wait_reason(&namespace, pod, "NoRoom").await?;
        }
        let dump = files.path().join("cluster.yaml");
        std::fs::write(&dump, kerf.cluster.kubectl(&["get", DUMP, "-A", "-o", "yaml"]).await?)?;

        // As things are, nothing changes.
        let as_it_is = whatif(0, &["try", "--cluster", path(&dump)?])?;
        ensure!(as_it_is.contains("2 GPUs stay as they are"), "{as_it_is}");
        ensure!(as_it_is.contains("0 get a place, 2 do not"), "{as_it_is}");

        // A policy that can never work is refused as the API server would.
        let mut never =
            for_node("whatif-b", json!({ "mode": "Static", "layout": [{ "profile": "9g.90gb" }] }));
        never["gpus"] = json!({ "products": ["NVIDIA H100*"] });
        let file = policy(files.path(), "never", &never)?;
        let refused = whatif(1, &["try", "--cluster", path(&dump)?, "--policy", path(&file)?])?;
        let denied = kerf.policy("never", never).await.expect_err("the policy was let in");
        ensure!(refused.contains("spec.mig.layout[0].profile"), "{refused}");
        ensure!(format!("{denied:#}").contains("spec.mig.layout[0].profile"), "{denied:#}");

        let spec = for_node("whatif-b", json!({ "mode": "Dynamic" }));
        let file = policy(files.path(), "second", &spec)?;
        let said = whatif(0, &["try", "--cluster", path(&dump)?, "--policy", path(&file)?])?;
        println!("{said}");
        ensure!(said.contains("second (tried): 1 GPUs on 1 nodes"), "{said}");
        ensure!(said.contains("1 get a place, 1 do not"), "{said}");

        kerf.policy("second", spec).await?;
        let large = kerf.wait_running(&namespace, "large").await?;
        let device = large.devices.first().context("no device")?;
        let place = format!(
            "{namespace}/large gets {} at slice {} of GPU 0 on node {}",
            device.profile, device.start, large.node
        );
        ensure!(said.contains(&place), "{place} is not what was said:\n{said}");
        // New numbers in a sentence are written after a while.
        eventually(PATIENCE, format!("pod late told what was said:\n{said}"), || async {
            let (_, reason, message) = kerf.planned(&namespace, "late").await?.context("no condition")?;
            let why = format!("{namespace}/late ({reason}): {message}");
            Ok(if said.contains(&why) { Seen::Yes(()) } else { Seen::NotYet(why) })
        })
        .await?;

        replayed(&kerf, files.path(), &format!("{namespace}/large")).await
    });
}

/// The cycle that placed the pod is on record, and is planned the same again.
async fn replayed(kerf: &Kerf, folder: &Path, pod: &str) -> Result<()> {
    let list: Value = serde_json::from_str(&get(kerf, "/debug/plans").await?)?;
    let plans = list["plans"].as_array().context("no plans")?;
    let with_places = plans.iter().filter(|plan| plan["placements"].as_u64() > Some(0));
    let mut found = None;
    for plan in with_places {
        let text = get(kerf, &format!("/debug/plans/{}", plan["number"])).await?;
        let record: Value = serde_json::from_str(&text)?;
        let request = record["plan"]["placements"][0]["request"].as_u64().context("no placement")?;
        if record["snapshot"]["requests"][request as usize]["id"] == pod {
            found = Some((text, plan["hash"].as_str().unwrap_or_default().to_owned()));
            break;
        }
    }
    let (record, hash) = found.with_context(|| format!("no plan of {pod} on record: {list}"))?;
    let file = folder.join("record.json");
    std::fs::write(&file, record)?;
    let said = whatif(0, &["replay", path(&file)?, "--as-test", path(folder)?])?;
    ensure!(said.contains("planned as recorded: 1 placements"), "{said}");
    ensure!(said.contains(&hash) && folder.join(format!("{hash}.json")).is_file(), "{hash}: {said}");
    let gone = get(kerf, "/debug/plans/1000000").await?;
    ensure!(gone.contains("no plan 1000000 on record"), "{gone}");
    Ok(())
}

fn policy(folder: &Path, name: &str, spec: &Value) -> Result<std::path::PathBuf> {
    let file = folder.join(format!("{name}.json"));
    let object = json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "PartitionPolicy", "metadata": { "name": name }, "spec": spec,
    });
    std::fs::write(&file, object.to_string())?;
    Ok(file)
}

fn path(file: &Path) -> Result<&str> {
    file.to_str().context("a path that is no text")
}

/// What `kerf-whatif` prints, if its status is this.
fn whatif(status: i32, args: &[&str]) -> Result<String> {
    let out = Command::new(built("kerf-whatif")?).args(args).output()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let errors = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.code() == Some(status), "{args:?}: {}\n{text}{errors}", out.status);
    Ok(text)
}

/// The body of what the operator answers on loopback.
async fn get(kerf: &Kerf, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", kerf.debug_port())).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    Ok(body.to_owned())
}
