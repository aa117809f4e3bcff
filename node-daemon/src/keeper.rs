//! What carries a GPU's shares: looked at, and changed by one step. [`crate::shares`] decides, the GPU's worker asks.

use std::io;
use std::path::Path;

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{Isolation, Reason, Sharing};

use crate::cdi::write_atomically;
use crate::hardware::{self, Facts, Failure};
use crate::inventory::{ComputeMode, Gpu};
use crate::mps::control::{ControlError, Seen, Server};
use crate::mps::pods::{NewServer, Order, ServerPod};
use crate::mps::{Protocol, max_clients};
use crate::prepared::PreparedClaims;
use crate::shares::{Observed, Step};
use crate::worker::{Context, blocking, no_session};

/// The first compute capability whose processes MPS keeps apart from each other (Volta).
const CAPABILITY: u32 = 7;

/// What there is beside what NVML shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    pub protocol: Protocol,
    pod: Option<ServerPod>,
    config: Option<String>,
    mps: Seen,
    before: Option<ComputeMode>,
    hangs: u32,
    outlived: bool,
}

impl View {
    /// Whether the pod's control daemon gave no answer in time.
    pub fn hangs(&self) -> bool {
        self.hangs > 0
    }

    /// Counts the looks in a row at which the pod's control daemon gave no answer in time. `before`: the UID of the last
    /// look's pod, and its count.
    pub fn count_hangs(&mut self, before: Option<(String, u32)>) -> Option<(String, u32)> {
        let pod = self.pod.as_ref().filter(|_| matches!(self.mps.server, Server::Hangs(_)))?;
        let before = before.filter(|(uid, _)| *uid == pod.uid);
        self.hangs = before.map_or(0, |(_, count)| count) + 1;
        Some((pod.uid.clone(), self.hangs))
    }

    /// Notes whether the driver was seen to go while the pod was there. `before`: the UID of the last look's pod, and how
    /// often the driver had gone when that pod was first seen.
    pub fn follow_driver(&mut self, before: Option<(String, u64)>, departures: u64) -> Option<(String, u64)> {
        let uid = &self.pod.as_ref()?.uid;
        let since = before.filter(|(known, _)| known == uid).map_or(departures, |(_, since)| since);
        self.outlived = departures > since;
        Some((uid.clone(), since))
    }

    pub fn observed<'a>(&'a self, gpu: &'a Gpu, prepared: &'a PreparedClaims) -> Observed<'a> {
        Observed {
            gpu,
            prepared,
            protocol: self.protocol,
            pod: self.pod.as_ref(),
            config: self.config.as_deref(),
            mps: &self.mps,
            before: self.before,
            hangs: self.hangs,
            outlived: self.outlived,
        }
    }
}

