//! The public JSON-Schema-Test-Suite, from the folder in `SAMITE_TEST_JSON_SCHEMA_SUITE` (its
//! `tests/draft2020-12`), including formats. A schema is either rejected with a named reason, or
//! accepts exactly the valid values.

use crate::common::{checked, over_bytes, takes};
use samite_grammar::Grammar;
use serde_json::{Map, Value};
use std::path::Path;

/// Shortens a value for error messages.
fn short(value: &impl ToString) -> String {
    value.to_string().chars().take(300).collect()
}

/// Sorts members into the schema's order, which grammars require; members that it does not name
/// come last.
fn ordered(value: &Value, schema: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let none = Map::new();
            let named = schema["properties"].as_object().unwrap_or(&none);
            let first = named.keys().filter_map(|key| members.get_key_value(key));
            let rest = members.iter().filter(|(key, _)| !named.contains_key(*key));
            first
                .chain(rest)
                .map(|(key, value)| (key.clone(), ordered(value, &schema["properties"][key])))
                .collect()
        }
        Value::Array(items) => items
            .iter()
            .map(|item| ordered(item, &schema["items"]))
            .collect(),
        other => other.clone(),
    }
}

/// Known differences from the suite, by file and part of the description.
const OTHERWISE: &[(&str, &str)] = &[
    // Formats are enforced here even where they are only annotations.
    ("format", ""),
    // Members come in the combined order of all schemas.
    ("allOf", "\"allOf\": \"allOf\""),
    ("allOf", "allOf with base schema"),
    ("const", "same object with different property order"),
    // Valid but rare forms are never generated.
    ("date-time", "leap second"),
    ("time", "valid leap second"),
    ("time", "a valid time string with leap second"),
    ("email", "a quoted string with a"),
    ("email", "an IPv6-address-literal"),
    ("ipv6", "mixed format with"),
    ("ipv6", "a long valid ipv6"),
    // Remote schemas are not fetched, including metaschemas.
    ("vocabulary", "no validation vocabulary"),
];

/// Returns true for a whole number written with a fraction: grammars here allow one form of a
/// number only.
fn has_needless_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64() && number.as_f64().unwrap().fract() == 0.0,
        Value::Array(items) => items.iter().any(has_needless_fraction),
        _ => false,
    }
}

/// Enforced formats; others are annotations.
const FORMATS: [&str; 10] = [
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

#[test]
fn the_public_json_schema_suite_passes() {
    let Some(folder) = std::env::var_os("SAMITE_TEST_JSON_SCHEMA_SUITE") else {
        samite_testing::skipped("SAMITE_TEST_JSON_SCHEMA_SUITE names no folder");
        return;
    };
    let (mut taken, mut refused, mut compared) = (0, 0, 0);
    let mut wrong = Vec::new();
    let folder = Path::new(&folder);
    let folders = [folder.to_owned(), folder.join("optional/format")];
    let mut files: Vec<_> = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "json")
        })
        .collect();
    files.sort();
    for file in &files {
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let groups: Vec<Value> =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let is_format = file
            .parent()
            .is_some_and(|folder| folder.ends_with("format"));
        let is_annotation = is_format && !FORMATS.contains(&&*name);
        for group in groups {
            let schema = &group["schema"];
            let grammar = match checked(Grammar::json_schema(&schema.to_string())) {
                Ok(grammar) => grammar,
                Err(error) => {
                    let error = error.to_string();
                    println!("{name}: {}: {error}", group["description"]);
                    assert!(error.contains('#'), "no place: {error}");
                    refused += 1;
                    continue;
                }
            };
            taken += 1;
            let constraint = over_bytes(&grammar);
            for case in group["tests"].as_array().unwrap() {
                let place = format!("{}: {}", group["description"], case["description"]);
                let is_otherwise =
                    |entry: &&(&str, &str)| entry.0 == name && place.contains(entry.1);
                if is_annotation && case["valid"] == false {
                    continue;
                }
                if OTHERWISE.iter().any(|entry| is_otherwise(&entry))
                    || (case["valid"] == true && has_needless_fraction(&case["data"]))
                {
                    continue;
                }
                compared += 1;
                let text = ordered(&case["data"], schema).to_string();
                let is_valid = case["valid"] == true;
                if takes(&constraint, &text) != is_valid {
                    wrong.push(format!(
                        "{name}: {place}: {} is {}valid by {}",
                        short(&text),
                        if is_valid { "" } else { "in" },
                        short(schema)
                    ));
                }
            }
        }
    }
    println!("{taken} schemas taken, {refused} refused, {compared} values compared");
    assert!(taken > 190 && compared > 800, "{taken} {compared}");
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
