//! Parses what is outside of function bodies.

use super::instruction::Type;
use super::lexer::{Literal, PtxToken, TokenKind, parse_number};
use super::{ParseError, Variable};

/// Largest size of a variable. The text may be damaged.
const MAX_VARIABLE: u64 = 1 << 32;

/// A cursor over tokens.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    pub(crate) text: &'a str,
    pub(crate) tokens: &'a [PtxToken],
    pub(crate) at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn peek(&self) -> Option<PtxToken> {
        self.tokens.get(self.at).copied()
    }

    pub(crate) fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens.get(self.at.min(last)).map_or(0, |t| t.line)
    }

    pub(crate) fn error<T>(&self, message: impl Into<String>) -> Result<T, ParseError> {
        Err(ParseError::new(self.line(), message.into()))
    }

    pub(crate) fn word_of(&self, token: PtxToken) -> &'a str {
        self.text
            .get(token.start as usize..token.end as usize)
            .unwrap_or("")
    }

    /// Returns the next token's text, or "" at the end.
    pub(crate) fn peek_text(&self) -> &'a str {
        self.peek().map_or("", |t| self.word_of(t))
    }

    pub(crate) fn is_sign(&self, sign: u8) -> bool {
        self.peek().is_some_and(|t| t.kind == TokenKind::Sign(sign))
    }

    pub(crate) fn take_sign(&mut self, sign: u8) -> bool {
        let found = self.is_sign(sign);
        self.at += usize::from(found);
        found
    }

    pub(crate) fn expect_sign(&mut self, sign: u8) -> Result<(), ParseError> {
        if self.take_sign(sign) {
            return Ok(());
        }
        self.error(format!(
            "expected '{}', found '{}'",
            char::from(sign),
            self.peek_text()
        ))
    }

    pub(crate) fn take_word(&mut self, word: &str) -> bool {
        let found = self.peek_text() == word;
        self.at += usize::from(found);
        found
    }

    pub(crate) fn expect_word(&mut self) -> Result<&'a str, ParseError> {
        match self.peek() {
            Some(token) if token.kind == TokenKind::Word => {
                self.at += 1;
                Ok(self.word_of(token))
            }
            _ => self.error(format!("expected a name, found '{}'", self.peek_text())),
        }
    }

    pub(crate) fn expect_literal(&mut self) -> Result<Literal, ParseError> {
        let is_negative = self.take_sign(b'-');
        let text = self.peek_text();
        let literal = match self.peek() {
            Some(token) if token.kind == TokenKind::Number => parse_number(text),
            _ => None,
        };
        let Some(literal) = literal else {
            return self.error(format!("expected a number, found '{text}'"));
        };
        self.at += 1;
        Ok(match literal {
            Literal::Integer(v) if is_negative => Literal::Integer(v.wrapping_neg()),
            Literal::Single(v) if is_negative => Literal::Single(v ^ (1 << 31)),
            Literal::Double(v) if is_negative => Literal::Double(v ^ (1 << 63)),
            other => other,
        })
    }

    pub(crate) fn expect_integer(&mut self) -> Result<u64, ParseError> {
        match self.expect_literal()? {
            Literal::Integer(v) => Ok(v),
            _ => self.error("expected an integer"),
        }
    }

    /// Parses a type as a directive: `.b32`.
    pub(crate) fn expect_type(&mut self) -> Result<Type, ParseError> {
        let word = self.expect_word()?;
        match word.strip_prefix('.').and_then(Type::parse) {
            Some(ty) => Ok(ty),
            None => self.error(format!("expected a type, found '{word}'")),
        }
    }

    /// Skips to the end of the line.
    pub(crate) fn skip_line(&mut self) {
        let line = self.line();
        while self.peek().is_some_and(|t| t.line == line) {
            self.at += 1;
        }
    }

    /// Skips a block in braces, whose first brace is next.
    fn skip_block(&mut self) -> Result<std::ops::Range<usize>, ParseError> {
        let start = self.at;
        self.expect_sign(b'{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.peek() {
                Some(token) if token.kind == TokenKind::Sign(b'{') => depth += 1,
                Some(token) if token.kind == TokenKind::Sign(b'}') => depth -= 1,
                Some(_) => {}
                None => return self.error("a block has no end"),
            }
            self.at += 1;
        }
        Ok(start..self.at)
    }

    /// Parses `.align N .type name[N]`, from the alignment on.
    pub(crate) fn expect_declaration(&mut self) -> Result<Variable, ParseError> {
        let mut alignment = 0;
        if self.take_word(".align") {
            alignment = self.expect_integer()?;
            if !alignment.is_power_of_two() || alignment > 1 << 16 {
                return self.error("an alignment is no power of two");
            }
        }
        let ty = self.expect_type()?;
        let mut alignment = (alignment as usize).max(ty.bytes());
        if self.take_word(".ptr") {
            while self.peek_text().starts_with('.') {
                if self.take_word(".align") {
                    self.expect_integer()?;
                } else {
                    self.at += 1;
                }
            }
        }
        if self.take_word(".align") {
            alignment = self.expect_integer()?.clamp(1, 1 << 16) as usize;
        }
        let name = self.expect_word()?.to_owned();
        let mut bytes = ty.bytes() as u64;
        let mut is_dynamic = false;
        while self.take_sign(b'[') {
            if self.take_sign(b']') {
                is_dynamic = true;
                continue;
            }
            let count = self.expect_integer()?;
            self.expect_sign(b']')?;
            bytes = match bytes.checked_mul(count) {
                Some(bytes) if bytes <= MAX_VARIABLE => bytes,
                _ => return self.error(format!("variable '{name}' is too large")),
            };
        }
        let bytes = if is_dynamic { 0 } else { bytes as usize };
        Ok(Variable {
            name,
            bytes,
            alignment,
            is_dynamic,
            ..Variable::default()
        })
    }
}

