//! The program on a simulated node without Kerf: where nothing limits a program, it says so. That it verifies what Kerf
//! sets is shown on a cluster (`faults`, `hardware`).

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use kerf_sim::{NodeSpec, SimNode};

fn check(library: &std::path::Path, isolation: &str) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kerf-hardware"))
        .args(["check", "--memory", "8Gi", "--percent", "25", "--isolation", isolation, "--library"])
        .arg(library)
        .env_remove("CUDA_MPS_PIPE_DIRECTORY")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

#[test]
fn without_limits_nothing_is_verified() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let node =
        SimNode::create(&folder.path().join("root"), &NodeSpec::uniform("test", "h100-80-sxm", 1)).unwrap();
    node.set_pid_namespace(Some(0)).unwrap();
    node.run_kernel().unwrap();
    let library = node.library().with_file_name("libcuda.so.1");

    let (output, table) = check(&library, "driver");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        table.starts_with("NVIDIA H100 80GB HBM3, a share of 8.00 GiB and 25 %, isolation driver\n"),
        "{table}"
    );
    for line in [
        "| to allocate more, by one process | refused | **not enforced**: got 8.25 GiB of 8.00 GiB |",
        "| to allocate more, by several processes | refused: the sum counts | **not enforced**: got 16.00 GiB of 8.00 GiB |",
        "| no `CUDA_MPS_PIPE_DIRECTORY` | no GPU | **not enforced**: got the GPU with 132 multiprocessors and 0.25 GiB |",
        "| `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100` | no more than its ceiling | **not enforced**: a kernel ran on 132 \
         multiprocessors of 132, where 25 % is 33; the device says that it has 132 |",
        "A program with a share of 8.00 GiB is shown 79.65 GiB of memory, 79.03 GiB of them free.",
    ] {
        assert!(table.lines().any(|other| other == line), "{line} is not in\n{table}");
    }
    let (output, table) = check(&library, "process");
    assert_eq!(output.status.code(), Some(1));
    assert!(table.contains("| not enforced, as said: got 16.00 GiB of 8.00 GiB |"), "{table}");

    // Without a GPU nothing is known.
    node.stop_kernel();
    let (output, table) = check(&library, "driver");
    assert_eq!(output.status.code(), Some(2), "{table}");
    assert!(table.contains("could not be tried: cuInit: CUDA_ERROR_NO_DEVICE"), "{table}");
    let (output, table) = check(&folder.path().join("libcuda.so.1"), "driver");
    assert_eq!(output.status.code(), Some(2), "{table}");
    assert!(table.contains("could not be tried: dlopen: "), "{table}");
}
