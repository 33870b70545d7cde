//! Divides a graph in one pass: determines the state of every tensor, a graph for every member, and
//! the exchanges between them.
//!
//! The pass uses data only, no device and no memory. Leaves have states. For each node, a
//! [rule](crate::rules) determines the states that its sources must have, and the state of its
//! result. A source in another state is converted: cutting a replicated tensor is free; assembling
//! a whole tensor from shards or sums is a [`Collective`]. A conversion is made once and kept for
//! later users, until a node writes to the converted tensor.

use crate::rules::{Case, Decision, Mode, SplitOperand, decide};
use crate::state::{AxisRuns, SplitState};
use samite_core::{Error, Graph, Layout, Op, OpKind, Result, StoredTensor, TensorId, counted};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Distribution of a leaf.
pub struct Leaf {
    /// State of the leaf.
    pub state: SplitState,
    /// For stored leaves: each member's shard, or `None` for a member without one.
    pub stored: Option<Vec<Option<Arc<StoredTensor>>>>,
}

/// Returns the distribution of the leaves of a graph.
pub type Leaves<'a> = dyn Fn(TensorId) -> Result<Leaf> + 'a;

/// A collective operation of all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// Sums partial tensors.
    Sum,
    /// Concatenates shards.
    Gather,
    /// Sends the first member's data to all.
    Broadcast,
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exchange::Sum => "sum",
            Exchange::Gather => "gather",
            Exchange::Broadcast => "broadcast",
        })
    }
}

/// A tensor that all members compute together. Afterwards each has all of it.
#[derive(Clone, Debug)]
pub struct Collective {
    /// Kind of exchange.
    pub exchange: Exchange,
    /// Type and shape of the whole tensor, contiguous.
    pub layout: Layout,
    /// State before the exchange.
    pub from: SplitState,
    /// Source tensor of each member, if it is not empty.
    pub sources: Vec<Option<TensorId>>,
    /// Result tensor of each member.
    pub results: Vec<TensorId>,
}

/// Steps that the members perform in order.
#[derive(Clone, Debug)]
pub enum PartitionStep {
    /// Each member runs these nodes of its graph.
    Run(Vec<Vec<TensorId>>),
    /// All members exchange data.
    Exchange(Collective),
}

/// A conversion of a tensor that was not in the state that a node needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Conversion {
    /// The converted tensor.
    pub tensor: TensorId,
    /// Name of the tensor.
    pub name: String,
    /// State before.
    pub from: SplitState,
    /// State after.
    pub to: SplitState,
    /// Exchange that is needed; `None` if each member cuts its own data.
    pub exchange: Option<Exchange>,
    /// Bytes exchanged.
    pub bytes: usize,
    /// Node or other user that needs the conversion.
    pub reason: String,
}

/// A tensor from outside the nodes, which every member gets as a whole before the run.
#[derive(Clone, Debug)]
pub struct ReplicatedInput {
    /// The tensor.
    pub tensor: TensorId,
    /// Leaf of each member's graph; `None` for a member that does not need it.
    pub locals: Vec<Option<TensorId>>,
}

/// A tensor that is needed outside the nodes.
#[derive(Clone, Debug)]
pub struct Output {
    /// The tensor.
    pub tensor: TensorId,
    /// State of the tensor.
    pub state: SplitState,
    /// Tensor of each member's graph, if its part is not empty.
    pub locals: Vec<Option<TensorId>>,
}

/// A graph divided among members.
pub struct Partition {
    /// State in which each tensor of the graph was computed; `None` for tensors that the nodes do
    /// not refer to.
    pub states: Vec<Option<SplitState>>,
    /// Graph of each member.
    pub graphs: Vec<Graph>,
    /// Steps of the members.
    pub steps: Vec<PartitionStep>,
    /// Conversions of tensors that were in the wrong state.
    pub conversions: Vec<Conversion>,
    /// Tensors from outside.
    pub inputs: Vec<ReplicatedInput>,
    /// Tensors that are needed outside.
    pub outputs: Vec<Output>,
    /// Node from which each computed tensor of a member's graph originates, by member.
    pub origins: Vec<BTreeMap<TensorId, TensorId>>,
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition")
            .field("members", &self.graphs.len())
            .field("steps", &self.steps.len())
            .field("conversions", &self.conversions)
            .finish_non_exhaustive()
    }
}

