//! Processors and priority of threads, and their waiting.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Iterations of a waiting loop before a thread sleeps. Some tens of microseconds.
const SPINS: usize = 2_000;

/// Polling level of [`SPINS`].
const USUAL_POLL: u8 = 50;

/// Exclusive upper limit of processor numbers.
const MAX_PROCESSORS: usize = 1024;

/// Options of the threads of a [`Pool`](crate::Pool).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Number of threads including the caller, at most [`MAX_THREADS`](crate::MAX_THREADS).
    pub threads: usize,
    /// Number of threads that can run concurrently. With more threads, waiting ones sleep at once
    /// unless `poll` is set.
    pub processors: usize,
    /// Processors to run on, or `None` for any. This includes the caller's thread, from its first
    /// job on.
    pub cpus: Option<CpuSet>,
    /// True to pin each thread to one of the processors, in order and cyclically. Callers are
    /// pinned to the first one.
    pub strict: bool,
    /// Scheduling priority of the threads.
    pub priority: Priority,
    /// Time that waiting threads spin before they sleep, 0 to 100. 0 does not spin, 50 spins for
    /// some tens of microseconds, and each 5 more double the time.
    pub poll: Option<u8>,
}

/// A set of processors, by the system's numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(BTreeSet<usize>);

impl CpuSet {
    /// Parses a hexadecimal bit mask of processors, such as `0xF0`.
    ///
    /// # Errors
    /// A description of the mistake in the text.
    pub fn parse_mask(text: &str) -> Result<Self, String> {
        let digits = text.strip_prefix("0x").or(text.strip_prefix("0X"));
        let digits = digits.unwrap_or(text);
        let mut set = BTreeSet::new();
        for (place, digit) in digits.chars().rev().enumerate() {
            let digit = digit
                .to_digit(16)
                .ok_or("must be a hexadecimal number, such as 0xF0")?;
            set.extend(
                (0..4)
                    .filter(|bit| digit >> bit & 1 == 1)
                    .map(|bit| place * 4 + bit),
            );
        }
        match set.last() {
            None => Err("must have a bit set for at least one processor, such as 0xF0".into()),
            Some(last) if *last >= MAX_PROCESSORS => {
                Err(format!("must have at most {MAX_PROCESSORS} bits"))
            }
            Some(_) => Ok(CpuSet(set)),
        }
    }

    /// Parses a range of processors: `4-7`, or `4-` and `-7` for all from or up to one.
    ///
    /// # Errors
    /// A description of the mistake in the text.
    pub fn parse_range(text: &str) -> Result<Self, String> {
        let number = |text: &str, missing| match text {
            "" => Some(missing),
            text => text.parse().ok().filter(|&cpu| cpu < MAX_PROCESSORS),
        };
        text.split_once('-')
            .filter(|ends| *ends != ("", ""))
            .and_then(|(first, last)| Some((number(first, 0)?, number(last, MAX_PROCESSORS - 1)?)))
            .filter(|(first, last)| first <= last)
            .map(|(first, last)| CpuSet((first..=last).collect()))
            .ok_or_else(|| {
                let last = MAX_PROCESSORS - 1;
                format!("must be two numbers from 0 to {last}, the smaller one first, such as 4-7")
            })
    }

    /// Returns the processors of both sets.
    #[must_use]
    pub fn with(mut self, other: &CpuSet) -> Self {
        self.0.extend(&other.0);
        self
    }

    /// Returns the processors in both sets.
    #[must_use]
    pub fn within(&self, other: &CpuSet) -> Self {
        CpuSet(self.0.intersection(&other.0).copied().collect())
    }

    /// Iterates over the numbers, in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = usize> {
        self.0.iter().copied()
    }

    /// Returns the processors that the calling thread may run on, if the system reports them.
    pub fn allowed() -> Option<Self> {
        system::allowed().map(CpuSet)
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        CpuSet(numbers.into_iter().collect())
    }
}

/// Writes numbers and ranges, such as `0, 4-7`.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = rest.next() {
            let mut last = first;
            while let Some(next) = rest.next_if_eq(&(last + 1)) {
                last = next;
            }
            if first == last {
                write!(f, "{separator}{first}")?
            } else {
                write!(f, "{separator}{first}-{last}")?
            }
            separator = ", ";
        }
        Ok(())
    }
}

