//! Tools and settings that agents and their libraries send beside plain functions.

use crate::common::{Server, engine};
use crate::loops::events;
use crate::parrot::saying;
use samite_requests::EngineOptions;
use samite_serve::ServeOptions;
use serde_json::{Value, json};

fn call_text(name: &str, arguments: &Value) -> String {
    let call = json!({"name": name, "arguments": arguments});
    format!("<tool_call>\n{call}\n</tool_call>")
}

/// Posts a body that must succeed.
#[track_caller]
fn post(server: &Server, path: &str, body: &Value) -> Value {
    let (status, answer) = server.post(path, body);
    assert_eq!(status, 200, "{answer}");
    answer
}

fn named(name: &str, options: ServeOptions) -> Server {
    let options = ServeOptions {
        aliases: vec!["first".to_owned(), name.to_owned()],
        ..options
    };
    let environment = samite_core::Environment::system();
    let engine = engine(
        crate::common::model(),
        EngineOptions::default(),
        environment,
    );
    Server::with(options, engine)
}

#[test]
fn custom_tools_take_a_text() {
    const PATCH: &str = "*** Begin Patch\n+\"new\" \\ line\n*** End Patch";
    let (server, _) = saying(&call_text("apply_patch", &json!({"input": PATCH})));
    let user = json!({"role": "user", "content": "Edit it"});
    let mut body = json!({"input": [user], "temperature": 0, "tools": [
        {"type": "custom", "name": "apply_patch", "description": "Edits files"},
        {"type": "web_search"},
    ]});
    let whole = post(&server, "/v1/responses", &body);
    let events = events(&server, "/v1/responses", &body);
    let (_, last) = events.last().unwrap();
    for response in [&whole, &last["response"]] {
        let item = &response["output"][0];
        assert_eq!(item["type"], "custom_tool_call", "{response}");
        assert_eq!(
            (&item["name"], &item["input"]),
            (&json!("apply_patch"), &json!(PATCH))
        );
        assert_eq!(response["tools"], body["tools"]);
    }
    let of = |name: &str| {
        let found = events.iter().filter(|(event, _)| event == name);
        found.map(|(_, value)| value.clone()).collect::<Vec<_>>()
    };
    let deltas = of("response.custom_tool_call_input.delta");
    let deltas = deltas.iter().filter_map(|value| value["delta"].as_str());
    assert_eq!(deltas.collect::<String>(), PATCH);
    assert_eq!(
        of("response.custom_tool_call_input.done")[0]["input"],
        PATCH
    );
    assert!(of("response.function_call_arguments.delta").is_empty());

    // The next turn may spell the call out or refer to it. The model sees the same.
    let item = whole["output"][0].clone();
    let result = json!({"type": "custom_tool_call_output", "call_id": item["call_id"],
        "output": "done"});
    let mut prompts = [
        item.clone(),
        json!({"type": "item_reference", "id": item["id"]}),
    ]
    .map(|item| {
        body["input"] = json!([user, item, result]);
        post(&server, "/v1/responses/input_tokens", &body)["input_tokens"].clone()
    });
    prompts.sort_by_key(Value::as_u64);
    assert_eq!(prompts[0], prompts[1]);
    assert!(prompts[0].as_u64() > whole["usage"]["input_tokens"].as_u64());
    // Nothing is stored if the client says so.
    body["input"] = json!([user]);
    body["store"] = json!(false);
    let id = &post(&server, "/v1/responses", &body)["output"][0]["id"];
    body["input"] = json!([user, {"type": "item_reference", "id": id}]);
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!(
        (status, &answer["error"]["param"]),
        (400, &json!("input[1].id")),
        "{answer}"
    );
}

