//! From conversations to prompts: content that a template cannot show is adapted, and user text
//! remains text.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use proptest::prelude::*;
use samite_chat::{
    BUILTIN, ChatTemplate, Content, ContentPart, DateTime, Guard, Limits, Message, MessageRole,
    Prompt, PromptOptions, PromptPiece, Sources, Template, TemplateError, Tool, ToolCall,
};
use samite_text::{Tokenizer, TokenizerModel, VocabData};
use serde_json::json;

fn options() -> PromptOptions {
    PromptOptions::new(DateTime::new(1_709_210_096, 0))
}

fn with_tools() -> PromptOptions {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    PromptOptions {
        tools: vec![Tool::new("get_weather", "Weather", parameters)],
        ..options()
    }
}

fn template(source: &str) -> ChatTemplate {
    let sources = Sources {
        default: Some(source.to_owned()),
        ..sources()
    };
    ChatTemplate::choose(&sources, None).unwrap()
}

fn sources() -> Sources {
    Sources {
        bos: "<s>".to_owned(),
        eos: "</s>".to_owned(),
        ..Sources::default()
    }
}

fn no_guard() -> Guard {
    Guard::new([])
}

fn prompt(source: &str, messages: &[Message], options: &PromptOptions) -> String {
    template(source)
        .prompt(messages, options, &no_guard())
        .unwrap()
        .text()
}

/// Shows every field of a message.
const ALL: &str = "{% if tools %}{{ tools|tojson }}\n{% endif %}{% for m in messages %}\
    {{ m.role }}:{{ m.content if m.content is string else m.content|tojson }}\
    {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}\
    {% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments|tojson }}\
    {% endfor %}\
    {{ m.tool_call_id }};{% endfor %}{% if add_generation_prompt %}assistant:<think>{% endif %}";

#[test]
fn developer_and_system_messages_are_merged() {
    let messages = [
        Message::system("a"),
        Message::new(MessageRole::Developer, "b"),
        Message::user("c"),
        Message::new(MessageRole::Developer, "d"),
    ];
    assert_eq!(
        prompt(ALL, &messages, &options()),
        "system:a\n\nb;user:c;system:d;assistant:<think>"
    );
    let one = [
        Message::new(MessageRole::Developer, "b"),
        Message::user("c"),
    ];
    assert_eq!(
        prompt(ALL, &one, &options()),
        "system:b;user:c;assistant:<think>"
    );
}

#[test]
fn system_text_moves_to_the_next_message_if_unsupported() {
    let source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let messages = [Message::system("a"), Message::user("b")];
    assert_eq!(prompt(source, &messages, &options()), "user:a\n\nb;");
    assert_eq!(prompt(source, &messages[..1], &options()), "user:a;");
    let assistant = [Message::system("a"), Message::assistant("b")];
    assert_eq!(
        prompt(source, &assistant, &options()),
        "user:a;assistant:b;"
    );
}

