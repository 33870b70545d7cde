//! An opened adapter: its device and queue, waits, reads and writes, and its errors.

use crate::experimental;
use crate::pipelines::{Changes, Pipelines};
use crate::self_test::SelfTestResult;
use crate::stored_pipelines::StoredPipelines;
use crate::tuning::Tuning;
use crate::waiting::{CallbackFuture, IN_BROWSER, ready};
use samite_core::{Error, MemoryId, Result};
use samite_disk_cache::CacheFile;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes per read.
const READ_PIECE: u64 = 16 << 20;
/// Bytes to write before a submission. The driver keeps a copy of the data until then.
const WRITE_PIECE: u64 = 32 << 20;
/// Maximum number of storage buffers of a kernel, including the failure word.
pub const MAX_BINDINGS: u32 = 12;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An adapter. It is opened on first use.
pub struct Gpu {
    name: Arc<str>,
    adapter: wgpu::Adapter,
    pub info: wgpu::AdapterInfo,
    pub limits: wgpu::Limits,
    pub has_subgroups: bool,
    /// True if the adapter has cooperative matrices of the type that kernels use.
    pub has_matrices: bool,
    opened: OnceLock<Opened>,
    /// Held while the adapter is being opened or tuned.
    opening: Mutex<()>,
    verdict: OnceLock<SelfTestResult>,
    tuning: OnceLock<Tuning>,
    /// Folder of the pipeline cache, if caching is on.
    pipelines_folder: Mutex<Option<PathBuf>>,
    /// Text to replace in all shaders, and its replacement. For tests.
    replaced_text: OnceLock<[&'static str; 2]>,
    /// Set if kernels emulate cooperative matrices. For tests.
    emulates_matrices: OnceLock<()>,
    /// Number of the next driver call to fail, counted from 1; 0 for none. For tests.
    fault: Arc<AtomicU64>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}, {})", self.name, self.info.name)
    }
}

/// Returns the file called `what` of facts about an adapter and its driver.
pub fn cache_file(folder: &Path, info: &wgpu::AdapterInfo, what: &str) -> CacheFile {
    let adapter = format!(
        "{} {:x} {:x} {} {}",
        info.name, info.vendor, info.device, info.backend, info.driver
    );
    let subject = format!("{adapter} {}", info.driver_info);
    CacheFile::new(folder, &format!("wgpu-{what}"), &adapter, &subject)
}

