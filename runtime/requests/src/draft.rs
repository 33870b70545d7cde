//! Speculative decoding: guesses the next tokens of a text from the text itself, and decides how
//! many are worth trying.
//!
//! A draft is computed in the same batch as the token before it. The request's own sampler chooses
//! as it would without the draft, and accepts drafted tokens as long as they equal its choices. A
//! draft therefore changes the time of a generation, but never the text.

use std::time::Duration;

/// Draft lengths that are tried.
const LENGTHS: [usize; 6] = [0, 1, 2, 4, 8, 16];
/// Maximum length of the text's end that is searched for. Longer ends are tried first.
const MAX_KEY_LEN: usize = 4;
/// Minimum length of the text's end that is searched for.
const MIN_KEY_LEN: usize = 2;
/// Number of tokens that the search looks back.
const LOOKS_BACK: usize = 4096;

/// Returns at most `most` tokens that followed the last earlier occurrence of the text's end.
pub(crate) fn guess(tokens: &[u32], most: usize) -> &[u32] {
    let looked_at = &tokens[tokens.len().saturating_sub(LOOKS_BACK)..];
    for length in (MIN_KEY_LEN..=MAX_KEY_LEN).rev() {
        if looked_at.len() <= length {
            continue;
        }
        let key = &looked_at[looked_at.len() - length..];
        let before = &looked_at[..looked_at.len() - 1];
        let found = before.windows(length).rposition(|part| part == key);
        if let Some(at) = found {
            let after = &looked_at[at + length..];
            return &after[..after.len().min(most)];
        }
    }
    &[]
}

/// Recent acceptance rate of a request's drafted tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcceptanceRate(f64);

impl Default for AcceptanceRate {
    fn default() -> Self {
        AcceptanceRate(0.6)
    }
}

impl AcceptanceRate {
    /// Updates the rate with a draft of `drafted` tokens, whose first `accepted` were accepted.
    pub fn learn(&mut self, drafted: usize, accepted: usize) {
        const WEIGHT: f64 = 0.1;
        for number in 0..drafted.min(accepted + 1) {
            let stood = if number < accepted { 1.0 } else { 0.0 };
            self.0 += WEIGHT * (stood - self.0);
        }
    }

    /// Moves the rate slowly back to its initial value. Called when a draft was available but not
    /// tried, because the text may have changed since.
    pub fn decay(&mut self) {
        self.0 += 0.002 * (0.6 - self.0);
    }

    /// Returns the expected number of accepted tokens of a draft with this length.
    pub fn expected(&self, length: usize) -> f64 {
        (1..=length).map(|count| self.0.powi(count as i32)).sum()
    }
}

/// Recently measured cost of a step by its number of tokens. Only steps without prefill count.
#[derive(Clone, Debug)]
pub(crate) struct StepCosts {
    /// Seconds by number of tokens; 0 if not measured.
    seconds: Vec<f64>,
}

impl StepCosts {
    /// Steps with more tokens are not distinguished.
    const MOST: usize = 512;

    pub fn new() -> Self {
        StepCosts {
            seconds: vec![0.0; Self::MOST + 1],
        }
    }

    /// Records the time of a step.
    pub fn learn(&mut self, tokens: usize, time: Duration) {
        let Some(known) = self.seconds.get_mut(tokens) else {
            return;
        };
        let seconds = time.as_secs_f64();
        // Limit the influence of a single step that another program delayed.
        *known = match *known {
            0.0 => seconds,
            old => old + 0.2 * (seconds.min(4.0 * old) - old),
        };
    }

    /// Returns the seconds of a step with this number of tokens, interpolated between measurements,
    /// or `None` if there are none.
    pub fn for_tokens(&self, tokens: usize) -> Option<f64> {
        /// Cost of a further token relative to the first, until it is measured.
        const FURTHER: f64 = 0.15;
        let seen = |tokens: &usize| self.seconds[*tokens] > 0.0;
        let tokens = tokens.min(Self::MOST);
        let below = (0..=tokens).rev().find(seen);
        let above = (tokens..=Self::MOST).find(seen);
        let at = |tokens: usize| self.seconds[tokens];
        match (below, above) {
            (None, None) => None,
            (Some(low), Some(high)) if low < high => {
                let share = (tokens - low) as f64 / (high - low) as f64;
                Some(at(low) + share * (at(high) - at(low)))
            }
            (Some(low), Some(_)) => Some(at(low)),
            (Some(low), None) => {
                let further = FURTHER / low.max(1) as f64;
                Some(at(low) * (1.0 + further * (tokens - low) as f64))
            }
            (None, Some(high)) => Some(at(high)),
        }
    }

    /// Returns whether a step with exactly this number of tokens was measured.
    pub fn has(&self, tokens: usize) -> bool {
        self.seconds.get(tokens).is_some_and(|&known| known > 0.0)
    }

