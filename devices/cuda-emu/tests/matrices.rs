//! Matrix instructions, asynchronous copies and mbarriers.

#![allow(clippy::unwrap_used, clippy::result_large_err)] // tests

mod common;

use common::{Card, noise, pack, schedules};
use samite_cuda_emu::machine::{FaultKind, Schedule};

const MATRIX: &str = include_str!("ptx/matrix.ptx");
const BULK: &str = include_str!("ptx/bulk.ptx");

/// Bits of a small integer as f16.
fn half(value: i32) -> u16 {
    let sign = if value < 0 { 0x8000 } else { 0 };
    let magnitude = value.unsigned_abs();
    if magnitude == 0 {
        return sign;
    }
    let exponent = 31 - magnitude.leading_zeros();
    let fraction = (magnitude << (10 - exponent)) & 0x3ff;
    sign | ((exponent + 15) << 10 | fraction) as u16
}

fn small(count: usize, seed: u32) -> Vec<i32> {
    noise(count, seed)
        .into_iter()
        .map(|n| (n >> 8) as i32 % 17 - 8)
        .collect()
}

fn product(a: &[i32], b: &[i32], k: usize) -> Vec<i32> {
    let cell = |row: usize, column: usize| (0..k).map(|i| a[row * k + i] * b[column * k + i]).sum();
    (0..128).map(|i| cell(i / 8, i % 8)).collect()
}

#[test]
fn multiplies_halves() {
    schedules(|schedule| {
        let mut card = Card::new(MATRIX);
        let (a, b) = (small(256, 1), small(128, 2));
        let y = card.upload([[0u8; 4]; 128]);
        let at_a = card.upload(a.iter().map(|&v| half(v).to_le_bytes()));
        let at_b = card.upload(b.iter().map(|&v| half(v).to_le_bytes()));
        card.run("product_f16", [1, 32], &pack(&[&y, &at_a, &at_b]), schedule)
            .unwrap();
        let expected: Vec<f32> = product(&a, &b, 16).into_iter().map(|v| v as f32).collect();
        assert_eq!(card.floats(y, 128), expected);
    });
}

#[test]
fn multiplies_bytes() {
    let mut card = Card::new(MATRIX);
    let (a, b) = (small(512, 3), small(256, 4));
    let y = card.upload([[0u8; 4]; 128]);
    let at_a = card.upload(a.iter().map(|&v| [v as u8]));
    let at_b = card.upload(b.iter().map(|&v| [v as u8]));
    card.run(
        "product_s8",
        [1, 32],
        &pack(&[&y, &at_a, &at_b]),
        Schedule::new(0),
    )
    .unwrap();
    let expected = product(&a, &b, 32);
    for (i, found) in card.words(y, 128).into_iter().enumerate() {
        // Accumulators begin at 1 to 4.
        let start = 1 + (i % 2) + 2 * (i / 64);
        assert_eq!(found as i32, expected[i] + start as i32);
    }
}

#[test]
fn multiplies_tf32() {
    let mut card = Card::new(MATRIX);
    let (a, b) = (small(128, 5), small(64, 6));
    let y = card.upload([[0u8; 4]; 128]);
    let at_a = card.upload(a.iter().map(|&v| (v as f32).to_le_bytes()));
    let at_b = card.upload(b.iter().map(|&v| (v as f32).to_le_bytes()));
    card.run(
        "product_tf32",
        [1, 32],
        &pack(&[&y, &at_a, &at_b]),
        Schedule::new(0),
    )
    .unwrap();
    let expected: Vec<f32> = product(&a, &b, 8).into_iter().map(|v| v as f32).collect();
    assert_eq!(card.floats(y, 128), expected);
}

#[test]
fn loads_transposed_matrices() {
    let mut card = Card::new(MATRIX);
    let y = card.upload([[0u8; 4]; 32]);
    let a = card.upload((0..64u16).map(|v| v.to_le_bytes()));
    card.run("transposed", [1, 32], &pack(&[&y, &a]), Schedule::new(0))
        .unwrap();
    // Lane i gets elements (i / 4, 2 (i % 4)) and the next one of the transposed matrix.
    let expected = |i: u32| {
        let (row, column) = (i / 4, 2 * (i % 4));
        (column * 8 + row) | ((column + 1) * 8 + row) << 16
    };
    assert_eq!(card.words(y, 32), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn copies_land_at_the_wait() {
    let mut card = Card::new(MATRIX);
    let y = card.upload([[0u8; 4]; 32]);
    let a = card.upload([[0u8; 4]; 128]);
    let fault = card
        .run("unawaited", [1, 32], &pack(&[&y, &a]), Schedule::new(0))
        .unwrap_err();
    assert!(
        matches!(fault.kind, FaultKind::PendingCopy { .. }),
        "{fault}"
    );
    assert!(fault.instruction.starts_with("ld.shared.u32"), "{fault}");
}

#[test]
fn bulk_copies_signal_mbarriers() {
    for seed in 0..6 {
        let mut card = Card::new(BULK);
        let a = noise(7 * 256, 8);
        let y = card.upload([[0u8; 4]; 64]);
        let at = card.upload(a.iter().map(|v| v.to_le_bytes()));
        let parameters = pack(&[&y, &at, &7u32]);
        card.run("ring", [1, 96], &parameters, Schedule::new(seed))
            .unwrap();
        let expected = |i: usize| {
            a.iter()
                .skip(i)
                .step_by(64)
                .fold(0u32, |s, &v| s.wrapping_add(v))
        };
        assert_eq!(card.words(y, 64), (0..64).map(expected).collect::<Vec<_>>());
    }
}

/// The kernel without its wait for empty stages, and without its wait for full ones.
#[test]
fn missing_waits_are_races() {
    for wait in ["@!p bra L", "@p bra D"] {
        let text: String = BULK
            .lines()
            .map(|line| {
                let is_wait = line.contains("try_wait");
                let hits = is_wait && line.contains(wait);
                if hits {
                    cut_wait(line)
                } else {
                    format!("{line}\n")
                }
            })
            .collect();
        for seed in 0..4 {
            let mut card = Card::new(&text);
            let y = card.upload([[0u8; 4]; 64]);
            let a = card.upload([[0u8; 4]; 7 * 256]);
            let parameters = pack(&[&y, &a, &7u32]);
            let fault = card
                .run("ring", [1, 96], &parameters, Schedule::new(seed))
                .unwrap_err();
            let is_found = matches!(
                fault.kind,
                FaultKind::Race { .. } | FaultKind::Uninitialized { .. } | FaultKind::Deadlock
            );
            assert!(is_found, "{fault}");
        }
    }
}

/// Replaces a test by success.
fn cut_wait(line: &str) -> String {
    let start = line.find("mbarrier.try_wait").unwrap();
    let end = start + line[start..].find(';').unwrap();
    format!("{}setp.eq.u32 p, 0, 0{}\n", &line[..start], &line[end..])
}
