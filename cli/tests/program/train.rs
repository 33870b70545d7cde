//! `samite train`, from a configuration to a model that runs.

use crate::{Run, listing, samite};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const CONFIG: &str = r#"
name = "tiny"
seed = 5
[model]
vocabulary = 320
layers = 2
width = 32
heads = 4
kv_heads = 2
feed_forward = 64
context = 16
[data]
train = "train.txt"
held_out = "held-out.txt"
[training]
steps = 8
batch = 2
schedule = { rate = 0.01, warmup = 2 }
clip = 1.0
evaluate_every = 4
evaluate_batches = 2
checkpoint_every = 2
"#;

/// Configuration that replaces `[model]` to train an adapter for an existing model.
const LORA: &str = r#"
[lora]
base = "base/model.gguf"
rank = 4
alpha = 8.0
targets = ["attn_q", "attn_v", "ffn_down"]
context = 16
"#;

/// Creates a folder with stories and a configuration.
fn project() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let config = write_project(dir.path());
    (dir, config)
}

/// Writes stories and a configuration.
pub fn write_project(dir: &Path) -> PathBuf {
    let stories = |seed, count| -> String {
        let lines = (0..count).map(|index| samite_stories::story(seed, index) + "\n");
        lines.collect()
    };
    std::fs::write(dir.join("train.txt"), stories(1, 40)).unwrap();
    std::fs::write(dir.join("held-out.txt"), stories(2, 5)).unwrap();
    let config = dir.join("train.toml");
    std::fs::write(&config, CONFIG).unwrap();
    config
}

fn train(config: &Path, out: &Path, flags: &str) -> Run {
    let words = [
        "train".as_ref(),
        config.as_os_str(),
        "-o".as_ref(),
        out.as_os_str(),
    ];
    samite(
        words
            .into_iter()
            .chain(flags.split_whitespace().map(|word| word.as_ref())),
    )
}

#[test]
fn a_stopped_run_resumes_exactly() {
    let (dir, config) = project();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let run = train(&config, &whole, "-t 1");
    assert!(run.stderr.contains("step 8: loss"), "{}", run.stderr);
    assert!(run.stderr.contains("  Once upon a time"), "{}", run.stderr);
    run.ok();
    assert_eq!(
        listing(&whole),
        ["checkpoint.gguf", "loss.csv", "loss.svg", "model.gguf"]
    );
    let stopped = train(&config, &parts, "--stop-after 3 -t 2 --sample=");
    assert!(
        stopped
            .stderr
            .ends_with("stopped at step 3; go on with --resume\n"),
        "{}",
        stopped.stderr
    );
    assert!(
        !stopped.stderr.contains("interrupted"),
        "{}",
        stopped.stderr
    );
    stopped.ok();
    train(&config, &parts, "-t 2").fails(2, &["--resume"]);
    train(&config, &parts, "--resume -t 2 --sample=").ok();
    for file in ["checkpoint.gguf", "loss.csv", "loss.svg", "model.gguf"] {
        let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert!(read(&whole) == read(&parts), "{file} differs");
    }
    let table = std::fs::read_to_string(whole.join("loss.csv")).unwrap();
    assert_eq!(table.lines().count(), 9);
    let model = whole.join("model.gguf");
    let text = samite([
        "run".as_ref(),
        "-m".as_ref(),
        model.as_os_str(),
        "-n".as_ref(),
        "5".as_ref(),
        "One".as_ref(),
    ]);
    assert!(text.ok().starts_with("One"));
}

/// Creates a project with a trained model in `base`, and the configuration of an adapter for it.
fn adapter_project() -> (TempDir, PathBuf) {
    let (dir, config) = project();
    train(&config, &dir.path().join("base"), "-t 1 --sample=").ok();
    let (head, rest) = CONFIG.split_once("[model]").unwrap();
    let (_, rest) = rest.split_once("[data]").unwrap();
    let rest = rest.replacen("rate = 0.01", "rate = 0.1", 1);
    let config = dir.path().join("lora.toml");
    std::fs::write(&config, format!("{head}{LORA}[data]{rest}")).unwrap();
    (dir, config)
}

