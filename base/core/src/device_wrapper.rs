//! Device wrappers, which forward everything that they do not change.
//!
//! Tests add faults or preferences to a device, a tracer records calls, and a composite device
//! forwards to its members. Such a wrapper implements [`DeviceWrapper`], whose methods all forward
//! by default, and is used as a [`WrappedDevice`].

use crate::buffer::{Buffer, BufferType, Usage};
use crate::cancel::CancelToken;
use crate::device::{
    Capabilities, Compiled, Device, DeviceKind, DeviceLimits, Event, KeepAlive, MemoryInfo,
    Selection, Stream,
};
use crate::error::Result;
use crate::graph::{Graph, Node, TensorId};
use crate::memory::HostMemory;
use crate::support::Support;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Declares the trait and forwards every method of the contract, in both directions.
macro_rules! forward_methods {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {
        /// Differences between a [`WrappedDevice`] and its [`inner`](DeviceWrapper::inner) device.
        /// The methods are those of [`Device`].
        pub trait DeviceWrapper: Send + Sync + 'static {
            /// Returns the device to which calls are forwarded.
            fn inner(&self) -> &Arc<dyn Device>;

            /// Forwards; see [`Device`].
            fn name(&self) -> &str {
                self.inner().name()
            }

            /// Opens a stream.
            ///
            /// # Errors
            /// As [`Device::open_stream`].
            fn open_stream(&self) -> Result<Box<dyn Stream>> {
                Arc::clone(self.inner()).open_stream()
            }

            $(
                /// Forwards; see [`Device`].
                #[allow(clippy::missing_errors_doc)]
                fn $name(&self $(, $argument: $type)*) -> $result {
                    self.inner().$name($($argument),*)
                }
            )*
        }

        impl<D: DeviceWrapper> Device for WrappedDevice<D> {
            fn name(&self) -> &str {
                self.0.name()
            }

            fn open_stream(self: Arc<Self>) -> Result<Box<dyn Stream>> {
                self.0.open_stream()
            }

            fn as_any(&self) -> &dyn Any {
                self
            }

            $(
                fn $name(&self $(, $argument: $type)*) -> $result {
                    self.0.$name($($argument),*)
                }
            )*
        }
    };
}

/// A device wrapper that forwards everything that its [`DeviceWrapper`] does not change.
pub struct WrappedDevice<D>(pub D);

impl<D: DeviceWrapper> WrappedDevice<D> {
    /// Wraps `wrapper` as a device for a scheduler.
    pub fn device(wrapper: D) -> Arc<dyn Device> {
        Arc::new(WrappedDevice(wrapper))
    }
}

impl<D: DeviceWrapper> fmt::Debug for WrappedDevice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WrappedDevice({:?})", self.0.inner())
    }
}

forward_methods! {
    fn description(&self) -> String;
    fn kind(&self) -> DeviceKind;
    fn physical_id(&self) -> Option<String>;
    fn memory(&self) -> MemoryInfo;
    fn check_free(&self, bytes: usize, what: &str) -> Result<()>;
    fn capabilities(&self) -> Capabilities;
    fn buffer_type(&self) -> Arc<dyn BufferType>;
    fn host_buffer_type(&self) -> Option<Arc<dyn BufferType>>;
    fn extra_buffer_types(&self) -> Vec<Arc<dyn BufferType>>;
    fn import_alignment(&self) -> usize;
    fn import_host(&self, memory: Arc<HostMemory>, usage: Usage) -> Result<Arc<dyn Buffer>>;
    fn supports(&self, node: Node<'_>) -> Support;
    fn supports_each(&self, graph: &Graph, nodes: &[TensorId]) -> Vec<Support>;
    fn supports_buffer_type(&self, buffer_type: &Arc<dyn BufferType>) -> bool;
    fn can_copy(&self, from: &Arc<dyn BufferType>, to: &Arc<dyn BufferType>) -> bool;
    fn limits(&self) -> Result<Option<DeviceLimits>>;
    fn wants_offload(&self, node: Node<'_>) -> bool;
    fn selection(&self) -> Selection;
    fn workspace(&self, graph: &Graph, nodes: &[TensorId]) -> Result<usize>;
    fn workspaces(&self, graph: &Graph, parts: &[&[TensorId]]) -> Result<Vec<usize>>;
    fn member_memories(&self) -> Vec<Arc<dyn BufferType>>;
    fn member_workspaces(&self, graph: &Graph, nodes: &[TensorId]) -> Result<Vec<usize>>;
    fn compile(
        &self,
        graph: &Graph,
        nodes: &[TensorId],
        earlier: Option<&Arc<dyn Compiled>>,
        cancel: &CancelToken
    ) -> Result<Option<Arc<dyn Compiled>>>;
    fn optimize(&self, graph: &Graph, nodes: &mut [TensorId]) -> Vec<KeepAlive>;
    fn create_event(&self) -> Result<Arc<dyn Event>>;
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_device_method_is_forwarded() {
        let devices = include_str!("device.rs");
        let (_, device) = devices.split_once("pub trait Device:").unwrap();
        let (device, _) = device.split_once("\n}\n").unwrap();
        let methods = device.lines().filter_map(|line| {
            let name = line.strip_prefix("    fn ")?;
            name.split(['(', '<']).next()
        });
        let forwarded = include_str!("device_wrapper.rs");
        let (forwarded, _) = forwarded.split_once("mod tests").unwrap();
        let mut count = 0;
        for name in methods {
            assert!(forwarded.contains(&format!("fn {name}(")), "{name}");
            count += 1;
        }
        assert!(count > 20, "{count} methods");
    }
}
