//! A server with a small model on the CPU, and its client.

// Shared test helpers; each test uses only some.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, missing_docs)]

pub mod parrot;

use samite_core::{CancelToken, Device, Environment};
use samite_cpu::{CpuDevice, CpuOptions};
use samite_gguf::GgufFile;
use samite_llm::{Context, ContextOptions, Model, ModelOptions};
use samite_requests::{Engine, EngineOptions, drive};
use samite_serve::{App, Hub, ServeOptions, serve};
use samite_testing::HANG_GUARD;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;

pub const CONTEXT: usize = 1024;

pub fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let file = GgufFile::from_static("stories", samite_stories::MODEL).unwrap();
        Model::from_gguf(&file, &ModelOptions::new(vec![cpu()])).unwrap()
    })
}

fn cpu() -> Arc<dyn Device> {
    CpuDevice::new(CpuOptions::default().with_threads(1))
}

/// A context that takes much longer to fill than a stopped request may run.
pub const ENDLESS: usize = 1 << 16;

/// Creates a model's engine, with a context of [`CONTEXT`] unless the options set another one.
pub fn engine(model: &Arc<Model>, options: EngineOptions, environment: Environment) -> Engine {
    let length = options.context.unwrap_or(CONTEXT);
    let options = EngineOptions {
        context: Some(length),
        ..options
    };
    let context = ContextOptions {
        n_ctx: Some(length * options.slots),
        n_seq: options.n_seq(),
        environment,
        ..ContextOptions::default()
    };
    let context = Context::new(Arc::clone(model), context).unwrap();
    Engine::new(context, options).unwrap()
}

/// Creates a served model with its engine thread.
pub fn app(options: ServeOptions, engine_options: EngineOptions) -> (App, JoinHandle<()>) {
    served_by(
        options,
        engine(model(), engine_options, Environment::system()),
    )
}

fn served_by(options: ServeOptions, engine: Engine) -> (App, JoinHandle<()>) {
    let model = Arc::clone(engine.context().model());
    let (handle, driver) = drive(engine).unwrap();
    let options = served(options);
    let app = App::new(options, model, Some(handle), None).unwrap();
    (app, driver)
}

/// Completes the options for test servers.
pub fn served(options: ServeOptions) -> ServeOptions {
    ServeOptions {
        port: 0,
        template: Some("chatml".to_owned()),
        seed: Some(1),
        metrics: true,
        ..options
    }
}

/// A server that stops when this value is dropped.
pub struct Server {
    pub address: String,
    pub stop: CancelToken,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    pub fn start(options: ServeOptions, engine_options: EngineOptions) -> Self {
        let environment = Environment::system();
        Server::with(options, engine(model(), engine_options, environment))
    }

    /// Starts a server with this engine.
    pub fn with(options: ServeOptions, engine: Engine) -> Self {
        let (app, driver) = served_by(options, engine);
        let mut server = Server::with_hub(Hub::single(app));
        server.threads.push(driver);
        server
    }

    /// Starts a server with these models.
    pub fn with_hub(hub: Hub) -> Self {
        let stop = CancelToken::new();
        let (sender, receiver) = mpsc::channel();
        let stopped = stop.clone();
        let hub = Arc::new(hub);
        let server = std::thread::spawn(move || {
            serve(Arc::clone(&hub), &stopped, |addresses| {
                sender.send(addresses[0].clone()).unwrap();
            })
            .unwrap();
            hub.end();
        });
        Server {
            address: receiver.recv().unwrap(),
            stop,
            threads: vec![server],
        }
    }

    pub fn simple() -> Self {
        Server::start(ServeOptions::default(), EngineOptions::default())
    }

    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(HANG_GUARD)).unwrap();
        let length = body.len();
        // In a single write: a stopping server may respond before it has read everything.
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    /// Sends a request. Returns the status, the headers and the body.
    pub fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> (u16, String, String) {
        let mut text = String::new();
        self.send(method, path, headers, body)
            .read_to_string(&mut text)
            .unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.to_lowercase().contains("transfer-encoding: chunked") {
            unchunked(body)
        } else {
            body.to_owned()
        };
        (status, head.to_owned(), body)
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, body) = self.ask("POST", path, "", &body.to_string());
        (
            status,
            serde_json::from_str(&body).unwrap_or(Value::String(body)),
        )
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        let (status, _, body) = self.ask("GET", path, "", "");
        (
            status,
            serde_json::from_str(&body).unwrap_or(Value::String(body)),
        )
    }

    /// Waits until some slot is busy, or none.
    pub fn wait_until(&self, is_busy: bool) {
        samite_testing::wait_until(format_args!("some slot is at work: {is_busy}"), || {
            let (_, slots) = self.get("/slots");
            let mut slots = slots.as_array().unwrap().iter();
            slots.any(|slot| slot["is_processing"] == json!(true)) == is_busy
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
        for thread in self.threads.drain(..) {
            let result = thread.join();
            if !std::thread::panicking() {
                result.unwrap();
            }
        }
    }
}

pub fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        text.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    text
}
