//! Loading of tensor data with several threads, progress and cancellation.

use crate::error::{Error, ErrorKind, Result};
use crate::file::{GgufFile, tensor_field};
use crate::tensor::TensorInfo;
use samite_core::environment::{SystemThreads, Threads};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Number of bytes read between two calls of the cancel function: tens of milliseconds on a slow
/// disk.
const STEP: usize = 1 << 20;

/// Number of consecutive pieces that a thread takes at a time, so that only one thread touches the
/// memory pages that they share.
const RUN: usize = 8;

/// Options for loading. The default is a few threads, without progress and cancellation.
#[derive(Clone, Copy)]
pub struct LoadOptions<'a> {
    /// Number of threads that read, at least one, including the calling thread.
    pub threads: usize,
    /// Source of the threads.
    pub system: &'a dyn Threads,
    /// True to pass data of a mapped file in place. Otherwise it is read into the threads' buffers
    /// as if it were not mapped, which is faster for data that is copied elsewhere anyway, because
    /// no page of the mapping is touched.
    pub in_place: bool,
    /// Called with the bytes read so far, which never decrease, and the total. Any of the threads
    /// calls it, one at a time.
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
    /// Called by every thread between small pieces. Once it returns true, loading stops with
    /// [`ErrorKind::Cancelled`].
    pub cancel: &'a (dyn Fn() -> bool + Sync),
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        LoadOptions {
            // More threads rarely make a disk faster, and reading leaves the processors free
            // anyway.
            threads: SystemThreads.parallelism().min(8),
            system: &SystemThreads,
            in_place: true,
            progress: &|_, _| {},
            cancel: &|| false,
        }
    }
}

/// A piece of a tensor, passed to the sink as a whole.
struct TensorChunk<'a> {
    info: &'a TensorInfo,
    start: usize,
    len: usize,
}

impl GgufFile {
    /// Passes the whole data of each of `tensors` to `sink`, from several threads at once, in no
    /// particular order.
    ///
    /// A mapped file is paged in and passed in place, unless [`LoadOptions::in_place`] is off.
    /// Otherwise every thread reads into a buffer that grows to its largest tensor.
    /// [`load_chunks`](Self::load_chunks) needs less memory.
    ///
    /// # Errors
    /// The first error of `sink` or of reading. The other threads then stop soon.
    /// [`ErrorKind::Cancelled`]. [`ErrorKind::OutOfMemory`] if there is no memory for a buffer.
    pub fn load<'t, E: From<Error> + Send>(
        &self,
        tensors: impl IntoIterator<Item = &'t TensorInfo>,
        options: &LoadOptions<'_>,
        sink: impl Fn(&TensorInfo, &[u8]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        self.load_chunks(
            tensors,
            |info| info.size,
            options,
            |info, _, bytes| sink(info, bytes),
        )
    }

    /// Does what [`load`](Self::load) does, but passes tensors in chunks of `chunk_bytes` bytes
    /// (the last one of a tensor may be shorter), with their offset in the tensor. A huge tensor
    /// then needs no huge buffer, and several threads read it. A small chunk is still in the
    /// processor's caches when the sink gets it.
    ///
    /// # Errors
    /// As [`load`](Self::load). [`ErrorKind::InvalidArgument`] if `chunk_bytes` returns 0.
    pub fn load_chunks<'t, E: From<Error> + Send>(
        &self,
        tensors: impl IntoIterator<Item = &'t TensorInfo>,
        chunk_bytes: impl Fn(&TensorInfo) -> usize,
        options: &LoadOptions<'_>,
        sink: impl Fn(&TensorInfo, usize, &[u8]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let mut jobs = Vec::new();
        for info in self.own(tensors)? {
            let chunk_bytes = chunk_bytes(info);
            if chunk_bytes == 0 {
                return Err(Error::invalid("chunk_bytes", "is 0").into());
            }
            jobs.extend(
                (0..info.size)
                    .step_by(chunk_bytes)
                    .map(|start| TensorChunk {
                        info,
                        start,
                        len: chunk_bytes.min(info.size - start),
                    }),
            );
        }
        self.run_jobs(jobs, options, &sink)
    }

