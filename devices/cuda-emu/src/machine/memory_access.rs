//! Loads, stores and atomic accesses.

use super::Interpreter;
use super::block::BlockState;
use super::fault::{AccessKind, FaultKind, MachineResult, Space, Trouble};
use super::race::{Agent, Conflict, Releases, Shadow, Touch};
use super::registers::{LANES, Wide, lanes};
use super::warp::Warp;
use crate::memory::DeviceMemory;
use crate::ptx::instruction::{NO_REGISTER, Ordering, PtxAddress, Register, Type};

/// Generic address of a block's shared memory.
pub(crate) const SHARED_WINDOW: u64 = 0x0100_0000_0000;
/// Generic address of a thread's local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x0200_0000_0000;
/// Generic address of a kernel's parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x0300_0000_0000;
/// Size of each window.
const WINDOW: u64 = 0x0100_0000_0000;

/// Up to 16 bytes of each lane.
pub(crate) type Data = [[u32; 4]; LANES];

/// Returns the generic address of the first byte of a space.
pub(crate) fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        _ => 0,
    }
}

/// Returns the space that contains a generic address.
pub(crate) fn space_of(address: u64) -> Space {
    match address / WINDOW {
        1 => Space::Shared,
        2 => Space::Local,
        3 => Space::Param,
        _ => Space::Global,
    }
}

/// Parameters of an access.
#[derive(Clone, Copy)]
pub(crate) struct AccessRequest {
    pub(crate) space: Space,
    pub(crate) bytes: usize,
    pub(crate) ordering: Ordering,
    pub(crate) pc: u32,
}

/// Returns the addresses of all lanes.
pub(crate) fn addresses(warp: &Warp, address: PtxAddress) -> Wide {
    let offset = i64::from(address.offset);
    let mut out = [0; LANES];
    if address.is_wide {
        let base = warp.registers.get64(address.register);
        for i in 0..LANES {
            out[i] = base[i].wrapping_add_signed(offset);
        }
    } else {
        let base = warp.registers.get32(address.register);
        for i in 0..LANES {
            out[i] = u64::from(base[i].wrapping_add_signed(address.offset));
        }
    }
    out
}

/// Splits lanes with generic addresses by space, and turns the addresses into those of the spaces.
pub(crate) fn split(space: Space, mask: u32, at: &mut Wide) -> Vec<(Space, u32)> {
    if space != Space::Generic {
        let space = if space == Space::Const {
            Space::Global
        } else {
            space
        };
        return vec![(space, mask)];
    }
    let mut parts: Vec<(Space, u32)> = Vec::with_capacity(1);
    for lane in lanes(mask) {
        let space = space_of(at[lane]);
        at[lane] -= window(space);
        match parts.iter_mut().find(|(s, _)| *s == space) {
            Some((_, lanes)) => *lanes |= 1 << lane,
            None => parts.push((space, 1 << lane)),
        }
    }
    parts
}

#[inline(always)]
fn fetch<const N: usize>(bytes: &[u8]) -> [u32; 4] {
    let mut all = [0u8; 16];
    all[..N].copy_from_slice(&bytes[..N]);
    let word = |i: usize| u32::from_le_bytes([all[i], all[i + 1], all[i + 2], all[i + 3]]);
    [word(0), word(4), word(8), word(12)]
}

pub(crate) fn to_bytes(words: &[u32; 4]) -> [u8; 16] {
    let mut all = [0; 16];
    for (chunk, word) in all.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    all
}

/// Fails if a lane's address is no multiple of the access's size.
pub(crate) fn check_alignment(
    mask: u32,
    at: &Wide,
    bytes: usize,
    space: Space,
    access: AccessKind,
) -> MachineResult {
    let low = bytes as u64 - 1;
    if (0..LANES).any(|i| mask >> i & 1 == 1 && at[i] & low != 0)
        && let Some(lane) = lanes(mask).find(|&i| at[i] & low != 0)
    {
        let address = at[lane]
            + if space == Space::Global {
                0
            } else {
                window(space)
            };
        return Err(Trouble::new(
            lane,
            FaultKind::Misaligned {
                space,
                access,
                address,
                bytes,
            },
        ));
    }
    Ok(())
}

/// Global memory with its shadow.
pub(crate) struct GlobalMemory<'a> {
    pub(crate) memory: &'a mut DeviceMemory,
    /// Accesses by allocation, or nothing if races are not searched for.
    pub(crate) shadows: Option<Vec<Shadow>>,
    pub(crate) releases: Releases,
    /// True while accesses have no order with those of earlier kernels.
    pub(crate) is_unordered: bool,
    last: usize,
}

/// Accesses to bytes that follow each other.
#[derive(Clone, Copy)]
struct ByteSpan {
    allocation: usize,
    offset: usize,
    bytes: usize,
    lane: usize,
}

