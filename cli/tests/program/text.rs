//! Generated text does not depend on the device.

use crate::{samite, tiny, trained, with_model};
use std::path::Path;

/// Greedy continuation of "Once upon a time" by the trained model, according to the original
/// implementation.
const STORY: &str = "Once upon a time, there was a little girl named Lily. She loved to play \
    outside in the park. One day, she saw a big, red ball. She wanted to play with it, but it was \
    too high.\n\
    Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. \
    She said, \"I want to play with your ball, but I can'";

/// Generates `tokens` greedy tokens, with more flags.
fn text(model: &Path, prompt: &str, tokens: &str, flags: &str) -> String {
    let fixed = ["run", "-p", prompt, "--temp", "0", "-q", "-n", tokens, "-m"];
    let words = fixed.iter().map(|word| word.as_ref());
    let run = samite(
        words
            .chain([model.as_os_str()])
            .chain(flags.split_whitespace().map(|word| word.as_ref())),
    );
    run.ok()
}

/// Checks that a text does not depend on how the work is divided.
fn check_device_independence(model: &Path, layers: usize, prompt: &str, tokens: &str) -> String {
    let expected = text(model, prompt, tokens, "--device cpu");
    let mut flags: Vec<String> = [
        "-t 1",
        "-t 2",
        "-t 4",
        "--device reference",
        "--device blas",
        "--device cpu,reference,blas --copies 1",
        "--device reference,cpu --copies 4",
        "--load-mode read",
        "-ub 2",
        "-ngl 2 --device reference,cpu",
        "-ts 1,2 --device reference,cpu,blas",
        "-ot blk.*ffn=reference --device cpu,reference",
    ]
    .map(String::from)
    .to_vec();
    for layer in 1..layers {
        // One boundary, and two: the first layers, one layer, and the remaining layers each have a
        // device.
        let last = layer - 1;
        flags.push(format!(
            "--device reference,cpu --place layers=0-{last}:reference"
        ));
        flags.push(format!(
            "--device cpu,reference,blas --copies 4 --place layers=0-{last}:cpu;layers={layer}:reference"
        ));
    }
    let has_blas = samite(["devices"]).ok().contains("\n  blas ");
    for flags in flags
        .iter()
        .filter(|flags| has_blas || !flags.contains("blas"))
    {
        assert_eq!(text(model, prompt, tokens, flags), expected, "{flags}");
    }
    expected
}

#[test]
fn tiny_model_text_does_not_depend_on_the_device() {
    let (_dir, model) = tiny();
    check_device_independence(&model, 3, "ab cd", "16");
}

#[test]
fn trained_model_text_does_not_depend_on_the_device() {
    let Some(model) = trained() else { return };
    let story = check_device_independence(&model, 5, "Once upon a time", "150");
    assert!(story.starts_with(STORY), "{story}");
}

#[test]
fn a_quantized_model_still_makes_sense() {
    let Some(model) = trained() else { return };
    let dir = tempfile::tempdir().unwrap();
    let quantized = dir.path().join("q8_0.gguf").display().to_string();
    with_model(&model, &format!("quantize M {quantized} Q8_0")).ok();
    let story = text(quantized.as_ref(), "Once upon a time", "60", "");
    assert!(story.starts_with(&STORY[..150]), "{story}");
}

#[test]
fn seeds_determine_the_text() {
    let (_dir, model) = tiny();
    let with_seed = |seed| {
        with_model(
            &model,
            &format!("run -m M -p ab -n 20 -q --temp 1 --seed {seed}"),
        )
        .ok()
    };
    assert_eq!(with_seed(7), with_seed(7));
    assert_ne!(with_seed(7), with_seed(8));
    // A random seed is reported and reproduces the text.
    let line = "run -m M -p ab -n 20 --temp 1";
    let random = with_model(&model, &format!("{line} --seed -1"));
    let (_, seed) = random.stderr.trim().rsplit_once("seed ").unwrap();
    let seed = seed.split(';').next().unwrap().to_owned();
    let text = random.ok();
    assert_eq!(
        with_model(&model, &format!("{line} --seed {seed}")).ok(),
        text
    );
}

#[test]
fn logit_biases_force_and_ban_tokens() {
    let (_dir, model) = tiny();
    let line = "run -m M -p ab -n 3 -q --ignore-eos --no-display-prompt --seed 1 --logit-bias";
    let text = with_model(&model, &format!("{line} 259+1000")).ok();
    assert_eq!(text, "aaa\n");
    let text = with_model(&model, &format!("{line} 259+1000 -l 259-inf -l 260+500")).ok();
    assert_eq!(text, "bbb\n");
}

