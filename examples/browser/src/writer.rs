//! JavaScript interface.

#![allow(deprecated)] // promise integration counts as experimental in wasm-bindgen

use js_sys::Function;
use samite::gguf::GgufFile;
use samite::llm::{Context, ContextOptions, GenerateOptions, Model, ModelOptions, Session};
use samite::registry::Registry;
use samite::text::{Sampler, SamplerParams};
use std::ops::ControlFlow;
use wasm_bindgen::prelude::*;

/// A model on a device.
#[wasm_bindgen]
pub struct Writer {
    session: Session,
    device: String,
}

fn text(error: impl std::fmt::Display) -> JsError {
    JsError::new(&error.to_string())
}

/// Returns the reason for each device that cannot be used.
fn reasons(registry: &Registry) -> String {
    let reasons = registry.rejected().into_iter();
    let reasons = reasons.map(|(_, rejected)| format!("{}: {}", rejected.what, rejected.why));
    reasons.collect::<Vec<_>>().join("; ")
}

fn open(name: &str) -> Result<Writer, JsError> {
    let registry = Registry::built_in(Default::default());
    let devices = registry.parse(name).map_err(|error| {
        let reasons = reasons(&registry);
        text(if reasons.is_empty() {
            error.to_string()
        } else {
            reasons
        })
    })?;
    let device = devices.iter().map(|device| device.description());
    let device = device.collect::<Vec<_>>().join(", ");
    let file = GgufFile::from_static("stories.gguf", samite_stories::MODEL).map_err(text)?;
    let model = Model::from_gguf(&file, &ModelOptions::new(devices)).map_err(text)?;
    let context = Context::new(model, ContextOptions::default()).map_err(text)?;
    let session = Session::new(context).map_err(text)?;
    Ok(Writer { session, device })
}

#[wasm_bindgen]
impl Writer {
    /// Opens the model on the CPU.
    pub fn on_cpu() -> Result<Writer, JsError> {
        open("cpu")
    }

    /// Opens the model on the GPU.
    #[wasm_bindgen(jspi)]
    pub fn on_gpu() -> Result<Writer, JsError> {
        open("wgpu0")
    }

    /// Returns the device's name.
    pub fn device(&self) -> String {
        self.device.clone()
    }

    /// Continues `prompt` by up to `tokens` tokens and calls `on_piece` with each piece of text.
    /// Returns the speed in tokens per second.
    pub fn write(
        &mut self,
        prompt: &str,
        tokens: usize,
        temperature: f32,
        seed: u32,
        on_piece: &Function,
    ) -> Result<f64, JsError> {
        self.session.clear().map_err(text)?;
        let tokenizer = self.session.tokenizer();
        let prompt = tokenizer.tokenize(prompt, true, false).map_err(text)?;
        let mut sampler = Sampler::new(SamplerParams {
            temperature,
            seed: seed.into(),
            ..SamplerParams::default()
        })
        .map_err(text)?;
        let options = GenerateOptions {
            max_tokens: Some(tokens),
            ..GenerateOptions::default()
        };
        let piece = |piece: &str| match on_piece.call1(&JsValue::NULL, &JsValue::from_str(piece)) {
            Ok(_) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        let generation = self
            .session
            .generate(&prompt, &mut sampler, &options, piece)
            .map_err(text)?;
        Ok(generation.timings.generation_per_second())
    }

    /// Runs [`write`](Writer::write) on the GPU, with promise integration.
    #[wasm_bindgen(jspi)]
    pub fn write_waiting(
        &mut self,
        prompt: &str,
        tokens: usize,
        temperature: f32,
        seed: u32,
        on_piece: &Function,
    ) -> Result<f64, JsError> {
        self.write(prompt, tokens, temperature, seed, on_piece)
    }
}
