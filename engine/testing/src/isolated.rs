//! Suite runs in a process of their own: an assertion in a ggml plugin ends its process.
//!
//! The process writes a line before each case and one after it. If it ends in between, the case
//! failed, and another process continues with the next case.

use crate::report::{Observer, Progress, Report, run_from};
use crate::run::Outcome;
use samite_core::Device;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Line of the process.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    /// A case begins.
    Begin {
        case: usize,
        cases: usize,
        op: String,
        name: String,
    },
    /// It passed, with this error.
    Passed(f64),
    /// The device does not support it, for this reason.
    Unsupported(String),
    /// It failed, with this description.
    Failed(String),
    /// All cases ran.
    Done,
}

/// Runs the suite on `device` like [`run_suite`](crate::run_suite), from case number `first` on,
/// for [`run_suite_isolated`] in another process. `write_line` writes a line to standard output.
pub fn report_cases(
    device: &Arc<dyn Device>,
    filter: Option<&str>,
    first: usize,
    write_line: &mut dyn FnMut(&str),
) {
    let mut writer = EventWriter { write_line };
    run_from(device, filter, first, &mut writer);
    writer.event(&Event::Done);
}

/// Writes events.
struct EventWriter<'a> {
    write_line: &'a mut dyn FnMut(&str),
}

impl EventWriter<'_> {
    fn event(&mut self, event: &Event) {
        // A line break before, because plugins may write a part of a line.
        let line = serde_json::to_string(event).unwrap_or_default();
        (self.write_line)(&format!("\n{line}"));
    }
}

impl Observer for EventWriter<'_> {
    fn begin(&mut self, case: usize, cases: usize, op: &str, name: &str) {
        let (op, name) = (op.to_owned(), name.to_owned());
        self.event(&Event::Begin {
            case,
            cases,
            op,
            name,
        });
    }

    fn end(&mut self, progress: Progress<'_>) {
        self.event(&match progress.outcome.clone() {
            Outcome::Passed { nmse } => Event::Passed(nmse),
            Outcome::Unsupported { reason } => Event::Unsupported(reason),
            Outcome::Failed { detail, .. } => Event::Failed(detail),
            Outcome::Error { message } => Event::Failed(message),
        });
    }
}

/// Runs the suite on the device called `device` in processes. `command` returns the command of a
/// process that calls [`report_cases`] from the given case on. A process that writes nothing for
/// `timeout` within a case is killed.
///
/// # Errors
/// If a process cannot be started, or fails outside of a case.
pub fn run_suite_isolated(
    device: &str,
    command: &mut dyn FnMut(usize) -> Command,
    timeout: Duration,
    progress: &mut dyn FnMut(Progress<'_>),
) -> io::Result<Report> {
    let mut report = Report::new(device);
    let mut first = 0;
    loop {
        let mut process = Process::start(command(first))?;
        // The case that runs: its number, operation and name.
        let mut running: Option<(usize, usize, String, String)> = None;
        let mut is_done = false;
        let end = loop {
            // Only a plugin's operations are known to hang, and a start can take long.
            let event = match running {
                Some(_) => process.events.recv_timeout(timeout),
                None => process.events.recv().map_err(RecvTimeoutError::from),
            };
            let event = match event {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => break process.wait()?,
                Err(RecvTimeoutError::Timeout) => {
                    process.child.kill()?;
                    process.wait()?;
                    break format!("no answer in {} s", timeout.as_secs_f32());
                }
            };
            let outcome = match event {
                Event::Begin {
                    case,
                    cases,
                    op,
                    name,
                } => {
                    running = Some((case, cases, op, name));
                    continue;
                }
                Event::Passed(nmse) => Outcome::Passed { nmse },
                Event::Unsupported(reason) => Outcome::Unsupported { reason },
                Event::Failed(message) => Outcome::Error { message },
                Event::Done => {
                    is_done = true;
                    continue;
                }
            };
            if let Some((case, cases, op, name)) = running.take() {
                progress(Progress {
                    case,
                    cases,
                    name: &name,
                    outcome: &outcome,
                });
                report.add(&op, &name, outcome);
            }
        };
        match running {
            _ if is_done => return Ok(report),
            Some((case, _, op, name)) => {
                report.add(&op, &name, Outcome::Error { message: end });
                first = case + 1;
            }
            None => return Err(io::Error::other(end)),
        }
    }
}

/// A process that runs cases.
struct Process {
    child: Child,
    events: Receiver<Event>,
    /// Returns the last line of standard error.
    last_line: JoinHandle<String>,
}

impl Process {
    fn start(mut command: Command) -> io::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(io::Error::other("the process has no output"));
        };
        let (sender, events) = channel();
        std::thread::spawn(move || {
            for line in lines(stdout) {
                // Other lines are the plugin's.
                if let Ok(event) = serde_json::from_str(&line)
                    && sender.send(event).is_err()
                {
                    break;
                }
            }
        });
        let is_text = |line: &String| !line.trim().is_empty();
        let last_line = std::thread::spawn(move || {
            let last = lines(stderr).filter(is_text).last();
            last.unwrap_or_default().trim().to_owned()
        });
        Ok(Process {
            child,
            events,
            last_line,
        })
    }

    /// Waits for the end and describes it.
    fn wait(mut self) -> io::Result<String> {
        let status = self.child.wait()?;
        let last_line = self.last_line.join().unwrap_or_default();
        let mut description = format!("the process ended with {status}");
        if !last_line.is_empty() {
            description.push_str(": ");
            description.push_str(&last_line);
        }
        Ok(description)
    }
}

