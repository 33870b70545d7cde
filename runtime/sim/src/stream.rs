//! Simulated streams and events.

use crate::device::{SimCompiled, SimDevice};
use crate::fault::Fault;
use crate::memory::{access, bytes_of};
use crate::shadow::MemoryAccess;
use crate::world::{Does, Effect, StreamPoint, StreamStep, Time, World};
use samite_core::{
    Device, Error, Event, Node, Op, PlacedGraph, Prepared, Result, RunControl, Stream, TensorId,
    TensorRef,
};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The stream that computes nodes, shared by queued work.
type Kernels = Arc<Mutex<Box<dyn Stream>>>;

pub(crate) struct SimStream {
    device: Arc<SimDevice>,
    /// Stream number in the world, if it is asynchronous.
    queue: Option<usize>,
    kernels: Kernels,
}

/// A node bound to tensor locations.
#[derive(Clone)]
struct BoundNode {
    id: TensorId,
    what: Arc<str>,
    accesses: Vec<MemoryAccess>,
    prepared: Arc<Mutex<Box<dyn Prepared>>>,
    /// Approximate duration.
    time: Time,
}

struct SimPrepared {
    device: usize,
    nodes: Vec<BoundNode>,
}

impl Prepared for SimPrepared {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// A point in a simulated stream.
#[derive(Debug)]
pub(crate) struct SimEvent {
    world: Arc<World>,
    device: usize,
    point: Mutex<Option<StreamPoint>>,
}

impl SimEvent {
    pub fn new(world: &Arc<World>, device: usize) -> Self {
        SimEvent {
            world: Arc::clone(world),
            device,
            point: Mutex::new(None),
        }
    }

