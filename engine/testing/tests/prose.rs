//! Checks sources and documents as text: names of types, names of tests in documents, and the
//! style of CONTRIBUTING.md.
//!
//! What the style asks to avoid is counted, and each count has a ceiling. A change may lower a
//! ceiling, but not raise it.

#![allow(clippy::unwrap_used)]

mod sources;

use sources::text_files;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A rule, its ceiling, and the lines that break it.
struct Rule {
    name: &'static str,
    ceiling: usize,
    breaks: fn(&Line) -> bool,
}

const RULES: [Rule; 7] = [
    Rule {
        name: "doc comments that start with a question or relative word",
        ceiling: 0,
        breaks: starts_with_question,
    },
    Rule {
        name: "household words in place of the field's terms",
        ceiling: 6,
        breaks: |line| line.is_prose() && has_any(line.text, HOUSEHOLD),
    },
    Rule {
        name: "phrases that a shorter sentence does without",
        ceiling: 7,
        breaks: |line| line.is_prose() && has_any(line.text, WORDY),
    },
    Rule {
        name: "comments and text over 100 columns",
        ceiling: 43,
        breaks: is_wide,
    },
    Rule {
        name: "matches on a boolean",
        ceiling: 28,
        breaks: |line| {
            let code = line.text.trim_start();
            code.starts_with("true => ") || code.starts_with("false => ")
        },
    },
    Rule {
        name: "constructors called `of`",
        ceiling: 2,
        breaks: |line| line.text.contains("fn of("),
    },
    Rule {
        name: "limits called other than MAX or MIN",
        ceiling: 0,
        breaks: names_limit,
    },
];

/// Most words of all documents.
const MAX_WORDS: usize = 32_000;

const QUESTION_WORDS: [&str; 13] = [
    "What", "Whether", "Who", "Those", "That", "The same", "As", "So", "Such", "Of", "How",
    "Whose", "Which",
];

const HOUSEHOLD: &[&str] = &[
    "mend",
    "mends",
    "mended",
    "mending",
    "nobody",
    "somebody",
    "whoever",
    "likeliest",
    "thoughts",
    "beginnings",
    "in the place of",
    "tells of",
    "gives up",
    "is told",
    "is asked",
    "lends",
    "planted mistakes",
    "what waits",
    "for want of",
];

const WORDY: &[&str] = &[
    "that there is",
    "that there are",
    ", too",
    "nothing but",
    "so few",
    "of which",
];

struct Line<'a> {
    text: &'a str,
    previous: &'a str,
    is_document: bool,
}

impl Line<'_> {
    /// Returns whether people read the line as text.
    fn is_prose(&self) -> bool {
        self.is_document || self.text.trim_start().starts_with("//")
    }
}

/// Returns whether one of `phrases` occurs, in any case and not within a longer word.
fn has_any(text: &str, phrases: &[&str]) -> bool {
    let text = text.to_lowercase();
    let is_word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    phrases.iter().any(|phrase| {
        text.match_indices(phrase).any(|(at, _)| {
            let starts_word = phrase.starts_with(char::is_alphanumeric);
            let before = text[..at].chars().next_back();
            let after = text[at + phrase.len()..].chars().next();
            !(is_word(after) || starts_word && is_word(before))
        })
    })
}

fn starts_with_question(line: &Line) -> bool {
    let text = line.text.trim_start();
    let Some(text) = text.strip_prefix("/// ").or(text.strip_prefix("//! ")) else {
        return false;
    };
    let is_first = !line.previous.trim_start().starts_with("//");
    let is_word = |word: &str| {
        let rest = text.strip_prefix(word);
        rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
    };
    is_first && QUESTION_WORDS.iter().any(|word| is_word(word))
}

fn is_wide(line: &Line) -> bool {
    // Tables, links and strings cannot be wrapped.
    let is_exempt = if line.is_document {
        line.text.trim_start().starts_with('|') || line.text.contains("](")
    } else {
        line.text.contains('"')
    };
    line.text.chars().count() > 100 && !is_exempt
}

fn names_limit(line: &Line) -> bool {
    let code = line.text.trim_start();
    let code = code.strip_prefix("pub ").unwrap_or(code);
    let code = code.strip_prefix("pub(crate) ").unwrap_or(code);
    let words = ["MOST_", "LEAST_", "LONGEST_", "DEEPEST_", "LARGEST_"];
    let name = code.strip_prefix("const ").or(code.strip_prefix("static "));
    name.is_some_and(|name| words.iter().any(|word| name.starts_with(word)))
}

#[test]
fn the_style_does_not_get_worse() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !root.join("CONTRIBUTING.md").exists() {
        return samite_testing::skipped("the sources of the workspace are not there");
    }
    let files = text_files(&root);
    assert!(files.len() > 900, "only {} files", files.len());
    let mut counts = [0; RULES.len()];
    let mut words = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let is_document = file.extension().is_some_and(|ending| ending == "md");
        let (mut previous, mut is_code) = ("", false);
        for text in text.lines() {
            if is_document && text.starts_with("```") {
                is_code = !is_code;
            } else if !is_code {
                let line = Line {
                    text,
                    previous,
                    is_document,
                };
                for (rule, count) in RULES.iter().zip(&mut counts) {
                    *count += usize::from((rule.breaks)(&line));
                }
                if is_document {
                    words += text.split_whitespace().count();
                }
            }
            previous = text;
        }
    }
    for (rule, count) in RULES.iter().zip(counts) {
        println!("{count} of {}: {}", rule.ceiling, rule.name);
        assert!(
            count <= rule.ceiling,
            "{count} {}, at most {} are allowed: see Style in CONTRIBUTING.md",
            rule.name,
            rule.ceiling
        );
    }
    println!("{words} of {MAX_WORDS} words in documents");
    assert!(
        words <= MAX_WORDS,
        "{words} words in documents: shorten them"
    );
}

