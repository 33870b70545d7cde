//! Watches the nodes of a context's graphs.

use crate::error::Result;
use crate::rules::glob;
use samite_core::{CancelToken, Device, Error, Graph, Node, TensorRef};
use samite_sched::{Scheduler, Watch};
use std::sync::Arc;

/// A computed result.
#[derive(Debug)]
pub struct WatchedResult<'a> {
    /// Node, or a view of its result, in the graph.
    pub node: Node<'a>,
    /// Value of the result.
    pub value: &'a TensorRef,
    /// Device that computed it.
    pub device: &'a Arc<dyn Device>,
    /// Number of micro-batches that ran since the watcher was set.
    pub step: usize,
}

type Begin = dyn FnMut(&Graph) + Send;
type Wants = dyn FnMut(Node<'_>) -> bool + Send;
type See = dyn FnMut(&WatchedResult<'_>) -> Result<Watch, Error> + Send;

/// Observes the results of nodes while a [`Context`](crate::Context) decodes, right after each is
/// computed.
///
/// The watcher selects the nodes before a graph runs. Adjacent nodes that it does not select run
/// together. Views are observed after the node whose result they refer to. Key shifts in the cache
/// are not observed.
pub struct Watcher {
    begin: Option<Box<Begin>>,
    wants: Box<Wants>,
    see: Box<See>,
    steps: usize,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut watcher = f.debug_struct("Watcher");
        watcher.field("steps", &self.steps).finish_non_exhaustive()
    }
}

impl Watcher {
    /// Calls `see` with the nodes for which `wants` returns true. `see` stops the decode by
    /// returning [`Watch::Stop`], which results in [`Error::Stopped`], or an error.
    pub fn new(
        wants: impl FnMut(Node<'_>) -> bool + Send + 'static,
        see: impl FnMut(&WatchedResult<'_>) -> Result<Watch, Error> + Send + 'static,
    ) -> Self {
        Watcher {
            begin: None,
            wants: Box::new(wants),
            see: Box::new(see),
            steps: 0,
        }
    }

    /// Calls `begin` with each graph before nodes are selected.
    #[must_use]
    pub fn beginning_with(self, begin: impl FnMut(&Graph) + Send + 'static) -> Self {
        Watcher {
            begin: Some(Box::new(begin)),
            ..self
        }
    }

    /// Observes the nodes whose names match one of the patterns.
    pub fn of_names(
        names: NodeNames,
        see: impl FnMut(&WatchedResult<'_>) -> Result<Watch, Error> + Send + 'static,
    ) -> Self {
        Self::new(move |node| names.matches(&node.tensor().name), see)
    }

    /// Runs the loaded graph.
    pub(crate) fn run(
        &mut self,
        scheduler: &mut Scheduler,
        graph: &Graph,
        cancel: &CancelToken,
    ) -> Result<()> {
        let Watcher {
            begin,
            wants,
            see,
            steps,
        } = self;
        if let Some(begin) = begin {
            begin(graph);
        }
        let mut run = scheduler.watch(cancel, |id| wants(graph.node(id)))?;
        while let Some((id, value)) = run.advance()? {
            let plan = run.plan()?;
            let device = plan.placement().devices[id.index()];
            let devices = plan.devices();
            let seen = see(&WatchedResult {
                node: graph.node(id),
                value: &value,
                device: devices.get(device.unwrap_or(devices.last())),
                step: *steps,
            });
            match seen {
                Ok(Watch::Continue) => {}
                Ok(Watch::Stop) => return Ok(run.fail(Error::Stopped)?),
                Err(error) => return Ok(run.fail(error)?),
            }
        }
        *steps += 1;
        Ok(())
    }
}

/// Patterns for names of nodes, such as `l_out-*`: `*` matches any characters, `?` matches one.
#[derive(Clone, Debug)]
pub struct NodeNames(Vec<(String, fancy_regex::Regex)>);

impl NodeNames {
    /// Compiles patterns.
    ///
    /// # Errors
    /// Returns an error if a pattern is too long.
    pub fn new<P: AsRef<str>>(patterns: impl IntoIterator<Item = P>) -> Result<Self> {
        let read = |pattern: P| {
            let pattern = pattern.as_ref();
            Ok((pattern.to_owned(), glob(pattern)?))
        };
        let patterns = patterns.into_iter().map(read);
        Ok(NodeNames(patterns.collect::<Result<_>>()?))
    }

    /// Returns whether one of the patterns matches `name`.
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|(_, regex)| is_match(regex, name))
    }

    /// Returns the patterns that match none of `names`.
    pub fn without_match<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Vec<&str> {
        let unmatched = self
            .0
            .iter()
            .filter(|(_, regex)| !names.clone().any(|name| is_match(regex, name)));
        unmatched.map(|(pattern, _)| &**pattern).collect()
    }
}

fn is_match(regex: &fancy_regex::Regex, name: &str) -> bool {
    // Without backreferences, matching has no limit that it could exceed.
    regex.is_match(name).unwrap_or(false)
}
