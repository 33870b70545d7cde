//! The functions of the CUDA driver that the device uses, as traits.
//!
//! One implementation calls the driver. Another one, for tests, interprets the PTX of the kernels.
//! Everything above these traits is the same for both.

use std::fmt;
use std::sync::Arc;

/// Description of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardInfo {
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Bus address, such as `0000:1b:00.0`.
    pub bus_address: String,
    /// Compute capability, such as 90 for 9.0.
    pub capability: u32,
    /// Number of multiprocessors.
    pub processors: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// True if it shares the host's memory.
    pub is_integrated: bool,
}

/// Kind of a driver error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// Not enough memory on the card.
    OutOfMemory,
    /// The context is unusable from now on, with all of its memory.
    Lost,
    /// Any other failure. The context stays usable.
    Other,
}

/// An error of a driver call.
#[derive(Clone, Debug)]
pub struct DriverError {
    /// Kind of the error.
    pub kind: DriverErrorKind,
    /// The call, and the driver's name of and text about the error.
    pub message: String,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for DriverError {}

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// Address in a card's memory.
pub type Address = u64;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name(pub u64);
    )*};
}

handles! {
    /// A queue of work.
    StreamHandle
    /// A point in a stream.
    EventHandle
    /// A loaded module.
    ModuleHandle
    /// A kernel of a module.
    FunctionHandle
    /// A recorded list of launches.
    GraphHandle
}

/// A launch as the driver sees it.
#[derive(Clone, Debug)]
pub struct KernelLaunch {
    /// The kernel.
    pub function: FunctionHandle,
    /// Number of groups, along the first dimension.
    pub groups: u32,
    /// Threads of a group.
    pub threads: u32,
    /// The kernel's parameters, each at its alignment.
    pub arguments: Vec<u8>,
    /// True if the kernel may start while the launch before it runs. It waits itself.
    pub is_early: bool,
}

/// A driver with its cards.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Returns the driver's name and version.
    fn description(&self) -> String;

    /// Returns the cards, in the driver's order.
    fn cards(&self) -> &[CardInfo];

    /// Opens a card.
    ///
    /// # Errors
    /// If the driver cannot.
    fn open(&self, card: usize) -> DriverResult<Arc<dyn DriverContext>>;
}

/// An opened card. Calls may come from any thread. Work that is queued in a stream runs in order;
/// streams are independent of each other.
pub trait DriverContext: Send + Sync + fmt::Debug {
    /// Returns the free and the total bytes of memory.
    ///
    /// # Errors
    /// If the card is lost.
    fn memory(&self) -> DriverResult<(usize, usize)>;

    /// Allocates memory with undefined contents, at a multiple of 256 bytes.
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMemory`].
    fn alloc(&self, bytes: usize) -> DriverResult<Address>;

    /// Frees memory of [`alloc`](DriverContext::alloc). Waits for work that may use it.
    fn free(&self, address: Address);

    /// Loads a module from PTX. It stays loaded as long as the context exists.
    ///
    /// # Errors
    /// If the driver rejects the text.
    fn load(&self, ptx: &str) -> DriverResult<ModuleHandle>;

    /// Returns a kernel of a module.
    ///
    /// # Errors
    /// If there is none of this name.
    fn function(&self, module: ModuleHandle, name: &str) -> DriverResult<FunctionHandle>;

    /// Creates a stream.
    ///
    /// # Errors
    /// If the driver cannot.
    fn create_stream(&self) -> DriverResult<StreamHandle>;

    /// Destroys a stream whose work is done.
    fn destroy_stream(&self, stream: StreamHandle);

    /// Waits for all work of a stream.
    ///
    /// # Errors
    /// If any of it failed.
    fn synchronize(&self, stream: StreamHandle) -> DriverResult<()>;

    /// Queues a write. `data` is no longer needed when it returns.
    ///
    /// # Errors
    /// If the range is not allocated, or earlier work failed.
    fn write(&self, stream: StreamHandle, to: Address, data: &[u8]) -> DriverResult<()>;

    /// Reads after the earlier work of the stream, and waits for it.
    ///
    /// # Errors
    /// If the range is not allocated, or earlier work failed.
    fn read(&self, stream: StreamHandle, from: Address, out: &mut [u8]) -> DriverResult<()>;

    /// Queues a fill.
    ///
    /// # Errors
    /// If the range is not allocated, or earlier work failed.
    fn fill(&self, stream: StreamHandle, to: Address, len: usize, value: u8) -> DriverResult<()>;

    /// Queues a copy within the card. The ranges do not overlap.
    ///
    /// # Errors
    /// If a range is not allocated, or earlier work failed.
    fn copy(
        &self,
        stream: StreamHandle,
        to: Address,
        from: Address,
        len: usize,
    ) -> DriverResult<()>;

    /// Queues a launch.
    ///
    /// # Errors
    /// If the driver rejects it, or earlier work failed.
    fn launch(&self, stream: StreamHandle, launch: &KernelLaunch) -> DriverResult<()>;

    /// Records launches that run one after the other.
    ///
    /// # Errors
    /// If the driver rejects them.
    fn create_graph(&self, launches: &[KernelLaunch]) -> DriverResult<GraphHandle>;

    /// Queues the launches of a graph.
    ///
    /// # Errors
    /// If earlier work failed.
    fn launch_graph(&self, stream: StreamHandle, graph: GraphHandle) -> DriverResult<()>;

    /// Destroys a graph that is not running.
    fn destroy_graph(&self, graph: GraphHandle);

    /// Creates an event without a point.
    ///
    /// # Errors
    /// If the driver cannot.
    fn create_event(&self) -> DriverResult<EventHandle>;

    /// Destroys an event.
    fn destroy_event(&self, event: EventHandle);

    /// Sets the point of an event after all work of a stream so far.
    ///
    /// # Errors
    /// If earlier work failed.
    fn record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult<()>;

    /// Makes later work of a stream wait for the point of an event.
    ///
    /// # Errors
    /// If earlier work failed.
    fn wait(&self, stream: StreamHandle, event: EventHandle) -> DriverResult<()>;

    /// Blocks the host until the point of an event is reached.
    ///
    /// # Errors
    /// If the work before it failed.
    fn synchronize_event(&self, event: EventHandle) -> DriverResult<()>;
}
