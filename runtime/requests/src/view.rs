//! What can be seen of an engine from outside.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// A slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotView {
    /// Its request, if it has one.
    pub request: Option<u64>,
    /// The owner of the request, or of the last one that it had.
    pub owner: u64,
    /// What the caller knows the request by: also of the last one that it had.
    pub tag: u64,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that were known.
    pub cached: usize,
    /// Tokens in the cache.
    pub computed: usize,
    /// Tokens that were written.
    pub written: usize,
    /// Whether its reader is so far behind that it waits.
    pub is_paused: bool,
}

/// Sums since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Steps that computed something.
    pub steps: u64,
    /// Requests that were at work in them.
    pub busy_slots: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Time of steps that computed parts of prompts.
    pub prompt_time: Duration,
    /// Tokens that were written.
    pub written_tokens: u64,
    /// Tokens that were drafted.
    pub drafted_tokens: u64,
    /// Those of them that stood.
    pub accepted_tokens: u64,
    /// Drafts.
    pub drafts: u64,
    /// Time of steps that wrote tokens, and computed no prompt.
    pub writing_time: Duration,
    /// Tokens of prompts, whether they were known or not.
    pub asked_tokens: u64,
    /// Those that were known.
    pub cached_tokens: u64,
    /// Requests that ended with an answer.
    pub finished: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that were cancelled, or whose reader went away.
    pub cancelled: u64,
    /// How often a request made room for others.
    pub preempted: u64,
    /// Texts that were given up for others.
    pub evicted: u64,
    /// The largest number of tokens of one text.
    pub longest: u64,
}

/// Counts how often each owner comes.
pub(crate) fn count_owners(owners: impl Iterator<Item = u64>) -> BTreeMap<u64, usize> {
    let mut counts = BTreeMap::new();
    for owner in owners {
        *counts.entry(owner).or_default() += 1;
    }
    counts
}

/// An engine as it is between two steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// All slots.
    pub slots: Vec<SlotView>,
    /// By owner: requests that wait for a slot.
    pub queued: BTreeMap<u64, usize>,
    /// Files of the adapters of requests that have a slot, and of those that wait for one, each once.
    pub adapters: [Vec<PathBuf>; 2],
    /// Cells of the cache.
    pub cells: usize,
    /// Those that hold a token.
    pub used_cells: usize,
    /// Texts that are kept.
    pub kept: usize,
    /// Whether the context was given up until a request comes. The rest is as it was before.
    pub is_sleeping: bool,
    /// Sums.
    pub totals: Totals,
}
