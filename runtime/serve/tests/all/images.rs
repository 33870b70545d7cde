//! Images in requests: every API shows the model the same image.

use crate::common::{Server, served};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use samite_core::{CancelToken, DType, Device};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_llm::{
    Context, ContextOptions, GenerateOptions, Model, ModelOptions, Session, SyntheticModel,
    place_images,
};
use samite_requests::{Engine, EngineOptions, drive};
use samite_serve::{App, Hub, ImageFetcher, ServeOptions};
use samite_text::{Sampler, SamplerParams};
use samite_vision::{DecodeLimits, EncodedImage, Encoder, EncoderOptions, SharedEncoder};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

const N_CTX: usize = 768;

fn fixture(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/fixtures");
    fixtures.join(name)
}

fn cpu() -> Arc<dyn Device> {
    CpuDevice::new(CpuOptions::default().with_threads(1))
}

/// Returns a small model of the architecture, which has the width of most encoders.
fn model(architecture: &'static str) -> Arc<Model> {
    model_of_width(architecture, 64)
}

fn model_of_width(architecture: &'static str, width: usize) -> Arc<Model> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let synthetic = SyntheticModel {
        n_embd: width,
        ..SyntheticModel::tiny(architecture)
    };
    synthetic.write(&path).unwrap();
    Model::load(&path, &ModelOptions::new(vec![cpu()])).unwrap()
}

fn encoder(name: &str) -> SharedEncoder {
    let options = EncoderOptions {
        tokens: [None, Some(64)],
        ..EncoderOptions::new(vec![cpu()])
    };
    let encoder = Encoder::load(fixture(&format!("{name}.gguf")), &options).unwrap();
    SharedEncoder::new(encoder)
}

fn context(model: &Arc<Model>, n_ctx: usize, n_seq: usize) -> Context {
    let options = ContextOptions {
        n_ctx: Some(n_ctx),
        n_seq,
        kv_types: [DType::F32; 2],
        images: true,
        ..ContextOptions::default()
    };
    Context::new(Arc::clone(model), options).unwrap()
}

/// Starts a server whose model sees by this encoder.
fn server_with(model: &Arc<Model>, encoder: &SharedEncoder, options: ServeOptions) -> Server {
    let engine = EngineOptions {
        slots: 2,
        ..EngineOptions::default()
    };
    let context = context(model, 2 * N_CTX, engine.n_seq());
    let (handle, _) = drive(Engine::new(context, engine).unwrap()).unwrap();
    let app = App::new(served(options), Arc::clone(model), Some(handle), None).unwrap();
    Server::with_hub(Hub::single(app.with_encoder(encoder.clone())))
}

fn server() -> Server {
    server_with(
        &model("qwen2vl"),
        &encoder("qwen2vl"),
        ServeOptions::default(),
    )
}

/// Returns an image file in base64.
fn file(name: &str) -> String {
    STANDARD.encode(bytes(name))
}

fn bytes(name: &str) -> Vec<u8> {
    static CASES: OnceLock<Value> = OnceLock::new();
    let cases = CASES.get_or_init(|| {
        let cases = std::fs::read_to_string(fixture("decoded.json")).unwrap();
        serde_json::from_str(&cases).unwrap()
    });
    let mut cases = cases["cases"].as_array().unwrap().iter();
    let case = cases.find(|case| case["name"] == name).unwrap();
    let bytes = case["file"].as_array().unwrap().iter();
    bytes.map(|byte| byte.as_u64().unwrap() as u8).collect()
}

fn url(name: &str) -> String {
    format!("data:image/png;base64,{}", file(name))
}

fn image(name: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url(name)}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Sends a request that generates six tokens deterministically.
fn post(server: &Server, path: &str, mut body: Value) -> Value {
    for (name, value) in [("temperature", json!(0)), ("max_tokens", json!(6))] {
        body[name] = value;
    }
    let (status, answer) = server.post(path, &body);
    assert_eq!(status, 200, "{answer}");
    answer
}

fn chat(server: &Server, content: Value) -> Value {
    let body = json!({"messages": [{"role": "user", "content": content}]});
    post(server, "/v1/chat/completions", body)
}

