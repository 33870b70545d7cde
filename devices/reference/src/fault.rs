//! Fault injection.

use samite_core::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Counts every fallible call of a device, and makes some of them fail with [`Error::Device`].
///
/// Calls are numbered from 0 in execution order: `allocate`, `init_tensor`, `write`, `read`,
/// `fill`, `clear`, `copy`, `import_host`, `open_stream`, `create_event`, `compile`, `prepare`,
/// `run`, `record`, `wait`, `synchronize`. A test first runs without a fault to learn the [number
/// of calls](FaultPlan::calls), then once for each of them with [`fail_at`](FaultPlan::fail_at).
/// Several devices may share a plan.
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
    /// Returns a plan that only counts.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn set(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    /// Makes only call number `call` fail.
    pub fn fail_at(&self, call: usize) {
        self.set(Some(Fault::At(call)));
    }

    /// Makes call number `call` and all later ones fail.
    pub fn fail_from(&self, call: usize) {
        self.set(Some(Fault::From(call)));
    }

    /// Makes the device lost from call number `call`: this call and all later ones fail with
    /// [`Error::DeviceLost`].
    pub fn lose_from(&self, call: usize) {
        self.set(Some(Fault::Lost(call)));
    }

    /// Ends fault injection and restarts counting at 0.
    pub fn reset(&self) {
        self.set(None);
        self.calls.store(0, Ordering::SeqCst);
    }

    /// Returns the number of calls, including failed ones.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Counts a call of `what`, and fails if the plan requires it.
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
