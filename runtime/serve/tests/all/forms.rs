//! Schemas and grammars over HTTP: each request is answered correctly, rejected with a named
//! reason, or answered wrongly; the last must never happen.
//!
//! The schemas come from the public JSON-Schema-Test-Suite, in the folder of
//! `SAMITE_TEST_JSON_SCHEMA_SUITE` (its `tests/draft2020-12`), and from a random generator; the
//! crate `jsonschema` validates the answers. Earley's algorithm validates answers to grammars.
//! `SAMITE_SERVE_FORMS=2000` sets the number of random schemas.

#[path = "../../../grammar/tests/all/judge.rs"]
#[expect(dead_code, reason = "it can more")]
mod judge;

use crate::common::Server;
use judge::Judge;
use samite_requests::EngineOptions;
use samite_serve::ServeOptions;
use samite_text::Rng;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of answers requested per case, until one is complete.
const ATTEMPTS: usize = 5;

/// Constraint of an answer, with the name of the case.
struct Case {
    name: String,
    form: Form,
}

enum Form {
    Schema(Value),
    Gbnf(String),
}

/// Formats that are not enforced.
const ANNOTATIONS: [&str; 9] = [
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
];

/// Outcome of a case.
#[derive(Debug)]
enum Outcome {
    Right,
    /// The text reached the token limit; it is a prefix of a valid one.
    Cut,
    Refused,
    Wrong(String),
}

/// Returns the schemas of the public suite.
fn suite() -> Vec<Case> {
    let Some(folder) = std::env::var_os("SAMITE_TEST_JSON_SCHEMA_SUITE") else {
        println!("skipped: SAMITE_TEST_JSON_SCHEMA_SUITE names no folder");
        return Vec::new();
    };
    let folder = Path::new(&folder);
    let mut cases = Vec::new();
    for folder in [folder.to_owned(), folder.join("optional/format")] {
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|ending| ending == "json"))
            // Its schemas name metaschemas that neither side has.
            .filter(|path| path.file_stem().is_some_and(|name| name != "vocabulary"))
            .collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let groups: Vec<Value> = serde_json::from_str(&text).unwrap();
            let stem = file.file_stem().unwrap().to_string_lossy();
            cases.extend(groups.into_iter().map(|mut group| Case {
                name: format!("{stem}: {}", group["description"]),
                form: Form::Schema(group["schema"].take()),
            }));
        }
    }
    cases
}

const NAMES: [&str; 8] = ["name", "age", "tags", "id", "größe", "is ok", "x", "kind"];

/// Returns a random schema, similar to those written for model answers.
fn schema(rng: &mut Rng, depth: usize) -> Value {
    let least = rng.below(9) as i64 - 4;
    match rng.below(if depth == 0 { 10 } else { 15 }) {
        0 => json!({"type": "string"}),
        1 => json!({"type": "string", "minLength": rng.below(3), "maxLength": 3 + rng.below(9)}),
        2 => {
            let patterns = [
                "^[A-Z]{2}[0-9]+$",
                "^(red|green)$",
                "^\\d{1,3}(\\.\\d)?$",
                "a",
            ];
            json!({"type": "string", "pattern": patterns[rng.below(4)]})
        }
        3 => {
            let formats = ["date", "time", "date-time", "uuid", "ipv4", "email"];
            json!({"type": "string", "format": formats[rng.below(6)]})
        }
        4 => json!({"type": "integer"}),
        5 => json!({"type": "integer", "minimum": least, "maximum": least + rng.below(30) as i64}),
        6 => json!({"type": "number", "exclusiveMinimum": least}),
        7 => {
            let values = [
                json!("a"),
                json!("b c"),
                json!("\""),
                json!(7),
                json!(null),
                json!(2.5),
            ];
            let from = rng.below(3);
            json!({"enum": values[from..from + 3].to_vec()})
        }
        8 => json!({"type": ["boolean", "null"]}),
        9 => json!({"const": {"a": [1, "ü"]}}),
        10 | 11 => {
            let mut properties = Map::new();
            for _ in 0..1 + rng.below(4) {
                properties.insert(NAMES[rng.below(8)].to_owned(), schema(rng, depth - 1));
            }
            let names = properties.keys().filter(|_| rng.below(2) == 0);
            let required: Vec<String> = names.cloned().collect();
            let mut made =
                json!({"type": "object", "properties": properties, "required": required});
            match rng.below(3) {
                0 => {}
                1 => made["additionalProperties"] = json!(false),
                _ => made["additionalProperties"] = schema(rng, 0),
            }
            made
        }
        12 => {
            let least = rng.below(3);
            json!({"type": "array", "items": schema(rng, depth - 1), "minItems": least,
                "maxItems": least + rng.below(3)})
        }
        13 => {
            json!({"type": "array", "prefixItems": [schema(rng, 0), schema(rng, depth - 1)],
                "items": false})
        }
        _ => json!({"anyOf": [schema(rng, depth - 1), schema(rng, depth - 1)]}),
    }
}

