//! A small Kubernetes with Kerf in it, one step at a time: API objects with versions, operators that decide from what
//! they saw and write later, kube-scheduler, kube-controller-manager, kubelets with the node daemon, and people who
//! delete things. Every operator's step comes from [`kerf_planner::protocol::next`].
//!
//! Pods, places (a partition each) and nodes are numbered. Versions need no numbers: a write that was decided before
//! somebody else changed its object is marked, and fails.
#![allow(dead_code)]

use kerf_planner::protocol::{self, Claim, Entry, Observed, Pod, Step, Waiting};

/// The state of a pod in the API server, with what only its kubelet knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PodNow {
    Gated,
    Unbound,
    /// Bound to the node, no container started. `going`: it has a deletion timestamp.
    Bound {
        node: u8,
        going: bool,
    },
    /// Its container runs on the place.
    Running {
        place: u8,
        going: bool,
    },
    Done,
    Gone,
}

/// A pod's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClaimNow {
    Absent,
    There { place: Option<u8>, reserved: bool, hold: bool, deleting: bool },
}

/// What the API server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Api<const P: usize, const S: usize> {
    /// Whose each place is, in `GpuNode.spec`.
    pub spec: [Option<u8>; S],
    /// The daemons' reports: the spec that each was made under, and who uses each place.
    pub report_spec: [Option<u8>; S],
    pub report_use: [u8; S],
    pub claim: [ClaimNow; P],
    pub pod: [PodNow; P],
}

/// A write that an operator has decided on and not sent yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pending {
    pub pod: u8,
    pub place: u8,
    pub write: Write,
    /// Its object is still as it was when the write was decided.
    pub current: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Write {
    AddEntry,
    Step(Step),
}

/// An operator: leader, or paused and not aware of its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operator<const P: usize, const S: usize> {
    /// Its caches, where they lag; else it sees everything at once.
    pub cache: Option<Api<P, S>>,
    /// Cached claims and specs that are the newest version: a write to another fails.
    pub fresh_claims: u8,
    pub fresh_specs: u8,
    pub pending: Option<Pending>,
    /// Pods that it has read from the API server since their claims were last seen allocated.
    pub read: u8,
}

/// How often the unforeseen may still happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// kube-scheduler throws an allocation away.
    pub fails: u8,
    /// A node is cordoned, or its CPU goes; or it comes back.
    pub cordons: u8,
    /// A pod is deleted, or refused by its kubelet.
    pub deletes: u8,
    /// A pod is deleted by force.
    pub forces: u8,
    /// A claim is deleted.
    pub claims: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct World<const P: usize, const S: usize, const O: usize> {
    pub api: Api<P, S>,
    /// The specs as the daemons have them.
    pub daemon_spec: [Option<u8>; S],
    /// Pods that a place is prepared for or whose processes are on it, as bits. More than one: rule 1 is broken.
    pub users: [u8; S],
    /// Nodes to which kube-scheduler has decided to bind, the write being on its way.
    pub binding: [Option<u8>; P],
    /// Nodes on which nothing can be started.
    pub bad: [bool; S],
    /// Allocations that kube-scheduler has thrown away.
    pub thrown: [bool; P],
    pub operators: [Operator<P, S>; O],
    pub left: Budget,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// An operator's watch delivers: a claim, a pod, a spec with its report.
    SeeClaim {
        operator: u8,
        pod: u8,
    },
    SeePod {
        operator: u8,
        pod: u8,
    },
    SeeNode {
        operator: u8,
        node: u8,
    },
    /// An operator decides on its next write for a pod, at a place.
    Decide {
        operator: u8,
        pod: u8,
        place: u8,
    },
    /// The write arrives.
    Send {
        operator: u8,
    },
    /// The operator is killed before the write is sent.
    Crash {
        operator: u8,
    },
    /// kube-scheduler.
    Pick {
        pod: u8,
    },
    Bind {
        pod: u8,
    },
    Throw {
        pod: u8,
    },
    /// kube-controller-manager takes claims away that nobody needs.
    Collect {
        pod: u8,
    },
    /// Daemon and kubelet.
    Follow {
        node: u8,
    },
    Report {
        node: u8,
    },
    Prepare {
        pod: u8,
    },
    Unprepare {
        place: u8,
        pod: u8,
    },
    Terminate {
        pod: u8,
    },
    /// The container ends by itself.
    Complete {
        pod: u8,
    },
    /// People and nodes.
    Delete {
        pod: u8,
    },
    Force {
        pod: u8,
    },
    /// kubelet refuses the pod: its CPU has gone to another.
    Reject {
        pod: u8,
    },
    DeleteClaim {
        pod: u8,
    },
    Cordon {
        node: u8,
    },
}

