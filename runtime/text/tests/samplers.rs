//! Compares each sampler with a naive implementation of its definition, over random logits.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_text::{Rng, Sampler, SamplerParams, Stage, Tokenizer, TokenizerModel, VocabData};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

const CASES: usize = 10_000;

/// Tokens with their logits.
type Logits = BTreeMap<u32, f64>;

/// Tokens with their probabilities.
type Distribution = BTreeMap<u32, f64>;

fn softmax(logits: &Logits) -> Distribution {
    let max = logits.values().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.values().map(|logit| (logit - max).exp()).sum();
    let share = |logit: &f64| (logit - max).exp() / sum;
    logits
        .iter()
        .map(|(id, logit)| (*id, share(logit)))
        .collect()
}

/// Returns tokens from most to least probable, each with its probability.
fn ranked(logits: &Logits) -> Vec<(u32, f64)> {
    let mut ranked: Vec<_> = softmax(logits).into_iter().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    ranked
}

fn keep(logits: &Logits, kept: impl IntoIterator<Item = u32>) -> Logits {
    kept.into_iter().map(|id| (id, logits[&id])).collect()
}

fn top_k(logits: &Logits, k: usize) -> Logits {
    let count = if k == 0 { logits.len() } else { k };
    keep(
        logits,
        ranked(logits).into_iter().take(count).map(|entry| entry.0),
    )
}

fn top_p(logits: &Logits, p: f64, min_keep: usize) -> Logits {
    let mut sum = 0.0;
    let reached = ranked(logits).into_iter().take_while(|(_, share)| {
        let is_kept = p >= 1.0 || sum < p;
        sum += share;
        is_kept
    });
    top_k(logits, reached.count().max(min_keep).max(1))
}

fn min_p(logits: &Logits, p: f64, min_keep: usize) -> Logits {
    let ranked = ranked(logits);
    let least = ranked[0].1 * p;
    let likely = ranked.iter().filter(|entry| entry.1 >= least).count();
    top_k(logits, likely.max(min_keep))
}

fn typical(logits: &Logits, p: f64, min_keep: usize) -> Logits {
    if p >= 1.0 {
        return logits.clone();
    }
    let ranked = ranked(logits);
    let entropy: f64 = ranked.iter().map(|(_, p)| -p * p.ln()).sum();
    let mut by_distance = ranked;
    by_distance.sort_by(|a, b| {
        let distance = |p: f64| (-p.ln() - entropy).abs();
        distance(a.1).total_cmp(&distance(b.1))
    });
    let mut sum = 0.0;
    let mut kept = Vec::new();
    for (id, share) in by_distance {
        kept.push(id);
        sum += share;
        if sum > p && kept.len() >= min_keep {
            break;
        }
    }
    keep(logits, kept)
}

fn top_n_sigma(logits: &Logits, n: f64) -> Logits {
    if n <= 0.0 {
        return logits.clone();
    }
    let count = logits.len() as f64;
    let mean = logits.values().sum::<f64>() / count;
    let squares: f64 = logits.values().map(|x| (x - mean) * (x - mean)).sum();
    let max = logits.values().copied().fold(f64::NEG_INFINITY, f64::max);
    let least = max - n * (squares / count).sqrt();
    let kept = logits.iter().filter(|entry| *entry.1 >= least);
    kept.map(|(id, logit)| (*id, *logit)).collect()
}

fn xtc(logits: &Logits, threshold: f64, min_keep: usize) -> Logits {
    let ranked = ranked(logits);
    let likely = ranked.iter().filter(|entry| entry.1 >= threshold).count();
    if threshold > 0.5 || likely < 2 || ranked.len() - (likely - 1) < min_keep {
        return logits.clone();
    }
    keep(logits, ranked[likely - 1..].iter().map(|entry| entry.0))
}

fn temperature(logits: &Logits, t: f64) -> Logits {
    if t <= 0.0 {
        return top_k(logits, 1);
    }
    logits.iter().map(|(id, logit)| (*id, logit / t)).collect()
}