/// Returns a random grammar over lower-case letters and a few symbols.
fn gbnf(rng: &mut Rng) -> String {
    fn item(rng: &mut Rng, rules: usize, from: usize) -> String {
        match rng.below(7) {
            0 => format!("\"{}\"", ["ab", "x", "- ", "ö", "\\n"][rng.below(5)]),
            1 => ["[a-f]", "[^a-z \\n]", "[0-9äß]", "[x-z,]"][rng.below(4)].to_owned(),
            2 => format!("({} | {})", item(rng, rules, from), item(rng, rules, from)),
            3 => format!("[ab]{{{},{}}}", rng.below(2), 2 + rng.below(3)),
            4 => format!("({} {})?", item(rng, rules, from), item(rng, rules, from)),
            // Only later rules: some text always ends.
            _ if from + 1 < rules => format!("r{}", from + 1 + rng.below(rules - from - 1)),
            _ => "\"end\"".to_owned(),
        }
    }
    let rules = 2 + rng.below(4);
    let mut text = "root ::= r0\n".to_owned();
    for rule in 0..rules {
        let alternatives: Vec<String> = (0..1 + rng.below(3))
            .map(|_| {
                let items = (0..1 + rng.below(3)).map(|_| item(rng, rules, rule));
                items.collect::<Vec<_>>().join(" ")
            })
            .collect();
        text += &format!("r{rule} ::= {}\n", alternatives.join(" | "));
    }
    text
}

fn cases() -> Vec<Case> {
    let mut cases = suite();
    let mut rng = Rng::new(44);
    let asked = std::env::var("SAMITE_SERVE_FORMS").ok();
    let count = asked.map_or(150, |count| count.parse().unwrap());
    for number in 0..count {
        cases.push(Case {
            name: format!("random schema {number}"),
            form: Form::Schema(schema(&mut rng, 2)),
        });
    }
    for (name, text) in [
        (
            "arithmetic",
            include_str!("../../../grammar/tests/grammars/arithmetic.gbnf"),
        ),
        ("c", include_str!("../../../grammar/tests/grammars/c.gbnf")),
        (
            "chess",
            include_str!("../../../grammar/tests/grammars/chess.gbnf"),
        ),
        (
            "english",
            include_str!("../../../grammar/tests/grammars/english.gbnf"),
        ),
        (
            "japanese",
            include_str!("../../../grammar/tests/grammars/japanese.gbnf"),
        ),
        (
            "json",
            include_str!("../../../grammar/tests/grammars/json.gbnf"),
        ),
        (
            "json_arr",
            include_str!("../../../grammar/tests/grammars/json_arr.gbnf"),
        ),
        (
            "list",
            include_str!("../../../grammar/tests/grammars/list.gbnf"),
        ),
    ] {
        cases.push(Case {
            name: name.to_owned(),
            form: Form::Gbnf(text.to_owned()),
        });
    }
    for number in 0..60 {
        cases.push(Case {
            name: format!("random grammar {number}"),
            form: Form::Gbnf(gbnf(&mut rng)),
        });
    }
    cases
}

/// Returns biases for tokens that end with closing marks: the model writes at random, but its texts
/// should end.
fn closing(marks: &[u8]) -> Value {
    let tokenizer = crate::common::model().tokenizer().unwrap();
    let closes = |&token: &u32| {
        let piece = tokenizer.token_to_piece(token, false).unwrap_or_default();
        piece.last().is_some_and(|last| marks.contains(last))
    };
    let tokens = (0..tokenizer.vocab_size() as u32).filter(closes);
    let biased = tokens
        .map(|token| json!([token, 7]))
        .chain([json!([tokenizer.eos(), 10])]);
    biased.collect()
}

/// Requests answers until one is complete. A random text may never end, and which one does differs
/// between processors because of rounding.
fn outcome(server: &Server, form: &Form, number: usize) -> Outcome {
    for attempt in 0..ATTEMPTS {
        let (status, answer) = ask(server, form, number, attempt);
        match judged(form, status, &answer) {
            Outcome::Cut => {}
            decided => return decided,
        }
    }
    Outcome::Cut
}

