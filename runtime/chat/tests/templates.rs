//! Compares templates with Python's jinja2; `fixtures/make.py` generated the expected output.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_chat::{BUILTIN, DateTime, Limits, Template, TemplateError};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// 29 February 2024, 12:34:56.
fn now() -> DateTime {
    DateTime::new(1_709_210_096, 0)
}

fn conversations() -> BTreeMap<String, Value> {
    serde_json::from_str(include_str!("fixtures/conversations.json")).unwrap()
}

#[test]
fn own_templates_render_as_in_jinja2() {
    let expected: BTreeMap<String, BTreeMap<String, Value>> =
        serde_json::from_str(include_str!("fixtures/renderings.json")).unwrap();
    let conversations = conversations();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    assert!(expected.contains_key("small"));
    for (name, renderings) in expected {
        let source = std::fs::read_to_string(folder.join(&name).with_extension("jinja")).unwrap();
        let template = Template::new(&source).unwrap();
        for (conversation, expected) in renderings {
            let result = template.render(&conversations[&conversation], now());
            match expected {
                Value::String(text) => {
                    assert_eq!(result.as_ref(), Ok(&text), "{name}, {conversation}")
                }
                other => match other.get("refused") {
                    Some(message) => {
                        let message = message.as_str().unwrap().to_owned();
                        assert_eq!(
                            result,
                            Err(TemplateError::Refused(message)),
                            "{name}, {conversation}"
                        );
                    }
                    None => assert!(result.is_err(), "{name}, {conversation}: {other}"),
                },
            }
        }
    }
}