/// A function, whose body is not decoded yet.
#[derive(Debug, Default)]
pub(crate) struct PtxFunction {
    pub(crate) name: String,
    pub(crate) line: u32,
    pub(crate) is_kernel: bool,
    pub(crate) parameters: Vec<Variable>,
    pub(crate) results: Vec<Variable>,
    /// Tokens of the body, with its braces. `None` for a declaration.
    pub(crate) body: Option<std::ops::Range<usize>>,
    pub(crate) max_threads: Option<u32>,
}

/// Declarations of a module.
#[derive(Debug, Default)]
pub(crate) struct Declarations {
    pub(crate) functions: Vec<PtxFunction>,
    pub(crate) globals: Vec<Variable>,
    pub(crate) shared: Vec<Variable>,
}

/// Parses everything but the bodies of functions.
pub(crate) fn parse_declarations(cursor: &mut Cursor<'_>) -> Result<Declarations, ParseError> {
    let mut declarations = Declarations::default();
    let mut is_external = false;
    while cursor.peek().is_some() {
        let word = cursor.expect_word()?;
        match word {
            ".version" | ".address_size" | ".target" | ".file" | ".loc" => {
                if word == ".address_size" && cursor.peek_text() != "64" {
                    return cursor.error("only addresses of 64 bits are supported");
                }
                cursor.at -= 1;
                cursor.skip_line();
            }
            ".pragma" => {
                cursor.at += 1;
                cursor.expect_sign(b';')?;
            }
            ".section" => {
                cursor.expect_word()?;
                cursor.skip_block()?;
            }
            ".extern" => {
                is_external = true;
                continue;
            }
            ".visible" | ".weak" | ".common" | ".hidden" => continue,
            ".global" | ".const" | ".shared" => {
                let mut variable = cursor.expect_declaration()?;
                parse_initializer(cursor, &mut variable)?;
                cursor.expect_sign(b';')?;
                variable.is_constant = word == ".const";
                if word == ".shared" {
                    declarations.shared.push(variable);
                } else if is_external || variable.is_dynamic {
                    return cursor.error(format!("variable '{}' is external", variable.name));
                } else {
                    declarations.globals.push(variable);
                }
            }
            ".entry" | ".func" => {
                let function = parse_function(cursor, word == ".entry")?;
                let known = declarations
                    .functions
                    .iter_mut()
                    .find(|f| f.name == function.name);
                match known {
                    Some(known) if known.body.is_none() => *known = function,
                    Some(_) if function.body.is_some() => {
                        return cursor.error(format!("function '{}' occurs twice", function.name));
                    }
                    Some(_) => {}
                    None => declarations.functions.push(function),
                }
            }
            _ => return cursor.error(format!("directive '{word}' is not supported")),
        }
        is_external = false;
    }
    Ok(declarations)
}

