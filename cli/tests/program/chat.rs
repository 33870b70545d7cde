//! `samite chat`: conversations over pipes, and handling of Ctrl-C.

use crate::child::send;
use crate::{command, piped, samite, tiny};
use samite_testing::HANG_GUARD;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

/// Runs a conversation with messages and commands as lines. Returns the exit code, answers and
/// notes.
fn talk(arguments: &[&str], input: &str) -> (Option<i32>, String, String) {
    piped_in(&[&["--lines"], arguments].concat(), input)
}

/// Runs a conversation with this input. Returns the exit code, answers and notes.
fn piped_in(arguments: &[&str], input: &str) -> (Option<i32>, String, String) {
    let mut child = piped(&mut command(["chat"].iter().chain(arguments)));
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

/// Flags that keep an answer from ending by itself: both tokens that end stories are unlikely, and
/// filling this context takes minutes.
const ENDLESS: [&str; 6] = [
    "-c",
    "65536",
    "--logit-bias",
    "1-1e9",
    "--logit-bias",
    "2-1e9",
];

const STORY: [&str; 4] = ["-n", "12", "--seed", "1"];

#[test]
fn regen_and_undo_change_the_conversation() {
    let (code, answers, notes) = talk(
        &STORY,
        "Once upon a time\n/regen\n/undo\n/regen\n/quit\nnot read\n",
    );
    assert_eq!(code, Some(0), "{notes}");
    let lines: Vec<&str> = answers.lines().collect();
    // The new answer uses another seed.
    assert_eq!(lines.len(), 2, "{answers}");
    assert_ne!(lines[0], lines[1]);
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
fn piped_input_is_one_message_after_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk");
    let asked = |flags: &[&str], input: &str| {
        let session = ["--session", file.to_str().unwrap()];
        let _ = std::fs::remove_file(&file);
        let (code, answers, notes) = piped_in(&[&STORY[..], &session, flags].concat(), input);
        assert_eq!(code, Some(0), "{notes}");
        let saved = folder.path().join("saved.json");
        let save = format!("/save {}\n", saved.display());
        let (code, _, notes) = talk(&session, &save);
        assert_eq!(code, Some(0), "{notes}");
        let saved = std::fs::read_to_string(saved).unwrap();
        let saved: serde_json::Value = serde_json::from_str(&saved).unwrap();
        let messages = saved["messages"].as_array().unwrap().iter();
        let questions = messages.filter(|message| message["role"] == "user");
        let texts = questions.map(|message| message["content"].as_str().unwrap().to_owned());
        (texts.collect::<Vec<_>>(), answers)
    };
    let (questions, answers) = asked(&[], "One day,\n\n/set a\nTom\n");
    assert_eq!(questions, ["One day,\n\n/set a\nTom"]);
    assert!(!answers.is_empty());
    assert_eq!(
        asked(&["-p", "Go on:"], "One day\n").0,
        ["Go on:\n\nOne day"]
    );
    assert_eq!(asked(&["-p", "Go on:"], "").0, ["Go on:"]);
    let (questions, answers) = asked(&[], "\n");
    assert_eq!((questions.len(), &*answers), (0, ""));
}

#[test]
fn multi_line_messages_are_saved_and_loaded() {
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
        notes.starts_with("5 messages\n/load ") && answers.lines().count() == 1,
        "{notes}{answers}"
    );
}

#[test]
fn set_changes_settings_and_names_invalid_ones() {
    let input = "/set temp 0\n/set top-k x\n/set what 1\n/set temp -1\n/set\n/set thinking off\n/nothing\n/image cat.png\n/help\n";
    let (code, answers, notes) = talk(&STORY, input);
    assert_eq!((code, answers.as_str()), (Some(0), ""));
    for part in [
        "/set top-k: 'x'",
        "/set what: there is no",
        "/set temp: ",
        "temp 0, top-k 40",
        "no command /nothing",
        "no image encoder",
        "/regen",
    ] {
        assert!(notes.contains(part), "no {part} in {notes}");
    }
}

