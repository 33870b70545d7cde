//! ggml plugins: invalid ones are rejected with a reason, real ones compute the same results.

use crate::{Run, command, samite};
use samite_testing::skipped;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Returns the output of `samite devices -v` with plugins in `path`.
fn devices(path: &Path) -> String {
    with_plugins(path, &["devices", "-v"]).ok()
}

fn with_plugins(path: &Path, arguments: &[&str]) -> Run {
    Run::new(plugin_command(path, arguments).output().unwrap())
}

/// Returns the program with plugins in `path`, with the disk cache of plugin checks in a folder of
/// this test run.
fn plugin_command(path: &Path, arguments: &[&str]) -> Command {
    static CACHE: OnceLock<PathBuf> = OnceLock::new();
    let cache = CACHE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugins-cache");
        let _ = std::fs::remove_dir_all(&folder);
        folder
    });
    let mut command = command(arguments);
    // Unset other named libraries, so that none causes a warning.
    command.env_remove("SAMITE_BLAS_PATH");
    command.env("SAMITE_BACKEND_PATH", path);
    command.env("XDG_CACHE_HOME", cache);
    command
}

/// Returns why the file was rejected.
#[track_caller]
fn refused(path: &Path) -> String {
    let text = devices(path);
    assert!(text.contains("* cpu "), "the program goes on: {text}");
    let start = format!("not usable: {}: ", path.display());
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(&start));
    line.unwrap_or_else(|| panic!("no reason for {} in:\n{text}", path.display()))
        .to_owned()
}

/// Returns the names of the unusable files in `folder`. The output also lists other libraries that
/// the machine lacks.
fn refused_in(text: &str, folder: &Path) -> Vec<String> {
    let start = format!("not usable: {}/", folder.display());
    let lines = text.lines();
    let rest = lines.filter_map(|line| line.trim().strip_prefix(&start));
    let mut names: Vec<_> = rest
        .filter_map(|rest| Some(rest.split_once(": ")?.0.to_owned()))
        .collect();
    names.sort();
    names
}

/// Returns the path of the built-in model.
fn stories() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories/stories.gguf")
}

/// Builds a plugin library with these definitions.
fn build(directory: &Path, name: &str, definitions: &[&str]) -> Option<PathBuf> {
    let definitions = definitions.iter().map(|d| format!("-D{d}"));
    compile(directory, name, definitions)
}

/// Builds a plugin linked to a `libggml-base.so.0` that no longer exists.
fn build_alone(directory: &Path, name: &str, definitions: &[&str]) -> Option<PathBuf> {
    let elsewhere = tempfile::tempdir().unwrap();
    let soname = "-Wl,-soname,libggml-base.so.0".to_owned();
    let base = compile(elsewhere.path(), "base", ["-DBASE".into(), soname])?;
    let definitions = definitions.iter().map(|d| format!("-D{d}"));
    let linked = ["-DNO_BASE".to_owned(), "-Wl,--no-as-needed".into()].into_iter();
    compile(
        directory,
        name,
        linked.chain([base.to_str()?.to_owned()]).chain(definitions),
    )
}

fn compile(
    directory: &Path,
    name: &str,
    flags: impl IntoIterator<Item = String>,
) -> Option<PathBuf> {
    compile_file(
        "plugin.c",
        directory.join(format!("libggml-{name}.so")),
        flags,
    )
}

/// Compiles a fixture to a library at `path`.
fn compile_file(
    source: &str,
    path: PathBuf,
    flags: impl IntoIterator<Item = String>,
) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let source = folder.join(source);
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut cc = Command::new(compiler);
    cc.args(["-shared", "-fPIC", "-o"]).arg(&path).arg(source);
    match cc.args(flags).status() {
        Ok(status) => assert!(status.success(), "the fixture does not compile"),
        Err(error) => {
            skipped(format_args!("no C compiler ({error})"));
            return None;
        }
    }
    Some(path)
}

