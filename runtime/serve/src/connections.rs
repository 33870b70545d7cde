//! The open connections. If there are too many, connections that wait for their clients are closed.

use crate::app::lock;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Number of open files reserved for other purposes.
const OTHER_FILES: usize = 64;

/// Maximum number of closing connections that do not count towards the limit.
const MAX_LEAVING: usize = OTHER_FILES / 2;

/// Bytes that a connection may hold for the head of a request: twice its maximum size.
const HEAD_MEMORY: usize = 128 << 10;

/// Default maximum number of connections.
const LIMIT: usize = 4096;

/// The connections of a server.
#[derive(Debug)]
pub struct Connections {
    limit: usize,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    /// Waiting connections by the start of their wait, which is a counter.
    waiting: BTreeMap<u64, Waiting>,
    /// Number of open connections by address.
    open: BTreeMap<IpAddr, usize>,
    /// Number of open connections that were told to close.
    leaving: usize,
}

/// The client's action that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wait {
    /// Sending a request.
    Request,
    /// Sending the rest of a body.
    Body,
    /// Reading a response.
    Read,
}

/// A waiting connection.
#[derive(Debug)]
struct Waiting {
    wait: Wait,
    since: Instant,
    address: IpAddr,
    /// Notifies it to close.
    told: Arc<Notify>,
    is_leaving: Arc<AtomicBool>,
}

/// A connection. Dropping it removes it from the count.
#[derive(Debug)]
pub struct Connection {
    all: Arc<Connections>,
    address: IpAddr,
    /// Address of this machine, if it is known.
    pub local_address: Option<IpAddr>,
    /// Notified if the connection must close once it is idle.
    pub leave: Arc<Notify>,
    /// Notified if the connection must close at once.
    pub cut: Arc<Notify>,
    /// True once `leave` or `cut` was notified.
    is_leaving: Arc<AtomicBool>,
    place: Mutex<Option<(u64, Wait)>>,
}

/// A running request of a connection, until its response is passed to the writer.
#[derive(Debug)]
pub struct InFlight(Arc<Connection>);

impl InFlight {
    pub fn new(connection: &Arc<Connection>) -> Self {
        connection.work();
        InFlight(Arc::clone(connection))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.wait_for(Wait::Request);
    }
}

/// Result of making room for a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A connection closes.
    Made,
    /// Other bodies are not late yet.
    Later,
    /// There is no other body.
    None,
}

/// A body that is being received.
#[derive(Debug)]
pub struct Receiving<'c>(&'c Connection);

impl<'c> Receiving<'c> {
    pub fn new(connection: &'c Connection) -> Self {
        connection.wait_for(Wait::Body);
        Receiving(connection)
    }

    /// Records that a part has arrived.
    pub fn has_come(&self) {
        self.0.wait_for(Wait::Body);
    }

    /// Records that the server has no memory for the body, so that its client is not late.
    pub fn pause(&self) {
        self.0.work();
    }

    /// Closes the connection whose body made no progress for the longest time, if that is at least
    /// `late`.
    pub fn make_room(&self, late: Duration) -> Room {
        let own = self.0.waits().map(|(place, _)| place);
        let mut list = lock(&self.0.all.list);
        let is_other = |place, one: &Waiting| one.wait == Wait::Body && Some(place) != own;
        if list.dismiss(|place, one| is_other(place, one) && one.since.elapsed() >= late) {
            Room::Made
        } else if list
            .waiting
            .iter()
            .any(|(place, one)| is_other(*place, one))
        {
            Room::Later
        } else {
            Room::None
        }
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        self.0.work();
    }
}

impl Connections {
    pub fn new(limit: usize) -> Self {
        Connections {
            limit,
            list: Mutex::default(),
        }
    }

    /// Allows `wanted` connections, limited by the number of open files, whose soft limit is raised
    /// first. By default, the heads of requests may hold a quarter of `memory`.
    pub fn allowed(wanted: Option<usize>, memory: usize) -> Self {
        let files = open_files().saturating_sub(OTHER_FILES).max(16);
        let usual = (memory / 4 / HEAD_MEMORY).clamp(64, LIMIT);
        Connections::new(wanted.unwrap_or(usual).min(files))
    }

