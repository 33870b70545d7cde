//! Runs kernels: blocks one after another, warps in lockstep.
//!
//! The schedule decides the order of blocks and warps. With seed 0, one block runs at a time, in
//! order, and warps change at barriers only. With other seeds, blocks come in a random order, two
//! at a time, and warps change at random at barriers and atomic accesses. Results that depend on
//! the seed show a kernel that assumes an order.

// Loops over lanes index several vectors, and vectorize best this way.
#![allow(clippy::needless_range_loop)]
// A fault ends its launch, so that its size does not matter.
#![allow(clippy::result_large_err)]

mod alu;
mod asynchronous;
mod atomic;
mod barrier;
mod block;
mod convert;
mod exchange;
mod execute;
mod fault;
mod float;
mod matrix;
mod memory_access;
mod race;
mod registers;
pub(crate) mod support;
mod warp;

use crate::memory::DeviceMemory;
use crate::ptx::instruction::{CONSTANT_PREDICATES, Constant, SPECIAL_REGISTERS, TRUE};
use crate::ptx::{Code, PtxKernel};
use block::{BARRIERS, Barrier, BlockState};
use execute::SliceEnd;
use fault::Trouble;
pub use fault::{AccessKind, FaultKind, KernelFault, Space};
use memory_access::GlobalMemory;
use registers::LANES;
use warp::{Warp, WarpState};

/// Largest number of threads of a block.
const MAX_THREADS: u32 = 1024;

/// Largest shared memory of a block: what current cards allow.
const MAX_SHARED: usize = 227 << 10;

/// Instructions of a warp before another one runs.
const QUANTUM: u32 = 1 << 14;

/// Failed waits of all warps, without anything else in between, after which nothing can change.
const MAX_POLLS: u32 = 10_000;

/// Special registers with the index of the block.
const BLOCK_REGISTERS: std::ops::Range<usize> = 6..9;

/// Special register with the index of the cluster, which has one block.
const CLUSTER_REGISTER: usize = 28;

/// Blocks, threads and memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: [u32; 3],
    /// Number of threads of a block.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub dynamic_shared: usize,
}

/// Order and checks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// 0 for the natural order of blocks and warps; others choose a random one.
    pub seed: u64,
    /// Searches for data races, which takes time.
    pub detects_races: bool,
    /// Number of blocks that run at the same time. 0 chooses: 1 for seed 0, else 2.
    pub resident_blocks: usize,
    /// Number of instructions of all warps after which the launch fails.
    pub budget: u64,
    /// True if the kernel may start while those before it run. Until a warp waits for them, it may
    /// only read what no kernel wrote.
    pub is_early: bool,
}

impl Schedule {
    /// Creates a schedule with all checks.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            ..Self::default()
        }
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            seed: 0,
            detects_races: true,
            resident_blocks: 0,
            budget: 1 << 32,
            is_early: false,
        }
    }
}

/// Counters of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions of warps.
    pub instructions: u64,
    /// Blocks.
    pub blocks: u64,
    /// Barriers that blocks passed.
    pub barriers: u64,
}

/// State of a launch.
struct Interpreter<'a> {
    kernel: &'a PtxKernel,
    code: &'a Code,
    global: GlobalMemory<'a>,
    parameters: &'a [u8],
    grid: Grid,
    schedule: Schedule,
    random: u64,
    statistics: Statistics,
}

