//! Room in the cache: cached prefixes are evicted first, then the most recent request is preempted.

use super::Engine;

impl Engine {
    /// Evicts cached prefixes until `wanted` cells are free, or none are left to evict. Returns the
    /// number of free cells.
    pub(super) fn room_for(&mut self, wanted: usize) -> usize {
        while self.context.kv_cache().cells().free() < wanted && self.evict_oldest() {}
        self.context.kv_cache().cells().free()
    }

    /// Makes room for a text of `tokens` tokens in its own sequence, as far as evicting cached
    /// prefixes can.
    pub(super) fn room_for_text(&mut self, tokens: usize) {
        self.room_for(tokens);
        self.evict_for_blocks(self.context.kv_cache().cells().blocks_for(None, tokens));
    }

    /// Evicts cached prefixes until `wanted` blocks of cells are free, or none are left to evict.
    /// In the gaps between cached prefixes, the cells of texts would be interleaved, and attention
    /// would take several times as long.
    pub(super) fn evict_for_blocks(&mut self, wanted: usize) {
        while self.context.kv_cache().cells().free_blocks() < wanted && self.evict_oldest() {}
    }

    /// Returns the active request to preempt first: the most recent one with the lowest priority.
    pub(super) fn youngest(&self) -> Option<usize> {
        let active = self.active.iter().enumerate();
        let rank = |at: usize| {
            let running = &self.active[at].running;
            (running.request.priority, std::cmp::Reverse(running.id))
        };
        active.map(|(at, _)| at).min_by_key(|&at| rank(at))
    }

    /// Moves an active request back to the queue. Its cache goes to host memory if there is room;
    /// otherwise it is computed again.
    pub(super) fn preempt(&mut self, at: usize) {
        let mut active = self.active.remove(at);
        self.totals.preempted += 1;
        active.running.counts.preempted += 1;
        // A restored sequence gets other cells than before.
        if active.decoded > 0 && !self.options.deterministic {
            match self.context.save(active.sequence) {
                Ok(saved) if self.swapped_bytes + saved.bytes() <= self.options.swap_bytes => {
                    self.swapped_bytes += saved.bytes();
                    active.running.swapped = Some(saved);
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "a text cannot be swapped out: it will be computed \
                        again");
                }
            }
        }
        self.free(active.sequence);
        self.enqueue_running(active.running);
    }

    /// Returns whether an active request can continue, so that another step may do more.
    pub(super) fn has_room_for_more(&self) -> bool {
        let can_go_on = |active: &super::Active| {
            active.paused.is_none() && !active.awaits_image && active.pending() > 0
        };
        self.active.iter().any(can_go_on)
    }
}
