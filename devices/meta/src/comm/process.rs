//! A group of processes, with one member per process.
//!
//! All members make the same calls in the same order. A call is a round: the data of each member
//! goes to all, after a header that identifies the call. A waiting member polls the [`Transport`],
//! first in a loop, then with pauses, until a deadline. After a failure that other members may not
//! know of, the group is *poisoned*: every later call fails at once. A group cannot recover from
//! that, because the round in flight cannot be undone; the processes must restart.
//!
//! Before the work begins, members compare values that must be equal
//! ([`agree`](ProcessGroup::agree)) and report failures ([`fail`](ProcessGroup::fail)). A failure
//! that all know of *ends* the group: all get the same error.

use super::{Communicator, Transport};
use crate::device::MAX_MEMBERS;
use samite_core::environment::{Clock, SystemClock};
use samite_core::{CancelToken, Error, Result};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Wait options of a group of processes.
#[derive(Clone, Debug)]
pub struct ProcessOptions {
    /// Time that members wait for each other before they report a failure.
    pub deadline: Duration,
    /// Cancels a wait.
    pub cancel: CancelToken,
    /// Source of time.
    pub clock: Arc<dyn Clock>,
}

impl Default for ProcessOptions {
    fn default() -> Self {
        ProcessOptions {
            deadline: Duration::from_secs(30),
            cancel: CancelToken::new(),
            clock: Arc::new(SystemClock),
        }
    }
}

/// Time that a waiting process spins.
const SPINNING: Duration = Duration::from_micros(50);
/// Time that it then yields the processor before it sleeps. Members differ in how long prefill
/// takes, and waking up takes as long as an exchange.
const YIELDING: Duration = Duration::from_millis(5);
/// Maximum number of polls before it sleeps, whatever the clock says.
const QUESTIONS: usize = 100_000;
/// Duration of a sleep.
const PAUSE: Duration = Duration::from_micros(50);

/// Inverse of the part of the deadline after which a waiting member announces that it waits. At the
/// deadline, the others then know which member is missing.
const CALLING: u32 = 4;

/// Maximum number of elements in one round of a sum, so that the gathered data stays small.
const PIECE: usize = 1 << 18;

/// Purpose of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The member can continue. Carries a number for the others.
    Status,
    /// The member cannot continue. Carries the length of the reason.
    Failure,
    /// Messages of all members.
    Telling,
    Sum,
    Gather,
    Broadcast,
}

const KINDS: [Kind; 6] = [
    Kind::Status,
    Kind::Failure,
    Kind::Telling,
    Kind::Sum,
    Kind::Gather,
    Kind::Broadcast,
];

/// Header of a message: the number of the call, its kind, and the size of the exchange or another
/// number.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Head {
    call: u64,
    kind: Kind,
    number: u64,
}

impl Head {
    const BYTES: usize = 24;

    fn to_bytes(self) -> [u8; Head::BYTES] {
        let mut bytes = [0; Head::BYTES];
        let words = [self.call, self.kind as u64, self.number];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [call, kind, number] = <[[u8; 8]; 3]>::try_from(words)
            .ok()?
            .map(u64::from_le_bytes);
        let kind = *KINDS.get(usize::try_from(kind).ok()?)?;
        Some(Head { call, kind, number })
    }

    /// Returns whether two members are in the same round.
    fn fits(self, other: Head) -> bool {
        let is_status = |kind| matches!(kind, Kind::Status | Kind::Failure);
        self.call == other.call && (self == other || is_status(self.kind) && is_status(other.kind))
    }
}

impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Status | Kind::Failure | Kind::Telling => {
                write!(f, "meeting number {}", self.call)
            }
            Kind::Sum => write!(f, "sum number {} of {} bytes", self.call, self.number),
            Kind::Gather => write!(f, "gather number {} of {} bytes", self.call, self.number),
            Kind::Broadcast => write!(f, "broadcast number {} of {} bytes", self.call, self.number),
        }
    }
}

enum Health {
    Good,
    /// All members know of a failure, which is this one.
    Ended(String),
    /// A failure occurred that other members may not know of.
    Poisoned(String),
}

struct RoundState {
    transport: Box<dyn Transport>,
    /// Number of rounds so far.
    calls: u64,
    health: Health,
    /// Bytes of a round, by member. Reused to avoid allocations in a steady state.
    lens: Vec<usize>,
}

