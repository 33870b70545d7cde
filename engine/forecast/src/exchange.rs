//! Collective operations of the members of a split device, as tasks.

use crate::events::{Kind, Resource, TaskId, Tasks};
use crate::machines::{Algorithm, Link};
use std::collections::BTreeMap;

/// Resources of links, created on first use.
#[derive(Default)]
pub(crate) struct Ports {
    next: Resource,
    known: BTreeMap<(String, Resource, bool), Resource>,
}

impl Ports {
    /// Creates the ports after the first `first` resources.
    pub fn behind(first: Resource) -> Self {
        Ports {
            next: first,
            known: BTreeMap::new(),
        }
    }

    /// Returns the resource for bytes to or from a machine over a link.
    fn port(&mut self, link: &Link, machine: Resource, is_back: bool) -> Resource {
        let key = if link.shared {
            (link.name.clone(), 0, false)
        } else {
            (link.name.clone(), machine, is_back)
        };
        let next = &mut self.next;
        *self.known.entry(key).or_insert_with(|| {
            *next += 1;
            *next - 1
        })
    }
}

/// Adds a message from one resource to another over the port of `machine`. Both ends are busy with
/// it. Returns the task after which it has arrived.
pub(crate) fn message(
    tasks: &mut Tasks,
    ports: &mut Ports,
    link: &Link,
    [from, to, machine]: [Resource; 3],
    bytes: f64,
    after: impl IntoIterator<Item = TaskId>,
) -> TaskId {
    let port = ports.port(link, machine, from == machine);
    let sent = tasks.add(from, Kind::Message, link.message, 0.0, after);
    let carried = tasks.add(
        port,
        Kind::Transfer,
        bytes / link.bandwidth,
        link.latency,
        [sent],
    );
    tasks.add(to, Kind::Message, link.message, 0.0, [carried])
}

/// Maximum number of predecessors. More are merged into one task.
const FEW: usize = 4;

/// Kind of exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExchangeKind {
    /// All members have numbers of this many bytes, and get their sum (all-reduce).
    Sum,
    /// All members have a part, and get the whole of this many bytes (all-gather).
    Gather,
    /// The first member has this many bytes, and all get them.
    Broadcast,
}