/// Input of a partition.
pub struct Task<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// Nodes to compute, in order.
    pub nodes: &'a [TensorId],
    /// True for each tensor that is needed outside the nodes.
    pub escaping: &'a [bool],
    /// Number of members.
    pub members: usize,
    /// True if equal inputs give all members bitwise equal results. Otherwise, the choices of the
    /// first member (orders, indices) apply to all.
    pub alike: bool,
}

type Decide<'a> = &'a dyn Fn(&Case<'_>) -> Decision;

impl Partition {
    /// Divides the nodes of a task.
    ///
    /// # Errors
    /// Returns [`Error::Unsupported`] for a node that writes to a tensor whose division does not
    /// allow it. Returns the errors of `leaves`.
    pub fn new(task: &Task<'_>, leaves: &Leaves<'_>) -> Result<Self> {
        Self::with_rules(task, leaves, &decide)
    }

    /// Works like [`new`](Partition::new) with other rules, for tests that plant wrong ones.
    pub(crate) fn with_rules(
        task: &Task<'_>,
        leaves: &Leaves<'_>,
        decide: Decide<'_>,
    ) -> Result<Self> {
        let mut pass = Pass::new(task, leaves, decide);
        for &id in task.nodes {
            if task.graph.tensor(id).is_computed() {
                pass.tensor(id)?;
            }
        }
        pass.finish()
    }

    /// Returns the number of exchanges.
    pub fn exchanges(&self) -> usize {
        let is_exchange = |step: &&PartitionStep| matches!(step, PartitionStep::Exchange(_));
        self.steps.iter().filter(is_exchange).count()
    }

    /// Returns the bytes of all exchanges in a run.
    pub fn bytes_exchanged(&self) -> usize {
        let bytes = |step: &PartitionStep| match step {
            PartitionStep::Exchange(collective) => collective.layout.bytes(),
            PartitionStep::Run(_) => 0,
        };
        self.steps.iter().map(bytes).sum()
    }

    /// Returns a number that differs between partitions whose operations, shapes, shares or
    /// exchanges differ, so that members could not run them together.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for graph in &self.graphs {
            for tensor in graph.tensors() {
                let sources: Vec<TensorId> = tensor.operands().map(|(_, id)| id).collect();
                (format!("{:?}", tensor.op), tensor.layout, sources).hash(&mut hasher);
            }
        }
        for step in &self.steps {
            match step {
                PartitionStep::Run(nodes) => nodes.hash(&mut hasher),
                PartitionStep::Exchange(Collective {
                    exchange,
                    from,
                    results,
                    ..
                }) => (format!("{exchange} {from:?}"), results).hash(&mut hasher),
            }
        }
        hasher.finish()
    }

    /// Returns a summary in one line.
    pub fn summary(&self) -> String {
        let mut kinds = [0; 3];
        for conversion in &self.conversions {
            match conversion.exchange {
                Some(Exchange::Sum) => kinds[0] += 1,
                Some(Exchange::Gather) => kinds[1] += 1,
                Some(Exchange::Broadcast) => kinds[2] += 1,
                None => {}
            }
        }
        format!(
            "{}: {} summed, {} gathered, {} broadcast",
            counted(self.exchanges(), "exchange"),
            kinds[0],
            kinds[1],
            kinds[2]
        )
    }
}

/// Tensor of each member's graph; `None` for an empty part.
type MemberTensors = Vec<Option<TensorId>>;

/// A tensor in one state.
struct Variant {
    state: SplitState,
    locals: MemberTensors,
}

struct Pass<'a> {
    task: &'a Task<'a>,
    leaves: &'a Leaves<'a>,
    decide: Decide<'a>,
    inside: BTreeSet<TensorId>,
    /// Variants of each tensor: first as computed, then converted.
    variants: Vec<Vec<Variant>>,
    /// True for memory that nodes write to after it was computed. It is mirrored, so that all nodes
    /// can write to it.
    is_target: Vec<bool>,
    /// Owner of each tensor's memory.
    memories: Vec<TensorId>,
    /// Nodes of each member since the last exchange.
    run: Vec<Vec<TensorId>>,
    made: Partition,
}