#[test]
fn files_that_are_not_plugins_are_refused() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let text = path("libggml-text.so");
    std::fs::write(&text, "not a library\n".repeat(100)).unwrap();
    assert!(refused(&text).contains("invalid ELF header") || cfg!(not(target_os = "linux")));
    let folder = path("libggml-folder.so");
    std::fs::create_dir(&folder).unwrap();
    assert_eq!(refused(&folder), "a directory, not a library");
    let link = path("libggml-link.so");
    symlink(path("nowhere"), &link).unwrap();
    assert_eq!(refused(&link), "a link to a file that does not exist");
    assert!(refused(&path("libggml-missing.so")).contains("No such file"));
    let open = path("libggml-open.so");
    std::fs::write(&open, "").unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert!(refused(&open).contains("everybody can write"));
    assert_eq!(
        refused(Path::new("libggml-cpu.so")),
        "the path is not absolute"
    );
    // All of them together, given by their folder.
    let text = devices(dir.path());
    let four = ["folder", "link", "open", "text"].map(|name| format!("libggml-{name}.so"));
    assert_eq!(refused_in(&text, dir.path()), four, "{text}");
}

#[test]
fn plugins_that_fail_the_handshake_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str], &str); 9] = [
        ("noinit", &["NO_INIT"], "ggml_backend_init is missing"),
        ("nobase", &["NO_BASE"], "comes without libggml-base"),
        (
            "old",
            &["VERSION=\"0.24.9\""],
            "ggml 0.24.9: the plugin interface of this version is not known",
        ),
        (
            "newer",
            &["VERSION=\"0.29.0\""],
            "known are 0.25, 0.26, 0.27, 0.28",
        ),
        (
            "api",
            &["API=99"],
            "its interface has version 99; that of ggml 0.25.1 is 2",
        ),
        (
            "mixed",
            &["VERSION=\"0.26.0\""],
            "its interface has version 2; that of ggml 0.26.0 is 3",
        ),
        ("score", &["SCORE=0"], "score 0"),
        ("null", &["NOTHING"], "ggml_backend_init returned nothing"),
        ("table", &[], "its registration lacks functions"),
    ];
    for (name, definitions, reason) in cases {
        let Some(path) = build(dir.path(), name, definitions) else {
            return;
        };
        let found = refused(&path);
        assert!(found.contains(reason), "{name}: {found}");
    }
}

