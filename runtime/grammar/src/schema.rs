//! Enforced subset of JSON Schema.
//!
//! The engine's compiler takes the schema. Before that, this module rejects everything that the
//! engine would not enforce, with its location, and rewrites references to the form that the engine
//! reads.

use crate::error::{GrammarError, Result};
use crate::grammar::start;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Number, Value, json};
use std::collections::{BTreeMap, BTreeSet};

const MAX_BYTES: usize = 1 << 20;
/// Maximum nesting of schemas.
const DEEPEST: usize = 64;
/// Maximum number of values that replace references.
const MAX_INLINED: usize = 100_000;
/// Limits on the search for the part at fault: trials, and the parts that the engine makes in them.
const MAX_TRIALS: usize = 100;
const MAX_TRIED_PARTS: usize = 500_000;
/// Most parts that the engine makes of a schema, and its message beyond that.
const MAX_PARTS: usize = 50_000;
const TOO_LARGE: &str = "schema too large";
/// Largest integer of a schema without bounds. It has as many digits as a 64-bit integer, and F64
/// represents it exactly.
const MAX_INTEGER: i64 = 9_000_000_000_000_000_000;
/// White space between two tokens of JSON: a space, or newlines with indentation.
pub(crate) const WHITE_SPACE: &str = r"\x20|\n{1,2}[\x20\t]{0,20}";

/// Keywords that constrain values and are not enforced.
const REFUSED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "contentSchema",
];

/// Returns whether a keyword that is not enforced has no effect here.
fn says_nothing(schema: &Map<String, Value>, keyword: &str, value: &Value) -> bool {
    let has = |keyword: &str| schema.contains_key(keyword);
    match keyword {
        "uniqueItems" | "not" => *value == Value::Bool(false),
        "unevaluatedItems" | "unevaluatedProperties" | "propertyNames" => {
            *value == Value::Bool(true)
        }
        "then" | "else" => !has("if"),
        "minContains" | "maxContains" => !has("contains"),
        _ => false,
    }
}

/// Returns the number of keywords that apply more schemas to the same value.
pub fn combiners(schema: &Map<String, Value>) -> usize {
    const COMBINERS: [&str; 7] = [
        "$ref",
        "$dynamicRef",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
        "dependentSchemas",
    ];
    let found = COMBINERS.iter().filter(|word| schema.contains_key(**word));
    found.count()
}

/// Returns the keyword that replaces an `unevaluated…` keyword if no other schemas apply to the
/// same value.
fn instead(schema: &Map<String, Value>, keyword: &str) -> Option<&'static str> {
    let is_alone = combiners(schema) == 0;
    match keyword {
        "unevaluatedItems" if is_alone => Some("items"),
        "unevaluatedProperties" if is_alone => Some("additionalProperties"),
        _ => None,
    }
}

/// Valid dates: February 29th only in leap years.
const DATE: &str = "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))\
     |([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)";
/// Times of day with a time zone. Leap seconds, which are possible in few minutes only, are left
/// out.
const TIME: &str = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";