#[test]
fn chat_templates_are_selected_and_can_refuse() {
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
    assert_eq!((code, answers.as_str()), (Some(1), ""));
    assert!(notes.contains("refuses this conversation: no a"), "{notes}");
    // Without a terminal to retry, the following message is not answered.
    let (code, answers, notes) = talk(
        &["-c", "16", "-n", "2", "-q"],
        "Once\none two three four five six seven eight nine\nOnce\n",
    );
    assert_eq!((code, answers.lines().count()), (Some(1), 1), "{notes}");
    assert!(
        notes.starts_with("error: ") && notes.lines().count() == 1,
        "{notes}"
    );
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
fn the_system_prompt_survives_clear_and_replaces_a_saved_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("talk");
    let path = path.to_str().unwrap();
    // The end of input closes a quoted text.
    let input = "/system Be kind.\nOnce\n/clear\n/system\n\"\"\"\nOnce";
    let (code, answers, notes) = talk(&[&STORY[..], &["--session", path]].concat(), input);
    assert_eq!((code, answers.lines().count()), (Some(0), 2), "{notes}");
    assert!(notes.contains("forgotten\nBe kind.\n"), "{notes}");
    let (_, _, notes) = talk(&["--session", path, "--system", "Be brief."], "/system\n");
    assert!(notes.ends_with("Be brief.\n"), "{notes}");
}

#[test]
fn non_text_and_endless_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("latin"), b"Ol\xe9\n").unwrap();
    let (code, _, notes) = talk(&STORY, &format!("/load {}\n", path("latin")));
    assert_eq!(code, Some(0));
    assert!(
        notes.contains("latin: is not UTF-8 text (byte 2)"),
        "{notes}"
    );
    let output = samite(["chat", "-n", "3", "--chat-template-file", &path("none")]);
    output.fails(2, &["--chat-template-file", "none"]);
    let output = samite(["chat", "-n", "3", "--session", &path("none/x")]);
    output.fails(1, &["none/x", "folder"]);
    if cfg!(unix) {
        let (_, _, notes) = talk(&STORY, "/load /dev/zero\n/save /dev/null\n");
        assert!(
            notes.contains("/load /dev/zero: is a device")
                && notes.contains("/save /dev/null: is not"),
            "{notes}"
        );
        let device = ["run", "--chat", "--chat-template-file", "/dev/zero", "Once"];
        samite(device).fails(2, &["/dev/zero", "is a device"]);
    }
    let mut child = command(["chat"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Ol\xe9\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let notes = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{notes}");
    assert!(
        notes.contains("standard input: ") && notes.contains("UTF-8"),
        "{notes}"
    );
}

#[test]
fn a_full_context_drops_the_oldest_messages_from_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("messages.json");
    let flags = [
        "--seed",
        "1",
        "--chat-template",
        "chatml",
        "-c",
        "128",
        "-n",
        "8",
    ];
    let questions = "Once upon a time\n".repeat(12);
    let input = format!("{questions}/save {}\n", file.display());
    let (code, _, notes) = talk(&flags, &input);
    assert_eq!(code, Some(0), "{notes}");
    assert!(notes.contains("does not see the oldest "), "{notes}");
    // The conversation is saved completely.
    let saved = std::fs::read_to_string(file).unwrap();
    assert_eq!(saved.matches("Once upon a time").count(), 12, "{saved}");
    // A single question that does not fit is an error.
    let (code, _, notes) = talk(&flags, &"Once ".repeat(100));
    assert_eq!(code, Some(1), "{notes}");
    assert!(notes.contains("do not fit: the context of 128"), "{notes}");
}

#[test]
fn run_does_not_overwrite_a_saved_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk");
    let path = file.to_str().unwrap();
    let (code, _, notes) = talk(&[&STORY[..], &["--session", path]].concat(), "Once\n");
    assert_eq!(code, Some(0), "{notes}");
    let before = std::fs::read(&file).unwrap();
    samite(["run", "-n", "3", "--session", path, "The cat"])
        .fails(1, &["talk", "samite chat --session"]);
    assert!(std::fs::read(&file).unwrap() == before);
    samite(["chat", "-c", "8", "--session", path])
        .fails(1, &["talk", "more than the context of 8"]);
}

