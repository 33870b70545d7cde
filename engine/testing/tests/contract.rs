//! Checks that every device fulfils the contract, and that violations are detected.
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_blas::BlasBackend;
use samite_core::{
    Backend, Buffer, BufferType, CancelToken, Device, DeviceKind, DeviceWrapper, Event, Graph,
    HostMemory, Node, PlacedGraph, Prepared, Result, RunControl, Stream, Support, TensorId,
    TensorRef, Usage, WrappedDevice, host_buffer_type,
};
use samite_cpu::{CpuBackend, CpuOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_testing::{ContractReport, check_contract};
use std::sync::Arc;

fn reference(change: impl FnOnce(&mut ReferenceOptions)) -> Arc<dyn Device> {
    let mut options = ReferenceOptions::default();
    change(&mut options);
    ReferenceDevice::new(options)
}

/// Returns an asynchronous GPU with every optional feature.
fn gpu() -> Arc<dyn Device> {
    reference(|o| {
        (o.asynchronous, o.events, o.copies, o.streams) = (true, true, true, true);
        (o.import_host, o.compiles, o.workspace) = (true, true, 256);
    })
}

fn keeps(device: &Arc<dyn Device>, least: usize) -> ContractReport {
    let report = check_contract(device);
    assert_eq!(report.failures(), [], "{device:?}\n{report}");
    assert!(report.passed() >= least, "{device:?}\n{report}");
    report
}

#[test]
fn every_reference_variant_fulfils_the_contract() {
    keeps(&gpu(), 17);
    keeps(&reference(|_| {}), 12);
    keeps(&reference(|o| o.asynchronous = true), 12);
    keeps(
        &reference(|o| (o.asynchronous, o.events) = (true, true)),
        13,
    );
    keeps(
        &reference(|o| (o.kind, o.host_memory) = (DeviceKind::Cpu, true)),
        12,
    );
    keeps(&reference(|o| o.alignment = 4096), 12);
}

#[test]
fn the_cpu_fulfils_the_contract() {
    for threads in [1, 3] {
        let backend = CpuBackend::new(CpuOptions::default().with_threads(threads));
        keeps(&backend.devices()[0], 13);
    }
}

#[test]
fn blas_fulfils_the_contract() {
    let backend = BlasBackend::default();
    match backend.devices().first() {
        Some(device) => drop(keeps(device, 12)),
        None => println!("skipped: no CBLAS library on this machine"),
    }
}

/// A planted violation of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PlantedBug {
    /// Bulk support queries differ from single ones.
    Answers,
    /// Bulk workspace queries differ from single ones.
    Workspaces,
    /// An import copies the memory.
    Import,
    /// The device imports memory although it claims that it cannot.
    ImportUnsaid,
    /// Every call compiles again.
    Compile,
    /// Pinned memory is the device's own.
    Pinned,
    /// Runs ignore cancellation.
    Cancel,
    /// Runs overtake writes.
    Order,
    /// Tensor locations are not checked.
    Places,
    /// Events are reached at once.
    Event,
    /// Streams only copy half of the data.
    Copy,
}

const MISTAKES: [(PlantedBug, &str); 11] = [
    (PlantedBug::Answers, "answers in bulk"),
    (PlantedBug::Workspaces, "answers in bulk"),
    (PlantedBug::Import, "import"),
    (PlantedBug::ImportUnsaid, "import"),
    (PlantedBug::Compile, "compiled work is shared"),
    (PlantedBug::Pinned, "pinned memory"),
    (PlantedBug::Cancel, "cancellation"),
    (PlantedBug::Order, "work is done in order"),
    (PlantedBug::Places, "overlapping places"),
    (PlantedBug::Event, "events"),
    (PlantedBug::Copy, "streams copy"),
];

struct FaultyDevice(Arc<dyn Device>, PlantedBug);

