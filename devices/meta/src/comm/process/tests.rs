#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use super::*;
use crate::comm::ThreadGroup;
use crate::comm::played::Played;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A clock that advances only by sleeping.
#[derive(Debug)]
struct Slept {
    start: Instant,
    micros: AtomicU64,
}

impl Clock for Slept {
    fn now(&self) -> Instant {
        self.start + Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    fn sleep(&self, time: Duration) {
        self.micros
            .fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }
}

/// Behaviour of the other processes of a [`Scripted`] transport in a round.
#[derive(Clone, Copy, PartialEq)]
enum Others {
    /// They send the same as this process.
    Same,
    /// They send the same, at this time.
    At(Duration),
    /// Nothing arrives.
    Lost,
    /// One sends the same, and the last one is known to wait as well.
    LostOne,
    /// The connection reports that they are gone.
    Killed,
    /// They make another call.
    Elsewhere,
    /// They cannot continue.
    Failing,
}

/// This process's end of a connection to two others, whose behaviour a script defines round by
/// round.
struct Scripted {
    script: Vec<Others>,
    clock: Arc<Slept>,
    round: usize,
    gathered: Vec<u8>,
    began: Arc<AtomicU64>,
    /// Sum of the times of calls.
    called: Arc<AtomicU64>,
}

impl Transport for Scripted {
    fn name(&self) -> String {
        "scripted".to_owned()
    }

    fn rank(&self) -> usize {
        1
    }

    fn size(&self) -> usize {
        3
    }

    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()> {
        self.began.fetch_add(1, Ordering::Relaxed);
        self.gathered.clear();
        let script = self.script[self.round];
        for (rank, &len) in lens.iter().enumerate() {
            let mut part = [head, body].concat();
            if rank != 1 {
                match script {
                    Others::Elsewhere => part[..8].copy_from_slice(&77_u64.to_le_bytes()),
                    Others::Failing if part[8] == Kind::Status as u8 && rank == 2 => {
                        part[8] = Kind::Failure as u8;
                        part[16..24].copy_from_slice(&7_u64.to_le_bytes());
                    }
                    Others::Failing if rank == 2 => part.extend(b"no disk"),
                    _ => {}
                }
                part.resize(len, 0);
            }
            self.gathered.extend(part);
        }
        self.round += 1;
        Ok(())
    }

    fn test(&mut self) -> Result<bool> {
        match self.script[self.round - 1] {
            Others::Same | Others::Elsewhere | Others::Failing => Ok(true),
            Others::At(time) => {
                Ok(self.clock.micros.load(Ordering::Relaxed) >= time.as_micros() as u64)
            }
            Others::Lost | Others::LostOne => Ok(false),
            Others::Killed => Err(Error::device("mpi", "the connection broke")),
        }
    }

    fn call_out(&mut self) {
        let micros = self.clock.micros.load(Ordering::Relaxed);
        self.called.fetch_add(micros, Ordering::Relaxed);
    }

    fn missing(&mut self) -> Vec<usize> {
        match self.script[self.round - 1] {
            Others::Lost => vec![0, 2],
            _ => vec![0],
        }
    }

    fn gathered(&self) -> &[u8] {
        &self.gathered
    }

    fn finish(&mut self) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self, _: i32) {}
}

const DEADLINE: Duration = Duration::from_secs(3);

/// Returns a group with two scripted members, its clock, and the number of rounds started.
fn scripted(script: &[Others]) -> (ProcessGroup, Arc<Slept>, Arc<AtomicU64>) {
    let clock = Arc::new(Slept {
        start: Instant::now(),
        micros: AtomicU64::new(0),
    });
    let began = Arc::new(AtomicU64::new(0));
    let transport = Scripted {
        script: script.to_vec(),
        clock: Arc::clone(&clock),
        round: 0,
        gathered: Vec::new(),
        began: Arc::clone(&began),
        called: Arc::default(),
    };
    let options = ProcessOptions {
        deadline: DEADLINE,
        clock: Arc::clone(&clock) as _,
        ..ProcessOptions::default()
    };
    (
        ProcessGroup::new(Box::new(transport), options),
        clock,
        began,
    )
}

