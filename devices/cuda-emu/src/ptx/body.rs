//! Decodes the bodies of functions: scopes, declarations, operands and labels.

mod operands;

use std::collections::HashMap;

use super::decode::{Mnemonic, decode};
use super::instruction::{
    Action, Class, Constant, FunctionCall, Instruction, Location, NO_REGISTER, Register,
    SPECIAL_REGISTERS, TRUE,
};
use super::lexer::{Literal, TokenKind};
use super::link::{Decoded, place};
use super::parse::{Cursor, PtxFunction};
use super::{Code, ParseError, Variable};

/// Largest number of registers of a file, with room for the marker.
const MAX_REGISTERS: usize = NO_REGISTER as usize;

/// Largest local memory of a thread.
const MAX_LOCAL: usize = 1 << 19;

/// Numbers of registers and bytes of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) r32: usize,
    pub(crate) r64: usize,
    pub(crate) predicates: usize,
    pub(crate) local: usize,
}

impl Frame {
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            r32: self.r32.max(other.r32),
            r64: self.r64.max(other.r64),
            predicates: self.predicates.max(other.predicates),
            local: self.local.max(other.local),
        }
    }
}

/// An operand as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PtxOperand {
    Register(Class, Register),
    Number(Literal),
    /// A variable, plus an offset.
    Symbol(PtxSymbol, i64),
    /// `[base+offset]`.
    Address(Box<PtxOperand>, i64),
    /// `{a, b}`.
    Vector(Vec<PtxOperand>),
    /// `a|b`.
    Pair(Box<PtxOperand>, Box<PtxOperand>),
    /// `!p`.
    Not(Register),
    /// `_`.
    Discarded,
    /// A label or a special register that is no constant.
    Name(String),
}

/// Variable that an operand names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PtxSymbol {
    Global(u32),
    Shared(u32),
    /// Address in local memory.
    Local(u32),
    /// Offset of a kernel's parameter.
    Parameter(u32),
}

#[derive(Clone, Copy, Debug)]
enum Name {
    Register(Class, Register),
    /// Registers `name0` to `nameN`.
    Set {
        class: Class,
        first: Register,
        count: usize,
    },
    Symbol(PtxSymbol),
}

#[derive(Debug, Default)]
struct Scope {
    parent: usize,
    names: HashMap<String, Name>,
    labels: HashMap<String, u32>,
    local: usize,
}

/// A place that needs the address of a label.
#[derive(Debug)]
struct Fixup {
    place: FixupPlace,
    scope: usize,
    label: String,
    line: u32,
}

#[derive(Debug)]
enum FixupPlace {
    Branch(usize),
    Table(usize, usize),
    /// Branch through the table that a label names.
    Indexed(usize),
}

/// A call whose function may not be decoded yet: index of the function, line, and places of
/// arguments and results.
type PendingCall = (usize, u32, Vec<[u32; 2]>, Vec<[u32; 2]>);

/// Code of a module while it is decoded.
pub(crate) struct CodeBuilder<'a> {
    pub(crate) code: Code,
    pub(crate) functions: &'a [PtxFunction],
    constants: [HashMap<Constant, Register>; 2],
    values: [Vec<Constant>; 2],
    calls: Vec<PendingCall>,
    globals: HashMap<String, PtxSymbol>,
}

impl<'a> CodeBuilder<'a> {
    pub(crate) fn new(code: Code, functions: &'a [PtxFunction]) -> Self {
        let mut globals = HashMap::new();
        for (index, variable) in code.globals.iter().enumerate() {
            globals.insert(variable.name.clone(), PtxSymbol::Global(index as u32));
        }
        for (index, variable) in code.shared.iter().enumerate() {
            globals.insert(variable.name.clone(), PtxSymbol::Shared(index as u32));
        }
        Self {
            code,
            functions,
            constants: Default::default(),
            values: Default::default(),
            calls: Vec::new(),
            globals,
        }
    }

    /// Returns the value of a register of constants.
    pub(crate) fn constant(&self, register: Register, is_wide: bool) -> Option<Constant> {
        let first = if is_wide { 0 } else { SPECIAL_REGISTERS.len() };
        self.values[usize::from(is_wide)]
            .get(usize::from(register).checked_sub(first)?)
            .copied()
    }