/// Returns the lines of a stream, whatever bytes they have.
fn lines(stream: impl Read) -> impl Iterator<Item = String> {
    let lines = BufReader::new(stream).split(b'\n');
    lines.map_while(|line| Some(String::from_utf8_lossy(&line.ok()?).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HANG_GUARD, run_suite};
    use samite_core::{DeviceWrapper, Node, Support, WrappedDevice};
    use samite_reference::{ReferenceDevice, ReferenceOptions};

    /// A device that ends the process for some operations, each in its own way.
    struct CrashingDevice(Arc<dyn Device>);

    impl DeviceWrapper for CrashingDevice {
        fn inner(&self) -> &Arc<dyn Device> {
            &self.0
        }

        fn supports(&self, node: Node<'_>) -> Support {
            match node.op().name() {
                "get_rel_pos" => {
                    eprintln!("GGML_ASSERT(false) failed\n");
                    std::process::abort()
                }
                "win_part" => std::process::exit(0),
                "acc" => loop {
                    std::thread::park();
                },
                _ => self.0.supports(node),
            }
        }
    }

    fn plain() -> Arc<dyn Device> {
        ReferenceDevice::new(ReferenceOptions::named("crashing"))
    }

    /// Variables for the other process: its first case and its filter.
    const VARIABLES: [&str; 2] = ["SAMITE_TEST_FIRST_CASE", "SAMITE_TEST_FILTER"];

    /// Runs cases in the other process. Does nothing in this one.
    #[test]
    fn worker() {
        let [Ok(first), Ok(filter)] = VARIABLES.map(std::env::var) else {
            return;
        };
        print!("half a line");
        let device: Arc<dyn Device> = Arc::new(WrappedDevice(CrashingDevice(plain())));
        let first = first.parse().unwrap();
        report_cases(&device, Some(&filter), first, &mut |line| {
            println!("{line}")
        });
    }

    fn run(filter: &str, timeout: Duration) -> io::Result<Report> {
        let mut command = |first: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "isolated::tests::worker", "--nocapture"]);
            command.env(VARIABLES[0], first.to_string());
            command.env(VARIABLES[1], filter);
            command
        };
        run_suite_isolated("crashing", &mut command, timeout, &mut |progress| {
            assert!(progress.case < progress.cases);
        })
    }

    #[test]
    fn cases_that_end_the_process_fail_and_others_run() {
        for (filter, crashing, last_line) in [
            ("rel_pos", "get_rel_pos", ": GGML_ASSERT(false) failed"),
            ("win_", "win_part", "the process ended with exit status: 0"),
        ] {
            let report = run(filter, HANG_GUARD).unwrap();
            let expected = run_suite(&plain(), Some(filter), &mut |_| {});
            assert_eq!(expected.ops.len(), 2);
            for (op, counts) in &expected.ops {
                let found = &report.ops[op];
                if op == crashing {
                    assert_eq!((found.passed, found.failed), (0, counts.passed), "{op}");
                } else {
                    assert_eq!(found, counts, "{op}");
                }
            }
            for failure in &report.failures {
                assert!(failure.case.starts_with(crashing), "{failure:?}");
                let detail = failure.detail.replace("exit code", "exit status");
                assert!(detail.ends_with(last_line), "{detail}");
            }
        }
    }

    #[test]
    fn cases_that_hang_fail() {
        let report = run("acc", Duration::from_millis(200)).unwrap();
        assert!(!report.failures.is_empty() && report.passed() == 0);
        for failure in &report.failures {
            assert_eq!(failure.detail, "no answer in 0.2 s");
        }
    }

    #[test]
    fn a_process_that_fails_outside_of_a_case_is_an_error() {
        let mut command = |_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.arg("--no-such-flag");
            command
        };
        let report = run_suite_isolated("crashing", &mut command, HANG_GUARD, &mut |_| {});
        let error = report.unwrap_err().to_string();
        assert!(error.starts_with("the process ended with exit "), "{error}");
    }
}
