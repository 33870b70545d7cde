//! Calls of the Berkeley Function-Calling Leaderboard's data, as models' templates write them, are
//! parsed as the same calls. The data are those of the Python package bfcl-eval.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_chat::{
    Answer, AnswerOptions, AnswerParser, ChatTemplate, Content, DateTime, Guard, Message,
    PromptOptions, Sources, Tool, ToolCall,
};
use samite_testing::skipped;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const FILES: [&str; 8] = [
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
];

/// Templates that write only the first call.
const INCAPABLE: [&str; 3] = [
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "openai-gpt-oss-120b",
];

/// Each template gets one of this many cases.
const SHARE: usize = 16;

/// A question, its tools, and the calls that answer it.
struct Case {
    id: String,
    question: String,
    tools: Vec<Tool>,
    calls: Vec<(String, Map<String, Value>)>,
}

impl Case {
    /// Returns whether formats without quotes can express the case: in place of a string, another
    /// value reads like a string, and a quote within quotes reads like their end.
    fn is_unambiguous(&self) -> bool {
        self.calls.iter().all(|(name, arguments)| {
            let mut tools = self.tools.iter();
            let tool = tools.find(|tool| tool.function.name == *name);
            arguments.iter().all(|(argument, value)| {
                let schema = tool.map(|tool| &tool.function.parameters["properties"][argument]);
                let is_text = schema.is_some_and(|schema| schema["type"] == "string");
                match value.as_str() {
                    Some(text) => !text.contains(['\'', '\\']),
                    None => !is_text && !value.is_null() && !has_quoted_json(value),
                }
            })
        })
    }
}

/// Returns whether a part of a value is a text that reads like another value.
fn has_quoted_json(value: &Value) -> bool {
    match value {
        Value::String(text) => serde_json::from_str::<Value>(text).is_ok(),
        Value::Array(list) => list.iter().any(has_quoted_json),
        Value::Object(members) => members.values().any(has_quoted_json),
        _ => false,
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Replaces the data's types, which are those of Python, with JSON Schema's.
fn schema(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.iter().filter_map(|(name, value)| {
                let value = match (name.as_str(), value.as_str()) {
                    ("type", Some("dict")) => json!("object"),
                    ("type", Some("float")) => json!("number"),
                    ("type", Some("tuple")) => json!("array"),
                    ("type", Some("any")) => return None,
                    _ => schema(value),
                };
                Some((name.clone(), value))
            });
            Value::Object(members.collect())
        }
        Value::Array(list) => list.iter().map(schema).collect(),
        other => other.clone(),
    }
}

/// Returns the first accepted value, of nested objects as well. An empty text means that the value
/// can be missing.
fn first(accepted: &Value) -> Option<Value> {
    let value = accepted.as_array()?.iter().find(|value| *value != "")?;
    Some(match value {
        Value::Object(members) => {
            let members = members
                .iter()
                .filter_map(|(name, value)| Some((name.clone(), first(value)?)));
            Value::Object(members.collect())
        }
        other => other.clone(),
    })
}

fn cases(folder: &Path) -> Vec<Case> {
    let mut cases = Vec::new();
    for file in FILES {
        let name = format!("BFCL_v4_{file}.json");
        let answers = lines(&folder.join("possible_answer").join(&name));
        let answers: BTreeMap<String, Value> = answers
            .into_iter()
            .map(|answer| (answer["id"].as_str().unwrap().to_owned(), answer))
            .collect();
        for line in lines(&folder.join(&name)) {
            let id = line["id"].as_str().unwrap();
            let tools = line["function"].as_array().unwrap().iter().map(|function| {
                let text = |name: &str| function[name].as_str().unwrap_or_default().to_owned();
                Tool::new(
                    text("name"),
                    text("description"),
                    schema(&function["parameters"]),
                )
            });
            let calls = answers[id]["ground_truth"]
                .as_array()
                .unwrap()
                .iter()
                .map(|call| {
                    let (name, arguments) = call.as_object().unwrap().iter().next().unwrap();
                    let arguments = arguments.as_object().unwrap().iter();
                    let arguments =
                        arguments.filter_map(|(name, value)| Some((name.clone(), first(value)?)));
                    (name.clone(), arguments.collect())
                });
            let question = line["question"][0].as_array().unwrap().last().unwrap();
            let case = Case {
                id: id.to_owned(),
                question: question["content"].as_str().unwrap().to_owned(),
                tools: tools.collect(),
                calls: calls.collect(),
            };
            if case.is_unambiguous() {
                cases.push(case);
            }
        }
    }
    cases
}

