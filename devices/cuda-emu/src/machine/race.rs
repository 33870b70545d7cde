//! Detection of data races.
//!
//! The unit is a warp: accesses of one warp are in order. (Lanes of a warp run in lockstep here, so
//! a missing `bar.warp.sync` is not found.) Each warp has a vector clock over the warps of its
//! block, which barriers join. Blocks are ordered by releases only: a fence followed by an atomic
//! access publishes what precedes the fence, and acquires everything published so far. The atomic's
//! address does not matter, so a kernel that synchronizes through the wrong counter is not found.
//!
//! Each word (or byte, where accesses are narrower) remembers its last write and its last reads.
//! Reads by several warps with different clocks keep the lowest, so that no report is false.

use std::collections::HashMap;

use super::registers::LANES;

/// Number of words of a page of the shadow.
const PAGE_WORDS: usize = 256;

/// Stands for several blocks.
const MANY: u32 = u32::MAX;

/// Clocks of the warps of a block, as one warp knows them.
pub(crate) type VectorClock = [u32; LANES];

/// A warp that accesses memory.
#[derive(Clone, Copy)]
pub(crate) struct Agent<'a> {
    /// Number of the block, from 1.
    pub(crate) block: u32,
    pub(crate) warp: u32,
    pub(crate) clock: &'a VectorClock,
    /// Last release that the warp has acquired.
    pub(crate) acquired: u32,
    pub(crate) pc: u32,
}

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Read,
    /// A read that needs memory which the launch does not write.
    ReadConstant,
    ReadAtomic,
    Write,
    Update,
}

/// The earlier access of a race.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub(crate) offset: usize,
    pub(crate) pc: u32,
    /// Number of the block, from 1, or `None` for several.
    pub(crate) block: Option<u32>,
    pub(crate) warp: u32,
}

#[derive(Clone, Copy, Default)]
struct ShadowEntry {
    write_block: u32,
    write_warp: u8,
    is_atomic: bool,
    has_constant_reads: bool,
    write_clock: u32,
    write_pc: u32,
    read_block: u32,
    /// Mask of warps.
    read_warps: u32,
    read_clock: u32,
    read_pc: u32,
}

struct Page {
    is_bytes: bool,
    entries: Vec<ShadowEntry>,
}

/// Accesses that a warp published.
struct PublishedAccesses {
    sequence: u32,
    is_wide: bool,
    clock: VectorClock,
}

/// Releases of a launch, by block.
#[derive(Default)]
pub(crate) struct Releases {
    sequence: u32,
    by_block: HashMap<u32, Vec<PublishedAccesses>>,
}

impl Releases {
    /// Publishes what `clock` covers, and returns the release's number.
    pub(crate) fn publish(&mut self, block: u32, clock: VectorClock, is_wide: bool) -> u32 {
        self.sequence += 1;
        let release = PublishedAccesses {
            sequence: self.sequence,
            is_wide,
            clock,
        };
        self.by_block.entry(block).or_default().push(release);
        self.sequence
    }

    /// Returns the number of the last release.
    pub(crate) fn last(&self) -> u32 {
        self.sequence
    }

    fn covers(&self, agent: &Agent<'_>, block: u32, warp: usize, clock: u32) -> bool {
        self.by_block.get(&block).is_some_and(|list| {
            list.iter().any(|r| {
                r.sequence <= agent.acquired
                    && r.clock[warp] >= clock
                    && (r.is_wide || block == agent.block)
            })
        })
    }

    /// Returns true if an access precedes what the agent does now.
    fn is_ordered(&self, agent: &Agent<'_>, block: u32, warp: u32, clock: u32) -> bool {
        let index = warp as usize % LANES;
        block == agent.block && (warp == agent.warp || agent.clock[index] >= clock)
            || self.covers(agent, block, index, clock)
    }
}

/// Accesses to one range of memory.
#[derive(Default)]
pub(crate) struct Shadow {
    pages: Vec<Option<Box<Page>>>,
}

impl Shadow {
    /// Forgets all accesses.
    pub(crate) fn clear(&mut self) {
        for page in self.pages.iter_mut().flatten() {
            page.is_bytes = false;
            page.entries.clear();
            page.entries.resize(PAGE_WORDS, ShadowEntry::default());
        }
    }

