//! The KV cache: what sequences have in it, and how that is removed, copied and shifted.

use crate::arch::{LayerCache, Spec};
use crate::context::Sizes;
use crate::error::{Error, Result};
use crate::kv::cells::{Cells, bounds};
use crate::kv::plan::KvPlan;
use crate::kv::states::States;
use crate::kv::window::Window;
use crate::rules::Choice;
use samite_core::TensorGroup;
use samite_sched::DeviceSet;
use std::ops::{Range, RangeBounds, RangeInclusive};

/// Kind of a cache: what layers keep of a sequence. It decides what can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// Nothing: attention is bidirectional, and all tokens of a sequence are in one batch.
    Nothing,
    /// Keys and values of all tokens.
    Tokens,
    /// Keys and values of all tokens in some layers, and of the last ones in layers with a window.
    Windows,
    /// Recurrent states, from which only tokens after a [mark](KvCache::mark) can be removed.
    States,
}

/// The tokens of sequences in cells, and their memory: for each layer with attention, a row of keys
/// and a row of values for each cell.
///
/// A removed or shifted sequence changes its cells at once. Its keys are rotated by the next
/// [decode](crate::Context::decode).
#[derive(Debug)]
pub struct KvCache {
    kind: CacheKind,
    can_shift: bool,
    pub(crate) cells: Cells,
    /// Cells of layers with a window, if these are separate.
    pub(crate) window: Option<Window>,
    /// Cache of each layer.
    pub(crate) layers: Vec<LayerCache>,
    /// Rows of recurrent states, if the model has them.
    pub(crate) states: Option<States>,
    /// Device by layer.
    pub(crate) choices: Vec<Choice>,
    groups: Vec<TensorGroup>,
    /// Bytes by name of the memory.
    bytes: Vec<(String, usize)>,
}

impl KvCache {
    /// Allocates the planned memory, each layer's on its device.
    pub(crate) fn new(
        plan: &KvPlan,
        devices: &DeviceSet,
        spec: &Spec,
        sizes: &Sizes,
    ) -> Result<Self> {
        let &Sizes {
            n_cells,
            n_window,
            n_seq: n_sequences,
            ..
        } = sizes;
        let groups = plan.allocate(devices, n_cells)?;
        let tensors = groups.iter().flat_map(|group| &group.tensors).cloned();
        let layers = plan.layers(tensors);
        let window = match spec.window().filter(|_| n_window > 0) {
            Some(size) => Some(Window::new(n_window, n_sequences, size)?),
            None => None,
        };
        let states = if spec.has_state() {
            Some(States::new(n_sequences)?)
        } else {
            None
        };
        let kind = if states.is_some() {
            CacheKind::States
        } else if window.is_some() {
            CacheKind::Windows
        } else if spec.is_bidirectional() {
            CacheKind::Nothing
        } else {
            CacheKind::Tokens
        };
        Ok(KvCache {
            kind,
            can_shift: spec.can_shift(),
            cells: Cells::new(n_cells, n_sequences)?,
            window,
            states,
            layers,
            choices: plan.choices.clone(),
            groups,
            bytes: plan.bytes()?,
        })
    }

    /// Returns the cells.
    pub fn cells(&self) -> &Cells {
        &self.cells
    }

    /// Returns the positions of `sequence` that all layers still have individually. For a model
    /// with a recurrent state, that is only the last one. Returns `None` for a sequence that is
    /// empty or does not exist.
    pub fn positions(&self, sequence: usize) -> Option<RangeInclusive<i32>> {
        let last = self.cells.last_position(sequence)?;
        if self.states.is_some() {
            return Some(last..=last);
        }
        let window = self.window.as_ref().map(|window| &window.cells);
        let first = window.unwrap_or(&self.cells).first_position(sequence);
        Some(first?..=last)
    }

