//! Drafts: tokens that a text may go on with, guessed from what it had before, and how many of them are worth a try.
//!
//! A draft is computed in the same batch as the token before it. The request's own sampler chooses as it would without, and a drafted token stands as
//! long as it is the one that the sampler chooses. So a draft changes the time that a text takes, and never the text.

use std::time::Duration;

/// Lengths of drafts that are tried.
const LENGTHS: [usize; 6] = [0, 1, 2, 4, 8, 16];
/// The end of the text that is looked for: the longer one first.
const LONGEST_KEY: usize = 4;
const SHORTEST_KEY: usize = 2;
/// So far back it is looked for.
const LOOKS_BACK: usize = 4096;

/// What followed the last time that the text had the tokens that it ends with: at most `most` tokens.
pub(crate) fn guess(tokens: &[u32], most: usize) -> &[u32] {
    let looked_at = &tokens[tokens.len().saturating_sub(LOOKS_BACK)..];
    for length in (SHORTEST_KEY..=LONGEST_KEY).rev() {
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

/// How many drafted tokens of a request stand: the share, as lately.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Luck(f64);

impl Default for Luck {
    fn default() -> Self {
        Luck(0.6)
    }
}

impl Luck {
    /// Takes note of a draft of `drafted` tokens of which the first `accepted` stand.
    pub fn learn(&mut self, drafted: usize, accepted: usize) {
        const WEIGHT: f64 = 0.1;
        for number in 0..drafted.min(accepted + 1) {
            let stood = if number < accepted { 1.0 } else { 0.0 };
            self.0 += WEIGHT * (stood - self.0);
        }
    }

    /// A draft was there and not tried: the text may be another one by now.
    pub fn hope(&mut self) {
        self.0 += 0.002 * (0.6 - self.0);
    }

    /// Tokens of a draft of this length that will stand.
    pub fn expected(&self, length: usize) -> f64 {
        (1..=length).map(|count| self.0.powi(count as i32)).sum()
    }
}

/// What a step costs by the number of its tokens, as measured lately. Only steps that compute no prompt count.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Seconds, by the number of tokens; those of 0 were not seen.
    seconds: Vec<f64>,
}

impl Costs {
    /// Steps with more tokens are not told apart.
    const MOST: usize = 512;

    pub fn new() -> Self {
        Costs {
            seconds: vec![0.0; Self::MOST + 1],
        }
    }

    /// Takes note of a step.
    pub fn learn(&mut self, tokens: usize, time: Duration) {
        let Some(known) = self.seconds.get_mut(tokens) else {
            return;
        };
        let seconds = time.as_secs_f64();
        // One step that was held up by another program counts little.
        *known = match *known {
            0.0 => seconds,
            old => old + 0.2 * (seconds.min(4.0 * old) - old),
        };
    }

    /// Seconds of a step with so many tokens, by those that were seen; `None` where nothing was.
    pub fn of(&self, tokens: usize) -> Option<f64> {
        /// A further token costs so much of the first one, where nothing is known. It is soon.
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

    /// Whether a step with just so many tokens was seen.
    pub fn has(&self, tokens: usize) -> bool {
        self.seconds.get(tokens).is_some_and(|&known| known > 0.0)
    }

    /// Tokens that are written in a second with a draft of this length; the rest as for [`best_length`](Self::best_length).
    pub fn rate(&self, luck: &Luck, beside: Beside, length: usize, each: f64) -> f64 {
        let time = self.of(beside.tokens + 1 + length).unwrap_or(1.0);
        let time = time + beside.seconds + each * length as f64;
        (beside.expected + 1.0 + luck.expected(length)) / time.max(f64::MIN_POSITIVE)
    }

    /// Whether a step takes no request longer than `plain` seconds for each token, but for a small share: one with so many tokens, `seconds` for drafts, and
    /// at least `expected` drafted tokens that stand of each request. One whose time is not known yet may be tried once.
    pub fn slows_nobody(&self, tokens: usize, seconds: f64, expected: f64, plain: f64) -> bool {
        const LONGER: f64 = 1.02;
        let time = self.of(tokens).unwrap_or(0.0) + seconds;
        !self.has(tokens) || time <= plain * (1.0 + expected) * LONGER
    }

    /// How long a draft is worth a try, of at most `most` tokens, in a step that has other tokens beside it. `each` is what it takes to draft a token.
    pub fn best_length(&self, luck: &Luck, beside: Beside, most: usize, each: f64) -> usize {
        let rate = |length: usize| self.rate(luck, beside, length, each);
        let least = rate(0) * LEAST_GAIN;
        let lengths = LENGTHS.iter().copied();
        let lengths = lengths.filter(|&length| length <= most && rate(length) > least);
        // Of equal ones, the shortest.
        let best = lengths.max_by(|&a, &b| rate(a).total_cmp(&rate(b)).then(b.cmp(&a)));
        best.unwrap_or(0)
    }
}

/// The next shorter length of a draft that is tried.
pub(crate) fn shorter(length: usize) -> usize {
    let lengths = LENGTHS.iter().rev();
    lengths.copied().find(|&one| one < length).unwrap_or(0)
}

/// A draft has to promise so many times as many tokens in the same time.
const LEAST_GAIN: f64 = 1.03;

/// What a step has beside a draft and the token before it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Beside {
    pub tokens: usize,
    /// Tokens that will be written.
    pub expected: f64,
    /// Seconds for other drafts.
    pub seconds: f64,
}

/// Whether drafts paid, in seconds: what they cost is never more than a small share of all time, whatever was expected of them.
///
/// Steps without drafts earn a little, which steps with drafts may lose. A step with drafts wins or loses the difference to what its tokens would have taken
/// without.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Account {
    seconds: f64,
}

