//! The likeliest tokens, chosen by the graph where that spares reading all logits.

use super::Context;
use crate::arch::{GraphShape, Output};
use crate::error::{Error, Result};
use samite_core::TensorId;
use samite_sched::Scheduler;

/// With more of them, reading all logits is no more work.
const MOST: usize = 256;

/// How many of the likeliest tokens are wanted, and those that were found.
#[derive(Debug, Default)]
pub(super) struct Likeliest {
    wanted: usize,
    /// The number for which there is memory, and whether it is worth while.
    tried: Option<(usize, bool)>,
    tokens: Vec<i32>,
    logits: Vec<f32>,
    found: Vec<(u32, f32)>,
}

impl Likeliest {
    /// How many graphs choose; 0 for none.
    pub fn count(&self) -> usize {
        match self.tried {
            Some((count, true)) if count == self.wanted => count,
            _ => 0,
        }
    }

    pub fn forget(&mut self) {
        self.found.clear();
    }

    /// Those after the only token of the last batch whose logits are wanted, if they were read in the place of these.
    pub fn found(&self) -> Option<&[(u32, f32)]> {
        Some(&*self.found).filter(|found| !found.is_empty())
    }

    /// Reads what the graph chose.
    pub fn read(
        &mut self,
        scheduler: &mut Scheduler,
        (tokens, logits): (TensorId, Option<TensorId>),
    ) -> Result<()> {
        let count = scheduler
            .current_plan()?
            .graph()
            .tensor(tokens)
            .layout
            .shape()[0];
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
        // The first token is also what is chosen where no logit is a number above minus infinity.
        if let ([(0, logit)], None) = (&mut *self.found, logits) {
            *logit = f32::NAN;
        }
        Ok(())
    }
}

impl Context {
    /// From the next batch on, has devices choose so many of the likeliest tokens, and reads these in the place of logits: after the last token of a batch that
    /// wants the logits of one only, and where the logits are on a device that [wants that](samite_core::Device::wants_selection). `None` reads logits.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn set_likeliest(&mut self, count: Option<usize>) -> Result<()> {
        let most = MOST.min(self.model().spec().n_vocab / 4);
        let wanted = count.filter(|&count| count <= most).unwrap_or(0);
        self.likeliest.wanted = wanted;
        let is_known = self.likeliest.tried.is_some_and(|tried| tried.0 == wanted);
        if wanted == 0 || is_known || self.options.output != Output::Logits {
            return Ok(());
        }
        let shape = GraphShape {
            n_likeliest: wanted,
            ..self.sizes.at_the_end(1)
        };
        let is_worth_while = self.is_chosen_where_it_is(shape)?;
        if is_worth_while {
            self.loaded = None;
            let built = self.source().build(shape)?;
            self.scheduler.reserve(&built.graph, &built.assignments)?;
        }
        self.likeliest.tried = Some((wanted, is_worth_while));
        Ok(())
    }

    /// Whether the likeliest tokens would be chosen on the device that has the logits, and that wants it.
    fn is_chosen_where_it_is(&self, shape: GraphShape) -> Result<bool> {
        let mut devices = self.model().devices().iter();
        if !devices.any(|device| device.wants_selection()) {
            return Ok(false);
        }
        let built = self.source().build(shape)?;
        let Ok(plan) = self.source().plan(self.scheduler.options(), shape) else {
            return Ok(false);
        };
        let device_of = |id: TensorId| plan.placement().devices.get(id.index()).copied().flatten();
        let Some((tokens, logits)) = built.inputs.likeliest else {
            return Ok(false);
        };
        let mut nodes = [built.inputs.result, Some(tokens), logits]
            .into_iter()
            .flatten();
        let device = nodes.next().and_then(device_of);
        Ok(
            device.is_some_and(|device| self.model().devices().get(device).wants_selection())
                && nodes.all(|id| device_of(id) == device),
        )
    }

    /// The likeliest tokens after the last one of the last batch, each with its logit, if they were [read in the place of logits](Self::set_likeliest). Of
    /// a single one, the logit is 0, or not a number if it may be none that can be chosen.
    pub fn likeliest(&self) -> Option<&[(u32, f32)]> {
        self.likeliest.found()
    }

    /// The [logits](Self::logits) after token number `index` of the last batch, read now if they were not.
    ///
    /// # Errors
    /// If they were not wanted, or a device fails.
    pub fn read_logits(&mut self, index: usize) -> Result<&[f32]> {
        if self.likeliest.found().is_some() {
            let built = self.loaded.and_then(|shape| self.graphs.get(shape));
            if let Some(result) = built.and_then(|built| built.inputs.result) {
                let out = &mut self.values[..self.width];
                self.scheduler
                    .read(result, 0, bytemuck::cast_slice_mut(out))?;
                self.likeliest.forget();
            }
        }
        self.logits(index)
            .ok_or_else(|| Error::invalid("there are no logits"))
    }
}