    /// Removes the positions `range` from `sequence`.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub fn remove(&mut self, sequence: usize, range: impl RangeBounds<i32>) -> Result<()> {
        let leaves_some = self.states.is_some() && !self.is_whole(sequence, &range);
        if leaves_some {
            let last = self.cells.last_position(sequence);
            if !last.is_some_and(|last| (0..=last).any(|position| range.contains(&position))) {
                return Ok(());
            }
            let mark = self.marked(sequence);
            let from_mark = |mark: i32| {
                let starts = range.contains(&mark) && !range.contains(&(mark - 1));
                starts && last.is_some_and(|last| range.contains(&last))
            };
            if !mark.is_some_and(from_mark) {
                return Err(Error::invalid(format!(
                    "sequence {sequence}: this model keeps a state, from which single tokens cannot be removed; remove the whole sequence, or what came since it was marked"
                )));
            }
        }
        let (first, end) = bounds(&range);
        self.edit(sequence, |cells| cells.remove(sequence, first..end))?;
        match &mut self.states {
            Some(states) if leaves_some => states.go_back(sequence),
            Some(states) => states.forget(sequence),
            None => {}
        }
        Ok(())
    }

    /// Returns whether `range` covers the whole sequence.
    fn is_whole(&self, sequence: usize, range: &impl RangeBounds<i32>) -> bool {
        let last = self.cells.last_position(sequence);
        last.is_none_or(|last| range.contains(&0) && range.contains(&last))
    }

    /// Returns what the layers of the model keep of a sequence.
    pub fn kind(&self) -> CacheKind {
        self.kind
    }

    /// Returns whether the last tokens of a sequence can always be removed.
    pub fn can_truncate(&self) -> bool {
        !matches!(self.kind, CacheKind::Windows | CacheKind::States)
    }

    /// Returns whether positions of a sequence can be removed individually, and shifted.
    pub fn can_shift(&self) -> bool {
        self.can_shift
    }

    /// Returns whether the end of `sequence`, starting at `position`, can be removed and replaced.
    pub fn can_cut(&self, sequence: usize, position: i32) -> bool {
        let last = self.cells.last_position(sequence);
        let is_whole = position <= 0 || last.is_none_or(|last| position > last);
        let is_free = self.states.is_none() || self.marked(sequence) == Some(position);
        is_whole || is_free && self.can_go_on(sequence, position)
    }

    /// Marks the end of `sequence`, replacing an earlier mark. What follows the mark can be removed
    /// even if the model has a recurrent state. A mark costs nothing. Without a recurrent state, it
    /// does nothing.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub fn mark(&mut self, sequence: usize) -> Result<()> {
        self.cells.check(sequence)?;
        let next = self.cells.next_position(sequence);
        if let Some(states) = &mut self.states {
            states.set_mark(sequence, next);
        }
        Ok(())
    }

    /// Returns the position after the [mark](Self::mark) of `sequence`.
    pub fn marked(&self, sequence: usize) -> Option<i32> {
        self.states.as_ref()?.mark(sequence)
    }

    /// Removes the positions `range` from `sequence`, and shifts what follows to where the range
    /// started.
    ///
    /// # Errors
    /// Fails like [`shift`](Self::shift). After an error, nothing is changed.
    pub fn cut_out(&mut self, sequence: usize, range: Range<i32>) -> Result<()> {
        self.check_shift()?;
        let length = range.end.saturating_sub(range.start);
        self.edit(sequence, |cells| {
            cells.remove(sequence, range.clone())?;
            cells.shift(sequence, range.end.., -length)
        })
    }

    /// Makes sequence `to` share the positions `range` of `from`, and replaces the previous
    /// contents of `to` there.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a sequence does not exist.
    pub fn copy(&mut self, from: usize, to: usize, range: impl RangeBounds<i32>) -> Result<()> {
        if self.states.is_none() {
            let (first, end) = bounds(&range);
            return self.edit(to, |cells| cells.copy(from, to, first..end));
        }
        if !self.is_whole(from, &range) {
            return Err(Error::invalid(format!(
                "sequence {from}: this model keeps a state, of which no part can be copied; copy \
                 the whole sequence"
            )));
        }
        self.edit(to, |cells| {
            cells.remove(to, ..)?;
            cells.copy(from, to, ..)
        })?;
        if let Some(states) = &mut self.states {
            states.share(from, to);
        }
        Ok(())
    }

    /// Removes every sequence but this one.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the sequence does not exist.
    pub fn keep(&mut self, sequence: usize) -> Result<()> {
        for cells in self.both() {
            cells.keep(sequence)?;
        }
        if let Some(states) = &mut self.states {
            let others = (0..self.cells.n_sequences()).filter(|&other| other != sequence);
            others.for_each(|other| states.forget(other));
        }
        Ok(())
    }

    /// Shifts the positions `range` of `sequence` by `delta`; see [`Cells::shift`].
    ///
    /// # Errors
    /// Fails like [`Cells::shift`].
    pub fn shift(
        &mut self,
        sequence: usize,
        range: impl RangeBounds<i32>,
        delta: i32,
    ) -> Result<()> {
        self.check_shift()?;
        let (first, end) = bounds(&range);
        self.edit(sequence, |cells| cells.shift(sequence, first..end, delta))
    }

    fn check_shift(&self) -> Result<()> {
        if self.kind == CacheKind::Nothing {
            return Err(Error::invalid(
                "nothing is kept of this model's tokens: there is nothing to move",
            ));
        }
        if self.can_shift {
            Ok(())
        } else {
            Err(Error::invalid(
                "what this model keeps depends on positions: they cannot be moved",
            ))
        }
    }

    /// Returns the bytes by name of the memory.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.bytes.iter().map(|(name, size)| (name.as_str(), *size))
    }

    /// Frees all cells and their memory permanently.
    pub(crate) fn give_up(&mut self) {
        self.both().for_each(Cells::clear);
        self.states.iter_mut().for_each(States::clear);
        self.layers.fill(LayerCache::default());
        self.groups.clear();
        self.bytes.clear();
    }

    /// Returns the cells of layers with a window, if these are separate, or those of the other
    /// layers.
    pub(crate) fn cells_of(&mut self, windowed: bool) -> Option<&mut Cells> {
        if windowed {
            self.window.as_mut().map(|window| &mut window.cells)
        } else {
            Some(&mut self.cells)
        }
    }

    /// Commits the allocated cells.
    pub(crate) fn commit(&mut self) {
        self.both().for_each(Cells::commit);
        self.states.iter_mut().for_each(States::commit);
    }

    /// Frees the cells that were allocated since the last [`commit`](Self::commit).
    pub(crate) fn rollback(&mut self) {
        self.both().for_each(Cells::rollback);
        self.states.iter_mut().for_each(States::rollback);
    }

    /// Returns the cells, and those of layers with a window.
    pub(crate) fn both(&mut self) -> impl Iterator<Item = &mut Cells> {
        let windowed = self.window.as_mut().map(|window| &mut window.cells);
        std::iter::once(&mut self.cells).chain(windowed)
    }

    /// Edits the cells of `sequence`. If that fails, nothing is changed.
    ///
    /// # Errors
    /// Returns the errors of `edit`, and [`samite_core::Error::InvalidArgument`] if layers with a
    /// window no longer have the cells that the sequence's next token sees.
    pub(crate) fn edit(
        &mut self,
        sequence: usize,
        edit: impl Fn(&mut Cells) -> Result<()>,
    ) -> Result<()> {
        let Some(window) = &mut self.window else {
            return edit(&mut self.cells);
        };
        let before = (self.cells.clone(), window.clone());
        let result = edit(&mut self.cells)
            .and_then(|()| edit(&mut window.cells))
            .and_then(|()| window.check(&self.cells, sequence));
        if result.is_err() {
            (self.cells, *window) = before;
        }
        result
    }

    /// Returns whether a token at `position` of `sequence` would see all required cells in all
    /// layers.
    pub(crate) fn can_go_on(&self, sequence: usize, position: i32) -> bool {
        let window = self.window.as_ref();
        window.is_none_or(|window| window.has(&self.cells, sequence, position))
    }

    /// Frees all cells and zeros their contents, so that not even a NaN remains.
    pub(crate) fn clear(&mut self) -> Result<()> {
        self.both().for_each(Cells::clear);
        self.states.iter_mut().for_each(States::clear);
        // New memory is zero, and most of a large cache is never touched.
        if self.cells.were_used {
            self.groups.iter().try_for_each(|group| group.clear(0))?;
            self.cells.were_used = false;
        }
        Ok(())
    }
}