/// Adds an exchange among members. Each member is a resource with its last tasks, which are
/// updated.
pub(crate) fn exchange(
    tasks: &mut Tasks,
    ports: &mut Ports,
    (link, algorithm): (&Link, Algorithm),
    members: &[Resource],
    last: &mut [Vec<TaskId>],
    (what, bytes): (ExchangeKind, f64),
) {
    let n = members.len();
    // Adds a round of simultaneous messages, given as senders, receivers and bytes.
    let mut round = |last: &mut [Vec<TaskId>], pairs: &[(usize, usize, f64)]| {
        let mut next: Vec<Vec<TaskId>> = last.to_vec();
        for &(from, to, bytes) in pairs {
            // Each member sends through its own port.
            let route = [members[from], members[to], members[from]];
            let after = last[from].iter().copied();
            next[to].push(message(tasks, ports, link, route, bytes, after));
        }
        for (member, next) in next.iter_mut().enumerate() {
            if next.len() > FEW {
                let all = std::mem::take(next);
                next.push(tasks.add(members[member], Kind::Message, 0.0, 0.0, all));
            }
        }
        last.clone_from_slice(&next);
    };
    let all = |bytes: f64, to: &dyn Fn(usize) -> usize| -> Vec<(usize, usize, f64)> {
        (0..n).map(|from| (from, to(from), bytes)).collect()
    };
    match (algorithm, what) {
        _ if n < 2 => {}
        (Algorithm::Direct, ExchangeKind::Broadcast) => {
            let pairs: Vec<_> = (1..n).map(|to| (0, to, bytes)).collect();
            round(last, &pairs);
        }
        (Algorithm::Direct, ExchangeKind::Sum | ExchangeKind::Gather) => {
            let each = match what {
                ExchangeKind::Sum => bytes,
                _ => bytes / n as f64,
            };
            // At each moment, each member sends to another one.
            let pairs: Vec<_> = (1..n)
                .flat_map(|step| all(each, &move |from| (from + step) % n))
                .collect();
            round(last, &pairs);
        }
        (Algorithm::Ring, ExchangeKind::Broadcast) => {
            for step in 1..n {
                round(last, &[(step - 1, step, bytes)]);
            }
        }
        (Algorithm::Ring, ExchangeKind::Sum | ExchangeKind::Gather) => {
            let rounds = match what {
                ExchangeKind::Sum => 2 * (n - 1),
                _ => n - 1,
            };
            for _ in 0..rounds {
                round(last, &all(bytes / n as f64, &|from| (from + 1) % n));
            }
        }
        (Algorithm::Doubling, ExchangeKind::Broadcast) => {
            let mut distance = 1;
            while distance < n {
                let pairs: Vec<_> = (0..distance)
                    .filter(|from| from + distance < n)
                    .map(|from| (from, from + distance, bytes))
                    .collect();
                round(last, &pairs);
                distance *= 2;
            }
        }
        (Algorithm::Doubling, ExchangeKind::Sum | ExchangeKind::Gather) => {
            // Members beyond a power of two hand over their data first, and get the result
            // afterwards.
            let whole = 1 << n.ilog2();
            let beyond: Vec<_> = (whole..n).collect();
            let part = |members: usize| match what {
                ExchangeKind::Sum => bytes,
                _ => bytes * members as f64 / n as f64,
            };
            if !beyond.is_empty() {
                let pairs: Vec<_> = beyond.iter().map(|&m| (m, m - whole, part(1))).collect();
                round(last, &pairs);
            }
            let mut distance = 1;
            while distance < whole {
                let pairs: Vec<_> = (0..whole)
                    .map(|from| (from, from ^ distance, part(distance)))
                    .collect();
                round(last, &pairs);
                distance *= 2;
            }
            if !beyond.is_empty() {
                let pairs: Vec<_> = beyond.iter().map(|&m| (m - whole, m, bytes)).collect();
                round(last, &pairs);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(shared: bool) -> Link {
        Link {
            name: "lan".into(),
            latency: 10.0,
            bandwidth: 2.0,
            message: 0.0,
            shared,
        }
    }

    fn seconds(
        algorithm: Algorithm,
        what: ExchangeKind,
        n: usize,
        bytes: f64,
        shared: bool,
    ) -> f64 {
        let mut tasks = Tasks::new();
        let members: Vec<_> = (0..n).collect();
        let mut last = vec![Vec::new(); n];
        let mut ports = Ports::behind(n);
        let by = (&link(shared), algorithm);
        exchange(
            &mut tasks,
            &mut ports,
            by,
            &members,
            &mut last,
            (what, bytes),
        );
        tasks.play().ends.into_iter().fold(0.0, f64::max)
    }

    /// Compares with closed formulas: each round takes the latency plus its bytes over the
    /// bandwidth.
    #[test]
    fn exchange_times_match_the_formulas() {
        use Algorithm::{Direct, Doubling, Ring};
        use ExchangeKind::{Broadcast, Gather, Sum};
        for (algorithm, what, n, expected) in [
            (Direct, Sum, 1, 0.0),
            (Direct, Sum, 2, 10.0 + 24.0 / 2.0),
            (Direct, Sum, 4, 10.0 + 3.0 * 24.0 / 2.0),
            (Direct, Gather, 4, 10.0 + 3.0 * 6.0 / 2.0),
            (Direct, Broadcast, 4, 10.0 + 3.0 * 24.0 / 2.0),
            (Ring, Sum, 4, 6.0 * (10.0 + 6.0 / 2.0)),
            (Ring, Gather, 4, 3.0 * (10.0 + 6.0 / 2.0)),
            (Ring, Broadcast, 4, 3.0 * (10.0 + 24.0 / 2.0)),
            (Doubling, Sum, 8, 3.0 * (10.0 + 24.0 / 2.0)),
            // The first one sends to the second, and then to the third while that message is in
            // transit.
            (Doubling, Sum, 3, 2.0 * (10.0 + 24.0 / 2.0) + 24.0 / 2.0),
            (Doubling, Gather, 4, 20.0 + (6.0 + 12.0) / 2.0),
            (Doubling, Broadcast, 4, 2.0 * (10.0 + 24.0 / 2.0)),
        ] {
            let found = seconds(algorithm, what, n, 24.0, false);
            assert!(
                (found - expected).abs() < 1e-9,
                "{algorithm:?} {what:?} {n}: {found} for {expected}"
            );
        }
        // All share one wire.
        assert_eq!(seconds(Direct, Sum, 4, 24.0, true), 10.0 + 12.0 * 12.0);
    }
}
