//! Matrix instructions.
//!
//! Fragments are laid out over lanes as the PTX manual describes. Products are exact, and sums are
//! rounded once per instruction; cards add in an order and a precision that are not documented.

use super::Interpreter;
use super::block::BlockState;
use super::fault::{FaultKind, MachineResult, Trouble};
use super::float::{from_bf16, from_f16, to_f16, to_tf32};
use super::memory_access::{AccessRequest, Data, addresses};
use super::registers::LANES;
use super::warp::Warp;
use crate::ptx::instruction::{Matrix, MatrixKind, Ordering, Register, Rounding, Space, Type};

/// Returns the lanes that have the addresses of the rows of `count` matrices: lanes 8i to 8i + 7
/// those of matrix i.
fn row_lanes(count: usize) -> u32 {
    if count == 4 {
        u32::MAX
    } else {
        (1 << (8 * count)) - 1
    }
}

impl Interpreter<'_> {
    /// Executes a matrix instruction. All lanes take part.
    pub(crate) fn matrix(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        mask: u32,
        pc: u32,
        matrix: &Matrix,
    ) -> MachineResult {
        if mask != u32::MAX {
            let lane = mask.trailing_zeros() as usize % LANES;
            return Err(Trouble::new(
                lane,
                FaultKind::MissingLanes { missing: !mask },
            ));
        }
        match matrix.kind {
            MatrixKind::Load { transposes, space } => {
                self.load_matrix(block, warp, pc, (matrix, transposes, space))
            }
            MatrixKind::Store { transposes, space } => {
                self.store_matrix(block, warp, pc, (matrix, transposes, space))
            }
            MatrixKind::Multiply {
                k,
                a,
                b,
                accumulator,
                saturates,
            } => {
                if accumulator == Type::S32 {
                    multiply_integers(warp, matrix, k, [a, b], saturates);
                } else {
                    multiply_floats(warp, matrix, k, a, accumulator);
                }
                Ok(())
            }
        }
    }

    fn load_matrix(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        pc: u32,
        (matrix, transposes, space): (&Matrix, bool, Space),
    ) -> MachineResult {
        let Some(address) = matrix.address else {
            return Ok(());
        };
        let count = matrix.d.len();
        let rows = row_lanes(count);
        let mut at = addresses(warp, address);
        let mut data: Data = [[0; 4]; LANES];
        let request = AccessRequest {
            space,
            bytes: 16,
            ordering: Ordering::Weak,
            pc,
        };
        self.load(block, warp, rows, request, &mut at, &mut data)?;
        for (i, &d) in matrix.d.iter().enumerate() {
            let element = |row: usize, column: usize| {
                data[8 * i + row][column / 2] >> (16 * (column & 1)) & 0xffff
            };
            let mut out = [0; LANES];
            for (lane, out) in out.iter_mut().enumerate() {
                let (row, column) = (lane / 4, 2 * (lane % 4));
                *out = if transposes {
                    element(column, row) | (element(column + 1, row) << 16)
                } else {
                    element(row, column) | (element(row, column + 1) << 16)
                };
            }
            warp.registers.set32(d, u32::MAX, &out);
        }
        Ok(())
    }

    fn store_matrix(
        &mut self,
        block: &mut BlockState,
        warp: &mut Warp,
        pc: u32,
        (matrix, transposes, space): (&Matrix, bool, Space),
    ) -> MachineResult {
        let Some(address) = matrix.address else {
            return Ok(());
        };
        let count = matrix.a.len();
        let rows = row_lanes(count);
        let mut at = addresses(warp, address);
        let mut data: Data = [[0; 4]; LANES];
        for (i, &a) in matrix.a.iter().enumerate() {
            for (lane, value) in warp.registers.get32(a).iter().enumerate() {
                for part in 0..2 {
                    let (row, column) = (lane / 4, 2 * (lane % 4) + part);
                    let (row, column) = if transposes {
                        (column, row)
                    } else {
                        (row, column)
                    };
                    let bits = value >> (16 * part) & 0xffff;
                    data[8 * i + row][column / 2] |= bits << (16 * (column & 1));
                }
            }
        }
        let request = AccessRequest {
            space,
            bytes: 16,
            ordering: Ordering::Weak,
            pc,
        };
        self.store(block, warp, rows, request, &mut at, &data)
    }
}

/// Returns the element of a fragment's register: `bits` wide, number `index` within it.
fn element(warp: &Warp, register: Register, lane: usize, bits: usize, index: usize) -> u32 {
    let word = warp.registers.get32(register)[lane];
    if bits == 32 {
        word
    } else {
        word >> (bits * index) & ((1 << bits) - 1)
    }
}