    /// Returns the tokens per second with a draft of this length. The other parameters are those of
    /// [`best_length`](Self::best_length).
    pub fn rate(
        &self,
        acceptance_rate: &AcceptanceRate,
        load: BatchLoad,
        length: usize,
        each: f64,
    ) -> f64 {
        let time = self.for_tokens(load.tokens + 1 + length).unwrap_or(1.0);
        let time = time + load.seconds + each * length as f64;
        (load.expected + 1.0 + acceptance_rate.expected(length)) / time.max(f64::MIN_POSITIVE)
    }

    /// Returns whether a step slows no request down, within a small tolerance: no request takes
    /// longer than `plain` seconds per token. The step has `tokens` tokens and takes `seconds` for
    /// drafts, and at least `expected` drafted tokens of each request are accepted. A step whose
    /// time is unknown may be tried once.
    pub fn slows_no_request(&self, tokens: usize, seconds: f64, expected: f64, plain: f64) -> bool {
        const LONGER: f64 = 1.02;
        let time = self.for_tokens(tokens).unwrap_or(0.0) + seconds;
        !self.has(tokens) || time <= plain * (1.0 + expected) * LONGER
    }

    /// Returns the best length of a draft, at most `most` tokens, in a step with other tokens in
    /// `load`. `each` is the time to draft a token.
    pub fn best_length(
        &self,
        acceptance_rate: &AcceptanceRate,
        load: BatchLoad,
        most: usize,
        each: f64,
    ) -> usize {
        let rate = |length: usize| self.rate(acceptance_rate, load, length, each);
        let least = rate(0) * MIN_GAIN;
        let lengths = LENGTHS.iter().copied();
        let lengths = lengths.filter(|&length| length <= most && rate(length) > least);
        // The shortest of equally good lengths.
        let best = lengths.max_by(|&a, &b| rate(a).total_cmp(&rate(b)).then(b.cmp(&a)));
        best.unwrap_or(0)
    }
}

/// Returns the next shorter draft length that is tried.
pub(crate) fn shorter(length: usize) -> usize {
    let lengths = LENGTHS.iter().rev();
    lengths.copied().find(|&one| one < length).unwrap_or(0)
}

/// Minimum improvement of the token rate for which a draft is worthwhile.
const MIN_GAIN: f64 = 1.03;

/// The rest of a step, besides a draft and the token before it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BatchLoad {
    pub tokens: usize,
    /// Expected number of generated tokens.
    pub expected: f64,
    /// Seconds for other drafts.
    pub seconds: f64,
}

/// Draft budget in seconds. It limits the losses from drafts to a small fraction of the total time,
/// whatever was expected of them.
///
/// Steps without drafts earn a little, which steps with drafts may lose. A step with drafts wins or
/// loses the difference to the time that its tokens would have taken without drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftBudget {
    seconds: f64,
}

impl Default for DraftBudget {
    fn default() -> Self {
        DraftBudget {
            seconds: Self::AT_FIRST,
        }
    }
}

impl DraftBudget {
    /// Initial budget.
    const AT_FIRST: f64 = 0.1;
    /// Fraction of the total time that may be lost.
    const SHARE: f64 = 0.005;
    /// Maximum budget, so that good times do not pay for long bad ones.
    const MOST: f64 = 0.5;

    /// Records a step without drafts.
    pub fn earn(&mut self, time: Duration) {
        self.add(Self::SHARE * time.as_secs_f64());
    }

    /// Records a step with drafts that took `time`; without drafts, its tokens would have taken
    /// `without`.
    pub fn settle(&mut self, time: Duration, without: f64) {
        self.add(without - time.as_secs_f64() * (1.0 - Self::SHARE));
    }

    fn add(&mut self, seconds: f64) {
        self.seconds = (self.seconds + seconds).min(Self::MOST);
    }

    /// Returns whether drafts may be tried.
    pub fn allows(&self) -> bool {
        self.seconds > 0.0
    }

