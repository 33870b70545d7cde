//! The open connections: those that wait for a request make room when there are too many.

use crate::app::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Files that are open for other things than connections.
const OTHER_FILES: usize = 64;

/// The connections of a server.
#[derive(Debug)]
pub struct Connections {
    most: usize,
    list: Mutex<List>,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    /// By the time that they were last at work, which is a count: how each is told to end.
    idle: BTreeMap<u64, Arc<Notify>>,
    open: usize,
}

/// One of them. It is not counted any more when it is dropped.
#[derive(Debug)]
pub struct Connection {
    all: Arc<Connections>,
    /// Told when it is to make room.
    pub leave: Arc<Notify>,
    place: Mutex<Option<u64>>,
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
        self.0.rest();
    }
}

impl Connections {
    pub fn new(most: usize) -> Self {
        Connections {
            most,
            list: Mutex::default(),
        }
    }

    /// As many as the system allows open files, which is first asked to be as many as it may be.
    pub fn allowed() -> Self {
        Connections::new(open_files().saturating_sub(OTHER_FILES).max(16))
    }

    /// A new connection. If there are too many, those make room that have waited longest for a request.
    pub fn add(self: &Arc<Self>) -> Connection {
        let mut list = lock(&self.list);
        list.open += 1;
        let excess = list.open.saturating_sub(self.most);
        list.dismiss(excess);
        drop(list);
        let connection = Connection {
            all: Arc::clone(self),
            leave: Arc::default(),
            place: Mutex::default(),
        };
        connection.rest();
        connection
    }

    /// Has some that wait for a request make room.
    pub fn make_room(&self) {
        lock(&self.list).dismiss(8);
    }
}

impl List {
    fn dismiss(&mut self, count: usize) {
        for _ in 0..count {
            let Some((_, leave)) = self.idle.pop_first() else {
                return;
            };
            leave.notify_one();
        }
    }
}

impl Connection {
    /// While it waits for a request: a number that no other wait of any connection has.
    pub fn wait(&self) -> Option<u64> {
        *lock(&self.place)
    }

    /// It has a request.
    fn work(&self) {
        if let Some(place) = lock(&self.place).take() {
            lock(&self.all.list).idle.remove(&place);
        }
    }

    /// It waits for a request.
    fn rest(&self) {
        let mut list = lock(&self.all.list);
        let place = list.next;
        list.next += 1;
        list.idle.insert(place, Arc::clone(&self.leave));
        drop(list);
        if let Some(before) = lock(&self.place).replace(place) {
            lock(&self.all.list).idle.remove(&before);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.work();
        lock(&self.all.list).open -= 1;
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

    /// Whether it was told to leave.
    fn leaves(connection: &Connection) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let time = std::time::Duration::from_millis(5);
            tokio::time::timeout(time, connection.leave.notified())
                .await
                .is_ok()
        })
    }

    #[test]
    fn those_that_waited_longest_make_room() {
        let all = Arc::new(Connections::new(3));
        let list: Vec<Connection> = (0..3).map(|_| all.add()).collect();
        list[0].work();
        list[1].work();
        list[1].rest();
        // The first is at work, the second was a moment ago.
        let fourth = all.add();
        assert_eq!(
            list.iter().map(leaves).collect::<Vec<_>>(),
            [false, false, true]
        );
        drop(fourth);
        drop(list);
        let list: Vec<Connection> = (0..3).map(|_| all.add()).collect();
        assert!(!list.iter().any(leaves));
        assert_eq!(lock(&all.list).idle.len(), 3);
    }
}
