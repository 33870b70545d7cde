//! Generates text with a language model and prints each piece as it arrives.
//!
//! ```sh
//! cargo run --release -p samite --example generate -- model.gguf "Once upon a time"
//! ```

use samite::llm::{
    Context, ContextOptions, GenerateOptions, Model, ModelOptions, Session, SyntheticModel,
};
use samite::prelude::*;
use samite::text::{Sampler, SamplerParams};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().map(PathBuf::from);
    let prompt = arguments.next().unwrap_or("Once upon a time".into());
    if let Some(path) = path {
        return generate(&path, &prompt);
    }
    let path = std::env::temp_dir().join(format!("samite-generate-{}.gguf", std::process::id()));
    println!("no model was given, so a random one is made up: expect no sense from it");
    SyntheticModel::tiny("llama").write(&path)?;
    let result = generate(&path, &prompt);
    std::fs::remove_file(&path)?;
    result
}

fn generate(path: &Path, prompt: &str) -> Result<(), Box<dyn std::error::Error>> {
    // Devices in order of preference. Rules could place some layers on one device and some on
    // another.
    let devices = Registry::built_in(Default::default()).automatic();
    let model = Model::load(path, &ModelOptions::new(devices))?;
    let tokens = model.tokenizer()?.tokenize(prompt, true, false)?;

    // A context owns the KV cache and the memory of all graphs; a session is one text in it.
    let mut session = Session::new(Context::new(model, ContextOptions::default())?)?;
    let mut sampler = Sampler::new(SamplerParams {
        temperature: 0.7,
        ..SamplerParams::default()
    })?;
    let options = GenerateOptions {
        max_tokens: Some(100),
        ..GenerateOptions::default()
    };
    print!("{prompt}");
    let generation = session.generate(&tokens, &mut sampler, &options, |piece| {
        print!("{piece}");
        match std::io::stdout().flush() {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    let speed = generation.timings.generation_per_second();
    println!("\n{speed:.0} tokens/s; {:?}", generation.finish);
    Ok(())
}
