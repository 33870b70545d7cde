//! Connection limit of a server, shared fairly among client addresses.
//!
//! A connection takes its seat when it is accepted, before it has sent anything. When all seats are
//! taken, a connection without state makes room for a newcomer:
//!
//! - first a connection that has not greeted, of the address with the most such connections;
//! - then a connection that has greeted but holds nothing, of the address with the most such
//!   connections, provided that this is not the newcomer's address and that it has more seats than
//!   the newcomer's.
//!
//! A connection that holds something never makes room.

use super::ConnectionHandle;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Progress of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has not greeted yet.
    New,
    /// It has greeted, but holds nothing.
    Idle,
    /// It holds memory or a session.
    Busy,
}

/// A limited number of connections.
#[derive(Debug)]
pub struct Seats {
    most: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    /// Number of the next seat. Older seats have lower numbers.
    next: u64,
    seats: BTreeMap<u64, Occupant>,
}

#[derive(Debug)]
struct Occupant {
    origin: Option<IpAddr>,
    stage: Stage,
    handle: Option<Arc<dyn ConnectionHandle>>,
}

/// One seat, which becomes free when this is dropped.
pub struct Seat {
    seats: Arc<Seats>,
    number: u64,
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seat({})", self.number)
    }
}

impl Seats {
    /// Creates `most` free seats.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Seats {
            most,
            taken: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a seat for a connection from `address`. If all are taken, shuts down another
    /// connection through its handle to make room. Returns `None` if no connection has to make
    /// room.
    pub fn take(
        self: &Arc<Self>,
        address: Option<IpAddr>,
        handle: Option<Arc<dyn ConnectionHandle>>,
    ) -> Option<Seat> {
        let origin = address.map(origin);
        let mut taken = self.lock();
        let mut leaving = None;
        if taken.seats.len() >= self.most {
            let number = taken.loser(origin)?;
            leaving = taken.seats.remove(&number);
        }
        let number = taken.next;
        taken.next += 1;
        let occupant = Occupant {
            origin,
            stage: Stage::New,
            handle,
        };
        taken.seats.insert(number, occupant);
        drop(taken);
        if let Some(handle) = leaving.and_then(|occupant| occupant.handle) {
            handle.shut_down();
        }
        Some(Seat {
            seats: Arc::clone(self),
            number,
        })
    }

    /// Returns the number of taken seats.
    pub fn taken(&self) -> usize {
        self.lock().seats.len()
    }
}

impl Taken {
    /// Returns the seat that makes room for a newcomer.
    fn loser(&self, newcomer: Option<IpAddr>) -> Option<u64> {
        if let Some((_, oldest)) = self.crowd(Stage::New, |_| true) {
            return Some(oldest);
        }
        let of = |origin| {
            self.seats
                .values()
                .filter(move |seat| seat.origin == origin)
        };
        let (origin, oldest) = self.crowd(Stage::Idle, |origin| origin != newcomer)?;
        (of(origin).count() > of(newcomer).count()).then_some(oldest)
    }

    /// Returns the origin with the most seats in a stage that can make room, and its oldest one.
    fn crowd(
        &self,
        stage: Stage,
        is_eligible: impl Fn(Option<IpAddr>) -> bool,
    ) -> Option<(Option<IpAddr>, u64)> {
        let mut crowds: BTreeMap<Option<IpAddr>, (usize, u64)> = BTreeMap::new();
        for (&number, seat) in &self.seats {
            if seat.stage == stage && seat.handle.is_some() && is_eligible(seat.origin) {
                crowds.entry(seat.origin).or_insert((0, number)).0 += 1;
            }
        }
        let largest = crowds.into_iter().max_by_key(|(_, (count, _))| *count);
        largest.map(|(origin, (_, oldest))| (origin, oldest))
    }
}

impl Seat {
    /// Records the progress of the connection.
    pub fn set_stage(&self, stage: Stage) {
        if let Some(occupant) = self.seats.lock().seats.get_mut(&self.number) {
            occupant.stage = stage;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.lock().seats.remove(&self.number);
    }
}

/// Returns the part of an address that one client controls at least. For IPv6 that is a 64-bit
/// network.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from(network))
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[derive(Debug, Default)]
    struct Line(AtomicBool);

    impl ConnectionHandle for Line {
        fn has_left(&self) -> bool {
            false
        }

        fn shut_down(&self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Takes a seat for `10.0.0.host` and returns it with its line.
    fn sit(seats: &Arc<Seats>, host: u8) -> Option<(Seat, Arc<Line>)> {
        let line = Arc::new(Line::default());
        let handle = Arc::clone(&line) as Arc<dyn ConnectionHandle>;
        let seat = seats.take(Some(IpAddr::from([10, 0, 0, host])), Some(handle))?;
        Some((seat, line))
    }

    fn cut(all: &[(Seat, Arc<Line>)]) -> Vec<bool> {
        let is_cut = |(_, line): &(Seat, Arc<Line>)| line.0.load(Ordering::Relaxed);
        all.iter().map(is_cut).collect()
    }

    #[test]
    fn the_address_with_the_most_silent_connections_loses_one() {
        let seats = Seats::new(4);
        let mut all: Vec<_> = [1, 2, 2, 3].map(|host| sit(&seats, host).unwrap()).into();
        assert_eq!(cut(&all), [false; 4]);
        all.push(sit(&seats, 4).unwrap());
        assert_eq!(cut(&all), [false, true, false, false, false]);
        assert_eq!(seats.taken(), 4);
        // A seat that has made room does not free another one.
        drop(all.remove(1));
        assert_eq!(seats.taken(), 4);
        drop(all);
        assert_eq!(seats.taken(), 0);
    }

    #[test]
    fn silent_connections_are_evicted_for_their_own_address() {
        let seats = Seats::new(2);
        let all = [1, 1, 1].map(|_| sit(&seats, 1).unwrap());
        assert_eq!(cut(&all), [true, false, false]);
    }

    #[test]
    fn idle_connections_are_evicted_for_addresses_with_fewer_seats() {
        let seats = Seats::new(3);
        let mut all: Vec<_> = [1, 1, 2].map(|host| sit(&seats, host).unwrap()).into();
        for (seat, _) in &all {
            seat.set_stage(Stage::Idle);
        }
        assert!(sit(&seats, 1).is_none(), "the same address");
        all.push(sit(&seats, 3).unwrap());
        assert_eq!(cut(&all), [true, false, false, false]);
        all[3].0.set_stage(Stage::Idle);
        assert!(sit(&seats, 3).is_none(), "as many as the others");
    }

    #[test]
    fn busy_connections_are_never_evicted() {
        let seats = Seats::new(2);
        let all = [1, 1].map(|host| sit(&seats, host).unwrap());
        for (seat, _) in &all {
            seat.set_stage(Stage::Busy);
        }
        assert!(sit(&seats, 2).is_none());
        all[1].0.set_stage(Stage::Idle);
        assert!(sit(&seats, 2).is_some());
        assert_eq!(cut(&all), [false, true]);
    }

    #[test]
    fn an_ipv6_network_counts_as_one_address() {
        let of = |text: &str| origin(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }
}
