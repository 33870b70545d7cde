//! The candidate tokens, and the stages that narrow them down.

use super::error::SamplerError;
use super::rng::Rng;
use std::cmp::Ordering;

/// Maximum size of a vocabulary that is sorted completely.
const SMALL: usize = 1024;
/// Number of tokens of a larger vocabulary that are sorted at first.
const FIRST_SORTED: usize = 256;

/// Number of logits whose maximum is computed at once. The position of the largest is searched only
/// in its block.
const MAX_BLOCK: usize = 512;
/// Number of logits that are tested together for relevance.
const BLOCK: usize = 64;
/// Minimum number of blocks per requested token for which filtering is worthwhile; otherwise the
/// whole vocabulary is loaded.
const WORTH_FILTERING: usize = 4;

/// A candidate token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// Logit after the stages so far: never NaN or plus infinity.
    pub logit: f32,
    /// Probability among the candidates at the last [`Candidates::softmax`] or draw; 0 before.
    pub probability: f32,
}

/// The candidate tokens. Each method is one stage of a sampler chain; all except typical-p, XTC and
/// infill keep the most probable token. Equal logits are ordered by token id, so every stage is
/// deterministic.
#[derive(Debug, Clone, Default)]
pub struct Candidates {
    items: Vec<Candidate>,
    order: Order,
    /// Largest logit of each block. Kept to reuse its memory, like `ranked`.
    maxima: Vec<f32>,
    ranked: Vec<f32>,
}

/// Order of the candidates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Any,
    Descending,
    /// By token id.
    Ascending,
    /// By token id, without missing tokens.
    Whole,
}

impl Candidates {
    /// Creates an empty set of candidates.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes every token a candidate; `logits[id]` belongs to token `id`. NaN is treated as minus
    /// infinity, and plus infinity as the largest number.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if no logit is above minus infinity.
    pub fn load(&mut self, logits: &[f32]) -> Result<(), SamplerError> {
        self.items.clear();
        self.items.extend((0..).zip(logits).map(candidate));
        self.order = Order::Whole;
        self.best().map(drop)
    }

    /// Sets the candidates in this order; `is_sorted` if the most probable ones are first. Logits
    /// are limited as in [`load`](Self::load). A token must not occur twice.
    pub fn set(&mut self, candidates: impl IntoIterator<Item = Candidate>, is_sorted: bool) {
        self.items.clear();
        let tame = |candidate: Candidate| Candidate {
            logit: tamed(candidate.logit),
            ..candidate
        };
        self.items.extend(candidates.into_iter().map(tame));
        let sorted = self.items.is_sorted_by(|a, b| a.logit >= b.logit);
        self.order = if is_sorted && sorted {
            Order::Descending
        } else {
            Order::Any
        };
    }

    /// Returns whether the most probable candidates are first.
    pub fn is_sorted(&self) -> bool {
        self.order == Order::Descending
    }

    /// Makes the first of the most probable tokens the only candidate. Returns false if no logit is
    /// above minus infinity; then [`load`](Self::load) must follow.
    pub(super) fn load_best(&mut self, logits: &[f32]) -> bool {
        let mut best = None;
        let mut max = f32::NEG_INFINITY;
        for (index, block) in logits.chunks(MAX_BLOCK).enumerate() {
            let of_block = tamed(max_of(block));
            if of_block > max {
                (best, max) = (Some((index * MAX_BLOCK, block)), of_block);
            }
        }
        self.items.clear();
        self.items.extend(best.and_then(|(start, block)| {
            let place = block.iter().position(|logit| *logit >= max)?;
            Some(candidate(((start + place) as u32, &block[place])))
        }));
        self.order = Order::Descending;
        !self.items.is_empty()
    }