/// Scheduling priority of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Below normal.
    Low,
    /// Unchanged from the start of the program.
    #[default]
    Normal,
    /// Slightly above normal.
    Medium,
    /// Above normal.
    High,
    /// Above nearly everything.
    Realtime,
}

impl Priority {
    /// Returns the priority with this level, from -1 to 3.
    pub fn from_level(level: i8) -> Option<Self> {
        Some(match level {
            -1 => Priority::Low,
            0 => Priority::Normal,
            1 => Priority::Medium,
            2 => Priority::High,
            3 => Priority::Realtime,
            _ => return None,
        })
    }

    /// Returns the system's nice value, or `None` to leave it.
    fn nice(self) -> Option<i32> {
        match self {
            Priority::Low => Some(5),
            Priority::Normal => None,
            Priority::Medium => Some(-5),
            Priority::High => Some(-10),
            Priority::Realtime => Some(-20),
        }
    }
}

/// Options that the system refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolError {
    /// Refused processors, with the reason.
    Cpus(String),
    /// Refused priority, with the reason.
    Priority(String),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::Cpus(reason) | PoolError::Priority(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for PoolError {}

/// Settings of a pool's threads.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Iterations of a waiting loop before a thread sleeps.
    pub spins: usize,
    /// Usable processors, and whether each thread is pinned to one of them.
    cpus: Option<(Vec<usize>, bool)>,
    nice: Option<i32>,
    /// Identity of the settings, by which a thread knows that it has applied them.
    id: usize,
}

thread_local! {
    /// Id of the last settings that this thread applied.
    static SETTINGS: Cell<usize> = const { Cell::new(0) };
}

impl Settings {
    /// Returns settings that only determine the spinning.
    pub fn plain(threads: usize, processors: usize) -> Self {
        Settings {
            spins: if threads <= processors { SPINS } else { 0 },
            cpus: None,
            nice: None,
            id: 0,
        }
    }

    /// Returns the settings for `options`, after trying them.
    pub fn new(options: &PoolOptions) -> Result<Self, PoolError> {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let cpus = match &options.cpus {
            None => None,
            Some(wanted) => {
                let allowed = CpuSet::allowed().ok_or_else(|| {
                    PoolError::Cpus("this system does not let a program choose processors".into())
                })?;
                let usable: Vec<_> = wanted.within(&allowed).iter().collect();
                if usable.is_empty() {
                    return Err(PoolError::Cpus(format!(
                        "none of these processors may be used; this program may use {allowed}"
                    )));
                }
                Some((usable, options.strict))
            }
        };
        let mut settings = Self::plain(options.threads, options.processors);
        settings.spins = options.poll.map_or(settings.spins, spins);
        settings.cpus = cpus;
        settings.nice = options.priority.nice();
        settings.id = NEXT.fetch_add(1, Ordering::Relaxed);
        // In a thread that ends, so that the caller does not change.
        std::thread::scope(|scope| {
            let attempt = crate::thread_builder()
                .and_then(|thread| thread.spawn_scoped(scope, || settings.apply(0)));
            // If the system cannot start a thread, workers will report it.
            attempt.map_or(Ok(()), |thread| thread.join().unwrap_or(Ok(())))
        })?;
        Ok(settings)
    }

    /// Applies the settings to the calling thread, which is worker `number`.
    fn apply(&self, number: usize) -> Result<(), PoolError> {
        match &self.cpus {
            Some((cpus, true)) => system::pin(&[cpus[number % cpus.len()]])?,
            Some((cpus, false)) => system::pin(cpus)?,
            None => {}
        }
        self.nice.map_or(Ok(()), system::prefer)
    }

    pub fn apply_to_worker(&self, number: usize) {
        if let Err(error) = self.apply(number) {
            tracing::warn!("worker thread {number}: {error}");
        }
    }