impl Action {
    /// Whether a watch delivers.
    pub fn is_watch(self) -> bool {
        matches!(self, Action::SeeClaim { .. } | Action::SeePod { .. } | Action::SeeNode { .. })
    }

    /// Whether it happens sooner or later. The others may happen or not.
    pub fn is_certain(self) -> bool {
        use Action::*;
        !matches!(
            self,
            Crash { .. }
                | Throw { .. }
                | Complete { .. }
                | Delete { .. }
                | Force { .. }
                | Reject { .. }
                | DeleteClaim { .. }
                | Cordon { .. }
        )
    }
}

/// Safeguards that can be taken out, to see that the properties notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Missing {
    Nothing,
    /// The operator trusts its cache where it should read the pod.
    LiveRead,
    /// The daemon prepares by its spec alone.
    ClaimCheck,
    /// Neither the operator, before it allocates, nor the daemon looks whether another claim still holds the place.
    HolderCheck,
    /// The hold is not given back when its pod is over.
    HoldRelease,
    /// Writes have no preconditions.
    Preconditions,
    /// Two entries of one pod are each taken for the one that counts.
    Counting,
    /// A pod bound away from its allocation is left there.
    Eviction,
    /// Pods of a gang that is not complete are not held back.
    HoldingBack,
    /// What a gang that is not complete has is not given back.
    GivingBack,
}

/// The rules of a world.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Places of each node.
    pub places_per_node: usize,
    /// When the operators write the hold: always, or from the second attempt on.
    pub hold_at_once: bool,
    /// Whether the operators' caches lag, object by object.
    pub lag: bool,
    /// Whether a place counts as ready by a report that was made under an older spec: the instance that it shows may be
    /// destroyed under that spec yet, and made again under the present one.
    pub old_reports: bool,
    /// All pods are of one gang.
    pub together: bool,
    pub missing: Missing,
}

impl<const P: usize, const S: usize> Operator<P, S> {
    /// Whether the cache has the newest version of the object to be written.
    fn has_version_for(&self, rules: &Rules, write: Write, pod: usize, place: usize) -> bool {
        match write {
            Write::AddEntry | Write::Step(Step::RemoveEntry | Step::RestoreEntry) => {
                self.fresh_specs & bit(place / rules.places_per_node) != 0
            }
            Write::Step(
                Step::Allocate { .. } | Step::ReleaseHold | Step::ClearAllocation | Step::DeleteClaim,
            ) => self.fresh_claims & bit(pod) != 0,
            Write::Step(_) => true,
        }
    }
}

const fn bit(index: usize) -> u8 {
    1 << index
}

impl<const P: usize, const S: usize, const O: usize> World<P, S, O> {
    /// All pods gated, all places free.
    pub fn new(rules: &Rules, left: Budget) -> Self {
        let api = Api {
            spec: [None; S],
            report_spec: [None; S],
            report_use: [0; S],
            claim: [ClaimNow::Absent; P],
            pod: [PodNow::Gated; P],
        };
        let operator = Operator {
            cache: rules.lag.then_some(api),
            fresh_claims: u8::MAX,
            fresh_specs: u8::MAX,
            pending: None,
            read: 0,
        };
        Self {
            api,
            daemon_spec: [None; S],
            users: [0; S],
            binding: [None; P],
            bad: [false; S],
            thrown: [false; P],
            operators: [operator; O],
            left,
        }
    }

    pub fn nodes(rules: &Rules) -> usize {
        S / rules.places_per_node
    }

    fn node_of(rules: &Rules, place: usize) -> usize {
        place / rules.places_per_node
    }

    fn places(rules: &Rules, node: usize) -> std::ops::Range<usize> {
        node * rules.places_per_node..(node + 1) * rules.places_per_node
    }

    fn seen_by(&self, operator: usize) -> &Api<P, S> {
        self.operators[operator].cache.as_ref().unwrap_or(&self.api)
    }

