//! Invalid flags and values: a single line that names them, and exit code 2.

use crate::{samite, tiny, with_model};

#[test]
fn invalid_arguments_are_named() {
    samite(["nonsense"]).fails(2, &["nonsense"]);
    samite(["run", "-m"]).fails(2, &["--model"]);
    samite(["quantize"]).fails(2, &["<INPUT>; <OUTPUT>; <TYPE>"]);
    samite(["devices", "--nonsense"]).fails(2, &["--nonsense"]);
    samite(["devices", "--device", "cpu"]).fails(2, &["--device"]);
}

#[test]
fn help_and_version_go_to_standard_output() {
    let help = samite(["--help"]).ok();
    for name in [
        "run",
        "devices",
        "plan",
        "inspect",
        "tokenize",
        "quantize",
        "merge-lora",
        "bench",
        "logits",
        "embed",
        "perplexity",
        "rpc-server",
        "train",
        "completions",
        "man",
    ] {
        assert!(help.contains(&format!("\n  {name} ")), "{help}");
        let help = samite([name, "--help"]).ok();
        assert!(help.contains("Usage:"), "{help}");
        assert!(
            help.contains(&format!("Examples:\n  samite {name}")),
            "{help}"
        );
        let wide = help.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None);
    }
    assert!(samite(["--version"]).ok().starts_with("samite "));
}

#[test]
fn commands_for_developers_keep_their_old_names() {
    let all = samite(["--help"]).ok();
    let developers = samite(["dev", "--help"]).ok();
    for name in ["synth", "test-ops", "compare", "sim"] {
        let listed = format!("\n  {name} ");
        assert!(developers.contains(&listed), "{developers}");
        assert!(!all.contains(&listed), "{all}");
        if name == "sim" && cfg!(not(feature = "sim")) {
            continue;
        }
        let help = samite(["dev", name, "--help"]).ok();
        let example = format!("Examples:\n  samite dev {name}");
        assert!(help.contains(&example), "{help}");
        assert!(samite([name, "--help"]).ok().contains(&example));
        let wide = help.lines().find(|line| line.chars().count() > 80);
        assert_eq!(wide, None);
    }
}

#[cfg(not(feature = "sim"))]
#[test]
fn the_simulator_needs_its_feature() {
    for line in ["dev sim", "dev sim --count 9 -t 2", "sim --seed 1 --nodes"] {
        samite(line.split(' ')).fails(2, &["dev sim: ", "--features sim"]);
    }
}

#[cfg(feature = "sim")]
#[test]
fn the_simulator_repeats_a_case_from_its_flags() {
    let outcomes = ["dev sim --seed 3 --json", "sim --json --seed 3"]
        .map(|line| samite(line.split(' ')).json());
    assert_eq!(outcomes[0], outcomes[1]);
    assert_eq!(outcomes[0]["failure"], serde_json::Value::Null);
    samite(["dev", "sim", "--faults", "nothing@1"]).fails(2, &["--faults: "]);
}