impl<'a> Pass<'a> {
    fn new(task: &'a Task<'a>, leaves: &'a Leaves<'a>, decide: Decide<'a>) -> Self {
        let (graph, n) = (task.graph, task.members);
        let mut is_target = vec![false; graph.len()];
        for &id in task.nodes {
            for (_, target) in graph.tensor(id).written() {
                is_target[graph.memory_of(target).index()] = true;
            }
        }
        Pass {
            task,
            leaves,
            decide,
            inside: task.nodes.iter().copied().collect(),
            variants: graph.ids().map(|_| Vec::new()).collect(),
            is_target,
            memories: samite_core::reorder::memories(graph),
            run: vec![Vec::new(); n],
            made: Partition {
                states: vec![None; graph.len()],
                graphs: vec![Graph::new(); n],
                steps: Vec::new(),
                conversions: Vec::new(),
                inputs: Vec::new(),
                outputs: Vec::new(),
                origins: vec![BTreeMap::new(); n],
            },
        }
    }

    fn members(&self) -> std::ops::Range<usize> {
        0..self.task.members
    }

    /// Appends a node to a member's graph and to its current run.
    fn push(
        &mut self,
        member: usize,
        of: TensorId,
        op: Op,
        sources: &[Option<TensorId>],
    ) -> Result<TensorId> {
        let graph = &mut self.made.graphs[member];
        let id = graph.push(op, sources)?;
        let name = &self.task.graph.tensor(of).name;
        graph.set_name(id, Arc::clone(name));
        if graph.tensor(id).is_computed() {
            self.run[member].push(id);
            self.made.origins[member].insert(id, of);
        }
        Ok(id)
    }

    /// Adds a leaf to a member's graph. It is written before the graph reads it.
    fn leaf(&mut self, member: usize, of: TensorId, layout: &Layout) -> Result<TensorId> {
        let name = &self.task.graph.tensor(of).name;
        self.made.graphs[member].leaf(name, layout.dtype(), layout.shape())
    }

    /// Ends the current run of the members.
    fn end_run(&mut self) {
        if self.run.iter().any(|nodes| !nodes.is_empty()) {
            let nodes = std::mem::take(&mut self.run);
            self.run = vec![Vec::new(); nodes.len()];
            self.made.steps.push(PartitionStep::Run(nodes));
        }
    }

    /// Adds an exchange that makes a whole tensor of the members' parts.
    fn exchange(
        &mut self,
        of: TensorId,
        exchange: Exchange,
        from: SplitState,
        sources: MemberTensors,
    ) -> Result<MemberTensors> {
        let mut sources = sources;
        let layout = self.task.graph.tensor(of).layout.compact()?;
        for member in self.members() {
            if let Some(id) = sources[member] {
                // Views may have gaps or another order, so copy them first.
                let tensor = self.made.graphs[member].tensor(id);
                let id = if tensor.layout.is_contiguous() && tensor.view.is_none() {
                    id
                } else {
                    self.push(member, of, Op::Cont, &[Some(id)])?
                };
                self.made.graphs[member].set_output(id);
                sources[member] = Some(id);
            }
        }
        self.end_run();
        let results = self
            .members()
            .map(|member| self.leaf(member, of, &layout))
            .collect::<Result<Vec<_>>>()?;
        self.made.steps.push(PartitionStep::Exchange(Collective {
            exchange,
            layout,
            from,
            sources,
            results: results.clone(),
        }));
        Ok(results.into_iter().map(Some).collect())
    }

    /// Returns the state of a tensor as it was computed.
    fn tensor(&mut self, id: TensorId) -> Result<SplitState> {
        if let Some(variant) = self.variants[id.index()].first() {
            return Ok(variant.state.clone());
        }
        let tensor = self.task.graph.tensor(id);
        let is_here = tensor.op.is_view() || self.inside.contains(&id);
        let variant = if is_here && !matches!(tensor.op, Op::Leaf) {
            self.node(id)?
        } else {
            self.outside(id)?
        };
        let state = variant.state.clone();
        self.made.states[id.index()] = Some(state.clone());
        self.variants[id.index()].push(variant);
        Ok(state)
    }