/// Requests an answer; every second case uses OpenAI's chat API. The seed is that of the attempt.
fn ask(server: &Server, form: &Form, number: usize, attempt: usize) -> (u16, Value) {
    let marks: &[u8] = match form {
        Form::Schema(_) => b"\"}]",
        Form::Gbnf(_) => b"\"}])>;.\n",
    };
    let seed = number + 10_000 * attempt;
    let mut body = json!({"temperature": 1.0, "seed": seed, "logit_bias": closing(marks)});
    let is_chat = number % 2 == 1;
    let (path, limit) = if is_chat {
        ("/v1/chat/completions", "max_tokens")
    } else {
        ("/completion", "n_predict")
    };
    body[limit] = 400.into();
    if is_chat {
        body["messages"] = json!([{"role": "user", "content": "Tell me about Tom."}])
    } else {
        body["prompt"] = "Tom is".into()
    }
    match form {
        Form::Schema(schema) if is_chat => {
            let named = json!({"name": "answer", "strict": true, "schema": schema});
            body["response_format"] = json!({"type": "json_schema", "json_schema": named});
        }
        Form::Schema(schema) => body["json_schema"] = schema.clone(),
        Form::Gbnf(text) => body["grammar"] = text.as_str().into(),
    }
    server.post(path, &body)
}

fn judged(form: &Form, status: u16, answer: &Value) -> Outcome {
    if status == 400 {
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        let is_named = [
            "\"json_schema\": ",
            "\"response_format\": ",
            "\"grammar\": ",
        ];
        return if is_named.iter().any(|name| message.starts_with(name)) {
            Outcome::Refused
        } else {
            Outcome::Wrong(format!("refused without a name: {message}"))
        };
    }
    if status != 200 {
        return Outcome::Wrong(format!("status {status}: {answer}"));
    }
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str();
    let text = text
        .or_else(|| answer["content"].as_str())
        .unwrap_or_default();
    let is_whole = match choice["finish_reason"].as_str() {
        Some(reason) => reason == "stop",
        None => answer["stop_type"] == "eos",
    };
    let wrong = |why: String| Outcome::Wrong(format!("{why}: {text:?}"));
    match form {
        Form::Schema(_) if !is_whole => Outcome::Cut,
        Form::Schema(schema) => {
            let options = jsonschema::options().should_validate_formats(true);
            let options = ANNOTATIONS.iter().fold(options, |options, format| {
                options.with_format(*format, |_| true)
            });
            let validator = options.build(schema).unwrap();
            match serde_json::from_str::<Value>(text) {
                Err(error) => wrong(format!("no JSON, {error}")),
                Ok(value) => match validator.validate(&value) {
                    Ok(()) => Outcome::Right,
                    Err(error) => wrong(error.to_string()),
                },
            }
        }
        Form::Gbnf(source) => {
            let judge = Judge::new(source);
            let mut chart = judge.start();
            match text.chars().all(|c| chart.push(c)) {
                false => wrong("no text of the grammar".to_owned()),
                true if !is_whole => Outcome::Cut,
                true if chart.is_complete() => Outcome::Right,
                true => wrong("it breaks off".to_owned()),
            }
        }
    }
}

#[test]
fn answers_match_schemas_and_grammars() {
    let cases = cases();
    let options = EngineOptions {
        slots: 4,
        ..EngineOptions::default()
    };
    let server = Server::start(ServeOptions::default(), options);
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(number) else { break };
                    let outcome = outcome(&server, &case.form, number);
                    outcomes.lock().unwrap().push((number, outcome));
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap();
    let (mut right, mut refused, mut wrong, mut cut) = (0, 0, Vec::new(), Vec::new());
    for (number, outcome) in outcomes {
        let case = &cases[number];
        let shown = match &case.form {
            Form::Schema(schema) => schema.to_string(),
            Form::Gbnf(text) => text.clone(),
        };
        let shown: String = shown.chars().take(300).collect();
        match outcome {
            Outcome::Right => right += 1,
            Outcome::Refused => refused += 1,
            Outcome::Cut => cut.push(format!("{}: {shown}", case.name)),
            Outcome::Wrong(why) => wrong.push(format!("{}: {why} by {shown}", case.name)),
        }
    }
    println!(
        "{} cases: {right} right, {refused} refused by name, {} not complete in {ATTEMPTS} texts of 400 tokens, {} wrong",
        cases.len(),
        cut.len(),
        wrong.len()
    );
    for case in &cut {
        println!("not complete: {case}");
    }
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(
        right * 100 >= (right + cut.len()) * 99,
        "{right} right, {} not complete",
        cut.len()
    );
    assert!(right * 2 > cases.len(), "{right} of {}", cases.len());
}