#[test]
fn model_templates_render_as_in_jinja2() {
    let Some(folder) = std::env::var_os("SAMITE_TEST_CHAT_TEMPLATES") else {
        return samite_testing::skipped(
            "SAMITE_TEST_CHAT_TEMPLATES does not name a folder with templates of models",
        );
    };
    let conversations = conversations();
    let mut wrong = Vec::new();
    let mut templates: BTreeMap<String, Template> = BTreeMap::new();
    for line in include_str!("fixtures/upstream.txt").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let (name, conversation) = (fields[0], fields[1]);
        if !templates.contains_key(name) {
            let path = Path::new(&folder).join(format!("{name}.jinja"));
            let source = std::fs::read_to_string(path).unwrap().replace("\r\n", "\n");
            match Template::new(&source) {
                Ok(template) => templates.insert(name.to_owned(), template),
                Err(error) => {
                    wrong.push(format!("{name}: {error}"));
                    continue;
                }
            };
        }
        let result = templates[name].render(&conversations[conversation], now());
        let is_equal = match (&result, fields[2]) {
            (Err(TemplateError::Refused(_)), "refused") => true,
            // Values that Python's operators reject, such as missing content.
            (_, "error") => true,
            (Ok(text), sum) => {
                format!("{:08x}", crc32fast::hash(text.as_bytes())) == sum
                    && fields[3] == text.len().to_string()
            }
            _ => false,
        };
        if !is_equal {
            let shown = match &result {
                Ok(text) => {
                    if let Some(folder) = std::env::var_os("SAMITE_TEST_CHAT_TEXTS") {
                        std::fs::write(
                            Path::new(&folder).join(format!("{name}.{conversation}.txt")),
                            text,
                        )
                        .unwrap();
                    }
                    "another text".to_owned()
                }
                Err(error) => error.to_string(),
            };
            wrong.push(format!(
                "{name}, {conversation}: {shown} instead of {}",
                fields[2]
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        1820,
        wrong.join("\n")
    );
}

/// Recombined parts of templates: each is rendered or rejected, in bounded time and memory, without
/// aborting the program.
#[test]
fn broken_templates_are_errors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
    let mut sources: Vec<String> = BUILTIN
        .iter()
        .map(|(_, source)| (*source).to_owned())
        .collect();
    sources.push(std::fs::read_to_string(folder.join("small.jinja")).unwrap());
    if let Some(folder) = std::env::var_os("SAMITE_TEST_CHAT_TEMPLATES") {
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path
                .extension()
                .is_some_and(|extension| extension == "jinja")
            {
                sources.push(std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let conversations = conversations();
    let contexts: Vec<&Value> = conversations.values().collect();
    let limits = Limits {
        steps: 20_000,
        output: 1 << 20,
        ..Limits::default()
    };
    let mut state = 1u64;
    let mut below = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit.max(1) as u64) as usize
    };
    let mut rendered = 0;
    for _ in 0..4000 {
        let source = &sources[below(sources.len())];
        let mut text: Vec<char> = source.chars().collect();
        for _ in 0..=below(3) {
            let at = below(text.len() + 1);
            let end = (at + below(30)).min(text.len());
            match below(4) {
                0 => drop(text.drain(at..end)),
                1 => {
                    let other: Vec<char> = sources[below(sources.len())].chars().collect();
                    let from = below(other.len());
                    let to = (from + below(80)).min(other.len());
                    text.splice(at..at, other[from..to].iter().copied());
                }
                2 => {
                    let words = [
                        "{%",
                        "%}",
                        "{{",
                        "}}",
                        "-",
                        "(",
                        ")",
                        "[",
                        "]",
                        "'",
                        "|",
                        "set ",
                        "ns.x = ns",
                        "* 999",
                        "~",
                        "namespace()",
                    ];
                    text.splice(at..at, words[below(words.len())].chars());
                }
                _ => {
                    let copy = text[at..end].to_vec();
                    let to = below(text.len() + 1);
                    text.splice(to..to, copy);
                }
            }
        }
        let text: String = text.into_iter().collect();
        let context = contexts[below(contexts.len())];
        let result = Template::with_limits(&text, limits)
            .and_then(|template| template.render(context, now()));
        rendered += usize::from(result.is_ok());
    }
    // Most are malformed, but some must render.
    assert!(rendered > 200, "{rendered}");
}

/// Returns the peak memory use of the process in bytes.
#[cfg(target_os = "linux")]
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let number = line.unwrap().split_whitespace().nth(1).unwrap();
    number.parse::<usize>().unwrap() << 10
}

#[cfg(target_os = "linux")]
#[test]
fn json_output_is_charged_incrementally() {
    let limits = Limits {
        steps: 100_000,
        ..Limits::default()
    };
    let source = "{% set x = 'a' * 1000000 %}{{ ([x] * 500) | tojson | length }}";
    let template = Template::with_limits(source, limits).unwrap();
    let before = peak();
    let result = template.render(&Value::Null, now());
    assert!(matches!(result, Err(TemplateError::Limit(_))), "{result:?}");
    // The complete text would have 500 MB; 100,000 steps allow 6.4 MB.
    let grown = peak() - before;
    assert!(grown < 100 << 20, "{grown} bytes");
}

/// Templates that would take gigabytes if only their output were charged.
#[cfg(target_os = "linux")]
const GREEDY: [&str; 25] = [
    "{{ ('a' * 600000000) | length }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% for j in range(99) %}{% set _ = ns.l.append('abcdefghijklmnopqrstuvwxyz' ~ j) %}{% endfor %}{% endfor %}",
    "{% set l = range(99999) | list %}{% set l = l * 400 %}{{ l | length }}",
    "{{ ([X] * 5000) | string | length }}",
    "{{ ('' ~ [X] * 5000) | length }}",
    "{% set l = [X, X, X, X, X, X, X, X, X, X] %}{{ (l ~ [l, l, l, l, l, l, l, l, l, l, l, l]) | length }}",
    "{{ ([X] * 5000) | join | length }}",
    "{{ ([{'a': X}] * 5000) | join(attribute='a') | length }}",
    "{{ ''.join([X] * 5000) | length }}",
    "{{ (',' * 60000000).split(',') | length }}",
    "{{ (',' * 60000000).rsplit(',') | length }}",
    "{{ ('\n' * 60000000).splitlines() | length }}",
    "{{ ('\n' * 60000000) | lines | length }}",
    "{{ (',' * 60000000) | split(',') | length }}",
    "{{ ('[' ~ '[],' * 10000000 ~ '[]]') | from_json | length }}",
    "{{ ('{0:9999}' * 500000).format('a') | length }}",
    "{{ ('{0}' * 5000).format(X) | length }}",
    "{{ ('%(a)s' * 5000) | format(a=X) | length }}",
    "{{ ['b'].index([X] * 5000) }}",
    "{{ raise_exception([X] * 5000) }}",
    "{{ [[[1]]] | tojson(indent=X * 40) | length }}",
    "{{ ([1] * 5000) | tojson(separators=(X, X)) | length }}",
    "{{ strftime_now('%A' * 30000000) | length }}",
    "{{ (('\"' * 60000000) | e) | length }}",
];

#[cfg(target_os = "linux")]
#[test]
fn memory_is_charged_before_allocation() {
    let limits = Limits::default();
    for source in GREEDY {
        let source = format!("{{% set X = 'x' * 1000000 %}}{source}");
        let template = Template::new(&source).unwrap();
        let before = peak();
        let result = template.render(&Value::Null, now());
        assert!(
            matches!(result, Err(TemplateError::Limit(_))),
            "{source}: {:?}",
            result.map(|text| text.len())
        );
        // A growing string has up to twice its length in capacity, and is copied when complete.
        let grown = peak() - before;
        assert!(grown < 4 * limits.memory, "{source}: {grown} bytes");
    }
}

/// The memory limit never rejects a long conversation that the step limit allows.
#[test]
fn the_memory_limit_grows_with_the_conversation() {
    let mut sources: Vec<String> = BUILTIN
        .iter()
        .map(|(_, source)| (*source).to_owned())
        .collect();
    if let Some(folder) = std::env::var_os("SAMITE_TEST_CHAT_TEMPLATES") {
        for file in std::fs::read_dir(folder).unwrap() {
            sources.push(std::fs::read_to_string(file.unwrap().path()).unwrap());
        }
    }
    let only_steps = Limits {
        memory: usize::MAX,
        ..Limits::default()
    };
    for count in [10, 300, 600, 1000] {
        let message = |i: usize| {
            let role = if i.is_multiple_of(2) {
                "user"
            } else {
                "assistant"
            };
            serde_json::json!({"role": role, "content": "A sentence of some words. ".repeat(4)})
        };
        let messages: Vec<Value> = (0..=count).map(message).collect();
        let context = serde_json::json!({
            "messages": messages,
            "add_generation_prompt": true,
            "bos_token": "<s>",
            "eos_token": "</s>",
        });
        for source in &sources {
            let Ok(template) = Template::new(source) else {
                continue;
            };
            let limited = template.render(&context, now());
            if matches!(limited, Err(TemplateError::Limit(_))) {
                let template = Template::with_limits(source, only_steps).unwrap();
                let result = template.render(&context, now());
                let start: String = source.chars().take(300).collect();
                assert_eq!(limited, result, "{count} messages: {start}");
            }
        }
    }
}
