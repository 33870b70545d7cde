//! Compares the tokens that libllama's sampler chains draw for a seed with those of the same stages
//! with the Mersenne Twister.
//!
//! The expected tokens come from a program that loads `libllama.v0.5.0.so` of the npm package
//! `@node-llama-cpp/linux-x64` 3.22.1, applies `llama_sampler_chain` to the logits below, and
//! accepts each token.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_text::{Generator, Sampler, SamplerParams, Stage};

const SEED: u64 = 42;
const VOCABULARY: u32 = 64;

/// Returns unordered logits from 0 to 6.7 at even steps, to 2.5 at odd ones.
fn logits(step: u32) -> Vec<f32> {
    let scale = [150.0, 400.0][step as usize % 2];
    let logit = |token: u32| ((token * 7919 + step * 104_729) % 1009) as f32 / scale;
    (0..VOCABULARY).map(logit).collect()
}

/// Returns parameters for stages given as letters; every unset stage is off.
fn params(stages: &str) -> SamplerParams {
    SamplerParams {
        seed: SEED,
        generator: Generator::Mersenne,
        stages: Stage::parse_letters(stages).unwrap(),
        top_k: 40,
        ..Default::default()
    }
}

fn check(params: SamplerParams, expected: &[u32]) {
    let has_counts = params.stages.contains(&Stage::Xtc);
    let mut sampler = Sampler::new(params).unwrap();
    let mut seen = Vec::new();
    for step in 0..expected.len() as u32 {
        let token = sampler.sample(&logits(step)).unwrap();
        sampler.accept(token).unwrap();
        seen.push(token);
        if step == 9 {
            // A state saved in between suffices to continue.
            let state = sampler.state();
            for wrong in [-1.0, 0.5, 1e12].into_iter().filter(|_| has_counts) {
                let mut state = state.clone();
                *state.draw.last_mut().unwrap() = wrong;
                sampler.resume(&state, &seen, seen.len()).unwrap_err();
            }
            sampler.resume(&state, &seen, seen.len()).unwrap();
        }
    }
    assert_eq!(seen, expected);
    sampler.reset().unwrap();
    assert_eq!(sampler.sample(&logits(0)).unwrap(), expected[0]);
}

#[test]
fn usual_chain_draws_match_upstream() {
    check(
        params("kpmt"),
        &[
            21, 19, 38, 50, 28, 0, 32, 11, 42, 29, 13, 53, 12, 22, 43, 1, 12, 10, 22, 48, 59, 31,
            12, 9, 27, 27, 18, 20, 22, 49, 46, 58,
        ],
    );
}

#[test]
fn xtc_after_other_stages_draws_match_upstream() {
    check(
        SamplerParams {
            xtc_probability: 0.5,
            xtc_threshold: 0.05,
            ..params("kpmxt")
        },
        &[
            61, 19, 38, 50, 28, 0, 32, 11, 23, 29, 40, 7, 52, 22, 43, 1, 12, 43, 22, 48, 7, 31, 12,
            9, 27, 27, 12, 20, 49, 49, 7, 58,
        ],
    );
}

#[test]
fn xtc_draws_match_upstream() {
    check(
        SamplerParams {
            xtc_probability: 0.5,
            xtc_threshold: 0.03,
            ..params("x")
        },
        &[
            62, 12, 45, 12, 28, 4, 27, 19, 30, 4, 47, 48, 14, 36, 62, 55, 38, 57, 3, 34, 47, 32,
            63, 14, 3, 39, 39, 16, 10, 55, 54, 31,
        ],
    );
}

#[test]
fn mirostat() {
    check(
        SamplerParams {
            mirostat: 1,
            mirostat_tau: 3.0,
            mirostat_eta: 0.1,
            ..params("")
        },
        &[
            34, 45, 51, 49, 41, 46, 45, 4, 42, 28, 13, 45, 31, 22, 35, 59, 58, 10, 22, 1, 59, 31,
            11, 2, 27, 39, 31, 17, 35, 47, 59, 44,
        ],
    );
}

#[test]
fn mirostat_2() {
    check(
        SamplerParams {
            mirostat: 2,
            mirostat_tau: 3.0,
            mirostat_eta: 0.1,
            ..params("")
        },
        &[
            1, 32, 51, 43, 41, 0, 45, 37, 9, 48, 13, 52, 44, 22, 35, 0, 25, 10, 22, 34, 26, 31, 37,
            35, 27, 26, 31, 50, 35, 1, 26, 44,
        ],
    );
}

#[test]
fn mirostat_2_with_low_tau_draws_match_upstream() {
    check(
        SamplerParams {
            mirostat: 2,
            mirostat_tau: 1.0,
            mirostat_eta: 0.3,
            ..params("")
        },
        &[
            33, 12, 4, 29, 54, 46, 25, 17, 29, 34, 0, 5, 63, 22, 1, 26, 51, 10, 55, 14, 6, 31, 10,
            2, 27, 19, 18, 23, 35, 7, 32, 57,
        ],
    );
}

#[test]
fn adaptive_p() {
    check(
        SamplerParams {
            min_p: 0.2,
            adaptive_target: 0.3,
            ..params("ma")
        },
        &[
            53, 12, 44, 37, 28, 3, 26, 19, 9, 41, 0, 45, 63, 3, 61, 40, 38, 0, 3, 34, 26, 2, 63,
            16, 8, 39, 18, 63, 22, 55, 39, 31,
        ],
    );
}

#[test]
fn adaptive_p_after_top_p_draws_match_upstream() {
    check(
        SamplerParams {
            top_p: 0.3,
            adaptive_target: 0.3,
            ..params("pa")
        },
        &[
            53, 45, 24, 3, 54, 46, 58, 50, 9, 41, 13, 45, 50, 22, 54, 0, 51, 10, 22, 34, 39, 31,
            43, 35, 27, 26, 11, 4, 48, 34, 19, 44,
        ],
    );
}

#[test]
fn adaptive_p_without_truncation_draws_match_upstream() {
    check(
        SamplerParams {
            adaptive_target: 0.1,
            adaptive_decay: 0.5,
            ..params("a")
        },
        &[
            51, 12, 48, 38, 28, 6, 28, 20, 9, 41, 2, 45, 61, 0, 63, 39, 38, 0, 2, 33, 26, 3, 63,
            14, 5, 39, 24, 63, 29, 55, 42, 29,
        ],
    );
}
