//! A group of threads in one process.

use super::Communicator;
use super::spin_barrier::{Call, Poison, SpinBarrier};
use samite_core::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Published data of each member. There are two buffers, used in turn: when a member reaches a
/// barrier, all have read what it published before the barrier before the last.
type PublishedBuffers<T> = [Vec<RwLock<Vec<T>>>; 2];

struct ThreadGroupState {
    spin_barrier: SpinBarrier,
    /// Number of resets of the group.
    beginnings: AtomicUsize,
    numbers: PublishedBuffers<f32>,
    bytes: PublishedBuffers<u8>,
}

/// State shared by the members of a group of threads.
#[derive(Clone)]
pub struct ThreadGroup(Arc<ThreadGroupState>);

/// One thread's end of a group.
pub struct ThreadCommunicator {
    shared: Arc<ThreadGroupState>,
    rank: usize,
    size: usize,
    /// Number of barriers since the last reset, the same on all members.
    calls: usize,
    beginning: usize,
}

fn published<T>(size: usize) -> PublishedBuffers<T> {
    std::array::from_fn(|_| (0..size).map(|_| RwLock::default()).collect())
}

impl ThreadGroup {
    /// Creates a group of `size` members. A waiting member spins `spins` times, then sleeps, for at
    /// most `deadline`.
    pub fn new(size: usize, spins: usize, deadline: Duration) -> Self {
        ThreadGroup(Arc::new(ThreadGroupState {
            spin_barrier: SpinBarrier::new(size, spins, deadline),
            beginnings: AtomicUsize::new(0),
            numbers: published(size),
            bytes: published(size),
        }))
    }

    /// Returns the members' ends.
    pub fn members(&self) -> Vec<ThreadCommunicator> {
        let size = self.0.numbers[0].len();
        (0..size)
            .map(|rank| ThreadCommunicator {
                shared: Arc::clone(&self.0),
                rank,
                size,
                calls: 0,
                beginning: 0,
            })
            .collect()
    }

    /// Makes every call fail until the group is reset.
    pub fn abort(&self, reason: &str) {
        self.0.spin_barrier.poison(reason.to_owned());
    }

    /// Returns whether a failure occurred.
    pub fn is_poisoned(&self) -> bool {
        self.0.spin_barrier.is_poisoned()
    }

    /// Resets the group after a failure. No member may be in a call.
    pub fn reset(&self) {
        self.0.spin_barrier.reset();
        self.0.beginnings.fetch_add(1, Ordering::Release);
    }
}

fn failed(Poison(reason): Poison) -> Error {
    Error::device("meta", format!("the members stopped: {reason}"))
}

/// Grows `list` to at least `len` elements. The allocation may fail.
pub(crate) fn grow<T: Clone + Default>(list: &mut Vec<T>, len: usize) -> Result<()> {
    let more = len.saturating_sub(list.len());
    list.try_reserve_exact(more)
        .map_err(|_| Error::OutOfMemory {
            device: "host".into(),
            what: "what members exchange".into(),
            asked: len * size_of::<T>(),
            free: None,
        })?;
    list.resize(len.max(list.len()), T::default());
    Ok(())
}

impl ThreadCommunicator {
    /// Publishes data, and waits until all members have done so.
    fn tell<T: Copy + Default>(
        &mut self,
        published: fn(&ThreadGroupState) -> &PublishedBuffers<T>,
        mine: &[T],
        call: Call,
    ) -> Result<usize> {
        // A member that failed has counted fewer barriers than those that waited for it.
        let beginning = self.shared.beginnings.load(Ordering::Acquire);
        if beginning != self.beginning {
            (self.beginning, self.calls) = (beginning, 0);
        }
        let turn = self.calls % 2;
        self.calls += 1;
        {
            let place = &published(&self.shared)[turn][self.rank];
            let mut place = place.write().unwrap_or_else(PoisonError::into_inner);
            grow(&mut place, mine.len())?;
            place[..mine.len()].copy_from_slice(mine);
        }
        self.shared
            .spin_barrier
            .meet(self.rank, call)
            .map_err(failed)?;
        Ok(turn)
    }