impl<'a> GlobalMemory<'a> {
    pub(crate) fn new(memory: &'a mut DeviceMemory, detects_races: bool) -> Self {
        let count = memory.allocation_count();
        let shadows = detects_races.then(|| (0..count).map(|_| Shadow::default()).collect());
        Self {
            memory,
            shadows,
            releases: Releases::default(),
            is_unordered: false,
            last: 0,
        }
    }

    /// Returns the allocation and the offset of a range.
    fn locate(&mut self, address: u64, bytes: usize) -> Option<(usize, usize)> {
        if let Some((start, data)) = self.memory.allocation(self.last)
            && let Some(offset) = address.checked_sub(start)
            && offset.saturating_add(bytes as u64) <= data.len() as u64
        {
            return Some((self.last, offset as usize));
        }
        let index = self.memory.find(address)?;
        let (start, data) = self.memory.allocation(index)?;
        let offset = address - start;
        if offset.saturating_add(bytes as u64) > data.len() as u64 {
            return None;
        }
        self.last = index;
        Some((index, offset as usize))
    }

    /// Fails for an access that has no order with those of earlier kernels but needs one.
    fn check_order(&self, allocation: usize, access: AccessKind, lane: usize) -> MachineResult {
        let is_shared = access != AccessKind::Read || self.memory.is_computed(allocation);
        if self.is_unordered && is_shared {
            return Err(Trouble::new(lane, FaultKind::TooEarly { access }));
        }
        Ok(())
    }

    /// Calls `f` with the allocation and the offset of each lane, and notes the accesses.
    fn visit(
        &mut self,
        (mask, at, bytes): (u32, &Wide, usize),
        agent: &Agent<'_>,
        (touch, access): (Touch, AccessKind),
        mut f: impl FnMut(&mut DeviceMemory, usize, usize, usize) -> Option<()>,
    ) -> MachineResult {
        let mut span: Option<ByteSpan> = None;
        for lane in lanes(mask) {
            let Some((allocation, offset)) = self.locate(at[lane], bytes) else {
                let (space, address) = (Space::Global, at[lane]);
                let kind = FaultKind::OutOfBounds {
                    space,
                    access,
                    address,
                    bytes,
                };
                return Err(Trouble::new(lane, kind));
            };
            self.check_order(allocation, access, lane)?;
            if f(self.memory, allocation, offset, lane).is_none() {
                return Err(Trouble::new(
                    lane,
                    FaultKind::ReadOnly { address: at[lane] },
                ));
            }
            if self.shadows.is_none() {
                continue;
            }
            match &mut span {
                Some(s) if s.allocation == allocation && s.offset + s.bytes == offset => {
                    s.bytes += bytes;
                }
                Some(s) if s.allocation == allocation && s.offset == offset && s.bytes == bytes => {
                }
                other => {
                    if let Some(done) = other.replace(ByteSpan {
                        allocation,
                        offset,
                        bytes,
                        lane,
                    }) {
                        self.note(done, agent, touch, access)?;
                    }
                }
            }
        }
        match span {
            Some(span) => self.note(span, agent, touch, access),
            None => Ok(()),
        }
    }

    fn note(
        &mut self,
        span: ByteSpan,
        agent: &Agent<'_>,
        touch: Touch,
        access: AccessKind,
    ) -> MachineResult {
        let Some(shadow) = self
            .shadows
            .as_mut()
            .and_then(|s| s.get_mut(span.allocation))
        else {
            return Ok(());
        };
        shadow
            .touch(&self.releases, agent, touch, span.offset, span.bytes)
            .map_err(|conflict| {
                let start = self.memory.allocation(span.allocation).map_or(0, |a| a.0);
                let address = start + conflict.offset as u64;
                race(span.lane, Space::Global, access, address, conflict)
            })
    }

    /// Loads bytes of the lanes of `mask`.
    fn load<const N: usize>(
        &mut self,
        mask: u32,
        at: &Wide,
        agent: &Agent<'_>,
        touch: Touch,
        data: &mut Data,
    ) -> MachineResult {
        self.visit(
            (mask, at, N),
            agent,
            (touch, AccessKind::Read),
            |memory, index, offset, lane| {
                let (_, bytes) = memory.allocation(index)?;
                data[lane] = fetch::<N>(bytes.get(offset..offset + N)?);
                Some(())
            },
        )
    }

    fn store<const N: usize>(
        &mut self,
        mask: u32,
        at: &Wide,
        agent: &Agent<'_>,
        touch: Touch,
        data: &Data,
    ) -> MachineResult {
        self.visit(
            (mask, at, N),
            agent,
            (touch, AccessKind::Write),
            |memory, index, offset, lane| {
                let (_, bytes) = memory.writable_allocation(index)?;
                bytes
                    .get_mut(offset..offset + N)?
                    .copy_from_slice(&to_bytes(&data[lane])[..N]);
                Some(())
            },
        )
    }

