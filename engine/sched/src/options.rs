//! How a scheduler should decide.

use samite_core::{Environment, TensorId};

/// What to do about operations that land on a slower device because a faster one refuses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// Nothing.
    Allow,
    /// Report it as a `tracing` event and in the explanation.
    #[default]
    Warn,
    /// Fail.
    Deny,
}

/// Options of a [`Scheduler`](crate::Scheduler).
#[derive(Clone, Debug)]
pub struct Options {
    /// How many *pipeline copies* there are: instances of inputs and of tensors that are copied between devices, so that consecutive runs can overlap on
    /// asynchronous devices. With 1, runs do not overlap; ggml's pipeline parallelism uses 4.
    pub copies: usize,
    /// Lets faster devices take over operations whose weights are in host memory, where they want to.
    pub offload: bool,
    /// About operations that land on a slower device.
    pub fallback: Fallback,
    /// How many plans are kept for graphs that come back.
    pub cached_plans: usize,
    /// Where time comes from.
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

/// What the application said about one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The tensor.
    pub tensor: TensorId,
    /// Its device, by number.
    pub device: usize,
    /// Whether a faster device may [take it over](Options::offload).
    pub yields: bool,
}

/// Devices that the application chose for some tensors, by number in the [`DeviceSet`](crate::DeviceSet).
///
/// Views lie where their memory is and stored tensors where they are stored, whatever is said about them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignments(Vec<Assignment>);

impl Assignments {
    /// No assignments.
    pub const NONE: &'static Assignments = &Assignments(Vec::new());

    /// No assignments, to add some.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `tensor` on device number `device`. The last word about a tensor counts.
    pub fn set(&mut self, tensor: TensorId, device: usize) {
        self.add(Assignment {
            tensor,
            device,
            yields: false,
        });
    }

    /// The same for an operation on weights of that device: if these lie on the host, a faster device that wants it may [take it over](Options::offload).
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

    /// All assignments, in the order of tensors.
    pub fn iter(&self) -> std::slice::Iter<'_, Assignment> {
        self.0.iter()
    }
}
