//! Closes the objects of a schema.

use crate::schema::combiners;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Keywords that already say which other members an object may have or needs.
const DECIDE: [&str; 4] = [
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "minProperties",
];

/// Allows objects no other members than those that their schema names, if the schema does not
/// mention others. So models invent no members. In JSON Schema, others are allowed by default; in
/// OpenAI's strict schemas and llama.cpp's grammars, they are not.
///
/// An object stays open where schemas add members to each other, as the parts of `allOf` do.
///
/// ```
/// # use serde_json::json;
/// let mut schema = json!({"type": "object", "properties": {"age": {"type": "integer"}}});
/// samite_grammar::close_objects(&mut schema);
/// assert_eq!(schema["additionalProperties"], false);
/// ```
pub fn close_objects(schema: &mut Value) {
    let mut references = References::default();
    references.collect(schema, Position::Alone);
    each_definition(schema, |target, definition| {
        references.collect(definition, Position::Definition(target));
    });
    let open = references.open();
    // A reference of another form may lead anywhere.
    if open.iter().all(|target| is_definition(target)) {
        close(schema, Position::Alone);
        each_definition(schema, |target, definition| {
            let is_open = open.contains(target);
            let position = if is_open {
                Position::Shared
            } else {
                Position::Alone
            };
            close(definition, position);
        });
    }
}

/// Visits the definitions of the whole schema, each with its reference.
fn each_definition(schema: &mut Value, mut visit: impl FnMut(&str, &mut Value)) {
    for word in DEFINITIONS {
        let definitions = schema.get_mut(word).and_then(Value::as_object_mut);
        for (name, definition) in definitions.into_iter().flatten() {
            visit(&format!("#/{word}/{name}"), definition);
        }
    }
}

/// Visits the schemas in a schema at `position`, except definitions, each with its position.
fn each_part<'a>(
    keywords: &mut Map<String, Value>,
    position: Position<'a>,
    mut visit: impl FnMut(&mut Value, Position<'a>),
) {
    let below = position.below(keywords);
    for (keyword, value) in keywords {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(schemas)) => {
                schemas
                    .values_mut()
                    .for_each(|one| visit(one, Position::Alone));
            }
            ("anyOf" | "oneOf", Value::Array(list)) => {
                list.iter_mut().for_each(|one| visit(one, below));
            }
            ("allOf", Value::Array(list)) => {
                let is_one = list.len() == 1;
                let position = if is_one { below } else { Position::Shared };
                list.iter_mut().for_each(|one| visit(one, position));
            }
            ("prefixItems" | "items", Value::Array(list)) => {
                list.iter_mut().for_each(|one| visit(one, Position::Alone));
            }
            ("items" | "additionalItems" | "additionalProperties", one) => {
                visit(one, Position::Alone);
            }
            _ => {}
        }
    }
}

/// Keywords of the definitions that references can name here.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Returns whether a reference names a definition of the whole schema.
fn is_definition(target: &str) -> bool {
    let name = DEFINITIONS.iter().find_map(|word| {
        let rest = target.strip_prefix("#/")?.strip_prefix(word)?;
        rest.strip_prefix('/')
    });
    name.is_some_and(|name| !name.contains(['/', '~', '%']))
}

/// Position of a schema.
#[derive(Clone, Copy)]
enum Position<'a> {
    /// No other schema applies to the same value.
    Alone,
    /// Others apply to the same value.
    Shared,
    /// The value is that of the definition with this reference.
    Definition(&'a str),
}

impl Position<'_> {
    /// Returns the position of the schemas that a schema at this position combines.
    fn below(self, keywords: &Map<String, Value>) -> Self {
        let others = DECIDE.iter().chain(&["properties", "required"]);
        let has_others = others.into_iter().any(|word| keywords.contains_key(*word));
        if combiners(keywords) == 1 && !has_others {
            self
        } else {
            Position::Shared
        }
    }
}