    /// Returns the data that a member published.
    fn heard<T: Copy>(
        &self,
        published: fn(&ThreadGroupState) -> &PublishedBuffers<T>,
        turn: usize,
        member: usize,
        each: impl FnOnce(&[T]),
    ) {
        let place = &published(&self.shared)[turn][member];
        each(&place.read().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<()> {
        if self.size == 1 {
            return Ok(());
        }
        let call = Call {
            what: "sum",
            count: x.len(),
        };
        let turn = self.tell(|shared| &shared.numbers, x, call)?;
        for member in 0..self.size {
            self.heard(
                |shared| &shared.numbers,
                turn,
                member,
                |theirs| match member {
                    0 => x.copy_from_slice(&theirs[..x.len()]),
                    _ => x
                        .iter_mut()
                        .zip(theirs)
                        .for_each(|(sum, value)| *sum += value),
                },
            );
        }
        Ok(())
    }

    fn all_gather(&mut self, mine: &[u8], counts: &[usize], out: &mut [u8]) -> Result<()> {
        super::check_gather(self.rank, self.size, mine, counts, out)?;
        let call = Call {
            what: "gather",
            count: out.len(),
        };
        let turn = self.tell(|shared| &shared.bytes, mine, call)?;
        let mut rest = out;
        for (member, &count) in counts.iter().enumerate() {
            let (part, behind) = rest.split_at_mut(count);
            rest = behind;
            self.heard(
                |shared| &shared.bytes,
                turn,
                member,
                |theirs| part.copy_from_slice(&theirs[..count]),
            );
        }
        Ok(())
    }

    fn broadcast(&mut self, root: usize, bytes: &mut [u8]) -> Result<()> {
        super::check_member(root, self.size)?;
        let call = Call {
            what: "broadcast",
            count: bytes.len(),
        };
        let mine: &[u8] = if self.rank == root { bytes } else { &[] };
        let turn = self.tell(|shared| &shared.bytes, mine, call)?;
        let len = bytes.len();
        self.heard(
            |shared| &shared.bytes,
            turn,
            root,
            |theirs| bytes.copy_from_slice(&theirs[..len]),
        );
        Ok(())
    }

    fn barrier(&mut self) -> Result<()> {
        let call = Call {
            what: "barrier",
            count: 0,
        };
        self.calls += 1;
        self.shared
            .spin_barrier
            .meet(self.rank, call)
            .map_err(failed)
    }

    fn abort(&self, reason: &str) {
        self.shared.spin_barrier.poison(reason.to_owned());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Runs `work` as every member.
    #[allow(clippy::unwrap_used)] // A helper of tests is a test.
    fn together<T: Send>(
        size: usize,
        spins: usize,
        work: impl Fn(&mut ThreadCommunicator) -> T + Sync,
    ) -> Vec<T> {
        let group = ThreadGroup::new(size, spins, LONG);
        std::thread::scope(|scope| {
            let members: Vec<_> = group
                .members()
                .into_iter()
                .map(|mut member| {
                    let work = &work;
                    scope.spawn(move || work(&mut member))
                })
                .collect();
            members.into_iter().map(|m| m.join().unwrap()).collect()
        })
    }

    /// One member fails before a call in which the other one waits, so they have made different
    /// numbers of calls.
    #[test]
    fn members_communicate_again_after_a_failure() {
        for before in 0..3 {
            let group = ThreadGroup::new(2, 50, LONG);
            let mut members = group.members().into_iter();
            let (mut one, mut other) = (members.next().unwrap(), members.next().unwrap());
            let both = |one: &mut ThreadCommunicator, other: &mut ThreadCommunicator, x: f32| {
                std::thread::scope(|scope| {
                    let sum = |comm: &mut ThreadCommunicator| {
                        let mut x = [x + comm.rank() as f32];
                        comm.all_reduce(&mut x).map(|()| x[0])
                    };
                    let first = scope.spawn(move || sum(one));
                    [sum(other).unwrap(), first.join().unwrap().unwrap()]
                })
            };
            for call in 0..before {
                let x = call as f32;
                assert_eq!(both(&mut one, &mut other, x), [2.0 * x + 1.0; 2]);
            }
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| one.all_reduce(&mut [1.0]));
                group.abort("it failed");
                assert!(waits.join().unwrap().is_err());
            });
            group.reset();
            for call in 10..14 {
                let x = call as f32;
                assert_eq!(
                    both(&mut one, &mut other, x),
                    [2.0 * x + 1.0; 2],
                    "{before}"
                );
            }
        }
    }

    #[test]
    fn sums_are_bit_identical_and_in_rank_order() {
        for size in 1..5 {
            for len in [0, 1, 7, 4096] {
                let value = |rank: usize, i: usize| 0.1 + rank as f32 * 1e-7 + i as f32;
                let expected: Vec<f32> = (0..len)
                    .map(|i| (1..size).fold(value(0, i), |sum, rank| sum + value(rank, i)))
                    .collect();
                let sums = together(size, 50, |comm| {
                    let rank = comm.rank();
                    let mut x: Vec<f32> = (0..len).map(|i| value(rank, i)).collect();
                    comm.all_reduce(&mut x).unwrap();
                    x
                });
                for sum in sums {
                    assert_eq!(sum, expected);
                }
            }
        }
    }

    #[test]
    fn uneven_shards_are_gathered_and_values_broadcast() {
        let counts = [3, 0, 5];
        let all = together(3, 0, |comm| {
            let mine = vec![comm.rank() as u8 + 1; counts[comm.rank()]];
            let mut out = [0; 8];
            comm.all_gather(&mine, &counts, &mut out).unwrap();
            let mut choice = [comm.rank() as u8; 2];
            comm.broadcast(2, &mut choice).unwrap();
            comm.barrier().unwrap();
            assert!(comm.all_gather(&mine, &[1, 1, 1], &mut out).is_err());
            assert!(comm.broadcast(3, &mut choice).is_err());
            (out, choice)
        });
        for (out, choice) in all {
            assert_eq!(out, [1, 1, 1, 3, 3, 3, 3, 3]);
            assert_eq!(choice, [2, 2]);
        }
    }

    #[test]
    fn buffers_are_not_reused_before_all_members_read_them() {
        const CALLS: usize = 20_000;
        let wrong: usize = together(3, 20, |comm| {
            (0..CALLS)
                .filter(|&i| {
                    let mut x = [i as f32 + comm.rank() as f32; 3];
                    comm.all_reduce(&mut x[..1 + i % 3]).unwrap();
                    x[0] != 3.0 * i as f32 + 3.0
                })
                .count()
        })
        .into_iter()
        .sum();
        assert_eq!(wrong, 0);
    }

    #[test]
    fn aborts_and_mismatched_calls_are_errors_for_all() {
        let errors = together(3, 0, |comm| match comm.rank() {
            0 => {
                comm.abort("out of memory");
                String::new()
            }
            _ => comm.barrier().unwrap_err().to_string(),
        });
        assert!(errors[1..].iter().all(|e| e.contains("out of memory")));
        let errors = together(2, 0, |comm| match comm.rank() {
            0 => comm.all_reduce(&mut [0.0; 2]).unwrap_err().to_string(),
            _ => comm.barrier().unwrap_err().to_string(),
        });
        assert!(errors.iter().all(|e| e.contains("called")), "{errors:?}");
    }
}
