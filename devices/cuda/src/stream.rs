//! Streams: bind launches to addresses, queue them, record them as graphs.

use crate::buffer::CudaBuffer;
use crate::device::CudaDevice;
use crate::driver::{Address, DriverErrorKind, GraphHandle, KernelLaunch};
use crate::event::CudaEvent;
use crate::failures::{Failures, Fallible};
use crate::gpu::{DriverEvent, DriverStream, OpenedCard};
use crate::packed::packed_rows;
use crate::plan::{
    KernelParameters, LaunchOperand, OperandSource, PlannedLaunch, TensorParameters,
};
use bytemuck::Zeroable;
use samite_core::environment::Instant;
use samite_core::{
    Buffer, CancelToken, DType, Device, Error, Event, Node, PlacedGraph, Prepared, Result,
    RunControl, Stream, TensorId, TensorRef,
};
use samite_fusion::{Memory, NodeLaunch};
use std::any::Any;
use std::sync::Arc;

/// Launches between two checks for cancellation. At most two such pieces are queued at once, so
/// that a long run can be cancelled.
const PIECE: usize = 32;

/// Maximum number of threads of all launches together for which they are recorded as a graph. A
/// longer run gains nothing, and a graph cannot be cancelled.
const MAX_GRAPH_THREADS: u64 = 1 << 31;

/// A launch with addresses, and its node.
struct BoundLaunch {
    node: TensorId,
    launch: KernelLaunch,
}

/// Work that is bound to addresses.
struct PreparedLaunches {
    device: Arc<CudaDevice>,
    opened: Arc<OpenedCard>,
    launches: Vec<BoundLaunch>,
    fallible: Arc<Fallible>,
    failures: Arc<Failures>,
    /// Buffers of all operands, which must outlive the work.
    _buffers: Vec<Arc<dyn Buffer>>,
    runs: u64,
    graph: Option<GraphHandle>,
    /// True if later runs replay a graph: the device records them, the work is short, and the
    /// driver did not fail to record it.
    has_graph: bool,
    /// Stream of the last run, which must be done before the graph goes.
    last: Option<Arc<DriverStream>>,
}

/// Returns whether recording launches as a graph is worthwhile.
fn are_short(launches: &[BoundLaunch]) -> bool {
    let threads =
        |step: &BoundLaunch| u64::from(step.launch.groups) * u64::from(step.launch.threads);
    launches.iter().map(threads).sum::<u64>() <= MAX_GRAPH_THREADS
}

impl Drop for PreparedLaunches {
    fn drop(&mut self) {
        let done = self
            .last
            .take()
            .is_none_or(|last| last.synchronize().is_ok());
        if let Some(graph) = self.graph.filter(|_| done && !self.opened.is_lost()) {
            self.opened.context.destroy_graph(graph);
        }
    }
}

impl Prepared for PreparedLaunches {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

/// A queue of work.
pub struct CudaStream {
    device: Arc<CudaDevice>,
    opened: Arc<OpenedCard>,
    stream: Arc<DriverStream>,
    failures: Arc<Failures>,
    /// Ends of the two pieces that were queued last.
    ends: [DriverEvent; 2],
}

impl CudaStream {
    pub fn open(device: Arc<CudaDevice>) -> Result<Self> {
        let opened = Arc::clone(device.gpu().open()?);
        Ok(CudaStream {
            stream: DriverStream::new(&opened)?,
            failures: Failures::new(device.name(), &opened)?,
            ends: [DriverEvent::new(&opened)?, DriverEvent::new(&opened)?],
            device,
            opened,
        })
    }

