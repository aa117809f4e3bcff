//! Capability minors: which `/dev/nvidia-caps/nvidia-cap<minor>` grants access to which instance.
//!
//! The numbers are a static table of the driver: `config` 1, `monitor` 2, then 135 minors per GPU: nine per
//! GPU instance (0..14), the first for itself, the others for its compute instances (0..7).

use crate::geometry::{MAX_COMPUTE_INSTANCES, MAX_GPU_INSTANCES};

/// Grants what otherwise needs root: creating and destroying instances.
pub const CONFIG_MINOR: u32 = 1;
/// Grants reading what all instances do.
pub const MONITOR_MINOR: u32 = 2;
/// GPUs in the table.
pub const MAX_GPUS: u32 = 32;

const PER_GPU_INSTANCE: u32 = 1 + MAX_COMPUTE_INSTANCES;
const PER_GPU: u32 = PER_GPU_INSTANCE * MAX_GPU_INSTANCES;
const FIRST: u32 = 3;

/// What a capability minor stands for. `gpu` is the device minor of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Capability {
    Config,
    Monitor,
    GpuInstance { gpu: u32, gi: u32 },
    ComputeInstance { gpu: u32, gi: u32, ci: u32 },
}

impl Capability {
    /// The minor number.
    pub fn minor(self) -> u32 {
        match self {
            Capability::Config => CONFIG_MINOR,
            Capability::Monitor => MONITOR_MINOR,
            Capability::GpuInstance { gpu, gi } => FIRST + PER_GPU * gpu + PER_GPU_INSTANCE * gi,
            Capability::ComputeInstance { gpu, gi, ci } => {
                FIRST + PER_GPU * gpu + PER_GPU_INSTANCE * gi + 1 + ci
            }
        }
    }

    /// The capability of a minor.
    pub fn of_minor(minor: u32) -> Option<Capability> {
        match minor {
            CONFIG_MINOR => return Some(Capability::Config),
            MONITOR_MINOR => return Some(Capability::Monitor),
            _ => {}
        }
        let offset = minor.checked_sub(FIRST)?;
        let gpu = offset / PER_GPU;
        if gpu >= MAX_GPUS {
            return None;
        }
        let gi = offset % PER_GPU / PER_GPU_INSTANCE;
        match offset % PER_GPU % PER_GPU_INSTANCE {
            0 => Some(Capability::GpuInstance { gpu, gi }),
            ci => Some(Capability::ComputeInstance { gpu, gi, ci: ci - 1 }),
        }
    }

    /// The path below `/proc/driver/nvidia/capabilities`.
    pub fn proc_path(self) -> String {
        match self {
            Capability::Config => "mig/config".into(),
            Capability::Monitor => "mig/monitor".into(),
            Capability::GpuInstance { gpu, gi } => format!("gpu{gpu}/mig/gi{gi}/access"),
            Capability::ComputeInstance { gpu, gi, ci } => format!("gpu{gpu}/mig/gi{gi}/ci{ci}/access"),
        }
    }

    /// Its name in `mig-minors`.
    fn table_name(self) -> String {
        match self {
            Capability::Config => "config".into(),
            Capability::Monitor => "monitor".into(),
            Capability::GpuInstance { gpu, gi } => format!("gpu{gpu}/gi{gi}/access"),
            Capability::ComputeInstance { gpu, gi, ci } => format!("gpu{gpu}/gi{gi}/ci{ci}/access"),
        }
    }
}

/// The text of `/proc/driver/nvidia-caps/mig-minors`.
pub fn mig_minors() -> String {
    (CONFIG_MINOR..FIRST + PER_GPU * MAX_GPUS)
        .filter_map(|minor| Some(format!("{} {minor}\n", Capability::of_minor(minor)?.table_name())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minors_are_the_captured_ones() {
        // Listing on an H100 with 3g (GI 2) and 2g (GI 3), and those quoted in NVIDIA's DRA driver.
        assert_eq!(Capability::GpuInstance { gpu: 0, gi: 0 }.minor(), 3);
        assert_eq!(Capability::ComputeInstance { gpu: 0, gi: 0, ci: 0 }.minor(), 4);
        assert_eq!(Capability::GpuInstance { gpu: 0, gi: 1 }.minor(), 12);
        assert_eq!(Capability::GpuInstance { gpu: 1, gi: 0 }.minor(), 138);
        assert_eq!(Capability::ComputeInstance { gpu: 31, gi: 14, ci: 7 }.minor(), 4322);
        assert!(mig_minors().ends_with("gpu31/gi14/ci7/access 4322\n"));
    }

    #[test]
    fn a_minor_and_its_capability_name_each_other() {
        for minor in 1..=4322 {
            assert_eq!(Capability::of_minor(minor).map(Capability::minor), Some(minor));
        }
        assert_eq!(Capability::of_minor(0), None);
        assert_eq!(Capability::of_minor(4323), None);
    }
}
