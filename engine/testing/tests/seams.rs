//! Sources of nondeterminism stay in few places: clocks, random numbers, threads, the order of
//! unordered maps.
//!
//! Code takes time and threads from an [`Environment`](samite_core::environment::Environment). This
//! test reads the sources and finds exceptions.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod sources;

use sources::text_files;
use std::collections::BTreeSet;
use std::path::Path;

/// A source of nondeterminism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Clock,
    Chance,
    Threads,
    UnorderedMap,
}

use Source::{Chance, Clock, Threads, UnorderedMap};

/// Words that indicate each source. A word inside a longer word does not count.
const WORDS: [(Source, &[&str]); 4] = [
    (
        Clock,
        &[
            "Instant::now",
            "SystemTime",
            "UNIX_EPOCH",
            "thread::sleep",
            "thread::sleep_until",
            "time::sleep_until",
            "park_timeout",
            "recv_timeout",
            "wait_timeout",
            "wait_timeout_while",
        ],
    ),
    (
        Chance,
        &[
            "rand::",
            "thread_rng",
            "getrandom",
            "OsRng",
            "SysRng",
            "from_entropy",
            "from_os_rng",
            "fastrand",
            "urandom",
            "RandomState",
        ],
    ),
    (
        Threads,
        &["std::thread", "thread::", "mpsc", "rayon", "tokio"],
    ),
    // Their order differs from run to run.
    (UnorderedMap, &["HashMap", "HashSet"]),
];

/// Folders with code that waits or decides an order. Devices and the program are not among them:
/// devices are asynchronous, and a test brings its own; people use the program.
const FOLDERS: [&str; 4] = ["base", "engine", "runtime", "models"];

/// Exceptions with their reasons. A folder stands for all files in it.
const ALLOWED: [(&str, Source, &str); 34] = [
    (
        "base/core/src/environment",
        Clock,
        "the seam: the system's clock",
    ),
    (
        "base/core/src/environment",
        Threads,
        "the seam: the system's threads",
    ),
    (
        "base/threads/src",
        Threads,
        "the worker pool, whose orders loom tries",
    ),
    (
        "engine/testing/src/isolated.rs",
        Clock,
        "ends processes that hang",
    ),
    (
        "engine/testing/src/isolated.rs",
        Threads,
        "reads what a process writes",
    ),
    (
        "engine/testing/src/perf.rs",
        Clock,
        "measures how long devices take",
    ),
    (
        "engine/testing/src/skip.rs",
        Threads,
        "the name of a test is that of its thread",
    ),
    (
        "engine/testing/src/ticking.rs",
        Clock,
        "where it begins; what passes is counted",
    ),
    ("engine/testing/src/wait.rs", Clock, "ends tests that hang"),
    (
        "engine/testing/src/wait.rs",
        Threads,
        "sleeps between two looks at a state",
    ),
    (
        "runtime/kv-events/src",
        Clock,
        "the time of day that messages have, and how long the last ones may take",
    ),
    (
        "runtime/kv-events/src",
        Threads,
        "one thread has the sockets; what it tells comes in order",
    ),
    (
        "runtime/llm/src/arch/graph.rs",
        UnorderedMap,
        "looked up by address only: an ordered map would have the order of addresses, which differs, too",
    ),
    (
        "runtime/llm/src/session.rs",
        Threads,
        "what a grammar allows next is the same, whichever thread works it out",
    ),
    (
        "runtime/requests/src/driver.rs",
        Clock,
        "waits until a request's time is over, by the engine's clock",
    ),
    (
        "runtime/requests/src/driver.rs",
        Threads,
        "one thread drives an engine; what it does is the engine's matter",
    ),
    (
        "runtime/requests/src/image_thread.rs",
        Threads,
        "one thread encodes images in order; the engine sees only that rows are there",
    ),
    (
        "runtime/samite/src/conversation.rs",
        Clock,
        "the date that templates are told, unless the application says another one",
    ),
    (
        "runtime/samite/src/conversation.rs",
        Chance,
        "the seed of a conversation, unless the application sets one",
    ),
    (
        "runtime/samite/src/conversation/asynchronous.rs",
        Threads,
        "one thread answers; what it is asked comes in order",
    ),
    (
        "runtime/serve/src/kv_transfer/link.rs",
        Chance,
        "ids of offers, which peers must not guess",
    ),
    (
        "runtime/serve/src",
        Threads,
        "connections are tasks of a runtime; what is computed is the engine's matter",
    ),
    (
        "runtime/serve/src/ids.rs",
        Clock,
        "the time of day that answers have",
    ),
    (
        "runtime/serve/src/ids.rs",
        Chance,
        "ids, and seeds that nobody chose",
    ),
    (
        "runtime/serve/src",
        Clock,
        "limits and pings of connections, and times of answers that are still coming",
    ),
    (
        "runtime/sim/src/clock.rs",
        Clock,
        "the beginning of simulated time: an instant cannot be made from a number",
    ),
    (
        "runtime/sim/src/remote/net.rs",
        Threads,
        "channels of messages between tasks that take turns on one thread",
    ),
    (
        "runtime/sim/src/search.rs",
        Threads,
        "cases run side by side; each of them has one thread",
    ),
    (
        "runtime/text/src/vocab.rs",
        UnorderedMap,
        "looked up only, for each piece of a text",
    ),
    (
        "runtime/text/src/bpe.rs",
        UnorderedMap,
        "looked up only, for each pair of a text",
    ),
    (
        "runtime/text/src/pattern.rs",
        UnorderedMap,
        "looked up only, for long stretches of a text",
    ),
    (
        "runtime/text/src/pattern/automaton.rs",
        UnorderedMap,
        "looked up only; states have the order in which they are found",
    ),
    (
        "runtime/text/src/tokenizer/partition.rs",
        UnorderedMap,
        "looked up only, for each byte of a text",
    ),
    (
        "runtime/text/src/sampler/penalties.rs",
        UnorderedMap,
        "each logit is changed once, by its own count; an ordered map would allocate for each token",
    ),
];