fn dynamic_temperature(logits: &Logits, t: f64, range: f64, exponent: f64) -> Logits {
    if range <= 0.0 || logits.len() == 1 {
        return if range <= 0.0 {
            temperature(logits, t)
        } else {
            logits.clone()
        };
    }
    let entropy: f64 = softmax(logits).values().map(|p| -p * p.ln()).sum();
    let share = entropy / (logits.len() as f64).ln();
    let (low, high) = ((t - range).max(0.0), t + range);
    temperature(logits, low + (high - low) * share.powf(exponent))
}

fn last<T>(items: &[T], n: usize) -> &[T] {
    &items[items.len().saturating_sub(n)..]
}

fn penalties(logits: &Logits, text: &[u32], params: &SamplerParams) -> Logits {
    let mut changed = logits.clone();
    for (id, logit) in &mut changed {
        let seen = last(text, params.last_n)
            .iter()
            .filter(|token| *token == id);
        let count = seen.count();
        if count > 0 {
            let repeat = f64::from(params.repeat_penalty);
            *logit = if *logit <= 0.0 {
                *logit * repeat
            } else {
                *logit / repeat
            };
            *logit -= count as f64 * f64::from(params.frequency_penalty);
            *logit -= f64::from(params.presence_penalty);
        }
    }
    changed
}

/// `is_breaker` tells whether a token is a sequence breaker.
fn dry(
    logits: &Logits,
    text: &[u32],
    params: &SamplerParams,
    is_breaker: impl Fn(u32) -> bool,
) -> Logits {
    let text = last(text, params.dry_last_n);
    let usable = text
        .iter()
        .rev()
        .take_while(|token| !is_breaker(**token))
        .count();
    let mut changed = logits.clone();
    for (id, logit) in &mut changed {
        // For each occurrence of the token: the length of the match between the text before it and
        // the end of the text.
        let places = (1..text.len()).filter(|place| text[*place] == *id);
        let longest = places
            .map(|place| {
                let before = text[..place].iter().rev().zip(text.iter().rev());
                before.take_while(|(a, b)| a == b).count().min(usable)
            })
            .max();
        if let Some(longest) = longest
            && longest >= params.dry_allowed_length
            && usable >= params.dry_allowed_length
            && text.len() > params.dry_allowed_length
            && !is_breaker(*id)
        {
            let power = (longest - params.dry_allowed_length) as i32;
            *logit -= f64::from(params.dry_multiplier) * f64::from(params.dry_base).powi(power);
        }
    }
    changed
}

fn random_logits(rng: &mut Rng, most: usize) -> Vec<f32> {
    let count = 1 + rng.below(most);
    let spread = 0.5 + 8.0 * rng.uniform();
    (0..count)
        .map(|_| ((rng.uniform() - 0.5) * spread) as f32)
        .collect()
}

fn as_map(logits: &[f32]) -> Logits {
    (0..)
        .zip(logits)
        .map(|(id, logit)| (id, f64::from(*logit)))
        .collect()
}

fn drawn_from(sampler: &Sampler) -> Distribution {
    let candidates = sampler.candidates().as_slice().iter();
    candidates
        .map(|c| (c.id, f64::from(c.probability)))
        .collect()
}

/// Returns whether two distributions are equal up to rounding.
fn are_equal(a: &Distribution, b: &Distribution) -> bool {
    let close = |(a, b): (f64, f64)| (a - b).abs() < 2e-5;
    a.keys().eq(b.keys()) && a.values().copied().zip(b.values().copied()).all(close)
}

/// `expected` receives a small number to add to cutoffs, because single precision may decide
/// differently at a limit.
fn check(actual: &Distribution, expected: impl Fn(f64) -> Logits, case: &dyn std::fmt::Debug) {
    let found = [0.0, 1e-5, -1e-5].map(&expected);
    let is_one = found
        .iter()
        .any(|logits| are_equal(actual, &softmax(logits)));
    assert!(
        is_one,
        "{actual:?}, expected {:?}: {case:?}",
        softmax(&found[0])
    );
}

/// Returns parameters for a single stage.
fn only(stage: Stage) -> SamplerParams {
    SamplerParams {
        stages: vec![stage],
        ..SamplerParams::default()
    }
}

