//! The files of a driver installation, below the driver root: libraries, device nodes, `/proc/driver/nvidia`.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::caps::{self, CONFIG_MINOR, Capability, MONITOR_MINOR};
use crate::engine::MEMORY_LIMITS_SINCE;
use crate::state::{CapNodes, Driver, Gpu, State};
use crate::{Error, Model, elf};

/// Character device major of `nvidia<G>`, `nvidiactl` and `nvidia-modeset`; given out by the kernel's list.
pub const NVIDIA_MAJOR: u32 = 195;
/// Major of `nvidia-uvm`: dynamic on hardware, a usual value here.
pub const UVM_MAJOR: u32 = 510;
/// Major of the capability nodes: dynamic on hardware, a captured value here.
pub const CAPS_MAJOR: u32 = 238;
/// Minors of GPUs; 254 is `nvidia-modeset`, 255 `nvidiactl`.
pub const MAX_GPU_MINOR: u32 = 253;

/// Where the libraries lie.
pub const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

const CAPABILITIES: &str = "proc/driver/nvidia/capabilities";
const CAP_NODES: &str = "dev/nvidia-caps";

/// Libraries without content, and the number under which programs link to each. (`libcuda` has content where the simulated
/// one is built.)
const PLACEHOLDERS: &[(&str, &str)] = &[
    ("libcuda", "1"),
    ("libcudadebugger", "1"),
    ("libnvidia-cfg", "1"),
    ("libnvidia-nvvm", "4"),
    ("libnvidia-opencl", "1"),
    ("libnvidia-ptxjitcompiler", "1"),
];

/// Lays out the installation. `library` is the built `libnvidia-ml.so.1`.
pub fn install(
    root: &Path,
    state: &State,
    model: impl Fn(&Gpu) -> Model,
    library: &Path,
) -> Result<(), Error> {
    libraries(root, &state.driver, library)?;
    devices(root, state)?;
    proc_files(root, state, model)?;
    show(root, state)
}

/// The library as this driver has it: functions that came later have names that nobody looks for.
fn of_driver(library: &Path, driver: &Driver) -> Result<Vec<u8>, Error> {
    let mut content = std::fs::read(library).map_err(|e| Error::io("read the library", library, e))?;
    let later: [&[u8]; 2] = [b"nvmlDeviceSetMemoryLimits_v1\0", b"nvmlDeviceGetMemoryLimits_v1\0"];
    for name in later.into_iter().filter(|_| driver.branch() < MEMORY_LIMITS_SINCE) {
        while let Some(at) = find(&content, name) {
            content[at] = b'_';
        }
    }
    Ok(content)
}

/// Where `wanted` begins. A library has tens of millions of bytes, which unoptimised code takes seconds for.
#[allow(unsafe_code, reason = "the standard library cannot search bytes")]
fn find(content: &[u8], wanted: &[u8]) -> Option<usize> {
    // SAFETY: both slices are valid for their lengths, and what comes back is null or points into the first.
    unsafe {
        let start = content.as_ptr();
        let found = libc::memmem(start.cast(), content.len(), wanted.as_ptr().cast(), wanted.len());
        (!found.is_null()).then(|| found.cast::<u8>().offset_from_unsigned(start))
    }
}

/// Lays out libraries and programs, and takes those of another driver away.
pub fn libraries(root: &Path, driver: &Driver, library: &Path) -> Result<(), Error> {
    let version = &driver.version;
    let _ = std::fs::remove_dir_all(root.join(LIBRARIES));
    let folder = root.join(LIBRARIES);
    make_dir(&folder)?;
    let nvml = folder.join(format!("libnvidia-ml.so.{version}"));
    put(&nvml, &of_driver(library, driver)?, 0o755)?;
    link(&folder, "libnvidia-ml.so.1", &format!("libnvidia-ml.so.{version}"))?;
    for (name, number) in PLACEHOLDERS {
        let soname = format!("{name}.so.{number}");
        let file = format!("{name}.so.{version}");
        match crate::node::built_library("libkerf_sim_libcuda.so").filter(|_| *name == "libcuda") {
            Some(built) => link_or_copy(&built, &folder.join(&file))?,
            None => put(&folder.join(&file), &elf::shared_object(&soname), 0o755)?,
        }
        link(&folder, &soname, &file)?;
    }
    link(&folder, "libcuda.so", "libcuda.so.1")?;
    // As where the driver is installed on the host itself: a C library that is not that of any container's image. Whoever
    // takes all of the folder for the driver's libraries loads it, and ends.
    put(&folder.join("libc.so.6"), &elf::shared_object("libc.so.6"), 0o755)?;
    let binaries = root.join("usr/bin");
    make_dir(&binaries)?;
    mps(&binaries)?;
    let script = format!("#!/bin/sh\necho 'simulated NVIDIA driver {version}: use `kerf-sim show`'\n");
    put(&binaries.join("nvidia-smi"), script.as_bytes(), 0o755)
}

