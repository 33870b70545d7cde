//! Streams: bind launches to buffers, record and submit them.

use crate::buffer::{BUFFER_UNIT, WgpuBuffer};
use crate::device::WgpuDevice;
use crate::event::{Submission, WgpuEvent};
use crate::gpu::Opened;
use crate::packed::packed_rows;
use crate::plan::{Launch, Operand, OperandSource, Parameters, TensorParameters};
use crate::shader::{Access, FIRST_OPERAND};
use crate::windows::{BindingWindow, share};
use bytemuck::Zeroable;
use samite_core::environment::Instant;
use samite_core::{
    CancelToken, Device, Error, Event, Node, PlacedGraph, Prepared, Result, RunControl, Stream,
    TensorId, TensorRef,
};
use samite_fusion::{Memory, NodeLaunch};
use std::any::Any;
use std::borrow::Cow;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// Number of launches per submission. The device works on them while the next ones are encoded, a
/// long run can be cancelled, and the driver's hang detection does not trigger.
const SUBMISSION: usize = 32;

/// The failure word of a stream. A kernel that meets an invalid index skips it and writes the
/// number of its node there.
pub struct Failures {
    word: wgpu::Buffer,
    device: Arc<str>,
    state: Mutex<FailureState>,
}

#[derive(Default)]
struct FailureState {
    /// Next node number.
    next: u32,
    /// Work submitted since the word was last checked.
    pending: Vec<Arc<Fallible>>,
    /// Failure words of other streams that prepared work which runs on this one.
    others: Vec<Arc<Failures>>,
}

/// Nodes that can fail, by number.
struct Fallible {
    first: u32,
    nodes: Vec<String>,
}

impl Failures {
    fn state(&self) -> std::sync::MutexGuard<'_, FailureState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns numbers to `nodes`. They are never 0.
    fn number(&self, nodes: Vec<String>) -> Arc<Fallible> {
        let mut state = self.state();
        let count = nodes.len() as u32 + 1;
        let first = state
            .next
            .checked_add(count)
            .map_or(1, |_| state.next.max(1));
        state.next = first + count;
        Arc::new(Fallible { first, nodes })
    }

    fn add(&self, work: &Arc<Fallible>) {
        let mut state = self.state();
        if !work.nodes.is_empty() && !state.pending.iter().any(|known| Arc::ptr_eq(known, work)) {
            state.pending.push(Arc::clone(work));
        }
    }

    /// Registers work that another stream prepared.
    fn add_other(&self, owner: &Arc<Failures>, work: &Arc<Fallible>) {
        owner.add(work);
        let mut state = self.state();
        if !work.nodes.is_empty() && !state.others.iter().any(|known| Arc::ptr_eq(known, owner)) {
            state.others.push(Arc::clone(owner));
        }
    }

    /// Fails if submitted work met an invalid index. Waits for the work if there is any.
    pub fn check(&self, opened: &Opened) -> Result<()> {
        self.check_with(opened, |word| {
            let mut number = [0; 4];
            if let Some(word) = word {
                opened.read(word, 0, &mut number)?;
            }
            Ok(u32::from_le_bytes(number))
        })
    }

    /// Works like [`check`](Failures::check). `read` reads the word, if it gets one, together with
    /// other data.
    fn check_with(
        &self,
        opened: &Opened,
        read: impl FnOnce(Option<&wgpu::Buffer>) -> Result<u32>,
    ) -> Result<()> {
        let (pending, others) = {
            let mut state = self.state();
            (
                std::mem::take(&mut state.pending),
                std::mem::take(&mut state.others),
            )
        };
        let number = read((!pending.is_empty()).then_some(&self.word)).and_then(|number| {
            if number > 0 {
                opened.write(&self.word, 0, &[0; 4])?;
            }
            Ok(number)
        });
        let number = match number {
            Ok(number) => number,
            Err(error) => {
                // The result of this work is unknown; the next check must ask again.
                let mut state = self.state();
                state.pending.extend(pending);
                state.others.extend(others);
                return Err(error);
            }
        };
        if number == 0 {
            let told = others.iter().try_for_each(|other| other.check(opened));
            if told.is_err() {
                self.state().others.extend(others);
            }
            return told;
        }
        self.state().others.extend(others);
        let name = pending.iter().find_map(|work| {
            work.nodes
                .get(number.checked_sub(work.first)? as usize)
                .cloned()
        });
        let name = name.unwrap_or_else(|| "a node".into());
        Err(Error::InvalidArgument(
            format!(
                "{}: {name}: a row or expert number is out of range",
                self.device
            )
            .into(),
        ))
    }
}

