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
    /// The functions in the format of chat completions.
    functions: Vec<Value>,
}

/// Parameter of a custom tool's function.
const INPUT: &str = "input";

fn needed<'a>(tool: &Fields<'a>, place: &str) -> Result<&'a str> {
    let name = tool.text(&["name"])?;
    name.ok_or_else(|| ApiError::field(format!("{place}.name"), "is missing"))
}

/// Returns the parameters of a custom tool's function.
fn input_parameters(tool: &Fields<'_>) -> Result<Value> {
    let mut description = "The whole input of the tool".to_owned();
    if let Some(format) = tool.fields("format")?
        && let Some(definition) = format.text(&["definition"])?
    {
        let syntax = format.text(&["syntax"])?.unwrap_or("lark");
        description += &format!(", which keeps to this {syntax} grammar:\n{definition}");
    }
    Ok(json!({
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": description}},
        "required": [INPUT],
        "additionalProperties": false,
    }))
}

impl ClientTools {
    /// Adds a list of tools. Deferred ones can be called, but are not part of the prompt: the
    /// conversation describes them where the client found them.
    pub fn add(&mut self, place: &str, list: &[Value], is_deferred: bool) -> Result<()> {
        for (i, tool) in list.iter().enumerate() {
            let place = format!("{place}[{i}]");
            let tool = Fields::from_value(&place, tool)?;
            if tool.text(&["type"])? == Some("namespace") {
                let namespace = needed(&tool, &place)?;
                let list = tool.list("tools")?.unwrap_or_default();
                for (i, tool) in list.iter().enumerate() {
                    let place = format!("{place}.tools[{i}]");
                    let tool = Fields::from_value(&place, tool)?;
                    self.add_one(place, &tool, Some(namespace), is_deferred)?;
                }
            } else {
                self.add_one(place, &tool, None, is_deferred)?;
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
        let (kind, name, parameters) = match tool.text(&["type"])? {
            Some("function") => (
                ToolKind::Function,
                needed(tool, &place)?,
                value("parameters"),
            ),
            Some("custom") => (
                ToolKind::Custom,
                needed(tool, &place)?,
                Some(input_parameters(tool)?),
            ),
            Some(name @ "tool_search") if tool.text(&["execution"])? == Some("client") => {
                (ToolKind::Search, name, value("parameters"))
            }
            // Services of OpenAI's, which clients list anyway.
            _ => return Ok(()),
        };
        let key = (namespace.map(str::to_owned), name.to_owned());
        // Each search may find the same tool.
        if is_deferred && self.by_name.contains_key(&key) {
            return Ok(());
        }
        let function = match namespace {
            Some(namespace) if self.by_function.contains_key(name) => {
                format!("{namespace}__{name}")
            }
            _ => name.to_owned(),
        };
        let number = self.tools.len();
        self.by_name.entry(key).or_insert(number);
        self.by_function.entry(function.clone()).or_insert(number);
        let mut object = Map::new();
        object.insert("name".to_owned(), function.clone().into());
        chat::member(&mut object, "description", value("description"));
        chat::member(&mut object, "parameters", parameters);
        chat::member(&mut object, "strict", value("strict"));
        let is_deferred = is_deferred || tool.boolean(&["defer_loading"], false)?;
        self.functions
            .push(json!({"type": "function", "function": object, "defer_loading": is_deferred}));
        self.tools.push(ClientTool {
            kind,
            name: name.to_owned(),
            namespace: namespace.map(str::to_owned),
            function,
            place,
        });
        Ok(())
    }

    pub fn functions(&self) -> &[Value] {
        &self.functions
    }

    /// Returns the field that declares the function of this number.
    pub fn place(&self, number: usize) -> Option<&str> {
        self.tools.get(number).map(|tool| tool.place.as_str())
    }

    /// Returns the name of the function that the model sees for a call that the client sends back.
    pub fn function_of(&self, name: &str, namespace: Option<&str>) -> String {
        let key = (namespace.map(str::to_owned), name.to_owned());
        let number = self.by_name.get(&key);
        number
            .map_or(name, |&number| &self.tools[number].function)
            .to_owned()
    }

    /// Returns the tool whose function the model called.
    pub fn called(&self, function: &str) -> Option<&ClientTool> {
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
                Some(name @ "tool_search") => Some(name),
                _ => fields.text(&["name"])?,
            };
            Ok(name.map(|name| self.function_of(name, namespace)))
        };
        if fields.text(&["type"])? != Some("allowed_tools") {
            return Ok(match function(&fields)? {
                Some(name) => json!({"type": "function", "function": {"name": name}}),
                None => choice.clone(),
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
            let number = self.tools.len();
            let key = (tool.namespace.clone(), tool.name.clone());
            self.by_name.entry(key).or_insert(number);
            self.by_function
                .entry(tool.function.clone())
                .or_insert(number);
            self.tools.push(tool);
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
            let names = tools.functions().iter();
            let names = names.map(|tool| tool["function"]["name"].as_str().unwrap().to_owned());
            names.collect::<Vec<_>>()
        };
        let expected = [
            "look",
            "apply_patch",
            "agents__look",
            "close",
            "tool_search",
        ];
        assert_eq!(names(&tools), expected);
        assert_eq!(tools.place(3), Some("tools[2].tools[1]"));
        let input = &tools.functions()[1]["function"]["parameters"]["properties"]["input"];
        let description = input["description"].as_str().unwrap();
        assert!(
            description.ends_with("lark grammar:\nstart: /x/"),
            "{description}"
        );
        assert_eq!(tools.function_of("look", Some("agents")), "agents__look");
        assert_eq!(tools.function_of("look", None), "look");
        assert_eq!(tools.function_of("gone", Some("agents")), "gone");
        let called = tools.called("agents__look").unwrap();
        assert_eq!(
            (called.name.as_str(), called.namespace.as_deref()),
            ("look", Some("agents"))
        );
        assert_eq!(tools.called("apply_patch").unwrap().kind, ToolKind::Custom);

        // A search finds a known tool and a new one.
        let found = json!([{"type": "namespace", "name": "agents", "tools": [
            {"type": "function", "name": "close"},
            {"type": "function", "name": "open"},
        ]}]);
        tools
            .add("input[1].tools", found.as_array().unwrap(), true)
            .unwrap();
        assert_eq!(names(&tools)[5..], ["open"]);
        assert_eq!(tools.functions()[5]["defer_loading"], true);
        assert_eq!(tools.functions()[0]["defer_loading"], false);

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
    fn inputs_of_custom_tools_survive_as_arguments() {
        let input = "*** Begin Patch\n\"x\" \\ é\n";
        assert_eq!(input_of(&arguments_for(input)), input);
        assert_eq!(input_of("{\"input\": \"cut"), "{\"input\": \"cut");
    }
}