    /// Returns the address of an operand of `node`. Adds its buffer to `buffers`.
    fn address(
        &self,
        work: &PlacedGraph<'_>,
        node: Node<'_>,
        operand: &LaunchOperand,
        buffers: &mut Vec<Arc<dyn Buffer>>,
    ) -> Result<Address> {
        let id = match operand.which {
            OperandSource::Missing => return Ok(0),
            OperandSource::Workspace => return self.scratch(work, operand, buffers),
            OperandSource::Result => node.id(),
            OperandSource::Tensor(id) => id,
            OperandSource::Source(index) => {
                let source = node.source(index);
                source
                    .ok_or_else(|| Error::invalid("a source is missing"))?
                    .id()
            }
        };
        let tensor = work.graph.tensor(id);
        let place = work.place(id)?;
        if *place.layout() != tensor.layout {
            return Err(Error::invalid(format!(
                "'{}' is {} in the graph but {} in memory",
                tensor.name,
                tensor.layout,
                place.layout()
            )));
        }
        let gpu = self.device.gpu();
        let buffer = if operand.is_packed {
            packed_rows(place, gpu)
        } else {
            CudaBuffer::from_tensor(place, gpu)
        };
        let buffer = buffer.ok_or_else(|| {
            Error::invalid(format!(
                "'{}' lies in memory of type '{}', which {} cannot use",
                tensor.name,
                place.buffer.buffer_type().name(),
                self.device.name()
            ))
        })?;
        let start = buffer.range(place.slot, operand.first, operand.bytes())?;
        let unit = unit_of(operand);
        if !start.is_multiple_of(unit) {
            return Err(Error::invalid(format!(
                "'{}' begins within a number, at byte {}",
                tensor.name, place.slot.offset
            )));
        }
        keep(&place.buffer, buffers);
        Ok(start)
    }

    /// Returns the address of scratch memory.
    fn scratch(
        &self,
        work: &PlacedGraph<'_>,
        operand: &LaunchOperand,
        buffers: &mut Vec<Arc<dyn Buffer>>,
    ) -> Result<Address> {
        if operand.bytes() == 0 {
            return Ok(0);
        }
        let missing = || Error::invalid("the workspace is missing or too small");
        let workspace = work.workspace.ok_or_else(missing)?;
        let needed = operand.first.checked_add(operand.bytes());
        if needed.is_none_or(|needed| workspace.layout().bytes() < needed) {
            return Err(missing());
        }
        let buffer = CudaBuffer::from_tensor(workspace, self.device.gpu()).ok_or_else(missing)?;
        let start = buffer.range(workspace.slot, operand.first, operand.bytes())?;
        if !start.is_multiple_of(16) {
            return Err(missing());
        }
        keep(&workspace.buffer, buffers);
        Ok(start)
    }

    /// Adds addresses to a launch.
    fn bind(
        &self,
        work: &PlacedGraph<'_>,
        node: Node<'_>,
        (launch, number): (&PlannedLaunch, u32),
        buffers: &mut Vec<Arc<dyn Buffer>>,
    ) -> Result<KernelLaunch> {
        let mut values = KernelParameters {
            ints: launch.ints,
            floats: launch.floats,
            node: number,
            ..KernelParameters::zeroed()
        };
        let mut arguments = Vec::new();
        for (index, operand) in launch.operands.iter().enumerate() {
            let address = self.address(work, node, operand, buffers)?;
            arguments.extend(address.to_le_bytes());
            let Some(tensor) = values.tensors.get_mut(index) else {
                continue;
            };
            let extent = |extent: usize| {
                u32::try_from(extent)
                    .map_err(|_| Error::invalid(format!("an extent of {extent} is too large")))
            };
            let [n0, n1, n2, n3] = operand.shape;
            *tensor = TensorParameters {
                shape: [extent(n0)?, extent(n1)?, extent(n2)?, extent(n3)?],
                strides: operand.strides.map(|stride| stride as u64),
                dtype: operand.dtype.id(),
                unused: 0,
            };
        }
        arguments.extend(self.failures.word.to_le_bytes());
        arguments.extend(self.opened.tables()?.to_le_bytes());
        arguments.extend(bytemuck::bytes_of(&values));
        let groups = u32::try_from(launch.groups).ok();
        let groups = groups.filter(|&groups| groups <= i32::MAX as u32);
        let kernel = self.opened.kernel(launch)?;
        Ok(KernelLaunch {
            function: kernel.function,
            is_early: kernel.is_early,
            groups: groups.ok_or_else(|| Error::invalid("a launch has too many groups"))?,
            threads: launch.threads,
            arguments,
        })
    }

    fn run_piece(&self, launches: &[BoundLaunch]) -> Result<()> {
        for step in launches {
            let launched = self.opened.context.launch(self.stream.handle, &step.launch);
            self.opened.check(launched)?;
        }
        Ok(())
    }

