//! Images in prompts.

use crate::child::child;
use crate::{piped, samite, with_model};
use samite::llm::SyntheticModel;
use std::io::Write;
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

/// Holds a conversation line by line. Returns the answers and the notes.
fn chat(dir: &TempDir, encoder: Option<&Path>, more: &str, lines: &str) -> (String, String) {
    let mut command = child(env!("CARGO_BIN_EXE_samite"));
    command.current_dir(dir.path());
    let flags = "chat --lines -m model.gguf -n 6 --temp 0 --chat-template chatml";
    command.args(flags.split(' ').chain(more.split_whitespace()));
    command.args(
        encoder
            .into_iter()
            .flat_map(|path| [Path::new("--mmproj"), path]),
    );
    let mut child = piped(&mut command);
    let mut pipe = child.stdin.take().unwrap();
    pipe.write_all(lines.as_bytes()).unwrap();
    drop(pipe);
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (out, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{told}");
    (out, told)
}

#[test]
fn a_conversation_shows_images() {
    let (dir, _) = folder("qwen2vl");
    for name in ["rgb", "grey"] {
        let [from, to] = [name.to_owned(), format!("my {name}.png")];
        std::fs::copy(dir.path().join(from), dir.path().join(to)).unwrap();
    }
    let encoder = encoder("qwen2vl");
    let says = |lines: &str| chat(&dir, Some(&encoder), "-q", lines).0;
    let expected = says("/image my rgb.png\nWhat is it?\n");
    assert_ne!(says("/image my grey.png\nWhat is it?\n"), expected);
    assert_ne!(says("What is it?\n"), expected);
    // The path of a file that is dragged into the terminal.
    assert_eq!(says("my\\ rgb.png\nWhat is it?\n"), expected);
    let absolute = dir.path().join("my rgb.png");
    let line = format!("'{}'\nWhat is it?\n", absolute.display());
    assert_eq!(says(&line), expected);
    let first = expected.clone();
    // It belongs to one message, and stays in the conversation.
    let whole = says("/image my rgb.png\nWhat is it?\nAnd now?\n");
    assert!(whole.starts_with(&expected), "{whole}");
    let (again, told) = chat(
        &dir,
        Some(&encoder),
        "--session s",
        "/image my rgb.png\nWhat is it?\n",
    );
    assert_eq!(again, expected, "{told}");
    let (rest, told) = chat(&dir, Some(&encoder), "--session s", "And now?\n");
    assert_eq!(expected + &rest, whole);
    // Nothing of the image is computed again.
    let known = told.split(" of them known").next().unwrap();
    let numbers = known.split(|c: char| !c.is_ascii_digit());
    let numbers: Vec<usize> = numbers.filter_map(|text| text.parse().ok()).collect();
    let [.., prompt, known] = numbers[..] else {
        panic!("{told}");
    };
    assert!((80..prompt).contains(&known), "{told}");
    let told = chat(
        &dir,
        Some(&encoder),
        "",
        "/image\n/image missing.png\n/image model.gguf\n",
    )
    .1;
    for part in ["needs the name", "missing.png", "PNG, JPEG, WebP or GIF"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    // An image that does not fit into the context does not spoil further messages.
    let lines = "/image my rgb.png\n/clear\nWhat is it?\n";
    assert!(says(lines).ends_with(&says("What is it?\n")));
    for line in ["/image 'my rgb.png'", "/image my\\ rgb.png"] {
        assert_eq!(says(&format!("{line}\nWhat is it?\n")), first);
    }
    let told = chat(&dir, None, "", "/image my rgb.png\n").1;
    assert!(told.contains("--mmproj"), "{told}");
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
    let other = format!("--mmproj {}", encoder("qwen3vl").display());
    plan(&other).fails(1, &["another model"]);
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
