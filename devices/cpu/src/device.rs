//! The backend, its device and streams.

use crate::detect::{Isa, IsaLevel};
use crate::high_bandwidth::HighBandwidth;
use crate::kernels::rope;
use crate::machine;
use crate::packed_buffer_type::packed_buffer_type;
use crate::program::Program;
use crate::table::kernel_for;
use crate::tune;
use samite_core::{
    Backend, Buffer, BufferType, Capabilities, Device, DeviceKind, Error, Graph, HostMemory,
    MemoryInfo, Node, Parameters, PlacedGraph, Prepared, Result, RunControl, Selection, Stream,
    Support, TensorId, TensorRef, Usage, host_buffer, host_buffer_type, same_buffer_type,
};
use samite_threads::{CpuSet, MAX_THREADS, Pool, PoolOptions};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Options of a CPU device.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CpuOptions {
    /// Number of threads, at most 512. By default one for each physical core that the process may
    /// use, counting affinity and the control group's quota.
    pub threads: Option<usize>,
    /// Highest instruction set level to use. By default the best that the processor has, or what
    /// the environment variable [`ISA_VARIABLE`](crate::ISA_VARIABLE) allows.
    pub isa: Option<IsaLevel>,
    /// Thread pool shared with other devices. The device uses at most `threads` of it. By default
    /// it has a pool of its own.
    pub pool: Option<Arc<Pool>>,
    /// Memory for all data of the device: weights, caches, results. By default ordinary host
    /// memory.
    pub memory: Option<HighBandwidth>,
}

impl CpuOptions {
    /// Sets the number of threads.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        CpuOptions {
            threads: Some(threads),
            ..self
        }
    }

    /// Sets a pool that other devices also use. While one of them computes, another one computes
    /// only in its caller's thread.
    #[must_use]
    pub fn with_pool(self, pool: Arc<Pool>) -> Self {
        CpuOptions {
            pool: Some(pool),
            ..self
        }
    }

    /// Puts all data into high-bandwidth memory.
    #[must_use]
    pub fn with_memory(self, memory: HighBandwidth) -> Self {
        CpuOptions {
            memory: Some(memory),
            ..self
        }
    }

    /// Limits the instruction set level.
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
    pool: Arc<Pool>,
    /// Maximum number of threads of the pool that it uses.
    threads: usize,
    memory: Option<HighBandwidth>,
}

impl CpuDevice {
    /// Returns the device `cpu`. Threads are started by the first run that needs them.
    pub fn new(options: CpuOptions) -> Arc<Self> {
        Self::with_name("cpu", options)
    }

    /// Returns a device with the given name, for programs with several CPU devices.
    pub fn with_name(name: &str, options: CpuOptions) -> Arc<Self> {
        let pool = options.pool.unwrap_or_else(|| {
            let processors = machine::processors(None);
            let threads = options.threads.unwrap_or(processors);
            Arc::new(Pool::new(threads, processors))
        });
        let most = pool.threads();
        Arc::new(CpuDevice {
            name: name.into(),
            isa: tune::detect(options.isa),
            threads: options.threads.unwrap_or(most).clamp(1, most),
            pool,
            memory: options.memory,
        })
    }

