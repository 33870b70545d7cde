//! Checks that texts allowed by the call grammar parse as calls, and that it allows typical model
//! output.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_chat::{Answer, AnswerOptions, AnswerParser, Calls, FORMATS, Format, HERMES, Tool};
use samite_grammar::{GrammarVocabulary, Lazy};
use samite_text::{Constraint, Rng, Tokenizer, TokenizerModel, VocabData};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const END: u32 = 2;
const FIRST_BYTE: u32 = 3;

/// Creates a vocabulary of single bytes and control tokens.
fn vocabulary(controls: &[&str]) -> GrammarVocabulary {
    let mut texts: Vec<Vec<u8>> = ["<unk>", "<s>", "</s>"]
        .map(|t| t.as_bytes().to_vec())
        .to_vec();
    let mut types = vec![2, 3, 3];
    for byte in 0..=255 {
        texts.push(format!("<0x{byte:02X}>").into_bytes());
        types.push(6);
    }
    for control in controls {
        texts.push(control.as_bytes().to_vec());
        types.push(3);
    }
    let mut data = VocabData::new(TokenizerModel::Llama, texts);
    data.token_types = Some(types);
    data.add_space_prefix = Some(false);
    let tokenizer: Arc<Tokenizer> = Arc::new(Tokenizer::new(data).unwrap());
    GrammarVocabulary::new(&tokenizer).unwrap()
}

fn bytes(text: &str) -> impl Iterator<Item = u32> {
    text.bytes().map(|byte| FIRST_BYTE + u32::from(byte))
}

/// Returns the tools of the samples.
fn tools(are_strict: bool) -> Vec<Tool> {
    let tool = |name: &str, properties: Value, required: Value| {
        let limit = json!({"type": "integer", "minimum": 1, "maximum": 9});
        let mut schema =
            json!({"type": "object", "properties": properties, "$defs": {"limit": limit}});
        if are_strict {
            schema["additionalProperties"] = json!(false);
            schema["required"] = required;
        }
        Tool::new(name, "", schema)
    };
    let text = || json!({"type": "string"});
    // Most programs cannot represent numbers beyond a float's range.
    let rate = if are_strict {
        json!({"type": "number", "minimum": -9, "maximum": 9})
    } else {
        json!({"type": "number"})
    };
    // Where arguments stand between markers, a string within JSON could contain such a marker.
    let nested = if are_strict {
        json!({"type": "array", "items": {"type": "integer"}})
    } else {
        json!({"type": "object"})
    };
    vec![
        tool(
            "get_weather",
            json!({"city": text(), "days": {"type": "integer"}, "rate": rate,
                "exact": {"type": "boolean"}, "nested": nested}),
            json!(["city"]),
        ),
        tool("now", json!({}), json!([])),
        tool(
            "write_file",
            json!({"path": text(), "text": text()}),
            json!(["path", "text"]),
        ),
        tool(
            "search-2",
            json!({"query": text(), "order": {"enum": ["new", "old"]},
                "limit": {"$ref": "#/$defs/limit"}}),
            json!(["query"]),
        ),
    ]
}

fn formats() -> Vec<&'static Format> {
    let mut formats: Vec<&Format> = FORMATS.iter().map(|(format, _)| *format).collect();
    formats.dedup();
    formats
}

fn lazy(format: &Format, tools: &[Tool], vocabulary: &GrammarVocabulary) -> Option<Lazy> {
    let calls = format.call_grammar(tools, true)?;
    let constraint = calls
        .grammar
        .constraint(vocabulary)
        .unwrap_or_else(|error| panic!("{}: {error}", format.name));
    Some(Lazy::new(constraint, &calls.triggers).unwrap())
}

fn parse(format: &'static Format, text: &str) -> Answer {
    let options = AnswerOptions {
        tools: tools(false),
        ..AnswerOptions::default()
    };
    let mut parser = AnswerParser::new(format, &options, "");
    let mut answer = Answer::default();
    answer.add(parser.push(text));
    answer.add(parser.finish());
    answer
}