/// Returns the lines of `text` that a build without tests contains, with their numbers: no
/// comments, no test modules.
fn shipped(text: &str) -> Vec<(usize, &str)> {
    let mut lines = Vec::new();
    let mut is_test = false;
    let mut follows_attribute = false;
    for (number, line) in (1..).zip(text.lines()) {
        if is_test {
            // In formatted code, a module ends at its own indentation.
            is_test = line != "}";
            continue;
        }
        if line.starts_with("#[cfg(") {
            follows_attribute = line.contains("test");
        } else if follows_attribute && line.starts_with("mod ") && line.ends_with('{') {
            (is_test, follows_attribute) = (true, false);
            continue;
        } else if !line.starts_with("#[") {
            follows_attribute = false;
        }
        let code = line.split("//").next().unwrap_or_default();
        lines.push((number, code));
    }
    lines
}

/// Returns whether `code` contains `word`, not as a part of a longer one.
fn has_word(code: &str, word: &str) -> bool {
    let is_part = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    code.match_indices(word).any(|(at, _)| {
        let before = at.checked_sub(1).and_then(|at| code.as_bytes().get(at));
        let after = code.as_bytes().get(at + word.len());
        !is_part(before) && (word.ends_with(':') || !is_part(after))
    })
}

/// Returns the indications of nondeterminism in a file: line number, source, word.
fn findings(text: &str) -> Vec<(usize, Source, &'static str)> {
    let mut found = Vec::new();
    for (number, code) in shipped(text) {
        for (source, words) in WORDS {
            let words = words.iter().filter(|word| has_word(code, word));
            found.extend(words.map(|word| (number, source, *word)));
        }
    }
    found
}

/// Returns whether a file has code of a library.
fn is_library(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "rs")
        && !path.ends_with("tests.rs")
        && !path.ends_with("testing.rs")
}

#[test]
fn nondeterminism_stays_within_the_environment() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !root.join("base/core/src/environment.rs").exists() {
        return samite_testing::skipped("the sources of the workspace are not there");
    }
    let mut files = Vec::new();
    for folder in FOLDERS {
        for member in std::fs::read_dir(root.join(folder)).unwrap() {
            let sources = member.unwrap().path().join("src");
            if sources.is_dir() {
                let all = text_files(&sources).into_iter();
                files.extend(all.filter(|path| is_library(path)));
            }
        }
    }
    files.sort();
    assert!(files.len() > 150, "only {} files", files.len());
    let mut used = BTreeSet::new();
    let mut wrong = String::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let path = file.strip_prefix(&root).unwrap();
        for (line, source, word) in findings(&text) {
            let allowed =
                |entry: &&(&str, Source, &str)| source == entry.1 && (path.starts_with(entry.0));
            match ALLOWED.iter().find(allowed) {
                Some(entry) => {
                    used.insert((entry.0, entry.1));
                }
                None => wrong += &format!("{}:{line}: {source:?}: {word}\n", path.display()),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "these depend on more than their input. Take time and threads from the environment that \
         the caller passes, use ordered maps, or say in ALLOWED why it does no harm:\n{wrong}"
    );
    let unused = ALLOWED
        .iter()
        .find(|entry| !used.contains(&(entry.0, entry.1)));
    assert_eq!(unused, None, "nobody uses this permission any more");
}

#[test]
fn every_source_of_nondeterminism_is_detected() {
    for (line, expected) in [
        ("let start = std::time::Instant::now();", Clock),
        ("let start = LazyLock::new(Instant::now);", Clock),
        ("use std::time::{Duration, SystemTime};", Clock),
        ("std::thread::sleep(time);", Clock),
        (
            "let (guard, _) = changed.wait_timeout(guard, LONG)?;",
            Clock,
        ),
        ("let mut rng = rand::rng();", Chance),
        ("let mut rng = thread_rng();", Chance),
        ("getrandom::fill(&mut seed)?;", Chance),
        ("let hash = RandomState::new().hash_one(text);", Chance),
        ("std::thread::spawn(work);", Threads),
        ("use std::thread::Builder;", Threads),
        ("    thread::scope(|scope| work(scope));", Threads),
        (
            "let mut seen: HashSet<u32> = Default::default();",
            UnorderedMap,
        ),
        ("use std::collections::{BTreeMap, HashMap};", UnorderedMap),
    ] {
        // Also after a test module.
        let text = format!("#[cfg(test)]\nmod tests {{\n    fn ok() {{}}\n}}\n{line}\n");
        let found = findings(&text);
        assert!(
            found
                .iter()
                .any(|(at, source, _)| (*at, *source) == (5, expected)),
            "{line}: {found:?}"
        );
    }
}

#[test]
fn harmless_code_is_not_reported() {
    for text in [
        "/// As Instant::now, on this clock.\nfn now(&self) -> Instant;",
        "let now = self.clock.now();\nself.clock.sleep(time);",
        "use rand_xoshiro::rand_core::SeedableRng;",
        "let map: MyHashMapper = BTreeMap::new();",
        "#[cfg(all(test, not(loom)))]\nmod tests {\n    fn wait() {\n        std::thread::yield_now();\n    }\n}",
        "#[cfg(test)]\n#[allow(clippy::unwrap_used)]\nmod tests {\n    use std::collections::HashSet;\n}",
    ] {
        assert_eq!(findings(text), [], "{text}");
    }
}
