//! Isolation of API keys: what one key sees does not depend on another key's requests.

use crate::common::{ENDLESS, Server};
use samite_requests::EngineOptions;
use samite_serve::ServeOptions;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn options() -> ServeOptions {
    let keys = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    ServeOptions {
        api_keys: keys(&["alice", "bob"]),
        admin_keys: keys(&["root"]),
        ..ServeOptions::default()
    }
}

fn start(options: ServeOptions) -> Server {
    Server::start(options, EngineOptions::default())
}

/// Sends a request with a key.
fn ask(server: &Server, key: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let headers = format!("Authorization: Bearer {key}\r\n");
    let (status, _, answer) = server.ask(method, path, &headers, &body.to_string());
    let answer = serde_json::from_str(&answer).unwrap_or(Value::String(answer));
    (status, answer)
}

fn complete(server: &Server, key: &str, prompt: impl Into<Value>) -> Value {
    let body = json!({"prompt": prompt.into(), "n_predict": 2, "temperature": 0});
    let (status, answer) = ask(server, key, "POST", "/completion", &body);
    assert_eq!(status, 200, "{answer}");
    answer
}

/// Returns the observable parts of an answer and the slots, without texts, times and load.
fn seen(server: &Server, key: &str, prompt: Vec<u32>) -> String {
    let answer = complete(server, key, prompt);
    let told = ["id_slot", "tokens_evaluated", "tokens_cached", "cache_miss"];
    let told = told.map(|name| answer[name].to_string());
    let cached = &answer["timings"]["cache_n"];
    let (_, slots) = ask(server, key, "GET", "/slots", &Value::Null);
    let slots = slots.as_array().unwrap().iter();
    let slots: Vec<&Value> = slots.map(|slot| &slot["n_cached"]).collect();
    format!("{cached} {told:?} {slots:?}")
}

/// Sends prompts as one key after another key sent the same or a different one. Returns the number
/// of each observation by [different, same].
fn pairs(server: &Server, count: usize) -> BTreeMap<String, [usize; 2]> {
    let mut found: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    let mut state = 1_u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state >> 33
    };
    for _ in 0..count {
        let mut prompt = || -> Vec<u32> { (0..24).map(|_| 3 + random() as u32 % 250).collect() };
        let (own, other) = (prompt(), prompt());
        let is_same = random() % 2;
        complete(
            server,
            "bob",
            if is_same == 1 { own.clone() } else { other },
        );
        let seen = seen(server, "alice", own);
        found.entry(seen).or_default()[is_same as usize] += 1;
    }
    found
}

#[test]
fn answers_do_not_reveal_requests_of_other_keys() {
    let server = start(options());
    let found = pairs(&server, 2000);
    // A prompt may share a prefix with an earlier one of the same key. The observation must not
    // depend on whether the other key sent the same prompt: a chi-squared test of the counts.
    let sums = found.values().fold([0.0, 0.0], |sums, counts| {
        [sums[0] + counts[0] as f64, sums[1] + counts[1] as f64]
    });
    assert!(sums[0] > 800.0 && sums[1] > 800.0, "{sums:?}");
    let rare = found.values().filter(|counts| counts[0] + counts[1] < 10);
    let rare: usize = rare.map(|counts| counts[0] + counts[1]).sum();
    assert!(rare < 200, "{rare} {found:?}");
    let common = found.values().filter(|counts| counts[0] + counts[1] >= 10);
    let (mut statistic, mut freedom) = (0.0, -1.0);
    for counts in common {
        let both = (counts[0] + counts[1]) as f64;
        for side in 0..2 {
            let expected = both * sums[side] / (sums[0] + sums[1]);
            statistic += (counts[side] as f64 - expected).powi(2) / expected;
        }
        freedom += 1.0;
    }
    // Five standard deviations of the statistic above its mean.
    assert!(
        statistic <= freedom + 5.0 * (2.0 * f64::max(freedom, 1.0)).sqrt(),
        "{statistic} {freedom} {found:?}"
    );
}

#[test]
fn a_salt_of_one_key_is_not_that_of_another() {
    let server = start(options());
    let cached = |key: &str| {
        let body = json!({"prompt": "Once upon a time", "n_predict": 1, "cache_salt": "same"});
        let (status, answer) = ask(&server, key, "POST", "/completion", &body);
        assert_eq!(status, 200, "{answer}");
        answer["timings"]["cache_n"].as_u64().unwrap()
    };
    assert_eq!(cached("alice"), 0);
    assert_eq!(cached("bob"), 0);
    assert!(cached("alice") > 0);
}

#[test]
fn keys_can_share_prefixes() {
    let server = start(ServeOptions {
        shares_prefixes: true,
        ..options()
    });
    let prompt = "Once upon a time there was a little girl who had a red ball";
    complete(&server, "bob", prompt);
    let answer = complete(&server, "alice", prompt);
    assert!(
        answer["timings"]["cache_n"].as_u64().unwrap() > 8,
        "{answer}"
    );
}