/// Returns the sample answers that consist of calls matching the tools.
fn samples() -> Vec<(&'static Format, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/answers");
    let mut samples = Vec::new();
    for format in formats() {
        let file = folder.join(format!("{}.txt", format.name));
        for line in std::fs::read_to_string(file).unwrap().lines() {
            if let Some(answer) = line.strip_prefix("answer ") {
                samples.push((format, serde_json::from_str(answer).unwrap()));
            }
        }
    }
    samples
}

#[test]
fn the_call_grammar_accepts_model_output() {
    let vocabulary = vocabulary(&[]);
    let tools = tools(false);
    let (mut taken, mut wrong) = (0, Vec::new());
    for (format, text) in samples() {
        let answer = parse(format, &text);
        let fits = |arguments: &str| {
            let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
            let names = [
                "city", "days", "rate", "exact", "nested", "path", "text", "query",
            ];
            arguments
                .as_object()
                .is_some_and(|all| all.keys().all(|name| names.contains(&name.as_str())))
        };
        // Text after the calls is parsed, but the grammar does not allow it.
        let is_sound = !answer.content.ends_with("Done.")
            && answer.calls.iter().all(|call| {
                call.is_complete
                    && fits(&call.arguments)
                    && tools.iter().any(|tool| tool.function.name == call.name)
            });
        let Some(mut lazy) =
            lazy(format, &tools, &vocabulary).filter(|_| is_sound && !answer.calls.is_empty())
        else {
            continue;
        };
        let mut read = 0;
        let stopped = bytes(&text).find_map(|token| {
            let stopped = lazy.accept(token).err();
            read += usize::from(stopped.is_none());
            stopped
        });
        match stopped {
            None if lazy.is_triggered() && lazy.is_complete() => taken += 1,
            why => wrong.push(format!("{}: {text:?} at {read}: {why:?}", format.name)),
        }
    }
    assert!(wrong.is_empty(), "{taken} taken\n{}", wrong.join("\n"));
    assert!(taken > 200, "{taken}");
}

/// Generates a random text that a constraint allows. It often writes a whole marker of the format,
/// and prefers closing tokens as the text grows.
fn write(constraint: &mut dyn Constraint, format: &Format, rng: &mut Rng) -> Option<String> {
    let mut marks: Vec<String> = format.marks().into_iter().map(str::to_owned).collect();
    let ends = ["\"", "}", "]", ",", ":", " ", "0", "a"].map(str::to_owned);
    let names = tools(true).into_iter().flat_map(|tool| {
        let schema = tool.function.parameters["properties"]
            .as_object()
            .unwrap()
            .clone();
        schema.into_iter().map(|(name, _)| name)
    });
    for name in names {
        if let Calls::Tagged(calls) = format.calls {
            marks.push(calls.value_close.replace("{}", &name));
        }
        marks.push(name);
    }
    let mut text = Vec::new();
    for _ in 0..4000 {
        if constraint.is_finished() || (constraint.is_complete() && rng.below(4) == 0) {
            return Some(String::from_utf8(text).unwrap());
        }
        let script = match rng.below(3) {
            0 => rng.below(marks.len()),
            _ => usize::MAX,
        };
        let script = marks.get(script).or_else(|| match rng.below(2) {
            0 => Some(&ends[rng.below(ends.len())]),
            _ => None,
        });
        if let Some(script) = script {
            let mut ahead = constraint.clone_box();
            if bytes(script).all(|token| ahead.accept(token).is_ok()) {
                bytes(script).for_each(|token| constraint.accept(token).unwrap());
                text.extend(script.bytes());
                continue;
            }
        }
        let mask = constraint.mask().unwrap();
        let has = |token: u32| mask[token as usize / 32] >> (token % 32) & 1 == 1;
        let allowed: Vec<u32> = (FIRST_BYTE + 32..FIRST_BYTE + 127)
            .filter(|&token| has(token))
            .collect();
        let any: Vec<u32> = (FIRST_BYTE..FIRST_BYTE + 256)
            .filter(|&token| has(token))
            .collect();
        let among = if allowed.is_empty() { any } else { allowed };
        if among.is_empty() {
            return Some(String::from_utf8(text).unwrap());
        }
        let token = among[rng.below(among.len())];
        constraint.accept(token).unwrap();
        text.push((token - FIRST_BYTE) as u8);
    }
    None
}