/// References of a schema.
#[derive(Default)]
struct References {
    /// Targets where other schemas apply to the same value.
    shared: BTreeSet<String>,
    /// Targets that stand for a whole definition, by its reference.
    of_definitions: BTreeMap<String, Vec<String>>,
}

impl References {
    /// Collects the references in a schema, except those in definitions of the whole schema.
    fn collect(&mut self, schema: &mut Value, position: Position<'_>) {
        let Value::Object(keywords) = schema else {
            return;
        };
        for word in ["$ref", "$dynamicRef"] {
            let Some(Value::String(target)) = keywords.get(word) else {
                continue;
            };
            match position.below(keywords) {
                Position::Alone => {}
                Position::Shared => {
                    self.shared.insert(target.clone());
                }
                Position::Definition(name) => {
                    let targets = self.of_definitions.entry(name.to_owned()).or_default();
                    targets.push(target.clone());
                }
            }
        }
        each_part(keywords, position, |part, position| {
            self.collect(part, position)
        });
    }

    /// Returns the references to schemas that others add members to.
    fn open(mut self) -> BTreeSet<String> {
        let mut waiting: Vec<String> = self.shared.iter().cloned().collect();
        while let Some(target) = waiting.pop() {
            for more in self.of_definitions.remove(&target).unwrap_or_default() {
                if self.shared.insert(more.clone()) {
                    waiting.push(more);
                }
            }
        }
        self.shared
    }
}

/// Closes the objects of a schema, except those in definitions of the whole schema.
fn close(schema: &mut Value, position: Position<'_>) {
    let Value::Object(keywords) = schema else {
        return;
    };
    if matches!(position, Position::Alone) && combiners(keywords) == 0 && can_close(keywords) {
        keywords.insert("additionalProperties".to_owned(), false.into());
    }
    each_part(keywords, position, close);
}

