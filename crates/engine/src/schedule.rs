//! The scheduler: which requests compute what in the next step. A state machine that knows no
//! device and no clock.
//!
//! A step of the engine is at most one decode step and one prompt step, one after the other.
//! *Decode first*: every running request that has a token to go on from has its row in each.
//! Prompts follow within a budget of rows, which bounds the time between two tokens of whoever is
//! decoding. Requests are *admitted* while there is a place and blocks for their whole prompt. When
//! blocks run out, the latest arrival is *preempted*: it waits again, in its old place, and what it
//! had is recomputed as far as the prefix tree has lost it. So the earliest arrival always goes on,
//! and every request comes to its end.
//!
//! Who is next among those waiting: the highest priority; among callers of the same priority the
//! one that was given least (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024);
//! of one caller the earliest. What has waited longer than `patience` steps while others of other
//! callers and priorities went in goes before all of them, so that nothing starves.
//!
//! Short prompts are *gathered* ([`Gathering`]): a step reads all weights, for one short prompt as
//! for five, while all that decode wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A request, as long as it waits or runs.
pub(crate) type Id = u64;

/// The limits of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Requests that run at a time; each may have a row in a decode step.
    pub(crate) sequences: usize,
    /// Rows of a decode step; at least `sequences`.
    pub(crate) decode_rows: usize,
    /// Rows of a prompt step while no request decodes.
    pub(crate) prompt_rows: usize,
    /// Rows of a prompt step beside a decode step: the bound on the gap between two tokens.
    pub(crate) shared_rows: usize,
    /// Steps that a request waits behind higher priorities at most.
    pub(crate) patience: u64,
    /// Decode steps that a short prompt waits for others at most; 0 gathers none.
    pub(crate) gather: u64,
    /// Rows of prompts that take about as long to compute as weights take to be read: as many wait
    /// for no others.
    pub(crate) gather_rows: usize,
}

/// A request that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) id: Id,
    /// Whom it is computed for; callers share the device evenly.
    pub(crate) caller: u64,
    /// Higher ones go first.
    pub(crate) priority: i32,
    /// When it is given up, by the caller's clock.
    pub(crate) deadline: Option<u64>,
}

/// The rows that a request has to compute next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pending {
    /// Rows of a prompt.
    Prompt(usize),
    /// Rows of decode steps: one token to go on from, or more that were generated before the
    /// request was preempted.
    Decode(usize),
    /// Nothing before the device has answered.
    Nothing,
}

/// The cache as the scheduler sees it.
pub(crate) trait Cache {
    /// Whether a waiting request's prompt would find blocks, those that others were promised left
    /// aside.
    fn fits(&mut self, id: Id) -> bool;
    /// Gives a waiting request what it needs to run, and what the prefix tree has of it.
    fn admit(&mut self, id: Id);
    /// The rows that a running request has to compute.
    fn pending(&self, id: Id) -> Pending;
    /// Takes the blocks for a running request's next rows; false, with nothing changed, if there
    /// are too few.
    fn claim(&mut self, id: Id, rows: usize) -> bool;
    /// Takes back what a running request has; its full blocks stay in the prefix tree.
    fn release(&mut self, id: Id);
}

/// A request's part in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) id: Id,
    pub(crate) rows: usize,
}

/// The next steps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Requests whose deadline has passed; they are gone.
    pub(crate) expired: Vec<Id>,
    /// Requests that were alone and found too few blocks all the same; they are gone.
    pub(crate) refused: Vec<Id>,
    /// Requests that wait again.
    pub(crate) preempted: Vec<Id>,
    /// Rows of the decode step.
    pub(crate) decode: Vec<Work>,
    /// Rows of the prompt step.
    pub(crate) prompt: Vec<Work>,
}

impl Plan {
    fn clear(&mut self) {
        let Plan { expired, refused, preempted, decode, prompt } = self;
        [expired, refused, preempted].into_iter().for_each(Vec::clear);
        [decode, prompt].into_iter().for_each(Vec::clear);
    }
}

