//! Discrete-event simulation of tasks that occupy resources.
//!
//! A task starts when all its predecessors have ended, what they sent has arrived, and its resource
//! is free. Resources run tasks in the order in which these could start. The simulation is
//! deterministic.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Number of a task.
pub type TaskId = usize;

/// Number of a resource, which runs one task at a time.
pub type Resource = usize;

/// Kind of a task, for the time accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Computing.
    Compute,
    /// Sending or receiving a message.
    Message,
    /// Bytes in transit.
    Transfer,
}

struct TaskNode {
    resource: Resource,
    kind: Kind,
    seconds: f64,
    /// Delay from its end until its successors may start.
    delay: f64,
    waits: usize,
    /// Earliest start, and the task that determines it.
    ready: f64,
    because: Option<TaskId>,
    before: Vec<TaskId>,
}

/// Tasks with their order.
#[derive(Default)]
pub struct Tasks {
    tasks: Vec<TaskNode>,
    resources: usize,
}

/// Time accounting of a resource, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Account {
    /// Time spent computing.
    pub compute: f64,
    /// Time spent sending or receiving messages, or waiting for bytes in transit to it.
    pub link: f64,
    /// End of its last task.
    pub end: f64,
}

/// Result of a simulation.
#[derive(Clone, Debug)]
pub struct Played {
    /// End of each task.
    pub ends: Vec<f64>,
    /// Accounts by resource.
    pub accounts: Vec<Account>,
}

impl Played {
    /// Returns the end of the last task.
    pub fn seconds(&self) -> f64 {
        self.ends.iter().copied().fold(0.0, f64::max)
    }
}

/// A time, ordered as a number.
#[derive(PartialEq)]
struct At(f64);

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Tasks {
    /// Creates an empty list of tasks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a task of `seconds` on a resource, after others.
    ///
    /// # Panics
    /// If one of `after` is not an earlier task.
    pub fn add(
        &mut self,
        resource: Resource,
        kind: Kind,
        seconds: f64,
        delay: f64,
        after: impl IntoIterator<Item = TaskId>,
    ) -> TaskId {
        let id = self.tasks.len();
        let mut waits = 0;
        for earlier in after {
            self.tasks[earlier].before.push(id);
            waits += 1;
        }
        self.resources = self.resources.max(resource + 1);
        self.tasks.push(TaskNode {
            resource,
            kind,
            seconds,
            delay,
            waits,
            ready: 0.0,
            because: None,
            before: Vec::new(),
        });
        id
    }

    /// Returns the number of tasks.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns whether there are no tasks.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Runs the simulation.
    pub fn play(mut self) -> Played {
        let mut ends = vec![0.0; self.tasks.len()];
        let mut accounts = vec![Account::default(); self.resources];
        let mut ready = BinaryHeap::new();
        for (id, task) in self.tasks.iter().enumerate() {
            if task.waits == 0 {
                ready.push(Reverse((At(0.0), id)));
            }
        }
        while let Some(Reverse((At(time), id))) = ready.pop() {
            let (resource, kind, seconds, delay, because) = {
                let task = &self.tasks[id];
                (
                    task.resource,
                    task.kind,
                    task.seconds,
                    task.delay,
                    task.because,
                )
            };
            let account = &mut accounts[resource];
            let start = time.max(account.end);
            let idle = start - account.end;
            // The task would have started earlier without waiting for this one.
            if let Some(last) = because.map(|last| &self.tasks[last])
                && last.kind == Kind::Transfer
            {
                account.link += idle.min(last.seconds + last.delay);
            }
            match kind {
                Kind::Compute => account.compute += seconds,
                Kind::Message | Kind::Transfer => account.link += seconds,
            }
            let end = start + seconds;
            account.end = end;
            ends[id] = end;
            for next in std::mem::take(&mut self.tasks[id].before) {
                let task = &mut self.tasks[next];
                if end + delay >= task.ready {
                    task.ready = end + delay;
                    task.because = Some(id);
                }
                task.waits -= 1;
                if task.waits == 0 {
                    ready.push(Reverse((At(task.ready), next)));
                }
            }
        }
        Played { ends, accounts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_runs_tasks_one_by_one_in_ready_order() {
        let mut tasks = Tasks::new();
        let slow = tasks.add(0, Kind::Compute, 5.0, 0.0, []);
        let quick = tasks.add(1, Kind::Compute, 1.0, 0.0, []);
        let behind_slow = tasks.add(2, Kind::Compute, 1.0, 0.0, [slow]);
        let behind_quick = tasks.add(2, Kind::Compute, 10.0, 0.0, [quick]);
        let ends = tasks.play().ends;
        assert_eq!([ends[behind_quick], ends[behind_slow]], [11.0, 12.0]);
    }

    #[test]
    fn messages_in_transit_leave_the_link_free() {
        let mut tasks = Tasks::new();
        let first = tasks.add(0, Kind::Transfer, 2.0, 10.0, []);
        let second = tasks.add(0, Kind::Transfer, 2.0, 10.0, []);
        let one = tasks.add(1, Kind::Compute, 1.0, 0.0, [first]);
        let both = tasks.add(1, Kind::Compute, 1.0, 0.0, [first, second]);
        let played = tasks.play();
        assert_eq!(played.ends, [2.0, 4.0, 13.0, 15.0]);
        assert_eq!((one, both), (2, 3));
        // 12 seconds for the first, one more for the second, which arrived while the first
        // computed.
        assert_eq!(
            played.accounts[1],
            Account {
                compute: 2.0,
                link: 13.0,
                end: 15.0
            }
        );
    }

    #[test]
    fn waiting_for_computation_is_not_charged_to_the_link() {
        let mut tasks = Tasks::new();
        let work = tasks.add(0, Kind::Compute, 100.0, 0.0, []);
        let send = tasks.add(1, Kind::Transfer, 1.0, 2.0, [work]);
        tasks.add(2, Kind::Compute, 4.0, 0.0, [send]);
        let played = tasks.play();
        assert_eq!(played.seconds(), 107.0);
        let far = played.accounts[2];
        assert_eq!((far.compute, far.link, far.end), (4.0, 3.0, 107.0));
    }
}
