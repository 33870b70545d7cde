//! Options of a reference device.

use crate::fault::FaultPlan;
use crate::queue::Latch;
use samite_core::DeviceKind;
use samite_core::memory::HOST_ALIGNMENT;
use std::sync::Arc;
use std::time::Duration;

/// What a [`ReferenceDevice`](crate::ReferenceDevice) is and can do.
#[derive(Clone, Debug)]
pub struct ReferenceOptions {
    /// Name of the device and of its memory; different for devices that are used together.
    pub name: String,
    /// Kind of device.
    pub kind: DeviceKind,
    /// Bytes that all buffers may have together; `None` for no limit.
    pub memory_limit: Option<usize>,
    /// Bytes that one buffer may have.
    pub max_buffer_size: usize,
    /// Alignment of tensors in buffers, rounded up to a power of two.
    pub alignment: usize,
    /// [Names](samite_core::Op::name) of operations to refuse.
    pub without_ops: Vec<String>,
    /// Streams queue work to a thread of their own, and errors surface at the next call that waits.
    pub asynchronous: bool,
    /// It can make events.
    pub events: bool,
    /// Streams copy within the device's memory, and between it and host memory.
    pub copies: bool,
    /// Matrix products are worth moving here although their weights lie in host memory.
    pub wants_offload: bool,
    /// Host memory can be imported as a buffer.
    pub import_host: bool,
    /// Works on plain host memory, without memory of its own. The limits of memory above, and
    /// faults in buffers, do not apply.
    pub host_memory: bool,
    /// Keeps F32 tensors in float64, so that nothing is rounded between operations: for finite
    /// differences. What the host reads is rounded, but a conversion to F64 is not. Only memory of
    /// its own does that.
    pub float64: bool,
    /// Bytes of scratch memory that it asks for, and overwrites while it runs.
    pub workspace: usize,
    /// Nodes are compiled apart from their places: one kernel for each operation with the types of
    /// its operands.
    pub compiles: bool,
    /// Several streams work at the same time. Needs `asynchronous` and `events`.
    pub streams: bool,
    /// Where imported host memory must begin.
    pub import_alignment: usize,
    /// How long operations take besides their computation, by [name](samite_core::Op::name): the
    /// thread that computes sleeps.
    pub delays: Vec<(String, Duration)>,
    /// Holds queued work back until it is opened.
    pub latch: Option<Arc<Latch>>,
    /// Counts the device's calls and makes some of them fail.
    pub faults: Option<Arc<FaultPlan>>,
}

impl Default for ReferenceOptions {
    /// Returns a synchronous GPU called `reference` that runs everything and can do nothing else.
    fn default() -> Self {
        ReferenceOptions {
            name: "reference".into(),
            kind: DeviceKind::Gpu,
            memory_limit: None,
            max_buffer_size: isize::MAX as usize,
            alignment: HOST_ALIGNMENT,
            without_ops: Vec::new(),
            asynchronous: false,
            events: false,
            copies: false,
            wants_offload: false,
            import_host: false,
            host_memory: false,
            float64: false,
            workspace: 0,
            compiles: false,
            streams: false,
            import_alignment: 1,
            delays: Vec::new(),
            latch: None,
            faults: None,
        }
    }
}

impl ReferenceOptions {
    /// Returns the default under another name.
    pub fn named(name: impl Into<String>) -> Self {
        ReferenceOptions {
            name: name.into(),
            ..Self::default()
        }
    }
}
