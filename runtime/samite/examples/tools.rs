//! Lets a model call a function of this program, then asks for an answer of a given Rust type.
//!
//! ```sh
//! cargo run --release -p samite --example tools -- model.gguf
//! ```

use samite::{Conversation, chat::Tool};
use serde_json::json;

/// The structured answer that the model must return.
#[derive(Debug, serde::Deserialize, schemars::JsonSchema)]
#[expect(dead_code)]
struct Advice {
    takes_umbrella: bool,
    #[schemars(length(max = 60))]
    reason: String,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("name a model's file")?;
    let mut chat = Conversation::open(&model)?;
    chat.options.max_tokens = Some(300);
    let arguments =
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let weather = Tool::new("weather", "The weather in a city now", arguments);
    chat.add_tool(weather, |arguments| {
        let city = arguments["city"].as_str().ok_or("which city?")?;
        println!("(the model asks for the weather in {city})");
        Ok(format!("It rains in {city}."))
    });
    let answer = chat.ask("Do I need an umbrella in Oslo today?")?;
    println!("{answer}");

    // A second conversation, without tools, on the same subject.
    let mut chat = Conversation::open(&model)?;
    chat.options.max_tokens = Some(300);
    let advice: Advice = chat.ask_for(format!("In JSON, please: {answer}"))?;
    println!("{advice:?}");
    Ok(())
}