    /// Queues launches in pieces, never more than two at once.
    fn run_pieces(&self, launches: &[BoundLaunch], cancel: &CancelToken) -> Result<()> {
        for (number, piece) in launches.chunks(PIECE).enumerate() {
            let end = &self.ends[number % self.ends.len()];
            if number >= self.ends.len() {
                end.synchronize()?;
            }
            cancel.check()?;
            self.run_piece(piece)?;
            let recorded = self.opened.context.record(end.handle, self.stream.handle);
            self.opened.check(recorded)?;
        }
        Ok(())
    }

    /// Runs each node alone and reports its time.
    fn run_observed(&self, work: &PreparedLaunches, control: RunControl<'_>) -> Result<()> {
        let begin = Instant::now();
        self.stream.synchronize()?;
        for launches in work.launches.chunk_by(|a, b| a.node == b.node) {
            control.cancel.check()?;
            let start = begin.elapsed();
            self.run_piece(launches)?;
            self.stream.synchronize()?;
            let took = begin.elapsed().saturating_sub(start);
            if let Some(observer) = control.observer {
                observer.ran(launches[0].node, start, took);
            }
        }
        Ok(())
    }

    /// Returns the recorded graph. Records it on first use. Returns `None` if the driver cannot:
    /// launches alone do the same.
    fn graph(&self, work: &mut PreparedLaunches) -> Result<Option<GraphHandle>> {
        if work.has_graph && work.graph.is_none() {
            let launches = work.launches.iter().map(|step| step.launch.clone());
            let launches: Vec<_> = launches.collect();
            match self.opened.context.create_graph(&launches) {
                Ok(graph) => work.graph = Some(graph),
                Err(error) if error.kind == DriverErrorKind::Lost => {
                    return Err(self.opened.error(error));
                }
                Err(error) => {
                    tracing::warn!("{}: no graph is recorded: {error}", self.device.name());
                    work.has_graph = false;
                }
            }
        }
        Ok(work.graph)
    }

    /// Returns the address of a tensor of this device.
    fn own(&self, tensor: &TensorRef, offset: usize, len: usize) -> Result<Option<Address>> {
        tensor.check_range(offset, len)?;
        CudaBuffer::from_tensor(tensor, self.device.gpu())
            .map(|buffer| buffer.range(tensor.slot, offset, len))
            .transpose()
    }
}

/// Returns the alignment that kernels assume of an operand.
fn unit_of(operand: &LaunchOperand) -> u64 {
    let dtype = operand.dtype;
    if operand.is_packed || matches!(dtype, DType::Q4_K | DType::Q5_K) {
        return 16;
    }
    let bytes = dtype.block_bytes();
    let most = if dtype.is_quantized() { 4 } else { 8 };
    let units = [8, 4, 2].into_iter().filter(|&unit| unit <= most);
    units
        .filter(|unit| bytes.is_multiple_of(*unit))
        .max()
        .unwrap_or(1) as u64
}

/// Adds a buffer to a list that has each once.
fn keep(buffer: &Arc<dyn Buffer>, buffers: &mut Vec<Arc<dyn Buffer>>) {
    let is_same =
        |known: &Arc<dyn Buffer>| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(buffer));
    if !buffers.iter().any(is_same) {
        buffers.push(Arc::clone(buffer));
    }
}

