//! HTTP request bodies.

use samite_core::environment::Environment;
use samite_gguf::GgufFile;
use samite_llm::{Context, ContextOptions, Model, ModelOptions};
use samite_reference::{ReferenceDevice, ReferenceOptions};
use samite_requests::{Engine, EngineOptions, drive};
use samite_serve::{App, ServeOptions, fuzz};
use samite_vision::{Encoder, EncoderOptions, SharedEncoder};
use std::error::Error;
use std::sync::{Arc, LazyLock};

/// Image encoder of the model, which divides images into tiles.
const ENCODER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../runtime/vision/tests/fixtures/idefics3.gguf"
);

/// A served model that never computes.
static APP: LazyLock<Arc<App>> =
    LazyLock::new(|| Arc::new(app().expect("the stories model can be served")));

fn app() -> Result<App, Box<dyn Error>> {
    let device = ReferenceDevice::new(ReferenceOptions::default());
    let file = GgufFile::from_static("stories", samite_stories::MODEL)?;
    let encoder = EncoderOptions::new(vec![device.clone()]);
    let encoder = Encoder::load(ENCODER, &encoder)?;
    let model = Model::from_gguf(&file, &ModelOptions::new(vec![device]))?;
    let options = EngineOptions::default();
    let context = ContextOptions {
        n_ctx: Some(256),
        n_seq: options.n_seq(),
        environment: Environment::system(),
        ..ContextOptions::default()
    };
    let context = Context::new(Arc::clone(&model), context)?;
    let (handle, _thread) = drive(Engine::new(context, options)?)?;
    let options = ServeOptions {
        template: Some("chatml".to_owned()),
        ..ServeOptions::default()
    };
    let app = App::new(options, model, Some(handle), None)?;
    Ok(app.with_encoder(SharedEncoder::new(encoder)))
}

/// Parses a request body. The first byte selects the API.
pub fn body(bytes: &[u8]) {
    if let Some((&interface, body)) = bytes.split_first() {
        let _ = fuzz::read_body(&APP, interface.into(), body);
    }
}
