//! The backend, its device and streams.

use crate::detect::{Isa, IsaLevel};
use crate::kernels::rope;
use crate::machine;
use crate::packed_buffer_type::packed_buffer_type;
use crate::program::Program;
use crate::table::kernel_for;
use crate::tune;
use samite_core::{
    Backend, Buffer, BufferType, Capabilities, Device, DeviceKind, Error, Graph, HostMemory,
    MemoryInfo, Node, Parameters, Placed, Prepared, Result, RunControl, Stream, Support, TensorId,
    TensorRef, Usage, host_buffer, host_buffer_type, same_buffer_type,
};
use samite_threads::Pool;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Most threads of one device: bounds the scratch memory that is planned for each.
const MAX_THREADS: usize = 512;

/// How a CPU device works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuOptions {
    /// Number of threads, at most 512. By default one for each physical core that the process may use, counting
    /// affinity and the control group's quota.
    pub threads: Option<usize>,
    /// Highest instruction set level to use. By default the best that the processor has, or what the environment
    /// variable [`ISA_VARIABLE`](crate::ISA_VARIABLE) allows.
    pub isa: Option<IsaLevel>,
}

impl CpuOptions {
    /// With this number of threads.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        CpuOptions {
            threads: Some(threads),
            ..self
        }
    }

    /// With this instruction set level at most.
    #[must_use]
    pub fn with_isa(self, isa: IsaLevel) -> Self {
        CpuOptions {
            isa: Some(isa),
            ..self
        }
    }
}

/// The processors of this machine as a device on host memory.
pub struct CpuDevice {
    name: Box<str>,
    isa: Isa,
    pool: Pool,
}

impl CpuDevice {
    /// The device `cpu`. Threads are started by the first run that needs them.
    pub fn new(options: CpuOptions) -> Arc<Self> {
        Self::with_name("cpu", options)
    }

    /// A device with a name of its own, for several of them in one program.
    pub fn with_name(name: &str, options: CpuOptions) -> Arc<Self> {
        let processors = machine::processors();
        let threads = options.threads.unwrap_or(processors).clamp(1, MAX_THREADS);
        Arc::new(CpuDevice {
            name: name.into(),
            isa: tune::detect(options.isa),
            pool: Pool::new(threads, processors),
        })
    }

    /// Number of threads that it computes with.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice")
            .field("name", &self.name)
            .field("isa", &self.isa.name())
            .field("threads", &self.pool.threads())
            .finish()
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        machine::description()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn physical_id(&self) -> Option<String> {
        Some("cpu".into())
    }

    fn memory(&self) -> MemoryInfo {
        machine::memory()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            import_host: true,
            ..Capabilities::default()
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        host_buffer_type()
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        vec![packed_buffer_type()]
    }

    fn import_host(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        Ok(host_buffer(memory, usage))
    }

    fn supports(&self, node: Node<'_>) -> Support {
        if !node.tensor().is_computed() {
            return Support::Yes;
        }
        match kernel_for(node) {
            Ok(_) => Support::Yes,
            Err(reason) => Support::No(reason),
        }
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        let is_extra = |extra| same_buffer_type(extra, buffer_type);
        buffer_type.is_host() || self.extra_buffer_types().iter().any(is_extra)
    }

    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool {
        from.is_host() && to.is_host()
    }

    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize> {
        let mut most = 0;
        for node in nodes.iter().map(|&id| graph.node(id)) {
            if !node.tensor().is_computed() {
                continue;
            }
            let kernel = kernel_for(node).map_err(|reason| {
                Error::unsupported(&self.name, node.op().to_string(), reason.into_owned())
            })?;
            let bytes = (kernel.scratch)(node, self.isa, self.pool.threads()).ok_or_else(|| {
                Error::shape(format!(
                    "{}: the size of its workspace overflows",
                    node.op()
                ))
            })?;
            most = most.max(bytes);
        }
        let nodes = nodes.iter().map(|&id| graph.node(id));
        let angles = rope::table_bytes(nodes.filter(|node| node.tensor().is_computed()))?;
        most.checked_add(angles)
            .ok_or_else(|| Error::shape("the size of the workspace overflows"))
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(CpuStream { device: self }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Everything is done when a call returns.
struct CpuStream {
    device: Arc<CpuDevice>,
}

impl Prepared for Program {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl Stream for CpuStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: Placed<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let device = &*self.device;
        let program = Program::compile(work, &device.name, device.isa, device.pool.threads())?;
        Ok(Box::new(program))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let Some(program) = prepared.as_any().downcast_ref::<Program>() else {
            return Err(Error::invalid(
                "work that another device prepared cannot run here",
            ));
        };
        if !program.is_for(&self.device.name, self.device.threads()) {
            return Err(Error::invalid(
                "work that another device prepared cannot run here",
            ));
        }
        program.run(&self.device.pool, control)
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        to.copy_from(from)
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The backend `cpu`: one device.
pub struct CpuBackend {
    devices: [Arc<dyn Device>; 1],
    options: CpuOptions,
    isa: Isa,
}

impl CpuBackend {
    /// The backend with its device.
    pub fn new(options: CpuOptions) -> Self {
        let device = CpuDevice::new(options);
        CpuBackend {
            isa: device.isa,
            options,
            devices: [device],
        }
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        "cpu"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    fn configure(
        &self,
        device: &Arc<dyn Device>,
        mut parameters: Parameters,
    ) -> Result<Arc<dyn Device>> {
        let mut options = self.options;
        let threads = parameters.take_number(device.name(), "threads", 1, MAX_THREADS)?;
        options.threads = threads.or(options.threads);
        parameters.finish(device.name(), &["threads"])?;
        Ok(CpuDevice::new(options))
    }

    fn features(&self) -> Vec<(String, String)> {
        vec![
            ("arch".into(), std::env::consts::ARCH.into()),
            ("isa".into(), self.isa.name().into()),
            ("cores".into(), machine::processors().to_string()),
            ("tuning".into(), tune::report(self.isa)),
        ]
    }
}