impl Stream for CudaStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        self.opened.check_alive()?;
        let memory = Memory::Places(work.places);
        let list = self.device.launches(work.graph, work.nodes, memory)?;
        let mut names = Vec::new();
        let mut numbers = Vec::new();
        let mut last = None;
        for NodeLaunch { node: id, launch } in &list.launches {
            if launch.can_fail && last != Some(id) {
                let node = work.graph.node(*id);
                names.push(format!("{node:?} '{}'", node.tensor().name));
                last = Some(id);
            }
            numbers.push(names.len().saturating_sub(1) as u32);
        }
        let fallible = self.failures.number(names);
        let mut buffers = Vec::new();
        let mut launches = Vec::new();
        for (step, number) in list.launches.iter().zip(numbers) {
            let number = fallible.first + number;
            let node = work.graph.node(step.node);
            launches.push(BoundLaunch {
                node: step.node,
                launch: self.bind(&work, node, (&step.launch, number), &mut buffers)?,
            });
        }
        Ok(Box::new(PreparedLaunches {
            device: Arc::clone(&self.device),
            opened: Arc::clone(&self.opened),
            has_graph: self.device.records_graphs() && are_short(&launches),
            launches,
            fallible,
            failures: Arc::clone(&self.failures),
            _buffers: buffers,
            runs: 0,
            graph: None,
            last: None,
        }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let prepared = prepared.as_any().downcast_mut::<PreparedLaunches>();
        let own = prepared.filter(|work| Arc::ptr_eq(work.device.gpu(), self.device.gpu()));
        let work = own.ok_or_else(|| {
            Error::invalid(format!(
                "{} was given work that another device prepared",
                self.device.name()
            ))
        })?;
        self.opened.check_alive()?;
        control.cancel.check()?;
        if work.launches.is_empty() {
            return Ok(());
        }
        // A graph runs once at a time, and its end is awaited in the stream of its last run.
        if let Some(last) = work.last.take()
            && !Arc::ptr_eq(&last, &self.stream)
        {
            last.synchronize()?;
        }
        self.failures.add(&work.failures, &work.fallible);
        work.last = Some(Arc::clone(&self.stream));
        work.runs += 1;
        if control.observer.is_some() {
            return self.run_observed(work, control);
        }
        if work.runs > 1
            && let Some(graph) = self.graph(work)?
        {
            let launched = self.opened.context.launch_graph(self.stream.handle, graph);
            return self.opened.check(launched);
        }
        self.run_pieces(&work.launches, control.cancel)
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        let Some(address) = self.own(to, offset, data.len())? else {
            self.synchronize()?;
            return to.write(offset, data);
        };
        self.opened.check_alive()?;
        let context = &self.opened.context;
        self.opened
            .check(context.write(self.stream.handle, address, data))
    }

    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        let Some(address) = self.own(from, offset, out.len())? else {
            self.synchronize()?;
            return from.read(offset, out);
        };
        self.opened.check_alive()?;
        let context = &self.opened.context;
        self.opened
            .check(context.read(self.stream.handle, address, out))?;
        self.failures.check()
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        if from.layout() != to.layout() {
            return Err(Error::shape(format!(
                "copy of {} to {}: the layouts differ",
                from.layout(),
                to.layout()
            )));
        }
        self.opened.check_alive()?;
        let len = to.layout().bytes();
        let Some(target) = self.own(to, 0, len)? else {
            let kind = to.buffer.buffer_type();
            let what = format!("a copy to {}", kind.name());
            return Err(Error::unsupported(
                self.device.name(),
                what,
                "it is not its memory",
            ));
        };
        let (context, stream) = (&self.opened.context, self.stream.handle);
        if let Some(source) = self.own(from, 0, len)? {
            if source == target {
                return Ok(());
            }
            if source.abs_diff(target) < len as u64 {
                return Err(Error::invalid("a copy between ranges that overlap"));
            }
            return self.opened.check(context.copy(stream, target, source, len));
        }
        let Some(host) = from.buffer.host() else {
            return Err(Error::unsupported(
                self.device.name(),
                format!("a copy from {}", from.buffer.buffer_type().name()),
                "it is neither its memory nor the host's",
            ));
        };
        host.with_bytes(from.slot.offset, len, |bytes| {
            self.opened.check(context.write(stream, target, bytes))
        })?
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = event.as_any().downcast_ref::<CudaEvent>();
        let own = event.filter(|event| Arc::ptr_eq(&event.event.opened, &self.opened));
        let own = own.ok_or_else(|| Error::invalid("an event of another device"))?;
        self.opened.check_alive()?;
        let mut recorded = own.recorded();
        let context = &self.opened.context;
        self.opened
            .check(context.record(own.event.handle, self.stream.handle))?;
        *recorded = Some(Arc::clone(&self.failures));
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        let own = event.as_any().downcast_ref::<CudaEvent>();
        let own = own.filter(|event| Arc::ptr_eq(&event.event.opened, &self.opened));
        let Some(own) = own else {
            return event.synchronize();
        };
        self.opened.check_alive()?;
        let Some(failures) = own.recorded().clone() else {
            return Ok(());
        };
        self.failures.add_other(&failures);
        let context = &self.opened.context;
        self.opened
            .check(context.wait(self.stream.handle, own.event.handle))
    }

    fn synchronize(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        self.failures.check()
    }
}