struct ProcessEndpoint {
    name: String,
    rank: usize,
    size: usize,
    options: ProcessOptions,
    state: Mutex<RoundState>,
}

/// This process's end of a group of processes.
#[derive(Clone)]
pub struct ProcessGroup(Arc<ProcessEndpoint>);

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.0.name)
            .field("rank", &self.0.rank)
            .field("size", &self.0.size)
            .finish_non_exhaustive()
    }
}

fn lost(message: impl Into<Box<str>>) -> Error {
    Error::DeviceLost {
        device: "meta".into(),
        message: message.into(),
    }
}

impl RoundState {
    fn check(&self) -> Result<()> {
        match &self.health {
            Health::Good => Ok(()),
            Health::Ended(reason) => Err(Error::device("meta", reason.as_str())),
            Health::Poisoned(reason) => Err(lost(reason.as_str())),
        }
    }

    fn poison(&mut self, reason: impl Into<String>) {
        if matches!(self.health, Health::Good) {
            self.health = Health::Poisoned(reason.into());
        }
    }

    /// Returns the message of each member in the last round: its header and the rest.
    fn parts(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut rest = self.transport.gathered();
        self.lens.iter().map(move |&len| {
            let (part, behind) = rest.split_at(len.min(rest.len()));
            rest = behind;
            part.split_at(Head::BYTES.min(part.len()))
        })
    }
}

impl ProcessGroup {
    /// Creates a group of all processes that a transport connects.
    pub fn new(transport: Box<dyn Transport>, options: ProcessOptions) -> Self {
        ProcessGroup(Arc::new(ProcessEndpoint {
            name: transport.name(),
            rank: transport.rank(),
            size: transport.size(),
            options,
            state: Mutex::new(RoundState {
                transport,
                calls: 0,
                health: Health::Good,
                lens: Vec::new(),
            }),
        }))
    }

    /// Returns the transport, if this is the last use of the group.
    pub fn into_transport(self) -> Option<Box<dyn Transport>> {
        let state = Arc::into_inner(self.0)?.state.into_inner();
        Some(state.unwrap_or_else(PoisonError::into_inner).transport)
    }

    /// Returns the name of the transport.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the number of processes.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Returns the time that members wait for each other.
    pub fn deadline(&self) -> Duration {
        self.0.options.deadline
    }

    /// Returns the failure that all processes know of, if there was one.
    pub fn ended(&self) -> Option<String> {
        match &self.lock().health {
            Health::Ended(reason) => Some(reason.clone()),
            Health::Good | Health::Poisoned(_) => None,
        }
    }

    /// Returns whether a failure occurred that other processes may not know of.
    pub fn is_poisoned(&self) -> bool {
        matches!(self.lock().health, Health::Poisoned(_))
    }

    /// Makes every later call fail: this process cannot continue. The others notice at their
    /// deadline.
    pub fn abort(&self, reason: &str) {
        self.lock().poison(reason);
    }

    /// Ends all processes including this one, if the transport can.
    pub fn abort_all(&self, exit_code: i32) {
        let mut state = self.lock();
        state.poison("this process ended the others");
        state.transport.abort(exit_code);
    }

    /// Leaves the group together with all others. No call is possible afterwards.
    ///
    /// # Errors
    /// Returns an error if a member does not arrive, or if an earlier failure is not known to all.
    pub fn finish(&self) -> Result<()> {
        let state = &mut *self.lock();
        if let Health::Good = state.health {
            self.status(state, Ok(0), self.deadline())?;
        }
        if let Health::Poisoned(_) = state.health {
            return state.check();
        }
        state.transport.finish()?;
        state.health = Health::Poisoned("the group is finished".to_owned());
        Ok(())
    }

    /// Waits for all members, at most for `within`.
    ///
    /// # Errors
    /// Returns an error if a member cannot continue or does not arrive.
    pub fn wait_for_all(&self, within: Duration) -> Result<()> {
        self.status(&mut self.lock(), Ok(0), within).map(drop)
    }

    /// Reports in the next comparison or message round that this process cannot continue. All
    /// members then get the same error. Does nothing if all know of a failure already.
    pub fn fail(&self, reason: &str) {
        let state = &mut *self.lock();
        if let Health::Good = state.health {
            // The result is the failure that all know of.
            let _ = self.status(state, Err(reason), self.deadline());
        }
    }