#[derive(Debug)]
struct Request {
    caller: u64,
    priority: i32,
    deadline: Option<u64>,
    /// Its place among all arrivals.
    order: u64,
    /// The step before which it arrived.
    since: u64,
    /// The step in which its prompt first waited for others.
    held: Option<u64>,
    running: bool,
}

/// Requests of one caller and priority that wait, in the order of their arrival.
#[derive(Debug, Default)]
struct Queue {
    waiting: BTreeSet<(u64, Id)>,
    /// The step that last admitted one of them.
    served: u64,
}

/// A caller's share of the device.
#[derive(Debug, Default)]
struct Caller {
    requests: usize,
    /// Rows computed for it, and what it was credited with when it came.
    rows: u64,
}

/// The weight of the latest step in the rate at which short prompts come.
const WEIGHT: f64 = 1.0 / 64.0;

/// For how long short prompts are gathered, by how many lately came in a decode step.
///
/// A step for prompts costs each of `n` decoding requests a token. If `r` prompts come in a step,
/// one that waits `t` steps is computed together with `1 + rt` in all, which have lost `t + rt²/2`
/// tokens by waiting. So a prompt costs `(n + t + rt²/2) / (1 + rt)` tokens, which is least where
/// `rt = √(2rn - 1) - 1`; where `rn` is below 1, that is nowhere, and no prompt waits.
#[derive(Debug, Default)]
struct Gathering {
    rate: f64,
}

impl Gathering {
    /// Notes the short prompts that came in a step.
    fn arrived(&mut self, prompts: usize) {
        self.rate += WEIGHT * (prompts as f64 - self.rate);
    }

    /// The steps that a prompt waits for others while so many requests decode.
    fn steps(&self, decoding: usize) -> u64 {
        let worth = self.rate * decoding as f64;
        if worth > 1.0 { (((2.0 * worth - 1.0).sqrt() - 1.0) / self.rate) as u64 } else { 0 }
    }
}

/// The scheduler's state: who waits and who runs.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    requests: HashMap<Id, Request>,
    /// By caller and priority; none is empty.
    queues: BTreeMap<(u64, i32), Queue>,
    /// In the order of their arrival.
    running: BTreeSet<(u64, Id)>,
    gathering: Gathering,
    /// By deadline.
    deadlines: BTreeSet<(u64, Id)>,
    callers: HashMap<u64, Caller>,
    arrivals: u64,
    step: u64,
    plan: Plan,
    /// The running requests while a plan is made.
    order: Vec<Id>,
}

impl Scheduler {
    /// A scheduler without requests.
    pub(crate) fn new(limits: Limits) -> Self {
        let sequences = limits.sequences.max(1);
        Scheduler {
            limits: Limits {
                sequences,
                decode_rows: limits.decode_rows.max(sequences),
                prompt_rows: limits.prompt_rows.max(1),
                shared_rows: limits.shared_rows.max(1),
                ..limits
            },
            requests: HashMap::new(),
            queues: BTreeMap::new(),
            running: BTreeSet::new(),
            gathering: Gathering::default(),
            deadlines: BTreeSet::new(),
            callers: HashMap::new(),
            arrivals: 0,
            step: 0,
            plan: Plan::default(),
            order: Vec::with_capacity(sequences),
        }
    }

    /// Sets the rows of a prompt step beside a decode step.
    pub(crate) fn share(&mut self, rows: usize) {
        self.limits.shared_rows = rows.max(1);
    }

    /// Sets the decode steps that a short prompt waits for others at most.
    pub(crate) fn gather(&mut self, steps: u64) {
        self.limits.gather = steps;
    }

