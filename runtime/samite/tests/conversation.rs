//! Conversations with synthetic models, whose vocabularies contain the words that a test needs.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite::chat::{AnswerEvent, MessageRole, Tool};
use samite::gguf::{GgufFile, LoadMode, StringArray, TensorSpec, Value, Writer};
use samite::llm::{
    Context, ContextOptions, Finish, GenerateOptions, Model, ModelOptions, Session, SyntheticModel,
};
use samite::registry::Registry;
use samite::text::{Sampler, SamplerParams};
use samite::{AnswerUpdate, AsyncConversation, Conversation, ConversationError, ToolChoice};
use serde_json::json;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use tokio_stream::StreamExt;

const TEMPLATE: &str = "{% for m in messages %}{% if m.content == 'bad' %}\
    {{ raise_exception('bad words') }}{% endif %}\
    [{{ m.role }}]{% for call in m.tool_calls or [] %}<tool_call>\
    {{ call.function | tojson }}</tool_call>{% endfor %}{{ m.content or '' }}\
    {% endfor %}[assistant]";

/// Creates a model with these words as tokens and this template. The first word has the largest id.
fn model(words: &[&str], template: &str) -> Arc<Model> {
    let folder = tempfile::tempdir().unwrap();
    let (plain, path) = (folder.path().join("plain"), folder.path().join("model"));
    SyntheticModel::tiny("llama").write(&plain).unwrap();
    let file = GgufFile::open(&plain, LoadMode::Mmap).unwrap();
    let mut metadata = file.metadata().clone();
    let texts: &StringArray = metadata.require("tokenizer.ggml.tokens").unwrap();
    let mut texts: Vec<String> = texts
        .iter()
        .map(|text| String::from_utf8(text.to_vec()).unwrap())
        .collect();
    let kinds: &[i32] = metadata.require("tokenizer.ggml.token_type").unwrap();
    let mut kinds = kinds.to_vec();
    const USER_DEFINED: i32 = 4;
    for (i, word) in words.iter().enumerate() {
        let id = texts.len() - 1 - i;
        texts[id] = (*word).to_owned();
        kinds[id] = USER_DEFINED;
    }
    let texts: StringArray = texts.into_iter().collect();
    metadata.set("tokenizer.ggml.tokens", texts).unwrap();
    metadata.set("tokenizer.ggml.token_type", kinds).unwrap();
    metadata
        .set("tokenizer.chat_template", Value::from(template))
        .unwrap();
    let specs = file.tensors().iter();
    let specs = specs.map(|info| TensorSpec::from_info(info, info.dtype).unwrap());
    let mut writer = Writer::create(&path, &metadata, specs.collect()).unwrap();
    for info in file.tensors().iter() {
        writer
            .write_tensor(&info.name, file.tensor_bytes(info).unwrap())
            .unwrap();
    }
    writer.commit().unwrap();
    let devices = Registry::built_in(Default::default()).automatic();
    Model::load(&path, &ModelOptions::new(devices)).unwrap()
}

fn conversation(words: &[&str], template: &str) -> Conversation {
    let options = ContextOptions {
        n_ctx: Some(4096),
        ..ContextOptions::default()
    };
    let context = Context::new(model(words, template), options).unwrap();
    let mut chat = Conversation::new(context).unwrap();
    chat.options.max_tokens = Some(8);
    chat.options.sampling.seed = 7;
    chat
}

fn roles(chat: &Conversation) -> Vec<MessageRole> {
    chat.messages
        .iter()
        .map(|message| message.role.clone())
        .collect()
}

fn go_on(_: &AnswerEvent) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn each_conversation_draws_a_seed() {
    let seed = |model: &Arc<Model>| {
        let context = Context::new(Arc::clone(model), ContextOptions::default()).unwrap();
        Conversation::new(context).unwrap().options.sampling.seed
    };
    let model = model(&[], TEMPLATE);
    assert_ne!(seed(&model), seed(&model));
}

