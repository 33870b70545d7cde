//! Decodes instructions by the families of their mnemonics.
//!
//! Modifiers that have no effect on results here are named and dropped. Unknown ones are errors.

mod arithmetic;
mod asynchronous;
mod control;
mod convert;
mod matrix;
mod memory;
mod warp;

use super::ParseError;
use super::body::{Body, PtxOperand};
use super::instruction::{Action, NO_REGISTER, Register, Type, flag};

/// A mnemonic. Decoding takes its modifiers one by one.
pub(crate) struct Mnemonic<'a> {
    pub(crate) base: &'a str,
    word: &'a str,
    parts: Vec<&'a str>,
    pub(crate) line: u32,
}

impl<'a> Mnemonic<'a> {
    pub(crate) fn new(word: &'a str, line: u32) -> Self {
        let mut parts = word.split('.');
        let base = parts.next().unwrap_or("");
        Self {
            base,
            word,
            parts: parts.collect(),
            line,
        }
    }

    /// Takes a modifier. Returns false if it is absent.
    pub(crate) fn take(&mut self, modifier: &str) -> bool {
        match self.parts.iter().position(|&p| p == modifier) {
            Some(index) => {
                self.parts.remove(index);
                true
            }
            None => false,
        }
    }

    /// Takes the first modifier that is in `table`.
    pub(crate) fn take_of<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        for (index, part) in self.parts.iter().enumerate() {
            if let Some((_, value)) = table.iter().find(|(name, _)| name == part) {
                self.parts.remove(index);
                return Some(*value);
            }
        }
        None
    }

    /// Takes a modifier that must be there.
    pub(crate) fn expect_of<T: Copy>(
        &mut self,
        what: &str,
        table: &[(&str, T)],
    ) -> Result<T, ParseError> {
        match self.take_of(table) {
            Some(value) => Ok(value),
            None => self.error(format!("'{}' has no {what}", self.word)),
        }
    }

    /// Takes the next type.
    pub(crate) fn take_type(&mut self) -> Option<Type> {
        let index = self.parts.iter().position(|p| Type::parse(p).is_some())?;
        Type::parse(self.parts.remove(index))
    }

    pub(crate) fn expect_type(&mut self) -> Result<Type, ParseError> {
        match self.take_type() {
            Some(ty) => Ok(ty),
            None => self.error(format!("'{}' has no type", self.word)),
        }
    }

    /// Takes the first modifier, whatever it is.
    pub(crate) fn take_first(&mut self) -> Option<&'a str> {
        (!self.parts.is_empty()).then(|| self.parts.remove(0))
    }

    /// Takes modifiers of floating-point operations.
    pub(crate) fn take_flags(&mut self) -> u8 {
        let table = [
            ("ftz", flag::FTZ),
            ("sat", flag::SAT),
            ("satfinite", flag::SAT),
            ("relu", flag::RELU),
            ("NaN", flag::NAN),
            ("approx", flag::APPROX),
            ("full", flag::APPROX),
            ("noftz", 0),
        ];
        let mut flags = 0;
        while let Some(bit) = self.take_of(&table) {
            flags |= bit;
        }
        flags
    }

    /// Fails if modifiers are left.
    pub(crate) fn finish(&self) -> Result<(), ParseError> {
        match self.parts.first() {
            Some(part) => self.error(format!(
                "'{}': modifier '.{part}' is not supported",
                self.word
            )),
            None => Ok(()),
        }
    }

    pub(crate) fn error<T>(&self, message: String) -> Result<T, ParseError> {
        Err(ParseError::new(self.line, message))
    }

    pub(crate) fn unsupported<T>(&self) -> Result<T, ParseError> {
        self.error(format!("instruction '{}' is not supported", self.word))
    }

    /// Returns the operands as an array, or an error if the number differs.
    pub(crate) fn operands<'o, const N: usize>(
        &self,
        operands: &'o [PtxOperand],
    ) -> Result<&'o [PtxOperand; N], ParseError> {
        match operands.try_into() {
            Ok(array) => Ok(array),
            Err(_) => self.error(format!(
                "'{}' has {} operands where {N} are expected",
                self.word,
                operands.len()
            )),
        }
    }
}

/// Decodes an instruction, other than a call.
pub(crate) fn decode(
    body: &mut Body<'_, '_>,
    m: &mut Mnemonic<'_>,
    operands: &[PtxOperand],
) -> Result<Action, ParseError> {
    let action = match m.base {
        "add" | "sub" | "mul" | "mul24" | "div" | "rem" | "min" | "max" | "and" | "or" | "xor"
        | "shl" | "shr" | "copysign" => arithmetic::binary(body, m, operands),
        "abs" | "neg" | "not" | "cnot" | "brev" | "sqrt" | "rsqrt" | "rcp" | "ex2" | "lg2"
        | "sin" | "cos" | "tanh" => arithmetic::unary(body, m, operands),
        "popc" | "clz" | "bfind" => arithmetic::count(body, m, operands),
        "mad" | "mad24" | "fma" | "sad" | "bfe" | "prmt" | "shf" | "dp4a" | "dp2a" => {
            arithmetic::ternary(body, m, operands)
        }
        "bfi" | "lop3" => arithmetic::bits(body, m, operands),
        "selp" | "slct" | "setp" | "set" | "testp" => arithmetic::selection(body, m, operands),
        "mov" => convert::mov(body, m, operands),
        "cvt" => convert::cvt(body, m, operands),
        "cvta" | "isspacep" => convert::cvta(body, m, operands),
        "ld" | "ldu" => memory::load(body, m, operands),
        "st" => memory::store(body, m, operands),
        "atom" | "red" => memory::atomic(body, m, operands),
        "bra" | "brx" | "ret" | "exit" | "trap" | "brkpt" => control::branch(body, m, operands),
        "bar" | "barrier" => control::barrier(body, m, operands),
        "membar" | "fence" | "nanosleep" | "griddepcontrol" | "prefetch" | "prefetchu"
        | "setmaxnreg" | "pmevent" | "discard" | "applypriority" | "nop" => {
            return control::hint(m);
        }
        "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => {
            warp::decode(body, m, operands)
        }
        "cp" | "mbarrier" => asynchronous::decode(body, m, operands),
        "ldmatrix" | "stmatrix" | "mma" | "wgmma" => matrix::decode(body, m, operands),
        _ => return m.unsupported(),
    }?;
    m.finish()?;
    Ok(action)
}

/// Returns the register of a destination that may be discarded.
fn optional_register(
    body: &Body<'_, '_>,
    operand: &PtxOperand,
    ty: Type,
) -> Result<Register, ParseError> {
    match operand {
        PtxOperand::Discarded => Ok(NO_REGISTER),
        other => body.register(other, ty.class()),
    }
}
