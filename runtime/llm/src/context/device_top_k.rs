//! Top-k on the device: the graph selects the top tokens if that avoids reading all logits.

use super::Context;
use crate::arch::{GraphShape, Output};
use crate::error::{Error, Result};
use samite_core::{Device, Selection, TensorId};
use samite_sched::Scheduler;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum k. With a larger k, reading all logits is no more work.
const MOST: usize = 256;

/// The requested k, and the top tokens of the last batch.
#[derive(Debug, Default)]
pub(super) struct DeviceTopK {
    wanted: usize,
    /// Values of k that memory was reserved for, and whether each is worthwhile.
    tried: BTreeMap<usize, bool>,
    tokens: Vec<i32>,
    logits: Vec<f32>,
    /// Row after row.
    found: Vec<(u32, f32)>,
    per_row: usize,
}

impl DeviceTopK {
    /// Returns the k that graphs use; 0 for none.
    pub fn count(&self) -> usize {
        match self.tried.get(&self.wanted) {
            Some(true) => self.wanted,
            _ => 0,
        }
    }

    pub fn forget(&mut self) {
        self.found.clear();
    }

    /// Returns whether the top tokens were read instead of the logits of the last batch.
    pub fn are_found(&self) -> bool {
        !self.found.is_empty()
    }

    /// Returns the top tokens of row `row` of the logits.
    pub fn row(&self, row: usize) -> Option<&[(u32, f32)]> {
        let first = row.checked_mul(self.per_row)?;
        let found = self.found.get(first..first + self.per_row);
        found.filter(|found| !found.is_empty())
    }

    /// Reads the top tokens that the graph selected, for `rows` rows of logits.
    pub fn read(
        &mut self,
        scheduler: &mut Scheduler,
        (tokens, logits): (TensorId, Option<TensorId>),
        rows: usize,
    ) -> Result<()> {
        let plan = scheduler.current_plan()?;
        // Each row has a column of several tokens, or a single one.
        self.per_row = match logits {
            Some(_) => plan.graph().tensor(tokens).layout.shape()[0],
            None => 1,
        };
        let count = self.per_row * rows;
        self.tokens.resize(count, 0);
        self.logits.clear();
        self.logits.resize(count, 0.0);
        scheduler.read(tokens, 0, bytemuck::cast_slice_mut(&mut self.tokens))?;
        if let Some(logits) = logits {
            scheduler.read(logits, 0, bytemuck::cast_slice_mut(&mut self.logits))?;
        }
        let tokens = self.tokens.iter().map(|&token| token as u32);
        self.found.clear();
        self.found.extend(tokens.zip(self.logits.iter().copied()));
        // The device also selects the first token if no logit is a number above minus infinity.
        if logits.is_none() {
            let firsts = self.found.iter_mut().filter(|(token, _)| *token == 0);
            firsts.for_each(|(_, logit)| *logit = f32::NAN);
        }
        Ok(())
    }
}

fn wants(device: &Arc<dyn Device>) -> bool {
    device.selection() == Selection::Wanted
}

impl Context {
    /// Requests that devices select the top `count` tokens from the next batch on. The context then
    /// reads these instead of logits, after each token whose logits are requested. This happens
    /// only if all of them are in one micro-batch, and the device that has the logits [prefers
    /// it](samite_core::Selection::Wanted). `None` reads logits.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory.
    pub fn set_device_top_k(&mut self, count: Option<usize>) -> Result<()> {
        let most = MOST.min(self.model().spec().n_vocab / 4);
        let wanted = count.filter(|&count| count <= most).unwrap_or(0);
        self.device_top_k.wanted = wanted;
        let is_known = self.device_top_k.tried.contains_key(&wanted);
        if wanted == 0 || is_known || self.options.output != Output::Logits {
            return Ok(());
        }
        let shape = GraphShape {
            n_top_k: wanted,
            ..self.sizes.of_outputs()
        };
        let is_worth_while = self.is_chosen_where_it_is(shape)?;
        if is_worth_while {
            self.loaded = None;
            let built = self.source().build(shape)?;
            self.scheduler.reserve(&built.graph, &built.assignments)?;
        }
        self.device_top_k.tried.insert(wanted, is_worth_while);
        Ok(())
    }

    /// Returns the k that was [requested](Self::set_device_top_k).
    pub(crate) fn requested_top_k(&self) -> Option<usize> {
        let wanted = self.device_top_k.wanted;
        (wanted > 0).then_some(wanted)
    }

    /// Returns whether the top tokens would be selected on the device that has the logits and
    /// prefers it.
    fn is_chosen_where_it_is(&self, shape: GraphShape) -> Result<bool> {
        let mut devices = self.model().devices().iter();
        if !devices.any(wants) {
            return Ok(false);
        }
        let built = self.source().build(shape)?;
        let Ok(plan) = self.source().plan(self.scheduler.options(), shape) else {
            return Ok(false);
        };
        let device_of = |id: TensorId| plan.placement().devices.get(id.index()).copied().flatten();
        let Some((tokens, logits)) = built.inputs.device_top_k else {
            return Ok(false);
        };
        let mut nodes = [built.inputs.result, Some(tokens), logits]
            .into_iter()
            .flatten();
        let device = nodes.next().and_then(device_of);
        Ok(
            device.is_some_and(|device| wants(self.model().devices().get(device)))
                && nodes.all(|id| device_of(id) == device),
        )
    }

    /// Returns the top tokens after the token at `index` of the last batch, each with its logit, if
    /// they were [read instead of logits](Self::set_device_top_k). With k = 1, the logit is 0, or
    /// NaN if the token may not be a valid choice.
    pub fn device_top_k(&self, index: usize) -> Option<&[(u32, f32)]> {
        self.device_top_k.row((*self.rows.get(index)?)?)
    }

    /// Returns the [logits](Self::logits) after the token at `index` of the last batch. Reads them,
    /// with all others, if only the top tokens were read.
    ///
    /// # Errors
    /// Returns an error if the logits were not requested, or if a device fails.
    pub fn read_logits(&mut self, index: usize) -> Result<&[f32]> {
        if self.device_top_k.are_found() {
            let built = self.loaded.and_then(|shape| self.graphs.get(shape));
            if let Some(result) = built.and_then(|built| built.inputs.result) {
                let rows = self.rows.iter().flatten().count();
                let out = &mut self.values[..rows * self.width];
                self.scheduler
                    .read(result, 0, bytemuck::cast_slice_mut(out))?;
                self.device_top_k.forget();
            }
        }
        self.logits(index)
            .ok_or_else(|| Error::invalid("there are no logits"))
    }
}