/// Runs a single stage without previous text.
fn alone(
    stage: Stage,
    seed: u64,
    set: impl Fn(&mut SamplerParams, &mut Rng),
    expected: impl Fn(&Logits, &SamplerParams, f64) -> Logits,
) {
    let mut rng = Rng::new(seed);
    for _ in 0..CASES {
        let logits = random_logits(&mut rng, 40);
        let mut params = only(stage);
        set(&mut params, &mut rng);
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let token = sampler.sample(&logits).unwrap();
        let actual = drawn_from(&sampler);
        assert!(actual.contains_key(&token));
        let map = as_map(&logits);
        check(
            &actual,
            |shift| expected(&map, &params, shift),
            &(&logits, &params),
        );
    }
}

#[test]
fn top_k_selects_the_most_likely_tokens() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| params.top_k = rng.below(45);
    alone(Stage::TopK, 1, set, |logits, params, _| {
        top_k(logits, params.top_k)
    });
}

#[test]
fn top_p_selects_the_smallest_sufficient_set() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.top_p = rng.uniform() as f32;
        params.min_keep = rng.below(8);
    };
    alone(Stage::TopP, 2, set, |logits, params, shift| {
        top_p(logits, f64::from(params.top_p) + shift, params.min_keep)
    });
}

#[test]
fn min_p_is_relative_to_the_most_likely_token() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.min_p = rng.uniform() as f32;
        params.min_keep = rng.below(8);
    };
    alone(Stage::MinP, 3, set, |logits, params, shift| {
        min_p(logits, f64::from(params.min_p) + shift, params.min_keep)
    });
}

#[test]
fn typical_p_matches_its_definition() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.typical_p = rng.uniform() as f32;
        params.min_keep = rng.below(8);
    };
    alone(Stage::TypicalP, 4, set, |logits, params, shift| {
        typical(logits, f64::from(params.typical_p) + shift, params.min_keep)
    });
}

#[test]
fn top_n_sigma_matches_its_definition() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.top_n_sigma = (rng.uniform() * 4.0 - 0.5) as f32;
    };
    alone(Stage::TopNSigma, 5, set, |logits, params, shift| {
        top_n_sigma(logits, f64::from(params.top_n_sigma) + shift)
    });
}

#[test]
fn temperature_divides() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.temperature = rng.below(5) as f32 * (0.1 + rng.uniform()) as f32;
    };
    alone(Stage::Temperature, 6, set, |logits, params, _| {
        temperature(logits, f64::from(params.temperature))
    });
}

#[test]
fn dynamic_temperature_follows_the_entropy() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.temperature = 0.3 + rng.uniform() as f32;
        params.dynatemp_range = rng.uniform() as f32;
        params.dynatemp_exponent = (0.25 + 2.0 * rng.uniform()) as f32;
    };
    alone(Stage::Temperature, 7, set, |logits, params, _| {
        let [t, range, exponent] = [
            params.temperature,
            params.dynatemp_range,
            params.dynatemp_exponent,
        ]
        .map(f64::from);
        // A temperature this close to 0 would divide by it.
        dynamic_temperature(logits, t, range, exponent)
    });
}

#[test]
fn xtc_drops_all_top_tokens_except_the_least_likely() {
    let set = |params: &mut SamplerParams, rng: &mut Rng| {
        params.xtc_probability = 1.0;
        params.xtc_threshold = rng.uniform() as f32 * 0.6;
        params.min_keep = rng.below(8);
    };
    alone(Stage::Xtc, 8, set, |logits, params, shift| {
        xtc(
            logits,
            f64::from(params.xtc_threshold) + shift,
            params.min_keep,
        )
    });
}

#[test]
fn xtc_applies_with_its_probability() {
    let params = SamplerParams {
        xtc_probability: 0.3,
        ..only(Stage::Xtc)
    };
    let mut sampler = Sampler::new(params).unwrap();
    let mut dropped = 0;
    for _ in 0..CASES {
        sampler.sample(&[1.0, 1.0, 1.0]).unwrap();
        dropped += usize::from(sampler.candidates().as_slice().len() == 1);
    }
    assert!(
        (dropped as f64 / CASES as f64 - 0.3).abs() < 0.02,
        "{dropped}"
    );
}

