//! Tools of the Responses API. The model sees each as a function.

use crate::chat;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Kind of a client's tool, which decides how its calls are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolKind {
    Function,
    /// Takes a text instead of arguments.
    Custom,
    /// Finds more tools, which its output declares.
    Search,
}

/// A tool that the client runs.
#[derive(Clone, Debug)]
pub struct ClientTool {
    pub kind: ToolKind,
    pub name: String,
    pub namespace: Option<String>,
    /// Name of the function that the model sees.
    function: String,
    /// Field that declares the tool.
    place: String,
}

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub struct ClientTools {
    tools: Vec<ClientTool>,
    /// Numbers of the tools by namespace and name, and by function.
    by_name: BTreeMap<(Option<String>, String), usize>,
    by_function: BTreeMap<String, usize>,
    /// True if OpenAI's servers are to search for tools.
    has_foreign_search: bool,
    /// The functions in the format of chat completions.
    functions: Vec<Value>,
}

/// Name of a search for tools.
pub const SEARCH: &str = "tool_search";

/// Parameter of a custom tool's function.
const INPUT: &str = "input";

/// Maximum number of characters in a name. OpenAI allows 64.
const MAX_NAME: usize = 256;

fn required_name<'a>(tool: &Fields<'a>, place: &str) -> Result<&'a str> {
    let name = tool.required_text("name")?;
    // A namespace is copied for each of its tools.
    if name.len() > MAX_NAME {
        let message = format!("must have at most {MAX_NAME} characters");
        return Err(ApiError::field(format!("{place}.name"), message));
    }
    Ok(name)
}

/// Returns the parameters of a custom tool's function.
fn input_parameters(tool: &Fields<'_>) -> Result<Value> {
    let mut description = "The whole input of the tool".to_owned();
    if let Some(format) = tool.fields("format")?
        && let Some(definition) = format.text(&["definition"])?
    {
        let syntax = format.text(&["syntax"])?.unwrap_or("lark");
        description += &format!(". It must match this {syntax} grammar:\n{definition}");
    }
    Ok(json!({
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": description}},
        "required": [INPUT],
        "additionalProperties": false,
    }))
}

/// Returns the parameters of a search that declares none.
fn search_parameters() -> Value {
    json!({
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": false,
    })
}

impl ClientTools {
    /// Adds a list of tools. Deferred ones can be called, but are not part of the prompt: the
    /// conversation describes them where the client found them.
    pub fn add(&mut self, place: &str, list: &[Value], is_deferred: bool) -> Result<()> {
        let mut of_namespaces = Vec::new();
        for (i, tool) in list.iter().enumerate() {
            let place = format!("{place}[{i}]");
            let tool = Fields::from_value(&place, tool)?;
            if tool.text(&["type"])? == Some("namespace") {
                of_namespaces.push((place.clone(), tool));
            } else {
                self.add_one(place, &tool, None, is_deferred)?;
            }
        }
        // Names without a namespace stay as they are.
        for (place, tool) in of_namespaces {
            let namespace = required_name(&tool, &place)?;
            for (i, tool) in tool.list("tools")?.unwrap_or_default().iter().enumerate() {
                let place = format!("{place}.tools[{i}]");
                let tool = Fields::from_value(&place, tool)?;
                self.add_one(place, &tool, Some(namespace), is_deferred)?;
            }
        }
        Ok(())
    }

    fn add_one(
        &mut self,
        place: String,
        tool: &Fields<'_>,
        namespace: Option<&str>,
        is_deferred: bool,
    ) -> Result<()> {
        let value = |name: &str| tool.get(&[name]).map(|(_, value)| value.clone());
        let kind = match tool.text(&["type"])? {
            Some("function") => ToolKind::Function,
            Some("custom") => ToolKind::Custom,
            Some("tool_search") if tool.text(&["execution"])? == Some("client") => ToolKind::Search,
            Some("tool_search") => {
                self.has_foreign_search = true;
                return Ok(());
            }
            // Services of OpenAI's, which clients list anyway.
            _ => return Ok(()),
        };
        let name = match kind {
            ToolKind::Search => SEARCH,
            _ => required_name(tool, &place)?,
        };
        let key = (namespace.map(str::to_owned), name.to_owned());
        // A later list may declare the same tool.
        if self.by_name.contains_key(&key) {
            return Ok(());
        }
        if self.tools.len() >= chat::MOST {
            let message = format!("{} are allowed", chat::MOST);
            return Err(ApiError::field(place, message));
        }
        let qualified = format!("{}__{name}", namespace.unwrap_or_default());
        let mut function = name.to_owned();
        let mut number = 1;
        while self.by_function.contains_key(&function) {
            function = match number {
                1 => qualified.clone(),
                _ => format!("{qualified}_{number}"),
            };
            number += 1;
        }
        let parameters = match kind {
            ToolKind::Function => value("parameters"),
            ToolKind::Custom => Some(input_parameters(tool)?),
            ToolKind::Search => value("parameters").or_else(|| Some(search_parameters())),
        };
        let mut object = Map::new();
        object.insert("name".to_owned(), function.clone().into());
        chat::member(&mut object, "description", value("description"));
        chat::member(&mut object, "parameters", parameters);
        chat::member(&mut object, "strict", value("strict"));
        let is_deferred = tool.boolean(&["defer_loading"], false)? || is_deferred;
        self.functions
            .push(json!({"type": "function", "function": object, "defer_loading": is_deferred}));
        self.insert(ClientTool {
            kind,
            name: name.to_owned(),
            namespace: namespace.map(str::to_owned),
            function,
            place,
        });
        Ok(())
    }

