//! Runs llama.cpp's benchmark programs as child processes.

use super::work::BenchCase;
use crate::failure::{CommandError, CommandResult};
use crate::setup::{ContextSetup, ModelSetup};
use samite::CancelToken;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// Program that decodes several sequences together. It is in the folder of llama-bench.
const BATCHED: &str = "llama-batched-bench";

/// An installation of llama.cpp in one folder.
pub struct Peer {
    bench: PathBuf,
    model: PathBuf,
}

/// A run of a peer.
#[derive(Clone, Debug)]
pub struct PeerSample {
    /// Tokens of all sequences per second: the median of the repetitions.
    pub rate: f64,
    /// Build description. `None` for llama-batched-bench.
    pub version: Option<String>,
}

impl Peer {
    /// Creates the peer whose `llama-bench` is at `bench`, with the model of a setup.
    pub fn new(bench: &Path, setup: &ModelSetup) -> CommandResult<Self> {
        if !bench.is_file() {
            return Err(CommandError::usage(format_args!(
                "--compare: there is no file {}; give the path of llama.cpp's llama-bench",
                bench.display()
            )));
        }
        let model = setup.path()?.ok_or_else(|| {
            CommandError::usage("--compare: llama.cpp needs a file too; name one with -m")
        })?;
        if !setup.adapters.is_empty() {
            return Err(CommandError::usage(
                "--compare: llama.cpp's llama-bench takes no adapters: leave out --lora and --lora-scaled",
            ));
        }
        Ok(Peer {
            bench: bench.to_owned(),
            model: model.to_owned(),
        })
    }