#[test]
fn penalties_apply_to_recent_tokens() {
    let mut rng = Rng::new(9);
    for case in 0..CASES {
        let logits = random_logits(&mut rng, 20);
        let params = SamplerParams {
            repeat_penalty: (0.5 + rng.uniform()) as f32,
            frequency_penalty: (rng.uniform() - 0.3) as f32,
            presence_penalty: (rng.uniform() - 0.3) as f32,
            last_n: rng.below(30),
            ..only(Stage::Penalties)
        };
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let text: Vec<u32> = (0..rng.below(40)).map(|_| rng.below(25) as u32).collect();
        let (prompt, rest) = text.split_at(text.len() / 2);
        sampler.accept_prompt(prompt);
        rest.iter()
            .for_each(|&token| sampler.accept(token).unwrap());
        sampler.sample(&logits).unwrap();
        let expected = |_| penalties(&as_map(&logits), &text, &params);
        check(&drawn_from(&sampler), expected, &(case, &text, &params));
    }
}

/// Returns a vocabulary in which `</s>` ends a text; other tokens are letters, `\n` and words of
/// them.
fn vocabulary() -> Arc<Tokenizer> {
    let texts = [
        "<unk>", "<s>", "</s>", "a", "ab", "abc", "b", "c", "bc", "d", "\n", "d\nc", "de", "e",
    ];
    let mut data = VocabData::new(
        TokenizerModel::Llama,
        texts.iter().map(|text| text.as_bytes().to_vec()).collect(),
    );
    let types = (0..texts.len()).map(|id| if id < 3 { 3 } else { 1 });
    data.token_types = Some(types.collect());
    data.add_space_prefix = Some(false);
    Arc::new(Tokenizer::new(data).unwrap())
}

#[test]
fn dry_penalizes_continued_repetition() {
    let vocabulary = vocabulary();
    let mut rng = Rng::new(10);
    for case in 0..CASES {
        let logits: Vec<f32> = (0..14).map(|_| (rng.uniform() * 5.0) as f32).collect();
        let has_breakers = rng.below(2) == 1;
        let params = SamplerParams {
            dry_multiplier: (0.1 + rng.uniform()) as f32,
            dry_base: (1.0 + rng.uniform()) as f32,
            dry_allowed_length: rng.below(4),
            dry_last_n: 1 + rng.below(30),
            dry_breakers: if has_breakers {
                vec!["\n".to_owned()]
            } else {
                vec![]
            },
            ..only(Stage::Dry)
        };
        let mut sampler = Sampler::new(params.clone()).unwrap();
        sampler.set_vocabulary(&vocabulary);
        // Few different tokens, so that much repeats; two of them contain the line end.
        let text: Vec<u32> = (0..rng.below(40))
            .map(|_| 8 + rng.below(4) as u32)
            .collect();
        sampler.accept_prompt(&text);
        sampler.sample(&logits).unwrap();
        let is_breaker = |token| has_breakers && (token == 10 || token == 11);
        let expected = |_| dry(&as_map(&logits), &text, &params, is_breaker);
        check(&drawn_from(&sampler), expected, &(case, &text, &params));
    }
}

#[test]
fn dry_breakers_can_span_several_tokens() {
    let vocabulary = vocabulary();
    let [a, ab, b, c, d, de, e] =
        ["a", "ab", "b", "c", "d", "de", "e"].map(|text| vocabulary.find(text).unwrap());
    let falls = |breaker: &str, text: &[u32]| {
        let params = SamplerParams {
            dry_multiplier: 1.0,
            dry_breakers: vec![breaker.to_owned()],
            ..only(Stage::Dry)
        };
        let mut sampler = Sampler::new(params).unwrap();
        sampler.set_vocabulary(&vocabulary);
        sampler.accept_prompt(text);
        sampler.sample(&[0.0; 14]).unwrap();
        drawn_from(&sampler)[&c] < 1.0 / 14.0 - 1e-4
    };
    // "abcab" continues with "c" unless a breaker is in its last two tokens.
    assert!(falls("e", &[a, b, c, a, b]));
    assert!(falls("dea", &[a, b, c, d, a, b]));
    assert!(falls("ea", &[a, b, c, d, e, e, d, a, b]));
    assert!(!falls("ab", &[a, b, c, a, b]));
    assert!(!falls("ba", &[b, a, c, b, a]));
    // The token "de" ends with the start of "eab".
    assert!(falls("b\n", &[de, ab, c, de, ab]));
    assert!(!falls("eab", &[de, ab, c, de, ab]));
}

