//! Elementwise functions.

use super::matmul::{QUANTIZED_PIECE, numbers};
use super::{elements, floats};
use crate::plan::{Launch, Operands, UnsupportedLaunch, WorkgroupCount};
use crate::shader::Access;
use samite_core::{Glu, Node, Shape, Unary};

fn launch(
    node: Node<'_>,
    sources: usize,
    [first, second, expression]: [&str; 3],
) -> Result<Launch, UnsupportedLaunch> {
    let mut operands = vec![node.result()];
    for index in 0..sources {
        operands.push(node.source_operand(index)?);
    }
    floats(&operands)?;
    elements(&operands[0])?;
    Ok(
        Launch::new("elementwise", operands, WorkgroupCount::Elements)
            .with("expression", expression)
            .with("first_value", first)
            .with("second_value", second),
    )
}

/// Computes `expression` of `x` and of `p`, the `parameters`.
pub fn unary<const N: usize>(
    node: Node<'_>,
    expression: &str,
    parameters: [f32; N],
) -> Result<Launch, UnsupportedLaunch> {
    let launch = launch(node, 1, ["get_a(i)", "0.0", expression])?;
    Ok(launch.floats(parameters).cut(&[1, 2, 3]))
}

/// Computes `expression` of the element's index `n` and of `p`, the `parameters`.
pub fn generate<const N: usize>(
    node: Node<'_>,
    expression: &str,
    parameters: [f32; N],
) -> Result<Launch, UnsupportedLaunch> {
    Ok(launch(node, 0, ["0.0", "0.0", expression])?.floats(parameters))
}

/// Computes `expression` of `x` and of `z`, an element of the second source, which is broadcast.
pub fn binary(node: Node<'_>, expression: &str) -> Result<Launch, UnsupportedLaunch> {
    let launch = launch(node, 2, ["get_a(i)", "get_b(i % shape_b())", expression])?;
    Ok(launch.cut(&[1, 2, 3]))
}

/// Pads source 0 with zeros.
pub fn pad(node: Node<'_>, before: Shape) -> Result<Launch, UnsupportedLaunch> {
    // An index before the source wraps around to a huge value, which fails the upper bound check.
    let inner = "min(i - parameters.ints[0], shape_a() - 1u)";
    let value = format!("select(0.0, get_a({inner}), all(i - parameters.ints[0] < shape_a()))");
    Ok(launch(node, 1, [&value, "0.0", "x"])?.ints(before))
}

/// Sets elements right of the diagonal to `value`.
pub fn diag_mask(node: Node<'_>, past: usize, value: f32) -> Result<Launch, UnsupportedLaunch> {
    let past = past.min(1 << 31);
    let launch = launch(
        node,
        1,
        ["get_a(i)", "0.0", "select(x, p.x, i.x > k.x + i.y)"],
    )?;
    Ok(launch.floats([value]).ints([past]).cut(&[2, 3]))
}

/// Applies a function to each element.
pub fn function(node: Node<'_>, function: Unary) -> Result<Launch, UnsupportedLaunch> {
    let mut parameters = [0.0; 4];
    let expression = match function {
        Unary::Abs => "abs(x)",
        Unary::Sgn => "sign(x)",
        Unary::Neg => "-x",
        Unary::Step => "select(0.0, 1.0, x > 0.0)",
        Unary::Tanh => "safe_tanh(x)",
        Unary::Elu => "select(exp_m1(x), x, x > 0.0)",
        Unary::Relu => "max(x, 0.0)",
        Unary::Sigmoid => "sigmoid(x)",
        Unary::Gelu => "gelu(x)",
        Unary::GeluQuick => "x * sigmoid(1.702 * x)",
        Unary::Silu => "x * sigmoid(x)",
        Unary::HardSwish => "x * clamp((x + 3.0) / 6.0, 0.0, 1.0)",
        Unary::HardSigmoid => "clamp((x + 3.0) / 6.0, 0.0, 1.0)",
        Unary::Exp => "exp(x)",
        Unary::ExpM1 => "exp_m1(x)",
        Unary::SoftPlus => "softplus(x)",
        Unary::GeluErf => "gelu_erf(x)",
        Unary::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => {
            parameters = [alpha_n, alpha_p, beta, eps];
            "select((exp_m1(min(x, p.w)) - x) * p.x + p.z * x, p.y * x * x + p.z * x, x > 0.0)"
        }
        Unary::Floor => "floor(x)",
        Unary::Ceil => "ceil(x)",
        // Rounds halves away from zero. Integers stay as they are, because adding a half to a large
        // one might round it.
        Unary::Round => "select(sign(x) * floor(abs(x) + 0.5), x, trunc(x) == x)",
        Unary::Trunc => "trunc(x)",
    };
    unary(node, expression, parameters)
}

/// Computes a gated unit of two sources that also quantizes its result to 8 bits.
pub fn gated_columns(
    node: Node<'_>,
    kind: Glu,
    swapped: bool,
) -> Result<Launch, UnsupportedLaunch> {
    let mut unit = glu(node, kind, swapped)?;
    let expression = unit.shader.values.remove("expression").unwrap_or_default();
    let y = node.result();
    let mut operands = unit.operands;
    operands.push(numbers(&y, Access::Write));
    let work = WorkgroupCount::Groups(y.rows() * y.shape[0].div_ceil(QUANTIZED_PIECE));
    let launch = Launch::new("gated_q8", operands, work).floats(unit.floats);
    Ok(launch.with("scratch", 3).with("expression", expression))
}

/// Computes a gated linear unit of the halves of each row, or of two sources.
pub fn glu(node: Node<'_>, kind: Glu, swapped: bool) -> Result<Launch, UnsupportedLaunch> {
    let mut parameters = [0.0; 2];
    let expression = match kind {
        Glu::Reglu => "max(x, 0.0) * z",
        Glu::Geglu => "gelu(x) * z",
        Glu::Swiglu => "x * sigmoid(x) * z",
        Glu::SwigluOai { alpha, limit } => {
            parameters = [alpha, limit];
            "min(x, p.y) * sigmoid(p.x * min(x, p.y)) * (1.0 + max(min(z, p.y), -p.y))"
        }
        Glu::GegluErf => "gelu_erf(x) * z",
        Glu::GegluQuick => "x * sigmoid(1.702 * x) * z",
        Glu::SwigluClamp { limit } => {
            parameters = [0.0, limit];
            "min(x, p.y) * sigmoid(min(x, p.y)) * max(min(z, p.y), -p.y)"
        }
    };
    let launch = if node.optional(1).is_some() {
        launch(node, 2, ["get_a(i)", "get_b(i)", expression])?
    } else {
        let half = node.result().shape[0];
        let at = |place: usize| format!("get_a(i + vec4<u32>({place}u, 0u, 0u, 0u))");
        let [first, second] = if swapped { [half, 0] } else { [0, half] };
        launch(node, 1, [&at(first), &at(second), expression])?
    };
    Ok(launch.floats(parameters).cut(&[1, 2, 3]))
}