/// Returns whether an object's schema names all members that it needs, and leaves others open.
fn can_close(keywords: &Map<String, Value>) -> bool {
    let Some(members) = keywords.get("properties").and_then(Value::as_object) else {
        return false;
    };
    let needed = keywords.get("required").and_then(Value::as_array);
    let mut names = needed.into_iter().flatten().filter_map(Value::as_str);
    let is_decided = DECIDE.iter().any(|word| keywords.contains_key(*word));
    !is_decided && names.all(|name| members.contains_key(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns the schema with all objects closed.
    fn closed(mut schema: Value) -> Value {
        close_objects(&mut schema);
        schema
    }

    /// Closes every object whose `title` is "closed", and compares.
    fn check(schema: Value) {
        fn expect(schema: &mut Value) {
            match schema {
                Value::Object(keywords) => {
                    if keywords.get("title").is_some_and(|title| title == "closed") {
                        keywords.insert("additionalProperties".to_owned(), false.into());
                    }
                    keywords.values_mut().for_each(expect);
                }
                Value::Array(list) => list.iter_mut().for_each(expect),
                _ => {}
            }
        }
        let mut expected = schema.clone();
        expect(&mut expected);
        assert_eq!(closed(schema), expected);
    }

    #[test]
    fn objects_that_name_their_members_are_closed() {
        let leaf = json!({"title": "closed", "type": "object", "properties": {}});
        check(leaf.clone());
        check(
            json!({"title": "closed", "properties": {"a": leaf, "properties": {"type": "string"}},
            "required": ["a"]}),
        );
        check(json!({"type": "array", "items": leaf, "prefixItems": [leaf]}));
        check(json!({"additionalProperties": leaf, "properties": {"b": {"const": 1}}}));
        check(json!({"anyOf": [leaf, {"type": "null"}, {"oneOf": [leaf]}, {"allOf": [leaf]}]}));
        check(json!({"$ref": "#/$defs/A",
                "$defs": {"A": leaf, "B": {"anyOf": [{"$ref": "#/$defs/A"}]}}}));
    }

    #[test]
    fn objects_stay_open_where_schemas_add_members() {
        for open in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
            json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}}),
            json!({"properties": {"a": {}}, "minProperties": 2}),
            json!({"properties": {"a": {}}, "required": ["b"]}),
            json!({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
            json!({"oneOf": [{"properties": {"a": {}}}], "anyOf": [{"properties": {"b": {}}}]}),
            // What is referred to where others add members.
            json!({"$defs": {"A": {"properties": {"a": {}}}, "B": {"$ref": "#/$defs/A"}},
                "allOf": [{"$ref": "#/$defs/B"}, {"properties": {"b": {}}}]}),
            json!({"$defs": {"A": {"properties": {"a": {}}}}, "$ref": "#/$defs/A",
                "properties": {"b": {}}}),
            // What the parent leaves open, or needs.
            json!({"additionalProperties": true, "anyOf": [{"properties": {"a": {}}}]}),
            json!({"required": ["id"], "oneOf": [{"properties": {"kind": {}}}]}),
            json!({"$ref": "#/$defs/A", "required": ["b"],
                "$defs": {"A": {"properties": {"a": {}}}}}),
            // References of another form.
            json!({"allOf": [{"$ref": "#A"}, {"properties": {"b": {}}}],
                "$defs": {"A": {"$anchor": "A", "properties": {"a": {}}}}}),
            json!({"allOf": [{"$ref": "#/$defs/a~1b"}, {"properties": {"b": {}}}],
                "$defs": {"a/b": {"properties": {"a": {}}}}}),
            json!({"const": {"properties": {}}, "enum": [{"properties": {}}]}),
            json!(true),
        ] {
            assert_eq!(closed(open.clone()), open);
        }
    }

    #[test]
    fn objects_are_closed_if_one_schema_lists_all_members() {
        let member = || json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let closed_member = || {
            json!({"type": "object", "properties": {"a": {"type": "integer"}},
            "additionalProperties": false})
        };
        for (open, wanted) in [
            (member(), closed_member()),
            (
                json!({"properties": {"x": member()}, "additionalProperties": true}),
                json!({"properties": {"x": closed_member()}, "additionalProperties": true}),
            ),
            (
                json!({"oneOf": [member(), {"type": "null"}]}),
                json!({"oneOf": [closed_member(), {"type": "null"}]}),
            ),
            (
                json!({"properties": {}, "oneOf": [member()]}),
                json!({"properties": {}, "oneOf": [member()]}),
            ),
            (
                json!({"allOf": [member(), member()]}),
                json!({"allOf": [member(), member()]}),
            ),
            (
                json!({"items": member(), "$defs": {"D": member()}}),
                json!({"items": closed_member(), "$defs": {"D": closed_member()}}),
            ),
            (
                json!({"prefixItems": [member()], "additionalProperties": member()}),
                json!({"prefixItems": [closed_member()], "additionalProperties": closed_member()}),
            ),
        ] {
            assert_eq!(closed(open.clone()), wanted, "{open}");
        }
    }

    /// Each definition of a chain is open, because the last one is.
    #[test]
    fn large_schemas_take_linear_time() {
        let count = 20_000;
        let mut definitions = Map::new();
        definitions.insert("A0".to_owned(), json!({"properties": {"a": {}}}));
        for number in 1..count {
            let target = format!("#/$defs/A{}", number - 1);
            definitions.insert(format!("A{number}"), json!({"$ref": target}));
        }
        let last = json!({"$ref": format!("#/$defs/A{}", count - 1)});
        let members = json!({"x".repeat(1 << 20): {"properties": (0..count)
            .map(|n| (n.to_string(), json!(1))).collect::<Map<_, _>>(),
            "additionalProperties": true}});
        let schema = json!({"$defs": definitions, "allOf": [last, {}], "properties": members});
        assert_eq!(closed(schema.clone()), schema);
    }
}
