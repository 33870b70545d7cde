//! A device for large matrix products in host memory.

use crate::library::{Cblas, Product};
use samite_core::{
    Access, Backend, BufferType, Capabilities, Device, DeviceKind, Error, Graph, HostMemory,
    Layout, MemorySet, Node, Op, PlacedGraph, Prepared, Rejected, Result, RunControl, Stream,
    Support, TensorId, TensorRef, host_buffer_type,
};
use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Minimum extent: smaller products do not pay for the call.
const MIN_EXTENT: usize = 32;

/// Offers a device if a CBLAS library is found. The search happens on first use, because libraries
/// take a moment to load and start threads.
#[derive(Default)]
pub struct BlasBackend {
    discovery: OnceLock<CblasDiscovery>,
}

#[derive(Default)]
struct CblasDiscovery {
    library: Option<Arc<Cblas>>,
    devices: Vec<Arc<dyn Device>>,
    rejected: Vec<Rejected>,
}

impl BlasBackend {
    fn discovery(&self) -> &CblasDiscovery {
        self.discovery.get_or_init(|| match Cblas::find() {
            Ok(library) => CblasDiscovery {
                library: Some(Arc::clone(&library)),
                devices: vec![Arc::new(BlasDevice { library })],
                ..CblasDiscovery::default()
            },
            Err(rejected) => {
                for Rejected { what, why, .. } in rejected.iter().filter(|r| r.named) {
                    tracing::warn!("{what} cannot be used: {why}");
                }
                CblasDiscovery {
                    rejected,
                    ..CblasDiscovery::default()
                }
            }
        })
    }
}

impl Backend for BlasBackend {
    fn name(&self) -> &str {
        "blas"
    }

    fn devices(&self) -> &[Arc<dyn Device>] {
        &self.discovery().devices
    }

    fn features(&self) -> Vec<(String, String)> {
        let library = self.discovery().library.iter();
        library
            .flat_map(|library| {
                [
                    ("library".to_owned(), library.path().display().to_string()),
                    ("config".to_owned(), library.description().to_owned()),
                ]
            })
            .collect()
    }

    fn is_automatic(&self) -> bool {
        // samite's own kernels are faster.
        false
    }

    fn rejected(&self) -> Vec<Rejected> {
        self.discovery().rejected.clone()
    }
}

/// Computes matrix products with a CBLAS library.
pub struct BlasDevice {
    library: Arc<Cblas>,
}

impl fmt::Debug for BlasDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlasDevice({})", self.library.path().display())
    }
}

