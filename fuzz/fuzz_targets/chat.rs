//! No answer may make a parser of any format panic, or parse differently when it is split into
//! pieces; no template may abort the program.
#![no_main]

use libfuzzer_sys::fuzz_target;
use samite_chat::{
    Answer, AnswerOptions, AnswerParser, DateTime, FORMATS, Limits, PLAIN, Template, Tool,
};

fuzz_target!(|bytes: &[u8]| {
    let Some((&[kind, cut], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    if kind == 255 {
        let limits = Limits {
            steps: 20_000,
            output: 1 << 20,
            ..Limits::default()
        };
        if let Ok(template) = Template::with_limits(&text, limits) {
            let context = serde_json::json!({"messages": [{"role": "user", "content": "a"}],
                "add_generation_prompt": true});
            let _ = template.render(&context, DateTime::new(0, 0));
        }
        return;
    }
    let format = FORMATS
        .get(usize::from(kind))
        .map_or(&PLAIN, |(format, _)| format);
    let schema = serde_json::json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let options = AnswerOptions {
        tools: vec![Tool::new("f", "", schema)],
        ..AnswerOptions::default()
    };
    let whole = Answer::parse(format, &options, "", &text);
    let cut = text.floor_char_boundary(text.len() * usize::from(cut) / 256);
    let mut parser = AnswerParser::new(format, &options, "");
    let mut pieces = Answer::default();
    pieces.add(parser.push(&text[..cut]));
    pieces.add(parser.push(&text[cut..]));
    pieces.add(parser.finish());
    assert_eq!(pieces, whole);
});
