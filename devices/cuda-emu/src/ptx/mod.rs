//! PTX modules, decoded ahead of their execution.

pub(crate) mod body;
mod decode;
pub(crate) mod instruction;
pub(crate) mod lexer;
mod link;
pub(crate) mod parse;
mod types;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::memory::{DeviceMemory, OutOfMemory};
use instruction::{BulkCopy, Constant, FunctionCall, Instruction, Location, Matrix, Register};

/// Text that is no PTX, or that the interpreter does not support.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line of the text, from 1.
    pub line: usize,
    /// Reason.
    pub message: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, message: String) -> Self {
        Self {
            line: line as usize,
            message,
        }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for ParseError {}

/// A variable of the global, constant or shared space.
#[derive(Clone, Debug, Default)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) bytes: usize,
    pub(crate) alignment: usize,
    /// Initial contents, as far as they are given. Zero follows.
    pub(crate) data: Vec<u8>,
    /// Addresses within the contents: offset, name of a variable, addend.
    pub(crate) relocations: Vec<(usize, String, i64)>,
    pub(crate) is_constant: bool,
    /// Shared memory whose size the launch determines.
    pub(crate) is_dynamic: bool,
}

/// Instructions of a module, and tables that they refer to.
#[derive(Debug, Default)]
pub(crate) struct Code {
    pub(crate) text: String,
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) locations: Vec<Location>,
    pub(crate) calls: Vec<FunctionCall>,
    pub(crate) branch_tables: Vec<Vec<u32>>,
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) bulk_copies: Vec<BulkCopy>,
    pub(crate) globals: Vec<Variable>,
    pub(crate) shared: Vec<Variable>,
}

impl Code {
    /// Returns the line and the text of an instruction, on one line.
    pub(crate) fn describe(&self, pc: u32) -> (usize, String) {
        let Some(location) = self.locations.get(pc as usize) else {
            return (0, "end of code".into());
        };
        let text = self
            .text
            .get(location.start as usize..location.end as usize)
            .unwrap_or("");
        (
            location.line as usize,
            text.split_whitespace().collect::<Vec<_>>().join(" "),
        )
    }
}

/// Requirements of a launch of a kernel.
#[derive(Debug, Default)]
pub(crate) struct KernelLayout {
    pub(crate) entry: u32,
    pub(crate) parameters: Vec<(usize, usize)>,
    pub(crate) parameter_bytes: usize,
    pub(crate) static_shared_bytes: usize,
    /// Offsets of shared variables within a block's memory.
    pub(crate) shared_offsets: HashMap<u32, u32>,
    pub(crate) local_bytes: usize,
    pub(crate) count32: usize,
    pub(crate) count64: usize,
    pub(crate) predicates: usize,
    pub(crate) constants32: Vec<(Register, Constant)>,
    pub(crate) constants64: Vec<(Register, Constant)>,
    pub(crate) max_threads: Option<u32>,
}

/// A kernel of a module.
#[derive(Clone, Debug)]
pub struct PtxKernel {
    pub(crate) name: String,
    pub(crate) code: Arc<Code>,
    pub(crate) layout: Arc<KernelLayout>,
    /// Addresses of global variables, once the module is loaded.
    pub(crate) globals: Option<Arc<[u64]>>,
}

impl PtxKernel {
    /// Returns the kernel's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of bytes of all parameters.
    #[must_use]
    pub fn parameter_bytes(&self) -> usize {
        self.layout.parameter_bytes
    }

    /// Returns the offset and the size of each parameter.
    #[must_use]
    pub fn parameters(&self) -> &[(usize, usize)] {
        &self.layout.parameters
    }

    /// Returns the bytes of shared memory that the kernel declares.
    #[must_use]
    pub fn static_shared_bytes(&self) -> usize {
        self.layout.static_shared_bytes
    }

    /// Returns the bytes of local memory of a thread.
    #[must_use]
    pub fn local_bytes(&self) -> usize {
        self.layout.local_bytes
    }