    /// Makes candidates of the `k` most probable tokens and some others: all that matter if
    /// [`top_k`](Self::top_k) follows. Returns false if this is no less work than loading all, or
    /// if fewer than `k` logits are above minus infinity; then [`load`](Self::load) must follow.
    pub(super) fn load_top(&mut self, logits: &[f32], k: usize) -> bool {
        if k == 0 || logits.len() / BLOCK / WORTH_FILTERING < k {
            return false;
        }
        // If `k` blocks have a logit as large as this, so do the `k` most probable tokens.
        self.maxima.clear();
        self.maxima.extend(logits.chunks(BLOCK).map(max_of));
        self.ranked.clone_from(&self.maxima);
        let (_, floor, _) = self
            .ranked
            .select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        let floor = tamed(*floor);
        if floor == f32::NEG_INFINITY {
            return false;
        }
        self.items.clear();
        let blocks = (0..).step_by(BLOCK).zip(logits.chunks(BLOCK));
        for (max, (first, block)) in self.maxima.iter().zip(blocks) {
            if *max >= floor {
                let likely = (first..).zip(block).filter(|(_, logit)| **logit >= floor);
                self.items.extend(likely.map(candidate));
            }
        }
        self.order = Order::Ascending;
        true
    }

    /// Returns the candidates, in no particular order unless a stage has sorted them.
    pub fn as_slice(&self) -> &[Candidate] {
        &self.items
    }

    /// Changes the logit of one token, if it is a candidate.
    pub fn change_logit(&mut self, id: u32, change: impl FnOnce(f32) -> f32) {
        let place = match self.order {
            Order::Whole => Some(id as usize),
            Order::Ascending => self.items.binary_search_by_key(&id, |item| item.id).ok(),
            _ => self.items.iter().position(|item| item.id == id),
        };
        if let Some(item) = place.and_then(|place| self.items.get_mut(place)) {
            item.logit = tamed(change(item.logit));
            self.not_sorted();
        }
    }

    /// Forbids tokens for which `is_forbidden` returns true. They are never chosen, but stay
    /// candidates.
    pub fn forbid(&mut self, mut is_forbidden: impl FnMut(u32) -> bool) {
        for item in &mut self.items {
            if is_forbidden(item.id) {
                item.logit = f32::NEG_INFINITY;
                item.probability = 0.0;
            }
        }
        self.not_sorted();
    }

    /// Keeps the `k` most probable candidates; 0 keeps all.
    pub fn top_k(&mut self, k: usize) {
        if k == 0 {
            return;
        }
        let k = k.min(self.items.len());
        self.sort_first(k);
        self.truncate(k);
    }

