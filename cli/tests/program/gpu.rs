//! GPUs through the feature `wgpu`, on any adapter; a software adapter suffices.

use crate::{Run, command, trained};
use samite_testing::skipped;
use std::path::Path;
use std::process::Command;

/// Returns the program with these arguments. A folder that drivers look for suppresses most of
/// their own output.
fn gpu_command(line: &str, model: Option<&Path>) -> Command {
    let words = line.split_whitespace().map(|word| match (word, model) {
        ("M", Some(model)) => model.as_os_str(),
        (word, _) => word.as_ref(),
    });
    let mut command = command(words);
    command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn run(line: &str, model: Option<&Path>) -> Run {
    Run::new(gpu_command(line, model).output().unwrap())
}

/// Returns whether an adapter exists, and reports a skipped test if not.
fn has_adapter() -> bool {
    let has = run("devices", None).ok().contains(" wgpu0 ");
    if !has {
        skipped("wgpu finds no adapter, not even a software one");
    }
    has
}

#[test]
fn the_gpu_and_any_split_generate_the_same_story() {
    let Some(model) = trained() else { return };
    if !has_adapter() {
        return;
    }
    let story = |flags: &str| {
        let line = format!("run -m M -p Once -n 120 --temp 0 -q {flags}");
        run(&line, Some(&model)).ok()
    };
    let expected = story("--device cpu");
    assert!(expected.len() > 200, "{expected}");
    let mut flags = vec![
        "--device wgpu0".to_owned(),
        "--device wgpu0 --only".into(),
        "--device wgpu0:subgroups=off,binding=1MiB --only".into(),
        "--device wgpu0,cpu -ngl 2".into(),
    ];
    for layer in 1..5 {
        let last = layer - 1;
        for copies in [1, 4] {
            flags.push(format!(
                "--device wgpu0,reference,cpu --copies {copies} --place layers=0-{last}:wgpu0;layers={layer}:reference"
            ));
        }
        flags.push(format!(
            "--device cpu,wgpu0 --place layers=0-{last}:cpu;layers={layer}-:wgpu0"
        ));
    }
    for flags in flags {
        assert_eq!(story(&flags), expected, "{flags}");
    }
}

#[test]
fn a_model_trains_on_the_gpu() {
    if !has_adapter() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = crate::train::write_project(dir.path());
    let losses = |device: &str| -> Vec<f64> {
        let out = dir.path().join(device);
        let line = format!(
            "train M -o {} --sample= --only --device {device}",
            out.display()
        );
        run(&line, Some(&config)).ok();
        let table = std::fs::read_to_string(out.join("loss.csv")).unwrap();
        let lines = table.lines().skip(1);
        lines
            .map(|line| line.split(',').nth(1).unwrap().parse().unwrap())
            .collect()
    };
    let (cpu, gpu) = (losses("cpu"), losses("wgpu0"));
    assert_eq!(cpu.len(), gpu.len());
    for (cpu, gpu) in cpu.iter().zip(&gpu) {
        assert!((cpu - gpu).abs() < 1e-3, "{cpu} {gpu}");
    }
}

#[test]
fn gpu_options_are_parsed_and_invalid_ones_named() {
    if !has_adapter() {
        return;
    }
    for (device, parts) in [
        (
            "wgpu0:subgroups=maybe",
            ["'subgroups' is 'maybe'", "on or off"],
        ),
        ("wgpu0:binding=1", ["'binding' is '1'", "64KiB"]),
        (
            "wgpu0:threads=1",
            [
                "no parameter 'threads'",
                "subgroups, matrices, overlaps, cache, selection, tuning, binding, lanes, rows",
            ],
        ),
        ("wgpu99", ["no device 'wgpu99'", "wgpu0"]),
    ] {
        run(&format!("run -n 1 --device {device} Once"), None).fails(2, &parts);
    }
}

/// Reported fractions relate to the device's own measured limits.
#[test]
fn reported_shares_relate_to_the_gpu_limits() {
    let Some(model) = trained() else { return };
    if !has_adapter() {
        return;
    }
    let text = run("bench -m M --device wgpu0 -p 8 -n 4 -r 1", Some(&model)).ok();
    assert!(text.contains("limits, wgpu0: "), "{text}");
    assert!(
        text.contains("% of reading") && text.contains("% of f32 arithmetic"),
        "{text}"
    );
    assert!(
        !text.contains("thread:") && !text.contains("threads:"),
        "{text}"
    );
    let text = run(
        "bench -m M --device wgpu0 -n 4 -p 0 -r 1 --json",
        Some(&model),
    )
    .ok();
    assert!(text.contains("\"device\": \"wgpu0\""), "{text}");
}

/// Without a driver, the program reports why the device is missing, and continues.
#[test]
fn a_missing_gpu_driver_is_reported() {
    let without = |line: &str| {
        let mut command = gpu_command(line, None);
        for name in ["VK_ICD_FILENAMES", "VK_DRIVER_FILES"] {
            command.env(name, "/nonexistent/driver.json");
        }
        Run::new(command.output().unwrap())
    };
    let text = without("devices -v").ok();
    if text.contains(" wgpu0 ") {
        skipped("wgpu finds adapters that are no Vulkan ones");
        return;
    }
    assert!(text.contains("not usable: GPU adapters: "), "{text}");
    assert!(text.contains("* cpu "), "{text}");
    assert!(without("run -n 4 --temp 0 Once").ok().starts_with("Once"));
}
