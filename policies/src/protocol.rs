//! The protocol that carries one placement from the commit record to a bound pod, or takes it back.
//!
//! A placement is committed by its entry in `GpuNode.spec`. Everything else — the claim, its allocation, the pod's
//! gate, the hold — follows from joining that entry with the claim, the pod and the node's report, so a crash at any
//! point is recovered by looking again: [`next`] is asked about what is there and answers with one write.
//!
//! Who else writes at the same time: kube-scheduler clears allocations of pods that it cannot place and binds pods at
//! any later moment; kubelet prepares on the node where the pod is bound; people delete anything.
//!
//! What keeps it safe:
//! - an entry goes only when its devices are out of use and nothing refers to it any more: the pod is gone or done, or
//!   a read of the pod *after* the allocation was cleared shows it unbound;
//! - the daemon prepares only what is in its own spec *and* in the claim's live allocation, so a bind that arrives
//!   late finds nothing to run on and the pod is evicted;
//! - every write carries a precondition on the version that was looked at.

/// The pod of a placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Pod {
    /// Not there (or another of the same name).
    Gone,
    /// Still has Kerf's gate.
    Gated,
    /// No gate of Kerf's, not bound.
    Unbound,
    /// Bound to the node of the entry, or to another.
    Bound { here: bool },
    /// Succeeded or Failed.
    Done,
}

/// The claim of a placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// Not there.
    Absent,
    /// There, and not the pod's: somebody else made one of that name.
    Stolen,
    /// Being deleted while its pod still needs it.
    Deleting,
    /// Not allocated.
    Unallocated,
    /// Allocated.
    Allocated {
        /// To exactly the devices of the entry.
        as_planned: bool,
        /// With the hold in `reservedFor`.
        held: bool,
    },
}

/// The entry in `GpuNode.spec`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Every device of it exists, is healthy and free for this claim, by the daemon's report for this spec.
    pub ready: bool,
    /// One of its devices is prepared for this claim, or has processes.
    pub in_use: bool,
}

/// What is known of one placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Observed {
    pub pod: Pod,
    pub claim: Claim,
    /// `None`: the claim or the pod is left without a commit record.
    pub entry: Option<Entry>,
    /// The operator makes the claim (the webhook named it); else it is the user's or a template's.
    pub claim_is_ours: bool,
    /// The place is to be given up: it does not work out (the node was cordoned, its CPU is gone, a GPU failed).
    pub withdraw: bool,
    /// kube-scheduler has thrown the allocation away before, or has to preempt: write the hold with the allocation.
    pub hold: bool,
    /// The pod's state was read from the API server after the claim's allocation was last seen cleared, not from a
    /// cache.
    pub pod_read_live: bool,
}

/// The next write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing to write; something else has to happen first.
    Wait(Waiting),
    /// Create the claim: finalizer, owner reference to the pod.
    CreateClaim,
    /// Write the allocation and the reservation for the pod; with the hold or without.
    Allocate { hold: bool },
    /// Remove Kerf's gate from the pod.
    Ungate,
    /// Take the hold out of `reservedFor`.
    ReleaseHold,
    /// Clear allocation and reservation in one write.
    ClearAllocation,
    /// Read the pod from the API server, then ask again.
    ReadPod,
    /// Take the entry out of `GpuNode.spec`: the place is free.
    RemoveEntry,
    /// Put the entry back for a pod that is already bound with a matching allocation.
    RestoreEntry,
    /// Evict a pod that can never run where it was bound.
    EvictPod,
}

/// What a placement waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waiting {
    /// A plan.
    Plan,
    /// The daemon to make the instances.
    Instances,
    /// kube-scheduler to bind.
    Bind,
    /// The pod runs; nothing to do until it ends.
    Running,
    /// The devices to be out of use.
    Release,
    /// Somebody to remove a claim that is in the way.
    ClaimConflict,
    /// Nothing: over.
    Over,
}

/// The next step of a placement.
pub fn next(seen: &Observed) -> Step {
    match seen.pod {
        Pod::Gone | Pod::Done => finish(seen),
        Pod::Gated | Pod::Unbound => advance(seen),
        Pod::Bound { here } => keep(seen, here),
    }
}

/// The pod is over: give the claim back, then the place.
fn finish(seen: &Observed) -> Step {
    let Some(entry) = &seen.entry else {
        return match seen.claim {
            // The hold has no owner any more; without it Kubernetes cleans up by itself.
            Claim::Allocated { held: true, .. } => Step::ClearAllocation,
            _ => Step::Wait(Waiting::Over),
        };
    };
    match seen.claim {
        // A claim under a hold whose pod is Done is rewritten by kube-controller-manager in a loop: let go at once. The
        // entry stays while the devices are in use.
        Claim::Allocated { held: true, .. } if seen.pod == Pod::Done || !entry.in_use => {
            Step::ClearAllocation
        }
        _ if entry.in_use => Step::Wait(Waiting::Release),
        _ => Step::RemoveEntry,
    }
}

/// The pod waits for its place.
fn advance(seen: &Observed) -> Step {
    let Some(entry) = &seen.entry else {
        return match seen.claim {
            // Allocated by a writer who lost the race for the commit record, or left over from a place given up.
            Claim::Allocated { .. } => Step::ClearAllocation,
            _ => Step::Wait(Waiting::Plan),
        };
    };
    match seen.claim {
        Claim::Allocated { as_planned: false, .. } => Step::ClearAllocation,
        Claim::Allocated { .. } if seen.withdraw => Step::ClearAllocation,
        // Cleared, but the pod may have been bound just before: only a later look at it tells.
        _ if seen.withdraw && !seen.pod_read_live => Step::ReadPod,
        _ if seen.withdraw && entry.in_use => Step::Wait(Waiting::Release),
        _ if seen.withdraw => Step::RemoveEntry,
        Claim::Stolen | Claim::Deleting => Step::Wait(Waiting::ClaimConflict),
        Claim::Absent if seen.claim_is_ours => Step::CreateClaim,
        Claim::Absent => Step::Wait(Waiting::ClaimConflict),
        Claim::Unallocated if !entry.ready => Step::Wait(Waiting::Instances),
        Claim::Unallocated => Step::Allocate { hold: seen.hold },
        Claim::Allocated { .. } if seen.pod == Pod::Gated => Step::Ungate,
        Claim::Allocated { .. } => Step::Wait(Waiting::Bind),
    }
}

/// The pod is bound: keep it running where it is, or end it where it cannot run.
fn keep(seen: &Observed, here: bool) -> Step {
    match (&seen.entry, &seen.claim) {
        (Some(_), Claim::Allocated { as_planned: true, held }) if here => {
            if *held {
                Step::ReleaseHold
            } else {
                Step::Wait(Waiting::Running)
            }
        }
        // The allocation was cleared while the bind was on its way: the place is still the pod's, give it back.
        (Some(entry), Claim::Unallocated) if here && (entry.ready || entry.in_use) => {
            Step::Allocate { hold: false }
        }
        (Some(_), Claim::Unallocated) if here => Step::Wait(Waiting::Instances),
        (Some(_), Claim::Absent) if here && seen.claim_is_ours => Step::CreateClaim,
        (None, Claim::Allocated { .. }) if here => Step::RestoreEntry,
        _ => Step::EvictPod,
    }
}