/// Formats that are enforced. Others are annotations, as the standard allows.
const FORMATS: &[&str] = &[
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Returns extra constraints for a format for which the engine's expression is too permissive. The
/// flag is set if they replace the format.
fn more_about(format: &str) -> Option<(Value, bool)> {
    Some(match format {
        "date" => (json!({ "pattern": format!("^{DATE}$") }), true),
        "time" => (json!({ "pattern": format!("^{TIME}$") }), true),
        "date-time" => (json!({ "pattern": format!("^{DATE}[tT]{TIME}$") }), true),
        // Maximum length of names and their parts.
        "email" => {
            let parts = "^[^@]{1,64}@[^.]{1,63}([.][^.]{1,63})*$";
            (json!({ "pattern": parts, "maxLength": 254 }), false)
        }
        "hostname" => (json!({ "maxLength": 253 }), false),
        _ => return None,
    })
}

/// Keywords whose values are not schemas.
const WITH_VALUES: &[&str] = &["const", "enum", "default", "examples"];
/// Keywords with a schema, with a list of schemas, and with schemas by name.
const WITH_ONE: &[&str] = &["additionalProperties", "additionalItems", "items"];
const WITH_LIST: &[&str] = &["anyOf", "oneOf", "allOf", "prefixItems", "items"];
const WITH_MAP: &[&str] = &["properties", "patternProperties"];
/// Keywords whose members are names, not keywords.
const HAVE_NAMES: &[&str] = &[
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
];

/// Keywords whose values only describe a schema.
const ANNOTATIONS: &[&str] = &["default", "examples"];

/// Rejects numbers that the engine cannot enforce. It negates bounds, and would overflow the stack
/// for numbers that have no negation. It computes in F64, and would round others.
pub fn check_numbers(schema: &Value, pointer: &str) -> Result<()> {
    check_part(schema, pointer, false)
}

/// Checks a part of a schema. With `schemas_by_name`, the members are names, not keywords.
fn check_part(schema: &Value, pointer: &str, schemas_by_name: bool) -> Result<()> {
    const LEAST: f64 = i64::MIN as f64;
    match schema {
        Value::Number(number) if number.as_f64().is_some_and(|number| number <= LEAST) => {
            let message = format!("{number} is too small: numbers above -2^63 can be enforced");
            Err(refuse(pointer, message))
        }
        Value::Number(number) if is_rounded(number) => {
            let message =
                format!("{number} would be rounded: use a number up to 2^53, or a string");
            Err(refuse(pointer, message))
        }
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.try_for_each(|(at, item)| check_part(item, &format!("{pointer}/{at}"), false))
        }
        Value::Object(members) => members.iter().try_for_each(|(name, member)| {
            if !schemas_by_name && ANNOTATIONS.contains(&&**name) {
                return Ok(());
            }
            let is_map = !schemas_by_name && HAVE_NAMES.contains(&&**name);
            check_part(member, &join(pointer, name), is_map)
        }),
        _ => Ok(()),
    }
}

/// Returns whether F64 cannot represent an integer exactly.
fn is_rounded(number: &Number) -> bool {
    let exact = |number: i128| number as f64 as i128 == number;
    let number = number
        .as_i64()
        .map(i128::from)
        .or(number.as_u64().map(i128::from));
    number.is_some_and(|number| !exact(number))
}

/// Bounds integers that have no bounds, and lowers larger bounds: otherwise, a model may generate
/// digits without end.
pub fn bound_integers(schema: &mut Value) {
    bound_part(schema, false, 0);
}

fn bound_part(value: &mut Value, schemas_by_name: bool, depth: usize) {
    if depth > 4 * DEEPEST {
        return;
    }
    match value {
        Value::Object(map) => {
            if !schemas_by_name && is_integer(map) {
                bound(map);
            }
            for (key, value) in map.iter_mut() {
                let is_keyword = !schemas_by_name;
                if !(is_keyword && WITH_VALUES.contains(&&**key)) {
                    let is_map = is_keyword && HAVE_NAMES.contains(&&**key);
                    bound_part(value, is_map, depth + 1);
                }
            }
        }
        Value::Array(list) => {
            list.iter_mut()
                .for_each(|value| bound_part(value, false, depth + 1));
        }
        _ => {}
    }
}

/// Returns whether a schema describes integers that are not listed.
fn is_integer(schema: &Map<String, Value>) -> bool {
    let is_listed = schema.contains_key("const") || schema.contains_key("enum");
    let kinds = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.as_slice(),
        Some(kind) => std::slice::from_ref(kind),
        None => &[],
    };
    let has = |name: &str| kinds.iter().any(|kind| kind == name);
    !is_listed && has("integer") && !has("number")
}

/// Bounds an integer, unless no number would remain.
fn bound(schema: &mut Map<String, Value>) {
    const MAX: f64 = MAX_INTEGER as f64;
    let number = |schema: &Map<String, Value>, keyword: &str| schema.get(keyword)?.as_f64();
    let lowest = number(schema, "minimum").or(number(schema, "exclusiveMinimum"));
    let highest = number(schema, "maximum").or(number(schema, "exclusiveMaximum"));
    if lowest.is_some_and(|lowest| lowest > MAX) || highest.is_some_and(|highest| highest < -MAX) {
        return;
    }
    if lowest.is_none_or(|lowest| lowest < -MAX) {
        schema.remove("exclusiveMinimum");
        schema.insert("minimum".to_owned(), (-MAX_INTEGER).into());
    }
    if highest.is_none_or(|highest| highest > MAX) {
        schema.remove("exclusiveMaximum");
        schema.insert("maximum".to_owned(), MAX_INTEGER.into());
    }
}