/// Looks at what carries the shares of a GPU that was just observed, and says on the GPU whether it can carry any. The
/// server and its clients are no longer among the GPU's own processes then. `None` before the pods are known.
pub async fn look(context: &Context, gpu: &mut Gpu, facts: &Facts) -> Option<View> {
    gpu.sharing = sharing(context, gpu, facts);
    let pods = context.mps.pods.seen.borrow().clone();
    let pod = pods.as_ref().and_then(|pods| pods.get(&gpu.uuid)).cloned();
    let protocol = Protocol::of_driver(&facts.driver);
    let mps = match &pod {
        Some(pod) if !pod.ended => context.mps.control(&gpu.name, protocol).look().await,
        _ => Seen::default(),
    };
    gpu.mps_server_up = mps.server == Server::Ready;
    match &pod {
        Some(pod) => gpu.processes.retain(|process| {
            !mps.server_pids.contains(&process.pid) && process.pod_uid.as_ref() != Some(&pod.uid)
        }),
        // Somebody else's.
        None => gpu.processes.append(&mut gpu.mps_clients),
    }
    if gpu.compute_mode != Some(ComputeMode::EXCLUSIVE_PROCESS)
        && gpu.compute_mode.is_some()
        && context.modes.before(&gpu.uuid).is_some()
        && let Err(error) = context.modes.forget(&gpu.uuid)
    {
        tracing::warn!(gpu = %gpu.uuid, "the checkpoint of compute modes cannot be written: {error}");
    }
    let before = context.modes.before(&gpu.uuid);
    gpu.carries = pod.is_some() || before.is_some();
    pods.map(|_| View {
        protocol,
        pod,
        config: read(&context.mps.paths.of(&gpu.name).config()),
        mps,
        before,
        hangs: 0,
        outlived: false,
    })
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn sharing(context: &Context, gpu: &Gpu, facts: &Facts) -> Option<Sharing> {
    let major = gpu.compute_capability.split('.').next().and_then(|major| major.parse::<u32>().ok());
    let able = major.is_some_and(|major| major >= CAPABILITY)
        && (gpu.compute_mode.is_some() || gpu.mig.enabled)
        && gpu.unmanaged.is_none()
        && gpu.unhealthy.is_none()
        && context.mps.program().is_file();
    able.then(|| Sharing {
        isolation: if facts.limits_memory { Isolation::Driver } else { Isolation::Process },
        max_clients: max_clients(&facts.cuda),
        equal_sizes: Protocol::of_driver(&facts.driver) == Protocol::V2,
    })
}

/// Carries one step out.
pub async fn act(context: &Context, gpu: &Gpu, protocol: Protocol, step: &Step) -> Result<(), Reason> {
    let paths = context.mps.paths.of(&gpu.name);
    let control = context.mps.control(&gpu.name, protocol);
    let uuid = gpu.uuid.as_str();
    let (word, message) = match step {
        Step::TakeComputeMode => {
            let before = gpu.compute_mode.unwrap_or(ComputeMode::DEFAULT);
            match context.modes.keep(uuid, before) {
                Ok(()) => return set_mode(context, uuid, ComputeMode::EXCLUSIVE_PROCESS, step).await,
                Err(error) => (problem_reason::CHECKPOINT_FAILED, error.to_string()),
            }
        }
        Step::RestoreComputeMode(mode) => return set_mode(context, uuid, *mode, step).await,
        Step::WriteConfig(text) => match paths.make().and_then(|()| write(&paths.config(), text)) {
            Ok(()) => return Ok(()),
            Err(error) => (problem_reason::MPS_NOT_READY, error.to_string()),
        },
        Step::CreatePod(form) => match paths.make() {
            Err(error) => (problem_reason::MPS_NOT_READY, error.to_string()),
            Ok(()) if paths.too_long() > 0 => (
                problem_reason::MPS_NOT_READY,
                format!(
                    "{} is {} bytes too long for the sockets below it; choose a shorter --mps-dir",
                    paths.pipe().display(),
                    paths.too_long()
                ),
            ),
            Ok(()) => {
                let new = NewServer::new(&gpu.name, uuid, &paths, form);
                match order(context, Order::Create(new)).await {
                    Ok(()) => return Ok(()),
                    Err(error) => (problem_reason::POD_FAILED, format!("{error:#}")),
                }
            }
        },
        Step::DeletePod(pod) | Step::ReplacePod(pod) => {
            match order(context, Order::Delete(pod.clone())).await {
                Ok(()) => return Ok(()),
                Err(error) => (problem_reason::POD_FAILED, format!("{error:#}")),
            }
        }
        Step::CreateServer => return told(step, uuid, control.create_server(uuid).await),
        Step::DeleteServer => return told(step, uuid, control.delete_server().await),
        Step::CreateNamespace(name, limits) => {
            return told(step, uuid, control.set_namespace(name, true, limits).await);
        }
        Step::SetNamespace(name, limits) => {
            return told(step, uuid, control.set_namespace(name, false, limits).await);
        }
        Step::DeleteNamespace(name) => return told(step, uuid, control.delete_namespace(name).await),
    };
    Err(Reason { reason: word.into(), message: format!("to {step} of {uuid}: {message}") })
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    write_atomically(path, text.as_bytes())
}

/// Waits until the order's effect is seen, for a moment: else it would be given again.
async fn order(context: &Context, order: Order) -> anyhow::Result<()> {
    let mut seen = context.mps.pods.seen.clone();
    seen.mark_unchanged();
    (context.mps.pods.write)(order).await?;
    let _ = tokio::time::timeout(crate::worker::WAITING, seen.changed()).await;
    Ok(())
}

fn told(step: &Step, gpu: &str, answer: Result<(), ControlError>) -> Result<(), Reason> {
    answer.map_err(|error| Reason {
        reason: problem_reason::MPS_NOT_READY.into(),
        message: format!("to {step} of {gpu}: {error}"),
    })
}

async fn set_mode(context: &Context, gpu: &str, mode: ComputeMode, step: &Step) -> Result<(), Reason> {
    let (driver, uuid) = (context.driver.clone(), gpu.to_owned());
    let result: Result<(), Failure> = blocking(move || {
        let library = driver.session().map_err(|_| no_session())?;
        hardware::set_compute_mode(&library, &uuid, mode)
            .inspect_err(|failure| driver.note_failure(&library, failure))
    })
    .await;
    result.map_err(|failure| Reason {
        reason: failure.code.name().into_owned(),
        message: format!("to {step} of {gpu}: {failure}"),
    })
}