#[test]
fn out_of_range_values_are_refused() {
    let (_dir, model) = tiny();
    for (flags, part) in [
        ("-n x", "--n-predict"),
        ("-n -2", "-2"),
        ("-n 1.5", "1.5"),
        ("-c x", "--ctx-size"),
        ("-c -5", "-5"),
        ("-c 1000000000000", "2147483647"),
        ("-c 99999999999999999999999", "2147483647"),
        ("-ub 0", "--ubatch-size"),
        ("-t 0", "--threads"),
        ("-t 100000", "1024"),
        ("-tb 0", "--threads-batch"),
        ("-C xyz", "--cpu-mask <MASK>': must be a hexadecimal number"),
        ("--cpu-mask 0", "--cpu-mask <MASK>': must have a bit set"),
        ("-Cr 5-4", "--cpu-range <LO-HI>': must be two numbers"),
        ("--cpu-strict 1", "--cpu-strict: name processors"),
        ("--cpu-strict 2 -C 1", "--cpu-strict <0|1>': must be 0 or 1"),
        ("--prio 4", "--prio <N>': must be a number from -1 to 3"),
        ("--poll 101", "--poll"),
        ("--copies 0", "--copies"),
        ("--copies 100000000000", "--copies"),
        ("--keep -1", "-1"),
        ("--keep 99999999999", "--keep"),
        ("--temp -1", "temperature is -1"),
        ("--temp nan", "temperature is NaN"),
        ("--temp inf", "temperature is inf"),
        ("--top-p 2", "top_p is 2"),
        ("--top-p -0.5", "top_p is -0.5"),
        ("--min-p 1.5", "min_p is 1.5"),
        ("--top-k x", "--top-k <K>': must be a whole number"),
        (
            "--min-keep -1",
            "unexpected argument '-1' found (see --help)",
        ),
        ("--repeat-penalty 0", "repeat_penalty is 0"),
        ("--repeat-penalty nan", "repeat_penalty is NaN"),
        ("--kv nonsense", "--kv: 'nonsense'"),
        ("--kv ''", "--kv: ''"),
        ("--kv f16,q8_0,f16", "--kv"),
        ("--load-mode tape", "tape"),
        ("--fallback maybe", "maybe"),
        ("--stop ''", "--stop"),
        ("--seed -2", "--seed"),
        ("--typical 2", "typical_p is 2"),
        ("--samplers top_k;tipp", "--samplers: 'tipp' is no sampler"),
        ("--sampler-seq kZ", "--sampler-seq: 'Z' is no sampler"),
        ("--samplers top_k --sampler-seq k", "cannot be used with"),
        ("--xtc-probability 2", "xtc_probability is 2"),
        ("--mirostat 3", "mirostat is 3"),
        ("--dry-base -1", "dry_base is -1"),
        ("--adaptive-target 1.5", "adaptive_target is 1.5"),
        (
            "--grammar root::=a",
            "--grammar: line 1, column 8, in rule 'root': there is no rule 'a'",
        ),
        ("-j {", "--json-schema: #: this is no JSON"),
        (
            "-j {\"not\":{}}",
            "--json-schema: #/not: the keyword 'not' is not enforced",
        ),
        ("-j {} --grammar root::=[a]", "cannot be used with"),
        ("--logit-bias 5", "--logit-bias"),
        #[cfg(feature = "hub")]
        ("-mu http://x/y.gguf", "with -hf"),
        ("-cnv", "samite chat"),
        ("-st", "run --chat"),
        ("-sys text", "--chat"),
        ("-md draft.gguf", "`samite serve` has draft models"),
        ("-fa on", "--no-flash"),
        ("-f text -q again", "the text to continue is given twice"),
    ] {
        with_model(&model, &format!("run -m M {flags}")).fails(2, &[part]);
    }
}

#[test]
fn redundant_llama_cpp_flags_are_accepted() {
    let (_dir, model) = tiny();
    for flags in [
        "-no-cnv",
        "--no-mmap",
        "--mmap",
        "--mlock",
        "--load-mode direct",
        "--mmap --no-mmap",
        "--typical-p 0.9",
    ] {
        with_model(&model, &format!("run -m M -p ab -n 1 {flags}")).ok();
    }
}

#[test]
fn completions_and_manual_pages_are_written() {
    let (dir, _) = tiny();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = samite(["completions", shell]).ok();
        assert!(
            script.contains("tokenize") && script.contains("ctx-size"),
            "{shell}"
        );
    }
    let pages = dir.path().join("a/man");
    samite(["man".as_ref(), pages.as_os_str()]).ok();
    let listing = crate::listing(&pages);
    assert!(
        listing.len() > 12 && listing.contains(&"samite.1".to_owned()),
        "{listing:?}"
    );
    assert!(listing.contains(&"samite-dev-test-ops.1".to_owned()));
    assert!(!listing.contains(&"samite-test-ops.1".to_owned()));
    let page = std::fs::read_to_string(pages.join("samite-merge-lora.1")).unwrap();
    for part in [
        ".TH samite-merge-lora",
        "\\fBsamite merge\\-lora\\fR",
        "lora.gguf:0.5",
    ] {
        assert!(page.contains(part), "no {part} in: {page}");
    }
}

