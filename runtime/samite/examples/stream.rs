//! Streams an answer asynchronously. This example uses tokio, but any runtime works.
//!
//! ```sh
//! cargo run --release -p samite --example stream -- model.gguf "Once upon a time"
//! ```

use samite::chat::AnswerEvent;
use samite::{AnswerUpdate, AsyncConversation, Conversation};
use tokio_stream::StreamExt;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or("name a model's file")?;
    let question = arguments.next().unwrap_or("Once upon a time".to_owned());
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let mut chat = AsyncConversation::new(Conversation::open(model)?)?;
        let mut answering = chat.ask(question);
        while let Some(update) = answering.next().await {
            match update? {
                AnswerUpdate::Event(AnswerEvent::Content(text)) => print!("{text}"),
                AnswerUpdate::Event(_) => {}
                AnswerUpdate::End(reply) => {
                    let tokens = reply
                        .generation
                        .map_or(0, |generation| generation.tokens.len());
                    println!("\n({tokens} tokens)");
                }
            }
        }
        Ok(())
    })
}
