//! Convolutions of images and volumes: what a kernel lies on is gathered for some places, and multiplied with all kernels.

use super::{formula, reduce::dot_of};
use crate::detect::Isa;
use crate::detect::vectorized;
use crate::kernel::{Kernel, KernelContext, Phase, Reason};
use crate::operand::Operand;
use samite_core::{Error, Node, Op, Result, Window};

/// Places of a task: each kernel that is read is used so many times.
const PLACES: usize = 8;

/// Most elements of a kernel: what is gathered takes [`PLACES`] times as much memory in each worker.
const LARGEST: usize = 1 << 20;

/// The kernel for a convolution. One that is very large is computed element by element, which takes no memory.
pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, Reason> {
    match Convolution::of(node).and_then(|convolution| convolution.size()) {
        Some(size) if size <= LARGEST => Ok(Kernel::with_scratch(scratch, build)),
        _ => formula::kernel(node),
    }
}

/// A convolution in two or three dimensions: an image is a volume of depth 1.
#[derive(Clone, Copy)]
struct Convolution {
    window: Window,
    /// Whether the third dimension of tensors is depth, so that channels are a part of the fourth.
    is_deep: bool,
    channels: usize,
    outputs: usize,
    /// Extents of a kernel: width, height, depth.
    kernel: [usize; 3],
}

impl Convolution {
    fn of(node: Node<'_>) -> Option<Self> {
        let [k0, k1, k2, k3] = node.source_layout(0)?.shape();
        let (mut window, is_deep, channels, outputs, depth) = match *node.op() {
            Op::Conv2d { window } => (window, false, k2, k3, 1),
            Op::Conv3d { window, channels } => {
                (window, true, channels, k3.checked_div(channels)?, k2)
            }
            _ => return None,
        };
        if !is_deep {
            window.padding[2] = 0; // without a meaning
        }
        Some(Convolution {
            window,
            is_deep,
            channels,
            outputs,
            kernel: [k0, k1, depth],
        })
    }

    /// Elements of one kernel, with all channels.
    fn size(&self) -> Option<usize> {
        let area = self.kernel[0].checked_mul(self.kernel[1])?;
        area.checked_mul(self.kernel[2])?.checked_mul(self.channels)
    }

    /// The row of a tensor at a height and depth: of channel or output `i` of `count`, of image or kernel number `of`.
    fn row(&self, at: [usize; 2], of: usize, count: usize, i: usize) -> [usize; 3] {
        match self.is_deep {
            true => [at[0], at[1], of * count + i],
            false => [at[0], i, of],
        }
    }

    /// Where element `k` of the kernel lies at place `o`, along dimension `d`; `None` in the padding.
    fn seen(&self, d: usize, o: usize, k: usize, extent: usize) -> Option<usize> {
        let at = o * self.window.stride[d] as usize + k * self.window.dilation[d] as usize;
        at.checked_sub(self.window.padding[d] as usize)
            .filter(|&at| at < extent)
    }

    /// Writes kernel number `output` to `out`.
    ///
    /// # Safety
    /// As for [`Operand::load`]; `out` has the kernel's size.
    unsafe fn load(&self, kernels: Operand, output: usize, out: &mut [f32]) {
        let [k0, k1, k2] = self.kernel;
        let mut rows = out.chunks_exact_mut(k0.max(1));
        for channel in 0..self.channels {
            for d in 0..k2 {
                for (h, out) in (0..k1).zip(&mut rows) {
                    let row = self.row([h, d], output, self.channels, channel);
                    // SAFETY: the row is one of this kernel's; the rest is the caller's contract.
                    unsafe { kernels.load(row, 0, out) };
                }
            }
        }
    }

    /// Writes what a kernel lies on at a place of image number `n` to `out`: zero in the padding.
    ///
    /// # Safety
    /// As for [`Operand::load`]; elements are F32, and `out` has the kernel's size.
    unsafe fn gather(&self, image: Operand, n: usize, place: [usize; 3], out: &mut [f32]) {
        let [k0, k1, k2] = self.kernel;
        let [width, height, n2, _] = image.shape();
        let (depth, stride) = (if self.is_deep { n2 } else { 1 }, image.strides()[0]);
        let mut rows = out.chunks_exact_mut(k0.max(1));
        for channel in 0..self.channels {
            for d in 0..k2 {
                let z = self.seen(2, place[2], d, depth);
                for (h, out) in (0..k1).zip(&mut rows) {
                    let y = self.seen(1, place[1], h, height);
                    let Some((y, z)) = y.zip(z) else {
                        out.fill(0.0);
                        continue;
                    };
                    let row = image.at(self.row([y, z], n, self.channels, channel));
                    for (w, out) in out.iter_mut().enumerate() {
                        *out = self.seen(0, place[0], w, width).map_or(0.0, |x| {
                            // SAFETY: the element is inside of the image, by `seen`; the rest is the caller's contract.
                            unsafe { *row.wrapping_add(x * stride).cast::<f32>() }
                        });
                    }
                }
            }
        }
    }
}

