//! Contexts whose device is lost.

use super::Context;
use super::adapters::SequenceAdapters;
use crate::error::{Error, Result};
use samite_sched::Scheduler;

impl Context {
    /// Releases all memory and devices, so that another context can use them. Every later decode
    /// fails with `why`.
    ///
    /// # Errors
    /// Returns an error if the last device fails. Nothing is changed then.
    pub(crate) fn give_up(&mut self, why: Error) -> Result<()> {
        let model = self.model.without_data()?;
        let devices = model.devices().iter().cloned().collect();
        self.scheduler = Scheduler::new(devices, self.options.scheduler())?;
        self.model = model;
        self.graphs.clear();
        self.loaded = None;
        self.forget_results();
        self.watcher = None;
        self.cache.give_up();
        self.options.adapters.clear();
        self.adapters = SequenceAdapters::new(self.options.n_seq);
        self.lost = Some(why);
        Ok(())
    }
}
