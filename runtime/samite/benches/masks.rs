//! Measures how long grammar masks take over a real vocabulary: `cargo bench -p samite --features
//! grammar --bench masks -- FILE.gguf`. Only the vocabulary of the file is read.
//!
//! The first mask includes parsing the schema or grammar, with the vocabulary already loaded. The
//! other masks are those before each token of conforming texts.

use samite::gguf::{GgufFile, LoadMode};
use samite::grammar::{Grammar, GrammarVocabulary};
use samite::llm::vocab_data;
use samite::text::{Constraint, Tokenizer};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'));
    let Some(file) = file else {
        println!("name a GGUF file with a vocabulary");
        return Ok(());
    };
    let file = GgufFile::open_header(file, LoadMode::Read)?;
    let data = vocab_data(file.metadata())?.ok_or("the file has no vocabulary")?;
    let tokenizer = Arc::new(Tokenizer::new(data)?);
    let start = Instant::now();
    let vocabulary = GrammarVocabulary::new(&tokenizer)?;
    println!(
        "{} tokens, the trie in {:.0} ms",
        tokenizer.vocab_size(),
        start.elapsed().as_secs_f64() * 1e3
    );
    let (mut first, mut all) = (Vec::new(), Vec::new());
    for (name, schema, values) in schemas() {
        let texts = values.iter().map(Value::to_string).collect();
        let make = || Grammar::json_schema(&schema.to_string());
        measure(name, make, texts, &vocabulary, &mut first, &mut all)?;
    }
    println!("{}", row("schemas", &mut first, &mut all));
    let (mut first, mut all) = (Vec::new(), Vec::new());
    let json = include_str!("../../grammar/tests/grammars/json.gbnf");
    let texts = schemas().into_iter().flat_map(|(_, _, values)| values);
    let texts = texts
        .filter(Value::is_object)
        .map(|value| value.to_string())
        .collect();
    measure(
        "json.gbnf",
        || Grammar::gbnf(json),
        texts,
        &vocabulary,
        &mut first,
        &mut all,
    )?;
    let c = include_str!("../../grammar/tests/grammars/c.gbnf");
    let text = "int main(int count) {\n  int sum = 0;\n  while (count > 0) {\n    sum = sum + count * 2;\n    count = count - 1;\n  }\n  return sum;\n}\n";
    measure(
        "c.gbnf",
        || Grammar::gbnf(c),
        vec![text.to_owned()],
        &vocabulary,
        &mut first,
        &mut all,
    )?;
    Ok(())
}

fn measure(
    name: &str,
    make: impl Fn() -> samite::grammar::Result<Grammar>,
    texts: Vec<String>,
    vocabulary: &GrammarVocabulary,
    first: &mut Vec<Duration>,
    all: &mut Vec<Duration>,
) -> Result<(), Box<dyn std::error::Error>> {
    let (mut own_first, mut own) = (Vec::new(), Vec::new());
    for text in &texts {
        for _ in 0..5 {
            let start = Instant::now();
            let mut constraint = make()?.constraint(vocabulary)?;
            constraint.mask()?;
            own_first.push(start.elapsed());
            for token in vocabulary.tokenizer().tokenize(text, false, false)? {
                let start = Instant::now();
                constraint.mask()?;
                own.push(start.elapsed());
                constraint.accept(token)?;
            }
            assert!(constraint.is_complete(), "{name}: {text}");
        }
    }
    println!("{}", row(name, &mut own_first, &mut own));
    first.extend(own_first);
    all.extend(own);
    Ok(())
}

fn row(name: &str, first: &mut [Duration], all: &mut [Duration]) -> String {
    first.sort();
    all.sort();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let mean = all.iter().sum::<Duration>() / all.len() as u32;
    format!(
        "{name}: first mask {:.0} us, then mean {:.1} us, median {:.1} us, 99th percentile {:.0} us of {}",
        micros(first[first.len() / 2]),
        micros(mean),
        micros(all[all.len() / 2]),
        micros(all[all.len() * 99 / 100]),
        all.len()
    )
}

