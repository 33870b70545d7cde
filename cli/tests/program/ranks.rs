//! Several processes that share a model: started by the test and connected by shared memory, or
//! started by `mpirun` of Open MPI and MPICH, where installed.
//!
//! With SAMITE_TEST_MPI=1 it is a failure if one of these is missing, and with 0 they are not used.

use crate::{Run, child, command, samite, tiny};
use samite_testing::{skipped, wait_until};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Debian's names. A plain `mpirun` may belong to either.
const LAUNCHERS: [&str; 2] = ["mpirun.openmpi", "mpirun.mpich"];

/// Flags of a run whose output does not depend on the machine.
const STORY: [&str; 11] = [
    "run",
    "-sm",
    "tensor",
    "--split-anyway",
    "-p",
    "Once upon a time",
    "--temp",
    "0",
    "-q",
    "-t",
    "1",
];

/// Way to start and connect the processes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Started one by one, connected by shared memory.
    Own,
    /// Started by a launcher, connected by its MPI.
    Mpi(&'static str),
    /// Started by a launcher, with the connection that samite prefers.
    Auto(&'static str),
}

/// Returns the launchers of this machine.
fn launchers() -> Vec<&'static str> {
    let wanted = std::env::var("SAMITE_TEST_MPI").unwrap_or_default();
    let is_there = |launcher: &&str| {
        let mut command = child(launcher);
        let command = command.arg("--version").stdout(Stdio::null());
        wanted != "0" && command.stderr(Stdio::null()).status().is_ok()
    };
    let found: Vec<_> = LAUNCHERS.into_iter().filter(is_there).collect();
    assert!(
        wanted != "1" || found.len() == LAUNCHERS.len(),
        "SAMITE_TEST_MPI=1, but only these are here: {found:?}"
    );
    for missing in LAUNCHERS.iter().filter(|name| !found.contains(name)) {
        skipped(format_args!("no {missing}, so no processes of that MPI"));
    }
    found
}

fn ways() -> Vec<Way> {
    let launched = launchers()
        .into_iter()
        .flat_map(|launcher| [Way::Mpi(launcher), Way::Auto(launcher)]);
    std::iter::once(Way::Own).chain(launched).collect()
}

/// Returns the commands that start several programs, given by their process counts and arguments.
fn commands(way: Way, programs: &[(usize, &[&str])]) -> Vec<Command> {
    static FILES: AtomicUsize = AtomicUsize::new(0);
    let mut commands = match way {
        Way::Own => {
            let number = FILES.fetch_add(1, Ordering::Relaxed);
            let name = format!("samite-ranks-{}-{number}", std::process::id());
            let file = std::env::temp_dir().join(name);
            let all: usize = programs.iter().map(|(count, _)| count).sum();
            let arguments = programs
                .iter()
                .flat_map(|(count, arguments)| std::iter::repeat_n(arguments, *count));
            arguments
                .enumerate()
                .map(|(rank, arguments)| {
                    let mut command = command(*arguments);
                    command.env("SAMITE_RANKS", all.to_string());
                    command.env("SAMITE_RANK", rank.to_string());
                    command.env("SAMITE_RANKS_FILE", &file);
                    command
                })
                .collect()
        }
        Way::Mpi(launcher) | Way::Auto(launcher) => {
            let mut started = child(launcher);
            for (number, (count, arguments)) in programs.iter().enumerate() {
                if number > 0 {
                    started.arg(":");
                }
                started.args(["-np", &count.to_string()]);
                started.arg(env!("CARGO_BIN_EXE_samite")).args(*arguments);
                if let Way::Mpi(_) = way {
                    started.args(["--communicator", "mpi"]);
                }
            }
            vec![started]
        }
    };
    for command in &mut commands {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Tests may run as root and with few processors.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .env("OMPI_MCA_hwloc_base_binding_policy", "none")
            .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none")
            // MPICH's transport prints where a process crashed.
            .env("UCX_HANDLE_ERRORS", "bt");
    }
    commands
}

