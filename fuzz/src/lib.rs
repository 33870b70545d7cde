//! Entry points of fuzz targets. Each takes any bytes and must return: no panic, no hang, and no
//! memory beyond the stated limit. `tests/mutated.rs` calls them with mutated seeds on a stable
//! compiler.

mod bodies;
mod remote;

pub use bodies::body;
pub use remote::remote;

use samite_chat::{DateTime, Limits, Template};
use samite_gguf::Header;
use samite_grammar::Grammar;
use samite_llm::SavedSequence;
use samite_vision::{DecodeLimits, EncodedImage, VisionSpec};

/// Serves a KV event peer. The first byte selects the socket and whether the peer greets.
pub fn kv_events(bytes: &[u8]) {
    if let Some((&kind, rest)) = bytes.split_first() {
        let _ = samite_kv_events::fuzz::serve(rest, kind & 1 == 1, kind & 2 == 2);
    }
}

/// Parses a saved sequence. A valid one must survive a round trip.
pub fn session(bytes: &[u8]) {
    if let Ok(saved) = SavedSequence::from_bytes(bytes.to_vec()) {
        let written = saved.to_bytes().expect("what was read can be written");
        SavedSequence::from_bytes(written).expect("what was written can be read");
    }
}

/// Decodes an image of at most 2^20 pixels.
pub fn image(bytes: &[u8]) {
    let limits = DecodeLimits { pixels: 1 << 20 };
    if let Ok(encoded) = EncodedImage::new(bytes, &limits) {
        let _ = encoded.decode();
    }
}

/// Reads the description of an image encoder. A valid one must give sizes to images.
pub fn image_encoder(bytes: &[u8]) {
    let Ok(header) = Header::from_bytes(bytes) else {
        return;
    };
    let Ok(spec) = VisionSpec::from_metadata(&header.metadata, [None, None]) else {
        return;
    };
    let [columns, rows] = spec.largest_grid();
    for (width, height) in [
        (1, 1),
        (640, 480),
        (65_535, 1),
        (1, 65_535),
        (65_535, 65_535),
    ] {
        for size in spec.tiles(width, height).sizes() {
            let grid = spec.grid(size);
            let count = grid[0].saturating_mul(grid[1]);
            assert!((1..=columns * rows).contains(&count), "{grid:?}");
        }
    }
}

/// Compiles and renders a chat template.
pub fn template(bytes: &[u8]) {
    let limits = Limits {
        steps: 20_000,
        output: 1 << 20,
        ..Limits::default()
    };
    let source = String::from_utf8_lossy(bytes);
    if let Ok(template) = Template::with_limits(&source, limits) {
        let message = serde_json::json!({"role": "user", "content": "a"});
        let context = serde_json::json!({"messages": [message], "add_generation_prompt": true});
        let _ = template.render(&context, DateTime::new(0, 0));
    }
}

/// Parses a grammar: GBNF, a JSON schema or a regular expression, depending on the first byte.
pub fn grammar(bytes: &[u8]) {
    let Some((&kind, rest)) = bytes.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    let grammar = match kind % 3 {
        0 => Grammar::gbnf(&text),
        1 => Grammar::json_schema(&text),
        _ => Grammar::regex(&text),
    };
    // Some rules are only checked when the engine compiles the grammar.
    let _ = grammar.and_then(|grammar| grammar.check());
}
