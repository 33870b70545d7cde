//! Gatherings by `MPI_Iallgatherv`.

use super::library::{Api, Handle, text};
use samite_core::{Error, Result};
use samite_meta::comm::Transport;
use std::ffi::c_int;

/// A process of MPI's.
pub(crate) struct Mpi<H: Handle> {
    api: Api<H>,
    name: String,
    rank: usize,
    size: usize,
    /// What MPI reads and writes while a request is under way.
    memory: Memory,
    request: H,
    is_pending: bool,
}

/// Memory that MPI uses until a request is done. It neither moves nor is freed before.
#[derive(Default)]
struct Memory {
    sent: Vec<u8>,
    gathered: Vec<u8>,
    /// How much of that counts.
    total: usize,
    lens: Vec<c_int>,
    offsets: Vec<c_int>,
}

// SAFETY: MPI was begun with a level that allows calls of any thread, one at a time, and a transport is used by one at a time. Handles are numbers or
// addresses of objects that live as long as the process.
unsafe impl<H: Handle> Send for Mpi<H> {}

impl<H: Handle> Mpi<H> {
    /// After MPI has begun.
    pub(crate) fn new(api: Api<H>, name: String) -> std::result::Result<Self, String> {
        let number = |about: unsafe extern "C" fn(H, *mut c_int) -> c_int| {
            let mut number = 0;
            // SAFETY: MPI has begun, and the handle is that of all processes.
            let failed = unsafe { about(api.world, &mut number) };
            match (failed, usize::try_from(number)) {
                (0, Ok(number)) => Ok(number),
                _ => Err("MPI does not say which process this is".to_owned()),
            }
        };
        let (rank, size) = (number(api.rank)?, number(api.size)?);
        // SAFETY: MPI has begun, and both handles are the library's own.
        unsafe { (api.set_error_handler)(api.world, api.errors_return) };
        Ok(Mpi {
            request: api.no_request,
            api,
            name,
            rank,
            size,
            memory: Memory::default(),
            is_pending: false,
        })
    }

    fn check(&self, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let what = text(|text, len| {
            // SAFETY: MPI has begun; it writes no more than its largest text of an error, which is less than what is there.
            unsafe { (self.api.error_text)(code, text, len) };
        });
        Err(Error::device("mpi", format!("{}: {what}", self.name)))
    }
}

impl<H: Handle> Transport for Mpi<H> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn begin(&mut self, head: &[u8], body: &[u8], lens: &[usize]) -> Result<()> {
        let own = head.len() + body.len();
        if self.is_pending || lens.len() != self.size || lens[self.rank] != own {
            return Err(Error::invalid("a gathering of MPI's that cannot begin"));
        }
        let memory = &mut self.memory;
        memory.lens.clear();
        memory.offsets.clear();
        let mut total: c_int = 0;
        for &len in lens {
            let next = c_int::try_from(len).ok().and_then(|len| {
                memory.lens.push(len);
                memory.offsets.push(total);
                total.checked_add(len)
            });
            total = next.ok_or_else(|| {
                Error::invalid(
                    "MPI exchanges 2 GiB at once at most: choose a smaller --ubatch-size (-ub)",
                )
            })?;
        }
        memory.sent.clear();
        let room = |list: &mut Vec<u8>, len: usize| {
            list.try_reserve(len).map_err(|_| Error::OutOfMemory {
                device: "host".into(),
                what: "what processes exchange".into(),
                asked: len,
                free: None,
            })
        };
        room(&mut memory.sent, own)?;
        memory.sent.extend_from_slice(head);
        memory.sent.extend_from_slice(body);
        memory.total = total as usize;
        let more = memory.total.saturating_sub(memory.gathered.len());
        room(&mut memory.gathered, more)?;
        memory.gathered.extend(std::iter::repeat_n(0, more));
        // SAFETY: the lists and what they say are within `memory`, which nobody touches, moves or frees until the request is done: `begin` refuses, `test`
        // and `gathered` only look, and `drop` leaves it where it is.
        let code = unsafe {
            (self.api.gather_all)(
                memory.sent.as_ptr().cast(),
                memory.lens[self.rank],
                self.api.byte,
                memory.gathered.as_mut_ptr().cast(),
                memory.lens.as_ptr(),
                memory.offsets.as_ptr(),
                self.api.byte,
                self.api.world,
                &mut self.request,
            )
        };
        // Also of one that failed it is not known what it still does.
        self.is_pending = true;
        self.check(code)
    }

    fn test(&mut self) -> Result<bool> {
        let mut done = 0;
        // SAFETY: the request is one that began, or no request.
        let code = unsafe { (self.api.test)(&mut self.request, &mut done, self.api.ignore_status) };
        self.check(code)?;
        self.is_pending = done == 0;
        Ok(done != 0)
    }

    fn gathered(&self) -> &[u8] {
        match self.is_pending {
            true => &[],
            false => &self.memory.gathered[..self.memory.total],
        }
    }

    fn finish(&mut self) -> Result<()> {
        // SAFETY: MPI has begun and not ended, as nobody calls this twice: the group is over then.
        self.check(unsafe { (self.api.finalize)() })
    }

    fn abort(&mut self, exit_code: i32) {
        // SAFETY: MPI has begun.
        unsafe { (self.api.abort)(self.api.world, exit_code) };
    }
}

impl<H: Handle> Drop for Mpi<H> {
    fn drop(&mut self) {
        if self.is_pending {
            // MPI may still write there.
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}
