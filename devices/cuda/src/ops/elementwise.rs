//! Functions of elements.

use super::packed::{Int8Columns, groups_of_pieces};
use super::{Launches, NO_KERNEL, floats};
use crate::plan::{LaunchOperand, LaunchOperands, PlannedLaunch, Unsupported, groups_for};
use samite_core::{Glu, Node, Op, Unary};

/// Number of a function in `kernels/elementwise.cu`, in the same order.
#[derive(Clone, Copy)]
#[rustfmt::skip]
enum Function {
    Add, Sub, Mul, Div,
    Scale, Sqr, Sqrt, Log, Clamp, Sin, Cos, LeakyRelu,
    Abs, Sgn, Neg, Step, Tanh, Elu, Relu, Sigmoid, Gelu, GeluQuick, Silu, HardSwish, HardSigmoid,
    Exp, ExpM1, SoftPlus, GeluErf, Xielu, Floor, Ceil, Round, Trunc,
    Fill, Arange,
    Reglu, Geglu, Swiglu, SwigluOai, GegluErf, GegluQuick, SwigluClamp, SiluBack,
}

/// Returns the launches of an elementwise operation.
pub fn launches(node: Node<'_>) -> Launches {
    match *node.op() {
        Op::Add => binary(node, Function::Add),
        Op::Sub => binary(node, Function::Sub),
        Op::Mul => binary(node, Function::Mul),
        Op::Div => binary(node, Function::Div),
        Op::Scale { scale, bias } => unary(node, Function::Scale, [scale, bias, 0.0, 0.0]),
        Op::Sqr => unary(node, Function::Sqr, [0.0; 4]),
        Op::Sqrt => unary(node, Function::Sqrt, [0.0; 4]),
        Op::Log => unary(node, Function::Log, [0.0; 4]),
        Op::Sin => unary(node, Function::Sin, [0.0; 4]),
        Op::Cos => unary(node, Function::Cos, [0.0; 4]),
        Op::LeakyRelu { slope } => unary(node, Function::LeakyRelu, [slope, 0.0, 0.0, 0.0]),
        Op::Clamp { min, max } => unary(node, Function::Clamp, [min, max, 0.0, 0.0]),
        Op::Fill { value } => generate(node, Function::Fill, [value, 0.0]),
        Op::Arange { start, step, .. } => generate(node, Function::Arange, [start, step]),
        Op::Unary(function) => {
            let (function, numbers) = of_unary(function);
            unary(node, function, numbers)
        }
        Op::Glu { kind, swapped } => glu(node, kind, swapped),
        Op::Pad { before, .. } => {
            let launch = one("pad", vec![node.result(), node.operand(0)?])?;
            Ok(vec![launch.ints(before)])
        }
        Op::DiagMaskInf { past } => diag_mask(node, past, f32::NEG_INFINITY),
        Op::DiagMaskZero { past } => diag_mask(node, past, 0.0),
        _ => Err(NO_KERNEL.into()),
    }
}

/// Returns a launch of `function` over floats with a thread per element of the result.
fn one(function: &'static str, operands: Vec<LaunchOperand>) -> Result<PlannedLaunch, Unsupported> {
    floats(&operands)?;
    let groups = groups_for(operands[0].elements());
    PlannedLaunch::new("elementwise", function, operands, groups)
}

fn unary(node: Node<'_>, function: Function, numbers: [f32; 4]) -> Launches {
    let launch = one("unary_elements", vec![node.result(), node.operand(0)?])?;
    Ok(vec![launch.ints([function as usize]).floats(numbers)])
}

/// Computes a function of the element's index.
fn generate(node: Node<'_>, function: Function, numbers: [f32; 2]) -> Launches {
    let launch = one(
        "unary_elements",
        vec![node.result(), LaunchOperand::missing()],
    )?;
    Ok(vec![launch.ints([function as usize]).floats(numbers)])
}

