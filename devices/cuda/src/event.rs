//! Events.

use crate::failures::Failures;
use crate::gpu::DriverEvent;
use samite_core::{Event, Result};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An event of the driver, with the failure word of the stream that recorded it.
#[derive(Debug)]
pub struct CudaEvent {
    pub event: DriverEvent,
    recorded: Mutex<Option<Arc<Failures>>>,
}

impl CudaEvent {
    pub fn new(event: DriverEvent) -> Self {
        CudaEvent {
            event,
            recorded: Mutex::default(),
        }
    }

    /// Returns the failure word of the stream that recorded the point. `None` without a point.
    pub fn recorded(&self) -> MutexGuard<'_, Option<Arc<Failures>>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event for CudaEvent {
    fn synchronize(&self) -> Result<()> {
        let Some(failures) = self.recorded().clone() else {
            return Ok(());
        };
        self.event.synchronize()?;
        failures.check()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
