//! An opened card: context, modules, transfers, errors.

use crate::driver::{
    Address, CardInfo, Driver, DriverContext, DriverError, DriverErrorKind, DriverResult,
    EventHandle, FunctionHandle, ModuleHandle, StreamHandle,
};
use crate::modules::Module;
use crate::plan::{Card, PlannedLaunch};
use crate::tables::tables;
use samite_core::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// A card, opened on first use.
#[derive(Debug)]
pub struct Gpu {
    name: String,
    driver: Arc<dyn Driver>,
    index: usize,
    pub info: CardInfo,
    opened: OnceLock<Arc<OpenedCard>>,
    /// Held while the card is opened.
    opening: Mutex<()>,
}

impl Gpu {
    pub fn new(name: String, driver: Arc<dyn Driver>, index: usize, info: CardInfo) -> Arc<Self> {
        Arc::new(Gpu {
            name,
            driver,
            index,
            info,
            opened: OnceLock::new(),
            opening: Mutex::default(),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub fn card(&self) -> Card {
        Card {
            capability: self.info.capability,
            processors: self.info.processors,
        }
    }

    /// Opens the card, or returns the opened one.
    ///
    /// # Errors
    /// If it cannot be opened now.
    pub fn open(&self) -> Result<&Arc<OpenedCard>> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let _one_at_a_time = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if self.opened.get().is_none() {
            let context = self.driver.open(self.index);
            let context = context.map_err(|error| Error::device(&self.name, error.message))?;
            // The lock is held, so that this sets it.
            let _ = self.opened.set(Arc::new(OpenedCard::new(
                &self.name,
                self.info.capability,
                context,
            )?));
        }
        let opened = self.opened.get();
        opened.ok_or_else(|| Error::device(&self.name, "it is being opened"))
    }
}

/// An opened card.
#[derive(Debug)]
pub struct OpenedCard {
    device: Box<str>,
    pub context: Arc<dyn DriverContext>,
    capability: u32,
    /// Stream of reads and writes that belong to no queue.
    transfers: StreamHandle,
    lost: AtomicBool,
    kernels: Mutex<LoadedKernels>,
    /// Tables that kernels of IQ types read.
    tables: Mutex<Option<Address>>,
}

#[derive(Debug, Default)]
struct LoadedKernels {
    modules: BTreeMap<&'static str, ModuleHandle>,
    /// Kernels by the name of their plain module and their own.
    functions: BTreeMap<(&'static str, String), LoadedKernel>,
}

/// A kernel of a loaded module.
#[derive(Clone, Copy, Debug)]
pub struct LoadedKernel {
    pub function: FunctionHandle,
    /// True if it waits itself for the kernels before it.
    pub is_early: bool,
}

impl OpenedCard {
    fn new(device: &str, capability: u32, context: Arc<dyn DriverContext>) -> Result<Self> {
        let transfers = context.create_stream();
        Ok(OpenedCard {
            device: device.into(),
            capability,
            transfers: transfers.map_err(|error| Error::device(device, error.message))?,
            context,
            lost: AtomicBool::new(false),
            kernels: Mutex::default(),
            tables: Mutex::default(),
        })
    }

    /// Converts the result of a driver call.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] if the context cannot be used any more, else the driver's error.
    pub fn check<T>(&self, result: DriverResult<T>) -> Result<T> {
        result.map_err(|error| self.error(error))
    }

    /// Converts an error of a driver call.
    pub fn error(&self, error: DriverError) -> Error {
        match error.kind {
            DriverErrorKind::Lost => {
                self.lost.store(true, Ordering::Release);
                Error::DeviceLost {
                    device: self.device.clone(),
                    message: error.message.into(),
                }
            }
            DriverErrorKind::OutOfMemory => Error::OutOfMemory {
                device: self.device.clone(),
                what: error.message.into(),
                asked: 0,
                free: None,
            },
            DriverErrorKind::Other => Error::device(&self.device, error.message),
        }
    }

    /// Returns whether the context cannot be used any more.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Fails if the context cannot be used any more.
    pub fn check_alive(&self) -> Result<()> {
        if self.is_lost() {
            return Err(Error::DeviceLost {
                device: self.device.clone(),
                message: "earlier work failed; restart the program to use it again".into(),
            });
        }
        Ok(())
    }

    /// Allocates memory for `what`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or the driver's error.
    pub fn alloc(&self, bytes: usize, what: &str) -> Result<Address> {
        self.check_alive()?;
        self.context.alloc(bytes).map_err(|error| {
            if error.kind != DriverErrorKind::OutOfMemory {
                return self.error(error);
            }
            Error::OutOfMemory {
                device: self.device.clone(),
                what: what.into(),
                asked: bytes,
                free: self.context.memory().ok().map(|(free, _)| free),
            }
        })
    }

    /// Frees memory. Of a lost context, everything is gone already.
    pub fn free(&self, address: Address) {
        if !self.is_lost() {
            self.context.free(address);
        }
    }

    /// Writes and waits.
    ///
    /// # Errors
    /// The driver's error.
    pub fn write(&self, to: Address, data: &[u8]) -> Result<()> {
        self.check_alive()?;
        self.check(self.context.write(self.transfers, to, data))?;
        self.check(self.context.synchronize(self.transfers))
    }

    /// Reads and waits.
    ///
    /// # Errors
    /// The driver's error.
    pub fn read(&self, from: Address, out: &mut [u8]) -> Result<()> {
        self.check_alive()?;
        self.check(self.context.read(self.transfers, from, out))
    }

    /// Fills and waits.
    ///
    /// # Errors
    /// The driver's error.
    pub fn fill(&self, to: Address, len: usize, value: u8) -> Result<()> {
        self.check_alive()?;
        self.check(self.context.fill(self.transfers, to, len, value))?;
        self.check(self.context.synchronize(self.transfers))
    }

    /// Copies within the card and waits.
    ///
    /// # Errors
    /// The driver's error.
    pub fn copy(&self, to: Address, from: Address, len: usize) -> Result<()> {
        self.check_alive()?;
        self.check(self.context.copy(self.transfers, to, from, len))?;
        self.check(self.context.synchronize(self.transfers))
    }

    fn kernels(&self) -> MutexGuard<'_, LoadedKernels> {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the kernel of a launch. Loads its module on first use.
    ///
    /// # Errors
    /// If the driver rejects the module.
    pub fn kernel(&self, launch: &PlannedLaunch) -> Result<LoadedKernel> {
        self.check_alive()?;
        let mut kernels = self.kernels();
        let key = (launch.module.name, launch.function.to_string());
        if let Some(kernel) = kernels.functions.get(&key) {
            return Ok(*kernel);
        }
        let module = launch.module.for_capability(self.capability);
        let Module { name, .. } = module;
        let known = kernels.modules.get(name).copied();
        let loaded = match known {
            Some(loaded) => loaded,
            None => {
                let ptx = module.ptx();
                let ptx = ptx.map_err(|message| Error::device(&self.device, message))?;
                let loaded = self.check(self.context.load(&ptx))?;
                kernels.modules.insert(name, loaded);
                loaded
            }
        };
        let found = self.context.function(loaded, &launch.function);
        let kernel = LoadedKernel {
            function: self.check(found)?,
            is_early: module.starts_early(),
        };
        kernels.functions.insert(key, kernel);
        Ok(kernel)
    }

    fn known_tables(&self) -> MutexGuard<'_, Option<Address>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address of the tables that kernels of IQ types read.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn tables(&self) -> Result<Address> {
        let mut known = self.known_tables();
        if let Some(address) = *known {
            return Ok(address);
        }
        let bytes = tables();
        let address = self.alloc(bytes.len().max(1), "tables of block types")?;
        self.write(address, &bytes)
            .inspect_err(|_| self.free(address))?;
        Ok(*known.insert(address))
    }
}

impl Drop for OpenedCard {
    fn drop(&mut self) {
        if self.is_lost() {
            return;
        }
        if let Some(address) = self.known_tables().take() {
            self.context.free(address);
        }
        self.context.destroy_stream(self.transfers);
    }
}

/// A stream of the driver. Waits for its work before it goes.
#[derive(Debug)]
pub struct DriverStream {
    pub opened: Arc<OpenedCard>,
    pub handle: StreamHandle,
}

impl DriverStream {
    pub fn new(opened: &Arc<OpenedCard>) -> Result<Arc<Self>> {
        opened.check_alive()?;
        let handle = opened.check(opened.context.create_stream())?;
        Ok(Arc::new(DriverStream {
            opened: Arc::clone(opened),
            handle,
        }))
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// If any of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.opened.check_alive()?;
        self.opened
            .check(self.opened.context.synchronize(self.handle))
    }
}

impl Drop for DriverStream {
    fn drop(&mut self) {
        if self.synchronize().is_ok() {
            self.opened.context.destroy_stream(self.handle);
        }
    }
}

/// An event of the driver.
#[derive(Debug)]
pub struct DriverEvent {
    pub opened: Arc<OpenedCard>,
    pub handle: EventHandle,
}

impl DriverEvent {
    pub fn new(opened: &Arc<OpenedCard>) -> Result<Self> {
        opened.check_alive()?;
        let handle = opened.check(opened.context.create_event())?;
        Ok(DriverEvent {
            opened: Arc::clone(opened),
            handle,
        })
    }

    /// Blocks the host until the point is reached.
    ///
    /// # Errors
    /// If the work before it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.opened.check_alive()?;
        self.opened
            .check(self.opened.context.synchronize_event(self.handle))
    }
}

impl Drop for DriverEvent {
    fn drop(&mut self) {
        if !self.opened.is_lost() {
            self.opened.context.destroy_event(self.handle);
        }
    }
}