fn said(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

fn completion(server: &Server, prompt: &str, images: &[&str]) -> Value {
    let images: Vec<String> = images.iter().map(|name| file(name)).collect();
    let prompt = json!({"prompt_string": prompt, "multimodal_data": images});
    post(
        server,
        "/completion",
        json!({"prompt": prompt, "n_predict": 6}),
    )
}

#[test]
fn a_prompt_with_images_has_the_text_of_a_session() {
    for (architecture, name) in [
        ("qwen2vl", "qwen2vl"),
        ("gemma3", "gemma3"),
        ("llama", "idefics3"),
    ] {
        let encoder = encoder(name);
        let model = model_of_width(architecture, encoder.spec().row_width());
        let server = server_with(&model, &encoder, ServeOptions::default());
        let tokenizer = model.tokenizer().unwrap();
        let images = ["rgb", "grey"].map(|name| {
            let file = bytes(name);
            let image = EncodedImage::new(&file, &DecodeLimits::default()).unwrap();
            let image = image.decode().unwrap();
            encoder.pieces(&image, &CancelToken::new()).unwrap()
        });
        let mut texts = vec!["Look: ".to_owned()];
        for (pieces, after) in images.iter().zip([" and ", "."]) {
            for (index, text) in pieces.texts.iter().enumerate() {
                if index > 0 {
                    texts.push(String::new());
                }
                texts.last_mut().unwrap().push_str(text);
            }
            texts.last_mut().unwrap().push_str(after);
        }
        assert_eq!(texts.len() > 3, name == "idefics3");
        let parts = texts.iter().enumerate();
        let parts = parts.map(|(i, text)| tokenizer.tokenize(text, i == 0, true).unwrap());
        let tiles: Vec<_> = images
            .iter()
            .flat_map(|image| image.tiles.clone())
            .collect();
        let (tokens, images) = place_images(parts.collect(), &tiles).unwrap();
        let mut session = Session::new(context(&model, N_CTX, 1)).unwrap();
        let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
        let options = GenerateOptions {
            max_tokens: Some(6),
            ..GenerateOptions::default()
        };
        let mut expected = String::new();
        let generated =
            session.generate_with_images(&tokens, images, &mut sampler, &options, |_, text| {
                expected.push_str(text);
                ControlFlow::Continue(())
            });
        generated.unwrap();
        let prompt = "Look: <__media__> and <__media__>.";
        let answer = completion(&server, prompt, &["rgb", "grey"]);
        assert_eq!(answer["content"], expected, "{architecture}");
        assert_eq!(answer["tokens_evaluated"], tokens.len());
        let swapped = completion(&server, prompt, &["grey", "rgb"]);
        assert_eq!(swapped["tokens_evaluated"], tokens.len());
        if architecture == "qwen2vl" {
            assert_ne!(swapped["content"], expected);
        }
    }
}

#[test]
fn all_apis_show_the_same_image() {
    let server = server();
    let content = json!([image("rgb"), text("What is it?")]);
    let whole = chat(&server, content.clone());
    let expected = said(&whole);
    assert_ne!(
        said(&chat(&server, json!([image("grey"), text("What is it?")]))),
        expected
    );
    assert_ne!(
        said(&chat(&server, json!([text("What is it?"), image("rgb")]))),
        expected
    );
    // The template's text is a prompt for the same image.
    let messages = json!({"messages": [{"role": "user", "content": content}]});
    let (_, applied) = server.post("/apply-template", &messages);
    let prompt = applied["prompt"].as_str().unwrap();
    let native = completion(&server, prompt, &["rgb"]);
    assert_eq!(native["content"], expected);
    let source = json!({"type": "base64", "media_type": "image/png", "data": file("rgb")});
    let blocks = json!([{"type": "image", "source": source}, text("What is it?")]);
    let body = json!({"messages": [{"role": "user", "content": blocks}]});
    let anthropic = post(&server, "/v1/messages", body.clone());
    assert_eq!(anthropic["content"][0]["text"], expected);
    let (_, counted) = server.post("/v1/messages/count_tokens", &body);
    assert_eq!(counted["input_tokens"], whole["usage"]["prompt_tokens"]);
    let parts = json!([
        {"type": "input_image", "image_url": url("rgb")},
        {"type": "input_text", "text": "What is it?"},
    ]);
    let body = json!({"input": [{"role": "user", "content": parts}], "max_output_tokens": 6});
    let response = post(&server, "/v1/responses", body);
    assert_eq!(response["output"][0]["content"][0]["text"], expected);
    let options = json!({"temperature": 0, "num_predict": 6});
    let message = json!({"role": "user", "content": "What is it?", "images": [file("rgb")]});
    let body = json!({"messages": [message], "stream": false, "options": options});
    let ollama = post(&server, "/api/chat", body);
    assert_eq!(ollama["message"]["content"], expected);
    let body = json!({"prompt": "What is it?", "images": [file("rgb")], "stream": false,
        "options": options});
    let ollama = post(&server, "/api/generate", body);
    assert_eq!(ollama["response"], expected);
    // A context cannot have images.
    assert!(ollama.get("context").is_none(), "{ollama}");
    // Results of tools may be images.
    let seen = |name: &str| {
        let source = json!({"type": "base64", "media_type": "image/png", "data": file(name)});
        let result = json!([text("a file"), {"type": "image", "source": source}]);
        let call = json!({"type": "tool_use", "id": "1", "name": "look", "input": {}});
        let result = json!({"type": "tool_result", "tool_use_id": "1", "content": result});
        let messages = json!([
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]);
        let tool = json!({"name": "look", "input_schema": {"type": "object"}});
        post(
            &server,
            "/v1/messages",
            json!({"messages": messages, "tools": [tool]}),
        )
    };
    assert_ne!(seen("rgb")["content"], seen("grey")["content"]);
}

#[test]
fn the_next_turn_finds_the_image_in_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let options = ServeOptions {
        slot_save_path: Some(folder.path().to_owned()),
        ..ServeOptions::default()
    };
    let (model, encoder) = (model("qwen2vl"), encoder("qwen2vl"));
    let server = server_with(&model, &encoder, options.clone());
    let content = json!([image("rgb"), text("What is it?")]);
    let first = chat(&server, content.clone());
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let messages = json!([
        {"role": "user", "content": content},
        {"role": "assistant", "content": said(&first)},
        {"role": "user", "content": [text("And this?"), image("grey")]},
    ]);
    let body = json!({"messages": messages});
    let second = post(&server, "/v1/chat/completions", body.clone());
    let cached = |answer: &Value| {
        let details = &answer["usage"]["prompt_tokens_details"];
        details["cached_tokens"].as_u64().unwrap()
    };
    assert!(cached(&second) >= prompt, "{second}");
    // The text moves to another server by a file.
    let slot = second["id_slot"].as_u64().unwrap_or(0);
    let (status, saved) = server.post(
        &format!("/slots/{slot}?action=save"),
        &json!({"filename": "slot"}),
    );
    assert_eq!(status, 200, "{saved}");
    let other = server_with(&model, &encoder, options);
    let (status, restored) = other.post("/slots/0?action=restore", &json!({"filename": "slot"}));
    assert_eq!(status, 200, "{restored}");
    let again = post(&other, "/v1/chat/completions", body);
    assert_eq!(said(&again), said(&second));
    assert!(cached(&again) > prompt, "{again}");
}

