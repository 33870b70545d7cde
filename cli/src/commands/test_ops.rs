//! `samite dev test-ops`: compares the operations of a device with the reference, or times them.

use crate::args::{DeviceArgs, ThreadArgs};
use crate::cpu_args::PoolArgs;
use crate::failure::{CommandError, CommandResult};
use crate::interrupt;
use crate::log;
use crate::progress;
use crate::setup::DeviceSetup;
use crate::shown::counted;
use clap::Args;
use samite::Device;
use samite_testing::{
    ContractOutcome, Progress, Report, check_contract, report_cases, run_suite, run_suite_isolated,
};
use serde_json::json;
use std::io::Write;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

mod perf;

/// Flags of `samite dev test-ops`.
#[derive(Debug, Args)]
#[command(after_help = "With -v, also prints why cases are unsupported.

Examples:
  samite dev test-ops
  samite dev test-ops --device blas --filter mul_mat -v
  samite dev test-ops --device cpu --contract
  samite dev test-ops --perf -o mul_mat,flash_attn_ext")]
pub struct TestOpsArgs {
    #[command(flatten)]
    devices: DeviceArgs,
    #[command(flatten)]
    threads: ThreadArgs,
    /// Test only cases whose names contain this text, for example an operation
    #[arg(short, long, value_name = "TEXT")]
    filter: Option<String>,
    /// Test only the device contract: buffers, streams, events, copies and order instead of
    /// operations
    #[arg(long, conflicts_with = "filter")]
    contract: bool,
    /// Benchmark operations with shapes of a model of 8 billion parameters instead. On a CPU, also
    /// print the share of the peak of its threads: memory bandwidth, or multiplication (8-bit for
    /// quantized weights, otherwise F32). It exceeds 100 % for data that fits into caches, and for
    /// floats that are multiplied as integers or BF16
    #[arg(long, conflicts_with = "contract")]
    perf: bool,
    /// Benchmark only these operations, separated by `,`
    #[arg(
        short,
        long,
        value_name = "OPS",
        value_delimiter = ',',
        requires = "perf"
    )]
    op: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Run the cases of this device in this process, see [`isolated`]
    #[arg(long, value_name = "DEVICE", hide = true, requires = "first_case")]
    worker: Option<String>,
    /// Number of the worker's first case
    #[arg(long, value_name = "CASE", hide = true)]
    first_case: Option<usize>,
    #[command(flatten)]
    pool: PoolArgs,
}

/// Bytes that the test cases need, in small pieces.
const CASES: usize = 24 << 20;

/// Maximum duration of a case in another process.
const TIMEOUT: Duration = Duration::from_secs(120);

pub fn run(args: TestOpsArgs) -> CommandResult {
    let pool = args.pool.pool(args.threads.threads)?;
    let devices = DeviceSetup::new(&args.devices).devices(pool)?;
    if args.perf {
        return perf::run(&devices, &args);
    }
    if args.contract {
        return contract(&devices, args.json);
    }
    samite::ask_for_memory(CASES, "the cases")?;
    let filter = args.filter.as_deref();
    if let (Some(name), Some(first)) = (&args.worker, args.first_case) {
        let device = devices.iter().find(|device| device.name() == name);
        let device = device.ok_or_else(|| CommandError::error("the device is gone"))?;
        report_cases(device, filter, first, &mut |line| {
            // The parent is gone.
            if writeln!(std::io::stdout(), "{line}").is_err() {
                interrupt::leave(1);
            }
        });
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    let mut reports = Vec::new();
    for device in devices {
        let bar = progress::count("testing", "cases");
        let mut show = |progress: Progress<'_>| {
            bar.set_length(progress.cases as u64);
            bar.set_position(progress.case as u64 + 1);
        };
        let report = if device.name().starts_with("ggml:") {
            isolated(device.name(), &mut show)?
        } else {
            run_suite(&device, filter, &mut show)
        };
        drop(bar);
        if !args.json {
            writeln!(out, "{report}")?;
            if log::is_verbose() {
                for (op, counts) in &report.ops {
                    for (reason, count) in &counts.reasons {
                        writeln!(out, "{op}: {count} cases not supported: {reason}")?;
                    }
                }
            }
        }
        reports.push(report);
    }
    if args.json {
        let json: Vec<_> = reports.iter().map(|report| report.to_json()).collect();
        writeln!(out, "{:#}", serde_json::Value::from(json))?;
    }
    let failed: usize = reports.iter().map(|report| report.failed()).sum();
    match failed {
        0 if reports.iter().all(|report| report.is_success()) => Ok(()),
        0 => Err(CommandError::error(
            "no case was run: nothing matches the filter, or the device supports none of it",
        )),
        _ => Err(CommandError::error(format_args!(
            "{} failed",
            counted(failed, "case")
        ))),
    }
}

/// Runs the suite in processes of this program: a plugin can end the one that it is in.
fn isolated(device: &str, show: &mut dyn FnMut(Progress<'_>)) -> CommandResult<Report> {
    let program = std::env::current_exe()?;
    let mut command = |first: usize| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1));
        command.args(["--worker", device, "--first-case", &first.to_string()]);
        // When ggml aborts, it would start a debugger for a backtrace.
        command.env("GGML_NO_BACKTRACE", "1");
        command
    };
    Ok(run_suite_isolated(device, &mut command, TIMEOUT, show)?)
}

/// Tests the contract apart from computation.
fn contract(devices: &[Arc<dyn Device>], json: bool) -> CommandResult {
    let mut out = std::io::stdout().lock();
    let (mut failed, mut found) = (0, Vec::new());
    for device in devices {
        let report = check_contract(device);
        failed += report.failures().len();
        if json {
            let checks = report.checks.iter().map(|(name, outcome)| {
                let (outcome, why) = match outcome {
                    ContractOutcome::Passed => ("holds", None),
                    ContractOutcome::Skipped(why) => ("skipped", Some(why)),
                    ContractOutcome::Failed(why) => ("failed", Some(why)),
                };
                json!({ "check": name, "outcome": outcome, "why": why })
            });
            found.push(json!({ "device": device.name(), "checks": checks.collect::<Vec<_>>() }));
        } else {
            writeln!(out, "the contract, on {}:\n{report}", device.name())?;
        }
    }
    if json {
        writeln!(out, "{:#}", serde_json::Value::from(found))?;
    }
    match failed {
        0 => Ok(()),
        _ => Err(CommandError::error(format_args!(
            "{} of the contract failed",
            counted(failed, "check")
        ))),
    }
}