impl Default for Account {
    fn default() -> Self {
        Account {
            seconds: Self::AT_FIRST,
        }
    }
}

impl Account {
    /// What may be lost before anything was earned.
    const AT_FIRST: f64 = 0.1;
    /// The share of all time that may be lost.
    const SHARE: f64 = 0.005;
    /// More is not saved up for worse times.
    const MOST: f64 = 0.5;

    /// A step without drafts.
    pub fn earn(&mut self, time: Duration) {
        self.add(Self::SHARE * time.as_secs_f64());
    }

    /// A step with drafts, that took `time` for what would have taken `without`.
    pub fn settle(&mut self, time: Duration, without: f64) {
        self.add(without - time.as_secs_f64() * (1.0 - Self::SHARE));
    }

    fn add(&mut self, seconds: f64) {
        self.seconds = (self.seconds + seconds).min(Self::MOST);
    }

    /// Whether drafts may be tried.
    pub fn allows(&self) -> bool {
        self.seconds > 0.0
    }

    /// Whether so much may be spent.
    pub fn affords(&self, seconds: f64) -> bool {
        self.seconds > seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_are_what_followed_last_time() {
        assert_eq!(guess(&[1, 2, 3, 9, 1, 2], 8), [3, 9, 1, 2]);
        assert_eq!(guess(&[1, 2, 3, 9, 1, 2], 1), [3]);
        // The longer key wins, and of equal ones the last place.
        assert_eq!(guess(&[5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2], 1), [3]);
        assert_eq!(guess(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4]);
        assert_eq!(guess(&[1, 1, 1], 4), [1]);
        assert!(guess(&[1, 2, 3, 4], 4).is_empty());
        assert!(guess(&[1], 4).is_empty() && guess(&[], 4).is_empty());
    }

    #[test]
    fn luck_and_costs_decide_how_long_a_draft_is() {
        let time = |milliseconds| Duration::from_millis(milliseconds);
        let mut costs = Costs::new();
        costs.learn(1, time(10));
        costs.learn(17, time(20));
        let mut luck = Luck::default();
        (0..100).for_each(|_| luck.learn(8, 8));
        assert_eq!(costs.best_length(&luck, Beside::default(), 16, 0.0), 16);
        assert_eq!(costs.best_length(&luck, Beside::default(), 5, 0.0), 4);
        (0..100).for_each(|_| luck.learn(8, 0));
        assert_eq!(costs.best_length(&luck, Beside::default(), 16, 0.0), 0);
        // Hope comes back where drafts are there and not tried.
        (0..2000).for_each(|_| luck.hope());
        assert!(costs.best_length(&luck, Beside::default(), 16, 0.0) > 0);
        // One that takes long to draft is not worth it.
        (0..100).for_each(|_| luck.learn(8, 8));
        assert_eq!(costs.best_length(&luck, Beside::default(), 16, 0.02), 0);
        assert_eq!(costs.best_length(&luck, Beside::default(), 16, 0.0005), 16);
        // Where each token costs as much as the first, nothing is won.
        let mut costs = Costs::new();
        for count in 1..=32 {
            costs.learn(count, time(10 * count as u64));
        }
        assert_eq!(costs.best_length(&luck, Beside::default(), 16, 0.0), 0);
    }

    #[test]
    fn a_step_with_drafts_slows_nobody() {
        let time = |milliseconds| Duration::from_millis(milliseconds);
        let mut costs = Costs::new();
        costs.learn(4, time(100));
        costs.learn(5, time(101));
        costs.learn(8, time(150));
        // Of four requests, one has a draft: the others would wait.
        assert!(!costs.slows_nobody(8, 0.0, 0.0, 0.1));
        assert!(costs.slows_nobody(5, 0.0, 0.0, 0.1));
        assert!(!costs.slows_nobody(5, 0.01, 0.0, 0.1));
        // All have one.
        assert!(costs.slows_nobody(8, 0.0, 0.6, 0.1));
        assert!(!costs.slows_nobody(8, 0.0, 0.4, 0.1));
        // Not known yet.
        assert!(costs.slows_nobody(7, 0.0, 0.0, 0.1));
        let shorter: Vec<usize> = [16, 5, 4, 1, 0].into_iter().map(shorter).collect();
        assert_eq!(shorter, [8, 4, 2, 0, 0]);
    }

    #[test]
    fn costs_between_those_that_were_seen_are_between_them() {
        let mut costs = Costs::new();
        assert_eq!(costs.of(3), None);
        costs.learn(2, Duration::from_millis(10));
        costs.learn(6, Duration::from_millis(30));
        for (tokens, milliseconds) in [(1, 10.0), (2, 10.0), (4, 20.0), (6, 30.0)] {
            let found = costs.of(tokens).unwrap();
            assert!(
                (found * 1e3 - milliseconds).abs() < 1e-6,
                "{tokens}: {found}"
            );
        }
        assert!(costs.of(12).unwrap() > 0.03);
        // A step that was held up is not the rule.
        costs.learn(2, Duration::from_secs(60));
        assert!(costs.of(2).unwrap() < 0.02);
    }

    #[test]
    fn drafts_lose_no_more_than_a_small_share_of_the_time() {
        let step = Duration::from_millis(10);
        let mut account = Account::default();
        let (mut plain, mut lost) = (0.0, 0.0);
        for _ in 0..10_000 {
            if account.allows() {
                // Nothing stands, and the step takes half as long again.
                account.settle(step * 3 / 2, step.as_secs_f64());
                lost += 0.005;
            } else {
                account.earn(step);
            }
            plain += 0.010;
        }
        assert!(lost > 0.15 && lost < 0.008 * plain, "{lost} of {plain}");
        // After a long time of good luck, bad luck ends as soon.
        (0..10_000).for_each(|_| account.settle(step, 2.0 * step.as_secs_f64()));
        let mut tries = 0;
        while account.allows() {
            account.settle(step * 3 / 2, step.as_secs_f64());
            tries += 1;
        }
        assert!(tries <= 110, "{tries}");
    }
}
