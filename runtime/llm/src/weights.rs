//! The weights of a model, by name.

mod load;
mod plan;

pub use plan::PlannedTensor;
pub(crate) use plan::WeightPlan;

use samite_core::{LockRefused, LockedMemory, StoredTensor};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A weight with its metadata.
#[derive(Debug)]
struct Weight {
    stored: Arc<StoredTensor>,
    /// Name of its data in the file.
    data: Box<str>,
    device: usize,
    /// True if a rule placed it there.
    explicit: bool,
}

/// Weights of a model by name.
#[derive(Debug, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Weight>,
    /// Bytes by name of the memory.
    bytes: BTreeMap<String, usize>,
    have_data: bool,
    locked: Option<LockedMemory>,
    lock_refused: Option<LockRefused>,
}

impl Weights {
    /// Returns the weight called `name`, if the model has it.
    pub fn get(&self, name: &str) -> Option<&Arc<StoredTensor>> {
        self.tensors.get(name).map(|weight| &weight.stored)
    }

    /// Returns the name in the file of the data of the weight called `name`. It differs if an
    /// embedding table is also the output matrix.
    pub fn data_name(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|weight| &*weight.data)
    }

    /// Returns the index of the device of the weight called `name`.
    pub fn device(&self, name: &str) -> Option<usize> {
        self.tensors.get(name).map(|weight| weight.device)
    }

    /// Returns the index of the device of each weight, by name.
    pub fn devices(&self) -> impl Iterator<Item = (&str, usize)> {
        let weights = self.tensors.iter();
        weights.map(|(name, weight)| (name.as_str(), weight.device))
    }

    /// Returns the index of the device on which operations with the weight called `name` must run,
    /// if a rule requires one.
    pub fn assigned(&self, name: &str) -> Option<usize> {
        let weight = self.tensors.get(name)?;
        weight.explicit.then_some(weight.device)
    }

    /// Returns whether the weights were loaded. Otherwise they only serve plans.
    pub fn have_data(&self) -> bool {
        self.have_data
    }

    /// Returns the bytes that are locked in memory, in whole pages; see
    /// [`ModelOptions::lock`](crate::ModelOptions::lock).
    pub fn locked_bytes(&self) -> usize {
        self.locked.as_ref().map_or(0, LockedMemory::bytes)
    }

    /// Returns the reason why nothing is locked, if the system refused a requested lock.
    pub fn lock_refused(&self) -> Option<&LockRefused> {
        self.lock_refused.as_ref()
    }

    /// Returns the bytes by name of the memory, including mapped files.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.bytes
            .iter()
            .map(|(name, &bytes)| (name.as_str(), bytes))
    }
}