/// Returns the schema in the engine's form. The engine may still reject parts that contradict each
/// other.
pub fn prepare(text: &str) -> Result<Value> {
    if text.len() > MAX_BYTES {
        let message = format!(
            "the schema has {} bytes; {MAX_BYTES} are allowed",
            text.len()
        );
        return Err(GrammarError::TooLarge(message));
    }
    let mut root: Value = serde_json::from_str(text)
        .map_err(|error| refuse("#", format!("this is no JSON: {error}")))?;
    bound_integers(&mut root);
    check_numbers(&root, "#")?;
    let mut walk = Walk {
        root: &root,
        aliases: BTreeMap::new(),
        seen: BTreeSet::new(),
        todo: vec![("#".to_owned(), 0)],
    };
    while let Some((pointer, depth)) = walk.todo.pop() {
        walk.check(&pointer, depth)?;
    }
    let aliases = walk.aliases;
    let mut schema = match root.clone() {
        Value::Object(_) => root.clone(),
        _ => json!({ "allOf": [root.clone()] }),
    };
    rewrite(&mut schema, &aliases, 0);
    add_targets(&mut schema, &aliases);
    let with_references = schema.clone();
    let mut inline = Inline {
        root: &with_references,
        left: MAX_INLINED,
    };
    inline.options(&mut schema, 0)?;
    // The engine treats an unknown `$schema` as the newest draft.
    schema
        .as_object_mut()
        .map(|schema| schema.remove("$schema"));
    set_options(&mut schema);
    Ok(schema)
}

/// Returns the error for a schema that the engine rejects, with the location. `message` is the
/// engine's.
pub fn refusal(factory: &ParserFactory, schema: &Value, message: String) -> GrammarError {
    let mut trials = Trials {
        left: MAX_TRIALS,
        parts_left: MAX_TRIED_PARTS,
    };
    trials.locate(factory, schema, "#", schema, message)
}

/// Returns the error for an invalid part.
pub fn refuse(pointer: &str, message: impl Into<String>) -> GrammarError {
    GrammarError::Schema {
        pointer: pointer.to_owned(),
        message: message.into(),
    }
}

/// Appends a part to a pointer.
fn join(pointer: &str, part: &str) -> String {
    format!("{pointer}/{}", part.replace('~', "~0").replace('/', "~1"))
}

/// Returns the value that a pointer in a fragment refers to.
fn find<'v>(root: &'v Value, pointer: &str) -> Option<&'v Value> {
    root.pointer(pointer.strip_prefix('#')?)
}

/// Visits all schemas that are used.
struct Walk<'v> {
    root: &'v Value,
    /// Pointers by references that the engine cannot read.
    aliases: BTreeMap<String, String>,
    seen: BTreeSet<String>,
    /// Pointers to schemas, and their nesting depth.
    todo: Vec<(String, usize)>,
}