    /// Notes an access to a range, and returns its bytes' place.
    pub(crate) fn range(
        &mut self,
        address: u64,
        bytes: usize,
        agent: &Agent<'_>,
        (touch, access, lane): (Touch, AccessKind, usize),
    ) -> MachineResult {
        let Some((allocation, offset)) = self.locate(address, bytes) else {
            let kind = FaultKind::OutOfBounds {
                space: Space::Global,
                access,
                address,
                bytes,
            };
            return Err(Trouble::new(lane, kind));
        };
        self.check_order(allocation, access, lane)?;
        self.note(
            ByteSpan {
                allocation,
                offset,
                bytes,
                lane,
            },
            agent,
            touch,
            access,
        )
    }
}

/// Returns the fault of a race. [`Interpreter`] adds names from the pc that it carries.
pub(crate) fn race(
    lane: usize,
    space: Space,
    access: AccessKind,
    address: u64,
    conflict: Conflict,
) -> Box<Trouble> {
    Trouble::new(
        lane,
        FaultKind::Race {
            space,
            access,
            address,
            other_line: conflict.pc as usize,
            other_instruction: String::new(),
            other_block: conflict.block.map(|b| [b, 0, 0]),
            other_warp: conflict.warp,
        },
    )
}

/// Returns the agent of a warp's access.
pub(crate) fn agent<'w>(block: &BlockState, warp: &'w Warp, pc: u32) -> Agent<'w> {
    Agent {
        block: block.number,
        warp: warp.index,
        clock: &warp.clock,
        acquired: warp.acquired,
        pc,
    }
}

macro_rules! by_size {
    ($bytes:expr, |$n:ident| $call:expr) => {
        match $bytes {
            1 => {
                const $n: usize = 1;
                $call
            }
            2 => {
                const $n: usize = 2;
                $call
            }
            4 => {
                const $n: usize = 4;
                $call
            }
            8 => {
                const $n: usize = 8;
                $call
            }
            _ => {
                const $n: usize = 16;
                $call
            }
        }
    };
}

impl Interpreter<'_> {
    /// Loads up to 16 bytes of each lane.
    pub(crate) fn load(
        &mut self,
        block: &mut BlockState,
        warp: &Warp,
        mask: u32,
        request: AccessRequest,
        at: &mut Wide,
        data: &mut Data,
    ) -> MachineResult {
        let AccessRequest {
            bytes,
            ordering,
            pc,
            ..
        } = request;
        let agent = agent(block, warp, pc);
        let touch = match ordering {
            Ordering::Weak => Touch::Read,
            Ordering::Constant => Touch::ReadConstant,
            _ => Touch::ReadAtomic,
        };
        for (space, mask) in split(request.space, mask, at) {
            check_alignment(mask, at, bytes, space, AccessKind::Read)?;
            match space {
                Space::Shared => {
                    let releases = &self.global.releases;
                    block.shared.check(
                        mask,
                        at,
                        bytes,
                        &agent,
                        (touch, AccessKind::Read),
                        releases,
                    )?;
                    for lane in lanes(mask) {
                        let from = &block.shared.data[at[lane] as usize..];
                        data[lane] = by_size!(bytes, |N| fetch::<N>(from));
                    }
                }
                Space::Local | Space::Param => {
                    for lane in lanes(mask) {
                        let memory = match space {
                            Space::Local => warp.local_of(lane),
                            _ => self.parameters,
                        };
                        let from = range_of(memory.len(), at[lane], bytes).ok_or_else(|| {
                            bounds(lane, space, AccessKind::Read, at[lane], bytes)
                        })?;
                        data[lane] = by_size!(bytes, |N| fetch::<N>(&memory[from]));
                    }
                }
                _ => by_size!(bytes, |N| self
                    .global
                    .load::<N>(mask, at, &agent, touch, data))?,
            }
        }
        Ok(())
    }

    /// Stores up to 16 bytes of each lane.
    pub(crate) fn store(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        request: AccessRequest,
        at: &mut Wide,
        data: &Data,
    ) -> MachineResult {
        let AccessRequest {
            bytes,
            ordering,
            pc,
            ..
        } = request;
        let touch = if ordering == Ordering::Weak {
            Touch::Write
        } else {
            Touch::Update
        };
        for (space, mask) in split(request.space, mask, at) {
            check_alignment(mask, at, bytes, space, AccessKind::Write)?;
            check_overlap(mask, at, bytes, space, data, pc)?;
            let agent = agent(block, warp, pc);
            match space {
                Space::Shared => {
                    let releases = &self.global.releases;
                    block.shared.check(
                        mask,
                        at,
                        bytes,
                        &agent,
                        (touch, AccessKind::Write),
                        releases,
                    )?;
                    for lane in lanes(mask) {
                        let start = at[lane] as usize;
                        block.shared.write(start, &to_bytes(&data[lane])[..bytes]);
                    }
                }
                Space::Local => {
                    for lane in lanes(mask) {
                        let memory = warp.local_of_mut(lane);
                        let to = range_of(memory.len(), at[lane], bytes).ok_or_else(|| {
                            bounds(lane, space, AccessKind::Write, at[lane], bytes)
                        })?;
                        memory[to].copy_from_slice(&to_bytes(&data[lane])[..bytes]);
                    }
                }
                Space::Param => {
                    let lane = mask.trailing_zeros() as usize % LANES;
                    return Err(Trouble::new(
                        lane,
                        FaultKind::ReadOnly { address: at[lane] },
                    ));
                }
                _ => by_size!(bytes, |N| self
                    .global
                    .store::<N>(mask, at, &agent, touch, data))?,
            }
        }
        Ok(())
    }
}