impl Gpu {
    /// Creates a GPU called `name` from `adapter`. Returns the reason if the adapter cannot be
    /// used.
    pub fn new(name: &str, adapter: wgpu::Adapter) -> Result<Arc<Self>, String> {
        let limits = adapter.limits();
        let has = adapter.get_downlevel_capabilities().flags;
        if !has.contains(wgpu::DownlevelFlags::COMPUTE_SHADERS) {
            return Err("it has no compute shaders".into());
        }
        if limits.max_compute_invocations_per_workgroup < 256
            || limits.max_compute_workgroup_storage_size < 16 << 10
            || limits.max_storage_buffers_per_shader_stage < 8
        {
            return Err("its limits are below those that WebGPU asks for".into());
        }
        Ok(Arc::new(Gpu {
            name: name.into(),
            info: adapter.get_info(),
            // In browsers, subgroups need an `enable` directive that naga rejects.
            has_subgroups: adapter.features().contains(wgpu::Features::SUBGROUP) && !IN_BROWSER,
            has_matrices: has_matrices(&adapter, &limits),
            limits,
            adapter,
            opened: OnceLock::new(),
            opening: Mutex::default(),
            verdict: OnceLock::new(),
            tuning: OnceLock::new(),
            pipelines_folder: Mutex::new(samite_disk_cache::cache_folder()),
            replaced_text: OnceLock::new(),
            emulates_matrices: OnceLock::new(),
            fault: Arc::default(),
        }))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the maximum size in bytes of a binding.
    pub fn binding_limit(&self) -> usize {
        // Kernels address bytes in a binding with 32-bit integers.
        let most = self.limits.max_storage_buffer_binding_size;
        most.min(u64::from(u32::MAX) - 255) as usize & !3
    }

    /// Opens the device if it is not open yet. A failed attempt is repeated on the next call.
    ///
    /// # Errors
    /// Returns the driver's error, or [`Error::DeviceLost`] if the device is gone.
    pub fn open(&self) -> Result<&Opened> {
        if self.opened.get().is_none() {
            let _alone = lock(&self.opening);
            if self.opened.get().is_none() {
                // `opening` is locked: this is the only writer
                let _ = self.opened.set(self.request()?);
            }
        }
        let opened = self.opened.get();
        let opened = opened.ok_or_else(|| Error::device(&self.name, "it does not open"))?;
        opened.check()?;
        Ok(opened)
    }

    /// Returns the device if it is open.
    pub fn opened(&self) -> Option<&Opened> {
        self.opened.get()
    }

    /// Returns the self-test's verdict. Runs `judge` if there is none yet.
    ///
    /// # Errors
    /// Returns the errors of `judge`.
    pub fn judged(&self, judge: impl FnOnce() -> Result<SelfTestResult>) -> Result<SelfTestResult> {
        if let Some(verdict) = self.verdict.get() {
            return Ok(*verdict);
        }
        let found = judge()?;
        Ok(*self.verdict.get_or_init(|| found))
    }

    /// Returns the tuning of the adapter. Runs `measure` if there is none yet.
    ///
    /// # Errors
    /// Returns the errors of `measure`.
    pub fn tuned(&self, measure: impl FnOnce() -> Result<Tuning>) -> Result<Tuning> {
        // Concurrent measurements would disturb each other.
        let _alone = lock(&self.opening);
        if let Some(tuning) = self.tuning.get() {
            return Ok(*tuning);
        }
        let found = measure()?;
        Ok(*self.tuning.get_or_init(|| found))
    }

    /// Returns the tuning of the adapter, or the default before it is measured.
    pub fn tuning(&self) -> Tuning {
        self.tuning.get().copied().unwrap_or_default()
    }

    /// Returns the cached file called `what`. Returns `None` if a test changes the kernels.
    pub fn kept(&self, what: &str) -> Option<CacheFile> {
        let folder = lock(&self.pipelines_folder)
            .clone()
            .or_else(samite_disk_cache::cache_folder);
        let folder = folder.filter(|_| !self.is_changed())?;
        Some(cache_file(&folder, &self.info, what))
    }

    /// Returns whether reductions may use subgroups. Assumes so before the self-test.
    pub fn may_use_subgroups(&self) -> bool {
        self.has_subgroups && self.verdict.get().is_none_or(|verdict| verdict.subgroups)
    }

    /// Returns whether products may use cooperative matrices. Assumes so before the self-test.
    pub fn may_use_matrices(&self) -> bool {
        let was_refused = |opened: &Opened| !opened.device.features().contains(MATRIX_FEATURES);
        (self.has_matrices && !self.opened().is_some_and(was_refused) || self.emulates_matrices())
            && self.verdict.get().is_none_or(|verdict| verdict.matrices)
    }

    /// Returns whether attention may use cooperative matrices.
    pub fn may_attend_by_matrices(&self) -> bool {
        self.may_use_matrices() && self.verdict.get().is_none_or(|verdict| verdict.attention)
    }

    /// Sets the folder of the pipeline cache, or turns caching off. Works only before the adapter
    /// is opened.
    pub fn keep_pipelines_in(&self, folder: Option<PathBuf>) {
        *lock(&self.pipelines_folder) = folder;
    }

    /// Replaces a piece of text in all shaders. For tests.
    pub fn replace_shader_text(&self, texts: [&'static str; 2]) {
        let _ = self.replaced_text.set(texts); // only the first call counts
    }

    /// Makes kernels emulate cooperative matrices. For tests.
    pub fn emulate_matrices(&self) {
        let _ = self.emulates_matrices.set(()); // repeated calls are harmless
    }

    fn emulates_matrices(&self) -> bool {
        self.emulates_matrices.get().is_some()
    }

    /// Returns whether a test changes the kernels.
    pub fn is_changed(&self) -> bool {
        self.replaced_text.get().is_some() || self.emulates_matrices()
    }

    /// Makes driver call number `number` fail, counted from 1; 0 for none. For tests.
    pub fn fail_call(&self, number: u64) {
        self.fault.store(number, Ordering::Relaxed);
    }

    /// Returns the number given to [`fail_call`](Gpu::fail_call), less the calls since then.
    pub fn calls_before_failure(&self) -> u64 {
        self.fault.load(Ordering::Relaxed)
    }

    fn request(&self) -> Result<Opened> {
        count_call(&self.fault, &self.name)?;
        let mut features = wgpu::Features::empty();
        features.set(wgpu::Features::SUBGROUP, self.has_subgroups);
        features |= self.adapter.features() & wgpu::Features::PIPELINE_CACHE;
        let opened = |features: wgpu::Features| {
            let descriptor = wgpu::DeviceDescriptor {
                label: Some("samite"),
                required_features: features,
                required_limits: self.limits.clone(),
                experimental_features: if features.contains(MATRIX_FEATURES) {
                    experimental::allowed()
                } else {
                    wgpu::ExperimentalFeatures::disabled()
                },
                memory_hints: wgpu::MemoryHints::MemoryUsage,
                trace: wgpu::Trace::Off,
            };
            ready(self.adapter.request_device(&descriptor))
        };
        let with_matrices = self
            .has_matrices
            .then(|| opened(features | MATRIX_FEATURES))
            .filter(|answer| matches!(answer, Some(Ok(_))));
        let (device, queue) = match with_matrices.unwrap_or_else(|| opened(features)) {
            Some(Ok(both)) => both,
            Some(Err(error)) => {
                return Err(Error::device(
                    &self.name,
                    format!("it cannot be opened: {error}"),
                ));
            }
            None => return Err(Error::device(&self.name, "it does not open")),
        };
        let troubles = Arc::new(DriverErrors::default());
        let lost = Arc::clone(&troubles);
        device.set_device_lost_callback(move |reason, message| {
            let text = match (reason, message.is_empty()) {
                (wgpu::DeviceLostReason::Destroyed, _) => "it was given up".to_owned(),
                (_, true) => "the driver says no more".to_owned(),
                (_, false) => message,
            };
            lock(&lost.lost).get_or_insert(text);
        });
        let uncaptured = Arc::clone(&troubles);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&uncaptured.error).get_or_insert(error.to_string());
        }));
        let folder = lock(&self.pipelines_folder)
            .clone()
            .filter(|_| !self.is_changed());
        let kept = folder.map(|folder| cache_file(&folder, &self.info, "pipelines"));
        let stored = kept.and_then(|kept| StoredPipelines::open(&device, kept));
        Ok(Opened {
            name: Arc::clone(&self.name),
            pipelines: Pipelines::new(
                &device,
                stored,
                Changes {
                    replaced_text: self.replaced_text.get().copied(),
                    emulates_matrices: self.emulates_matrices(),
                },
            ),
            fault: Arc::clone(&self.fault),
            device,
            queue,
            troubles,
            staging: Mutex::default(),
            unsent: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            prepared: AtomicU64::new(0),
        })
    }
}

