//! `samite dev test-ops --perf`: times operations.

use super::TestOpsArgs;
use crate::commands::bench::limits;
use crate::failure::{CommandError, CommandResult};
use crate::interrupt;
use crate::log;
use crate::shown::shortened;
use samite::registry::Peaks;
use samite::{Device, DeviceKind};
use samite_testing::{PerfCase, PerfResult, measure, perf_cases};
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Minimum time of each case.
const LEAST: Duration = Duration::from_millis(200);

/// Bottleneck of a case: memory or arithmetic.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    Memory,
    Multiply,
}

/// Returns the bottleneck of a case on a machine with these limits, and the minimum time in
/// seconds.
fn bound(perf: &PerfCase, peaks: &Peaks) -> (Bound, f64) {
    let multiply = match peaks.i8_operations {
        Some(operations) if perf.quantized => operations,
        _ => peaks.f32_operations,
    };
    let (memory, multiply) = (perf.bytes / peaks.read_bytes, perf.operations / multiply);
    if memory > multiply {
        (Bound::Memory, memory)
    } else {
        (Bound::Multiply, multiply)
    }
}

/// Returns a line of at most 80 columns.
fn line(perf: &PerfCase, result: PerfResult, peaks: Option<&Peaks>) -> String {
    let per_second = |amount: f64| amount / result.seconds / 1e9;
    let (bound, share) = match peaks {
        Some(peaks) => {
            let (bound, least) = bound(perf, peaks);
            (bound, format!("{:4.0}%", 100.0 * least / result.seconds))
        }
        // With more than a few operations per byte, every CPU can read fast enough.
        None if perf.operations > 16.0 * perf.bytes => (Bound::Multiply, String::new()),
        None => (Bound::Memory, String::new()),
    };
    let rate = match bound {
        Bound::Memory => format!("{:8.1} GB/s   ", per_second(perf.bytes)),
        Bound::Multiply => format!("{:8.1} GFLOP/s", per_second(perf.operations)),
    };
    let line = format!(
        "{:<14} {:<29} {:>9.1} us {rate} {share}",
        perf.case.op,
        shortened(&perf.case.name, 29),
        result.seconds * 1e6,
    );
    line.trim_end().to_owned()
}

pub fn run(devices: &[Arc<dyn Device>], args: &TestOpsArgs) -> CommandResult {
    let cancel = interrupt::token();
    let mut cases = perf_cases();
    let ops: Vec<_> = args.op.iter().map(|op| op.trim()).collect();
    for op in &ops {
        if !cases
            .iter()
            .any(|perf| op.eq_ignore_ascii_case(perf.case.op))
        {
            let mut known: Vec<_> = cases.iter().map(|perf| perf.case.op).collect();
            known.dedup();
            return Err(CommandError::usage(format_args!(
                "--op {}: not timed; there are {}",
                shortened(op, 40),
                known.join(", ")
            )));
        }
    }
    cases.retain(|perf| {
        let op = perf.case.op;
        let wanted = ops.is_empty() || ops.iter().any(|o| o.eq_ignore_ascii_case(op));
        wanted
            && (args.filter.as_ref())
                .is_none_or(|text| format!("{op}: {}", perf.case.name).contains(text))
    });
    if cases.is_empty() {
        return Err(CommandError::error(
            "nothing is timed: nothing matches the filter",
        ));
    }

    let mut peaks = None;
    if devices
        .iter()
        .any(|device| device.kind() == DeviceKind::Cpu)
    {
        let threads = args.threads.threads;
        let threads = threads.unwrap_or_else(|| args.pool.processors());
        peaks = Some(limits::peaks(threads, &args.pool, &cancel)?);
    }
    let mut out = std::io::stdout().lock();
    if let (Some(peaks), false) = (&peaks, args.json) {
        write!(out, "{}", limits::lines_of(peaks))?;
    }
    let mut found = Vec::new();
    for device in devices {
        if !args.json {
            writeln!(out, "{}:", device.name())?;
        }
        let peaks = peaks.as_ref().filter(|_| device.kind() == DeviceKind::Cpu);
        for perf in &cases {
            cancel.check()?;
            let result = match measure(device, perf, LEAST)? {
                Ok(result) => result,
                Err(reason) => {
                    if log::is_verbose() && !args.json {
                        writeln!(out, "{} {}: {reason}", perf.case.op, perf.case.name)?;
                    }
                    continue;
                }
            };
            if args.json {
                let bound = peaks.map(|peaks| bound(perf, peaks));
                found.push(json!({
                    "device": device.name(),
                    "op": perf.case.op,
                    "case": perf.case.name,
                    "seconds": result.seconds,
                    "runs": result.runs,
                    "operations": perf.operations,
                    "bytes": perf.bytes,
                    "bound": bound.map(|(bound, _)| match bound {
                        Bound::Memory => "memory",
                        Bound::Multiply => "multiply",
                    }),
                    "share": bound.map(|(_, least)| least / result.seconds),
                }));
            } else {
                writeln!(out, "{}", line(perf, result, peaks))?;
                out.flush()?;
            }
        }
    }
    if args.json {
        let limits = peaks.as_ref().map(limits::to_json);
        writeln!(out, "{:#}", json!({ "limits": limits, "cases": found }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAKS: Peaks = Peaks {
        threads: 1,
        clock_hz: 3e9,
        read_bytes: 1e10,
        f32_operations: 1e11,
        i8_operations: Some(4e11),
    };

    fn case(op: &str, name: &str) -> PerfCase {
        let mut all = perf_cases().into_iter();
        all.find(|perf| perf.case.op == op && perf.case.name == name)
            .expect("a case")
    }

    #[test]
    fn decode_is_memory_bound_and_prefill_compute_bound() {
        let (found, seconds) = bound(&case("mul_mat", "q4_0 4096x14336, 1 column"), &PEAKS);
        assert_eq!((found, (seconds * 1e6).round()), (Bound::Memory, 3310.0));
        let (found, seconds) = bound(&case("mul_mat", "q4_0 4096x4096, 512 columns"), &PEAKS);
        assert_eq!((found, (seconds * 1e3).round()), (Bound::Multiply, 43.0));
        let (_, slower) = bound(&case("mul_mat", "f32 4096x4096, 512 columns"), &PEAKS);
        assert!((slower / seconds - 4.0).abs() < 1e-9);
    }

    #[test]
    fn lines_fit_a_terminal() {
        let result = PerfResult {
            seconds: 6.623e-3,
            runs: 9,
        };
        let perf = case("mul_mat", "q4_0 4096x14336, 1 column");
        assert_eq!(
            line(&perf, result, Some(&PEAKS)),
            "mul_mat        q4_0 4096x14336, 1 column        6623.0 us      5.0 GB/s      50%"
        );
        for perf in perf_cases() {
            let slow = PerfResult {
                seconds: 9.0,
                runs: 2,
            };
            for peaks in [None, Some(&PEAKS)] {
                let line = line(&perf, slow, peaks);
                assert!(line.chars().count() <= 80, "{line}");
            }
        }
    }
}
