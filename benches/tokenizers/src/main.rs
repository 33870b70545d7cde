//! Measures the tokenization speed of both libraries, in turn, with one thread each.
//!
//! ```sh
//! cargo run --release -- prose.txt code.txt chinese.txt
//! ```
//!
//! Vocabularies are trained on the first two megabytes of each text. A text is tokenized as a
//! whole, and in documents of about 4 KB.

use samite_tokenizers_bench::{Pair, bert, bpe, gemma, unigram};
use std::time::Instant;

/// Number of rounds, whose median is reported.
const ROUNDS: usize = 5;

/// Number of bytes that vocabularies are trained on.
const TRAINED: usize = 2_000_000;

const DOCUMENT: usize = 4096;

const VOCABULARY: usize = 30_000;

fn main() {
    println!(
        "| text | vocabulary | whole: samite | tokenizers | ratio | documents: samite | tokenizers | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).expect("a text");
        let mut end = TRAINED.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let texts = [&text[..end]];
        let name = path
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .trim_end_matches(".txt");
        for name_of in ["gpt-2", "llama-bpe", "qwen35", "gpt-4o", "deepseek-v3"] {
            row(name, &text, &bpe(name_of, &texts, VOCABULARY, false));
        }
        row(name, &text, &gemma("gemma4", &texts, VOCABULARY, false));
        row(name, &text, &bert("bert", &texts, VOCABULARY, true));
        row(name, &text, &unigram("t5", &texts, 8_000));
    }
}

fn row(name: &str, text: &str, pair: &Pair) {
    let mut documents = Vec::new();
    let mut start = 0;
    while start < text.len() {
        let end = text.len().min(start + DOCUMENT);
        let end = text.as_bytes()[end..]
            .iter()
            .position(|&byte| byte == b'\n')
            .map_or(text.len(), |more| end + more + 1);
        documents.push(&text[start..end]);
        start = end;
    }
    let [whole_ours, whole_theirs] = measure(&[text], pair);
    let [parts_ours, parts_theirs] = measure(&documents, pair);
    println!(
        "| {name} | {} | {whole_ours:.1} MB/s | {whole_theirs:.1} MB/s | {:.1} | {parts_ours:.1} MB/s | {parts_theirs:.1} MB/s | {:.1} |",
        pair.name,
        whole_ours / whole_theirs,
        parts_ours / parts_theirs,
    );
}

/// Returns the speed of samite and of `tokenizers` in megabytes per second.
fn measure(documents: &[&str], pair: &Pair) -> [f64; 2] {
    let bytes: usize = documents.iter().map(|document| document.len()).sum();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for document in documents {
            std::hint::black_box(pair.ours.tokenize(document, false, false).expect("tokens"));
        }
        times[0].push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        for document in documents {
            std::hint::black_box(pair.theirs.encode_fast(*document, false).expect("tokens"));
        }
        times[1].push(started.elapsed().as_secs_f64());
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        bytes as f64 / 1e6 / times[ROUNDS / 2]
    })
}
