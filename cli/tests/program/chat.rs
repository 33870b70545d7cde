//! `samite chat`: conversations over pipes, and what Ctrl-C does.

use crate::{command, samite, tiny};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

/// Runs a conversation and gives its answers and notes.
fn talk(arguments: &[&str], input: &str) -> (Option<i32>, String, String) {
    let mut child = command(["chat"].iter().chain(arguments))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

const STORY: [&str; 4] = ["-n", "12", "--seed", "1"];

#[test]
fn a_conversation_remembers_is_regenerated_and_taken_back() {
    let (code, answers, notes) = talk(
        &STORY,
        "Once upon a time\n/regen\n/undo\n/regen\n/quit\nnot read\n",
    );
    assert_eq!(code, Some(0), "{notes}");
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!(lines.len(), 2, "{answers}");
    assert_eq!(lines[0], lines[1]);
    assert!(
        notes.contains("12 tokens") && notes.contains("4 of them known"),
        "{notes}"
    );
    assert!(
        notes.contains("0 messages") && notes.contains("there is nothing to answer yet"),
        "{notes}"
    );
}

#[test]
fn messages_have_several_lines_and_are_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("saved.json");
    let path = file.to_str().unwrap();
    let (code, _, notes) = talk(
        &STORY,
        &format!("One\\\ntwo\n\"\"\"\na\n\nb\"\"\"\n/system Be kind.\n/save {path}\n"),
    );
    assert_eq!(code, Some(0), "{notes}");
    let saved: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let said: Vec<&str> = saved["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| message["content"].as_str().unwrap())
        .collect();
    assert_eq!(
        (said[0], said[1], said[3]),
        ("Be kind.", "One\ntwo", "a\n\nb")
    );
    let (_, answers, notes) = talk(&STORY, &format!("/load {path}\n/load {path}.not\n/regen\n"));
    assert!(
        notes.starts_with("5 messages\n/load ") && answers.lines().next() == said[4].lines().next(),
        "{notes}{answers}"
    );
}

#[test]
fn settings_are_changed_and_wrong_ones_named() {
    let input = "/set temp 0\n/set top-k x\n/set what 1\n/set temp -1\n/set\n/set thinking off\n/nothing\n/image cat.png\n/help\n";
    let (code, answers, notes) = talk(&STORY, input);
    assert_eq!((code, answers.as_str()), (Some(0), ""));
    for part in [
        "/set top-k: 'x'",
        "/set what: there is no",
        "/set temp: ",
        "temp 0, top-k 40",
        "no command /nothing",
        "no pictures",
        "/regen",
    ] {
        assert!(notes.contains(part), "no {part} in {notes}");
    }
}

#[test]
fn templates_are_chosen_and_refuse() {
    let (_folder, model) = tiny();
    let model = model.to_str().unwrap();
    let with = |more: &[&str]| talk(&[&["-m", model, "-n", "2", "-q"], more].concat(), "a\n");
    let (code, _, notes) = with(&[]);
    assert_eq!(code, Some(0));
    assert!(
        notes.contains("warning: the model has no chat template"),
        "{notes}"
    );
    let (code, answers, notes) = with(&[
        "--chat-template",
        "{{ raise_exception('no ' + messages[0].content) }}",
    ]);
    assert_eq!((code, answers.as_str()), (Some(0), ""));
    assert!(notes.contains("refuses this conversation: no a"), "{notes}");
    for (wrong, part) in [
        (["--chat-template", "mistrall"], "mistral-v7"),
        (["--chat-template", "{% if %}"], "line 1"),
        (["--chat-template-file", "/nonexistent/x"], "/nonexistent/x"),
    ] {
        let (code, _, notes) = with(&wrong);
        assert_eq!(code, Some(2), "{notes}");
        assert!(notes.contains(part), "{notes}");
    }
}

#[test]
fn a_single_message_is_answered() {
    let run = |line: &str| samite(line.split_whitespace()).ok();
    let plain = run("run -n 8 --seed 1 --temp 0 -q --no-display-prompt Once");
    let chat =
        run("run -n 8 --seed 1 --temp 0 -q --chat --chat-template {{messages[-1].content}} Once");
    assert_eq!(plain, chat);
    samite(["run", "--system", "x", "Once"]).fails(2, &["--chat"]);
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_and_not_the_program() {
    let mut child = command(["chat", "-c", "4096", "--temp", "2", "--seed", "3"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    // An answer that does not end by itself soon.
    input
        .write_all(b"/set min-p 0\n/set top-p 1\n/set top-k 0\nOnce upon a time\n")
        .unwrap();
    answers.read_exact(&mut [0; 40]).unwrap();
    let pid = child.id().to_string();
    assert!(
        std::process::Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    answers.read_line(&mut String::new()).unwrap();
    input.write_all(b"/set n 3\nThe end\n").unwrap();
    drop(input);
    let mut rest = String::new();
    answers.read_to_string(&mut rest).unwrap();
    let mut notes = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut notes)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{notes}");
    assert!(
        notes.contains("(stopped)") && notes.contains("(3 tokens"),
        "{notes}"
    );
}