    /// Applies the settings to the calling thread, unless it has them.
    pub fn apply_to_caller(&self) {
        if (self.cpus.is_some() || self.nice.is_some()) && SETTINGS.replace(self.id) != self.id {
            self.apply_to_worker(0);
        }
    }
}

/// Returns the iterations of a waiting loop for a polling level.
fn spins(level: u8) -> usize {
    match level {
        0 => 0,
        level => {
            let doublings = (f64::from(level.min(100)) - f64::from(USUAL_POLL)) / 5.0;
            (SPINS as f64 * doublings.exp2()) as usize
        }
    }
}

#[cfg(target_os = "linux")]
mod system {
    use super::{MAX_PROCESSORS, PoolError};
    use std::collections::BTreeSet;
    use std::io::Error;

    // The set is an array of bits. Its constant counts bytes in some C libraries.
    const _: () = assert!(MAX_PROCESSORS == 8 * size_of::<libc::cpu_set_t>());

    fn empty() -> libc::cpu_set_t {
        // SAFETY: an all-zero set is a valid value.
        unsafe { std::mem::zeroed() }
    }

    pub fn allowed() -> Option<BTreeSet<usize>> {
        let mut set = empty();
        // SAFETY: the set has the stated size.
        let status = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
        if status != 0 {
            return None; // more processors than the set can hold
        }
        // SAFETY: the numbers are below the size of the set.
        let cpus = (0..MAX_PROCESSORS).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) });
        Some(cpus.collect())
    }

    /// Pins the calling thread to these processors.
    pub fn pin(cpus: &[usize]) -> Result<(), PoolError> {
        let mut set = empty();
        for &cpu in cpus {
            // SAFETY: the set has room for all numbers of a `CpuSet`, since those come from
            // `allowed`.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        // SAFETY: the set has the stated size.
        match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
            0 => Ok(()),
            _ => Err(PoolError::Cpus(format!(
                "the system refuses these processors ({})",
                Error::last_os_error()
            ))),
        }
    }

    /// Sets the nice value of the calling thread.
    pub fn prefer(nice: i32) -> Result<(), PoolError> {
        // SAFETY: the call does not touch memory. 0 means the calling thread.
        match unsafe { libc::setpriority(libc::PRIO_PROCESS as _, 0, nice) } {
            0 => Ok(()),
            _ => Err(PoolError::Priority(format!(
                "the system refuses a nice value of {nice} ({}): it needs the right to raise priorities (CAP_SYS_NICE, or `ulimit -e`)",
                Error::last_os_error()
            ))),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::PoolError;
    use std::collections::BTreeSet;

    pub fn allowed() -> Option<BTreeSet<usize>> {
        None
    }

    pub fn pin(_: &[usize]) -> Result<(), PoolError> {
        let reason = "this system does not let a program choose processors";
        Err(PoolError::Cpus(reason.into()))
    }

    pub fn prefer(_: i32) -> Result<(), PoolError> {
        let reason = "this system has no priorities of single threads";
        Err(PoolError::Priority(reason.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_masks_and_ranges_are_parsed() {
        let mask = |text: &str| CpuSet::parse_mask(text).map(|set| set.to_string());
        assert_eq!(mask("0xF1"), Ok("0, 4-7".into()));
        assert_eq!(mask("3"), Ok("0-1".into()));
        assert_eq!(mask(&format!("8{}", "0".repeat(255))), Ok("1023".into()));
        for wrong in ["", "0x", "0", "0xG", "-1", &format!("1{}", "0".repeat(256))] {
            assert!(mask(wrong).is_err(), "{wrong}");
        }
        let range = |text: &str| CpuSet::parse_range(text).map(|set| set.to_string());
        assert_eq!(range("2-5"), Ok("2-5".into()));
        assert_eq!(range("3-3"), Ok("3".into()));
        assert_eq!(range("-2"), Ok("0-2".into()));
        assert_eq!(range("1000-"), Ok("1000-1023".into()));
        for wrong in ["", "-", "4", "5-4", "0-1024", "a-b", "1-2-3"] {
            let message = range(wrong).unwrap_err();
            assert!(message.contains("from 0 to 1023"), "{wrong}: {message}");
        }
        let both = CpuSet::parse_mask("1").unwrap();
        let both = both.with(&CpuSet::parse_range("2-3").unwrap());
        assert_eq!(both.to_string(), "0, 2-3");
    }

    #[test]
    fn polling_levels_map_to_spin_counts() {
        assert_eq!(spins(0), 0);
        assert_eq!(spins(50), SPINS);
        assert_eq!(spins(55), 2 * SPINS);
        assert_eq!(spins(100), 1024 * SPINS);
        assert!(spins(1) > 0 && spins(1) < 3);
        let options = PoolOptions {
            threads: 4,
            processors: 1,
            ..PoolOptions::default()
        };
        let spins = |poll| {
            Settings::new(&PoolOptions {
                poll,
                ..options.clone()
            })
            .unwrap()
            .spins
        };
        assert_eq!([None, Some(50)].map(spins), [0, SPINS]);
    }

    #[cfg(target_os = "linux")]
    mod on_linux {
        use super::*;
        use crate::{Pool, Team};
        use std::sync::Mutex;

        /// Returns the allowed processors and the nice value of each worker. Runs in another
        /// thread, because that may be pinned.
        fn seen(options: PoolOptions) -> Vec<(String, i32)> {
            std::thread::spawn(move || {
                let threads = options.threads;
                let pool = Pool::with_options(&options).unwrap();
                let seen = Mutex::new(vec![(String::new(), 0); threads]);
                pool.run(&|worker, _: &Team| {
                    let cpus = CpuSet::allowed().unwrap().to_string();
                    // SAFETY: the call does not touch memory.
                    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS as _, 0) };
                    seen.lock().unwrap()[worker] = (cpus, nice);
                })
                .unwrap();
                seen.into_inner().unwrap()
            })
            .join()
            .unwrap()
        }

        #[test]
        fn threads_are_pinned_as_configured() {
            let allowed = CpuSet::allowed().unwrap();
            let last = allowed.iter().last().unwrap();
            let cpus = CpuSet::from_iter([last]);
            let options = PoolOptions {
                threads: 3,
                cpus: Some(cpus.clone()),
                ..PoolOptions::default()
            };
            for (place, _) in seen(options) {
                assert_eq!(place, cpus.to_string());
            }
            // Each thread is pinned to one processor, including the caller's, cyclically.
            let numbers: Vec<_> = allowed.iter().collect();
            let options = PoolOptions {
                threads: numbers.len() + 1,
                cpus: Some(CpuSet::parse_range("0-").unwrap()),
                strict: true,
                ..PoolOptions::default()
            };
            for (worker, (place, _)) in seen(options).into_iter().enumerate() {
                assert_eq!(place, numbers[worker % numbers.len()].to_string());
            }
            // Creating a pool does not pin the caller.
            assert_eq!(CpuSet::allowed().unwrap(), allowed);
        }

        #[test]
        fn missing_processors_are_an_error() {
            let missing = (0..MAX_PROCESSORS)
                .rev()
                .find(|&cpu| !CpuSet::allowed().unwrap().iter().any(|known| known == cpu));
            let Some(missing) = missing else { return };
            let result = Pool::with_options(&PoolOptions {
                threads: 2,
                cpus: Some(CpuSet::from_iter([missing])),
                ..PoolOptions::default()
            });
            let Err(PoolError::Cpus(reason)) = result else {
                panic!("processor {missing} was accepted");
            };
            let allowed = CpuSet::allowed().unwrap().to_string();
            assert!(reason.ends_with(&format!("may use {allowed}")), "{reason}");
        }

        #[test]
        fn priorities_are_set_or_refused() {
            let options = |priority| PoolOptions {
                threads: 2,
                priority,
                ..PoolOptions::default()
            };
            let nices: Vec<_> = seen(options(Priority::Low)).iter().map(|s| s.1).collect();
            assert_eq!(nices, [5, 5]);
            match Pool::with_options(&options(Priority::High)) {
                Ok(_) => assert_eq!(seen(options(Priority::High))[1].1, -10),
                Err(PoolError::Priority(reason)) => assert!(reason.contains("CAP_SYS_NICE")),
                Err(other) => panic!("{other}"),
            }
        }
    }
}