/// Features that kernels with cooperative matrices need.
const MATRIX_FEATURES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16);
/// Bytes of workgroup memory that such a kernel needs.
const MATRIX_MEMORY: u32 = 32 << 10;

/// Returns whether the adapter multiplies 16 x 16 matrices of halves, accumulates in floats, and
/// has subgroups of 32 invocations.
fn has_matrices(adapter: &wgpu::Adapter, limits: &wgpu::Limits) -> bool {
    let info = adapter.get_info();
    let features = MATRIX_FEATURES | wgpu::Features::SUBGROUP;
    let kinds = || adapter.cooperative_matrix_properties();
    let is_used = |kind: &wgpu::CooperativeMatrixProperties| {
        [kind.m_size, kind.n_size, kind.k_size] == [16; 3]
            && kind.ab_type == wgpu::CooperativeScalarType::F16
            && kind.cr_type == wgpu::CooperativeScalarType::F32
    };
    !IN_BROWSER
        && adapter.features().contains(features)
        && limits.max_compute_workgroup_storage_size >= MATRIX_MEMORY
        && [info.subgroup_min_size, info.subgroup_max_size] == [32; 2]
        && kinds().iter().any(is_used)
}

/// Fails if a test injects a fault into this driver call.
fn count_call(fault: &AtomicU64, device: &str) -> Result<()> {
    // Kernels compile in parallel, so several threads count.
    let less = |left: u64| left.checked_sub(1);
    match fault.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
        Ok(1) => Err(Error::device(device, "a fault that a test asked for")),
        _ => Ok(()),
    }
}

