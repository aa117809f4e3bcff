//! The protocol that carries one placement from the commit record to a bound pod, or takes it back.
//!
//! A placement is committed by its entry in `GpuNode.spec`. Everything else — the claim, its allocation, the pod's
//! gate, the hold — follows from joining that entry with the claim, the pod and the node's report, so a crash at any
//! point is recovered by looking again: [`next`] is asked about what is there and answers with one write.
//!
//! Who else writes at the same time: kube-scheduler clears allocations of pods that it cannot place and binds pods at
//! any later moment; kubelet prepares on the node where the pod is bound; people delete anything.
//!
//! What keeps it safe, and what `tests/protocol_model.rs` shows to be needed by taking it out:
//! - an entry goes only when nothing refers to it any more: the pod is gone or done and its devices are out of use by
//!   the last report, or a read of the pod *after* the allocation was cleared shows it unbound;
//! - the daemon prepares only what is in its own spec *and* in the claim's live allocation, so a bind that arrives
//!   late finds nothing to run on and the pod is evicted;
//! - neither does the operator allocate what another claim still holds by the daemon's report, nor does the daemon
//!   prepare it: a report can be late, and after a force-delete a process outlives pod and claim;
//! - every write carries a precondition on the version that was looked at, so of two operators one wins. They can still
//!   make two entries of one pod on two nodes: [`counts`] says which stays;
//! - the hold is given back by the operator, as nobody else does it.
//!
//! What is not promised: while a paused ex-leader still writes, it can take away the entry of a pod that has begun to
//! run. The daemon keeps the devices to the pod; the entry is restored, or the pod evicted if the place was given away.

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
    /// Being deleted, and not allocated.
    Deleting,
    /// Not allocated.
    Unallocated,
    /// Allocated.
    Allocated {
        /// To exactly the devices of the entry.
        as_planned: bool,
        /// With the hold in `reservedFor`.
        held: bool,
        /// Being deleted: it goes as soon as it is not allocated any more.
        deleting: bool,
    },
}

/// The entry in `GpuNode.spec`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Every device of it exists, is healthy and free for this claim, by the daemon's last report. Should that be older
    /// than the spec, and the device have been on its way out for an entry that is gone again, kubelet's Prepare waits
    /// until the daemon has made it anew.
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
    /// The pod has several entries, and another one counts, see [`counts`].
    pub superseded: bool,
    /// It is of a gang of which too few are ready to start. Without its gate it may start at any moment.
    pub held_back: bool,
    /// Without an entry: some device of the allocation is another's by now.
    pub place_taken: bool,
}

/// Which of a pod's entries counts, if two writers have each made one: that on the node to which the pod is bound, else
/// that to which the claim is allocated, else the first. Entries are given as node and place, in any order; the answer
/// is an index, and `None` without entries.
pub fn counts<N: Ord, L: Ord>(entries: &[(N, L)], bound: Option<&N>, allocated: Option<&L>) -> Option<usize> {
    (0..entries.len()).min_by_key(|&index| {
        let (node, place) = &entries[index];
        (bound.is_some_and(|bound| bound != node), allocated != Some(place), (node, place))
    })
}

/// The next write, each with what it has to be conditional on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing to write; something else has to happen first.
    Wait(Waiting),
    /// Create the claim: finalizer, owner reference to the pod. Fails if there is one.
    CreateClaim,
    /// Write the allocation and the reservation for the pod; with the hold or without. On the claim's version.
    Allocate { hold: bool },
    /// Remove Kerf's gate from the pod. On the pod's UID.
    Ungate,
    /// Take the hold out of `reservedFor`. On the claim's version.
    ReleaseHold,
    /// Clear allocation and reservation in one write. On the claim's version.
    ClearAllocation,
    /// Delete the claim, which is not allocated. On the claim's version.
    DeleteClaim,
    /// Read the pod from the API server, then ask again.
    ReadPod,
    /// Take the entry out of `GpuNode.spec`: the place is free. On the node object's version.
    RemoveEntry,
    /// Put the entry back for a pod that is already bound with a matching allocation. On the node object's version.
    RestoreEntry,
    /// Evict a pod that can never run where it was bound. On the pod's UID; one that is being deleted needs nothing.
    EvictPod,
}

/// What a placement waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waiting {
    /// A plan.
    Plan,
    /// The daemon to make the instances.
    Instances,
    /// The others of its gang.
    Others,
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
    if let (Some(entry), true) = (&seen.entry, seen.superseded) {
        // The entry that counts looks after claim and pod.
        return if entry.in_use { Step::Wait(Waiting::Release) } else { Step::RemoveEntry };
    }
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
        // kube-scheduler leaves it alone, and it cannot go while it is allocated.
        Claim::Allocated { deleting: true, .. } => Step::ClearAllocation,
        // Cleared, but the pod may have been bound just before: only a later look at it tells.
        _ if seen.withdraw && !seen.pod_read_live => Step::ReadPod,
        _ if seen.withdraw && entry.in_use => Step::Wait(Waiting::Release),
        // Who starts only together with others counts for no quota while they cannot. It has its gate, so nobody binds it.
        Claim::Unallocated
            if seen.withdraw && seen.held_back && seen.claim_is_ours && seen.pod == Pod::Gated =>
        {
            Step::DeleteClaim
        }
        _ if seen.withdraw => Step::RemoveEntry,
        Claim::Stolen | Claim::Deleting => Step::Wait(Waiting::ClaimConflict),
        Claim::Absent if seen.claim_is_ours => Step::CreateClaim,
        Claim::Absent => Step::Wait(Waiting::ClaimConflict),
        Claim::Unallocated if !entry.ready => Step::Wait(Waiting::Instances),
        Claim::Unallocated if seen.held_back => Step::Wait(Waiting::Others),
        Claim::Unallocated => Step::Allocate { hold: seen.hold },
        Claim::Allocated { .. } if seen.pod == Pod::Gated && seen.held_back => Step::Wait(Waiting::Others),
        Claim::Allocated { .. } if seen.pod == Pod::Gated => Step::Ungate,
        Claim::Allocated { .. } => Step::Wait(Waiting::Bind),
    }
}

/// The pod is bound: keep it running where it is, or end it where it cannot run.
fn keep(seen: &Observed, here: bool) -> Step {
    match (&seen.entry, &seen.claim) {
        (Some(_), Claim::Allocated { as_planned: true, held, .. }) if here => {
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
        // Allocated elsewhere by a writer who did not know of the bind; the place here is still the pod's.
        (Some(_), Claim::Allocated { .. }) if here => Step::ClearAllocation,
        (None, Claim::Allocated { .. }) if here && !seen.place_taken => Step::RestoreEntry,
        _ => Step::EvictPod,
    }
}