#[test]
fn arguments_become_objects_if_the_template_needs_them() {
    let call = |arguments: &str| {
        let mut message = Message::assistant(Content::None);
        message.tool_calls = vec![ToolCall::new("1", "f", arguments)];
        [Message::user("u"), message]
    };
    let shown = |source: &str, arguments: &str| prompt(source, &call(arguments), &options());
    assert!(shown(ALL, r#"{"b":1,"a":[2]}"#).contains(r#"assistant:!f{"b": 1, "a": [2]};"#));
    assert!(shown(ALL, "").contains("!f{};"));
    // Malformed arguments are passed as text.
    assert!(shown(ALL, r#"{"b":"#).contains(r#"!f"{\"b\":";"#));
    let as_text = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '!' + c.function.name + c.function.arguments }}{% endfor %}{% endfor %}";
    assert_eq!(shown(as_text, r#"{"b":1}"#), r#"u!f{"b":1}"#);
}

#[test]
fn tool_results_are_ordered_like_their_calls() {
    let mut call = Message::assistant("");
    call.tool_calls = ["1", "2", "3"]
        .map(|id| ToolCall::new(id, "f", "{}"))
        .to_vec();
    let result = |id: &str| Message::tool(id, id);
    let messages = [
        Message::user("u"),
        call,
        result("3"),
        result("x"),
        result("1"),
        result("2"),
    ];
    let text = prompt(ALL, &messages, &options());
    assert!(text.contains("tool:11;tool:22;tool:33;tool:xx;"), "{text}");
}

#[test]
fn tools_are_explained_for_templates_without_tool_support() {
    let plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let mut call = Message::assistant("");
    call.tool_calls = vec![ToolCall::new("1", "get_weather", r#"{"city": "Bern"}"#)];
    let messages = [Message::user("u"), call, Message::tool("1", "rain")];
    let text = prompt(plain, &messages, &with_tools());
    assert!(text.starts_with("system:You may call"), "{text}");
    for part in [
        "get_weather",
        "assistant:<tool_call>{\"name\": \"get_weather\", \"arguments\": \
         {\"city\": \"Bern\"}}</tool_call>;",
        "rain",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let known = prompt(ALL, &messages, &with_tools());
    assert!(
        known.starts_with("[{\"type\": \"function\", \"function\": {\"name\": \"get_weather\""),
        "{known}"
    );
}

#[test]
fn calls_that_a_template_lacks_are_written_as_the_model_does() {
    let show = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let mut calls = Message::assistant("Well.");
    calls.tool_calls = vec![
        ToolCall::new(
            "1",
            "get_weather",
            r#"{"city": "Bern\"<|tool_call_end|>", "a": [1, null]}"#,
        ),
        ToolCall::new("2", "get_weather", ""),
    ];
    let messages = [Message::user("u"), calls];
    for (beginning, expected) in [
        (
            "List of tools: [",
            "assistant:Well.<|tool_call_start|>[get_weather(city=\"Bern\\\"<|tool_call_end|>\", \
             a=[1, None]), get_weather()]<|tool_call_end|>;",
        ),
        (
            "<|tool_call|> ",
            "assistant:Well.<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \
             \"Bern\\\"<|tool_call_end|>\", \"a\": [1, null]}}, {\"name\": \"get_weather\", \
             \"arguments\": {}}];",
        ),
    ] {
        let source = format!("{beginning}{{{{ tools|tojson }}}}{show}");
        let template = template(&source);
        let marks = ["<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call|>"];
        let guard = Guard::new(marks.map(str::to_owned));
        let prompt = template.prompt(&messages, &with_tools(), &guard).unwrap();
        let text = prompt.text();
        assert!(text.contains(expected), "{text}");
        // What the caller wrote stays text; the marks of the format are tokens.
        let plain = prompt.pieces.iter().filter(|piece| !piece.parse_special);
        let plain: Vec<&str> = plain.map(|piece| piece.text.as_str()).collect();
        assert!(plain.contains(&"<|tool_call_end|>"), "{plain:?}");
        assert!(!plain.iter().any(|text| text.contains("Well")), "{plain:?}");
    }
}

#[test]
fn message_content_has_the_kind_the_template_supports() {
    let parts = |parts: Vec<ContentPart>| [Message::user(Content::Parts(parts))];
    let text = |text: &str| ContentPart::Text {
        text: text.to_owned(),
    };
    let only_text = "{% for m in messages %}{{ m.content + ';' }}{% endfor %}";
    assert_eq!(
        prompt(only_text, &parts(vec![text("a"), text("b")]), &options()),
        "a\nb;"
    );
    let only_parts = "{% for m in messages %}{% for p in m.content %}[{{ p.type }} {{ p.text }}]{% endfor %}{% endfor %}";
    assert_eq!(
        prompt(only_parts, &[Message::user("a")], &options()),
        "[text a]"
    );
    let picture = ContentPart::ImageUrl {
        image_url: json!({"url": "data:"}),
    };
    assert_eq!(
        prompt(
            only_parts,
            &parts(vec![picture.clone(), text("a")]),
            &options()
        ),
        "[image ][text a]"
    );
    let refused = template(only_text).prompt(&parts(vec![picture]), &options(), &no_guard());
    assert!(matches!(refused, Err(TemplateError::Conversation { place,
            .. }) if place == "messages[0].content"));
}

#[test]
fn the_generation_prompt_is_the_difference_of_two_renderings() {
    let chat = template(ALL);
    let made = chat
        .prompt(&[Message::user("u")], &options(), &no_guard())
        .unwrap();
    assert_eq!(made.generation_prompt, "assistant:<think>");
    let none = PromptOptions {
        add_generation_prompt: false,
        ..options()
    };
    let made = chat
        .prompt(&[Message::user("u")], &none, &no_guard())
        .unwrap();
    assert_eq!(
        (made.text().as_str(), made.generation_prompt.as_str()),
        ("user:u;", "")
    );
    let go_on = PromptOptions {
        continue_last: true,
        ..options()
    };
    let made = chat
        .prompt(
            &[Message::user("u"), Message::assistant("Well, ")],
            &go_on,
            &no_guard(),
        )
        .unwrap();
    assert_eq!(made.text(), "user:u;assistant:<think>Well, ");
    assert_eq!(made.generation_prompt, "assistant:<think>Well, ");
}

#[test]
fn templates_are_chosen_by_name_text_and_tools() {
    let named = |name: &str, source: &str| (name.to_owned(), source.to_owned());
    let own = Sources {
        default: Some("default{{ messages[0].content }}".to_owned()),
        named: vec![
            named(
                "tool_use",
                "tools{{ messages[0].content }}{{ tools[0].function.name }}",
            ),
            named("rag", "rag"),
        ],
        ..sources()
    };
    let shown = |sources: &Sources, wanted: Option<&str>, options: &PromptOptions| {
        let chat = ChatTemplate::choose(sources, wanted).unwrap();
        chat.prompt(&[Message::user("!")], options, &no_guard())
            .unwrap()
            .text()
    };
    assert_eq!(shown(&own, None, &options()), "default!");
    assert_eq!(shown(&own, None, &with_tools()), "tools!get_weather");
    assert_eq!(shown(&own, Some("default"), &options()), "default!");
    assert_eq!(shown(&own, Some("rag"), &options()), "rag");
    assert_eq!(shown(&own, Some("{{ 'given' }}"), &options()), "given");
    assert_eq!(
        shown(&own, Some("phi3"), &options()),
        "<|user|>\n!<|end|>\n<|assistant|>\n"
    );
    let bare = ChatTemplate::choose(&sources(), None).unwrap();
    assert_eq!(bare.warnings().len(), 1);
    assert_eq!(
        shown(&sources(), None, &options()),
        "<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\n"
    );
    let unknown = ChatTemplate::choose(&own, Some("mistrall"))
        .unwrap_err()
        .to_string();
    assert!(
        unknown.contains("mistrall") && unknown.contains("rag, chatml"),
        "{unknown}"
    );
    let broken = Sources {
        named: vec![named("tool_use", "{% if %}")],
        ..own
    };
    assert!(ChatTemplate::choose(&broken, None).unwrap().warnings()[0].contains("tool_use"));
    assert_eq!(shown(&broken, None, &options()), "default!");
}

#[test]
fn harmful_templates_are_refused() {
    let render = |source: &str| {
        Template::new(source)
            .and_then(|template| template.render(&json!({"messages": []}), DateTime::new(0, 0)))
    };
    let is_limit = |source: &str| matches!(render(source), Err(TemplateError::Limit(_)));
    assert!(is_limit(
        "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}"
    ));
    assert!(is_limit(
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ));
    assert!(is_limit(
        "{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}"
    ));
    assert!(is_limit(&"x".repeat(300_000)));
    let deep = "{% set x = [1] %}".to_owned() + &"{% set x = [x] %}".repeat(10_000) + "{{ x }}";
    assert!(is_limit(&deep));
    // Constructs that need stack, for each form of nesting without brackets: at the limit and
    // beyond.
    for (before, part, after) in [
        ("{{ ", "- ", "1 }}"),
        ("{{ ", "not ", "1 }}"),
        ("{{ a", ".a", " }}"),
        ("{{ 1", "+1", " }}"),
        ("{{ 1", "~1", " }}"),
        ("{{ 1", "|string", " }}"),
        ("{{ ", "1 if 1 else ", "1 }}"),
        ("{{ {'a': {}}.a", ".a", " }}"),
    ] {
        let source = |count| format!("{before}{}{after}", part.repeat(count));
        assert!(is_limit(&source(9999)), "{part}");
        // Whatever the result, the program must not abort.
        let _ = render(&source(490));
    }
    let conditions = |count| format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(count));
    assert!(is_limit(&conditions(501)));
    assert_eq!(render(&conditions(500)).unwrap(), "");
    for costly in [
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ '{:>1000000000}'.format(1) }}",
    ] {
        assert!(is_limit(costly), "{costly}");
    }
    assert_eq!(render("{{ '{:>4}'.format(1) }}").unwrap(), "   1");
    for source in [
        "{% for i in range(3) %}{{ loop.cycle() }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace(x=[]) %}{% set _ = ns.x.append(ns) %}{{ ns }}",
        "{% set ns = namespace(x=[]) %}{% set _ = ns.x.append([{'a': ns}]) %}{{ ns.x }}",
        "{% set ns = namespace() %}{% set ns.x = {'a': [ns]} %}{{ ns }}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
    ] {
        assert!(render(source).is_err(), "{source}");
    }
    let kept = "{% set ns = namespace(a=[1], b=[]) %}{% set ns.b = ns.b + [ns.a, {'a': ns.a}] %}{% set _ = ns.a.append(2) %}{{ ns.a }}{{ ns.b }}";
    assert_eq!(render(kept).unwrap(), "[1, 2][[1], {'a': [1]}]");
    assert!(is_limit(&format!("{{{{ {} }}}}", "(".repeat(50_000))));
    let nested = "(".repeat(1000);
    assert!(matches!(
        Template::new(&format!("{{{{ {nested} }}}}")),
        Err(TemplateError::Syntax { .. })
    ));
    assert_eq!(
        render("\n{{ raise_exception('so' ~ 1) }}"),
        Err(TemplateError::Refused("so1".to_owned()))
    );
    assert!(matches!(
        render("\n{{ nothing.at.all }}"),
        Err(TemplateError::Render { line: 2, .. })
    ));
    assert!(matches!(
        Template::new("\n\n{% if %}"),
        Err(TemplateError::Syntax { line: 3, .. })
    ));
    let small = Limits {
        output: 100,
        ..Limits::default()
    };
    let long = Template::with_limits("{% for i in range(99) %}xx{% endfor %}", small).unwrap();
    assert!(matches!(
        long.render(&json!({}), DateTime::new(0, 0)),
        Err(TemplateError::Limit(_))
    ));
}

const SPECIAL: [&str; 6] = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "<think>",
];

fn tokenizer() -> Tokenizer {
    let letters = (0u32..=0xff).map(|byte| format!("<0x{byte:02X}>"));
    let mut tokens = vec!["<unk>".to_owned()];
    tokens.extend(SPECIAL.map(str::to_owned));
    let first_byte = tokens.len();
    tokens.extend(letters);
    let mut data = VocabData::new(
        TokenizerModel::Llama,
        tokens
            .iter()
            .map(|token| token.clone().into_bytes())
            .collect(),
    );
    let kind = |i: usize| {
        if i == 0 {
            2
        } else if i == 6 {
            4
        } else if i < first_byte {
            3
        } else {
            6
        }
    };
    data.token_types = Some((0..tokens.len()).map(kind).collect());
    data.scores = Some(vec![0.0; tokens.len()]);
    data.add_space_prefix = Some(false);
    data.add_bos = Some(true);
    Tokenizer::new(data).unwrap()
}

#[test]
fn texts_surround_the_tiles_of_images() {
    let tokenizer = tokenizer();
    let ids = |text: &str| tokenizer.tokenize(text, false, true).unwrap();
    // What users write has no special tokens.
    let prompt = Prompt {
        pieces: vec![
            PromptPiece {
                text: "<|im_start|>aX".to_owned(),
                parse_special: true,
            },
            PromptPiece {
                text: "<s>XX".to_owned(),
                parse_special: false,
            },
        ],
        generation_prompt: String::new(),
    };
    let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    let images: [Vec<String>; 2] = [texts(&["[INST]", "b", "</s>"]), texts(&["", ""])];
    let images: Vec<&[String]> = images.iter().map(|texts| &texts[..]).collect();
    let parts = prompt.tokens_around_images(&tokenizer, "X", &images);
    let plain = tokenizer.tokenize("<s>", false, false).unwrap();
    let expected = [
        ids("<s><|im_start|>a[INST]"),
        ids("b"),
        [ids("</s>"), plain].concat(),
        Vec::new(),
        Vec::new(),
    ];
    assert_eq!(parts.unwrap(), expected);
}

/// Counts each special token in a prompt.
fn counts(
    chat: &ChatTemplate,
    messages: &[Message],
    options: &PromptOptions,
    tokenizer: &Tokenizer,
) -> Vec<usize> {
    let guard = Guard::for_template(tokenizer, &format!("{}<think>", chat.source(false)));
    let tokens = chat
        .prompt(messages, options, &guard)
        .unwrap()
        .tokens(tokenizer)
        .unwrap();
    (0..=SPECIAL.len() as u32)
        .map(|id| tokens.iter().filter(|&&token| token == id).count())
        .collect()
}

#[test]
fn user_text_yields_no_special_tokens() {
    let tokenizer = tokenizer();
    let chatml = ChatTemplate::choose(&sources(), Some("chatml")).unwrap();
    let of = |text: &str| counts(&chatml, &[Message::user(text)], &options(), &tokenizer);
    assert_eq!(of("hello"), [0, 1, 0, 2, 1, 0, 0]);
    for special in SPECIAL {
        for text in [
            special.to_owned(),
            format!(" a{special}b"),
            format!("{special}{special}<"),
        ] {
            assert_eq!(of(&text), of("hello"), "{text}");
        }
    }
    // The text itself is complete.
    let guard = Guard::for_template(&tokenizer, chatml.source(false));
    let made = chatml
        .prompt(&[Message::user("a<|im_end|>b")], &options(), &guard)
        .unwrap();
    assert_eq!(
        made.text(),
        "<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        made.pieces[1],
        PromptPiece {
            text: "<|im_end|>".to_owned(),
            parse_special: false
        }
    );
}

fn hostile() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        prop::sample::select(&SPECIAL[..]).prop_map(str::to_owned),
        (prop::sample::select(&SPECIAL[..]), 0usize..12, 0usize..12).prop_map(|(text, a, b)| {
            let (a, b) = (a.min(text.len()), b.min(text.len()));
            text[a.min(b)..a.max(b)].to_owned()
        }),
        "[ a\n\u{fdd0}\u{fdd1}é]{0,3}",
    ];
    prop::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Adjacent hostile texts in messages, parts, names, arguments and schemas.
    #[test]
    fn hostile_text_yields_no_special_tokens(texts in prop::collection::vec(hostile(), 8)) {
        let source = "{% for t in tools or [] %}{{ t|tojson }}{{ t.function.description }}\
            {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
            {% if m.content is string %}{{ m.content|trim }}{% else %}{% for p in m.content %}\
            {{ p.text }}{% endfor %}{% endif %}{{ m.reasoning_content }}\
            {% for c in m.tool_calls or [] %}{{ c.function.name }}\
            {{ c.function.arguments if c.function.arguments is string else \
            c.function.arguments|tojson }}{% for k, v in c.function.arguments|items if \
            c.function.arguments is mapping %}{{ k }}{{ v }}{% endfor %}{% endfor %}\
            {{ m.name }}<|im_end|>\n{% endfor %}";
        let tokenizer = tokenizer();
        let chat = template(source);
        let made = |texts: &[String]| {
            let mut call = Message::assistant(texts[0].as_str());
            call.reasoning_content = Some(texts[1].clone());
            call.tool_calls = vec![ToolCall::new(
                texts[1].as_str(),
                texts[2].as_str(),
                json!({texts[3].as_str(): texts[4]}).to_string(),
            )];
            let parts = Content::Parts(
                texts[2..5]
                    .iter()
                    .map(|text| ContentPart::Text { text: text.clone() })
                    .collect(),
            );
            let mut result = Message::tool(texts[1].as_str(), texts[5].as_str());
            result.name = Some(texts[6].clone());
            let mut options = options();
            options.tools = vec![Tool::new(
                texts[6].as_str(),
                texts[7].as_str(),
                json!({"properties": {texts[0].as_str(): {"enum": [texts[1]]}}}),
            )];
            counts(
                &chat,
                &[Message::user(parts), call, result],
                &options,
                &tokenizer,
            )
        };
        let neutral: Vec<String> = texts.iter().map(|_| "x".to_owned()).collect();
        // `<think>` is the model's own marker in its own content.
        let mut texts = texts;
        texts[0] = texts[0].replace("<think>", "x");
        prop_assert_eq!(made(&texts), made(&neutral));
    }
}

/// Every special text in user input, with templates of real models.
#[test]
fn hostile_text_yields_no_special_tokens_in_model_templates() {
    let mut templates: Vec<(String, String)> = BUILTIN
        .iter()
        .map(|(name, source)| ((*name).to_owned(), (*source).to_owned()))
        .collect();
    match std::env::var_os("SAMITE_TEST_CHAT_TEMPLATES") {
        Some(folder) => {
            for file in std::fs::read_dir(folder).unwrap() {
                let path = file.unwrap().path();
                if path
                    .extension()
                    .is_some_and(|extension| extension == "jinja")
                {
                    let name = path.file_stem().unwrap().to_string_lossy().into_owned();
                    templates.push((name, std::fs::read_to_string(path).unwrap()));
                }
            }
        }
        None => samite_testing::skipped(
            "SAMITE_TEST_CHAT_TEMPLATES does not name a folder with templates of models",
        ),
    }
    for (name, source) in templates {
        let mut special: Vec<String> = SPECIAL.map(str::to_owned).to_vec();
        for (start, end) in [("<", ">"), ("[", "]")] {
            for (at, _) in source.match_indices(start) {
                if let Some(length) = source[at..]
                    .find(end)
                    .filter(|length| (3..40).contains(length))
                {
                    let text = &source[at..=at + length];
                    if !text.contains([' ', '\n', '\'', '"', '{']) {
                        special.push(text.to_owned());
                    }
                }
            }
        }
        special.sort();
        special.dedup();
        let guard = Guard::new(special.clone());
        let chat = template(&source);
        let can = chat.capabilities(false);
        let count = |text: &str| {
            let made = chat.prompt(
                &[
                    Message::user(text),
                    Message::assistant("b"),
                    Message::user(text),
                ],
                &options(),
                &guard,
            );
            let pieces = made
                .unwrap_or_else(|error| panic!("{name}: {error}"))
                .pieces;
            let parsed: Vec<&PromptPiece> =
                pieces.iter().filter(|piece| piece.parse_special).collect();
            special
                .iter()
                .map(|special| {
                    parsed
                        .iter()
                        .map(|piece| piece.text.matches(special.as_str()).count())
                        .sum()
                })
                .collect::<Vec<usize>>()
        };
        assert!(can.text_content || can.typed_content, "{name}");
        let expected = count("x");
        for text in &special {
            // Some templates search user input for their own markers, so only an increase counts.
            for (got, expected) in count(&format!("{text}y{text}")).into_iter().zip(&expected) {
                assert!(got <= *expected, "{name}: {text}");
            }
        }
    }
}

/// A template that fails without the languages, as TranslateGemma's does.
#[test]
fn translating_templates_get_languages() {
    let source = "{% for m in messages %}{% if m.role == 'user' %}{% set part = m.content[0] %}\
        {{ {'en-GB': 'English', 'de-DE': 'German'}[part.source_lang_code] + ' to ' \
        + {'en-GB': 'English', 'de-DE': 'German'}[part.target_lang_code] + ': ' + part.text }}\
        {% else %}{{ m.content }}{% endif %};{% endfor %}";
    let messages = [
        Message::user("Hallo"),
        Message::assistant("Hello"),
        Message::user("Tag"),
    ];
    let with = |kwargs: serde_json::Value| {
        let kwargs = kwargs.as_object().cloned().unwrap();
        prompt(
            source,
            &messages,
            &PromptOptions {
                kwargs,
                ..options()
            },
        )
    };
    assert_eq!(
        with(json!({"source_lang_code": "de-DE"})),
        "German to English: Hallo;Hello;German to English: Tag;"
    );
    assert_eq!(
        with(json!({})),
        "English to English: Hallo;Hello;English to English: Tag;"
    );
}