/// Returns typical schemas, each with values that conform to it.
fn schemas() -> Vec<(&'static str, Value, Vec<Value>)> {
    let many = |value: &dyn Fn(usize) -> Value| -> Value {
        (0..60)
            .map(|n| (format!("property_{n}"), value(n)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    vec![
        (
            "person",
            json!({"type": "object", "properties": {"name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "email": {"type": "string", "format": "email"},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 10}},
                "required": ["name", "age"], "additionalProperties": false}),
            vec![
                json!({"name": "Ada Lovelace", "age": 36, "email": "ada@example.com",
                    "tags": ["mathematics", "computing", "poetry"]}),
                json!({"name": "Grace Brewster Murray Hopper, rear admiral", "age": 85}),
            ],
        ),
        (
            "call",
            json!({"oneOf": [
                {"type": "object", "properties": {"name": {"const": "get_weather"},
                    "arguments": {"type": "object", "properties": {
                    "city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]},
                        "days": {"type": "integer", "minimum": 1, "maximum": 14}},
                    "required": ["city"], "additionalProperties": false}},
                        "required": ["name", "arguments"], "additionalProperties": false},
                {"type": "object", "properties": {"name": {"const": "search"},
                    "arguments": {"type": "object", "properties": {
                    "query": {"type": "string", "maxLength": 200},
                        "from": {"type": "string", "format": "date"}},
                    "required": ["query"], "additionalProperties": false}},
                        "required": ["name", "arguments"], "additionalProperties": false}]}),
            vec![
                json!({"name": "get_weather",
                    "arguments": {"city": "San Francisco", "unit": "celsius", "days": 3}}),
                json!({"name": "search", "arguments": {"query": "the history of structured output \
                    in language models", "from": "2024-02-29"}}),
            ],
        ),
        (
            "tree",
            json!({"$defs": {"node": {"type": "object",
                "properties": {"value": {"type": ["number", "string"]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["value"], "additionalProperties": false}}, "$ref": "#/$defs/node"}),
            vec![json!({"value": 1.5, "children": [{"value": "left",
                    "children": [{"value": -3}, {"value": "a leaf with a longer text in it"}]},
                    {"value": 2e3}]})],
        ),
        (
            "many",
            json!({"type": "object", "properties": many(&|n| match n % 4 {
                0 => json!({"type": "string"}), 1 => json!({"type": "integer"}),
                    2 => json!({"enum": ["low", "medium", "high"]}),
                    _ => json!({"type": "boolean"})}),
                "additionalProperties": false}),
            vec![many(&|n| match n % 4 {
                0 => json!("some text"),
                1 => json!(n),
                2 => json!("medium"),
                _ => json!(n % 3 == 0),
            })],
        ),
        (
            "any",
            json!({"type": "object"}),
            vec![
                json!({"version": "3.8", "services": {"web": {"image": "nginx:latest",
                    "ports": ["80:80", "443:443"], "environment": {"DEBUG": false, "WORKERS": 4}},
                "database": {"image": "postgres", "volumes": ["data:/var/lib/postgresql/data"],
                    "replicas": null}}}),
            ],
        ),
        (
            "pattern",
            json!({"type": "object", "properties": {"id": {"type": "string",
                "pattern": "^[A-Z]{3}-[0-9]{4,8}$"},
                "when": {"type": "string", "format": "date-time"},
                "amount": {"type": "number", "minimum": 0, "maximum": 1_000_000},
                    "note": {"type": "string", "minLength": 3, "maxLength": 500}},
                "required": ["id", "when", "amount", "note"], "additionalProperties": false}),
            vec![
                json!({"id": "ABC-123456", "when": "2026-11-25T10:48:13Z", "amount": 1234.56,
                    "note": "Paid by card; the receipt was sent to the address on file."}),
            ],
        ),
    ]
}