/// Checks that every call of a poisoned group fails at once with the same reason, and sends
/// nothing.
fn is_dead(group: &ProcessGroup, began: &AtomicU64, reason: &str) {
    let before = began.load(Ordering::Relaxed);
    let mut comm = group.communicator();
    let mut one = [0; 1];
    let errors = [
        comm.all_reduce(&mut [1.0]).unwrap_err(),
        comm.all_gather(&[1], &[1; 3], &mut [0; 3]).unwrap_err(),
        comm.broadcast(0, &mut one).unwrap_err(),
        comm.barrier().unwrap_err(),
        group.agree("number", 1).unwrap_err(),
        group.tell(&[]).unwrap_err(),
        group.wait_for_all(DEADLINE).unwrap_err(),
        group.finish().unwrap_err(),
    ];
    group.fail("again");
    for error in errors {
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    assert!(group.is_poisoned() && group.ended().is_none());
    assert_eq!(began.load(Ordering::Relaxed), before);
}

#[test]
fn slow_peers_within_the_deadline_are_awaited() {
    let late = Others::At(DEADLINE - Duration::from_millis(1));
    let (group, clock, _) = scripted(&[late, Others::Same, Others::Same]);
    let mut x = [1.5, -2.0];
    group.communicator().all_reduce(&mut x).unwrap();
    assert_eq!(x, [4.5, -6.0]);
    assert!(clock.micros.load(Ordering::Relaxed) >= 2_999_000);
    group.agree("number", 5).unwrap();
    group.finish().unwrap();
}

#[test]
fn missing_peers_are_lost_exactly_at_the_deadline() {
    let calls: [fn(&ProcessGroup) -> Result<()>; 5] = [
        |group| group.communicator().all_reduce(&mut [1.0; 4]),
        |group| group.communicator().all_gather(&[1], &[1; 3], &mut [0; 3]),
        |group| group.communicator().broadcast(0, &mut [0; 4]),
        |group| group.communicator().barrier(),
        |group| group.tell(&[1]).map(drop),
    ];
    for call in calls {
        let (group, clock, began) = scripted(&[Others::Same, Others::Same, Others::Lost]);
        group.agree("number", 5).unwrap();
        group.agree("number", 5).unwrap();
        let error = call(&group).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
        let waited = Duration::from_micros(clock.micros.load(Ordering::Relaxed));
        assert!(
            (DEADLINE..DEADLINE + 2 * PAUSE).contains(&waited),
            "{waited:?}"
        );
        is_dead(&group, &began, "did not come to");
    }
}

#[test]
fn timeouts_name_the_missing_peers_known_so_far() {
    for (others, who) in [
        (
            Others::Lost,
            "meta: device lost: ranks 0, 2 did not come to sum number 1",
        ),
        (
            Others::LostOne,
            "meta: device lost: rank 0 did not come to sum number 1",
        ),
    ] {
        let (mut group, clock, _) = scripted(&[others]);
        let called = Arc::new(AtomicU64::new(0));
        let state = Arc::get_mut(&mut group.0).unwrap().state.get_mut().unwrap();
        state.transport = Box::new(Scripted {
            script: vec![others],
            clock,
            round: 0,
            gathered: Vec::new(),
            began: Arc::default(),
            called: Arc::clone(&called),
        });
        let error = group.communicator().all_reduce(&mut [1.0]).unwrap_err();
        assert!(error.to_string().starts_with(who), "{error}");
        // Once, early enough for the others to receive it.
        let called = Duration::from_micros(called.load(Ordering::Relaxed));
        let early = DEADLINE / CALLING;
        assert!((early..early + 2 * PAUSE).contains(&called), "{called:?}");
    }
}

#[test]
fn a_custom_deadline_applies_to_one_call() {
    let (group, clock, _) = scripted(&[Others::At(4 * DEADLINE), Others::Lost]);
    group.wait_for_all(5 * DEADLINE).unwrap();
    assert!(group.wait_for_all(DEADLINE / 2).is_err());
    let waited = Duration::from_micros(clock.micros.load(Ordering::Relaxed));
    assert!(waited < 5 * DEADLINE, "{waited:?}");
}

#[test]
fn broken_connections_and_mismatched_calls_poison_the_group() {
    let (group, clock, began) = scripted(&[Others::Killed]);
    let error = group.communicator().barrier().unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    is_dead(&group, &began, "the connection broke");
    assert_eq!(clock.micros.load(Ordering::Relaxed), 0, "nobody waits");
    let (group, _, began) = scripted(&[Others::Elsewhere]);
    group.communicator().all_reduce(&mut [1.0]).unwrap_err();
    is_dead(&group, &began, "rank 0 is at sum number 77");
    let (group, _, began) = scripted(&[]);
    group.abort("out of memory");
    is_dead(&group, &began, "out of memory");
}

#[test]
fn a_cancelled_process_does_not_wait() {
    let (mut group, clock, began) = scripted(&[Others::Lost]);
    let cancel = CancelToken::new();
    Arc::get_mut(&mut group.0).unwrap().options.cancel = cancel.clone();
    cancel.cancel();
    let error = group.communicator().barrier().unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
    assert_eq!(clock.micros.load(Ordering::Relaxed), 0);
    is_dead(&group, &began, "cancelled");
}

#[test]
fn a_failure_reported_by_one_peer_ends_all() {
    let (group, _, _) = scripted(&[Others::Failing, Others::Failing]);
    let error = group.agree("number", 1).unwrap_err();
    assert_eq!(error.to_string(), "meta: rank 2: no disk");
    assert_eq!(group.ended().as_deref(), Some("rank 2: no disk"));
    assert!(!group.is_poisoned());
    assert_eq!(group.tell(&[]).unwrap_err().to_string(), error.to_string());
    group.finish().unwrap();
}

/// Runs `work` as every member.
fn together<T: Send>(size: usize, work: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let members: Vec<_> = Played::all(size)
            .into_iter()
            .map(|end| {
                let work = &work;
                let group = ProcessGroup::new(Box::new(end), ProcessOptions::default());
                scope.spawn(move || work(&group))
            })
            .collect();
        members.into_iter().map(|m| m.join().unwrap()).collect()
    })
}

