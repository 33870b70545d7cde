//! Decodes all functions and places their registers and local memory.
//!
//! There is no recursion, so each function has fixed registers and a fixed place in local memory,
//! behind those of its callers. A call then costs no more than a branch.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::body::{CodeBuilder, Frame, decode_body};
use super::instruction::{CONSTANT_PREDICATES, SPECIAL_REGISTERS};
use super::lexer::{Literal, TokenKind, parse_number, tokenize};
use super::parse::{Cursor, PtxFunction, parse_declarations};
use super::{Code, KernelLayout, ParseError, Variable};

/// Constants that the decoder adds to those of the text.
const EXTRA_CONSTANTS: usize = 16;

/// Result of decoding a function.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    pub(crate) entry: u32,
    /// Place of the function's registers and memory.
    pub(crate) start: Frame,
    pub(crate) end: Frame,
    pub(crate) constants32: HashSet<u16>,
    pub(crate) constants64: HashSet<u16>,
    pub(crate) shared: BTreeSet<u32>,
}

/// Parses `text` and returns its code, with the layout of each kernel.
pub(crate) fn build(text: &str) -> Result<(Code, Vec<(String, KernelLayout)>), ParseError> {
    let tokens = tokenize(text)?;
    let mut cursor = Cursor {
        text,
        tokens: &tokens,
        at: 0,
    };
    let declarations = parse_declarations(&mut cursor)?;
    let functions = declarations.functions;
    let callees = callees(&cursor, &functions);
    let order = order(&functions, &callees)?;

    let constants = constant_count(&cursor);
    let first = Frame {
        r32: SPECIAL_REGISTERS.len() + constants,
        r64: constants,
        predicates: CONSTANT_PREDICATES,
        local: 0,
    };
    for global in &declarations.globals {
        let known = |name: &str| declarations.globals.iter().any(|g| g.name == name);
        if let Some((_, name, _)) = global.relocations.iter().find(|(_, n, _)| !known(n)) {
            let message = format!(
                "'{}' has the address of '{name}', which is no variable",
                global.name
            );
            return Err(ParseError::new(0, message));
        }
    }
    let code = Code {
        text: text.to_owned(),
        globals: declarations.globals,
        shared: declarations.shared,
        ..Code::default()
    };
    let mut builder = CodeBuilder::new(code, &functions);
    let mut starts = vec![first; functions.len()];
    let mut decoded: Vec<Decoded> = functions.iter().map(|_| Decoded::default()).collect();
    for &index in &order {
        let function = &functions[index];
        if function.body.is_none() {
            continue;
        }
        decoded[index] = decode_body(&mut builder, cursor, index, starts[index])?;
        for &callee in &callees[index] {
            starts[callee] = starts[callee].max(decoded[index].end);
        }
    }
    builder.resolve_calls(&decoded)?;

    let mut layouts = Vec::new();
    for (index, function) in functions.iter().enumerate() {
        if function.is_kernel && function.body.is_some() {
            let layout = layout(
                &builder,
                function,
                &reachable(index, &callees),
                &decoded,
                index,
            )?;
            layouts.push((function.name.clone(), layout));
        }
    }
    Ok((builder.code, layouts))
}

/// Returns the functions that each function mentions.
fn callees(cursor: &Cursor<'_>, functions: &[PtxFunction]) -> Vec<Vec<usize>> {
    let names: HashMap<&str, usize> = functions
        .iter()
        .enumerate()
        .map(|(i, f)| (f.name.as_str(), i))
        .collect();
    functions
        .iter()
        .map(|function| {
            let body = function.body.clone().unwrap_or_default();
            let words = cursor.tokens[body]
                .iter()
                .filter(|t| t.kind == TokenKind::Word);
            let found: BTreeSet<usize> = words
                .filter_map(|&t| names.get(cursor.word_of(t)).copied())
                .collect();
            found.into_iter().collect()
        })
        .collect()
}

/// Orders functions so that callers precede those that they call.
fn order(functions: &[PtxFunction], callees: &[Vec<usize>]) -> Result<Vec<usize>, ParseError> {
    let mut callers = vec![0usize; functions.len()];
    for &callee in callees.iter().flatten() {
        callers[callee] += 1;
    }
    let mut ready: Vec<usize> = (0..functions.len())
        .rev()
        .filter(|&f| callers[f] == 0)
        .collect();
    let mut order = Vec::with_capacity(functions.len());
    while let Some(function) = ready.pop() {
        order.push(function);
        for &callee in &callees[function] {
            callers[callee] -= 1;
            if callers[callee] == 0 {
                ready.push(callee);
            }
        }
    }
    match callers.iter().position(|&n| n > 0) {
        None => Ok(order),
        Some(function) => {
            let function = &functions[function];
            let message = format!(
                "function '{}' is recursive, or called by one",
                function.name
            );
            Err(ParseError::new(function.line, message))
        }
    }
}

