//! Faults: what a test lets go wrong in which NVML call.

use serde::{Deserialize, Serialize};

use crate::{NvmlError, State};

/// A fault to be met by NVML calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Function name without version suffix, such as `nvmlDeviceCreateGpuInstanceWithPlacement`.
    pub call: String,
    pub action: Action,
    pub when: When,
    /// Only calls on this GPU (NVML index).
    pub gpu: Option<usize>,
    /// Calls still to be hit; `None` is for ever.
    pub left: Option<u32>,
    /// Calls to let pass first.
    pub skip: u32,
    /// Only calls of processes whose `comm` (the first 15 bytes of the program's name) is this.
    pub process: Option<String>,
}

/// What a fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The call answers this.
    Fail(NvmlError),
    /// `nvmlDeviceSetMigMode` answers success, with this as the activation status.
    Activation(NvmlError),
    /// The calling process dies by SIGKILL.
    Kill,
}

/// On which side of the call's effect a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// Nothing has happened.
    Before,
    /// It has happened, but the caller does not hear of it.
    After,
}

/// How often a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occurrence {
    /// The next call.
    Once,
    /// The next so many calls.
    Times(u32),
    /// The so-manyth call from now (1 is the next).
    Nth(u32),
    /// Every call until [`SimNode::clear_faults`].
    Persistent,
}

impl Fault {
    /// A fault of the NVML function `call`, for every GPU and every process. The version suffix is no part of the
    /// name.
    pub fn new(call: &str, action: Action, when: When, occurrence: Occurrence) -> Fault {
        let (left, skip) = match occurrence {
            Occurrence::Once => (Some(1), 0),
            Occurrence::Times(times) => (Some(times), 0),
            Occurrence::Nth(nth) => (Some(1), nth.saturating_sub(1)),
            Occurrence::Persistent => (None, 0),
        };
        Fault { call: canonical_call(call).to_owned(), action, when, gpu: None, left, skip, process: None }
    }

    /// The same, only for processes of this program.
    pub fn in_process(self, program: &str) -> Fault {
        const COMM: usize = 15;
        let end = program.floor_char_boundary(COMM);
        Fault { process: Some(program[..end].to_owned()), ..self }
    }
}

impl State {
    /// The first fault that a call on `gpu` by a process of this name meets on this side.
    pub fn fault_index(
        &self,
        call: &str,
        gpu: Option<usize>,
        when: When,
        process: &str,
        wanted: impl Fn(Action) -> bool,
    ) -> Option<usize> {
        self.faults.iter().position(|fault| {
            fault.when == when
                && fault.call == call
                && wanted(fault.action)
                && (fault.gpu.is_none() || fault.gpu == gpu)
                && fault.process.as_deref().is_none_or(|name| name == process)
        })
    }

    /// Counts a call against the fault at `index`, and returns what it does to it, if anything.
    pub fn strike(&mut self, index: usize) -> Option<Action> {
        let fault = self.faults.get_mut(index)?;
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        let action = fault.action;
        if let Some(left) = &mut fault.left {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.faults.remove(index);
            }
        }
        Some(action)
    }
}

/// The function name without its version suffix: `nvmlDeviceGetCount_v2` is `nvmlDeviceGetCount`.
pub fn canonical_call(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((base, version)) if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) => base,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_suffixes_are_no_part_of_a_name() {
        assert_eq!(canonical_call("nvmlDeviceGetCount_v2"), "nvmlDeviceGetCount");
        assert_eq!(canonical_call("nvmlDeviceGetCount"), "nvmlDeviceGetCount");
        assert_eq!(
            canonical_call("nvmlDeviceGetGpuInstanceProfileInfoV"),
            "nvmlDeviceGetGpuInstanceProfileInfoV"
        );
        assert_eq!(canonical_call("nvmlX_vx"), "nvmlX_vx");
    }
}