    /// Checks that all `tensors` belong to this model, before their sizes are trusted.
    fn own<'t>(
        &self,
        tensors: impl IntoIterator<Item = &'t TensorInfo>,
    ) -> Result<Vec<&'t TensorInfo>> {
        let own = |info| self.part_of(info).map(|_| info);
        tensors.into_iter().map(own).collect()
    }

    fn run_jobs<E: From<Error> + Send>(
        &self,
        mut jobs: Vec<TensorChunk<'_>>,
        options: &LoadOptions<'_>,
        sink: &(impl Fn(&TensorInfo, usize, &[u8]) -> Result<(), E> + Sync),
    ) -> Result<(), E> {
        // Disks are fastest when read sequentially.
        jobs.sort_by_key(|job| (job.info.file, job.info.offset, job.start));
        let progress = LoadProgress::new(options, jobs.iter().map(|job| job.len as u64).sum());
        let run = (jobs.len() / (RUN * options.threads.max(1))).clamp(1, RUN);
        let runs = jobs.chunks(run).collect::<Vec<_>>();
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let first_error = Mutex::new(None);
        let work = |_: usize| {
            let mut buffer = Vec::new();
            let take = || runs.get(next.fetch_add(1, Ordering::Relaxed));
            for job in std::iter::from_fn(take).copied().flatten() {
                let stop = || {
                    if failed.load(Ordering::Relaxed) || (options.cancel)() {
                        return Err(Error::cancelled());
                    }
                    Ok(())
                };
                let bytes = self.fetch(job, options.in_place, &mut buffer, &progress, &stop);
                let result = bytes
                    .map_err(E::from)
                    .and_then(|bytes| sink(job.info, job.start, bytes));
                if let Err(error) = result {
                    // Errors of threads that stop because another one failed come later, and are
                    // dropped.
                    first_error
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .get_or_insert(error);
                    failed.store(true, Ordering::Relaxed);
                    return;
                }
            }
        };
        let read = jobs.chunk_by(|a, b| a.info.file == b.info.file);
        for job in read.filter_map(|jobs| jobs.first()) {
            let part = self.part_of(job.info)?;
            if !options.in_place || part.mapping().is_none() {
                part.advise_in_order();
            }
        }
        let threads = options.threads.min(runs.len()).max(1);
        options.system.run_all(threads, &work);
        first_error
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .map_or(Ok(()), Err)
    }

    /// Returns the bytes of a job: in the mapping if requested and mapped, otherwise in `buffer`.
    fn fetch<'a>(
        &'a self,
        job: &TensorChunk<'_>,
        in_place: bool,
        buffer: &'a mut Vec<u8>,
        progress: &LoadProgress<'_>,
        stop: &impl Fn() -> Result<()>,
    ) -> Result<&'a [u8]> {
        let part = self.part_of(job.info)?;
        let offset = job.info.offset + job.start as u64;
        let steps = (0..job.len)
            .step_by(STEP)
            .map(|start| start..job.len.min(start + STEP));
        if let Some(mapping) = part.mapping().filter(|_| in_place) {
            let start = offset as usize;
            let bytes = &mapping[start..start + job.len];
            for step in steps {
                stop()?;
                // The system reads this step and the next one while the thread waits for the pages
                // of this one.
                mapping.will_need(start + step.start..start + job.len.min(step.end + STEP));
                bytes[step.clone()]
                    .iter()
                    .step_by(samite_core::page_bytes())
                    .for_each(|byte| {
                        black_box(*byte);
                    });
                progress.add(step.len());
            }
            stop()?;
            return Ok(bytes);
        }
        if buffer.len() < job.len {
            let additional = job.len - buffer.len();
            buffer.try_reserve_exact(additional).map_err(|_| {
                let message = format!(
                    "there is no memory for a buffer of {} bytes; load it in chunks",
                    job.len
                );
                Error::new(ErrorKind::OutOfMemory, tensor_field(job.info), message)
                    .in_file(part.path())
            })?;
            buffer.resize(job.len, 0);
        }
        let bytes = &mut buffer[..job.len];
        for step in steps {
            stop()?;
            part.read_at(&mut bytes[step.clone()], offset + step.start as u64)?;
            progress.add(step.len());
        }
        stop()?;
        Ok(bytes)
    }
}

/// Sum of the bytes that all threads have read.
struct LoadProgress<'a> {
    report: &'a (dyn Fn(u64, u64) + Sync),
    done: Mutex<u64>,
    total: u64,
}

impl<'a> LoadProgress<'a> {
    fn new(options: &LoadOptions<'a>, total: u64) -> Self {
        LoadProgress {
            report: options.progress,
            done: Mutex::new(0),
            total,
        }
    }

    fn add(&self, bytes: usize) {
        // The lock is held during the report, so that reports come in order.
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done += bytes as u64;
        (self.report)(*done, self.total);
    }
}
