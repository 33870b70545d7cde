//! Operations, with typed parameters. Their semantics are ggml's.
//!
//! The table in `op/table.rs` has one entry for each operation. It defines [`Op`], [`OpKind`] and
//! all properties that depend only on the operation.

mod function;
mod parameter;
mod table;

pub use function::{Glu, Unary};
pub use parameter::{
    Interpolation, Pool, Precision, Rope, RopeAngle, RopeMode, SortOrder, Triangle, Window,
};
pub use table::{Op, OpKind};

use std::fmt;

/// Properties of a kind of operation, from the table.
struct OpFacts {
    /// ggml's name.
    name: &'static str,
    /// Number of required sources, which come first.
    sources: usize,
    /// Number of optional sources.
    optional: usize,
    /// True if the result is a view of source 0, with nothing to compute.
    is_view: bool,
    /// The source in whose memory the result lies, if it does not get its own.
    result_in: Option<usize>,
    /// Sources whose memory is written to.
    writes: &'static [usize],
    /// Sources that the result may overwrite if they have the same layout, because every kernel
    /// reads an element before it writes it.
    may_overwrite: &'static [usize],
}

impl OpFacts {
    /// Default properties. Every entry has a name and a number of sources.
    const USUAL: OpFacts = OpFacts {
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
    /// Returns ggml's name of the operation, for example `mul_mat`.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns the minimum and maximum number of sources. Required sources come first.
    pub fn sources(self) -> std::ops::RangeInclusive<usize> {
        let facts = self.facts();
        facts.sources..=facts.sources + facts.optional
    }

    /// Returns whether the result is a view of a source's memory, with nothing to compute.
    pub fn is_view(self) -> bool {
        self.facts().is_view
    }
}

impl Op {
    /// Returns ggml's name of the operation, or of the function for unary and gated operations.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Unary(function) => function.name(),
            Op::Glu { kind, .. } => kind.name(),
            other => other.kind().name(),
        }
    }

    /// Returns whether the result is a view of a source's memory, with nothing to compute.
    pub fn is_view(&self) -> bool {
        self.kind().is_view()
    }

    /// Returns the source in whose memory the result lies, if it does not get its own.
    pub fn aliased_source(&self) -> Option<usize> {
        self.kind().facts().result_in
    }

    /// Returns the sources whose memory the operation writes to. The result is a view of one of
    /// them.
    pub fn written_sources(&self) -> &'static [usize] {
        self.kind().facts().writes
    }

    /// Returns whether the result may overwrite source number `source` if both have the same
    /// layout. Every kernel of such an operation reads an element before it writes it.
    pub fn may_overwrite(&self, source: usize) -> bool {
        self.kind().facts().may_overwrite.contains(&source)
    }
}

impl fmt::Display for Op {
    /// Writes the name with the parameters, for example `rms_norm(eps=0.00001)`. Omits default
    /// values and everything that the layout of the result shows.
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
