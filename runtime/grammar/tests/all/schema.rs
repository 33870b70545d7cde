//! JSON schema: what comes out is valid, and what is valid can come out. The crate `jsonschema` is
//! the judge.

use crate::common::{END, checked, over_bytes, takes};
use proptest::prelude::*;
use samite_grammar::{Grammar, GrammarConstraint};
use samite_text::{Constraint, Rng};
use serde_json::{Map, Value, json};

fn judge(schema: &Value) -> jsonschema::Validator {
    let options = jsonschema::options().should_validate_formats(true);
    options
        .build(schema)
        .unwrap_or_else(|error| panic!("{schema}: {error}"))
}

fn constraint(schema: &Value) -> GrammarConstraint {
    let grammar = Grammar::json_schema(&schema.to_string());
    over_bytes(&grammar.unwrap_or_else(|error| panic!("{schema}: {error}")))
}

/// A random text that the constraint lets through; `None` if it does not end soon.
fn emit(beginning: &GrammarConstraint, rng: &mut Rng) -> Option<String> {
    let mut constraint = beginning.clone();
    let mut text = Vec::new();
    for step in 0..600 {
        if constraint.is_finished() {
            break;
        }
        let mask = constraint.mask().unwrap();
        let allowed = (0..mask.len() as u32 * 32)
            .filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1);
        let allowed: Vec<u32> = allowed.collect();
        // Towards the end, what closes something; before, more often what has a meaning in JSON.
        let closing = allowed
            .iter()
            .filter(|token| **token == END || b"\"}]0\\".contains(&((**token - 5) as u8)));
        let closing: Vec<u32> = closing.copied().collect();
        let plain = allowed
            .iter()
            .filter(|token| **token > 5 && (0x20..0x7F).contains(&(**token - 5)));
        let plain: Vec<u32> = plain.copied().collect();
        let list = match (step > 80, rng.below(4)) {
            (true, _) | (_, 0) if !closing.is_empty() => &closing,
            (_, 1 | 2) if !plain.is_empty() => &plain,
            _ => &allowed,
        };
        let token = list[rng.below(list.len())];
        constraint.accept(token).unwrap();
        if token == END {
            break;
        }
        text.push((token - 5) as u8);
    }
    constraint
        .is_finished()
        .then(|| String::from_utf8(text).unwrap())
}

fn emits_only_valid(schema: &Value, count: usize, rng: &mut Rng) -> usize {
    let (judge, constraint) = (judge(schema), constraint(schema));
    let mut ended = 0;
    for _ in 0..count {
        if let Some(text) = emit(&constraint, rng) {
            // The judge computes with numbers of 64 bits.
            let mut digits = text.split(|c: char| !c.is_ascii_digit() && c != '.');
            if digits.any(|digits| digits.len() > 15) {
                continue;
            }
            let value: Value = match serde_json::from_str(&text) {
                Ok(value) => value,
                // JSON all the same.
                Err(error) if error.to_string().contains("number out of range") => continue,
                Err(error) => panic!("{text}: {error}"),
            };
            assert!(judge.is_valid(&value), "{schema}\nlets through {text}");
            ended += 1;
        }
    }
    ended
}

/// A schema, values that are valid, and others.
struct Case {
    schema: Value,
    valid: Vec<Value>,
    invalid: Vec<Value>,
}

macro_rules! cases {
    ($({$($schema:tt)*} + [$($valid:tt)*] - [$($invalid:tt)*];)*) => {
        vec![$(Case {
            schema: json!({$($schema)*}),
            valid: as_list(json!([$($valid)*])),
            invalid: as_list(json!([$($invalid)*])),
        }),*]
    };
}

fn as_list(value: Value) -> Vec<Value> {
    value.as_array().unwrap().clone()
}

