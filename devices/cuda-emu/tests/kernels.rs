//! Runs compiled kernels and compares their results with known ones.

#![allow(clippy::unwrap_used, clippy::result_large_err)] // tests

mod common;

use common::{Card, Pack, noise, pack, schedules};
use samite_cuda_emu::machine::{FaultKind, Grid, KernelFault, Schedule, Space, run};
use samite_cuda_emu::ptx::Module;

const BASIC: &str = include_str!("ptx/basic.ptx");
const WRONG: &str = include_str!("ptx/wrong.ptx");

fn unit_floats(count: usize, seed: u32) -> Vec<f32> {
    noise(count, seed)
        .into_iter()
        .map(|n| n as f32 / u32::MAX as f32 - 0.5)
        .collect()
}

#[test]
fn adds_vectors() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let (a, b) = (unit_floats(1000, 1), unit_floats(1000, 2));
        let y = card.upload([[0u8; 4]; 1000]);
        let at_a = card.upload(a.iter().map(|v| v.to_le_bytes()));
        let at_b = card.upload(b.iter().map(|v| v.to_le_bytes()));
        let parameters = pack(&[&y, &at_a, &at_b, &1000u32]);
        let statistics = card.run("add", [8, 128], &parameters, schedule).unwrap();
        assert_eq!(statistics.blocks, 8);
        let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(card.floats(y, 1000), expected);
    });
}

#[test]
fn sums_with_barriers() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let a: Vec<f32> = (0..512).map(|i| (i % 37) as f32).collect();
        let y = card.upload([[0u8; 4]; 4]);
        let at = card.upload(a.iter().map(|v| v.to_le_bytes()));
        card.run("sum", [4, 128], &pack(&[&y, &at]), schedule)
            .unwrap();
        let expected: Vec<f32> = a.chunks(128).map(|c| c.iter().sum()).collect();
        assert_eq!(card.floats(y, 4), expected);
    });
}

#[test]
fn shuffles_lanes() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let y = card.upload([[0u8; 4]; 5 * 64]);
        card.run("shuffles", [1, 64], &pack(&[&y]), schedule)
            .unwrap();
        for (thread, row) in card.words(y, 5 * 64).chunks(5).enumerate() {
            let lane = thread as u32 & 31;
            let up = if lane < 3 { lane } else { lane - 3 };
            let down = if lane + 2 > 31 { lane } else { lane + 2 };
            // Segments of 8 lanes: the index is cut to 3 bits, the last one.
            let segment = lane & 0x18;
            assert_eq!(row, [up, down, lane ^ 5, segment | 7, 1], "lane {lane}");
        }
    });
}

#[test]
fn diverges_and_meets() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let a: Vec<u32> = (1..=500).collect();
        let y = card.upload([[0u8; 4]; 500]);
        let at = card.upload(a.iter().map(|v| v.to_le_bytes()));
        card.run("collatz", [4, 128], &pack(&[&y, &at, &500u32]), schedule)
            .unwrap();
        let steps = |&n: &u32| {
            let (mut v, mut steps) = (u64::from(n), 0);
            while v != 1 {
                v = if v % 2 == 1 { 3 * v + 1 } else { v / 2 };
                steps += 1;
            }
            steps
        };
        assert_eq!(
            card.words(y, 500),
            a.iter().map(steps).collect::<Vec<u32>>()
        );
    });
}

#[test]
fn transposes_through_shared_memory() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let a = unit_floats(1024, 3);
        let y = card.upload([[0u8; 4]; 1024]);
        let at = card.upload(a.iter().map(|v| v.to_le_bytes()));
        card.run("transpose", [1, 256], &pack(&[&y, &at]), schedule)
            .unwrap();
        let expected: Vec<f32> = (0..1024).map(|i| a[i % 32 * 32 + i / 32]).collect();
        assert_eq!(card.floats(y, 1024), expected);
    });
}

#[test]
fn indexes_local_arrays() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let order: Vec<u32> = (0..16).map(|i| i * 7 % 16).collect();
        let y = card.upload([[0u8; 4]; 40]);
        let at = card.upload(order.iter().map(|v| v.to_le_bytes()));
        card.run("local_array", [1, 40], &pack(&[&y, &at]), schedule)
            .unwrap();
        let expected = |thread: u32| {
            let mut values = [0u32; 16];
            for i in 0..16 {
                values[order[i as usize] as usize] = i * i + thread;
            }
            let at = |i: u32| values[((order[i as usize] + thread) & 15) as usize];
            (0..16).fold(0u32, |sum, i| sum.wrapping_mul(3).wrapping_add(at(i)))
        };
        assert_eq!(card.words(y, 40), (0..40).map(expected).collect::<Vec<_>>());
    });
}

#[test]
fn counts_with_atomics() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let a: Vec<u8> = noise(5000, 9)
            .into_iter()
            .map(|n| (n % 200) as u8)
            .collect();
        let y = card.upload([[0u8; 4]; 256]);
        let at = card.upload(a.iter().map(|&v| [v]));
        card.run("histogram", [6, 96], &pack(&[&y, &at, &5000u32]), schedule)
            .unwrap();
        let mut expected = vec![0u32; 256];
        a.iter().for_each(|&v| expected[usize::from(v)] += 1);
        assert_eq!(card.words(y, 256), expected);
    });
}

