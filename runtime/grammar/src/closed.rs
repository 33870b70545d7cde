//! Closes the objects of a schema.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Keywords that apply more schemas to the same value.
const COMBINE: [&str; 7] = [
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "dependentSchemas",
];

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
/// Stays open where schemas add members to each other, as the parts of `allOf` do.
///
/// ```
/// # use serde_json::json;
/// let mut schema = json!({"type": "object", "properties": {"age": {"type": "integer"}}});
/// samite_grammar::close_objects(&mut schema);
/// assert_eq!(schema["additionalProperties"], false);
/// ```
pub fn close_objects(schema: &mut Value) {
    let mut open = BTreeSet::new();
    loop {
        let count = open.len();
        Closing {
            open: &mut open,
            does: false,
        }
        .visit(schema, true, "#");
        if open.len() == count {
            break;
        }
    }
    Closing {
        open: &mut open,
        does: true,
    }
    .visit(schema, true, "#");
}

struct Closing<'a> {
    /// References to schemas that others add members to.
    open: &'a mut BTreeSet<String>,
    /// False to find these references only.
    does: bool,
}

impl Closing<'_> {
    /// Visits the schema at `pointer`. If `is_whole`, no other schema applies to the same value.
    fn visit(&mut self, schema: &mut Value, is_whole: bool, pointer: &str) {
        let Value::Object(keywords) = schema else {
            return;
        };
        let is_whole = is_whole && !self.open.contains(pointer);
        let combining = COMBINE
            .iter()
            .filter(|word| keywords.contains_key(**word))
            .count();
        let has_members = keywords.contains_key("properties");
        // The only schema of its value, besides those that one keyword refers to.
        let is_only = is_whole && !has_members && combining == 1;
        if let Some(Value::String(target)) = keywords.get("$ref")
            && !is_only
        {
            self.open.insert(target.clone());
        }
        if self.does && is_whole && combining == 0 && can_close(keywords) {
            keywords.insert("additionalProperties".to_owned(), false.into());
        }
        for (keyword, value) in keywords.iter_mut() {
            let place = format!("{pointer}/{keyword}");
            match keyword.as_str() {
                "properties" | "patternProperties" | "$defs" | "definitions" => {
                    let Value::Object(schemas) = value else {
                        continue;
                    };
                    for (name, schema) in schemas.iter_mut() {
                        self.visit(schema, true, &format!("{place}/{name}"));
                    }
                }
                "anyOf" | "oneOf" | "allOf" => {
                    let list = value.as_array_mut();
                    let is_whole = is_only
                        && (keyword != "allOf"
                            || list.as_ref().is_some_and(|list| list.len() == 1));
                    for schema in list.into_iter().flatten() {
                        self.visit(schema, is_whole, &place);
                    }
                }
                "prefixItems" | "items" if value.is_array() => {
                    for schema in value.as_array_mut().into_iter().flatten() {
                        self.visit(schema, true, &place);
                    }
                }
                "items" | "additionalItems" | "additionalProperties" => {
                    self.visit(value, true, &place);
                }
                _ => {}
            }
        }
    }
}

/// Returns whether an object's schema names all members that it needs, and leaves others open.
fn can_close(keywords: &Map<String, Value>) -> bool {
    let Some(members) = keywords.get("properties").and_then(Value::as_object) else {
        return false;
    };
    let needed = keywords.get("required").and_then(Value::as_array);
    let names = needed.into_iter().flatten().filter_map(Value::as_str);
    let is_decided = DECIDE.iter().any(|word| keywords.contains_key(*word));
    !is_decided && names.into_iter().all(|name| members.contains_key(name))
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
    fn objects_stay_open_where_others_have_a_say() {
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
            json!({"const": {"properties": {}}, "enum": [{"properties": {}}]}),
            json!(true),
        ] {
            assert_eq!(closed(open.clone()), open);
        }
    }
}
