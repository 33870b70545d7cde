//! The externally visible state of an engine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// State of a slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotView {
    /// Current request, if there is one.
    pub request: Option<u64>,
    /// Owner of the current or the last request.
    pub owner: u64,
    /// Tag that the caller gave the current or the last request.
    pub tag: u64,
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Number of prompt tokens from the cache.
    pub cached: usize,
    /// Number of tokens in the cache.
    pub computed: usize,
    /// Number of generated tokens.
    pub generated: usize,
    /// True if the request is paused because its reader is too far behind.
    pub is_paused: bool,
}

/// Totals since the engine was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Steps that computed something.
    pub steps: u64,
    /// Active requests, summed over these steps.
    pub busy_slots: u64,
    /// Prompt tokens that were computed.
    pub prompt_tokens: u64,
    /// Time of steps that included prefill.
    pub prompt_time: Duration,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Drafted tokens.
    pub drafted_tokens: u64,
    /// Accepted tokens.
    pub accepted_tokens: u64,
    /// Drafts.
    pub drafts: u64,
    /// Time of decode steps without prefill.
    pub decode_time: Duration,
    /// Prompt tokens, whether they were cached or not.
    pub asked_tokens: u64,
    /// Prompt tokens from the cache.
    pub cached_tokens: u64,
    /// Requests that were answered.
    pub finished: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that were cancelled, or whose reader was dropped.
    pub cancelled: u64,
    /// Preemptions.
    pub preempted: u64,
    /// Evicted prefixes.
    pub evicted: u64,
    /// Largest number of tokens of one text.
    pub longest: u64,
}

/// Counts how often each owner occurs.
pub(crate) fn count_owners(owners: impl Iterator<Item = u64>) -> BTreeMap<u64, usize> {
    let mut counts = BTreeMap::new();
    for owner in owners {
        *counts.entry(owner).or_default() += 1;
    }
    counts
}

/// State of an engine between two steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// All slots.
    pub slots: Vec<SlotView>,
    /// Number of requests that wait for a slot, by owner.
    pub queued: BTreeMap<u64, usize>,
    /// Adapter files of requests with a slot, and of requests that wait for one, each file once.
    pub adapters: [Vec<PathBuf>; 2],
    /// Number of cells in the cache.
    pub cells: usize,
    /// Number of cells that hold a token.
    pub used_cells: usize,
    /// Number of cached prefixes.
    pub kept: usize,
    /// Host memory in bytes that holds the caches of preempted requests.
    pub swapped_bytes: usize,
    /// True if the engine sleeps: its context was dropped until a request arrives. The other fields
    /// are then those from before.
    pub is_sleeping: bool,
    /// Totals.
    pub totals: Totals,
}