    /// Compares a number that must be the same on all members. `what` names its meaning.
    ///
    /// # Errors
    /// Returns the same error on all members if the numbers differ. Also fails if a member cannot
    /// continue or does not arrive.
    pub fn agree(&self, what: &str, number: u64) -> Result<()> {
        let state = &mut *self.lock();
        let numbers = self.status(state, Ok(number), self.deadline())?;
        let Some(other) = numbers.iter().position(|&theirs| theirs != numbers[0]) else {
            return Ok(());
        };
        state.health = Health::Ended(format!(
            "rank {other} has another {what} than rank 0: start all with the same model file, flags and version of samite"
        ));
        state.check()
    }

    /// Returns the number of the first process.
    ///
    /// # Errors
    /// Returns an error if a member cannot continue or does not arrive.
    pub fn of_first(&self, mine: u64) -> Result<u64> {
        let numbers = self.status(&mut self.lock(), Ok(mine), self.deadline())?;
        Ok(numbers[0])
    }

    /// Sends a message to all members and returns the messages of all.
    ///
    /// # Errors
    /// Returns an error if a member cannot continue or does not arrive.
    pub fn tell(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let state = &mut *self.lock();
        let lens = self.status(state, Ok(mine.len() as u64), self.deadline())?;
        let lens: Vec<usize> = lens.iter().map(|&len| len as usize).collect();
        let call = (Kind::Telling, 0);
        self.round(state, call, mine, &lens, self.deadline())?;
        Ok(state.parts().map(|(_, told)| told.to_vec()).collect())
    }