    fn point(&self) -> Option<StreamPoint> {
        *self.point.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event for SimEvent {
    fn synchronize(&self) -> Result<()> {
        let point = self.point();
        let waited = self.world.with(|state| match point {
            Some(point) => state.wait_for(point),
            None => Ok(()),
        });
        let called = self
            .world
            .call(self.device, "wait for an event", Some(Fault::Synchronize));
        waited.and(called)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl SimStream {
    pub fn open(device: Arc<SimDevice>) -> Result<Self> {
        let kernels = Arc::clone(&device.kernels).open_stream()?;
        let is_queue = device.options.asynchronous;
        let queue = is_queue.then(|| device.world.with(|state| state.add_stream(device.number)));
        Ok(SimStream {
            device,
            queue,
            kernels: Arc::new(Mutex::new(kernels)),
        })
    }

    fn call(&self, what: &str, fault: Option<Fault>) -> Result<()> {
        self.device.world.call(self.device.number, what, fault)
    }

    /// Executes the steps now, or queues them as one job.
    fn submit(&mut self, steps: Vec<StreamStep>) -> Result<()> {
        let world = &self.device.world;
        match self.queue {
            Some(queue) => {
                world.with(|state| state.submit(queue, steps));
                Ok(())
            }
            None => steps
                .into_iter()
                .try_for_each(|step| world.with(|state| state.on_host(self.device.number, step))),
        }
    }

    fn bind(&self, work: &PlacedGraph<'_>, node: Node<'_>) -> Result<BoundNode> {
        self.device.check_truth(node)?;
        let tensor = node.tensor();
        let written = tensor.op.written_sources();
        let name = |id: TensorId| -> Arc<str> {
            match &*work.graph.tensor(id).name {
                "" => id.to_string().into(),
                name => name.into(),
            }
        };
        let mut accesses = Vec::new();
        for (index, id) in tensor.operands() {
            let place = work.place(id)?;
            if !self.device.supports_buffer_type(place.buffer.buffer_type()) {
                let mistake = format!(
                    "'{}' lies in memory of {}, which {} cannot use",
                    name(id),
                    place.buffer.buffer_type().name(),
                    self.device.name()
                );
                self.device.world.with(|state| state.violate(mistake));
                return Err(Error::invalid("memory of another device"));
            }
            accesses.push(MemoryAccess {
                // Of copied expert weights, only those of the experts in use are present.
                is_partial: index == 0 && matches!(tensor.op, Op::MulMatId { .. }),
                ..access(place, written.contains(&index), name(id))
            });
        }
        accesses.push(access(work.place(node.id())?, true, name(node.id())));
        if let Some(workspace) = work.workspace {
            accesses.push(access(workspace, true, "workspace"));
        }
        let places = work
            .places
            .iter()
            .map(|place| place.as_ref().map(bytes_of).transpose());
        let places = places.collect::<Result<Vec<_>>>()?;
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let prepared = kernels.prepare(PlacedGraph {
            graph: work.graph,
            nodes: &[node.id()],
            places: &places,
            workspace: None,
            compiled: None,
        })?;
        Ok(BoundNode {
            id: node.id(),
            what: format!("{} {}", node.op().name(), node.id()).into(),
            accesses,
            prepared: Arc::new(Mutex::new(prepared)),
            time: 1_000 + 10 * node.layout().elements() as Time,
        })
    }

    /// Returns the steps of a copy: one, or several that other work can interleave with.
    fn copy_steps(
        &self,
        what: &str,
        from: impl Fn(usize, &mut [u8]) -> Result<()> + Send + Clone + 'static,
        to: &TensorRef,
        accesses: [Option<MemoryAccess>; 2],
        range: std::ops::Range<usize>,
    ) -> Result<Vec<StreamStep>> {
        let to = bytes_of(to)?;
        let is_torn = self.device.world.with(|state| {
            let is_torn = range.len() > 1 && state.faults.strikes(Fault::Torn);
            state.copies.0 += 1;
            state.copies.1 += range.len();
            is_torn
        });
        let middle = range.start + range.len() / 2;
        let pieces = if is_torn {
            vec![range.start..middle, middle..range.end]
        } else {
            vec![range]
        };
        let steps = pieces.into_iter().map(|piece| {
            let (from, to) = (from.clone(), to.clone());
            let mut bytes = vec![0; piece.len()];
            let effect: Effect = Box::new(move || {
                from(piece.start, &mut bytes)?;
                to.write(piece.start, &bytes)
            });
            StreamStep {
                what: what.into(),
                accesses: accesses.iter().flatten().cloned().collect(),
                does: Does::Copy(5_000, effect),
            }
        });
        Ok(steps.collect())
    }
}

impl Stream for SimStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        self.call("prepare", Some(Fault::Prepare))?;
        work.check()?;
        if let Some(compiled) = work.compiled {
            let compiled = compiled.as_any().downcast_ref::<SimCompiled>();
            let fits = SimCompiled::of(self.device.number, work.computed());
            if compiled != Some(&fits) {
                let mistake = format!("{} binds what was compiled for others", self.device.name());
                self.device.world.with(|state| state.violate(mistake));
            }
        }
        let workspace = work.workspace.map_or(0, |place| place.layout().bytes());
        if workspace < self.device.options.workspace {
            return Err(Error::invalid("the workspace is missing or too small"));
        }
        let nodes = work.computed().map(|node| self.bind(&work, node));
        Ok(Box::new(SimPrepared {
            device: self.device.number,
            nodes: nodes.collect::<Result<_>>()?,
        }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        self.call("run", None)?;
        let prepared = match prepared.as_any().downcast_ref::<SimPrepared>() {
            Some(prepared) if prepared.device == self.device.number => prepared,
            _ => return Err(Error::invalid("work that another device prepared")),
        };
        let start = self.device.world.now();
        let steps = prepared.nodes.iter().map(|node| {
            let (kernels, prepared) = (Arc::clone(&self.kernels), Arc::clone(&node.prepared));
            let (cancel, observer) = (control.cancel.clone(), control.observer.cloned());
            let (id, time) = (node.id, node.time);
            let begin = Duration::from_nanos(self.device.world.now() - start);
            let effect: Effect = Box::new(move || {
                cancel.check()?;
                let mut kernels = kernels.lock().unwrap_or_else(PoisonError::into_inner);
                let mut prepared = prepared.lock().unwrap_or_else(PoisonError::into_inner);
                let control = RunControl {
                    cancel: &cancel,
                    observer: None,
                };
                kernels.run(&mut **prepared, control)?;
                if let Some(observer) = &observer {
                    observer.ran(id, begin, Duration::from_nanos(time));
                }
                Ok(())
            });
            StreamStep {
                what: Arc::clone(&node.what),
                accesses: node.accesses.clone(),
                does: Does::Work(node.time, effect),
            }
        });
        let steps = steps.collect();
        self.submit(steps)
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        self.call("queue a write", Some(Fault::Write))?;
        let mut written = access(to, true, "a queued write");
        written.bytes.start += offset;
        written.bytes.end = written.bytes.start + data.len();
        let data: Arc<[u8]> = data.into();
        let range = offset..offset + data.len();
        let from = move |at: usize, out: &mut [u8]| {
            let at = at - offset;
            out.copy_from_slice(&data[at..at + out.len()]);
            Ok(())
        };
        let steps = self.copy_steps("a write", from, to, [None, Some(written)], range)?;
        self.submit(steps)
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        self.call("queue a copy", Some(Fault::Copy))?;
        let (source, target) = (from.buffer.buffer_type(), to.buffer.buffer_type());
        if !self.device.can_copy(source, target) || from.layout() != to.layout() {
            return Err(Error::invalid(format!(
                "a copy from {} to {}",
                source.name(),
                target.name()
            )));
        }
        let accesses = [
            Some(access(from, false, "the source of a copy")),
            Some(access(to, true, "the target of a copy")),
        ];
        let source = bytes_of(from)?;
        let from = move |at: usize, out: &mut [u8]| source.read(at, out);
        let range = 0..to.layout().bytes();
        let steps = self.copy_steps("a copy", from, to, accesses, range)?;
        self.submit(steps)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        self.call("record an event", Some(Fault::Record))?;
        let event = match event.as_any().downcast_ref::<SimEvent>() {
            Some(event) if event.device == self.device.number => event,
            _ => return Err(Error::invalid("an event of another device")),
        };
        let point = self
            .queue
            .map(|queue| self.device.world.with(|state| state.end_of(queue)));
        *event.point.lock().unwrap_or_else(PoisonError::into_inner) = point;
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        self.call("wait", Some(Fault::Wait))?;
        let (Some(event), Some(_)) = (event.as_any().downcast_ref::<SimEvent>(), self.queue) else {
            return event.synchronize();
        };
        let Some(point) = event.point() else {
            return Ok(());
        };
        self.submit(vec![StreamStep {
            what: "a wait".into(),
            accesses: Vec::new(),
            does: Does::Wait(point),
        }])
    }

    fn synchronize(&mut self) -> Result<()> {
        // The queue is drained even if the call then fails.
        let done = self.queue.map_or(Ok(()), |queue| {
            self.device.world.with(|state| state.synchronize(queue))
        });
        let called = self.call("synchronize", Some(Fault::Synchronize));
        done.and(called)
    }
}