#[test]
fn plugins_that_kill_the_probe_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, definitions, reason) in [
        ("abort", "ABORT", "signal 6"),
        ("load", "ABORT_ON_LOAD", "signal 6"),
        ("exit", "EXIT", "without an answer"),
    ] {
        let Some(path) = build(dir.path(), name, &[definitions]) else {
            return;
        };
        let found = refused(&path);
        assert!(found.contains(reason), "{name}: {found}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn plugins_without_libggml_base_pass_the_same_handshake() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&str, &[&str], &str); 5] = [
        (
            "api",
            &["API=99"],
            "works as no known release of ggml: its interface has version 99",
        ),
        (
            "old",
            &["API=1"],
            "its interface has version 1; it is taken for ggml 0.25, whose interface is 2",
        ),
        (
            "symbol",
            &["IMPORT"],
            "undefined symbol: ggml_no_such_function",
        ),
        ("gives-up", &["GIVE_UP"], "signal 6"),
        ("table", &[], "its registration lacks functions"),
    ];
    for (name, definitions, reason) in cases {
        let Some(path) = build_alone(dir.path(), name, definitions) else {
            return;
        };
        let found = refused(&path);
        assert!(found.contains(reason), "{name}: {found}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_plugin_with_wrong_known_answers_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let Some(right) = build_alone(dir.path(), "right", &["DEVICE"]) else {
        return;
    };
    let text = devices(&right);
    assert!(text.contains("  ggml:Fixture "), "{text}");
    // Operation numbers of another release, and a structure of another size.
    for (name, definition, reason) in [
        ("factor", "FACTOR=3", "ggml:Fixture does not compute scale"),
        ("size", "DATA=320", "signal 11"),
    ] {
        let path = build_alone(dir.path(), name, &["DEVICE", definition]).unwrap();
        let found = refused(&path);
        assert!(found.contains(reason), "{name}: {found}");
    }
    // The valid one is used in spite of the others.
    let text = devices(dir.path());
    assert!(text.contains("  ggml:Fixture "), "{text}");
    let two = ["libggml-factor.so", "libggml-size.so"];
    assert_eq!(refused_in(&text, dir.path()), two, "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn device_parameters_reach_the_plugin() {
    let dir = tempfile::tempdir().unwrap();
    let Some(plugin) = build_alone(dir.path(), "fixture", &["DEVICE"]) else {
        return;
    };
    let scale = |device: &str| {
        let arguments = ["test-ops", "--device", device, "-f", "scale", "-t", "1"];
        with_plugins(&plugin, &arguments)
    };
    assert!(scale("ggml:Fixture").ok().contains("scale"));
    assert!(scale("GGML:fixture:factor=1").ok().contains("scale"));
    assert_eq!(
        scale("ggml:Fixture:factor=3").code,
        Some(1),
        "other results"
    );
    let refused = "device 'ggml:Fixture': the plugin refuses the parameters 'colour=red,x=1'";
    scale("ggml:Fixture:colour=red,x=1,cpu").fails(2, &[refused]);
    scale("cpu:threads=1").ok();
    scale("cpu:threads=0").fails(2, &["'threads' is '0'", "from 1 to"]);
    scale("cpu:colour=red").fails(
        2,
        &["device 'cpu' has no parameter 'colour'; it has: cores, memory, threads"],
    );
}

/// Returns the log of the fixture's device during a successful run: words with two numbers.
#[cfg(target_os = "linux")]
fn logged(plugin: &Path, line: &str) -> Vec<(String, usize, usize)> {
    let log = |line: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let arguments: Vec<_> = line.split_whitespace().collect();
        let mut command = plugin_command(plugin, &arguments);
        Run::new(command.env("FIXTURE_LOG", file.path()).output().unwrap()).ok();
        let text = std::fs::read_to_string(file.path()).unwrap();
        let line = |line: &str| {
            let words: Vec<_> = line.split(' ').collect();
            let number = |i: usize| words[i].parse().unwrap();
            (words[0].to_owned(), number(1), number(2))
        };
        text.lines().map(line).collect::<Vec<_>>()
    };
    // The plugin is first checked in a separate process, and computes known results whenever it is
    // loaded.
    with_plugins(plugin, &["devices"]).ok();
    let loaded = log("devices");
    let mut run = log(line);
    let begin: Vec<_> = run.drain(..loaded.len()).collect();
    assert_eq!(begin, loaded);
    run
}

#[cfg(target_os = "linux")]
#[test]
fn a_plugin_uses_the_requested_thread_count() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["DEVICE", "GPU", "THREADS"];
    let Some(plugin) = build_alone(dir.path(), "fixture", &flags) else {
        return;
    };
    let (_dir, model) = crate::tiny();
    let line = format!("run -m {} -p abcdefgh -n 3 --temp 0 -q", model.display());
    for (flags, one, several) in [
        ("--device ggml:Fixture,cpu -t 3", 3, 3),
        ("--device ggml:Fixture,cpu -t 2 -tb 5", 2, 5),
        ("--device ggml:Fixture,cpu -t 5 -tb 2", 5, 2),
        // The device's own thread count is the maximum.
        ("--device ggml:Fixture:threads=4,cpu -t 3 -tb 7", 3, 4),
    ] {
        let log = logged(&plugin, &format!("{line} {flags}"));
        let threads = |of_one: bool| {
            let products = log.iter().filter(|(word, ..)| word == "product");
            let wanted = products.filter(|(.., columns)| (*columns == 1) == of_one);
            wanted.map(|(_, threads, _)| *threads).collect::<Vec<_>>()
        };
        let prompt = threads(false);
        assert!(
            prompt.len() >= 7 && prompt.iter().all(|&n| n == several),
            "{flags}: {log:?}"
        );
        // The last product of a prompt also has a single column.
        let single = threads(true);
        assert!(
            single.iter().filter(|&&n| n == one).count() >= 2 * 7,
            "{flags}: {log:?}"
        );
        let known = |n: &usize| *n == one || *n == several;
        assert!(single.iter().all(known), "{flags}: {log:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn prefill_is_offloaded_to_a_plugin_with_the_planned_memory() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["DEVICE", "GPU", "MEMORY", "OFFLOAD=32"];
    let Some(plugin) = build_alone(dir.path(), "fixture", &flags) else {
        return;
    };
    let (_dir, model) = crate::tiny();
    let model = model.display();
    // Weights stay on the host, packed by default.
    let place = "--device ggml:Fixture,cpu -ngl 0 -c 600";
    let plan = |flags: &str| {
        let line = format!("plan -m {model} {place} --json {flags}");
        let arguments: Vec<_> = line.split_whitespace().collect();
        with_plugins(&plugin, &arguments).json()
    };
    let prompt = "a".repeat(512);
    let run = |flags: &str| {
        logged(
            &plugin,
            &format!("run -m {model} -p {prompt} -n 4 --ignore-eos --temp 0 -q {place} {flags}"),
        )
    };
    let columns = |log: &[(String, usize, usize)]| {
        let products = log.iter().filter(|(word, ..)| word == "product");
        products.map(|(.., columns)| *columns).collect::<Vec<_>>()
    };
    let log = run("");
    let wide = columns(&log);
    // Seven products in each layer of a full micro-batch, and none of the tokens after it.
    assert!(wide.iter().filter(|&&n| n == 512).count() >= 7, "{wide:?}");
    assert!(wide.iter().all(|&n| n >= 32), "{wide:?}");
    assert_eq!(columns(&run("--no-op-offload")), [0; 0]);

    let memory = plan("--tokens 512");
    let rows = memory["memory"].as_array().unwrap();
    let row = rows.iter().find(|row| row["memory"] == "ggml:Fixture");
    let row = row.unwrap_or_else(|| panic!("{rows:?}"));
    let bytes = |what: &str| row[what].as_u64().unwrap() as usize;
    assert_eq!((bytes("weights"), bytes("kv")), (0, 0), "{row}");
    let (mut now, mut most) = (0, 0);
    for (word, bytes, _) in &log {
        match &**word {
            "allocate" => now += bytes,
            "free" => now -= bytes,
            _ => {}
        }
        most = most.max(now);
    }
    assert_eq!((most, now), (bytes("compute"), 0), "{rows:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn weights_refused_by_a_plugin_are_named_and_fall_back_to_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let Some(plugin) = build_alone(dir.path(), "fixture", &["DEVICE", "GPU"]) else {
        return;
    };
    // It only multiplies floats.
    let model = dir.path().join("q8.gguf");
    let shape = samite::llm::SyntheticModel {
        dtype: samite::DType::Q8_0,
        ..samite::llm::SyntheticModel::tiny("llama")
    };
    shape.write(&model).unwrap();
    let run = |flags: &str| {
        let line = format!("run -m {} -p ab -n 1 --fit off {flags}", model.display());
        with_plugins(&plugin, &line.split_whitespace().collect::<Vec<_>>())
    };
    let first = "tensor 'blk.0.attn_q.weight' of type q8_0";
    let reason = "belongs on ggml:Fixture, which refuses it: the plugin says";
    for (rule, what) in [
        // Of several, one is named and the others are counted.
        ("--place layers=0-:ggml:Fixture", "tensor '"),
        ("-ngl 99", "tensor '"),
        ("-ngl 0 -ot attn_q=GGML:fixture", first),
    ] {
        let parts = [what, reason];
        for device in ["--device ggml:Fixture,cpu", "--device ggml:Fixture"] {
            let warned = run(&format!("{device} {rule}"));
            let warnings = warned.stderr.clone();
            warned.ok();
            for part in parts {
                assert!(
                    warnings.contains(part),
                    "{device} {rule}: no {part} in {warnings}"
                );
            }
            run(&format!("{device} {rule} --fallback deny")).fails(2, &parts);
            let allowed = run(&format!("{device} {rule} --fallback allow"));
            assert!(!allowed.stderr.contains("refuses"), "{}", allowed.stderr);
            allowed.ok();
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn flags_select_and_exclude_plugins() {
    let dir = tempfile::tempdir().unwrap();
    let Some(plugin) = build_alone(dir.path(), "fixture", &["DEVICE"]) else {
        return;
    };
    // A plugin that would kill the process that checks it with a signal.
    let Some(bad) = build_alone(dir.path(), "bad", &["ABORT_ON_LOAD"]) else {
        return;
    };
    let file = plugin.file_name().unwrap().to_str().unwrap();
    let mut relative = command(["devices", "--plugin", file]);
    let text = Run::new(relative.current_dir(dir.path()).output().unwrap()).ok();
    assert!(text.contains("  ggml:Fixture "), "{text}");

    let text = with_plugins(dir.path(), &["devices", "-v", "--disable", "BAD,reference"]).ok();
    assert!(text.contains("  ggml:Fixture "), "{text}");
    assert!(!text.contains("  reference "), "{text}");
    let line = format!("not usable: {}: it is disabled", bad.display());
    assert!(text.contains(&line) && !text.contains("signal"), "{text}");

    let mut devices = plugin_command(dir.path(), &["devices", "-v", "--disable", "ggml:bad"]);
    devices.env("SAMITE_DISABLE", "fixture, blas");
    let text = Run::new(devices.output().unwrap()).ok();
    assert!(!text.contains("  ggml:"), "{text}");
    assert!(text.contains("backend blas\n    disabled"), "{text}");
    assert_eq!(text.matches("it is disabled").count(), 2, "{text}");
    // Unknown names are reported together with the existing ones.
    let run = with_plugins(dir.path(), &["devices", "--disable", "nope,blas,bad"]);
    let warning = "warning: no backend is called 'nope', so none of that name was disabled; \
                   there are: blas, cpu, cuda, cuda-emu, ggml, reference, remote, rpc, ";
    // A build with more features lists more.
    let rest = run.stderr.trim().strip_prefix(warning);
    assert!(
        rest.is_some_and(|rest| rest.ends_with("and the plugins bad, fixture")),
        "{}",
        run.stderr
    );
    run.ok();
    // The backend is disabled, and commands that need it report this.
    samite(["run", "--disable", "cpu", "--device", "cpu", "-p", "x"])
        .fails(2, &["there is no device 'cpu'", "cpu is disabled"]);
}

#[test]
fn a_named_but_unusable_plugin_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let Some(old) = build(dir.path(), "old", &["VERSION=\"0.24.9\""]) else {
        return;
    };
    let warning = format!("warning: {} cannot be used: ggml 0.24.9", old.display());
    for arguments in [&["devices"] as &[_], &["plan", "--device", "cpu"]] {
        let run = with_plugins(&old, arguments);
        assert!(run.stderr.contains(&warning), "{}", run.stderr);
        run.ok();
    }
    let reason = format!("{}: ggml 0.24.9: the plugin interface", old.display());
    with_plugins(&old, &["plan", "--device", "npu"]).fails(2, &["no device 'npu'", &reason]);
    // In a folder, it is one of many, and only reported when a command uses ggml's devices.
    let run = with_plugins(dir.path(), &["devices"]);
    assert_eq!(run.stderr, "");
    run.ok();
    let from = |device: &str| with_plugins(dir.path(), &["plan", "--device", device]);
    from("ggml:npu").fails(2, &["no device 'ggml:npu'", &reason]);
    assert!(!from("npu").stderr.contains("0.24.9"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_plugin_is_automatic_after_computing_a_small_graph_correctly() {
    let dir = tempfile::tempdir().unwrap();
    let Some(right) = build_alone(dir.path(), "right", &["DEVICE", "GPU"]) else {
        return;
    };
    let text = devices(&right);
    assert!(text.contains("* ggml:Fixture "), "{text}");
    assert!(!text.contains("only when it is named"), "{text}");
    // Single operations are correct in all of these, so they pass the check.
    for (name, definition, reason) in [
        (
            "ends",
            "GRAPH=abort()",
            "it killed the process that tried it (signal 6)",
        ),
        (
            "fails",
            "GRAPH=return -1",
            "it fails on a small graph: ggml:Fixture: ",
        ),
        (
            "wrong",
            "GRAPH=*(float*)row(graph->nodes[0],0)=7;graph->node_count=1",
            "it computes a small graph wrong: element ",
        ),
    ] {
        let path = build_alone(dir.path(), name, &["DEVICE", "GPU", definition]).unwrap();
        let text = devices(&path);
        assert!(text.contains("  ggml:Fixture "), "{name}: {text}");
        let line = format!("ggml:Fixture is used only when it is named: {reason}");
        assert!(text.contains(&line), "{name}: {text}");
        let run = with_plugins(&path, &["plan", "--device", "ggml:Fixture,cpu"]);
        let warning =
            format!("warning: device 'ggml:Fixture' is used because it was named: {reason}");
        assert!(run.stderr.contains(&warning), "{name}: {}", run.stderr);
        run.ok();
        // Devices that the command does not name cause no message.
        assert_eq!(with_plugins(&path, &["plan"]).stderr, "", "{name}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn plugin_check_results_are_cached_until_the_file_changes() {
    let dir = tempfile::tempdir().unwrap();
    let noted = dir.path().join("graphs");
    let graph = format!(
        "GRAPH=FILE*f=fopen(\"{}\",\"a\");fputc(120,f);fclose(f)",
        noted.display()
    );
    let Some(plugin) = build_alone(dir.path(), "fixture", &["DEVICE", "GPU", &graph]) else {
        return;
    };
    let graphs = || std::fs::metadata(&noted).unwrap().len();
    for _ in 0..3 {
        assert!(devices(&plugin).contains("* ggml:Fixture "));
        assert_eq!(graphs(), 1);
    }
    let file = std::fs::File::options().append(true).open(&plugin).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert!(devices(&plugin).contains("* ggml:Fixture "));
    assert_eq!(graphs(), 2);
}

/// Returns the names of ggml's devices, in the order of `samite devices`.
fn names(text: &str) -> Vec<&str> {
    let names = text.lines().take_while(|line| !line.is_empty());
    let names = names.filter_map(|line| line.get(2..)?.split_whitespace().next());
    names
        .filter_map(|name| name.strip_prefix("ggml:"))
        .collect()
}

#[cfg(target_os = "linux")]
#[test]
fn one_variant_of_each_plugin_is_used_in_ggml_order() {
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [first, second, third] = folders.each_ref().map(tempfile::TempDir::path);
    for (folder, file, name, score) in [
        (first, "cpu-one", "One", 3),
        (second, "cpu-two", "Two", 7),
        (second, "cpu-three", "Three", 0),
        (second, "cpu-four", "Four", 7),
        (first, "opencl", "Cl", 1),
        (second, "vulkan", "Vk", 1),
        (third, "zzz", "Zzz", 1),
        (third, "other", "Other", 1),
    ] {
        let (name, score) = (format!("NAME=\"{name}\""), format!("SCORE={score}"));
        let definitions = ["DEVICE", &name, &score];
        if build_alone(folder, file, &definitions).is_none() {
            return;
        }
    }
    // Two folders and a file.
    let file = third.join("libggml-zzz.so");
    let path = std::env::join_paths([first, second, &file]).unwrap();
    let text = devices(Path::new(&path));
    // First the named file, then ggml's order; the first of equal variants.
    assert_eq!(names(&text), ["Zzz", "Vk", "Cl", "Four"], "{text}");
    let four = second.join("libggml-cpu-four.so");
    for (folder, file, reason) in [
        (
            first,
            "one",
            format!("score 3: {} fits better, with 7", four.display()),
        ),
        (
            second,
            "two",
            format!("score 7: {} fits better, with 7", four.display()),
        ),
        (
            second,
            "three",
            "score 0: it cannot run on this processor".to_owned(),
        ),
    ] {
        let file = folder.join(format!("libggml-cpu-{file}.so"));
        let line = format!("not usable: {}: {reason}", file.display());
        assert!(text.contains(&line), "no {line:?} in {text}");
    }
    assert!(!text.contains("Other"), "nobody named its folder: {text}");
    // A named variant is used regardless of its score.
    let one = first.join("libggml-cpu-one.so");
    let path = std::env::join_paths([second, &*one]).unwrap();
    assert_eq!(names(&devices(Path::new(&path))), ["One", "Vk"]);
}

#[cfg(target_os = "linux")]
#[test]
fn plugins_next_to_the_program_are_found() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(_) = build_alone(folder.path(), "beside", &["DEVICE"]) else {
        return;
    };
    let program = folder.path().join("samite");
    std::fs::hard_link(env!("CARGO_BIN_EXE_samite"), &program).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    // The current folder is not searched.
    build_alone(elsewhere.path(), "current", &["DEVICE", "NAME=\"Current\""]).unwrap();
    let mut command = crate::child(program);
    command.arg("devices").current_dir(elsewhere.path());
    command.env("XDG_CACHE_HOME", folder.path());
    let text = Run::new(command.output().unwrap()).ok();
    assert_eq!(names(&text), ["Fixture"], "{text}");
}

/// Returns the folder with upstream's prebuilt plugins, if the environment names one.
fn peers() -> Option<PathBuf> {
    let folder = std::env::var_os("SAMITE_TEST_GGML_PLUGINS");
    if folder.is_none() {
        skipped("SAMITE_TEST_GGML_PLUGINS does not name a folder with libggml-cpu-*.so");
    }
    folder.map(PathBuf::from)
}

#[test]
fn the_best_upstream_plugin_variant_is_a_device() {
    let Some(peers) = peers() else { return };
    let text = devices(&peers);
    assert!(text.contains("  ggml:CPU "), "{text}");
    assert!(
        text.contains("fits better"),
        "other variants are listed: {text}"
    );
    // Only the best variant is used, and only if it is named.
    assert_eq!(text.matches("  ggml:CPU ").count(), 1, "{text}");
    let report = with_plugins(
        &peers,
        &["test-ops", "--device", "ggml:CPU", "-f", "rms_norm"],
    )
    .ok();
    assert!(report.contains("rms_norm"), "{report}");
}

/// Generates sixty greedy tokens with plugins in `folder`. This story has no two tokens of nearly
/// equal probability, so it does not depend on rounding.
fn greedy(folder: &Path, model: &Path, flags: &[&str]) -> String {
    let mut arguments = vec![
        "run",
        "-p",
        "The little dog",
        "--temp",
        "0",
        "-q",
        "-n",
        "60",
    ];
    arguments.extend(["-m", model.to_str().unwrap()]);
    with_plugins(folder, &[&arguments, flags].concat()).ok()
}

/// Copies upstream's plugins for this processor into a separate folder, without their
/// `libggml-base`.
fn alone(peers: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(peers).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("libggml-cpu") {
            std::fs::copy(&path, folder.path().join(name)).unwrap();
        }
    }
    folder
}

#[test]
fn a_plugin_works_without_its_libggml_base() {
    let Some(peers) = peers() else { return };
    let model = stories();
    let alone = alone(&peers);
    let text = devices(alone.path());
    assert!(text.contains("  ggml:CPU "), "{text}");
    assert!(
        text.contains("(ggml 0.25 on samite's libggml-base, score "),
        "{text}"
    );
    let expected = greedy(&peers, &model, &["--device", "cpu"]);
    assert!(expected.len() > 100, "{expected}");
    for flags in [
        &["--device", "ggml:CPU"] as &[_],
        &["--device", "ggml:CPU", "-t", "2"],
        &["--device", "ggml:CPU,cpu", "--place", "layers=0-1:ggml:CPU"],
    ] {
        assert_eq!(greedy(alone.path(), &model, flags), expected, "{flags:?}");
    }
}

#[test]
fn samite_libggml_base_matches_upstream() {
    let Some(peers) = peers() else { return };
    let alone = alone(&peers);
    // Includes conversions from and to every type; the other operations need little of it.
    for operation in ["cpy", "get_rows", "set_rows", "rope", "glu"] {
        let arguments = ["test-ops", "--device", "ggml:CPU", "-f", operation];
        let [with, without] = [&*peers, alone.path()].map(|path| with_plugins(path, &arguments));
        assert!(
            with.stdout.lines().count() > 1,
            "{operation}: {}",
            with.stdout
        );
        assert_eq!(with.stdout, without.stdout, "{operation}");
    }
}

#[test]
fn the_upstream_plugin_generates_the_same_text() {
    let Some(peers) = peers() else { return };
    let model = stories();
    let text = |flags: &[&str]| greedy(&peers, &model, flags);
    let expected = text(&["--device", "cpu"]);
    assert!(expected.len() > 100, "{expected}");
    for flags in [
        &["--device", "ggml:CPU"] as &[_],
        &["--device", "ggml:CPU", "-t", "2"],
        &[
            "--device",
            "ggml:CPU,cpu",
            "--place",
            "layers=0-1:ggml:CPU;layers=2-4:cpu",
        ],
        &[
            "--device",
            "cpu,ggml:CPU",
            "--place",
            "layers=0-2:cpu",
            "--copies",
            "4",
        ],
        &[
            "--device",
            "ggml:CPU,reference",
            "--place",
            "layers=0-2:ggml:CPU",
        ],
        &["--device", "ggml:CPU", "--no-flash"],
        &["--device", "ggml:CPU", "--load-mode", "read"],
    ] {
        assert_eq!(text(flags), expected, "{flags:?}");
    }
}

#[test]
fn the_upstream_plugin_is_compared_node_by_node() {
    let Some(peers) = peers() else { return };
    let model = stories();
    let compare = |pair: &str| {
        let flags = ["compare", "-m", model.to_str().unwrap(), "--device", pair];
        with_plugins(&peers, &flags).ok()
    };
    for pair in ["ggml:CPU,reference", "cpu,ggml:CPU", "ggml:CPU,cpu"] {
        let text = compare(pair);
        assert!(
            text.contains(" in 2 steps, 0 beyond 1e-3"),
            "{pair}: {text}"
        );
    }
}

#[test]
fn the_upstream_vulkan_plugin_generates_the_same_text() {
    let Some(folder) = std::env::var_os("SAMITE_TEST_GGML_VULKAN") else {
        skipped("SAMITE_TEST_GGML_VULKAN does not name a folder with libggml-vulkan.so");
        return;
    };
    let model = stories();
    // Queues, events and memory that only the plugin can access.
    let folder = Path::new(&folder);
    let text = devices(folder);
    assert!(
        text.contains("ggml:Vulkan0: memory 'ggml:Vulkan0'; asynchronous, events"),
        "{text}"
    );
    let expected = greedy(folder, &model, &["--device", "cpu"]);
    for flags in [
        &["--device", "ggml:Vulkan0,cpu"] as &[_],
        &[
            "--device",
            "ggml:Vulkan0,cpu",
            "--place",
            "layers=0-1:ggml:Vulkan0",
            "--copies",
            "4",
        ],
    ] {
        assert_eq!(greedy(folder, &model, flags), expected, "{flags:?}");
    }
}

#[test]
fn a_hanging_library_does_not_block_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let Some(library) = compile_file("blas.c", dir.path().join("libblas.so"), []) else {
        return;
    };
    let output = command(["devices", "-v"])
        .env("SAMITE_BLAS_PATH", &library)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("libblas.so"),
        "{text}"
    );
}

#[test]
fn a_missing_library_is_reported_with_the_reason() {
    let output = command(["devices", "-v"])
        .env("SAMITE_BLAS_PATH", "/nowhere/libblas.so")
        .output()
        .unwrap();
    let text = Run::new(output).ok();
    let line = "not usable: /nowhere/libblas.so: ";
    let line = text.lines().find(|l| l.contains(line)).unwrap();
    assert!(
        line.contains("No such file") || cfg!(not(target_os = "linux")),
        "{line}"
    );
}
