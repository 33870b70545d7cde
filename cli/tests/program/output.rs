//! Output of the commands, and the stream it goes to.

use crate::{Run, check_report_metadata, command, fed, samite, tiny, with_model};
use std::io::Read;
use std::process::Stdio;

#[test]
fn json_is_json() {
    let (dir, model) = tiny();
    let text = dir.path().join("text");
    std::fs::write(
        &text,
        "some text to predict, which is long enough. ".repeat(4),
    )
    .unwrap();

    let devices = samite(["devices", "--json"]).json();
    assert!(devices["backends"].as_array().unwrap().len() >= 2);
    let plan = with_model(&model, "plan -m M --json").json();
    assert!(!plan["memory"].as_array().unwrap().is_empty());
    let about = with_model(&model, "inspect M --json").json();
    assert_eq!(about["metadata"]["general.architecture"], "llama");
    assert_eq!(
        about["metadata"]["tokenizer.ggml.tokens"]
            .as_array()
            .unwrap()
            .len(),
        320
    );
    let tokens = with_model(&model, "tokenize -m M ab --json").json();
    assert!(tokens["count"].as_u64().unwrap() > 1);
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let line = format!("perplexity -m M -f {} -c 32 --json", text.display());
    let perplexity = with_model(&model, &line).json();
    assert!(
        perplexity["perplexity"].as_f64().unwrap() > 1.0,
        "{perplexity}"
    );
    let contract = samite(["test-ops", "--contract", "--device", "cpu", "--json"]).json();
    let checks = contract[0]["checks"].as_array().unwrap();
    let holds = |check: &&serde_json::Value| check["outcome"] == "holds";
    assert!(checks.iter().filter(holds).count() >= 13, "{contract}");
    let timed = samite([
        "test-ops", "--perf", "-o", "RMS_NORM", "-t1", "--device", "cpu", "--json",
    ])
    .json();
    assert_eq!(timed["cases"][0]["op"], "rms_norm");
    assert_eq!(timed["cases"][0]["bound"], "memory");
    assert!(timed["cases"][0]["seconds"].as_f64().unwrap() > 0.0);
    assert!(timed["cases"][0]["share"].as_f64().unwrap() > 0.0);
    let bench = samite(["quantize", "--bench", "Q8_0", "f16", "--json"]).json();
    assert_eq!(bench[0]["type"], "q8_0");
    assert_eq!(bench[1]["type"], "f16");
    for way in ["encoded_elements_per_second", "decoded_elements_per_second"] {
        assert!(bench[1][way].as_f64().unwrap() > 1e5, "{bench}");
    }
    let tests = samite(["test-ops", "--filter", "sqr", "--json"]).json();
    assert_eq!(tests[0]["device"], "cpu");
}

#[test]
fn bench_accepts_lists() {
    let (_dir, model) = tiny();
    let line = "bench -m M -p 8,16 -n 4 -d 2 -t 1,2 -r 1 --no-peaks --json";
    let bench = with_model(&model, line).json();
    check_report_metadata(&bench);
    let results = bench["results"].as_array().unwrap();
    let rows: Vec<_> = results
        .iter()
        .map(|row| format!("{} {}", row["threads"], row["test"].as_str().unwrap()))
        .collect();
    assert_eq!(
        rows,
        [
            "1 pp8@2", "1 pp16@2", "1 tg4@2", "2 pp8@2", "2 pp16@2", "2 tg4@2"
        ]
    );
    assert!(
        results
            .iter()
            .all(|row| row["median"].as_f64().unwrap() > 0.0)
    );
    let table = with_model(&model, "bench -m M -p 0 -n 4 -r 2 --no-peaks").ok();
    assert_eq!(table.lines().count(), 3, "{table}");
    let table = with_model(&model, "bench -m M -p 0 -n 2 -r 1 -t 2").ok();
    assert!(table.contains("limits, 1 thread: "), "{table}");
    assert!(
        table.contains("limits, 2 threads: ") && table.contains(" GHz, "),
        "{table}"
    );
    assert!(table.contains(" times one's"), "{table}");
}

