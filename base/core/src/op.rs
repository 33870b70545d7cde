//! Operations: what a node computes, with typed parameters. The meaning of each is ggml's.
//!
//! The table in `op/table.rs` has one entry for each operation. [`Op`], [`OpKind`] and everything that is known about an operation
//! from its name alone come from there.

mod function;
mod parameter;
mod table;

pub use function::{Glu, Unary};
pub use parameter::{
    Interpolation, Pool, Precision, Rope, RopeMode, SortOrder, Triangle, Turn, Window,
};
pub use table::{Op, OpKind};

use std::fmt;

/// What the table says of a kind of operation.
struct Facts {
    /// ggml's name.
    name: &'static str,
    /// How many sources it must have. They come first.
    sources: usize,
    /// How many more it may have.
    optional: usize,
    /// The result is another look at the memory of source 0, with nothing to compute.
    is_view: bool,
    /// The source in whose memory the result lies, if it gets none of its own.
    result_in: Option<usize>,
    /// Sources whose memory is written to.
    writes: &'static [usize],
    /// Sources that the result may overwrite if they have the same layout: every kernel reads an element before it writes it.
    may_overwrite: &'static [usize],
}

impl Facts {
    /// What holds where an entry does not say otherwise. Every entry has a name and a number of sources.
    const USUAL: Facts = Facts {
        name: "",
        sources: 0,
        optional: 0,
        is_view: false,
        result_in: None,
        writes: &[],
        may_overwrite: &[],
    };
}

impl OpKind {
    /// ggml's name of the operation, for example `mul_mat`.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// How many sources a node of this kind must have, and how many it may have at most. The required ones come first.
    pub fn sources(self) -> std::ops::RangeInclusive<usize> {
        let facts = self.facts();
        facts.sources..=facts.sources + facts.optional
    }

    /// Whether the result is only another look at a source's memory, with nothing to compute.
    pub fn is_view(self) -> bool {
        self.facts().is_view
    }
}

impl Op {
    /// ggml's name of the operation; of the function, for unary and gated ones.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Unary(function) => function.name(),
            Op::Glu { kind, .. } => kind.name(),
            other => other.kind().name(),
        }
    }

    /// Whether the result is only another look at a source's memory, with nothing to compute.
    pub fn is_view(&self) -> bool {
        self.kind().is_view()
    }

    /// Which source's memory the result lies in, if it does not get memory of its own.
    pub fn aliased_source(&self) -> Option<usize> {
        self.kind().facts().result_in
    }

    /// Which sources' memory the operation writes to. The result is a view of one of them.
    pub fn written_sources(&self) -> &'static [usize] {
        self.kind().facts().writes
    }

    /// Whether the result may overwrite source number `source`, if that has the same layout: every kernel of such an operation
    /// reads an element before it writes it.
    pub fn may_overwrite(&self, source: usize) -> bool {
        self.kind().facts().may_overwrite.contains(&source)
    }
}

impl fmt::Display for Op {
    /// The name with the parameters, for example `rms_norm(eps=0.00001)`. What the layout of the result says is left out, and so
    /// is what has its usual value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        let mut parameters = Vec::new();
        self.list_parameters(&mut parameters);
        parameters.retain(|(name, _)| !["shape", "strides", "dtype"].contains(name));
        for (number, (name, value)) in parameters.iter().enumerate() {
            f.write_str(if number == 0 { "(" } else { ", " })?;
            write!(f, "{name}={value}")?;
        }
        f.write_str(if parameters.is_empty() { "" } else { ")" })
    }
}

#[cfg(test)]
mod tests;
