//! Compiled shaders, cached for the life of the device.

use crate::emulated::without_matrices;
use crate::gpu::{MAX_BINDINGS, Opened};
use crate::grids;
use crate::plan::MAX_OPERANDS;
use crate::shader::{FIRST_OPERAND, Shader};
use crate::stored_pipelines::StoredPipelines;
use crate::waiting::IN_BROWSER;
use samite_core::{CancelToken, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Maximum number of threads that compile.
const MAX_COMPILERS: usize = 8;

/// The pipelines of one device.
pub struct Pipelines {
    /// Layouts by number of operand bindings: without and with [grids].
    layouts: [Vec<(wgpu::BindGroupLayout, wgpu::PipelineLayout)>; 2],
    grids: OnceLock<wgpu::Buffer>,
    compiled: Mutex<BTreeMap<Shader, Arc<wgpu::ComputePipeline>>>,
    patch: OnceLock<wgpu::ComputePipeline>,
    stored: Option<StoredPipelines>,
    /// Changes to kernels, for tests.
    changes: Changes,
}

/// Changes to the text of kernels, for tests.
#[derive(Clone, Copy, Default)]
pub struct Changes {
    pub replaced_text: Option<[&'static str; 2]>,
    pub emulates_matrices: bool,
}

impl Pipelines {
    pub fn new(device: &wgpu::Device, stored: Option<StoredPipelines>, changes: Changes) -> Self {
        let most = device.limits().max_storage_buffers_per_shader_stage;
        let most = most.min(MAX_BINDINGS).saturating_sub(1) as usize;
        let layouts = |grids: usize| {
            let operands = 0..=most.min(MAX_OPERANDS) - grids;
            operands
                .map(|operands| layout(device, operands, grids))
                .collect()
        };
        Pipelines {
            layouts: [layouts(0), layouts(1)],
            grids: OnceLock::new(),
            compiled: Mutex::default(),
            patch: OnceLock::new(),
            stored,
            changes,
        }
    }

    /// Returns the pipelines on disk.
    pub fn stored(&self) -> Option<&StoredPipelines> {
        self.stored.as_ref()
    }

    /// Returns the bind group layout of `shader`.
    pub fn bind_group_layout(&self, shader: &Shader) -> &wgpu::BindGroupLayout {
        &self.layouts(shader).0
    }

    fn layouts(&self, shader: &Shader) -> &(wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        &self.layouts[usize::from(shader.reads_grids())][shader.binding_count()]
    }

    /// Returns the grids of IQ types. Uploads them on first use.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn grids(&self, opened: &Opened) -> Result<&wgpu::Buffer> {
        if let Some(grids) = self.grids.get() {
            return Ok(grids);
        }
        let grids = grids::upload(opened)?;
        Ok(self.grids.get_or_init(|| grids)) // any thread's upload will do
    }

    /// Returns the pipeline of `shader`. Compiles it if it is not cached.
    ///
    /// # Errors
    /// Returns an error if the driver rejects the shader.
    pub fn get(&self, opened: &Opened, shader: &Shader) -> Result<Arc<wgpu::ComputePipeline>> {
        let lock = || self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = lock().get(shader) {
            return Ok(Arc::clone(pipeline));
        }
        let layout = &self.layouts(shader).1;
        let mut source = shader.source()?;
        if let Some([text, by]) = self.changes.replaced_text {
            source = source.replace(text, by);
        }
        if self.changes.emulates_matrices {
            source = without_matrices(shader.kernel, source)?;
        }
        let pipeline = compile(opened, &shader.name(), &source, Some(layout), "main")?;
        let pipeline = Arc::new(pipeline);
        lock().insert(shader.clone(), Arc::clone(&pipeline));
        Ok(pipeline)
    }

    /// Compiles the uncached ones of `shaders` in parallel, because each takes a driver some
    /// milliseconds or more. If one fails, others may still be compiled.
    ///
    /// # Errors
    /// Returns an error if the driver rejects a shader or `cancel` is set.
    pub fn get_all<'a>(
        &self,
        opened: &Opened,
        shaders: impl Iterator<Item = &'a Shader>,
        cancel: &CancelToken,
    ) -> Result<()> {
        let missing: BTreeSet<&Shader> = {
            let compiled = self.compiled.lock();
            let compiled = compiled.unwrap_or_else(PoisonError::into_inner);
            shaders
                .filter(|shader| !compiled.contains_key(shader))
                .collect()
        };
        let missing = Vec::from_iter(missing);
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            while let Some(shader) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                cancel.check()?;
                self.get(opened, shader)?;
            }
            Ok(())
        };
        if IN_BROWSER || missing.len() < 2 {
            return work();
        }
        let others = std::thread::available_parallelism().map_or(1, usize::from);
        let others = others.min(missing.len()).min(MAX_COMPILERS) - 1;
        std::thread::scope(|scope| {
            // If no thread can be started, this one compiles alone.
            let spawn = |_| {
                let thread = samite_core::thread_builder().ok()?;
                thread.spawn_scoped(scope, work).ok()
            };
            let others: Vec<_> = (0..others).filter_map(spawn).collect();
            let mut result = work();
            for other in others {
                let theirs = other.join();
                let theirs = theirs.unwrap_or_else(|_| {
                    Err(Error::invalid("a thread that compiles kernels panicked"))
                });
                result = result.and(theirs);
            }
            result
        })
    }

    /// Returns the kernel that sets some bits of a word.
    ///
    /// # Errors
    /// Returns an error if the driver rejects it.
    pub fn patch(&self, opened: &Opened) -> Result<&wgpu::ComputePipeline> {
        if self.patch.get().is_none() {
            let source = include_str!("kernels/patch.wgsl");
            let _ = self
                .patch
                // any thread's pipeline will do
                .set(compile(opened, "patch", source, None, "main")?);
        }
        Ok(self.patch.get_or_init(|| unreachable!("set above")))
    }
}