    /// Returns whether the budget covers this many seconds.
    pub fn affords(&self, seconds: f64) -> bool {
        self.seconds > seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_repeat_the_last_continuation() {
        assert_eq!(guess(&[1, 2, 3, 9, 1, 2], 8), [3, 9, 1, 2]);
        assert_eq!(guess(&[1, 2, 3, 9, 1, 2], 1), [3]);
        // The longer key takes precedence, then the last occurrence.
        assert_eq!(guess(&[5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2], 1), [3]);
        assert_eq!(guess(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4]);
        assert_eq!(guess(&[1, 1, 1], 4), [1]);
        assert!(guess(&[1, 2, 3, 4], 4).is_empty());
        assert!(guess(&[1], 4).is_empty() && guess(&[], 4).is_empty());
    }

    #[test]
    fn acceptance_rate_and_step_cost_set_the_draft_length() {
        let time = |milliseconds| Duration::from_millis(milliseconds);
        let mut costs = StepCosts::new();
        costs.learn(1, time(10));
        costs.learn(17, time(20));
        let mut acceptance_rate = AcceptanceRate::default();
        (0..100).for_each(|_| acceptance_rate.learn(8, 8));
        assert_eq!(
            costs.best_length(&acceptance_rate, BatchLoad::default(), 16, 0.0),
            16
        );
        assert_eq!(
            costs.best_length(&acceptance_rate, BatchLoad::default(), 5, 0.0),
            4
        );
        (0..100).for_each(|_| acceptance_rate.learn(8, 0));
        assert_eq!(
            costs.best_length(&acceptance_rate, BatchLoad::default(), 16, 0.0),
            0
        );
        // The rate recovers if drafts are available but not tried, and not beyond its first value.
        (0..2000).for_each(|_| acceptance_rate.decay());
        assert!((0.5..0.6).contains(&acceptance_rate.0));
        assert!(costs.best_length(&acceptance_rate, BatchLoad::default(), 16, 0.0) > 0);
        // A draft that takes long to compute is not worthwhile.
        (0..100).for_each(|_| acceptance_rate.learn(8, 8));
        assert_eq!(
            costs.best_length(&acceptance_rate, BatchLoad::default(), 16, 0.02),
            0
        );
        assert_eq!(
            costs.best_length(&acceptance_rate, BatchLoad::default(), 16, 0.0005),
            16
        );
        // If each token costs as much as the first, a draft gains nothing.
        let mut costs = StepCosts::new();
        for count in 1..=32 {
            costs.learn(count, time(10 * count as u64));
        }
        assert_eq!(
            costs.best_length(&acceptance_rate, BatchLoad::default(), 16, 0.0),
            0
        );
    }

    #[test]
    fn drafts_do_not_slow_other_requests() {
        let time = |milliseconds| Duration::from_millis(milliseconds);
        let mut costs = StepCosts::new();
        costs.learn(4, time(100));
        costs.learn(5, time(101));
        costs.learn(8, time(150));
        // One of four requests has a draft: the others would wait.
        assert!(!costs.slows_no_request(8, 0.0, 0.0, 0.1));
        assert!(costs.slows_no_request(5, 0.0, 0.0, 0.1));
        assert!(!costs.slows_no_request(5, 0.01, 0.0, 0.1));
        // All requests have a draft.
        assert!(costs.slows_no_request(8, 0.0, 0.6, 0.1));
        assert!(!costs.slows_no_request(8, 0.0, 0.4, 0.1));
        // The time is unknown.
        assert!(costs.slows_no_request(7, 0.0, 0.0, 0.1));
        let shorter: Vec<usize> = [16, 5, 4, 1, 0].into_iter().map(shorter).collect();
        assert_eq!(shorter, [8, 4, 2, 0, 0]);
    }

    #[test]
    fn step_costs_are_interpolated() {
        let mut costs = StepCosts::new();
        assert_eq!(costs.for_tokens(3), None);
        costs.learn(2, Duration::from_millis(10));
        costs.learn(6, Duration::from_millis(30));
        for (tokens, milliseconds) in [(1, 10.0), (2, 10.0), (4, 20.0), (6, 30.0)] {
            let found = costs.for_tokens(tokens).unwrap();
            assert!(
                (found * 1e3 - milliseconds).abs() < 1e-6,
                "{tokens}: {found}"
            );
        }
        assert!(costs.for_tokens(12).unwrap() > 0.03);
        // A delayed step has little influence.
        costs.learn(2, Duration::from_secs(60));
        assert!(costs.for_tokens(2).unwrap() < 0.02);
    }

    #[test]
    fn the_draft_budget_limits_wasted_time() {
        let step = Duration::from_millis(10);
        let mut draft_budget = DraftBudget::default();
        let (mut plain, mut lost) = (0.0, 0.0);
        for _ in 0..10_000 {
            if draft_budget.allows() {
                // Nothing is accepted, and the step takes half as long again.
                draft_budget.settle(step * 3 / 2, step.as_secs_f64());
                lost += 0.005;
            } else {
                draft_budget.earn(step);
            }
            plain += 0.010;
        }
        assert!(lost > 0.15 && lost < 0.008 * plain, "{lost} of {plain}");
        // After a long time of accepted drafts, the losses end equally soon.
        (0..10_000).for_each(|_| draft_budget.settle(step, 2.0 * step.as_secs_f64()));
        let mut tries = 0;
        while draft_budget.allows() {
            draft_budget.settle(step * 3 / 2, step.as_secs_f64());
            tries += 1;
        }
        assert!(tries <= 110, "{tries}");
    }
}