#[test]
fn infill_matches_its_definition() {
    let vocabulary = vocabulary();
    let mut rng = Rng::new(11);
    let mut kinds = HashMap::new();
    for case in 0..CASES {
        let mut logits: Vec<f32> = (0..14).map(|_| (rng.uniform() * 6.0) as f32).collect();
        logits[2] -= (rng.uniform() * 12.0) as f32;
        let mut sampler = Sampler::new(only(Stage::Infill)).unwrap();
        sampler.set_vocabulary(&vocabulary);
        sampler.sample(&logits).unwrap();
        let map = as_map(&logits);
        *kinds.entry(infill(&map, &vocabulary, 0.0).1).or_insert(0) += 1;
        let expected = |shift| infill(&map, &vocabulary, shift).0;
        check(&drawn_from(&sampler), expected, &(case, &logits));
    }
    assert!(
        kinds.len() == 3 && kinds.values().all(|count| *count > 20),
        "{kinds:?}"
    );
}

fn infill(logits: &Logits, vocabulary: &Tokenizer, shift: f64) -> (Logits, &'static str) {
    let mut ranked = ranked(logits);
    let is_end = |id: u32| vocabulary.is_eog(id);
    let end: f64 = ranked
        .iter()
        .filter(|entry| is_end(entry.0))
        .map(|entry| entry.1)
        .sum();
    if 3.0 * end * ranked.len() as f64 > 1.0 - end + shift {
        let ends = ranked.iter().map(|entry| entry.0).filter(|id| is_end(*id));
        return (keep(logits, ends), "end");
    }
    let piece = |id| vocabulary.token_to_piece(id, false).unwrap();
    let mut is_out = vec![false; ranked.len()];
    for short in 0..ranked.len() {
        for long in 0..ranked.len() {
            let (a, b) = (piece(ranked[short].0), piece(ranked[long].0));
            if is_out[short] || is_out[long] || short == long || a.is_empty() || !b.starts_with(a) {
                continue;
            }
            let (to, from) = if ranked[long].1 > ranked[short].1 {
                (long, short)
            } else {
                (short, long)
            };
            ranked[to].1 += ranked[from].1;
            ranked[from].1 = 0.0;
            is_out[from] = true;
        }
    }
    ranked.retain(|entry| is_end(entry.0) || entry.1 >= 0.2 + shift);
    let of_text = ranked.iter().filter(|entry| !is_end(entry.0)).count();
    if of_text == 0 {
        return (
            [(vocabulary.eot().or(vocabulary.eos()).unwrap(), 0.0)].into(),
            "nothing",
        );
    }
    let sum: f64 = ranked.iter().map(|entry| entry.1).sum();
    let least = 1.0 / (of_text as f64 + 1.0) + shift;
    ranked.retain(|entry| is_end(entry.0) || entry.1 / sum >= least);
    (keep(logits, ranked.iter().map(|entry| entry.0)), "text")
}

#[test]
fn infill_and_dry_breakers_require_a_vocabulary() {
    let mut sampler = Sampler::new(only(Stage::Infill)).unwrap();
    let message = sampler.sample(&[1.0]).unwrap_err().to_string();
    assert_eq!(message, "the sampler infill needs a vocabulary");
    let params = SamplerParams {
        dry_multiplier: 1.0,
        ..SamplerParams::default()
    };
    let mut sampler = Sampler::new(params).unwrap();
    let message = sampler.sample(&[1.0]).unwrap_err().to_string();
    assert_eq!(message, "the sampler dry needs a vocabulary");
    sampler.set_vocabulary(&vocabulary());
    assert_eq!(sampler.sample(&[1.0]), Ok(0));
}