/// The programs of MPS, where they are built: they lie beside the running executable, as the library does. Without
/// them the node is one without MPS.
fn mps(binaries: &Path) -> Result<(), Error> {
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        let (Some(built), path) = (crate::node::built(name), binaries.join(name)) else { continue };
        let _ = std::fs::remove_file(&path);
        link_or_copy(&built, &path)?;
    }
    Ok(())
}

/// A link costs nothing; across file systems it has to be a copy.
fn link_or_copy(built: &Path, path: &Path) -> Result<(), Error> {
    if std::fs::hard_link(built, path).is_err() {
        std::fs::copy(built, path).map_err(|e| Error::io("copy what is built to", path, e))?;
    }
    Ok(())
}

/// The nodes that exist as long as the driver is installed.
fn devices(root: &Path, state: &State) -> Result<(), Error> {
    let dev = root.join("dev");
    make_dir(&root.join(CAP_NODES))?;
    for gpu in &state.gpus {
        node(&dev.join(format!("nvidia{}", gpu.minor)), NVIDIA_MAJOR, gpu.minor, 0o666)?;
    }
    node(&dev.join("nvidiactl"), NVIDIA_MAJOR, 255, 0o666)?;
    node(&dev.join("nvidia-modeset"), NVIDIA_MAJOR, 254, 0o666)?;
    node(&dev.join("nvidia-uvm"), UVM_MAJOR, 0, 0o666)?;
    node(&dev.join("nvidia-uvm-tools"), UVM_MAJOR, 1, 0o666)
}

/// `/proc/driver/nvidia/version`.
pub fn version(root: &Path, driver: &Driver) -> Result<(), Error> {
    let version = &driver.version;
    let text = format!(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (simulated)\n\
         GCC version:  simulated\n"
    );
    put(&root.join("proc/driver/nvidia/version"), text.as_bytes(), 0o444)
}

fn proc_files(root: &Path, state: &State, model: impl Fn(&Gpu) -> Model) -> Result<(), Error> {
    let version = &state.driver.version;
    let driver = root.join("proc/driver/nvidia");
    let devices = format!(
        "Character devices:\n  1 mem\n  5 /dev/tty\n 10 misc\n{NVIDIA_MAJOR} nvidia\n{NVIDIA_MAJOR} nvidia-modeset\n\
         {NVIDIA_MAJOR} nvidiactl\n{CAPS_MAJOR} nvidia-caps\n{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n259 blkext\n"
    );
    make_dir(&driver)?;
    put(&root.join("proc/devices"), devices.as_bytes(), 0o444)?;
    self::version(root, &state.driver)?;
    let params = "DeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\nModifyDeviceFiles: 1\n";
    put(&driver.join("params"), params.as_bytes(), 0o444)?;
    for gpu in &state.gpus {
        let folder = driver.join("gpus").join(gpu.pci.short_id());
        make_dir(&folder)?;
        let text = format!(
            "Model: \t\t {}\nIRQ:   \t\t 0\nGPU UUID: \t {}\nVideo BIOS: \t 00.00.00.00.00\nBus Type: \t PCIe\n\
             DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\nDevice Minor: \t {}\n\
             GPU Firmware: \t {version}\nGPU Excluded:\t No\n",
            model(gpu).product,
            gpu.uuid,
            gpu.pci.short_id(),
            gpu.minor
        );
        put(&folder.join("information"), text.as_bytes(), 0o444)?;
    }
    let caps_folder = root.join("proc/driver/nvidia-caps");
    make_dir(&caps_folder)?;
    put(&caps_folder.join("mig-minors"), caps::mig_minors().as_bytes(), 0o444)
}

/// Brings what shows the instances in step with the state, whatever it showed before: an `access` file per
/// capability that exists, and, unless the node is set up without, a device node per capability that has ever
/// existed.
pub fn show(root: &Path, state: &State) -> Result<(), Error> {
    for capability in capabilities(state) {
        appear(root, state, capability)?;
    }
    for gpu in &state.gpus {
        remove_ended(&root.join(CAPABILITIES).join(format!("gpu{}/mig", gpu.minor)), gpu)?;
    }
    Ok(())
}

