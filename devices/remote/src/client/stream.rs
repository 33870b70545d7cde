//! A stream of a server's device.
//!
//! Commands are collected until a run ends the batch or a caller waits. A request with a run also
//! includes the reads that followed the last run of the same graph: a token is one request and one
//! reply.

use super::device::RemoteDevice;
use super::memory::{RemoteBuffer, ServerDevice, command, read_into};
use crate::convert::JsonSubgraph;
use crate::proto::{self, command::Command as Kind};
use samite_core::{
    CancelToken, Device, Error, Event, PlacedGraph, Prepared, Result, Rows, RunControl, Stream,
    Support, TensorRef,
};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum bytes to collect before sending.
const MAX_PENDING: usize = 1 << 20;

/// Maximum bytes of reads that a run includes.
const MAX_FORESEEN: usize = 1 << 20;

pub(super) struct RemoteStream {
    device: Arc<RemoteDevice>,
    /// Sender number of the stream's failures.
    number: u64,
    pending: Vec<proto::Command>,
    pending_bytes: usize,
    /// Number of the last request.
    last: u64,
    /// Cancels the last run.
    cancel: Option<CancelToken>,
    run: Option<LastRun>,
    /// Events of other streams that the work depends on.
    awaited: Vec<(u64, u64)>,
}

/// The last run, as long as nothing is queued after it.
struct LastRun {
    /// Number of its request.
    number: u64,
    /// Reads that the request included.
    foreseen: Vec<proto::Command>,
    /// Results of the request, once received.
    results: Option<Vec<proto::Result>>,
    reads: Arc<Mutex<Vec<proto::Command>>>,
}

impl LastRun {
    /// Waits for the included reads, once.
    fn wait(&mut self, far: &ServerDevice, cancel: Option<&CancelToken>) -> Result<()> {
        if self.results.is_some() || self.foreseen.is_empty() {
            return Ok(());
        }
        let waited = far.endpoint.wait(&far.name, self.number, cancel);
        self.results = Some(waited.as_ref().map_or(Vec::new(), Clone::clone));
        waited.map(drop)
    }
}

/// A graph at the server.
struct RemoteGraph {
    device: Arc<RemoteDevice>,
    number: u64,
    is_empty: bool,
    /// Reads after the last run.
    reads: Arc<Mutex<Vec<proto::Command>>>,
}

impl Prepared for RemoteGraph {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Drop for RemoteGraph {
    fn drop(&mut self) {
        if !self.is_empty {
            let far = &self.device.far;
            let _ = far.tell(vec![command(Kind::Forget(self.number))]);
        }
    }
}

impl RemoteStream {
    pub fn new(device: Arc<RemoteDevice>) -> Self {
        RemoteStream {
            number: device.far.endpoint.next(),
            device,
            pending: Vec::new(),
            pending_bytes: 0,
            last: 0,
            cancel: None,
            run: None,
            awaited: Vec::new(),
        }
    }

    fn far(&self) -> &ServerDevice {
        &self.device.far
    }

