//! Sample answers, whole and in pieces.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_chat::{
    Answer, AnswerEvent, AnswerOptions, AnswerParser, FORMATS, Format, PLAIN, ReasoningFormat, Tool,
};
use serde_json::{Map, Value, json};
use std::path::Path;

struct Case {
    format: &'static Format,
    title: String,
    prompt: String,
    answer: String,
    gives: Map<String, Value>,
}

fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/answers");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut format = Format::named(&name);
        let (mut title, mut prompt, mut answer) = (String::new(), String::new(), String::new());
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "===" => {
                    title = rest.to_owned();
                    prompt.clear();
                }
                "format" => {
                    format = Some(Format::named(rest).unwrap_or_else(|| panic!("{name}: {rest}")))
                }
                "prompt" => prompt = serde_json::from_str(rest).unwrap(),
                "answer" => answer = serde_json::from_str(rest).unwrap(),
                "gives" => cases.push(Case {
                    format: format.unwrap_or_else(|| panic!("{name} is no format")),
                    title: format!("{name}: {title}"),
                    prompt: prompt.clone(),
                    answer: answer.clone(),
                    gives: serde_json::from_str(rest).unwrap(),
                }),
                _ => assert!(line.is_empty() || line.starts_with('#'), "{name}: {line}"),
            }
        }
    }
    cases
}

fn options() -> AnswerOptions {
    let tool = |name: &str, properties: Value| {
        Tool::new(
            name,
            "",
            json!({"type": "object", "properties": properties}),
        )
    };
    let text = || json!({"type": "string"});
    AnswerOptions {
        tools: vec![
            tool(
                "get_weather",
                json!({"city": text(), "days": {"type": "integer"}, "rate": {"type": "number"},
                    "exact": {"type": "boolean"}, "nested": {"type": "object"}}),
            ),
            tool("now", json!({})),
            tool("write_file", json!({"path": text(), "text": text()})),
            tool("search-2", json!({"query": text()})),
        ],
        ..AnswerOptions::default()
    }
}

fn parse<'a>(
    case: &Case,
    options: &AnswerOptions,
    pieces: impl Iterator<Item = &'a str>,
) -> Answer {
    let mut parser = AnswerParser::new(case.format, options, &case.prompt);
    let mut answer = Answer::default();
    for piece in pieces {
        answer.add(parser.push(piece));
    }
    answer.add(parser.finish());
    answer
}

