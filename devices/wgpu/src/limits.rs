//! Peak rates of a device, measured by kernels that only read or only multiply.

use crate::gpu::{Gpu, Opened};
use crate::pipelines::compile;
use crate::shader::expand;
use crate::template::Values;
use samite_core::environment::Instant;
use samite_core::{DeviceLimits, Result};
use std::time::Duration;

/// Maximum bytes to read: more than caches hold.
const BYTES: u64 = 256 << 20;
/// Invocations per workgroup, as in the shader.
const GROUP: u64 = 256;
/// Minimum duration of a measurement; shorter ones are repeated with more work.
const LEAST: Duration = Duration::from_millis(30);
const TRIES: usize = 4;
/// Operations per step of `multiply`. A fused multiply-add of four numbers counts as eight.
const STEP: u64 = 8 * 8;

/// Measures both limits. Takes less than a second.
///
/// # Errors
/// Returns an error if there is not enough memory or the device fails.
pub fn measure(gpu: &Gpu, opened: &Opened) -> Result<DeviceLimits> {
    let most = gpu.binding_limit() as u64;
    let bytes = BYTES.min(most).min(gpu.limits.max_buffer_size) & !0xfff;
    let usage = wgpu::BufferUsages::STORAGE;
    let data = opened.create("measuring", bytes, usage)?;
    let vectors = bytes / 16;
    let groups = (vectors / GROUP / 16).clamp(1, 16384);
    let amount = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
    let amount = opened.create("measuring", 16, amount)?;
    let kernel = |entry| BenchmarkKernel::new(opened, entry, &amount, &data);
    kernel("fill")?.run(vectors, groups, 1)?;
    let (read, multiply) = (kernel("read")?, kernel("multiply")?);
    let read_bytes = best(|times| {
        let begin = Instant::now();
        read.run(vectors, groups, times)?;
        Ok((begin.elapsed(), (bytes * times) as f64))
    })?;
    let f32_operations = best(|times| {
        let (steps, groups) = ((times * 64).min(4096), (times / 64).clamp(1, 64) * 256);
        let begin = Instant::now();
        multiply.run(steps, groups, 1)?;
        let operations = steps * groups * GROUP * STEP;
        Ok((begin.elapsed(), operations as f64))
    })?;
    Ok(DeviceLimits {
        read_bytes,
        f32_operations,
    })
}

/// Returns the best rate of `work`. It takes a repeat count, and returns its duration and the
/// amount of work done.
fn best(work: impl Fn(u64) -> Result<(Duration, f64)>) -> Result<f64> {
    let mut times = 1;
    while work(times)?.0 < LEAST && times < 4096 {
        times *= 2;
    }
    let mut best = 0.0f64;
    for _ in 0..TRIES {
        let (time, amount) = work(times)?;
        best = best.max(amount / time.as_secs_f64().max(1e-9));
    }
    Ok(best)
}

/// A kernel of the shader, with its bind group.
struct BenchmarkKernel<'a> {
    opened: &'a Opened,
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    amount: &'a wgpu::Buffer,
}

impl<'a> BenchmarkKernel<'a> {
    fn new(
        opened: &'a Opened,
        entry: &str,
        amount: &'a wgpu::Buffer,
        data: &wgpu::Buffer,
    ) -> Result<Self> {
        let source = expand("limits", "{{>limits}}", &Values::new())?;
        let pipeline = compile(opened, "limits", &source, None, entry)?;
        let group = opened.make("measuring", 0, || {
            let bindings = [(0, amount), (1, data)];
            let entries = bindings.map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            });
            let layout = pipeline.get_bind_group_layout(0);
            opened.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &layout,
                entries: &entries,
            })
        })?;
        Ok(BenchmarkKernel {
            opened,
            pipeline,
            group,
            amount,
        })
    }

    /// Runs the kernel `times` times in sequence and waits for the last run.
    fn run(&self, count: u64, groups: u64, times: u64) -> Result<()> {
        let numbers = [count, groups * GROUP].map(|x| u32::try_from(x).unwrap_or(u32::MAX));
        let opened = self.opened;
        opened.write(self.amount, 0, bytemuck::cast_slice(&numbers))?;
        let mut encoder = opened.encoder();
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&self.pipeline);
            pass.set_bind_group(0, &self.group, &[]);
            for _ in 0..times {
                pass.dispatch_workgroups(groups as u32, 1, 1);
            }
        }
        opened.wait(opened.submit(Some(encoder))?)
    }
}