    fn buffer<'a>(&self, tensor: &'a TensorRef) -> Result<&'a RemoteBuffer> {
        let buffer = tensor.buffer.as_any().downcast_ref::<RemoteBuffer>();
        let buffer = buffer.filter(|buffer| self.device.owns(buffer));
        buffer.ok_or_else(|| {
            Error::invalid(format!(
                "{} was given a tensor ({}) in memory of type '{}'",
                self.device.name(),
                tensor.layout(),
                tensor.buffer.buffer_type().name()
            ))
        })
    }

    /// Sends the collected commands.
    fn flush(&mut self, is_awaited: bool) -> Result<u64> {
        let commands = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        if !commands.is_empty() || is_awaited {
            let far = &self.device.far;
            self.last = far
                .endpoint
                .send(&far.name, self.number, commands, is_awaited)?;
        }
        Ok(self.last)
    }

    /// Collects commands that modify something.
    fn queue(&mut self, commands: Vec<proto::Command>, bytes: usize) -> Result<()> {
        self.forget_run();
        self.pending.extend(commands);
        self.pending_bytes += bytes;
        if self.pending_bytes > MAX_PENDING {
            self.flush(false)?;
        }
        Ok(())
    }

    fn forget_run(&mut self) {
        if let Some(LastRun {
            number,
            results: None,
            foreseen,
            ..
        }) = self.run.take()
            && !foreseen.is_empty()
        {
            self.far().endpoint.abandon(self.number, number);
        }
    }

    /// Returns the result of `read` if the last run included it.
    fn foreseen(&mut self, read: &proto::Command) -> Result<Option<proto::Result>> {
        let device = Arc::clone(&self.device);
        let endpoint = &device.far.endpoint;
        let Some(run) = &mut self.run else {
            return Ok(None);
        };
        let mut reads = run.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = reads.iter().chain([read]).map(size).sum();
        if bytes <= MAX_FORESEEN && !reads.contains(read) {
            reads.push(read.clone());
        }
        drop(reads);
        let at = run.foreseen.iter().position(|known| known == read);
        // Another request may have changed the data since.
        let (Some(at), true) = (at, endpoint.last() == run.number) else {
            return Ok(None);
        };
        let waited = run.wait(&device.far, self.cancel.as_ref());
        let results = run.results.as_ref();
        let result = results.and_then(|results| results.get(at)).cloned();
        self.first_failure(waited)?;
        Ok(result)
    }

    /// Waits for all work and reports its failure, if any.
    fn finish(&mut self) -> Result<()> {
        let device = Arc::clone(&self.device);
        let far = &device.far;
        if let Some(run) = &mut self.run {
            let waited = run.wait(far, self.cancel.as_ref());
            self.first_failure(waited)?;
        }
        if !self.pending.is_empty() || !far.endpoint.is_done(self.last) {
            let number = self.flush(true)?;
            self.reply(number)?;
        }
        self.failure()
    }

    /// Waits for the reply to a request.
    fn reply(&mut self, number: u64) -> Result<Vec<proto::Result>> {
        let far = self.far();
        let waited = far.endpoint.wait(&far.name, number, self.cancel.as_ref());
        self.first_failure(waited)
    }

    /// Returns the result of a wait. If it failed, an earlier failure of a request without a
    /// waiting caller takes precedence as the cause.
    fn first_failure<T>(&mut self, waited: Result<T>) -> Result<T> {
        match waited {
            Err(error) if !matches!(error, Error::DeviceLost { .. }) => {
                self.failure()?;
                Err(error)
            }
            waited => waited,
        }
    }

    /// Returns a failure of completed work, here or in streams that this one waited for.
    fn failure(&mut self) -> Result<()> {
        for (stream, number) in std::mem::take(&mut self.awaited) {
            let far = self.far();
            far.endpoint.check(&far.name, stream, number)?;
        }
        let far = self.far();
        far.endpoint.failure(&far.name, self.number)
    }
}

fn size(read: &proto::Command) -> usize {
    match &read.command {
        Some(Kind::Read(read)) => usize::try_from(read.size).unwrap_or(usize::MAX),
        _ => 0,
    }
}