/// Runs a kernel to its end. `parameters` has each parameter at its offset.
///
/// The machine calls `should_stop` now and then. The launch ends when it returns true.
///
/// # Errors
/// If the kernel does something that is undefined on a card, or never ends.
pub fn run(
    kernel: &PtxKernel,
    grid: Grid,
    parameters: &[u8],
    memory: &mut DeviceMemory,
    schedule: Schedule,
    should_stop: &dyn Fn() -> bool,
) -> Result<Statistics, KernelFault> {
    let check = check_launch(kernel, grid, parameters);
    if let Err(reason) = check {
        return Err(KernelFault {
            kernel: kernel.name().to_owned(),
            line: 0,
            instruction: String::new(),
            block: [0; 3],
            thread: [0; 3],
            kind: FaultKind::Launch(reason),
        });
    }
    let mut machine = Interpreter {
        kernel,
        code: &kernel.code,
        global: GlobalMemory::new(memory, schedule.detects_races),
        parameters,
        grid,
        schedule,
        random: schedule.seed,
        statistics: Statistics::default(),
    };
    machine.run_grid(should_stop)?;
    Ok(machine.statistics)
}

fn check_launch(kernel: &PtxKernel, grid: Grid, parameters: &[u8]) -> Result<(), String> {
    let threads = grid.threads.iter().map(|&n| u64::from(n)).product::<u64>();
    let limit = kernel.max_threads().unwrap_or(MAX_THREADS).min(MAX_THREADS);
    if threads == 0 || threads > u64::from(limit) {
        return Err(format!(
            "a block has {threads} threads; the kernel allows 1 to {limit}"
        ));
    }
    let blocks = grid.blocks.iter().map(|&n| u128::from(n)).product::<u128>();
    if blocks == 0 || blocks >= u128::from(u32::MAX - 1) {
        return Err(format!("a grid has {blocks} blocks"));
    }
    if grid.blocks[1].max(grid.blocks[2]) > 65535 {
        return Err("a grid has more than 65535 blocks along its second or third dimension".into());
    }
    let shared = kernel
        .static_shared_bytes()
        .saturating_add(grid.dynamic_shared);
    if shared > MAX_SHARED {
        return Err(format!(
            "a block has {shared} bytes of shared memory; {MAX_SHARED} are allowed"
        ));
    }
    if parameters.len() != kernel.parameter_bytes() {
        let (have, want) = (parameters.len(), kernel.parameter_bytes());
        return Err(format!(
            "the parameters have {have} bytes; the kernel takes {want}"
        ));
    }
    if kernel.globals.is_none() {
        return Err("the kernel's module has variables and is not loaded".into());
    }
    Ok(())
}

