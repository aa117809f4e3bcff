//! Memory at NVML: used by whom, limited for which cgroup, and from which driver on.

mod common;

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::TestNode;
use kerf_sim::cuda::{Driver as Library, Place};
use kerf_sim::kernel::protocol::{Answer, Request, SOCKET};
use kerf_sim::{Driver, GpuSpec, MemoryAccounting, NodeSpec, NvmlError, Occurrence};
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

const GIB: u64 = 1 << 30;
const TOTAL: u64 = 80 * GIB;
const RESERVED: u64 = TOTAL / 128;

/// The calls that the binding does not know.
struct Raw(libloading::Library);

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Limits {
    name_space: usize,
    soft: u64,
    hard: u64,
    used: u64,
}

#[allow(unsafe_code, reason = "calls C functions by name")]
impl Raw {
    fn load(test: &TestNode) -> Raw {
        // SAFETY: the library has no initialisers.
        Raw(unsafe { libloading::Library::new(test.node.library()) }.unwrap())
    }

    fn has(&self, name: &str) -> bool {
        // SAFETY: the symbol is not used.
        unsafe { self.0.get::<extern "C" fn()>(name.as_bytes()) }.is_ok()
    }

    /// Calls a function of a device and one pointer.
    fn call<T>(&self, name: &str, gpu: u64, argument: &mut T) -> Result<(), NvmlError> {
        // SAFETY: callers name functions whose argument is a `T`.
        let code = unsafe {
            let function = self.0.get::<extern "C" fn(u64, *mut T) -> u32>(name.as_bytes()).unwrap();
            function(gpu, argument)
        };
        NvmlError::from_code(code).map_or(Ok(()), Err)
    }

    fn set(&self, gpu: u64, cgroup: &Path, soft: u64, hard: u64) -> Result<(), NvmlError> {
        let path = CString::new(cgroup.to_str().unwrap()).unwrap();
        let mut limits = Limits { name_space: path.as_ptr() as usize, soft, hard, used: 0 };
        self.call("nvmlDeviceSetMemoryLimits_v1", gpu, &mut limits)
    }

    fn get(&self, gpu: u64, cgroup: &Path) -> Result<(u64, u64, u64), NvmlError> {
        let path = CString::new(cgroup.to_str().unwrap()).unwrap();
        let mut limits = Limits { name_space: path.as_ptr() as usize, ..Limits::default() };
        self.call("nvmlDeviceGetMemoryLimits_v1", gpu, &mut limits)?;
        Ok((limits.soft, limits.hard, limits.used))
    }

    /// The handle of the GPU at an index.
    fn gpu(&self, index: u64) -> u64 {
        let mut gpu = 0u64;
        self.call("nvmlDeviceGetHandleByIndex_v2", index, &mut gpu).unwrap();
        gpu
    }
}

fn node(branch: u32, accounting: MemoryAccounting) -> TestNode {
    let gpus = vec![GpuSpec::new("a100-80"), GpuSpec::new("a100-80").in_mig_mode()];
    let driver = Driver::of_branch(branch);
    TestNode::of(NodeSpec { driver, memory_accounting: accounting, ..NodeSpec::new("test", gpus) })
}

/// A cgroup that is removed with the test.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Cgroup {
        let path = PathBuf::from(format!("/sys/fs/cgroup/memory/kerf-nvml-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Cgroup(path)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last process may be on its way out.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A process in the cgroup that holds a gigabyte; ends with the guard.
struct Tenant(Child);

impl Tenant {
    fn start(test: &TestNode, cgroup: &Cgroup, ticket: Option<&str>) -> Tenant {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""])
            .arg(&cgroup.0)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "worker", "--ignored"])
            .env("KERF_SIM_TEST_WORKER", test.root())
            .env("KERF_SIM_TEST_TICKET", ticket.unwrap_or_default())
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        Tenant(command.spawn().unwrap())
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn library(root: &Path) -> Library {
    Library::open(&Place { socket: root.join(SOCKET), dev: root.join("dev") }).unwrap()
}

/// Makes a context on the first GPU and returns its number.
fn context(library: &mut Library, ticket: Option<String>) -> u64 {
    let device = library.seen()[0].clone();
    library.take(std::slice::from_ref(&device)).unwrap();
    match library.ask(&Request::Context { device: device.id, ticket, connections: 2 }) {
        Ok(Answer::Context(context)) => context,
        other => panic!("{other:?}"),
    }
}

