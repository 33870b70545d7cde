//! Measures the limits of the machine: bytes read and operations per second.

use crate::cpu_args::PoolArgs;
use crate::failure::{CommandError, CommandResult};
use crate::shown::{counted, wrapped};
use samite::registry::{Peaks, measure_peaks};
use samite::{CancelToken, Device, DeviceLimits};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

/// Minimum gain of several threads relative to perfect scaling. Less indicates a problem.
const MIN_GAIN: f64 = 0.75;

/// Best measurements for each number of threads.
#[derive(Default)]
pub struct MachineLimits(Vec<Peaks>, Vec<(String, DeviceLimits)>);

impl MachineLimits {
    /// Measures the limits of `threads` threads, and first those of one thread for comparison.
    ///
    /// This takes seconds. On cancellation, a detached thread finishes the rest.
    pub fn measure(
        &mut self,
        threads: usize,
        pool: &PoolArgs,
        cancel: &CancelToken,
    ) -> CommandResult<Peaks> {
        if threads > 1 && self.peaks_for(1).is_none() {
            self.add(peaks(1, pool, cancel)?);
        }
        let peaks = peaks(threads, pool, cancel)?;
        self.add(peaks);
        Ok(peaks)
    }

    /// Measures the limits of a device, if it supports that.
    pub fn measure_device(&mut self, device: &dyn Device) -> CommandResult<Option<DeviceLimits>> {
        let known = self.1.iter().find(|(name, _)| name == device.name());
        if let Some((_, limits)) = known {
            return Ok(Some(*limits));
        }
        let limits = device.limits()?;
        let named = limits.map(|limits| (device.name().to_owned(), limits));
        self.1.extend(named);
        Ok(limits)
    }

    fn peaks_for(&self, threads: usize) -> Option<&Peaks> {
        self.0.iter().find(|peaks| peaks.threads == threads)
    }

    fn add(&mut self, new: Peaks) {
        match self.0.iter_mut().find(|peaks| peaks.threads == new.threads) {
            Some(peaks) => *peaks = peaks.max(new),
            None => self.0.push(new),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty() && self.1.is_empty()
    }

    /// Returns a line for each number of threads.
    pub fn lines(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, peaks| {
            let one = self.peaks_for(1).filter(|_| peaks.threads > 1);
            let _ = writeln!(text, "{}", wrapped(&line(peaks, one), 79));
            text
        }) + &self.lines_of_devices()
    }

    fn lines_of_devices(&self) -> String {
        let lines = self.1.iter().map(|(name, limits)| {
            format!(
                "limits, {name}: {:.1} GB/s reading, {:.0} GFLOP/s f32\n",
                limits.read_bytes / 1e9,
                limits.f32_operations / 1e9
            )
        });
        lines.collect()
    }

    pub fn to_json(&self) -> Value {
        let devices = self.1.iter().map(|(name, limits)| {
            json!({
                "device": name,
                "read_bytes": limits.read_bytes,
                "f32_operations": limits.f32_operations,
            })
        });
        self.0.iter().map(to_json).chain(devices).collect()
    }
}

/// Returns the line for one number of threads.
pub fn lines_of(peaks: &Peaks) -> String {
    format!("{}\n", wrapped(&line(peaks, None), 79))
}

/// Measures the limits of `threads` threads with the affinity and priority that flags set.
pub fn peaks(threads: usize, pool: &PoolArgs, cancel: &CancelToken) -> CommandResult<Peaks> {
    let (sender, receiver) = mpsc::channel();
    let place = pool.place()?;
    samite::thread_builder()
        .and_then(|thread| {
            thread.spawn(move || {
                // Threads started by this one inherit its affinity.
                place.bind_caller();
                sender.send(measure_peaks(threads))
            })
        })
        .map_err(|error| CommandError::error(format_args!("cannot start a thread: {error}")))?;
    received(&receiver, cancel)
}