fn parse_list(cursor: &mut Cursor<'_>) -> Result<Vec<Variable>, ParseError> {
    let mut list = Vec::new();
    cursor.expect_sign(b'(')?;
    while !cursor.take_sign(b')') {
        if !list.is_empty() {
            cursor.expect_sign(b',')?;
        }
        if !cursor.take_word(".param") {
            return cursor.error("only parameters of the space .param are supported");
        }
        list.push(cursor.expect_declaration()?);
    }
    Ok(list)
}

fn parse_function(cursor: &mut Cursor<'_>, is_kernel: bool) -> Result<PtxFunction, ParseError> {
    let line = cursor.line();
    let results = if !is_kernel && cursor.is_sign(b'(') {
        parse_list(cursor)?
    } else {
        Vec::new()
    };
    let name = cursor.expect_word()?.to_owned();
    let parameters = if cursor.is_sign(b'(') {
        parse_list(cursor)?
    } else {
        Vec::new()
    };
    let mut max_threads = None;
    while cursor.peek_text().starts_with('.') {
        let attribute = cursor.expect_word()?;
        let mut product = 1u64;
        while cursor.peek().is_some_and(|t| t.kind == TokenKind::Number) {
            product = product.saturating_mul(cursor.expect_integer()?);
            cursor.take_sign(b',');
        }
        match attribute {
            ".maxntid" | ".reqntid" => max_threads = Some(product.min(1 << 20) as u32),
            ".minnctapersm" | ".maxnreg" | ".noreturn" => {}
            _ => return cursor.error(format!("attribute '{attribute}' is not supported")),
        }
    }
    let body = if cursor.take_sign(b';') {
        None
    } else {
        Some(cursor.skip_block()?)
    };
    Ok(PtxFunction {
        name,
        line,
        is_kernel,
        parameters,
        results,
        body,
        max_threads,
    })
}

/// Parses `= value` or `= {values}`, if present.
fn parse_initializer(cursor: &mut Cursor<'_>, variable: &mut Variable) -> Result<(), ParseError> {
    if !cursor.take_sign(b'=') {
        return Ok(());
    }
    // The element's type precedes the name, which the declaration does not keep.
    let element = element_bytes(cursor, &variable.name)?;
    let is_list = cursor.take_sign(b'{');
    loop {
        parse_element(cursor, variable, element)?;
        if !is_list || cursor.take_sign(b'}') {
            break;
        }
        cursor.expect_sign(b',')?;
    }
    if variable.data.len() > variable.bytes {
        return cursor.error(format!("variable '{}' has too many values", variable.name));
    }
    Ok(())
}

/// Returns the size of the elements of the variable `name` that was just declared.
fn element_bytes(cursor: &Cursor<'_>, name: &str) -> Result<usize, ParseError> {
    let before = cursor.tokens[..cursor.at]
        .iter()
        .rposition(|&t| cursor.word_of(t) == name);
    let ty = before
        .and_then(|at| cursor.tokens.get(at.checked_sub(1)?))
        .and_then(|&t| Type::parse(cursor.word_of(t).strip_prefix('.')?));
    match ty {
        Some(ty) => Ok(ty.bytes()),
        None => cursor.error(format!("variable '{name}' has no type")),
    }
}

fn parse_element(
    cursor: &mut Cursor<'_>,
    variable: &mut Variable,
    element: usize,
) -> Result<(), ParseError> {
    if cursor.peek().is_some_and(|t| t.kind == TokenKind::Word) {
        let is_generic = cursor.take_word("generic");
        if is_generic {
            cursor.expect_sign(b'(')?;
        }
        let name = cursor.expect_word()?.to_owned();
        if is_generic {
            cursor.expect_sign(b')')?;
        }
        let addend = if cursor.take_sign(b'+') {
            cursor.expect_integer()? as i64
        } else {
            0
        };
        if element != 8 {
            return cursor.error(format!("the address of '{name}' is no value of 8 bytes"));
        }
        variable
            .relocations
            .push((variable.data.len(), name, addend));
        variable.data.extend([0; 8]);
        return Ok(());
    }
    let bits = match cursor.expect_literal()? {
        Literal::Integer(v) | Literal::Double(v) => v,
        Literal::Single(v) => u64::from(v),
    };
    variable.data.extend(&bits.to_le_bytes()[..element]);
    Ok(())
}