fn cases() -> Vec<Case> {
    cases! {
        {} + [null, true, 1, -0.5, 1e3, "", "a\"b", [], [1, [2]], {}, {"a": {"b": []}}] - [];
        {"type": "null"} + [null] - [0, "", false];
        {"type": "boolean"} + [true, false] - [null, 0, "true"];
        {"type": "integer"} + [0, 1, -17, 123456789] - [0.5, "1", null];
        {"type": "number"} + [0, -1, 0.25, 1e10, -2.5e-3] - ["1", true];
        {"type": "string"} + ["", "a", "ä", "\n", "日本", "😀"] - [1, null];
        {"type": "array"} + [[], [1, "a"], [[[]]]] - [{}, null];
        {"type": "object"} + [{}, {"a": 1}, {"b": {"c": null}}] - [[], 1];
        {"type": ["string", "null"]} + ["a", null] - [1, []];
        {"type": ["integer", "array"], "minimum": 3} + [3, [], [1]] - [2, "a"];
        {"const": 1} + [1] - [2, "1"];
        {"const": "a\nb"} + ["a\nb"] - ["a", 1];
        {"const": {"a": [1, null], "b": "x"}} + [{"a": [1, null], "b": "x"}]
            - [{"a": [1], "b": "x"}, {}];
        {"const": null} + [null] - [false];
        {"enum": ["red", "green", 3, null, [1]]} + ["red", "green", 3, null, [1]] - ["blue", 4, []];
        {"enum": ["a", "b"], "type": "string"} + ["a", "b"] - ["c"];
        {"minimum": 3, "type": "integer"} + [3, 4, 1000] - [2, -5];
        {"maximum": 3, "type": "integer"} + [3, 0, -1000] - [4, 30];
        {"exclusiveMinimum": 3, "type": "integer"} + [4, 33] - [3, 2];
        {"exclusiveMaximum": 3, "type": "integer"} + [2, -3] - [3, 4];
        {"minimum": -12, "maximum": 120, "type": "integer"} + [-12, 0, 99, 120] - [-13, 121];
        {"minimum": 0.5, "maximum": 1.25, "type": "number"} + [0.5, 1, 1.25, 0.75] - [0.4, 1.3, 2];
        {"multipleOf": 5, "type": "integer"} + [0, 5, -10, 125] - [1, 12];
        {"multipleOf": 0.25, "type": "number"} + [0.25, 1, 1.75] - [0.3, 1.1];
        {"minLength": 2, "type": "string"} + ["ab", "äö", "abc"] - ["", "a"];
        {"maxLength": 2, "type": "string"} + ["", "ab", "😀😀"] - ["abc"];
        {"minLength": 1, "maxLength": 3, "type": "string"} + ["a", "\"\"\""] - ["", "abcd"];
        {"pattern": "^[a-c]+$", "type": "string"} + ["a", "abccb"] - ["", "d", "ad"];
        {"pattern": "b{2}", "type": "string"} + ["bb", "abba"] - ["b", "ab"];
        {"pattern": "^\\d{3}-\\w$", "type": "string"} + ["123-a", "000-_"] - ["12-a", "123-"];
        {"pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$", "type": "string"}
            + ["555-1212", "(888)555-1212"] - ["555-121"];
        {"pattern": "^a.[.\\s]\\s\\S$", "type": "string"} + ["ab. c", "a\u{85} \u{FEFF}d"]
            - ["a\r. c", "a\u{2028}. c", "ab.\u{85}c", "ab.  "];
        {"format": "date", "type": "string"} + ["2026-11-25", "2024-02-29"]
            - ["2026-13-01", "26-1-1", "2026-11-31"];
        {"format": "time", "type": "string"} + ["12:30:00Z", "23:59:59+01:00"]
            - ["12:30", "25:00:00Z"];
        {"format": "date-time", "type": "string"} + ["2026-11-25T12:30:00Z"]
            - ["2026-11-25", "2026-11-25 12:30:00"];
        {"format": "uuid", "type": "string"} + ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"]
            - ["2eb8aa08"];
        {"format": "ipv4", "type": "string"} + ["127.0.0.1", "192.168.7.255"]
            - ["1.2.3", "256.1.1.1"];
        {"format": "email", "type": "string"} + ["joe.bloggs@example.com"] - ["joe"];
        {"items": {"type": "integer"}, "type": "array"} + [[], [1], [1, 2, 3]] - [["a"], [1, null]];
        {"minItems": 1, "maxItems": 2, "type": "array"} + [[1], [1, 2]] - [[], [1, 2, 3]];
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false, "type": "array"}
            + [[], [1], [1, "a"]] - [["a"], [1, "a", 2]];
        {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 1,
            "type": "array"}
            + [[1], [1, "a", "b"]] - [[], [1, 2]];
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}],
            "additionalItems": {"type": "null"}, "type": "array"}
            + [[1], [1, null]] - [["a"], [1, 2]];
        {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "type": "object"}
            + [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "c": []}]
            - [{"a": "x"}, {"b": 1}];
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": false, "type": "object"}
            + [{}, {"a": 1}] - [{"b": 1}, {"a": 1, "b": 1}];
        {"properties": {"a": {}}, "additionalProperties": {"type": "boolean"}, "type": "object"}
            + [{"a": 1, "b": true}, {"x": false}] - [{"b": 1}];
        {"required": ["b", "a"], "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "type": "object"}
            + [{"a": null, "b": null}] - [{"a": null}, {}];
        {"required": ["a"], "type": "object"} + [{"a": 1}] - [{}, {"b": 1}];
        {"patternProperties": {"^s_": {"type": "string"}, "^n_": {"type": "number"}},
            "additionalProperties": false, "type": "object"}
            + [{}, {"s_a": "x"}, {"n_a": 1}] - [{"s_a": 1}, {"x": 1}];
        {"properties": {"a\"b": {"const": 1}, "c\nd": {"const": 2}, "e~/": {"const": 3}},
            "additionalProperties": false, "type": "object"}
            + [{"a\"b": 1, "c\nd": 2, "e~/": 3}] - [{"a": 1}];
        {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "string", "maxLength": 1}]}
            + [2, "a"] - [1, "ab", null];
        {"oneOf": [{"type": "integer"}, {"type": "string"}]} + [1, "a"] - [null, 1.5];
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {"cat": {"type": "object",
                "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                "required": ["kind"]},
                "dog": {"type": "object", "properties": {"kind": {"const": "dog"},
                    "name": {"type": "string"}}, "required": ["kind"]}}}
            + [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}] - [{"kind": "cow"}, {}];
        {"$ref": "#/$defs/term", "$defs": {
                "term": {"oneOf": [{"$ref": "#/$defs/number"}, {"$ref": "#/$defs/sum"}]},
                "number": {"type": "integer"},
                "sum": {"type": "object", "properties": {"left": {"oneOf": [{"$ref": "#/$defs/number"}, {"$ref": "#/$defs/sum"}]}, "right": {"$ref": "#/$defs/term"}},
                    "required": ["left", "right"], "additionalProperties": false}}}
            + [1, {"left": 1, "right": 2},
                {"left": {"left": 1, "right": 2}, "right": {"left": 3, "right": 4}}]
            - ["a", {"left": 1}, {"left": "a", "right": 1}];
        {"oneOf": [{"$ref": "#/$defs/none"},
            {"type": "object", "properties": {"k": {"enum": [1, "b"]}, "x": {"type": "null"}},
            "required": ["k", "x"]}],
            "$defs": {"none": {"type": "object", "properties": {"k": {"const": 0}},
                "required": ["k"]}}}
            + [{"k": 0}, {"k": 1, "x": null}, {"k": "b", "x": null}]
            - [{"k": 2}, {"k": 1}, {"k": "b", "x": 1}];
        {"oneOf": [{"$ref": "#/$defs/day"}, {"type": "null"}],
            "$defs": {"day": {"type": "string", "format": "date"}}}
            + ["2024-02-29", null] - ["2023-02-29", 1];
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]}]}
            + [{"a": 1, "b": "x"}] - [{"a": 1}, {"b": "x"}];
        {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]} + [2, 3] - [1, 4];
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}} + [1] - ["a"];
        {"properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}},
            "required": ["value"], "additionalProperties": false, "type": "object"}
            + [{"value": 1}, {"next": {"value": 2}, "value": 1}] - [{}, {"next": {}, "value": 1}];
        {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"$ref": "#"}]}}
            + [[], [1, [2, [3]]]] - [["a"], [[null]]];
        {"properties": {"a": {"$ref": "#/$defs/with~1slash"},
            "b": {"$ref": "#/$defs/with%20space"}, "c": {"$ref": "#anchored"},
            "d": {"$ref": "#/properties/a"}},
            "required": ["a", "b", "c", "d"], "additionalProperties": false, "type": "object",
            "$defs": {"with/slash": {"const": 1}, "with space": {"const": 2},
                "third": {"$anchor": "anchored", "const": 3}}}
            + [{"a": 1, "b": 2, "c": 3, "d": 1}] - [{"a": 2, "b": 2, "c": 3, "d": 1}];
        {"definitions": {"unused": {"not": {}}}, "type": "integer", "title": "t",
            "description": "d", "default": 1, "examples": [1], "x-other": {"not": 1},
            "$comment": "c"}
            + [1] - ["a"];
        {"uniqueItems": false, "type": "array", "x-guidance": {"lenient": true}} + [[1, 1]] - [1];
        {"const": {"$ref": "#/nowhere", "not": false}} + [{"$ref": "#/nowhere", "not": false}]
            - [{}];
        {"minProperties": 1, "maxProperties": 2, "type": "object"} + [{"a": 1}, {"a": 1, "c": 2}]
            - [{}, {"a": 1, "b": 1, "c": 1}];
        {"unevaluatedProperties": false, "properties": {"a": {}}, "type": "object"} + [{}, {"a": 1}]
            - [{"b": 1}, {"a": 1, "b": 1}];
        {"unevaluatedProperties": {"type": "null"}, "patternProperties": {"^a": {}},
            "type": "object"}
            + [{"ab": 1}, {"b": null}] - [{"b": 1}];
        {"unevaluatedProperties": false, "additionalProperties": {"type": "null"}, "type": "object"}
            + [{"b": null}] - [{"b": 1}];
        {"unevaluatedItems": false, "prefixItems": [{}], "type": "array"} + [[], [1]] - [[1, 2]];
        {"not": false, "then": {"const": 1}, "minContains": 3, "unevaluatedItems": true,
            "propertyNames": true, "type": ["array", "integer"]}
            + [[], 2] - ["a"];
        {"minProperties": 2, "properties": {"a": {}}, "required": ["a"], "type": "object"}
            + [{"a": 1, "c": 2}] - [{"a": 1}];
    }
}

