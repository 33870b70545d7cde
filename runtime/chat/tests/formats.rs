//! Detection of the format from the template, and round trips of rendered answers.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_chat::{
    Answer, AnswerOptions, ChatTemplate, DateTime, Format, Guard, Message, PromptOptions, Sources,
    Tool, ToolCall,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

fn tools() -> Vec<Tool> {
    let parameters = json!({"type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"]});
    vec![
        Tool::new("get_weather", "Weather", parameters),
        Tool::new("now", "Time", json!({"type": "object", "properties": {}})),
    ]
}

/// Returns models' templates by name, if the folder exists.
fn templates() -> BTreeMap<String, String> {
    let mut templates = BTreeMap::new();
    match std::env::var_os("SAMITE_TEST_CHAT_TEMPLATES") {
        Some(folder) => {
            for file in std::fs::read_dir(Path::new(&folder)).unwrap() {
                let path = file.unwrap().path();
                if path
                    .extension()
                    .is_some_and(|extension| extension == "jinja")
                {
                    let name = path.file_stem().unwrap().to_string_lossy().into_owned();
                    templates.insert(name, std::fs::read_to_string(path).unwrap());
                }
            }
        }
        None => samite_testing::skipped(
            "SAMITE_TEST_CHAT_TEMPLATES does not name a folder with templates of models",
        ),
    }
    templates
}

#[test]
fn model_templates_select_the_right_format() {
    let templates = templates();
    let mut wrong = Vec::new();
    for line in include_str!("fixtures/formats.txt").lines() {
        let (name, format) = line.split_once(' ').unwrap();
        assert!(Format::named(format).is_some(), "{line}");
        if let Some(source) = templates.get(name) {
            let got = Format::of_template(source).name;
            if got != format {
                wrong.push(format!("{name}: {got} instead of {format}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn answers_rendered_by_model_templates_parse_back() {
    let sources = |source: &str| Sources {
        default: Some(source.to_owned()),
        named: Vec::new(),
        bos: "<s>".to_owned(),
        eos: "</s>".to_owned(),
    };
    let options = PromptOptions {
        tools: tools(),
        ..PromptOptions::new(DateTime::new(0, 0))
    };
    let ended = PromptOptions {
        add_generation_prompt: false,
        ..options.clone()
    };
    let guard = Guard::new([]);
    let mut wrong = Vec::new();
    let mut read = 0;
    for (name, source) in templates() {
        let chat = ChatTemplate::choose(&sources(&source), None).unwrap();
        if !chat.capabilities(true).tool_calls {
            continue;
        }
        let format = chat.format(true);
        let mut call = Message::assistant("");
        call.tool_calls = vec![ToolCall::new(
            "call00001",
            "get_weather",
            r#"{"city": "Zürich", "days": 2}"#,
        )];
        let messages = [Message::user("Weather?"), call];
        let (Ok(asked), Ok(answered)) = (
            chat.prompt(&messages[..1], &options, &guard),
            chat.prompt(&messages, &ended, &guard),
        ) else {
            wrong.push(format!("{name}: not rendered"));
            continue;
        };
        let (asked, answered) = (asked, answered.text());
        let before = asked.text();
        let same = before
            .bytes()
            .zip(answered.bytes())
            .take_while(|(a, b)| a == b)
            .count();
        // Two markers may have a common prefix.
        let begun = before[..before.floor_char_boundary(same)]
            .rfind('<')
            .filter(|&at| !before[at..same].contains('>'));
        let same = begun.unwrap_or(same);
        let answer = &answered[answered.floor_char_boundary(same)..];
        let begin = &before[..before.floor_char_boundary(same)];
        // The part of the prompt that belongs to the answer, as far as both have it.
        let prompt = begin.rfind("Weather?").map_or("", |at| &begin[at + 8..]);
        let parsed = Answer::parse(
            format,
            &AnswerOptions {
                tools: tools(),
                ..AnswerOptions::default()
            },
            prompt,
            answer,
        );
        let arguments = parsed
            .calls
            .first()
            .and_then(|call| serde_json::from_str::<Value>(&call.arguments).ok());
        let is_read = parsed.calls.len() == 1
            && parsed.calls[0].name == "get_weather"
            && arguments == Some(json!({"city": "Zürich", "days": 2}));
        if is_read {
            read += 1;
        } else {
            wrong.push(format!(
                "{name} ({}): {answer:?} after {prompt:?} gives {parsed:?}",
                format.name
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{read} are read; not:\n{}",
        wrong.join("\n")
    );
}