impl Walk<'_> {
    fn check(&mut self, pointer: &str, depth: usize) -> Result<()> {
        if !self.seen.insert(pointer.to_owned()) {
            return Ok(());
        }
        if depth > DEEPEST {
            return Err(refuse(
                pointer,
                format!("more than {DEEPEST} schemas in each other"),
            ));
        }
        let schema = match find(self.root, pointer) {
            Some(Value::Object(schema)) => schema,
            Some(Value::Bool(_)) => return Ok(()),
            _ => return Err(refuse(pointer, "must be an object or a boolean")),
        };
        for (keyword, value) in schema {
            let place = join(pointer, keyword);
            let is_refused = REFUSED.contains(&&**keyword) && !says_nothing(schema, keyword, value);
            if is_refused && instead(schema, keyword).is_none() {
                return Err(refuse(
                    &place,
                    format!("the keyword '{keyword}' is not enforced"),
                ));
            }
            if keyword == "minProperties" {
                // The engine counts a repeated name as two.
                let required = schema.get("required").and_then(Value::as_array);
                let most = required.map_or(0, Vec::len) as u64 + 1;
                if value.as_u64().is_some_and(|least| least > most) {
                    let message = "more than one beside what is required is not enforced";
                    return Err(refuse(&place, message));
                }
            }
            if keyword == "$ref" {
                self.reference(&place, value, depth)?;
            }
            let keyword = instead(schema, keyword).unwrap_or(keyword);
            self.parts(&place, keyword, value, depth + 1)?;
        }
        Ok(())
    }

    fn parts(&mut self, place: &str, keyword: &str, value: &Value, depth: usize) -> Result<()> {
        match value {
            Value::Array(list) if WITH_LIST.contains(&keyword) => {
                let places = (0..list.len()).map(|index| format!("{place}/{index}"));
                self.todo.extend(places.map(|place| (place, depth)));
            }
            _ if WITH_ONE.contains(&keyword) => self.todo.push((place.to_owned(), depth)),
            _ if WITH_LIST.contains(&keyword) => {
                return Err(refuse(place, "must be an array of schemas"));
            }
            Value::Object(map) if WITH_MAP.contains(&keyword) => {
                let places = map.keys().map(|name| join(place, name));
                self.todo.extend(places.map(|place| (place, depth)));
            }
            _ if WITH_MAP.contains(&keyword) => {
                return Err(refuse(place, "must be an object of schemas"));
            }
            _ => {}
        }
        Ok(())
    }

    fn reference(&mut self, place: &str, value: &Value, depth: usize) -> Result<()> {
        let Some(reference) = value.as_str() else {
            return Err(refuse(place, "must be a string"));
        };
        let Some(fragment) = reference.strip_prefix('#') else {
            let message =
                format!("'{reference}' is outside of this schema, and nothing is fetched");
            return Err(refuse(place, message));
        };
        let target = match fragment {
            "" | "/" => Some("#".to_owned()),
            _ if fragment.starts_with('/') => unescaped(fragment).map(|path| format!("#{path}")),
            anchor => find_anchor(self.root, anchor, "#", 0),
        };
        let target = target.filter(|target| find(self.root, target).is_some());
        let Some(target) = target else {
            return Err(refuse(place, format!("'{reference}' refers to nothing")));
        };
        if target != reference || target.contains('~') {
            self.aliases.insert(reference.to_owned(), target.clone());
        }
        // References may form cycles, but do not increase the depth.
        self.todo.push((target, depth));
        Ok(())
    }
}

