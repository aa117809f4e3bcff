//! Event sets: XIDs and changes of the MIG configuration.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kerf_sim::NvmlError;
use kerf_sim::state::{EVENT_MIG_CONFIG, EVENT_XID, Event, State};

use crate::driver::{Call, Result};
use crate::ffi::{DeviceHandle, Out};
use crate::nvml;
use crate::types::{EventData, EventDataV1};

/// All event types of nvml.h; the simulation produces the two of [`SUPPORTED`].
const KNOWN: u64 = 0xff9f;
const SUPPORTED: u64 = EVENT_XID | EVENT_MIG_CONFIG;
/// The id of an instance where there is none.
const NO_INSTANCE: u32 = u32::MAX;

/// `nvmlEventSet_t`: a number, no pointer.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SetHandle(u64);

/// What a set is registered for.
struct EventSet {
    watch: Arc<Watch>,
    registrations: Vec<Registration>,
    /// The first event not yet looked at.
    next: u64,
    /// GPUs whose loss has been told: once is enough, else a waiter would spin.
    told_lost: Vec<usize>,
}

struct Registration {
    gpu: usize,
    types: u64,
    /// Events before this one are older than the registration.
    since: u64,
}

#[derive(Default)]
struct Sets {
    last: u64,
    open: BTreeMap<SetHandle, Arc<Mutex<EventSet>>>,
}

static SETS: Mutex<Option<Sets>> = Mutex::new(None);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn find(handle: SetHandle) -> Result<Arc<Mutex<EventSet>>> {
    let sets = locked(&SETS);
    sets.as_ref().and_then(|sets| sets.open.get(&handle).cloned()).ok_or(NvmlError::InvalidArgument)
}

nvml! {
    fn nvmlEventSetCreate(set: Out<SetHandle>) |call| {
        set.check()?;
        let watch = Arc::new(Watch::new(&call.store.file("events"))?);
        let events = EventSet { watch, registrations: Vec::new(), next: 0, told_lost: Vec::new() };
        let mut sets = locked(&SETS);
        let sets = sets.get_or_insert_default();
        sets.last += 1;
        let handle = SetHandle(0x6b73_0000_0000 | sets.last);
        sets.open.insert(handle, Arc::new(Mutex::new(events)));
        set.set(handle)
    }

    fn nvmlEventSetFree(set: SetHandle) |_call| {
        let mut sets = locked(&SETS);
        let removed = sets.as_mut().and_then(|sets| sets.open.remove(&set));
        removed.map(drop).ok_or(NvmlError::InvalidArgument)
    }

    fn nvmlDeviceGetSupportedEventTypes(device: DeviceHandle, types: Out<u64>) on device |call| {
        call.device(device)?;
        types.set(SUPPORTED)
    }

    /// NOT_SUPPORTED registers none of the types. Of a MIG device it is not supported either.
    fn nvmlDeviceRegisterEvents(device: DeviceHandle, types: u64, set: SetHandle) on device |call| {
        let set = find(set)?;
        let target = call.device(device)?;
        if types & !KNOWN != 0 {
            return Err(NvmlError::InvalidArgument);
        }
        if types & !SUPPORTED != 0 || target.mig.is_some() {
            return Err(NvmlError::NotSupported);
        }
        let since = call.state.next_event;
        let mut set = locked(&set);
        if set.registrations.is_empty() {
            set.next = since;
        }
        set.registrations.push(Registration { gpu: target.index, types, since });
        Ok(())
    }

    fn nvmlEventSetWait_v2(set: SetHandle, data: Out<EventData>, timeout_ms: u32) |call| {
        data.check()?;
        data.set(wait(call, &*find(set)?, timeout_ms)?)
    }

    /// The first version ends before the instance ids.
    fn nvmlEventSetWait(set: SetHandle, data: Out<EventDataV1>, timeout_ms: u32) |call| {
        data.check()?;
        let EventData { device, event_type, event_data, .. } = wait(call, &*find(set)?, timeout_ms)?;
        data.set(EventDataV1 { device, event_type, event_data })
    }
}

/// Waits without polling: the store touches a file of its own for events, and inotify tells of it. The set has been
/// watching since it was made, so no event falls between two waits, and none is lost for want of a descriptor.
fn wait(call: &Call, set: &Mutex<EventSet>, timeout_ms: u32) -> Result<EventData> {
    let end = Instant::now() + Duration::from_millis(timeout_ms.into());
    let watch = locked(set).watch.clone();
    loop {
        let state = call.store.read()?;
        if let Some(event) = locked(set).take(&state)? {
            return Ok(EventData {
                device: DeviceHandle::of_gpu(event.gpu),
                event_type: event.kind,
                event_data: event.data,
                gpu_instance_id: event.gpu_instance.unwrap_or(NO_INSTANCE),
                compute_instance_id: event.compute_instance.unwrap_or(NO_INSTANCE),
            });
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || !watch.wait(left)? {
            return Err(NvmlError::Timeout);
        }
    }
}

impl EventSet {
    /// The next event that the set is registered for; GPU_IS_LOST, once per GPU, when there is none.
    fn take(&mut self, state: &State) -> Result<Option<Event>> {
        let wanted = |event: &Event| {
            self.registrations.iter().any(|registration| {
                registration.gpu == event.gpu
                    && registration.types & event.kind != 0
                    && registration.since <= event.seq
            })
        };
        let event =
            state.events.iter().filter(|event| event.seq >= self.next).find(|event| wanted(event)).copied();
        self.next = event.map_or(state.next_event, |event| event.seq + 1);
        if event.is_some() {
            return Ok(event);
        }
        let is_lost = |gpu: usize| state.gpus.get(gpu).is_some_and(|gpu| gpu.lost);
        self.told_lost.retain(|gpu| is_lost(*gpu));
        let lost = self
            .registrations
            .iter()
            .map(|registration| registration.gpu)
            .find(|gpu| is_lost(*gpu) && !self.told_lost.contains(gpu));
        if let Some(gpu) = lost {
            self.told_lost.push(gpu);
            return Err(NvmlError::GpuIsLost);
        }
        Ok(None)
    }
}

/// An inotify watch of one file.
struct Watch(File);

impl Watch {
    fn new(path: &Path) -> Result<Watch> {
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| NvmlError::OperatingSystem)?;
        // SAFETY: the new descriptor is owned by the file at once; the path lives through the call.
        unsafe {
            let descriptor = libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK);
            if descriptor < 0 {
                return Err(NvmlError::OperatingSystem);
            }
            let file = File::from_raw_fd(descriptor);
            if libc::inotify_add_watch(descriptor, path.as_ptr(), libc::IN_MODIFY) < 0 {
                return Err(NvmlError::OperatingSystem);
            }
            Ok(Watch(file))
        }
    }

    /// Whether the file has changed within `timeout`.
    fn wait(&self, timeout: Duration) -> Result<bool> {
        // Rounded up, so that the last millisecond is not spent spinning.
        let millis = timeout.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32;
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd that lives through the call.
        let ready = unsafe { libc::poll(&mut poll, 1, millis) };
        if ready < 0 {
            let interrupted = std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted;
            return if interrupted { Ok(true) } else { Err(NvmlError::OperatingSystem) };
        }
        if ready > 0 {
            // What has changed is in the state; the records only have to be out of the way.
            let _ = (&self.0).read(&mut [0; 4096]);
        }
        Ok(ready > 0)
    }
}