#[test]
fn mirostat_matches_its_definition() {
    for version in [1, 2] {
        let mut rng = Rng::new(12);
        let (mut truncated, mut cases) = (0, 0);
        while cases < CASES {
            let (tau, eta) = (1.0 + 4.0 * rng.uniform(), rng.uniform());
            let params = SamplerParams {
                mirostat: version,
                mirostat_tau: tau as f32,
                mirostat_eta: eta as f32,
                temperature: 0.9,
                seed: rng.next_u64(),
                ..SamplerParams::default()
            };
            let mut sampler = Sampler::new(params).unwrap();
            let mut mu = 2.0 * tau;
            // Several tokens of one text, because the state matters.
            for _ in 0..10 {
                cases += 1;
                let logits: Vec<f32> = (0..200).map(|_| (rng.uniform() * 6.0) as f32).collect();
                let token = sampler.sample(&logits).unwrap();
                let map = temperature(&as_map(&logits), f64::from(0.9f32));
                let expected = |shift: f64| {
                    let ranked = ranked(&map);
                    let count = match version {
                        2 => ranked
                            .iter()
                            .filter(|entry| -entry.1.log2() <= mu + shift)
                            .count(),
                        _ => {
                            let (mut products, mut squares) = (0.0, 0.0);
                            for i in 0..99 {
                                let t = ((i as f64 + 2.0) / (i as f64 + 1.0)).ln();
                                let b = (ranked[i].1 / ranked[i + 1].1).ln();
                                products += t * b;
                                squares += t * t;
                            }
                            let s = products / squares;
                            let e = s - 1.0;
                            let all = 1.0 - 200f64.powf(-e);
                            (e * (mu + shift).exp2() / all).powf(1.0 / s) as usize
                        }
                    };
                    top_k(&map, count.max(1))
                };
                let drawn = drawn_from(&sampler);
                check(&drawn, expected, &(version, mu));
                truncated += usize::from(drawn.len() < 200);
                mu -= f64::from(eta as f32) * (-drawn[&token].log2() - f64::from(tau as f32));
                sampler.accept(token).unwrap();
            }
        }
        assert!(truncated > CASES / 10, "{truncated}");
    }
}

#[test]
fn adaptive_p_adapts_to_drawn_tokens() {
    let mut rng = Rng::new(13);
    for _ in 0..CASES / 10 {
        let (target, decay) = (rng.uniform() as f32, (rng.uniform() * 0.99) as f32);
        let params = SamplerParams {
            adaptive_target: target,
            adaptive_decay: decay,
            seed: rng.next_u64(),
            ..only(Stage::AdaptiveP)
        };
        let mut sampler = Sampler::new(params).unwrap();
        let (target, decay) = (f64::from(target), f64::from(decay));
        let mut weight = 1.0 / (1.0 - decay);
        let mut sum = target * weight;
        for _ in 0..10 {
            let logits = random_logits(&mut rng, 40);
            let token = sampler.sample(&logits).unwrap();
            let before = softmax(&as_map(&logits));
            let wanted = (2.0 * target - sum / weight).clamp(0.0, 1.0);
            let changed = |_| {
                let logit = |p: f64| {
                    let d = (p - wanted).abs() / 0.3;
                    5.0 - 10.0 * d * d / (1.0 + d)
                };
                before.iter().map(|(id, p)| (*id, logit(*p))).collect()
            };
            check(&drawn_from(&sampler), changed, &(target, decay, &logits));
            sum = before[&token] + decay * sum;
            weight = 1.0 + decay * weight;
            sampler.accept(token).unwrap();
        }
    }
}