    /// Notes an access to `bytes` from `offset`.
    #[inline]
    pub(crate) fn touch(
        &mut self,
        releases: &Releases,
        agent: &Agent<'_>,
        touch: Touch,
        offset: usize,
        bytes: usize,
    ) -> Result<(), Conflict> {
        let is_bytes = !(offset | bytes).is_multiple_of(4);
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let number = at / (4 * PAGE_WORDS);
            let page_end = ((number + 1) * 4 * PAGE_WORDS).min(end);
            let page = self.page(number, is_bytes);
            let base = number * 4 * PAGE_WORDS;
            let size = if page.is_bytes { 1 } else { 4 };
            let range = (at - base) / size..(page_end - base) / size;
            for (index, entry) in page.entries[range.clone()].iter_mut().enumerate() {
                if let Err(mut conflict) = entry.touch(releases, agent, touch) {
                    conflict.offset = base + (range.start + index) * size;
                    return Err(conflict);
                }
            }
            at = page_end;
        }
        Ok(())
    }

    #[inline]
    fn page(&mut self, number: usize, needs_bytes: bool) -> &mut Page {
        if number >= self.pages.len() {
            self.pages.resize_with(number + 1, || None);
        }
        let page = self.pages[number].get_or_insert_with(|| {
            Box::new(Page {
                is_bytes: false,
                entries: vec![ShadowEntry::default(); PAGE_WORDS],
            })
        });
        if needs_bytes && !page.is_bytes {
            page.is_bytes = true;
            page.entries = page.entries.iter().flat_map(|&e| [e; 4]).collect();
        }
        page
    }
}

impl ShadowEntry {
    #[inline]
    fn touch(
        &mut self,
        releases: &Releases,
        agent: &Agent<'_>,
        touch: Touch,
    ) -> Result<(), Conflict> {
        if self.write_block != 0 {
            let both_atomic = self.is_atomic && matches!(touch, Touch::Update | Touch::ReadAtomic);
            let is_own =
                self.write_block == agent.block && u32::from(self.write_warp) == agent.warp;
            if touch == Touch::ReadConstant
                || !is_own
                    && !both_atomic
                    && !releases.is_ordered(
                        agent,
                        self.write_block,
                        u32::from(self.write_warp),
                        self.write_clock,
                    )
            {
                return Err(Conflict {
                    offset: 0,
                    pc: self.write_pc,
                    block: Some(self.write_block),
                    warp: u32::from(self.write_warp),
                });
            }
        }
        match touch {
            Touch::ReadAtomic => Ok(()),
            Touch::Read | Touch::ReadConstant => {
                self.has_constant_reads |= touch == Touch::ReadConstant;
                self.read(releases, agent);
                Ok(())
            }
            Touch::Write | Touch::Update => self.write(releases, agent, touch == Touch::Update),
        }
    }

    #[inline]
    fn read(&mut self, releases: &Releases, agent: &Agent<'_>) {
        let clock = agent.clock[agent.warp as usize % LANES];
        if self.read_block == agent.block && self.read_clock == clock {
            self.read_warps |= 1 << agent.warp;
            return;
        }
        if self.read_block == 0 || self.readers_are_ordered(releases, agent) {
            self.read_block = agent.block;
            self.read_warps = 1 << agent.warp;
            self.read_clock = clock;
        } else if self.read_block == agent.block {
            self.read_warps |= 1 << agent.warp;
            self.read_clock = self.read_clock.min(clock);
        } else {
            self.read_block = MANY;
        }
        self.read_pc = agent.pc;
    }

    fn readers_are_ordered(&self, releases: &Releases, agent: &Agent<'_>) -> bool {
        self.read_block != MANY
            && super::registers::lanes(self.read_warps).all(|warp| {
                releases.is_ordered(agent, self.read_block, warp as u32, self.read_clock)
            })
    }