/// Runs programs to their end and concatenates the output of all processes.
fn run(way: Way, programs: &[(usize, &[&str])]) -> Run {
    let mut commands = commands(way, programs);
    let children: Vec<Child> = commands.iter_mut().map(|c| c.spawn().unwrap()).collect();
    let outputs = children.into_iter().map(|c| c.wait_with_output().unwrap());
    outputs
        .map(Run::new)
        .reduce(|all, run| Run {
            code: [all.code, run.code]
                .into_iter()
                .find(|code| *code != Some(0))
                .unwrap_or(Some(0)),
            stdout: all.stdout + &run.stdout,
            stderr: all.stderr + &run.stderr,
        })
        .unwrap()
}

impl Run {
    /// Checks that a run of several processes failed, with a single error line of the program among
    /// the launcher's messages.
    #[track_caller]
    fn fails_once(self, parts: &[&str]) {
        let Run {
            code,
            stderr,
            stdout,
        } = &self;
        assert_ne!(*code, Some(0), "{stderr}");
        assert_eq!(stdout.trim(), "", "{stderr}");
        let lines: Vec<_> = stderr
            .lines()
            .filter(|line| line.starts_with("error: "))
            .collect();
        assert_eq!(lines.len(), 1, "{stderr}");
        for part in parts {
            assert!(lines[0].contains(part), "no {part:?} in: {stderr}");
        }
    }
}