    /// Adds a leaf, or a tensor that another part of the graph computes.
    fn outside(&mut self, id: TensorId) -> Result<Variant> {
        let tensor = self.task.graph.tensor(id);
        let leaf = (self.leaves)(id)?;
        leaf.state.check(&tensor.layout, self.task.members)?;
        let mut locals = Vec::new();
        for member in self.members() {
            let shape = leaf.state.local_shape(tensor.layout.shape(), member);
            let is_empty = shape.contains(&0) && !tensor.layout.is_empty();
            let local = match &leaf.stored {
                Some(stored) => match &stored[member] {
                    Some(stored) => Some(self.made.graphs[member].stored(stored)?),
                    None => None,
                },
                None if is_empty => None,
                None => {
                    let layout = Layout::contiguous(tensor.layout.dtype(), shape)?;
                    Some(self.made.graphs[member].input(
                        &tensor.name,
                        layout.dtype(),
                        layout.shape(),
                    )?)
                }
            };
            locals.push(local);
        }
        if leaf.stored.is_none() {
            self.made.inputs.push(ReplicatedInput {
                tensor: id,
                locals: locals.clone(),
            });
        }
        Ok(Variant {
            state: leaf.state,
            locals,
        })
    }

    /// Adds a computed node or a view.
    fn node(&mut self, id: TensorId) -> Result<Variant> {
        let tensor = self.task.graph.tensor(id);
        let mut states: Vec<Option<SplitState>> = Vec::new();
        for source in &tensor.sources {
            states.push(source.map(|source| self.tensor(source)).transpose()?);
        }
        // Use the whole tensor if an exchange has already made it.
        for (source, state) in tensor.sources.iter().zip(&mut states) {
            if let Some(source) = source
                && *state == Some(SplitState::Partial)
                && self.find(*source, &SplitState::Mirrored).is_some()
            {
                *state = Some(SplitState::Mirrored);
            }
        }
        let operands: Vec<Option<SplitOperand<'_>>> = tensor
            .sources
            .iter()
            .zip(&states)
            .map(|(source, state)| {
                let layout = &self.task.graph.tensor((*source)?).layout;
                let state = state.as_ref()?;
                Some(SplitOperand { layout, state })
            })
            .collect();
        let case = Case {
            op: &tensor.op,
            sources: &operands,
            result: &tensor.layout,
        };
        let decision = (self.decide)(&case);
        let divided = match self.compute(id, &decision) {
            Err(error) if decision.result != SplitState::Mirrored => {
                tracing::debug!(%error, "computed by all members: {tensor:?}");
                self.compute(id, &case.gathered())
            }
            divided => divided,
        };
        let mut variant = divided?;
        // Converted copies of the written tensor are now stale.
        for (_, target) in tensor.written() {
            let memory = self.memories[target.index()];
            for (index, variants) in self.variants.iter_mut().enumerate() {
                if self.memories[index] == memory {
                    variants.truncate(1);
                }
            }
        }
        let is_choice = matches!(
            tensor.op.kind(),
            OpKind::ArgMax | OpKind::ArgSort | OpKind::TopK
        );
        if is_choice && !self.task.alike && variant.state == SplitState::Mirrored {
            let locals = std::mem::take(&mut variant.locals);
            variant.locals =
                self.exchange(id, Exchange::Broadcast, SplitState::Mirrored, locals)?;
            self.tell(
                id,
                SplitState::Mirrored,
                SplitState::Mirrored,
                Some(Exchange::Broadcast),
                "members of different kinds may choose differently".to_owned(),
            );
        }
        if self.is_target[id.index()] && variant.state != SplitState::Mirrored {
            let reason = "something writes to it".to_owned();
            variant = self.whole(id, variant.state, variant.locals, reason)?;
        }
        Ok(variant)
    }

