//! A card that runs kernels of a fixture.

#![allow(dead_code)] // each test uses some of it

use samite_cuda_emu::machine::{Grid, KernelFault, Schedule, Statistics, run};
use samite_cuda_emu::memory::DeviceMemory;
use samite_cuda_emu::ptx::{LoadedModule, Module};

/// A card with one module.
pub struct Card {
    pub memory: DeviceMemory,
    pub module: LoadedModule,
}

impl Card {
    pub fn new(text: &str) -> Self {
        let mut memory = DeviceMemory::new(1 << 28);
        let module = Module::parse(text).unwrap().load(&mut memory).unwrap();
        Self { memory, module }
    }

    pub fn upload<const N: usize>(&mut self, values: impl IntoIterator<Item = [u8; N]>) -> u64 {
        let bytes: Vec<u8> = values.into_iter().flatten().collect();
        let address = self.memory.alloc(bytes.len()).unwrap();
        self.memory.write(address, &bytes).unwrap();
        address
    }

    pub fn words(&self, address: u64, count: usize) -> Vec<u32> {
        let bytes = self.memory.slice(address, 4 * count).unwrap();
        bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }

    pub fn floats(&self, address: u64, count: usize) -> Vec<f32> {
        self.words(address, count)
            .into_iter()
            .map(f32::from_bits)
            .collect()
    }

    pub fn run(
        &mut self,
        name: &str,
        [blocks, threads]: [u32; 2],
        parameters: &[u8],
        schedule: Schedule,
    ) -> Result<Statistics, KernelFault> {
        let kernel = self.module.kernel(name).unwrap().clone();
        let grid = Grid {
            blocks: [blocks, 1, 1],
            threads: [threads, 1, 1],
            dynamic_shared: 0,
        };
        run(
            &kernel,
            grid,
            parameters,
            &mut self.memory,
            schedule,
            &|| false,
        )
    }
}

/// Packs parameters, each at its alignment.
pub fn pack(parameters: &[&dyn Pack]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for parameter in parameters {
        parameter.pack(&mut bytes);
    }
    bytes
}

/// A parameter of a kernel.
pub trait Pack {
    fn pack(&self, to: &mut Vec<u8>);
}

impl Pack for u64 {
    fn pack(&self, to: &mut Vec<u8>) {
        to.resize(to.len().next_multiple_of(8), 0);
        to.extend(self.to_le_bytes());
    }
}

impl Pack for u32 {
    fn pack(&self, to: &mut Vec<u8>) {
        to.extend(self.to_le_bytes());
    }
}

impl Pack for f32 {
    fn pack(&self, to: &mut Vec<u8>) {
        to.extend(self.to_le_bytes());
    }
}

/// Runs `test` under several schedules.
pub fn schedules(test: impl Fn(Schedule)) {
    for seed in 0..4 {
        test(Schedule::new(seed));
    }
    test(Schedule {
        detects_races: false,
        ..Schedule::new(1)
    });
}

/// Returns random numbers.
pub fn noise(count: usize, mut seed: u32) -> Vec<u32> {
    let mut next = || {
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        seed
    };
    (0..count).map(|_| next()).collect()
}