#[test]
fn what_cannot_be_seen_is_named() {
    let server = server();
    let refuse = |path: &str, body: Value, status: u16, parts: &[&str]| {
        let (found, answer) = server.post(path, &body);
        let answer = answer.to_string();
        assert_eq!(found, status, "{answer}");
        for part in parts {
            assert!(answer.contains(part), "{part}: {answer}");
        }
    };
    let chat = |part: Value| json!({"messages": [{"role": "user", "content": [part]}]});
    let with = |url: &str| chat(json!({"type": "image_url", "image_url": {"url": url}}));
    let path = "/v1/chat/completions";
    let place = "messages[0].content[0]";
    refuse(
        path,
        with("https://example.com/a.png"),
        400,
        &[place, "not fetched"],
    );
    refuse(
        path,
        with("file:///etc/passwd"),
        400,
        &[place, "not fetched"],
    );
    refuse(
        path,
        with("data:text/html;base64,aGVsbG8="),
        400,
        &["data:image/png"],
    );
    refuse(
        path,
        with("data:image/png,aGVsbG8="),
        400,
        &["data:image/png"],
    );
    refuse(path, with("data:image/png;base64,?"), 400, &["base64"]);
    refuse(path, with("malformed"), 400, &["base64"]);
    refuse(
        path,
        with(&STANDARD.encode("hello")),
        400,
        &["PNG, JPEG, WebP or GIF"],
    );
    let cut = STANDARD.encode(&bytes("rgb")[..60]);
    refuse(
        path,
        with(&format!("data:image/png;base64,{cut}")),
        400,
        &["cannot be decoded"],
    );
    refuse(
        path,
        chat(json!({"type": "image_url"})),
        400,
        &["image_url"],
    );
    refuse(path, chat(json!({"type": "input_audio"})), 400, &["audio"]);
    // A header of 50,000 x 50,000 pixels.
    let mut bomb = bytes("rgb");
    bomb[16..24].copy_from_slice(&[0, 0, 0xc3, 0x50, 0, 0, 0xc3, 0x50]);
    refuse(path, with(&STANDARD.encode(&bomb)), 400, &[place]);
    let many: Vec<Value> = (0..400).map(|_| image("rgb")).collect();
    let many = json!({"messages": [{"role": "user", "content": many}]});
    refuse(path, many, 400, &["exceed_context_size", "1536 tokens"]);
    let native = |prompt: &str, images: Value| {
        let prompt = json!({"prompt_string": prompt, "multimodal_data": images});
        json!({"prompt": prompt})
    };
    refuse(
        "/completion",
        native("<__media__>", json!([])),
        400,
        &["0 images", "places for 1"],
    );
    refuse(
        "/completion",
        native("none", json!([file("rgb")])),
        400,
        &["1 images"],
    );
    refuse(
        "/completion",
        native("<__media__>", json!([5])),
        400,
        &["multimodal_data[0]"],
    );
    let raw = json!({"prompt": "a", "raw": true, "images": [file("rgb")]});
    refuse("/api/generate", raw, 400, &["images", "raw"]);
    let echo = json!({"prompt": {"prompt_string": "<__media__>", "multimodal_data": [file("rgb")]},
        "echo": true, "logprobs": 1});
    refuse("/v1/completions", echo, 400, &["prompt_logprobs"]);
    // Errors name what the client sent, not what it is translated to.
    let user = |content: Value| json!({"role": "user", "content": content});
    let source = |data: &str| {
        let source = json!({"type": "base64", "media_type": "image/png", "data": data});
        json!({"type": "image", "source": source})
    };
    let call = json!({"type": "tool_use", "id": "1", "name": "look", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [source("?")]});
    let anthropic = json!({"system": "Look.", "max_tokens": 1, "messages": [
        user("a".into()),
        {"role": "assistant", "content": [call]},
        user(json!([text("b"), result])),
    ]});
    let place = "messages[2].content[1].content[0]";
    refuse("/v1/messages", anthropic, 400, &[place, "base64"]);
    let without = json!({"max_tokens": 1, "messages": [user(json!([{"type": "image"}]))]});
    refuse(
        "/v1/messages",
        without,
        400,
        &["messages[0].content[0]", "no image"],
    );
    let system = json!({"max_tokens": 1, "system": [source("?")], "messages": [user("a".into())]});
    refuse(
        "/v1/messages",
        system,
        400,
        &["system[0]", "in a message of the user"],
    );
    let ollama = json!({"role": "user", "content": "a", "images": [file("rgb"), "?"]});
    let ollama = json!({"messages": [ollama], "stream": false});
    refuse("/api/chat", ollama, 400, &["messages[0].images[1]"]);
    let suffix = json!({"prompt": "a", "suffix": "b", "images": [file("rgb")]});
    refuse("/api/generate", suffix, 400, &["images", "suffix"]);
    // Users cannot write what stands for an image.
    let body = json!({"messages": [{"role": "user", "content": "<__media__>"}], "max_tokens": 1});
    assert_eq!(server.post(path, &body).0, 200);
    let blind = Server::simple();
    let (status, answer) = blind.post(path, &with(&url("rgb")));
    assert_eq!(status, 400);
    assert!(answer.to_string().contains("--mmproj"), "{answer}");
    // The image in the result of a tool does not end the session of an agent.
    let call = json!({"id": "1", "type": "function",
        "function": {"name": "look", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [text("a file"), image("rgb")]},
    ]);
    let (_, applied) = blind.post("/apply-template", &json!({"messages": messages}));
    let prompt = applied["prompt"].as_str().unwrap();
    let note = "a file\n[an image that this model cannot see]";
    assert!(prompt.contains(note), "{prompt}");
}