#[test]
fn unknown_devices_and_rules_are_named() {
    let (_dir, model) = tiny();
    for (flags, part) in [
        ("--device abacus", "abacus"),
        ("--device cpu,cpu", "--device: device 'cpu' is named twice"),
        ("--device auto,cpu", "'auto' stands alone"),
        ("--disable cpu", "(cpu disabled)"),
        ("--log debgu", "--log: 'debgu' is no level"),
        ("--watch * --watch-dir x --watch-limit -1", "--watch-limit"),
        ("--device ''", "no device is named"),
        ("--place nope*:cpu", "'nope*:cpu' matches nothing"),
        (
            "--place layers=0-1:gpu7",
            "'gpu7': it is not among the devices in use: ",
        ),
        ("--place layers=2-1:cpu", "2-1"),
        ("--place ::", "'::'"),
        ("--place ''", "--place"),
        ("-ot [=cpu", "[=cpu"),
        ("-ot blk", "expression=device"),
        ("-ot=nope=cpu", "nope"),
        ("-ngl some", "some"),
        ("-ts a", "'a'"),
        ("-ts 0,0", "all parts are 0"),
        ("-ts nan", "nan"),
        ("-ts 1,2,3", "3 parts"),
    ] {
        with_model(&model, &format!("run -m M -p x -n 1 {flags}")).fails(2, &[part]);
    }
    samite(["test-ops", "--device", "abacus"]).fails(2, &["abacus", "cpu"]);
    samite(["test-ops", "--perf", "-o", "add, abacus"]).fails(2, &["--op abacus", "flash_attn"]);
}

#[test]
fn invalid_flags_of_other_commands_are_named() {
    let (dir, model) = tiny();
    let text = dir.path().join("text");
    std::fs::write(&text, "a few words, not many").unwrap();
    let text = text.display();
    for (line, part) in [
        ("plan -m M --tokens 0", "--tokens"),
        ("plan -m M --tokens 1000", "--ubatch-size 512"),
        ("bench -m M -p 0 -n 0", "nothing to measure"),
        ("bench -m M -p x", "--n-prompt"),
        ("bench -m M -p 1,,2", "--n-prompt"),
        ("bench -m M -t 1,0", "--threads"),
        ("bench -m M -t 70000", "--threads"),
        ("bench -m M -d 100000000000000", "--depth"),
        ("bench -m M -r 0", "--repetitions"),
        ("quantize M other Q9", "Q4_K_M"),
        (&format!("perplexity -m M -f {text} --chunks 0"), "--chunks"),
        (
            &format!("perplexity -m M -f {text} -c 2"),
            "at least 4 tokens",
        ),
    ] {
        with_model(&model, line).fails(2, &[part]);
    }
    with_model(&model, &format!("perplexity -m M -f {text} -c 200"))
        .fails(1, &["text: has", "--ctx-size"]);
}

#[test]
fn size_errors_are_reported_before_any_output() {
    let (_dir, model) = tiny();
    let long = "word ".repeat(400);
    samite([
        "run".as_ref(),
        "-m".as_ref(),
        model.as_os_str(),
        "-p".as_ref(),
        long.as_ref(),
    ])
    .fails(1, &["the context of 256", "--ctx-size"]);
    with_model(&model, "run -m M -p xyz -c 1").fails(1, &["the context of 1:"]);
    // More than any machine has: rejected without an attempt.
    with_model(&model, "run -m M -p x -c 2147483647").fails(1, &["out of memory", "--ctx-size"]);
    with_model(&model, "run -m M -p x --kv q4_K").fails(1, &["K cache of type q4_K"]);
}
