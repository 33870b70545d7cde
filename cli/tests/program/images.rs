//! Images in prompts.

use crate::{samite, with_model};
use samite::llm::SyntheticModel;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The encoder of a fixture.
fn encoder(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/vision/tests/fixtures");
    fixtures.join(format!("{name}.gguf"))
}

/// A folder with a language model of this architecture, and images of several formats.
fn folder(architecture: &'static str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    SyntheticModel::tiny(architecture).write(&path).unwrap();
    let fixtures = encoder("x").with_file_name("decoded.json");
    let cases = std::fs::read_to_string(fixtures).unwrap();
    let cases: serde_json::Value = serde_json::from_str(&cases).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        let bytes = case["file"].as_array().unwrap().iter();
        let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
        std::fs::write(dir.path().join(case["name"].as_str().unwrap()), bytes).unwrap();
    }
    (dir, path)
}

fn run(dir: &TempDir, encoder: &Path, images: &[&str], line: &str) -> crate::Run {
    let mut arguments: Vec<PathBuf> = ["run", "-q", "-n", "12", "--temp", "0", "-m"]
        .map(PathBuf::from)
        .to_vec();
    arguments.push(dir.path().join("model.gguf"));
    arguments.extend([PathBuf::from("--mmproj"), encoder.to_owned()]);
    for image in images {
        arguments.extend([PathBuf::from("--image"), dir.path().join(image)]);
    }
    arguments.extend(line.split_whitespace().map(PathBuf::from));
    samite(arguments)
}

#[test]
fn the_text_after_an_image_depends_on_the_image() {
    for (architecture, name) in [("qwen2vl", "qwen25vl"), ("gemma3", "gemma3")] {
        let (dir, _) = folder(architecture);
        let text = |images: &[&str], line: &str| run(&dir, &encoder(name), images, line).ok();
        let one = text(&["rgb"], "Hello");
        assert_eq!(text(&["rgb"], "Hello"), one);
        // The same pixels in another file, in another place, and in small micro-batches.
        assert_eq!(text(&["webp"], "Hello"), one);
        assert_eq!(
            text(&["rgb"], "<__media__>Hello"),
            one.replace("Hello", "<__media__>Hello")
        );
        assert_eq!(text(&["rgb"], "Hello -ub 3"), one);
        assert!(!text(&["rgb"], "--chat --chat-template chatml Hello").is_empty());
        if name == "gemma3" {
            // With these weights, few tokens of an image do not change the text.
            continue;
        }
        let others = [
            text(&["grey"], "Hello"),
            text(&["rgb", "grey"], "Hello"),
            text(&["grey", "rgb"], "Hello"),
            text(&["rgb"], "Hello<__media__>"),
        ];
        for (index, other) in others.iter().enumerate() {
            assert_ne!(other, &one, "{architecture} {index}");
        }
        assert_ne!(others[1], others[2]);
    }
}

#[test]
fn a_plan_has_the_memory_of_the_encoder() {
    let (_dir, model) = folder("gemma3");
    let plan = |line: &str| {
        let line = format!("plan --device cpu:threads=1 -c 512 {line} -m");
        let words = line.split(' ').map(PathBuf::from);
        samite(words.chain([model.clone()]))
    };
    let with = format!("--mmproj {}", encoder("gemma3").display());
    let json = plan(&format!("--json {with}")).json();
    let rows = json["encoder"].as_array().unwrap();
    let sum = |name: &str| {
        rows.iter()
            .map(|row| row[name].as_u64().unwrap())
            .sum::<u64>()
    };
    assert!(sum("weights") > 0 && sum("compute") > 0, "{json}");
    assert!(json["shortages"].as_array().unwrap().is_empty());
    assert!(plan("--json").json()["encoder"].is_null());
    let text = plan(&with).ok();
    assert!(text.contains("\nimages "), "{text}");
    plan("--mmproj missing.gguf").fails(1, &["missing.gguf"]);
}

#[test]
fn what_does_not_fit_is_named() {
    let (dir, model) = folder("qwen2vl");
    let qwen = encoder("qwen2vl");
    let refuse = |encoder: &Path, images: &[&str], line: &str, code: i32, parts: &[&str]| {
        run(&dir, encoder, images, line).fails(code, parts);
    };
    with_model(&model, "run -m M --image x Hello").fails(2, &["--mmproj"]);
    refuse(&qwen, &["missing"], "Hello", 1, &["missing"]);
    refuse(
        &qwen,
        &["model.gguf"],
        "Hello",
        1,
        &["model.gguf", "PNG, JPEG, WebP or GIF"],
    );
    refuse(&model, &["rgb"], "Hello", 1, &["\"qwen2vl\"", "\"clip\""]);
    refuse(
        &encoder("qwen3vl"),
        &["rgb"],
        "Hello",
        1,
        &["192", "64", "another model"],
    );
    refuse(
        &qwen,
        &["rgb"],
        "<__media__><__media__>",
        2,
        &["2 places", "1 are given"],
    );
    refuse(
        &qwen,
        &["rgb"],
        "Hello --session s",
        2,
        &["--session", "--image"],
    );
    refuse(&qwen, &["rgb"], "Hello -c 8", 1, &["--ctx-size"]);
    for tokens in [
        "--image-min-tokens 9 --image-max-tokens 3",
        "--image-max-tokens 9999999",
    ] {
        refuse(&qwen, &["rgb"], &format!("Hello {tokens}"), 1, &["tokens"]);
    }
    let serve = |line: &str| with_model(&model, &format!("serve --port 0 {line} -m M"));
    serve("--mmproj missing.gguf").fails(1, &["missing.gguf"]);
    serve("-m other.gguf --mmproj x.gguf").fails(2, &["--mmproj", "several"]);
    let json = run(&dir, &qwen, &["rgb"], "--json Hello").json();
    assert!(json["text"].is_string(), "{json}");
}
