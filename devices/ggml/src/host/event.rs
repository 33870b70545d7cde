//! Events of a plugin's device.

use super::device::DeviceCore;
use crate::abi;
use samite_core::{Error, Event, Result};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An event of ggml's.
pub struct GgmlEvent {
    core: Arc<DeviceCore>,
    raw: NonNull<abi::BackendEvent>,
    recorded: AtomicBool,
}

// SAFETY: any thread may wait for ggml's events, and only one stream at a time records one.
unsafe impl Send for GgmlEvent {}
// SAFETY: several threads may wait for a shared event, as ggml allows, and the recorded flag is
// atomic. Recording also takes a shared reference, but callers let only one stream at a time record
// an event.
unsafe impl Sync for GgmlEvent {}

impl fmt::Debug for GgmlEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GgmlEvent({:?})", self.raw)
    }
}

impl GgmlEvent {
    /// Creates an event of a device called `name`.
    ///
    /// # Errors
    /// Returns an error if the plugin does not create it.
    pub fn new(core: Arc<DeviceCore>, name: &str) -> Result<Self> {
        let failed = || Error::unsupported(name, "events", "the plugin makes none");
        let new = core.table().event_new.ok_or_else(failed)?;
        // SAFETY: the function belongs to the device.
        let raw = unsafe { new(core.raw) };
        Ok(GgmlEvent {
            raw: NonNull::new(raw).ok_or_else(failed)?,
            core,
            recorded: AtomicBool::new(false),
        })
    }

    /// Returns `event` if it belongs to this device.
    pub fn of<'a>(event: &'a dyn Event, core: &Arc<DeviceCore>) -> Option<&'a Self> {
        let event = event.as_any().downcast_ref::<GgmlEvent>();
        event.filter(|event| Arc::ptr_eq(&event.core, core))
    }

    /// Returns `event` if the queues of this device can wait for it.
    pub fn within_reach<'a>(event: &'a dyn Event, core: &Arc<DeviceCore>) -> Option<&'a Self> {
        let event = event.as_any().downcast_ref::<GgmlEvent>()?;
        let is_peer = Arc::ptr_eq(&event.core.plugin, &core.plugin) && core.plugin.joins_devices();
        (is_peer || Arc::ptr_eq(&event.core, core)).then_some(event)
    }

    pub fn raw(&self) -> *mut abi::BackendEvent {
        self.raw.as_ptr()
    }

    /// Marks the event as recorded.
    pub fn set_recorded(&self) {
        self.recorded.store(true, Ordering::Release);
    }

    pub fn was_recorded(&self) -> bool {
        self.recorded.load(Ordering::Acquire)
    }
}

impl Event for GgmlEvent {
    fn synchronize(&self) -> Result<()> {
        if let Some(synchronize) = self.core.table().event_synchronize
            && self.was_recorded()
        {
            // SAFETY: the function belongs to the event's device.
            unsafe { synchronize(self.core.raw, self.raw()) };
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for GgmlEvent {
    fn drop(&mut self) {
        if let Some(free) = self.core.table().event_free {
            // SAFETY: the function belongs to the event's device; the event is not used again.
            unsafe { free(self.core.raw, self.raw()) };
        }
    }
}