#[test]
fn text_allowed_by_the_grammar_parses_as_valid_calls() {
    let vocabulary = vocabulary(&[]);
    let tools = tools(true);
    let mut rng = Rng::new(5);
    let mut without = Vec::new();
    for format in formats() {
        let Some(calls) = format.call_grammar(&tools, true) else {
            without.push(format.name);
            continue;
        };
        let begin = calls.grammar.constraint(&vocabulary).unwrap();
        let mut texts = 0;
        for _ in 0..25 {
            let Some(text) = write(&mut begin.clone(), format, &mut rng) else {
                continue;
            };
            texts += 1;
            let answer = parse(format, &text);
            assert!(
                !answer.calls.is_empty() && answer.content.trim().is_empty(),
                "{}: {answer:?}\n{text:?}",
                format.name
            );
            for call in &answer.calls {
                let tool = tools.iter().find(|tool| tool.function.name == call.name);
                let schema = &tool
                    .unwrap_or_else(|| panic!("{text:?}: {call:?}"))
                    .function
                    .parameters;
                let arguments: Value = serde_json::from_str(&call.arguments)
                    .unwrap_or_else(|error| panic!("{error}: {call:?}\n{text:?}"));
                let validator = jsonschema::validator_for(schema).unwrap();
                assert!(
                    validator.is_valid(&arguments),
                    "{}: {arguments}\n{text:?}",
                    format.name
                );
            }
        }
        assert!(texts >= 10, "{}: {texts} texts came to an end", format.name);
    }
    assert_eq!(
        without,
        [
            "harmony-xml",
            "llm-jp-harmony",
            "harmony",
            "muse",
            "gemma4",
            "lfm2",
            "functionary-3.2"
        ]
    );
}

#[test]
fn control_token_markers_must_be_tokens() {
    let vocabulary = vocabulary(&["<tool_call>", "</tool_call>"]);
    let [open, close] =
        ["<tool_call>", "</tool_call>"].map(|name| vocabulary.tokenizer().find(name).unwrap());
    let mut lazy = lazy(&HERMES, &tools(true)[1..2], &vocabulary).unwrap();
    bytes("So: ").for_each(|token| lazy.accept(token).unwrap());
    lazy.accept(open).unwrap();
    assert!(lazy.is_triggered());
    bytes(r#"{"name": "now", "arguments": {}}"#).for_each(|token| lazy.accept(token).unwrap());
    assert!(!lazy.is_complete() && !lazy.allows(END).unwrap());
    assert!(!lazy.allows(FIRST_BYTE + u32::from(b'<')).unwrap());
    lazy.accept(close).unwrap();
    assert!(lazy.is_complete() && lazy.allows(END).unwrap());
}

#[test]
fn without_parallel_calls_one_call_is_allowed() {
    let vocabulary = vocabulary(&[]);
    let call = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    for (is_parallel, allowed) in [(true, true), (false, false)] {
        let calls = HERMES.call_grammar(&tools(true), is_parallel).unwrap();
        let mut constraint = calls.grammar.constraint(&vocabulary).unwrap();
        bytes(call).for_each(|token| constraint.accept(token).unwrap());
        assert!(constraint.is_complete());
        let goes_on = bytes(call).all(|token| constraint.accept(token).is_ok());
        assert_eq!(goes_on, allowed);
    }
}