    /// Requests that wait, and that run.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.requests.len() - self.running.len(), self.running.len())
    }

    /// Takes a request in.
    pub(crate) fn submit(&mut self, arrival: Arrival) {
        let Arrival { id, caller, priority, deadline } = arrival;
        // Who comes back, or for the first time, is not owed what others were given meanwhile.
        let least = self.callers.values().map(|caller| caller.rows).min().unwrap_or(0);
        let entry = self.callers.entry(caller).or_insert(Caller { requests: 0, rows: least });
        entry.requests += 1;
        let (order, since) = (self.arrivals, self.step);
        self.arrivals += 1;
        let request =
            Request { caller, priority, deadline, order, since, held: None, running: false };
        self.deadlines.extend(deadline.map(|at| (at, id)));
        self.queues.entry((caller, priority)).or_default().waiting.insert((order, id));
        self.requests.insert(id, request);
    }

    /// Takes a request out that has ended, was cancelled or failed. A running one's cache is
    /// released.
    pub(crate) fn remove(&mut self, id: Id, cache: &mut impl Cache) {
        let Some(request) = self.requests.remove(&id) else { return };
        if request.running {
            self.running.remove(&(request.order, id));
            cache.release(id);
        } else {
            self.leave(&request, id);
        }
        if let Some(at) = request.deadline {
            self.deadlines.remove(&(at, id));
        }
        if let Some(caller) = self.callers.get_mut(&request.caller) {
            caller.requests -= 1;
            if caller.requests == 0 {
                self.callers.remove(&request.caller);
            }
        }
    }

    /// Takes a waiting request out of its queue.
    fn leave(&mut self, request: &Request, id: Id) {
        let key = (request.caller, request.priority);
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.waiting.remove(&(request.order, id));
            if queue.waiting.is_empty() {
                self.queues.remove(&key);
            }
        }
    }

    /// Decides on the next step at a time by the caller's clock. The rows are claimed and counted
    /// as computed.
    pub(crate) fn next(&mut self, now: u64, cache: &mut impl Cache) -> &Plan {
        self.step += 1;
        self.plan.clear();
        while let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.remove(id, cache);
            self.plan.expired.push(id);
        }
        self.order.clear();
        self.order.extend(self.running.iter().map(|(_, id)| *id));
        let order = std::mem::take(&mut self.order);
        // Each has one row; what is left of the step is for those that catch up.
        let mut spare = self.limits.decode_rows - order.len().min(self.limits.decode_rows);
        for &id in &order {
            if let Pending::Decode(rows) = self.pending(id, cache) {
                let rows = rows.min(1 + spare);
                if self.claim(id, rows, cache) {
                    spare -= rows - 1;
                    self.plan.decode.push(Work { id, rows });
                }
            }
        }
        let decoding = self.plan.decode.len();
        let idle = decoding == 0;
        let mut budget = if idle { self.limits.prompt_rows } else { self.limits.shared_rows };
        let enough = budget.min(self.limits.gather_rows);
        let mut held = self.held(&order, decoding, cache).filter(|rows| *rows < enough);
        if held.is_none() {
            for &id in &order {
                budget -= self.prompt(id, budget, cache);
            }
        }
        self.order = order;
        let mut short = 0;
        while budget > 0 && self.running.len() < self.limits.sequences {
            let Some(id) = self.candidate() else { break };
            let crowded = !self.plan.preempted.is_empty() || !cache.fits(id);
            if crowded && !self.running.is_empty() {
                break;
            }
            self.admit(id, cache);
            let rows = match self.pending(id, cache) {
                Pending::Prompt(rows) => rows,
                _ => 0,
            };
            short += usize::from(rows < self.limits.gather_rows);
            match &mut held {
                None => budget -= self.prompt(id, budget, cache),
                Some(all) if *all + rows < enough => {
                    *all += rows;
                    self.hold(id);
                }
                Some(_) => {
                    held = None;
                    let mut order = std::mem::take(&mut self.order);
                    order.clear();
                    order.extend(self.running.iter().map(|(_, id)| *id));
                    for &id in &order {
                        budget -= self.prompt(id, budget, cache);
                    }
                    self.order = order;
                }
            }
        }
        if !idle {
            self.gathering.arrived(short);
        }
        &self.plan
    }

    /// The rows of the prompts of running requests, if they may wait for others beside a step in
    /// which some requests decode.
    fn held(&self, order: &[Id], decoding: usize, cache: &impl Cache) -> Option<usize> {
        let steps = self.gathering.steps(decoding).min(self.limits.gather);
        if steps == 0 {
            return None;
        }
        let mut all = 0;
        for &id in order {
            if let Pending::Prompt(rows) = self.pending(id, cache) {
                let held = self.requests.get(&id)?.held?;
                if self.step - held >= steps {
                    return None;
                }
                all += rows;
            }
        }
        Some(all)
    }

    /// Notes that a request's prompt waits for others from this step on, if it does not already.
    fn hold(&mut self, id: Id) {
        if let Some(request) = self.requests.get_mut(&id) {
            request.held.get_or_insert(self.step);
        }
    }

    /// Takes the latest plan, and the memory of another one for the next.
    pub(crate) fn swap(&mut self, plan: &mut Plan) {
        std::mem::swap(&mut self.plan, plan);
    }

    /// The rows that a request has to compute, if it still runs.
    fn pending(&self, id: Id, cache: &impl Cache) -> Pending {
        let runs = self.requests.get(&id).is_some_and(|request| request.running);
        if runs { cache.pending(id) } else { Pending::Nothing }
    }

    /// Plans rows of a prompt, at most `budget`; returns how many.
    fn prompt(&mut self, id: Id, budget: usize, cache: &mut impl Cache) -> usize {
        let Pending::Prompt(rows) = self.pending(id, cache) else { return 0 };
        let rows = rows.min(budget);
        if rows == 0 || !self.claim(id, rows, cache) {
            return 0;
        }
        self.plan.prompt.push(Work { id, rows });
        rows
    }

    /// Claims blocks for a running request, of later arrivals where there is no other way; false if
    /// it was itself the latest, and has been preempted, or was alone, and has been refused.
    fn claim(&mut self, id: Id, rows: usize, cache: &mut impl Cache) -> bool {
        while !cache.claim(id, rows) {
            let Some(&(_, latest)) = self.running.last() else { return false };
            if self.running.len() == 1 {
                self.remove(latest, cache);
                self.plan.refused.push(latest);
            } else {
                self.preempt(latest, cache);
            }
            if latest == id {
                return false;
            }
        }
        let caller = self.requests.get(&id).map(|request| request.caller);
        if let Some(caller) = caller.and_then(|caller| self.callers.get_mut(&caller)) {
            caller.rows += rows as u64;
        }
        true
    }

    /// Makes a running request wait again.
    fn preempt(&mut self, id: Id, cache: &mut impl Cache) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.running = false;
        self.running.remove(&(request.order, id));
        let queue = self.queues.entry((request.caller, request.priority)).or_default();
        queue.waiting.insert((request.order, id));
        cache.release(id);
        // It may have its part in this step already.
        self.plan.decode.retain(|work| work.id != id);
        self.plan.prompt.retain(|work| work.id != id);
        self.plan.preempted.push(id);
    }

    /// Who is next among those that wait.
    fn candidate(&self) -> Option<Id> {
        let heads = self.queues.iter().filter_map(|(&(caller, priority), queue)| {
            let &(order, id) = queue.waiting.first()?;
            let since = self.requests.get(&id)?.since.max(queue.served);
            let late = self.step - since > self.limits.patience;
            let given = self.callers.get(&caller)?.rows;
            // The late ones first, by how late; the others by priority, by what their callers were
            // given, by arrival.
            let rank =
                if late { (0, Reverse(i32::MAX), since) } else { (1, Reverse(priority), given) };
            Some((rank, order, id))
        });
        heads.min().map(|(_, _, id)| id)
    }

    fn admit(&mut self, id: Id, cache: &mut impl Cache) {
        let Some(mut request) = self.requests.remove(&id) else { return };
        if let Some(queue) = self.queues.get_mut(&(request.caller, request.priority)) {
            queue.served = self.step;
        }
        self.leave(&request, id);
        request.running = true;
        self.running.insert((request.order, id));
        self.requests.insert(id, request);
        cache.admit(id);
    }
}

#[cfg(test)]
mod tests;