    /// Returns the output of `--version`. Not every build has that flag.
    pub fn version(&self, cancel: &CancelToken) -> CommandResult<Option<String>> {
        let mut command = Command::new(&self.bench);
        command.arg("--version");
        match run(command, cancel) {
            Ok(output) => Ok(parse_version(&output.join("\n"))),
            Err(CommandError::Error(_)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Does the work `repetitions` times after a warm-up, with or without llama.cpp's packed
    /// weights.
    pub fn sample(
        &self,
        work: BenchCase,
        threads: usize,
        repack: bool,
        repetitions: u32,
        context: &ContextSetup,
        cancel: &CancelToken,
    ) -> CommandResult<PeerSample> {
        let mut command = if work.sequences == 1 {
            let mut command = Command::new(&self.bench);
            command.args(bench_arguments(work, threads, repack, repetitions));
            command
        } else {
            let mut command = Command::new(self.bench.with_file_name(BATCHED));
            command.args(batched_arguments(work, threads, repack, repetitions));
            command
        };
        let [k, v] = context.kv_types;
        command.arg("-m").arg(&self.model);
        command.args(["-ctk", k.name(), "-ctv", v.name()]);
        command.args(["-ub", &context.n_ubatch.to_string()]);
        command.args(["-fa", if context.flash { "on" } else { "off" }]);
        let [output, _] = run(command, cancel)?;
        let parsed = if work.sequences == 1 {
            parse_bench(&output)
        } else {
            parse_batched(&output, repetitions)
        };
        parsed.ok_or_else(|| {
            CommandError::error(format_args!(
                "{}: its output has no speed in it: {:.200}",
                self.bench.display(),
                output.trim()
            ))
        })
    }
}

/// Returns the arguments of llama-bench. It prints JSON with a sample per repetition, which
/// excludes loading and filling the context.
fn bench_arguments(work: BenchCase, threads: usize, repack: bool, repetitions: u32) -> Vec<String> {
    let (prompt, generated) = if work.is_prompt {
        (work.tokens, 0)
    } else {
        (0, work.tokens)
    };
    format!(
        "-p {prompt} -n {generated} -d {} -t {threads} -r {repetitions} -b 2048 --repack {} -dev none -o jsonl",
        work.depth,
        u8::from(repack)
    )
    .split(' ')
    .map(str::to_owned)
    .collect()
}

/// Returns the arguments of llama-batched-bench. It prints a line for each of a list of lengths.
fn batched_arguments(
    work: BenchCase,
    threads: usize,
    repack: bool,
    repetitions: u32,
) -> Vec<String> {
    let lengths = vec![work.tokens.to_string(); repetitions as usize].join(",");
    // Each sequence has its own part of the context, in multiples of 256.
    let cells = (work.depth + work.tokens).next_multiple_of(256) * work.sequences;
    format!(
        "-npp {} -ntg {lengths} -npl {} -c {cells} -t {threads} -tb {threads} -b 2048 {} -dev none --output-format jsonl",
        work.depth,
        work.sequences,
        if repack { "--repack" } else { "--no-repack" },
    )
    .split(' ')
    .map(str::to_owned)
    .collect()
}

fn parse_version(output: &str) -> Option<String> {
    let line = output
        .lines()
        .find_map(|line| line.strip_prefix("version:"))?;
    Some(line.trim().to_owned())
}

fn parse_bench(output: &str) -> Option<PeerSample> {
    let line = output.lines().find(|line| line.starts_with('{'))?;
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    let rates = value["samples_ts"].as_array()?;
    let rates: Vec<f64> = rates.iter().filter_map(serde_json::Value::as_f64).collect();
    let rate = super::statistics::median_of(rates);
    let version = value["build_commit"]
        .as_str()
        .map(|commit| format!("{commit} (build {})", value["build_number"]));
    (rate > 0.0 && rate.is_finite()).then_some(PeerSample { rate, version })
}

/// Parses the lines, which look like JSON except that one number is `-nan` without a prompt.
fn parse_batched(output: &str, repetitions: u32) -> Option<PeerSample> {
    let rates: Vec<f64> = output
        .lines()
        .filter_map(|line| {
            let (_, rest) = line.split_once("\"speed_tg\":")?;
            rest.split([',', '}']).next()?.trim().parse().ok()
        })
        .filter(|rate: &f64| *rate > 0.0 && rate.is_finite())
        .collect();
    (rates.len() == repetitions as usize).then(|| PeerSample {
        rate: super::statistics::median_of(rates),
        version: None,
    })
}

/// Runs a program and returns its standard output and standard error. Kills it on cancellation.
fn run(mut command: Command, cancel: &CancelToken) -> CommandResult<[String; 2]> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |what: &dyn std::fmt::Display| CommandError::error(format_args!("{name}: {what}"));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(&format_args!("cannot be started: {error}")))?;
    let (output, errors) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let status = loop {
        match child.try_wait() {
            Ok(None) if cancel.is_cancelled() => {
                // It may have ended by itself or by the same Ctrl-C. Its own children may still
                // hold the pipes.
                let _ = child.kill().and_then(|()| child.wait());
                return Err(CommandError::Interrupted);
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Ok(Some(status)) => break Ok(status),
            Err(error) => break Err(error),
        }
    };
    let [output, errors] = [output, errors].map(|text| text.recv().unwrap_or_default());
    cancel.check()?;
    match status {
        Ok(status) if status.success() => Ok([output, errors]),
        Ok(status) => {
            let last = errors.lines().rfind(|line| !line.trim().is_empty());
            Err(failed(&format_args!(
                "{status}: {}",
                last.unwrap_or("it says nothing")
            )))
        }
        Err(error) => Err(failed(&error)),
    }
}

/// Reads a pipe to its end on a separate thread, so that the pipe never fills up.
fn collect(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    let read = move || {
        let mut bytes = Vec::new();
        // Parsing notices missing output, and the receiver may be gone.
        let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    };
    // If the thread cannot start, the pipe closes and the peer fails.
    let _ = samite::thread_builder().and_then(|thread| thread.spawn(read));
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: BenchCase = BenchCase {
        is_prompt: false,
        tokens: 64,
        depth: 128,
        sequences: 8,
    };

    #[test]
    fn llama_bench_arguments_request_the_same_work() {
        let line = bench_arguments(
            BenchCase {
                is_prompt: true,
                ..WORK
            },
            2,
            false,
            3,
        )
        .join(" ");
        assert!(line.starts_with("-p 64 -n 0 -d 128 -t 2 -r 3 "), "{line}");
        assert!(line.contains("--repack 0"), "{line}");
        let line = batched_arguments(WORK, 1, true, 2).join(" ");
        assert!(
            line.starts_with("-npp 128 -ntg 64,64 -npl 8 -c 2048 "),
            "{line}"
        );
        assert!(line.contains(" --repack "), "{line}");
    }

    #[test]
    fn speeds_are_parsed_from_llama_bench_output() {
        let output = "some words\n{\"build_commit\": \"abc\", \"build_number\": \
            7, \"samples_ts\": [ 30.5, 10, 20 ]}\n";
        let sample = parse_bench(output).unwrap();
        assert_eq!(sample.rate, 20.0);
        assert_eq!(sample.version.as_deref(), Some("abc (build 7)"));
        assert!(parse_bench("{}").is_none());
        assert!(parse_bench("").is_none());

        let output = "load\nversion: 0.5.0-dev (build 1, commit abc)\nbuilt with Clang\n";
        let version = parse_version(output);
        assert_eq!(version.as_deref(), Some("0.5.0-dev (build 1, commit abc)"));
        assert_eq!(parse_version(&output[..4]), None);

        let output = "{\"speed_pp\": -nan, \"t_tg\": 1, \"speed_tg\": 40.0, \"speed\": \
            4}\n{\"speed_tg\": 60.0}\n";
        assert_eq!(parse_batched(output, 2).unwrap().rate, 50.0);
        assert!(parse_batched(output, 3).is_none());
    }
}
