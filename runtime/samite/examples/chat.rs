//! Answers questions from standard input, one per line.
//!
//! ```sh
//! echo "Why is the sky blue?" | cargo run --release -p samite --example chat -- model.gguf
//! ```

use samite::{Conversation, chat::AnswerEvent};
use std::{io::Write, ops::ControlFlow};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("name a model's file")?;
    let mut chat = Conversation::open(model)?;
    for line in std::io::stdin().lines() {
        chat.ask_with(line?, |event| {
            if let AnswerEvent::Content(text) = event {
                print!("{text}");
                // Ignore errors: the reader of our output may have closed the pipe.
                let _ = std::io::stdout().flush();
            }
            ControlFlow::Continue(())
        })?;
        println!();
    }
    Ok(())
}