#[test]
fn deferred_tools_are_called_but_not_in_the_prompt() {
    let (server, _) = saying(&call_text("late", &json!({})));
    let tool = |name: &str, is_late: bool| {
        json!({"name": name, "input_schema": {"type": "object",
        "properties": {}}, "description": "Does it", "defer_loading": is_late})
    };
    let user = json!({"role": "user", "content": "Do it"});
    let mut body = json!({"max_tokens": 1000, "messages": [user], "tools": [tool("early", false)]});
    let count = |body: &Value| {
        let counted = post(&server, "/v1/messages/count_tokens", body);
        counted["input_tokens"].as_u64().unwrap()
    };
    let early = count(&body);
    body["tools"] = json!([tool("early", false), tool("late", true)]);
    assert_eq!(count(&body), early);
    let answer = post(&server, "/v1/messages", &body);
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    assert_eq!(answer["content"][0]["name"], "late");
    // The result of a search describes it.
    let searched = |found: Value| {
        json!([user,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "early",
            "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
            "content": [found]}]}])
    };
    body["messages"] = searched(json!({"type": "text", "text": ""}));
    let empty = count(&body);
    body["messages"] = searched(json!({"type": "tool_reference", "tool_name": "late"}));
    assert!(count(&body) > empty + 20);
    // An image does not end the session.
    body["messages"] = searched(json!({"type": "image", "source": {"type": "base64"}}));
    assert!(count(&body) > empty);
}

#[test]
fn a_choice_of_tools_limits_calls() {
    let server = Server::simple();
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "parameters":
        {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}}})
    };
    let names = |choice: Value, seed: u64| {
        let body = json!({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 200,
            "tools": [tool("left"), tool("right"), tool("up")], "tool_choice": choice,
            "temperature": 1.5, "seed": seed});
        let answer = post(&server, "/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        // Members that the schema does not name are not invented.
        for call in calls
            .iter()
            .filter(|_| choice["finish_reason"] == "tool_calls")
        {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert_eq!(arguments.as_object().unwrap().len(), 1, "{arguments}");
        }
        let names = calls
            .iter()
            .map(|call| call["function"]["name"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    for seed in 0..4 {
        let function = json!({"type": "function", "function": {"name": "up"}});
        assert_eq!(names(function.clone(), seed), ["up"]);
        let allowed = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required",
            "tools": [function, {"type": "function", "function": {"name": "left"}}]}});
        let names = names(allowed, seed);
        assert!(
            !names.is_empty() && !names.iter().any(|name| name == "right"),
            "{names:?}"
        );
    }
}

#[test]
fn settings_of_newer_apis_apply() {
    let server = named("second", ServeOptions::default());
    let format = json!({"type": "json_schema", "schema": {"type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}});
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    for (name, value) in [
        ("output_config", json!({"format": format})),
        ("output_format", format),
    ] {
        let mut body = json!({"model": "second", "max_tokens": 100, "messages": messages});
        body[name] = value;
        let answer = post(&server, "/v1/messages", &body);
        let text = answer["content"][0]["text"].as_str().unwrap();
        let mood: Value = serde_json::from_str(text).unwrap();
        assert_eq!(mood.as_object().unwrap().len(), 1, "{mood}");
        // A model answers under the alias that the request names.
        assert_eq!(answer["model"], "second");
    }
    assert_eq!(server.get("/v1/models/second").0, 200);
    let other = post(
        &server,
        "/v1/messages",
        &json!({"model": "unknown", "max_tokens": 1,
        "messages": messages}),
    );
    assert_eq!(other["model"], "first");

    let mut body = json!({"input": "Once upon a time", "max_output_tokens": 5, "temperature": 0,
        "top_logprobs": 2, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"]});
    let whole = post(&server, "/v1/responses", &body);
    assert_eq!(whole["metadata"], json!({"a": "b"}));
    assert_eq!(whole["text"]["format"]["type"], "text");
    let part = &whole["output"][0]["content"][0];
    let joined = |list: &Value| {
        let list = list.as_array().unwrap().iter();
        list.map(|entry| entry["token"].as_str().unwrap())
            .collect::<String>()
    };
    assert_eq!(joined(&part["logprobs"]), part["text"], "{part}");
    assert_eq!(
        part["logprobs"][0]["top_logprobs"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let events = events(&server, "/v1/responses", &body);
    let (_, last) = events.last().unwrap();
    let streamed = &last["response"]["output"][0]["content"][0];
    assert_eq!(
        joined(&streamed["logprobs"]),
        streamed["text"],
        "{streamed}"
    );

    // Clients recognise a prompt that does not fit.
    let long = "once ".repeat(3000);
    body["input"] = json!(long);
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    let body = json!({"max_tokens": 1, "messages": [{"role": "user", "content": long}]});
    let (status, answer) = server.post("/v1/messages", &body);
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 400);
    assert!(
        message.starts_with("prompt is too long: ") && message.contains(" maximum"),
        "{message}"
    );
}