/// Processes that are killed at the end of the test: one for each rank, or a launcher.
struct Running(Vec<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the process of a rank that has this word among its arguments.
fn find(rank: usize, word: &str) -> Option<String> {
    let variables = ["SAMITE_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"];
    let wanted = variables.map(|name| format!("{name}={rank}"));
    let has = |pid: &str, file: &str, words: &[&str]| {
        let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let mut parts = bytes.split(|&byte| byte == 0);
        parts.any(|part| words.iter().any(|word| word.as_bytes() == part))
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let mut names = processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find(|pid| {
        has(pid, "cmdline", &[word]) && has(pid, "environ", &wanted.each_ref().map(|w| &**w))
    })
}

/// Sends a signal to the process of a rank.
fn send(signal: &str, rank: usize, word: &str) {
    crate::child::send(signal, find(rank, word).unwrap());
}

impl Running {
    /// Starts an endless run and waits for its first output. `word` marks its processes.
    fn endless(way: Way, count: usize, word: &str, flags: &[&str]) -> Self {
        let more = ["-n", "all", "--keep", "2", "--ignore-eos", "--log", word];
        let arguments = [&STORY[..], &more, flags].concat();
        let mut commands = commands(way, &[(count, &arguments)]);
        let mut running = Running(commands.iter_mut().map(|c| c.spawn().unwrap()).collect());
        let mut out = running.0[0].stdout.take().unwrap();
        let mut first = [0; 64];
        out.read_exact(&mut first).unwrap();
        // Keep reading, or the pipe would fill up.
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        running
    }

    /// Waits until the first `count` children exit. Returns whether one of them failed, and all
    /// standard error output.
    #[track_caller]
    fn end(&mut self, count: usize) -> (bool, String) {
        let (mut failed, mut said) = (false, String::new());
        for child in &mut self.0[..count] {
            let status = child.wait().unwrap();
            let is_alarm = status.signal() == Some(libc::SIGALRM);
            assert!(!is_alarm, "a child hangs: {said}");
            failed |= !status.success();
            let mut stderr = child.stderr.take().unwrap();
            stderr.read_to_string(&mut said).unwrap();
        }
        (failed, said)
    }
}

#[test]
fn processes_generate_the_same_text_as_threads() {
    let ways = ways();
    let check = |arguments: &[&str], devices: &[&str]| {
        let devices = devices.join(",");
        let here = ["--communicator", "threads", "--device", &devices];
        let threads = samite(arguments.iter().chain(&here)).ok();
        assert!(threads.len() > 60, "{threads}");
        let count = devices.split(',').count();
        for &way in &ways {
            let processes = run(way, &[(count, arguments)]);
            assert_eq!(processes.stderr, "", "{way:?} {count}");
            assert_eq!(processes.ok(), threads, "{way:?} {count}");
        }
    };
    // As many shards, each with its own device name.
    let devices = ["cpu:cores=0", "cpu:cores=1", "cpu:cores=0-1", "cpu"];
    for count in 2..=4 {
        check(&[&STORY[..], &["-n", "40"]].concat(), &devices[..count]);
    }
    // Uneven shards, random sampling, and more text than fits into the context.
    let random = [
        "--temp", "1.5", "-s", "7", "-c", "32", "--keep", "2", "-n", "80", "-q",
    ];
    let uneven = [&STORY[..6], &random, &["-ts", "3,1"]].concat();
    check(&uneven, &devices[..2]);
}

/// Each process would choose another token.
#[test]
fn the_first_process_chooses_the_tokens() {
    let flags = [
        "run",
        "-sm",
        "tensor",
        "--split-anyway",
        "-n",
        "60",
        "-t",
        "1",
        "--temp",
        "2",
    ];
    let arguments = [&flags[..], &["-p", "Once upon a time"]].concat();
    let Run { stdout, stderr, .. } = run(Way::Own, &[(2, &arguments)]);
    let seed = stderr.split("seed ").nth(1).unwrap().trim();
    let here = ["--device", "cpu:cores=0,cpu:cores=1", "-s", seed];
    assert_eq!(samite(arguments.iter().chain(&here)).ok(), stdout);
}

#[test]
fn differences_between_processes_are_reported_once() {
    let (_folder, model) = tiny();
    let model = model.to_str().unwrap();
    let with = |more: &[&'static str]| [&STORY[..], more].concat();
    let other = [&STORY[..], &["-m", model]].concat();
    let missing = with(&["-m", "/nonexistent.gguf"]);
    let first = launchers().into_iter().map(Way::Mpi);
    for way in std::iter::once(Way::Own).chain(first) {
        run(way, &[(1, &STORY), (1, &other)])
            .fails_once(&["rank 1 has another model than rank 0", "same model file"]);
        run(way, &[(2, &STORY), (1, &with(&["-c", "64"]))])
            .fails_once(&["rank 2 has another set of flags than rank 0"]);
        run(way, &[(1, &STORY), (1, &with(&["-n", "7"]))])
            .fails_once(&["rank 1 has another set of flags than rank 0"]);
        run(way, &[(1, &STORY), (1, &missing)]).fails_once(&["rank 1: /nonexistent.gguf"]);
        run(way, &[(2, &missing)]).fails_once(&["error: /nonexistent.gguf: cannot open"]);
        run(way, &[(3, &with(&["-ts", "1,1"]))])
            .fails_once(&["2 ratios for 3 members", "name one for each"]);
        run(
            way,
            &[(2, &with(&["--device", "cpu,cpu:cores=0,reference"]))],
        )
        .fails_once(&["--device: 3 devices for 2 processes on this machine"]);
        run(way, &[(2, &with(&["--session", "file"]))])
            .fails_once(&["--session is for one process"]);
    }
}

#[test]
fn a_killed_process_ends_the_others() {
    for (number, way) in ways().into_iter().enumerate() {
        for rank in [0, 2] {
            let word = format!("off,samite=error,samite_killed_{number}_{rank}=off");
            let mut running = Running::endless(way, 3, &word, &[]);
            send("KILL", rank, &word);
            let count = running.0.len();
            let (failed, said) = running.end(count);
            assert!(failed, "{way:?}: {said}");
            if way == Way::Own {
                // No launcher would tell them.
                let wanted = format!("device lost: rank {rank} ended");
                assert_eq!(said.matches(&wanted).count(), 2, "{said}");
            }
            for rank in 0..3 {
                let what = format!("{way:?}: the end of rank {rank}");
                wait_until(&what, || find(rank, &word).is_none());
            }
        }
    }
}

#[test]
fn a_stopped_process_is_lost_at_the_deadline() {
    for (number, way) in ways().into_iter().enumerate() {
        let word = format!("off,samite=error,samite_stopped_{number}=off");
        let mut running = Running::endless(way, 3, &word, &["--deadline", "4"]);
        send("STOP", 1, &word);
        let (failed, said) = running.end(1);
        assert!(failed, "{way:?}: {said}");
        // A rank that waits for another that waits for rank 1 names both, and may be the first to
        // report.
        let names_it = |line: &&str| {
            let late = ["rank 1", "ranks 0, 1", "ranks 1, 2"];
            let mut late = late.map(|who| format!("{who} did not come to")).into_iter();
            line.starts_with("error: ") && late.any(|late| line.contains(&late))
        };
        let line = said.lines().find(names_it).unwrap_or_default();
        assert!(line.contains("device lost"), "{way:?}: {said}");
        // The deadline of either waiting rank may pass first. The other one then reports that.
        let reasons = ["within 4 s", "rank 0 gave up", "rank 2 gave up"];
        let has_reason = reasons.iter().any(|reason| line.contains(reason));
        assert!(has_reason, "{way:?}: {said}");
        if way == Way::Own {
            // It notices when it continues.
            send("CONT", 1, &word);
            let rest = &mut Running(running.0.split_off(1));
            let (failed, said) = rest.end(1);
            assert!(failed && said.contains("device lost"), "{said}");
        }
    }
}

#[test]
fn missing_mpi_parts_are_reported_with_advice() {
    let started = |flags: &[&str], variables: &[(&str, &str)]| {
        let mut command = command(flags);
        command.envs(variables.iter().copied());
        let output: Output = command.output().unwrap();
        Run::new(output)
    };
    let mpi = [
        ("PMI_SIZE", "2"),
        ("PMI_RANK", "0"),
        ("SAMITE_MPI_PATH", "/nonexistent/libmpi.so"),
    ];
    started(&["run", "Hello"], &mpi).fails(
        2,
        &[
            "mpirun says that there are several processes",
            "--split-mode tensor",
            "--communicator threads",
        ],
    );
    started(&STORY, &mpi).fails(
        1,
        &[
            "no MPI library was found",
            "/nonexistent/libmpi.so",
            "SAMITE_MPI_PATH",
        ],
    );
    started(
        &["bench", "-sm", "tensor", "--device", "cpu,reference"],
        &mpi,
    )
    .fails(2, &["with samite run only", "--communicator threads"]);
    let alone = ["run", "--communicator", "threads", "-n", "2", "-q", "Hello"];
    assert!(started(&alone, &mpi).ok().starts_with("Hello"));
    let shared = [("SAMITE_RANKS", "2"), ("SAMITE_RANK", "1")];
    started(&STORY, &shared).fails(2, &["SAMITE_RANKS_FILE", "/dev/shm/"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ranks");
    let file = ("SAMITE_RANKS_FILE", file.to_str().unwrap());
    let waiting = [&STORY[..], &["--deadline", "1"]].concat();
    started(&waiting, &[shared[0], shared[1], file]).fails(1, &["rank 0 did not come"]);
    started(&waiting, &[shared[0], ("SAMITE_RANK", "0"), file])
        .fails(1, &["rank 1 did not come within 1 s"]);
    // The libraries of one MPI do not recognize processes that the other's mpirun starts.
    let found = launchers();
    if found.len() == 2 {
        for (launcher, library) in [(found[1], "libmpi.so.40"), (found[0], "libmpich.so.12")] {
            let path = Path::new("/usr/lib/x86_64-linux-gnu").join(library);
            if !path.exists() {
                skipped(format_args!("no {}", path.display()));
                continue;
            }
            let mut commands = commands(Way::Auto(launcher), &[(2, &STORY)]);
            let output = commands[0].env("SAMITE_MPI_PATH", &path).output();
            let run = Run::new(output.unwrap());
            assert_ne!(run.code, Some(0), "{}", run.stderr);
            for part in ["knows of 1 processes, but", "srun --mpi"] {
                assert!(run.stderr.contains(part), "{}", run.stderr);
            }
        }
    }
}
