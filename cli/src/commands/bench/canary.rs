//! Canaries: fixed pieces of work and system counters, which show whether the machine stayed the
//! same during a measurement.

use samite::registry::Probe;

/// Maximum change of the clock between the samples of a pair.
const MAX_DRIFT: f64 = 0.03;
/// Maximum change of the read rate. Memory is shared with other machines on the host, so the rate
/// changes by a fifth from one second to the next.
const MAX_READ_DRIFT: f64 = 0.25;
/// Maximum share of the time that the host may withhold from this machine.
const MAX_STOLEN: f64 = 0.01;
/// Maximum number of processors that other programs may use meanwhile.
const MAX_FOREIGN: f64 = 0.05;

/// Speed of the machine at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Cycles per second.
    pub clock_hz: f64,
    /// Bytes that one thread reads from memory per second.
    pub read_bytes: f64,
}

impl Reading {
    /// Measures the speed: the best of several tries, about a tenth of a second in total.
    pub fn new(probe: &Probe) -> Self {
        Reading {
            clock_hz: probe.clock_hz(),
            read_bytes: probe.read_bytes(),
        }
    }
}

/// CPU time in seconds since the start of the machine or the process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuTimes {
    /// Work of all processes.
    pub busy: f64,
    /// Time withheld by the host.
    pub stolen: f64,
    /// Work of this process and of its finished children.
    pub own: f64,
}

impl CpuTimes {
    /// Reads the current times. They are 0 if the system does not report them.
    pub fn now() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        parse_times(&read("/proc/stat"), &read("/proc/self/stat"))
    }
}

/// Parses the texts of `/proc/stat` and `/proc/self/stat`. Their unit is 10 ms on every Linux
/// system.
fn parse_times(machine: &str, process: &str) -> CpuTimes {
    let second = |ticks: f64| ticks / 100.0;
    let fields: Vec<f64> = machine
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "))
        .unwrap_or_default()
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0.0))
        .collect();
    let at = |i: usize| fields.get(i).copied().unwrap_or(0.0);
    // user, nice, system, idle, iowait, irq, softirq, steal
    let busy = at(0) + at(1) + at(2) + at(5) + at(6);
    // The name may contain spaces and parentheses. After it, utime is the 12th field, followed by
    // stime, cutime and cstime.
    let own: f64 = process
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_whitespace()
        .skip(11)
        .take(4)
        .map(|field| field.parse().unwrap_or(0.0))
        .sum();
    CpuTimes {
        busy: second(busy),
        stolen: second(at(7)),
        own: second(own),
    }
}

/// Disturbances of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// Drop of the slowest clock reading below the fastest, as a fraction.
    pub clock_drift: f64,
    /// Drop of the slowest read rate below the fastest, as a fraction.
    pub read_drift: f64,
    /// Average number of stolen processors.
    pub stolen: f64,
    /// Average number of processors that other programs used.
    pub foreign: f64,
}

impl Noise {
    /// Computes the disturbances between two moments that are `seconds` apart.
    pub fn new(readings: &[Reading], before: CpuTimes, after: CpuTimes, seconds: f64) -> Self {
        let drift = |pick: fn(&Reading) -> f64| {
            let least = readings.iter().map(pick).fold(f64::INFINITY, f64::min);
            let most = readings.iter().map(pick).fold(0.0, f64::max);
            if most > 0.0 { 1.0 - least / most } else { 0.0 }
        };
        let per_second = |amount: f64| (amount / seconds.max(1e-9)).max(0.0);
        // Counters advance every 10 ms, so ignore a few ticks.
        let foreign = (after.busy - before.busy) - (after.own - before.own) - 0.03;
        Noise {
            clock_drift: drift(|reading| reading.clock_hz),
            read_drift: drift(|reading| reading.read_bytes),
            stolen: per_second(after.stolen - before.stolen - 0.01),
            foreign: per_second(foreign),
        }
    }

    /// Returns the disturbance that exceeds its limit, if any.
    pub fn reason(&self) -> Option<&'static str> {
        let limits = [
            (self.clock_drift, MAX_DRIFT, "clock"),
            (self.read_drift, MAX_READ_DRIFT, "reading"),
            (self.stolen, MAX_STOLEN, "stolen time"),
            (self.foreign, MAX_FOREIGN, "other programs"),
        ];
        let found = limits.into_iter().find(|&(value, most, _)| value > most);
        found.map(|(_, _, name)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_counters_are_parsed() {
        let machine = "cpu  100 20 30 4000 5 6 7 800 0 0\ncpu0 1 2 3\n";
        let process = "42 (a) name) S 1 42 42 0 -1 4194560 100 0 0 0 250 50 300 100 20 0";
        assert_eq!(
            parse_times(machine, process),
            CpuTimes {
                busy: 1.63,
                stolen: 8.0,
                own: 7.0
            }
        );
        assert_eq!(parse_times("", ""), CpuTimes::default());
    }

    #[test]
    fn noisy_readings_are_detected() {
        let reading = Reading::new(&Probe::new());
        assert!(
            reading.clock_hz > 1e6 && reading.read_bytes > 1e6,
            "{reading:?}"
        );
        let at = |clock_hz, read_bytes| Reading {
            clock_hz,
            read_bytes,
        };
        let times = |busy, own| CpuTimes {
            busy,
            own,
            stolen: 0.0,
        };
        let noise =
            |readings: &[Reading], after| Noise::new(readings, times(0.0, 0.0), after, 10.0);
        let quiet = times(10.0, 10.0);
        let reason = |readings: &[Reading], after| noise(readings, after).reason();
        assert_eq!(reason(&[at(1.0, 1.0), at(0.98, 0.85)], quiet), None);
        assert_eq!(reason(&[at(1.0, 1.0), at(0.9, 1.0)], quiet), Some("clock"));
        assert_eq!(
            reason(&[at(1.0, 0.7), at(1.0, 1.0)], quiet),
            Some("reading")
        );
        assert_eq!(
            reason(&[at(1.0, 1.0)], times(14.0, 10.0)),
            Some("other programs")
        );
        let stolen = CpuTimes {
            stolen: 1.0,
            ..quiet
        };
        assert_eq!(reason(&[at(1.0, 1.0)], stolen), Some("stolen time"));
    }
}