impl Interpreter<'_> {
    /// Returns the next random number (SplitMix64).
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next_random() % limit.max(1) as u64) as usize
    }

    /// Returns a lane of `mask` for each one of it, in the order of the seed.
    fn lane_order(&self, mask: u32, lane: usize) -> usize {
        if self.schedule.seed == 0 || mask != u32::MAX {
            return lane;
        }
        (lane ^ (self.schedule.seed as usize * 7 + 13)) % LANES
    }

    /// Returns the order of blocks.
    fn block_order(&mut self) -> Vec<u32> {
        let count = self.grid.blocks.iter().product::<u32>();
        let mut order: Vec<u32> = (0..count).collect();
        if self.schedule.seed != 0 {
            for i in (1..order.len()).rev() {
                let j = self.below(i + 1);
                order.swap(i, j);
            }
        }
        order
    }

    fn run_grid(&mut self, should_stop: &dyn Fn() -> bool) -> Result<(), KernelFault> {
        let mut order = self.block_order().into_iter();
        let resident = match self.schedule.resident_blocks {
            0 if self.schedule.seed == 0 => 1,
            0 => 2,
            n => n,
        };
        let mut running: Vec<BlockState> = Vec::new();
        let mut spare: Vec<BlockState> = Vec::new();
        let mut turn = 0;
        let mut slices = 0u32;
        // Rises while all that warps do is to wait for mbarriers.
        let mut polls = 0;
        loop {
            while running.len() < resident {
                let Some(number) = order.next() else { break };
                let mut block = spare.pop().unwrap_or_default();
                self.start_block(&mut block, number);
                running.push(block);
            }
            if running.is_empty() {
                return Ok(());
            }
            let Some((at, index)) = self.choose(&running, &mut turn) else {
                return Err(self.deadlock(&running));
            };
            let block = &mut running[at];
            let mut warp = std::mem::take(&mut block.warps[index]);
            let before = polls;
            let result = self.run_slice(block, &mut warp, QUANTUM);
            let result = result.and_then(|end| match end {
                SliceEnd::Barrier(arrival) => block.arrive(&mut warp, arrival).inspect_err(|_| {
                    warp.pc = warp.pc.saturating_sub(1);
                }),
                SliceEnd::Poll => {
                    polls += 2;
                    Ok(())
                }
                SliceEnd::Yield | SliceEnd::Done => Ok(()),
            });
            let pc = warp.pc;
            block.warps[index] = warp;
            polls = if polls > before { before + 1 } else { 0 };
            if let Err(trouble) = result {
                let number = block.number;
                return Err(self.fault(*trouble, number, index, pc));
            }
            if block.complete_barriers() {
                self.statistics.barriers += 1;
            }
            if block.warps.iter().all(|w| w.state == WarpState::Done) {
                self.statistics.blocks += 1;
                spare.push(running.swap_remove(at));
            }
            slices = slices.wrapping_add(1);
            let kind = if self.statistics.instructions > self.schedule.budget {
                FaultKind::Budget
            } else if polls > MAX_POLLS {
                FaultKind::Deadlock
            } else if slices.is_multiple_of(64) && should_stop() {
                FaultKind::Stopped
            } else {
                continue;
            };
            let number = running.first().map_or(1, |b| b.number);
            return Err(self.fault(Trouble { lane: 0, kind }, number, index, pc));
        }
    }

    /// Chooses a block and a warp that can run.
    fn choose(&mut self, running: &[BlockState], turn: &mut usize) -> Option<(usize, usize)> {
        let warps = running[0].warps.len();
        let total = running.len() * warps;
        let start = if self.schedule.seed == 0 {
            *turn
        } else {
            self.below(total)
        };
        let found = (0..total)
            .map(|i| (start + i) % total)
            .find(|&i| running[i / warps].warps[i % warps].state == WarpState::Ready)?;
        *turn = found + 1;
        Some((found / warps, found % warps))
    }

    fn deadlock(&self, running: &[BlockState]) -> KernelFault {
        let block = &running[0];
        let waiting = |w: &Warp| matches!(w.state, WarpState::Barrier(_));
        let index = block.warps.iter().position(waiting).unwrap_or(0);
        let pc = block.warps[index].pc.saturating_sub(1);
        let trouble = Trouble {
            lane: 0,
            kind: FaultKind::Deadlock,
        };
        self.fault(trouble, block.number, index, pc)
    }

    /// Returns the index of block `number`, from 1.
    fn block_index(&self, number: u32) -> [u32; 3] {
        let number = number.saturating_sub(1);
        let [x, y, _] = self.grid.blocks;
        [number % x, number / x % y, number / x / y]
    }

    fn fault(&self, trouble: Trouble, number: u32, warp: usize, pc: u32) -> KernelFault {
        let (line, instruction) = self.code.describe(pc);
        let thread = (warp * LANES + trouble.lane) as u32;
        let [x, y, _] = self.grid.threads;
        let mut kind = trouble.kind;
        if let FaultKind::Race {
            other_line,
            other_instruction,
            other_block,
            ..
        } = &mut kind
        {
            (*other_line, *other_instruction) = self.code.describe(*other_line as u32);
            if let Some(block) = other_block {
                *block = self.block_index(block[0]);
            }
        }
        KernelFault {
            kernel: self.kernel.name().to_owned(),
            line,
            instruction,
            block: self.block_index(number),
            thread: [thread % x, thread / x % y, thread / x / y],
            kind,
        }
    }

    /// Prepares a block. Its warps may have run another block before.
    fn start_block(&mut self, block: &mut BlockState, number: u32) {
        let layout = &self.kernel.layout;
        block.number = number + 1;
        block.index = self.block_index(block.number);
        block.barriers = [Barrier::default(); BARRIERS];
        block.verdicts.clear();
        block.mbarriers.clear();
        let bytes = layout.static_shared_bytes + self.grid.dynamic_shared;
        block.shared.start(bytes, self.schedule.detects_races);
        let threads = self.grid.threads.iter().product::<u32>();
        for index in 0..threads.div_ceil(LANES as u32) {
            let rest = threads - index * LANES as u32;
            let mask = if rest >= 32 {
                u32::MAX
            } else {
                (1 << rest) - 1
            };
            if index as usize == block.warps.len() {
                let mut warp = self.create_warp();
                self.set_specials(&mut warp, index);
                block.warps.push(warp);
            }
            let warp = &mut block.warps[index as usize];
            warp.start(index, mask, layout.entry);
            for (register, value) in BLOCK_REGISTERS.zip(block.index) {
                warp.registers.r32[register] = [value; LANES];
            }
            warp.registers.r32[CLUSTER_REGISTER] = [block.index[0]; LANES];
        }
    }

    fn create_warp(&self) -> Warp {
        let layout = &self.kernel.layout;
        let mut warp = Warp::default();
        // NaN, so that uninitialized registers show.
        warp.registers.r32 = vec![[u32::MAX; LANES]; layout.count32];
        warp.registers.r64 = vec![[u64::MAX; LANES]; layout.count64];
        warp.registers.predicates = vec![0; layout.predicates.max(CONSTANT_PREDICATES)];
        warp.registers.predicates[usize::from(TRUE)] = u32::MAX;
        warp.local = vec![0xff; layout.local_bytes * LANES];
        for &(register, constant) in &layout.constants32 {
            let value = self.value_of(constant) as u32;
            warp.registers.r32[usize::from(register)] = [value; LANES];
        }
        for &(register, constant) in &layout.constants64 {
            warp.registers.r64[usize::from(register)] = [self.value_of(constant); LANES];
        }
        warp
    }

    fn value_of(&self, constant: Constant) -> u64 {
        match constant {
            Constant::Value(value) => value,
            Constant::Global(variable, offset) => {
                let addresses = self.kernel.globals.as_deref().unwrap_or_default();
                let address = addresses.get(variable as usize).copied().unwrap_or(0);
                address.wrapping_add_signed(offset)
            }
            Constant::Shared(variable, offset) => {
                let start = self.kernel.layout.shared_offsets.get(&variable).copied();
                u64::from(start.unwrap_or(0)).wrapping_add_signed(offset)
            }
        }
    }

    /// Sets the special registers, in the order of [`SPECIAL_REGISTERS`]. Those with the block's
    /// index are set when a block starts.
    fn set_specials(&self, warp: &mut Warp, index: u32) {
        let Grid {
            blocks,
            threads,
            dynamic_shared,
        } = self.grid;
        let first = index * LANES as u32;
        let count = threads.iter().product::<u32>().div_ceil(LANES as u32);
        let total = self.kernel.layout.static_shared_bytes + dynamic_shared;
        for (i, out) in warp.registers.r32[..SPECIAL_REGISTERS.len()]
            .iter_mut()
            .enumerate()
        {
            for (lane, out) in out.iter_mut().enumerate() {
                let thread = first + lane as u32;
                let below = (1u32 << lane) - 1;
                *out = match i {
                    0 => thread % threads[0],
                    1 => thread / threads[0] % threads[1],
                    2 => thread / threads[0] / threads[1],
                    3..=5 => threads[i - 3],
                    9..=11 => blocks[i - 9],
                    12 => lane as u32,
                    13 => index,
                    14 => count,
                    16 => 1,
                    17 => 1 << lane,
                    18 => below | 1 << lane,
                    19 => below,
                    20 => !below,
                    21 => !(below | 1 << lane),
                    22 => dynamic_shared as u32,
                    23 => total as u32,
                    25 | 27 => 1,
                    29 => blocks[0],
                    _ => 0,
                };
            }
        }
    }
}