/// All stages at once, in any order, over several tokens of a text. A large vocabulary, only partly
/// loaded, gives the same result.
#[test]
fn all_stages_in_any_order_match_their_definitions() {
    let mut rng = Rng::new(14);
    let all = [
        Stage::Penalties,
        Stage::Dry,
        Stage::TopNSigma,
        Stage::TopK,
        Stage::TypicalP,
        Stage::TopP,
        Stage::MinP,
        Stage::Xtc,
        Stage::Temperature,
    ];
    for case in 0..CASES / 5 {
        let mut stages = all.to_vec();
        for i in (1..stages.len()).rev() {
            stages.swap(i, rng.below(i + 1));
        }
        stages.truncate(1 + rng.below(9));
        if case % 2 == 0 {
            // The default order begins with the stages that change logits, and top-k.
            stages.sort_by_key(|stage| Stage::DEFAULT.iter().position(|other| other == stage));
        }
        let params = SamplerParams {
            stages,
            temperature: [0.0, 0.7, 1.3][rng.below(3)],
            top_k: 1 + rng.below(30),
            top_p: 0.5 + 0.5 * rng.uniform() as f32,
            min_p: 0.3 * rng.uniform() as f32,
            typical_p: 0.5 + 0.5 * rng.uniform() as f32,
            top_n_sigma: 1.0 + 2.0 * rng.uniform() as f32,
            xtc_probability: 1.0,
            xtc_threshold: 0.2,
            min_keep: rng.below(4),
            repeat_penalty: 1.3,
            frequency_penalty: 0.2,
            dry_multiplier: 0.8,
            dry_breakers: vec![],
            logit_bias: vec![(3, 1.5), (0, f32::NEG_INFINITY)],
            seed: rng.next_u64(),
            ..SamplerParams::default()
        };
        let mut sampler = Sampler::new(params.clone()).unwrap();
        let count = if case % 20 == 0 { 5000 } else { 40 };
        let mut text: Vec<u32> = (0..20).map(|_| rng.below(6) as u32).collect();
        sampler.accept_prompt(&text);
        for _ in 0..5 {
            let logits: Vec<f32> = (0..count).map(|_| (rng.uniform() * 8.0) as f32).collect();
            let mut copy = sampler.clone();
            let token = sampler.sample(&logits).unwrap();
            assert_eq!(
                copy.sample(&logits),
                Ok(token),
                "a copy is in the same state"
            );
            let expected = |shift: f64| {
                let mut map = as_map(&logits);
                *map.get_mut(&3).unwrap() += 1.5;
                map.remove(&0);
                for stage in &params.stages {
                    map = match stage {
                        Stage::Penalties => penalties(&map, &text, &params),
                        Stage::Dry => dry(&map, &text, &params, |_| false),
                        Stage::TopNSigma => {
                            top_n_sigma(&map, f64::from(params.top_n_sigma) + shift)
                        }
                        Stage::TopK => top_k(&map, params.top_k),
                        Stage::TypicalP => {
                            typical(&map, f64::from(params.typical_p) + shift, params.min_keep)
                        }
                        Stage::TopP => {
                            top_p(&map, f64::from(params.top_p) + shift, params.min_keep)
                        }
                        Stage::MinP => {
                            min_p(&map, f64::from(params.min_p) + shift, params.min_keep)
                        }
                        Stage::Xtc => xtc(
                            &map,
                            f64::from(params.xtc_threshold) + shift,
                            params.min_keep,
                        ),
                        _ => temperature(&map, f64::from(params.temperature)),
                    };
                }
                map
            };
            let mut drawn = drawn_from(&sampler);
            drawn.retain(|_, p| *p > 0.0);
            check(&drawn, expected, &(case, &params));
            sampler.accept(token).unwrap();
            text.push(token);
        }
    }
}

#[test]
fn a_reset_restores_the_initial_state() {
    let mut rng = Rng::new(15);
    let logits: Vec<Vec<f32>> = (0..20).map(|_| random_logits(&mut rng, 300)).collect();
    for params in [
        SamplerParams {
            repeat_penalty: 1.5,
            dry_multiplier: 1.0,
            dry_breakers: vec![],
            ..SamplerParams::default()
        },
        SamplerParams {
            mirostat: 1,
            ..SamplerParams::default()
        },
        SamplerParams {
            mirostat: 2,
            mirostat_tau: 2.0,
            ..SamplerParams::default()
        },
        SamplerParams {
            adaptive_target: 0.3,
            xtc_probability: 0.5,
            ..SamplerParams::default()
        },
    ] {
        let mut sampler = Sampler::new(params).unwrap();
        let text = |sampler: &mut Sampler| -> Vec<u32> {
            let step = |logits: &Vec<f32>| {
                let token = sampler.sample(logits).unwrap();
                sampler.accept(token).unwrap();
                token
            };
            logits.iter().map(step).collect()
        };
        let first = text(&mut sampler);
        let second = text(&mut sampler);
        assert_ne!(first, second, "the state counts");
        sampler.reset().unwrap();
        assert_eq!(text(&mut sampler), first);
    }
}