    #[inline]
    fn write(
        &mut self,
        releases: &Releases,
        agent: &Agent<'_>,
        is_atomic: bool,
    ) -> Result<(), Conflict> {
        // Readers of several blocks are ordered if the writer acquired anything: the list of them
        // is not kept.
        let is_many = self.read_block == MANY && agent.acquired == 0;
        let is_race = self.read_block != 0
            && (is_many
                || self.has_constant_reads
                || self.read_block != MANY && !self.readers_are_ordered(releases, agent));
        if is_race {
            let warps = self.read_warps & !(1 << agent.warp);
            let warps = if warps == 0 { self.read_warps } else { warps };
            return Err(Conflict {
                offset: 0,
                pc: self.read_pc,
                block: (self.read_block != MANY).then_some(self.read_block),
                warp: warps.trailing_zeros() % 32,
            });
        }
        self.write_block = agent.block;
        self.write_warp = agent.warp as u8;
        self.is_atomic = is_atomic;
        self.write_clock = agent.clock[agent.warp as usize % LANES];
        self.write_pc = agent.pc;
        (self.read_block, self.read_warps) = (0, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(block: u32, warp: u32, clock: &VectorClock) -> Agent<'_> {
        Agent {
            block,
            warp,
            clock,
            acquired: 0,
            pc: warp,
        }
    }

    #[test]
    fn barriers_order_warps() {
        let releases = Releases::default();
        let mut shadow = Shadow::default();
        let before = [1; LANES];
        let after = [2; LANES];
        shadow
            .touch(&releases, &agent(1, 0, &before), Touch::Write, 8, 4)
            .unwrap();
        // Each warp knows only its own clock until a barrier.
        let mut own = [0; LANES];
        own[1] = 1;
        assert!(
            shadow
                .touch(&releases, &agent(1, 1, &own), Touch::Read, 8, 4)
                .is_err()
        );
        shadow
            .touch(&releases, &agent(1, 1, &after), Touch::Read, 8, 4)
            .unwrap();
        let mut own = [1; LANES];
        own[0] = 2;
        let conflict = shadow
            .touch(&releases, &agent(1, 0, &own), Touch::Write, 8, 4)
            .unwrap_err();
        assert_eq!((conflict.pc, conflict.offset), (1, 8));
    }

    #[test]
    fn bytes_of_a_word_are_independent() {
        let releases = Releases::default();
        let mut shadow = Shadow::default();
        let clock = [0; LANES];
        shadow
            .touch(&releases, &agent(1, 0, &clock), Touch::Write, 6, 2)
            .unwrap();
        shadow
            .touch(&releases, &agent(2, 0, &clock), Touch::Write, 4, 2)
            .unwrap();
        assert!(
            shadow
                .touch(&releases, &agent(2, 0, &clock), Touch::Write, 5, 2)
                .is_err()
        );
    }

    #[test]
    fn releases_order_blocks() {
        let mut releases = Releases::default();
        let mut shadow = Shadow::default();
        let clock = [1; LANES];
        shadow
            .touch(&releases, &agent(1, 3, &clock), Touch::Write, 0, 4)
            .unwrap();
        let sequence = releases.publish(1, clock, true);
        assert!(
            shadow
                .touch(&releases, &agent(2, 0, &clock), Touch::Read, 0, 4)
                .is_err()
        );
        let acquirer = Agent {
            acquired: sequence,
            ..agent(2, 0, &clock)
        };
        shadow
            .touch(&releases, &acquirer, Touch::Read, 0, 4)
            .unwrap();
    }

    #[test]
    fn constant_reads_forbid_writes() {
        let releases = Releases::default();
        let mut shadow = Shadow::default();
        let clock = [1; LANES];
        shadow
            .touch(&releases, &agent(1, 0, &clock), Touch::ReadConstant, 0, 4)
            .unwrap();
        assert!(
            shadow
                .touch(&releases, &agent(1, 0, &clock), Touch::Write, 0, 4)
                .is_err()
        );
        shadow
            .touch(&releases, &agent(1, 0, &clock), Touch::Write, 4, 4)
            .unwrap();
        assert!(
            shadow
                .touch(&releases, &agent(1, 0, &clock), Touch::ReadConstant, 4, 4)
                .is_err()
        );
    }
}