#[test]
fn an_adapter_is_trained_run_and_merged() {
    let (dir, config) = adapter_project();
    let (whole, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    let run = train(&config, &whole, "-t 1");
    assert!(run.stderr.contains("the adapter is"), "{}", run.stderr);
    run.ok();
    assert_eq!(
        listing(&whole),
        ["adapter.gguf", "checkpoint.gguf", "loss.csv", "loss.svg"]
    );
    train(&config, &parts, "--stop-after 5 -t 1 --sample=").ok();
    train(&config, &parts, "--resume -t 1 --sample=").ok();
    for file in ["adapter.gguf", "checkpoint.gguf"] {
        let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert!(read(&whole) == read(&parts), "{file} differs");
    }

    let (base, adapter) = (
        dir.path().join("base/model.gguf"),
        whole.join("adapter.gguf"),
    );
    let (base, adapter) = (base.to_str().unwrap(), adapter.to_str().unwrap());
    let write = |model: &str, flags: &[String]| {
        let fixed = [
            "run", "-m", model, "-q", "-n", "20", "--temp", "0", "One day",
        ];
        let flags = flags.iter().map(String::as_str);
        samite(fixed.into_iter().chain(flags))
    };
    let plain = write(base, &[]).ok();
    let adapted = write(base, &[format!("--lora={adapter}")]).ok();
    assert_ne!(adapted, plain);
    let scaled = |scale: &str| write(base, &[format!("--lora-scaled={adapter}:{scale}")]);
    assert_eq!(scaled("1").ok(), adapted);
    assert_eq!(scaled("0").ok(), plain);
    let twice = [
        format!("--lora={adapter}"),
        format!("--lora-scaled={adapter}:-1,{adapter}:1"),
    ];
    assert_eq!(write(base, &twice).ok(), adapted);
    scaled("x").fails(2, &["--lora-scaled", "'x' is not a number"]);
    scaled("nan").fails(2, &["--lora-scaled", "'nan' is not a number"]);
    write(base, &["--lora-scaled=file".to_owned()]).fails(2, &["a file and a number"]);
    write(base, &[format!("--lora={base}")]).fails(1, &["model.gguf", "is no adapter"]);
    write(base, &["--lora=missing.gguf".to_owned()]).fails(1, &["missing.gguf"]);

    let merged = dir.path().join("merged.gguf");
    let merged = merged.to_str().unwrap();
    let merge = |flags: &[&str]| samite(["merge-lora"].into_iter().chain(flags.iter().copied()));
    let text = merge(&[base, merged, "--lora", adapter]).ok();
    assert!(text.starts_with("6 of 20 tensors changed"), "{text}");
    assert_eq!(write(merged, &[]).ok(), adapted);
    merge(&[base, merged]).fails(2, &["--lora"]);
    merge(&[base, merged, "--lora", adapter, "--dtype", "q9"]).fails(2, &["--dtype", "q9"]);
    merge(&[base, base, "--lora", adapter]).fails(2, &["the same file"]);
    merge(&[base, "no/folder.gguf", "--lora", adapter]).fails(1, &["no/folder.gguf"]);

    // A model of another shape, and a missing model.
    let (_other, other) = crate::tiny();
    let other = other.to_str().unwrap();
    write(other, &[format!("--lora={adapter}")]).fails(1, &["adapter.gguf", "another model"]);
    std::fs::remove_file(base).unwrap();
    train(&config, &dir.path().join("none"), "").fails(1, &["base/model.gguf"]);
}

#[test]
fn configuration_errors_are_reported_before_training() {
    let (dir, config) = project();
    let out = dir.path().join("out");
    train(&config, &out, "--resume").fails(2, &["no checkpoint", "--resume"]);
    train(&config, &out, "--dtype q9").fails(2, &["--dtype", "q9"]);
    for (from, to, part) in [
        ("layers = 2", "layers = 0", "model.layers"),
        ("layers = 2", "layer = 2", "unknown field `layer`"),
        ("train.txt", "missing.txt", "missing.txt"),
        (
            "vocabulary = 320",
            "vocabulary = 270",
            "model.vocabulary is 270",
        ),
        ("context = 16", "context = 16000", "too few"),
    ] {
        let changed = dir.path().join("changed.toml");
        std::fs::write(&changed, CONFIG.replacen(from, to, 1)).unwrap();
        train(&changed, &out, "").fails(1, &[part]);
    }
    std::fs::write(dir.path().join("train.txt"), "").unwrap();
    train(&config, &out, "").fails(1, &["train.txt", "is empty"]);
}

const FILES: [&str; 4] = ["checkpoint.gguf", "loss.csv", "loss.svg", "model.gguf"];

#[track_caller]
fn same_files(a: &Path, b: &Path) {
    for folder in [a, b] {
        assert_eq!(listing(folder), FILES);
    }
    for file in FILES {
        let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert!(read(a) == read(b), "{file} differs");
    }
}

/// Writes the configuration with replacements.
pub fn changed(config: &Path, changes: &[(&str, &str)]) -> PathBuf {
    let mut text = std::fs::read_to_string(config).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{from}");
        text = text.replacen(from, to, 1);
    }
    let path = config.with_file_name("changed.toml");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn a_repeatedly_killed_run_reaches_the_same_result() {
    let (dir, config) = project();
    let changes = [
        ("steps = 8", "steps = 120"),
        ("evaluate_every = 4", "evaluate_every = 3"),
    ];
    let config = changed(&config, &changes);
    let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
    train(&config, &whole, "-t 1 --sample=").ok();
    let mut kills = 0;
    let mut seed = std::process::id();
    for _ in 0..100 {
        let resume = killed.join("checkpoint.gguf").exists();
        let mut words = vec!["train", config.to_str().unwrap(), "-t", "1", "--sample="];
        words.extend(["-o", killed.to_str().unwrap()]);
        words.extend(resume.then_some("--resume"));
        let mut child = crate::command(words)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Any moment from the start to about half of a run.
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let moment = std::time::Duration::from_millis(u64::from(seed >> 16) % 150);
        if kills < 8 {
            std::thread::sleep(moment);
            child.kill().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        let run = Run::new(output);
        match run.code {
            None => {
                assert_eq!(signal, Some(9), "it hangs");
                kills += 1;
            }
            Some(_) => {
                run.ok();
                break;
            }
        }
    }
    assert!(kills > 0);
    same_files(&whole, &killed);
}

/// Simulates a full disk with a limit on file size: writes beyond it fail.
#[cfg(unix)]
#[test]
fn a_full_disk_preserves_the_last_checkpoint() {
    let (dir, config) = project();
    let config = changed(&config, &[("evaluate_every = 4", "evaluate_every = 8")]);
    let (whole, full) = (dir.path().join("whole"), dir.path().join("full"));
    train(&config, &whole, "-t 1 --sample=").ok();
    train(&config, &full, "-t 1 --sample= --stop-after 3").ok();
    let before = std::fs::read(full.join("checkpoint.gguf")).unwrap();
    assert!(before.len() > 64 << 10);
    // Units are 512 or 1024 bytes.
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
    let output = crate::child("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_samite"), "train"])
        .arg(&config)
        .arg("-o")
        .arg(&full)
        .args(["--resume", "-t", "1", "--sample="])
        .output()
        .unwrap();
    let run = Run::new(output);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let error = run.stderr.lines().last().unwrap();
    assert!(
        error.starts_with("error: ") && error.contains("checkpoint.gguf"),
        "{error}"
    );
    assert!(error.contains("too large"), "{error}");
    assert!(std::fs::read(full.join("checkpoint.gguf")).unwrap() == before);
    assert_eq!(listing(&full), ["checkpoint.gguf", "loss.csv", "loss.svg"]);
    train(&config, &full, "--resume -t 1 --sample=").ok();
    same_files(&whole, &full);
}

