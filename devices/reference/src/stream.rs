//! Streams, which check work when it is prepared, and run it node by node.

use crate::buffer::memory;
use crate::call::{Call, NamedTensor};
use crate::compiled::{CompiledNodes, kernel_of};
use crate::device::ReferenceDevice;
use crate::event::ReferenceEvent;
use crate::kernels::Kernel;
use crate::queue::Queue;
use crate::value::copied;
use samite_core::{
    CancelToken, Device, Error, Event, GuardedCopy, Node, PlacedGraph, Prepared, Result,
    RunControl, RunObserver, Stream, TensorId, TensorRef,
};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(crate) struct ReferenceStream {
    device: Arc<ReferenceDevice>,
    /// Thread of an asynchronous stream.
    queue: Option<Queue>,
}

/// Nodes with their kernels and memory.
struct Program {
    steps: Vec<(Call, Kernel)>,
    delays: Vec<(String, Duration)>,
    /// Scratch memory, which is overwritten by every node.
    workspace: Option<TensorRef>,
}

struct PreparedProgram {
    device: Arc<str>,
    program: Arc<Program>,
}

impl Prepared for PreparedProgram {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Program {
    fn run(&self, cancel: &CancelToken, observer: Option<&Arc<dyn RunObserver>>) -> Result<()> {
        let begin = Instant::now();
        for (number, (call, kernel)) in self.steps.iter().enumerate() {
            cancel.check()?;
            let start = begin.elapsed();
            if let Some(workspace) = &self.workspace {
                let buffer = &workspace.buffer;
                let noise = 0x5a ^ number as u8;
                buffer.fill(workspace.slot, 0, workspace.layout().bytes(), noise)?;
            }
            let delays = self.delays.iter();
            for (_, delay) in delays.filter(|(name, _)| name == call.op.name()) {
                std::thread::sleep(*delay);
            }
            kernel.run(call)?;
            if let Some(observer) = observer {
                observer.ran(call.id, start, begin.elapsed().saturating_sub(start));
            }
        }
        Ok(())
    }
}

impl ReferenceStream {
    pub fn open(device: Arc<ReferenceDevice>) -> Result<Self> {
        let queue = device
            .options()
            .asynchronous
            .then(|| Queue::start(device.name(), device.options().latch.clone()))
            .transpose()?;
        Ok(ReferenceStream { device, queue })
    }

    /// Runs or queues `job`, depending on the kind of stream. Faults occur when the job runs.
    fn submit(
        &mut self,
        what: &'static str,
        job: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let device = Arc::clone(&self.device);
        let job = move || {
            device.check(what)?;
            job()
        };
        match &mut self.queue {
            Some(queue) => queue.submit(job),
            None => job(),
        }
    }

    fn operand(&self, work: &PlacedGraph<'_>, id: TensorId) -> Result<NamedTensor> {
        let tensor = work.graph.tensor(id);
        let place = work.place(id)?;
        let name = if tensor.name.is_empty() {
            id.to_string()
        } else {
            tensor.name.to_string()
        };
        if *place.layout() != tensor.layout {
            return Err(Error::invalid(format!(
                "'{name}' is {} in the graph but {} in memory",
                tensor.layout,
                place.layout()
            )));
        }
        if !self.device.supports_buffer_type(place.buffer.buffer_type()) {
            return Err(Error::invalid(format!(
                "'{name}' lies in memory of type '{}', which {} cannot use",
                place.buffer.buffer_type().name(),
                self.device.name()
            )));
        }
        Ok(NamedTensor {
            name,
            tensor: place.clone(),
        })
    }

