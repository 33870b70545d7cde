//! Room in the cache: texts that are kept go first, then the youngest request makes room.

use super::Engine;

impl Engine {
    /// Makes room for so many tokens if giving up kept texts does it, and says how many there is room for.
    pub(super) fn room_for(&mut self, wanted: usize) -> usize {
        while self.context.cells().free() < wanted && self.evict(None) {}
        self.context.cells().free()
    }

    /// Makes room for a text of so many tokens in a sequence of its own, as far as giving up kept texts does it.
    pub(super) fn room_for_text(&mut self, tokens: usize) {
        self.room_for(tokens);
        self.free_runs(self.context.cells().runs_for(None, tokens));
    }

    /// Gives up kept texts until so many runs of cells are free, if that does it. In the gaps between kept texts, the cells of texts would lie among each other, and attention
    /// would take several times as long.
    pub(super) fn free_runs(&mut self, wanted: usize) {
        while self.context.cells().free_runs() < wanted && self.evict(None) {}
    }

    /// The request at work that makes room for others first: of the least priority, the youngest.
    pub(super) fn youngest(&self) -> Option<usize> {
        let active = self.active.iter().enumerate();
        let rank = |at: usize| {
            let running = &self.active[at].running;
            (running.request.priority, std::cmp::Reverse(running.id))
        };
        active.map(|(at, _)| at).min_by_key(|&at| rank(at))
    }

    /// Has a request at work wait in the queue again. What is computed of it goes to host memory, if there is room; otherwise it is computed again.
    pub(super) fn preempt(&mut self, at: usize) {
        let mut active = self.active.remove(at);
        self.totals.preempted += 1;
        active.running.counts.preempted += 1;
        // What is restored does not lie as it did.
        if active.decoded > 0 && !self.options.deterministic {
            match self.context.save(active.sequence) {
                Ok(saved) if self.swapped_bytes + saved.bytes() <= self.options.swap_bytes => {
                    self.swapped_bytes += saved.bytes();
                    active.running.swapped = Some(saved);
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "a text cannot be swapped out: it will be computed again");
                }
            }
        }
        self.free(active.sequence);
        self.enqueue_running(active.running);
    }

    /// Whether something changed without a batch, so that another step may do more.
    pub(super) fn has_room_for_more(&self) -> bool {
        let can_go_on = |active: &super::Active| active.paused.is_none() && active.pending() > 0;
        self.active.iter().any(can_go_on)
    }
}
