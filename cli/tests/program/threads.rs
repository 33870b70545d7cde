//! Number and placement of compute threads.

use crate::{samite, tiny, with_model};
#[cfg(target_os = "linux")]
use samite_testing::wait_until;

#[test]
fn the_text_does_not_depend_on_threads() {
    let (_dir, model) = tiny();
    let line = "run -m M -p abcdefghijklmnopqrstuvwxyz -n 20 --temp 0 -q";
    let text = with_model(&model, &format!("{line} -t 1")).ok();
    for flags in [
        "-t 1 -tb 3",
        "-t 3 -tb=1",
        "-t 2 --poll 0",
        "-t 3 --poll 60 --prio 0",
    ] {
        assert_eq!(
            with_model(&model, &format!("{line} {flags}")).ok(),
            text,
            "{flags}"
        );
    }
    #[cfg(target_os = "linux")]
    for flags in [
        "-C 0xFFFFFFFF",
        "-Cr 0- --cpu-strict 1",
        &format!("-t 2 {}", low_priority().0),
    ] {
        assert_eq!(
            with_model(&model, &format!("{line} {flags}")).ok(),
            text,
            "{flags}"
        );
    }
}

/// Returns each thread of the program as reported by the system: name, processors, nice value.
#[cfg(target_os = "linux")]
fn threads_of(process: u32) -> Vec<(String, String, String)> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return Vec::new();
    };
    let about = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let field = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_start_matches(':').trim().to_owned())
        };
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        // The name, in parentheses, may contain spaces.
        let nice = stat
            .rsplit_once(')')?
            .1
            .split_whitespace()
            .nth(16)?
            .to_owned();
        Some((field("Name")?, field("Cpus_allowed_list")?, nice))
    };
    tasks.flatten().filter_map(about).collect()
}

/// Returns flags for a low priority, and the resulting nice value. A process with a higher nice
/// value may not lower it, so then there are no flags.
#[cfg(target_os = "linux")]
fn low_priority() -> (&'static str, String) {
    let (.., nice) = threads_of(std::process::id()).swap_remove(0);
    match nice.parse::<i32>().unwrap() {
        ..=5 => ("--prio -1", "5".to_owned()),
        _ => ("", nice),
    }
}

