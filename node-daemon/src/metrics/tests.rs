use std::collections::BTreeSet;

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{ClaimReference, Isolation, Placement, PodReference, Reason, Share, WantedShare};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;
use crate::inventory::{ComputeMode, Gpu, Instance, Inventory, MpsState};
use crate::prepared::{DeviceKey, Prepared, PreparedClaims, PreparedDevice};

const GPU: &str = "GPU-3f2a9c1d-0000-4000-8000-000000000001";

fn share(id: &str) -> Share {
    Share {
        id: id.into(),
        memory_bytes: 12 << 30,
        compute_percent: 30,
        isolation: Isolation::Driver,
        processes: 2,
        ..Share::default()
    }
}

fn record(id: &str) -> Prepared {
    Prepared {
        claim: ClaimReference { namespace: "team-a".into(), name: format!("claim-{id}"), uid: id.into() },
        pod: Some(PodReference { namespace: "team-a".into(), name: "train".into(), uid: "u".into() }),
        devices: vec![PreparedDevice {
            request: "r".into(),
            device: "d".into(),
            key: DeviceKey::share(GPU, id),
            uuid: GPU.into(),
            cdi: vec![],
            share: Some(WantedShare { id: id.into(), ..WantedShare::default() }),
        }],
    }
}

fn state() -> NodeState {
    let state = NodeState::new("n", PreparedClaims::new());
    state.publish_node(Inventory::default(), Some(BTreeSet::from([GPU.to_owned()])));
    state
}

fn publish(state: &NodeState, shares: &[Share]) {
    let up = !shares.is_empty();
    state.publish_gpu(Gpu {
        uuid: GPU.into(),
        memory_bytes: 80 << 30,
        compute_mode: Some(if up { ComputeMode::EXCLUSIVE_PROCESS } else { ComputeMode::DEFAULT }),
        mps: MpsState { up, ..MpsState::default() },
        shares: shares.to_vec(),
        ..Gpu::default()
    });
}

fn text_of(state: &NodeState) -> String {
    scrape(state).unwrap()
}

/// Samples as they are written, with every line checked for its form.
fn samples(text: &str) -> Vec<(&str, f64)> {
    let mut samples = Vec::new();
    let mut described = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.split(' ');
            assert!(matches!(words.next(), Some("HELP" | "TYPE")), "{line}");
            described.insert(words.next().expect("a name"));
            continue;
        }
        let (series, value) = line.rsplit_once(' ').expect("a value");
        let name = series.split('{').next().unwrap();
        let of_histogram = ["_bucket", "_sum", "_count"].iter().filter_map(|end| name.strip_suffix(end));
        assert!(
            described.contains(name) || of_histogram.into_iter().any(|name| described.contains(name)),
            "{line} has no HELP and TYPE before it"
        );
        samples.push((series, value.parse().expect("a number")));
    }
    samples
}

fn value(text: &str, series: &str) -> Option<f64> {
    samples(text).iter().find(|(known, _)| *known == series).map(|(_, value)| *value)
}

#[test]
fn series_of_shares_come_with_prepare_and_go_with_its_end() {
    let state = state();
    publish(&state, &[share("a"), share("b")]);
    let none = text_of(&state);
    assert!(!none.contains("share=\""), "nothing is given out yet: {none}");
    assert_eq!(value(&none, &format!("kerf_gpu_shares{{gpu=\"{GPU}\"}}")), Some(2.0));

    state.prepared.record(record("a")).unwrap();
    let text = text_of(&state);
    let of = |name: &str| {
        let labels = "namespace=\"team-a\",pod=\"train\",claim=\"claim-a\",isolation=\"driver\"";
        value(&text, &format!("{name}{{gpu=\"{GPU}\",placement=\"\",share=\"a\",{labels}}}"))
    };
    assert_eq!(of("kerf_share_memory_limit_bytes"), Some(f64::from(12) * (1u64 << 30) as f64), "{text}");
    assert_eq!(of("kerf_share_compute_limit_percent"), Some(30.0));
    assert_eq!(of("kerf_share_processes"), Some(2.0));
    assert_eq!(of("kerf_share_memory_used_bytes"), None, "NVML has not been asked");
    assert_eq!(of("kerf_share_limits_in_force"), Some(1.0));
    let of_gpu = |name: &str| value(&text, &format!("{name}{{gpu=\"{GPU}\"}}"));
    assert_eq!(of_gpu("kerf_gpu_memory_usable_bytes"), Some(80.0 * (1u64 << 30) as f64));
    assert_eq!(of_gpu("kerf_gpu_mps_server_up"), Some(1.0));
    let used = |state: &NodeState| {
        let text = text_of(state);
        let samples = samples(&text);
        samples
            .iter()
            .find(|(series, _)| series.starts_with("kerf_share_memory_used_bytes{"))
            .map(|one| one.1)
    };
    state.metrics.uses(&DeviceKey::gpu(GPU), [("u".to_owned(), 5)].into());
    assert_eq!(used(&state), Some(5.0));
    state.metrics.uses(&DeviceKey::gpu(GPU), [("other".to_owned(), 5)].into());
    assert_eq!(used(&state), Some(0.0), "the pod has no process");
    let long_ago = Instant::now().checked_sub(KNOWN).unwrap();
    state.metrics.used.lock().unwrap().get_mut(&DeviceKey::gpu(GPU)).unwrap().at = long_ago;
    assert_eq!(used(&state), None, "nobody has asked for long");
    let mode = format!("kerf_gpu_compute_mode{{gpu=\"{GPU}\",mode=\"EXCLUSIVE_PROCESS\"}}");
    assert_eq!(value(&text, &mode), Some(1.0));

    let reason = Reason { reason: problem_reason::MPS_NOT_READY.into(), message: String::new() };
    publish(&state, &[Share { problem: Some(reason), ..share("a") }]);
    assert!(text_of(&state).lines().any(|line| {
        line.starts_with("kerf_share_limits_in_force{")
            && line.contains("share=\"a\"")
            && line.ends_with(" 0")
    }));

    state.prepared.remove("a");
    assert!(!text_of(&state).contains("share=\""), "what is not given out has no series");
    publish(&state, &[]);
    let gone = text_of(&state);
    assert!(!gone.contains("share=\"") && !gone.contains("EXCLUSIVE_PROCESS"), "{gone}");
    assert!(!samples(&gone).iter().any(|(series, _)| series.starts_with("kerf_gpu_mps_server_up")));
}