/// Errors that the driver reported asynchronously.
#[derive(Default)]
struct DriverErrors {
    lost: Mutex<Option<String>>,
    error: Mutex<Option<String>>,
}

/// A device and its queue.
pub struct Opened {
    name: Arc<str>,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub pipelines: Pipelines,
    troubles: Arc<DriverErrors>,
    fault: Arc<AtomicU64>,
    /// Staging buffer for all reads.
    staging: Mutex<Option<wgpu::Buffer>>,
    /// Bytes written since the last submission.
    unsent: AtomicU64,
    /// Bytes in buffers.
    pub allocated: AtomicU64,
    /// Number of launches of the work that was prepared last.
    pub prepared: AtomicU64,
}

/// A driver's buffer with an identity.
#[derive(Debug)]
pub struct DriverBuffer {
    pub raw: wgpu::Buffer,
    pub id: MemoryId,
}

impl Opened {
    /// Fails if the device is gone, or if an error occurred that has not been reported yet.
    pub fn check(&self) -> Result<()> {
        if let Some(message) = &*lock(&self.troubles.lost) {
            return Err(Error::DeviceLost {
                device: (*self.name).into(),
                message: message.as_str().into(),
            });
        }
        match lock(&self.troubles.error).take() {
            Some(message) => Err(Error::device(&self.name, message)),
            None => Ok(()),
        }
    }

    /// Destroys the device, as if it were unplugged. Everything fails from then on.
    pub fn destroy(&self) {
        self.device.destroy();
        lock(&self.troubles.lost).get_or_insert("it was given up".to_owned());
    }

    /// Runs `make` in error scopes. Returns its result, or the error that the driver reported.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] for `asked` bytes of `what`, or another error of the driver.
    pub fn make<T>(&self, what: &str, asked: u64, make: impl FnOnce() -> T) -> Result<T> {
        count_call(&self.fault, &self.name)?;
        let scopes = [
            wgpu::ErrorFilter::Internal,
            wgpu::ErrorFilter::Validation,
            wgpu::ErrorFilter::OutOfMemory,
        ]
        .map(|filter| self.device.push_error_scope(filter));
        let made = make();
        // Error scopes are popped in reverse order.
        let [internal, validation, memory] = scopes;
        let errors = [
            ready(memory.pop()),
            ready(validation.pop()),
            ready(internal.pop()),
        ];
        self.check()?;
        match errors.into_iter().flatten().flatten().next() {
            None => Ok(made),
            Some(wgpu::Error::OutOfMemory { .. }) => Err(Error::OutOfMemory {
                device: (*self.name).into(),
                what: what.into(),
                asked: usize::try_from(asked).unwrap_or(usize::MAX),
                free: None,
            }),
            Some(error) => Err(Error::device(&self.name, format!("{what}: {error}"))),
        }
    }