/// Damage at any place is detected or has no effect on the following steps.
#[test]
fn a_damaged_checkpoint_is_refused() {
    let (dir, config) = project();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    train(&config, &whole, "-t 1 --sample= --stop-after 4").ok();
    train(&config, &out, "-t 1 --sample= --stop-after 3").ok();
    let path = out.join("checkpoint.gguf");
    let sound = std::fs::read(&path).unwrap();
    let table = std::fs::read(out.join("loss.csv")).unwrap();
    let mut seed = 7u32;
    let mut refused = 0;
    for _ in 0..40 {
        let mut bytes = sound.clone();
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let at = (seed >> 4) as usize % bytes.len();
        bytes[at] ^= 1 << (seed & 7);
        std::fs::write(&path, bytes).unwrap();
        std::fs::write(out.join("loss.csv"), &table).unwrap();
        let run = train(&config, &out, "--resume -t 1 --sample= --stop-after 4");
        if run.code == Some(0) {
            let read = |folder: &Path| std::fs::read(folder.join("checkpoint.gguf")).unwrap();
            assert!(read(&out) == read(&whole), "byte {at}");
        } else {
            run.fails(1, &["checkpoint.gguf"]);
            refused += 1;
        }
    }
    assert!(refused > 30, "{refused}");
}

