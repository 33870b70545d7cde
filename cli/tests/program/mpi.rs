//! Several processes that share one model, started by `mpirun`: with Open MPI and with MPICH, where they are.
//!
//! With SAMITE_TEST_MPI=1 it is a failure if one of them is missing, and with 0 they are not looked for.

use crate::{Run, command, samite, tiny};
use samite_testing::skipped;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What Debian calls them. Whoever has but `mpirun` may have either.
const LAUNCHERS: [&str; 2] = ["mpirun.openmpi", "mpirun.mpich"];

/// Flags of a run that is the same wherever it runs.
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

/// The launchers of this machine.
fn launchers() -> Vec<&'static str> {
    let wanted = std::env::var("SAMITE_TEST_MPI").unwrap_or_default();
    let is_there = |launcher: &&str| {
        let mut command = Command::new(launcher);
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

/// Several programs of several processes each, given by their numbers and their arguments.
fn start(launcher: &str, programs: &[(usize, &[&str])]) -> Command {
    let mut started = Command::new(launcher);
    for (number, (count, arguments)) in programs.iter().enumerate() {
        if number > 0 {
            started.arg(":");
        }
        started.args(["-np", &count.to_string()]);
        started.arg(env!("CARGO_BIN_EXE_samite")).args(*arguments);
    }
    started
        .stdin(Stdio::null())
        // Tests run where users are root, and processors few.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_MCA_hwloc_base_binding_policy", "none")
        .env("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    started
}

fn run(launcher: &str, programs: &[(usize, &[&str])]) -> Run {
    Run::new(start(launcher, programs).output().unwrap())
}

impl Run {
    /// A run of several processes that must have failed, with one line of the program among what the launcher says.
    #[track_caller]
    fn fails_once(self, parts: &[&str]) {
        let Run { code, stderr, stdout } = &self;
        assert_ne!(*code, Some(0), "{stderr}");
        assert_eq!(stdout.trim(), "", "{stderr}");
        let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(lines.len(), 1, "{stderr}");
        for part in parts {
            assert!(lines[0].contains(part), "no {part:?} in: {stderr}");
        }
    }
}

/// A run that is ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process of a rank, which has this word among its arguments.
fn find(rank: usize, word: &str) -> Option<String> {
    let wanted = [
        format!("PMI_RANK={rank}"),
        format!("OMPI_COMM_WORLD_RANK={rank}"),
    ];
    let has = |pid: &str, file: &str, words: &[&str]| {
        let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let mut parts = bytes.split(|&byte| byte == 0);
        parts.any(|part| words.iter().any(|word| word.as_bytes() == part))
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let mut names = processes.filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    names.find(|pid| {
        has(pid, "cmdline", &[word]) && has(pid, "environ", &wanted.each_ref().map(|w| &**w))
    })
}

/// Sends a signal to the process of a rank.
fn send(signal: &str, rank: usize, word: &str) {
    let pid = find(rank, word).unwrap();
    let mut kill = Command::new("kill");
    let kill = kill.args([&format!("-{signal}"), &pid]).status();
    assert!(kill.unwrap().success());
}

impl Running {
    /// Waits for its end, and returns what it wrote to standard error.
    #[track_caller]
    fn end(mut self, within: Duration) -> (Option<i32>, String) {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < within, "it did not end within {within:?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut said = String::new();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut said).unwrap();
        (status.code(), said)
    }
}

#[test]
fn processes_write_the_same_text_as_threads() {
    for launcher in launchers() {
        for count in 2..=4 {
            // As many members, each with a name of its own.
            let devices = ["cpu:cores=0", "cpu:cores=1", "cpu:cores=0-1", "cpu"];
            let devices = devices[..count].join(",");
            let length = ["-n", "40"];
            let here = ["--communicator", "threads", "--device", &devices];
            let threads = samite(STORY.iter().chain(&length).chain(&here)).ok();
            assert!(threads.len() > 60, "{threads}");
            let arguments = [&STORY[..], &length].concat();
            let processes = run(launcher, &[(count, &arguments)]);
            assert_eq!(processes.stderr, "", "{launcher} {count}");
            assert_eq!(processes.ok(), threads, "{launcher} {count}");
        }
        // Uneven shares, a random choice of tokens, and more text than there is room for.
        let arguments = [
            &STORY[..6],
            &["--temp", "1.5", "-s", "7", "-c", "32", "--keep", "2", "-n", "80", "-q", "-ts"],
        ]
        .concat();
        let here = ["3,1", "--device", "cpu:cores=0,cpu:cores=1"];
        let threads = samite(arguments.iter().chain(&here)).ok();
        let processes = run(launcher, &[(2, &[&arguments[..], &["3,1"]].concat())]);
        assert_eq!(processes.ok(), threads, "{launcher}");
    }
}

#[test]
fn what_differs_between_processes_is_said_once() {
    let (_folder, model) = tiny();
    let model = model.to_str().unwrap();
    for launcher in launchers() {
        let with = |more: &[&'static str]| [&STORY[..], more].concat();
        let other = [&STORY[..], &["-m", model]].concat();
        run(launcher, &[(1, &STORY), (1, &other)])
            .fails_once(&["rank 1 has another model than rank 0", "same model file"]);
        run(launcher, &[(2, &STORY), (1, &with(&["-c", "64"]))])
            .fails_once(&["rank 2 has another set of flags than rank 0"]);
        run(launcher, &[(1, &STORY), (1, &with(&["-m", "/nonexistent.gguf"]))])
            .fails_once(&["rank 1: /nonexistent.gguf"]);
        run(launcher, &[(2, &with(&["-m", "/nonexistent.gguf"]))])
            .fails_once(&["error: /nonexistent.gguf: cannot open"]);
        run(launcher, &[(3, &with(&["-ts", "1,1"]))])
            .fails_once(&["2 ratios for 3 members", "name one for each"]);
        run(launcher, &[(2, &with(&["--device", "cpu,cpu:cores=0,reference"]))])
            .fails_once(&["--device: 3 devices for 2 processes on this machine"]);
        run(launcher, &[(2, &with(&["--session", "file"]))])
            .fails_once(&["--session is for one process"]);
    }
}

/// A run that goes on and on, once it writes.
fn endless(launcher: &str, count: usize, word: &str, flags: &[&str]) -> Running {
    let more = ["-n", "all", "--keep", "2", "--ignore-eos", "--log", word];
    let arguments = [&STORY[..], &more, flags].concat();
    let mut started = start(launcher, &[(count, &arguments)]);
    let started = started.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running(started.spawn().unwrap());
    let mut out = child.0.stdout.take().unwrap();
    let mut first = [0; 64];
    std::io::Read::read_exact(&mut out, &mut first).unwrap();
    // Somebody has to read on.
    std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    child
}

#[test]
fn a_process_that_is_killed_ends_the_others() {
    for (number, launcher) in launchers().into_iter().enumerate() {
        for rank in [0, 1, 2] {
            let word = format!("off,samite=error,samite_killed_{number}_{rank}=off");
            let running = endless(launcher, 3, &word, &[]);
            send("KILL", rank, &word);
            let (code, said) = running.end(Duration::from_secs(25));
            assert_ne!(code, Some(0), "{said}");
            for rank in 0..3 {
                let start = Instant::now();
                while find(rank, &word).is_some() {
                    assert!(start.elapsed() < Duration::from_secs(5), "rank {rank} goes on");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }
}

#[test]
fn a_process_that_stands_still_is_lost_at_the_deadline() {
    for (number, launcher) in launchers().into_iter().enumerate() {
        let word = format!("off,samite=error,samite_stopped_{number}=off");
        let running = endless(launcher, 2, &word, &["--deadline", "2"]);
        let start = Instant::now();
        send("STOP", 1, &word);
        let (code, said) = running.end(Duration::from_secs(25));
        assert_ne!(code, Some(0), "{said}");
        assert!(start.elapsed() >= Duration::from_secs(2), "{said}");
        let line = said.lines().find(|line| line.starts_with("error: ")).unwrap_or(&said);
        assert!(
            line.contains("device lost") && line.contains("did not come to") && line.contains("within 2 s"),
            "{said}"
        );
    }
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let started = |flags: &[&str]| {
        let mut command = command(flags);
        command.env("PMI_SIZE", "2").env("PMI_RANK", "0");
        command.env("SAMITE_MPI_PATH", "/nonexistent/libmpi.so");
        Run::new(command.output().unwrap())
    };
    started(&["run", "Hello"]).fails(
        2,
        &["mpirun says that there are several processes", "--split-mode tensor", "--communicator threads"],
    );
    started(&STORY).fails(1, &["no MPI library was found", "/nonexistent/libmpi.so", "SAMITE_MPI_PATH"]);
    started(&["bench", "-sm", "tensor", "--device", "cpu,reference"])
        .fails(2, &["with samite run only", "--communicator threads"]);
    let alone = started(&["run", "--communicator", "threads", "-n", "2", "-q", "Hello"]);
    assert!(alone.ok().starts_with("Hello"));
    // The libraries of one kind do not know of processes that the other kind's mpirun starts.
    let found = launchers();
    if found.len() == 2 {
        for (launcher, library) in [(found[1], "libmpi.so.40"), (found[0], "libmpich.so.12")] {
            let path = Path::new("/usr/lib/x86_64-linux-gnu").join(library);
            if !path.exists() {
                skipped(format_args!("no {}", path.display()));
                continue;
            }
            let output = start(launcher, &[(2, &STORY)]).env("SAMITE_MPI_PATH", &path).output();
            let run = Run::new(output.unwrap());
            assert_ne!(run.code, Some(0), "{}", run.stderr);
            assert!(
                run.stderr.contains("knows of 1 processes, but") && run.stderr.contains("srun --mpi"),
                "{}",
                run.stderr
            );
        }
    }
}