#[test]
fn an_answer_continues_the_rendered_template() {
    let mut chat = conversation(&[], TEMPLATE);
    let model = Arc::clone(chat.context().model());
    chat.system("s");
    chat.system("Be kind.");
    let mut heard = String::new();
    let reply = chat
        .ask_with("Hello", |event| {
            let AnswerEvent::Content(text) = event else {
                panic!("{event:?}")
            };
            heard += text;
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(heard, reply.answer.content);

    let context = Context::new(Arc::clone(&model), ContextOptions::default()).unwrap();
    let mut session = Session::new(context).unwrap();
    let text = "[system]Be kind.[user]Hello[assistant]";
    let tokens = model
        .tokenizer()
        .unwrap()
        .tokenize(text, true, false)
        .unwrap();
    let mut sampler = Sampler::new(SamplerParams {
        seed: 7,
        ..SamplerParams::default()
    })
    .unwrap();
    let options = GenerateOptions {
        max_tokens: Some(8),
        ..GenerateOptions::default()
    };
    let expected = session
        .generate(&tokens, &mut sampler, &options, |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    let generation = reply.generation.unwrap();
    assert_eq!(generation.tokens, expected.tokens);
    assert_eq!(
        roles(&chat),
        [
            MessageRole::System,
            MessageRole::User,
            MessageRole::Assistant
        ]
    );
    assert_eq!(chat.messages[2].content.text(), Some(reply.answer.content));

    // The cached prefix is not computed again, and the new answer uses another seed.
    chat.messages.pop();
    let again = chat.answer(go_on).unwrap().generation.unwrap();
    assert_eq!(again.timings.prompt_tokens, 1);
    assert_ne!(again.tokens, generation.tokens);
}

#[test]
fn failures_leave_the_messages_unchanged() {
    let mut chat = conversation(&[], TEMPLATE);
    chat.ask("good").unwrap();
    let error = chat.ask("bad").unwrap_err();
    assert!(
        matches!(error, ConversationError::Template(_)) && error.to_string().contains("bad words"),
        "{error}"
    );
    let error = chat.ask("x".repeat(20_000)).unwrap_err();
    assert!(error.to_string().contains("do not fit"), "{error}");
    chat.options.sampling.top_p = 2.0;
    let error = chat.ask("good").unwrap_err();
    assert!(error.to_string().contains("top_p"), "{error}");
    assert_eq!(roles(&chat), [MessageRole::User, MessageRole::Assistant]);
}

#[test]
fn an_answer_can_be_stopped_and_cancelled() {
    let mut chat = conversation(&[], TEMPLATE);
    chat.options.max_tokens = None;
    let mut told = 0;
    let reply = chat
        .ask_with("Hello", |_| {
            told += 1;
            ControlFlow::Break(())
        })
        .unwrap();
    assert_eq!(reply.generation.unwrap().finish, Finish::Callback);
    assert_eq!(told, 1);
    let cancel = chat.context().options().cancel.clone();
    let reply = chat.ask_with("Hello", |_| {
        cancel.cancel();
        ControlFlow::Continue(())
    });
    let reply = reply.unwrap();
    assert!(reply.generation.is_none() && !reply.answer.content.is_empty());
    assert_eq!(roles(&chat).len(), 4);
    // No message has been sent yet: the messages contain neither a question nor an answer.
    let before = chat.messages.clone();
    assert!(chat.ask("Are you there?").unwrap_err().is_cancelled());
    assert_eq!(chat.messages, before);
    cancel.reset();
    chat.options.max_tokens = Some(2);
    chat.ask("Hello").unwrap();
}

#[test]
fn a_saved_conversation_resumes_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let mut chat = conversation(&[], TEMPLATE);
    chat.ask("One").unwrap();
    chat.save(&path).unwrap();
    let expected = chat.ask_with("Two", go_on).unwrap();
    let mut other = conversation(&[], TEMPLATE);
    other.ask("Something else").unwrap();
    other.restore(&path).unwrap();
    let reply = other.ask_with("Two", go_on).unwrap();
    assert_eq!(reply.answer, expected.answer);
    assert_eq!(other.messages, chat.messages);
    let (reply, expected) = (reply.generation.unwrap(), expected.generation.unwrap());
    assert!(reply.timings.reused_tokens > 10);
    assert_eq!(reply.timings.reused_tokens, expected.timings.reused_tokens);
    // A plain session's save file is not a conversation and changes nothing.
    let context = Context::new(model(&[], TEMPLATE), ContextOptions::default()).unwrap();
    Session::new(context).unwrap().save(&path, "").unwrap();
    let error = other.restore(&path).unwrap_err().to_string();
    assert!(error.contains("saved: it is no conversation"), "{error}");
    assert_eq!(other.messages.len(), 4);
}

/// A tool call as one token. The model generates it once per text.
const CALL: &str = "<tool_call>{\"name\":\"add\",\"arguments\":{\"a\":1,\"b\":2}}</tool_call>";
const CALLS: &str = "{% if tools %}{{ tools | tojson }}[tools]{% endif %}{% for m in messages %}[\
    {{ m.role }}]{% if m.tool_calls %}\
    <tool_call>{\"name\":\"add\",\"arguments\":{\"a\":1,\"b\":2}}</tool_call>{{ m.tool_calls | tojson }}{% endif %}{{ m.content or '' }}{% endfor %}[assistant]";

fn caller() -> Conversation {
    let mut chat = conversation(&[CALL], CALLS);
    let call = chat.context().model().spec().n_vocab as u32 - 1;
    chat.options.max_tokens = Some(1);
    chat.options.sampling.logit_bias = vec![(call, 100.0)];
    chat.options.sampling.presence_penalty = 200.0;
    chat.options.sampling.last_n = 4096;
    chat
}

fn add() -> Tool {
    let number = json!({"type": "integer"});
    Tool::new(
        "add",
        "Adds",
        json!({"type": "object", "properties": {"a": number, "b": number}}),
    )
}

#[test]
fn tools_are_called_and_the_model_continues() {
    let mut chat = caller();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    chat.add_tool(add(), move |arguments| {
        let sum = arguments["a"].as_i64().unwrap() + arguments["b"].as_i64().unwrap();
        log.lock().unwrap().push(arguments);
        Ok(sum.to_string())
    });
    let mut starts = 0;
    let reply = chat
        .ask_with("1 + 2?", |event| {
            starts += usize::from(matches!(event, AnswerEvent::ToolCallStart { .. }));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(*seen.lock().unwrap(), [json!({"a": 1, "b": 2})]);
    assert_eq!(starts, 1);
    assert_eq!(
        roles(&chat),
        [
            MessageRole::User,
            MessageRole::Assistant,
            MessageRole::Tool,
            MessageRole::Assistant
        ]
    );
    let (call, result) = (&chat.messages[1].tool_calls[0], &chat.messages[2]);
    assert_eq!(result.content.text().as_deref(), Some("3"));
    assert_eq!(result.tool_call_id.as_ref(), Some(&call.id));
    assert!(reply.answer.calls.is_empty());
    // The template mentions tools only if the conversation has any.
    assert!(chat.prompt().unwrap().text().contains("[tools]"));
}

#[test]
fn tool_errors_are_passed_to_the_model() {
    let mut chat = caller();
    chat.add_tool(add(), |_| Err("no numbers today".to_owned()));
    chat.ask("1 + 2?").unwrap();
    let told = |chat: &Conversation| chat.messages[2].content.text().unwrap();
    assert_eq!(told(&chat), "error: no numbers today");
}

#[test]
fn unknown_tools_are_not_called() {
    let mut chat = caller();
    let other = Tool::new("subtract", "Subtracts", json!({"type": "object"}));
    chat.add_tool(other, |_| Ok(String::new()));
    let reply = chat.ask_with("1 + 2?", go_on).unwrap();
    assert!(reply.answer.calls.is_empty(), "{reply:?}");
    assert!(!reply.answer.content.contains("add"), "{reply:?}");
}

#[test]
fn a_required_tool_call_has_valid_arguments() {
    let mut chat = conversation(&[], CALLS);
    let number = json!({"type": "integer", "minimum": -9, "maximum": 9});
    let schema = json!({"type": "object", "properties": {"a": number, "b": number},
        "required": ["a", "b"], "additionalProperties": false});
    chat.declare_tool(Tool::new("add", "Adds", schema));
    chat.options.tool_choice = ToolChoice::Required;
    chat.options.max_tokens = Some(200);
    let mut whole = 0;
    for _ in 0..8 {
        let reply = chat.ask_with("1 + 2?", go_on).unwrap();
        let Some(call) = reply.answer.calls.first().filter(|call| call.is_complete) else {
            let text = &reply.answer.content;
            assert!(text.is_empty() || text.contains("<tool_call>"), "{text}");
            continue;
        };
        let arguments: serde_json::Value = serde_json::from_str(&call.arguments).unwrap();
        // -0 is an integer in JSON, but not an i64.
        let fits = |name: &str| (-9.0..=9.0).contains(&arguments[name].as_f64().unwrap());
        assert!(call.name == "add" && fits("a") && fits("b"), "{call:?}");
        whole += 1;
    }
    assert!(whole > 0, "{whole}");
}

#[test]
fn calls_of_declared_tools_are_returned_to_the_caller() {
    let mut chat = caller();
    chat.declare_tool(add());
    let reply = chat.ask_with("1 + 2?", go_on).unwrap();
    assert_eq!(reply.answer.calls[0].name, "add");
    assert_eq!(roles(&chat), [MessageRole::User, MessageRole::Assistant]);
}

#[test]
fn endless_tool_calls_are_stopped() {
    let mut chat = caller();
    chat.options.sampling.presence_penalty = 0.0;
    chat.options.max_rounds = 3;
    let count = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&count);
    chat.add_tool(add(), move |_| {
        *counted.lock().unwrap() += 1;
        Ok("3".to_owned())
    });
    let error = chat.ask("1 + 2?").unwrap_err();
    assert!(
        matches!(error, ConversationError::TooManyRounds(3)),
        "{error}"
    );
    assert_eq!((*count.lock().unwrap(), chat.messages.len()), (3, 0));
    // An answer that the application ends executes no calls.
    let reply = chat.ask_with("1 + 2?", |_| ControlFlow::Break(())).unwrap();
    assert_eq!((reply.answer.calls.len(), *count.lock().unwrap()), (1, 3));
}

#[derive(serde::Deserialize, schemars::JsonSchema, Debug)]
#[serde(rename_all = "lowercase")]
enum Colour {
    Red,
    Green,
}

#[derive(serde::Deserialize, schemars::JsonSchema, Debug)]
struct Thing {
    #[expect(dead_code)]
    colour: Colour,
    #[expect(dead_code)]
    is_old: bool,
    #[schemars(range(max = 9))]
    count: u8,
    parts: Option<Box<Thing>>,
}

#[test]
fn answers_have_the_requested_type() {
    let mut chat = conversation(&[], TEMPLATE);
    chat.options.max_tokens = Some(400);
    // Some answers are cut off: a model with random weights does not know when to stop.
    let things: Vec<Thing> = (0..8)
        .filter_map(|_| chat.ask_for::<Thing>("A thing, as JSON").ok())
        .collect();
    assert!(things.len() > 2, "{things:?}");
    assert!(things.iter().all(|thing| thing.count <= 9));
    assert_eq!(chat.messages.len(), 2 * things.len());
    assert!(chat.options.keeps_to.is_none());
    chat.options.max_tokens = Some(1);
    let before = chat.messages.len();
    let error = chat.ask_for::<Thing>("A thing").unwrap_err();
    assert!(error.to_string().contains("cut off"), "{error}");
    assert_eq!(chat.messages.len(), before);
    chat.options.max_tokens = Some(8);
    chat.declare_tool(add());
    let error = chat.ask_for::<Thing>("A thing").unwrap_err();
    assert!(
        matches!(error, ConversationError::ToolsAndGrammar),
        "{error}"
    );
    assert!(things.iter().any(|thing| thing.parts.is_none()));
}

#[test]
fn reasoning_before_a_typed_answer_is_unconstrained() {
    let template = "{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}";
    let mut chat = conversation(&["</think>"], template);
    let end = chat.context().model().spec().n_vocab as u32 - 1;
    // A few words of reasoning, then its end.
    chat.options.sampling.logit_bias = vec![(end, 3.0)];
    chat.options.max_tokens = Some(200);
    let mut thought = String::new();
    let mut values = Vec::new();
    for _ in 0..10 {
        if let Ok(value) = chat.ask_for::<bool>("Is it?") {
            values.push(value);
            thought += chat.messages[chat.messages.len() - 1]
                .reasoning_content
                .as_deref()
                .unwrap_or_default();
        }
    }
    assert!(
        values.len() > 5 && !thought.is_empty(),
        "{values:?} {thought}"
    );
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(future)
}

#[test]
fn an_answer_is_a_stream() {
    let mut blocking = conversation(&[], TEMPLATE);
    let expected = blocking.ask("Hello").unwrap();
    let mut chat = AsyncConversation::new(conversation(&[], TEMPLATE)).unwrap();
    block_on(async {
        let mut answering = chat.ask("Hello");
        let mut text = String::new();
        let mut reply = None;
        while let Some(update) = answering.next().await {
            match update.unwrap() {
                AnswerUpdate::Event(AnswerEvent::Content(more)) => text += &more,
                AnswerUpdate::Event(event) => panic!("{event:?}"),
                AnswerUpdate::End(all) => reply = Some(all),
            }
        }
        drop(answering);
        assert_eq!(text, expected);
        assert_eq!(reply.unwrap().answer.content, expected);
        let count = chat.with(|chat| chat.messages.len()).await.unwrap();
        assert_eq!(count, 2);
        let error = chat.ask("bad").next().await.unwrap().unwrap_err();
        assert!(matches!(error, ConversationError::Template(_)), "{error}");
    });
}

#[test]
fn a_dropped_stream_ends_the_answer() {
    let mut conversation = conversation(&[], TEMPLATE);
    conversation.options.max_tokens = None;
    let mut chat = AsyncConversation::new(conversation).unwrap();
    block_on(async {
        drop(chat.ask("Hello"));
        let mut answering = chat.ask("Hello");
        answering.next().await.unwrap().unwrap();
        drop(answering);
        chat.with(|chat| chat.options.max_tokens = Some(2))
            .await
            .unwrap();
        let mut answering = chat.ask("Hello");
        let mut last = None;
        while let Some(update) = answering.next().await {
            last = Some(update.unwrap());
        }
        let Some(AnswerUpdate::End(reply)) = last else {
            panic!("{last:?}")
        };
        assert_eq!(reply.generation.unwrap().tokens.len(), 2);
    });
}

#[test]
fn a_dead_conversation_thread_is_an_error() {
    let mut chat = AsyncConversation::new(conversation(&[], TEMPLATE)).unwrap();
    block_on(async {
        let gone = chat.with(|_| panic!("a mistake of the application")).await;
        assert!(matches!(gone, Err(ConversationError::Gone)));
        let update = chat.ask("Hello").next().await.unwrap();
        assert!(matches!(update, Err(ConversationError::Gone)));
    });
}
