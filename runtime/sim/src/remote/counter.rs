//! Checks exactly-once execution: each run adds one to numbers in the server's memory.

use samite_core::{CancelToken, Device, Result};
use samite_testing::Counter;
use std::sync::Arc;

pub(super) struct Counted {
    counter: Counter,
    /// Number of runs so far.
    expected: f32,
    /// Set when a run failed, so that the count is unknown.
    is_unknown: bool,
}

impl Counted {
    pub fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Ok(Counted {
            counter: Counter::new(device)?,
            expected: 0.0,
            is_unknown: false,
        })
    }

    /// Runs `times` times and checks the result.
    pub fn count(&mut self, times: usize) -> std::result::Result<(), String> {
        let counted = self.runs(times);
        if counted.is_err() {
            self.is_unknown = true;
        }
        self.expected += (0..times).map(|time| (time + 1) as f32).sum::<f32>();
        match counted.map_err(|error| error.to_string())? {
            _ if self.is_unknown => Ok(()),
            count if count == self.expected => Ok(()),
            count => Err(format!(
                "{count} was counted, and {} is right: not every run was done once",
                self.expected
            )),
        }
    }

    fn runs(&mut self, times: usize) -> Result<f32> {
        let cancel = CancelToken::new();
        for time in 0..times {
            self.counter.run((time + 1) as f32, &cancel)?;
        }
        let mut out = [0; 4];
        self.counter.read(&mut out)?;
        self.counter.stream.synchronize()?;
        Ok(f32::from_le_bytes(out))
    }
}
