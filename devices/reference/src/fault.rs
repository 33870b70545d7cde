//! Fault injection.

use samite_core::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts every call of a device that can fail, and makes some of them fail with [`Error::Device`].
///
/// Calls are numbered from 0 in the order in which they are carried out: `allocate`, `init_tensor`,
/// `write`, `read`, `fill`, `clear`, `copy`, `import_host`, `open_stream`, `create_event`,
/// `compile`, `prepare`, `run`, `record`, `wait`, `synchronize`. A test first runs without a fault
/// to learn [how many calls there are](FaultPlan::calls), then once for each of them with
/// [`fail_at`](FaultPlan::fail_at). Several devices may share a plan.
#[derive(Debug, Default)]
pub struct FaultPlan {
    calls: AtomicUsize,
    fault: Mutex<Option<Fault>>,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    At(usize),
    From(usize),
    Lost(usize),
}

impl FaultPlan {
    /// Returns a plan that counts and lets everything pass.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn set(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    /// Lets call number `call` fail, and no other.
    pub fn fail_at(&self, call: usize) {
        self.set(Some(Fault::At(call)));
    }

    /// Lets call number `call` and all later ones fail.
    pub fn fail_from(&self, call: usize) {
        self.set(Some(Fault::From(call)));
    }

    /// Lets the device be lost from call number `call` on: that one and all later ones fail with
    /// [`Error::DeviceLost`].
    pub fn lose_from(&self, call: usize) {
        self.set(Some(Fault::Lost(call)));
    }

    /// Lets everything pass again and starts to count at 0.
    pub fn reset(&self) {
        self.set(None);
        self.calls.store(0, Ordering::SeqCst);
    }

    /// How many calls there were, failed ones included.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Counts a call of `what` and says whether it fails.
    pub(crate) fn check(plan: Option<&Arc<Self>>, device: &str, what: &str) -> Result<()> {
        let Some(plan) = plan else {
            return Ok(());
        };
        let call = plan.calls.fetch_add(1, Ordering::SeqCst);
        let fault = *plan.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let fails = match fault {
            Some(Fault::At(at)) => call == at,
            Some(Fault::From(from)) => call >= from,
            Some(Fault::Lost(from)) if call >= from => {
                return Err(Error::DeviceLost {
                    device: device.into(),
                    message: format!("injected: call {call}, {what}").into(),
                });
            }
            Some(Fault::Lost(_)) | None => false,
        };
        if fails {
            return Err(Error::device(
                device,
                format!("injected fault: call {call}, {what}"),
            ));
        }
        Ok(())
    }
}
