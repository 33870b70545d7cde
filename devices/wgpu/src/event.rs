//! Events, implemented as submission indices.

use crate::gpu::Gpu;
use crate::stream::Failures;
use samite_core::{Event, Result};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A submission, and the failure word of the stream that made it.
#[derive(Clone)]
pub struct Submission {
    pub index: wgpu::SubmissionIndex,
    pub failures: Arc<Failures>,
}

/// An event in a device's queue.
pub struct WgpuEvent {
    pub gpu: Arc<Gpu>,
    point: Mutex<Option<Submission>>,
}

impl fmt::Debug for WgpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WgpuEvent({})", self.gpu.name())
    }
}

impl WgpuEvent {
    pub fn new(gpu: Arc<Gpu>) -> Self {
        WgpuEvent {
            gpu,
            point: Mutex::default(),
        }
    }

    pub fn set(&self, point: Submission) {
        *self.point.lock().unwrap_or_else(PoisonError::into_inner) = Some(point);
    }

    /// Returns the point that was recorded last.
    pub fn point(&self) -> Option<Submission> {
        self.point
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Event for WgpuEvent {
    fn synchronize(&self) -> Result<()> {
        let Some(point) = self.point() else {
            return Ok(());
        };
        let opened = self.gpu.open()?;
        opened.wait(point.index)?;
        point.failures.check(opened)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