/// As [`show`], where what is shown is `old`.
pub fn show_change(root: &Path, old: &State, new: &State) -> Result<(), Error> {
    let (before, after) = (capabilities(old), capabilities(new));
    for capability in after.difference(&before) {
        appear(root, new, *capability)?;
    }
    for capability in before.difference(&after) {
        // The folder of a GPU instance takes those of its compute instances with it.
        let path = root.join(CAPABILITIES).join(capability.proc_path());
        let folder = path.parent().unwrap_or(&path);
        match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io("remove", folder, error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// All capabilities that exist.
fn capabilities(state: &State) -> BTreeSet<Capability> {
    let instances = state.gpus.iter().flat_map(instance_capabilities);
    [Capability::Config, Capability::Monitor].into_iter().chain(instances).collect()
}

fn appear(root: &Path, state: &State, capability: Capability) -> Result<(), Error> {
    let (minor, mode) = (capability.minor(), mode_of(capability));
    let path = root.join(CAPABILITIES).join(capability.proc_path());
    if !path.exists() {
        let text = format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n");
        path.parent().map_or(Ok(()), make_dir)?;
        put(&path, text.as_bytes(), mode)?;
    }
    if state.options.cap_nodes == CapNodes::AtCreation {
        let path = root.join(CAP_NODES).join(format!("nvidia-cap{minor}"));
        match node(&path, CAPS_MAJOR, minor, mode) {
            // A caller without the right to make nodes goes without, as without nvidia-modprobe.
            Err(Error::Mknod { .. }) | Ok(()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn instance_capabilities(gpu: &Gpu) -> impl Iterator<Item = Capability> {
    let minor = gpu.minor;
    gpu.instances.iter().flat_map(move |instance| {
        let gi = instance.id;
        std::iter::once(Capability::GpuInstance { gpu: minor, gi }).chain(
            instance.compute.iter().map(move |compute| Capability::ComputeInstance {
                gpu: minor,
                gi,
                ci: compute.id,
            }),
        )
    })
}

/// Removes the folders of instances that are gone.
fn remove_ended(folder: &Path, gpu: &Gpu) -> Result<(), Error> {
    for (name, path) in subfolders(folder) {
        let Some(gi) = name.strip_prefix("gi").and_then(|id| id.parse().ok()) else { continue };
        let Some(instance) = gpu.instance(gi) else {
            remove_dir(&path)?;
            continue;
        };
        for (name, path) in subfolders(&path) {
            let ci = name.strip_prefix("ci").and_then(|id| id.parse().ok());
            if ci.is_some_and(|ci| instance.compute_instance(ci).is_none()) {
                remove_dir(&path)?;
            }
        }
    }
    Ok(())
}

/// What a reboot does to `/dev`: the nodes of instances are gone.
pub fn forget_nodes(root: &Path) -> Result<(), Error> {
    let keep = [CONFIG_MINOR, MONITOR_MINOR].map(|minor| format!("nvidia-cap{minor}"));
    let folder = root.join(CAP_NODES);
    let Ok(entries) = std::fs::read_dir(&folder) else { return Ok(()) };
    for entry in entries.filter_map(Result::ok) {
        if !keep.iter().any(|name| entry.file_name() == name.as_str()) {
            let path = entry.path();
            std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
        }
    }
    Ok(())
}

/// `config` is for root; the others are for whoever is let at them.
fn mode_of(capability: Capability) -> u32 {
    match capability {
        Capability::Config => 0o400,
        _ => 0o444,
    }
}

fn subfolders(folder: &Path) -> Vec<(String, std::path::PathBuf)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| Some((entry.file_name().to_str()?.to_owned(), entry.path())))
        .collect()
}

fn make_dir(path: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))
}

fn remove_dir(path: &Path) -> Result<(), Error> {
    std::fs::remove_dir_all(path).map_err(|e| Error::io("remove", path, e))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), Error> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(|e| Error::io("set the mode of", path, e))
}

fn put(path: &Path, content: &[u8], mode: u32) -> Result<(), Error> {
    std::fs::write(path, content).map_err(|e| Error::io("write", path, e))?;
    set_mode(path, mode)
}

fn link(folder: &Path, name: &str, target: &str) -> Result<(), Error> {
    let path = folder.join(name);
    symlink(target, &path).map_err(|e| Error::io("link", &path, e))
}

/// Makes a character device node unless it is there.
fn node(path: &Path, major: u32, minor: u32, mode: u32) -> Result<(), Error> {
    let device = libc::makedev(major, minor);
    if std::fs::symlink_metadata(path).is_ok_and(|meta| meta.rdev() == device) {
        return Ok(());
    }
    let c_path = CString::new(path.as_os_str().as_bytes())
        .map_err(|e| Error::io("make", path, std::io::Error::new(std::io::ErrorKind::InvalidInput, e)))?;
    // SAFETY: the path is a C string that lives through the call.
    #[allow(unsafe_code, reason = "the standard library cannot make device nodes")]
    let result = unsafe { libc::mknod(c_path.as_ptr(), libc::S_IFCHR | mode, device) };
    match result {
        0 => set_mode(path, mode),
        _ => {
            let source = std::io::Error::last_os_error();
            match source.kind() {
                // Another process was faster.
                std::io::ErrorKind::AlreadyExists => Ok(()),
                std::io::ErrorKind::PermissionDenied => Err(Error::Mknod { path: path.to_owned(), source }),
                _ => Err(Error::io("make device node", path, source)),
            }
        }
    }
}