/// Returns the BLAS product of one batch of a `mul_mat` node, or why BLAS cannot compute it.
fn product(node: Node<'_>) -> Result<Product, &'static str> {
    let (Op::MulMat { .. }, Some(a), Some(b)) =
        (node.op(), node.source_layout(0), node.source_layout(1))
    else {
        return Err("only matrix products");
    };
    if !samite_quant::can_decode(a.dtype()) {
        return Err("no conversion of the weights' type to f32");
    }
    if b.dtype() != samite_core::DType::F32 {
        return Err("activations must be f32");
    }
    let ([k, m, ..], n) = (a.shape(), b.shape()[1]);
    if m < MIN_EXTENT || n < MIN_EXTENT || k < MIN_EXTENT {
        return Err("the matrices are too small to be worth it");
    }
    let row_of = |layout: &Layout| {
        let stride = layout.strides()[1];
        (layout.has_contiguous_rows() && stride.is_multiple_of(4) && stride >= layout.row_bytes())
            .then_some(stride / 4)
    };
    let lda = if a.dtype() == samite_core::DType::F32 {
        row_of(a)
    } else {
        a.has_contiguous_rows().then_some(k) // decoded rows are contiguous
    };
    let (Some(lda), Some(ldb)) = (lda, row_of(b)) else {
        return Err("rows with gaps");
    };
    // Mapped files and foreign buffers may contain floats at any byte offset, but libraries require
    // alignment.
    let at_whole_floats = |index: usize| {
        let node = node.source(index);
        let shift = node
            .and_then(|node| node.tensor().view)
            .map_or(0, |view| view.offset);
        let stored = node.and_then(Node::stored);
        stored.is_none_or(|stored| (stored.tensor().location().offset + shift).is_multiple_of(4))
    };
    let decoded = a.dtype() != samite_core::DType::F32;
    if !(decoded || at_whole_floats(0)) || !at_whole_floats(1) {
        return Err("the floats do not lie at multiples of four bytes");
    }
    let product = Product { m, n, k, lda, ldb };
    if product.fits() {
        Ok(product)
    } else {
        Err("an extent is above 2^31 - 1")
    }
}

/// Returns the size of the scratch memory for decoded weights in bytes.
fn scratch_bytes(node: Node<'_>) -> usize {
    match (node.source_layout(0), product(node)) {
        (Some(a), Ok(p)) if a.dtype() != samite_core::DType::F32 => {
            p.m.saturating_mul(p.k).saturating_mul(4)
        }
        _ => 0,
    }
}

impl Device for BlasDevice {
    fn name(&self) -> &str {
        "blas"
    }

    fn description(&self) -> String {
        self.library.description().to_owned()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Accelerator
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn buffer_type(&self) -> Arc<dyn BufferType> {
        host_buffer_type()
    }

    fn supports(&self, node: Node<'_>) -> Support {
        match product(node) {
            Ok(_) => Support::Yes,
            Err(reason) => Support::no(reason),
        }
    }

    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool {
        buffer_type.is_host()
    }

    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize> {
        Ok(nodes
            .iter()
            .map(|&id| scratch_bytes(graph.node(id)))
            .max()
            .unwrap_or(0))
    }

    fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
        Ok(Box::new(BlasStream { device: self }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct BlasStream {
    device: Arc<BlasDevice>,
}

/// A node, ready to run.
struct BlasCall {
    node: TensorId,
    product: Product,
    a: HostOperand,
    b: HostOperand,
    c: HostOperand,
    scratch: Option<HostOperand>,
}

/// A tensor in host memory.
struct HostOperand {
    memory: Arc<HostMemory>,
    offset: usize,
    layout: Layout,
}

impl HostOperand {
    fn new(place: &TensorRef) -> Result<Self> {
        let memory = place.buffer.host().ok_or_else(|| {
            Error::unsupported(
                "blas",
                format!("memory '{}'", place.buffer.buffer_type().name()),
                "it is not host memory",
            )
        })?;
        let (offset, bytes) = (place.slot.offset, place.slot.layout.bytes());
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > memory.len())
        {
            return Err(Error::invalid(format!(
                "a tensor of {bytes} bytes at {offset} is outside of its buffer"
            )));
        }
        Ok(HostOperand {
            memory: Arc::clone(memory),
            offset,
            layout: place.slot.layout,
        })
    }

    /// Returns a pointer to the byte at `offset`, which is within the tensor. The tensor is within
    /// the memory.
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.layout.bytes());
        self.memory
            .base()
            .as_ptr()
            .wrapping_add(self.offset + offset)
    }
}

struct PreparedBlas {
    steps: Vec<BlasCall>,
    memory: MemorySet,
}

impl Prepared for PreparedBlas {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl BlasCall {
    /// Computes the node.
    ///
    /// # Safety
    /// The memory of all operands must be locked: `c` and `scratch` for writing.
    unsafe fn run(&self, library: &Cblas) -> Result<()> {
        let (a, b, c) = (&self.a.layout, &self.b.layout, &self.c.layout);
        let [_, _, a2, a3] = a.shape();
        let [_, _, b2, b3] = b.shape();
        if a2 == 0 || a3 == 0 {
            return Ok(());
        }
        // Batches of source 1 that share a matrix of source 0 are adjacent, so that it is decoded
        // once.
        let mut decoded = None;
        for i3 in 0..b3 {
            for i2 in 0..b2 {
                let (j2, j3) = (i2 / (b2 / a2), i3 / (b3 / a3));
                let weights = self.a.at(a.row_offset(0, j2, j3));
                let weights = match &self.scratch {
                    None => weights.cast_const().cast::<f32>(),
                    Some(scratch) => {
                        let target = scratch.at(0).cast::<f32>();
                        if decoded != Some((j2, j3)) {
                            for row in 0..self.product.m {
                                // SAFETY: the row is within the tensor, which was checked to be
                                // within its memory. The scratch holds m rows of k elements and is
                                // aligned for f32 like every planned tensor.
                                let (bytes, out) = unsafe {
                                    (
                                        std::slice::from_raw_parts(
                                            self.a.at(a.row_offset(row, j2, j3)),
                                            a.row_bytes(),
                                        ),
                                        std::slice::from_raw_parts_mut(
                                            target.add(row * self.product.k),
                                            self.product.k,
                                        ),
                                    )
                                };
                                samite_quant::decode_row(a.dtype(), bytes, out)?;
                            }
                            decoded = Some((j2, j3));
                        }
                        target.cast_const()
                    }
                };
                let x = self.b.at(b.row_offset(0, i2, i3)).cast_const().cast();
                let y = self.c.at(c.row_offset(0, i2, i3)).cast();
                // SAFETY: extents come from the layouts of tensors in locked memory; the result is
                // contiguous.
                unsafe { library.multiply(self.product, weights, x, y) };
            }
        }
        Ok(())
    }
}

impl Stream for BlasStream {
    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn prepare(&mut self, work: PlacedGraph<'_>) -> Result<Box<dyn Prepared>> {
        work.check()?;
        let mut memory = MemorySet::default();
        let mut steps = Vec::new();
        for node in work.computed() {
            let product = product(node)
                .map_err(|reason| Error::unsupported("blas", node.op().name(), reason))?;
            let operand = |index: usize| -> Result<HostOperand> {
                let source = node
                    .source(index)
                    .ok_or_else(|| Error::invalid("mul_mat without its sources"))?;
                HostOperand::new(work.place(source.id())?)
            };
            let scratch = match scratch_bytes(node) {
                0 => None,
                needed => {
                    let workspace = work
                        .workspace
                        .filter(|workspace| workspace.layout().bytes() >= needed);
                    let workspace = workspace
                        .ok_or_else(|| Error::invalid("the workspace is missing or too small"))?;
                    Some(HostOperand::new(workspace)?)
                }
            };
            let step = BlasCall {
                node: node.id(),
                product,
                a: operand(0)?,
                b: operand(1)?,
                c: HostOperand::new(work.place(node.id())?)?,
                scratch,
            };
            memory.add(&step.a.memory, Access::Read)?;
            memory.add(&step.b.memory, Access::Read)?;
            memory.add(&step.c.memory, Access::Write)?;
            if let Some(scratch) = &step.scratch {
                memory.add(&scratch.memory, Access::Write)?;
            }
            steps.push(step);
        }
        Ok(Box::new(PreparedBlas { steps, memory }))
    }

    fn run(&mut self, prepared: &mut dyn Prepared, control: RunControl<'_>) -> Result<()> {
        let prepared = prepared
            .as_any()
            .downcast_mut::<PreparedBlas>()
            .ok_or_else(|| Error::invalid("work that was not prepared by the blas device"))?;
        let library = &self.device.library;
        let begin = Instant::now();
        prepared.memory.with(|| {
            for step in &prepared.steps {
                control.cancel.check()?;
                let start = control.observer.map(|_| begin.elapsed());
                // SAFETY: `with` locked the memory of all steps with the accesses declared in
                // `prepare`.
                unsafe { step.run(library)? };
                if let (Some(observer), Some(start)) = (control.observer, start) {
                    observer.ran(step.node, start, begin.elapsed().saturating_sub(start));
                }
            }
            Ok(())
        })
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}
