//! The description of the API names exactly the paths and methods that the router has.

use crate::common::Server;
use samite_requests::EngineOptions;
use samite_serve::ServeOptions;
use serde_json::Value;
use std::collections::BTreeSet;

/// Returns the paths in the source of the router. Each is a string; a prefix ends with `/`, and
/// an identifier follows.
fn routed() -> BTreeSet<String> {
    let (_, source) = include_str!("../../src/paths.rs")
        .split_once("fn for_path")
        .unwrap();
    let texts = source.split('"').skip(1).step_by(2);
    let paths = texts.filter(|text| text.starts_with('/'));
    paths
        .map(|path| match path.strip_suffix('/') {
            Some(prefix) => format!("{prefix}/{{id}}"),
            None => path.to_owned(),
        })
        .collect()
}

/// Follows references.
fn resolved<'a>(description: &'a Value, value: &'a Value) -> &'a Value {
    match value.get("$ref").and_then(Value::as_str) {
        None => value,
        Some(to) => {
            let place = to.strip_prefix('#').unwrap();
            let found = description.pointer(place);
            resolved(description, found.unwrap_or_else(|| panic!("{to}")))
        }
    }
}

fn check_references(description: &Value, value: &Value) {
    resolved(description, value);
    match value {
        Value::Array(list) => list
            .iter()
            .for_each(|one| check_references(description, one)),
        Value::Object(members) => members
            .values()
            .for_each(|one| check_references(description, one)),
        _ => {}
    }
}

#[test]
fn the_description_has_all_paths_and_methods() {
    let options = ServeOptions {
        prefix: "/llm".to_owned(),
        predict_path: Some("/predict".to_owned()),
        ..ServeOptions::default()
    };
    let server = Server::start(options, EngineOptions::default());
    let (status, description) = server.get("/llm/openapi.json");
    assert_eq!(status, 200);
    assert_eq!(description["info"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(description["servers"][0]["url"], "/llm");
    check_references(&description, &description);

    let paths = description["paths"].as_object().unwrap();
    let described: BTreeSet<String> = paths.keys().cloned().collect();
    let mut expected = routed();
    expected.insert("/predict".to_owned());
    let differing: Vec<_> = described.symmetric_difference(&expected).collect();
    assert!(differing.is_empty(), "{differing:?}");
    for (path, item) in paths {
        let operations = resolved(&description, item).as_object().unwrap();
        let mut methods: BTreeSet<String> =
            operations.keys().map(|name| name.to_uppercase()).collect();
        if methods.contains("GET") {
            methods.insert("HEAD".to_owned());
        }
        // The answer to a method that no path has names those of the path.
        let path = format!("/llm{}", path.replace("{id}", "0"));
        let (status, head, _) = server.ask("PATCH", &path, "", "");
        assert_eq!(status, 405, "{path}");
        let mut headers = head.lines().filter_map(|line| line.split_once(": "));
        let allow = headers.find(|(name, _)| name.eq_ignore_ascii_case("allow"));
        let allow: BTreeSet<String> = allow.unwrap().1.split(", ").map(str::to_owned).collect();
        assert_eq!(methods, allow, "{path}");
    }
}