    fn constant_register(&mut self, constant: Constant, is_wide: bool) -> Register {
        let first = if is_wide { 0 } else { SPECIAL_REGISTERS.len() };
        let values = &mut self.values[usize::from(is_wide)];
        *self.constants[usize::from(is_wide)]
            .entry(constant)
            .or_insert_with(|| {
                values.push(constant);
                (first + values.len() - 1) as Register
            })
    }

    /// Fills the table of calls, once all functions are decoded.
    pub(crate) fn resolve_calls(&mut self, decoded: &[Decoded]) -> Result<(), ParseError> {
        for (function, line, arguments, results) in &self.calls {
            let declaration = &self.functions[*function];
            if declaration.body.is_none() {
                let message = format!("function '{}' has no body", declaration.name);
                return Err(ParseError::new(*line, message));
            }
            let (inputs, outputs) = function_places(declaration, decoded[*function].start.local);
            let mut call = FunctionCall {
                target: decoded[*function].entry,
                return_register: decoded[*function].start.r32 as Register,
                ..FunctionCall::default()
            };
            for (what, have, want) in [
                ("arguments", arguments, &inputs),
                ("results", results, &outputs),
            ] {
                if have.len() != want.len() || have.iter().zip(want).any(|(h, w)| h[1] != w[1]) {
                    let name = &declaration.name;
                    let message = format!("the {what} do not fit function '{name}'");
                    return Err(ParseError::new(*line, message));
                }
            }
            call.arguments = arguments
                .iter()
                .zip(&inputs)
                .map(|(a, i)| [a[0], i[0], a[1]])
                .collect();
            call.results = results
                .iter()
                .zip(&outputs)
                .map(|(r, o)| [o[0], r[0], r[1]])
                .collect();
            self.code.calls.push(call);
        }
        Ok(())
    }
}

/// Returns address and size of a function's parameters and results in local memory.
fn function_places(function: &PtxFunction, start: usize) -> (Vec<[u32; 2]>, Vec<[u32; 2]>) {
    let start = start.next_multiple_of(16);
    let (inputs, end) = place(&function.parameters);
    let (outputs, _) = place(&function.results);
    let second = start + end.next_multiple_of(16);
    let at = |base: usize, list: Vec<(usize, usize)>| {
        list.into_iter()
            .map(|(o, bytes)| [(base + o) as u32, bytes as u32])
            .collect()
    };
    (at(start, inputs), at(second, outputs))
}

/// A function's body while it is decoded.
pub(crate) struct Body<'a, 'b> {
    pub(crate) cursor: Cursor<'a>,
    pub(crate) builder: &'b mut CodeBuilder<'a>,
    pub(crate) is_kernel: bool,
    /// Register with the return addresses.
    pub(crate) addresses: Register,
    scopes: Vec<Scope>,
    scope: usize,
    fixups: Vec<Fixup>,
    tables: HashMap<(usize, String), usize>,
    next: Frame,
    decoded: Decoded,
}

/// Decodes the body of function `index`, whose registers begin at `start`.
pub(crate) fn decode_body<'a>(
    builder: &mut CodeBuilder<'a>,
    mut cursor: Cursor<'a>,
    index: usize,
    start: Frame,
) -> Result<Decoded, ParseError> {
    let function = &builder.functions[index];
    cursor.at = function.body.clone().unwrap_or_default().start;
    let mut decoded = Decoded {
        entry: builder.code.instructions.len() as u32,
        ..Decoded::default()
    };
    decoded.start = start;
    let mut body = Body {
        cursor,
        is_kernel: function.is_kernel,
        addresses: NO_REGISTER,
        builder,
        scopes: vec![Scope::default()],
        scope: 0,
        fixups: Vec::new(),
        tables: HashMap::new(),
        next: start,
        decoded,
    };
    body.declare_parameters(function)?;
    body.cursor.expect_sign(b'{')?;
    body.decode_statements()?;
    body.resolve_labels()?;
    let location = Location {
        line: body.cursor.line(),
        start: 0,
        end: 0,
    };
    let action = body.return_action();
    body.push(
        Instruction {
            guard: TRUE,
            negates: false,
            action,
        },
        location,
    );
    body.decoded.end = body.decoded.end.max(body.next);
    Ok(body.decoded)
}

