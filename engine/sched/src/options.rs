//! Options for a scheduler's decisions.

use samite_core::{Environment, TensorId};

/// Reaction to operations that run on a slower device because a faster one refuses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// Do nothing.
    Allow,
    /// Report a `tracing` event, and mention it in the explanation.
    #[default]
    Warn,
    /// Fail.
    Deny,
}

/// Options of a [`Scheduler`](crate::Scheduler).
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of *pipeline copies*: instances of inputs and of tensors that are copied between
    /// devices. With several, consecutive runs overlap on asynchronous devices. ggml's pipeline
    /// parallelism uses 4.
    pub copies: usize,
    /// True to let faster devices take over operations whose weights are in host memory, if they
    /// want to.
    pub offload: bool,
    /// Reaction to operations on a slower device.
    pub fallback: Fallback,
    /// Number of cached plans for graphs that are loaded again.
    pub cached_plans: usize,
    /// Environment that provides the time.
    pub environment: Environment,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            copies: 1,
            offload: true,
            fallback: Fallback::default(),
            cached_plans: 8,
            environment: Environment::system(),
        }
    }
}

/// Device that the application chose for one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The tensor.
    pub tensor: TensorId,
    /// Number of its device.
    pub device: usize,
    /// True if a faster device may [take it over](Options::offload).
    pub yields: bool,
}

/// Devices that the application chose for some tensors, by number in the
/// [`DeviceSet`](crate::DeviceSet).
///
/// Views always lie in their base's memory and stored tensors where they are stored, whatever the
/// assignments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments(Vec<Assignment>);

impl Assignments {
    /// No assignments.
    pub const NONE: &'static Assignments = &Assignments(Vec::new());

    /// Creates an empty list of assignments.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `tensor` on device number `device`. The last assignment of a tensor counts.
    pub fn set(&mut self, tensor: TensorId, device: usize) {
        self.add(Assignment {
            tensor,
            device,
            yields: false,
        });
    }

    /// Does what `set` does, for an operation with weights on that device. If the
    /// weights are in host memory, a faster device may [take the operation over](Options::offload).
    pub fn set_unless_offloaded(&mut self, tensor: TensorId, device: usize) {
        self.add(Assignment {
            tensor,
            device,
            yields: true,
        });
    }

    fn add(&mut self, new: Assignment) {
        match self
            .0
            .binary_search_by_key(&new.tensor, |known| known.tensor)
        {
            Ok(at) => self.0[at] = new,
            Err(at) => self.0.insert(at, new),
        }
    }

    /// Iterates over all assignments, in tensor order.
    pub fn iter(&self) -> std::slice::Iter<'_, Assignment> {
        self.0.iter()
    }
}
