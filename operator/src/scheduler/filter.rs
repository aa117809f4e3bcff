//! Which devices the selectors of a request and of its class admit.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_crds::device::{self, capacity};
use kerf_crds::gpu_node::{Gpu, GpuNodeStatus};
use kerf_crds::names;
use kerf_crds::requests::LEAST_SHARE_MEMORY;
use kerf_planner::snapshot::Portion;
use kube::ResourceExt;

use super::needs::Ask;
use super::requests::{class_selectors, expressions};
use super::selectors::{Device, Selectors};
use super::tell::share_text;
use crate::cache::quantity;

/// What of a GPU the selectors admit.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Admitted {
    /// The whole of it.
    pub whole: bool,
    /// Instances of these profiles, by index.
    pub profiles: BTreeSet<usize>,
    /// A share of it.
    pub share: bool,
    /// Shares of instances of these profiles, by index: what compute each has to have, in thousandths of a percent of the
    /// GPU's.
    pub in_instances: BTreeMap<usize, u64>,
}

impl Admitted {
    /// Whether it can only be told by the GPU's geometry.
    pub fn of_geometry(&self) -> bool {
        self.share || !self.profiles.is_empty() || !self.in_instances.is_empty()
    }
}

/// The selectors of a request and its class together.
pub(super) struct Filter<'a> {
    selectors: &'a Selectors,
    path: &'a str,
    expressions: Vec<&'a str>,
    capacity: Vec<(&'a str, i128)>,
    /// Some expression tells GPUs of one kind apart.
    pub individual: bool,
    class: &'a DeviceClass,
    own: usize,
    /// How large a share of a GPU would have to be, if the request says so.
    pub share: Option<Portion>,
}

impl<'a> Filter<'a> {
    /// An error says what is wrong with the request.
    pub fn new(selectors: &'a Selectors, class: &'a DeviceClass, ask: &'a Ask<'a>) -> Result<Self, String> {
        let of_class: Vec<&str> = expressions(class_selectors(class)).collect();
        let of_request: Vec<&str> = expressions(ask.selectors.as_ref()).collect();
        let own = of_request.len();
        let expressions: Vec<&str> = of_class.into_iter().chain(of_request).collect();
        let mut asked = Vec::new();
        for (name, amount) in ask.capacity.iter().filter_map(|c| c.requests.as_ref()).flatten() {
            let amount = quantity::milli(amount)
                .ok_or_else(|| format!("{}: capacity {name:?}: {:?} is no quantity", ask.path, amount.0))?;
            let name = name.strip_prefix(names::DRIVER).and_then(|n| n.strip_prefix('/')).unwrap_or(name);
            asked.push((name, amount));
        }
        let share = match share_size(&asked, ask) {
            Ok(size) => Some(size),
            Err(message) if class.name_any() == names::SHARE_CLASS => return Err(message),
            Err(_) => None,
        };
        Ok(Self {
            share,
            selectors,
            path: &ask.path,
            individual: expressions.iter().any(|expression| Selectors::tells_gpus_apart(expression)),
            expressions,
            capacity: asked,
            class,
            own,
        })
    }

    /// What of the GPU will do.
    pub fn of_gpu(&self, status: &GpuNodeStatus, gpu: &Gpu) -> Result<Admitted, String> {
        let admits = |kind: device::Device<'_>| {
            self.admits(&Device {
                attributes: device::attributes(status, gpu, kind),
                capacities: device::capacities(gpu, kind),
            })
        };
        let mut admitted = Admitted {
            whole: admits(device::Device::Gpu)?,
            profiles: BTreeSet::new(),
            share: gpu.sharing.is_some() && self.share.is_some() && admits(device::Device::Share)?,
            in_instances: BTreeMap::new(),
        };
        if let Some(geometry) = status.geometry_of(gpu) {
            for (index, profile) in geometry.profiles.iter().enumerate() {
                if admits(device::Device::Instance(geometry, profile, None))? {
                    admitted.profiles.insert(index);
                }
                let Some(share) = self.share.filter(|_| gpu.sharing.is_some()) else { continue };
                if admits(device::Device::InstanceShare(geometry, profile, None))? {
                    // MPS takes whole percents of the instance: what is enforced is what counts.
                    let percent = geometry.percent_of(profile, share.compute_milli);
                    admitted.in_instances.insert(index, geometry.compute_of(profile, percent));
                }
            }
        }
        Ok(admitted)
    }

    fn admits(&self, device: &Device) -> Result<bool, String> {
        let room = self.capacity.iter().all(|(name, amount)| {
            device.capacities.get(name).is_some_and(|there| i128::from(*there) * 1000 >= *amount)
        });
        if !room {
            return Ok(false);
        }
        for expression in &self.expressions {
            if !self
                .selectors
                .matches(expression, device)
                .map_err(|message| format!("{}: {message}", self.path))?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What people call it.
    pub fn label(&self) -> String {
        let class = self.class.name_any();
        let base = match class.as_str() {
            names::SHARE_CLASS => {
                let Portion { memory_bytes, compute_milli, .. } = self.share.unwrap_or_default();
                let text = share_text(memory_bytes, u32::try_from(compute_milli).unwrap_or(u32::MAX));
                return if self.own > 0 { format!("{text} (with selectors)") } else { text };
            }
            names::GPU_CLASS => "a whole GPU".to_owned(),
            names::MIG_CLASS => "a MIG instance".to_owned(),
            other => match other.strip_prefix("mig-").and_then(|rest| rest.strip_suffix(".kerf.dev")) {
                Some(profile) => profile.to_owned(),
                None => format!("a device of class {other}"),
            },
        };
        if self.own > 0 || !self.capacity.is_empty() { format!("{base} (with selectors)") } else { base }
    }
}

/// The share that a request asks for by its capacities; an error says why it is none.
fn share_size(asked: &[(&str, i128)], ask: &Ask<'_>) -> Result<Portion, String> {
    let of = |wanted: &str| asked.iter().find(|(name, _)| *name == wanted).map(|(_, amount)| *amount);
    let sizes = of(capacity::MEMORY).zip(of(capacity::COMPUTE));
    let Some((memory, compute)) = sizes.filter(|(memory, compute)| *memory > 0 && *compute > 0) else {
        return Err(format!(
            "{}: a share needs a size: capacity.requests with {} in bytes and {} in percent of a GPU",
            ask.path,
            capacity::MEMORY,
            capacity::COMPUTE
        ));
    };
    let size = Portion {
        memory_bytes: u64::try_from((memory + 999) / 1000).unwrap_or(u64::MAX),
        // MPS takes whole percents: what is enforced is what counts.
        compute_milli: u64::try_from(compute).unwrap_or(u64::MAX).div_ceil(1000).saturating_mul(1000),
        clients: 1,
    };
    if size.memory_bytes < LEAST_SHARE_MEMORY {
        return Err(format!(
            "{}: capacity.requests.{} is in bytes, and less than {}Mi is too little for a CUDA context; write 12Gi for \
             12 GiB",
            ask.path,
            capacity::MEMORY,
            LEAST_SHARE_MEMORY >> 20
        ));
    }
    if ask.count.unwrap_or(1) != 1 {
        return Err(format!(
            "{}: a request is for one share: the processes of a container find one MPS server only, and each GPU or instance has its \
             own",
            ask.path
        ));
    }
    Ok(size)
}