fn received(receiver: &Receiver<Peaks>, cancel: &CancelToken) -> CommandResult<Peaks> {
    loop {
        cancel.check()?;
        match receiver.recv_timeout(Duration::from_millis(50)) {
            Ok(peaks) if peaks.clock_hz > 0.0 => return Ok(peaks),
            Ok(peaks) => {
                return Err(CommandError::error(format_args!(
                    "the machine's limits cannot be measured: {} threads cannot be started; use \
                     fewer with --threads",
                    peaks.threads
                )));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CommandError::error(
                    "the machine's limits cannot be measured: the thread that measures them failed",
                ));
            }
        }
    }
}

pub fn to_json(peaks: &Peaks) -> Value {
    json!({
        "threads": peaks.threads,
        "clock_hz": peaks.clock_hz,
        "read_bytes": peaks.read_bytes,
        "f32_operations": peaks.f32_operations,
        "i8_operations": peaks.i8_operations,
    })
}

/// Returns a line with the limits of some threads, and their ratio to those of `one`.
fn line(peaks: &Peaks, one: Option<&Peaks>) -> String {
    let times = |rate: fn(&Peaks) -> f64| {
        let alone = one.map(rate).filter(|&alone| alone > 0.0)?;
        Some(rate(peaks) / alone)
    };
    let beside = |times: Option<f64>| {
        times.map_or_else(String::new, |times| format!(" ({times:.2} times one's)"))
    };
    let f32_times = times(|peaks| peaks.f32_operations);
    let i8_times = times(|peaks| peaks.i8_operations.unwrap_or(0.0));
    let mut text = format!(
        "limits, {}: {:.2} GHz, {:.1} GB/s reading{}, {:.0} GFLOP/s f32{}",
        counted(peaks.threads, "thread"),
        peaks.clock_hz / 1e9,
        peaks.read_bytes / 1e9,
        beside(times(|peaks| peaks.read_bytes)),
        peaks.f32_operations / 1e9,
        beside(f32_times),
    );
    if let Some(operations) = peaks.i8_operations {
        let _ = write!(
            text,
            ", {:.0} GOP/s 8-bit{}",
            operations / 1e9,
            beside(i8_times)
        );
    }
    let least = MIN_GAIN * peaks.threads as f64;
    if i8_times.or(f32_times).is_some_and(|times| times < least) {
        text += ", threads share cores or the machine is busy";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_no_command_specific_flags() {
        let (sender, receiver) = mpsc::channel();
        drop(sender);
        match received(&receiver, &CancelToken::new()) {
            Err(CommandError::Error(message)) => assert!(!message.contains("--"), "{message}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn threads_that_share_cores_are_reported() {
        let peaks = |threads, i8_operations| Peaks {
            threads,
            clock_hz: 3e9,
            read_bytes: 2e10,
            f32_operations: 1e11,
            i8_operations,
        };
        let lines = |all: &[Peaks]| {
            let mut limits = MachineLimits::default();
            all.iter().for_each(|&peaks| limits.add(peaks));
            limits.lines()
        };
        assert_eq!(
            lines(&[peaks(1, None), peaks(1, None)]),
            "limits, 1 thread: 3.00 GHz, 20.0 GB/s reading, 100 GFLOP/s f32\n"
        );
        let found = lines(&[peaks(1, Some(1e12)), peaks(2, Some(1.9e12))]);
        let second = "limits, 2 threads: 3.00 GHz, 20.0 GB/s reading (1.00 times one's),\n    \
                      100 GFLOP/s f32 (1.00 times one's), 1900 GOP/s 8-bit (1.90 times one's)\n";
        assert!(found.ends_with(second), "{found}");
        let remark = "threads share cores or the machine is busy\n";
        assert!(lines(&[peaks(1, Some(1e12)), peaks(2, Some(1.4e12))]).ends_with(remark));
        assert!(lines(&[peaks(1, None), peaks(2, None)]).ends_with(remark));
    }
}