#[test]
fn orders_blocks_by_fence_and_atomic() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let y = card.upload([[0u8; 4]; 1]);
        let partial = card.upload([[0u8; 4]; 20]);
        let counter = card.upload([[0u8; 4]; 1]);
        let a = card.upload((0..20u32).map(|v| v.to_le_bytes()));
        card.run(
            "last_block",
            [20, 64],
            &pack(&[&y, &partial, &counter, &a]),
            schedule,
        )
        .unwrap();
        assert_eq!(card.words(y, 1), [380]);
    });
}

#[test]
fn multiplies_bytes() {
    let mut card = Card::new(BASIC);
    let (a, b) = (noise(32, 4), noise(32, 5));
    let y = card.upload([[0u8; 4]; 96]);
    let at_a = card.upload(a.iter().map(|v| v.to_le_bytes()));
    let at_b = card.upload(b.iter().map(|v| v.to_le_bytes()));
    card.run(
        "dots",
        [1, 32],
        &pack(&[&y, &at_a, &at_b]),
        Schedule::new(0),
    )
    .unwrap();
    for (i, row) in card.words(y, 96).chunks(3).enumerate() {
        let (a, b) = (a[i].to_le_bytes(), b[i].to_le_bytes());
        let sum = |f: &dyn Fn(u8, u8) -> i32| a.iter().zip(b).map(|(&a, b)| f(a, b)).sum::<i32>();
        let signed = sum(&|a, b| i32::from(a as i8) * i32::from(b as i8)) + 7;
        let unsigned = sum(&|a, b| i32::from(a) * i32::from(b)) - 7;
        let mixed = sum(&|a, b| i32::from(a) * i32::from(b as i8));
        assert_eq!(row, [signed as u32, unsigned as u32, mixed as u32]);
    }
}

#[test]
fn reads_tables_through_pointers() {
    let mut card = Card::new(BASIC);
    let y = card.upload([[0u8; 4]; 16]);
    card.run("tables", [1, 16], &pack(&[&y]), Schedule::new(0))
        .unwrap();
    let expected: Vec<u32> = (0..16).map(|i| (i & 7) * (i & 7) + 5).collect();
    assert_eq!(card.words(y, 16), expected);
    let (calls, bytes) = card.module.global("calls").unwrap();
    assert_eq!((bytes, card.words(calls, 1)), (4, vec![5]));
}

#[test]
fn calls_functions() {
    schedules(|schedule| {
        let mut card = Card::new(BASIC);
        let y = card.upload([[0u8; 4]; 64]);
        let parameters = pack(&[&y, &100u32, &1.5f32, &7u64]);
        card.run("functions", [1, 64], &parameters, schedule)
            .unwrap();
        let expected = |i: u32| {
            let n = if i % 2 == 1 { 10 } else { i + 1 };
            3.0 + (100 + i + n) as f32 + 21.0
        };
        assert_eq!(
            card.floats(y, 64),
            (0..64).map(expected).collect::<Vec<_>>()
        );
    });
}

/// Runs a wrong kernel and returns its fault.
fn fault(name: &str, grid: [u32; 2], words: &[usize], schedule: Schedule) -> KernelFault {
    let mut card = Card::new(WRONG);
    let buffers: Vec<u64> = words
        .iter()
        .map(|&n| card.upload(vec![[0u8; 4]; n]))
        .collect();
    let buffers: Vec<&dyn Pack> = buffers.iter().map(|b| b as &dyn Pack).collect();
    card.run(name, grid, &pack(&buffers), schedule).unwrap_err()
}

#[test]
fn a_removed_barrier_is_a_race_under_all_schedules() {
    for seed in 0..6 {
        let fault = fault(
            "sum_unsynchronized",
            [1, 128],
            &[1, 128],
            Schedule::new(seed),
        );
        let FaultKind::Race {
            space: Space::Shared,
            other_instruction,
            ..
        } = &fault.kind
        else {
            panic!("{fault}");
        };
        assert!(fault.instruction.contains(".shared.f32"), "{fault}");
        assert!(other_instruction.contains(".shared.f32"), "{fault}");
    }
}

#[test]
fn an_index_beyond_shared_memory_names_its_instruction() {
    let fault = fault("transpose_off", [1, 256], &[1024, 1024], Schedule::new(0));
    let expected = FaultKind::OutOfBounds {
        space: Space::Shared,
        access: samite_cuda_emu::machine::AccessKind::Read,
        address: 32 * 33 * 4,
        bytes: 4,
    };
    assert_eq!(fault.kind, expected, "{fault}");
    assert_eq!(fault.thread, [31, 0, 0]);
    assert!(fault.instruction.starts_with("ld.shared.f32"), "{fault}");
    assert!(
        WRONG
            .lines()
            .nth(fault.line - 1)
            .unwrap()
            .contains("ld.shared.f32")
    );
}

