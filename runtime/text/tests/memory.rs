//! A vocabulary takes no more memory than estimated before its creation.

use samite_text::{Tokenizer, TokenizerModel, VocabData};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts the current thread's allocated bytes, and their peak.
struct Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

/// Returns the size of an allocation in glibc and similar allocators: an eight-byte header, in
/// steps of 16.
fn taken(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: all calls go to the system's allocator unchanged; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Thread-local values are gone while a thread ends.
        let _ = NOW.try_with(|now| {
            now.set(now.get().wrapping_add(taken(layout)));
            let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
        });
        // SAFETY: the caller fulfils the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let _ = NOW.try_with(|now| now.set(now.get().saturating_sub(taken(layout))));
        // SAFETY: the caller fulfils the contract, which is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns a token's text: the 256 bytes first, then random letters, which few others begin with.
fn text(model: TokenizerModel, index: usize, length: usize) -> Vec<u8> {
    let mut text = match index {
        0..256 => format!("<0x{index:02X}>"),
        _ => format!("{index:x}_"),
    };
    let mut chance = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    while index > 255 && text.len() < length {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        text.push(char::from(b'a' + (chance % 26) as u8));
    }
    if model == TokenizerModel::Rwkv {
        text = format!("'{text}'");
    }
    text.into_bytes()
}

#[test]
fn a_vocabulary_stays_within_its_memory_estimate() {
    for model in TokenizerModel::ALL {
        // Just above and below powers of two, where tables grow, and with long tokens.
        for (count, length) in [
            (300, 4),
            (16_000, 8),
            (17_000, 20),
            (5_000, 60),
            (66_000, 7),
        ] {
            let before = NOW.get();
            PEAK.set(before);
            let tokens: Vec<_> = (0..count).map(|i| text(model, i, length)).collect();
            let mut data = VocabData::new(model, tokens);
            data.scores = Some((0..count).map(|i| i as f32).collect());
            if model != TokenizerModel::Rwkv {
                data.token_types = Some((0..count).map(|i| 1 + 5 * i32::from(i < 256)).collect());
            }
            let halves = data.tokens[256..].iter().map(|token| {
                let (left, right) = token.split_at(token.len() / 2);
                [left, b" ", right].concat()
            });
            let merges: Vec<_> = halves.collect();
            let texts = data.tokens.iter().chain(&merges);
            let bytes = texts.map(Vec::len).sum();
            let said = VocabData::memory_needed(model, count, merges.len(), bytes);
            data.merges = Some(merges);
            let tokenizer = Tokenizer::new(data).unwrap();
            let peak = PEAK.get() - before;
            assert_eq!(tokenizer.vocab_size(), count);
            assert!(peak <= said, "{model} {count} {length}: {peak} > {said}");
            assert!(
                said < 4 * peak + (1 << 20),
                "{model} {count} {length}: {peak} of {said}"
            );
        }
    }
}