/// Returns the place of element (`row`, `column`) of operand A, which has 16 rows: register, lane
/// and number within the register.
fn place_a(row: usize, column: usize, bits: usize) -> (usize, usize, usize) {
    let per = 32 / bits;
    // A register holds `per` elements of a row; four lanes hold one row of 4 * `per` elements.
    let (group, rest) = (column / (4 * per), column % (4 * per));
    (2 * group + row / 8, 4 * (row % 8) + rest / per, rest % per)
}

/// Returns the place of element (`row`, `column`) of operand B, which has 8 columns.
fn place_b(row: usize, column: usize, bits: usize) -> (usize, usize, usize) {
    let per = 32 / bits;
    let (group, rest) = (row / (4 * per), row % (4 * per));
    (group, 4 * column + rest / per, rest % per)
}

/// Returns the place of an accumulator: register and lane.
fn place_c(row: usize, column: usize) -> (usize, usize) {
    (2 * (row / 8) + column % 2, 4 * (row % 8) + column / 2)
}

fn multiply_floats(warp: &mut Warp, matrix: &Matrix, k: usize, ty: Type, accumulator: Type) {
    let bits = if ty == Type::TF32 { 32 } else { 16 };
    let value = |word: u32| match ty {
        Type::F16 => f64::from(from_f16(word as u16)),
        Type::BF16 => f64::from(from_bf16(word as u16)),
        _ => f64::from(f32::from_bits(to_tf32(
            f32::from_bits(word),
            Rounding::Zero,
        ))),
    };
    let mut left = vec![0f64; 16 * k];
    let mut right = vec![0f64; 8 * k];
    for i in 0..k {
        for row in 0..16 {
            let (register, lane, index) = place_a(row, i, bits);
            left[row * k + i] = value(element(warp, matrix.a[register], lane, bits, index));
        }
        for column in 0..8 {
            let (register, lane, index) = place_b(i, column, bits);
            right[column * k + i] = value(element(warp, matrix.b[register], lane, bits, index));
        }
    }
    let mut out = vec![[0u32; LANES]; matrix.d.len()];
    for row in 0..16 {
        for column in 0..8 {
            let (register, lane) = place_c(row, column);
            let products = left[row * k..][..k].iter().zip(&right[column * k..][..k]);
            let sum: f64 = products.map(|(x, y)| x * y).sum();
            if accumulator == Type::F16 {
                // Two neighbours share a register.
                let (register, part) = (register / 2, register % 2);
                let c = element(warp, matrix.c[register], lane, 16, part);
                let result = to_f16(f64::from(from_f16(c as u16)) + sum, Rounding::Nearest);
                out[register][lane] |= u32::from(result) << (16 * part);
            } else {
                let c = f32::from_bits(warp.registers.get32(matrix.c[register])[lane]);
                out[register][lane] = ((f64::from(c) + sum) as f32).to_bits();
            }
        }
    }
    for (&d, out) in matrix.d.iter().zip(&out) {
        warp.registers.set32(d, u32::MAX, out);
    }
}

fn multiply_integers(
    warp: &mut Warp,
    matrix: &Matrix,
    k: usize,
    [ty_a, ty_b]: [Type; 2],
    saturates: bool,
) {
    let value = |ty: Type, byte: u32| match ty {
        Type::S8 => i64::from(byte as i8),
        _ => i64::from(byte as u8),
    };
    let mut out = vec![[0u32; LANES]; matrix.d.len()];
    for row in 0..16 {
        for column in 0..8 {
            let (register, lane) = place_c(row, column);
            let mut sum = i64::from(warp.registers.get32(matrix.c[register])[lane] as i32);
            for i in 0..k {
                let (r, l, n) = place_a(row, i, 8);
                let a = value(ty_a, element(warp, matrix.a[r], l, 8, n));
                let (r, l, n) = place_b(i, column, 8);
                sum += a * value(ty_b, element(warp, matrix.b[r], l, 8, n));
            }
            let limits = (i64::from(i32::MIN), i64::from(i32::MAX));
            let sum = if saturates {
                sum.clamp(limits.0, limits.1)
            } else {
                sum
            };
            out[register][lane] = sum as u32;
        }
    }
    for (&d, out) in matrix.d.iter().zip(&out) {
        warp.registers.set32(d, u32::MAX, out);
    }
}