#[test]
fn keywords() {
    let mut rng = Rng::new(1);
    let mut ended = 0;
    for Case {
        schema,
        valid,
        invalid,
    } in cases()
    {
        let judge = judge(&schema);
        let constraint = constraint(&schema);
        for value in valid {
            assert!(
                judge.is_valid(&value),
                "the judge refuses {value} by {schema}"
            );
            assert!(
                takes(&constraint, &value.to_string()),
                "{value} is refused by {schema}"
            );
        }
        for value in invalid {
            assert!(
                !judge.is_valid(&value),
                "the judge takes {value} by {schema}"
            );
            assert!(
                !takes(&constraint, &value.to_string()),
                "{value} is taken by {schema}"
            );
        }
        ended += emits_only_valid(&schema, 20, &mut rng);
    }
    assert!(ended > 600, "{ended}");
}

#[test]
fn other_formats_are_annotations() {
    for format in ["colour", "uri-reference", "regex", "password"] {
        let schema = json!({"type": "string", "format": format, "maxLength": 8}).to_string();
        let constraint = over_bytes(&Grammar::json_schema(&schema).unwrap());
        assert!(takes(&constraint, "\"red\""), "{format}");
        assert!(!takes(&constraint, "\"red red red\""), "{format}");
    }
}

#[test]
fn formats_emit_only_valid_values() {
    let mut rng = Rng::new(2);
    for format in [
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    ] {
        let schema = json!({"type": "string", "format": format});
        let ended = emits_only_valid(&schema, 100, &mut rng);
        assert!(ended > 10, "{format}: {ended}");
    }
    let schema = json!({"type": "string", "format": "date", "pattern": "^20"});
    assert!(takes(&constraint(&schema), "\"2024-02-29\""));
    assert!(
        !takes(&constraint(&schema), "\"2023-02-29\"")
            && !takes(&constraint(&schema), "\"1999-01-01\"")
    );
}