    /// A claim was written by somebody.
    fn claim_changed(&mut self, pod: usize) {
        for operator in &mut self.operators {
            operator.fresh_claims &= !bit(pod);
            if let Some(pending) = &mut operator.pending
                && pending.pod as usize == pod
                && matches!(
                    pending.write,
                    Write::Step(
                        Step::Allocate { .. }
                            | Step::ReleaseHold
                            | Step::ClearAllocation
                            | Step::CreateClaim
                            | Step::DeleteClaim
                    )
                )
            {
                pending.current = false;
            }
        }
    }

    /// A spec was written by somebody.
    fn spec_changed(&mut self, rules: &Rules, node: usize) {
        for operator in &mut self.operators {
            operator.fresh_specs &= !bit(node);
            if let Some(pending) = &mut operator.pending
                && Self::node_of(rules, pending.place as usize) == node
                && matches!(
                    pending.write,
                    Write::AddEntry | Write::Step(Step::RemoveEntry | Step::RestoreEntry)
                )
            {
                pending.current = false;
            }
        }
    }

    /// Where the entries of a pod are, by an operator's view.
    fn entries(seen: &Api<P, S>, pod: usize) -> impl Iterator<Item = usize> + '_ {
        (0..S).filter(move |&place| seen.spec[place] == Some(pod as u8))
    }

    /// Of a gang: how many places it still needs, and whether there are as many pods and places for that.
    fn lacks(&self, rules: &Rules, seen: &Api<P, S>) -> (usize, bool) {
        let placed = |p: &usize| match seen.pod[*p] {
            PodNow::Gated => Self::entries(seen, *p).any(|place| !self.bad[Self::node_of(rules, place)]),
            PodNow::Unbound | PodNow::Bound { .. } | PodNow::Running { .. } => true,
            PodNow::Done | PodNow::Gone => false,
        };
        let waits = |p: &usize| seen.pod[*p] == PodNow::Gated && Self::entries(seen, *p).next().is_none();
        let free = |place: &usize| {
            let good = !self.bad[Self::node_of(rules, *place)];
            good && seen.spec[*place].is_none() && seen.report_use[*place] == 0
        };
        let lacks = P - (0..P).filter(placed).count();
        let can = (0..P).filter(waits).count().min((0..S).filter(free).count());
        (lacks, can >= lacks)
    }

    /// Whether one of its gang is itself leaving a place.
    fn one_leaves(&self, rules: &Rules, seen: &Api<P, S>) -> bool {
        let leaves = |p: usize| Self::entries(seen, p).any(|place| self.bad[Self::node_of(rules, place)]);
        (0..P).any(|p| seen.pod[p] == PodNow::Gated && leaves(p))
    }

    /// Whether the pod has to wait for others of its gang.
    fn is_held_back(&self, rules: &Rules, seen: &Api<P, S>, pod: usize) -> bool {
        let ready = |p: usize| match seen.pod[p] {
            PodNow::Gated => Self::entries(seen, p).any(|place| {
                let good = !self.bad[Self::node_of(rules, place)];
                let made = seen.report_spec[place] == Some(p as u8) && seen.report_use[place] & !bit(p) == 0;
                good && made && matches!(seen.claim[p], ClaimNow::There { deleting: false, .. })
            }),
            PodNow::Unbound | PodNow::Bound { .. } | PodNow::Running { .. } => true,
            PodNow::Done | PodNow::Gone => false,
        };
        let held_back = rules.together && seen.pod[pod] == PodNow::Gated && !(0..P).all(ready);
        held_back && rules.missing != Missing::HoldingBack
    }

    /// Whether the pod gives its place back because its gang cannot be completed.
    fn gives_back(&self, rules: &Rules, seen: &Api<P, S>, pod: usize) -> bool {
        let waits = rules.together && seen.pod[pod] == PodNow::Gated;
        waits
            && rules.missing != Missing::GivingBack
            && !self.lacks(rules, seen).1
            && !self.one_leaves(rules, seen)
    }

    /// What an operator asks [`protocol::next`] about a pod at a place.
    pub fn observed(&self, rules: &Rules, operator: usize, pod: usize, place: usize) -> Observed {
        let seen = self.seen_by(operator);
        let has_entry = seen.spec[place] == Some(pod as u8);
        let node = Self::node_of(rules, place);
        let allocated = match seen.claim[pod] {
            ClaimNow::There { place, .. } => place.map(usize::from),
            ClaimNow::Absent => None,
        };
        let bound = match seen.pod[pod] {
            PodNow::Bound { node, .. } => Some(node as usize),
            PodNow::Running { place, .. } => Some(Self::node_of(rules, place as usize)),
            _ => None,
        };
        let entry = has_entry.then(|| {
            let (under, used) = (seen.report_spec[place], seen.report_use[place]);
            Entry {
                ready: (under == Some(pod as u8) || rules.old_reports)
                    && (used & !bit(pod) == 0 || rules.missing == Missing::HolderCheck),
                in_use: used & bit(pod) != 0,
            }
        });
        let entries: Vec<(usize, usize)> =
            Self::entries(seen, pod).map(|place| (Self::node_of(rules, place), place)).collect();
        let counts = protocol::counts(&entries, bound.as_ref(), allocated.as_ref());
        Observed {
            pod: match seen.pod[pod] {
                PodNow::Gated => Pod::Gated,
                PodNow::Unbound => Pod::Unbound,
                PodNow::Bound { .. } | PodNow::Running { .. } => Pod::Bound { here: bound == Some(node) },
                PodNow::Done => Pod::Done,
                PodNow::Gone => Pod::Gone,
            },
            claim: match seen.claim[pod] {
                ClaimNow::Absent => Claim::Absent,
                ClaimNow::There { place: None, deleting: true, .. } => Claim::Deleting,
                ClaimNow::There { place: None, .. } => Claim::Unallocated,
                ClaimNow::There { place: Some(at), hold, deleting, .. } => {
                    Claim::Allocated { as_planned: has_entry && at as usize == place, held: hold, deleting }
                }
            },
            entry,
            claim_is_ours: true,
            withdraw: self.bad[node] || self.gives_back(rules, seen, pod),
            hold: rules.hold_at_once || self.thrown[pod],
            pod_read_live: self.operators[operator].read & bit(pod) != 0
                || rules.missing == Missing::LiveRead,
            superseded: rules.missing != Missing::Counting
                && has_entry
                && counts.is_some_and(|index| entries[index].1 != place),
            held_back: self.is_held_back(rules, seen, pod),
            place_taken: !has_entry && seen.spec[place].is_some(),
        }
    }

    /// The write that an operator would decide on for the pod at the place, if any.
    pub fn decision(&self, rules: &Rules, operator: usize, pod: usize, place: usize) -> Option<Write> {
        let seen = self.seen_by(operator);
        let has_entry = seen.spec[place] == Some(pod as u8);
        let allocated =
            matches!(seen.claim[pod], ClaimNow::There { place: Some(at), .. } if at as usize == place);
        let any_entry = Self::entries(seen, pod).next().is_some();
        let allocated_anywhere = matches!(seen.claim[pod], ClaimNow::There { place: Some(_), .. });
        let waits = matches!(seen.pod[pod], PodNow::Gated | PodNow::Unbound);
        if !has_entry && any_entry {
            return None;
        }
        if !has_entry && !allocated {
            // Nothing of the pod is here. It may be planned here, or is stranded.
            if allocated_anywhere {
                return None;
            }
            if waits {
                let free = seen.spec[place].is_none() && seen.report_use[place] == 0;
                let node = Self::node_of(rules, place);
                let unplanned = matches!(next(self, rules, operator, pod, place), Step::Wait(Waiting::Plan));
                let alone = !rules.together || seen.pod[pod] != PodNow::Gated;
                let for_all = alone || self.lacks(rules, seen).1;
                return (free && !self.bad[node] && unplanned && for_all).then_some(Write::AddEntry);
            }
            if place != 0 {
                return None;
            }
        }
        let step = next(self, rules, operator, pod, place);
        let going =
            matches!(seen.pod[pod], PodNow::Bound { going: true, .. } | PodNow::Running { going: true, .. });
        match step {
            Step::Wait(_) => None,
            // Deleting what is being deleted changes nothing.
            Step::EvictPod if going || rules.missing == Missing::Eviction => None,
            Step::ClearAllocation
                if rules.missing == Missing::HoldRelease
                    && matches!(seen.pod[pod], PodNow::Gone | PodNow::Done) =>
            {
                None
            }
            step => Some(Write::Step(step)),
        }
    }

    /// Everything that can happen now.
    pub fn actions(&self, rules: &Rules, actions: &mut Vec<Action>) {
        use Action::*;
        for o in 0..O {
            let operator = o as u8;
            let mine = &self.operators[o];
            if let Some(cache) = &mine.cache {
                for pod in 0..P {
                    if cache.claim[pod] != self.api.claim[pod] || mine.fresh_claims & bit(pod) == 0 {
                        actions.push(SeeClaim { operator, pod: pod as u8 });
                    }
                    if cache.pod[pod] != self.api.pod[pod] {
                        actions.push(SeePod { operator, pod: pod as u8 });
                    }
                }
                for node in 0..Self::nodes(rules) {
                    let places = Self::places(rules, node);
                    let stale = cache.spec[places.clone()] != self.api.spec[places.clone()]
                        || cache.report_spec[places.clone()] != self.api.report_spec[places.clone()]
                        || cache.report_use[places.clone()] != self.api.report_use[places]
                        || mine.fresh_specs & bit(node) == 0;
                    if stale {
                        actions.push(SeeNode { operator, node: node as u8 });
                    }
                }
            }
            if mine.pending.is_some() {
                actions.push(Send { operator });
                actions.push(Crash { operator });
                continue;
            }
            for pod in 0..P {
                for place in 0..S {
                    // A write to an object of which the cache has an old version fails, and changes nothing.
                    let fits = |write| mine.cache.is_none() || mine.has_version_for(rules, write, pod, place);
                    if self.decision(rules, o, pod, place).is_some_and(fits) {
                        actions.push(Decide { operator, pod: pod as u8, place: place as u8 });
                    }
                }
            }
        }
        for p in 0..P {
            let pod = p as u8;
            let now = self.api.pod[p];
            let (place, hold) = match self.api.claim[p] {
                ClaimNow::There { place, hold, .. } => (place.map(usize::from), hold),
                ClaimNow::Absent => (None, false),
            };
            let deleting = matches!(self.api.claim[p], ClaimNow::There { deleting: true, .. });
            if let (PodNow::Unbound, Some(place), None) = (now, place, self.binding[p]) {
                if !self.bad[Self::node_of(rules, place)] && !deleting {
                    actions.push(Pick { pod });
                }
                if !hold && self.left.fails > 0 {
                    actions.push(Throw { pod });
                }
            }
            if self.binding[p].is_some() {
                actions.push(Bind { pod });
            }
            let over = matches!(now, PodNow::Done | PodNow::Gone);
            let unneeded = deleting && place.is_none();
            if self.api.claim[p] != ClaimNow::Absent && ((over && !hold) || unneeded) {
                actions.push(Collect { pod });
            }
            match now {
                PodNow::Bound { going: false, .. } if self.prepares(rules, p).is_some() => {
                    actions.push(Prepare { pod });
                }
                PodNow::Bound { going: true, .. } | PodNow::Running { going: true, .. } => {
                    actions.push(Terminate { pod });
                }
                PodNow::Running { going: false, .. } => actions.push(Complete { pod }),
                _ => {}
            }
            let exists = now != PodNow::Gone;
            let going =
                matches!(now, PodNow::Bound { going: true, .. } | PodNow::Running { going: true, .. });
            if exists && !going && self.left.deletes > 0 {
                actions.push(Delete { pod });
            }
            if matches!(now, PodNow::Bound { going: false, .. }) && self.left.deletes > 0 {
                actions.push(Reject { pod });
            }
            if exists && self.left.forces > 0 {
                actions.push(Force { pod });
            }
            if self.left.claims > 0 && !deleting && self.api.claim[p] != ClaimNow::Absent {
                actions.push(DeleteClaim { pod });
            }
            for place in 0..S {
                let runs = matches!(now, PodNow::Running { place: at, .. } if at as usize == place);
                if self.users[place] & bit(p) != 0 && !runs {
                    actions.push(Unprepare { place: place as u8, pod });
                }
            }
        }
        for node in 0..Self::nodes(rules) {
            let places = Self::places(rules, node);
            if self.daemon_spec[places.clone()] != self.api.spec[places.clone()] {
                actions.push(Follow { node: node as u8 });
            }
            if self.daemon_spec[places.clone()] != self.api.report_spec[places.clone()]
                || self.users[places.clone()] != self.api.report_use[places]
            {
                actions.push(Report { node: node as u8 });
            }
            if self.left.cordons > 0 {
                actions.push(Cordon { node: node as u8 });
            }
        }
    }

    /// The place that the daemon of the pod's node would prepare for it.
    fn prepares(&self, rules: &Rules, pod: usize) -> Option<usize> {
        let PodNow::Bound { node, .. } = self.api.pod[pod] else { return None };
        let allocated = match self.api.claim[pod] {
            ClaimNow::There { place: Some(place), reserved: true, .. } => Some(place as usize),
            _ => None,
        };
        let mut places = Self::places(rules, node as usize);
        places.find(|&place| {
            let in_spec = self.daemon_spec[place] == Some(pod as u8);
            let in_claim = allocated == Some(place) || rules.missing == Missing::ClaimCheck;
            let free = self.users[place] & !bit(pod) == 0 || rules.missing == Missing::HolderCheck;
            in_spec && in_claim && free
        })
    }

    /// What follows.
    pub fn after(&self, rules: &Rules, action: Action) -> Self {
        use Action::*;
        let mut world = *self;
        match action {
            SeeClaim { operator, pod } => {
                let (api, mine) = (world.api, &mut world.operators[operator as usize]);
                if let Some(cache) = &mut mine.cache {
                    cache.claim[pod as usize] = api.claim[pod as usize];
                }
                mine.fresh_claims |= bit(pod as usize);
                if matches!(api.claim[pod as usize], ClaimNow::There { place: Some(_), .. }) {
                    mine.read &= !bit(pod as usize);
                }
            }
            SeePod { operator, pod } => {
                if let Some(cache) = &mut world.operators[operator as usize].cache {
                    cache.pod[pod as usize] = world.api.pod[pod as usize];
                }
            }
            SeeNode { operator, node } => {
                let (api, mine) = (world.api, &mut world.operators[operator as usize]);
                if let Some(cache) = &mut mine.cache {
                    for place in Self::places(rules, node as usize) {
                        cache.spec[place] = api.spec[place];
                        cache.report_spec[place] = api.report_spec[place];
                        cache.report_use[place] = api.report_use[place];
                    }
                }
                mine.fresh_specs |= bit(node as usize);
            }
            Decide { operator, pod, place } => {
                let (o, p, s) = (operator as usize, pod as usize, place as usize);
                let Some(write) = self.decision(rules, o, p, s) else { return world };
                let current = true;
                let mine = &mut world.operators[o];
                mine.pending = Some(Pending { pod, place, write, current });
            }
            Send { operator } => world.send(rules, operator as usize),
            Crash { operator } => {
                let mine = &mut world.operators[operator as usize];
                mine.pending = None;
                mine.read = 0;
            }
            Pick { pod } => {
                if let ClaimNow::There { place: Some(place), .. } = world.api.claim[pod as usize] {
                    world.binding[pod as usize] = Some(Self::node_of(rules, place as usize) as u8);
                }
            }
            Bind { pod } => {
                let p = pod as usize;
                if let (Some(node), PodNow::Unbound) = (world.binding[p].take(), world.api.pod[p]) {
                    world.api.pod[p] = PodNow::Bound { node, going: false };
                }
            }
            Throw { pod } => {
                let p = pod as usize;
                world.left.fails -= 1;
                world.thrown[p] = true;
                if let ClaimNow::There { place, reserved, .. } = &mut world.api.claim[p] {
                    (*place, *reserved) = (None, false);
                }
                world.claim_changed(p);
            }
            Collect { pod } => {
                world.api.claim[pod as usize] = ClaimNow::Absent;
                world.claim_changed(pod as usize);
            }
            Follow { node } => {
                for place in Self::places(rules, node as usize) {
                    world.daemon_spec[place] = world.api.spec[place];
                }
            }
            Report { node } => {
                for place in Self::places(rules, node as usize) {
                    world.api.report_spec[place] = world.daemon_spec[place];
                    world.api.report_use[place] = world.users[place];
                }
            }
            Prepare { pod } => {
                if let Some(place) = self.prepares(rules, pod as usize) {
                    world.users[place] |= bit(pod as usize);
                    world.api.pod[pod as usize] = PodNow::Running { place: place as u8, going: false };
                }
            }
            Unprepare { place, pod } => world.users[place as usize] &= !bit(pod as usize),
            Terminate { pod } => {
                world.stop(pod as usize);
                world.api.pod[pod as usize] = PodNow::Gone;
            }
            Complete { pod } => {
                world.stop(pod as usize);
                world.api.pod[pod as usize] = PodNow::Done;
            }
            Delete { pod } => {
                world.left.deletes -= 1;
                world.delete(pod as usize);
            }
            Force { pod } => {
                world.left.forces -= 1;
                world.api.pod[pod as usize] = PodNow::Gone;
            }
            Reject { pod } => {
                world.left.deletes -= 1;
                world.api.pod[pod as usize] = PodNow::Done;
            }
            DeleteClaim { pod } => {
                world.left.claims -= 1;
                if let ClaimNow::There { deleting, .. } = &mut world.api.claim[pod as usize] {
                    *deleting = true;
                }
                world.claim_changed(pod as usize);
            }
            Cordon { node } => {
                world.left.cordons -= 1;
                world.bad[node as usize] ^= true;
            }
        }
        world
    }

    fn stop(&mut self, pod: usize) {
        if let PodNow::Running { place, .. } = self.api.pod[pod] {
            self.users[place as usize] &= !bit(pod);
        }
    }

    fn delete(&mut self, pod: usize) {
        match &mut self.api.pod[pod] {
            PodNow::Bound { going, .. } | PodNow::Running { going, .. } => *going = true,
            gone => *gone = PodNow::Gone,
        }
    }

    /// An operator's write arrives.
    fn send(&mut self, rules: &Rules, o: usize) {
        let Some(pending) = self.operators[o].pending.take() else { return };
        let (p, s) = (pending.pod as usize, pending.place as usize);
        if !pending.current && rules.missing != Missing::Preconditions {
            return;
        }
        let node = Self::node_of(rules, s);
        match pending.write {
            Write::AddEntry | Write::Step(Step::RestoreEntry) => {
                self.api.spec[s] = Some(pending.pod);
                self.spec_changed(rules, node);
            }
            Write::Step(Step::RemoveEntry) => {
                self.api.spec[s] = None;
                self.spec_changed(rules, node);
                self.operators[o].read &= !bit(p);
            }
            Write::Step(Step::CreateClaim) => {
                if self.api.claim[p] == ClaimNow::Absent {
                    self.api.claim[p] =
                        ClaimNow::There { place: None, reserved: false, hold: false, deleting: false };
                    self.claim_changed(p);
                }
            }
            Write::Step(Step::Allocate { hold: wanted }) => {
                if let ClaimNow::There { place, reserved, hold, .. } = &mut self.api.claim[p]
                    && place.is_none()
                {
                    (*place, *reserved, *hold) = (Some(pending.place), true, wanted);
                    self.operators[o].read &= !bit(p);
                    self.claim_changed(p);
                }
            }
            Write::Step(Step::ReleaseHold) => {
                if let ClaimNow::There { hold, .. } = &mut self.api.claim[p] {
                    *hold = false;
                    self.claim_changed(p);
                }
            }
            Write::Step(Step::ClearAllocation) => {
                if let ClaimNow::There { place, reserved, hold, .. } = &mut self.api.claim[p] {
                    (*place, *reserved, *hold) = (None, false, false);
                    self.operators[o].read &= !bit(p);
                    self.claim_changed(p);
                }
            }
            Write::Step(Step::DeleteClaim) => {
                if let ClaimNow::There { deleting, .. } = &mut self.api.claim[p] {
                    *deleting = true;
                    self.claim_changed(p);
                }
            }
            Write::Step(Step::Ungate) => {
                if self.api.pod[p] == PodNow::Gated {
                    self.api.pod[p] = PodNow::Unbound;
                }
            }
            Write::Step(Step::ReadPod) => {
                let now = self.api.pod[p];
                if let Some(cache) = &mut self.operators[o].cache {
                    cache.pod[p] = now;
                }
                self.operators[o].read |= bit(p);
            }
            Write::Step(Step::EvictPod) => self.delete(p),
            Write::Step(Step::Wait(_)) => {}
        }
        // An operator sees its own writes at once.
        let api = self.api;
        let mine = &mut self.operators[o];
        if let Some(cache) = &mut mine.cache {
            match pending.write {
                Write::AddEntry | Write::Step(Step::RestoreEntry | Step::RemoveEntry) => {
                    for place in Self::places(rules, node) {
                        cache.spec[place] = api.spec[place];
                        cache.report_spec[place] = api.report_spec[place];
                        cache.report_use[place] = api.report_use[place];
                    }
                    mine.fresh_specs |= bit(node);
                }
                Write::Step(
                    Step::CreateClaim
                    | Step::Allocate { .. }
                    | Step::ReleaseHold
                    | Step::ClearAllocation
                    | Step::DeleteClaim,
                ) => {
                    cache.claim[p] = api.claim[p];
                    mine.fresh_claims |= bit(p);
                }
                Write::Step(Step::Ungate | Step::EvictPod) => cache.pod[p] = api.pod[p],
                Write::Step(Step::ReadPod | Step::Wait(_)) => {}
            }
        }
    }

    /// No place is used by two.
    pub fn is_safe(&self) -> bool {
        self.users.iter().all(|users| users.count_ones() <= 1)
    }

    /// Every pod that runs is on record where it runs.
    pub fn is_on_record(&self) -> bool {
        (0..P).all(|p| match self.api.pod[p] {
            PodNow::Running { place, .. } => self.api.spec[place as usize] == Some(p as u8),
            _ => true,
        })
    }

    /// None of a gang has started while another has no place.
    pub fn is_all_or_none(&self) -> bool {
        let started = |p: usize| {
            matches!(self.api.pod[p], PodNow::Unbound | PodNow::Bound { .. } | PodNow::Running { .. })
        };
        let without =
            |p: usize| self.api.pod[p] == PodNow::Gated && Self::entries(&self.api, p).next().is_none();
        !((0..P).any(started) && (0..P).any(without))
    }

    /// Nothing that is certain to happen is left.
    pub fn is_quiet(&self, rules: &Rules) -> bool {
        let mut actions = Vec::new();
        self.actions(rules, &mut actions);
        actions.into_iter().all(|action| !action.is_certain())
    }

    /// What is wrong if the world stays as it is.
    pub fn complaint(&self, rules: &Rules) -> Option<String> {
        let free = |place: usize| {
            self.api.spec[place].is_none() && self.users[place] == 0 && !self.bad[Self::node_of(rules, place)]
        };
        for p in 0..P {
            let entries: Vec<usize> = Self::entries(&self.api, p).collect();
            let claim = self.api.claim[p];
            let wrong = match self.api.pod[p] {
                PodNow::Gated | PodNow::Unbound => {
                    // Without a place it waits rightly if there is none.
                    let waits =
                        entries.is_empty() && !matches!(claim, ClaimNow::There { place: Some(_), .. });
                    let held_back = rules.together && self.api.pod[p] == PodNow::Gated;
                    let room = if held_back { self.lacks(rules, &self.api).1 } else { (0..S).any(free) };
                    if waits && held_back && claim != ClaimNow::Absent {
                        Some("waits without a place and has a claim")
                    } else if waits && room {
                        Some("waits although there is room")
                    } else if !waits {
                        Some("has a place and does not get on")
                    } else {
                        None
                    }
                }
                PodNow::Bound { .. } => Some("is bound and does not run"),
                PodNow::Running { place, going } => match claim {
                    _ if going => Some("is to be deleted and is not"),
                    ClaimNow::There { place: Some(at), reserved: true, hold: false, .. }
                        if at == place && entries == [place as usize] =>
                    {
                        None
                    }
                    ClaimNow::There { hold: true, .. } => Some("runs under a hold"),
                    _ => Some("runs away from its record or its allocation"),
                },
                PodNow::Done | PodNow::Gone => {
                    if !entries.is_empty() {
                        Some("is over and has a place")
                    } else if claim != ClaimNow::Absent {
                        Some("is over and has a claim")
                    } else {
                        None
                    }
                }
            };
            if let Some(wrong) = wrong {
                return Some(format!("pod {p} {wrong}"));
            }
        }
        let leaked = (0..S).find(|&place| {
            let runs = |p: usize| matches!(self.api.pod[p], PodNow::Running { place: at, .. } if at as usize == place);
            self.users[place] != 0 && !(0..P).any(runs)
        });
        leaked.map(|place| format!("place {place} is in use by nobody"))
    }
}

fn next<const P: usize, const S: usize, const O: usize>(
    world: &World<P, S, O>,
    rules: &Rules,
    operator: usize,
    pod: usize,
    place: usize,
) -> Step {
    protocol::next(&world.observed(rules, operator, pod, place))
}