    /// Makes a whole tensor of sums or shards.
    fn whole(
        &mut self,
        id: TensorId,
        state: SplitState,
        locals: MemberTensors,
        reason: String,
    ) -> Result<Variant> {
        let exchange = match &state {
            SplitState::Partial => Exchange::Sum,
            SplitState::Split { .. } => Exchange::Gather,
            SplitState::Mirrored => Exchange::Broadcast,
        };
        self.tell(
            id,
            state.clone(),
            SplitState::Mirrored,
            Some(exchange),
            reason,
        );
        Ok(Variant {
            locals: self.exchange(id, exchange, state, locals)?,
            state: SplitState::Mirrored,
        })
    }

    fn tell(
        &mut self,
        id: TensorId,
        from: SplitState,
        to: SplitState,
        exchange: Option<Exchange>,
        reason: String,
    ) {
        let tensor = self.task.graph.tensor(id);
        self.made.conversions.push(Conversion {
            tensor: id,
            name: tensor.name.to_string(),
            from,
            to,
            bytes: match exchange {
                Some(_) => tensor.layout.bytes(),
                None => 0,
            },
            exchange,
            reason,
        });
    }

    /// Appends a node to the members' graphs as decided.
    fn compute(&mut self, id: TensorId, decision: &Decision) -> Result<Variant> {
        let tensor = self.task.graph.tensor(id);
        decision.result.check(&tensor.layout, self.task.members)?;
        let mut sources: Vec<Option<MemberTensors>> = Vec::new();
        for (index, (source, want)) in tensor.sources.iter().zip(&decision.want).enumerate() {
            let Some(source) = *source else {
                sources.push(None);
                continue;
            };
            let is_written = tensor.op.written_sources().contains(&index);
            if is_written && self.state_of(source) != Some(want) {
                return Err(Error::unsupported(
                    "meta",
                    format!("{} '{}'", tensor.op.name(), tensor.name),
                    format!(
                        "it cannot write to '{}', which is {}",
                        self.task.graph.tensor(source).name,
                        self.state_of(source)
                            .map_or_else(String::new, ToString::to_string)
                    ),
                ));
            }
            // Strides and offset of a view refer to its source.
            let is_exact = matches!(tensor.op, Op::View { .. }) && *want != SplitState::Partial;
            sources.push(Some(self.get(source, want, is_exact, id)?));
        }
        let before: Vec<usize> = self.run.iter().map(Vec::len).collect();
        let locals = self.compute_parts(id, decision, &sources);
        if locals.is_err() {
            // Do not run the nodes that were appended for it.
            for (run, before) in self.run.iter_mut().zip(before) {
                run.truncate(before);
            }
        }
        Ok(Variant {
            state: decision.result.clone(),
            locals: locals?,
        })
    }

    /// Appends each member's part of a node.
    fn compute_parts(
        &mut self,
        id: TensorId,
        decision: &Decision,
        sources: &[Option<MemberTensors>],
    ) -> Result<MemberTensors> {
        let mut locals = Vec::new();
        for member in self.members() {
            let mine: Vec<Option<TensorId>> = sources
                .iter()
                .map(|locals| locals.as_ref().and_then(|locals| locals[member]))
                .collect();
            // The source exists, but this member has no part of it.
            let is_empty = sources
                .iter()
                .zip(&mine)
                .any(|(all, mine)| all.is_some() && mine.is_none());
            locals.push(if is_empty {
                match &decision.result {
                    SplitState::Partial => Some(self.zeros(member, id)?),
                    SplitState::Split { runs, .. } if runs.len_of(member) == 0 => None,
                    _ => {
                        return Err(Error::invalid(format!(
                            "{id}: a member without its part of a source cannot have its result"
                        )));
                    }
                }
            } else {
                match &decision.mode {
                    Mode::First { pass } if member > 0 => mine.get(*pass).copied().flatten(),
                    _ => Some(self.compute_part(member, id, decision, &mine)?),
                }
            });
        }
        Ok(locals)
    }