fn templates(folder: &Path) -> Vec<(String, ChatTemplate)> {
    let files = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let mut files: Vec<PathBuf> = files
        .filter(|path| path.extension().is_some_and(|ending| ending == "jinja"))
        .collect();
    files.sort();
    let templates = files.iter().filter_map(|path| {
        let sources = Sources {
            default: Some(fs::read_to_string(path).unwrap().replace("\r\n", "\n")),
            bos: "<s>".to_owned(),
            eos: "</s>".to_owned(),
            ..Sources::default()
        };
        let name = path.file_stem()?.to_string_lossy().into_owned();
        Some((name, ChatTemplate::choose(&sources, None).ok()?))
    });
    templates.collect()
}

/// Returns what a template writes for the calls of a case, after the prompt. `None` if the template
/// does not continue its prompt.
fn written(template: &ChatTemplate, case: &Case) -> Option<(String, String)> {
    let options = PromptOptions {
        tools: case.tools.clone(),
        ..PromptOptions::new(DateTime::new(1_709_210_096, 0))
    };
    let mut calls = Message::assistant(Content::None);
    let list = case.calls.iter().enumerate();
    let list = list.map(|(number, (name, arguments))| {
        let arguments = Value::Object(arguments.clone()).to_string();
        ToolCall::new(format!("call{number:05}"), name, arguments)
    });
    calls.tool_calls = list.collect();
    let guard = Guard::new([]);
    let mut messages = vec![Message::user(case.question.as_str())];
    let prompt = template.prompt(&messages, &options, &guard).ok()?;
    messages.push(calls);
    let options = PromptOptions {
        add_generation_prompt: false,
        ..options
    };
    let whole = template.prompt(&messages, &options, &guard).ok()?.text();
    let text = whole.strip_prefix(&prompt.text())?;
    Some((text.to_owned(), prompt.generation_prompt))
}

fn parse(template: &ChatTemplate, case: &Case, text: &str, generation_prompt: &str) -> Answer {
    let options = AnswerOptions {
        tools: case.tools.clone(),
        ..AnswerOptions::default()
    };
    let mut parser = AnswerParser::new(template.format(true), &options, generation_prompt);
    let mut answer = Answer::default();
    answer.add(parser.push(text));
    answer.add(parser.finish());
    answer
}

#[test]
fn calls_that_templates_write_are_parsed_as_the_same_calls() {
    let folders = ["SAMITE_TEST_BFCL", "SAMITE_TEST_CHAT_TEMPLATES"].map(std::env::var_os);
    let [Some(data), Some(folder)] = folders else {
        return skipped(
            "SAMITE_TEST_BFCL and SAMITE_TEST_CHAT_TEMPLATES do not name folders with data of bfcl-eval and with templates of models",
        );
    };
    let cases = cases(Path::new(&data));
    let (mut equal, mut wrong) = (0, Vec::new());
    let mut used = BTreeMap::new();
    let templates = templates(Path::new(&folder));
    let capable = templates
        .iter()
        .filter(|(name, _)| !INCAPABLE.contains(&name.as_str()));
    for (number, (name, template)) in capable.enumerate() {
        for case in cases.iter().skip(number % SHARE).step_by(SHARE) {
            let Some((text, generation_prompt)) = written(template, case) else {
                continue;
            };
            let answer = parse(template, case, &text, &generation_prompt);
            let found = answer.calls.iter().map(|call| {
                let arguments = serde_json::from_str(&call.arguments).unwrap_or_default();
                (call.name.clone(), arguments)
            });
            let found: Vec<(String, Map<String, Value>)> = found.collect();
            *used.entry(name.clone()).or_insert(0) += 1;
            if found == case.calls {
                equal += 1;
            } else {
                wrong.push(format!("{name}, {}: {text:?}\n{found:?}", case.id));
            }
        }
    }
    println!("{equal} equal, {} wrong: {used:?}", wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(equal > 1000, "{equal}");
}
