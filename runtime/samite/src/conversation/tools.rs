//! Functions that a model can call.

use super::Conversation;
use crate::chat::{AnswerCall, Message, Tool};
use serde_json::Value;
use std::fmt;

type ToolFunction = Box<dyn FnMut(Value) -> Result<String, String> + Send>;

/// All tools, each with its function if this program executes it.
#[derive(Default)]
pub(super) struct Tools(Vec<(Tool, Option<ToolFunction>)>);

impl fmt::Debug for Tools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.iter().map(|(tool, _)| &tool.function.name);
        f.debug_set().entries(names).finish()
    }
}

impl Tools {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn list(&self) -> Vec<Tool> {
        self.0.iter().map(|(tool, _)| tool.clone()).collect()
    }

    fn set(&mut self, tool: Tool, function: Option<ToolFunction>) {
        self.0
            .retain(|(known, _)| known.function.name != tool.function.name);
        self.0.push((tool, function));
    }

    fn find(&mut self, name: &str) -> Option<&mut (Tool, Option<ToolFunction>)> {
        self.0
            .iter_mut()
            .find(|(tool, _)| tool.function.name == name)
    }

    /// Returns whether there are calls and all can be answered here. A call of an unknown tool
    /// counts: its answer says that the tool does not exist.
    pub fn answer_all(&mut self, calls: &[AnswerCall]) -> bool {
        let mut answers = |call: &AnswerCall| {
            self.find(&call.name)
                .is_none_or(|(_, function)| function.is_some())
        };
        !calls.is_empty() && calls.iter().all(&mut answers)
    }

    /// Returns the message with the result of a call. Errors are reported to the model, which may
    /// try again.
    pub fn call(&mut self, call: &AnswerCall) -> Message {
        let result = match self.find(&call.name) {
            Some((_, Some(function))) => match serde_json::from_str(&call.arguments) {
                Ok(arguments) => function(arguments),
                Err(error) => Err(format!("the arguments are not valid JSON: {error}")),
            },
            _ => Err(format!("there is no tool \"{}\"", call.name)),
        };
        let text = result.unwrap_or_else(|error| format!("error: {error}"));
        Message {
            name: Some(call.name.clone()),
            ..Message::tool(call.id.clone(), text)
        }
    }
}

impl Conversation {
    /// Registers a function that the model can call with JSON arguments. The model receives the
    /// returned text. It receives an error as well and may try again. Replaces an earlier function
    /// of the same name.
    ///
    /// ```no_run
    /// use samite::{Conversation, chat::Tool};
    /// use serde_json::json;
    ///
    /// let mut chat = Conversation::open("model.gguf")?;
    /// let city = json!({"type": "string"});
    /// let arguments =
    ///     json!({"type": "object", "properties": {"city": city}, "required": ["city"]});
    /// chat.add_tool(Tool::new("weather", "The weather in a city", arguments), |arguments| {
    ///     let city = arguments["city"].as_str().ok_or("which city?")?;
    ///     Ok(format!("It is sunny in {city}."))
    /// });
    /// println!("{}", chat.ask("Do I need an umbrella in Oslo?")?);
    /// # Ok::<_, samite::ConversationError>(())
    /// ```
    pub fn add_tool(
        &mut self,
        tool: Tool,
        function: impl FnMut(Value) -> Result<String, String> + Send + 'static,
    ) {
        self.tools.set(tool, Some(Box::new(function)));
    }

    /// Declares a function that the application executes itself. Calls are part of the
    /// [`Reply`](super::Reply); the application answers with a message of role `tool`.
    pub fn declare_tool(&mut self, tool: Tool) {
        self.tools.set(tool, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_last_tool_of_a_name_is_called_with_valid_arguments_only() {
        let mut tools = Tools::default();
        let tool = || Tool::new("f", "", json!({}));
        tools.set(tool(), Some(Box::new(|_| Ok("first".to_owned()))));
        tools.set(tool(), Some(Box::new(|_| Ok("second".to_owned()))));
        assert_eq!(tools.list().len(), 1);
        let mut call = |arguments: &str| {
            let call = AnswerCall {
                name: "f".to_owned(),
                arguments: arguments.to_owned(),
                ..AnswerCall::default()
            };
            tools.call(&call).content.text().unwrap()
        };
        assert_eq!(call("{}"), "second");
        assert!(call("{").contains("not valid JSON"));
        let call = AnswerCall {
            name: "g".to_owned(),
            ..AnswerCall::default()
        };
        let told = tools.call(&call).content.text().unwrap();
        assert_eq!(told, "error: there is no tool \"g\"");
    }
}