    /// Returns the number of threads that a block may have, if the kernel declares it.
    #[must_use]
    pub fn max_threads(&self) -> Option<u32> {
        self.layout.max_threads
    }
}

/// A parsed module.
#[derive(Clone, Debug)]
pub struct Module {
    code: Arc<Code>,
    kernels: Vec<PtxKernel>,
}

impl Module {
    /// Parses and decodes a module.
    ///
    /// # Errors
    /// If the text is malformed, or has an instruction that the interpreter does not support.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let (code, layouts) = link::build(text)?;
        let code = Arc::new(code);
        let kernels = layouts
            .into_iter()
            .map(|(name, layout)| PtxKernel {
                name,
                code: code.clone(),
                layout: Arc::new(layout),
                globals: code.globals.is_empty().then(|| Arc::from([])),
            })
            .collect();
        Ok(Self { code, kernels })
    }

    /// Returns a kernel. It runs only if the module has no global variables; otherwise the module
    /// must be loaded first.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&PtxKernel> {
        self.kernels.iter().find(|k| k.name == name)
    }

    /// Returns all kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &PtxKernel> {
        self.kernels.iter()
    }

    /// Allocates the module's global variables and constants.
    ///
    /// # Errors
    /// [`OutOfMemory`]; then nothing stays allocated.
    pub fn load(&self, memory: &mut DeviceMemory) -> Result<LoadedModule, OutOfMemory> {
        let mut addresses = Vec::with_capacity(self.code.globals.len());
        for global in &self.code.globals {
            match memory.alloc(global.bytes) {
                Ok(address) => addresses.push(address),
                Err(error) => {
                    for address in addresses {
                        memory.free(address);
                    }
                    return Err(error);
                }
            }
        }
        let names: HashMap<&str, u64> = self
            .code
            .globals
            .iter()
            .map(|g| g.name.as_str())
            .zip(addresses.iter().copied())
            .collect();
        for (global, &address) in self.code.globals.iter().zip(&addresses) {
            let mut data = global.data.clone();
            data.resize(global.bytes, 0);
            for (offset, name, addend) in &global.relocations {
                // The parser checked names and offsets.
                let target = names.get(name.as_str()).copied().unwrap_or_default();
                let target = target.wrapping_add_signed(*addend);
                if let Some(bytes) = data.get_mut(*offset..*offset + 8) {
                    bytes.copy_from_slice(&target.to_le_bytes());
                }
            }
            // The allocation has this size.
            let _ = memory.write(address, &data);
            if global.is_constant {
                memory.protect(address);
            }
        }
        let addresses: Arc<[u64]> = addresses.into();
        let kernels = self
            .kernels
            .iter()
            .map(|kernel| PtxKernel {
                globals: Some(addresses.clone()),
                ..kernel.clone()
            })
            .collect();
        let names = self
            .code
            .globals
            .iter()
            .map(|g| (g.name.clone(), g.bytes))
            .collect();
        Ok(LoadedModule {
            kernels,
            names,
            addresses,
        })
    }
}

/// A module whose global variables are in a card's memory.
#[derive(Clone, Debug)]
pub struct LoadedModule {
    kernels: Vec<PtxKernel>,
    names: Vec<(String, usize)>,
    addresses: Arc<[u64]>,
}

impl LoadedModule {
    /// Returns a kernel.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&PtxKernel> {
        self.kernels.iter().find(|k| k.name == name)
    }

    /// Returns all kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = &PtxKernel> {
        self.kernels.iter()
    }

    /// Returns the address and the size of a global variable.
    #[must_use]
    pub fn global(&self, name: &str) -> Option<(u64, usize)> {
        let index = self.names.iter().position(|(n, _)| n == name)?;
        Some((self.addresses[index], self.names[index].1))
    }

    /// Frees the global variables.
    pub fn unload(self, memory: &mut DeviceMemory) {
        for &address in self.addresses.iter() {
            memory.free(address);
        }
    }
}