    fn insert(&mut self, tool: ClientTool) {
        let number = self.tools.len();
        let key = (tool.namespace.clone(), tool.name.clone());
        self.by_name.insert(key, number);
        self.by_function.insert(tool.function.clone(), number);
        self.tools.push(tool);
    }

    /// Returns the functions in the format of chat completions, and forgets them.
    pub fn take_functions(&mut self) -> Vec<Value> {
        let mut functions = std::mem::take(&mut self.functions);
        if self.has_foreign_search {
            chat::show_deferred(&mut functions);
        }
        functions
    }

    /// Returns the field that declares the function of this number.
    pub fn place(&self, number: usize) -> Option<&str> {
        self.tools.get(number).map(|tool| tool.place.as_str())
    }

    /// Returns the name of the function that the model sees for a call that the client sends back.
    pub fn function_for(&self, name: &str, namespace: Option<&str>) -> String {
        let key = (namespace.map(str::to_owned), name.to_owned());
        let number = self.by_name.get(&key);
        number
            .map_or(name, |&number| &self.tools[number].function)
            .to_owned()
    }

    /// Returns the tool whose function the model called.
    pub fn tool_for(&self, function: &str) -> Option<&ClientTool> {
        self.by_function
            .get(function)
            .map(|&number| &self.tools[number])
    }

    /// Translates `tool_choice`. Drops the tools that it does not allow.
    pub fn choose(&mut self, choice: &Value) -> Result<Value> {
        if !choice.is_object() {
            return Ok(choice.clone());
        }
        let fields = Fields::from_value("tool_choice", choice)?;
        let function = |fields: &Fields<'_>| -> Result<Option<String>> {
            let namespace = fields.text(&["namespace"])?;
            let name = match fields.text(&["type"])? {
                Some(SEARCH) => Some(SEARCH),
                _ => fields.text(&["name"])?,
            };
            Ok(name.map(|name| self.function_for(name, namespace)))
        };
        if fields.text(&["type"])? != Some("allowed_tools") {
            return Ok(match function(&fields)? {
                Some(name) => json!({"type": "function", "function": {"name": name}}),
                None => {
                    let message = "names no function or custom tool";
                    return Err(ApiError::field("tool_choice", message));
                }
            });
        }
        let mut allowed = BTreeSet::new();
        for (i, tool) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
            let tool = Fields::from_value(&format!("tool_choice.tools[{i}]"), tool)?;
            allowed.extend(function(&tool)?);
        }
        let tools = std::mem::take(&mut self.tools);
        let all = tools.into_iter().zip(std::mem::take(&mut self.functions));
        (self.by_name, self.by_function) = Default::default();
        for (tool, function) in all.filter(|(tool, _)| allowed.contains(&tool.function)) {
            self.insert(tool);
            self.functions.push(function);
        }
        Ok(fields.text(&["mode"])?.unwrap_or("auto").into())
    }
}

/// Returns the arguments of a custom tool's function for an input.
pub fn arguments_for(input: &str) -> String {
    json!({INPUT: input}).to_string()
}