#[test]
fn processes_exchange_the_same_bits_as_threads() {
    for size in 1..5 {
        for len in [0, 1, 7, 4096, PIECE + 3] {
            let value = |rank: usize, i: usize| (0.1 + i as f32) * (1.0 - rank as f32 * 0.37);
            let numbers = |rank| (0..len).map(|i| value(rank, i)).collect::<Vec<f32>>();
            let counts: Vec<usize> = (0..size).map(|rank| rank * len % 1000).collect();
            let total = counts.iter().sum();
            let work = |comm: &mut dyn Communicator| {
                let rank = comm.rank();
                let mut sum = numbers(rank);
                comm.all_reduce(&mut sum).unwrap();
                let mut all = vec![0; total];
                comm.all_gather(&vec![rank as u8; counts[rank]], &counts, &mut all)
                    .unwrap();
                let mut choice = vec![rank as u8; len.min(1000)];
                comm.broadcast(size - 1, &mut choice).unwrap();
                comm.barrier().unwrap();
                assert!(comm.broadcast(size, &mut choice).is_err());
                assert!(comm.all_gather(&[1], &counts[1..], &mut all).is_err());
                (sum, all, choice)
            };
            let group = ThreadGroup::new(size, 50, Duration::from_secs(60));
            let threads: Vec<_> = std::thread::scope(|scope| {
                let members: Vec<_> = group
                    .members()
                    .into_iter()
                    .map(|mut comm| scope.spawn(move || work(&mut comm)))
                    .collect();
                members.into_iter().map(|m| m.join().unwrap()).collect()
            });
            let processes = together(size, |group| work(&mut group.communicator()));
            assert!(processes == threads, "{size} {len}");
        }
    }
}

#[test]
fn disagreements_give_every_process_the_same_error() {
    let said = together(3, |group| {
        group.agree("model", 7).unwrap();
        assert_eq!(
            group.tell(&vec![3; group.rank()]).unwrap(),
            [vec![], vec![3], vec![3, 3]]
        );
        assert_eq!(group.of_first(10 + group.rank() as u64).unwrap(), 10);
        let error = group.agree("model", (group.rank() / 2) as u64).unwrap_err();
        group.finish().unwrap();
        error.to_string()
    });
    for error in said {
        assert!(
            error.contains("rank 2 has another model than rank 0"),
            "{error}"
        );
    }
}

#[test]
fn failures_reach_peers_in_any_call() {
    let said = together(3, |group| {
        match group.rank() {
            0 => drop(group.agree("model", 7)),
            1 => group.fail("model.gguf: no such file"),
            _ => drop(group.tell(b"something").unwrap_err()),
        }
        let ended = group.ended().unwrap();
        group.finish().unwrap();
        ended
    });
    assert_eq!(said, ["rank 1: model.gguf: no such file"; 3]);
    let said = together(2, |group| {
        group.fail("wrong flag");
        group.ended().unwrap()
    });
    assert_eq!(
        said, ["wrong flag"; 2],
        "what is wrong with all names nobody"
    );
}
