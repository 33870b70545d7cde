//! Calls the fuzz entry points with mutated seeds. This works on a stable compiler and finds within
//! seconds the bugs that a fuzzer finds first.

use samite_gguf::{GgufFile, Header};
use samite_llm::{Batch, Context, ContextOptions, Model, ModelOptions, SavedSequence};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use std::panic::catch_unwind;

/// Number of inputs for each entry point.
const INPUTS: usize = 10_000;

/// A deterministic random number generator (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }

    /// Changes, removes, repeats or inserts bytes in a few places.
    fn mutate(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(24)).min(bytes.len());
            match self.below(6) {
                0 => drop(bytes.drain(at..end)),
                1 => {
                    let part = bytes[at..end].to_vec();
                    let to = self.below(bytes.len() + 1);
                    bytes.splice(to..to, part);
                }
                2 => {
                    let other = &seeds[self.below(seeds.len())];
                    let from = self.below(other.len());
                    let to = (from + self.below(60)).min(other.len());
                    bytes.splice(at..at, other[from..to].iter().copied());
                }
                3 => {
                    let extremes: [&[u8]; 6] = [
                        &[0xff; 8],
                        &[0; 8],
                        b"1e999",
                        b"-1",
                        b"[[[[[[[[",
                        b"{{{{{{{{",
                    ];
                    bytes.splice(at..at, extremes[self.below(6)].iter().copied());
                }
                _ if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                _ => bytes.push(self.below(256) as u8),
            }
        }
        bytes
    }
}

/// Calls an entry point with its seeds and mutations of them.
fn check(entry: fn(&[u8]), inputs: usize, seeds: &[Vec<u8>]) {
    let mut random = Random(1);
    let mutated = (0..inputs).map(|_| random.mutate(seeds));
    for bytes in seeds.iter().cloned().chain(mutated) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(
            catch_unwind(|| entry(&bytes)).is_ok(),
            "{text:?}: {bytes:?}"
        );
    }
}

/// Prefixes each text with each of these bytes.
fn with_kinds(kinds: impl Iterator<Item = u8> + Clone, texts: &[&str]) -> Vec<Vec<u8>> {
    let seeds = texts.iter().flat_map(|text| {
        let kinds = kinds.clone();
        kinds.map(move |kind| [&[kind], text.as_bytes()].concat())
    });
    seeds.collect()
}

#[test]
fn bodies() {
    let texts = [
        r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 9}"#,
        r#"{"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f",
            "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "b"}],
            "tools": [{"type": "function", "function": {"name": "f",
            "parameters": {"type": "object"}}}], "tool_choice": "required"}"#,
        r#"{"prompt": ["a", [1, 2]], "n_predict": 4, "temperature": 0.5, "logit_bias": [[3, -1]],
            "stop": ["x"], "stream": true}"#,
        r#"{"input": [{"type": "message", "role": "user", "content": "a"}], "instructions": "b",
            "text": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}"#,
        r#"{"system": "s", "messages": [{"role": "user", "content": [{"type": "tool_result",
            "tool_use_id": "1", "content": "c"}]}], "max_tokens": 4,
            "thinking": {"type": "enabled", "budget_tokens": 1024}}"#,
        r#"{"model": "m", "prompt": "a", "options": {"num_predict": 3, "top_k": 5},
            "format": {"type": "object"}, "keep_alive": "5m"}"#,
        r#"{"content": "a", "tokens": [1, 2, 300], "input_prefix": "a", "input_suffix": "b",
            "grammar": "root ::= \"a\"", "lora": [{"id": 0, "scale": 1}]}"#,
    ];
    check(samite_fuzz::body, INPUTS, &with_kinds(0..17, &texts));
}

#[test]
fn grammars() {
    let gbnf = "root ::= item{2,5} | [^a-z]+ (\"x\" item)*\nitem ::= \"\\u00e9\" root?";
    let schema = r##"{"type": "object", "properties": {"a": {"$ref": "#/$defs/b"},
        "c": {"enum": [1, "x"]}}, "required": ["a"], "$defs": {"b": {"anyOf": [{"type": "integer",
        "minimum": 3}, {"type": "array", "items": {"pattern": "^a+$", "type": "string"},
        "maxItems": 4}]}}}"##;
    let regex = r"(a|b{2,9})*[^\d\s]+(?i:x)\u{1F600}?";
    let seeds: Vec<Vec<u8>> = [gbnf, schema, regex]
        .iter()
        .zip(0..)
        .map(|(text, kind)| [&[kind], text.as_bytes()].concat())
        .collect();
    check(samite_fuzz::grammar, INPUTS, &seeds);
}

