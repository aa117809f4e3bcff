//! What carries shares: looked at, and changed by one step. [`crate::shares`] decides, the GPU's worker asks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use futures::future::join_all;

use kerf_crds::conditions::problem_reason;
use kerf_crds::gpu_node::{Isolation, Placement, Reason, Sharing};

use crate::carrier::{self, Carrier};
use crate::cdi::write_atomically;
use crate::hardware::{self, Facts, Failure};
use crate::inventory::{ComputeMode, Gpu, MpsState, Process};
use crate::mps::control::{ControlError, Seen, Server};
use crate::mps::pods::{NewServer, Order, Pods, ServerPod};
use crate::mps::{CarrierPaths, Protocol, max_clients};
use crate::prepared::{DeviceKey, PreparedClaims, holders_of_shares};
use crate::shares::{Observed, Step};
use crate::worker::{Context, blocking, no_session};

/// The first compute capability whose processes MPS keeps apart from each other (Volta).
const CAPABILITY: u32 = 7;

/// What there is on one carrier beside what NVML shows.
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

    pub fn observed<'a>(&'a self, carrier: Carrier<'a>, prepared: &'a PreparedClaims) -> Observed<'a> {
        Observed {
            carrier,
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

/// The carriers of a GPU.
pub type Views = BTreeMap<Option<Placement>, View>;

/// Looks at what carries shares at these places of a GPU that was just observed, and says on the GPU whether it can carry any.
/// Servers and their clients are no longer among the processes of GPU and instances then.
pub async fn look(
    context: &Context,
    gpu: &mut Gpu,
    facts: &Facts,
    places: BTreeSet<Option<Placement>>,
    pods: &Pods,
) -> Views {
    gpu.sharing = sharing(context, gpu, facts);
    if gpu.compute_mode != Some(ComputeMode::EXCLUSIVE_PROCESS)
        && gpu.compute_mode.is_some()
        && context.modes.before(&gpu.uuid).is_some()
        && let Err(error) = context.modes.forget(&gpu.uuid)
    {
        tracing::warn!(gpu = %gpu.uuid, "the checkpoint of compute modes cannot be written: {error}");
    }
    let protocol = Protocol::of_driver(&facts.driver);
    let looks = places.into_iter().map(|placement| {
        let pod = pods.get(&DeviceKey { placement, ..DeviceKey::gpu(&gpu.uuid) }).cloned();
        let name = carrier::name(&gpu.name, placement);
        async move {
            let mps = match &pod {
                Some(pod) if !pod.ended => context.mps.control(&name, protocol).look().await,
                _ => Seen::default(),
            };
            let config = read(&context.mps.paths.of(&name).config());
            (placement, View { protocol, pod, config, mps, before: None, hangs: 0, outlived: false })
        }
    });
    // All at once: one that hangs does not keep the others waiting longer than itself.
    let mut views: Views = join_all(looks).await.into_iter().collect();
    let before = context.modes.before(&gpu.uuid);
    if let Some(view) = views.get_mut(&None) {
        view.before = before;
    }
    let nothing = View::default();
    let view = |placement| views.get(&placement).unwrap_or(&nothing);
    part_with(&mut gpu.processes, &mut gpu.mps, view(None));
    gpu.mps.there |= before.is_some() && !gpu.mig.enabled;
    for instance in &mut gpu.instances {
        part_with(&mut instance.processes, &mut instance.mps, view(Some(instance.placement)));
    }
    views
}

/// Tells Kerf's server and its clients from other processes.
fn part_with(processes: &mut Vec<Process>, state: &mut MpsState, view: &View) {
    let View { pod, mps, .. } = view;
    state.up = mps.server == Server::Ready;
    state.there = pod.is_some();
    match pod {
        Some(pod) => processes.retain(|process| {
            !mps.server_pids.contains(&process.pid) && process.pod_uid.as_ref() != Some(&pod.uid)
        }),
        // Somebody else's.
        None => processes.append(&mut state.clients),
    }
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
pub async fn act(
    context: &Context,
    carrier: Carrier<'_>,
    protocol: Protocol,
    step: &Step,
) -> Result<(), Reason> {
    let name = carrier.name();
    let paths = context.mps.paths.of(&name);
    let control = context.mps.control(&name, protocol);
    let told = |answer: Result<(), ControlError>| {
        answer.map_err(|error| (problem_reason::MPS_NOT_READY, error.to_string()))
    };
    let result = match step {
        Step::TakeComputeMode => {
            let (gpu, mode) = (&carrier.gpu.uuid, carrier.gpu.compute_mode.unwrap_or(ComputeMode::DEFAULT));
            match context.modes.keep(gpu, mode) {
                Ok(()) => return set_mode(context, gpu, ComputeMode::EXCLUSIVE_PROCESS, step).await,
                Err(error) => Err((problem_reason::CHECKPOINT_FAILED, error.to_string())),
            }
        }
        Step::RestoreComputeMode(mode) => return set_mode(context, &carrier.gpu.uuid, *mode, step).await,
        Step::WriteConfig(text) => paths
            .make()
            .and_then(|()| write(&paths.config(), text))
            .map_err(|error| (problem_reason::MPS_NOT_READY, error.to_string())),
        Step::CreatePod { form, device } => match clear(context, carrier, &paths).and_then(|()| paths.make())
        {
            Err(error) => Err((problem_reason::MPS_NOT_READY, error.to_string())),
            Ok(()) if paths.too_long() > 0 => Err((
                problem_reason::MPS_NOT_READY,
                format!(
                    "{} is {} bytes too long for the sockets below it; choose a shorter --mps-dir",
                    paths.pipe().display(),
                    paths.too_long()
                ),
            )),
            Ok(()) => {
                let new = NewServer::new(carrier.key(), &name, device, &paths, form);
                order(context, Order::Create(new)).await
            }
        },
        Step::DeletePod(pod) | Step::ReplacePod(pod) => {
            let done = order(context, Order::Delete(pod.clone())).await;
            if let Err(error) = clear(context, carrier, &paths) {
                tracing::warn!(%carrier, "what clients have left there stays: {error}");
            }
            done
        }
        Step::CreateServer { device } => told(control.create_server(device).await),
        Step::DeleteServer => told(control.delete_server().await),
        Step::CreateNamespace(name, limits) => told(control.set_namespace(name, true, limits).await),
        Step::SetNamespace(name, limits) => told(control.set_namespace(name, false, limits).await),
        Step::DeleteNamespace(name) => told(control.delete_namespace(name).await),
    };
    result.map_err(|(word, message)| Reason {
        reason: word.into(),
        message: format!("to {step} of {carrier}: {message}"),
    })
}

/// Leaves nothing of those who had shares before, unless their containers may start again and find it.
fn clear(context: &Context, carrier: Carrier<'_>, paths: &CarrierPaths) -> io::Result<()> {
    match holders_of_shares(&context.state.prepared.snapshot(), &carrier.key()).is_empty() {
        true => paths.clear(),
        false => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    write_atomically(path, text.as_bytes())
}

/// Waits until the order's effect is seen, for a moment: else it would be given again.
async fn order(context: &Context, order: Order) -> Result<(), (&'static str, String)> {
    let mut seen = context.mps.pods.seen.clone();
    seen.mark_unchanged();
    (context.mps.pods.write)(order)
        .await
        .map_err(|error| (problem_reason::POD_FAILED, format!("{error:#}")))?;
    let _ = tokio::time::timeout(crate::worker::WAITING, seen.changed()).await;
    Ok(())
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
