//! Rows and copies of quantized types.

use super::{Launches, floats, row_numbers};
use crate::plan::{
    LaunchOperand, LaunchOperands, MAX_GROUPS, PlannedLaunch, Unsupported, groups_for,
};
use samite_core::{DType, Node};

/// Source of the kernels for blocks as they lie in files.
pub const PLAIN: &str = "blocks";
/// Elements that a thread decodes or encodes.
const ELEMENTS: usize = 32;
/// Threads of a group that decodes or encodes.
const THREADS: u32 = 128;

/// Returns the name of the module that has the kernels of a source for one type of weights.
pub fn module_for(source: &str, dtype: DType) -> String {
    format!("{source}_{}", dtype.name().to_ascii_lowercase())
}

/// Fails for blocks with gaps between them.
pub fn whole_blocks(operand: &LaunchOperand) -> Result<(), Unsupported> {
    if operand.dtype.is_quantized() && !operand.has_contiguous_rows() {
        return Err("blocks with gaps between them".into());
    }
    Ok(())
}

/// Returns a launch of a kernel that decodes or encodes all rows of `rows`. The kernel is that of
/// the source `kernels` for `dtype`.
fn launch(
    (kernels, dtype): (&str, DType),
    function: &'static str,
    operands: Vec<LaunchOperand>,
    rows: &LaunchOperand,
) -> Result<PlannedLaunch, Unsupported> {
    let threads = rows.shape[0].div_ceil(ELEMENTS) * rows.rows();
    let groups = threads.div_ceil(THREADS as usize).min(MAX_GROUPS);
    let launch = PlannedLaunch::new(&module_for(kernels, dtype), function, operands, groups)?;
    Ok(launch.threads(THREADS))
}

/// Fails for types that kernels do not encode.
fn encodable(dtype: DType) -> Result<(), Unsupported> {
    match dtype {
        DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 | DType::IQ4_NL => {
            Ok(())
        }
        _ => Err(format!("{dtype} is encoded on the host only").into()),
    }
}

/// Converts source 0 to the type of the result. At least one of the types is quantized.
pub fn convert(node: Node<'_>) -> Launches {
    let (y, a) = (node.result(), node.operand(0)?);
    whole_blocks(&y)?;
    whole_blocks(&a)?;
    if y.dtype == a.dtype {
        return copy(y, a);
    }
    if !y.dtype.is_quantized() {
        return Ok(vec![decode(y, a)?]);
    }
    encodable(y.dtype)?;
    if !a.dtype.is_quantized() {
        return Ok(vec![encode(y, a)?]);
    }
    let elements = a.elements();
    if u32::try_from(elements).is_err() {
        return Err("so many elements in another type of blocks".into());
    }
    let decoded = LaunchOperand::workspace(DType::F32, 0, elements);
    Ok(vec![decode(decoded, a)?, encode(y, decoded)?])
}

fn copy(y: LaunchOperand, a: LaunchOperand) -> Launches {
    let (len, bytes) = (y.dtype.block_len(), y.dtype.block_bytes());
    let unit = match bytes {
        bytes if bytes.is_multiple_of(4) => 4,
        bytes if bytes.is_multiple_of(2) => 2,
        _ => 1,
    };
    let groups = groups_for(y.elements() / len * (bytes / unit));
    let launch = PlannedLaunch::new("copy_blocks", "copy_blocks", vec![y, a], groups)?;
    Ok(vec![launch.ints([len, bytes / unit, unit])])
}

/// Returns the launch that decodes `a` to the floats `y`.
pub fn decode(y: LaunchOperand, a: LaunchOperand) -> Result<PlannedLaunch, Unsupported> {
    floats([&y])?;
    launch((PLAIN, a.dtype), "decode", vec![y, a], &a)
}

fn encode(y: LaunchOperand, a: LaunchOperand) -> Result<PlannedLaunch, Unsupported> {
    floats([&a])?;
    launch((PLAIN, y.dtype), "encode", vec![y, a], &y)
}

/// Reads the rows of the quantized operand `a` that source 1 selects. The kernels are those of the
/// source `kernels`.
pub fn get_rows(node: Node<'_>, a: LaunchOperand, kernels: &str) -> Launches {
    let operands = vec![node.result(), a, node.operand(1)?];
    whole_blocks(&operands[1])?;
    row_numbers(&operands[2])?;
    if operands[0].dtype != DType::F32 {
        return Err(format!("rows as {}", operands[0].dtype).into());
    }
    let rows = operands[0];
    let launch = launch((kernels, a.dtype), "get_rows", operands, &rows)?;
    Ok(vec![launch.can_fail()])
}

/// Writes the rows of source 0 to the rows of the quantized result that source 1 selects.
pub fn set_rows(node: Node<'_>) -> Launches {
    let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
    whole_blocks(&operands[0])?;
    floats([&operands[1]])?;
    row_numbers(&operands[2])?;
    encodable(operands[0].dtype)?;
    let (dtype, rows) = (operands[0].dtype, operands[1]);
    Ok(vec![
        launch((PLAIN, dtype), "set_rows", operands, &rows)?.can_fail(),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules;

    #[test]
    fn every_type_of_weights_has_its_modules() {
        // Only activations have the types Q8_1 and Q8_K, and only tests use F64.
        let others = [DType::Q8_1, DType::Q8_K, DType::F64];
        let types = DType::all()
            .filter(|dtype| samite_quant::can_decode(*dtype) && !others.contains(dtype));
        for dtype in types {
            let has_module = |source| modules::find(&module_for(source, dtype)).is_some();
            assert!(has_module("mul_mat"), "{dtype}");
            assert_eq!(has_module("blocks"), dtype != DType::F32, "{dtype}");
            let is_wide = matches!(dtype, DType::F32 | DType::F8_E4M3);
            assert_eq!(has_module("mul_mat_mma"), !is_wide, "{dtype}");
        }
    }
}
