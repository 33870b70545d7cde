//! Watching the nodes of a context's graphs.

use crate::error::Result;
use crate::rules::glob;
use samite_core::{CancelToken, Device, Error, Graph, Node, TensorRef};
use samite_sched::{Scheduler, Watch};
use std::sync::Arc;

/// A result that is there.
#[derive(Debug)]
pub struct Seen<'a> {
    /// The node, or a view of its result, in the graph.
    pub node: Node<'a>,
    /// Its value.
    pub value: &'a TensorRef,
    /// The device that computed it.
    pub device: &'a Arc<dyn Device>,
    /// How many micro-batches ran since the watcher came.
    pub step: usize,
}

type Begin = dyn FnMut(&Graph) + Send;
type Wants = dyn FnMut(Node<'_>) -> bool + Send;
type See = dyn FnMut(&Seen<'_>) -> Result<Watch, Error> + Send;

/// Looks at the results of nodes while a [`Context`](crate::Context) decodes, each right after it was computed.
///
/// It says which nodes it wants before a graph runs. Nodes that it does not want run together, as far as they are neighbours. Views are seen after
/// the node whose result they show. Moving keys in the cache is not watched.
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
    /// Shows to `see` what it `wants`. `see` stops the decoding with [`Watch::Stop`], which is [`Error::Stopped`], or with an error of its own.
    pub fn new(
        wants: impl FnMut(Node<'_>) -> bool + Send + 'static,
        see: impl FnMut(&Seen<'_>) -> Result<Watch, Error> + Send + 'static,
    ) -> Self {
        Watcher {
            begin: None,
            wants: Box::new(wants),
            see: Box::new(see),
            steps: 0,
        }
    }

    /// The same, but `begin` sees each graph before it is asked what is wanted of it.
    #[must_use]
    pub fn beginning_with(self, begin: impl FnMut(&Graph) + Send + 'static) -> Self {
        Watcher {
            begin: Some(Box::new(begin)),
            ..self
        }
    }

    /// Shows the nodes whose names one of the patterns describes.
    pub fn of_names(
        names: NodeNames,
        see: impl FnMut(&Seen<'_>) -> Result<Watch, Error> + Send + 'static,
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
            let seen = see(&Seen {
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

/// Patterns of names of nodes, such as `l_out-*`: `*` stands for any characters, `?` for one.
#[derive(Clone, Debug)]
pub struct NodeNames(Vec<(String, fancy_regex::Regex)>);

impl NodeNames {
    /// Reads patterns.
    ///
    /// # Errors
    /// For a pattern that is too long.
    pub fn new<P: AsRef<str>>(patterns: impl IntoIterator<Item = P>) -> Result<Self> {
        let read = |pattern: P| {
            let pattern = pattern.as_ref();
            Ok((pattern.to_owned(), glob(pattern)?))
        };
        let patterns = patterns.into_iter().map(read);
        Ok(NodeNames(patterns.collect::<Result<_>>()?))
    }

    /// Whether one of them describes `name`.
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|(_, regex)| is_match(regex, name))
    }

    /// The patterns that describe none of `names`.
    pub fn without_match<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Vec<&str> {
        let unmatched = self
            .0
            .iter()
            .filter(|(_, regex)| !names.clone().any(|name| is_match(regex, name)));
        unmatched.map(|(pattern, _)| &**pattern).collect()
    }
}

fn is_match(regex: &fancy_regex::Regex, name: &str) -> bool {
    // Without references back, matching has no limit that could be exceeded.
    regex.is_match(name).unwrap_or(false)
}