/// Decodes percent escapes in a fragment.
fn unescaped(fragment: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = fragment.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Returns the pointer to the schema with this anchor.
fn find_anchor(value: &Value, anchor: &str, pointer: &str, depth: usize) -> Option<String> {
    if depth > 2 * DEEPEST {
        return None;
    }
    match value {
        Value::Object(map) => {
            if map.get("$anchor").and_then(Value::as_str) == Some(anchor) {
                return Some(pointer.to_owned());
            }
            map.iter()
                .find_map(|(key, part)| find_anchor(part, anchor, &join(pointer, key), depth + 1))
        }
        Value::Array(list) => list.iter().enumerate().find_map(|(index, part)| {
            find_anchor(part, anchor, &format!("{pointer}/{index}"), depth + 1)
        }),
        _ => None,
    }
}

/// Converts a regular expression from JavaScript's dialect, which JSON Schema uses, to the
/// engine's: `.` excludes more line ends, and `\s` matches other white space.
fn in_rust(pattern: &str) -> String {
    const SPACE: &str =
        r"\t\n\x0B\x0C\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF";
    let mut text = String::new();
    let mut in_class = false;
    let mut rest = pattern.chars();
    while let Some(c) = rest.next() {
        match c {
            '\\' => match rest.next() {
                Some('s') if in_class => text.push_str(SPACE),
                Some('s') => text.push_str(&format!("[{SPACE}]")),
                Some('S') if !in_class => text.push_str(&format!("[^{SPACE}]")),
                escaped => text.extend(['\\'].into_iter().chain(escaped)),
            },
            '.' if !in_class => text.push_str(r"[^\n\r\u2028\u2029]"),
            _ => {
                in_class = c == '[' || (in_class && c != ']');
                text.push(c);
            }
        }
    }
    text
}

fn alias_name(aliases: &BTreeMap<String, String>, reference: &str) -> Option<String> {
    let number = aliases.keys().position(|other| other == reference)?;
    Some(format!("samite-{number}"))
}

/// Rewrites references and formats to the engine's form. Removes the engine's own keyword and
/// keywords without effect.
fn rewrite(value: &mut Value, aliases: &BTreeMap<String, String>, depth: usize) {
    if depth > 4 * DEEPEST {
        return;
    }
    match value {
        Value::Object(map) => {
            map.remove("x-guidance");
            let schema = map.clone();
            map.retain(|key, value| !says_nothing(&schema, key, value));
            for (keyword, value) in &schema {
                if let Some(other) = instead(&schema, keyword) {
                    map.remove(keyword);
                    // The other keyword already covers everything, so nothing is unevaluated.
                    map.entry(other).or_insert_with(|| value.clone());
                }
            }
            let format = map.get("format").and_then(Value::as_str);
            if format.is_some_and(|format| !FORMATS.contains(&format)) {
                map.remove("format");
            }
            let format = map.get("format").and_then(Value::as_str);
            if let Some((more, is_all)) = format.and_then(more_about) {
                if is_all {
                    map.remove("format");
                }
                let all = map.entry("allOf").or_insert_with(|| json!([]));
                if let Value::Array(all) = all {
                    all.push(more);
                }
            }
            if let Some(Value::String(pattern)) = map.get_mut("pattern") {
                *pattern = in_rust(pattern);
            }
            if let Some(Value::Object(patterns)) = map.get_mut("patternProperties") {
                let old = std::mem::take(patterns);
                patterns.extend(old.into_iter().map(|(key, value)| (in_rust(&key), value)));
            }
            if let Some(Value::String(reference)) = map.get_mut("$ref")
                && let Some(name) = alias_name(aliases, reference)
            {
                *reference = match &*aliases[&*reference] {
                    "#" => "#".to_owned(),
                    _ => format!("#/$defs/{name}"),
                };
            }
            for (key, value) in map.iter_mut() {
                // Values are not schemas.
                if !WITH_VALUES.contains(&&**key) {
                    rewrite(value, aliases, depth + 1);
                }
            }
        }
        Value::Array(list) => {
            for value in list {
                rewrite(value, aliases, depth + 1);
            }
        }
        _ => {}
    }
}

/// Adds the targets of rewritten references.
fn add_targets(schema: &mut Value, aliases: &BTreeMap<String, String>) {
    let targets: Vec<(String, Value)> = aliases
        .iter()
        .filter(|(_, target)| *target != "#")
        .filter_map(|(reference, target)| {
            let target = find(schema, target)?.clone();
            Some((alias_name(aliases, reference)?, target))
        })
        .collect();
    if let (Value::Object(map), false) = (schema, targets.is_empty()) {
        let definitions = map.entry("$defs").or_insert_with(|| json!({}));
        if let Value::Object(definitions) = definitions {
            definitions.extend(targets);
        }
    }
}

/// Inlines the references in alternatives of `oneOf`: the engine does not follow references to see
/// that alternatives exclude each other.
struct Inline<'v> {
    root: &'v Value,
    /// Number of values that may still be inlined.
    left: usize,
}