#[test]
fn a_misaligned_vector_is_a_fault() {
    let fault = fault("misaligned", [1, 32], &[32, 8], Schedule::new(0));
    assert!(
        matches!(fault.kind, FaultKind::Misaligned { bytes: 16, .. }),
        "{fault}"
    );
}

#[test]
fn an_index_beyond_an_allocation_is_a_fault() {
    let mut card = Card::new(WRONG);
    let y = card.upload([[0u8; 4]; 65]);
    let a = card.upload([[0u8; 4]; 64]);
    let parameters = pack(&[&y, &a, &64u32]);
    let fault = card
        .run("beyond", [1, 96], &parameters, Schedule::new(0))
        .unwrap_err();
    let text = fault.to_string();
    let start = format!("beyond: line {} `ld.global.f32", fault.line);
    assert!(text.starts_with(&start), "{text}");
    let end = format!(
        "block 0, thread 64: reads 4 bytes at {:#x} outside every allocation",
        a + 256
    );
    assert!(text.ends_with(&end), "{text}");
}

#[test]
fn the_order_of_blocks_is_a_race() {
    for seed in 0..4 {
        let fault = fault("block_order", [4, 32], &[5], Schedule::new(seed));
        assert!(
            matches!(
                fault.kind,
                FaultKind::Race {
                    space: Space::Global,
                    ..
                }
            ),
            "{fault}"
        );
    }
    // Without the detection, results depend on the schedule.
    let result = |seed| {
        let mut card = Card::new(WRONG);
        let y = card.upload([[0u8; 4]; 33]);
        let schedule = Schedule {
            detects_races: false,
            ..Schedule::new(seed)
        };
        card.run("block_order", [32, 32], &pack(&[&y]), schedule)
            .unwrap();
        card.words(y, 33)
    };
    assert_eq!(result(0), (0..33).collect::<Vec<u32>>());
    assert_ne!(result(0), result(1));
    assert_eq!(result(1), result(1));
}

#[test]
fn barriers_and_exchanges_need_all_lanes() {
    let divergent = fault("divergent_barrier", [1, 32], &[32], Schedule::new(0));
    assert_eq!(
        divergent.kind,
        FaultKind::DivergentBarrier {
            missing: 0xffff_0000
        }
    );
    let missing = fault("missing_lane", [1, 32], &[32], Schedule::new(0));
    assert!(
        matches!(missing.kind, FaultKind::MissingLanes { .. }),
        "{missing}"
    );
    assert!(missing.instruction.starts_with("shfl"), "{missing}");
}

#[test]
fn unwritten_shared_memory_is_a_fault() {
    let fault = fault("uninitialized", [1, 64], &[64], Schedule::new(0));
    assert_eq!(
        fault.kind,
        FaultKind::Uninitialized {
            address: 252,
            bytes: 4
        }
    );
    assert_eq!(fault.thread, [0, 0, 0]);
}

#[test]
fn traps_and_endless_loops_end() {
    let trap = fault("trap_if", [1, 32], &[32], Schedule::new(0));
    assert_eq!((trap.kind, trap.thread), (FaultKind::Trap, [5, 0, 0]));
    let schedule = Schedule {
        budget: 100_000,
        ..Schedule::new(0)
    };
    let endless = fault("endless", [1, 32], &[1], schedule);
    assert_eq!(endless.kind, FaultKind::Budget);
}

#[test]
fn conflicting_stores_are_races() {
    let same = fault("same_address", [1, 32], &[1], Schedule::new(0));
    assert!(matches!(same.kind, FaultKind::Race { .. }), "{same}");
    let constant = fault("constant_read", [1, 32], &[32], Schedule::new(0));
    assert!(
        matches!(constant.kind, FaultKind::Race { .. }),
        "{constant}"
    );
    for seed in 0..4 {
        let fault = fault(
            "last_block_unfenced",
            [8, 32],
            &[1, 8, 1],
            Schedule::new(seed),
        );
        assert!(matches!(fault.kind, FaultKind::Race { .. }), "{fault}");
        assert!(fault.instruction.starts_with("ld."), "{fault}");
    }
}

#[test]
fn launches_are_checked() {
    let mut card = Card::new(BASIC);
    let parameters = pack(&[&0u64]);
    for (grid, parameters) in [
        ([1, 1025], &parameters),
        ([0, 32], &parameters),
        ([1, 32], &vec![]),
    ] {
        let fault = card
            .run("tables", grid, parameters, Schedule::new(0))
            .unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Launch(_)), "{fault}");
    }
    let module = Module::parse(BASIC).unwrap();
    let grid = Grid {
        blocks: [1; 3],
        threads: [1; 3],
        dynamic_shared: 0,
    };
    let kernel = module.kernel("tables").unwrap();
    let result = run(
        kernel,
        grid,
        &parameters,
        &mut card.memory,
        Schedule::new(0),
        &|| false,
    );
    assert!(matches!(result.unwrap_err().kind, FaultKind::Launch(_)));
}