/// Returns the input of a custom tool from the arguments of its function. Those of an answer that
/// was cut stay as they are.
pub fn input_of(arguments: &str) -> String {
    let object = serde_json::from_str::<Map<String, Value>>(arguments);
    match object.ok().and_then(|mut object| object.remove(INPUT)) {
        Some(Value::String(input)) => input,
        _ => arguments.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_of_all_kinds_become_functions() {
        let list = json!([
            {"type": "function", "name": "look", "parameters": {"type": "object"}},
            {"type": "custom", "name": "apply_patch", "description": "Patches",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
            {"type": "namespace", "name": "agents", "tools": [
                {"type": "function", "name": "look"},
                {"type": "function", "name": "close"},
            ]},
            {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
            {"type": "tool_search", "execution": "server"},
            {"type": "web_search"},
        ]);
        let mut tools = ClientTools::default();
        tools.add("tools", list.as_array().unwrap(), false).unwrap();
        let names = |tools: &ClientTools| {
            let names = tools.functions.iter();
            let names = names.map(|tool| tool["function"]["name"].as_str().unwrap().to_owned());
            names.collect::<Vec<_>>()
        };
        let expected = [
            "look",
            "apply_patch",
            "tool_search",
            "agents__look",
            "close",
        ];
        assert_eq!(names(&tools), expected);
        assert_eq!(tools.place(4), Some("tools[2].tools[1]"));
        let input = &tools.functions[1]["function"]["parameters"]["properties"]["input"];
        let description = input["description"].as_str().unwrap();
        assert!(
            description.ends_with("lark grammar:\nstart: /x/"),
            "{description}"
        );
        assert_eq!(tools.function_for("look", Some("agents")), "agents__look");
        assert_eq!(tools.function_for("look", None), "look");
        assert_eq!(tools.function_for("gone", Some("agents")), "gone");
        let called = tools.tool_for("agents__look").unwrap();
        assert_eq!(
            (called.name.as_str(), called.namespace.as_deref()),
            ("look", Some("agents"))
        );
        assert_eq!(
            tools.tool_for("apply_patch").unwrap().kind,
            ToolKind::Custom
        );

        // A search finds a known tool and a new one.
        let found = json!([{"type": "namespace", "name": "agents", "tools": [
            {"type": "function", "name": "close"},
            {"type": "function", "name": "open"},
        ]}]);
        tools
            .add("input[1].tools", found.as_array().unwrap(), true)
            .unwrap();
        assert_eq!(names(&tools)[5..], ["open"]);
        assert_eq!(tools.functions[5]["defer_loading"], true);
        assert_eq!(tools.functions[0]["defer_loading"], false);

        let choose = |tools: &mut ClientTools, choice: Value| tools.choose(&choice).unwrap();
        let function = |name: &str| json!({"type": "function", "function": {"name": name}});
        let custom = json!({"type": "custom", "name": "apply_patch"});
        assert_eq!(choose(&mut tools, custom.clone()), function("apply_patch"));
        assert_eq!(choose(&mut tools, json!("required")), "required");
        let allowed = json!({"type": "allowed_tools", "mode": "required",
            "tools": [custom, {"type": "function", "name": "look", "namespace": "agents"}]});
        assert_eq!(choose(&mut tools, allowed), "required");
        assert_eq!(names(&tools), ["apply_patch", "agents__look"]);
        assert_eq!(tools.place(1), Some("tools[2].tools[0]"));
    }

    #[test]
    fn names_are_short_and_unique() {
        let function = |name: &str| json!({"type": "function", "name": name});
        let namespace = |name: &str| {
            json!({"type": "namespace", "name": name,
            "tools": [function("look"), function("a__look")]})
        };
        let mut tools = ClientTools::default();
        let list = [
            namespace("a"),
            function("look"),
            namespace("b"),
            function("look"),
        ];
        tools.add("tools", &list, false).unwrap();
        let mut names: Vec<_> = tools
            .tools
            .iter()
            .map(|tool| tool.function.clone())
            .collect();
        assert_eq!(
            names,
            ["look", "a__look", "a__a__look", "b__look", "b__a__look"]
        );
        names.dedup();
        assert_eq!(names.len(), 5);
        assert_eq!(tools.tool_for("look").unwrap().namespace, None);
        for (name, namespace) in [("look", Some("a")), ("a__look", Some("b"))] {
            let function = tools.function_for(name, namespace);
            assert_eq!(tools.tool_for(&function).unwrap().name, name);
        }
        let long = namespace(&"x".repeat(MAX_NAME + 1));
        let error = tools.add("tools", &[long], false).unwrap_err();
        assert!(error.is_about("tools[0].name"), "{error:?}");
        let many: Vec<_> = (0..=chat::MOST).map(|n| function(&n.to_string())).collect();
        let error = ClientTools::default()
            .add("tools", &many, false)
            .unwrap_err();
        assert!(
            error.is_about(&format!("tools[{}]", chat::MOST)),
            "{error:?}"
        );
    }

    /// Without a search by the client, a deferred tool would never be found.
    #[test]
    fn tools_that_openai_would_search_are_shown() {
        let late = json!({"type": "function", "name": "late", "defer_loading": true});
        for (execution, is_deferred) in [("client", true), ("server", false)] {
            let mut tools = ClientTools::default();
            let search = json!({"type": "tool_search", "execution": execution});
            tools.add("tools", &[late.clone(), search], false).unwrap();
            assert_eq!(tools.take_functions()[0]["defer_loading"], is_deferred);
        }
    }

    #[test]
    fn inputs_of_custom_tools_survive_as_arguments() {
        let input = "*** Begin Patch\n\"x\" \\ é\n";
        assert_eq!(input_of(&arguments_for(input)), input);
        assert_eq!(input_of("{\"input\": \"cut"), "{\"input\": \"cut");
    }
}
