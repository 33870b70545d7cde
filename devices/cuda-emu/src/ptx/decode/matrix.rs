//! Matrix instructions.

use super::Mnemonic;
use crate::ptx::ParseError;
use crate::ptx::body::{Body, PtxOperand};
use crate::ptx::instruction::{
    Action, Class, Matrix, MatrixKind, PtxAddress, Register, Space, Type,
};

pub(super) fn decode(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    match m.base {
        "mma" => multiply(body, m, operands),
        "ldmatrix" | "stmatrix" => transfer(body, m, operands),
        _ => m.unsupported(),
    }
}

fn registers(
    body: &mut Body<'_, '_>,
    m: &Mnemonic<'_>,
    operand: &PtxOperand,
    count: usize,
    is_destination: bool,
) -> Result<Vec<Register>, ParseError> {
    let list = match operand {
        PtxOperand::Vector(list) => list.clone(),
        single => vec![single.clone()],
    };
    if list.len() != count {
        return m.error(format!("'{}' needs a vector of {count} registers", m.base));
    }
    list.iter()
        .map(|o| {
            if is_destination {
                body.register(o, Class::R32)
            } else {
                body.source(o, Type::B32)
            }
        })
        .collect()
}

fn push(body: &mut Body<'_, '_>, matrix: Matrix) -> Action {
    let index = body.builder.code.matrices.len() as u32;
    body.builder.code.matrices.push(matrix);
    Action::Matrix { index }
}

fn empty(kind: MatrixKind, address: Option<PtxAddress>) -> Matrix {
    Matrix {
        kind,
        d: Vec::new(),
        a: Vec::new(),
        b: Vec::new(),
        c: Vec::new(),
        address,
    }
}

fn transfer(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [first, second] = m.operands(operands)?;
    if !(m.take("sync") && m.take("aligned") && m.take("m8n8") && m.take("b16")) {
        return m.unsupported();
    }
    let count = m.expect_of("count", &[("x1", 1), ("x2", 2), ("x4", 4)])?;
    let transposes = m.take("trans");
    let spaces = [("shared", ()), ("shared::cta", ())];
    let space = if m.take_of(&spaces).is_some() {
        Space::Shared
    } else {
        Space::Generic
    };
    if m.base == "ldmatrix" {
        let address = Some(body.address(second)?);
        let d = registers(body, m, first, count, true)?;
        let kind = MatrixKind::Load { transposes, space };
        return Ok(push(
            body,
            Matrix {
                d,
                ..empty(kind, address)
            },
        ));
    }
    let address = Some(body.address(first)?);
    let a = registers(body, m, second, count, false)?;
    Ok(push(
        body,
        Matrix {
            a,
            ..empty(MatrixKind::Store { transposes, space }, address)
        },
    ))
}

fn multiply(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let [d, a, b, c] = m.operands(operands)?;
    if !(m.take("sync") && m.take("aligned")) {
        return m.unsupported();
    }
    let shapes = [
        ("m16n8k4", 4),
        ("m16n8k8", 8),
        ("m16n8k16", 16),
        ("m16n8k32", 32),
    ];
    let k = m.expect_of("shape", &shapes)?;
    if !(m.take("row") && m.take("col")) {
        return m.unsupported();
    }
    let saturates = m.take("satfinite");
    let types = [
        m.expect_type()?,
        m.expect_type()?,
        m.expect_type()?,
        m.expect_type()?,
    ];
    let [accumulator, ty_a, ty_b, ty_c] = types;
    let is_supported = matches!(
        (ty_a, ty_b, accumulator, k),
        (Type::F16, Type::F16, Type::F32 | Type::F16, 8 | 16)
            | (Type::BF16, Type::BF16, Type::F32, 8 | 16)
            | (Type::TF32, Type::TF32, Type::F32, 4 | 8)
            | (Type::S8 | Type::U8, Type::S8 | Type::U8, Type::S32, 16 | 32)
    );
    if !is_supported || ty_c != accumulator {
        return m.unsupported();
    }
    // A has 16 rows and B 8 columns, each of k elements, over 32 lanes.
    let element = if ty_a == Type::TF32 { 4 } else { ty_a.bytes() };
    let count_a = 16 * k * element / 4 / 32;
    let count_d = if accumulator == Type::F16 { 2 } else { 4 };
    let kind = MatrixKind::Multiply {
        k,
        a: ty_a,
        b: ty_b,
        accumulator,
        saturates,
    };
    let matrix = Matrix {
        d: registers(body, m, d, count_d, true)?,
        a: registers(body, m, a, count_a, false)?,
        b: registers(body, m, b, count_a / 2, false)?,
        c: registers(body, m, c, count_d, false)?,
        ..empty(kind, None)
    };
    Ok(push(body, matrix))
}