impl<'a> Body<'a, '_> {
    fn declare_parameters(&mut self, function: &PtxFunction) -> Result<(), ParseError> {
        if function.is_kernel {
            let (places, _) = place(&function.parameters);
            for (parameter, (offset, _)) in function.parameters.iter().zip(places) {
                self.name(
                    &parameter.name,
                    Name::Symbol(PtxSymbol::Parameter(offset as u32)),
                );
            }
            return Ok(());
        }
        let (_, addresses) = self.reserve(Class::R32, 1)?;
        self.addresses = addresses;
        let (inputs, outputs) = function_places(function, self.next.local);
        let all = function.parameters.iter().zip(inputs);
        for (parameter, place) in all.chain(function.results.iter().zip(outputs)) {
            self.name(&parameter.name, Name::Symbol(PtxSymbol::Local(place[0])));
            self.next.local = self.next.local.max((place[0] + place[1]) as usize);
        }
        self.decoded.end = self.decoded.end.max(self.next);
        Ok(())
    }

    pub(crate) fn return_action(&self) -> Action {
        if self.is_kernel {
            Action::Exit
        } else {
            Action::Return {
                addresses: self.addresses,
            }
        }
    }

    fn name(&mut self, name: &str, value: Name) {
        self.scopes[self.scope].names.insert(name.to_owned(), value);
    }

    fn push(&mut self, instruction: Instruction, location: Location) {
        self.builder.code.instructions.push(instruction);
        self.builder.code.locations.push(location);
    }

    fn reserve(&mut self, class: Class, count: usize) -> Result<(Class, Register), ParseError> {
        let next = match class {
            Class::Pred => &mut self.next.predicates,
            Class::R32 => &mut self.next.r32,
            Class::R64 => &mut self.next.r64,
        };
        let first = *next;
        if count > MAX_REGISTERS || first + count > MAX_REGISTERS {
            return self.cursor.error("too many registers");
        }
        *next += count;
        Ok((class, first as Register))
    }

    fn decode_statements(&mut self) -> Result<(), ParseError> {
        loop {
            let Some(token) = self.cursor.peek() else {
                return self.cursor.error("a function has no end");
            };
            match token.kind {
                TokenKind::Sign(b'{') => {
                    self.cursor.at += 1;
                    let local = self.next.local;
                    self.scopes.push(Scope {
                        parent: self.scope,
                        local,
                        ..Scope::default()
                    });
                    self.scope = self.scopes.len() - 1;
                }
                TokenKind::Sign(b'}') => {
                    self.cursor.at += 1;
                    if self.scope == 0 {
                        return Ok(());
                    }
                    // Space of a call's parameters is free again.
                    self.decoded.end = self.decoded.end.max(self.next);
                    self.next.local = self.scopes[self.scope].local;
                    self.scope = self.scopes[self.scope].parent;
                }
                TokenKind::Sign(b';') => self.cursor.at += 1,
                TokenKind::Word if self.cursor.word_of(token).starts_with('.') => {
                    self.decode_directive()?;
                }
                TokenKind::Word if self.is_label() => self.decode_label()?,
                _ => self.decode_instruction()?,
            }
        }
    }

    fn is_label(&self) -> bool {
        let next = self.cursor.tokens.get(self.cursor.at + 1);
        next.is_some_and(|t| t.kind == TokenKind::Sign(b':'))
    }

    fn decode_label(&mut self) -> Result<(), ParseError> {
        let label = self.cursor.expect_word()?.to_owned();
        self.cursor.expect_sign(b':')?;
        if !self.cursor.take_word(".branchtargets") {
            let pc = self.builder.code.instructions.len() as u32;
            if self.scopes[self.scope]
                .labels
                .insert(label.clone(), pc)
                .is_some()
            {
                return self.cursor.error(format!("label '{label}' occurs twice"));
            }
            return Ok(());
        }
        let table = self.builder.code.branch_tables.len();
        self.tables.insert((self.scope, label), table);
        let mut count = 0;
        loop {
            let target = self.cursor.expect_word()?.to_owned();
            let place = FixupPlace::Table(table, count);
            let line = self.cursor.line();
            self.fixups.push(Fixup {
                place,
                scope: self.scope,
                label: target,
                line,
            });
            count += 1;
            if !self.cursor.take_sign(b',') {
                break;
            }
        }
        self.builder.code.branch_tables.push(vec![0; count]);
        self.cursor.expect_sign(b';')
    }

    fn decode_directive(&mut self) -> Result<(), ParseError> {
        let word = self.cursor.expect_word()?;
        match word {
            ".reg" => {
                let class = self.cursor.expect_type()?.class();
                loop {
                    self.declare_register(class)?;
                    if !self.cursor.take_sign(b',') {
                        break;
                    }
                }
                self.cursor.expect_sign(b';')
            }
            ".local" | ".param" => {
                let variable = self.cursor.expect_declaration()?;
                let start = self.next.local.next_multiple_of(variable.alignment.max(1));
                if variable.is_dynamic || start.saturating_add(variable.bytes) > MAX_LOCAL {
                    return self
                        .cursor
                        .error(format!("'{}' is too large", variable.name));
                }
                self.next.local = start + variable.bytes;
                self.decoded.end = self.decoded.end.max(self.next);
                let symbol = PtxSymbol::Local(start as u32);
                self.sizes_insert(&variable, symbol);
                self.cursor.expect_sign(b';')
            }
            ".shared" => {
                let variable = self.cursor.expect_declaration()?;
                let symbol = PtxSymbol::Shared(self.builder.code.shared.len() as u32);
                self.name(&variable.name, Name::Symbol(symbol));
                self.builder.code.shared.push(variable);
                self.cursor.expect_sign(b';')
            }
            ".pragma" => {
                self.cursor.at += 1;
                self.cursor.expect_sign(b';')
            }
            ".loc" => {
                self.cursor.at -= 1;
                self.cursor.skip_line();
                Ok(())
            }
            _ => {
                self.cursor.at -= 1;
                self.cursor
                    .error(format!("directive '{word}' is not supported"))
            }
        }
    }

    fn sizes_insert(&mut self, variable: &Variable, symbol: PtxSymbol) {
        self.name(&variable.name, Name::Symbol(symbol));
        // Calls need the sizes of their parameters.
        let size = PtxSymbol::Local(variable.bytes as u32);
        self.name(&format!("{}#bytes", variable.name), Name::Symbol(size));
    }

    fn declare_register(&mut self, class: Class) -> Result<(), ParseError> {
        let name = self.cursor.expect_word()?;
        if self.cursor.take_sign(b'<') {
            let count = self.cursor.expect_integer()?.min(1 << 20) as usize;
            self.cursor.expect_sign(b'>')?;
            let (class, first) = self.reserve(class, count)?;
            self.name(
                name,
                Name::Set {
                    class,
                    first,
                    count,
                },
            );
        } else {
            let (class, register) = self.reserve(class, 1)?;
            self.name(name, Name::Register(class, register));
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<Name> {
        let mut scope = self.scope;
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[prefix.len()..].parse::<usize>().ok();
        loop {
            let names = &self.scopes[scope].names;
            if let Some(&found) = names.get(name)
                && !matches!(found, Name::Set { .. })
            {
                return Some(found);
            }
            if let (
                Some(number),
                Some(&Name::Set {
                    class,
                    first,
                    count,
                }),
            ) = (number, names.get(prefix))
                && number < count
            {
                return Some(Name::Register(class, first + number as Register));
            }
            if scope == 0 {
                return self.builder.globals.get(name).map(|&s| Name::Symbol(s));
            }
            scope = self.scopes[scope].parent;
        }
    }

    fn decode_instruction(&mut self) -> Result<(), ParseError> {
        let (first, start) = match self.cursor.peek() {
            Some(token) => (token, token.start),
            None => return self.cursor.error("unexpected end"),
        };
        let (mut guard, mut negates) = (TRUE, false);
        if self.cursor.take_sign(b'@') {
            negates = self.cursor.take_sign(b'!');
            let name = self.cursor.expect_word()?;
            guard = match self.find(name) {
                Some(Name::Register(Class::Pred, p)) => p,
                _ => return self.cursor.error(format!("'{name}' is no predicate")),
            };
        }
        let word = self.cursor.expect_word()?;
        let mut mnemonic = Mnemonic::new(word, first.line);
        let action = if mnemonic.base == "call" {
            self.decode_call(&mut mnemonic)?
        } else {
            let operands = self.operands()?;
            decode(self, &mut mnemonic, &operands)?
        };
        self.cursor.expect_sign(b';').map_err(|e| ParseError {
            line: first.line as usize,
            ..e
        })?;
        let end = self.cursor.tokens[self.cursor.at - 1].end;
        let location = Location {
            line: first.line,
            start,
            end,
        };
        self.push(
            Instruction {
                guard,
                negates,
                action,
            },
            location,
        );
        if let Action::Call { call } = action {
            let action = Action::TakeResults { call };
            self.push(
                Instruction {
                    guard,
                    negates,
                    action,
                },
                location,
            );
        }
        Ok(())
    }

    fn call_parameter(&mut self) -> Result<[u32; 2], ParseError> {
        let name = self.cursor.expect_word()?;
        let size = self.find(&format!("{name}#bytes"));
        match (self.find(name), size) {
            (
                Some(Name::Symbol(PtxSymbol::Local(address))),
                Some(Name::Symbol(PtxSymbol::Local(bytes))),
            ) => Ok([address, bytes]),
            _ => self
                .cursor
                .error(format!("'{name}' is no parameter of a call")),
        }
    }

    fn call_parameters(&mut self) -> Result<Vec<[u32; 2]>, ParseError> {
        let mut list = Vec::new();
        self.cursor.expect_sign(b'(')?;
        while !self.cursor.take_sign(b')') {
            if !list.is_empty() {
                self.cursor.expect_sign(b',')?;
            }
            list.push(self.call_parameter()?);
        }
        Ok(list)
    }

    fn decode_call(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<Action, ParseError> {
        mnemonic.take("uni");
        mnemonic.finish()?;
        let results = if self.cursor.is_sign(b'(') {
            self.call_parameters()?
        } else {
            Vec::new()
        };
        if !results.is_empty() {
            self.cursor.expect_sign(b',')?;
        }
        let name = self.cursor.expect_word()?;
        let Some(function) = self
            .builder
            .functions
            .iter()
            .position(|f| f.name == name && !f.is_kernel)
        else {
            return self.cursor.error(format!("'{name}' is no function"));
        };
        let arguments = if self.cursor.take_sign(b',') {
            self.call_parameters()?
        } else {
            Vec::new()
        };
        let call = self.builder.calls.len() as u32;
        self.builder
            .calls
            .push((function, mnemonic.line, arguments, results));
        Ok(Action::Call { call })
    }

    fn resolve_labels(&mut self) -> Result<(), ParseError> {
        for fixup in std::mem::take(&mut self.fixups) {
            let is_table = matches!(fixup.place, FixupPlace::Indexed(_));
            let mut scope = fixup.scope;
            let found = loop {
                let found = if is_table {
                    self.tables
                        .get(&(scope, fixup.label.clone()))
                        .map(|&t| t as u32)
                } else {
                    self.scopes[scope].labels.get(&fixup.label).copied()
                };
                if found.is_some() || scope == 0 {
                    break found;
                }
                scope = self.scopes[scope].parent;
            };
            let Some(found) = found else {
                let message = format!("label '{}' does not exist", fixup.label);
                return Err(ParseError::new(fixup.line, message));
            };
            match fixup.place {
                FixupPlace::Table(table, index) => {
                    self.builder.code.branch_tables[table][index] = found;
                }
                FixupPlace::Branch(pc) | FixupPlace::Indexed(pc) => {
                    match &mut self.builder.code.instructions[pc].action {
                        Action::Branch { target } => *target = found,
                        Action::BranchIndexed { table, .. } => *table = found,
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Notes that the next instruction branches to `label`.
    pub(crate) fn branch_to(&mut self, label: &str, is_table: bool) {
        let pc = self.builder.code.instructions.len();
        let place = if is_table {
            FixupPlace::Indexed(pc)
        } else {
            FixupPlace::Branch(pc)
        };
        let line = self.cursor.line();
        self.fixups.push(Fixup {
            place,
            scope: self.scope,
            label: label.to_owned(),
            line,
        });
    }
}