/// Bytes of all kernels as F32, and of what a worker gathers.
fn bytes(convolution: &Convolution) -> Option<(usize, usize)> {
    let size = convolution.size()?.checked_mul(4)?;
    let kernels = size.checked_mul(convolution.outputs)?;
    let gathered = size.checked_mul(PLACES)?;
    Some((
        kernels.checked_next_multiple_of(64)?,
        gathered.checked_next_multiple_of(64)?,
    ))
}

fn scratch(node: Node<'_>, _: Isa, threads: usize) -> Option<usize> {
    let (kernels, gathered) = bytes(&Convolution::of(node)?)?;
    gathered.checked_mul(threads)?.checked_add(kernels)
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (kernels, image, result) = (context.source(0)?, context.source(1)?, context.result());
    let (isa, node) = (context.isa, context.node);
    let convolution = Convolution::of(node);
    let sizes = convolution.and_then(|c| Some((c, c.size()?, bytes(&c)?)));
    let (convolution, size, (kernel_bytes, worker_bytes)) =
        sizes.ok_or_else(|| Error::shape(format!("{}: its workspace overflows", node.op())))?;
    let scratch = context.scratch(kernel_bytes + worker_bytes * context.threads)?;
    let outputs = convolution.outputs;

    let decode = move |tasks: std::ops::Range<usize>, _| {
        for output in tasks {
            let out = scratch.at(output * size * 4).cast::<f32>();
            // SAFETY: each task writes a kernel of its own, in the scratch memory's part for kernels; inference checked that there are
            // so many, of F32 or F16.
            unsafe {
                let out = std::slice::from_raw_parts_mut(out, size);
                convolution.load(kernels, output, out);
            }
        }
        Ok(())
    };

    let [width, height, n2, n3] = result.shape();
    let (depth, images) = match convolution.is_deep {
        true => (n2, n3.checked_div(outputs).unwrap_or(0)),
        false => (1, n3),
    };
    let parts = width.div_ceil(PLACES);
    let multiply = move |tasks: std::ops::Range<usize>, worker: usize| {
        let own = scratch.at(kernel_bytes + worker * worker_bytes);
        // SAFETY: each worker has memory of its own behind the kernels, which the phase before wrote.
        let (all, gathered) = unsafe {
            (
                std::slice::from_raw_parts(scratch.at(0).cast::<f32>(), outputs * size),
                std::slice::from_raw_parts_mut(own.cast::<f32>(), PLACES * size),
            )
        };
        for task in tasks {
            let (part, rest) = (task % parts, task / parts);
            let (y, rest) = (rest % height, rest / height);
            let (z, n) = (rest % depth, rest / depth);
            let first = part * PLACES;
            let count = (width - first).min(PLACES);
            for i in 0..count {
                let out = &mut gathered[i * size..][..size];
                // SAFETY: inference checked the image, which is F32; the place is one of the result's.
                unsafe { convolution.gather(image, n, [first + i, y, z], out) };
            }
            for output in 0..outputs {
                let mut sums = [0.0; PLACES];
                let kernel = &all[output * size..][..size];
                products(isa, &mut sums[..count], gathered, kernel);
                let row = result.at(convolution.row([y, z], n, outputs, output));
                for (x, sum) in (first..).zip(&sums[..count]) {
                    // SAFETY: inference made the result of so many places, images and outputs, in F32; tasks write different places.
                    unsafe { *row.wrapping_add(x * result.strides()[0]).cast::<f32>() = *sum };
                }
            }
        }
        Ok(())
    };
    let elements = (size * outputs) as f64;
    let places = (width * height * depth * images) as f64;
    Ok(vec![
        Phase::new(outputs, elements, decode),
        Phase::new(
            parts * height * depth * images,
            places * (size as f64 * 2.0 + elements * 0.1),
            multiply,
        ),
    ])
}

vectorized! {
    /// The products of a kernel and what it lies on at some places.
    fn products(sums: &mut [f32], gathered: &[f32], kernel: &[f32]) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = dot_of(&gathered[i * kernel.len()..][..kernel.len()], kernel);
        }
    }
}