    /// Returns this process's end for collective operations.
    pub(crate) fn communicator(&self) -> ProcessCommunicator {
        ProcessCommunicator(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, RoundState> {
        // A panic leaves a call unfinished, which the next call notices.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Exchanges the status of all members. If one cannot continue, it sends the reason and all get
    /// that error.
    fn status(
        &self,
        state: &mut RoundState,
        mine: std::result::Result<u64, &str>,
        within: Duration,
    ) -> Result<Vec<u64>> {
        let (kind, number, reason) = match mine {
            Ok(number) => (Kind::Status, number, ""),
            Err(reason) => (Kind::Failure, reason.len() as u64, reason),
        };
        let nothing = vec![0; self.size()];
        self.round(state, (kind, number), &[], &nothing, within)?;
        let heads = state.parts().filter_map(|(head, _)| Head::from_bytes(head));
        let heads: Vec<Head> = heads.collect();
        if heads.iter().all(|head| head.kind == Kind::Status) {
            return Ok(heads.iter().map(|head| head.number).collect());
        }
        let len = |head: &Head| match head.kind {
            Kind::Failure => head.number as usize,
            _ => 0,
        };
        let lens: Vec<usize> = heads.iter().map(len).collect();
        let call = (Kind::Telling, 0);
        self.round(state, call, reason.as_bytes(), &lens, self.deadline())?;
        let mut reasons = state
            .parts()
            .zip(&heads)
            .enumerate()
            .filter(|(_, (_, head))| head.kind == Kind::Failure)
            .map(|(rank, ((_, reason), _))| (rank, String::from_utf8_lossy(reason).into_owned()));
        let (rank, first) = reasons.next().unwrap_or_default();
        let same = reasons.filter(|(_, reason)| *reason == first).count() + 1;
        // A failure common to all members needs no rank.
        state.health = Health::Ended(if same == self.size() {
            first
        } else {
            format!("rank {rank}: {first}")
        });
        state.check().map(|()| Vec::new())
    }

    /// Performs one round. Afterwards, [`parts`](RoundState::parts) returns the messages of all.
    fn round(
        &self,
        state: &mut RoundState,
        (kind, number): (Kind, u64),
        mine: &[u8],
        lens: &[usize],
        within: Duration,
    ) -> Result<()> {
        state.check()?;
        state.calls += 1;
        let head = Head {
            call: state.calls,
            kind,
            number,
        };
        state.lens.clear();
        state.lens.extend(lens.iter().map(|len| Head::BYTES + len));
        let result = state
            .transport
            .begin(&head.to_bytes(), mine, &state.lens)
            .and_then(|()| self.wait(state, head, within))
            .and_then(|()| Self::compare(state, head));
        result.inspect_err(|error| {
            let reason = match error {
                Error::DeviceLost { message, .. } => message.to_string(),
                error => error.to_string(),
            };
            state.poison(reason);
        })
    }

    /// Waits until the round is complete.
    fn wait(&self, state: &mut RoundState, head: Head, within: Duration) -> Result<()> {
        let ProcessOptions { cancel, clock, .. } = &self.0.options;
        let start = clock.now();
        let mut has_called = false;
        for turn in 0_usize.. {
            let is_done = state.transport.test().map_err(|error| match error {
                Error::Device { message, .. } => lost(message),
                error => error,
            })?;
            if is_done {
                return Ok(());
            }
            cancel.check()?;
            let waited = clock.now().saturating_duration_since(start);
            if waited > within {
                break;
            }
            if waited > within / CALLING && !has_called {
                has_called = true;
                state.transport.call_out();
            }
            match () {
                () if waited > YIELDING || turn > QUESTIONS => clock.sleep(PAUSE),
                () if waited > SPINNING => std::thread::yield_now(),
                () => std::hint::spin_loop(),
            }
        }
        let missing = state.transport.missing();
        let who = match &missing[..] {
            [] => "another process".to_owned(),
            [rank] => format!("rank {rank}"),
            ranks => {
                let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
                format!("ranks {}", ranks.join(", "))
            }
        };
        Err(lost(format!(
            "{who} did not come to {head} within {} s: it ended, or is much slower",
            within.as_secs_f32()
        )))
    }

    /// Checks that all made the same call.
    fn compare(state: &RoundState, mine: Head) -> Result<()> {
        for (rank, (head, _)) in state.parts().enumerate() {
            match Head::from_bytes(head) {
                Some(theirs) if theirs.fits(mine) => {}
                Some(theirs) => {
                    let message = format!("rank {rank} is at {theirs}, and this process at {mine}");
                    return Err(lost(message));
                }
                None => return Err(lost(format!("rank {rank} sent something else than {mine}"))),
            }
        }
        Ok(())
    }
}

/// One process's end of a group, for collective operations.
pub(crate) struct ProcessCommunicator(ProcessGroup);

impl ProcessCommunicator {
    fn round(&self, state: &mut RoundState, kind: Kind, mine: &[u8], lens: &[usize]) -> Result<()> {
        let number = lens.iter().sum::<usize>() as u64;
        let within = self.0.deadline();
        self.0.round(state, (kind, number), mine, lens, within)
    }
}

impl Communicator for ProcessCommunicator {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<()> {
        let state = &mut *self.0.lock();
        for piece in x.chunks_mut(PIECE) {
            let lens = [size_of_val(piece); MAX_MEMBERS];
            let lens = &lens[..self.0.size()];
            self.round(state, Kind::Sum, bytemuck::cast_slice(piece), lens)?;
            for (rank, (_, theirs)) in state.parts().enumerate() {
                let (theirs, _) = theirs.as_chunks::<4>();
                let theirs = theirs.iter().map(|bytes| f32::from_ne_bytes(*bytes));
                let both = piece.iter_mut().zip(theirs);
                match rank {
                    0 => both.for_each(|(sum, value)| *sum = value),
                    _ => both.for_each(|(sum, value)| *sum += value),
                }
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, mine: &[u8], counts: &[usize], out: &mut [u8]) -> Result<()> {
        super::check_gather(self.rank(), self.size(), mine, counts, out)?;
        let state = &mut *self.0.lock();
        self.round(state, Kind::Gather, mine, counts)?;
        let mut rest = out;
        for (_, theirs) in state.parts() {
            let (part, behind) = rest.split_at_mut(theirs.len());
            part.copy_from_slice(theirs);
            rest = behind;
        }
        Ok(())
    }

    fn broadcast(&mut self, root: usize, bytes: &mut [u8]) -> Result<()> {
        super::check_member(root, self.size())?;
        let state = &mut *self.0.lock();
        let mut lens = [0; MAX_MEMBERS];
        lens[root] = bytes.len();
        let lens = &lens[..self.0.size()];
        let mine: &[u8] = if self.rank() == root { bytes } else { &[] };
        self.round(state, Kind::Broadcast, mine, lens)?;
        if let Some((_, theirs)) = state.parts().nth(root) {
            bytes.copy_from_slice(theirs);
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<()> {
        self.0.wait_for_all(self.0.deadline())
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
