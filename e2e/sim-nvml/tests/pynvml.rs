//! NVIDIA's Python bindings (nvidia-ml-py) as a client: they know the library only by nvml.h.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{TestNode, toolchain};
use kerf_sim::{GpuSpec, NvmlError, Occurrence, SimNode};
use serde_json::{Value, json};

#[test]
fn an_instance_lives_and_ends() {
    let hopper = GpuSpec { minor: Some(4), numa: Some(1), ..GpuSpec::new("h100-80-sxm") };
    run("life.py", &TestNode::new(vec![hopper, GpuSpec::new("a100-40")]));
}

#[test]
fn every_error_appears_in_its_case() {
    let through = GpuSpec { reset_forbidden: true, ..GpuSpec::new("a100-80") };
    let gpus = ["h100-80-sxm", "a100-40", "invented-nomig"].map(GpuSpec::new);
    run("errors.py", &TestNode::new(gpus.into_iter().chain([through]).collect()));
}

/// Runs a script of `tests/pynvml` against the node, and does to the hardware what it asks for.
fn run(script: &str, test: &TestNode) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pynvml");
    // Beside it lies a C library that is not Python's.
    let own = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(test.node.library(), own.path().join("libnvidia-ml.so.1")).unwrap();
    let mut child = Command::new(toolchain("python-nvidia-ml-py", "python"))
        .arg(folder.join(script))
        .env("DRIVER_ROOT", test.root())
        .env("KERF_SIM_ROOT", test.root())
        .env("LD_LIBRARY_PATH", own.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answers = child.stdin.take().unwrap();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = match act(&test.node, &request) {
            Ok(value) => json!({ "ok": value }),
            Err(error) => json!({ "error": error }),
        };
        writeln!(answers, "{answer}").unwrap();
    }
    let status = child.wait().unwrap();
    assert!(status.success(), "{script} failed ({status}); its message is above");
}

fn act(node: &SimNode, request: &Value) -> Result<Value, String> {
    let number = |name: &str| request[name].as_u64();
    let gpu = || number("gpu").and_then(|gpu| usize::try_from(gpu).ok()).ok_or("which GPU?");
    let text = |error: kerf_sim::Error| error.to_string();
    let gi = number("gi").and_then(|gi| u32::try_from(gi).ok());
    match request["action"].as_str().unwrap_or_default() {
        "reboot" => node.reboot().map_err(text)?,
        "unload_driver" => node.unload_driver().map_err(text)?,
        "reload_driver" => node.reload_driver().map_err(text)?,
        "lose" => node.lose_gpu(gpu()?).map_err(text)?,
        "recover" => node.recover_gpu(gpu()?).map_err(text)?,
        "xid" => node.xid(gpu()?, gi, number("code").ok_or("which code?")?).map_err(text)?,
        "xid_soon" => {
            let (node, gpu, code) = (node.clone(), gpu()?, number("code").ok_or("which code?")?);
            std::thread::spawn(move || {
                // The script is to be in its wait by then; if it is not, the event waits for it.
                std::thread::sleep(Duration::from_millis(100));
                node.xid(gpu, None, code)
            });
        }
        "hold_exclusively" => return Ok(node.hold_exclusively(gpu()?).map_err(text)?.keep().into()),
        "release" => node.release(number("id").ok_or("which hold?")?).map_err(text)?,
        "codes" => return Ok(NvmlError::ALL.iter().map(|error| error.code()).collect()),
        "inject" => {
            let code = number("code").and_then(|code| u32::try_from(code).ok());
            let error = code.and_then(NvmlError::from_code).ok_or("which error?")?;
            let call = request["call"].as_str().ok_or("which call?")?;
            node.inject(call, error, Occurrence::Once, None).map_err(text)?;
        }
        other => return Err(format!("no such action: {other}")),
    }
    Ok(Value::Null)
}