    fn bind(
        &self,
        work: &PlacedGraph<'_>,
        number: usize,
        node: Node<'_>,
    ) -> Result<(Call, Kernel)> {
        let compiled = work
            .compiled
            .map(|compiled| {
                let own = compiled.as_any().downcast_ref::<CompiledNodes>();
                own.ok_or_else(|| Error::invalid("work that another device compiled"))
            })
            .transpose()?;
        let kernel = match compiled {
            Some(compiled) => compiled.kernel(number, node)?,
            None => kernel_of(&self.device, node)?,
        };
        let sources = node
            .tensor()
            .sources
            .iter()
            .map(|source| source.map(|id| self.operand(work, id)).transpose())
            .collect::<Result<_>>()?;
        let call = Call {
            device: self.device.shared_name(),
            op: *node.op(),
            id: node.id(),
            sources,
            result: self.operand(work, node.id())?,
        };
        Ok((call, kernel))
    }
}

impl Stream for ReferenceStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        self.device.check("prepare")?;
        work.check()?;
        if work.compiled.is_none() {
            self.device.count_compilation();
        }
        let steps = work
            .computed()
            .enumerate()
            .map(|(number, node)| self.bind(&work, number, node))
            .collect::<Result<_>>()?;
        let needed = self.device.options().workspace;
        let workspace = work
            .workspace
            .filter(|place| place.layout().bytes() >= needed);
        if needed > 0 && workspace.is_none() {
            return Err(Error::invalid("the workspace is missing or too small"));
        }
        Ok(Box::new(PreparedProgram {
            device: self.device.shared_name(),
            program: Arc::new(Program {
                steps,
                delays: self.device.options().delays.clone(),
                workspace: workspace.cloned(),
            }),
        }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let program = match prepared.as_any().downcast_ref::<PreparedProgram>() {
            Some(prepared) if *prepared.device == *self.device.name() => &prepared.program,
            _ => {
                return Err(Error::invalid(format!(
                    "{} was given work that another device prepared",
                    self.device.name()
                )));
            }
        };
        if self.queue.is_none() {
            self.device.check("run")?;
            return program.run(control.cancel, control.observer);
        }
        let (program, cancel) = (Arc::clone(program), control.cancel.clone());
        let observer = control.observer.cloned();
        self.submit("run", move || program.run(&cancel, observer.as_ref()))
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        match &mut self.queue {
            // The buffer checks for faults.
            Some(queue) => {
                let (to, data) = (to.clone(), copied(data)?);
                queue.submit(move || to.write(offset, &data))
            }
            None => to.write(offset, data),
        }
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        let (source, destination) = (from.buffer.buffer_type(), to.buffer.buffer_type());
        if !self.device.can_copy(source, destination) {
            return Err(Error::unsupported(
                self.device.name(),
                format!("a copy from {} to {}", source.name(), destination.name()),
                "its streams copy only between its own memory and the host's, if at all",
            ));
        }
        if from.layout() != to.layout() {
            return Err(Error::shape(format!(
                "copy of {} to {}: the layouts differ",
                from.layout(),
                to.layout()
            )));
        }
        let (from, to) = (from.clone(), to.clone());
        let begin = move || {
            GuardedCopy::begin(
                (memory(&from.buffer)?, from.slot.offset),
                (memory(&to.buffer)?, to.slot.offset),
                from.layout().bytes(),
            )
        };
        if self.queue.is_none() {
            return self.submit("copy", move || {
                begin()?.end();
                Ok(())
            });
        }
        // Like hardware that copies on its own: the bytes are in use from the start to the end,
        // which is another piece of work.
        let under_way = Arc::new(Mutex::new(None));
        let begun = Arc::clone(&under_way);
        self.submit("copy", move || {
            *begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(begin()?);
            Ok(())
        })?;
        self.queue.as_mut().map_or(Ok(()), |queue| {
            queue.submit(move || {
                let copy = under_way
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take();
                if let Some(copy) = copy {
                    copy.end();
                }
                Ok(())
            })
        })
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        self.device.check("record")?;
        match event.as_any().downcast_ref::<ReferenceEvent>() {
            Some(event) if *event.device == *self.device.name() => {
                event.set(self.queue.as_ref().map(Queue::end));
                Ok(())
            }
            _ => Err(Error::invalid(format!(
                "{} was given an event of another device",
                self.device.name()
            ))),
        }
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        match event.as_any().downcast_ref::<ReferenceEvent>() {
            Some(event) if self.queue.is_some() => {
                let point = event.point();
                self.submit("wait", move || point.map_or(Ok(()), |point| point.wait()))
            }
            _ => {
                self.device.check("wait")?;
                event.synchronize()
            }
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        // The queue is emptied even if the call then fails.
        let result = self.queue.as_ref().map_or(Ok(()), Queue::synchronize);
        self.device.check("synchronize").and(result)
    }
}