/// Fails if two lanes store different values to the same bytes: either could win.
fn check_overlap(
    mask: u32,
    at: &Wide,
    bytes: usize,
    space: Space,
    data: &Data,
    pc: u32,
) -> MachineResult {
    if space == Space::Local {
        return Ok(());
    }
    let mut last = None;
    let ascends = lanes(mask).all(|lane| last.replace(at[lane]).is_none_or(|l| l < at[lane]));
    if ascends {
        return Ok(());
    }
    for lane in lanes(mask) {
        for other in lanes(mask & ((1 << lane) - 1)) {
            if at[lane] == at[other]
                && to_bytes(&data[lane])[..bytes] != to_bytes(&data[other])[..bytes]
            {
                let conflict = Conflict {
                    offset: 0,
                    pc,
                    block: None,
                    warp: 0,
                };
                return Err(race(lane, space, AccessKind::Write, at[lane], conflict));
            }
        }
    }
    Ok(())
}

pub(crate) fn range_of(len: usize, address: u64, bytes: usize) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(address).ok()?;
    let end = start.checked_add(bytes)?;
    (end <= len).then_some(start..end)
}

pub(crate) fn bounds(
    lane: usize,
    space: Space,
    access: AccessKind,
    address: u64,
    bytes: usize,
) -> Box<Trouble> {
    Trouble::new(
        lane,
        FaultKind::OutOfBounds {
            space,
            access,
            address,
            bytes,
        },
    )
}

/// Writes loaded elements to registers.
pub(crate) fn spread(
    warp: &mut Warp,
    mask: u32,
    ty: Type,
    (d, is_wide): (&[Register], bool),
    data: &Data,
) {
    let size = ty.bytes();
    for (k, &d) in d.iter().enumerate() {
        if d == NO_REGISTER {
            continue;
        }
        let element = |lane: &[u32; 4]| -> u64 {
            match size {
                8 => u64::from(lane[(2 * k) & 3]) | (u64::from(lane[(2 * k + 1) & 3]) << 32),
                4 => u64::from(lane[k]),
                2 => u64::from(lane[k / 2] >> (16 * (k & 1)) & 0xffff),
                _ => u64::from(lane[0] >> (8 * k) & 0xff),
            }
        };
        let signed = |bits: u64| match ty {
            Type::S8 => i64::from(bits as i8) as u64,
            Type::S16 => i64::from(bits as i16) as u64,
            Type::S32 => i64::from(bits as i32) as u64,
            _ => bits,
        };
        let mut wide = [0; LANES];
        if is_wide {
            for i in 0..LANES {
                wide[i] = signed(element(&data[i]));
            }
            warp.registers.set64(d, mask, &wide);
        } else {
            let mut narrow = [0; LANES];
            for i in 0..LANES {
                narrow[i] = signed(element(&data[i])) as u32;
            }
            warp.registers.set32(d, mask, &narrow);
        }
    }
}

/// Collects the elements of a store.
pub(crate) fn gather(warp: &Warp, ty: Type, (a, is_wide): (&[Register], bool), data: &mut Data) {
    let size = ty.bytes();
    for (k, &a) in a.iter().enumerate() {
        for i in 0..LANES {
            let bits = match a {
                NO_REGISTER => 0,
                a if is_wide => warp.registers.get64(a)[i],
                a => u64::from(warp.registers.get32(a)[i]),
            };
            match size {
                8 => {
                    data[i][(2 * k) & 3] = bits as u32;
                    data[i][(2 * k + 1) & 3] = (bits >> 32) as u32;
                }
                4 => data[i][k] = bits as u32,
                2 => data[i][k / 2] |= (bits as u32 & 0xffff) << (16 * (k & 1)),
                _ => data[i][0] |= (bits as u32 & 0xff) << (8 * k),
            }
        }
    }
}