#[cfg(target_os = "linux")]
#[test]
fn workers_and_the_main_thread_are_pinned_by_flags() {
    use std::process::Stdio;
    let allowed = threads_of(std::process::id());
    let (_, allowed, _) = allowed.first().unwrap();
    let last = allowed.rsplit(['-', ',']).next().unwrap();
    let range = format!("{last}-{last}");
    let (flags, nice) = low_priority();
    let mut child = crate::command([
        "run",
        "-n",
        "100000000",
        "--keep",
        "4",
        "--ignore-eos",
        "-p",
        "Once",
    ])
    .args(["-t", "2", "-tb", "3", "-Cr", &*range])
    .args(flags.split_whitespace())
    .stdout(Stdio::null())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let expected = ["samite", "samite-worker-1", "samite-worker-2"];
    let expected = expected.map(|name| (name.to_owned(), last.to_owned(), nice.clone()));
    let mut seen = Vec::new();
    wait_until("threads with names, processors and nice values", || {
        seen = threads_of(child.id());
        seen.retain(|(name, ..)| name == "samite" || name.starts_with("samite-worker"));
        seen.sort();
        seen == expected || child.try_wait().unwrap().is_some()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(seen, expected);
}

#[cfg(target_os = "linux")]
#[test]
fn refused_thread_settings_are_errors_that_name_the_flag() {
    let (_dir, model) = tiny();
    let count = std::thread::available_parallelism().unwrap().get();
    if count < 1000 {
        with_model(&model, "run -m M -p x -n 1 -Cr 1020-1023")
            .fails(2, &["--cpu-range: none of these processors", "may use"]);
        let mask = format!("run -m M -p x -n 1 -C 8{}", "0".repeat(255));
        with_model(&model, &mask).fails(2, &["--cpu-mask: none of these"]);
    }
    // A user who may raise priorities gets the requested one.
    let run = with_model(&model, "run -m M -p x -n 1 --prio 3");
    if run.code != Some(0) {
        run.fails(2, &["--prio: the system refuses a nice value of -20"]);
    }
}

#[cfg(not(target_os = "linux"))]
#[test]
fn missing_affinity_support_is_reported() {
    let (_dir, model) = tiny();
    with_model(&model, "run -m M -p x -n 1 -C 1").fails(2, &["--cpu-mask: this system"]);
    with_model(&model, "run -m M -p x -n 1 --prio 1").fails(2, &["--prio: this system"]);
}

#[test]
fn model_commands_have_a_prefill_thread_flag() {
    for name in [
        "run",
        "plan",
        "perplexity",
        "compare",
        "bench",
        "train",
        "test-ops",
    ] {
        let help = samite([name, "--help"]).ok();
        // Other commands have a single kind of work, or state how many threads each has.
        let of_models = !["bench", "train", "test-ops"].contains(&name);
        assert_eq!(help.contains("--threads-batch"), of_models, "{name}");
        for flag in [
            "--cpu-mask",
            "--cpu-range",
            "--cpu-strict",
            "--prio",
            "--poll",
        ] {
            assert!(help.contains(flag), "{name}: {flag}");
        }
    }
}

#[test]
fn prefill_thread_flags_that_differ_are_refused() {
    let (_dir, model) = tiny();
    let line = "run -m M -p ab -n 1 -t 1";
    with_model(&model, &format!("{line} --poll 0 --poll-batch 0")).ok();
    for (flags, flag) in [
        ("--poll-batch 0", "--poll-batch"),
        ("--prio-batch -1", "--prio-batch"),
        ("-Cb 1", "--cpu-mask-batch"),
        ("-Crb 0-0", "--cpu-range-batch"),
        ("-Cr 0- --cpu-strict-batch 1", "--cpu-strict-batch"),
    ] {
        let part = format!("{flag}: the threads of prompts are those of single tokens");
        with_model(&model, &format!("{line} {flags}")).fails(2, &[&part, "leave"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn other_commands_obey_thread_flags() {
    let (dir, model) = tiny();
    let last = samite::registry::CpuSet::allowed().unwrap();
    let last = last.iter().last().unwrap();
    for line in [
        "bench -m M -p 4 -n 2 -r 1 --no-peaks",
        "test-ops --device cpu -f add",
        "test-ops --device cpu --contract",
    ] {
        with_model(
            &model,
            &format!("{line} -Cr {last}-{last} --prio -1 --poll 0"),
        )
        .ok();
    }
    let config = crate::train::write_project(dir.path());
    let train = |out: &str| {
        format!(
            "train {} -o {} --stop-after 1 --sample=",
            config.display(),
            dir.path().join(out).display()
        )
    };
    with_model(
        &model,
        &format!("{} -Cr {last}-{last} --cpu-strict 1", train("one")),
    )
    .ok();
    if std::thread::available_parallelism().unwrap().get() < 1000 {
        for line in [
            "bench -m M -p 4 -n 0 --no-peaks",
            "test-ops --device cpu",
            &train("other"),
        ] {
            with_model(&model, &format!("{line} -Cr 1020-1023"))
                .fails(2, &["--cpu-range: none of these"]);
        }
    }
    // A processor list also sets the number of threads.
    let report = with_model(
        &model,
        &format!("bench -m M -p 4 -n 0 -r 1 --no-peaks --json -Cr {last}-{last}"),
    )
    .json();
    assert_eq!(report["results"][0]["threads"], 1);
    with_model(&model, "bench -m M --compare /bin/true --poll 0")
        .fails(2, &["--compare", "--poll"]);
}