#[test]
#[cfg(feature = "grammar")]
fn generated_text_matches_the_grammar() {
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":8},
        "age":{"type":"integer","minimum":3,"maximum":12}},"required":["name","age"],
        "additionalProperties":false}"#;
    let start = [
        "run",
        "Once upon a time",
        "-q",
        "--no-display-prompt",
        "-n",
        "100",
        "--seed",
    ];
    for seed in ["1", "2", "3"] {
        let text = samite(start.iter().chain(&[seed, "-j", schema])).ok();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let age = value["age"].as_i64().unwrap();
        assert!((3..=12).contains(&age) && value["name"].as_str().unwrap().chars().count() <= 8);
        let grammar = r#"root ::= (" dog" | " cat"){2} "!""#;
        let text = samite(start.iter().chain(&[seed, "--grammar", grammar])).ok();
        let animals = text.trim_end().strip_suffix('!').unwrap();
        assert_eq!(
            animals.replace(" dog", "").replace(" cat", ""),
            "",
            "{text}"
        );
        assert_eq!(animals.len(), 8, "{text}");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.gbnf");
    std::fs::write(&file, "root ::= <[100000]>").unwrap();
    let run = samite(
        start
            .iter()
            .map(std::ffi::OsStr::new)
            .chain(["1", "--grammar-file"].map(AsRef::as_ref))
            .chain([file.as_os_str()]),
    );
    run.fails(
        1,
        &["a.gbnf: line 1, column 10, in rule 'root': there is no token 100000"],
    );
}

#[test]
fn a_saved_session_continues_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved.gguf");
    let path = path.to_str().unwrap();
    let run = |line: &str| samite(line.split_whitespace()).ok();
    let lively = "run --temp 2 --top-k 0 --min-p 0 -q";
    let whole = run(&format!("{lively} --seed 5 -n 12 Once"));
    run(&format!("{lively} --seed 5 -n 7 --session {path} Once"));
    let rest = run(&format!("{lively} -n 5 --session {path}"));
    assert_eq!(rest, whole);
    // A given seed samples anew, and a grammar applies to the whole text.
    let other = run(&format!("{lively} -n 9 --seed 6 --session {path}"));
    assert!(other.starts_with(whole.trim_end()), "{other}{whole}");
    let digits = "--no-display-prompt --grammar root::=[0-9]{6}";
    let begin = run(&format!(
        "{lively} --seed 5 -n 2 {digits} --session {path} Once"
    ));
    let end = run(&format!("{lively} -n 9 {digits} --session {path}"));
    let all = begin.trim_end().to_owned() + end.trim_end();
    assert!(
        all.len() == 6 && all.bytes().all(|byte| byte.is_ascii_digit()),
        "{all}"
    );
    samite(
        format!("{lively} -n 9 --no-display-prompt --grammar root::=\"x\" --session {path}")
            .split_whitespace(),
    )
    .fails(1, &["does not allow"]);
}

#[test]
fn json_output_has_text_log_probabilities_and_timings() {
    let line = "run --seed 5 -n 7 Once";
    let plain = samite(line.split_whitespace()).ok();
    let value = samite(format!("{line} --json --logprobs 2").split_whitespace()).json();
    let text = |key: &str| value[key].as_str().unwrap().to_owned();
    assert_eq!(text("prompt") + &text("text") + "\n", plain);
    assert_eq!(
        (text("finish").as_str(), &value["seed"]),
        ("limit", &5.into())
    );
    let tokens = value["tokens"].as_array().unwrap();
    let logprobs = value["logprobs"].as_array().unwrap();
    assert_eq!((tokens.len(), logprobs.len()), (7, 7));
    for found in logprobs {
        let top = found["top"].as_array().unwrap();
        let of = |value: &serde_json::Value| value["logprob"].as_f64().unwrap();
        assert_eq!(top.len(), 2);
        assert!(of(&top[0]) >= of(&top[1]) && of(&top[0]) >= of(found));
    }
    let timings = &value["timings"];
    assert_eq!(timings["prompt_tokens"], 2);
    assert!(timings["generation_tokens_per_second"].as_f64().unwrap() > 0.0);
    let stopped = samite(["run", "--json", "-n", "200", "--stop", ".", "Once"]).json();
    assert_eq!(stopped["finish"], "stop");
    assert!(!stopped["text"].as_str().unwrap().contains('.'));
    assert!(stopped.get("logprobs").is_none());
    samite(["run", "--logprobs", "2", "Once"]).fails(2, &["--json"]);
}
