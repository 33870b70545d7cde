//! Measures the sampler chain on a large vocabulary:
//! `cargo run --release -p samite-text --example sampler_speed`.

use samite_text::{Rng, Sampler, SamplerParams};
use std::time::Instant;

const VOCABULARY: usize = 128_000;
const ROUNDS: usize = 2000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut rng = Rng::new(1);
    // About what a model gives: most logits near a middle, a few far above. Several tables, so that
    // no cache holds them all.
    let tables: Vec<Vec<f32>> = (0..8)
        .map(|_| {
            (0..VOCABULARY)
                .map(|_| (0..6).map(|_| rng.uniform() as f32 * 4.0 - 2.0).sum())
                .collect()
        })
        .collect();
    let usual = SamplerParams::default;
    let chains = [
        ("greedy", SamplerParams::greedy()),
        ("default", usual()),
        (
            "penalties",
            SamplerParams {
                repeat_penalty: 1.1,
                ..usual()
            },
        ),
        (
            "penalties, greedy",
            SamplerParams {
                repeat_penalty: 1.1,
                ..SamplerParams::greedy()
            },
        ),
        (
            "DRY, XTC",
            SamplerParams {
                dry_multiplier: 0.8,
                dry_breakers: vec![],
                xtc_probability: 0.5,
                ..usual()
            },
        ),
        (
            "top-n-sigma",
            SamplerParams {
                top_n_sigma: 1.0,
                ..usual()
            },
        ),
        (
            "no top-k",
            SamplerParams {
                top_k: 0,
                ..usual()
            },
        ),
        (
            "mirostat 2",
            SamplerParams {
                mirostat: 2,
                ..usual()
            },
        ),
    ];
    for (name, params) in chains {
        let mut sampler = Sampler::new(params)?;
        let mut times = Vec::new();
        for logits in tables.iter().cycle().take(
            ROUNDS
                / if name == "greedy" || name == "default" {
                    1
                } else {
                    10
                },
        ) {
            let start = Instant::now();
            let token = sampler.sample(logits)?;
            sampler.accept(token)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.1} us, 99th percentile {:.1} us",
            times[times.len() / 2],
            times[times.len() * 99 / 100]
        );
    }
    Ok(())
}