/// What the tenant does; not a test of its own.
#[test]
#[ignore = "run by the tests below in a process of its own"]
fn worker() {
    let Ok(root) = std::env::var("KERF_SIM_TEST_WORKER") else { return };
    let mut library = library(Path::new(&root));
    let ticket = std::env::var("KERF_SIM_TEST_TICKET").ok().filter(|ticket| !ticket.is_empty());
    let context = context(&mut library, ticket);
    library.ask(&Request::Allocate { context, bytes: GIB }).unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn eventually(mut look: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if look() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it does not come about");
}

fn nvml(test: &TestNode) -> Nvml {
    Nvml::builder().lib_path(test.node.library().as_os_str()).init().unwrap()
}

#[test]
fn limits_are_absent_before_r615() {
    let names = ["nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"];
    let test = node(610, MemoryAccounting::Dmem);
    assert_eq!(names.map(|name| Raw::load(&test).has(name)), [false, false]);
    test.node.upgrade_driver(Driver::of_branch(615)).unwrap();
    assert_eq!(names.map(|name| Raw::load(&test).has(name)), [true, true]);
    assert_eq!(nvml(&test).sys_driver_version().unwrap(), "615.43.02");
}

#[test]
fn limits_are_set_read_and_cleared() {
    let test = node(615, MemoryAccounting::Dmem);
    let _nvml = nvml(&test);
    let raw = Raw::load(&test);
    let (gpu, in_mig_mode) = (raw.gpu(0), raw.gpu(1));
    let pod = Cgroup::new("limits");
    assert_eq!(raw.get(gpu, &pod.0), Err(NvmlError::NotFound));
    raw.set(gpu, &pod.0, GIB, 2 * GIB).unwrap();
    assert_eq!(raw.get(gpu, &pod.0), Ok((GIB, 2 * GIB, 0)));
    for (soft, hard) in [(2, 1), (0, TOTAL + 1), (TOTAL + 1, u64::MAX)] {
        assert_eq!(raw.set(gpu, &pod.0, soft, hard), Err(NvmlError::InvalidArgument), "{soft} {hard}");
    }
    raw.set(gpu, &pod.0, 0, u64::MAX).unwrap();
    assert_eq!(raw.get(gpu, &pod.0), Err(NvmlError::NotFound), "cleared");
    assert_eq!(raw.set(gpu, Path::new("/no/such"), 0, GIB), Err(NvmlError::OperatingSystem));
    assert_eq!(raw.set(gpu, Path::new("/tmp"), 0, GIB), Err(NvmlError::NotFound), "no cgroup");
    assert_eq!(raw.set(in_mig_mode, &pod.0, 0, GIB), Err(NvmlError::NotSupported));
    let stuck = NvmlError::OperatingSystem;
    test.node.inject("nvmlDeviceSetMemoryLimits", stuck, Occurrence::Once, Some(0)).unwrap();
    assert_eq!(raw.set(gpu, &pod.0, 0, GIB), Err(stuck));
    raw.set(gpu, &pod.0, 0, GIB).unwrap();
    test.node.reboot().unwrap();
    assert_eq!(raw.get(gpu, &pod.0), Err(NvmlError::NotFound), "a reboot clears");
}

#[test]
fn a_back_end_decides_what_a_cgroup_without_limit_answers() {
    let pod = Cgroup::new("back-end");
    for (accounting, set) in
        [(MemoryAccounting::Misc, Ok(())), (MemoryAccounting::Off, Err(NvmlError::NotSupported))]
    {
        let test = node(615, accounting);
        let _nvml = nvml(&test);
        let raw = Raw::load(&test);
        assert_eq!(raw.get(raw.gpu(0), &pod.0), Err(NvmlError::NotSupported), "{accounting:?}");
        assert_eq!(raw.set(raw.gpu(0), &pod.0, 0, GIB), set, "{accounting:?}");
    }
}

#[test]
fn used_memory_is_its_processs_and_its_cgroups() {
    let test = node(615, MemoryAccounting::Dmem);
    let nvml = nvml(&test);
    let gpu = nvml.device_by_index(0).unwrap();
    let memory = || {
        let memory = gpu.memory_info().unwrap();
        (memory.total, memory.reserved, memory.free, memory.used)
    };
    assert_eq!(memory(), (TOTAL, RESERVED, TOTAL - RESERVED, 0));
    test.node.run_kernel().unwrap();
    let raw = Raw::load(&test);
    let pod = Cgroup::new("used");
    raw.set(raw.gpu(0), &pod.0, 0, 2 * GIB).unwrap();
    let tenant = Tenant::start(&test, &pod, None);
    eventually(|| memory() == (TOTAL, RESERVED, TOTAL - RESERVED - GIB, GIB));
    assert_eq!(raw.get(raw.gpu(0), &pod.0), Ok((0, 2 * GIB, GIB)));
    eventually(|| {
        let processes = gpu.running_compute_processes().unwrap();
        let found = processes.iter().find(|process| process.pid == tenant.0.id());
        found.is_some_and(|process| matches!(process.used_gpu_memory, UsedGpuMemory::Used(GIB)))
    });
    drop(tenant);
    eventually(|| memory().3 == 0);
}

#[test]
fn clients_of_mps_are_in_a_list_of_their_own() {
    let test = node(615, MemoryAccounting::Dmem);
    test.node.run_kernel().unwrap();
    let nvml = nvml(&test);
    let gpu = nvml.device_by_index(0).unwrap();
    let mut server = library(test.root());
    context(&mut server, None);
    let Ok(Answer::Ticket(ticket)) = server.ask(&Request::Admit) else { panic!("no ticket") };
    let pod = Cgroup::new("mps");
    let tenant = Tenant::start(&test, &pod, Some(&ticket));
    eventually(|| gpu.memory_info().unwrap().used == GIB);
    let clients = || {
        let raw = Raw::load(&test);
        // Count and then four fields, 24 bytes, of each.
        let mut list = [0u64; 3 * 4];
        let mut count = 4u32;
        raw.list("nvmlDeviceGetMPSComputeRunningProcesses_v3", raw.gpu(0), &mut count, &mut list).unwrap();
        (count, list[0] as u32, list[1])
    };
    assert_eq!(clients(), (1, tenant.0.id(), GIB));
    eventually(|| {
        let processes = gpu.running_compute_processes().unwrap();
        processes.iter().map(|process| process.pid).collect::<Vec<_>>() == [std::process::id()]
    });
}

#[allow(unsafe_code, reason = "calls a C function by name")]
impl Raw {
    fn list(&self, name: &str, gpu: u64, count: &mut u32, list: &mut [u64]) -> Result<(), NvmlError> {
        // SAFETY: the function fills as many entries of 24 bytes as `count` says, for which the list has room.
        let code = unsafe {
            let function =
                self.0.get::<extern "C" fn(u64, *mut u32, *mut u64) -> u32>(name.as_bytes()).unwrap();
            function(gpu, count, list.as_mut_ptr())
        };
        NvmlError::from_code(code).map_or(Ok(()), Err)
    }
}
