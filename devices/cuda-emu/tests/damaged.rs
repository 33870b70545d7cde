//! Damaged text gives errors: neither parsing nor running it panics.

#![allow(clippy::unwrap_used, clippy::result_large_err)] // tests

mod common;

use common::{Card, noise};
use samite_cuda_emu::machine::{Grid, Schedule, run};
use samite_cuda_emu::ptx::Module;

const TEXTS: [&str; 5] = [
    include_str!("ptx/basic.ptx"),
    include_str!("ptx/wrong.ptx"),
    include_str!("ptx/numbers.ptx"),
    include_str!("ptx/matrix.ptx"),
    include_str!("ptx/bulk.ptx"),
];

#[test]
fn unknown_instructions_are_errors_with_their_line() {
    let add = "add.f32 \t%f3, %f1, %f2;";
    assert!(TEXTS[0].contains(add));
    let line = TEXTS[0].lines().position(|l| l.contains(add)).unwrap() + 1;
    for wrong in [
        "frobnicate.f32 %f3, %f1, %f2;",
        "add.quick.f32 %f3, %f1, %f2;",
        "add.f32 %f3, %f1;",
    ] {
        let error = Module::parse(&TEXTS[0].replacen(add, wrong, 1)).unwrap_err();
        assert_eq!(error.line, line, "{error}");
    }
    let error = Module::parse(&TEXTS[0].replacen(add, "add.f32 %f3, %f1, %r1x;", 1)).unwrap_err();
    assert_eq!(error.line, line, "{error}");
}

/// Swaps, drops and doubles words of the text, and cuts it.
fn damage(text: &str, seed: u32) -> String {
    let mut words: Vec<&str> = text.split_inclusive([' ', '\t', '\n', ',']).collect();
    let numbers = noise(12, seed);
    for pair in numbers.chunks(3).take(1 + seed as usize % 4) {
        let (a, b) = (
            pair[0] as usize % words.len(),
            pair[1] as usize % words.len(),
        );
        match pair[2] % 8 {
            0 => drop(words.remove(a)),
            1 => words.truncate(words.len() - a % 50),
            2 => words.insert(a, words[b]),
            // Words nearby are often of the same kind, so that the text still parses.
            3..=5 => words[a] = words[(a + b % 60).min(words.len() - 1)],
            _ => words.swap(a, b),
        }
    }
    words.concat()
}

#[test]
fn damaged_texts_do_not_panic() {
    let (mut parsed, mut finished, mut faults) = (0, 0, 0);
    for seed in 1..=1500 {
        let text = damage(TEXTS[seed as usize % TEXTS.len()], seed);
        let Ok(module) = Module::parse(&text) else {
            continue;
        };
        parsed += 1;
        let mut card = Card::new("");
        let Ok(module) = module.load(&mut card.memory) else {
            continue;
        };
        for kernel in module.kernels().filter(|k| k.parameter_bytes() < 1 << 16) {
            let buffer = card.upload([[1u8; 4]; 4096]);
            let mut parameters = vec![0; kernel.parameter_bytes()];
            for (index, &(offset, bytes)) in kernel.parameters().iter().enumerate() {
                let value = if bytes == 8 {
                    buffer + 4096 * index as u64
                } else {
                    64
                };
                let bytes = bytes.min(8);
                parameters[offset..offset + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            }
            let threads = kernel.max_threads().unwrap_or(64).min(64);
            let grid = Grid {
                blocks: [2, 1, 1],
                threads: [threads, 1, 1],
                dynamic_shared: 0,
            };
            let schedule = Schedule {
                budget: 20_000,
                ..Schedule::new(u64::from(seed % 3))
            };
            match run(
                kernel,
                grid,
                &parameters,
                &mut card.memory,
                schedule,
                &|| false,
            ) {
                Ok(_) => finished += 1,
                Err(fault) => {
                    assert!(!fault.to_string().is_empty());
                    faults += 1;
                }
            }
        }
    }
    assert!(
        parsed > 50 && finished > 100 && faults > 100,
        "{parsed} {finished} {faults}"
    );
}