/// Compiles a pipeline of the function `entry` of `source`. Without a layout, the driver derives
/// one.
///
/// # Errors
/// Returns an error if the driver rejects it.
pub fn compile(
    opened: &Opened,
    name: &str,
    source: &str,
    layout: Option<&wgpu::PipelineLayout>,
    entry: &str,
) -> Result<wgpu::ComputePipeline> {
    let stored = opened.pipelines.stored();
    let pipeline = opened.make(&format!("the kernel '{name}'"), 0, || {
        let module = opened
            .device
            .create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(name),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            });
        opened
            .device
            .create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(name),
                layout,
                module: &module,
                entry_point: Some(entry),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Kernels never read workgroup memory that they have not written.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: stored.map(|stored| &stored.cache),
            })
    })?;
    if let Some(stored) = stored {
        stored.count();
    }
    Ok(pipeline)
}

/// Creates layouts for the parameters, the failure word, the operands, and the grids if they are
/// used.
fn layout(
    device: &wgpu::Device,
    operands: usize,
    grids: usize,
) -> (wgpu::BindGroupLayout, wgpu::PipelineLayout) {
    let first_grid = FIRST_OPERAND + operands as u32;
    let entry = |binding: u32| wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: match binding {
                0 => wgpu::BufferBindingType::Uniform,
                // One buffer may be several operands, one of them written. The driver then needs
                // all of them to be writable.
                _ => wgpu::BufferBindingType::Storage {
                    read_only: binding >= first_grid,
                },
            },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    };
    let entries: Vec<_> = (0..first_grid + grids as u32).map(entry).collect();
    let groups = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: None,
        entries: &entries,
    });
    let pipelines = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: None,
        bind_group_layouts: &[Some(&groups)],
        immediate_size: 0,
    });
    (groups, pipelines)
}