#[test]
fn a_single_key_is_administrator() {
    let server = start(ServeOptions {
        admin_keys: Vec::new(),
        api_keys: vec!["alice".to_owned()],
        ..ServeOptions::default()
    });
    assert_eq!(
        ask(&server, "alice", "GET", "/metrics", &Value::Null).0,
        200
    );
    let (status, answer) = ask(&server, "alice", "POST", "/lora-adapters", &json!([]));
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn only_administrators_access_shared_state() {
    let server = start(options());
    for (method, path, body) in [
        ("GET", "/metrics", Value::Null),
        ("POST", "/lora-adapters", json!([])),
        ("POST", "/models/load", json!({"model": "x"})),
        ("POST", "/models/unload", json!({"model": "x"})),
        (
            "POST",
            "/api/generate",
            json!({"model": "stories", "keep_alive": 0}),
        ),
    ] {
        let (status, answer) = ask(&server, "alice", method, path, &body);
        let shown = answer.to_string();
        let is_ollama = path.starts_with("/api");
        assert!(
            status == 403 || is_ollama && status == 404,
            "{path}: {status} {shown}"
        );
        if status == 403 {
            assert!(shown.contains("--admin-key"), "{shown}");
        }
        assert_ne!(ask(&server, "root", method, path, &body).0, 403, "{path}");
    }
}

#[test]
fn slots_belong_to_keys() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(
        ServeOptions {
            slot_save_path: Some(folder.path().to_owned()),
            ..options()
        },
        EngineOptions {
            slots: 1,
            context: Some(ENDLESS),
            ..EngineOptions::default()
        },
    );
    let act = |key: &str, action: &str| {
        let path = format!("/slots/0?action={action}");
        ask(&server, key, "POST", &path, &json!({"filename": "text"}))
    };
    complete(&server, "bob", "Once upon a time");
    let (status, answer) = act("alice", "save");
    assert_eq!(status, 400, "{answer}");
    assert_eq!(act("alice", "erase").1["n_erased"], 0);
    let (status, saved) = act("bob", "save");
    assert_eq!(status, 200, "{saved}");
    // Files of the same name belong to each key separately.
    assert_eq!(act("alice", "restore").0, 400);
    assert_eq!(act("bob", "erase").1["n_erased"], saved["n_saved"]);
    assert_eq!(act("bob", "restore").1["n_restored"], saved["n_saved"]);
    // A running request is visible to its key and to administrators.
    let headers = "Authorization: Bearer bob\r\n";
    let body = json!({"prompt": "a", "n_predict": -1, "ignore_eos": true, "stream": true});
    let stream = server.send("POST", "/completion", headers, &body.to_string());
    let slot = |key: &str| ask(&server, key, "GET", "/slots", &Value::Null).1[0].clone();
    samite_testing::wait_until("the slot is at work", || {
        slot("bob")["is_processing"] == json!(true)
    });
    assert!(slot("bob")["params"].is_object() && slot("root")["params"].is_object());
    let shown = slot("alice");
    let mut names: Vec<&String> = shown.as_object().unwrap().keys().collect();
    names.sort();
    assert_eq!(names, ["id", "is_processing", "n_ctx", "speculative"]);
    drop(stream);
}

#[test]
fn requests_of_one_key_do_not_block_others() {
    let server = Server::start(
        options(),
        EngineOptions {
            slots: 1,
            queue: 2,
            context: Some(ENDLESS),
            ..EngineOptions::default()
        },
    );
    let send = |key: &str, count: i64| {
        let headers = format!("Authorization: Bearer {key}\r\n");
        let body = json!({"prompt": "a", "n_predict": count, "ignore_eos": true, "stream": true});
        server.send("POST", "/completion", &headers, &body.to_string())
    };
    let first = send("bob", -1);
    samite_testing::wait_until("the slot is at work", || {
        let (_, slots) = ask(&server, "root", "GET", "/slots", &Value::Null);
        slots[0]["is_processing"] == json!(true)
    });
    let waiting = [send("bob", -1), send("bob", -1)];
    let body = json!({"prompt": "a", "n_predict": 1});
    let wait_for_waiting = |count: usize| {
        let expected = format!("llamacpp:requests_deferred {count}\n");
        samite_testing::wait_until(format_args!("{count} requests wait"), || {
            let (_, metrics) = ask(&server, "root", "GET", "/metrics", &Value::Null);
            metrics.as_str().unwrap().contains(&expected)
        });
    };
    wait_for_waiting(2);
    assert_eq!(ask(&server, "bob", "POST", "/completion", &body).0, 503);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&server, "alice", "POST", "/completion", &body));
        wait_for_waiting(3);
        // Earlier requests keep waiting: keys take turns with the slot.
        drop(first);
        assert_eq!(asking.join().unwrap().0, 200);
    });
    drop(waiting);
}