/// A launch with its bindings.
struct BoundLaunch {
    node: TensorId,
    pipeline: Arc<wgpu::ComputePipeline>,
    group: wgpu::BindGroup,
    groups: [u32; 2],
}

/// Work that is bound to buffers.
struct PreparedSteps {
    device: Arc<WgpuDevice>,
    steps: Vec<BoundLaunch>,
    fallible: Arc<Fallible>,
    failures: Arc<Failures>,
}

impl Prepared for PreparedSteps {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

pub struct WgpuStream {
    device: Arc<WgpuDevice>,
    failures: Arc<Failures>,
}

impl WgpuStream {
    pub fn open(device: Arc<WgpuDevice>) -> Result<Self> {
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST;
        let word = device.gpu().open()?.create("a stream", 16, usage)?;
        let failures = Failures {
            word,
            device: device.name().into(),
            state: Mutex::default(),
        };
        Ok(WgpuStream {
            device,
            failures: Arc::new(failures),
        })
    }

    fn opened(&self) -> Result<&Opened> {
        self.device.gpu().open()
    }

    /// Returns the buffer of `operand` of `node`, and the offset in bytes of its first element.
    fn place<'a>(
        &self,
        work: &PlacedGraph<'a>,
        node: Node<'a>,
        operand: &Operand,
    ) -> Result<(&'a WgpuBuffer, u64)> {
        let id = match operand.which {
            OperandSource::Workspace => return self.scratch(work, operand),
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
        let buffer = match operand.access {
            Access::Packed => packed_rows(place, gpu),
            _ => WgpuBuffer::of(place, gpu),
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
        // Kernels read elements and blocks in words, halves or bytes.
        let unit = [4, 2]
            .into_iter()
            .find(|unit| operand.dtype.block_bytes().is_multiple_of(*unit));
        let unit = unit.unwrap_or(1) as u64;
        if !start.is_multiple_of(unit) {
            return Err(Error::invalid(format!(
                "'{}' begins within a number at byte {start}",
                tensor.name
            )));
        }
        Ok((buffer, start))
    }

    /// Returns the buffer and offset of scratch memory.
    fn scratch<'a>(
        &self,
        work: &PlacedGraph<'a>,
        operand: &Operand,
    ) -> Result<(&'a WgpuBuffer, u64)> {
        let missing = || Error::invalid("the workspace is missing or too small");
        let workspace = work.workspace.ok_or_else(missing)?;
        let needed = operand.first.checked_add(operand.bytes());
        if needed.is_none_or(|needed| workspace.layout().bytes() < needed) {
            return Err(missing());
        }
        let buffer = WgpuBuffer::of(workspace, self.device.gpu()).ok_or_else(missing)?;
        let start = buffer.range(workspace.slot, operand.first, operand.bytes())?;
        if !start.is_multiple_of(4) {
            return Err(missing());
        }
        Ok((buffer, start))
    }

    fn bind(
        &self,
        work: &PlacedGraph<'_>,
        parameters: &wgpu::Buffer,
        at: u64,
        (node, launch, number): (TensorId, &Launch, u32),
    ) -> Result<(BoundLaunch, Parameters)> {
        let (opened, capacity) = (self.opened()?, self.device.capacity());
        let mut values = Parameters {
            node: number,
            ints: launch.ints,
            floats: launch.floats,
            ..Parameters::zeroed()
        };
        let binding = |binding: u32, buffer: &'_ wgpu::Buffer, offset: u64, size: u64| {
            (binding, buffer.clone(), offset, size)
        };
        let size = std::mem::size_of::<Parameters>() as u64;
        let mut bindings = vec![
            binding(0, parameters, at, size),
            binding(1, &self.failures.word, 0, 16),
        ];
        let unsupported =
            |reason| Error::unsupported(self.device.name(), launch.shader.kernel, reason);
        let mut places = Vec::new();
        let mut windows = Vec::new();
        for operand in &launch.operands {
            let (buffer, start) = self.place(work, work.graph.node(node), operand)?;
            let begin = start / capacity.alignment as u64 * capacity.alignment as u64;
            let end = (start + operand.bytes() as u64)
                .next_multiple_of(BUFFER_UNIT as u64)
                .max(begin + BUFFER_UNIT as u64);
            places.push(start);
            windows.push(BindingWindow {
                buffer: &buffer.memory.raw,
                memory: buffer.memory.id,
                begin,
                end,
            });
        }
        let mut shader = Cow::Borrowed(&launch.shader);
        let mut numbers: Vec<u8> = (0..windows.len() as u8).collect();
        if !capacity.overlaps && share(&mut windows, &mut numbers) {
            let shader = shader.to_mut();
            shader.bindings.clone_from(&numbers);
            let most = self.device.gpu().binding_limit() as u64;
            if windows
                .iter()
                .any(|window| window.end - window.begin > most)
            {
                return Err(unsupported(
                    "operands that overlap are above the limit of one binding".into(),
                ));
            }
            if !shader.can_share() {
                return Err(unsupported(
                    "results of different types overlap in memory".into(),
                ));
            }
        }
        for (index, operand) in launch.operands.iter().enumerate() {
            let window = &windows[usize::from(numbers[index])];
            // Extents and strides inside one binding fit into 32 bits.
            let small = |x: usize| u32::try_from(x).unwrap_or(u32::MAX);
            values.tensors[index] = TensorParameters {
                shape: operand.shape.map(small),
                strides: operand.strides.map(small),
                start: (places[index] - window.begin) as u32,
                unused: [0; 3],
            };
        }
        for (number, window) in (FIRST_OPERAND..).zip(&windows) {
            let size = window.end - window.begin;
            bindings.push(binding(number, window.buffer, window.begin, size));
        }
        if shader.reads_grids() {
            let grids = opened.pipelines.grids(opened)?;
            let number = FIRST_OPERAND + windows.len() as u32;
            bindings.push(binding(number, grids, 0, grids.size()));
        }
        let pipeline = opened.pipelines.get(opened, &shader)?;
        let entries: Vec<_> = bindings
            .iter()
            .map(|(binding, buffer, offset, size)| wgpu::BindGroupEntry {
                binding: *binding,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer,
                    offset: *offset,
                    size: NonZeroU64::new(*size),
                }),
            })
            .collect();
        let group = opened.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: opened.pipelines.bind_group_layout(&shader),
            entries: &entries,
        });
        let step = BoundLaunch {
            node,
            pipeline,
            group,
            groups: launch.groups(&capacity).map_err(unsupported)?,
        };
        Ok((step, values))
    }
}

