//! What a request wants of GPUs, with all that is worked out about it once.

use crate::catalog::{Catalog, WantId};
use crate::snapshot::{Constraint, DeviceNeed, Geometry, Want};

/// Device needs and constraints of a kind.
#[derive(Debug)]
pub struct Shape {
    /// The needs.
    pub devices: Vec<DeviceNeed>,
    /// Conditions over several of them.
    pub constraints: Vec<Constraint>,
    /// Numbers of the wants, by need and alternative.
    pub wants: Vec<Vec<WantId>>,
    /// One device of any GPU that will do.
    pub single: bool,
    /// GPUs of one kind are told apart: what holds for a node need not hold for another like it.
    pub by_name: bool,
    /// The fewest memory slices that do for all needs.
    pub least_slices: u32,
}

impl Shape {
    /// The shape of these needs and constraints.
    pub fn of(devices: &[DeviceNeed], constraints: &[Constraint], catalog: &mut Catalog) -> Self {
        let mut wants = Vec::with_capacity(devices.len());
        for need in devices {
            wants.push(need.alternatives.iter().map(|want| catalog.want(want)).collect());
        }
        let alternatives = || devices.iter().flat_map(|need| &need.alternatives);
        let by_name = !constraints.is_empty() || alternatives().any(|want| want.gpus.is_some());
        Self {
            wants,
            single: !by_name && devices.len() == 1 && alternatives().all(|want| want.count == 1),
            by_name,
            least_slices: least_slices(devices, catalog.geometries()),
            devices: devices.to_vec(),
            constraints: constraints.to_vec(),
        }
    }
}

fn least_slices(devices: &[DeviceNeed], geometries: &[Geometry]) -> u32 {
    let of_want = |want: &Want| {
        let sizes = want.profiles.iter().flat_map(|(&geometry, profiles)| {
            profiles.iter().filter_map(move |&p| Some(geometries.get(geometry)?.profiles.get(p)?.size))
        });
        want.count.saturating_mul(sizes.min().unwrap_or(64))
    };
    let of_need = |need: &DeviceNeed| need.alternatives.iter().map(of_want).min().unwrap_or(0);
    devices.iter().map(of_need).fold(0, u32::saturating_add)
}
