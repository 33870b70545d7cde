//! Simulated files, threads and buggify decisions.

use crate::fault::Fault;
use crate::world::World;
use samite_core::environment::{Buggify, File, Files, Threads};
use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Files in memory whose reads can fail and which can shrink.
#[derive(Debug)]
pub(crate) struct SimFiles {
    world: Arc<World>,
    contents: BTreeMap<PathBuf, Arc<[u8]>>,
}

#[derive(Debug)]
struct SimFile {
    world: Arc<World>,
    content: Arc<[u8]>,
    /// Remaining bytes.
    size: AtomicUsize,
}

impl SimFiles {
    pub fn new(world: &Arc<World>, contents: BTreeMap<PathBuf, Arc<[u8]>>) -> Self {
        SimFiles {
            world: Arc::clone(world),
            contents,
        }
    }
}

impl Files for SimFiles {
    fn open(&self, path: &Path) -> Result<Arc<dyn File>> {
        let content = self.contents.get(path).ok_or(ErrorKind::NotFound)?;
        Ok(Arc::new(SimFile {
            world: Arc::clone(&self.world),
            content: Arc::clone(content),
            size: AtomicUsize::new(content.len()),
        }))
    }
}

impl File for SimFile {
    fn size(&self) -> Result<u64> {
        Ok(self.size.load(Ordering::SeqCst) as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let len = buffer.len();
        self.world.with(|state| {
            state.note(|_| format!("a file is read: {len} bytes at {offset}"));
            // Reading takes time, and devices progress meanwhile.
            state.advance(1 + len as u64);
            if state.faults.strikes(Fault::ReadFile) {
                state.note(|_| "FAULT: read-file".to_owned());
                return Err(Error::other("injected fault: read-file"));
            }
            if state.faults.strikes(Fault::Shrink) {
                state.note(|_| "FAULT: shrink".to_owned());
                self.size.fetch_min(offset as usize, Ordering::SeqCst);
            }
            Ok(())
        })?;
        let content = &self.content[..self.size.load(Ordering::SeqCst)];
        let part = usize::try_from(offset)
            .ok()
            .and_then(|at| content.get(at..));
        let part = part.and_then(|rest| rest.get(..len));
        buffer.copy_from_slice(part.ok_or(ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Threads that take turns: each work item runs as a whole, in an order drawn from the seed.
#[derive(Debug)]
pub(crate) struct SimThreads {
    world: Arc<World>,
    count: usize,
}

impl SimThreads {
    pub fn new(world: &Arc<World>, count: usize) -> Self {
        SimThreads {
            world: Arc::clone(world),
            count,
        }
    }
}

impl Threads for SimThreads {
    fn parallelism(&self) -> usize {
        self.count
    }

    fn run_all(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let order = self.world.with(|state| state.order_of(count));
        order.into_iter().for_each(work);
    }
}

/// Buggify decisions: rare branches, named like faults.
#[derive(Debug)]
pub(crate) struct SimBuggify(pub Arc<World>);

impl Buggify for SimBuggify {
    fn fires(&self, branch: &str) -> bool {
        let fault = branch.parse::<Fault>();
        fault.is_ok_and(|fault| self.0.with(|state| state.faults.strikes(fault)))
    }
}