#[test]
fn a_single_message_is_answered() {
    let run = |line: &str| samite(line.split_whitespace()).ok();
    let plain = run("run -n 8 --seed 1 --temp 0 -q --no-display-prompt Once");
    let chat =
        run("run -n 8 --seed 1 --temp 0 -q --chat --chat-template {{messages[-1].content}} Once");
    assert_eq!(plain, chat);
    // The built-in model treats a message as the start of a story.
    assert_eq!(plain, run("run -n 8 --seed 1 --temp 0 -q --chat Once"));
    samite(["run", "--system", "x", "Once"]).fails(2, &["--chat"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_the_answer_but_not_the_program() {
    let flags = ["chat", "--lines", "--temp", "2", "--seed", "3"];
    let mut child = piped(command(flags).args(ENDLESS));
    let mut input = child.stdin.take().unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    input
        .write_all(b"/set min-p 0\n/set top-p 1\n/set top-k 0\nOnce upon a time\n")
        .unwrap();
    answers.read_exact(&mut [0; 40]).unwrap();
    send("INT", child.id());
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

/// A conversation in a pseudo-terminal.
#[cfg(unix)]
struct Terminal {
    child: std::process::Child,
    keys: std::fs::File,
    shown: std::sync::mpsc::Receiver<Vec<u8>>,
    text: String,
    _folder: tempfile::TempDir,
}

#[cfg(unix)]
impl Terminal {
    /// Returns `None` if the system has no pseudo-terminals.
    fn new(arguments: &[&str]) -> Option<Self> {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        use std::fs::File;
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).ok()?;
        grantpt(&main).and_then(|()| unlockpt(&main)).ok()?;
        let name = ptsname(&main, Vec::new()).ok()?;
        let size = rustix::termios::Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        rustix::termios::tcsetwinsize(&main, size).ok()?;
        let side = || {
            File::options()
                .read(true)
                .write(true)
                .open(name.to_str().unwrap())
                .ok()
        };
        let folder = tempfile::tempdir().unwrap();
        let child = command(["chat"].iter().chain(arguments))
            .env("TERM", "xterm")
            .env("XDG_CACHE_HOME", folder.path())
            .stdin(side()?)
            .stdout(side()?)
            .stderr(side()?)
            .spawn()
            .unwrap();
        let keys = File::from(main);
        let mut screen = keys.try_clone().unwrap();
        let (send, shown) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = screen.read(&mut bytes) {
                if send.send(bytes[..length].to_vec()).is_err() {
                    break;
                }
            }
        });
        Some(Self {
            child,
            keys,
            shown,
            text: String::new(),
            _folder: folder,
        })
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this text appears, and returns the text before it.
    #[track_caller]
    fn wait_for(&mut self, part: &str) -> String {
        loop {
            if let Some(at) = self.text.find(part) {
                let before = self.text[..at].to_owned();
                self.text.drain(..at + part.len());
                return before;
            }
            self.read(part);
        }
    }

    /// Waits for any further output.
    #[track_caller]
    fn wait_for_more(&mut self) {
        while self.text.is_empty() {
            self.read("more");
        }
    }

    #[track_caller]
    fn read(&mut self, expected: &str) {
        match self.shown.recv_timeout(HANG_GUARD) {
            Ok(bytes) => self.text += &String::from_utf8_lossy(&bytes),
            Err(error) => panic!("{error}: no {expected:?} in {:?}", self.text),
        }
    }
}

#[cfg(unix)]
#[test]
fn the_terminal_is_restored_and_invalid_utf8_is_tolerated() {
    let Some(mut terminal) = Terminal::new(&["-n", "5"]) else {
        return samite_testing::skipped("the system gives no pseudo-terminals");
    };
    // A terminal has the same modes at both of its ends.
    let modes = |terminal: &Terminal| {
        rustix::termios::tcgetattr(&terminal.keys)
            .unwrap()
            .local_modes
    };
    terminal.wait_for("only tells stories");
    terminal.wait_for("> ");
    terminal.keys.write_all(b"Ol\xe9a\r").unwrap();
    terminal.wait_for("not UTF-8");
    terminal.press("Once\r");
    terminal.wait_for("(5 tokens");
    terminal.wait_for("> ");
    use rustix::termios::LocalModes;
    assert!(!modes(&terminal).contains(LocalModes::ICANON));
    send("TERM", terminal.child.id());
    assert_eq!(terminal.child.wait().unwrap().code(), Some(143));
    assert!(modes(&terminal).contains(LocalModes::ICANON | LocalModes::ECHO));
}

#[cfg(unix)]
#[test]
fn a_terminal_has_line_editing_history_and_interrupts() {
    let Some(mut terminal) = Terminal::new(&[&ENDLESS[..], &["--seed", "3", "-n", "5"]].concat())
    else {
        return samite_testing::skipped("the system gives no pseudo-terminals");
    };
    terminal.wait_for("only tells stories");
    terminal.wait_for("> ");
    // Backspace corrects a typo.
    terminal.press("Once upon a tine\x7f\x7fme\r");
    terminal.wait_for("(5 tokens");
    terminal.wait_for("> ");
    // Ctrl-C discards the input, on the first line and on continuation lines.
    terminal.press("half a line\x03");
    terminal.wait_for("> ");
    terminal.press("one \\\r");
    terminal.wait_for("… ");
    terminal.press("two\x03");
    terminal.wait_for("> ");
    // Repeats the last message: the prompt and the answer before it are cached.
    terminal.press("\x1b[A\r");
    terminal.wait_for("Once upon a time");
    terminal.wait_for("(5 tokens");
    terminal.wait_for("> ");
    terminal.press("\"\"\"\r");
    terminal.wait_for("… ");
    terminal.press("a\r");
    terminal.wait_for("… ");
    terminal.press("b\"\"\"\r");
    terminal.wait_for("(5 tokens");
    terminal.wait_for("> ");
    // An answer is stopped.
    terminal.press("/set n all\r");
    terminal.wait_for("> ");
    for setting in ["temp 2", "min-p 0", "top-p 1", "top-k 0"] {
        terminal.press(&format!("/set {setting}\r"));
        terminal.wait_for("> ");
    }
    terminal.press("A cat\r");
    terminal.wait_for("A cat");
    terminal.wait_for("\n");
    // Before the first token, the line editor may still be active, and the signal would end the
    // program.
    terminal.wait_for_more();
    send("INT", terminal.child.id());
    terminal.wait_for("(stopped)");
    terminal.wait_for("> ");
    // Ctrl-D exits.
    terminal.press("\x04");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_saved_conversation_continues_in_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("saved.gguf");
    let path = file.to_str().unwrap();
    let with = |input: &str| talk(&[&STORY[..], &["--session", path]].concat(), input);
    let (_, whole, _) = talk(&STORY, "Once upon a time\nThen\n");
    let (code, first, _) = with("Once upon a time\n");
    assert_eq!(code, Some(0));
    let (_, second, notes) = with("Then\n");
    assert_eq!(first + &second, whole);
    assert!(!notes.contains(" 0 of them known"), "{notes}");
    let (_folder, model) = tiny();
    let (code, _, notes) = talk(
        &["-m", model.to_str().unwrap(), "--session", path],
        "Then\n",
    );
    assert_eq!(code, Some(1));
    assert!(
        notes.contains("saved.gguf") && notes.contains("outside the vocabulary of"),
        "{notes}"
    );
}

#[test]
fn chat_answers_match_the_grammar() {
    let (code, answers, _) = talk(
        &[&STORY[..], &["--grammar", "root ::= [0-9][0-9]"]].concat(),
        "Once\nupon\n",
    );
    assert_eq!(code, Some(0));
    let lines: Vec<&str> = answers.lines().collect();
    assert_eq!(lines.len(), 2);
    for line in lines {
        assert!(line.len() == 2 && line.parse::<u8>().is_ok(), "{answers}");
    }
}