/// Returns the name of the type or trait that a line of code defines. `None` for a private enum,
/// which only its file uses.
fn defined_type(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let is_nested = code.len() < line.len();
    let is_private = !code.starts_with("pub");
    let code = match code.strip_prefix("pub(") {
        Some(code) => code.split_once(") ")?.1,
        None => code.strip_prefix("pub ").unwrap_or(code),
    };
    let code = code.strip_prefix("unsafe ").unwrap_or(code);
    let (keyword, rest) = code.split_once(' ')?;
    let is_definition = match keyword {
        "struct" | "trait" | "union" => true,
        "enum" => !is_private,
        // Within a trait or its implementation it is an associated type.
        "type" => !is_nested,
        _ => false,
    };
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    let end = end.unwrap_or(rest.len());
    Some(&rest[..end]).filter(|name| is_definition && !name.is_empty())
}

/// One word, one meaning: readers and searches find a type by its name.
#[test]
fn no_type_name_is_defined_more_than_twice() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !root.join("CONTRIBUTING.md").exists() {
        return samite_testing::skipped("the sources of the workspace are not there");
    }
    // Crates of Rust's own style have their errors under these names.
    let usual = ["Error", "Result"];
    let is_shipped = |path: &&PathBuf| {
        let path = path.strip_prefix(&root).unwrap();
        let is_apart = [
            "tests", "benches", "examples", "fuzz", "tests.rs", "proto.rs",
        ];
        let mut parts = path.iter().filter_map(|part| part.to_str());
        path.extension().is_some_and(|ending| ending == "rs")
            && !parts.any(|part| is_apart.contains(&part))
    };
    let mut definitions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in text_files(&root).iter().filter(is_shipped) {
        let text = std::fs::read_to_string(path).unwrap();
        let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
        for (number, line) in code.lines().enumerate() {
            if let Some(name) = defined_type(line).filter(|name| !usual.contains(name)) {
                let place = format!("{}:{}", path.display(), number + 1);
                definitions.entry(name.to_owned()).or_default().push(place);
            }
        }
    }
    assert!(definitions.len() > 1500, "{}", definitions.len());
    for (name, places) in definitions {
        let places_text = places.join(", ");
        assert!(
            places.len() <= 2,
            "{name} needs qualified names: {places_text}"
        );
    }
}

#[test]
fn type_definitions_are_recognised() {
    for (line, name) in [
        ("pub struct Slot<'a> {", Some("Slot")),
        ("    pub(crate) struct Inner(u32);", Some("Inner")),
        ("pub unsafe trait Vector: Copy {", Some("Vector")),
        ("type Answer = dyn Fn();", Some("Answer")),
        ("    type Item = u32;", None),
        ("enum Wait {", None),
        ("pub enum Wait {", Some("Wait")),
        ("    structure: u32,", None),
        ("pub trait Level", Some("Level")),
        ("pub struct llama_model {", Some("llama_model")),
    ] {
        assert_eq!(defined_type(line), name, "{line}");
    }
}

#[test]
fn tests_named_for_functions_of_ggml_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !root.join("CONTRIBUTING.md").exists() {
        return samite_testing::skipped("the sources of the workspace are not there");
    }
    let table = std::fs::read_to_string(root.join("docs/ggml-functions.tsv")).unwrap();
    let folders = ["base", "bindings", "cli", "devices", "engine", "runtime"];
    let is_code = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "rs");
    let files = folders
        .iter()
        .flat_map(|folder| text_files(&root.join(folder)));
    let code: String = files
        .filter(is_code)
        .map(|path| std::fs::read_to_string(path).unwrap())
        .collect();
    let rows = table.lines().skip(1);
    let tests = rows.filter_map(|row| row.split('\t').nth(3));
    let names: Vec<_> = tests.flat_map(str::split_whitespace).collect();
    assert!(names.len() > 60, "{}", names.len());
    for name in names {
        assert!(code.contains(&format!("fn {name}()")), "no test {name}");
    }
}

#[test]
fn violations_of_every_style_rule_are_detected() {
    let broken = [
        "    /// Whether it is full.",
        "// Nobody waits for it.",
        "// The first, too.",
        "// A comment that is far too long for one line of a hundred columns, as it goes on and on and on.....",
        "            true => 1,",
        "    pub fn of(node: Node) -> Self {",
        "pub(crate) const MOST_BYTES: usize = 1;",
    ];
    let good = [
        "    /// Returns whether it is full.",
        "// No thread waits for it.",
        "// The first also.",
        "// A comment.",
        "            Some(true) => 1,",
        "    pub fn offset(node: Node) -> Self {",
        "pub(crate) const MAX_BYTES: usize = 1;",
    ];
    for (rule, lines) in RULES.iter().zip(broken.iter().zip(good)) {
        let breaks = |text| {
            (rule.breaks)(&Line {
                text,
                previous: "",
                is_document: false,
            })
        };
        assert!(breaks(lines.0), "{}", rule.name);
        assert!(!breaks(lines.1), "{}", rule.name);
    }
}
