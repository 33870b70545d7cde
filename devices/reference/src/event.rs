//! Events: points in the queue of a stream.

use crate::fault::FaultPlan;
use crate::queue::QueuePoint;
use samite_core::{Event, Result};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// A point in a stream's queue. Synchronous devices have empty queues, so their events need no
/// waiting.
#[derive(Debug)]
pub(crate) struct ReferenceEvent {
    /// Name of the device, which distinguishes events of different devices.
    pub device: Arc<str>,
    pub faults: Option<Arc<FaultPlan>>,
    point: Mutex<Option<QueuePoint>>,
}

impl ReferenceEvent {
    pub fn new(device: Arc<str>, faults: Option<Arc<FaultPlan>>) -> Self {
        ReferenceEvent {
            device,
            faults,
            point: Mutex::new(None),
        }
    }

    pub fn set(&self, point: Option<QueuePoint>) {
        *self.point.lock().unwrap_or_else(PoisonError::into_inner) = point;
    }

    pub fn point(&self) -> Option<QueuePoint> {
        self.point
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Event for ReferenceEvent {
    fn synchronize(&self) -> Result<()> {
        FaultPlan::check(self.faults.as_ref(), &self.device, "synchronize")?;
        self.point().map_or(Ok(()), |point| point.wait())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
