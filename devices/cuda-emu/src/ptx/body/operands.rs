//! Parses operands, and turns them into registers.

use super::{Body, Name, PtxOperand, PtxSymbol};
use crate::ptx::ParseError;
use crate::ptx::instruction::{
    Class, Constant, FALSE, PtxAddress, Register, SPECIAL_REGISTERS, TRUE, Type,
};
use crate::ptx::lexer::{Literal, TokenKind};

impl Body<'_, '_> {
    pub(super) fn operands(&mut self) -> Result<Vec<PtxOperand>, ParseError> {
        let mut operands = Vec::new();
        while !self.cursor.is_sign(b';') {
            if !operands.is_empty() {
                self.cursor.expect_sign(b',')?;
            }
            operands.push(self.operand()?);
        }
        Ok(operands)
    }

    fn operand(&mut self) -> Result<PtxOperand, ParseError> {
        let first = self.simple_operand()?;
        if self.cursor.take_sign(b'|') {
            let second = self.simple_operand()?;
            return Ok(PtxOperand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn simple_operand(&mut self) -> Result<PtxOperand, ParseError> {
        if self.cursor.take_sign(b'[') {
            let base = self.simple_operand()?;
            let offset = self.offset()?;
            self.cursor.expect_sign(b']')?;
            return Ok(match base {
                PtxOperand::Symbol(symbol, inner) => {
                    PtxOperand::Address(Box::new(PtxOperand::Symbol(symbol, 0)), inner + offset)
                }
                base => PtxOperand::Address(Box::new(base), offset),
            });
        }
        if self.cursor.take_sign(b'{') {
            let mut list = Vec::new();
            while !self.cursor.take_sign(b'}') {
                if !list.is_empty() {
                    self.cursor.expect_sign(b',')?;
                }
                // Vectors do not nest.
                if self.cursor.is_sign(b'{') || self.cursor.is_sign(b'[') {
                    return self.cursor.error("a vector within a vector");
                }
                list.push(self.simple_operand()?);
            }
            return Ok(PtxOperand::Vector(list));
        }
        if self.cursor.take_sign(b'!') {
            let name = self.cursor.expect_word()?;
            return match self.find(name) {
                Some(Name::Register(Class::Pred, p)) => Ok(PtxOperand::Not(p)),
                _ => self.cursor.error(format!("'{name}' is no predicate")),
            };
        }
        match self.cursor.peek() {
            Some(token) if token.kind == TokenKind::Word => {
                self.cursor.at += 1;
                let name = self.cursor.word_of(token);
                self.named_operand(name)
            }
            _ => Ok(PtxOperand::Number(self.cursor.expect_literal()?)),
        }
    }

    fn offset(&mut self) -> Result<i64, ParseError> {
        let mut offset = 0i64;
        while self.cursor.is_sign(b'+') || self.cursor.is_sign(b'-') {
            self.cursor.take_sign(b'+');
            let value = self.cursor.expect_integer()? as i64;
            offset = offset.wrapping_add(value);
        }
        if i32::try_from(offset).is_err() {
            return self.cursor.error("an offset is too large");
        }
        Ok(offset)
    }

    fn named_operand(&mut self, name: &str) -> Result<PtxOperand, ParseError> {
        if name == "_" {
            return Ok(PtxOperand::Discarded);
        }
        if let Some(index) = SPECIAL_REGISTERS.iter().position(|&s| s == name) {
            return Ok(PtxOperand::Register(Class::R32, index as Register));
        }
        match self.find(name) {
            Some(Name::Register(class, register)) => Ok(PtxOperand::Register(class, register)),
            Some(Name::Symbol(symbol)) => {
                let offset = self.offset()?;
                Ok(PtxOperand::Symbol(symbol, offset))
            }
            Some(Name::Set { .. }) => self.cursor.error(format!("'{name}' has no number")),
            None => Ok(PtxOperand::Name(name.to_owned())),
        }
    }

    /// Returns a register with a constant.
    pub(crate) fn constant(&mut self, value: Constant, is_wide: bool) -> Register {
        let register = self.builder.constant_register(value, is_wide);
        let used = if is_wide {
            &mut self.decoded.constants64
        } else {
            &mut self.decoded.constants32
        };
        used.insert(register);
        if let Constant::Shared(variable, _) = value {
            self.decoded.shared.insert(variable);
        }
        register
    }

    /// Returns the register of a destination.
    pub(crate) fn register(
        &self,
        operand: &PtxOperand,
        class: Class,
    ) -> Result<Register, ParseError> {
        match *operand {
            PtxOperand::Register(c, register) if c == class && !self.is_fixed(c, register) => {
                Ok(register)
            }
            _ => self
                .cursor
                .error("a destination is no register of this size"),
        }
    }

    /// Returns true for constants and special registers.
    fn is_fixed(&self, class: Class, register: Register) -> bool {
        let register = usize::from(register);
        match class {
            Class::Pred => register <= usize::from(TRUE),
            Class::R32 => register < SPECIAL_REGISTERS.len(),
            Class::R64 => false,
        }
    }

    /// Returns the register of a source, which may be a constant.
    pub(crate) fn source(
        &mut self,
        operand: &PtxOperand,
        ty: Type,
    ) -> Result<Register, ParseError> {
        let class = ty.class();
        match *operand {
            PtxOperand::Register(c, register) if c == class => Ok(register),
            PtxOperand::Number(literal) if class != Class::Pred => {
                let bits = match (literal, ty) {
                    (Literal::Double(v), Type::F32) => {
                        u64::from((f64::from_bits(v) as f32).to_bits())
                    }
                    (Literal::Integer(v) | Literal::Double(v), _) => v,
                    (Literal::Single(v), _) => u64::from(v),
                };
                let bits = match ty.bytes() {
                    1 | 2 => bits & 0xffff,
                    4 => bits & 0xffff_ffff,
                    _ => bits,
                };
                Ok(self.constant(Constant::Value(bits), class == Class::R64))
            }
            PtxOperand::Number(Literal::Integer(v)) => Ok(if v == 0 { FALSE } else { TRUE }),
            PtxOperand::Symbol(symbol, offset) if class != Class::Pred => {
                let constant = match symbol {
                    PtxSymbol::Global(index) => Constant::Global(index, offset),
                    PtxSymbol::Shared(index) => Constant::Shared(index, offset),
                    PtxSymbol::Local(address) | PtxSymbol::Parameter(address) => {
                        Constant::Value(u64::from(address).wrapping_add_signed(offset))
                    }
                };
                Ok(self.constant(constant, class == Class::R64))
            }
            _ => self
                .cursor
                .error("an operand is no register or number of this size"),
        }
    }

    /// Returns a predicate, and true if it is negated.
    pub(crate) fn predicate(
        &mut self,
        operand: &PtxOperand,
    ) -> Result<(Register, bool), ParseError> {
        match *operand {
            PtxOperand::Not(register) => Ok((register, true)),
            ref other => Ok((self.source(other, Type::Pred)?, false)),
        }
    }

    /// Returns an address. Numbers are absolute addresses.
    pub(crate) fn address(&mut self, operand: &PtxOperand) -> Result<PtxAddress, ParseError> {
        let PtxOperand::Address(base, offset) = operand else {
            return self.cursor.error("an operand is no address");
        };
        let (register, is_wide) = match **base {
            PtxOperand::Register(Class::R32, register) => (register, false),
            PtxOperand::Register(Class::R64, register) => (register, true),
            PtxOperand::Symbol(..) | PtxOperand::Number(_) => (self.source(base, Type::U64)?, true),
            _ => return self.cursor.error("an address is no register or variable"),
        };
        // The offset's range was checked.
        Ok(PtxAddress {
            register,
            is_wide,
            offset: *offset as i32,
        })
    }
}