    /// Adds a connection from `address`. If there are too many, closes one that waits.
    pub fn add(self: &Arc<Self>, address: IpAddr) -> Connection {
        let mut list = lock(&self.list);
        *list.open.entry(address).or_default() += 1;
        let open = list.open.values().sum::<usize>();
        // Closing connections do not count, so that a burst does not close all others.
        if open - list.leaving.min(MAX_LEAVING) > self.limit {
            list.dismiss(|_, _| true);
        }
        drop(list);
        let connection = Connection {
            all: Arc::clone(self),
            address,
            local_address: None,
            leave: Arc::default(),
            cut: Arc::default(),
            is_leaving: Arc::default(),
            place: Mutex::default(),
        };
        connection.wait_for(Wait::Request);
        connection
    }

    /// Closes some waiting connections.
    pub fn make_room(&self) {
        let mut list = lock(&self.list);
        for _ in 0..8 {
            list.dismiss(|_, _| true);
        }
    }
}

impl List {
    /// Closes a connection of the address with the most connections. Those that wait for a request
    /// come first, then the one that has waited longest.
    fn dismiss(&mut self, may_leave: impl Fn(u64, &Waiting) -> bool) -> bool {
        let waiting = self.waiting.iter().filter(|(place, one)| {
            let closes_anyway = one.wait == Wait::Request && one.is_leaving.load(Ordering::Relaxed);
            !closes_anyway && may_leave(**place, one)
        });
        let rank = |(place, one): &(&u64, &Waiting)| {
            let open = self.open.get(&one.address).copied().unwrap_or(0);
            (Reverse(open), one.wait != Wait::Request, **place)
        };
        let Some((&place, _)) = waiting.min_by_key(rank) else {
            return false;
        };
        if let Some(one) = self.waiting.remove(&place) {
            if !one.is_leaving.swap(true, Ordering::Relaxed) {
                self.leaving += 1;
            }
            one.told.notify_one();
        }
        true
    }
}

impl Connection {
    /// Returns the current wait, with a number that no other wait of any connection has.
    pub fn waits(&self) -> Option<(u64, Wait)> {
        *lock(&self.place)
    }

    /// Ends the wait.
    pub fn work(&self) {
        if let Some((place, _)) = lock(&self.place).take() {
            lock(&self.all.list).waiting.remove(&place);
        }
    }

    /// Starts to wait, last in the order of waits.
    pub fn wait_for(&self, wait: Wait) {
        let told = match wait {
            Wait::Request => &self.leave,
            Wait::Body | Wait::Read => &self.cut,
        };
        let mut list = lock(&self.all.list);
        let number = list.next;
        list.next += 1;
        let waiting = Waiting {
            wait,
            since: Instant::now(),
            address: self.address,
            told: Arc::clone(told),
            is_leaving: Arc::clone(&self.is_leaving),
        };
        list.waiting.insert(number, waiting);
        drop(list);
        if let Some((before, _)) = lock(&self.place).replace((number, wait)) {
            lock(&self.all.list).waiting.remove(&before);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.work();
        let mut list = lock(&self.all.list);
        list.leaving -= usize::from(self.is_leaving.load(Ordering::Relaxed));
        if let Some(count) = list.open.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                list.open.remove(&self.address);
            }
        }
    }
}

/// Raises the limit of open files to its maximum and returns it.
#[cfg(unix)]
fn open_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let now = match setrlimit(Resource::Nofile, wanted) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    now.map_or(usize::MAX, |count| {
        usize::try_from(count).unwrap_or(usize::MAX)
    })
}