    /// Keeps the most probable candidates that together reach probability `p`, at least one and at
    /// least `min_keep`; 1 or more keeps all.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn top_p(&mut self, p: f32, min_keep: usize) -> Result<(), SamplerError> {
        if p >= 1.0 {
            return Ok(());
        }
        self.softmax()?;
        let mut in_order = if self.items.len() > SMALL {
            FIRST_SORTED
        } else {
            self.items.len()
        };
        self.sort_first(in_order);
        let mut sum = 0.0;
        for index in 0..self.items.len() {
            if index == in_order {
                in_order = self.items.len();
                self.sort_first(in_order);
            }
            sum += self.items[index].probability;
            if sum >= p && index + 1 >= min_keep {
                self.truncate(index + 1);
                break;
            }
        }
        Ok(())
    }

    /// Keeps the candidates with at least the fraction `p` of the highest probability, at least one
    /// and at least `min_keep`; 0 or less keeps all.
    pub fn min_p(&mut self, p: f32, min_keep: usize) {
        let Ok((_, max)) = self.best() else { return };
        if p <= 0.0 {
            return;
        }
        let least = max + libm::log(f64::from(p)) as f32;
        let min_keep = min_keep.max(1);
        let is_likely = |candidate: &Candidate| candidate.logit >= least;
        match self.items.iter().filter(|item| is_likely(item)).count() {
            likely if likely < min_keep => self.top_k(min_keep),
            _ => self.retain(is_likely),
        }
    }

    /// Keeps the candidates whose surprise (the negative logarithm of the probability) is closest
    /// to the expected one, until they together exceed probability `p`, and at least `min_keep`; 1
    /// or more keeps all.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn typical_p(&mut self, p: f32, min_keep: usize) -> Result<(), SamplerError> {
        if p >= 1.0 {
            return Ok(());
        }
        let total = self.softmax()?;
        self.sort_first(self.items.len());
        let max = self.items.first().map_or(0.0, |best| best.logit);
        let log_total = libm::log(total);
        let surprise =
            |candidate: &Candidate| log_total - (f64::from(candidate.logit) - f64::from(max));
        let possible = |candidate: &&Candidate| candidate.probability > 0.0;
        let expected: f64 = self
            .items
            .iter()
            .filter(possible)
            .map(|candidate| f64::from(candidate.probability) * surprise(candidate))
            .sum();
        let mut shifted: Vec<(f64, Candidate)> = self
            .items
            .iter()
            .filter(possible)
            .map(|candidate| ((surprise(candidate) - expected).abs(), *candidate))
            .collect();
        shifted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut sum = 0.0;
        let reached = shifted.iter().position(|(_, candidate)| {
            sum += candidate.probability;
            sum > p
        });
        let count = reached.map_or(shifted.len(), |last| last + 1);
        shifted.truncate(count.max(min_keep));
        self.items.clear();
        self.items
            .extend(shifted.into_iter().map(|(_, candidate)| candidate));
        self.order = Order::Any;
        Ok(())
    }

    /// Computes the probability of each candidate. Returns the sum of all weights, where the most
    /// probable candidate has weight 1.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn softmax(&mut self) -> Result<f64, SamplerError> {
        let (_, max) = self.best()?;
        let mut sum = 0.0;
        for candidate in &mut self.items {
            let weight = libm::exp(f64::from(candidate.logit) - f64::from(max));
            candidate.probability = weight as f32;
            sum += weight;
        }
        for candidate in &mut self.items {
            candidate.probability = (f64::from(candidate.probability) / sum) as f32;
        }
        Ok(sum)
    }

    /// Draws a token by the candidates' probabilities. Takes one number from `rng`, for any number
    /// of candidates.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn draw(&mut self, rng: &mut Rng) -> Result<u32, SamplerError> {
        let place = self.draw_place(rng)?;
        Ok(self.items[place].id)
    }

    /// Draws like [`draw`](Self::draw), but returns the candidate's index in the
    /// [list](Self::as_slice).
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn draw_place(&mut self, rng: &mut Rng) -> Result<usize, SamplerError> {
        self.softmax()?;
        let sum: f64 = self
            .items
            .iter()
            .map(|candidate| f64::from(candidate.probability))
            .sum();
        let target = rng.uniform() * sum;
        let mut running = 0.0;
        let mut chosen = None;
        for (place, candidate) in self.items.iter().enumerate() {
            if candidate.probability > 0.0 {
                chosen = Some(place);
                running += f64::from(candidate.probability);
                if running > target {
                    break;
                }
            }
        }
        chosen.ok_or(SamplerError::NoCandidate {
            count: self.items.len(),
        })
    }

    /// Draws like [`draw_place`](Self::draw_place). For a single candidate it takes no number from
    /// `rng`, like C++'s `discrete_distribution`.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub(super) fn draw_place_of_several(&mut self, rng: &mut Rng) -> Result<usize, SamplerError> {
        match self.items.len() {
            1 => {
                self.softmax()?;
                Ok(0)
            }
            _ => self.draw_place(rng),
        }
    }

    /// Returns the candidates, to change their logits.
    pub(super) fn items_mut(&mut self) -> &mut [Candidate] {
        self.not_sorted();
        &mut self.items
    }

    /// Keeps the candidates for which `is_kept` returns true, in order.
    pub(super) fn retain(&mut self, is_kept: impl FnMut(&Candidate) -> bool) {
        self.items.retain(is_kept);
        if self.order == Order::Whole {
            self.order = Order::Ascending;
        }
    }

    /// Keeps candidates like [`retain`](Self::retain), but keeps the most probable one if none
    /// would be left.
    pub(super) fn retain_or_best(&mut self, is_kept: impl FnMut(&Candidate) -> bool) {
        let best = self.best().map(|(place, _)| self.items[place]);
        self.retain(is_kept);
        if let (true, Ok(best)) = (self.items.is_empty(), best) {
            self.items.push(best);
        }
    }

    /// Removes the `count` most probable candidates.
    pub(super) fn drop_first(&mut self, count: usize) {
        self.sort_first(count);
        self.items.drain(..count);
    }

    /// Makes one token the only candidate, whether it was a candidate or not.
    pub(super) fn keep_token(&mut self, id: u32) {
        self.items.clear();
        self.items.push(candidate((id, &0.0)));
        self.order = Order::Descending;
    }

    /// Also makes these tokens candidates, if they have logits and are not candidates yet. Used
    /// after [`load_top`](Self::load_top).
    pub(super) fn add(&mut self, tokens: &[u32], logits: &[f32]) {
        let loaded = self.items.len();
        for &token in tokens {
            let place = self.items[..loaded].binary_search_by_key(&token, |item| item.id);
            if let (Err(_), Some(logit)) = (place, logits.get(token as usize)) {
                self.items.push(candidate((token, logit)));
            }
        }
        if self.items.len() > loaded {
            self.items.sort_unstable_by_key(|item| item.id);
        }
    }

    /// Records that logits changed.
    fn not_sorted(&mut self) {
        if self.order == Order::Descending {
            self.order = Order::Any;
        }
    }

    /// Returns the index and the logit of the most probable candidate, with the lowest id among
    /// equal ones.
    ///
    /// # Errors
    /// Returns [`SamplerError::NoCandidate`] if there are no candidates.
    pub fn best(&self) -> Result<(usize, f32), SamplerError> {
        let mut best = None;
        let (mut max, mut max_id) = (f32::NEG_INFINITY, 0);
        let look_at = match self.order {
            Order::Descending => 1,
            _ => self.items.len(),
        };
        for (index, candidate) in self.items.iter().enumerate().take(look_at) {
            let is_first = candidate.logit == max && candidate.id < max_id;
            if candidate.logit > max || is_first {
                (best, max, max_id) = (Some(index), candidate.logit, candidate.id);
            }
        }
        best.map(|index| (index, max))
            .ok_or(SamplerError::NoCandidate {
                count: self.items.len(),
            })
    }

    /// Moves the `count` most probable candidates to the front, in order.
    pub(super) fn sort_first(&mut self, count: usize) {
        if self.order == Order::Descending || count == 0 {
            return;
        }
        if count < self.items.len() {
            self.items.select_nth_unstable_by(count - 1, descending);
            self.items[..count].sort_unstable_by(descending);
            self.order = Order::Any;
        } else {
            self.items.sort_unstable_by(descending);
            self.order = Order::Descending;
        }
    }

    /// Removes all candidates after the first `count`, which must be in order.
    fn truncate(&mut self, count: usize) {
        self.items.truncate(count);
        self.order = Order::Descending;
    }

    pub(super) fn keep_only(&mut self, index: usize) {
        self.items.swap(0, index);
        self.truncate(1);
    }
}

