//! Which devices the selectors of a request and of its class admit.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_crds::gpu_node::{Gpu, GpuNodeStatus};
use kerf_crds::{device, names};
use kube::ResourceExt;

use super::needs::Ask;
use super::requests::{class_selectors, expressions};
use super::selectors::{Device, Selectors};
use crate::cache::quantity;

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
}

impl<'a> Filter<'a> {
    /// An error says what is wrong with the request.
    pub fn new(selectors: &'a Selectors, class: &'a DeviceClass, ask: &'a Ask<'a>) -> Result<Self, String> {
        let of_class: Vec<&str> = expressions(class_selectors(class)).collect();
        let of_request: Vec<&str> = expressions(ask.selectors.as_ref()).collect();
        let own = of_request.len();
        let expressions: Vec<&str> = of_class.into_iter().chain(of_request).collect();
        let mut capacity = Vec::new();
        for (name, amount) in ask.capacity.iter().filter_map(|c| c.requests.as_ref()).flatten() {
            let amount = quantity::milli(amount)
                .ok_or_else(|| format!("{}: capacity {name:?}: {:?} is no quantity", ask.path, amount.0))?;
            let name = name.strip_prefix(names::DRIVER).and_then(|n| n.strip_prefix('/')).unwrap_or(name);
            capacity.push((name, amount));
        }
        Ok(Self {
            selectors,
            path: &ask.path,
            individual: expressions.iter().any(|expression| Selectors::tells_gpus_apart(expression)),
            expressions,
            capacity,
            class,
            own,
        })
    }

    /// Whether the whole GPU will do, and which profiles on it, by index.
    pub fn of_gpu(&self, status: &GpuNodeStatus, gpu: &Gpu) -> Result<(bool, BTreeSet<usize>), String> {
        let whole = self.admits(&Device {
            attributes: device::attributes(status, gpu, None),
            capacities: device::capacities(gpu, None),
        })?;
        let mut profiles = BTreeSet::new();
        for (index, profile) in status.geometry_of(gpu).iter().flat_map(|g| &g.profiles).enumerate() {
            let device = Device {
                attributes: device::attributes(status, gpu, Some((profile, None))),
                capacities: device::capacities(gpu, Some(profile)),
            };
            if self.admits(&device)? {
                profiles.insert(index);
            }
        }
        Ok((whole, profiles))
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