impl Stream for WgpuStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let (opened, capacity) = (self.opened()?, self.device.capacity());
        let memory = Memory::Places(work.places);
        let list = self.device.launches(work.graph, work.nodes, memory)?;
        let mut launches = Vec::new();
        let mut names = Vec::new();
        let mut last = None;
        for NodeLaunch { node: id, launch } in &list.launches {
            if launch.can_fail && last != Some(id) {
                let node = work.graph.node(*id);
                names.push(format!("{node:?} '{}'", node.tensor().name));
                last = Some(id);
            }
            launches.push((*id, launch, names.len()));
        }
        // Operands that share bindings need other shaders than the compiled ones.
        if capacity.overlaps {
            let shaders = launches.iter().map(|(_, launch, _)| &launch.shader);
            let pipelines = &opened.pipelines;
            pipelines.get_all(opened, shaders, &CancelToken::new())?;
        }
        let fallible = self.failures.number(names);
        let align = u64::from(opened.device.limits().min_uniform_buffer_offset_alignment);
        let stride = (std::mem::size_of::<Parameters>() as u64).next_multiple_of(align.max(16));
        let size = (stride * launches.len() as u64).max(16);
        let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let parameters = opened.create("parameters of nodes", size, usage)?;
        let mut bytes = vec![0; size as usize];
        let steps = opened.make("prepared work", 0, || -> Result<Vec<BoundLaunch>> {
            let mut steps = Vec::new();
            for (number, (node, launch, names)) in launches.iter().enumerate() {
                let at = stride * number as u64;
                let number = fallible.first + (*names).saturating_sub(1) as u32;
                let (step, values) = self.bind(&work, &parameters, at, (*node, *launch, number))?;
                let values = bytemuck::bytes_of(&values);
                bytes[at as usize..][..values.len()].copy_from_slice(values);
                steps.push(step);
            }
            Ok(steps)
        })??;
        opened.write(&parameters, 0, &bytes)?;
        opened.prepared.store(steps.len() as u64, Ordering::Relaxed);
        if let Some(stored) = opened.pipelines.stored() {
            stored.store(false);
        }
        Ok(Box::new(PreparedSteps {
            device: Arc::clone(&self.device),
            steps,
            fallible,
            failures: Arc::clone(&self.failures),
        }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let prepared = prepared.as_any().downcast_ref::<PreparedSteps>();
        let own = prepared.filter(|work| Arc::ptr_eq(work.device.gpu(), self.device.gpu()));
        let work = own.ok_or_else(|| {
            Error::invalid(format!(
                "{} was given work that another device prepared",
                self.device.name()
            ))
        })?;
        let opened = self.opened()?;
        // Work that another stream prepared writes to that stream's failure word.
        if Arc::ptr_eq(&self.failures, &work.failures) {
            self.failures.add(&work.fallible)
        } else {
            self.failures.add_other(&work.failures, &work.fallible)
        }
        let begin = Instant::now();
        // To time nodes, wait after each launch.
        let piece = if control.observer.is_some() {
            1
        } else {
            SUBMISSION
        };
        let mut at = 0;
        while at < work.steps.len() {
            control.cancel.check()?;
            let first = &work.steps[at];
            let mut end = (at + piece).min(work.steps.len());
            if piece == 1 {
                let same = work.steps[at..]
                    .iter()
                    .take_while(|step| step.node == first.node);
                end = at + same.count();
            }
            let start = begin.elapsed();
            let mut encoder = opened.encoder();
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                for step in &work.steps[at..end] {
                    pass.set_pipeline(&step.pipeline);
                    pass.set_bind_group(0, &step.group, &[]);
                    pass.dispatch_workgroups(step.groups[0], step.groups[1], 1);
                }
            }
            let index = opened.submit(Some(encoder))?;
            if let Some(observer) = control.observer {
                opened.wait(index)?;
                observer.ran(first.node, start, begin.elapsed().saturating_sub(start));
            }
            at = end;
        }
        Ok(())
    }

    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        // Writes and runs share a queue, so no wait is needed.
        to.write(offset, data)
    }

    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        from.check_range(offset, out.len())?;
        let opened = self.opened()?;
        let Some(buffer) = WgpuBuffer::of(from, self.device.gpu()) else {
            from.read(offset, out)?;
            return self.failures.check(opened);
        };
        let start = buffer.range(from.slot, offset, out.len())?;
        self.failures.check_with(opened, |word| {
            opened.read_with(&buffer.memory.raw, start, out, word)
        })
    }

    fn write_rows(&mut self, to: &TensorRef, rows: samite_core::Rows, data: &[u8]) -> Result<()> {
        to.write_rows(rows, data)
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        if from.layout() != to.layout() {
            return Err(Error::shape(format!(
                "copy of {} to {}: the layouts differ",
                from.layout(),
                to.layout()
            )));
        }
        let (gpu, opened) = (self.device.gpu(), self.opened()?);
        let target = WgpuBuffer::of(to, gpu).ok_or_else(|| {
            let kind = to.buffer.buffer_type();
            let what = format!("a copy to {}", kind.name());
            Error::unsupported(gpu.name(), what, "it is not its memory")
        })?;
        let len = to.layout().bytes();
        let at = target.range(to.slot, 0, len)?;
        match (WgpuBuffer::of(from, gpu), from.buffer.host()) {
            (Some(source), _) => {
                let start = source.range(from.slot, 0, len)?;
                if !opened.copy((&source.memory, start), (&target.memory, at), len as u64)? {
                    let mut bytes = vec![0; len];
                    opened.read(&source.memory.raw, start, &mut bytes)?;
                    opened.write(&target.memory.raw, at, &bytes)?;
                }
                Ok(())
            }
            (None, Some(host)) => host.with_bytes(from.slot.offset, len, |bytes| {
                opened.write(&target.memory.raw, at, bytes)
            })?,
            (None, None) => Err(Error::unsupported(
                gpu.name(),
                format!("a copy from {}", from.buffer.buffer_type().name()),
                "it is neither its memory nor the host's",
            )),
        }
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = event.as_any().downcast_ref::<WgpuEvent>();
        let own = event.filter(|event| Arc::ptr_eq(&event.gpu, self.device.gpu()));
        let own = own.ok_or_else(|| Error::invalid("an event of another device"))?;
        own.set(Submission {
            index: self.opened()?.submit(None)?,
            failures: Arc::clone(&self.failures),
        });
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        match event.as_any().downcast_ref::<WgpuEvent>() {
            // All streams of a device share one queue, which orders the event before later work.
            Some(own) if Arc::ptr_eq(&own.gpu, self.device.gpu()) => Ok(()),
            _ => event.synchronize(),
        }
    }

    fn synchronize(&mut self) -> Result<()> {
        let opened = self.opened()?;
        opened.wait(opened.submit(None)?)?;
        self.failures.check(opened)
    }
}