/// Creates a candidate from a token and its logit.
fn candidate((id, &logit): (u32, &f32)) -> Candidate {
    Candidate {
        id,
        logit: tamed(logit),
        probability: 0.0,
    }
}

/// Compares candidates, the most probable first.
fn descending(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Returns the largest number, ignoring NaN, or minus infinity if there is none.
fn max_of(logits: &[f32]) -> f32 {
    // Separate maxima become vector registers.
    const LANES: usize = 32;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *logit);
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(f32::NEG_INFINITY, |max, x| larger(max, *x))
}

/// Limits a logit to a value that is safe in arithmetic.
pub(super) fn tamed(logit: f32) -> f32 {
    if logit.is_nan() {
        f32::NEG_INFINITY
    } else {
        logit.min(f32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENTHS: [f32; 4] = [0.1, 0.2, 0.3, 0.4];

    fn candidates(probabilities: &[f32]) -> Candidates {
        let mut candidates = Candidates::new();
        candidates
            .load(&probabilities.iter().map(|p| p.ln()).collect::<Vec<_>>())
            .unwrap();
        candidates
    }

    /// Applies a stage to probabilities and compares the result, in order.
    fn check(probabilities: &[f32], stage: impl FnOnce(&mut Candidates), expected: &[f32]) {
        let mut candidates = candidates(probabilities);
        stage(&mut candidates);
        candidates.softmax().unwrap();
        let actual: Vec<f32> = candidates
            .as_slice()
            .iter()
            .map(|candidate| candidate.probability)
            .collect();
        assert_eq!(
            actual.len(),
            expected.len(),
            "{actual:?}, expected {expected:?}"
        );
        for (a, e) in actual.iter().zip(expected) {
            assert!((a - e).abs() < 1e-5, "{actual:?}, expected {expected:?}");
        }
    }

    // The tables of llama.cpp's own test.

    #[test]
    fn temperature_table() {
        check(&TENTHS, |c| c.temperature(1.0), &TENTHS);
        // Here the others are removed instead of having probability 0.
        check(&TENTHS, |c| c.temperature(0.0), &[1.0]);
    }

    #[test]
    fn top_k_table() {
        check(&TENTHS, |c| c.top_k(1), &[1.0]);
        check(&TENTHS, |c| c.top_k(3), &[0.44444, 0.33333, 0.22222]);
        check(&TENTHS, |c| c.top_k(4), &[0.4, 0.3, 0.2, 0.1]);
        check(&TENTHS, |c| c.top_k(0), &TENTHS);
        check(&TENTHS, |c| c.top_k(usize::MAX), &[0.4, 0.3, 0.2, 0.1]);
    }

    #[test]
    fn top_p_table() {
        check(&TENTHS, |c| c.top_p(0.0, 0).unwrap(), &[1.0]);
        check(&TENTHS, |c| c.top_p(0.7, 0).unwrap(), &[0.571429, 0.428571]);
        check(
            &TENTHS,
            |c| c.top_p(0.8, 0).unwrap(),
            &[0.44444, 0.33333, 0.22222],
        );
        check(&TENTHS, |c| c.top_p(1.0, 0).unwrap(), &TENTHS);
    }

    #[test]
    fn min_p_table() {
        let three = [0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9];
        let two = [0.3 / 0.7, 0.4 / 0.7];
        let cases: [(f32, &[f32]); 9] = [
            (0.00, &TENTHS),
            (0.24, &TENTHS),
            (0.26, &three),
            (0.49, &three),
            (0.51, &two),
            (0.74, &two),
            (0.76, &[1.0]),
            (1.00, &[1.0]),
            (1.05, &[1.0]),
        ];
        for (p, expected) in cases {
            check(&TENTHS, |c| c.min_p(p, 0), expected);
        }
    }

    #[test]
    fn typical_p_table() {
        // llama.cpp's table has the probabilities before the cut: .97, and three times .2.
        check(
            &[0.97, 0.01, 0.01, 0.01],
            |c| c.typical_p(0.5, 0).unwrap(),
            &[1.0],
        );
        check(
            &[0.4, 0.2, 0.2, 0.2],
            |c| c.typical_p(0.5, 0).unwrap(),
            &[1.0 / 3.0; 3],
        );
    }

    #[test]
    fn equally_typical_tokens_stay_by_lowest_id() {
        // The three at .2 are closer to the expected surprise than the one at .4.
        for (p, expected) in [(0.1, &[1][..]), (0.3, &[1, 2]), (0.5, &[1, 2, 4])] {
            let mut candidates = candidates(&[0.4, 0.2, 0.2, 1e-9, 0.2]);
            candidates.typical_p(p, 0).unwrap();
            let mut ids: Vec<_> = candidates.as_slice().iter().map(|c| c.id).collect();
            ids.sort_unstable();
            assert_eq!(ids, expected, "{p}");
        }
    }

    /// Chains over 10 000 tokens with probabilities in proportion to their ids, as in llama.cpp's
    /// test.
    #[test]
    fn truncation_stages_work_in_any_order() {
        const COUNT: usize = 10_000;
        let logits: Vec<f32> = (0..COUNT).map(|id| (id as f32).ln()).collect();
        for chain in [
            "k", "p", "m", "kp", "km", "pk", "pm", "mk", "mp", "kpm", "kmp", "pkm", "pmk", "mkp",
            "mpk",
        ] {
            let mut candidates = Candidates::new();
            candidates.load(&logits).unwrap();
            // The remaining tokens are always the most probable ones, from `lowest` on.
            let mut lowest = 0;
            for stage in chain.chars() {
                match stage {
                    'k' => {
                        candidates.top_k(100);
                        lowest = lowest.max(COUNT - 100);
                    }
                    'm' => {
                        candidates.min_p(0.1, 0);
                        lowest = lowest.max(1_000);
                    }
                    _ => {
                        candidates.top_p(0.8, 0).unwrap();
                        let target = 0.8 * (lowest..COUNT).sum::<usize>() as f64;
                        let mut sum = 0.0;
                        lowest = (lowest..COUNT)
                            .rev()
                            .find(|&id| {
                                sum += id as f64;
                                sum >= target
                            })
                            .unwrap();
                    }
                }
                let mut left: Vec<usize> = candidates
                    .as_slice()
                    .iter()
                    .map(|c| c.id as usize)
                    .collect();
                left.sort_unstable();
                // Sums in single precision may differ by one token.
                let first = left[0];
                assert!(
                    first.abs_diff(lowest) <= 1,
                    "{chain} at {stage}: {first}, expected {lowest}"
                );
                assert!(left.iter().copied().eq(first..COUNT), "{chain} at {stage}");
                lowest = first;
            }
        }
    }

    #[test]
    fn ties_are_broken_by_id() {
        let mut candidates = candidates(&[0.1, 0.3, 0.3, 0.3]);
        candidates.top_k(2);
        let ids: Vec<u32> = candidates
            .as_slice()
            .iter()
            .map(|candidate| candidate.id)
            .collect();
        assert_eq!(ids, [1, 2]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let mut rng = Rng::new(3);
        let mut counts = [0; 4];
        for _ in 0..20_000 {
            counts[candidates(&TENTHS).draw(&mut rng).unwrap() as usize] += 1;
        }
        for (count, probability) in counts.into_iter().zip(TENTHS) {
            assert!(
                (count as f32 / 20_000.0 - probability).abs() < 0.015,
                "{counts:?}"
            );
        }
    }

    #[test]
    fn a_draw_uses_one_random_number() {
        let (mut one, mut two) = (Rng::new(5), Rng::new(5));
        candidates(&[1.0]).draw(&mut one).unwrap();
        candidates(&TENTHS).draw(&mut two).unwrap();
        assert_eq!(one, two);
    }

    #[test]
    fn logits_can_be_changed_before_and_after_sorting() {
        let mut candidates = candidates(&TENTHS);
        candidates.change_logit(0, |_| 5.0);
        candidates.change_logit(9, |_| 9.0);
        candidates.top_k(2);
        candidates.change_logit(3, |_| 6.0);
        candidates.change_logit(1, |_| 9.0);
        candidates.temperature(0.0);
        assert_eq!(candidates.as_slice()[0].id, 3);
    }

    #[test]
    fn candidates_may_be_any_tokens_in_any_order() {
        let of = |id, logit| Candidate {
            id,
            logit,
            probability: 0.0,
        };
        let mut some = Candidates::new();
        some.set([of(9, 1.0), of(2, 3.0), of(5, f32::INFINITY)], true);
        assert!(!some.is_sorted(), "who says so is not believed");
        some.change_logit(2, |logit| logit + 1.0);
        some.change_logit(3, |_| f32::NAN);
        some.top_k(2);
        let ids: Vec<u32> = some.as_slice().iter().map(|kept| kept.id).collect();
        assert_eq!((ids, some.is_sorted()), (vec![5, 2], true));
        assert_eq!(some.as_slice()[1].logit, 4.0);
        some.set([of(7, 2.0), of(1, 1.0)], true);
        assert!(some.is_sorted());
        assert_eq!(some.best().unwrap(), (0, 2.0));
        some.forbid(|id| id == 7);
        assert_eq!((some.best().unwrap(), some.as_slice().len()), ((1, 1.0), 2));
    }
}