    /// Creates a buffer.
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`] if the driver cannot allocate it.
    pub fn create(&self, what: &str, size: u64, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        self.make(what, size, || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size,
                usage,
                mapped_at_creation: false,
            })
        })
    }

    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device
            .create_command_encoder(&wgpu::CommandEncoderDescriptor::default())
    }

    /// Submits `work` to the queue, after all pending writes.
    ///
    /// # Errors
    /// Returns an error if the device is gone or the driver rejects the work.
    pub fn submit(&self, work: Option<wgpu::CommandEncoder>) -> Result<wgpu::SubmissionIndex> {
        count_call(&self.fault, &self.name)?;
        self.unsent.store(0, Ordering::Relaxed);
        let index = self.queue.submit(work.map(wgpu::CommandEncoder::finish));
        self.check()?;
        Ok(index)
    }

    /// Blocks until submission `index` is complete.
    ///
    /// # Errors
    /// Returns an error if the device is gone.
    pub fn wait(&self, index: wgpu::SubmissionIndex) -> Result<()> {
        count_call(&self.fault, &self.name)?;
        if IN_BROWSER {
            let answer = CallbackFuture::default();
            let done = answer.clone();
            self.queue.on_submitted_work_done(move || done.give(()));
            let waited = ready(answer);
            self.check()?;
            return waited.ok_or_else(|| self.cannot_wait());
        }
        let waited = self.device.poll(wgpu::PollType::Wait {
            submission_index: Some(index),
            timeout: None,
        });
        self.check()?;
        waited.map_err(|error| Error::device(&self.name, format!("waiting failed: {error}")))?;
        Ok(())
    }

    fn cannot_wait(&self) -> Error {
        let message = "this browser cannot suspend the program until the GPU is done";
        Error::device(&self.name, message)
    }

    /// Writes `data` at byte `offset`, in queue order.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn write(&self, to: &wgpu::Buffer, offset: u64, data: &[u8]) -> Result<()> {
        self.check()?;
        count_call(&self.fault, &self.name)?;
        // The driver writes whole words. A kernel sets the partial words at both ends and leaves
        // their other bytes unchanged.
        let head = (offset.wrapping_neg() % 4).min(data.len() as u64) as usize;
        let (head, rest) = data.split_at(head);
        let (words, tail) = rest.split_at(rest.len() & !3);
        let start = offset + head.len() as u64;
        for (at, part) in [(offset, head), (start + words.len() as u64, tail)] {
            if !part.is_empty() {
                self.patch(to, at, part)?;
            }
        }
        for (number, piece) in words.chunks(WRITE_PIECE as usize).enumerate() {
            let at = start + number as u64 * WRITE_PIECE;
            self.queue.write_buffer(to, at, piece);
            let len = piece.len() as u64;
            if self.unsent.fetch_add(len, Ordering::Relaxed) + len >= WRITE_PIECE {
                let index = self.submit(None)?;
                self.wait(index)?;
            }
        }
        self.check()
    }

    /// Writes some bytes of one word.
    fn patch(&self, to: &wgpu::Buffer, offset: u64, part: &[u8]) -> Result<()> {
        let (mut mask, mut bits) = ([0u8; 4], [0u8; 4]);
        let first = (offset % 4) as usize;
        mask[first..first + part.len()].fill(0xff);
        bits[first..first + part.len()].copy_from_slice(part);
        let align = u64::from(self.device.limits().min_storage_buffer_offset_alignment).max(4);
        let window = offset / align * align;
        let size = (to.size() - window).min(align);
        let word = (offset - window) / 4;
        let parameters = [
            word as u32,
            u32::from_le_bytes(mask),
            u32::from_le_bytes(bits),
            0,
        ];
        let pipeline = self.pipelines.patch(self)?;
        self.make("a write", 16, || {
            let uniform = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: 16,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            self.queue
                .write_buffer(&uniform, 0, bytemuck::bytes_of(&parameters));
            let binding = |buffer, offset, size| {
                wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer,
                    offset,
                    size: std::num::NonZeroU64::new(size),
                })
            };
            let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.get_bind_group_layout(0),
                entries: &[
                    wgpu::BindGroupEntry {
                        binding: 0,
                        resource: binding(&uniform, 0, 16),
                    },
                    wgpu::BindGroupEntry {
                        binding: 1,
                        resource: binding(to, window, size),
                    },
                ],
            });
            let mut encoder = self.encoder();
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                pass.set_pipeline(pipeline);
                pass.set_bind_group(0, &group, &[]);
                pass.dispatch_workgroups(1, 1, 1);
            }
            self.submit(Some(encoder))
        })??;
        Ok(())
    }

    /// Reads from byte `offset` on, after all earlier submissions.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn read(&self, from: &wgpu::Buffer, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_with(from, offset, out, None).map(drop)
    }

    /// Works like [`read`](Opened::read), and also returns the first word of another buffer, or 0
    /// without one.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn read_with(
        &self,
        from: &wgpu::Buffer,
        offset: u64,
        out: &mut [u8],
        word: Option<&wgpu::Buffer>,
    ) -> Result<u32> {
        self.check()?;
        let mut number = [0; 4];
        if let (true, Some(word)) = (out.is_empty(), word) {
            self.read(word, 0, &mut number)?;
        }
        let mut staging = lock(&self.staging);
        let mut at = 0u64;
        while at < out.len() as u64 {
            let start = (offset + at) & !3;
            let skip = offset + at - start;
            let len = (out.len() as u64 - at).min(READ_PIECE - skip);
            let whole = (skip + len).next_multiple_of(4);
            // The word comes after the last piece.
            let word = word.filter(|_| at + len == out.len() as u64);
            let mapped_len = whole + if word.is_some() { 4 } else { 0 };
            let enough = staging
                .as_ref()
                .is_some_and(|buffer| buffer.size() >= mapped_len);
            if !enough {
                let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
                let size = mapped_len.next_power_of_two().max(4096);
                *staging = Some(self.create("reading", size, usage)?);
            }
            let Some(buffer) = &*staging else {
                break; // created above
            };
            let mut encoder = self.encoder();
            encoder.copy_buffer_to_buffer(from, start, buffer, 0, Some(whole));
            if let Some(word) = word {
                encoder.copy_buffer_to_buffer(word, 0, buffer, whole, Some(4));
            }
            let index = self.submit(Some(encoder))?;
            let mapped = CallbackFuture::default();
            let result = mapped.clone();
            let slice = buffer.slice(..mapped_len);
            slice.map_async(wgpu::MapMode::Read, move |done| result.give(done));
            // In a browser, mapping waits for the submission.
            let waited = if IN_BROWSER { Ok(()) } else { self.wait(index) };
            let view = match (waited, ready(mapped)) {
                (Ok(()), Some(Ok(()))) => slice.get_mapped_range().map_err(|e| e.to_string()),
                (Err(error), _) => {
                    *staging = None;
                    return Err(error);
                }
                (_, Some(Err(error))) => Err(error.to_string()),
                (_, None) => Err("the memory was not mapped".to_owned()),
            };
            match view {
                Ok(view) => {
                    let bytes = &view[skip as usize..(skip + len) as usize];
                    out[at as usize..(at + len) as usize].copy_from_slice(bytes);
                    if word.is_some() {
                        number.copy_from_slice(&view[whole as usize..mapped_len as usize]);
                    }
                }
                Err(error) => {
                    *staging = None;
                    self.check()?;
                    return Err(Error::device(
                        &self.name,
                        format!("reading failed: {error}"),
                    ));
                }
            }
            buffer.unmap();
            at += len;
        }
        Ok(u32::from_le_bytes(number))
    }

    /// Copies within the device, in queue order. Returns `false` for ranges that are not whole
    /// words.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy(
        &self,
        (from, from_at): (&DriverBuffer, u64),
        (to, to_at): (&DriverBuffer, u64),
        len: u64,
    ) -> Result<bool> {
        if [from_at, to_at, len].iter().any(|x| x % 4 != 0) {
            return Ok(false);
        }
        if len == 0 {
            return Ok(true);
        }
        let mut encoder = self.encoder();
        if from.id == to.id {
            // The driver copies only between different buffers.
            let usage = wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
            let between = self.create("a copy", len, usage)?;
            encoder.copy_buffer_to_buffer(&from.raw, from_at, &between, 0, Some(len));
            encoder.copy_buffer_to_buffer(&between, 0, &to.raw, to_at, Some(len));
        } else {
            encoder.copy_buffer_to_buffer(&from.raw, from_at, &to.raw, to_at, Some(len));
        }
        self.submit(Some(encoder))?;
        Ok(true)
    }
}
