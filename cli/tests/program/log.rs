//! Logging.

use crate::{Run, command, samite, tiny, with_model};

#[test]
fn log_flags_control_verbosity() {
    let (_dir, model) = tiny();
    let stderr = |flags: &[&str], variable: Option<&str>| {
        let mut command = command(["run", "-p", "abc", "-n", "1", "-q", "-m"]);
        command.arg(&model).args(flags).env_remove("SAMITE_LOG");
        if let Some(variable) = variable {
            command.env("SAMITE_LOG", variable);
        }
        let run = Run::new(command.output().unwrap());
        let shown = run.stderr.clone();
        assert!(run.ok().starts_with("abc"));
        shown
    };
    let (info, debug) = ("info: ", "debug: ");
    assert_eq!(stderr(&[], None), "");
    let shown = stderr(&["-v"], None);
    assert!(shown.starts_with(info) && !shown.contains(debug), "{shown}");
    for shown in [
        stderr(&["-vv"], None),
        stderr(&["--log", "samite_sched=debug"], None),
        stderr(&[], Some("debug")),
    ] {
        assert!(shown.contains("debug: split 0 on cpu: "), "{shown}");
        // A node with its size, device and reason, and a source with the same details.
        let mut lines = shown
            .lines()
            .skip_while(|line| !line.contains("mul_mat 'Qcur-0' ("));
        let node = lines.next().unwrap();
        let reason = " on cpu: weights 'blk.0.attn_q.weight' are there";
        assert!(
            node.starts_with("debug:   %") && node.ends_with(reason),
            "{node}"
        );
        let source = lines.next().unwrap();
        assert!(source.starts_with("debug:     of %"), "{source}");
        assert!(
            source.contains("'blk.0.attn_q.weight' (32.0 KiB) on cpu: "),
            "{source}"
        );
    }
    assert!(!stderr(&["--log", "samite_sched=debug"], None).contains(info));
    assert_eq!(stderr(&["--log", "off"], Some("trace")), "");
    let plan = with_model(&model, "plan -m M -vv");
    assert!(plan.stderr.contains("of %"), "{}", plan.stderr);
    assert!(!plan.ok().contains("debug"));
    // The flag may also come first.
    let before = samite([
        "-v",
        "run",
        "-p",
        "a",
        "-n",
        "1",
        "-m",
        model.to_str().unwrap(),
    ]);
    assert!(before.stderr.starts_with(info), "{}", before.stderr);
    with_model(&model, "run -m M -p a --log samite=loud").fails(2, &["--log", "samite=loud"]);
}

#[test]
fn repeated_warnings_are_printed_once() {
    let (_dir, model) = tiny();
    let twice = with_model(&model, "compare -m M --device cpu,reference -c 300");
    let warning = "warning: the context is longer than the model was trained for";
    assert_eq!(twice.stderr.matches(warning).count(), 1, "{}", twice.stderr);
    let lines = twice.stderr.lines().count();
    assert_eq!(lines, 1, "{}", twice.stderr);
    twice.ok();
}

#[test]
#[cfg(feature = "serve")]
fn an_answer_whose_client_leaves_is_logged() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpStream;
    use std::process::Stdio;

    let flags = "serve --port 0 -t 1 --log info --context-shift";
    let mut command = command(flags.split(' '));
    let mut server = command.stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(server.stderr.take().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let address = lines.find_map(|line| {
        let (_, address) = line.split_once(" served at http://")?;
        Some(address.trim_end_matches('/').to_owned())
    });
    let mut client = TcpStream::connect(address.unwrap()).unwrap();
    let body = r#"{"prompt": "Once", "stream": true, "ignore_eos": true}"#;
    let head = "POST /completion HTTP/1.1\r\nHost: localhost";
    write!(
        client,
        "{head}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    client.read_exact(&mut [0; 300]).unwrap();
    drop(client);
    let is_logged = lines.any(|line| line.contains("slot 0: cancelled after "));
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(is_logged);
}