impl Stream for RemoteStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let graph = work.graph;
        let ids: Vec<_> = work.computed().map(|node| node.id()).collect();
        for (id, support) in ids.iter().zip(self.device.supports_each(graph, &ids)) {
            if let Support::No(reason) = support {
                let what = graph.node(*id).op().to_string();
                return Err(Error::unsupported(self.device.name(), what, reason));
            }
        }
        let part = JsonSubgraph::new(graph, work.nodes);
        let places = part.tensors.iter().map(|&id| {
            let tensor = graph.tensor(id);
            if tensor.layout.is_empty() {
                return Ok(proto::Place::default());
            }
            let place = work.place(id)?;
            if *place.layout() != tensor.layout {
                return Err(Error::invalid(format!(
                    "{}: '{}' ({}) lies somewhere as {}",
                    self.device.name(),
                    tensor.name,
                    tensor.layout,
                    place.layout()
                )));
            }
            Ok(self.buffer(place)?.place(place.slot))
        });
        let places = places.collect::<Result<Vec<_>>>()?;
        let workspace = match work.workspace {
            Some(workspace) => Some(self.buffer(workspace)?.place(workspace.slot)),
            None => None,
        };
        let prepared = RemoteGraph {
            device: Arc::clone(&self.device),
            number: self.far().endpoint.next(),
            is_empty: ids.is_empty(),
            reads: Arc::default(),
        };
        if !prepared.is_empty {
            // Buffers that are freed later live until the graph is removed.
            self.far().call(vec![command(Kind::Prepare(proto::Prepare {
                graph: prepared.number,
                device: self.far().number,
                json: part.json().into(),
                places,
                workspace,
            }))])?;
        }
        Ok(Box::new(prepared))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        control.cancel.check()?;
        let graph = prepared.as_any().downcast_mut::<RemoteGraph>();
        let graph = graph.filter(|graph| Arc::ptr_eq(&graph.device, &self.device));
        let Some(graph) = graph else {
            return Err(Error::invalid(format!(
                "{} was given work that another device prepared",
                self.device.name()
            )));
        };
        if graph.is_empty {
            return Ok(());
        }
        let run = command(Kind::Run(proto::Run {
            graph: graph.number,
            deadline: self.device.deadline,
        }));
        self.queue(vec![run], 0)?;
        self.cancel = Some(control.cancel.clone());
        let mut reads = graph.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let foreseen = std::mem::take(&mut *reads);
        drop(reads);
        self.pending.extend(foreseen.iter().cloned());
        let number = self.flush(!foreseen.is_empty())?;
        self.run = Some(LastRun {
            number,
            foreseen,
            results: None,
            reads: Arc::clone(&graph.reads),
        });
        Ok(())
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        to.check_range(offset, data.len())?;
        let writes = self.buffer(to)?.write_commands(to.slot, offset, data)?;
        self.queue(writes, data.len())
    }

    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        from.check_range(offset, out.len())?;
        let reads = self
            .buffer(from)?
            .read_commands(from.slot, offset, out.len())?;
        if let ([(read, _)], true) = (&*reads, self.pending.is_empty())
            && let Some(result) = self.foreseen(read)?
        {
            read_into(&self.far().name, &[result], out)?;
            return self.failure();
        }
        let device = Arc::clone(&self.device);
        let far = &device.far;
        let mut rest = out;
        for (read, len) in reads {
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(len);
            self.pending.push(read);
            let number = self.flush(true)?;
            let results = self.reply(number)?;
            read_into(&far.name, &results, piece)?;
            rest = behind;
        }
        self.failure()
    }

    fn write_rows(&mut self, to: &TensorRef, rows: Rows, data: &[u8]) -> Result<()> {
        let buffer = self.buffer(to)?;
        let mut writes = Vec::new();
        rows.each(to.layout().bytes(), data.len(), |offset, piece| {
            writes.extend(buffer.write_commands(to.slot, offset, &data[piece])?);
            Ok(())
        })?;
        self.queue(writes, data.len())
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        if from.layout() != to.layout() {
            return Err(Error::shape(format!(
                "copy of {} to {}: the layouts differ",
                from.layout(),
                to.layout()
            )));
        }
        match self.buffer(to)?.copy_command(to.slot, from)? {
            Some(copy) => self.queue(vec![copy], 0),
            None => Err(Error::unsupported(
                self.device.name(),
                "a copy from elsewhere",
                "it copies between its own tensors only",
            )),
        }
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = event.as_any().downcast_ref::<RemoteEvent>();
        let event = event.filter(|event| Arc::ptr_eq(&event.far, &self.device.far));
        let event = event.ok_or_else(|| {
            Error::invalid(format!(
                "{}: an event of another device",
                self.device.name()
            ))
        })?;
        if !self.pending.is_empty() {
            // A run with included reads remains the last one, because nothing is pending after it.
            self.flush(false)?;
        }
        let mut point = event.point.lock().unwrap_or_else(PoisonError::into_inner);
        *point = Some((self.number, self.last));
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        match event.as_any().downcast_ref::<RemoteEvent>() {
            // The server executes everything in order. A failure of the other stream is reported
            // when this one is synchronized.
            Some(event) if Arc::ptr_eq(&event.far.endpoint, &self.device.far.endpoint) => {
                if let Some((stream, number)) = event.point() {
                    self.awaited.retain(|(known, _)| *known != stream);
                    self.awaited.push((stream, number));
                }
                Ok(())
            }
            _ => event.synchronize(),
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.finish()
    }
}

impl Drop for RemoteStream {
    fn drop(&mut self) {
        self.forget_run();
        let _ = self.flush(false);
    }
}

/// A point in the requests of a stream.
#[derive(Debug)]
pub(super) struct RemoteEvent {
    far: Arc<ServerDevice>,
    /// Stream number and its last request.
    point: Mutex<Option<(u64, u64)>>,
}

impl RemoteEvent {
    pub fn new(far: &Arc<ServerDevice>) -> Self {
        RemoteEvent {
            far: Arc::clone(far),
            point: Mutex::default(),
        }
    }

    fn point(&self) -> Option<(u64, u64)> {
        *self.point.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event for RemoteEvent {
    fn synchronize(&self) -> Result<()> {
        let Some((stream, number)) = self.point() else {
            return Ok(());
        };
        let endpoint = &self.far.endpoint;
        endpoint.reach(&self.far.name, number)?;
        endpoint.check(&self.far.name, stream, number)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