#[cfg(not(unix))]
fn open_files() -> usize {
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// Returns whether the connection was notified to leave or closed.
    fn leaves(connection: &Connection) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let time = std::time::Duration::from_millis(5);
            let told = async {
                tokio::select! {
                    () = connection.leave.notified() => {}
                    () = connection.cut.notified() => {}
                }
            };
            tokio::time::timeout(time, told).await.is_ok()
        })
    }

    fn leaving(list: &[Connection]) -> Vec<bool> {
        list.iter().map(leaves).collect()
    }

    #[test]
    fn the_longest_waiting_connection_is_closed() {
        let all = Arc::new(Connections::new(3));
        let list: Vec<Connection> = (0..3).map(|_| all.add(HERE)).collect();
        list[0].work();
        list[1].work();
        list[1].wait_for(Wait::Request);
        // The first is at work; the second was until just now.
        let fourth = all.add(HERE);
        assert_eq!(leaving(&list), [false, false, true]);
        drop(fourth);
        drop(list);
        let list: Vec<Connection> = (0..3).map(|_| all.add(HERE)).collect();
        assert!(!list.iter().any(leaves));
        assert_eq!(lock(&all.list).waiting.len(), 3);
    }

    #[test]
    fn closing_connections_count_as_freed() {
        let all = Arc::new(Connections::new(2));
        let mut list: Vec<Connection> = (0..2).map(|_| all.add(HERE)).collect();
        list.push(all.add(HERE));
        assert_eq!(leaving(&list), [true, false, false]);
        // The first is slow to close. Another client leaves, and its successor takes its place.
        list.remove(1);
        list.push(all.add(HERE));
        assert_eq!(leaving(&list), [false, false, false]);
        list.push(all.add(HERE));
        assert_eq!(leaving(&list), [false, true, false, false]);
        list.drain(..2);
        assert_eq!(lock(&all.list).leaving, 0);
    }

    #[test]
    fn slowly_closing_connections_hold_few_places() {
        let all = Arc::new(Connections::new(2));
        let mut list: Vec<Connection> = (0..200).map(|_| all.add(HERE)).collect();
        assert_eq!(lock(&all.list).leaving, 198);
        let last = list.pop().unwrap();
        drop(list.pop());
        let _next = all.add(HERE);
        assert!(leaves(&last));
    }

    #[test]
    fn clients_that_do_not_read_are_closed_last() {
        let all = Arc::new(Connections::new(2));
        let list: Vec<Connection> = (0..2).map(|_| all.add(HERE)).collect();
        list[0].wait_for(Wait::Read);
        let third = all.add(HERE);
        assert_eq!(leaving(&list), [false, true]);
        third.work();
        list[1].work();
        let _fourth = all.add(HERE);
        assert_eq!(leaving(&list), [true, false]);
    }

    #[test]
    fn the_address_with_the_most_connections_loses_one() {
        let all = Arc::new(Connections::new(3));
        let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
        let first = all.add(other);
        let list: Vec<Connection> = (0..2).map(|_| all.add(HERE)).collect();
        let _third = all.add(HERE);
        assert!(!leaves(&first));
        assert_eq!(leaving(&list), [true, false]);
    }

    #[test]
    fn the_slowest_body_is_dropped_for_another() {
        let all = Arc::new(Connections::new(9));
        let list: Vec<Connection> = (0..3).map(|_| all.add(HERE)).collect();
        let bodies: Vec<Receiving<'_>> = list.iter().map(Receiving::new).collect();
        bodies[0].has_come();
        assert_eq!(bodies[2].make_room(Duration::MAX), Room::Later);
        assert_eq!(bodies[2].make_room(Duration::ZERO), Room::Made);
        assert_eq!(leaving(&list), [false, true, false]);
        // A body that the server has no memory for stays.
        bodies[0].pause();
        assert_eq!(bodies[2].make_room(Duration::ZERO), Room::None);
        assert_eq!(leaving(&list), [false, false, false]);
        drop(bodies);
        // A lone body can make no room.
        let lone = Receiving::new(&list[0]);
        assert_eq!(lone.make_room(Duration::ZERO), Room::None);
        drop(lone);
        assert!(list[0].waits().is_none());
    }
}
