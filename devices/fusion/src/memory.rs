//! Facts about the memory of tensors, on which launches depend.

use crate::Kernels;
use samite_core::{Graph, Node, TensorId, TensorRef};
use samite_quant::reads_packed;
use std::cell::RefCell;
use std::marker::PhantomData;

/// Starts of tensors that kernels load 16 bytes at a time are multiples of this.
const ALIGNMENT: usize = 16;

/// Knowledge about the memory of tensors.
#[derive(Clone, Copy)]
pub enum Memory<'a> {
    /// Location of each tensor, by position in the graph.
    Places(&'a [Option<TensorRef>]),
    /// Locations of stored tensors only.
    Stored,
    /// No locations. Every weight that can be packed counts as packed.
    AllPacked,
}

/// A fact about the memory of tensors.
#[derive(Clone, Copy)]
enum Fact {
    /// The weights are packed.
    Packed(TensorId),
    /// The tensor starts at a multiple of 16 bytes.
    Aligned(TensorId),
    /// The tensors do not overlap. If `same` is set, they may also lie in exactly the same place.
    Apart { tensors: [TensorId; 2], same: bool },
}

impl Memory<'_> {
    /// Returns whether a fact is true. Without locations, tensors count as aligned and apart.
    fn has<K: Kernels>(self, fact: Fact, graph: &Graph) -> bool {
        let places = match (self, fact) {
            (Memory::Places(places), _) => places,
            (Memory::Stored, Fact::Packed(id)) => {
                let stored = graph.node(id).stored();
                return stored.is_some_and(|stored| K::is_packed(stored.tensor()));
            }
            _ => return true,
        };
        let place = |id: TensorId| places.get(id.index()).and_then(Option::as_ref);
        match fact {
            Fact::Packed(id) => place(id).is_some_and(K::is_packed),
            Fact::Aligned(id) => {
                place(id).is_some_and(|place| place.slot.offset.is_multiple_of(ALIGNMENT))
            }
            Fact::Apart { tensors, same } => match tensors.map(place) {
                [Some(a), Some(b)] => {
                    !a.overlaps(b)
                        || same && a.location() == b.location() && a.layout() == b.layout()
                }
                _ => false,
            },
        }
    }
}

/// Facts that were asked for, with their answers.
pub struct Facts(Vec<(Fact, bool)>);

impl Facts {
    /// Returns whether all answers would be the same for `memory`. The graph must be the same.
    pub fn hold<K: Kernels>(&self, graph: &Graph, memory: Memory<'_>) -> bool {
        let mut facts = self.0.iter();
        facts.all(|&(fact, is_true)| memory.has::<K>(fact, graph) == is_true)
    }
}

/// Memory that records each fact that fusion asks for.
pub struct RecordedMemory<'a, K> {
    memory: Memory<'a>,
    graph: &'a Graph,
    facts: RefCell<Vec<(Fact, bool)>>,
    kernels: PhantomData<K>,
}

impl<'a, K: Kernels> RecordedMemory<'a, K> {
    pub fn new(graph: &'a Graph, memory: Memory<'a>) -> Self {
        RecordedMemory {
            memory,
            graph,
            facts: RefCell::default(),
            kernels: PhantomData,
        }
    }

    pub fn into_facts(self) -> Facts {
        Facts(self.facts.into_inner())
    }

    fn has(&self, fact: Fact) -> bool {
        let is_true = self.memory.has::<K>(fact, self.graph);
        self.facts.borrow_mut().push((fact, is_true));
        is_true
    }

    /// Returns whether a node reads packed weights.
    pub fn is_packed(&self, node: Node<'_>) -> bool {
        let mut weights = node.source(0).into_iter().filter(|_| reads_packed(node));
        weights.any(|weights| self.has(Fact::Packed(weights.id())))
    }

    pub fn is_aligned(&self, id: TensorId) -> bool {
        self.has(Fact::Aligned(id))
    }

    /// Returns whether two tensors do not overlap. If `same` is set, they may also lie in exactly
    /// the same place.
    pub fn are_apart(&self, a: TensorId, b: TensorId, same: bool) -> bool {
        let tensors = [a, b];
        self.has(Fact::Apart { tensors, same })
    }
}