impl Inline<'_> {
    fn options(&mut self, value: &mut Value, depth: usize) -> Result<()> {
        if depth > 2 * DEEPEST {
            return Ok(());
        }
        match value {
            Value::Object(map) => {
                for (key, value) in map.iter_mut() {
                    // Values are not schemas.
                    if !WITH_VALUES.contains(&&**key) {
                        self.options(value, depth + 1)?;
                    }
                }
                self.one_of(map, depth)
            }
            Value::Array(list) => list
                .iter_mut()
                .try_for_each(|value| self.options(value, depth + 1)),
            _ => Ok(()),
        }
    }

    fn one_of(&mut self, schema: &mut Map<String, Value>, depth: usize) -> Result<()> {
        let Some(Value::Array(options)) = schema.get_mut("oneOf") else {
            return Ok(());
        };
        for option in options.iter_mut() {
            let reference = option.as_object().filter(|option| option.len() == 1);
            let reference = reference.and_then(|option| option.get("$ref")?.as_str());
            let target =
                reference.and_then(|reference| Some((reference, find(self.root, reference)?)));
            if let Some((reference, target)) = target
                && depth <= 2 * DEEPEST
            {
                let mut target = self.shallow(reference, target)?;
                if let Value::Object(map) = &mut target {
                    self.one_of(map, depth + 1)?;
                }
                *option = target;
            }
        }
        // The engine tells strings apart, but not numbers.
        if differ_by_number(options) && !schema.contains_key("anyOf") {
            let options = schema.remove("oneOf").unwrap_or_default();
            schema.insert("anyOf".to_owned(), options);
        }
        Ok(())
    }

    /// Returns a copy of the value at `pointer`. In it, parts that contain `oneOf` become
    /// references to the original, so the copy is finite.
    fn shallow(&mut self, pointer: &str, target: &Value) -> Result<Value> {
        let Value::Object(map) = target else {
            return Ok(target.clone());
        };
        let mut copy = Map::new();
        // Definitions are found from the root.
        let said = map
            .iter()
            .filter(|(keyword, _)| !["$defs", "definitions"].contains(&&***keyword));
        for (keyword, value) in said {
            let place = join(pointer, keyword);
            let part = |place: String, part: &Value| match has_one_of(part) {
                true if !place.contains(['~', '%']) => json!({ "$ref": place }),
                _ => part.clone(),
            };
            let value = match value {
                Value::Array(list) if WITH_LIST.contains(&&**keyword) && keyword != "oneOf" => list
                    .iter()
                    .enumerate()
                    .map(|(index, value)| part(format!("{place}/{index}"), value))
                    .collect(),
                Value::Object(schemas) if WITH_MAP.contains(&&**keyword) => {
                    let schemas = schemas.iter();
                    let schemas = schemas
                        .map(|(name, value)| (name.clone(), part(join(&place, name), value)));
                    Value::Object(schemas.collect())
                }
                _ if WITH_ONE.contains(&&**keyword) => part(place, value),
                _ => value.clone(),
            };
            copy.insert(keyword.clone(), value);
        }
        let copy = Value::Object(copy);
        self.left = self.left.checked_sub(size(&copy)).ok_or_else(|| {
            GrammarError::TooLarge(format!(
                "the schemas that alternatives of 'oneOf' refer to have more than {MAX_INLINED} parts: use 'anyOf'"
            ))
        })?;
        Ok(copy)
    }
}

/// Returns whether `options` are objects that require a property whose constants all differ,
/// numbers among them.
fn differ_by_number(options: &[Value]) -> bool {
    let required = options.first().and_then(|option| option.get("required"));
    let names = required.and_then(Value::as_array).into_iter().flatten();
    names.filter_map(Value::as_str).any(|name| {
        let mut seen: Vec<&Value> = Vec::new();
        let is_apart = options.iter().all(|option| {
            let constants = required_constants(option, name);
            let is_new = |value: &&Value| !seen.iter().any(|other| is_same(other, value));
            let are_new = !constants.is_empty() && constants.iter().all(is_new);
            seen.extend(constants);
            are_new
        });
        is_apart && seen.iter().any(|value| value.is_number())
    })
}

/// The values that a property of an object may have, if the object requires it and they are listed.
fn required_constants<'v>(object: &'v Value, name: &str) -> Vec<&'v Value> {
    let has_name = |names: &Vec<Value>| names.iter().any(|other| other == name);
    let requires = object.get("required").and_then(Value::as_array);
    if object.get("type") != Some(&json!("object")) || !requires.is_some_and(has_name) {
        return Vec::new();
    }
    let property = object.get("properties").and_then(|all| all.get(name));
    let constant = property.and_then(|property| property.get("const"));
    let listed = property.and_then(|property| property.get("enum")?.as_array());
    constant
        .into_iter()
        .chain(listed.into_iter().flatten())
        .collect()
}

/// Returns whether JSON Schema takes two values for the same: 1 and 1.0 are.
fn is_same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn has_one_of(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.contains_key("oneOf") || map.values().any(has_one_of),
        Value::Array(list) => list.iter().any(has_one_of),
        _ => false,
    }
}

/// Returns the number of values in a value, including itself.
fn size(value: &Value) -> usize {
    1 + match value {
        Value::Object(map) => map.values().map(size).sum(),
        Value::Array(list) => list.iter().map(size).sum(),
        _ => 0,
    }
}