/// Computes a function of two elements. The second source repeats.
fn binary(node: Node<'_>, function: Function) -> Launches {
    let operands = vec![node.result(), node.operand(0)?, node.operand(1)?];
    let launch = one("binary_elements", operands)?;
    Ok(vec![launch.ints([function as usize, 0, 0])])
}

/// Computes the gradient of SiLU.
pub fn silu_back(node: Node<'_>) -> Launches {
    binary(node, Function::SiluBack)
}

fn diag_mask(node: Node<'_>, past: usize, value: f32) -> Launches {
    let launch = one("diag_mask", vec![node.result(), node.operand(0)?])?;
    Ok(vec![launch.ints([past]).floats([value])])
}

/// Computes a gated linear unit of the halves of each row, or of two sources.
fn glu(node: Node<'_>, kind: Glu, swapped: bool) -> Launches {
    let (function, numbers) = match kind {
        Glu::Reglu => (Function::Reglu, [0.0; 2]),
        Glu::Geglu => (Function::Geglu, [0.0; 2]),
        Glu::Swiglu => (Function::Swiglu, [0.0; 2]),
        Glu::SwigluOai { alpha, limit } => (Function::SwigluOai, [alpha, limit]),
        Glu::GegluErf => (Function::GegluErf, [0.0; 2]),
        Glu::GegluQuick => (Function::GegluQuick, [0.0; 2]),
        Glu::SwigluClamp { limit } => (Function::SwigluClamp, [0.0, limit]),
    };
    let (y, a) = (node.result(), node.operand(0)?);
    let b = node.optional(1);
    let is_one = b.which == LaunchOperand::missing().which;
    let half = y.shape[0];
    let (first, second) = match (is_one, swapped) {
        (false, _) => (0, 0),
        (true, false) => (0, half),
        (true, true) => (half, 0),
    };
    let launch = one("binary_elements", vec![y, a, if is_one { a } else { b }])?;
    let launch = launch.ints([function as usize, first, second]);
    Ok(vec![launch.floats(numbers)])
}

/// Computes a gated linear unit of two sources, and its result as 8-bit numbers.
pub fn gated_int8(node: Node<'_>) -> Result<PlannedLaunch, Unsupported> {
    let launches = launches(node)?;
    let gated = launches.into_iter().next().ok_or(NO_KERNEL)?;
    let y = node.result();
    let columns = Int8Columns::new(&y);
    let mut operands = gated.operands;
    operands.push(columns.scratch);
    let launch = PlannedLaunch::new("elementwise", "gated_int8", operands, groups_of_pieces(&y))?;
    let launch = launch.ints([gated.ints[0] as usize, columns.codes]);
    Ok(launch.floats(gated.floats))
}

fn of_unary(function: Unary) -> (Function, [f32; 4]) {
    let function = match function {
        Unary::Abs => Function::Abs,
        Unary::Sgn => Function::Sgn,
        Unary::Neg => Function::Neg,
        Unary::Step => Function::Step,
        Unary::Tanh => Function::Tanh,
        Unary::Elu => Function::Elu,
        Unary::Relu => Function::Relu,
        Unary::Sigmoid => Function::Sigmoid,
        Unary::Gelu => Function::Gelu,
        Unary::GeluQuick => Function::GeluQuick,
        Unary::Silu => Function::Silu,
        Unary::HardSwish => Function::HardSwish,
        Unary::HardSigmoid => Function::HardSigmoid,
        Unary::Exp => Function::Exp,
        Unary::ExpM1 => Function::ExpM1,
        Unary::SoftPlus => Function::SoftPlus,
        Unary::GeluErf => Function::GeluErf,
        Unary::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => return (Function::Xielu, [alpha_n, alpha_p, beta, eps]),
        Unary::Floor => Function::Floor,
        Unary::Ceil => Function::Ceil,
        Unary::Round => Function::Round,
        Unary::Trunc => Function::Trunc,
    };
    (function, [0.0; 4])
}