fn reachable(function: usize, callees: &[Vec<usize>]) -> BTreeSet<usize> {
    let mut found = BTreeSet::from([function]);
    let mut open = vec![function];
    while let Some(function) = open.pop() {
        open.extend(
            callees[function]
                .iter()
                .filter(|&&callee| found.insert(callee)),
        );
    }
    found
}

/// Returns an upper bound of the number of constants, of each size.
fn constant_count(cursor: &Cursor<'_>) -> usize {
    let mut numbers = HashSet::new();
    let mut words = HashSet::new();
    for &token in cursor.tokens {
        let text = cursor.word_of(token);
        match token.kind {
            TokenKind::Number => {
                if let Some(number) = parse_number(text) {
                    numbers.insert(match number {
                        Literal::Integer(v) => (0, v),
                        Literal::Single(v) => (1, u64::from(v)),
                        Literal::Double(v) => (2, v),
                    });
                }
            }
            // Symbols. Each occurrence with an offset may differ.
            TokenKind::Word if !text.starts_with(['%', '.', '$']) && !text.contains('.') => {
                let next = cursor.text.as_bytes().get(token.end as usize);
                words.insert((text, if next == Some(&b'+') { token.start } else { 0 }));
            }
            _ => {}
        }
    }
    // A number may occur with both signs and, cut to 16 bits, as another value.
    4 * numbers.len() + words.len() + EXTRA_CONSTANTS
}

fn layout(
    builder: &CodeBuilder<'_>,
    function: &PtxFunction,
    reachable: &BTreeSet<usize>,
    decoded: &[Decoded],
    index: usize,
) -> Result<KernelLayout, ParseError> {
    let mut end = decoded[index].end;
    let mut shared = BTreeSet::new();
    let (mut constants32, mut constants64) = (BTreeSet::new(), BTreeSet::new());
    for &f in reachable {
        end = end.max(decoded[f].end);
        shared.extend(&decoded[f].shared);
        constants32.extend(&decoded[f].constants32);
        constants64.extend(&decoded[f].constants64);
    }
    let (parameters, parameter_bytes) = place(&function.parameters);
    let mut layout = KernelLayout {
        entry: decoded[index].entry,
        parameters,
        parameter_bytes,
        local_bytes: end.local.next_multiple_of(16),
        count32: end.r32,
        count64: end.r64,
        predicates: end.predicates,
        max_threads: function.max_threads,
        ..KernelLayout::default()
    };
    for (set, wide) in [(&constants32, false), (&constants64, true)] {
        let all = set
            .iter()
            .filter_map(|&r| Some((r, builder.constant(r, wide)?)))
            .collect();
        *(if wide {
            &mut layout.constants64
        } else {
            &mut layout.constants32
        }) = all;
    }
    let mut offset = 0usize;
    for &variable in &shared {
        let declaration = &builder.code.shared[variable as usize];
        if !declaration.is_dynamic {
            offset = offset.next_multiple_of(declaration.alignment.max(1));
            layout.shared_offsets.insert(variable, offset as u32);
            offset += declaration.bytes;
        }
    }
    if offset > 1 << 20 {
        let message = format!("kernel '{}' has too much shared memory", function.name);
        return Err(ParseError::new(function.line, message));
    }
    layout.static_shared_bytes = offset;
    for &variable in &shared {
        let declaration = &builder.code.shared[variable as usize];
        if declaration.is_dynamic {
            let start = offset.next_multiple_of(declaration.alignment.max(16));
            layout.shared_offsets.insert(variable, start as u32);
            layout.static_shared_bytes = start;
        }
    }
    Ok(layout)
}

/// Returns the offset and size of each of some parameters, and the size of all.
pub(crate) fn place(parameters: &[Variable]) -> (Vec<(usize, usize)>, usize) {
    let mut offset = 0usize;
    let places = parameters
        .iter()
        .map(|p| {
            let start = offset.next_multiple_of(p.alignment.max(1));
            offset = start + p.bytes;
            (start, p.bytes)
        })
        .collect();
    (places, offset)
}
