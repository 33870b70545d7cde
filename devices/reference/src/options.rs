//! Options of a reference device.

use crate::fault::FaultPlan;
use crate::queue::Latch;
use samite_core::DeviceKind;
use samite_core::memory::HOST_ALIGNMENT;
use std::sync::Arc;
use std::time::Duration;

/// Properties of a [`ReferenceDevice`](crate::ReferenceDevice).
#[derive(Clone, Debug)]
pub struct ReferenceOptions {
    /// Name of the device and of its memory. Must differ between devices that are used together.
    pub name: String,
    /// Kind of device.
    pub kind: DeviceKind,
    /// Maximum bytes of all buffers together, or `None` for no limit.
    pub memory_limit: Option<usize>,
    /// Maximum bytes of one buffer.
    pub max_buffer_size: usize,
    /// Alignment of tensors in buffers, rounded up to a power of two.
    pub alignment: usize,
    /// [Names](samite_core::Op::name) of operations to refuse.
    pub without_ops: Vec<String>,
    /// True if streams queue work to their own thread. Errors surface at the next call that waits.
    pub asynchronous: bool,
    /// True if it can create events.
    pub events: bool,
    /// True if streams can copy within the device's memory, and between it and host memory.
    pub copies: bool,
    /// True if matrix products should be moved here although their weights lie in host memory.
    pub wants_offload: bool,
    /// True if host memory can be imported as a buffer.
    pub import_host: bool,
    /// True to work on plain host memory, without own memory. Memory limits and faults in buffers
    /// do not apply.
    pub host_memory: bool,
    /// True to keep F32 tensors in float64, so that nothing is rounded between operations, for
    /// finite differences. The host reads rounded values, but a conversion to F64 does not round.
    /// Supported only in the device's own memory.
    pub float64: bool,
    /// Bytes of scratch memory that it requests, and overwrites while it runs.
    pub workspace: usize,
    /// True to compile nodes separately from their memory: one kernel for each operation with the
    /// types of its operands.
    pub compiles: bool,
    /// True if several streams work concurrently. Requires `asynchronous` and `events`.
    pub streams: bool,
    /// Required alignment of imported host memory.
    pub import_alignment: usize,
    /// Additional duration of operations, by [name](samite_core::Op::name): the computing thread
    /// sleeps.
    pub delays: Vec<(String, Duration)>,
    /// Holds queued work back until it is opened.
    pub latch: Option<Arc<Latch>>,
    /// Counts the device's calls and makes some of them fail.
    pub faults: Option<Arc<FaultPlan>>,
}

impl Default for ReferenceOptions {
    /// Returns a synchronous GPU called `reference` that supports every operation and no optional
    /// features.
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
