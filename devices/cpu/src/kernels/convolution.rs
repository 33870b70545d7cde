//! Convolutions of images and volumes. The inputs under a kernel are gathered for some output
//! positions, and multiplied with all kernels.

use super::{formula, reduce::dot_of};
use crate::detect::Isa;
use crate::detect::vectorized;
use crate::kernel::{Kernel, KernelContext, Phase, UnsupportedKernel};
use crate::operand::Operand;
use samite_core::{Error, Node, Op, Result, Window};

/// Number of output positions of a task. Each kernel is read once for all of them.
const PLACES: usize = 8;

/// Maximum number of elements of a kernel. Gathered inputs take [`PLACES`] times as much memory in
/// each worker.
const LARGEST: usize = 1 << 20;

/// Returns the kernel for a convolution. Convolutions with very large kernels are computed element
/// by element, which takes no memory.
pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    match Convolution::from_node(node).and_then(|convolution| convolution.size()) {
        Some(size) if size <= LARGEST => Ok(Kernel::with_scratch(scratch, build)),
        _ => formula::kernel(node),
    }
}

/// A convolution in two or three dimensions. An image is a volume of depth 1.
#[derive(Clone, Copy)]
struct Convolution {
    window: Window,
    /// True if the third dimension of tensors is depth, so that channels are part of the fourth.
    is_deep: bool,
    channels: usize,
    outputs: usize,
    /// Extents of a kernel: width, height, depth.
    kernel: [usize; 3],
}

impl Convolution {
    fn from_node(node: Node<'_>) -> Option<Self> {
        let [k0, k1, k2, k3] = node.source_layout(0)?.shape();
        let (mut window, is_deep, channels, outputs, depth) = match *node.op() {
            Op::Conv2d { window } => (window, false, k2, k3, 1),
            Op::Conv3d { window, channels } => {
                (window, true, channels, k3.checked_div(channels)?, k2)
            }
            _ => return None,
        };
        if !is_deep {
            window.padding[2] = 0; // unused
        }
        Some(Convolution {
            window,
            is_deep,
            channels,
            outputs,
            kernel: [k0, k1, depth],
        })
    }

    /// Returns the number of elements of one kernel, with all channels.
    fn size(&self) -> Option<usize> {
        let area = self.kernel[0].checked_mul(self.kernel[1])?;
        area.checked_mul(self.kernel[2])?.checked_mul(self.channels)
    }

    /// Returns the row of a tensor at a height and depth, for channel or output `i` of `count`, of
    /// image or kernel number `of`.
    fn row(&self, at: [usize; 2], of: usize, count: usize, i: usize) -> [usize; 3] {
        if self.is_deep {
            [at[0], at[1], of * count + i]
        } else {
            [at[0], i, of]
        }
    }

    /// Returns the input index under kernel element `k` at output `o`, along dimension `d`. `None`
    /// in the padding.
    fn seen(&self, d: usize, o: usize, k: usize, extent: usize) -> Option<usize> {
        let at = o * self.window.stride[d] as usize + k * self.window.dilation[d] as usize;
        at.checked_sub(self.window.padding[d] as usize)
            .filter(|&at| at < extent)
    }

    /// Writes kernel number `output` to `out`.
    ///
    /// # Safety
    /// As for [`Operand::load`]. `out` must have the kernel's size.
    unsafe fn load(&self, kernels: Operand, output: usize, out: &mut [f32]) {
        let [k0, k1, k2] = self.kernel;
        let mut rows = out.chunks_exact_mut(k0.max(1));
        for channel in 0..self.channels {
            for d in 0..k2 {
                for (h, out) in (0..k1).zip(&mut rows) {
                    let row = self.row([h, d], output, self.channels, channel);
                    // SAFETY: the row belongs to this kernel. The caller guarantees the rest.
                    unsafe { kernels.load(row, 0, out) };
                }
            }
        }
    }

    /// Writes the inputs under a kernel at a position of image number `n` to `out`. The padding is
    /// zero.
    ///
    /// # Safety
    /// As for [`Operand::load`]. Elements must be F32, and `out` must have the kernel's size.
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
                            // SAFETY: the element is inside the image, by `seen`. The caller
                            // guarantees the rest.
                            unsafe { *row.wrapping_add(x * stride).cast::<f32>() }
                        });
                    }
                }
            }
        }
    }
}

/// Returns the bytes of all kernels as F32, and of a worker's gathered inputs.
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
    let (kernels, gathered) = bytes(&Convolution::from_node(node)?)?;
    gathered.checked_mul(threads)?.checked_add(kernels)
}

fn build(context: &KernelContext<'_>) -> Result<Vec<Phase>> {
    let (kernels, image, result) = (context.source(0)?, context.source(1)?, context.result());
    let (isa, node) = (context.isa, context.node);
    let convolution = Convolution::from_node(node);
    let sizes = convolution.and_then(|c| Some((c, c.size()?, bytes(&c)?)));
    let (convolution, size, (kernel_bytes, worker_bytes)) =
        sizes.ok_or_else(|| Error::shape(format!("{}: its workspace overflows", node.op())))?;
    let scratch = context.scratch(kernel_bytes + worker_bytes * context.threads)?;
    let outputs = convolution.outputs;

    let decode = move |tasks: std::ops::Range<usize>, _| {
        for output in tasks {
            let out = scratch.at(output * size * 4).cast::<f32>();
            // SAFETY: each task writes its own kernel, in the scratch memory's part for kernels.
            // Inference checked their number and that they are F32 or F16.
            unsafe {
                let out = std::slice::from_raw_parts_mut(out, size);
                convolution.load(kernels, output, out);
            }
        }
        Ok(())
    };

    let [width, height, n2, n3] = result.shape();
    let (depth, images) = if convolution.is_deep {
        (n2, n3.checked_div(outputs).unwrap_or(0))
    } else {
        (1, n3)
    };
    let parts = width.div_ceil(PLACES);
    let multiply = move |tasks: std::ops::Range<usize>, worker: usize| {
        let own = scratch.at(kernel_bytes + worker * worker_bytes);
        // SAFETY: each worker has its own memory after the kernels, which the phase before wrote.
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
                // SAFETY: inference checked the image, which is F32. The position is one of the
                // result's.
                unsafe { convolution.gather(image, n, [first + i, y, z], out) };
            }
            for output in 0..outputs {
                let mut sums = [0.0; PLACES];
                let kernel = &all[output * size..][..size];
                products(isa, &mut sums[..count], gathered, kernel);
                let row = result.at(convolution.row([y, z], n, outputs, output));
                for (x, sum) in (first..).zip(&sums[..count]) {
                    // SAFETY: inference created the result with these positions, images and
                    // outputs, in F32. Tasks write different positions.
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
    /// Computes the products of a kernel with the gathered inputs of some positions.
    fn products(sums: &mut [f32], gathered: &[f32], kernel: &[f32]) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = dot_of(&gathered[i * kernel.len()..][..kernel.len()], kernel);
        }
    }
}