fn set_options(schema: &mut Value) {
    if let Value::Object(map) = schema {
        let options = json!({ "whitespace_pattern": WHITE_SPACE });
        map.insert("x-guidance".to_owned(), options);
    }
}

fn compile(factory: &ParserFactory, schema: &Value) -> Result<(), String> {
    let grammar = TopLevelGrammar::from_json_schema(schema.clone());
    start(factory, grammar).map(drop)
}

/// Estimates the parts that the engine makes of a part of a schema: its values, and once those that
/// it refers to. Alternatives within `allOf` may multiply up to the engine's limit.
fn engine_parts(root: &Value, part: &Value) -> usize {
    let (mut count, mut has_all, mut has_any) = (0, false, false);
    let (mut todo, mut references) = (vec![part], BTreeSet::new());
    while let Some(value) = todo.pop() {
        count += 1;
        match value {
            Value::Object(map) => {
                has_all |= map.contains_key("allOf");
                has_any |= map.contains_key("anyOf") || map.contains_key("oneOf");
                if let Some(Value::String(reference)) = map.get("$ref")
                    && references.insert(reference)
                {
                    todo.extend(find(root, reference));
                }
                todo.extend(map.values());
            }
            Value::Array(list) => todo.extend(list),
            _ => {}
        }
    }
    if has_all && has_any {
        count.max(MAX_PARTS)
    } else {
        count
    }
}

/// The search for the part of a schema at fault.
struct Trials {
    left: usize,
    parts_left: usize,
}

impl Trials {
    /// Returns the error for the smallest part of a schema that the engine rejects. `message` is
    /// the engine's about the part at `pointer`.
    fn locate(
        &mut self,
        factory: &ParserFactory,
        root: &Value,
        pointer: &str,
        part: &Value,
        message: String,
    ) -> GrammarError {
        // No part is at fault by itself.
        if message == TOO_LARGE {
            return refuse(pointer, in_words(&message));
        }
        let empty = Map::new();
        for (keyword, value) in part.as_object().unwrap_or(&empty) {
            let place = join(pointer, keyword);
            let parts: Vec<(String, &Value)> = match value {
                Value::Array(list) if WITH_LIST.contains(&&**keyword) => {
                    let indexed = list.iter().enumerate();
                    indexed
                        .map(|(i, part)| (format!("{place}/{i}"), part))
                        .collect()
                }
                Value::Object(map) if WITH_MAP.contains(&&**keyword) => map
                    .iter()
                    .map(|(name, part)| (join(&place, name), part))
                    .collect(),
                _ if WITH_ONE.contains(&&**keyword) => vec![(place, value)],
                Value::String(reference) if keyword == "$ref" && reference != "#" => {
                    let target = find(root, reference);
                    target
                        .map(|target| (reference.clone(), target))
                        .into_iter()
                        .collect()
                }
                _ => continue,
            };
            for (place, part) in parts {
                let parts = engine_parts(root, part);
                if self.left == 0 || self.parts_left < parts || part.is_boolean() {
                    continue;
                }
                self.left -= 1;
                self.parts_left -= parts;
                let mut alone = part.clone();
                for definitions in ["$defs", "definitions"] {
                    if let (Value::Object(map), Some(all)) = (&mut alone, root.get(definitions)) {
                        map.entry(definitions).or_insert_with(|| all.clone());
                    }
                }
                set_options(&mut alone);
                if let Err(message) = compile(factory, &alone) {
                    return self.locate(factory, root, &place, part, message);
                }
            }
        }
        refuse(pointer, in_words(&message))
    }
}

/// Converts an engine message to one that states the remedy.
fn in_words(message: &str) -> String {
    if message.contains("coerce_one_of") {
        return "the alternatives of 'oneOf' may overlap: let them differ in their types or in a required property with 'const', or use 'anyOf'"
            .to_owned();
    }
    if message == TOO_LARGE {
        return "it has too many parts: alternatives within 'allOf' multiply".to_owned();
    }
    if let Some(reason) = message.strip_prefix("Unsatisfiable schema: ") {
        return format!("no value is valid: {reason}");
    }
    message.to_owned()
}