    /// Appends one member's part of a node.
    fn compute_part(
        &mut self,
        member: usize,
        id: TensorId,
        decision: &Decision,
        sources: &[Option<TensorId>],
    ) -> Result<TensorId> {
        let tensor = self.task.graph.tensor(id);
        let part = |shape| decision.result.local_shape(shape, member);
        let op = match (&decision.mode, tensor.op) {
            (Mode::View(window), _) => {
                let source = sources.first().copied().flatten();
                let layout = source.map(|source| self.made.graphs[member].tensor(source).layout);
                let local = layout.and_then(|layout| window.local(member, &layout));
                local.ok_or_else(|| Error::invalid(format!("{id}: no view of a part")))?
            }
            (Mode::Each, op @ Op::View { .. }) => {
                let layout = |graph: &Graph, id: Option<TensorId>| Some(graph.tensor(id?).layout);
                let mine = layout(
                    &self.made.graphs[member],
                    sources.first().copied().flatten(),
                );
                let theirs = layout(self.task.graph, tensor.sources.first().copied().flatten());
                if mine != theirs {
                    return Err(Error::unsupported(
                        "meta",
                        format!("{op} '{}'", tensor.name),
                        "it looks at a copy of a tensor with gaps",
                    ));
                }
                op
            }
            (_, Op::Repeat { shape }) => Op::Repeat { shape: part(shape) },
            (_, Op::Reshape { shape }) => Op::Reshape { shape: part(shape) },
            (_, Op::RepeatBack { shape }) => Op::RepeatBack { shape: part(shape) },
            (_, op) => op,
        };
        let local = self.push(member, id, op, sources)?;
        let made = self.made.graphs[member].tensor(local).layout.shape();
        let wanted = part(tensor.layout.shape());
        if made != wanted {
            return Err(Error::invalid(format!(
                "{id} '{}': a part has shape {made:?} instead of {wanted:?}",
                tensor.name
            )));
        }
        Ok(local)
    }

    /// Adds zeros of the shape of `id`.
    fn zeros(&mut self, member: usize, id: TensorId) -> Result<TensorId> {
        let layout = self.task.graph.tensor(id).layout.compact()?;
        let shape = self.leaf(member, id, &layout)?;
        self.push(member, id, Op::Fill { value: 0.0 }, &[Some(shape)])
    }

    fn state_of(&self, id: TensorId) -> Option<&SplitState> {
        self.variants[id.index()]
            .first()
            .map(|variant| &variant.state)
    }

    fn find(&self, id: TensorId, state: &SplitState) -> Option<&Variant> {
        self.variants[id.index()]
            .iter()
            .find(|variant| variant.state == *state)
    }

    /// Returns a tensor in the state that `user` needs. If `is_exact`, a whole tensor keeps the
    /// strides of the original graph, because the user is a view with these strides.
    fn get(
        &mut self,
        id: TensorId,
        want: &SplitState,
        is_exact: bool,
        user: TensorId,
    ) -> Result<MemberTensors> {
        let natural = self.tensor(id)?;
        if is_exact && *want == SplitState::Mirrored && natural != SplitState::Mirrored {
            return self.exact(id, user);
        }
        if let Some(variant) = self.find(id, want) {
            return Ok(variant.locals.clone());
        }
        let tensor = self.task.graph.tensor(id);
        want.check(&tensor.layout, self.task.members)?;
        let reason = || {
            let node = self.task.graph.tensor(user);
            format!("{} {user} '{}'", node.op.name(), node.name)
        };
        let variant = match want {
            SplitState::Mirrored => {
                let locals = self
                    .find(id, &natural)
                    .map(|variant| variant.locals.clone());
                let reason = reason();
                self.whole(id, natural, locals.unwrap_or_default(), reason)?
            }
            SplitState::Split { axis, runs } => {
                let reason = reason();
                let whole = self.get(id, &SplitState::Mirrored, false, user)?;
                self.tell(id, SplitState::Mirrored, want.clone(), None, reason);
                let mut locals = Vec::new();
                for member in self.members() {
                    let whole = whole[member];
                    let cut = whole.map(|whole| self.cut(member, id, whole, *axis, runs));
                    locals.push(cut.transpose()?.flatten());
                }
                Variant {
                    state: want.clone(),
                    locals,
                }
            }
            SplitState::Partial => {
                let reason = reason();
                let whole = self.get(id, &SplitState::Mirrored, false, user)?;
                self.tell(id, SplitState::Mirrored, SplitState::Partial, None, reason);
                let mut locals = Vec::new();
                for member in self.members() {
                    locals.push(match member {
                        0 => whole[0],
                        _ => Some(self.zeros(member, id)?),
                    });
                }
                Variant {
                    state: SplitState::Partial,
                    locals,
                }
            }
        };
        let locals = variant.locals.clone();
        self.variants[id.index()].push(variant);
        Ok(locals)
    }

