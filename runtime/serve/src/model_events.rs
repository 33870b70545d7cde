//! Events about the models of a server, in llama-server's format (`GET /models/sse`).

use crate::app::lock;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::sync::broadcast;

/// Sends events to all clients that follow them.
#[derive(Debug)]
pub struct ModelEvents(Mutex<Option<broadcast::Sender<Arc<str>>>>);

impl Default for ModelEvents {
    fn default() -> Self {
        ModelEvents(Mutex::new(Some(broadcast::channel(Self::MAX_PENDING).0)))
    }
}

impl ModelEvents {
    /// Maximum number of events that a slow client may lag behind; older ones are dropped.
    const MAX_PENDING: usize = 256;

    /// Sends an event about a model.
    pub fn send(&self, model: &str, event: &str, data: Option<Value>) {
        let mut told = json!({"model": model, "event": event});
        if let Some(data) = data {
            told["data"] = data;
        }
        if let Some(sender) = &*lock(&self.0) {
            // Fails without subscribers.
            let _ = sender.send(told.to_string().into());
        }
    }

    /// Sends the status of a model.
    pub fn status(&self, model: &str, status: &str) {
        self.send(model, "model_status", Some(json!({"status": status})));
    }

    /// Follows the events from now on. Returns `None` if the server is ending.
    pub fn subscribe(&self) -> Option<broadcast::Receiver<Arc<str>>> {
        lock(&self.0).as_ref().map(broadcast::Sender::subscribe)
    }

    /// Ends the streams of all clients.
    pub fn close(&self) {
        lock(&self.0).take();
    }
}
