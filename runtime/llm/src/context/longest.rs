//! Chooses the length of a context from the free memory.

use super::options::ContextOptions;
use super::plan::context_bytes;
use crate::error::Result;
use crate::kv::KvPlan;
use crate::model::Model;

/// Step of context lengths.
const STEP: usize = 256;

impl ContextOptions {
    /// Returns the longest context of `model`, in cells: the trained length, or as many cells as
    /// fit into free memory, but at least 4096 (or the trained length, if that is shorter). Returns
    /// `None` if a device that the context needs does not report its free memory. Ignores `n_ctx`.
    ///
    /// A context may take half of the host's free memory, which other programs also need, and all
    /// of the memory of other devices except `margin` bytes. Weights count if the model is [without
    /// them](Model::without_weights).
    ///
    /// # Errors
    /// Returns an error if the shortest context cannot be placed.
    pub fn longest_context(&self, model: &Model, margin: usize) -> Result<Option<usize>> {
        let trained = model.spec().n_ctx_train;
        let least = trained.min(Self::DEFAULT_CONTEXT);
        if trained <= least {
            return Ok(Some(trained));
        }
        let room = room(model, margin);
        let fit = |needs: &[usize]| {
            let mut each = needs.iter().zip(&room);
            each.all(|(&need, &room)| need <= room.unwrap_or(0))
        };
        // A context that cannot be planned, such as one with too large a tensor, does not fit.
        let fits = |n_ctx: usize| self.needs(model, n_ctx).is_ok_and(|needs| fit(&needs));
        // In most cases this suffices: a context that fits has room on every device that it needs.
        if fits(trained) {
            return Ok(Some(trained));
        }
        let mut least_needs = self.needs(model, least)?.into_iter().zip(&room);
        if least_needs.any(|(need, room)| need > 0 && room.is_none()) {
            return Ok(None);
        }
        // `most` steps fit or are the minimum; `too_many` do not fit.
        let (mut most, mut too_many) = (least / STEP, trained.div_ceil(STEP));
        while too_many - most > 1 + most / 16 {
            let steps = most.midpoint(too_many);
            if fits(steps * STEP) {
                most = steps;
            } else {
                too_many = steps;
            }
        }
        Ok(Some(least.max(most * STEP)))
    }

    /// Returns the bytes of caches and intermediate results of a context with `n_ctx` cells, by
    /// device.
    fn needs(&self, model: &Model, n_ctx: usize) -> Result<Vec<usize>> {
        let options = ContextOptions {
            n_ctx: Some(n_ctx),
            ..self.clone()
        };
        let sizes = options.sizes(model.spec())?;
        let source = model.graph_source(&[], model.kv_choices(), &options, &[], &sizes);
        let kv = KvPlan::willing(&source, &sizes, options.kv_types)?;
        let layers = kv.unallocated()?;
        let source = model.graph_source(&layers, &kv.choices, &options, &[], &sizes);
        context_bytes(&source, &options.scheduler(), &sizes, &kv)
    }
}

/// Returns the bytes that a context may take, by device, or `None` for a device that does not
/// report its memory.
fn room(model: &Model, margin: usize) -> Vec<Option<usize>> {
    let devices = model.devices();
    let all: Vec<_> = devices.iter().collect();
    let unloaded = |device: usize| model.unloaded().get(device).copied().unwrap_or(0);
    let rooms = (0..all.len()).map(|number| {
        let memory = devices.memory_of(number);
        let sharing = (0..all.len()).filter(|&other| devices.memory_of(other) == memory);
        let free = sharing.clone().find_map(|other| all[other].memory().free)?;
        let free = free.saturating_sub(sharing.map(unloaded).sum());
        let members = devices.members_of(number).iter().copied();
        let is_host = |memory: usize| devices.memories()[memory].is_host();
        Some(if is_host(memory) || members.into_iter().any(is_host) {
            free / 2
        } else {
            free.saturating_sub(margin)
        })
    });
    rooms.collect()
}