#[test]
fn json_white_space_is_minimal() {
    let constraint =
        constraint(&json!({"type": "object", "properties": {"a": {}}, "required": ["a"]}));
    for text in ["{\"a\":1}", "{ \"a\" : 1 }", "{\n  \"a\": 1\n}"] {
        assert!(takes(&constraint, text), "{text}");
    }
    for text in ["  {\"a\":1}", "{\"a\":  1}", "{\n\n\n\"a\":1}"] {
        assert!(!takes(&constraint, text), "{text}");
    }
}

#[test]
fn unenforceable_schemas_are_refused_with_their_location() {
    // Each of them doubles the combinations of those behind it.
    let multiplied: Map<String, Value> = (0..16)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/{}", i + 1)});
            let either = |name| json!({"anyOf": [next, {"required": [name]}]});
            (i.to_string(), json!({"allOf": [either("a"), either("b")]}))
        })
        .chain([("16".to_owned(), json!({"type": "object"}))])
        .collect();
    let multiplied = json!({"$ref": "#/$defs/0", "$defs": multiplied});
    let deep = (0..70).fold(
        json!({}),
        |inner, _| json!({"items": inner, "type": "array"}),
    );
    for (schema, expected) in [
        (
            json!({"not": {}}),
            "#/not: the keyword 'not' is not enforced",
        ),
        (
            json!({"properties": {"a/b": {"if": {}}}}),
            "#/properties/a~1b/if: the keyword 'if'",
        ),
        (json!({"items": {"contains": {}}}), "#/items/contains: "),
        (
            json!({"anyOf": [{}, {"uniqueItems": true}]}),
            "#/anyOf/1/uniqueItems: ",
        ),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"propertyNames": {}}}}),
            "#/$defs/a/propertyNames: ",
        ),
        (
            json!({"prefixItems": [{"dependentRequired": {}}]}),
            "#/prefixItems/0/dependentRequired: ",
        ),
        (
            json!({"patternProperties": {"x": {"unevaluatedItems": false, "anyOf": [{}]}}}),
            "#/patternProperties/x/unevaluatedItems: ",
        ),
        (
            json!({"unevaluatedProperties": false, "$ref": "#/$defs/a", "$defs": {"a": {}}}),
            "#/unevaluatedProperties: ",
        ),
        // Nothing is valid, and that is not enforced either.
        (json!({"contains": false}), "#/contains: "),
        (json!({"propertyNames": false}), "#/propertyNames: "),
        (
            json!({"$ref": "https://example.com/a"}),
            "#/$ref: 'https://example.com/a' is outside of this schema",
        ),
        (
            json!({"$ref": "#/$defs/none"}),
            "#/$ref: '#/$defs/none' refers to nothing",
        ),
        (
            json!({"$ref": "#none"}),
            "#/$ref: '#none' refers to nothing",
        ),
        (json!({"$ref": 1}), "#/$ref: must be a string"),
        (
            json!({"properties": {"a": 1}}),
            "#/properties/a: must be an object or a boolean",
        ),
        (
            json!({"properties": []}),
            "#/properties: must be an object of schemas",
        ),
        (json!({"anyOf": {}}), "#/anyOf: must be an array of schemas"),
        // 1 and 1.0 are the same number.
        (
            json!({"oneOf": [
                {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": 1.0}}, "required": ["k"]}
            ]}),
            "#: the alternatives of 'oneOf' may overlap",
        ),
        (
            json!({"items": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}),
            "#/items: the alternatives of 'oneOf' may overlap",
        ),
        (
            json!({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
                "required": ["a"], "type": "object"}),
            "#/properties/a: no value is valid",
        ),
        (json!({"type": "text"}), "#: Invalid type: text"),
        (json!({"$ref": "#"}), "#: no text can begin"),
        (
            json!({"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}),
            "have more than 100000 parts",
        ),
        (
            json!({"items": {"type": "object", "minProperties": 2}}),
            "#/items/minProperties: more than",
        ),
        (
            json!({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}),
            "#/properties/a: regex parse error: look-around",
        ),
        (json!(false), "#: no value is valid"),
        (json!([]), "#: must be an object or a boolean"),
        (multiplied, "#: it has too many parts"),
        (deep, ": more than 64 schemas in each other"),
    ] {
        let message = checked(Grammar::json_schema(&schema.to_string()))
            .unwrap_err()
            .to_string();
        assert!(message.contains(expected), "{message}\nexpected {expected}");
    }
    let message = Grammar::json_schema("{\"a\":").unwrap_err().to_string();
    assert!(message.starts_with("#: this is no JSON: EOF"), "{message}");
    let message = Grammar::json_schema(&" ".repeat(2 << 20))
        .unwrap_err()
        .to_string();
    assert!(message.contains("1048576 are allowed"), "{message}");
    let nested = "[".repeat(100_000);
    assert!(Grammar::json_schema(&nested).is_err());
    assert!(Grammar::json_schema("true").is_ok());
}

/// Schemas of the keywords that are enforced. Some make no sense.
fn schemas() -> impl Strategy<Value = Value> {
    let number = -20i32..20;
    let leaf = prop_oneof![
        Just(json!({})),
        Just(json!({"type": "null"})),
        Just(json!({"type": "boolean"})),
        (number.clone(), number.clone()).prop_map(
            |(a, b)| json!({"type": "integer", "minimum": a.min(b), "maximum": a.max(b)})
        ),
        number
            .clone()
            .prop_map(|a| json!({"type": "integer", "exclusiveMinimum": a})),
        number
            .clone()
            .prop_map(|a| json!({"type": "number", "maximum": f64::from(a) / 4.0})),
        (1..7u32).prop_map(|a| json!({"type": "integer", "multipleOf": a})),
        (0..3u32, 0..4u32)
            .prop_map(|(a, b)| json!({"type": "string", "minLength": a, "maxLength": a + b})),
        prop::sample::select(vec!["^[ab]*$", "a", "^x|y$", "^a.c$", "\\d+", "^\\S\\s$"])
            .prop_map(|pattern| json!({"type": "string", "pattern": pattern})),
        prop::sample::select(vec!["date", "time", "uuid", "ipv4"])
            .prop_map(|format| json!({"type": "string", "format": format})),
        prop::collection::vec(
            prop_oneof![
                Just(json!(1)),
                Just(json!("a")),
                Just(json!(null)),
                Just(json!([1])),
                Just(json!({"a": "b"}))
            ],
            1..4
        )
        .prop_map(|values| json!({"enum": values})),
    ];
    leaf.prop_recursive(3, 24, 4, move |inner| {
        let properties = prop::collection::btree_map("[abc]", inner.clone(), 0..4);
        prop_oneof![
            (inner.clone(), 0..3u32, 0..3u32).prop_map(|(items, a, b)| {
                json!({"type": "array", "items": items, "minItems": a, "maxItems": a + b})
            }),
            (prop::collection::vec(inner.clone(), 1..3), inner.clone()).prop_map(
                |(prefix, items)| {
                    json!({"type": "array", "prefixItems": prefix, "items": items})
                }
            ),
            (
                properties.clone(),
                prop::collection::btree_set("[abc]", 0..3),
                inner.clone(),
                any::<bool>(),
            )
                .prop_map(|(properties, required, other, is_closed)| {
                    let other = if is_closed { json!(false) } else { other };
                    json!({"type": "object", "properties": properties, "required": required,
                        "additionalProperties": other})
                }),
            prop::collection::vec(inner.clone(), 1..3)
                .prop_map(|options| json!({"anyOf": options})),
            prop::collection::vec(inner.clone(), 1..3).prop_map(|parts| json!({"allOf": parts})),
            (inner.clone(), inner).prop_map(|(a, b)| {
                json!({"$defs": {"a": a}, "anyOf": [{"$ref": "#/$defs/a"}, b]})
            }),
        ]
    })
}

/// Small values.
fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        (-20..20i32).prop_map(Value::from),
        // Whole ones would be integers, but are not written so.
        (-10..10i32).prop_map(|a| json!(f64::from(a) + 0.25)),
        "[abcxy0]{0,3}".prop_map(Value::from),
        Just(json!("2026-11-25")),
        Just(json!("127.0.0.1")),
    ];
    leaf.prop_recursive(2, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map("[abcd]", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn random_schemas_agree_with_the_validator(
        schema in schemas(),
        values in prop::collection::vec(values(), 8),
        seed: u64,
    ) {
        // References of the generator are to the root's definitions only.
        let definitions = schema.to_string().matches("$defs\":").count();
        prop_assume!(definitions <= usize::from(schema.get("$defs").is_some()));
        let Ok(grammar) = checked(Grammar::json_schema(&schema.to_string())) else {
            return Ok(());
        };
        let (judge, constraint) = (judge(&schema), over_bytes(&grammar));
        emits_only_valid(&schema, 5, &mut Rng::new(seed));
        for value in values {
            let is_taken = takes(&constraint, &value.to_string());
            // A valid value is taken unless its members come in another order.
            if is_taken || !value.to_string().contains('{') {
                prop_assert_eq!(is_taken, judge.is_valid(&value), "{} by {}", value, schema);
            }
        }
    }
}
