//! Which errors nvml.h documents for which function.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::NvmlError;

#[derive(Deserialize)]
struct File {
    errors: BTreeMap<String, Vec<String>>,
}

/// The documented errors of every function that the simulated library has, by its name without version suffix:
/// what a test that lets each call fail in each way goes through.
pub fn documented_errors() -> BTreeMap<String, Vec<NvmlError>> {
    const TEXT: &str = include_str!("../documented-errors.json");
    let file: File = serde_json::from_str(TEXT).unwrap_or(File { errors: BTreeMap::new() });
    file.errors
        .into_iter()
        .map(|(call, names)| (call, names.iter().filter_map(|name| NvmlError::from_name(name)).collect()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_errors_are_read_whole() {
        let errors = documented_errors();
        let create = &errors["nvmlDeviceCreateGpuInstanceWithPlacement"];
        assert!(create.contains(&NvmlError::InsufficientResources), "{create:?}");
        assert!(errors["nvmlGpuInstanceDestroy"].contains(&NvmlError::InUse));
        assert!(errors.len() > 80, "{}", errors.len());
        assert!(errors.values().all(|errors| !errors.is_empty()));
    }
}