#[test]
fn a_folder_is_locked_by_one_process() {
    let (dir, config) = project();
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let folder = std::fs::File::open(&out).unwrap();
    folder.lock().unwrap();
    train(&config, &out, "-t 1 --sample=").fails(1, &["another process trains", "another folder"]);
    assert_eq!(listing(&out), [""; 0]);
    // Processes that other tests start at this moment may have a copy of the handle, so that
    // dropping it would not end the lock at once.
    folder.unlock().unwrap();
    train(&config, &out, "-t 1 --sample=").ok();
}

#[test]
fn endless_training_data_is_refused() {
    let (dir, config) = project();
    let endless = changed(&config, &[("train.txt", "/dev/zero")]);
    let out = dir.path().join("out");
    train(&endless, &out, "").fails(1, &["/dev/zero", "is a device"]);
    for (text, part) in [
        ("[data]\nbatch = [3\n", "no.toml: line 2: "),
        ("\u{0}", "no.toml: line 1: "),
        (&"#".repeat((1 << 20) + 1), "no.toml: is no configuration"),
    ] {
        let no = dir.path().join("no.toml");
        std::fs::write(&no, text).unwrap();
        train(&no, &out, "").fails(1, &[part]);
    }
    let zero = Path::new("/dev/zero");
    train(zero, &out, "").fails(1, &["/dev/zero: is no configuration", "name a TOML file"]);
}

#[test]
fn training_failures_are_named() {
    let (dir, config) = project();
    let out = dir.path().join("out");
    let wild = changed(
        &config,
        &[
            ("rate = 0.01, warmup = 2", "rate = 1e30"),
            ("clip = 1.0", ""),
        ],
    );
    let run = train(&wild, &out, "-t 1 --sample=");
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let error = run.stderr.lines().last().unwrap();
    for part in [
        "error: step ",
        ": the loss is ",
        "the first result that is not finite is that of",
        "training.clip",
    ] {
        assert!(error.contains(part), "no {part:?} in: {error}");
    }
    // Its earlier progress is saved.
    train(
        &config,
        &dir.path().join("good"),
        "-t 1 --sample= --stop-after 3",
    )
    .ok();
    let good = dir.path().join("good");
    for (from, to, part) in [
        (
            "width = 32",
            "width = 64",
            "model.width was 32 there and is 64 here",
        ),
        ("seed = 5", "seed = 6", "seed was 5 there and is 6 here"),
    ] {
        let other = changed(&config, &[(from, to)]);
        train(&other, &good, "--resume").fails(1, &["checkpoint.gguf", "another run", part]);
    }
    let text = std::fs::read_to_string(dir.path().join("train.txt")).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    std::fs::write(dir.path().join("train.txt"), format!("{rest}{first}\n")).unwrap();
    train(&config, &good, "--resume").fails(1, &["checkpoint.gguf", "other data"]);
    std::fs::write(good.join("checkpoint.gguf"), "GGUF").unwrap();
    train(&config, &good, "--resume").fails(1, &["checkpoint.gguf"]);
    std::fs::write(dir.path().join("held-out.txt"), "\n").unwrap();
    train(&config, &dir.path().join("new"), "").fails(1, &["held-out.txt", "is empty"]);
}

#[test]
fn run_uses_the_embedded_model_by_default() {
    let text = samite(["run", "-n", "30", "--temp", "0", "-q", "Once upon a time"]).ok();
    assert!(text.starts_with("Once upon a time, "), "{text}");
    assert!(text.split_whitespace().count() > 15, "{text}");
    // Without a prompt, it starts by itself.
    assert!(samite(["run", "-n", "30", "-q"]).ok().len() > 30);
}