    /// Returns the number of threads that it computes with, unless a stream was
    /// [limited](Stream::set_threads) to fewer.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Returns its pool, to share it with another device or to [pause](Pool::pause) it.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice")
            .field("name", &self.name)
            .field("isa", &self.isa.name())
            .field("threads", &self.threads)
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
        match self.memory {
            // The library does not report the amount.
            Some(_) => MemoryInfo::default(),
            None => machine::memory(),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            // A mapped file lies in ordinary memory.
            import_host: self.memory.is_none(),
            ..Capabilities::default()
        }
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        self.memory
            .as_ref()
            .map_or_else(host_buffer_type, |memory| Arc::clone(&memory.plain))
    }

    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>> {
        let packed = self.memory.as_ref();
        vec![packed.map_or_else(packed_buffer_type, |memory| Arc::clone(&memory.packed))]
    }

    fn import_host(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        match self.memory {
            Some(_) => Err(Error::unsupported(
                &self.name,
                "import of host memory",
                "everything lies in high-bandwidth memory",
            )),
            None => Ok(host_buffer(memory, usage)),
        }
    }

    fn selection(&self) -> Selection {
        Selection::Exact
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
            let bytes = (kernel.scratch)(node, self.isa, self.threads).ok_or_else(|| {
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
        Ok(Box::new(CpuStream {
            threads: self.threads,
            device: self,
        }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A synchronous stream: all work is done when a call returns.
struct CpuStream {
    device: Arc<CpuDevice>,
    /// Maximum number of threads of its runs.
    threads: usize,
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

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let device = &*self.device;
        let program = Program::compile(work, &device.name, device.isa, device.threads)?;
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
        program.run(&self.device.pool, self.threads, control)
    }

    fn set_threads(&mut self, threads: Option<usize>) {
        let most = self.device.threads;
        self.threads = threads.map_or(most, |threads| threads.clamp(1, most));
    }

    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        to.copy_from(from)
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Parses processors by number: `3`, `0-3`, or several such items joined by `+`.
fn parse_cores(text: &str) -> std::result::Result<CpuSet, String> {
    let mut cores = CpuSet::default();
    for part in text.split('+') {
        let range = if part.contains('-') {
            CpuSet::parse_range(part)?
        } else {
            CpuSet::parse_range(&format!("{part}-{part}"))
                .map_err(|_| "it must be numbers and ranges, such as 0-3+8".to_owned())?
        };
        cores = cores.with(&range);
    }
    Ok(cores)
}

/// Creates a pool whose threads run only on some processors. By default it has as many threads as
/// processors.
fn pool_on(cores: &str, threads: Option<usize>) -> std::result::Result<Pool, String> {
    let cores = parse_cores(cores)?;
    let processors = cores.iter().len();
    let options = PoolOptions {
        threads: threads.unwrap_or(processors),
        processors,
        cpus: Some(cores),
        ..PoolOptions::default()
    };
    Pool::with_options(&options).map_err(|error| error.to_string())
}

/// The backend `cpu`, with one device.
pub struct CpuBackend {
    devices: [Arc<dyn Device>; 1],
    options: CpuOptions,
    isa: Isa,
}

impl CpuBackend {
    /// Returns the backend with its device.
    pub fn new(options: CpuOptions) -> Self {
        let device = CpuDevice::new(options.clone());
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
        let mut options = self.options.clone();
        let threads = parameters.take_number(device.name(), "threads", 1, MAX_THREADS)?;
        if let Some(threads) = threads {
            // An existing pool keeps its number of threads.
            (options.threads, options.pool) = (Some(threads), None);
        }
        let mut name = device.name().to_owned();
        if let Some(text) = parameters.take("cores") {
            let pool = pool_on(&text, threads).map_err(|why| {
                Error::invalid(format!(
                    "device '{name}': parameter 'cores' is '{text}': {why}"
                ))
            })?;
            (options.threads, options.pool) = (Some(pool.threads()), Some(Arc::new(pool)));
            name = format!("{name}@{text}");
        }
        match parameters.take("memory").as_deref() {
            None => {}
            Some("hbm") => {
                let memory = HighBandwidth::find();
                let memory = memory.map_err(|reason| {
                    Error::invalid(format!(
                        "device '{}': no high-bandwidth memory for memory=hbm: {reason}",
                        device.name()
                    ))
                })?;
                options.memory = Some(memory);
            }
            Some("host") => options.memory = None,
            Some(other) => {
                return Err(Error::invalid(format!(
                    "device '{}': parameter 'memory' is '{other}', and must be host or hbm",
                    device.name()
                )));
            }
        }
        parameters.finish(device.name(), &["cores", "memory", "threads"])?;
        Ok(CpuDevice::with_name(&name, options))
    }

    fn features(&self) -> Vec<(String, String)> {
        vec![
            ("arch".into(), std::env::consts::ARCH.into()),
            ("isa".into(), self.isa.name().into()),
            ("cores".into(), machine::processors(None).to_string()),
            ("tuning".into(), tune::report(self.isa)),
            (
                "high-bandwidth memory".into(),
                HighBandwidth::find().map_or_else(
                    |reason| format!("none: {reason}"),
                    |_| "available (memory=hbm)".into(),
                ),
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Phase;
    use samite_core::CancelToken;
    use std::collections::BTreeSet;
    use std::sync::Mutex;
    use std::time::Duration;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_single_thread_is_pinned_as_its_pool() {
        use samite_threads::{CpuSet, PoolOptions};
        let last = CpuSet::allowed().unwrap().iter().last().unwrap();
        let pool = Pool::with_options(&PoolOptions {
            threads: 1,
            cpus: Some(CpuSet::from_iter([last])),
            ..PoolOptions::default()
        });
        let device = CpuDevice::new(CpuOptions::default().with_pool(Arc::new(pool.unwrap())));
        let phase = Phase::new(1, 1.0, move |_, _| {
            assert_eq!(CpuSet::allowed(), Some(CpuSet::from_iter([last])));
            Ok(())
        });
        let mut program = Program::of_phase(phase, "cpu", 1);
        // The thread stays pinned, so the test uses a thread of its own.
        let run = std::thread::spawn(move || {
            let mut stream = device.open_stream().unwrap();
            let control = RunControl {
                cancel: &CancelToken::new(),
                observer: None,
            };
            stream.run(&mut program, control)
        });
        run.join().unwrap().unwrap();
    }

    #[test]
    fn core_lists_are_parsed() {
        let cores = |text| parse_cores(text).map(|cores| cores.to_string());
        assert_eq!(cores("3").as_deref(), Ok("3"));
        assert_eq!(cores("0-2+8+6").as_deref(), Ok("0-2, 6, 8"));
        for wrong in ["", "a", "1-x", "3+", "+3", "5-2", "99999"] {
            assert!(parse_cores(wrong).is_err(), "{wrong}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_device_on_selected_cores_has_its_own_name() {
        let last = CpuSet::allowed().unwrap().iter().last().unwrap();
        let backend = CpuBackend::new(CpuOptions::default());
        let configure = |text: String| {
            let device = &backend.devices()[0];
            backend.configure(device, text.parse().unwrap())
        };
        let device = configure(format!("cores={last}")).unwrap();
        assert_eq!(device.name(), format!("cpu@{last}"));
        let cpu = device.as_any().downcast_ref::<CpuDevice>().unwrap();
        assert_eq!(cpu.threads(), 1);
        let device = configure(format!("threads=3,cores={last}")).unwrap();
        let cpu = device.as_any().downcast_ref::<CpuDevice>().unwrap();
        assert_eq!(cpu.threads(), 3);
        let error = configure("cores=x".to_owned()).unwrap_err().to_string();
        assert!(error.contains("'cores' is 'x'"), "{error}");
        assert!(configure("cores=1022".to_owned()).is_err(), "not there");
    }

    #[test]
    fn a_run_uses_the_thread_count_of_its_stream() {
        let pool = Arc::new(Pool::new(4, 2));
        let device = CpuDevice::new(CpuOptions::default().with_pool(pool).with_threads(3));
        let mut stream = CpuStream {
            threads: device.threads,
            device,
        };
        let workers = Arc::new(Mutex::new(BTreeSet::new()));
        let seen = Arc::clone(&workers);
        // So slow that every thread gets a task.
        let phase = Phase::new(40, 1e6, move |tasks, worker| {
            seen.lock().unwrap().insert(worker);
            std::thread::sleep(Duration::from_millis(tasks.len() as u64));
            Ok(())
        });
        let mut program = Program::of_phase(phase, "cpu", 3);
        let cancel = CancelToken::new();
        for (threads, most) in [
            (None, 3),
            (Some(1), 1),
            (Some(2), 2),
            (Some(0), 1),
            (Some(9), 3),
            (None, 3),
        ] {
            stream.set_threads(threads);
            workers.lock().unwrap().clear();
            let control = RunControl {
                cancel: &cancel,
                observer: None,
            };
            stream.run(&mut program, control).unwrap();
            let expected: BTreeSet<_> = (0..most).collect();
            assert_eq!(*workers.lock().unwrap(), expected, "{threads:?}");
        }
    }
}
