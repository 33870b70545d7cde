//! The open connections: those that wait for their clients make room when there are too many.

use crate::app::lock;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Files that are open for other things than connections.
const OTHER_FILES: usize = 64;

/// Bytes that a connection may hold for the head of a request: twice its size.
const HEAD_MEMORY: usize = 128 << 10;

/// Most connections if no other number is set.
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
    /// By the time since when they wait, which is a count.
    waiting: BTreeMap<u64, Waiting>,
    /// By address: how many are open.
    open: BTreeMap<IpAddr, usize>,
}

/// The next step of a client that a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wait {
    /// Send a request.
    Request,
    /// Send the rest of a body.
    Body,
    /// Read an answer.
    Read,
}

/// A connection that waits.
#[derive(Debug)]
struct Waiting {
    wait: Wait,
    address: IpAddr,
    /// Tells it to make room.
    told: Arc<Notify>,
}

/// One of them. It is not counted any more when it is dropped.
#[derive(Debug)]
pub struct Connection {
    all: Arc<Connections>,
    address: IpAddr,
    /// Told when it is to end once it is not at work.
    pub leave: Arc<Notify>,
    /// Told when it is to end at once.
    pub cut: Arc<Notify>,
    place: Mutex<Option<(u64, Wait)>>,
}

/// A request of a connection, until its answer was given to whoever writes it.
#[derive(Debug)]
pub struct AtWork(Arc<Connection>);

impl AtWork {
    pub fn new(connection: &Arc<Connection>) -> Self {
        connection.work();
        AtWork(Arc::clone(connection))
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.wait_for(Wait::Request);
    }
}

/// A body that is coming, until it is there.
#[derive(Debug)]
pub struct Receiving<'c>(&'c Connection);

impl<'c> Receiving<'c> {
    pub fn new(connection: &'c Connection) -> Self {
        connection.wait_for(Wait::Body);
        Receiving(connection)
    }

    /// Takes note that a part has come.
    pub fn has_come(&self) {
        self.0.wait_for(Wait::Body);
    }

    /// Cuts the connection whose body did not go on for the longest time, if there is another one.
    pub fn make_room(&self) -> bool {
        let own = self.0.waits().map(|(place, _)| place);
        let mut list = lock(&self.0.all.list);
        list.dismiss(|place, wait| wait == Wait::Body && Some(place) != own)
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

    /// Allows `wanted` connections, but no more than the system allows open files, which is first
    /// asked to be as many as it may be. Without a number, the heads of requests may hold a quarter
    /// of `memory`.
    pub fn allowed(wanted: Option<usize>, memory: usize) -> Self {
        let files = open_files().saturating_sub(OTHER_FILES).max(16);
        let usual = (memory / 4 / HEAD_MEMORY).clamp(64, LIMIT);
        Connections::new(wanted.unwrap_or(usual).min(files))
    }

    /// Adds a connection from `address`. If there are too many, one that waits makes room.
    pub fn add(self: &Arc<Self>, address: IpAddr) -> Connection {
        let mut list = lock(&self.list);
        *list.open.entry(address).or_default() += 1;
        if list.open.values().sum::<usize>() > self.limit {
            list.dismiss(|_, _| true);
        }
        drop(list);
        let connection = Connection {
            all: Arc::clone(self),
            address,
            leave: Arc::default(),
            cut: Arc::default(),
            place: Mutex::default(),
        };
        connection.wait_for(Wait::Request);
        connection
    }

    /// Has some that wait make room.
    pub fn make_room(&self) {
        let mut list = lock(&self.list);
        for _ in 0..8 {
            list.dismiss(|_, _| true);
        }
    }
}

impl List {
    /// Tells a connection to make room: one of the address with the most connections. Of these, one
    /// that waits for a request comes first, then the one that waits for the longest time.
    fn dismiss(&mut self, may_leave: impl Fn(u64, Wait) -> bool) -> bool {
        let waiting = self.waiting.iter();
        let waiting = waiting.filter(|(place, one)| may_leave(**place, one.wait));
        let rank = |(place, one): &(&u64, &Waiting)| {
            let open = self.open.get(&one.address).copied().unwrap_or(0);
            (Reverse(open), one.wait != Wait::Request, **place)
        };
        let Some((&place, _)) = waiting.min_by_key(rank) else {
            return false;
        };
        if let Some(one) = self.waiting.remove(&place) {
            one.told.notify_one();
        }
        true
    }
}

impl Connection {
    /// Returns what it waits for, with a number that no other wait of any connection has.
    pub fn waits(&self) -> Option<(u64, Wait)> {
        *lock(&self.place)
    }

    /// Waits for nothing any more.
    pub fn work(&self) {
        if let Some((place, _)) = lock(&self.place).take() {
            lock(&self.all.list).waiting.remove(&place);
        }
    }

    /// Begins to wait, as one that waits for the shortest time.
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
            address: self.address,
            told: Arc::clone(told),
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
        if let Some(count) = list.open.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                list.open.remove(&self.address);
            }
        }
    }
}

/// How many files this process may have open, after asking for as many as it may ask for.
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

    /// Returns true if the connection was told to leave, or cut.
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
    fn those_that_waited_longest_make_room() {
        let all = Arc::new(Connections::new(3));
        let list: Vec<Connection> = (0..3).map(|_| all.add(HERE)).collect();
        list[0].work();
        list[1].work();
        list[1].wait_for(Wait::Request);
        // The first is at work, the second was a moment ago.
        let fourth = all.add(HERE);
        assert_eq!(leaving(&list), [false, false, true]);
        drop(fourth);
        drop(list);
        let list: Vec<Connection> = (0..3).map(|_| all.add(HERE)).collect();
        assert!(!list.iter().any(leaves));
        assert_eq!(lock(&all.list).waiting.len(), 3);
    }

    #[test]
    fn clients_that_do_not_read_make_room_if_no_other_waits() {
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
    fn the_address_with_the_most_connections_makes_room() {
        let all = Arc::new(Connections::new(3));
        let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
        let first = all.add(other);
        let list: Vec<Connection> = (0..2).map(|_| all.add(HERE)).collect();
        let _third = all.add(HERE);
        assert!(!leaves(&first));
        assert_eq!(leaving(&list), [true, false]);
    }

    #[test]
    fn the_slowest_body_makes_room_for_another() {
        let all = Arc::new(Connections::new(9));
        let list: Vec<Connection> = (0..3).map(|_| all.add(HERE)).collect();
        let bodies: Vec<Receiving<'_>> = list.iter().map(Receiving::new).collect();
        bodies[0].has_come();
        assert!(bodies[2].make_room());
        assert_eq!(leaving(&list), [false, true, false]);
        drop(bodies);
        // Alone, it can make no room.
        assert!(!Receiving::new(&list[0]).make_room());
        assert!(list[0].waits().is_none());
    }
}