#[test]
fn a_server_tells_that_its_model_sees() {
    let server = server();
    let (_, props) = server.get("/props");
    assert_eq!(props["modalities"], json!({"vision": true, "audio": false}));
    assert_eq!(props["media_marker"], "<__media__>");
    let (_, models) = server.get("/v1/models");
    let known = models["models"][0]["capabilities"].as_array().unwrap();
    assert!(known.contains(&json!("multimodal")), "{models}");
    let (_, shown) = server.post("/api/show", &json!({"model": "model.gguf"}));
    let known = shown["capabilities"].as_array().into_iter().flatten();
    assert!(known.clone().any(|known| known == "vision"), "{shown}");
    let (_, props) = Server::simple().get("/props");
    assert_eq!(props["modalities"]["vision"], false);
}

#[test]
fn the_memory_of_images_is_charged() {
    let options = ServeOptions {
        request_memory: 16 << 20,
        ..ServeOptions::default()
    };
    let server = server_with(&model("qwen2vl"), &encoder("qwen2vl"), options);
    let body = json!({"messages": [{"role": "user", "content": [image("rgb")]}], "max_tokens": 1});
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    // 1000 x 1000 pixels take 19 MB while they are decoded, and the header says so.
    let mut large = bytes("rgb");
    large[16..24].copy_from_slice(&[0, 0, 3, 0xe8, 0, 0, 3, 0xe8]);
    // The checksum of the header, which the decoder verifies.
    let mut crc = u32::MAX;
    for byte in &large[12..29] {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    large[29..33].copy_from_slice(&(!crc).to_be_bytes());
    let large = STANDARD.encode(&large);
    let part = json!({"type": "image_url", "image_url": {"url": large}});
    let body = json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 1});
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 413, "{answer}");
    assert!(answer.to_string().contains("--request-memory"), "{answer}");
}

#[test]
fn images_are_fetched_if_that_is_allowed() {
    const URL: &str = "https://example.com/a.png";
    let fetch = |url: &str| match url {
        URL => Ok(bytes("rgb")),
        _ => Err("no such host".to_owned()),
    };
    let options = ServeOptions {
        image_fetcher: Some(ImageFetcher::new(1 << 20, fetch)),
        ..ServeOptions::default()
    };
    let server = server_with(&model("qwen2vl"), &encoder("qwen2vl"), options);
    let remote = |url: &str| json!([{"type": "image_url", "image_url": {"url": url}}]);
    let fetched = chat(&server, remote(URL));
    assert_eq!(said(&fetched), said(&chat(&server, json!([image("rgb")]))));
    let body = json!({"messages": [{"role": "user", "content": remote("http://a/b")}]});
    let (status, answer) = server.post("/v1/chat/completions", &body);
    let answer = answer.to_string();
    assert_eq!(status, 400);
    assert!(answer.contains("http://a/b: no such host"), "{answer}");
    let body = json!({"messages": [{"role": "user", "content": remote("file:///a")}]});
    let (_, answer) = server.post("/v1/chat/completions", &body);
    assert!(answer.to_string().contains("not fetched"), "{answer}");
}