impl DeviceWrapper for FaultyDevice {
    fn inner(&self) -> &Arc<dyn Device> {
        &self.0
    }
    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support> {
        match self.1 {
            PlantedBug::Answers => vec![Support::no("no"); nodes.len()],
            _ => self.0.supports_each(graph, nodes),
        }
    }
    fn workspaces(&self, graph: &Graph, parts: &[&[TensorId]]) -> Result<Vec<usize>> {
        match self.1 {
            PlantedBug::Workspaces => Ok(vec![0; parts.len()]),
            _ => self.0.workspaces(graph, parts),
        }
    }
    fn capabilities(&self) -> samite_core::Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.import_host &= self.1 != PlantedBug::ImportUnsaid;
        capabilities
    }
    fn import_host(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>> {
        match self.1 {
            PlantedBug::Import => host_buffer_type().allocate(memory.len(), usage),
            _ => self.0.import_host(memory, usage),
        }
    }
    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>> {
        (self.1 == PlantedBug::Pinned).then(|| self.0.buffer_type())
    }
    fn compile(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        earlier: Option<&Arc<dyn samite_core::Compiled>>,
        cancel: &CancelToken,
    ) -> Result<Option<Arc<dyn samite_core::Compiled>>> {
        let earlier = earlier.filter(|_| self.1 != PlantedBug::Compile);
        self.0.compile(graph, nodes, earlier, cancel)
    }
    fn supports(&self, node: Node<'_>) -> Support {
        self.0.supports(node)
    }
    fn open_stream(&self) -> Result<Box<dyn Stream>> {
        let stream = Arc::clone(&self.0).open_stream()?;
        Ok(Box::new(WrongStream(stream, self.1, None)))
    }
}

/// A stream with its planted bug, and a write that was overtaken.
struct WrongStream(
    Box<dyn Stream>,
    PlantedBug,
    Option<(TensorRef, usize, Vec<u8>)>,
);

impl WrongStream {
    fn write_delayed_data(&mut self) -> Result<()> {
        match self.2.take() {
            Some((to, offset, data)) => self.0.write(&to, offset, &data),
            None => Ok(()),
        }
    }
}

impl Stream for WrongStream {
    fn device(&self) -> &dyn Device {
        self.0.device()
    }
    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        if self.1 == PlantedBug::Places && work.check().is_err() {
            // Prepare valid work, whatever was requested.
            return self.0.prepare(PlacedGraph { nodes: &[], ..work });
        }
        self.0.prepare(work)
    }
    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let never = CancelToken::new();
        let cancel = match self.1 {
            PlantedBug::Cancel => &never,
            _ => control.cancel,
        };
        self.0.run(prepared, RunControl { cancel, ..control })?;
        self.write_delayed_data()
    }
    fn write(&mut self, to: &TensorRef, offset: usize, data: &[u8]) -> Result<()> {
        self.write_delayed_data()?;
        match self.1 {
            PlantedBug::Order => self.2 = Some((to.clone(), offset, data.to_vec())),
            _ => self.0.write(to, offset, data)?,
        }
        Ok(())
    }
    fn read(&mut self, from: &TensorRef, offset: usize, out: &mut [u8]) -> Result<()> {
        self.write_delayed_data()?;
        match self.1 {
            PlantedBug::Event => from.read(offset, out),
            _ => self.0.read(from, offset, out),
        }
    }
    fn copy(&mut self, from: &TensorRef, to: &TensorRef) -> Result<()> {
        self.0.copy(from, to)?;
        match self.1 {
            PlantedBug::Copy => {
                self.0.synchronize()?;
                let len = to.layout().bytes();
                to.write(len / 2, &vec![0; len / 2])
            }
            _ => Ok(()),
        }
    }
    fn record(&mut self, event: &dyn Event) -> Result<()> {
        match self.1 {
            PlantedBug::Event => Ok(()),
            _ => self.0.record(event),
        }
    }
    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        self.0.wait(event)
    }
    fn synchronize(&mut self) -> Result<()> {
        self.0.synchronize()
    }
}

#[test]
fn planted_bugs_are_found() {
    for (mistake, check) in MISTAKES {
        let report = check_contract(&WrappedDevice::device(FaultyDevice(gpu(), mistake)));
        let failures = report.failures();
        assert!(
            failures.iter().any(|(name, _)| *name == check),
            "{mistake:?} was not found:\n{report}"
        );
    }
}
