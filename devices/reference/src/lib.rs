//! The executable specification: a device that is scalar, slow and obviously correct.
//!
//! Every operation is computed in `f64` from decoded operands and rounded once, at the end, to the
//! type of the result. Other devices are compared with it, so the code is simple: a kernel reads
//! its operands into plain arrays in logical order, computes, and writes the result. Operands are
//! read first, so a result may lie in the memory of an operand, and a failed kernel has written
//! nothing. Allocating these arrays is fallible: a failure is
//! [`OutOfMemory`](samite_core::Error::OutOfMemory), not an abort.
//!
//! The device also replaces a GPU in tests. A [`ReferenceDevice`] has its own memory, which the
//! host cannot access, so copies are real. [`ReferenceOptions`] make it small, asynchronous, a
//! processor instead of a GPU, or remove operations. A [`Latch`] holds its work back, and a
//! [`FaultPlan`] makes a chosen call fail, or the device get lost. The device also checks what fast
//! devices assume: it refuses work whose operands lie in another device's memory, or have another
//! layout there than in the graph.
//!
//! ```
//! use samite_core::{DType, Device, Graph};
//! use samite_reference::{ReferenceDevice, ReferenceOptions};
//!
//! let device = ReferenceDevice::new(ReferenceOptions {
//!     without_ops: vec!["rope".into()],
//!     asynchronous: true,
//!     ..ReferenceOptions::default()
//! });
//! let mut graph = Graph::new();
//! let x = graph.input("x", DType::F32, [4, 1, 1, 1])?;
//! let y = graph.rms_norm(x, 1e-5)?;
//! assert!(device.supports(graph.node(y)).is_yes());
//! # Ok::<_, samite_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod buffer;
mod call;
mod compiled;
mod device;
mod event;
mod fault;
mod float64;
mod kernels;
mod options;
mod queue;
mod stream;
mod value;

pub use device::{ReferenceBackend, ReferenceDevice};
pub use fault::FaultPlan;
pub use options::ReferenceOptions;
pub use queue::Latch;