    /// Recreates a view of the whole source.
    fn exact(&mut self, id: TensorId, user: TensorId) -> Result<MemberTensors> {
        let tensor = self.task.graph.tensor(id);
        if !tensor.op.is_view() {
            return self.get(id, &SplitState::Mirrored, false, user);
        }
        let Some(source) = tensor.sources.first().copied().flatten() else {
            return Err(Error::invalid(format!("{id} is a view of nothing")));
        };
        let whole = self.get(source, &SplitState::Mirrored, true, user)?;
        let mut locals = Vec::new();
        for member in self.members() {
            let local = self.push(member, id, tensor.op, &[whole[member]])?;
            locals.push(Some(local));
        }
        Ok(locals)
    }

    /// Cuts a member's part out of a replicated tensor. Returns `None` if it is empty.
    fn cut(
        &mut self,
        member: usize,
        id: TensorId,
        whole: TensorId,
        axis: usize,
        runs: &AxisRuns,
    ) -> Result<Option<TensorId>> {
        let mut layout = self.made.graphs[member].tensor(whole).layout;
        if runs.len_of(member) == layout.shape()[axis] {
            return Ok(Some(whole));
        }
        let mut whole = whole;
        if layout.strides()[0] != layout.dtype().block_bytes() {
            whole = self.push(member, id, Op::Cont, &[Some(whole)])?;
            layout = self.made.graphs[member].tensor(whole).layout;
        }
        let [_, s1, s2, s3] = layout.strides();
        let block = match axis {
            0 => layout.dtype().block_len(),
            _ => 1,
        };
        let mut joined = None;
        for (start, len) in runs.ranges(member) {
            let mut shape = layout.shape();
            shape[axis] = len;
            let view = Op::View {
                shape,
                strides: [s1, s2, s3],
                offset: start / block * layout.strides()[axis],
            };
            let view = self.push(member, id, view, &[Some(whole)])?;
            let piece = self.push(member, id, Op::Cont, &[Some(view)])?;
            joined = Some(match joined {
                None => piece,
                Some(before) => self.push(
                    member,
                    id,
                    Op::Concat { dim: axis },
                    &[Some(before), Some(piece)],
                )?,
            });
        }
        Ok(joined)
    }

    fn finish(mut self) -> Result<Partition> {
        let graph = self.task.graph;
        for id in graph.ids().filter(|id| self.task.escaping[id.index()]) {
            let tensor = graph.tensor(id);
            let is_written_leaf = matches!(tensor.op, Op::Leaf)
                && tensor.stored.is_none()
                && self.is_target[id.index()];
            let is_result = self.inside.contains(&id) && tensor.view.is_none();
            if !(is_written_leaf || is_result && tensor.is_computed()) {
                continue;
            }
            let mut state = self.tensor(id)?;
            if state == SplitState::Partial {
                if self.find(id, &SplitState::Mirrored).is_none() {
                    let locals = self.find(id, &state).map(|variant| variant.locals.clone());
                    let reason = "something outside needs it".to_owned();
                    let whole = self.whole(id, state, locals.unwrap_or_default(), reason)?;
                    self.variants[id.index()].push(whole);
                }
                state = SplitState::Mirrored;
            }
            let locals = self.find(id, &state).map(|variant| variant.locals.clone());
            let locals = locals.unwrap_or_default();
            for (member, local) in locals.iter().enumerate() {
                if let Some(local) = *local {
                    self.made.graphs[member].set_output(local);
                }
            }
            self.made.outputs.push(Output {
                tensor: id,
                state,
                locals,
            });
        }
        self.end_run();
        Ok(self.made)
    }
}
