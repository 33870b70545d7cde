//! Gather operations with `MPI_Iallgatherv`.

use super::library::{Api, Handle, text};
use samite_core::{Error, Result};
use samite_meta::comm::Transport;
use std::ffi::c_int;

/// An MPI process.
pub(crate) struct Mpi<H: Handle> {
    api: Api<H>,
    name: String,
    rank: usize,
    size: usize,
    /// Memory used by MPI during a request.
    memory: MpiBuffers,
    request: H,
    is_pending: bool,
    /// Gather operations so far.
    number: u64,
    /// Messages to ranks that may be waiting for this process: the number of a gather operation,
    /// and the send request. Kept until the message was sent.
    calls: Vec<(Box<[u8; CALL]>, H)>,
    /// Last gather operation that each rank reported to wait in.
    heard: Vec<u64>,
}

/// Size in bytes of a message that reports where a rank waits.
const CALL: usize = 8;

/// MPI tag of these messages.
const TAG: c_int = 7319;

/// Number of polls for these messages: MPI only makes progress during calls.
const LOOKS: usize = 1000;

/// Memory that MPI uses until a request completes. It is neither moved nor freed before.
#[derive(Default)]
struct MpiBuffers {
    sent: Vec<u8>,
    gathered: Vec<u8>,
    /// Used length of `gathered`.
    total: usize,
    lens: Vec<c_int>,
    offsets: Vec<c_int>,
}

// SAFETY: MPI was initialized with a level that allows calls from any thread, one at a time, and a
// transport is used by one thread at a time. Handles are numbers, or addresses of objects that live
// as long as the process.
unsafe impl<H: Handle> Send for Mpi<H> {}

impl<H: Handle> Mpi<H> {
    /// Creates the transport after MPI was initialized.
    pub(crate) fn new(api: Api<H>, name: String) -> std::result::Result<Self, String> {
        let number = |about: unsafe extern "C" fn(H, *mut c_int) -> c_int| {
            let mut number = 0;
            // SAFETY: MPI is initialized, and the handle is `MPI_COMM_WORLD`.
            let failed = unsafe { about(api.world, &mut number) };
            match (failed, usize::try_from(number)) {
                (0, Ok(number)) => Ok(number),
                _ => Err("MPI does not say which process this is".to_owned()),
            }
        };
        let (rank, size) = (number(api.rank)?, number(api.size)?);
        // SAFETY: MPI is initialized, and both handles belong to the library.
        unsafe { (api.set_error_handler)(api.world, api.errors_return) };
        Ok(Mpi {
            request: api.no_request,
            api,
            name,
            rank,
            size,
            memory: MpiBuffers::default(),
            is_pending: false,
            number: 0,
            calls: Vec::new(),
            heard: vec![0; size],
        })
    }

    /// Receives reports of other ranks about where they wait.
    fn hear(&mut self) {
        for rank in 0..self.size {
            let from = rank as c_int;
            loop {
                let mut is_there = 0;
                let (world, ignored) = (self.api.world, self.api.ignore_status);
                // SAFETY: MPI is initialized, and the handle is `MPI_COMM_WORLD`.
                let code = unsafe { (self.api.probe)(from, TAG, world, &mut is_there, ignored) };
                if code != 0 || is_there == 0 {
                    break;
                }
                let mut call = [0; CALL];
                // SAFETY: a message has arrived, so this returns at once; a message that is longer
                // than the buffer is an error.
                let code = unsafe {
                    let to = call.as_mut_ptr().cast();
                    (self.api.receive)(to, CALL as c_int, self.api.byte, from, TAG, world, ignored)
                };
                if code != 0 {
                    break;
                }
                self.heard[rank] = self.heard[rank].max(u64::from_le_bytes(call));
            }
        }
    }

    /// Drops the messages that were sent.
    fn forget_calls(&mut self) {
        let (test, ignored) = (self.api.test, self.api.ignore_status);
        self.calls.retain_mut(|(_, request)| {
            let mut done = 0;
            // SAFETY: the request was started.
            let code = unsafe { test(request, &mut done, ignored) };
            code == 0 && done == 0
        });
    }

    fn check(&self, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let what = text(|text, len| {
            // SAFETY: MPI is initialized; it writes at most its maximum error length, which is less
            // than the buffer's size.
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
        // SAFETY: the lists and their contents are in `memory`, which is not accessed, moved or
        // freed until the request completes: `begin` fails, `test` and `gathered` only read, and
        // `drop` leaks it.
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
        // MPI may still use the memory, even after an error.
        self.is_pending = true;
        self.number += 1;
        self.check(code)
    }

    fn test(&mut self) -> Result<bool> {
        let mut done = 0;
        // SAFETY: the request was started, or is `MPI_REQUEST_NULL`.
        let code = unsafe { (self.api.test)(&mut self.request, &mut done, self.api.ignore_status) };
        self.check(code)?;
        self.is_pending = done == 0;
        Ok(done != 0)
    }

    fn call_out(&mut self) {
        self.forget_calls();
        for rank in (0..self.size).filter(|&rank| rank != self.rank) {
            let call = Box::new(self.number.to_le_bytes());
            let mut request = self.api.no_request;
            // SAFETY: MPI is initialized. The boxed message does not move, and is kept until the
            // request completes or leaked.
            let code = unsafe {
                let (from, byte, world) = (call.as_ptr().cast(), self.api.byte, self.api.world);
                (self.api.send)(
                    from,
                    CALL as c_int,
                    byte,
                    rank as c_int,
                    TAG,
                    world,
                    &mut request,
                )
            };
            match code {
                0 => self.calls.push((call, request)),
                // MPI may still use the message.
                _ => std::mem::forget(call),
            }
        }
    }

    fn missing(&mut self) -> Vec<usize> {
        for _ in 0..LOOKS {
            self.hear();
        }
        let others = (0..self.size).filter(|&rank| rank != self.rank);
        others
            .filter(|&rank| self.heard[rank] < self.number)
            .collect()
    }

    fn gathered(&self) -> &[u8] {
        if self.is_pending {
            &[]
        } else {
            &self.memory.gathered[..self.memory.total]
        }
    }

    fn finish(&mut self) -> Result<()> {
        // MPI requires that every message is received before finalization.
        self.hear();
        self.forget_calls();
        // SAFETY: MPI is initialized and not finalized: this is called once, at the end of the
        // group.
        self.check(unsafe { (self.api.finalize)() })
    }

    fn abort(&mut self, exit_code: i32) {
        // SAFETY: MPI is initialized.
        unsafe { (self.api.abort)(self.api.world, exit_code) };
    }
}

impl<H: Handle> Drop for Mpi<H> {
    fn drop(&mut self) {
        if self.is_pending {
            // MPI may still write there.
            std::mem::forget(std::mem::take(&mut self.memory));
        }
        self.forget_calls();
        std::mem::forget(std::mem::take(&mut self.calls));
    }
}