#[test]
fn traces_and_pictures_are_written() {
    let (dir, model) = tiny();
    let trace = dir.path().join("trace.json");
    let line = format!("run -m M -p ab -n 3 --trace {}", trace.display());
    with_model(&model, &line).ok();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    assert!(!trace["traceEvents"].as_array().unwrap().is_empty());

    let picture = dir.path().join("plan.svg");
    let line = format!(
        "plan -m M --device reference,cpu --place layers=0-1:reference --svg {}",
        picture.display()
    );
    assert!(with_model(&model, &line).ok().contains("2 splits"));
    let picture = std::fs::read_to_string(picture).unwrap();
    assert!(picture.trim_end().ends_with("</svg>"), "{picture}");
}

#[test]
fn standard_input_is_the_prompt() {
    let (_dir, model) = tiny();
    let with_input = |line: &str, input: &[u8]| {
        let words = line.split(' ').map(|word| {
            if word == "M" {
                model.as_os_str()
            } else {
                word.as_ref()
            }
        });
        fed(command(words), input)
    };
    let text = with_input("run -m M -n 4 --temp 0 -q", b"ab").ok();
    assert_eq!(
        text,
        with_model(&model, "run -m M -n 4 --temp 0 -q -p ab").ok()
    );
    with_input("run -m M", b"a\xff").fails(1, &["standard input: is not UTF-8"]);
    let megabyte = vec![b'a'; 1_000_000];
    with_input("run -m M", &megabyte).fails(1, &["more tokens than the context of 256"]);
    let ids = with_input("tokenize -m M --show-count", &megabyte).ok();
    assert!(ids.ends_with("1000000 tokens\n"));
    let file = model.with_extension("txt");
    std::fs::write(&file, "ab").unwrap();
    let from = |words: &str| with_model(&model, &format!("tokenize -m M --ids {words}"));
    let file = file.to_str().unwrap();
    assert_eq!(from(&format!("-f {file}")).ok(), from("ab").ok());
    from(&format!("ab --file {file}")).fails(2, &["--file"]);
    from("-f /none").fails(1, &["/none: cannot read the file"]);
    assert_eq!(with_input("tokenize -m M --ids", b"").ok(), "[1]\n");
    assert_eq!(with_input("tokenize -m M --ids --no-bos", b"").ok(), "[]\n");
    assert_eq!(
        with_input("tokenize --show-count --no-bos", b"").ok(),
        "0 tokens\n"
    );
    // Without a model, the built-in one's vocabulary.
    assert!(
        with_input("tokenize --show-count", b"Once")
            .ok()
            .ends_with("-> \" Once\"\n2 tokens\n")
    );
}

#[test]
fn prompts_may_be_empty_or_begin_with_a_dash() {
    let (_dir, model) = tiny();
    with_model(&model, "run -m M -n 2 -p ''").ok();
    assert!(
        with_model(&model, "run -m M -n 2 -q -p -ab")
            .ok()
            .starts_with("-ab")
    );
    assert_eq!(with_model(&model, "run -m M -n 0 -q -p ab").ok(), "ab\n");
    assert!(
        with_model(&model, "run -m M -n -1 --ignore-eos -p ab -c 16")
            .stderr
            .contains("the context is full")
    );
}

#[test]
fn a_closed_output_pipe_ends_the_command_quietly() {
    let (_dir, model) = tiny();
    let mut child = command([
        "run",
        "-n",
        "1000000",
        "--keep",
        "4",
        "--ignore-eos",
        "-p",
        "ab",
        "-m",
    ])
    .arg(&model)
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    child
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut [0; 2])
        .unwrap();
    let run = Run::new(child.wait_with_output().unwrap());
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let (_dir, model) = tiny();
    for line in ["run -m M -p ab -n 4", "inspect M", "devices", "--help"] {
        let words = line.split(' ').map(|word| {
            if word == "M" {
                model.as_os_str()
            } else {
                word.as_ref()
            }
        });
        let full = std::fs::File::create("/dev/full").unwrap();
        let output = command(words).stdout(full).output().unwrap();
        Run::new(output).fails(1, &["cannot write the output"]);
    }
}

#[test]
fn library_warnings_are_printed() {
    let (_dir, model) = tiny();
    let run = with_model(&model, "run -m M -p ab -n 1 -q -c 300");
    assert_eq!(
        run.stderr,
        "warning: the context is longer than the model was trained for, n_ctx 300, n_ctx_train 256\n"
    );
}
