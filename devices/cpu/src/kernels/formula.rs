//! Operations that are defined by a [formula](samite_core::formula), element by element.

use crate::kernel::{Kernel, KernelContext, Phase, UnsupportedKernel};
use crate::operand::Operand;
use half::{bf16, f16};
use samite_core::formula::{Elements, MAX_SOURCES, Shapes, compute, reads, units};
use samite_core::{DIMS, DType, Node, Result};

/// Returns the kernel, if the types are supported.
pub(crate) fn kernel(node: Node<'_>) -> Result<Kernel, UnsupportedKernel> {
    let sources = (0..node.tensor().sources.len()).filter_map(|i| node.source_layout(i));
    for dtype in sources.chain([node.layout()]).map(|layout| layout.dtype()) {
        let is_plain = matches!(
            dtype,
            DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::I64
        );
        if !is_plain {
            return Err(format!("{dtype} is not read element by element").into());
        }
    }
    Ok(Kernel::one_phase(build))
}

fn build(context: &KernelContext<'_>) -> Result<Phase> {
    let op = *context.node.op();
    let mut sources = [None; MAX_SOURCES];
    for (index, source) in sources.iter_mut().enumerate() {
        *source = context.optional(index);
    }
    let result = context.result();
    let layouts = sources
        .iter()
        .map(|source| source.as_ref().map(Operand::layout));
    let shapes = Shapes::new(result.layout(), layouts);
    let cost = 10.0 * (reads(&op, &shapes) + result.elements() as f64);
    Ok(Phase::new(units(&op, &shapes), cost, move |tasks, _| {
        let mut memory = FormulaOperands { sources, result };
        for unit in tasks {
            compute(&op, &shapes, unit, &mut memory);
        }
        Ok(())
    }))
}

/// Access to elements in memory.
struct FormulaOperands {
    sources: [Option<Operand>; MAX_SOURCES],
    result: Operand,
}

/// Returns the address of an element, if it exists.
fn address(operand: &Operand, position: [usize; DIMS]) -> Option<*mut u8> {
    let is_inside = position.iter().zip(operand.shape()).all(|(&i, n)| i < n);
    let [i0, i1, i2, i3] = position;
    is_inside.then(|| {
        operand
            .at([i1, i2, i3])
            .wrapping_add(i0 * operand.strides()[0])
    })
}

fn load(operand: &Operand, position: [usize; DIMS]) -> f64 {
    let Some(at) = address(operand, position) else {
        return f64::NAN;
    };
    // SAFETY: the element is inside the shape, so its bytes are in the operand's memory. `resolve`
    // and the table checked that the base and the strides are aligned. Tasks write different
    // elements of the result, and read only their own.
    unsafe {
        match operand.dtype() {
            DType::F16 => (*at.cast::<f16>()).to_f64(),
            DType::BF16 => (*at.cast::<bf16>()).to_f64(),
            DType::I32 => (*at.cast::<i32>()).into(),
            DType::I64 => *at.cast::<i64>() as f64,
            _ => (*at.cast::<f32>()).into(),
        }
    }
}

impl Elements for FormulaOperands {
    #[inline]
    fn get(&self, source: usize, position: [usize; DIMS]) -> f64 {
        let operand = self.sources.get(source).and_then(Option::as_ref);
        operand.map_or(f64::NAN, |operand| load(operand, position))
    }

    #[inline]
    fn put(&mut self, position: [usize; DIMS], value: f64) {
        let Some(at) = address(&self.result, position) else {
            return;
        };
        // SAFETY: as in `load`. No other task writes this element, and its readers have read it
        // before.
        unsafe {
            match self.result.dtype() {
                DType::F16 => *at.cast() = f16::from_f64(value),
                DType::BF16 => *at.cast() = bf16::from_f64(value),
                DType::I32 => *at.cast() = value as i32,
                DType::I64 => *at.cast() = value as i64,
                _ => *at.cast() = value as f32,
            }
        }
    }

    #[inline]
    fn written(&self, position: [usize; DIMS]) -> f64 {
        load(&self.result, position)
    }
}