/// Returns the contents of a fixture of image encoders.
fn fixture(name: &str) -> Vec<u8> {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../runtime/vision/tests/fixtures/"
    );
    std::fs::read(format!("{folder}{name}")).expect("the fixture is there")
}

#[test]
fn images() {
    let cases = fixture("decoded.json");
    let cases: serde_json::Value = serde_json::from_slice(&cases).expect("it is JSON");
    let cases = cases["cases"].as_array().expect("a list").iter();
    let seeds: Vec<Vec<u8>> = cases
        .map(|case| serde_json::from_value(case["file"].clone()).expect("bytes"))
        .collect();
    check(samite_fuzz::image, INPUTS, &seeds);
}

#[test]
fn image_encoders() {
    // Tensors come after the description.
    let header = |name: &str| {
        let mut bytes = fixture(name);
        bytes.truncate(4096);
        // No tensors.
        bytes[8..16].fill(0);
        Header::from_bytes(&bytes).expect("it is a header");
        bytes
    };
    let names = [
        "qwen2vl.gguf",
        "qwen25vl.gguf",
        "qwen3vl.gguf",
        "gemma3.gguf",
    ];
    check(samite_fuzz::image_encoder, INPUTS, &names.map(header));
}

#[test]
fn kv_events_peers() {
    let subscription = [0, 3, 1, b'k', b'v', 0, 3, 0, b'k', b'v'];
    let question = [1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    let long = [2, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2];
    let mut seeds = Vec::new();
    for body in [&subscription[..], &question, &long] {
        seeds.extend((0..4).map(|kind| [&[kind], body].concat()));
    }
    // A peer's own greeting.
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB";
    seeds.push([&[0], &greeting[..], ready, &subscription].concat());
    check(samite_fuzz::kv_events, INPUTS, &seeds);
}

#[test]
fn remote_server_clients() {
    // Numbered requests: an acknowledgement, an empty command, a cancellation, and the end of the
    // session.
    let requests: [&[u8]; 4] = [
        &[8, 1, 0x30, 1],
        &[8, 2, 0x2a, 6, 0x0a, 4, 8, 1, 0x10, 64],
        &[8, 3, 0x20, 2, 0x2a, 4, 0x12, 2, 8, 1],
        &[8, 4, 0x38, 1],
    ];
    let message = |bytes: &[u8]| [&(bytes.len() as u16).to_le_bytes()[..], bytes].concat();
    let mut seeds = vec![[vec![0], message(&[0x1a, 2, 8, 1])].concat()];
    for request in requests {
        seeds.push([vec![1], message(request)].concat());
    }
    seeds.push([vec![1], requests.map(message).concat()].concat());
    check(samite_fuzz::remote, INPUTS, &seeds);
}

#[test]
fn sessions() {
    let saved = SavedSequence::from_bytes(session());
    assert!(saved.is_ok(), "the seed is a saved sequence");
    check(samite_fuzz::session, INPUTS, &[session()]);
}

/// Computes three tokens and saves their sequence.
fn session() -> Vec<u8> {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let file = GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
    let model = Model::from_gguf(&file, &ModelOptions::new(vec![device])).unwrap();
    let options = ContextOptions {
        n_ctx: Some(64),
        ..ContextOptions::default()
    };
    let mut context = Context::new(model, options).unwrap();
    let mut batch = Batch::new();
    [3, 70, 9]
        .into_iter()
        .zip(0..)
        .for_each(|(token, position)| batch.add(token, position, &[0], false));
    context.decode(&batch).unwrap();
    context.save(0).unwrap().to_bytes().unwrap()
}

#[test]
fn templates() {
    let texts = [
        "{% for message in messages %}{{ '<|' ~ message.role ~ '|>' ~ message['content'] | trim }}{% endfor %}",
        "{%- set ns = namespace(a=[], b='') -%}{%- for i in range(9) -%}{%- set _ = ns.a.append(i) -%}{%- endfor -%}{{ ns.a | join(', ') }}",
        "{% macro f(x, n=2) %}{{ x * n }}{% endmacro %}{{ f('ab', 3) | replace('a', 'bb') | upper }}{{ {'a': [1, 2.5, none]} | tojson(indent=2) }}",
        "{{ 'a,b,c'.split(',')[::-1] | list }}{{ '%s is %05.2f' | format('x', 3) }}{{ '{:>9}'.format('x') }}{{ '[1, {\"a\": []}]' | from_json }}",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% elif add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}{{ messages | selectattr('role') | map(attribute='content') | first | default('x') }}",
    ];
    let seeds: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    check(samite_fuzz::template, INPUTS, &seeds);
}