#[test]
fn shares_of_an_instance_have_its_place() {
    let state = state();
    let placement = Placement { start: 4, size: 4 };
    let mps = MpsState { up: true, ..MpsState::default() };
    state.publish_gpu(Gpu {
        uuid: GPU.into(),
        instances: vec![Instance { placement, mps, ..Instance::default() }, Instance::default()],
        shares: vec![Share { placement: Some(placement), ..share("a") }],
        ..Gpu::default()
    });
    let mut prepared = record("a");
    let carrier = DeviceKey::instance(GPU, placement);
    prepared.devices[0].key = carrier.clone().with_share("a");
    state.prepared.record(prepared).unwrap();
    state.metrics.uses(&DeviceKey::gpu(GPU), [("u".to_owned(), 7)].into());
    state.metrics.uses(&carrier, [("u".to_owned(), 5)].into());
    let text = text_of(&state);
    assert_eq!(
        value(&text, &format!("kerf_mig_mps_server_up{{gpu=\"{GPU}\",placement=\"4:4\"}}")),
        Some(1.0)
    );
    assert_eq!(text.matches("mps_server_up{").count(), 1, "of the GPU there is none: {text}");
    let used = samples(&text).into_iter().find(|(series, _)| {
        series.starts_with("kerf_share_memory_used_bytes{") && series.contains("placement=\"4:4\"")
    });
    assert_eq!(
        used.map(|(_, bytes)| bytes),
        Some(5.0),
        "what the pod has elsewhere on the GPU does not count"
    );
}

#[test]
fn what_happens_is_counted() {
    let state = state();
    state.metrics.mig_step(&step::Step::EnableMig, true);
    state.metrics.mig_step(&step::Step::EnableMig, false);
    state.metrics.mig_step(&step::Step::EnableMig, false);
    state.metrics.share_step(&shares::Step::CreateServer { device: GPU.into() }, true);
    state.metrics.prepare(true, Duration::from_millis(30));
    state.metrics.ended(GPU, true);
    let text = text_of(&state);
    let ended = |reason| format!("kerf_clients_ended_total{{gpu=\"{GPU}\",reason=\"{reason}\"}}");
    assert_eq!((value(&text, &ended("past_mps")), value(&text, &ended("memory"))), (Some(1.0), Some(0.0)));
    for (series, expected) in [
        ("kerf_steps_total{step=\"EnableMig\",result=\"done\"}", 1.0),
        ("kerf_steps_total{step=\"EnableMig\",result=\"failed\"}", 2.0),
        ("kerf_steps_total{step=\"CreateServer\",result=\"done\"}", 1.0),
        ("kerf_steps_total{step=\"CreateServer\",result=\"failed\"}", 0.0),
        ("kerf_claim_prepare_seconds_count{result=\"prepared\"}", 1.0),
        ("kerf_claim_prepare_seconds_count{result=\"failed\"}", 0.0),
    ] {
        assert_eq!(value(&text, series), Some(expected), "{series} in {text}");
    }
}

#[tokio::test]
async fn an_address_is_where_it_is_served() {
    assert!("".parse::<Address>().unwrap().is_empty());
    for wrong in [":", ":99999", "9", "node:9", "::1:9"] {
        assert!(wrong.parse::<Address>().unwrap_err().contains("ip:port"), "{wrong}");
    }
    let port = std::net::TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    let address: Address = format!(":{port}").parse().unwrap();
    let server = tokio::spawn(async move { serve(&address, state()).await });
    let get = |head: &'static str| async move {
        let mut stream = loop {
            match TcpStream::connect(("127.0.0.1", port)).await {
                Ok(stream) => break stream,
                Err(_) => tokio::task::yield_now().await,
            }
        };
        stream.write_all(format!("{head} HTTP/1.1\r\nHost: n\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    // One that says nothing keeps nobody from being answered.
    let _silent = TcpStream::connect(("127.0.0.1", port)).await;
    let answer = get("GET /metrics").await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(!samples(body).is_empty());
    assert!(get("GET /").await.starts_with("HTTP/1.1 404 "));
    assert!(get("POST /metrics").await.starts_with("HTTP/1.1 405 "));
    server.abort();
}
