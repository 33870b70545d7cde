//! Random graphs on several cards, alone and with others.

use super::card;
use super::work::outputs;
use samite_core::Device;
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_sched::nmse;
use samite_testing::imprecise_device;
use std::sync::Arc;

/// Default number of graphs; `SAMITE_RANDOM_GRAPHS` sets another one, `SAMITE_RANDOM_FIRST` the
/// first seed.
const GRAPHS: u64 = 100;

/// Runs of each graph: as launches, then as a recorded graph. Some change their operands.
const RUNS: usize = 3;

#[test]
fn random_graphs_match_the_reference() {
    let cards = [0, 1, 2, 3].map(card);
    let variable = |name| std::env::var(name).ok()?.parse().ok();
    let graphs = variable("SAMITE_RANDOM_GRAPHS").unwrap_or(GRAPHS);
    let first: u64 = variable("SAMITE_RANDOM_FIRST").unwrap_or(0);
    let reference = || -> Arc<dyn Device> { ReferenceDevice::new(ReferenceOptions::default()) };
    let (mut placed, mut noisy) = (0, 0);
    for seed in first..first + graphs {
        let expected = outputs(&[reference()], seed, (1, RUNS)).unwrap().unwrap();
        let one = Arc::clone(&cards[seed as usize % 4].device);
        let other = Arc::clone(&cards[(seed as usize + 1) % 4].device);
        let devices = match seed % 4 {
            0 => vec![one],
            1 => vec![one, reference()],
            2 => vec![reference(), one],
            _ => vec![one, other, reference()],
        };
        let copies = [1, 2, 4][seed as usize / 3 % 3];
        let Some(found) = outputs(&devices, seed, (copies, RUNS)).unwrap() else {
            continue;
        };
        placed += 1;
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = nmse(found, expected);
            if error > 1e-6 {
                // Cancellation leaves noise: a sum may be off by some units in the last place, here
                // 16.
                noisy += 1;
                let imprecise = imprecise_device(&reference());
                let near = outputs(&[imprecise], seed, (1, RUNS)).unwrap().unwrap();
                let noise = nmse(&near[number], expected);
                assert!(
                    error <= 16.0 * 16.0 * noise,
                    "seed {seed}, output {number}: {error:.1e}, noise {noise:.1e}"
                );
            }
        }
        // Repeating gives identical bits.
        let again = outputs(&devices, seed, (copies, RUNS)).unwrap();
        assert_eq!(again.as_ref(), Some(&found), "seed {seed}");
    }
    assert!(noisy <= 1 + graphs / 1000, "{noisy} of {graphs} are noise");
    assert!(
        placed * 10 >= graphs * 9,
        "{placed} of {graphs} graphs could be placed"
    );
}