#[test]
fn samples_parse_to_the_expected_answers() {
    let options = options();
    let cases = cases();
    let mut wrong = Vec::new();
    for case in &cases {
        let answer = parse(case, &options, [case.answer.as_str()].into_iter());
        let text = |name: &str| {
            case.gives
                .get(name)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let calls = case
            .gives
            .get("calls")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        let are_equal = calls.len() == answer.calls.len()
            && calls.iter().zip(&answer.calls).all(|(expected, call)| {
                let arguments = serde_json::from_str::<Value>(&call.arguments).ok();
                // A call without arguments is one without an end.
                let same = if expected[1].is_null() {
                    !call.is_complete
                } else {
                    call.is_complete && arguments.as_ref() == Some(&expected[1])
                };
                same && expected[0] == call.name.as_str()
            });
        let ids = case.gives.get("ids").and_then(Value::as_array);
        let same_ids = ids.is_none_or(|ids| {
            ids.iter()
                .zip(&answer.calls)
                .all(|(id, call)| *id == call.id.as_str())
        });
        if text("content") != answer.content
            || text("reasoning") != answer.reasoning
            || !are_equal
            || !same_ids
        {
            wrong.push(format!(
                "{}\n  {:?}\n  expected {}\n  got      {answer:?}",
                case.title,
                case.answer,
                Value::from(case.gives.clone())
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}

/// A small random number generator that makes failures reproducible.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

#[test]
fn every_chunking_parses_the_same() {
    let options = options();
    let mut numbers = Numbers(1);
    for case in cases() {
        let text = case.answer.as_str();
        let whole = parse(&case, &options, [text].into_iter());
        let cuts: Vec<usize> = (0..=text.len())
            .filter(|&cut| text.is_char_boundary(cut))
            .collect();
        for &cut in &cuts {
            let split = parse(&case, &options, [&text[..cut], &text[cut..]].into_iter());
            assert_eq!(split, whole, "{} cut at {cut}", case.title);
        }
        for _ in 0..200 {
            let (a, b) = (
                cuts[numbers.below(cuts.len())],
                cuts[numbers.below(cuts.len())],
            );
            let (a, b) = (a.min(b), a.max(b));
            let split = parse(
                &case,
                &options,
                [&text[..a], &text[a..b], &text[b..]].into_iter(),
            );
            assert_eq!(split, whole, "{} cut at {a} and {b}", case.title);
        }
        for length in 1..8 {
            let pieces = cuts
                .chunks(length)
                .map(|cuts| &text[cuts[0]..])
                .collect::<Vec<_>>();
            let ends = cuts
                .chunks(length)
                .skip(1)
                .map(|cuts| cuts[0])
                .chain([text.len()]);
            let pieces = pieces
                .into_iter()
                .zip(ends)
                .map(|(piece, end)| &piece[..end - (text.len() - piece.len())]);
            assert_eq!(
                parse(&case, &options, pieces),
                whole,
                "{} in pieces of {length}",
                case.title
            );
        }
    }
}

#[test]
fn truncated_answers_contain_no_markers() {
    let options = options();
    // Many of the handwritten ones are malformed.
    let sound = cases()
        .into_iter()
        .filter(|case| !case.title.starts_with("by-hand"));
    for case in sound {
        let Case {
            format,
            title,
            prompt,
            answer: text,
            ..
        } = &case;
        let whole = Answer::parse(format, &options, prompt, text);
        for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
            let mut parser = AnswerParser::new(format, &options, prompt);
            let mut answer = Answer::default();
            answer.add(parser.push(&text[..end]));
            answer.add(parser.cut());
            let place = format!("{title}: {:?}", &text[..end]);
            assert!(
                whole.content.starts_with(answer.content.trim_end()),
                "{place}: {answer:?}"
            );
            let thoughts = answer.reasoning.trim_end();
            assert!(whole.reasoning.starts_with(thoughts), "{place}: {answer:?}");
            for (call, expected) in answer.calls.iter().zip(&whole.calls) {
                assert!(!call.is_complete || call == expected, "{place}: {answer:?}");
            }
        }
    }
}

/// Recombined parts of answers, with a word that no format knows: it must not be lost.
#[test]
fn malformed_answers_do_not_panic_or_lose_text() {
    let cases = cases();
    let options = options();
    let count = 100_000;
    let seed = std::env::var("SAMITE_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(7);
    let mut numbers = Numbers(seed);
    for round in 0..count {
        let case = &cases[numbers.below(cases.len())];
        let mut characters: Vec<char> = case.answer.chars().collect();
        for _ in 0..=numbers.below(3) {
            let at = numbers.below(characters.len() + 1);
            let other = &cases[numbers.below(cases.len())];
            match numbers.below(5) {
                0 => {
                    let end = (at + numbers.below(12)).min(characters.len());
                    characters.drain(at.min(end)..end);
                }
                1 => characters.insert(
                    at,
                    ['{', '}', '"', '<', '>', '\n', '[', ']', ',', '\\', ' ', 'é']
                        [numbers.below(12)],
                ),
                2 => {
                    let end = (at + numbers.below(40)).min(characters.len());
                    let copy = characters[at.min(end)..end].to_vec();
                    let to = numbers.below(characters.len() + 1);
                    characters.splice(to..to, copy);
                }
                3 => {
                    let marks = other.format.marks();
                    if !marks.is_empty() {
                        let mark: Vec<char> = marks[numbers.below(marks.len())].chars().collect();
                        characters.splice(at..at, mark);
                    }
                }
                _ => {
                    let text: Vec<char> = other.answer.chars().collect();
                    let from = numbers.below(text.len() + 1);
                    let end = (from + numbers.below(60)).min(text.len());
                    characters.splice(at..at, text[from..end].iter().copied());
                }
            }
        }
        let at = numbers.below(characters.len() + 1);
        characters.splice(at..at, "Qj7zW".chars());
        // Some end shortly after it, where it may have become part of a call.
        if numbers.below(4) == 0 {
            characters.truncate(at + 5 + numbers.below(12));
        }
        let text: String = characters.iter().collect();
        let case = Case {
            format: case.format,
            title: String::new(),
            prompt: case.prompt.clone(),
            answer: text,
            gives: Map::new(),
        };
        let whole = parse(&case, &options, [case.answer.as_str()].into_iter());
        let shown = format!(
            "{}{}{}",
            whole.content,
            whole.reasoning,
            whole
                .calls
                .iter()
                .map(|call| format!("{}{}{}", call.id, call.name, call.arguments))
                .collect::<String>()
        );
        assert!(
            shown.contains("Qj7zW"),
            "round {round}, {}: {:?}\n{whole:?}",
            case.format.name,
            case.answer
        );
        let cut = case
            .answer
            .floor_char_boundary(numbers.below(case.answer.len() + 1));
        let split = parse(
            &case,
            &options,
            [&case.answer[..cut], &case.answer[cut..]].into_iter(),
        );
        assert_eq!(
            split, whole,
            "round {round}, {}: {:?} cut at {cut}",
            case.format.name, case.answer
        );
    }
}

#[test]
fn every_format_has_samples() {
    let cases = cases();
    for format in FORMATS.iter().map(|(format, _)| *format).chain([&PLAIN]) {
        let count = cases
            .iter()
            .filter(|case| case.format.name == format.name)
            .count();
        assert!(
            count >= if format.name == "plain" { 7 } else { 20 },
            "{}: {count}",
            format.name
        );
    }
}

#[test]
fn reasoning_goes_where_the_options_say() {
    let hermes = Format::named("hermes").unwrap();
    let parsed = |reasoning, prompt: &str, text: &str| {
        let answer = Answer::parse(
            hermes,
            &AnswerOptions {
                reasoning,
                ..options()
            },
            prompt,
            text,
        );
        (answer.reasoning, answer.content)
    };
    let text = "<think>\na\n</think>\n\nb";
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(parsed(ReasoningFormat::Auto, "", text), pair("a", "b"));
    assert_eq!(
        parsed(ReasoningFormat::Deepseek, "x<think>\n", "a</think>b"),
        pair("a", "b")
    );
    assert_eq!(parsed(ReasoningFormat::None, "", text), pair("", text));
    assert_eq!(
        parsed(ReasoningFormat::DeepseekLegacy, "", text),
        pair("a", text)
    );
    // Reasoning that the prompt already closed, and markers in the middle of a text, do not count.
    assert_eq!(
        parsed(
            ReasoningFormat::Auto,
            "<think></think>",
            "b <think>c</think>"
        ),
        pair("", "b <think>c</think>")
    );
    for name in ReasoningFormat::NAMES {
        assert!(ReasoningFormat::named(name).is_some());
    }
}

#[test]
fn without_tools_calls_are_text() {
    let hermes = Format::named("hermes").unwrap();
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    let answer = Answer::parse(hermes, &AnswerOptions::default(), "", text);
    assert_eq!((answer.content.as_str(), answer.calls.len()), (text, 0));
}

#[test]
fn arguments_stream_incrementally() {
    let case = cases()
        .into_iter()
        .find(|case| case.title == "function-tagged: call with code")
        .unwrap();
    let mut parser = AnswerParser::new(case.format, &options(), "");
    let mut deltas = 0;
    for (at, c) in case.answer.char_indices() {
        let events = parser.push(&case.answer[at..at + c.len_utf8()]);
        deltas += events
            .iter()
            .filter(|event| matches!(event, AnswerEvent::ToolArguments { .. }))
            .count();
    }
    assert!(deltas > 60, "{deltas}");
    // Ids depend on the call and the seed.
    let two = |seed| {
        Answer::parse(
            Format::named("hermes").unwrap(),
            &AnswerOptions { seed, ..options() },
            "",
            "<tool_call>{\"name\":\"now\"}</tool_call><tool_call>{\"name\":\"now\"}</tool_call>",
        )
        .calls
    };
    let (one, other) = (two(1), two(2));
    assert!(one[0].id != one[1].id && one[0].id != other[0].id && one[0].id.starts_with("call_"));
}
